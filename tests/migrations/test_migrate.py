"""Bringing a database to the newest revision: alone, at once with others, again, and not at all when it is newer."""

import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from alembic import command
from alembic.autogenerate import compare_metadata
from alembic.config import Config
from alembic.migration import MigrationContext
from alembic.script import ScriptDirectory
from sqlalchemy import text

import app
import migrations
from app.storage.base import Applied, CreateWorkspace, DataError, SchemaTooNew
from app.storage.sql import migrate as migrate_module
from app.storage.sql.engine import open_database
from app.storage.sql.schema import metadata
from app.storage.sql.storage import SqlStorage
from tests.support.postgres import Databases, PostgresServer, installations
from tests.support.records import make_workspace

SOURCE = Path(app.__file__).parent.parent
WAIT_SECONDS = 90

EXPRESSION_INDEXES = {
    "ix_calls_tool": "CREATE INDEX ix_calls_tool ON calls (substr(tool_name, 1, 64), id)",
    "ix_calls_path": "CREATE INDEX ix_calls_path ON calls (workspace_id, substr(path, 1, 256), id) WHERE path IS NOT NULL",
}

# Four processes of one import, which set off together when their common standard input ends.
STARTERS = """
import os, sys, traceback
from pathlib import Path
import alembic.command
from app.storage.sql.storage import SqlStorage
children = []
for _ in range(4):
    child = os.fork()
    if child == 0:
        try:
            storages = [SqlStorage(target if "://" in target else Path(target)) for target in sys.argv[1:]]
            sys.stdin.buffer.raw.read()
            for storage in storages:
                storage.migrate()
                storage.close()
        except BaseException:
            traceback.print_exc()
            os._exit(1)
        os._exit(0)
    children.append(child)
sys.exit([os.waitpid(child, 0)[1] for child in children] != [0] * 4)
"""


@pytest.fixture(params=["sqlite", "postgres"])
def target(request: pytest.FixtureRequest, tmp_path: Path) -> str | Path:
    """An empty database of each kind."""
    if request.param == "sqlite":
        return tmp_path / "a % name & such.db"
    url: str = request.getfixturevalue("postgres_url")
    return url


@pytest.fixture
def storage(target: str | Path) -> Iterator[SqlStorage]:
    made = SqlStorage(target)
    yield made
    made.close()


def execute(target: str | Path, statement: str) -> list[Any]:
    engine = open_database(target).migrator()
    with engine.begin() as connection:
        result = connection.execute(text(statement))
        return list(result) if result.returns_rows else []


def alembic_config() -> Config:
    config = Config()
    config.set_main_option("script_location", str(migrations.LOCATION))
    config.set_main_option("path_separator", "os")
    return config


def test_empty_database_is_brought_to_head_and_again_is_nothing(storage: SqlStorage, target: str | Path) -> None:
    storage.migrate()
    storage.migrate()
    assert execute(target, "SELECT version_num FROM alembic_version") == [(migrations.HEAD,)]
    workspace = make_workspace()
    assert storage.apply([CreateWorkspace(workspace)]) == [Applied()]
    storage.migrate()
    assert storage.workspace(workspace.id) == workspace


def test_four_starters_at_once_all_succeed(tmp_path: Path, postgres_url: str) -> None:
    targets: list[str | Path] = [tmp_path / "toolcrib.db", postgres_url]
    answer = subprocess.run(
        [sys.executable, "-c", STARTERS, *targets],
        input="",
        capture_output=True,
        text=True,
        check=False,
        cwd=SOURCE,
        env={**os.environ, "PYTHONPATH": str(SOURCE)},
        timeout=WAIT_SECONDS,
    )
    assert (answer.stderr, answer.returncode) == ("", 0)
    for target in targets:
        assert execute(target, "SELECT version_num FROM alembic_version") == [(migrations.HEAD,)]


@pytest.mark.filterwarnings("ignore:Skipped unsupported reflection of expression-based index ix_calls_")
@pytest.mark.filterwarnings("ignore:autogenerate skipping metadata-specified expression-based index 'ix_calls_")
def test_revisions_and_tables_agree(storage: SqlStorage, target: str | Path) -> None:
    storage.migrate()
    with open_database(target).migrator().connect() as connection:
        context = MigrationContext.configure(connection, opts={"compare_type": True})
        difference = compare_metadata(context, metadata)
        if connection.dialect.name == "sqlite":
            # SQLite does not tell of indexes on expressions.
            difference = [entry for entry in difference if getattr(entry[1], "name", None) not in EXPRESSION_INDEXES]
            named = text("SELECT sql FROM sqlite_master WHERE name = :name")
            for name, made in EXPRESSION_INDEXES.items():
                assert connection.execute(named, {"name": name}).scalar() == made
    assert difference == []


def test_database_of_a_newer_version_is_refused_and_left_alone(storage: SqlStorage, target: str | Path) -> None:
    storage.migrate()
    execute(target, "UPDATE alembic_version SET version_num = '9999'")
    with pytest.raises(SchemaTooNew, match=f"revision 9999.*newest is {migrations.HEAD}"):
        storage.migrate()
    assert execute(target, "SELECT version_num FROM alembic_version") == [("9999",)]


def test_migration_that_fails_leaves_nothing(storage: SqlStorage, target: str | Path) -> None:
    execute(target, "CREATE TABLE call_output (something INTEGER)")
    with pytest.raises(Exception, match="call_output"):
        storage.migrate()
    execute(target, "DROP TABLE call_output")
    storage.migrate()
    assert execute(target, "SELECT count(*) FROM workspaces") == [(0,)]


def test_migrate_waits_for_the_starter_before_it(storage: SqlStorage, target: str | Path) -> None:
    database = open_database(target)
    waiting = threading.Thread(target=storage.migrate)
    with migrate_module._lock(database.file, database.migrator()):
        waiting.start()
        waiting.join(0.3)
        assert waiting.is_alive()
    waiting.join(WAIT_SECONDS)
    assert not waiting.is_alive()
    assert execute(target, "SELECT version_num FROM alembic_version") == [(migrations.HEAD,)]


def test_head_is_the_newest_revision_of_one_chain() -> None:
    assert ScriptDirectory.from_config(alembic_config()).get_heads() == [migrations.HEAD]


def test_every_postgres_on_this_machine_takes_the_schema() -> None:
    for programs in installations()[1:]:
        with PostgresServer(programs) as server, Databases(server.url).fresh() as url:
            storage = SqlStorage(url)
            storage.migrate()
            workspace = make_workspace()
            assert storage.apply([CreateWorkspace(workspace)]) == [Applied()]
            assert storage.workspace(workspace.id) == workspace
            storage.close()


def test_downgrade_takes_everything_away(storage: SqlStorage, target: str | Path) -> None:
    storage.migrate()
    with open_database(target).migrator().begin() as connection:
        config = alembic_config()
        config.attributes["connection"] = connection
        command.downgrade(config, "base")
    storage.migrate()
    assert storage.keys() == []


def test_file_that_is_no_database_is_an_error(tmp_path: Path) -> None:
    file = tmp_path / "toolcrib.db"
    file.write_bytes(b"this is no database" * 100)
    storage = SqlStorage(file)
    with pytest.raises(DataError, match="not a database"):
        storage.migrate()
    storage.close()
