"""The `Range` header (RFC 9110): one range of bytes, or none."""

import re
from typing import Final

from app.api.errors import RangeNotSatisfiable

_RANGE: Final = re.compile(r"bytes\s*=\s*(\d{0,18})\s*-\s*(\d{0,18})\s*\Z", re.IGNORECASE)


def byte_range(value: str | None, total: int, noun: str) -> tuple[int, int] | None:
    """Return the bytes `start … end - 1` a Range header asks for; None when it is to be ignored.

    Ignored are another unit, several ranges and what is no range at all: the answer is the whole then.

    Args:
        value: the header, None when there is none.
        total: how many bytes there are.
        noun: what has them.

    Raises:
        RangeNotSatisfiable: it begins past the end.
    """
    found = None if value is None else _RANGE.match(value.strip())
    if found is None or not (found[1] or found[2]):
        return None
    if found[1]:
        start, end = int(found[1]), min(int(found[2]) + 1, total) if found[2] else total
        if found[2] and int(found[2]) < start:
            return None
    else:
        start, end = max(0, total - int(found[2])), total
    if start >= end:
        raise RangeNotSatisfiable(f"{noun} has {total} bytes", headers={"Content-Range": f"bytes */{total}"})
    return start, end
