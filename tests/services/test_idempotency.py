"""Requests with one idempotency key, in one process and in two: one batch that runs once, one workspace."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from app.domain.abort import AbortSignal
from app.domain.batch import BatchStatus
from app.domain.idempotency import IdempotencyKey
from app.domain.ids import new_id
from app.domain.node import Process as RunningProcess
from app.domain.tool_call import ToolResult
from app.domain.workspace import WorkspaceOptions
from app.errors import Conflict, IdempotencyKeyReused, NoSpace, Overloaded, TooManyBatches, WorkspaceGone
from app.events.log import EventLog
from app.execution.backends.admission import Admission
from app.execution.backends.local import LocalBackend
from app.execution.finalizer import Finalizer
from app.execution.membership import Membership
from app.execution.runner import BatchRunner
from app.hooks.base import HookChain
from app.sandbox.file_pool import FilePool
from app.services.batches import BatchRequest, BatchService, CallRequest, Submitted
from app.services.workspace_roots import WorkspaceRoots
from app.services.workspaces import Created, WorkspaceRequest, WorkspaceService
from app.storage.base import CreateWorkspace, OperationalError, Storage
from app.storage.read_pool import ReadPool
from app.storage.record_writer import RecordWriter
from app.storage.sql.storage import SqlStorage
from tests.support.calls import ScriptedTool, answer
from tests.support.faulty_storage import FaultyStorage, Gate, fails, loses_reply
from tests.support.records import make_workspace
from tests.support.users import ACCOUNT, give

pytestmark = pytest.mark.anyio

KEY = IdempotencyKey("first-try", b"1" * 32)
OTHER_BODY = IdempotencyKey(KEY.value, b"2" * 32)
WAIT_SECONDS = 20
NODE = new_id("node")


@dataclass
class Process:
    """The services of one process; `ran` notes each execution of its tool."""

    storage: Storage
    records: RecordWriter
    batches: BatchService
    workspaces: WorkspaceService
    ran: list[str] = field(default_factory=list)

    async def submit(self, workspace_id: str, key: IdempotencyKey | None = KEY, owner: str = "env") -> Submitted:
        asked = BatchRequest((CallRequest("a", "note", {"n": "a"}),))
        return await self.batches.submit(workspace_id, asked, owner=owner, request_id="req-1", idempotency=key)

    async def create(self, key: IdempotencyKey | None = KEY, *, root: Path | None = None, **files: bytes) -> Created:
        asked = WorkspaceRequest(
            name=None,
            metadata={},
            options=WorkspaceOptions(),
            files=files,
            ttl_seconds=None,
            trusted=True,
            root=None if root is None else str(root),
        )
        return await self.workspaces.create(asked, owner="env", idempotency=key)


@asynccontextmanager
async def process(storage: Storage, data_dir: Path, admission: Admission | None = None) -> AsyncIterator[Process]:
    ran: list[str] = []

    async def note(args: dict[str, Any], _signal: AbortSignal, _update: Any) -> ToolResult:
        ran.append(args["n"])
        return answer("noted")

    reads, files = ReadPool(4), FilePool()
    backends: list[LocalBackend] = []
    log = EventLog(storage, reads, is_local=lambda batch_id: any(made.is_local(batch_id) for made in backends))
    records = RecordWriter(storage, on_commit=log.committed)
    records.start()
    finalizer = Finalizer(storage, reads, records)
    runner = BatchRunner(
        storage=storage,
        reads=reads,
        records=records,
        finalizer=finalizer,
        hooks=HookChain([]),
        tools=lambda _workspace, _url: {"note": ScriptedTool("note", note)},
    )
    backend = LocalBackend(runner, admission=admission)
    backends.append(backend)
    membership = Membership(storage, RunningProcess(new_id("proc"), NODE, "all", None), shared=False)
    batches = BatchService(
        storage=storage,
        reads=reads,
        records=records,
        log=log,
        backend=backend,
        finalizer=finalizer,
        membership=membership,
    )
    roots = WorkspaceRoots(data_dir, (data_dir.parent / "adoptable",), account=ACCOUNT)
    await asyncio.to_thread(roots.make_directories)
    workspaces = WorkspaceService(
        storage=storage,
        reads=reads,
        records=records,
        files=files,
        batches=batches,
        roots=roots,
        node_id=NODE,
    )
    try:
        async with asyncio.timeout(WAIT_SECONDS):
            yield Process(storage, records, batches, workspaces, ran)
            await batches.drain(1)
    finally:
        await records.drain(10)
        await records.close()
        files.close()
        reads.close()


@pytest.fixture
def data_dir(tmp_path: Path) -> Path:
    (tmp_path / "adoptable").mkdir()
    give(tmp_path / "adoptable")
    return tmp_path / "data"


@pytest.fixture
def faulty(sqlite_storage: SqlStorage) -> FaultyStorage:
    return FaultyStorage(sqlite_storage)


def roots(data_dir: Path) -> list[str]:
    return sorted(entry.name for entry in (data_dir / "workspaces").iterdir())


# -- batches ----------------------------------------------------------------------------------------------------------


async def test_where_there_is_room_for_one_batch_the_same_request_sent_many_times_at_once_gets_it(
    faulty: FaultyStorage, data_dir: Path
) -> None:
    async with process(faulty, data_dir, Admission(batches=1)) as service:
        workspace = (await service.create(None)).workspace
        gate = Gate()
        faulty.faults.append(gate)
        sent = [asyncio.ensure_future(service.submit(workspace.id)) for _ in range(20)]
        await asyncio.to_thread(gate.reached.wait, WAIT_SECONDS)
        with pytest.raises(TooManyBatches):
            await service.submit(workspace.id, None)
        gate.open.set()
        done = await asyncio.gather(*sent)
        assert len({submitted.batch.id for submitted in done}) == 1
        assert [submitted.attached for submitted in done].count(False) == 1
        await service.batches.get(done[0].batch.id, owner=None, wait=10)
        assert service.ran == ["a"]


async def test_a_hundred_submits_at_once_make_one_batch_that_runs_once(storage: SqlStorage, data_dir: Path) -> None:
    async with process(storage, data_dir) as service:
        workspace = (await service.create(None)).workspace
        done = await asyncio.gather(*(service.submit(workspace.id) for _ in range(100)))
        [batch] = {submitted.batch.id for submitted in done}
        assert [submitted.attached for submitted in done].count(False) == 1
        ended = await service.batches.get(batch, owner=None, wait=10)
        late = await service.submit(workspace.id)
        assert late == Submitted(ended, attached=True)
        assert await service.batches.attach(workspace.id, KEY, owner="env") == ended
        assert service.ran == ["a"]
        with pytest.raises(IdempotencyKeyReused, match="first-try"):
            await service.submit(workspace.id, OTHER_BODY)
        with pytest.raises(IdempotencyKeyReused, match="first-try"):
            await service.batches.attach(workspace.id, OTHER_BODY, owner="env")
        another = await service.submit(workspace.id, owner="another")
        assert (another.attached, another.batch.id == batch) == (False, False)
    page = storage.batches(workspace.id, status=None, before=None, limit=9)
    assert [item.id for item in page.items] == [another.batch.id, batch]


async def test_requests_with_two_bodies_at_once_make_the_batch_of_one_of_them(
    storage: SqlStorage, data_dir: Path
) -> None:
    async with process(storage, data_dir) as service:
        workspace = (await service.create(None)).workspace
        keys = [KEY, OTHER_BODY] * 10
        done = await asyncio.gather(*(service.submit(workspace.id, key) for key in keys), return_exceptions=True)
        assert [type(answer) for answer in done] == [Submitted, IdempotencyKeyReused] * 10
        assert len({answer.batch.id for answer in done if isinstance(answer, Submitted)}) == 1


async def test_a_submit_that_is_refused_leaves_no_key(faulty: FaultyStorage, data_dir: Path) -> None:
    async with process(faulty, data_dir) as service:
        workspace = (await service.create(None)).workspace
        service.batches.draining = True
        with pytest.raises(Overloaded):
            await service.submit(workspace.id)
        service.batches.draining = False
        faulty.faults.append(fails(OperationalError("no room", "full")))
        with pytest.raises(NoSpace):
            await service.submit(workspace.id)
        assert await service.batches.attach(workspace.id, KEY, owner="env") is None
        while service.records.full:  # noqa: ASYNC110 - what is waited for sets no event
            await asyncio.sleep(0.02)
        assert not (await service.submit(workspace.id, OTHER_BODY)).attached
        with pytest.raises(IdempotencyKeyReused):
            await service.submit(workspace.id, KEY)


async def test_a_submit_whose_reply_was_lost_is_not_taken_for_a_repetition(
    faulty: FaultyStorage, data_dir: Path
) -> None:
    async with process(faulty, data_dir) as service:
        workspace = (await service.create(None)).workspace
        faulty.faults.append(loses_reply)
        first = await service.submit(workspace.id)
        second = await service.submit(workspace.id)
        assert (first.attached, second.attached) == (False, True)
        assert second.batch.id == first.batch.id
        ended = await service.batches.get(first.batch.id, owner=None, wait=10)
        assert ended.status is BatchStatus.COMPLETED
        assert service.ran == ["a"]


async def test_a_batch_is_attached_to_when_its_workspace_is_gone(storage: SqlStorage, data_dir: Path) -> None:
    async with process(storage, data_dir) as service:
        workspace = (await service.create(None)).workspace
        first = await service.submit(workspace.id)
        await service.workspaces.delete(workspace.id, owner=None)
        again = await service.submit(workspace.id)
        assert (again.attached, again.batch.id) == (True, first.batch.id)
        with pytest.raises(WorkspaceGone):
            await service.submit(workspace.id, IdempotencyKey("another", KEY.digest))


# -- workspaces -------------------------------------------------------------------------------------------------------


async def test_many_creates_at_once_make_one_workspace(storage: SqlStorage, data_dir: Path) -> None:
    async with process(storage, data_dir) as service:
        done = await asyncio.gather(*(service.create(**{"a.txt": b"one"}) for _ in range(30)))
        [made] = {created.workspace.id for created in done}
        assert [created.attached for created in done].count(False) == 1
        assert roots(data_dir) == [made]
        assert (data_dir / "workspaces" / made / "a.txt").read_bytes() == b"one"
        with pytest.raises(IdempotencyKeyReused):
            await service.create(OTHER_BODY)
        await service.workspaces.delete(made, owner=None)
        with pytest.raises(WorkspaceGone):
            await service.create()
        assert service.workspaces._creating == {}


async def test_creates_at_once_that_adopt_a_directory_do_not_stumble_over_their_own_files(
    storage: SqlStorage, data_dir: Path
) -> None:
    root = data_dir.parent / "adoptable"
    async with process(storage, data_dir) as service:
        done = await asyncio.gather(*(service.create(root=root, **{"a.txt": b"one"}) for _ in range(10)))
        assert len({created.workspace.id for created in done}) == 1
        assert (root / "a.txt").read_bytes() == b"one"


async def test_a_create_that_loses_to_another_process_removes_what_it_laid_in(
    faulty: FaultyStorage, data_dir: Path, sqlite_storage: SqlStorage
) -> None:
    gate = Gate()
    async with process(faulty, data_dir) as slow, process(sqlite_storage, data_dir) as quick:
        faulty.faults.append(gate)
        losing = asyncio.ensure_future(slow.create(**{"a.txt": b"one"}))
        await asyncio.to_thread(gate.reached.wait, WAIT_SECONDS)
        assert len(roots(data_dir)) == 1
        won = await quick.create(**{"a.txt": b"one"})
        assert len(roots(data_dir)) == 2
        gate.open.set()
        lost = await losing
        assert (won.attached, lost.attached) == (False, True)
        assert lost.workspace == won.workspace
        assert roots(data_dir) == [won.workspace.id]


async def test_a_create_with_another_body_that_loses_removes_what_it_laid_in(
    faulty: FaultyStorage, data_dir: Path, sqlite_storage: SqlStorage
) -> None:
    gate = Gate()
    async with process(faulty, data_dir) as slow, process(sqlite_storage, data_dir) as quick:
        faulty.faults.append(gate)
        losing = asyncio.ensure_future(slow.create(OTHER_BODY))
        await asyncio.to_thread(gate.reached.wait, WAIT_SECONDS)
        won = await quick.create()
        gate.open.set()
        with pytest.raises(IdempotencyKeyReused):
            await losing
        assert roots(data_dir) == [won.workspace.id]


async def test_a_create_that_fails_leaves_no_key_and_lets_the_next_one_try(
    sqlite_storage: SqlStorage, data_dir: Path
) -> None:
    root = data_dir.parent / "adoptable"
    taken = root / "a.txt"
    taken.write_text("there before")
    async with process(sqlite_storage, data_dir) as service:
        failed = await asyncio.gather(
            *(service.create(root=root, **{"a.txt": b"one"}) for _ in range(3)), return_exceptions=True
        )
        assert [type(error) for error in failed] == [Conflict] * 3
        taken.unlink()
        assert not (await service.create(root=root, **{"a.txt": b"one"})).attached
        assert (await service.create(root=root, **{"a.txt": b"one"})).attached


async def test_a_workspace_of_another_owner_under_the_same_key_is_not_attached_to(
    sqlite_storage: SqlStorage, data_dir: Path
) -> None:
    sqlite_storage.apply([CreateWorkspace(make_workspace(owner="another"), KEY)])
    async with process(sqlite_storage, data_dir) as service:
        assert not (await service.create()).attached
