"""Locks of files: one holder at a time, in this process and in others, and no lock that outlives its holder."""

import asyncio
import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from app.domain.abort import Aborted, AbortReason, AbortSignal
from app.sandbox import file_locks
from app.sandbox.containment import MutationKey
from app.sandbox.file_locks import FileLocks

pytestmark = pytest.mark.anyio

WAIT_SECONDS = 20.0
KEY: MutationKey = (1, 2, "task.txt")


async def refused(locks: FileLocks, key: MutationKey) -> None:
    """Find that a lock is not to be had for some looks."""
    signal = AbortSignal()
    asyncio.get_running_loop().call_later(0.05, signal.abort, AbortReason.TIMEOUT)
    with pytest.raises(Aborted):
        await asyncio.wait_for(locks.hold(key, signal), WAIT_SECONDS)


async def free(locks: FileLocks, key: MutationKey) -> None:
    """Find that a lock can be had."""
    give_back = await asyncio.wait_for(locks.hold(key, AbortSignal()), WAIT_SECONDS)
    give_back()


def open_fds() -> int:
    return len(os.listdir("/proc/self/fd"))  # noqa: PTH208 - the names are enough


async def test_a_lock_has_one_holder_in_all_that_share_the_file(tmp_path: Path) -> None:
    one, other = FileLocks(tmp_path / "locks"), FileLocks(tmp_path / "locks")
    give_back = await one.hold(KEY, AbortSignal())
    await refused(one, KEY)
    await refused(other, KEY)
    for key in ((1, 2, "task.txt2"), (1, 3, "task.txt"), (2, 2, "task.txt"), (1, 2, "\udcff")):
        await free(one, key)
        await free(other, key)
    give_back()
    assert len(one) == 0
    await free(other, KEY)
    one.close()
    other.close()


async def test_files_that_share_a_byte_wait_for_each_other_in_one_process_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(file_locks, "_place", lambda _key: 2**63 - 1)
    locks = FileLocks(tmp_path / "locks")
    give_back = await locks.hold((1, 1, "a"), AbortSignal())
    waiting = asyncio.ensure_future(locks.hold((1, 1, "b"), AbortSignal()))
    await asyncio.wait([waiting], timeout=0.05)
    assert not waiting.done()
    give_back()
    (await asyncio.wait_for(waiting, WAIT_SECONDS))()
    locks.close()


async def test_neighbouring_bytes_are_given_back_one_by_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(file_locks, "_place", lambda key: 2 * key[1] + 1)
    one, other = FileLocks(tmp_path / "locks"), FileLocks(tmp_path / "locks")
    held = [await one.hold((0, place, ""), AbortSignal()) for place in range(3)]
    held[1]()
    await free(other, (0, 1, ""))
    await refused(other, (0, 0, ""))
    await refused(other, (0, 2, ""))
    held[0]()
    held[2]()
    await free(other, (0, 0, ""))
    one.close()
    other.close()


async def test_only_the_own_user_may_open_the_file(tmp_path: Path) -> None:
    locks = FileLocks(tmp_path / "locks")
    assert stat.S_IMODE((tmp_path / "locks").stat().st_mode) == 0o600
    (tmp_path / "link").symlink_to("locks")
    with pytest.raises(OSError, match="symbolic links"):
        FileLocks(tmp_path / "link")
    locks.close()


def test_a_child_takes_no_lock_along(tmp_path: Path) -> None:
    locks = FileLocks(tmp_path / "locks")
    show = "import pathlib; print([str(fd.resolve()) for fd in pathlib.Path('/proc/self/fd').iterdir()])"
    ran = subprocess.run(
        [sys.executable, "-c", show], check=True, capture_output=True, text=True, timeout=WAIT_SECONDS, close_fds=False
    )
    assert "pipe:" in ran.stdout
    assert "locks" not in ran.stdout
    locks.close()


async def test_what_is_held_when_the_locks_are_closed_is_kept_until_it_is_given_back(tmp_path: Path) -> None:
    one, other = FileLocks(tmp_path / "locks"), FileLocks(tmp_path / "locks")
    before = open_fds()
    give_back = await one.hold(KEY, AbortSignal())
    one.close()
    await refused(other, KEY)
    give_back()
    await free(other, KEY)
    assert open_fds() == before - 1
    with pytest.raises(RuntimeError):
        await one.hold(KEY, AbortSignal())
    other.close()
