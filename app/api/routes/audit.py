"""The audit log, for operators."""

from typing import Annotated

from fastapi import APIRouter, Query, Request
from pydantic import StringConstraints
from starlette.responses import Response

from app.api.dependencies import Admin, Cursor, Limit, services_of
from app.api.openapi import at_every_route, problems
from app.api.schemas import AuditListBody
from app.api.times import RequestTime, milliseconds
from app.api.wire import audit_json, decode_cursor, list_response
from app.domain.audit import AuditAction
from app.storage.base import AuditFilter

router = APIRouter(prefix="/v1/audit-events", tags=["keys"], responses=at_every_route())

Name = Annotated[str, StringConstraints(min_length=1, max_length=64, pattern=r"^[!-~]*$")]


@router.get(
    "",
    operation_id="listAuditEvents",
    summary="Query the audit log, newest first",
    description="Conditions are joined by AND. A page looks at a bounded number of rows and may be short, or empty, "
    "and still have a `nextCursor`.",
    response_model=None,
    responses={200: {"model": AuditListBody}, **problems("invalid_cursor")},
)
async def list_audit_events(
    request: Request,
    _caller: Admin,
    action: Annotated[AuditAction | None, Query()] = None,
    actor: Annotated[Name | None, Query(description="The key's id, `env`, `cli`, `service` or `anonymous`.")] = None,
    target: Annotated[Name | None, Query(description="The id of what was changed.")] = None,
    since: Annotated[RequestTime | None, Query(description="At this time or later.")] = None,
    until: Annotated[RequestTime | None, Query(description="At this time or earlier.")] = None,
    limit: Limit = 50,
    cursor: Cursor = None,
) -> Response:
    condition = AuditFilter(
        action=action,
        actor=actor,
        target=target,
        since=None if since is None else milliseconds(since),
        until=None if until is None else milliseconds(until),
    )
    page = await services_of(request).audit.list(condition, before=decode_cursor(cursor, "audit"), limit=limit)
    return list_response(map(audit_json, page.items), page.next_before)
