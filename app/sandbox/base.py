"""Where tools touch the world: the seam that runs commands, and the words both of its sides use."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol

from app.sandbox.account import Account
from app.sandbox.limits import UNLIMITED, CommandLimits

Tier = Literal["namespace", "landlock", "process"]
WatchedLimit = Literal["processes", "cpu_seconds", "memory_bytes"]
"""A limit that the warden watches: who exceeds it is ended."""


@dataclass(frozen=True, slots=True)
class SandboxReport:
    """What the sandbox really is: its tier and what a caller may expect of it and does not get."""

    tier: Tier
    missing: tuple[str, ...] = ()

    def to_json(self) -> dict[str, object]:
        return {"tier": self.tier, "missing": list(self.missing)}


@dataclass(slots=True)
class CommandCounts:
    """Running totals of a sandbox since it was made: commands started, and those ended for a reason of ours."""

    started: int = 0
    killed: dict[str, int] = field(default_factory=lambda: dict.fromkeys(("timeout", "cancelled", "interrupted"), 0))


@dataclass(frozen=True, slots=True)
class ProcessSpec:
    """A command to start: `argv[0]` is an absolute path, `env` is the whole environment, stdin is always /dev/null.

    `root_fd` is an open descriptor of the directory to start in; the sandbox duplicates what it keeps. `readable` are
    absolute paths outside that directory which this command may read where a sandbox holds it. `host_network` gives it
    the network of the machine; without, it has that only where nothing holds it. It runs as `account`; None leaves that
    to the sandbox.
    """

    argv: Sequence[str]
    root_fd: int
    env: Mapping[str, str] = field(default_factory=dict)
    readable: Sequence[str] = ()
    limits: CommandLimits = UNLIMITED
    host_network: bool = False
    account: Account | None = None


@dataclass(frozen=True, slots=True)
class ExitStatus:
    """`exit_code` is None when the process died by `signal` (a number).

    Where the process ran below a wrapper (tier `namespace`) that is told as exit code 128 + `signal`, and `signal` is
    None, unless the wrapper was killed with it.

    `asked` tells whether `terminate` or `kill` reached the command before it had exited: when not, it ended by itself,
    or because it went over a limit that is watched: `exceeded`.
    """

    exit_code: int | None
    signal: int | None
    asked: bool = False
    exceeded: WatchedLimit | None = None


class ProcessHandle(Protocol):
    """A running command. `stdout` and `stderr` are non-blocking read ends owned by the handle."""

    pid: int
    stdout: int
    stderr: int

    async def wait(self) -> ExitStatus:
        """Return once the command's own process has exited; its descendants may still live.

        Raises:
            ToolError: `interrupted` when what supervised the command died or was told to stop; `sandbox_unavailable`
                when its sandbox could not be set up, so that it never began.
        """
        ...

    async def wait_all(self) -> None:
        """Return once neither the command nor any descendant lives.

        What is left after the command's exit is ended at once, unless `terminate` came first: then it has until `kill`.
        """
        ...

    def terminate(self) -> None:
        """SIGTERM to the command's process group; nothing when it is gone."""
        ...

    async def kill(self) -> None:
        """SIGKILL the command and every descendant, whatever it did to escape; return when none lives."""
        ...

    async def close(self) -> None:
        """Kill what is left, reap it and close the descriptors. Idempotent."""
        ...


class Sandbox(Protocol):
    counts: CommandCounts

    @property
    def report(self) -> SandboxReport: ...

    @property
    def running(self) -> int:
        """How many commands were started and have not ended."""
        ...

    async def start(self, spec: ProcessSpec) -> ProcessHandle:
        """Start a command.

        Raises:
            ToolError: `sandbox_unavailable`, `limit_exceeded` (no process, descriptor or memory to be had),
                `not_found` (the root directory does not exist), `unsupported` (no such program).
        """
        ...

    async def close(self) -> None:
        """End every command that still runs and give everything back. Idempotent."""
        ...
