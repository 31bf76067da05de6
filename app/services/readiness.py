"""Whether the service can take work: what `/readyz` and every route that makes something ask."""

import asyncio
import os
from pathlib import Path
from typing import Final

import structlog

from app.errors import StorageUnavailable
from app.storage.base import Storage
from app.storage.read_pool import ReadPool

ANSWER_SECONDS: Final = 2.0

_log = structlog.get_logger(__name__)


READY: Final = "ok"


class Readiness:
    """`draining` is set once, when the service was told to stop; `broken`, when nothing can be stored any more.

    `place` is where the directory of the workspaces is; None for a process that has none.
    """

    def __init__(self, storage: Storage, reads: ReadPool, place: Path | None) -> None:
        self._storage = storage
        self._reads = reads
        self._place = place
        self.draining = False
        self.broken = False

    async def checks(self) -> dict[str, str]:
        """Return what was looked at, each `ok` or a sentence that says why the service cannot work."""
        checks = {
            "accepting": "the service is about to stop" if self.draining else READY,
            "writer": "nothing can be stored any more" if self.broken else READY,
            "database": await self._database(),
        }
        return checks if self._place is None else {**checks, "workspaces": await self._workspaces(self._place)}

    async def _database(self) -> str:
        try:
            async with asyncio.timeout(ANSWER_SECONDS):
                await self._reads.run(self._storage.ping)
        except (StorageUnavailable, TimeoutError) as error:
            _log.warning("database_away", error=str(error) or "timeout")
            return "the database does not answer"
        return READY

    async def _workspaces(self, place: Path) -> str:
        usable = await asyncio.to_thread(os.access, place / "workspaces", os.W_OK | os.X_OK)
        return READY if usable else "the directory of the workspaces cannot be written"
