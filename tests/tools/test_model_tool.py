"""Arguments: what a model is shown, what is accepted from it and how a refusal reads."""

import json
import time
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

import jsonschema
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import Field, field_validator

from app.domain.abort import AbortSignal
from app.domain.tool_call import ToolResult, text_content
from app.errors import ErrorCode, ToolError
from app.tools.base import OnUpdate, PartialResult, ToolAnnotations
from app.tools.model_tool import ArgumentsModel, ModelTool, define

pytestmark = pytest.mark.anyio


class Part(ArgumentsModel):
    """One part of a parcel."""

    old_name: str = Field(description="What it was called.")
    heavy: bool = Field(default=False, description="Whether it takes two people.")


class ParcelArguments(ArgumentsModel):
    """Internal words about the model."""

    path: str = Field(description="Where it goes.", max_length=200)
    max_weight: Annotated[int, Field(ge=1, le=50)] | None = Field(default=None, description="Kilograms.")
    ratio: Annotated[float, Field(gt=0)] = Field(default=1.5, description="Of something.")
    match: Literal["near", "far"] = Field(default="near", description="Which one.")
    title: str | None = Field(default=None, description="A field that is called title.")
    parts: list[Part] | None = Field(default=None, description="What is in it.", min_length=1, max_length=3)
    labels: dict[str, str] = Field(default_factory=dict, description="Free labels.")
    sizes: dict[str, Literal["s", "m"]] | None = Field(default=None, description="Size by name.")

    @field_validator("labels")
    @classmethod
    def _no_empty_label(cls, value: dict[str, str]) -> dict[str, str]:
        if "" in value:
            raise ValueError("a label must have a name")
        return value


class ParcelTool(ModelTool[ParcelArguments]):
    arguments_model = ParcelArguments
    spellings: ClassVar[Mapping[str, str]] = {"weight": "maxWeight"}

    async def run(
        self, tool_call_id: str, args: ParcelArguments, signal: AbortSignal, on_update: OnUpdate
    ) -> ToolResult:
        on_update(PartialResult(content=[], details={}))
        return ToolResult(
            content=text_content(tool_call_id), details=args.model_dump(by_alias=True, exclude_unset=True)
        )


TOOL = ParcelTool(
    define(
        "parcel",
        "Sends a parcel.",
        ParcelArguments,
        ToolAnnotations(
            "Parcel", read_only_hint=False, destructive_hint=False, idempotent_hint=True, open_world_hint=False
        ),
        "sequential",
    )
)


def accepted(args: Any) -> dict[str, Any]:
    return TOOL.validate_arguments(TOOL.prepare_arguments(args))


def refusal(args: Any) -> ToolError:
    with pytest.raises(ToolError) as caught:
        accepted(args)
    assert caught.value.code is ErrorCode.INVALID_ARGUMENTS
    return caught.value


def message(args: Any) -> str:
    text = refusal(args).message
    prefix = "Invalid arguments for parcel: "
    assert text.startswith(prefix)
    return text.removeprefix(prefix)


def test_schema_is_inlined_plain_and_says_what_is_optional_by_absence() -> None:
    assert TOOL.parameters == {
        "type": "object",
        "properties": {
            "path": {"type": "string", "description": "Where it goes.", "maxLength": 200},
            "maxWeight": {"type": "integer", "description": "Kilograms.", "maximum": 50, "minimum": 1},
            "ratio": {"type": "number", "description": "Of something.", "default": 1.5, "exclusiveMinimum": 0},
            "match": {"type": "string", "description": "Which one.", "enum": ["near", "far"], "default": "near"},
            "title": {"type": "string", "description": "A field that is called title."},
            "parts": {
                "type": "array",
                "description": "What is in it.",
                "items": {
                    "type": "object",
                    "description": "One part of a parcel.",
                    "properties": {
                        "oldName": {"type": "string", "description": "What it was called."},
                        "heavy": {"type": "boolean", "description": "Whether it takes two people.", "default": False},
                    },
                    "required": ["oldName"],
                    "additionalProperties": False,
                },
                "maxItems": 3,
                "minItems": 1,
            },
            "labels": {"type": "object", "description": "Free labels.", "additionalProperties": {"type": "string"}},
            "sizes": {
                "type": "object",
                "description": "Size by name.",
                "additionalProperties": {"type": "string", "enum": ["s", "m"]},
            },
        },
        "required": ["path"],
        "additionalProperties": False,
    }
    jsonschema.Draft202012Validator.check_schema(TOOL.parameters)
    assert list(TOOL.parameters) == ["type", "properties", "required", "additionalProperties"]
    assert list(TOOL.parameters["properties"]["match"]) == ["type", "description", "enum", "default"]


def test_definition_carries_name_description_annotations_and_mode() -> None:
    definition = TOOL.definition
    assert (definition.name, definition.description, definition.execution_mode) == (
        "parcel",
        "Sends a parcel.",
        "sequential",
    )
    assert (TOOL.name, TOOL.description, TOOL.execution_mode) == ("parcel", "Sends a parcel.", "sequential")


def test_good_arguments_come_back_as_they_are_without_defaults() -> None:
    args = {"path": "a", "parts": [{"oldName": "x"}], "labels": {"k": "v"}}
    assert accepted(args) == args


def test_arguments_may_be_a_json_string_that_holds_the_object() -> None:
    assert accepted('{"path": "a", "maxWeight": 4}') == {"path": "a", "maxWeight": 4}


@pytest.mark.parametrize("args", ["", "[]", "5", "{", "null", '"{}"', '{"path": "\\ud800"}', "[" * 5000])
def test_a_string_that_holds_no_object_is_refused(args: str) -> None:
    assert message(args).startswith("arguments: must be an object (got ")


@pytest.mark.parametrize("args", [None, [], 3, True, 1.5, b"x"])
def test_what_is_no_object_is_refused(args: Any) -> None:
    error = refusal(args)
    assert error.message.startswith("Invalid arguments for parcel: arguments: must be an object (got ")
    assert [problem["pointer"] for problem in error.details["errors"]] == [""]


@pytest.mark.parametrize(
    ("given_value", "kept"),
    [("5", 5), ("1e1", 10), ("5.0", 5), (5.0, 5), (7, 7), ("50", 50)],
)
def test_numeric_strings_and_whole_floats_count_as_integers(given_value: Any, kept: int) -> None:
    value = accepted({"path": "a", "maxWeight": given_value})["maxWeight"]
    assert (value, type(value)) == (kept, int)


@pytest.mark.parametrize(
    "value",
    ["", " 5", "5 ", "+5", "05", "0x5", "five", "5,0", "\u0665", "1\u0665", "NaN", "1_0", 5.5, 1e308, True, [5], {}],
)
def test_what_is_no_whole_number_is_no_integer(value: Any) -> None:
    assert message({"path": "a", "maxWeight": value}).startswith("maxWeight: must be an integer (got ")


def test_a_number_beyond_exact_floats_is_no_integer() -> None:
    assert message({"path": "a", "maxWeight": "1e17"}) == 'maxWeight: must be an integer (got "1e17")'
    assert message({"path": "a", "maxWeight": 2**64 - 1}) == f"maxWeight: must be at most 50 (got {2**64 - 1})"


def test_numbers_may_come_as_strings_but_not_as_nan() -> None:
    assert accepted({"path": "a", "ratio": "0.25"})["ratio"] == 0.25
    assert accepted({"path": "a", "ratio": 2})["ratio"] == 2
    assert message({"path": "a", "ratio": "1e999"}) == 'ratio: must be a number (got "1e999")'
    assert message({"path": "a", "ratio": float("nan")}) == "ratio: must be a finite number (got NaN)"


def test_only_numbers_are_converted() -> None:
    assert message({"path": 5}) == "path: must be a string (got 5)"
    assert message({"path": "a", "parts": [{"oldName": "x", "heavy": "true"}]}) == (
        'parts[0].heavy: must be true or false (got "true")'
    )


def test_null_is_absence_for_an_optional_field_also_inside_a_list() -> None:
    args = {"path": "a", "maxWeight": None, "match": None, "labels": None, "parts": [{"oldName": "x", "heavy": None}]}
    assert accepted(args) == {"path": "a", "parts": [{"oldName": "x"}]}
    assert accepted({"path": "a", "title": None}) == {"path": "a"}


def test_null_for_a_required_field_is_an_error() -> None:
    assert message({"path": None, "parts": [{"oldName": None}]}) == (
        "path: must be a string (got null); parts[0].oldName: must be a string (got null)"
    )


def test_an_error_names_every_field_and_what_is_known() -> None:
    error = refusal({"maxWeight": 0, "extra": 1, "match": "close", "parts": [{"size": 1}], "labels": {"a/b": 1}})
    assert error.message == (
        "Invalid arguments for parcel: path: required; maxWeight: must be at least 1 (got 0); "
        'match: must be one of "near", "far" (got "close"); parts[0].oldName: required; '
        "parts[0].size: unknown argument (known: oldName, heavy); labels.a/b: must be a string (got 1); "
        "extra: unknown argument (known: path, maxWeight, ratio, match, title, parts, labels, sizes)"
    )
    assert error.details == {
        "errors": [
            {"pointer": "/path", "code": "required", "message": "required"},
            {"pointer": "/maxWeight", "code": "out_of_range", "message": "must be at least 1 (got 0)"},
            {"pointer": "/match", "code": "not_allowed", "message": 'must be one of "near", "far" (got "close")'},
            {"pointer": "/parts/0/oldName", "code": "required", "message": "required"},
            {
                "pointer": "/parts/0/size",
                "code": "unknown_field",
                "message": "unknown argument (known: oldName, heavy)",
            },
            {"pointer": "/labels/a~1b", "code": "wrong_type", "message": "must be a string (got 1)"},
            {
                "pointer": "/extra",
                "code": "unknown_field",
                "message": "unknown argument (known: path, maxWeight, ratio, match, title, parts, labels, sizes)",
            },
        ]
    }


def test_what_is_allowed_is_told_also_for_values_of_free_names() -> None:
    assert message({"path": "a", "sizes": {"hat": "xl"}}) == 'sizes.hat: must be one of "s", "m" (got "xl")'


def test_lengths_are_told_with_what_there_is() -> None:
    part = {"oldName": "x"}
    assert message({"path": "p" * 201, "parts": []}) == (
        "path: must have at most 200 characters (has 201); parts: must have at least 1 item (has 0)"
    )
    assert message({"path": "p", "parts": [part] * 4}) == "parts: must have at most 3 items (has 4)"


def test_a_rule_of_the_model_itself_is_told_in_its_own_words() -> None:
    assert message({"path": "a", "labels": {"": "x"}}) == "labels: a label must have a name"


def test_half_a_surrogate_pair_is_refused_and_not_echoed_raw() -> None:
    text = message({"path": "a\ud800"})
    assert text == 'path: must be valid Unicode: half of a surrogate pair is no character (got "a\\ud800")'
    assert message({"path": "a", "labels": {"x": "\udc00"}}).startswith("labels.x: must be valid Unicode")
    assert message({"path": "a", "labels": {"\ud800": "x"}}).endswith(
        ': must be valid Unicode: half of a surrogate pair is no character (got "\\ud800")'
    )
    assert "[key]" not in message({"path": "a", "labels": {"\ud800": "x"}})
    unknown = refusal({"path": "a", "\udfff": 1})
    json.dumps(unknown.details, ensure_ascii=False).encode("utf-8")
    unknown.message.encode("utf-8")


def test_huge_values_names_and_lists_are_not_echoed_whole() -> None:
    assert len(message({"path": "a", "maxWeight": "9" * 10_000_000})) < 200
    assert message({"path": "a", "maxWeight": 10**5000}) == (
        "maxWeight: must be at most 50 (got an integer of more than 128 bits)"
    )
    assert len(message({"path": "a", "n" * 1_000_000: 1})) < 300
    text = message({"path": "a", "labels": {f"k{number}": 1 for number in range(1000)}})
    assert text.endswith("labels.k49: must be a string (got 1); and 950 more")
    assert len(refusal({"path": "a", "labels": {f"k{n}": 1 for n in range(1000)}}).details["errors"]) == 50


def test_spellings_are_renamed_in_place() -> None:
    prepared = TOOL.prepare_arguments({"weight": 3, "file_path": "a", "old_stuff": 1})
    assert list(prepared.items()) == [("maxWeight", 3), ("path", "a"), ("old_stuff", 1)]
    assert TOOL.prepare_arguments({"max_weight": 3, "filePath": "b"}) == {"maxWeight": 3, "path": "b"}


def test_a_spelling_beside_the_real_name_stays_and_is_refused_by_name() -> None:
    assert message({"path": "a", "file_path": "b"}).startswith("file_path: unknown argument (known: path, ")
    assert message({"weight": 1, "max_weight": 2, "path": "a"}).startswith("max_weight: unknown argument")


def test_preparing_never_changes_what_it_was_given() -> None:
    args = {"weight": 3, "parts": [{"oldName": None}]}
    TOOL.prepare_arguments(args)
    refusal(args)
    assert args == {"weight": 3, "parts": [{"oldName": None}]}


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(st.characters(), max_size=8),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(
            st.sampled_from(["path", "maxWeight", "weight", "parts", "oldName", "file_path", "x"]), inner, max_size=4
        )
    ),
    max_leaves=12,
)


@given(json_values)
def test_preparing_never_raises_and_validation_accepts_exactly_what_the_schema_does(args: Any) -> None:
    prepared = TOOL.prepare_arguments(args)
    validator = jsonschema.Draft202012Validator(TOOL.parameters)
    try:
        valid = TOOL.validate_arguments(prepared)
    except ToolError as error:
        assert not validator.is_valid(prepared)
        error.message.encode("utf-8")
        return
    assert validator.is_valid(valid)
    assert TOOL.validate_arguments(valid) == valid


async def test_execute_takes_validated_and_raw_arguments() -> None:
    raw: dict[str, Any] = {"weight": "3", "file_path": "a", "title": None}
    result = await TOOL.execute("call-1", accepted(raw))
    assert result == ToolResult(content=text_content("call-1"), details={"path": "a", "maxWeight": 3})
    assert await TOOL.execute("call-1", raw) == result


async def test_execute_refuses_what_validation_refuses() -> None:
    with pytest.raises(ToolError, match="path: required"):
        await TOOL.execute("call-1", {})


def test_good_small_arguments_are_cheap() -> None:
    args = {"path": "a", "maxWeight": 3}
    best = min(_seconds_of_a_thousand(args) for _ in range(5))
    assert best < 0.02, f"{best * 1000:.1f} µs for prepare and validate"


def _seconds_of_a_thousand(args: dict[str, Any]) -> float:
    started = time.perf_counter()
    for _ in range(1000):
        TOOL.validate_arguments(TOOL.prepare_arguments(args))
    return time.perf_counter() - started
