"""What other processes commit, told by Postgres: NOTIFY wakes, the rows are the truth.

A notification that is lost costs time only: who watches a batch looks once a second in any case.
"""

import asyncio
from collections.abc import Callable, Collection
from typing import Final

import psycopg
import structlog

from app.storage.sql.engine import plain_url

CHANNEL: Final = "toolcrib"
UNKNOWN: Final = "-"
"""Stands for a process that has not said yet who it is."""
EVERYTHING: Final = "*"
"""Stands for more ids than one notification names."""
CANCEL: Final = "!"
"""Stands before the id of a batch that somebody wants cancelled, or a call of it."""
IDS_MAX: Final = 200
CONNECT_SECONDS: Final = 5.0
QUIET_SECONDS: Final = 30.0
FIRST_PAUSE_SECONDS: Final = 0.1
LAST_PAUSE_SECONDS: Final = 2.0

_log = structlog.get_logger(__name__)


def payload(origin: str, ids: Collection[str]) -> str:
    """Return what a process tells of the things with these ids: less than the 8000 bytes Postgres takes."""
    return f"{origin} {' '.join(sorted(ids)) if len(ids) <= IDS_MAX else EVERYTHING}"


class Listener:
    """Listens on one connection of its own.

    Args:
        url: of the database, past any pooler of transactions.
        origin: this process, whose own notifications are dropped.
        woken: called on the loop with the ids of a notification; None stands for everything.
    """

    def __init__(self, url: str, origin: str, woken: Callable[[Collection[str] | None], None]) -> None:
        self._url = plain_url(url)
        self._origin = origin
        self._woken = woken

    async def listen(self) -> None:
        """Listen until cancelled, on a new connection whenever one is lost; after each, everything is woken."""
        pause = FIRST_PAUSE_SECONDS
        while True:
            try:
                async with await psycopg.AsyncConnection.connect(
                    self._url,
                    autocommit=True,
                    connect_timeout=round(CONNECT_SECONDS),
                    application_name="toolcrib listener",
                ) as connection:
                    await connection.execute(f"LISTEN {CHANNEL}".encode())
                    pause = FIRST_PAUSE_SECONDS
                    # What happened before it listened was told to nobody.
                    self._woken(None)
                    while True:
                        async for told in connection.notifies(timeout=QUIET_SECONDS):
                            self._told(told.payload)
                        async with asyncio.timeout(CONNECT_SECONDS):
                            await connection.execute(b"SELECT 1")
            except (psycopg.Error, OSError, TimeoutError) as error:
                _log.warning("listener_lost", reason=" ".join(str(error).split()))
            await asyncio.sleep(pause)
            pause = min(LAST_PAUSE_SECONDS, pause * 2)

    def _told(self, text: str) -> None:
        origin, *ids = text.split()
        if origin != self._origin:
            self._woken(None if EVERYTHING in ids else ids)
