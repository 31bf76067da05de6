"""Commands that have to wait for others: what their callers see, which clocks run, and that no slot is lost."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest

from app.domain.abort import AbortReason, AbortSignal
from app.domain.tool_call import ToolResult
from app.domain.workspace import WorkspaceOptions
from app.errors import ErrorCode, ToolError
from app.sandbox.file_pool import FilePool
from app.sandbox.local import LocalSandbox
from app.sandbox.process_slots import ProcessSlots, SlotUse
from app.tools.base import PartialResult, ToolUpdate
from app.tools.registry import ToolsOptions, create_tool
from tests.support.processes import until

pytestmark = pytest.mark.anyio


class Service:
    """The bash tool in any workspace below a directory, with the slots all share."""

    def __init__(self, directory: Path, slots: ProcessSlots, sandbox: LocalSandbox, files: FilePool) -> None:
        self.directory = directory
        self.slots = slots
        options = WorkspaceOptions.from_json({"bash": {"guard": "off"}})
        self._options = ToolsOptions(options, sandbox=sandbox, files=files, commands=slots)

    async def run(
        self,
        command: str,
        *,
        workspace: str = "a",
        signal: AbortSignal | None = None,
        on_update: Callable[[ToolUpdate], None] | None = None,
        **arguments: Any,
    ) -> ToolResult:
        root = self.directory / workspace
        root.mkdir(exist_ok=True)
        tool = create_tool("bash", str(root), self._options)
        return await tool.execute("c1", {"command": command, **arguments}, signal, on_update)

    def held(self, name: str, **options: Any) -> asyncio.Task[ToolResult]:
        """Start a command that runs until `open`; it makes the file `name` in its workspace when it begins."""
        gate = self.directory / "gate"
        command = f"touch {name}; while [ ! -e {gate} ]; do sleep 0.02; done"
        return asyncio.ensure_future(self.run(command, **options))

    def open(self) -> None:
        (self.directory / "gate").touch()

    def began(self, name: str, workspace: str = "a") -> bool:
        return (self.directory / workspace / name).exists()


@pytest.fixture
async def service(tmp_path: Path) -> AsyncIterator[Service]:
    sandbox, files = LocalSandbox(), FilePool()
    service = Service(tmp_path, ProcessSlots(2, 1), sandbox, files)
    yield service
    service.open()
    assert service.slots.use == SlotUse(0, 0)
    await sandbox.close()
    files.close()


async def failure(running: "asyncio.Task[ToolResult]") -> ToolError:
    with pytest.raises(ToolError) as error:
        await running
    return error.value


async def test_its_own_time_limit_begins_when_it_is_started(service: Service) -> None:
    first = service.held("first")
    await until(lambda: service.began("first"))
    second = asyncio.ensure_future(service.run("echo ran", timeout=30_000))
    await until(lambda: service.slots.use.waiting == 1)
    service.open()
    assert (await first).details["queuedMs"] == 0
    details = (await second).details
    assert details["stdout"] == "ran\n"
    assert details["queuedMs"] > 0
    assert details["timeoutMs"] == 30_000


async def test_the_time_limit_of_the_batch_runs_on_and_nothing_is_started(service: Service) -> None:
    first, signal = service.held("first"), AbortSignal()
    await until(lambda: service.began("first"))
    second = service.held("second", signal=signal)
    await until(lambda: service.slots.use.waiting == 1)
    signal.abort(AbortReason.TIMEOUT)
    error = await failure(second)
    assert (error.code, error.message) == (
        ErrorCode.TIMEOUT,
        "Command stopped: the batch's timeoutMs ran out; it was not started",
    )
    assert error.details["aborted"]
    service.open()
    await first
    assert not service.began("second")


async def test_a_command_that_waits_can_be_cancelled_and_another_workspace_goes_on(service: Service) -> None:
    first, signal = service.held("first"), AbortSignal()
    await until(lambda: service.began("first"))
    second, other = service.held("second", signal=signal), service.held("other", workspace="b")
    await until(lambda: service.began("other", "b"))
    signal.abort(AbortReason.CANCELLED)
    assert (await failure(second)).code is ErrorCode.CANCELLED
    service.open()
    await asyncio.gather(first, other)
    assert not service.began("second")


async def test_of_fifty_and_one_the_one_of_another_workspace_starts_next(service: Service) -> None:
    """Each command writes its name when it begins, so the file has the order of the starts."""
    order = service.directory / "order"
    gate = service.directory / "gate"

    def command(name: str, wait: str = "") -> str:
        return f"echo {name} >> {order}; {wait}"

    def begun() -> list[str]:
        return order.read_text().split() if order.exists() else []

    hold = f"while [ ! -e {gate} ]; do sleep 0.02; done"
    # Two slots: one is kept by a third workspace all the time, so that every start is seen by itself.
    keeper = asyncio.ensure_future(service.run(command("keeper", hold), workspace="c"))
    await until(lambda: begun() == ["keeper"])
    one = service.directory / "one"
    first = asyncio.ensure_future(service.run(command("a0", f"while [ ! -e {one} ]; do sleep 0.02; done")))
    await until(lambda: begun() == ["keeper", "a0"])
    many = [asyncio.ensure_future(service.run(command(f"a{number}"))) for number in range(1, 50)]
    await until(lambda: service.slots.use.waiting == 49)
    other = asyncio.ensure_future(service.run(command("b"), workspace="b"))
    await until(lambda: service.slots.use.waiting == 50)
    one.touch()
    await asyncio.gather(first, other, *many)
    names = begun()
    assert names[2:] == ["b"] + [f"a{number}" for number in range(1, 50)]
    service.open()
    await keeper


async def test_a_long_wait_is_seen_while_it_lasts(service: Service) -> None:
    first = service.held("first")
    await until(lambda: service.began("first"))
    updates: list[ToolUpdate] = []
    second = service.held("second", on_update=updates.append)
    await until(lambda: bool(updates), 20)
    (update,) = updates
    assert isinstance(update, PartialResult)
    assert update.details == {"queued": True}
    assert update.content[0]["text"] == (
        "The command waits for others to end: 1 may run at once in a workspace and 2 in all. Its timeout has not begun."
    )
    service.open()
    await asyncio.gather(first, second)


async def test_whatever_ends_a_command_gives_its_slot_back(service: Service) -> None:
    (service.directory / "a").mkdir()
    for command, options in (
        ("exit 3", {}),
        ("sleep 60", {"timeout": 20}),
        ("kill -9 $$", {}),
        ("cat no-such-file", {}),
        ("true", {"env": {"A=B": "no name"}}),
    ):
        with pytest.raises(ToolError):
            await service.run(command, **options)
        assert service.slots.use == SlotUse(0, 0)
    cancelled = service.held("cancelled")
    await until(lambda: service.began("cancelled"))
    cancelled.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await cancelled
    assert service.slots.use == SlotUse(0, 0)
    assert (await service.run("echo on")).details["stdout"] == "on\n"
