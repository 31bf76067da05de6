"""What commands may use at most: each limit is hit in every tier, and whoever stays below it is left alone."""

import dataclasses
import resource
import sys
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest

from app.domain.abort import AbortSignal
from app.domain.workspace import CommandLimitOptions
from app.sandbox import limits as limits_module
from app.sandbox.base import ProcessSpec
from app.sandbox.limits import CommandLimits, memory_share
from app.sandbox.local import LocalSandbox
from app.sandbox.process import CommandOutcome, run_command
from tests.support.processes import living
from tests.support.sandbox_tiers import TIERS, in_every_tier, make_sandbox

pytestmark = pytest.mark.anyio

Spec = Callable[[str | list[str]], ProcessSpec]


async def run_limited(
    sandbox: LocalSandbox, spec: ProcessSpec, timeout_ms: int = 60_000, **limits: int
) -> tuple[CommandOutcome, str]:
    said = bytearray()
    outcome = await run_command(
        sandbox,
        dataclasses.replace(spec, limits=CommandLimits(**limits)),
        signal=AbortSignal(),
        timeout_ms=timeout_ms,
        on_output=lambda _stream, data: said.extend(data),
    )
    return outcome, said.decode()


def python(program: str) -> list[str]:
    return [sys.executable, "-I", "-S", "-c", program]


@in_every_tier
async def test_more_processes_than_allowed_end_a_command_with_all_of_them(sandbox: LocalSandbox, spec: Spec) -> None:
    mark = f"mark-{time.monotonic_ns()}"
    many = f"for i in $(seq 40); do (exec -a {mark} sleep 60) & done; wait"
    outcome, _ = await run_limited(sandbox, spec(many), processes=20)
    assert (outcome.exceeded, outcome.timed_out, outcome.aborted) == ("processes", False, False)
    assert living(mark) == []
    few = "for i in $(seq 10); do sleep 0.4 & done; wait; echo done"
    outcome, said = await run_limited(sandbox, spec(few), processes=20)
    assert (outcome.exceeded, outcome.exit_code, said) == (None, 0, "done\n")


@in_every_tier
async def test_threads_count_as_processes(sandbox: LocalSandbox, spec: Spec) -> None:
    threads = "import threading, time\nfor _ in range(40): threading.Thread(target=time.sleep, args=(60,)).start()"
    outcome, _ = await run_limited(sandbox, spec(python(threads)), processes=20)
    assert outcome.exceeded == "processes"


@in_every_tier
async def test_a_fork_bomb_ends_and_the_next_command_runs(sandbox: LocalSandbox, spec: Spec) -> None:
    outcome, _ = await run_limited(sandbox, spec("bomb() { bomb | bomb & }; bomb; sleep 60"), processes=100)
    assert outcome.exceeded == "processes"
    outcome, said = await run_limited(sandbox, spec("echo on"), processes=100)
    assert (outcome.exit_code, said) == (0, "on\n")


@pytest.mark.parametrize("sandbox", [tier for tier in TIERS if tier != "namespace"], indirect=True)
async def test_processes_that_hide_whose_they_are_are_ended_too(
    sandbox: LocalSandbox, spec: Spec, tmp_path: Path
) -> None:
    # Orphans in sessions of their own, without the tag; in a namespace their parent there still tells.
    hiding = (
        "import os, resource, time\n"
        "def hide():\n"
        "    os.setsid()\n"
        "    if os.fork(): os._exit(0)\n"
        "    hard = resource.getrlimit(resource.RLIMIT_RTTIME)[1]\n"
        "    resource.setrlimit(resource.RLIMIT_RTTIME, (hard, hard))\n"
        "    open(f'{os.getpid()}.up', 'w').close()\n"
        "    time.sleep(60); os._exit(0)\n"
        "ended = 0\n"
        "while ended < 10:\n"
        "    os.fork() or hide()\n"
        "    os.wait()\n"
        "    time.sleep(0.01)\n"
        "    ended = sum(n.endswith('.up') and not os.path.exists('/proc/' + n[:-3]) for n in os.listdir('.'))\n"
    )
    outcome, said = await run_limited(sandbox, spec(python(hiding)), processes=20)
    assert (outcome.exceeded, outcome.exit_code) == (None, 0), said


@in_every_tier
async def test_processor_time_of_all_processes_together_is_limited(sandbox: LocalSandbox, spec: Spec) -> None:
    # Each process for itself stays far below; most are over and waited for, as in a build.
    busy = "import os\nwhile True:\n if os.fork() == 0:\n  for _ in range(3_000_000): pass\n  os._exit(0)\n os.wait()"
    outcome, _ = await run_limited(sandbox, spec(python(busy)), cpu_seconds=1)
    assert outcome.exceeded == "cpu_seconds"


@in_every_tier
async def test_memory_of_all_processes_together_is_limited(sandbox: LocalSandbox, spec: Spec) -> None:
    eater = "import os, time\nfor _ in range(3): os.fork() or (globals().update(x=b'x' * 40_000_000), time.sleep(60))\nos.wait()"
    outcome, _ = await run_limited(sandbox, spec(python(eater)), memory_bytes=80_000_000)
    assert outcome.exceeded == "memory_bytes"
    # Shared pages are counted once, however many processes have them.
    sharer = "import os, time\nx = b'x' * 60_000_000\nfor _ in range(5): os.fork() or (time.sleep(0.5), os._exit(0))\nfor _ in range(5): os.wait()"
    outcome, said = await run_limited(sandbox, spec(python(sharer)), memory_bytes=160_000_000)
    assert (outcome.exceeded, outcome.exit_code) == (None, 0), said


@in_every_tier
async def test_open_files_are_limited_and_the_limit_cannot_be_raised(sandbox: LocalSandbox, spec: Spec) -> None:
    opens = (
        "import os, resource\nn = 0\n"
        "try: resource.setrlimit(resource.RLIMIT_NOFILE, (4096, 4096)); print('raised')\n"
        "except ValueError: pass\n"
        "try:\n while True: os.dup(0); n += 1\nexcept OSError as e: print(n, e.strerror)"
    )
    outcome, said = await run_limited(sandbox, spec(python(opens)), open_files=128)
    assert (outcome.exit_code, said) == (0, "125 Too many open files\n")


@in_every_tier
async def test_a_file_cannot_grow_past_its_limit(sandbox: LocalSandbox, spec: Spec, tmp_path: Path) -> None:
    outcome, _ = await run_limited(sandbox, spec("exec head -c 100000 /dev/zero > big"), file_bytes=65_536)
    code = outcome.exit_code if outcome.signal is None else 128 + outcome.signal
    assert code == 153
    assert (tmp_path / "big").stat().st_size == 65_536
    outcome, said = await run_limited(sandbox, spec("(ulimit -f unlimited) && echo raised"), file_bytes=65_536)
    assert "raised\n" not in said


async def test_a_commands_own_tmp_has_the_size_it_is_given(tmp_path: Path, spec: Spec) -> None:
    sandbox = make_sandbox("namespace", tmp_path.parent)
    try:
        fill = "head -c 2000000 /dev/zero > /tmp/big; echo $?; wc -c < /tmp/big"
        outcome, said = await run_limited(sandbox, spec(fill), tmp_bytes=1_000_000)
    finally:
        await sandbox.close()
    assert outcome.exit_code == 0
    assert "No space left on device" in said
    assert said.split()[-2] == "1"
    assert int(said.split()[-1]) <= 1_000_000 + resource.getpagesize()


@in_every_tier
async def test_a_command_leaves_no_core_and_is_the_first_to_go_without_memory(
    sandbox: LocalSandbox, spec: Spec
) -> None:
    outcome, said = await run_limited(sandbox, spec("ulimit -Hc; cat /proc/self/oom_score_adj"))
    assert outcome.exit_code == 0
    core, score = map(int, said.split())
    assert core == 0
    assert score >= 500


async def test_no_command_gets_more_than_its_sandbox_gives(spec: Spec) -> None:
    sandbox = LocalSandbox(most=CommandLimits(open_files=2_000, file_bytes=1_000_000))
    try:
        _, said = await run_limited(sandbox, spec("ulimit -Hn; ulimit -Hf; ulimit -n 2001 2>/dev/null; ulimit -n"))
    finally:
        await sandbox.close()
    assert said.split()[:2] == ["2000", "976"]
    assert said.split()[-1] == "2000"


@pytest.fixture
async def lasting(spec: Spec) -> AsyncIterator[LocalSandbox]:
    sandbox = LocalSandbox()
    yield sandbox
    await sandbox.close()


async def test_the_limits_of_one_command_are_not_those_of_the_next(lasting: LocalSandbox, spec: Spec) -> None:
    _, before = await run_limited(lasting, spec("ulimit -n; ulimit -Hn; ulimit -f; ulimit -t"))
    await run_limited(lasting, spec("true"), open_files=128, file_bytes=4_096, cpu_seconds=5)
    _, after = await run_limited(lasting, spec("ulimit -n; ulimit -Hn; ulimit -f; ulimit -t"))
    assert after == before


def test_a_workspace_can_only_tighten_what_the_server_gives() -> None:
    server = CommandLimits(processes=100, file_bytes=1_000_000)
    asked = CommandLimitOptions.model_validate({"processes": 50, "fileBytes": 2_000_000, "cpuSeconds": 7})
    assert server.tightened(asked) == CommandLimits(processes=50, file_bytes=1_000_000, cpu_seconds=7)
    assert server.exceeding(asked) == {"file_bytes": 1_000_000}
    assert server.exceeding(CommandLimitOptions()) == {}


def test_the_share_of_memory_is_of_what_a_container_has(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    whole = memory_share()
    assert whole > 0
    (tmp_path / "limit").write_text("1000000\n")
    (tmp_path / "none").write_text("max\n")
    monkeypatch.setattr(limits_module, "_MEMORY_FILES", [tmp_path / "limit", tmp_path / "none", tmp_path / "missing"])
    assert memory_share() == 750_000
