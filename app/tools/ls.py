"""ls: what is in a directory, sorted, with sizes; deeper when asked."""

import contextlib
import os
from collections.abc import Callable, Mapping
from typing import Any, ClassVar, Final

from pydantic import Field

from app.domain import json_codec
from app.domain.abort import AbortSignal
from app.domain.clock import rfc3339
from app.domain.tool_call import ToolResult, text_content
from app.domain.workspace import ListingOptions, WorkspaceOptions
from app.errors import ErrorCode, ToolError
from app.sandbox.containment import (
    O_PATH,
    TEMPORARY_PREFIX,
    RelativePath,
    Root,
    display_path,
    tool_error_from_oserror,
)
from app.sandbox.walk import PAGE_ENTRIES, Entry, Kind, NotEntered, walk
from app.tools._listing import (
    RESULT_ENTRIES_BYTES,
    ROOT_PATH,
    Start,
    cut_lines,
    display_name,
    name_fields,
    notice_of_more,
    shown_name,
)
from app.tools.base import OnUpdate, ToolAnnotations, ToolDefinition
from app.tools.environment import ToolEnvironment
from app.tools.model_tool import ArgumentsModel, DetailsModel, ModelTool, define

LS_ANNOTATIONS: Final = ToolAnnotations(
    title="List a directory",
    read_only_hint=True,
    destructive_hint=False,
    idempotent_hint=True,
    open_world_hint=False,
)


class LsArguments(ArgumentsModel):
    path: str | None = Field(
        default=None, description="The directory, relative to the workspace root (default: the root itself)."
    )
    recursive: bool | None = Field(
        default=None, description="Whether to list the directories below too (default false, true with maxDepth)."
    )
    max_depth: int | None = Field(
        default=None, ge=1, description="How many levels to list: 1 is the directory's own entries."
    )
    limit: int | None = Field(default=None, ge=1, description="How many entries to list at most.")


class LsDetails(DetailsModel):
    """`entries` are the first in order, at most the limit; `limit_reached` tells that the limit left some out.

    `truncated`: the entries or the text leave something out. `total` is how many entries there are, None when that was
    not counted. Each entry has `path` (from the workspace root), `name`, `type`, `bytes` (of a file, else None) and
    `modifiedAt`; a symbolic link has `target`, and `broken` when that does not exist; a directory that could not be
    listed has `error`. Names that are no UTF-8 come with `nameBase64` and `pathBase64`.
    """

    path: str
    relative_path: str
    entries: list[dict[str, Any]]
    truncated: bool
    limit_reached: bool
    total: int | None


def ls_definition(options: WorkspaceOptions) -> ToolDefinition:
    limits = options.ls
    return define(
        "ls",
        "List a directory of the workspace, sorted: directories end in /, symbolic links in @, files come with their "
        f"size in bytes. Hidden and ignored entries are listed too. Shows the first {limits.limit} entries unless "
        "limit says otherwise.",
        LsArguments,
        LS_ANNOTATIONS,
        limits.execution_mode,
    )


class LsTool(ModelTool[LsArguments]):
    arguments_model = LsArguments
    spellings: ClassVar[Mapping[str, str]] = {"depth": "maxDepth"}

    def __init__(self, environment: ToolEnvironment) -> None:
        super().__init__(ls_definition(environment.options))
        self._environment = environment

    async def run(
        self,
        tool_call_id: str,  # noqa: ARG002 - the interface of every tool
        args: LsArguments,
        signal: AbortSignal,
        on_update: OnUpdate,  # noqa: ARG002 - as above
    ) -> ToolResult:
        environment = self._environment
        return await environment.files.run(
            self._list, args, signal.raise_if_aborted, signal=signal, workspace=environment.cwd
        )

    def _list(self, args: LsArguments, check: Callable[[], None]) -> ToolResult:
        environment = self._environment
        options = environment.options.ls
        recursive = args.max_depth is not None if args.recursive is None else args.recursive
        depth = None if recursive and args.max_depth is None else (args.max_depth or 1) if recursive else 1
        limit = args.limit or options.limit
        with Root.open(environment.cwd, environment.root_identity, environment.options.containment) as root:
            path = root.relative(ROOT_PATH if args.path is None else args.path)
            with Start.open(root, path, os.O_RDONLY | os.O_DIRECTORY) as start:
                listing = _Listing(root, start, depth, limit)
                try:
                    listing.fill(check)
                except OSError as error:
                    raise tool_error_from_oserror(error, path.shown) from None
                return listing.result(options)


class _Listing:
    """The entries of one call; also what tells the walk where to go."""

    def __init__(self, root: Root, start: Start, depth: int | None, limit: int) -> None:
        self._root = root
        self._start = start
        self._depth = depth
        self._limit = limit
        self._level = 0
        self._counted = 0
        self._room = RESULT_ENTRIES_BYTES
        self.entries: list[dict[str, Any]] = []
        self.lines: list[str] = []
        self.limit_reached = False
        self.full = False

    # -- the walk's selection

    def enter(self, path: str) -> Callable[[str], object]:  # noqa: ARG002 - the walk's interface
        self._level += 1
        return self._is_listed

    def leave(self) -> None:
        self._level -= 1

    def read(self, directory: int, count: int, noticed: frozenset[str]) -> None:  # noqa: ARG002 - as above
        self._counted = count

    def choose(self, path: str, name: str, kind: Kind) -> tuple[bool, bool]:  # noqa: ARG002 - the walk's interface
        if not self._is_listed(name):
            return False, False
        return True, self._depth is None or self._level < self._depth

    def _is_listed(self, name: str) -> bool:
        return not name.startswith(TEMPORARY_PREFIX)

    # -- what comes of it

    def fill(self, check: Callable[[], None]) -> None:
        """Collect the entries, as far as the limits go."""
        page = min(self._limit + 1, PAGE_ENTRIES)
        with contextlib.closing(walk(self._start.fd, self, check=check, page_entries=page)) as found:
            for entry in found:
                if len(self.entries) >= self._limit:
                    self.limit_reached = True
                    return
                described = self._describe(entry)
                if described is None:
                    continue
                self._room -= len(json_codec.dump(described)) + 1
                if self._room < 0:
                    self.full = True
                    return
                self.entries.append(described)
                self.lines.append(_line(shown_name(self._start.prefix + entry.path), described))

    def result(self, options: ListingOptions) -> ToolResult:
        more = self.limit_reached or self.full
        total = None
        if not more:
            total = len(self.entries)
        elif self._depth == 1:
            total = max(self._counted, len(self.entries))

        def notices(shown: int) -> list[str]:
            if not self.entries:
                return [f"{self._start.shown} is empty"]
            left_out = notice_of_more(
                "entries",
                shown,
                len(self.entries),
                total,
                by_limit=self.limit_reached,
                advice="list a directory further down",
            )
            return [] if left_out is None else [left_out]

        cut = cut_lines(self.lines, notices, options.max_output_bytes)
        details = LsDetails(
            path=self._start.path,
            relative_path=self._start.shown_relative,
            entries=self.entries,
            truncated=more or cut.shown < len(self.lines),
            limit_reached=self.limit_reached,
            total=total,
        )
        return ToolResult(text_content(cut.text), details.to_json())

    def _describe(self, entry: Entry) -> dict[str, Any] | None:
        """Return what the details say of an entry; None when it is gone."""
        path = self._start.prefix + entry.path
        fields = name_fields(path)
        described: dict[str, Any] = {"path": fields.pop("path"), "name": display_name(entry.name), "type": entry.kind}
        size = modified = None
        try:
            status = os.stat(entry.name, dir_fd=entry.directory, follow_symlinks=False)
        except FileNotFoundError:
            return None
        except OSError:
            pass  # listed by a directory that may be read and not entered: the name is all there is to know
        else:
            size = status.st_size if entry.kind == "file" else None
            with contextlib.suppress(ValueError, OverflowError):  # a time no calendar has
                modified = rfc3339(status.st_mtime_ns // 1_000_000)
        described |= {"bytes": size, "modifiedAt": modified}
        if entry.kind == "symlink":
            described |= self._link(entry, path)
        if entry.problem is not None:
            described["error"] = _reason(entry.problem)
        return described | fields

    def _link(self, entry: Entry, path: str) -> dict[str, Any]:
        try:
            target = os.readlink(os.fsencode(entry.name), dir_fd=entry.directory)
        except OSError:
            return {}
        return {"target": display_path(target), "broken": self._is_broken(path)}

    def _is_broken(self, path: str) -> bool:
        """Whether a link leads nowhere. Of one that leads out of the workspace nothing is told."""
        raw = os.fsencode(path)
        try:
            os.close(self._root.open_file(RelativePath(raw, self._start.shown), O_PATH))
        except ToolError as error:
            return error.code in {ErrorCode.NOT_FOUND, ErrorCode.NOT_A_DIRECTORY} or "circle" in error.message
        return False


def _line(path: str, entry: Mapping[str, Any]) -> str:
    match entry["type"]:
        case "directory":
            return f"{path}/" if "error" not in entry else f"{path}/  ({entry['error']})"
        case "symlink":
            broken = "  (broken)" if entry.get("broken") else ""
            return f"{path}@ -> {shown_name(entry['target'])}{broken}" if "target" in entry else f"{path}@"
        case "file":
            return path if entry["bytes"] is None else f"{path}  {entry['bytes']}"
        case _:
            return f"{path}  (neither file, directory nor link)"


def _reason(problem: OSError) -> str:
    """Return why a directory was not entered, in a few words."""
    if isinstance(problem, NotEntered):
        return f"not listed: {problem.strerror}"
    if isinstance(problem, PermissionError):
        return "unreadable: permission denied"
    return f"unreadable: {os.strerror(problem.errno) if problem.errno else problem}"
