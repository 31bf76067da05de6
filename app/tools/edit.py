"""edit: texts of a file replaced by others, all of them or none, in one step."""

import os
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, ClassVar, Final, Literal

from pydantic import Field

from app.domain.abort import AbortSignal
from app.domain.tool_call import ToolResult, text_content
from app.domain.workspace import WorkspaceOptions
from app.errors import ErrorCode, ToolError
from app.sandbox.containment import Root, Target, tool_error_from_oserror
from app.sandbox.disk import taking
from app.sandbox.files import (
    ETAG_HASH_BYTES,
    etag_of,
    etag_of_file,
    etag_of_written,
    read_whole,
    replace_file,
    same_etag,
)
from app.tools.base import OnUpdate, PartialResult, ToolAnnotations, ToolDefinition
from app.tools.edit_matching import Edit, EditedText, apply_edits, check_edits
from app.tools.environment import ToolEnvironment
from app.tools.model_tool import ArgumentsModel, DetailsModel, ModelTool, define, parse_container, rename_fields
from app.tools.text_encoding import SAMPLE_BYTES, NotText, TextEncoding, detect_encoding, encoding_named
from app.tools.unified_diff import unified_diff_from_spans

MAX_EDITS: Final = 1_000

EDIT_ANNOTATIONS: Final = ToolAnnotations(
    title="Edit a file",
    read_only_hint=False,
    destructive_hint=True,
    idempotent_hint=False,
    open_world_hint=False,
)

_ITEM_SPELLINGS: Final[Mapping[str, str]] = {
    "old_string": "oldText",
    "oldString": "oldText",
    "old_str": "oldText",
    "old_text": "oldText",
    "new_string": "newText",
    "newString": "newText",
    "new_str": "newText",
    "new_text": "newText",
    "replace_all": "replaceAll",
}


class EditItem(ArgumentsModel):
    old_text: str = Field(
        description="The text to replace, exactly as it stands in the file (without read's line numbers). It must "
        "occur once; take in lines around it where it does not."
    )
    new_text: str = Field(description="What comes there instead, taken literally. Empty deletes.")
    replace_all: bool = Field(default=False, description="Replace every occurrence of oldText.")


class EditArguments(ArgumentsModel):
    path: str = Field(description="The file, relative to the workspace root (or absolute, below it).")
    edits: list[EditItem] = Field(
        min_length=1, max_length=MAX_EDITS, description="The replacements, all of which are made or none."
    )
    match: Literal["sequential", "original"] | None = Field(
        default=None,
        description="What each edit is matched against: the text the edits before it left (sequential), or the file "
        "as it was, where edits must not overlap (original).",
    )
    expected_etag: str | None = Field(
        default=None,
        description="Only edit the file when this is its current etag (from an earlier write or edit).",
    )
    dry_run: bool = Field(default=False, description="Check the edits and show the diff, but write nothing.")


class FuzzyMatchDetails(DetailsModel):
    """What `edits[edit]` replaced: lines (from 1) of the text it was matched against, in the beginning of `text`."""

    edit: int
    start_line: int
    end_line: int
    text: str
    differs: list[str]


class EditDetails(DetailsModel):
    """Sizes are the file's before and after. `edits` were asked for and made `replacements`.

    `first_changed_line` counts from 1. `diff` is a unified diff, None when it was left out (`diff_omitted`). `etag` is
    that of the file as it is after the call. `fuzzy_matches` are the edits whose text was not found exactly.
    """

    path: str
    relative_path: str
    old_bytes: int
    new_bytes: int
    edits: int
    replacements: int
    first_changed_line: int
    diff: str | None
    diff_omitted: bool
    etag: str
    warnings: list[str]
    fuzzy_matches: list[FuzzyMatchDetails]
    dry_run: bool


def edit_definition(options: WorkspaceOptions) -> ToolDefinition:
    limits = options.edit
    several = (
        "must occur exactly once in the file unless replaceAll is set"
        if limits.multiple_matches == "error"
        else "should occur exactly once in the file: of several occurrences the first is replaced, with a warning"
    )
    fuzzy = (
        " Where it does not occur, a place that differs only in typographic quotes, dashes, no-break blanks or blanks "
        "at line ends is taken, if there is just one."
        if limits.fuzzy
        else ""
    )
    definition = define(
        "edit",
        f"Replace texts in a file of the workspace of at most {limits.max_bytes} bytes. Each oldText {several}.{fuzzy} "
        "LF and CRLF match either; the file keeps its line ends and its encoding. When one edit fails, none is made.",
        EditArguments,
        EDIT_ANNOTATIONS,
        limits.execution_mode,
    )
    properties = definition.parameters["properties"]
    match = {**properties["match"], "default": limits.match}
    return replace(definition, parameters={**definition.parameters, "properties": {**properties, "match": match}})


class EditTool(ModelTool[EditArguments]):
    """It also takes one edit at the top level of the arguments, and `edits` as JSON text or as one object."""

    arguments_model = EditArguments
    spellings: ClassVar[Mapping[str, str]] = _ITEM_SPELLINGS

    def __init__(self, environment: ToolEnvironment) -> None:
        super().__init__(edit_definition(environment.options))
        self._environment = environment

    def prepare_arguments(self, args: Any) -> Any:
        prepared = super().prepare_arguments(args)
        if not isinstance(prepared, dict):
            return prepared
        if prepared.get("edits") is None:
            names = [name for name in ("oldText", "newText", "replaceAll") if name in prepared]
            if names:
                prepared["edits"] = [{name: prepared.pop(name) for name in names}]
            return prepared
        edits = prepared["edits"]
        if isinstance(edits, str):
            edits = parse_container(edits, (list, dict))
        if isinstance(edits, dict):
            edits = [edits]
        if isinstance(edits, list):
            edits = [rename_fields(item, _ITEM_SPELLINGS) if isinstance(item, dict) else item for item in edits]
        prepared["edits"] = edits
        return prepared

    async def run(
        self,
        tool_call_id: str,  # noqa: ARG002 - the interface of every tool
        args: EditArguments,
        signal: AbortSignal,
        on_update: OnUpdate,
    ) -> ToolResult:
        environment = self._environment
        edit = _Edit(environment, args, signal)
        result = await environment.mutations.run(environment.files, environment.cwd, edit.resolve, edit.perform, signal)
        warnings: list[str] = result.details["warnings"]
        if warnings:
            told = on_update(PartialResult(text_content("\n".join(warnings)), {"warnings": warnings}))
            if told is not None:
                await told
        return result


class _Edit:
    """One call. Both methods run in the file pool, `perform` while no other change of the file runs."""

    def __init__(self, environment: ToolEnvironment, args: EditArguments, signal: AbortSignal) -> None:
        self._environment = environment
        self._args = args
        self._signal = signal
        self._edits = [Edit(item.old_text, item.new_text, item.replace_all) for item in args.edits]

    def resolve(self) -> Target:
        check_edits(self._edits)
        environment = self._environment
        with Root.open(environment.cwd, environment.root_identity, environment.options.containment) as root:
            return root.target(root.relative(self._args.path), check=self._signal.raise_if_aborted)

    def perform(self, target: Target) -> ToolResult:
        try:
            return self._perform(target)
        except ToolError as error:
            error.details = {"path": target.path, "relativePath": target.relative_path, **error.details}
            raise

    def _perform(self, target: Target) -> ToolResult:
        check = self._signal.raise_if_aborted
        options = self._environment.options.edit
        max_bytes = options.max_bytes
        old, status, current = self._read(target, max_bytes)
        encoding = self._encoding(old, target.shown)
        text = _decoded(old, encoding, target.shown)
        edited = apply_edits(
            text,
            self._edits,
            shown=target.shown,
            match=self._args.match or options.match,
            multiple_matches=options.multiple_matches,
            fuzzy=options.fuzzy,
            max_characters=max_bytes,
            check=check,
        )
        new = self._encoded(edited.text, encoding, target.shown)
        if len(new) > max_bytes:
            raise ToolError(
                ErrorCode.TOO_LARGE,
                f"the edits would make {target.shown} {len(new)} bytes large; at most {max_bytes} are allowed. "
                "Nothing was changed.",
                {"bytes": len(new), "maxBytes": max_bytes},
            )
        diff = _diff(text, edited, encoding, target.relative_path)
        if not self._args.dry_run:
            with taking(self._environment.quota, len(new) - len(old), check):
                replace_file(target, new, commit=self._signal.commit, check=check, expected=status)
            current = etag_of_written(target, new)
        count = len(self._edits)
        details = EditDetails(
            path=target.path,
            relative_path=target.relative_path,
            old_bytes=len(old),
            new_bytes=len(new),
            edits=count,
            replacements=edited.replacements,
            first_changed_line=edited.first_changed_line,
            diff=diff,
            diff_omitted=diff is None,
            etag=current,
            warnings=list(edited.warnings),
            fuzzy_matches=[
                FuzzyMatchDetails(edit=index, **found.to_json()) for index, found in edited.fuzzy_matches.items()
            ],
            dry_run=self._args.dry_run,
        )
        number = f"{count} edit" if count == 1 else f"{count} edits"
        done = (
            f"{number} would apply to {target.shown} (dry run)"
            if self._args.dry_run
            else f"Applied {number} to {target.shown}"
        )
        text_lines = [done, *(f"Warning: {warning}" for warning in edited.warnings)]
        return ToolResult(text_content("\n".join(text_lines)), details.to_json())

    def _read(self, target: Target, max_bytes: int) -> tuple[bytes, os.stat_result, str]:
        """Return the file's content, its status before it was read and its etag, which must be the expected one."""
        check = self._signal.raise_if_aborted
        fd, status = target.open_existing()
        try:
            data = read_whole(fd, max_bytes, target.shown, check)
            etag = etag_of(data) if len(data) <= ETAG_HASH_BYTES else etag_of_file(fd, check)
        except OSError as error:
            raise tool_error_from_oserror(error, target.shown) from None
        finally:
            os.close(fd)
        expected = self._args.expected_etag
        if expected is not None and not same_etag(expected, etag):
            raise ToolError(
                ErrorCode.ETAG_MISMATCH,
                f"{target.shown} is not what expectedEtag stands for (its etag is {etag} now); read it again before "
                "you edit it. Nothing was changed.",
                {"currentEtag": etag},
            )
        return data, status, etag

    def _encoding(self, data: bytes, shown: str) -> TextEncoding:
        """Return the encoding the read tool would show this content in."""
        sample, whole = data[:SAMPLE_BYTES], len(data) <= SAMPLE_BYTES
        found = detect_encoding(sample, whole=whole)
        label = self._environment.options.read.encoding
        if label is not None and not _is_image_or_pdf(found):
            found = detect_encoding(sample, whole=whole, encoding=encoding_named(label))
        if isinstance(found, TextEncoding):
            return found
        why = f"is binary ({found.mime_type}): edit changes text only. It was left as it is; bash may change it."
        if not found.binary:
            why = (
                f"is not UTF-8 (from byte {found.offset} on) and in no other encoding beyond doubt. It was left as it "
                "is; the workspace's option read.encoding can name its encoding, or bash may change it."
            )
        raise ToolError(ErrorCode.UNSUPPORTED, f"{shown} {why}", {"mimeType": found.mime_type})

    def _encoded(self, text: str, encoding: TextEncoding, shown: str) -> bytes:
        try:
            return encoding.encode(text)
        except UnicodeEncodeError as error:
            character = text[error.start]
            index = next((index for index, edit in enumerate(self._edits) if character in edit.new_text), 0)
            raise ToolError(
                ErrorCode.UNSUPPORTED,
                f"edits[{index}]: newText holds {character!a}, which {encoding.name}, the encoding of {shown}, has no "
                "bytes for. Nothing was changed.",
                {"edit": index},
            ) from None


def _is_image_or_pdf(found: TextEncoding | NotText) -> bool:
    """Whether a content is no text whatever the workspace says of its texts: many encodings can read any bytes."""
    return isinstance(found, NotText) and (found.mime_type.startswith("image/") or found.mime_type == "application/pdf")


def _decoded(data: bytes, encoding: TextEncoding, shown: str) -> str:
    """Return the text of a file that gives the same bytes when it is encoded again."""
    try:
        text = encoding.decode(data)
        lossless = encoding.encode(text) == data
    except UnicodeError:
        lossless = False
        text = ""
    if not lossless:
        raise ToolError(
            ErrorCode.UNSUPPORTED,
            f"{shown} cannot be read as {encoding.name} and written back without loss, so it was left as it is; "
            "bash may change it.",
            {"encoding": encoding.name},
        )
    return text


def _diff(text: str, edited: EditedText, encoding: TextEncoding, path: str) -> str | None:
    if edited.spans is None:
        return None
    # Patch programs see bytes: the mark of a UTF-8 file is the beginning of its first line to them.
    if encoding.bom and encoding.newline_is_a_byte:
        return unified_diff_from_spans(f"\ufeff{text}", [(a + 1, b + 1, new) for a, b, new in edited.spans], path)
    return unified_diff_from_spans(text, edited.spans, path)
