"""Reading tar, gzipped tar and zip archives that nobody vouches for, in bounded memory.

The readers are our own and small because those of the standard library trust what an archive says: they read a long
name or a list of entries of any length into memory. Nothing here is a path yet: `clean_name` makes one of a name.

Only files and directories are taken. A link, a device, a sparse or encrypted file is an error and not left out: who
sends an archive expects all of it to arrive.
"""

import itertools
import stat
import struct
import zlib
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass
from enum import StrEnum
from typing import Final, Protocol

from app.sandbox.containment import MAX_NAME_BYTES, MAX_PATH_BYTES, TEMPORARY_PREFIX, display_path

ENTRIES_MAX: Final = 100_000
NAMES_MAX_BYTES: Final = 16 * 1_048_576
STEP_BYTES: Final = 262_144
_META_MAX_BYTES: Final = 65_536
_OVERHEAD_BYTES: Final = 256 * 1_048_576
_LATEST_TIME: Final = 1 << 33


class ArchiveFormat(StrEnum):
    TAR = "tar"
    TAR_GZ = "tar.gz"
    ZIP = "zip"


class ArchiveError(Exception):
    """The archive cannot be taken. `code` is stable; `name` is the entry it is about, None for the archive.

    Codes: `malformed_archive, absolute_name, parent_name, duplicate_name, reserved_name, name_too_long, link,
    special_file, unsupported`, and `too_many_entries, too_many_bytes` for what is over a limit.
    """

    def __init__(self, code: str, message: str, name: bytes | None = None) -> None:
        super().__init__(message)
        self.code = code
        self.message = message
        self.name = name

    @property
    def over_limit(self) -> bool:
        return self.code in {"too_many_entries", "too_many_bytes"}


@dataclass(slots=True)
class Member:
    """A file or directory of an archive. `path` is clean: relative, without empty, `.` and `..` components.

    `blocks` is the content and good until the next member is asked for; what is not read of it is skipped. `mode` and
    `modified_ns` are None when the archive does not say.
    """

    path: bytes
    directory: bool
    bytes: int
    mode: int | None
    modified_ns: int | None
    blocks: Iterator[bytes]


@dataclass(frozen=True, slots=True)
class Index:
    """What an archive holds."""

    files: int
    directories: int
    bytes: int


class Source(Protocol):
    """The bytes of an archive: up to `size` of them from an offset, none at the end."""

    def __call__(self, size: int, offset: int, /) -> bytes: ...


def members(
    form: ArchiveFormat, read: Source, size: int, max_bytes: int, check: Callable[[], None]
) -> Generator[Member, None, None]:
    """Yield the members of an archive of `size` bytes, in its order; the root directory itself is left out.

    Args:
        form: the format.
        read: gives the bytes.
        size: how many there are.
        max_bytes: what the contents may have together.
        check: called between steps; what it raises ends the work.

    Raises:
        ArchiveError: at the first thing that is wrong.
    """
    try:
        if form is ArchiveFormat.ZIP:
            yield from _zip_members(read, size, max_bytes, check)
        elif form is ArchiveFormat.TAR:
            yield from _tar_members(_Plain(read, size), max_bytes, check)
        else:
            yield from _tar_members(_Unzipped(read, max_bytes + _OVERHEAD_BYTES, check), max_bytes, check)
    except zlib.error as error:
        raise ArchiveError("malformed_archive", f"the compressed data is damaged: {error}") from None


def check_index(
    form: ArchiveFormat, read: Source, size: int, max_bytes: int, check: Callable[[], None], *, room: int = MAX_PATH_BYTES
) -> Index:
    """Go through a whole archive and return what it holds. Paths may have `room` bytes.

    Raises:
        ArchiveError: an entry that is not taken, two for one path, a file that others lie below, or too much of it.
    """
    # For each path, by its hash, whether it is a file; directories are there whether the archive names them or not.
    known: dict[bytes, bool] = {}
    files = directories = total = names = 0
    for member in members(form, read, size, max_bytes, check):
        names += len(member.path)
        if files + directories >= ENTRIES_MAX or names > NAMES_MAX_BYTES:
            raise ArchiveError(
                "too_many_entries",
                f"an archive may have {ENTRIES_MAX} entries, whose names may have {NAMES_MAX_BYTES} bytes together",
            )
        if len(member.path) > room:
            raise _too_long(member.path)
        _note(known, member)
        if member.directory:
            directories += 1
        else:
            files += 1
            total += member.bytes
    return Index(files, directories, total)


def _note(known: dict[bytes, bool], member: Member) -> None:
    key = _key(member.path)
    before = known.get(key)
    if before is not None and not (member.directory and not before):
        raise ArchiveError("duplicate_name", "the archive has more than one entry of this path", member.path)
    known[key] = not member.directory
    above = member.path
    while b"/" in above:
        above = above.rpartition(b"/")[0]
        key = _key(above)
        before = known.get(key)
        if before:
            raise ArchiveError("duplicate_name", f"{display_path(above)} is a file and a directory", member.path)
        if before is False:
            return
        known[key] = False


def _key(path: bytes) -> bytes:
    # As long as a path is, its key is not. Two strings that collide can be made, and then are two of one path.
    return path if len(path) <= 16 else _digest(path)


def _digest(path: bytes) -> bytes:
    return hashlib.sha256(path).digest()
