"""Which form of an answer a client asks for: `Accept` (RFC 9110)."""

import math
from collections.abc import Sequence
from typing import Final

from fastapi import Request

from app.api.errors import NotAcceptable

EVENT_STREAM: Final = "text/event-stream"
JSON: Final = "application/json"
JSON_LINES: Final = "application/x-ndjson"


def named(request: Request, offered: Sequence[str]) -> str | None:
    """Return the form a client asks for by name, of several the one it likes best; None when it names none."""
    ranges = _ranges(request)
    liked = [(ranges[form], -place, form) for place, form in enumerate(offered) if ranges.get(form, 0) > 0]
    return max(liked)[2] if liked else None


def stream_form(request: Request) -> str:
    """Return the form of an answer that is a stream whatever is asked: an event stream, or JSON lines.

    Raises:
        NotAcceptable: the client rules both out.
    """
    offered = (EVENT_STREAM, JSON_LINES)
    form = named(request, offered)
    if form is not None:
        return form
    ranges = _ranges(request) or {"*/*": 1.0}
    for form in offered:
        if form not in ranges and (ranges.get(form.partition("/")[0] + "/*", ranges.get("*/*", 0)) > 0):
            return form
    raise NotAcceptable(f"this is a stream of events; send Accept: {EVENT_STREAM} or {JSON_LINES}")


def _ranges(request: Request) -> dict[str, float]:
    """Return the quality of each media range of `Accept`; a quality that is no number is 1."""
    ranges: dict[str, float] = {}
    for part in ",".join(request.headers.getlist("accept")).lower().split(","):
        name, *parameters = (piece.strip() for piece in part.split(";"))
        if name:
            ranges[name] = next((_quality(value[2:]) for value in parameters if value.startswith("q=")), 1.0)
    return ranges


def _quality(value: str) -> float:
    try:
        quality = float(value)
    except ValueError:
        return 1.0
    return quality if math.isfinite(quality) else 1.0
