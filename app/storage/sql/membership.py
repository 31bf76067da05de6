"""Who lives: the rows of nodes and processes, and what they hold. Times are the database's own."""

from collections.abc import Collection
from typing import Any, Final

from sqlalchemy import (
    BigInteger,
    ColumnElement,
    Connection,
    bindparam,
    delete,
    func,
    insert,
    literal_column,
    select,
    text,
    update,
)
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.ext.compiler import compiles
from sqlalchemy.sql.compiler import SQLCompiler
from sqlalchemy.sql.functions import FunctionElement

from app.domain.batch import BatchStatus
from app.domain.node import LEASE_SECONDS, Node, Process
from app.domain.workspace import Workspace, WorkspaceStatus
from app.storage.base import Placement, UnfinishedBatch, WaitingBatch, Wish
from app.storage.sql import rows
from app.storage.sql.listener import CHANNEL, UNKNOWN, payload
from app.storage.sql.queries import UNFINISHED
from app.storage.sql.schema import (
    FINISHED,
    OPEN_WORKSPACE,
    UNFINISHED_BATCH,
    batches,
    calls,
    nodes,
    processes,
    workspaces,
)

_LEASE_MS: Final = round(LEASE_SECONDS * 1000)


class _Now(FunctionElement[int]):
    """Milliseconds since the epoch on the clock of the database."""

    type = BigInteger()
    inherit_cache = True


@compiles(_Now, "sqlite")
def _now_sqlite(_element: _Now, _compiler: SQLCompiler, **_options: Any) -> str:
    return "CAST((julianday('now') - 2440587.5) * 86400000 AS INTEGER)"


@compiles(_Now, "postgresql")
def _now_postgresql(_element: _Now, _compiler: SQLCompiler, **_options: Any) -> str:
    # Not that of the transaction, which may have waited for a lock since it began.
    return "CAST(extract(epoch FROM clock_timestamp()) * 1000 AS bigint)"


_LIVES: Final = processes.c.seen_at > _Now() - _LEASE_MS
_LIVING: Final = select(processes).where(_LIVES).order_by(processes.c.id)
_UNFINISHED_ROW: Final[ColumnElement[bool]] = literal_column(f"batches.{UNFINISHED_BATCH}")
_HOLDER: Final = select(processes.c.id).where(processes.c.id == batches.c.process_id).correlate(batches)
_HELD_BY_NOBODY_KNOWN: Final = UNFINISHED.where(batches.c.process_id.is_not(None), ~_HOLDER.exists())
_HELD_BY_THE_DEAD: Final = UNFINISHED.where(batches.c.process_id.is_not(None), ~_HOLDER.where(_LIVES).exists())
_WAITING: Final = (
    select(batches.c.id, batches.c.epoch)
    .join(workspaces, workspaces.c.id == batches.c.workspace_id)
    .where(_UNFINISHED_ROW, batches.c.process_id.is_(None), workspaces.c.node_id == bindparam("node_id"))
    .order_by(batches.c.id)
    .limit(bindparam("most"))
)
_HELD: Final = (_UNFINISHED_ROW, batches.c.process_id == bindparam("process_id"))
_BATCH_WISHES: Final = select(batches.c.id).where(*_HELD, batches.c.cancel_requested_at.is_not(None))
_CALL_WISHES: Final = (
    select(calls.c.batch_id, calls.c.id)
    .join(batches, batches.c.id == calls.c.batch_id)
    .where(*_HELD, calls.c.cancel_requested_at.is_not(None), calls.c.status.in_(["queued", "running"]))
)
_UNFINISHED_OF_WORKSPACE: Final = (
    select(batches.c.id)
    .where(
        batches.c.workspace_id == bindparam("workspace_id"),
        batches.c.status.in_([status.value for status in BatchStatus if not status.terminal]),
    )
    .limit(bindparam("most"))
)


def join(connection: Connection, process: Process, dead: Collection[str], *, adopt_all: bool) -> None:
    if dead:
        connection.execute(delete(processes).where(processes.c.id.in_(dead)))
    _note(connection, process)
    _tell(connection, process.id)
    if process.node_id is None:
        return
    # Two processes of a new node may come here at once.
    dialect = sqlite if connection.dialect.name == "sqlite" else postgresql
    node = dialect.insert(nodes).values(id=process.node_id, created_at=_Now())
    connection.execute(node.on_conflict_do_nothing())
    mine = workspaces.c.node_id.is_distinct_from(process.node_id) if adopt_all else workspaces.c.node_id.is_(None)
    connection.execute(update(workspaces).where(text(OPEN_WORKSPACE), mine).values(node_id=process.node_id))


def beat(connection: Connection, process: Process) -> list[Process]:
    changed = connection.execute(update(processes).where(processes.c.id == process.id).values(seen_at=_Now()))
    if changed.rowcount == 0:
        # Another one took it for dead and removed it. What it held has another epoch now, so it may come back.
        _note(connection, process)
    return living(connection)


def _note(connection: Connection, process: Process) -> None:
    now = _Now()
    connection.execute(
        insert(processes).values(
            id=process.id,
            node_id=process.node_id,
            role=process.role,
            url=process.url,
            started_at=now,
            seen_at=now,
        )
    )


def leave(connection: Connection, process_id: str) -> None:
    connection.execute(delete(processes).where(processes.c.id == process_id))
    _tell(connection, process_id)


def _tell(connection: Connection, process_id: str) -> None:
    # Whoever thinks that it is alone tells nobody of its commits.
    if connection.dialect.name == "postgresql":
        connection.execute(select(func.pg_notify(CHANNEL, payload(UNKNOWN, {process_id}))))


def forget_dead(connection: Connection) -> None:
    """Remove the processes that died and hold nothing any more."""
    held = select(batches.c.process_id).where(_UNFINISHED_ROW, batches.c.process_id.is_not(None))
    connection.execute(delete(processes).where(~_LIVES, processes.c.id.not_in(held)))


def living(connection: Connection) -> list[Process]:
    return [_process(row) for row in connection.execute(_LIVING)]


def known(connection: Connection) -> list[Process]:
    return [_process(row) for row in connection.execute(select(processes).order_by(processes.c.id))]


def known_nodes(connection: Connection) -> list[Node]:
    counted = select(workspaces.c.node_id, func.count().label("open")).where(text(OPEN_WORKSPACE))
    counts = {row.node_id: row.open for row in connection.execute(counted.group_by(workspaces.c.node_id))}
    found = connection.execute(select(nodes).order_by(nodes.c.id))
    return [Node(row.id, row.created_at, counts.get(row.id, 0)) for row in found]


def swept_at(connection: Connection, node_id: str) -> int | None:
    found: int | None = connection.scalar(select(nodes.c.swept_at).where(nodes.c.id == node_id))
    return found


def swept(connection: Connection, node_id: str, at: int) -> None:
    connection.execute(update(nodes).where(nodes.c.id == node_id).values(swept_at=at))


def lost_batches(connection: Connection, stale: bool) -> list[UnfinishedBatch]:
    statement = _HELD_BY_THE_DEAD if stale else _HELD_BY_NOBODY_KNOWN
    return [_unfinished(row) for row in connection.execute(statement)]


def unfinished_batch(connection: Connection, batch_id: str) -> UnfinishedBatch | None:
    row = connection.execute(UNFINISHED.where(batches.c.id == batch_id)).first()
    return None if row is None else _unfinished(row)


def unfinished_batches(connection: Connection, workspace_id: str | None) -> list[UnfinishedBatch]:
    statement = UNFINISHED if workspace_id is None else UNFINISHED.where(batches.c.workspace_id == workspace_id)
    return [_unfinished(row) for row in connection.execute(statement)]


def held_batches(connection: Connection, process_id: str) -> list[UnfinishedBatch]:
    statement = UNFINISHED.where(batches.c.process_id == process_id)
    return [_unfinished(row) for row in connection.execute(statement)]


def waiting_batches(connection: Connection, node_id: str, limit: int) -> list[WaitingBatch]:
    found = connection.execute(_WAITING, {"node_id": node_id, "most": limit})
    return [WaitingBatch(row.id, row.epoch) for row in found]


def wishes(connection: Connection, process_id: str) -> list[Wish]:
    held = {"process_id": process_id}
    whole = [Wish(row.id, None) for row in connection.execute(_BATCH_WISHES, held)]
    return whole + [Wish(row.batch_id, row.id) for row in connection.execute(_CALL_WISHES, held)]


def interrupted_workspaces(connection: Connection, node_id: str, since: int) -> list[Workspace]:
    ended = select(batches.c.workspace_id).where(
        text(FINISHED),
        batches.c.removal.in_([0, 1, 2, 3]),
        batches.c.finished_at >= since,
        batches.c.status == BatchStatus.INTERRUPTED.value,
    )
    statement = select(workspaces).where(
        workspaces.c.id.in_(ended),
        workspaces.c.node_id == node_id,
        workspaces.c.status == WorkspaceStatus.ACTIVE.value,
    )
    return [rows.workspace(row) for row in connection.execute(statement)]


def placement(connection: Connection, workspace_id: str, most: int) -> Placement | None:
    row = connection.execute(select(workspaces.c.node_id).where(workspaces.c.id == workspace_id)).first()
    if row is None:
        return None
    found = connection.execute(_LIVING.where(processes.c.node_id == row.node_id))
    asked = {"workspace_id": workspace_id, "node_id": row.node_id, "most": most}
    return Placement(
        row.node_id,
        tuple(map(_process, found)),
        len(connection.execute(_UNFINISHED_OF_WORKSPACE, asked).all()),
        len(connection.execute(_WAITING, asked).all()),
    )


def _process(row: Any) -> Process:
    return Process(row.id, row.node_id, row.role, row.url, row.started_at, row.seen_at)


def _unfinished(row: Any) -> UnfinishedBatch:
    return UnfinishedBatch(
        row.id, row.workspace_id, bool(row.started), row.process_id, row.node_id, row.epoch, row.last_seq
    )
