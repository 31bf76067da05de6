"""LocalSandbox: what a start answers when it cannot be, and the event loops it is used from."""

import asyncio
import os
import resource
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
import uvloop

from app.domain.abort import AbortSignal
from app.errors import ErrorCode, ToolError
from app.sandbox.base import ProcessSpec
from app.sandbox.local import LocalSandbox
from app.sandbox.process import run_command
from tests.sandbox.conftest import Run, link_of, only_root_sees_the_warden
from tests.support.processes import descriptors, eventually, living

pytestmark = pytest.mark.anyio


async def test_the_report_says_what_is_missing(sandbox: LocalSandbox) -> None:
    missing = ["filesystem", "network", "processes", "seccomp", "limits"]
    if os.geteuid() == 0:
        missing.append("user")
    assert sandbox.report.to_json() == {"tier": "process", "missing": missing}


async def test_a_removed_directory_is_named_and_not_the_shell(sandbox: LocalSandbox, tmp_path: Path) -> None:
    gone = tmp_path / "gone"
    gone.mkdir()
    fd = os.open(gone, os.O_PATH | os.O_DIRECTORY)
    gone.rmdir()
    before = descriptors()
    with pytest.raises(ToolError) as error:
        await sandbox.start(ProcessSpec(["/bin/bash", "-c", "true"], fd, {}))
    os.close(fd)
    assert error.value.code is ErrorCode.NOT_FOUND
    assert "the workspace directory does not exist" in error.value.message
    assert "bash" not in error.value.message
    assert len(descriptors() - before) == 1  # the socket of the warden


@pytest.mark.parametrize("name", ["missing", "no_program", "directory"])
async def test_a_program_that_cannot_run_is_unsupported(run: Run, tmp_path: Path, name: str) -> None:
    (tmp_path / "no_program").write_text("no magic number\n")
    (tmp_path / "no_program").chmod(0o755)
    (tmp_path / "directory").mkdir()
    await run("true")
    before = descriptors()
    with pytest.raises(ToolError) as error:
        await run([str(tmp_path / name)])
    assert error.value.code is ErrorCode.UNSUPPORTED
    assert name in error.value.message
    assert descriptors() == before


@pytest.mark.parametrize("program", ["/nonexistent/python", "/bin/false"])
async def test_a_warden_that_cannot_be_started_makes_the_sandbox_unavailable(
    run: Run, monkeypatch: pytest.MonkeyPatch, program: str
) -> None:
    before = descriptors()
    monkeypatch.setattr(sys, "executable", program)
    with pytest.raises(ToolError) as error:
        await run("true")
    assert error.value.code is ErrorCode.SANDBOX_UNAVAILABLE
    monkeypatch.undo()
    assert (await run("echo on")).text() == "on\n"
    assert len(descriptors() - before) == 1  # the socket of the warden that could


async def test_arguments_too_large_for_the_system_are_told(run: Run) -> None:
    with pytest.raises(ToolError) as error:
        await run(["/bin/bash", "-c", ": " + "x" * 200_000])
    assert error.value.code is ErrorCode.TOO_LARGE


async def test_a_megabyte_of_arguments_and_environment_arrives(
    sandbox: LocalSandbox, root: int, tmp_path: Path
) -> None:
    pieces = ["ä" * 45_000] * 10
    env = {f"V{n}": "x" * 90_000 for n in range(3)} | {"PATH": "/usr/bin:/bin"}
    outcome = await run_command(
        sandbox,
        ProcessSpec(
            ["/bin/bash", "-c", 'printf %s "$@" | wc -c > size; printf %s "$V2" | wc -c >> size', "", *pieces],
            root,
            env,
        ),
        signal=AbortSignal(),
        timeout_ms=20_000,
        on_output=lambda _stream, _data: None,
    )
    assert outcome.exit_code == 0
    assert (tmp_path / "size").read_text().split() == ["900000", "90000"]


async def test_empty_arguments_arrive(run: Run) -> None:
    ran = await run(["/bin/bash", "-c", 'echo $#; printf "[%s]" "$@"', "", "", "a b", ""])
    assert ran.text() == "3\n[][a b][]"


async def test_nul_is_refused(run: Run) -> None:
    with pytest.raises(ToolError) as error:
        await run("echo a\0b")
    assert error.value.code is ErrorCode.INVALID_ARGUMENTS


@contextmanager
def only_free(number: int) -> Iterator[None]:
    """Leave this process so many descriptors to open."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(descriptors()) + 1 + number, hard))
    taken = []
    try:
        with suppress(OSError):
            while True:
                taken.append(os.open("/dev/null", os.O_RDONLY))
        for _ in range(number):
            os.close(taken.pop())
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        for fd in taken:
            os.close(fd)


@pytest.mark.parametrize("number", range(5))
async def test_without_descriptors_a_start_fails_clean_and_later_ones_succeed(run: Run, number: int) -> None:
    await run("true")
    before = descriptors()
    with only_free(number), pytest.raises(ToolError) as error:
        await run("true")
    assert error.value.code is ErrorCode.LIMIT_EXCEEDED
    assert descriptors() == before
    assert (await run("echo on")).text() == "on\n"


@only_root_sees_the_warden
@pytest.mark.parametrize("number", range(3))
async def test_a_warden_without_descriptors_says_so_and_goes_on(run: Run, sandbox: LocalSandbox, number: int) -> None:
    await run("true")
    pid = link_of(sandbox)._process.pid
    theirs = descriptors(pid)
    limits = resource.prlimit(pid, resource.RLIMIT_NOFILE)
    free = [fd for fd in range(100) if fd not in theirs]
    resource.prlimit(pid, resource.RLIMIT_NOFILE, (free[number], limits[1]))
    with pytest.raises(ToolError) as error:
        await run("true")
    assert error.value.code is ErrorCode.LIMIT_EXCEEDED
    resource.prlimit(pid, resource.RLIMIT_NOFILE, limits)
    assert (await run("echo on")).text() == "on\n"
    assert descriptors(pid) == theirs


def outcome_on(sandbox: LocalSandbox, directory: Path, command: str, runner: asyncio.Runner) -> int | None:
    async def once() -> int | None:
        root = os.open(directory, os.O_PATH | os.O_DIRECTORY)
        try:
            ended = await run_command(
                sandbox,
                ProcessSpec(["/bin/bash", "-c", command], root, {"PATH": "/usr/bin:/bin"}),
                signal=AbortSignal(),
                timeout_ms=20_000,
                on_output=lambda _stream, _data: None,
            )
        finally:
            os.close(root)
        return ended.exit_code

    return runner.run(once())


def test_one_event_loop_after_the_other_may_use_a_sandbox(tmp_path: Path) -> None:
    sandbox = LocalSandbox()
    factories: list[Callable[[], asyncio.AbstractEventLoop]] = [
        asyncio.new_event_loop,
        uvloop.new_event_loop,
        asyncio.new_event_loop,
    ]
    for number, factory in enumerate(factories, 1):
        with asyncio.Runner(loop_factory=factory) as runner:
            assert outcome_on(sandbox, tmp_path, f"exit {number}", runner) == number
    with asyncio.Runner() as runner:
        runner.run(sandbox.close())


def test_a_command_that_a_closed_loop_left_behind_is_ended(tmp_path: Path) -> None:
    sandbox = LocalSandbox()
    mark = f"mark-{os.urandom(8).hex()}"
    root = os.open(tmp_path, os.O_PATH | os.O_DIRECTORY)
    before = descriptors()

    async def leave_behind() -> None:
        await sandbox.start(
            ProcessSpec(["/bin/bash", "-c", f"exec -a {mark} sleep 60"], root, {"PATH": "/usr/bin:/bin"})
        )

    with asyncio.Runner() as runner:
        runner.run(leave_behind())
    assert eventually(lambda: len(living(mark)) == 1)
    with asyncio.Runner() as runner:
        assert outcome_on(sandbox, tmp_path, "exit 9", runner) == 9
        assert eventually(lambda: living(mark) == [])
        runner.run(sandbox.close())
    assert descriptors() == before
    os.close(root)


async def test_commands_start_in_their_directory_as_leaders_with_default_signals(run: Run, tmp_path: Path) -> None:
    ran = await run("pwd; grep -E '^Sig(Blk|Ign)' /proc/self/status; [ $$ = $(ps -o sid= -p $$) ] && echo leader")
    directory, blocked, ignored, leader, _ = ran.text().split("\n")
    own_of_libc = 0b11 << 31  # 32 and 33, which glibc's posix_spawn ignores; no program can use them
    assert directory == str(tmp_path)
    assert int(blocked.split()[1], 16) == 0
    assert int(ignored.split()[1], 16) & ~own_of_libc == 0
    assert leader == "leader"
