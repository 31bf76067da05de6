"""What tests of hooks and the executor build on: rows as they would be stored, and tools that do what a test says."""

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

import orjson

from app.domain.abort import AbortSignal
from app.domain.batch import Batch, BatchStatus, Summary
from app.domain.ids import new_id
from app.domain.tool_call import CallRecord, CallStatus, ExecutionMode, Outcome, ToolCall, ToolResult, text_content
from app.domain.workspace import Workspace, WorkspaceOptions, WorkspaceStatus
from app.errors import ErrorCode, ToolError
from app.tools.base import OnUpdate, ToolAnnotations, ToolDefinition, ToolUpdate

Body = Callable[[dict[str, Any], AbortSignal, OnUpdate], Awaitable[ToolResult]]


def answer(text: str, **members: Any) -> ToolResult:
    return ToolResult(text_content(text), **members)


def workspace(root: str = "/nonexistent", **changes: Any) -> Workspace:
    values: dict[str, Any] = {
        "id": new_id("ws"),
        "owner": "env",
        "name": None,
        "root": root,
        "root_device": 0,
        "root_inode": 0,
        "root_uid": 65_534,
        "root_gid": 65_534,
        "managed": True,
        "trusted": True,
        "options": WorkspaceOptions(),
        "metadata": {},
        "status": WorkspaceStatus.ACTIVE,
        "created_at": 1_700_000_000_000,
        "last_used_at": 1_700_000_000_000,
    }
    return Workspace(**(values | changes))


def batch(calls: list[tuple[str, Any]], workspace_id: str | None = None, **changes: Any) -> Batch:
    """Return a queued batch of `(tool name, arguments)` whose calls are named c0, c1, …"""
    batch_id, owner = new_id("batch"), workspace_id or new_id("ws")
    records = tuple(
        CallRecord(
            id=new_id("call"),
            batch_id=batch_id,
            workspace_id=owner,
            index=index,
            tool_call_id=f"c{index}",
            tool_name=name,
            arguments=orjson.dumps(arguments),
            status=CallStatus.QUEUED,
            result=None,
            error=None,
            hooks=None,
            queued_at=1_700_000_000_000,
            started_at=None,
            finished_at=None,
            duration_ms=None,
            request_id="req-test",
        )
        for index, (name, arguments) in enumerate(calls)
    )
    values: dict[str, Any] = {
        "id": batch_id,
        "workspace_id": owner,
        "owner": "env",
        "status": BatchStatus.QUEUED,
        "execution_mode": "parallel",
        "effective_mode": None,
        "on_error": "continue",
        "on_disconnect": "continue",
        "timeout_ms": None,
        "metadata": {},
        "has_errors": False,
        "terminate": False,
        "summary": Summary(total=len(records)),
        "request_id": "req-test",
        "created_at": 1_700_000_000_000,
        "epoch": 1,
        "last_seq": 1,
        "calls": records,
    }
    return Batch(**(values | changes))


class ScriptedTool:
    """An AgentTool whose work is a coroutine of the test; `{"bad": …}` are arguments it refuses."""

    def __init__(self, name: str, body: Body, *, read_only: bool = True, mode: ExecutionMode = "parallel") -> None:
        self._body = body
        self.definition = ToolDefinition(
            name=name,
            description="scripted",
            parameters={"type": "object"},
            annotations=ToolAnnotations(name, read_only, not read_only, read_only, open_world_hint=False),
            execution_mode=mode,
        )

    @property
    def name(self) -> str:
        return self.definition.name

    @property
    def description(self) -> str:
        return self.definition.description

    @property
    def parameters(self) -> dict[str, Any]:
        return self.definition.parameters

    @property
    def execution_mode(self) -> ExecutionMode:
        return self.definition.execution_mode

    def prepare_arguments(self, args: Any) -> Any:
        return args

    def validate_arguments(self, args: Any) -> dict[str, Any]:
        if "bad" in args:
            raise ToolError(ErrorCode.INVALID_ARGUMENTS, "bad: unknown argument")
        return dict(args)

    async def execute(
        self,
        tool_call_id: str,
        args: Mapping[str, Any],
        signal: AbortSignal | None = None,
        on_update: OnUpdate | None = None,
    ) -> ToolResult:
        return await self._body(dict(args), signal or AbortSignal(), on_update or (lambda _update: None))


class RecordingSink:
    """A CallSink that keeps what it was told, in order; `stored` is released by the test when it holds it."""

    def __init__(self) -> None:
        self.events: list[tuple[Any, ...]] = []
        self.outcomes: dict[str, Outcome] = {}
        self.stored = asyncio.Event()
        self.stored.set()

    def call_started(self, call: ToolCall, mode: ExecutionMode) -> None:
        self.events.append(("start", call.tool_call_id, mode))

    async def started_durably(self) -> None:
        await self.stored.wait()
        self.events.append(("stored",))

    def call_updated(self, call: ToolCall, update: ToolUpdate) -> None:
        self.events.append(("update", call.tool_call_id, update))

    def call_ended(self, call: ToolCall, outcome: Outcome) -> None:
        assert call.tool_call_id not in self.outcomes, "a call ends once"
        self.outcomes[call.tool_call_id] = outcome
        self.events.append(("end", call.tool_call_id, outcome.status.value))
