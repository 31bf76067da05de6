"""`/metrics` counts what happens, under labels of which there is an end."""

from collections.abc import Callable
from typing import Any

import httpx2
import pytest

from app.domain.audit import SERVICE
from app.services.keys import KeyRequest
from app.telemetry.metrics import Metrics
from app.tools.registry import all_tool_names
from tests.api.problems import assert_problem
from tests.support.raw_http import RawConnection
from tests.support.series import scrape, value
from tests.support.server import ServerThread, event_stream, eventually

TOOLS = {*all_tool_names, "other"}


def test_it_needs_a_key_with_the_scope_admin(server: ServerThread, client: httpx2.Client) -> None:
    with server.client(None) as stranger:
        assert_problem(stranger.get("/metrics"), "unauthorized")
    asked = KeyRequest("not for operators", ("read", "write", "exec"))
    _, token = server.call(server.services.keys.create(asked, by=SERVICE))
    with server.client(token) as caller:
        document = assert_problem(caller.get("/metrics"), "forbidden")
        assert "admin" in document["detail"]
    assert client.get("/metrics").status_code == 200


def test_calls_and_batches_are_counted_when_they_end(client: httpx2.Client, batches: str) -> None:
    before = scrape(client)
    calls = [
        {"name": "read", "arguments": {"path": "task.txt"}},
        {"name": "read", "arguments": {"path": "missing"}},
        {"name": "no such tool"},
    ]
    client.post(batches, json={"calls": calls}, params={"wait": "20"})
    after = scrape(client)

    def grown(name: str, **labels: str) -> float:
        return value(after, name, **labels) - value(before, name, **labels)

    assert grown("toolcrib_calls_total", tool="read", status="succeeded") == 1
    assert grown("toolcrib_calls_total", tool="read", status="failed") == 1
    assert grown("toolcrib_calls_total", tool="other", status="failed") == 1
    assert grown("toolcrib_call_seconds_count", tool="read") == 2
    assert grown("toolcrib_batches_total", status="completed") == 1
    assert grown("toolcrib_batch_queue_seconds_count") == 1
    assert grown("toolcrib_writes_total") >= grown("toolcrib_commit_seconds_count") >= 1
    route = "/v1/workspaces/{workspace_id}/batches"
    assert grown("toolcrib_http_requests_total", method="POST", route=route, status="2xx") == 1
    assert grown("toolcrib_http_first_byte_seconds_count", route=route) == 1


def test_commands_are_counted_while_they_run_and_by_why_they_were_ended(client: httpx2.Client, batches: str) -> None:
    before = scrape(client)
    calls = [{"name": "bash", "arguments": {"command": "echo up; sleep 60"}}]
    batch = client.post(batches, json={"calls": calls}).json()
    path = f"/v1/batches/{batch['id']}"
    with event_stream(client, "GET", f"{path}/events") as (_, events):
        next(event for event in events if event.type == "tool_execution_update")
        during = scrape(client)
        assert value(during, "toolcrib_commands_running") == 1
        assert value(during, "toolcrib_batches_running") == 1
        assert value(during, "toolcrib_command_slots_taken") == 1
        assert value(during, "toolcrib_event_followers") == 1
        assert value(during, "toolcrib_streams_open") == 1
        client.post(f"{path}/cancel")
        assert [event.type for event in events][-1] == "batch_end"
    calls = [{"name": "bash", "arguments": {"command": "sleep 60", "timeout": 20}}]
    client.post(batches, json={"calls": calls}, params={"wait": "20"})
    eventually(lambda: value(scrape(client), "toolcrib_event_followers") == 0)
    after = scrape(client)
    for reason, count in (("cancelled", 1), ("timeout", 1), ("interrupted", 0)):
        name = "toolcrib_commands_killed_total"
        assert value(after, name, reason=reason) - value(before, name, reason=reason) == count
    for name in ("toolcrib_commands_running", "toolcrib_command_slots_taken", "toolcrib_streams_open"):
        assert value(after, name) == 0
    assert value(after, "toolcrib_calls_total", tool="bash", status="cancelled") >= 1


def test_output_that_is_cut_off_is_counted(
    client: httpx2.Client, make_workspace: Callable[..., dict[str, Any]]
) -> None:
    before = value(scrape(client), "toolcrib_output_gaps_total")
    workspace = make_workspace(options={"bash": {"captureBytes": 10}})
    client.post(f"/v1/workspaces/{workspace['id']}/tools/bash", json={"command": "seq 100"})
    assert value(scrape(client), "toolcrib_output_gaps_total") == before + 1


def test_it_says_what_this_service_is(client: httpx2.Client) -> None:
    series = scrape(client)
    version = client.get("/version").json()
    labels = {name: version[name] for name in ("version", "python", "database")}
    assert value(series, "toolcrib_build_info", **labels) == 1
    assert value(series, "toolcrib_sandbox_info", tier=version["sandbox"]["tier"]) == 1
    missing = {sample.labels["what"] for sample in series if sample.name == "toolcrib_sandbox_missing"}
    assert missing == set(version["sandbox"]["missing"])
    assert value(series, "process_resident_memory_bytes") > 0


def test_no_label_takes_what_a_caller_makes_up(
    server: ServerThread, client: httpx2.Client, workspace: dict[str, Any], batches: str
) -> None:
    made_up = "zzmadeupzz"
    for number in range(20):
        odd = f"{made_up}{number}"
        client.get(f"/{odd}")
        client.get(f"/v1/batches/{odd}")
        client.get(f"/v1/tools/{odd}")
        client.get(f"/v1/workspaces/{workspace['id']}/files/{odd}/{odd}")
        client.post(f"/v1/workspaces/{workspace['id']}/tools/{odd}", json={})
        client.request(odd.upper(), f"/v1/tools/{odd}")
        client.request("PROPFIND", f"/v1/workspaces/{odd}")
        client.get("/v1/calls", params={odd: odd}, headers={"X-Request-ID": odd, "User-Agent": odd})
        client.post(batches, json={"calls": [{"name": odd, "id": odd}], "metadata": {odd: odd}}, params={"wait": "20"})
    with RawConnection(server.url) as connection:
        connection.send_head("GET", f"/%ff{made_up}%fe")
        assert connection.answer().status == 404
    series = scrape(client)
    allowed = {
        "tool": TOOLS,
        "status": {"succeeded", "failed", "cancelled", "skipped", "completed", "interrupted"}
        | {"2xx", "3xx", "4xx", "5xx", "none"},
        "method": {"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS", "other"},
        "reason": {"timeout", "cancelled", "interrupted"},
        "route": {*client.get("/openapi.json").json()["paths"], "none", "/", "/docs", "/openapi.json"}
        | {"/docs/docs.css", "/docs/docs.js"},
    }
    for sample in series:
        assert made_up not in str(sample.labels).lower()
        for label, text in sample.labels.items():
            if label in allowed:
                assert text.replace("{path:path}", "{path}") in allowed[label], sample
            else:
                assert label in {"le", "tier", "what", "version", "python", "database"}, sample
    assert len(series) < 3000


def test_applications_in_one_process_count_apart() -> None:
    first, second = Metrics(["read"]), Metrics(["read"])
    first.http_answered("GET", "/docs", 200, 0.1)
    assert first.registry.get_sample_value("toolcrib_http_first_byte_seconds_count", {"route": "/docs"}) == 1
    assert second.registry.get_sample_value("toolcrib_http_first_byte_seconds_count", {"route": "/docs"}) is None


@pytest.mark.parametrize("status", [0, 200, 503])
def test_a_request_that_got_no_answer_is_counted_too(status: int) -> None:
    metrics = Metrics([])
    metrics.http_answered("GET", "/docs", status, 0.1)
    labels = {"method": "GET", "route": "/docs", "status": {0: "none", 200: "2xx", 503: "5xx"}[status]}
    assert metrics.registry.get_sample_value("toolcrib_http_requests_total", labels) == 1
