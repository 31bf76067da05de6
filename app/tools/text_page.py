"""A window of lines of a text file, streamed, so that memory does not grow with the file."""

import codecs
import os
import shlex
from bisect import bisect_right
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import accumulate
from typing import Final

from app.domain import json_codec
from app.domain.encodings import TextEncoding
from app.domain.workspace import READ_MAX_LINES
from app.errors import ErrorCode, ToolError
from app.tools.line_index import LineIndex
from app.tools.text_encoding import SAMPLE_BYTES, UTF_8, NotText

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


@dataclass(slots=True)
class Window:
    """What to show: at most `limit` lines from line `offset` on, in at most `max_bytes` bytes of UTF-8, all counted.

    `encoding` is what the caller said that the file is in.
    """

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
    encoding: TextEncoding


@dataclass(frozen=True, slots=True)
class Beginning:
    """The first bytes of a file, and whether they are all of it."""

    sample: bytes
    whole: bool


def read_beginning(fd: int, size: int) -> Beginning:
    """Read the beginning of an open file that is said to have `size` bytes, from where it stands."""
    wanted = SAMPLE_BYTES if size >= SAMPLE_BYTES else size + 1
    sample = os.read(fd, wanted)
    if len(sample) == size < wanted:
        return Beginning(sample, whole=True)
    while len(sample) < SAMPLE_BYTES:
        # Not what the size said: it grows, shrinks, or is one of those that the kernel makes up while they are read.
        data = os.read(fd, SAMPLE_BYTES - len(sample))
        if not data:
            return Beginning(sample, whole=True)
        sample += data
    return Beginning(sample, whole=False)


def read_page(
    fd: int,
    size: int,
    beginning: Beginning,
    encoding: TextEncoding,
    window: Window,
    check: Callable[[], None],
    index: LineIndex | None = None,
) -> Page:
    """Return a window of the lines of an open file of `size` bytes in `encoding`, which stands behind its `beginning`.

    A line ends at LF; a CR before it is not shown. `size` is taken for what the file system says, not for the truth:
    the file ends where reading ends. `index` tells where lines are and is told what is found out.

    Raises:
        ToolError: `unsupported` (binary, or not in its encoding), `invalid_arguments` (an offset past the end),
            `too_large` (the first line does not fit).
        OSError: reading failed.
    """
    stream = _Stream(fd, beginning, encoding, check)
    if beginning.whole and len(beginning.sample) == len(encoding.bom):
        return _empty(window, len(beginning.sample), encoding)

    chunk = _skip_lines(stream, window, index)
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
    last = window.offset - 1 + len(lines)
    total: int | None = last
    count = len(lines)
    notice = ""
    if more or len(text.encode()) > window.max_bytes or window.max_bytes > _HARMLESS_BYTES:
        ends = list(accumulate(len(line.encode()) + 1 for line in shown))
        count = bisect_right(ends, window.max_bytes + 1)
        if more:
            page_end = len(content) if count == len(lines) else _after_newline(content, count)
            behind = max(size, stream.taken) - start_byte - page_end
            total = None if behind > COUNTED_AFTER_PAGE else _total(stream, tail, last, index)
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
        encoding=encoding,
    )


class _Stream:
    """The bytes of a file after its byte order mark, in steps; UTF-16 comes as UTF-8, so that LF is a byte in both."""

    def __init__(self, fd: int, beginning: Beginning, encoding: TextEncoding, check: Callable[[], None]) -> None:
        self._fd = fd
        self._check = check
        self._decoder = None
        self.taken = len(beginning.sample)
        self.ended = beginning.whole
        if not encoding.newline_is_a_byte:
            # What is no valid UTF-16 stays invalid in UTF-8: it is refused when it is shown and skipped over before.
            self._decoder = codecs.getincrementaldecoder(encoding.codec)("surrogatepass")
        self._pending = self._convert(beginning.sample[len(encoding.bom) :])
        if beginning.whole:
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

    def go_to(self, position: int) -> None:
        """Go on at a byte of the file where a character begins, further than what was taken."""
        os.lseek(self._fd, position, os.SEEK_SET)
        self.taken = position
        self._pending = b""
        if self._decoder is not None:
            self._decoder.reset()

    @property
    def between_characters(self) -> bool:
        """Whether `taken` is where what `take` returned last ends; it may lie in the middle of a character."""
        return self._decoder is None or not self._decoder.getstate()[0]

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


def _skip_lines(stream: _Stream, window: Window, index: LineIndex | None) -> bytes:
    """Pass over the lines before the window and return what was read of the rest."""
    missing = window.offset - 1
    if missing and index is not None and not stream.ended:
        if index.total is not None and missing >= index.total:
            raise _past_the_end(window, index.total)
        position, lines = index.before(missing)
        if position > stream.taken:
            stream.go_to(position)
            missing -= lines
    chunk = stream.take()
    while missing:
        found = chunk.count(b"\n")
        if found >= missing:
            chunk = chunk[_after_newline(chunk, missing) :] or stream.take()
            if not chunk:
                raise _past_the_end(window, _learned(window.offset - 1, index))
            break
        missing -= found
        unterminated = not chunk.endswith(b"\n")
        if index is not None and stream.between_characters:
            index.note(stream.taken, window.offset - 1 - missing)
        chunk = stream.take()
        if not chunk:
            raise _past_the_end(window, _learned(window.offset - 1 - missing + unterminated, index))
    return chunk


def _learned(total: int, index: LineIndex | None) -> int:
    if index is not None:
        index.total = total
    return total


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


def _total(stream: _Stream, tail: bytes, last: int, index: LineIndex | None) -> int | None:
    """Return how many lines there are when `tail` follows line `last`, None when there is too much to count."""
    if index is not None and index.total is not None:
        return index.total
    rest = _count_lines(stream, tail)
    return None if rest is None else _learned(last + rest, index)


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
            raise unknown_text(window.shown, NotText("text/plain", start_byte + error.start), line) from None
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
    return Page(f"({window.shown} is empty)", size, 0, 1, 0, None, encoding)


def _past_the_end(window: Window, lines: int) -> ToolError:
    allowed = f"1 to {lines}" if lines > 1 else "1"
    return ToolError(
        ErrorCode.INVALID_ARGUMENTS,
        f"offset: there is no line {window.offset}; {window.shown} has {lines} {'line' if lines == 1 else 'lines'}, so "
        f"offset can be {allowed}",
        {"lines": lines},
    )


def unknown_text(shown: str, found: NotText, line: int | None = None) -> ToolError:
    """Return the error for a text whose encoding is not known: `found` says from which byte on, or `line` where."""
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
