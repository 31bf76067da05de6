"""find: files and directories by a glob, in order, without what the rules of ignore files leave out."""

import contextlib
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Final, Literal

from pydantic import Field

from app.domain import json_codec
from app.domain.abort import AbortSignal
from app.domain.tool_call import ToolResult, text_content
from app.domain.workspace import ListingOptions, WorkspaceOptions
from app.errors import ErrorCode, ToolError
from app.sandbox.containment import TEMPORARY_PREFIX, Root, tool_error_from_oserror
from app.sandbox.walk import PAGE_ENTRIES, Kind, walk
from app.tools._listing import (
    RESULT_ENTRIES_BYTES,
    ROOT_PATH,
    Start,
    cut_lines,
    name_fields,
    notice_of_ignored,
    notice_of_more,
    short_name,
    shown_name,
)
from app.tools.base import OnUpdate, ToolAnnotations, ToolDefinition
from app.tools.environment import ToolEnvironment
from app.tools.glob_pattern import GlobError
from app.tools.ignore_rules import ALWAYS_IGNORED, IGNORE_FILES, NO_RULES, IgnoreRules, look_up, read_rules
from app.tools.model_tool import ArgumentsModel, DetailsModel, ModelTool, define
from app.tools.path_pattern import PathPattern, Position

FIND_ANNOTATIONS: Final = ToolAnnotations(
    title="Find files",
    read_only_hint=True,
    destructive_hint=False,
    idempotent_hint=True,
    open_world_hint=False,
)

_LONGEST_PATTERN: Final = 4_096
_NAMED_UNREADABLE: Final = 3


class FindArguments(ArgumentsModel):
    pattern: str = Field(
        min_length=1,
        max_length=_LONGEST_PATTERN,
        description="A glob such as *.py, src/**/*.{ts,tsx} or docs/. Without a slash it matches names at any depth, "
        "with one it starts at path; * stays within a name, ** spans directories; upper and lower case differ.",
    )
    path: str | None = Field(
        default=None, description="The directory to look in, relative to the workspace root (default: the root)."
    )
    type: Literal["file", "directory", "symlink", "other"] | None = Field(
        default=None, description="Only entries of this type (default: all)."
    )
    limit: int | None = Field(default=None, ge=1, description="How many entries to show at most.")


class FindDetails(DetailsModel):
    """`entries` are the first in order, at most the limit; `limit_reached` tells that the limit left some out.

    `truncated`: the entries or the text leave something out. `ignored` is how many files and directories were left out
    by ignore rules before anything in them was looked at, `unreadable` how many directories could not be entered.
    Each entry has `path` (from the workspace root) and `type`; one that is no UTF-8 comes with `pathBase64` and
    `nameBase64`.
    """

    path: str
    relative_path: str
    entries: list[dict[str, Any]]
    truncated: bool
    limit_reached: bool
    ignored: int
    unreadable: int


def find_definition(options: WorkspaceOptions) -> ToolDefinition:
    limits = options.find
    return define(
        "find",
        "Find files and directories of the workspace by a glob pattern; the result is sorted, directories end in /. "
        "Hidden entries are found, .git and what .gitignore leaves out are not, unless the pattern spells the path out "
        f"or path names it. Shows the first {limits.limit} entries unless limit says otherwise.",
        FindArguments,
        FIND_ANNOTATIONS,
        limits.execution_mode,
    )


class FindTool(ModelTool[FindArguments]):
    arguments_model = FindArguments
    spellings: ClassVar[Mapping[str, str]] = {"glob": "pattern"}

    def __init__(self, environment: ToolEnvironment) -> None:
        super().__init__(find_definition(environment.options))
        self._environment = environment

    async def run(
        self,
        tool_call_id: str,  # noqa: ARG002 - the interface of every tool
        args: FindArguments,
        signal: AbortSignal,
        on_update: OnUpdate,  # noqa: ARG002 - as above
    ) -> ToolResult:
        environment = self._environment
        return await environment.files.run(
            self._find, args, signal.raise_if_aborted, signal=signal, workspace=environment.cwd
        )

    def _find(self, args: FindArguments, check: Callable[[], None]) -> ToolResult:
        environment = self._environment
        options = environment.options.find
        try:
            pattern = PathPattern(args.pattern)
        except GlobError as error:
            raise ToolError(ErrorCode.INVALID_ARGUMENTS, f"pattern: {args.pattern!r} is no glob: {error}") from None
        with Root.open(environment.cwd, environment.root_identity, environment.options.containment) as root:
            path = root.relative(ROOT_PATH if args.path is None else args.path)
            with Start.open(root, path, os.O_RDONLY | os.O_DIRECTORY) as start:
                above = look_up(root.fd, start.names)
                rules = None if above.ignored else above.rules or NO_RULES
                search = _Search(start, pattern, rules, args.type, args.limit or options.limit)
                try:
                    search.fill(check)
                except OSError as error:
                    raise tool_error_from_oserror(error, path.shown) from None
                return search.result(options)


@dataclass(slots=True)
class _Here:
    """What holds in a directory of the walk: `prefix` is its path from the workspace root with a final `/`."""

    prefix: str
    position: Position
    rules: IgnoreRules | None


class _Search:
    """The entries of one call; also what tells the walk where to go.

    `rules` are those above the start, None when no rules hold there.
    """

    def __init__(
        self, start: Start, pattern: PathPattern, rules: IgnoreRules | None, kind: Kind | None, limit: int
    ) -> None:
        self._start = start
        self._kind = kind
        self._limit = limit
        # What holds in each directory on the way: its path from the root, where the pattern stands, the rules. Those of
        # a directory are made when it is chosen and taken when it is entered.
        self._way: list[_Here] = []
        self._next = _Here(start.prefix, pattern.start, rules)
        self._room = RESULT_ENTRIES_BYTES
        self.entries: list[dict[str, Any]] = []
        self.lines: list[str] = []
        self.limit_reached = False
        self.full = False
        self.ignored = 0
        self.unreadable = 0
        self.unreadable_named: list[str] = []

    # -- the walk's selection

    def enter(self, path: str) -> Callable[[str], object]:  # noqa: ARG002 - the walk's interface
        self._way.append(self._next)
        return self._next.position.matches_any

    def leave(self) -> None:
        self._way.pop()

    def read(self, directory: int, count: int, noticed: frozenset[str]) -> None:  # noqa: ARG002 - as above
        here = self._way[-1]
        if here.rules is not None and noticed:
            here.rules = read_rules(directory, here.rules, here.prefix, noticed)

    def choose(self, path: str, name: str, kind: Kind) -> tuple[bool, bool]:  # noqa: ARG002 - the walk's interface
        here = self._way[-1]
        if name.startswith(TEMPORARY_PREFIX):
            return False, False
        is_directory = kind == "directory"
        show, below = self._judge(here.position, name, kind)
        if not show and below is None:
            return False, False
        full = here.prefix + name
        rules = here.rules
        if name == ALWAYS_IGNORED or (rules is not None and rules.ignores(full, name, is_directory=is_directory)):
            rules = None
            show, below = self._judge(here.position.spelled_out, name, kind)
            if not show and below is None:
                self.ignored += name != ALWAYS_IGNORED
                return False, False
        if below is not None:
            self._next = _Here(full + "/", below, rules)
        return show, below is not None

    def _judge(self, position: Position, name: str, kind: Kind) -> tuple[bool, Position | None]:
        """Return whether an entry is a match of the right type, and the position below when there may be more there."""
        is_directory = kind == "directory"
        below = position.below(name) if is_directory else None
        show = self._kind in {None, kind} and position.matches(name, is_directory=is_directory)
        return show, below if below is not None and below.alive else None

    # -- what comes of it

    def fill(self, check: Callable[[], None]) -> None:
        """Collect the entries, as far as the limits go."""
        notice = frozenset(IGNORE_FILES)
        page = max(PAGE_ENTRIES // 2, min(self._limit + 1, PAGE_ENTRIES))
        with contextlib.closing(walk(self._start.fd, self, check=check, notice=notice, page_entries=page)) as found:
            for entry in found:
                if entry.problem is not None:
                    self._note(entry.path, entry.problem)
                if not entry.shown:
                    continue
                if len(self.entries) >= self._limit:
                    self.limit_reached = True
                    return
                path = self._start.prefix + entry.path
                described = {**name_fields(path), "type": entry.kind}
                self._room -= len(json_codec.dump(described)) + 1
                if self._room < 0:
                    self.full = True
                    return
                self.entries.append(described)
                self.lines.append(shown_name(path) + ("/" if entry.kind == "directory" else ""))

    def _note(self, path: str, problem: OSError) -> None:
        """Remember a directory that was not entered."""
        self.unreadable += 1
        if self.unreadable <= _NAMED_UNREADABLE:
            reason = os.strerror(problem.errno) if problem.errno else problem.strerror
            self.unreadable_named.append(f"{short_name(self._start.prefix + path)} ({reason})")

    def result(self, options: ListingOptions) -> ToolResult:
        more = self.limit_reached or self.full
        total = None if more else len(self.entries)

        def notices(shown: int) -> list[str]:
            found = [] if self.entries else ["No matches found"]
            left_out = notice_of_more(
                "entries",
                shown,
                len(self.entries),
                total,
                by_limit=self.limit_reached,
                advice="narrow pattern or path",
            )
            return [*found, *([] if left_out is None else [left_out]), *self._asides()]

        cut = cut_lines(self.lines, notices, options.max_output_bytes)
        details = FindDetails(
            path=self._start.path,
            relative_path=self._start.shown_relative,
            entries=self.entries,
            truncated=more or cut.shown < len(self.lines),
            limit_reached=self.limit_reached,
            ignored=self.ignored,
            unreadable=self.unreadable,
        )
        return ToolResult(text_content(cut.text), details.to_json())

    def _asides(self) -> list[str]:
        asides = []
        if self.ignored:
            asides.append(notice_of_ignored(self.ignored))
        if self.unreadable:
            others = self.unreadable - len(self.unreadable_named)
            named = ", ".join([*self.unreadable_named, *([f"and {others} more"] if others else [])])
            asides.append(f"[Directories that were not entered: {named}]")
        return asides
