"""prepare → execute → finalize, without a server and without a database."""

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from app.domain.abort import Aborted, AbortReason, AbortSignal
from app.domain.tool_call import CallError, CallStatus, ExecutionMode, Outcome, ToolResult
from app.errors import ErrorCode, Fenced, ToolError
from app.execution.executor import BatchControl, Execution, Executor, effective_mode
from app.hooks.base import AfterContext, BeforeContext, Block, Hook, HookChain, Patch
from app.tools.base import OutputDelta
from tests.support.calls import RecordingSink, ScriptedTool, answer, batch, workspace

pytestmark = pytest.mark.anyio


async def run(
    calls: list[tuple[str, Any]],
    tools: Sequence[ScriptedTool],
    *,
    mode: ExecutionMode = "parallel",
    on_error: Any = "continue",
    hooks: Sequence[Hook] = (),
    sink: RecordingSink | None = None,
    control: BatchControl | None = None,
    abandon_seconds: float = 7.0,
) -> tuple[Execution, RecordingSink]:
    sink = sink or RecordingSink()
    made = batch(calls)
    table = {tool.name: tool for tool in tools}
    executor = Executor(
        workspace=workspace(),
        batch=made,
        tools=table,
        hooks=HookChain(hooks, seconds=1),
        sink=sink,
        control=control or BatchControl(),
        abandon_seconds=abandon_seconds,
    )
    todo = [record.to_call() for record in made.calls]
    async with asyncio.timeout(60):
        execution = await executor.run(todo, effective_mode(mode, table, todo), on_error)
    return execution, sink


def saying(name: str, text: str = "done", **options: Any) -> ScriptedTool:
    async def body(args: dict[str, Any], _signal: AbortSignal, _update: Any) -> ToolResult:
        return answer(args.get("text", text))

    return ScriptedTool(name, body, **options)


def failing(name: str, error: Callable[[], BaseException], **options: Any) -> ScriptedTool:
    async def body(_args: dict[str, Any], _signal: AbortSignal, _update: Any) -> ToolResult:
        raise error()

    return ScriptedTool(name, body, **options)


def texts(execution: Execution) -> list[str]:
    return [outcome.result.content[0]["text"] for outcome in execution.outcomes]  # type: ignore[typeddict-item]


async def test_parallel_calls_are_in_flight_together_and_answered_in_request_order():
    arrived: list[str] = []
    both = asyncio.Event()

    async def meet(args: dict[str, Any], _signal: AbortSignal, _update: Any) -> ToolResult:
        arrived.append(args["n"])
        if len(arrived) == 2:
            both.set()
        await both.wait()
        if args["n"] == "first":
            await asyncio.sleep(0)  # lets the second end before it
            await asyncio.sleep(0)
        return answer(args["n"])

    execution, sink = await run([("meet", {"n": "first"}), ("meet", {"n": "second"})], [ScriptedTool("meet", meet)])
    assert texts(execution) == ["first", "second"]
    assert [event for event in sink.events if event[0] == "end"] == [
        ("end", "c1", "succeeded"),
        ("end", "c0", "succeeded"),
    ]


async def test_one_sequential_tool_makes_the_whole_batch_sequential():
    order: list[str] = []

    async def note(args: dict[str, Any], _signal: AbortSignal, _update: Any) -> ToolResult:
        order.append("in " + args["n"])
        await asyncio.sleep(0)
        order.append("out " + args["n"])
        return answer("ok")

    tools = [ScriptedTool("look", note), ScriptedTool("change", note, mode="sequential")]
    _, sink = await run([("look", {"n": "a"}), ("change", {"n": "b"}), ("look", {"n": "c"})], tools)
    assert order == ["in a", "out a", "in b", "out b", "in c", "out c"]
    assert {event[2] for event in sink.events if event[0] == "start"} == {"sequential"}


async def test_sequential_preparation_sees_the_effect_of_the_call_before():
    seen: list[str] = []
    state = {"value": "before"}

    class Look(Hook):
        async def before_tool_call(self, context: BeforeContext) -> None:
            seen.append(state["value"])

    async def change(args: dict[str, Any], _signal: AbortSignal, _update: Any) -> ToolResult:
        state["value"] = args["to"]
        return answer("ok")

    await run(
        [("change", {"to": "one"}), ("change", {"to": "two"})],
        [ScriptedTool("change", change, mode="sequential")],
        hooks=[Look()],
    )
    assert seen == ["before", "one"]


async def test_parallel_calls_are_prepared_in_request_order_before_any_runs():
    order: list[str] = []

    class Look(Hook):
        async def before_tool_call(self, context: BeforeContext) -> None:
            order.append("prepare " + context.call.tool_call_id)

    async def work(args: dict[str, Any], _signal: AbortSignal, _update: Any) -> ToolResult:
        order.append("run")
        return answer("ok")

    await run([("work", {})] * 3, [ScriptedTool("work", work)], hooks=[Look()])
    assert order == ["prepare c0", "prepare c1", "prepare c2", "run", "run", "run"]


async def test_refused_calls_end_at_once_with_a_start_and_no_after_hook():
    after: list[str] = []

    class Watch(Hook):
        async def after_tool_call(self, context: AfterContext) -> None:
            after.append(context.call.tool_call_id)

    execution, sink = await run([("nothing", {}), ("say", {"bad": 1}), ("say", {})], [saying("say")], hooks=[Watch()])
    assert [outcome.error and outcome.error.code for outcome in execution.outcomes] == [
        ErrorCode.UNKNOWN_TOOL,
        ErrorCode.INVALID_ARGUMENTS,
        None,
    ]
    assert "'nothing'" in texts(execution)[0]
    assert "say" in texts(execution)[0]
    assert after == ["c2"]
    assert sink.events[:4] == [
        ("start", "c0", "parallel"),
        ("end", "c0", "failed"),
        ("start", "c1", "parallel"),
        ("end", "c1", "failed"),
    ]


async def test_a_call_with_effects_waits_for_its_stored_start_and_a_reading_one_does_not():
    ran: list[str] = []

    async def note(args: dict[str, Any], _signal: AbortSignal, _update: Any) -> ToolResult:
        ran.append(args["n"])
        return answer("ok")

    sink = RecordingSink()
    sink.stored.clear()
    tools = [ScriptedTool("look", note), ScriptedTool("change", note, read_only=False)]
    running = asyncio.ensure_future(run([("change", {"n": "change"}), ("look", {"n": "look"})], tools, sink=sink))
    async with asyncio.timeout(60):
        while ("end", "c1", "succeeded") not in sink.events:  # noqa: ASYNC110 - the sink only keeps what it is told
            await asyncio.sleep(0)
    assert ran == ["look"]
    sink.stored.set()
    await running
    assert ran == ["look", "change"]


async def test_nothing_with_effects_runs_once_the_batch_has_another_owner():
    ran: list[str] = []

    class FencedSink(RecordingSink):
        async def started_durably(self) -> None:
            raise Fenced("taken over")

    async def note(args: dict[str, Any], _signal: AbortSignal, _update: Any) -> ToolResult:
        ran.append("ran")
        return answer("ok")

    for mode in ("parallel", "sequential"):
        with pytest.raises(Fenced):
            await run(
                [("change", {})] * 2, [ScriptedTool("change", note, read_only=False)], mode=mode, sink=FencedSink()
            )  # type: ignore[arg-type]
    assert ran == []


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (
            lambda: ToolError(ErrorCode.NOT_FOUND, "no such file", {"path": "x"}),
            (CallStatus.FAILED, ErrorCode.NOT_FOUND),
        ),
        (lambda: ToolError(ErrorCode.CANCELLED, "Command cancelled"), (CallStatus.CANCELLED, ErrorCode.CANCELLED)),
        (lambda: RuntimeError("secret of the service"), (CallStatus.FAILED, ErrorCode.INTERNAL)),
        (lambda: TimeoutError("of the tool's own"), (CallStatus.FAILED, ErrorCode.INTERNAL)),
        (MemoryError, (CallStatus.FAILED, ErrorCode.INTERNAL)),
        (lambda: Aborted(AbortReason.TIMEOUT), (CallStatus.FAILED, ErrorCode.TIMEOUT)),
        (lambda: Aborted(AbortReason.INTERRUPTED), (CallStatus.FAILED, ErrorCode.INTERRUPTED)),
    ],
)
async def test_whatever_a_tool_raises_becomes_one_result_and_the_others_go_on(error, expected):
    execution, _ = await run([("fail", {}), ("say", {})], [failing("fail", error), saying("say")])
    first, second = execution.outcomes
    assert first.error is not None
    assert (first.status, first.error.code) == expected
    assert first.result.is_error
    assert "secret" not in texts(execution)[0]
    assert second.status is CallStatus.SUCCEEDED


async def test_on_error_stop_skips_what_comes_after_and_keeps_what_ended():
    execution, sink = await run(
        [("say", {}), ("fail", {}), ("say", {})],
        [saying("say"), failing("fail", lambda: ToolError(ErrorCode.NO_MATCH, "no match"))],
        mode="sequential",
        on_error="stop",
    )
    assert [outcome.status.value for outcome in execution.outcomes] == ["succeeded", "failed", "skipped"]
    assert execution.summary.to_json() == {"total": 3, "succeeded": 1, "failed": 1, "cancelled": 0, "skipped": 1}
    assert ("start", "c2", "sequential") not in sink.events


async def test_on_error_stop_in_parallel_takes_up_no_further_call_and_finishes_the_taken():
    execution, sink = await run([("say", {}), ("nothing", {}), ("say", {})], [saying("say")], on_error="stop")
    assert [outcome.status.value for outcome in execution.outcomes] == ["succeeded", "failed", "skipped"]
    assert ("start", "c2", "parallel") not in sink.events


async def test_cancel_stops_running_calls_and_starts_no_other():
    control = BatchControl()
    entered = asyncio.Event()

    async def wait(_args: dict[str, Any], signal: AbortSignal, _update: Any) -> ToolResult:
        entered.set()
        await signal.wait()
        raise ToolError(ErrorCode.CANCELLED, "Command cancelled", {"aborted": True, "exitCode": None})

    running = asyncio.ensure_future(
        run(
            [("say", {}), ("wait", {}), ("say", {})],
            [saying("say"), ScriptedTool("wait", wait)],
            mode="sequential",
            control=control,
        )
    )
    async with asyncio.timeout(60):
        await entered.wait()
    control.abort(AbortReason.CANCELLED)
    execution, sink = await running
    assert [outcome.status.value for outcome in execution.outcomes] == ["succeeded", "cancelled", "cancelled"]
    assert execution.outcomes[1].result.details == {"aborted": True, "exitCode": None}
    assert ("start", "c2", "sequential") not in sink.events


async def test_a_batch_time_out_fails_what_runs_and_skips_the_rest():
    control = BatchControl()

    async def wait(_args: dict[str, Any], signal: AbortSignal, _update: Any) -> ToolResult:
        control.abort(AbortReason.TIMEOUT)
        raise Aborted(await signal.wait())

    execution, _ = await run(
        [("wait", {}), ("wait", {})], [ScriptedTool("wait", wait)], mode="sequential", control=control
    )
    assert [(outcome.status.value, outcome.error and outcome.error.code.value) for outcome in execution.outcomes] == [
        ("failed", "timeout"),
        ("skipped", "skipped"),
    ]


async def test_one_cancelled_call_leaves_the_others_alone():
    control = BatchControl()

    async def wait(args: dict[str, Any], signal: AbortSignal, _update: Any) -> ToolResult:
        if args["n"] == 0:
            raise Aborted(await signal.wait())
        return answer("ok")

    class CancelFirst(RecordingSink):
        def call_ended(self, call: Any, outcome: Outcome) -> None:
            super().call_ended(call, outcome)
            if call.tool_call_id == "c1":
                control.cancel_call(made[0])

    sink = CancelFirst()
    made: list[str] = []
    original = sink.call_started

    def remember(call: Any, mode: ExecutionMode) -> None:
        made.append(call.id)
        original(call, mode)

    sink.call_started = remember  # type: ignore[method-assign]
    execution, _ = await run(
        [("wait", {"n": 0}), ("wait", {"n": 1})], [ScriptedTool("wait", wait)], control=control, sink=sink
    )
    assert [outcome.status.value for outcome in execution.outcomes] == ["cancelled", "succeeded"]


async def test_a_result_that_was_there_before_the_cancel_was_looked_at_counts():
    control = BatchControl()

    async def finish(_args: dict[str, Any], _signal: AbortSignal, _update: Any) -> ToolResult:
        control.abort(AbortReason.CANCELLED)
        return answer("the rename had happened")

    execution, _ = await run([("finish", {})], [ScriptedTool("finish", finish)], control=control)
    assert execution.outcomes[0].status is CallStatus.SUCCEEDED


async def test_a_tool_that_does_not_come_back_is_left_behind():
    control = BatchControl()
    entered = asyncio.Event()

    async def deaf(_args: dict[str, Any], _signal: AbortSignal, _update: Any) -> ToolResult:
        entered.set()
        await asyncio.Event().wait()
        raise AssertionError

    running = asyncio.ensure_future(
        run([("deaf", {})], [ScriptedTool("deaf", deaf)], control=control, abandon_seconds=0.05)
    )
    async with asyncio.timeout(60):
        await entered.wait()
    control.abort(AbortReason.CANCELLED)
    execution, _ = await running
    assert execution.outcomes[0].status is CallStatus.CANCELLED
    assert "may have taken effect" in texts(execution)[0]


async def test_updates_after_the_end_of_a_call_are_ignored():
    kept: list[Any] = []

    async def talk(_args: dict[str, Any], _signal: AbortSignal, update: Any) -> ToolResult:
        kept.append(update)
        update(OutputDelta("stdout", b"in time"))
        return answer("ok")

    _, sink = await run([("talk", {})], [ScriptedTool("talk", talk)])
    kept[0](OutputDelta("stdout", b"too late"))
    assert [event for event in sink.events if event[0] == "update"] == [
        ("update", "c0", OutputDelta("stdout", b"in time"))
    ]


async def test_terminate_needs_every_result_to_ask_for_it():
    async def ask(args: dict[str, Any], _signal: AbortSignal, _update: Any) -> ToolResult:
        return answer("ok", terminate=args["ask"])

    tool = ScriptedTool("ask", ask)
    every, _ = await run([("ask", {"ask": True}), ("ask", {"ask": True})], [tool])
    some, _ = await run([("ask", {"ask": True}), ("ask", {"ask": False})], [tool])
    assert every.terminate
    assert not some.terminate
    assert not Execution(()).terminate


async def test_a_blocked_call_does_not_run_and_may_ask_to_terminate():
    class Refuse(Hook):
        name = "refuse"

        async def before_tool_call(self, context: BeforeContext) -> Block:
            return Block("not today", terminate=True)

    execution, _ = await run([("fail", {})], [failing("fail", AssertionError)], hooks=[Refuse()])
    outcome = execution.outcomes[0]
    assert outcome.error == CallError(ErrorCode.BLOCKED, "not today")
    assert outcome.result.terminate
    assert [(trace.name, trace.phase, trace.action, trace.reason) for trace in outcome.hooks] == [
        ("refuse", "before", "block", "not today")
    ]


async def test_status_and_error_follow_the_result_the_after_hooks_left():
    class Flip(Hook):
        async def after_tool_call(self, context: AfterContext) -> Patch:
            return Patch(is_error=not context.is_error)

    execution, _ = await run(
        [("say", {}), ("fail", {})],
        [saying("say"), failing("fail", lambda: ToolError(ErrorCode.NO_MATCH, "no match"))],
        hooks=[Flip()],
    )
    first, second = execution.outcomes
    assert (first.status, first.error and first.error.code) == (CallStatus.FAILED, ErrorCode.DENIED)
    assert (second.status, second.error) == (CallStatus.SUCCEEDED, None)
