"""Batches of this process: taken up in turn, stopped when told, ended exactly once, recovered after a crash."""

import asyncio
import contextvars
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import pytest

from app.domain.abort import Aborted, AbortReason, AbortSignal
from app.domain.batch import Batch, BatchStatus
from app.domain.tool_call import ToolResult
from app.domain.workspace import Workspace
from app.errors import ErrorCode, NotFound, Overloaded, ToolError, WorkspaceGone
from app.events.batch_writer import BatchWriter
from app.events.recall import RECALL_MAX_BYTES
from app.execution.backends.local import LocalBackend
from app.execution.executor import stopped
from app.execution.finalizer import Finalizer
from app.execution.recovery import Recovered, Recovery
from app.execution.runner import BatchRunner
from app.hooks.base import BeforeContext, Hook, HookChain
from app.services.batches import BatchRequest, BatchService, CallRequest
from app.storage.base import (
    Applied,
    ClaimBatch,
    GiveBack,
    OperationalError,
    RequestCancel,
    SetWorkspaceStatus,
    Storage,
    UpdateWorkspace,
    Write,
    WriteOutcome,
)
from app.tools.base import AgentTool
from tests.support.calls import ScriptedTool, answer
from tests.support.eventing import EARLIER_PROCESS, NODE, Records, frames, recording
from tests.support.faulty_storage import FaultyStorage
from tests.support.records import starts

pytestmark = pytest.mark.anyio


class Gate:
    """A tool that waits until the test opens it or its call is told to stop."""

    def __init__(self) -> None:
        self.entered: list[str] = []
        self.changed = asyncio.Event()
        self.open = asyncio.Event()

    async def run(self, args: dict[str, Any], signal: AbortSignal, _update: Any) -> ToolResult:
        self.entered.append(args["n"])
        self.changed.set()
        opened = asyncio.ensure_future(self.open.wait())
        stopped = asyncio.ensure_future(signal.wait())
        await asyncio.wait({opened, stopped}, return_when=asyncio.FIRST_COMPLETED)
        for task in (opened, stopped):
            task.cancel()
        if signal.reason is not None:
            raise Aborted(signal.reason)
        return answer("opened")

    async def until(self, count: int) -> None:
        async with asyncio.timeout(60):
            while len(self.entered) < count:
                self.changed.clear()
                await self.changed.wait()


@asynccontextmanager
async def serving(
    records: Records, *tools: AgentTool, hooks: Sequence[Hook] = (), **limits: int
) -> AsyncIterator[tuple[LocalBackend, BatchService, Finalizer]]:
    finalizer = Finalizer(records.storage, records.reads, records.writer)
    table: Mapping[str, AgentTool] = {tool.name: tool for tool in tools}
    runner = BatchRunner(
        storage=records.storage,
        reads=records.reads,
        records=records.writer,
        finalizer=finalizer,
        hooks=HookChain(hooks),
        tools=lambda _workspace, _url: table,
    )
    backend = LocalBackend(runner, **limits)
    service = BatchService(
        storage=records.storage,
        reads=records.reads,
        records=records.writer,
        log=records.log,
        backend=backend,
        finalizer=finalizer,
        membership=records.membership,
    )
    yield backend, service, finalizer
    async with asyncio.timeout(60):
        await service.drain(0)


def recovery_of(records: Records, backend: LocalBackend, finalizer: Finalizer) -> Recovery:
    return Recovery(
        storage=records.storage,
        reads=records.reads,
        records=records.writer,
        finalizer=finalizer,
        backend=backend,
        membership=records.membership,
    )


def request(*names: str, tool: str = "gate", **changes: Any) -> BatchRequest:
    return BatchRequest(tuple(CallRequest(f"id-{n}", tool, {"n": n}) for n in names), **changes)


async def submit(service: BatchService, workspace: Workspace, *names: str, **changes: Any) -> Batch:
    submitted = await service.submit(workspace.id, request(*names, **changes), owner="env", request_id="req-1")
    return submitted.batch


async def test_a_batch_runs_to_its_stored_end(storage):
    async with recording(storage) as records:
        gate = Gate()
        gate.open.set()
        async with serving(records, ScriptedTool("gate", gate.run)) as (backend, service, _):
            accepted = await submit(service, await records.workspace(), "a", "b", metadata={"agent": "x"})
            assert accepted.status is BatchStatus.QUEUED
            done = await service.get(accepted.id, owner=None, wait=60)
            assert not backend.is_local(accepted.id)
        assert (done.status, done.has_errors, done.metadata) == (BatchStatus.COMPLETED, False, {"agent": "x"})
        assert done.summary.to_json() == {"total": 2, "succeeded": 2, "failed": 0, "cancelled": 0, "skipped": 0}
        assert [call.tool_call_id for call in done.calls] == ["id-a", "id-b"]
        stream = await service.open_events(done.id, owner=None, cursor=0, updates="delta")
        assert stream is not None
        events = frames(b"".join([chunk async for chunk in stream]))
        assert [event["type"] for event in events][0::5] == ["batch_start", "batch_end"]


async def test_workspaces_take_turns_and_none_takes_every_place(storage):
    async with recording(storage) as records:
        gate = Gate()
        async with serving(records, ScriptedTool("gate", gate.run), running=3, per_workspace=2) as (
            backend,
            service,
            _,
        ):
            busy, other = await records.workspace("/srv/a"), await records.workspace("/srv/b")
            for number in range(4):
                await submit(service, busy, f"busy{number}")
            await submit(service, other, "other")
            await gate.until(3)
            assert sorted(gate.entered) == ["busy0", "busy1", "other"]
            assert (backend.running, backend.queued) == (3, 2)
            gate.open.set()
            await gate.until(5)
            assert sorted(gate.entered[3:]) == ["busy2", "busy3"]


async def test_a_batch_that_had_to_wait_runs_in_the_context_it_was_submitted_in(storage):
    caller = contextvars.ContextVar("caller", default="nobody")
    seen = []
    gate = Gate()

    async def note(args: dict[str, Any], signal: AbortSignal, update: Any) -> ToolResult:
        seen.append(caller.get())
        return await gate.run(args, signal, update)

    async with (
        recording(storage) as records,
        serving(records, ScriptedTool("gate", note), running=1) as (
            backend,
            service,
            _,
        ),
    ):
        workspace = await records.workspace()
        made = []
        for name in ("first", "second"):
            caller.set(name)
            made.append(await submit(service, workspace, name))
        caller.set("somebody else")
        await gate.until(1)
        gate.open.set()
        for batch in made:
            assert await backend.wait(batch.id, 60)
    assert seen == ["first", "second"]


async def test_cancelling_a_running_batch_stops_it_and_keeps_what_ended(storage):
    async with recording(storage) as records:
        gate = Gate()
        quick = ScriptedTool("quick", _quick)
        async with serving(records, ScriptedTool("gate", gate.run, mode="sequential"), quick) as (_, service, _):
            calls = (CallRequest("a", "quick", {}), CallRequest("b", "gate", {"n": "b"}), CallRequest("c", "quick", {}))
            workspace = await records.workspace()
            batch = (await service.submit(workspace.id, BatchRequest(calls), owner="env", request_id="r")).batch
            await gate.until(1)
            await service.cancel(batch.id, owner=None)
            done = await service.get(batch.id, owner=None, wait=60)
            again = await service.cancel(batch.id, owner=None)
        assert done.status is BatchStatus.CANCELLED
        assert [call.status.value for call in done.calls] == ["succeeded", "cancelled", "cancelled"]
        assert done.calls[2].started_at is None
        assert again == done


async def _quick(_args: dict[str, Any], _signal: AbortSignal, _update: Any) -> ToolResult:
    return answer("quick")


async def test_cancelling_a_queued_batch_runs_nothing_of_it(storage):
    async with recording(storage) as records:
        gate = Gate()
        async with serving(records, ScriptedTool("gate", gate.run), running=1) as (_, service, _):
            workspace = await records.workspace()
            await submit(service, workspace, "first")
            await gate.until(1)
            queued = await submit(service, workspace, "second")
            await service.cancel(queued.id, owner=None)
            done = await service.get(queued.id, owner=None, wait=60)
            assert done.status is BatchStatus.CANCELLED
            assert gate.entered == ["first"]
            events = [event.type.value for event in storage.events(queued.id, after=0)]
            assert events == ["batch_start", "tool_execution_end", "batch_end"]


async def test_one_call_can_be_cancelled(storage):
    async with recording(storage) as records:
        gate = Gate()
        async with serving(records, ScriptedTool("gate", gate.run)) as (_, service, _):
            batch = await submit(service, await records.workspace(), "a", "b")
            await gate.until(2)
            await service.cancel_call(batch.calls[0].id, owner=None)
            gate.open.set()
            done = await service.get(batch.id, owner=None, wait=60)
        assert done.status is BatchStatus.COMPLETED
        assert [call.status.value for call in done.calls] == ["cancelled", "succeeded"]


async def test_a_batch_that_runs_out_of_time_is_complete_with_failed_and_skipped_calls(storage):
    async with recording(storage) as records:
        gate = Gate()
        async with serving(records, ScriptedTool("gate", gate.run, mode="sequential")) as (_, service, _):
            batch = await submit(service, await records.workspace(), "a", "b", timeout_ms=50)
            done = await service.get(batch.id, owner=None, wait=60)
        assert done.status is BatchStatus.COMPLETED
        assert [(call.status.value, call.error and call.error.code) for call in done.calls] == [
            ("failed", ErrorCode.TIMEOUT),
            ("skipped", ErrorCode.SKIPPED),
        ]


async def test_draining_gives_grace_then_interrupts_and_refuses_new_work(storage):
    async with recording(storage) as records:
        gate = Gate()
        async with serving(records, ScriptedTool("gate", gate.run)) as (_, service, _):
            workspace = await records.workspace()
            batch = await submit(service, workspace, "a")
            await gate.until(1)
            async with asyncio.timeout(60):
                await service.drain(0.05)
            with pytest.raises(Overloaded):
                await submit(service, workspace, "b")
            done = await service.get(batch.id, owner=None)
        assert done.status is BatchStatus.INTERRUPTED
        assert done.calls[0].error is not None
        assert done.calls[0].error.code is ErrorCode.INTERRUPTED


async def test_a_deleted_workspace_takes_no_batch(storage):
    async with recording(storage) as records:
        workspace = await records.workspace()
        for status in ("deleting", "deleted"):
            await records.writer.write(SetWorkspaceStatus(workspace.id, type(workspace.status)(status)))
        async with serving(records) as (_, service, _):
            with pytest.raises(WorkspaceGone):
                await submit(service, workspace, "a")


async def test_stopping_a_workspace_cancels_its_batches_alone(storage):
    async with recording(storage) as records:
        gate = Gate()
        async with serving(records, ScriptedTool("gate", gate.run)) as (_, service, _):
            first, second = await records.workspace("/srv/a"), await records.workspace("/srv/b")
            going, staying = await submit(service, first, "going"), await submit(service, second, "staying")
            await gate.until(2)
            assert await service.stop_workspace(first.id, 60)
            assert (await service.get(going.id, owner=None)).status is BatchStatus.CANCELLED
            gate.open.set()
            assert (await service.get(staying.id, owner=None, wait=60)).status is BatchStatus.COMPLETED


async def test_a_caller_that_goes_away_while_its_batch_is_stored_leaves_it_running(storage):
    async with recording(storage) as records:
        gate = Gate()
        gate.open.set()
        async with serving(records, ScriptedTool("gate", gate.run)) as (_, service, _):
            workspace = await records.workspace()
            submitting = asyncio.ensure_future(submit(service, workspace, "a"))
            await asyncio.sleep(0)
            submitting.cancel()
            with pytest.raises(asyncio.CancelledError):
                await submitting
            page = storage.batches(workspace.id, status=None, before=None, limit=10)
            async with asyncio.timeout(60):
                while not page.items or not page.items[0].status.terminal:
                    await asyncio.sleep(0.005)
                    page = storage.batches(workspace.id, status=None, before=None, limit=10)
        assert page.items[0].status is BatchStatus.COMPLETED


async def test_after_a_crash_started_batches_are_interrupted_and_others_run(storage):
    async with recording(storage) as records:
        gate = Gate()
        workspace = await records.workspace()
        started = await records.accept(workspace, [("gate", {"n": "0"}), ("gate", {"n": "1"})])
        waiting = await records.accept(workspace, [("gate", {"n": "2"})])
        unwanted = await records.accept(workspace, [("gate", {"n": "3"})])
        await records.writer.write(RequestCancel(unwanted.id, None, 5))
        before = BatchWriter(started, records.writer, capture_bytes=lambda _tool: 0, on_fenced=lambda: None)
        before.call_started(started.calls[0].to_call(), "parallel")
        await before.started_durably()

        gate.open.set()
        async with serving(records, ScriptedTool("gate", gate.run)) as (backend, service, finalizer):
            recovery = recovery_of(records, backend, finalizer)
            assert await recovery.recover() == Recovered(finalized=2, requeued=1)
            done = [await service.get(item.id, owner=None, wait=60) for item in (started, waiting, unwanted)]
        assert [item.status.value for item in done] == ["interrupted", "completed", "cancelled"]
        assert [(call.status.value, call.error and call.error.code.value) for call in done[0].calls] == [
            ("failed", "interrupted"),
            ("skipped", "interrupted"),
        ]
        assert b"may have taken effect" in (done[0].calls[0].result or b"")
        assert gate.entered == ["2"]
        # Whoever ran it before can no longer write it.
        before.call_ended(started.calls[0].to_call(), stopped(AbortReason.CANCELLED, started=True))
        with pytest.raises(Exception, match="owner"):
            await before.started_durably()


async def test_a_batch_whose_process_goes_on_after_it_was_thought_dead_is_not_run_again(storage):
    gate = Gate()
    faulty = FaultyStorage(storage)
    async with recording(faulty) as records:
        batch = await records.accept(await records.workspace(), [("gate", {"n": "1"})])

        def goes_on_just_before(real: Storage, group: Sequence[Write]) -> list[WriteOutcome]:
            assert real.apply([starts(batch)]) == [Applied()]
            return real.apply(group)

        async with serving(records, ScriptedTool("gate", gate.run)) as (backend, service, finalizer):
            recovery = recovery_of(records, backend, finalizer)
            faulty.faults.append(goes_on_just_before)
            assert await recovery.recover() == Recovered()
            assert await recovery.recover() == Recovered(finalized=1)
            done = await service.get(batch.id, owner=None, wait=60)
        assert done.status is BatchStatus.INTERRUPTED
        assert gate.entered == []
        assert [event.type.value for event in storage.events(batch.id, after=0)] == [
            "batch_start",
            "tool_execution_start",
            "tool_execution_end",
            "batch_end",
        ]


@pytest.mark.parametrize("waits", [False, True])
async def test_a_batch_that_another_process_took_over_right_after_the_claim_is_left_to_it(storage, waits):
    gate = Gate()
    faulty = FaultyStorage(storage)
    async with recording(faulty) as records:
        batch = await records.accept(await records.workspace(), [("gate", {"n": "1"})])
        if waits:
            assert storage.apply([GiveBack(batch.id, 1, 1, NODE)]) == [Applied()]
        epoch = 2 if waits else 1

        def is_slow_to_tell(real: Storage, group: Sequence[Write]) -> list[WriteOutcome]:
            outcomes = real.apply(group)
            other = ClaimBatch(batch.id, epoch + 1, EARLIER_PROCESS)
            assert real.apply([other, starts(replace(batch, epoch=epoch + 2))]) == [Applied(), Applied()]
            return outcomes

        async with serving(records, ScriptedTool("gate", gate.run)) as (backend, _, finalizer):
            recovery = recovery_of(records, backend, finalizer)
            faulty.faults.append(is_slow_to_tell)
            assert await recovery.recover() == Recovered()
            assert not backend.is_local(batch.id)
        assert gate.entered == []
        assert storage.last_seq(batch.id) == (2, BatchStatus.RUNNING)


async def test_a_batch_ends_even_when_running_it_fails_by_a_bug(storage):
    async with recording(storage) as records:
        broken = ScriptedTool("gate", _quick)
        async with serving(records, broken) as (_, service, _):
            broken.definition = None  # type: ignore[assignment]  # what uses it raises
            batch = await submit(service, await records.workspace(), "a", "b")
            done = await service.get(batch.id, owner=None, wait=60)
        assert done.status is BatchStatus.INTERRUPTED
        assert [call.error and call.error.code for call in done.calls] == [ErrorCode.INTERRUPTED] * 2


async def test_a_batch_waits_for_a_database_that_is_away(storage):
    async with recording(storage) as records:
        gate = Gate()
        async with serving(records, ScriptedTool("gate", gate.run), running=1) as (_, service, _):
            workspace = await records.workspace()
            await submit(service, workspace, "first")
            await gate.until(1)
            away = [True, True]
            read = storage.workspace

            def sometimes(workspace_id: str) -> Workspace | None:
                if away:
                    away.pop()
                    raise OperationalError("away", "connection")
                return read(workspace_id)

            storage.workspace = sometimes
            batch = await submit(service, workspace, "a")
            gate.open.set()
            done = await service.get(batch.id, owner=None, wait=60)
        assert (done.status, away) == (BatchStatus.COMPLETED, [])


async def test_a_batch_that_waited_runs_with_the_workspace_as_it_is_when_it_starts(storage):
    async with recording(storage) as records:
        gate = Gate()
        seen: list[bool] = []

        class Watching(Hook):
            name = "watching"

            async def before_tool_call(self, context: BeforeContext) -> None:
                seen.append(context.workspace.trusted)

        async with serving(records, ScriptedTool("gate", gate.run), hooks=[Watching()], running=1) as (_, service, _):
            workspace = await records.workspace()
            await submit(service, workspace, "first")
            await gate.until(1)
            waiting = await submit(service, workspace, "waiting")
            assert await records.writer.write(UpdateWorkspace(workspace.id, trusted=False)) == Applied()
            gate.open.set()
            await service.get(waiting.id, owner=None, wait=60)
        assert seen == [True, False]


@pytest.mark.parametrize("size", [10, RECALL_MAX_BYTES], ids=["from memory", "from its rows"])
async def test_the_answer_to_a_wait_is_what_the_rows_say(storage, size):
    async def run(_id: str, args: dict[str, Any], _signal: AbortSignal, _update: Any) -> ToolResult:
        if args["n"] == "bad":
            raise ToolError(ErrorCode.NO_MATCH, "no")
        return answer("x" * size)

    async with recording(storage) as records, serving(records, ScriptedTool("gate", run)) as (_, service, _):
        workspace = await records.workspace()
        batch = await submit(service, workspace, "good", "bad", metadata={"agent": "x"}, on_error="stop")
        done = await service.get(batch.id, owner=None, wait=60)
        stored = storage.batch(batch.id)
        assert done == stored
        sizes = [[(call.arguments_bytes, call.result_bytes) for call in each.calls] for each in (done, stored)]
        assert sizes[0] == sizes[1]


async def test_a_wait_for_another_owners_batch_finds_nothing_although_it_is_at_hand(storage):
    async with recording(storage) as records:
        gate = Gate()
        gate.open.set()
        async with serving(records, ScriptedTool("gate", gate.run)) as (_, service, _):
            batch = await submit(service, await records.workspace(), "a")
            with pytest.raises(NotFound):
                await service.get(batch.id, owner="another", wait=60)
