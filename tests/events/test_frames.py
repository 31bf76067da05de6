"""Events as bytes: valid SSE, valid JSON, bounded."""

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.domain.events import EventType, OutputRow, StoredEvent
from app.events.frames import (
    cut_incomplete_character,
    event_json,
    frame,
    merge_output,
    snapshot_frame,
    trim_json,
    valid_json,
)


def stored(seq: int = 2, event_type: EventType = EventType.TOOL_EXECUTION_UPDATE, **members: object) -> StoredEvent:
    data = event_json(event_type, seq, 1_700_000_000_123, "batch_1", members)
    return StoredEvent("batch_1", seq, event_type, "call_1", 1_700_000_000_123, data)


def parse(frame_bytes: bytes) -> tuple[dict[str, str], dict[str, object]]:
    assert frame_bytes.endswith(b"\n\n")
    assert frame_bytes.count(b"\n\n") == 1
    lines = frame_bytes.decode()[:-2].split("\n")
    fields = dict(line.split(": ", 1) for line in lines)
    return fields, orjson.loads(fields["data"])


def test_a_frame_carries_its_seq_its_type_and_one_line_of_json():
    fields, data = parse(frame(stored(7, EventType.BATCH_END, status="completed")))
    assert fields["id"] == "7"
    assert fields["event"] == "batch_end"
    assert "retry" not in fields
    assert data == {
        "type": "batch_end",
        "seq": 7,
        "at": "2023-11-14T22:13:20.123Z",
        "batchId": "batch_1",
        "status": "completed",
    }


def test_retry_rides_on_the_first_event_alone():
    assert parse(frame(stored(1, EventType.BATCH_START)))[0]["retry"] == "1000"


@pytest.mark.parametrize("text", ["a\r\nb", "a\rb", "line\u2028sep\u2029par", "\x1b[2K", "\0", "data: x\n\nevent: y"])
def test_no_text_can_break_the_framing(text):
    raw = frame(stored(3, text=text))
    fields, data = parse(raw)
    assert data["text"] == text
    assert set(fields) == {"id", "event", "data"}
    assert b"\r" not in raw
    assert "\u2028" not in raw.decode()


def test_the_text_of_a_delta_is_made_from_its_rows():
    rows = (
        OutputRow(2, 0, "call_1", "stdout", 10, 12, "水\n".encode()),
        OutputRow(2, 1, "call_1", "stderr", 2, 16, b"\xff!"),
    )
    event = merge_output([stored(2, kind="delta")], rows)[0]
    _, data = parse(frame(event))
    assert data["delta"] == [
        {"stream": "stdout", "offset": 10, "bytes": 4, "text": "水\n"},
        {"stream": "stderr", "offset": 2, "bytes": 2, "text": "�!"},
    ]


def test_a_snapshot_carries_the_text_so_far_instead_of_a_delta():
    _, data = parse(snapshot_frame(stored(2, kind="delta"), "so far", 6))
    assert (data["kind"], data["snapshot"]) == ("snapshot", {"text": "so far", "bytes": 6})


@given(st.text(), st.integers(0, 8))
def test_a_cut_never_splits_a_character_and_holds_back_at_most_three_bytes(text, drop):
    data = text.encode("utf-8", "surrogatepass" if text.isascii() else "ignore")
    data = data[: max(0, len(data) - drop)]
    head, rest = cut_incomplete_character(data)
    assert head + rest == data
    assert len(rest) <= 3
    head.decode()


@given(st.binary(max_size=64))
def test_any_bytes_are_cut_without_loss(data):
    head, rest = cut_incomplete_character(data)
    assert head + rest == data
    assert len(rest) <= 3


_json = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**53), 2**53) | st.text(max_size=3000),
    lambda inner: st.lists(inner, max_size=40) | st.dictionaries(st.text(max_size=20), inner, max_size=40),
    max_leaves=60,
)


@given(_json.map(valid_json).map(orjson.loads))
def test_trimmed_json_fits_and_small_json_is_left_as_it_is(value):
    size = len(orjson.dumps(value))
    trimmed = trim_json(value, 2000)
    assert len(orjson.dumps(trimmed)) <= 2000
    if size <= 250:
        assert trimmed == value


def test_a_trimmed_image_keeps_its_type_and_loses_its_data_whole():
    value = {"content": [{"type": "image", "data": "A" * 100_000, "mimeType": "image/png"}], "isError": False}
    assert trim_json(value, 50_000) == {
        "content": [{"type": "image", "data": "", "mimeType": "image/png"}],
        "isError": False,
    }


def test_a_lone_surrogate_of_a_tool_becomes_a_replacement_character():
    assert orjson.loads(valid_json({"a\ud800": ["\udfff", "\U0001f600"]})) == {"a�": ["�", "\U0001f600"]}
