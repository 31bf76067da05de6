"""The use cases on files without HTTP: what is left when they are called off, and when the service stops."""

import asyncio
import os
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from app.api.dependencies import Services
from app.domain.abort import Aborted
from app.domain.workspace import Workspace, WorkspaceOptions
from app.errors import Conflict, ErrorCode, InvalidPath, NotFound, PreconditionFailed, ToolError, WorkspaceGone
from app.main import running
from app.sandbox.archive_reader import ArchiveFormat
from app.sandbox.files import etag_of
from app.services.file_access import problem
from app.services.files import Condition, EntityTags, NotStored, Part, Stored
from app.services.workspaces import WorkspaceRequest
from app.settings import Settings
from tests.support.archives import tar_of
from tests.support.server import KEY

pytestmark = pytest.mark.anyio
MB = 1_000_000
WAIT_SECONDS = 10


@pytest.fixture
async def services(tmp_path: Path) -> AsyncIterator[Services]:
    async with running(Settings(data_dir=tmp_path / "data", api_key=KEY)) as built:  # type: ignore[arg-type] - coerced
        yield built


@pytest.fixture
async def workspace(services: Services) -> Workspace:
    request = WorkspaceRequest(
        name=None,
        metadata={},
        options=WorkspaceOptions(),
        files={"a": b"old"},
        ttl_seconds=None,
        trusted=True,
        root=None,
    )
    return (await services.workspaces.create(request, owner="env")).workspace


async def body(*parts: bytes) -> AsyncIterator[bytes]:
    for part in parts:
        yield part


def names(workspace: Workspace) -> list[str]:
    return sorted(str(path.relative_to(workspace.root)) for path in Path(workspace.root).rglob("*"))


class Stalled:
    """A body of which one MB comes and then nothing; `waiting` is set when that is on its way to the disk."""

    def __init__(self) -> None:
        self.waiting = asyncio.Event()
        self.go_on = asyncio.Event()

    async def __aiter__(self) -> AsyncIterator[bytes]:
        yield bytes(2 * MB)
        self.waiting.set()
        await self.go_on.wait()
        yield b"end"


async def test_a_task_that_is_cancelled_while_the_body_arrives_leaves_the_old_file(
    services: Services, workspace: Workspace
) -> None:
    stalled = Stalled()
    task = asyncio.create_task(services.files.put(workspace.id, "new/dir/a", stalled.__aiter__(), owner=None))
    async with asyncio.timeout(WAIT_SECONDS):
        await stalled.waiting.wait()
        assert len(names(workspace)) == 2
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
    assert names(workspace) == ["a"]


async def test_a_body_that_fails_leaves_the_old_file(services: Services, workspace: Workspace) -> None:
    async def broken() -> AsyncIterator[bytes]:
        yield bytes(2 * MB)
        raise ConnectionResetError

    with pytest.raises(ConnectionResetError):
        await services.files.put(workspace.id, "a", broken(), owner=None)
    assert names(workspace) == ["a"]
    assert (Path(workspace.root) / "a").read_bytes() == b"old"


async def test_an_upload_on_its_way_holds_up_no_other_change_of_the_file(
    services: Services, workspace: Workspace
) -> None:
    stalled = Stalled()
    async with asyncio.timeout(WAIT_SECONDS), asyncio.TaskGroup() as group:
        slow = group.create_task(services.files.put(workspace.id, "a", stalled.__aiter__(), owner=None))
        await stalled.waiting.wait()
        quick = await services.files.put(workspace.id, "a", body(b"quick"), owner=None)
        assert quick == Stored("a", 5, etag_of(b"quick"), created=False)
        assert (Path(workspace.root) / "a").read_bytes() == b"quick"
        stalled.go_on.set()
    assert (await slow).bytes == 2 * MB + 3
    assert (Path(workspace.root) / "a").stat().st_size == 2 * MB + 3


async def test_a_condition_is_looked_at_again_right_before_the_change(services: Services, workspace: Workspace) -> None:
    condition = Condition(match=EntityTags((etag_of(b"old"),)))
    stalled = Stalled()
    async with asyncio.timeout(WAIT_SECONDS):
        task = asyncio.create_task(
            services.files.put(workspace.id, "a", stalled.__aiter__(), condition=condition, owner=None)
        )
        await stalled.waiting.wait()
        await services.files.delete(workspace.id, "a", owner=None)
        stalled.go_on.set()
        with pytest.raises(PreconditionFailed) as raised:
            await task
    assert raised.value.extra == {"currentEtag": None}
    assert names(workspace) == []


async def test_a_spool_that_is_swept_away_is_told_and_changes_nothing(services: Services, workspace: Workspace) -> None:
    stalled = Stalled()
    async with asyncio.timeout(WAIT_SECONDS):
        task = asyncio.create_task(services.files.put(workspace.id, "a", stalled.__aiter__(), owner=None))
        await stalled.waiting.wait()
        (temporary,) = (name for name in names(workspace) if name.startswith(".toolcrib-tmp-"))
        (Path(workspace.root) / temporary).unlink()
        stalled.go_on.set()
        with pytest.raises(Conflict, match="send it again"):
            await task
    assert (Path(workspace.root) / "a").read_bytes() == b"old"


async def test_a_workspace_deleted_under_an_upload_is_gone(services: Services, workspace: Workspace) -> None:
    stalled = Stalled()
    async with asyncio.timeout(WAIT_SECONDS):
        task = asyncio.create_task(services.files.put(workspace.id, "a", stalled.__aiter__(), owner=None))
        await stalled.waiting.wait()
        await services.workspaces.delete(workspace.id, owner=None)
        stalled.go_on.set()
        with pytest.raises(WorkspaceGone):
            await task
    assert names(workspace) == []


async def test_each_of_several_parts_is_told_of_and_what_was_not_read_is_no_matter(
    services: Services, workspace: Workspace
) -> None:
    async def parts() -> AsyncIterator[Part]:
        for path in ("b", "../c", None, "a/x", "d"):
            yield Part(path, body(b"x", b"y"))

    results = await services.files.put_many(workspace.id, parts(), owner=None)
    assert [result.code if isinstance(result, NotStored) else result.created for result in results] == [
        True,
        "path_outside_workspace",
        "invalid_arguments",
        "not_a_directory",
        True,
    ]
    assert names(workspace) == ["a", "b", "d"]


def descriptors_below(root: str) -> list[str]:
    found = []
    for fd in os.listdir("/proc/self/fd"):  # noqa: PTH208 - numbers
        try:
            found.append(os.readlink(f"/proc/self/fd/{fd}"))  # noqa: PTH115 - as above
        except OSError:
            continue
    return [path for path in found if path.startswith(root)]


async def test_a_download_and_an_archive_that_are_closed_early_give_everything_back(
    services: Services, workspace: Workspace
) -> None:
    await services.files.put(workspace.id, "large", body(bytes(3 * MB)), owner=None)
    download = await services.files.open(workspace.id, "large", owner=None)
    chunks = download.chunks(0, download.bytes)
    assert len(await anext(chunks)) == 262_144
    packing = await services.archives.pack(workspace.id, ".", ArchiveFormat.TAR, [], owner=None)
    pieces = packing.chunks()
    await anext(pieces)
    assert descriptors_below(workspace.root)
    await chunks.aclose()
    await pieces.aclose()
    download.close()
    packing.close()
    packing.close()
    assert descriptors_below(workspace.root) == []


async def test_failures_hold_nothing_open(services: Services, workspace: Workspace) -> None:
    os.mkfifo(Path(workspace.root) / "pipe")
    for _ in range(20):
        for path, kind in (("gone", NotFound), ("..", InvalidPath), ("pipe", Conflict), ("a/b", NotFound)):
            with pytest.raises(kind):
                await services.files.open(workspace.id, path, owner=None)
        for path in ("pipe", "..", "a/b"):
            with pytest.raises((Conflict, InvalidPath)):
                await services.files.put(workspace.id, path, body(b"x"), owner=None)
        with pytest.raises(Conflict):
            await services.archives.pack(workspace.id, "a", ArchiveFormat.ZIP, [], owner=None)
    assert descriptors_below(workspace.root) == []
    assert names(workspace) == ["a", "pipe"]


async def test_nobody_waits_for_an_archive_any_more_and_it_stops_between_two_files(
    services: Services, workspace: Workspace
) -> None:
    asked = 0

    async def gone() -> bool:
        nonlocal asked
        asked += 1
        return asked > 3

    data = tar_of(*((f"f{index}", b"x") for index in range(9)))
    with pytest.raises(Aborted):
        await services.archives.unpack(workspace.id, ".", ArchiveFormat.TAR, body(data), gone=gone, owner=None)
    assert names(workspace) == ["a", "f0", "f1", "f2"]
    assert descriptors_below(workspace.root) == []


@pytest.mark.parametrize("code", ErrorCode)
def test_every_code_of_a_tool_is_some_problem_of_a_request(code: ErrorCode) -> None:
    for changes in (False, True):
        answer = problem(ToolError(code, "a sentence"), changes=changes)
        assert answer.detail == "a sentence"
        assert answer.extra == {"errors": [{"parameter": "path", "code": code.value, "message": "a sentence"}]}
        assert answer.code != "internal"
