"""Times in requests: RFC 3339 in, milliseconds since the epoch inside."""

import re
from datetime import UTC, datetime, timedelta
from typing import Annotated, Final

from pydantic import AfterValidator, WithJsonSchema
from pydantic_core import PydanticCustomError

_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)


def milliseconds(value: str) -> int:
    """Return a time in milliseconds since the epoch.

    Raises:
        PydanticCustomError: it is no RFC 3339 time.
    """
    # In a query string an unescaped + is a blank, and a time with an offset is where that happens.
    text = re.sub(r" (\d\d:\d\d)\Z", r"+\1", value.strip()).upper()
    try:
        time = datetime.fromisoformat(text)
    except ValueError:
        time = None
    if time is None or time.tzinfo is None or "T" not in text.replace(" ", "T"):
        raise PydanticCustomError("time", "this is no RFC 3339 time such as 2026-01-02T03:04:05.678Z")
    return (time - _EPOCH) // timedelta(milliseconds=1)


def _time(value: str) -> str:
    milliseconds(value)
    return value


RequestTime = Annotated[str, AfterValidator(_time), WithJsonSchema({"type": "string", "format": "date-time"})]
"""A time as it came, checked; `milliseconds` turns it into a number."""
