import json
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx2
import pytest
from starlette.types import Message, Receive, Scope, Send

from app.api.errors import KINDS
from app.api.middleware import FaultBarrier, RequestContext
from app.errors import AppError, ErrorCode
from tests.api.problems import assert_problem
from tests.support.server import KEY, ServerThread

DOCUMENTATION = Path(__file__).parents[2] / "docs" / "errors.md"
ONE_CALL = {"calls": [{"name": "read", "arguments": {"path": "task.txt"}}]}


def test_an_unknown_route_is_a_problem(client: httpx2.Client) -> None:
    assert_problem(client.get("/v1/nothing"), "not_found")
    assert_problem(client.get("/v1/workspaces/"), "not_found")


def test_a_method_that_is_not_there_is_told_those_that_are(client: httpx2.Client, workspace: dict[str, Any]) -> None:
    response = client.put(f"/v1/workspaces/{workspace['id']}")
    assert_problem(response, "method_not_allowed")
    assert response.headers["allow"] == "DELETE, GET, PATCH"
    response = client.delete("/v1/workspaces")
    assert response.headers["allow"] == "GET, POST"


@pytest.mark.parametrize(
    "path",
    ["/v1/workspaces/nonsense", "/v1/workspaces/ws_0", "/v1/batches/ws_01m8pk0mq7e71bgqe673033873", "/v1/calls/%00"],
)
def test_an_id_that_is_none_is_not_found(client: httpx2.Client, path: str) -> None:
    response = client.get(path)
    document = assert_problem(response, "not_found", instance=response.request.url.path)
    assert document["detail"].startswith("there is no ")


@pytest.mark.parametrize(
    "body", [b"", b"{", b'{"calls": [}', b"\xff\xfe", b"{'calls': []}", b'{"calls": []} x', b"\x00"]
)
def test_a_body_that_is_no_json_is_400(client: httpx2.Client, batches: str, body: bytes) -> None:
    assert_problem(client.post(batches, content=body), "malformed_json")


@pytest.mark.parametrize(
    "argument",
    ['"\\ud800"', '"x\\udc00y"', "NaN", "Infinity", "-Infinity", "18446744073709551616", "1e999", "[" * 70 + "]" * 70],
)
def test_a_json_value_nothing_can_store_is_422_and_nothing_is_stored(
    client: httpx2.Client, batches: str, argument: str
) -> None:
    body = '{"calls": [{"name": "read", "arguments": {"path": "task.txt", "x": VALUE}}]}'.replace("VALUE", argument)
    document = assert_problem(client.post(batches, content=body), "invalid_request")
    assert [error["pointer"] for error in document["errors"]] == ["#"]
    assert client.get(batches).json() == {"data": [], "nextCursor": None}


def test_a_body_is_json_whatever_its_content_type_says(client: httpx2.Client, batches: str) -> None:
    for kind in ("application/x-www-form-urlencoded", "text/plain", "application/json", "nonsense"):
        response = client.post(batches, content=json.dumps(ONE_CALL), headers={"Content-Type": kind})
        assert response.status_code == 202


def test_a_compressed_body_is_415(client: httpx2.Client, batches: str) -> None:
    response = client.post(batches, content=b"\x1f\x8b", headers={"Content-Encoding": "gzip"})
    assert_problem(response, "unsupported_media_type")


def test_a_body_over_16_mib_is_413(client: httpx2.Client, batches: str) -> None:
    assert_problem(client.post(batches, content=b" " * (16 * 1024 * 1024 + 1)), "payload_too_large")
    assert client.get(batches).json()["data"] == []


def test_a_body_that_does_not_say_how_long_it_is_is_counted(client: httpx2.Client, batches: str) -> None:
    def chunks() -> Iterator[bytes]:
        for _ in range(17):
            yield b" " * 1024 * 1024

    assert_problem(client.post(batches, content=chunks()), "payload_too_large")


def test_a_body_of_16_mib_is_taken(client: httpx2.Client, batches: str) -> None:
    text = json.dumps({"calls": [{"name": "read", "arguments": {"path": "x" * 8_000_000}}], "metadata": {}})
    response = client.post(batches, content=text + " " * (16 * 1024 * 1024 - len(text)), params={"wait": "20"})
    assert response.status_code == 200
    [call] = response.json()["calls"]
    assert call["status"] == "failed"
    # Eight million bytes of arguments are more than an answer inlines.
    assert (call["arguments"], call["argsTruncated"], call["argsUrl"]) == (None, True, f"/v1/calls/{call['id']}")
    assert len(client.get(call["argsUrl"]).json()["arguments"]["path"]) == 8_000_000


def test_a_body_cut_short_by_its_client_breaks_nothing(
    server: ServerThread, client: httpx2.Client, batches: str
) -> None:
    address = urlsplit(server.url)
    with socket.create_connection((str(address.hostname), int(address.port or 0))) as connection:
        head = f"POST {batches} HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {KEY}\r\nContent-Length: 1000\r\n\r\n"
        connection.sendall(head.encode() + b'{"calls": [')
    assert client.get(batches).json()["data"] == []


def test_every_response_has_a_request_id_and_the_callers_own_is_taken_over(client: httpx2.Client, batches: str) -> None:
    mine = "Trace_1.2-3"
    for response in (
        client.get("/healthz", headers={"X-Request-ID": mine}),
        client.get("/nowhere", headers={"X-Request-ID": mine}),
        client.post(batches, json=ONE_CALL, headers={"X-Request-ID": mine}),
        client.post(batches, content="{", headers={"X-Request-ID": mine}),
    ):
        assert response.headers["x-request-id"] == mine
    [batch] = client.get(batches).json()["data"]
    assert batch["requestId"] == mine
    [call] = client.get(f"/v1/batches/{batch['id']}", params={"wait": "10"}).json()["calls"]
    assert call["requestId"] == mine


@pytest.mark.parametrize("theirs", ["", "two words", "x" * 65, "a/b", "é"])
def test_a_request_id_that_does_not_fit_is_replaced(client: httpx2.Client, theirs: str) -> None:
    response = client.get("/healthz", headers={"X-Request-ID": theirs.encode()})
    assert response.headers["x-request-id"].startswith("req_")


def test_every_response_has_the_security_headers(client: httpx2.Client, batches: str) -> None:
    for response in (client.get("/healthz"), client.get("/nowhere"), client.post(batches, json=ONE_CALL)):
        assert response.headers["x-content-type-options"] == "nosniff"
        assert response.headers["content-security-policy"] == "default-src 'none'; frame-ancestors 'none'"
        assert response.headers["referrer-policy"] == "no-referrer"
        assert response.headers["cache-control"] == "no-store"


@pytest.mark.anyio
async def test_a_bug_is_a_500_without_traceback() -> None:
    async def broken(_scope: Scope, _receive: Receive, _send: Send) -> None:
        raise RuntimeError("secret detail")

    sent: list[Message] = []

    async def send(message: Message) -> None:
        sent.append(message)

    async def receive() -> Message:
        return {"type": "http.request", "body": b"", "more_body": False}

    scope: Scope = {"type": "http", "method": "GET", "path": "/v1/x", "headers": [(b"x-request-id", b"mine")]}
    await RequestContext(FaultBarrier(broken))(scope, receive, send)
    start, body = sent
    assert start["status"] == 500
    assert (b"x-request-id", b"mine") in start["headers"]
    document = json.loads(body["body"])
    assert (document["code"], document["requestId"]) == ("internal", "mine")
    assert "secret" not in body["body"].decode()


def _codes_in(text: str) -> list[str]:
    return [line.split("`")[1] for line in text.splitlines() if line.startswith("| `")]


def test_the_documentation_lists_every_code_with_its_status() -> None:
    problems, _, calls = DOCUMENTATION.read_text().partition("## Codes of calls")
    assert _codes_in(problems) == list(KINDS)
    for line in problems.splitlines():
        if line.startswith("| `"):
            _, code, status, _, _ = line.split("|")
            assert int(status) == KINDS[code.strip().strip("`")].status
    assert _codes_in(calls) == [code.value for code in ErrorCode]


def test_every_error_of_the_application_has_a_status() -> None:
    def below(kind: type[AppError]) -> Iterator[type[AppError]]:
        for child in kind.__subclasses__():
            yield child
            yield from below(child)

    assert {kind.code for kind in below(AppError)} <= set(KINDS)
