"""Room kept back on the disk of the records, so that what runs can still be brought to its end when it is full."""

import contextlib
import os
import shutil
from pathlib import Path
from typing import Final

BALLAST_BYTES: Final = 16 * 1024 * 1024


class Ballast:
    """A file of `size` bytes that holds nothing.

    Used by the record writer's thread: `free` when the disk is full, `make` when there may be room again.
    """

    def __init__(self, path: Path, size: int = BALLAST_BYTES) -> None:
        self._path = path
        self._size = size

    def make(self) -> bool:
        """Make the file if it is not there; return whether it is now.

        It is made only where as much again stays free: a disk that would be full with the next write is still full.
        """
        try:
            if self._path.stat().st_size == self._size:
                return True
        except FileNotFoundError:
            pass
        try:
            if shutil.disk_usage(self._path.parent).free < 2 * self._size:
                return False
            descriptor = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError:
            return False
        try:
            self._fill(descriptor)
        except OSError:
            self.free()
            return False
        finally:
            os.close(descriptor)
        return True

    def free(self) -> None:
        """Give the room back."""
        with contextlib.suppress(OSError):
            self._path.unlink()

    def _fill(self, descriptor: int) -> None:
        if hasattr(os, "posix_fallocate"):
            os.posix_fallocate(descriptor, 0, self._size)
            return
        # Not zeros: a file system may leave those out.
        for _ in range(0, self._size, 1024 * 1024):
            os.write(descriptor, os.urandom(1024 * 1024))
