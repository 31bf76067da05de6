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


class Readiness:
    """`draining` is set once, when the service was told to stop; `broken`, when nothing can be stored any more."""

    def __init__(self, storage: Storage, reads: ReadPool, data_dir: Path) -> None:
        self._storage = storage
        self._reads = reads
        self._data_dir = data_dir
        self.draining = False
        self.broken = False

    async def failures(self) -> list[str]:
        """Return one sentence for each thing that keeps the service from working; empty when it is ready."""
        found = []
        if self.draining:
            found.append("the service is about to stop")
        if self.broken:
            found.append("nothing can be stored any more")
        try:
            async with asyncio.timeout(ANSWER_SECONDS):
                await self._reads.run(self._storage.ping)
        except (StorageUnavailable, TimeoutError) as error:
            _log.warning("database_away", error=str(error) or "timeout")
            found.append("the database does not answer")
        if not await asyncio.to_thread(os.access, self._data_dir / "workspaces", os.W_OK | os.X_OK):
            found.append("the directory of the workspaces cannot be written")
        return found
