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

NOBODY = 65_534
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


@contextlib.contextmanager
def directory_for_everybody() -> Iterator[Path]:
    """A directory that another user can reach: pytest's own are private."""
    directory = Path(tempfile.mkdtemp())
    directory.chmod(0o777)
    try:
        yield directory
    finally:
        shutil.rmtree(directory)
