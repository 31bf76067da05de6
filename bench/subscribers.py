"""Many subscribers of live batches: does each get every event in order, and what does that cost the service?"""

import base64
import json
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from bench.http_client import encode_request
from bench.report import Figure
from bench.servers import API_KEY, Server, toolcrib

EVENTS_PER_SECOND = 10
BATCHES = {1: 0.35, 50: 0.60}
"""How many batches the subscribers share, and the part of a core that the service may take."""

_AUTHORIZATION = {"authorization": f"Bearer {API_KEY}"}
_ROOM = {
    "TOOLCRIB_COMMANDS": "100",
    "TOOLCRIB_COMMANDS_PER_WORKSPACE": "100",
    "TOOLCRIB_RUNNING_BATCHES": "100",
    "TOOLCRIB_RUNNING_BATCHES_PER_WORKSPACE": "100",
}
# Waits for the file `go`, then prints a line every tenth of a second; builtins alone, so that the machine has its cores
# for the service. `read` from a pipe that nobody writes to is a sleep without a process.
_COMMAND = (
    "mkfifo .t$$; exec 3<>.t$$; while [ ! -e go ]; do read -t 0.1 -u 3; done; "
    "for ((i = 0; i < {count}; i++)); do echo line $i; read -t {pause} -u 3; done; rm .t$$"
)


def subscribers(count: int, seconds: float, data_dir: Path) -> Iterator[Figure]:
    """Let `count` subscribers follow 1 and then 50 batches of `seconds`; the floor is the same batches without any."""
    for batches, aim in BATCHES.items():
        with toolcrib(data_dir / f"subscribers-{batches}", sandbox="process", settings=_ROOM) as service:
            floor, _, _ = _follow(service, batches, 0, max(1.0, seconds / 3))
            share, elapsed, seen = _follow(service, batches, count, seconds)
        events = round(seconds * EVENTS_PER_SECOND)
        # Start and end of batch and call, and at least all but a few of the lines: two may share an event.
        complete = seen["complete"] == seen["inOrder"] == count and seen["events"] >= count * (events * 0.8 + 4)
        each = seen["events"] / count / elapsed
        cost = (share - floor) * elapsed / seen["events"]
        yield Figure(
            f"{count} subscribers of {batches} {'batch' if batches == 1 else 'batches'}, {each:.1f} events/s each",
            f"{share:.0%} of a core, {seen['complete']} complete and {seen['inOrder']} in order",
            f"without any: {floor:.0%}",
            f"+{share - floor:.0%}, {cost * 1e6:.0f} µs an event",
            f"<= {aim:.0%} of a core, all complete",
            complete and share <= aim,
        )


def _follow(service: Server, batches: int, count: int, seconds: float) -> tuple[float, float, dict[str, Any]]:
    """Return the part of a core that the service took from the first line to the last end, how long, what was seen."""
    workspace = _post(service, "/v1/workspaces", {})
    command = _COMMAND.format(count=round(seconds * EVENTS_PER_SECOND), pause=1 / EVENTS_PER_SECOND)
    body = {"calls": [{"name": "bash", "arguments": {"command": command}}]}
    ids = [_post(service, f"/v1/workspaces/{workspace['id']}/batches", body)["id"] for _ in range(batches)]
    clients = _Clients(service, [ids[number % batches] for number in range(count)], seconds)
    clients.wait_until_ready()
    _wait_until_running(service, ids)
    began, before = time.perf_counter(), service.cpu_seconds()
    (Path(workspace["root"]) / "go").touch()
    seen = clients.result()
    for batch in ids:
        while not _get(service, f"/v1/batches/{batch}?wait=60")["finishedAt"]:
            pass
    elapsed = time.perf_counter() - began
    return (service.cpu_seconds() - before) / elapsed, elapsed, seen


def _wait_until_running(service: Server, ids: Sequence[str]) -> None:
    for batch in ids:
        while _get(service, f"/v1/batches/{batch}")["calls"][0]["status"] != "running":
            time.sleep(0.05)


class _Clients:
    """The process of the subscribers; without any there is none."""

    def __init__(self, service: Server, ids: Sequence[str], seconds: float) -> None:
        self._process: subprocess.Popen[str] | None = None
        if not ids:
            return
        events = {"accept": "text/event-stream", **_AUTHORIZATION}
        requests = [encode_request("GET", f"/v1/batches/{batch}/events", headers=events) for batch in ids]
        spec = {
            "port": service.port,
            "requests": [base64.b64encode(request).decode() for request in requests],
            "seconds": seconds * 3 + 60,
        }
        self._process = subprocess.Popen(
            [sys.executable, "-m", "bench.subscriber_load"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        assert self._process.stdin is not None
        with self._process.stdin as stdin:
            json.dump(spec, stdin)

    def wait_until_ready(self) -> None:
        if self._process is not None:
            assert self._process.stdout is not None
            line = self._process.stdout.readline()
            if line != "ready\n":
                raise RuntimeError(f"the subscribers did not come up: {line!r}")

    def result(self) -> dict[str, Any]:
        if self._process is None:
            return {}
        assert self._process.stdout is not None
        with self._process.stdout as stdout:
            seen: dict[str, Any] = json.loads(stdout.read())
        self._process.wait(30)
        return seen


def _get(service: Server, path: str) -> Any:
    return _send(urllib.request.Request(f"http://127.0.0.1:{service.port}{path}", headers=_AUTHORIZATION))


def _post(service: Server, path: str, body: dict[str, Any]) -> Any:
    data = json.dumps(body).encode()
    return _send(urllib.request.Request(f"http://127.0.0.1:{service.port}{path}", data, _AUTHORIZATION))


def _send(request: urllib.request.Request) -> Any:
    with urllib.request.urlopen(request, timeout=90) as answer:
        return json.load(answer)
