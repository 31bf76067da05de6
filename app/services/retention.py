"""Retention: old output, then old update events, then old batches are removed, a small piece at a time."""

import asyncio
import time
from collections.abc import Callable, Iterable
from typing import Final

import structlog

from app.domain.clock import now_ms
from app.domain.retention import Removal, RemovedCounts, RetentionPolicy
from app.errors import AppError
from app.storage.base import GiveBackPages, RemoveAudit, Removed, RemoveFromBatch, RemoveWorkspace, Storage, Write
from app.storage.read_pool import ReadPool
from app.storage.record_writer import RecordWriter

ROUND_SECONDS: Final = 60.0
SHORTEST_ROUND_SECONDS: Final = 1.0
# A removal takes no more of the record writer's time than it leaves to live batches.
LONGEST_PAUSE_SECONDS: Final = 0.5
BATCHES_AT_ONCE: Final = 64
WORKSPACES_AT_ONCE: Final = 256
PAGES_AT_ONCE: Final = 256
AUDIT_AT_ONCE: Final = 256

_STEPS: Final = (Removal.ALL, Removal.UPDATES, Removal.OUTPUT)

_log = structlog.get_logger(__name__)


class Retention:
    """Removes what has been kept for long enough.

    Only of batches that have ended, counted from their end. Every removal is a write of its own to the record writer,
    with a pause after it, so that what live batches store waits for one of them at most.
    """

    def __init__(
        self,
        *,
        storage: Storage,
        reads: ReadPool,
        records: RecordWriter,
        policy: RetentionPolicy,
        now: Callable[[], int] = now_ms,
    ) -> None:
        self._storage = storage
        self._reads = reads
        self._records = records
        self._policy = policy
        self._now = now
        self.removed = RemovedCounts()
        """What was removed since the start of the process."""

    async def keep(self, mine: Callable[[], bool] = lambda: True) -> None:
        """Remove what is due, round after round, until cancelled.

        A round in which `mine` says no is left to another process.
        """
        while True:
            try:
                if mine():
                    await self.round()
            except AppError as error:
                _log.warning("retention_put_off", code=error.code, detail=error.detail)
            except Exception:  # noqa: BLE001 - a round that fails must not be the last one
                _log.exception("retention_failed")
            await asyncio.sleep(self._pause())

    async def round(self) -> RemovedCounts:
        """Remove everything that is due now and return how much that was.

        Raises:
            NoSpace, StorageUnavailable: the database cannot be written; what was removed until then stays removed.
        """
        before = self.removed
        try:
            for step in _STEPS:
                # What an earlier round did not bring to its end, whatever the policy says now.
                await self._remove((step.going,), step, self._now() + 1)
                age = self._policy.seconds(step)
                if age is not None:
                    await self._remove(_before(step), step, self._now() - age * 1000)
            if self._policy.record_seconds is not None:
                await self._remove_workspaces(self._now() - self._policy.record_seconds * 1000)
            if self._policy.audit_seconds is not None:
                await self._apply(RemoveAudit(self._now() - self._policy.audit_seconds * 1000, AUDIT_AT_ONCE))
            if self.removed != before:
                await self._apply(GiveBackPages(PAGES_AT_ONCE))
        finally:
            done = self.removed - before
            if done != RemovedCounts():
                _log.info("retention", **done.to_json())
        return done

    async def _remove(self, found_at: Iterable[Removal], to: Removal, ended_before: int) -> None:
        while True:
            due = await self._reads.run(
                self._storage.removable_batches, tuple(found_at), ended_before=ended_before, limit=BATCHES_AT_ONCE
            )
            applied = [await self._apply(RemoveFromBatch(batch_id, to)) for batch_id in due]
            if len(due) < BATCHES_AT_ONCE or not any(applied):
                return

    async def _remove_workspaces(self, ended_before: int) -> None:
        after: tuple[int, str] | None = None
        while True:
            page = await self._reads.run(
                self._storage.gone_workspaces, ended_before=ended_before, after=after, limit=WORKSPACES_AT_ONCE
            )
            for workspace in page:
                if not workspace.has_batches:
                    await self._apply(RemoveWorkspace(workspace.workspace_id))
            if len(page) < WORKSPACES_AT_ONCE:
                return
            after = (page[-1].ended_at, page[-1].workspace_id)

    async def _apply(self, write: Write) -> bool:
        """Store a removal again and again until nothing of it is left; return whether it was taken."""
        while True:
            started = time.monotonic()
            outcome = await self._records.write(write, droppable=True)
            if not isinstance(outcome, Removed):
                return False
            self.removed += outcome.counts
            await asyncio.sleep(min(LONGEST_PAUSE_SECONDS, time.monotonic() - started))
            if not outcome.more:
                return True

    def _pause(self) -> float:
        ages = [age for step in _STEPS if (age := self._policy.seconds(step)) is not None]
        if self._policy.audit_seconds is not None:
            ages.append(self._policy.audit_seconds)
        return max(SHORTEST_ROUND_SECONDS, min(ROUND_SECONDS, *(age / 10 for age in ages))) if ages else ROUND_SECONDS


def _before(step: Removal) -> tuple[Removal, ...]:
    return tuple(earlier for earlier in Removal if earlier < step.going)
