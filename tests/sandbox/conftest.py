"""A sandbox of this host and a directory to run commands in."""

import os
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import pytest

from app.domain.abort import AbortSignal
from app.domain.events import OutputStream
from app.sandbox.base import ProcessSpec
from app.sandbox.environment import command_environment
from app.sandbox.local import LocalSandbox
from app.sandbox.process import CommandOutcome, run_command
from tests.support.sandbox_tiers import make_sandbox

only_root_sees_the_warden = pytest.mark.skipif(
    os.geteuid() != 0, reason="the warden is not dumpable: the kernel shows its descriptors and directory to root alone"
)


def link_of(sandbox: LocalSandbox) -> Any:
    """Return a sandbox's end of its one warden."""
    (link,) = sandbox._links.values()
    return link


@dataclass
class Ran:
    outcome: CommandOutcome
    chunks: list[tuple[OutputStream, bytes]] = field(default_factory=list)

    def text(self, stream: OutputStream = "stdout") -> str:
        return b"".join(data for name, data in self.chunks if name == stream).decode()


class Run(Protocol):
    def __call__(
        self,
        command: str | list[str],
        *,
        signal: AbortSignal | None = None,
        timeout_ms: int = 20_000,
        on_output: Callable[[OutputStream, bytes], Awaitable[None] | None] | None = None,
        **limits: Any,
    ) -> Awaitable[Ran]: ...


@pytest.fixture
async def sandbox(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[LocalSandbox]:
    """A sandbox of tier `process`, or of the tier a test is parametrized with."""
    local = make_sandbox(getattr(request, "param", "process"), tmp_path.parent)
    yield local
    await local.close()


@pytest.fixture
def root(tmp_path: Path) -> Iterator[int]:
    fd = os.open(tmp_path, os.O_PATH | os.O_DIRECTORY)
    yield fd
    os.close(fd)


@pytest.fixture
def spec(root: int, tmp_path: Path) -> Callable[[str | list[str]], ProcessSpec]:
    def make(command: str | list[str]) -> ProcessSpec:
        argv = ["/bin/bash", "-c", command] if isinstance(command, str) else command
        return ProcessSpec(argv, root, command_environment(str(tmp_path), {}))

    return make


@pytest.fixture
def run(sandbox: LocalSandbox, spec: Callable[[str | list[str]], ProcessSpec]) -> Run:
    """Run a command to its end and return its outcome and output."""

    async def call(
        command: str | list[str],
        *,
        signal: AbortSignal | None = None,
        timeout_ms: int = 20_000,
        on_output: Callable[[OutputStream, bytes], Awaitable[None] | None] | None = None,
        **limits: Any,
    ) -> Ran:
        chunks: list[tuple[OutputStream, bytes]] = []

        def keep(stream: OutputStream, data: bytes) -> Awaitable[None] | None:
            chunks.append((stream, data))
            return None if on_output is None else on_output(stream, data)

        outcome = await run_command(
            sandbox,
            spec(command),
            signal=signal or AbortSignal(),
            timeout_ms=timeout_ms,
            on_output=keep,
            **limits,
        )
        return Ran(outcome, chunks)

    return call
