"""Errors on the wire: `application/problem+json` (RFC 9457), and the one table that maps codes to statuses."""

from collections.abc import Mapping
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any, Final

import orjson
import structlog
from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from pydantic_core import ErrorDetails
from starlette.exceptions import HTTPException
from starlette.responses import Response
from starlette.routing import Match
from starlette.types import Scope

from app.errors import AppError, InvalidRequest

_log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class Kind:
    """What every problem with one code has in common.

    `retry_after` is in seconds, and a guess (docs/http-api.md): where the wait is known the error brings the header.
    """

    status: int
    title: str
    retry_after: int | None = None


KINDS: Final[Mapping[str, Kind]] = {
    "malformed_json": Kind(400, "The body is no JSON"),
    "invalid_cursor": Kind(400, "The cursor is not one of this list or stream"),
    "invalid_path": Kind(400, "The path cannot be used"),
    "bad_request": Kind(400, "The request cannot be understood"),
    "unauthorized": Kind(401, "A valid API key is needed"),
    "forbidden": Kind(403, "The API key lacks a scope"),
    "not_found": Kind(404, "There is no such resource"),
    "method_not_allowed": Kind(405, "The resource has no such method"),
    "not_acceptable": Kind(406, "The resource has no such representation"),
    "conflict": Kind(409, "The request conflicts with what is there"),
    "workspace_moved": Kind(409, "Another directory stands at the workspace's root"),
    "workspace_gone": Kind(410, "The workspace was deleted or has expired"),
    "output_gone": Kind(410, "The output was removed"),
    "precondition_failed": Kind(412, "The file is not the one the condition names"),
    "payload_too_large": Kind(413, "The body is too large"),
    "unsupported_media_type": Kind(415, "The body is encoded in a way that is not supported"),
    "range_not_satisfiable": Kind(416, "The range lies past the end"),
    "invalid_request": Kind(422, "The request does not fit"),
    "idempotency_key_reused": Kind(422, "The Idempotency-Key belongs to another request"),
    "rate_limited": Kind(429, "Too many requests", retry_after=1),
    "too_many_batches": Kind(429, "Too many batches wait or run", retry_after=1),
    "too_many_streams": Kind(429, "Too many streams are open", retry_after=1),
    "internal": Kind(500, "The service failed"),
    "overloaded": Kind(503, "The service cannot take more now", retry_after=1),
    "not_ready": Kind(503, "The service is not ready", retry_after=1),
    "owner_gone": Kind(503, "The node of the workspace is away", retry_after=5),
    "storage_unavailable": Kind(503, "The database does not answer", retry_after=2),
    "no_space": Kind(507, "The disk is full"),
}
_CODE_OF_STATUS: Final = {400: "bad_request", 404: "not_found", 405: "method_not_allowed", 413: "payload_too_large"}


class BadRequest(AppError):
    code = "bad_request"


class NotAcceptable(AppError):
    code = "not_acceptable"


class UnsupportedMediaType(AppError):
    code = "unsupported_media_type"


class RangeNotSatisfiable(AppError):
    code = "range_not_satisfiable"


class NotReady(AppError):
    code = "not_ready"


def problem_document(scope: Scope, code: str, detail: str) -> dict[str, Any]:
    """Return what every problem document has."""
    kind = KINDS[code]
    return {
        "type": f"urn:toolcrib:problem:{code}",
        "title": kind.title,
        "status": kind.status,
        "detail": detail,
        "instance": scope["path"],
        "code": code,
        "requestId": scope["state"]["request_id"],
    }


def problem(
    scope: Scope, code: str, detail: str, /, *, headers: Mapping[str, str] | None = None, **members: Any
) -> Response:
    """Return the response of one problem; `members` are further members of the document."""
    kind = KINDS[code]
    body = {**problem_document(scope, code, detail), **members}
    sent = dict(headers or {})
    if kind.retry_after is not None:
        sent.setdefault("Retry-After", str(kind.retry_after))
    return Response(orjson.dumps(body), kind.status, sent, "application/problem+json")


def request_errors(errors: list[ErrorDetails] | list[dict[str, Any]]) -> list[dict[str, str]]:
    """Return pydantic's errors in the shape of the wire.

    What is wrong in a body has a `pointer` (a JSON pointer as a URI fragment), what is wrong elsewhere a `parameter`.
    """
    return [
        {**_place(error["loc"]), "code": error["type"], "message": error["msg"].removeprefix("Value error, ")}
        for error in errors
    ]


def add_error_handlers(app: FastAPI) -> None:
    """Answer every error that leaves a route with a problem document."""
    app.add_exception_handler(AppError, _app_error)
    app.add_exception_handler(RequestValidationError, _validation_error)
    app.add_exception_handler(HTTPException, _http_exception)


async def _app_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, AppError)  # noqa: S101 - registered for it alone
    members = dict(error.extra)
    headers = members.pop("headers", None)
    return problem(request.scope, error.code, error.detail, headers=headers, **members)


async def _validation_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, RequestValidationError)  # noqa: S101 - registered for it alone
    errors = request_errors(list(error.errors()))
    return problem(request.scope, InvalidRequest.code, _summary(errors), errors=errors)


async def _http_exception(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)  # noqa: S101 - registered for it alone
    code = _CODE_OF_STATUS.get(error.status_code)
    if code is None:
        _log.error("unexpected_status", status=error.status_code)
        code = "internal"
    if code == "not_found":
        return problem(request.scope, code, f"there is nothing at {request.scope['path']}")
    if code == "method_not_allowed":
        allow = ", ".join(sorted(_methods(request)))
        detail = f"{request.scope['path']} has no {request.method}, it has {allow}"
        return problem(request.scope, code, detail, headers={"Allow": allow})
    return problem(request.scope, code, HTTPStatus(error.status_code).phrase)


def _methods(request: Request) -> set[str]:
    # A path has a route per method, and each knows only its own: ask all of them. What the router noted in the scope
    # for the route that did not fit stays out of it.
    scope = {name: value for name, value in request.scope.items() if name != "fastapi"}
    return {
        method
        for method in ("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE")
        if any(route.matches({**scope, "method": method})[0] is Match.FULL for route in request.app.routes)
    }


def _place(loc: tuple[int | str, ...]) -> dict[str, str]:
    if loc and loc[0] in {"query", "path", "header"}:
        return {"parameter": str(loc[-1])}
    # pydantic says this after a key that is wrong itself.
    return {"pointer": pointer(loc[:-1] if loc and loc[-1] == "[key]" else loc)}


def pointer(loc: tuple[int | str, ...]) -> str:
    """Return a place in a JSON document as a JSON pointer (RFC 6901) in a URI fragment."""
    return "#" + "".join("/" + str(part).replace("~", "~0").replace("/", "~1") for part in loc)


def _summary(errors: list[dict[str, str]]) -> str:
    first = errors[0]
    place = first.get("parameter") or first.get("pointer")
    more = f" (and {len(errors) - 1} more)" if len(errors) > 1 else ""
    return f"{place}: {first['message']}{more}"


def invalid_body(errors: list[ErrorDetails]) -> InvalidRequest:
    """Return the error of a body that does not fit its model."""
    shown = request_errors(errors)
    return InvalidRequest(_summary(shown), errors=shown)
