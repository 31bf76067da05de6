"""The event log: the only way to read a batch's stream, replayed and live alike.

The rows are the truth. Per watched batch there is one ring of frames, filled after each commit of this process, so that
many followers of a live batch share one encoding; a follower whose cursor the ring does not reach reads rows in pages.
A slow follower is only an old cursor: nothing is queued for it.
"""

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, Callable, Collection, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Final, Literal

from app.domain.events import EventType, OutputStream, StoredEvent
from app.errors import InvalidCursor, NotFound, OutputGone
from app.events.frames import SNAPSHOT_BYTES, frame, merge_output, resync_frame, snapshot_frame
from app.events.notifier import Notifier
from app.storage.base import Append, Applied, Storage, SubmitBatch, Write, WriteOutcome
from app.storage.read_pool import ReadPool

Updates = Literal["delta", "snapshot", "none"]

RING_FRAMES: Final = 256
RING_BYTES: Final = 1024 * 1024
PAGE_EVENTS: Final = 256
CHUNK_BYTES: Final = 64 * 1024
POLL_SECONDS: Final = 1.0

_UPDATE_TYPES: Final = frozenset({EventType.TOOL_EXECUTION_UPDATE, EventType.OUTPUT_GAP})


@dataclass(frozen=True, slots=True)
class _Frame:
    event: StoredEvent
    data: bytes

    @property
    def seq(self) -> int:
        return self.event.seq


class _Watched:
    """The ring of one batch that somebody follows."""

    def __init__(self) -> None:
        self.followers = 0
        self.ended = False
        self.gone = False
        self.changed = Notifier()
        self.poll = asyncio.Lock()
        self.polls = 0
        self.stale = False
        self._frames: deque[_Frame] = deque()
        self._bytes = 0

    def push(self, events: Sequence[StoredEvent]) -> None:
        for event in events:
            if self._frames and event.seq != self._frames[-1].seq + 1:
                if event.seq <= self._frames[-1].seq:
                    continue
                self._frames.clear()
                self._bytes = 0
            made = _Frame(event, frame(event))
            self._frames.append(made)
            self._bytes += len(made.data)
            self.ended = self.ended or event.type is EventType.BATCH_END
            while len(self._frames) > RING_FRAMES or (self._bytes > RING_BYTES and len(self._frames) > 1):
                self._bytes -= len(self._frames.popleft().data)
        self.changed.notify()

    @property
    def head(self) -> int:
        """The last seq in the ring; 0 when it is empty."""
        return self._frames[-1].seq if self._frames else 0

    def after(self, cursor: int) -> list[_Frame] | None:
        """Return the frames after `cursor`; None when the ring does not reach back that far."""
        if not self._frames or self._frames[0].seq > cursor + 1:
            return None
        first = self._frames[0].seq
        return [self._frames[index] for index in range(max(0, cursor + 1 - first), len(self._frames))]


class EventLog:
    """Reads streams for any number of followers.

    Args:
        is_local: whether a batch is run by this process; others are looked at when `woken` names them, and once a
            second, since no commit of theirs passes here.
    """

    def __init__(self, storage: Storage, reads: ReadPool, *, is_local: Callable[[str], bool]) -> None:
        self._storage = storage
        self._reads = reads
        self._is_local = is_local
        self._watched: dict[str, _Watched] = {}

    @property
    def followers(self) -> int:
        """How many streams are open."""
        return sum(watched.followers for watched in self._watched.values())

    def committed(self, writes: Sequence[tuple[Write, WriteOutcome]]) -> None:
        """Take what one transaction committed; called on the loop before anybody who waited for it goes on."""
        for write, outcome in writes:
            if not isinstance(outcome, Applied):
                continue
            if isinstance(write, Append):
                watched = self._watched.get(write.batch_id)
                if watched is not None:
                    watched.push(merge_output(write.events, write.output))
            elif isinstance(write, SubmitBatch):
                watched = self._watched.get(write.batch.id)
                if watched is not None:
                    watched.push([write.start])

    def woken(self, ids: Collection[str] | None) -> None:
        """Look at batches of other processes that may have moved on: those named, or (None) all that are watched."""
        for batch_id in self._watched if ids is None else ids:
            watched = self._watched.get(batch_id)
            if watched is not None and not self._is_local(batch_id):
                watched.stale = True
                watched.changed.notify()

    async def open(self, batch_id: str, cursor: int, updates: Updates) -> AsyncGenerator[bytes, None] | None:
        """Return the stream after `cursor`; None when `cursor` is the seq of `batch_end` and nothing can follow.

        Raises:
            NotFound: there is no such batch.
            InvalidCursor: the cursor is negative or above the last stored seq.
        """
        position = await self._reads.run(self._storage.last_seq, batch_id)
        if position is None:
            raise NotFound(f"there is no batch {batch_id}")
        last_seq, status = position
        if not 0 <= cursor <= last_seq:
            raise InvalidCursor(
                f"the cursor {cursor} is not an event id of this batch: they go from 1 to {last_seq}; "
                "use 0 to read from the start"
            )
        if status.terminal and cursor == last_seq:
            return None
        return self.follow(batch_id, cursor, updates)

    async def follow(self, batch_id: str, after: int, updates: Updates = "delta") -> AsyncGenerator[bytes, None]:
        """Yield whole SSE frames after `after`, stored and live, until `batch_end` has been yielded.

        Where updates have been removed, one `resync` stands before what is left; a stream without updates misses
        nothing. The stream ends early when the batch is removed.
        """
        expected = after + 1
        whole = updates == "none"
        painter = _Painter(self._storage, self._reads) if updates == "snapshot" else None
        async with aclosing(self._pages(batch_id, after)) as pages:
            async for frames in pages:
                chunk: list[bytes] = []
                size = 0
                for item in frames:
                    if item.seq > expected and not whole:
                        chunk.append(resync_frame(batch_id, expected, item.seq - 1))
                        whole = True
                    expected = item.seq + 1
                    if updates == "none" and item.event.type in _UPDATE_TYPES:
                        continue
                    data = item.data if painter is None else await painter.paint(item)
                    chunk.append(data)
                    size += len(data)
                    if size >= CHUNK_BYTES:
                        yield b"".join(chunk)
                        chunk, size = [], 0
                if chunk:
                    yield b"".join(chunk)

    async def follow_output(
        self, batch_id: str, call_id: str, stream: OutputStream | None, start: int
    ) -> AsyncGenerator[bytes, None]:
        """Yield a call's captured bytes from `start` on as they are stored, until the call has ended.

        Raises:
            OutputGone: retention removed output meanwhile.
        """
        position = start
        async with aclosing(self._pages(batch_id, 0)) as pages:
            async for frames in pages:
                for item in frames:
                    for row in item.event.output:
                        if row.call_id != call_id or (stream is not None and row.stream != stream):
                            continue
                        offset = row.combined_offset if stream is None else row.stream_offset
                        skip = max(0, position - offset)
                        if skip < len(row.data):
                            yield row.data[skip:]
                            position = offset + len(row.data)
                    if item.event.type is EventType.TOOL_EXECUTION_END and item.event.call_id == call_id:
                        if await self._reads.run(self._storage.output_extent, call_id, stream) is None:
                            raise OutputGone("the output was removed while it was read")
                        return

    async def wait_terminal(self, batch_id: str, seconds: float) -> bool | None:
        """Wait at most `seconds` for the batch to end; return whether it has, None when there is no such batch."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + seconds
        watched = self._watch(batch_id)
        try:
            while True:
                seen = watched.changed.version
                position = await self._reads.run(self._storage.last_seq, batch_id)
                if position is None:
                    return None
                if position[1].terminal:
                    return True
                while not watched.ended:
                    left = deadline - loop.time()
                    if left <= 0:
                        return False
                    await watched.changed.wait(seen, min(left, POLL_SECONDS))
                    if not self._is_local(batch_id):
                        break
                    seen = watched.changed.version
        finally:
            self._unwatch(batch_id, watched)

    # -- the one loop -----------------------------------------------------------------------------------------------

    async def _pages(self, batch_id: str, after: int) -> AsyncGenerator[Sequence[_Frame], None]:
        cursor = after
        watched = self._watch(batch_id)
        try:
            while True:
                seen = watched.changed.version
                frames = watched.after(cursor)
                if frames is None:
                    frames = await self._reads.run(self._read_frames, batch_id, cursor)
                if watched.gone:
                    return
                if not frames:
                    await self._wait(batch_id, watched, seen, cursor)
                    continue
                yield frames
                cursor = frames[-1].seq
                if frames[-1].event.type is EventType.BATCH_END:
                    return
        finally:
            self._unwatch(batch_id, watched)

    def _read_frames(self, batch_id: str, cursor: int) -> list[_Frame]:
        return [_Frame(event, frame(event)) for event in self._read_events(batch_id, cursor)]

    def _read_events(self, batch_id: str, cursor: int) -> list[StoredEvent]:
        return self._storage.events(batch_id, after=cursor, limit=PAGE_EVENTS)

    async def _wait(self, batch_id: str, watched: _Watched, seen: int, cursor: int) -> None:
        # A batch of this process wakes its followers after each commit. One of another process is looked at when that
        # tells of it, and once a second in any case, by one of its followers for all of them.
        polls = watched.polls
        while not watched.stale:
            if await watched.changed.wait(seen, POLL_SECONDS):
                if not watched.stale:
                    return
            elif not self._is_local(batch_id):
                break
        async with watched.poll:
            if watched.polls != polls and not watched.stale:
                return
            told, watched.stale = watched.stale, False
            watched.polls += 1
            events = await self._reads.run(self._read_events, batch_id, watched.head or cursor)
            if events:
                # There may be more than a page holds.
                watched.stale = True
                watched.push(events)
            elif not told and await self._reads.run(self._storage.last_seq, batch_id) is None:
                watched.gone = True
                watched.changed.notify()

    def _watch(self, batch_id: str) -> _Watched:
        watched = self._watched.get(batch_id)
        if watched is None:
            watched = self._watched[batch_id] = _Watched()
        watched.followers += 1
        return watched

    def _unwatch(self, batch_id: str, watched: _Watched) -> None:
        watched.followers -= 1
        if watched.followers == 0:
            self._watched.pop(batch_id, None)


class _Painter:
    """Turns deltas into snapshots for one follower: the last `SNAPSHOT_BYTES` of each call's text so far."""

    def __init__(self, storage: Storage, reads: ReadPool) -> None:
        self._storage = storage
        self._reads = reads
        self._tails: dict[str, tuple[bytes, int]] = {}

    async def paint(self, item: _Frame) -> bytes:
        event = item.event
        if not event.output or event.call_id is None:
            return item.data
        first = event.output[0].combined_offset
        tail, total = self._tails.get(event.call_id, (b"", 0))
        if total != first:
            # The follower began in the middle of this call: what went before is read once.
            start = max(0, first - SNAPSHOT_BYTES)
            tail = await self._reads.run(self._before, event.call_id, start, first)
        data = tail + b"".join(row.data for row in event.output)
        total = first + sum(len(row.data) for row in event.output)
        tail = data[-SNAPSHOT_BYTES:]
        while tail and tail[0] & 0xC0 == 0x80 and len(tail) > SNAPSHOT_BYTES - 4:
            tail = tail[1:]
        self._tails[event.call_id] = (tail, total)
        return snapshot_frame(event, tail.decode("utf-8", "replace"), total)

    def _before(self, call_id: str, start: int, end: int) -> bytes:
        return b"".join(self._storage.output(call_id, None, start=start, end=end))
