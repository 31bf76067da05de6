"""`Storage` on SQLite and on Postgres."""

from collections.abc import Callable, Collection, Iterator, Sequence
from pathlib import Path
from typing import Any, Concatenate, Final, ParamSpec, TypeVar

import psycopg
from sqlalchemy import Connection
from sqlalchemy.exc import SQLAlchemyError

from app.domain.audit import AuditEvent
from app.domain.batch import Batch, BatchStatus
from app.domain.events import OutputStream, StoredEvent
from app.domain.node import Node, Process
from app.domain.retention import Removal
from app.domain.tool_call import CallRecord
from app.domain.workspace import Workspace, WorkspaceStatus
from app.storage.base import (
    ApiKey,
    AuditFilter,
    BatchEnd,
    BatchHead,
    CallFilter,
    GoneWorkspace,
    Made,
    OperationalError,
    OutputExtent,
    Page,
    Placement,
    StorageError,
    UnfinishedBatch,
    WaitingBatch,
    Wish,
    Write,
    WriteOutcome,
)
from app.storage.sql import membership, queries
from app.storage.sql.driver_errors import translate
from app.storage.sql.engine import driver_connection, open_database
from app.storage.sql.group import GroupWriter
from app.storage.sql.jobs import JobQueue
from app.storage.sql.migrate import upgrade

P = ParamSpec("P")
T = TypeVar("T")

FIRST_OUTPUT_ROWS: Final = 16


class SqlStorage:
    """The records in one database: a URL, or the path of an SQLite file.

    Args:
        jobs: wakes the processes of other nodes; None when batches for them are refused. On Postgres only.
        direct: the URL of the same database past a pooler of transactions, for changes of the schema; None when there
            is no such pooler.

    Raises:
        ConfigurationError: when the URL names neither SQLite nor Postgres.
    """

    def __init__(self, database: str | Path, *, jobs: JobQueue | None = None, direct: str | None = None) -> None:
        self._database = open_database(database, pooled=direct is not None)
        self._direct = self._database if direct is None else open_database(direct)
        self._groups = GroupWriter(self._database, jobs)
        self._jobs = jobs

    def migrate(self) -> None:
        try:
            upgrade(self._direct, self._jobs)
        except (SQLAlchemyError, psycopg.Error) as error:
            raise translate(error, self._database.file) from error

    def ping(self) -> None:
        self._read(queries.ping)

    def close(self) -> None:
        for database in {self._database, self._direct}:
            for engine in (database.reader, database.writer, database.pulse):
                engine.dispose()

    def tell_others(self, origin: str | None) -> None:
        self._groups.origin = origin

    def apply(self, group: Sequence[Write]) -> list[WriteOutcome]:
        if not group:
            return []
        try:
            connection = self._database.writer.connect()
        except Exception as error:
            raise translate(error, self._database.file) from error
        with connection:
            try:
                transaction = connection.begin()
                outcomes = self._groups.apply(connection, group)
            except Exception as error:
                raise self._failed(connection, error) from error
            try:
                transaction.commit()
            except Exception as error:
                raise self._failed(connection, error, committing=True) from error
        return outcomes

    def _failed(self, connection: Connection, error: Exception, *, committing: bool = False) -> StorageError:
        failure = translate(error, self._database.file)
        if isinstance(failure, OperationalError) and failure.reason == "connection":
            failure.in_doubt = committing
            connection.invalidate()
        return failure

    def workspace(self, workspace_id: str) -> Workspace | None:
        return self._read(queries.workspace, workspace_id)

    def workspaces(self, *, before: str | None, limit: int, owner: str | None = None) -> Page[Workspace]:
        return self._read(queries.workspaces_page, before, limit, owner)

    def workspaces_with_status(self, status: WorkspaceStatus, *, node_id: str | None = None) -> list[Workspace]:
        return self._read(queries.workspaces_with_status, status, node_id)

    def expired_workspaces(self, at: int, *, limit: int, node_id: str | None = None) -> list[Workspace]:
        return self._read(queries.expired_workspaces, at, limit, node_id)

    def batch(self, batch_id: str, *, calls: bool = True, inline: int | None = None) -> Batch | None:
        return self._read(queries.batch, batch_id, with_calls=calls, inline=inline)

    def made(self, idempotency_key: str, *, owner: str, workspace_id: str | None) -> Made | None:
        return self._read(queries.made, idempotency_key, owner, workspace_id)

    def batches(self, workspace_id: str, *, status: BatchStatus | None, before: str | None, limit: int) -> Page[Batch]:
        return self._read(queries.batches_page, workspace_id, status, before, limit)

    def batch_heads(self, workspace_id: str, *, also: Collection[str], after: str | None) -> list[BatchHead]:
        return self._read(queries.batch_heads, workspace_id, also, after)

    def unfinished_batches(self, workspace_id: str | None = None) -> list[UnfinishedBatch]:
        return self._read(membership.unfinished_batches, workspace_id)

    def unfinished_batch(self, batch_id: str) -> UnfinishedBatch | None:
        return self._read(membership.unfinished_batch, batch_id)

    def lost_batches(self, *, stale: bool) -> list[UnfinishedBatch]:
        return self._read(membership.lost_batches, stale)

    def held_batches(self, process_id: str) -> list[UnfinishedBatch]:
        return self._read(membership.held_batches, process_id)

    def waiting_batches(self, node_id: str, *, limit: int) -> list[WaitingBatch]:
        return self._read(membership.waiting_batches, node_id, limit)

    def wishes(self, process_id: str) -> list[Wish]:
        return self._read(membership.wishes, process_id)

    def interrupted_workspaces(self, node_id: str, *, since: int) -> list[Workspace]:
        return self._read(membership.interrupted_workspaces, node_id, since)

    def placement(self, workspace_id: str, *, most: int) -> Placement | None:
        return self._read(membership.placement, workspace_id, most)

    def join(self, process: Process, *, dead: Collection[str] = (), adopt_all: bool = False) -> None:
        self._write(membership.join, process, dead, adopt_all=adopt_all)

    def beat(self, process: Process) -> list[Process]:
        return self._write(membership.beat, process)

    def leave(self, process_id: str) -> None:
        self._write(membership.leave, process_id)

    def processes(self) -> list[Process]:
        return self._read(membership.known)

    def living(self) -> list[Process]:
        return self._read(membership.living)

    def nodes(self) -> list[Node]:
        return self._read(membership.known_nodes)

    def swept_at(self, node_id: str) -> int | None:
        return self._read(membership.swept_at, node_id)

    def swept(self, node_id: str, at: int) -> None:
        self._write(membership.swept, node_id, at)

    def tidy(self) -> None:
        """Remove the rows of processes that died and hold nothing, and their jobs."""
        self._write(membership.forget_dead)
        if self._jobs is not None:
            self._write(_forget_jobs)

    def call(self, call_id: str) -> CallRecord | None:
        return self._read(queries.call, call_id)

    def calls(
        self, condition: CallFilter, *, before: str | None, limit: int, examine: int = 2000, inline: int | None = None
    ) -> Page[CallRecord]:
        return self._read(queries.calls_page, condition, before, limit, examine, inline)

    def events(self, batch_id: str, *, after: int, limit: int = 256) -> list[StoredEvent]:
        return self._read(queries.events_page, batch_id, after, limit)

    def last_seq(self, batch_id: str) -> tuple[int, BatchStatus] | None:
        return self._read(queries.last_seq, batch_id)

    def output_extent(self, call_id: str, stream: OutputStream | None) -> OutputExtent | None:
        return self._read(queries.output_extent, call_id, stream)

    def output(self, call_id: str, stream: OutputStream | None, *, start: int, end: int) -> Iterator[bytes]:
        if start >= end:
            return
        position = self._read(queries.output_start, call_id, start)
        limit = FIRST_OUTPUT_ROWS
        while True:
            found = self._read(queries.output_rows, call_id, stream, position, limit)
            if not found:
                return
            yield from queries.slices(found, stream, start, end)
            last = found[-1]
            reached = (last.combined_offset if stream is None else last.stream_offset) + len(last.data)
            if reached >= end:
                return
            position = last.combined_offset + len(last.data)
            limit = queries.next_output_limit(limit, sum(len(row.data) for row in found))

    def batch_end(self, about: str) -> BatchEnd | None:
        return self._read(queries.batch_end, about)

    def secret(self, name: str) -> bytes | None:
        return self._read(queries.secret, name)

    def removable_batches(self, found_at: Sequence[Removal], *, ended_before: int, limit: int) -> list[str]:
        return self._read(queries.removable_batches, found_at, ended_before, limit)

    def gone_workspaces(self, *, ended_before: int, after: tuple[int, str] | None, limit: int) -> list[GoneWorkspace]:
        return self._read(queries.gone_workspaces, ended_before, after, limit)

    def audit_events(
        self, condition: AuditFilter, *, before: str | None, limit: int, examine: int = 2000
    ) -> Page[AuditEvent]:
        return self._read(queries.audit_page, condition, before, limit, examine)

    def keys(self) -> list[ApiKey]:
        return self._read(queries.keys)

    def revoked_keys(self, key_ids: Sequence[str]) -> list[str]:
        return self._read(queries.revoked_keys, key_ids)

    def keys_page(self, *, before: str | None, limit: int) -> Page[ApiKey]:
        return self._read(queries.keys_page, before, limit)

    def _write(self, change: Callable[Concatenate[Connection, P], T], *args: P.args, **kwargs: P.kwargs) -> T:
        try:
            with self._database.pulse.begin() as connection:
                return change(connection, *args, **kwargs)
        except (SQLAlchemyError, psycopg.Error) as error:
            raise translate(error, self._database.file) from error

    def _read(self, query: Callable[Concatenate[Connection, P], T], *args: P.args, **kwargs: P.kwargs) -> T:
        try:
            return self._read_once(query, *args, **kwargs)
        except OperationalError as error:
            if error.reason != "connection":
                raise
            # A pooled connection of a server that was restarted fails once; a new one may not.
            return self._read_once(query, *args, **kwargs)

    def _read_once(self, query: Callable[Concatenate[Connection, P], T], *args: Any, **kwargs: Any) -> T:
        try:
            # Committed: after a rollback the driver forgets what it has prepared, and each read would be planned anew.
            with self._database.reader.begin() as connection:
                return query(connection, *args, **kwargs)
        except (SQLAlchemyError, psycopg.Error) as error:
            raise translate(error, self._database.file) from error


def _forget_jobs(connection: Connection) -> None:
    JobQueue.forget_old(driver_connection(connection))
