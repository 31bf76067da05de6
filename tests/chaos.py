"""`python -m tests.chaos [--seconds N] [--seed N] [--topology NAME]`: kill a service under load, then look for what is missing.

Clients send batches that put lines into files. Meanwhile processes and Postgres are killed, stopped and paused, and
disks filled. Afterwards every batch that was accepted has ended, every call has one result, every line that a result
tells of is in its file once, events have no gaps, and nothing is left behind. Prints a tally; what does not hold is
printed, too, the directory with the log is kept, and the exit status is 1.
"""

import argparse
import itertools
import os
import random
import secrets
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

import httpx2

from tests.support.chaos.fleet import TOPOLOGIES, Fleet, Topology
from tests.support.chaos.load import APPENDED, EDITED, MARKER, Load
from tests.support.chaos.storm import Storm
from tests.support.chaos.verdict import problems_of_records, problems_of_remains
from tests.support.server import api_client

CLIENTS = 6
WORKSPACES = 4
SHOWN = 40
# Set in the child that has a mount namespace of its own.
MAY_MOUNT = "CHAOS_MAY_MOUNT"


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.chaos", description=__doc__)
    parser.add_argument("--seconds", type=float, default=300, help="how long things go wrong")
    parser.add_argument("--seed", type=int, default=random.randrange(1_000_000))
    parser.add_argument("--topology", choices=[*TOPOLOGIES, "all"], default="all", help="all: one after the other")
    asked = parser.parse_args()
    if MAY_MOUNT not in os.environ:
        return _with_mounts()
    chosen = list(TOPOLOGIES) if asked.topology == "all" else [asked.topology]
    failures = 0
    for name in chosen:
        failures += _run(TOPOLOGIES[name], asked.seconds / len(chosen), asked.seed)
    return 1 if failures else 0


def _with_mounts() -> int:
    """Run again where small disks can be mounted; where that cannot be had, without the full disks."""
    own = ["unshare", "--mount", "--propagation", "private"]
    possible = os.geteuid() == 0 and not subprocess.run([*own, "true"], capture_output=True, check=False).returncode
    if not possible:
        print("no disks are filled: that takes root and a mount namespace of its own", flush=True)
    command = [sys.executable, "-m", "tests.chaos", *sys.argv[1:]]
    environment = os.environ | {MAY_MOUNT: "1" if possible else ""}
    return subprocess.run([*own, *command] if possible else command, env=environment, check=False).returncode


def _run(topology: Topology, seconds: float, seed: int) -> int:
    """Have one storm and tell of it; return how many problems there were."""
    name = f"chaos-{secrets.token_hex(4)}"
    tally: Counter[str] = Counter()
    directory = Path(tempfile.mkdtemp(prefix="toolcrib-chaos-"))
    directory.chmod(0o711)  # as root, the service acts as a user who has to pass through here
    print(f"{topology.what}, {seconds:.0f} s, seed {seed}, in {directory}", flush=True)
    problems: list[str] = []
    with Fleet(topology, directory, small_disks=bool(os.environ[MAY_MOUNT])) as fleet:
        workspaces = []
        for number, url in zip(range(WORKSPACES), itertools.cycle(fleet.urls()), strict=False):
            with api_client(url) as client:
                workspaces.append(_make_workspace(client, parallel=number == 0))
        load = Load(fleet, workspaces, name, seed, CLIENTS, tally=tally)
        load.start()
        try:
            Storm(fleet, random.Random(seed), tally).rage(time.monotonic() + seconds)
            fleet.ready()
        finally:
            load.stop()
        draw = random.Random(seed)
        for intent in load.intents:
            # Some clients come back for what they had given up, some never do.
            if intent.batch is None and draw.random() < 0.5:
                load.post(intent, draw)
        with api_client(fleet.urls()[-1]) as client:
            problems += problems_of_records(load, client)
        statuses = fleet.stop()
        if any(statuses):
            problems.append(f"exit statuses of the stopped processes: {statuses}")
        problems += problems_of_remains(f"{name}-", fleet.node_directories)
    if not problems:
        shutil.rmtree(directory, ignore_errors=True)
    print("\n".join(f"  {count:6} {what}" for what, count in sorted(tally.items())))
    print("\n".join(f"FAILED {problem}" for problem in problems[:SHOWN]))
    print(f"{len(problems)} problems", flush=True)
    return len(problems)


def _make_workspace(client: httpx2.Client, *, parallel: bool) -> dict[str, Any]:
    mode = {"executionMode": "parallel"} if parallel else {}
    body = {
        "options": dict.fromkeys(("bash", "edit", "write"), mode),
        "files": {APPENDED: "", EDITED: f"{MARKER}\n"},
    }
    return client.post("/v1/workspaces", json=body).raise_for_status().json()


if __name__ == "__main__":
    sys.exit(main())
