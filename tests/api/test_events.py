import socket
from collections.abc import Callable
from typing import Any
from urllib.parse import urlsplit

import httpx2
import pytest

from tests.api.problems import assert_problem
from tests.support.server import KEY, Event, ServerThread, event_stream, eventually, parse_events

TICKS = {"name": "bash", "arguments": {"command": "for i in 1 2 3 4 5 6; do echo tick $i; sleep 0.12; done"}}


@pytest.fixture(scope="module")
def ended(client: httpx2.Client) -> dict[str, Any]:
    """A batch that has ended, with output in several events: to be looked at."""
    batches = f"/v1/workspaces/{client.post('/v1/workspaces').json()['id']}/batches"
    batch: dict[str, Any] = client.post(batches, json={"calls": [TICKS]}, params={"wait": "20"}).json()
    assert batch["status"] == "completed"
    return batch


def events_of(client: httpx2.Client, batch_id: str, **request: Any) -> list[Event]:
    with event_stream(client, "GET", f"/v1/batches/{batch_id}/events", **request) as (response, events):
        assert response.status_code == 200
        return list(events)


def output(events: list[Event]) -> str:
    return "".join(delta["text"] for event in events for delta in event.data.get("delta", ()))


def test_a_stream_may_not_be_held_back_on_its_way(client: httpx2.Client, ended: dict[str, Any]) -> None:
    response = client.get(f"/v1/batches/{ended['id']}/events", headers={"Accept-Encoding": "gzip"})
    assert response.headers["content-type"] == "text/event-stream; charset=utf-8"
    assert response.headers["cache-control"] == "no-cache, no-transform"
    assert response.headers["x-accel-buffering"] == "no"
    assert "content-encoding" not in response.headers
    assert "\r" not in response.text
    assert response.text.startswith("id: 1\nevent: batch_start\nretry: ")


def test_cut_after_any_event_a_stream_goes_on_without_a_gap(client: httpx2.Client, batches: str) -> None:
    path = client.post(batches, json={"calls": [TICKS]}).headers["location"]
    seen: list[Event] = []
    while not seen or seen[-1].type != "batch_end":
        headers = {"Last-Event-ID": str(seen[-1].id)} if seen else {}
        with event_stream(client, "GET", f"{path}/events", headers=headers) as (_, events):
            seen.append(next(events))
    assert [event.id for event in seen] == list(range(1, len(seen) + 1))
    assert output(seen) == "".join(f"tick {number}\n" for number in range(1, 7))
    assert len([event for event in seen if event.type == "tool_execution_update"]) >= 4
    whole = events_of(client, path.rsplit("/", 1)[1])
    assert whole == seen


def test_the_same_id_gives_the_same_events_however_often(client: httpx2.Client, ended: dict[str, Any]) -> None:
    whole = events_of(client, ended["id"])
    for _ in range(2):
        assert events_of(client, ended["id"], headers={"Last-Event-ID": "3"}) == whole[3:]
    assert events_of(client, ended["id"], params={"after": "3"}) == whole[3:]


def test_the_header_wins_over_the_parameter(client: httpx2.Client, ended: dict[str, Any]) -> None:
    whole = events_of(client, ended["id"])
    assert events_of(client, ended["id"], params={"after": "1"}, headers={"Last-Event-ID": "4"}) == whole[4:]
    assert events_of(client, ended["id"], params={"after": "4"}, headers={"Last-Event-ID": ""}) == whole


@pytest.mark.parametrize("cursor", ["0", "", "00"])
def test_nothing_and_zero_are_the_start(client: httpx2.Client, ended: dict[str, Any], cursor: str) -> None:
    assert events_of(client, ended["id"], params={"after": cursor})[0].id == 1
    assert events_of(client, ended["id"], headers={"Last-Event-ID": cursor})[0].id == 1


def test_after_the_last_event_there_is_nothing(client: httpx2.Client, ended: dict[str, Any]) -> None:
    last = events_of(client, ended["id"])[-1]
    response = client.get(f"/v1/batches/{ended['id']}/events", headers={"Last-Event-ID": str(last.id)})
    assert (response.status_code, response.content) == (204, b"")


@pytest.mark.parametrize("cursor", ["abc", "-1", "1.5", "99999999999", "9" * 30, "1 2", "²", "0x1"])
def test_a_cursor_that_is_no_event_of_the_batch_is_400(
    client: httpx2.Client, ended: dict[str, Any], cursor: str
) -> None:
    path = f"/v1/batches/{ended['id']}/events"
    assert_problem(client.get(path, headers={"Last-Event-ID": cursor.encode()}), "invalid_cursor")
    assert_problem(client.get(path, params={"after": cursor}), "invalid_cursor")


def test_a_parameter_that_is_no_number_is_told_also_when_the_header_wins(
    client: httpx2.Client, ended: dict[str, Any]
) -> None:
    path = f"/v1/batches/{ended['id']}/events"
    assert_problem(client.get(path, params={"after": "false"}, headers={"Last-Event-ID": "2"}), "invalid_cursor")


def test_an_id_of_another_batch_tells_nothing_of_it(client: httpx2.Client, ended: dict[str, Any], batches: str) -> None:
    body = {"calls": [{"name": "read", "arguments": {"path": "task.txt"}}]}
    other = client.post(batches, json=body, params={"wait": "10"}).json()
    assert {event.data["batchId"] for event in events_of(client, other["id"], headers={"Last-Event-ID": "2"})} == {
        other["id"]
    }
    assert_problem(client.get(f"/v1/batches/{other['id']}/events", headers={"Last-Event-ID": "7"}), "invalid_cursor")


def test_updates_may_be_snapshots_or_left_out(client: httpx2.Client, ended: dict[str, Any]) -> None:
    whole = events_of(client, ended["id"])
    lifecycle = events_of(client, ended["id"], params={"updates": "none"})
    assert lifecycle == [event for event in whole if event.type != "tool_execution_update"]
    snapshots = events_of(client, ended["id"], params={"updates": "snapshot"})
    assert [(event.id, event.type) for event in snapshots] == [(event.id, event.type) for event in whole]
    last = [event.data for event in snapshots if event.type == "tool_execution_update"][-1]
    assert last["kind"] == "snapshot"
    assert last["snapshot"]["text"] == output(whole)
    assert_problem(client.get(f"/v1/batches/{ended['id']}/events", params={"updates": "all"}), "invalid_request")


def test_a_streaming_post_takes_the_same_updates(client: httpx2.Client, batches: str) -> None:
    with event_stream(client, "POST", batches, json={"calls": [TICKS]}, params={"updates": "none"}) as (_, events):
        assert [event.type for event in events] == [
            "batch_start",
            "tool_execution_start",
            "tool_execution_end",
            "batch_end",
        ]


def test_a_client_that_rules_a_stream_out_gets_406(client: httpx2.Client, ended: dict[str, Any]) -> None:
    path = f"/v1/batches/{ended['id']}/events"
    assert_problem(client.get(path, headers={"Accept": "application/json"}), "not_acceptable")
    for accept in ("*/*", "text/*;q=0.5", "application/json, text/event-stream"):
        assert client.get(path, headers={"Accept": accept}).status_code == 200


def test_a_head_says_what_a_get_would_and_opens_no_stream(client: httpx2.Client, batches: str) -> None:
    sleeping = {"name": "bash", "arguments": {"command": "sleep 60"}}
    path = client.post(batches, json={"calls": [sleeping]}).headers["location"]
    response = client.head(f"{path}/events")
    assert (response.status_code, response.content) == (200, b"")
    assert response.headers["content-type"].startswith("text/event-stream")
    assert client.head(f"{path}/events", headers={"Last-Event-ID": "abc"}).status_code == 400
    client.post(f"{path}/cancel")


def test_a_stream_of_a_batch_that_is_not_there_is_404(client: httpx2.Client) -> None:
    assert_problem(client.get("/v1/batches/batch_01m8pk0mq7e71bgqe673033873/events"), "not_found")


def test_events_come_as_they_happen(client: httpx2.Client, batches: str) -> None:
    command = "echo one; until [ -e go ]; do sleep 0.05; done; echo two"
    body = {"calls": [{"name": "bash", "arguments": {"command": command}}]}
    with event_stream(client, "POST", batches, json=body) as (_, events):
        first = next(event for event in events if event.type == "tool_execution_update")
        assert output([first]) == "one\n"
        assert client.put(f"{batches.removesuffix('/batches')}/files/go", content=b"").status_code == 201
        assert output(list(events)) == "two\n"


def test_lines_and_separators_in_output_end_no_field(
    client: httpx2.Client, make_workspace: Callable[..., dict[str, Any]]
) -> None:
    text = "x\revent: done\rid: 999\rdata: {}\r\r\u2028tail\u2029\n"
    workspace = make_workspace(files={"odd.txt": text})
    path = f"/v1/workspaces/{workspace['id']}/batches"
    body = {"calls": [{"name": "bash", "arguments": {"command": "cat odd.txt"}}]}
    response = client.post(path, json=body, headers={"Accept": "text/event-stream"})
    assert not {"\r", "\u2028", "\u2029"} & set(response.text)
    assert output(parse_events(response.text)) == text
    # The split a naive client does finds the same.
    assert len([line for line in response.text.splitlines() if line.startswith("event:")]) == len(
        parse_events(response.text)
    )


def test_followers_that_leave_at_any_moment_leave_nothing_behind(
    server: ServerThread, client: httpx2.Client, batches: str
) -> None:
    sleeping = {"name": "bash", "arguments": {"command": "sleep 60"}}
    path = client.post(batches, json={"calls": [sleeping]}).headers["location"]
    log = server.services.batches._log
    address = urlsplit(server.url)
    request = f"GET {path}/events HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {KEY}\r\n\r\n".encode()
    for number in range(100):
        with socket.create_connection((str(address.hostname), int(address.port or 0))) as connection:
            connection.sendall(request)
            if number % 2:
                assert connection.recv(1) == b"H"
    eventually(lambda: log.followers == 0)
    with event_stream(client, "GET", f"{path}/events") as (_, events):
        assert next(events).type == "batch_start"
        assert eventually(lambda: log.followers) == 1
    client.post(f"{path}/cancel")
    eventually(lambda: log.followers == 0)


def test_a_client_that_does_not_read_is_dropped(
    server: ServerThread, client: httpx2.Client, batches: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("app.api.event_stream.SEND_SECONDS", 0.5)
    shout = {"name": "bash", "arguments": {"command": "head -c 9000000 /dev/zero | tr '\\0' x"}}
    batch = client.post(batches, json={"calls": [shout]}, params={"wait": "20"}).json()
    assert batch["status"] == "completed"
    log = server.services.batches._log
    address = urlsplit(server.url)
    paths = (f"/v1/batches/{batch['id']}/events", f"/v1/calls/{batch['calls'][0]['id']}/output?follow=true")
    for path in paths:
        with socket.create_connection((str(address.hostname), int(address.port or 0))) as connection:
            connection.sendall(f"GET {path} HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {KEY}\r\n\r\n".encode())
            eventually(lambda: log.followers == 1)
            eventually(lambda: log.followers == 0)
