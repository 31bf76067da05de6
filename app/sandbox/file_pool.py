"""The threads file work runs in, so that no system call on a workspace ever holds up the event loop.

A job waits in the pool, not in a thread: until a thread takes it, it can be withdrawn and nothing of it has run. A
workspace has at most `per_workspace` jobs running, and workspaces with waiting jobs take turns.

A thread carries the file rights of the account that owns the workspace (`app.sandbox.account`): it takes them over
before a job when the job before was another account's, and what it could not take over it does not run with.

Most jobs are over in some 50 µs, with several short system calls in them. Handing each to a thread of its own makes the
threads fight for the interpreter lock at every call: eight small reads then cost twice what they cost in one thread. So
a thread that is awake goes on with the next job, and further threads are woken only for jobs that have waited for a
tick, which is when the one at work is held up by the disk.
"""

import asyncio
import contextlib
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable
from queue import SimpleQueue
from typing import Any, Final, TypeVar, TypeVarTuple

from app.domain.abort import Aborted, AbortReason, AbortSignal
from app.sandbox.account import Account, act_as

A = TypeVarTuple("A")
R = TypeVar("R")

ABANDON_AFTER_SECONDS: Final = 5.0
_TICK_SECONDS: Final = 0.001
_DELIVER_SECONDS: Final = 0.000_3
# Jobs per second of all threads. Below the one the threads wait for the disk and more of them help; above the other
# they wait for the interpreter lock and fewer do.
_SLOW: Final = 2_000.0
_FAST: Final = 3_000.0


class _Job:
    """One function call. `taken` is set under the pool's lock; everything else changes on the caller's loop."""

    __slots__ = (
        "account",
        "args",
        "error",
        "function",
        "future",
        "inbox",
        "on_return",
        "result",
        "returned",
        "taken",
        "workspace",
    )

    def __init__(
        self,
        function: Callable[..., Any],
        args: tuple[Any, ...],
        workspace: str,
        account: Account | None,
        inbox: "_Inbox",
        on_return: Callable[[], None] | None,
    ) -> None:
        self.function = function
        self.args = args
        self.workspace = workspace
        self.account = account
        self.inbox = inbox
        self.on_return = on_return
        self.future: asyncio.Future[None] = inbox.loop.create_future()
        self.taken = False
        self.returned = False
        self.result: Any = None
        self.error: BaseException | None = None

    def wake(self) -> None:
        if not self.future.done():
            self.future.set_result(None)

    def finish(self) -> None:
        """Note that the function is back (or never ran)."""
        self.returned = True
        if self.on_return is not None:
            self.on_return()
        self.wake()


class _Inbox:
    """Jobs that are back, on their way to one event loop; one wake-up of the loop takes all that there are."""

    __slots__ = ("_done", "_scheduled", "_since", "loop")

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.loop = loop
        self._done: deque[_Job] = deque()
        self._scheduled = False
        self._since = 0.0

    def put(self, job: _Job, *, last: bool) -> None:
        """Deliver a job; in its thread. Unless it is the `last` one for now, the loop may sleep on for a while."""
        self._done.append(job)
        if self._scheduled:
            return
        if not last:
            now = time.perf_counter()
            if not self._since:
                self._since = now
            if now - self._since < _DELIVER_SECONDS:
                return
        self._scheduled = True
        try:
            self.loop.call_soon_threadsafe(self.deliver)
        except RuntimeError:
            self.deliver()  # the loop is closed and nobody waits; what hangs on the return still has to happen

    def deliver(self) -> None:
        # Before the first look: what comes after the last one schedules the next.
        self._scheduled = False
        self._since = 0.0
        while self._done:
            self._done.popleft().finish()


class _Threads:
    """The threads of a pool, and what waits for them."""

    def __init__(self, most: int, per_workspace: int) -> None:
        self._most = most
        self._per_workspace = per_workspace
        self._lock = threading.Lock()
        self._alarm: SimpleQueue[bool] = SimpleQueue()
        self._started = 0
        self._awake = 0
        self._running: dict[str, int] = {}
        self.total = 0
        self._completed = 0
        self._waiting: OrderedDict[str, deque[_Job]] = OrderedDict()
        self._inbox: _Inbox | None = None
        self._watched: asyncio.AbstractEventLoop | None = None
        self._done_at_tick = 0
        self._tick_at = 0.0
        self._retiring = 0
        self.closed = False

    @property
    def waiting(self) -> int:
        with self._lock:
            return sum(map(len, self._waiting.values()))

    def inbox(self, loop: asyncio.AbstractEventLoop) -> _Inbox:
        """Return where jobs of this loop come back to."""
        inbox = self._inbox
        if inbox is None or inbox.loop is not loop:
            inbox = self._inbox = _Inbox(loop)
        return inbox

    def close(self) -> None:
        with self._lock:
            if not self.closed:
                self.closed = True
                for _ in range(self._started - self._awake):
                    self._alarm.put(True)

    def submit(self, job: _Job, loop: asyncio.AbstractEventLoop) -> None:
        with self._lock:
            jobs = self._waiting.get(job.workspace)
            if jobs is None:
                jobs = self._waiting[job.workspace] = deque()
            jobs.append(job)
            if not self._awake:
                try:
                    self._wake()
                except RuntimeError:
                    del self._waiting[job.workspace]
                    job.finish()
                    raise
            elif self._watched is not loop:
                self._watched = loop
                self._done_at_tick = self._completed
                self._tick_at = loop.time()
                loop.call_later(_TICK_SECONDS, self._tick, loop)

    def _tick(self, loop: asyncio.AbstractEventLoop) -> None:
        """Look whether the threads that are awake get through the work, as long as there is work that waits."""
        with self._lock:
            if self._watched is not loop:
                return
            waiting = bool(self._waiting)
            if not waiting:
                self._watched = None
        if self._inbox is not None and self._inbox.loop is loop:
            self._inbox.deliver()  # what a thread has put off and, held up by its next job, does not come round to
        if not waiting:
            return
        with self._lock:
            now = loop.time()
            done, self._done_at_tick = self._completed - self._done_at_tick, self._completed
            rate, self._tick_at = done / max(now - self._tick_at, _TICK_SECONDS), now
            if rate < _SLOW:
                runnable = sum(
                    max(0, min(len(jobs), self._per_workspace - self._running.get(workspace, 0)))
                    for workspace, jobs in self._waiting.items()
                )
                for _ in range(min(runnable if not done else 1, runnable, self._most - self._awake)):
                    self._wake()
            elif rate > _FAST and self._awake > 1:
                self._retiring = 1
        loop.call_later(_TICK_SECONDS, self._tick, loop)

    def _wake(self) -> None:
        """Let one more thread look for work; the lock is held. Raises RuntimeError when there is none to be had."""
        if self._awake == self._started:
            try:
                threading.Thread(target=self._work, name=f"files-{self._started + 1}", daemon=True).start()
            except RuntimeError:
                if not self._started:
                    raise
                return  # the system gives no more: those that are awake do it
            self._started += 1
        self._awake += 1
        self._alarm.put(True)

    def withdraw(self, job: _Job) -> bool:
        """Take a job back that no thread has taken; False when it is too late."""
        with self._lock:
            if job.taken:
                return False
            jobs = self._waiting.get(job.workspace)
            if jobs is not None and job in jobs:
                jobs.remove(job)
                if not jobs:
                    del self._waiting[job.workspace]
            return True

    def _work(self) -> None:
        while True:
            self._alarm.get()
            job = self._next(None)
            while job is not None:
                try:
                    act_as(job.account)
                    job.result = job.function(*job.args)
                except BaseException as error:  # noqa: BLE001 - whatever it is, it belongs to the caller
                    job.error = error
                done, job = job, self._next(job)
                done.inbox.put(done, last=job is None)
                del done
            if self.closed:
                return

    def _next(self, done: _Job | None) -> _Job | None:
        """Give back the slot of a job and take the next one that may run; None puts the thread to sleep."""
        with self._lock:
            if done is not None:
                self._completed += 1
                self.total -= 1
                busy = self._running[done.workspace] - 1
                if busy:
                    self._running[done.workspace] = busy
                else:
                    del self._running[done.workspace]
            if self._retiring and self._awake > 1:
                self._retiring = 0
                self._awake -= 1
                return None
            for workspace, jobs in self._waiting.items():
                busy = self._running.get(workspace, 0)
                if busy < self._per_workspace:
                    job = jobs.popleft()
                    if jobs:
                        self._waiting.move_to_end(workspace)
                    else:
                        del self._waiting[workspace]
                    job.taken = True
                    self.total += 1
                    self._running[workspace] = busy + 1
                    return job
            self._awake -= 1
            return None


class FilePool:
    """Runs blocking functions in threads of its own: at most `threads` at once, `per_workspace` of them for one root.

    They run with the file rights of this process; `acting_as` gives a way into the same threads for an account. Threads
    are started when they are first needed and are daemons: one that hangs in the kernel on a dead file system does not
    keep the process from ending. Used from one event loop at a time.
    """

    def __init__(self, threads: int = 32, per_workspace: int = 8) -> None:
        self._threads = _Threads(threads, per_workspace)
        self._account: Account | None = None

    def acting_as(self, account: Account | None) -> "FilePool":
        """Return this pool with functions running as an account; None: as they do anyway."""
        if account == self._account or account is None:
            return self
        pool = FilePool.__new__(FilePool)
        pool._threads = self._threads  # noqa: SLF001 - of the same class
        pool._account = account  # noqa: SLF001 - of the same class
        return pool

    @property
    def running(self) -> int:
        """How many functions run in threads now, abandoned ones included."""
        return self._threads.total

    @property
    def waiting(self) -> int:
        """How many functions wait for a thread."""
        return self._threads.waiting

    async def run(
        self,
        function: Callable[[*A], R],
        *args: *A,
        signal: AbortSignal,
        workspace: str,
        on_return: Callable[[], None] | None = None,
    ) -> R:
        """Run `function` in a thread and return what it returns, or raise what it raises.

        An abort while it waits for a thread: it never runs. An abort while it runs: it has 5 s to come back by itself
        (it should look at the signal between its steps), and what it returns or raises counts. After that it is
        abandoned: the call ends, the thread keeps its slot until it returns, and the signal never lets it commit.
        A cancelled task is an abort of its signal. `on_return` is called once, on the event loop, as soon as no thread
        runs the function any more: at the end, or when an abandoned thread comes back at last.

        Raises:
            Aborted: by the signal, before the function had an effect.
        """
        loop = asyncio.get_running_loop()
        threads = self._threads
        job = _Job(function, args, workspace, self._account, threads.inbox(loop), on_return)
        if signal.aborted or threads.closed:
            job.finish()
            signal.raise_if_aborted()
            raise RuntimeError("the file pool is closed")
        threads.submit(job, loop)
        timer: asyncio.TimerHandle | None = None

        def stop() -> None:
            nonlocal timer
            if threads.withdraw(job):
                job.finish()
            elif not job.returned and timer is None:
                timer = loop.call_later(ABANDON_AFTER_SECONDS, job.wake)

        def aborted() -> None:
            # In whatever thread aborts; a loop that is closed has nobody left to tell.
            with contextlib.suppress(RuntimeError):
                loop.call_soon_threadsafe(stop)

        forget = signal.add_callback(aborted)
        try:
            try:
                await job.future
            except asyncio.CancelledError:
                if not job.returned:
                    job.future = loop.create_future()
                    signal.abort(AbortReason.CANCELLED)
                    timer = timer or loop.call_later(ABANDON_AFTER_SECONDS, job.wake)
                    if timer.when() > loop.time():
                        await job.future
                raise
        finally:
            forget()
            if timer is not None:
                timer.cancel()
        if job.error is not None:
            try:
                raise job.error
            finally:
                job.error = None  # the traceback holds this frame: break the cycle
        if not job.returned or not job.taken:
            assert signal.reason is not None  # noqa: S101 - nothing else wakes the future
            raise Aborted(signal.reason)
        result: R = job.result
        return result

    def close(self) -> None:
        """Take no more work and let the threads end once theirs is done; waits for none."""
        self._threads.close()
