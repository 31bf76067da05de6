"""The feed of a workspace, over HTTP."""

import json
from collections.abc import Callable, Iterator
from typing import Any

import httpx2
import pytest

from tests.api.problems import assert_problem
from tests.support.server import ServerThread, eventually

LINES = {"Accept": "application/x-ndjson"}
READ = {"calls": [{"name": "read", "arguments": {"path": "task.txt"}}]}
SLEEP = {"calls": [{"name": "bash", "arguments": {"command": "sleep 60"}}]}


@pytest.fixture
def feed(workspace: dict[str, Any]) -> str:
    return f"/v1/workspaces/{workspace['id']}/events"


def hints(response: httpx2.Response) -> Iterator[dict[str, Any]]:
    return (json.loads(line) for line in response.iter_lines() if line)


def test_a_batch_is_hinted_from_its_acceptance_to_its_end(
    server: ServerThread, client: httpx2.Client, feed: str, batches: str
) -> None:
    with client.stream("GET", feed, headers=LINES) as response:
        assert (response.status_code, response.headers["content-type"]) == (200, "application/x-ndjson")
        eventually(lambda: server.services.feed.followers == 1)
        batch = client.post(batches, json=READ, params={"wait": "20"}).json()
        seen: list[dict[str, Any]] = []
        for hint in hints(response):
            assert hint.keys() == {"type", "batchId", "lastSeq", "status"}
            seen.append(hint)
            if hint["status"] == "completed":
                break
    assert {hint["batchId"] for hint in seen} == {batch["id"]}
    assert [hint["lastSeq"] for hint in seen] == sorted({hint["lastSeq"] for hint in seen})
    assert seen[-1]["lastSeq"] == 4
    eventually(lambda: server.services.feed.followers == 0)


def test_an_event_source_gets_named_events_without_ids(client: httpx2.Client, feed: str, batches: str) -> None:
    path = client.post(batches, json=SLEEP).headers["location"]
    with client.stream("GET", feed, headers={"Accept": "text/event-stream"}) as response:
        assert response.headers["content-type"] == "text/event-stream; charset=utf-8"
        assert response.headers["cache-control"] == "no-cache, no-transform"
        lines = response.iter_lines()
        assert [next(lines), next(lines), next(lines)] == ["retry: 1000", "", "event: hint"]
        data = next(lines)
        assert json.loads(data.removeprefix("data: "))["batchId"] == path.rsplit("/", 1)[1]
        client.post(f"{path}/cancel")
        text = ""
        while "cancelled" not in text:
            text = next(lines)
            assert not text.startswith("id:")


@pytest.mark.parametrize("end", ["delete", "expire"])
def test_the_feed_ends_when_the_workspace_does(
    client: httpx2.Client, make_workspace: Callable[..., dict[str, Any]], end: str
) -> None:
    made = make_workspace(**({"ttlSeconds": 2} if end == "expire" else {}))
    path = f"/v1/workspaces/{made['id']}"
    batch = client.post(f"{path}/batches", json=SLEEP).json()
    with client.stream("GET", f"{path}/events", headers=LINES) as response:
        assert response.status_code == 200
        if end == "delete":
            assert client.delete(path).status_code == 204
        seen = list(hints(response))
    assert (seen[-1]["batchId"], seen[-1]["status"]) == (batch["id"], "cancelled")
    assert client.get(path).json()["status"] == {"delete": "deleted", "expire": "expired"}[end]
    assert_problem(client.get(f"{path}/events"), "workspace_gone")


def test_a_feed_that_cannot_be_is_told_so(client: httpx2.Client, feed: str) -> None:
    assert_problem(client.get("/v1/workspaces/ws_01m8pk0mq7e71bgqe673033873/events"), "not_found")
    assert_problem(client.get(feed, headers={"Accept": "application/json"}), "not_acceptable")
    assert_problem(client.get(feed, params={"after": "1"}), "invalid_request")
    head = client.head(feed)
    assert (head.status_code, head.content) == (200, b"")
    assert head.headers["content-type"].startswith("text/event-stream")
