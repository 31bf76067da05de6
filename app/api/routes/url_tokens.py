"""URL tokens: one URL, opened without a header."""

import re
from collections.abc import Iterator, Mapping
from typing import Any, Final
from urllib.parse import unquote_to_bytes

from fastapi import APIRouter, Request
from starlette.responses import Response

from app.api.dependencies import URL_TOKEN_SCHEME, Reader, Services, read_json, services_of
from app.api.errors import invalid_body
from app.api.openapi import at_every_route, body_of, document_of, problems
from app.api.schemas import UrlTokenBody, UrlTokenRequestBody, validated
from app.api.wire import json_response
from app.domain.caller import Caller
from app.domain.clock import rfc3339
from app.domain.ids import is_id
from app.errors import InvalidRequest, NotFound

router = APIRouter(prefix="/v1/url-tokens", tags=["keys"], responses=at_every_route())

_PERCENT: Final = re.compile(r"%(?![0-9A-Fa-f]{2})")


@router.post(
    "",
    operation_id="createUrlToken",
    summary="Make a token for one URL, for an EventSource or an image",
    description="`url` is the path of a GET. The token works for GET and HEAD of exactly this path for 15 minutes; of "
    "a batch or a call until 15 minutes after the batch has ended. It ends with the key that made it.",
    status_code=201,
    response_model=None,
    openapi_extra=body_of(UrlTokenRequestBody, {"url": "/v1/batches/batch_01kb5v7m4qe9r8s2t3x6y7z0ab/events"}),
    responses={
        201: {"model": UrlTokenBody},
        **problems("malformed_json", "payload_too_large", "unsupported_media_type", "not_found", "workspace_gone"),
    },
)
async def create_url_token(request: Request, caller: Reader) -> Response:
    services = services_of(request)
    url = validated(UrlTokenRequestBody, await read_json(request)).url
    if _PERCENT.search(url) is not None:
        raise _refused("a % has to be followed by two hexadecimal digits")
    path = unquote_to_bytes(url)
    opened = list(_opened_by_tokens(await document_of(request)))
    ids = next((found.groupdict() for _, pattern in opened if (found := pattern.fullmatch(path)) is not None), None)
    if ids is None:
        raise _refused(f"a token opens one of {', '.join(template for template, _ in opened)}")
    await _require_visible(services, caller, ids)
    made = await services.url_tokens.issue(caller, path)
    body = {"token": made.token, "url": f"{url}?token={made.token}", "expiresAt": rfc3339(made.expires_at)}
    return json_response(body, 201)


def _opened_by_tokens(document: Mapping[str, Any]) -> Iterator[tuple[str, re.Pattern[bytes]]]:
    """Yield the paths whose GET takes a token, as the document says, each with a pattern of the decoded path."""
    for template, item in document["paths"].items():
        if any(URL_TOKEN_SCHEME in way for way in item.get("get", {}).get("security", ())):
            # The path of a file goes on to the end, other parameters are one component.
            pattern = re.sub(
                r"\\{(\w+)\\}",
                lambda name: f"(?P<{name[1]}>{'.+' if name[1] == 'path' else '[^/]+'})",
                re.escape(template),
            )
            yield template, re.compile(pattern.encode(), re.DOTALL)


async def _require_visible(services: Services, caller: Caller, ids: Mapping[str, bytes]) -> None:
    """Raise NotFound or WorkspaceGone when the path is about something the caller does not see."""
    for name, value in ids.items():
        text = value.decode("ascii", "replace")
        if name == "workspace_id":
            if not is_id(text, "ws"):
                raise NotFound(f"there is no workspace {text[:64]}")
            await services.workspaces.usable(text, owner=caller.sees)
        elif name == "batch_id":
            if not is_id(text, "batch"):
                raise NotFound(f"there is no batch {text[:64]}")
            await services.batches.get(text, owner=caller.sees)
        elif name == "call_id":
            if not is_id(text, "call"):
                raise NotFound(f"there is no call {text[:64]}")
            await services.batches.call(text, owner=caller.sees)


def _refused(message: str) -> InvalidRequest:
    return invalid_body([{"loc": ("url",), "type": "url", "msg": message, "input": None}])
