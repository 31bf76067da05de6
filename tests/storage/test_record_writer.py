"""The writer's thread: groups, failures, who is told what, and what it never loses."""

import asyncio
import gc
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from app.domain.batch import Batch
from app.domain.workspace import Workspace
from app.errors import NoSpace, StorageUnavailable
from app.storage.ballast import Ballast
from app.storage.base import (
    Append,
    Applied,
    CreateWorkspace,
    DataError,
    OperationalError,
    Refused,
    Storage,
    SubmitBatch,
    UpdateWorkspace,
    Write,
    WriteOutcome,
)
from app.storage.record_writer import RecordWriter
from app.storage.sql.storage import SqlStorage
from tests.support.faulty_storage import Fault, FaultyStorage, Gate, fails, loses_reply
from tests.support.records import ends, make_batch, make_event, make_workspace, starts, submit

pytestmark = pytest.mark.anyio

APPLIED = Applied()
WAIT_SECONDS = 20.0
BUSY = OperationalError("database is locked", "busy")
FULL = OperationalError("database or disk is full", "full")
AWAY = OperationalError("connection refused", "connection")


@asynccontextmanager
async def running(storage: Any, **options: Any) -> AsyncIterator[RecordWriter]:
    writer = RecordWriter(storage, **options)
    writer.start()
    try:
        yield writer
    finally:
        await writer.close()


@pytest.fixture
def faulty(sqlite_storage: SqlStorage) -> FaultyStorage:
    return FaultyStorage(sqlite_storage)


@pytest.fixture
def workspace(sqlite_storage: SqlStorage) -> Workspace:
    made = make_workspace()
    sqlite_storage.apply([CreateWorkspace(made)])
    return made


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(WAIT_SECONDS):
        while not condition():  # noqa: ASYNC110 - what is waited for sets no event
            await asyncio.sleep(0.005)


async def reached(gate: Gate) -> None:
    assert await asyncio.to_thread(gate.reached.wait, WAIT_SECONDS)


async def outcomes(futures: Sequence[asyncio.Future[WriteOutcome]]) -> list[WriteOutcome | BaseException]:
    async with asyncio.timeout(WAIT_SECONDS):
        return await asyncio.gather(*futures, return_exceptions=True)


def is_stored(storage: Any, batch: Batch) -> bool:
    return storage.batch(batch.id) is not None


# -- groups -----------------------------------------------------------------------------------------------------------


async def test_write_is_stored_when_it_is_reported(faulty: FaultyStorage, workspace: Workspace) -> None:
    batch = make_batch(workspace.id)
    async with running(faulty) as writer:
        assert await writer.write(submit(batch)) == APPLIED
        assert faulty.batch(batch.id) == batch
        assert await writer.write(submit(make_batch("ws_unknown"))) == Refused("not_found")


async def test_writes_that_gather_during_a_commit_share_the_next_one(
    faulty: FaultyStorage, workspace: Workspace
) -> None:
    gate = Gate()
    faulty.faults.append(gate)
    async with running(faulty, group_limit=50, capacity_rows=120) as writer:
        futures = [writer.submit(submit(make_batch(workspace.id)))]
        await reached(gate)
        futures += [writer.submit(submit(make_batch(workspace.id))) for _ in range(58)]
        assert (writer.depth, writer.overloaded) == (59, False)
        futures.append(writer.submit(submit(make_batch(workspace.id))))
        assert writer.overloaded
        gate.open.set()

        assert await outcomes(futures) == [APPLIED] * 60
        assert [len(group) for group in faulty.groups] == [1, 50, 9]
        assert (writer.depth, writer.overloaded) == (0, False)


async def test_new_work_is_refused_when_few_writes_hold_many_bytes(faulty: FaultyStorage, workspace: Workspace) -> None:
    gate = Gate()
    faulty.faults.append(gate)
    async with running(faulty, capacity_bytes=100_000) as writer:
        before = writer.weight
        futures = []
        for size in (60_000, 30_000, 30_000):
            assert not writer.overloaded
            made = make_batch(workspace.id)
            call = replace(made.calls[0], arguments=b"x" * size)
            futures.append(writer.submit(submit(replace(made, calls=(call, *made.calls[1:])))))
        assert writer.overloaded
        assert writer.weight.rows == 3 * (1 + len(made.calls))
        await reached(gate)
        gate.open.set()
        assert await outcomes(futures) == [APPLIED] * 3
        assert (writer.overloaded, writer.weight) == (False, before)


async def test_each_commit_is_told_once_before_its_futures_and_in_order(
    faulty: FaultyStorage, workspace: Workspace
) -> None:
    heard: list[Any] = []
    resolved: list[int] = []
    gate = Gate()
    faulty.faults.append(gate)
    batch = make_batch(workspace.id)
    writes: list[Write] = [submit(batch), starts(batch), ends(batch, 2), starts(batch)]

    def on_commit(pairs: Sequence[tuple[Write, WriteOutcome]]) -> None:
        heard.append([(type(write).__name__, outcome) for write, outcome in pairs])
        heard.append([future.done() for future in futures])

    def note(number: int, _future: object) -> None:
        resolved.append(number)

    async with running(faulty, on_commit=on_commit) as writer:
        futures = [writer.submit(writes[0])]
        await reached(gate)
        futures += [writer.submit(write) for write in writes[1:]]
        for number, future in enumerate(futures):
            future.add_done_callback(partial(note, number))
        gate.open.set()
        await outcomes(futures)
        await until(lambda: len(resolved) == 4)

    assert heard == [
        [("SubmitBatch", APPLIED)],
        [False] * 4,
        [("Append", APPLIED), ("Append", APPLIED), ("Append", Refused("fenced"))],
        [True, False, False, False],
    ]
    assert resolved == [0, 1, 2, 3]


# -- values that do not fit -------------------------------------------------------------------------------------------


async def test_bad_value_fails_its_own_caller_only(faulty: FaultyStorage, workspace: Workspace) -> None:
    gate = Gate()
    faulty.faults.append(gate)
    good = [make_batch(workspace.id) for _ in range(3)]
    bad = make_batch(workspace.id, timeout_ms=2**70)
    async with running(faulty) as writer:
        first = writer.submit(submit(good[0]))
        await reached(gate)
        writes: list[Write] = [
            submit(good[1]),
            submit(bad),
            starts(bad),
            ends(bad, 2),
            submit(good[2]),
            starts(good[2]),
        ]
        futures = [first, *map(writer.submit, writes)]
        gate.open.set()
        found = await outcomes(futures)

    assert isinstance(found[2], DataError)
    assert found[:2] + found[3:] == [APPLIED, APPLIED, Refused("fenced"), Refused("fenced"), APPLIED, APPLIED]
    assert [is_stored(faulty, batch) for batch in (*good, bad)] == [True, True, True, False]
    assert [len(group) for group in faulty.groups] == [1, 6, 1, 1, 1, 1, 1, 1]


async def test_append_that_fails_fences_the_later_ones_of_its_batch(
    faulty: FaultyStorage, workspace: Workspace
) -> None:
    batch = make_batch(workspace.id)
    async with running(faulty) as writer:
        await writer.write(submit(batch))
        bad = Append(batch.id, 1, 1, [replace(make_event(batch.id, 2), at=2**70)])
        futures = [writer.submit(bad), writer.submit(Append(batch.id, 1, 2, [make_event(batch.id, 3)]))]
        found = await outcomes(futures)
    assert isinstance(found[0], DataError)
    assert found[1] == Refused("fenced")
    assert len(faulty.events(batch.id, after=0)) == 1


async def test_failure_nobody_looks_at_is_not_logged(faulty: FaultyStorage, workspace: Workspace) -> None:
    logged: list[dict[str, Any]] = []
    asyncio.get_running_loop().set_exception_handler(lambda _loop, context: logged.append(context))
    async with running(faulty) as writer:
        writer.submit(submit(make_batch(workspace.id, timeout_ms=2**70)))
        assert await writer.drain(WAIT_SECONDS)
    gc.collect()
    await asyncio.sleep(0)
    assert logged == []


# -- a database that is busy, away or does not answer -----------------------------------------------------------------


async def test_group_stays_whole_and_is_tried_again(faulty: FaultyStorage, workspace: Workspace) -> None:
    gate = Gate()
    faulty.faults.extend([gate, fails(BUSY), fails(AWAY), fails(BUSY)])
    batch = make_batch(workspace.id)
    async with running(faulty) as writer:
        first = writer.submit(submit(batch))
        await reached(gate)
        writes = [starts(batch), ends(batch, 2)]
        futures = [first, *map(writer.submit, writes)]
        gate.open.set()
        assert await outcomes(futures) == [APPLIED] * 3
    assert faulty.groups == [[submit_of(faulty)], writes, writes, writes, writes]
    assert [event.seq for event in faulty.events(batch.id, after=0)] == [1, 2, 3, 4]


def submit_of(faulty: FaultyStorage) -> SubmitBatch:
    (write,) = faulty.groups[0]
    assert isinstance(write, SubmitBatch)
    return write


async def test_lost_reply_is_success_and_everything_is_stored_once(faulty: FaultyStorage, workspace: Workspace) -> None:
    faulty.faults.extend([loses_reply, fails(AWAY), loses_reply])
    batch = make_batch(workspace.id)
    async with running(faulty) as writer:
        assert await writer.write(submit(batch), droppable=True) == APPLIED
        faulty.faults.append(loses_reply)
        futures = [writer.submit(starts(batch)), writer.submit(ends(batch, 2))]
        assert await outcomes(futures) == [APPLIED, APPLIED]
    assert [event.seq for event in faulty.events(batch.id, after=0)] == [1, 2, 3, 4]


async def test_accept_whose_caller_went_away_before_the_attempt_is_given_up(
    faulty: FaultyStorage, workspace: Workspace
) -> None:
    gate = Gate()
    faulty.faults.append(gate)
    kept, gone = make_batch(workspace.id), make_batch(workspace.id)
    async with running(faulty) as writer:
        first = writer.submit(UpdateWorkspace(workspace.id, name="x"))
        await reached(gate)
        dropped = writer.submit(submit(gone), droppable=True)
        stays = writer.submit(submit(kept))
        dropped.cancel()
        stays.cancel()
        gate.open.set()
        assert await first == APPLIED
        assert await writer.drain(WAIT_SECONDS)
    assert [is_stored(faulty, batch) for batch in (kept, gone)] == [True, False]


async def test_accept_in_doubt_is_followed_up_although_its_caller_went_away(
    faulty: FaultyStorage, workspace: Workspace
) -> None:
    told: list[tuple[Write, WriteOutcome]] = []
    gate = Gate()
    write = submit(make_batch(workspace.id))
    faulty.faults.extend([loses_reply, fails(AWAY), gate])
    async with running(faulty, on_commit=told.extend, unavailable_after=0.0) as writer:
        future = writer.submit(write, droppable=True)
        await reached(gate)
        assert not future.done(), "whether it is stored is not known yet"
        future.cancel()
        gate.open.set()
        assert await writer.drain(WAIT_SECONDS)
    assert told == [(write, APPLIED)]


async def test_accepts_fail_when_the_database_stays_away_and_appends_wait_for_it(
    faulty: FaultyStorage, workspace: Workspace
) -> None:
    batch = make_batch(workspace.id)
    refused = make_batch(workspace.id)
    async with running(faulty, unavailable_after=0.05) as writer:
        await writer.write(submit(batch))
        faulty.faults.extend([fails(AWAY)] * 6)
        append = writer.submit(starts(batch))
        with pytest.raises(StorageUnavailable):
            await asyncio.wait_for(writer.write(submit(refused), droppable=True), WAIT_SECONDS)
        assert await outcomes([append]) == [APPLIED]
    assert not is_stored(faulty, refused)


# -- a full disk ------------------------------------------------------------------------------------------------------


async def test_full_disk_refuses_accepts_at_once_and_keeps_room_for_ends(
    faulty: FaultyStorage, workspace: Workspace, tmp_path: Path
) -> None:
    ballast = Ballast(tmp_path / "ballast", 64 * 1024)
    batch = make_batch(workspace.id)
    refused = [make_batch(workspace.id) for _ in range(2)]
    async with running(faulty, ballast=ballast) as writer:
        await writer.write(submit(batch))
        assert (tmp_path / "ballast").stat().st_size == 64 * 1024
        gate = Gate()
        faulty.faults.extend([gate, fails(FULL), fails(FULL), room_without(tmp_path / "ballast", faulty)])
        first = writer.submit(UpdateWorkspace(workspace.id, name="x"))
        await reached(gate)
        append = writer.submit(starts(batch))
        accept = writer.submit(submit(refused[0]), droppable=True)
        gate.open.set()

        found = await outcomes([first, append, accept])
        assert found[:2] == [APPLIED, APPLIED]
        assert isinstance(found[2], NoSpace)
        assert writer.full
        with pytest.raises(NoSpace):
            await writer.write(submit(refused[1]), droppable=True)

        await until(lambda: not writer.full)
        assert (tmp_path / "ballast").stat().st_size == 64 * 1024
        assert await writer.write(submit(refused[1]), droppable=True) == APPLIED
    assert not is_stored(faulty, refused[0])


def room_without(ballast: Path, faulty: FaultyStorage) -> Fault:
    """The disk stays full for as long as the ballast is there."""

    def apply(storage: Storage, group: Sequence[Write]) -> list[WriteOutcome]:
        if ballast.exists():
            faulty.faults.appendleft(apply)
            raise FULL
        return storage.apply(group)

    return apply


def test_ballast_is_not_made_where_it_would_take_the_last_room(tmp_path: Path) -> None:
    assert not Ballast(tmp_path / "ballast", 2**60).make()
    assert list(tmp_path.iterdir()) == []
    assert not Ballast(tmp_path / "missing" / "ballast").make()


# -- the end ----------------------------------------------------------------------------------------------------------


async def test_death_of_the_thread_fails_everything_and_is_told(faulty: FaultyStorage, workspace: Workspace) -> None:
    died: list[BaseException] = []
    gate = Gate()
    bug = RuntimeError("a bug")
    faulty.faults.extend([gate, fails(bug)])
    async with running(faulty, on_death=died.append) as writer:
        first = writer.submit(submit(make_batch(workspace.id)))
        await reached(gate)
        futures = [writer.submit(submit(make_batch(workspace.id))) for _ in range(3)]
        gate.open.set()
        assert await first == APPLIED
        found = await outcomes(futures)
        assert [type(error) for error in found] == [StorageUnavailable] * 3
        await until(lambda: died == [bug])
        with pytest.raises(StorageUnavailable):
            await writer.write(submit(make_batch(workspace.id)))


async def test_close_ends_the_retries_and_fails_what_waits(faulty: FaultyStorage, workspace: Workspace) -> None:
    faulty.faults.extend([fails(AWAY)] * 1000)
    async with running(faulty) as writer:
        futures = [writer.submit(submit(make_batch(workspace.id))) for _ in range(3)]
        await until(lambda: len(faulty.groups) >= 2)
        assert not await writer.drain(0.01)
        await asyncio.wait_for(writer.close(), WAIT_SECONDS)
        found = await outcomes([*futures, writer.submit(submit(make_batch(workspace.id)))])
        assert [type(error) for error in found] == [StorageUnavailable] * 4
        assert writer.depth == 0


async def test_drain_returns_when_all_is_stored(faulty: FaultyStorage, workspace: Workspace) -> None:
    batches = [make_batch(workspace.id) for _ in range(20)]
    async with running(faulty) as writer:
        assert await writer.drain(0)
        for batch in batches:
            writer.submit(submit(batch))
        assert await writer.drain(WAIT_SECONDS)
        assert all(is_stored(faulty, batch) for batch in batches)


async def test_writer_that_was_never_started_can_be_closed(faulty: FaultyStorage) -> None:
    await RecordWriter(faulty).close()
