"""The directories of workspaces: made, adopted, filled, set aside, removed. All of it blocks: call it in a thread."""

import contextlib
import errno
import os
import pwd
import secrets
import stat
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Final

import structlog

from app.domain.clock import now_ms
from app.domain.ids import is_id
from app.errors import AppError, Conflict, ErrorCode, InvalidRequest, NoSpace, StorageUnavailable, ToolError
from app.sandbox.account import Account, account_of, acting_as, acts_as_others, run_as
from app.sandbox.containment import O_PATH, Root, go_on
from app.sandbox.files import empty_directory, replace_file, sweep_temporary_files

MAX_ROOT_BYTES: Final = 2_000
"""What the path of an adopted directory may have: an index of the database holds it."""

# A directory without a row is what a service that died while it made a workspace leaves behind.
ORPHAN_SECONDS: Final = 3600.0

_log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class Adoption:
    """A directory that may be adopted: its real path, and the user and the group it is used as."""

    root: str
    uid: int
    gid: int


class WorkspaceRoots:
    """Where the workspaces of one service stand.

    Only this process's own user changes anything in the directories themselves; what is in a root is its account's.

    Args:
        place: absolute and real; managed roots are made in its `workspaces`, deleted ones moved to its `trash`.
        adoptable: real directories at or below which a caller may adopt one.
        account: owns managed roots; None: this process's own user.
        private: further directories of the service, which no root may be equal to, inside or around.
    """

    def __init__(
        self,
        place: Path,
        adoptable: tuple[Path, ...],
        *,
        account: Account | None = None,
        private: Sequence[Path] = (),
    ) -> None:
        self._private = (place, *private)
        self._managed = place / "workspaces"
        self._trash = place / "trash"
        self._adoptable = adoptable
        self._account = account

    @property
    def owner(self) -> tuple[int, int]:
        """The user and the group that own a managed root."""
        if self._account is None:
            return owner_of(os.geteuid(), os.getegid())
        return self._account.uid, self._account.gid

    def make_directories(self) -> None:
        # Accounts pass through to what is theirs, and cannot list or change what is beside it.
        mode = 0o700 if self._account is None else 0o711
        for directory in (self._managed, self._trash):
            directory.mkdir(mode=mode, parents=True, exist_ok=True)
            directory.chmod(mode)

    def managed(self, workspace_id: str) -> str:
        """Return where the root of a managed workspace stands."""
        return str(self._managed / workspace_id)

    def adopted(self, given: str) -> Adoption:
        """Return what is to be known of a directory that may be adopted.

        Raises:
            InvalidRequest: it may not, or it cannot.
        """
        path = Path(given)
        if len(os.fsencode(given)) > MAX_ROOT_BYTES:
            raise invalid("#/root", "too_long", f"root has more than {MAX_ROOT_BYTES} bytes")
        if not path.is_absolute():
            raise invalid("#/root", "invalid_path", "root has to be an absolute path")
        try:
            real = path.resolve()
        except (OSError, RuntimeError, ValueError):
            real = path
        if not any(real.is_relative_to(allowed) for allowed in self._adoptable):
            # Before anything else: what stands outside is nobody's business.
            raise invalid("#/root", "not_allowed", "root has to lie below a directory this server lists for adoption")
        try:
            status = real.stat()
        except OSError:
            raise invalid("#/root", "not_found", f"there is no directory {given}") from None
        if not stat.S_ISDIR(status.st_mode):
            raise invalid("#/root", "not_a_directory", f"{given} is no directory")
        if any(real.is_relative_to(private) or private.is_relative_to(real) for private in self._private):
            raise invalid("#/root", "overlap", f"{given} is equal to, inside or around the service's data directory")
        if len(os.fsencode(real)) > MAX_ROOT_BYTES:
            raise invalid("#/root", "too_long", f"the real path of root has more than {MAX_ROOT_BYTES} bytes")
        uid, gid = owner_of(status.st_uid, status.st_gid)
        if acts_as_others() and uid == 0:
            raise invalid(
                "#/root",
                "owned_by_root",
                f"{given} belongs to root, and nothing is done as root here; give it to the user whose it is to be "
                "(chown)",
            )
        if not run_as(account_of(uid, gid), lambda: os.access(real, os.R_OK | os.X_OK, effective_ids=True)):
            who = f"user {uid}, who owns it," if acts_as_others() else "the service"
            raise invalid("#/root", "permission_denied", f"{who} may not read {given}, or not reach it")
        return Adoption(str(real), uid, gid)

    def set_aside(self, root: str) -> None:
        """Move a managed root to the trash: whoever still writes by a descriptor writes there."""
        aside = self._trash / f"{Path(root).name}-{secrets.token_hex(4)}"
        with contextlib.suppress(FileNotFoundError):
            Path(root).rename(aside)

    def possible_orphans(self) -> list[str]:
        """Return the names of managed roots that are too old to be still in the making."""
        newest = now_ms() / 1000 - ORPHAN_SECONDS
        return [
            entry.name
            for entry in self._managed.iterdir()
            if is_id(entry.name, "ws") and entry.lstat().st_ctime < newest
        ]

    def empty_trash(self, check: Callable[[], None] = go_on) -> None:
        """Remove what was set aside; what cannot be removed is logged and tried again the next time.

        `check` is called between its steps and may raise to call it off.
        """
        for entry in self._trash.iterdir():
            try:
                remove_root(entry, check)
            except OSError as error:
                _log.warning("trash_not_removed", name=entry.name, error=str(error))


def invalid(pointer: str, code: str, message: str) -> InvalidRequest:
    """Return the error of one place in a body."""
    return InvalidRequest(message, errors=[{"pointer": pointer, "code": code, "message": message}])


@dataclass(frozen=True, slots=True)
class Standing:
    """What stands at a path: its `(st_dev, st_ino)` and the user it belongs to."""

    identity: tuple[int, int]
    uid: int


def look_at(path: str) -> Standing | None:
    """Return what stands at a path; None when nothing does that can be reached."""
    try:
        status = Path(path).stat()
    except OSError:
        return None
    return Standing((status.st_dev, status.st_ino), status.st_uid)


def owner_of(uid: int, gid: int) -> tuple[int, int]:
    """Return the user and the group to act as on what belongs to these: the user's own group instead of root's."""
    if gid != 0:
        return uid, gid
    try:
        gid = pwd.getpwuid(uid).pw_gid
    except KeyError:
        gid = 0
    return uid, gid or uid


@dataclass(frozen=True, slots=True)
class LaidIn:
    """What `lay_in` did: the root's `(st_dev, st_ino)`, the files it wrote and the directories it made for them."""

    identity: tuple[int, int]
    files: Sequence[str]
    directories: Sequence[str]


def lay_in(root: str, files: Mapping[str, bytes], account: Account | None, *, make: bool) -> LaidIn:
    """Make the root when it is to be managed, give it to its account, and write the files into it as that.

    Nothing that was there before is replaced, and after an error nothing new is left.

    Raises:
        InvalidRequest, Conflict, NoSpace: a file that cannot be written as asked.
        OSError: the root cannot be made.
    """
    for path in files:
        _check_path(path)
    if make:
        Path(root).mkdir(mode=0o700)
    try:
        if make and account is not None:
            os.chown(root, account.uid, account.gid)
        with acting_as(account), Root.open(root) as opened:
            status = os.fstat(opened.fd)
            directories = _missing_directories(opened, files)
            _write_files(opened, files, directories)
    except ToolError as error:
        if make:
            remove_root(Path(root))
        raise invalid("#/root", error.code.value, error.message) from None
    except BaseException:
        if make:
            remove_root(Path(root))
        raise
    return LaidIn((status.st_dev, status.st_ino), tuple(files), directories)


def take_out(root: str, laid: LaidIn, account: Account | None, *, made: bool) -> None:
    """Undo `lay_in`."""
    if made:
        remove_root(Path(root))
        return
    with acting_as(account), Root.open(root) as opened:
        _remove(opened, laid.files, laid.directories)


def remove_root(path: Path, check: Callable[[], None] = go_on) -> None:
    """Remove a directory of the service's own, and as the user it belongs to what is in it.

    Raises:
        OSError: it cannot be removed, or something in it cannot.
    """
    status = path.lstat()
    if not stat.S_ISDIR(status.st_mode):
        path.unlink()
        return
    if status.st_uid != 0 or not acts_as_others():
        run_as(account_of(*owner_of(status.st_uid, status.st_gid)), empty_directory, str(path), check)
    # One that is still root's was never given away: it is empty, or this says that it is not.
    path.rmdir()


def sweep(root: str, expected: tuple[int, int], check: Callable[[], None] = go_on, *, older_than: float) -> int:
    """Remove temporary files nobody has written to for `older_than` seconds and return how many there were.

    Nothing is done where another directory stands, or none.
    """
    try:
        with Root.open(root, expected) as opened:
            return sweep_temporary_files(opened.fd, older_than=older_than, check=check)
    except ToolError:
        return 0


def _check_path(path: str) -> None:
    pure = PurePosixPath(path)
    if not path or path.endswith("/") or pure.is_absolute() or ".." in pure.parts or not pure.parts:
        raise invalid(_pointer(path), "invalid_path", f"{path!r} is no path of a file relative to the workspace's root")


def _write_files(root: Root, files: Mapping[str, bytes], directories: Sequence[str]) -> None:
    made: list[str] = []
    for path, content in files.items():
        try:
            target = root.target(root.relative(path), create_parents=True)
            try:
                replace_file(target, content, commit=lambda: None, create_only=True)
            finally:
                target.close()
        except ToolError as error:
            _remove(root, made, directories)
            raise _from_tool_error(path, error) from None
        made.append(path)


def _missing_directories(root: Root, files: Mapping[str, bytes]) -> list[str]:
    """Return the directories that the files need and that are not there, outermost first."""
    wanted = {str(parent) for path in files for parent in PurePosixPath(path).parents if parent.parts}
    missing = []
    for path in sorted(wanted, key=lambda wanted: wanted.count("/")):
        try:
            os.close(root.open_file(root.relative(path), O_PATH | os.O_DIRECTORY))
        except ToolError:
            missing.append(path)
    return missing


def _remove(root: Root, files: Sequence[str], directories: Sequence[str]) -> None:
    for remove, paths in ((os.unlink, files), (os.rmdir, reversed(directories))):
        for path in paths:
            with contextlib.suppress(ToolError, OSError):  # the first failure is the one to tell
                target = root.target(root.relative(path))
                try:
                    remove(target.name, dir_fd=target.directory)
                finally:
                    target.close()


def _pointer(path: str) -> str:
    return "#/files/" + path.replace("~", "~0").replace("/", "~1")


def _from_tool_error(path: str, error: ToolError) -> AppError:
    if error.code is ErrorCode.NO_SPACE:
        return NoSpace(f"the disk under the workspace is full: {error.message}")
    entry = {"pointer": _pointer(path), "code": error.code.value, "message": error.message}
    if error.code is ErrorCode.ALREADY_EXISTS:
        return Conflict(f"{path} exists already; files never replace what an adopted directory holds", errors=[entry])
    return InvalidRequest(error.message, errors=[entry])


def from_os_error(error: OSError) -> AppError:
    """Return the answer to a root that could not be made."""
    if error.errno in {errno.ENOSPC, errno.EDQUOT}:
        return NoSpace("the disk under the workspaces is full; nothing was made")
    return StorageUnavailable(f"the workspace's directory could not be made: {os.strerror(error.errno or 0)}")
