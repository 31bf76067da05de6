"""Whether a sandbox holds: one command that tries what it must not be able to do.

Version numbers and settings say what a kernel ought to do; a file that could not be read says what it does.
"""

import contextlib
import os
import socket
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from app.domain.abort import AbortSignal
from app.domain.events import OutputStream
from app.errors import ToolError
from app.sandbox.account import Account
from app.sandbox.base import ProcessSpec, Sandbox
from app.sandbox.environment import command_environment, find_program
from app.sandbox.process import run_command

_LIMIT_MS: Final = 10_000
_SAID_BYTES: Final = 16_384
_CANARY: Final = b"canary\n"

# Only what the shell does by itself, so that it is the sandbox that is looked at and not what is installed.
_SCRIPT: Final = """
exec 2>/dev/null
echo inside > written && IFS= read -r line < written && [ "$line" = inside ] && echo workspace yes
IFS= read -r line < "$1" && echo read yes
(echo more >> "$1")
(echo new > "$1-new")
(exec 3<> "/dev/tcp/127.0.0.1/$2") && echo network yes
kill -0 "$3" && echo signal yes
while read -r name value _; do
    case $name in
        NoNewPrivs: | Seccomp: | CapEff:) echo "$name $value" ;;
    esac
done < /proc/self/status
IFS= read -r line < "/proc/$3/environ" && echo environment yes
IFS=' ' read -r _ name _ < /proc/1/stat && echo "first $name"
exit 0
"""


async def find_gaps(sandbox: Sandbox, directory: Path, account: Account | None = None) -> list[str]:
    """Return what the sandbox does not hold back although its tier says so, a phrase for each; empty when it holds.

    `directory` is one that no command may see; the probe works in a directory below it. The command runs as `account`,
    None: as the sandbox has it, and what it may not touch is the account's, so that nothing but the sandbox keeps it
    away.
    """
    said: dict[OutputStream, bytearray] = {"stdout": bytearray(), "stderr": bytearray()}

    def keep(stream: OutputStream, data: bytes) -> None:
        said[stream] += data[: _SAID_BYTES - len(said[stream])]

    shell = find_program("bash")
    if shell is None:
        return ["there is no bash"]
    try:
        with _place(directory, account) as (root, canary), _listener() as listener:
            port = listener.getsockname()[1]
            argv = [shell, "-c", _SCRIPT, "probe", str(canary), str(port), str(os.getpid())]
            fd = os.open(root, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
            try:
                spec = ProcessSpec(argv, fd, command_environment(str(root), {}, account), account=account)
                outcome = await run_command(sandbox, spec, signal=AbortSignal(), timeout_ms=_LIMIT_MS, on_output=keep)
            finally:
                os.close(fd)
            facts = dict(line.partition(" ")[::2] for line in said["stdout"].decode("utf-8", "replace").splitlines())
            if outcome.exit_code != 0 or facts.get("workspace") != "yes":
                return [_reason(said["stderr"], "a command could not run, or not write its workspace")]
            # What became of a write is looked at from here: a command may have a file of that name all to itself.
            held = {
                "a file outside the workspace can be read": "read" not in facts,
                "a file outside the workspace can be changed": canary.read_bytes() == _CANARY,
                "a file can be made outside the workspace": not canary.with_name(f"{canary.name}-new").exists(),
                "a port of this machine can be reached": "network" not in facts and not _was_reached(listener),
                **_restrictions(sandbox, facts),
            }
            return [gap for gap, is_held in held.items() if not is_held]
    except ToolError as error:
        return [_reason(said["stderr"], error.message)]
    except OSError as error:
        return [f"the probe could not be made: {error.strerror}"]


def _restrictions(sandbox: Sandbox, facts: dict[str, str]) -> dict[str, bool]:
    report = sandbox.report
    held = {
        "programs can gain privileges": facts.get("NoNewPrivs:") == "1",
        "system calls are not filtered": facts.get("Seccomp:") == "2",
        "a command has capabilities": int(facts.get("CapEff:", "1"), 16) == 0,
    }
    if report.tier == "namespace":
        # The service's number may be that of one of its own processes there.
        held["a command sees the processes of this machine"] = facts.get("first") == "(bwrap)"
    else:
        held["a command can signal the service"] = "signal" not in facts or "signals" in report.missing
        held["a command can read the service's environment"] = "environment" not in facts
    return held


@contextlib.contextmanager
def _place(directory: Path, account: Account | None) -> Iterator[tuple[Path, Path]]:
    with tempfile.TemporaryDirectory(prefix="probe-", dir=directory) as made:
        root, canary = Path(made).resolve() / "root", Path(made).resolve() / "canary"
        root.mkdir(mode=0o700)
        canary.write_bytes(_CANARY)
        if account is not None:
            for path in (canary, root, root.parent):
                os.chown(path, account.uid, account.gid)
        yield root, canary


@contextlib.contextmanager
def _listener() -> Iterator[socket.socket]:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        listener.setblocking(False)
        yield listener


def _was_reached(listener: socket.socket) -> bool:
    try:
        connection, _ = listener.accept()
    except BlockingIOError:
        return False
    connection.close()
    return True


def _reason(stderr: bytearray, otherwise: str) -> str:
    """Return what the wrapper said about its failure, on one line."""
    return " ".join(stderr.decode("utf-8", "replace").split())[:300] or otherwise
