"""The tools' definitions: what they are in general, and what one workspace's options make of them."""

from collections.abc import Sequence
from typing import Any, Final, Literal

from app.domain.caller import Scope
from app.domain.workspace import WorkspaceOptions
from app.tools.base import ToolDefinition
from app.tools.definition_formats import ToolFormat, format_definition
from app.tools.registry import (
    ToolName,
    all_tool_names,
    create_all_tool_definitions,
    create_coding_tool_definitions,
    create_read_only_tool_definitions,
    create_tool_definition,
)

ToolSet = Literal["all", "coding", "readonly"]

_NAMES: Final = tuple(name.value for name in all_tool_names)
_COMMANDS: Final = (ToolName.BASH, ToolName.POWERSHELL)
_READ_ONLY: Final = frozenset(definition.name for definition in create_read_only_tool_definitions())
_SCOPE_OF: Final[dict[str, Scope]] = {
    name.value: "exec" if name in _COMMANDS else "read" if name.value in _READ_ONLY else "write"
    for name in all_tool_names
}


class ToolCatalog:
    """Definitions in the form of the API that is to get them."""

    @property
    def names(self) -> tuple[str, ...]:
        """Every tool there is."""
        return _NAMES

    def scope(self, name: str) -> Scope | None:
        """Return the scope a key needs to call a tool; None for a tool that does not exist, which changes nothing."""
        return _SCOPE_OF.get(name)

    def get(self, name: str, form: ToolFormat) -> dict[str, Any]:
        """Return one tool's definition with the default options."""
        return format_definition(create_tool_definition(name), form)

    def list(self, form: ToolFormat, tools: ToolSet, options: WorkspaceOptions | None = None) -> list[dict[str, Any]]:
        """Return the definitions of a set of tools; with `options`, of those a workspace may use, as it has them."""
        options = options or WorkspaceOptions()
        allowed = options.tools
        return [
            format_definition(definition, form)
            for definition in _definitions(tools, options)
            if allowed is None or definition.name in allowed
        ]


def _definitions(tools: ToolSet, options: WorkspaceOptions) -> Sequence[ToolDefinition]:
    if tools == "coding":
        return create_coding_tool_definitions(options)
    if tools == "readonly":
        return create_read_only_tool_definitions(options)
    return create_all_tool_definitions(options)
