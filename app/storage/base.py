"""The storage seam: writes are values that one thread applies in groups, reads are methods.

A write is a use case. `Storage.apply` runs a group of them in one transaction, so that many callers share one fsync;
each write still succeeds or fails alone. Only a compare-and-set on `(epoch, last_seq)` writes a batch (`Append`).
"""

import os
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Generic, Literal, Protocol, TypeAlias, TypeVar

from app.domain.audit import AuditAction, AuditEvent
from app.domain.batch import Batch, BatchStatus, Summary
from app.domain.caller import Scope
from app.domain.clock import now_ms
from app.domain.events import OutputRow, OutputStream, StoredEvent
from app.domain.idempotency import IdempotencyKey
from app.domain.node import Node, Process
from app.domain.retention import Removal, RemovedCounts
from app.domain.tool_call import CallError, CallRecord, CallStatus, ExecutionMode
from app.domain.workspace import Workspace, WorkspaceOptions, WorkspaceStatus

T = TypeVar("T")


# -- what a write answers ---------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Applied:
    """The write was committed, now or by an earlier attempt whose reply was lost.

    `workspace` is that of a SubmitBatch, as the transaction saw it; None when only its row can tell. `taken`: the batch
    is the submitter's to run; otherwise a job was stored with it, which wakes a process of the workspace's node.
    """

    workspace: Workspace | None = field(default=None, compare=False)
    taken: bool = field(default=True, compare=False)


@dataclass(frozen=True, slots=True)
class Refused:
    """The rows do not allow the write: nothing of it was done.

    `reason`: `not_found`, `gone` (the workspace is not active), `overlap` (another workspace's root is equal to,
    inside or around this one), `key_reused` (the idempotency key has made something for another request), `terminal`,
    `fenced`, `running` (the batch has not ended), `not_due` (the workspace has time left), `in_use` (the workspace is
    open or has batches), `elsewhere` (the workspace is of another node and nothing wakes it).
    """

    reason: str


@dataclass(frozen=True, slots=True)
class Existing:
    """The same request under the same idempotency key has made `id` before: nothing of the write was done."""

    id: str


@dataclass(frozen=True, slots=True)
class Removed:
    """A piece was removed. `more`: the same write has more to remove."""

    counts: RemovedCounts = field(default_factory=RemovedCounts)
    more: bool = False


WriteOutcome: TypeAlias = Applied | Refused | Existing | Removed


class StorageError(Exception):
    """Base of what `Storage` raises."""


class OperationalError(StorageError):
    """The database is away, busy or full: the whole group may be tried again.

    `in_doubt` is true when the connection was lost after COMMIT had been sent: the group may be in the database, and
    only applying it again tells. Otherwise nothing of it was kept.
    """

    def __init__(self, message: str, reason: Literal["busy", "full", "connection"], *, in_doubt: bool = False) -> None:
        super().__init__(message)
        self.reason = reason
        self.in_doubt = in_doubt


class DataError(StorageError):
    """A value of one write does not fit; trying it again will not help."""


class SchemaTooNew(StorageError):
    """The database was migrated by a newer version of the code."""


# -- writes -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class CreateWorkspace:
    """Existing, when the key has made a workspace of the same owner. Refused: `overlap`, `key_reused`.

    Here and below, `audit` is stored with what the write changes, and not when it changes nothing.
    """

    workspace: Workspace
    idempotency: IdempotencyKey | None = None
    audit: AuditEvent | None = None


@dataclass(frozen=True, slots=True)
class UpdateWorkspace:
    """Set the fields that are not None, on an active workspace only. Refused: `not_found`, `gone`.

    `clear_name` and `clear_expiry` set `name` and `expires_at` to null.
    """

    workspace_id: str
    name: str | None = None
    clear_name: bool = False
    trusted: bool | None = None
    options: WorkspaceOptions | None = None
    metadata: Mapping[str, object] | None = None
    expires_at: int | None = None
    clear_expiry: bool = False
    audit: AuditEvent | None = None


@dataclass(frozen=True, slots=True)
class SetWorkspaceStatus:
    """Move a workspace along active → deleting → deleted (or expired); asking for what it is already is Applied.

    `at` is when that is, kept for `deleted` and `expired`. With `only_expired` a workspace that is active goes on only
    when its time has come by then: whoever gave it more time in the meantime wins.

    Refused: `not_found`, `gone` (it would go backwards), `not_due`.
    """

    workspace_id: str
    status: WorkspaceStatus
    at: int = field(default_factory=now_ms)
    only_expired: bool = False
    audit: AuditEvent | None = None


@dataclass(frozen=True, slots=True)
class Holder:
    """A process that runs batches of its node."""

    process_id: str
    node_id: str | None


@dataclass(frozen=True, slots=True)
class SubmitBatch:
    """Store a batch with its calls and event 1 (`batch_start`), and touch `last_used_at` of its workspace.

    A workspace whose time has come counts as gone. The batch is held by `holder` when the workspace is of its node.

    The batch row is inserted as given (`epoch` and `last_seq` included). Existing, when the key has made a batch of the
    same owner and workspace, whatever became of the two since. Refused: `not_found`, `gone`, `key_reused`, `elsewhere`.
    """

    batch: Batch
    start: StoredEvent
    idempotency: IdempotencyKey | None = None
    audit: AuditEvent | None = None
    holder: Holder | None = None


@dataclass(frozen=True, slots=True)
class CallChange:
    """What an event means for its call; fields that are None are left as they are.

    `path` and `summary` are what an ended call is searched by (`app.domain.call_summary`).
    """

    call_id: str
    status: CallStatus
    started_at: int | None = None
    finished_at: int | None = None
    duration_ms: int | None = None
    result: bytes | None = None
    error: CallError | None = None
    hooks: bytes | None = None
    path: str | None = None
    summary: str | None = None


@dataclass(frozen=True, slots=True)
class BatchChange:
    """What an event means for its batch; fields that are None are left as they are."""

    status: BatchStatus
    effective_mode: ExecutionMode | None = None
    started_at: int | None = None
    finished_at: int | None = None
    has_errors: bool | None = None
    terminate: bool | None = None
    summary: Summary | None = None


@dataclass(frozen=True, slots=True)
class Append:
    """Events `after_seq + 1 …` of one batch and what they mean for batch, calls and output: one transaction.

    The fence is `UPDATE batches SET last_seq = after_seq + len(events) WHERE id AND epoch AND last_seq = after_seq`.
    No row: when the row reads `(epoch, after_seq + len(events))`, an earlier commit of this write was mine and its
    reply was lost: Applied. It may also read the end of a later append of the same group that follows this one without
    a gap, since one group is one transaction. Anything else: Refused `fenced`, and so are later appends of the batch
    in the group.
    """

    batch_id: str
    epoch: int
    after_seq: int
    events: Sequence[StoredEvent]
    output: Sequence[OutputRow] = ()
    calls: Sequence[CallChange] = ()
    batch: BatchChange | None = None


@dataclass(frozen=True, slots=True)
class ClaimBatch:
    """Take over a batch: `epoch` becomes `epoch + 1`. Refused: `not_found`, `terminal`, `fenced` (it moved on).

    `token` tells this claim from another one of the same epoch, so that a claim whose reply was lost is not taken for
    somebody else's, nor the other way round. Two claims never share one. From then on `process_id` holds the batch.
    With `only_waiting` a batch that a process holds is `fenced` too; with `last_seq`, one whose last event is another.
    """

    batch_id: str
    epoch: int
    process_id: str | None = None
    only_waiting: bool = False
    last_seq: int | None = None
    token: str = field(default_factory=lambda: os.urandom(12).hex())


@dataclass(frozen=True, slots=True)
class GiveBack:
    """Take a batch from a process that died before any call was taken up, and wake the node that is to run it.

    `epoch` becomes `epoch + 1` and nobody holds the batch. Refused: as for ClaimBatch. `last_seq` is the last event of
    when no call had been taken up: one that was thought dead may have gone on.
    """

    batch_id: str
    epoch: int
    last_seq: int
    node_id: str
    token: str = field(default_factory=lambda: os.urandom(12).hex())


@dataclass(frozen=True, slots=True)
class RequestCancel:
    """Ask for a batch (`call_id` None) or one call of it to be cancelled; durable, and kept when asked twice.

    The first wish stays: `at` of a later one is dropped. Refused: `not_found`, `terminal`.
    """

    batch_id: str
    call_id: str | None
    at: int
    audit: AuditEvent | None = None


@dataclass(frozen=True, slots=True)
class ApiKey:
    """`token_hash` is the SHA-256 of the token; the token itself is shown once and stored nowhere.

    `created_by` is the id of the key that made it, `env` for the environment's, `cli` or `service`. Times are
    milliseconds since the epoch; a key works until `expires_at` or `revoked_at`, whichever comes first.
    """

    id: str
    name: str
    owner: str
    token_hash: bytes
    scopes: tuple[Scope, ...]
    created_at: int
    created_by: str
    expires_at: int | None = None
    revoked_at: int | None = None


@dataclass(frozen=True, slots=True)
class CreateKey:
    key: ApiKey
    audit: AuditEvent | None = None


@dataclass(frozen=True, slots=True)
class RevokeKey:
    """Note when a key was revoked; the first time stays. Refused: `not_found`."""

    key_id: str
    at: int
    audit: AuditEvent | None = None


@dataclass(frozen=True, slots=True)
class KeepSecret:
    """Store a secret of the service under a name. Existing, when there is one: that one stays."""

    name: str
    value: bytes
    at: int


@dataclass(frozen=True, slots=True)
class NoteAudit:
    """Add an event to the audit log."""

    event: AuditEvent


@dataclass(frozen=True, slots=True)
class RemoveAudit:
    """Remove the oldest events of the audit log that are older than a time, at most so many. Answers Removed."""

    before: int
    most: int


@dataclass(frozen=True, slots=True)
class RemoveFromBatch:
    """Remove the next piece of what an ended batch loses up to the step `to`: OUTPUT, UPDATES or ALL.

    From the first piece on the step counts as reached for every reader. Answers Removed; a batch that is not there has
    nothing left. Refused: `running`.
    """

    batch_id: str
    to: Removal


@dataclass(frozen=True, slots=True)
class RemoveWorkspace:
    """Remove the record of a workspace. Answers Removed. Refused: `in_use`."""

    workspace_id: str


@dataclass(frozen=True, slots=True)
class GiveBackPages:
    """Give at most so many free pages of SQLite's file back to the file system. Answers Removed."""

    most: int


Write: TypeAlias = (
    CreateWorkspace
    | UpdateWorkspace
    | SetWorkspaceStatus
    | SubmitBatch
    | Append
    | ClaimBatch
    | GiveBack
    | RequestCancel
    | CreateKey
    | RevokeKey
    | KeepSecret
    | NoteAudit
    | RemoveAudit
    | RemoveFromBatch
    | RemoveWorkspace
    | GiveBackPages
)


# -- reads ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Page(Generic[T]):
    """`next_before` continues the list (newest first) after the last item examined; None at the end."""

    items: tuple[T, ...]
    next_before: str | None


@dataclass(frozen=True, slots=True)
class CallFilter:
    """Conditions are joined by AND; None does not ask. Times are milliseconds since the epoch.

    `owner` is the owner of the call's batch. `since` and `until` (both inclusive) look at `queued_at`. `path` and
    `text` find ended calls: those that were about this path, in the spelling of `plain_path`, and those whose summary
    holds this text, in the form of `comparable` (both of `app.domain.call_summary`).
    """

    workspace_id: str | None = None
    batch_id: str | None = None
    tool_name: str | None = None
    status: CallStatus | None = None
    error_code: str | None = None
    tool_call_id: str | None = None
    since: int | None = None
    until: int | None = None
    min_duration_ms: int | None = None
    path: str | None = None
    text: str | None = None
    owner: str | None = None


@dataclass(frozen=True, slots=True)
class AuditFilter:
    """Conditions are joined by AND; None does not ask. `since` and `until` are inclusive, in ms since the epoch."""

    action: AuditAction | None = None
    actor: str | None = None
    target: str | None = None
    since: int | None = None
    until: int | None = None


@dataclass(frozen=True, slots=True)
class OutputExtent:
    """How many bytes of a stream (or of `combined`) are stored."""

    bytes: int


@dataclass(frozen=True, slots=True)
class Made:
    """What an idempotency key has made: its id, and the digest of the request that made it."""

    id: str
    digest: bytes


@dataclass(frozen=True, slots=True)
class BatchEnd:
    """`finished_at` is None while the batch runs."""

    finished_at: int | None


@dataclass(frozen=True, slots=True)
class UnfinishedBatch:
    """`started`: at least one call was taken up. `process_id` holds it; None while it waits for one of its node.

    `epoch` and `last_seq` are those of the same moment: what was judged may be taken over by them alone.
    """

    batch_id: str
    workspace_id: str
    started: bool
    process_id: str | None = None
    node_id: str | None = None
    epoch: int = 1
    last_seq: int = 1


@dataclass(frozen=True, slots=True)
class WaitingBatch:
    """A batch that nobody holds; whoever claims it does so from this epoch."""

    batch_id: str
    epoch: int


@dataclass(frozen=True, slots=True)
class Placement:
    """Where the batches of a workspace run: its node, the processes of it that live, and how many batches wait there.

    `unfinished` counts those of the workspace that have not ended, `waiting` those of the node that nobody holds yet;
    both stop at a bound the caller gave.
    """

    node_id: str | None
    processes: tuple[Process, ...]
    unfinished: int
    waiting: int


@dataclass(frozen=True, slots=True)
class Wish:
    """A batch (`call_id` None) or a call of it that somebody wants cancelled."""

    batch_id: str
    call_id: str | None


@dataclass(frozen=True, slots=True)
class BatchHead:
    """How far a batch has come; a status of None is the one it had."""

    batch_id: str
    last_seq: int
    status: BatchStatus | None


@dataclass(frozen=True, slots=True)
class GoneWorkspace:
    """A workspace that was deleted or has expired, at `ended_at`."""

    workspace_id: str
    ended_at: int
    has_batches: bool


class Storage(Protocol):
    """Both databases, one set of statements. Every method is a transaction of its own and is called from a thread.

    Raises of every method: OperationalError, DataError.
    """

    def migrate(self) -> None:
        """Bring the schema to head under a lock that concurrent starters share.

        Raises:
            SchemaTooNew: when the database knows a revision that this code does not.
        """
        ...

    def ping(self) -> None:
        """Answer when the database does."""
        ...

    def apply(self, group: Sequence[Write]) -> list[WriteOutcome]:
        """Apply a group in one transaction, in order, and return one outcome per write once it is committed.

        Raises:
            OperationalError: the whole of the group may be applied again; what an earlier attempt committed whose
                reply was lost is then Applied, not done twice. Such a group has to stay together and in order.
            DataError: nothing of the group was kept; apply its writes one by one to find the one at fault.
        """
        ...

    def workspace(self, workspace_id: str) -> Workspace | None: ...

    def workspaces(self, *, before: str | None, limit: int, owner: str | None = None) -> Page[Workspace]:
        """Newest first; deleted and expired ones are listed too."""
        ...

    def workspaces_with_status(self, status: WorkspaceStatus, *, node_id: str | None = None) -> list[Workspace]:
        """All of a status, or those of one node."""
        ...

    def expired_workspaces(self, at: int, *, limit: int, node_id: str | None = None) -> list[Workspace]:
        """Active workspaces whose time has come, the longest overdue first; all of them, or those of one node."""
        ...

    def batch(self, batch_id: str, *, calls: bool = True, inline: int | None = None) -> Batch | None:
        """Return a batch; with `calls`, its calls in request order.

        `inline` bounds the bytes of arguments and results that are loaded in all, taken in that order; what does not
        fit is left out (see CallRecord). None loads everything.
        """
        ...

    def made(self, idempotency_key: str, *, owner: str, workspace_id: str | None) -> Made | None:
        """Return the batch a key has made in a workspace, or (`workspace_id` None) the workspace it has made.

        A key is kept in the row of what it made, so it goes when that goes.
        """
        ...

    def batches(self, workspace_id: str, *, status: BatchStatus | None, before: str | None, limit: int) -> Page[Batch]:
        """Newest first, without calls."""
        ...

    def batch_heads(self, workspace_id: str, *, also: Collection[str], after: str | None) -> list[BatchHead]:
        """Batches of a workspace: those that have not ended, those named, and those with a larger id than `after`.

        Of the last at most 256; when `after` is None the newest one.
        """
        ...

    def unfinished_batches(self, workspace_id: str | None = None) -> list[UnfinishedBatch]: ...

    def unfinished_batch(self, batch_id: str) -> UnfinishedBatch | None:
        """Return a batch that has not ended; None when it has, or when there is none."""
        ...

    def lost_batches(self, *, stale: bool) -> list[UnfinishedBatch]:
        """Unfinished batches held by a process that nobody knows; with `stale`, or by one whose lease has run out."""
        ...

    def held_batches(self, process_id: str) -> list[UnfinishedBatch]:
        """Unfinished batches that a process holds."""
        ...

    def waiting_batches(self, node_id: str, *, limit: int) -> list[WaitingBatch]:
        """Batches of a node that nobody holds, the oldest first."""
        ...

    def wishes(self, process_id: str) -> list[Wish]:
        """What is to be cancelled of the batches a process holds."""
        ...

    def interrupted_workspaces(self, node_id: str, *, since: int) -> list[Workspace]:
        """Active workspaces of a node with a batch that was interrupted at a time or later."""
        ...

    def placement(self, workspace_id: str, *, most: int) -> Placement | None:
        """Return where the batches of a workspace run, counting to `most`; None when there is no such workspace."""
        ...

    def join(self, process: Process, *, dead: Collection[str] = (), adopt_all: bool = False) -> None:
        """Note that a process lives and, when it has one, its node; forget the processes that are known to be dead.

        Open workspaces that have no node yet, from before there were any, become this node's; with `adopt_all` all do.
        """
        ...

    def beat(self, process: Process) -> list[Process]:
        """Note that a process lives still and return all that do, itself included, the oldest first."""
        ...

    def leave(self, process_id: str) -> None:
        """Forget a process that ends."""
        ...

    def processes(self) -> list[Process]:
        """Return all processes that are known, living or not, the oldest first."""
        ...

    def living(self) -> list[Process]:
        """Return the processes that live, the oldest first."""
        ...

    def nodes(self) -> list[Node]: ...

    def tell_others(self, origin: str | None) -> None:
        """Tell other processes what is committed from now on, as this one; None: there are no others to tell."""
        ...

    def tidy(self) -> None:
        """Remove what processes left that died and hold nothing any more."""
        ...

    def swept_at(self, node_id: str) -> int | None:
        """Return up to when the workspaces of a node were swept after interruptions; None when never."""
        ...

    def swept(self, node_id: str, at: int) -> None:
        """Note up to when they were."""
        ...

    def call(self, call_id: str) -> CallRecord | None: ...

    def calls(
        self, condition: CallFilter, *, before: str | None, limit: int, examine: int = 2000, inline: int | None = None
    ) -> Page[CallRecord]:
        """Newest first; at most `examine` rows are looked at, so a page may be short and still have a continuation.

        `inline` is as in `batch`.
        """
        ...

    def events(self, batch_id: str, *, after: int, limit: int = 256) -> list[StoredEvent]:
        """Events with `seq > after`, in order, joined with their output rows.

        A page of large events is shorter than `limit`: only an empty one says that there are no more.
        """
        ...

    def last_seq(self, batch_id: str) -> tuple[int, BatchStatus] | None: ...

    def output_extent(self, call_id: str, stream: OutputStream | None) -> OutputExtent | None:
        """None for `stream` is all streams in the order they were read. None is answered when output was removed."""
        ...

    def output(self, call_id: str, stream: OutputStream | None, *, start: int, end: int) -> Iterator[bytes]:
        """Yield bytes `start … end - 1`, at most 1 MiB at a time, each page a transaction of its own."""
        ...

    def removable_batches(self, found_at: Sequence[Removal], *, ended_before: int, limit: int) -> list[str]:
        """Batches at one of these steps that ended before a time, in no order."""
        ...

    def gone_workspaces(self, *, ended_before: int, after: tuple[int, str] | None, limit: int) -> list[GoneWorkspace]:
        """Deleted and expired workspaces by the time they went, those after `(ended_at, id)`."""
        ...

    def batch_end(self, about: str) -> BatchEnd | None:
        """Return the end of a batch, by its id or by that of one of its calls; None when there is no such batch."""
        ...

    def secret(self, name: str) -> bytes | None: ...

    def audit_events(
        self, condition: AuditFilter, *, before: str | None, limit: int, examine: int = 2000
    ) -> Page[AuditEvent]:
        """Newest first; at most `examine` rows are looked at, as in `calls`."""
        ...

    def keys(self) -> list[ApiKey]:
        """Return the keys that were not revoked."""
        ...

    def revoked_keys(self, key_ids: Sequence[str]) -> list[str]:
        """Return which of these keys were revoked."""
        ...

    def keys_page(self, *, before: str | None, limit: int) -> Page[ApiKey]:
        """Newest first; revoked ones too."""
        ...

    def close(self) -> None: ...
