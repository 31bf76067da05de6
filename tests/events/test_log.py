"""Replay and live streaming are one loop over the same rows."""

import asyncio

import pytest

from app.domain.batch import BatchStatus, Summary
from app.domain.tool_call import CallStatus, Outcome
from app.errors import InvalidCursor, NotFound
from app.events.batch_writer import BatchWriter
from app.events.log import RING_FRAMES, Updates
from app.tools.base import OutputDelta
from tests.support.calls import answer
from tests.support.eventing import Records, frames, recording

pytestmark = pytest.mark.anyio

DONE = Outcome(CallStatus.SUCCEEDED, answer("done"))


async def started(records: Records) -> tuple[BatchWriter, object, str]:
    made = await records.accept(await records.workspace(), [("bash", {})])
    writer = BatchWriter(made, records.writer, capture_bytes=lambda _tool: 10**8, on_fenced=lambda: None)
    call = made.calls[0].to_call()
    writer.call_started(call, "sequential")
    return writer, call, made.id


async def say(writer: BatchWriter, call, lines: list[bytes]) -> None:
    """Store each line as an update of its own."""
    for line in lines:
        writer.call_updated(call, OutputDelta("stdout", line.ljust(16 * 1024, b".")))
        await writer.started_durably()


async def end(writer: BatchWriter, call) -> None:
    writer.call_ended(call, DONE)
    await writer.batch_ended(
        BatchStatus.COMPLETED, Summary(1, succeeded=1), "sequential", has_errors=False, terminate=False
    )


async def collect(records: Records, batch_id: str, after: int = 0, updates: Updates = "delta") -> bytes:
    async with asyncio.timeout(60):
        return b"".join([chunk async for chunk in records.log.follow(batch_id, after, updates)])


async def test_live_followers_and_a_replay_see_the_same_bytes(storage):
    async with recording(storage) as records:
        writer, call, batch_id = await started(records)
        early = asyncio.ensure_future(collect(records, batch_id))
        await say(writer, call, [b"a", b"b"])
        late = asyncio.ensure_future(collect(records, batch_id))
        await say(writer, call, [b"c"])
        await end(writer, call)
        replay = await collect(records, batch_id)
        assert await early == await late == replay
        assert [event["seq"] for event in frames(replay)] == list(range(1, len(frames(replay)) + 1))
        assert records.log.followers == 0


async def test_resuming_after_any_event_gives_each_later_event_once(storage):
    async with recording(storage) as records:
        writer, call, batch_id = await started(records)
        await say(writer, call, [b"%d" % number for number in range(5)])
        await end(writer, call)
        whole = frames(await collect(records, batch_id))
        for cursor in range(len(whole)):
            assert frames(await collect(records, batch_id, cursor)) == whole[cursor:]


async def test_a_follower_far_behind_the_ring_reads_rows_and_catches_up_with_the_live_end(storage):
    async with recording(storage) as records:
        writer, call, batch_id = await started(records)
        keeps_up = asyncio.ensure_future(collect(records, batch_id))
        slow = records.log.follow(batch_id, 0)
        first = await anext(slow)
        await say(writer, call, [b"%d" % number for number in range(RING_FRAMES + 50)])
        rest = asyncio.ensure_future(_rest(slow))
        await end(writer, call)
        async with asyncio.timeout(60):
            assert first + await rest == await keeps_up


async def _rest(stream) -> bytes:
    return b"".join([chunk async for chunk in stream])


async def test_without_updates_only_the_life_cycle_is_told(storage):
    async with recording(storage) as records:
        writer, call, batch_id = await started(records)
        await say(writer, call, [b"a"])
        await end(writer, call)
        events = frames(await collect(records, batch_id, 0, "none"))
        assert [event["type"] for event in events] == [
            "batch_start",
            "tool_execution_start",
            "tool_execution_end",
            "batch_end",
        ]


async def test_a_snapshot_is_the_end_of_the_text_so_far_from_whatever_cursor(storage):
    async with recording(storage) as records:
        writer, call, batch_id = await started(records)
        await say(writer, call, [b"a", b"b", b"c"])
        await end(writer, call)
        whole = [
            event["snapshot"]
            for event in frames(await collect(records, batch_id, 0, "snapshot"))
            if "snapshot" in event
        ]
        text = b"".join(letter.ljust(16 * 1024, b".") for letter in (b"a", b"b", b"c")).decode()
        assert [item["bytes"] for item in whole] == [16384, 32768, 49152]
        assert [item["text"] for item in whole] == [text[:16384], text[16384:32768], text[32768:]]
        resumed = frames(await collect(records, batch_id, 4, "snapshot"))
        assert resumed[0]["snapshot"] == whole[2]


async def test_a_finished_stream_replays_whole_and_then_there_is_nothing_to_open(storage):
    async with recording(storage) as records:
        writer, call, batch_id = await started(records)
        await end(writer, call)
        assert await records.log.open(batch_id, 4, "delta") is None
        stream = await records.log.open(batch_id, 0, "delta")
        assert stream is not None
        assert len(frames(await _rest(stream))) == 4
        for cursor in (-1, 5, 10**12):
            with pytest.raises(InvalidCursor):
                await records.log.open(batch_id, cursor, "delta")
        with pytest.raises(NotFound):
            await records.log.open("batch_nothing", 0, "delta")


async def test_a_cursor_at_the_last_event_of_a_running_batch_waits_for_the_next(storage):
    async with recording(storage) as records:
        writer, call, batch_id = await started(records)
        await writer.started_durably()
        stream = await records.log.open(batch_id, 2, "delta")
        assert stream is not None
        waiting = asyncio.ensure_future(_rest(stream))
        await end(writer, call)
        async with asyncio.timeout(60):
            assert [event["type"] for event in frames(await waiting)] == ["tool_execution_end", "batch_end"]


async def test_a_batch_of_another_process_is_followed_by_looking_once_a_second(storage):
    async with recording(storage) as here, recording(storage) as there:
        writer, call, batch_id = await started(there)
        following = [asyncio.ensure_future(collect(here, batch_id)) for _ in range(3)]
        await say(writer, call, [b"a"])
        await end(writer, call)
        async with asyncio.timeout(60):
            assert await following[0] == await following[1] == await following[2] == await collect(there, batch_id)
            assert await here.log.wait_terminal(batch_id, 5) is True


async def test_waiting_for_the_end_ends_with_it_or_in_time(storage):
    async with recording(storage) as records:
        writer, call, batch_id = await started(records)
        assert await records.log.wait_terminal(batch_id, 0.01) is False
        waiting = asyncio.ensure_future(records.log.wait_terminal(batch_id, 20))
        await end(writer, call)
        async with asyncio.timeout(60):
            assert await waiting is True
        assert await records.log.wait_terminal("batch_nothing", 1) is None


async def test_the_tail_of_a_calls_output_follows_it_to_its_end(storage):
    async with recording(storage) as records:
        writer, call, batch_id = await started(records)
        writer.call_updated(call, OutputDelta("stdout", b"one\n"))
        tail = asyncio.ensure_future(_rest(records.log.follow_output(batch_id, call.id, None, 0)))
        errors = asyncio.ensure_future(_rest(records.log.follow_output(batch_id, call.id, "stderr", 2)))
        writer.call_updated(call, OutputDelta("stderr", b"two\n"))
        await end(writer, call)
        async with asyncio.timeout(60):
            assert await tail == b"one\ntwo\n"
            assert await errors == b"o\n"


async def test_a_follower_that_goes_away_leaves_nothing_behind(storage):
    async with recording(storage) as records:
        writer, call, batch_id = await started(records)
        stream = records.log.follow(batch_id, 0)
        await anext(stream)
        assert records.log.followers == 1
        await stream.aclose()
        waiting = asyncio.ensure_future(collect(records, batch_id))
        while records.log.followers == 0:  # noqa: ASYNC110 - the log tells nobody that it is followed
            await asyncio.sleep(0)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        assert records.log.followers == 0
        await end(writer, call)
