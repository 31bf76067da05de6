"""The disk under workspaces: what must be free before a command starts there, and how much a workspace may hold.

How much a workspace holds is found by looking at every file in it, which takes some 40 ms for ten thousand. So it is
looked up once, and from then on the service counts what it writes itself. What commands write and remove is seen by
looking again: after a command, but only when that has not just been done, so that looking takes at most a small share
of the time.
"""

import os
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Generator
from contextlib import AbstractContextManager, closing, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Final

from app.errors import ErrorCode, ToolError
from app.sandbox.containment import Root, go_on
from app.sandbox.files import Descent, Lost

SHARE: Final = 20
"""How many times as long as a look took the next one is put off at least, unless something would be refused."""

_SOON_SHARE: Final = 4
_ATTEMPTS: Final = 3
_MOST_ENTRIES: Final = 5_000_000
_KNOWN: Final = 4_096
_BLOCK_BYTES: Final = 512
_OPEN: Final = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC


def require_free(directory: int, least: int) -> None:
    """Check that the file system of an open directory has room for more.

    Raises:
        ToolError: `no_space`: it has less than `least` bytes free for the user this process runs as.
    """
    if not least:
        return
    try:
        status = os.fstatvfs(directory)
    except OSError:
        return  # one that does not tell is no reason to refuse
    free = status.f_bavail * status.f_frsize
    if free < least:
        raise ToolError(
            ErrorCode.NO_SPACE,
            f"the disk under the workspace has {free} bytes free, and no command runs below {least}; delete files over "
            "the files API or write less into them, or have the disk enlarged",
            {"freeBytes": free, "minFreeBytes": least},
        )


def measure(directory: int, check: Callable[[], None] = go_on) -> int:
    """Return how many bytes an open directory takes on its disk, with everything in it.

    Links are not followed, other file systems not entered, a file with several names counts once, and what cannot be
    read does not count.
    """
    found = 0
    for _ in range(_ATTEMPTS):
        start = os.open(b".", _OPEN, dir_fd=directory)
        with closing(Descent(start)) as descent:
            try:
                return _sum(descent, check)
            except Lost as lost:  # the tree was moved meanwhile
                found = max(found, lost.args[0] if lost.args else 0)
    return found


def taking(quota: "Quota | None", more: int, check: Callable[[], None] = go_on) -> AbstractContextManager[None]:
    """Write `more` bytes within the block, as `Quota.taking`; nothing is counted where there is no quota."""
    return nullcontext() if quota is None else quota.taking(more, check)


def _sum(descent: Descent, check: Callable[[], None]) -> int:
    total = 0
    entries = 0
    linked: set[int] = set()

    def visit(entry: os.DirEntry[str], _directory: int) -> None:
        nonlocal total, entries
        entries += 1
        try:
            status = entry.stat(follow_symlinks=False)
        except OSError:
            return
        if status.st_nlink > 1:
            if status.st_ino in linked:
                return
            linked.add(status.st_ino)
        total += status.st_blocks * _BLOCK_BYTES

    pending = [descent.scan(visit, check)]
    while pending and entries < _MOST_ENTRIES:
        if pending[-1]:
            try:
                entered = descent.enter(pending[-1].pop())
            except OSError:
                entered = False
            if entered:
                entries += 1
                total += os.fstat(descent.fd).st_blocks * _BLOCK_BYTES
                pending.append(descent.scan(visit, check))
        else:
            pending.pop()
            if pending:
                try:
                    descent.leave()
                except Lost:
                    raise Lost(total) from None
    return total


@dataclass(slots=True)
class _Known:
    """What is known of one workspace.

    `pending` is being written. `outdated`: something was changed by others than the service itself.
    """

    used: int = 0
    pending: int = 0
    measured_at: float = float("-inf")
    took: float = 0.0
    outdated: bool = True
    measuring: bool = False


class DiskUsage:
    """How much workspaces hold, by the identity of their directories; shared by everything that writes into them.

    `most` is what a managed workspace may hold, None for no bound.
    """

    def __init__(self, most: int | None = None) -> None:
        self.most = most
        self._lock = threading.Lock()
        self._known: OrderedDict[tuple[int, int], _Known] = OrderedDict()

    def quota(self, root: str, identity: tuple[int, int], *, managed: bool, asked: int | None) -> "Quota | None":
        """Return the quota of a workspace: the server's for managed ones, or less when its option `asked` says so."""
        most = self.bound(managed=managed, asked=asked)
        return None if most is None else Quota(self, root, identity, most)

    def held(self, identity: tuple[int, int]) -> int | None:
        """Return how many bytes a workspace held when that was last looked up or counted; None when it never was."""
        with self._lock:
            known = self._known.get(identity)
            return None if known is None or known.measured_at == float("-inf") else known.used + known.pending

    def bound(self, *, managed: bool, asked: int | None) -> int | None:
        """Return what a workspace may hold; None for as much as there is room for."""
        bounds = [bound for bound in (self.most if managed else None, asked) if bound is not None]
        return min(bounds, default=None)

    def of(self, identity: tuple[int, int]) -> _Known:
        """Return what is known of a workspace, to be looked at under `lock`."""
        known = self._known.get(identity)
        if known is None:
            known = self._known[identity] = _Known()
            if len(self._known) > _KNOWN:
                self._known.popitem(last=False)
        return known

    @property
    def lock(self) -> threading.Lock:
        return self._lock


class Quota:
    """What one workspace may hold: `most` bytes on its disk. Its methods block; any number of threads may call them."""

    def __init__(self, usage: DiskUsage, root: str, identity: tuple[int, int], most: int) -> None:
        self.most = most
        self._usage = usage
        self._root = root
        self._identity = identity

    @contextmanager
    def taking(self, more: int, check: Callable[[], None] = go_on) -> Generator[None, None, None]:
        """Write `more` bytes within the block; less than none is what the workspace gets smaller by.

        Raises:
            ToolError: `no_space`: they do not fit; nothing was written.
        """
        used = self._look(SHARE, check)
        if more > 0 and used + more > self.most:
            used = self._look(_SOON_SHARE, check, in_doubt=True)
        with self._usage.lock:
            known = self._usage.of(self._identity)
            fits = more <= 0 or known.used + known.pending + more <= self.most
            if fits:
                known.pending += max(0, more)
        if not fits:
            raise ToolError(
                ErrorCode.NO_SPACE,
                f"the workspace holds {used} bytes and may hold {self.most}: {more} more do not fit. Nothing was "
                "changed; delete files first or write less into them",
                {"usedBytes": used, "maxBytes": self.most},
            )
        written = False
        try:
            yield
            written = True
        finally:
            with self._usage.lock:
                known.pending -= max(0, more)
                if written:
                    known.used = max(0, known.used + more)

    def give_back(self, less: int) -> None:
        """Count `less` bytes less: they were removed."""
        with self._usage.lock:
            known = self._usage.of(self._identity)
            known.used = max(0, known.used - less)

    def require(self, check: Callable[[], None] = go_on, *, running: bool = False) -> None:
        """Check before a command, or while it is `running`, that the workspace does not hold more than it may.

        Raises:
            ToolError: `no_space`.
        """
        if self._look(SHARE, check, in_doubt=running) <= self.most:
            return
        used = self._look(_SOON_SHARE, check, in_doubt=True)
        if used <= self.most:
            return
        raise ToolError(
            ErrorCode.NO_SPACE,
            f"the workspace holds {used} bytes and may hold {self.most}, and no command runs until it holds less: "
            "delete files over the files API or write less into them",
            {"usedBytes": used, "maxBytes": self.most},
        )

    def outdate(self) -> None:
        """Note that something other than the service's own writing changed the workspace."""
        with self._usage.lock:
            self._usage.of(self._identity).outdated = True

    def _look(self, share: int, check: Callable[[], None], *, in_doubt: bool = False) -> int:
        """Return how much there is; measured again when that is outdated, or `in_doubt`, and was not just done."""
        with self._usage.lock:
            known = self._usage.of(self._identity)
            due = time.monotonic() >= known.measured_at + share * known.took
            if known.measuring or not ((known.outdated or in_doubt) and due):
                return known.used
            known.measuring, known.outdated = True, False
        started = time.monotonic()
        try:
            with Root.open(self._root, self._identity) as root:
                measured = measure(root.fd, check)
        except BaseException:
            with self._usage.lock:
                known.measuring, known.outdated = False, True
            raise
        with self._usage.lock:
            known.used = measured
            known.measured_at = time.monotonic()
            known.took = known.measured_at - started
            known.measuring = False
            return known.used
