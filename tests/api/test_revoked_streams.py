"""Streams that are open when their key stops working."""

import json
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx2
import pytest

from app.domain.clock import now_ms
from app.storage.base import RevokeKey
from app.storage.sql.storage import SqlStorage
from tests.api.problems import assert_problem
from tests.support.server import ServerThread, event_stream, eventually

WITHIN_SECONDS = 4.0  # what is promised is a second or so; the machine may be busy
EVENTS = {"Accept": "text/event-stream"}
LINES = {"Accept": "application/x-ndjson"}
# It prints something, then runs until the test lets it end.
COMMAND = {"calls": [{"name": "bash", "arguments": {"command": "echo begun; until [ -e go ]; do sleep 0.05; done"}}]}

Revoke = Callable[[httpx2.Client, str], None]


@pytest.fixture(params=["sqlite", "postgres"], scope="module")
def server(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerThread]:
    with ExitStack() as stack:
        settings: dict[str, Any] = {}
        if request.param == "postgres":
            databases = request.getfixturevalue("postgres_databases")
            settings["database_url"] = stack.enter_context(databases.fresh())
        data_dir = tmp_path_factory.mktemp("service") / "data"
        yield stack.enter_context(ServerThread(data_dir, **settings))


@pytest.fixture(params=["here", "elsewhere"])
def revoke(request: pytest.FixtureRequest, server: ServerThread) -> Iterator[Revoke]:
    """Revokes a key by a request to this process, or as another process of the database does."""
    if request.param == "here":
        yield lambda client, key_id: client.delete(f"/v1/keys/{key_id}").raise_for_status() and None
        return
    url = server.settings.database_url
    place: Path | str = server.settings.data_dir / "toolcrib.db" if url is None else url.get_secret_value()
    storage = SqlStorage(place)
    yield lambda _client, key_id: storage.apply([RevokeKey(key_id, now_ms())]) and None
    storage.close()


def test_the_streams_of_a_revoked_key_are_cut_and_no_others(
    server: ServerThread, client: httpx2.Client, workspace: dict[str, Any], batches: str, revoke: Revoke
) -> None:
    made = client.post("/v1/keys", json={"name": "k", "scopes": ["read", "write", "exec"], "owner": "env"}).json()
    held = server.services.streams
    with ExitStack() as stack:
        mine, nobody = stack.enter_context(server.client(made["token"])), stack.enter_context(server.client(None))

        def opened(client: httpx2.Client, method: str, path: str, **request: Any) -> httpx2.Response:
            response: httpx2.Response = stack.enter_context(client.stream(method, path, **request))
            assert response.status_code == 200, response.read()
            return response

        posted = opened(mine, "POST", batches, json={**COMMAND, "onDisconnect": "cancel"}, headers=EVENTS)
        batch = posted.headers["location"]
        [call] = client.get(batch).json()["calls"]
        output = f"/v1/calls/{call['id']}/output?follow=true"
        token = mine.post("/v1/url-tokens", json={"url": f"{batch}/events"}).json()["url"]
        ways: list[tuple[httpx2.Client, str, dict[str, str]]] = [
            (mine, f"{batch}/events", EVENTS),
            (mine, f"{batch}/events", LINES),
            (mine, f"/v1/workspaces/{workspace['id']}/events", LINES),
            (nobody, token, EVENTS),
        ]
        streams = [posted, *(opened(one, "GET", path, headers=headers) for one, path, headers in ways)]
        live = opened(mine, "GET", output)
        other, events = stack.enter_context(event_stream(client, "GET", f"{batch}/events"))
        assert other.status_code == 200
        eventually(lambda: held.of_key(made["id"]) == len(streams) + 1)
        assert held.of_key("env") == 1

        revoke(client, made["id"])
        began = time.monotonic()
        for stream in streams:
            assert "batch_end" not in stream.read().decode()
        with pytest.raises(httpx2.RemoteProtocolError):
            live.read()
        assert time.monotonic() - began < WITHIN_SECONDS
        assert held.of_key(made["id"]) == 0
        for one, path, headers in ways:
            assert_problem(one.get(path, headers=headers), "unauthorized")
        assert_problem(mine.get(output), "unauthorized")

        # What the key has started runs on, and who follows it with another key misses nothing.
        assert held.of_key("env") == 1
        assert client.put(f"/v1/workspaces/{workspace['id']}/files/go", content=b"").status_code == 201
        seen = list(events)
        assert [event.id for event in seen] == list(range(1, len(seen) + 1))
        assert (seen[-1].type, seen[-1].data["status"]) == ("batch_end", "completed")


def test_a_client_that_does_not_read_loses_its_stream_too(
    server: ServerThread, client: httpx2.Client, batches: str
) -> None:
    made = client.post("/v1/keys", json={"name": "k", "scopes": ["read"], "owner": "env"}).json()
    command = "yes | head -c 9000000"
    batch = client.post(batches, json={"calls": [{"name": "bash", "arguments": {"command": command}}]}).headers
    path = f"{batch['location']}/events"
    held = server.services.streams
    with server.client(made["token"]) as mine, mine.stream("GET", path, headers=EVENTS) as response:
        assert response.status_code == 200
        eventually(lambda: held.of_key(made["id"]) == 1)
        assert client.delete(f"/v1/keys/{made['id']}").status_code == 204
        eventually(lambda: held.of_key(made["id"]) == 0, WITHIN_SECONDS)
    seen = client.get(path, headers=LINES, timeout=20).text.splitlines()
    assert json.loads(seen[-1])["type"] == "batch_end"
