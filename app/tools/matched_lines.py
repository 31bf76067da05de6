"""The text of lines whose place in a file is known, each cut around its match when it is long.

Nothing is read but what is shown, whatever the size of the file and of its lines; except for encodings other than
UTF-8, where places count in the decoded text and the file has to be decoded up to them.
"""

import codecs
import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, Protocol

from app.tools.text_encoding import TextEncoding

MAX_CHARACTERS: Final = 500
"""What is shown of a line that is longer."""

ELLIPSIS: Final = "…"
CHANGED: Final = "(the file changed during the search)"

_LEAD_CHARACTERS: Final = 120
_LEAD_BYTES: Final = 4 * _LEAD_CHARACTERS
_WINDOW_BYTES: Final = 4 * MAX_CHARACTERS + _LEAD_BYTES
_STEP_BYTES: Final = 262_144
_KEPT_LINE_BYTES: Final = 1_048_576


@dataclass(frozen=True, slots=True)
class LineText:
    """`cut`: the line is longer than this."""

    text: str
    cut: bool = False


class LineReader(Protocol):
    def line(self, number: int, offset: int, column: int | None) -> LineText:
        """Return a line: its number from 1, the bytes before it, and those before its match (None for no match).

        Bytes are counted in the text as UTF-8 without a byte order mark. Lines are asked for in ascending order.
        """
        ...


def line_reader(fd: int, encoding: TextEncoding | None, check: Callable[[], None]) -> LineReader:
    """Return what reads lines of an open file: by its byte order mark, else in this encoding, else as UTF-8."""
    head = os.pread(fd, 4, 0)
    if head.startswith(codecs.BOM_UTF8):
        return _Utf8Lines(fd, len(codecs.BOM_UTF8))
    for mark, codec in ((codecs.BOM_UTF16_LE, "utf-16-le"), (codecs.BOM_UTF16_BE, "utf-16-be")):
        if head.startswith(mark):
            return _DecodedLines(fd, len(mark), codec, check)
    if encoding is None or encoding.name == "utf-8":
        return _Utf8Lines(fd, 0)
    return _DecodedLines(fd, 0, encoding.codec, check)


class _Utf8Lines:
    def __init__(self, fd: int, base: int) -> None:
        self._fd = fd
        self._base = base

    def line(self, number: int, offset: int, column: int | None) -> LineText:  # noqa: ARG002 - the other reader's
        start = self._base + offset
        if offset:
            data = os.pread(self._fd, _WINDOW_BYTES + 1, start - 1)
            if data[:1] != b"\n":
                return LineText(CHANGED)
            data = data[1:]
        else:
            data = os.pread(self._fd, _WINDOW_BYTES, start)
        at = column or 0
        end = data.find(b"\n")
        if end >= 0 or len(data) < _WINDOW_BYTES:
            return _excerpt(_without_end(data, end), at, before=False, after=False)
        begin = max(0, at - _LEAD_BYTES)
        if begin:
            data = os.pread(self._fd, _WINDOW_BYTES, start + begin)
            end = data.find(b"\n")
        whole = end >= 0 or len(data) < _WINDOW_BYTES
        return _excerpt(_without_end(data, end), at - begin, before=begin > 0, after=not whole)


class _DecodedLines:
    def __init__(self, fd: int, base: int, codec: str, check: Callable[[], None]) -> None:
        self._fd = fd
        self._check = check
        self._decoder = codecs.getincrementaldecoder(codec)("replace")
        self._position = base
        self._ended = False
        self._number = 1
        self._data = b""  # decoded, from the beginning of line `number` on or, while lines are passed over, from within

    def line(self, number: int, offset: int, column: int | None) -> LineText:  # noqa: ARG002 - the other reader's
        while self._number < number:
            found = self._data.count(b"\n")
            missing = number - self._number
            if found >= missing:
                position = 0
                for _ in range(missing):
                    position = self._data.index(b"\n", position) + 1
                self._data = self._data[position:]
                self._number = number
            elif self._ended:
                return LineText(CHANGED)
            else:
                self._number += found
                self._data = self._more()
        while b"\n" not in self._data and not self._ended and len(self._data) < _KEPT_LINE_BYTES:
            self._data += self._more()
        end = self._data.find(b"\n")
        whole = end >= 0 or self._ended
        line = _without_end(self._data, end)
        return _excerpt(line, min(column or 0, len(line)), before=False, after=not whole)

    def _more(self) -> bytes:
        self._check()
        data = os.pread(self._fd, _STEP_BYTES, self._position)
        self._position += len(data)
        self._ended = not data
        return self._decoder.decode(data, self._ended).encode("utf-8", "replace")


def _without_end(data: bytes, newline: int) -> bytes:
    return data if newline < 0 else data[:newline].removesuffix(b"\r")


def _excerpt(data: bytes, at: int, *, before: bool, after: bool) -> LineText:
    """Return what is shown of a piece of a line.

    Args:
        data: the piece; it may begin and end within a character.
        at: where in it the match is.
        before: whether the line has more before the piece.
        after: whether it has more behind it.
    """
    if before:
        begin = next((i for i in range(min(4, len(data))) if data[i] & 0xC0 != 0x80), 0)
        data = data[begin:]
        at -= begin
    text = data.decode("utf-8", "replace")
    if after and text.endswith("\ufffd"):
        text = text[:-1]
    if len(text) <= MAX_CHARACTERS and not before and not after:
        return LineText(text)
    match = len(data[:at].decode("utf-8", "replace"))
    start = max(0, min(match - _LEAD_CHARACTERS, len(text) - MAX_CHARACTERS))
    left = before or start > 0
    right = after or start + MAX_CHARACTERS < len(text)
    shown = f"{ELLIPSIS if left else ''}{text[start : start + MAX_CHARACTERS]}{ELLIPSIS if right else ''}"
    return LineText(shown, cut=left or right)
