"""Fixtures every test may use."""

import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import psycopg
import pytest
from hypothesis import settings
from psycopg import sql

from app.storage.sql.schema import metadata
from app.storage.sql.storage import SqlStorage
from tests.support.postgres import URL_VARIABLE, Databases, PostgresServer
from tests.support.users import let_others_pass

# The same examples in every run, so that a change is what makes a test fail; others come with
# `--hypothesis-profile=default`. How long one takes depends on what else the machine does.
settings.register_profile("same", derandomize=True, deadline=None)
settings.load_profile("same")

MADE_BASE = pytest.StashKey[Path]()
MIGRATED = f"toolcrib_migrated_{os.getpid()}"


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config: pytest.Config) -> None:
    """Give root's tests a directory of their own: the one pytest takes is closed again by the next run that starts."""
    if os.geteuid() == 0 and config.option.basetemp is None and not hasattr(config, "workerinput"):
        config.option.basetemp = tempfile.mkdtemp(prefix="toolcrib-tests-")
        config.stash[MADE_BASE] = Path(config.option.basetemp)


def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    made = session.config.stash.get(MADE_BASE, None)
    if made is not None and exitstatus == 0:
        shutil.rmtree(made, ignore_errors=True)


@pytest.fixture(scope="session")
def tmp_path_factory(tmp_path_factory: pytest.TempPathFactory) -> pytest.TempPathFactory:
    return let_others_pass(tmp_path_factory)


@pytest.fixture
def anyio_backend() -> str:
    """The service runs on asyncio alone."""
    return "asyncio"


@pytest.fixture(scope="session")
def postgres_databases() -> Iterator[Databases]:
    """Databases on a real Postgres: the one the environment names, or a server of this process's own."""
    given = os.environ.get(URL_VARIABLE)
    if given:
        yield Databases(given)
        return
    with PostgresServer() as server:
        yield Databases(server.url)


@pytest.fixture(scope="session")
def migrated_postgres(postgres_databases: Databases) -> Iterator[str]:
    """The name of a migrated database that others are copied from."""
    with postgres_databases.fresh(name=MIGRATED) as url:
        storage = SqlStorage(url)
        storage.migrate()
        storage.close()
        yield MIGRATED


@pytest.fixture
def postgres_url(postgres_databases: Databases) -> Iterator[str]:
    """The URL of an empty database."""
    with postgres_databases.fresh() as url:
        yield url


@pytest.fixture(scope="session")
def migrated_sqlite(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A migrated SQLite file that others are copied from."""
    file = tmp_path_factory.mktemp("migrated") / "toolcrib.db"
    storage = SqlStorage(file)
    storage.migrate()
    storage.close()
    return file


@pytest.fixture
def sqlite_storage(migrated_sqlite: Path, tmp_path: Path) -> Iterator[SqlStorage]:
    storage = SqlStorage(Path(shutil.copy(migrated_sqlite, tmp_path / "toolcrib.db")))
    yield storage
    storage.close()


@pytest.fixture(scope="session")
def shared_postgres(postgres_databases: Databases, migrated_postgres: str) -> Iterator[str]:
    """The URL of a migrated database that is emptied after each test: quicker than a new one."""
    with postgres_databases.fresh(template=migrated_postgres) as url:
        yield url


@pytest.fixture
def postgres_storage(shared_postgres: str) -> Iterator[SqlStorage]:
    storage = SqlStorage(shared_postgres)
    yield storage
    storage.close()
    with psycopg.connect(shared_postgres) as connection:
        tables = sql.SQL(", ").join(map(sql.Identifier, metadata.tables))
        connection.execute(sql.SQL("TRUNCATE {}").format(tables))


@pytest.fixture(params=["sqlite", "postgres"])
def storage(request: pytest.FixtureRequest) -> SqlStorage:
    """The records in each of the two databases: what holds for one holds for the other."""
    chosen: SqlStorage = request.getfixturevalue(f"{request.param}_storage")
    return chosen
