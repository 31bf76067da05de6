"""No descendant survives its command, and no other command is touched."""

import asyncio
import contextlib
import os
import signal as signals
import subprocess
import sys
import uuid
from collections.abc import Callable
from pathlib import Path

import pytest

from app.domain.abort import AbortReason, AbortSignal
from app.errors import ErrorCode, ToolError
from app.sandbox import warden
from app.sandbox.base import ExitStatus, ProcessSpec, Tier
from app.sandbox.local import LocalSandbox
from tests.sandbox.conftest import Ran, Run, link_of, only_root_sees_the_warden
from tests.support import awkward_descendants
from tests.support.processes import children, descriptors, eventually, living, until
from tests.support.sandbox_tiers import TIERS, in_every_tier, require_tier

pytestmark = pytest.mark.anyio

PAYLOAD = str(Path(awkward_descendants.__file__))
KINDS = sorted(awkward_descendants.KINDS)


def awkward(mark: str, then: str, kinds: list[str] = KINDS) -> list[str]:
    return [sys.executable, "-I", "-S", PAYLOAD, mark, *kinds, "--", then]


def up(root: Path) -> int:
    """How many descendants are what they are to be."""
    return len(list(root.glob("*.up")))


def new_mark() -> str:
    return f"mark-{uuid.uuid4().hex}"


def daemon_that_beats(mark: str) -> str:
    """A command with an escaped daemon of its own, which ends well once `go` exists and the daemon still lives then."""
    return (
        f"(setsid env -i /bin/sh -c 'while :; do echo beat >> beats; sleep 0.02; done' {mark} >/dev/null 2>&1 &)\n"
        "until [ -s beats ]; do sleep 0.01; done; touch up; until [ -e go ]; do sleep 0.01; done\n"
        "before=$(wc -c < beats); sleep 0.2; after=$(wc -c < beats)\n"
        "if [ $after -gt $before ]; then echo alive; else echo dead; fi"
    )


async def beside_a_sibling(run: Run, root: Path, command: list[str], **how: object) -> tuple[Ran, Ran]:
    """Run a command while another one with a daemon runs, and let that one end only when the first has ended."""
    mark = new_mark()
    async with asyncio.TaskGroup() as group:
        sibling = group.create_task(run(daemon_that_beats(mark)))  # type: ignore[arg-type]
        await until((root / "up").exists)
        ran = await run(command, **how)  # type: ignore[arg-type]
        assert not sibling.done()
        (root / "go").touch()
    assert living(mark) == []
    return ran, sibling.result()


@in_every_tier
@pytest.mark.parametrize("kind", KINDS)
async def test_no_descendant_survives_exit_0(run: Run, kind: str) -> None:
    mark = new_mark()
    ran = await run(awkward(mark, "exit", [kind]))
    assert living(mark) == []
    assert ran.outcome.exit_code == 0
    assert ran.text() == "begun\nall up\n"


async def test_nothing_survives_exit_0_and_a_sibling_command_is_unharmed(run: Run, tmp_path: Path) -> None:
    mark = new_mark()
    ran, sibling = await beside_a_sibling(run, tmp_path, awkward(mark, "exit"))
    assert living(mark) == []
    assert ran.outcome.exit_code == 0
    assert sibling.text() == "alive\n"


@in_every_tier
async def test_nothing_survives_a_time_out_and_a_sibling_command_is_unharmed(run: Run, tmp_path: Path) -> None:
    mark = new_mark()
    ran, sibling = await beside_a_sibling(run, tmp_path, awkward(mark, "sleep"), timeout_ms=1000)
    assert living(mark) == []
    assert ran.outcome.timed_out
    assert ran.text() == "begun\nall up\n"
    assert ran.outcome.duration_ms < 3000
    assert sibling.text() == "alive\n"


@in_every_tier
async def test_nothing_survives_an_abort_and_a_sibling_command_is_unharmed(run: Run, tmp_path: Path) -> None:
    mark, signal = new_mark(), AbortSignal()

    def abort_when_up(_stream: str, data: bytes) -> None:
        if b"all up" in data:
            signal.abort(AbortReason.CANCELLED)

    ran, sibling = await beside_a_sibling(run, tmp_path, awkward(mark, "sleep"), signal=signal, on_output=abort_when_up)
    assert living(mark) == []
    assert ran.outcome.aborted
    assert ran.outcome.abort_reason is AbortReason.CANCELLED
    assert sibling.text() == "alive\n"


async def test_an_orphan_that_changed_its_limits_is_known_by_its_session(run: Run, tmp_path: Path) -> None:
    mark = new_mark()
    async with asyncio.TaskGroup() as group:
        sibling = group.create_task(
            run(  # type: ignore[arg-type]
                f"(ulimit -SR unlimited; exec -a {mark} sleep 60 &)\n"
                "touch up; until [ -e go ]; do sleep 0.01; done; kill %% 2>/dev/null; echo end"
            )
        )
        await until(lambda: (tmp_path / "up").exists() and len(living(mark)) == 2)
        await run("(sleep 60 &)")
        assert len(living(mark)) == 2  # the shell and its orphan
        (tmp_path / "go").touch()
    assert sibling.result().text() == "end\n"
    assert living(mark) == []


@in_every_tier
async def test_daemons_of_two_commands_end_each_with_its_own(run: Run, tmp_path: Path) -> None:
    marks = [new_mark(), new_mark()]
    command = "(setsid env -i sleep 60 {mark} & ) 2>/dev/null; (exec -a {mark} sleep 60 &) ; touch {name}; until [ -e {name}.go ]; do sleep 0.01; done"
    async with asyncio.TaskGroup() as group:
        tasks = []
        for name, mark in zip("ab", marks, strict=True):
            script = command.format(name=name, mark=mark)
            tasks.append(group.create_task(run(script)))  # type: ignore[arg-type]
        await until(lambda: (tmp_path / "a").exists() and (tmp_path / "b").exists())
        (tmp_path / "a.go").touch()
        await asyncio.wait({tasks[0]}, timeout=10)
        assert living(marks[0]) == []
        assert len(living(marks[1])) >= 2
        (tmp_path / "b.go").touch()
    assert living(marks[1]) == []


@pytest.mark.parametrize("tier", TIERS)
def test_a_killed_service_leaves_no_process(tmp_path: Path, tier: Tier) -> None:
    mark = new_mark()
    program = (
        "import asyncio, os, sys\n"
        "from pathlib import Path\n"
        "from app.domain.abort import AbortSignal\n"
        "from app.sandbox.base import ProcessSpec\n"
        "from app.sandbox.process import run_command\n"
        "from tests.support.sandbox_tiers import make_sandbox\n"
        "async def main():\n"
        "    root = os.open('.', os.O_PATH | os.O_DIRECTORY)\n"
        "    sandbox = make_sandbox(sys.argv[1], Path('..'))\n"
        "    spec = ProcessSpec(sys.argv[2:], root, {'PATH': os.environ['PATH']})\n"
        "    await run_command(sandbox, spec, signal=AbortSignal(), timeout_ms=60000,\n"
        "                      on_output=lambda s, d: os.write(1, d) and None)\n"
        "asyncio.run(main())\n"
    )
    require_tier(tier, tmp_path.parent)
    service = subprocess.Popen(
        [sys.executable, "-c", program, tier, *awkward(mark, "sleep")],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        stdout=subprocess.PIPE,
    )
    with service:
        assert service.stdout is not None
        assert service.stdout.readline() == b"begun\n"
        assert service.stdout.readline() == b"all up\n"
        assert len(living(mark)) >= len(KINDS)
        (warden_pid,) = children(service.pid)
        service.kill()
        service.wait(10)
        assert eventually(lambda: living(mark) == [] and gone(warden_pid), 5)


def gone(pid: int) -> bool:
    """Whether a process has ended; it is reaped when it came to this process, which is a subreaper itself."""
    with contextlib.suppress(ChildProcessError):
        return os.waitpid(pid, os.WNOHANG)[0] == pid
    return not Path(f"/proc/{pid}").exists()


def zombies() -> set[int]:
    """The children of this process that nobody reaped; what other tests left behind among them."""
    return {pid for pid, state in children(os.getpid()).items() if state == "Z"}


async def test_a_killed_warden_leaves_no_process_and_the_next_command_runs(
    run: Run, sandbox: LocalSandbox, tmp_path: Path
) -> None:
    mark = new_mark()
    before = zombies()
    kinds = [kind for kind in KINDS if kind != "without_its_tag"]
    first = asyncio.ensure_future(run(awkward(mark, "sleep", kinds)))
    await until(lambda: up(tmp_path) == len(kinds))
    with pytest.raises(ToolError) as killer:
        await run(f"exec -a {mark} sleep 60 & kill -KILL $PPID; sleep 60")
    with pytest.raises(ToolError) as bystander:
        await first
    assert {killer.value.code, bystander.value.code} == {ErrorCode.INTERRUPTED}
    assert living(mark) == []
    again = await run("echo again")
    assert again.text() == "again\n"
    assert zombies() <= before
    await sandbox.close()


async def test_a_stopped_warden_is_replaced(run: Run) -> None:
    mark = new_mark()
    with pytest.raises(ToolError) as error:
        await run(f"(setsid bash -c 'exec -a {mark} sleep 60' &); kill -STOP $PPID; sleep 60", timeout_ms=1000)
    assert error.value.code is ErrorCode.INTERRUPTED
    assert living(mark) == []
    again = await run("echo again")
    assert again.text() == "again\n"


async def test_a_warden_does_not_mind_polite_signals(run: Run) -> None:
    ran = await run("kill -TERM $PPID; kill -INT $PPID; kill -HUP $PPID; kill -PIPE $PPID; sleep 0.05; echo on")
    assert ran.text() == "on\n"


async def test_a_command_that_exited_before_it_was_told_to_end_has_ended_by_itself(
    sandbox: LocalSandbox, spec: Callable[[str], ProcessSpec]
) -> None:
    handle = await sandbox.start(spec("sleep 0.1; exit 5"))
    pid = link_of(sandbox)._process.pid
    os.kill(pid, signals.SIGSTOP)
    try:
        await until(lambda: children(pid).get(handle.pid) == "Z")
        handle.terminate()
    finally:
        os.kill(pid, signals.SIGCONT)
    await handle.close()
    assert await handle.wait() == ExitStatus(exit_code=5, signal=None, asked=False)


@in_every_tier
async def test_a_start_that_is_cancelled_has_ended_its_command(
    sandbox: LocalSandbox, spec: Callable[[str], ProcessSpec]
) -> None:
    await (await sandbox.start(spec("true"))).close()
    before = descriptors()
    starting = asyncio.ensure_future(sandbox.start(spec("sleep 60")))
    await asyncio.sleep(0)
    starting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await starting
    assert link_of(sandbox)._commands == {}
    assert children(link_of(sandbox)._process.pid) == {}
    assert descriptors() == before


@only_root_sees_the_warden
async def test_the_warden_holds_no_workspace(run: Run, sandbox: LocalSandbox) -> None:
    await run("true")
    assert str(Path(f"/proc/{link_of(sandbox)._process.pid}/cwd").readlink()) == "/"  # noqa: ASYNC240 - /proc


@in_every_tier
async def test_exit_codes_of_parallel_commands_are_each_its_own(run: Run) -> None:
    codes = [7, 3, 0, 41, 2, 255, 1, 99]
    for _ in range(25):
        ran = await asyncio.gather(*(run(f"exit {code}") for code in codes))
        assert [r.outcome.exit_code for r in ran] == codes


async def test_orphans_of_running_commands_are_reaped(run: Run, sandbox: LocalSandbox) -> None:
    ran = await run(
        "for i in 1 2 3 4 5 6 7 8; do (sleep 0.01 &); done; sleep 0.2\n"
        "for p in /proc/[0-9]*; do read -r pid name state parent rest < $p/stat || continue\n"
        '[ "$parent" = $PPID ] && [ "$state" = Z ] && echo zombie; done 2>/dev/null; :'
    )
    assert ran.text() == ""
    assert children(link_of(sandbox)._process.pid) == {}


@in_every_tier
async def test_a_closed_sandbox_leaves_nothing_and_starts_nothing(
    run: Run, sandbox: LocalSandbox, tmp_path: Path
) -> None:
    mark = new_mark()
    running = asyncio.ensure_future(run(awkward(mark, "sleep")))
    await until(lambda: up(tmp_path) == len(KINDS))
    pid = link_of(sandbox)._process.pid
    await sandbox.close()
    with pytest.raises(ToolError) as error:
        await running
    assert error.value.code is ErrorCode.INTERRUPTED
    assert living(mark) == []
    assert gone(pid)
    with pytest.raises(ToolError) as refused:
        await run("echo late")
    assert refused.value.code is ErrorCode.SANDBOX_UNAVAILABLE
    await sandbox.close()


async def test_the_warden_holds_no_secret_and_no_descriptor_of_the_service(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SERVICE_SECRET", "s-8731")
    ran = await run("tr '\\0' '\\n' < /proc/$PPID/environ; env; ls -l /proc/self/fd")
    assert "8731" not in ran.text()
    assert "socket:" not in ran.text()
    numbers = {line.split()[8] for line in ran.text().splitlines() if " -> " in line}
    assert numbers <= {"0", "1", "2", "3"}  # 3 is what ls reads the directory through


def test_a_tag_is_read_from_a_process_that_carries_it() -> None:
    assert warden.read_tag(os.getpid()) is None
    tag = warden.tags_of(4321)[77]
    pid = os.posix_spawn("/bin/bash", ["bash", "-c", f"ulimit -SR {tag}; kill -STOP $$"], {"PATH": "/usr/bin:/bin"})
    try:
        os.waitpid(pid, os.WUNTRACED)
        assert warden.read_tag(pid) == tag
        assert tag not in warden.tags_of(4322)
        os.kill(pid, signals.SIGKILL)
        assert eventually(lambda: children(os.getpid()).get(pid) == "Z")
        assert warden.read_tag(pid) == tag, "a zombie that was not reaped still shows whose it is"
    finally:
        os.kill(pid, signals.SIGKILL)
        os.waitpid(pid, 0)
    assert warden.read_tag(pid) is None
