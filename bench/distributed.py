"""Several processes on one Postgres: what it costs that a batch is accepted by one and run by another."""

import json
import statistics
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import psycopg

from bench.http_client import encode_request
from bench.loading import Load, load
from bench.report import Figure
from bench.servers import API_KEY, Server, toolcrib
from tests.support.postgres import PostgresServer

CLIENTS = 16
WORKERS = (1, 2, 4)
RESULT_AIM_MS = 15
EVENT_AIM_MS = 10

_AUTHORIZATION = {"authorization": f"Bearer {API_KEY}"}
_API = {"TOOLCRIB_ROLE": "api", "TOOLCRIB_BACKEND": "distributed"}

# A process that tells every 20 ms with a row when it stored it, as another process tells of events.
_TELLER = """
import sys, time, psycopg
with psycopg.connect(sys.argv[1]) as connection:
    for number in range(int(sys.argv[2])):
        time.sleep(0.02)
        connection.execute("INSERT INTO floor VALUES (%s, %s)", (number, time.time()))
        connection.execute("SELECT pg_notify('floor', %s)", (str(number),))
        connection.commit()
"""


def distributed(rounds: int, seconds: float, repeats: int, data_dir: Path) -> Iterator[Figure]:
    """Measure a batch's way to a worker and back, batches per second with several workers, and events on their way."""
    with PostgresServer(directory=data_dir, durable=True) as postgres, ExitStack() as stack:

        def start(name: str, settings: dict[str, str] | None = None, command: str = "serve") -> Server:
            return stack.enter_context(
                toolcrib(data_dir / name, database_url=postgres.url, settings=settings, command=command)
            )

        alone = start("alone", {"TOOLCRIB_BACKEND": "distributed"})
        local = _workspace(alone)
        api = start("api", _API)
        workers = [start("worker-0", command="worker")]
        spaces = _workspaces(api, workers, data_dir)

        at_home, away = [], []
        for _ in range(rounds + 1):
            at_home.append(load(alone, _read(local), '"succeeded"', 1, seconds))
            away.append(load(api, _read(spaces[0]), '"succeeded"', 1, seconds))
        there, here = _p50(away[1:]), _p50(at_home[1:])
        yield Figure(
            "read accepted by one process and run by another, 1 client",
            f"{there:.1f} ms",
            f"the same accepted where it runs: {here:.1f} ms",
            f"{there / here:.2f}x",
            f"<= {RESULT_AIM_MS} ms",
            there <= RESULT_AIM_MS,
        )
        told = _told_by_notify(postgres.url, max(20, repeats * 10))
        late = [_event_ms(api, spaces[0]) for _ in range(repeats)]
        event = statistics.median(late)
        yield Figure(
            f"event of a command on its way to a follower at another process, p50 of {repeats}",
            f"{event:.1f} ms (highest {max(late):.1f})",
            f"row, NOTIFY, read: {told:.2f} ms",
            f"{event / told:.1f}x",
            f"<= {EVENT_AIM_MS} ms",
            event <= EVENT_AIM_MS,
        )
        lone = statistics.median(load(alone, _read(local), '"succeeded"', CLIENTS, seconds).rate for _ in range(rounds))
        for count in WORKERS:
            while len(workers) < count:
                workers.append(start(f"worker-{len(workers)}", command="worker"))
            spaces = _workspaces(api, workers, data_dir)
            rate = statistics.median(_rate(api, spaces, seconds) for _ in range(rounds))
            yield Figure(
                f"batches of one read through 1 API process and {count} worker{'s' if count > 1 else ''}",
                f"{rate:.0f}/s",
                f"one process that does both: {lone:.0f}/s",
                f"{rate / lone:.2f}x",
                "",
            )


def _rate(api: Server, spaces: Sequence[str], seconds: float) -> float:
    clients = CLIENTS // len(spaces)
    with ThreadPoolExecutor(len(spaces)) as pool:
        loads = pool.map(lambda space: load(api, _read(space), '"succeeded"', clients, seconds), spaces)
        return sum(one.rate for one in loads)


def _p50(loads: Sequence[Load]) -> float:
    return statistics.median(latency for one in loads for latency in one.latencies_ms)


def _read(workspace: str) -> bytes:
    return encode_request("POST", f"/v1/workspaces/{workspace}/tools/read", {"path": "a.txt"}, _AUTHORIZATION)


def _workspace(server: Server) -> str:
    made: str = _post(server, "/v1/workspaces", {"files": {"a.txt": "status: draft\n"}})["id"]
    return made


def _workspaces(api: Server, workers: Sequence[Server], data_dir: Path) -> list[str]:
    """Return a workspace of each worker; where a new one is made is left to chance."""
    wanted = [(data_dir / f"worker-{number}" / "node").read_text().strip() for number in range(len(workers))]
    found: dict[str, str] = {}
    while not set(wanted) <= found.keys():
        made = _post(api, "/v1/workspaces", {"files": {"a.txt": "status: draft\n"}})
        found[made["nodeId"]] = made["id"]
    return [found[node] for node in wanted]


def _event_ms(api: Server, workspace: str) -> float:
    """Return how long an echo takes to reach a follower; the command prints the time of its echo."""
    command = "sleep 0.3; echo $EPOCHREALTIME"
    body = {"calls": [{"name": "bash", "arguments": {"command": command}}]}
    request = urllib.request.Request(
        f"http://127.0.0.1:{api.port}/v1/workspaces/{workspace}/batches",
        json.dumps(body).encode(),
        {**_AUTHORIZATION, "accept": "application/x-ndjson"},
    )
    with urllib.request.urlopen(request, timeout=60) as answer:
        for line in answer:
            arrived = time.time()
            event = json.loads(line)
            if event["type"] == "tool_execution_update":
                return (arrived - float(event["delta"][0]["text"])) * 1000
    raise RuntimeError("the command printed nothing")


def _told_by_notify(url: str, count: int) -> float:
    """Return the median of the milliseconds from before a row is stored until another connection has read it."""
    late = []
    with psycopg.connect(url, autocommit=True) as connection, psycopg.connect(url, autocommit=True) as reader:
        connection.execute("CREATE TABLE floor (number int PRIMARY KEY, at float8)")
        connection.execute("LISTEN floor")
        teller = subprocess.Popen([sys.executable, "-c", _TELLER, url, str(count)])
        for told in connection.notifies(timeout=60, stop_after=count):
            row = reader.execute("SELECT at FROM floor WHERE number = %s", (int(told.payload),)).fetchone()
            if row is not None:
                late.append((time.time() - row[0]) * 1000)
        teller.wait(60)
        connection.execute("DROP TABLE floor")
    return statistics.median(late)


def _post(service: Server, path: str, body: dict[str, Any]) -> Any:
    data = json.dumps(body).encode()
    request = urllib.request.Request(f"http://127.0.0.1:{service.port}{path}", data, _AUTHORIZATION)
    with urllib.request.urlopen(request, timeout=90) as answer:
        return json.load(answer)
