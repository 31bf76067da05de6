"""Where edits match, which line ends they get and what is left alone."""

import re
import time
from typing import Any

import pytest
from hypothesis import assume, event, given, settings
from hypothesis import strategies as st

from app.errors import ErrorCode, ToolError
from app.tools.edit_matching import Edit, EditedText, Match, MultipleMatches, apply_edits
from app.tools.fuzzy_matching import FuzzyMatch
from app.tools.unified_diff import Span


def edited(text: str, *edits: tuple[str, str] | Edit, **options: Any) -> str:
    return applied(text, *edits, **options).text


def applied(text: str, *edits: tuple[str, str] | Edit, **options: Any) -> EditedText:
    result = apply_edits(
        text, [edit if isinstance(edit, Edit) else Edit(*edit) for edit in edits], shown="f.txt", **options
    )
    if result.spans is not None:
        assert spliced(text, result.spans) == result.text
    return result


def failure(text: str, *edits: tuple[str, str] | Edit, **options: Any) -> ToolError:
    with pytest.raises(ToolError) as caught:
        edited(text, *edits, **options)
    return caught.value


def spliced(old: str, spans: tuple[Span, ...]) -> str:
    pieces: list[str] = []
    cursor = 0
    for start, end, replacement in spans:
        assert start >= cursor
        pieces += [old[cursor:start], replacement]
        cursor = end
    return "".join([*pieces, old[cursor:]])


@pytest.mark.parametrize(
    ("text", "old", "new", "result"),
    [
        pytest.param("p\r\nq\r\nr\r\n", "p\nq\n", "P\nq\n", "P\r\nq\r\nr\r\n", id="LF matches CRLF"),
        pytest.param("p\nq\nr\n", "p\r\nq", "P\r\nQ", "P\nQ\nr\n", id="CRLF matches LF"),
        pytest.param("p\r\nq\r\n", "p\r\nq", "P\r\nQ", "P\r\nQ\r\n", id="CRLF stays CRLF and is not doubled"),
        pytest.param("p\nq\nr\r\ns\n", "p\nq\n", "p\nQ\n", "p\nQ\nr\r\ns\n", id="one CRLF elsewhere changes nothing"),
        pytest.param("p\r\nq\r\n", "q\n", "Q\nq2\n", "p\r\nQ\r\nq2\r\n", id="new lines get the match's line end"),
        pytest.param("p\r\nq\nr\r\n", "q", "q1\nq2", "p\r\nq1\nq2\nr\r\n", id="or that of the line it stands in"),
        pytest.param("p\nq\r\nr\n", "q", "q1\nq2", "p\nq1\r\nq2\r\nr\n", id="CRLF of the line it stands in"),
        pytest.param("p\r\nq", "q", "q\nr", "p\r\nq\r\nr", id="or of the line before a last line without one"),
        pytest.param("p", "p", "p\r\nq", "p\nq", id="or LF where there is none at all"),
        pytest.param(
            "p\r\nq\nr\r\n", "p\nq\nr", "p\nQ\nR", "p\r\nQ\r\nR\r\n", id="the first line end of a mixed match"
        ),
        pytest.param('a\r\nm("x\ny")\r\nz\r\n', "z", "Z", 'a\r\nm("x\ny")\r\nZ\r\n', id="a bare LF stays bare"),
        pytest.param("p\rq\rr", "q", "Q", "p\rQ\rr", id="CR-only text keeps its CRs"),
        pytest.param("p\rq\rr", "p\rq", "p\rQ", "p\rQ\rr", id="a CR matches a CR"),
        pytest.param("p\r\nq\r\n", "q\r", "Q\r", "p\r\nQ\r\n", id="half a CRLF is the line's end"),
        pytest.param("p\r\nq\r\n", "p\r\nq\r", "p\r\nQ", "p\r\nQ\r\n", id="half a CRLF left out of newText stays"),
        pytest.param("p\r\nq\r\n", "q", "Q\r", "p\r\nQ\r\n", id="half a CRLF before a line end is not doubled"),
        pytest.param("p\r\nq\r\n", "p", "P\r\r\nx", "P\r\nx\r\nq\r\n", id="a doubled CR in newText is one line end"),
        pytest.param("p\r\r\nq\r\n", "p\r\r\nq", "p\r\nq", "p\r\nq\r\n", id="a doubled CR in the file can be repaired"),
        pytest.param("p\r\r\nq\n", "q", "Q", "p\r\r\nQ\n", id="a doubled CR elsewhere is not touched"),
        pytest.param("first\nlast\n\n", "last", "LAST", "first\nLAST\n\n", id="blank lines at the end stay"),
        pytest.param("{\n a\n}", " a", " b", "{\n b\n}", id="no line end is added at the end"),
        pytest.param("x = 1\n", "x = 1\n", "", "", id="empty newText deletes"),
        pytest.param("a b c", " b", "", "a c", id="deletes within a line"),
        pytest.param(
            "v\n", "v", "$& $1 $$ \\1 \\g<0> %s {0}", "$& $1 $$ \\1 \\g<0> %s {0}\n", id="newText is verbatim"
        ),
        pytest.param("a.c abc\n", "a.c", "x", "x abc\n", id="oldText is no pattern"),
        pytest.param('l: "n"\nl: “n”\n', 'l: "n"', 'l: "o"', 'l: "o"\nl: “n”\n', id="look-alikes are not matches"),
        pytest.param("é\u2028😀\n", "\u2028😀", "\x00", "é\x00\n", id="any character"),
    ],
)
def test_an_edit(text: str, old: str, new: str, result: str) -> None:
    assert edited(text, (old, new)) == result
    assert edited(text, (old, new), match="original") == result


def test_a_later_edit_sees_what_an_earlier_one_made() -> None:
    result = applied("k: a\nz\n", ("k: a", "k: b\nnew"), ("b\nnew", "c"))
    assert result == EditedText("k: c\nz\n", 2, 1, (), ((0, 4, "k: c"),))


def test_uniqueness_is_judged_on_the_running_text() -> None:
    assert failure("one\ntwo\n", ("one", "two"), ("two", "three")).code is ErrorCode.NOT_UNIQUE
    assert edited("dup\ndup2\n", ("dup2", "x"), ("dup", "y")) == "y\nx\n"


def test_overlapping_matches_count() -> None:
    error = failure("--\n--\n--\n", ("--\n--\n", "=="))
    assert (error.code, error.details) == (ErrorCode.NOT_UNIQUE, {"edit": 0, "matches": 2, "lines": [1, 2]})
    assert error.message == (
        "edits[0]: oldText matches 2 places in f.txt (lines 1, 2). "
        "Add lines around it until it matches once, or set replaceAll to true. Nothing was changed."
    )


def test_a_match_across_different_line_ends_counts_too() -> None:
    assert failure("a\nb\r\na\r\nb\n", ("a\nb", "x")).details == {"edit": 0, "matches": 2, "lines": [1, 3]}


def test_two_matches_on_one_line_are_two() -> None:
    assert failure("x same same\n", ("same", "X")).details == {"edit": 0, "matches": 2, "lines": [1, 1]}


def test_many_matches_are_counted_and_the_first_ten_are_listed() -> None:
    error = failure("x\n" * 40, ("x", "y"))
    assert error.details == {"edit": 0, "matches": 40, "lines": list(range(1, 11))}
    assert "matches 40 places in f.txt (lines 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, …)" in error.message
    assert "at least 1000 places" in failure("x" * 5000, ("x", "y")).message


def test_the_first_match_is_taken_with_a_warning_when_the_workspace_says_so() -> None:
    result = applied("a\nb\na\n", ("a", "x"), ("b", "y"), multiple_matches="first")
    assert (result.text, result.replacements) == ("x\ny\na\n", 2)
    assert result.warnings == (
        "edits[0] (edit 1 of 2): oldText matches 2 places in f.txt (lines 1, 3); only the first was replaced.",
    )


def test_replace_all_replaces_every_match_that_does_not_overlap_one_before_it() -> None:
    result = applied("aaaaa\r\nb\r\na\n", Edit("aa", "X", replace_all=True))
    assert (result.text, result.replacements) == ("XXa\r\nb\r\na\n", 2)


def test_replace_all_gives_each_place_its_own_line_end() -> None:
    result = applied("a;b\r\na;c\na;", Edit("a;", "a\n", replace_all=True))
    assert result.text == "a\r\nb\r\na\nc\na\n"


def test_replace_all_does_not_look_into_what_it_wrote() -> None:
    assert edited("ab", Edit("a", "aa", replace_all=True)) == "aab"


@pytest.mark.parametrize("match", ["sequential", "original"])
def test_an_empty_old_text_is_refused(match: Match) -> None:
    error = failure("word", ("word", "w"), ("", "X"), match=match)
    assert (error.code, error.details) == (ErrorCode.INVALID_ARGUMENTS, {"edit": 1})
    assert error.message.startswith("edits[1] (edit 2 of 2): oldText must not be empty")


def test_an_edit_that_says_the_same_twice_is_refused() -> None:
    error = failure("a\nb\n", ("a", "A"), ("b", "b"))
    assert (error.code, error.details) == (ErrorCode.NO_CHANGE, {"edit": 1})
    assert "edits[1] (edit 2 of 2): newText is the same as oldText" in error.message
    assert "but for line ends" in failure("a\nb\n", ("a\nb", "a\r\nb")).message


def test_line_ends_cannot_be_changed_by_their_carriage_returns() -> None:
    error = failure("a\r\nb\r\n", Edit("\r", "", replace_all=True))
    assert error.code is ErrorCode.NO_CHANGE
    assert "but for line ends, which stay those of the file" in error.message
    assert failure("a\nb\n", ("\r", "")).code is ErrorCode.NO_MATCH
    assert edited("a\rb\r\n", ("\r", "")) == "ab\r\n"


def test_edits_that_undo_each_other_are_no_change() -> None:
    assert failure("a\n", ("a", "b"), ("b", "a")).code is ErrorCode.NO_CHANGE


def test_a_text_that_is_not_there_is_named_by_its_index() -> None:
    error = failure("a\nb\nc\n", ("a", "A"), ("b", "B"), ("zzz", "Z"))
    assert (error.code, error.details) == (ErrorCode.NO_MATCH, {"edit": 2})
    assert error.message == (
        "edits[2] (edit 3 of 3): oldText was not found in f.txt. It must match exactly, whitespace included. "
        "Nothing was changed."
    )


def test_a_text_that_an_earlier_edit_took_away_is_told_apart() -> None:
    error = failure("abc\n", ("abc", "x"), ("b", "y"))
    assert "It was there until an earlier edit of this call changed it." in error.message


def test_a_text_that_was_replaced_before_is_told_apart() -> None:
    assert "newText stands in line 2 already" in failure("x\nnew = 1\n", ("old = 1", "new = 1")).message


def test_line_numbers_of_read_in_old_text_are_told() -> None:
    text = "".join(f"row {number}\n" for number in range(1, 13))
    assert "carries the line numbers that read shows" in failure(text, ("   9│ row 9\n  10│ row 10\n", "x")).message
    assert "line numbers" not in failure(text, ("   9│ row nine\n", "x")).message


def test_the_nearest_text_is_shown_with_what_differs() -> None:
    error = failure("first  \nsecond\t\nthird\n", ("first\nsecond\n", "1\n2\n"))
    assert error.details == {
        "edit": 0,
        "nearest": {"startLine": 1, "endLine": 2, "text": "first  \nsecond\t", "differs": ["whitespace"]},
    }
    assert 'The nearest text is lines 1-2 (differs in whitespace): "first  \\nsecond\\t".' in error.message


def test_no_edit_of_a_large_text_looks_for_the_nearest() -> None:
    started = time.thread_time()
    error = failure("some words\n" * 1_000_000, ("words some", "x"))
    assert "too long to look for similar text" in error.message
    assert time.thread_time() - started < 0.2


def test_original_matches_the_text_as_it_was() -> None:
    result = applied("a\nb\n", ("b", "a"), ("a", "b"), match="original")
    assert (result.text, result.replacements, result.first_changed_line) == ("b\na\n", 2, 1)
    assert failure("a\n", ("a", "b"), ("b", "c"), match="original").code is ErrorCode.NO_MATCH


def test_original_refuses_places_that_overlap() -> None:
    error = failure("x\nabcd\n", ("cd", "1"), ("abc", "2"), match="original")
    assert (error.code, error.details) == (ErrorCode.INVALID_ARGUMENTS, {"edit": 1, "overlaps": 0, "lines": [2]})
    assert "edits[1] (edit 2 of 2) overlaps edits[0] in line 2 of f.txt" in error.message
    assert edited("abcd", ("cd", "1"), ("ab", "2"), match="original") == "21"


def test_original_refuses_the_same_place_twice() -> None:
    assert (
        failure("ab", Edit("a", "1", replace_all=True), ("a", "2"), match="original").code
        is ErrorCode.INVALID_ARGUMENTS
    )


FORM = 'const a = "x";\n// “keep” \u2014 this\u00a0line  \nconst n = "A";\n'


def test_fuzzy_takes_the_one_place_that_is_alike_and_says_so() -> None:
    result = applied(FORM, ("const n = “A”;", 'const n = "B";'), fuzzy=True)
    assert result.text == FORM.replace('"A"', '"B"')
    assert result.warnings == ("edits[0]: oldText was not found exactly in f.txt; line 3 matched but for quotes.",)
    assert result.fuzzy_matches == {0: FuzzyMatch(39, 53, 3, 3, 'const n = "A";', ("quotes",))}
    assert failure(FORM, ("const n = “A”;", 'const n = "B";')).code is ErrorCode.NO_MATCH


def test_fuzzy_is_not_asked_where_the_text_stands_exactly() -> None:
    result = applied('l: “n”\nl: "n"\n', ('l: "n"', "l: x"), fuzzy=True)
    assert (result.text, result.warnings, result.fuzzy_matches) == ("l: “n”\nl: x\n", (), {})
    assert failure('"n" "n" “n”', ('"n"', "x"), fuzzy=True).details["matches"] == 2


@pytest.mark.parametrize(
    "options",
    [{}, {"multiple_matches": "first"}, {"match": "original"}],
    ids=["by default", "where the first of several exact matches is taken", "against the original"],
)
@pytest.mark.parametrize("replace_all", [False, True])
def test_fuzzy_never_chooses_among_several_places(options: dict[str, Any], *, replace_all: bool) -> None:
    error = failure("“n”\n„n“\n", Edit('"n"', "x", replace_all=replace_all), fuzzy=True, **options)
    assert (error.code, error.details) == (ErrorCode.NOT_UNIQUE, {"edit": 0, "matches": 2, "lines": [1, 2]})
    assert error.message == (
        "edits[0]: oldText was not found exactly, and but for quotes, dashes or blanks it matches 2 places in f.txt "
        "(lines 1, 2). Give the text exactly as it stands in one of them, or add lines around it until it matches "
        "once. Nothing was changed."
    )


def test_fuzzy_with_replace_all_replaces_the_one_place_there_is() -> None:
    result = applied("“n” n\n", Edit('"n"', "n", replace_all=True), fuzzy=True)
    assert (result.text, result.replacements) == ("n n\n", 1)
    # What it is like ends a line in one place only, though the characters there occur twice.
    result = applied("“n” \n“n” m\n", Edit('"n"\t', "n", replace_all=True), fuzzy=True)
    assert (result.text, result.replacements) == ("n\n“n” m\n", 1)


def test_fuzzy_keeps_the_line_ends_of_the_place() -> None:
    assert edited("a\nf(  \r\n  “x”\r\n)\r\nb\n", ('f(\n  "x"\n)\n', "g(\n  1,\n  2\n)\n"), fuzzy=True) == (
        "a\ng(\r\n  1,\r\n  2\r\n)\r\nb\n"
    )


def test_fuzzy_edits_build_on_each_other_and_tell_the_lines_they_met() -> None:
    result = applied("“a”\n“b”\n", ('"a"', "1\n2"), ('2\n"b"', "3"), fuzzy=True)
    assert result.text == "1\n3\n"
    assert [(index, found.start_line, found.end_line) for index, found in result.fuzzy_matches.items()] == [
        (0, 1, 1),
        (1, 2, 3),
    ]
    assert "edits[1] (edit 2 of 2): oldText was not found exactly in f.txt; lines 2-3 matched" in result.warnings[1]


def test_fuzzy_places_of_original_edits_may_not_overlap() -> None:
    error = failure("x “a b”\n", ('"a b"', "1"), ('x "a', "2"), match="original", fuzzy=True)
    assert (error.code, error.details["overlaps"]) == (ErrorCode.INVALID_ARGUMENTS, 0)
    assert edited("x “a b”\n", ('b"', "1"), ('"a', "2"), match="original", fuzzy=True) == "x 2 1\n"


def test_what_even_fuzzy_does_not_find_is_told_with_what_may_differ() -> None:
    error = failure("X = “a”\n", ('x = "a"', "y"), fuzzy=True)
    assert "Only quotes, dashes, no-break blanks and blanks at line ends may differ." in error.message
    assert error.details["nearest"]["differs"] == ["case", "quotes or dashes"][::-1]


def test_fuzzy_gives_up_on_more_text_than_it_may_search_and_says_so() -> None:
    text = "“a”\n" + "x" * 6_000_000
    edits = [(f'"{letter}"', f"“{following}”") for letter, following in zip("abcd", "bcde", strict=True)]
    assert edited(text, *edits[:3], fuzzy=True).startswith("“d”\nxx")
    error = failure(text, *edits, fuzzy=True)
    assert (error.code, error.details) == (ErrorCode.NO_MATCH, {"edit": 3})
    assert "There was too much text to look for it with fuzzy." in error.message


def test_edits_of_one_original_share_the_search_of_it() -> None:
    text = "".join(f"“{number}”\n" for number in range(10)) + "x" * 5_000_000
    edits = [(f'"{number}"', "y") for number in range(10)]
    assert applied(text, *edits, match="original", fuzzy=True).replacements == 10


@pytest.mark.parametrize(
    ("text", "old", "new", "line"),
    [
        ("a\nb\nc\n", "b", "B", 2),
        ("a\nb\nc\n", "a\nb\nc", "a\nb\nC", 3),
        ("a\nb", "a\nb", "a\nb\n", 2),
        ("a\nb\n", "a\nb\n", "a\nb\nc\n", 3),
        ("a\r\nb\r\nc", "b\nc", "b\nC", 3),
        ("a", "a", "b", 1),
    ],
)
def test_the_first_changed_line_is_the_first_that_differs(text: str, old: str, new: str, line: int) -> None:
    assert applied(text, (old, new)).first_changed_line == line


def test_the_first_changed_line_is_the_least_of_all_edits() -> None:
    assert applied("a\nb\nc\nd\n", ("d", "D"), ("b", "B"), ("c", "C")).first_changed_line == 2


def test_a_text_that_would_grow_too_large_is_refused_before_it_is_made() -> None:
    error = failure("a" * 1_000_000, Edit("a", "b" * 1_000_000, replace_all=True), max_characters=10_000_000)
    assert (error.code, error.details) == (ErrorCode.TOO_LARGE, {"edit": 0})
    assert edited("aa", Edit("a", "bb", replace_all=True), max_characters=4) == "bbbb"
    assert failure("aa", Edit("a", "bb", replace_all=True), max_characters=3).code is ErrorCode.TOO_LARGE


def test_check_is_called_before_each_edit() -> None:
    calls: list[int] = []

    def check() -> None:
        calls.append(1)
        if len(calls) == 3:
            raise KeyError

    with pytest.raises(KeyError):
        edited("abcd", ("a", "1"), ("b", "2"), ("c", "3"), ("d", "4"), check=check)


@pytest.mark.parametrize("newline", ["\n", "\r\n"])
def test_more_changes_than_are_tracked_still_give_the_right_text(newline: str) -> None:
    text = f"ab;{newline}" * 6000
    result = (
        applied(text, Edit("a", "xy", replace_all=True), ("b;\n" * 5999 + "b", "q"))
        if False
        else applied(text, Edit("a", "xy", replace_all=True))
    )
    assert (result.text, result.replacements, result.spans) == (text.replace("a", "xy"), 6000, None)
    grown = applied(text, Edit(";", ";\n", replace_all=True))
    assert (grown.text, grown.spans) == (text.replace(";", f";{newline}"), None)
    assert grown.first_changed_line == 2


def test_line_ends_of_each_place_hold_also_when_there_are_more_than_are_tracked() -> None:
    text = "a;\r\na;\n" * 6000
    result = applied(text, Edit(";", ";\n", replace_all=True))
    assert (result.text, result.spans) == ("a;\r\n\r\na;\n\n" * 6000, None)


LINE_ENDS = st.sampled_from(["\n", "\r\n", "\n", "\r\n", "\r"])
pieces = st.lists(st.sampled_from(["a", "b", "ab", "c", "d"]) | LINE_ENDS, max_size=16).map("".join)
nonempty = st.lists(st.sampled_from(["a", "b", "ab", "c", "d"]) | LINE_ENDS, min_size=1, max_size=16).map("".join)


@st.composite
def jobs(draw: st.DrawFn) -> tuple[str, list[Edit]]:
    """A text and edits whose old texts are mostly parts of it, with line ends of their own."""
    text = draw(nonempty)
    edits = []
    for _ in range(draw(st.integers(1, 4))):
        start = draw(st.integers(0, len(text) - 1))
        old = text[start : start + draw(st.integers(1, 6))] if draw(st.integers(0, 9)) else draw(nonempty)
        end = draw(st.sampled_from(["\n", "\r\n", None]))
        old = old if end is None else old.replace("\r\n", "\n").replace("\n", end)
        edits.append(Edit(old.rstrip("\r") or "a", draw(pieces), draw(st.booleans())))
    return text, edits


def tokens(text: str) -> list[str]:
    return re.findall(r"\r\n|.", text, re.DOTALL)


def by_the_book(text: str, edits: list[Edit], multiple: MultipleMatches) -> str | ErrorCode:
    """Say what sequential edits make of a text, token by token, a CRLF being one."""
    current = tokens(text)
    for edit in edits:
        same = ["\n" if token == "\r\n" else token for token in current]
        old = ["\n" if token == "\r\n" else token for token in tokens(edit.old_text)]
        new = tokens(re.sub("\r+\n", "\r\n", edit.new_text))
        if old == ["\n" if token == "\r\n" else token for token in new]:
            return ErrorCode.NO_CHANGE
        found = [start for start in range(len(same)) if same[start : start + len(old)] == old]
        if not found:
            return ErrorCode.NO_MATCH
        if len(found) > 1 and not edit.replace_all and multiple == "error":
            return ErrorCode.NOT_UNIQUE
        result: list[str] = []
        cursor = 0
        for start in found if edit.replace_all else found[:1]:
            if start < cursor:
                continue
            ends = [token for token in current[start:] if token in {"\n", "\r\n"}]
            ends += [token for token in current[:start][::-1] if token in {"\n", "\r\n"}]
            end = ends[0] if ends else "\n"
            written = [end if token in {"\n", "\r\n"} else token for token in new]
            if start + len(old) < len(current) and current[start + len(old)] in {"\n", "\r\n"}:
                while written and written[-1] == "\r":
                    written.pop()
            result += current[cursor:start] + written
            cursor = start + len(old)
        current = result + current[cursor:]
    result_text = "".join(current)
    return ErrorCode.NO_CHANGE if result_text == text else result_text


@given(jobs(), st.sampled_from(["error", "first"]))
@settings(max_examples=300)
def test_sequential_edits_do_what_the_rules_say(job: tuple[str, list[Edit]], multiple: MultipleMatches) -> None:
    text, edits = job
    expected = by_the_book(text, edits, multiple)
    try:
        result: str | ErrorCode = applied(text, *edits, multiple_matches=multiple).text
    except ToolError as error:
        result = error.code
    event(result if isinstance(result, ErrorCode) else "edited")
    assert result == expected


@given(st.permutations("abcdefgh"), st.lists(LINE_ENDS, min_size=8, max_size=8), st.data())
def test_original_edits_can_be_given_in_any_order(letters: list[str], ends: list[str], data: st.DataObject) -> None:
    text = "".join(letter + end for letter, end in zip(letters, ends, strict=True))
    chosen = data.draw(st.lists(st.sampled_from("abcdefgh"), min_size=2, unique=True))
    edits = [Edit(letter, f"{data.draw(pieces)}!") for letter in chosen]
    result = applied(text, *edits, match="original")
    assert applied(text, *edits[::-1], match="original") == result
    alone = [applied(text, edit) for edit in edits]
    assert result.replacements == len(edits)
    assert result.first_changed_line == min(one.first_changed_line for one in alone)
    assert len(result.text) == len(text) + sum(len(one.text) - len(text) for one in alone)


@given(st.text(alphabet="xyz\r\né", max_size=30), st.text(alphabet="xyz\r\né", max_size=30), pieces)
def test_nothing_outside_the_match_changes(before: str, after: str, new: str) -> None:
    text = f"{before}<mark>{after}"
    assume(new != "<mark>")
    result = edited(text, ("<mark>", new))
    assert result.startswith(before)
    assert result.endswith(after)
    middle = result[len(before) : len(result) - len(after)]
    # A CR of newText that would stand before a line end of the file is part of that line end.
    assert middle.replace("\r\n", "\n").rstrip("\r") == re.sub("\r+\n", "\n", new).rstrip("\r")


@pytest.mark.parametrize("newline", ["\n", "\r\n"])
def test_many_edits_of_a_large_text_stay_quick(newline: str) -> None:
    text = "".join(f"line number {number} of many{newline}" for number in range(300_000))
    edits = [(f"line number {number} of many\nline", f"line {number}\nnew\nline") for number in range(0, 30_000, 1500)]
    started = time.thread_time()
    result = applied(text, *edits)
    spent = time.thread_time() - started
    assert result.replacements == 20
    assert spent < 2, f"{spent * 1000:.0f} ms for 20 edits of {len(text)} characters"


def test_no_text_makes_matching_quadratic() -> None:
    text = "a\r\n" * 1_000_000
    started = time.thread_time()
    assert failure(text, ("a\n" * 500_000, "x")).code is ErrorCode.NOT_UNIQUE
    assert failure(text, ("a\n" * 500_000 + "b", "x")).code is ErrorCode.NO_MATCH
    assert applied(text, Edit("a\n", "b\n", replace_all=True)).replacements == 1_000_000
    assert failure("a" * 2_000_000, ("a" * 1_000_000, "x")).details["matches"] < 1000
    assert time.thread_time() - started < 5
