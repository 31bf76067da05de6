"""Pages of a large text: the first one, and one from the middle after somebody was there before."""

import json
import statistics
import time
from collections.abc import Iterator
from contextlib import closing
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

from bench.report import Figure
from bench.servers import API_KEY, Server, toolcrib

LINE = b"a line of text that is fifty-one bytes with its LF\n"
AIM_MS = 20.0
_STEP_LINES = 20_000
_SETTLED_SECONDS = 2.5
"""No index is kept of a file that changed more recently."""


def large_file(size: int, repeats: int, data_dir: Path) -> Iterator[Figure]:
    """Read a page of a text of `size` bytes `repeats` times, and in turn one of a short text: the floor."""
    with toolcrib(data_dir / "large-file") as service, closing(_Reader(service)) as reader:
        lines = _write(reader.root / "large.txt", size)
        (reader.root / "short.txt").write_bytes(LINE)
        middle = lines // 2
        time.sleep(_SETTLED_SECONDS)
        reader.milliseconds("short.txt", 1)
        first_visit = reader.milliseconds("large.txt", middle)
        taken: dict[str, list[float]] = {"floor": [], "first page": [], "page from the middle, seen before": []}
        for _ in range(repeats):
            for name, (path, offset) in zip(
                taken, (("short.txt", 1), ("large.txt", 1), ("large.txt", middle)), strict=True
            ):
                taken[name].append(reader.milliseconds(path, offset))
    floor = statistics.median(taken.pop("floor"))
    for name, latencies in taken.items():
        measured = statistics.median(latencies)
        first = f" (the first time {first_visit:.0f} ms)" if "middle" in name else ""
        yield Figure(
            f"{name} of a text of {size // 10**6} MB",
            f"{measured:.1f} ms{first}",
            f"a read of one line: {floor:.1f} ms",
            f"+{measured - floor:.1f} ms",
            f"<= {AIM_MS:.0f} ms + a read of one line",
            measured - floor <= AIM_MS,
        )


class _Reader:
    """A workspace and a kept-alive connection to read in it."""

    def __init__(self, service: Server) -> None:
        self._connection = HTTPConnection("127.0.0.1", service.port, timeout=120)
        workspace = self._post("/v1/workspaces", {})
        self._route = f"/v1/workspaces/{workspace['id']}/tools/read"
        self.root = Path(workspace["root"])

    def milliseconds(self, path: str, offset: int) -> float:
        started = time.perf_counter()
        ended = self._post(self._route, {"path": path, "offset": offset})
        taken = time.perf_counter() - started
        if ended["status"] != "succeeded" or ended["result"]["details"]["startLine"] != offset:
            raise RuntimeError(f"{path} was not read: {ended['status']} {ended['error']}")
        return taken * 1000

    def _post(self, route: str, body: dict[str, Any]) -> Any:
        self._connection.request("POST", route, json.dumps(body), {"authorization": f"Bearer {API_KEY}"})
        with self._connection.getresponse() as answer:
            return json.load(answer)

    def close(self) -> None:
        self._connection.close()


def _write(file: Path, size: int) -> int:
    """Write a text of about `size` bytes and return how many lines it has."""
    steps = max(1, size // (len(LINE) * _STEP_LINES))
    with file.open("wb") as out:
        for _ in range(steps):
            out.write(LINE * _STEP_LINES)
    return steps * _STEP_LINES
