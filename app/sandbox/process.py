"""Running one command to its end: output as it comes, a time limit, an abort, and nothing left behind."""

import asyncio
import os
import signal as signals
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any, Final, TypeAlias

from app.domain.abort import AbortReason, AbortSignal
from app.domain.events import OutputStream
from app.sandbox.base import ExitStatus, ProcessHandle, ProcessSpec, Sandbox, WatchedLimit

OnOutput: TypeAlias = Callable[[OutputStream, bytes], Awaitable[None] | None]
"""Called on the event loop with the next bytes of a stream, in the order they were read."""

_READ_BYTES: Final = 1 << 16  # what a pipe holds; one read per turn of the loop, so that no command can starve it
_DELIVERY_SECONDS: Final = 1.0
_CANCELLED_SECONDS: Final = 1.0


@dataclass(frozen=True, slots=True)
class CommandOutcome:
    """How a command ended.

    `exit_code` is None when its own process died by `signal`. `timed_out` and `aborted` tell that the command was ended
    for it; one that had exited by itself before that reached it has neither. `abort_reason` is set when `aborted` is.
    `exceeded` names the limit that it was ended for.
    """

    exit_code: int | None
    signal: int | None
    timed_out: bool
    aborted: bool
    abort_reason: AbortReason | None
    stdout_bytes: int
    stderr_bytes: int
    duration_ms: int
    exceeded: WatchedLimit | None = None

    @property
    def signal_name(self) -> str | None:
        """`SIGKILL` and its like; None when no signal ended the command's own process."""
        if self.signal is None:
            return None
        try:
            return signals.Signals(self.signal).name
        except ValueError:
            return f"SIG{self.signal}"


async def run_command(
    sandbox: Sandbox,
    spec: ProcessSpec,
    *,
    signal: AbortSignal,
    timeout_ms: int,
    on_output: OnOutput,
    grace_ms: int = 100,
    drain_ms: int = 250,
) -> CommandOutcome:
    """Run a command and return once it has exited, its output is read and no descendant of it lives.

    Both streams are read to their end whatever becomes of the output. When `on_output` returns an awaitable, nothing is
    read until that is done, which stops a command that writes more than a pipe holds; time limit and abort work all the
    same. After the end of the command the wait for one awaitable is bounded by a second, then output is handed over
    without waiting. An exception of `on_output` ends the command and is raised.

    Time limit and abort: SIGTERM to the process group, up to `grace_ms` for all of it to go, then SIGKILL for the whole
    tree. What has been written until then is still handed over; `drain_ms` bounds the wait for the end of the pipes.
    A cancelled caller leaves no process and no descriptor either.

    Raises:
        Aborted: the signal came before the command was started.
        ToolError: as `Sandbox.start`; `interrupted` when the command's supervisor was lost.
    """
    signal.raise_if_aborted()
    loop = asyncio.get_running_loop()
    started = loop.time()
    handle = await sandbox.start(spec)
    aborted: asyncio.Future[None] = loop.create_future()

    def note_abort() -> None:
        if not aborted.done():
            aborted.set_result(None)

    def abort_from_any_thread() -> None:
        loop.call_soon_threadsafe(note_abort)

    pump = _Pump(loop, handle, on_output)
    exited = asyncio.ensure_future(handle.wait())
    forget = signal.add_callback(abort_from_any_thread)
    try:
        pump.start()
        left = max(0.0, started + timeout_ms / 1000 - loop.time())
        first: set[asyncio.Future[Any]] = {exited, aborted, pump.failed}
        await asyncio.wait(first, timeout=left, return_when=asyncio.FIRST_COMPLETED)
        reason = signal.reason if aborted.done() else None
        if not exited.done():
            handle.terminate()
            gone = asyncio.ensure_future(handle.wait_all())
            await _finished_within(gone, grace_ms / 1000)
        await handle.kill()
        status: ExitStatus = await exited
        if status.asked:
            sandbox.counts.killed["timeout" if reason is None else reason.value] += 1
        await pump.drain(drain_ms / 1000)
        return CommandOutcome(
            exit_code=status.exit_code,
            signal=status.signal,
            timed_out=status.asked and reason is None,
            aborted=status.asked and reason is not None,
            abort_reason=reason if status.asked else None,
            stdout_bytes=pump.counts["stdout"],
            stderr_bytes=pump.counts["stderr"],
            duration_ms=round((loop.time() - started) * 1000),
            exceeded=status.exceeded,
        )
    finally:
        forget()
        pump.stop()
        try:
            await handle.close()
        finally:
            exited.cancel()
        await _settled({exited, *pump.deliveries})


async def _finished_within(future: asyncio.Future[None], seconds: float) -> None:
    try:
        await asyncio.wait({future}, timeout=seconds)
    finally:
        future.cancel()


async def _settled(futures: set[asyncio.Future[Any]]) -> None:
    """See cancelled tasks to their end, and look at what they raised, so that nothing is said to be lost."""
    done, _ = await asyncio.wait(futures, timeout=_CANCELLED_SECONDS)
    for future in done:
        if not future.cancelled():
            future.exception()


class _Pump:
    """Moves what a command writes from its pipes to `on_output`, driven by the event loop alone.

    `failed` is done, with the exception, when `on_output` raised. `deliveries` are the coroutines of `on_output` that
    still run.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, handle: ProcessHandle, on_output: OnOutput) -> None:
        self.counts: dict[OutputStream, int] = {"stdout": 0, "stderr": 0}
        self.failed: asyncio.Future[None] = loop.create_future()
        self.deliveries: set[asyncio.Future[None]] = set()
        self._loop = loop
        self._on_output = on_output
        self._open: dict[int, OutputStream] = {handle.stdout: "stdout", handle.stderr: "stderr"}
        self._at_end: asyncio.Future[None] = loop.create_future()
        self._reading = False
        self._patient = True
        self._pending: asyncio.Future[None] | None = None
        self._buffer = memoryview(bytearray(_READ_BYTES))

    def start(self) -> None:
        """Begin to read."""
        self._reading = True
        for fd in self._open:
            self._loop.add_reader(fd, self._read, fd)

    def stop(self) -> None:
        """Read no more and cancel what `on_output` still does. To be called before the descriptors are closed."""
        self._pause()
        self._open.clear()
        self._pending = None
        for delivery in self.deliveries:
            delivery.cancel()
        if self.failed.done():
            self.failed.exception()

    async def drain(self, seconds: float) -> None:
        """Read to the end of both pipes, or for so long without reaching it. Raises what `on_output` raised."""
        while not self._at_end.done() and not self.failed.done():
            await asyncio.wait({self._at_end, self.failed}, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
            if self._pending is None:
                break
            # The wait was for whoever takes the output, not for the pipes: it does not count.
            done, _ = await asyncio.wait({self._pending}, timeout=_DELIVERY_SECONDS)
            if not done:
                self._patient = False
                self._pending = None
                self.start()
        if self.failed.done():
            self.failed.result()

    def _pause(self) -> None:
        self._reading = False
        for fd in self._open:
            self._loop.remove_reader(fd)

    def _read(self, fd: int) -> None:
        if not self._reading:
            return
        try:
            count = os.readv(fd, [self._buffer])
        except BlockingIOError:
            return
        except OSError:
            count = 0
        stream = self._open[fd]
        if count:
            self.counts[stream] += count
            self._deliver(stream, bytes(self._buffer[:count]))
            return
        self._loop.remove_reader(fd)
        del self._open[fd]
        if not self._open:
            self._at_end.set_result(None)

    def _deliver(self, stream: OutputStream, data: bytes) -> None:
        try:
            waiting = self._on_output(stream, data)
        except Exception as error:  # noqa: BLE001 - raised again by `drain`, once the command has ended
            self._fail(error)
            return
        if waiting is None:
            return
        if isinstance(waiting, asyncio.Future):
            delivery = waiting  # somebody else's, and perhaps not ours alone: never cancelled here
        else:
            delivery = asyncio.ensure_future(waiting)
            self.deliveries.add(delivery)
            delivery.add_done_callback(self.deliveries.discard)
        if self._patient:
            self._pause()
            self._pending = delivery
        delivery.add_done_callback(self._delivered)

    def _delivered(self, delivery: asyncio.Future[None]) -> None:
        error = None if delivery.cancelled() else delivery.exception()
        if isinstance(error, Exception):
            self._fail(error)
        elif self._pending is delivery:
            self._pending = None
            self.start()

    def _fail(self, error: Exception) -> None:
        self._pause()
        if not self.failed.done():
            self.failed.set_exception(error)
