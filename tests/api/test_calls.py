import time
from datetime import datetime, timedelta
from typing import Any

import httpx2
import pytest

from app.api import times
from tests.api.problems import assert_problem

BOTH = "printf out1; sleep 0.05; printf err1 >&2; sleep 0.05; printf '\\377out2'"


def run(client: httpx2.Client, batches: str, *calls: dict[str, Any]) -> list[dict[str, Any]]:
    batch = client.post(batches, json={"calls": list(calls)}, params={"wait": "20"}).json()
    found: list[dict[str, Any]] = batch["calls"]
    return found


@pytest.fixture
def recorded(client: httpx2.Client, batches: str) -> list[dict[str, Any]]:
    """Three calls: a read, a read that failed, a command that took a while."""
    return run(
        client,
        batches,
        {"id": "r1", "name": "read", "arguments": {"path": "task.txt"}},
        {"id": "r2", "name": "read", "arguments": {"path": "missing.txt"}},
        {"id": "b1", "name": "bash", "arguments": {"command": "sleep 0.3; echo needle-in-output"}},
    )


def found(client: httpx2.Client, **query: str) -> list[str]:
    return [call["toolCallId"] for call in client.get("/v1/calls", params=query).json()["data"]]


def test_the_record_is_queried_by_every_condition(
    client: httpx2.Client, workspace: dict[str, Any], recorded: list[dict[str, Any]]
) -> None:
    here = {"workspace": workspace["id"]}
    assert client.get("/v1/calls", params=here).json() == {"data": recorded[::-1], "nextCursor": None}
    assert found(client, batch=recorded[0]["batchId"]) == ["b1", "r2", "r1"]
    assert found(client, **here, tool="read") == ["r2", "r1"]
    assert found(client, **here, status="succeeded") == ["b1", "r1"]
    assert found(client, **here, error="not_found") == ["r2"]
    assert found(client, **here, toolcall="b1") == ["b1"]
    assert found(client, **here, minduration="250") == ["b1"]
    assert found(client, **here, path="task.txt") == ["r1"]
    assert found(client, **here, path=f"{workspace['root']}/./task.txt") == ["r1"]
    assert found(client, **here, path="missing.txt") == ["r2"]
    assert found(client, **here, path="x" * 4096) == []
    assert found(client, **here, q="needle-in") == ["b1"]
    assert found(client, **here, q="STATUS:  draft") == ["r1"]
    assert found(client, **here, q="%") == []
    assert found(client, **here, q="_") == []
    assert found(client, **here, tool="read", status="failed") == ["r2"]
    assert found(client, **here, tool="nothing") == []


def test_the_record_is_queried_by_time(
    client: httpx2.Client, workspace: dict[str, Any], recorded: list[dict[str, Any]]
) -> None:
    here = {"workspace": workspace["id"]}
    at = recorded[0]["queuedAt"]
    later = (datetime.fromisoformat(at) + timedelta(seconds=1)).isoformat()
    earlier = (datetime.fromisoformat(at) - timedelta(seconds=1)).isoformat()
    assert len(found(client, **here, since=at)) == 3
    assert len(found(client, **here, until=at)) == 3
    assert found(client, **here, since=later) == []
    assert found(client, **here, until=earlier) == []
    # What an unescaped + in a query string becomes.
    path = f"/v1/calls?workspace={workspace['id']}&since={later}"
    assert "+00:00" in path
    assert client.get(path).json()["data"] == []


@pytest.mark.parametrize(
    ("text", "milliseconds"),
    [
        ("1970-01-01T00:00:00Z", 0),
        ("1970-01-01T00:00:00.001z", 1),
        ("1970-01-01T01:00:00.5+01:00", 500),
        ("1970-01-01T01:00:00 01:00", 0),
        ("1970-01-01t00:00:00.123999Z", 123),
        ("1969-12-31T23:59:59.999Z", -1),
    ],
)
def test_a_time_is_rfc_3339(text: str, milliseconds: int) -> None:
    assert times.milliseconds(text) == milliseconds


@pytest.mark.parametrize(
    "query",
    [
        {"since": "yesterday"},
        {"since": "2026-01-01"},
        {"until": "2026-01-01T00:00:00"},
        {"status": "done"},
        {"error": "oops"},
        {"minduration": "-1"},
        {"tool": ""},
        {"tool": "a\x00b"},
        {"toolcall": "x" * 129},
        {"limit": "201"},
        {"sort": "asc"},
    ],
)
def test_a_condition_that_does_not_fit_is_422(client: httpx2.Client, query: dict[str, str]) -> None:
    document = assert_problem(client.get("/v1/calls", params=query), "invalid_request")
    assert [error["parameter"] for error in document["errors"]] == list(query)


def test_calls_are_paged(client: httpx2.Client, workspace: dict[str, Any], recorded: list[dict[str, Any]]) -> None:
    seen: list[dict[str, Any]] = []
    cursor: dict[str, str] = {}
    while True:
        query = {"workspace": workspace["id"], "limit": "1", **cursor}
        page = client.get("/v1/calls", params=query).json()
        seen += page["data"]
        if page["nextCursor"] is None:
            break
        cursor = {"cursor": page["nextCursor"]}
    assert seen == recorded[::-1]
    assert_problem(client.get("/v1/calls", params={"cursor": "nonsense"}), "invalid_cursor")


# -- output -----------------------------------------------------------------------------------------------------------


def test_output_is_what_was_written_byte_for_byte(client: httpx2.Client, batches: str) -> None:
    [call] = run(client, batches, {"name": "bash", "arguments": {"command": BOTH}})
    path = f"/v1/calls/{call['id']}/output"
    response = client.get(path)
    assert (response.status_code, response.content) == (200, b"out1err1\xffout2")
    assert response.headers["content-type"] == "text/plain; charset=utf-8"
    assert response.headers["x-content-type-options"] == "nosniff"
    assert response.headers["accept-ranges"] == "bytes"
    assert response.headers["content-length"] == "13"
    assert client.get(path, params={"stream": "stdout"}).content == b"out1\xffout2"
    assert client.get(path, params={"stream": "stderr"}).content == b"err1"
    assert call["result"]["details"]["outputUrl"] == path
    assert_problem(client.get(path, params={"stream": "both"}), "invalid_request")
    assert_problem(client.get("/v1/calls/call_01m8pk0mq7e71bgqe673033873/output"), "not_found")


@pytest.mark.parametrize(
    ("wanted", "content", "place"),
    [
        ("bytes=0-3", b"out1", "bytes 0-3/13"),
        ("bytes=4-", b"err1\xffout2", "bytes 4-12/13"),
        ("bytes=-2", b"t2", "bytes 11-12/13"),
        ("bytes=-99", b"out1err1\xffout2", "bytes 0-12/13"),
        ("bytes=12-99", b"2", "bytes 12-12/13"),
        ("BYTES = 0 - 0", b"o", "bytes 0-0/13"),
    ],
)
def test_a_range_of_output_is_206(client: httpx2.Client, batches: str, wanted: str, content: bytes, place: str) -> None:
    [call] = run(client, batches, {"name": "bash", "arguments": {"command": BOTH}})
    response = client.get(f"/v1/calls/{call['id']}/output", headers={"Range": wanted})
    assert (response.status_code, response.content) == (206, content)
    assert response.headers["content-range"] == place
    assert response.headers["content-length"] == str(len(content))


@pytest.mark.parametrize("ignored", ["lines=1-2", "bytes=1-2,4-5", "bytes=-", "bytes=5-2", "nonsense"])
def test_a_range_that_is_none_is_answered_with_all(client: httpx2.Client, batches: str, ignored: str) -> None:
    [call] = run(client, batches, {"name": "bash", "arguments": {"command": "printf 0123456789"}})
    response = client.get(f"/v1/calls/{call['id']}/output", headers={"Range": ignored})
    assert (response.status_code, response.content) == (200, b"0123456789")


@pytest.mark.parametrize("beyond", ["bytes=10-", "bytes=10-20", "bytes=-0"])
def test_a_range_past_the_end_is_416(client: httpx2.Client, batches: str, beyond: str) -> None:
    [call] = run(client, batches, {"name": "bash", "arguments": {"command": "printf 0123456789"}})
    response = client.get(f"/v1/calls/{call['id']}/output", headers={"Range": beyond})
    assert_problem(response, "range_not_satisfiable")
    assert response.headers["content-range"] == "bytes */10"


def test_a_head_gives_the_length(client: httpx2.Client, batches: str) -> None:
    commands = (
        {"name": "bash", "arguments": {"command": "printf 0123456789"}},
        {"name": "read", "arguments": {"path": "b.txt"}},
    )
    for call, length in zip(run(client, batches, *commands), ("10", "0"), strict=True):
        response = client.head(f"/v1/calls/{call['id']}/output", headers={"Range": "bytes=0-1"})
        assert (response.status_code, response.content, response.headers["content-length"]) == (200, b"", length)


def test_output_is_followed_until_the_call_has_ended(client: httpx2.Client, batches: str) -> None:
    command = "printf one; sleep 0.6; printf two"
    batch = client.post(batches, json={"calls": [{"name": "bash", "arguments": {"command": command}}]}).json()
    path = f"/v1/calls/{batch['calls'][0]['id']}/output"
    with client.stream("GET", path, params={"follow": "true"}) as response:
        assert response.status_code == 200
        pieces = response.iter_raw()
        assert next(pieces) == b"one"
        came = time.monotonic()
        assert b"".join(pieces) == b"two"
        assert time.monotonic() - came > 0.3
    assert client.get(path, params={"follow": "true"}).content == b"onetwo"
