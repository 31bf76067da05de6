"""API keys: made and shown once, listed, revoked."""

from typing import Final

from fastapi import APIRouter, Request
from starlette.responses import Response

from app.api.dependencies import Admin, Cursor, KeyId, Limit, read_json, refuse_when_draining, services_of
from app.api.openapi import at_every_route, body_of, problems
from app.api.schemas import KeyListBody, KeyRequestBody, NewKeyBody, key_request
from app.api.wire import decode_cursor, json_response, key_json, list_response

router = APIRouter(prefix="/v1/keys", tags=["keys"], responses=at_every_route())

_BODY: Final = ("malformed_json", "payload_too_large", "unsupported_media_type")


@router.post(
    "",
    operation_id="createKey",
    summary="Make an API key; its token is shown this once",
    status_code=201,
    response_model=None,
    openapi_extra=body_of(
        KeyRequestBody,
        {"name": "ci", "scopes": ["read", "exec"], "owner": "team-a", "ttlSeconds": 86_400},
        {"name": "operator", "scopes": ["read", "write", "exec", "admin"]},
    ),
    responses={201: {"model": NewKeyBody}, **problems(*_BODY, "overloaded", "no_space")},
)
async def create_key(request: Request, caller: Admin) -> Response:
    services = services_of(request)
    refuse_when_draining(services)
    asked = key_request(await read_json(request))
    key, token = await services.keys.create(asked, by=caller)
    return json_response({**key_json(key), "token": token}, 201)


@router.get(
    "",
    operation_id="listKeys",
    summary="List API keys, newest first; revoked and expired ones too",
    response_model=None,
    responses={200: {"model": KeyListBody}, **problems("invalid_cursor")},
)
async def list_keys(request: Request, _caller: Admin, limit: Limit = 50, cursor: Cursor = None) -> Response:
    page = await services_of(request).keys.list(before=decode_cursor(cursor, "key"), limit=limit)
    return list_response(map(key_json, page.items), page.next_before)


@router.delete(
    "/{key_id}",
    operation_id="revokeKey",
    summary="Revoke an API key; asking again changes nothing",
    description="What it has made stays, what it has started runs on. The environment's key cannot be revoked.",
    status_code=204,
    response_model=None,
    response_class=Response,
    responses={204: {"description": "The key works no more"}, **problems("not_found", "no_space")},
)
async def revoke_key(request: Request, key_id: KeyId, caller: Admin) -> Response:
    await services_of(request).keys.revoke(key_id, by=caller)
    return Response(status_code=204)
