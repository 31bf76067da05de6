"""Turns at something that only so many threads may do at once."""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Final

from app.errors import ErrorCode, ToolError

WAIT_SECONDS: Final = 30.0
_LOOK_SECONDS: Final = 0.05


class Turns:
    """At most `at_once` threads have a turn; the others wait, bounded, and look meanwhile whether they still should."""

    def __init__(self, at_once: int) -> None:
        self._free = threading.Semaphore(at_once)

    @contextmanager
    def taken(self, refusal: str, check: Callable[[], None], wait_seconds: float = WAIT_SECONDS) -> Iterator[None]:
        """Hold a turn. `check` is called while waiting and may raise.

        Raises:
            ToolError: `limit_exceeded` with the text `refusal`, when no turn came in `wait_seconds`.
        """
        deadline = time.monotonic() + wait_seconds
        while not self._free.acquire(timeout=_LOOK_SECONDS):
            check()
            if time.monotonic() > deadline:
                raise ToolError(ErrorCode.LIMIT_EXCEEDED, refusal)
        try:
            yield
        finally:
            self._free.release()
