"""URL tokens against a real server: as an EventSource and an image use them."""

import re
from pathlib import Path
from typing import Any
from urllib.parse import quote

import httpx2
import pytest

from app.domain.ids import new_id
from tests.api.problems import assert_problem
from tests.support.api_operations import operations
from tests.support.server import KEY, ServerProcess, ServerThread, event_stream

PIXEL = b"\x89PNG\r\n\x1a\n" + bytes(32)


@pytest.fixture(scope="module")
def browser(server: ServerThread) -> Any:
    """A client that has no key, as an `<img>` or an EventSource of another origin."""
    with server.client(key=None) as client:
        client.headers["Origin"] = "https://app.example"
        yield client


def token_url(client: httpx2.Client, url: str) -> str:
    response = client.post("/v1/url-tokens", json={"url": url})
    assert response.status_code == 201, response.text
    made: dict[str, str] = response.json()
    assert made.keys() == {"token", "url", "expiresAt"}
    assert made["url"] == f"{url}?token={made['token']}"
    return made["url"]


def test_an_event_source_follows_a_batch_and_goes_on_where_it_was_cut(
    client: httpx2.Client, browser: httpx2.Client, batches: str
) -> None:
    body = {"calls": [{"name": "bash", "arguments": {"command": "for i in 1 2 3; do echo $i; sleep 0.1; done"}}]}
    batch = client.post(batches, json=body).json()
    url = token_url(client, f"/v1/batches/{batch['id']}/events")
    with event_stream(browser, "GET", url) as (response, events):
        assert response.headers["cross-origin-resource-policy"] == "cross-origin"
        assert response.headers["referrer-policy"] == "no-referrer"
        first = next(events)
    with event_stream(browser, "GET", url, headers={"Last-Event-ID": str(first.id)}) as (_, events):
        rest = list(events)
    assert [event.id for event in (first, *rest)] == list(range(1, len(rest) + 2))
    assert rest[-1].type == "batch_end"
    assert browser.get(url, headers={"Last-Event-ID": str(rest[-1].id)}).status_code == 204
    with event_stream(browser, "GET", f"{url}&updates=none&after={first.id}") as (_, events):
        assert "tool_execution_update" not in {event.type for event in events}


def test_an_image_of_another_origin_is_shown(
    client: httpx2.Client, browser: httpx2.Client, workspace: dict[str, Any]
) -> None:
    name = "plots/größe 1+2&3%.png"
    path = f"/v1/workspaces/{workspace['id']}/files/{quote(name)}"
    assert client.put(path, content=PIXEL).status_code == 201
    assert client.get(path).headers["cross-origin-resource-policy"] == "same-origin"
    url = token_url(client, path)
    response = browser.get(url)
    assert (response.status_code, response.content) == (200, PIXEL)
    assert response.headers["cross-origin-resource-policy"] == "cross-origin"
    assert response.headers["content-type"] == "image/png"
    assert browser.head(url).headers["content-length"] == str(len(PIXEL))
    assert browser.get(url, headers={"Range": "bytes=0-3"}).content == PIXEL[:4]
    # However a client spells the same bytes.
    spelled = re.sub(r"%[0-9A-F]{2}", lambda part: part[0].lower(), url)
    assert spelled != url
    assert browser.get(spelled).content == PIXEL


def test_what_a_token_opens_is_what_the_document_says(
    client: httpx2.Client, browser: httpx2.Client, workspace: dict[str, Any], batches: str
) -> None:
    body = {"calls": [{"name": "bash", "arguments": {"command": "echo out"}}]}
    batch = client.post(batches, json=body, params={"wait": "20"}).json()
    ids = {
        "workspace_id": workspace["id"],
        "batch_id": batch["id"],
        "call_id": batch["calls"][0]["id"],
        "path": "task.txt",
        "tool": "read",
        "key_id": new_id("key"),
    }
    opened = set()
    for operation in operations(client.get("/openapi.json").json()):
        path = operation.path(ids)
        asked = client.post("/v1/url-tokens", json={"url": path})
        if {"urlToken": []} not in operation.security:
            if operation.method == "GET":
                assert_problem(asked, "invalid_request")
            continue
        assert operation.method in {"GET", "HEAD"}
        answer = operation.send(browser, ids, params={"token": asked.json()["token"]})
        assert answer.status_code == 200, operation.id
        opened.add(operation.id)
    assert {"getBatch", "getEvents", "headEvents", "getCall", "getOutput", "headOutput"} <= opened
    assert {"getFile", "headFile", "getArchive"} <= opened


def test_a_token_opens_nothing_but_its_path_and_only_to_look(
    client: httpx2.Client, browser: httpx2.Client, workspace: dict[str, Any]
) -> None:
    files = f"/v1/workspaces/{workspace['id']}/files"
    url = token_url(client, f"{files}/task.txt")
    token = url.partition("?token=")[2]
    assert browser.get(url).status_code == 200
    others = (f"{files}/b.txt", f"/v1/workspaces/{workspace['id']}", f"{files}/task.txt/", "/v1/tools", "/v1/calls")
    for path in others:
        answer = browser.get(path, params={"token": token})
        assert_problem(answer, "unauthorized")
        assert answer.headers["cross-origin-resource-policy"] == "same-origin"
    for method in ("PUT", "DELETE", "POST", "PATCH"):
        assert browser.request(method, url).status_code in {401, 405}
    assert client.get(f"{files}/task.txt").text == "status: draft"
    assert_problem(browser.get(f"{url}&token={token}"), "invalid_request")
    assert_problem(browser.get(f"{url}&x=1"), "invalid_request")
    for wrong in ("", "x", token[:-1], f"{token}x"):
        assert_problem(browser.get(f"{files}/task.txt", params={"token": wrong}), "unauthorized")
    # A header is looked at alone, whatever the token is.
    refused = browser.get(url, headers={"Authorization": "Bearer wrong"})
    assert_problem(refused, "unauthorized")
    unknown = client.get("/v1/tools", params={"token": token})
    assert assert_problem(unknown, "invalid_request")["errors"][0]["code"] == "unknown_parameter"


def test_a_token_is_made_by_who_may_read_what_it_opens(
    server: ServerThread, client: httpx2.Client, workspace: dict[str, Any], batches: str
) -> None:
    batch = client.post(batches, json={"calls": [{"name": "ls"}]}, params={"wait": "20"}).json()
    urls = (
        f"/v1/workspaces/{workspace['id']}/files/task.txt",
        f"/v1/workspaces/{workspace['id']}/archive",
        f"/v1/batches/{batch['id']}/events",
        f"/v1/calls/{batch['calls'][0]['id']}/output",
    )
    stranger = client.post("/v1/keys", json={"name": "stranger", "scopes": ["read"]}).json()["token"]
    writer = client.post("/v1/keys", json={"name": "writer", "scopes": ["write", "exec"]}).json()["token"]
    with server.client(stranger) as reading, server.client(writer) as writing:
        for url in urls:
            assert_problem(reading.post("/v1/url-tokens", json={"url": url}), "not_found")
            assert_problem(writing.post("/v1/url-tokens", json={"url": url}), "forbidden", scope="read")
    assert client.delete(f"/v1/workspaces/{workspace['id']}").status_code == 204
    assert_problem(client.post("/v1/url-tokens", json={"url": urls[0]}), "workspace_gone")


def test_a_token_ends_when_its_key_is_revoked(
    server: ServerThread, client: httpx2.Client, browser: httpx2.Client
) -> None:
    key = client.post("/v1/keys", json={"name": "short", "scopes": ["read", "write"]}).json()
    with server.client(key["token"]) as owner:
        workspace = owner.post("/v1/workspaces", json={"files": {"a.txt": "a"}}).json()
        url = token_url(owner, f"/v1/workspaces/{workspace['id']}/files/a.txt")
    assert browser.get(url).text == "a"
    assert client.delete(f"/v1/keys/{key['id']}").status_code == 204
    assert_problem(browser.get(url), "unauthorized")


@pytest.mark.parametrize(
    "url",
    [
        "",
        "/",
        "/healthz",
        "v1/batches/x",
        "http://127.0.0.1/v1/batches/x/events",
        "//evil.example/v1/batches/x",
        "/v1/batches/{batch}/events?after=1",
        "/v1/batches/{batch}/events#x",
        "/v1/batches/{batch}/events ",
        "/v1/batches/{batch}/events\n",
        "/v1/batches/{batch}/ev\u00e4nts",
        "/v1/batches/{batch}/%",
        "/v1/batches/{batch}/%zz",
        "/v1/batches/{batch}/",
        "/v1/batches/{batch}/cancel",
        "/v1/workspaces",
        "/v1/workspaces/{workspace}/batches",
        "/v1/keys",
        "/v1/calls",
        "/v1/" + "x" * 20_000,
        7,
        None,
        ["/v1/batches/x/events"],
    ],
)
def test_what_no_token_opens_is_refused(client: httpx2.Client, workspace: dict[str, Any], url: Any) -> None:
    if isinstance(url, str):
        url = url.replace("{batch}", new_id("batch")).replace("{workspace}", workspace["id"])
    problem = assert_problem(client.post("/v1/url-tokens", json={"url": url}), "invalid_request")
    assert problem["errors"][0]["pointer"] == "#/url"


@pytest.mark.parametrize("url", ["/v1/batches/x/events", "/v1/calls/%00/output", "/v1/workspaces/ws_%FF/files/a"])
def test_an_id_that_is_none_is_not_there(client: httpx2.Client, url: str) -> None:
    assert_problem(client.post("/v1/url-tokens", json={"url": url}), "not_found")


def test_a_page_of_a_listed_origin_may_use_a_token_and_a_restart_does_not_end_it(tmp_path: Path) -> None:
    with ServerThread(tmp_path / "data", cors_origins=("https://app.example",)) as server, server.client() as client:
        workspace = client.post("/v1/workspaces", json={"files": {"a.txt": "a"}}).json()
        url = token_url(client, f"/v1/workspaces/{workspace['id']}/files/a.txt")
        asked = {"Origin": "https://app.example", "Access-Control-Request-Method": "POST"}
        asked["Access-Control-Request-Headers"] = "authorization, content-type"
        assert client.options("/v1/url-tokens", headers=asked).status_code == 200
    with ServerThread(tmp_path / "data", cors_origins=("https://app.example",)) as server, server.client(None) as page:
        answer = page.get(url, headers={"Origin": "https://app.example"})
        assert (answer.status_code, answer.text) == (200, "a")
        assert answer.headers["access-control-allow-origin"] == "https://app.example"
        answer = page.get(url, headers={"Origin": "https://evil.example"})
        assert "access-control-allow-origin" not in answer.headers


def test_no_line_of_the_log_has_a_token(tmp_path: Path) -> None:
    with (
        ServerProcess(tmp_path / "data", {"TOOLCRIB_API_KEY": KEY, "TOOLCRIB_LOG_LEVEL": "debug"}) as server,
        server.client() as client,
    ):
        workspace = client.post("/v1/workspaces", json={"files": {"a.txt": "a"}}).json()
        url = token_url(client, f"/v1/workspaces/{workspace['id']}/files/a.txt")
        token = url.partition("=")[2]
        with server.client(key=None) as page:
            assert page.get(url).status_code == 200
            assert page.get(f"/v1/workspaces/{workspace['id']}", params={"token": token}).status_code == 401
            assert page.get(f"/nowhere?token={token}").status_code == 404
        key = client.post("/v1/keys", json={"name": "k", "scopes": ["read"]}).json()["token"]
        assert client.delete(f"/v1/workspaces/{workspace['id']}").status_code == 204
        server.stop()
        written = server.log()
    assert "/files/a.txt" in written
    assert token not in written
    assert token.rpartition(".")[2] not in written
    assert key not in written
