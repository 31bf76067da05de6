"""What needs no key: alive, ready, versions, the API's description and the page that shows it."""

from importlib.resources import files
from typing import Final

from fastapi import APIRouter, Request
from starlette.responses import JSONResponse, RedirectResponse, Response

from app.api.dependencies import Admin, services_of
from app.api.errors import NotReady
from app.api.openapi import at_every_route, document_of, problems
from app.api.schemas import HealthBody, ReadyBody, VersionBody
from app.api.wire import json_response
from app.services.readiness import READY
from app.telemetry.metrics import CONTENT_TYPE

router = APIRouter(tags=["operations"])

_PAGE: Final = files("app.api").joinpath("docs_page")
_HTML: Final = _PAGE.joinpath("docs.html").read_bytes()
_CSS: Final = _PAGE.joinpath("docs.css").read_bytes()
_SCRIPT: Final = _PAGE.joinpath("docs.js").read_bytes()
_PAGE_POLICY: Final = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src data:; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)


@router.head(
    "/healthz",
    operation_id="headHealth",
    summary="Is the process alive?",
    response_model=None,
    responses={200: {"model": HealthBody}},
)
@router.get(
    "/healthz",
    operation_id="getHealth",
    summary="Is the process alive?",
    response_model=None,
    responses={200: {"model": HealthBody}},
)
async def get_health() -> Response:
    return json_response({"status": "ok"})


@router.head(
    "/readyz",
    operation_id="headReady",
    summary="Can the service take work?",
    response_model=None,
    responses={200: {"model": ReadyBody}, **problems("not_ready")},
)
@router.get(
    "/readyz",
    operation_id="getReady",
    summary="Can the service take work?",
    response_model=None,
    responses={200: {"model": ReadyBody}, **problems("not_ready")},
)
async def get_ready(request: Request) -> Response:
    services = services_of(request)
    checks = await services.readiness.checks()
    failures = [text for text in checks.values() if text != READY]
    if failures:
        raise NotReady("; ".join(failures), failures=failures, checks=checks, sandbox=services.about.sandbox)
    return json_response({"status": "ready", "checks": checks, "sandbox": services.about.sandbox})


@router.get(
    "/version",
    operation_id="getVersion",
    summary="Versions, and what the sandbox really is",
    response_model=None,
    responses={200: {"model": VersionBody}},
)
async def get_version(request: Request) -> Response:
    services = services_of(request)
    about = services.about
    return json_response(
        {
            "name": "toolcrib",
            "version": about.version,
            "python": about.python,
            "database": about.database,
            "sandbox": about.sandbox,
            "ripgrep": about.ripgrep,
            "powershell": about.powershell,
            "tools": list(services.tools.names),
        }
    )


@router.get(
    "/metrics",
    operation_id="getMetrics",
    summary="Metrics for Prometheus; needs the scope admin",
    description="The text format of Prometheus, version 0.0.4. docs/operations.md has every series.",
    response_model=None,
    response_class=Response,
    responses={200: {"content": {"text/plain": {"schema": {"type": "string"}}}}, **at_every_route()},
)
async def get_metrics(request: Request, _caller: Admin) -> Response:
    return Response(await services_of(request).metrics.scrape(), 200, media_type=CONTENT_TYPE)


@router.get("/openapi.json", include_in_schema=False)
async def get_openapi_document(request: Request) -> Response:
    return JSONResponse(await document_of(request), headers={"Cache-Control": "no-cache"})


@router.get("/", include_in_schema=False)
async def get_root() -> Response:
    return RedirectResponse("/docs", status_code=307)


@router.get("/docs", include_in_schema=False)
async def get_docs() -> Response:
    return _page_file(_HTML, "text/html; charset=utf-8")


@router.get("/docs/docs.css", include_in_schema=False)
async def get_docs_style() -> Response:
    return _page_file(_CSS, "text/css; charset=utf-8")


@router.get("/docs/docs.js", include_in_schema=False)
async def get_docs_script() -> Response:
    return _page_file(_SCRIPT, "text/javascript; charset=utf-8")


def _page_file(content: bytes, media_type: str) -> Response:
    headers = {"Content-Security-Policy": _PAGE_POLICY, "Cache-Control": "no-cache"}
    return Response(content, 200, headers, media_type)
