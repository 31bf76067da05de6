"""Hooks: code that sees a call before or after it runs, and the chain that calls it.

A hook never breaks anybody else's call: a before hook that raises or takes too long blocks its call (`hook_failed`), an
after hook that does so turns that one result into an error that still carries the tool's content.
"""

import asyncio
import contextlib
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final, TypeAlias

import structlog

from app.domain.batch import Batch
from app.domain.tool_call import ContentBlock, HookTrace, ToolCall, ToolResult, text_content
from app.domain.workspace import Workspace
from app.errors import ErrorCode, ToolError
from app.tools.base import ToolDefinition

HOOK_SECONDS: Final = 10.0

_NO_LIMIT: Final = contextlib.nullcontext()

_log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class BeforeContext:
    """What a before hook sees. `arguments` is validated; `batch` is the batch without its calls."""

    workspace: Workspace
    batch: Batch
    call: ToolCall
    tool: ToolDefinition
    arguments: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class AfterContext:
    """What an after hook sees: the same, and the result as the hook before it left it."""

    workspace: Workspace
    batch: Batch
    call: ToolCall
    tool: ToolDefinition
    arguments: Mapping[str, Any]
    result: ToolResult
    is_error: bool


@dataclass(frozen=True, slots=True)
class Block:
    """Refuse the call; `reason` is told to the caller. `terminate` asks the agent to stop after this batch."""

    reason: str
    terminate: bool = False
    code: ErrorCode = ErrorCode.BLOCKED


@dataclass(frozen=True, slots=True)
class Rewrite:
    """Run the call with these arguments instead; they are validated again."""

    arguments: Mapping[str, Any]
    reason: str | None = None


@dataclass(frozen=True, slots=True)
class Patch:
    """Replace whole fields of the result; None leaves a field as it is."""

    content: list[ContentBlock] | None = None
    details: dict[str, Any] | None = None
    is_error: bool | None = None
    usage: dict[str, Any] | None = None
    terminate: bool | None = None
    reason: str | None = None


BeforeVerdict: TypeAlias = Block | Rewrite | None


class Hook:
    """Base of hooks: override what you need. `name` stands in the record of every call the hook looked at."""

    name: str = "hook"

    async def before_tool_call(self, context: BeforeContext) -> BeforeVerdict:  # noqa: ARG002 - for overriding
        """Return None to let the call pass, or Block or Rewrite."""
        return None

    async def after_tool_call(self, context: AfterContext) -> Patch | None:  # noqa: ARG002 - for overriding
        """Return None to leave the result, or a Patch."""
        return None


@dataclass(slots=True)
class Before:
    """What the before hooks made of a call."""

    arguments: dict[str, Any]
    block: Block | None = None
    traces: list[HookTrace] = field(default_factory=list)


@dataclass(slots=True)
class After:
    """What the after hooks made of a result. `failed` is the name of a hook that raised or took too long."""

    result: ToolResult
    failed: str | None = None
    traces: list[HookTrace] = field(default_factory=list)


class HookChain:
    """Hooks in order. The first block wins; every rewrite is validated again; all after hooks run.

    Args:
        hooks: in the order they run.
        seconds: how long one hook may take.
        built_in: which of them are the service's own: they leave no trace when they let a call pass, and have no time
            limit, as they wait for nothing.
    """

    def __init__(
        self, hooks: Sequence[Hook], *, seconds: float = HOOK_SECONDS, built_in: frozenset[Hook] = frozenset()
    ) -> None:
        self._seconds = seconds
        self._built_in = built_in
        # A hook that does not override a phase is not asked in it.
        self._before = [hook for hook in hooks if type(hook).before_tool_call is not Hook.before_tool_call]
        self._after = [hook for hook in hooks if type(hook).after_tool_call is not Hook.after_tool_call]

    async def before(self, context: BeforeContext, validate: Callable[[Any], dict[str, Any]]) -> Before:
        """Ask the before hooks.

        Args:
            context: the call with its validated arguments.
            validate: the tool's validation, for rewritten arguments.
        """
        answer = Before(dict(context.arguments))
        for hook in self._before:
            started = time.monotonic()
            action, reason = "none", None
            try:
                async with self._limit(hook):
                    verdict = await hook.before_tool_call(context)
                if isinstance(verdict, Block):
                    action, reason = "block", verdict.reason
                    answer.block = verdict
                elif isinstance(verdict, Rewrite):
                    answer.arguments = validate(dict(verdict.arguments))
                    context = replace(context, arguments=answer.arguments)
                    action, reason = "rewrite", verdict.reason
                elif verdict is not None:
                    raise TypeError(f"a before hook returns Block, Rewrite or None, not {type(verdict).__name__}")  # noqa: TRY301 - one place makes the answer
            except Exception as error:  # noqa: BLE001 - whatever a hook raises becomes a result, here
                action, reason = "failed", _why(error, self._seconds)
                answer.block = Block(
                    f"The hook {hook.name} failed before the call ran ({reason}). Nothing was done. "
                    "Tell the operator of this service, or try again.",
                    code=ErrorCode.HOOK_FAILED,
                )
                _log.warning("hook_failed", hook=hook.name, phase="before", reason=reason)
            self._trace(answer.traces, hook, "before", action, reason, started)
            if answer.block is not None:
                break
        return answer

    async def after(self, context: AfterContext) -> After:
        """Ask the after hooks, each with what the one before it left."""
        answer = After(context.result)
        for hook in self._after:
            started = time.monotonic()
            action, reason = "none", None
            try:
                async with self._limit(hook):
                    patch = await hook.after_tool_call(context)
                if isinstance(patch, Patch):
                    action, reason = "patch", patch.reason
                    answer.result = _patched(answer.result, patch)
                    context = replace(context, result=answer.result, is_error=answer.result.is_error)
                elif patch is not None:
                    raise TypeError(f"an after hook returns Patch or None, not {type(patch).__name__}")  # noqa: TRY301 - one place makes the answer
            except Exception as error:  # noqa: BLE001 - whatever a hook raises becomes a result, here
                action, reason = "failed", _why(error, self._seconds)
                answer.failed = hook.name
                note = f"The hook {hook.name} failed after the call ran ({reason}); the call's effects stand."
                answer.result = replace(
                    answer.result, content=[*answer.result.content, *text_content(note)], is_error=True
                )
                context = replace(context, result=answer.result, is_error=True)
                _log.warning("hook_failed", hook=hook.name, phase="after", reason=reason)
            self._trace(answer.traces, hook, "after", action, reason, started)
        return answer

    def _limit(self, hook: Hook) -> contextlib.AbstractAsyncContextManager[object]:
        return _NO_LIMIT if hook in self._built_in else asyncio.timeout(self._seconds)

    def _trace(
        self, traces: list[HookTrace], hook: Hook, phase: Any, action: Any, reason: str | None, started: float
    ) -> None:
        if action == "none" and hook in self._built_in:
            return
        traces.append(HookTrace(hook.name, phase, action, reason, round((time.monotonic() - started) * 1000)))


def _patched(result: ToolResult, patch: Patch) -> ToolResult:
    return ToolResult(
        content=result.content if patch.content is None else patch.content,
        details=result.details if patch.details is None else patch.details,
        is_error=result.is_error if patch.is_error is None else patch.is_error,
        usage=result.usage if patch.usage is None else patch.usage,
        terminate=result.terminate if patch.terminate is None else patch.terminate,
    )


def _why(error: Exception, seconds: float) -> str:
    if isinstance(error, TimeoutError):
        return f"it took longer than {seconds:g} s"
    if isinstance(error, ToolError):
        return f"its arguments do not fit: {error.message}"
    return f"{type(error).__name__}: {error}"[:500]
