"""Slots for streams: how many answers that go on are open for one key and for one batch, and their end with the key."""

import asyncio
from collections.abc import Callable, Collection
from types import TracebackType
from typing import Final, Self

import structlog

from app.errors import TooManyStreams
from app.services.keys import KeyService

STREAMS_PER_KEY: Final = 2_000
STREAMS_PER_BATCH: Final = 1_000
WATCH_SECONDS: Final = 1.0
"""How often the keys of open streams are looked at."""

_log = structlog.get_logger(__name__)


class StreamSlots:
    """Counts open streams. A slot is closed when its answer has ended or its client is gone."""

    def __init__(self, per_key: int = STREAMS_PER_KEY, per_batch: int = STREAMS_PER_BATCH) -> None:
        self.per_key: Final = per_key
        self.per_batch: Final = per_batch
        self._keys: dict[str, set[StreamSlot]] = {}
        self._batches: dict[str, int] = {}

    @property
    def total(self) -> int:
        """How many streams are open."""
        return sum(map(len, self._keys.values()))

    @property
    def keys(self) -> Collection[str]:
        """The ids of the keys that have streams open."""
        return self._keys.keys()

    def of_key(self, key_id: str) -> int:
        return len(self._keys.get(key_id, ()))

    def of_batch(self, batch_id: str) -> int:
        return self._batches.get(batch_id, 0)

    def open(self, key_id: str, batch_id: str | None = None) -> "StreamSlot":
        """Return a slot for one more stream of a key, of a batch when there is one already.

        Raises:
            TooManyStreams: the key or the batch has as many as it may.
        """
        if self.of_key(key_id) >= self.per_key:
            raise TooManyStreams(f"this key has {self.per_key} streams open, which is as many as it may; close some")
        slot = StreamSlot(self, key_id)
        self._keys.setdefault(key_id, set()).add(slot)
        if batch_id is not None:
            try:
                slot.follow(batch_id)
            except TooManyStreams:
                slot.close()
                raise
        return slot

    def follow(self, batch_id: str) -> None:
        if self.of_batch(batch_id) >= self.per_batch:
            raise TooManyStreams(f"batch {batch_id} is followed by {self.per_batch} streams, which is as many as may")
        self._batches[batch_id] = self.of_batch(batch_id) + 1

    def close(self, slot: "StreamSlot") -> None:
        of_key = self._keys[slot.key_id]
        of_key.remove(slot)
        if not of_key:
            del self._keys[slot.key_id]
        batch_id = slot.batch_id
        if batch_id is not None:
            left = self._batches.pop(batch_id) - 1
            if left:
                self._batches[batch_id] = left

    def cut(self, key_id: str) -> int:
        """End the streams of a key, and return how many that were; one that has not begun is cut the next time."""
        return sum(slot.cut() for slot in self._keys.get(key_id, ()))


class StreamSlot:
    """A slot of one stream. Leaving it as a context closes it; closing it again does nothing."""

    def __init__(self, slots: StreamSlots, key_id: str) -> None:
        self._slots = slots
        self._open = True
        self._end: Callable[[], None] | None = None
        self.key_id: Final = key_id
        self.batch_id: str | None = None

    def follow(self, batch_id: str) -> None:
        """Count this stream as one of a batch.

        Raises:
            TooManyStreams: the batch has as many as it may.
        """
        self._slots.follow(batch_id)
        self.batch_id = batch_id

    def begin(self, end: Callable[[], None]) -> None:
        """Say that the stream has begun; `end` ends it and is called once at most, and not when it was closed."""
        self._end = end

    def cut(self) -> bool:
        """End the stream and return whether it had begun and was not cut before."""
        end, self._end = self._end, None
        if end is not None:
            end()
        return end is not None

    def close(self) -> None:
        self._end = None
        if self._open:
            self._open = False
            self._slots.close(self)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


async def end_with_their_keys(streams: StreamSlots, keys: KeyService) -> None:
    """Cut the streams of keys that were revoked or have expired, 1 s later at most, until cancelled.

    What that costs depends on how many keys have streams open, not on the streams nor on what they send.
    """
    while True:
        await asyncio.sleep(WATCH_SECONDS)
        try:
            for key_id in await keys.over(streams.keys):
                number = streams.cut(key_id)
                if number:
                    _log.info("streams_cut", key=key_id, streams=number)
        except Exception:  # noqa: BLE001 - a round that fails must not be the last one
            _log.exception("streams_not_looked_at")
