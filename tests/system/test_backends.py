"""What a backend promises: the same of a process that runs its own batches and of one that hands them to a worker."""

import json
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx2
import pytest

from tests.support.server import Event, ServerThread, event_stream, parse_events

BACKENDS = ("sqlite", "postgres", "distributed")
WAIT = {"params": {"wait": 60}}


@dataclass
class Service:
    """`asked` are the processes that requests may go to, `runner` is the one whose directory has the workspaces."""

    asked: list[ServerThread]
    runner: ServerThread
    stack: ExitStack

    def client(self, number: int = 0) -> httpx2.Client:
        return self.stack.enter_context(self.asked[number % len(self.asked)].client())


@contextmanager
def service_of(kind: str, directory: Path, request: pytest.FixtureRequest, **settings: Any) -> Iterator[Service]:
    if kind != "sqlite":
        settings["database_url"] = request.getfixturevalue("postgres_url")
    with ExitStack() as stack:

        def start(name: str, **more: Any) -> ServerThread:
            return stack.enter_context(ServerThread(directory / name, **settings, **more))

        if kind == "distributed":
            runner = start("worker", role="worker", backend="distributed")
            asked = [start(name, role="api", backend="distributed") for name in ("first", "second")]
        else:
            runner = start("data")
            asked = [runner]
        yield Service(asked, runner, stack)


@pytest.fixture(params=BACKENDS)
def service(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Service]:
    """A service with room for one running batch in a workspace."""
    with service_of(request.param, tmp_path, request, running_batches_per_workspace=1) as made:
        yield made


class Space:
    """A workspace, and a command in it that runs until the test lets it go."""

    def __init__(self, service: Service, **fields: Any) -> None:
        self.client = service.client()
        self.other = service.client(1)
        made = self.client.post("/v1/workspaces", json=fields)
        assert made.status_code == 201, made.text
        self.id = made.json()["id"]
        self.node = made.json()["nodeId"]
        self.url = f"/v1/workspaces/{self.id}"

    def submit(self, *calls: dict[str, Any], **fields: Any) -> str:
        answer = self.client.post(f"{self.url}/batches", json={"calls": list(calls), **fields})
        assert answer.status_code == 202, answer.text
        batch: str = answer.json()["id"]
        return batch

    def hold(self) -> str:
        """Submit a batch that runs until `let_go`, and return once it does."""
        batch = self.submit(bash("echo up; until [ -e go ]; do sleep 0.01; done; echo released"))
        with event_stream(self.other, "GET", f"/v1/batches/{batch}/events") as (_, events):
            assert any(event.type == "tool_execution_update" for event in events)
        return batch

    def let_go(self) -> None:
        assert self.other.put(f"{self.url}/files/go", content=b"").status_code == 201

    def ended(self, batch: str) -> dict[str, Any]:
        answer = self.other.get(f"/v1/batches/{batch}", **WAIT).json()
        assert answer["finishedAt"] is not None, answer
        return dict(answer)

    def events(self, batch: str, after: int = 0) -> list[Event]:
        return parse_events(self.other.get(f"/v1/batches/{batch}/events", params={"after": after}).text)


@pytest.fixture
def space(service: Service) -> Space:
    return Space(service)


def bash(command: str, **arguments: Any) -> dict[str, Any]:
    return {"name": "bash", "arguments": {"command": command, **arguments}}


def statuses(batch: dict[str, Any]) -> list[tuple[str, str | None]]:
    return [(call["status"], call["error"] and call["error"]["code"]) for call in batch["calls"]]


def test_the_calls_of_a_batch_run_in_order_and_its_stream_is_whole(space: Space) -> None:
    batch = space.submit(
        {"name": "write", "arguments": {"path": "a.txt", "content": "one\n"}},
        {"name": "edit", "arguments": {"path": "a.txt", "edits": [{"oldText": "one", "newText": "two"}]}},
        bash("cat a.txt; exit 3"),
        {"name": "read", "arguments": {"path": "a.txt"}},
    )
    done = space.ended(batch)
    assert (done["status"], done["hasErrors"], done["effectiveMode"]) == ("completed", True, "sequential")
    assert statuses(done) == [
        ("succeeded", None),
        ("succeeded", None),
        ("failed", "non_zero_exit"),
        ("succeeded", None),
    ]
    assert done["calls"][2]["result"]["content"][0]["text"] == "two\n\nCommand exited with code 3"
    events = space.events(batch)
    assert [event.id for event in events] == list(range(1, len(events) + 1))
    assert (events[0].type, events[-1].type) == ("batch_start", "batch_end")
    assert space.events(batch, after=3) == events[3:]
    assert space.client.get(f"/v1/batches/{batch}/events", params={"after": events[-1].id}).status_code == 204
    call = done["calls"][2]["id"]
    assert space.other.get(f"/v1/calls/{call}/output").text == "two\n"


def test_what_a_command_prints_is_streamed_while_it_runs(space: Space) -> None:
    batch = space.hold()
    output: list[str] = []

    def follow() -> None:
        call = space.client.get(f"/v1/batches/{batch}").json()["calls"][0]["id"]
        output.append(space.client.get(f"/v1/calls/{call}/output", params={"follow": "true"}).text)

    follower = threading.Thread(target=follow)
    follower.start()
    space.let_go()
    follower.join(60)
    assert output == ["up\nreleased\n"]
    assert space.ended(batch)["status"] == "completed"


def test_a_running_batch_is_cancelled_and_keeps_what_it_printed(space: Space) -> None:
    batch = space.hold()
    assert space.client.post(f"/v1/batches/{batch}/cancel").status_code in {200, 202}
    done = space.ended(batch)
    assert (done["status"], statuses(done)) == ("cancelled", [("cancelled", "cancelled")])
    result = done["calls"][0]["result"]
    assert (result["details"]["aborted"], result["details"]["stdout"]) == (True, "up\n")
    assert space.other.post(f"/v1/batches/{batch}/cancel").status_code == 200


def test_a_batch_that_waits_is_cancelled_without_running(space: Space) -> None:
    running = space.hold()
    waiting = space.submit(bash("touch ran"))
    answer = space.client.post(f"/v1/batches/{waiting}/cancel")
    assert answer.status_code in {200, 202}
    done = space.ended(waiting)
    assert (done["status"], statuses(done)) == ("cancelled", [("cancelled", "cancelled")])
    assert [event.type for event in space.events(waiting)] == ["batch_start", "tool_execution_end", "batch_end"]
    space.let_go()
    assert space.ended(running)["status"] == "completed"
    assert space.client.get(f"{space.url}/files/ran").status_code == 404


def test_one_call_is_cancelled_and_the_others_go_on(space: Space) -> None:
    batch = space.submit(bash("echo up; sleep 60"), bash("echo after"))
    with event_stream(space.other, "GET", f"/v1/batches/{batch}/events") as (_, events):
        first = next(event for event in events if event.type == "tool_execution_update").data["callId"]
    assert space.client.post(f"/v1/calls/{first}/cancel").status_code in {200, 202}
    done = space.ended(batch)
    assert done["status"] == "completed"
    assert statuses(done) == [("cancelled", "cancelled"), ("succeeded", None)]


def test_batches_of_one_workspace_are_taken_up_in_the_order_they_came(space: Space) -> None:
    running = space.hold()
    waiting = [space.submit(bash(f"echo {number} >> order")) for number in range(5)]
    listed = space.other.get(f"{space.url}/batches", params={"status": "queued"}).json()["data"]
    assert [batch["id"] for batch in listed] == waiting[::-1]
    space.let_go()
    assert {space.ended(batch)["status"] for batch in (running, *waiting)} == {"completed"}
    assert space.client.get(f"{space.url}/files/order").text == "0\n1\n2\n3\n4\n"


def test_time_outs_and_stops_on_errors_hold(space: Space) -> None:
    late = space.submit(bash("sleep 60"), bash("echo never"), timeoutMs=200)
    failed = space.submit(bash("exit 1"), bash("echo never"), onError="stop")
    assert statuses(space.ended(late)) == [("failed", "timeout"), ("skipped", "skipped")]
    assert statuses(space.ended(failed)) == [("failed", "non_zero_exit"), ("skipped", "skipped")]


def test_a_wait_is_answered_when_the_batch_ends_and_the_short_cut_too(space: Space) -> None:
    calls = {"calls": [bash("echo done")]}
    waited = space.client.post(f"{space.url}/batches", json=calls, **WAIT)
    assert (waited.status_code, waited.json()["status"]) == (200, "completed")
    call = space.other.post(f"{space.url}/tools/bash", json={"command": "echo done"})
    assert (call.status_code, call.json()["result"]["content"][0]["text"]) == (200, "done")
    streamed = space.client.post(f"{space.url}/batches", json=calls, headers={"Accept": "text/event-stream"})
    assert [event.type for event in parse_events(streamed.text)][::4] == ["batch_start", "batch_end"]


def test_one_request_sent_many_times_at_once_runs_once(service: Service, space: Space) -> None:
    def send(number: int) -> str:
        answer = service.client(number).post(
            f"{space.url}/batches", json={"calls": [bash("echo x >> once")]}, headers={"Idempotency-Key": "k"}
        )
        assert answer.status_code in {200, 202}, answer.text
        return str(answer.json()["id"])

    with ThreadPoolExecutor(8) as pool:
        made = set(pool.map(send, range(16)))
    (batch,) = made
    assert space.ended(batch)["status"] == "completed"
    assert space.client.get(f"{space.url}/files/once").text == "x\n"


def test_files_and_archives_go_in_and_out(service: Service, space: Space) -> None:
    assert space.node == (service.runner.settings.data_dir / "node").read_text().strip()
    stored = space.client.put(f"{space.url}/files/d/a%20b.txt", content=b"x" * 300_000)
    assert (stored.status_code, stored.json()["path"]) == (201, "d/a b.txt")
    part = space.other.get(f"{space.url}/files/d/a%20b.txt", headers={"Range": "bytes=1-3"})
    assert (part.status_code, part.content, part.headers["content-range"]) == (206, b"xxx", "bytes 1-3/300000")
    assert part.headers.get_list("x-request-id") == [part.headers["x-request-id"]]
    refused = space.client.put(f"{space.url}/files/d/a%20b.txt", content=b"y", headers={"If-None-Match": "*"})
    assert (refused.status_code, refused.json()["code"]) == (412, "precondition_failed")
    form = {"files": ("two.txt", b"two", "text/plain")}
    assert space.client.post(f"{space.url}/files", files=form).status_code in {200, 201}
    tree = space.other.get(f"{space.url}/tree").json()
    assert [entry["path"] for entry in tree["data"]] == ["d", "d/a b.txt", "two.txt"]
    archive = space.client.get(f"{space.url}/archive", params={"format": "zip"})
    second = Space(service, name="second")
    unpacked = second.client.put(f"{second.url}/archive", params={"format": "zip"}, content=archive.content)
    assert unpacked.status_code == 200, unpacked.text
    assert second.other.get(f"{second.url}/files/two.txt").content == b"two"
    assert space.client.head(f"{space.url}/files/two.txt").headers["content-length"] == "3"
    assert space.client.delete(f"{space.url}/files/two.txt").status_code == 204
    assert space.other.get(f"{space.url}/files/two.txt").status_code == 404
    assert space.client.get(f"{space.url}/files/..%2f..%2fetc/passwd").status_code == 400


def test_deleting_a_workspace_stops_what_runs_and_what_waits(service: Service, space: Space) -> None:
    running, waiting = space.hold(), space.submit(bash("touch ran"))
    assert space.client.delete(space.url).status_code == 204
    assert [space.ended(batch)["status"] for batch in (running, waiting)] == ["cancelled", "cancelled"]
    assert space.other.get(space.url).json()["status"] == "deleted"
    gone = space.other.post(f"{space.url}/batches", json={"calls": [bash("true")]})
    assert (gone.status_code, gone.json()["code"]) == (410, "workspace_gone")
    assert space.other.get(f"{space.url}/files/go").status_code == 410
    assert not (service.runner.settings.data_dir / "workspaces" / space.id).exists()


def test_a_feed_tells_of_what_runs(space: Space) -> None:
    with space.other.stream("GET", f"{space.url}/events", headers={"Accept": "application/x-ndjson"}) as response:
        batch = space.submit(bash("true"))
        hints = (json.loads(line) for line in response.iter_lines() if line)
        assert next(hint for hint in hints if hint["status"] == "completed")["batchId"] == batch


@pytest.mark.parametrize("kind", BACKENDS)
def test_a_stop_interrupts_what_runs_and_streams_end_with_the_batch(
    request: pytest.FixtureRequest, tmp_path: Path, kind: str
) -> None:
    with service_of(kind, tmp_path, request) as service:
        space = Space(service)
        batch = space.hold()
        events: list[Event] = []

        def follow() -> None:
            with event_stream(space.other, "GET", f"/v1/batches/{batch}/events") as (_, stream):
                events.extend(stream)

        follower = threading.Thread(target=follow)
        follower.start()
        service.runner.call(drain_now(service.runner))
        follower.join(60)
        assert (events[-1].type, events[-1].data["status"]) == ("batch_end", "interrupted")


async def drain_now(server: ServerThread) -> None:
    await server.services.batches.drain(0)
