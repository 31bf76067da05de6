"""A workspace's tree as one archive, out and in.

Out: a stream of what is there, file by file. In: the archive is kept beside its destination until all of it has been
looked at; then each file goes the way an upload goes, through the same containment and the same queue.
"""

import os
import time
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Generator, Sequence
from dataclasses import dataclass
from typing import Final

from app.domain.abort import Aborted, AbortReason
from app.errors import AppError, Conflict, ErrorCode, InvalidPath, InvalidRequest, PayloadTooLarge, ToolError
from app.sandbox.archive_reader import ArchiveError, ArchiveFormat, Index, Member, check_index, members
from app.sandbox.archive_writer import ZIP_INDEX_MAX_BYTES, ZIP_NAME_MAX_BYTES, Changed, Exclusion, Survey, pack, survey
from app.sandbox.containment import MAX_PATH_BYTES, RelativePath, Target, display_path, tool_error_from_oserror
from app.sandbox.held import Held
from app.sandbox.spool import Spool
from app.services.file_access import FileAccess, Visit, problem
from app.services.files import BLOCK_BYTES, FileShrank
from app.tools.glob_pattern import GlobError
from app.tools.path_pattern import PathPattern

CHUNK_BYTES: Final = 262_144
"""What a step of an archive gathers before it is sent, unless that takes longer than `STEP_SECONDS`."""
STEP_SECONDS: Final = 0.1


@dataclass(frozen=True, slots=True)
class Unpacked:
    """What an archive was unpacked to: how many files were new and how many replaced one, and their bytes."""

    created: int
    replaced: int
    directories: int
    bytes: int


class Packing:
    """An archive in the making. Close it."""

    def __init__(self, visit: Visit, pieces: Generator[bytes, None, None], directory: int) -> None:
        self._visit = visit
        self._pieces = pieces
        self._directory = directory
        self._held = Held(self._release)

    async def chunks(self) -> AsyncGenerator[bytes, None]:
        """Yield the archive.

        Raises:
            FileShrank: a file was cut or taken away while it was read: what was sent is no archive.
        """
        while chunk := await self._visit.run(self._step):
            yield chunk

    def close(self) -> None:
        self._held.let_go()

    def _step(self) -> bytes:
        parts: list[bytes] = []
        size = 0
        until = time.monotonic() + STEP_SECONDS
        with self._held.use():
            try:
                for piece in self._pieces:
                    parts.append(piece)
                    size += len(piece)
                    if size >= CHUNK_BYTES or (size and time.monotonic() > until):
                        break
            except (Changed, OSError) as error:
                raise FileShrank(f"a file changed while it was packed: {error}") from None
        return b"".join(parts)

    def _release(self) -> None:
        self._pieces.close()
        os.close(self._directory)


class ArchiveService:
    """Archives of workspaces. An `owner` of None sees every workspace.

    Args:
        access: the way to the files.
        max_bytes: what an archive may have, and what it may unpack to.
    """

    def __init__(self, access: FileAccess, *, max_bytes: int) -> None:
        self._access = access
        self.max_bytes = max_bytes

    async def pack(
        self, workspace_id: str, path: str, form: ArchiveFormat, exclude: Sequence[str], *, owner: str | None
    ) -> Packing:
        """Begin an archive of the directory `path`; names in it are relative to that.

        Args:
            workspace_id: the workspace.
            path: the directory.
            form: the format.
            exclude: globs of what is left out, as the find tool takes them.
            owner: who asks.

        Raises:
            InvalidRequest: a glob that is none.
            Conflict: `path` is no directory; something in it cannot be read.
            PayloadTooLarge: there is too much for a zip archive.
            NotFound, WorkspaceGone, WorkspaceMoved, InvalidPath: the workspace or the directory is not there.
        """
        exclusions = [_exclusion(text) for text in exclude]
        found: list[Packing] = []
        async with self._access.visit(workspace_id, owner=owner, changes=True) as visit:
            try:
                await visit.run(_begin, visit, path, form, exclusions, found)
            except BaseException:
                for packing in found:
                    packing.close()
                raise
        return found[0]

    async def unpack(
        self,
        workspace_id: str,
        path: str,
        form: ArchiveFormat,
        body: AsyncIterator[bytes],
        *,
        gone: Callable[[], Awaitable[bool]],
        owner: str | None,
        applied: list[str] | None = None,
    ) -> Unpacked:
        """Unpack the archive `body` below the directory `path`, which is made when it is missing.

        Nothing is unpacked unless every entry is one that is taken. Existing files are replaced one by one, in the
        archive's order, and keep owner and permission bits; others get the archive's bits as far as the umask grants
        them. All get the archive's modification times.

        Args:
            workspace_id: the workspace.
            path: the directory.
            form: the format.
            body: the archive.
            gone: asked before each file: whether nobody waits for the answer any more.
            owner: who asks.
            applied: filled with the paths of what was unpacked, however this ends.

        Raises:
            InvalidRequest: the archive is damaged, or has an entry that is not taken; nothing was unpacked.
            PayloadTooLarge: it holds too much; nothing was unpacked.
            NotFound, WorkspaceGone, WorkspaceMoved, InvalidPath: the workspace is not there, or can have no such path.
            Conflict, NoSpace, and any other once files were unpacked: with the member `applied`, their paths.
            Aborted: nobody waits any more; what was unpacked stays.
        """
        async with self._access.visit(workspace_id, owner=owner, changes=True) as visit:
            unpacking = _Unpacking(visit, path, form, self.max_bytes, [] if applied is None else applied)
            try:
                await visit.run(unpacking.begin)
                await _keep(visit, unpacking, body)
                await visit.run(unpacking.check)
                while not await gone():
                    if not await visit.run(unpacking.next):
                        return unpacking.result
                    if unpacking.waiting:
                        await visit.change(unpacking.resolve, unpacking.perform)
                visit.signal.abort(AbortReason.CANCELLED)
                raise Aborted(AbortReason.CANCELLED)
            except (ToolError, ArchiveError) as error:
                raise unpacking.explain(error) from None
            finally:
                if unpacking.unfinished:
                    await visit.clean_up(unpacking.close)


# -- out --------------------------------------------------------------------------------------------------------------


def _exclusion(text: str) -> Exclusion:
    try:
        return PathPattern(text).start
    except GlobError as error:
        entry = {"parameter": "exclude", "code": "glob", "message": f"{text!r} is no glob: {error}"}
        raise InvalidRequest(entry["message"], errors=[entry]) from None


def _begin(visit: Visit, path: str, form: ArchiveFormat, exclusions: Sequence[Exclusion], found: list[Packing]) -> None:
    check = visit.signal.raise_if_aborted
    with visit.root() as root:
        start = root.relative(path)
        directory = root.open_file(start, os.O_RDONLY | os.O_DIRECTORY)
    try:
        _require_packable(survey(directory, exclusions, check), form)
        check()
    except BaseException as error:
        os.close(directory)
        if isinstance(error, OSError):
            raise tool_error_from_oserror(error, start.shown) from None
        raise
    found.append(Packing(visit, pack(directory, form, exclusions, check), directory))


def _require_packable(looked: Survey, form: ArchiveFormat) -> None:
    """Raise when what was seen of a tree cannot become an archive: once that is sent, nothing can be said any more."""
    if looked.unreadable:
        errors = [
            {
                "parameter": "exclude",
                "code": ErrorCode.PERMISSION_DENIED.value,
                "message": f"no permission to read {display_path(name)}",
            }
            for name in looked.unreadable
        ]
        raise Conflict(f"{errors[0]['message']}; exclude what cannot be read", errors=errors)
    if form is ArchiveFormat.ZIP and (
        looked.index_bytes > ZIP_INDEX_MAX_BYTES or looked.longest_name > ZIP_NAME_MAX_BYTES
    ):
        raise PayloadTooLarge("there are too many files, or too long names, for a zip archive here; ask for a tar")


# -- in ---------------------------------------------------------------------------------------------------------------


async def _keep(visit: Visit, unpacking: "_Unpacking", body: AsyncIterator[bytes]) -> None:
    block: list[bytes] = []
    size = 0
    async for chunk in body:
        block.append(chunk)
        size += len(chunk)
        if size >= BLOCK_BYTES:
            await visit.run(unpacking.append, block)
            block = []
            size = 0
    await visit.run(unpacking.append, block)


@dataclass(slots=True)
class _Unpacking:
    """One archive on its way in; its methods run in the file pool, one after another."""

    visit: Visit
    path: str
    form: ArchiveFormat
    max_bytes: int
    applied: list[str]
    _created: int = 0
    _directories: int = 0
    _bytes: int = 0
    _prefix: bytes = b""
    _archive: Spool | None = None
    _members: Generator[Member, None, None] | None = None
    _current: Member | None = None
    _file: Spool | None = None

    @property
    def unfinished(self) -> bool:
        """Whether there is something to clean up."""
        return self._archive is not None

    @property
    def waiting(self) -> bool:
        """Whether a file is there to be given its name."""
        return self._file is not None

    @property
    def result(self) -> Unpacked:
        files = len(self.applied) - self._directories
        return Unpacked(self._created, files - self._created, self._directories, self._bytes)

    def begin(self) -> None:
        """Make the file that keeps the archive."""
        with self.visit.root() as root:
            path = root.relative(self.path)
            self._prefix = b"" if path.raw == b"." else path.raw.rstrip(b"/") + b"/"
            below = RelativePath(self._prefix + b"archive", path.shown, path.climbs)
            self._archive = Spool(root.nearest_directory(below), path.shown, self.visit.quota)
        if self.visit.signal.aborted:
            self.close()  # nobody waits for this thread any more

    def append(self, parts: list[bytes]) -> None:
        assert self._archive is not None  # noqa: S101 - begun
        self._archive.append(parts, self.visit.signal.raise_if_aborted)

    def check(self) -> Index:
        """Look at the whole archive, then go back to its start."""
        assert self._archive is not None  # noqa: S101 - begun
        archive, check = self._archive, self.visit.signal.raise_if_aborted
        index = check_index(
            self.form, archive.read, archive.size, self.max_bytes, check, longest=MAX_PATH_BYTES - len(self._prefix)
        )
        self._members = members(self.form, archive.read, archive.size, self.max_bytes, check)
        return index

    def next(self) -> bool:
        """Take the next entry up: make the directory, or write the content of the file; False when there is none."""
        assert self._members is not None  # noqa: S101 - checked
        member = self._current = next(self._members, None)
        if member is None:
            return False
        check = self.visit.signal.raise_if_aborted
        path = self._path(member)
        with self.visit.root() as root:
            if member.directory:
                root.make_directory(path, check)
                self._directories += 1
                self.applied.append(path.shown + "/")
                return True
            directory = root.nearest_directory(path)
        self._file = Spool(directory, path.shown, self.visit.quota)
        for block in member.blocks:
            self._file.append((block,), check)
        self._file.sync()
        return True

    def resolve(self) -> Target:
        assert self._current is not None  # noqa: S101 - taken up
        with self.visit.root() as root:
            return root.target(self._path(self._current), create_parents=True, check=self.visit.signal.raise_if_aborted)

    def perform(self, target: Target) -> None:
        """Give the file its name, while no other change of it runs."""
        assert self._current is not None  # noqa: S101 - taken up
        assert self._file is not None  # noqa: S101 - taken up
        member = self._current
        created = self._file.move_to(
            target, commit=self.visit.signal.commit, mode=member.mode, modified_ns=member.modified_ns
        )
        self._created += created
        self._bytes += self._file.size
        self.applied.append(display_path(self._prefix + member.path))
        self._file.close()
        self._file = None

    def close(self) -> None:
        for spool in (self._file, self._archive):
            if spool is not None:
                spool.close()
        self._file = self._archive = None

    def explain(self, error: ToolError | ArchiveError) -> AppError:
        """Return the failure of the request."""
        if isinstance(error, ArchiveError):
            refused = _refused(error)
        elif self._members is None:
            refused = problem(error, changes=True)
        else:
            refused = self._failed(error)
        if self._members is not None:
            refused.extra["applied"] = self.applied
        return refused

    def _failed(self, error: ToolError) -> AppError:
        """Return what it means that an entry could not be stored."""
        refused = problem(error, changes=True)
        if isinstance(refused, InvalidPath):
            # The path was looked at: what leads out of the workspace is a link that is there already.
            refused = Conflict(error.message)
        if self._current is not None:
            refused.extra["errors"] = [_entry_error(self._current.path, error.code.value, error.message)]
        return refused

    def _path(self, member: Member) -> RelativePath:
        raw = self._prefix + member.path
        return RelativePath(raw, display_path(raw))


def _refused(error: ArchiveError) -> AppError:
    kind = PayloadTooLarge if error.over_limit else InvalidRequest
    where = "" if error.name is None else f" ({display_path(error.name)})"
    entry = _entry_error(error.name, error.code, error.message)
    return kind(f"the archive is not taken: {error.message}{where}", errors=[entry])


def _entry_error(name: bytes | None, code: str, message: str) -> dict[str, str]:
    """Return one entry of `errors`; the pointer is that of the archive's entry, as if its paths were names."""
    place = "" if name is None else "/" + display_path(name).replace("~", "~0").replace("/", "~1")
    return {"pointer": f"#{place}", "code": code, "message": message}
