"""Events: the numbered facts of a batch, as they are stored and as they are framed."""

from dataclasses import dataclass
from enum import StrEnum
from typing import Literal

OutputStream = Literal["stdout", "stderr", "text"]


class EventType(StrEnum):
    BATCH_START = "batch_start"
    TOOL_EXECUTION_START = "tool_execution_start"
    TOOL_EXECUTION_UPDATE = "tool_execution_update"
    TOOL_EXECUTION_END = "tool_execution_end"
    OUTPUT_GAP = "output_gap"
    BATCH_END = "batch_end"
    RESYNC = "resync"
    """Never stored: a stream tells its follower of events that retention has removed."""


@dataclass(frozen=True, slots=True)
class StoredEvent:
    """A row `(batch_id, seq)`.

    `data` is the JSON object of the event without the text of a delta: that text is made from `output`, the rows of
    `call_output` with the same `(batch_id, seq)`, so that each byte of output is stored once.
    """

    batch_id: str
    seq: int
    type: EventType
    call_id: str | None
    at: int
    data: bytes
    output: tuple["OutputRow", ...] = ()


@dataclass(frozen=True, slots=True)
class OutputRow:
    """Bytes of a call's output, cut at character boundaries.

    `stream_offset` counts the raw bytes of its stream before it, `combined_offset` those of all streams of the call.
    `part` numbers the rows of one event.
    """

    seq: int
    part: int
    call_id: str
    stream: OutputStream
    stream_offset: int
    combined_offset: int
    data: bytes
