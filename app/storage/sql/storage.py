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
    StorageError,
    UnfinishedBatch,
    Write,
    WriteOutcome,
)
from app.storage.sql import queries
from app.storage.sql.driver_errors import translate
from app.storage.sql.engine import open_database
from app.storage.sql.group import GroupWriter
from app.storage.sql.migrate import upgrade

P = ParamSpec("P")
T = TypeVar("T")

FIRST_OUTPUT_ROWS: Final = 16


class SqlStorage:
    """The records in one database: a URL, or the path of an SQLite file.

    Raises:
        ConfigurationError: when the URL names neither SQLite nor Postgres.
    """

    def __init__(self, database: str | Path) -> None:
        self._database = open_database(database)
        self._groups = GroupWriter(self._database)

    def migrate(self) -> None:
        try:
            upgrade(self._database)
        except (SQLAlchemyError, psycopg.Error) as error:
            raise translate(error, self._database.file) from error

    def ping(self) -> None:
        self._read(queries.ping)

    def close(self) -> None:
        self._database.reader.dispose()
        self._database.writer.dispose()

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

    def workspaces_with_status(self, status: WorkspaceStatus) -> list[Workspace]:
        return self._read(queries.workspaces_with_status, status)

    def expired_workspaces(self, at: int, *, limit: int) -> list[Workspace]:
        return self._read(queries.expired_workspaces, at, limit)

    def batch(self, batch_id: str, *, calls: bool = True, inline: int | None = None) -> Batch | None:
        return self._read(queries.batch, batch_id, with_calls=calls, inline=inline)

    def made(self, idempotency_key: str, *, owner: str, workspace_id: str | None) -> Made | None:
        return self._read(queries.made, idempotency_key, owner, workspace_id)

    def batches(self, workspace_id: str, *, status: BatchStatus | None, before: str | None, limit: int) -> Page[Batch]:
        return self._read(queries.batches_page, workspace_id, status, before, limit)

    def batch_heads(self, workspace_id: str, *, also: Collection[str], after: str | None) -> list[BatchHead]:
        return self._read(queries.batch_heads, workspace_id, also, after)

    def unfinished_batches(self, workspace_id: str | None = None) -> list[UnfinishedBatch]:
        return self._read(queries.unfinished_batches, workspace_id)

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
            with self._database.reader.connect() as connection:
                return query(connection, *args, **kwargs)
        except (SQLAlchemyError, psycopg.Error) as error:
            raise translate(error, self._database.file) from error
