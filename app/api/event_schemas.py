"""What events hold, in models: what `/openapi.json` says of the JSON behind `data:`. docs/events.md says it in words.

Events are not built from these models (`app.events.frames`). A test holds the two together.
"""

from typing import Annotated, Any, Literal

from pydantic import AwareDatetime, Field, RootModel

from app.api.schemas import CallErrorBody, ContentBlockBody, ResponseModel, ResultBody, SummaryBody
from app.domain.batch import BatchStatus
from app.domain.events import OutputStream
from app.domain.tool_call import CallStatus, ExecutionMode


class _Event(ResponseModel):
    seq: int
    at: Annotated[AwareDatetime, Field(description="RFC 3339, UTC, with milliseconds.")]
    batch_id: str


class _CallEvent(_Event):
    call_id: str
    tool_call_id: str
    tool_name: str


class CallNameBody(ResponseModel):
    call_id: str
    tool_call_id: str
    tool_name: str


class BatchStartEvent(_Event):
    """The batch was accepted and stored."""

    type: Literal["batch_start"]
    workspace_id: str
    execution_mode: ExecutionMode
    calls: list[CallNameBody]


class ToolExecutionStartEvent(_CallEvent):
    """A call was taken up."""

    type: Literal["tool_execution_start"]
    args: Any
    args_truncated: bool | None = None
    args_url: str | None = None


class OutputDeltaBody(ResponseModel):
    """Output of one stream; `offset` and `bytes` count its raw bytes."""

    stream: OutputStream
    offset: int
    bytes: int
    text: str


class PartialResultBody(ResponseModel):
    content: list[ContentBlockBody]
    details: dict[str, Any]


class SnapshotTextBody(ResponseModel):
    text: str
    bytes: int


class DeltaEvent(_CallEvent):
    """Output that only grows."""

    type: Literal["tool_execution_update"]
    kind: Literal["delta"]
    delta: list[OutputDeltaBody]


class PartialEvent(_CallEvent):
    """A result so far, which replaces the one before it."""

    type: Literal["tool_execution_update"]
    kind: Literal["partial"]
    partial_result: PartialResultBody


class SnapshotEvent(_CallEvent):
    """With `?updates=snapshot`: the last 16 KiB of the output so far."""

    type: Literal["tool_execution_update"]
    kind: Literal["snapshot"]
    snapshot: SnapshotTextBody


class OutputGapEvent(_CallEvent):
    """Output that a stream does not have: from `fromOffset` on, or with `retention` all that stood here."""

    type: Literal["output_gap"]
    stream: OutputStream | None
    from_offset: int | None
    reason: Literal["capture_limit", "retention"]


class ToolExecutionEndEvent(_CallEvent):
    """A call has its result."""

    type: Literal["tool_execution_end"]
    status: CallStatus
    result: ResultBody
    error: CallErrorBody | None
    duration_ms: int | None
    result_truncated: bool | None = None
    result_url: str | None = None


class BatchEndEvent(_Event):
    """All calls have ended; nothing follows."""

    type: Literal["batch_end"]
    status: BatchStatus
    summary: SummaryBody
    has_errors: bool
    terminate: bool


class ResyncEvent(ResponseModel):
    """Retention has removed updates here; their frame has no `id`."""

    type: Literal["resync"]
    batch_id: str
    first_missing: int
    last_missing: int


class EventDataBody(
    RootModel[
        BatchStartEvent
        | ToolExecutionStartEvent
        | DeltaEvent
        | PartialEvent
        | SnapshotEvent
        | OutputGapEvent
        | ToolExecutionEndEvent
        | BatchEndEvent
        | ResyncEvent
    ]
):
    """The JSON of an event. Clients must ignore types and members they do not know."""
