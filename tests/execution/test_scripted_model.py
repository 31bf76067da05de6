"""An agent loop over the executor and the real tools, without HTTP and without a database.

The model is a script: it asks for a tool call, sees the paired result, asks for the next, and ends with words.
"""

import asyncio
from pathlib import Path
from typing import Any

import pytest

from app.domain.tool_call import ToolCall
from app.domain.workspace import WorkspaceOptions
from app.execution.executor import BatchControl, Executor, effective_mode
from app.hooks.chain import hook_chain
from app.sandbox.file_pool import FilePool
from app.sandbox.local import LocalSandbox
from app.tools.registry import ToolsOptions, create_all_tool_definitions, create_all_tools
from tests.support.calls import RecordingSink, batch, workspace

pytestmark = pytest.mark.anyio


class ScriptedModel:
    """Answers each request with the next line of its script; keeps what it was sent."""

    def __init__(self, script: list[dict[str, Any]]) -> None:
        self.script = script
        self.requests: list[list[dict[str, Any]]] = []

    def reply(self, tools: list[str], messages: list[dict[str, Any]]) -> dict[str, Any]:
        assert {"read", "write", "edit", "bash"} <= set(tools)
        self.requests.append([dict(message) for message in messages])
        return self.script[len(self.requests) - 1]


async def test_read_edit_bash_and_a_final_word_take_four_requests_with_paired_ids(tmp_path: Path):
    (tmp_path / "task.txt").write_text("status: draft\n")
    edits = [{"oldText": "status: draft", "newText": "status: done"}]
    model = ScriptedModel(
        [
            {"role": "assistant", "toolCall": {"id": "r1", "name": "read", "arguments": {"path": "task.txt"}}},
            {
                "role": "assistant",
                "toolCall": {"id": "e1", "name": "edit", "arguments": {"path": "task.txt", "edits": edits}},
            },
            {"role": "assistant", "toolCall": {"id": "b1", "name": "bash", "arguments": {"command": "cat task.txt"}}},
            {"role": "assistant", "text": "The task is done."},
        ]
    )
    options = WorkspaceOptions()
    sandbox, files = LocalSandbox(), FilePool()
    tools = create_all_tools(str(tmp_path), ToolsOptions(options=options, sandbox=sandbox, files=files))
    names = [definition.name for definition in create_all_tool_definitions(options)]
    messages: list[dict[str, Any]] = [{"role": "user", "text": "Finish the task."}]
    final = ""
    try:
        async with asyncio.timeout(60):
            while not final:
                said = model.reply(names, messages)
                messages.append(said)
                final = said.get("text", "")
                if "toolCall" in said:
                    messages.append(await run(tools, said["toolCall"]))
    finally:
        await sandbox.close()
        files.close()
    assert final == "The task is done."
    assert len(model.requests) == 4
    results = [message for message in messages if message["role"] == "toolResult"]
    assert [(result["toolCallId"], result["isError"], result["text"]) for result in results] == [
        ("r1", False, "   1│ status: draft"),
        ("e1", False, "Applied 1 edit to task.txt"),
        ("b1", False, "status: done"),
    ]
    assert (tmp_path / "task.txt").read_text() == "status: done\n"


async def run(tools: dict[str, Any], asked: dict[str, Any]) -> dict[str, Any]:
    """Run one call as a batch of one and return its result as a message."""
    call = ToolCall("call_1", 0, asked["id"], asked["name"], asked["arguments"])
    executor = Executor(
        workspace=workspace(),
        batch=batch([]),
        tools=tools,
        hooks=hook_chain([]),
        sink=RecordingSink(),
        control=BatchControl(),
    )
    execution = await executor.run([call], effective_mode("parallel", tools, [call]), "continue")
    result = execution.outcomes[0].result
    return {
        "role": "toolResult",
        "toolCallId": call.tool_call_id,
        "isError": result.is_error,
        "text": result.content[0]["text"],  # type: ignore[typeddict-item]
    }
