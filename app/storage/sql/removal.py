"""Removing old records, a small piece at a time, so that the writes of live batches never wait for long.

What is going is marked first, in the transaction of its first piece: from then on nobody is shown any of it, however
many pieces it takes and whether or not the process lives to see the last one.
"""

from collections.abc import Iterable
from typing import Any, Final

from sqlalchemy import ColumnElement, Connection, Select, and_, delete, exists, func, select, text, update

from app.domain.batch import BatchStatus
from app.domain.events import EventType
from app.domain.ids import first_id
from app.domain.retention import Removal, RemovedCounts
from app.domain.workspace import WorkspaceStatus
from app.storage.base import Refused, Removed, RemoveFromBatch, WriteOutcome
from app.storage.sql.schema import audit_events, batches, call_output, calls, events, large_arguments, workspaces

PIECE_ROWS: Final = 256
PIECE_BYTES: Final = 1024 * 1024

_UPDATES: Final = (EventType.TOOL_EXECUTION_UPDATE.value, EventType.OUTPUT_GAP.value)
_TERMINAL: Final = tuple(status.value for status in BatchStatus if status.terminal)
_GONE: Final = (WorkspaceStatus.DELETED.value, WorkspaceStatus.EXPIRED.value)
_arguments_bytes: Final = func.coalesce(
    func.length(calls.c.arguments),
    select(func.length(large_arguments.c.data)).where(large_arguments.c.call_id == calls.c.id).scalar_subquery(),
    0,
)


def remove_from_batch(connection: Connection, write: RemoveFromBatch) -> WriteOutcome:
    """Remove the next piece of an ended batch; the caller holds its row."""
    batch_id, to = write.batch_id, write.to
    row = connection.execute(select(batches.c.status, batches.c.removal).where(batches.c.id == batch_id)).first()
    if row is None or row.removal >= to:
        return Removed()
    if row.status not in _TERMINAL:
        return Refused("running")
    if row.removal < to.going:
        _mark(connection, batch_id, to.going)
    removed = _remove_output(connection, batch_id)
    if removed is None and to >= Removal.UPDATES:
        removed = _remove_events(connection, batch_id, only=_UPDATES if to is Removal.UPDATES else None)
    if removed is None and to is Removal.ALL:
        removed = _remove_calls(connection, batch_id)
    if removed is not None:
        return Removed(removed, more=True)
    if to is Removal.ALL:
        connection.execute(delete(batches).where(batches.c.id == batch_id))
        return Removed(RemovedCounts(batches=1))
    _mark(connection, batch_id, to)
    return Removed()


def remove_workspace(connection: Connection, workspace_id: str) -> WriteOutcome:
    """Remove the row of a workspace that is gone and has no batches."""
    statement = delete(workspaces).where(
        workspaces.c.id == workspace_id,
        workspaces.c.status.in_(_GONE),
        ~exists().where(batches.c.workspace_id == workspaces.c.id),
    )
    if connection.execute(statement).rowcount == 0:
        return Refused("in_use")
    return Removed(RemovedCounts(workspaces=1))


def give_back_pages(connection: Connection, most: int) -> WriteOutcome:
    """Give free pages at the end of SQLite's file back to the file system; Postgres sees to that itself."""
    if connection.dialect.name != "sqlite":
        return Removed()
    before, free = _page_counts(connection)
    cursor = connection.connection.cursor()
    for _ in range(min(most, free)):
        # The driver takes one step of a statement that returns no rows, and each step frees one page.
        cursor.execute("PRAGMA incremental_vacuum(1)")
    after, left = _page_counts(connection)
    return Removed(RemovedCounts(pages=before - after), more=0 < left < free)


def _page_counts(connection: Connection) -> tuple[int, int]:
    """Return how many pages SQLite's file has and how many of them are free."""
    return (
        connection.execute(text("PRAGMA page_count")).scalar_one(),
        connection.execute(text("PRAGMA freelist_count")).scalar_one(),
    )


def _mark(connection: Connection, batch_id: str, step: Removal) -> None:
    values: dict[str, Any] = {"removal": int(step)}
    if step is Removal.ALL_GOING:
        # The key is free at once: nobody is shown what it made.
        values["idempotency_key"] = None
    connection.execute(update(batches).where(batches.c.id == batch_id).values(values))


def _remove_output(connection: Connection, batch_id: str) -> RemovedCounts | None:
    of_batch = call_output.c.batch_id == batch_id
    size = func.length(call_output.c.data)
    last = _last_of_piece(
        connection.execute(
            select(call_output.c.seq, size).where(of_batch).order_by(call_output.c.seq).limit(PIECE_ROWS)
        )
    )
    if last is None:
        return None
    # All parts of the last event too: an event has its output or has lost it.
    piece = and_(of_batch, call_output.c.seq <= last)
    total = connection.scalar(select(func.sum(size)).where(piece))
    connection.execute(delete(call_output).where(piece))
    return RemovedCounts(output_bytes=int(total or 0))


def _remove_events(connection: Connection, batch_id: str, only: tuple[str, ...] | None) -> RemovedCounts | None:
    some: ColumnElement[bool] = events.c.batch_id == batch_id
    if only is not None:
        some = and_(some, events.c.type.in_(only))
    found: Select[Any] = select(events.c.seq, func.length(events.c.data)).where(some)
    last = _last_of_piece(connection.execute(found.order_by(events.c.seq).limit(PIECE_ROWS)))
    if last is None:
        return None
    removed = connection.execute(delete(events).where(some, events.c.seq <= last))
    return RemovedCounts(events=removed.rowcount)


def _remove_calls(connection: Connection, batch_id: str) -> RemovedCounts | None:
    of_batch = calls.c.batch_id == batch_id
    size = _arguments_bytes + func.coalesce(func.length(calls.c.result), 0)
    last = _last_of_piece(
        connection.execute(select(calls.c.position, size).where(of_batch).order_by(calls.c.position).limit(PIECE_ROWS))
    )
    if last is None:
        return None
    piece = and_(of_batch, calls.c.position <= last)
    connection.execute(delete(large_arguments).where(large_arguments.c.call_id.in_(select(calls.c.id).where(piece))))
    removed = connection.execute(delete(calls).where(piece))
    return RemovedCounts(calls=removed.rowcount)


def _last_of_piece(found: Iterable[Any]) -> int | None:
    """Return the number of the last row, of `(number, bytes)` in order, that a piece takes; None when there is none."""
    last: int | None = None
    left = PIECE_BYTES
    for number, size in found:
        if last is not None and left <= 0:
            break
        last = number
        left -= size
    return last


def remove_audit(connection: Connection, before: int, most: int) -> Removed:
    """Remove the oldest events of the audit log; their ids are in the order of time."""
    oldest = list(
        connection.scalars(
            select(audit_events.c.id)
            .where(audit_events.c.id < first_id("audit", before))
            .order_by(audit_events.c.id)
            .limit(most)
        )
    )
    if not oldest:
        return Removed()
    connection.execute(delete(audit_events).where(audit_events.c.id <= oldest[-1]))
    return Removed(RemovedCounts(audit_events=len(oldest)), more=len(oldest) == most)
