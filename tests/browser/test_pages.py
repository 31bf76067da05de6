"""What pages in a real browser see: the docs page, streams across origins, and files that must not become pages."""

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2
import pytest
from selenium.common.exceptions import WebDriverException

from tests.support.browser import (
    MISSING,
    Browser,
    browser,
    complaints,
    page_of_another_origin,
    requested,
    until,
)
from tests.support.series import scrape, value
from tests.support.server import KEY, ServerThread

pytestmark = [
    pytest.mark.skipif(bool(MISSING), reason=f"needs Debian's {' and '.join(MISSING)}"),
    pytest.mark.timeout(300),
]


@pytest.fixture(scope="module")
def driver(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    with browser(tmp_path_factory.mktemp("browser")) as opened:
        yield opened


@pytest.fixture(scope="module")
def origin() -> Iterator[str]:
    with page_of_another_origin() as url:
        yield url


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory, origin: str) -> Iterator[ServerThread]:
    with ServerThread(tmp_path_factory.mktemp("service") / "data", cors_origins=(origin,)) as running:
        yield running


@pytest.fixture(scope="module")
def client(server: ServerThread) -> Iterator[httpx2.Client]:
    with server.client() as opened:
        yield opened


def make_workspace(client: httpx2.Client, **files: str) -> dict[str, Any]:
    made: dict[str, Any] = client.post("/v1/workspaces", json={"files": files}).json()
    return made


def test_the_docs_page_shows_every_operation_and_asks_nobody_else(
    driver: Browser, server: ServerThread, client: httpx2.Client
) -> None:
    requested(driver)
    driver.get(f"{server.url}/docs#key={KEY}")
    paths = client.get("/openapi.json").json()["paths"]
    operations = [(method.upper(), path) for path, item in paths.items() for method in item]
    until(driver, "document.querySelectorAll('#operations section, #operations details').length > 0")
    text = until(driver, "document.getElementById('operations').textContent")
    assert [path for _, path in operations if path not in text] == []
    assert driver.execute_script("return document.getElementById('key').value") == KEY
    assert driver.execute_script("return location.hash") == ""
    urls = requested(driver)
    assert f"{server.url}/openapi.json" in urls
    assert [url for url in urls if not url.startswith((f"{server.url}/", "data:"))] == []
    assert complaints(driver) == []


STREAM = """
const [url, key, body] = arguments;
window.seen = {text: "", state: "open"};
fetch(url, {
  method: "POST",
  headers: {
    "Authorization": "Bearer " + key, "Accept": "text/event-stream", "Content-Type": "application/json",
    "Idempotency-Key": "from-a-page", "X-Request-ID": "asked-by-a-page",
  },
  body: JSON.stringify(body),
}).then(async (answer) => {
  window.seen.status = answer.status;
  window.seen.location = answer.headers.get("Location");
  window.seen.requestId = answer.headers.get("X-Request-ID");
  const reader = answer.body.getReader(), decoder = new TextDecoder();
  for (let part; !(part = await reader.read()).done;) window.seen.text += decoder.decode(part.value, {stream: true});
  window.seen.state = "done";
}).catch((error) => { window.seen.state = String(error); });
"""


def test_a_page_of_a_listed_origin_streams_with_a_bearer_key(
    driver: Browser, server: ServerThread, client: httpx2.Client, origin: str
) -> None:
    workspace = make_workspace(client)
    command = "echo one; until test -e go; do sleep 0.05; done; echo two"
    body = {"calls": [{"name": "bash", "arguments": {"command": command}}]}
    driver.get(f"{origin}/")
    driver.execute_script(STREAM, f"{server.url}/v1/workspaces/{workspace['id']}/batches", KEY, body)
    until(driver, r"window.seen.text.includes('one\\n')")
    # Only now can the command go on: what came so far was streamed.
    assert driver.execute_script("return window.seen.state") == "open"
    Path(workspace["root"], "go").touch()
    seen = until(driver, "window.seen.state !== 'open' && window.seen")
    assert (seen["state"], seen["status"], seen["requestId"]) == ("done", 200, "asked-by-a-page")
    assert "event: batch_end" in seen["text"]
    batch = client.get(seen["location"]).json()
    assert (batch["status"], batch["calls"][0]["requestId"]) == ("completed", "asked-by-a-page")


FETCH = """
const [url, key, method, headers, wanted, done] = arguments;
fetch(url, {method, headers: {"Authorization": "Bearer " + key, ...headers}, body: method === "PUT" ? "text" : undefined})
  .then(async (answer) => {
    await answer.text();
    done([answer.status, Object.fromEntries(wanted.map((name) => [name, answer.headers.get(name)]))]);
  }, (error) => done([String(error), {}]));
"""


def test_the_headers_that_clients_need_pass_both_ways(
    driver: Browser, server: ServerThread, client: httpx2.Client, origin: str
) -> None:
    workspace = make_workspace(client)
    base = f"{server.url}/v1/workspaces/{workspace['id']}"
    driver.get(f"{origin}/")

    def fetch(url: str, method: str = "GET", *wanted: str, **headers: str) -> Any:
        sent = {name.replace("_", "-"): text for name, text in headers.items()}
        return driver.execute_async_script(FETCH, url, KEY, method, sent, list(wanted))

    status, headers = fetch(f"{base}/files/a.txt", "PUT", "ETag", If_None_Match="*")
    assert (status, headers["ETag"]) == (201, client.head(f"{base}/files/a.txt").headers["etag"])
    assert fetch(f"{base}/files/a.txt", "PUT", If_None_Match="*")[0] == 412
    wanted = ("Content-Range", "Accept-Ranges")
    assert fetch(f"{base}/files/a.txt", "GET", *wanted, Range="bytes=1-2") == [
        206,
        {"Content-Range": "bytes 1-2/4", "Accept-Ranges": "bytes"},
    ]
    batch = client.post(f"{base}/tools/ls", json={}).json()["batchId"]
    assert fetch(f"{server.url}/v1/batches/{batch}/events", Last_Event_ID="2")[0] == 200
    assert fetch(f"{base}/files/a.txt", "DELETE")[0] == 204
    status, headers = fetch(f"{server.url}/v1/tools/nope", "GET", "X-Request-ID", X_Request_ID="mine")
    assert (status, headers) == (404, {"X-Request-ID": "mine"})


def test_a_page_of_another_origin_gets_nothing(driver: Browser, server: ServerThread) -> None:
    with page_of_another_origin() as stranger:
        driver.get(f"{stranger}/")
        refused, _ = driver.execute_async_script(FETCH, f"{server.url}/v1/tools", KEY, "GET", {}, [])
    assert refused == "TypeError: Failed to fetch"


SCRIPT = "document.title = 'ran'; new Image().src = '/healthz?canary'; fetch('/healthz?canary');"
HTML = f'<!doctype html><title>still</title><script>{SCRIPT}</script><img src=x onerror="{SCRIPT}">'
XHTML = f'<html xmlns="http://www.w3.org/1999/xhtml"><head><title>still</title><script>{SCRIPT}</script></head></html>'
SVG = f'<svg xmlns="http://www.w3.org/2000/svg" onload="{SCRIPT}"><script>{SCRIPT}</script></svg>'


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("evil.html", HTML),
        ("evil.htm", HTML),
        ("evil.xhtml", XHTML),
        ("evil.svg", SVG),
        ("evil.xml", XHTML),
        ("evil.txt", HTML),
        ("evil", HTML),
        ("evil.png", HTML),
        ("evil.json", HTML),
        ("evil.mhtml", HTML),
    ],
)
def test_an_uploaded_page_runs_nothing_in_our_origin(
    driver: Browser, server: ServerThread, client: httpx2.Client, name: str, content: str
) -> None:
    workspace = make_workspace(client, **{name: content})
    path = f"/v1/workspaces/{workspace['id']}/files/{name}"
    target = server.url + client.post("/v1/url-tokens", json={"url": path}).json()["url"]
    before = value(scrape(client), "toolcrib_http_requests_total", method="GET", route="/healthz", status="2xx")
    driver.get(f"{server.url}/docs")
    driver.execute_cdp_cmd("Browser.setDownloadBehavior", {"behavior": "deny"})
    requested(driver)
    with contextlib.suppress(WebDriverException):  # a navigation that turns out to be a download is aborted
        driver.get(target)
    # Scripts of a page have run when its navigation is over, and the images it asks for are in this list.
    urls = requested(driver)
    assert target in urls
    assert driver.title != "ran"
    assert not [url for url in urls if "canary" in url]
    after = value(scrape(client), "toolcrib_http_requests_total", method="GET", route="/healthz", status="2xx")
    assert after == before


def test_that_test_would_see_a_page_that_runs(driver: Browser) -> None:
    with page_of_another_origin(HTML) as url:
        requested(driver)
        driver.get(f"{url}/")
        until(driver, "document.title === 'ran'")
        assert [asked for asked in requested(driver) if "canary" in asked] != []
