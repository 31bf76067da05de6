"""What other tool sets call things is understood by every tool, before its arguments are validated."""

import copy
import json
import re
from pathlib import Path
from typing import Any

import pytest

from app.errors import ErrorCode, ToolError
from app.tools.base import AgentTool
from app.tools.registry import all_tool_names, create_all_tools, create_tool, create_tool_definition

EDITS = [{"oldText": "a", "newText": "b"}]
ALL_EDITS = [{"oldText": "a", "newText": "b", "replaceAll": True}]

SPELLINGS: list[tuple[str, Any, dict[str, Any]]] = [
    ("read", {"file_path": "f", "line_numbers": False}, {"path": "f", "lineNumbers": False}),
    ("read", {"filePath": "f", "offset": "2", "limit": "1e1"}, {"path": "f", "offset": 2, "limit": 10}),
    (
        "write",
        {"file_path": "f", "content": "x", "create_only": True},
        {"path": "f", "content": "x", "createOnly": True},
    ),
    ("write", {"path": "f", "content": "", "expected_etag": "e"}, {"path": "f", "content": "", "expectedEtag": "e"}),
    ("edit", {"file_path": "f", "old_string": "a", "new_string": "b"}, {"path": "f", "edits": EDITS}),
    (
        "edit",
        {"file_path": "f", "old_string": "a", "new_string": "b", "replace_all": True},
        {"path": "f", "edits": ALL_EDITS},
    ),
    ("edit", {"path": "f", "oldText": "a", "newText": "b"}, {"path": "f", "edits": EDITS}),
    ("edit", {"path": "f", "oldText": "a", "newText": "b", "replaceAll": True}, {"path": "f", "edits": ALL_EDITS}),
    ("edit", {"path": "f", "old_text": "a", "new_text": "b"}, {"path": "f", "edits": EDITS}),
    ("edit", {"path": "f", "old_str": "a", "new_str": "b"}, {"path": "f", "edits": EDITS}),
    ("edit", {"path": "f", "oldString": "a", "newString": "b"}, {"path": "f", "edits": EDITS}),
    ("edit", {"path": "f", "edits": EDITS[0]}, {"path": "f", "edits": EDITS}),
    ("edit", {"path": "f", "edits": json.dumps(EDITS)}, {"path": "f", "edits": EDITS}),
    ("edit", {"path": "f", "edits": json.dumps(EDITS[0])}, {"path": "f", "edits": EDITS}),
    (
        "edit",
        {"path": "f", "edits": [{"old_string": "a", "new_string": "b", "replace_all": True}], "dry_run": True},
        {"path": "f", "edits": ALL_EDITS, "dryRun": True},
    ),
    ("bash", {"command": "true", "timeoutMs": 5}, {"command": "true", "timeout": 5}),
    ("bash", {"cmd": "true", "timeout_ms": "5"}, {"command": "true", "timeout": 5}),
    ("powershell", {"command": "$true", "timeoutMs": 5}, {"command": "$true", "timeout": 5}),
    ("powershell", {"cmd": "$true", "timeout_ms": 5.0}, {"command": "$true", "timeout": 5}),
    ("grep", {"pattern": "x", "file_path": "d", "glob": "*.py"}, {"pattern": "x", "path": "d", "include": "*.py"}),
    ("grep", {"pattern": "x", "case_sensitive": False}, {"pattern": "x", "caseSensitive": False}),
    ("grep", {"pattern": "x", "ignoreCase": True}, {"pattern": "x", "caseSensitive": False}),
    ("grep", {"pattern": "x", "ignoreCase": False}, {"pattern": "x", "caseSensitive": True}),
    ("grep", {"pattern": "x", "ignore_case": True}, {"pattern": "x", "caseSensitive": False}),
    ("find", {"glob": "*.py", "file_path": "d"}, {"pattern": "*.py", "path": "d"}),
    ("ls", {"file_path": "d", "max_depth": 2}, {"path": "d", "maxDepth": 2}),
    ("ls", {"depth": 2}, {"maxDepth": 2}),
    ("ls", {"path": None, "maxDepth": "2"}, {"maxDepth": 2}),
]


@pytest.fixture
def tools(tmp_path: Path) -> dict[str, AgentTool]:
    return create_all_tools(str(tmp_path))


@pytest.mark.parametrize("as_text", [False, True], ids=["an object", "a JSON text"])
@pytest.mark.parametrize(("name", "spelled", "meant"), SPELLINGS)
def test_a_spelling_from_elsewhere_means_the_tools_own(
    tools: dict[str, AgentTool], name: str, spelled: dict[str, Any], meant: dict[str, Any], *, as_text: bool
) -> None:
    given = json.dumps(spelled) if as_text else copy.deepcopy(spelled)
    prepared = tools[name].prepare_arguments(given)
    assert tools[name].validate_arguments(prepared) == meant
    assert given == (json.dumps(spelled) if as_text else spelled), "what was given is not changed"


def test_the_table_has_every_tool() -> None:
    assert {name for name, _, _ in SPELLINGS} == {str(name) for name in all_tool_names}


def test_the_page_of_the_tools_lists_every_spelling_but_those_that_follow_a_rule() -> None:
    page = (Path(__file__).parents[2] / "docs" / "tools.md").read_text(encoding="utf-8")
    listed = page.split("Names that other tool sets use")[1].split("**Paths**")[0]
    for name, spelled, _ in SPELLINGS:
        own = create_tool_definition(name).parameters["properties"]
        for field in spelled:
            camel = re.sub(r"_(\w)", lambda match: match[1].upper(), field)
            assert field in own or f"`{field}`" in listed or f"`{camel}`" in listed or camel in own, (name, field)


@pytest.mark.parametrize("name", [str(name) for name in all_tool_names])
def test_every_field_is_known_by_its_snake_case_name(tools: dict[str, AgentTool], name: str) -> None:
    for field in tools[name].parameters["properties"]:
        snake = "".join(f"_{letter.lower()}" if letter.isupper() else letter for letter in field)
        assert tools[name].prepare_arguments({snake: "x"}) == {field: "x"}


@pytest.mark.parametrize(
    ("name", "both", "unknown"),
    [
        ("read", {"path": "f", "file_path": "g"}, "file_path"),
        ("edit", {"path": "f", "edits": EDITS, "old_string": "a", "new_string": "b"}, "oldText"),
        ("bash", {"command": "true", "timeout": 1, "timeoutMs": 2}, "timeoutMs"),
        ("grep", {"pattern": "x", "include": "a", "glob": "b"}, "glob"),
        ("grep", {"pattern": "x", "caseSensitive": True, "ignoreCase": True}, "ignoreCase"),
        ("find", {"pattern": "x", "glob": "y"}, "glob"),
        ("ls", {"maxDepth": 1, "max_depth": 2}, "max_depth"),
    ],
)
def test_a_field_given_under_two_names_is_refused_not_guessed(
    tools: dict[str, AgentTool], name: str, both: dict[str, Any], unknown: str
) -> None:
    with pytest.raises(ToolError) as caught:
        tools[name].validate_arguments(tools[name].prepare_arguments(both))
    assert caught.value.code is ErrorCode.INVALID_ARGUMENTS
    assert f"{unknown}: unknown argument" in caught.value.message


@pytest.mark.parametrize("given", [None, 5, True, "no JSON", "[1]", [{"path": "f"}], "\ud800", {}, {"path": {}}])
@pytest.mark.parametrize("name", [str(name) for name in all_tool_names])
def test_preparing_never_raises(tmp_path: Path, name: str, given: Any) -> None:
    create_tool(name, str(tmp_path)).prepare_arguments(given)
