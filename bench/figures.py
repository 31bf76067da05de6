"""The figures: what is measured, against which floor, with which aim."""

import json
import statistics
import time
import urllib.request
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

from bench.distributed import distributed
from bench.files import files
from bench.http_client import encode_request
from bench.large_file import large_file
from bench.loading import Load, load
from bench.records import DatabaseKind, records
from bench.report import Figure
from bench.sandbox import sandbox
from bench.servers import API_KEY, Server, floor, popen_milliseconds, toolcrib
from bench.slow_reader import slow_reader
from bench.subscribers import subscribers

AUTHORIZATION = {"authorization": f"Bearer {API_KEY}"}
MEBIBYTE = 1024 * 1024


@dataclass(frozen=True)
class Scale:
    """How much is measured: `rounds` of `seconds` per target, turn by turn so that a slow minute meets all of them."""

    rounds: int
    seconds: float
    repeats: int
    output_bytes: int
    text_lines: int
    text_offset: int
    records: int
    databases: tuple[DatabaseKind, ...]
    subscribers: int
    stream_seconds: float


FULL = Scale(
    rounds=5,
    seconds=2,
    repeats=20,
    output_bytes=1_000_000_000,
    text_lines=3_040_000,
    text_offset=2_900_000,
    records=1_000_000,
    databases=("sqlite", "postgres"),
    subscribers=500,
    stream_seconds=30,
)
QUICK = Scale(
    rounds=1,
    seconds=0.3,
    repeats=2,
    output_bytes=20_000_000,
    text_lines=60_000,
    text_offset=58_000,
    records=2_000,
    databases=("sqlite",),
    subscribers=20,
    stream_seconds=1,
)


def single_read(scale: Scale, data_dir: Path) -> Iterator[Figure]:
    """A read over HTTP, its record durable before the answer."""
    with floor(data_dir) as echo, toolcrib(data_dir / "single-read") as service:
        workspace = create_workspace(service, {"a.txt": "status: draft\n"})
        targets = {
            "floor": (echo, encode_request("POST", "/echo", {"path": "a.txt"}), '"completed"'),
            "read": (service, short_cut(workspace, "read", {"path": "a.txt"}), '"succeeded"'),
        }
        loads = in_turns(scale, targets, clients=1)
    ratio = paired(zip(loads["read"], loads["floor"], strict=True), lambda read, echo: read.p50 / echo.p50)
    yield Figure(
        "durable read over HTTP, 1 client",
        f"{p50(loads['read']):.2f} ms",
        f"FastAPI echo + one fsynced commit: {p50(loads['floor']):.2f} ms",
        f"{ratio:.2f}x",
        "<= 2x",
        ratio <= 2,
    )


def batches(scale: Scale, data_dir: Path) -> Iterator[Figure]:
    """Batches of 8 reads at 16 clients, and the same when the tools do nothing."""
    with (
        toolcrib(data_dir / "batches") as service,
        toolcrib(data_dir / "batches-no-op", module="bench.no_op_server") as no_op,
    ):
        targets = {}
        for name, server in (("read", service), ("no-op", no_op)):
            workspace = create_workspace(server, {f"{index}.txt": "status: draft\n" for index in range(8)})
            calls = [{"name": "read", "arguments": {"path": f"{index}.txt"}} for index in range(8)]
            request = encode_request(
                "POST", f"/v1/workspaces/{workspace}/batches?wait=30", {"calls": calls}, AUTHORIZATION
            )
            targets[name] = (server, request, '"hasErrors":false')
        loads = in_turns(scale, targets, clients=16)
    rate, floor_rate = rate_of(loads["read"]), rate_of(loads["no-op"])
    share = paired(zip(loads["read"], loads["no-op"], strict=True), lambda read, no_op: read.rate / no_op.rate)
    yield Figure(
        "batches of 8 reads, 16 clients",
        f"{rate:.0f}/s, p50 {p50(loads['read']):.1f} ms",
        f"the same with tools that do nothing: {floor_rate:.0f}/s",
        f"{share:.0%}",
        ">= 70 %",
        share >= 0.7,
    )
    yield Figure("the same, absolute", f"{rate:.0f}/s", "", "", ">= 600/s", rate >= 600)


def bash_true(scale: Scale, data_dir: Path) -> Iterator[Figure]:
    """`bash true` over HTTP against a bare Popen of the same command and the HTTP floor, both with nothing held."""
    popen: list[float] = []
    with floor(data_dir) as echo, toolcrib(data_dir / "bash-true", sandbox="process") as service:
        workspace = create_workspace(service, {})
        targets = {
            "floor": (echo, encode_request("POST", "/echo", {"path": "a.txt"}), '"completed"'),
            "bash": (service, short_cut(workspace, "bash", {"command": "true"}), '"succeeded"'),
        }

        def measure_popen() -> None:
            runs = int(scale.seconds * 50)
            popen.append(statistics.median(popen_milliseconds(["/bin/bash", "-c", "true"]) for _ in range(runs)))

        loads = in_turns(scale, targets, clients=1, between=measure_popen)
    rounds = zip(loads["bash"], loads["floor"], popen, strict=True)
    ratio = statistics.median((bash.p50 - echo.p50) / bare for bash, echo, bare in rounds)
    yield Figure(
        "bash true over HTTP, 1 client",
        f"{p50(loads['bash']):.2f} ms",
        f"Popen {statistics.median(popen):.2f} ms + HTTP floor {p50(loads['floor']):.2f} ms",
        f"{ratio:.2f}x Popen + HTTP",
        "<= 1.5x Popen + HTTP",
        ratio <= 1.5,
    )


def output_memory(scale: Scale, data_dir: Path) -> Iterator[Figure]:
    """What the service's resident memory grows by while a command prints."""
    with toolcrib(data_dir / "output-memory") as service:
        workspace = create_workspace(service, {})

        def run(size: int) -> dict[str, Any]:
            # Lines, on both streams: the work of a build log, not of one long line.
            command = f"yes 'some output, forty bytes with its newline' | head -c {size}"
            return call(service, workspace, "bash", {"command": command, "timeout": 600_000})

        run(1_000_000)
        before, elapsed, peak, ended = peak_of(service, lambda: run(scale.output_bytes))
        details = ended["result"]["details"]
        if details["stdoutBytes"] != scale.output_bytes or details["exitCode"] != 0:
            raise RuntimeError(f"the command was not read to its end: {details}")
    yield memory_figure(f"memory for {scale.output_bytes // 10**6} MB of output", before, peak, elapsed, 32_000_000)


def read_memory(scale: Scale, data_dir: Path) -> Iterator[Figure]:
    """What the service's resident memory grows by while a page far into a long text is read."""
    with toolcrib(data_dir / "read-memory") as service:
        workspace = create_workspace(service, {"small.txt": "a line\n" * 5000})
        root = Path(get(service, f"/v1/workspaces/{workspace}")["root"])
        line = "a line of text that is fifty-one bytes with its LF\n"
        with (root / "long.txt").open("w") as file:
            for _ in range(scale.text_lines // 1000):
                file.write(line * 1000)
        call(service, workspace, "read", {"path": "small.txt", "offset": 4000})
        before, elapsed, peak, ended = peak_of(
            service,
            lambda: call(service, workspace, "read", {"path": "long.txt", "offset": scale.text_offset, "limit": 100}),
        )
        details = ended["result"]["details"]
        if (details["startLine"], details["endLine"]) != (scale.text_offset, scale.text_offset + 99):
            raise RuntimeError(f"another page was read: {details}")
    size = scale.text_lines * len(line) // 10**6
    yield memory_figure(f"memory for a {size} MB text at line {scale.text_offset:,}", before, peak, elapsed, 64_000_000)


def first_delta(scale: Scale, data_dir: Path) -> Iterator[Figure]:
    """How long after an echo its text reaches a client that streams: the command prints the time of its echo."""
    with toolcrib(data_dir / "first-delta") as service:
        workspace = create_workspace(service, {})
        command = "for i in 1 2 3; do echo $EPOCHREALTIME; sleep 1; done"
        delays = [first_delta_ms(service, workspace, command) for _ in range(scale.repeats)]
    yield Figure(
        f"first delta after the echo, p50 of {scale.repeats}",
        f"{statistics.median(delays):.1f} ms (highest {max(delays):.1f})",
        "",
        "",
        "<= 150 ms",
        statistics.median(delays) <= 150,
    )


FIGURES: dict[str, Callable[[Scale, Path], Iterator[Figure]]] = {
    "single-read": single_read,
    "batches": batches,
    "bash-true": bash_true,
    "sandbox": lambda scale, data_dir: sandbox(
        int(scale.rounds * scale.seconds * 20) + 1, scale.seconds, scale.output_bytes, data_dir
    ),
    "output-memory": output_memory,
    "read-memory": read_memory,
    "first-delta": first_delta,
    "large-file": lambda scale, data_dir: large_file(scale.output_bytes, scale.repeats, data_dir),
    "slow-reader": lambda scale, data_dir: slow_reader(scale.output_bytes, data_dir),
    "records": lambda scale, data_dir: records(scale.records, scale.repeats, scale.databases, data_dir),
    "subscribers": lambda scale, data_dir: subscribers(scale.subscribers, scale.stream_seconds, data_dir),
    "distributed": lambda scale, data_dir: distributed(scale.rounds, scale.seconds, scale.repeats, data_dir),
    "files": lambda scale, data_dir: files(2 * scale.output_bytes, data_dir),
}

LONG = frozenset({"records"})
"""Those that take minutes: measured only when they are named."""


# -- how it is measured -----------------------------------------------------------------------------------------------


def in_turns(
    scale: Scale,
    targets: Mapping[str, tuple[Server, bytes, str]],
    clients: int,
    between: Callable[[], None] = lambda: None,
) -> dict[str, list[Load]]:
    """Load each target once per round, and do what is to be done between them; a first short round is thrown away."""
    for server, request, expect in targets.values():
        load(server, request, expect, clients, min(scale.seconds, 1))
    loads: dict[str, list[Load]] = {name: [] for name in targets}
    for _ in range(scale.rounds):
        for name, (server, request, expect) in targets.items():
            loads[name].append(load(server, request, expect, clients, scale.seconds))
        between()
    return loads


def p50(loads: list[Load]) -> float:
    return statistics.median(latency for load in loads for latency in load.latencies_ms)


def rate_of(loads: list[Load]) -> float:
    return statistics.median(load.rate for load in loads)


def paired(rounds: Iterable[tuple[Load, Load]], compare: Callable[[Load, Load], float]) -> float:
    """Return the median of a comparison made within each round, where both sides met the same machine."""
    return statistics.median(compare(measured, floor_load) for measured, floor_load in rounds)


def memory_figure(name: str, before: int, peak: int, elapsed: float, aim: int) -> Figure:
    growth = peak - before
    return Figure(
        name,
        f"+{growth / 10**6:.1f} MB in {elapsed:.1f} s",
        f"the service before: {before / 10**6:.0f} MB",
        "",
        f"< {aim // 10**6} MB",
        growth < aim,
    )


def peak_of(service: Server, work: Callable[[], dict[str, Any]]) -> tuple[int, float, int, dict[str, Any]]:
    """Return resident bytes before, seconds it took, the kernel's peak of resident bytes meanwhile, the answer."""
    service.reset_peak()
    before = service.memory_bytes()
    started = time.perf_counter()
    answer = work()
    return before, time.perf_counter() - started, service.peak_memory_bytes(), answer


# -- what is asked ----------------------------------------------------------------------------------------------------


def short_cut(workspace: str, tool: str, arguments: dict[str, Any]) -> bytes:
    return encode_request("POST", f"/v1/workspaces/{workspace}/tools/{tool}", arguments, AUTHORIZATION)


def create_workspace(service: Server, files: dict[str, str]) -> str:
    workspace: str = post(service, "/v1/workspaces", {"files": files})["id"]
    return workspace


def call(service: Server, workspace: str, tool: str, arguments: dict[str, Any]) -> dict[str, Any]:
    """Run one call to its end, however long that is (10 minutes at most)."""
    batch = post(service, f"/v1/workspaces/{workspace}/batches", {"calls": [{"name": tool, "arguments": arguments}]})
    deadline = time.monotonic() + 600
    while batch["status"] in {"queued", "running"}:
        if time.monotonic() > deadline:
            raise TimeoutError(f"{tool} ran for longer than 10 minutes")
        batch = get(service, f"/v1/batches/{batch['id']}?wait=30")
    ended: dict[str, Any] = batch["calls"][0]
    if ended["status"] != "succeeded":
        raise RuntimeError(f"{tool} ended {ended['status']}: {ended['error']}")
    return ended


def first_delta_ms(service: Server, workspace: str, command: str) -> float:
    """Stream a batch of one bash call and return the milliseconds from its first echo to its first delta here."""
    connection = HTTPConnection("127.0.0.1", service.port, timeout=30)
    body = {"calls": [{"name": "bash", "arguments": {"command": command}}], "onDisconnect": "cancel"}
    headers = {**AUTHORIZATION, "accept": "text/event-stream", "content-type": "application/json"}
    connection.request("POST", f"/v1/workspaces/{workspace}/batches", json.dumps(body), headers)
    try:
        with connection.getresponse() as answer:
            for line in answer:
                if line.startswith(b"data:") and b'"delta"' in line:
                    arrived = time.time()
                    event = json.loads(line[5:])
                    return (arrived - float(event["delta"][0]["text"].split()[0])) * 1000
    finally:
        connection.close()
    raise RuntimeError("the stream ended without a delta")


def get(service: Server, path: str) -> Any:
    return _send(urllib.request.Request(f"http://127.0.0.1:{service.port}{path}", headers=AUTHORIZATION))


def post(service: Server, path: str, body: dict[str, Any]) -> Any:
    data = json.dumps(body).encode()
    return _send(urllib.request.Request(f"http://127.0.0.1:{service.port}{path}", data, AUTHORIZATION))


def _send(request: urllib.request.Request) -> Any:
    with urllib.request.urlopen(request, timeout=90) as answer:
        return json.load(answer)
