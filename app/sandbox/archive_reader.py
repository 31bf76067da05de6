"""Reading tar, gzipped tar and zip archives that nobody vouches for, in bounded memory.

The readers are our own and small because those of the standard library trust what an archive says: they read a name or
a list of entries of any length into memory. Names come out as clean paths, relative and without `..`.

Only files and directories are taken. A link, a device, a sparse or encrypted file is an error and not left out: who
sends an archive expects all of it to arrive.
"""

import hashlib
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
# What a compressed archive may unpack to beside the contents: headers, padding, long names.
_OVERHEAD_BYTES: Final = 256 * 1_048_576
_TRAILER_MAX_BYTES: Final = 1_048_576
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
    """A file or directory of an archive; `size` is what the archive says its content has.

    `blocks` is the content and good until the next member is asked for; what is not read of it is skipped. `mode` and
    `modified_ns` are None when the archive does not say.
    """

    path: bytes
    directory: bool
    size: int
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
        max_bytes: what the contents may have together, counted as they are produced.
        check: called between steps; what it raises ends the work.

    Raises:
        ArchiveError: at the first thing that is wrong.
    """
    if form is ArchiveFormat.ZIP:
        yield from _zip_members(read, size, max_bytes, check)
    elif form is ArchiveFormat.TAR:
        yield from _tar_members(_Plain(read, size), max_bytes, check)
    else:
        yield from _tar_members(_Unzipped(read, max_bytes + _OVERHEAD_BYTES), max_bytes, check)


def check_index(
    form: ArchiveFormat,
    read: Source,
    size: int,
    max_bytes: int,
    check: Callable[[], None],
    *,
    longest: int = MAX_PATH_BYTES,
) -> Index:
    """Go through a whole archive and return what it holds. A path may have `longest` bytes.

    Raises:
        ArchiveError: an entry that is not taken, two of one path, a file with others below it, or too much of it.
    """
    # For each path, by its hash, whether it is a file. Directories are noted whether the archive names them or not.
    known: dict[bytes, bool] = {}
    files = directories = total = names = 0
    for member in members(form, read, size, max_bytes, check):
        names += len(member.path)
        if files + directories >= ENTRIES_MAX or names > NAMES_MAX_BYTES:
            raise _too_many_entries()
        if len(member.path) > longest:
            raise _name_too_long(member.path)
        _note(known, member)
        if member.directory:
            directories += 1
        else:
            files += 1
            total += member.size
    return Index(files, directories, total)


def _note(known: dict[bytes, bool], member: Member) -> None:
    is_file = known.get(_key(member.path))
    if is_file is not None and (is_file or not member.directory):
        raise ArchiveError("duplicate_name", "the archive has another entry of this path", member.path)
    known[_key(member.path)] = not member.directory
    above = member.path
    while b"/" in above:
        above = above.rpartition(b"/")[0]
        is_file = known.get(_key(above))
        if is_file:
            raise ArchiveError("duplicate_name", f"{display_path(above)} is a file in the archive", member.path)
        if is_file is not None:
            return  # and so is what is above it
        known[_key(above)] = False


def _key(path: bytes) -> bytes:
    return hashlib.sha256(path).digest()[:16]


def _clean(name: bytes) -> bytes:
    """Return the path a name stands for; empty for the root.

    Raises:
        ArchiveError: it is no name of something below the root.
    """
    if b"\0" in name:
        raise ArchiveError("malformed_archive", "a name holds a NUL character", name)
    if name.startswith(b"/"):
        raise ArchiveError("absolute_name", "names have to be relative", name)
    components = [component for component in name.split(b"/") if component not in {b"", b"."}]
    if b".." in components:
        raise ArchiveError("parent_name", "names must not hold ..", name)
    path = b"/".join(components)
    if len(path) > MAX_PATH_BYTES or any(len(component) > MAX_NAME_BYTES for component in components):
        raise _name_too_long(name)
    if any(component.startswith(TEMPORARY_PREFIX.encode()) for component in components):
        raise ArchiveError(
            "reserved_name", f"names that start with {TEMPORARY_PREFIX} are kept for the service's own files", name
        )
    return path


def _name_too_long(name: bytes) -> ArchiveError:
    return ArchiveError(
        "name_too_long", f"a name may have {MAX_NAME_BYTES} bytes and a whole path {MAX_PATH_BYTES}", name[:256]
    )


def _too_many_bytes(limit: int, name: bytes | None = None) -> ArchiveError:
    return ArchiveError("too_many_bytes", f"the contents have more than {limit} bytes together", name)


def _too_many_entries() -> ArchiveError:
    return ArchiveError(
        "too_many_entries",
        f"an archive may have {ENTRIES_MAX} entries, and their names {NAMES_MAX_BYTES} bytes together",
    )


def _broken(message: str, name: bytes | None = None) -> ArchiveError:
    return ArchiveError("malformed_archive", message, name)


def _modified(seconds: int) -> int | None:
    return seconds * 1_000_000_000 if 0 <= seconds < _LATEST_TIME else None


# -- tar --------------------------------------------------------------------------------------------------------------

_BLOCK: Final = 512
_HEADERS_MAX: Final = 3 * ENTRIES_MAX  # with those that only describe the next one
_ZEROS: Final = bytes(_BLOCK)
_FILES: Final = frozenset({b"0", b"\0", b"7"})
_LINKS: Final = frozenset({b"1", b"2"})
_SPECIAL: Final = frozenset({b"3", b"4", b"6"})


class _Stream(Protocol):
    """The blocks of a tar archive, one after another."""

    def take(self, size: int) -> bytes:
        """Return up to `size` bytes, fewer only at the end, where it returns none."""
        ...

    def skip(self, size: int) -> None:
        """Pass over so many bytes. Raises ArchiveError when there are not that many."""
        ...

    def end(self) -> None:
        """Check what comes after the archive's end."""
        ...


class _Plain:
    def __init__(self, read: Source, size: int) -> None:
        self._read = read
        self._size = size
        self._offset = 0

    def take(self, size: int) -> bytes:
        data = self._read(size, self._offset)
        self._offset += len(data)
        return data

    def skip(self, size: int) -> None:
        self._offset += size
        if self._offset > self._size:
            raise _broken("the archive ends within an entry")

    def end(self) -> None:
        """Whatever follows is padding."""


class _Unzipped:
    """A gzip file of one or more members; gives at most `limit` bytes."""

    def __init__(self, read: Source, limit: int) -> None:
        self._read = read
        self._offset = 0
        self._left = limit
        self._limit = limit
        self._inflater = zlib.decompressobj(31)
        self._input = b""
        self._started = False

    def take(self, size: int) -> bytes:
        parts = []
        while size:
            part = self._inflate(size)
            if not part:
                break
            parts.append(part)
            size -= len(part)
        return b"".join(parts)

    def skip(self, size: int) -> None:
        while size:
            part = self._inflate(min(size, STEP_BYTES))
            if not part:
                raise _broken("the archive ends within an entry")
            size -= len(part)

    def end(self) -> None:
        """Read on to the end, where the checksum is."""
        left = _TRAILER_MAX_BYTES
        while left > 0 and (part := self._inflate(STEP_BYTES)):
            left -= len(part)

    def _inflate(self, size: int) -> bytes:
        """Return some bytes, at most `size`; none at the end."""
        while True:
            if self._inflater.eof:
                self._input = self._inflater.unused_data or self._refill()
                if not self._input.startswith(b"\x1f"):
                    return b""  # the end, or padding after it
                self._inflater = zlib.decompressobj(31)
            elif not self._input:
                self._input = self._refill()
                if not self._input:
                    raise _broken("the compressed data ends too early")
            part = _inflated(self._inflater, self._input, size)
            self._input = self._inflater.unconsumed_tail
            if part:
                self._left -= len(part)
                if self._left < 0:
                    raise _too_many_bytes(self._limit)
                return part

    def _refill(self) -> bytes:
        data = self._read(_META_MAX_BYTES, self._offset)
        self._offset += len(data)
        return data


@dataclass(slots=True)
class _Extended:
    """What the entries before an entry say of it."""

    path: bytes | None = None
    size: int | None = None
    modified: int | None = None


def _tar_members(stream: _Stream, max_bytes: int, check: Callable[[], None]) -> Generator[Member, None, None]:
    extended = _Extended()
    left = max_bytes
    for number in itertools.count():
        check()
        if number > _HEADERS_MAX:
            raise _too_many_entries()
        header = stream.take(_BLOCK)
        if header == _ZEROS:
            stream.end()
            return
        if len(header) < _BLOCK:
            raise _broken("the archive ends without its end marker")
        _verify(header)
        kind = header[156:157]
        size = _number(header[124:136])
        if kind in b"xgLK":
            _extend(extended, kind, _whole(stream, size))
            continue
        name = _tar_name(header) if extended.path is None else extended.path
        size = size if extended.size is None else extended.size
        modified = _number(header[136:148]) if extended.modified is None else extended.modified
        directory = kind == b"5" or (kind in _FILES and name.endswith(b"/"))
        if not directory and kind not in _FILES:
            raise _refused(kind, name)
        if directory:
            size = 0
        extended = _Extended()
        path = _clean(name)
        left -= size
        if left < 0:
            raise _too_many_bytes(max_bytes, name)
        if not path:
            if not directory:
                raise _broken("an entry has no name")
            continue
        content = _Content(stream, size, check)
        yield Member(path, directory, size, _number(header[100:108]) & 0o7777, _modified(modified), content.blocks())
        content.finish()


class _Content:
    """The content of a tar entry and the padding behind it."""

    def __init__(self, stream: _Stream, size: int, check: Callable[[], None]) -> None:
        self._stream = stream
        self._left = size
        self._padding = -size % _BLOCK
        self._check = check

    def blocks(self) -> Iterator[bytes]:
        while self._left:
            part = self._stream.take(min(self._left, STEP_BYTES))
            if not part:
                raise _broken("the archive ends within an entry")
            self._left -= len(part)
            yield part
            self._check()

    def finish(self) -> None:
        while self._left > STEP_BYTES:
            self._stream.skip(STEP_BYTES)
            self._left -= STEP_BYTES
            self._check()
        self._stream.skip(self._left + self._padding)
        self._left = self._padding = 0


def _whole(stream: _Stream, size: int) -> bytes:
    """Return the content of an entry that says something of the next one."""
    if size > _META_MAX_BYTES:
        raise _broken(f"the description of an entry has {size} bytes")
    data = stream.take(size)
    if len(data) < size:
        raise _broken("the archive ends within an entry")
    stream.skip(-size % _BLOCK)
    return data


def _extend(extended: _Extended, kind: bytes, data: bytes) -> None:
    if kind == b"L":
        extended.path = data.partition(b"\0")[0]
    elif kind == b"x":
        for key, value in _records(data):
            if key == b"path":
                extended.path = value
            elif key == b"size":
                extended.size = _decimal(value)
            elif key == b"mtime":
                extended.modified = _decimal(value.partition(b".")[0])
            elif key.startswith(b"GNU.sparse."):
                raise ArchiveError("unsupported", "sparse files are not taken", extended.path)
    elif kind == b"g" and any(key in {b"path", b"size"} or key.startswith(b"GNU.sparse.") for key, _ in _records(data)):
        raise ArchiveError("unsupported", "a path or size for all entries is not taken")


def _records(data: bytes) -> Iterator[tuple[bytes, bytes]]:
    while data:
        length, blank, _ = data.partition(b" ")
        size = _decimal(length) if blank else 0
        record = data[len(length) + 1 : size]
        key, equals, value = record.partition(b"=")
        if not equals or not value.endswith(b"\n") or size > len(data):
            raise _broken("the description of an entry is damaged")
        yield key, value[:-1]
        data = data[size:]


def _decimal(value: bytes) -> int:
    sign, digits = (-1, value[1:]) if value.startswith(b"-") else (1, value)
    if not digits.isdigit() or len(digits) > 20:
        raise _broken("a number in the description of an entry is none")
    return sign * int(digits)


def _verify(header: bytes) -> None:
    blank = header[:148] + b" " * 8 + header[156:]
    # Old programs took the bytes for signed ones.
    if _number(header[148:156]) not in {sum(blank), sum(blank) - 256 * sum(byte > 127 for byte in blank)}:
        raise _broken("a header is damaged, or this is no tar archive")


def _number(field: bytes) -> int:
    if field[0] == 0x80:
        return int.from_bytes(field[1:], "big")
    digits = field.strip(b"\0 ")
    if not digits:
        return 0
    try:
        value = int(digits, 8)
    except ValueError:
        value = -1
    if value < 0:
        raise _broken("a number in a header is none")
    return value


def _tar_name(header: bytes) -> bytes:
    name = header[:100].partition(b"\0")[0]
    # GNU's own format, whose magic ends in blanks, keeps other things there.
    prefix = header[345:500].partition(b"\0")[0] if header[257:263] == b"ustar\0" else b""
    return prefix + b"/" + name if prefix else name


def _refused(kind: bytes, name: bytes) -> ArchiveError:
    if kind in _LINKS:
        return ArchiveError("link", "links are not taken", name)
    if kind in _SPECIAL:
        return ArchiveError("special_file", "devices and pipes are not taken", name)
    if kind == b"S":
        return ArchiveError("unsupported", "sparse files are not taken", name)
    return ArchiveError("unsupported", f"entries of the type {kind!r} are not taken", name)


# -- zip --------------------------------------------------------------------------------------------------------------

_END: Final = struct.Struct("<4s4H2LH")
_END_64: Final = struct.Struct("<4sQ2H2L4Q")
_LOCATOR_64: Final = struct.Struct("<4sLQL")
_CENTRAL: Final = struct.Struct("<4s4B4HL2L5H2L")
_LOCAL: Final = struct.Struct("<4s5H3L2H")
_COMMENT_MAX: Final = 65_535
_ALL_ONES: Final = 0xFFFFFFFF
_ENCRYPTED: Final = 0x2041  # encrypted, strongly encrypted, with a masked index
_UNIX: Final = 3
_STORED: Final = 0
_DEFLATED: Final = 8


@dataclass(frozen=True, slots=True)
class _ZipEntry:
    """An entry of a zip archive's index; `name` as it stands there."""

    name: bytes
    flags: int
    method: int
    crc: int
    compressed: int
    size: int
    unix_mode: int
    offset: int


def _zip_members(read: Source, size: int, max_bytes: int, check: Callable[[], None]) -> Generator[Member, None, None]:
    left = max_bytes
    for entry in _zip_entries(read, size):
        check()
        directory = entry.name.endswith(b"/") or stat.S_ISDIR(entry.unix_mode)
        _require_taken(entry, directory=directory)
        path = _clean(entry.name)
        left -= entry.size
        if left < 0:
            raise _too_many_bytes(max_bytes, entry.name)
        start = _content_start(read, entry, size)
        if not path:
            if not directory:
                raise _broken("an entry has no name")
            continue
        mode = stat.S_IMODE(entry.unix_mode) if entry.unix_mode else None
        content = iter(()) if directory else _zip_content(read, entry, start, check)
        yield Member(path, directory, 0 if directory else entry.size, mode, None, content)


def _zip_entries(read: Source, size: int) -> Iterator[_ZipEntry]:
    count, offset, end = _zip_index(read, size)
    if count > ENTRIES_MAX:
        raise _too_many_entries()
    for _ in range(count):
        raw = read(_CENTRAL.size, offset)
        if len(raw) < _CENTRAL.size or offset + len(raw) > end or raw[:4] != b"PK\x01\x02":
            raise _broken("the index is damaged")
        fields = _CENTRAL.unpack(raw)
        flags, method = fields[5], fields[6]
        crc, compressed, plain, name_size, extra_size, comment_size = fields[9:15]
        attributes, local = fields[17], fields[18]
        rest = read(name_size + extra_size, offset + _CENTRAL.size)
        offset += _CENTRAL.size + name_size + extra_size + comment_size
        if offset > end:
            raise _broken("the index is damaged")
        name, extra = rest[:name_size], rest[name_size:]
        plain, compressed, local = _wide(extra, plain, compressed, local)
        unix_mode = attributes >> 16 if fields[2] == _UNIX else 0
        yield _ZipEntry(name, flags, method, crc, compressed, plain, unix_mode, local)


def _zip_index(read: Source, size: int) -> tuple[int, int, int]:
    """Return how many entries the index has, where it begins and where it ends."""
    start = max(0, size - _COMMENT_MAX - _END.size)
    tail = read(size - start, start)
    at = tail.rfind(b"PK\x05\x06")
    if at < 0 or len(tail) - at < _END.size:
        raise _broken("this is no zip archive, or its end is missing")
    _, disk, first_disk, on_disk, count, length, offset, comment = _END.unpack_from(tail, at)
    end = start + at
    if at + _END.size + comment != len(tail):
        raise _broken("something follows the end of the archive")
    if 0xFFFF in {disk, first_disk, on_disk, count} or _ALL_ONES in {length, offset}:
        located = read(_LOCATOR_64.size, max(0, end - _LOCATOR_64.size))
        if located[:4] == b"PK\x06\x07":
            end = _LOCATOR_64.unpack(located)[2]
            record = read(_END_64.size, end)
            if len(record) < _END_64.size or record[:4] != b"PK\x06\x06":
                raise _broken("the end of the archive is damaged")
            disk, first_disk, on_disk, count, length, offset = _END_64.unpack(record)[4:]
    if disk or first_disk or on_disk != count:
        raise ArchiveError("unsupported", "an archive in several parts is not taken")
    if offset + length != end:
        raise _broken("the index is not where the end of the archive says")
    return count, offset, end


def _wide(extra: bytes, size: int, compressed: int, offset: int) -> tuple[int, int, int]:
    """Return the three numbers, the ones that did not fit taken from the zip64 field."""
    numbers = [size, compressed, offset]
    wanted = [index for index, number in enumerate(numbers) if number == _ALL_ONES]
    while wanted and len(extra) >= 4:
        kind, length = struct.unpack_from("<HH", extra)
        data, extra = extra[4 : 4 + length], extra[4 + length :]
        if kind == 1:
            if len(data) < 8 * len(wanted):
                raise _broken("the index is damaged")
            for position, index in enumerate(wanted):
                (numbers[index],) = struct.unpack_from("<Q", data, 8 * position)
            break
    return numbers[0], numbers[1], numbers[2]


def _require_taken(entry: _ZipEntry, *, directory: bool) -> None:
    kind = stat.S_IFMT(entry.unix_mode)
    if kind == stat.S_IFLNK:
        raise ArchiveError("link", "links are not taken", entry.name)
    if kind not in {0, stat.S_IFREG, stat.S_IFDIR}:
        raise ArchiveError("special_file", "devices and pipes are not taken", entry.name)
    if entry.flags & _ENCRYPTED:
        raise ArchiveError("unsupported", "encrypted files are not taken", entry.name)
    if entry.method not in {_STORED, _DEFLATED} and not directory:
        raise ArchiveError(
            "unsupported", f"the compression {entry.method} is not taken, only stored and deflated", entry.name
        )
    if entry.method == _STORED and entry.size != entry.compressed:
        raise _broken("the sizes of an entry contradict each other", entry.name)


def _content_start(read: Source, entry: _ZipEntry, size: int) -> int:
    raw = read(_LOCAL.size, entry.offset)
    if len(raw) < _LOCAL.size or raw[:4] != b"PK\x03\x04":
        raise _broken("an entry is not where the index says", entry.name)
    *_, name_size, extra_size = _LOCAL.unpack(raw)
    if read(name_size, entry.offset + _LOCAL.size) != entry.name:
        raise _broken("an entry has another name than in the index", entry.name)
    start: int = entry.offset + _LOCAL.size + name_size + extra_size
    if start + entry.compressed > size:
        raise _broken("the archive ends within an entry", entry.name)
    return start


def _zip_content(read: Source, entry: _ZipEntry, start: int, check: Callable[[], None]) -> Iterator[bytes]:
    produced = 0
    crc = 0
    for part in _unpacked(read, entry, start):
        check()
        produced += len(part)
        if produced > entry.size:
            raise _broken("an entry is longer than the index says", entry.name)
        crc = zlib.crc32(part, crc)
        if part:
            yield part
    if produced != entry.size or crc != entry.crc:
        raise _broken("an entry is damaged: its size or checksum is another one", entry.name)


def _unpacked(read: Source, entry: _ZipEntry, start: int) -> Iterator[bytes]:
    inflater = None if entry.method == _STORED else zlib.decompressobj(-15)
    end = start + entry.compressed
    while start < end:
        data = read(min(STEP_BYTES, end - start), start)
        if not data:
            raise _broken("the archive ends within an entry", entry.name)
        start += len(data)
        if inflater is None:
            yield data
            continue
        while data and not inflater.eof:
            yield _inflated(inflater, data, STEP_BYTES)
            data = inflater.unconsumed_tail
    if inflater is not None:
        while not inflater.eof and (part := _inflated(inflater, inflater.unconsumed_tail, STEP_BYTES)):
            yield part


def _inflated(inflater: "zlib._Decompress", data: bytes, size: int) -> bytes:
    # A caller reads a member's content when and where it likes, so damage is told here, for every reader.
    try:
        return inflater.decompress(data, size)
    except zlib.error as error:
        raise ArchiveError("malformed_archive", f"the compressed data is damaged: {error}") from None
