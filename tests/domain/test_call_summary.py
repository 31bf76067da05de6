import pytest

from app.domain.call_summary import SUMMARY_CHARACTERS, comparable, path_of, plain_path, summary_of
from app.domain.tool_call import ToolCall, ToolResult, text_content


def call(name: str, arguments: object) -> ToolCall:
    return ToolCall("call_1", 0, "c", name, arguments)


def result(text: str = "", **details: object) -> ToolResult:
    return ToolResult(text_content(text), details)


@pytest.mark.parametrize(
    ("arguments", "answer", "summary"),
    [
        ({"path": "src/A.py"}, result("   1│ Status:\n   2│ draft"), "read src/a.py 1│ status: 2│ draft"),
        ({"file_path": "x"}, result("ok", relativePath="d/x"), "read x d/x ok"),
        ({"command": "npm  TEST\n"}, result("1 failed"), "read npm test 1 failed"),
        ({"pattern": "a.*b", "path": "src"}, result("No matches found"), "read src a.*b no matches found"),
        ('{"path": "in/a/text"}', result("ok"), "read in/a/text ok"),
        ("no json", result("ok"), "read no json ok"),
        ([1], result("ok"), "read ok"),
        ({"path": 7}, ToolResult([{"type": "image", "data": "AA==", "mimeType": "image/png"}]), "read"),
        ({}, ToolResult([{"type": "image", "data": "", "mimeType": "i"}, *text_content("later")]), "read later"),
        ({}, ToolResult("not a list", "nor details"), "read"),
        ({"path": "\ud800"}, result("Straße"), "read ? strasse"),
    ],
)
def test_a_summary_is_tool_subject_and_first_text(arguments: object, answer: ToolResult, summary: str):
    assert summary_of(call("read", arguments), answer) == summary


def test_a_summary_is_bounded_and_keeps_room_for_the_result():
    long = summary_of(call("bash", {"command": "x" * 100_000}), result("needle " + "y" * 100_000))
    assert len(long) == SUMMARY_CHARACTERS
    assert " needle yy" in long
    assert len(summary_of(call("bash", {"command": "ß" * 1000}), result("ß" * 1000))) == SUMMARY_CHARACTERS


@pytest.mark.parametrize(
    ("one", "other"),
    [("Straße", "STRASSE"), ("é", "e\u0301"), ("a \t\n b", "A B"), ("İ", "i\u0307"), ("\u03a3\u0391", "\u03c3\u03b1")],
)
def test_case_composition_and_blanks_do_not_count(one: str, other: str):
    assert comparable(one) == comparable(other)


@pytest.mark.parametrize(
    ("path", "root", "plain"),
    [
        ("a/b.txt", None, "a/b.txt"),
        ("./a//b.txt", None, "a/b.txt"),
        ("a/", None, "a"),
        ("", None, "."),
        ("/srv/w/a", None, "/srv/w/a"),
        ("/srv/w/a", "/srv/w", "a"),
        ("//srv/w/a", "/srv/w/", "a"),
        ("/srv/w", "/srv/w", "."),
        ("/srv/w-evil/a", "/srv/w", "/srv/w-evil/a"),
        ("/a", "/", "a"),
        ("nul\0", None, "nul\0"),
        ("\udcff", None, "?"),
        ("x" * 5000, None, None),
    ],
)
def test_a_path_has_one_spelling(path: str, root: str | None, plain: str | None):
    assert plain_path(path, root) == plain


def test_the_path_of_the_result_counts_before_that_of_the_arguments():
    assert path_of(call("read", {"path": "link"}), result(relativePath="real.txt")) == "real.txt"
    assert path_of(call("read", {"path": "./missing"}), result()) == "missing"
    assert path_of(call("read", {"file_path": "x"}), result()) == "x"
    assert path_of(call("bash", {"command": "ls"}), result()) is None
    assert path_of(call("read", {"path": ""}), result()) is None
