"""Changes of one file wait for each other also when they are made in different processes; other files go ahead."""

import asyncio
import time
from contextlib import ExitStack
from itertools import pairwise
from pathlib import Path

import pytest

from app.domain.abort import Aborted, AbortReason, AbortSignal
from app.sandbox.containment import Root, Target
from app.sandbox.file_locks import FileLocks
from app.sandbox.file_pool import FilePool
from app.tools.file_mutation_queue import FileMutationQueue
from tests.support.file_changes import EDITS, SECONDS, file_changer

pytestmark = pytest.mark.anyio

WAIT_SECONDS = 20.0


class Here:
    """The queue of this process, next to others on the same directory."""

    def __init__(self, tmp_path: Path) -> None:
        self.root = tmp_path / "ws"
        self.root.mkdir()
        (self.root / "f.txt").write_text("end\n")
        self.lock_file = tmp_path / "file-locks"
        self.locks = FileLocks(self.lock_file)
        self.queue = FileMutationQueue(self.locks)
        self.files = FilePool()
        self.log: list[str] = []

    def start(self, path: str, name: str, signal: AbortSignal | None = None) -> asyncio.Task[None]:
        def resolve() -> Target:
            with Root.open(str(self.root)) as root:
                return root.target(root.relative(path), create_parents=True)

        change = self.queue.run(
            self.files, str(self.root), resolve, lambda _target: self.log.append(name), signal or AbortSignal()
        )
        return asyncio.ensure_future(change)

    def close(self) -> None:
        assert len(self.queue) == len(self.locks) == 0
        self.files.close()
        self.locks.close()


@pytest.fixture
def here(tmp_path: Path) -> Here:
    return Here(tmp_path)


async def test_edits_of_one_file_by_four_processes_take_turns_and_lose_none(here: Here) -> None:
    names = ["a", "b", "c", "d"]
    with ExitStack() as stack:
        changers = [
            stack.enter_context(file_changer("edit", here.root, here.lock_file, "f.txt", name)) for name in names
        ]
        for changer in changers:
            assert changer.stdin is not None
            changer.stdin.write("go\n")
            changer.stdin.flush()
        assert [changer.wait(SECONDS) for changer in changers] == [0] * len(names)
    lines = (here.root / "f.txt").read_text().splitlines()
    assert lines.pop() == "end"
    for name in names:
        assert [line for line in lines if line[0] == name] == [f"{name} {number}" for number in range(EDITS)]
    assert len(lines) == EDITS * len(names)
    # They took turns: none kept the others out until it was through.
    assert sum(one[0] != other[0] for one, other in pairwise(lines)) >= EDITS
    here.close()


async def test_a_file_that_another_process_changes_waits_and_others_go_ahead_in_their_order(here: Here) -> None:
    with file_changer("hold", here.root, here.lock_file, "f.txt") as holder:
        waiting = [here.start("f.txt", name) for name in "abc"]
        await asyncio.wait_for(here.start("g.txt", "other file"), WAIT_SECONDS)
        await asyncio.wait_for(here.start("new/f.txt", "other directory"), WAIT_SECONDS)
        # Longer than the longest pause between two looks.
        await asyncio.wait(waiting, timeout=0.3)
        assert here.log == ["other file", "other directory"]
        assert holder.stdin is not None
        holder.stdin.close()
        await asyncio.wait_for(asyncio.gather(*waiting), WAIT_SECONDS)
    assert here.log[2:] == ["a", "b", "c"]
    here.close()


async def test_a_process_that_is_killed_holds_nothing_any_more(here: Here) -> None:
    with file_changer("hold", here.root, here.lock_file, "f.txt") as holder:
        waiting = here.start("f.txt", "a")
        await asyncio.wait([waiting], timeout=0.05)
        assert not waiting.done()
        holder.kill()
        await asyncio.wait_for(waiting, WAIT_SECONDS)
    assert here.log == ["a"]
    here.close()


@pytest.mark.parametrize("how", ["abort", "cancel"])
async def test_who_stops_waiting_for_another_process_changes_nothing_and_holds_nothing(here: Here, how: str) -> None:
    with file_changer("hold", here.root, here.lock_file, "F.txt") as holder:
        signal = AbortSignal()
        leaving, staying = here.start("f.txt", "never", signal), here.start("f.txt", "b")
        await asyncio.wait([leaving, staying], timeout=0.05)
        begun = time.monotonic()
        if how == "abort":
            signal.abort(AbortReason.TIMEOUT)
        else:
            leaving.cancel()
        with pytest.raises((Aborted, asyncio.CancelledError)):
            await asyncio.wait_for(leaving, WAIT_SECONDS)
        assert time.monotonic() - begun < 5
        assert not staying.done()
        assert holder.stdin is not None
        holder.stdin.close()
        await asyncio.wait_for(staying, WAIT_SECONDS)
    assert here.log == ["b"]
    here.close()
