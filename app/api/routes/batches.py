"""Batches: one POST in three modes, reading, following, cancelling, and the one-tool short cut."""

from contextlib import ExitStack
from typing import Annotated, Any, Final

from fastapi import APIRouter, Path, Query, Request
from starlette.responses import Response

from app.api.dependencies import (
    REPLAYED,
    BatchId,
    Cursor,
    IdempotencyHeader,
    Limit,
    Reader,
    Services,
    ToolCaller,
    Viewer,
    Wait,
    WorkspaceId,
    event_cursor,
    idempotency_key,
    read_json,
    refuse_when_draining,
    require_tools,
    services_of,
    waiting,
)
from app.api.event_stream import EventStream
from app.api.negotiation import EVENT_STREAM, JSON_LINES, named, stream_form
from app.api.openapi import Responses, at_every_route, body_of, examples_of, header, problems, reference
from app.api.schemas import BatchBody, BatchListBody, BatchRequestBody, CallBody, EventBody, batch_request
from app.api.wire import batch_item_json, batch_json, call_json, decode_cursor, json_response, list_response
from app.domain.batch import BatchStatus
from app.domain.caller import Caller
from app.domain.idempotency import IdempotencyKey
from app.errors import NotFound
from app.events.log import Updates
from app.services.batches import BatchRequest, CallRequest, Submitted
from app.services.streams import StreamSlot

TOOL_WAIT_SECONDS: Final = 30.0

router = APIRouter(prefix="/v1", tags=["batches"], responses=at_every_route())

_LOCATION: Final = header("The batch, `/v1/batches/{id}`.")
_APPLIED: Final = header("`wait=SECONDS` when `Prefer: wait=` was followed.")
_REPLAYED: Final = header("`true` when an earlier request with the same `Idempotency-Key` made the batch.")
_STREAM: Final[dict[str, Any]] = {
    EVENT_STREAM: {"schema": reference(EventBody.__name__)},
    JSON_LINES: {"schema": {"type": "string", "description": "One event a line: what stands behind `data:`."}},
}
_ACCEPTED: Final = (
    "malformed_json",
    "payload_too_large",
    "unsupported_media_type",
    "workspace_gone",
    "workspace_moved",
)
_MAKES: Final = problems(
    *_ACCEPTED,
    "not_found",
    "invalid_request",
    "idempotency_key_reused",
    "rate_limited",
    "too_many_batches",
    "too_many_streams",
    "overloaded",
    "owner_gone",
    "storage_unavailable",
    "no_space",
)
UpdatesParameter = Annotated[
    Updates,
    Query(
        description="`delta`: output as it grows; `snapshot`: each update holds the last 16 KiB of the text so far; "
        "`none`: no updates."
    ),
]


@router.post(
    "/workspaces/{workspace_id}/batches",
    operation_id="createBatch",
    summary="Submit a batch of tool calls",
    description="By default the answer is 202 and the batch runs on. With `?wait=` or `Prefer: wait=` it is 200 when "
    "the batch ended in time. With `Accept: text/event-stream`, or `application/x-ndjson` for JSON lines, the answer "
    "is the event stream itself.",
    status_code=202,
    response_model=None,
    openapi_extra=body_of(
        BatchRequestBody,
        {
            "calls": [
                {"id": "r1", "name": "read", "arguments": {"path": "task.txt"}},
                {"id": "b1", "name": "bash", "arguments": {"command": "wc -c task.txt"}},
            ]
        },
        {
            "calls": [{"name": "write", "arguments": {"path": "notes.md", "content": "# Notes\n"}}],
            "executionMode": "sequential",
            "onError": "stop",
            "timeoutMs": 600000,
            "metadata": {"agent": "a1"},
        },
    ),
    responses={
        200: {
            "model": BatchBody,
            "description": "The batch has ended, or its event stream",
            "content": _STREAM,
            "headers": {"Location": _LOCATION, "Preference-Applied": _APPLIED, "Idempotent-Replayed": _REPLAYED},
        },
        202: {
            "model": BatchBody,
            "description": "The batch was accepted",
            "headers": {"Location": _LOCATION, "Preference-Applied": _APPLIED, "Idempotent-Replayed": _REPLAYED},
        },
        **_MAKES,
    },
)
async def create_batch(
    request: Request,
    workspace_id: WorkspaceId,
    caller: ToolCaller,
    wait: Wait = None,
    updates: UpdatesParameter = "delta",
    key: IdempotencyHeader = None,
) -> Response:
    services = services_of(request)
    refuse_when_draining(services)
    form = named(request, (EVENT_STREAM, JSON_LINES))
    with ExitStack() as stack:
        # Before anything is stored: a batch must not be accepted whose answer is a refusal.
        slot = stack.enter_context(services.streams.open(caller.key_id)) if form is not None else None
        body = await read_json(request)
        asked = batch_request(body)
        idempotency = await idempotency_key(key, "batch", body)
        submitted = await _submit(services, request, workspace_id, asked, caller, idempotency)
        batch = submitted.batch
        headers = _headers(submitted)
        if slot is not None and form is not None:
            slot.follow(batch.id)
            stack.pop_all()
            return _stream(services, submitted, updates, form, headers, slot)
    time = waiting(request, wait)
    if time.seconds > 0:
        batch = await services.batches.get(batch.id, owner=None, wait=time.seconds)
    return json_response(batch_json(batch), 200 if batch.status.terminal else 202, {**headers, **time.headers})


@router.get(
    "/workspaces/{workspace_id}/batches",
    operation_id="listBatches",
    summary="List a workspace's batches, newest first, without their calls",
    response_model=None,
    responses={
        200: {"model": BatchListBody},
        **problems("invalid_cursor", "not_found"),
    },
)
async def list_batches(
    request: Request,
    workspace_id: WorkspaceId,
    caller: Reader,
    status: Annotated[BatchStatus | None, Query()] = None,
    limit: Limit = 50,
    cursor: Cursor = None,
) -> Response:
    page = await services_of(request).batches.list(
        workspace_id, owner=caller.sees, status=status, before=decode_cursor(cursor, "batch"), limit=limit
    )
    return list_response(map(batch_item_json, page.items), page.next_before)


@router.get(
    "/batches/{batch_id}",
    operation_id="getBatch",
    summary="Get a batch with its calls; with `?wait=` once it has ended",
    response_model=None,
    responses={
        200: {"model": BatchBody, "headers": {"Preference-Applied": _APPLIED}},
        **problems("not_found"),
    },
)
async def get_batch(request: Request, batch_id: BatchId, caller: Viewer, wait: Wait = None) -> Response:
    time = waiting(request, wait)
    batch = await services_of(request).batches.get(batch_id, owner=caller.sees, wait=time.seconds)
    return json_response(batch_json(batch), headers=time.headers)


_EVENTS: Final[Responses] = {
    200: {"description": "The event stream", "content": _STREAM},
    204: {"description": "The cursor is the last event there will ever be: stop"},
    **problems("invalid_cursor", "not_found", "not_acceptable", "rate_limited", "too_many_streams"),
}


@router.head(
    "/batches/{batch_id}/events",
    operation_id="headEvents",
    summary="What a GET would answer, without the stream",
    response_model=None,
    response_class=Response,
    responses=_EVENTS,
)
@router.get(
    "/batches/{batch_id}/events",
    operation_id="getEvents",
    summary="Follow a batch: what was, then what is, until `batch_end`",
    description="Goes on after `Last-Event-ID`, else after `?after=`; 0 or nothing is the start. With "
    "`Accept: application/x-ndjson` each event is a line of JSON.",
    response_model=None,
    response_class=Response,
    responses=_EVENTS,
    openapi_extra={
        "parameters": [
            {
                "name": "Last-Event-ID",
                "in": "header",
                "required": False,
                "description": "The last event id you have seen. Wins over `after`.",
                "schema": {"type": "string"},
            }
        ]
    },
)
async def get_events(
    request: Request,
    batch_id: BatchId,
    caller: Viewer,
    after: Annotated[
        str | None, Query(description="The last event id you have seen.", json_schema_extra={"pattern": "^[0-9]*$"})
    ] = None,
    updates: UpdatesParameter = "delta",
) -> Response:
    form = stream_form(request)
    cursor = event_cursor(request, after)
    services = services_of(request)
    frames = await services.batches.open_events(batch_id, owner=caller.sees, cursor=cursor, updates=updates)
    if frames is None:
        return Response(status_code=204)
    if request.method == "HEAD":
        return EventStream(frames, form)
    return EventStream(frames, form, slot=services.streams.open(caller.key_id, batch_id))


@router.post(
    "/batches/{batch_id}/cancel",
    operation_id="cancelBatch",
    summary="Cancel a batch; asking again changes nothing",
    status_code=202,
    response_model=None,
    responses={
        200: {"model": BatchBody, "description": "The batch has ended"},
        202: {"model": BatchBody, "description": "The batch is being stopped"},
        **problems("not_found"),
    },
)
async def cancel_batch(request: Request, batch_id: BatchId, caller: ToolCaller) -> Response:
    services = services_of(request)
    batch = await services.batches.get(batch_id, owner=caller.sees)
    require_tools(request, caller, (call.tool_name for call in batch.calls))
    batch = await services.batches.cancel(batch_id, owner=caller.sees, by=caller)
    return json_response(batch_json(batch), 200 if batch.status.terminal else 202)


@router.post(
    "/workspaces/{workspace_id}/tools/{tool}",
    operation_id="callTool",
    summary="Call one tool: the body is its arguments",
    description="A batch of one that is waited for, 30 s unless `?wait=` says otherwise.",
    response_model=None,
    openapi_extra={
        "requestBody": {
            "required": False,
            "content": {
                "application/json": {
                    "schema": {"description": "The arguments; nothing is {}."},
                    **examples_of({"command": "ls -l"}, {"path": "task.txt", "limit": 20}),
                }
            },
        }
    },
    responses={
        200: {
            "model": CallBody,
            "description": "The call has ended",
            "headers": {"Location": _LOCATION, "Idempotent-Replayed": _REPLAYED},
        },
        202: {
            "model": CallBody,
            "description": "The call goes on; its batch is at `Location`",
            "headers": {"Location": _LOCATION, "Idempotent-Replayed": _REPLAYED},
        },
        **_MAKES,
    },
)
async def call_tool(
    request: Request,
    workspace_id: WorkspaceId,
    tool: Annotated[str, Path(description="The tool's name.")],
    caller: ToolCaller,
    wait: Wait = None,
    key: IdempotencyHeader = None,
) -> Response:
    services = services_of(request)
    refuse_when_draining(services)
    if tool not in services.tools.names:
        raise NotFound(f"there is no tool {tool[:64]}; there are {', '.join(services.tools.names)}")
    arguments = await read_json(request, empty={})
    asked = BatchRequest((CallRequest(None, tool, arguments),), metadata={})
    idempotency = await idempotency_key(key, f"tool:{tool}", arguments)
    submitted = await _submit(services, request, workspace_id, asked, caller, idempotency)
    time = waiting(request, wait, default=TOOL_WAIT_SECONDS)
    batch = await services.batches.get(submitted.batch.id, owner=None, wait=time.seconds)
    headers = {**_headers(submitted), **time.headers}
    return json_response(call_json(batch.calls[0]), 200 if batch.status.terminal else 202, headers)


async def _submit(
    services: Services,
    request: Request,
    workspace_id: str,
    asked: BatchRequest,
    caller: Caller,
    idempotency: IdempotencyKey | None,
) -> Submitted:
    require_tools(request, caller, (call.name for call in asked.calls))
    # What happens in a workspace belongs to its owner, also when an operator makes it happen.
    owner = await services.workspaces.owner(workspace_id, seen_by=caller.sees)
    if idempotency is not None:
        batch = await services.batches.attach(workspace_id, idempotency, owner=owner)
        if batch is not None:
            return Submitted(batch, attached=True)
    here = await services.workspaces.check_root(workspace_id)
    return await services.batches.submit(
        workspace_id,
        asked,
        owner=owner,
        request_id=caller.request_id,
        idempotency=idempotency,
        by=caller,
        elsewhere=not here,
    )


def _headers(submitted: Submitted) -> dict[str, str]:
    return {"Location": f"/v1/batches/{submitted.batch.id}", **(REPLAYED if submitted.attached else {})}


def _stream(
    services: Services, submitted: Submitted, updates: Updates, form: str, headers: dict[str, str], slot: StreamSlot
) -> Response:
    batch = submitted.batch

    async def cancel() -> None:
        await services.batches.cancel(batch.id, owner=None)

    return EventStream(
        services.batches.follow(batch, updates),
        form,
        headers=headers,
        slot=slot,
        # Who only attached is not the client the batch was to end with.
        on_disconnect=cancel if batch.on_disconnect == "cancel" and not submitted.attached else None,
    )
