"""Where the service gives way: rates, queues, command slots, streams, and that /v1/limits tells what holds."""

import contextlib
import json
import socket
import struct
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx2
import pytest

from tests.api.problems import assert_problem
from tests.support.raw_http import RawConnection
from tests.support.server import ServerThread, event_stream, eventually

WAIT = "while [ ! -e gate ]; do sleep 0.02; done"
HELD = {"calls": [{"name": "bash", "arguments": {"command": WAIT}}]}
READ = {"calls": [{"name": "ls", "arguments": {}}]}


class Workspace:
    """A workspace whose commands wait until `open`."""

    def __init__(self, client: httpx2.Client) -> None:
        self.client = client
        self.id: str = client.post("/v1/workspaces", json={}).json()["id"]
        self.batches = f"/v1/workspaces/{self.id}/batches"

    def post(self, body: dict[str, Any] = HELD, **options: Any) -> httpx2.Response:
        return self.client.post(self.batches, json=body, **options)

    def hold(self) -> str:
        """Post a batch that waits and return its id."""
        response = self.post()
        assert response.status_code == 202, response.text
        made: str = response.json()["id"]
        return made

    def open(self) -> None:
        assert self.client.put(f"/v1/workspaces/{self.id}/files/gate", content=b"").status_code in {200, 201}

    def use(self) -> dict[str, Any]:
        used: dict[str, Any] = self.client.get("/v1/limits", params={"workspace": self.id}).json()["use"]
        return used


def idle(client: httpx2.Client) -> bool:
    used = client.get("/v1/limits").json()["use"]["service"]
    return used["batches"] == used["streams"] == used["commands"]["running"] == used["commands"]["waiting"] == 0


@pytest.fixture(scope="module")
def narrow(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerThread]:
    """A service with room for very little."""
    with ServerThread(
        tmp_path_factory.mktemp("narrow") / "data",
        max_batches=3,
        max_batches_per_workspace=2,
        running_batches=2,
        running_batches_per_workspace=1,
        commands=1,
        commands_per_workspace=1,
        streams_per_key=3,
        streams_per_batch=2,
        max_upload_bytes=1000,
    ) as server:
        yield server


@pytest.fixture
def client(narrow: ServerThread) -> Iterator[httpx2.Client]:
    with narrow.client() as opened:
        yield opened
        eventually(lambda: idle(opened), 20)


@pytest.fixture
def spaces(client: httpx2.Client) -> Iterator[list[Workspace]]:
    made = [Workspace(client) for _ in range(3)]
    yield made
    for workspace in made:
        workspace.open()


# -- rates ------------------------------------------------------------------------------------------------------------


@pytest.fixture
def slow(tmp_path: Path) -> Iterator[ServerThread]:
    """A service that lets through a few requests and then one in 100 s, or 20 s for those without a key."""
    with ServerThread(tmp_path / "data", rate_limit=0.01, rate_burst=6, auth_failures_per_minute=3) as server:
        yield server


def test_a_key_may_ask_as_often_as_it_is_told_and_then_has_to_wait(slow: ServerThread) -> None:
    with slow.client() as client:
        first = client.get("/v1/limits")
        told = first.json()
        assert (told["requests"]["perSecond"], told["requests"]["burst"]) == (0.01, 6)
        assert told["use"]["caller"]["requestsRemaining"] == 5
        assert first.headers["ratelimit-policy"] == '"requests";q=6;w=600'
        assert first.headers["ratelimit"] == '"requests";r=5;t=100'
        # Every answer has the fields, whatever it is.
        answers = [client.get("/v1/tools/none"), client.post("/v1/workspaces", content=b"{")]
        answers += [client.get("/v1/limits", params={"x": "y"}), client.get("/v1/workspaces")]
        answers += [client.post("/v1/workspaces", json={})]
        assert [answer.status_code for answer in answers] == [404, 400, 422, 200, 201]
        assert [answer.headers["ratelimit"][:14] for answer in answers] == [
            f'"requests";r={n}' for n in (4, 3, 2, 1, 0)
        ]
        # Nothing is parsed any more.
        refused = client.post("/v1/workspaces", content=b"{")
        assert_problem(refused, "rate_limited")
        assert 90 <= int(refused.headers["retry-after"]) <= 100
        assert refused.headers["ratelimit"].startswith('"requests";r=0;t=')
        assert refused.headers["ratelimit-policy"] == '"requests";q=6;w=600'
        # What needs no key is not counted.
        assert client.get("/healthz").status_code == 200
        assert "ratelimit" not in client.get("/version").headers
    assert slow.services.pressure.of_caller("env", "env").requests_remaining == 0


def test_who_has_no_key_is_refused_by_address_and_who_has_one_is_not(slow: ServerThread) -> None:
    with slow.client("wrong") as client, slow.client(None) as nobody, slow.client() as holder:
        answers = [client.get("/v1/tools"), nobody.get("/v1/tools"), client.get("/v1/nothing"), client.get("/v1/tools")]
        assert [answer.status_code for answer in answers] == [401, 401, 404, 401]
        for refused in (client.get("/v1/tools"), nobody.post("/v1/workspaces", content=b"{")):
            assert_problem(refused, "rate_limited")
            assert 1 <= int(refused.headers["retry-after"]) <= 20
        told = holder.get("/v1/limits")
        assert told.status_code == 200
        assert told.json()["requests"]["authFailuresPerMinute"] == 3


# -- queues -----------------------------------------------------------------------------------------------------------


def test_batches_beyond_the_queues_are_refused_and_leave_nothing_behind(
    client: httpx2.Client, spaces: list[Workspace]
) -> None:
    first, second, third = spaces
    told = client.get("/v1/limits").json()["batches"]
    assert (told["perWorkspace"], told["total"], told["running"], told["runningPerWorkspace"]) == (2, 3, 2, 1)
    held = first.post(headers={"Idempotency-Key": "held"})
    assert held.status_code == 202
    queued = first.hold()
    assert first.use()["workspace"] == {
        "id": first.id,
        "bytes": first.use()["workspace"]["bytes"],
        "batches": 2,
        "commands": {"running": first.use()["workspace"]["commands"]["running"], "waiting": 0},
    }
    problem = assert_problem(first.post(), "too_many_batches")
    assert first.id in problem["detail"]
    assert int(first.post().headers["retry-after"]) >= 1
    second.hold()
    assert assert_problem(third.post(), "too_many_batches")["detail"].startswith("3 batches")
    assert assert_problem(client.post(f"/v1/workspaces/{third.id}/tools/ls", json={}), "too_many_batches")
    used = first.use()
    assert (used["caller"]["batches"], used["service"]["batches"]) == (3, 3)
    assert client.get(third.batches).json()["data"] == []
    # The same request again is the same batch, however full it is.
    again = first.post(headers={"Idempotency-Key": "held"})
    assert (again.status_code, again.json()["id"]) == (202, held.json()["id"])
    assert again.headers["idempotent-replayed"] == "true"
    # A batch that waits is cancelled at once, and its place is free.
    assert client.post(f"/v1/batches/{queued}/cancel").status_code in {200, 202}
    assert client.get(f"/v1/batches/{queued}", params={"wait": 10}).json()["status"] == "cancelled"
    eventually(lambda: first.use()["workspace"]["batches"] == 1)
    replaced = first.hold()
    first.open()
    second.open()
    for batch in (held.json()["id"], replaced):
        assert client.get(f"/v1/batches/{batch}", params={"wait": 20}).json()["status"] == "completed"


def test_one_request_sent_by_many_at_once_is_one_batch_when_there_is_room_for_one(
    narrow: ServerThread, spaces: list[Workspace]
) -> None:
    first = spaces[0]
    first.hold()

    def send(_number: int) -> tuple[int, str]:
        with narrow.client() as own:
            answer = own.post(first.batches, json=READ, headers={"Idempotency-Key": "many"})
            return answer.status_code, answer.json().get("id", answer.text)

    with ThreadPoolExecutor(20) as pool:
        answers = set(pool.map(send, range(20)))
    assert len(answers) == 1, answers
    assert answers.pop()[0] == 202


def test_commands_of_one_workspace_let_those_of_another_start(client: httpx2.Client, spaces: list[Workspace]) -> None:
    first, second, _ = spaces
    told = client.get("/v1/limits").json()["commands"]
    assert (told["running"], told["runningPerWorkspace"]) == (1, 1)
    first.hold()
    eventually(lambda: first.use()["workspace"]["commands"] == {"running": 1, "waiting": 0}, 20)
    waiting = second.hold()
    eventually(lambda: second.use()["workspace"]["commands"] == {"running": 0, "waiting": 1}, 20)
    assert second.use()["caller"]["commands"] == {"running": 1, "waiting": 1}
    second.open()
    first.open()
    batch = client.get(f"/v1/batches/{waiting}", params={"wait": 20}).json()
    assert batch["summary"]["succeeded"] == 1
    assert batch["calls"][0]["result"]["details"]["queuedMs"] > 0


# -- streams ----------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def following(server: ServerThread, batch: str) -> Iterator[None]:
    with server.client() as own, event_stream(own, "GET", f"/v1/batches/{batch}/events") as (response, events):
        assert response.status_code == 200
        next(events)
        yield


def test_streams_are_counted_by_batch_and_by_key(
    narrow: ServerThread, client: httpx2.Client, spaces: list[Workspace]
) -> None:
    told = client.get("/v1/limits").json()["streams"]
    assert (told["perBatch"], told["perKey"]) == (2, 3)
    one, other = spaces[0].hold(), spaces[1].hold()
    call = client.get(f"/v1/batches/{one}").json()["calls"][0]["id"]
    with following(narrow, one), following(narrow, one):
        for path in (f"/v1/batches/{one}/events", f"/v1/calls/{call}/output?follow=true"):
            refused = client.get(path)
            assert one in assert_problem(refused, "too_many_streams")["detail"]
            assert int(refused.headers["retry-after"]) >= 1
        # Without a stream there is nothing to count.
        assert client.head(f"/v1/batches/{one}/events").status_code == 200
        assert client.get(f"/v1/calls/{call}/output").status_code == 200
        with following(narrow, other):
            assert client.get("/v1/limits").json()["use"]["caller"]["streams"] == 3
            assert_problem(client.get(f"/v1/batches/{other}/events"), "too_many_streams")
            refused = spaces[2].post(READ, headers={"Accept": "text/event-stream"})
            assert_problem(refused, "too_many_streams")
            assert client.get(spaces[2].batches).json()["data"] == []
    eventually(lambda: client.get("/v1/limits").json()["use"]["caller"]["streams"] == 0)
    with following(narrow, one):
        pass


def test_a_stream_that_ends_or_never_begins_gives_its_slot_back(client: httpx2.Client, spaces: list[Workspace]) -> None:
    for _ in range(5):
        with event_stream(client, "POST", spaces[0].batches, json=READ) as (_, events):
            assert [event.type for event in events][-1] == "batch_end"
        refused = client.post(spaces[0].batches, content=b"{", headers={"Accept": "text/event-stream"})
        assert_problem(refused, "malformed_json")
        assert client.get(spaces[0].batches, headers={"Accept": "text/event-stream"}).status_code == 200
    batch = client.get(spaces[0].batches).json()["data"][0]["id"]
    for _ in range(5):
        assert client.get(f"/v1/batches/{batch}/events", params={"after": "99"}).status_code == 400
        assert client.get(f"/v1/batches/{batch}/events", params={"after": "4"}).status_code == 204
    assert client.get("/v1/limits").json()["use"]["caller"]["streams"] == 0


def close(connection: RawConnection) -> None:
    """Say goodbye."""
    connection._socket.close()


def reset(connection: RawConnection) -> None:
    """Go away with a reset, the way a process does that has unread data when it dies."""
    connection._socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    connection._socket.close()


def vanish(connection: RawConnection) -> None:
    """Go away without a word, as a machine does that loses its power."""
    try:
        connection._socket.setsockopt(socket.IPPROTO_TCP, 19, 1)  # TCP_REPAIR
    except PermissionError:
        pytest.skip("closing a connection without a FIN needs CAP_NET_ADMIN, which the tests do not have here")
    connection._socket.close()


@pytest.mark.parametrize("leave", [close, reset, vanish], ids=["close", "reset", "vanish"])
def test_the_slot_of_a_client_that_is_gone_is_free_again(
    narrow: ServerThread, client: httpx2.Client, spaces: list[Workspace], leave: Any
) -> None:
    """A batch that goes on printing, so that the service has something to send to whoever is no longer there."""
    command = "while [ ! -e gate ]; do echo on; sleep 0.05; done"
    batch = spaces[0].post({"calls": [{"name": "bash", "arguments": {"command": command}}]}).json()["id"]
    for _ in range(2):
        connection = RawConnection(narrow.url)
        connection.send_head("GET", f"/v1/batches/{batch}/events")
        assert connection.head()[0] == 200
        leave(connection)
    eventually(lambda: client.get("/v1/limits").json()["use"]["caller"]["streams"] == 0, 20)


# -- what is told is what holds ---------------------------------------------------------------------------------------


def test_sizes_hold_to_the_byte(client: httpx2.Client, spaces: list[Workspace]) -> None:
    told = client.get("/v1/limits").json()
    workspace = spaces[0]
    files = f"/v1/workspaces/{workspace.id}/files"
    size = told["files"]["uploadBytes"]
    assert size == 1000
    assert client.put(f"{files}/a", content=b"x" * size).status_code == 201
    assert_problem(client.put(f"{files}/a", content=b"x" * (size + 1)), "payload_too_large")

    longest = "n" * told["files"]["nameBytes"]
    assert client.put(f"{files}/{longest}", content=b"").status_code == 201
    assert_problem(client.put(f"{files}/{longest}n", content=b""), "invalid_path")

    calls = told["batches"]["calls"]
    many = {"calls": READ["calls"] * calls}
    assert workspace.post(many, params={"wait": 20}).status_code == 200
    assert_problem(workspace.post({"calls": READ["calls"] * (calls + 1)}), "invalid_request")

    room = told["batches"]["metadataBytes"] - len('{"m":""}')
    assert workspace.post({**READ, "metadata": {"m": "x" * room}}, params={"wait": 20}).status_code == 200
    assert_problem(workspace.post({**READ, "metadata": {"m": "x" * (room + 1)}}), "invalid_request")

    longest_time = told["batches"]["timeoutMs"]
    assert workspace.post({**READ, "timeoutMs": longest_time}, params={"wait": 20}).status_code == 200
    assert_problem(workspace.post({**READ, "timeoutMs": longest_time + 1}), "invalid_request")

    body = json.dumps({**READ, "metadata": {}}).encode()
    body += b" " * (told["requests"]["bodyBytes"] - len(body))
    assert client.post(workspace.batches, content=body, params={"wait": 20}).status_code == 200
    assert_problem(client.post(workspace.batches, content=body + b" "), "payload_too_large")

    page = told["requests"]["pageItems"]
    assert client.get("/v1/workspaces", params={"limit": page}).status_code == 200
    assert_problem(client.get("/v1/workspaces", params={"limit": page + 1}), "invalid_request")

    entries = told["files"]["treeEntries"]
    tree = f"/v1/workspaces/{workspace.id}/tree"
    assert client.get(tree, params={"limit": entries}).status_code == 200
    assert_problem(client.get(tree, params={"limit": entries + 1}), "invalid_request")

    for name, key in (("timeout", "timeoutMaxMs"), ("captureBytes", "captureMaxBytes")):
        most = told["commands"][key]
        answers = [
            client.post("/v1/workspaces", json={"options": {"bash": {name: value}}}) for value in (most, most + 1)
        ]
        assert [answer.status_code for answer in answers] == [201, 422]


def test_the_use_of_a_workspace_that_is_not_there_is_not_told(client: httpx2.Client) -> None:
    for workspace in ("nothing", "ws_00000000000000000000000000"):
        assert_problem(client.get("/v1/limits", params={"workspace": workspace}), "not_found")
