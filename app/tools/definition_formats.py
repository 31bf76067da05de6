"""A tool's definition as the APIs of model providers want it.

The JSON Schema is the same in all of them. OpenAI's `strict` is false: it demands that every property is required and
takes a part of JSON Schema only, while the schemas here have optional properties and limits.
"""

from collections.abc import Callable, Mapping
from typing import Any, Final, Literal

from app.tools.base import ToolDefinition

ToolFormat = Literal["native", "mcp", "openai", "openai-chat", "anthropic"]


def format_definition(definition: ToolDefinition, form: ToolFormat) -> dict[str, Any]:
    """Return the definition as JSON: our own form, or an entry of `tools` in a request to a provider."""
    return _FORMATS[form](definition)


def _native(definition: ToolDefinition) -> dict[str, Any]:
    return {
        "name": definition.name,
        "description": definition.description,
        "parameters": definition.parameters,
        "annotations": definition.annotations.to_json(),
        "executionMode": definition.execution_mode,
    }


def _mcp(definition: ToolDefinition) -> dict[str, Any]:
    """`Tool` of the Model Context Protocol; clients of revisions before 2025-06-18 read the title in annotations."""
    return {
        "name": definition.name,
        "title": definition.annotations.title,
        "description": definition.description,
        "inputSchema": definition.parameters,
        "annotations": definition.annotations.to_json(),
    }


def _openai_function(definition: ToolDefinition) -> dict[str, Any]:
    return {
        "name": definition.name,
        "description": definition.description,
        "parameters": definition.parameters,
        "strict": False,
    }


def _openai(definition: ToolDefinition) -> dict[str, Any]:
    """A function tool of the Responses API."""
    return {"type": "function", **_openai_function(definition)}


def _openai_chat(definition: ToolDefinition) -> dict[str, Any]:
    """A tool of the Chat Completions API."""
    return {"type": "function", "function": _openai_function(definition)}


def _anthropic(definition: ToolDefinition) -> dict[str, Any]:
    """A client tool of the Messages API."""
    return {
        "name": definition.name,
        "description": definition.description,
        "input_schema": definition.parameters,
    }


_FORMATS: Final[Mapping[ToolFormat, Callable[[ToolDefinition], dict[str, Any]]]] = {
    "native": _native,
    "mcp": _mcp,
    "openai": _openai,
    "openai-chat": _openai_chat,
    "anthropic": _anthropic,
}
