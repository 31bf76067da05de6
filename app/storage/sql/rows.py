"""Values as rows and rows as values: the one place that knows how a field is kept in a column."""

import os
from collections.abc import Sequence
from functools import lru_cache
from typing import Any, Final, TypeAlias

from app.domain import json_codec
from app.domain.audit import AuditAction, AuditEvent
from app.domain.batch import Batch, BatchStatus, Summary
from app.domain.events import EventType, OutputRow, StoredEvent
from app.domain.idempotency import IdempotencyKey
from app.domain.tool_call import CallError, CallRecord, CallStatus
from app.domain.workspace import Workspace, WorkspaceOptions, WorkspaceStatus
from app.errors import ErrorCode
from app.storage.base import ApiKey
from app.storage.sql.schema import LARGE_ARGUMENTS_BYTES

RowValues: TypeAlias = "tuple[str | bytes | int | bool | None, ...]"
"""The columns of one row, in the order of its table in `app.storage.sql.schema`."""

_SIGN: Final = 1 << 63
COMMON_OPTIONS_BYTES: Final = 1024


def signed(number: int) -> int:
    """Return the signed 64-bit number with the bits of an unsigned one (devices and inodes use all 64)."""
    return number - (1 << 64) if number >= _SIGN else number


def unsigned(number: int) -> int:
    return number + (1 << 64) if number < 0 else number


def scoped_key(key: str, owner: str, workspace_id: str | None = None) -> str:
    """Return an idempotency key behind its scope: owner and workspace, or the owner alone.

    The first and the last part have no spaces, so no two scopes run into each other.
    """
    return f"{owner} {key}" if workspace_id is None else f"{workspace_id} {owner} {key}"


def workspace_row(workspace: Workspace, idempotency: IdempotencyKey | None = None) -> RowValues:
    return (
        workspace.id,
        workspace.owner,
        None if workspace.name is None else workspace.name.encode(),
        path_value(workspace.root),
        signed(workspace.root_device),
        signed(workspace.root_inode),
        workspace.root_uid,
        workspace.root_gid,
        workspace.managed,
        workspace.trusted,
        options_value(workspace.options),
        json_codec.dump(workspace.metadata),
        workspace.status.value,
        workspace.created_at,
        workspace.last_used_at,
        workspace.expires_at,
        None,
        None if idempotency is None else scoped_key(idempotency.value, workspace.owner),
        None if idempotency is None else idempotency.digest,
        workspace.node_id,
    )


def path_value(path: str) -> bytes:
    return os.fsencode(path)


def options_value(options: WorkspaceOptions) -> bytes:
    """Return what was set, so that a default that changes later changes for the workspaces that left it alone."""
    return json_codec.dump(options.model_dump(by_alias=True, mode="json", exclude_unset=True))


def workspace(row: Any) -> Workspace:
    """Return the workspace of a row, SQLAlchemy's or the driver's own, which keeps booleans as numbers."""
    return Workspace(
        id=row.id,
        owner=row.owner,
        name=None if row.name is None else row.name.decode(),
        root=os.fsdecode(row.root),
        root_device=unsigned(row.root_device),
        root_inode=unsigned(row.root_inode),
        root_uid=row.root_uid,
        root_gid=row.root_gid,
        managed=bool(row.managed),
        trusted=bool(row.trusted),
        options=_options(row.options),
        metadata=json_codec.parse(row.metadata),
        status=WorkspaceStatus(row.status),
        created_at=row.created_at,
        last_used_at=row.last_used_at,
        expires_at=row.expires_at,
        node_id=row.node_id,
    )


def _options(value: bytes) -> WorkspaceOptions:
    # Workspaces are read for every batch, and most have the same few options.
    return _common_options(value) if len(value) <= COMMON_OPTIONS_BYTES else _parsed_options(value)


def _parsed_options(value: bytes) -> WorkspaceOptions:
    return WorkspaceOptions.from_json(json_codec.parse(value))


_common_options: Final = lru_cache(maxsize=256)(_parsed_options)


def batch_row(batch: Batch, idempotency: IdempotencyKey | None = None, process_id: str | None = None) -> RowValues:
    summary = batch.summary
    return (
        batch.id,
        batch.workspace_id,
        batch.owner,
        batch.status.value,
        batch.execution_mode,
        batch.effective_mode,
        batch.on_error,
        batch.on_disconnect,
        batch.timeout_ms,
        batch.has_errors,
        batch.terminate,
        summary.total,
        summary.succeeded,
        summary.failed,
        summary.cancelled,
        summary.skipped,
        batch.request_id,
        batch.created_at,
        batch.started_at,
        batch.finished_at,
        batch.cancel_requested_at,
        batch.epoch,
        batch.last_seq,
        None,
        0,
        None if idempotency is None else scoped_key(idempotency.value, batch.owner, batch.workspace_id),
        None if idempotency is None else idempotency.digest,
        json_codec.dump(batch.metadata),
        process_id,
    )


def batch(row: Any, calls: Sequence[CallRecord] = ()) -> Batch:
    return Batch(
        id=row.id,
        workspace_id=row.workspace_id,
        owner=row.owner,
        status=BatchStatus(row.status),
        execution_mode=row.execution_mode,
        effective_mode=row.effective_mode,
        on_error=row.on_error,
        on_disconnect=row.on_disconnect,
        timeout_ms=row.timeout_ms,
        metadata=json_codec.parse(row.metadata),
        has_errors=row.has_errors,
        terminate=row.terminate,
        summary=Summary(row.total, row.succeeded, row.failed, row.cancelled, row.skipped),
        request_id=row.request_id,
        created_at=row.created_at,
        started_at=row.started_at,
        finished_at=row.finished_at,
        cancel_requested_at=row.cancel_requested_at,
        epoch=row.epoch,
        last_seq=row.last_seq,
        calls=tuple(calls),
    )


def call_row(call: CallRecord, owner: str) -> RowValues:
    error = call.error
    return (
        call.id,
        call.batch_id,
        call.workspace_id,
        owner,
        call.index,
        call.tool_call_id,
        call.tool_name.encode(),
        call.status.value,
        None if error is None else error.code.value,
        None if error is None else error.message.encode(),
        call.queued_at,
        call.started_at,
        call.finished_at,
        call.duration_ms,
        call.request_id,
        call.cancel_requested_at,
        None,
        None,
        call.hooks,
        None if has_large_arguments(call) else call.arguments,
        call.result,
    )


def has_large_arguments(call: CallRecord) -> bool:
    """Whether the arguments go to a row of `large_arguments`."""
    return len(call.arguments) > LARGE_ARGUMENTS_BYTES


def large_arguments_row(call: CallRecord) -> RowValues:
    return (call.id, call.arguments)


def call(row: Any, arguments: bytes | None, result: bytes | None) -> CallRecord:
    """Return the record of a row of `queries`, which measures the texts, with what was loaded of them."""
    return CallRecord(
        id=row.id,
        batch_id=row.batch_id,
        workspace_id=row.workspace_id,
        index=row.position,
        tool_call_id=row.tool_call_id,
        tool_name=row.tool_name.decode(),
        arguments=arguments or b"",
        status=CallStatus(row.status),
        result=result,
        error=None if row.error_code is None else CallError(ErrorCode(row.error_code), row.error_message.decode()),
        hooks=row.hooks,
        queued_at=row.queued_at,
        started_at=row.started_at,
        finished_at=row.finished_at,
        duration_ms=row.duration_ms,
        request_id=row.request_id,
        cancel_requested_at=row.cancel_requested_at,
        arguments_bytes=row.arguments_bytes,
        result_bytes=row.result_bytes,
    )


def event_row(event: StoredEvent) -> RowValues:
    return (event.batch_id, event.seq, event.type.value, event.call_id, event.at, event.data)


def event(row: Any, output: Sequence[OutputRow] = ()) -> StoredEvent:
    return StoredEvent(row.batch_id, row.seq, EventType(row.type), row.call_id, row.at, row.data, tuple(output))


def output_row(batch_id: str, output: OutputRow) -> RowValues:
    return (
        batch_id,
        output.seq,
        output.part,
        output.call_id,
        output.stream,
        output.stream_offset,
        output.combined_offset,
        output.data,
    )


def output(row: Any) -> OutputRow:
    return OutputRow(row.seq, row.part, row.call_id, row.stream, row.stream_offset, row.combined_offset, row.data)


def key_row(key: ApiKey) -> RowValues:
    return (
        key.id,
        key.name.encode(),
        key.owner,
        key.token_hash,
        json_codec.dump(list(key.scopes)),
        key.created_at,
        key.created_by,
        key.expires_at,
        key.revoked_at,
    )


def key(row: Any) -> ApiKey:
    return ApiKey(
        id=row.id,
        name=row.name.decode(),
        owner=row.owner,
        token_hash=row.token_hash,
        scopes=tuple(json_codec.parse(row.scopes)),
        created_at=row.created_at,
        created_by=row.created_by,
        expires_at=row.expires_at,
        revoked_at=row.revoked_at,
    )


def audit_row(event: AuditEvent) -> RowValues:
    return (
        event.id,
        event.at,
        event.action.value,
        event.actor,
        event.owner,
        event.target,
        event.request_id,
        json_codec.dump(event.details),
    )


def audit_event(row: Any) -> AuditEvent:
    return AuditEvent(
        id=row.id,
        at=row.at,
        action=AuditAction(row.action),
        actor=row.actor,
        owner=row.owner,
        target=row.target,
        request_id=row.request_id,
        details=json_codec.parse(row.details),
    )
