"""Workspaces: made, adopted, listed, changed, deleted."""

from typing import Final

from fastapi import APIRouter, Request
from starlette.responses import Response

from app.api.dependencies import (
    REPLAYED,
    Cursor,
    IdempotencyHeader,
    Limit,
    NodeWriter,
    Reader,
    Viewer,
    WorkspaceId,
    Writer,
    idempotency_key,
    read_json,
    refuse_when_draining,
    require_some_node,
    services_of,
)
from app.api.event_stream import EventStream
from app.api.negotiation import EVENT_STREAM, JSON_LINES, stream_form
from app.api.openapi import Responses, at_every_route, body_of, header, problems, reference
from app.api.schemas import (
    HintBody,
    WorkspaceBody,
    WorkspaceListBody,
    WorkspacePatchBody,
    WorkspaceRequestBody,
    validated,
)
from app.api.wire import decode_cursor, json_response, list_response, workspace_json
from app.services.workspaces import WorkspaceChange, WorkspaceRequest

router = APIRouter(prefix="/v1/workspaces", tags=["workspaces"], responses=at_every_route())

_BODY: Final = ("malformed_json", "payload_too_large", "unsupported_media_type")


@router.post(
    "",
    operation_id="createWorkspace",
    summary="Make a workspace, or adopt a directory as one",
    description="Everything is optional; nothing at all makes an empty workspace.",
    status_code=201,
    response_model=None,
    openapi_extra=body_of(
        WorkspaceRequestBody,
        {"name": "demo", "files": {"task.txt": "status: draft"}},
        {"options": {"bash": {"timeout": 60000}, "tools": ["read", "grep", "bash"]}, "ttlSeconds": 86400},
        {"root": "/srv/projects/site", "trusted": False},
        required=False,
    ),
    responses={
        201: {
            "model": WorkspaceBody,
            "headers": {
                "Location": header("The workspace, `/v1/workspaces/{id}`."),
                "Idempotent-Replayed": header(
                    "`true` when an earlier request with the same `Idempotency-Key` made the workspace."
                ),
            },
        },
        **problems(
            *_BODY,
            "conflict",
            "workspace_gone",
            "invalid_request",
            "idempotency_key_reused",
            "overloaded",
            "storage_unavailable",
            "no_space",
        ),
    },
)
async def create_workspace(request: Request, caller: Writer, key: IdempotencyHeader = None) -> Response:
    services = services_of(request)
    refuse_when_draining(services)
    require_some_node(services)
    given = await read_json(request, empty={})
    body = validated(WorkspaceRequestBody, given)
    asked = WorkspaceRequest(
        name=body.name,
        metadata=body.metadata,
        options=body.options,
        files=body.files,
        ttl_seconds=body.ttl_seconds,
        trusted=body.trusted,
        root=body.root,
    )
    idempotency = await idempotency_key(key, "workspace", given)
    created = await services.workspaces.create(asked, owner=caller.owner, idempotency=idempotency, by=caller)
    headers = {"Location": f"/v1/workspaces/{created.workspace.id}", **(REPLAYED if created.attached else {})}
    return json_response(workspace_json(created.workspace), 201, headers)


@router.get(
    "",
    operation_id="listWorkspaces",
    summary="List workspaces, newest first; deleted ones too",
    response_model=None,
    responses={
        200: {"model": WorkspaceListBody},
        **problems("invalid_cursor"),
    },
)
async def list_workspaces(request: Request, caller: Reader, limit: Limit = 50, cursor: Cursor = None) -> Response:
    before = decode_cursor(cursor, "ws")
    page = await services_of(request).workspaces.list(owner=caller.sees, before=before, limit=limit)
    return list_response(map(workspace_json, page.items), page.next_before)


@router.get(
    "/{workspace_id}",
    operation_id="getWorkspace",
    summary="Get a workspace; a deleted one is still there to read",
    response_model=None,
    responses={200: {"model": WorkspaceBody}, **problems("not_found")},
)
async def get_workspace(request: Request, workspace_id: WorkspaceId, caller: Reader) -> Response:
    workspace = await services_of(request).workspaces.get(workspace_id, owner=caller.sees)
    return json_response(workspace_json(workspace))


_FEED: Final[Responses] = {
    200: {
        "description": "The feed, until the workspace is gone",
        "content": {
            EVENT_STREAM: {"schema": reference(HintBody.__name__)},
            JSON_LINES: {"schema": {"type": "string", "description": "One event a line: what stands behind `data:`."}},
        },
    },
    **problems("not_found", "workspace_gone", "not_acceptable", "rate_limited", "too_many_streams"),
}


@router.head(
    "/{workspace_id}/events",
    operation_id="headWorkspaceFeed",
    summary="What a GET would answer, without the feed",
    response_model=None,
    response_class=Response,
    responses=_FEED,
)
@router.get(
    "/{workspace_id}/events",
    operation_id="getWorkspaceFeed",
    summary="Follow a workspace: which of its batches moved on",
    description="Hints `{batchId, lastSeq, status}` without ids, at most ten a second for a batch. After a reconnect, "
    "and after `resync`, list the workspace's batches.",
    response_model=None,
    response_class=Response,
    responses=_FEED,
)
async def get_feed(request: Request, workspace_id: WorkspaceId, caller: Viewer) -> Response:
    form = stream_form(request)
    services = services_of(request)
    await services.workspaces.usable(workspace_id, owner=caller.sees)
    if request.method == "HEAD":
        return EventStream(services.feed.follow(workspace_id), form)
    slot = services.streams.open(caller.key_id)
    return EventStream(services.feed.follow(workspace_id), form, slot=slot)


@router.patch(
    "/{workspace_id}",
    operation_id="updateWorkspace",
    summary="Change fields of a workspace",
    description="A field that is absent stays as it is; `options` and `metadata` are replaced as a whole. Batches that "
    "run go on as they began.",
    response_model=None,
    openapi_extra=body_of(WorkspacePatchBody, {"name": "renamed", "ttlSeconds": None}),
    responses={
        200: {"model": WorkspaceBody},
        **problems(*_BODY, "not_found", "workspace_gone", "overloaded", "storage_unavailable", "no_space"),
    },
)
async def update_workspace(request: Request, workspace_id: WorkspaceId, caller: Writer) -> Response:
    body = validated(WorkspacePatchBody, await read_json(request))
    given = body.model_fields_set
    change = WorkspaceChange(
        fields=frozenset(given),
        name=body.name,
        metadata=body.metadata,
        options=body.options,
        trusted=body.trusted,
        ttl_seconds=body.ttl_seconds,
    )
    workspace = await services_of(request).workspaces.update(workspace_id, change, owner=caller.sees, by=caller)
    return json_response(workspace_json(workspace))


@router.delete(
    "/{workspace_id}",
    operation_id="deleteWorkspace",
    summary="Delete a workspace: cancel what runs, remove a managed directory, keep the records",
    description="An adopted directory is left as it is. Deleting again changes nothing.",
    status_code=204,
    response_model=None,
    response_class=Response,
    responses={
        204: {"description": "The workspace is deleted"},
        **problems("not_found", "overloaded", "storage_unavailable", "no_space"),
    },
)
async def delete_workspace(request: Request, workspace_id: WorkspaceId, caller: NodeWriter) -> Response:
    await services_of(request).workspaces.delete(workspace_id, owner=caller.sees, by=caller)
    return Response(status_code=204)
