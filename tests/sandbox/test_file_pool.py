"""The pool file work runs in: what waits can be withdrawn, what runs is waited for, what hangs is left behind."""

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Callable

import pytest

from app.domain.abort import Aborted, AbortReason, AbortSignal
from app.sandbox import file_pool
from app.sandbox.file_pool import FilePool

pytestmark = pytest.mark.anyio

WAIT = 10.0


@pytest.fixture
async def pool() -> AsyncIterator[FilePool]:
    made = FilePool(threads=4, per_workspace=2)
    yield made
    made.close()


class Gate:
    """A function that says when it has begun and returns when it is let go."""

    def __init__(self) -> None:
        self.begun = threading.Event()
        self.open = threading.Event()

    def __call__(self) -> str:
        self.begun.set()
        assert self.open.wait(WAIT)
        return "let go"

    async def entered(self) -> None:
        deadline = time.monotonic() + WAIT
        while not self.begun.is_set():
            assert time.monotonic() < deadline
            await asyncio.sleep(0.001)


async def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + WAIT
    while not condition():
        assert time.monotonic() < deadline
        await asyncio.sleep(0.001)


def start(
    pool: FilePool, function: Callable[[], object], signal: AbortSignal | None = None, ws: str = "w"
) -> asyncio.Task[object]:
    return asyncio.ensure_future(pool.run(function, signal=signal or AbortSignal(), workspace=ws))


async def test_it_returns_what_the_function_returns_and_raises_what_it_raises(pool: FilePool) -> None:
    def add(one: int, other: int) -> int:
        return one + other

    def fail() -> None:
        raise LookupError("no such thing")

    assert await pool.run(add, 2, 3, signal=AbortSignal(), workspace="w") == 5
    with pytest.raises(LookupError, match="no such thing"):
        await pool.run(fail, signal=AbortSignal(), workspace="w")
    assert await pool.run(threading.get_ident, signal=AbortSignal(), workspace="w") != threading.get_ident()
    assert pool.running == 0


async def test_functions_that_block_overlap(pool: FilePool) -> None:
    meet = threading.Barrier(2)
    calls = [start(pool, lambda: meet.wait(WAIT)) for _ in range(2)]
    assert set(await asyncio.gather(*calls)) == {0, 1}


async def test_a_workspace_has_its_share_of_threads_and_leaves_the_rest_to_others(pool: FilePool) -> None:
    gates = [Gate() for _ in range(3)]
    calls = [start(pool, gate) for gate in gates]
    await gates[0].entered()
    await gates[1].entered()
    other = Gate()
    elsewhere = start(pool, other, ws="other")
    await other.entered()
    assert not gates[2].begun.is_set()
    assert pool.running == 3
    other.open.set()
    gates[1].open.set()
    await elsewhere
    await gates[2].entered()
    for gate in gates:
        gate.open.set()
    assert await asyncio.gather(*calls) == ["let go"] * 3


async def test_all_threads_together_are_bounded(pool: FilePool) -> None:
    gates = [Gate() for _ in range(6)]
    calls = [start(pool, gate, ws=f"w{number}") for number, gate in enumerate(gates)]
    for gate in gates[:4]:
        await gate.entered()
    assert pool.running == 4
    assert [gate.begun.is_set() for gate in gates] == [True] * 4 + [False] * 2
    for gate in gates:
        gate.open.set()
    await asyncio.gather(*calls)


async def test_workspaces_take_turns() -> None:
    pool = FilePool(threads=1, per_workspace=1)
    order: list[str] = []
    gate = Gate()
    first = start(pool, gate, ws="a")
    await gate.entered()
    many = [start(pool, lambda: order.append("a"), ws="a") for _ in range(20)]
    one = start(pool, lambda: order.append("b"), ws="b")
    await asyncio.sleep(0)
    gate.open.set()
    await asyncio.gather(first, one, *many)
    pool.close()
    assert order.index("b") <= 1


async def test_a_function_that_waits_for_a_thread_never_runs_after_an_abort(pool: FilePool) -> None:
    gates = [Gate(), Gate()]
    busy = [start(pool, gate) for gate in gates]
    for gate in gates:
        await gate.entered()
    signal = AbortSignal()
    ran: list[bool] = []
    returned: list[bool] = []
    waiting = asyncio.ensure_future(
        pool.run(ran.append, True, signal=signal, workspace="w", on_return=lambda: returned.append(True))
    )
    await asyncio.sleep(0)
    signal.abort(AbortReason.TIMEOUT)
    with pytest.raises(Aborted) as caught:
        await asyncio.wait_for(waiting, WAIT)
    assert caught.value.reason is AbortReason.TIMEOUT
    for gate in gates:
        gate.open.set()
    await asyncio.gather(*busy)
    await pool.run(lambda: None, signal=AbortSignal(), workspace="w")
    assert (ran, returned) == ([], [True])


async def test_an_aborted_signal_starts_nothing(pool: FilePool) -> None:
    signal = AbortSignal()
    signal.abort(AbortReason.CANCELLED)
    ran: list[bool] = []
    returned: list[bool] = []
    with pytest.raises(Aborted):
        await pool.run(ran.append, True, signal=signal, workspace="w", on_return=lambda: returned.append(True))
    assert (ran, returned) == ([], [True])


async def test_an_abort_that_comes_after_the_commit_does_not_take_the_result_away(pool: FilePool) -> None:
    signal = AbortSignal()
    gate = Gate()

    def change() -> str:
        signal.commit()
        return gate()

    call = start(pool, change, signal)
    await gate.entered()
    signal.abort(AbortReason.CANCELLED)
    await asyncio.sleep(0.01)
    assert not call.done()
    gate.open.set()
    assert await asyncio.wait_for(call, WAIT) == "let go"


async def test_a_function_that_looks_at_the_signal_ends_the_call(pool: FilePool) -> None:
    signal = AbortSignal()
    begun = threading.Event()

    def work() -> None:
        deadline = time.monotonic() + WAIT
        while time.monotonic() < deadline:
            begun.set()
            signal.raise_if_aborted()

    call = start(pool, work, signal)
    await until(begun.is_set)
    threading.Thread(target=signal.abort, args=(AbortReason.CANCELLED,)).start()
    with pytest.raises(Aborted):
        await asyncio.wait_for(call, WAIT)


async def test_a_thread_that_hangs_is_abandoned_and_keeps_its_slot_until_it_returns(
    pool: FilePool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(file_pool, "ABANDON_AFTER_SECONDS", 0.1)
    signal = AbortSignal()
    gate = Gate()
    returned = asyncio.Event()
    committed: list[bool] = []

    def hang() -> None:
        gate()
        signal.commit()
        committed.append(True)

    call = asyncio.ensure_future(pool.run(hang, signal=signal, workspace="w", on_return=returned.set))
    await gate.entered()
    began = time.monotonic()
    signal.abort(AbortReason.CANCELLED)
    with pytest.raises(Aborted):
        await asyncio.wait_for(call, WAIT)
    assert 0.1 <= time.monotonic() - began < 2
    assert pool.running == 1
    assert not returned.is_set()
    gate.open.set()
    await asyncio.wait_for(returned.wait(), WAIT)
    assert committed == []
    assert pool.running == 0


async def test_a_cancelled_task_aborts_its_signal_and_waits_for_the_thread(pool: FilePool) -> None:
    signal = AbortSignal()
    gate = Gate()
    call = start(pool, gate, signal)
    await gate.entered()
    call.cancel()
    await asyncio.sleep(0.01)
    assert not call.done()
    assert signal.reason is AbortReason.CANCELLED
    gate.open.set()
    with pytest.raises(asyncio.CancelledError):
        await asyncio.wait_for(call, WAIT)
    assert pool.running == 0


async def test_a_cancelled_task_does_not_wait_for_ever(pool: FilePool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(file_pool, "ABANDON_AFTER_SECONDS", 0.1)
    gate = Gate()
    call = start(pool, gate)
    await gate.entered()
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asyncio.wait_for(call, WAIT)
    assert pool.running == 1
    gate.open.set()
    await until(lambda: pool.running == 0)


async def test_a_result_is_not_held_back_by_the_next_function_of_the_same_thread() -> None:
    pool = FilePool(threads=1, per_workspace=1)
    gate = Gate()
    quick = [start(pool, lambda: "quick") for _ in range(2)]
    slow = start(pool, gate)
    assert await asyncio.wait_for(asyncio.gather(*quick), WAIT) == ["quick"] * 2
    gate.open.set()
    assert await asyncio.wait_for(slow, WAIT) == "let go"
    pool.close()


async def test_thousands_of_functions_all_come_back(pool: FilePool) -> None:
    async def client(number: int) -> int:
        total = 0
        for step in range(100):
            total += await pool.run(int, step, signal=AbortSignal(), workspace=f"w{number % 3}")
        return total

    results = await asyncio.wait_for(asyncio.gather(*(client(number) for number in range(30))), 30)
    assert results == [4950] * 30
    assert pool.running == 0


async def test_a_closed_pool_takes_nothing_and_lets_its_threads_end() -> None:
    pool = FilePool(threads=3)
    await asyncio.gather(*(start(pool, lambda: time.sleep(0.005), ws=f"w{number}") for number in range(9)))
    mine = [thread for thread in threading.enumerate() if thread.name.startswith("files-")]
    pool.close()
    pool.close()
    with pytest.raises(RuntimeError, match="closed"):
        await pool.run(int, signal=AbortSignal(), workspace="w")
    await until(lambda: sum(thread.is_alive() for thread in mine) <= len(mine) - 1)


def test_one_pool_serves_one_event_loop_after_another(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(file_pool, "ABANDON_AFTER_SECONDS", 0.05)
    pool = FilePool(threads=2, per_workspace=1)
    gate = Gate()
    returned: list[str] = []
    waiting: list[asyncio.Task[object]] = []

    async def leave_one_behind() -> None:
        signal = AbortSignal()
        call = asyncio.ensure_future(
            pool.run(gate, signal=signal, workspace="w", on_return=lambda: returned.append("first"))
        )
        await gate.entered()
        signal.abort(AbortReason.CANCELLED)
        with pytest.raises(Aborted):
            await call
        waiting.append(start(pool, int))  # cancelled when the loop ends, while it waits for its turn
        await asyncio.sleep(0)

    async def work() -> list[object]:
        return await asyncio.wait_for(
            asyncio.gather(*(start(pool, lambda: "done", ws=f"w{number % 3}") for number in range(50))), WAIT
        )

    asyncio.run(leave_one_behind())
    assert asyncio.run(work()) == ["done"] * 50
    gate.open.set()

    async def settle() -> None:
        await until(lambda: pool.running == 0 and returned == ["first"])

    asyncio.run(settle())
    assert asyncio.run(work()) == ["done"] * 50
    pool.close()
