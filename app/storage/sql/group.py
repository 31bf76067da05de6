"""How a group of writes becomes one transaction.

Three steps: read the rows the group is about, decide each write in order against them, then write what was decided,
table by table. A refused write has written nothing because nothing is written before all are decided, and no write
costs a statement of its own. The rows read first stay as they are: SQLite has one writer, on Postgres they are locked,
in one order (workspaces before batches before calls, each by id) so that two processes do not wait for each other.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, Final

from sqlalchemy import Connection, bindparam, func, select, text, union_all, update
from sqlalchemy.sql.expression import ColumnElement

from app.domain import json_codec
from app.domain.audit import AuditEvent
from app.domain.batch import BatchStatus
from app.domain.tool_call import CallStatus
from app.domain.workspace import WorkspaceStatus
from app.storage.base import (
    Append,
    Applied,
    BatchChange,
    CallChange,
    ClaimBatch,
    CreateKey,
    CreateWorkspace,
    DataError,
    Existing,
    GiveBack,
    GiveBackPages,
    KeepSecret,
    Made,
    NoteAudit,
    OperationalError,
    Refused,
    RemoveAudit,
    RemoveFromBatch,
    RemoveWorkspace,
    RequestCancel,
    RevokeKey,
    SetWorkspaceStatus,
    SubmitBatch,
    UpdateWorkspace,
    WaitingBatch,
    Write,
    WriteOutcome,
)
from app.storage.sql import removal, rows
from app.storage.sql.engine import Database, PreparedLookup, PreparedUpdate, driver_connection
from app.storage.sql.jobs import JobQueue
from app.storage.sql.listener import CANCEL, CHANNEL, UNKNOWN, payload
from app.storage.sql.rows import RowValues
from app.storage.sql.schema import (
    OPEN_WORKSPACE,
    ROOT_MAX_BYTES,
    api_keys,
    audit_events,
    batches,
    call_output,
    calls,
    events,
    large_arguments,
    secrets,
    workspaces,
)

APPLIED: Final = Applied()
NOT_FOUND: Final = Refused("not_found")
GONE: Final = Refused("gone")
KEY_REUSED: Final = Refused("key_reused")
OVERLAP: Final = Refused("overlap")
NOT_DUE: Final = Refused("not_due")
ELSEWHERE: Final = Refused("elsewhere")
TERMINAL: Final = Refused("terminal")
FENCED: Final = Refused("fenced")

_ROOTS_LOCK: Final = 0x746F6F6C_726F6F74
"""The advisory lock under which Postgres compares a new root with all others: `toolroot` in ASCII."""

_TERMINAL: Final = frozenset(status.value for status in BatchStatus if status.terminal)
_CALL_TERMINAL: Final = frozenset(status.value for status in CallStatus if status.terminal)
_OPEN: Final = frozenset({WorkspaceStatus.ACTIVE.value, WorkspaceStatus.DELETING.value})

_SELECT_BATCHES: Final = (
    select(
        batches.c.id,
        batches.c.workspace_id,
        batches.c.created_at,
        batches.c.status,
        batches.c.epoch,
        batches.c.last_seq,
        batches.c.claim,
        batches.c.cancel_requested_at,
        batches.c.process_id,
    )
    .order_by(batches.c.id)
    .with_for_update(key_share=True)
)
_SELECT_WORKSPACES: Final = select(workspaces).order_by(workspaces.c.id).with_for_update(key_share=True)
_SELECT_CALLS: Final = (
    select(calls.c.id, calls.c.batch_id, calls.c.status, calls.c.cancel_requested_at)
    .order_by(calls.c.id)
    .with_for_update(key_share=True)
)
_SELECT_MADE_WORKSPACES: Final = select(workspaces.c.idempotency_key, workspaces.c.id, workspaces.c.request_digest)
_SELECT_MADE_BATCHES: Final = select(batches.c.idempotency_key, batches.c.id, batches.c.request_digest)
_SELECT_KEYS: Final = (
    select(api_keys.c.id, api_keys.c.token_hash, api_keys.c.revoked_at)
    .order_by(api_keys.c.id)
    .with_for_update(key_share=True)
)
_SELECT_AUDIT: Final = select(audit_events.c.id)
_SELECT_SECRETS: Final = select(secrets.c.name, secrets.c.value)
# Two searches of one index; joined by OR, SQLite would go through all open workspaces instead.
_SELECT_OVERLAP: Final = union_all(
    select(workspaces.c.id).where(text(OPEN_WORKSPACE), workspaces.c.root.in_(bindparam("above", expanding=True))),
    select(workspaces.c.id).where(
        text(OPEN_WORKSPACE), workspaces.c.root >= bindparam("below"), workspaces.c.root < bindparam("beyond")
    ),
).limit(bindparam("most"))


def _kept(column: ColumnElement[Any], name: str) -> ColumnElement[Any]:
    """The column as it was when the parameter is null."""
    return func.coalesce(bindparam(name, type_=column.type), column)


class GroupWriter:
    """Applies groups to one database.

    Args:
        jobs: wakes the processes of other nodes; None: batches for them are refused.
    """

    def __init__(self, database: Database, jobs: JobQueue | None = None) -> None:
        engine = database.writer
        self.jobs: Final = jobs
        self.origin: str | None = UNKNOWN
        """As whom other processes are told what a group changed, where the database can; None: they are not."""
        self.insert_rows = database.insert_rows
        self.find_workspaces = PreparedLookup(_SELECT_WORKSPACES, workspaces.c.id, engine)
        self.find_batches = PreparedLookup(_SELECT_BATCHES, batches.c.id, engine)
        self.find_calls = PreparedLookup(_SELECT_CALLS, calls.c.id, engine)
        self.find_made_workspaces = PreparedLookup(_SELECT_MADE_WORKSPACES, workspaces.c.idempotency_key, engine)
        self.find_made_batches = PreparedLookup(_SELECT_MADE_BATCHES, batches.c.idempotency_key, engine)
        self.find_keys = PreparedLookup(_SELECT_KEYS, api_keys.c.id, engine)
        self.find_audit = PreparedLookup(_SELECT_AUDIT, audit_events.c.id, engine)
        self.find_secrets = PreparedLookup(_SELECT_SECRETS, secrets.c.name, engine)
        fence = (
            (batches.c.id == bindparam("b_id"))
            & (batches.c.epoch == bindparam("old_epoch"))
            & (batches.c.last_seq == bindparam("old_seq"))
        )
        moved: dict[str, Any] = {"epoch": bindparam("new_epoch"), "last_seq": bindparam("new_seq")}
        self.advance_batches = PreparedUpdate(update(batches).where(fence).values(moved), engine)
        changed = {
            name: _kept(batches.c[name], f"v_{name}")
            for name in (*_BATCH_FIELDS, "claim", "process_id", "total", "succeeded", "failed", "cancelled", "skipped")
        }
        # The first wish to cancel stays.
        changed["cancel_requested_at"] = func.coalesce(
            batches.c.cancel_requested_at, bindparam("v_cancel_requested_at", type_=batches.c.cancel_requested_at.type)
        )
        self.change_batches = PreparedUpdate(update(batches).where(fence).values({**moved, **changed}), engine)
        self.change_calls = PreparedUpdate(
            update(calls)
            .where((calls.c.id == bindparam("c_id")) & (calls.c.batch_id == bindparam("c_batch_id")))
            .values({name: _kept(calls.c[name], f"v_{name}") for name in _CALL_COLUMNS}),
            engine,
        )
        self.cancel_calls = PreparedUpdate(
            update(calls).where(calls.c.id == bindparam("c_id")).values(cancel_requested_at=bindparam("at")), engine
        )
        self.touch_workspaces = PreparedUpdate(
            update(workspaces)
            .where((workspaces.c.id == bindparam("w_id")) & (workspaces.c.last_used_at < bindparam("at")))
            .values(last_used_at=bindparam("at")),
            engine,
        )

    def apply(self, connection: Connection, group: Sequence[Write]) -> list[WriteOutcome]:
        """Apply a group inside the transaction of `connection` and return what became of each write.

        Raises:
            DataError, OperationalError, or what the driver raises: the transaction must be rolled back.
        """
        plan = _Plan(self, connection, group)
        outcomes = [plan.decide(write) for write in group]
        plan.write()
        return [plan.told(write, outcome) for write, outcome in zip(group, outcomes, strict=True)]


_WORKSPACE_COLUMNS: Final = tuple(workspaces.columns.keys())

_BATCH_FIELDS: Final = ("status", "effective_mode", "started_at", "finished_at", "has_errors", "terminate")
_CALL_COLUMNS: Final = (
    "status",
    "started_at",
    "finished_at",
    "duration_ms",
    "result",
    "path",
    "summary",
    "hooks",
    "error_code",
    "error_message",
)


@dataclass(slots=True)
class _BatchState:
    """A batch's row as the group leaves it so far; `stored_*` is the fence as it was read."""

    id: str
    workspace_id: str
    created_at: int
    status: str
    epoch: int
    last_seq: int
    claim: str | None
    cancel_requested_at: int | None
    process_id: str | None
    stored_epoch: int = field(init=False)
    stored_seq: int = field(init=False)
    dirty: bool = False
    changes: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.stored_epoch = self.epoch
        self.stored_seq = self.last_seq


@dataclass(slots=True)
class _WorkspaceState:
    id: str
    created_at: int
    root: bytes
    status: str
    expires_at: int | None
    node_id: str | None
    stored: SimpleNamespace | None = None
    touched_at: int = 0
    changes: dict[str, Any] = field(default_factory=dict)

    @property
    def new(self) -> bool:
        return self.stored is None

    def is_due(self, at: int) -> bool:
        """Whether its time has come by then."""
        expires_at = self.changes.get("expires_at", self.expires_at)
        return expires_at is not None and expires_at <= at


@dataclass(slots=True)
class _CallState:
    id: str
    batch_id: str
    status: str
    cancel_requested_at: int | None


@dataclass(slots=True)
class _KeyState:
    id: str
    token_hash: bytes
    revoked_at: int | None


class _Plan:
    """One group: the rows it is about, and what is to be written to them."""

    def __init__(self, writer: GroupWriter, connection: Connection, group: Sequence[Write]) -> None:
        self._writer = writer
        self._connection = connection
        self._on_postgres = connection.dialect.name == "postgresql"
        self._cursor = connection.connection.cursor()
        self._group = group
        self._new_workspaces: list[RowValues] = []
        self._new_batches: list[RowValues] = []
        self._new_calls: list[RowValues] = []
        self._new_arguments: list[RowValues] = []
        self._new_events: list[RowValues] = []
        self._new_output: list[RowValues] = []
        self._new_keys: list[RowValues] = []
        self._new_secrets: list[RowValues] = []
        self._new_audit: list[RowValues] = []
        self._call_changes: dict[str, dict[str, Any]] = {}
        self._call_cancels: dict[str, int] = {}
        self._revocations: dict[str, int] = {}
        self._fenced: set[str] = set()
        self._given_back: set[str] = set()
        self._jobs: dict[str, list[WaitingBatch]] = {}
        self._told: set[str] = set()
        self._read_rows()

    # -- reading ----------------------------------------------------------------------------------------------------

    def _read_rows(self) -> None:
        batch_ids: set[str] = set()
        workspace_ids: set[str] = set()
        call_ids: set[str] = set()
        key_ids: set[str] = set()
        secret_names: set[str] = set()
        audit_ids: set[str] = set()
        workspace_keys: set[str] = set()
        batch_keys: set[str] = set()
        roots = False
        for write in self._group:
            match write:
                case Append() | ClaimBatch() | GiveBack() | RemoveFromBatch():
                    batch_ids.add(write.batch_id)
                case SubmitBatch(batch=batch):
                    batch_ids.add(batch.id)
                    workspace_ids.add(batch.workspace_id)
                    if (key := _scoped_key(write)) is not None:
                        batch_keys.add(key)
                case RequestCancel(batch_id=batch_id, call_id=call_id):
                    batch_ids.add(batch_id)
                    if call_id is not None:
                        call_ids.add(call_id)
                case CreateWorkspace(workspace=workspace):
                    workspace_ids.add(workspace.id)
                    if (key := _scoped_key(write)) is not None:
                        workspace_keys.add(key)
                    roots = True
                case UpdateWorkspace():
                    workspace_ids.add(write.workspace_id)
                    if write.audit is not None:
                        audit_ids.add(write.audit.id)
                case SetWorkspaceStatus():
                    workspace_ids.add(write.workspace_id)
                case NoteAudit():
                    audit_ids.add(write.event.id)
                case CreateKey(key=api_key):
                    key_ids.add(api_key.id)
                case RevokeKey():
                    key_ids.add(write.key_id)
                case KeepSecret():
                    secret_names.add(write.name)
                case RemoveWorkspace() | RemoveAudit() | GiveBackPages():
                    pass
        if roots and self._on_postgres:
            self._connection.execute(select(func.pg_advisory_xact_lock(_ROOTS_LOCK)))
        find = self._writer
        self._workspaces = {
            row.id: _WorkspaceState(
                row.id, row.created_at, row.root, row.status, row.expires_at, row.node_id, stored=row
            )
            for row in map(_workspace_row, find.find_workspaces.run(self._cursor, workspace_ids))
        }
        self._batches = {row[0]: _BatchState(*row) for row in find.find_batches.run(self._cursor, batch_ids)}
        self._calls = {row[0]: _CallState(*row) for row in find.find_calls.run(self._cursor, call_ids)}
        # After the locks: another process that uses one of these keys holds its workspace's row, or that of the roots.
        made = find.find_made_workspaces.run(self._cursor, workspace_keys)
        self._made_workspaces = {key: Made(made_id, digest) for key, made_id, digest in made}
        made = find.find_made_batches.run(self._cursor, batch_keys)
        self._made_batches = {key: Made(made_id, digest) for key, made_id, digest in made}
        self._keys = {row[0]: _KeyState(*row) for row in find.find_keys.run(self._cursor, key_ids)}
        self._secrets: dict[str, bytes] = dict(find.find_secrets.run(self._cursor, secret_names))
        self._noted = {row[0] for row in find.find_audit.run(self._cursor, audit_ids)}

    # -- deciding ---------------------------------------------------------------------------------------------------

    def decide(self, write: Write) -> WriteOutcome:
        match write:
            case Append():
                return self._append(write)
            case SubmitBatch():
                return self._submit(write)
            case ClaimBatch() | GiveBack():
                return self._claim(write)
            case RequestCancel():
                return self._cancel(write)
            case CreateWorkspace():
                return self._create_workspace(write)
            case UpdateWorkspace():
                return self._update_workspace(write)
            case SetWorkspaceStatus():
                return self._set_workspace_status(write)
            case CreateKey():
                return self._create_key(write)
            case RevokeKey():
                return self._revoke_key(write)
            case KeepSecret():
                return self._keep_secret(write)
            case NoteAudit():
                self._note(write.event)
                return APPLIED
            # What is removed is of no other write, so that it need not wait for them to be decided.
            case RemoveFromBatch():
                return removal.remove_from_batch(self._connection, write)
            case RemoveWorkspace():
                return removal.remove_workspace(self._connection, write.workspace_id)
            case RemoveAudit():
                return removal.remove_audit(self._connection, write.before, write.most)
            case GiveBackPages():
                return removal.give_back_pages(self._connection, write.most)

    def told(self, write: Write, outcome: WriteOutcome) -> WriteOutcome:
        """Return an outcome with what the caller would have to read otherwise."""
        if not isinstance(write, SubmitBatch) or outcome is not APPLIED:
            return outcome
        batch = self._batches[write.batch.id]
        taken = write.holder is None or batch.process_id == write.holder.process_id
        workspace = self._workspaces.get(write.batch.workspace_id)
        if workspace is None or workspace.stored is None or workspace.changes:
            return Applied(taken=taken)
        return Applied(rows.workspace(workspace.stored), taken=taken)

    def _append(self, write: Append) -> WriteOutcome:
        batch = self._batches.get(write.batch_id)
        if batch is None or write.batch_id in self._fenced:
            return FENCED
        last = write.after_seq + len(write.events)
        if batch.epoch != write.epoch or batch.last_seq != write.after_seq:
            if self._was_stored(batch, write, last):
                return APPLIED
            self._fenced.add(write.batch_id)
            return FENCED
        if write.events and (write.events[0].seq != write.after_seq + 1 or write.events[-1].seq != last):
            raise DataError(f"the events of {write.batch_id} after {write.after_seq} are not numbered without gaps")
        batch.last_seq = last
        batch.dirty = True
        self._told.add(batch.id)
        self._new_events += map(rows.event_row, write.events)
        if write.output:
            self._new_output += [rows.output_row(write.batch_id, output) for output in write.output]
        for change in write.calls:
            self._change_call(write.batch_id, change)
        if write.batch is not None:
            batch.status = write.batch.status.value
            batch.changes.update(_batch_changes(write.batch))
        return APPLIED

    def _was_stored(self, batch: _BatchState, write: Append, last: int) -> bool:
        # An earlier attempt of this group may have been committed without our hearing of it. Then the row stands at
        # the end of this append, or at the end of a later one of the same group that follows it without a gap.
        if batch.epoch != write.epoch or batch.stored_epoch != write.epoch or batch.dirty:
            return False
        reached = last
        for later in self._group[self._position(write) + 1 :]:
            if reached == batch.stored_seq:
                break
            if (
                isinstance(later, Append)
                and later.batch_id == write.batch_id
                and later.epoch == write.epoch
                and later.after_seq == reached
            ):
                reached += len(later.events)
        return reached == batch.stored_seq

    def _position(self, write: Write) -> int:
        return next(index for index, other in enumerate(self._group) if other is write)

    def _change_call(self, batch_id: str, change: CallChange) -> None:
        values = self._call_changes.setdefault(change.call_id, {"c_id": change.call_id, "c_batch_id": batch_id})
        values["v_status"] = change.status.value
        optional = {
            "v_started_at": change.started_at,
            "v_finished_at": change.finished_at,
            "v_duration_ms": change.duration_ms,
            "v_result": change.result,
            "v_hooks": change.hooks,
            "v_path": None if change.path is None else change.path.encode(),
            "v_summary": None if change.summary is None else change.summary.encode(),
        }
        values |= {name: value for name, value in optional.items() if value is not None}
        if change.error is not None:
            values["v_error_code"] = change.error.code.value
            values["v_error_message"] = change.error.message.encode()
        call = self._calls.get(change.call_id)
        if call is not None:
            call.status = change.status.value

    def _submit(self, write: SubmitBatch) -> WriteOutcome:
        batch = write.batch
        stored = self._batches.get(batch.id)
        if stored is not None:
            if (stored.workspace_id, stored.created_at) != (batch.workspace_id, batch.created_at):
                raise DataError(f"another batch has the id {batch.id}")
            return APPLIED
        repeated = _repeated(write, self._made_batches)
        if repeated is not None:
            return repeated
        workspace = self._workspaces.get(batch.workspace_id)
        if workspace is None:
            return NOT_FOUND
        if workspace.status != WorkspaceStatus.ACTIVE.value or workspace.is_due(batch.created_at):
            return GONE
        holder = write.holder
        if holder is not None and (holder.node_id is None or holder.node_id != workspace.node_id):
            if self._writer.jobs is None or workspace.node_id is None:
                return ELSEWHERE
            self._jobs.setdefault(workspace.node_id, []).append(WaitingBatch(batch.id, batch.epoch))
            holder = None
        _note_key(write, batch.id, self._made_batches)
        workspace.touched_at = max(workspace.touched_at, batch.created_at)
        self._note(write.audit)
        process_id = None if holder is None else holder.process_id
        self._new_batches.append(rows.batch_row(batch, write.idempotency, process_id))
        self._new_calls += [rows.call_row(call, batch.owner) for call in batch.calls]
        self._new_arguments += map(rows.large_arguments_row, filter(rows.has_large_arguments, batch.calls))
        self._new_events.append(rows.event_row(write.start))
        for call in batch.calls:
            self._calls[call.id] = _CallState(call.id, batch.id, call.status.value, call.cancel_requested_at)
        self._batches[batch.id] = _BatchState(
            id=batch.id,
            workspace_id=batch.workspace_id,
            created_at=batch.created_at,
            status=batch.status.value,
            epoch=batch.epoch,
            last_seq=batch.last_seq,
            claim=None,
            cancel_requested_at=batch.cancel_requested_at,
            process_id=process_id,
        )
        self._told |= {batch.id, batch.workspace_id}
        return APPLIED

    def _claim(self, write: ClaimBatch | GiveBack) -> WriteOutcome:
        batch = self._batches.get(write.batch_id)
        if batch is None:
            return NOT_FOUND
        if batch.epoch == write.epoch + 1 and batch.claim == write.token:
            return APPLIED
        if batch.status in _TERMINAL:
            return TERMINAL
        if batch.epoch != write.epoch:
            return FENCED
        if isinstance(write, ClaimBatch) and write.only_waiting and batch.process_id is not None:
            return FENCED
        if write.last_seq not in (None, batch.last_seq):
            return FENCED
        batch.epoch += 1
        batch.claim = write.token
        batch.changes["v_claim"] = write.token
        if isinstance(write, GiveBack):
            batch.process_id = None
            self._given_back.add(batch.id)
            if self._writer.jobs is not None:
                self._jobs.setdefault(write.node_id, []).append(WaitingBatch(batch.id, batch.epoch))
        else:
            batch.process_id = batch.changes["v_process_id"] = write.process_id
            if write.process_id is not None:
                self._given_back.discard(batch.id)
        batch.dirty = True
        self._fenced.discard(write.batch_id)
        return APPLIED

    def _cancel(self, write: RequestCancel) -> WriteOutcome:
        batch = self._batches.get(write.batch_id)
        if batch is None:
            return NOT_FOUND
        self._told.add(f"{CANCEL}{batch.id}")
        if write.call_id is None:
            if batch.cancel_requested_at == write.at:
                return APPLIED
            if batch.status in _TERMINAL:
                return TERMINAL
            if batch.cancel_requested_at is None:
                batch.cancel_requested_at = write.at
                batch.changes["v_cancel_requested_at"] = write.at
                batch.dirty = True
                self._note(write.audit)
            return APPLIED
        call = self._calls.get(write.call_id)
        if call is None or call.batch_id != write.batch_id:
            return NOT_FOUND
        if call.cancel_requested_at == write.at:
            return APPLIED
        if call.status in _CALL_TERMINAL or batch.status in _TERMINAL:
            return TERMINAL
        if call.cancel_requested_at is None:
            call.cancel_requested_at = write.at
            self._call_cancels[write.call_id] = write.at
            self._note(write.audit)
        return APPLIED

    def _create_workspace(self, write: CreateWorkspace) -> WriteOutcome:
        workspace = write.workspace
        row = rows.workspace_row(workspace, write.idempotency)
        root = rows.path_value(workspace.root)
        stored = self._workspaces.get(workspace.id)
        if stored is not None:
            if (stored.root, stored.created_at) != (root, workspace.created_at):
                raise DataError(f"another workspace has the id {workspace.id}")
            return APPLIED
        repeated = _repeated(write, self._made_workspaces)
        if repeated is not None:
            return repeated
        if len(root) > ROOT_MAX_BYTES:
            raise DataError(f"the path of a workspace may have {ROOT_MAX_BYTES} bytes; this one has {len(root)}")
        if self._overlaps(root):
            return OVERLAP
        _note_key(write, workspace.id, self._made_workspaces)
        self._note(write.audit)
        self._new_workspaces.append(row)
        self._workspaces[workspace.id] = _WorkspaceState(
            workspace.id, workspace.created_at, root, workspace.status.value, workspace.expires_at, workspace.node_id
        )
        return APPLIED

    def _overlaps(self, root: bytes) -> bool:
        below = root if root.endswith(b"/") else root + b"/"
        above = [root, *_ancestors(root)]
        known = self._workspaces
        for other in known.values():
            if other.status in _OPEN and (other.root in above or other.root.startswith(below)):
                return True
        # b"0" comes right after b"/": the range holds what begins with `below`, and an index finds it. The rows the
        # group knows may have changed since, so they are only counted in.
        found = self._connection.execute(
            _SELECT_OVERLAP,
            {"above": above, "below": below, "beyond": below[:-1] + b"0", "most": len(known) + 1},
        )
        return any(row.id not in known for row in found)

    def _update_workspace(self, write: UpdateWorkspace) -> WriteOutcome:
        workspace = self._workspaces.get(write.workspace_id)
        if workspace is None:
            return NOT_FOUND
        if workspace.status != WorkspaceStatus.ACTIVE.value:
            return GONE
        self._note(write.audit)
        changes = workspace.changes
        if write.name is not None or write.clear_name:
            changes["name"] = None if write.clear_name or write.name is None else write.name.encode()
        if write.trusted is not None:
            changes["trusted"] = write.trusted
        if write.options is not None:
            changes["options"] = rows.options_value(write.options)
        if write.metadata is not None:
            changes["metadata"] = json_codec.dump(dict(write.metadata))
        if write.expires_at is not None or write.clear_expiry:
            changes["expires_at"] = None if write.clear_expiry else write.expires_at
        return APPLIED

    def _set_workspace_status(self, write: SetWorkspaceStatus) -> WriteOutcome:
        workspace = self._workspaces.get(write.workspace_id)
        if workspace is None:
            return NOT_FOUND
        if workspace.status == write.status.value:
            return APPLIED
        if workspace.status not in _OPEN or write.status is WorkspaceStatus.ACTIVE:
            return GONE
        if write.only_expired and workspace.status == WorkspaceStatus.ACTIVE.value and not workspace.is_due(write.at):
            return NOT_DUE
        self._note(write.audit)
        self._told.add(workspace.id)
        workspace.status = workspace.changes["status"] = write.status.value
        if write.status.value not in _OPEN:
            workspace.changes["ended_at"] = write.at
        return APPLIED

    def _create_key(self, write: CreateKey) -> WriteOutcome:
        stored = self._keys.get(write.key.id)
        if stored is not None:
            if stored.token_hash != write.key.token_hash:
                raise DataError(f"another key has the id {write.key.id}")
            return APPLIED
        self._keys[write.key.id] = _KeyState(write.key.id, write.key.token_hash, write.key.revoked_at)
        self._note(write.audit)
        self._new_keys.append(rows.key_row(write.key))
        return APPLIED

    def _revoke_key(self, write: RevokeKey) -> WriteOutcome:
        key = self._keys.get(write.key_id)
        if key is None:
            return NOT_FOUND
        if key.revoked_at is None:
            key.revoked_at = self._revocations[key.id] = write.at
            self._note(write.audit)
        return APPLIED

    def _keep_secret(self, write: KeepSecret) -> WriteOutcome:
        stored = self._secrets.get(write.name)
        if stored is not None:
            return APPLIED if stored == write.value else Existing(write.name)
        self._secrets[write.name] = write.value
        self._new_secrets.append((write.name, write.value, write.at))
        return APPLIED

    def _note(self, event: AuditEvent | None) -> None:
        # One that is there already was stored by an attempt whose reply was lost.
        if event is not None and event.id not in self._noted:
            self._noted.add(event.id)
            self._new_audit.append(rows.audit_row(event))

    # -- writing ----------------------------------------------------------------------------------------------------

    def write(self) -> None:
        """Write what was decided: parents before children, new rows before changes to them.

        Only changes of workspaces that were there before come first, so that a root one of them gives up is free.
        """
        if all(isinstance(write, ClaimBatch) for write in self._group) and self._on_postgres:
            # Nothing of the batch has an effect before its start is on the disk, and what is written later gets there
            # later: a claim that a crash of the server takes back takes everything back that was built on it.
            self._cursor.execute("SET LOCAL synchronous_commit = off")
        self._write_workspaces(new=False)
        for table, new in (
            (workspaces, self._new_workspaces),
            (batches, self._new_batches),
            (calls, self._new_calls),
            (large_arguments, self._new_arguments),
            (events, self._new_events),
            (call_output, self._new_output),
            (api_keys, self._new_keys),
            (secrets, self._new_secrets),
            (audit_events, self._new_audit),
        ):
            if new:
                self._writer.insert_rows(self._cursor, table, new)
        self._write_workspaces(new=True)
        self._write_calls()
        self._write_batches()
        for key_id, at in self._revocations.items():
            self._connection.execute(update(api_keys).where(api_keys.c.id == key_id).values(revoked_at=at))
        if self._given_back:
            self._connection.execute(update(batches).where(batches.c.id.in_(self._given_back)).values(process_id=None))
        if self._jobs and self._writer.jobs is not None:
            self._writer.jobs.defer(driver_connection(self._connection), self._jobs)
        origin = self._writer.origin
        if self._told and origin is not None and self._on_postgres:
            self._cursor.execute("SELECT pg_notify(%s, %s)", (CHANNEL, payload(origin, self._told)))

    def _write_workspaces(self, *, new: bool) -> None:
        concerned = [workspace for workspace in self._workspaces.values() if workspace.new is new]
        touched = [
            {"w_id": workspace.id, "at": workspace.touched_at} for workspace in concerned if workspace.touched_at
        ]
        if touched:
            self._writer.touch_workspaces.run(self._cursor, touched)
        for workspace in concerned:
            if workspace.changes:
                self._connection.execute(
                    update(workspaces).where(workspaces.c.id == workspace.id).values(workspace.changes)
                )

    def _write_calls(self) -> None:
        if self._call_changes:
            changes = list(self._call_changes.values())
            if self._writer.change_calls.run(self._cursor, changes) != len(changes):
                raise DataError("an event names a call that its batch does not have")
        if self._call_cancels:
            self._writer.cancel_calls.run(
                self._cursor, [{"c_id": call_id, "at": at} for call_id, at in self._call_cancels.items()]
            )

    def _write_batches(self) -> None:
        advanced: list[Mapping[str, Any]] = []
        changed: list[Mapping[str, Any]] = []
        for batch in self._batches.values():
            if not batch.dirty:
                continue
            values = {
                "b_id": batch.id,
                "old_epoch": batch.stored_epoch,
                "old_seq": batch.stored_seq,
                "new_epoch": batch.epoch,
                "new_seq": batch.last_seq,
                **batch.changes,
            }
            (changed if batch.changes else advanced).append(values)
        matched = 0
        if advanced:
            matched += self._writer.advance_batches.run(self._cursor, advanced)
        if changed:
            matched += self._writer.change_batches.run(self._cursor, changed)
        if matched != len(advanced) + len(changed):
            # The fence itself. The rows are locked, so only a database that does not keep its word gets here.
            raise OperationalError("a batch moved on while the group was applied", "busy")


def _workspace_row(values: Sequence[Any]) -> SimpleNamespace:
    return SimpleNamespace(**dict(zip(_WORKSPACE_COLUMNS, values, strict=True)))


def _scoped_key(write: SubmitBatch | CreateWorkspace) -> str | None:
    """Return the idempotency key of a write behind its scope; None when it has none."""
    if write.idempotency is None:
        return None
    if isinstance(write, SubmitBatch):
        return rows.scoped_key(write.idempotency.value, write.batch.owner, write.batch.workspace_id)
    return rows.scoped_key(write.idempotency.value, write.workspace.owner)


def _repeated(write: SubmitBatch | CreateWorkspace, made: Mapping[str, Made]) -> Existing | Refused | None:
    """Return what it means for a write that its key has made something before; None when it has not."""
    key = _scoped_key(write)
    if key is None or write.idempotency is None or key not in made:
        return None
    earlier = made[key]
    return Existing(earlier.id) if earlier.digest == write.idempotency.digest else KEY_REUSED


def _note_key(write: SubmitBatch | CreateWorkspace, made_id: str, made: dict[str, Made]) -> None:
    key = _scoped_key(write)
    if key is not None and write.idempotency is not None:
        made[key] = Made(made_id, write.idempotency.digest)


def _batch_changes(change: BatchChange) -> dict[str, Any]:
    values: dict[str, Any] = {"v_status": change.status.value}
    optional = {
        "v_effective_mode": change.effective_mode,
        "v_started_at": change.started_at,
        "v_finished_at": change.finished_at,
        "v_has_errors": change.has_errors,
        "v_terminate": change.terminate,
    }
    values |= {name: value for name, value in optional.items() if value is not None}
    if change.summary is not None:
        values |= {f"v_{name}": count for name, count in change.summary.to_json().items()}
    return values


def _ancestors(root: bytes) -> list[bytes]:
    """Return the directories above an absolute path, `/` included."""
    found = []
    while root not in {b"/", b""}:
        root = root.rpartition(b"/")[0] or b"/"
        found.append(root)
    return found
