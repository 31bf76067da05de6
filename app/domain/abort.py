"""AbortSignal: how a call learns that it has to stop, and the one point after which it no longer may."""

import asyncio
import threading
from collections.abc import Callable
from enum import StrEnum


class AbortReason(StrEnum):
    CANCELLED = "cancelled"
    TIMEOUT = "timeout"
    INTERRUPTED = "interrupted"


class Aborted(Exception):
    """The call was told to stop before its effect took place."""

    def __init__(self, reason: AbortReason) -> None:
        super().__init__(reason.value)
        self.reason = reason


class AbortSignal:
    """One call's signal. Aborted from the event loop, looked at from any thread.

    `commit` is the line between the two: an abort before it makes `commit` raise, one after it comes too late, and the
    effect counts. So a file change is either refused or a success, never half of each.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._reason: AbortReason | None = None
        self._committed = False
        self._callbacks: list[Callable[[], None]] = []

    @property
    def reason(self) -> AbortReason | None:
        """Why the call has to stop; None while it may go on."""
        return self._reason

    @property
    def aborted(self) -> bool:
        return self._reason is not None

    @property
    def committed(self) -> bool:
        return self._committed

    def abort(self, reason: AbortReason) -> None:
        """Ask the call to stop. The first reason stays."""
        with self._lock:
            if self._reason is not None:
                return
            self._reason = reason
            callbacks, self._callbacks = self._callbacks, []
        for callback in callbacks:
            callback()

    def raise_if_aborted(self) -> None:
        """Raise Aborted when the call has to stop."""
        if self._reason is not None:
            raise Aborted(self._reason)

    def commit(self) -> None:
        """Pass the point of no return; call it right before the effect, from any thread.

        Raises:
            Aborted: when the abort came first; the effect must not take place.
        """
        with self._lock:
            if self._reason is not None:
                raise Aborted(self._reason)
            self._committed = True

    def add_callback(self, callback: Callable[[], None]) -> Callable[[], None]:
        """Call back once on abort, in the aborting thread (at once when aborted); return how to take it back."""
        with self._lock:
            if self._reason is None:
                self._callbacks.append(callback)
                return lambda: self._forget(callback)
        callback()
        return lambda: None

    async def wait(self) -> AbortReason:
        """Return the reason once there is one."""
        loop = asyncio.get_running_loop()
        future: asyncio.Future[None] = loop.create_future()

        def resolve() -> None:
            if not future.done():
                future.set_result(None)

        def wake() -> None:
            loop.call_soon_threadsafe(resolve)

        forget = self.add_callback(wake)
        try:
            await future
        finally:
            forget()
        assert self._reason is not None  # noqa: S101 - set before the callbacks run
        return self._reason

    def _forget(self, callback: Callable[[], None]) -> None:
        with self._lock:
            if callback in self._callbacks:
                self._callbacks.remove(callback)
