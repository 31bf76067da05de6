"""Values to store: workspaces, batches and what happens to them, small and valid."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from app.domain import json_codec
from app.domain.batch import Batch, BatchStatus, Summary
from app.domain.clock import now_ms
from app.domain.events import EventType, StoredEvent
from app.domain.ids import new_id
from app.domain.tool_call import CallError, CallRecord, CallStatus
from app.domain.workspace import Workspace, WorkspaceOptions, WorkspaceStatus
from app.errors import ErrorCode
from app.storage.base import Append, BatchChange, CallChange, SubmitBatch


def make_workspace(**fields: Any) -> Workspace:
    workspace_id = new_id("ws")
    workspace = Workspace(
        id=workspace_id,
        owner="owner",
        name=None,
        root=f"/srv/workspaces/{workspace_id}",
        root_device=2049,
        root_inode=77,
        root_uid=65_534,
        root_gid=65_534,
        managed=True,
        trusted=True,
        options=WorkspaceOptions(),
        metadata={},
        status=WorkspaceStatus.ACTIVE,
        created_at=now_ms(),
        last_used_at=now_ms(),
    )
    return replace(workspace, **fields)


def make_batch(workspace_id: str, calls: int = 1, **fields: Any) -> Batch:
    """Return a queued batch of `read` calls with event 1 counted in."""
    batch_id = new_id("batch")
    at = now_ms()
    call_fields = {name[5:]: fields.pop(name) for name in list(fields) if name.startswith("call_")}
    records = tuple(
        replace(
            CallRecord(
                id=new_id("call"),
                batch_id=batch_id,
                workspace_id=workspace_id,
                index=index,
                tool_call_id=f"read-{index}",
                tool_name="read",
                arguments=json_codec.dump({"path": f"src/module_{index}.py", "limit": 200}),
                status=CallStatus.QUEUED,
                result=None,
                error=None,
                hooks=None,
                queued_at=at,
                started_at=None,
                finished_at=None,
                duration_ms=None,
                request_id="req-1",
            ),
            **call_fields,
        )
        for index in range(calls)
    )
    batch = Batch(
        id=batch_id,
        workspace_id=workspace_id,
        owner="owner",
        status=BatchStatus.QUEUED,
        execution_mode="parallel",
        effective_mode=None,
        on_error="continue",
        on_disconnect="continue",
        timeout_ms=None,
        metadata={},
        has_errors=False,
        terminate=False,
        summary=Summary(total=calls),
        request_id="req-1",
        created_at=at,
        epoch=1,
        last_seq=1,
        calls=records,
    )
    return replace(batch, **fields)


def make_event(
    batch_id: str, seq: int, event_type: EventType = EventType.OUTPUT_GAP, call_id: str | None = None, data: Any = None
) -> StoredEvent:
    body = {"type": event_type.value, "seq": seq, "batchId": batch_id, **(data or {})}
    return StoredEvent(batch_id, seq, event_type, call_id, now_ms(), json_codec.dump(body))


def submit(batch: Batch) -> SubmitBatch:
    names = [{"id": call.id, "name": call.tool_name} for call in batch.calls]
    return SubmitBatch(batch, make_event(batch.id, 1, EventType.BATCH_START, data={"calls": names}))


def starts(batch: Batch, after_seq: int = 1) -> Append:
    """All calls of the batch are taken up."""
    at = now_ms()
    return Append(
        batch.id,
        batch.epoch,
        after_seq,
        [
            make_event(
                batch.id, after_seq + 1 + number, EventType.TOOL_EXECUTION_START, call.id, {"args": {"path": "x"}}
            )
            for number, call in enumerate(batch.calls)
        ],
        calls=[CallChange(call.id, CallStatus.RUNNING, started_at=at) for call in batch.calls],
        batch=BatchChange(BatchStatus.RUNNING, effective_mode=batch.execution_mode, started_at=at),
    )


def ends(batch: Batch, after_seq: int, result: bytes | None = None, *, failed: Sequence[int] = ()) -> Append:
    """All calls of the batch end, the `failed` ones in error, and so does the batch."""
    at = now_ms()
    stored = result or json_codec.dump(
        {
            "content": [{"type": "text", "text": "   1│ status: draft\n" * 10}],
            "details": {"bytes": 13},
            "isError": False,
        }
    )
    events = [
        make_event(batch.id, after_seq + 1 + number, EventType.TOOL_EXECUTION_END, call.id, {"durationMs": 3})
        for number, call in enumerate(batch.calls)
    ]
    events.append(make_event(batch.id, after_seq + 1 + len(events), EventType.BATCH_END))
    changes = [
        CallChange(
            call.id,
            CallStatus.FAILED if call.index in failed else CallStatus.SUCCEEDED,
            finished_at=at,
            duration_ms=3,
            result=stored,
            error=CallError(ErrorCode.NOT_FOUND, "there is no such file") if call.index in failed else None,
            hooks=b"[]",
        )
        for call in batch.calls
    ]
    return Append(
        batch.id,
        batch.epoch,
        after_seq,
        events,
        calls=changes,
        batch=BatchChange(
            BatchStatus.COMPLETED,
            finished_at=at,
            has_errors=bool(failed),
            terminate=False,
            summary=Summary(len(batch.calls), succeeded=len(batch.calls) - len(failed), failed=len(failed)),
        ),
    )
