"""An event log on a real database, with the writer and the reads it needs."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace

import orjson

from app.domain.batch import Batch
from app.domain.ids import new_id
from app.domain.node import Process
from app.domain.workspace import Workspace
from app.events.log import EventLog
from app.execution.membership import Membership
from app.storage.base import CreateWorkspace, Holder, Storage
from app.storage.read_pool import ReadPool
from app.storage.record_writer import RecordWriter
from tests.support.calls import batch, workspace
from tests.support.records import submit

NODE = new_id("node")
EARLIER_PROCESS = new_id("proc")


@dataclass
class Records:
    storage: Storage
    reads: ReadPool
    writer: RecordWriter
    log: EventLog
    membership: Membership
    local: set[str] = field(default_factory=set)

    async def workspace(self, root: str = "/srv/w", **changes: object) -> Workspace:
        made = replace(workspace(root, **changes), node_id=NODE)
        await self.writer.write(CreateWorkspace(made))
        return made

    async def accept(self, owner: Workspace, calls: list[tuple[str, object]], **changes: object) -> Batch:
        """Store a batch as the service would, held by a process that nobody knows any more."""
        made = batch(calls, owner.id, **changes)
        await self.writer.write(replace(submit(made), holder=Holder(EARLIER_PROCESS, NODE)))
        self.local.add(made.id)
        return made


@asynccontextmanager
async def recording(storage: Storage) -> AsyncIterator[Records]:
    reads = ReadPool(4)
    local: set[str] = set()
    log = EventLog(storage, reads, is_local=local.__contains__)
    writer = RecordWriter(storage, on_commit=log.committed)
    writer.start()
    try:
        process = Process(new_id("proc"), NODE, "all", None)
        yield Records(storage, reads, writer, log, Membership(storage, process, shared=False), local)
    finally:
        await writer.drain(10)
        await writer.close()
        reads.close()


def frames(data: bytes) -> list[dict[str, object]]:
    """Return the events of SSE bytes."""
    return [orjson.loads(line[6:]) for line in data.split(b"\n") if line.startswith(b"data: ")]
