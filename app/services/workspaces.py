"""Workspaces: made or adopted, changed, deleted, expired.

Their directories stand here; their records stay for as long as retention keeps them.
"""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, TypeVar, TypeVarTuple

import structlog
from pydantic.alias_generators import to_camel

from app.domain.abort import AbortSignal
from app.domain.audit import SERVICE, AuditAction, audit
from app.domain.caller import Caller
from app.domain.clock import now_ms
from app.domain.idempotency import IdempotencyKey
from app.domain.ids import new_id
from app.domain.workspace import Workspace, WorkspaceOptions, WorkspaceStatus
from app.errors import AppError, Conflict, NoSpace, NotFound, Overloaded, WorkspaceGone, WorkspaceMoved
from app.sandbox.account import Account, account_of, acts_as_others
from app.sandbox.disk import DiskUsage
from app.sandbox.file_pool import FilePool
from app.sandbox.limits import NO_POLICY, CommandPolicy
from app.services.batches import BatchService
from app.services.idempotency import key_reused, made_before
from app.services.workspace_roots import (
    Adoption,
    WorkspaceRoots,
    from_os_error,
    invalid,
    lay_in,
    look_at,
    sweep,
    take_out,
)
from app.storage.base import (
    CreateWorkspace,
    Existing,
    Page,
    Placement,
    Refused,
    SetWorkspaceStatus,
    Storage,
    UpdateWorkspace,
)
from app.storage.read_pool import ReadPool
from app.storage.record_writer import RecordWriter

# How long a delete waits for what runs; a thread that hangs in the kernel writes into the trash afterwards.
STOP_SECONDS: Final = 10.0
# A root on a dead network file system: the calls of the batch will tell.
LOOK_SECONDS: Final = 5.0
HOUSEKEEPING_SECONDS: Final = 30.0
SHORTEST_PAUSE_SECONDS: Final = 0.1
# Nobody writes to a temporary file for this long and still needs it.
SWEEP_SECONDS: Final = 5.0
# How often it is looked for them soon after a start; an interruption may be noted this long after it happened.
FIRST_SWEEPS: Final = 3
LATE_SECONDS: Final = 60
# How far what is noted of the last sweep may lie behind.
SWEEP_NOTED_SECONDS: Final = 3600
KNOWN_ROOTS: Final = 4096
EXPIRED_AT_ONCE: Final = 64
# How long a request to make a workspace waits for the one before it with the same idempotency key.
SAME_KEY_SECONDS: Final = 30.0

A = TypeVarTuple("A")
R = TypeVar("R")

_log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class WorkspaceRequest:
    """What a caller wants. `files` are contents by path relative to the root; `root` is a directory to adopt."""

    name: str | None
    metadata: dict[str, Any]
    options: WorkspaceOptions
    files: Mapping[str, bytes]
    ttl_seconds: int | None
    trusted: bool
    root: str | None


@dataclass(frozen=True, slots=True)
class Created:
    """A workspace. `attached`: an earlier request made it, and it is shown as it is now."""

    workspace: Workspace
    attached: bool


@dataclass(frozen=True, slots=True)
class WorkspaceChange:
    """New values of the fields named in `fields`; the others are not looked at."""

    fields: frozenset[str]
    name: str | None
    metadata: dict[str, Any]
    options: WorkspaceOptions
    trusted: bool
    ttl_seconds: int | None


@dataclass(frozen=True, slots=True)
class _KnownRoot:
    """What never changes in a workspace's row."""

    path: str
    identity: tuple[int, int]
    owner: str
    account: Account | None
    node_id: str | None


class WorkspaceService:
    """The workspaces of one data directory. An `owner` of None sees everything.

    Args:
        roots: where their directories stand.
        allow_unrestricted: whether `containment: "unrestricted"` is granted.
        policy: what is granted to commands.
        usage: how much workspaces hold.
        node_id: whose directories are here; None for a process that has none.
    """

    def __init__(
        self,
        *,
        storage: Storage,
        reads: ReadPool,
        records: RecordWriter,
        files: FilePool,
        batches: BatchService,
        roots: WorkspaceRoots,
        allow_unrestricted: bool = False,
        policy: CommandPolicy = NO_POLICY,
        usage: DiskUsage | None = None,
        node_id: str | None = None,
    ) -> None:
        self._storage = storage
        self._reads = reads
        self._records = records
        self._files = files
        self._batches = batches
        self._roots = roots
        self._allow_unrestricted = allow_unrestricted
        self._policy = policy
        self._usage = usage or DiskUsage()
        self._node_id = node_id
        self._known: dict[str, _KnownRoot] = {}
        self._expiries: dict[str, int] = {}
        self._sweeps = 0
        self._creating: dict[tuple[str, str], asyncio.Future[None]] = {}
        self._wake = asyncio.Event()

    # -- use cases ----------------------------------------------------------------------------------------------------

    async def create(
        self,
        request: WorkspaceRequest,
        *,
        owner: str,
        idempotency: IdempotencyKey | None = None,
        by: Caller = SERVICE,
    ) -> Created:
        """Make a workspace with its files, or adopt a directory. After an error nothing of it is left.

        Of requests with one idempotency key the first makes the workspace and the others attach to it.

        Raises:
            IdempotencyKeyReused: the key came with another request before.
            WorkspaceGone: the key's workspace was deleted or has expired.
            InvalidRequest: an option the server does not grant, a path or a root that cannot be.
            Conflict: the root is equal to, inside or around another workspace's; a file exists in an adopted one.
            NoSpace, Overloaded, StorageUnavailable: nothing was made.
        """
        if idempotency is None:
            return await self._create(request, owner, None, by)
        async with self._alone(owner, idempotency):
            made = await made_before(self._storage, self._reads, idempotency, owner=owner)
            if made is not None:
                return await self._attach(made)
            return await self._create(request, owner, idempotency, by)

    async def _create(
        self, request: WorkspaceRequest, owner: str, idempotency: IdempotencyKey | None, by: Caller
    ) -> Created:
        managed = request.root is None
        self._check_options(request.options, managed=managed)
        self._require_room(request, managed=managed)
        workspace_id = new_id("ws")
        if request.root is None:
            adoption = Adoption(self._roots.managed(workspace_id), *self._roots.owner)
        else:
            adoption = await self._run(self._roots.adopted, request.root)
        root, account = adoption.root, account_of(adoption.uid, adoption.gid)
        try:
            laid = await self._run(partial(lay_in, root, request.files, account, make=managed))
        except OSError as error:
            raise from_os_error(error) from error
        workspace = _new_workspace(workspace_id, request, owner, adoption, laid.identity, self._node_id)
        try:
            noted = audit(by, AuditAction.WORKSPACE_CREATED, workspace_id, **_noted_workspace(workspace))
            outcome = await self._records.write(CreateWorkspace(workspace, idempotency, noted), droppable=True)
            if isinstance(outcome, Refused):
                if idempotency is not None and outcome.reason == "key_reused":
                    raise key_reused(idempotency)
                raise Conflict(
                    f"{root} is equal to, inside or around the root of another workspace",
                    errors=[{"pointer": "#/root", "code": outcome.reason, "message": "overlaps another workspace"}],
                )
        except AppError:
            await self._run(partial(take_out, root, laid, account, made=managed))
            raise
        if isinstance(outcome, Existing):
            await self._run(partial(take_out, root, laid, account, made=managed))
            return await self._attach(outcome.id)
        self._remember(workspace)
        return Created(workspace, attached=False)

    async def _attach(self, workspace_id: str) -> Created:
        return Created(await self.usable(workspace_id, owner=None), attached=True)

    @contextlib.asynccontextmanager
    async def _alone(self, owner: str, idempotency: IdempotencyKey) -> AsyncIterator[None]:
        """Let the requests of one key pass one at a time, so that only one lays its files in.

        In one process: between processes the write alone decides.
        """
        name = (owner, idempotency.value)
        try:
            async with asyncio.timeout(SAME_KEY_SECONDS):
                while name in self._creating:
                    await asyncio.wait([self._creating[name]])
        except TimeoutError:
            raise Overloaded(
                "an earlier request with this Idempotency-Key is still being served; send it again in a moment"
            ) from None
        passed = self._creating[name] = asyncio.get_running_loop().create_future()
        try:
            yield
        finally:
            del self._creating[name]
            passed.set_result(None)

    async def get(self, workspace_id: str, *, owner: str | None) -> Workspace:
        """Return a workspace, gone or not.

        Raises:
            NotFound: there is none.
        """
        workspace = await self._reads.run(self._storage.workspace, workspace_id)
        if workspace is None or (owner is not None and workspace.owner != owner):
            raise NotFound(f"there is no workspace {workspace_id}")
        return workspace

    async def usable(self, workspace_id: str, *, owner: str | None) -> Workspace:
        """Return a workspace that can be used.

        Raises:
            NotFound, WorkspaceGone.
            WorkspaceMoved: it belongs to root, and so does this process.
        """
        workspace = await self.get(workspace_id, owner=owner)
        if workspace.status is not WorkspaceStatus.ACTIVE or _expired(workspace):
            raise _gone(workspace_id)
        if _is_of_root(workspace):
            raise WorkspaceMoved(
                f"{workspace.root} belongs to root, and a service that is root does nothing as root: start it as an "
                "ordinary user, or make a new workspace"
            )
        return workspace

    async def owner(self, workspace_id: str, *, seen_by: str | None) -> str:
        """Return whom a workspace belongs to, gone or not; `seen_by` None sees every workspace.

        Raises:
            NotFound: there is none, or it belongs to somebody else.
        """
        known = self._known.get(workspace_id)
        if known is None:
            return (await self.get(workspace_id, owner=seen_by)).owner
        if seen_by is not None and known.owner != seen_by:
            raise NotFound(f"there is no workspace {workspace_id}")
        return known.owner

    async def list(self, *, owner: str | None, before: str | None, limit: int) -> Page[Workspace]:
        """Return workspaces, newest first, deleted ones too."""
        return await self._reads.run(self._storage.workspaces, before=before, limit=limit, owner=owner)

    async def update(
        self, workspace_id: str, change: WorkspaceChange, *, owner: str | None, by: Caller = SERVICE
    ) -> Workspace:
        """Set the fields of `change` and return the workspace as it is then.

        Raises:
            NotFound, WorkspaceGone, InvalidRequest, Overloaded, StorageUnavailable.
        """
        workspace = await self.usable(workspace_id, owner=owner)
        fields = change.fields
        if "options" in fields:
            self._check_options(change.options, managed=workspace.managed)
        expires = "ttl_seconds" in fields
        if fields:
            outcome = await self._records.write(
                UpdateWorkspace(
                    workspace_id,
                    name=change.name if "name" in fields else None,
                    clear_name="name" in fields and change.name is None,
                    trusted=change.trusted if "trusted" in fields else None,
                    options=change.options if "options" in fields else None,
                    metadata=change.metadata if "metadata" in fields else None,
                    expires_at=_expiry(change.ttl_seconds) if expires else None,
                    clear_expiry=expires and change.ttl_seconds is None,
                    audit=audit(by, AuditAction.WORKSPACE_UPDATED, workspace_id, **_noted_change(change)),
                ),
                droppable=True,
            )
            if isinstance(outcome, Refused):
                raise _gone(workspace_id)
        workspace = await self.get(workspace_id, owner=owner)
        self._remember(workspace)
        return workspace

    async def delete(self, workspace_id: str, *, owner: str | None, by: Caller = SERVICE) -> None:
        """Cancel what runs in a workspace, move a managed root to the trash and keep the records.

        One that is gone already is left as it is.

        Raises:
            NotFound, Overloaded, StorageUnavailable.
        """
        workspace = await self.get(workspace_id, owner=owner)
        if workspace.status in {WorkspaceStatus.ACTIVE, WorkspaceStatus.DELETING}:
            await self._end(workspace, WorkspaceStatus.DELETED, by)

    async def node_of(self, workspace_id: str) -> str | None:
        """Return the node whose directory a workspace is; None when there is no such workspace."""
        known = self._known.get(workspace_id)
        if known is not None:
            return known.node_id
        workspace = await self._reads.run(self._storage.workspace, workspace_id)
        if workspace is not None:
            self._remember(workspace)
        return None if workspace is None else workspace.node_id

    async def placement(self, workspace_id: str) -> Placement | None:
        """Return where a workspace is now; None when there is no such workspace."""
        return await self._reads.run(self._storage.placement, workspace_id, most=1)

    def forget(self, workspace_id: str) -> None:
        """Look a workspace up again when it is asked for: it may have been given to another node."""
        self._known.pop(workspace_id, None)

    async def check_root(self, workspace_id: str) -> bool:
        """Look whether the workspace's own directory stands at its root; a missing one is for the calls to tell.

        Return whether the workspace is of this process's node; only then there is something to look at.

        Raises:
            NotFound, WorkspaceGone: there is no such workspace, or it was deleted or expired.
            WorkspaceMoved: another directory stands there, or it belongs to another user now.
        """
        known = self._known.get(workspace_id)
        expires_at = self._expiries.get(workspace_id)
        if known is None or (expires_at is not None and expires_at <= now_ms()):
            # Looked up when its time has come, too: another process may have given it more.
            workspace = await self.usable(workspace_id, owner=None)
            self._remember(workspace)
            known = _known_root(workspace)
        if known.node_id != self._node_id:
            return False
        try:
            async with asyncio.timeout(LOOK_SECONDS):
                found = await self._run_as(known.account, look_at, known.path)
        except TimeoutError:
            return True
        if found is None:
            return True
        if found.identity != known.identity:
            raise WorkspaceMoved(
                f"another directory stands at {known.path}; put the old one back, make a new workspace, or, after a "
                "restore, run `toolcrib db relocate`"
            )
        if known.account is not None and found.uid != known.account.uid:
            raise WorkspaceMoved(
                f"{known.path} was given to another user; give it back to user {known.account.uid}, or make a new "
                "workspace"
            )
        return True

    # -- keeping house ------------------------------------------------------------------------------------------------

    async def recover(self) -> None:
        """Make the directories, finish what a stop cut short and note what expires; after batches are recovered."""
        await self._run(self._roots.make_directories)
        for workspace in await self._mine(WorkspaceStatus.DELETING):
            final = WorkspaceStatus.EXPIRED if _expired(workspace) else WorkspaceStatus.DELETED
            await self._end(workspace, final)
        for workspace in await self._mine(WorkspaceStatus.ACTIVE):
            self._remember(workspace)
        for name in await self._run(self._roots.possible_orphans):
            if await self._is_orphan(name):
                await self._run(self._roots.set_aside, self._roots.managed(name))

    async def _mine(self, status: WorkspaceStatus) -> Sequence[Workspace]:
        return await self._reads.run(self._storage.workspaces_with_status, status, node_id=self._node_id)

    async def _is_orphan(self, workspace_id: str) -> bool:
        if await self._reads.run(self._storage.workspace, workspace_id) is not None:
            return False
        # Records that begin later than the directory was made, such as those of an empty database that somebody
        # named by mistake, have never known it.
        older = await self._reads.run(self._storage.workspaces, before=workspace_id, limit=1)
        return bool(older.items)

    async def keep_house(self) -> None:
        """End workspaces whose time has come, empty the trash and sweep up after a crash, until cancelled."""
        while True:
            self._wake.clear()
            try:
                await self._expire()
                await self._run_until_cancelled(self._roots.empty_trash, "trash")
                await self._sweep()
            except Exception:  # noqa: BLE001 - a round that fails must not be the last one
                _log.exception("housekeeping_failed")
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._pause()):
                    await self._wake.wait()

    def _pause(self) -> float:
        pause = SWEEP_SECONDS if self._sweeps < FIRST_SWEEPS else HOUSEKEEPING_SECONDS
        if self._expiries:
            pause = min(pause, (min(self._expiries.values()) - now_ms()) / 1000)
        return max(SHORTEST_PAUSE_SECONDS, pause)

    async def _sweep(self) -> None:
        """Remove the temporary files that writers left who died, in the workspaces of interrupted batches."""
        if self._node_id is None:
            return
        self._sweeps += 1
        # Files are left alone while they are young, so batches are looked at until theirs are old for certain.
        seen_to = now_ms() - LATE_SECONDS * 1000
        since = await self._reads.run(self._storage.swept_at, self._node_id) or 0
        found = await self._reads.run(self._storage.interrupted_workspaces, self._node_id, since=since)
        for workspace in found:
            if _is_of_root(workspace):
                continue
            removed = await self._run_until_cancelled(
                partial(sweep, workspace.root, (workspace.root_device, workspace.root_inode), older_than=SWEEP_SECONDS),
                workspace.root,
                account_of(workspace.root_uid, workspace.root_gid),
            )
            if removed:
                _log.info("temporary_files_removed", workspace_id=workspace.id, files=removed)
        if found or seen_to - since > SWEEP_NOTED_SECONDS * 1000:
            await self._reads.run(self._storage.swept, self._node_id, seen_to)

    async def _expire(self) -> None:
        # The rows say whose time has come, so those that other processes made or left expire too.
        while due := await self._reads.run(
            self._storage.expired_workspaces, now_ms(), limit=EXPIRED_AT_ONCE, node_id=self._node_id
        ):
            for workspace in due:
                await self._end(workspace, WorkspaceStatus.EXPIRED)
        now = now_ms()
        for workspace_id in [workspace_id for workspace_id, at in self._expiries.items() if at <= now]:
            known = await self._reads.run(self._storage.workspace, workspace_id)
            if known is None:
                del self._expiries[workspace_id]
            else:
                self._remember(known)

    async def _end(self, workspace: Workspace, final: WorkspaceStatus, by: Caller = SERVICE) -> None:
        self._known.pop(workspace.id, None)
        expires = final is WorkspaceStatus.EXPIRED
        action = AuditAction.WORKSPACE_EXPIRED if expires else AuditAction.WORKSPACE_DELETED
        noted = audit(by, action, workspace.id, **_noted_workspace(workspace))
        begun = await self._records.write(
            SetWorkspaceStatus(workspace.id, WorkspaceStatus.DELETING, only_expired=expires, audit=noted)
        )
        if isinstance(begun, Refused):
            return
        if not await self._batches.stop_workspace(workspace.id, STOP_SECONDS):
            _log.warning("workspace_still_busy", workspace_id=workspace.id, seconds=STOP_SECONDS)
        if workspace.managed:
            await self._run(self._roots.set_aside, workspace.root)
        await self._records.write(SetWorkspaceStatus(workspace.id, final))
        self._expiries.pop(workspace.id, None)
        self._wake.set()

    # -- the rest -----------------------------------------------------------------------------------------------------

    def _remember(self, workspace: Workspace) -> None:
        ours = workspace.status is WorkspaceStatus.ACTIVE and workspace.node_id == self._node_id
        if not ours or workspace.expires_at is None:
            self._expiries.pop(workspace.id, None)
        else:
            self._expiries[workspace.id] = workspace.expires_at
            self._wake.set()
        if workspace.status is WorkspaceStatus.ACTIVE and not _is_of_root(workspace):
            if len(self._known) >= KNOWN_ROOTS:
                self._known.pop(next(iter(self._known)))
            self._known[workspace.id] = _known_root(workspace)

    def _require_room(self, request: WorkspaceRequest, *, managed: bool) -> None:
        most = self._usage.bound(managed=managed, asked=request.options.quota_bytes)
        size = sum(map(len, request.files.values()))
        if most is not None and size > most:
            raise NoSpace(f"the files have {size} bytes and the workspace may hold {most}; nothing was made")

    def _check_options(self, options: WorkspaceOptions, *, managed: bool) -> None:
        most = self._usage.most if managed else None
        if options.quota_bytes is not None and most is not None and options.quota_bytes > most:
            raise invalid(
                "#/options/quotaBytes",
                "not_granted",
                f"this server lets a workspace hold at most {most} bytes (TOOLCRIB_WORKSPACE_BYTES); a workspace can "
                "only lower that",
            )
        if options.containment == "unrestricted" and not self._allow_unrestricted:
            raise invalid("#/options/containment", "not_granted", "this server does not allow unrestricted workspaces")
        for tool, shell in (("bash", options.bash), ("powershell", options.powershell)):
            if shell.network == "host" and not self._policy.allow_network:
                raise invalid(
                    f"#/options/{tool}/network",
                    "not_granted",
                    "this server gives commands no network; whoever runs it can allow it with TOOLCRIB_ALLOW_NETWORK",
                )
            for name, most in self._policy.limits.exceeding(shell.limits).items():
                setting = f"TOOLCRIB_COMMAND_{name.upper()}"
                raise invalid(
                    f"#/options/{tool}/limits/{to_camel(name)}",
                    "not_granted",
                    f"this server allows at most {most} ({setting}); a workspace can only lower that",
                )

    async def _run_until_cancelled(
        self, function: Callable[[Callable[[], None]], R], workspace: str, account: Account | None = None
    ) -> R:
        """Run work in a thread that looks whether it is called off between its steps."""
        signal, files = AbortSignal(), self._files.acting_as(account)
        return await files.run(function, signal.raise_if_aborted, signal=signal, workspace=workspace)

    async def _run(self, function: Callable[[*A], R], *args: *A) -> R:
        """Run work on the service's own directories."""
        return await self._run_as(None, function, *args)

    async def _run_as(self, account: Account | None, function: Callable[[*A], R], *args: *A) -> R:
        return await self._files.acting_as(account).run(function, *args, signal=AbortSignal(), workspace="workspaces")


def _new_workspace(
    workspace_id: str,
    request: WorkspaceRequest,
    owner: str,
    adoption: Adoption,
    identity: tuple[int, int],
    node_id: str | None,
) -> Workspace:
    at = now_ms()
    return Workspace(
        id=workspace_id,
        owner=owner,
        name=request.name,
        root=adoption.root,
        root_device=identity[0],
        root_inode=identity[1],
        root_uid=adoption.uid,
        root_gid=adoption.gid,
        managed=request.root is None,
        trusted=request.trusted,
        options=request.options,
        metadata=request.metadata,
        status=WorkspaceStatus.ACTIVE,
        created_at=at,
        last_used_at=at,
        expires_at=_expiry(request.ttl_seconds),
        node_id=node_id,
    )


def _known_root(workspace: Workspace) -> _KnownRoot:
    return _KnownRoot(
        workspace.root,
        (workspace.root_device, workspace.root_inode),
        workspace.owner,
        account_of(workspace.root_uid, workspace.root_gid),
        workspace.node_id,
    )


def _is_of_root(workspace: Workspace) -> bool:
    """Whether this process would have to act as root: the workspace was made by a service of an ordinary user."""
    return workspace.root_uid == 0 and acts_as_others()


def _noted_workspace(workspace: Workspace) -> dict[str, Any]:
    """Return what the audit log says of a workspace that comes or goes."""
    return {"trusted": workspace.trusted, "managed": workspace.managed, "root": workspace.root}


def _noted_change(change: WorkspaceChange) -> dict[str, Any]:
    """Return what the audit log says of a change: which fields, and of what decides what may run the new value."""
    noted: dict[str, Any] = {"fields": sorted(map(to_camel, change.fields))}
    if "trusted" in change.fields:
        noted["trusted"] = change.trusted
    return noted


def _expiry(ttl_seconds: int | None) -> int | None:
    return None if ttl_seconds is None else now_ms() + ttl_seconds * 1000


def _expired(workspace: Workspace) -> bool:
    return workspace.expires_at is not None and workspace.expires_at <= now_ms()


def _gone(workspace_id: str) -> WorkspaceGone:
    return WorkspaceGone(f"workspace {workspace_id} was deleted or has expired; its records are kept")
