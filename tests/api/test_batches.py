import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx2
import pytest

from app.domain.ids import is_id
from tests.api.problems import assert_problem
from tests.support.server import ServerThread, event_stream, eventually

READ = {"id": "r1", "name": "read", "arguments": {"path": "task.txt"}}


def sleep(command: str = "sleep 60", **call: Any) -> dict[str, Any]:
    return {"name": "bash", "arguments": {"command": command}, **call}


def text_of(call: dict[str, Any]) -> str:
    return "".join(block.get("text", "") for block in call["result"]["content"])


# -- the three modes --------------------------------------------------------------------------------------------------


def test_a_post_is_accepted_and_the_batch_runs_on(client: httpx2.Client, batches: str) -> None:
    response = client.post(batches, json={"calls": [READ]})
    assert response.status_code == 202
    batch = response.json()
    assert is_id(batch["id"], "batch")
    assert response.headers["location"] == f"/v1/batches/{batch['id']}"
    assert "preference-applied" not in response.headers
    assert batch["status"] in {"queued", "running"}
    assert batch["calls"][0]["result"] is None
    ended = client.get(response.headers["location"], params={"wait": "10"}).json()
    assert ended["status"] == "completed"


def test_a_batch_says_all_that_is_known_of_it(client: httpx2.Client, workspace: dict[str, Any], batches: str) -> None:
    body = {
        "calls": [
            READ,
            {"type": "toolCall", "name": "no_such_tool"},
            {"name": "read", "arguments": '{"path": "b.txt"}'},
        ],
        "executionMode": "sequential",
        "onError": "continue",
        "onDisconnect": "cancel",
        "timeoutMs": 60000,
        "metadata": {"agent": "a1", "z": [1, {"y": None}]},
    }
    response = client.post(batches, json=body, params={"wait": "10"})
    assert response.status_code == 200
    batch = response.json()
    calls = batch.pop("calls")
    assert batch == {
        "id": batch["id"],
        "workspaceId": workspace["id"],
        "status": "completed",
        "executionMode": "sequential",
        "effectiveMode": "sequential",
        "onError": "continue",
        "onDisconnect": "cancel",
        "timeoutMs": 60000,
        "metadata": {"agent": "a1", "z": [1, {"y": None}]},
        "hasErrors": True,
        "terminate": False,
        "summary": {"total": 3, "succeeded": 2, "failed": 1, "cancelled": 0, "skipped": 0},
        "requestId": response.headers["x-request-id"],
        "createdAt": batch["createdAt"],
        "startedAt": batch["startedAt"],
        "finishedAt": batch["finishedAt"],
    }
    assert batch["createdAt"] <= batch["startedAt"] <= batch["finishedAt"]
    first = calls[0]
    result = first["result"]
    assert first == {
        "id": first["id"],
        "batchId": batch["id"],
        "workspaceId": workspace["id"],
        "index": 0,
        "toolCallId": "r1",
        "toolName": "read",
        "arguments": {"path": "task.txt"},
        "status": "succeeded",
        "result": {
            "content": [{"type": "text", "text": "   1│ status: draft"}],
            "details": result["details"],
            "isError": False,
        },
        "error": None,
        "hooks": [],
        "queuedAt": batch["createdAt"],
        "startedAt": first["startedAt"],
        "finishedAt": first["finishedAt"],
        "durationMs": first["durationMs"],
        "requestId": response.headers["x-request-id"],
    }
    assert result["details"]["bytes"] == 13
    unknown = calls[1]
    assert (unknown["status"], unknown["error"]["code"], unknown["arguments"]) == ("failed", "unknown_tool", {})
    assert unknown["result"]["isError"] is True
    assert is_id(unknown["toolCallId"], "call")
    assert (calls[2]["status"], calls[2]["arguments"]) == ("succeeded", '{"path": "b.txt"}')
    assert client.get(f"/v1/batches/{batch['id']}").json() == {**batch, "calls": calls}
    assert client.get(f"/v1/calls/{first['id']}").json() == first


@pytest.mark.parametrize("how", [{"params": {"wait": "10"}}, {"headers": {"Prefer": "respond-async, wait=10"}}])
def test_a_post_that_waits_is_answered_when_the_batch_has_ended(
    client: httpx2.Client, batches: str, how: dict[str, Any]
) -> None:
    response = client.post(batches, json={"calls": [READ]}, **how)
    assert response.status_code == 200
    assert response.json()["status"] == "completed"
    assert response.headers["location"] == f"/v1/batches/{response.json()['id']}"
    assert response.headers.get("preference-applied") == ("wait=10" if "headers" in how else None)


@pytest.mark.parametrize("how", [{"params": {"wait": "0.2"}}, {"headers": {"Prefer": "wait=1"}}])
def test_a_post_that_waited_long_enough_is_202(client: httpx2.Client, batches: str, how: dict[str, Any]) -> None:
    response = client.post(batches, json={"calls": [sleep()]}, **how)
    assert response.status_code == 202
    assert response.json()["status"] == "running"
    assert response.headers.get("preference-applied") == ("wait=1" if "headers" in how else None)
    client.post(response.headers["location"] + "/cancel")


def test_the_parameter_wins_over_the_preference_and_nobody_waits_over_a_minute(
    client: httpx2.Client, batches: str
) -> None:
    response = client.post(batches, json={"calls": [READ]}, params={"wait": "600"}, headers={"Prefer": "wait=0"})
    assert response.status_code == 200
    assert "preference-applied" not in response.headers
    response = client.post(batches, json={"calls": [READ]}, headers={"Prefer": "wait=600"})
    assert response.headers["preference-applied"] == "wait=60"


@pytest.mark.parametrize("prefer", ["wait=soon", "wait", "respond-async", "handling=strict"])
def test_a_preference_that_is_not_understood_is_ignored(client: httpx2.Client, batches: str, prefer: str) -> None:
    response = client.post(batches, json={"calls": [READ]}, headers={"Prefer": prefer})
    assert response.status_code == 202
    assert "preference-applied" not in response.headers


@pytest.mark.parametrize("wait", ["x", "-1", "nan", "inf", ""])
def test_a_wait_that_is_no_time_is_422_and_nothing_is_stored(client: httpx2.Client, batches: str, wait: str) -> None:
    document = assert_problem(client.post(batches, json={"calls": [READ]}, params={"wait": wait}), "invalid_request")
    assert document["errors"][0]["parameter"] == "wait"
    assert client.get(batches).json()["data"] == []


def test_a_post_that_accepts_events_is_answered_with_the_stream(client: httpx2.Client, batches: str) -> None:
    with event_stream(client, "POST", batches, json={"calls": [READ]}, params={"wait": "10"}) as (response, events):
        assert response.status_code == 200
        assert response.headers["content-type"].startswith("text/event-stream")
        seen = list(events)
    assert [event.type for event in seen] == [
        "batch_start",
        "tool_execution_start",
        "tool_execution_end",
        "batch_end",
    ]
    assert [event.id for event in seen] == [1, 2, 3, 4]
    batch = client.get(response.headers["location"]).json()
    assert (batch["id"], batch["status"]) == (seen[0].data["batchId"], "completed")


# -- the walk-through -------------------------------------------------------------------------------------------------


def test_the_walk_through(client: httpx2.Client, make_workspace: Callable[..., dict[str, Any]]) -> None:
    workspace = make_workspace(files={"task.txt": "status: draft"})
    check = "grep -q 'status: done' task.txt || exit 2; echo verified"
    body = {
        "calls": [
            {"id": "read-1", "name": "read", "arguments": {"path": "task.txt"}},
            {
                "id": "write-1",
                "name": "write",
                "arguments": {"path": "task.txt", "content": "status: draft\ncheck: pending"},
            },
            {
                "id": "edit-1",
                "name": "edit",
                "arguments": {"path": "task.txt", "edits": [{"oldText": "status: draft", "newText": "status: done"}]},
            },
            {"id": "bash-1", "name": "bash", "arguments": {"command": check}},
        ]
    }
    batch = client.post(f"/v1/workspaces/{workspace['id']}/batches", json=body, params={"wait": "30"}).json()
    assert (batch["status"], batch["effectiveMode"], batch["hasErrors"]) == ("completed", "sequential", False)
    assert [call["toolCallId"] for call in batch["calls"]] == ["read-1", "write-1", "edit-1", "bash-1"]
    assert [text_of(call) for call in batch["calls"]] == [
        "   1│ status: draft",
        "Wrote 28 bytes to task.txt",
        "Applied 1 edit to task.txt",
        "verified",
    ]
    wanted: list[dict[str, Any]] = [
        {"bytes": 13, "lines": 1, "startLine": 1, "endLine": 1, "truncated": False},
        {"bytes": 28},
        {"oldBytes": 28, "newBytes": 27, "edits": 1},
        {"exitCode": 0, "timedOut": False, "aborted": False, "truncated": False},
    ]
    for call, details in zip(batch["calls"], wanted, strict=True):
        assert {name: call["result"]["details"][name] for name in details} == details
    assert (Path(workspace["root"]) / "task.txt").read_text() == "status: done\ncheck: pending"


# -- envelopes that do not fit ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("body", "places"),
    [
        ([], ["#"]),
        ({}, ["#/calls"]),
        ({"calls": []}, ["#/calls"]),
        ({"calls": [READ | {"id": None}] * 65}, ["#/calls"]),
        ({"calls": [READ, READ]}, ["#/calls/1/id"]),
        ({"calls": ["read"]}, ["#/calls/0"]),
        ({"calls": [{"arguments": {}}]}, ["#/calls/0/name"]),
        ({"calls": [{"name": ""}]}, ["#/calls/0/name"]),
        ({"calls": [{"name": "a\u0000b"}]}, ["#/calls/0/name"]),
        ({"calls": [{"name": 1, "id": 2}]}, ["#/calls/0/id", "#/calls/0/name"]),
        ({"calls": [READ | {"id": "two words"}]}, ["#/calls/0/id"]),
        ({"calls": [READ | {"id": "x" * 129}]}, ["#/calls/0/id"]),
        ({"calls": [READ | {"id": ""}]}, ["#/calls/0/id"]),
        ({"calls": [READ | {"type": "function"}]}, ["#/calls/0/type"]),
        ({"calls": [READ | {"input": {}}]}, ["#/calls/0/input"]),
        ({"calls": [READ], "mode": "parallel"}, ["#/mode"]),
        ({"calls": [READ], "executionMode": "fast"}, ["#/executionMode"]),
        ({"calls": [READ], "onError": "panic", "onDisconnect": True}, ["#/onError", "#/onDisconnect"]),
        ({"calls": [READ], "timeoutMs": 0}, ["#/timeoutMs"]),
        ({"calls": [READ], "timeoutMs": "1000"}, ["#/timeoutMs"]),
        ({"calls": [READ], "timeoutMs": True}, ["#/timeoutMs"]),
        ({"calls": [READ], "metadata": None}, ["#/metadata"]),
        ({"calls": [READ], "metadata": {"x": "y" * 16384}}, ["#/metadata"]),
    ],
)
def test_an_envelope_that_does_not_fit_is_told_where_and_nothing_is_stored(
    client: httpx2.Client, batches: str, body: Any, places: list[str]
) -> None:
    document = assert_problem(client.post(batches, json=body), "invalid_request")
    assert [error["pointer"] for error in document["errors"]] == places
    assert client.get(batches).json()["data"] == []


@pytest.mark.parametrize("arguments", [None, 1, "x", [], {}, "[]", {"path": 3}, {"path": "task.txt", "nope": 1}])
def test_what_is_wrong_with_arguments_is_the_calls_result(client: httpx2.Client, batches: str, arguments: Any) -> None:
    response = client.post(batches, json={"calls": [{"name": "read", "arguments": arguments}]}, params={"wait": "10"})
    assert response.status_code == 200
    [call] = response.json()["calls"]
    assert (call["status"], call["error"]["code"], call["arguments"]) == ("failed", "invalid_arguments", arguments)


def test_64_calls_are_taken_and_answered_in_request_order(client: httpx2.Client, batches: str) -> None:
    calls = [READ | {"id": f"~{number}"} for number in range(64)]
    batch = client.post(batches, json={"calls": calls}, params={"wait": "20"}).json()
    assert [call["toolCallId"] for call in batch["calls"]] == [call["id"] for call in calls]
    assert batch["summary"]["succeeded"] == 64


def test_a_batch_of_a_workspace_that_is_not_there_is_404(client: httpx2.Client) -> None:
    path = "/v1/workspaces/ws_01m8pk0mq7e71bgqe673033873"
    assert_problem(client.post(f"{path}/batches", json={"calls": [READ]}), "not_found")
    assert_problem(client.get(f"{path}/batches"), "not_found")


# -- reading and listing ----------------------------------------------------------------------------------------------


def test_batches_are_listed_newest_first_without_calls(client: httpx2.Client, batches: str) -> None:
    made = [client.post(batches, json={"calls": [READ]}, params={"wait": "10"}).json() for _ in range(3)]
    for batch in made:
        del batch["calls"]
    page = client.get(batches, params={"limit": "2"}).json()
    assert page["data"] == made[:0:-1]
    rest = client.get(batches, params={"limit": "2", "cursor": page["nextCursor"]}).json()
    assert rest == {"data": made[:1], "nextCursor": None}
    assert client.get(batches, params={"status": "completed"}).json()["data"] == made[::-1]
    assert client.get(batches, params={"status": "running"}).json()["data"] == []
    assert_problem(client.get(batches, params={"status": "done"}), "invalid_request")


def test_a_get_waits_for_the_end(client: httpx2.Client, batches: str) -> None:
    path = client.post(batches, json={"calls": [sleep("sleep 0.4")]}).headers["location"]
    early = client.get(path, params={"wait": "0.05"}).json()
    assert early["status"] in {"queued", "running"}
    started = time.monotonic()
    assert client.get(path, params={"wait": "20"}).json()["status"] == "completed"
    assert time.monotonic() - started < 5


def test_results_beyond_4_mib_have_their_own_url(
    client: httpx2.Client, make_workspace: Callable[..., dict[str, Any]]
) -> None:
    line = "x" * 99 + "\n"
    workspace = make_workspace(
        files={"big.txt": line * 9_000}, options={"read": {"maxBytes": 2_000_000, "maxLines": 10_000}}
    )
    calls = [{"name": "read", "arguments": {"path": "big.txt"}} for _ in range(6)]
    path = f"/v1/workspaces/{workspace['id']}/batches"
    response = client.post(path, json={"calls": calls}, params={"wait": "20"})
    found = response.json()["calls"]
    assert len(response.content) < 5 * 1024 * 1024
    inlined = [call for call in found if call["result"] is not None]
    left_out = [call for call in found if call["result"] is None]
    assert (len(inlined), len(left_out)) == (4, 2)
    for call in left_out:
        assert (call["status"], call["resultTruncated"]) == ("succeeded", True)
        assert call["resultUrl"] == f"/v1/calls/{call['id']}"
        whole = client.get(call["resultUrl"]).json()
        assert "resultTruncated" not in whole
        assert len(text_of(whole)) > 900_000
    listed = client.get("/v1/calls", params={"batch": response.json()["id"]})
    assert len(listed.content) < 5 * 1024 * 1024


# -- cancelling -------------------------------------------------------------------------------------------------------


def test_a_cancel_is_answered_at_once_and_can_be_repeated(
    client: httpx2.Client, workspace: dict[str, Any], batches: str
) -> None:
    body = {"calls": [sleep("sleep 60 & sleep 60; touch late"), sleep("touch late")]}
    path = client.post(batches, json=body).headers["location"]
    eventually(lambda: client.get(path).json()["calls"][0]["status"] == "running")
    started = time.monotonic()
    response = client.post(f"{path}/cancel")
    assert response.status_code in {200, 202}
    batch = client.get(path, params={"wait": "5"}).json()
    assert time.monotonic() - started < 1
    assert batch["status"] == "cancelled"
    assert [call["status"] for call in batch["calls"]] == ["cancelled", "cancelled"]
    assert [call["result"]["isError"] for call in batch["calls"]] == [True, True]
    again = client.post(f"{path}/cancel")
    assert (again.status_code, again.json()) == (200, batch)
    assert not (Path(workspace["root"]) / "late").exists()


def test_a_batch_that_has_ended_is_left_as_it_is(client: httpx2.Client, batches: str) -> None:
    batch = client.post(batches, json={"calls": [READ]}, params={"wait": "10"}).json()
    response = client.post(f"/v1/batches/{batch['id']}/cancel")
    assert (response.status_code, response.json()) == (200, batch)
    response = client.post(f"/v1/calls/{batch['calls'][0]['id']}/cancel")
    assert (response.status_code, response.json()) == (200, batch["calls"][0])


def test_one_call_is_cancelled_and_the_others_go_on(client: httpx2.Client, batches: str) -> None:
    path = client.post(batches, json={"calls": [sleep(), sleep("echo on")]}).headers["location"]
    first = eventually(lambda: next((c for c in client.get(path).json()["calls"] if c["status"] == "running"), None))
    assert client.post(f"/v1/calls/{first['id']}/cancel").status_code in {200, 202}
    batch = client.get(path, params={"wait": "10"}).json()
    assert batch["status"] == "completed"
    assert [call["status"] for call in batch["calls"]] == ["cancelled", "succeeded"]
    assert_problem(client.post("/v1/calls/call_01m8pk0mq7e71bgqe673033873/cancel"), "not_found")


@pytest.mark.parametrize(("policy", "status"), [("cancel", "cancelled"), ("continue", "completed")])
def test_a_client_that_leaves_its_stream_cancels_the_batch_when_it_said_so(
    client: httpx2.Client, batches: str, policy: str, status: str
) -> None:
    body = {"calls": [sleep("echo up; sleep 1.2")], "onDisconnect": policy}
    with event_stream(client, "POST", batches, json=body) as (response, events):
        next(event for event in events if event.type == "tool_execution_update")
    batch = client.get(response.headers["location"], params={"wait": "10"}).json()
    assert batch["status"] == status


# -- the short cut ----------------------------------------------------------------------------------------------------


def test_one_tool_is_called_with_its_arguments_as_the_body(client: httpx2.Client, workspace: dict[str, Any]) -> None:
    path = f"/v1/workspaces/{workspace['id']}/tools"
    response = client.post(f"{path}/read", json={"path": "task.txt"})
    assert response.status_code == 200
    call = response.json()
    assert (call["status"], call["toolName"], text_of(call)) == ("succeeded", "read", "   1│ status: draft")
    assert response.headers["location"] == f"/v1/batches/{call['batchId']}"
    assert client.get(response.headers["location"]).json()["calls"] == [call]
    failed = client.post(f"{path}/read", content=b"")
    assert (failed.status_code, failed.json()["error"]["code"]) == (200, "invalid_arguments")
    assert failed.json()["arguments"] == {}
    assert_problem(client.post(f"{path}/no_such_tool", json={}), "not_found")
    assert_problem(client.post(f"{path}/read", content=b"{"), "malformed_json")


def test_one_tool_that_takes_longer_than_the_wait_is_202(client: httpx2.Client, workspace: dict[str, Any]) -> None:
    path = f"/v1/workspaces/{workspace['id']}/tools/bash"
    response = client.post(path, json={"command": "sleep 60"}, params={"wait": "0.2"})
    assert response.status_code == 202
    call = response.json()
    assert (call["status"], call["result"]) == ("running", None)
    assert client.post(response.headers["location"] + "/cancel").status_code in {200, 202}


# -- refusals ---------------------------------------------------------------------------------------------------------


def test_a_service_that_is_told_to_stop_takes_nothing_new_and_lets_running_batches_end(tmp_path: Path) -> None:
    with ServerThread(tmp_path / "data") as server, server.client() as client:
        workspace = client.post("/v1/workspaces", json={"files": {"task.txt": "x"}}).json()
        batches = f"/v1/workspaces/{workspace['id']}/batches"
        with event_stream(client, "POST", batches, json={"calls": [sleep("echo up; sleep 1; echo down")]}) as (
            response,
            events,
        ):
            next(event for event in events if event.type == "tool_execution_update")
            server.begin_stop()
            assert_problem(eventually(lambda: (r := client.get("/readyz")).status_code == 503 and r), "not_ready")
            for refused in (
                client.post(batches, json={"calls": [READ]}),
                client.post("/v1/workspaces", json={}),
                client.post(f"/v1/workspaces/{workspace['id']}/tools/read", json={"path": "task.txt"}),
            ):
                assert_problem(refused, "overloaded")
                assert refused.headers["retry-after"] == "1"
            assert client.get(response.headers["location"]).status_code == 200
            rest = list(events)
        assert rest[-1].type == "batch_end"
        assert rest[-1].data["status"] == "completed"
