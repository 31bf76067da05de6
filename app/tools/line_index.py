"""Where lines are in large files, remembered from one call to the next.

Going through a file for its lines takes a second per gigabyte or two. What a search passed by is kept, so that the next
page begins near the place where the last one ended. An index belongs to one version of a file: device, inode, size and
both times. A file that changed has none, and is gone through again.
"""

import os
import threading
import time
from array import array
from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Callable
from typing import Final, TypeAlias

INDEXED_FROM_BYTES: Final = 2 * 1_048_576
"""A smaller file is gone through in a millisecond."""

STRIDE_BYTES: Final = 1_048_576
POSITIONS: Final = 4_096
FILES: Final = 64
"""With 16 bytes for a position, all indexes take 4 MiB at most."""

_SETTLED_NS: Final = 2_000_000_000

_Version: TypeAlias = tuple[int, int, int, int, int, str]


class LineIndex:
    """Positions in one version of a file, each with how many line feeds lie before it, at most `positions` of them.

    `total` is the number of lines once somebody has counted them. Threads may share an index.
    """

    def __init__(self, size: int, stride: int = STRIDE_BYTES, positions: int = POSITIONS) -> None:
        self.total: int | None = None
        self._size = size
        self._stride = stride
        self._most = positions
        self._positions = array("Q")
        self._lines = array("Q")
        self._lock = threading.Lock()

    def before(self, lines: int) -> tuple[int, int]:
        """Return the last known position with fewer than `lines` line feeds before it, and their number."""
        with self._lock:
            place = bisect_left(self._lines, lines) - 1
            return (self._positions[place], self._lines[place]) if place >= 0 else (0, 0)

    def note(self, position: int, lines: int) -> None:
        """Remember that `lines` line feeds lie before `position`, when that is worth a place."""
        with self._lock:
            last = self._positions[-1] if self._positions else 0
            if position < last + self._stride or position >= self._size:
                return
            if len(self._positions) >= self._most:
                # A file this large is kept more coarsely rather than in part.
                self._stride *= 2
                self._positions = self._positions[1::2]
                self._lines = self._lines[1::2]
            self._positions.append(position)
            self._lines.append(lines)

    def __len__(self) -> int:
        return len(self._positions)


class LineIndexes:
    """The indexes of the files read last, of at most `files`. Threads share it; nothing has to be given back."""

    def __init__(
        self, files: int = FILES, smallest: int = INDEXED_FROM_BYTES, clock: Callable[[], int] = time.time_ns
    ) -> None:
        self._most = files
        self._smallest = smallest
        self._clock = clock
        self._lock = threading.Lock()
        self._indexes: OrderedDict[_Version, LineIndex] = OrderedDict()

    def of(self, status: os.stat_result, kind: str = "") -> LineIndex | None:
        """Return the index of the version of a file that `status` tells of; None for a file that gets none.

        `kind` keeps apart what is counted differently. A file changed in the last two seconds gets no index: times of
        files are coarse, and another change might not show in them.
        """
        if status.st_size < self._smallest or self._clock() - status.st_ctime_ns < _SETTLED_NS:
            return None
        version = (status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns, kind)
        with self._lock:
            index = self._indexes.get(version)
            if index is None:
                index = self._indexes[version] = LineIndex(status.st_size)
                if len(self._indexes) > self._most:
                    self._indexes.popitem(last=False)
            self._indexes.move_to_end(version)
            return index

    def __len__(self) -> int:
        return len(self._indexes)
