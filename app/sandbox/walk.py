"""Walking a directory tree in order, on descriptors: links are not followed, other file systems not entered.

The order is that of paths compared component by component as bytes: a directory comes before what is in it, and that
before the directory's next sibling. A walk holds one or two descriptors whatever the depth and a bounded number of
entries whatever the size of a directory; one with more entries than a page is read again for each further page.
"""

import os
from collections.abc import Callable, Generator
from dataclasses import dataclass, field
from typing import Final, Literal, Protocol, TypeAlias

Kind: TypeAlias = Literal["file", "directory", "symlink", "other"]

PAGE_ENTRIES: Final = 10_000
_CHECK_EVERY: Final = 1_000
_OPEN_DIRECTORY: Final = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


class NotEntered(OSError):
    """A directory that the walk stays out of for a reason of its own; `strerror` says which."""


@dataclass(slots=True)
class Entry:
    """What a walk has come to.

    `path` is relative to the start and, like `name`, decoded as file names are (`os.fsdecode`). `directory` is a
    descriptor of the directory the entry is in, good until the walk goes on. `problem` is why a directory that was to
    be entered is not; such a directory is told even when it is not `shown`.
    """

    path: str
    name: str
    kind: Kind
    directory: int
    shown: bool
    problem: OSError | None = None


class Selection(Protocol):
    """What a walk shows and where it goes. Its methods are called in the order of the walk."""

    def enter(self, path: str) -> Callable[[str], object]:
        """The walk has entered a directory, the start first (as the empty path), and is about to read it.

        What is returned is called with the name of each entry that is no directory and tells, by a true value, whether
        it may matter; it has to be quick. Directories always may.
        """
        ...

    def read(self, directory: int, count: int, noticed: frozenset[str]) -> None:
        """The current directory has been read to its end.

        `count` is how many of its entries may matter, `noticed` are the names in it that the walk looks for.
        """
        ...

    def choose(self, path: str, name: str, kind: Kind) -> tuple[bool, bool]:
        """Return whether to show an entry, and whether to enter it, which only goes for a directory."""
        ...

    def leave(self) -> None:
        """The walk has left the current directory; the one above it is current again."""
        ...


def walk(
    start: int,
    selection: Selection,
    *,
    check: Callable[[], None],
    notice: frozenset[str] = frozenset(),
    page_entries: int = PAGE_ENTRIES,
) -> Generator[Entry, None, None]:
    """Yield what `selection` shows of the tree below an open directory, in order. Close it when it is not used up.

    Args:
        start: the directory, open for reading; it stays the caller's.
        selection: asked about everything.
        check: called between steps; what it raises ends the walk.
        notice: names whose presence in a directory is told to `selection.read`.
        page_entries: how many entries are held at once.

    Raises:
        OSError: the start cannot be read.
    """
    place = _Place(start)
    try:
        pages = [_Pages("", page_entries, selection.enter(""))]
        while pages:
            current = pages[-1]
            found = current.next()
            if found is None:
                if current.exhausted:
                    pages.pop()
                    selection.leave()
                    if pages and not place.leave():
                        # What was around has been moved or removed: go on with the next directory that is still there.
                        while pages and not place.reopen(len(pages) - 1):
                            pages.pop()
                            selection.leave()
                    continue
                check()
                first = current.read(place.fd, check, notice)
                if first is not None:
                    selection.read(place.fd, *first)
                continue
            name, kind = found
            path = current.prefix + name
            show, enter = selection.choose(path, name, kind)
            entry = Entry(path, name, kind, place.fd, show)
            opened: _Level | None = None
            if enter and kind == "directory":
                try:
                    opened = place.open(name)
                except FileNotFoundError:
                    continue
                except OSError as error:
                    entry.problem = error
            if show or entry.problem is not None:
                try:
                    yield entry
                except BaseException:
                    if opened is not None:
                        os.close(opened.fd)
                    raise
            if opened is not None:
                place.enter(opened)
                pages.append(_Pages(path + "/", page_entries, selection.enter(path)))
    finally:
        place.close()


class _Pages:
    """The wanted entries of one directory, in order, some at a time."""

    def __init__(self, prefix: str, size: int, wants: Callable[[str], object]) -> None:
        self.prefix = prefix
        self._wants = wants
        self.exhausted = False
        self._size = size
        self._entries: list[tuple[bytes, str, Kind]] = []
        self._position = 0
        self._after: bytes | None = None
        self._more = True

    def next(self) -> tuple[str, Kind] | None:
        """Return the next entry; None when there is none in hand."""
        if self._position < len(self._entries):
            _, name, kind = self._entries[self._position]
            self._position += 1
            return name, kind
        self.exhausted = not self._more
        return None

    def read(self, fd: int, check: Callable[[], None], notice: frozenset[str]) -> tuple[int, frozenset[str]] | None:
        """Read the next page. Return, the first time only, how many entries there are and which names of `notice`."""
        after = self._entries[-1][0] if self._entries else None
        first = self._after is None and after is None
        self._after = after or self._after
        self._more = False
        kept: list[tuple[bytes, str, Kind]] = []
        noticed: set[str] = set()
        wanted = 0
        bound: bytes | None = None
        wants = self._wants
        full = 2 * self._size
        try:
            with os.scandir(fd) as entries:
                for count, entry in enumerate(entries, 1):
                    if count % _CHECK_EVERY == 0:
                        check()
                    name = entry.name
                    if name in notice:
                        noticed.add(name)
                    is_directory = entry.is_dir(follow_symlinks=False)
                    if not (is_directory or wants(name)):
                        continue
                    wanted += 1
                    key = os.fsencode(name)
                    if (self._after is not None and key <= self._after) or (bound is not None and key > bound):
                        continue
                    kept.append((key, name, "directory" if is_directory else _kind(entry)))
                    if len(kept) >= full:
                        kept.sort()
                        del kept[self._size :]
                        bound = kept[-1][0]
                        self._more = True
        except OSError:
            if not self.prefix and first:
                raise
            # Removed, or no longer to be read, since it was opened: what is known of it is all there is.
        kept.sort()
        if len(kept) > self._size:
            del kept[self._size :]
            self._more = True
        self._entries = kept
        self._position = 0
        return (wanted, frozenset(noticed)) if first else None


def _kind(entry: os.DirEntry[str]) -> Kind:
    if entry.is_file(follow_symlinks=False):
        return "file"
    return "symlink" if entry.is_symlink() else "other"


@dataclass(slots=True)
class _Level:
    """A directory on the way from the start; `fd` is -1 once the walk has gone deeper."""

    name: str
    identity: tuple[int, int]
    fd: int


@dataclass(slots=True)
class _Place:
    """Where a walk is: the way there, and a descriptor of its end."""

    start: int
    _levels: list[_Level] = field(init=False)
    _around: set[tuple[int, int]] = field(init=False)

    def __post_init__(self) -> None:
        fd = os.dup(self.start)
        identity = _identity(fd)
        self._levels = [_Level("", identity, fd)]
        self._around = {identity}

    @property
    def fd(self) -> int:
        return self._levels[-1].fd

    def open(self, name: str) -> _Level:
        """Open a directory in the current one.

        Raises:
            NotEntered: it is another file system's, or one the walk is in already.
            OSError: it cannot be opened.
        """
        fd = os.open(name, _OPEN_DIRECTORY, dir_fd=self.fd)
        identity = _identity(fd)
        if identity[0] != self._levels[0].identity[0]:
            os.close(fd)
            raise NotEntered(0, "another file system")
        if identity in self._around:
            os.close(fd)
            raise NotEntered(0, "a loop")
        return _Level(name, identity, fd)

    def enter(self, level: _Level) -> None:
        """Go down into a directory that `open` gave."""
        _close(self._levels[-1])
        self._levels.append(level)
        self._around.add(level.identity)

    def leave(self) -> bool:
        """Go up one level; False when that is not where the walk came from, and the place is to be found again."""
        left = self._levels.pop()
        self._around.discard(left.identity)
        above = self._levels[-1]
        try:
            # A moved directory has another parent, which may lie outside: only the known one will do.
            above.fd = os.open(b"..", _OPEN_DIRECTORY, dir_fd=left.fd)
        except OSError:
            above.fd = -1
        finally:
            _close(left)
        if above.fd >= 0 and _identity(above.fd) != above.identity:
            _close(above)
        return above.fd >= 0

    def reopen(self, depth: int) -> bool:
        """Find the level `depth` again from the start by its names; False when it is no longer there."""
        while len(self._levels) > depth + 1:
            left = self._levels.pop()
            self._around.discard(left.identity)
            _close(left)
        fd = -1
        for name in (b".", *(os.fsencode(level.name) for level in self._levels[1:])):
            above = fd
            try:
                fd = os.open(name, _OPEN_DIRECTORY, dir_fd=self.start if above < 0 else above)
            except OSError:
                return False
            finally:
                if above >= 0:
                    os.close(above)
        target = self._levels[-1]
        if _identity(fd) != target.identity:
            os.close(fd)
            return False
        target.fd = fd
        return True

    def close(self) -> None:
        for level in self._levels:
            _close(level)


def _identity(fd: int) -> tuple[int, int]:
    status = os.fstat(fd)
    return status.st_dev, status.st_ino


def _close(level: _Level) -> None:
    if level.fd >= 0:
        os.close(level.fd)
        level.fd = -1
