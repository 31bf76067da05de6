"""The common part of every tool: a schema, a validator and a runner made from one arguments model.

The rules for arguments, the same for every tool:

* strict: no unknown field, no conversion, with two exceptions below;
* a string that is a JSON number counts as that number where a number is asked for (`"5"`, `"1e3"`), and a number
  without a fraction counts as an integer (`5.0`) as far as a float can tell integers apart (2^53);
* `null` for an optional field means that it is absent; for a required one it is an error;
* a JSON string that holds an object counts as this object;
* what other tool sets call a field is renamed (`spellings`, and snake_case for every field). When a call has both the
  spelling and the real name, both stay, so that validation names the one that is unknown.
"""

import json
import math
import re
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any, ClassVar, Final, Generic, TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError
from pydantic.alias_generators import to_camel
from pydantic_core import ErrorDetails

from app.domain import json_codec
from app.domain.abort import AbortSignal
from app.domain.json_model import JsonModel
from app.domain.tool_call import ExecutionMode, ToolResult
from app.errors import ErrorCode, ToolError
from app.tools.base import OnUpdate, ToolAnnotations, ToolDefinition, ToolUpdate

_SHOWN_CHARACTERS: Final = 80
_LISTED_ERRORS: Final = 50
_MAX_EXACT_FLOAT: Final = 2**53
_JSON_NUMBER: Final = re.compile(r"-?(?:0|[1-9]\d*)(?:\.\d+)?(?:[eE][+-]?\d+)?", re.ASCII)
_LONGEST_NUMBER: Final = 40
_SCHEMA_ORDER: Final = ("type", "description", "enum", "const", "default", "properties", "required")
_PATH_SPELLINGS: Final = ("file_path", "filePath")


class ArgumentsModel(JsonModel):
    """Arguments of a tool: camelCase, strict, nothing unknown. Field descriptions are what a model reads.

    An optional field is written `x: int | None = Field(default=None, ...)`; its schema says `integer`, not required.
    """

    model_config = ConfigDict(
        allow_inf_nan=False,
        # Any limit on strings makes pydantic look whether they are Unicode: half of a surrogate pair is refused here,
        # and not by whatever would have to encode it later.
        str_min_length=0,
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
    """An AgentTool whose arguments are a pydantic model. A subclass sets `arguments_model`, `spellings`; writes `run`.

    `spellings` maps what other tool sets call a field to this tool's name for it, at the top level of the arguments.
    Every field is known by its snake_case name too, and `path` by `file_path`.
    """

    arguments_model: type[A]
    spellings: ClassVar[Mapping[str, str]] = {}

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
        """Return `args` with known spellings from elsewhere replaced. Never raises, never changes `args` itself."""
        value = parse_container(args, dict) if isinstance(args, str) else args
        return rename_fields(value, _known_spellings(type(self))) if isinstance(value, Mapping) else value

    def validate_arguments(self, args: Any) -> dict[str, Any]:
        """Return the arguments as they will run: camelCase JSON values, absent fields left absent.

        Raises:
            ToolError: `invalid_arguments`; the text names every field that does not fit, `details.errors` lists
                `{pointer, code, message}`.
        """
        return self._validate(args)[1]

    async def execute(
        self,
        tool_call_id: str,
        args: Mapping[str, Any],
        signal: AbortSignal | None = None,
        on_update: OnUpdate | None = None,
    ) -> ToolResult:
        """Run one call. `args` are validated arguments, or raw ones, which are prepared and validated first."""
        model, _ = self._validate(self.prepare_arguments(args))
        return await self.run(tool_call_id, model, signal or AbortSignal(), on_update or ignore_update)

    @abstractmethod
    async def run(self, tool_call_id: str, args: A, signal: AbortSignal, on_update: OnUpdate) -> ToolResult:
        """Do the work of one call. Raises ToolError and Aborted as `AgentTool.execute` says."""

    def _validate(self, args: Any) -> tuple[A, dict[str, Any]]:
        # Most arguments are right as they are: one pass of the compiled validator, and a look for nulls, which it
        # takes for optional fields and which mean "absent".
        try:
            model = self.arguments_model.model_validate(args)
        except ValidationError:
            pass
        else:
            if not _holds_null(args):
                return model, dict(args)
        schema = parameters_of(self.arguments_model)
        value = _converted(args, schema)
        try:
            return self.arguments_model.model_validate(value), value
        except ValidationError as error:
            raise _invalid_arguments(self.name, schema, error.errors(include_url=False)) from None


def define(
    name: str,
    description: str,
    arguments_model: type[ArgumentsModel],
    annotations: ToolAnnotations,
    execution_mode: ExecutionMode,
) -> ToolDefinition:
    """Return a definition whose JSON Schema is made from the arguments model: inlined, without pydantic's titles."""
    return ToolDefinition(
        name=name,
        description=description,
        parameters=parameters_of(arguments_model),
        annotations=annotations,
        execution_mode=execution_mode,
    )


@cache
def parameters_of(arguments_model: type[ArgumentsModel]) -> dict[str, Any]:
    """Return the JSON Schema of a model's arguments, the same object every time: read it, do not change it."""
    raw = arguments_model.model_json_schema(by_alias=True)
    schema = _plain_schema(raw, raw.get("$defs", {}))
    # The docstring of the model is for people who read the code; the definition has a description of its own.
    schema.pop("description", None)
    return schema


def rename_fields(args: Mapping[str, Any], spellings: Mapping[str, str]) -> dict[str, Any]:
    """Return `args` with the keys of `spellings` renamed, unless the real name is taken. Order is kept."""
    if spellings.keys().isdisjoint(args):
        return dict(args)
    renamed: dict[str, Any] = {}
    for key, value in args.items():
        name = spellings.get(key, key)
        renamed[key if name in args or name in renamed else name] = value
    return renamed


def parse_container(text: str, kinds: type | tuple[type, ...]) -> Any:
    """Return the value of a JSON text when it is one of `kinds` (`dict`, `list`), else the text itself."""
    try:
        value = json_codec.parse(text.encode("utf-8"))
    except ValueError:
        return text
    return value if isinstance(value, kinds) else text


def snake_case_spellings(model: type[BaseModel]) -> dict[str, str]:
    """Return the snake_case name of each field of a model that differs from its name on the wire."""
    names = ((name, field.alias or name) for name, field in model.model_fields.items())
    return {name: alias for name, alias in names if name != alias}


@cache
def _known_spellings(tool: type[ModelTool[Any]]) -> dict[str, str]:
    known = snake_case_spellings(tool.arguments_model)
    if "path" in tool.arguments_model.model_fields:
        known |= dict.fromkeys(_PATH_SPELLINGS, "path")
    return known | dict(tool.spellings)


def _plain_schema(node: Mapping[str, Any], definitions: Mapping[str, Any]) -> dict[str, Any]:
    """Return a schema node with references inlined, titles dropped, `x | None` told by absence, keys in one order."""
    merged = dict(node)
    if "$ref" in merged:
        referenced = definitions[str(merged.pop("$ref")).rpartition("/")[2]]
        merged = {**referenced, **merged}
    if "anyOf" in merged:
        branches = [branch for branch in merged["anyOf"] if branch != {"type": "null"}]
        if len(branches) == 1:
            del merged["anyOf"]
            return _plain_schema({**branches[0], **merged}, definitions)
        merged["anyOf"] = [_plain_schema(branch, definitions) for branch in branches]
    if merged.get("default", ...) is None:
        del merged["default"]
    if "properties" in merged:
        merged["properties"] = {key: _plain_schema(value, definitions) for key, value in merged["properties"].items()}
    for key in ("items", "additionalProperties"):
        if isinstance(merged.get(key), Mapping):
            merged[key] = _plain_schema(merged[key], definitions)
    for key in ("title", "$defs"):
        merged.pop(key, None)
    order = [key for key in _SCHEMA_ORDER if key in merged]
    return {key: merged[key] for key in [*order, *(key for key in merged if key not in order)]}


def _holds_null(value: Any) -> bool:
    if isinstance(value, dict):
        return any(inner is None or (isinstance(inner, dict | list) and _holds_null(inner)) for inner in value.values())
    return any(inner is None or (isinstance(inner, dict | list) and _holds_null(inner)) for inner in value)


def _converted(value: Any, schema: Mapping[str, Any]) -> Any:
    """Return `value` with numeric strings as numbers and nulls of optional fields left out, as the schema says."""
    kind = schema.get("type")
    if kind == "object" and isinstance(value, Mapping):
        properties: Mapping[str, Any] = schema.get("properties", {})
        required = schema.get("required", ())
        others = schema.get("additionalProperties")
        rest: Mapping[str, Any] = others if isinstance(others, Mapping) else {}
        return {
            key: _converted(inner, properties.get(key, rest))
            for key, inner in value.items()
            if inner is not None or key not in properties or key in required
        }
    if kind == "array" and isinstance(value, list):
        items = schema.get("items", {})
        return [_converted(inner, items) for inner in value]
    if kind in {"integer", "number"}:
        return _number(value, integral=kind == "integer")
    return value


def _number(value: Any, *, integral: bool) -> Any:
    number = value
    if isinstance(value, str):
        if len(value) > _LONGEST_NUMBER or _JSON_NUMBER.fullmatch(value) is None:
            return value
        number = float(value) if any(mark in value for mark in ".eE") else int(value)
    if isinstance(number, float):
        if integral and number.is_integer() and abs(number) <= _MAX_EXACT_FLOAT:
            return int(number)
        if integral or not math.isfinite(number):
            return value
    return number


@dataclass(frozen=True, slots=True)
class _Problem:
    """What is wrong with one field: a stable code and words for the caller."""

    code: str
    message: str


def _invalid_arguments(tool: str, schema: Mapping[str, Any], errors: Iterable[ErrorDetails]) -> ToolError:
    texts: list[str] = []
    listed: list[dict[str, str]] = []
    total = 0
    for error in errors:
        total += 1
        if total > _LISTED_ERRORS:
            continue
        location = error["loc"]
        if error["type"] == "string_unicode" and location[-1:] == ("[key]",):
            location = location[:-1]  # pydantic's mark for the name of a member
        problem = _problem(error, _node_at(schema, location[:-1]), _node_at(schema, location))
        texts.append(f"{_field_name(location)}: {problem.message}")
        listed.append({"pointer": _pointer(location), "code": problem.code, "message": problem.message})
    if total > _LISTED_ERRORS:
        texts.append(f"and {total - _LISTED_ERRORS} more")
    message = f"Invalid arguments for {tool}: {'; '.join(texts)}"
    return ToolError(ErrorCode.INVALID_ARGUMENTS, message, {"errors": listed})


def _problem(error: ErrorDetails, parent: Mapping[str, Any], node: Mapping[str, Any]) -> _Problem:
    kind = error["type"]
    context = error.get("ctx", {})
    got = f"(got {_shown(error['input'])})"
    if kind == "missing":
        return _Problem("required", "required")
    if kind == "extra_forbidden":
        known = ", ".join(parent.get("properties", {})) or "none"
        return _Problem("unknown_field", f"unknown argument (known: {known})")
    if kind in _RANGES:
        words, limit = _RANGES[kind]
        return _Problem("out_of_range", f"must be {words} {context[limit]} {got}")
    if kind in _LENGTHS:
        words, limit, unit = _LENGTHS[kind]
        size = len(error["input"])
        return _Problem("wrong_length", f"must have {words} {_counted(context[limit], unit)} (has {size})")
    if kind == "literal_error":
        allowed = ", ".join(_shown(value) for value in node.get("enum", [node.get("const")]))
        return _Problem("not_allowed", f"must be one of {allowed} {got}")
    if kind == "string_unicode":
        return _Problem("invalid", f"must be valid Unicode: half of a surrogate pair is no character {got}")
    if kind == "value_error":
        return _Problem("invalid", str(context["error"]))
    if kind in _TYPES:
        return _Problem("wrong_type", f"must be {_TYPES[kind]} {got}")
    return _Problem("invalid", f"{error['msg'][:1].lower()}{error['msg'][1:]} {got}")


_RANGES: Final[Mapping[str, tuple[str, str]]] = {
    "greater_than_equal": ("at least", "ge"),
    "greater_than": ("greater than", "gt"),
    "less_than_equal": ("at most", "le"),
    "less_than": ("less than", "lt"),
}
_LENGTHS: Final[Mapping[str, tuple[str, str, str]]] = {
    "string_too_short": ("at least", "min_length", "character"),
    "string_too_long": ("at most", "max_length", "character"),
    "too_short": ("at least", "min_length", "item"),
    "too_long": ("at most", "max_length", "item"),
}
_TYPES: Final[Mapping[str, str]] = {
    "string_type": "a string",
    "int_type": "an integer",
    "float_type": "a number",
    "finite_number": "a finite number",
    "bool_type": "true or false",
    "list_type": "an array",
    "dict_type": "an object",
    "model_type": "an object",
    "invalid_key": "named by a string",
}


def _node_at(schema: Mapping[str, Any], location: Iterable[int | str]) -> Mapping[str, Any]:
    node = schema
    for step in location:
        following = node.get("items") if isinstance(step, int) else node.get("properties", {}).get(step)
        if following is None:
            following = node.get("additionalProperties")
        node = following if isinstance(following, Mapping) else {}
    return node


def _field_name(location: tuple[int | str, ...]) -> str:
    if not location:
        return "arguments"
    name = ""
    for step in location:
        if isinstance(step, int):
            name += f"[{step}]"
        else:
            name += f".{_short(step)}" if name else _short(step)
    return name


def _pointer(location: tuple[int | str, ...]) -> str:
    """Return the RFC 6901 pointer of a place in the arguments."""
    return "".join(f"/{_short(str(step)).replace('~', '~0').replace('/', '~1')}" for step in location)


def _short(text: str) -> str:
    cut = text if len(text) <= _SHOWN_CHARACTERS else f"{text[: _SHOWN_CHARACTERS - 1]}…"
    return cut.encode("utf-8", "backslashreplace").decode("utf-8")


def _shown(value: Any) -> str:
    """Return a value as JSON in at most 80 characters; a long or nested one by its kind."""
    if isinstance(value, str):
        text = json.dumps(value[:_SHOWN_CHARACTERS], ensure_ascii=False)
        return _short(text) if len(value) <= _SHOWN_CHARACTERS else f"{_short(text)} of {len(value)} characters"
    if isinstance(value, int) and not isinstance(value, bool) and value.bit_length() > 128:
        return "an integer of more than 128 bits"
    if value is None or isinstance(value, bool | int | float):
        return json.dumps(value)
    if isinstance(value, Mapping):
        return "an object"
    return "an array" if isinstance(value, list | tuple) else f"a {type(value).__name__}"


def _counted(number: int, unit: str) -> str:
    return f"{number} {unit}" if number == 1 else f"{number} {unit}s"
