"""The system account that owns a workspace: its files are touched and its commands run with the rights of this account.

A service that is started as root acts as others do. For files it does so in threads: Linux keeps groups and file-system
ids for each thread, and a thread whose file-system uid is not 0 has lost every capability that has to do with files, so
the kernel itself refuses what the account may not. The C library would change all threads at once for `setgroups`; that
one is called past it. A service that is not root acts as itself, and nothing here is used.
"""

import contextlib
import ctypes
import errno
import os
import platform
import pwd
import struct
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Final, TypeVar, TypeVarTuple

from app.errors import ConfigurationError

A = TypeVarTuple("A")
R = TypeVar("R")

LAST_ID: Final = 2**32 - 2
"""The largest number of a user or a group; the one after it stands for "leave as it is"."""

NOBODY: Final = 65_534
"""The user who owns nothing, by convention."""

_SETGROUPS: Final = {
    "x86_64": 116, "aarch64": 159, "riscv64": 159, "loongarch64": 159, "ppc64le": 81, "s390x": 206,
}  # fmt: skip
_UNCHANGED: Final = 2**32 - 1
_PR_SET_DUMPABLE: Final = 4

_CAPABILITY_VERSION: Final = 0x2008_0522
_CAPABILITIES: Final = struct.Struct("=6I")
# What root needs: CHOWN to give a new root away, DAC_OVERRIDE to move it into the trash, KILL for what runs in it, and
# SETGID and SETUID to act as its owner.
_NEEDED: Final = {"CAP_CHOWN": 0, "CAP_DAC_OVERRIDE": 1, "CAP_KILL": 5, "CAP_SETGID": 6, "CAP_SETUID": 7}
_TO_SWITCH: Final = 1 << _NEEDED["CAP_SETGID"] | 1 << _NEEDED["CAP_SETUID"]

# Not CDLL, which lets go of the interpreter lock for each call: these take less time than that does.
_libc: Final = ctypes.PyDLL(None, use_errno=True)
_libc.syscall.argtypes = (ctypes.c_long, ctypes.c_long, ctypes.c_void_p)
for _function in (_libc.setfsuid, _libc.setfsgid):
    _function.argtypes = (ctypes.c_uint32,)
    _function.restype = ctypes.c_uint32
_HEADER: Final = ctypes.create_string_buffer(struct.pack("=Ii", _CAPABILITY_VERSION, 0), 8)


@dataclass(frozen=True, slots=True)
class Account:
    """A user and a group by number; the user is never root. It has no further groups.

    Raises:
        ValueError: a number is 0 or none that a user or a group can have.
    """

    uid: int
    gid: int

    def __post_init__(self) -> None:
        if not (0 < self.uid <= LAST_ID and 0 < self.gid <= LAST_ID):
            raise ValueError(f"nothing is done as user {self.uid} and group {self.gid}")


class _Rights(threading.local):
    """Whose file rights this thread has: an account's, or None for those of the process."""

    account: Account | None = None


_rights: Final = _Rights()


def acts_as_others() -> bool:
    """Whether this process is root, and so acts as the accounts that own workspaces."""
    return os.geteuid() == 0


def find_account(name: str) -> Account:
    """Return the account of a user's name, of a number, or of two numbers as `uid:gid`.

    Without a group it is that user's own; `nobody` is 65534 where nobody has that name.

    Raises:
        ValueError: there is no such user, or it is root, or its group is; the message says so.
    """
    first, _, second = name.partition(":")
    try:
        entry = pwd.getpwuid(int(first)) if first.isdigit() else pwd.getpwnam(first)
        uid, group = entry.pw_uid, entry.pw_gid
    except KeyError:
        if not first.isdigit() and first != "nobody":
            raise ValueError(f"there is no user {first}") from None
        uid = group = int(first) if first.isdigit() else NOBODY
    gid = int(second) if second else group
    if uid == 0 or gid == 0:
        whose = "user is root" if uid == 0 else "group is that of root (give both, as uid:gid)"
        raise ValueError(f"nothing is done as root, and its {whose}")
    return Account(uid, gid)


def account_of(uid: int, gid: int) -> Account | None:
    """Return the account to act as on what belongs to this user and group; None when this process acts as itself.

    Raises:
        ValueError: it belongs to root, as whom nothing is done.
    """
    return Account(uid, gid) if acts_as_others() else None


def act_as(account: Account | None) -> None:
    """Give the calling thread the file rights of an account, from here on; None: those of the process again.

    To be called in threads that do nothing but file work.

    Raises:
        OSError: the system does not grant it. What rights the thread has then is not known: it may do nothing before a
            call has succeeded.
    """
    before = _rights.account
    if account == before:
        return
    _rights.account = _NO_ACCOUNT
    if account is None or before is _NO_ACCOUNT:
        _set_capabilities(_permitted())
        _set_ids(os.geteuid(), os.getegid())
        _set_groups(tuple(os.getgroups()))
    if account is not None:
        if before is None or before is _NO_ACCOUNT:
            _set_groups(())
            _set_ids(account.uid, account.gid)
            _set_capabilities(_permitted() & _TO_SWITCH)
        else:
            _set_ids(account.uid, account.gid)
    _rights.account = account


@contextlib.contextmanager
def acting_as(account: Account | None) -> Iterator[None]:
    """Do what is in the block with the file rights of an account, in this thread; None changes nothing."""
    if account is None:
        yield
        return
    before = _rights.account
    try:
        act_as(account)
        yield
    finally:
        act_as(before)


def run_as(account: Account | None, function: Callable[[*A], R], *args: *A) -> R:
    """Call a function with the file rights of an account, as `acting_as`."""
    with acting_as(account):
        return function(*args)


def may_run(program: str, account: Account | None) -> bool:
    """Whether an account may start a program, which includes every directory on the way to it."""
    return run_as(account, lambda: os.access(program, os.X_OK, effective_ids=True))


def reachable(paths: Sequence[str], account: Account | None) -> tuple[str, ...]:
    """Return those of the paths, existing ones or not, whose way an account may pass; looked at in a new thread."""
    if account is None or not paths:
        return tuple(paths)
    found: list[str] = []

    def look() -> None:
        act_as(account)
        for path in paths:
            try:
                os.lstat(path)
            except PermissionError:
                continue
            except OSError:
                pass
            found.append(path)

    thread = threading.Thread(target=look)
    thread.start()
    thread.join()
    return tuple(found)


def obstacle(directory: Path, account: Account) -> Path | None:
    """Return the first directory on the way to this one, itself included, that an account may not pass; None: it may.

    What does not exist is no obstacle.
    """
    with acting_as(account):
        for place in (*reversed(directory.parents), directory):
            try:
                os.stat(f"{place}/.")  # noqa: PTH116 - pathlib drops the dot, which asks to pass the directory
            except PermissionError:
                return place
            except OSError:
                return None
    return None


def require_power_to_act(account: Account) -> None:
    """Find out whether this process, which is root, can act as an account.

    Raises:
        ConfigurationError: it cannot; the message is a sentence.
    """
    if platform.machine() not in _SETGROUPS:
        raise ConfigurationError(
            f"the service was started as root and cannot act as another user on this machine ({platform.machine()}): "
            "start it as an ordinary user."
        )
    permitted = _permitted()
    lacking = [name for name, number in _NEEDED.items() if not permitted >> number & 1]
    if lacking:
        raise ConfigurationError(
            f"the service was started as root without {', '.join(lacking)}, which it needs to act as user "
            f"{account.uid}: grant it, or start the service as an ordinary user."
        )
    problems: list[OSError] = []

    def try_it() -> None:
        try:
            act_as(account)
        except OSError as error:
            problems.append(error)

    thread = threading.Thread(target=try_it)
    thread.start()
    thread.join()
    if problems:
        raise ConfigurationError(
            f"the service was started as root and cannot act as user {account.uid}, group {account.gid} "
            f"({problems[0].strerror}): in a container, these numbers may not be mapped; start it as an ordinary user."
        )


def keep_others_out() -> None:
    """Make this process one whose memory, environment and descriptors no other of its user can look into.

    Commands of tier `process` run as the user of the service, unless that is root.
    """
    _libc.prctl(_PR_SET_DUMPABLE, ctypes.c_ulong(0), ctypes.c_ulong(0), ctypes.c_ulong(0), ctypes.c_ulong(0))


_NO_ACCOUNT: Final = Account(LAST_ID, LAST_ID)
"""Stands for rights that are not known, and never equals what is asked for: it is compared by `is` only."""


def _set_groups(groups: tuple[int, ...]) -> None:
    if _libc.syscall(_SETGROUPS[platform.machine()], len(groups), (ctypes.c_uint32 * len(groups))(*groups)):
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))


def _set_ids(uid: int, gid: int) -> None:
    # Each returns the number from before and says nothing of a failure.
    _libc.setfsgid(gid)
    _libc.setfsuid(uid)
    if (_libc.setfsuid(_UNCHANGED), _libc.setfsgid(_UNCHANGED)) != (uid, gid):
        raise PermissionError(errno.EPERM, "the system does not let this process act as another user")


@cache
def _permitted() -> int:
    """Return the capabilities this process may have, as bits."""
    data = ctypes.create_string_buffer(_CAPABILITIES.size)
    if _libc.capget(_HEADER, data):
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))
    numbers: tuple[int, ...] = _CAPABILITIES.unpack(data.raw)
    return numbers[1] | numbers[4] << 32


def _set_capabilities(effective: int) -> None:
    """Set what this thread may do; what it may have stays, so that it can have it again."""
    if _libc.capset(_HEADER, _capabilities(effective)):
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))


@cache
def _capabilities(effective: int) -> "ctypes.Array[ctypes.c_char]":
    low, permitted = 2**32 - 1, _permitted()
    packed = _CAPABILITIES.pack(effective & low, permitted & low, 0, effective >> 32, permitted >> 32, 0)
    return ctypes.create_string_buffer(packed, len(packed))
