"""Finding a text that stands there almost as it is wanted: other quotes, dashes or blanks that look the same.

What counts as the same: blanks at the end of a line, whatever they are; typographic quotes and the plain ones; dashes
and the hyphen; no-break and other wide blanks and the space. Nothing else, so neither case nor indentation. Texts are
folded (every line ends at LF).

Both sides are written the plain way and searched as usual. All but the blanks at the ends of lines is replaced
character by character, so a line and a column are the same place in both writings.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final

MAX_FUZZY_CHARACTERS: Final = 20_000_000
"""How much text the edits of one call may search this way: half a second of work."""

_BLOCK: Final = 262_144
_BLANKS: Final = " \t"
_COUNTED_MATCHES: Final = 1_000
_COUNTED_CHARACTERS: Final = 10_000_000
_LISTED_MATCHES: Final = 10
_SHOWN_CHARACTERS: Final = 400

_PLAIN: Final = {
    "quotes": {"'": "\u2018\u2019\u201a\u201b", '"': "\u201c\u201d\u201e\u201f"},
    "dashes": {"-": "\u2010\u2011\u2012\u2013\u2014\u2015\u2212"},
    "no-break or wide blanks": {
        " ": "\u00a0\u2000\u2001\u2002\u2003\u2004\u2005\u2006\u2007\u2008\u2009\u200a\u202f\u205f\u3000"
    },
}
_LINE_ENDS: Final = "blanks at line ends"


@dataclass(frozen=True, slots=True)
class Occurrences:
    """How often a text occurs, overlapping ones counted. `lines` are those of the first ten, from 1.

    `complete` is False when counting stopped before the end: there may be more.
    """

    count: int
    complete: bool
    lines: list[int]


@dataclass(frozen=True, slots=True)
class FuzzyMatch:
    """Where a wanted text was found: `text[start:end]`, lines `start_line` to `end_line` from 1."""

    start: int
    end: int
    start_line: int
    end_line: int
    text: str
    differs: tuple[str, ...]

    def to_json(self) -> dict[str, Any]:
        return {
            "startLine": self.start_line,
            "endLine": self.end_line,
            "text": self.text[:_SHOWN_CHARACTERS],
            "differs": list(self.differs),
        }


def occurrences(text: str, wanted: str) -> Occurrences:
    """Count a text that is not empty.

    Counting stops where it would cost more than the answer is worth: each step compares `wanted` once.
    """
    lines: list[int] = []
    count = counted = 0
    line = 1
    start = text.find(wanted)
    while start >= 0:
        if count >= _COUNTED_MATCHES or (count > 1 and count * len(wanted) > _COUNTED_CHARACTERS):
            return Occurrences(count, complete=False, lines=lines)
        count += 1
        if len(lines) < _LISTED_MATCHES:
            line += text.count("\n", counted, start)
            counted = start
            lines.append(line)
        start = text.find(wanted, start + 1)
    return Occurrences(count, complete=True, lines=lines)


class FuzzyText:
    """A text written the plain way, to look for several texts in it."""

    def __init__(self, text: str) -> None:
        self.text = text
        self._plain = _plainly(text)

    def find(self, wanted: str) -> FuzzyMatch | Occurrences:
        """Return the one place where `wanted` is found, or how many there are when it is not one."""
        forms = _forms(wanted)
        found = [occurrences(self._searched(form), form.text) for form in forms]
        count = sum(one.count for one in found)
        if count != 1:
            lines = sorted(line for one in found for line in one.lines)[:_LISTED_MATCHES]
            return Occurrences(count, all(one.complete for one in found), lines)
        form = next(form for form, one in zip(forms, found, strict=True) if one.count)
        return self._match(form, wanted)

    def _searched(self, form: "_Form") -> str:
        # The last line needs no LF to have an end.
        return f"{self._plain}\n" if form.to_line_end else self._plain

    def _match(self, form: "_Form", wanted: str) -> FuzzyMatch:
        at = self._searched(form).index(form.text)
        start = self._place(at)
        if form.keeps_blanks_before:
            start = self._line_end(start)
        end = (
            self._line_end(self._place(at + len(form.text) - 1))
            if form.to_line_end
            else self._place(at + len(form.text))
        )
        text = self.text[start:end]
        first = self.text.count("\n", 0, start) + 1
        last = first + text.count("\n", 0, len(text) - 1)
        return FuzzyMatch(start, end, first, last, text, _differences(text, wanted))

    def _place(self, position: int) -> int:
        """Return where in the text a position of the plain writing is."""
        line = self._plain.count("\n", 0, position)
        column = position - self._plain.rfind("\n", 0, position) - 1
        return _line_start(self.text, line) + column

    def _line_end(self, position: int) -> int:
        end = self.text.find("\n", position)
        return len(self.text) if end < 0 else end


@dataclass(frozen=True, slots=True)
class _Form:
    """The plain writing of a wanted text.

    `to_line_end`: it ends in the LF of a line that is no part of the match, whose blanks are.
    `keeps_blanks_before`: it begins with the end of a line whose blanks are no part of the match.
    """

    text: str
    to_line_end: bool = False
    keeps_blanks_before: bool = False


def _forms(wanted: str) -> list[_Form]:
    """Return what to look for, nothing when there is too little to go by.

    Blanks at the end of the wanted text are either what stands there within a line or the end of a line.
    """
    whole = _with_plain_characters(wanted)
    stripped = _without_blanks_at_line_ends(whole)
    if not stripped.strip():
        return []
    keeps = wanted.startswith("\n")
    blanks = whole[len(whole.rstrip(_BLANKS)) :]
    if not blanks:
        return [_Form(stripped, keeps_blanks_before=keeps)]
    return [
        _Form(f"{stripped}{blanks}", keeps_blanks_before=keeps),
        _Form(f"{stripped}\n", to_line_end=True, keeps_blanks_before=keeps),
    ]


def _plainly(text: str) -> str:
    return "".join(_without_blanks_at_line_ends(_with_plain_characters(block)) for block in _blocks(text))


def _blocks(text: str) -> Iterator[str]:
    """Yield whole lines, some at a time: no step of the work is long."""
    start = 0
    while start < len(text):
        end = text.find("\n", start + _BLOCK) + 1 or len(text)
        yield text[start:end]
        start = end


def _with_plain_characters(text: str) -> str:
    for kind in _PLAIN:
        text = _with_plain(kind, text)
    return text


def _with_plain(kind: str, text: str) -> str:
    if not text.isascii():
        for plain, alike in _PLAIN[kind].items():
            for character in alike:
                text = text.replace(character, plain)
    return text


def _without_blanks_at_line_ends(text: str) -> str:
    if " \n" not in text and "\t\n" not in text and not text.endswith((" ", "\t")):
        return text
    return "\n".join([line.rstrip(_BLANKS) for line in text.split("\n")])


def _differences(found: str, wanted: str) -> tuple[str, ...]:
    """Return the kinds of difference without which `wanted` would not be found."""
    kinds = [kind for kind in _PLAIN if _plain_but_for(kind, found) != _plain_but_for(kind, wanted)]
    if _with_plain_characters(found) != _with_plain_characters(wanted):
        kinds.append(_LINE_ENDS)
    return tuple(kinds)


def _plain_but_for(left_out: str, text: str) -> str:
    for kind in _PLAIN:
        if kind != left_out:
            text = _with_plain(kind, text)
    return _without_blanks_at_line_ends(text)


def _line_start(text: str, line: int) -> int:
    """Return the position of the first character of a line (from 0); there are that many."""
    start, end = 0, len(text)
    while line > 8 and end - start > 1024:
        middle = (start + end) // 2
        found = text.count("\n", start, middle)
        if found >= line:
            end = middle
        else:
            start = middle
            line -= found
    for _ in range(line):
        start = text.find("\n", start) + 1
    return start
