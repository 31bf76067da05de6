"""Whether the service can take work: what `/readyz` and every route that makes something ask."""

import asyncio
import os
from pathlib import Path

import structlog

from app.storage.base import Storage, StorageError
from app.storage.read_pool import ReadPool

_log = structlog.get_logger(__name__)


class Readiness:
    """`draining` is set once, when the service was told to stop, and never taken back."""

    def __init__(self, storage: Storage, reads: ReadPool, data_dir: Path) -> None:
        self._storage = storage
        self._reads = reads
        self._data_dir = data_dir
        self.draining = False

    async def failures(self) -> list[str]:
        """Return one sentence for each thing that keeps the service from working; empty when it is ready."""
        found = []
        if self.draining:
            found.append("the service is about to stop")
        try:
            await self._reads.run(self._storage.ping)
        except StorageError as error:
            _log.warning("database_away", error=str(error))
            found.append("the database does not answer")
        if not await asyncio.to_thread(os.access, self._data_dir / "workspaces", os.W_OK | os.X_OK):
            found.append("the directory of the workspaces cannot be written")
        return found
