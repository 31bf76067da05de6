"""Unified diffs that `patch -p1` and `git apply` take, at a cost that does not grow with what did not change.

Lines end at LF alone; a CR before it is part of the line, so CRLF texts keep their ends in the patch. A diff that would
be too long, or too dear to make, is None: the caller says that it was left out.
"""

import os
import re
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from difflib import SequenceMatcher
from typing import Final

DIFF_MAX_BYTES: Final = 65_536
DIFF_MAX_INPUT: Final = 1_000_000
CONTEXT: Final = 3

# What difflib may compare in one diff: lines of one side times lines of the other, summed. Its worst case is cubic (a
# line that repeats on one side and alternates with others on the other one): 25 ms for 141 times 141 lines.
_COMPARED_PAIRS: Final = 20_000
# How many lines, old and new, from the first change to the last of each stretch of changes are looked at.
_COMPARED_LINES: Final = 20_000
_BLOCK: Final = 4096
_NO_NEWLINE: Final = "\n\\ No newline at end of file\n"
_NEEDS_QUOTES: Final = re.compile(r'[\x00-\x1f"\\\x7f\ud800-\udfff]')

Span = tuple[int, int, str]


@dataclass(slots=True)
class _Change:
    """Whole lines of the old text, `old[start:end]` from line `line` (0-based), and what stands there now."""

    line: int
    start: int
    end: int
    removed: list[str]
    added: list[str]

    @property
    def after(self) -> int:
        """The number of the first line after the change."""
        return self.line + len(self.removed)


@dataclass(slots=True)
class _Budget:
    """What is left of what one diff may cost."""

    pairs: int
    lines: int

    def take_pairs(self, pairs: int) -> bool:
        if pairs > self.pairs:
            return False
        self.pairs -= pairs
        return True

    def take_lines(self, lines: int) -> bool:
        self.lines -= lines
        return self.lines >= 0


def unified_diff_from_spans(
    old: str, spans: Iterable[Span], path: str, *, max_bytes: int = DIFF_MAX_BYTES
) -> str | None:
    """Return the diff of replacing `old[start:end]` by `replacement` for each span; `""` when nothing changes.

    Spans are in order and do not overlap. Returns None when the diff would be longer than `max_bytes` of UTF-8.
    """
    return _render(old, (_narrowed(old, span) for span in spans), _header(path, created=False), max_bytes)


def unified_diff(
    old: str | None,
    new: str,
    path: str,
    *,
    max_input: int = DIFF_MAX_INPUT,
    max_bytes: int = DIFF_MAX_BYTES,
) -> str | None:
    """Return the diff from `old` to `new`; `old` is None for a file that is new. `""` when nothing changes.

    Returns None when what lies between the common beginning and the common end of both is longer than `max_input`
    characters in all, or when the diff would be longer than `max_bytes` of UTF-8.
    """
    before = old or ""
    start, end, replacement = _narrowed(before, (0, len(before), new))
    if end - start + len(replacement) > max_input:
        return None
    return _render(before, [(start, end, replacement)], _header(path, created=old is None), max_bytes)


def common_prefix(one: str, other: str, start: int = 0) -> int:
    """Return the index of the first character after `start` in which two texts that are equal before it differ."""
    end = min(len(one), len(other))
    while start < end:
        stop = min(start + _BLOCK, end)
        if one[start:stop] != other[start:stop]:
            return next(index for index in range(start, stop) if one[index] != other[index])
        start = stop
    return end


def _common_suffix(one: str, other: str, limit: int) -> int:
    size = 0
    while size < limit:
        step = min(_BLOCK, limit - size)
        left = one[len(one) - size - step : len(one) - size]
        right = other[len(other) - size - step : len(other) - size]
        if left != right:
            return size + next(index for index in range(step) if left[step - 1 - index] != right[step - 1 - index])
        size += step
    return limit


def _narrowed(old: str, span: Span) -> Span:
    """Return the span without the characters its old and its new text begin and end with."""
    start, end, replacement = span
    before = old[start:end]
    head = common_prefix(before, replacement)
    tail = _common_suffix(before, replacement, min(len(before), len(replacement)) - head)
    return start + head, end - tail, replacement[head : len(replacement) - tail]


def _render(old: str, spans: Iterable[Span], header: str, max_bytes: int) -> str | None:
    changes: list[_Change] = []
    budget = _Budget(_COMPARED_PAIRS, _COMPARED_LINES)
    size = 0
    for line, start, end, replacement in _regions(old, spans):
        if not budget.take_lines(old.count("\n", start, end) + replacement.count("\n")):
            return None
        for change in _compared(line, start, _lines(old[start:end]), _lines(replacement), budget):
            size += change.end - change.start + sum(map(len, change.added))
            if size > max_bytes:
                return None
            changes.append(change)
    if not changes:
        return ""
    pieces = [header]
    room = max_bytes - len(header)
    for hunk in _hunks(old, changes):
        pieces.append(hunk)
        room -= len(hunk.encode("utf-8", "surrogatepass"))
        if room < 0:
            return None
    return "".join(pieces)


def _regions(old: str, spans: Iterable[Span]) -> Iterator[tuple[int, int, int, str]]:
    """Yield `(line, start, end, replacement)` of whole lines, spans that share a line as one."""
    line = counted = 0
    start = end = cursor = -1
    pieces: list[str] = []
    for first, last, replacement in spans:
        if first == last and not replacement:
            continue
        # A line without an end takes up whatever follows it, also what begins where it stops.
        if start >= 0 and (first < end or (first == end and old[end - 1 : end] != "\n")):
            pieces.append(old[cursor:first])
        else:
            if start >= 0:
                yield line, start, end, "".join([*pieces, old[cursor:end]])
            start = old.rfind("\n", 0, first) + 1
            line += old.count("\n", counted, start)
            counted = start
            pieces = [old[start:first]]
        pieces.append(replacement)
        cursor = last
        if last >= end:
            newline = old.find("\n", last)
            end = len(old) if newline < 0 else newline + 1
    if start >= 0:
        yield line, start, end, "".join([*pieces, old[cursor:end]])


def _compared(line: int, start: int, old: list[str], new: list[str], budget: _Budget) -> Iterator[_Change]:
    """Yield the changes that turn the lines `old`, which begin at `line` and offset `start`, into `new`."""
    offset, at = start, 0
    for first, last, new_first, new_last in _opcodes(old, new, budget):
        offset += sum(map(len, old[at:first]))
        removed = old[first:last]
        end = offset + sum(map(len, removed))
        yield _Change(line + first, offset, end, removed, new[new_first:new_last])
        offset, at = end, last


def _opcodes(old: list[str], new: list[str], budget: _Budget) -> Iterator[tuple[int, int, int, int]]:
    """Yield `(old_first, old_last, new_first, new_last)` of what differs, in order."""
    old_at = new_at = 0
    for old_anchor, new_anchor in [*_anchors(old, new), (len(old), len(new))]:
        for gap in _trimmed(old, new, old_at, old_anchor, new_at, new_anchor):
            first, last, new_first, new_last = gap
            pairs = (last - first) * (new_last - new_first)
            if pairs <= 1 or not budget.take_pairs(pairs):
                yield gap
                continue
            matcher = SequenceMatcher(None, old[first:last], new[new_first:new_last], autojunk=False)
            for tag, i1, i2, j1, j2 in matcher.get_opcodes():
                if tag != "equal":
                    yield first + i1, first + i2, new_first + j1, new_first + j2
        old_at, new_at = old_anchor + 1, new_anchor + 1


def _trimmed(
    old: Sequence[str], new: Sequence[str], first: int, last: int, new_first: int, new_last: int
) -> Iterator[tuple[int, int, int, int]]:
    """Yield the range without the lines both sides begin and end with; nothing when they are equal."""
    while first < last and new_first < new_last and old[first] == new[new_first]:
        first += 1
        new_first += 1
    while first < last and new_first < new_last and old[last - 1] == new[new_last - 1]:
        last -= 1
        new_last -= 1
    if first < last or new_first < new_last:
        yield first, last, new_first, new_last


def _anchors(old: list[str], new: list[str]) -> list[tuple[int, int]]:
    """Return pairs of equal lines that both sides hold exactly once, in rising order on both (patience diff).

    They cut the comparison into short stretches, which keeps difflib, quadratic at best, away from whole files.
    """
    places = _unique(new)
    candidates = [(index, places[line]) for line, index in _unique(old).items() if line in places]
    # The longest rising chain of the second numbers, by patience sorting.
    tops: list[int] = []
    chain: list[int] = []
    before: list[int] = []
    for number, (_, place) in enumerate(candidates):
        pile = bisect_left(tops, place)
        before.append(chain[pile - 1] if pile else -1)
        if pile == len(tops):
            tops.append(place)
            chain.append(number)
        else:
            tops[pile] = place
            chain[pile] = number
    anchors: list[tuple[int, int]] = []
    number = chain[-1] if chain else -1
    while number >= 0:
        anchors.append(candidates[number])
        number = before[number]
    return anchors[::-1]


def _unique(lines: list[str]) -> dict[str, int]:
    """Return the index of each line that occurs once, in order."""
    places: dict[str, int] = {}
    repeated: set[str] = set()
    for index, line in enumerate(lines):
        if line in places:
            repeated.add(line)
        places[line] = index
    return {line: index for line, index in places.items() if line not in repeated}


def _hunks(old: str, changes: list[_Change]) -> Iterator[str]:
    shift = 0
    group: list[_Change] = []
    for change in changes:
        if group and change.line - group[-1].after > 2 * CONTEXT:
            yield _hunk(old, group, shift)
            shift += sum(len(one.added) - len(one.removed) for one in group)
            group = []
        group.append(change)
    yield _hunk(old, group, shift)


def _hunk(old: str, group: list[_Change], shift: int) -> str:
    """Return one hunk; `shift` is by how many lines the hunks before it moved the new text."""
    start = group[0].start
    for _ in range(CONTEXT):
        start = old.rfind("\n", 0, max(start - 1, 0)) + 1
    leading = _lines(old[start : group[0].start])
    body = [_marked(" ", leading)]
    removed = added = 0
    for number, change in enumerate(group):
        body += [_marked("-", change.removed), _marked("+", change.added)]
        if number + 1 < len(group):
            stop = group[number + 1].start
        else:
            stop = change.end
            for _ in range(CONTEXT):
                newline = old.find("\n", stop)
                stop = len(old) if newline < 0 else newline + 1
        kept = _lines(old[change.end : stop])
        body.append(_marked(" ", kept))
        removed += len(change.removed) + len(kept)
        added += len(change.added) + len(kept)
    first = group[0].line - len(leading)
    counts = (removed + len(leading), added + len(leading))
    return f"@@ -{_range(first, counts[0])} +{_range(first + shift, counts[1])} @@\n{''.join(body)}"


def _range(first: int, count: int) -> str:
    # A range of no lines names the line before it; a count of one is left out.
    number = first + 1 if count else first
    return str(number) if count == 1 else f"{number},{count}"


def _marked(mark: str, lines: list[str]) -> str:
    return "".join(f"{mark}{line}" if line.endswith("\n") else f"{mark}{line}{_NO_NEWLINE}" for line in lines)


def _lines(text: str) -> list[str]:
    lines = text.split("\n")
    last = lines.pop()
    ended = [f"{line}\n" for line in lines]
    return [*ended, last] if last else ended


def _header(path: str, *, created: bool) -> str:
    source = "/dev/null" if created else _name(f"a/{path}")
    return f"--- {source}\n+++ {_name(f'b/{path}')}\n"


def _name(name: str) -> str:
    """Return a file name as git writes it: quoted like a C string where it must be, a tab after one with spaces."""
    if _NEEDS_QUOTES.search(name) is None:
        return f"{name}\t" if " " in name else name
    escaped = "".join(
        chr(byte) if 0x20 <= byte < 0x7F and byte not in b'"\\' else f"\\{byte:03o}" for byte in os.fsencode(name)
    )
    return f'"{escaped}"'
