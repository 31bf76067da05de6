"""A file in the making: it grows step by step under a temporary name, then it is moved into place or dropped.

So what takes long, the arrival of the content, happens beside the file and holds nobody up, and what has not arrived
whole leaves nothing behind.
"""

# ruff: noqa: PTH101 - descriptors, which pathlib does not know

import contextlib
import fcntl
import os
import stat
from collections.abc import Callable, Sequence
from typing import Final

from app.sandbox import disk
from app.sandbox.containment import TEMPORARY_PREFIX, Target, go_on, tool_error_from_oserror
from app.sandbox.files import etag_of_file, move_in
from app.sandbox.held import Held

_FLAGS: Final = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
_SLICE_BYTES: Final = 1_048_576


class Spool:
    """A temporary file, used in the file pool by one thread at a time.

    Args:
        directory: a descriptor of the directory it is made in, on the file system of its destination; taken over, also
            when this fails.
        shown: what messages call the file it is to become.
        quota: what the workspace may hold; None for no bound.

    Raises:
        ToolError: it cannot be made: `permission_denied`, `no_space`, `not_found` (the directory is gone).
    """

    def __init__(self, directory: int, shown: str, quota: disk.Quota | None = None) -> None:
        self.size = 0
        self._quota = quota
        self._shown = shown
        self._directory = directory
        self._name = TEMPORARY_PREFIX + os.urandom(8).hex()
        self._moved = False
        try:
            self._fd = os.open(self._name, _FLAGS, 0o666, dir_fd=directory)
        except OSError as error:
            os.close(directory)
            raise tool_error_from_oserror(error, shown) from None
        self._held = Held(self._release)
        with contextlib.suppress(OSError):  # where there are no locks, its age is all that keeps it
            # It may wait for the network, or for an archive to be unpacked, for longer than a stray is left alone.
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        try:
            # What the umask, or a default ACL, leaves of 0666 is for the file that comes of it; until then it is
            # private.
            self.mode = stat.S_IMODE(os.fstat(self._fd).st_mode) & 0o777
            os.chmod(self._fd, 0o600)
        except OSError as error:
            self.close()
            raise tool_error_from_oserror(error, shown) from None

    def append(self, parts: Sequence[bytes], check: Callable[[], None] = go_on) -> None:
        """Write more of the content; `check` is called between the steps and may raise.

        Raises:
            ToolError: `no_space`, `too_large`, `io_error`.
        """
        with self._held.use():
            for part in parts:
                with disk.taking(self._quota, len(part), check):
                    self._write(memoryview(part), check)
                self.size += len(part)

    def _write(self, view: memoryview, check: Callable[[], None]) -> None:
        while view:
            try:
                written = os.write(self._fd, view[:_SLICE_BYTES])
            except OSError as error:
                raise tool_error_from_oserror(error, self._shown) from None
            view = view[written:]
            check()

    def sync(self) -> None:
        """Put the content on the disk.

        Raises:
            ToolError: `no_space`, `io_error`.
        """
        with self._held.use():
            try:
                os.fsync(self._fd)
            except OSError as error:
                raise tool_error_from_oserror(error, self._shown) from None

    def etag(self, check: Callable[[], None] = go_on) -> str:
        """Return the entity tag that a file with this content will have.

        Raises:
            ToolError: `io_error`.
        """
        with self._held.use():
            try:
                os.lseek(self._fd, 0, os.SEEK_SET)
                return etag_of_file(self._fd, check)
            except OSError as error:
                raise tool_error_from_oserror(error, self._shown) from None

    def read(self, size: int, offset: int) -> bytes:
        """Return up to `size` bytes of the content from `offset`; none at its end.

        Raises:
            ToolError: `io_error`.
        """
        with self._held.use():
            try:
                return os.pread(self._fd, size, offset)
            except OSError as error:
                raise tool_error_from_oserror(error, self._shown) from None

    def move_to(
        self,
        target: Target,
        *,
        commit: Callable[[], None],
        create_only: bool = False,
        expected: os.stat_result | None = None,
        mode: int | None = None,
        modified_ns: int | None = None,
    ) -> bool:
        """Make this the content of the target, as `app.sandbox.files.move_in` does; return whether the file is new.

        Args:
            target: the file; it may lie in another directory of the same file system.
            commit: called right before and may raise to call it off.
            create_only: leave an existing file as it is.
            expected: the status the existing file must have.
            mode: permission bits of a new file, as far as the umask grants them; an existing one keeps its own.
            modified_ns: the modification time to set, in nanoseconds since the epoch.

        Raises:
            ToolError, ParentVanished: as `move_in`.
        """
        with self._held.use():
            if modified_ns is not None:
                os.utime(self._fd, ns=(modified_ns, modified_ns))
            replaced = None if self._quota is None else target.status()
            created = move_in(
                target,
                self._directory,
                self._name,
                self._fd,
                mode=self.mode if mode is None else self._granted(mode),
                commit=commit,
                create_only=create_only,
                expected=expected,
            )
            self._moved = True
            if self._quota is not None and replaced is not None:
                self._quota.give_back(replaced.st_size)
            return created

    def close(self) -> None:
        """Give the descriptors back and, unless it was moved, remove the file. Asking again is fine."""
        self._held.let_go()

    def _granted(self, mode: int) -> int:
        # Who may read a file by the umask may also start it, when it is a program; its owner can always change it.
        return mode & (self.mode | (self.mode & 0o444) >> 2) | 0o600

    def _release(self) -> None:
        if not self._moved:
            with contextlib.suppress(OSError):  # removed by somebody else, or swept later
                os.unlink(self._name, dir_fd=self._directory)
            if self._quota is not None:
                self._quota.give_back(self.size)
        os.close(self._fd)
        os.close(self._directory)
