"""Tier `landlock`: a command that may open only some directories, and has no sockets but pairs of its own.

The ruleset is made here for each command, around its root; the warden applies it in the thread that starts the command
(`app.sandbox.warden`). Works where namespaces are forbidden, as in most containers.
"""

import ctypes
import errno
import os
import stat
import struct
from collections.abc import Sequence
from typing import Final

from app.errors import ErrorCode, ToolError
from app.sandbox import seccomp
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
from app.sandbox.containment import TEMPORARY_PREFIX

LEAST_ABI: Final = 3
"""The first that keeps a command from truncating files outside; Linux 6.2."""

_SCOPE_ABI: Final = 6  # keeps signals inside

_CREATE_RULESET, _ADD_RULE = 444, 445  # the same on every architecture
_VERSION_FLAG: Final = 1
_PATH_BENEATH: Final = 1
_RULE: Final = struct.Struct("=Qi")

_EXECUTE, _WRITE_FILE, _READ_FILE, _READ_DIR = (1 << bit for bit in range(4))
_MAKE_CHAR, _MAKE_BLOCK = 1 << 6, 1 << 11
_TRUNCATE, _IOCTL_DEV = 1 << 14, 1 << 15
_OF_FILES: Final = _EXECUTE | _WRITE_FILE | _READ_FILE | _TRUNCATE | _IOCTL_DEV
_READ: Final = _EXECUTE | _READ_FILE | _READ_DIR
_DEVICES: Final = ("/dev/null", "/dev/zero", "/dev/full", "/dev/random", "/dev/urandom", "/dev/tty")


_libc: Final = ctypes.CDLL(None, use_errno=True)


class Landlock:
    """Holds commands by a Landlock ruleset and a seccomp filter.

    A command may read `/usr`, `/etc`, `/opt`, `/proc` and `readable`, use the harmless devices, and write its root.
    Not held back, as Landlock has no say in it: looking at and changing the metadata of files outside (`metadata`: that
    they exist, their modes and times, where the user may change them) and seeing the command lines of other processes
    (`processes`). Before ABI 6 a command can also signal the user's other processes: `signals`.
    """

    def __init__(self, *, readable: Sequence[str] = (), hidden: Sequence[str] = ()) -> None:
        self._abi = abi()
        self._handled = _handled(self._abi)
        self._filters = {
            host_network: seccomp.filter_program(own_namespaces=False, host_network=host_network)
            for host_network in (False, True)
        }
        self._hidden = tuple(hidden)
        self._kept: list[tuple[int, int]] = []
        for path in (*READABLE, *LINKED, *readable):
            self._keep(path, _READ)
        self._keep("/proc", _READ_FILE | _READ_DIR)
        for path in _DEVICES:
            self._keep(path, _READ_FILE | _WRITE_FILE | _TRUNCATE | _IOCTL_DEV)

    @property
    def report(self) -> SandboxReport:
        lacks = ("metadata", "processes", "limits")
        return SandboxReport("landlock", lacks if self._abi >= _SCOPE_ABI else (*lacks, "signals"))

    def launch(self, spec: ProcessSpec) -> Launch:
        root = directory_of(spec.root_fd)
        if root == "/" or any(path != root and is_within(path, root) for path in self._hidden):
            raise ToolError(
                ErrorCode.SANDBOX_UNAVAILABLE,
                "this sandbox cannot hold a command whose root contains the service's data",
            )
        opened = [empty_ruleset(host_network=spec.host_network)]
        try:
            for fd, rights in self._kept:
                _allow(opened[0], fd, rights & self._handled)
            _allow(opened[0], spec.root_fd, self._handled & ~(_MAKE_CHAR | _MAKE_BLOCK))
            for path in (*spec.readable, *(name_service_files() if spec.host_network else ())):
                _allow_reading(opened[0], path)
            opened.append(data_descriptor(self._filters[spec.host_network]))
        except OSError:
            for fd in opened:
                os.close(fd)
            raise
        env, scratch = spec.env, None
        if env.get("TMPDIR") == "/tmp":  # noqa: S108 - which cannot be written here
            scratch = TEMPORARY_PREFIX + os.urandom(8).hex()
            env = {**env, "TMPDIR": f"{root}/{scratch}"}
        return Launch(spec.argv, env, tuple(opened), restricted=True, scratch=scratch)

    def close(self) -> None:
        kept, self._kept = self._kept, []
        for fd, _ in kept:
            os.close(fd)

    def _keep(self, path: str, rights: int) -> None:
        try:
            fd = os.open(path, os.O_PATH | os.O_CLOEXEC)
        except OSError:
            return  # nothing to read there
        self._kept.append((fd, rights if stat.S_ISDIR(os.fstat(fd).st_mode) else rights & _OF_FILES))


def abi() -> int:
    """Return the version of Landlock the kernel offers; 0 for none."""
    try:
        return _call(_CREATE_RULESET, None, 0, _VERSION_FLAG)
    except OSError as error:
        if error.errno in {errno.ENOSYS, errno.EOPNOTSUPP, errno.EPERM}:
            return 0
        raise


def empty_ruleset(*, host_network: bool = False) -> int:
    """Return the descriptor of a ruleset that allows nothing.

    What is handled: access to files; from ABI 4 binding and connecting TCP, unless `host_network`; from ABI 6 abstract
    sockets and signals that lead out. Nothing of the last three is allowed by any rule. Raises OSError.
    """
    version = abi()
    tcp = 0 if host_network else 0b11
    fields = [_handled(version), *([tcp] if version >= 4 else []), *([0b11] if version >= _SCOPE_ABI else [])]
    attributes = struct.pack(f"={len(fields)}Q", *fields)
    return _call(_CREATE_RULESET, attributes, len(attributes), 0)


def _handled(version: int) -> int:
    """Return the rights to files that a ruleset takes away. The first version has 13 of them, the next ones more."""
    return (1 << {0: 0, 1: 13, 2: 14, 3: 15, 4: 15}.get(version, 16)) - 1


def _allow(ruleset: int, fd: int, rights: int) -> None:
    _call(_ADD_RULE, ruleset, _PATH_BENEATH, _RULE.pack(rights, fd), 0)


def _allow_reading(ruleset: int, path: str) -> None:
    try:
        fd = os.open(path, os.O_PATH | os.O_CLOEXEC)
    except (FileNotFoundError, NotADirectoryError, PermissionError):
        return  # the command will be told the same
    try:
        _allow(ruleset, fd, _READ if stat.S_ISDIR(os.fstat(fd).st_mode) else _READ & _OF_FILES)
    finally:
        os.close(fd)


def _call(number: int, *arguments: int | bytes | None) -> int:
    given = [ctypes.c_long(a) if isinstance(a, int) else a for a in arguments]
    result: int = _libc.syscall(ctypes.c_long(number), *given)
    if result < 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))
    return result
