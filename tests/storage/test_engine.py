"""How connections are set up, which URLs are taken, and what a driver's error is taken for."""

import sqlite3
import threading
from pathlib import Path

import psycopg
import pytest
from sqlalchemy import exc, text

from app.errors import ConfigurationError
from app.storage.base import Applied, CreateWorkspace, DataError, OperationalError
from app.storage.sql.driver_errors import translate
from app.storage.sql.engine import PostgresDatabase, SqliteDatabase, open_database
from app.storage.sql.storage import SqlStorage
from tests.support.records import make_workspace


def test_sqlite_is_set_up_to_keep_what_it_acknowledges(sqlite_storage: SqlStorage) -> None:
    wanted = {
        "journal_mode": "wal",
        "synchronous": 2,
        "foreign_keys": 1,
        "busy_timeout": 5000,
        "auto_vacuum": 2,
        "journal_size_limit": 67108864,
    }
    with sqlite_storage._database.writer.connect() as connection:
        assert {name: connection.scalar(text(f"PRAGMA {name}")) for name in wanted} == wanted
    with sqlite_storage._database.reader.connect() as connection:
        assert connection.scalar(text("PRAGMA query_only")) == 1


def test_sqlite_writer_takes_its_lock_as_it_begins_and_readers_go_on(sqlite_storage: SqlStorage) -> None:
    workspace = make_workspace()
    database = sqlite_storage._database
    with database.writer.connect() as connection, connection.begin():
        other = sqlite3.connect(database.file or "", timeout=0)
        with pytest.raises(sqlite3.OperationalError, match="locked"):
            other.execute("BEGIN IMMEDIATE")
        other.close()
        assert sqlite_storage.workspace(workspace.id) is None


def test_postgres_is_set_up_to_notice_a_dead_server_and_to_bound_waits(postgres_storage: SqlStorage) -> None:
    database = postgres_storage._database
    with database.writer.connect() as connection:
        shown = {name: connection.scalar(text(f"SHOW {name}")) for name in ("statement_timeout", "lock_timeout")}
        assert shown == {"statement_timeout": "1min", "lock_timeout": "10s"}
        driver = connection.connection.driver_connection
        assert isinstance(driver, psycopg.Connection)
        parameters = driver.info.get_parameters()
        assert (parameters["keepalives_idle"], parameters["tcp_user_timeout"]) == ("5", "10000")
    with database.reader.connect() as connection:
        assert connection.scalar(text("SHOW statement_timeout")) == "30s"
        assert connection.scalar(text("SHOW transaction_isolation")) == "repeatable read"


@pytest.mark.parametrize("scheme", ["postgres", "postgresql", "postgresql+psycopg"])
def test_postgres_urls_of_each_spelling_are_taken(scheme: str) -> None:
    database = open_database(f"{scheme}://someone:p%40ss@db.example:5433/records?sslmode=require")
    assert isinstance(database, PostgresDatabase)
    url = database.writer.url
    assert (url.drivername, url.host, url.password) == ("postgresql+psycopg", "db.example", "p@ss")
    assert url.query == {"sslmode": "require"}


def test_sqlite_is_named_by_a_path_or_a_url(tmp_path: Path) -> None:
    for given in (tmp_path / "a?b#c%20.db", f"sqlite:///{tmp_path}/records.db"):
        database = open_database(given)
        assert isinstance(database, SqliteDatabase)
        storage = SqlStorage(given)
        storage.migrate()
        storage.close()
        assert database.file is not None
        assert database.file.is_file()
        assert database.file.parent == tmp_path


@pytest.mark.parametrize("url", ["mysql://host/db", "sqlite://", "sqlite:///:memory:", "records.db", "", "postgresql"])
def test_url_that_is_neither_is_refused_with_a_sentence(url: str) -> None:
    with pytest.raises(ConfigurationError, match="the database URL"):
        open_database(url)


def postgres_error(state: str | None) -> psycopg.Error:
    error = psycopg.OperationalError("from the server")
    error.sqlstate = state
    return error


@pytest.mark.parametrize(
    ("state", "reason"),
    [
        ("08006", "connection"),
        ("57P01", "connection"),
        ("57P03", "connection"),
        ("53300", "connection"),
        ("25006", "connection"),
        (None, "connection"),
        ("53100", "full"),
        ("40P01", "busy"),
        ("40001", "busy"),
        ("55P03", "busy"),
        ("57014", "busy"),
        ("22021", None),
        ("23505", None),
        ("XX000", None),
    ],
)
def test_states_of_postgres_are_told_apart(state: str | None, reason: str | None) -> None:
    cause = postgres_error(state)
    for error in (cause, exc.OperationalError("SELECT 1", None, cause)):
        found = translate(error)
        assert getattr(found, "reason", None) == reason
        assert isinstance(found, DataError if reason is None else OperationalError)


def sqlite_error(code: int) -> sqlite3.Error:
    error = sqlite3.OperationalError("from the library")
    error.sqlite_errorcode = code
    return error


@pytest.mark.parametrize(
    ("code", "reason"),
    [
        (sqlite3.SQLITE_BUSY, "busy"),
        (sqlite3.SQLITE_BUSY_SNAPSHOT, "busy"),
        (sqlite3.SQLITE_FULL, "full"),
        (sqlite3.SQLITE_IOERR_FSYNC, "connection"),
        (sqlite3.SQLITE_CANTOPEN, "connection"),
        (sqlite3.SQLITE_READONLY, "connection"),
        (sqlite3.SQLITE_CONSTRAINT_UNIQUE, None),
        (sqlite3.SQLITE_TOOBIG, None),
        (sqlite3.SQLITE_CORRUPT, None),
    ],
)
def test_codes_of_sqlite_are_told_apart(tmp_path: Path, code: int, reason: str | None) -> None:
    found = translate(sqlite_error(code), tmp_path / "toolcrib.db")
    assert getattr(found, "reason", None) == reason


def test_sqlite_file_that_cannot_be_opened_is_an_operational_error(tmp_path: Path) -> None:
    storage = SqlStorage(tmp_path / "missing" / "toolcrib.db")
    with pytest.raises(OperationalError) as caught:
        storage.apply([CreateWorkspace(make_workspace())])
    assert (caught.value.reason, caught.value.in_doubt) == ("connection", False)
    with pytest.raises(OperationalError):
        storage.ping()
    storage.close()


def test_postgres_that_refuses_is_an_operational_error() -> None:
    storage = SqlStorage("postgresql://nobody@127.0.0.1:1/none")
    with pytest.raises(OperationalError) as caught:
        storage.apply([CreateWorkspace(make_workspace())])
    assert (caught.value.reason, caught.value.in_doubt) == ("connection", False)
    with pytest.raises(OperationalError):
        storage.ping()
    storage.close()


def test_two_processes_that_adopt_overlapping_roots_at_once_get_one_of_them(postgres_storage: SqlStorage) -> None:
    # Two writers on one Postgres: the second must see what the first commits, not only what was there before.
    other = SqlStorage(postgres_storage._database.writer.url.render_as_string(hide_password=False))
    barrier = threading.Barrier(2, timeout=20)
    outcomes = []

    def adopt(storage: SqlStorage, root: str) -> None:
        barrier.wait()
        outcomes.extend(storage.apply([CreateWorkspace(make_workspace(root=root))]))

    for number in range(20):
        pair = [(postgres_storage, f"/srv/{number}"), (other, f"/srv/{number}/inner")]
        threads = [threading.Thread(target=adopt, args=arguments) for arguments in pair]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(20)
    other.close()
    assert len(outcomes) == 40
    assert outcomes.count(Applied()) == 20


def test_reads_that_are_repeated_are_planned_once(postgres_storage: SqlStorage) -> None:
    for _ in range(8):
        postgres_storage.last_seq("batch_none")
    # Nothing runs at the same time, so the pool has one connection.
    with postgres_storage._database.reader.connect() as connection:
        prepared = connection.scalars(text("SELECT statement FROM pg_prepared_statements")).all()
    assert any("batches.last_seq" in statement for statement in prepared)
