"""Changing files so that a reader sees the old content or the new and nothing between, also after a crash.

Everything works on descriptors: a `Target` pins the directory, and the steps after its resolution name nothing else.
Work goes in steps of at most 1 MiB with a call of `check` between them, which raises when the call has to stop.
"""

# ruff: noqa: PTH101 - descriptors, which pathlib does not know

import contextlib
import errno
import fcntl
import hashlib
import itertools
import os
import re
import stat
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Final

from app.errors import ErrorCode, ToolError
from app.sandbox.containment import (
    MAX_NAME_BYTES,
    O_PATH,
    TEMPORARY_PREFIX,
    Target,
    go_on,
    irregular,
    tool_error_from_oserror,
)

STEP_BYTES: Final = 1_048_576
ETAG_HASH_BYTES: Final = 16 * 1_048_576

_TEMPORARY_NAME: Final = re.compile(re.escape(TEMPORARY_PREFIX) + r"[0-9a-f]{16}\Z")
_OPEN_DIRECTORY: Final = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_REMOVE_ATTEMPTS: Final = 3
_NAMES_AT_ONCE: Final = 1_000


class ParentVanished(Exception):
    """The target's directory was removed after it had been resolved: resolve the path again."""


def etag_of(data: bytes) -> str:
    """Return the entity tag of a content: a strong one, in double quotes, the same for the same bytes."""
    return f'"{hashlib.sha256(data).hexdigest()[:32]}"'


def etag_of_file(fd: int, check: Callable[[], None] = go_on) -> str:
    """Return the entity tag of an open file.

    Up to `ETAG_HASH_BYTES` it is that of its content. Reading more for a tag would cost more than the tag is worth, so
    a larger file has one made of its inode, size and modification time: it changes whenever the file is replaced, and
    with any other change that moves the time.
    """
    status = os.fstat(fd)
    if status.st_size > ETAG_HASH_BYTES:
        return f'"{status.st_ino:x}-{status.st_size:x}-{status.st_mtime_ns:x}"'
    digest = hashlib.sha256()
    for step in _steps(fd, check):
        digest.update(step)
    return f'"{digest.hexdigest()[:32]}"'


def etag_of_written(target: Target, data: bytes) -> str:
    """Return the entity tag of a target that was just given `data` as its content."""
    if len(data) <= ETAG_HASH_BYTES:
        return etag_of(data)
    fd, _ = target.open_existing()
    try:
        return etag_of_file(fd)
    finally:
        os.close(fd)


def same_etag(expected: str, current: str) -> bool:
    """Whether a caller's tag is the current one; the quotes may be left out."""
    return expected.strip().strip('"') == current.strip('"')


def read_whole(fd: int, max_bytes: int, shown: str, check: Callable[[], None] = go_on) -> bytes:
    """Return the content of a regular file of at most `max_bytes`.

    Raises:
        ToolError: `too_large`, `io_error`.
    """
    parts = []
    size = 0
    try:
        status = os.fstat(fd)
        if status.st_size <= max_bytes:
            for step in _steps(fd, check, min(status.st_size + 1, STEP_BYTES)):
                parts.append(step)
                size += len(step)
                if size > max_bytes:
                    break
            else:
                return b"".join(parts)
    except OSError as error:
        raise tool_error_from_oserror(error, shown) from None
    raise ToolError(
        ErrorCode.TOO_LARGE, f"{shown} has {max(size, status.st_size)} bytes; at most {max_bytes} are allowed here"
    )


def replace_file(
    target: Target,
    data: bytes,
    *,
    commit: Callable[[], None],
    check: Callable[[], None] = go_on,
    create_only: bool = False,
    expected: os.stat_result | None = None,
) -> bool:
    """Make `data` the content of the target in one step and return whether the file is new.

    The bytes go to a temporary file beside the target, which is synced, gets the old file's owner, permission bits and
    `user.*` attributes and is renamed over it; then the directory is synced. `commit` is called right before the
    rename and may raise to call it off. With `create_only` an existing file stays; `expected` is the status of the file
    the caller has seen, and another one in its place stays. After any failure the old file is as it was and no
    temporary file is left.

    Raises:
        ToolError: `already_exists`, `etag_mismatch` (not the expected file), `is_a_directory`, `not_a_regular_file`,
            `permission_denied`, `no_space`, `too_large`, `name_too_long`, `io_error`.
        ParentVanished: the directory is gone; resolve the path again.
    """
    if len(target.name) > MAX_NAME_BYTES:
        raise tool_error_from_oserror(OSError(errno.ENAMETOOLONG, ""), target.shown)
    try:
        return _replace(target, data, commit, check, create_only=create_only, expected=expected)
    except OSError as error:
        raise tool_error_from_oserror(error, target.shown) from None


def move_in(
    target: Target,
    directory: int,
    temporary: str,
    fd: int,
    *,
    mode: int,
    commit: Callable[[], None],
    create_only: bool = False,
    expected: os.stat_result | None = None,
) -> bool:
    """Do what `replace_file` does with a content that is in a temporary file already; return whether the file is new.

    The temporary file has this name in the open `directory`, on the target's file system, and is open as `fd`. A new
    file gets the permission bits `mode`. After a failure the temporary file is still there.

    Raises:
        ToolError: those of `replace_file`; `io_error` also when the temporary file was removed or lies on another file
            system.
        ParentVanished: the target's directory is gone; resolve the path again.
    """
    try:
        old = _replaceable(target, create_only=create_only)
        if old is None:
            os.chmod(fd, mode)
        else:
            _copy_attributes(target, old, fd)
        os.fsync(fd)
        _install(directory, temporary, target, commit, create_only=create_only, expected=expected)
    except FileExistsError:
        raise _exists(target.shown) from None
    except FileNotFoundError:
        if os.fstat(fd).st_nlink:
            raise ParentVanished from None
        raise _disturbed(target.shown) from None
    except OSError as error:
        if error.errno == errno.EXDEV:
            raise _disturbed(target.shown) from None
        raise tool_error_from_oserror(error, target.shown) from None
    _sync_directory(target.directory)
    return old is None


def remove_entry(
    target: Target, *, commit: Callable[[], None], recursive: bool = False, check: Callable[[], None] = go_on
) -> None:
    """Remove what has the target's name, whatever it is; a link is removed itself, and a directory if `recursive`.

    `commit` is called right before and may raise to call it off. When a directory cannot be removed as a whole, what
    can be removed of it is.

    Raises:
        ToolError: `not_found`, `is_a_directory`, `permission_denied`, `io_error`.
    """
    try:
        status = _status(target)
        if status is None:
            raise FileNotFoundError(errno.ENOENT, "")
        directory = stat.S_ISDIR(status.st_mode)
        if directory and not recursive:
            raise IsADirectoryError(errno.EISDIR, "")
        commit()
        if directory:
            remove_tree(target.directory, os.fsdecode(target.name), check)
        else:
            os.unlink(target.name, dir_fd=target.directory)
    except OSError as error:
        raise tool_error_from_oserror(error, target.shown) from None
    _sync_directory(target.directory)


def sweep_temporary_files(directory: int, *, older_than: float, check: Callable[[], None] = go_on) -> int:
    """Remove the temporary files an interrupted change left below an open directory; return how many there were.

    Only those that nobody has locked (`app.sandbox.spool`) or written to for `older_than` seconds: they may be in the
    making, by another process too. Links are not followed, other file systems not entered, and what cannot be opened is
    left.
    """
    removed = 0
    newest = time.time() - older_than

    def visit(entry: os.DirEntry[str], fd: int) -> None:
        nonlocal removed
        if _TEMPORARY_NAME.match(entry.name):
            with contextlib.suppress(OSError):
                status = entry.stat(follow_symlinks=False)
                if stat.S_ISREG(status.st_mode) and status.st_mtime <= newest and not _locked(entry.name, fd):
                    os.unlink(entry.name, dir_fd=fd)
                    removed += 1

    start = os.open(b".", _OPEN_DIRECTORY, dir_fd=directory)
    with contextlib.closing(Descent(start)) as descent, contextlib.suppress(Lost):
        pending = [descent.scan(visit, check)]
        while pending:
            if pending[-1]:
                try:
                    entered = descent.enter(pending[-1].pop())
                except OSError:
                    entered = False
                if entered:
                    pending.append(descent.scan(visit, check))
            else:
                pending.pop()
                if pending:
                    descent.leave()
    return removed


def remove_tree(parent: int, name: str, check: Callable[[], None] = go_on) -> None:
    """Remove a file or a directory with everything in it; `parent` is an open directory. Nothing there is fine.

    Links are removed, not followed; other file systems mounted inside are not entered; directories without permission
    bits are opened up first. It takes one descriptor and no recursion, however deep the tree is.

    Raises:
        OSError: what could not be removed, after everything else was.
    """
    try:
        os.unlink(name, dir_fd=parent)
    except FileNotFoundError:
        return
    except OSError as error:
        if error.errno not in {errno.EISDIR, errno.EPERM}:
            raise
    else:
        return
    problem: OSError | None = None
    for _ in range(_REMOVE_ATTEMPTS):
        try:
            problem = _empty(parent, name, check)
            os.rmdir(name, dir_fd=parent)
        except FileNotFoundError:
            return
        except Lost:
            continue
        except OSError as error:
            problem = problem or error
        else:
            return
    raise problem or OSError(errno.EBUSY, "the tree changes while it is removed", name)


def empty_directory(path: str, check: Callable[[], None] = go_on) -> None:
    """Remove everything in the directory `path`, as `remove_tree` does, and leave the directory itself.

    Raises:
        OSError: what could not be removed, after everything else was; the directory cannot be opened.
    """
    directory = os.open(path, O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        if os.fstat(directory).st_mode & 0o700 != 0o700:
            os.chmod(f"/proc/self/fd/{directory}", 0o700)
        problem: OSError | None = None
        kept: set[str] = set()
        while names := _first_names(directory, kept):
            for name in names:
                check()
                try:
                    remove_tree(directory, name, check)
                except OSError as error:
                    problem = problem or error
                    kept.add(name)
        if problem is not None:
            raise problem
    finally:
        os.close(directory)


def _first_names(directory: int, without: set[str]) -> list[str]:
    """Return some of the names in an open directory."""
    fd = os.open(b".", _OPEN_DIRECTORY, dir_fd=directory)
    try:
        with os.scandir(fd) as entries:
            names = (entry.name for entry in entries)
            return list(itertools.islice((name for name in names if name not in without), _NAMES_AT_ONCE))
    finally:
        os.close(fd)


def _locked(name: str, directory: int) -> bool:
    fd = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=directory)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(fd)
    return False


def _steps(fd: int, check: Callable[[], None], size: int = STEP_BYTES) -> Iterator[bytes]:
    while step := os.read(fd, size):
        yield step
        check()


def _replace(
    target: Target,
    data: bytes,
    commit: Callable[[], None],
    check: Callable[[], None],
    *,
    create_only: bool,
    expected: os.stat_result | None,
) -> bool:
    old = _replaceable(target, create_only=create_only)
    temporary = TEMPORARY_PREFIX + os.urandom(8).hex()
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    try:
        # A new file gets what the umask (or a default ACL) leaves of 0666; a copy is private until it is whole.
        fd = os.open(temporary, flags, 0o666 if old is None else 0o600, dir_fd=target.directory)
    except FileNotFoundError:
        raise ParentVanished from None
    try:
        try:
            _write_all(fd, data, check)
            if old is not None:
                _copy_attributes(target, old, fd)
            os.fsync(fd)
        finally:
            os.close(fd)
        _install(target.directory, temporary, target, commit, create_only=create_only, expected=expected)
    except BaseException as error:
        with contextlib.suppress(OSError):  # the first failure is the one to tell; a stray is swept
            os.unlink(temporary, dir_fd=target.directory)
        if isinstance(error, FileExistsError):
            raise _exists(target.shown) from None
        raise
    _sync_directory(target.directory)
    return old is None


def _replaceable(target: Target, *, create_only: bool) -> os.stat_result | None:
    """Return the status of the file that is to be replaced, None when there is none."""
    old = _status(target)
    if old is not None:
        if create_only:
            raise _exists(target.shown)
        if not stat.S_ISREG(old.st_mode):
            raise irregular(old.st_mode, target.shown)
        if not _may_write(target):
            raise ToolError(
                ErrorCode.PERMISSION_DENIED,
                f"no permission to write {target.shown} (its mode is {stat.S_IMODE(old.st_mode):04o})",
            )
    return old


def _install(
    directory: int,
    temporary: str,
    target: Target,
    commit: Callable[[], None],
    *,
    create_only: bool,
    expected: os.stat_result | None,
) -> None:
    """Give a finished temporary file its name."""
    if expected is not None:
        _require_unchanged(target, expected)
    commit()
    if not create_only or not _link(directory, temporary, target):
        os.rename(temporary, target.name, src_dir_fd=directory, dst_dir_fd=target.directory)


def _link(directory: int, temporary: str, target: Target) -> bool:
    """Move a temporary file to a name that must not exist; False where the file system has no links to do it with."""
    try:
        # The one call that refuses an existing name whoever made it.
        os.link(temporary, target.name, src_dir_fd=directory, dst_dir_fd=target.directory, follow_symlinks=False)
    except OSError as error:
        if error.errno not in {errno.EPERM, errno.ENOTSUP, errno.ENOSYS}:
            raise
        if _status(target) is not None:
            raise _exists(target.shown) from None
        return False
    with contextlib.suppress(OSError):  # the file is there under its name: a stray second one is swept
        os.unlink(temporary, dir_fd=directory)
    return True


def _status(target: Target) -> os.stat_result | None:
    try:
        return os.stat(target.name, dir_fd=target.directory, follow_symlinks=False)
    except FileNotFoundError:
        return None


def _may_write(target: Target) -> bool:
    # A rename needs no permission of the file it replaces; a file that is read-only shall stay as it is all the same.
    return os.access(target.name, os.W_OK, dir_fd=target.directory, effective_ids=True)


def _write_all(fd: int, data: bytes, check: Callable[[], None]) -> None:
    view = memoryview(data)
    position = 0
    while position < len(view):
        position += os.write(fd, view[position : position + STEP_BYTES])
        check()


def _copy_attributes(target: Target, old: os.stat_result, fd: int) -> None:
    """Give a new file the owner, the permission bits and the `user.*` attributes of the one it replaces.

    Set-id bits and other attributes stay behind: they were given to the old content.
    """
    new = os.fstat(fd)
    if (new.st_uid, new.st_gid) != (old.st_uid, old.st_gid):
        try:
            os.chown(fd, old.st_uid, old.st_gid)
        except PermissionError:
            with contextlib.suppress(PermissionError):  # not ours to give away; the group may still be
                os.chown(fd, -1, old.st_gid)
    try:
        source = os.open(
            target.name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=target.directory
        )
    except OSError as error:
        if error.errno not in {errno.EACCES, errno.EPERM, errno.ENOENT}:
            raise
    else:
        try:
            for name in _user_attributes(source):
                os.setxattr(fd, name, os.getxattr(source, name))
        finally:
            os.close(source)
    os.chmod(fd, old.st_mode & 0o777)


def _user_attributes(fd: int) -> list[str]:
    try:
        return [name for name in os.listxattr(fd) if name.startswith("user.")]
    except OSError as error:
        if error.errno == errno.ENOTSUP:
            return []
        raise


def _require_unchanged(target: Target, expected: os.stat_result) -> None:
    now = _status(target)
    if now is None or (now.st_ino, now.st_size, now.st_mtime_ns) != (
        expected.st_ino,
        expected.st_size,
        expected.st_mtime_ns,
    ):
        raise ToolError(
            ErrorCode.ETAG_MISMATCH,
            f"{target.shown} was changed by somebody else meanwhile and was left as it is; read it again",
        )


def _exists(shown: str) -> ToolError:
    return ToolError(
        ErrorCode.ALREADY_EXISTS, f"{shown} exists already and createOnly is set; leave createOnly out to replace it"
    )


def _disturbed(shown: str) -> ToolError:
    return ToolError(
        ErrorCode.IO_ERROR,
        f"the directory of {shown} was moved or removed while the content arrived; {shown} was left as it is, send it "
        "again",
    )


def _sync_directory(directory: int) -> None:
    # The rename has happened and every reader sees it: a directory that cannot be opened or synced (some network and
    # FUSE file systems) takes nothing of that back, so it is no failure of the change.
    with contextlib.suppress(OSError):
        fd = os.open(b".", _OPEN_DIRECTORY, dir_fd=directory)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)


class Lost(Exception):
    """The tree was moved under the walk: the way up no longer leads where it came from."""


@dataclass(frozen=True, slots=True)
class _Level:
    name: str
    identity: tuple[int, int]


class Descent:
    """A way down a tree that holds one descriptor whatever the depth; the start is not taken over from the caller."""

    def __init__(self, start: int) -> None:
        self.fd = start
        status = os.fstat(start)
        self._device = status.st_dev
        self._levels = [_Level("", (status.st_dev, status.st_ino))]

    @property
    def name(self) -> str:
        """The name of the directory the descent is in."""
        return self._levels[-1].name

    def enter(self, name: str) -> bool:
        """Go down one level; False for a link, a file or another file system.

        Raises:
            OSError: the directory cannot be opened.
        """
        try:
            fd = os.open(name, _OPEN_DIRECTORY, dir_fd=self.fd)
        except OSError as error:
            if error.errno in {errno.ENOENT, errno.ENOTDIR, errno.ELOOP, errno.EMLINK}:
                return False
            raise
        status = os.fstat(fd)
        if status.st_dev != self._device:
            os.close(fd)
            return False
        os.close(self.fd)
        self.fd = fd
        self._levels.append(_Level(name, (status.st_dev, status.st_ino)))
        return True

    def leave(self) -> None:
        """Go up one level. Raises `Lost` when that is not where the descent came from."""
        try:
            fd = os.open(b"..", _OPEN_DIRECTORY, dir_fd=self.fd)
        except OSError:
            raise Lost from None
        self._levels.pop()
        status = os.fstat(fd)
        os.close(self.fd)
        self.fd = fd
        if (status.st_dev, status.st_ino) != self._levels[-1].identity:
            raise Lost

    def scan(self, visit: Callable[[os.DirEntry[str], int], None], check: Callable[[], None]) -> list[str]:
        """Call `visit` for everything here that is no directory and return the names of the directories."""
        check()
        directories = []
        with contextlib.suppress(FileNotFoundError), os.scandir(self.fd) as entries:
            for entry in entries:
                if entry.is_dir(follow_symlinks=False):
                    directories.append(entry.name)
                else:
                    visit(entry, self.fd)
        return directories

    def close(self) -> None:
        os.close(self.fd)


def _empty(parent: int, name: str, check: Callable[[], None]) -> OSError | None:
    """Remove what is in a directory and return the first thing that went wrong."""
    problem: OSError | None = None

    def note(error: OSError) -> None:
        nonlocal problem
        if problem is None and not isinstance(error, FileNotFoundError):
            problem = error

    def visit(entry: os.DirEntry[str], fd: int) -> None:
        try:
            os.unlink(entry.name, dir_fd=fd)
        except OSError as error:
            note(error)

    def enter(name: str) -> bool:
        try:
            try:
                entered = descent.enter(name)
            except PermissionError:
                _open_up(name, descent.fd)
                entered = descent.enter(name)
        except OSError as error:
            note(error)
            return False
        if not entered:
            # Another file system, which the call refuses, or something else took its place since it was listed.
            try:
                os.rmdir(name, dir_fd=descent.fd)
            except OSError as error:
                if error.errno != errno.ENOTDIR:
                    note(error)
        elif os.fstat(descent.fd).st_mode & 0o700 != 0o700:
            with contextlib.suppress(OSError):  # what it keeps from being removed is noted there
                os.chmod(descent.fd, 0o700)
        return entered

    start = os.open(b".", _OPEN_DIRECTORY, dir_fd=parent)
    with contextlib.closing(Descent(start)) as descent:
        pending: list[list[str]] = [[], [name]]
        while len(pending) > 1:
            if pending[-1]:
                if enter(pending[-1].pop()):
                    pending.append(descent.scan(visit, check))
            else:
                pending.pop()
                if len(pending) > 1:
                    done = descent.name
                    descent.leave()
                    if len(pending) > 2:
                        try:
                            os.rmdir(done, dir_fd=descent.fd)
                        except OSError as error:
                            note(error)
    return problem


def _open_up(name: str, directory: int) -> None:
    """Give the owner all permissions of a directory that cannot be opened; through a link nothing is changed."""
    fd = os.open(name, O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=directory)
    try:
        os.chmod(f"/proc/self/fd/{fd}", 0o700)
    finally:
        os.close(fd)
