"""What routes share: the services, the caller behind a key, parameters, bodies."""

import asyncio
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from ipaddress import IPv6Address, IPv6Network, ip_address
from typing import Annotated, Any, Final, get_origin
from urllib.parse import unquote_to_bytes

from fastapi import Header, Path, Query, Request, Security
from fastapi.security import HTTPBearer, SecurityScopes
from pydantic import AfterValidator

from app.api.errors import UnsupportedMediaType
from app.api.forwarding import Elsewhere, Forwarding
from app.api.middleware import RATE_FIELDS
from app.domain.caller import Caller
from app.domain.idempotency import IdempotencyKey
from app.domain.ids import Prefix, is_id
from app.domain.json_codec import JsonSyntaxError, JsonValueError, parse
from app.errors import (
    Forbidden,
    InvalidCursor,
    InvalidRequest,
    MalformedJson,
    NotFound,
    Overloaded,
    OwnerGone,
    PayloadTooLarge,
    Unauthorized,
)
from app.events.feed import WorkspaceFeed
from app.execution.membership import Membership
from app.services.archives import ArchiveService
from app.services.audit import AuditLog
from app.services.batches import BatchService, owner_gone
from app.services.files import FileService
from app.services.keys import KeyService
from app.services.pressure import Pressure
from app.services.readiness import Readiness
from app.services.request_rates import RequestRates
from app.services.streams import StreamSlots
from app.services.tool_catalog import ToolCatalog
from app.services.url_tokens import UrlTokenService
from app.services.workspaces import WorkspaceService
from app.telemetry.metrics import Metrics

BODY_MAX_BYTES: Final = 16 * 1024 * 1024
WAIT_MAX_SECONDS: Final = 60.0
PAGE_MAX: Final = 200
# How the document of FastAPI names the ways in; `app.api.openapi` makes of them what OpenAPI means.
KEY_SCHEME: Final = "apiKey"
ANY_SCOPE_SCHEME: Final = "apiKeyAnyScope"
KEY_OR_TOKEN_SCHEME: Final = "apiKeyOrUrlToken"  # noqa: S105 - a name
URL_TOKEN_SCHEME: Final = "urlToken"  # noqa: S105 - a name
# Parsing this much takes longer than handing it to a thread.
_PARSE_INLINE_BYTES: Final = 64 * 1024
_PREFER_WAIT: Final = re.compile(r"(?:^|[,;])\s*wait\s*=\s*\"?(\d{1,9})\"?\s*(?=$|[,;])", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class About:
    """What `/version` tells."""

    version: str
    python: str
    database: str
    sandbox: dict[str, object]
    ripgrep: str | None
    powershell: bool


@dataclass(frozen=True, slots=True)
class Services:
    """Everything routes call. `app.main` builds it and puts it into `app.state.services`."""

    keys: KeyService
    audit: AuditLog
    url_tokens: UrlTokenService
    workspaces: WorkspaceService
    files: FileService
    archives: ArchiveService
    batches: BatchService
    feed: WorkspaceFeed
    tools: ToolCatalog
    rates: RequestRates
    streams: StreamSlots
    pressure: Pressure
    readiness: Readiness
    metrics: Metrics
    about: About
    membership: Membership
    forwarding: Forwarding | None


def services_of(request: Request) -> Services:
    services: Services = request.app.state.services
    return services


class ApiKey(HTTPBearer):
    """What every request of `/v1` passes: its bearer key, the key's scopes, then the names of its query parameters.

    In this order, because who has no key is told nothing else.

    Args:
        at_node: whether the request is for what stands in the workspace's directory: then another node's is asked.

    Raises:
        Elsewhere: the directory is another node's.
        OwnerGone: it is, and no process of that lives.
    """

    def __init__(self, scheme_name: str = KEY_SCHEME, *, at_node: bool = False) -> None:
        self._at_node = at_node
        super().__init__(
            scheme_name=scheme_name,
            description="`Authorization: Bearer <API key>`; the scopes are the key's.",
            auto_error=False,
        )

    async def __call__(self, request: Request, security_scopes: SecurityScopes) -> Caller:  # type: ignore[override]
        rates = services_of(request).rates
        try:
            caller = await self._caller(request)
        except Unauthorized:
            rates.count_failure(_address(request))
            _note_refusal(request, None, 401, None)
            raise
        caller = replace(caller, request_id=request.scope["state"]["request_id"])
        request.scope["state"][RATE_FIELDS] = rates.count(caller.key_id)
        try:
            self._require(caller, security_scopes.scopes)
        except Forbidden as error:
            _note_refusal(request, caller, 403, error.extra["scope"])
            raise
        if request.scope["query_string"]:
            _refuse_odd_parameters(request)
        if self._at_node:
            await _require_node(request)
        return caller

    async def _caller(self, request: Request) -> Caller:
        scheme, _, token = request.headers.get("authorization", "").partition(" ")
        token = token.strip()
        if scheme.lower() != "bearer" or not token:
            raise Unauthorized(
                "send your API key as Authorization: Bearer <key>", headers={"WWW-Authenticate": "Bearer"}
            )
        caller = await services_of(request).keys.caller(token)
        if caller is None:
            raise Unauthorized(
                "there is no such API key, or it was revoked or has expired",
                headers={"WWW-Authenticate": 'Bearer error="invalid_token"'},
            )
        return caller

    def _require(self, caller: Caller, scopes: Sequence[str]) -> None:
        for scope in scopes:
            if scope not in caller.scopes:
                raise lacks(scope)


class AnyScope(ApiKey):
    """As `ApiKey`, where one of the scopes is enough: what else is needed depends on the tools that are called."""

    def __init__(self) -> None:
        super().__init__(ANY_SCOPE_SCHEME)

    def _require(self, caller: Caller, scopes: Sequence[str]) -> None:
        if caller.scopes.isdisjoint(scopes):
            raise lacks(" or ".join(scopes))


class KeyOrUrlToken(ApiKey):
    """As `ApiKey`; without the header a URL token in `?token=` will do. For GET and HEAD of one resource."""

    def __init__(self, *, at_node: bool = False) -> None:
        super().__init__(KEY_OR_TOKEN_SCHEME, at_node=at_node)

    async def __call__(  # type: ignore[override]
        self,
        request: Request,
        security_scopes: SecurityScopes,
        token: Annotated[str | None, Query(include_in_schema=False)] = None,  # noqa: ARG002 - read in `_caller`
    ) -> Caller:
        return await super().__call__(request, security_scopes)

    async def _caller(self, request: Request) -> Caller:
        token = request.query_params.get("token", "")
        if "authorization" in request.headers or not token:
            return await super()._caller(request)
        about = request.path_params.get("batch_id") or request.path_params.get("call_id")
        path = unquote_to_bytes(request.scope["raw_path"])
        caller = await services_of(request).url_tokens.caller(token, path, about)
        if caller is None:
            raise Unauthorized(
                "this is no token for this URL, or its time is over; make a new one with POST /v1/url-tokens",
                headers={"WWW-Authenticate": 'Bearer error="invalid_token"'},
            )
        # Whoever has the token may show what it opens, on whatever page.
        request.scope["state"]["embeddable"] = True
        return caller


def lacks(scope: str, why: str = "") -> Forbidden:
    """Return the error of a key without a scope; `why` goes on with the sentence."""
    return Forbidden(f"the API key lacks the scope {scope}{why}", scope=scope)


def _address(request: Request) -> str:
    """Return whom failures are counted for: the peer's address; of IPv6 the /64, which is one subscriber's."""
    host = "" if request.client is None else request.client.host
    try:
        address = ip_address(host)
    except ValueError:
        return host
    if isinstance(address, IPv6Address):
        mapped = address.ipv4_mapped
        return str(IPv6Network((int(address), 64), strict=False)) if mapped is None else str(mapped)
    return str(address)


_api_key: Final = ApiKey()
Reader = Annotated[Caller, Security(_api_key, scopes=["read"])]
Viewer = Annotated[Caller, Security(KeyOrUrlToken(), scopes=["read"])]
"""A reader of one resource, which a URL token may open too: declare it for GET and HEAD alone."""
Writer = Annotated[Caller, Security(_api_key, scopes=["write"])]
NodeReader = Annotated[Caller, Security(ApiKey(at_node=True), scopes=["read"])]
NodeViewer = Annotated[Caller, Security(KeyOrUrlToken(at_node=True), scopes=["read"])]
NodeWriter = Annotated[Caller, Security(ApiKey(at_node=True), scopes=["write"])]
"""For what stands in the directory of the workspace in the path: a process of its node answers."""
Admin = Annotated[Caller, Security(_api_key, scopes=["admin"])]
ToolCaller = Annotated[Caller, Security(AnyScope(), scopes=["read", "write", "exec"])]
"""Who may call tools; `require_tools` says which."""


async def _require_node(request: Request) -> None:
    services = services_of(request)
    workspace_id = request.path_params["workspace_id"]
    workspaces, here = services.workspaces, services.membership.process.node_id
    if not is_id(workspace_id, "ws") or await workspaces.node_of(workspace_id) in {here, None}:
        return
    # It may have been given to another node since it was last looked up.
    workspaces.forget(workspace_id)
    placement = await workspaces.placement(workspace_id)
    if placement is None or placement.node_id == here:
        return
    if not placement.processes:
        raise owner_gone(workspace_id, placement.node_id)
    raise Elsewhere(placement.processes)


def require_some_node(services: Services) -> None:
    """Raise Elsewhere in a process without directories, for what makes one: any node will do.

    Raises:
        OwnerGone: no node has a living process.
    """
    membership = services.membership
    if membership.process.node_id is not None:
        return
    able = [process for process in membership.living if process.node_id is not None]
    if not able:
        raise OwnerGone("no node has a living process, so nothing can be made; try again in a moment")
    raise Elsewhere(able)


def _note_refusal(request: Request, caller: Caller | None, status: int, scope: str | None) -> None:
    services_of(request).audit.refused(
        caller,
        status,
        request.method,
        request.scope["path"],
        scope,
        "" if request.client is None else request.client.host,
    )


def require_tools(request: Request, caller: Caller, names: Iterable[str]) -> None:
    """Raise Forbidden when the caller lacks the scope of a tool; one that does not exist needs none."""
    catalog = services_of(request).tools
    for name in names:
        scope = catalog.scope(name)
        if scope is not None and scope not in caller.scopes:
            _note_refusal(request, caller, 403, scope)
            raise lacks(scope, f", which the tool {name} needs")


def _refuse_odd_parameters(request: Request) -> None:
    """Refuse a parameter the route does not have or that is given twice: what is not applied gives a wrong answer."""
    lists = _query_parameters(request)
    given = [name for name, _ in request.query_params.multi_items()]
    has = f"it has {', '.join(sorted(lists))}" if lists else "it has none"
    errors = [
        {"parameter": name, "code": "unknown_parameter", "message": f"there is no such parameter, {has}"}
        if name not in lists
        else {"parameter": name, "code": "repeated_parameter", "message": "give it once"}
        for name in dict.fromkeys(given)
        if not lists.get(name, False) and (name not in lists or given.count(name) > 1)
    ]
    if errors:
        raise InvalidRequest(f"query parameter {errors[0]['parameter']}: {errors[0]['message']}", errors=errors)


def _query_parameters(request: Request) -> dict[str, bool]:
    """Return the names of the route's query parameters, and whether each is a list."""
    dependants = [request.scope["route"].dependant]
    names: dict[str, bool] = {}
    while dependants:
        dependant = dependants.pop()
        for field in dependant.query_params:
            names[field.alias] = get_origin(field.field_info.annotation) is list
        dependants += dependant.dependencies
    return names


def refuse_when_draining(services: Services) -> None:
    """Raise Overloaded for what makes something once the service was told to stop."""
    if services.readiness.draining:
        raise Overloaded("the service is about to stop; send this again to the one that follows")


# -- parameters -------------------------------------------------------------------------------------------------------


def _id_of(prefix: Prefix, noun: str) -> AfterValidator:
    def check(value: str) -> str:
        if not is_id(value, prefix):
            raise NotFound(f"there is no {noun} {value[:64]}")
        return value

    return AfterValidator(check)


WorkspaceId = Annotated[str, Path(description="The workspace's id, `ws_…`."), _id_of("ws", "workspace")]
BatchId = Annotated[str, Path(description="The batch's id, `batch_…`."), _id_of("batch", "batch")]
KeyId = Annotated[str, Path(description="The key's id, `key_…`."), _id_of("key", "key")]
CallId = Annotated[str, Path(description="The call's id, `call_…`; not your own `toolCallId`."), _id_of("call", "call")]
Limit = Annotated[int, Query(ge=1, le=PAGE_MAX, description="Items of a page at most.")]
Cursor = Annotated[str | None, Query(description="`nextCursor` of the page before.")]
Wait = Annotated[
    float | None,
    Query(ge=0, allow_inf_nan=False, description="Wait this many seconds for the end, 60 at most whatever is asked."),
]

IdempotencyHeader = Annotated[
    str | None,
    Header(
        alias="Idempotency-Key",
        pattern="^[!-~]{1,255}$",
        description="A name of your own for this request. Sent again with the same body, the request makes nothing new "
        "and is answered with what the first one made; with another body it is 422 `idempotency_key_reused`.",
    ),
]
REPLAYED: Final = {"Idempotent-Replayed": "true"}
"""The header of an answer about something an earlier request made."""


async def idempotency_key(value: str | None, kind: str, body: Any) -> IdempotencyKey | None:
    """Return the key of a request; None when it has none. A large body takes a while to hash, so a thread does it."""
    return None if value is None else await asyncio.to_thread(IdempotencyKey.of, value, kind, body)


@dataclass(frozen=True, slots=True)
class Waiting:
    """How long an answer may take; `applied` is the value of `Preference-Applied`, None when nothing was preferred."""

    seconds: float
    applied: str | None = None

    @property
    def headers(self) -> dict[str, str]:
        return {} if self.applied is None else {"Preference-Applied": self.applied}


def waiting(request: Request, wait: float | None, default: float = 0) -> Waiting:
    """Return how long to wait: `?wait=`, else `Prefer: wait=` (RFC 7240), else the route's own default."""
    if wait is not None:
        return Waiting(min(wait, WAIT_MAX_SECONDS))
    for value in request.headers.getlist("prefer"):
        found = _PREFER_WAIT.search(value)
        if found is not None:
            seconds = min(int(found[1]), int(WAIT_MAX_SECONDS))
            return Waiting(seconds, f"wait={seconds}")
    return Waiting(default)


def event_cursor(request: Request, after: str | None) -> int:
    """Return the event id a stream goes on after: `Last-Event-ID`, else `?after=`; 0 is the start.

    Raises:
        InvalidCursor: one of them is no number, also the one that is not used.
    """
    header = request.headers.get("last-event-id")
    given = _cursor_number(after or "")
    return given if header is None else _cursor_number(header.strip())


def _cursor_number(value: str) -> int:
    if not value:
        return 0
    if not value.isascii() or not value.isdigit() or len(value) > 18:
        raise InvalidCursor(f"the cursor {value[:64]!r} is no event id; send the last id you have seen, or 0")
    return int(value)


# -- bodies -----------------------------------------------------------------------------------------------------------


async def read_json(request: Request, *, empty: Any = None) -> Any:
    """Return the JSON body, whatever its Content-Type says; `empty` for a body of no bytes.

    Raises:
        UnsupportedMediaType: it is compressed.
        PayloadTooLarge: it is longer than 16 MiB.
        MalformedJson: it is no JSON.
        InvalidRequest: it holds a value Toolcrib refuses.
    """
    data = await _read_body(request)
    if not data and empty is not None:
        return empty
    try:
        return parse(data) if len(data) <= _PARSE_INLINE_BYTES else await asyncio.to_thread(parse, data)
    except JsonSyntaxError as error:
        raise MalformedJson(str(error)) from None
    except JsonValueError as error:
        message = str(error)
        raise InvalidRequest(message, errors=[{"pointer": "#", "code": "json_value", "message": message}]) from None


def refuse_encoded(request: Request) -> None:
    """Raise UnsupportedMediaType when the body is compressed."""
    encoding = request.headers.get("content-encoding", "identity").strip().lower()
    if encoding != "identity":
        raise UnsupportedMediaType("send the body without Content-Encoding", headers={"Accept-Encoding": "identity"})


async def _read_body(request: Request) -> bytes:
    refuse_encoded(request)
    length = request.headers.get("content-length", "")
    if length.isdigit() and int(length) > BODY_MAX_BYTES:
        raise _too_large()
    chunks: list[bytes] = []
    size = 0
    async for chunk in request.stream():
        size += len(chunk)
        if size > BODY_MAX_BYTES:
            raise _too_large()
        if chunk:
            chunks.append(chunk)
    return chunks[0] if len(chunks) == 1 else b"".join(chunks)


def _too_large() -> PayloadTooLarge:
    return PayloadTooLarge(f"a body may have {BODY_MAX_BYTES} bytes; put large files into the workspace another way")
