"""The audit log: what is noted besides the writes that carry their own note, and the list."""

import asyncio
import time
from collections.abc import AsyncGenerator, Sequence
from typing import Final

from app.domain.audit import ANONYMOUS, AuditAction, AuditEvent, audit
from app.domain.caller import Caller
from app.errors import Overloaded
from app.storage.base import AuditFilter, NoteAudit, Page, Storage
from app.storage.read_pool import ReadPool
from app.storage.record_writer import RecordWriter

STORE_SECONDS: Final = 5.0
REFUSALS_SECONDS: Final = 60.0
REFUSALS_MAX: Final = 4096
PATHS_MAX: Final = 100
EXPORT_PAGE: Final = 500


class AuditLog:
    """Notes changes of files and refusals, and lists what was noted."""

    def __init__(self, *, storage: Storage, reads: ReadPool, records: RecordWriter) -> None:
        self._storage = storage
        self._reads = reads
        self._records = records
        # By who was refused what: when it was noted last, and how often it was not noted since.
        self._refusals: dict[tuple[str, str], tuple[float, int]] = {}

    def require_room(self) -> None:
        """Raise Overloaded when too much waits to be stored: before a change that is to be noted."""
        if self._records.overloaded:
            raise Overloaded("too much waits to be stored; send this again in a moment")

    async def changed_files(
        self, by: Caller, action: AuditAction, workspace_id: str, paths: Sequence[str], **details: object
    ) -> None:
        """Note a change of a workspace's files that has been made.

        Waits until that is stored, 5 s at most: what was changed was changed, and the note is kept until the database
        takes it, for the life of the process. At most 100 paths are named; `files` says how many there were.
        """
        if not paths:
            return
        noted = audit(by, action, workspace_id, paths=list(paths[:PATHS_MAX]), files=len(paths), **details)
        await asyncio.wait([self._records.submit(NoteAudit(noted))], timeout=STORE_SECONDS)

    def refused(self, by: Caller | None, status: int, method: str, path: str, scope: str | None, peer: str) -> None:
        """Note that a request was refused: of each caller and kind one a minute, with how many were not noted.

        `by` is None when there was no valid key.
        """
        by = by or ANONYMOUS
        kind = (by.key_id, scope or "")
        now = time.monotonic()
        noted_at, left_out = self._refusals.get(kind, (float("-inf"), 0))
        if now - noted_at < REFUSALS_SECONDS:
            self._refusals[kind] = (noted_at, left_out + 1)
            return
        if self._records.overloaded or self._records.full:
            return
        if len(self._refusals) >= REFUSALS_MAX:
            self._refusals.pop(next(iter(self._refusals)))
        self._refusals[kind] = (now, 0)
        event = audit(
            by,
            AuditAction.ACCESS_REFUSED,
            None,
            status=status,
            method=method,
            path=path[:1024],
            scope=scope,
            peer=peer,
            notNoted=left_out,
        )
        self._records.submit(NoteAudit(event), droppable=True)

    async def list(self, condition: AuditFilter, *, before: str | None, limit: int) -> Page[AuditEvent]:
        """Return what was noted, newest first."""
        return await self._reads.run(self._storage.audit_events, condition, before=before, limit=limit)

    async def every(self, condition: AuditFilter, *, before: str | None) -> AsyncGenerator[Page[AuditEvent], None]:
        """Yield everything that was noted and meets the conditions, newest first, page by page."""
        while True:
            page = await self.list(condition, before=before, limit=EXPORT_PAGE)
            yield page
            before = page.next_before
            if before is None:
                return
