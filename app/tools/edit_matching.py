"""Applying edits to a text: where they match, what line ends they get, what came of it. Pure functions, no files.

The text is worked on in folded form: every CRLF is written as LF, and one byte per LF remembers which it was. So LF and
CRLF match either, searching is plain substring search (linear, whatever the text is), and what no edit touched is put
together again exactly as it was. A CR that no LF follows is a character like any other.
"""

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from heapq import merge
from itertools import chain, repeat
from typing import Any, Final, Literal, TypeAlias

from app.errors import ErrorCode, ToolError
from app.tools.fuzzy_matching import MAX_FUZZY_CHARACTERS, FuzzyMatch, FuzzyText, Occurrences, occurrences
from app.tools.nearest_text import MAX_TEXT_CHARACTERS, find_nearest, listed, without_line_numbers
from app.tools.unified_diff import Span, common_prefix

Match = Literal["sequential", "original"]
MultipleMatches = Literal["error", "first"]

_TRACKED_CHANGES: Final = 5_000
_END: Final = 2**63
_LF: Final = 0
_CRLF: Final = 1
_WRITTEN: Final = ("\n", "\r\n")
# A CR doubled before LF comes from a text that was converted twice: in newText it is one line end.
_LINE_END: Final = re.compile(r"\r+\n")


@dataclass(frozen=True, slots=True)
class Edit:
    old_text: str
    new_text: str
    replace_all: bool = False


@dataclass(frozen=True, slots=True)
class EditedText:
    """What the edits made of a text.

    `spans` are the changes as `(start, end, replacement)` of the old text, None when there are more than are worth
    keeping; `first_changed_line` counts from 1. `fuzzy_matches` are by the index of their edit; their places are those
    of the text that the edit was matched against.
    """

    text: str
    replacements: int
    first_changed_line: int
    warnings: tuple[str, ...]
    spans: tuple[Span, ...] | None
    fuzzy_matches: Mapping[int, FuzzyMatch] = field(default_factory=dict)


def check_edits(edits: Sequence[Edit]) -> None:
    """Raise ToolError `invalid_arguments` for an edit that can never be applied, whatever the text is."""
    for index, edit in enumerate(edits):
        if not edit.old_text:
            raise ToolError(
                ErrorCode.INVALID_ARGUMENTS,
                f"{_label(index, len(edits))}: oldText must not be empty; "
                "give the text to replace, or use the write tool for a whole file",
                {"edit": index},
            )


def apply_edits(
    text: str,
    edits: Sequence[Edit],
    *,
    shown: str,
    match: Match = "sequential",
    multiple_matches: MultipleMatches = "error",
    fuzzy: bool = False,
    max_characters: int = _END,
    check: Callable[[], None] = lambda: None,
) -> EditedText:
    """Return `text` with all edits applied, or raise without any.

    `sequential`: each edit sees what the ones before it made; `original`: each is matched against `text`, and edits
    that overlap are refused. `multiple_matches` says what a text that is not unique is: an error, or a warning and the
    first of them. With `fuzzy` an edit whose text is not there is made in the one place that is like it, as
    `app.tools.fuzzy_matching` says, with a warning. `shown` is what messages call the text; `check` is called before
    each edit and may raise.

    Raises:
        ToolError: `no_match`, `not_unique`, `no_change`, `invalid_arguments` (an empty `old_text`, an overlap),
            `too_large` (more than `max_characters` in the end). Its details have the index of the edit.
    """
    check_edits(edits)
    original = _Folded.of(text)
    job = _Job(original, shown, len(edits), multiple_matches, max_characters, fuzzy=fuzzy)
    changed = job.on_original(edits, check) if match == "original" else job.one_by_one(edits, check)
    result = changed.text()
    if result == text:
        raise ToolError(ErrorCode.NO_CHANGE, f"With all edits applied {shown} is what it was, so nothing was written.")
    first = common_prefix(text, result, min(changed.first, len(text), len(result)))
    return EditedText(
        text=result,
        replacements=job.replacements,
        first_changed_line=text.count("\n", 0, first) + 1,
        warnings=tuple(job.warnings),
        spans=None if changed.changes is None else tuple(_spans(original, changed, changed.changes)),
        fuzzy_matches=job.fuzzy_matches,
    )


_Place: TypeAlias = tuple[int, int, str]
"""Start and end in a folded text, and what comes there instead (folded)."""

_Growth: TypeAlias = tuple[int, int, int, int]
"""A stretch of the current text: start, end, by how much it grew in earlier steps and by how much it grows now."""


@dataclass(frozen=True, slots=True)
class _Changed:
    """A stretch of the current text that is not the first text's any more, and by how much it has grown since."""

    start: int
    end: int
    growth: int


@dataclass(frozen=True, slots=True)
class _Folded:
    """A text without the CR of its CRLFs.

    `ends` has a byte for each LF, `_LF` or `_CRLF`; None when there is no CRLF. `changes` are what edits made of the
    first text, None when there were too many; nothing before `first` has changed.
    """

    folded: str
    ends: bytes | None
    changes: tuple[_Changed, ...] | None = ()
    first: int = _END

    @classmethod
    def of(cls, text: str) -> "_Folded":
        folded = text.replace("\r\n", "\n")
        if len(folded) == len(text):
            return cls(text, None)
        # Everything but line ends is deleted from the bytes; 0xff occurs in no UTF-8 and stands for CRLF.
        data = text.encode("utf-8", "surrogatepass").replace(b"\r\n", b"\xff")
        return cls(folded, data.translate(_KINDS, _OTHER_BYTES))

    def text(self) -> str:
        return _unfolded(self.folded, self.ends)

    def line(self, position: int) -> int:
        """Return the number of a position's line, from 1."""
        return self.folded.count("\n", 0, position) + 1

    def replaced(self, places: Iterable[_Place]) -> "_Folded":
        """Return the text with the places, in order, replaced.

        Line ends of a replacement become those of the first line end at or after the place; of the line before it when
        the place is in a last line without one.
        """
        folded, ends = self.folded, self.ends
        pieces: list[str] = []
        kinds = bytearray()
        growths: list[_Growth] = []
        first = self.first
        cursor = line = copied = 0
        for start, end, wanted in places:
            # A CR that would stand before a line end is the first half of one, and this line has an end of its own.
            new = wanted.rstrip("\r") if wanted.endswith("\r") and folded.startswith("\n", end) else wanted
            pieces += (folded[cursor:start], new)
            if ends is not None:
                line += folded.count("\n", cursor, start)
                kinds += ends[copied:line]
                kinds += ends[line : line + 1] * new.count("\n") or ends[-1:] * new.count("\n")
                line += folded.count("\n", start, end)
                copied = line
            if len(growths) <= _TRACKED_CHANGES:
                growths.append((start, end, 0, len(new) - (end - start)))
            first = min(first, start)
            cursor = end
        pieces.append(folded[cursor:])
        return _Folded(
            "".join(pieces),
            None if ends is None else bytes(kinds + ends[copied:]),
            _composed(self.changes, growths),
            first,
        )

    def replaced_everywhere(self, old: str, new: str) -> "_Folded":
        """Return the text with `old` replaced by `new` where line ends do not matter; keeps no trace of the places."""
        first = min(self.first, self.folded.find(old))
        return _Folded(self.folded.replace(old, new), self.ends, None, first)


_KINDS: Final = bytes(_CRLF if byte == 0xFF else _LF for byte in range(256))
_OTHER_BYTES: Final = bytes(byte for byte in range(256) if byte not in {0x0A, 0xFF})


@dataclass(frozen=True, slots=True)
class _FoldedEdit:
    """An edit as it is looked for: folded, with its index in the call; `start` is set once its one place is known."""

    index: int
    old: str
    new: str
    replace_all: bool
    start: int | None = None


class _Job:
    """One application of edits: what all of them share, what they count, and the errors they end in."""

    def __init__(
        self,
        original: _Folded,
        shown: str,
        edits: int,
        multiple_matches: MultipleMatches,
        max_characters: int,
        *,
        fuzzy: bool,
    ) -> None:
        self.replacements = 0
        self.warnings: list[str] = []
        self.fuzzy_matches: dict[int, FuzzyMatch] = {}
        self._fuzzy = fuzzy
        self._fuzzy_text: FuzzyText | None = None
        self._fuzzy_characters = MAX_FUZZY_CHARACTERS
        self._original = original
        self._shown = shown
        self._edits = edits
        self._take_first = multiple_matches == "first"
        self._max_characters = max_characters
        self._size = len(original.folded)

    def one_by_one(self, edits: Sequence[Edit], check: Callable[[], None]) -> _Folded:
        state = self._original
        for index, edit in enumerate(edits):
            check()
            wanted = self._found(self._looked_for(index, edit, state), state)
            count = self._count(wanted, state)
            if count > _TRACKED_CHANGES and _is_plain(wanted, state):
                state = state.replaced_everywhere(wanted.old, wanted.new)
            else:
                state = state.replaced(_places(state, wanted))
        return state

    def on_original(self, edits: Sequence[Edit], check: Callable[[], None]) -> _Folded:
        state = self._original
        found: list[Iterator[tuple[_Place, int]]] = []
        for index, edit in enumerate(edits):
            check()
            wanted = self._found(self._looked_for(index, edit, state), state)
            self._count(wanted, state)
            found.append(zip(_places(state, wanted), repeat(index)))
        return state.replaced(self._apart(merge(*found)))

    def _apart(self, places: Iterable[tuple[_Place, int]]) -> Iterator[_Place]:
        """Yield the places, which are in order, as long as none begins before the end of the one before it."""
        end = before = 0
        for place, index in places:
            if place[0] < end:
                line = self._original.line(place[0])
                raise ToolError(
                    ErrorCode.INVALID_ARGUMENTS,
                    f"{self._label(max(index, before))} overlaps edits[{min(index, before)}] in line {line} of "
                    f'{self._shown}: with match "original" each place can be changed once. Make one edit of the two.',
                    {"edit": max(index, before), "overlaps": min(index, before), "lines": [line]},
                )
            end, before = place[1], index
            yield place

    def _looked_for(self, index: int, edit: Edit, state: _Folded) -> _FoldedEdit:
        old = edit.old_text.replace("\r\n", "\n")
        new = _LINE_END.sub("\n", edit.new_text)
        if old.endswith("\r") and state.ends is not None and old not in state.folded:
            # Lines that were cut at LF keep the CR of a CRLF: the end of the line is meant, and it stays.
            old, new = f"{old[:-1]}\n", f"{new.rstrip(chr(13))}\n"
        if old == new:
            only_ends = "" if edit.old_text == edit.new_text else " but for line ends, which stay those of the file"
            raise ToolError(
                ErrorCode.NO_CHANGE,
                f"{self._label(index)}: newText is the same as oldText{only_ends}, so nothing would change in "
                f"{self._shown}.",
                {"edit": index},
            )
        return _FoldedEdit(index, old, new, edit.replace_all)

    def _found(self, edit: _FoldedEdit, state: _Folded) -> _FoldedEdit:
        """Return the edit with what it changes as it stands there; raise ToolError when that is nowhere."""
        if edit.old in state.folded:
            return edit
        if not self._fuzzy:
            raise self._no_match(edit, state)
        if self._fuzzy_text is None or self._fuzzy_text.text is not state.folded:
            self._fuzzy_characters -= len(state.folded)
            if self._fuzzy_characters < 0:
                raise self._no_match(edit, state, "There was too much text to look for it with fuzzy.")
            self._fuzzy_text = FuzzyText(state.folded)
        match = self._fuzzy_text.find(edit.old)
        if isinstance(match, Occurrences):
            raise self._no_match(edit, state) if match.count == 0 else self._not_unique_fuzzily(edit, match)
        self.fuzzy_matches[edit.index] = match
        lines = f"line {match.start_line}"
        if match.end_line > match.start_line:
            lines = f"lines {match.start_line}-{match.end_line}"
        self.warnings.append(
            f"{self._label(edit.index)}: oldText was not found exactly in {self._shown}; {lines} matched but for "
            f"{listed(match.differs)}."
        )
        return replace(edit, old=match.text, replace_all=False, start=match.start)

    def _count(self, edit: _FoldedEdit, state: _Folded) -> int:
        """Return how many places an edit that was found changes, and count them in.

        Raises:
            ToolError: when there is one too many, or the text would become too large.
        """
        count = 1
        if edit.replace_all:
            count = state.folded.count(edit.old)
        elif edit.start is None and state.folded.find(edit.old, state.folded.index(edit.old) + 1) >= 0:
            self._not_unique(edit, state)
        self._size += count * (len(edit.new) - len(edit.old))
        if self._size > self._max_characters:
            raise ToolError(
                ErrorCode.TOO_LARGE,
                f"{self._label(edit.index)} would make {self._shown} larger than the limit of "
                f"{self._max_characters} bytes. Nothing was changed.",
                {"edit": edit.index},
            )
        self.replacements += count
        return count

    def _label(self, index: int) -> str:
        return _label(index, self._edits)

    def _not_unique(self, edit: _FoldedEdit, state: _Folded) -> None:
        """Warn of a text that occurs more than once, or raise `not_unique`."""
        found = occurrences(state.folded, edit.old)
        text = f"{self._label(edit.index)}: oldText matches {_places_in_words(found, self._shown)}"
        if self._take_first:
            self.warnings.append(f"{text}; only the first was replaced.")
            return
        raise ToolError(
            ErrorCode.NOT_UNIQUE,
            f"{text}. Add lines around it until it matches once, or set replaceAll to true. Nothing was changed.",
            {"edit": edit.index, "matches": found.count, "lines": found.lines},
        )

    def _not_unique_fuzzily(self, edit: _FoldedEdit, found: Occurrences) -> ToolError:
        return ToolError(
            ErrorCode.NOT_UNIQUE,
            f"{self._label(edit.index)}: oldText was not found exactly, and but for quotes, dashes or blanks it "
            f"matches {_places_in_words(found, self._shown)}. Give the text exactly as it stands in one of them, or "
            "add lines around it until it matches once. Nothing was changed.",
            {"edit": edit.index, "matches": found.count, "lines": found.lines},
        )

    def _no_match(self, edit: _FoldedEdit, state: _Folded, why: str | None = None) -> ToolError:
        sentences = [
            f"{self._label(edit.index)}: oldText was not found in {self._shown}.",
            "It must match exactly, whitespace included.",
        ]
        if self._fuzzy:
            sentences[1] = why or "Only quotes, dashes, no-break blanks and blanks at line ends may differ."
        details: dict[str, Any] = {"edit": edit.index}
        plain = without_line_numbers(edit.old)
        if plain and plain in state.folded:
            sentences.append("It carries the line numbers that read shows: leave them out.")
        elif edit.old in self._original.folded:
            sentences.append("It was there until an earlier edit of this call changed it.")
        elif len(state.folded) > MAX_TEXT_CHARACTERS:
            sentences.append("The file is too long to look for similar text: read the lines in question again.")
        else:
            if edit.new and edit.new in state.folded:
                line = state.line(state.folded.index(edit.new))
                sentences.append(f"newText stands in line {line} already: has the edit been made before?")
            nearest = find_nearest(state.folded, edit.old)
            if nearest is not None:
                sentences.append(nearest.sentence())
                details["nearest"] = nearest.to_json()
        sentences.append("Nothing was changed.")
        return ToolError(ErrorCode.NO_MATCH, " ".join(sentences), details)


def _is_plain(edit: _FoldedEdit, state: _Folded) -> bool:
    """Whether the line ends of an edit's places have no say in what is written there."""
    ends_matter = state.ends is not None and ("\n" in edit.old or "\n" in edit.new)
    return not ends_matter and not edit.new.endswith("\r")


def _label(index: int, edits: int) -> str:
    return f"edits[{index}]" if edits == 1 else f"edits[{index}] (edit {index + 1} of {edits})"


def _places_in_words(found: Occurrences, shown: str) -> str:
    number = f"{found.count} places" if found.complete else f"at least {found.count} places"
    more = ", …" if found.count > len(found.lines) else ""
    return f"{number} in {shown} (lines {', '.join(map(str, found.lines))}{more})"


def _places(state: _Folded, edit: _FoldedEdit) -> Iterator[_Place]:
    """Yield the places an edit changes: the first match, or all that do not overlap one before them."""
    start = state.folded.find(edit.old) if edit.start is None else edit.start
    while start >= 0:
        end = start + len(edit.old)
        yield start, end, edit.new
        start = state.folded.find(edit.old, end) if edit.replace_all else -1


def _unfolded(folded: str, ends: bytes | None) -> str:
    """Return a folded text with the line ends it has."""
    if ends is None or _CRLF not in ends:
        return folded
    if _LF not in ends:
        return folded.replace("\n", "\r\n")
    lines = folded.split("\n")
    last = lines.pop()
    return "".join([*chain.from_iterable(zip(lines, (_WRITTEN[kind] for kind in ends), strict=True)), last])


def _composed(changes: tuple[_Changed, ...] | None, growths: Sequence[_Growth]) -> tuple[_Changed, ...] | None:
    """Return the changes after one more step, those that touch as one; None when they are too many."""
    if changes is None or len(growths) > _TRACKED_CHANGES:
        return None
    result: list[_Changed] = []
    shift = 0
    earlier: Iterable[_Growth] = ((change.start, change.end, change.growth, 0) for change in changes)
    stretches = merge(earlier, growths)
    start, end, grew, grows = next(stretches)
    for following in chain(stretches, [(_END, _END, 0, 0)]):
        if following[0] <= end:
            end = max(end, following[1])
            grew += following[2]
            grows += following[3]
        else:
            result.append(_Changed(start + shift, end + shift + grows, grew + grows))
            shift += grows
            start, end, grew, grows = following
    return tuple(result) if len(result) <= _TRACKED_CHANGES else None


def _spans(old: _Folded, new: _Folded, changes: Sequence[_Changed]) -> Iterator[Span]:
    """Yield the changes as spans of the old text, with the line ends of both."""
    growth = old_at = new_at = old_line = new_line = old_returns = 0
    for change in changes:
        bounds = []
        start, end = change.start - growth, change.end - growth - change.growth
        for position in (start, end):
            line = old_line + old.folded.count("\n", old_at, position)
            if old.ends is not None:
                old_returns += old.ends.count(_CRLF, old_line, line)
            old_line, old_at = line, position
            bounds.append(position + old_returns)
        first = new_line + new.folded.count("\n", new_at, change.start)
        replacement = new.folded[change.start : change.end]
        new_line = first + replacement.count("\n")
        new_at = change.end
        yield bounds[0], bounds[1], _unfolded(replacement, None if new.ends is None else new.ends[first:new_line])
        growth += change.growth
