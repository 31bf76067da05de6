"""Limits: what holds here, and how much of it is used."""

from typing import Annotated

from fastapi import APIRouter, Query, Request
from starlette.responses import Response

from app.api.dependencies import Reader, services_of
from app.api.limits import LimitsBody, UseBody, caller_use, limits_body, service_use, workspace_use
from app.api.openapi import at_every_route, problems
from app.api.wire import json_response
from app.domain.ids import is_id
from app.errors import NotFound

router = APIRouter(prefix="/v1", tags=["operations"], responses=at_every_route())


@router.get(
    "/limits",
    operation_id="getLimits",
    summary="The limits that hold, and how much of them you use",
    description="Numbers of this process. With `?workspace=` also the use of one workspace; with the scope `admin` "
    "also that of all callers.",
    response_model=None,
    responses={200: {"model": LimitsBody}, **problems("not_found")},
)
async def get_limits(
    request: Request,
    caller: Reader,
    workspace: Annotated[str | None, Query(description="The id of a workspace whose use is told too.")] = None,
) -> Response:
    services = services_of(request)
    pressure = services.pressure
    of_workspace = None
    if workspace is not None:
        if not is_id(workspace, "ws"):
            raise NotFound(f"there is no workspace {workspace[:64]}")
        found = await services.workspaces.get(workspace, owner=caller.sees)
        of_workspace = workspace_use(found.id, pressure.of_workspace(found))
    use = UseBody(
        caller=caller_use(pressure.of_caller(caller.key_id, caller.owner)),
        workspace=of_workspace,
        service=service_use(pressure.of_service()) if "admin" in caller.scopes else None,
    )
    body = limits_body(services, use).model_dump(mode="json", by_alias=True)
    body["use"] = {name: value for name, value in body["use"].items() if value is not None}
    return json_response(body)
