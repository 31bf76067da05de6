"""Cutting long text to a budget of bytes (of UTF-8) and lines.

A line ends at LF and includes it; what follows the last LF is a line when it is not empty. Whole lines are kept as far
as the budget goes. Only when the one line next to the cut is larger than the budget by itself is a part of it kept: its
end by `truncate_head`, its beginning by `truncate_tail`. No character is ever split.
"""

from dataclasses import dataclass
from typing import Any, Final

DEFAULT_MAX_BYTES: Final = 10_000_000
DEFAULT_MAX_LINES: Final = 10_000
ELLIPSIS: Final = "…"


@dataclass(frozen=True, slots=True)
class Truncation:
    """What was kept, and how much there was: `original_bytes` of UTF-8 and `original_lines`."""

    text: str
    truncated: bool
    original_bytes: int
    original_lines: int

    def to_json(self) -> dict[str, Any]:
        """Return the facts without the text."""
        return {
            "truncated": self.truncated,
            "originalBytes": self.original_bytes,
            "originalLines": self.original_lines,
        }


def truncate_head(
    text: str, max_bytes: int | None = DEFAULT_MAX_BYTES, max_lines: int | None = DEFAULT_MAX_LINES
) -> Truncation:
    """Drop the head and keep the tail. `None` is no limit.

    Raises:
        ValueError: for a negative limit.
    """
    data, lines = _measure(text, max_bytes, max_lines)
    start = 0
    if max_lines is not None and lines > max_lines:
        # The LF that ends the last line begins nothing, so the search starts before it.
        start = len(data) if max_lines == 0 else len(data) - data.endswith(b"\n")
        for _ in range(max_lines):
            start = data.rfind(b"\n", 0, start)
        start += max_lines > 0
    if max_bytes is not None and len(data) - start > max_bytes:
        start = len(data) - max_bytes
        boundary = start if data[start - 1 : start] == b"\n" else data.find(b"\n", start) + 1
        start = boundary if 0 < boundary < len(data) else _next_character(data, start)
    return Truncation(_decode(data[start:]) if start else text, start > 0, len(data), lines)


def truncate_tail(
    text: str, max_bytes: int | None = DEFAULT_MAX_BYTES, max_lines: int | None = DEFAULT_MAX_LINES
) -> Truncation:
    """Drop the tail and keep the head. `None` is no limit.

    Raises:
        ValueError: for a negative limit.
    """
    data, lines = _measure(text, max_bytes, max_lines)
    end = len(data)
    if max_lines is not None and lines > max_lines:
        end = 0
        for _ in range(max_lines):
            end = data.find(b"\n", end) + 1
    if max_bytes is not None and end > max_bytes:
        # A line whose text fits counts as whole even when its LF does not.
        boundary = max_bytes if data[max_bytes : max_bytes + 1] == b"\n" else data.rfind(b"\n", 0, max_bytes) + 1
        end = boundary or _previous_character(data, max_bytes)
    return Truncation(_decode(data[:end]) if end < len(data) else text, end < len(data), len(data), lines)


def truncate_line(text: str, max_bytes: int | None = DEFAULT_MAX_BYTES) -> Truncation:
    """Keep the beginning of one line and end it in `…`, which counts; without room for the mark nothing is kept.

    Raises:
        ValueError: for a negative limit.
    """
    data, lines = _measure(text, max_bytes, None)
    if max_bytes is None or len(data) <= max_bytes:
        return Truncation(text, False, len(data), lines)
    room = max_bytes - len(ELLIPSIS.encode())
    kept = "" if room < 0 else _decode(data[: _previous_character(data, room)]) + ELLIPSIS
    return Truncation(kept, True, len(data), lines)


def count_lines(data: bytes) -> int:
    """Return how many lines there are; a final LF starts no further one."""
    return data.count(b"\n") + (not data.endswith(b"\n") and bool(data))


def _measure(text: str, max_bytes: int | None, max_lines: int | None) -> tuple[bytes, int]:
    for name, limit in (("max_bytes", max_bytes), ("max_lines", max_lines)):
        if limit is not None and limit < 0:
            raise ValueError(f"{name} is {limit}; it cannot be negative")
    # A lone surrogate is no valid text, but cutting one is not the place to find out.
    data = text.encode("utf-8", "surrogatepass")
    return data, count_lines(data)


def _decode(data: bytes) -> str:
    return data.decode("utf-8", "surrogatepass")


def _next_character(data: bytes, position: int) -> int:
    """Return the first boundary of a character at or after `position`."""
    while position < len(data) and data[position] & 0xC0 == 0x80:
        position += 1
    return position


def _previous_character(data: bytes, position: int) -> int:
    """Return the last boundary of a character at or before `position`."""
    while 0 < position < len(data) and data[position] & 0xC0 == 0x80:
        position -= 1
    return position
