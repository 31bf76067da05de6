"""A service that moves from SQLite to Postgres: the same answers from the other database."""

import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

import httpx2
import pytest

from app.commands import copy_records, relocate_workspaces
from app.domain.ids import new_id
from app.errors import ConfigurationError
from tests.support.server import ServerProcess, ServerThread, eventually

# What the records hold that is no plain text: U+0000, bytes that are no UTF-8, more than one page of output.
COMMANDS = (
    "printf 'a\\000b \\377 é\\n'; printf 'to stderr\\n' >&2",
    "head -c 300000 /dev/zero | tr '\\0' x",
    "exit 3",
)


def first_key(server: ServerProcess) -> str:
    """Return the key that a first start prints."""
    assert server.process.stdout is not None
    printed = [server.process.stdout.readline() for _ in range(3)]
    return printed[1].strip()


def run(client: httpx2.Client, workspace: str, *calls: dict[str, Any], **more: Any) -> dict[str, Any]:
    answer = client.post(f"/v1/workspaces/{workspace}/batches?wait=60", json={"calls": list(calls), **more})
    assert answer.status_code == 200, answer.text
    made: dict[str, Any] = answer.json()
    return made


def make_records(client: httpx2.Client) -> list[str]:
    """Make things of every kind and return the paths whose answers tell of them."""
    body = {"name": "é \U0001f600", "files": {"task.txt": "status: draft"}, "metadata": {"k": "\0"}}
    workspace = client.post("/v1/workspaces", json=body).json()["id"]
    keyed = {"Idempotency-Key": "once"}
    gone = client.post("/v1/workspaces", json={}, headers=keyed).json()["id"]
    client.delete(f"/v1/workspaces/{gone}")
    batches = [
        run(
            client,
            workspace,
            {"id": "read", "name": "read", "arguments": {"path": "task.txt"}},
            {"id": "write", "name": "write", "arguments": {"path": "new.txt", "content": "x\0" * 20_000}},
            {"id": "none", "name": "no such tool é", "arguments": {}},
            metadata={"n": 2**53 - 1, "text": "\0\U0001f600"},
        ),
        *(
            run(client, workspace, {"name": "bash", "arguments": {"command": command}})
            for command in COMMANDS
        ),
    ]  # fmt: skip
    cancelled = client.post(
        f"/v1/workspaces/{workspace}/batches",
        json={"calls": [{"name": "bash", "arguments": {"command": "echo up; sleep 60"}}]},
    ).json()
    client.post(f"/v1/batches/{cancelled['id']}/cancel")
    eventually(lambda: client.get(f"/v1/batches/{cancelled['id']}").json()["status"] == "cancelled", 20)
    paths = ["/v1/workspaces", f"/v1/workspaces/{workspace}", f"/v1/workspaces/{gone}", "/v1/calls?limit=200"]
    paths += [f"/v1/workspaces/{workspace}/batches", "/v1/calls?tool=read", "/v1/calls?status=failed"]
    paths += [f"/v1/workspaces/{workspace}/files/new.txt"]
    for batch in [*batches, cancelled]:
        paths += [f"/v1/batches/{batch['id']}", f"/v1/batches/{batch['id']}/events"]
        paths += [f"/v1/batches/{batch['id']}/events?after=2"]
        for call in batch["calls"]:
            paths += [f"/v1/calls/{call['id']}"]
            paths += [f"/v1/calls/{call['id']}/output?stream={name}" for name in ("combined", "stdout", "stderr")]
    return paths


def answers(client: httpx2.Client, paths: list[str]) -> dict[str, tuple[int, bytes]]:
    got = {path: client.get(path) for path in paths}
    return {path: (answer.status_code, answer.content) for path, answer in got.items()}


@pytest.mark.timeout(300)
def test_a_service_on_the_copy_answers_as_the_one_before(tmp_path: Path, postgres_url: str) -> None:
    data_dir = tmp_path / "data"
    lines: list[str] = []
    with ServerProcess(data_dir) as server:
        key = first_key(server)
        with server.client(key) as client:
            paths = make_records(client)
            before = answers(client, paths)
        with pytest.raises(ConfigurationError, match=f"another Toolcrib process .pid {server.process.pid}. uses the"):
            copy_records(str(data_dir), postgres_url, lines.append)
        assert server.stop() == 0
    assert {status for status, _ in before.values()} <= {200, 204}
    assert lines == []

    copy_records(f"sqlite:///{data_dir}/toolcrib.db", postgres_url, lines.append)
    assert lines[-1].startswith("compared: ")

    with ServerProcess(data_dir, {"TOOLCRIB_DATABASE_URL": postgres_url}) as server:
        with server.client(key) as client:
            assert client.get("/version").json()["database"] == "postgresql"
            assert answers(client, paths) == before
            workspace = paths[1].rpartition("/")[2]
            read = run(client, workspace, {"name": "read", "arguments": {"path": "task.txt"}})
            assert read["calls"][0]["result"]["content"][0]["text"] == "   1│ status: draft"
            assert len(client.get(f"/v1/workspaces/{workspace}/batches").json()["data"]) == 6
        with pytest.raises(ConfigurationError, match="the copy is refused: a Toolcrib process is connected to"):
            copy_records(postgres_url, str(tmp_path / "back"), lines.append)
        assert server.stop() == 0
    with pytest.raises(ConfigurationError, match="the copy is refused: the target is not empty"):
        copy_records(str(data_dir), postgres_url, lines.append)
    copy_records(postgres_url, str(tmp_path / "back"), lines.append)
    assert (tmp_path / "back").stat().st_mode & 0o077 == 0


def test_directories_that_were_put_back_are_taken_for_the_workspaces_own(tmp_path: Path) -> None:
    data_dir = tmp_path / "data"
    adopted_root = tmp_path / "adopted"
    adopted_root.mkdir()
    if os.geteuid() == 0:
        os.chown(adopted_root, 65534, 65534)
    lines: list[str] = []
    with ServerThread(data_dir, workspace_roots=(adopted_root,)) as server, server.client() as client:
        managed, gone = (client.post("/v1/workspaces", json={"files": {"a.txt": "a"}}).json() for _ in range(2))
        adopted = client.post("/v1/workspaces", json={"root": str(adopted_root)}).json()
    shutil.rmtree(gone["root"])
    for root in (Path(managed["root"]), adopted_root):
        old = tmp_path / f"old-{root.name}"
        root.rename(old)
        subprocess.run(["cp", "-a", old, root], check=True)
    read = f"/v1/workspaces/{managed['id']}/tools/read"
    with ServerThread(data_dir, workspace_roots=(adopted_root,)) as server, server.client() as client:
        assert client.post(read, json={"path": "a.txt"}).json()["code"] == "workspace_moved"
        with pytest.raises(ConfigurationError, match="nothing was changed: another Toolcrib process"):
            relocate_workspaces(server.settings, lines.append)
        settings = server.settings
    relocate_workspaces(settings, lines.append)
    assert lines == [
        f"{gone['id']}: there is no directory {gone['root']}",
        "open workspaces: 3; the directories of 2 were taken for theirs, those of 1 are missing",
    ]
    with ServerThread(data_dir, workspace_roots=(adopted_root,)) as server, server.client() as client:
        assert client.post(read, json={"path": "a.txt"}).json()["status"] == "succeeded"
        listed = client.post(f"/v1/workspaces/{adopted['id']}/tools/ls", json={}).json()
        assert listed["status"] == "succeeded"


def test_a_start_on_an_empty_database_leaves_the_workspaces_of_another_one_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("app.services.workspace_roots.ORPHAN_SECONDS", -1.0)
    data_dir = tmp_path / "data"
    with ServerThread(data_dir) as server, server.client() as client:
        kept = client.post("/v1/workspaces", json={}).json()
    (data_dir / "toolcrib.db").rename(tmp_path / "toolcrib.db")
    with ServerThread(data_dir) as server, server.client() as client:
        first = client.post("/v1/workspaces", json={}).json()
    # Half-made by a service that died: younger than a record, and in none.
    orphan = data_dir / "workspaces" / new_id("ws")
    orphan.mkdir()
    with ServerThread(data_dir):
        assert not orphan.exists()
    assert Path(kept["root"]).is_dir()
    assert Path(first["root"]).is_dir()
