"""What holds a command: the seam between starting commands and the tiers, and the tier that holds nothing."""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Protocol

from app.sandbox.base import ProcessSpec, SandboxReport

READABLE: Final = ("/usr", "/etc", "/opt")
"""What every confined command may read, besides the workspace: programs, libraries and how they are set up."""

LINKED: Final = ("/bin", "/sbin", "/lib", "/lib32", "/lib64", "/libx32")
"""Directories that are links into /usr on most systems."""


@dataclass(frozen=True, slots=True)
class Launch:
    """What the warden is told to start, and with what.

    `descriptors` go to the warden, which takes them over. `nested`: they are passed to the program, which is a wrapper
    that runs the command below it. `restricted`: they are a Landlock ruleset and a seccomp filter to start the program
    under. `scratch` is the name of a directory to make in the root for the time of the command. `status` is a
    descriptor for this side: what comes from it holds `exit-code` once the command was reached; -1 for none.
    """

    argv: Sequence[str]
    env: Mapping[str, str]
    descriptors: tuple[int, ...] = ()
    nested: bool = False
    restricted: bool = False
    scratch: str | None = None
    status: int = -1


class Confinement(Protocol):
    @property
    def report(self) -> SandboxReport: ...

    def launch(self, spec: ProcessSpec) -> Launch:
        """Return how to start a command so that it is held.

        Raises:
            ToolError: `sandbox_unavailable` when this directory cannot be the root of a held command.
            OSError: no descriptor or memory to be had.
        """
        ...

    def close(self) -> None:
        """Give back what is kept for all commands. Idempotent."""
        ...


class Unconfined:
    """Tier `process`: a command can do what the user it runs as can.

    It can open every file that user can (`filesystem`), use the host's network (`network`), see and signal the user's
    other processes (`processes`) and make any system call (`seccomp`). Its limits are watched (`limits`), as in every
    tier.
    """

    @property
    def report(self) -> SandboxReport:
        return SandboxReport("process", ("filesystem", "network", "processes", "seccomp", "limits"))

    def launch(self, spec: ProcessSpec) -> Launch:
        return Launch(spec.argv, spec.env)

    def close(self) -> None:
        """There is nothing to give back."""


def name_service_files() -> tuple[str, ...]:
    """Return what a command with the machine's network has to read to find hosts by name, besides `/etc`."""
    path = os.path.realpath("/etc/resolv.conf")
    return () if any(is_within(path, directory) for directory in READABLE) else (path,)


def data_descriptor(data: bytes) -> int:
    """Return a descriptor from which exactly these bytes can be read."""
    fd = os.memfd_create("toolcrib", os.MFD_CLOEXEC)
    try:
        os.write(fd, data)
        os.lseek(fd, 0, os.SEEK_SET)
    except OSError:
        os.close(fd)
        raise
    return fd


def directory_of(fd: int) -> str:
    """Return the path of an open directory as it is now."""
    return os.readlink(f"/proc/self/fd/{fd}")  # noqa: PTH115 - what comes of it are strings


def is_within(path: str, directory: str) -> bool:
    """Whether `path` is `directory` or below it; both absolute and without `..`."""
    return path == directory or path.startswith(directory.rstrip("/") + "/")
