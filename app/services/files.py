"""Files of a workspace, moved in and out as they are: read, stored, removed, listed.

What arrives goes to a temporary file beside its destination. Only when all of it is there and on the disk does it join
the queue of changes of that file, for the check of the caller's condition and the rename.
"""

import base64
import contextlib
import errno
import os
import stat
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Generator
from dataclasses import dataclass
from typing import Any, Final

from app.domain.clock import rfc3339
from app.errors import (
    AppError,
    Conflict,
    ErrorCode,
    InvalidPath,
    NoSpace,
    NotFound,
    PreconditionFailed,
    ToolError,
)
from app.sandbox.containment import (
    MAX_PATH_BYTES,
    TEMPORARY_PREFIX,
    RelativePath,
    Root,
    Target,
    display_path,
    irregular,
    tool_error_from_oserror,
)
from app.sandbox.files import etag_of, etag_of_file, remove_entry
from app.sandbox.held import Held
from app.sandbox.spool import Spool
from app.sandbox.walk import PAGE_ENTRIES, Entry, Kind, NotEntered, walk
from app.services.file_access import FileAccess, Visit, problem

BLOCK_BYTES: Final = 1_048_576
"""What an upload gathers before it goes to the disk."""
CHUNK_BYTES: Final = 262_144
"""What a download reads at a time; a file of at most this size is read whole, in the step that opens it."""
HEAD_BYTES: Final = 4_096
TREE_ENTRIES_MAX: Final = 5_000
TREE_NAMES_BYTES: Final = 4 * 1_048_576
"""What the paths of one page of a tree have together."""


@dataclass(frozen=True, slots=True)
class EntityTags:
    """The value of `If-Match` or `If-None-Match`: `any` is `*`; weak tags keep their `W/`."""

    tags: tuple[str, ...] = ()
    any: bool = False

    def strongly_name(self, current: str | None) -> bool:
        """Whether they name the current tag, None when there is no file."""
        return current is not None and (self.any or current in self.tags)

    def weakly_name(self, current: str | None) -> bool:
        """Do the same, a weak tag counting as its strong one."""
        return current is not None and (self.any or current in {tag.removeprefix("W/") for tag in self.tags})


@dataclass(frozen=True, slots=True)
class Condition:
    """What must hold for a change to be made: the file is one of `match`, and none of `none_match`; None: no matter."""

    match: EntityTags | None = None
    none_match: EntityTags | None = None

    @property
    def asked(self) -> bool:
        return self.match is not None or self.none_match is not None

    @property
    def create_only(self) -> bool:
        return self.none_match is not None and self.none_match.any

    def require(self, current: str | None, shown: str) -> None:
        """Check the tag of the file as it is, None when there is no file.

        Raises:
            PreconditionFailed: with `currentEtag`.
        """
        if self.match is not None and not self.match.strongly_name(current):
            raise _failed(shown, current)
        if self.none_match is not None and self.none_match.weakly_name(current):
            raise _failed(shown, current)


UNCONDITIONAL: Final = Condition()


@dataclass(frozen=True, slots=True)
class Stored:
    """A file that was stored; `path` is relative to the workspace's root, with links resolved."""

    path: str
    bytes: int
    etag: str
    created: bool


@dataclass(frozen=True, slots=True)
class NotStored:
    """A file of several that was not stored; `code` is one of `ErrorCode`."""

    path: str
    code: str
    message: str


@dataclass(frozen=True, slots=True)
class Part:
    """One of several files that arrive one after another; `path` is None when the part does not say."""

    path: str | None
    chunks: AsyncIterator[bytes]


@dataclass(frozen=True, slots=True)
class TreePage:
    """Entries of a tree, in order; `last` is the path the next page goes on after, None at the end."""

    entries: list[dict[str, Any]]
    last: bytes | None


class FileShrank(Exception):
    """Less is left of an open file than was promised when it was opened."""


class Download:
    """A file that is open for reading: what was opened is what is read, whatever is stored under the path meanwhile.

    `path` is relative to the workspace's root, with links resolved; `bytes` is the size, `head` the first bytes. Close
    it.
    """

    def __init__(self, visit: Visit, fd: int, path: str) -> None:
        self._visit = visit
        self._fd = fd
        self._held = Held(lambda: os.close(fd))
        self._whole: bytes | None = None
        self.head = b""
        self.bytes = 0
        self.etag = ""
        self.path = path

    def look(self) -> None:
        """Read what there is to know; in the file pool."""
        with self._held.use():
            start = os.pread(self._fd, CHUNK_BYTES + 1, 0)
            self.head = start[:HEAD_BYTES]
            if len(start) <= CHUNK_BYTES:
                self._whole = start
                self.bytes = len(start)
                self.etag = etag_of(start)
                return
            self.bytes = os.fstat(self._fd).st_size
            self.etag = etag_of_file(self._fd, self._visit.signal.raise_if_aborted)

    async def chunks(self, start: int, end: int) -> AsyncGenerator[bytes, None]:
        """Yield the bytes from `start` up to `end`, which lie within the file.

        Raises:
            FileShrank: a command has cut the file meanwhile.
        """
        if self._whole is not None:
            if start < end:
                yield self._whole[start:end]
            return
        while start < end:
            chunk = await self._visit.run(self._read, min(CHUNK_BYTES, end - start), start)
            if not chunk:
                raise FileShrank(f"{self.path} ended at {start} of {self.bytes} bytes")
            yield chunk
            start += len(chunk)

    def close(self) -> None:
        self._held.let_go()

    def _read(self, size: int, offset: int) -> bytes:
        with self._held.use():
            return os.pread(self._fd, size, offset)


class FileService:
    """Single files and listings of them. An `owner` of None sees every workspace.

    Args:
        access: the way to the files.
        max_upload_bytes: what the body of one request may have; whoever reads the body sees to it.
    """

    def __init__(self, access: FileAccess, *, max_upload_bytes: int) -> None:
        self._access = access
        self.max_upload_bytes = max_upload_bytes

    async def open(self, workspace_id: str, path: str, *, owner: str | None) -> Download:
        """Open a regular file for reading.

        Raises:
            NotFound, WorkspaceGone, WorkspaceMoved: the workspace or the file is not there.
            InvalidPath: there can be no such path, or it leads out of the workspace.
            Conflict: it is a directory, a pipe, a device, or one that may not be read.
        """
        found: list[Download] = []
        async with self._access.visit(workspace_id, owner=owner) as visit:
            try:
                await visit.run(_open, visit, path, found)
            except BaseException:
                for download in found:
                    download.close()
                raise
        return found[0]

    async def put(
        self,
        workspace_id: str,
        path: str,
        body: AsyncIterator[bytes],
        *,
        condition: Condition = UNCONDITIONAL,
        owner: str | None,
    ) -> Stored:
        """Make `body` the whole content of a file; directories on the way are made.

        The old content stays until the new one is there; when `body` raises, nothing has changed. An existing file
        keeps its owner and permission bits, and a symbolic link is written through.

        Raises:
            PreconditionFailed: looked at before the body is read, and again before the change.
            NotFound, WorkspaceGone, WorkspaceMoved, InvalidPath, Conflict, NoSpace: as `open`; nothing was changed.
        """
        async with self._access.visit(workspace_id, owner=owner, changes=True) as visit:
            return await _store(visit, path, body, condition)

    async def put_many(
        self,
        workspace_id: str,
        parts: AsyncIterator[Part],
        *,
        owner: str | None,
        results: list[Stored | NotStored] | None = None,
    ) -> list[Stored | NotStored]:
        """Store several files as they arrive, each by itself: one that cannot be stored does not stop the others.

        Whoever yields the parts skips what was not read of one. `results` is filled and returned, so that whoever gives
        a list has what became of the parts however this ends.

        Raises:
            AppError: what `parts` raises, with the member `files`: what became of the parts before it.
            NotFound, WorkspaceGone, WorkspaceMoved: the workspace is not there.
        """
        results = [] if results is None else results
        async with self._access.visit(workspace_id, owner=owner, changes=True) as visit:
            try:
                async for part in parts:
                    # One by one: an error has to tell what became of the parts before it.
                    results.append(await _store_part(visit, part))
            except AppError as error:
                error.extra["files"] = results
                raise
        return results

    async def delete(
        self,
        workspace_id: str,
        path: str,
        *,
        recursive: bool = False,
        condition: Condition = UNCONDITIONAL,
        owner: str | None,
    ) -> None:
        """Remove a file; of a symbolic link the link. With `recursive` a directory and all that is in it.

        Raises:
            PreconditionFailed: nothing was removed.
            Conflict: it is a directory, or one that cannot be removed whole.
            NotFound, WorkspaceGone, WorkspaceMoved, InvalidPath: as `open`.
        """
        async with self._access.visit(workspace_id, owner=owner, changes=True) as visit:
            check = visit.signal.raise_if_aborted

            def find() -> Target:
                with visit.root() as root:
                    return root.entry(root.relative(path))

            def remove(target: Target) -> None:
                status = target.status()
                if status is None:
                    raise tool_error_from_oserror(FileNotFoundError(errno.ENOENT, ""), target.shown)
                if condition.asked:
                    # What is no regular file has no tag, but it is there.
                    regular = stat.S_ISREG(status.st_mode)
                    condition.require(_current(target, check) if regular else "", target.shown)
                if stat.S_ISDIR(status.st_mode) and not recursive:
                    raise ToolError(
                        ErrorCode.IS_A_DIRECTORY,
                        f"{target.shown} is a directory; ask with recursive=true to remove it and all that is in it",
                    )
                remove_entry(target, commit=visit.signal.commit, recursive=recursive, check=check)
                if visit.quota is not None:
                    visit.quota.outdate()

            await visit.change(find, remove)

    async def tree(
        self,
        workspace_id: str,
        path: str,
        *,
        depth: int | None,
        limit: int,
        after: bytes | None,
        owner: str | None,
    ) -> TreePage:
        """List a directory and, down to `depth` levels, what is below it, in the order of the paths' components.

        Args:
            workspace_id: the workspace.
            path: the directory.
            depth: 1 is its own entries, None has no end.
            limit: entries at most.
            after: the path, below `path`, that the page goes on after.
            owner: who asks.

        Raises:
            NotFound, WorkspaceGone, WorkspaceMoved, InvalidPath: as `open`.
            Conflict: it is no directory, or one that may not be read.
        """
        async with self._access.visit(workspace_id, owner=owner, changes=True) as visit:
            return await visit.run(_tree, visit, path, depth, limit, after)


# -- reading ----------------------------------------------------------------------------------------------------------


def _open(visit: Visit, path: str, found: list[Download]) -> None:
    with visit.root() as root:
        opened = root.open_regular(root.relative(path))
    download = Download(visit, opened.fd, opened.relative_path)
    try:
        download.look()
        visit.signal.raise_if_aborted()
    except BaseException as error:
        download.close()
        if isinstance(error, OSError):
            raise tool_error_from_oserror(error, opened.relative_path) from None
        raise
    found.append(download)


# -- storing ----------------------------------------------------------------------------------------------------------


async def _store(visit: Visit, path: str, body: AsyncIterator[bytes], condition: Condition) -> Stored:
    upload = _Upload(visit, path, condition)
    try:
        await visit.run(upload.begin)
        block: list[bytes] = []
        size = 0
        async for chunk in body:
            block.append(chunk)
            size += len(chunk)
            if size >= BLOCK_BYTES:
                await visit.run(upload.append, block)
                block = []
                size = 0
        await visit.run(upload.finish, block)
        return await visit.change(upload.resolve, upload.perform)
    finally:
        if upload.unfinished:
            await visit.clean_up(upload.close)


async def _store_part(visit: Visit, part: Part) -> Stored | NotStored:
    if part.path is None:
        return NotStored("", ErrorCode.INVALID_ARGUMENTS.value, "the part names no file; its filename is the path")
    try:
        return await _store(visit, part.path, part.chunks, UNCONDITIONAL)
    except ToolError as error:
        refused = problem(error, changes=True)
        if not isinstance(refused, Conflict | InvalidPath | NotFound | NoSpace):
            raise refused from None
        if error.code is ErrorCode.NOT_FOUND:
            await visit.run(_find_root, visit)
        return NotStored(part.path, error.code.value, error.message)


def _find_root(visit: Visit) -> None:
    """Raise ToolError when it is the workspace's directory that is not there."""
    visit.root().close()


class _Upload:
    """One file on its way in; its methods run in the file pool, `perform` while no other change of the file does."""

    def __init__(self, visit: Visit, path: str, condition: Condition) -> None:
        self._visit = visit
        self._path = path
        self._condition = condition
        self._check = visit.signal.raise_if_aborted
        self._spool: Spool | None = None
        self._etag = ""

    @property
    def unfinished(self) -> bool:
        """Whether there is something to clean up."""
        return self._spool is not None

    def begin(self) -> None:
        """Find out what can be told before the body is read, and make the temporary file."""
        with self._visit.root() as root:
            path = root.relative(self._path)
            self._spool = Spool(self._directory(root, path), path.shown, self._visit.quota)
        if self._visit.signal.aborted:
            self.close()  # nobody waits for this thread any more

    def append(self, parts: list[bytes]) -> None:
        assert self._spool is not None  # noqa: S101 - begun
        self._spool.append(parts, self._check)

    def finish(self, parts: list[bytes]) -> None:
        assert self._spool is not None  # noqa: S101 - begun
        self._spool.append(parts, self._check)
        self._spool.sync()
        self._etag = self._spool.etag(self._check)

    def resolve(self) -> Target:
        with self._visit.root() as root:
            path = root.relative(self._path)
            try:
                return root.target(path, create_parents=self._condition.match is None, check=self._check)
            except ToolError as error:
                if error.code is ErrorCode.NOT_FOUND and self._condition.match is not None:
                    raise _failed(path.shown, None) from None
                raise

    def perform(self, target: Target) -> Stored:
        assert self._spool is not None  # noqa: S101 - begun
        expected = self._require(target)
        try:
            created = self._spool.move_to(
                target,
                commit=self._visit.signal.commit,
                create_only=self._condition.create_only,
                expected=expected,
            )
        except ToolError as error:
            if error.code in {ErrorCode.ALREADY_EXISTS, ErrorCode.ETAG_MISMATCH}:
                raise _failed(target.shown, _current(target, self._check)) from None
            raise
        stored = Stored(target.relative_path, self._spool.size, self._etag, created)
        self.close()
        return stored

    def close(self) -> None:
        if self._spool is not None:
            self._spool.close()
            self._spool = None

    def _directory(self, root: Root, path: RelativePath) -> int:
        """Open the directory the temporary file goes to: that of the file, or the nearest one that exists."""
        try:
            target = root.target(path)
        except ToolError as error:
            if error.code is not ErrorCode.NOT_FOUND:
                raise
            if path.directory_only:
                raise tool_error_from_oserror(IsADirectoryError(errno.EISDIR, ""), path.shown) from None
            self._condition.require(None, path.shown)
            return root.nearest_directory(path)
        try:
            self._look(target)
        except BaseException:
            target.close()
            raise
        return target.directory

    def _look(self, target: Target) -> None:
        """Raise what would be raised for the file as it is now."""
        status = target.status()
        if status is not None and not stat.S_ISREG(status.st_mode):
            raise irregular(status.st_mode, target.shown)
        self._require(target)

    def _require(self, target: Target) -> os.stat_result | None:
        """Check the condition and return the status of the file it was checked on, None when there is none."""
        if not self._condition.asked:
            return None
        status = target.status()
        self._condition.require(_current(target, self._check), target.shown)
        return status


def _current(target: Target, check: Callable[[], None]) -> str | None:
    """Return the entity tag of a target, None when there is nothing."""
    try:
        fd, _ = target.open_existing()
    except ToolError as error:
        if error.code is ErrorCode.NOT_FOUND:
            return None
        raise
    try:
        return etag_of_file(fd, check)
    except OSError as error:
        raise tool_error_from_oserror(error, target.shown) from None
    finally:
        os.close(fd)


def _failed(shown: str, current: str | None) -> PreconditionFailed:
    now = f"{shown} does not exist" if current is None else f"the ETag of {shown} is {current} now"
    return PreconditionFailed(f"the condition does not hold, nothing was changed: {now}", currentEtag=current or None)


# -- listing ----------------------------------------------------------------------------------------------------------


def _tree(visit: Visit, path: str, depth: int | None, limit: int, after: bytes | None) -> TreePage:
    with visit.root() as root:
        start = root.relative(path)
        fd = root.open_file(start, os.O_RDONLY | os.O_DIRECTORY)
    try:
        prefix = b"" if start.raw == b"." else start.raw.rstrip(b"/") + b"/"
        selection = _Selection(depth, after, MAX_PATH_BYTES - len(prefix))
        return _page(fd, prefix, selection, limit, visit.signal.raise_if_aborted)
    except OSError as error:
        raise tool_error_from_oserror(error, start.shown) from None
    finally:
        os.close(fd)


def _page(fd: int, prefix: bytes, selection: "_Selection", limit: int, check: Callable[[], None]) -> TreePage:
    entries: list[dict[str, Any]] = []
    last: bytes | None = None
    room = TREE_NAMES_BYTES
    found: Generator[Entry, None, None]
    with contextlib.closing(walk(fd, selection, check=check, page_entries=min(limit + 1, PAGE_ENTRIES))) as found:
        for entry in found:
            below = os.fsencode(entry.path)
            if len(entries) >= limit or (entries and room < 2 * len(below)):
                return TreePage(entries, last)
            described = _describe(entry, prefix + below)
            if described is not None:
                room -= 2 * len(below)
                entries.append(described)
                last = below
    return TreePage(entries, None)


class _Selection:
    """What a page of a tree shows: everything after a path, our own temporary files apart."""

    def __init__(self, depth: int | None, after: bytes | None, longest: int) -> None:
        self._depth = depth
        self._longest = longest
        self._after = [] if after is None else after.split(b"/")
        # For each directory on the way the name in it the page goes on after; None when all of it comes after.
        self._bounds: list[bytes | None] = []

    def enter(self, path: str) -> Callable[[str], object]:
        level = len(self._bounds)
        on_the_way = level < len(self._after) and (
            not level or self._bounds[-1] == os.fsencode(path.rpartition("/")[2])
        )
        bound = self._after[level] if on_the_way else None
        self._bounds.append(bound)

        def wants(name: str) -> bool:
            return not name.startswith(TEMPORARY_PREFIX) and (bound is None or os.fsencode(name) > bound)

        return wants

    def read(self, directory: int, count: int, noticed: frozenset[str]) -> None:
        """Nothing to note."""

    def choose(self, path: str, name: str, kind: Kind) -> tuple[bool, bool]:
        bound = self._bounds[-1]
        key = os.fsencode(name)
        if name.startswith(TEMPORARY_PREFIX) or (bound is not None and key < bound):
            return False, False
        deeper = kind == "directory" and (self._depth is None or len(self._bounds) < self._depth)
        return key != bound, deeper and len(os.fsencode(path)) < self._longest

    def leave(self) -> None:
        self._bounds.pop()


def _describe(entry: Entry, path: bytes) -> dict[str, Any] | None:
    """Return what a listing says of an entry; None when it is gone."""
    name = os.fsencode(entry.name)
    size = modified = None
    try:
        status = os.stat(entry.name, dir_fd=entry.directory, follow_symlinks=False)
    except FileNotFoundError:
        return None
    except OSError:
        pass  # in a directory that may be read and not entered the name is all there is to know
    else:
        size = status.st_size if entry.kind == "file" else None
        with contextlib.suppress(ValueError, OverflowError):  # a time no calendar has
            modified = rfc3339(status.st_mtime_ns // 1_000_000)
    described: dict[str, Any] = {
        "path": display_path(path),
        "name": display_path(name),
        "type": entry.kind,
        "bytes": size,
        "modifiedAt": modified,
    }
    if entry.kind == "symlink":
        with contextlib.suppress(OSError):
            described["target"] = display_path(os.readlink(name, dir_fd=entry.directory))
    if entry.problem is not None:
        described["error"] = _reason(entry.problem)
    elif entry.kind == "directory" and len(path) >= MAX_PATH_BYTES:
        described["error"] = f"not listed: a path can have {MAX_PATH_BYTES} bytes"
    try:
        path.decode()
    except UnicodeDecodeError:
        described["nameBase64"] = base64.b64encode(name).decode()
        described["pathBase64"] = base64.b64encode(path).decode()
    return described


def _reason(error: OSError) -> str:
    if isinstance(error, NotEntered):
        return f"not listed: {error.strerror}"
    return f"not listed: {os.strerror(error.errno)}" if error.errno else f"not listed: {error}"
