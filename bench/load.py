"""The load generator: a process of its own, so that client and server each have a core.

`python -m bench.load` reads one JSON object from stdin, `{port, request (base64), clients, seconds, expect}`, keeps
`clients` connections busy for `seconds` and prints `{latenciesMs, elapsed, failures}`. An answer fails when its status
is not 200 or its body does not hold `expect`.
"""

import asyncio
import base64
import json
import sys
import time
from typing import Any

import uvloop

from bench.http_client import Connection


async def _client(port: int, raw: bytes, expect: bytes, until: float) -> tuple[list[float], list[str]]:
    connection = await Connection.open(port)
    latencies, failures = [], []
    try:
        while (started := time.perf_counter()) < until:
            status, body = await connection.request(raw)
            latencies.append((time.perf_counter() - started) * 1000)
            if status != 200 or expect not in body:
                failures.append(f"{status}: {body[:300].decode(errors='replace')}")
    finally:
        connection.close()
    return latencies, failures


async def _run(spec: dict[str, Any]) -> dict[str, Any]:
    raw, expect = base64.b64decode(spec["request"]), spec["expect"].encode()
    started = time.perf_counter()
    until = started + spec["seconds"]
    async with asyncio.timeout(spec["seconds"] + 30), asyncio.TaskGroup() as group:
        clients = [group.create_task(_client(spec["port"], raw, expect, until)) for _ in range(spec["clients"])]
    results = [client.result() for client in clients]
    return {
        "latenciesMs": [latency for latencies, _ in results for latency in latencies],
        "elapsed": time.perf_counter() - started,
        "failures": [failure for _, failures in results for failure in failures],
    }


if __name__ == "__main__":
    print(json.dumps(uvloop.run(_run(json.load(sys.stdin)))))
