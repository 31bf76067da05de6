"""The two databases: how their connections are set up, and the few things they do differently."""

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, Literal, Protocol, TypeAlias

import psycopg
from sqlalchemy import (
    Boolean,
    Column,
    Connection,
    Engine,
    Select,
    Table,
    bindparam,
    create_engine,
    event,
    insert,
    select,
)
from sqlalchemy.engine import URL, make_url
from sqlalchemy.exc import ArgumentError
from sqlalchemy.pool import NullPool
from sqlalchemy.sql.expression import UpdateBase
from sqlalchemy.types import BigInteger, Integer, LargeBinary, Text, TypeEngine

from app.errors import ConfigurationError
from app.storage.sql.rows import RowValues
from app.storage.sql.schema import metadata

BUSY_TIMEOUT_MS: Final = 5_000
CONNECT_TIMEOUT_SECONDS: Final = 5
READ_TIMEOUT_MS: Final = 30_000
WRITE_TIMEOUT_MS: Final = 60_000
LOCK_TIMEOUT_MS: Final = 10_000
PULSE_TIMEOUT_MS: Final = 2_000
READ_CONNECTIONS: Final = 8

APPLICATION: Final = "toolcrib"
"""The name under which Postgres lists the connections."""

_SQLITE_PRAGMAS: Final = (
    f"busy_timeout = {BUSY_TIMEOUT_MS}",
    "temp_store = MEMORY",
)
# Of each of the connections that read: what they read once, such as output, is no reason to grow.
_SQLITE_READER_PRAGMAS: Final = ("query_only = ON", "cache_size = -8192")
_SQLITE_WRITER_PRAGMAS: Final = (
    "cache_size = -65536",
    "auto_vacuum = INCREMENTAL",  # only before the first table, and before the journal mode makes the file
    "journal_mode = WAL",
    "synchronous = FULL",
    "journal_size_limit = 67108864",
    "wal_autocheckpoint = 4000",
)


class Database(Protocol):
    """One of the two kinds of database."""

    @property
    def writer(self) -> Engine:
        """Connections that write: on SQLite each transaction takes the write lock as it begins."""
        ...

    @property
    def reader(self) -> Engine:
        """Connections that read, each transaction on one snapshot."""
        ...

    @property
    def pulse(self) -> Engine:
        """A connection that says that this process lives: on Postgres one of its own, which nothing else can take."""
        ...

    @property
    def file(self) -> Path | None:
        """SQLite's file."""
        ...

    def migrator(self) -> Engine:
        """Return an engine for changes of the schema, which its user disposes of."""
        ...

    def insert_rows(self, cursor: Any, table: Table, rows: Iterable[RowValues]) -> None:
        """Insert rows, given in the order of the table's columns, with a cursor of the driver."""
        ...

    def all_rows(self, cursor: Any, table: Table) -> Iterator[Sequence[Any]]:
        """Read a whole table in the order of its key, one row in memory at a time, with a cursor of the driver.

        The values are the driver's: booleans are numbers on SQLite.
        """
        ...


def open_database(database: str | Path, *, pooled: bool = False) -> Database:
    """Return the database of a URL, or of a path: an SQLite file. Nothing is connected yet.

    `pooled`: behind the URL is a pooler, for which each transaction may be on another connection of the server.

    Raises:
        ConfigurationError: for a URL that is neither SQLite nor Postgres.
    """
    if isinstance(database, Path):
        return SqliteDatabase(database)
    try:
        url = make_url(database)
    except ArgumentError:
        raise ConfigurationError("the database URL does not parse; it looks like postgresql://user@host/name") from None
    if url.drivername in {"sqlite", "sqlite+pysqlite"} and url.database not in {None, "", ":memory:"}:
        return SqliteDatabase(Path(str(url.database)))
    if url.drivername in {"postgres", "postgresql", "postgresql+psycopg"}:
        return PostgresDatabase(url.set(drivername="postgresql+psycopg"), pooled=pooled)
    raise ConfigurationError(
        f"the database URL begins with {url.drivername}://; Toolcrib keeps its records in postgresql:// or sqlite:///"
    )


def driver_connection(connection: Connection) -> psycopg.Connection:
    """Return the connection of Postgres's driver, in the transaction of ours."""
    driver = connection.connection.driver_connection
    if not isinstance(driver, psycopg.Connection):
        raise TypeError(f"{type(driver).__name__} is no connection of psycopg")
    return driver


def plain_url(url: str) -> str:
    """Return a URL of Postgres as its own library reads it."""
    return make_url(url).set(drivername="postgresql").render_as_string(hide_password=False)


class SqliteDatabase:
    """A file. One connection writes; readers see the last commit and never wait for it."""

    def __init__(self, file: Path) -> None:
        self._file = file.absolute()
        self.writer = self._engine(begin="BEGIN IMMEDIATE", pragmas=("foreign_keys = ON", *_SQLITE_WRITER_PRAGMAS))
        self.pulse = self.writer
        self.reader = self._engine(begin="BEGIN", pragmas=_SQLITE_READER_PRAGMAS)
        self._inserts = {
            table.name: str(insert(table).compile(dialect=self.writer.dialect)) for table in metadata.sorted_tables
        }

    @property
    def file(self) -> Path | None:
        return self._file

    def migrator(self) -> Engine:
        # Foreign keys off: a table that is made anew would take the rows of its children with it.
        return self._engine(
            begin="BEGIN IMMEDIATE", pragmas=("foreign_keys = OFF", *_SQLITE_WRITER_PRAGMAS), poolclass=NullPool
        )

    def insert_rows(self, cursor: Any, table: Table, rows: Iterable[RowValues]) -> None:
        cursor.executemany(self._inserts[table.name], rows)

    def all_rows(self, cursor: Any, table: Table) -> Iterator[Sequence[Any]]:
        cursor.execute(str(_whole(table).compile(dialect=self.writer.dialect)))
        yield from cursor

    def _engine(self, *, begin: str, pragmas: Sequence[str], **options: Any) -> Engine:
        url = URL.create("sqlite", database=str(self._file))
        if "poolclass" not in options:
            options |= {"pool_size": READ_CONNECTIONS, "max_overflow": READ_CONNECTIONS}
        engine = create_engine(url, connect_args={"isolation_level": None, "check_same_thread": False}, **options)

        def connected(connection: Any, _record: object) -> None:
            cursor = connection.cursor()
            for pragma in (*_SQLITE_PRAGMAS, *pragmas):
                cursor.execute(f"PRAGMA {pragma}")
            cursor.close()

        def begun(connection: Connection) -> None:
            # The driver would begin a transaction at the first change only; with isolation_level None it is ours to do.
            connection.connection.cursor().execute(begin)

        event.listen(engine, "connect", connected)
        event.listen(engine, "begin", begun)
        return engine


class PostgresDatabase:
    """A server. Append-only rows go by COPY, which needs no answer per row."""

    def __init__(self, url: URL, *, pooled: bool = False) -> None:
        self._url = url
        # A prepared statement is on the connection it was prepared on.
        self._preparing = {"prepare_threshold": None} if pooled else {}
        self.writer = self._engine(
            {"statement_timeout": WRITE_TIMEOUT_MS, "lock_timeout": LOCK_TIMEOUT_MS},
            pool_size=1,
            max_overflow=READ_CONNECTIONS,
            isolation_level="READ COMMITTED",
        )
        self.pulse = self._engine(
            {"statement_timeout": PULSE_TIMEOUT_MS, "lock_timeout": PULSE_TIMEOUT_MS},
            pool_size=1,
            max_overflow=READ_CONNECTIONS,
            isolation_level="READ COMMITTED",
        )
        self.reader = self._engine(
            {"statement_timeout": READ_TIMEOUT_MS},
            pool_size=READ_CONNECTIONS,
            max_overflow=READ_CONNECTIONS,
            isolation_level="REPEATABLE READ",
        )
        self._copies = {
            table.name: (
                f"COPY {table.name} ({', '.join(column.name for column in table.columns)}) FROM STDIN (FORMAT BINARY)",
                [column_kind(column) for column in table.columns],
            )
            for table in metadata.sorted_tables
        }

    @property
    def file(self) -> Path | None:
        return None

    def migrator(self) -> Engine:
        return self._engine({}, poolclass=NullPool)

    def insert_rows(self, cursor: Any, table: Table, rows: Iterable[RowValues]) -> None:
        sql, types = self._copies[table.name]
        with cursor.copy(sql) as copy:
            copy.set_types(types)
            for row in rows:
                copy.write_row(row)

    def all_rows(self, cursor: Any, table: Table) -> Iterator[Sequence[Any]]:
        whole = str(_whole(table).compile(dialect=self.writer.dialect))
        with cursor.copy(f"COPY ({whole}) TO STDOUT (FORMAT BINARY)") as copy:
            copy.set_types([column_kind(column) for column in table.columns])
            yield from copy.rows()

    def _engine(self, timeouts: Mapping[str, int], **options: Any) -> Engine:
        engine = create_engine(
            self._url,
            paramstyle="format",
            connect_args={
                "connect_timeout": CONNECT_TIMEOUT_SECONDS,
                "application_name": APPLICATION,
                # A server that vanished without a word is noticed within seconds, not hours.
                "keepalives_idle": 5,
                "keepalives_interval": 2,
                "keepalives_count": 3,
                "tcp_user_timeout": 10_000,
                **self._preparing,
            },
            **options,
        )

        def connected(connection: psycopg.Connection, _record: object) -> None:
            previous = connection.autocommit
            connection.autocommit = True
            for name, milliseconds in timeouts.items():
                connection.execute(f"SET {name} = {milliseconds}".encode())
            connection.autocommit = previous

        event.listen(engine, "connect", connected)
        return engine


ColumnKind: TypeAlias = Literal["int8", "int4", "bool", "bytea", "text"]

_COLUMN_KINDS: Final[tuple[tuple[type[TypeEngine[Any]], ColumnKind], ...]] = (
    (BigInteger, "int8"),
    (Integer, "int4"),
    (Boolean, "bool"),
    (LargeBinary, "bytea"),
    (Text, "text"),
)


def column_kind(column: Column[Any]) -> ColumnKind:
    """Return what a column holds, by the name of Postgres."""
    return next(name for kind, name in _COLUMN_KINDS if isinstance(column.type, kind))


def _whole(table: Table) -> Select[Any]:
    return select(table).order_by(*table.primary_key.columns)


class PreparedUpdate:
    """An UPDATE as the driver's own SQL, run for many rows without building a statement for each.

    The hot path goes past SQLAlchemy's execution, whose fixed cost per statement is more than a small group's rows.
    """

    def __init__(self, statement: UpdateBase, engine: Engine) -> None:
        compiled = statement.compile(dialect=engine.dialect)
        self._sql = str(compiled)
        self._names = tuple(compiled.positiontup or ())

    def run(self, cursor: Any, rows: Sequence[Mapping[str, Any]]) -> int:
        """Run it once per row and return how many rows of the table matched; a parameter a row lacks is null."""
        names = self._names
        cursor.executemany(self._sql, [tuple([row.get(name) for name in names]) for row in rows])
        count: int = cursor.rowcount
        return count


class PreparedLookup:
    """A SELECT of rows by id, as the driver's own SQL.

    There is one text per power of two: ids are repeated until their number is one, so that the driver and the server
    keep a handful of prepared statements.
    """

    def __init__(self, statement: Select[Any], key: Column[str], engine: Engine) -> None:
        self._statement = statement
        self._key = key
        self._engine = engine
        self._texts: dict[int, str] = {}

    def run(self, cursor: Any, ids: Collection[str]) -> Sequence[tuple[Any, ...]]:
        if not ids:
            return ()
        wanted = list(ids)
        size = 1 << (len(wanted) - 1).bit_length()
        wanted += [wanted[0]] * (size - len(wanted))
        text = self._texts.get(size)
        if text is None:
            parameters = [bindparam(f"id_{number}", type_=self._key.type) for number in range(size)]
            statement = self._statement.where(self._key.in_(parameters))
            text = self._texts[size] = str(statement.compile(dialect=self._engine.dialect))
        cursor.execute(text, wanted)
        found: Sequence[tuple[Any, ...]] = cursor.fetchall()
        return found
