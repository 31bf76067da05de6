"""The one JSON codec: what comes in is checked before anything is stored, what goes out is valid Unicode.

The rules are in docs/http-api.md. orjson parses and writes; what it lets through or cannot tell apart
is looked at here.
"""

import json
import re
from typing import Any, Final

import orjson

MAX_DEPTH: Final = 64
_INTEGER_MIN: Final = -(2**63)
_INTEGER_MAX: Final = 2**64 - 1
_LONG_INTEGER: Final = re.compile(rb"(?<![.\d])\d{19,}(?![\d.eE])")


class JsonSyntaxError(ValueError):
    """The bytes are no JSON text (RFC 8259) in UTF-8."""


class JsonValueError(ValueError):
    """The bytes are JSON, but hold a value Toolcrib refuses: a lone surrogate, NaN, 65 bits, 65 levels."""


def parse(data: bytes) -> Any:
    """Return the value of a JSON text.

    Raises:
        JsonSyntaxError: when it is no JSON at all.
        JsonValueError: for a lone surrogate, NaN or Infinity, an integer over 64 bits, nesting over `MAX_DEPTH`.
    """
    try:
        value = orjson.loads(data)
    except orjson.JSONDecodeError as error:
        raise _explain(data, error) from None
    if _LONG_INTEGER.search(data) is not None:
        # orjson turns an integer over 64 bits into a float without a word; the standard library tells them apart.
        value = json.loads(data, parse_int=_integer)
    if data.count(b"[") + data.count(b"{") > MAX_DEPTH:
        check_depth(value)
    return value


def dump(value: Any) -> bytes:
    """Return the JSON text of a value that holds valid Unicode only.

    Raises:
        orjson.JSONEncodeError: for a lone surrogate or an object that is no JSON value (a bug in the caller).
    """
    return orjson.dumps(value)


def canonical(value: Any) -> bytes:
    """Return the JSON text that is the same for every order of an object's members; raises what `dump` raises."""
    return orjson.dumps(value, option=orjson.OPT_SORT_KEYS)


def check_depth(value: Any) -> None:
    """Raise JsonValueError when lists and objects nest deeper than `MAX_DEPTH`."""
    level = [value]
    for _ in range(MAX_DEPTH):
        level = [
            child
            for parent in level
            if isinstance(parent, list | dict)
            for child in (parent.values() if isinstance(parent, dict) else parent)
            if isinstance(child, list | dict)
        ]
        if not level:
            return
    raise JsonValueError(f"the JSON nests deeper than {MAX_DEPTH} levels")


def _explain(data: bytes, error: orjson.JSONDecodeError) -> ValueError:
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError as problem:
        return JsonSyntaxError(f"the body is not UTF-8: byte {problem.start} is wrong")
    try:
        value = json.loads(text, parse_constant=_constant, parse_int=_integer, parse_float=_float)
    except JsonValueError as problem:
        return problem
    except RecursionError:
        return JsonValueError(f"the JSON nests deeper than {MAX_DEPTH} levels")
    except ValueError:
        return JsonSyntaxError(f"the body is no JSON: {error}")
    try:
        check_depth(value)
    except JsonValueError as problem:
        return problem
    return JsonValueError("a string holds a lone surrogate (half of a \\uD83D\\uDE00 pair); send whole characters")


def _constant(name: str) -> float:
    raise JsonValueError(f"{name} is no JSON number")


def _float(text: str) -> float:
    value = float(text)
    if value in {float("inf"), float("-inf")}:
        raise JsonValueError(f"the number {text[:40]} is too large")
    return value


def _integer(text: str) -> int:
    value = int(text) if len(text) < 25 else _INTEGER_MAX + 1
    if not _INTEGER_MIN <= value <= _INTEGER_MAX:
        raise JsonValueError(f"the integer {text[:40]} does not fit in 64 bits")
    return value
