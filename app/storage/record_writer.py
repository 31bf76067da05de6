"""RecordWriter: one thread that commits what the event loop hands over, as many writes at a time as have gathered.

There is no timer: while a group is being committed the next one gathers, so a lone write waits for nobody and a
thousand share one fsync.

What happens to a write whose commit fails:

- The database is away, busy or full: its group stays whole and is tried again with back-off, for the life of the
  process. An end that cannot be stored waits in memory and is never replaced by an invented one.
- A value does not fit: the writes of the group are applied one by one, so that only the one at fault gets the
  DataError. Later appends of its batch meet the fence, as there is a gap before them, and are Refused.
- Accepts of new work are submitted as `droppable`. They are given up when their caller went away before the first
  attempt, at once when the disk is full (NoSpace), and when the database has been away for some seconds
  (StorageUnavailable). All of this only while it is certain that they are not in the database: once the connection was
  lost in the middle of a COMMIT that held them, they are tried again until their fate is known, and then reported as
  Applied or Refused, however long that takes and whether or not anybody still waits. A batch that was accepted this
  way is told to `on_commit` like any other, so that it is run.
"""

import asyncio
import contextlib
import random
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from queue import Empty, SimpleQueue
from typing import Final

from app.errors import NoSpace, StorageUnavailable
from app.storage.ballast import Ballast
from app.storage.base import DataError, OperationalError, Storage, Write, WriteOutcome
from app.storage.write_weight import Weight, weigh

CAPACITY_ROWS: Final = 4096
CAPACITY_BYTES: Final = 64 * 1024 * 1024
GROUP_LIMIT: Final = 512
UNAVAILABLE_SECONDS: Final = 5.0
FIRST_RETRY_SECONDS: Final = 0.01
LAST_RETRY_SECONDS: Final = 1.0
ROOM_CHECK_SECONDS: Final = 1.0
CLOSE_SECONDS: Final = 10.0

Commit = Sequence[tuple[Write, WriteOutcome]]

_NO_SPACE: Final = "the disk under the database is full; nothing was stored"
_UNAVAILABLE: Final = "the database does not answer; nothing was stored"
_CLOSED: Final = "the service is stopping and does not wait for the database any more"


class _Item:
    """A write on its way. Touched by the thread alone, but for its future, which belongs to the loop."""

    __slots__ = ("alone", "droppable", "future", "in_doubt", "weight", "write")

    def __init__(self, write: Write, future: asyncio.Future[WriteOutcome], *, droppable: bool) -> None:
        self.write = write
        self.weight = weigh(write)
        self.future = future
        self.droppable = droppable
        self.in_doubt = False
        self.alone = False

    @property
    def may_drop(self) -> bool:
        return self.droppable and not self.in_doubt


_Done = list[tuple[_Item, WriteOutcome | Exception | None]]
"""How writes ended; None for one whose caller had gone."""


class RecordWriter:
    """Commits writes in groups from one daemon thread.

    Args:
        capacity_rows: how many rows may wait before `overloaded` is true. None is refused: services refuse new work.
        capacity_bytes: the same for the bytes these rows hold.
        group_limit: how many writes one transaction takes at most.
        on_commit: called on the loop once per commit with all its writes and outcomes, before any of their futures is
            resolved.
        on_death: called on the loop when the thread ends by an error of its own; every future has failed by then and
            nothing can be stored any more.
        on_group: called in the thread after each commit with the number of its writes and the seconds it took.
        ballast: given up when the disk is full and made again when there is room.
        unavailable_after: seconds without the database after which droppable writes fail.
    """

    def __init__(
        self,
        storage: Storage,
        *,
        capacity_rows: int = CAPACITY_ROWS,
        capacity_bytes: int = CAPACITY_BYTES,
        group_limit: int = GROUP_LIMIT,
        on_commit: Callable[[Commit], None] | None = None,
        on_death: Callable[[BaseException], None] | None = None,
        on_group: Callable[[int, float], None] = lambda _writes, _seconds: None,
        ballast: Ballast | None = None,
        unavailable_after: float = UNAVAILABLE_SECONDS,
    ) -> None:
        self._storage = storage
        self.capacity_rows: Final = capacity_rows
        self.capacity_bytes: Final = capacity_bytes
        self._group_limit = group_limit
        self._on_commit = on_commit
        self._on_death = on_death
        self._on_group = on_group
        self._ballast = ballast
        self._unavailable_after = unavailable_after
        self._queue: SimpleQueue[_Item | None] = SimpleQueue()
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="record-writer", daemon=True)
        # Of the loop; the first two are set by start().
        self._loop: asyncio.AbstractEventLoop
        self._ended: asyncio.Future[None]
        self._pending = 0
        self._rows = 0
        self._bytes = 0
        self._idle: set[asyncio.Future[None]] = set()
        self._failure: StorageUnavailable | None = None
        # Of the thread; the loop only looks at `_full`.
        self._group: list[_Item] = []
        self._backlog: deque[_Item] = deque()
        self._full = False
        self._room_check = 0.0

    # -- the loop's side ----------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Start the thread; from now on the writer belongs to the running loop."""
        self._loop = asyncio.get_running_loop()
        self._ended = self._loop.create_future()
        self._thread.start()

    def submit(self, write: Write, *, droppable: bool = False) -> asyncio.Future[WriteOutcome]:
        """Hand a write over and return at once; the future holds what became of it.

        Nobody has to look at the future. Cancelling it does not take the write back, unless it is droppable and was
        not tried yet. It fails with DataError, and a droppable write's with NoSpace or StorageUnavailable; after the
        writer was closed or has died, with StorageUnavailable.
        """
        future: asyncio.Future[WriteOutcome] = self._loop.create_future()
        if self._failure is not None:
            _fail(future, self._failure)
            return future
        item = _Item(write, future, droppable=droppable)
        self._pending += 1
        self._rows += item.weight.rows
        self._bytes += item.weight.bytes
        self._queue.put(item)
        return future

    async def write(self, write: Write, *, droppable: bool = False) -> WriteOutcome:
        """Submit a write and wait for its outcome; raises what `submit` says its future fails with."""
        return await self.submit(write, droppable=droppable)

    @property
    def depth(self) -> int:
        """How many writes wait or are being committed."""
        return self._pending

    @property
    def weight(self) -> Weight:
        """What waits or is being committed, in rows and bytes."""
        return Weight(self._rows, self._bytes)

    @property
    def overloaded(self) -> bool:
        """Whether as many rows or bytes wait as may, so that new work has to be refused."""
        return self._rows >= self.capacity_rows or self._bytes >= self.capacity_bytes

    @property
    def full(self) -> bool:
        """Whether the disk under the database is full: what room the ballast gave is for the ends of what runs."""
        return self._full

    async def drain(self, timeout: float) -> bool:  # noqa: ASYNC109 - a bound that is an answer, not an error
        """Wait until nothing waits to be stored, at most `timeout` seconds; return whether that came about."""
        if self._pending == 0:
            return True
        idle: asyncio.Future[None] = self._loop.create_future()
        self._idle.add(idle)
        try:
            done, _ = await asyncio.wait([idle], timeout=timeout)
        finally:
            self._idle.discard(idle)
        return bool(done)

    async def close(self) -> None:
        """End the thread after the attempt it is at; what still waits fails with StorageUnavailable."""
        if self._failure is None:
            self._failure = StorageUnavailable(_CLOSED)
        self._stopping.set()
        if self._thread.is_alive():
            self._queue.put(None)
            await asyncio.wait([self._ended], timeout=CLOSE_SECONDS)

    def _resolve(self, done: _Done, committed: Commit) -> None:
        try:
            if committed and self._on_commit is not None:
                self._on_commit(committed)
        finally:
            for item, outcome in done:
                if item.future.done():
                    continue
                if outcome is None:
                    item.future.cancel()
                elif isinstance(outcome, Exception):
                    _fail(item.future, outcome)
                else:
                    item.future.set_result(outcome)
            self._pending -= len(done)
            self._rows -= sum(item.weight.rows for item, _ in done)
            self._bytes -= sum(item.weight.bytes for item, _ in done)
            if self._pending == 0:
                for idle in self._idle:
                    if not idle.done():
                        idle.set_result(None)

    def _end(self, left: list[_Item], error: BaseException | None) -> None:
        if error is not None:
            self._failure = StorageUnavailable("the thread that stores records has died; nothing can be stored")
        failure = self._failure or StorageUnavailable(_CLOSED)
        # Behind what the thread knew of is what was handed over after it last looked.
        with contextlib.suppress(Empty):
            while True:
                item = self._queue.get_nowait()
                if item is not None:
                    left.append(item)
        self._resolve([(item, failure) for item in left], ())
        if not self._ended.done():
            self._ended.set_result(None)
        if error is not None and self._on_death is not None:
            self._on_death(error)

    # -- the thread's side --------------------------------------------------------------------------------------------

    def _run(self) -> None:
        error: BaseException | None = None
        try:
            if self._ballast is not None:
                self._full = not self._ballast.make()
            while not self._stopping.is_set():
                self._take_group()
                self._commit()
                self._look_for_room()
        except BaseException as caught:  # noqa: BLE001 - whatever it was, the loop has to hear of it
            error = caught
        self._call(self._end, [*self._group, *self._backlog], error)

    def _take_group(self) -> None:
        """Wait for writes and take the first of them: at most `group_limit`, or one that has to go alone."""
        if not self._backlog:
            # A full disk may have room again without a write to tell.
            self._gather(ROOM_CHECK_SECONDS if self._full else None)
        self._gather(0)
        group = self._group
        done: _Done = []
        while self._backlog and len(group) < self._group_limit:
            item = self._backlog[0]
            if item.alone and group:
                break
            group.append(self._backlog.popleft())
            if item.may_drop and item.future.cancelled():
                done.append((group.pop(), None))
            elif item.may_drop and self._full:
                done.append((group.pop(), NoSpace(_NO_SPACE)))
            elif item.alone:
                break
        self._report(done)

    def _gather(self, seconds: float | None) -> None:
        """Move what was handed over to the backlog, waiting `seconds` for the first (None: without end)."""
        try:
            item = self._queue.get_nowait() if seconds == 0 else self._queue.get(timeout=seconds)
            while item is not None:
                self._backlog.append(item)
                item = self._queue.get_nowait()
        except Empty:
            return

    def _commit(self) -> None:
        """Apply the group until it is stored, taken apart or dropped, or the writer is closed."""
        pause = FIRST_RETRY_SECONDS
        failing_since = time.monotonic()
        while self._group and not self._stopping.is_set():
            began = time.perf_counter()
            try:
                outcomes = self._storage.apply([item.write for item in self._group])
            except DataError as error:
                self._isolate(error)
                return
            except OperationalError as error:
                for item in self._group:
                    item.in_doubt = item.in_doubt or error.in_doubt
                if error.reason == "full":
                    self._disk_is_full()
                self._stopping.wait(pause * random.uniform(0.75, 1.25))  # noqa: S311 - jitter
                pause = min(pause * 2, LAST_RETRY_SECONDS)
                self._gather(0)
                if self._full:
                    self._drop(NoSpace(_NO_SPACE))
                elif time.monotonic() - failing_since >= self._unavailable_after:
                    self._drop(StorageUnavailable(_UNAVAILABLE))
            else:
                self._on_group(len(self._group), time.perf_counter() - began)
                done: _Done = list(zip(self._group, outcomes, strict=True))
                self._group.clear()
                self._call(self._resolve, done, [(item.write, outcome) for item, outcome in done])
                return

    def _isolate(self, error: DataError) -> None:
        if len(self._group) == 1:
            self._report([(self._group.pop(), error)])
            return
        for item in reversed(self._group):
            item.alone = True
            self._backlog.appendleft(item)
        self._group.clear()

    def _disk_is_full(self) -> None:
        self._full = True
        self._room_check = time.monotonic() + ROOM_CHECK_SECONDS
        if self._ballast is not None:
            self._ballast.free()
        self._drop(NoSpace(_NO_SPACE))

    def _drop(self, error: NoSpace | StorageUnavailable) -> None:
        """Give up droppable writes: those of the group and those behind it."""
        done: _Done = [(item, error) for item in (*self._group, *self._backlog) if item.may_drop]
        if done:
            self._group[:] = [item for item in self._group if not item.may_drop]
            self._backlog = deque(item for item in self._backlog if not item.may_drop)
        self._report(done)

    def _look_for_room(self) -> None:
        if not self._full or time.monotonic() < self._room_check:
            return
        self._room_check = time.monotonic() + ROOM_CHECK_SECONDS
        # Without a ballast only the next write can tell.
        self._full = self._ballast is not None and not self._ballast.make()

    def _report(self, done: _Done) -> None:
        if done:
            self._call(self._resolve, done, ())

    def _call(self, function: Callable[..., None], *args: object) -> None:
        # A loop that is closed has nobody left to tell.
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(function, *args)


def _fail(future: asyncio.Future[WriteOutcome], error: Exception) -> None:
    future.set_exception(error)
    # Looked at once, so that a future nobody waits for is not logged as forgotten.
    future.exception()
