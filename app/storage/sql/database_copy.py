"""All records of one database, copied to another and compared there: for a move from SQLite to Postgres, or back.

The target is written in one transaction, which is committed only when every table reads back as it was read from the
source; so it holds all records or none. Rows go through one at a time, whatever the size of the database. What is
copied is what `schema.metadata` names.
"""

import hashlib
import sqlite3
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import cache
from itertools import chain, islice
from pathlib import Path
from typing import Any, Final

import psycopg
from sqlalchemy import Connection, Table, select, text
from sqlalchemy.exc import SQLAlchemyError

from app.storage.base import DataError, OperationalError, StorageError
from app.storage.instance_lock import InstanceLock
from app.storage.sql.driver_errors import translate
from app.storage.sql.engine import APPLICATION, ColumnKind, Database, column_kind, open_database
from app.storage.sql.migrate import revision, upgrade
from app.storage.sql.rows import RowValues
from app.storage.sql.schema import metadata
from migrations import HEAD

STATEMENT_ROWS: Final = 10_000
"""Rows per statement that inserts: Postgres remembers a check of foreign keys for each until the statement ends."""

TELL_SECONDS: Final = 10.0
LEAVE_SECONDS: Final = 5.0
LEAVE_POLL_SECONDS: Final = 0.05
LOCK_MS: Final = 10_000

_DRIVER_ERRORS: Final = (SQLAlchemyError, psycopg.Error, sqlite3.Error)

_INTEGER_LIMITS: Final[dict[ColumnKind, int]] = {"int8": 1 << 63, "int4": 1 << 31}

Tell = Callable[[str], None]


class CopyRefused(StorageError):
    """The two databases are not such that one can be copied to the other; nothing was copied."""


class CopyMismatch(StorageError):
    """What the target gave back is not what the source holds; nothing of it was kept."""


@dataclass(slots=True)
class TableSum:
    """What a table holds: its rows in the order of its key, as bytes that are the same for both kinds of database."""

    table: str
    rows: int = 0
    bytes: int = 0
    _digest: Any = field(default_factory=hashlib.sha256, repr=False)

    def add(self, row: RowValues) -> None:
        encoded = b"".join(map(_encoded, row))
        self._digest.update(encoded)
        self.rows += 1
        self.bytes += len(encoded)

    @property
    def sha256(self) -> str:
        digest: str = self._digest.hexdigest()
        return digest


def copy_database(source: str | Path, target: str | Path, tell: Tell = lambda _line: None) -> list[TableSum]:
    """Copy all records and return what was copied, by table.

    Args:
        source: a URL, or the path of an SQLite file.
        target: the same; it is brought to the newest revision first and must hold no records.
        tell: gets lines about the progress, one per table and one per 10 s.

    Raises:
        ConfigurationError: a URL is neither SQLite nor Postgres, or a service uses one of the databases.
        CopyRefused, SchemaTooNew: the databases are not at the right revision, or the target is not empty.
        CopyMismatch: the target does not keep what it is given.
        StorageError: one of them failed. Nothing was copied, unless the message says otherwise.
    """
    copied = _Copy(open_database(source), open_database(target), tell)
    with ExitStack() as stack:
        try:
            return copied.run(stack)
        except _DRIVER_ERRORS as error:
            raise translate(error, copied.target.file) from error


@contextmanager
def unused(*databases: Database) -> Iterator[None]:
    """Keep services away from databases while the context is open; on Postgres only look whether there is one.

    Raises:
        ConfigurationError: a service uses the data directory of one.
        CopyRefused: a service is connected to one.
    """
    with ExitStack() as stack:
        for directory in sorted({database.file.parent for database in databases if database.file is not None}):
            stack.enter_context(InstanceLock(directory))
        for database in databases:
            if database.file is None:
                _refuse_connected(database)
        yield


def _refuse_connected(database: Database) -> None:
    others = text(
        "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() "
        "AND application_name = :application AND pid <> pg_backend_pid()"
    )
    deadline = time.monotonic() + LEAVE_SECONDS
    # Without a pool, so nothing is left to dispose of.
    with database.migrator().connect() as connection:
        # The server takes a moment to notice that a process which has just ended is gone.
        while connection.scalar(others, {"application": APPLICATION}):
            connection.rollback()
            if time.monotonic() > deadline:
                raise CopyRefused(f"a Toolcrib process is connected to {connection.engine.url.database}: stop it first")
            time.sleep(LEAVE_POLL_SECONDS)


class _Copy:
    def __init__(self, source: Database, target: Database, tell: Tell) -> None:
        self.source = source
        self.target = target
        self._tell = tell
        self._told_at = time.monotonic()

    def run(self, stack: ExitStack) -> list[TableSum]:
        if self.source.file is not None and not self.source.file.is_file():
            raise CopyRefused(f"there is no database {self.source.file}")
        for database in (self.source, self.target):
            stack.callback(database.reader.dispose)
            stack.callback(database.writer.dispose)
        stack.enter_context(unused(self.source, self.target))
        self._check_source()
        upgrade(self.target)
        reading = stack.enter_context(self.source.reader.connect())
        _hold(reading, "SHARE")
        with self.target.migrator().connect() as writing:
            transaction = writing.begin()
            _hold(writing, "SHARE ROW EXCLUSIVE")
            _check_empty(writing)
            sums = [self._copy_table(reading, writing, table) for table in metadata.sorted_tables]
            for copied in sums:
                self._verify(writing, copied)
            if self.target.file is None:
                # Until the server gets round to it by itself it would plan as for empty tables.
                writing.execute(text(f"ANALYZE {_names()}"))
            try:
                transaction.commit()
            except _DRIVER_ERRORS as error:
                raise OperationalError(
                    f"the connection was lost while the copy was being committed ({error}): the target holds all "
                    "records or none; copy again, which is refused when it holds them",
                    "connection",
                    in_doubt=True,
                ) from error
        return sums

    def _check_source(self) -> None:
        with self.source.reader.connect() as connection:
            found = revision(connection)
        if found is None:
            raise CopyRefused("the source holds no records of Toolcrib")
        if found != HEAD:
            raise CopyRefused(
                f"the source is at schema revision {found} and this version of Toolcrib copies {HEAD}: bring the "
                "source up to date with `toolcrib migrate`, or copy with the version that made it"
            )

    def _copy_table(self, reading: Connection, writing: Connection, table: Table) -> TableSum:
        copied = TableSum(table.name)
        rows = self._rows(self.source, reading, table, copied, "copied")
        cursor = writing.connection.cursor()
        try:
            for first in rows:
                self.target.insert_rows(cursor, table, chain([first], islice(rows, STATEMENT_ROWS - 1)))
        except _DRIVER_ERRORS as error:
            translated = translate(error, self.target.file)
            if isinstance(translated, DataError):
                raise DataError(f"the target refuses a row of {table.name}: {translated}") from error
            raise translated from error
        finally:
            cursor.close()
        self._say(f"{table.name}: {copied.rows} rows, {copied.bytes} bytes")
        return copied

    def _verify(self, writing: Connection, copied: TableSum) -> None:
        table = metadata.tables[copied.table]
        found = TableSum(table.name)
        for _ in self._rows(self.target, writing, table, found, "compared"):
            pass
        if (found.rows, found.sha256) != (copied.rows, copied.sha256):
            raise CopyMismatch(
                f"the target gives back {found.rows} rows of {table.name} with SHA-256 {found.sha256}, but the source "
                f"has {copied.rows} with {copied.sha256}; the target was left as it was"
            )

    def _rows(
        self, database: Database, connection: Connection, table: Table, counted: TableSum, what: str
    ) -> Iterator[RowValues]:
        cursor = connection.connection.cursor()
        try:
            for values in database.all_rows(cursor, table):
                row = canonical(table, values)
                counted.add(row)
                if time.monotonic() - self._told_at >= TELL_SECONDS:
                    self._say(f"{table.name}: {counted.rows} rows {what} so far")
                yield row
        finally:
            cursor.close()

    def _say(self, line: str) -> None:
        self._told_at = time.monotonic()
        self._tell(line)


def canonical(table: Table, values: Sequence[Any]) -> RowValues:
    """Return a row as it is the same from both kinds of database.

    Raises:
        DataError: a value is of another kind than its column, which SQLite does not prevent.
    """
    return tuple(
        [
            value if value is None else _canonical(kind, value, table, position)
            for position, (kind, value) in enumerate(zip(_kinds(table), values, strict=True))
        ]
    )


@cache
def _kinds(table: Table) -> tuple[ColumnKind, ...]:
    return tuple(map(column_kind, table.columns))


def _canonical(kind: ColumnKind, value: Any, table: Table, position: int) -> str | bytes | int | bool:
    if kind == "bytea":
        if isinstance(value, bytes):
            return value
    elif kind == "text":
        if isinstance(value, str):
            return value
    elif kind == "bool":
        if value in {0, 1}:
            return bool(value)
    elif isinstance(value, int) and -_INTEGER_LIMITS[kind] <= value < _INTEGER_LIMITS[kind]:
        return value
    column = list(table.columns)[position]
    raise DataError(f"{column} holds {value!r:.60}, which does not fit a column of {kind}")


def _encoded(value: str | bytes | int | bool | None) -> bytes:
    """Return the bytes of a value such that no two rows of different values have the same."""
    if value is None:
        return b"n"
    if isinstance(value, int):
        return b"%d;" % value
    data = value.encode() if isinstance(value, str) else value
    return b"%c%d:%b" % (b"t" if isinstance(value, str) else b"b", len(data), data)


def _hold(connection: Connection, mode: str) -> None:
    """Keep other writers of Postgres out until the transaction ends; SQLite's source is kept by its data directory."""
    if connection.dialect.name == "postgresql":
        connection.execute(text("SET LOCAL statement_timeout = 0"))
        connection.execute(text("SET LOCAL idle_in_transaction_session_timeout = 0"))
        connection.execute(text(f"SET LOCAL lock_timeout = {LOCK_MS}"))
        connection.execute(text(f"LOCK TABLE {_names()} IN {mode} MODE"))


def _names() -> str:
    return ", ".join(metadata.tables)


def _check_empty(connection: Connection) -> None:
    for table in metadata.sorted_tables:
        if connection.execute(select(table).limit(1)).first() is not None:
            raise CopyRefused(
                f"the target is not empty, its table {table.name} has rows: copy to a database without records"
            )
