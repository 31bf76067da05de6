"""A large file through the service, in and out: the memory it takes, and the time beside that of a plain copy."""

import hashlib
import json
import os
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from http.client import HTTPConnection
from pathlib import Path

from bench.report import Figure
from bench.servers import API_KEY, Server, toolcrib

AIM_BYTES = 64_000_000
_BLOCK_BYTES = 1_000_000
_SECONDS = 600


def files(size: int, data_dir: Path) -> Iterator[Figure]:
    """Store a file of `size` bytes and get it back; the floor is the same bytes written and synced, and read again."""
    block = os.urandom(_BLOCK_BYTES)
    blocks = size // len(block)
    with toolcrib(data_dir / "files") as service, closing(_Client(service)) as client:
        client.put("warm.bin", block, 1)
        client.get("warm.bin")
        written, read = _floor(data_dir / "floor.bin", block, blocks)
        expected = hashlib.sha256()
        for _ in range(blocks):
            expected.update(block)
        up = _measured(service, lambda: client.put("large.bin", block, blocks))
        down = _measured(service, lambda: client.get("large.bin"))
        if client.digest != expected.digest():
            raise RuntimeError("another file came back")
    for what, (grown, taken), floor in (("upload", up, written), ("download", down, read)):
        yield Figure(
            f"{what} of {size // 10**6} MB",
            f"+{grown / 10**6:.1f} MB in {taken:.1f} s",
            f"the same bytes {'written and synced' if what == 'upload' else 'read and hashed'}: {floor:.1f} s",
            f"{taken / floor:.1f}x",
            f"< {AIM_BYTES // 10**6} MB",
            grown < AIM_BYTES,
        )


def _measured(service: Server, work: Callable[[], None]) -> tuple[int, float]:
    """Return by how much the service's memory grew at most meanwhile, and the seconds it took."""
    service.reset_peak()
    before = service.memory_bytes()
    started = time.perf_counter()
    work()
    taken = time.perf_counter() - started
    return service.peak_memory_bytes() - before, taken


def _floor(file: Path, block: bytes, blocks: int) -> tuple[float, float]:
    started = time.perf_counter()
    with file.open("wb") as out:
        for _ in range(blocks):
            out.write(block)
        out.flush()
        os.fsync(out.fileno())
    written = time.perf_counter() - started
    started = time.perf_counter()
    digest = hashlib.sha256()
    with file.open("rb") as source:
        while data := source.read(_BLOCK_BYTES):
            digest.update(data)
    read = time.perf_counter() - started
    file.unlink()
    return written, read


class _Client:
    """A workspace and a kept-alive connection that moves files of it; `digest` is that of the last one it got."""

    def __init__(self, service: Server) -> None:
        self._connection = HTTPConnection("127.0.0.1", service.port, timeout=_SECONDS)
        self._headers = {"authorization": f"Bearer {API_KEY}"}
        self._connection.request("POST", "/v1/workspaces", b"{}", self._headers)
        with self._connection.getresponse() as answer:
            self._route = f"/v1/workspaces/{json.load(answer)['id']}/files/"
        self.digest = b""

    def put(self, path: str, block: bytes, blocks: int) -> None:
        length = {"content-length": str(len(block) * blocks)}
        body = (block for _ in range(blocks))
        self._connection.request("PUT", self._route + path, body, self._headers | length)
        with self._connection.getresponse() as answer:
            if answer.status != 201:
                raise RuntimeError(f"the file was not stored: {answer.status} {answer.read()[:500]!r}")
            answer.read()

    def get(self, path: str) -> None:
        self._connection.request("GET", self._route + path, headers=self._headers)
        digest = hashlib.sha256()
        with self._connection.getresponse() as answer:
            while data := answer.read(_BLOCK_BYTES):
                digest.update(data)
        self.digest = digest.digest()

    def close(self) -> None:
        self._connection.close()
