"""Hints for a text that was not found: the nearest one, where it is and what differs, at a bounded cost."""

import time

import pytest

from app.tools.nearest_text import (
    MAX_TEXT_CHARACTERS,
    MAX_WANTED_CHARACTERS,
    NearestText,
    find_nearest,
    without_line_numbers,
)

PROGRAM = 'def area(width, height):\n    """The “size”."""\n\treturn width * height   \n\n\nprint(area(2, 3))\n'


@pytest.mark.parametrize(
    ("wanted", "nearest"),
    [
        pytest.param(
            "return width*height\n",
            NearestText(3, 3, "\treturn width * height   ", ("whitespace",)),
            id="blanks inside",
        ),
        pytest.param(
            '    """The "size"."""\n    return width * height\n',
            NearestText(2, 3, '    """The “size”."""\n\treturn width * height   ', ("whitespace", "quotes or dashes")),
            id="tabs and quotes over two lines",
        ),
        pytest.param("PRINT(area(2, 3))", NearestText(6, 6, "print(area(2, 3))", ("case",)), id="case"),
        pytest.param(
            "print(area(2, 3))\n\n",
            NearestText(6, 6, "print(area(2, 3))", ("line ends at the beginning or end",)),
            id="a line end too many",
        ),
        pytest.param(
            "def area(width, \rheight)", NearestText(1, 1, "def area(width, height):", ("carriage returns",)), id="a CR"
        ),
        pytest.param("print(aera(2, 3))", NearestText(6, 6, "print(area(2, 3))", ()), id="a typo"),
        pytest.param(
            "# nothing alike\n    return width * hieght\nnor here",
            NearestText(2, 4, '    """The “size”."""\n\treturn width * height   \n', ()),
            id="as many lines as were wanted, around the one that is alike",
        ),
        pytest.param("class Circle(Shape): pass", None, id="nothing alike"),
        pytest.param("  \n\t\n", None, id="only blanks"),
    ],
)
def test_the_nearest_text(wanted: str, nearest: NearestText | None) -> None:
    assert wanted not in PROGRAM
    assert find_nearest(PROGRAM, wanted) == nearest


def test_a_sentence_shows_blanks_and_cuts_long_texts() -> None:
    assert NearestText(3, 3, "\tx  ", ("case",)).sentence() == 'The nearest text is line 3 (differs in case): "\\tx  ".'
    sentence = NearestText(1, 900, "y\n" * 900, ("whitespace", "carriage returns", "case")).sentence()
    assert sentence.startswith("The nearest text is lines 1-900 (differs in whitespace, carriage returns and case): ")
    assert len(sentence) < 800


def test_a_typo_in_a_long_text_is_found_by_its_words() -> None:
    lines = [f"key_{number} = compute({number})" for number in range(20_000)]
    lines[15_000] = "threshold_ratio = compute(fallback)"
    text = "\n".join(lines)
    assert find_nearest(text, "threshold_ratio = compute(falback)") == NearestText(15_001, 15_001, lines[15_000], ())


def test_texts_beyond_the_caps_are_not_looked_at() -> None:
    assert find_nearest("A" * (MAX_TEXT_CHARACTERS + 1), "a") is None
    assert find_nearest("A" * (MAX_WANTED_CHARACTERS + 1), "a" * (MAX_WANTED_CHARACTERS + 1)) is None


@pytest.mark.parametrize(
    ("wanted", "plain"),
    [
        ("   9│ a\n  10│ b\n", "a\nb\n"),
        ("12│ a", "a"),
        ("   9│ a\nb", None),
        ("a│ b", None),
        ("   9│ \n  10│ x", "\nx"),
    ],
)
def test_line_numbers_of_read_are_recognised_when_every_line_has_one(wanted: str, plain: str | None) -> None:
    assert without_line_numbers(wanted) == plain


@pytest.mark.parametrize(
    "text",
    [
        pytest.param("abcdefg hijklm\n" * 130_000, id="two-million-characters"),
        pytest.param("“é” — \u3000x\n" * 180_000, id="look-alikes-everywhere"),
        pytest.param("ab cd ef gh\n" * 8_000, id="all-lines-compared"),
        pytest.param("x" * MAX_TEXT_CHARACTERS, id="one-line"),
        pytest.param("\n" * MAX_TEXT_CHARACTERS, id="only-line-ends"),
    ],
)
@pytest.mark.parametrize("wanted", ["ab cd ef gj hijklnn", "x y z\n" * 3_000])
def test_no_text_makes_a_hint_dear(text: str, wanted: str) -> None:
    started = time.thread_time()
    find_nearest(text, wanted)
    spent = time.thread_time() - started
    assert spent < 0.15, f"{spent * 1000:.0f} ms"
