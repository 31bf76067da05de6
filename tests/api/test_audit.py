from collections.abc import Callable
from typing import Any

import httpx2
import pytest

from app.services.audit import REFUSALS_SECONDS
from tests.api.problems import assert_problem
from tests.support.archives import tar_of
from tests.support.server import ServerThread, eventually


def events(client: httpx2.Client, **query: str) -> list[dict[str, Any]]:
    response = client.get("/v1/audit-events", params={"limit": "200", **query})
    assert response.status_code == 200, response.text
    found: list[dict[str, Any]] = response.json()["data"]
    return found


def test_each_change_is_noted_with_who_made_it(client: httpx2.Client, server: ServerThread) -> None:
    asked = {"name": "ci", "scopes": ["read", "write", "exec"], "owner": "team"}
    key = client.post("/v1/keys", json=asked).json()
    with server.client(key["token"]) as ci:
        made = ci.post("/v1/workspaces", json={"trusted": False}, headers={"X-Request-ID": "my-request"}).json()
        path = f"/v1/workspaces/{made['id']}"
        assert ci.patch(path, json={"trusted": True, "ttlSeconds": 60}).status_code == 200
        calls = [{"name": name, "arguments": {"command": "sleep 60"}} for name in ("bash", "nö such tool", "bash")]
        batch = ci.post(f"{path}/batches", json={"calls": calls}).json()
        for _ in range(2):
            assert ci.post(f"/v1/calls/{batch['calls'][2]['id']}/cancel").status_code in {200, 202}
            assert ci.post(f"/v1/batches/{batch['id']}/cancel").status_code in {200, 202}
        assert ci.delete(path).status_code == 204
        assert ci.delete(path).status_code == 204
    assert client.delete(f"/v1/keys/{key['id']}").status_code == 204
    assert client.delete(f"/v1/keys/{key['id']}").status_code == 204

    noted = events(client, actor=key["id"])[::-1]
    assert [event["action"] for event in noted] == [
        "workspace.created",
        "workspace.updated",
        "batch.submitted",
        "call.cancelled",
        "batch.cancelled",
        "workspace.deleted",
    ]
    assert {event["owner"] for event in noted} == {"team"}
    created, updated, submitted, call, cancelled, deleted = noted
    assert created == {
        "id": created["id"],
        "at": created["at"],
        "action": "workspace.created",
        "actor": key["id"],
        "owner": "team",
        "target": made["id"],
        "requestId": "my-request",
        "details": {"trusted": False, "managed": True, "root": made["root"]},
    }
    assert updated["details"] == {"fields": ["trusted", "ttlSeconds"], "trusted": True}
    assert submitted["target"] == cancelled["target"] == batch["id"]
    assert submitted["details"] == {"workspaceId": made["id"], "tools": ["bash", "nö such tool"]}
    assert (call["target"], call["details"]) == (batch["calls"][2]["id"], {"batchId": batch["id"]})
    assert (deleted["target"], deleted["details"]["root"]) == (made["id"], made["root"])
    of_key = events(client, target=key["id"])[::-1]
    assert [(event["action"], event["actor"]) for event in of_key] == [("key.created", "env"), ("key.revoked", "env")]
    assert of_key[0]["details"] == {"name": "ci", "owner": "team", "scopes": ["read", "write", "exec"]}
    assert key["token"] not in client.get("/v1/audit-events", params={"limit": 200}).text


def test_changes_of_files_are_noted_and_what_failed_is_not(client: httpx2.Client, workspace: dict[str, Any]) -> None:
    path = f"/v1/workspaces/{workspace['id']}"
    assert client.put(f"{path}/files/new/größe.txt", content=b"12345").status_code == 201
    form = [("f", ("a.txt", b"a")), ("f", ("new", b"in the way")), ("f", ("b.txt", b"b"))]
    assert client.post(f"{path}/files", files=form).json()["hasErrors"]
    packed = tar_of(("in/x.txt", b"x"), ("in/y.txt", b"y"))
    assert client.put(f"{path}/archive?format=tar&path=out", content=packed).status_code == 200
    assert client.delete(f"{path}/files/new?recursive=true").status_code == 204
    for refused in (
        client.put(f"{path}/files/a.txt", content=b"", headers={"If-None-Match": "*"}),
        client.delete(f"{path}/files/missing"),
        client.put(f"{path}/archive?format=tar", content=b"no archive"),
    ):
        assert refused.status_code >= 400
    assert client.get(f"{path}/files/a.txt").status_code == 200

    noted = [event for event in events(client, target=workspace["id"])[::-1] if event["action"] != "workspace.created"]
    assert [(event["action"], event["details"]) for event in noted] == [
        ("file.stored", {"paths": ["new/größe.txt"], "files": 1, "bytes": 5, "created": True}),
        ("files.stored", {"paths": ["a.txt", "b.txt"], "files": 2}),
        ("archive.unpacked", {"paths": ["out/in/x.txt", "out/in/y.txt"], "files": 2}),
        ("file.deleted", {"paths": ["new"], "files": 1, "recursive": True}),
    ]


def test_a_request_that_is_sent_again_is_noted_once(client: httpx2.Client, workspace: dict[str, Any]) -> None:
    same = {"Idempotency-Key": "audited"}
    body = {"calls": [{"name": "ls"}]}
    made = [
        client.post(f"/v1/workspaces/{workspace['id']}/batches", json=body, headers=same).json()["id"] for _ in range(2)
    ]
    assert made[0] == made[1]
    assert [event["action"] for event in events(client, target=made[0])] == ["batch.submitted"]


def test_an_end_by_time_is_the_services_own(client: httpx2.Client) -> None:
    made = client.post("/v1/workspaces", json={"ttlSeconds": 1}).json()
    eventually(lambda: client.get(f"/v1/workspaces/{made['id']}").json()["status"] == "expired", seconds=20)
    noted = events(client, target=made["id"])
    assert [(event["action"], event["actor"]) for event in noted] == [
        ("workspace.expired", "service"),
        ("workspace.created", "env"),
    ]
    assert noted[0]["requestId"] is None


def test_refusals_are_noted_at_a_bounded_rate(server: ServerThread, client: httpx2.Client) -> None:
    key = client.post("/v1/keys", json={"name": "reader", "scopes": ["read"]}).json()
    workspace = client.post("/v1/workspaces").json()
    with server.client(key["token"]) as reader, server.client("toolcrib_wrong-key") as stranger:
        for _ in range(20):
            assert_problem(reader.post("/v1/workspaces"), "forbidden")
            assert reader.get("/v1/keys").status_code == 403
        for _ in range(4):  # each waits until the keys are read again
            assert_problem(stranger.get("/v1/workspaces?token=hunter2"), "unauthorized")
        assert reader.post(f"/v1/workspaces/{workspace['id']}/tools/bash").status_code == 403
    [by_admin, by_write] = eventually(
        lambda: (
            found
            if len(found := [e for e in events(client, actor=key["id"]) if e["details"]["scope"] != "exec"]) == 2
            else None
        )
    )
    assert by_write["action"] == by_admin["action"] == "access.refused"
    details = {"status": 403, "method": "POST", "path": "/v1/workspaces", "scope": "write", "peer": "127.0.0.1"}
    assert by_write["details"] == {**details, "notNoted": 0}
    assert by_admin["details"]["scope"] == "admin"
    anonymous = events(client, actor="anonymous", action="access.refused")
    assert len(anonymous) <= 2, f"{REFUSALS_SECONDS} s"
    assert "hunter2" not in str(anonymous)
    assert "wrong-key" not in str(anonymous)


def test_the_log_goes_on_page_by_page_and_takes_times(
    client: httpx2.Client, make_workspace: Callable[..., Any]
) -> None:
    made = [make_workspace()["id"] for _ in range(3)]
    first = client.get("/v1/audit-events", params={"limit": 2, "action": "workspace.created"}).json()
    assert [event["target"] for event in first["data"]] == [made[2], made[1]]
    rest = {"limit": "1", "action": "workspace.created", "cursor": first["nextCursor"]}
    assert [event["target"] for event in client.get("/v1/audit-events", params=rest).json()["data"]] == [made[0]]
    at = first["data"][0]["at"]
    assert events(client, since=at, until=at, target=made[2]) == first["data"][:1]
    assert events(client, since="2100-01-01T00:00:00Z") == []
    assert events(client, until="2000-01-01T00:00:00+01:00") == []


@pytest.mark.parametrize(
    ("query", "code"),
    [
        ({"action": "key.stolen"}, "invalid_request"),
        ({"actor": ""}, "invalid_request"),
        ({"actor": "a\0"}, "invalid_request"),
        ({"target": "x" * 65}, "invalid_request"),
        ({"since": "yesterday"}, "invalid_request"),
        ({"until": "2026-01-01"}, "invalid_request"),
        ({"limit": "201"}, "invalid_request"),
        ({"q": "x"}, "invalid_request"),
        ({"cursor": "x"}, "invalid_cursor"),
    ],
)
def test_a_condition_that_cannot_be_is_refused(client: httpx2.Client, query: dict[str, str], code: str) -> None:
    assert_problem(client.get("/v1/audit-events", params=query), code)


@pytest.mark.parametrize("method", ["POST", "PUT", "PATCH", "DELETE"])
def test_the_log_is_only_read(client: httpx2.Client, method: str) -> None:
    assert_problem(client.request(method, "/v1/audit-events"), "method_not_allowed")
