"""The service started as root: as whom it works, and what it says when it cannot."""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2
import pytest

from tests.support.server import KEY, ServerProcess, clean_environment
from tests.support.users import NOBODY, give

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="only root acts as others")

OTHER = 4_321
GZIP = {"Content-Type": "application/gzip"}
CALLS: list[tuple[str, dict[str, Any]]] = [
    ("write", {"path": "made/by-write", "content": "a\n"}),
    ("edit", {"path": "made/by-write", "edits": [{"oldText": "a", "newText": "b"}]}),
    (
        "bash",
        {"command": "id -u; id -g; cat seed; echo x > by-bash; mkdir -p closed/in; chmod 4755 by-bash; chmod 0 closed"},
    ),
    ("read", {"path": "made/by-write"}),
    ("grep", {"pattern": "b", "path": "made"}),
    ("find", {"pattern": "by-*"}),
    ("ls", {"recursive": True}),
]


@pytest.fixture(scope="module")
def adoptable(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("adoptable")


@pytest.fixture(scope="module", params=["namespace", "landlock", "process"])
def server(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, adoptable: Path
) -> Iterator[ServerProcess]:
    environment = {
        "TOOLCRIB_API_KEY": KEY,
        "TOOLCRIB_SANDBOX": request.param,
        "TOOLCRIB_WORKSPACE_ROOTS": str(adoptable),
    }
    started = ServerProcess(tmp_path_factory.mktemp("run-as") / "data", environment)
    try:
        started.start()
        yield started
        started.stop()
    except AssertionError as error:
        if "cannot be had here" in str(error):
            pytest.skip(f"no tier {request.param} here")
        raise
    finally:
        started.__exit__(None, None, None)


def run(client: httpx2.Client, workspace: dict[str, Any], *calls: tuple[str, dict[str, Any]]) -> list[dict[str, Any]]:
    body = {"calls": [{"name": name, "arguments": arguments} for name, arguments in calls]}
    answer = client.post(f"/v1/workspaces/{workspace['id']}/batches", params={"wait": "60"}, json=body)
    assert answer.status_code == 200, answer.text
    ran: list[dict[str, Any]] = answer.json()["calls"]
    return ran


def owners(root: Path) -> set[tuple[int, int]]:
    return {(path.lstat().st_uid, path.lstat().st_gid) for path in (root, *root.rglob("*"))}


def test_every_tool_and_every_request_works_as_the_owner_and_all_that_is_made_is_the_owners(
    server: ServerProcess, adoptable: Path
) -> None:
    project = adoptable / f"project-{server.environment['TOOLCRIB_SANDBOX']}"
    project.mkdir(mode=0o700)
    os.chown(project, OTHER, OTHER + 1)
    with server.client() as client:
        managed = client.post("/v1/workspaces", json={"files": {"seed": "s"}}).json()
        adopted = client.post("/v1/workspaces", json={"root": str(project), "files": {"seed": "s"}}).json()
        for workspace, uid, gid in ((managed, NOBODY, NOBODY), (adopted, OTHER, OTHER + 1)):
            calls = run(client, workspace, *CALLS)
            assert [call["status"] for call in calls] == ["succeeded"] * len(CALLS), calls
            assert calls[2]["result"]["content"][0]["text"] == f"{uid}\n{gid}\ns"
            base = f"/v1/workspaces/{workspace['id']}"
            assert client.put(f"{base}/files/up/loaded", content=b"x").status_code == 201
            assert client.get(f"{base}/tree").status_code == 200
            # Root could pack what is closed.
            assert client.get(f"{base}/archive").status_code == 409
            packed = client.get(f"{base}/archive", params={"exclude": "closed"}).content
            assert (
                client.put(f"{base}/archive", params={"path": "again"}, content=packed, headers=GZIP).status_code == 200
            )
            assert client.delete(f"{base}/files/up", params={"recursive": "true"}).status_code == 204
            root = Path(workspace["root"])
            assert owners(root) == {(uid, gid)}
            assert (root / "again/by-bash").stat().st_mode & 0o7000 == 0
            assert client.delete(f"{base}/files/closed", params={"recursive": "true"}).status_code == 204
            assert not (root / "closed").exists()


def test_a_file_of_root_in_a_workspace_is_no_business_of_the_tools(server: ServerProcess) -> None:
    with server.client() as client:
        workspace = client.post("/v1/workspaces", json={}).json()
        secret = Path(workspace["root"]) / "secret"
        secret.write_text("of root")
        secret.chmod(0o600)
        for name, arguments in (
            ("read", {"path": "secret"}),
            ("write", {"path": "secret", "content": "mine"}),
            ("bash", {"command": "cat secret"}),
        ):
            (call,) = run(client, workspace, (name, arguments))
            assert call["status"] == "failed", call
        assert client.get(f"/v1/workspaces/{workspace['id']}/files/secret").status_code == 409
        assert secret.read_text() == "of root"


def test_no_command_finds_the_key_or_the_database(server: ServerProcess) -> None:
    data = server.data_dir
    with server.client() as client:
        workspace = client.post("/v1/workspaces", json={"options": {"bash": {"guard": "off"}}}).json()
        command = (
            f"cat /proc/[0-9]*/environ /proc/[0-9]*/cmdline {data}/* {data}/*/* /proc/{server.process.pid}/environ; env;"
            f"ls {data} {data}/workspaces; cat /proc/{server.process.pid}/mem | head -c 1; ls /proc/{server.process.pid}/fd"
        )
        (call,) = run(client, workspace, ("bash", {"command": command}))
    text = call["result"]["content"][0]["text"]
    assert KEY not in text
    assert "SQLite format 3" not in text
    for file in data.iterdir():
        if file.is_file():
            assert file.stat().st_mode & 0o077 == 0, file


def test_a_directory_of_root_is_not_adopted_and_one_that_is_given_away_is_moved(
    server: ServerProcess, adoptable: Path
) -> None:
    project = adoptable / f"given-{server.environment['TOOLCRIB_SANDBOX']}"
    project.mkdir()
    with server.client() as client:
        refused = client.post("/v1/workspaces", json={"root": str(project)})
        assert (refused.status_code, refused.json()["errors"][0]["code"]) == (422, "owned_by_root")
        give(project)
        workspace = client.post("/v1/workspaces", json={"root": str(project)}).json()
        assert run(client, workspace, ("ls", {}))[0]["status"] == "succeeded"
        os.chown(project, OTHER, OTHER)
        path = f"/v1/workspaces/{workspace['id']}/batches"
        body = {"calls": [{"name": "ls", "arguments": {}}]}
        assert client.post(path, json=body).json()["code"] == "workspace_moved"
        give(project)
        assert client.post(path, json=body).status_code == 202


def toolcrib(cwd: Path, data_dir: Path | None, **environment: str) -> subprocess.CompletedProcess[str]:
    given = clean_environment(data_dir or cwd) | environment
    if data_dir is None:
        del given["TOOLCRIB_DATA_DIR"]
    return subprocess.run(
        [sys.executable, "-m", "app", "serve"],
        env=given,
        cwd=cwd,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def test_a_data_directory_that_cannot_be_reached_stops_the_start_with_the_directory_in_the_way(tmp_path: Path) -> None:
    home = tmp_path / "home"
    home.mkdir(mode=0o700)
    ended = toolcrib(tmp_path, home / "a" / "data")
    assert ended.returncode == 2
    assert f"TOOLCRIB_DATA_DIR: files are touched and commands run as user {NOBODY} (TOOLCRIB_RUN_AS)" in ended.stderr
    assert f"may not pass {home} on the way to {home / 'a' / 'data'}" in ended.stderr
    assert f"chmod o+x {home}" in ended.stderr
    assert "Traceback" not in ended.stderr


@pytest.mark.parametrize(
    ("name", "said"), [("no-such-user", "there is no user no-such-user"), ("5:0", "nothing is done as user or group 0")]
)
def test_a_user_that_cannot_be_stops_the_start(tmp_path: Path, name: str, said: str) -> None:
    ended = toolcrib(tmp_path, tmp_path / "data", TOOLCRIB_RUN_AS=name)
    assert ended.returncode == 2
    assert ended.stderr.startswith("toolcrib: TOOLCRIB_RUN_AS")
    assert said in ended.stderr


def test_an_ordinary_users_service_cannot_run_as_another(tmp_path: Path) -> None:
    script = (
        "import os, sys; from app import groundwork, settings; from app.errors import ConfigurationError\n"
        f"os.setgroups([]); os.setresgid({NOBODY}, {NOBODY}, {NOBODY}); os.setresuid({NOBODY}, {NOBODY}, {NOBODY})\n"
        "try: print(groundwork.account_of_settings(settings.Settings.load()))\n"
        "except ConfigurationError as error: print(error)"
    )

    def said(**environment: str) -> str:
        return subprocess.run(
            [sys.executable, "-c", script],
            env=clean_environment(tmp_path / "data") | environment,
            capture_output=True,
            text=True,
            timeout=60,
            check=True,
        ).stdout

    assert said() == "None\n"
    assert said(TOOLCRIB_RUN_AS=str(NOBODY)) == "None\n"
    assert said(TOOLCRIB_RUN_AS="4321") == (
        f"TOOLCRIB_RUN_AS=4321 cannot be had: the service was started as user {NOBODY}, and only root can act as others. "
        "Leave it unset, or start the service as root.\n"
    )
