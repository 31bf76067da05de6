"""The registry: every tool by name, its factories and what workspace options make of it."""

import dataclasses
from collections.abc import Iterator
from pathlib import Path

import jsonschema
import pytest

from app.domain.workspace import WorkspaceOptions
from app.sandbox.decoder import Decoder
from app.sandbox.file_pool import FilePool
from app.sandbox.local import LocalSandbox
from app.sandbox.process_slots import ProcessSlots
from app.tools.base import AgentTool
from app.tools.environment import ToolEnvironment
from app.tools.file_mutation_queue import FileMutationQueue
from app.tools.registry import (
    ToolName,
    ToolsOptions,
    WorkspaceTools,
    all_tool_names,
    create_all_tool_definitions,
    create_all_tools,
    create_coding_tool_definitions,
    create_coding_tools,
    create_read_only_tool_definitions,
    create_read_only_tools,
    create_tool,
    create_tool_definition,
)
from tests.support.calls import workspace

pytestmark = pytest.mark.anyio

READ_ONLY = {"read", "grep", "find", "ls"}


@pytest.fixture
def shared() -> Iterator[ToolsOptions]:
    files = FilePool()
    yield ToolsOptions(sandbox=LocalSandbox(), files=files, mutations=FileMutationQueue())
    files.close()


def names(tools: list[AgentTool]) -> list[str]:
    return [tool.name for tool in tools]


def test_every_tool_is_made_under_its_name(tmp_path: Path, shared: ToolsOptions) -> None:
    tools = create_all_tools(str(tmp_path), shared)
    assert list(tools) == [str(name) for name in all_tool_names]
    assert {"read", "write", "edit", "bash"} <= set(tools)
    for name, tool in tools.items():
        assert (tool.name, tool.definition.name, create_tool_definition(name).name) == (name, name, name)
        assert type(create_tool(name, str(tmp_path), shared)) is type(tool)


def test_coding_tools_are_read_bash_edit_and_write(tmp_path: Path, shared: ToolsOptions) -> None:
    assert names(create_coding_tools(str(tmp_path), shared)) == ["read", "bash", "edit", "write"]
    assert [definition.name for definition in create_coding_tool_definitions()] == ["read", "bash", "edit", "write"]


def test_read_only_tools_are_those_that_change_nothing(tmp_path: Path, shared: ToolsOptions) -> None:
    expected = [str(name) for name in all_tool_names if name in READ_ONLY]
    assert names(create_read_only_tools(str(tmp_path), shared)) == expected
    assert [definition.name for definition in create_read_only_tool_definitions()] == expected


@pytest.mark.parametrize("name", ["reed", "", "READ", "ToolName.READ", "read "])
def test_an_unknown_name_is_refused_by_name(tmp_path: Path, shared: ToolsOptions, name: str) -> None:
    with pytest.raises(ValueError, match=rf"^Unknown tool name: {name}$"):
        create_tool(name, str(tmp_path), shared)
    with pytest.raises(ValueError, match=rf"^Unknown tool name: {name}$"):
        create_tool_definition(name)


def test_names_are_strings() -> None:
    assert isinstance(ToolName.READ, str)
    assert f"{ToolName.READ}" == "read"
    assert "read" in all_tool_names
    assert "reed" not in all_tool_names


def test_options_reach_the_definition_and_the_tool(tmp_path: Path, shared: ToolsOptions) -> None:
    options = WorkspaceOptions.from_json(
        {
            "read": {"executionMode": "sequential", "maxLines": 77},
            "edit": {"executionMode": "parallel"},
            "write": {"maxBytes": 12_345},
        }
    )
    definitions = {definition.name: definition for definition in create_all_tool_definitions(options)}
    assert definitions["read"].execution_mode == "sequential"
    assert definitions["edit"].execution_mode == "parallel"
    assert definitions["write"].execution_mode == "sequential"
    assert "77 lines" in definitions["read"].description
    assert "12345 bytes" in definitions["write"].description
    made = ToolsOptions(options=options, sandbox=shared.sandbox, files=shared.files, mutations=shared.mutations)
    for name, tool in create_all_tools(str(tmp_path), made).items():
        assert tool.definition == definitions[name]


def test_modes_without_options_are_parallel_for_what_changes_nothing_and_sequential_for_the_rest() -> None:
    for definition in create_all_tool_definitions():
        expected = "parallel" if definition.annotations.read_only_hint else "sequential"
        assert (definition.name, definition.execution_mode) == (definition.name, expected)


def test_every_definition_can_be_shown_to_a_model() -> None:
    for definition in create_all_tool_definitions():
        jsonschema.Draft202012Validator.check_schema(definition.parameters)
        assert definition.parameters["type"] == "object"
        assert definition.parameters["additionalProperties"] is False
        assert "$defs" not in definition.parameters
        for name, field in definition.parameters["properties"].items():
            assert field["description"], f"{definition.name}.{name} has no description"
            assert "title" not in field
            assert field["type"] in {"string", "integer", "number", "boolean", "array", "object"}
        assert 40 <= len(definition.description) <= 1024
        assert definition.annotations.title


def test_tools_are_made_with_the_shared_means(tmp_path: Path, shared: ToolsOptions) -> None:
    commands, decoder = ProcessSlots(1, 1), Decoder()
    given = dataclasses.replace(
        shared,
        commands=commands,
        decoder=decoder,
        tenant="key_1",
        root_identity=(1, 2),
        output_url=lambda call: f"/calls/{call}",
    )
    for tool in create_all_tools(str(tmp_path), given).values():
        environment = tool._environment  # type: ignore[attr-defined]
        assert environment == ToolEnvironment(
            cwd=str(tmp_path),
            options=WorkspaceOptions(),
            sandbox=given.sandbox,
            files=given.files,
            mutations=given.mutations,
            commands=commands,
            decoder=decoder,
            tenant="key_1",
            root_identity=(1, 2),
            output_url=given.output_url,
        )


async def test_tools_work_without_shared_means(tmp_path: Path) -> None:
    (tmp_path / "task.txt").write_text("status: draft")
    edited = await create_tool("edit", str(tmp_path)).execute(
        "call-1", {"path": "task.txt", "edits": [{"oldText": "draft", "newText": "done"}]}
    )
    assert edited.details["newBytes"] == 12
    read = await create_tool("read", str(tmp_path)).execute("call-2", {"path": "task.txt"})
    assert read.content == [{"type": "text", "text": "   1│ status: done"}]


async def test_tools_made_without_shared_means_share_those_of_the_process(tmp_path: Path) -> None:
    first, second = (create_tool("write", str(tmp_path)) for _ in range(2))
    assert first is not second
    assert first._environment == second._environment  # type: ignore[attr-defined]


def test_a_workspaces_tools_are_all_there_and_made_when_asked_for(tmp_path: Path) -> None:
    owner = workspace(str(tmp_path), options=WorkspaceOptions.model_validate({"read": {"maxLines": 7}}))
    tools = WorkspaceTools(ToolsOptions(), owner, lambda _call: None)
    assert list(tools) == [name.value for name in all_tool_names]
    assert len(tools) == len(all_tool_names)
    assert "7 lines" in tools["read"].description
    assert tools["read"] is tools["read"]
    assert "nothing" not in tools
    with pytest.raises(KeyError):
        tools["nothing"]
