"""The common part of every tool: a schema, a validator and a runner made from one arguments model."""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any, Generic, TypeVar

from pydantic import BaseModel, ConfigDict
from pydantic.alias_generators import to_camel

from app.domain.abort import AbortSignal
from app.domain.tool_call import ExecutionMode, ToolResult
from app.tools.base import OnUpdate, ToolAnnotations, ToolDefinition, ToolUpdate


class ArgumentsModel(BaseModel):
    """Arguments of a tool: camelCase, strict, nothing unknown. Field descriptions are what a model reads."""

    model_config = ConfigDict(
        alias_generator=to_camel,
        validate_by_name=False,
        validate_by_alias=True,
        extra="forbid",
        strict=True,
        frozen=True,
    )


class DetailsModel(BaseModel):
    """Details of a result: camelCase on the wire."""

    model_config = ConfigDict(alias_generator=to_camel, validate_by_name=True, validate_by_alias=True, frozen=True)

    def to_json(self) -> dict[str, Any]:
        return self.model_dump(by_alias=True, mode="json")


A = TypeVar("A", bound=ArgumentsModel)


def ignore_update(update: ToolUpdate) -> None:
    """The `on_update` of a caller that does not listen."""


class ModelTool(ABC, Generic[A]):
    """An AgentTool whose arguments are a pydantic model. A subclass sets `arguments_model` and `spellings`, writes `run`.

    `spellings` maps what other tool sets call a field to this tool's name for it, at the top level of the arguments.
    """

    arguments_model: type[A]
    spellings: Mapping[str, str] = {}

    def __init__(self, definition: ToolDefinition) -> None:
        self.definition = definition

    @property
    def name(self) -> str:
        return self.definition.name

    @property
    def description(self) -> str:
        return self.definition.description

    @property
    def parameters(self) -> dict[str, Any]:
        return self.definition.parameters

    @property
    def execution_mode(self) -> ExecutionMode:
        return self.definition.execution_mode

    def prepare_arguments(self, args: Any) -> Any:
        """Return `args` with known spellings from elsewhere replaced. Never raises."""
        raise NotImplementedError

    def validate_arguments(self, args: Any) -> dict[str, Any]:
        """Return the arguments as they will run (docs: CONTRACT of arguments). Raises ToolError `invalid_arguments`."""
        raise NotImplementedError

    async def execute(
        self,
        tool_call_id: str,
        args: Mapping[str, Any],
        signal: AbortSignal | None = None,
        on_update: OnUpdate | None = None,
    ) -> ToolResult:
        raise NotImplementedError

    @abstractmethod
    async def run(self, tool_call_id: str, args: A, signal: AbortSignal, on_update: OnUpdate) -> ToolResult:
        """Do the work of one call. Raises ToolError and Aborted as `AgentTool.execute` says."""


def define(
    name: str,
    description: str,
    arguments_model: type[ArgumentsModel],
    annotations: ToolAnnotations,
    execution_mode: ExecutionMode,
) -> ToolDefinition:
    """Return a definition whose JSON Schema is made from the arguments model: inlined, without pydantic's titles."""
    raise NotImplementedError
