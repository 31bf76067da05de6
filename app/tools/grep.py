"""grep: lines that match a regular expression, in files of the workspace, found by ripgrep.

ripgrep searches with two threads and says what it finds in any order. As long as that is no more than may be shown it
is sorted here and done. When it is more, the search is stopped and made again by ripgrep with one thread, in order, and
stopped for good at the limit: so the first matches in order are shown without looking at all the others, and memory is
bounded by what is shown. Matches are told as they are found, each once; the result has them in order.
"""

import asyncio
import contextlib
import os
import stat
from codecs import BOM_UTF16_BE, BOM_UTF16_LE
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby
from typing import Any, ClassVar, Final

from pydantic import Field, field_validator

from app.domain.abort import AbortReason, AbortSignal
from app.domain.events import OutputStream
from app.domain.tool_call import ToolResult, text_content
from app.domain.workspace import SHOWN_MAX_LINES, ListingOptions, WorkspaceOptions
from app.errors import ErrorCode, ToolError
from app.sandbox.containment import RelativePath, Root, irregular, tool_error_from_oserror
from app.sandbox.process import CommandOutcome
from app.sandbox.ripgrep import Ripgrep
from app.tools._listing import (
    ROOT_PATH,
    SHOWN_MOST_BYTES,
    Start,
    cut_lines,
    name_fields,
    notice_of_ignored,
    notice_of_more,
    short_name,
    shown_name,
)
from app.tools._ripgrep import ErrorParser, OutputParser, Query, Row, explain, search_arguments
from app.tools.base import OnUpdate, OutputDelta, ToolAnnotations, ToolDefinition
from app.tools.environment import ToolEnvironment
from app.tools.glob_pattern import GlobError
from app.tools.ignore_rules import IgnoreRules, has_endless_rules, look_up, read_rules
from app.tools.matched_lines import LineText, line_reader
from app.tools.model_tool import ArgumentsModel, DetailsModel, ModelTool, define
from app.tools.path_pattern import PathPattern
from app.tools.text_encoding import SAMPLE_BYTES, TextEncoding, encoding_named

GREP_ANNOTATIONS: Final = ToolAnnotations(
    title="Search file contents",
    read_only_hint=True,
    destructive_hint=False,
    idempotent_hint=True,
    open_world_hint=False,
)

TIMEOUT_MS: Final = 300_000
"""How long one search may take, whatever the batch allows."""

_PATIENCE_SECONDS: Final = 0.5
"""How long ripgrep may take before it is looked whether it waits on something that is no file."""

SEPARATOR: Final = "--"

_LONGEST_PATTERN: Final = 20_000
_LONGEST_GLOB: Final = 4_096
_MOST_CONTEXT: Final = 1_000
_WAITING_ROWS: Final = 2_000
_STEP_ROWS: Final = 256
_REMEMBERED_DIRECTORIES: Final = 2_048


class GrepArguments(ArgumentsModel):
    pattern: str = Field(
        min_length=1,
        max_length=_LONGEST_PATTERN,
        description="A regular expression in Rust syntax (no look-around, no back-references), matched line by line; "
        "plain text with literal.",
    )
    path: str | None = Field(
        default=None,
        description="The directory or file to search, relative to the workspace root (default: the root).",
    )
    include: str | None = Field(
        default=None,
        min_length=1,
        max_length=_LONGEST_GLOB,
        description="Only files whose path matches this glob, for example *.py or src/**/*.{ts,tsx}; with a slash it "
        "starts at path.",
    )
    exclude: str | None = Field(
        default=None,
        min_length=1,
        max_length=_LONGEST_GLOB,
        description="Not files or directories whose path matches this glob.",
    )
    case_sensitive: bool | None = Field(default=None, description="Whether upper and lower case differ (default true).")
    literal: bool | None = Field(default=None, description="Take the pattern as plain text (default false).")
    context: int | None = Field(
        default=None, ge=0, le=_MOST_CONTEXT, description="How many lines to show before and after each match."
    )
    limit: int | None = Field(default=None, ge=1, description="How many matching lines to show at most.")
    encoding: str | None = Field(
        default=None,
        description="What the files are encoded in, for example gb18030, when they are neither UTF-8 nor have a byte "
        "order mark.",
    )

    @field_validator("pattern")
    @classmethod
    def _can_be_an_argument(cls, pattern: str) -> str:
        if "\0" in pattern:
            raise ValueError("holds the character U+0000, which no line of text has")
        return pattern


class GrepDetails(DetailsModel):
    """`matches` is how many matching lines are shown, in `files` files; `entries` are these lines.

    `truncated`: anything was left out, matches or parts of long lines (`lines_truncated` counts those).
    `limit_reached`: the limit left matches out. `files_skipped` is how many files were not searched, or not to their
    end: `skipped` says why, `binary` or `unreadable`. `ignored` is how many files and directories were left out by
    ignore rules. `context` are the lines around matches, when asked for. An entry's `path` is relative to the workspace
    root; one that is no UTF-8 comes with `pathBase64` and `nameBase64`.
    """

    path: str
    relative_path: str
    matches: int
    files: int
    files_skipped: int
    skipped: dict[str, int]
    ignored: int
    truncated: bool
    limit_reached: bool
    lines_truncated: int
    entries: list[dict[str, Any]]
    context: list[dict[str, Any]] | None = None


def grep_definition(options: WorkspaceOptions) -> ToolDefinition:
    limits = options.grep
    return define(
        "grep",
        "Search the contents of files of the workspace. Shows path:LINE: text for each matching line, sorted by path, "
        f"the first {limits.limit} and at most {min(limits.max_output_bytes, SHOWN_MOST_BYTES)} bytes; long lines are "
        "cut around the match. Hidden files are searched; .git, binary files and what .gitignore leaves out are not, "
        "unless path names it. Line numbers are those of read.",
        GrepArguments,
        GREP_ANNOTATIONS,
        limits.execution_mode,
    )


class GrepTool(ModelTool[GrepArguments]):
    arguments_model = GrepArguments
    spellings: ClassVar[Mapping[str, str]] = {"glob": "include", "ignore_case": "ignoreCase"}

    def __init__(self, environment: ToolEnvironment) -> None:
        super().__init__(grep_definition(environment.options))
        self._environment = environment
        self._ripgrep = environment.ripgrep or Ripgrep(environment.sandbox)

    def prepare_arguments(self, args: Any) -> Any:
        """Return `args` with known spellings replaced; `ignoreCase` is the opposite of `caseSensitive`."""
        value = super().prepare_arguments(args)
        if isinstance(value, Mapping) and isinstance(value.get("ignoreCase"), bool) and "caseSensitive" not in value:
            value = {**value, "caseSensitive": not value["ignoreCase"]}
            del value["ignoreCase"]
        return value

    async def run(
        self,
        tool_call_id: str,  # noqa: ARG002 - the interface of every tool
        args: GrepArguments,
        signal: AbortSignal,
        on_update: OnUpdate,
    ) -> ToolResult:
        """Search and return what was found; finding nothing is a success.

        Raises:
            ToolError: `invalid_arguments` (the pattern, a glob, the encoding), `unsupported` (no ripgrep), `timeout`,
                `limit_exceeded`, and what is wrong with the path.
        """
        environment = self._environment
        with contextlib.closing(_Search(environment, args, signal)) as search:
            await environment.files.run(search.prepare, signal=signal, workspace=environment.cwd)
            found = await search.run(self._ripgrep, on_update)
            return search.result(found, environment.options.grep)


@dataclass(frozen=True, slots=True)
class _Line:
    """A line to show. `path` is relative to the workspace root, as the file system decodes it."""

    path: str
    number: int
    text: LineText
    is_match: bool

    def shown(self, name: str) -> str:
        mark = ":" if self.is_match else "-"
        return f"{name}{mark}{self.number}{mark} {self.text.text}"

    def fields(self) -> dict[str, Any]:
        fields = name_fields(self.path)
        return {"path": fields.pop("path"), "line": self.number, "text": self.text.text, **fields}


@dataclass(slots=True)
class _Found:
    """What one pass over the files has found, as far as it may be shown."""

    limit: int
    max_bytes: int
    files: dict[str, list[_Line]] = field(default_factory=dict)
    matches: int = 0
    size: int = 0
    limit_reached: bool = False
    full: bool = False
    output: OutputParser = field(default_factory=OutputParser)
    errors: ErrorParser = field(default_factory=ErrorParser)

    @property
    def over(self) -> bool:
        """Whether there is more than may be shown."""
        return self.limit_reached or self.full

    @property
    def binary(self) -> int:
        return max(self.errors.binary, self.output.binary)

    def add(self, lines: Sequence[_Line]) -> list[_Line]:
        """Take the next lines and return those that were taken."""
        taken: list[_Line] = []
        for line in lines:
            if line.is_match and self.matches >= self.limit:
                self.limit_reached = True
                break
            self.size += len(line.path) + len(line.text.text.encode()) + len(str(line.number)) + 4
            if self.size > self.max_bytes:
                self.full = True
                break
            self.matches += line.is_match
            self.files.setdefault(line.path, []).append(line)
            taken.append(line)
        return taken

    def in_order(self, context: int) -> Iterator[_Line]:
        """Yield the lines sorted by path and number, without the context of a match that was left out."""
        paths = sorted(self.files, key=lambda path: [os.fsencode(name) for name in path.split("/")])
        for path in paths:
            lines = self.files[path]
            if self.over and path == paths[-1]:
                last = max((line.number for line in lines if line.is_match), default=0)
                lines = [line for line in lines if line.number <= last + context]
            yield from lines


@dataclass(frozen=True, slots=True)
class _Place:
    """What a search is about, once its arguments are checked: an open file or directory and how to search it.

    `is_binary` tells a file that is not searched, of which ripgrep would say nothing.
    """

    root: Root
    start: Start
    query: Query
    is_file: bool
    is_binary: bool
    encoding: TextEncoding | None
    include: PathPattern | None
    exclude: PathPattern | None


class _Search:
    """One call. `prepare`, `_read_lines` and what they use run in the file pool, one at a time."""

    def __init__(self, environment: ToolEnvironment, args: GrepArguments, signal: AbortSignal) -> None:
        self._environment = environment
        self._args = args
        self._signal = signal
        self._opened = contextlib.ExitStack()
        self._prepared: _Place | None = None
        self._rules: dict[str, IgnoreRules | None] | None = None
        self._own_rules: IgnoreRules | None = None
        self._stalled = False
        self._told: set[tuple[str, int]] = set()

    @property
    def limit(self) -> int:
        return self._args.limit or self._environment.options.grep.limit

    @property
    def context(self) -> int:
        return self._args.context or 0

    @property
    def _place(self) -> _Place:
        assert self._prepared is not None  # noqa: S101 - `prepare` comes first
        return self._prepared

    def close(self) -> None:
        self._opened.close()

    def prepare(self) -> None:
        """Check the arguments and open the place to search.

        Raises:
            ToolError: an argument or the path is wrong.
        """
        args = self._args
        environment = self._environment
        encoding = None if args.encoding is None else encoding_named(args.encoding)
        include, exclude = _pattern("include", args.include), _pattern("exclude", args.exclude)
        root = self._opened.enter_context(
            Root.open(environment.cwd, environment.root_identity, environment.options.containment)
        )
        path = root.relative(ROOT_PATH if args.path is None else args.path)
        start = self._opened.enter_context(Start.open(root, path))
        mode = os.fstat(start.fd).st_mode
        is_file = stat.S_ISREG(mode)
        above = look_up(root.fd, start.names)
        if is_file:
            is_binary = _is_binary(root, path, encoding)
        elif stat.S_ISDIR(mode):
            is_binary = False
            own = self._own_rules = _read_rules_of(start, path, above.rules)
            # ripgrep's word on ignored files is enough unless an include overrules the rules there, or there are rules
            # above the start.
            if not above.ignored and (include is not None or (above.rules is not None and above.rules.any)):
                self._rules = {start.prefix: own}
        else:
            raise irregular(mode, path.shown)
        query = Query(
            pattern=args.pattern,
            start=start.place if start.relative is None else start.relative,
            prefix=start.prefix,
            literal=bool(args.literal),
            case_sensitive=args.case_sensitive is not False,
            context=self.context,
            max_count=min(self.limit, SHOWN_MOST_BYTES) + 1,
            encoding=None if encoding is None or encoding.name == "utf-8" else encoding.name,
            include=None if is_file else args.include,
            exclude=None if is_file else args.exclude,
            ignored=above.ignored,
            ignore_files=above.root_files,
        )
        self._prepared = _Place(root, start, query, is_file, is_binary, encoding, include, exclude)

    # -- searching

    async def run(self, ripgrep: Ripgrep, on_update: OnUpdate) -> _Found:
        """Return the first matches in order."""
        place = self._place
        if place.is_binary:
            return _Found(self.limit, 0)
        found = await self._pass(ripgrep, on_update, in_order=place.is_file)
        if found.over and not place.is_file:
            found = await self._pass(ripgrep, on_update, in_order=True)
        return found

    async def _pass(self, ripgrep: Ripgrep, on_update: OnUpdate, *, in_order: bool) -> _Found:
        environment, place = self._environment, self._place
        loop = asyncio.get_running_loop()
        max_bytes = min(environment.options.grep.max_output_bytes, SHOWN_MOST_BYTES)
        found = _Found(self.limit, max_bytes)
        rows: list[Row] = []
        news = asyncio.Event()
        room: asyncio.Future[None] | None = None
        stop = AbortSignal()

        def take(stream: OutputStream, data: bytes) -> asyncio.Future[None] | None:
            nonlocal room
            if found.over:
                return None
            if stream == "stderr":
                found.errors.feed(data)
                return None
            rows.extend(found.output.feed(data))
            news.set()
            if len(rows) <= _WAITING_ROWS:
                return None
            room = room or loop.create_future()
            return room

        def abort() -> None:
            stop.abort(self._signal.reason or AbortReason.CANCELLED)

        forget = self._signal.add_callback(abort)
        try:
            async with asyncio.TaskGroup() as group:
                running = group.create_task(
                    ripgrep.run(
                        search_arguments(place.query, in_order=in_order),
                        directory=place.root.fd,
                        workspace=environment.cwd,
                        signal=stop,
                        timeout_ms=TIMEOUT_MS,
                        on_output=take,
                        # where containment is off
                        readable=(place.query.start,) if place.query.start.startswith("/") else (),
                        account=environment.account,
                    )
                )
                watching = group.create_task(self._look_for_stall(stop))

                def ended(_: object) -> None:
                    watching.cancel()
                    news.set()

                running.add_done_callback(ended)
                while not found.over and (rows or not running.done()):
                    await news.wait()
                    news.clear()
                    while rows and not found.over:
                        step = rows[:_STEP_ROWS]
                        del rows[:_STEP_ROWS]
                        lines = await environment.files.run(
                            self._read_lines, step, signal=self._signal, workspace=environment.cwd
                        )
                        await self._tell(found.add(lines), on_update)
                    if room is not None and not room.done():
                        room.set_result(None)
                    room = None
                if found.over:
                    stop.abort(AbortReason.CANCELLED)
        except ExceptionGroup as problems:
            raise problems.exceptions[0] from None
        finally:
            forget()
        self._signal.raise_if_aborted()
        if found.over:
            return found
        # An endless file of rules may use up ripgrep's memory before it is looked for.
        outcome = running.result()
        died = outcome.signal is not None and not outcome.timed_out
        if self._stalled or (died and await self._has_endless_rules()):
            self._take_over_rules()
            return await self._pass(ripgrep, on_update, in_order=in_order)
        self._judge(outcome, found)
        return found

    async def _look_for_stall(self, stop: AbortSignal) -> None:
        """Stop a search that takes its time when there is a file of rules on which ripgrep may wait for ever."""
        pause = _PATIENCE_SECONDS
        while self._reads_rules:
            await asyncio.sleep(pause)
            pause *= 2
            if await self._has_endless_rules():
                self._stalled = True
                stop.abort(AbortReason.CANCELLED)
                return

    @property
    def _reads_rules(self) -> bool:
        """Whether ripgrep reads ignore rules by itself."""
        return not (self._place.is_file or self._place.query.ignored)

    async def _has_endless_rules(self) -> bool:
        if not self._reads_rules:
            return False
        signal = AbortSignal()
        return await self._environment.files.run(
            has_endless_rules,
            self._place.start.fd,
            signal.raise_if_aborted,
            signal=signal,
            workspace=self._environment.cwd,
        )

    def _take_over_rules(self) -> None:
        """Apply the ignore rules to what ripgrep finds, and let it read none."""
        self._stalled = False
        place = self._place
        self._prepared = replace(place, query=replace(place.query, ignored=True, ignore_files=()))
        self._rules = self._rules or {place.start.prefix: self._own_rules}

    async def _tell(self, lines: Sequence[_Line], on_update: OnUpdate) -> None:
        """Tell of lines that have not been told of."""
        new = [line for line in lines if (line.path, line.number) not in self._told]
        if new:
            self._told.update((line.path, line.number) for line in new)
            text = "".join(f"{line.shown(shown_name(line.path))}\n" for line in new)
            waiting = on_update(OutputDelta("text", text.encode()))
            if waiting is not None:
                await waiting

    def _judge(self, outcome: CommandOutcome, found: _Found) -> None:
        """Raise ToolError when the search failed as a whole; a file that could not be read is no such failure."""
        if outcome.timed_out:
            raise ToolError(
                ErrorCode.TIMEOUT,
                f"the search took more than {TIMEOUT_MS // 1000} s and was stopped; narrow path or include",
            )
        message = explain(found.errors.message)
        if outcome.signal is not None:
            raise ToolError(
                ErrorCode.LIMIT_EXCEEDED,
                f"ripgrep was ended by {outcome.signal_name} (it may have met a line too long for its memory); "
                "narrow path, include or exclude",
            )
        if outcome.exit_code in {0, 1} or found.errors.unreadable or found.files:
            return
        if outcome.exit_code == 2 and message:
            hint = "" if self._args.literal else ' (with "literal": true it is taken as plain text)'
            if "not allowed in a regex" in message:
                hint = " (lines are matched one by one, without their line ends)"
            raise ToolError(ErrorCode.INVALID_ARGUMENTS, f"pattern: ripgrep refuses it{hint}: {message}")
        raise ToolError(
            ErrorCode.IO_ERROR, f"ripgrep failed with exit code {outcome.exit_code}: {message or 'no reason'}"
        )

    # -- in the file pool

    def _read_lines(self, rows: Sequence[Row]) -> list[_Line]:
        """Return the text of the lines ripgrep points at, without those of files that do not count."""
        lines: list[_Line] = []
        for raw, group in groupby(rows, key=lambda row: row.path):
            self._signal.raise_if_aborted()
            path = os.fsdecode(raw)
            if not self._counts(path):
                continue
            try:
                opened = self._place.root.open_regular(RelativePath(raw, shown_name(path)))
            except ToolError:
                continue  # it is gone, or no longer what it was
            try:
                reader = line_reader(opened.fd, self._place.encoding, self._signal.raise_if_aborted)
                lines += [
                    _Line(path, row.line, reader.line(row.line, row.offset, row.column), row.column is not None)
                    for row in group
                ]
            except OSError:
                continue
            finally:
                opened.close()
        return lines

    def _counts(self, path: str) -> bool:
        """Whether a file is one that the arguments and the ignore rules ask for."""
        place = self._place
        if place.is_file:
            return True
        below = path[len(place.start.prefix) :]
        if place.include is not None and not place.include.covers(below):
            return False
        if place.exclude is not None and place.exclude.covers(below):
            return False
        if self._rules is None:
            return True
        directory, _, name = path.rpartition("/")
        rules = self._rules_in(f"{directory}/" if directory else "")
        return rules is not None and not rules.ignores(path, name, is_directory=False)

    def _rules_in(self, prefix: str) -> IgnoreRules | None:
        """Return the rules that hold in a directory below the start, None when it is ignored itself."""
        assert self._rules is not None  # noqa: S101 - asked only then
        top = known = self._place.start.prefix
        rules = self._rules[known]
        for name in prefix[len(known) :].split("/")[:-1]:
            path = known + name
            known = path + "/"
            if known not in self._rules:
                ignored = rules is None or rules.ignores(path, name, is_directory=True)
                self._rules[known] = None if ignored else self._read_rules(path, rules)
            rules = self._rules[known]
        if len(self._rules) > _REMEMBERED_DIRECTORIES:
            self._rules = {top: self._rules[top]}
        return rules

    def _read_rules(self, path: str, above: IgnoreRules | None) -> IgnoreRules | None:
        place = RelativePath(os.fsencode(path), shown_name(path))
        try:
            directory = self._place.root.open_file(place, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
        except ToolError:
            return above
        try:
            return read_rules(directory, above, path + "/", None)
        finally:
            os.close(directory)

    # -- the result

    def result(self, found: _Found, options: ListingOptions) -> ToolResult:
        """Return what was found as text and details."""
        lines: list[_Line] = []
        texts: list[str] = []
        for line in found.in_order(self.context):
            follows = bool(lines) and (line.path, line.number) == (lines[-1].path, lines[-1].number + 1)
            separator = f"{SEPARATOR}\n" if lines and self.context and not follows else ""
            lines.append(line)
            texts.append(separator + line.shown(shown_name(line.path)))
        total = None if found.over else found.matches
        before = [0]
        for line in lines:
            before.append(before[-1] + line.is_match)

        def notices(count: int) -> list[str]:
            left_out = notice_of_more(
                "matches",
                before[count],
                before[count],
                total,
                by_limit=found.limit_reached and before[count] == self.limit,
                advice="narrow pattern, path or include",
            )
            nothing = [] if found.matches or found.over else ["No matches found"]
            return [*nothing, *([] if left_out is None else [left_out]), *self._asides(found)]

        cut = cut_lines(texts, notices, options.max_output_bytes, max(SHOWN_MAX_LINES, self.limit))
        shown = lines[: cut.shown]
        matches = [line for line in shown if line.is_match]
        lines_truncated = sum(line.text.cut for line in shown)
        binary = found.binary + self._place.is_binary
        details = GrepDetails(
            path=self._place.start.path,
            relative_path=self._place.start.shown_relative,
            matches=len(matches),
            files=len({line.path for line in matches}),
            files_skipped=binary + found.errors.unreadable,
            skipped={"binary": binary, "unreadable": found.errors.unreadable},
            ignored=found.errors.ignored,
            truncated=found.over or cut.shown < len(lines) or lines_truncated > 0,
            limit_reached=found.limit_reached,
            lines_truncated=lines_truncated,
            entries=[line.fields() for line in matches],
            context=[line.fields() for line in shown if not line.is_match] if self.context else None,
        )
        return ToolResult(text_content(cut.text), details.to_json())

    def _asides(self, found: _Found) -> list[str]:
        asides = []
        binary = found.binary + self._place.is_binary
        reasons = [f"{binary} binary {'file' if binary == 1 else 'files'}"] if binary else []
        if found.errors.unreadable:
            named = [f"{short_name(os.fsdecode(path))}: {reason}" for path, reason in found.errors.named]
            others = found.errors.unreadable - len(named)
            listed = "; ".join([*named, *([f"and {others} more"] if others else [])])
            reasons.append(f"{found.errors.unreadable} unreadable ({listed})")
        if reasons:
            asides.append(f"[Not searched: {', '.join(reasons)}.]")
        if found.errors.ignored:
            asides.append(notice_of_ignored(found.errors.ignored))
        return asides


def _is_binary(root: Root, path: RelativePath, encoding: TextEncoding | None) -> bool:
    """Whether a file that is named exactly is one that a search of its directory would leave out."""
    opened = root.open_regular(path)
    try:
        sample = os.pread(opened.fd, SAMPLE_BYTES, 0)
    except OSError as error:
        raise tool_error_from_oserror(error, path.shown) from None
    finally:
        opened.close()
    return encoding is None and b"\0" in sample and not sample.startswith((BOM_UTF16_LE, BOM_UTF16_BE))


def _read_rules_of(start: Start, path: RelativePath, above: IgnoreRules | None) -> IgnoreRules:
    """Return the rules that hold in the directory a search starts from; it has to be one that can be read."""
    try:
        directory = os.open(b".", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC, dir_fd=start.fd)
    except OSError as error:
        raise tool_error_from_oserror(error, path.shown) from None
    try:
        return read_rules(directory, above, start.prefix, None)
    finally:
        os.close(directory)


def _pattern(name: str, glob: str | None) -> PathPattern | None:
    if glob is None:
        return None
    try:
        return PathPattern(glob)
    except GlobError as error:
        raise ToolError(ErrorCode.INVALID_ARGUMENTS, f"{name}: {glob!r} is no glob: {error}") from None
