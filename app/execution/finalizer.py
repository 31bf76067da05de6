"""Ending a batch that nobody runs: one function for recovery, for a lost row and for a batch that waits."""

import structlog

from app.domain.abort import AbortReason
from app.domain.batch import Batch, BatchStatus
from app.domain.tool_call import CallRecord, CallStatus, Outcome
from app.domain.workspace import Workspace
from app.errors import Fenced
from app.events.batch_writer import BatchWriter
from app.execution.executor import not_started, stopped, summarize
from app.storage.base import Applied, ClaimBatch, Storage, WaitingBatch
from app.storage.read_pool import ReadPool
from app.storage.record_writer import RecordWriter

_log = structlog.get_logger(__name__)


class Finalizer:
    """Claims and ends batches. A claim raises the epoch, so whoever wrote the batch before no longer can.

    Args:
        process_id: who holds what is claimed.
    """

    def __init__(
        self, storage: Storage, reads: ReadPool, records: RecordWriter, *, process_id: str | None = None
    ) -> None:
        self._storage = storage
        self._reads = reads
        self._records = records
        self._process_id = process_id

    async def claim(self, batch_id: str) -> Batch | None:
        """Take a batch over and return it with its calls; None when it is terminal or somebody else was quicker."""
        batch = await self._reads.run_patiently(self._storage.batch, batch_id, calls=False)
        if batch is None or batch.status.terminal:
            return None
        return await self.claim_as_seen(batch_id, batch.epoch)

    async def claim_as_seen(self, batch_id: str, epoch: int, last_seq: int | None = None) -> Batch | None:
        """Take a batch over unless somebody has since `epoch` or stored an event after `last_seq`; then return None."""
        claim = ClaimBatch(batch_id, epoch, self._process_id, last_seq=last_seq)
        if not isinstance(await self._records.write(claim), Applied):
            return None
        return _still_claimed(await self._reads.run_patiently(self._storage.batch, batch_id), claim)

    async def claim_waiting(self, waiting: WaitingBatch) -> tuple[Batch, Workspace] | None:
        """Take over a batch that waits and return it with its workspace; None when a process holds it by now."""
        claim = ClaimBatch(waiting.batch_id, waiting.epoch, self._process_id, only_waiting=True)
        if not isinstance(await self._records.write(claim), Applied):
            return None
        return await self._reads.run_patiently(self._with_workspace, claim)

    def _with_workspace(self, claim: ClaimBatch) -> tuple[Batch, Workspace] | None:
        batch = _still_claimed(self._storage.batch(claim.batch_id), claim)
        workspace = None if batch is None else self._storage.workspace(batch.workspace_id)
        return None if batch is None or workspace is None else (batch, workspace)

    async def finalize(self, batch: Batch, reason: AbortReason) -> None:
        """End a claimed batch that nothing runs; return once its end is stored."""
        writer = BatchWriter(batch, self._records, capture_bytes=lambda _tool: 0, on_fenced=lambda: None)
        statuses: list[CallStatus] = []
        terminate = True
        for record in batch.calls:
            if record.status.terminal:
                statuses.append(record.status)
                continue
            outcome = _outcome(record, reason)
            writer.call_ended(record.to_call(), outcome)
            statuses.append(outcome.status)
            terminate = False
        status = BatchStatus.CANCELLED if reason is AbortReason.CANCELLED else BatchStatus.INTERRUPTED
        mode = batch.effective_mode or batch.execution_mode
        has_errors = any(status is not CallStatus.SUCCEEDED for status in statuses)
        try:
            await writer.batch_ended(
                status, summarize(statuses), mode, has_errors=has_errors, terminate=terminate and batch.terminate
            )
        except Fenced:
            _log.warning("batch_fenced", batch_id=batch.id)


def _still_claimed(batch: Batch | None, claim: ClaimBatch) -> Batch | None:
    """Return a batch as it was read after a claim; None when somebody has taken it over in between.

    Whoever writes with the epoch that was read, and not with that of its claim, is not held up by the fence.
    """
    return None if batch is None or batch.epoch != claim.epoch + 1 else batch


def _outcome(record: CallRecord, reason: AbortReason) -> Outcome:
    if record.status is CallStatus.RUNNING:
        return stopped(reason, started=True)
    return not_started(reason)
