"""A page follows a batch with `EventSource` and a URL token through a network that breaks: no loss, no double, an end."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from app.domain.events import EventType
from tests.support.browser import MISSING, Browser, browser, page_of_another_origin, until
from tests.support.cutting_proxy import CuttingProxy
from tests.support.server import ServerThread, event_stream

pytestmark = [
    pytest.mark.skipif(bool(MISSING), reason=f"needs Debian's {' and '.join(MISSING)}"),
    pytest.mark.timeout(300),
]

FOLLOW = """
const [url, types] = arguments;
window.seen = {events: [], errors: 0, state: -1};
const source = new EventSource(url);
for (const type of types)
  source.addEventListener(type, (event) => window.seen.events.push([event.lastEventId, event.type, event.data]));
source.addEventListener("error", () => { window.seen.errors += 1; window.seen.state = source.readyState; });
"""
CLOSED = 2
# Behind the head of the answer, which a browser has to see whole, and wherever in the frames that happens to fall.
CUTS = (900, 1500, 1111, 1300)


@pytest.fixture(scope="module")
def driver(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    with browser(tmp_path_factory.mktemp("browser")) as opened:
        yield opened


def test_a_stream_that_is_cut_goes_on_where_it_was_and_stops_at_its_end(driver: Browser, tmp_path: Path) -> None:
    command = "for i in $(seq 60); do echo line $i; sleep 0.02; done; until test -e go; do sleep 0.05; done; echo last"
    calls = [{"name": "bash", "arguments": {"command": command}}, {"name": "ls"}]
    with (
        page_of_another_origin() as origin,
        ServerThread(tmp_path / "data", cors_origins=(origin,)) as server,
        server.client() as client,
        CuttingProxy(urlsplit(server.url).port or 0, b"/events?", CUTS) as proxy,
    ):
        workspace = client.post("/v1/workspaces", json={}).json()
        batch = client.post(f"/v1/workspaces/{workspace['id']}/batches", json={"calls": calls}).json()
        path = f"/v1/batches/{batch['id']}/events"
        made = client.post("/v1/url-tokens", json={"url": path}).json()
        driver.get(f"{origin}/")
        driver.execute_script(FOLLOW, proxy.url + made["url"], [*EventType])
        # Every cut has happened, and the batch still runs: what comes now is live.
        until(driver, f"window.seen.errors >= {len(CUTS)}")
        Path(workspace["root"], "go").touch()
        seen: dict[str, Any] = until(driver, f"window.seen.state === {CLOSED} && window.seen")
        with event_stream(client, "GET", path) as (_, events):
            stored = list(events)
    assert [int(number) for number, _, _ in seen["events"]] == list(range(1, len(stored) + 1))
    assert [kind for _, kind, _ in seen["events"]] == [event.type for event in stored]
    answers = [head.rpartition(" -> ")[2] for head in proxy.heads]
    assert [answer.split()[1] for answer in answers] == ["200"] * (len(CUTS) + 1) + ["204"]
    # A cut is an error each, the end of the stream is one, and so is the 204.
    assert seen["errors"] == len(CUTS) + 2
