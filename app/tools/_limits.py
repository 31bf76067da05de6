"""How a command's end tells that it ran into a limit, and what to say of it."""

import signal
from typing import Final

from app.errors import ErrorCode
from app.sandbox.base import WatchedLimit
from app.sandbox.limits import CommandLimits
from app.sandbox.process import CommandOutcome

_RAISE: Final = (
    "The workspace's option limits can only lower what the server allows; whoever runs it can raise that "
    "(docs/security.md)."
)
# What the C library says for EMFILE, EFBIG and ENOSPC, and most programs print.
_OPEN_FILES: Final = "Too many open files"
_FILE_SIZE: Final = "File too large"
_NO_SPACE: Final = "No space left on device"


def limit_reached(
    outcome: CommandOutcome, exit_code: int | None, limits: CommandLimits, stderr: str
) -> tuple[ErrorCode, str] | None:
    """Return the code and the text for a command that failed at a limit; None for any other end.

    A limit that is watched names itself. One that the kernel holds is told to the program alone, by a signal or an
    error, so this goes by the exit code of the signal, and else by the error's text at the end of stderr.
    `limits.tmp_bytes` is None where a command has no `/tmp` of its own.
    """
    if outcome.exceeded is not None:
        return ErrorCode.LIMIT_EXCEEDED, _watched(outcome.exceeded, limits)
    code = f"Command exited with code {exit_code}"
    if limits.file_bytes is not None and (exit_code == 128 + signal.SIGXFSZ or _FILE_SIZE in stderr):
        text = (
            f"{code}: a file would have grown past {limits.file_bytes} bytes, the limit for one file. Write less or "
            f"several files. {_RAISE}"
        )
        return ErrorCode.LIMIT_EXCEEDED, text
    if limits.open_files is not None and _OPEN_FILES in stderr:
        text = (
            f"{code}: a process may have {limits.open_files} files open and wanted more. Close files earlier, or open "
            f"fewer at a time. {_RAISE}"
        )
        return ErrorCode.LIMIT_EXCEEDED, text
    if _NO_SPACE in stderr:
        tmp = (
            "" if limits.tmp_bytes is None else f", or in the command's own /tmp, which holds {limits.tmp_bytes} bytes"
        )
        text = (
            f"{code}: there was no space left on the disk{tmp}. Remove files that are not needed; temporary files "
            "larger than /tmp may go into the workspace."
        )
        return ErrorCode.NO_SPACE, text
    return None


def _watched(limit: WatchedLimit, limits: CommandLimits) -> str:
    match limit:
        case "processes":
            what = f"had more than {limits.processes} processes and threads at once. Run fewer side by side"
        case "cpu_seconds":
            what = f"used more than {limits.cpu_seconds} seconds of processor time. Do the work in several commands"
        case "memory_bytes":
            what = f"had more than {limits.memory_bytes} bytes of memory. Work on less data at a time"
    return f"Command stopped: it {what}. {_RAISE}"
