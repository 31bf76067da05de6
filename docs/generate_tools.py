"""Writes the generated parts of docs/tools.md: `make docs`, or `python -m docs.generate_tools`.

The page is written by hand but for the blocks between `<!-- begin: KIND TOOL` and `<!-- end -->`. In a table of details
or options the last column is written by hand too and kept; a new row comes with an empty one, to be filled in. An
example is a call that is really made, in a directory with the files its comment lists.
"""

# ruff: noqa: INP001 - a script beside the page it writes

import asyncio
import json
import os
import re
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from pydantic import BaseModel

from app.domain.workspace import WorkspaceOptions
from app.errors import ToolError
from app.sandbox.local import LocalSandbox
from app.tools._shell import ShellDetails
from app.tools.edit import EditDetails
from app.tools.find import FindDetails
from app.tools.grep import GrepDetails
from app.tools.ls import LsDetails
from app.tools.model_tool import DetailsModel
from app.tools.read import ReadDetails
from app.tools.registry import ToolsOptions, create_tool, create_tool_definition
from app.tools.write import WriteDetails

PAGE: Final = Path(__file__).with_name("tools.md")

DETAILS: Final[Mapping[str, type[DetailsModel]]] = {
    "read": ReadDetails,
    "write": WriteDetails,
    "edit": EditDetails,
    "bash": ShellDetails,
    "powershell": ShellDetails,
    "grep": GrepDetails,
    "find": FindDetails,
    "ls": LsDetails,
}

_BLOCK: Final = re.compile(r"<!-- begin: (\w+) (\w+)(.*?)-->\n(.*?)<!-- end -->", re.DOTALL)
_SHOWN_ROOT: Final = "/srv/workspaces/demo"
_SHOWN_URL: Final = "/v1/calls/call_01m8pk0mq7e71bgqe673033873/output"
_MODIFIED: Final = 1_767_225_600  # 2026-01-01T00:00:00Z
_LINE: Final = 120


def render(page: str) -> str:
    """Return the page with its generated blocks made anew."""

    def block(match: re.Match[str]) -> str:
        kind, tool, comment, old = match.groups()
        body = _BLOCKS[kind](tool, comment, old)
        return f"<!-- begin: {kind} {tool}{comment}-->\n{body}<!-- end -->"

    return _BLOCK.sub(block, page)


def _description(tool: str, _comment: str, _old: str) -> str:
    definition = create_tool_definition(tool)
    hints = {
        "read-only": definition.annotations.read_only_hint,
        "destructive": definition.annotations.destructive_hint,
        "idempotent": definition.annotations.idempotent_hint,
        "open-world": definition.annotations.open_world_hint,
    }
    listed = ", ".join(name for name, holds in hints.items() if holds) or "none"
    mode = f"Execution mode: `{definition.execution_mode}`, unless the option `executionMode` says otherwise."
    return f"> {definition.description}\n\n{mode} Hints that hold: {listed}.\n"


def _input(tool: str, _comment: str, _old: str) -> str:
    rows = _argument_rows(create_tool_definition(tool).parameters, "")
    return _table(("argument", "type", "meaning"), rows)


def _argument_rows(schema: Mapping[str, Any], prefix: str) -> list[tuple[str, ...]]:
    rows: list[tuple[str, ...]] = []
    for name, field in schema["properties"].items():
        needed = "" if name in schema.get("required", []) else " Optional."
        default = f" Default `{json.dumps(field['default'])}`." if "default" in field else ""
        rows.append((f"`{prefix}{name}`", _type(field), f"{field['description']}{default or needed}"))
        items = field.get("items", {})
        if items.get("type") == "object":
            rows += _argument_rows(items, f"{prefix}{name}[].")
    return rows


def _details(tool: str, _comment: str, old: str) -> str:
    kept = _kept(old)
    model = DETAILS[tool]
    schema = model.model_json_schema(mode="serialization")
    rows = [
        (f"`{name}`", _type(field, schema.get("$defs", {})), kept.get(f"`{name}`", ""))
        for name, field in schema["properties"].items()
    ]
    return _table(("field", "type", "meaning"), rows)


def _options(tool: str, _comment: str, old: str) -> str:
    kept = _kept(old)
    model: type[BaseModel] = type(getattr(WorkspaceOptions(), tool))
    defaults = json.loads(model().model_dump_json(by_alias=True))
    rows = [
        (f"`{name}`", _type(field), f"`{json.dumps(defaults[name])}`", kept.get(f"`{name}`", ""))
        for name, field in model.model_json_schema()["properties"].items()
    ]
    return _table(("option", "type", "default", "meaning"), rows)


def _example(tool: str, comment: str, old: str) -> str:
    """Return what a call answers; what stood there where the tool cannot run here.

    The comment is JSON: `files` (contents by path), `options` (of the workspace), `arguments`.
    """
    spec = json.loads(comment)
    if tool == "powershell" and shutil.which("pwsh") is None:
        return old
    with tempfile.TemporaryDirectory() as directory:
        root = Path(directory).resolve()
        for path, content in spec.get("files", {}).items():
            (root / path).parent.mkdir(parents=True, exist_ok=True)
            (root / path).write_text(content, newline="")
        for place in [root, *root.rglob("*")]:
            os.utime(place, (_MODIFIED, _MODIFIED))
        options = WorkspaceOptions.from_json(spec.get("options", {}))
        code, text, details = asyncio.run(_call(tool, str(root), options, spec["arguments"]))
    outcome = "" if code is None else f" (`isError`, code `{code}`)"
    workspace = {key: spec[key] for key in ("files", "options") if key in spec}
    setting = (
        f"In a workspace made with\n\n{_fenced('json', _json(workspace))}\nthe arguments\n\n"
        if workspace
        else "The arguments\n\n"
    )
    return (
        f"{setting}{_fenced('json', _json(spec['arguments']))}\n"
        f"give the text{outcome}\n\n{_fenced('text', text)}\n"
        f"and the details\n\n{_fenced('json', _json(details))}"
    )


async def _call(
    tool: str, root: str, options: WorkspaceOptions, arguments: dict[str, Any]
) -> tuple[str | None, str, dict[str, Any]]:
    """Make a call and return its error code, its text and its details."""
    sandbox = LocalSandbox()
    means = ToolsOptions(options=options, sandbox=sandbox, output_url=lambda _call: _SHOWN_URL)
    code = None
    try:
        result = await create_tool(tool, root, means).execute("call-1", arguments)
        text = "\n".join(block["text"] for block in result.content if block["type"] == "text")
        details = result.details
    except ToolError as error:
        code, text, details = error.code.value, error.message, error.details
    finally:
        await sandbox.close()
    return code, text.replace(root, _SHOWN_ROOT), _steady(details, root)


def _steady(details: dict[str, Any], root: str) -> dict[str, Any]:
    """Return details in which nothing tells of this run or this machine."""
    shown: dict[str, Any] = json.loads(json.dumps(details).replace(root, _SHOWN_ROOT))
    for name, value in (("durationMs", 4), ("sandbox", {"tier": "namespace", "missing": [], "network": "none"})):
        if name in shown:
            shown[name] = value
    return shown


_BLOCKS: Final = {
    "description": _description,
    "input": _input,
    "details": _details,
    "options": _options,
    "example": _example,
}


def _kept(table: str) -> dict[str, str]:
    """Return the last cell of each row of a table by its first."""
    rows = [line.strip().removeprefix("| ").removesuffix("|").split(" | ") for line in table.splitlines()]
    return {cells[0]: cells[-1].strip() for cells in rows if len(cells) > 1}


def _table(head: tuple[str, ...], rows: Sequence[tuple[str, ...]]) -> str:
    lines = [head, tuple("---" for _ in head), *rows]
    return "".join(f"| {' | '.join(_escaped(cell) for cell in cells)} |\n" for cells in lines)


def _escaped(cell: str) -> str:
    return cell.replace("|", "\\|")


def _type(schema: Mapping[str, Any], definitions: Mapping[str, Any] | None = None) -> str:
    if "anyOf" in schema:
        return " or ".join(_type(branch, definitions) for branch in schema["anyOf"])
    if "$ref" in schema:
        return "object"
    if "enum" in schema:
        return ", ".join(f"`{value}`" for value in schema["enum"])
    if "const" in schema:
        return f"`{schema['const']}`"
    kind = schema.get("type", "any")
    if kind == "array":
        items = schema.get("items", {})
        inner = "object" if "$ref" in items else items.get("type", "any")
        return f"array of {inner}s"
    least, most = schema.get("minimum"), schema.get("maximum")
    if least is None:
        return str(kind)
    return f"{kind}, from {least}" if most is None else f"{kind}, {least} to {most}"


def _json(value: Any, indent: str = "") -> str:
    """Return JSON that takes a line where one is enough."""
    line = json.dumps(value, ensure_ascii=False)
    if not isinstance(value, dict | list) or len(indent) + len(line) <= _LINE:
        return line
    deeper = f"{indent}  "
    if isinstance(value, dict):
        members = [f"{json.dumps(key)}: {_json(inner, deeper)}" for key, inner in value.items()]
        return "{\n" + ",\n".join(f"{deeper}{member}" for member in members) + f"\n{indent}}}"
    return "[\n" + ",\n".join(f"{deeper}{_json(inner, deeper)}" for inner in value) + f"\n{indent}]"


def _fenced(language: str, text: str) -> str:
    fence = "````" if "```" in text else "```"
    return f"{fence}{language}\n{text}\n{fence}\n"


if __name__ == "__main__":
    PAGE.write_text(render(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
