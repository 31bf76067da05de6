"""The feed of a workspace: hints, merged for whoever is slow, and the same whoever runs the batches."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import orjson
import pytest

from app.domain.batch import Batch, BatchStatus
from app.domain.workspace import Workspace, WorkspaceStatus
from app.events import feed as feed_module
from app.events.feed import WorkspaceFeed
from app.storage.base import Append, CreateWorkspace, SetWorkspaceStatus, Write
from app.storage.read_pool import ReadPool
from app.storage.record_writer import RecordWriter
from app.storage.sql.storage import SqlStorage
from tests.support.records import ends, make_batch, make_event, make_workspace, starts, submit

pytestmark = pytest.mark.anyio


class Feeds:
    """A feed and the writer that fills it; `shared` makes it look at what others write, too."""

    def __init__(self, storage: SqlStorage, *, shared: bool = False) -> None:
        self.reads = ReadPool(2)
        self.feed = WorkspaceFeed(storage, self.reads, shared=shared)
        self.writer = RecordWriter(storage, on_commit=self.feed.committed)

    async def write(self, *writes: Write) -> None:
        await asyncio.gather(*[self.writer.submit(write) for write in writes])


@asynccontextmanager
async def feeding(storage: SqlStorage, *, shared: bool = False) -> AsyncIterator[Feeds]:
    feeds = Feeds(storage, shared=shared)
    feeds.writer.start()
    try:
        yield feeds
    finally:
        await feeds.writer.close()
        feeds.reads.close()


@pytest.fixture
def workspace(storage: SqlStorage) -> Workspace:
    made = make_workspace()
    storage.apply([CreateWorkspace(made)])
    return made


def events(data: bytes) -> list[dict[str, object]]:
    assert b"\nid:" not in data
    return [orjson.loads(line[6:]) for line in data.split(b"\n") if line.startswith(b"data: ")]


def hint(batch: Batch, last_seq: int, status: str) -> dict[str, object]:
    return {"type": "hint", "batchId": batch.id, "lastSeq": last_seq, "status": status}


class Reader:
    """Reads a feed event by event."""

    def __init__(self, feed: WorkspaceFeed, workspace: Workspace) -> None:
        self._frames = feed.follow(workspace.id)
        self._events: list[dict[str, object]] = []

    async def open(self) -> "Reader":
        async with asyncio.timeout(30):
            assert await anext(self._frames) == b"retry: 1000\n\n"
        return self

    async def next(self) -> dict[str, object]:
        async with asyncio.timeout(30):
            while not self._events:
                self._events = events(await anext(self._frames))
        return self._events.pop(0)

    async def until(self, wanted: dict[str, object]) -> None:
        while await self.next() != wanted:
            pass

    async def rest(self) -> list[dict[str, object]]:
        async with asyncio.timeout(30):
            return [*self._events, *[event async for frame in self._frames for event in events(frame)]]

    async def close(self) -> None:
        await self._frames.aclose()


async def test_each_step_of_a_batch_is_hinted_and_nothing_of_other_workspaces(
    storage: SqlStorage, workspace: Workspace
) -> None:
    async with feeding(storage) as feeds:
        other = make_workspace()
        await feeds.write(CreateWorkspace(other))
        reader = await Reader(feeds.feed, workspace).open()
        batch, elsewhere = make_batch(workspace.id), make_batch(other.id)
        await feeds.write(submit(elsewhere), submit(batch))
        assert await reader.next() == hint(batch, 1, "queued")
        await feeds.write(starts(elsewhere), starts(batch))
        assert await reader.next() == hint(batch, 2, "running")
        await feeds.write(Append(batch.id, 1, 2, [make_event(batch.id, 3)]))
        assert await reader.next() == hint(batch, 3, "running")
        await feeds.write(ends(batch, 3))
        assert await reader.next() == hint(batch, 5, "completed")
        await reader.close()
        assert feeds.feed.followers == 0
        assert feeds.feed._tables == feeds.feed._table_of == {}


async def test_what_runs_already_is_told_first(storage: SqlStorage, workspace: Workspace) -> None:
    async with feeding(storage) as feeds:
        done, running, queued = (make_batch(workspace.id) for _ in range(3))
        await feeds.write(submit(done), ends(done, 1), submit(running), starts(running), submit(queued))
        first = await Reader(feeds.feed, workspace).open()
        second = await Reader(feeds.feed, workspace).open()
        for reader in (first, second):
            assert [await reader.next(), await reader.next()] == [
                hint(running, 2, "running"),
                hint(queued, 1, "queued"),
            ]
        await feeds.write(ends(running, 2))
        for reader in (first, second):
            assert await reader.next() == hint(running, 4, "completed")
            await reader.close()


async def test_a_slow_reader_gets_the_last_state_once(storage: SqlStorage, workspace: Workspace) -> None:
    async with feeding(storage) as feeds:
        reader = await Reader(feeds.feed, workspace).open()
        batch, other = make_batch(workspace.id), make_batch(workspace.id)
        await feeds.write(submit(batch), submit(other))
        await feeds.write(
            *[Append(batch.id, 1, seq - 1, [make_event(batch.id, seq)]) for seq in range(2, 500)], ends(batch, 499)
        )
        await feeds.write(SetWorkspaceStatus(workspace.id, WorkspaceStatus.DELETED))
        assert await reader.rest() == [hint(other, 1, "queued"), hint(batch, 501, "completed")]


async def test_a_reader_hears_of_a_batch_at_most_ten_times_a_second(
    storage: SqlStorage, workspace: Workspace, monkeypatch: pytest.MonkeyPatch
) -> None:
    pauses: list[float] = []
    sleep = asyncio.sleep

    async def note(seconds: float) -> None:
        pauses.append(seconds)
        await sleep(0)

    async with feeding(storage) as feeds:
        reader = await Reader(feeds.feed, workspace).open()
        batch = make_batch(workspace.id)
        monkeypatch.setattr(feed_module.asyncio, "sleep", note)
        for number, write in enumerate((submit(batch), starts(batch), ends(batch, 2))):
            await feeds.write(write)
            await reader.next()
            assert len(pauses) == number
        await reader.close()
    assert pauses == [0.1] * 2


async def test_what_a_table_had_to_forget_is_a_resync(
    storage: SqlStorage, workspace: Workspace, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(feed_module, "ENDED_MAX", 3)
    async with feeding(storage) as feeds:
        slow, quick = await Reader(feeds.feed, workspace).open(), await Reader(feeds.feed, workspace).open()
        batches = [make_batch(workspace.id) for _ in range(6)]
        running = make_batch(workspace.id)
        await feeds.write(submit(running))
        for batch in batches:
            await feeds.write(submit(batch), ends(batch, 1))
            await quick.until(hint(batch, 3, "completed"))
        assert await slow.next() == {"type": "resync", "workspaceId": workspace.id}
        assert [await slow.next() for _ in range(4)] == [
            hint(running, 1, "queued"),
            *[hint(batch, 3, "completed") for batch in batches[3:]],
        ]
        await feeds.write(starts(running))
        assert await slow.next() == hint(running, 2, "running")
        assert len(feeds.feed._table_of) == 4
        await slow.close()
        await quick.close()


@pytest.mark.parametrize("status", [WorkspaceStatus.DELETED, WorkspaceStatus.EXPIRED])
async def test_a_feed_ends_when_the_workspace_is_gone(
    storage: SqlStorage, workspace: Workspace, status: WorkspaceStatus
) -> None:
    async with feeding(storage) as feeds:
        reader = await Reader(feeds.feed, workspace).open()
        batch = make_batch(workspace.id)
        await feeds.write(submit(batch), SetWorkspaceStatus(workspace.id, WorkspaceStatus.DELETING))
        assert await reader.next() == hint(batch, 1, "queued")
        await feeds.write(ends(batch, 1))
        await feeds.write(SetWorkspaceStatus(workspace.id, status))
        assert await reader.rest() == [hint(batch, 3, "completed")]
        late = await Reader(feeds.feed, workspace).open()
        assert await late.rest() == []


async def test_what_another_process_does_is_hinted_too(storage: SqlStorage, workspace: Workspace) -> None:
    async with feeding(storage, shared=True) as here, feeding(storage) as there:
        before = make_batch(workspace.id)
        await there.write(submit(before))
        readers = [await Reader(here.feed, workspace).open() for _ in range(3)]
        for reader in readers:
            assert await reader.next() == hint(before, 1, "queued")
        quick = make_batch(workspace.id)
        await there.write(starts(before), submit(quick), ends(quick, 1), ends(before, 2))
        for reader in readers:
            wanted = [hint(before, 4, "completed"), hint(quick, 3, "completed")]
            while wanted:
                seen = await reader.next()
                wanted = [each for each in wanted if each != seen]
        await there.write(SetWorkspaceStatus(workspace.id, WorkspaceStatus.DELETED))
        for reader in readers:
            assert await reader.rest() == []


def test_heads_are_read_by_what_is_known(storage: SqlStorage, workspace: Workspace) -> None:
    done, running, newest = (make_batch(workspace.id) for _ in range(3))
    storage.apply([submit(done), ends(done, 1), submit(running), starts(running), submit(newest), ends(newest, 1)])

    def heads(also: list[str], after: str | None) -> list[tuple[str, int, BatchStatus | None]]:
        found = storage.batch_heads(workspace.id, also=also, after=after)
        return [(head.batch_id, head.last_seq, head.status) for head in found]

    ended, begun, last = (
        (done.id, 3, BatchStatus.COMPLETED),
        (running.id, 2, BatchStatus.RUNNING),
        (newest.id, 3, BatchStatus.COMPLETED),
    )
    assert heads([], None) == [begun, last]
    assert heads([done.id], newest.id) == [ended, begun]
    assert heads([], done.id) == [begun, last]
    assert storage.batch_heads("ws_other", also=[], after=None) == []
