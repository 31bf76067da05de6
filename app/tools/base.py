"""The two faces of a tool: `ToolDefinition` is what a model sees, `AgentTool` is what runs."""

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias

from app.domain.abort import AbortSignal
from app.domain.events import OutputStream
from app.domain.tool_call import ContentBlock, ExecutionMode, ToolResult


@dataclass(frozen=True, slots=True)
class ToolAnnotations:
    """Hints of the Model Context Protocol: what a client may assume before it calls."""

    title: str
    read_only_hint: bool
    destructive_hint: bool
    idempotent_hint: bool
    open_world_hint: bool

    def to_json(self) -> dict[str, Any]:
        return {
            "title": self.title,
            "readOnlyHint": self.read_only_hint,
            "destructiveHint": self.destructive_hint,
            "idempotentHint": self.idempotent_hint,
            "openWorldHint": self.open_world_hint,
        }


@dataclass(frozen=True, slots=True)
class ToolDefinition:
    """`parameters` is a JSON Schema object with `additionalProperties: false`, made from the arguments model."""

    name: str
    description: str
    parameters: dict[str, Any]
    annotations: ToolAnnotations
    execution_mode: ExecutionMode = "parallel"


@dataclass(frozen=True, slots=True)
class OutputDelta:
    """Output that only grows: the next raw bytes of one stream, in the order they were read."""

    stream: OutputStream
    data: bytes


@dataclass(frozen=True, slots=True)
class PartialResult:
    """A result so far, for what does not only grow (a warning, a progress note); at most 16 KiB of JSON is kept."""

    content: list[ContentBlock]
    details: dict[str, Any]


ToolUpdate: TypeAlias = OutputDelta | PartialResult

OnUpdate: TypeAlias = Callable[[ToolUpdate], Awaitable[None] | None]
"""Called on the event loop. A tool awaits what it returns before it reads more: that is the back pressure."""


class AgentTool(Protocol):
    """What runs. Made by `app.tools.registry.create_tool`; it knows neither HTTP nor storage nor settings."""

    @property
    def definition(self) -> ToolDefinition: ...

    @property
    def name(self) -> str: ...

    @property
    def description(self) -> str: ...

    @property
    def parameters(self) -> dict[str, Any]: ...

    @property
    def execution_mode(self) -> ExecutionMode: ...

    def prepare_arguments(self, args: Any) -> Any:
        """Return `args` with the spellings of other tool sets replaced by this tool's own. Never raises."""
        ...

    def validate_arguments(self, args: Any) -> dict[str, Any]:
        """Return the arguments as they will run.

        Raises:
            ToolError: `invalid_arguments`, with a text that names every field that does not fit.
        """
        ...

    async def execute(
        self,
        tool_call_id: str,
        args: Mapping[str, Any],
        signal: AbortSignal | None = None,
        on_update: OnUpdate | None = None,
    ) -> ToolResult:
        """Run with validated arguments and return the result; a failure the caller can act on may be a raise.

        Raises:
            ToolError: the call failed; its message says what to do next.
            Aborted: the signal came before any effect. A tool with output of its own to keep returns an error result
                with `aborted: true` in its details instead.
        """
        ...
