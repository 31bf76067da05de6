"""The advice of docs/backup.md, carried out: its own commands, on a service under load, restored elsewhere."""

import itertools
import os
import re
import shlex
import shutil
import signal
import sqlite3
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Self

import psycopg
import pytest

from tests.support.postgres import Databases, installations
from tests.support.server import KEY, ServerProcess, ServerThread, clean_environment, eventually

ROOT = Path(__file__).parents[2]
BLOCKS = re.findall(r"^```sh\n(.*?)^```$", (ROOT / "docs" / "backup.md").read_text(), re.DOTALL | re.MULTILINE)
TERMINAL = {"succeeded", "failed", "cancelled", "skipped"}


def block(*words: str) -> str:
    """Return the one command block of the page that has all of these words."""
    [found] = [text for text in BLOCKS if all(word in text for word in words)]
    return found


def shell(directory: Path, commands: str, **environment: str) -> str:
    """Run commands of the page in a directory that has the service's `data`, and return what they print."""
    programs = directory / "bin"
    programs.mkdir(exist_ok=True)
    toolcrib = programs / "toolcrib"
    toolcrib.write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} -m app "$@"\n')
    toolcrib.chmod(0o755)
    found = installations()
    path = [str(programs), *map(str, found[:1]), os.environ["PATH"]]
    done = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", commands],
        cwd=directory,
        env=clean_environment(directory / "data") | {"PATH": os.pathsep.join(path)} | environment,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


class Load:
    """A client that posts batches, one after another, until it is told to stop."""

    def __init__(self, server: ServerProcess, workspace: str) -> None:
        self.ended: list[dict[str, Any]] = []
        self._workspace = workspace
        self._stopped = False
        self._server = server
        self._thread = threading.Thread(target=self._run, daemon=True)

    def _run(self) -> None:
        with self._server.client() as client:
            for number in itertools.count():
                if self._stopped:
                    return
                calls = [
                    {"name": "write", "arguments": {"path": f"{number}.txt", "content": f"content of {number}\n"}},
                    {"name": "bash", "arguments": {"command": f"echo {number} >> log; head -c 20000 /dev/zero"}},
                ]
                path = f"/v1/workspaces/{self._workspace}/batches?wait=60"
                self.ended.append(client.post(path, json={"calls": calls}).json())

    def wait_for(self, more: int) -> None:
        wanted = len(self.ended) + more
        eventually(lambda: len(self.ended) >= wanted or not self._thread.is_alive(), 60)
        assert self._thread.is_alive()

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stopped = True
        self._thread.join(60)


@contextmanager
def busy_service(directory: Path, **environment: str) -> Iterator[tuple[ServerProcess, Load, str]]:
    """A service with a command that does not end and a client that goes on; gives the running batch's id too."""
    with (
        ServerProcess(directory / "data", {"TOOLCRIB_API_KEY": KEY, **environment}) as server,
        server.client() as client,
    ):
        workspace = client.post("/v1/workspaces", json={"files": {"task.txt": "status: draft"}}).json()["id"]
        running = client.post(
            f"/v1/workspaces/{workspace}/batches",
            json={"calls": [{"name": "bash", "arguments": {"command": "touch begun; sleep 600"}}, {"name": "read"}]},
        ).json()["id"]
        begun = directory / "data" / "workspaces" / workspace / "begun"
        eventually(begun.exists, 30)
        with Load(server, workspace) as load:
            load.wait_for(3)
            yield server, load, running


def check(server: ServerThread, ended: list[dict[str, Any]], running: str) -> None:
    """Compare a service on restored records with what had ended when the backup began."""
    with server.client() as client:
        for batch in ended:
            assert client.get(f"/v1/batches/{batch['id']}").json() == batch
            events = client.get(f"/v1/batches/{batch['id']}/events", headers={"Accept": "text/event-stream"})
            assert "event: batch_end" in events.text
        interrupted = client.get(f"/v1/batches/{running}?wait=30").json()
        assert interrupted["status"] == "interrupted"
        assert [call["error"]["code"] for call in interrupted["calls"]] == ["interrupted"] * 2
        workspace = interrupted["workspaceId"]

        def going_on() -> list[dict[str, Any]]:
            listed = [
                client.get(f"/v1/workspaces/{workspace}/batches?status={status}") for status in ("queued", "running")
            ]
            return [batch for answer in listed for batch in answer.json()["data"]]

        # What had not begun when the backup was made runs now.
        eventually(lambda: not going_on(), 30)
        cursor = ""
        successful = 0
        while cursor is not None:
            page = client.get(f"/v1/calls?limit=200{cursor}").json()
            for call in page["data"]:
                assert call["status"] in TERMINAL
                if call["toolName"] == "write" and call["status"] == "succeeded":
                    # The records came before the files: what they say was written is there.
                    path = call["arguments"]["path"]
                    assert client.get(f"/v1/workspaces/{workspace}/files/{path}").text == call["arguments"]["content"]
                    successful += 1
            cursor = page["nextCursor"] and f"&cursor={page['nextCursor']}"
        assert successful >= len(ended)
        read = client.post(f"/v1/workspaces/{workspace}/tools/read", json={"path": "task.txt"}).json()
        assert read["result"]["details"]["lines"] == 1


def integrity(file: Path) -> str:
    connection = sqlite3.connect(file)
    try:
        [(found,)] = connection.execute("PRAGMA integrity_check")
        return str(found)
    finally:
        connection.close()


@pytest.mark.timeout(300)
def test_a_backup_of_a_running_service_on_sqlite_is_restored_elsewhere(tmp_path: Path) -> None:
    with busy_service(tmp_path) as (_, load, running):
        ended = list(load.ended)
        shell(tmp_path, block("VACUUM", "tar"))
        load.wait_for(2)
    shutil.rmtree(tmp_path / "data")
    assert integrity(tmp_path / "backup" / "toolcrib.db") == "ok"
    said = shell(tmp_path, block("cp backup", "relocate"))
    assert said == "open workspaces: 1; the directories of 1 were taken for theirs, those of 0 are missing\n"
    with ServerThread(tmp_path / "restored") as server:
        check(server, ended, running)
    assert integrity(tmp_path / "restored" / "toolcrib.db") == "ok"


@pytest.mark.timeout(300)
def test_both_files_of_one_moment_are_a_backup_of_sqlite(tmp_path: Path) -> None:
    # What a snapshot of the file system holds, and what a crash leaves.
    restored = tmp_path / "restored"
    restored.mkdir(mode=0o700)
    with busy_service(tmp_path) as (server, load, running):
        ended = list(load.ended)
        server.process.send_signal(signal.SIGSTOP)
        try:
            os.waitid(os.P_PID, server.process.pid, os.WSTOPPED | os.WNOWAIT)
            for name in ("toolcrib.db", "toolcrib.db-wal"):
                shutil.copy(tmp_path / "data" / name, restored)
        finally:
            server.process.send_signal(signal.SIGCONT)
        shell(tmp_path, "mkdir backup\n" + block("VACUUM", "tar").splitlines()[-1])
        load.wait_for(2)
    shutil.rmtree(tmp_path / "data")
    shell(tmp_path, "\n".join(block("cp backup", "relocate").splitlines()[2:]))
    with ServerThread(restored) as service:
        check(service, ended, running)
    assert integrity(restored / "toolcrib.db") == "ok"


@pytest.mark.skipif(shutil.which("sqlite3") is None, reason="needs SQLite's own program, sqlite3")
def test_the_program_of_sqlite_makes_the_same_file(sqlite_storage: Any, tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "toolcrib.db").symlink_to(tmp_path / "toolcrib.db")
    [command] = re.findall(
        r"`(sqlite3 data/toolcrib\.db\s+\"VACUUM INTO '[^']*'\")`", (ROOT / "docs" / "backup.md").read_text()
    )
    shell(tmp_path, f"mkdir backup; {' '.join(command.split())}")
    assert integrity(tmp_path / "backup" / "toolcrib.db") == "ok"


def dumps(server_url: str) -> bool:
    """Whether the first `pg_dump` that is found is as new as the server."""
    programs = (
        [Path(found) for found in (installations()[0] / "pg_dump",) if Path(found).exists()] if installations() else []
    )
    if not programs:
        return False
    said = subprocess.run([programs[0], "--version"], capture_output=True, text=True, check=True).stdout
    with psycopg.connect(server_url) as connection:
        return int(said.split()[2].partition(".")[0]) >= connection.info.server_version // 10_000


@pytest.mark.timeout(300)
def test_a_backup_of_a_running_service_on_postgres_is_restored_elsewhere(
    tmp_path: Path, postgres_url: str, postgres_databases: Databases
) -> None:
    if not dumps(postgres_url):
        pytest.skip("needs a pg_dump that is at least as new as the server")
    with busy_service(tmp_path, TOOLCRIB_DATABASE_URL=postgres_url) as (_, load, running):
        ended = list(load.ended)
        shell(tmp_path, block("pg_dump"), TOOLCRIB_DATABASE_URL=postgres_url)
        load.wait_for(2)
    shutil.rmtree(tmp_path / "data")
    with postgres_databases.fresh() as url:
        said = shell(tmp_path, block("pg_restore"), RESTORED_URL=url)
        assert "the directories of 1 were taken for theirs" in said
        with ServerThread(tmp_path / "restored", database_url=url) as server:
            check(server, ended, running)
