"""Waking readers. What is in memory only wakes; the truth is read from the rows."""

import asyncio


class Notifier:
    """A counter that readers wait on: no wake is lost between a look at the rows and the wait."""

    def __init__(self) -> None:
        self._version = 0
        self._waiters: set[asyncio.Future[None]] = set()

    @property
    def version(self) -> int:
        return self._version

    def notify(self) -> None:
        """Wake all who wait."""
        self._version += 1
        waiters, self._waiters = self._waiters, set()
        for waiter in waiters:
            if not waiter.done():
                waiter.set_result(None)

    async def wait(self, seen: int, seconds: float) -> bool:
        """Wait until the version is another than `seen`, at most `seconds`. Return whether it is."""
        if self._version != seen:
            return True
        waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiters.add(waiter)
        try:
            async with asyncio.timeout(seconds):
                await waiter
        except TimeoutError:
            return self._version != seen
        finally:
            self._waiters.discard(waiter)
        return True
