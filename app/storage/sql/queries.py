"""The reads: what is asked of the tables, and how much is taken at once."""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from itertools import chain
from typing import Any, Final, NamedTuple, TypeVar

from sqlalchemy import (
    Boolean,
    Column,
    ColumnElement,
    Connection,
    LargeBinary,
    Select,
    bindparam,
    case,
    exists,
    func,
    literal,
    literal_column,
    select,
    text,
    tuple_,
)
from sqlalchemy.ext.compiler import compiles
from sqlalchemy.sql.compiler import SQLCompiler
from sqlalchemy.sql.functions import FunctionElement

from app.domain.audit import AuditAction, AuditEvent
from app.domain.batch import Batch, BatchStatus
from app.domain.events import EventType, OutputRow, OutputStream, StoredEvent
from app.domain.ids import first_id
from app.domain.retention import Removal
from app.domain.tool_call import CallRecord, CallStatus
from app.domain.workspace import Workspace, WorkspaceStatus
from app.storage.base import (
    ApiKey,
    AuditFilter,
    BatchEnd,
    BatchHead,
    CallFilter,
    GoneWorkspace,
    Made,
    OutputExtent,
    Page,
)
from app.storage.sql import rows
from app.storage.sql.schema import (
    ENDED,
    EXPIRES,
    FINISHED,
    OPEN_WORKSPACE,
    PATH_KEY_BYTES,
    RARE_ACTION,
    TOOL_KEY_BYTES,
    UNFINISHED_BATCH,
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

_Listed = TypeVar("_Listed", Workspace, Batch, ApiKey)

FIRST_EVENTS: Final = 16
EVENTS_AT_ONCE: Final = 64
EVENT_PAGE_BYTES: Final = 512 * 1024
"""A follower that does not read holds about one page."""
OUTPUT_PIECE_BYTES: Final = 1024 * 1024
OUTPUT_ROWS_MAX: Final = 1024

NEWEST_HEADS: Final = 256

CLOCK_SLACK_MS: Final = 60_000
"""How far a call's `queued_at` may lie from the time its id was made."""

_large = select(large_arguments.c.data).where(large_arguments.c.call_id == calls.c.id).scalar_subquery()
_large_size = (
    select(func.length(large_arguments.c.data)).where(large_arguments.c.call_id == calls.c.id).scalar_subquery()
)
_arguments = func.coalesce(calls.c.arguments, _large, type_=LargeBinary)
_call_facts = [column for column in calls.c if column.name not in {"arguments", "result"}]
_call_sizes = (
    func.coalesce(func.length(calls.c.arguments), _large_size).label("arguments_bytes"),
    func.coalesce(func.length(calls.c.result), 0).label("result_bytes"),
)
_CALL_WHOLE: Final = select(*_call_facts, _arguments.label("arguments"), calls.c.result, *_call_sizes)
_CALL_FACTS: Final = select(*_call_facts, *_call_sizes)
_CALL_BYTES: Final = select(
    func.sum(func.coalesce(func.length(calls.c.arguments), _large_size) + func.coalesce(func.length(calls.c.result), 0))
)
# Only the columns that fit are read: a branch that is not taken costs nothing.
_CALL_TEXTS: Final = select(
    calls.c.id,
    case((calls.c.id.in_(bindparam("arguments", expanding=True)), _arguments)),
    case((calls.c.id.in_(bindparam("results", expanding=True)), calls.c.result)),
).where(calls.c.id.in_(bindparam("either", expanding=True)))


class _CallSelection(NamedTuple):
    """The same calls, asked for in three ways. Built once: a statement costs more to build than to run."""

    size: Select[int]
    whole: Select[Any]
    facts: Select[Any]


def _selection(condition: ColumnElement[bool], order: ColumnElement[Any]) -> _CallSelection:
    return _CallSelection(
        _CALL_BYTES.where(condition),
        _CALL_WHOLE.where(condition).order_by(order),
        _CALL_FACTS.where(condition).order_by(order),
    )


_OF_BATCH: Final = _selection(calls.c.batch_id == bindparam("batch_id"), calls.c.position.asc())
_BY_IDS: Final = _selection(calls.c.id.in_(bindparam("ids", expanding=True)), calls.c.id.desc())
_tool_key: Final = literal_column(f"substr(calls.tool_name, 1, {TOOL_KEY_BYTES})", LargeBinary)
_path_key: Final = literal_column(f"substr(calls.path, 1, {PATH_KEY_BYTES})", LargeBinary)

_WORKSPACE: Final = select(workspaces).where(workspaces.c.id == bindparam("id"))
_BATCH: Final = select(batches).where(batches.c.id == bindparam("id"))
_CALL: Final = _CALL_WHOLE.where(calls.c.id == bindparam("id"))
_MADE_WORKSPACE: Final = select(workspaces.c.id, workspaces.c.request_digest).where(
    workspaces.c.idempotency_key == bindparam("key")
)
_MADE_BATCH: Final = select(batches.c.id, batches.c.request_digest).where(batches.c.idempotency_key == bindparam("key"))
_LAST_SEQ: Final = select(batches.c.last_seq, batches.c.status).where(
    batches.c.id == bindparam("id"), batches.c.removal < int(Removal.ALL_GOING)
)
_OUTPUT_KEPT: Final = (
    select(batches.c.removal == int(Removal.NOTHING))
    .join(calls, calls.c.batch_id == batches.c.id)
    .where(calls.c.id == bindparam("id"))
)
_EVENTS: Final = (
    select(events)
    .where(events.c.batch_id == bindparam("batch_id"), events.c.seq > bindparam("after"))
    .order_by(events.c.seq)
    .limit(bindparam("most"))
)
_EVENT_OUTPUT: Final = (
    select(call_output)
    .where(
        call_output.c.batch_id == bindparam("batch_id"),
        call_output.c.seq.between(bindparam("first"), bindparam("last")),
    )
    .order_by(call_output.c.seq, call_output.c.part)
)
_HEADS: Final = select(batches.c.id, batches.c.last_seq, batches.c.status)
# With a limit, so that Postgres looks into the events of each unfinished batch and never hashes all there are.
_STARTED: Final = (
    select(events.c.seq)
    .where(events.c.batch_id == batches.c.id, events.c.type == EventType.TOOL_EXECUTION_START.value)
    .limit(1)
    .scalar_subquery()
    .is_not(None)
)
UNFINISHED: Final = (
    select(
        batches.c.id,
        batches.c.workspace_id,
        _STARTED.label("started"),
        batches.c.process_id,
        workspaces.c.node_id,
        batches.c.epoch,
        batches.c.last_seq,
    )
    .join(workspaces, workspaces.c.id == batches.c.workspace_id)
    .where(literal_column(f"batches.{UNFINISHED_BATCH}"))
    .order_by(batches.c.id)
)
_BATCH_END: Final = select(batches.c.finished_at).where(
    batches.c.id
    == func.coalesce(
        select(calls.c.batch_id).where(calls.c.id == bindparam("about")).scalar_subquery(), bindparam("about")
    )
)
_SECRET: Final = select(secrets.c.value).where(secrets.c.name == bindparam("name"))
_PING: Final = select(api_keys.c.id).limit(1)
_KEYS: Final = select(api_keys).where(api_keys.c.revoked_at.is_(None)).order_by(api_keys.c.id)
_REVOKED: Final = select(api_keys.c.id).where(
    api_keys.c.id.in_(bindparam("ids", expanding=True)), api_keys.c.revoked_at.is_not(None)
)


# -- workspaces -------------------------------------------------------------------------------------------------------


def workspace(connection: Connection, workspace_id: str) -> Workspace | None:
    row = connection.execute(_WORKSPACE, {"id": workspace_id}).first()
    return None if row is None else rows.workspace(row)


def made(connection: Connection, idempotency_key: str, owner: str, workspace_id: str | None) -> Made | None:
    statement = _MADE_WORKSPACE if workspace_id is None else _MADE_BATCH
    row = connection.execute(statement, {"key": rows.scoped_key(idempotency_key, owner, workspace_id)}).first()
    return None if row is None else Made(row.id, row.request_digest)


def workspaces_page(connection: Connection, before: str | None, limit: int, owner: str | None) -> Page[Workspace]:
    statement = select(workspaces)
    if owner is not None:
        statement = statement.where(workspaces.c.owner == owner)
    found = _newest(connection, statement, workspaces.c.id, before, limit)
    return _page([rows.workspace(row) for row in found[:limit]], more=len(found) > limit)


def workspaces_with_status(
    connection: Connection, status: WorkspaceStatus, node_id: str | None = None
) -> list[Workspace]:
    statement = select(workspaces).where(workspaces.c.status == status.value)
    if node_id is not None:
        statement = statement.where(workspaces.c.node_id == node_id)
    if status in {WorkspaceStatus.ACTIVE, WorkspaceStatus.DELETING}:
        # Says nothing new to a reader; it leads the database to the index that has the open ones and no others.
        statement = statement.where(text(OPEN_WORKSPACE), workspaces.c.root > b"")
    found = [rows.workspace(row) for row in connection.execute(statement)]
    return sorted(found, key=lambda workspace: workspace.id)


def expired_workspaces(connection: Connection, at: int, limit: int, node_id: str | None) -> list[Workspace]:
    statement = select(workspaces).where(text(EXPIRES), workspaces.c.expires_at <= at)
    if node_id is not None:
        statement = statement.where(workspaces.c.node_id == node_id)
    found = connection.execute(statement.order_by(workspaces.c.expires_at).limit(limit))
    return [rows.workspace(row) for row in found]


# -- batches ----------------------------------------------------------------------------------------------------------


def batch(connection: Connection, batch_id: str, *, with_calls: bool, inline: int | None) -> Batch | None:
    row = connection.execute(_BATCH, {"id": batch_id}).first()
    if row is None or row.removal >= Removal.ALL_GOING:
        return None
    if not with_calls:
        return rows.batch(row)
    return rows.batch(row, _call_records(connection, _OF_BATCH, {"batch_id": batch_id}, inline))


def batches_page(
    connection: Connection, workspace_id: str, status: BatchStatus | None, before: str | None, limit: int
) -> Page[Batch]:
    statement = select(batches).where(
        batches.c.workspace_id == workspace_id, batches.c.removal < int(Removal.ALL_GOING)
    )
    if status is not None:
        statement = statement.where(batches.c.status == status.value)
    found = _newest(connection, statement, batches.c.id, before, limit)
    return _page([rows.batch(row) for row in found[:limit]], more=len(found) > limit)


def batch_heads(connection: Connection, workspace_id: str, also: Collection[str], after: str | None) -> list[BatchHead]:
    found: dict[str, BatchHead] = {}
    for statement in (
        _HEADS.where(literal_column(f"batches.{UNFINISHED_BATCH}"), batches.c.workspace_id == workspace_id),
        _HEADS.where(batches.c.id.in_(also)) if also else None,
        _HEADS.where(batches.c.workspace_id == workspace_id, batches.c.id > (after or ""))
        .order_by(batches.c.id.desc())
        .limit(1 if after is None else NEWEST_HEADS),
    ):
        if statement is not None:
            for row in connection.execute(statement):
                found[row.id] = BatchHead(row.id, row.last_seq, BatchStatus(row.status))
    return [found[batch_id] for batch_id in sorted(found)]


def last_seq(connection: Connection, batch_id: str) -> tuple[int, BatchStatus] | None:
    row = connection.execute(_LAST_SEQ, {"id": batch_id}).first()
    return None if row is None else (row.last_seq, BatchStatus(row.status))


def batch_end(connection: Connection, about: str) -> BatchEnd | None:
    row = connection.execute(_BATCH_END, {"about": about}).first()
    return None if row is None else BatchEnd(row.finished_at)


# -- calls ------------------------------------------------------------------------------------------------------------


def call(connection: Connection, call_id: str) -> CallRecord | None:
    row = connection.execute(_CALL, {"id": call_id}).first()
    return None if row is None else _whole_call(row)


def calls_page(
    connection: Connection, condition: CallFilter, before: str | None, limit: int, examine: int, inline: int | None
) -> Page[CallRecord]:
    narrow, rest = _conditions(condition)
    if before is not None:
        narrow = [*narrow, calls.c.id < before]
    # The rows examined: `narrow` walks one index from its newest entry, and ends after `examine` of them.
    examined = select(calls.c.id).where(*narrow).order_by(calls.c.id.desc()).limit(examine)
    if rest:
        # Of these rows alone: joined to the table again, a condition could send the database to an index of its own.
        names = {each.column.name for each in rest} - {"id"}
        window = examined.add_columns(*(calls.c[name] for name in sorted(names))).subquery()
        kept = [each.holds(window.c[each.column.name]) for each in rest]
        found_ids = select(window.c.id).where(*kept).order_by(window.c.id.desc()).limit(limit + 1)
    else:
        found_ids = examined.limit(min(limit + 1, examine))
    ids = list(connection.scalars(found_ids))
    if len(ids) > limit:
        next_before: str | None = ids[limit - 1]
    else:
        next_before = connection.scalar(examined.limit(1).offset(examine - 1))
    ids = ids[:limit]
    if not ids:
        return Page((), next_before)
    return Page(tuple(_call_records(connection, _BY_IDS, {"ids": ids}, inline)), next_before)


class _Condition(NamedTuple):
    """A condition on one column; `indexed` are those that lead to an index, when there are others."""

    column: ColumnElement[Any]
    holds: Callable[[ColumnElement[Any]], ColumnElement[bool]]
    indexed: tuple[ColumnElement[bool], ...] = ()


def _equal(column: ColumnElement[Any], value: Any, *indexed: ColumnElement[bool]) -> _Condition:
    return _Condition(column, lambda found: found == value, indexed)


def _conditions(condition: CallFilter) -> tuple[list[ColumnElement[bool]], list[_Condition]]:
    """Return the conditions that one index answers in id order, and those looked at row by row."""
    leading: list[list[_Condition]] = []
    if condition.batch_id is not None:
        leading.append([_equal(calls.c.batch_id, condition.batch_id)])
    if condition.tool_call_id is not None:
        leading.append([_equal(calls.c.tool_call_id, condition.tool_call_id)])
    path = _path_conditions(condition.path)
    if condition.workspace_id is not None:
        # A workspace has fewer calls than a status or a tool; with a path its index holds just those.
        leading.append([_equal(calls.c.workspace_id, condition.workspace_id), *path])
    if condition.error_code is not None:
        leading.append([_equal(calls.c.error_code, condition.error_code)])
    if condition.status is not None and condition.status is not CallStatus.SUCCEEDED:
        leading.append([_equal(calls.c.status, condition.status.value)])
    if condition.owner is not None:
        leading.append([_equal(calls.c.owner, condition.owner)])
    if condition.tool_name is not None:
        name = condition.tool_name.encode()
        leading.append([_equal(calls.c.tool_name, name, _tool_key == name[:TOOL_KEY_BYTES])])
    if condition.status is CallStatus.SUCCEEDED:
        leading.append([_equal(calls.c.status, condition.status.value)])
    first = leading[0] if leading else []
    narrow = [part for each in first for part in (*each.indexed, each.holds(each.column))]
    rest = [each for conditions in leading[1:] for each in conditions]
    if condition.workspace_id is None:
        rest += path
    if condition.until is not None:
        until = condition.until
        narrow.append(calls.c.id < first_id("call", until + CLOCK_SLACK_MS))
        rest.append(_Condition(calls.c.queued_at, lambda found: found <= until))
    if condition.since is not None:
        since = condition.since
        narrow.append(calls.c.id >= first_id("call", since - CLOCK_SLACK_MS))
        rest.append(_Condition(calls.c.queued_at, lambda found: found >= since))
    if condition.min_duration_ms is not None:
        shortest = condition.min_duration_ms
        rest.append(_Condition(calls.c.duration_ms, lambda found: found >= shortest))
    if condition.text is not None:
        searched = literal(condition.text.encode(), LargeBinary)
        rest.append(_Condition(calls.c.summary, lambda found: _Holds(found, searched)))
    return narrow, rest


def _path_conditions(path: str | None) -> list[_Condition]:
    if path is None:
        return []
    value = path.encode()
    return [_equal(calls.c.path, value, _path_key == value[:PATH_KEY_BYTES])]


class _Holds(FunctionElement[bool]):
    """Whether a binary value holds another one; the two databases have different names for it."""

    type = Boolean()
    inherit_cache = True


@compiles(_Holds, "sqlite")
def _holds_sqlite(element: _Holds, compiler: SQLCompiler, **options: Any) -> str:
    return f"instr({compiler.process(element.clauses, **options)}) > 0"


@compiles(_Holds, "postgresql")
def _holds_postgresql(element: _Holds, compiler: SQLCompiler, **options: Any) -> str:
    value, part = element.clauses
    return f"position({compiler.process(part, **options)} IN {compiler.process(value, **options)}) > 0"


def _call_records(
    connection: Connection, selection: _CallSelection, parameters: Mapping[str, Any], inline: int | None
) -> list[CallRecord]:
    if inline is None or (connection.scalar(selection.size, parameters) or 0) <= inline:
        return [_whole_call(row) for row in connection.execute(selection.whole, parameters)]
    found = connection.execute(selection.facts, parameters).all()
    arguments: list[str] = []
    results: list[str] = []
    left = inline
    for row in found:
        if row.arguments_bytes <= left:
            left -= row.arguments_bytes
            arguments.append(row.id)
        if 0 < row.result_bytes <= left:
            left -= row.result_bytes
            results.append(row.id)
    fitting = {"arguments": arguments, "results": results, "either": [*{*arguments, *results}]}
    loaded = {call_id: (given, result) for call_id, given, result in connection.execute(_CALL_TEXTS, fitting)}
    return [rows.call(row, *loaded.get(row.id, (None, None))) for row in found]


def _whole_call(row: Any) -> CallRecord:
    return rows.call(row, row.arguments, row.result)


# -- events and output ------------------------------------------------------------------------------------------------


def events_page(connection: Connection, batch_id: str, after: int, limit: int) -> list[StoredEvent]:
    page: list[StoredEvent] = []
    size = 0
    at_once = FIRST_EVENTS
    while len(page) < limit and size < EVENT_PAGE_BYTES:
        most = min(at_once, limit - len(page))
        found = connection.execute(_EVENTS, {"batch_id": batch_id, "after": after, "most": most}).all()
        output = _output_of(connection, batch_id, found)
        page += [rows.event(row, output.get(row.seq, ())) for row in found]
        if len(found) < most:
            break
        after = found[-1].seq
        size += sum(len(row.data) for row in found) + sum(len(part.data) for part in chain(*output.values()))
        if size < EVENT_PAGE_BYTES // 8:
            at_once = EVENTS_AT_ONCE
    return page


def _output_of(connection: Connection, batch_id: str, found: Sequence[Any]) -> dict[int, list[OutputRow]]:
    updates = [row.seq for row in found if row.type == EventType.TOOL_EXECUTION_UPDATE.value]
    output: dict[int, list[OutputRow]] = {}
    if updates:
        between = {"batch_id": batch_id, "first": updates[0], "last": updates[-1]}
        for row in connection.execute(_EVENT_OUTPUT, between):
            output.setdefault(row.seq, []).append(rows.output(row))
    return output


def output_extent(connection: Connection, call_id: str, stream: OutputStream | None) -> OutputExtent | None:
    if connection.scalar(_OUTPUT_KEPT, {"id": call_id}) is False:
        return None
    offset = call_output.c.combined_offset if stream is None else call_output.c.stream_offset
    statement = select(offset + func.length(call_output.c.data)).where(call_output.c.call_id == call_id)
    if stream is not None:
        statement = statement.where(call_output.c.stream == stream)
    return OutputExtent(connection.scalar(statement.order_by(call_output.c.combined_offset.desc()).limit(1)) or 0)


def output_start(connection: Connection, call_id: str, start: int) -> int:
    """Return the combined offset of the row that byte `start` lies in, or of one before it.

    It serves each single stream too: a byte's offset in its stream is never above its offset in all of them.
    """
    statement = (
        select(call_output.c.combined_offset)
        .where(call_output.c.call_id == call_id, call_output.c.combined_offset <= start)
        .order_by(call_output.c.combined_offset.desc())
        .limit(1)
    )
    return connection.scalar(statement) or 0


def output_rows(
    connection: Connection, call_id: str, stream: OutputStream | None, combined_offset: int, limit: int
) -> list[OutputRow]:
    statement = select(call_output).where(
        call_output.c.call_id == call_id, call_output.c.combined_offset >= combined_offset
    )
    if stream is not None:
        statement = statement.where(call_output.c.stream == stream)
    found = connection.execute(statement.order_by(call_output.c.combined_offset).limit(limit))
    return [rows.output(row) for row in found]


def slices(found: Sequence[OutputRow], stream: OutputStream | None, start: int, end: int) -> Iterator[bytes]:
    """Yield what the rows hold of bytes `start … end - 1`, in pieces of at most `OUTPUT_PIECE_BYTES`."""
    pieces: list[bytes] = []
    size = 0
    for row in found:
        offset = row.combined_offset if stream is None else row.stream_offset
        data = memoryview(row.data)[max(0, start - offset) : max(0, end - offset)]
        while data:
            piece, data = data[: OUTPUT_PIECE_BYTES - size], data[OUTPUT_PIECE_BYTES - size :]
            pieces.append(bytes(piece))
            size += len(piece)
            if size == OUTPUT_PIECE_BYTES:
                yield b"".join(pieces)
                pieces, size = [], 0
    if pieces:
        yield b"".join(pieces)


def next_output_limit(limit: int, size: int) -> int:
    """Return how many rows to read next after `limit` rows held `size` bytes: about one piece's worth."""
    if size < OUTPUT_PIECE_BYTES // 2:
        return min(limit * 2, OUTPUT_ROWS_MAX)
    return max(limit // 2, 1) if size > OUTPUT_PIECE_BYTES else limit


# -- retention --------------------------------------------------------------------------------------------------------


def removable_batches(connection: Connection, found_at: Sequence[Removal], ended_before: int, limit: int) -> list[str]:
    # One range of the index per step.
    found: list[str] = []
    for step in found_at:
        statement = select(batches.c.id).where(
            text(FINISHED), batches.c.removal == int(step), batches.c.finished_at < ended_before
        )
        found += connection.scalars(statement.limit(limit - len(found)))
        if len(found) == limit:
            break
    return found


def gone_workspaces(
    connection: Connection, ended_before: int, after: tuple[int, str] | None, limit: int
) -> list[GoneWorkspace]:
    has_batches = exists().where(batches.c.workspace_id == workspaces.c.id)
    statement = select(workspaces.c.id, workspaces.c.ended_at, has_batches).where(
        text(ENDED), workspaces.c.ended_at < ended_before
    )
    if after is not None:
        statement = statement.where(tuple_(workspaces.c.ended_at, workspaces.c.id) > after)
    found = connection.execute(statement.order_by(workspaces.c.ended_at, workspaces.c.id).limit(limit))
    return [GoneWorkspace(*row) for row in found]


# -- keys -------------------------------------------------------------------------------------------------------------


def ping(connection: Connection) -> None:
    connection.execute(_PING)


def secret(connection: Connection, name: str) -> bytes | None:
    value: bytes | None = connection.scalar(_SECRET, {"name": name})
    return value


def keys(connection: Connection) -> list[ApiKey]:
    return [rows.key(row) for row in connection.execute(_KEYS)]


def revoked_keys(connection: Connection, key_ids: Sequence[str]) -> list[str]:
    return list(connection.scalars(_REVOKED, {"ids": key_ids}))


def keys_page(connection: Connection, before: str | None, limit: int) -> Page[ApiKey]:
    found = _newest(connection, select(api_keys), api_keys.c.id, before, limit)
    return _page([rows.key(row) for row in found[:limit]], more=len(found) > limit)


# -- the audit log ----------------------------------------------------------------------------------------------------


def audit_page(
    connection: Connection, condition: AuditFilter, before: str | None, limit: int, examine: int
) -> Page[AuditEvent]:
    columns = audit_events.c
    indexed: list[list[ColumnElement[bool]]] = []
    if condition.target is not None:
        indexed.append([columns.target == condition.target])
    if condition.action is not None and condition.action is not AuditAction.BATCH_SUBMITTED:
        # The second says nothing new to a reader; it leads the database to the index that has these.
        indexed.append([columns.action == condition.action.value, literal_column(f"audit_events.{RARE_ACTION}")])
    if condition.actor is not None:
        indexed.append([columns.actor == condition.actor])
    if condition.action is AuditAction.BATCH_SUBMITTED:
        indexed.append([columns.action == condition.action.value])
    alone = len(indexed) == 1 and condition.action is AuditAction.BATCH_SUBMITTED
    narrow = indexed.pop(0) if indexed and not alone else []
    rest = [part for parts in indexed for part in parts]
    if condition.until is not None:
        narrow.append(columns.id < first_id("audit", condition.until + CLOCK_SLACK_MS))
        rest.append(columns.at <= condition.until)
    if condition.since is not None:
        narrow.append(columns.id >= first_id("audit", condition.since - CLOCK_SLACK_MS))
        rest.append(columns.at >= condition.since)
    if before is not None:
        narrow.append(columns.id < before)
    examined = select(columns.id).where(*narrow).order_by(columns.id.desc()).limit(examine)
    window = examined.subquery()
    found = connection.execute(
        select(audit_events)
        .join(window, window.c.id == columns.id)
        .where(*rest)
        .order_by(columns.id.desc())
        .limit(limit + 1)
    ).all()
    items = tuple(rows.audit_event(row) for row in found[:limit])
    if len(found) > limit:
        return Page(items, items[-1].id)
    return Page(items, connection.scalar(examined.limit(1).offset(examine - 1)))


# -- lists ------------------------------------------------------------------------------------------------------------


def _newest(
    connection: Connection, statement: Select[Any], key: Column[str], before: str | None, limit: int
) -> Sequence[Any]:
    if before is not None:
        statement = statement.where(key < before)
    return connection.execute(statement.order_by(key.desc()).limit(limit + 1)).all()


def _page(items: Sequence[_Listed], *, more: bool) -> Page[_Listed]:
    return Page(tuple(items), items[-1].id if more else None)
