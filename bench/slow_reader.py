"""A follower that never reads, beside others that do, while a command prints: what it costs the service."""

import json
import re
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

from bench.report import Figure
from bench.servers import API_KEY, Server, toolcrib

AIM_BYTES = 16_000_000
READERS = 2
# What fills the cache of the connection that writes, which is there with or without followers.
WARM_BYTES = 100_000_000
_SECONDS = 900
_ID = re.compile(rb"^id: (\d+)\n", re.MULTILINE)


def slow_reader(size: int, data_dir: Path) -> Iterator[Figure]:
    """Follow a command that prints `size` bytes, all of them captured, by a client that never reads and two that do."""
    with toolcrib(data_dir / "slow-reader") as service:
        options = {"bash": {"captureBytes": size}}
        workspace = _post(service, "/v1/workspaces", {"options": options})["id"]
        _run(service, workspace, min(size, WARM_BYTES))
        service.reset_peak()
        before = service.memory_bytes()
        started = time.perf_counter()
        readers = _run(service, workspace, size)
        elapsed = time.perf_counter() - started
        growth = service.peak_memory_bytes() - before
    lost = [reader for reader in readers if not reader.whole]
    if lost:
        raise RuntimeError(f"{len(lost)} of {len(readers)} readers lost something: {lost[0].problem}")
    yield Figure(
        f"memory for a follower that never reads {size // 10**6} MB, {len(readers)} others read",
        f"+{growth / 10**6:.1f} MB in {elapsed:.1f} s",
        f"the service before: {before / 10**6:.0f} MB",
        f"the others got all of {readers[0].last} events",
        f"< {AIM_BYTES // 10**6} MB",
        growth < AIM_BYTES,
    )


class _Reader(threading.Thread):
    """Reads a stream of events to its end and looks whether any is missing."""

    def __init__(self, service: Server, path: str) -> None:
        super().__init__(daemon=True)
        self._service = service
        self._path = path
        self.last = 0
        self.problem = "it did not come to its end"
        self.whole = False

    def run(self) -> None:
        connection = HTTPConnection("127.0.0.1", self._service.port, timeout=_SECONDS)
        connection.request("GET", self._path, headers=_headers())
        rest = b""
        with connection.getresponse() as answer:
            while data := answer.read1(1_000_000):
                head, _, rest = (rest + data).rpartition(b"\n\n")
                for found in _ID.finditer(head):
                    if int(found[1]) != self.last + 1:
                        self.problem = f"after event {self.last} came {int(found[1])}"
                        return
                    self.last += 1
                self.whole = b"event: batch_end\n" in head
        connection.close()


def _run(service: Server, workspace: str, size: int) -> list[_Reader]:
    command = f"yes 'some output, forty bytes with its newline' | head -c {size}"
    calls = [{"name": "bash", "arguments": {"command": command, "timeout": _SECONDS * 1000}}]
    batch = _post(service, f"/v1/workspaces/{workspace}/batches", {"calls": calls})
    path = f"/v1/batches/{batch['id']}/events"
    with ExitStack() as stack:
        silent = stack.enter_context(socket.create_connection(("127.0.0.1", service.port)))
        lines = [f"GET {path} HTTP/1.1", "host: 127.0.0.1", *(f"{name}: {value}" for name, value in _headers().items())]
        silent.sendall("\r\n".join(lines).encode() + b"\r\n\r\n")
        readers = [_Reader(service, path) for _ in range(READERS)]
        for reader in readers:
            reader.start()
        for reader in readers:
            reader.join(_SECONDS)
    return readers


def _headers() -> dict[str, str]:
    return {"authorization": f"Bearer {API_KEY}"}


def _post(service: Server, path: str, body: dict[str, Any]) -> Any:
    connection = HTTPConnection("127.0.0.1", service.port, timeout=60)
    connection.request("POST", path, json.dumps(body), _headers())
    try:
        with connection.getresponse() as answer:
            return json.load(answer)
    finally:
        connection.close()
