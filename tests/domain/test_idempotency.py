"""The same request has the same digest, another one another."""

import hashlib
from typing import Any

import pytest

from app.domain.idempotency import IdempotencyKey

BODY = {"calls": [{"name": "read", "arguments": {"path": "a", "limit": 1}}], "metadata": {"ü": [1, None, "x"]}}


def digest(body: Any, kind: str = "batch") -> bytes:
    return IdempotencyKey.of("k", kind, body).digest


def test_order_of_members_makes_no_difference() -> None:
    turned = {
        "metadata": {"ü": [1, None, "x"]},
        "calls": [{"arguments": {"limit": 1, "path": "a"}, "name": "read"}],
    }
    assert list(turned) != list(BODY)
    assert digest(turned) == digest(BODY)
    assert IdempotencyKey.of("k", "batch", {}) == IdempotencyKey("k", hashlib.sha256(b'["batch",{}]').digest())


@pytest.mark.parametrize(
    "other",
    [
        {},
        None,
        {**BODY, "metadata": {"ü": [None, 1, "x"]}},
        {**BODY, "metadata": {"ü": [1, None]}},
        {**BODY, "metadata": {"ü": [True, None, "x"]}},
        {**BODY, "metadata": {"ü": ["1", None, "x"]}},
        {**BODY, "onError": "continue"},
    ],
)
def test_another_value_makes_another_request(other: Any) -> None:
    assert digest(other) != digest(BODY)


def test_what_is_asked_for_is_part_of_the_request() -> None:
    assert len({digest({}, kind) for kind in ("batch", "workspace", "tool:ls", "tool:find")}) == 4
