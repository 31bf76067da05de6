"""JSON from outside as typed values."""

from pydantic import BaseModel, ConfigDict
from pydantic.alias_generators import to_camel


class JsonModel(BaseModel):
    """A JSON object that somebody sends: camelCase, strict, nothing unknown."""

    model_config = ConfigDict(
        alias_generator=to_camel,
        validate_by_name=False,
        validate_by_alias=True,
        extra="forbid",
        strict=True,
        frozen=True,
    )
