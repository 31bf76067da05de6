"""Waking readers. What is in memory only wakes; the truth is read from the rows."""

import asyncio


class Notifier:
    """A counter that readers wait on: no wake is lost between a look at the rows and the wait."""

    def __init__(self) -> None:
        self._version = 0
        self._waiters: set[asyncio.Future[bool]] = set()

    @property
    def version(self) -> int:
        return self._version

    def notify(self) -> None:
        """Wake all who wait."""
        self._version += 1
        waiters, self._waiters = self._waiters, set()
        for waiter in waiters:
            if not waiter.done():
                waiter.set_result(True)

    async def wait(self, seen: int, seconds: float) -> bool:
        """Wait until the version is another than `seen`, at most `seconds`. Return whether it is."""
        if self._version != seen:
            return True
        loop = asyncio.get_running_loop()
        waiter: asyncio.Future[bool] = loop.create_future()
        self._waiters.add(waiter)
        # Cheaper than `asyncio.timeout`, and every follower comes by here for every event.
        timer = loop.call_later(seconds, _give_up, waiter)
        try:
            return await waiter or self._version != seen
        finally:
            timer.cancel()
            self._waiters.discard(waiter)


def _give_up(waiter: asyncio.Future[bool]) -> None:
    if not waiter.done():
        waiter.set_result(False)
