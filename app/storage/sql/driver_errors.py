"""What a driver's error means for the group that met it: try it again, or look for the write at fault."""

import os
import sqlite3
from pathlib import Path
from typing import Final, Literal, TypeAlias

import psycopg
from sqlalchemy import exc

from app.storage.base import DataError, OperationalError, StorageError

Reason: TypeAlias = Literal["busy", "full", "connection"]

NO_ROOM_BYTES: Final = 1_000_000
"""An I/O error with less free than this is taken for a full disk: SQLite reports some of those so."""

_SQLITE: Final[dict[int, Reason]] = {
    sqlite3.SQLITE_BUSY: "busy",
    sqlite3.SQLITE_LOCKED: "busy",
    sqlite3.SQLITE_PROTOCOL: "busy",
    sqlite3.SQLITE_NOMEM: "busy",
    sqlite3.SQLITE_INTERRUPT: "busy",
    sqlite3.SQLITE_FULL: "full",
    sqlite3.SQLITE_READONLY: "connection",
}

_POSTGRES: Final[dict[str, Reason]] = {
    "40001": "busy",  # serialization_failure
    "40P01": "busy",  # deadlock_detected
    "55P03": "busy",  # lock_not_available
    "57014": "busy",  # query_canceled: our own statement_timeout
    "53000": "busy",
    "53100": "full",  # disk_full
    "53200": "busy",  # out_of_memory
    "53400": "busy",
    "53300": "connection",  # too_many_connections
    "25006": "connection",  # read_only_sql_transaction: this server is a standby now
    "25P03": "connection",  # idle_in_transaction_session_timeout
    "57P01": "connection",  # admin_shutdown
    "57P02": "connection",  # crash_shutdown
    "57P03": "connection",  # cannot_connect_now
    "57P05": "connection",  # idle_session_timeout
}


def translate(error: Exception, database: Path | None = None) -> StorageError:
    """Return what to raise for `error`.

    `database` is SQLite's file: where it lies decides whether an I/O error is a full disk.
    """
    if isinstance(error, StorageError):
        return error
    if isinstance(error, exc.TimeoutError):
        return OperationalError("no database connection became free in time", "busy")
    cause: BaseException | None = error.orig if isinstance(error, exc.DBAPIError) else error
    if isinstance(cause, sqlite3.Error):
        reason = _sqlite_reason(cause, database)
    elif isinstance(cause, psycopg.Error):
        reason = _postgres_reason(cause)
    else:
        reason = None
    message = f"{type(cause).__name__}: {cause}"
    return DataError(message) if reason is None else OperationalError(message, reason)


def _sqlite_reason(error: sqlite3.Error, database: Path | None) -> Reason | None:
    code = getattr(error, "sqlite_errorcode", None)
    if code is None:
        return None
    primary = code & 0xFF
    if primary in {sqlite3.SQLITE_IOERR, sqlite3.SQLITE_CANTOPEN}:
        return "full" if database is not None and _is_full(database) else "connection"
    return _SQLITE.get(primary)


def _is_full(database: Path) -> bool:
    try:
        status = os.statvfs(database.parent)
    except OSError:
        return False
    return status.f_bavail * status.f_frsize < NO_ROOM_BYTES


def _postgres_reason(error: psycopg.Error) -> Reason | None:
    state = error.sqlstate
    if state is None:
        # Not the server's word but the driver's: the connection could not be made, or is gone.
        return "connection" if isinstance(error, psycopg.OperationalError | psycopg.InterfaceError) else None
    return "connection" if state.startswith("08") else _POSTGRES.get(state)
