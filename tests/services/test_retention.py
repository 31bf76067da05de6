"""What has been kept for long enough goes; what lives is not touched, and waits for one piece at most."""

import asyncio
from collections.abc import Sequence

import pytest

from app.domain.batch import Batch, BatchStatus, Summary
from app.domain.clock import now_ms
from app.domain.retention import Removal, RemovedCounts, RetentionPolicy
from app.domain.tool_call import CallStatus, Outcome
from app.domain.workspace import WorkspaceStatus
from app.events.batch_writer import BatchWriter
from app.services.retention import Retention
from app.storage.base import GiveBackPages, Removed, RemoveFromBatch, RemoveWorkspace, SetWorkspaceStatus, Write
from app.storage.sql.storage import SqlStorage
from app.tools.base import OutputDelta
from tests.support.calls import answer
from tests.support.eventing import Records, frames, recording

pytestmark = pytest.mark.anyio

DAY = 86_400
DONE = Outcome(CallStatus.SUCCEEDED, answer("done"))
REMOVALS = (RemoveFromBatch, RemoveWorkspace, GiveBackPages)


def retention(records: Records, *, days: float = 0, **seconds: int) -> Retention:
    """A retention whose clock is some days ahead."""
    return Retention(
        storage=records.storage,
        reads=records.reads,
        records=records.writer,
        policy=RetentionPolicy(**seconds),
        now=lambda: now_ms() + int(days * DAY * 1000) + 1,
    )


async def begin(records: Records, lines: int = 3) -> tuple[Batch, BatchWriter]:
    made = await records.accept(await records.workspace(f"/srv/{now_ms()}-{id(object())}"), [("bash", {})])
    writer = BatchWriter(made, records.writer, capture_bytes=lambda _tool: 10**8, on_fenced=lambda: None)
    call = made.calls[0].to_call()
    writer.call_started(call, "sequential")
    for number in range(lines):
        writer.call_updated(call, OutputDelta("stdout", b"%d\n" % number * 5000))
        await writer.started_durably()
    return made, writer


async def end(records: Records, batch: Batch, writer: BatchWriter) -> None:
    writer.call_ended(batch.calls[0].to_call(), DONE)
    await writer.batch_ended(
        BatchStatus.COMPLETED, Summary(1, succeeded=1), "sequential", has_errors=False, terminate=False
    )
    records.local.discard(batch.id)


async def ended(records: Records, lines: int = 3) -> Batch:
    batch, writer = await begin(records, lines)
    await end(records, batch, writer)
    return batch


async def replay(records: Records, batch: Batch, after: int = 0, updates: str = "delta") -> list[dict[str, object]]:
    async with asyncio.timeout(60):
        return frames(b"".join([chunk async for chunk in records.log.follow(batch.id, after, updates)]))


def told(events: Sequence[dict[str, object]]) -> list[tuple[object, object]]:
    return [(event.get("seq"), event["type"]) for event in events]


async def test_output_goes_first_then_updates_at_last_all(storage: SqlStorage) -> None:
    ages = {"output_seconds": DAY, "event_seconds": 2 * DAY, "record_seconds": 3 * DAY}
    async with recording(storage) as records:
        batch = await ended(records)
        whole = await replay(records, batch)
        assert await retention(records, days=0.9, **ages).round() == RemovedCounts()
        assert await replay(records, batch) == whole

        removed = await retention(records, days=1, **ages).round()
        assert (removed.output_bytes, removed.events, removed.batches) == (30_000, 0, 0)
        trimmed = await replay(records, batch)
        assert told(trimmed) == [
            (seq, "output_gap" if kind == "tool_execution_update" else kind) for seq, kind in told(whole)
        ]
        named = {name: value for name, value in whole[2].items() if name not in {"kind", "delta"}}
        assert trimmed[2] == named | {"type": "output_gap", "reason": "retention", "stream": None, "fromOffset": None}
        updates = len(whole) - 4

        removed = await retention(records, days=2, **ages).round()
        assert (removed.output_bytes, removed.events, removed.batches) == (0, updates, 0)
        last = len(whole)
        left = await replay(records, batch)
        assert told(left) == [
            (1, "batch_start"),
            (2, "tool_execution_start"),
            (None, "resync"),
            (last - 1, "tool_execution_end"),
            (last, "batch_end"),
        ]
        assert left[2] == {"type": "resync", "batchId": batch.id, "firstMissing": 3, "lastMissing": last - 2}
        for cursor in range(2, last - 2):
            assert told(await replay(records, batch, cursor)) == told(left[2:])
        assert told(await replay(records, batch, last - 2)) == told(left[3:])
        assert told(await replay(records, batch, 3, "none")) == told(left[3:])
        assert told(await replay(records, batch, 0, "snapshot")) == told(left)

        removed = await retention(records, days=3, **ages).round()
        assert (removed.events, removed.calls, removed.batches) == (4, 1, 1)
        assert storage.batch(batch.id) is None


async def test_what_runs_is_not_touched_and_its_follower_loses_nothing(storage: SqlStorage) -> None:
    async with recording(storage) as records:
        batch, writer = await begin(records)
        following = asyncio.ensure_future(replay(records, batch))
        ages = {"output_seconds": 1, "event_seconds": 1, "record_seconds": 1}
        assert await retention(records, days=9, **ages).round() == RemovedCounts()
        await end(records, batch, writer)
        seen = await following
        assert [event["seq"] for event in seen] == list(range(1, len(seen) + 1))
        assert "output_gap" not in dict(told(seen)).values()


async def test_a_follower_of_a_batch_that_is_removed_comes_to_an_end(storage: SqlStorage) -> None:
    async with recording(storage) as records:
        batch = await ended(records, lines=400)
        stream = records.log.follow(batch.id, 0)
        await anext(stream)
        assert (await retention(records, days=2, record_seconds=DAY).round()).batches == 1
        async with asyncio.timeout(60):
            rest = b"".join([chunk async for chunk in stream])
        assert b"batch_end" not in rest
        assert records.log.followers == 0


async def test_live_writes_go_between_the_pieces(storage: SqlStorage, monkeypatch: pytest.MonkeyPatch) -> None:
    groups: list[list[type]] = []
    apply = storage.apply

    def note(group: Sequence[Write]) -> object:
        groups.append([type(write) for write in group])
        return apply(group)

    async with recording(storage) as records:
        for _ in range(3):
            await ended(records, lines=200)
        live, writer = await begin(records, 1)
        monkeypatch.setattr(storage, "apply", note)
        removing = asyncio.ensure_future(retention(records, days=2, record_seconds=DAY).round())
        between = 0
        while not removing.done():
            writer.call_updated(live.calls[0].to_call(), OutputDelta("stdout", b"x" * 20_000))
            await writer.started_durably()
            between += 1
        assert (await removing).batches == 3
        await end(records, live, writer)
        assert between > 0
        assert len([kind for group in groups for kind in group if kind in REMOVALS]) > 10
        assert all(sum(kind in REMOVALS for kind in group) <= 1 for group in groups)
        assert len(await replay(records, live)) > between


async def test_a_round_that_was_cut_short_is_finished_whatever_the_policy_says_then(storage: SqlStorage) -> None:
    async with recording(storage) as records:
        batch = await ended(records, lines=200)
        outcome = await records.writer.write(RemoveFromBatch(batch.id, Removal.ALL))
        assert isinstance(outcome, Removed)
        assert outcome.more
        assert (await retention(records).round()).batches == 1
        assert storage.events(batch.id, after=0) == []


async def test_the_records_of_gone_workspaces_go_when_they_have_no_batches(storage: SqlStorage) -> None:
    async with recording(storage) as records:
        batch = await ended(records)
        empty = await records.workspace("/srv/empty")
        open_one = await records.workspace("/srv/open")
        await records.writer.write(SetWorkspaceStatus(empty.id, WorkspaceStatus.DELETED))
        assert await retention(records, days=0.5, record_seconds=DAY).round() == RemovedCounts()
        assert (await retention(records, days=2, output_seconds=DAY).round()).workspaces == 0
        removed = await retention(records, days=2, record_seconds=DAY).round()
        assert (removed.batches, removed.workspaces) == (1, 1)
        assert storage.workspace(empty.id) is None
        assert storage.workspace(open_one.id) is not None
        await records.writer.write(SetWorkspaceStatus(batch.workspace_id, WorkspaceStatus.EXPIRED))
        assert (await retention(records, days=4, record_seconds=DAY).round()).workspaces == 1


async def test_without_a_policy_nothing_is_removed(storage: SqlStorage) -> None:
    async with recording(storage) as records:
        await ended(records)
        assert await retention(records, days=36_500).round() == RemovedCounts()
