"""Locks of files between processes of one host: one holder of a file at a time, whichever process it is in.

A lock is an open file description lock on one byte of a file that all processes share; which byte, a hash of the file's
key says. The kernel frees what a process held when it ends, however it ends, and keeps nothing on disk. Two files that
share a byte wait for each other, which costs time and nothing else: a holder holds one lock and waits for none.

The byte before it is the lock's door. Who wants the lock takes the door first and keeps it until the lock is had, so a
process that changes a file without a pause cannot keep the others out: its next change finds the door closed.
"""

import asyncio
import errno
import fcntl
import hashlib
import os
import struct
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Final

from app.domain.abort import Aborted, AbortSignal
from app.errors import ErrorCode, ToolError
from app.sandbox.containment import MutationKey

_PAUSE_SECONDS: Final = 0.005
_LONGEST_PAUSE_SECONDS: Final = 0.1
_FLOCK: Final = struct.Struct("hhqqi0q")  # l_type, l_whence, l_start, l_len, l_pid, padded to its alignment
_TAKEN: Final = frozenset({errno.EAGAIN, errno.EACCES})


class FileLocks:
    """The locks of one process, on one event loop at a time.

    Never blocks: who finds a lock taken asks again after 5 ms, and who finds its door closed after 5 ms, then after
    twice as long each time, up to 100 ms. So nothing is promised about the order.
    """

    def __init__(self, path: Path) -> None:
        """Open the file of the locks, and make it, closed to other users, when it is missing.

        Raises:
            OSError: it cannot be opened, or its file system knows no locks.
        """
        self._descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        # All locks are of one description, which never stands in its own way: what it holds is kept here.
        self._held: set[int] = set()
        self._closing = False
        try:
            if self._take(0):
                self._give_back(0)
        except BaseException:
            os.close(self._descriptor)
            raise

    def __len__(self) -> int:
        """How many locks this process holds now."""
        return len(self._held)

    async def hold(self, key: MutationKey, signal: AbortSignal) -> Callable[[], None]:
        """Wait for the lock of a file and hold it; return what gives it back, to be called once.

        Raises:
            Aborted: by the signal, while it waited.
            ToolError: `io_error`, the kernel gives no lock.
        """
        place = _place(key)
        door = place - 1
        try:
            await self._wait_for(door, signal, _LONGEST_PAUSE_SECONDS)
            try:
                await self._wait_for(place, signal, _PAUSE_SECONDS)
            finally:
                self._give_back(door)
        except OSError as error:
            raise ToolError(ErrorCode.IO_ERROR, f"the file could not be locked: {error.strerror}") from None
        return lambda: self._give_back(place)

    def close(self) -> None:
        """Take no more locks; those that abandoned threads still hold are kept until these return."""
        if not self._closing:
            self._closing = True
            self._close_when_free()

    async def _wait_for(self, place: int, signal: AbortSignal, longest_pause: float) -> None:
        pause = _PAUSE_SECONDS
        while not self._take(place):
            with suppress(TimeoutError):
                async with asyncio.timeout(pause):
                    raise Aborted(await signal.wait())
            pause = min(2 * pause, longest_pause)

    def _take(self, place: int) -> bool:
        if self._closing:
            raise RuntimeError("the locks are closed")
        if place in self._held:
            return False
        try:
            self._set(fcntl.F_WRLCK, place)
        except OSError as error:
            if error.errno in _TAKEN:
                return False
            raise
        self._held.add(place)
        return True

    def _give_back(self, place: int) -> None:
        # By itself and not with the descriptor: a child between fork and exec has that, too.
        self._set(fcntl.F_UNLCK, place)
        self._held.remove(place)
        if self._closing:
            self._close_when_free()

    def _close_when_free(self) -> None:
        if not self._held:
            os.close(self._descriptor)

    def _set(self, kind: int, place: int) -> None:
        fcntl.fcntl(self._descriptor, fcntl.F_OFD_SETLK, _FLOCK.pack(kind, os.SEEK_SET, place, 1, 0))


def _place(key: MutationKey) -> int:
    """Return the byte of a file's lock, an odd number below 2**63; the same in every process."""
    device, inode, name = key
    text = f"{device}:{inode}:{name}".encode("utf-8", "surrogateescape")
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "big") >> 1 | 1
