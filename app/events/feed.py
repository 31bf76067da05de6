"""The feed of a workspace: hints that something happened to one of its batches. The rows are the truth.

Per watched workspace there is one table of what its batches were last seen at, filled by each commit of this process.
A follower is a number: it takes what changed since that, so a slow one gets fewer hints and holds none.
"""

import asyncio
from collections.abc import AsyncGenerator, Collection, Sequence
from dataclasses import dataclass
from typing import Final

import orjson

from app.domain.batch import BatchStatus
from app.domain.workspace import WorkspaceStatus
from app.events.frames import RETRY_MS
from app.events.notifier import Notifier
from app.storage.base import (
    Append,
    Applied,
    BatchHead,
    SetWorkspaceStatus,
    Storage,
    SubmitBatch,
    Write,
    WriteOutcome,
)
from app.storage.read_pool import ReadPool

HINT_SECONDS: Final = 0.1
"""A follower is told of a batch at most once in this time."""
POLL_SECONDS: Final = 1.0
LOOK_SECONDS: Final = 60.0
ENDED_MAX: Final = 1024
"""How many ended batches a table remembers for followers that lag."""

_GONE: Final = frozenset({WorkspaceStatus.DELETED, WorkspaceStatus.EXPIRED})


@dataclass(slots=True)
class _Entry:
    version: int
    last_seq: int
    status: BatchStatus


class _Table:
    """What the batches of one workspace were last seen at, in the order of their last change."""

    def __init__(self) -> None:
        self.followers = 0
        self.gone = False
        self.changed = Notifier()
        self.poll = asyncio.Lock()
        self.stale = False
        self.version = 0
        self.newest = ""
        self._entries: dict[str, _Entry] = {}
        self._ended: dict[str, None] = {}
        self._forgotten = 0

    @property
    def batch_ids(self) -> Sequence[str]:
        return list(self._entries)

    @property
    def running(self) -> Sequence[str]:
        return [batch_id for batch_id in self._entries if batch_id not in self._ended]

    def note(self, batch_id: str, last_seq: int, status: BatchStatus | None) -> str | None:
        """Take what a batch is at now (a status of None: as before); return the id of a batch that was forgotten."""
        known = self._entries.get(batch_id)
        if known is not None:
            if last_seq <= known.last_seq or batch_id in self._ended:
                return None
            del self._entries[batch_id]
            status = status or known.status
        status = status or BatchStatus.QUEUED
        self.version += 1
        self.newest = max(self.newest, batch_id)
        self._entries[batch_id] = _Entry(self.version, last_seq, status)
        if status.terminal:
            self._ended[batch_id] = None
        if len(self._ended) <= ENDED_MAX:
            return None
        oldest = next(iter(self._ended))
        del self._ended[oldest]
        self._forgotten = max(self._forgotten, self._entries.pop(oldest).version)
        return oldest

    def since(self, version: int) -> tuple[list[BatchHead], bool]:
        """Return what changed after a version, oldest change first, and whether some of it is forgotten."""
        found = []
        for batch_id, entry in reversed(self._entries.items()):
            if entry.version <= version:
                break
            found.append(BatchHead(batch_id, entry.last_seq, entry.status))
        return found[::-1], version < self._forgotten


class WorkspaceFeed:
    """Tells any number of followers which batches of a workspace moved on.

    Args:
        shared: whether other processes may write to the database; then each watched workspace is looked at when
            `woken` names it, and once a second, since no commit of theirs passes here.
    """

    def __init__(self, storage: Storage, reads: ReadPool, *, shared: bool) -> None:
        self._storage = storage
        self._reads = reads
        self._shared = shared
        self._tables: dict[str, _Table] = {}
        self._table_of: dict[str, _Table] = {}

    @property
    def followers(self) -> int:
        """How many feeds are open."""
        return sum(table.followers for table in self._tables.values())

    def committed(self, writes: Sequence[tuple[Write, WriteOutcome]]) -> None:
        """Take what one transaction committed; called on the loop."""
        if not self._tables:
            return
        moved: set[_Table] = set()
        for write, outcome in writes:
            if not isinstance(outcome, Applied):
                continue
            match write:
                case SubmitBatch(batch=batch):
                    table = self._tables.get(batch.workspace_id)
                    if table is not None:
                        self._note(table, BatchHead(batch.id, batch.last_seq, batch.status))
                case Append():
                    table = self._table_of.get(write.batch_id)
                    if table is not None:
                        status = None if write.batch is None else write.batch.status
                        self._note(table, BatchHead(write.batch_id, write.after_seq + len(write.events), status))
                case SetWorkspaceStatus(status=status) if status in _GONE:
                    table = self._tables.get(write.workspace_id)
                    if table is not None:
                        table.gone = True
                case _:
                    table = None
            if table is not None:
                moved.add(table)
        for table in moved:
            table.changed.notify()

    def woken(self, ids: Collection[str] | None) -> None:
        """Look at workspaces in which other processes changed something: those of these ids, or (None) all."""
        if ids is None:
            moved = set(self._tables.values())
        else:
            moved = {table for one in ids if (table := self._tables.get(one) or self._table_of.get(one)) is not None}
        for table in moved:
            table.stale = True
            table.changed.notify()

    async def follow(self, workspace_id: str) -> AsyncGenerator[bytes, None]:
        """Yield SSE frames, first of what runs now, then of what changes, until the workspace is gone.

        A frame has no id: whoever comes again asks for the list of batches.
        """
        table = self._watch(workspace_id)
        try:
            await self._look(workspace_id, table)
            version, running = table.version, set(table.running)
            heads = [head for head in table.since(0)[0] if head.batch_id in running]
            yield b"retry: %d\n\n" % RETRY_MS
            while True:
                if heads:
                    yield b"".join(map(_hint, heads))
                    await asyncio.sleep(HINT_SECONDS)
                seen, gone = table.changed.version, table.gone
                reached = table.version
                heads, forgotten = table.since(version)
                version = reached
                if forgotten:
                    yield _frame("resync", {"workspaceId": workspace_id})
                if heads:
                    continue
                if gone:
                    return
                woken = await table.changed.wait(seen, POLL_SECONDS if self._shared else LOOK_SECONDS)
                if table.stale or not woken:
                    await self._poll(workspace_id, table)
        finally:
            self._unwatch(workspace_id, table)

    async def _poll(self, workspace_id: str, table: _Table) -> None:
        # One follower for all of them.
        if self._shared and not table.poll.locked():
            async with table.poll:
                table.stale = False
                await self._look(workspace_id, table)
                table.changed.notify()

    async def _look(self, workspace_id: str, table: _Table) -> None:
        heads = await self._reads.run(
            self._storage.batch_heads, workspace_id, also=table.running, after=table.newest or None
        )
        for head in heads:
            self._note(table, head)
        workspace = await self._reads.run(self._storage.workspace, workspace_id)
        if workspace is None or workspace.status in _GONE:
            table.gone = True

    def _note(self, table: _Table, head: BatchHead) -> None:
        self._table_of[head.batch_id] = table
        forgotten = table.note(head.batch_id, head.last_seq, head.status)
        if forgotten is not None:
            self._table_of.pop(forgotten, None)

    def _watch(self, workspace_id: str) -> _Table:
        table = self._tables.get(workspace_id)
        if table is None:
            table = self._tables[workspace_id] = _Table()
        table.followers += 1
        return table

    def _unwatch(self, workspace_id: str, table: _Table) -> None:
        table.followers -= 1
        if table.followers == 0:
            self._tables.pop(workspace_id, None)
            for batch_id in table.batch_ids:
                self._table_of.pop(batch_id, None)


def _hint(head: BatchHead) -> bytes:
    status = (head.status or BatchStatus.QUEUED).value
    return _frame("hint", {"batchId": head.batch_id, "lastSeq": head.last_seq, "status": status})


def _frame(name: str, members: dict[str, object]) -> bytes:
    return b"event: %b\ndata: %b\n\n" % (name.encode(), orjson.dumps({"type": name, **members}))
