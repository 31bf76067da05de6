"""One batch's events on their way to the log: numbered, coalesced, bounded, stored."""

import asyncio
from typing import Any

import orjson
import pytest

from app.domain.batch import Batch, BatchStatus, Summary
from app.domain.events import EventType
from app.domain.tool_call import CallError, CallStatus, Outcome, ToolResult, text_content
from app.errors import ErrorCode, Fenced
from app.events.batch_writer import PENDING_MAX_BYTES, STORED_RESULT_MAX_BYTES, BatchWriter
from app.events.frames import FRAME_MAX_BYTES, frame
from app.storage.base import ClaimBatch
from app.tools.base import OutputDelta, PartialResult
from tests.support.calls import answer
from tests.support.eventing import Records, recording

pytestmark = pytest.mark.anyio

DONE = Outcome(CallStatus.SUCCEEDED, answer("done"))


def writing(records: Records, made: Batch, capture: int = 10_000_000) -> tuple[BatchWriter, list[str]]:
    fenced: list[str] = []
    return (
        BatchWriter(made, records.writer, capture_bytes=lambda _tool: capture, on_fenced=lambda: fenced.append("x")),
        fenced,
    )


async def finish(writer: BatchWriter, total: int = 1) -> None:
    async with asyncio.timeout(60):
        await writer.batch_ended(
            BatchStatus.COMPLETED, Summary(total, succeeded=total), "parallel", has_errors=False, terminate=False
        )


def stored(records: Records, batch_id: str) -> list[tuple[int, str, dict[str, Any]]]:
    events = []
    after = 0
    while page := records.storage.events(batch_id, after=after):
        after = page[-1].seq
        for event in page:
            raw = frame(event)
            assert len(raw) <= FRAME_MAX_BYTES
            events.append((event.seq, event.type.value, orjson.loads(raw.split(b"data: ", 1)[1])))
    return events


def output(records: Records, call_id: str, stream: Any = None) -> bytes:
    extent = records.storage.output_extent(call_id, stream)
    return b"".join(records.storage.output(call_id, stream, start=0, end=extent.bytes))


async def test_a_call_is_told_as_start_updates_end_and_the_row_says_the_same(storage):
    async with recording(storage) as records:
        made = await records.accept(await records.workspace(), [("bash", {"command": "x"})])
        call = made.calls[0].to_call()
        writer, _ = writing(records, made)
        writer.call_started(call, "sequential")
        writer.call_updated(call, OutputDelta("stdout", b"one\n"))
        writer.call_updated(call, PartialResult(text_content("careful"), {"warnings": ["w"]}))
        writer.call_updated(call, OutputDelta("stderr", b"two\n"))
        writer.call_ended(call, DONE)
        await finish(writer)

        events = stored(records, made.id)
        assert [seq for seq, _, _ in events] == list(range(1, len(events) + 1))
        kinds = [(name, data.get("kind")) for _, name, data in events]
        assert kinds == [
            ("batch_start", None),
            ("tool_execution_start", None),
            ("tool_execution_update", "delta"),
            ("tool_execution_update", "partial"),
            ("tool_execution_update", "delta"),
            ("tool_execution_end", None),
            ("batch_end", None),
        ]
        assert events[2][2]["delta"] == [{"stream": "stdout", "offset": 0, "bytes": 4, "text": "one\n"}]
        assert events[3][2]["partialResult"] == {"content": text_content("careful"), "details": {"warnings": ["w"]}}
        assert events[1][2]["args"] == {"command": "x"}
        kept = records.storage.batch(made.id)
        assert kept is not None
        assert (kept.status, kept.last_seq, kept.effective_mode) == (BatchStatus.COMPLETED, 7, "parallel")
        assert kept.calls[0].status is CallStatus.SUCCEEDED
        assert kept.calls[0].result is not None
        assert orjson.loads(kept.calls[0].result) == DONE.result.to_json() == events[5][2]["result"]
        assert output(records, call.id) == b"one\ntwo\n"
        assert output(records, call.id, "stderr") == b"two\n"


async def test_much_output_becomes_few_updates_and_every_byte_is_kept(storage):
    async with recording(storage) as records:
        made = await records.accept(await records.workspace(), [("bash", {})])
        call = made.calls[0].to_call()
        writer, _ = writing(records, made)
        writer.call_started(call, "sequential")
        data = b"".join(b"%07d\n" % number for number in range(50_000))
        for start in range(0, len(data), 777):
            waiting = writer.call_updated(call, OutputDelta("stdout", data[start : start + 777]))
            if waiting is not None:
                await waiting
        writer.call_ended(call, DONE)
        await finish(writer)
        assert output(records, call.id) == data
        updates = [event for event in stored(records, made.id) if event[1] == "tool_execution_update"]
        assert len(updates) < len(data) / 16_000 + 10
        assert "".join(part["text"] for _, _, event in updates for part in event["delta"]) == data.decode()


async def test_a_character_split_between_reads_and_between_streams_stays_whole(storage):
    async with recording(storage) as records:
        made = await records.accept(await records.workspace(), [("bash", {})])
        call = made.calls[0].to_call()
        writer, _ = writing(records, made)
        writer.call_started(call, "sequential")
        for piece in ("水".encode()[:1], "水".encode()[1:2], "水".encode()[2:]):
            writer.call_updated(call, OutputDelta("stdout", piece))
            writer.call_updated(call, OutputDelta("stderr", b"note!\n"))
        writer.call_updated(call, OutputDelta("stdout", b"\xe6"))
        writer.call_ended(call, DONE)
        await finish(writer)
        parts = [part for _, _, event in stored(records, made.id) for part in event.get("delta", [])]
        assert "".join(part["text"] for part in parts if part["stream"] == "stdout") == "水�"
        assert output(records, call.id, "stdout") == "水".encode() + b"\xe6"
        offsets = [(part["stream"], part["offset"], part["bytes"]) for part in parts]
        for stream in ("stdout", "stderr"):
            position = 0
            for name, offset, size in offsets:
                if name == stream:
                    assert offset == position
                    position += size


async def test_control_characters_never_make_a_frame_too_large(storage):
    async with recording(storage) as records:
        made = await records.accept(await records.workspace(), [("bash", {})])
        call = made.calls[0].to_call()
        writer, _ = writing(records, made)
        writer.call_started(call, "sequential")
        writer.call_updated(call, OutputDelta("stdout", b"\0" * 200_000))
        writer.call_ended(call, DONE)
        await finish(writer)
        stored(records, made.id)  # checks each frame
        assert output(records, call.id) == b"\0" * 200_000


async def test_output_beyond_what_is_kept_is_told_once_per_stream(storage):
    async with recording(storage) as records:
        made = await records.accept(await records.workspace(), [("bash", {})])
        call = made.calls[0].to_call()
        writer, _ = writing(records, made, capture=10)
        writer.call_started(call, "sequential")
        writer.call_updated(call, OutputDelta("stdout", b"12345678"))
        for _ in range(3):
            writer.call_updated(call, OutputDelta("stdout", b"abcd"))
            writer.call_updated(call, OutputDelta("stderr", b"e"))
        writer.call_ended(call, DONE)
        await finish(writer)
        gaps = [event for _, name, event in stored(records, made.id) if name == "output_gap"]
        assert [(gap["stream"], gap["fromOffset"]) for gap in gaps] == [("stdout", 10), ("stderr", 0)]
        assert output(records, call.id) == b"12345678ab"


async def test_a_call_with_too_much_uncommitted_output_has_to_wait(storage):
    async with recording(storage) as records:
        made = await records.accept(await records.workspace(), [("bash", {})])
        call = made.calls[0].to_call()
        writer, _ = writing(records, made)
        writer.call_started(call, "sequential")
        assert writer.call_updated(call, OutputDelta("stdout", b"x" * 1000)) is None
        waiting = writer.call_updated(call, OutputDelta("stdout", b"x" * PENDING_MAX_BYTES))
        assert waiting is not None
        async with asyncio.timeout(60):
            await waiting
        assert records.storage.output_extent(call.id, None).bytes >= PENDING_MAX_BYTES // 2
        writer.call_ended(call, DONE)
        await finish(writer)


async def test_partial_results_are_bounded_in_size_rate_and_number(storage):
    async with recording(storage) as records:
        made = await records.accept(await records.workspace(), [("bash", {})])
        call = made.calls[0].to_call()
        writer, _ = writing(records, made)
        writer.call_started(call, "sequential")
        for number in range(500):
            writer.call_updated(call, PartialResult(text_content("y" * 100_000), {"number": number}))
        writer.call_ended(call, DONE)
        await finish(writer)
        partials = [event for _, _, event in stored(records, made.id) if event.get("kind") == "partial"]
        assert [event["partialResult"]["details"]["number"] for event in partials] == [0, 499]
        assert all(len(orjson.dumps(event["partialResult"])) <= 16 * 1024 for event in partials)


async def test_large_arguments_and_results_are_trimmed_in_events_and_whole_in_the_record(storage):
    async with recording(storage) as records:
        made = await records.accept(await records.workspace(), [("write", {"path": "a", "content": "z" * 100_000})])
        call = made.calls[0].to_call()
        writer, _ = writing(records, made)
        writer.call_started(call, "sequential")
        writer.call_ended(call, Outcome(CallStatus.SUCCEEDED, answer("r" * 1_000_000, details={"bytes": 1_000_000})))
        await finish(writer)
        _, (_, _, start), (_, _, end), _ = stored(records, made.id)
        assert start["argsTruncated"] is True
        assert start["argsUrl"] == end["resultUrl"] == f"/v1/calls/{call.id}"
        assert len(orjson.dumps(start["args"])) <= 8 * 1024
        assert end["resultTruncated"] is True
        assert end["result"]["details"] == {"bytes": 1_000_000}
        kept = records.storage.call(call.id)
        assert kept is not None
        assert kept.result is not None
        assert len(orjson.loads(kept.result)["content"][0]["text"]) == 1_000_000


async def test_a_result_over_the_stored_limit_is_cut_and_says_so(storage):
    async with recording(storage) as records:
        made = await records.accept(await records.workspace(), [("any", {})])
        call = made.calls[0].to_call()
        writer, _ = writing(records, made)
        writer.call_started(call, "parallel")
        huge = Outcome(CallStatus.SUCCEEDED, answer("r" * (STORED_RESULT_MAX_BYTES + 1)))
        writer.call_ended(call, huge)
        await finish(writer)
        kept = records.storage.call(call.id)
        assert kept is not None
        assert kept.result is not None
        assert len(kept.result) <= STORED_RESULT_MAX_BYTES
        assert "was cut" in orjson.loads(kept.result)["content"][-1]["text"]


async def test_a_call_that_was_never_taken_up_has_an_end_and_no_start(storage):
    async with recording(storage) as records:
        made = await records.accept(await records.workspace(), [("bash", {})])
        call = made.calls[0].to_call()
        writer, _ = writing(records, made)
        error = CallError(ErrorCode.SKIPPED, "skipped")
        writer.call_ended(call, Outcome(CallStatus.SKIPPED, ToolResult(text_content("skipped"), is_error=True), error))
        await finish(writer)
        assert [name for _, name, _ in stored(records, made.id)] == ["batch_start", "tool_execution_end", "batch_end"]
        kept = records.storage.call(call.id)
        assert kept is not None
        assert (kept.status, kept.error, kept.started_at) == (CallStatus.SKIPPED, error, None)


async def test_nothing_is_stored_after_another_owner_has_claimed_the_batch(storage):
    async with recording(storage) as records:
        made = await records.accept(await records.workspace(), [("bash", {})])
        call = made.calls[0].to_call()
        writer, fenced = writing(records, made)
        await records.writer.write(ClaimBatch(made.id, made.epoch))
        writer.call_started(call, "sequential")
        with pytest.raises(Fenced):
            await writer.started_durably()
        assert fenced == ["x"]
        writer.call_ended(call, DONE)
        with pytest.raises(Fenced):
            await finish(writer)
        assert [event.type for event in records.storage.events(made.id, after=0)] == [EventType.BATCH_START]


async def test_updates_that_are_not_due_are_sent_by_time(storage):
    async with recording(storage) as records:
        made = await records.accept(await records.workspace(), [("bash", {})])
        call = made.calls[0].to_call()
        writer, _ = writing(records, made)
        writer.call_started(call, "sequential")
        writer.call_updated(call, OutputDelta("stdout", b"first"))
        writer.call_updated(call, OutputDelta("stdout", b"second"))
        stream = records.log.follow(made.id, 0)
        seen = b""
        async with asyncio.timeout(60):
            async for chunk in stream:
                seen += chunk
                if b"second" in seen:
                    break
        await stream.aclose()
        writer.call_ended(call, DONE)
        await finish(writer)
