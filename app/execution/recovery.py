"""What nobody runs any more: batches of dead processes are ended or given to others, never run twice.

The unit is the batch. One with any start event ends `interrupted`; one with none is queued again.
"""

import asyncio
from collections.abc import Collection
from dataclasses import dataclass
from typing import Final

import structlog

from app.domain.abort import AbortReason
from app.domain.workspace import WorkspaceStatus
from app.execution.backends.base import Backend
from app.execution.finalizer import Finalizer
from app.execution.membership import Membership
from app.storage.base import Applied, GiveBack, Storage, UnfinishedBatch, WaitingBatch
from app.storage.read_pool import ReadPool
from app.storage.record_writer import RecordWriter

TAKEN_AT_ONCE: Final = 64
SOON_SECONDS: Final = 0.05
"""How long the job of a batch has to come before it is looked for without."""

_log = structlog.get_logger(__name__)


@dataclass(slots=True)
class Recovered:
    """How many batches were ended and how many queued again."""

    finalized: int = 0
    requeued: int = 0


class Recovery:
    """Looks after batches that are nobody's: those of the dead, those that wait for this node, and wishes to cancel."""

    def __init__(
        self,
        *,
        storage: Storage,
        reads: ReadPool,
        records: RecordWriter,
        finalizer: Finalizer,
        backend: Backend,
        membership: Membership,
    ) -> None:
        self._storage = storage
        self._reads = reads
        self._records = records
        self._finalizer = finalizer
        self._backend = backend
        self._membership = membership
        self._wake = asyncio.Event()
        self._waiting = asyncio.Event()
        self._taking: set[str] = set()
        self._astray: set[str] = set()

    async def recover(self) -> Recovered:
        """Take over what processes left that are known to have ended, before this one is ready."""
        recovered = await self._sweep(stale=False)
        await self._take_waiting()
        return recovered

    def wake(self, ids: Collection[str] | None = None) -> None:
        """Look now: something was cancelled, or (None) anything may have happened."""
        if ids is None or any(self._backend.is_local(batch_id) for batch_id in ids):
            self._wake.set()

    def batches_may_wait(self) -> None:
        """Take batches of this node that wait and whose jobs do not come; a process without a node takes none."""
        self._waiting.set()

    async def keep_taking(self) -> None:
        """Take them a moment after each call of `batches_may_wait`, until cancelled.

        The engine loses a notification that arrives while it looks for a job, and then looks again after seconds.
        """
        while True:
            await self._waiting.wait()
            await asyncio.sleep(SOON_SECONDS)
            self._waiting.clear()
            try:
                await self._take_waiting()
            except Exception:  # noqa: BLE001 - a round that fails must not be the last one
                _log.exception("taking_failed")

    async def keep(self) -> None:
        """Look whenever woken, until cancelled."""
        while True:
            await self._wake.wait()
            self._wake.clear()
            try:
                await self._obey()
                await self._sweep(stale=self._membership.may_judge)
                await self._look_for_astray()
                if self._membership.may_judge and self._membership.leads:
                    await self._reads.run(self._storage.tidy)
                self.batches_may_wait()
            except Exception:  # noqa: BLE001 - a round that fails must not be the last one
                _log.exception("recovery_failed")

    async def take(self, waiting: WaitingBatch) -> None:
        """Run a batch that waits for a process of this node; nothing when another one was quicker."""
        batch_id = waiting.batch_id
        if batch_id in self._taking or self._backend.is_local(batch_id) or not self._membership.current:
            return
        self._taking.add(batch_id)
        try:
            await self._backend.room()
            claimed = await self._finalizer.claim_waiting(waiting)
            if claimed is None:
                return
            batch, workspace = claimed
            if batch.cancel_requested_at is None:
                self._backend.submit(batch, workspace)
            else:
                await self._finalizer.finalize(batch, AbortReason.CANCELLED)
        finally:
            self._taking.discard(batch_id)

    async def _take_waiting(self) -> None:
        # Those whose job was lost, or that were never given one.
        node_id = self._membership.process.node_id
        if node_id is None:
            return
        for waiting in await self._reads.run(self._storage.waiting_batches, node_id, limit=TAKEN_AT_ONCE):
            if not self._backend.has_room:
                return
            await self.take(waiting)

    async def _obey(self) -> None:
        for wish in await self._reads.run(self._storage.wishes, self._membership.process.id):
            self._backend.cancel(wish.batch_id, wish.call_id)

    async def _sweep(self, *, stale: bool) -> Recovered:
        recovered = Recovered()
        for lost in await self._reads.run(self._storage.lost_batches, stale=stale):
            if lost.process_id == self._membership.process.id:
                continue  # its row was removed while it could not say that it lives; it is back
            await self._settle(lost, recovered)
        if recovered.finalized or recovered.requeued:
            _log.info("recovered", finalized=recovered.finalized, requeued=recovered.requeued)
        return recovered

    async def _look_for_astray(self) -> None:
        """Settle batches that this process holds by their rows and does not run.

        One that was accepted or claimed a moment ago may be on its way, so it has to be found so twice.
        """
        held = await self._reads.run(self._storage.held_batches, self._membership.process.id)
        astray = {
            one.batch_id: one
            for one in held
            if not self._backend.is_local(one.batch_id) and one.batch_id not in self._taking
        }
        recovered = Recovered()
        for batch_id in astray.keys() & self._astray:
            await self._settle(astray[batch_id], recovered)
        if recovered.finalized or recovered.requeued:
            _log.warning("batches_astray", finalized=recovered.finalized, requeued=recovered.requeued)
        self._astray = set(astray)

    async def _settle(self, lost: UnfinishedBatch, recovered: Recovered) -> None:
        workspace = await self._reads.run(self._storage.workspace, lost.workspace_id)
        open_still = workspace is not None and workspace.status is WorkspaceStatus.ACTIVE
        mine = self._membership.runs_batches and lost.node_id == self._membership.process.node_id
        batch = await self._reads.run(self._storage.batch, lost.batch_id, calls=False)
        if batch is None or batch.status.terminal:
            return
        # Its process may have been silent and not dead, and have stored the start of a call since; or another one may
        # have taken it over. Then it is judged again in the next round.
        if lost.started or batch.cancel_requested_at is not None or not open_still:
            claimed = await self._finalizer.claim_as_seen(lost.batch_id, lost.epoch, lost.last_seq)
            if claimed is not None:
                reason = AbortReason.INTERRUPTED if lost.started else AbortReason.CANCELLED
                await self._finalizer.finalize(claimed, reason)
                recovered.finalized += 1
        elif mine:
            claimed = await self._finalizer.claim_as_seen(lost.batch_id, lost.epoch, lost.last_seq)
            if claimed is not None:
                self._backend.submit(claimed)
                recovered.requeued += 1
        elif lost.node_id is not None:
            back = GiveBack(lost.batch_id, lost.epoch, lost.last_seq, lost.node_id)
            if isinstance(await self._records.write(back), Applied):
                recovered.requeued += 1
