"""Threads for reads: bounded, given back, and cancelled while they wait."""

import asyncio
import threading

import pytest

from app.errors import StorageUnavailable
from app.storage.base import DataError, OperationalError
from app.storage.read_pool import ReadPool

pytestmark = pytest.mark.anyio

WAIT_SECONDS = 20.0


async def test_reads_run_side_by_side_up_to_the_number_of_threads() -> None:
    pool = ReadPool(2)
    both = threading.Barrier(2, timeout=WAIT_SECONDS)
    await asyncio.gather(pool.run(both.wait), pool.run(both.wait))

    release = threading.Event()
    entered: list[int] = []

    def hold(number: int) -> int:
        entered.append(number)
        assert release.wait(WAIT_SECONDS)
        return number

    reads = [asyncio.create_task(pool.run(hold, number)) for number in range(3)]
    async with asyncio.timeout(WAIT_SECONDS):
        while len(entered) < 2:  # noqa: ASYNC110 - a thread tells, not the loop
            await asyncio.sleep(0.005)
    waiting = asyncio.create_task(pool.run(hold, 9))
    await asyncio.sleep(0)
    assert sorted(entered) == [0, 1]
    assert (pool.running, pool.waiting) == (2, 2)
    waiting.cancel()
    await asyncio.wait([waiting])
    assert (pool.running, pool.waiting) == (2, 1)
    release.set()
    assert await asyncio.gather(*reads) == [0, 1, 2]
    assert 9 not in entered
    assert await pool.run(len, "ok") == 2
    async with asyncio.timeout(WAIT_SECONDS):
        while pool.running:  # noqa: ASYNC110 - a thread tells, not the loop
            await asyncio.sleep(0.005)
    assert pool.waiting == 0
    pool.close()


async def test_slot_of_a_cancelled_read_is_taken_until_its_thread_is_done() -> None:
    pool = ReadPool(1)
    entered, release = threading.Event(), threading.Event()

    def hold() -> None:
        entered.set()
        assert release.wait(WAIT_SECONDS)

    read = asyncio.create_task(pool.run(hold))
    assert await asyncio.to_thread(entered.wait, WAIT_SECONDS)
    read.cancel()
    with pytest.raises(asyncio.CancelledError):
        await read
    after = asyncio.create_task(pool.run(release.is_set))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert not after.done()
    release.set()
    assert await asyncio.wait_for(after, WAIT_SECONDS) is True
    pool.close()


async def test_database_that_does_not_answer_is_told_as_such() -> None:
    pool = ReadPool(1)

    def fail(error: Exception) -> None:
        raise error

    with pytest.raises(StorageUnavailable):
        await pool.run(fail, OperationalError("refused", "connection"))
    with pytest.raises(DataError):
        await pool.run(fail, error=DataError("corrupt"))
    pool.close()
    with pytest.raises(StorageUnavailable):
        await pool.run(fail, ValueError())
    assert (pool.running, pool.waiting) == (0, 0)
