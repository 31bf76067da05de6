"""Bringing a database to the newest revision, by one starter at a time."""

import fcntl
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from sqlalchemy import Connection, Engine, func, inspect, select, text

from app.storage.base import OperationalError, SchemaTooNew
from app.storage.sql.engine import Database, driver_connection
from app.storage.sql.jobs import JobQueue
from migrations import HEAD, LOCATION

LOCK_SECONDS: Final = 300.0
LOCK_POLL_SECONDS: Final = 0.05

_LOCK: Final = 0x746F6F6C_6D696772
"""The advisory lock of Postgres: `toolmigr` in ASCII."""


def upgrade(database: Database, jobs: JobQueue | None = None) -> None:
    """Bring the schema to `HEAD`, and the tables of `jobs`; a database that is there already costs one query.

    The whole way is one transaction: a starter that dies half-way leaves the database as it was.

    Raises:
        SchemaTooNew: the database is at a revision that this code does not know.
        OperationalError: another starter held the lock for `LOCK_SECONDS`.
    """
    with database.reader.connect() as connection:
        if revision(connection) == HEAD and jobs is None:
            return
    engine = database.migrator()
    try:
        with _lock(database.file, engine), engine.begin() as connection:
            _upgrade(connection, revision(connection))
            if jobs is not None:
                jobs.prepare(driver_connection(connection))
    finally:
        engine.dispose()


def _upgrade(connection: Connection, found: str | None) -> None:
    if found == HEAD:
        return
    # Loaded only where there is work for it: it takes longer than all the rest of a start.
    from alembic import command
    from alembic.config import Config
    from alembic.script import ScriptDirectory

    config = Config(attributes={"connection": connection})
    config.set_main_option("script_location", str(LOCATION).replace("%", "%%"))
    config.set_main_option("path_separator", "os")
    known = {script.revision for script in ScriptDirectory.from_config(config).walk_revisions()}
    if found is not None and found not in known:
        raise SchemaTooNew(
            f"the database is at schema revision {found}, which this version of Toolcrib does not know "
            f"(its newest is {HEAD}): start the version that made it, or restore a backup from before"
        )
    command.upgrade(config, HEAD)


def revision(connection: Connection) -> str | None:
    """Return the revision a database is at; None when it has none of our tables."""
    if not inspect(connection).has_table("alembic_version"):
        return None
    found: str | None = connection.scalar(text("SELECT version_num FROM alembic_version"))
    return found


@contextmanager
def _lock(file: Path | None, engine: Engine) -> Iterator[None]:
    deadline = time.monotonic() + LOCK_SECONDS
    if file is None:
        # On a connection of its own: the server frees it when this process dies.
        with engine.connect().execution_options(isolation_level="AUTOCOMMIT") as connection:
            while not connection.scalar(select(func.pg_try_advisory_lock(_LOCK))):
                _wait(deadline)
            yield
        return
    descriptor = os.open(file.with_name(f"{file.name}.migrate.lock"), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        while True:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                _wait(deadline)
        yield
    finally:
        os.close(descriptor)


def _wait(deadline: float) -> None:
    if time.monotonic() > deadline:
        raise OperationalError(f"another process has been migrating the database for {LOCK_SECONDS:.0f} s", "busy")
    time.sleep(LOCK_POLL_SECONDS)
