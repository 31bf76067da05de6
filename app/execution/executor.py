"""The executor: prepare → execute → finalize for the calls of one batch, in parallel or one after another.

It runs under a plain `asyncio.run()` with no server and no database: what happens leaves through a `CallSink`, and
every call leaves exactly once with an `Outcome`.
"""

import asyncio
from collections.abc import Awaitable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final, Protocol

import structlog

from app.domain.abort import Aborted, AbortReason, AbortSignal
from app.domain.batch import Batch, OnError, Summary
from app.domain.tool_call import (
    CallError,
    CallStatus,
    ExecutionMode,
    HookTrace,
    Outcome,
    ToolCall,
    ToolResult,
    text_content,
)
from app.domain.workspace import Workspace
from app.errors import ErrorCode, Fenced, ToolError
from app.hooks.base import AfterContext, BeforeContext, HookChain
from app.tools.base import AgentTool, ToolUpdate

PARALLEL_CALLS: Final = 16
# A tool has this long to come back after its signal; then it is left behind and its call is settled without it.
ABANDON_SECONDS: Final = 7.0

_log = structlog.get_logger(__name__)


class CallSink(Protocol):
    """Where the executor's events go: its only output."""

    def call_started(self, call: ToolCall, mode: ExecutionMode) -> None:
        """A call was taken up."""
        ...

    async def started_durably(self) -> None:
        """Return once the starts told so far are stored.

        Raises:
            Fenced: the batch has another owner; nothing with effects may start.
        """
        ...

    def call_updated(self, call: ToolCall, update: ToolUpdate) -> Awaitable[None] | None:
        """A running call has news; what is returned is awaited before the tool makes more."""
        ...

    def call_ended(self, call: ToolCall, outcome: Outcome) -> None:
        """A call has its one answer."""
        ...


@dataclass(slots=True)
class BatchControl:
    """How a running batch is told to stop, as a whole or one call of it. Used on the event loop alone."""

    reason: AbortReason | None = None
    _signals: dict[str, AbortSignal] = field(default_factory=dict)
    _cancelled: set[str] = field(default_factory=set)

    @property
    def asked(self) -> bool:
        """Whether the batch or any call of it was told to stop."""
        return self.reason is not None or bool(self._cancelled)

    def abort(self, reason: AbortReason) -> None:
        """Stop the batch: running calls are aborted, the others do not start. The first reason stays."""
        if self.reason is None:
            self.reason = reason
            for signal in list(self._signals.values()):
                signal.abort(reason)

    def cancel_call(self, call_id: str) -> None:
        """Stop one call, running or not yet."""
        self._cancelled.add(call_id)
        signal = self._signals.get(call_id)
        if signal is not None:
            signal.abort(AbortReason.CANCELLED)

    def reason_for(self, call_id: str) -> AbortReason | None:
        """Why a call that was not taken up yet must not be; None while it may."""
        if self.reason is not None:
            return self.reason
        return AbortReason.CANCELLED if call_id in self._cancelled else None

    def enter(self, call_id: str) -> AbortSignal:
        signal = self._signals[call_id] = AbortSignal()
        reason = self.reason_for(call_id)
        if reason is not None:
            signal.abort(reason)
        return signal

    def leave(self, call_id: str) -> None:
        self._signals.pop(call_id, None)


@dataclass(frozen=True, slots=True)
class Execution:
    """How the calls of a batch ended, in request order."""

    outcomes: tuple[Outcome, ...]

    @property
    def summary(self) -> Summary:
        return summarize([outcome.status for outcome in self.outcomes])

    @property
    def has_errors(self) -> bool:
        return any(outcome.status is not CallStatus.SUCCEEDED for outcome in self.outcomes)

    @property
    def terminate(self) -> bool:
        return bool(self.outcomes) and all(outcome.result.terminate for outcome in self.outcomes)


def summarize(statuses: Sequence[CallStatus]) -> Summary:
    """Count how calls ended."""
    return Summary(
        total=len(statuses),
        succeeded=statuses.count(CallStatus.SUCCEEDED),
        failed=statuses.count(CallStatus.FAILED),
        cancelled=statuses.count(CallStatus.CANCELLED),
        skipped=statuses.count(CallStatus.SKIPPED),
    )


def effective_mode(
    requested: ExecutionMode, tools: Mapping[str, AgentTool], calls: Sequence[ToolCall]
) -> ExecutionMode:
    """Return `sequential` when the request says so or any called tool is sequential."""
    if requested == "sequential":
        return "sequential"
    called = (tools.get(call.tool_name) for call in calls)
    return (
        "sequential" if any(tool is not None and tool.execution_mode == "sequential" for tool in called) else "parallel"
    )


@dataclass(slots=True)
class _Run:
    """One call on its way: settled once, the first outcome wins."""

    call: ToolCall
    outcome: Outcome | None = None
    started: bool = False
    tool: AgentTool | None = None
    arguments: dict[str, Any] = field(default_factory=dict)
    traces: list[HookTrace] = field(default_factory=list)


class Executor:
    """Runs the calls of one batch.

    Args:
        workspace: told to hooks.
        batch: told to hooks, without its calls.
        tools: the tools this workspace has, by name.
        hooks: the chain around every call.
        sink: where events go.
        control: how the batch is stopped.
    """

    def __init__(
        self,
        *,
        workspace: Workspace,
        batch: Batch,
        tools: Mapping[str, AgentTool],
        hooks: HookChain,
        sink: CallSink,
        control: BatchControl,
        abandon_seconds: float = ABANDON_SECONDS,
    ) -> None:
        self._workspace = workspace
        self._batch = batch
        self._tools = tools
        self._hooks = hooks
        self._sink = sink
        self._control = control
        self._abandon_seconds = abandon_seconds
        self._mode: ExecutionMode = "sequential"

    async def run(self, calls: Sequence[ToolCall], mode: ExecutionMode, on_error: OnError) -> Execution:
        """Run the calls and return how each ended, in request order.

        Raises:
            Fenced: the batch has another owner; what ran was stopped and nothing more is told to the sink.
        """
        self._mode = mode
        runs = [_Run(call) for call in calls]
        if mode == "sequential":
            await self._run_sequential(runs, on_error)
        else:
            await self._run_parallel(runs, on_error)
        return Execution(tuple(run.outcome for run in runs if run.outcome is not None))

    async def _run_sequential(self, runs: Sequence[_Run], on_error: OnError) -> None:
        stop = False
        for run in runs:
            if self._left_out(run, stop=stop):
                continue
            await self._prepare(run)
            if run.outcome is None:
                await self._execute(run)
            stop = stop or (on_error == "stop" and _unsuccessful(run))

    async def _run_parallel(self, runs: Sequence[_Run], on_error: OnError) -> None:
        # Preparation goes in request order, so hooks see the calls as the caller wrote them; then all run together.
        stop = False
        prepared: list[_Run] = []
        for run in runs:
            if self._left_out(run, stop=stop):
                continue
            await self._prepare(run)
            if run.outcome is None:
                prepared.append(run)
            stop = stop or (on_error == "stop" and _unsuccessful(run))
        slots = asyncio.Semaphore(PARALLEL_CALLS)

        async def execute(run: _Run) -> None:
            async with slots:
                await self._execute(run)

        try:
            async with asyncio.TaskGroup() as group:
                for run in prepared:
                    group.create_task(execute(run))
        except* Fenced as fenced:
            raise fenced.exceptions[0] from None

    def _left_out(self, run: _Run, *, stop: bool) -> bool:
        """Settle a call that is not taken up: it has an end and no start."""
        reason = self._control.reason_for(run.call.id)
        if reason is not None:
            self._settle(run, not_started(reason))
        elif stop:
            self._settle(run, skipped("Skipped: a call before it failed and the batch says onError: stop."))
        return run.outcome is not None

    async def _prepare(self, run: _Run) -> None:
        """Take a call up: find the tool, absorb spellings, validate, ask the before hooks."""
        run.started = True
        self._sink.call_started(run.call, self._mode)
        tool = self._tools.get(run.call.tool_name)
        if tool is None:
            known = ", ".join(sorted(self._tools))
            name = run.call.tool_name[:80]
            self._settle(
                run, failed(ErrorCode.UNKNOWN_TOOL, f"There is no tool named {name!r}. The tools are: {known}.")
            )
            return
        run.tool = tool
        try:
            arguments = tool.validate_arguments(tool.prepare_arguments(run.call.arguments))
        except ToolError as error:
            self._settle(run, from_tool_error(error))
            return
        except Exception:  # noqa: BLE001 - outcomes are values
            _log.exception("arguments_not_prepared", tool=tool.name, call_id=run.call.id)
            self._settle(run, failed(ErrorCode.INTERNAL, _INTERNAL))
            return
        context = BeforeContext(self._workspace, self._batch, run.call, tool.definition, arguments)

        def validate(rewritten: Any) -> dict[str, Any]:
            return tool.validate_arguments(rewritten)

        before = await self._hooks.before(context, validate)
        run.traces += before.traces
        run.arguments = before.arguments
        if before.block is not None:
            outcome = failed(before.block.code, before.block.reason)
            outcome = replace(outcome, result=replace(outcome.result, terminate=before.block.terminate))
            self._settle(run, outcome)

    async def _execute(self, run: _Run) -> None:
        tool = run.tool
        assert tool is not None  # noqa: S101 - prepared
        signal = self._control.enter(run.call.id)
        try:
            if signal.reason is not None:
                # Taken up and prepared, but told to stop before anything of it ran.
                self._settle(run, stopped(signal.reason, started=False))
                return
            if not tool.definition.annotations.read_only_hint:
                await self._sink.started_durably()
            outcome = await self._call_tool(run, tool, signal)
            self._settle(run, await self._finalize(run, tool, outcome))
        finally:
            self._control.leave(run.call.id)

    async def _call_tool(self, run: _Run, tool: AgentTool, signal: AbortSignal) -> Outcome:
        """Run the tool; whatever it raises becomes an outcome, here and nowhere else."""
        loop = asyncio.get_running_loop()

        def on_update(update: ToolUpdate) -> Awaitable[None] | None:
            return None if run.outcome is not None else self._sink.call_updated(run.call, update)

        try:
            async with asyncio.timeout(None) as left_behind:

                def give_up_later() -> None:
                    left_behind.reschedule(loop.time() + self._abandon_seconds)

                forget = signal.add_callback(give_up_later)
                try:
                    result = await tool.execute(run.call.tool_call_id, run.arguments, signal, on_update)
                finally:
                    forget()
        except Aborted as aborted:
            return stopped(aborted.reason, started=False)
        except ToolError as error:
            return from_tool_error(error)
        except Fenced:
            raise
        except TimeoutError as error:
            if left_behind.expired() and signal.reason is not None:
                _log.error("tool_left_behind", tool=tool.name, call_id=run.call.id)
                return stopped(signal.reason, started=True)
            return self._unexpected(run, tool, error)
        except Exception as error:  # noqa: BLE001 - outcomes are values: this is the place
            return self._unexpected(run, tool, error)
        if result.is_error:
            return Outcome(CallStatus.FAILED, result, CallError(ErrorCode.INTERNAL, "The tool reported an error."))
        return Outcome(CallStatus.SUCCEEDED, result)

    @staticmethod
    def _unexpected(run: _Run, tool: AgentTool, error: Exception) -> Outcome:
        _log.error("tool_failed", tool=tool.name, call_id=run.call.id, exc_info=error)
        return failed(ErrorCode.INTERNAL, _INTERNAL)

    async def _finalize(self, run: _Run, tool: AgentTool, outcome: Outcome) -> Outcome:
        """Ask the after hooks; status and error follow the final result."""
        context = AfterContext(
            self._workspace,
            self._batch,
            run.call,
            tool.definition,
            run.arguments,
            outcome.result,
            outcome.result.is_error,
        )
        after = await self._hooks.after(context)
        run.traces += after.traces
        result = after.result
        if outcome.status is CallStatus.CANCELLED:
            return replace(outcome, result=result)
        if not result.is_error:
            return Outcome(CallStatus.SUCCEEDED, result)
        if after.failed is not None:
            message = f"The hook {after.failed} failed after the call ran; the call's effects stand."
            return Outcome(CallStatus.FAILED, result, CallError(ErrorCode.HOOK_FAILED, message))
        if outcome.error is not None:
            return Outcome(CallStatus.FAILED, result, outcome.error)
        return Outcome(
            CallStatus.FAILED, result, CallError(ErrorCode.DENIED, "A hook turned the result into an error.")
        )

    def _settle(self, run: _Run, outcome: Outcome) -> None:
        if run.outcome is not None:
            return
        run.outcome = replace(outcome, hooks=tuple(run.traces))
        self._sink.call_ended(run.call, run.outcome)


_INTERNAL: Final = (
    "The tool failed inside the service; the call may have taken effect. Look before you repeat it; "
    "the service's log has the cause under this call's id."
)


def failed(code: ErrorCode, message: str, details: Mapping[str, Any] | None = None) -> Outcome:
    """Return the outcome of a call that failed with a text for the caller."""
    return Outcome(
        CallStatus.FAILED,
        ToolResult(text_content(message), dict(details or {}), is_error=True),
        CallError(code, message),
    )


def from_tool_error(error: ToolError) -> Outcome:
    """Return the outcome of a ToolError: `cancelled` when it says so, else `failed`."""
    status = CallStatus.CANCELLED if error.code is ErrorCode.CANCELLED else CallStatus.FAILED
    result = ToolResult(text_content(error.message), error.details, is_error=True)
    return Outcome(status, result, CallError(error.code, error.summary))


def skipped(message: str, code: ErrorCode = ErrorCode.SKIPPED) -> Outcome:
    """Return the outcome of a call that was never taken up."""
    return Outcome(CallStatus.SKIPPED, ToolResult(text_content(message), {}, is_error=True), CallError(code, message))


def not_started(reason: AbortReason) -> Outcome:
    """Return the outcome of a call that was not taken up because its batch or the call itself was stopped."""
    match reason:
        case AbortReason.CANCELLED:
            message = "Cancelled before it started; nothing of it ran."
            return Outcome(
                CallStatus.CANCELLED,
                ToolResult(text_content(message), {"aborted": True}, is_error=True),
                CallError(ErrorCode.CANCELLED, message),
            )
        case AbortReason.TIMEOUT:
            return skipped("Skipped: the batch's timeoutMs ran out before this call started.")
        case AbortReason.INTERRUPTED:
            return skipped(
                "Skipped: the service stopped before this call started; nothing of it ran. Send it again.",
                ErrorCode.INTERRUPTED,
            )


def stopped(reason: AbortReason, *, started: bool) -> Outcome:
    """Return the outcome of a call that was told to stop.

    Args:
        reason: who told it.
        started: whether it may have taken effect.
    """
    effect = "it may have taken effect: look before you repeat it" if started else "it had no effect"
    match reason:
        case AbortReason.CANCELLED:
            status, code, what = CallStatus.CANCELLED, ErrorCode.CANCELLED, "Cancelled"
        case AbortReason.TIMEOUT:
            status, code, what = CallStatus.FAILED, ErrorCode.TIMEOUT, "The batch's timeoutMs ran out"
        case AbortReason.INTERRUPTED:
            status, code, what = CallStatus.FAILED, ErrorCode.INTERRUPTED, "The service stopped"
    message = f"{what}; {effect}."
    return Outcome(
        status, ToolResult(text_content(message), {"aborted": True}, is_error=True), CallError(code, message)
    )


def _unsuccessful(run: _Run) -> bool:
    return run.outcome is not None and run.outcome.status is not CallStatus.SUCCEEDED
