"""A copy of all records: to the other kind of database and back, and what stops it."""

import itertools
import sqlite3
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import psycopg
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from psycopg import sql
from sqlalchemy import Column, Table, insert, select, text

from app.errors import ConfigurationError
from app.storage.base import CreateWorkspace, DataError, SchemaTooNew
from app.storage.instance_lock import InstanceLock
from app.storage.sql.database_copy import STATEMENT_ROWS, CopyMismatch, CopyRefused, TableSum, copy_database
from app.storage.sql.engine import column_kind, open_database
from app.storage.sql.schema import metadata
from app.storage.sql.storage import SqlStorage
from tests.support.postgres import Databases
from tests.support.records import make_workspace

Rows = dict[str, list[tuple[Any, ...]]]

MIB = 1024 * 1024
_names = itertools.count()


@pytest.fixture
def source(migrated_sqlite: Path, tmp_path: Path) -> Path:
    return new_sqlite(migrated_sqlite, tmp_path)


@pytest.fixture(params=["sqlite", "postgres"])
def target(request: pytest.FixtureRequest, tmp_path: Path) -> str | Path:
    """A database of each kind that holds nothing at all."""
    if request.param == "postgres":
        url: str = request.getfixturevalue("postgres_url")
        return url
    (tmp_path / "target").mkdir()
    return tmp_path / "target" / "toolcrib.db"


@pytest.fixture(scope="module")
def migrated_target(postgres_databases: Databases, migrated_postgres: str) -> Iterator[str]:
    with postgres_databases.fresh(template=migrated_postgres) as url:
        yield url


def new_sqlite(migrated: Path, below: Path) -> Path:
    directory = below / f"data-{next(_names)}"
    directory.mkdir()
    file = directory / "toolcrib.db"
    file.write_bytes(migrated.read_bytes())
    return file


def contents(database: str | Path) -> Rows:
    """Everything there is, read by SQLAlchemy, in the order of the keys."""
    found: Rows = {}
    with open_database(database).migrator().connect() as connection:
        for table in metadata.sorted_tables:
            names = table.columns.keys()
            places = [names.index(column.name) for column in table.primary_key.columns]
            rows = [tuple(row) for row in connection.execute(select(table))]
            found[table.name] = sorted(rows, key=lambda row, places=places: [row[place] for place in places])
    return found


def fill(database: str | Path, rows: Rows) -> None:
    opened = open_database(database)
    with opened.migrator().begin() as connection:
        for table in metadata.sorted_tables:
            if rows[table.name]:
                opened.insert_rows(connection.connection.cursor(), table, rows[table.name])


def a_row_in_every_table() -> Rows:
    samples = {"int8": -(1 << 63), "int4": (1 << 31) - 1, "bool": True, "bytea": b"\0\xff", "text": "key"}
    return {
        table.name: [tuple(samples[column_kind(column)] for column in table.columns)]
        for table in metadata.sorted_tables
    }


def empty(url: str) -> None:
    with psycopg.connect(url) as connection:
        tables = sql.SQL(", ").join(map(sql.Identifier, metadata.tables))
        connection.execute(sql.SQL("TRUNCATE {}").format(tables))


def execute(database: str | Path, *statements: str) -> list[Any]:
    with open_database(database).migrator().begin() as connection:
        for statement in statements:
            result = connection.execute(text(statement))
        return list(result) if result.returns_rows else []


# Of every length up to what an index of Postgres takes, and of every character that Postgres takes in a text.
TEXTS = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), max_size=40)
VALUES: dict[str, st.SearchStrategy[Any]] = {
    "int8": st.integers(-(1 << 63), (1 << 63) - 1) | st.sampled_from([-(1 << 63), (1 << 63) - 1]),
    "int4": st.integers(-(1 << 31), (1 << 31) - 1) | st.sampled_from([-(1 << 31), (1 << 31) - 1]),
    "bool": st.booleans(),
    "bytea": st.binary(max_size=200) | st.sampled_from([b"", b"\0", b"a\0b", "é\0".encode(), b"\xff\\x00"]),
    "text": TEXTS,
}


def unique_parts(table: Table) -> list[Any]:
    """What no two rows may have in common: the key, and each unique index as if it were for all rows."""
    names = table.columns.keys()
    groups = [table.primary_key.columns.keys()]
    groups += [index.columns.keys() for index in table.indexes if index.unique]

    def part(group: Sequence[str]) -> Any:
        places = [names.index(name) for name in group]

        def values(row: tuple[Any, ...]) -> Any:
            found = tuple(row[place] for place in places)
            return object() if None in found else found

        return values

    return [part(group) for group in groups]


@st.composite
def records(draw: st.DrawFn) -> Rows:
    """Rows for every table that there is, whatever they mean."""
    made: Rows = {}
    for table in metadata.sorted_tables:
        columns = [column_values(column, made) for column in table.columns]
        if any(values is None for values in columns):
            made[table.name] = []
            continue
        parts = unique_parts(table)
        rows = draw(st.lists(st.tuples(*columns), max_size=5))  # type: ignore[arg-type]
        seen: list[set[Any]] = [set() for _ in parts]
        kept = made[table.name] = []
        for row in rows:
            keys = [part(row) for part in parts]
            if not any(key in known for key, known in zip(keys, seen, strict=True)):
                kept.append(row)
                for key, known in zip(keys, seen, strict=True):
                    known.add(key)
    return made


def column_values(column: Column[Any], made: Rows) -> st.SearchStrategy[Any] | None:
    values = VALUES[column_kind(column)]
    for key in column.foreign_keys:
        place = key.column.table.columns.keys().index(key.column.name)
        known = [row[place] for row in made[key.column.table.name]]
        if not known:
            return st.none() if column.nullable else None
        values = st.sampled_from(known)
    return st.none() | values if column.nullable else values


@settings(max_examples=12, deadline=None, suppress_health_check=list(HealthCheck))
@given(rows=records())
def test_any_records_survive_the_way_to_postgres_and_back(
    migrated_sqlite: Path, tmp_path: Path, migrated_target: str, rows: Rows
) -> None:
    first = new_sqlite(migrated_sqlite, tmp_path)
    second = new_sqlite(migrated_sqlite, tmp_path)
    fill(first, rows)
    empty(migrated_target)
    there = copy_database(first, migrated_target)
    assert contents(migrated_target) == contents(first)
    back = copy_database(migrated_target, second)
    assert contents(second) == contents(first)
    assert [(one.table, one.rows, one.sha256) for one in there] == [(one.table, one.rows, one.sha256) for one in back]
    assert {one.table: one.rows for one in there} == {name: len(kept) for name, kept in rows.items()}


def test_a_row_in_every_table_arrives(source: Path, target: str | Path) -> None:
    rows = a_row_in_every_table()
    fill(source, rows)
    lines: list[str] = []
    copy_database(source, target, lines.append)
    assert contents(target) == rows
    assert [line.partition(":")[0] for line in lines] == [table.name for table in metadata.sorted_tables]
    assert all(len(kept) == 1 for kept in rows.values())


def test_values_of_many_megabytes_and_more_rows_than_one_statement_takes_arrive(
    source: Path, target: str | Path
) -> None:
    large = bytes(range(256)) * (10 * MIB // 256)
    batch = "batch_1"
    rows: Rows = {table.name: [] for table in metadata.sorted_tables}
    rows["call_output"] = [(batch, seq, 0, "call_1", "stdout", 0, 0, large) for seq in range(3)]
    rows["events"] = [(batch, seq, "t", None, seq, b"{}") for seq in range(STATEMENT_ROWS + 1)]
    fill(source, rows)
    sums = {one.table: one.rows for one in copy_database(source, target)}
    assert sums | {"call_output": 3, "events": STATEMENT_ROWS + 1} == sums
    assert contents(target) == contents(source)


def test_no_table_is_sorted_in_memory_and_none_numbers_its_rows_by_itself(source: Path) -> None:
    # The first would make memory grow with the table; the second would leave a sequence of Postgres behind.
    for table in metadata.sorted_tables:
        assert table.primary_key.columns, table
        assert table.autoincrement_column is None, table
        order = ", ".join(table.primary_key.columns.keys())
        plan = execute(source, f"EXPLAIN QUERY PLAN SELECT * FROM {table.name} ORDER BY {order}")
        assert not [step for step in plan if "TEMP B-TREE" in step.detail], plan


def test_a_target_that_changes_a_value_is_found_out_and_keeps_nothing(source: Path, target: str | Path) -> None:
    storage = SqlStorage(target)
    storage.migrate()
    storage.close()
    if isinstance(target, Path):
        execute(
            target,
            "CREATE TRIGGER spoil AFTER INSERT ON workspaces BEGIN "
            "UPDATE workspaces SET created_at = created_at + 1 WHERE id = new.id; END",
        )
    else:
        execute(
            target,
            "CREATE FUNCTION spoil() RETURNS trigger LANGUAGE plpgsql AS "
            "$$ BEGIN NEW.created_at := NEW.created_at + 1; RETURN NEW; END $$",
            "CREATE TRIGGER spoil BEFORE INSERT ON workspaces FOR EACH ROW EXECUTE FUNCTION spoil()",
        )
    add_workspace(source)
    with pytest.raises(
        CopyMismatch, match=r"the target gives back 1 rows of workspaces with SHA-256 .* was left as it"
    ):
        copy_database(source, target)
    assert not any(contents(target).values())


def test_a_row_that_the_target_loses_is_found_out(source: Path, postgres_url: str) -> None:
    storage = SqlStorage(postgres_url)
    storage.migrate()
    storage.close()
    execute(
        postgres_url,
        "CREATE FUNCTION lose() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN RETURN NULL; END $$",
        "CREATE TRIGGER lose BEFORE INSERT ON api_keys FOR EACH ROW EXECUTE FUNCTION lose()",
    )
    with open_database(source).migrator().begin() as connection:
        table = metadata.tables["api_keys"]
        samples: dict[str, Any] = {"int8": 1, "bytea": b"x", "text": "x"}
        connection.execute(insert(table), {column.name: samples[column_kind(column)] for column in table.columns})
    with pytest.raises(CopyMismatch, match=r"gives back 0 rows of api_keys .* has 1 "):
        copy_database(source, postgres_url)


def add_workspace(database: str | Path) -> None:
    storage = SqlStorage(database)
    storage.apply([CreateWorkspace(make_workspace())])
    storage.close()


def test_a_target_with_records_is_refused_and_left_alone(source: Path, target: str | Path) -> None:
    storage = SqlStorage(target)
    storage.migrate()
    storage.close()
    add_workspace(target)
    before = contents(target)
    with pytest.raises(CopyRefused, match="not empty, its table workspaces has rows"):
        copy_database(source, target)
    assert contents(target) == before


def test_a_source_that_is_none_is_refused(tmp_path: Path, postgres_url: str, target: str | Path) -> None:
    with pytest.raises(CopyRefused, match="there is no database"):
        copy_database(tmp_path / "toolcrib.db", target)
    assert not (tmp_path / "toolcrib.db").exists()
    sqlite3.connect(tmp_path / "toolcrib.db").execute("CREATE TABLE t (x)").connection.close()
    with pytest.raises(CopyRefused, match="the source holds no records of Toolcrib"):
        copy_database(tmp_path / "toolcrib.db", target)
    (tmp_path / "other").mkdir()
    with pytest.raises(CopyRefused, match="the source holds no records of Toolcrib"):
        copy_database(postgres_url, tmp_path / "other" / "toolcrib.db")


def test_a_source_at_another_revision_is_refused(source: Path, target: str | Path) -> None:
    execute(source, "UPDATE alembic_version SET version_num = '0000'")
    with pytest.raises(CopyRefused, match=r"the source is at schema revision 0000 .* `toolcrib migrate`"):
        copy_database(source, target)


def test_a_target_of_a_newer_version_is_refused(source: Path, target: str | Path) -> None:
    storage = SqlStorage(target)
    storage.migrate()
    storage.close()
    execute(target, "UPDATE alembic_version SET version_num = '9999'")
    with pytest.raises(SchemaTooNew, match="9999"):
        copy_database(source, target)


def test_a_data_directory_in_use_is_refused(source: Path, target: str | Path) -> None:
    with InstanceLock(source.parent), pytest.raises(ConfigurationError, match="another Toolcrib process"):
        copy_database(source, target)


def test_a_postgres_in_use_is_refused(
    source: Path, migrated_target: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("app.storage.sql.database_copy.LEAVE_SECONDS", 0.1)
    empty(migrated_target)
    storage = SqlStorage(migrated_target)
    storage.ping()
    (tmp_path / "other").mkdir()
    try:
        with pytest.raises(CopyRefused, match="a Toolcrib process is connected to"):
            copy_database(source, migrated_target)
        with pytest.raises(CopyRefused, match="a Toolcrib process is connected to"):
            copy_database(migrated_target, tmp_path / "other" / "toolcrib.db")
    finally:
        storage.close()
    copy_database(source, migrated_target)


def test_a_value_of_the_wrong_kind_in_the_last_table_is_named_and_nothing_is_kept(
    source: Path, target: str | Path
) -> None:
    fill(source, a_row_in_every_table())
    last = metadata.sorted_tables[-1]
    column = next(column.name for column in last.columns if column_kind(column) == "bytea")
    execute(source, f"UPDATE {last.name} SET {column} = 'a text'")
    lines: list[str] = []
    with pytest.raises(DataError, match=f"{last.name}.{column} holds 'a text', which does not fit a column of bytea"):
        copy_database(source, target, lines.append)
    assert len(lines) == len(metadata.tables) - 1
    assert not any(contents(target).values())


def test_a_text_that_postgres_does_not_take_is_told_with_its_table(source: Path, postgres_url: str) -> None:
    add_workspace(source)
    with sqlite3.connect(source) as connection:
        connection.execute("UPDATE workspaces SET owner = ?", ("a\0b",))
    connection.close()
    with pytest.raises(
        DataError, match=r"(?s)the target refuses a row of workspaces: .*COPY workspaces, line 1, column owner"
    ):
        copy_database(source, postgres_url)
    assert not any(contents(postgres_url).values())


def test_rows_that_run_into_each_other_have_different_sums() -> None:
    rows: list[list[tuple[Any, ...]]] = [
        [("ab", "c")], [("a", "bc")], [("a", b"bc")], [("abc",)], [(None, "abc")],
        [("abc", None)], [(1, 23)], [(12, 3)], [("1", 23)], [(1, None)], [(True, 23, None)],
    ]  # fmt: skip
    sums = set()
    for table in rows:
        added = TableSum("t")
        for row in table:
            added.add(row)
        sums.add(added.sha256)
    assert len(sums) == len(rows)
