"""Slots for streams: how many answers that go on are open for one key and for one batch."""

from types import TracebackType
from typing import Final, Self

from app.errors import TooManyStreams

STREAMS_PER_KEY: Final = 2_000
STREAMS_PER_BATCH: Final = 1_000


class StreamSlots:
    """Counts open streams. A slot is closed when its answer has ended or its client is gone."""

    def __init__(self, per_key: int = STREAMS_PER_KEY, per_batch: int = STREAMS_PER_BATCH) -> None:
        self.per_key: Final = per_key
        self.per_batch: Final = per_batch
        self._keys: dict[str, int] = {}
        self._batches: dict[str, int] = {}

    @property
    def total(self) -> int:
        """How many streams are open."""
        return sum(self._keys.values())

    def of_key(self, key_id: str) -> int:
        return self._keys.get(key_id, 0)

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
        _increase(self._keys, key_id)
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
        _increase(self._batches, batch_id)

    def close(self, key_id: str, batch_id: str | None) -> None:
        _decrease(self._keys, key_id)
        if batch_id is not None:
            _decrease(self._batches, batch_id)


class StreamSlot:
    """A slot of one stream. Leaving it as a context closes it; closing it again does nothing."""

    def __init__(self, slots: StreamSlots, key_id: str) -> None:
        self._slots = slots
        self._key_id = key_id
        self._batch_id: str | None = None
        self._open = True

    def follow(self, batch_id: str) -> None:
        """Count this stream as one of a batch.

        Raises:
            TooManyStreams: the batch has as many as it may.
        """
        self._slots.follow(batch_id)
        self._batch_id = batch_id

    def close(self) -> None:
        if self._open:
            self._open = False
            self._slots.close(self._key_id, self._batch_id)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _increase(counts: dict[str, int], name: str) -> None:
    counts[name] = counts.get(name, 0) + 1


def _decrease(counts: dict[str, int], name: str) -> None:
    left = counts[name] - 1
    if left:
        counts[name] = left
    else:
        del counts[name]
