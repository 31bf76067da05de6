"""write: the whole content of a file, in one step that either happens or does not."""

import os
from collections.abc import Callable
from typing import Final, Self

from pydantic import Field, model_validator

from app.domain.abort import AbortSignal
from app.domain.tool_call import ToolResult, text_content
from app.domain.workspace import WorkspaceOptions
from app.errors import ErrorCode, ToolError
from app.sandbox.containment import Root, Target, tool_error_from_oserror
from app.sandbox.disk import taking
from app.sandbox.files import etag_of_file, etag_of_written, read_whole, replace_file, same_etag
from app.tools.base import OnUpdate, ToolAnnotations, ToolDefinition
from app.tools.environment import ToolEnvironment
from app.tools.model_tool import ArgumentsModel, DetailsModel, ModelTool, define
from app.tools.unified_diff import DIFF_MAX_INPUT, unified_diff

WRITE_ANNOTATIONS: Final = ToolAnnotations(
    title="Write a file",
    read_only_hint=False,
    destructive_hint=True,
    idempotent_hint=True,
    open_world_hint=False,
)


class WriteArguments(ArgumentsModel):
    path: str = Field(description="The file, relative to the workspace root (or absolute, below it).")
    content: str = Field(description="The whole content, written as UTF-8 exactly as given.")
    create_only: bool = Field(default=False, description="Fail when the file exists already.")
    expected_etag: str | None = Field(
        default=None,
        description="Only replace the file when this is its current etag (from an earlier write or edit).",
    )

    @model_validator(mode="after")
    def _exclude_each_other(self) -> Self:
        if self.create_only and self.expected_etag is not None:
            raise ValueError("createOnly wants no file and expectedEtag wants one: pass one of them")
        return self


class WriteDetails(DetailsModel):
    """`bytes` is the new size. `diff` is a unified diff, None when it was left out (`diff_omitted`)."""

    path: str
    relative_path: str
    bytes: int
    created: bool
    etag: str
    diff: str | None
    diff_omitted: bool


def write_definition(options: WorkspaceOptions) -> ToolDefinition:
    limits = options.write
    return define(
        "write",
        f"Write the whole content of a file of the workspace, at most {limits.max_bytes} bytes. Makes missing "
        "directories; replaces an existing file and keeps its permissions. To change a part of a file use edit.",
        WriteArguments,
        WRITE_ANNOTATIONS,
        limits.execution_mode,
    )


class WriteTool(ModelTool[WriteArguments]):
    arguments_model = WriteArguments

    def __init__(self, environment: ToolEnvironment) -> None:
        super().__init__(write_definition(environment.options))
        self._environment = environment

    async def run(
        self,
        tool_call_id: str,  # noqa: ARG002 - the interface of every tool
        args: WriteArguments,
        signal: AbortSignal,
        on_update: OnUpdate,  # noqa: ARG002 - as above
    ) -> ToolResult:
        environment = self._environment
        write = _Write(environment, args, signal)
        return await environment.mutations.run(environment.files, environment.cwd, write.resolve, write.perform, signal)


class _Write:
    """One call. Both methods run in the file pool, `perform` while no other change of the file runs."""

    def __init__(self, environment: ToolEnvironment, args: WriteArguments, signal: AbortSignal) -> None:
        self._environment = environment
        self._args = args
        self._signal = signal
        self._data = b""

    def resolve(self) -> Target:
        args = self._args
        environment = self._environment
        try:
            self._data = args.content.encode()
        except UnicodeEncodeError:
            raise ToolError(
                ErrorCode.INVALID_ARGUMENTS, "content: must be valid Unicode, without lone surrogates"
            ) from None
        limit = environment.options.write.max_bytes
        if len(self._data) > limit:
            raise ToolError(
                ErrorCode.TOO_LARGE,
                f"content has {len(self._data)} bytes and write takes at most {limit}; write a part of it and add the "
                "rest with edit or bash",
                {"bytes": len(self._data), "maxBytes": limit},
            )
        with Root.open(environment.cwd, environment.root_identity, environment.options.containment) as root:
            path = root.relative(args.path)
            try:
                return root.target(path, create_parents=args.expected_etag is None, check=self._signal.raise_if_aborted)
            except ToolError as error:
                if error.code is ErrorCode.NOT_FOUND and args.expected_etag is not None:
                    raise _mismatch(path.shown, None) from None
                raise

    def perform(self, target: Target) -> ToolResult:
        try:
            return self._perform(target)
        except ToolError as error:
            error.details = {"path": target.path, "relativePath": target.relative_path, **error.details}
            raise

    def _perform(self, target: Target) -> ToolResult:
        check = self._signal.raise_if_aborted
        expected = self._require_etag(target, check)
        old = _old_text(target, check)
        before = target.status()
        more = len(self._data) - (0 if before is None else before.st_size)
        with taking(self._environment.quota, more, check):
            created = replace_file(
                target,
                self._data,
                commit=self._signal.commit,
                check=check,
                create_only=self._args.create_only,
                expected=expected,
            )
        diff = None if old is None and not created else unified_diff(old, self._args.content, target.relative_path)
        size = len(self._data)
        details = WriteDetails(
            path=target.path,
            relative_path=target.relative_path,
            bytes=size,
            created=created,
            etag=etag_of_written(target, self._data),
            diff=diff,
            diff_omitted=diff is None,
        )
        unit = "byte" if size == 1 else "bytes"
        return ToolResult(text_content(f"Wrote {size} {unit} to {target.shown}"), details.to_json())

    def _require_etag(self, target: Target, check: Callable[[], None]) -> os.stat_result | None:
        """Compare the file with the etag it must have and return its status, None when it may be any."""
        expected = self._args.expected_etag
        if expected is None:
            return None
        try:
            fd, status = target.open_existing()
        except ToolError as error:
            if error.code is ErrorCode.NOT_FOUND:
                raise _mismatch(target.shown, None) from None
            raise
        try:
            current = etag_of_file(fd, check)
        except OSError as error:
            raise tool_error_from_oserror(error, target.shown) from None
        finally:
            os.close(fd)
        if not same_etag(expected, current):
            raise _mismatch(target.shown, current)
        return status


def _old_text(target: Target, check: Callable[[], None]) -> str | None:
    """Return the old content for the diff; None when there is no file or it is too large, unreadable or no UTF-8."""
    try:
        fd, _ = target.open_existing()
    except ToolError:
        return None  # what is wrong with it, replacing it will say
    try:
        return read_whole(fd, DIFF_MAX_INPUT, target.shown, check).decode()
    except (ToolError, UnicodeDecodeError):
        return None
    finally:
        os.close(fd)


def _mismatch(shown: str, current: str | None) -> ToolError:
    now = "it does not exist" if current is None else f"its etag is {current} now"
    return ToolError(
        ErrorCode.ETAG_MISMATCH,
        f"{shown} is not the file that expectedEtag stands for ({now}); read it again before you replace it",
        {"currentEtag": current},
    )
