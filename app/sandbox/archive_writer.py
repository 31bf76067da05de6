"""Writing tar, gzipped tar and zip archives of a directory tree, piece by piece and in bounded memory.

Regular files and directories alone: links are not followed and not stored, pipes, sockets and devices are left out, and
so is what lies on other file systems. Owners are not told.
"""

import os
import stat
import struct
import tarfile
import time
import zlib
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import closing
from typing import Final, Protocol

from app.sandbox.archive_reader import ArchiveFormat
from app.sandbox.containment import TEMPORARY_PREFIX
from app.sandbox.walk import Entry, Kind, NotEntered, Selection, walk

PIECE_BYTES: Final = 262_144
"""A file of at most this size is read before anything of it is written, so that its header is right."""
ZIP_INDEX_MAX_BYTES: Final = 16 * 1_048_576
ZIP_NAME_MAX_BYTES: Final = 65_535
_OPEN: Final = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC


class Changed(Exception):
    """A file has become shorter after its header had been written: the archive cannot be finished."""


class Exclusion(Protocol):
    """What is left out below one directory; `below` is the same for a directory in it."""

    def matches(self, name: str, *, is_directory: bool) -> bool: ...

    def below(self, name: str) -> "Exclusion": ...


class Survey:
    """What an archive would hold: how much its index takes as a zip, and what cannot be read."""

    def __init__(self) -> None:
        self.index_bytes = 0
        self.longest_name = 0
        self.unreadable: list[bytes] = []


def survey(start: int, exclusions: Iterable[Exclusion], check: Callable[[], None], most: int = 20) -> Survey:
    """Walk the tree below an open directory as `pack` would, without reading any file.

    Raises:
        OSError: the start cannot be read.
    """
    found = Survey()
    with closing(walk(start, _Packed(exclusions), check=check)) as entries:
        for entry in entries:
            name = os.fsencode(entry.path)
            found.longest_name = max(found.longest_name, len(name) + 1)
            found.index_bytes += _CENTRAL.size + _WIDE_BYTES + len(name) + 1
            if len(found.unreadable) < most and not _readable(entry):
                found.unreadable.append(name)
    return found


def pack(
    start: int, form: ArchiveFormat, exclusions: Iterable[Exclusion], check: Callable[[], None]
) -> Generator[bytes, None, None]:
    """Yield an archive of the tree below an open directory, in pieces of any size. Close it when it is not used up.

    Raises:
        Changed: a file was cut while it was read.
        OSError: a file or the start cannot be read.
    """
    encoder: _Encoder = _Zip() if form is ArchiveFormat.ZIP else _Tar()
    pieces = _pack(start, encoder, exclusions, check)
    with closing(pieces):
        if form is not ArchiveFormat.TAR_GZ:
            yield from pieces
            return
        gzip = zlib.compressobj(wbits=31)
        for piece in pieces:
            if packed := gzip.compress(piece):
                yield packed
        yield gzip.flush()


def _pack(
    start: int, encoder: "_Encoder", exclusions: Iterable[Exclusion], check: Callable[[], None]
) -> Generator[bytes, None, None]:
    with closing(walk(start, _Packed(exclusions), check=check)) as entries:
        for entry in entries:
            check()
            if entry.problem is not None and not isinstance(entry.problem, NotEntered):
                raise entry.problem
            if entry.kind == "directory":
                if (status := _status(entry)) is not None:
                    yield encoder.directory(os.fsencode(entry.path), status)
                continue
            fd = _open(entry)
            if fd is None:
                continue
            try:
                for piece in encoder.file(os.fsencode(entry.path), os.fstat(fd), fd):
                    yield piece
                    check()
            finally:
                os.close(fd)
    yield from encoder.end()


class _Packed(Selection):
    """What an archive holds: everything that is a file or directory and is not excluded."""

    def __init__(self, exclusions: Iterable[Exclusion]) -> None:
        self._start = tuple(exclusions)
        self._places: list[tuple[Exclusion, ...]] = []

    def enter(self, path: str) -> Callable[[str], object]:
        name = path.rpartition("/")[2]
        above = self._places[-1] if self._places else None
        here = self._start if above is None else tuple(place.below(name) for place in above)
        self._places.append(here)
        return lambda name: not self._left_out(name, is_directory=False)

    def read(self, directory: int, count: int, noticed: frozenset[str]) -> None:
        """Nothing to note."""

    def choose(self, path: str, name: str, kind: Kind) -> tuple[bool, bool]:  # noqa: ARG002 - the walk's interface
        if kind == "directory":
            taken = not self._left_out(name, is_directory=True)
            return taken, taken
        return kind == "file", False

    def leave(self) -> None:
        self._places.pop()

    def _left_out(self, name: str, *, is_directory: bool) -> bool:
        if name.startswith(TEMPORARY_PREFIX):
            return True
        return any(place.matches(name, is_directory=is_directory) for place in self._places[-1])


def _readable(entry: Entry) -> bool:
    if entry.problem is not None:
        return isinstance(entry.problem, NotEntered)
    if entry.kind == "directory":
        return True
    try:
        return os.access(entry.name, os.R_OK, dir_fd=entry.directory, effective_ids=True, follow_symlinks=False)
    except OSError:
        return False


def _status(entry: Entry) -> os.stat_result | None:
    try:
        return os.stat(entry.name, dir_fd=entry.directory, follow_symlinks=False)
    except FileNotFoundError:
        return None


def _open(entry: Entry) -> int | None:
    """Open a file; None when it is gone or has become something else."""
    try:
        fd = os.open(entry.name, _OPEN, dir_fd=entry.directory)
    except FileNotFoundError:
        return None
    except OSError:
        status = _status(entry)
        if status is None or not stat.S_ISREG(status.st_mode):
            return None
        raise
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        return None
    return fd


def _content(fd: int, start: bytes, size: int) -> Iterator[bytes]:
    """Yield the first `size` bytes of a file, of which `start` has been read."""
    yield start
    left = size - len(start)
    while left:
        piece = os.read(fd, min(left, PIECE_BYTES))
        if not piece:
            raise Changed
        left -= len(piece)
        yield piece


def _begin(fd: int) -> tuple[bytes, bool]:
    """Read the start of a file; the other value tells whether that is all of it."""
    parts = []
    size = 0
    while size <= PIECE_BYTES and (part := os.read(fd, PIECE_BYTES + 1 - size)):
        parts.append(part)
        size += len(part)
    return b"".join(parts), size <= PIECE_BYTES


class _Encoder(Protocol):
    def directory(self, name: bytes, status: os.stat_result) -> bytes: ...

    def file(self, name: bytes, status: os.stat_result, fd: int) -> Iterator[bytes]: ...

    def end(self) -> Iterator[bytes]: ...


# -- tar --------------------------------------------------------------------------------------------------------------


class _Tar:
    """GNU's format: any name and any size, known to every program that reads tar."""

    def directory(self, name: bytes, status: os.stat_result) -> bytes:
        return self._header(name, status, tarfile.DIRTYPE, 0)

    def file(self, name: bytes, status: os.stat_result, fd: int) -> Iterator[bytes]:
        start, whole = _begin(fd)
        size = len(start) if whole else max(status.st_size, len(start))
        yield self._header(name, status, tarfile.REGTYPE, size)
        yield from _content(fd, start, size)
        yield bytes(-size % tarfile.BLOCKSIZE)

    def end(self) -> Iterator[bytes]:
        yield bytes(2 * tarfile.BLOCKSIZE)

    @staticmethod
    def _header(name: bytes, status: os.stat_result, kind: bytes, size: int) -> bytes:
        info = tarfile.TarInfo(os.fsdecode(name))
        info.type = kind
        info.size = size
        info.mode = status.st_mode & 0o777
        info.mtime = max(0, int(status.st_mtime))
        return info.tobuf(tarfile.GNU_FORMAT, "utf-8", "surrogateescape")


# -- zip --------------------------------------------------------------------------------------------------------------

_LOCAL: Final = struct.Struct("<4s5H3L2H")
_CENTRAL: Final = struct.Struct("<4s4B4HL2L5H2L")
_WIDE_BYTES: Final = 28
_ALL_ONES: Final = 0xFFFFFFFF
_PLAIN_VERSION: Final = 20
_WIDE_VERSION: Final = 45
_UNIX: Final = 3
_IS_UTF8: Final = 0x800
_SIZES_FOLLOW: Final = 0x8
_STORED: Final = 0
_DEFLATED: Final = 8
_DIRECTORY_ATTRIBUTE: Final = 0x10


class _Zip:
    """Deflated entries. Of a large file the sizes follow its content, in the 64-bit form."""

    def __init__(self) -> None:
        self._offset = 0
        self._count = 0
        self._index = bytearray()

    def directory(self, name: bytes, status: os.stat_result) -> bytes:
        return self._whole(name + b"/", status, b"", _STORED, 0, 0)

    def file(self, name: bytes, status: os.stat_result, fd: int) -> Iterator[bytes]:
        start, whole = _begin(fd)
        if not whole:
            yield from self._streamed(name, status, _content(fd, start, max(status.st_size, len(start))))
            return
        deflater = zlib.compressobj(wbits=-15)
        packed = deflater.compress(start) + deflater.flush()
        if len(packed) < len(start):
            yield self._whole(name, status, packed, _DEFLATED, zlib.crc32(start), len(start))
        else:
            yield self._whole(name, status, start, _STORED, zlib.crc32(start), len(start))

    def end(self) -> Iterator[bytes]:
        start, size, count = self._offset, len(self._index), self._count
        yield bytes(self._index)
        if count >= 0xFFFF or start + size >= _ALL_ONES:
            yield struct.pack(
                "<4sQ2H2L4Q", b"PK\x06\x06", 44, _WIDE_VERSION, _WIDE_VERSION, 0, 0, count, count, size, start
            )
            yield struct.pack("<4sLQL", b"PK\x06\x07", 0, start + size, 1)
            count, start = 0xFFFF, _ALL_ONES
        yield struct.pack("<4s4H2LH", b"PK\x05\x06", 0, 0, count, count, size, start, 0)

    def _whole(self, name: bytes, status: os.stat_result, packed: bytes, method: int, crc: int, size: int) -> bytes:
        flags = _utf8_flag(name)
        header = _LOCAL.pack(
            b"PK\x03\x04", _PLAIN_VERSION, flags, method, *_dos_time(status), crc, len(packed), size, len(name), 0
        )
        self._note(name, status, flags, method, crc, len(packed), size)
        self._offset += len(header) + len(name) + len(packed)
        return header + name + packed

    def _streamed(self, name: bytes, status: os.stat_result, content: Iterator[bytes]) -> Iterator[bytes]:
        flags = _utf8_flag(name) | _SIZES_FOLLOW
        wide = struct.pack("<2H2Q", 1, 16, 0, 0)
        header = _LOCAL.pack(
            b"PK\x03\x04",
            _WIDE_VERSION,
            flags,
            _DEFLATED,
            *_dos_time(status),
            0,
            _ALL_ONES,
            _ALL_ONES,
            len(name),
            len(wide),
        )
        yield header + name + wide
        deflater = zlib.compressobj(wbits=-15)
        crc = size = packed = 0
        for piece in content:
            crc = zlib.crc32(piece, crc)
            size += len(piece)
            out = deflater.compress(piece)
            packed += len(out)
            yield out
        out = deflater.flush()
        packed += len(out)
        self._note(name, status, flags, _DEFLATED, crc, packed, size)
        follow = struct.pack("<4sL2Q", b"PK\x07\x08", crc, packed, size)
        self._offset += len(header) + len(name) + len(wide) + packed + len(follow)
        yield out + follow

    def _note(
        self, name: bytes, status: os.stat_result, flags: int, method: int, crc: int, packed: int, size: int
    ) -> None:
        """Add an entry that begins at the current offset to the index."""
        wide = b""
        sizes = [size, packed, self._offset]
        if max(sizes) >= _ALL_ONES:
            large = [number for number in sizes if number >= _ALL_ONES]
            wide = struct.pack(f"<2H{len(large)}Q", 1, 8 * len(large), *large)
            sizes = [min(number, _ALL_ONES) for number in sizes]
        version = _WIDE_VERSION if wide or flags & _SIZES_FOLLOW else _PLAIN_VERSION
        mode = stat.S_IFMT(status.st_mode) | (status.st_mode & 0o777)
        attributes = mode << 16 | (_DIRECTORY_ATTRIBUTE if stat.S_ISDIR(mode) else 0)
        self._index += _CENTRAL.pack(
            b"PK\x01\x02",
            version,
            _UNIX,
            version,
            0,
            flags,
            method,
            *_dos_time(status),
            crc,
            sizes[1],
            sizes[0],
            len(name),
            len(wide),
            0,
            0,
            0,
            attributes,
            sizes[2],
        )
        self._index += name + wide
        self._count += 1


def _utf8_flag(name: bytes) -> int:
    if name.isascii():
        return 0
    try:
        name.decode()
    except UnicodeDecodeError:
        return 0  # the bytes as they are, which is what programs on Unix take them for
    return _IS_UTF8


def _dos_time(status: os.stat_result) -> tuple[int, int]:
    """Return a modification time (UTC) as zip archives have it: 1980 to 2107, in steps of two seconds."""
    at = time.gmtime(min(max(status.st_mtime, 315_532_800), 4_354_819_198))
    return at.tm_hour << 11 | at.tm_min << 5 | at.tm_sec // 2, (at.tm_year - 1980) << 9 | at.tm_mon << 5 | at.tm_mday
