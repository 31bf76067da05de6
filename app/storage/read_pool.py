"""ReadPool: the threads that read the database for the event loop."""

import asyncio
import contextlib
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Final, ParamSpec, TypeVar

from app.errors import StorageUnavailable
from app.storage.base import OperationalError

P = ParamSpec("P")
T = TypeVar("T")

READ_THREADS: Final = 8
FIRST_PAUSE_SECONDS: Final = 0.05
LAST_PAUSE_SECONDS: Final = 1.0


class ReadPool:
    """Runs reads, at most `threads` at a time.

    A slot is taken before a thread, so that whoever waits can be cancelled; it is given back when the thread is done,
    also when nobody waits for it any more.
    """

    def __init__(self, threads: int = READ_THREADS) -> None:
        self.running = 0
        """Reads that have a thread."""
        self.waiting = 0
        """Reads that wait for one."""
        self._closed = False
        self._slots = asyncio.Semaphore(threads)
        self._executor = ThreadPoolExecutor(threads, thread_name_prefix="database-read")

    async def run(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Return what the function returns, run in a thread.

        Raises:
            StorageUnavailable: the database did not answer, or was busy for too long.
        """
        loop = asyncio.get_running_loop()

        def give_back(_done: Future[T]) -> None:
            # A loop that is closed has nobody waiting for the slot.
            with contextlib.suppress(RuntimeError):
                loop.call_soon_threadsafe(self._give_back)

        self.waiting += 1
        try:
            await self._slots.acquire()
        finally:
            self.waiting -= 1
        self.running += 1
        try:
            working = self._executor.submit(function, *args, **kwargs)
        except RuntimeError:
            self._give_back()
            raise StorageUnavailable("the service is stopping; nothing is read any more") from None
        working.add_done_callback(give_back)
        try:
            return await asyncio.wrap_future(working)
        except OperationalError as error:
            raise StorageUnavailable("the database does not answer; try again in a moment") from error

    def _give_back(self) -> None:
        self.running -= 1
        self._slots.release()

    async def run_patiently(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Return what the function returns, asked again for as long as the database is away.

        For what an accepted batch needs: it ends, however long that takes.

        Raises:
            StorageUnavailable: the pool was closed.
        """
        pause = FIRST_PAUSE_SECONDS
        while True:
            try:
                return await self.run(function, *args, **kwargs)
            except StorageUnavailable:
                if self._closed:
                    raise
                await asyncio.sleep(pause)
                pause = min(LAST_PAUSE_SECONDS, pause * 2)

    def close(self) -> None:
        """Take no more reads. Those that run end by themselves: the database bounds how long they take."""
        self._closed = True
        self._executor.shutdown(wait=False, cancel_futures=True)
