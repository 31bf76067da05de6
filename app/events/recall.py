"""What a batch's rows say once its end is stored, kept in memory while it is small: an answer then needs no read."""

from dataclasses import replace
from typing import Final

from app.domain.batch import Batch
from app.domain.tool_call import CallRecord
from app.storage.base import BatchChange, CallChange

RECALL_MAX_BYTES: Final = 256 * 1024
"""How many bytes of arguments and results a batch that runs keeps here; beyond that its rows are read."""

_CALL_FIELDS: Final = ("status", "started_at", "finished_at", "duration_ms", "result", "error", "hooks")


class Recall:
    """Follows the changes of one batch, in the order they are written.

    Args:
        batch: the row as it was accepted or claimed, with its calls.
    """

    def __init__(self, batch: Batch) -> None:
        self._batch = batch
        self._calls = {call.id: call for call in batch.calls}
        # Put together when they are asked for: a call changes twice at least, and is shown once or never.
        self._changes: dict[str, list[CallChange]] = {call.id: [] for call in batch.calls}
        self._bytes = sum(len(call.arguments) + len(call.result or b"") for call in batch.calls)
        self._ended = False
        self._forget_when_large()

    def change_call(self, change: CallChange) -> None:
        changes = self._changes.get(change.call_id)
        if changes is None:
            return
        changes.append(change)
        if change.result is not None:
            self._bytes += len(change.result)
            self._forget_when_large()

    def end(self, change: BatchChange, last_seq: int) -> None:
        """Take the change that ends the batch; `last_seq` is the number of its last event."""
        self._ended = True
        batch = self._batch
        self._batch = replace(
            batch,
            status=change.status,
            effective_mode=batch.effective_mode if change.effective_mode is None else change.effective_mode,
            started_at=batch.started_at if change.started_at is None else change.started_at,
            finished_at=batch.finished_at if change.finished_at is None else change.finished_at,
            has_errors=batch.has_errors if change.has_errors is None else change.has_errors,
            terminate=batch.terminate if change.terminate is None else change.terminate,
            summary=batch.summary if change.summary is None else change.summary,
            last_seq=last_seq,
        )

    @property
    def batch(self) -> Batch | None:
        """The ended batch with its calls; None before its end, or when it is too large to be kept."""
        if not self._ended or (self._batch.calls and not self._calls):
            return None
        return replace(self._batch, calls=tuple(map(self._changed, self._calls.values())))

    def _changed(self, call: CallRecord) -> CallRecord:
        values = {
            name: value
            for change in self._changes[call.id]
            for name in _CALL_FIELDS
            if (value := getattr(change, name)) is not None
        }
        result = values.get("result", call.result)
        return replace(call, **values, arguments_bytes=len(call.arguments), result_bytes=len(result or b""))

    def _forget_when_large(self) -> None:
        if self._bytes > RECALL_MAX_BYTES:
            self._calls.clear()
            self._changes.clear()
