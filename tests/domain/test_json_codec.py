"""What comes in is checked before anything is stored."""

import pytest

from app.domain import json_codec
from app.domain.json_codec import JsonSyntaxError, JsonValueError


@pytest.mark.parametrize(
    ("text", "value"),
    [
        (b'{"a": [1, "\\u0000", null]}', {"a": [1, "\0", None]}),
        (b'"\\ud83d\\ude00"', "\U0001f600"),
        (b"18446744073709551615", 2**64 - 1),
        (b"-9223372036854775808", -(2**63)),
        (b"1e19", 1e19),
        (b"12345678901234567890.5", 12345678901234567890.5),
        (b'"12345678901234567890123"', "12345678901234567890123"),
        (b"[" * 64 + b"]" * 64, None),
        (b'{"id": "[[[["}', {"id": "[[[["}),
    ],
)
def test_valid_json_is_taken_as_it_is(text, value):
    parsed = json_codec.parse(text)
    assert value is None or parsed == value
    assert value is None or type(parsed) is type(value)


@pytest.mark.parametrize(
    "text", [b"", b"{", b"{'a': 1}", b'{"a": 1,}', b'"\xff"', b"[1] [2]", b"\xef\xbb\xbf{}", b"nul"]
)
def test_what_is_no_json_is_a_syntax_error(text):
    with pytest.raises(JsonSyntaxError):
        json_codec.parse(text)


@pytest.mark.parametrize(
    ("text", "part"),
    [
        (b'"\\ud800"', "lone surrogate"),
        (b'{"\\udfff": 1}', "lone surrogate"),
        (b"NaN", "NaN"),
        (b"[-Infinity]", "Infinity"),
        (b"1e999", "too large"),
        (b"18446744073709551616", "64 bits"),
        (b'{"n": -9223372036854775809}', "64 bits"),
        (b"1" + b"0" * 5000, "64 bits"),
        (b"[" * 65 + b"]" * 65, "64 levels"),
        (b"[" * 5000 + b"]" * 5000, "64 levels"),
        (b"[" * 200_000 + b"]" * 200_000, "64 levels"),
        (b'{"a":' * 70 + b"1" + b"}" * 70, "64 levels"),
    ],
)
def test_json_that_cannot_be_kept_is_a_value_error_that_says_why(text, part):
    with pytest.raises(JsonValueError, match=part):
        json_codec.parse(text)
