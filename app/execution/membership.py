"""This process among those that share a database: that it lives, and who else does.

On Postgres it says so every 2 s. A process that has not for 6 s counts as dead, and whoever finds a batch it held ends
it. One that could not say so for 3.6 s, while there were others, stops what it runs before they may take it for dead.
"""

import asyncio
import time
from collections.abc import Callable, Collection
from contextlib import suppress
from typing import Final, TypeAlias

import structlog

from app.domain.node import HEARTBEAT_SECONDS, LEASE_SECONDS, RENEWAL_SECONDS, Process
from app.storage.base import Holder, Storage, StorageError

_log = structlog.get_logger(__name__)

SHORTEST_PAUSE_SECONDS: Final = 0.05
RETRY_SECONDS: Final = 0.25
"""After a heartbeat that failed: within the time that is left there are several more."""

FindDead: TypeAlias = Callable[[Collection[str]], Collection[str]]


class Membership:
    """What this process knows of itself and of the others.

    Args:
        process: this one.
        shared: whether others may use the database at the same time, which SQLite does not allow.
        on_lapse: called once on the loop when this process could not say in time that it lives.
        find_dead: returns those of some processes of this node that are known to have ended, called in a thread; None
            when the process has no node.
        clock: seconds that never go back.
    """

    def __init__(
        self,
        storage: Storage,
        process: Process,
        *,
        shared: bool,
        on_lapse: Callable[[], None] = lambda: None,
        find_dead: FindDead | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._storage = storage
        self._shared = shared
        self._on_lapse = on_lapse
        self._find_dead = find_dead
        self._clock = clock
        self._renewed_at = self._unbroken_since = clock()
        self._lapsed = False
        self._changed = asyncio.Event()
        self.process: Final = process
        self.living: tuple[Process, ...] = (process,)

    @property
    def runs_batches(self) -> bool:
        """Whether this process runs batches of its node."""
        return self.process.node_id is not None

    @property
    def holder(self) -> Holder:
        return Holder(self.process.id, self.process.node_id)

    @property
    def alone(self) -> bool:
        """Whether no other process lived when this one last looked."""
        return len(self.living) < 2

    @property
    def leads(self) -> bool:
        """Whether this is the one of the living processes that does what only one need do."""
        return min(self.living, key=lambda one: one.id).id == self.process.id

    @property
    def current(self) -> bool:
        """Whether nobody can take this process for dead: it may accept batches and start calls."""
        return self.alone or self._clock() - self._renewed_at < RENEWAL_SECONDS

    @property
    def lease_age(self) -> float:
        """Seconds since this process was last heard to live; 0 when nobody else may use the database."""
        return self._clock() - self._renewed_at if self._shared else 0.0

    @property
    def may_judge(self) -> bool:
        """Whether a process that has not been seen is dead: the others had as much time as this one to say they live.

        After a database was away nobody has been seen for a while.
        """
        return self._clock() - self._unbroken_since >= LEASE_SECONDS

    async def join(self) -> None:
        """Begin to live, and forget the processes that are known to have ended: of SQLite's all that ever were.

        Raises:
            StorageError: the database did not answer.
        """
        self._know(await asyncio.to_thread(self._join))
        self._renewed_at = self._unbroken_since = self._clock()

    async def keep(self, after_each: Callable[[], object] = lambda: None) -> None:
        """Say every 2 s that this process lives, until cancelled; `after_each` is called when it was heard."""
        while self._shared:
            began = self._clock()
            beat = asyncio.ensure_future(asyncio.to_thread(self._beat))
            while not beat.done():
                left = self._renewed_at + RENEWAL_SECONDS - self._clock()
                await asyncio.wait([beat], timeout=max(0.05, left) if left > 0 else HEARTBEAT_SECONDS)
                if not beat.done():
                    self._look()
            pause = HEARTBEAT_SECONDS
            try:
                self._heard(began, beat.result())
            except StorageError as error:
                _log.warning("heartbeat_failed", reason=" ".join(str(error).split()))
                self._look()
                pause = RETRY_SECONDS
            else:
                after_each()
            with suppress(TimeoutError):
                async with asyncio.timeout(max(SHORTEST_PAUSE_SECONDS, began + pause - self._clock())):
                    await self._changed.wait()
            self._changed.clear()

    def others_changed(self) -> None:
        """Look at once who lives: a process has begun to or has ended."""
        self._changed.set()

    async def leave(self) -> None:
        """Say that this process ends; a database that does not answer finds out by itself."""
        try:
            await asyncio.to_thread(self._storage.leave, self.process.id)
        except StorageError as error:
            _log.warning("leave_failed", reason=str(error))

    def _join(self) -> Collection[Process]:
        known = self._storage.processes()
        dead = self._dead(known) if self._shared else [one.id for one in known]
        # The workspaces of an SQLite database are those of its data directory, whatever became of the node's name.
        self._storage.join(self.process, dead=dead, adopt_all=not self._shared)
        return self._storage.living() if self._shared else [self.process]

    def _beat(self) -> Collection[Process]:
        living = self._storage.beat(self.process)
        dead = self._dead(living)
        for process_id in dead:
            self._storage.leave(process_id)
        return [one for one in living if one.id not in dead]

    def _dead(self, known: Collection[Process]) -> Collection[str]:
        if self._find_dead is None:
            return ()
        return self._find_dead(
            [one.id for one in known if one.node_id == self.process.node_id and one.id != self.process.id]
        )

    def _heard(self, began: float, living: Collection[Process]) -> None:
        # After a process was frozen its first heartbeat is heard at once, and others may have judged it meanwhile.
        if began - self._renewed_at >= RENEWAL_SECONDS and (not self.alone or len(living) > 1):
            self._lapse()
        # The lease counts from the time the heartbeat was sent: when it arrived is the database's to know.
        if began - self._renewed_at >= LEASE_SECONDS:
            self._unbroken_since = began
        self._renewed_at = began
        self._lapsed = False
        self._know(living)

    def _know(self, living: Collection[Process]) -> None:
        self.living = tuple(living)
        self._storage.tell_others(None if self.alone else self.process.id)

    def _look(self) -> None:
        if not self.current:
            self._lapse()

    def _lapse(self) -> None:
        if self._lapsed:
            return
        self._lapsed = True
        _log.error("lease_lapsed", seconds=RENEWAL_SECONDS)
        self._on_lapse()
