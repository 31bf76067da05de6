"""Sandboxes of each tier for tests, and the table of what a command can do in each.

`python -m tests.support.sandbox_tiers` prints that table as JSON for the user it runs as, or for the account that a
service acts as which is root: one object per tier, attempt → whether it succeeded, or a string that says why there is no
such tier.
"""

# ruff: noqa: T201 - a script too

import asyncio
import contextlib
import json
import os
import shutil
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
from app.sandbox.account import Account, may_run
from app.sandbox.base import ProcessSpec, SandboxReport, Tier
from app.sandbox.environment import command_environment
from app.sandbox.local import LocalSandbox
from app.sandbox.namespace import find_bwrap
from app.sandbox.process import run_command
from app.sandbox.programs import provide
from app.sandbox.ripgrep import installed_ripgrep
from app.sandbox.selection import SandboxMeans, make_confinement
from tests.support import sandbox_attempts
from tests.support.users import ACCOUNT, give

TIERS: tuple[Tier, ...] = get_args(Tier)
SHARED_MEMORY = "Share System V memory with the machine"

# What tests run inside: this interpreter and the scripts beside this file.
READABLE = tuple(Path(path) for path in dict.fromkeys((sys.prefix, sys.base_prefix, str(Path(__file__).parent))))

in_every_tier = pytest.mark.parametrize("sandbox", TIERS, indirect=True)
in_tiers_that_hold = pytest.mark.parametrize("sandbox", [tier for tier in TIERS if tier != "process"], indirect=True)


def make_sandbox(tier: Tier, private: Path, account: Account | None = None) -> LocalSandbox:
    """Return a sandbox of a tier; skip the test where the machine does not have what it takes."""
    if tier == "process":
        return LocalSandbox(account=account)
    made = make_confinement(tier, means_for(private, account))
    if isinstance(made, str):
        pytest.skip(f"no tier {tier} here: {made}")
    return LocalSandbox(made, account=account)


def means_for(private: Path, account: Account | None) -> SandboxMeans:
    """Return what a service makes tiers with, for a private directory whose parent is left alone by commands."""
    programs = private.with_name(f"{private.name}-programs")
    bwrap, ripgrep = (
        None if program is None else Path(provide(program, account, programs))
        for program in (find_bwrap(None), installed_ripgrep())
    )
    return SandboxMeans(private, READABLE, bwrap=bwrap, ripgrep=ripgrep, account=account)


def private_below(directory: Path) -> Path:
    """Make a private directory as a service does; accounts pass through it."""
    directory.chmod(0o711)
    private = directory.resolve() / "private"
    private.mkdir()
    private.chmod(0o711)
    return private


def require_tier(tier: Tier, private: Path) -> SandboxReport:
    """Return what the sandbox of a service reports in a tier; skip the test where there is none."""
    sandbox = make_sandbox(tier, private, ACCOUNT)
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
        # All of it is the user's whose commands are tried: nothing but the sandbox shall be in the way.
        give(directory)
        how: dict[str, Any] = {}
        if ACCOUNT is not None:
            how = {"user": ACCOUNT.uid, "group": ACCOUNT.gid, "extra_groups": []}
        other = stack.enter_context(
            subprocess.Popen(["/bin/sh", "-c", "read line", name], stdin=subprocess.PIPE, env={"SECRET": name}, **how)
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


def python_for_commands() -> str:
    """Return an interpreter that the user can start whose commands are tried."""
    for candidate in (sys.executable, "/usr/bin/python3", "/usr/local/bin/python3"):
        if Path(candidate).exists() and may_run(candidate, ACCOUNT):
            return candidate
    raise RuntimeError("no Python that commands can start")


async def attempts_in(sandbox: LocalSandbox, directory: Path) -> dict[str, bool]:
    """Return what a command in a workspace below the directory succeeded with."""
    root, outside = directory / "root", directory / "outside"
    root.mkdir()
    outside.mkdir()
    script = Path(shutil.copy(sandbox_attempts.__file__, root))  # where the user can read it
    give(root, outside)
    said = bytearray()
    with _outside(outside) as (facts, datagrams):
        fd = os.open(root, os.O_PATH | os.O_DIRECTORY)
        try:
            argv = [python_for_commands(), "-I", "-S", str(script), json.dumps(facts)]
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
            private = private_below(Path(made))
            confinement = None if tier == "process" else make_confinement(tier, means_for(private, ACCOUNT))
            if isinstance(confinement, str):
                table[tier] = confinement
                continue
            sandbox = LocalSandbox(confinement, account=ACCOUNT)
            try:
                table[tier] = await attempts_in(sandbox, private)
            except ToolError as error:
                table[tier] = error.message
            finally:
                await sandbox.close()
    return table


if __name__ == "__main__":
    print(json.dumps(asyncio.run(_table())))
