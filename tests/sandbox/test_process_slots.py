"""Slots for processes: how many at once, in which order, and none lost whatever becomes of who waits."""

import asyncio
from collections.abc import Callable
from contextlib import asynccontextmanager

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from app.domain.abort import Aborted, AbortReason, AbortSignal
from app.sandbox.process_slots import ProcessSlots, SlotUse
from tests.support.processes import until

pytestmark = pytest.mark.anyio


class Runs:
    """Processes that hold a slot until they are told to end."""

    def __init__(self, slots: ProcessSlots) -> None:
        self.slots = slots
        self.started: list[str] = []
        self.ends: dict[str, asyncio.Event] = {}
        self.tasks: dict[str, asyncio.Task[None]] = {}
        self.signals: dict[str, AbortSignal] = {}

    def add(self, name: str, on_long_wait: Callable[[], None] | None = None) -> None:
        """Let `name` ask for a slot; its workspace is its first letter."""
        self.ends[name] = asyncio.Event()
        self.signals[name] = AbortSignal()
        self.tasks[name] = asyncio.ensure_future(self._run(name, on_long_wait))

    async def _run(self, name: str, on_long_wait: Callable[[], None] | None) -> None:
        taken = self.slots.taken(
            name[0], self.signals[name], owner=name[0], on_long_wait=on_long_wait, long_wait_seconds=0.001
        )
        async with taken:
            self.started.append(name)
            await self.ends[name].wait()

    async def end(self, name: str) -> None:
        self.ends[name].set()
        await self.tasks[name]
        await settle()

    async def end_all(self) -> None:
        for end in self.ends.values():
            end.set()
        async with asyncio.timeout(30):
            await asyncio.gather(*self.tasks.values(), return_exceptions=True)


async def settle() -> None:
    """Let everything happen that can happen without anything from outside."""
    for _ in range(20):
        await asyncio.sleep(0)


@asynccontextmanager
async def running(*names: str, limit: int, per_workspace: int):
    runs = Runs(ProcessSlots(limit, per_workspace))
    for name in names:
        runs.add(name)
    await settle()
    yield runs
    await runs.end_all()
    assert runs.slots.use == SlotUse(0, 0)
    assert not runs.slots._running
    assert not runs.slots._owners


async def test_another_workspace_comes_next_however_many_wait_in_the_first() -> None:
    many = [f"a{number}" for number in range(50)]
    async with running(*many, "b", limit=2, per_workspace=2) as runs:
        assert runs.started == ["a0", "a1"]
        assert runs.slots.use == SlotUse(2, 49)
        assert (runs.slots.use_of("a"), runs.slots.use_of("b")) == (SlotUse(2, 48), SlotUse(0, 1))
        await runs.end("a0")
        assert runs.started[2:] == ["b"]
        await runs.end("a1")
        assert runs.started[3:] == ["a2"]


async def test_workspaces_take_turns_and_each_keeps_its_order() -> None:
    async with running("x", "a0", "a1", "a2", "b0", "b1", "c0", limit=1, per_workspace=1) as runs:
        order = ["x", "a0", "b0", "c0", "a1", "b1", "a2"]
        for count, name in enumerate(order, start=1):
            assert runs.started == order[:count]
            await runs.end(name)


async def test_a_workspace_at_its_limit_keeps_no_other_waiting() -> None:
    async with running("a0", "a1", "a2", "b0", limit=3, per_workspace=2) as runs:
        assert runs.started == ["a0", "a1", "b0"]
        await runs.end("b0")
        assert runs.started == ["a0", "a1", "b0"]  # a2 still has to wait for its own
        await runs.end("a1")
        assert runs.started[-1] == "a2"


async def test_who_is_stopped_while_it_waits_never_runs_and_takes_no_turn() -> None:
    async with running("a0", "a1", "a2", "a3", limit=1, per_workspace=1) as runs:
        runs.signals["a1"].abort(AbortReason.TIMEOUT)
        runs.tasks["a2"].cancel()
        await settle()
        with pytest.raises(Aborted) as aborted:
            await runs.tasks["a1"]
        assert aborted.value.reason is AbortReason.TIMEOUT
        assert runs.slots.use == SlotUse(1, 1)
        await runs.end("a0")
        assert runs.started == ["a0", "a3"]


async def test_a_turn_that_comes_together_with_a_cancel_is_handed_on() -> None:
    async with running(limit=1, per_workspace=1) as runs:
        async with runs.slots.taken("a", AbortSignal()):
            runs.add("a1")
            runs.add("a2")
            await settle()
        # a1 has its turn and was not woken yet.
        runs.tasks["a1"].cancel()
        await settle()
        assert runs.started == ["a2"]


async def test_an_error_of_the_holder_gives_the_slot_back() -> None:
    slots = ProcessSlots(1, 1)
    with pytest.raises(LookupError):
        async with slots.taken("a", AbortSignal()):
            raise LookupError
    async with asyncio.timeout(5), slots.taken("a", AbortSignal()) as waited:
        assert waited >= 0
        assert slots.use == SlotUse(1, 0)


async def test_a_long_wait_is_told_once_and_a_short_one_is_not() -> None:
    told: list[str] = []
    async with running("a0", limit=1, per_workspace=1) as runs:
        runs.add("a1", lambda: told.append("a1"))
        await until(lambda: bool(told))
        await runs.end("a0")
        assert runs.started == ["a0", "a1"]
        await runs.end("a1")
        runs.add("a2", lambda: told.append("a2"))
        await settle()
        assert runs.started[-1] == "a2"
    assert told == ["a1"]


@given(st.lists(st.tuples(st.sampled_from(["start", "end", "abort", "cancel"]), st.sampled_from("abc")), max_size=60))
@settings(max_examples=60, deadline=None)
def test_whatever_happens_limits_hold_and_nobody_waits_beside_a_free_slot(steps: list[tuple[str, str]]) -> None:
    async def play() -> None:
        async with running(limit=3, per_workspace=2) as runs:
            for number, (what, workspace) in enumerate(steps):
                ours = [name for name, task in runs.tasks.items() if name[0] == workspace and not task.done()]
                if what == "start":
                    runs.add(f"{workspace}{number}")
                elif ours and what == "end":
                    runs.ends[ours[0]].set()
                elif ours and what == "abort":
                    runs.signals[ours[-1]].abort(AbortReason.CANCELLED)
                elif ours:
                    runs.tasks[ours[-1]].cancel()
                if number % 3 == 0:
                    await settle()
                counts = runs.slots._running
                assert sum(counts.values()) == runs.slots.use.running <= 3
                assert all(0 < count <= 2 for count in counts.values())
            await settle()
            if runs.slots.use.running < 3:
                assert all(runs.slots._running.get(workspace) == 2 for workspace in runs.slots._waiting)

    asyncio.run(play())
