"""Tool definitions, in general and as one workspace has them, in the form of the API that is to get them."""

from typing import Annotated

from fastapi import APIRouter, Path, Query, Request
from starlette.responses import Response

from app.api.dependencies import Reader, WorkspaceId, services_of
from app.api.openapi import at_every_route, problems
from app.api.schemas import ToolBody, ToolListBody
from app.api.wire import json_response, list_response
from app.errors import NotFound
from app.services.tool_catalog import ToolSet
from app.tools.definition_formats import ToolFormat

router = APIRouter(prefix="/v1", tags=["tools"], responses=at_every_route())

Format = Annotated[ToolFormat, Query(description="Whose form the definitions take; `native` is ours.")]
Set = Annotated[
    ToolSet, Query(description="`coding`: read, bash, edit, write; `readonly`: what changes nothing; `all`.")
]


@router.get(
    "/tools",
    operation_id="listTools",
    summary="List the tools' definitions",
    response_model=None,
    responses={
        200: {"model": ToolListBody},
    },
)
async def list_tools(
    request: Request,
    _caller: Reader,
    format: Format = "native",  # noqa: A002 - the name of a query parameter
    set: Set = "all",  # noqa: A002 - the same
) -> Response:
    return list_response(services_of(request).tools.list(format, set), None)


@router.get(
    "/tools/{tool}",
    operation_id="getTool",
    summary="Get one tool's definition",
    response_model=None,
    responses={200: {"model": ToolBody}, **problems("not_found")},
)
async def get_tool(
    request: Request,
    tool: Annotated[str, Path(description="The tool's name.")],
    _caller: Reader,
    format: Format = "native",  # noqa: A002 - the name of a query parameter
) -> Response:
    catalog = services_of(request).tools
    if tool not in catalog.names:
        raise NotFound(f"there is no tool {tool[:64]}; there are {', '.join(catalog.names)}")
    return json_response(catalog.get(tool, format))


@router.get(
    "/workspaces/{workspace_id}/tools",
    operation_id="listWorkspaceTools",
    summary="List the tools a workspace may use, with the limits that hold in it",
    response_model=None,
    responses={
        200: {"model": ToolListBody},
        **problems("not_found", "workspace_gone"),
    },
)
async def list_workspace_tools(
    request: Request,
    workspace_id: WorkspaceId,
    caller: Reader,
    format: Format = "native",  # noqa: A002 - the name of a query parameter
    set: Set = "all",  # noqa: A002 - the same
) -> Response:
    services = services_of(request)
    workspace = await services.workspaces.usable(workspace_id, owner=caller.sees)
    return list_response(services.tools.list(format, set, workspace.options), None)
