"""Times on the wire are RFC 3339, UTC, with milliseconds."""

from datetime import UTC, datetime

import pytest

from app.domain.clock import now_ms, rfc3339


@pytest.mark.parametrize(
    ("milliseconds", "text"),
    [
        (0, "1970-01-01T00:00:00.000Z"),
        (1_700_000_000_007, "2023-11-14T22:13:20.007Z"),
        (-1, "1969-12-31T23:59:59.999Z"),
    ],
)
def test_milliseconds_become_text(milliseconds, text):
    assert rfc3339(milliseconds) == text


def test_now_is_now():
    told = datetime.fromisoformat(rfc3339(now_ms()))
    assert abs((datetime.now(UTC) - told).total_seconds()) < 60
