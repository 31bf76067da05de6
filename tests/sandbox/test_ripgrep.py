"""ripgrep as a program: which one, with what around it, and how many at once."""

import asyncio
import os
import sysconfig
from collections.abc import Awaitable, Iterator
from pathlib import Path

import pytest

from app.domain.abort import Aborted, AbortReason, AbortSignal
from app.domain.events import OutputStream
from app.errors import ErrorCode, ToolError
from app.sandbox.local import LocalSandbox
from app.sandbox.process import CommandOutcome
from app.sandbox.ripgrep import Ripgrep
from tests.support.processes import until

pytestmark = pytest.mark.anyio


@pytest.fixture
def here(tmp_path: Path) -> Iterator[int]:
    fd = os.open(tmp_path, os.O_RDONLY | os.O_DIRECTORY)
    yield fd
    os.close(fd)


def script(tmp_path: Path, text: str) -> str:
    """Write a program that stands in for ripgrep and return its path."""
    program = tmp_path / "fake-rg"
    program.write_text(f"#!/bin/sh\n{text}\n")
    program.chmod(0o755)
    return str(program)


async def run(
    ripgrep: Ripgrep, here: int, *arguments: str, workspace: str = "w", signal: AbortSignal | None = None
) -> tuple[CommandOutcome, str]:
    said: list[bytes] = []

    def keep(stream: OutputStream, data: bytes) -> None:
        if stream == "stdout":
            said.append(data)

    outcome = await ripgrep.run(
        arguments,
        directory=here,
        workspace=workspace,
        signal=signal or AbortSignal(),
        timeout_ms=20_000,
        on_output=keep,
    )
    return outcome, b"".join(said).decode()


async def test_the_one_installed_with_this_package_is_taken_before_the_one_on_path(
    sandbox: LocalSandbox, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    on_path = tmp_path / "rg"
    on_path.write_text("#!/bin/sh\n")
    on_path.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    installed = Path(sysconfig.get_path("scripts")) / "rg"
    assert Ripgrep(sandbox).program == str(installed)
    monkeypatch.setattr("sysconfig.get_path", lambda _name: str(tmp_path / "nowhere"))
    assert Ripgrep(sandbox).program == str(on_path)
    assert Ripgrep(sandbox, program="/opt/rg").program == "/opt/rg"


async def test_its_version_is_told(sandbox: LocalSandbox) -> None:
    version = await Ripgrep(sandbox).version()
    assert version is not None
    assert version.split(".")[0] == "15"
    assert await Ripgrep(sandbox, program="/no/such/program").version() is None


async def test_without_one_the_caller_is_told_how_to_get_it(
    sandbox: LocalSandbox, here: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sysconfig.get_path", lambda _name: str(tmp_path))
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ToolError) as missing:
        await run(Ripgrep(sandbox), here, "x")
    assert missing.value.code is ErrorCode.UNSUPPORTED
    assert await Ripgrep(sandbox).version() is None


async def test_arguments_reach_it_as_they_are_and_nothing_of_the_service_does(
    sandbox: LocalSandbox, here: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TOOLCRIB_API_KEY", "secret")
    monkeypatch.setenv("RIPGREP_CONFIG_PATH", "/etc/rgrc")
    ripgrep = Ripgrep(sandbox, program=script(tmp_path, 'printf "<%s>" "$@"; echo; env; ulimit -v; pwd'))
    _, said = await run(ripgrep, here, "a b", "$(x)", "-e", "", "né")
    first, *rest = said.splitlines()
    assert first == "<a b><$(x)><-e><><né>"
    assert not any("secret" in line or "rgrc" in line for line in rest)
    assert "LC_ALL=C.UTF-8" in rest
    assert "1048576" in rest
    assert rest[-1] == str(tmp_path)


async def test_a_workspace_runs_two_and_all_together_four(sandbox: LocalSandbox, here: int, tmp_path: Path) -> None:
    gate = tmp_path / "gate"
    ripgrep = Ripgrep(
        sandbox, program=script(tmp_path, f'touch "$1"; while [ ! -e {gate} ]; do sleep 0.01; done'), per_workspace=2
    )
    calls = [(name, number) for name in ("a", "b", "c") for number in range(3)]

    def started() -> set[str]:
        return {entry.name for entry in tmp_path.iterdir() if entry.name.startswith("run-")}

    async with asyncio.timeout(20), asyncio.TaskGroup() as group:
        for name, number in calls:
            group.create_task(run(ripgrep, here, f"run-{name}{number}", workspace=name))
        await until(lambda: len(started()) == 4)
        assert started() == {"run-a0", "run-a1", "run-b0", "run-b1"}
        gate.touch()
    assert len(started()) == 9


async def aborted(call: Awaitable[object]) -> None:
    with pytest.raises(Aborted):
        await call


async def test_who_waits_for_a_turn_can_be_stopped_and_the_others_get_it(
    sandbox: LocalSandbox, here: int, tmp_path: Path
) -> None:
    gate = tmp_path / "gate"
    program = script(tmp_path, f'touch "$1"; while [ ! -e {gate} ]; do sleep 0.01; done')
    ripgrep = Ripgrep(sandbox, program=program, processes=1, per_workspace=1)
    signal = AbortSignal()
    async with asyncio.timeout(20), asyncio.TaskGroup() as group:
        group.create_task(run(ripgrep, here, "run-1"))
        await until((tmp_path / "run-1").exists)
        stopped = group.create_task(aborted(run(ripgrep, here, "run-2", signal=signal)))
        cancelled = group.create_task(run(ripgrep, here, "run-3"))
        last = group.create_task(run(ripgrep, here, "run-4"))
        await asyncio.sleep(0)
        signal.abort(AbortReason.CANCELLED)
        cancelled.cancel()
        await stopped
        gate.touch()
        outcome, _ = await last
    assert outcome.exit_code == 0
    assert not (tmp_path / "run-2").exists()
    assert not (tmp_path / "run-3").exists()
    # Nothing is left behind that would keep the next one waiting.
    async with asyncio.timeout(20):
        await run(ripgrep, here, "run-5")


async def test_an_exception_of_the_listener_ends_it_at_once(sandbox: LocalSandbox, here: int, tmp_path: Path) -> None:
    ripgrep = Ripgrep(sandbox, program=script(tmp_path, "echo first; exec sleep 60"))

    def refuse(stream: OutputStream, data: bytes) -> None:
        raise LookupError

    async with asyncio.timeout(10):
        with pytest.raises(LookupError):
            await ripgrep.run(
                [], directory=here, workspace="w", signal=AbortSignal(), timeout_ms=60_000, on_output=refuse
            )
