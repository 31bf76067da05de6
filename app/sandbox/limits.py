"""What a command may use at most, and how much of it the kernel holds and how much the warden watches."""

import os
from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Final

from app.domain.workspace import CommandLimitOptions

TMP_BYTES: Final = 1_073_741_824
LEAST_OPEN_FILES: Final = 1_024
"""What the server has to give at least: the warden lives under the same limit."""

_BLOCK_BYTES: Final = 512  # the unit of `ulimit -f` in a POSIX shell
_LIMITED: Final = 'ulimit -n "$1" 2>/dev/null; ulimit -f "$2" 2>/dev/null; shift 2; exec "$@"'

_MEMORY_SHARE: Final = 0.75
# Of a container's own, in both versions of control groups; elsewhere they are not there or say that there is no limit.
_MEMORY_FILES: Final = ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes")


@dataclass(frozen=True, slots=True)
class CommandLimits:
    """Limits of one command with all its descendants; None is no limit.

    `open_files` and `file_bytes` hold for each process, by the kernel. `processes` (threads count too), `cpu_seconds`
    and `memory_bytes` (anonymous and shared memory, not that of mapped files) are sums that the warden looks at ten
    times a second, in every tier. `tmp_bytes` is the size of `/tmp`, where a command has one of its own.
    """

    processes: int | None = None
    open_files: int | None = None
    file_bytes: int | None = None
    cpu_seconds: int | None = None
    memory_bytes: int | None = None
    tmp_bytes: int | None = None

    def tightened(self, asked: CommandLimitOptions) -> "CommandLimits":
        """Return the smaller of each limit and what a workspace asks for."""
        return CommandLimits(*(_smaller(getattr(self, name), getattr(asked, name)) for name in _NAMES))

    def exceeding(self, asked: CommandLimitOptions) -> dict[str, int]:
        """Return the limits of a workspace that are above these, each with the one that holds."""
        found = {}
        for name in _NAMES:
            mine, theirs = getattr(self, name), getattr(asked, name)
            if mine is not None and theirs is not None and theirs > mine:
                found[name] = mine
        return found


UNLIMITED: Final = CommandLimits()
_NAMES: Final = tuple(field.name for field in fields(CommandLimits))


@dataclass(frozen=True, slots=True)
class CommandPolicy:
    """What the server grants commands: their limits, the network of the machine, and when none is started.

    `min_free_bytes` is what the disk under a workspace must have free for a command to be started there.
    """

    limits: CommandLimits = UNLIMITED
    allow_network: bool = False
    min_free_bytes: int = 0


NO_POLICY: Final = CommandPolicy()
"""What holds where no server says anything: no limit, and no network."""


def limited(argv: Sequence[str], limits: CommandLimits, most: CommandLimits) -> Sequence[str]:
    """Return how to start a program under the limits of a process that are tighter than what holds already, `most`.

    A shell sets them: whoever starts a program could not take a hard limit of its own back.
    """
    files = _if_tighter(limits.open_files, most.open_files)
    size = _if_tighter(limits.file_bytes, most.file_bytes)
    if files is None and size is None:
        return argv
    # A word that is no number leaves a limit as it is.
    words = ("-" if files is None else str(files), "-" if size is None else str(size // _BLOCK_BYTES))
    return ("/bin/sh", "-c", _LIMITED, "sh", *words, *argv)


def memory_share() -> int:
    """Return three quarters of the memory this process may use: the machine's, or less in a container."""
    found = [os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")]
    for name in _MEMORY_FILES:
        try:
            text = Path(name).read_text(encoding="ascii").strip()
        except OSError:
            continue
        if text.isdigit():
            found.append(int(text))
    return int(min(found) * _MEMORY_SHARE)


def _if_tighter(limit: int | None, most: int | None) -> int | None:
    return None if limit is None or (most is not None and limit >= most) else limit


def _smaller(first: int | None, second: int | None) -> int | None:
    given = [value for value in (first, second) if value is not None]
    return min(given) if given else None
