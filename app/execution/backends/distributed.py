"""The backend of a process that others hand batches to: what is accepted here runs here, the rest comes by jobs."""

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Final, Protocol, TypeAlias

import structlog

from app.execution.backends.local import LocalBackend
from app.storage.base import WaitingBatch

JOBS_AT_ONCE: Final = 8
"""How many jobs are being taken at a time: each is a claim, and no batch is waited for."""
TAKEN_SECONDS: Final = 1.0
"""How long a process that drains waits for claims that are on their way."""
FIRST_PAUSE_SECONDS: Final = 0.1
LAST_PAUSE_SECONDS: Final = 2.0

_log = structlog.get_logger(__name__)


Take: TypeAlias = Callable[[WaitingBatch], Awaitable[None]]


class Jobs(Protocol):
    """Where the jobs of a node come from."""

    async def work(self, node_id: str, take: Take, *, at_once: int) -> None:
        """Call `take` with the batch of each job, several at once, until cancelled.

        Raises:
            Exception: the connection was lost; call it again.
        """
        ...


class DistributedBackend(LocalBackend):
    """A local backend that takes jobs of its node until it drains."""

    _working: asyncio.Task[None] | None = None
    _takes: set[asyncio.Task[None]]

    def start(self, jobs: Jobs, node_id: str, take: Take) -> None:
        """Begin to take jobs; `take` claims the batch of one and submits it here."""
        self._takes = set()
        self._working = asyncio.create_task(self._work(jobs, node_id, take), name="jobs")

    async def drain(self, grace: float) -> None:
        """Take no more jobs, which others can; then as a local backend."""
        await self.stop_taking()
        await super().drain(grace)

    async def stop_taking(self) -> None:
        """Take no more jobs."""
        working, self._working = self._working, None
        if working is not None:
            working.cancel()
            with suppress(asyncio.CancelledError):
                await working
            if self._takes:
                await asyncio.wait(self._takes, timeout=TAKEN_SECONDS)

    async def _work(self, jobs: Jobs, node_id: str, take: Take) -> None:
        async def take_whole(batch: WaitingBatch) -> None:
            try:
                await take(batch)
            except Exception:  # noqa: BLE001 - the batch waits on, and is looked for in any case
                _log.exception("job_failed", batch_id=batch.batch_id)

        async def take_one(batch: WaitingBatch) -> None:
            # The engine calls its jobs off when it loses the database; a claim that is on its way is not called off.
            task = asyncio.create_task(take_whole(batch), name=f"take {batch.batch_id}")
            self._takes.add(task)
            task.add_done_callback(self._takes.discard)
            await asyncio.shield(task)

        pause = FIRST_PAUSE_SECONDS
        while True:
            began = asyncio.get_running_loop().time()
            try:
                await jobs.work(node_id, take_one, at_once=JOBS_AT_ONCE)
            except Exception as error:  # noqa: BLE001 - the engine has its own; each means that the database is away
                _log.warning("jobs_lost", reason=" ".join(str(error).split()) or type(error).__name__)
            if asyncio.get_running_loop().time() - began > LAST_PAUSE_SECONDS:
                pause = FIRST_PAUSE_SECONDS
            await asyncio.sleep(pause)
            pause = min(LAST_PAUSE_SECONDS, pause * 2)
