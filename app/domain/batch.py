"""A batch: ordered tool calls, submitted once and executed once."""

from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Literal

from app.domain.tool_call import CallRecord, ExecutionMode

OnError = Literal["continue", "stop"]
OnDisconnect = Literal["continue", "cancel"]


class BatchStatus(StrEnum):
    QUEUED = "queued"
    RUNNING = "running"
    COMPLETED = "completed"
    CANCELLED = "cancelled"
    INTERRUPTED = "interrupted"

    @property
    def terminal(self) -> bool:
        return self not in {BatchStatus.QUEUED, BatchStatus.RUNNING}


@dataclass(frozen=True, slots=True)
class Summary:
    total: int
    succeeded: int = 0
    failed: int = 0
    cancelled: int = 0
    skipped: int = 0

    def to_json(self) -> dict[str, int]:
        return {
            "total": self.total,
            "succeeded": self.succeeded,
            "failed": self.failed,
            "cancelled": self.cancelled,
            "skipped": self.skipped,
        }


@dataclass(frozen=True, slots=True)
class Batch:
    """A batch's row. `epoch` and `last_seq` are the fence: only a compare-and-set on both writes a batch.

    `metadata` is the caller's JSON object; times are milliseconds since the epoch. `calls` is in request order and
    empty when they were not asked for.
    """

    id: str
    workspace_id: str
    owner: str
    status: BatchStatus
    execution_mode: ExecutionMode
    effective_mode: ExecutionMode | None
    on_error: OnError
    on_disconnect: OnDisconnect
    timeout_ms: int | None
    metadata: dict[str, Any]
    has_errors: bool
    terminate: bool
    summary: Summary
    request_id: str
    created_at: int
    started_at: int | None = None
    finished_at: int | None = None
    cancel_requested_at: int | None = None
    epoch: int = 1
    last_seq: int = 0
    calls: tuple[CallRecord, ...] = field(default=())
