"""Calls: the record query, one call, its captured output, its cancel."""

from typing import Annotated, Any, Final, Literal

from fastapi import APIRouter, Query, Request
from pydantic import StringConstraints
from starlette.responses import Response

from app.api.byte_range import byte_range
from app.api.dependencies import CallId, Cursor, Reader, ToolCaller, Viewer, require_tools, services_of
from app.api.event_stream import BoundedStream
from app.api.export import export
from app.api.negotiation import JSON, JSON_LINES, named
from app.api.openapi import Responses, at_every_route, header, problems
from app.api.schemas import CallBody, CallListBody
from app.api.times import RequestTime, milliseconds
from app.api.wire import Budget, call_json, decode_cursor, json_response, list_response
from app.domain.events import OutputStream
from app.domain.tool_call import CallRecord, CallStatus
from app.errors import ErrorCode
from app.storage.base import CallFilter

router = APIRouter(prefix="/v1/calls", tags=["calls"], responses=at_every_route())

_TEXT: Final = "text/plain; charset=utf-8"


# Text that is compared with columns: visible, so that no database stumbles over it.
Visible = Annotated[str, StringConstraints(min_length=1, max_length=128, pattern=r"^[^\x00-\x1f\x7f]*$")]
Line = Annotated[str, StringConstraints(min_length=1, max_length=4096)]


@router.get(
    "",
    operation_id="listCalls",
    summary="Query the records of all calls, newest first",
    description="Conditions are joined by AND. A page looks at a bounded number of rows and may be short, or empty, "
    "and still have a `nextCursor`. With `Accept: application/x-ndjson` the answer is all calls that meet the "
    "conditions, a line for each, whole; `cursor` is where it begins and `limit` how many lines it has at most.",
    response_model=None,
    responses={
        200: {
            "model": CallListBody,
            "content": {JSON_LINES: {"schema": {"type": "string", "description": "A call a line, each as JSON."}}},
        },
        **problems("invalid_cursor", "not_found"),
    },
)
async def list_calls(
    request: Request,
    caller: Reader,
    workspace: Annotated[Visible | None, Query(description="The workspace's id.")] = None,
    batch: Annotated[Visible | None, Query(description="The batch's id.")] = None,
    tool: Annotated[Visible | None, Query(description="The tool's name.")] = None,
    status: Annotated[CallStatus | None, Query()] = None,
    error: Annotated[ErrorCode | None, Query(description="`error.code`.")] = None,
    toolcall: Annotated[Visible | None, Query(description="Your own id, `toolCallId`.")] = None,
    path: Annotated[
        Line | None,
        Query(
            description="The path an ended call was about, relative to the workspace's root; an absolute one is "
            "understood together with `workspace`."
        ),
    ] = None,
    q: Annotated[
        Line | None,
        Query(
            description="A text in the summary of an ended call: its tool, its path, command or pattern, and the first "
            "text of its result. Case does not count."
        ),
    ] = None,
    since: Annotated[RequestTime | None, Query(description="Queued at this time or later.")] = None,
    until: Annotated[RequestTime | None, Query(description="Queued at this time or earlier.")] = None,
    minduration: Annotated[int | None, Query(ge=0, le=2**53, description="Ran for this many ms or longer.")] = None,
    limit: Annotated[int | None, Query(ge=1, le=200, description="Calls of a page at most; 50 when absent.")] = None,
    cursor: Cursor = None,
) -> Response:
    batches = services_of(request).batches
    before = decode_cursor(cursor, "call")
    condition = CallFilter(
        workspace_id=workspace,
        batch_id=batch,
        tool_name=tool,
        status=status,
        error_code=None if error is None else error.value,
        tool_call_id=toolcall,
        since=None if since is None else milliseconds(since),
        until=None if until is None else milliseconds(until),
        min_duration_ms=minduration,
        path=path,
        text=q,
    )
    if named(request, (JSON, JSON_LINES)) == JSON_LINES:

        async def whole(listed: CallRecord) -> dict[str, Any] | None:
            call = await batches.whole_call(listed)
            return None if call is None else call_json(call)

        calls = batches.every_call(condition, owner=caller.sees, before=before)
        return await export(request.scope, calls, whole, before=before, limit=limit)
    page = await batches.calls(condition, owner=caller.sees, before=before, limit=limit or 50)
    budget = Budget()
    return list_response((call_json(call, budget) for call in page.items), page.next_before)


@router.get(
    "/{call_id}",
    operation_id="getCall",
    summary="Get one call, always with its whole result",
    response_model=None,
    responses={200: {"model": CallBody}, **problems("not_found")},
)
async def get_call(request: Request, call_id: CallId, caller: Viewer) -> Response:
    return json_response(call_json(await services_of(request).batches.call(call_id, owner=caller.sees)))


@router.post(
    "/{call_id}/cancel",
    operation_id="cancelCall",
    summary="Cancel one call; asking again changes nothing",
    status_code=202,
    response_model=None,
    responses={
        200: {"model": CallBody, "description": "The call has ended"},
        202: {"model": CallBody, "description": "The call is being stopped"},
        **problems("not_found"),
    },
)
async def cancel_call(request: Request, call_id: CallId, caller: ToolCaller) -> Response:
    services = services_of(request)
    call = await services.batches.call(call_id, owner=caller.sees)
    require_tools(request, caller, (call.tool_name,))
    call = await services.batches.cancel_call(call_id, owner=caller.sees, by=caller)
    return json_response(call_json(call), 200 if call.status.terminal else 202)


_BYTES: Final = {"text/plain": {"schema": {"type": "string"}}}
_OUTPUT: Final[Responses] = {
    200: {
        "description": "The bytes as the command wrote them; they need not be valid UTF-8",
        "content": _BYTES,
        "headers": {"Accept-Ranges": header("`bytes`")},
    },
    206: {
        "description": "The range that was asked for",
        "content": _BYTES,
        "headers": {"Content-Range": header("`bytes FIRST-LAST/ALL`")},
    },
    **problems("not_found", "output_gone", "range_not_satisfiable", "rate_limited", "too_many_streams"),
}


@router.head(
    "/{call_id}/output",
    operation_id="headOutput",
    summary="The length of the captured output",
    response_model=None,
    response_class=Response,
    responses=_OUTPUT,
)
@router.get(
    "/{call_id}/output",
    operation_id="getOutput",
    summary="Get the captured output of a call, whole, in part, or live",
    description="While the call runs this is what was captured so far; with `?follow=true` the answer goes on until "
    "the call has ended, and `Range` is ignored.",
    response_model=None,
    response_class=Response,
    responses=_OUTPUT,
    openapi_extra={
        "parameters": [
            {
                "name": "Range",
                "in": "header",
                "required": False,
                "description": "One range of bytes; several, or another unit, are answered with all of it.",
                "schema": {"type": "string"},
            }
        ]
    },
)
async def get_output(
    request: Request,
    call_id: CallId,
    caller: Viewer,
    stream: Annotated[
        Literal["combined", "stdout", "stderr"], Query(description="`combined`: both, in the order they were read.")
    ] = "combined",
    follow: Annotated[bool, Query(description="Go on until the call has ended.")] = False,
) -> Response:
    batches = services_of(request).batches
    call = await batches.call(call_id, owner=caller.sees)
    only: OutputStream | None = None if stream == "combined" else stream
    if follow:
        await batches.output_extent(call, only)
        if request.method == "HEAD":
            return Response(headers={"Content-Type": _TEXT})
        slot = services_of(request).streams.open(caller.key_id, call.batch_id)
        return BoundedStream(batches.follow_output(call, only, 0), 200, {}, _TEXT, slot=slot)
    total = await batches.output_extent(call, only)
    # Range is defined for GET alone.
    wanted = None if request.method == "HEAD" else byte_range(request.headers.get("range"), total, "the output so far")
    start, end = wanted or (0, total)
    headers = {"Accept-Ranges": "bytes", "Content-Length": str(end - start)}
    if request.method == "HEAD":
        return Response(None, 200, headers, _TEXT)
    if wanted is not None:
        headers["Content-Range"] = f"bytes {start}-{end - 1}/{total}"
    return BoundedStream(batches.output(call, only, start, end), 200 if wanted is None else 206, headers, _TEXT)
