"""Several processes on one Postgres: any of them answers, and what one leaves that dies the others bring to its end."""

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx2
import psycopg
import pytest

from app.domain.node import LEASE_SECONDS
from tests.support.cluster import Cluster, cluster
from tests.support.processes import living
from tests.support.server import KEY, ServerProcess, clean_environment, event_stream, eventually, parse_events

TERMINAL_SECONDS = 10.0
"""How long after the death of a process its batches may take to be terminal."""


@pytest.fixture
def processes(postgres_url: str, tmp_path: Path) -> Iterator[Cluster]:
    with cluster(postgres_url, tmp_path) as made:
        yield made


def make_workspace(client: httpx2.Client) -> str:
    made = client.post("/v1/workspaces")
    assert made.status_code == 201, made.text
    return str(made.json()["id"])


def submit(client: httpx2.Client, workspace: str, *commands: str, **fields: Any) -> str:
    calls = [{"name": "bash", "arguments": {"command": command}} for command in commands]
    answer = client.post(f"/v1/workspaces/{workspace}/batches", json={"calls": calls, **fields})
    assert answer.status_code == 202, answer.text
    return str(answer.json()["id"])


def until_output(client: httpx2.Client, batch: str) -> int:
    """Return the id of the first update of a batch, once it is there."""
    with event_stream(client, "GET", f"/v1/batches/{batch}/events") as (_, events):
        return next(event.id for event in events if event.type == "tool_execution_update")


def ended(client: httpx2.Client, batch: str, seconds: float = 60) -> dict[str, Any]:
    answer = client.get(f"/v1/batches/{batch}", params={"wait": seconds}).json()
    assert answer["finishedAt"] is not None, answer
    return dict(answer)


def test_two_api_processes_and_two_workers_are_one_service(processes: Cluster) -> None:
    workers = [processes.worker(name) for name in ("w1", "w2")]
    first, second = processes.api("a"), processes.api("b")
    with first.client() as ask, second.client() as other:
        wanted = {(worker.data_dir / "node").read_text().strip() for worker in workers}
        spaces: list[str] = []
        nodes: set[str] = set()
        # Where one is made is left to chance.
        while nodes != wanted:
            assert len(spaces) < 64
            spaces.append(make_workspace(ask))
            nodes.add(ask.get(f"/v1/workspaces/{spaces[-1]}").json()["nodeId"])

        # Posted to one, followed at the other, which lives on when the first is killed; then cancelled there.
        batch = submit(ask, spaces[0], "echo up; until [ -e go ]; do sleep 0.01; done; echo down; sleep 60")
        cut = until_output(other, batch)
        with event_stream(ask, "GET", f"/v1/batches/{batch}/events") as (_, events):
            seen = [next(events), next(events)]
            os.kill(first.process.pid, signal.SIGKILL)
            with pytest.raises(httpx2.TransportError):
                seen.extend(events)
        last = seen[-1].id
        assert last <= cut
        with event_stream(other, "GET", f"/v1/batches/{batch}/events", headers={"Last-Event-ID": str(last)}) as (
            _,
            events,
        ):
            assert other.put(f"/v1/workspaces/{spaces[0]}/files/go", content=b"").status_code == 201
            for event in events:
                seen.append(event)
                if any(part["text"] == "down\n" for part in event.data.get("delta", [])):
                    answer = other.post(f"/v1/batches/{batch}/cancel")
                    assert answer.status_code in {200, 202}, answer.text  # 200: it has ended already
        assert [event.id for event in seen] == list(range(1, len(seen) + 1))
        assert (seen[-1].type, seen[-1].data["status"]) == ("batch_end", "cancelled")
        assert ended(other, batch)["calls"][0]["result"]["details"]["stdout"] == "up\ndown\n"


def test_the_batches_of_a_killed_worker_are_terminal_within_seconds(processes: Cluster) -> None:
    worker, api = processes.worker("w"), processes.api("a")
    with api.client() as client:
        space = make_workspace(client)
        mark = f"mark-{os.getpid()}-{time.monotonic_ns()}"
        running = submit(client, space, f"echo up; sleep 600 # {mark}", "touch never")
        until_output(client, running)
        assert living(mark)
        os.kill(worker.process.pid, signal.SIGKILL)
        died = time.monotonic()
        done = ended(client, running, TERMINAL_SECONDS)
        assert time.monotonic() - died < TERMINAL_SECONDS
        assert done["status"] == "interrupted"
        assert [(call["status"], call["error"]["code"]) for call in done["calls"]] == [
            ("failed", "interrupted"),
            ("skipped", "interrupted"),
        ]
        assert "may have taken effect" in done["calls"][0]["result"]["content"][0]["text"]
        eventually(lambda: not living(mark), 10)
        worker.process.wait(20)

        # Nobody has the directory now: what needs it says so, what does not goes on.
        refused = client.post(f"/v1/workspaces/{space}/batches", json={"calls": [{"name": "ls", "arguments": {}}]})
        assert (refused.status_code, refused.json()["code"]) == (503, "owner_gone")
        assert refused.headers["retry-after"] == "5"
        assert client.get(f"/v1/workspaces/{space}/files/x").json()["code"] == "owner_gone"
        assert client.delete(f"/v1/workspaces/{space}").json()["code"] == "owner_gone"
        assert client.post("/v1/workspaces").json()["code"] == "owner_gone"
        assert parse_events(client.get(f"/v1/batches/{running}/events").text)[-1].type == "batch_end"

        worker.start()
        again = client.post(f"/v1/workspaces/{space}/tools/ls", json={})
        assert (again.status_code, again.json()["status"]) == (200, "succeeded")


def test_a_batch_that_had_not_begun_runs_on_another_process_of_its_node(processes: Cluster) -> None:
    # Two workers on one data directory: the one that is killed held a batch that waited for its turn.
    processes.environment["TOOLCRIB_RUNNING_BATCHES"] = "1"
    first = processes.worker("shared")
    api = processes.api("a")
    with api.client() as client:
        space = make_workspace(client)
        running = submit(client, space, "echo up; sleep 600")
        until_output(client, running)
        waiting = submit(client, space, "echo ran >> ran")
        eventually(lambda: holder(processes, waiting) is not None, 20)
        assert holder(processes, waiting) == holder(processes, running)
        second = processes.worker("shared")
        os.kill(first.process.pid, signal.SIGKILL)
        # The lock in the data directory says at once what the lease would say in 6 s.
        died = time.monotonic()
        assert ended(client, waiting, 30)["status"] == "completed"
        assert time.monotonic() - died < LEASE_SECONDS
        assert ended(client, running)["status"] == "interrupted"
        assert client.get(f"/v1/workspaces/{space}/files/ran").text == "ran\n"
        assert second.stop() == 0


def holder(processes: Cluster, batch: str) -> str | None:
    with psycopg.connect(processes.database_url) as connection:
        row = connection.execute("SELECT process_id FROM batches WHERE id = %s", (batch,)).fetchone()
    assert row is not None
    return None if row[0] is None else str(row[0])


def test_a_process_that_was_stopped_for_a_while_is_fenced_out(processes: Cluster) -> None:
    frozen, other = processes.both("a", "local"), processes.both("b", "local")
    with frozen.client() as client, other.client() as witness:
        space = make_workspace(client)
        mark = f"mark-{os.getpid()}-{time.monotonic_ns()}"
        batch = submit(client, space, f"echo up; sleep 600 # {mark}")
        until_output(client, batch)
        os.kill(frozen.process.pid, signal.SIGSTOP)
        try:
            assert ended(witness, batch, 20)["status"] == "interrupted"
            events = parse_events(witness.get(f"/v1/batches/{batch}/events").text)
        finally:
            os.kill(frozen.process.pid, signal.SIGCONT)
        # It finds that the batch is another's, and ends what it ran.
        eventually(lambda: not living(mark), 20)
        assert parse_events(client.get(f"/v1/batches/{batch}/events").text) == events
        assert [event.type for event in events][-2:] == ["tool_execution_end", "batch_end"]
        # It is a member again.
        eventually(lambda: ended(client, submit(client, space, "true"))["status"] == "completed", 20)


def test_local_processes_tell_whose_workspace_it_is(processes: Cluster) -> None:
    here, there = processes.both("a", "local"), processes.both("b", "local")
    with here.client() as client, there.client() as other:
        space = make_workspace(client)
        refused = other.post(f"/v1/workspaces/{space}/batches", json={"calls": [{"name": "ls", "arguments": {}}]})
        assert (refused.status_code, refused.json()["code"]) == (503, "owner_gone")
        assert "TOOLCRIB_BACKEND" in refused.json()["detail"]
        assert other.get(f"/v1/workspaces/{space}/files/x").json()["code"] == "owner_gone"
        # What is a matter of records alone works anywhere.
        batch = submit(client, space, "echo up; sleep 600")
        until_output(other, batch)
        assert other.post(f"/v1/batches/{batch}/cancel").status_code == 202
        assert ended(other, batch)["status"] == "cancelled"


def test_a_node_is_given_to_another_data_directory(processes: Cluster) -> None:
    old, api, new = processes.worker("old"), processes.api("a"), processes.worker("new")
    with api.client() as client:
        node = (old.data_dir / "node").read_text().strip()
        mine: list[str] = []
        for _ in range(64):
            space = make_workspace(client)
            if client.get(f"/v1/workspaces/{space}").json()["nodeId"] == node:
                mine.append(space)
            if len(mine) == 2:
                break
        assert mine
        for space in mine:
            assert client.put(f"/v1/workspaces/{space}/files/x", content=b"kept").status_code == 201
        assert old.stop() == 0
        assert new.stop() == 0
        for space in mine:
            (old.data_dir / "workspaces" / space).rename(new.data_dir / "workspaces" / space)
        environment = clean_environment(new.data_dir) | new.environment
        command = [sys.executable, "-m", "app", "db", "relocate", "--node", node]
        moved = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=60)
        assert moved.returncode == 0, moved.stderr
        assert f"the directories of {len(mine)} were taken for theirs" in moved.stdout
        new.start()
        listed = subprocess.run(
            [sys.executable, "-m", "app", "nodes"],
            env=environment, capture_output=True, text=True, check=True, timeout=60,
        ).stdout  # fmt: skip
        assert f"{node}: 0 open workspaces, no living processes" in listed
        assert f"worker {new.url}" in listed
        for space in mine:
            found = client.get(f"/v1/workspaces/{space}/files/x")
            assert (found.status_code, found.text) == (200, "kept")
            done = ended(client, submit(client, space, "cat x"))
            assert done["calls"][0]["result"]["content"][0]["text"] == "kept"


def test_eight_processes_that_start_at_once_on_an_empty_database_all_come_up(postgres_url: str, tmp_path: Path) -> None:
    with cluster(postgres_url, tmp_path) as made, ThreadPoolExecutor(8) as pool:
        starts = [made.api, made.worker, made.both, made.api] * 2
        started = list(pool.map(lambda numbered: numbered[1](f"p{numbered[0]}"), enumerate(starts)))
        for process in started:
            with process.client() as client:
                assert client.get("/readyz").status_code == 200
        with psycopg.connect(postgres_url) as connection:
            assert connection.execute("SELECT count(*) FROM alembic_version").fetchone() == (1,)
            assert connection.execute("SELECT count(*) FROM processes").fetchone() == (8,)
        with ThreadPoolExecutor(8) as stopping:
            assert set(stopping.map(lambda process: process.stop(), started)) == {0}
        with psycopg.connect(postgres_url) as connection:
            assert connection.execute("SELECT count(*) FROM processes").fetchone() == (0,)


def test_a_second_process_on_an_sqlite_directory_refuses_with_a_sentence(tmp_path: Path) -> None:
    with ServerProcess(tmp_path / "data", {"TOOLCRIB_API_KEY": KEY}):
        second = subprocess.run(
            [sys.executable, "-m", "app", "serve"],
            env=clean_environment(tmp_path / "data"), capture_output=True, text=True, check=False, timeout=60,
        )  # fmt: skip
    assert second.returncode == 2
    assert "another Toolcrib process" in second.stderr
    assert second.stderr.count("\n") == 1


def test_followers_of_a_batch_elsewhere_are_woken_and_do_not_poll(processes: Cluster) -> None:
    processes.worker("w")
    api = processes.api("a")
    with api.client() as client:
        space = make_workspace(client)
        batch = submit(client, space, "for i in $(seq 20); do echo $i; sleep 0.15; done")
        arrived: list[float] = []
        late: list[float] = []

        def follow() -> None:
            with api.client() as own, event_stream(own, "GET", f"/v1/batches/{batch}/events") as (_, events):
                for event in events:
                    if event.type == "tool_execution_update":
                        arrived.append(time.time())
                        late.append(time.time() - instant(event.data["at"]))

        followers = [threading.Thread(target=follow) for _ in range(3)]
        for follower in followers:
            follower.start()
        for follower in followers:
            follower.join(60)
        assert len(arrived) >= 30
        # With the poll of a second alone the median would be half a second.
        assert sorted(late)[len(late) // 2] < 0.25


def instant(text: str) -> float:
    return time.mktime(time.strptime(text[:19], "%Y-%m-%dT%H:%M:%S")) - time.timezone + float(text[19:23])
