"""Changes of one file wait for each other in arrival order; other files go ahead; nothing stays locked."""

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest

from app.domain.abort import Aborted, AbortReason, AbortSignal
from app.errors import ErrorCode, ToolError
from app.sandbox import file_pool
from app.sandbox.containment import Root, Target
from app.sandbox.file_locks import FileLocks
from app.sandbox.file_pool import FilePool
from app.sandbox.files import ParentVanished, replace_file
from app.tools.file_mutation_queue import FileMutationQueue

pytestmark = pytest.mark.anyio

WAIT = 10.0


class Workspace:
    """A directory with a pool and a queue, and a way to start changes in it."""

    def __init__(self, root: Path, locks: FileLocks | None = None) -> None:
        self.root = root
        self.files = FilePool()
        self.queue = FileMutationQueue(locks)
        self.log: list[str] = []

    def resolver(self, path: str) -> Callable[[], Target]:
        def resolve() -> Target:
            with Root.open(str(self.root)) as root:
                return root.target(root.relative(path), create_parents=True)

        return resolve

    def start(self, path: str, work: Callable[[Target], Any], signal: AbortSignal | None = None) -> asyncio.Task[Any]:
        return asyncio.ensure_future(
            self.queue.run(self.files, str(self.root), self.resolver(path), work, signal or AbortSignal())
        )

    def note(self, name: str) -> Callable[[Target], None]:
        return lambda target: self.log.append(name)

    def held(self, name: str) -> "Held":
        return Held(self.log, name)


class Held:
    """Work that says when it has begun and ends when it is let go."""

    def __init__(self, log: list[str], name: str) -> None:
        self.log = log
        self.name = name
        self.begun = threading.Event()
        self.open = threading.Event()
        self.problem: Exception | None = None

    def __call__(self, target: Target) -> str:
        self.begun.set()
        assert self.open.wait(WAIT)
        self.log.append(self.name)
        if self.problem is not None:
            raise self.problem
        return self.name

    async def entered(self) -> None:
        await until(self.begun.is_set)


async def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + WAIT
    while not condition():
        assert time.monotonic() < deadline
        await asyncio.sleep(0.001)


def open_fds() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


@pytest.fixture(params=["one process", "one of several"])
async def ws(tmp_path: Path, request: pytest.FixtureRequest) -> AsyncIterator[Workspace]:
    root = tmp_path / "ws"
    root.mkdir()
    locks = None if request.param == "one process" else FileLocks(tmp_path / "file-locks")
    made = Workspace(root, locks)
    yield made
    assert len(made.queue) == 0
    made.files.close()
    if locks is not None:
        assert len(locks) == 0
        locks.close()


async def test_changes_of_one_file_run_in_the_order_in_which_they_came(ws: Workspace) -> None:
    first = ws.held("a")
    calls = [ws.start("f.txt", first)]
    await first.entered()
    calls += [ws.start("f.txt", ws.note(name)) for name in "bcdefghij"]
    await until(lambda: len(ws.queue) == 1)
    first.open.set()
    await asyncio.wait_for(asyncio.gather(*calls), WAIT)
    assert ws.log == list("abcdefghij")


async def test_arrival_decides_even_when_an_earlier_path_takes_longer_to_resolve(ws: Workspace) -> None:
    resolving = threading.Event()

    def slow() -> Target:
        assert resolving.wait(WAIT)
        return ws.resolver("f.txt")()

    calls = [
        asyncio.ensure_future(ws.queue.run(ws.files, str(ws.root), slow, ws.note("a"), AbortSignal())),
        ws.start("f.txt", ws.note("b")),
        ws.start("f.txt", ws.note("c")),
    ]
    await asyncio.sleep(0.01)
    assert ws.log == []
    resolving.set()
    await asyncio.wait_for(asyncio.gather(*calls), WAIT)
    assert ws.log == ["a", "b", "c"]


async def test_a_link_and_the_file_it_names_share_a_line(ws: Workspace) -> None:
    (ws.root / "real").mkdir()
    (ws.root / "real/n.txt").write_bytes(b"")
    (ws.root / "alias.txt").symlink_to("real/n.txt")
    (ws.root / "dir").symlink_to("real")
    first = ws.held("real")
    calls = [ws.start("real/n.txt", first)]
    await first.entered()
    others = ("alias.txt", "dir/n.txt", "real/../dir/n.txt", f"{ws.root}/alias.txt", "real/N.TXT")
    calls += [ws.start(path, ws.note(path)) for path in others]
    await asyncio.sleep(0.02)
    assert ws.log == []
    first.open.set()
    await asyncio.wait_for(asyncio.gather(*calls), WAIT)
    assert ws.log == ["real", *others]


async def test_other_files_go_ahead(ws: Workspace) -> None:
    first = ws.held("a")
    waiting = [ws.start("a.txt", first)]
    await first.entered()
    waiting.append(ws.start("a.txt", ws.note("again")))
    await asyncio.wait_for(ws.start("b.txt", ws.note("b")), WAIT)
    await asyncio.wait_for(ws.start("sub/a.txt", ws.note("sub")), WAIT)
    assert ws.log == ["b", "sub"]
    first.open.set()
    await asyncio.gather(*waiting)


async def test_second_change_goes_ahead_after_a_failed_first(ws: Workspace) -> None:
    first = ws.held("a")
    first.problem = ToolError(ErrorCode.NO_SPACE, "full")
    calls = [ws.start("f.txt", first)]
    await first.entered()
    calls.append(ws.start("f.txt", ws.note("b")))
    first.open.set()
    results = await asyncio.wait_for(asyncio.gather(*calls, return_exceptions=True), WAIT)
    assert results == [first.problem, None]
    assert ws.log == ["a", "b"]


async def test_a_path_that_cannot_be_resolved_holds_nobody_up(ws: Workspace) -> None:
    calls = [ws.start("../out", ws.note("a")), ws.start("f.txt", ws.note("b"))]
    results = await asyncio.wait_for(asyncio.gather(*calls, return_exceptions=True), WAIT)
    assert isinstance(results[0], ToolError)
    assert results[0].code is ErrorCode.PATH_OUTSIDE_WORKSPACE
    assert ws.log == ["b"]


@pytest.mark.parametrize("how", ["abort", "cancel"])
async def test_who_stops_waiting_leaves_the_line_and_nothing_of_him_runs(ws: Workspace, how: str) -> None:
    before = open_fds()
    first = ws.held("a")
    signal = AbortSignal()
    calls = [ws.start("new/dir/f.txt", first)]
    await first.entered()
    leaving = ws.start("new/dir/f.txt", ws.note("never"), signal)
    calls.append(ws.start("new/dir/f.txt", ws.note("c")))
    await asyncio.sleep(0.02)
    if how == "abort":
        signal.abort(AbortReason.TIMEOUT)
    else:
        leaving.cancel()
    with pytest.raises((Aborted, asyncio.CancelledError)):
        await asyncio.wait_for(leaving, WAIT)
    first.open.set()
    await asyncio.wait_for(asyncio.gather(*calls), WAIT)
    assert ws.log == ["a", "c"]
    assert open_fds() == before


async def test_parents_made_for_a_change_that_fails_are_taken_back(ws: Workspace) -> None:
    def fail(target: Target) -> None:
        assert (ws.root / "x/y/z").is_dir()
        raise ToolError(ErrorCode.NO_SPACE, "full")

    (ws.root / "x").mkdir()
    with pytest.raises(ToolError):
        await ws.start("x/y/z/f.txt", fail)
    assert list(ws.root.rglob("*")) == [ws.root / "x"]


async def test_a_change_stopped_before_its_thread_takes_its_new_parents_back(tmp_path: Path) -> None:
    root = tmp_path / "ws"
    root.mkdir()
    ws = Workspace(root)
    ws.files = FilePool(threads=2, per_workspace=1)
    gate = threading.Event()
    signal = AbortSignal()

    def resolve() -> Target:
        target = ws.resolver("new/dir/f.txt")()
        busy.append(asyncio.run_coroutine_threadsafe(occupy(), loop))
        return target

    async def occupy() -> None:
        await ws.files.run(gate.wait, WAIT, signal=AbortSignal(), workspace=str(root))

    loop = asyncio.get_running_loop()
    busy: list[Any] = []
    call = asyncio.ensure_future(ws.queue.run(ws.files, str(root), resolve, ws.note("never"), signal))
    await until(lambda: (root / "new/dir").is_dir() and bool(busy))
    await until(lambda: ws.files.running == 1)
    signal.abort(AbortReason.CANCELLED)
    await asyncio.sleep(0.01)
    gate.set()
    with pytest.raises(Aborted):
        await asyncio.wait_for(call, WAIT)
    assert ws.log == []
    assert list(root.iterdir()) == []
    assert len(ws.queue) == 0
    ws.files.close()


async def test_a_directory_that_a_failed_change_took_away_is_made_again_for_the_next(ws: Workspace) -> None:
    def write(target: Target) -> str:
        replace_file(target, b"second", commit=lambda: None)
        return "written"

    first = ws.held("a")
    first.problem = ToolError(ErrorCode.NO_SPACE, "full")
    calls = [ws.start("d/f.txt", first)]
    await first.entered()
    calls += [ws.start("d/f.txt", write), ws.start("d/g.txt", ws.note("other"))]
    await calls[2]
    first.open.set()
    results = await asyncio.wait_for(asyncio.gather(*calls, return_exceptions=True), WAIT)
    assert results == [first.problem, "written", None]
    assert (ws.root / "d/f.txt").read_bytes() == b"second"


async def test_a_directory_that_vanishes_every_time_ends_in_an_error(ws: Workspace) -> None:
    def vanish(target: Target) -> None:
        ws.log.append("tried")
        raise ParentVanished

    with pytest.raises(ToolError) as caught:
        await asyncio.wait_for(ws.start("d/f.txt", vanish), WAIT)
    assert caught.value.code is ErrorCode.IO_ERROR
    assert 1 < len(ws.log) < 100


async def test_an_abandoned_thread_keeps_the_file_until_it_returns(
    ws: Workspace, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(file_pool, "ABANDON_AFTER_SECONDS", 0.05)
    before = open_fds()
    signal = AbortSignal()
    hanging = ws.held("late")
    first = ws.start("f.txt", hanging, signal)
    await hanging.entered()
    second = ws.start("f.txt", ws.note("b"))
    signal.abort(AbortReason.CANCELLED)
    with pytest.raises(Aborted):
        await asyncio.wait_for(first, WAIT)
    await asyncio.sleep(0.02)
    assert ws.log == []
    assert not second.done()
    hanging.open.set()
    await asyncio.wait_for(second, WAIT)
    assert ws.log == ["late", "b"]
    assert open_fds() == before


async def test_an_abandoned_resolution_gives_its_place_and_its_descriptors_back(
    ws: Workspace, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(file_pool, "ABANDON_AFTER_SECONDS", 0.05)
    before = open_fds()
    gate = threading.Event()
    begun = threading.Event()
    signal = AbortSignal()

    def hang() -> Target:
        begun.set()
        assert gate.wait(WAIT)
        return ws.resolver("new/f.txt")()

    call = asyncio.ensure_future(ws.queue.run(ws.files, str(ws.root), hang, ws.note("never"), signal))
    await until(begun.is_set)
    behind = ws.start("f.txt", ws.note("b"))
    signal.abort(AbortReason.CANCELLED)
    with pytest.raises(Aborted):
        await asyncio.wait_for(call, WAIT)
    gate.set()
    await asyncio.wait_for(behind, WAIT)
    await until(lambda: ws.files.running == 0)
    assert ws.log == ["b"]
    assert list(ws.root.iterdir()) == []
    assert open_fds() == before


async def test_the_result_of_a_change_past_its_commit_is_kept(ws: Workspace) -> None:
    signal = AbortSignal()
    begun = threading.Event()
    gate = threading.Event()

    def change(target: Target) -> str:
        signal.commit()
        begun.set()
        assert gate.wait(WAIT)
        return "done"

    call = ws.start("f.txt", change, signal)
    await until(begun.is_set)
    signal.abort(AbortReason.CANCELLED)
    gate.set()
    assert await asyncio.wait_for(call, WAIT) == "done"


async def test_hundreds_of_changes_of_few_files_are_never_two_at_once_and_leave_no_line_behind(ws: Workspace) -> None:
    before = open_fds()
    inside: dict[str, int] = {}
    problems: list[str] = []

    def work(target: Target) -> None:
        key = target.relative_path
        if inside.get(key):
            problems.append(key)
        inside[key] = 1
        time.sleep(0.0002)
        inside[key] = 0

    signals = [AbortSignal() for _ in range(300)]
    calls = [ws.start(f"d{number % 5}/f", work, signal) for number, signal in enumerate(signals)]
    for number, signal in enumerate(signals):
        if number % 7 == 0:
            await asyncio.sleep(0)
            signal.abort(AbortReason.CANCELLED)
        if number % 11 == 0:
            calls[number].cancel()
    await asyncio.wait_for(asyncio.gather(*calls, return_exceptions=True), 30)
    await until(lambda: ws.files.running == 0)
    assert problems == []
    assert len(ws.queue) == 0
    assert open_fds() == before


def test_one_queue_serves_one_event_loop_after_another(tmp_path: Path) -> None:
    ws = Workspace(tmp_path)

    async def work() -> None:
        await asyncio.gather(*(ws.start("f.txt", ws.note(name)) for name in "abc"))

    asyncio.run(work())
    asyncio.run(work())
    assert ws.log == list("abcabc")
    ws.files.close()
