"""One batch's events on their way to the log: numbered, coalesced, flushed.

The writer of a batch is its owner alone (the fence of `storage.base.Append`), so numbers are given here, in memory, in
the order things happen; an event is sent to readers only after its transaction committed.
"""

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import orjson
import structlog

from app.domain.batch import Batch, BatchStatus, Summary
from app.domain.call_summary import path_of, summary_of
from app.domain.clock import now_ms
from app.domain.events import EventType, OutputRow, OutputStream, StoredEvent
from app.domain.tool_call import CallStatus, ExecutionMode, Outcome, ToolCall
from app.errors import Fenced
from app.events.frames import (
    ARGUMENTS_MAX_BYTES,
    RESULT_MAX_BYTES,
    cut_incomplete_character,
    event_json,
    trim_json,
    valid_json,
)
from app.events.recall import Recall
from app.storage.base import Append, BatchChange, CallChange, Refused, WriteOutcome
from app.storage.record_writer import RecordWriter
from app.tools.base import OutputDelta, PartialResult, ToolUpdate

STORED_RESULT_MAX_BYTES: Final = 8 * 1024 * 1024
# A call with this much output on its way to a commit is not read from until some of it has committed.
PENDING_MAX_BYTES: Final = 128 * 1024
UPDATE_BYTES: Final = 16 * 1024
# A control character takes six bytes of JSON, so 32 KiB of output always fit a frame.
UPDATE_MAX_BYTES: Final = 32 * 1024
UPDATE_SECONDS: Final = 0.1
UPDATE_MAX_SECONDS: Final = 2.0
PARTIAL_MAX_BYTES: Final = 16 * 1024
PARTIAL_SECONDS: Final = 1.0
PARTIALS_PER_CALL: Final = 64
# Events nobody waits for are held this long, so that a quick call's start and end share one commit.
LINGER_SECONDS: Final = 0.005

_log = structlog.get_logger(__name__)


@dataclass(slots=True)
class _CallState:
    """What the writer knows of one running call."""

    call: ToolCall
    started_at: int
    started: float
    capture_bytes: int
    pending: list[tuple[OutputStream, bytearray]] = field(default_factory=list)
    pending_bytes: int = 0
    uncommitted_bytes: int = 0
    carry: dict[OutputStream, bytes] = field(default_factory=dict)
    stream_offsets: dict[OutputStream, int] = field(default_factory=dict)
    combined_offset: int = 0
    captured: int = 0
    gaps: set[OutputStream] = field(default_factory=set)
    last_update: float | None = None
    partial: PartialResult | None = None
    partials: int = 0
    last_partial: float | None = None
    timer: asyncio.TimerHandle | None = None
    room: asyncio.Future[None] | None = None


class BatchWriter:
    """Numbers and stores the events of one batch that this process owns.

    Args:
        batch: the row as it was accepted or claimed; `epoch` and `last_seq` are the fence.
        records: the writer all batches share.
        capture_bytes: how many bytes of output of a tool are kept, by the tool's name.
        on_fenced: called once, on the loop, when another owner writes the batch now.
        on_gap: called when a stream of a call's output is stored no further.
    """

    def __init__(
        self,
        batch: Batch,
        records: RecordWriter,
        *,
        capture_bytes: Callable[[str], int],
        on_fenced: Callable[[], None],
        on_gap: Callable[[], None] = lambda: None,
    ) -> None:
        self._batch = batch
        self._records = records
        self._capture_bytes = capture_bytes
        self._on_fenced = on_fenced
        self._on_gap = on_gap
        self._recall = Recall(batch)
        self._seq = batch.last_seq
        self._started_at = batch.started_at
        self._calls: dict[str, _CallState] = {}
        self._events: list[StoredEvent] = []
        self._output: list[OutputRow] = []
        self._changes: list[CallChange] = []
        self._change: BatchChange | None = None
        self._linger: asyncio.TimerHandle | None = None
        self._last: asyncio.Future[WriteOutcome] | None = None
        self._failure: BaseException | None = None
        self._loop = asyncio.get_running_loop()

    # -- what the executor tells ----------------------------------------------------------------------------------

    def call_started(self, call: ToolCall, mode: ExecutionMode) -> None:
        """Record that a call was taken up, with its raw arguments."""
        at = now_ms()
        state = _CallState(call, at, self._loop.time(), self._capture_bytes(call.tool_name))
        self._calls[call.id] = state
        if self._started_at is None:
            self._started_at = at
            self._change = BatchChange(BatchStatus.RUNNING, effective_mode=mode, started_at=at)
        self._change_call(CallChange(call.id, CallStatus.RUNNING, started_at=at))
        self._add(EventType.TOOL_EXECUTION_START, at, call, _arguments(call))
        self._submit_soon()

    async def started_durably(self) -> None:
        """Return once every event so far is committed.

        Raises:
            Fenced: another owner writes this batch; nothing with effects may start.
        """
        self._submit()
        await self._committed()

    def call_updated(self, call: ToolCall, update: ToolUpdate) -> Awaitable[None] | None:
        """Record an update of a running call; ignored after its end. What is returned is the back pressure."""
        state = self._calls.get(call.id)
        if state is None or self._failure is not None:
            return None
        if isinstance(update, PartialResult):
            state.partial = update
            self._schedule(state)
            return None
        self._take(state, update)
        self._schedule(state)
        if state.pending_bytes + state.uncommitted_bytes <= PENDING_MAX_BYTES:
            return None
        if state.room is None or state.room.done():
            state.room = self._loop.create_future()
        self._flush_output(state, final=False)
        self._submit()
        return state.room

    def call_ended(self, call: ToolCall, outcome: Outcome) -> None:
        """Record the one terminal answer of a call, whether it was taken up or not."""
        at = now_ms()
        state = self._calls.pop(call.id, None)
        if state is not None:
            if state.timer is not None:
                state.timer.cancel()
            self._flush_output(state, final=True)
            self._flush_partial(state)
        duration = None if state is None else max(0, round((self._loop.time() - state.started) * 1000))
        result, shown, truncated = _result(outcome)
        members: dict[str, Any] = {
            "callId": call.id,
            "toolCallId": call.tool_call_id,
            "toolName": call.tool_name,
            "status": outcome.status.value,
            "result": orjson.Fragment(shown),
            "error": None
            if outcome.error is None
            else {"code": outcome.error.code.value, "message": outcome.error.message},
            "durationMs": duration,
        }
        if truncated:
            members |= {"resultTruncated": True, "resultUrl": f"/v1/calls/{call.id}"}
        self._change_call(
            CallChange(
                call.id,
                outcome.status,
                finished_at=at,
                duration_ms=duration,
                result=result,
                error=outcome.error,
                hooks=orjson.dumps([trace.to_json() for trace in outcome.hooks]) if outcome.hooks else None,
                path=path_of(call, outcome.result),
                summary=summary_of(call, outcome.result),
            )
        )
        self._append(EventType.TOOL_EXECUTION_END, at, call.id, members)
        self._submit_soon()

    async def batch_ended(
        self, status: BatchStatus, summary: Summary, mode: ExecutionMode, *, has_errors: bool, terminate: bool
    ) -> None:
        """Record the end of the batch and return once it is committed.

        Raises:
            Fenced: another owner wrote the batch meanwhile.
        """
        at = now_ms()
        self._change = BatchChange(
            status,
            effective_mode=mode,
            started_at=self._started_at,
            finished_at=at,
            has_errors=has_errors,
            terminate=terminate,
            summary=summary,
        )
        members = {
            "status": status.value,
            "summary": summary.to_json(),
            "hasErrors": has_errors,
            "terminate": terminate,
        }
        self._append(EventType.BATCH_END, at, None, members)
        self._recall.end(self._change, self._seq)
        self._submit()
        await self._committed()

    @property
    def ended_batch(self) -> Batch | None:
        """The batch as its rows say after its end, with its calls; None when it is too large to be kept in memory.

        Requests to cancel are written by others and not in it.
        """
        return self._recall.batch

    @property
    def failure(self) -> BaseException | None:
        """Why nothing more of this batch can be stored; None while it can."""
        return self._failure

    # -- output -----------------------------------------------------------------------------------------------------

    def _take(self, state: _CallState, delta: OutputDelta) -> None:
        data = delta.data
        room = state.capture_bytes - state.captured
        if len(data) > room:
            self._start_gap(state, delta.stream, data[:room])
            return
        state.captured += len(data)
        self._pend(state, delta.stream, data)

    def _start_gap(self, state: _CallState, stream: OutputStream, kept: bytes) -> None:
        # What does not fit is drained and counted by the tool and never stored; the event says from where on.
        if kept:
            state.captured += len(kept)
            self._pend(state, stream, kept)
        if stream in state.gaps:
            return
        state.gaps.add(stream)
        self._flush_output(state, final=True)
        members = {
            "callId": state.call.id,
            "toolCallId": state.call.tool_call_id,
            "toolName": state.call.tool_name,
            "stream": stream,
            "fromOffset": state.stream_offsets.get(stream, 0),
            "reason": "capture_limit",
        }
        self._append(EventType.OUTPUT_GAP, now_ms(), state.call.id, members)
        self._on_gap()
        self._submit_soon()

    @staticmethod
    def _pend(state: _CallState, stream: OutputStream, data: bytes) -> None:
        if state.pending and state.pending[-1][0] == stream:
            state.pending[-1][1].extend(data)
        else:
            state.pending.append((stream, bytearray(data)))
        state.pending_bytes += len(data)

    def _schedule(self, state: _CallState) -> None:
        now = self._loop.time()
        due: list[float] = []
        if state.pending:
            if state.last_update is None or state.pending_bytes >= UPDATE_BYTES:
                due.append(now)
            else:
                elapsed = now - state.started
                due.append(state.last_update + min(UPDATE_MAX_SECONDS, max(UPDATE_SECONDS, elapsed / 600)))
        if state.partial is not None and state.partials < PARTIALS_PER_CALL:
            due.append(now if state.last_partial is None else state.last_partial + PARTIAL_SECONDS)
        if not due:
            return
        if min(due) <= now:
            self._flush_due(state)
        elif state.timer is None:
            state.timer = self._loop.call_at(min(due), self._timer_fired, state)

    def _timer_fired(self, state: _CallState) -> None:
        state.timer = None
        if state.call.id in self._calls:
            self._flush_due(state)
            self._schedule(state)

    def _flush_due(self, state: _CallState) -> None:
        if state.timer is not None:
            state.timer.cancel()
            state.timer = None
        self._flush_output(state, final=False)
        now = self._loop.time()
        if state.last_partial is None or now >= state.last_partial + PARTIAL_SECONDS:
            self._flush_partial(state)
        self._submit()

    def _flush_output(self, state: _CallState, *, final: bool) -> None:
        pieces: list[tuple[OutputStream, bytes]] = []
        for stream, segment in state.pending:
            data = state.carry.pop(stream, b"") + bytes(segment)
            data, rest = cut_incomplete_character(data)
            if rest:
                state.carry[stream] = rest
            if data:
                pieces.append((stream, data))
        if final:
            pieces += state.carry.items()
            state.carry = {}
        state.pending, state.pending_bytes = [], sum(len(rest) for rest in state.carry.values())
        if not pieces:
            return
        state.last_update = self._loop.time()
        part: list[tuple[OutputStream, bytes]] = []
        size = 0
        for stream, data in pieces:
            rest = data
            while rest:
                room = UPDATE_MAX_BYTES - size
                head, tail = rest[:room], rest[room:]
                if tail:
                    head, held = cut_incomplete_character(head)
                    tail = held + tail
                if head:
                    part.append((stream, head))
                    size += len(head)
                if tail or size >= UPDATE_MAX_BYTES:
                    self._add_update(state, part)
                    part, size = [], 0
                rest = tail
        if part:
            self._add_update(state, part)

    def _add_update(self, state: _CallState, pieces: Sequence[tuple[OutputStream, bytes]]) -> None:
        if not pieces:
            return
        seq = self._seq + 1
        for number, (stream, data) in enumerate(pieces):
            offset = state.stream_offsets.get(stream, 0)
            self._output.append(OutputRow(seq, number, state.call.id, stream, offset, state.combined_offset, data))
            state.stream_offsets[stream] = offset + len(data)
            state.combined_offset += len(data)
            state.uncommitted_bytes += len(data)
        self._add(EventType.TOOL_EXECUTION_UPDATE, now_ms(), state.call, {"kind": "delta"})
        self._submit_soon()

    def _flush_partial(self, state: _CallState) -> None:
        partial, state.partial = state.partial, None
        if partial is None or state.partials >= PARTIALS_PER_CALL:
            return
        state.partials += 1
        state.last_partial = self._loop.time()
        value: Any = {"content": partial.content, "details": partial.details}
        encoded = valid_json(value)
        if len(encoded) > PARTIAL_MAX_BYTES:
            encoded = valid_json(trim_json(orjson.loads(encoded), PARTIAL_MAX_BYTES))
        self._add(
            EventType.TOOL_EXECUTION_UPDATE,
            now_ms(),
            state.call,
            {"kind": "partial", "partialResult": orjson.Fragment(encoded)},
        )
        self._submit_soon()

    # -- numbering and submitting -----------------------------------------------------------------------------------

    def _add(self, event_type: EventType, at: int, call: ToolCall, members: Mapping[str, Any]) -> None:
        named = {"callId": call.id, "toolCallId": call.tool_call_id, "toolName": call.tool_name, **members}
        self._append(event_type, at, call.id, named)

    def _change_call(self, change: CallChange) -> None:
        self._changes.append(change)
        self._recall.change_call(change)

    def _append(self, event_type: EventType, at: int, call_id: str | None, members: Mapping[str, Any]) -> None:
        self._seq += 1
        data = event_json(event_type, self._seq, at, self._batch.id, members)
        self._events.append(StoredEvent(self._batch.id, self._seq, event_type, call_id, at, data))

    def _submit_soon(self) -> None:
        if self._linger is None:
            self._linger = self._loop.call_later(LINGER_SECONDS, self._submit)

    def _submit(self) -> None:
        if self._linger is not None:
            self._linger.cancel()
            self._linger = None
        if not self._events:
            return
        append = Append(
            batch_id=self._batch.id,
            epoch=self._batch.epoch,
            after_seq=self._events[0].seq - 1,
            events=self._events,
            output=self._output,
            calls=self._changes,
            batch=self._change,
        )
        self._events, self._output, self._changes, self._change = [], [], [], None
        if self._failure is not None:
            return
        waiting = [(row.call_id, len(row.data)) for row in append.output]
        self._last = self._records.submit(append)
        self._last.add_done_callback(lambda done: self._settled(done, waiting))

    def _settled(self, done: asyncio.Future[WriteOutcome], waiting: Sequence[tuple[str, int]]) -> None:
        failure: BaseException | None
        if done.cancelled():
            failure = asyncio.CancelledError()
        else:
            failure = done.exception()
            if failure is None and isinstance(done.result(), Refused):
                failure = Fenced(f"batch {self._batch.id} has another owner")
        if failure is not None and self._failure is None:
            self._failure = failure
            _log.warning("batch_not_stored", batch_id=self._batch.id, reason=str(failure) or type(failure).__name__)
            self._on_fenced()
        for call_id, size in waiting:
            state = self._calls.get(call_id)
            if state is None:
                continue
            state.uncommitted_bytes -= size
            self._release(state)
        if failure is not None:
            for state in self._calls.values():
                self._release(state, force=True)

    @staticmethod
    def _release(state: _CallState, *, force: bool = False) -> None:
        enough = state.pending_bytes + state.uncommitted_bytes <= PENDING_MAX_BYTES // 2
        if state.room is not None and not state.room.done() and (enough or force):
            state.room.set_result(None)

    async def _committed(self) -> None:
        if self._last is not None and not self._last.done():
            # Shielded: a caller that goes away must not take back a write that others count on.
            await asyncio.wait([self._last])
        if self._failure is not None:
            raise Fenced(f"batch {self._batch.id}: {self._failure}")


def _arguments(call: ToolCall) -> dict[str, Any]:
    encoded = valid_json(call.arguments)
    if len(encoded) <= ARGUMENTS_MAX_BYTES:
        return {"args": orjson.Fragment(encoded)}
    return {
        "args": trim_json(call.arguments, ARGUMENTS_MAX_BYTES),
        "argsTruncated": True,
        "argsUrl": f"/v1/calls/{call.id}",
    }


def _result(outcome: Outcome) -> tuple[bytes, bytes, bool]:
    """Return the JSON to store, the JSON to show in the event, and whether that was trimmed."""
    value = outcome.result.to_json()
    stored = valid_json(value)
    if len(stored) > STORED_RESULT_MAX_BYTES:
        notice = f"[The result of {len(stored)} bytes was cut: at most {STORED_RESULT_MAX_BYTES} bytes are stored.]"
        value = trim_json(orjson.loads(stored), STORED_RESULT_MAX_BYTES - 1024) or {"details": {}, "content": []}
        value["content"] = [*value["content"], {"type": "text", "text": notice}]
        value["isError"] = outcome.result.is_error
        stored = valid_json(value)
    if len(stored) <= RESULT_MAX_BYTES:
        return stored, stored, False
    return stored, valid_json(trim_json(orjson.loads(stored), RESULT_MAX_BYTES)), True
