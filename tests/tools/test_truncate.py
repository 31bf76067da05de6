"""Cutting text: never over the budget, never through a character, whole lines where they fit."""

from collections.abc import Callable

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from app.tools.truncate import (
    DEFAULT_MAX_BYTES,
    DEFAULT_MAX_LINES,
    Truncation,
    truncate_head,
    truncate_line,
    truncate_tail,
)

TEXTS = st.text(st.sampled_from("ab\n\r\u00e9\u6f22\U0001f600\u2028 "), max_size=60)
BUDGETS = st.none() | st.integers(0, 80)
LINE_LIMITS = st.none() | st.integers(0, 12)


def lines_of(text: str) -> list[str]:
    """The lines with their ends; only LF ends one."""
    lines = [f"{line}\n" for line in text.split("\n")]
    lines[-1] = lines[-1][:-1]
    return lines if lines[-1] else lines[:-1]


@pytest.mark.parametrize(
    ("text", "max_bytes", "max_lines", "head_dropped", "tail_dropped"),
    [
        ("a\nb\nc\n", None, 2, "b\nc\n", "a\nb\n"),
        ("a\nb\nc", None, 2, "b\nc", "a\nb\n"),
        ("a\nb\nc\n", 4, None, "b\nc\n", "a\nb\n"),
        ("a\nb\nc\n", 3, None, "c\n", "a\nb"),
        ("a\nb\nc\n", 5, None, "b\nc\n", "a\nb\nc"),
        ("one line", 3, None, "ine", "one"),
        ("one line\n", 3, None, "ne\n", "one"),
        ("x\nlonger line", 6, None, "r line", "x\n"),
        ("longer line\nx", 6, None, "x", "longer"),
        ("漢漢漢", 7, None, "漢漢", "漢漢"),
        ("😀😀", 7, None, "😀", "😀"),
        ("😀", 3, None, "", ""),
        ("a\n\n\n", None, 2, "\n\n", "a\n\n"),
        ("a\nb", 0, None, "", ""),
        ("a\nb", None, 0, "", ""),
        ("\n", 0, 5, "", ""),
    ],
)
def test_what_is_kept(
    text: str, max_bytes: int | None, max_lines: int | None, head_dropped: str, tail_dropped: str
) -> None:
    size, lines = len(text.encode()), len(lines_of(text))
    assert truncate_head(text, max_bytes, max_lines) == Truncation(head_dropped, True, size, lines)
    assert truncate_tail(text, max_bytes, max_lines) == Truncation(tail_dropped, True, size, lines)


@pytest.mark.parametrize("cut", [truncate_head, truncate_tail])
def test_what_fits_is_left_alone(cut: Callable[..., Truncation]) -> None:
    for text in ("", "a", "a\n", "a\nb\n", "漢"):
        expected = Truncation(text, False, len(text.encode()), len(lines_of(text)))
        assert cut(text) == expected
        assert cut(text, None, None) == expected
        assert cut(text, len(text.encode()), len(lines_of(text))) == expected


def test_a_limit_that_is_not_passed_is_the_default() -> None:
    many = "x\n" * (DEFAULT_MAX_LINES + 1)
    assert truncate_tail(many).text == "x\n" * DEFAULT_MAX_LINES
    assert truncate_head(many).text == "x\n" * DEFAULT_MAX_LINES
    assert truncate_tail(many, max_lines=None).truncated is False
    long = "x" * (DEFAULT_MAX_BYTES + 1)
    for cut in (truncate_head, truncate_tail):
        assert len(cut(long).text) == DEFAULT_MAX_BYTES
        assert cut(long, max_bytes=None).truncated is False
    assert truncate_line(long).text == "x" * (DEFAULT_MAX_BYTES - 3) + "…"
    assert truncate_line(long, None).truncated is False
    assert (DEFAULT_MAX_BYTES, DEFAULT_MAX_LINES) == (10_000_000, 10_000)


def test_a_line_that_is_cut_ends_in_a_mark_that_counts() -> None:
    assert truncate_line("hello world", 8) == Truncation("hello…", True, 11, 1)
    assert truncate_line("漢漢漢漢", 8) == Truncation("漢…", True, 12, 1)
    assert truncate_line("hello", 5) == Truncation("hello", False, 5, 1)
    assert truncate_line("hello", 3) == Truncation("…", True, 5, 1)
    assert truncate_line("hello", 2) == Truncation("", True, 5, 1)


def test_the_facts_are_told_without_the_text() -> None:
    assert truncate_tail("a\nb\nc", max_lines=1).to_json() == {
        "truncated": True,
        "originalBytes": 5,
        "originalLines": 3,
    }


@pytest.mark.parametrize("cut", [truncate_head, truncate_tail])
def test_a_negative_limit_is_a_mistake(cut: Callable[..., Truncation]) -> None:
    with pytest.raises(ValueError, match="max_bytes is -1"):
        cut("x", -1)
    with pytest.raises(ValueError, match="max_lines is -2"):
        cut("x", None, -2)
    with pytest.raises(ValueError, match="max_bytes"):
        truncate_line("x", -1)


@given(TEXTS, BUDGETS, LINE_LIMITS)
def test_the_tail_that_is_kept_is_the_longest_run_of_whole_lines(
    text: str, max_bytes: int | None, max_lines: int | None
) -> None:
    result = truncate_head(text, max_bytes, max_lines)
    check(result, text, max_bytes, max_lines)
    assert text.endswith(result.text)
    lines = lines_of(text)
    kept = lines_of(result.text)
    whole = lines[len(lines) - len(kept) :] == kept
    more = lines[len(lines) - len(kept) - 1 :]
    if whole and result.truncated:
        # One line more would not have fitted.
        assert over("".join(more), max_bytes) or (max_lines is not None and len(more) > max_lines)
    if not whole:
        assert over(lines[-1], max_bytes)
        dropped = text[: len(text) - len(result.text)]
        assert over(dropped[-1] + result.text, max_bytes)


@given(TEXTS, BUDGETS, LINE_LIMITS)
@example("aé\u2028\n", 6, 1)  # all of it but the LF at its end
def test_the_head_that_is_kept_is_the_longest_run_of_whole_lines(
    text: str, max_bytes: int | None, max_lines: int | None
) -> None:
    result = truncate_tail(text, max_bytes, max_lines)
    check(result, text, max_bytes, max_lines)
    assert text.startswith(result.text)
    lines = lines_of(text)
    kept = lines_of(result.text)
    whole = [line.removesuffix("\n") for line in kept] == [line.removesuffix("\n") for line in lines[: len(kept)]]
    more = lines[: len(kept) + 1]
    if whole and result.truncated:
        assert (
            over("".join(more).removesuffix("\n"), max_bytes) or len(more) > (max_lines or 0) or len(kept) == len(lines)
        )
    if not whole:
        assert over(lines[0].removesuffix("\n"), max_bytes)
        assert over(result.text + text[len(result.text)], max_bytes)


@given(TEXTS, BUDGETS)
def test_a_cut_line_is_a_beginning_and_a_mark_within_the_budget(text: str, max_bytes: int | None) -> None:
    result = truncate_line(text, max_bytes)
    check(result, text, max_bytes, None)
    if result.truncated and result.text:
        kept = result.text.removesuffix("…")
        assert kept != result.text
        assert text.startswith(kept)
        assert over(kept + text[len(kept)] + "…", max_bytes)


def over(text: str, max_bytes: int | None) -> bool:
    return max_bytes is not None and len(text.encode()) > max_bytes


def check(result: Truncation, text: str, max_bytes: int | None, max_lines: int | None) -> None:
    assert not over(result.text, max_bytes)
    assert max_lines is None or len(lines_of(result.text)) <= max_lines
    assert result.truncated == (result.text != text)
    assert (result.original_bytes, result.original_lines) == (len(text.encode()), len(lines_of(text)))
