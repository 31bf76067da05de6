"""Commands in each tier: how long one takes, how many a second go through, what a lot of output costs."""

import asyncio
import os
import resource
import statistics
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import get_args

from app.domain.abort import AbortSignal
from app.domain.events import OutputStream
from app.sandbox.account import NOBODY, Account, acts_as_others
from app.sandbox.base import ProcessSpec, Tier
from app.sandbox.confinement import LINKED
from app.sandbox.environment import command_environment
from app.sandbox.limits import CommandLimits
from app.sandbox.local import LocalSandbox
from app.sandbox.namespace import find_bwrap
from app.sandbox.process import run_command
from app.sandbox.selection import SandboxMeans, select_sandbox
from bench.report import Figure
from bench.servers import popen_milliseconds

CLIENTS = 16
LIMITS = CommandLimits(processes=1_024, cpu_seconds=14_400, memory_bytes=4_000_000_000)
"""As a service has them, so that their cost is in the figures."""


def sandbox(runs: int, seconds: float, output_bytes: int, data_dir: Path) -> Iterator[Figure]:
    """`bash -c true` in each tier against a bare spawn and a bare bubblewrap, turn by turn; then many, then much."""
    private = data_dir / "sandbox"
    private.mkdir()
    yield from asyncio.run(_measure(runs, seconds, output_bytes, private))


async def _measure(runs: int, seconds: float, output_bytes: int, private: Path) -> list[Figure]:
    root = private / "root"
    root.mkdir()
    bwrap = find_bwrap(None)
    account = Account(NOBODY, NOBODY) if acts_as_others() else None
    if account is not None:
        os.chown(root, account.uid, account.gid)
    means = SandboxMeans(private, account=account)
    made = {tier: await select_sandbox([tier], means) for tier in get_args(Tier)}
    sandboxes = {tier: selection.sandbox for tier, selection in made.items() if selection.sandbox is not None}
    fd = os.open(root, os.O_PATH | os.O_DIRECTORY)
    spec = ProcessSpec(["/bin/bash", "-c", "true"], fd, command_environment(str(root), {}), limits=LIMITS)
    much = replace(spec, argv=["/bin/bash", "-c", f"exec head -c {output_bytes} /dev/zero"])
    try:
        figures = _latencies(await tier_milliseconds(sandboxes, bwrap, root, spec, runs))
        rates = {tier: await commands_per_second(tool, spec, seconds) for tier, tool in sandboxes.items()}
        bare = await bare_per_second(spec.argv, seconds)
        for tier, rate in rates.items():
            figures.append(
                Figure(
                    f"commands per second in tier {tier}, {CLIENTS} at once",
                    f"{rate:.0f}/s",
                    f"bare spawns, {CLIENTS} at once: {bare:.0f}/s",
                    f"{rate / bare:.2f}x",
                    "",
                )
            )
        for tier, tool in sandboxes.items():
            before = _peak()
            elapsed = await _seconds_of(tool, much, output_bytes)
            figures.append(
                Figure(
                    f"{output_bytes // 10**6} MB of output in tier {tier}",
                    f"{output_bytes / 10**6 / elapsed:.0f} MB/s, memory +{(_peak() - before) / 10**6:.1f} MB",
                    "",
                    "",
                    "< 10 MB",
                    _peak() - before < 10_000_000,
                )
            )
    finally:
        for tool in sandboxes.values():
            await tool.close()
        os.close(fd)
    return figures


def _latencies(times: dict[str, list[float]]) -> list[Figure]:
    p50s = {name: statistics.median(values) for name, values in times.items()}
    bare = p50s["Popen"]
    aims: dict[str, tuple[str, Callable[[float], bool]]] = {
        "process": ("<= Popen + 5 ms", lambda p50: p50 <= bare + 5),
        "landlock": ("<= Popen + 10 ms", lambda p50: p50 <= bare + 10),
    }
    if "bwrap" in p50s:
        limit = max(2 * p50s["bwrap"], p50s["bwrap"] + 12)
        aims["namespace"] = ("<= 2x bwrap or bwrap + 12 ms", lambda p50: p50 <= limit)
    figures = []
    for tier, (aim, is_met) in aims.items():
        if tier not in p50s:
            figures.append(Figure(f"bash true in tier {tier}", "not available here", "", "", ""))
            continue
        against = "bwrap" if tier == "namespace" else "Popen"
        figures.append(
            Figure(
                f"bash true in tier {tier}",
                f"{p50s[tier]:.2f} ms",
                f"bare {against}: {p50s[against]:.2f} ms",
                f"{p50s[tier] / p50s[against]:.2f}x",
                aim,
                is_met(p50s[tier]),
            )
        )
    return figures


async def tier_milliseconds(
    sandboxes: dict[Tier, LocalSandbox], bwrap: str | None, root: Path, spec: ProcessSpec, runs: int
) -> dict[str, list[float]]:
    """Return how long each of `runs` commands took, by tier and by bare way to start one."""
    times: dict[str, list[float]] = {name: [] for name in ("Popen", *(["bwrap"] if bwrap else []), *sandboxes)}
    for _ in range(runs):
        times["Popen"].append(popen_milliseconds(spec.argv))
        if bwrap is not None:
            times["bwrap"].append(popen_milliseconds(bare_bwrap(bwrap, root, spec.argv)))
        for tier, tool in sandboxes.items():
            times[tier].append(await _seconds_of(tool, spec, 0) * 1000)
    return times


async def commands_per_second(tool: LocalSandbox, spec: ProcessSpec, seconds: float) -> float:
    """Return how many commands end in a second while `CLIENTS` callers start one after the other."""

    async def client(until: float) -> int:
        done = 0
        while time.perf_counter() < until:
            await _seconds_of(tool, spec, 0)
            done += 1
        return done

    return await _rate(client, seconds)


async def bare_per_second(argv: Sequence[str], seconds: float) -> float:
    """Return the same of processes that nothing holds or supervises."""

    async def client(until: float) -> int:
        done = 0
        while time.perf_counter() < until:
            await asyncio.to_thread(popen_milliseconds, argv)
            done += 1
        return done

    return await _rate(client, seconds)


async def _rate(client: Callable[[float], Awaitable[int]], seconds: float) -> float:
    started = time.perf_counter()
    done = await asyncio.gather(*(client(started + seconds) for _ in range(CLIENTS)))
    return sum(done) / (time.perf_counter() - started)


async def _seconds_of(tool: LocalSandbox, spec: ProcessSpec, output_bytes: int) -> float:
    started = time.perf_counter()
    outcome = await run_command(tool, spec, signal=AbortSignal(), timeout_ms=600_000, on_output=_drop)
    if outcome.exit_code != 0 or outcome.stdout_bytes != output_bytes:
        raise RuntimeError(f"the command did not do its work: {outcome}")
    return time.perf_counter() - started


def _drop(_stream: OutputStream, _data: bytes) -> None:
    """What the command prints is counted by whoever runs it."""


def _peak() -> int:
    """Return the most memory this process has had, in bytes."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def bare_bwrap(bwrap: str, root: Path, argv: Sequence[str]) -> list[str]:
    """Return the least that gives a command namespaces and a file system of its own."""
    words = "--unshare-user --unshare-pid --unshare-ipc --unshare-uts --unshare-net --cap-drop ALL --new-session"
    system = [word for path in ("/usr", "/etc") for word in ("--ro-bind", path, path)]
    links = [word for path in LINKED if Path(path).exists() for word in ("--symlink", f"usr{path}", path)]
    mounts = ["--proc", "/proc", "--dev", "/dev", "--tmpfs", "/tmp", "--bind", str(root), str(root)]
    return [bwrap, *words.split(), *system, *links, *mounts, "--chdir", str(root), "--", *argv]
