"""Times are integers of milliseconds since the epoch, UTC, until they leave as RFC 3339 text."""

import time
from datetime import UTC, datetime
from functools import lru_cache


def now_ms() -> int:
    """Return the wall clock in milliseconds since the epoch."""
    return time.time_ns() // 1_000_000


def rfc3339(milliseconds: int) -> str:
    """Return `2026-01-02T03:04:05.678Z`."""
    seconds, rest = divmod(milliseconds, 1000)
    return f"{_second(seconds)}.{rest:03d}Z"


@lru_cache(maxsize=64)
def _second(seconds: int) -> str:
    # Most times that are written are of the current second, and formatting one costs more than all the rest.
    return f"{datetime.fromtimestamp(seconds, UTC):%Y-%m-%dT%H:%M:%S}"
