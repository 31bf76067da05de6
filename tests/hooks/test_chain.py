"""Hooks see calls in order, and one that fails harms its own call alone."""

import asyncio
from typing import Any

import pytest

from app.domain.tool_call import ToolResult, text_content
from app.domain.workspace import WorkspaceOptions
from app.errors import ConfigurationError, ErrorCode, ToolError
from app.hooks import chain
from app.hooks.base import AfterContext, BeforeContext, Block, Hook, HookChain, Patch, Rewrite
from app.hooks.chain import hook_chain
from tests.support.calls import ScriptedTool, answer, batch, workspace

pytestmark = pytest.mark.anyio


async def _nothing(args: dict[str, Any], _signal: Any, _update: Any) -> ToolResult:
    return answer("ok")


def before_context(tool: ScriptedTool | None = None, **changes: Any) -> BeforeContext:
    made = batch([("look", {"path": "a"})])
    used = tool or ScriptedTool("look", _nothing)
    return BeforeContext(workspace(**changes), made, made.calls[0].to_call(), used.definition, {"path": "a"})


def after_context(result: ToolResult) -> AfterContext:
    made = batch([("look", {})])
    tool = ScriptedTool("look", _nothing)
    return AfterContext(workspace(), made, made.calls[0].to_call(), tool.definition, {}, result, result.is_error)


def valid(arguments: Any) -> dict[str, Any]:
    if "bad" in arguments:
        raise ToolError(ErrorCode.INVALID_ARGUMENTS, "bad: unknown argument")
    return dict(arguments)


class Verdict(Hook):
    def __init__(self, name: str, verdict: Any = None) -> None:
        self.name = name
        self.verdict = verdict
        self.saw: list[Any] = []

    async def before_tool_call(self, context: BeforeContext) -> Any:
        self.saw.append(dict(context.arguments))
        if isinstance(self.verdict, Exception):
            raise self.verdict
        return self.verdict


class Patching(Hook):
    def __init__(self, name: str, patch: Any) -> None:
        self.name = name
        self.patch = patch

    async def after_tool_call(self, context: AfterContext) -> Any:
        if isinstance(self.patch, Exception):
            raise self.patch
        return self.patch(context) if callable(self.patch) else self.patch


async def test_the_first_block_wins_and_later_hooks_are_not_asked():
    first, second, third = Verdict("a"), Verdict("b", Block("no")), Verdict("c", Block("also no"))
    answered = await HookChain([first, second, third]).before(before_context(), valid)
    assert answered.block == Block("no")
    assert [(trace.name, trace.action) for trace in answered.traces] == [("a", "none"), ("b", "block")]
    assert third.saw == []


async def test_a_rewrite_is_what_the_next_hook_sees():
    later = Verdict("later")
    answered = await HookChain([Verdict("rewrite", Rewrite({"path": "b"}, "why")), later]).before(
        before_context(), valid
    )
    assert answered.arguments == {"path": "b"}
    assert later.saw == [{"path": "b"}]
    assert [(trace.action, trace.reason) for trace in answered.traces] == [("rewrite", "why"), ("none", None)]


@pytest.mark.parametrize("verdict", [RuntimeError("boom"), Rewrite({"bad": 1}), "nonsense"])
async def test_a_before_hook_that_fails_blocks_its_call(verdict):
    answered = await HookChain([Verdict("broken", verdict)]).before(before_context(), valid)
    assert answered.block is not None
    assert answered.block.code is ErrorCode.HOOK_FAILED
    assert "broken" in answered.block.reason
    assert answered.traces[0].action == "failed"


async def test_a_before_hook_that_takes_too_long_blocks_its_call():
    class Slow(Hook):
        name = "slow"

        async def before_tool_call(self, context: BeforeContext) -> None:
            await asyncio.Event().wait()

    async with asyncio.timeout(5):
        answered = await HookChain([Slow()], seconds=0.02).before(before_context(), valid)
    assert answered.block is not None
    assert answered.block.code is ErrorCode.HOOK_FAILED
    assert "longer than 0.02 s" in answered.block.reason


async def test_each_after_hook_sees_what_the_one_before_left_and_replaces_whole_fields():
    def count(context: AfterContext) -> Patch:
        return Patch(details={"seen": context.result.details})

    answered = await HookChain(
        [Patching("one", Patch(details={"a": 1}, terminate=True)), Patching("two", count), Patching("three", None)]
    ).after(after_context(answer("text", details={"original": True})))
    assert answered.result == ToolResult(text_content("text"), {"seen": {"a": 1}}, terminate=True)
    assert [trace.action for trace in answered.traces] == ["patch", "patch", "none"]


async def test_an_after_hook_that_fails_makes_an_error_that_still_carries_the_content():
    answered = await HookChain(
        [Patching("broken", RuntimeError("boom")), Patching("next", Patch(details={"n": 1}))]
    ).after(after_context(answer("the tool's text")))
    assert answered.failed == "broken"
    assert answered.result.is_error
    assert answered.result.content[0] == {"type": "text", "text": "the tool's text"}
    assert answered.result.details == {"n": 1}


async def test_an_untrusted_workspace_reads_and_does_nothing_else():
    hooks = hook_chain([])
    looking = await hooks.before(before_context(trusted=False), valid)
    changing = await hooks.before(
        before_context(ScriptedTool("change", _nothing, read_only=False), trusted=False), valid
    )
    assert looking.block is None
    assert looking.traces == []
    assert changing.block is not None
    assert "not trusted" in changing.block.reason


async def test_only_listed_tools_run():
    hooks = hook_chain([])
    options = WorkspaceOptions.model_validate({"tools": ["read", "ls"]})
    refused = await hooks.before(before_context(options=options), valid)
    assert refused.block == Block("The tool look is not allowed in this workspace. Allowed: read, ls.")
    allowed = await hooks.before(before_context(options=WorkspaceOptions.model_validate({"tools": ["look"]})), valid)
    assert allowed.block is None


async def test_built_in_hooks_come_first_so_a_configured_hook_never_sees_a_refused_call():
    configured = Verdict("mine")
    await hook_chain([configured]).before(
        before_context(ScriptedTool("c", _nothing, read_only=False), trusted=False), valid
    )
    assert configured.saw == []


class _Point:
    def __init__(self, name: str, made: Any) -> None:
        self.name, self.value, self.made = name, f"package:{name}", made

    def load(self) -> Any:
        if isinstance(self.made, Exception):
            raise self.made
        return self.made


def test_installed_packages_offer_hooks_as_instances_or_factories(monkeypatch):
    instance = Verdict("instance")
    points = [_Point("b", instance), _Point("a", lambda: Verdict("made"))]
    monkeypatch.setattr(chain, "entry_points", lambda group: points if group == "toolcrib.hooks" else [])
    assert [hook.name for hook in chain.load_hooks()] == ["made", "instance"]


@pytest.mark.parametrize("made", [ImportError("gone"), lambda: "no hook"])
def test_a_hook_that_cannot_be_loaded_stops_the_start(monkeypatch, made):
    monkeypatch.setattr(chain, "entry_points", lambda group: [_Point("broken", made)])
    with pytest.raises(ConfigurationError, match="broken"):
        chain.load_hooks()
