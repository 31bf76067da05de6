"""What a batch's rows say once its end is stored, kept in memory while it is small: an answer then needs no read."""

from dataclasses import replace
from typing import Final

from app.domain.batch import Batch
from app.storage.base import BatchChange, CallChange

RECALL_MAX_BYTES: Final = 256 * 1024
"""How many bytes of arguments and results a batch that runs keeps here; beyond that its rows are read."""


class Recall:
    """Follows the changes of one batch, in the order they are written.

    Args:
        batch: the row as it was accepted or claimed, with its calls.
    """

    def __init__(self, batch: Batch) -> None:
        self._batch = batch
        self._calls = {
            call.id: replace(
                call,
                arguments_bytes=len(call.arguments),
                result_bytes=0 if call.result is None else len(call.result),
            )
            for call in batch.calls
        }
        self._bytes = sum(call.arguments_bytes + call.result_bytes for call in self._calls.values())
        self._ended = False
        self._forget_when_large()

    def change_call(self, change: CallChange) -> None:
        call = self._calls.get(change.call_id)
        if call is None:
            return
        result = change.result
        if result is not None:
            self._bytes += len(result) - call.result_bytes
        self._calls[call.id] = replace(
            call,
            status=change.status,
            started_at=call.started_at if change.started_at is None else change.started_at,
            finished_at=call.finished_at if change.finished_at is None else change.finished_at,
            duration_ms=call.duration_ms if change.duration_ms is None else change.duration_ms,
            result=call.result if result is None else result,
            result_bytes=call.result_bytes if result is None else len(result),
            error=call.error if change.error is None else change.error,
            hooks=call.hooks if change.hooks is None else change.hooks,
        )
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
        return replace(self._batch, calls=tuple(self._calls.values()))

    def _forget_when_large(self) -> None:
        if self._bytes > RECALL_MAX_BYTES:
            self._calls.clear()
