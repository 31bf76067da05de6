"""How late the event loop comes to what is due: what blocks it shows here first."""

import asyncio
from collections.abc import Callable
from typing import Final

INTERVAL_SECONDS: Final = 0.25


class LoopLag:
    """Asks for a wake-up every `INTERVAL_SECONDS` and reports by how many seconds each came late."""

    def __init__(self, report: Callable[[float], None]) -> None:
        self._report = report
        self._timer: asyncio.TimerHandle | None = None

    def start(self) -> None:
        """Begin on the running loop."""
        self._arm(asyncio.get_running_loop())

    def stop(self) -> None:
        if self._timer is not None:
            self._timer.cancel()

    def _arm(self, loop: asyncio.AbstractEventLoop) -> None:
        self._timer = loop.call_later(INTERVAL_SECONDS, self._woken, loop, loop.time() + INTERVAL_SECONDS)

    def _woken(self, loop: asyncio.AbstractEventLoop, due: float) -> None:
        self._report(max(0.0, loop.time() - due))
        self._arm(loop)
