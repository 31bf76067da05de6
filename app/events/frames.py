"""Events as bytes: the JSON that is stored and the SSE frame made from it.

An event's JSON is stored once. The text of a delta is not in it: it is joined from the rows of `call_output` when the
frame is made, so replay and live streaming are the same bytes from the same rows.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Final

import orjson

from app.domain.clock import rfc3339
from app.domain.events import EventType, OutputRow, StoredEvent

RETRY_MS: Final = 1000
ARGUMENTS_MAX_BYTES: Final = 8 * 1024
FRAME_MAX_BYTES: Final = 256 * 1024
# What surrounds a result in its frame: ids (128 characters of toolCallId), names, times, the error's message.
RESULT_MAX_BYTES: Final = FRAME_MAX_BYTES - 16 * 1024
SNAPSHOT_BYTES: Final = 16 * 1024

# How the JSON of a delta ends as `BatchWriter` stores it; within a partial result the same is followed by more.
_DELTA_END: Final = b'"kind":"delta"}'
_LINE_SEPARATORS: Final = ((b"\xe2\x80\xa8", b"\\u2028"), (b"\xe2\x80\xa9", b"\\u2029"))


def event_json(event_type: EventType, seq: int, at: int, batch_id: str, members: Mapping[str, Any]) -> bytes:
    """Return the JSON object of an event; `members` may hold `orjson.Fragment`s of JSON made before."""
    return orjson.dumps({"type": event_type.value, "seq": seq, "at": rfc3339(at), "batchId": batch_id, **members})


def frame(event: StoredEvent) -> bytes:
    """Return the whole SSE frame of an event; a delta whose output retention has removed is an `output_gap`."""
    data = event.data
    if not event.output and data.endswith(_DELTA_END):
        return _removed_output_frame(event)
    if event.output:
        data = data[:-1] + b',"delta":' + orjson.dumps([_delta(row) for row in event.output]) + b"}"
    return sse_frame(event.type, event.seq, data)


def snapshot_frame(event: StoredEvent, text: str, total_bytes: int) -> bytes:
    """Return the frame of an update for a client that only paints: the text so far instead of what was added."""
    members = orjson.loads(event.data)
    members["kind"] = "snapshot"
    members["snapshot"] = {"text": text, "bytes": total_bytes}
    return sse_frame(event.type, event.seq, orjson.dumps(members))


def resync_frame(batch_id: str, first: int, last: int) -> bytes:
    """Return the frame that tells a follower of updates which retention has removed; it has no id."""
    members = {"type": EventType.RESYNC.value, "batchId": batch_id, "firstMissing": first, "lastMissing": last}
    return b"event: %b\ndata: %b\n\n" % (EventType.RESYNC.value.encode(), orjson.dumps(members))


def _removed_output_frame(event: StoredEvent) -> bytes:
    members = orjson.loads(event.data)
    del members["kind"]
    members |= {"type": EventType.OUTPUT_GAP.value, "stream": None, "fromOffset": None, "reason": "retention"}
    return sse_frame(EventType.OUTPUT_GAP, event.seq, orjson.dumps(members))


def sse_frame(event_type: EventType, seq: int, data: bytes) -> bytes:
    # orjson escapes CR and LF; U+2028 and U+2029 are line ends to some readers of JavaScript text.
    for raw, escaped in _LINE_SEPARATORS:
        if raw in data:
            data = data.replace(raw, escaped)
    retry = b"retry: %d\n" % RETRY_MS if seq == 1 else b""
    return b"id: %d\nevent: %b\n%bdata: %b\n\n" % (seq, event_type.value.encode(), retry, data)


def trim_json(value: Any, max_bytes: int) -> Any:
    """Return `value` cut so that its JSON takes at most `max_bytes`: long strings first, then long lists."""
    for characters, items in ((16_384, 1000), (4_096, 200), (1_024, 50), (256, 20), (64, 5)):
        cut = _cut(value, characters, items, depth=0)
        if len(orjson.dumps(cut)) <= max_bytes:
            return cut
    return None


def valid_json(value: Any) -> bytes:
    """Return the JSON of what a tool or hook made; a lone surrogate in it becomes U+FFFD."""
    try:
        return orjson.dumps(value)
    except orjson.JSONEncodeError:
        return orjson.dumps(_replace_surrogates(value), default=str)


def cut_incomplete_character(data: bytes) -> tuple[bytes, bytes]:
    """Split UTF-8 bytes before an incomplete last character: at most 3 bytes are held back."""
    for length in range(1, min(4, len(data) + 1)):
        byte = data[-length]
        if byte & 0xC0 != 0x80:
            needed = 4 if byte >= 0xF0 else 3 if byte >= 0xE0 else 2 if byte >= 0xC0 else 1
            if byte < 0xF8 and needed > length:
                return data[:-length], data[-length:]
            break
    return data, b""


def merge_output(events: Sequence[StoredEvent], output: Sequence[OutputRow]) -> list[StoredEvent]:
    """Return the events of one append with their output rows joined in."""
    if not output:
        return list(events)
    rows: dict[int, list[OutputRow]] = {}
    for row in output:
        rows.setdefault(row.seq, []).append(row)
    return [
        StoredEvent(
            batch_id=event.batch_id,
            seq=event.seq,
            type=event.type,
            call_id=event.call_id,
            at=event.at,
            data=event.data,
            output=tuple(rows[event.seq]),
        )
        if event.seq in rows
        else event
        for event in events
    ]


def _delta(row: OutputRow) -> dict[str, Any]:
    return {
        "stream": row.stream,
        "offset": row.stream_offset,
        "bytes": len(row.data),
        "text": row.data.decode("utf-8", "replace"),
    }


def _cut(value: Any, characters: int, items: int, depth: int) -> Any:
    if isinstance(value, str):
        return value if len(value) <= characters else value[:characters] + "…"
    if depth > 8 and isinstance(value, dict | list):
        return None
    if isinstance(value, list):
        return [_cut(item, characters, items, depth + 1) for item in value[:items]]
    if isinstance(value, dict):
        if value.get("type") in {"image", "blob"} and len(str(value.get("data", ""))) > characters:
            # Half of some base64 is no image: the whole is at `resultUrl`.
            value = {**value, "data": ""}
        return {key[:characters]: _cut(item, characters, items, depth + 1) for key, item in list(value.items())[:items]}
    return value


def _replace_surrogates(value: Any) -> Any:
    if isinstance(value, str):
        return value.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")
    if isinstance(value, dict):
        return {_replace_surrogates(str(key)): _replace_surrogates(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_replace_surrogates(item) for item in value]
    return value
