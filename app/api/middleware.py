"""Pure ASGI middleware: the request's id, the headers every response carries, and what happens to a bug."""

import re
import time
from collections.abc import Callable
from typing import Final

import structlog
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from app.api.errors import problem
from app.domain.ids import new_id

_REQUEST_ID: Final = re.compile(rb"[A-Za-z0-9._-]{1,64}\Z")
_HEADERS: Final = (
    (b"x-content-type-options", b"nosniff"),
    (b"referrer-policy", b"no-referrer"),
)
_SAME_ORIGIN: Final = (b"cross-origin-resource-policy", b"same-origin")
_CROSS_ORIGIN: Final = (b"cross-origin-resource-policy", b"cross-origin")
# A response may bring its own.
_DEFAULTS: Final = (
    (b"content-security-policy", b"default-src 'none'; frame-ancestors 'none'"),
    (b"cache-control", b"no-store"),
)
_QUIET_PATHS: Final = frozenset({"/healthz", "/readyz"})

RATE_FIELDS: Final = "rate_fields"

_log = structlog.get_logger(__name__)


class RequestContext:
    """Gives every request an id, on its log lines and on its response, and logs one line when it is answered.

    The caller's own `X-Request-ID` is taken over when it is `[A-Za-z0-9._-]{1,64}`. The line holds the path without
    its query.

    Args:
        answered: told of every request: its method, the template of the route that answered (`none` when there is no
            such route), the status (0 when there was no answer) and the seconds until the head of the answer.
    """

    def __init__(
        self, app: ASGIApp, answered: Callable[[str, str, int, float], None] = lambda _method, _route, _status, _s: None
    ) -> None:
        self._app = app
        self._answered = answered

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        started = time.perf_counter()
        request_id = _own_id(scope) or new_id("req")
        scope.setdefault("state", {})["request_id"] = request_id
        structlog.contextvars.bind_contextvars(request_id=request_id)
        status = 0
        head = 0.0

        async def send_with_headers(message: Message) -> None:
            nonlocal status, head
            if message["type"] == "http.response.start":
                status = message["status"]
                head = time.perf_counter()
                headers = list(message["headers"])
                present = {name for name, _ in headers}
                headers.append((b"x-request-id", request_id.encode("ascii")))
                headers += _HEADERS
                headers.append(_CROSS_ORIGIN if scope["state"].get("embeddable") else _SAME_ORIGIN)
                headers += rate_fields(scope)
                headers += (default for default in _DEFAULTS if default[0] not in present)
                message = {**message, "headers": headers}
            await send(message)

        try:
            await self._app(scope, receive, send_with_headers)
        finally:
            ended = time.perf_counter()
            route = _route_of(scope)
            self._answered(scope["method"], route, status, (head or ended) - started)
            write = _log.debug if scope["path"] in _QUIET_PATHS else _log.info
            write(
                "request",
                method=scope["method"],
                path=scope["path"],
                route=route,
                status=status,
                duration_ms=round((ended - started) * 1000, 1),
            )


class FaultBarrier:
    """Answers what no handler knew with a 500 problem: the traceback goes to the log and nowhere else.

    When the response has begun, nothing can be said any more: the connection is cut, which a client sees.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        started = False

        async def send_and_note(message: Message) -> None:
            nonlocal started
            started = True
            await send(message)

        try:
            await self._app(scope, receive, send_and_note)
        except ClientDisconnect:
            _log.debug("client_gone", path=scope["path"])
        except Exception:
            _log.exception("unhandled_error", method=scope["method"], path=scope["path"])
            if started:
                raise
            detail = "the service failed; its log has more under this requestId"
            await problem(scope, "internal", detail)(scope, receive, send)


def rate_fields(scope: Scope) -> list[tuple[bytes, bytes]]:
    """Return the fields that tell of the key's rate: those that were noted when the request was counted."""
    noted: dict[str, str] = scope["state"].get(RATE_FIELDS, {})
    return [(name.lower().encode("ascii"), value.encode("ascii")) for name, value in noted.items()]


def _route_of(scope: Scope) -> str:
    route = getattr(scope.get("route"), "path_format", None)
    return route if isinstance(route, str) else "none"


def _own_id(scope: Scope) -> str | None:
    for name, value in scope["headers"]:
        if name == b"x-request-id":
            return value.decode("ascii") if _REQUEST_ID.match(value) else None
    return None
