"""What a crash left: batches whose process died are finalized or queued again, never run twice.

The unit is the batch. One with any start event ends `interrupted`; one with none is queued again.
"""

from dataclasses import dataclass

import structlog

from app.domain.abort import AbortReason
from app.execution.backends.base import Backend
from app.execution.finalizer import Finalizer
from app.storage.base import Storage
from app.storage.read_pool import ReadPool

_log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class Recovered:
    """How many batches were ended and how many queued again."""

    finalized: int = 0
    requeued: int = 0


async def recover(storage: Storage, reads: ReadPool, finalizer: Finalizer, backend: Backend) -> Recovered:
    """Take over every unfinished batch; for a process that is the only one of its database, before it is ready."""
    finalized = requeued = 0
    for unfinished in await reads.run(storage.unfinished_batches):
        batch = await finalizer.claim(unfinished.batch_id)
        if batch is None:
            continue
        if unfinished.started:
            await finalizer.finalize(batch, AbortReason.INTERRUPTED)
            finalized += 1
        elif batch.cancel_requested_at is not None:
            await finalizer.finalize(batch, AbortReason.CANCELLED)
            finalized += 1
        else:
            backend.submit(batch)
            requeued += 1
    if finalized or requeued:
        _log.info("recovered", finalized=finalized, requeued=requeued)
    return Recovered(finalized, requeued)
