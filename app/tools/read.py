"""read: a window of lines of a text file, streamed, so that memory does not grow with the file."""

import codecs
import os
import shlex
from bisect import bisect_right
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import accumulate
from typing import Final

from pydantic import Field

from app.domain import json_codec
from app.domain.abort import AbortSignal
from app.domain.tool_call import ToolResult, text_content
from app.domain.workspace import READ_MAX_LINES, WorkspaceOptions
from app.errors import ErrorCode, ToolError
from app.sandbox.containment import Root, tool_error_from_oserror
from app.tools.base import OnUpdate, ToolAnnotations, ToolDefinition
from app.tools.environment import ToolEnvironment
from app.tools.model_tool import ArgumentsModel, DetailsModel, ModelTool, define
from app.tools.text_encoding import SAMPLE_BYTES, UTF_8, NotText, TextEncoding, detect_encoding, encoding_named

STEP_BYTES: Final = 262_144
COUNTED_AFTER_PAGE: Final = 16 * 1_048_576
"""How much of a file is read behind the page only to tell how many lines there are."""

MEASURED_LINE_BYTES: Final = 64 * 1_048_576
RESULT_MAX_BYTES: Final = 8 * 1_048_576 - 65_536
"""What a text may take as JSON, whatever the options say: a stored result is at most 8 MiB."""

_HARMLESS_BYTES: Final = RESULT_MAX_BYTES // 6  # JSON writes a control character in six
_BAR: Final = "│ "
_SUGGESTED_BYTES: Final = 50_000
_NUMBERS: Final = tuple(f"{number:4}{_BAR}" for number in range(READ_MAX_LINES + 1))

READ_ANNOTATIONS: Final = ToolAnnotations(
    title="Read a file",
    read_only_hint=True,
    destructive_hint=False,
    idempotent_hint=True,
    open_world_hint=False,
)

_TEXT_TYPES: Final = {
    "c": "text/x-c",
    "cfg": "text/plain",
    "cpp": "text/x-c++",
    "css": "text/css",
    "csv": "text/csv",
    "go": "text/x-go",
    "h": "text/x-c",
    "htm": "text/html",
    "html": "text/html",
    "java": "text/x-java",
    "js": "text/javascript",
    "json": "application/json",
    "jsonl": "application/jsonl",
    "md": "text/markdown",
    "mjs": "text/javascript",
    "py": "text/x-python",
    "rs": "text/x-rust",
    "rst": "text/x-rst",
    "sh": "application/x-sh",
    "sql": "application/sql",
    "svg": "image/svg+xml",
    "tex": "application/x-tex",
    "toml": "application/toml",
    "ts": "text/x-typescript",
    "tsv": "text/tab-separated-values",
    "xml": "application/xml",
    "yaml": "application/yaml",
    "yml": "application/yaml",
}


class ReadArguments(ArgumentsModel):
    path: str = Field(description="The file, relative to the workspace root (or absolute, below it).")
    offset: int | None = Field(default=None, ge=1, description="First line to show, counted from 1 (default 1).")
    limit: int | None = Field(default=None, ge=1, description="How many lines to show at most.")
    line_numbers: bool | None = Field(default=None, description="Whether to number the lines (default true).")
    encoding: str | None = Field(
        default=None,
        description="What the file is encoded in, for example gb18030 or windows-1252, when it is neither UTF-8 nor "
        "UTF-16.",
    )


class ReadDetails(DetailsModel):
    """`bytes` and `lines` are the file's, `start_line` to `end_line` were shown; `lines` is None when not counted."""

    path: str
    relative_path: str
    bytes: int
    lines: int | None
    start_line: int
    end_line: int
    truncated: bool
    next_offset: int | None
    encoding: str
    mime_type: str


def read_definition(options: WorkspaceOptions) -> ToolDefinition:
    limits = options.read
    return define(
        "read",
        "Read a text file of the workspace. Shows numbered lines, at most "
        f"{limits.max_lines} lines and {min(limits.max_bytes, RESULT_MAX_BYTES)} bytes in one "
        "call; when more follow, the result ends in a notice that gives the offset to go on with. Directories are for "
        "ls.",
        ReadArguments,
        READ_ANNOTATIONS,
        limits.execution_mode,
    )


class ReadTool(ModelTool[ReadArguments]):
    arguments_model = ReadArguments

    def __init__(self, environment: ToolEnvironment) -> None:
        super().__init__(read_definition(environment.options))
        self._environment = environment

    async def run(
        self,
        tool_call_id: str,  # noqa: ARG002 - the interface of every tool
        args: ReadArguments,
        signal: AbortSignal,
        on_update: OnUpdate,  # noqa: ARG002 - as above
    ) -> ToolResult:
        environment = self._environment
        return await environment.files.run(
            self._read, args, signal.raise_if_aborted, signal=signal, workspace=environment.cwd
        )

    def _read(self, args: ReadArguments, check: Callable[[], None]) -> ToolResult:
        environment = self._environment
        options = environment.options.read
        label = options.encoding if args.encoding is None else args.encoding
        encoding = None if label is None else encoding_named(label)
        limit = options.max_lines if args.limit is None else min(args.limit, options.max_lines)
        with Root.open(environment.cwd, environment.root_identity, environment.options.containment) as root:
            path = root.relative(args.path)
            window = Window(
                shown=path.shown,
                offset=args.offset or 1,
                limit=limit,
                max_bytes=min(options.max_bytes, RESULT_MAX_BYTES),
                numbered=options.line_numbers if args.line_numbers is None else args.line_numbers,
                encoding=encoding,
            )
            file = root.open_regular(path)
        try:
            page = read_page(file.fd, file.status.st_size, window, check)
        except OSError as error:
            raise tool_error_from_oserror(error, path.shown) from None
        except ToolError as error:
            where = {"path": file.path, "relativePath": file.relative_path, "bytes": file.status.st_size}
            error.details = {**where, **error.details}
            raise
        finally:
            file.close()
        details = ReadDetails(
            path=file.path,
            relative_path=file.relative_path,
            bytes=page.bytes,
            lines=page.lines,
            start_line=page.start_line,
            end_line=page.end_line,
            truncated=page.next_offset is not None,
            next_offset=page.next_offset,
            encoding=page.encoding,
            mime_type=_TEXT_TYPES.get(file.path.rpartition(".")[2].lower(), "text/plain"),
        )
        return ToolResult(text_content(page.text), details.to_json())


@dataclass(slots=True)
class Window:
    """What to show: at most `limit` lines from line `offset` on, in at most `max_bytes` bytes of UTF-8, all counted."""

    shown: str
    offset: int
    limit: int
    max_bytes: int
    numbered: bool = True
    encoding: TextEncoding | None = None


@dataclass(slots=True)
class Page:
    """`text` is what is shown, notice included; `bytes` and `lines` are the file's, `lines` None when not counted."""

    text: str
    bytes: int
    lines: int | None
    start_line: int
    end_line: int
    next_offset: int | None
    encoding: str


def read_page(fd: int, size: int, window: Window, check: Callable[[], None]) -> Page:
    """Return a window of the lines of an open file of `size` bytes, which it reads from where it stands.

    A line ends at LF; a CR before it is not shown. `size` is taken for what the file system says, not for the truth:
    the file ends where reading ends.

    Raises:
        ToolError: `unsupported` (binary, or not in its encoding), `invalid_arguments` (an offset past the end),
            `too_large` (the first line does not fit).
        OSError: reading failed.
    """
    sample, whole = _sample(fd, size)
    encoding = detect_encoding(sample, whole=whole, encoding=window.encoding)
    if isinstance(encoding, NotText):
        raise _not_text(window.shown, max(size, len(sample)), encoding)
    stream = _Stream(fd, sample, whole, encoding, check)
    if whole and len(sample) == len(encoding.bom):
        return _empty(window, len(sample), encoding)

    chunk = _skip_lines(stream, window)
    start_byte = stream.taken - len(chunk)
    content, tail = _collect(stream, chunk, window.limit, _raw_budget(window.max_bytes, encoding))
    if not content:
        line_bytes, more = _measure_line(stream, tail)
        raise _line_too_long(window, encoding, start_byte, line_bytes, more)
    more = bool(tail) or stream.more()
    lines = _decode(content, start_byte, window, encoding)
    shown = lines
    if window.numbered:
        shown = list(map(str.__add__, _numbers(window.offset, len(lines)), lines))
    text = "\n".join(shown)
    total: int | None = window.offset - 1 + len(lines)
    count = len(lines)
    notice = ""
    if more or len(text.encode()) > window.max_bytes or window.max_bytes > _HARMLESS_BYTES:
        ends = list(accumulate(len(line.encode()) + 1 for line in shown))
        count = bisect_right(ends, window.max_bytes + 1)
        if more:
            page_end = len(content) if count == len(lines) else _after_newline(content, count)
            behind = max(size, stream.taken) - start_byte - page_end
            rest = None if behind > COUNTED_AFTER_PAGE else _count_lines(stream, tail)
            total = None if rest is None else window.offset - 1 + len(lines) + rest
        while count and (more or count < len(lines)):
            notice = _notice(window.offset, count, total)
            if ends[count - 1] - 1 + len(notice) <= window.max_bytes:
                break
            count -= 1
        text = "\n".join(shown[:count]) + notice
        while count and window.max_bytes > _HARMLESS_BYTES and (excess := _excess(text)):
            count = min(count - 1, int(count / excess))
            notice = _notice(window.offset, count, total)
            text = "\n".join(shown[:count]) + notice
    if not count:
        line_bytes = len(content.split(b"\n", 1)[0])
        raise _line_too_long(window, encoding, start_byte, line_bytes, more or len(lines) > 1)
    end_line = window.offset + count - 1
    return Page(
        text=text,
        bytes=stream.taken if stream.ended else max(size, stream.taken),
        lines=total,
        start_line=window.offset,
        end_line=end_line,
        next_offset=end_line + 1 if notice else None,
        encoding=encoding.name,
    )


class _Stream:
    """The bytes of a file after its byte order mark, in steps; UTF-16 comes as UTF-8, so that LF is a byte in both."""

    def __init__(self, fd: int, sample: bytes, whole: bool, encoding: TextEncoding, check: Callable[[], None]) -> None:
        self._fd = fd
        self._check = check
        self._decoder = None
        self.taken = len(sample)
        self.ended = whole
        if not encoding.newline_is_a_byte:
            # What is no valid UTF-16 stays invalid in UTF-8: it is refused when it is shown and skipped over before.
            self._decoder = codecs.getincrementaldecoder(encoding.codec)("surrogatepass")
        self._pending = self._convert(sample[len(encoding.bom) :])
        if whole:
            self._pending += self._rest()

    def take(self) -> bytes:
        """Return the next step, nothing at the end."""
        if self._pending:
            step, self._pending = self._pending, b""
            return step
        while not self.ended:
            self._check()
            data = os.read(self._fd, STEP_BYTES)
            self.taken += len(data)
            if data:
                step = self._convert(data)
            else:
                self.ended = True
                step = self._rest()
            if step:
                return step
        return b""

    def more(self) -> bool:
        """Whether there is a next step."""
        self._pending = self.take()
        return bool(self._pending)

    def _convert(self, data: bytes) -> bytes:
        if self._decoder is None:
            return data
        return self._decoder.decode(data).encode("utf-8", "surrogatepass")

    def _rest(self) -> bytes:
        if self._decoder is None:
            return b""
        try:
            return self._decoder.decode(b"", True).encode("utf-8", "surrogatepass")
        except UnicodeDecodeError:
            return b"\xff"  # half a code unit


def _sample(fd: int, size: int) -> tuple[bytes, bool]:
    """Read the beginning of a file and return it and whether it is all."""
    wanted = SAMPLE_BYTES if size >= SAMPLE_BYTES else size + 1
    sample = os.read(fd, wanted)
    if len(sample) == size < wanted:
        return sample, True
    while len(sample) < SAMPLE_BYTES:
        # Not what the size said: it grows, shrinks, or is one of those that the kernel makes up while they are read.
        data = os.read(fd, SAMPLE_BYTES - len(sample))
        if not data:
            return sample, True
        sample += data
    return sample, False


def _skip_lines(stream: _Stream, window: Window) -> bytes:
    """Pass over the lines before the window and return what was read of the rest."""
    missing = window.offset - 1
    chunk = stream.take()
    while missing:
        found = chunk.count(b"\n")
        if found >= missing:
            chunk = chunk[_after_newline(chunk, missing) :] or stream.take()
            if not chunk:
                raise _past_the_end(window, window.offset - 1)
            break
        missing -= found
        unterminated = not chunk.endswith(b"\n")
        chunk = stream.take()
        if not chunk:
            raise _past_the_end(window, window.offset - 1 - missing + unterminated)
    return chunk


def _collect(stream: _Stream, chunk: bytes, limit: int, budget: int) -> tuple[bytes, bytes]:
    """Return whole lines, at most `limit` and little more than `budget` bytes, and what was read behind them."""
    parts: list[bytes] = []
    size = 0
    while chunk:
        found = chunk.count(b"\n")
        if found >= limit:
            end = _after_newline(chunk, limit)
            return b"".join([*parts, chunk[:end]]), chunk[end:]
        limit -= found
        parts.append(chunk)
        size += len(chunk)
        if size > budget:
            data = b"".join(parts)
            end = data.rfind(b"\n") + 1
            return data[:end], data[end:]
        chunk = stream.take()
    return b"".join(parts), b""


def _after_newline(data: bytes, count: int) -> int:
    """Return the position behind the `count`-th LF; there are that many."""
    start, end = 0, len(data)
    while count > 8 and end - start > 1024:
        middle = (start + end) // 2
        found = data.count(b"\n", start, middle)
        if found >= count:
            end = middle
        else:
            start = middle
            count -= found
    for _ in range(count):
        start = data.find(b"\n", start) + 1
    return start


def _count_lines(stream: _Stream, tail: bytes) -> int | None:
    """Return how many lines are left, None when there is too much to count."""
    count = size = 0
    last = step = tail or stream.take()
    while step:
        count += step.count(b"\n")
        size += len(step)
        if size > 2 * COUNTED_AFTER_PAGE:
            return None
        last = step
        step = stream.take()
    return count + (not last.endswith(b"\n") and bool(last))


def _raw_budget(max_bytes: int, encoding: TextEncoding) -> int:
    """Return how many bytes of a file may be needed to fill `max_bytes` of UTF-8: at most two or four for one."""
    return max_bytes * (2 if encoding.name.startswith("utf-") else 4)


def _decode(content: bytes, start_byte: int, window: Window, encoding: TextEncoding) -> list[str]:
    try:
        text = content.decode(encoding.codec, encoding.errors) if encoding.newline_is_a_byte else content.decode()
    except UnicodeDecodeError as error:
        line = window.offset + content.count(b"\n", 0, error.start)
        if encoding == UTF_8 and window.encoding is None:
            raise _not_text(window.shown, 0, NotText("text/plain", start_byte + error.start), line) from None
        raise ToolError(
            ErrorCode.UNSUPPORTED,
            f"line {line} of {window.shown} cannot be decoded as {encoding.name}; pass another encoding",
            {"encoding": encoding.name},
        ) from None
    if "\0" in text and encoding == UTF_8 and window.encoding is None:
        line = window.offset + text.count("\n", 0, text.index("\0"))
        raise ToolError(
            ErrorCode.UNSUPPORTED,
            f"{window.shown} holds binary data from line {line} on, which read cannot show; use bash to look into it",
        )
    if "\r" in text:
        text = text.replace("\r\n", "\n")
    lines = text.split("\n")
    if not lines[-1]:
        lines.pop()
    return lines


def _numbers(first: int, count: int) -> Iterable[str]:
    """Return what stands before each of `count` lines."""
    if first + count <= len(_NUMBERS):
        return _NUMBERS[first : first + count]
    return (f"{number:4}{_BAR}" for number in range(first, first + count))


def _notice(offset: int, count: int, total: int | None) -> str:
    end = offset + count - 1
    of = "" if total is None else f" of {total}"
    return f"\n\n[Showing lines {offset}-{end}{of}. Continue with offset={end + 1}.]"


def _excess(text: str) -> float:
    """Return how many times too large a text is as JSON, 0 when it fits."""
    size = len(json_codec.dump(text))
    return size / RESULT_MAX_BYTES if size > RESULT_MAX_BYTES else 0


def _empty(window: Window, size: int, encoding: TextEncoding) -> Page:
    if window.offset > 1:
        raise _past_the_end(window, 0)
    return Page(f"({window.shown} is empty)", size, 0, 1, 0, None, encoding.name)


def _past_the_end(window: Window, lines: int) -> ToolError:
    allowed = f"1 to {lines}" if lines > 1 else "1"
    return ToolError(
        ErrorCode.INVALID_ARGUMENTS,
        f"offset: there is no line {window.offset}; {window.shown} has {lines} {'line' if lines == 1 else 'lines'}, so "
        f"offset can be {allowed}",
        {"lines": lines},
    )


def _not_text(shown: str, size: int, found: NotText, line: int | None = None) -> ToolError:
    if found.binary:
        return ToolError(
            ErrorCode.UNSUPPORTED,
            f"{shown} is not text that read can show: {found.mime_type}, {size} bytes; use bash to look into it",
            {"mimeType": found.mime_type},
        )
    where = f"byte {found.offset}" if line is None else f"line {line}"
    return ToolError(
        ErrorCode.UNSUPPORTED,
        f"{shown} is not UTF-8 (from {where} on); pass encoding with the name of what it is in, for example gb18030, "
        "shift_jis, euc-kr or windows-1252",
        {"mimeType": found.mime_type},
    )


def _measure_line(stream: _Stream, beginning: bytes) -> tuple[int | None, bool]:
    """Return how long a line is that begins like this, None above `MEASURED_LINE_BYTES`, and whether more lines follow.

    The line is not kept.
    """
    size = len(beginning)
    while step := stream.take():
        end = step.find(b"\n")
        if end >= 0:
            return size + end, end + 1 < len(step) or stream.more()
        size += len(step)
        if size > MEASURED_LINE_BYTES:
            return None, False
    return size, False


def _line_too_long(window: Window, encoding: TextEncoding, start_byte: int, size: int | None, more: bool) -> ToolError:
    name = shlex.quote(window.shown if not window.shown.startswith("-") else f"./{window.shown}")
    if encoding.newline_is_a_byte:
        command = f"tail -c +{start_byte + 1} {name} | head -c {_SUGGESTED_BYTES}"
    else:
        command = f"iconv -f {encoding.name} -t utf-8 {name} | sed -n {window.offset}p | head -c {_SUGGESTED_BYTES}"
    has = f"more than {MEASURED_LINE_BYTES}" if size is None else str(size)
    skip = f", or go on behind it with offset={window.offset + 1}" if more else ""
    return ToolError(
        ErrorCode.TOO_LARGE,
        f"line {window.offset} of {window.shown} has {has} bytes and does not fit into the {window.max_bytes} bytes of "
        f"one read; get it in parts with bash, for example: {command}{skip}",
        {"line": window.offset, "lineBytes": size, "maxBytes": window.max_bytes, "startByte": start_byte},
    )
