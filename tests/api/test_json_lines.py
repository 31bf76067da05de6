"""JSON lines (`Accept: application/x-ndjson`): the events of a batch, all calls and all of the audit log."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2
import pytest

from app.errors import StorageUnavailable
from tests.api.problems import assert_problem
from tests.support.server import ServerThread, event_stream

LINES = {"Accept": "application/x-ndjson"}
TICKS = {"name": "bash", "arguments": {"command": "for i in 1 2 3; do echo tick $i; sleep 0.12; done"}}


def lines(text: str) -> list[dict[str, Any]]:
    assert text.endswith("\n")
    return [json.loads(line) for line in text.splitlines() if line]


@pytest.fixture(scope="module")
def ended(client: httpx2.Client) -> dict[str, Any]:
    """A batch that has ended, with output in several events: to be looked at."""
    batches = f"/v1/workspaces/{client.post('/v1/workspaces').json()['id']}/batches"
    batch: dict[str, Any] = client.post(batches, json={"calls": [TICKS]}, params={"wait": "20"}).json()
    assert batch["status"] == "completed"
    return batch


# -- events -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("updates", ["delta", "snapshot", "none"])
def test_the_events_are_those_of_the_event_stream(client: httpx2.Client, ended: dict[str, Any], updates: str) -> None:
    path = f"/v1/batches/{ended['id']}/events"
    response = client.get(path, headers=LINES, params={"updates": updates})
    assert (response.status_code, response.headers["content-type"]) == (200, "application/x-ndjson")
    with event_stream(client, "GET", path, params={"updates": updates}) as (_, events):
        assert lines(response.text) == [event.data for event in events]


def test_they_go_on_after_any_event_as_a_stream_does(client: httpx2.Client, ended: dict[str, Any]) -> None:
    path = f"/v1/batches/{ended['id']}/events"
    whole = lines(client.get(path, headers=LINES).text)
    assert lines(client.get(path, headers={**LINES, "Last-Event-ID": "2"}).text) == whole[2:]
    assert lines(client.get(path, headers=LINES, params={"after": "3"}).text) == whole[3:]
    assert client.get(path, headers=LINES, params={"after": str(len(whole))}).status_code == 204
    assert_problem(client.get(path, headers=LINES, params={"after": "99"}), "invalid_cursor")
    head = client.head(path, headers=LINES)
    assert (head.headers["content-type"], head.content) == ("application/x-ndjson", b"")


def test_a_streaming_post_sends_lines_as_they_happen(client: httpx2.Client, batches: str) -> None:
    with client.stream("POST", batches, json={"calls": [TICKS]}, headers=LINES) as response:
        assert response.headers["content-type"] == "application/x-ndjson"
        assert response.headers["x-accel-buffering"] == "no"
        events = (json.loads(line) for line in response.iter_lines() if line)
        first = next(events)
        assert first["type"] == "batch_start"
        path = response.headers["location"]
        assert client.get(path).json()["status"] in {"queued", "running"}
        seen = [first, *events]
    assert [event["seq"] for event in seen] == list(range(1, len(seen) + 1))
    assert seen[-1]["type"] == "batch_end"
    assert lines(client.get(f"{path}/events", headers=LINES).text) == seen


def test_a_line_is_a_whole_event_whatever_the_output_holds(client: httpx2.Client, batches: str) -> None:
    command = r"printf 'a\rdata: x\n\ndata: {}\n\342\200\250end'"
    body = {"calls": [{"name": "bash", "arguments": {"command": command}}]}
    events = lines(client.post(batches, json=body, headers=LINES).text)
    text = "".join(delta["text"] for event in events for delta in event.get("delta", ()))
    assert text == "a\rdata: x\n\ndata: {}\n\u2028end"


@pytest.mark.parametrize(
    ("accept", "form"),
    [
        ("application/x-ndjson", "application/x-ndjson"),
        ("Application/X-NDJSON; q=0.5", "application/x-ndjson"),
        ("text/event-stream, application/x-ndjson", "text/event-stream; charset=utf-8"),
        ("text/event-stream;q=0.5, application/x-ndjson", "application/x-ndjson"),
        ("application/x-ndjson, */*", "application/x-ndjson"),
        ("*/*", "text/event-stream; charset=utf-8"),
        ("text/*, application/x-ndjson;q=0", "text/event-stream; charset=utf-8"),
        ("text/event-stream;q=0, */*", "application/x-ndjson"),
        ("application/*", "application/x-ndjson"),
        ("text/event-stream;q=odd", "text/event-stream; charset=utf-8"),
        ("", "text/event-stream; charset=utf-8"),
        ("application/json", None),
        ("text/event-stream;q=0", None),
        ("application/x-ndjson;q=0, text/event-stream;q=0, */*", None),
        ("*/*;q=0", None),
    ],
)
def test_the_form_is_the_one_a_client_likes_best(
    client: httpx2.Client, ended: dict[str, Any], accept: str, form: str | None
) -> None:
    response = client.get(f"/v1/batches/{ended['id']}/events", headers={"Accept": accept})
    if form is None:
        assert_problem(response, "not_acceptable")
    else:
        assert response.headers["content-type"] == form


def test_a_post_that_asks_for_no_stream_gets_none(client: httpx2.Client, batches: str) -> None:
    body = {"calls": [{"name": "read", "arguments": {"path": "task.txt"}}]}
    for accept in ("application/json", "*/*", "text/event-stream;q=0, application/json", "application/x-ndjson;q=0"):
        response = client.post(batches, json=body, headers={"Accept": accept})
        assert (response.status_code, response.headers["content-type"]) == (202, "application/json")


def test_a_stream_in_which_nothing_happens_shows_that_it_lives(
    client: httpx2.Client, batches: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("app.api.event_stream.PING_SECONDS", 0.05)
    path = client.post(batches, json={"calls": [{"name": "bash", "arguments": {"command": "sleep 60"}}]}).headers[
        "location"
    ]
    for headers, sign in ((LINES, ""), ({}, ": ping")):
        with client.stream("GET", f"{path}/events", headers=headers) as response:
            assert sign in response.iter_lines()
    client.post(f"{path}/cancel")


# -- calls ------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def many(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[ServerThread, httpx2.Client, str]]:
    """A workspace with more calls than a page of the export, among them two whose results do not fit a page."""
    with ServerThread(tmp_path_factory.mktemp("many") / "data") as server, server.client() as client:
        options = {"read": {"maxBytes": 4_000_000, "maxLines": 100_000}}
        files = {"big.txt": "x" * 99 + "\n", "small.txt": "small\n"}
        files["big.txt"] *= 25_000
        workspace = client.post("/v1/workspaces", json={"options": options, "files": files}).json()["id"]
        for _ in range(3):
            calls = [{"name": "read", "arguments": {"path": "small.txt"}}] * 49
            calls += [{"name": "read", "arguments": {"path": "big.txt"}}]
            path = f"/v1/workspaces/{workspace}/batches"
            assert client.post(path, json={"calls": calls}, params={"wait": "30"}).status_code == 200
        yield server, client, workspace


def test_an_export_has_every_call_once_and_whole(many: tuple[ServerThread, httpx2.Client, str]) -> None:
    _, client, workspace = many
    response = client.get("/v1/calls", params={"workspace": workspace}, headers=LINES)
    assert (response.status_code, response.headers["content-type"]) == (200, "application/x-ndjson")
    found = lines(response.text)
    ids = [call["id"] for call in found]
    assert (len(ids), ids) == (150, sorted(set(ids), reverse=True))
    assert all(call["result"]["content"] and call["arguments"] for call in found)
    assert [len(call["result"]["content"][0]["text"]) > 2_000_000 for call in found].count(True) == 3
    assert found[70] == client.get(f"/v1/calls/{ids[70]}").json()


def test_an_export_takes_conditions_a_limit_and_a_cursor(many: tuple[ServerThread, httpx2.Client, str]) -> None:
    _, client, workspace = many

    def exported(**query: str) -> list[str]:
        response = client.get("/v1/calls", params={"workspace": workspace, **query}, headers=LINES)
        return [call["id"] for call in lines(response.text)] if response.text else []

    everything = exported()
    assert len(exported(path="big.txt")) == 3
    assert exported(limit="7") == everything[:7]
    assert exported(limit="120") == everything[:120]
    assert exported(tool="bash") == []
    page = client.get("/v1/calls", params={"workspace": workspace, "limit": "10"}).json()
    assert exported(cursor=page["nextCursor"]) == everything[10:]
    assert_problem(client.get("/v1/calls", params={"cursor": "x"}, headers=LINES), "invalid_cursor")
    assert_problem(client.get("/v1/calls", params={"nmae": "x"}, headers=LINES), "invalid_request")
    both = {"Accept": "application/json, application/x-ndjson"}
    assert client.get("/v1/calls", headers=both).headers["content-type"] == "application/json"


def test_an_error_in_the_middle_is_the_last_line_and_the_body_does_not_end(
    many: tuple[ServerThread, httpx2.Client, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    server, client, workspace = many
    batches = server.services.batches
    whole_call = batches.whole_call
    asked: list[str] = []

    async def fail_later(call: Any) -> Any:
        asked.append(call.id)
        if len(asked) == 120:
            raise StorageUnavailable("the database does not answer; try again in a moment")
        return await whole_call(call)

    monkeypatch.setattr(batches, "whole_call", fail_later)
    got: list[bytes] = []
    with client.stream("GET", "/v1/calls", params={"workspace": workspace}, headers=LINES) as response:
        assert response.status_code == 200
        with pytest.raises(httpx2.RemoteProtocolError):
            got.extend(response.iter_raw())
    *calls, last = lines(b"".join(got).decode())
    assert [call["id"] for call in calls] == asked[:119]
    assert (last["error"]["code"], last["error"]["status"]) == ("storage_unavailable", 503)
    monkeypatch.undo()
    rest = client.get("/v1/calls", params={"workspace": workspace, "cursor": last["nextCursor"]}, headers=LINES)
    ids = [call["id"] for call in lines(rest.text)]
    assert (ids[0], len(ids)) == (asked[119], 31)


def test_an_error_before_the_first_line_is_a_problem(tmp_path: Path) -> None:
    with ServerThread(tmp_path / "data") as server, server.client() as client:
        server.services.batches._reads.close()
        assert_problem(client.get("/v1/calls", headers=LINES), "storage_unavailable")


def test_a_client_that_leaves_an_export_leaves_nothing_behind(many: tuple[ServerThread, httpx2.Client, str]) -> None:
    _, client, workspace = many
    for _ in range(5):
        with client.stream("GET", "/v1/calls", params={"workspace": workspace}, headers=LINES) as response:
            assert next(response.iter_raw())
    assert client.get("/v1/calls", params={"workspace": workspace}).status_code == 200


# -- the audit log ----------------------------------------------------------------------------------------------------


def test_the_audit_log_is_exported_as_it_is_listed(
    many: tuple[ServerThread, httpx2.Client, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    _, client, workspace = many
    monkeypatch.setattr("app.services.audit.EXPORT_PAGE", 2)

    def exported(**query: str) -> list[dict[str, Any]]:
        response = client.get("/v1/audit-events", params=query, headers=LINES)
        assert (response.status_code, response.headers["content-type"]) == (200, "application/x-ndjson")
        return lines(response.text) if response.text else []

    listed = client.get("/v1/audit-events", params={"limit": "200"}).json()
    assert (len(listed["data"]), listed["nextCursor"]) == (4, None)
    assert exported() == listed["data"]
    assert exported(limit="3") == listed["data"][:3]
    assert exported(target=workspace) == listed["data"][3:]
    assert exported(action="key.revoked") == []
    first = client.get("/v1/audit-events", params={"limit": "1"}).json()
    assert exported(cursor=first["nextCursor"], action="batch.submitted") == listed["data"][1:3]
    assert_problem(client.get("/v1/audit-events", params={"cursor": "x"}, headers=LINES), "invalid_cursor")
    assert_problem(client.get("/v1/audit-events", params={"limit": "0"}, headers=LINES), "invalid_request")


def test_an_error_in_the_middle_of_the_audit_log_says_where_to_go_on(
    many: tuple[ServerThread, httpx2.Client, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    server, client, _ = many
    monkeypatch.setattr("app.services.audit.EXPORT_PAGE", 2)
    audit = server.services.audit
    read = audit.list
    pages = 0

    async def fail_later(*arguments: Any, **options: Any) -> Any:
        nonlocal pages
        pages += 1
        if pages == 2:
            raise StorageUnavailable("the database does not answer; try again in a moment")
        return await read(*arguments, **options)

    monkeypatch.setattr(audit, "list", fail_later)
    got: list[bytes] = []
    with client.stream("GET", "/v1/audit-events", headers=LINES) as response, pytest.raises(httpx2.RemoteProtocolError):
        got.extend(response.iter_raw())
    monkeypatch.undo()
    *seen, last = lines(b"".join(got).decode())
    assert last["error"]["code"] == "storage_unavailable"
    rest = client.get("/v1/audit-events", params={"cursor": last["nextCursor"]}, headers=LINES)
    everything = client.get("/v1/audit-events").json()["data"]
    assert [*seen, *lines(rest.text)] == everything
    assert len(seen) == 2


def test_only_an_operator_exports_the_audit_log(many: tuple[ServerThread, httpx2.Client, str]) -> None:
    server, client, _ = many
    token = client.post("/v1/keys", json={"name": "reader", "scopes": ["read", "write", "exec"]}).json()["token"]
    with server.client(token) as reader:
        assert_problem(reader.get("/v1/audit-events", headers=LINES), "forbidden")
