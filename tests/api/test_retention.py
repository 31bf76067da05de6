"""Records that are old enough, over HTTP: 410 for output, then 404 for all; the setting does it by itself."""

from pathlib import Path
from typing import Any

import httpx2
import pytest

from app.domain.clock import now_ms
from app.domain.retention import RemovedCounts, RetentionPolicy
from app.services.retention import Retention
from tests.api.problems import assert_problem
from tests.support.server import ServerThread, event_stream, eventually

BODY = {"calls": [{"name": "bash", "arguments": {"command": "echo one; sleep 0.2; echo two"}}]}
DAY = 86_400


def remove(server: ServerThread, **policy: int) -> RemovedCounts:
    """Do what the job of a server with this policy would do in two days."""
    batches = server.services.batches
    job = Retention(
        storage=batches._storage,
        reads=batches._reads,
        records=batches._records,
        policy=RetentionPolicy(**policy),
        now=lambda: now_ms() + 2 * DAY * 1000,
    )
    removed: RemovedCounts = server.call(job.round())
    return removed


@pytest.fixture
def batch(client: httpx2.Client, batches: str) -> dict[str, Any]:
    made: dict[str, Any] = client.post(
        batches, json=BODY, params={"wait": "20"}, headers={"Idempotency-Key": "of-old"}
    ).json()
    assert made["status"] == "completed"
    return made


def test_output_that_was_removed_is_410_and_the_call_stays(
    server: ServerThread, client: httpx2.Client, batch: dict[str, Any]
) -> None:
    path = f"/v1/calls/{batch['calls'][0]['id']}"
    assert client.get(f"{path}/output").content == b"one\ntwo\n"
    assert remove(server, output_seconds=DAY).output_bytes >= 8
    for response in (
        client.get(f"{path}/output"),
        client.get(f"{path}/output", params={"follow": "true"}),
        client.get(f"{path}/output", headers={"Range": "bytes=0-1"}),
    ):
        assert_problem(response, "output_gone")
    assert client.head(f"{path}/output").status_code == 410
    assert client.get(path).json() == batch["calls"][0]
    with event_stream(client, "GET", f"/v1/batches/{batch['id']}/events") as (_, events):
        gap = next(event for event in events if event.type == "output_gap")
    assert (gap.data["seq"], gap.data["reason"]) == (gap.id, "retention")


def test_a_cursor_among_removed_updates_gets_one_resync_without_an_id(
    server: ServerThread, client: httpx2.Client, batch: dict[str, Any]
) -> None:
    path = f"/v1/batches/{batch['id']}/events"
    with event_stream(client, "GET", path) as (_, events):
        last = list(events)[-1].id
    assert remove(server, event_seconds=DAY).events >= 1
    text = client.get(path, headers={"Last-Event-ID": "2"}).text
    first, *rest = text.strip().split("\n\n")
    assert first.split("\n")[0] == "event: resync"
    assert "id:" not in first
    assert [block.split("\n")[0] for block in rest] == [f"id: {last - 1}", f"id: {last}"]
    assert client.get(path, headers={"Last-Event-ID": str(last)}).status_code == 204
    assert client.get(path, headers={"Last-Event-ID": str(last + 1)}).status_code == 400


def test_a_batch_that_was_removed_is_404_and_its_key_makes_another(
    server: ServerThread, client: httpx2.Client, workspace: dict[str, Any], batches: str, batch: dict[str, Any]
) -> None:
    assert remove(server, record_seconds=DAY).batches >= 1
    call_id = batch["calls"][0]["id"]
    for path in (
        f"/v1/batches/{batch['id']}",
        f"/v1/batches/{batch['id']}/events",
        f"/v1/calls/{call_id}",
        f"/v1/calls/{call_id}/output",
    ):
        assert_problem(client.get(path), "not_found")
    assert_problem(client.post(f"/v1/batches/{batch['id']}/cancel"), "not_found")
    assert client.get(batches).json()["data"] == []
    assert client.get("/v1/calls", params={"workspace": workspace["id"]}).json()["data"] == []
    again = client.post(batches, json=BODY, headers={"Idempotency-Key": "of-old"})
    assert (again.status_code, "idempotent-replayed" in again.headers) == (202, False)
    assert client.delete(f"/v1/workspaces/{workspace['id']}").status_code == 204
    assert remove(server, record_seconds=DAY).workspaces >= 1
    assert_problem(client.get(f"/v1/workspaces/{workspace['id']}"), "not_found")


def test_a_service_that_is_told_to_removes_by_itself(tmp_path: Path) -> None:
    with ServerThread(tmp_path / "data", retain_records=1) as server, server.client() as client:
        workspace = client.post("/v1/workspaces", json={}).json()["id"]
        batch = client.post(f"/v1/workspaces/{workspace}/batches", json=BODY, params={"wait": "20"}).json()
        path = f"/v1/batches/{batch['id']}"
        eventually(lambda: client.get(path).status_code == 404, 20)
        eventually(lambda: 'toolcrib_removed_total{what="batches"} 1.0' in client.get("/metrics").text, 20)
