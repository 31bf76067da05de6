"""What a process that shares a database does when it could not say for a while that it lives."""

import asyncio
from contextlib import suppress

import pytest

from app.domain.ids import new_id
from app.domain.node import LEASE_SECONDS, RENEWAL_SECONDS, Process
from app.execution.membership import Membership
from app.storage.sql.storage import SqlStorage

WAIT_SECONDS = 20.0

pytestmark = pytest.mark.anyio


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def make_process() -> Process:
    return Process(new_id("proc"), new_id("node"), "all", None)


async def beats_after(storage: SqlStorage, away: float, *, others: bool) -> list[str]:
    """Return in order what a process does that is heard, is frozen for some seconds, and is heard again."""
    clock, done, heard_again = Clock(), list[str](), asyncio.Event()
    membership = Membership(storage, make_process(), shared=True, on_lapse=lambda: done.append("lapse"), clock=clock)
    await membership.join()
    if others:
        await asyncio.to_thread(storage.join, make_process())

    def heard() -> None:
        done.append("heard")
        if done.count("heard") == 2:
            heard_again.set()
        else:
            clock.now += away

    keeping = asyncio.create_task(membership.keep(heard))
    try:
        async with asyncio.timeout(WAIT_SECONDS):
            await heard_again.wait()
    finally:
        keeping.cancel()
        with suppress(asyncio.CancelledError):
            await keeping
    return done


async def test_a_process_that_was_frozen_stops_what_it_runs_when_it_goes_on(postgres_storage: SqlStorage) -> None:
    assert await beats_after(postgres_storage, LEASE_SECONDS + 4, others=True) == ["heard", "lapse", "heard"]


async def test_one_that_was_late_and_could_not_be_judged_goes_on(postgres_storage: SqlStorage) -> None:
    assert await beats_after(postgres_storage, RENEWAL_SECONDS - 0.1, others=True) == ["heard", "heard"]


async def test_one_that_is_alone_goes_on(postgres_storage: SqlStorage) -> None:
    assert await beats_after(postgres_storage, LEASE_SECONDS + 4, others=False) == ["heard", "heard"]
