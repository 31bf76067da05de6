"""Loading a server from a process of its own, and what that measured."""

import base64
import json
import statistics
import subprocess
import sys
from dataclasses import dataclass

from bench.servers import Server


@dataclass(frozen=True)
class Load:
    latencies_ms: list[float]
    rate: float

    @property
    def p50(self) -> float:
        return statistics.median(self.latencies_ms)


def load(server: Server, request: bytes, expect: str, clients: int, seconds: float) -> Load:
    spec = {
        "port": server.port,
        "request": base64.b64encode(request).decode(),
        "clients": clients,
        "seconds": seconds,
        "expect": expect,
    }
    generator = subprocess.run(
        [sys.executable, "-m", "bench.load"],
        input=json.dumps(spec),
        stdout=subprocess.PIPE,
        text=True,
        check=True,
        timeout=seconds + 60,
    )
    answer = json.loads(generator.stdout)
    if answer["failures"] or not answer["latenciesMs"]:
        raise RuntimeError(f"{len(answer['failures'])} answers were wrong, such as {answer['failures'][:1]}")
    return Load(answer["latenciesMs"], len(answer["latenciesMs"]) / answer["elapsed"])
