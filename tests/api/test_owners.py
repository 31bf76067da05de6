"""Another owner's things are not there: every operation of the OpenAPI document that takes an id of one."""

from collections.abc import Callable
from typing import Any

import httpx2
import pytest

from app.domain.audit import SERVICE
from app.domain.ids import new_id
from app.services.keys import KeyRequest
from tests.api.problems import assert_problem
from tests.support.api_operations import operations
from tests.support.server import ServerThread, event_stream

OWNED = {"workspace_id": "ws", "batch_id": "batch", "call_id": "call"}


@pytest.fixture(scope="module")
def client_of(server: ServerThread) -> Callable[[str], httpx2.Client]:
    """Return a client with a new key of an owner, with every scope but `admin`."""

    def make(owner: str) -> httpx2.Client:
        asked = KeyRequest("k", ("read", "write", "exec"), owner)
        _, token = server.call(server.services.keys.create(asked, by=SERVICE))
        return server.client(token)

    return make


def running_batch(client: httpx2.Client) -> dict[str, Any]:
    workspace = client.post("/v1/workspaces", json={"files": {"task.txt": "status: draft"}}).json()
    body = {"calls": [{"id": "b1", "name": "bash", "arguments": {"command": "echo begun; sleep 60"}}]}
    batch: dict[str, Any] = client.post(f"/v1/workspaces/{workspace['id']}/batches", json=body).json()
    return batch


def ids_of(batch: dict[str, Any]) -> dict[str, str]:
    ids = {"workspace_id": batch["workspaceId"], "batch_id": batch["id"], "call_id": batch["calls"][0]["id"]}
    return {**ids, "path": "task.txt", "tool": "read"}


def test_to_a_stranger_nothing_of_another_owner_is_there(
    server: ServerThread, client_of: Callable[[str], httpx2.Client]
) -> None:
    with client_of("alice") as alice, client_of("bob") as bob:
        batch = running_batch(alice)
        theirs = ids_of(batch)
        nowhere = {**theirs, **{name: new_id(prefix) for name, prefix in OWNED.items()}}  # type: ignore[arg-type]
        about = [
            operation
            for operation in operations(alice.get("/openapi.json").json())
            if operation.parameters & OWNED.keys()
        ]
        assert len(about) > 20
        before = alice.get(f"/v1/workspaces/{batch['workspaceId']}").json()
        for operation in about:
            answer, unknown = operation.send(bob, theirs), operation.send(bob, nowhere)
            assert answer.status_code == unknown.status_code == 404, (operation.id, answer.status_code)
            if operation.method == "HEAD":
                assert answer.headers.keys() == unknown.headers.keys()
                continue
            problem, other = assert_problem(answer, "not_found"), assert_problem(unknown, "not_found")
            for name in OWNED:
                problem = {**problem, "detail": problem["detail"].replace(theirs[name], nowhere[name])}
            assert problem["detail"] == other["detail"], operation.id
        assert alice.get(f"/v1/workspaces/{batch['workspaceId']}").json() == before
        assert alice.get(f"/v1/workspaces/{batch['workspaceId']}/files/task.txt").text == "status: draft"
        assert alice.get(f"/v1/batches/{batch['id']}").json()["status"] in {"queued", "running"}
        assert alice.get(f"/v1/workspaces/{batch['workspaceId']}/batches").json()["data"][0]["id"] == batch["id"]
        assert alice.post(f"/v1/batches/{batch['id']}/cancel").status_code in {200, 202}


def test_no_list_shows_another_owners_things(client_of: Callable[[str], httpx2.Client]) -> None:
    with client_of("carol") as carol, client_of("dave") as dave:
        batch = running_batch(carol)
        assert carol.post(f"/v1/batches/{batch['id']}/cancel").status_code in {200, 202}
        [call] = carol.get("/v1/calls").json()["data"]
        assert call["id"] == batch["calls"][0]["id"]
        [workspace] = carol.get("/v1/workspaces").json()["data"]
        assert workspace["id"] == batch["workspaceId"]
        nothing = {"data": [], "nextCursor": None}
        assert dave.get("/v1/workspaces").json() == nothing
        for query in ({"batch": batch["id"]}, {"toolcall": "b1"}, {"tool": "bash"}, {"status": "cancelled"}, {}):
            found, cursor = [], ""
            while cursor is not None:
                page = dave.get("/v1/calls", params={**query, **({"cursor": cursor} if cursor else {})}).json()
                found += page["data"]
                cursor = page["nextCursor"]
            assert found == [], query
            lines = dave.get("/v1/calls", params=query, headers={"Accept": "application/x-ndjson"})
            assert (lines.status_code, lines.text) == (200, ""), query
        mine = carol.get("/v1/calls", headers={"Accept": "application/x-ndjson"})
        assert mine.json()["id"] == call["id"]
        for path in ("/v1/calls", "/v1/limits"):
            assert_problem(dave.get(path, params={"workspace": batch["workspaceId"]}), "not_found")


def test_keys_of_one_owner_share_everything(client_of: Callable[[str], httpx2.Client]) -> None:
    with client_of("erin") as first, client_of("erin") as second:
        batch = running_batch(first)
        assert second.post(f"/v1/calls/{batch['calls'][0]['id']}/cancel").status_code in {200, 202}
        assert second.get(f"/v1/batches/{batch['id']}?wait=20").json()["status"] in {"completed", "cancelled"}
        assert [one["id"] for one in second.get("/v1/workspaces").json()["data"]] == [batch["workspaceId"]]


def test_an_idempotency_key_of_another_owner_is_another_key(client_of: Callable[[str], httpx2.Client]) -> None:
    same = {"Idempotency-Key": "first-try"}
    with client_of("frank") as frank, client_of("grace") as grace, client_of("frank") as frank_too:
        made = frank.post("/v1/workspaces", headers=same)
        again = frank_too.post("/v1/workspaces", headers=same)
        other = grace.post("/v1/workspaces", headers=same)
        assert (made.json()["id"], again.headers["idempotent-replayed"]) == (again.json()["id"], "true")
        assert other.json()["id"] != made.json()["id"]
        batches = f"/v1/workspaces/{made.json()['id']}/batches"
        body = {"calls": [{"name": "ls", "arguments": {}}]}
        assert frank.post(batches, json=body, headers=same).status_code == 202
        assert_problem(grace.post(batches, json=body, headers=same), "not_found")


def test_an_operator_sees_everything_and_what_it_does_in_a_workspace_belongs_to_its_owner(
    client: httpx2.Client, client_of: Callable[[str], httpx2.Client]
) -> None:
    same = {"Idempotency-Key": "by-the-operator"}
    with client_of("heidi") as heidi:
        workspace = heidi.post("/v1/workspaces").json()
        assert workspace["id"] in {one["id"] for one in client.get("/v1/workspaces").json()["data"]}
        body = {"calls": [{"name": "ls", "arguments": {}}]}
        batches = f"/v1/workspaces/{workspace['id']}/batches"
        with event_stream(client, "POST", batches, json=body, headers=same) as (response, events):
            ended = list(events)[-1]
        assert ended.type == "batch_end"
        batch = heidi.get(response.headers["location"]).json()
        assert client.get(f"/v1/batches/{batch['id']}").json() == batch
        again = client.post(batches, json=body, headers=same)
        assert (again.json()["id"], again.headers["idempotent-replayed"]) == (batch["id"], "true")
        assert heidi.get("/v1/calls").json()["data"] == batch["calls"]
