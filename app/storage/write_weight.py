"""What a write weighs while it waits: the rows it brings and the bytes they hold in memory."""

from dataclasses import dataclass

from app.storage.base import Append, SubmitBatch, Write


@dataclass(frozen=True, slots=True)
class Weight:
    """`rows` of events, calls and output, at least one; `bytes` of arguments, results, output and events' JSON."""

    rows: int
    bytes: int


def weigh(write: Write) -> Weight:
    """Return the weight of a write; of those that bring no texts of callers it is one row and nothing."""
    if isinstance(write, Append):
        size = sum(len(event.data) for event in write.events) + sum(len(row.data) for row in write.output)
        size += sum(len(change.result) for change in write.calls if change.result is not None)
        return Weight(len(write.events) + len(write.output), size)
    if isinstance(write, SubmitBatch):
        size = len(write.start.data) + sum(len(call.arguments) for call in write.batch.calls)
        return Weight(1 + len(write.batch.calls), size)
    return _LIGHT


_LIGHT = Weight(1, 0)
