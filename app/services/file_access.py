"""What the use cases on a workspace's files share: a visit to the workspace, and what its failures are to a caller."""

from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from typing import Final, TypeVar, TypeVarTuple

from app.domain.abort import AbortSignal
from app.domain.workspace import Workspace
from app.errors import (
    AppError,
    Conflict,
    ErrorCode,
    InvalidPath,
    NoSpace,
    NotFound,
    Overloaded,
    PayloadTooLarge,
    ToolError,
)
from app.sandbox.account import account_of
from app.sandbox.containment import Root, Target
from app.sandbox.disk import DiskUsage, Quota
from app.sandbox.file_pool import FilePool
from app.services.workspaces import WorkspaceService
from app.tools.file_mutation_queue import FileMutationQueue

A = TypeVarTuple("A")
R = TypeVar("R")

_PROBLEMS: Final[dict[ErrorCode, type[AppError]]] = {
    ErrorCode.INVALID_ARGUMENTS: InvalidPath,
    ErrorCode.PATH_OUTSIDE_WORKSPACE: InvalidPath,
    ErrorCode.NAME_TOO_LONG: InvalidPath,
    ErrorCode.NOT_FOUND: NotFound,
    ErrorCode.NO_SPACE: NoSpace,
    ErrorCode.TOO_LARGE: PayloadTooLarge,
    ErrorCode.LIMIT_EXCEEDED: Overloaded,
}


class Visit:
    """One request's work on the files of one workspace.

    `signal` is aborted when the request's task is cancelled; a change looks at it up to its commit point. `quota` is
    what the workspace may hold, None for no bound.
    """

    def __init__(
        self, workspace: Workspace, files: FilePool, mutations: FileMutationQueue, quota: Quota | None
    ) -> None:
        self.workspace = workspace
        self.quota = quota
        self.signal = AbortSignal()
        self._files = files.acting_as(account_of(workspace.root_uid, workspace.root_gid))
        self._mutations = mutations

    def root(self) -> Root:
        """Open the workspace's directory; in the file pool."""
        workspace = self.workspace
        return Root.open(workspace.root, (workspace.root_device, workspace.root_inode), workspace.options.containment)

    async def run(self, function: Callable[[*A], R], *args: *A) -> R:
        """Run a step in the file pool."""
        return await self._files.run(function, *args, signal=self.signal, workspace=self.workspace.root)

    async def clean_up(self, function: Callable[[], None]) -> None:
        """Run a last step in the file pool, also when the request is being cancelled."""
        await self._files.run(function, signal=AbortSignal(), workspace=self.workspace.root)

    async def change(self, resolve: Callable[[], Target], work: Callable[[Target], R]) -> R:
        """Change a file when every earlier change of it, a tool's too, is over: see `FileMutationQueue.run`."""
        return await self._mutations.run(self._files, self.workspace.root, resolve, work, self.signal)


class FileAccess:
    """The way to the files of workspaces; `mutations` is the queue that the tools use, `usage` their count."""

    def __init__(
        self, workspaces: WorkspaceService, files: FilePool, mutations: FileMutationQueue, usage: DiskUsage
    ) -> None:
        self._workspaces = workspaces
        self._usage = usage
        self._files = files
        self._mutations = mutations

    @asynccontextmanager
    async def visit(
        self, workspace_id: str, *, owner: str | None, changes: bool = False
    ) -> AsyncGenerator[Visit, None]:
        """Visit a workspace. A ToolError that leaves the block becomes what `problem` makes of it.

        Raises:
            NotFound, WorkspaceGone: there is no such workspace, or it was deleted or has expired.
            WorkspaceMoved: another directory stands at its root.
        """
        workspace = await self._workspaces.usable(workspace_id, owner=owner)
        quota = self._usage.quota(
            workspace.root,
            (workspace.root_device, workspace.root_inode),
            managed=workspace.managed,
            asked=workspace.options.quota_bytes,
        )
        try:
            yield Visit(workspace, self._files, self._mutations, quota)
        except ToolError as error:
            if error.code is ErrorCode.NOT_FOUND:
                # It may be the root that is not there: moved, or deleted since the look above.
                await self._workspaces.check_root(workspace_id)
            raise problem(error, changes=changes) from None


def problem(error: ToolError, *, changes: bool) -> AppError:
    """Return a failure on a file as the failure of a request; `errors` keeps the code a tool's result would have.

    A path through something that is no directory leads nowhere for a reader (`not_found`) and is in the way of a
    change (`conflict`).
    """
    kind = _PROBLEMS.get(error.code, Conflict)
    if error.code is ErrorCode.NOT_A_DIRECTORY and not changes:
        kind = NotFound
    entry = {"parameter": "path", "code": error.code.value, "message": error.message}
    return kind(error.message, errors=[entry])
