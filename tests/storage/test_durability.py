"""What is acknowledged stays, whatever happens to the database or to this process."""

import asyncio
import os
import signal
import sqlite3
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

import app
from app.domain.batch import BatchStatus
from app.storage.base import Applied, ClaimBatch, CreateWorkspace, OperationalError, Refused
from app.storage.record_writer import RecordWriter
from app.storage.sql.storage import SqlStorage
from tests.support.postgres import Databases, PostgresServer
from tests.support.records import ends, make_batch, make_workspace, starts, submit
from tests.support.tcp_proxy import TcpProxy

pytestmark = pytest.mark.anyio

APPLIED = Applied()
WAIT_SECONDS = 30.0
SOURCE = Path(app.__file__).parent.parent
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(SOURCE)}


@pytest.fixture
def own_server() -> Iterator[PostgresServer]:
    with PostgresServer() as server:
        yield server


@pytest.mark.parametrize("how", ["stop", "kill"])
async def test_what_was_submitted_while_postgres_was_away_lands_once(own_server: PostgresServer, how: str) -> None:
    storage = SqlStorage(own_server.url)
    await asyncio.to_thread(storage.migrate)
    writer = RecordWriter(storage)
    writer.start()
    workspace = make_workspace()
    batches = [make_batch(workspace.id, calls=2) for _ in range(20)]
    await writer.write(CreateWorkspace(workspace))
    futures = [writer.submit(submit(batch)) for batch in batches]
    await futures[0]

    await asyncio.to_thread(getattr(own_server, how))
    futures += [writer.submit(starts(batch)) for batch in batches]
    with pytest.raises(OperationalError) as caught:
        storage.batch(batches[0].id)
    assert caught.value.reason == "connection"
    assert not await writer.drain(0.1)
    await asyncio.to_thread(own_server.start)
    futures += [writer.submit(ends(batch, 3)) for batch in batches]
    async with asyncio.timeout(WAIT_SECONDS):
        assert await asyncio.gather(*futures) == [APPLIED] * 60

    for batch in batches:
        assert [event.seq for event in storage.events(batch.id, after=0)] == [1, 2, 3, 4, 5, 6]
        assert storage.last_seq(batch.id) == (6, BatchStatus.COMPLETED)
    await writer.close()
    storage.close()


def test_read_does_not_fail_for_a_connection_that_a_restart_has_cut(own_server: PostgresServer) -> None:
    storage = SqlStorage(own_server.url)
    storage.migrate()
    workspace = make_workspace()
    storage.apply([CreateWorkspace(workspace)])
    assert storage.workspace(workspace.id) == workspace

    own_server.stop()
    own_server.start()

    assert storage.workspace(workspace.id) == workspace
    storage.close()


async def test_commit_whose_reply_is_cut_off_is_found_out(
    postgres_databases: Databases, migrated_postgres: str
) -> None:
    with postgres_databases.fresh(template=migrated_postgres) as url:
        address, _, database = url.removeprefix("postgresql://").rpartition("/")
        user, _, port = address.rpartition(":")
        with TcpProxy(int(port)) as proxy:
            storage = SqlStorage(f"postgresql://{user}:{proxy.port}/{database}")
            writer = RecordWriter(storage)
            writer.start()
            workspace = make_workspace()
            await writer.write(CreateWorkspace(workspace))
            batch = make_batch(workspace.id, calls=2)
            claimed = replace(batch, epoch=2)
            claim = ClaimBatch(batch.id, 1)
            for write in (submit(batch), claim, starts(claimed), ends(claimed, 3)):
                proxy.cut_after(b"COMMIT\0")
                assert await asyncio.wait_for(writer.write(write, droppable=True), WAIT_SECONDS) == APPLIED
                assert proxy.cut.is_set()
            assert await writer.write(ClaimBatch(batch.id, 1)) == Refused("terminal")
            assert [event.seq for event in storage.events(batch.id, after=0)] == [1, 2, 3, 4, 5, 6]

            proxy.cut_after(b"COMMIT\0")
            with pytest.raises(OperationalError) as caught:
                storage.apply([submit(make_batch(workspace.id))])
            assert (caught.value.reason, caught.value.in_doubt) == ("connection", True), caught.value
            proxy.cut_after(b"BEGIN")
            with pytest.raises(OperationalError) as caught:
                storage.apply([submit(make_batch(workspace.id))])
            assert (caught.value.reason, caught.value.in_doubt) == ("connection", False)
            await writer.close()
            storage.close()


def test_what_was_acknowledged_is_there_after_a_kill(tmp_path: Path) -> None:
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.support.record_load", "load", tmp_path],
        stdout=subprocess.PIPE,
        text=True,
        env=ENVIRONMENT,
        cwd=SOURCE,
    )
    assert process.stdout is not None
    acknowledged = [process.stdout.readline().strip() for _ in range(200)]
    process.send_signal(signal.SIGKILL)
    acknowledged += [line.strip() for line in process.stdout if line.endswith("\n")]
    process.wait(timeout=WAIT_SECONDS)
    process.stdout.close()

    storage = SqlStorage(tmp_path / "toolcrib.db")
    storage.migrate()

    assert len(set(acknowledged)) >= 200
    for batch_id in acknowledged:
        assert storage.last_seq(batch_id) == (6, BatchStatus.COMPLETED)
        assert [event.seq for event in storage.events(batch_id, after=0)] == [1, 2, 3, 4, 5, 6]
    for unfinished in storage.unfinished_batches():
        last = storage.last_seq(unfinished.batch_id)
        assert last is not None
        assert len(storage.events(unfinished.batch_id, after=0)) == last[0], "a group is whole or not there"
    storage.close()
    with sqlite3.connect(tmp_path / "toolcrib.db") as connection:
        assert connection.execute("PRAGMA integrity_check").fetchall() == [("ok",)]
        assert connection.execute("PRAGMA foreign_key_check").fetchall() == []
    connection.close()


def test_full_disk_refuses_new_work_and_stores_the_ends_of_what_runs(tmp_path: Path) -> None:
    # A tmpfs of 96 MB in a mount namespace of the process's own; an ordinary user becomes root in a user namespace.
    unshare = ["unshare", "--mount"] if os.geteuid() == 0 else ["unshare", "--user", "--map-root-user", "--mount"]
    probe = subprocess.run([*unshare, "true"], capture_output=True, text=True, check=False)
    if probe.returncode != 0:
        pytest.skip(f"a full disk cannot be made here: {probe.stderr.strip()}")
    script = 'mount -t tmpfs -o size=96m tmpfs "$1" && exec "$2" -m tests.support.record_load full "$1"'
    answer = subprocess.run(
        [*unshare, "sh", "-c", script, "sh", tmp_path, sys.executable],
        capture_output=True,
        text=True,
        check=False,
        env=ENVIRONMENT,
        cwd=SOURCE,
        timeout=WAIT_SECONDS * 2,
    )
    assert answer.returncode == 0, answer.stderr
    assert answer.stdout.startswith("accepted ")
    assert int(answer.stdout.split()[1]) > 20
