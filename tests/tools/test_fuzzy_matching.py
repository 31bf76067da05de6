"""Where a text is found that differs in quotes, dashes and blanks only, and what of the text it takes in."""

# ruff: noqa: RUF001 - look-alike characters are what this is about

import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.tools.fuzzy_matching import FuzzyMatch, FuzzyText, Occurrences, occurrences

NBSP = "\u00a0"


@pytest.mark.parametrize(
    ("text", "wanted", "match"),
    [
        pytest.param('say "a"\n', "say “a”", FuzzyMatch(0, 7, 1, 1, 'say "a"', ("quotes",)), id="quotes in the wanted"),
        pytest.param("x\nsay „a‟\n", 'say "a"', FuzzyMatch(2, 9, 2, 2, "say „a‟", ("quotes",)), id="quotes in the text"),
        pytest.param("it’s\n", "it's", FuzzyMatch(0, 4, 1, 1, "it’s", ("quotes",)), id="apostrophes"),
        pytest.param("a – b", "a — b", FuzzyMatch(0, 5, 1, 1, "a – b", ("dashes",)), id="two dashes"),
        pytest.param("a\u2212b", "a-b", FuzzyMatch(0, 3, 1, 1, "a\u2212b", ("dashes",)), id="a minus"),
        pytest.param(
            f"a{NBSP}b c", "a b c", FuzzyMatch(0, 5, 1, 1, f"a{NBSP}b c", ("no-break or wide blanks",)), id="a no-break"
        ),
        pytest.param(
            "f(  \n  x\t\n)\n",
            "f(\n  x\n)",
            FuzzyMatch(0, 11, 1, 3, "f(  \n  x\t\n)", ("blanks at line ends",)),
            id="blanks at line ends of the text",
        ),
        pytest.param(
            "f(\n  x\n)\n",
            "f( \n  x  \n) \n",
            FuzzyMatch(0, 9, 1, 3, "f(\n  x\n)\n", ("blanks at line ends",)),
            id="blanks at line ends of the wanted",
        ),
        pytest.param(
            f"a “b”{NBSP} \nc–d",
            'a "b"\nc-d',
            FuzzyMatch(0, 11, 1, 2, f"a “b”{NBSP} \nc–d", ("quotes", "dashes", "no-break or wide blanks", "blanks at line ends")),
            id="all of it",
        ),
        pytest.param(
            "“a”  \n“b”  \n",
            '"a"\n"b"',
            FuzzyMatch(0, 9, 1, 2, "“a”  \n“b”", ("quotes", "blanks at line ends")),
            id="blanks behind the wanted are no part of it",
        ),
        pytest.param(
            "“a”  \nb", '"a"\t', FuzzyMatch(0, 5, 1, 1, "“a”  ", ("quotes", "blanks at line ends")), id="blanks it ends in are"
        ),
        pytest.param("“a”", '"a"  ', FuzzyMatch(0, 3, 1, 1, "“a”", ("quotes", "blanks at line ends")), id="at the very end"),
        pytest.param(
            f"x ={NBSP}“a”", "x = ", FuzzyMatch(0, 4, 1, 1, f"x ={NBSP}", ("no-break or wide blanks",)), id="a blank within a line"
        ),
        pytest.param(
            "a  \n“b”", '\n"b"', FuzzyMatch(3, 7, 1, 2, "\n“b”", ("quotes",)), id="blanks before a line end it begins with"
        ),
        pytest.param(
            "a  \n“b”",
            ' \n"b"',
            FuzzyMatch(1, 7, 1, 2, "  \n“b”", ("quotes", "blanks at line ends")),
            id="unless it begins with blanks too",
        ),
        pytest.param(
            "“a”\n \nb", '"a"\n\n', FuzzyMatch(0, 6, 1, 2, "“a”\n \n", ("quotes", "blanks at line ends")), id="a blank line"
        ),
    ],
)  # fmt: skip
def test_the_one_place_that_is_alike(text: str, wanted: str, match: FuzzyMatch) -> None:
    assert wanted not in text
    assert FuzzyText(text).find(wanted) == match


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        pytest.param("Say “a”", 'say "a"', id="case"),
        pytest.param("\tx = “a”", '    x = "a"', id="indentation"),
        pytest.param("x  = “a”", 'x = "a"', id="more blanks within a line"),
        pytest.param("“a”\n\nb", '"a"\nb', id="a blank line between"),
        pytest.param("«a»", '"a"', id="guillemets"),
        pytest.param("a…", "a...", id="an ellipsis"),
        pytest.param("“a”", '"a"\n', id="a line end that is not there"),
        pytest.param("x\n\ny", "  \n", id="blanks alone"),
        pytest.param("x\n\ny", f"{NBSP}\n\t\n", id="blank lines alone"),
        pytest.param("", "a", id="an empty text"),
    ],
)
def test_what_is_not_alike(text: str, wanted: str) -> None:
    assert FuzzyText(text).find(wanted) == Occurrences(0, complete=True, lines=[])


def test_several_places_are_counted_and_none_is_taken() -> None:
    text = '“a”\n"a"\n„a”  \nx “a“ y “a”\n'
    assert FuzzyText(text).find("‟a„") == Occurrences(5, complete=True, lines=[1, 2, 3, 4, 4])
    assert FuzzyText("‘a’  b\n‘a’  \n").find("'a' ") == Occurrences(2, complete=True, lines=[1, 2])
    assert FuzzyText("––\n–").find("-") == Occurrences(3, complete=True, lines=[1, 1, 2])
    assert FuzzyText("–" * 5000).find("-").count == 1000  # type: ignore[union-attr]


def test_overlapping_occurrences_count_and_the_first_ten_lines_are_listed() -> None:
    assert occurrences("aaa", "aa") == Occurrences(2, complete=True, lines=[1, 1])
    assert occurrences("x\n" * 40, "x") == Occurrences(40, complete=True, lines=list(range(1, 11)))
    assert occurrences("x" * 5000, "x") == Occurrences(1000, complete=False, lines=[1] * 10)


ALIKE = {'"': '"“”„‟', "'": "'‘’‚‛", "-": "-‐‑‒–—―\u2212", " ": f" {NBSP}\u2003\u3000"}
characters = st.sampled_from(list("ab\"'- "))
trailing = st.text(alphabet=f" \t{NBSP}", max_size=3)


@st.composite
def written_twice(draw: st.DrawFn) -> tuple[str, str, str, str]:
    """A place of a text as it stands there and as it is wanted, and what stands before and behind it."""
    lines = draw(
        st.lists(st.text(alphabet=characters, max_size=8).map(lambda line: f"<{line}>"), min_size=1, max_size=4)
    )

    def written(line: str) -> str:
        return "".join(draw(st.sampled_from(ALIKE.get(character, character))) for character in line)

    def place() -> str:
        return "".join(f"{written(line)}{draw(trailing)}\n" for line in lines[:-1]) + written(lines[-1])

    return draw(st.text(alphabet="xy\n “", max_size=9)), place(), draw(st.text(alphabet="xy\n “", max_size=9)), place()


@given(written_twice())
def test_a_place_is_found_however_either_is_written(case: tuple[str, str, str, str]) -> None:
    before, there, behind, wanted = case
    found = FuzzyText(f"{before}{there}{behind}").find(wanted)
    assert isinstance(found, FuzzyMatch)
    assert (found.start, found.end, found.text) == (len(before), len(before) + len(there), there)
    assert (found.start_line, found.end_line) == (before.count("\n") + 1, (before + there).count("\n") + 1)
    assert bool(found.differs) == (there != wanted)


@pytest.mark.parametrize(
    "text",
    [
        pytest.param("x\n" * 1_000_000, id="short lines"),
        pytest.param("“x” — y  \n" * 200_000, id="something to change in every line"),
        pytest.param("–" * 2_000_000, id="one line"),
        pytest.param(" " * 2_000_000, id="one line of blanks"),
    ],
)
def test_two_million_characters_are_searched_quickly(text: str) -> None:
    started = time.thread_time()
    assert FuzzyText(text).find("“not there”") == Occurrences(0, complete=True, lines=[])
    assert time.thread_time() - started < 0.5
