"""Sandboxes of each tier for tests, and the table of what a command can do in each.

`python -m tests.support.sandbox_tiers` prints that table as JSON for the user it runs as, one object per tier: attempt
→ whether it succeeded, or a string that says why there is no such tier.
"""

# ruff: noqa: T201 - a script too

import asyncio
import contextlib
import json
import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args

import pytest

from app.domain.abort import AbortSignal
from app.errors import ToolError
from app.sandbox.base import ProcessSpec, SandboxReport, Tier
from app.sandbox.environment import command_environment
from app.sandbox.local import LocalSandbox
from app.sandbox.process import run_command
from app.sandbox.selection import SandboxMeans, make_confinement
from tests.support import sandbox_attempts

TIERS: tuple[Tier, ...] = get_args(Tier)
SHARED_MEMORY = "Share System V memory with the machine"

# What tests run inside: this interpreter and the scripts beside this file.
READABLE = tuple(Path(path) for path in dict.fromkeys((sys.prefix, sys.base_prefix, str(Path(__file__).parent))))

in_every_tier = pytest.mark.parametrize("sandbox", TIERS, indirect=True)
in_tiers_that_hold = pytest.mark.parametrize("sandbox", [tier for tier in TIERS if tier != "process"], indirect=True)


def make_sandbox(tier: Tier, private: Path) -> LocalSandbox:
    """Return a sandbox of a tier; skip the test where the machine does not have what it takes."""
    if tier == "process":
        return LocalSandbox()
    made = make_confinement(tier, SandboxMeans(private, READABLE))
    if isinstance(made, str):
        pytest.skip(f"no tier {tier} here: {made}")
    return LocalSandbox(made)


def require_tier(tier: Tier, private: Path) -> SandboxReport:
    """Return what a sandbox of a tier reports; skip the test where there is none."""
    sandbox = make_sandbox(tier, private)
    asyncio.run(sandbox.close())
    return sandbox.report


@contextlib.contextmanager
def _outside(directory: Path) -> Iterator[tuple[dict[str, Any], socket.socket]]:
    """Make everything a command might reach for; give the facts for it and the socket that receives datagrams."""
    canary, removable = directory / "canary", directory / "removable"
    canary.write_text("canary")
    removable.write_text("canary")
    with contextlib.ExitStack() as stack:
        tcp, udp, unix, abstract = (
            stack.enter_context(socket.socket(family, kind))
            for family, kind in (
                (socket.AF_INET, socket.SOCK_STREAM),
                (socket.AF_INET, socket.SOCK_DGRAM),
                (socket.AF_UNIX, socket.SOCK_STREAM),
                (socket.AF_UNIX, socket.SOCK_STREAM),
            )
        )
        name = f"toolcrib-{os.urandom(8).hex()}"
        tcp.bind(("127.0.0.1", 0))
        udp.bind(("127.0.0.1", 0))
        unix.bind(str(directory / "socket"))
        abstract.bind("\0" + name)
        for listener in (tcp, unix, abstract):
            listener.listen()
        udp.settimeout(0.2)
        other = stack.enter_context(
            subprocess.Popen(["/bin/sh", "-c", "read line", name], stdin=subprocess.PIPE, env={"SECRET": name})
        )
        yield (
            {
                "canary": str(canary),
                "removable": str(removable),
                "port": tcp.getsockname()[1],
                "datagram": udp.getsockname()[1],
                "socket": str(directory / "socket"),
                "abstract": name,
                "pid": other.pid,
                "marker": name,
                "secret": name,
            },
            udp,
        )
        other.kill()


async def attempts_in(sandbox: LocalSandbox, directory: Path) -> dict[str, bool]:
    """Return what a command in a workspace below the directory succeeded with."""
    root, outside = directory / "root", directory / "outside"
    root.mkdir()
    outside.mkdir()
    said = bytearray()
    with _outside(outside) as (facts, datagrams):
        fd = os.open(root, os.O_PATH | os.O_DIRECTORY)
        try:
            argv = [sys.executable, "-I", "-S", sandbox_attempts.__file__, json.dumps(facts)]
            outcome = await run_command(
                sandbox,
                ProcessSpec(argv, fd, command_environment(str(root), {})),
                signal=AbortSignal(),
                timeout_ms=30_000,
                on_output=lambda _stream, data: said.extend(data),
            )
        finally:
            os.close(fd)
        if outcome.exit_code != 0:
            raise RuntimeError(said.decode())
        results: dict[str, bool] = json.loads(said)
        # Sending tells nothing: it counts what arrived.
        try:
            results["Send a UDP datagram to the machine"] = datagrams.recv(100) == b"hello"
        except TimeoutError:
            results["Send a UDP datagram to the machine"] = False
    if sandbox.report.tier == "namespace":
        results[SHARED_MEMORY] = False  # it has some of its own, in an IPC namespace of its own
    return results


async def _table() -> dict[str, dict[str, bool] | str]:
    table: dict[str, dict[str, bool] | str] = {}
    for tier in TIERS:
        with tempfile.TemporaryDirectory() as made:
            private = Path(os.path.realpath(made))  # noqa: ASYNC240 - nothing else runs on this loop
            confinement = None if tier == "process" else make_confinement(tier, SandboxMeans(private, READABLE))
            if isinstance(confinement, str):
                table[tier] = confinement
                continue
            sandbox = LocalSandbox(confinement)
            try:
                table[tier] = await attempts_in(sandbox, private)
            except ToolError as error:
                table[tier] = error.message
            finally:
                await sandbox.close()
    return table


if __name__ == "__main__":
    print(json.dumps(asyncio.run(_table())))
