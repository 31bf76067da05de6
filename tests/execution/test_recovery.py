"""What the dead leave: ended by whoever finds it, or run by a process of the node when nothing of it had begun."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import pytest

from app.domain.abort import AbortSignal
from app.domain.batch import Batch, BatchStatus
from app.domain.ids import new_id
from app.domain.node import Process
from app.domain.tool_call import ToolResult
from app.domain.workspace import WorkspaceStatus
from app.events.batch_writer import BatchWriter
from app.execution.backends.distributed import DistributedBackend, Take
from app.execution.finalizer import Finalizer
from app.execution.membership import Membership
from app.execution.recovery import Recovered, Recovery
from app.execution.runner import BatchRunner
from app.hooks.base import HookChain
from app.storage.base import Holder, RequestCancel, SetWorkspaceStatus, WaitingBatch
from tests.support.calls import ScriptedTool, answer, batch
from tests.support.eventing import NODE, Records, recording
from tests.support.records import submit

pytestmark = pytest.mark.anyio

OTHER_NODE = new_id("node")


class Survivor:
    """A process that looks after what others left; `ran` are the batches whose tool it called."""

    def __init__(self, records: Records, node_id: str | None) -> None:
        self.ran: list[str] = []

        async def run(args: dict[str, Any], _signal: AbortSignal, _update: Any) -> ToolResult:
            self.ran.append(args["n"])
            return answer("done")

        process = Process(new_id("proc"), node_id, "all", None)
        finalizer = Finalizer(records.storage, records.reads, records.writer, process_id=process.id)
        self.backend = DistributedBackend(
            BatchRunner(
                storage=records.storage,
                reads=records.reads,
                records=records.writer,
                finalizer=finalizer,
                hooks=HookChain(()),
                tools=lambda _workspace, _url: {"note": ScriptedTool("note", run)},
            )
        )
        self.membership = Membership(records.storage, process, shared=True)
        self.recovery = Recovery(
            storage=records.storage,
            reads=records.reads,
            records=records.writer,
            finalizer=finalizer,
            backend=self.backend,
            membership=self.membership,
        )


@asynccontextmanager
async def survivor(records: Records, node_id: str | None = NODE) -> AsyncIterator[Survivor]:
    made = Survivor(records, node_id)
    await made.membership.join()
    yield made
    async with asyncio.timeout(60):
        await made.backend.drain(30)


async def start(records: Records, item: Batch) -> None:
    """Take up the first call of a batch, as its holder did before it died."""
    before = BatchWriter(item, records.writer, capture_bytes=lambda _tool: 0, on_fenced=lambda: None)
    before.call_started(item.calls[0].to_call(), "parallel")
    await before.started_durably()


async def status(records: Records, *items: Batch) -> list[BatchStatus]:
    async with asyncio.timeout(60):
        while True:
            found = [records.storage.batch(item.id, calls=False) for item in items]
            if all(one is not None and one.status.terminal for one in found):
                return [one.status for one in found if one is not None]
            await asyncio.sleep(0.005)


async def test_a_process_of_another_node_ends_what_had_begun_and_gives_the_rest_back(storage):
    async with recording(storage) as records:
        space = await records.workspace()
        begun, waiting, unwanted = [await records.accept(space, [("note", {"n": str(n)})]) for n in range(3)]
        await start(records, begun)
        await records.writer.write(RequestCancel(unwanted.id, None, 5))
        async with survivor(records, OTHER_NODE) as other:
            assert await other.recovery.recover() == Recovered(finalized=2, requeued=1)
            assert await status(records, begun, unwanted) == [BatchStatus.INTERRUPTED, BatchStatus.CANCELLED]
            assert other.ran == []
        assert storage.waiting_batches(NODE, limit=9) == [WaitingBatch(waiting.id, 2)]
        async with survivor(records) as own:
            await own.recovery.recover()
            assert await status(records, waiting) == [BatchStatus.COMPLETED]
            assert own.ran == ["1"]


async def test_two_that_find_the_same_batch_run_it_once(storage):
    async with recording(storage) as records:
        space = await records.workspace()
        items = [await records.accept(space, [("note", {"n": str(n)})]) for n in range(8)]
        async with survivor(records) as first, survivor(records) as second:
            await asyncio.gather(first.recovery.recover(), second.recovery.recover())
            assert set(await status(records, *items)) == {BatchStatus.COMPLETED}
        assert sorted(first.ran + second.ran) == [str(n) for n in range(8)]


async def test_what_waits_is_taken_once_and_not_from_a_process_that_holds_it(storage):
    async with recording(storage) as records:
        space = await records.workspace()
        made = batch([("note", {"n": "0"})], space.id)
        await records.writer.write(submit(made))
        async with survivor(records) as first, survivor(records) as second:
            waiting = WaitingBatch(made.id, 1)
            await asyncio.gather(*(one.recovery.take(waiting) for one in (first, second, first, second)))
            assert await status(records, made) == [BatchStatus.COMPLETED]
            await first.recovery.take(WaitingBatch(made.id, 2))
        assert first.ran + second.ran == ["0"]


async def test_a_batch_that_nobody_began_in_a_workspace_that_is_deleted_is_not_run(storage):
    async with recording(storage) as records:
        space = await records.workspace()
        item = await records.accept(space, [("note", {"n": "0"})])
        await records.writer.write(SetWorkspaceStatus(space.id, WorkspaceStatus.DELETING))
        async with survivor(records) as own:
            assert await own.recovery.recover() == Recovered(finalized=1)
            assert await status(records, item) == [BatchStatus.CANCELLED]
            assert own.ran == []


async def test_batches_of_the_living_are_left_alone(storage):
    async with recording(storage) as records:
        space = await records.workspace()
        async with survivor(records) as holder, survivor(records) as other:
            made = batch([("note", {"n": "0"})], space.id)
            held = Holder(holder.membership.process.id, NODE)
            await records.writer.write(replace(submit(made), holder=held))
            assert await other.recovery.recover() == Recovered()
            assert storage.unfinished_batch(made.id).process_id == held.process_id
            # As it ends in order it takes what it holds with it; here it just goes.
            storage.leave(held.process_id)
            assert await other.recovery.recover() == Recovered(requeued=1)
            assert await status(records, made) == [BatchStatus.COMPLETED]
            assert (holder.ran, other.ran) == ([], ["0"])


async def test_a_process_that_drains_leaves_what_waits_to_the_others(storage):
    async with recording(storage) as records:
        space = await records.workspace()
        made = batch([("note", {"n": "0"})], space.id)
        await records.writer.write(submit(made))
        async with survivor(records) as ending:
            await ending.backend.drain(0)
            await ending.recovery.recover()
            assert storage.waiting_batches(NODE, limit=9) == [WaitingBatch(made.id, 1)]
        async with survivor(records) as other:
            await other.recovery.recover()
            assert await status(records, made) == [BatchStatus.COMPLETED]
        assert (ending.ran, other.ran) == ([], ["0"])


async def test_a_batch_that_is_held_and_not_run_is_settled_when_it_is_found_so_twice(storage):
    async with recording(storage) as records:
        space = await records.workspace()
        async with survivor(records) as own:
            # As a claim leaves it whose taker was called off: the rows say that this process has it.
            held = Holder(own.membership.process.id, NODE)
            waiting, begun = (batch([("note", {"n": str(n)})], space.id) for n in range(2))
            for item in (waiting, begun):
                await records.writer.write(replace(submit(item), holder=held))
            await start(records, begun)
            keeping = asyncio.create_task(own.recovery.keep())
            own.recovery.wake()
            async with asyncio.timeout(60):
                while True:
                    await asyncio.sleep(0.005)
                    if own.recovery._astray == {waiting.id, begun.id}:
                        break
            assert own.ran == []
            own.recovery.wake()
            assert await status(records, waiting, begun) == [BatchStatus.COMPLETED, BatchStatus.INTERRUPTED]
            assert own.ran == ["0"]
            keeping.cancel()
            await asyncio.wait([keeping])


async def test_a_job_that_is_called_off_in_the_middle_of_its_claim_is_run_all_the_same(storage):
    async with recording(storage) as records:
        space = await records.workspace()
        made = batch([("note", {"n": "0"})], space.id)
        await records.writer.write(submit(made))
        async with survivor(records) as own:
            begun = asyncio.Event()

            class Jobs:
                async def work(self, node_id: str, take: Take, *, at_once: int) -> None:
                    job = asyncio.create_task(take(WaitingBatch(made.id, 1)))
                    await asyncio.sleep(0)
                    job.cancel()
                    await asyncio.wait([job])
                    begun.set()
                    await asyncio.Event().wait()

            own.backend.start(Jobs(), NODE, own.recovery.take)
            await begun.wait()
            assert await status(records, made) == [BatchStatus.COMPLETED]
            await own.backend.stop_taking()
        assert own.ran == ["0"]
