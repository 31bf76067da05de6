"""What root needs to see what an ordinary user would: another user's rights on files, in a directory of both."""

import contextlib
import ctypes
import os
import platform
import shutil
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from app.sandbox.account import Account, acting_as

NOBODY = 65_534
ACCOUNT = Account(NOBODY, NOBODY) if os.geteuid() == 0 else None
"""The account of workspaces that a service makes which is started by these tests; None: the one that runs them."""
_WAIT_SECONDS = 20
_SYSTEM_CALLS = {"x86_64": (116, 123, 122), "aarch64": (159, 152, 151)}


def with_file_rights_of_nobody(work: Callable[[], None]) -> None:
    """Run `work` in a thread that has the file rights of nobody, which the kernel keeps per thread.

    Threads that it starts have them too; programs that it starts do not.
    """
    numbers = _SYSTEM_CALLS.get(platform.machine())
    if os.geteuid() != 0 or numbers is None:
        pytest.skip("only root can take the file rights of another user, by system calls whose numbers are known")
    setgroups, setfsgid, setfsuid = numbers
    problems: list[BaseException] = []

    def run() -> None:
        syscall = ctypes.CDLL(None, use_errno=True).syscall
        syscall(setgroups, 0, None)
        syscall(setfsgid, NOBODY)
        syscall(setfsuid, NOBODY)
        try:
            work()
        except BaseException as error:  # noqa: BLE001 - raised again below
            problems.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join(_WAIT_SECONDS)
    assert not thread.is_alive()
    for problem in problems:
        raise problem


def let_others_pass(factory: pytest.TempPathFactory) -> pytest.TempPathFactory:
    """Let other users pass through the temporary directories of tests that run as root, which pytest keeps to root.

    A service that is root acts as `nobody`, who has to reach what is its own in there.
    """
    if os.geteuid() != 0:
        return factory
    base = factory.getbasetemp()
    for directory in (base, *base.parents):
        if directory.stat().st_uid == 0 and not directory.stat().st_mode & 0o001:
            directory.chmod(directory.stat().st_mode | 0o011)
    make = factory.mktemp

    def mktemp(basename: str, numbered: bool = True) -> Path:
        made = make(basename, numbered)
        made.chmod(0o711)
        return made

    factory.mktemp = mktemp  # type: ignore[method-assign]
    return factory


def as_account() -> contextlib.AbstractContextManager[None]:
    """Do file work in this thread as a command of a workspace would."""
    return acting_as(ACCOUNT)


def give(*paths: Path) -> None:
    """Give files and directories, and what is in them, to the user that a service which is root acts as."""
    if os.geteuid() == 0:
        for path in paths:
            for entry in (path, *path.rglob("*")):
                os.chown(entry, NOBODY, NOBODY, follow_symlinks=False)


@contextlib.contextmanager
def directory_for_everybody() -> Iterator[Path]:
    """A directory that another user can reach: pytest's own are private."""
    directory = Path(tempfile.mkdtemp())
    directory.chmod(0o777)
    try:
        yield directory
    finally:
        shutil.rmtree(directory)
