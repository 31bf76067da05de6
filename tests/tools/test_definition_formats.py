"""Definitions in the forms of the providers' APIs.

They are checked against those forms written down as JSON Schema, against the types of the providers' own packages, and
against a table of what the providers refuse that no type tells.
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, get_args

import jsonschema
import pytest
from pydantic import TypeAdapter

from app.domain.workspace import WorkspaceOptions
from app.tools.base import ToolAnnotations, ToolDefinition
from app.tools.definition_formats import ToolFormat, format_definition
from app.tools.registry import create_all_tool_definitions

DEFINITION = ToolDefinition(
    name="weigh",
    description="Weighs a thing.",
    parameters={
        "type": "object",
        "properties": {"thing": {"type": "string", "description": "What to weigh."}},
        "required": ["thing"],
        "additionalProperties": False,
    },
    annotations=ToolAnnotations(
        "Weigh", read_only_hint=True, destructive_hint=False, idempotent_hint=True, open_world_hint=False
    ),
)
ANNOTATIONS = {
    "title": "Weigh",
    "readOnlyHint": True,
    "destructiveHint": False,
    "idempotentHint": True,
    "openWorldHint": False,
}

PARAMETERS = {
    "type": "object",
    "properties": {
        "type": {"const": "object"},
        "properties": {"type": "object", "additionalProperties": {"type": "object"}},
        "required": {"type": "array", "items": {"type": "string"}},
        "additionalProperties": {"const": False},
    },
    "required": ["type", "properties", "additionalProperties"],
    "additionalProperties": False,
}
HINTS = {
    "type": "object",
    "properties": {"title": {"type": "string", "minLength": 1}}
    | {f"{hint}Hint": {"type": "boolean"} for hint in ("readOnly", "destructive", "idempotent", "openWorld")},
    "required": ["title", "readOnlyHint", "destructiveHint", "idempotentHint", "openWorldHint"],
    "additionalProperties": False,
}
NAME = {"type": "string", "pattern": "^[a-zA-Z0-9_-]{1,64}$"}
TEXT = {"type": "string", "minLength": 1, "maxLength": 1024}


def closed(**properties: Any) -> dict[str, Any]:
    return {"type": "object", "properties": properties, "required": list(properties), "additionalProperties": False}


FORMS: dict[str, dict[str, Any]] = {
    "native": closed(
        name=NAME,
        description=TEXT,
        parameters=PARAMETERS,
        annotations=HINTS,
        executionMode={"enum": ["parallel", "sequential"]},
    ),
    "mcp": closed(name=NAME, title=TEXT, description=TEXT, inputSchema=PARAMETERS, annotations=HINTS),
    "openai": closed(
        type={"const": "function"}, name=NAME, description=TEXT, parameters=PARAMETERS, strict={"const": False}
    ),
    "openai-chat": closed(
        type={"const": "function"},
        function=closed(name=NAME, description=TEXT, parameters=PARAMETERS, strict={"const": False}),
    ),
    "anthropic": closed(name=NAME, description=TEXT, input_schema=PARAMETERS),
}


@dataclass(frozen=True)
class Rules:
    """What a provider's API refuses in a tool whose schema is not strict: one offence fails the whole request.

    `root` and `anywhere` are keywords of JSON Schema that may not stand at the root of the parameters, or nowhere in
    them. Every one takes an object at the root and asks `items` of an array, or gives models less to go by without.
    """

    name: str
    property_name: str
    description: int | None
    root: frozenset[str]
    anywhere: frozenset[str] = frozenset()


_COMBINATORS = frozenset({"oneOf", "anyOf", "allOf"})
_CONDITIONS = frozenset({"if", "then", "else", "not", "dependentRequired", "dependentSchemas"})

# The answers that taught the rules: OpenAI "schema must have type 'object' and not have 'oneOf'/'anyOf'/'allOf'/'enum'/
# 'not' at the top level", "'allOf' is not permitted", "array schema missing items", "string too long. Expected a string
# with maximum length 1024"; Anthropic "input_schema does not support oneOf, allOf, or anyOf at the top level",
# "Property keys should match pattern '^[a-zA-Z0-9_.-]{1,64}$'", "String should match pattern
# '^[a-zA-Z0-9_-]{1,128}$'". Of the Model Context Protocol it is the section on tool names. Clients put a prefix before a
# name (`mcp__server__read`), so short names are worth more than the rules ask.
RULES: dict[str, Rules] = {
    "openai": Rules(
        name=r"[a-zA-Z0-9_-]{1,64}",
        property_name=r".{1,64}",
        description=1024,
        root=_COMBINATORS | {"enum", "not"},
        anywhere=frozenset({"allOf"}) | _CONDITIONS,
    ),
    "anthropic": Rules(
        name=r"[a-zA-Z0-9_-]{1,128}", property_name=r"[a-zA-Z0-9_.-]{1,64}", description=None, root=_COMBINATORS
    ),
    "mcp": Rules(name=r"[a-zA-Z0-9_.-]{1,128}", property_name=r".+", description=None, root=frozenset()),
}

# What is left when a provider reads a part of JSON Schema only. Gemini and smaller models follow no references and
# know no `null` in a list of types.
KEYWORDS = frozenset(
    {"type", "description", "enum", "default", "properties", "required", "additionalProperties", "items"}
    | {"minimum", "maximum", "minLength", "maxLength", "minItems", "maxItems", "maxProperties"}
)
TYPES = frozenset({"string", "integer", "number", "boolean", "array", "object"})


def nodes(schema: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """Yield a schema and every schema in it."""
    yield schema
    for inner in [*schema.get("properties", {}).values(), schema.get("items"), schema.get("additionalProperties")]:
        if isinstance(inner, Mapping):
            yield from nodes(inner)


def offences(definition: ToolDefinition, rules: Rules) -> list[str]:
    """Return what of a definition a provider would refuse."""
    found = []
    if not re.fullmatch(rules.name, definition.name):
        found.append(f"name {definition.name}")
    if rules.description is not None and len(definition.description) > rules.description:
        found.append(f"description of {len(definition.description)} characters")
    if definition.parameters.get("type") != "object":
        found.append("no object at the root")
    found += [f"{keyword} at the root" for keyword in sorted(rules.root & definition.parameters.keys())]
    for node in nodes(definition.parameters):
        found += [f"{keyword} within" for keyword in sorted(rules.anywhere & node.keys())]
        found += [f"key {key}" for key in node.get("properties", {}) if not re.fullmatch(rules.property_name, key)]
        if node.get("type") == "array" and "items" not in node:
            found.append("an array without items")
    return found


OPTIONS = {
    "the defaults": WorkspaceOptions(),
    "the longest texts": WorkspaceOptions.from_json(
        {
            "read": {"maxBytes": 1_000_000_000, "maxLines": 10_000_000, "lineNumbers": False},
            "write": {"maxBytes": 1_000_000_000},
            "edit": {"maxBytes": 1_000_000_000, "multipleMatches": "first", "fuzzy": True, "match": "original"},
            "bash": {"timeout": 86_400_000, "maxTimeout": 86_400_000, "maxOutputBytes": 1_000_000_000},
            "powershell": {"timeout": 86_400_000, "maxTimeout": 86_400_000, "maxOutputBytes": 1_000_000_000},
        }
        | {name: {"limit": 10_000_000, "maxOutputBytes": 1_000_000_000} for name in ("grep", "find", "ls")}
    ),
}


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("provider", RULES)
def test_no_provider_refuses_a_tool(provider: str, options: WorkspaceOptions) -> None:
    refused = {one.name: offences(one, RULES[provider]) for one in create_all_tool_definitions(options)}
    assert refused == {name: [] for name in refused}


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_schemas_say_what_they_say_in_the_keywords_that_everybody_reads(options: WorkspaceOptions) -> None:
    for definition in create_all_tool_definitions(options):
        for node in nodes(definition.parameters):
            assert node.keys() <= KEYWORDS, definition.name
            assert node["type"] in TYPES, definition.name


def test_what_a_provider_refuses_is_found() -> None:
    definition = ToolDefinition(
        name="weigh.it",
        description="x" * 1025,
        parameters={
            "type": "object",
            "anyOf": [],
            "properties": {"a b": {"type": "array"}, "c": {"type": "object", "properties": {"d": {"allOf": []}}}},
        },
        annotations=DEFINITION.annotations,
    )
    assert offences(definition, RULES["openai"]) == [
        "name weigh.it",
        "description of 1025 characters",
        "anyOf at the root",
        "an array without items",
        "allOf within",
    ]
    assert offences(definition, RULES["anthropic"]) == [
        "name weigh.it",
        "anyOf at the root",
        "key a b",
        "an array without items",
    ]
    assert offences(definition, RULES["mcp"]) == ["an array without items"]


def provider_types(form: ToolFormat) -> list[TypeAdapter[Any]]:
    """Return the types of a provider's package that an entry of `tools` has to fit.

    They are imported here: the packages take seconds, which only the process that runs these tests should spend.
    """
    if form == "anthropic":
        from anthropic.types import ToolParam, ToolUnionParam

        return [TypeAdapter(ToolParam), TypeAdapter(ToolUnionParam)]
    if form == "openai":
        from openai.types.responses import FunctionToolParam
        from openai.types.responses import ToolParam as AnyToolParam

        return [TypeAdapter(FunctionToolParam), TypeAdapter(AnyToolParam)]
    if form == "openai-chat":
        from openai.types.chat import ChatCompletionFunctionToolParam, ChatCompletionToolUnionParam

        return [TypeAdapter(ChatCompletionFunctionToolParam), TypeAdapter(ChatCompletionToolUnionParam)]
    from mcp.types import Tool

    return [TypeAdapter(Tool)]


@pytest.mark.parametrize("form", ["anthropic", "openai", "openai-chat", "mcp"])
def test_every_tool_fits_the_types_of_the_providers_own_package(form: ToolFormat) -> None:
    for adapter in provider_types(form):
        for definition in create_all_tool_definitions():
            value = format_definition(definition, form)
            taken = adapter.validate_python(value)
            # What a type does not know it drops without a word: what comes out has to be what went in.
            assert adapter.dump_python(taken, by_alias=True, exclude_unset=True, warnings="error") == value


@pytest.mark.parametrize("form", get_args(ToolFormat))
def test_every_tool_has_the_form_that_the_api_takes(form: ToolFormat) -> None:
    for definition in create_all_tool_definitions():
        jsonschema.validate(format_definition(definition, form), FORMS[form], jsonschema.Draft202012Validator)


@pytest.mark.parametrize(
    ("form", "expected"),
    [
        (
            "native",
            {
                "name": "weigh",
                "description": "Weighs a thing.",
                "parameters": DEFINITION.parameters,
                "annotations": ANNOTATIONS,
                "executionMode": "parallel",
            },
        ),
        (
            "mcp",
            {
                "name": "weigh",
                "title": "Weigh",
                "description": "Weighs a thing.",
                "inputSchema": DEFINITION.parameters,
                "annotations": ANNOTATIONS,
            },
        ),
        (
            "openai",
            {
                "type": "function",
                "name": "weigh",
                "description": "Weighs a thing.",
                "parameters": DEFINITION.parameters,
                "strict": False,
            },
        ),
        (
            "openai-chat",
            {
                "type": "function",
                "function": {
                    "name": "weigh",
                    "description": "Weighs a thing.",
                    "parameters": DEFINITION.parameters,
                    "strict": False,
                },
            },
        ),
        ("anthropic", {"name": "weigh", "description": "Weighs a thing.", "input_schema": DEFINITION.parameters}),
    ],
)
def test_a_definition_in_each_form(form: ToolFormat, expected: dict[str, Any]) -> None:
    assert format_definition(DEFINITION, form) == expected
