"""Tool calls and tool results, paired by the call's id."""

from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Literal, TypedDict

import orjson

from app.errors import ErrorCode

ExecutionMode = Literal["parallel", "sequential"]


class TextContent(TypedDict):
    type: Literal["text"]
    text: str


class ImageContent(TypedDict):
    """`data` is base64."""

    type: Literal["image"]
    data: str
    mimeType: str


class BlobContent(TypedDict):
    """`data` is base64 of `bytes` bytes."""

    type: Literal["blob"]
    data: str
    mimeType: str
    bytes: int


ContentBlock = TextContent | ImageContent | BlobContent


def text_content(text: str) -> list[ContentBlock]:
    return [{"type": "text", "text": text}]


@dataclass(frozen=True, slots=True)
class ToolResult:
    """What a call answers. `details` is JSON and carries everything a program needs; `content` is for a model."""

    content: list[ContentBlock]
    details: dict[str, Any] = field(default_factory=dict)
    is_error: bool = False
    usage: dict[str, Any] | None = None
    terminate: bool = False

    def to_json(self) -> dict[str, Any]:
        """Return the wire form; `usage` and `terminate` only when set."""
        value: dict[str, Any] = {"content": self.content, "details": self.details, "isError": self.is_error}
        if self.usage is not None:
            value["usage"] = self.usage
        if self.terminate:
            value["terminate"] = True
        return value


class CallStatus(StrEnum):
    QUEUED = "queued"
    RUNNING = "running"
    SUCCEEDED = "succeeded"
    FAILED = "failed"
    CANCELLED = "cancelled"
    SKIPPED = "skipped"

    @property
    def terminal(self) -> bool:
        return self not in {CallStatus.QUEUED, CallStatus.RUNNING}


@dataclass(frozen=True, slots=True)
class CallError:
    code: ErrorCode
    message: str


@dataclass(frozen=True, slots=True)
class HookTrace:
    """What one hook did with one call."""

    name: str
    phase: Literal["before", "after"]
    action: Literal["none", "block", "rewrite", "patch", "failed"]
    reason: str | None
    duration_ms: int

    def to_json(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "phase": self.phase,
            "action": self.action,
            "reason": self.reason,
            "durationMs": self.duration_ms,
        }


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a call ended: the one terminal answer (`settle` once)."""

    status: CallStatus
    result: ToolResult
    error: CallError | None = None
    hooks: tuple[HookTrace, ...] = ()


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A call as it was accepted; `arguments` is the caller's own JSON, unchecked."""

    id: str
    index: int
    tool_call_id: str
    tool_name: str
    arguments: Any


@dataclass(frozen=True, slots=True)
class CallRecord:
    """A call and all that is known of it. Times are milliseconds since the epoch; `result` is the stored JSON text.

    `arguments_bytes` and `result_bytes` are the stored sizes, set by reads. A read with a budget may leave the texts
    themselves out: `arguments` is then empty and `result` None while the size is not 0.
    """

    id: str
    batch_id: str
    workspace_id: str
    index: int
    tool_call_id: str
    tool_name: str
    arguments: bytes
    status: CallStatus
    result: bytes | None
    error: CallError | None
    hooks: bytes | None
    queued_at: int
    started_at: int | None
    finished_at: int | None
    duration_ms: int | None
    request_id: str
    cancel_requested_at: int | None = None
    arguments_bytes: int = field(default=0, compare=False)
    result_bytes: int = field(default=0, compare=False)

    def to_call(self) -> ToolCall:
        """Return the call as it was accepted."""
        return ToolCall(self.id, self.index, self.tool_call_id, self.tool_name, orjson.loads(self.arguments))
