"""What is done over HTTP holds on both databases, and across a restart."""

import asyncio
import sqlite3
import stat
from pathlib import Path
from typing import Any

import pytest

from app.domain.abort import AbortSignal
from app.sandbox.file_locks import FileLocks
from tests.api.problems import assert_problem
from tests.support.postgres import PostgresServer
from tests.support.server import ServerThread, event_stream, eventually


@pytest.fixture(params=["sqlite", "postgres"])
def settings(request: pytest.FixtureRequest) -> dict[str, Any]:
    return {} if request.param == "sqlite" else {"database_url": request.getfixturevalue("postgres_url")}


def test_the_whole_way_is_the_same(tmp_path: Path, settings: dict[str, Any]) -> None:
    with ServerThread(tmp_path / "data", **settings) as server, server.client() as client:
        assert client.get("/version").json()["database"] == ("postgresql" if settings else "sqlite")
        assert client.get("/readyz").status_code == 200
        workspace = client.post("/v1/workspaces", json={"files": {"task.txt": "a\u0000b"}}).json()
        path = f"/v1/workspaces/{workspace['id']}"
        body = {"calls": [{"id": "b1", "name": "bash", "arguments": {"command": "cat -v task.txt"}}]}
        with event_stream(client, "POST", f"{path}/batches", json=body) as (response, events):
            seen = list(events)
        assert [event.id for event in seen] == list(range(1, len(seen) + 1))
        assert seen[-1].type == "batch_end"
        batch = client.get(response.headers["location"]).json()
        assert batch["status"] == "completed"
        [call] = batch["calls"]
        for query in ({"tool": "bash"}, {"toolcall": "b1"}, {"q": "task.txt"}, {"status": "succeeded"}):
            assert client.get("/v1/calls", params={"workspace": workspace["id"], **query}).json()["data"] == [call]
        for query in ({"path": "x"}, {"error": "internal"}, {"minduration": "100000"}, {"tool": "ä"}, {"batch": "x"}):
            assert client.get("/v1/calls", params=query).json() == {"data": [], "nextCursor": None}
        assert client.get(f"/v1/calls/{call['id']}/output").content == b"a^@b"
        changed = client.patch(path, json={"name": "Größe ✓", "metadata": {"x": "\u0000"}}).json()
        assert (changed["name"], changed["metadata"]) == ("Größe ✓", {"x": "\u0000"})
        assert client.get("/v1/workspaces").json()["data"] == [changed]
        assert client.delete(path).status_code == 204
        assert_problem(client.post(f"{path}/batches", json=body), "workspace_gone")


def test_everything_is_still_there_after_a_restart(tmp_path: Path, settings: dict[str, Any]) -> None:
    body = {"calls": [{"name": "bash", "arguments": {"command": "echo one; echo two >&2"}}]}
    with ServerThread(tmp_path / "data", **settings) as server, server.client() as client:
        workspace = client.post("/v1/workspaces", json={"name": "kept", "ttlSeconds": 3600}).json()
        batch = client.post(f"/v1/workspaces/{workspace['id']}/batches", json=body, params={"wait": "10"}).json()
        with event_stream(client, "GET", f"/v1/batches/{batch['id']}/events") as (_, events):
            seen = list(events)
    with ServerThread(tmp_path / "data", **settings) as server, server.client() as client:
        known = client.get(f"/v1/workspaces/{workspace['id']}").json()
        assert known == {**workspace, "lastUsedAt": known["lastUsedAt"]}
        assert client.get(f"/v1/batches/{batch['id']}").json() == batch
        with event_stream(client, "GET", f"/v1/batches/{batch['id']}/events") as (_, events):
            assert list(events) == seen
        output = client.get(f"/v1/calls/{batch['calls'][0]['id']}/output", params={"stream": "stderr"})
        assert output.content == b"two\n"


def test_a_stream_ends_when_the_database_goes_away_and_goes_on_when_it_is_back(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    command = "echo up; until [ -e go ]; do sleep 0.02; done; echo down"
    with (
        PostgresServer() as database,
        ServerThread(tmp_path / "data", database_url=database.url) as server,
        ServerThread(tmp_path / "other", database_url=database.url) as elsewhere,
        server.client() as client,
        elsewhere.client() as follower,
    ):
        workspace = client.post("/v1/workspaces", json={}).json()
        body = {"calls": [{"name": "bash", "arguments": {"command": command}}]}
        batch = client.post(f"/v1/workspaces/{workspace['id']}/batches", json=body).json()
        path = f"/v1/batches/{batch['id']}/events"
        with event_stream(follower, "GET", path) as (_, events):
            seen = [next(events) for _ in range(3)]
            database.kill()
            seen += list(events)
        assert seen[-1].type == "tool_execution_update"
        database.start()
        (Path(workspace["root"]) / "go").touch()
        eventually(lambda: follower.get("/readyz").status_code == 200, 20)
        with event_stream(follower, "GET", path, headers={"Last-Event-ID": str(seen[-1].id)}) as (_, events):
            seen += list(events)
        assert [event.id for event in seen] == list(range(1, len(seen) + 1))
        # There are two processes: after 3.6 s without a database the command is ended.
        assert (seen[-1].type, seen[-1].data["status"] in {"completed", "interrupted"}) == ("batch_end", True)
    told = capfd.readouterr()
    assert "answer_cut" in told.out
    assert "unhandled_error" not in told.out + told.err


def test_files_are_changed_under_locks_that_other_processes_take_too(tmp_path: Path, postgres_url: str) -> None:
    data_dir = tmp_path / "data"
    with ServerThread(data_dir, database_url=postgres_url) as server, server.client() as client:
        workspace = client.post("/v1/workspaces", json={"files": {"task.txt": "old"}}).json()
        assert stat.S_IMODE((data_dir / "file-locks").stat().st_mode) == 0o600
        root = Path(workspace["root"]).stat()
        other = FileLocks(data_dir / "file-locks")
        give_back = asyncio.run(other.hold((root.st_dev, root.st_ino, "task.txt"), AbortSignal()))
        body = {"calls": [{"name": "write", "arguments": {"path": "task.txt", "content": "new"}}]}
        batch = client.post(f"/v1/workspaces/{workspace['id']}/batches", json=body).json()
        batch = client.get(f"/v1/batches/{batch['id']}", params={"wait": "0.3"}).json()
        assert batch["status"] == "running"
        assert client.put(f"/v1/workspaces/{workspace['id']}/files/b.txt", content=b"b").status_code == 201
        give_back()
        batch = client.get(f"/v1/batches/{batch['id']}", params={"wait": "10"}).json()
        assert [call["status"] for call in batch["calls"]] == ["succeeded"]
        other.close()


def test_what_a_stop_cut_short_is_finished_at_the_next_start(tmp_path: Path) -> None:
    data_dir = tmp_path / "data"
    with ServerThread(data_dir) as server, server.client() as client:
        deleting = client.post("/v1/workspaces", json={"files": {"a/b.txt": "x"}}).json()
        expired = client.post("/v1/workspaces", json={"ttlSeconds": 3600}).json()
    with sqlite3.connect(data_dir / "toolcrib.db") as database:
        database.execute("UPDATE workspaces SET status = 'deleting' WHERE id = ?", (deleting["id"],))
        database.execute("UPDATE workspaces SET expires_at = 1 WHERE id = ?", (expired["id"],))
    database.close()
    (data_dir / "trash" / "left-over").mkdir()
    with ServerThread(data_dir) as server, server.client() as client:
        assert client.get(f"/v1/workspaces/{deleting['id']}").json()["status"] == "deleted"
        eventually(lambda: client.get(f"/v1/workspaces/{expired['id']}").json()["status"] == "expired")
        eventually(lambda: not list((data_dir / "trash").iterdir()))
        assert not list((data_dir / "workspaces").iterdir())
