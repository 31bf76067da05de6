"""The audit log, for operators."""

from typing import Annotated, Any

from fastapi import APIRouter, Query, Request
from pydantic import StringConstraints
from starlette.responses import Response

from app.api.dependencies import PAGE_MAX, Admin, Cursor, services_of
from app.api.export import export
from app.api.negotiation import JSON, JSON_LINES, named
from app.api.openapi import at_every_route, problems
from app.api.schemas import AuditListBody
from app.api.times import RequestTime, milliseconds
from app.api.wire import audit_json, decode_cursor, list_response
from app.domain.audit import AuditAction, AuditEvent
from app.storage.base import AuditFilter

router = APIRouter(prefix="/v1/audit-events", tags=["keys"], responses=at_every_route())

Name = Annotated[str, StringConstraints(min_length=1, max_length=64, pattern=r"^[!-~]*$")]


@router.get(
    "",
    operation_id="listAuditEvents",
    summary="Query the audit log, newest first",
    description="Conditions are joined by AND. A page looks at a bounded number of rows and may be short, or empty, "
    "and still have a `nextCursor`. With `Accept: application/x-ndjson` the answer is all events that meet the "
    "conditions, a line for each; `cursor` is where it begins and `limit` how many lines it has at most.",
    response_model=None,
    responses={
        200: {
            "model": AuditListBody,
            "content": {JSON_LINES: {"schema": {"type": "string", "description": "An event a line, each as JSON."}}},
        },
        **problems("invalid_cursor"),
    },
)
async def list_audit_events(
    request: Request,
    _caller: Admin,
    action: Annotated[AuditAction | None, Query()] = None,
    actor: Annotated[Name | None, Query(description="The key's id, `env`, `cli`, `service` or `anonymous`.")] = None,
    target: Annotated[Name | None, Query(description="The id of what was changed.")] = None,
    since: Annotated[RequestTime | None, Query(description="At this time or later.")] = None,
    until: Annotated[RequestTime | None, Query(description="At this time or earlier.")] = None,
    limit: Annotated[
        int | None, Query(ge=1, le=PAGE_MAX, description="Events of a page at most; 50 when absent.")
    ] = None,
    cursor: Cursor = None,
) -> Response:
    condition = AuditFilter(
        action=action,
        actor=actor,
        target=target,
        since=None if since is None else milliseconds(since),
        until=None if until is None else milliseconds(until),
    )
    audit = services_of(request).audit
    before = decode_cursor(cursor, "audit")
    if named(request, (JSON, JSON_LINES)) == JSON_LINES:
        return await export(request.scope, audit.every(condition, before=before), _line, before=before, limit=limit)
    page = await audit.list(condition, before=before, limit=limit or 50)
    return list_response(map(audit_json, page.items), page.next_before)


async def _line(event: AuditEvent) -> dict[str, Any]:
    return audit_json(event)
