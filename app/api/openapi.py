"""The OpenAPI 3.1 document: FastAPI's, with our request bodies and problem documents where FastAPI guesses."""

import asyncio
from collections.abc import Iterator, Mapping
from threading import Lock
from typing import Any, Final

from fastapi import FastAPI, Request
from fastapi.openapi.utils import get_openapi
from pydantic.json_schema import models_json_schema

from app.api.dependencies import ANY_SCOPE_SCHEME, KEY_OR_TOKEN_SCHEME, KEY_SCHEME, URL_TOKEN_SCHEME
from app.api.errors import KINDS
from app.api.event_schemas import EventDataBody
from app.api.schemas import (
    BatchRequestBody,
    EventBody,
    HintBody,
    KeyRequestBody,
    ProblemBody,
    RequestModel,
    UrlTokenRequestBody,
    WorkspacePatchBody,
    WorkspaceRequestBody,
)

_REFERENCE: Final = "#/components/schemas/{model}"
_REQUESTS: Final[tuple[type[RequestModel], ...]] = (
    BatchRequestBody,
    WorkspaceRequestBody,
    WorkspacePatchBody,
    KeyRequestBody,
    UrlTokenRequestBody,
)
_REQUEST_ID: Final = {
    "description": "Yours when it matches `[A-Za-z0-9._-]{1,64}`, else made up; also in the log and the record.",
    "schema": {"type": "string"},
}
_URL_TOKEN: Final = {
    "type": "apiKey",
    "in": "query",
    "name": "token",
    "description": "A token for this URL, from `POST /v1/url-tokens`; without an `Authorization` header.",
}
# By the operation that makes something: path parameters that its answer gives, and where they stand in it.
_MADE: Final = {
    "createWorkspace": {"workspace_id": "$response.body#/id"},
    "createBatch": {"batch_id": "$response.body#/id", "call_id": "$response.body#/calls/0/id"},
    "callTool": {"batch_id": "$response.body#/batchId", "call_id": "$response.body#/id"},
}
_RETRY_AFTER: Final = {"description": "Seconds to wait before the next try.", "schema": {"type": "integer"}}

Responses = dict[int | str, dict[str, Any]]


def problems(*codes: str) -> Responses:
    """Return the documentation of error responses, one per status."""
    found: dict[int | str, list[str]] = {}
    for code in codes:
        found.setdefault(KINDS[code].status, []).append(code)
    return {
        status: {
            "description": "; ".join(f"`{code}`: {KINDS[code].title}" for code in names),
            "content": {"application/problem+json": {"schema": reference(ProblemBody.__name__)}},
            **({"headers": {"Retry-After": _RETRY_AFTER}} if all(KINDS[code].retry_after for code in names) else {}),
        }
        for status, names in found.items()
    }


def at_every_route() -> Responses:
    """Return the documentation of what every route of `/v1` may answer."""
    return problems("unauthorized", "forbidden", "invalid_request", "rate_limited", "storage_unavailable")


def reference(model: str) -> dict[str, str]:
    return {"$ref": _REFERENCE.format(model=model)}


def body_of(model: type[RequestModel], *examples: Any, required: bool = True) -> dict[str, Any]:
    """Return `openapi_extra` of a route that reads its JSON body itself; each example is a whole body."""
    content = {"schema": reference(model.__name__), **examples_of(*examples)}
    return {"requestBody": {"required": required, "content": {"application/json": content}}}


def examples_of(*examples: Any) -> dict[str, Any]:
    """Return the member of a media type that holds its examples."""
    return {"examples": {f"example{number}": {"value": value} for number, value in enumerate(examples, 1)}}


def header(description: str, kind: str = "string") -> dict[str, Any]:
    return {"description": description, "schema": {"type": kind}}


class Document:
    """The document of an app, for `FastAPI.openapi`: made when it is first asked for, and then kept.

    Most processes are never asked, and it takes ten times as long as all the rest of making an app. Several threads may
    ask at once; the event loop is not to wait for it.
    """

    def __init__(self, app: FastAPI) -> None:
        self._app = app
        self._made: dict[str, Any] | None = None
        self._making = Lock()

    def __call__(self) -> dict[str, Any]:
        with self._making:
            if self._made is None:
                self._made = _build(self._app)
            return self._made


async def document_of(request: Request) -> dict[str, Any]:
    """Return the document of the app that answers a request."""
    document: dict[str, Any] = await asyncio.to_thread(request.app.openapi)
    return document


def _build(app: FastAPI) -> dict[str, Any]:
    """Return the document; every response in it carries `X-Request-ID`."""
    document = get_openapi(
        title=app.title, version=app.version, description=app.description, routes=app.routes, tags=app.openapi_tags
    )
    _, definitions = models_json_schema(
        [(model, "validation") for model in _REQUESTS]
        + [(model, "serialization") for model in (ProblemBody, EventBody, EventDataBody, HintBody)],
        by_alias=True,
        ref_template=_REFERENCE,
    )
    schemas = document.setdefault("components", {}).setdefault("schemas", {})
    schemas.update(definitions["$defs"])
    for path in document["paths"].values():
        for operation in path.values():
            _complete(operation)
    _link(document)
    document["components"]["schemas"] = dict(sorted(schemas.items()))
    schemes = document["components"]["securitySchemes"]
    for scheme in (ANY_SCOPE_SCHEME, KEY_OR_TOKEN_SCHEME):
        schemes.pop(scheme, None)
    schemes[URL_TOKEN_SCHEME] = _URL_TOKEN
    return document


def _link(document: Mapping[str, Any]) -> None:
    """Say which operations take what an answer has made: a client that reads the document can go on from there."""
    operations = {
        operation["operationId"]: operation for path in document["paths"].values() for operation in path.values()
    }
    takes = {
        name: [parameter["name"] for parameter in operation.get("parameters", ()) if parameter["in"] == "path"]
        for name, operation in operations.items()
    }
    for producer, made in _MADE.items():
        links = {
            name: {"operationId": name, "parameters": {parameters[0]: made[parameters[0]]}}
            for name, parameters in takes.items()
            if parameters and parameters[0] in made
        }
        for status, response in operations[producer]["responses"].items():
            if status < "300":
                response["links"] = links


def _complete(operation: dict[str, Any]) -> None:
    if "security" in operation:
        operation["security"] = [way for given in operation["security"] for way in _ways_in(given)]
    for response in operation["responses"].values():
        response.setdefault("headers", {})["X-Request-ID"] = _REQUEST_ID
        if "application/problem+json" in response.get("content", {}):
            # FastAPI adds the route's own media type to every response it documents.
            response["content"] = {"application/problem+json": response["content"]["application/problem+json"]}


def _ways_in(requirement: Mapping[str, list[str]]) -> Iterator[dict[str, list[str]]]:
    """Yield what is enough for one of FastAPI's requirements, each with the scopes that all have to be there."""
    for scheme, scopes in requirement.items():
        if scheme == ANY_SCOPE_SCHEME:
            yield from ({KEY_SCHEME: [scope]} for scope in scopes)
        elif scheme == KEY_OR_TOKEN_SCHEME:
            yield {KEY_SCHEME: scopes}
            yield {URL_TOKEN_SCHEME: []}
        else:
            yield {scheme: scopes}
