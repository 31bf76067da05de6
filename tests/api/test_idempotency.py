"""`Idempotency-Key`: a POST that is sent again attaches to what the first one made, whatever happened in between."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx2
import pytest

from tests.api.problems import assert_problem
from tests.support.server import KEY, ServerProcess, ServerThread, event_stream, eventually
from tests.support.users import give

NAME = "Idempotency-Key"
CLIENTS = 100


def named(key: str, **headers: str) -> dict[str, str]:
    return {NAME: key, **headers}


def bash(command: str, **body: Any) -> dict[str, Any]:
    return {"calls": [{"id": "b1", "name": "bash", "arguments": {"command": command}}], **body}


def lines(workspace: dict[str, Any], name: str = "ran.txt") -> list[str]:
    """What commands of a test noted: a line for each time they ran."""
    return (Path(workspace["root"]) / name).read_text().splitlines()


def test_a_hundred_clients_at_once_with_one_key_get_one_batch_that_runs_once(
    server: ServerThread, client: httpx2.Client, workspace: dict[str, Any], batches: str
) -> None:
    body = bash("echo ran >> ran.txt")

    def post(number: int) -> httpx2.Response:
        with server.client() as own:
            if number % 3 == 0:
                return own.post(batches, json=body, headers=named("hundred"))
            if number % 3 == 1:
                return own.post(batches, json=body, headers=named("hundred"), params={"wait": "20"})
            return own.post(batches, json=body, headers=named("hundred", Accept="text/event-stream"))

    with ThreadPoolExecutor(CLIENTS) as pool:
        responses = list(pool.map(post, range(CLIENTS)))
    assert {response.status_code for response in responses} <= {200, 202}
    [location] = {response.headers["location"] for response in responses}
    made = [response for response in responses if "idempotent-replayed" not in response.headers]
    assert len(made) == 1
    streams = [response.text for response in responses if response.headers["content-type"].startswith("text/event")]
    assert len(streams) == CLIENTS // 3
    [stream] = set(streams)
    assert stream.startswith("id: 1\nevent: batch_start\n")
    assert "event: batch_end\n" in stream
    batch = client.get(location, params={"wait": "10"}).json()
    waited = [response.json() for number, response in enumerate(responses) if number % 3 == 1]
    assert waited == [batch] * len(waited)
    assert lines(workspace) == ["ran"]
    assert [item["id"] for item in client.get(batches).json()["data"]] == [batch["id"]]


def test_a_repetition_attaches_in_each_mode_while_the_batch_runs_and_after_it(
    client: httpx2.Client, workspace: dict[str, Any], batches: str
) -> None:
    body = bash("echo one; until [ -e go ]; do sleep 0.02; done; echo two; echo ran >> ran.txt")
    first = client.post(batches, json=body, headers=named("modes"))
    assert first.status_code == 202
    assert "idempotent-replayed" not in first.headers
    expected = {"location": first.headers["location"], "idempotent-replayed": "true"}

    def attached(response: httpx2.Response, status: int) -> httpx2.Response:
        assert response.status_code == status
        assert {name: response.headers[name] for name in expected} == expected
        return response

    running = attached(client.post(batches, json=body, headers=named("modes")), 202).json()
    assert (running["id"], running["status"] in {"queued", "running"}) == (first.json()["id"], True)
    attached(client.post(batches, json=body, headers=named("modes", Prefer="wait=0")), 202)
    with event_stream(client, "POST", batches, json=body, headers=named("modes")) as (response, events):
        attached(response, 200)
        seen = [next(events)]
        seen += [next(event for event in events if event.type == "tool_execution_update")]
        assert seen[0].type == "batch_start"
        (Path(workspace["root"]) / "go").touch()
        assert list(events)[-1].type == "batch_end"
    ended = attached(client.post(batches, json=body, headers=named("modes"), params={"wait": "20"}), 200).json()
    assert (ended["status"], ended["hasErrors"]) == ("completed", False)
    assert attached(client.post(batches, json=body, headers=named("modes")), 200).json() == ended
    with event_stream(client, "POST", batches, json=body, headers=named("modes")) as (response, events):
        attached(response, 200)
        replayed = list(events)
    assert [event.id for event in replayed] == list(range(1, len(replayed) + 1))
    assert replayed[-1].type == "batch_end"
    assert lines(workspace) == ["ran"]


def test_another_body_is_refused_and_white_space_and_order_make_none(client: httpx2.Client, batches: str) -> None:
    spelled = '{"calls": [{"name": "read", "arguments": {"path": "task.txt", "limit": 1}}], "metadata": {"a": 1}}'
    turned = '{"metadata":{"a":1},\n"calls":[{"arguments":{"limit":1,"path":"task.txt"},"name":"read"}]}'
    other = spelled.replace('"a": 1', '"a": 2')
    first = client.post(batches, content=spelled, headers=named("body"))
    assert first.status_code == 202
    again = client.post(batches, content=turned, headers=named("body"), params={"wait": "10", "updates": "none"})
    assert (again.status_code, again.json()["id"]) == (200, first.json()["id"])
    for accept in ("application/json", "text/event-stream"):
        refused = client.post(batches, content=other, headers=named("body", Accept=accept))
        assert_problem(refused, "idempotency_key_reused")
    assert len(client.get(batches).json()["data"]) == 1


def test_a_key_is_another_one_in_another_workspace(
    client: httpx2.Client, make_workspace: Callable[..., dict[str, Any]], batches: str
) -> None:
    body = bash("true")
    elsewhere = f"/v1/workspaces/{make_workspace()['id']}/batches"
    made = [client.post(path, json=body, headers=named("scope")) for path in (batches, elsewhere)]
    assert [response.status_code for response in made] == [202] * 2
    assert made[0].json()["id"] != made[1].json()["id"]
    assert not any("idempotent-replayed" in response.headers for response in made)
    again = client.post(elsewhere, json=body, headers=named("scope"))
    assert again.json()["id"] == made[1].json()["id"]


def test_the_one_tool_short_cut_attaches_too_and_is_another_request_than_a_batch(
    client: httpx2.Client, workspace: dict[str, Any], batches: str
) -> None:
    path = f"/v1/workspaces/{workspace['id']}/tools"
    arguments = {"command": "echo ran >> ran.txt"}
    first = client.post(f"{path}/bash", json=arguments, headers=named("tool"))
    again = client.post(f"{path}/bash", json=arguments, headers=named("tool"))
    assert [(response.status_code, response.json()) for response in (first, again)] == [(200, first.json())] * 2
    assert again.headers["location"] == first.headers["location"]
    assert [response.headers.get("idempotent-replayed") for response in (first, again)] == [None, "true"]
    assert lines(workspace) == ["ran"]
    for other in (
        client.post(f"{path}/bash", json={"command": "true"}, headers=named("tool")),
        client.post(f"{path}/powershell", json=arguments, headers=named("tool")),
        client.post(batches, json=bash(arguments["command"]), headers=named("tool")),
    ):
        assert_problem(other, "idempotency_key_reused")
    empty = client.post(f"{path}/ls", headers=named("ls"))
    assert client.post(f"{path}/ls", json={}, headers=named("ls")).json() == empty.json()


def test_a_workspace_is_made_once(client: httpx2.Client, adoptable: Path) -> None:
    (adoptable / "twice").mkdir()
    give(adoptable / "twice")
    body = {"name": "once", "root": str(adoptable / "twice"), "files": {"a.txt": "one"}}
    first = client.post("/v1/workspaces", json=body, headers=named("workspace"))
    again = client.post("/v1/workspaces", json=body, headers=named("workspace"))
    assert [(response.status_code, response.json()) for response in (first, again)] == [(201, first.json())] * 2
    assert again.headers["location"] == first.headers["location"] == f"/v1/workspaces/{first.json()['id']}"
    assert [response.headers.get("idempotent-replayed") for response in (first, again)] == [None, "true"]
    other = client.post("/v1/workspaces", json={**body, "name": "twice"}, headers=named("workspace"))
    assert_problem(other, "idempotency_key_reused")
    assert client.delete(first.headers["location"]).status_code == 204
    assert_problem(client.post("/v1/workspaces", json=body, headers=named("workspace")), "workspace_gone")


def test_a_batch_is_attached_to_when_its_workspace_is_gone_or_moved(
    client: httpx2.Client, workspace: dict[str, Any], batches: str
) -> None:
    first = client.post(batches, json=bash("true"), headers=named("gone"), params={"wait": "10"}).json()
    root = Path(workspace["root"])
    root.rename(root.with_name("aside"))
    root.mkdir()
    assert_problem(client.post(batches, json=bash("true")), "workspace_moved")
    assert client.post(batches, json=bash("true"), headers=named("gone")).json() == first
    root.rmdir()
    root.with_name("aside").rename(root)
    assert client.delete(f"/v1/workspaces/{workspace['id']}").status_code == 204
    assert client.post(batches, json=bash("true"), headers=named("gone")).json() == first
    assert_problem(client.post(batches, json=bash("true"), headers=named("new")), "workspace_gone")


def test_a_client_that_attached_may_go_away_without_cancelling(
    client: httpx2.Client, workspace: dict[str, Any], batches: str
) -> None:
    body = bash("echo up; until [ -e go ]; do sleep 0.02; done", onDisconnect="cancel")
    first = client.post(batches, json=body, headers=named("leaves"))
    with event_stream(client, "POST", batches, json=body, headers=named("leaves")) as (_, events):
        next(event for event in events if event.type == "tool_execution_update")
    # The server is done with the request above once it has noticed that its client went away.
    eventually(lambda: client.get(first.headers["location"]).json()["status"] == "running")
    (Path(workspace["root"]) / "go").touch()
    assert client.get(first.headers["location"], params={"wait": "10"}).json()["status"] == "completed"


@pytest.mark.parametrize("key", ["", "two words", "a\tb", "ü", "k" * 256])
def test_a_key_that_is_none_is_422(client: httpx2.Client, batches: str, workspace: dict[str, Any], key: str) -> None:
    for path in ("/v1/workspaces", batches, f"/v1/workspaces/{workspace['id']}/tools/ls"):
        response = client.post(path, json={}, headers=[(b"Idempotency-Key", key.encode())])
        document = assert_problem(response, "invalid_request")
        assert [error["parameter"] for error in document["errors"]] == [NAME]


def test_the_longest_key_is_taken(client: httpx2.Client, batches: str) -> None:
    key = "!~" + "k" * 253
    made = [client.post(batches, json=bash("true"), headers=named(key)).json()["id"] for _ in range(2)]
    assert made[0] == made[1]


def test_a_request_that_does_not_fit_leaves_no_key(client: httpx2.Client, batches: str) -> None:
    assert_problem(client.post(batches, json={"calls": []}, headers=named("wrong")), "invalid_request")
    assert client.post(batches, json=bash("true"), headers=named("wrong")).status_code == 202


def test_the_key_holds_after_a_kill_and_nothing_runs_twice(tmp_path: Path) -> None:
    body = bash("echo ran >> ran.txt; sleep 60")
    done = bash("echo done >> done.txt")
    with ServerProcess(tmp_path / "data", {"TOOLCRIB_API_KEY": KEY}) as server:
        with server.client() as client:
            workspace = client.post("/v1/workspaces", json={"name": "w"}, headers=named("w")).json()
            path = f"/v1/workspaces/{workspace['id']}/batches"
            running = client.post(path, json=body, headers=named("running")).json()
            ended = client.post(path, json=done, headers=named("ended"), params={"wait": "20"}).json()
            eventually((Path(workspace["root"]) / "ran.txt").exists)
            server.process.kill()
            server.process.wait(20)
        server.start()
        with server.client() as client:
            again = client.post("/v1/workspaces", json={"name": "w"}, headers=named("w"))
            assert (again.status_code, again.json()["id"]) == (201, workspace["id"])
            response = client.post(path, json=body, headers=named("running"), params={"wait": "20"})
            assert (response.status_code, response.headers["idempotent-replayed"]) == (200, "true")
            assert (response.json()["id"], response.json()["status"]) == (running["id"], "interrupted")
            assert client.post(path, json=done, headers=named("ended")).json() == ended
            assert_problem(client.post(path, json=done, headers=named("running")), "idempotency_key_reused")
            with event_stream(client, "POST", path, json=body, headers=named("running")) as (_, events):
                assert [event.type for event in events][-1] == "batch_end"
            assert len(client.get(path).json()["data"]) == 2
        server.stop()
    assert (lines(workspace), lines(workspace, "done.txt")) == (["ran"], ["done"])
