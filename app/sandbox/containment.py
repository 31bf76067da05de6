"""Paths of a workspace: resolving one and opening it are a single act, so nothing can be swapped in between.

A `Root` holds a descriptor of the workspace's directory, and every path is opened relative to it. Linux does that with
one system call, `openat2` with `RESOLVE_BENEATH`: `..` and symbolic links are followed as long as they stay below the
root. Where the call is missing or refuses (it also refuses absolute links that point back inside), a walker opens one
component after another without following links and resolves the links itself, under the same rule. What comes back is
a descriptor; later steps use it and never the path again.

Every error is a `ToolError` whose text names the path as the caller gave it. A path that leads out gets the same answer
whether or not something exists there.
"""

# ruff: noqa: PTH115, PTH116, PTH118 - descriptors and paths in bytes, which pathlib does not know

import contextlib
import ctypes
import errno
import itertools
import os
import stat
import unicodedata
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import lru_cache
from types import TracebackType
from typing import Final, Literal, Self, TypeAlias

from app.errors import ErrorCode, ToolError

Containment = Literal["workspace", "unrestricted"]
MutationKey: TypeAlias = tuple[int, int, str]
"""`(st_dev, st_ino)` of the parent directory and the last name, NFC and case-folded: one key for one file."""

MAX_PATH_BYTES: Final = 4095
MAX_NAME_BYTES: Final = 255
TEMPORARY_PREFIX: Final = ".toolcrib-tmp-"
"""How the service's own temporary files are called: hidden from listings and swept after a crash."""
_MAX_LINKS: Final = 40
_MAX_STEPS: Final = 20_000  # opens of one walk: links that multiply `..` must not keep a thread busy for seconds
_HINT_ENTRIES: Final = 2_000

O_PATH: Final[int] = getattr(os, "O_PATH", os.O_RDONLY)
_DIRECTORY: Final = O_PATH | os.O_DIRECTORY | os.O_CLOEXEC
_NO_BLOCK: Final = os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC
_READ: Final = os.O_RDONLY | _NO_BLOCK

_SYS_OPENAT2: Final = 437  # the same number on every architecture Linux added it to
_AT_FDCWD: Final = -100
_RESOLVE_NO_MAGICLINKS: Final = 0x02
_RESOLVE_NO_SYMLINKS: Final = 0x04
_RESOLVE_BENEATH: Final = 0x08
_BENEATH: Final = _RESOLVE_BENEATH | _RESOLVE_NO_MAGICLINKS
# EXDEV: leads out, or an absolute link; EAGAIN: something was renamed meanwhile; ENOSYS: old kernel; EPERM: a seccomp
# filter that does not know the call (or a real refusal, which the walker meets again).
_ASK_THE_WALKER: Final = frozenset({errno.EXDEV, errno.EAGAIN, errno.ENOSYS, errno.EPERM})
_IS_A_LINK: Final = frozenset({errno.ELOOP, errno.ENOTDIR, errno.EMLINK})


class _OpenHow(ctypes.Structure):
    _fields_ = (("flags", ctypes.c_uint64), ("mode", ctypes.c_uint64), ("resolve", ctypes.c_uint64))


_HOW_SIZE: Final = ctypes.sizeof(_OpenHow)
_syscall = ctypes.CDLL(None, use_errno=True).syscall
_syscall.restype = ctypes.c_long
_syscall.argtypes = (ctypes.c_long, ctypes.c_int, ctypes.c_char_p, ctypes.c_void_p, ctypes.c_size_t)


@lru_cache(maxsize=64)
def _how(flags: int, mode: int, resolve: int) -> tuple[_OpenHow, int]:
    # The kernel only reads it, so threads may share one; its address is of no use without it.
    how = _OpenHow(flags, mode, resolve)
    return how, ctypes.addressof(how)


def _openat2(directory: int, path: bytes, flags: int, mode: int, resolve: int) -> int:
    if b"\0" in path:
        raise ValueError("a path cannot hold a NUL character")  # the kernel would read up to it
    how = _how(flags, mode, resolve)
    while True:
        fd: int = _syscall(_SYS_OPENAT2, directory, path, how[1], _HOW_SIZE)
        if fd >= 0:
            return fd
        code = ctypes.get_errno()
        if code != errno.EINTR:
            raise OSError(code, os.strerror(code))


def go_on() -> None:
    """The `check` of work that nobody can stop."""


def display_path(path: bytes | str) -> str:
    r"""Return a path as text that is valid Unicode: bytes that are no UTF-8 become `\xNN`."""
    raw = path if isinstance(path, bytes) else os.fsencode(path)
    return raw.decode("utf-8", "backslashreplace")


@dataclass(frozen=True, slots=True)
class RelativePath:
    """A path argument, checked and taken apart but not yet resolved.

    `raw` is what the kernel is asked for, relative to the root (absolute only in an unrestricted workspace); `shown`
    is what messages call it. `climbs` tells that it names more `..` than directories before them.
    """

    raw: bytes
    shown: str
    climbs: bool = False
    directory_only: bool = False


@dataclass(slots=True)
class OpenedFile:
    """A regular file open for reading; `path` is absolute and real, `relative_path` relative to the root."""

    fd: int
    status: os.stat_result
    path: str
    relative_path: str

    def close(self) -> None:
        os.close(self.fd)


@dataclass(slots=True)
class Target:
    """Where a file is, or is to be: a pinned parent directory and a name in it that is no symbolic link to elsewhere.

    `path` is absolute and real, `relative_path` is relative to the root; `shown` is what the caller called it. `close`
    gives the descriptors back; `remove_created` takes away the parents that were made for it, as far as they are empty.
    """

    directory: int
    name: bytes
    shown: str
    path: str
    relative_path: str
    _created: list[bytes] = field(default_factory=list)

    @property
    def key(self) -> MutationKey:
        """What changes of this file queue under."""
        status = os.fstat(self.directory)
        name = self.name.decode("utf-8", "surrogateescape")
        return status.st_dev, status.st_ino, unicodedata.normalize("NFC", name).casefold()

    def status(self) -> os.stat_result | None:
        """Return the `lstat` of the name, None when there is nothing."""
        try:
            return os.stat(self.name, dir_fd=self.directory, follow_symlinks=False)
        except FileNotFoundError:
            return None
        except OSError as error:
            raise tool_error_from_oserror(error, self.shown) from None

    def open_existing(self) -> tuple[int, os.stat_result]:
        """Open the file for reading and return the descriptor and its status.

        Raises:
            ToolError: `not_found`, `is_a_directory`, `not_a_regular_file`, `permission_denied`.
        """
        try:
            fd = os.open(self.name, _READ | os.O_NOFOLLOW, dir_fd=self.directory)
        except OSError as error:
            raise tool_error_from_oserror(error, self.shown) from None
        return fd, _require_regular(fd, self.shown)

    @property
    def made_parents(self) -> bool:
        """Whether directories were made for it that are still its own to take away."""
        return bool(self._created)

    def remove_created(self) -> None:
        """Remove the directories that were made for this target, innermost first; what is not empty stays."""
        created, self._created = self._created, []
        _remove_chain(self.directory, created)

    def close(self) -> None:
        fd, self.directory = self.directory, -1
        if fd >= 0:
            os.close(fd)


class Root:
    """A workspace's directory, held open. Use it as a context manager and in one thread at a time."""

    def __init__(self, fd: int, given: bytes, real: bytes, containment: Containment) -> None:
        self.fd = fd
        self.containment = containment
        self.real = real
        self._shown_root = display_path(real)
        self._given = given

    @classmethod
    def open(cls, path: str, identity: tuple[int, int] | None = None, containment: Containment = "workspace") -> Self:
        """Open the workspace directory `path`; `identity` is the `(st_dev, st_ino)` it must have, None does not check.

        Raises:
            ToolError: `not_found` when it is gone or another directory stands there, `permission_denied`.
        """
        given = os.fsencode(path)
        try:
            fd, real = _open_root(given)
        except (FileNotFoundError, NotADirectoryError):
            raise ToolError(
                ErrorCode.NOT_FOUND,
                f"the workspace directory {display_path(path)} does not exist, and nothing makes it again; "
                "make a new workspace",
            ) from None
        except OSError as error:
            raise tool_error_from_oserror(error, "the workspace directory") from None
        root = cls(fd, given, real, containment)
        if identity is not None and root.identity != identity:
            root.close()
            raise ToolError(
                ErrorCode.NOT_FOUND,
                f"the workspace directory is gone: another directory stands at {display_path(path)}; "
                "put the old one back or make a new workspace",
            )
        return root

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def __del__(self) -> None:
        # One that was opened in a thread for a caller who has gone meanwhile has nobody else to close it.
        self.close()

    def close(self) -> None:
        fd, self.fd = self.fd, -1
        if fd >= 0:
            os.close(fd)

    def relative(self, argument: str) -> RelativePath:
        """Check a path argument: relative to the root, or absolute and below it in any spelling of the root.

        Nothing is resolved yet: `..` and links are judged when the path is opened.

        Raises:
            ToolError: `invalid_arguments` (empty, NUL, half a surrogate pair), `name_too_long`,
                `path_outside_workspace` (an absolute path that is not below the root).
        """
        if not argument:
            raise ToolError(ErrorCode.INVALID_ARGUMENTS, 'path must not be empty; "." is the workspace root')
        if "\0" in argument:
            raise ToolError(ErrorCode.INVALID_ARGUMENTS, f"path must not hold a NUL character: {argument[:200]!r}")
        try:
            raw = argument.encode()
        except UnicodeEncodeError:
            raise ToolError(
                ErrorCode.INVALID_ARGUMENTS, f"path must be valid Unicode, without lone surrogates: {argument[:200]!a}"
            ) from None
        if len(raw) > MAX_PATH_BYTES:
            raise ToolError(
                ErrorCode.NAME_TOO_LONG, f"the path has {len(raw)} bytes; at most {MAX_PATH_BYTES} are possible"
            )
        components = raw.split(b"/")
        names = [name for name in components if name not in {b"", b"."}]
        if len(raw) > MAX_NAME_BYTES:
            for name in names:
                if len(name) > MAX_NAME_BYTES:
                    raise ToolError(
                        ErrorCode.NAME_TOO_LONG,
                        f"file name too long: {display_path(name[:60])}… has {len(name)} bytes; "
                        f"at most {MAX_NAME_BYTES} are possible (bytes of UTF-8, not characters)",
                    )
        if TEMPORARY_PREFIX in argument and any(name.startswith(TEMPORARY_PREFIX.encode()) for name in names):
            raise ToolError(
                ErrorCode.INVALID_ARGUMENTS,
                f"names that start with {TEMPORARY_PREFIX} are kept for the service's own temporary files",
            )
        if raw.startswith(b"/"):
            inside = self._below(names)
            if inside is None:
                if self.containment == "workspace":
                    raise _outside(argument)
                return RelativePath(raw, argument, directory_only=components[-1] in {b"", b".", b".."})
            names = inside
        return _relative(names, directory_only=components[-1] in {b"", b".", b".."})

    def open_file(self, path: RelativePath, flags: int, mode: int = 0) -> int:
        """Open `path` and return the descriptor, close-on-exec and never blocking on a pipe or a terminal.

        Raises:
            ToolError: as `tool_error_from_oserror` says; `path_outside_workspace` when it leads out.
        """
        flags |= os.O_CLOEXEC if flags & O_PATH == O_PATH and O_PATH else _NO_BLOCK
        try:
            return self._open(path.raw, flags, mode)
        except OSError as error:
            raise self._explain(error, path) from None

    def open_regular(self, path: RelativePath) -> OpenedFile:
        """Open a regular file for reading.

        Raises:
            ToolError: `is_a_directory`, `not_a_regular_file` (at once, whatever it is) and those of `open_file`.
        """
        try:
            fd = self._open_without_links(path.raw, _READ)
            plain = fd is not None
            if fd is None:
                fd = self._open(path.raw, _READ)
        except OSError as error:
            raise self._explain(error, path) from None
        status = _require_regular(fd, path.shown)
        if plain:
            relative = _without_dots(path.raw)
            return OpenedFile(fd, status, self._below_root(relative), display_path(relative))
        real = display_path(_real_path(fd) or os.path.normpath(os.path.join(self.real, path.raw)))
        return OpenedFile(fd, status, real, self.relative_path(real))

    def target(self, path: RelativePath, *, create_parents: bool = False, check: Callable[[], None] = go_on) -> Target:
        """Resolve a path that is to be changed, down to its parent directory and the real last name.

        A symbolic link in the last place is followed: the target is what it points to, which need not exist. With
        `create_parents` missing directories are made; `check` is called before each and may raise.

        Raises:
            ToolError: `is_a_directory` when the path can only be a directory, `not_found` for a missing parent, and
                those of `open_file`. Directories that were made are removed again.
        """
        try:
            return self._target(path, create_parents=create_parents, check=check)
        except OSError as error:
            raise self._explain(error, path) from None

    def entry(self, path: RelativePath) -> Target:
        """Resolve a path down to its parent directory and its last name as it stands: a link there is not followed.

        Raises:
            ToolError: `invalid_arguments` when the path ends in no name, as that of the root, and those of `open_file`.
        """
        parent, _, name = path.raw.rstrip(b"/").rpartition(b"/")
        if name in {b"", b".", b".."}:
            if path.climbs and self.containment == "workspace":
                raise _outside(path.shown)
            raise ToolError(ErrorCode.INVALID_ARGUMENTS, f"{path.shown} does not end in the name of a file")
        parent = parent or (b"/" if path.raw.startswith(b"/") else b".")
        try:
            directory = self._open(parent, _DIRECTORY)
        except OSError as error:
            raise self._explain(error, path) from None
        return self._pinned(directory, parent, name, path.shown, [])

    def nearest_directory(self, path: RelativePath) -> int:
        """Open the directory a path lies in, or the nearest one above it that exists; return the descriptor.

        Raises:
            ToolError: those of `open_file`.
        """
        try:
            directory, _ = self._nearest(path.raw)
        except OSError as error:
            raise self._explain(error, path) from None
        return directory

    def make_directory(self, path: RelativePath, check: Callable[[], None] = go_on) -> None:
        """Make a directory and what is missing above it; one that exists is fine.

        Raises:
            ToolError: `not_a_directory` when something else has the name, and those of `open_file`. Directories that
                were made are removed again.
        """
        try:
            directory, _ = self._open_parent(path.raw, create=True, check=check)
        except OSError as error:
            raise self._explain(error, path) from None
        os.close(directory)

    def relative_path(self, real: str) -> str:
        """Return the part of an absolute real path below the root."""
        root = self._shown_root
        if real == root:
            return "."
        prefix = root if root.endswith("/") else root + "/"
        return real[len(prefix) :] if real.startswith(prefix) else os.path.relpath(real, root)

    def _below_root(self, relative: bytes) -> str:
        return f"{self._shown_root.rstrip('/')}/{display_path(relative)}"

    @property
    def identity(self) -> tuple[int, int]:
        """The `(st_dev, st_ino)` of the directory."""
        status = os.fstat(self.fd)
        return status.st_dev, status.st_ino

    def _below(self, names: list[bytes]) -> list[bytes] | None:
        """Return what follows the root in the names of an absolute path, None when the path is not below it."""
        for spelling in (self.real, self._given):
            root = [name for name in spelling.split(b"/") if name not in {b"", b"."}]
            if spelling.startswith(b"/") and names[: len(root)] == root:
                return names[len(root) :]
        # Another spelling of the root: one of the leading directories is the root itself. It ends at `..`, because
        # there the answer would tell which directories exist outside.
        for count, name in enumerate(names, 1):
            if name == b"..":
                return None
            try:
                status = os.stat(b"/" + b"/".join(names[:count]))
            except OSError:
                return None
            if (status.st_dev, status.st_ino) == self.identity:
                return names[count:]
        return None

    def _open_without_links(self, raw: bytes, flags: int) -> int | None:
        """Open a path that goes through no symbolic link, so that its real path is known; None when it may have one.

        It is the common case, and one system call less than asking for the path.
        """
        if self.containment == "unrestricted":
            return None
        try:
            return _openat2(self.fd, raw, flags, 0, _RESOLVE_BENEATH | _RESOLVE_NO_SYMLINKS)
        except OSError as error:
            if error.errno in _ASK_THE_WALKER or error.errno == errno.ELOOP:
                return None
            raise

    def _open(self, raw: bytes, flags: int, mode: int = 0) -> int:
        if self.containment == "unrestricted":
            return os.open(raw, flags, mode, dir_fd=self.fd)
        try:
            return _openat2(self.fd, raw, flags, mode, _BENEATH)
        except OSError as error:
            if error.errno not in _ASK_THE_WALKER:
                raise
        return self._walk(raw, flags, mode)

    def _walk(self, raw: bytes, flags: int, mode: int) -> int:
        """Do what `openat2` does, one component at a time; EXDEV means that the path leads out.

        `..` drops the last name and walks again from the root: a descriptor's own `..` could have been moved out.
        """
        if raw.endswith(b"/"):
            flags |= os.O_DIRECTORY
        pending = _components(raw)
        pending.reverse()
        names: list[bytes] = []
        here, stale = os.dup(self.fd), False
        links = steps = 0
        try:
            while True:
                steps += 1 + (len(names) if stale else 0)
                if steps > _MAX_STEPS:
                    raise OSError(errno.ELOOP, os.strerror(errno.ELOOP))
                if pending and pending[-1] == b"..":
                    pending.pop()
                    if not names:
                        raise OSError(errno.EXDEV, os.strerror(errno.EXDEV))
                    names.pop()
                    stale = True
                    continue
                if stale:
                    os.close(here)
                    here = -1
                    here, stale = _descend(self.fd, names), False
                if not pending:
                    return os.open(b".", flags, mode, dir_fd=here)
                name = pending.pop()
                link = None
                try:
                    opened = os.open(name, (_DIRECTORY if pending else flags) | os.O_NOFOLLOW, mode, dir_fd=here)
                except OSError as error:
                    if error.errno not in _IS_A_LINK or (flags & os.O_NOFOLLOW and not pending):
                        raise
                    link = _read_link(here, name)
                    if link is None:
                        raise
                else:
                    if pending:
                        os.close(here)
                        here = opened
                        names.append(name)
                        continue
                    # O_PATH | O_NOFOLLOW opens a link itself instead of refusing it.
                    if flags & os.O_NOFOLLOW or not flags & O_PATH or not stat.S_ISLNK(os.fstat(opened).st_mode):
                        return opened
                    os.close(opened)
                    link = _read_link(here, name)
                    if link is None:
                        pending.append(name)  # swapped for something else in between
                        continue
                links += 1
                if links > _MAX_LINKS:
                    raise OSError(errno.ELOOP, os.strerror(errno.ELOOP))
                if not pending and link.endswith(b"/"):
                    flags |= os.O_DIRECTORY
                following = _components(link)
                if link.startswith(b"/"):
                    inside = self._below(following)
                    if inside is None:
                        raise OSError(errno.EXDEV, os.strerror(errno.EXDEV))
                    following = inside
                    names.clear()
                    stale = True
                pending.extend(reversed(following))
        finally:
            if here >= 0:
                os.close(here)

    def _target(self, path: RelativePath, *, create_parents: bool, check: Callable[[], None]) -> Target:
        current = path
        for _ in range(_MAX_LINKS):
            parent, _, name = current.raw.rpartition(b"/")
            if current.raw.startswith(b"/") and not parent:
                parent = b"/"
            if current.directory_only or name in {b"", b".", b".."}:
                try:
                    os.close(self._open(current.raw, _DIRECTORY))
                except FileNotFoundError:
                    if not create_parents or current.climbs:
                        raise
                    raise ToolError(
                        ErrorCode.IS_A_DIRECTORY, f"{path.shown}/ can only name a directory; give the path of a file"
                    ) from None
                raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
            directory, created = self._open_parent(parent or b".", create=create_parents, check=check)
            target = Target(directory, name, path.shown, "", "", created)
            try:
                link = _read_link(directory, name)
                if link is None:
                    return self._pinned(directory, parent, name, path.shown, created)
                current = self._follow(parent, link, path.shown)
            except BaseException:
                target.remove_created()
                target.close()
                raise
            target.close()
        raise OSError(errno.ELOOP, os.strerror(errno.ELOOP))

    def _pinned(self, directory: int, parent: bytes, name: bytes, shown: str, created: list[bytes]) -> Target:
        """Return the target of a name in an open directory, which `parent` leads to."""
        real = _real_path(directory) or os.path.normpath(os.path.join(self.real, parent))
        path = display_path(os.path.join(real, name))
        return Target(directory, name, shown, path, self.relative_path(path), created)

    def _follow(self, parent: bytes, link: bytes, shown: str) -> RelativePath:
        """Return where a link in the last place of a path points, still unresolved; EXDEV when that is out."""
        names = _components(link)
        last = link.rsplit(b"/", 1)[-1]
        directory_only = last in {b"", b".", b".."}
        if link.startswith(b"/"):
            inside = self._below(names)
            if inside is not None:
                names = inside
            elif self.containment == "workspace":
                raise OSError(errno.EXDEV, os.strerror(errno.EXDEV))
            else:
                return RelativePath(link, shown, directory_only=directory_only)
        elif parent.startswith(b"/"):
            return RelativePath(parent.rstrip(b"/") + b"/" + link, shown, directory_only=directory_only)
        else:
            names = _components(parent) + names
        found = _relative(names, directory_only=directory_only)
        if len(found.raw) > MAX_PATH_BYTES:
            raise OSError(errno.ENAMETOOLONG, os.strerror(errno.ENAMETOOLONG))
        return found

    def _open_parent(self, raw: bytes, *, create: bool, check: Callable[[], None]) -> tuple[int, list[bytes]]:
        """Open the directory `raw`; with `create` make what is missing of it.

        Return its descriptor and the names of the last of its directories, as many as were made.
        """
        for _ in range(_MAX_LINKS):
            try:
                return self._open(raw, _DIRECTORY), []
            except FileNotFoundError:
                if not create:
                    raise
            existing, missing = self._nearest(raw)
            if b".." in missing:
                os.close(existing)
                raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT))
            try:
                made = _make_directories(existing, missing, check)
            except FileNotFoundError:
                continue  # a failed call took a directory away that was empty when it looked: once more
            if not isinstance(made, bytes):
                return made
            # A link to a directory that does not exist yet: make what it points to.
            names = _components(raw)
            head = b"/" if raw.startswith(b"/") else b""
            parent = head + b"/".join(names[: len(names) - len(missing)])
            raw = self._follow(parent, made + b"/" + b"/".join(missing[1:]), "").raw.rstrip(b"/") or b"/"
        raise OSError(errno.ELOOP, os.strerror(errno.ELOOP))

    def _nearest(self, raw: bytes) -> tuple[int, list[bytes]]:
        """Open the nearest directory of `raw` that exists and return it with the names that are missing below it."""
        head = b"/" if raw.startswith(b"/") else b""
        names = _components(raw)
        if not names:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT))
        nearest = self._open(head or b".", _DIRECTORY)
        existing, missing = 0, len(names)
        try:
            while missing - existing > 1:
                middle = (existing + missing) // 2
                try:
                    found = self._open(head + b"/".join(names[:middle]), _DIRECTORY)
                except FileNotFoundError:
                    missing = middle
                else:
                    os.close(nearest)
                    nearest, existing = found, middle
        except BaseException:
            os.close(nearest)
            raise
        return nearest, names[existing:]

    def _explain(self, error: OSError, path: RelativePath) -> ToolError:
        if path.climbs and error.errno in {errno.ENOENT, errno.ENOTDIR} and self.containment == "workspace":
            # It would lead out if its directories existed; the answer must not depend on that.
            return _outside(path.shown)
        if error.errno == errno.ENOTDIR:
            culprit = self._first_non_directory(path)
            if culprit is not None and culprit != path.shown:
                return ToolError(ErrorCode.NOT_A_DIRECTORY, f"cannot use {path.shown}: {culprit} is not a directory")
        answer = tool_error_from_oserror(error, path.shown)
        if error.errno == errno.ENOENT:
            return ToolError(answer.code, answer.message + self._look_alike(path))
        return answer

    def _first_non_directory(self, path: RelativePath) -> str | None:
        head = b"/" if path.raw.startswith(b"/") else b""
        names = _components(path.raw)
        for count in range(1, len(names) + 1):
            prefix = head + b"/".join(names[:count])
            try:
                os.close(self._open(prefix, _DIRECTORY))
            except NotADirectoryError:
                return display_path(prefix)
            except OSError:
                return None
        return None

    def _look_alike(self, path: RelativePath) -> str:
        """Return why a name seems to be there and is not: a dangling link, or another normal form, case or space."""
        try:
            directory, missing = self._nearest(path.raw)
        except OSError:
            return ""
        try:
            if _read_link(directory, missing[0]) is not None:
                return ": a symbolic link on the way points to nothing"
            wanted = _fold(display_path(missing[0]))
            listed = os.open(b".", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC, dir_fd=directory)
            try:
                with os.scandir(listed) as entries:
                    for entry in itertools.islice(entries, _HINT_ENTRIES):
                        name = display_path(os.fsencode(entry.name))
                        if _fold(name) == wanted:
                            return f"; {name} ({name!a}) looks like it but is spelled differently"
            finally:
                os.close(listed)
        except OSError:
            return ""
        finally:
            os.close(directory)
        return ""


def tool_error_from_oserror(error: OSError, shown: str) -> ToolError:
    """Return the answer to a failed system call on the path a message calls `shown`."""
    match error.errno:
        case errno.ENOENT:
            return ToolError(ErrorCode.NOT_FOUND, f"{shown} does not exist")
        case errno.EXDEV:
            return _outside(shown)
        case errno.EACCES | errno.EPERM:
            return ToolError(ErrorCode.PERMISSION_DENIED, f"no permission for {shown}")
        case errno.EROFS:
            return ToolError(ErrorCode.PERMISSION_DENIED, f"{shown} is on a read-only file system")
        case errno.EEXIST:
            return ToolError(ErrorCode.ALREADY_EXISTS, f"{shown} exists already")
        case errno.EISDIR:
            return ToolError(ErrorCode.IS_A_DIRECTORY, f"{shown} is a directory; use ls to see what is in it")
        case errno.ENOTDIR:
            return ToolError(ErrorCode.NOT_A_DIRECTORY, f"{shown} is not a directory")
        case errno.ENXIO | errno.ENODEV:
            return ToolError(ErrorCode.NOT_A_REGULAR_FILE, f"{shown} is a socket or a device, not a regular file")
        case errno.ENAMETOOLONG:
            return ToolError(
                ErrorCode.NAME_TOO_LONG,
                f"file name too long: {shown} (at most {MAX_NAME_BYTES} bytes a name, {MAX_PATH_BYTES} a path)",
            )
        case errno.ENOSPC | errno.EDQUOT:
            return ToolError(
                ErrorCode.NO_SPACE, f"no space left on the device for {shown}; nothing was changed. Free some first"
            )
        case errno.EFBIG:
            return ToolError(ErrorCode.TOO_LARGE, f"{shown} would be larger than the file system or a limit allows")
        case errno.EMFILE | errno.ENFILE | errno.ENOMEM:
            return ToolError(ErrorCode.LIMIT_EXCEEDED, f"too much is open at the moment to use {shown}; try again")
        case errno.ELOOP:
            return ToolError(ErrorCode.IO_ERROR, f"{shown} goes through too many symbolic links, perhaps in a circle")
        case _:
            reason = os.strerror(error.errno) if error.errno is not None else str(error)
            return ToolError(ErrorCode.IO_ERROR, f"cannot use {shown}: {reason}")


def _outside(shown: str) -> ToolError:
    return ToolError(
        ErrorCode.PATH_OUTSIDE_WORKSPACE,
        f"{shown} leads out of the workspace; use a path that stays below the workspace root",
    )


def _require_regular(fd: int, shown: str) -> os.stat_result:
    """Return the status of a regular file; close the descriptor of anything else and say what it is."""
    try:
        status = os.fstat(fd)
    except BaseException:
        os.close(fd)
        raise
    kind = stat.S_IFMT(status.st_mode)
    if kind == stat.S_IFREG:
        return status
    os.close(fd)
    raise irregular(kind, shown)


def irregular(mode: int, shown: str) -> ToolError:
    """Return the answer to a call that needs a regular file and found one of another type."""
    kind = stat.S_IFMT(mode)
    if kind == stat.S_IFDIR:
        return tool_error_from_oserror(IsADirectoryError(errno.EISDIR, ""), shown)
    what = {stat.S_IFIFO: "a named pipe", stat.S_IFSOCK: "a socket", stat.S_IFLNK: "a symbolic link"}
    return ToolError(ErrorCode.NOT_A_REGULAR_FILE, f"{shown} is {what.get(kind, 'a device')}, not a regular file")


def _open_root(given: bytes) -> tuple[int, bytes]:
    """Open a workspace directory and return its descriptor and its real path."""
    if given.startswith(b"/"):
        try:
            fd = _openat2(_AT_FDCWD, given, _DIRECTORY, 0, _RESOLVE_NO_SYMLINKS)
        except OSError as error:
            if error.errno not in _ASK_THE_WALKER and error.errno != errno.ELOOP:
                raise
        else:
            return fd, b"/" + _without_dots(given).lstrip(b"/")
    fd = os.open(given, _DIRECTORY)
    try:
        return fd, _real_path(fd) or os.path.realpath(given)
    except BaseException:
        os.close(fd)
        raise


def _without_dots(path: bytes) -> bytes:
    """Return the shortest spelling of a path that goes through no symbolic link."""
    if b"//" in path or b"/." in path or path.endswith(b"/") or path.startswith(b"."):
        return os.path.normpath(path)
    return path


def _components(raw: bytes) -> list[bytes]:
    return [name for name in raw.split(b"/") if name not in {b"", b"."}]


def _relative(names: list[bytes], *, directory_only: bool) -> RelativePath:
    depth = 0
    climbs = False
    if b".." in names:
        for name in names:
            depth += -1 if name == b".." else 1
            climbs = climbs or depth < 0
    raw = b"/".join(names)
    shown = display_path(raw or b".")
    if directory_only and raw:
        raw += b"/"
    return RelativePath(raw or b".", shown, climbs, directory_only or not raw)


def _read_link(directory: int, name: bytes) -> bytes | None:
    """Return the target of a symbolic link, None when the name is something else or nothing."""
    try:
        return os.readlink(name, dir_fd=directory) or None
    except OSError as error:
        if error.errno in {errno.EINVAL, errno.ENOENT}:
            return None
        raise


def _descend(directory: int, names: Iterable[bytes]) -> int:
    """Open a directory by names none of which may be a link; the caller closes the descriptor."""
    here = os.dup(directory)
    try:
        for name in names:
            deeper = os.open(name, _DIRECTORY | os.O_NOFOLLOW, dir_fd=here)
            os.close(here)
            here = deeper
    except BaseException:
        os.close(here)
        raise
    return here


def _make_directories(
    existing: int, missing: list[bytes], check: Callable[[], None]
) -> tuple[int, list[bytes]] | bytes:
    """Make directories below each other, the first one in `existing`, whose descriptor this takes over.

    Return the last one's descriptor and the names that were made, up to the last one; or, when the first name is a
    symbolic link already, where it points.
    """
    here = existing
    made: list[bytes] = []
    try:
        for name in missing:
            check()
            try:
                os.mkdir(name, dir_fd=here)
                own = True
            except FileExistsError:
                own = False
            try:
                deeper = os.open(name, _DIRECTORY | os.O_NOFOLLOW, dir_fd=here)
            except OSError as error:
                link = None if made or error.errno not in _IS_A_LINK else _read_link(here, name)
                if link is None:
                    raise
                os.close(here)
                return link
            os.close(here)
            here = deeper
            if own:
                made.append(name)
            else:
                made.clear()  # somebody else made this one meanwhile: what is above it is not empty
    except BaseException:
        _remove_chain(here, made)
        os.close(here)
        raise
    return here, made


def _remove_chain(directory: int, names: list[bytes]) -> None:
    """Remove an open directory, which has the last name, then its parent, which has the one before, while empty."""
    here = os.dup(directory)
    try:
        for name in reversed(names):
            parent = os.open(b"..", _DIRECTORY, dir_fd=here)
            status = os.fstat(here)
            os.close(here)
            here = parent
            if not os.path.samestat(status, os.stat(name, dir_fd=parent, follow_symlinks=False)):
                break  # not the one that was made
            os.rmdir(name, dir_fd=parent)
    except OSError:
        pass  # another call uses it by now, or it is gone: both are fine
    finally:
        os.close(here)


def _real_path(fd: int) -> bytes | None:
    """Return the path the kernel knows an open file by, None where there is no /proc to ask."""
    link = b"/proc/self/fd/%d" % fd
    try:
        real = os.readlink(link)
        if real.endswith(b" (deleted)"):
            # Replaced or removed since it was opened, unless the name really ends that way.
            with contextlib.suppress(OSError):
                if os.path.samestat(os.stat(real), os.fstat(fd)):
                    return real
            return real.removesuffix(b" (deleted)")
    except OSError:
        return None
    return real


_FOLD: Final = str.maketrans(
    {
        "\u2018": "'",
        "\u2019": "'",
        "\u201c": '"',
        "\u201d": '"',
        "\u2010": "-",
        "\u2011": "-",
        "\u2012": "-",
        "\u2013": "-",
        "\u2014": "-",
        "\u200b": "",
        "\u200e": "",
        "\u200f": "",
        "\ufeff": "",
    }
)


def _fold(name: str) -> str:
    return " ".join(unicodedata.normalize("NFKC", name).translate(_FOLD).casefold().split())
