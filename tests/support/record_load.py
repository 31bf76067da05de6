"""Programs that the storage tests start as processes of their own: `python -m tests.support.record_load MODE DIRECTORY`.

`load` accepts batches without end and prints the id of each once its storing was reported, `full` fills a small disk.
"""

import asyncio
import sys
from pathlib import Path

from app.domain.batch import Batch
from app.errors import NoSpace
from app.storage.ballast import BALLAST_BYTES, Ballast
from app.storage.base import Applied, CreateWorkspace
from app.storage.record_writer import RecordWriter
from app.storage.sql.storage import SqlStorage
from tests.support.records import ends, make_batch, make_workspace, starts, submit

FILLER_BYTES = 36_000_000
WAIT_SECONDS = 30


async def load(directory: Path) -> None:
    storage = SqlStorage(directory / "toolcrib.db")
    storage.migrate()
    writer = RecordWriter(storage)
    writer.start()
    workspace = make_workspace()
    await writer.write(CreateWorkspace(workspace))

    async def client() -> None:
        while True:
            batch = make_batch(workspace.id, calls=2)
            assert await writer.write(submit(batch)) == Applied()
            writer.submit(starts(batch))
            assert await writer.write(ends(batch, 3)) == Applied()
            print(batch.id, flush=True)  # noqa: T201 - the parent reads it

    await asyncio.gather(*[client() for _ in range(8)])


async def full(directory: Path) -> None:
    filler = directory / "filler"
    filler.write_bytes(b"f" * FILLER_BYTES)
    storage = SqlStorage(directory / "toolcrib.db")
    storage.migrate()
    writer = RecordWriter(storage, ballast=Ballast(directory / "ballast", BALLAST_BYTES))
    writer.start()
    workspace = make_workspace()
    await writer.write(CreateWorkspace(workspace))
    accepted: list[Batch] = []
    refused: Batch | None = None
    while refused is None:
        batch = make_batch(workspace.id, call_arguments=b'"' + b"a" * 800_000 + b'"')
        try:
            await writer.write(submit(batch), droppable=True)
        except NoSpace:
            refused = batch
        else:
            accepted.append(batch)
    assert writer.full
    assert storage.batch(refused.id) is None

    async with asyncio.timeout(WAIT_SECONDS):
        for batch in accepted:
            assert await writer.write(starts(batch)) == Applied()
            assert await writer.write(ends(batch, 2)) == Applied()
    assert writer.full, "what room there is belongs to the ends"
    for batch in accepted:
        assert [event.seq for event in storage.events(batch.id, after=0)] == [1, 2, 3, 4]

    filler.unlink()
    async with asyncio.timeout(WAIT_SECONDS):
        while writer.full:  # noqa: ASYNC110 - what is waited for sets no event
            await asyncio.sleep(0.02)
    assert await writer.write(submit(refused), droppable=True) == Applied()
    await writer.close()
    storage.close()
    print("accepted", len(accepted))  # noqa: T201 - the parent reads it


if __name__ == "__main__":
    asyncio.run({"load": load, "full": full}[sys.argv[1]](Path(sys.argv[2])))
