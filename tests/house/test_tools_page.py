"""docs/tools.md says what the code does: its generated parts are those the code gives, its examples are run."""

import re

import pytest

from app.errors import ErrorCode
from app.tools.registry import all_tool_names
from docs.generate_tools import PAGE, render

HOW = "run `make docs`, read the diff, and fill in the last column of new rows"


@pytest.fixture(scope="module")
def page() -> str:
    return PAGE.read_text(encoding="utf-8")


def test_the_generated_parts_are_what_the_code_gives_and_the_examples_come_out_as_shown(page: str) -> None:
    assert render(page) == page, HOW


def test_every_tool_has_every_part(page: str) -> None:
    begun = re.findall(r"<!-- begin: (\w+) (\w+)", page)
    assert page.count("<!-- end -->") == len(begun)
    for kind in ("description", "input", "details", "options"):
        assert [tool for found, tool in begun if found == kind] == list(all_tool_names)
    assert {tool for kind, tool in begun if kind == "example"} == set(all_tool_names)
    for name in all_tool_names:
        assert f"\n## {name}\n" in page
        assert f"\n### Errors of {name}\n" in page


def test_no_row_of_a_table_is_without_words(page: str) -> None:
    assert re.findall(r"^.*\|\s*\|$", page, re.MULTILINE) == []


def test_every_code_is_one(page: str) -> None:
    tables = re.findall(r"\| code \| when \|\n\| --- \| --- \|\n((?:\|.*\n)+)", page)
    codes = {code for table in tables for code in re.findall(r"^\| `(\w+)` \|", table, re.MULTILINE)}
    assert len(tables) == len(all_tool_names) + 2
    assert codes <= set(ErrorCode)
    # Of the others no tool knows: the executor and the batch give them.
    assert set(ErrorCode) - codes == {ErrorCode.UNKNOWN_TOOL, ErrorCode.DENIED, ErrorCode.SKIPPED}
