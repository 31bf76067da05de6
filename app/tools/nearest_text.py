"""What a caller is told when a text was not found: the nearest one there is, where it is and in what it differs.

Everything here has a cap on its input: a hint is worth a few milliseconds, not more. Texts are folded (every line ends
at LF).
"""

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from difflib import SequenceMatcher
from typing import Any, Final

MAX_TEXT_CHARACTERS: Final = 2_000_000
MAX_WANTED_CHARACTERS: Final = 20_000
_COMPARED_CHARACTERS: Final = 100_000
_COMPARED_LINES: Final = 100
_LINE_CHARACTERS: Final = 200
_SHOWN_CHARACTERS: Final = 400
_ALIKE: Final = 0.6

_NUMBERED: Final = re.compile(r"^ *\d+│ ?", re.MULTILINE)
_WORD: Final = re.compile(r"\w{3,}")
_BLANKS: Final = (
    " \t\x0b\x0c\u00a0\u1680\u2000\u2001\u2002\u2003\u2004\u2005\u2006\u2007\u2008\u2009\u200a\u200b"
    "\u202f\u205f\u3000\ufeff"
)
_LOOK_ALIKES: Final = {
    '"': "\u201c\u201d\u201e\u201f\u00ab\u00bb\u2033",
    "'": "\u2018\u2019\u201a\u201b\u2032\u0060\u00b4",
    "-": "\u2010\u2011\u2012\u2013\u2014\u2015\u2212",
}


@dataclass(frozen=True, slots=True)
class NearestText:
    """Lines `start_line` to `end_line` (from 1) of the searched text. `differs` says in what, in words."""

    start_line: int
    end_line: int
    text: str
    differs: tuple[str, ...]

    def sentence(self) -> str:
        lines = (
            f"line {self.start_line}"
            if self.start_line == self.end_line
            else f"lines {self.start_line}-{self.end_line}"
        )
        difference = f" (differs in {listed(self.differs)})" if self.differs else ""
        cut = self.text if len(self.text) <= _SHOWN_CHARACTERS else f"{self.text[:_SHOWN_CHARACTERS]}…"
        return f"The nearest text is {lines}{difference}: {json.dumps(cut, ensure_ascii=False)}."

    def to_json(self) -> dict[str, Any]:
        return {
            "startLine": self.start_line,
            "endLine": self.end_line,
            "text": self.text[:_SHOWN_CHARACTERS],
            "differs": list(self.differs),
        }


def find_nearest(text: str, wanted: str) -> NearestText | None:
    """Return what is most like `wanted` in `text`; None when nothing is, or when either is too long to look."""
    if len(text) > MAX_TEXT_CHARACTERS or len(wanted) > MAX_WANTED_CHARACTERS:
        return None
    return _find_loosely(text, wanted) or _find_similar(text, wanted)


def without_line_numbers(wanted: str) -> str | None:
    """Return `wanted` without the line numbers that the read tool shows, None when not every line has one."""
    if len(wanted) > MAX_WANTED_CHARACTERS:
        return None
    stripped, count = _NUMBERED.subn("", wanted)
    return stripped if count == wanted.rstrip("\n").count("\n") + 1 else None


def _find_loosely(text: str, wanted: str) -> NearestText | None:
    """Find `wanted` where only blanks, look-alike characters, case or line ends at its edges differ."""
    loose = _loosened(wanted).strip("\n")
    if not loose:
        return None
    haystack = _loosened(text)
    place = haystack.find(loose)
    if place < 0:
        return None
    first = haystack.count("\n", 0, place)
    last = first + loose.count("\n")
    found = _line_range(text, first, last)
    return NearestText(first + 1, last + 1, found, _differences(found, wanted))


def _find_similar(text: str, wanted: str) -> NearestText | None:
    """Find the line most like the longest line of `wanted`, and show as many lines around it as `wanted` has."""
    wanted_lines = wanted.strip("\n").split("\n")
    anchor = max(range(len(wanted_lines)), key=lambda number: len(wanted_lines[number].strip()))
    key = wanted_lines[anchor].strip()[:_LINE_CHARACTERS]
    if not key:
        return None
    matcher = SequenceMatcher(autojunk=False)
    matcher.set_seq2(key)
    best, best_line = _ALIKE, -1
    for number, line in _candidates(text, key):
        matcher.set_seq1(line.strip()[:_LINE_CHARACTERS])
        # The first two are upper bounds of the third and far cheaper.
        if matcher.real_quick_ratio() > best and matcher.quick_ratio() > best and matcher.ratio() > best:
            best, best_line = matcher.ratio(), number
    if best_line < 0:
        return None
    first = max(best_line - anchor, 0)
    last = min(best_line - anchor + len(wanted_lines) - 1, text.rstrip("\n").count("\n"))
    return NearestText(first + 1, last + 1, _line_range(text, first, last), ())


def _candidates(text: str, key: str) -> Iterator[tuple[int, str]]:
    """Yield numbered lines worth comparing: all of a short text, else those that hold a long word of `key`."""
    if len(text) <= _COMPARED_CHARACTERS:
        yield from enumerate(text.split("\n"))
        return
    seen: set[int] = set()
    for word in sorted(set(_WORD.findall(key)), key=len, reverse=True)[:3]:
        place, number, counted = text.find(word), 0, 0
        for _ in range(_COMPARED_LINES):
            if place < 0:
                break
            number += text.count("\n", counted, place)
            counted = place
            start = text.rfind("\n", 0, place) + 1
            end = text.find("\n", place)
            if number not in seen:
                seen.add(number)
                yield number, text[start : end if end >= 0 else len(text)]
            place = text.find(word, end) if end >= 0 else -1


def _line_range(text: str, first: int, last: int) -> str:
    """Return the lines `first` to `last` (from 0) without the end of the last."""
    return "\n".join(text.split("\n", last + 1)[first : last + 1])


def _without_blanks(text: str) -> str:
    for blank in _BLANKS:
        text = text.replace(blank, "")
    return text


def _without_carriage_returns(text: str) -> str:
    return text.replace("\r", "")


def _with_plain_punctuation(text: str) -> str:
    for plain, alike in _LOOK_ALIKES.items():
        for character in alike:
            text = text.replace(character, plain)
    return text


_LOOSENINGS: Final = {
    "whitespace": _without_blanks,
    "carriage returns": _without_carriage_returns,
    "quotes or dashes": _with_plain_punctuation,
    "case": str.casefold,
}


def _loosened(text: str) -> str:
    for loosen in _LOOSENINGS.values():
        text = loosen(text)
    return text


def _differences(found: str, wanted: str) -> tuple[str, ...]:
    """Return the kinds of difference without which `wanted` would not be found."""
    if len(found) > MAX_WANTED_CHARACTERS:
        return tuple(_LOOSENINGS)
    core = wanted.strip("\n")
    kinds = []
    for left_out in _LOOSENINGS:
        one, other = core, found
        for name, loosen in _LOOSENINGS.items():
            if name != left_out:
                one, other = loosen(one), loosen(other)
        if one not in other:
            kinds.append(left_out)
    # Loosened alike and found all the same: what is left are the line ends around the core.
    return tuple(kinds) or ("line ends at the beginning or end",)


def listed(names: tuple[str, ...]) -> str:
    """Return names as a sentence has them: `a`, `a and b`, `a, b and c`."""
    return " and ".join(names) if len(names) < 3 else f"{', '.join(names[:-1])} and {names[-1]}"
