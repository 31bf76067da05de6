"""Limits of commands and their network over HTTP: what a workspace may ask for and what a call is told."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2
import pytest

from tests.support.server import ServerThread

MOST = {
    "command_processes": 50,
    "command_open_files": 1_024,
    "command_file_bytes": 1_000_000,
    "command_cpu_seconds": 100,
    "command_memory_bytes": 300_000_000,
    "command_tmp_bytes": 1_000_000,
}


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[httpx2.Client]:
    data_dir = tmp_path_factory.mktemp("limited") / "data"
    with ServerThread(data_dir, **MOST) as server, server.client() as opened:
        yield opened


def run(client: httpx2.Client, command: str, **options: Any) -> dict[str, Any]:
    made = client.post("/v1/workspaces", json={"options": {"bash": options}})
    assert made.status_code == 201, made.text
    body = {"command": command, "timeout": 60_000}
    answer = client.post(f"/v1/workspaces/{made.json()['id']}/tools/bash?wait=60", json=body)
    assert answer.status_code == 200, answer.text
    call: dict[str, Any] = answer.json()
    return call


def text(call: dict[str, Any]) -> str:
    return call["result"]["content"][0]["text"]


@pytest.mark.parametrize(
    ("command", "limits", "said"),
    [
        ("for i in $(seq 60); do sleep 60 & done; wait", {}, "it had more than 50 processes and threads at once"),
        (
            "for i in $(seq 30); do sleep 60 & done; wait",
            {"processes": 10},
            "it had more than 10 processes and threads at once",
        ),
        ("head -c 2000000 /dev/zero > big", {}, "a file would have grown past 1000000 bytes"),
        ("head -c 2000000 /dev/zero > big", {"fileBytes": 8_192}, "a file would have grown past 8192 bytes"),
        ("while :; do :; done", {"cpuSeconds": 1}, "it used more than 1 seconds of processor time"),
        (
            "x=$(head -c 400000000 /dev/zero | tr '\\0' x); sleep 60",
            {},
            "it had more than 300000000 bytes of memory",
        ),
        (
            "while exec {another}</dev/null; do :; done; exit 1",
            {"openFiles": 200},
            "a process may have 200 files open and wanted more",
        ),
    ],
)
def test_a_command_over_a_limit_is_told_which_and_that_it_can_be_raised(
    client: httpx2.Client, command: str, limits: dict[str, int], said: str
) -> None:
    call = run(client, command, limits=limits)
    assert call["error"]["code"] == "limit_exceeded", text(call)
    assert said in text(call)
    assert "whoever runs it can raise that" in text(call)


def test_a_full_tmp_is_no_space(client: httpx2.Client) -> None:
    if client.get("/version").json()["sandbox"]["tier"] != "namespace":
        pytest.skip("commands have no /tmp of their own here")
    call = run(client, "head -c 900000 /dev/zero > /tmp/a && head -c 900000 /dev/zero > /tmp/b")
    assert call["error"]["code"] == "no_space"
    assert "or in the command's own /tmp, which holds 1000000 bytes" in text(call)


def test_a_limit_is_no_failure_of_a_command_that_ends_well(client: httpx2.Client) -> None:
    call = run(client, "echo No space left on device >&2; echo Too many open files >&2")
    assert call["status"] == "succeeded"
    call = run(client, "echo Too many open files; exit 3")
    assert call["error"]["code"] == "non_zero_exit"


@pytest.mark.parametrize("tool", ["bash", "powershell"])
@pytest.mark.parametrize(
    ("limit", "value", "most"),
    [
        ("processes", 51, 50),
        ("openFiles", 1_025, 1_024),
        ("fileBytes", 1_000_001, 1_000_000),
        ("cpuSeconds", 101, 100),
        ("memoryBytes", 300_000_001, 300_000_000),
        ("tmpBytes", 1_000_001, 1_000_000),
    ],
)
def test_a_workspace_cannot_ask_for_more_than_the_server_allows(
    client: httpx2.Client, tool: str, limit: str, value: int, most: int
) -> None:
    refused = client.post("/v1/workspaces", json={"options": {tool: {"limits": {limit: value}}}})
    assert refused.status_code == 422
    (error,) = refused.json()["errors"]
    assert (error["pointer"], error["code"]) == (f"#/options/{tool}/limits/{limit}", "not_granted")
    assert f"at most {most} (TOOLCRIB_COMMAND_" in error["message"]
    allowed = client.post("/v1/workspaces", json={"options": {tool: {"limits": {limit: most}}}})
    assert allowed.status_code == 201
    place = f"/v1/workspaces/{allowed.json()['id']}"
    assert client.patch(place, json={"options": {tool: {"limits": {limit: value}}}}).status_code == 422
    assert client.get(place).json()["options"][tool]["limits"][limit] == most


@pytest.mark.parametrize("value", [0, -1, 1.5, "10", True, 10**30, {}])
def test_a_limit_that_is_none_is_refused(client: httpx2.Client, value: Any) -> None:
    refused = client.post("/v1/workspaces", json={"options": {"bash": {"limits": {"processes": value}}}})
    assert refused.status_code == 422


def test_the_network_of_the_machine_is_granted_by_a_setting_alone(client: httpx2.Client, tmp_path: Path) -> None:
    asked = {"options": {"bash": {"network": "host"}, "powershell": {"network": "host"}}}
    refused = client.post("/v1/workspaces", json=asked)
    assert refused.status_code == 422
    assert refused.json()["errors"][0]["pointer"] == "#/options/bash/network"
    assert "TOOLCRIB_ALLOW_NETWORK" in refused.json()["errors"][0]["message"]
    refused = client.post("/v1/workspaces", json={"options": {"powershell": {"network": "host"}}})
    assert refused.json()["errors"][0]["pointer"] == "#/options/powershell/network"
    data_dir = tmp_path / "data"
    with ServerThread(data_dir, allow_network=True) as server, server.client() as allowing:
        made = allowing.post("/v1/workspaces", json=asked)
        assert made.status_code == 201
        path = f"/v1/workspaces/{made.json()['id']}"
        call = allowing.post(f"{path}/tools/bash", json={"command": "true"}).json()
        assert call["result"]["details"]["sandbox"]["network"] == "host"
        sandbox = allowing.get("/version").json()["sandbox"]
        assert {key: call["result"]["details"]["sandbox"][key] for key in sandbox} == sandbox
    with ServerThread(data_dir) as server, server.client() as strict:
        call = strict.post(f"{path}/tools/bash", json={"command": "touch ran"}).json()
        assert call["error"]["code"] == "sandbox_unavailable"
        assert "TOOLCRIB_ALLOW_NETWORK" in text(call)
        assert strict.get(f"{path}/files/ran").status_code == 404
        none = {"bash": {"network": "none"}}
        assert strict.patch(path, json={"options": none}).status_code == 200
        call = strict.post(f"{path}/tools/bash", json={"command": "true"}).json()
        report = call["result"]["details"]["sandbox"]
        assert report["network"] == ("host" if report["tier"] == "process" else "none")


def test_no_command_is_started_on_a_disk_that_is_all_but_full(tmp_path: Path) -> None:
    with ServerThread(tmp_path / "data", min_free_bytes=2**61) as server, server.client() as client:
        call = run(client, "touch ran")
        assert call["error"]["code"] == "no_space"
        details = call["result"]["details"]
        assert details["minFreeBytes"] == 2**61
        assert f"{details['freeBytes']} bytes free" in text(call)
        path = f"/v1/workspaces/{call['workspaceId']}"
        assert client.get(f"{path}/files/ran").status_code == 404
        assert client.put(f"{path}/files/a.txt", content=b"x").status_code == 201  # files can still be put right
