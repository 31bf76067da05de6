"""Files of a workspace: raw bytes in and out, listings, archives."""

import base64
import binascii
import re
from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing
from typing import Annotated, Any, Final
from urllib.parse import unquote_to_bytes

import structlog
from fastapi import APIRouter, Depends, Path, Query, Request
from pydantic import StringConstraints
from starlette.convertors import PathConvertor, register_url_convertor
from starlette.requests import ClientDisconnect
from starlette.responses import Response

from app.api.byte_range import byte_range
from app.api.content_type import content_headers, disposition
from app.api.dependencies import (
    Cursor,
    NodeReader,
    NodeViewer,
    NodeWriter,
    WorkspaceId,
    refuse_when_draining,
    services_of,
)
from app.api.errors import BadRequest, UnsupportedMediaType
from app.api.event_stream import BoundedStream
from app.api.openapi import Responses, at_every_route, header, problems
from app.api.schemas import FilesBody, StoredFileBody, TreeBody, UnpackedBody
from app.api.upload import form_parts, streamed_body
from app.api.wire import json_response
from app.domain.abort import Aborted
from app.domain.audit import AuditAction
from app.errors import AppError, ErrorCode, InvalidCursor, InvalidPath
from app.sandbox.archive_reader import ArchiveFormat
from app.services.archives import Packing
from app.services.files import TREE_ENTRIES_MAX, Condition, Download, EntityTags, FileShrank, NotStored, Stored

router = APIRouter(prefix="/v1/workspaces", tags=["files"], responses=at_every_route())

_log = structlog.get_logger(__name__)


class _AnyPath(PathConvertor):
    """The rest of a URL, line ends included: a file's name may hold them."""

    regex = "(?s:.*)"


register_url_convertor("anypath", _AnyPath())


# -- parameters -------------------------------------------------------------------------------------------------------


def _file_path(
    request: Request,
    path: Annotated[  # noqa: ARG001 - declared for the document; its bytes are looked at instead
        str,
        Path(description="The file's path, relative to the workspace's root; each byte may be percent-encoded."),
    ],
) -> str:
    # What the server has decoded has U+FFFD for bytes that are no UTF-8, which is the name of another file.
    raw: bytes = request.scope["raw_path"]
    try:
        return unquote_to_bytes(raw).split(b"/", 5)[5].decode()
    except UnicodeDecodeError:
        message = "the path has to be UTF-8, percent-encoded"
        error = {"parameter": "path", "code": ErrorCode.INVALID_ARGUMENTS.value, "message": message}
        raise InvalidPath(message, errors=[error]) from None


FilePath = Annotated[str, Depends(_file_path)]
Directory = Annotated[str, Query(max_length=4095, description="A directory, relative to the workspace's root.")]
Format = Annotated[ArchiveFormat, Query(description="The archive's format.")]
Globs = Annotated[
    list[Annotated[str, StringConstraints(min_length=1, max_length=4095)]],
    Query(
        max_length=64,
        description="Leave out what matches this glob: `node_modules`, `*.log`, `/build/**`. May be given more than "
        "once. A glob without `/` matches names at any depth, one with `/` begins at `path`.",
    ),
]

_CURSOR: Final = b"after:"
_TAG: Final = re.compile(r'\s*((?:W/)?"[^"\x00-\x20\x7f]*"|[^\s",]+)\s*(?:,|\Z)')


def _tags(request: Request, name: str) -> EntityTags | None:
    """Return the entity tags of a header, None when it was not sent; quotes may be left out.

    Raises:
        BadRequest: it is something else. To ignore it would overwrite what the caller means to keep.
    """
    values = request.headers.getlist(name)
    if not values:
        return None
    text = ",".join(values).strip()
    if text == "*":
        return EntityTags(any=True)
    tags = []
    position = 0
    while position < len(text):
        found = _TAG.match(text, position)
        if found is None:
            break
        tags.append(found[1] if found[1].endswith('"') else f'"{found[1]}"')
        position = found.end()
    if not tags or position < len(text):
        raise BadRequest(f'{name} has to be * or a list of tags such as "0123abcd"')
    return EntityTags(tuple(tags))


def _condition(request: Request) -> Condition:
    return Condition(_tags(request, "if-match"), _tags(request, "if-none-match"))


def _cursor(value: str | None) -> bytes | None:
    """Return the path a page goes on after. Raises InvalidCursor when it was not made by `_next_cursor`."""
    if value is None:
        return None
    try:
        data = base64.b64decode(value + "=" * (-len(value) % 4), b"-_", validate=True)
    except (binascii.Error, ValueError):
        data = b""
    # A client that sends `null` for what was null is told so.
    path = data.removeprefix(_CURSOR) if data.startswith(_CURSOR) else b""
    if not path or b"\0" in path or any(name in {b"", b".", b".."} for name in path.split(b"/")):
        raise InvalidCursor("cursor has to be the nextCursor of the page before, unchanged")
    return path


def _next_cursor(last: bytes | None) -> str | None:
    return None if last is None else base64.urlsafe_b64encode(_CURSOR + last).decode().rstrip("=")


# -- the document -----------------------------------------------------------------------------------------------------


def _header_parameter(name: str, description: str) -> dict[str, Any]:
    return {"name": name, "in": "header", "required": False, "description": description, "schema": {"type": "string"}}


_IF_MATCH: Final = _header_parameter("If-Match", "Only when the file has one of these ETags; `*`: when there is one.")
_IF_NONE_MATCH: Final = _header_parameter(
    "If-None-Match", "Only when the file has none of these ETags; `*`: when there is no file."
)
_RANGE: Final = _header_parameter("Range", "One range of bytes; several, or another unit, are answered with all of it.")
_IF_RANGE: Final = _header_parameter("If-Range", "Apply `Range` only when this is the file's ETag.")
_BYTES: Final = {"*/*": {"schema": {"type": "string", "format": "binary"}}}
_ETAG: Final = {"ETag": header("Changes with the file's content; for `If-Match` and `If-None-Match`.")}
_PATHS: Final = ("invalid_path", "not_found", "conflict", "workspace_moved", "workspace_gone", "overloaded")
_STORES: Final = (*_PATHS, "bad_request", "payload_too_large", "unsupported_media_type", "no_space")
_DOWNLOAD: Final[Responses] = {
    200: {
        "description": "The file, byte for byte",
        "content": _BYTES,
        "headers": {"Accept-Ranges": header("`bytes`"), **_ETAG},
    },
    206: {
        "description": "The range that was asked for",
        "content": _BYTES,
        "headers": {"Content-Range": header("`bytes FIRST-LAST/ALL`"), **_ETAG},
    },
    304: {"description": "The file has an ETag that `If-None-Match` names", "headers": _ETAG},
    **problems(*_PATHS, "bad_request", "precondition_failed", "range_not_satisfiable"),
}
_ARCHIVES: Final = {
    ArchiveFormat.TAR: "application/x-tar",
    ArchiveFormat.TAR_GZ: "application/gzip",
    ArchiveFormat.ZIP: "application/zip",
}
_ARCHIVE_TYPES: Final = {
    **{kind: form for form, kind in _ARCHIVES.items()},
    "application/tar": ArchiveFormat.TAR,
    "application/x-gzip": ArchiveFormat.TAR_GZ,
    "application/x-gtar": ArchiveFormat.TAR_GZ,
    "application/tar+gzip": ArchiveFormat.TAR_GZ,
    "application/x-compressed-tar": ArchiveFormat.TAR_GZ,
    "application/x-zip-compressed": ArchiveFormat.ZIP,
}


def _body(content: Mapping[str, Any], *, required: bool = True) -> dict[str, Any]:
    return {"requestBody": {"required": required, "content": dict(content)}}


# -- single files -----------------------------------------------------------------------------------------------------


@router.head(
    "/{workspace_id}/files/{path:anypath}",
    operation_id="headFile",
    summary="The size, type and ETag of a file",
    response_model=None,
    response_class=Response,
    responses={status: _DOWNLOAD[status] for status in _DOWNLOAD if status not in {206, 416}},
    openapi_extra={"parameters": [_IF_MATCH, _IF_NONE_MATCH]},
)
@router.get(
    "/{workspace_id}/files/{path:anypath}",
    operation_id="getFile",
    summary="Get a file as it is, whole or in part",
    description="What a browser would run or render (HTML, SVG, scripts, PDF) is sent as a download.",
    response_model=None,
    response_class=Response,
    responses=_DOWNLOAD,
    openapi_extra={"parameters": [_IF_MATCH, _IF_NONE_MATCH, _RANGE, _IF_RANGE]},
)
async def get_file(request: Request, workspace_id: WorkspaceId, caller: NodeViewer, path: FilePath) -> Response:
    condition = _condition(request)
    download = await services_of(request).files.open(workspace_id, path, owner=caller.sees)
    sent = False
    try:
        headers = {"ETag": download.etag, "Cache-Control": "private, no-cache"}
        if condition.match is not None:
            Condition(match=condition.match).require(download.etag, download.path)
        if condition.none_match is not None and condition.none_match.weakly_name(download.etag):
            return Response(status_code=304, headers=headers)
        headers |= {
            "Accept-Ranges": "bytes",
            **content_headers(download.path, download.head, whole=download.bytes == len(download.head)),
        }
        if request.method == "HEAD":
            # Range is defined for GET alone.
            return Response(None, 200, {**headers, "Content-Length": str(download.bytes)})
        wanted = _wanted(request, download)
        start, end = wanted or (0, download.bytes)
        headers["Content-Length"] = str(end - start)
        if wanted is not None:
            headers["Content-Range"] = f"bytes {start}-{end - 1}/{download.bytes}"
        sent = True
        return BoundedStream(
            _content(download, start, end), 200 if wanted is None else 206, headers, headers["Content-Type"]
        )
    finally:
        if not sent:
            download.close()


def _wanted(request: Request, download: Download) -> tuple[int, int] | None:
    condition = request.headers.get("if-range")
    if condition is not None and condition.strip() != download.etag:
        return None
    return byte_range(request.headers.get("range"), download.bytes, download.path)


async def _content(download: Download, start: int, end: int) -> AsyncGenerator[bytes, None]:
    try:
        async with aclosing(download.chunks(start, end)) as chunks:
            async for chunk in chunks:
                yield chunk
    except FileShrank as error:
        raise _cut(error) from None
    finally:
        download.close()


def _cut(error: FileShrank) -> ClientDisconnect:
    """Return what makes the server cut the connection: the client sees that the answer is not whole."""
    _log.warning("download_cut", reason=str(error))
    return ClientDisconnect()


@router.put(
    "/{workspace_id}/files/{path:anypath}",
    operation_id="putFile",
    summary="Store a file: the body is its whole content",
    description="Directories on the way are made. Until the body is there, and after any error, the old file stays as "
    "it is; then it is replaced in one step, after every earlier change of it.",
    response_model=None,
    openapi_extra={"parameters": [_IF_MATCH, _IF_NONE_MATCH], **_body(_BYTES, required=False)},
    responses={
        200: {"model": StoredFileBody, "description": "The file was replaced", "headers": _ETAG},
        201: {"model": StoredFileBody, "description": "The file is new", "headers": _ETAG},
        **problems(*_STORES, "precondition_failed"),
    },
)
async def put_file(request: Request, workspace_id: WorkspaceId, caller: NodeWriter, path: FilePath) -> Response:
    services = services_of(request)
    refuse_when_draining(services)
    condition = _condition(request)
    if "content-range" in request.headers:
        raise BadRequest("a part of a file cannot be stored; send all of it, without Content-Range")
    services.audit.require_room()
    async with aclosing(streamed_body(request, services.files.max_upload_bytes)) as body:
        stored = await services.files.put(workspace_id, path, body, condition=condition, owner=caller.sees)
    await services.audit.changed_files(
        caller, AuditAction.FILE_STORED, workspace_id, [stored.path], bytes=stored.bytes, created=stored.created
    )
    return json_response(_stored(stored), 201 if stored.created else 200, {"ETag": stored.etag})


def _stored(stored: Stored) -> dict[str, Any]:
    return {"path": stored.path, "bytes": stored.bytes, "etag": stored.etag, "created": stored.created}


@router.delete(
    "/{workspace_id}/files/{path:anypath}",
    operation_id="deleteFile",
    summary="Remove a file, or a directory with everything in it",
    description="Of a symbolic link the link is removed, never what it points to.",
    status_code=204,
    response_model=None,
    response_class=Response,
    openapi_extra={"parameters": [_IF_MATCH, _IF_NONE_MATCH]},
    responses={
        204: {"description": "The file is removed"},
        **problems(*_PATHS, "bad_request", "precondition_failed"),
    },
)
async def delete_file(
    request: Request,
    workspace_id: WorkspaceId,
    caller: NodeWriter,
    path: FilePath,
    recursive: Annotated[bool, Query(description="Remove a directory with everything in it.")] = False,
) -> Response:
    services = services_of(request)
    services.audit.require_room()
    await services.files.delete(
        workspace_id, path, recursive=recursive, condition=_condition(request), owner=caller.sees
    )
    await services.audit.changed_files(caller, AuditAction.FILE_DELETED, workspace_id, [path], recursive=recursive)
    return Response(status_code=204)


# -- several files ----------------------------------------------------------------------------------------------------


@router.post(
    "/{workspace_id}/files",
    operation_id="postFiles",
    summary="Store several files from one form",
    description="`multipart/form-data`: the `filename` of a part is its path relative to the workspace's root; of a "
    "part without one it is the `name`. Parts are stored as they arrive, each in one step. One that cannot be stored "
    "does not stop the others: look at `hasErrors`.",
    response_model=None,
    openapi_extra=_body(
        {
            "multipart/form-data": {
                "schema": {
                    "type": "object",
                    "properties": {"file": {"type": "array", "items": {"type": "string", "format": "binary"}}},
                    "additionalProperties": {"type": "string"},
                }
            }
        }
    ),
    responses={
        200: {"model": FilesBody, "description": "What became of each part, in their order"},
        **problems(*_STORES),
    },
)
async def post_files(request: Request, workspace_id: WorkspaceId, caller: NodeWriter) -> Response:
    services = services_of(request)
    refuse_when_draining(services)
    services.audit.require_room()
    results: list[Stored | NotStored] = []
    try:
        async with aclosing(form_parts(request, services.files.max_upload_bytes)) as parts:
            await services.files.put_many(workspace_id, parts, owner=caller.sees, results=results)
    except AppError as error:
        if "files" in error.extra:
            error.extra["files"] = [_result(result) for result in error.extra["files"]]
        raise
    finally:
        paths = [result.path for result in results if isinstance(result, Stored)]
        await services.audit.changed_files(caller, AuditAction.FILES_STORED, workspace_id, paths)
    failed = any(isinstance(result, NotStored) for result in results)
    return json_response({"data": [_result(result) for result in results], "hasErrors": failed})


def _result(result: Stored | NotStored) -> dict[str, Any]:
    if isinstance(result, Stored):
        return {**_stored(result), "error": None}
    error = {"code": result.code, "message": result.message}
    return {"path": result.path, "bytes": None, "etag": None, "created": None, "error": error}


@router.get(
    "/{workspace_id}/tree",
    operation_id="getTree",
    summary="List a directory and what is below it",
    description="In the order of the paths, compared component by component as bytes: a directory comes before what is "
    "in it. Links are not followed. A page may be short and still have a `nextCursor`.",
    response_model=None,
    responses={200: {"model": TreeBody}, **problems(*_PATHS, "invalid_cursor")},
)
async def get_tree(
    request: Request,
    workspace_id: WorkspaceId,
    caller: NodeReader,
    path: Directory = ".",
    depth: Annotated[
        int | None, Query(ge=1, le=100_000, description="How many levels; 1 is the directory's own entries.")
    ] = None,
    limit: Annotated[int, Query(ge=1, le=TREE_ENTRIES_MAX, description="Entries of a page at most.")] = 1000,
    cursor: Cursor = None,
) -> Response:
    page = await services_of(request).files.tree(
        workspace_id, path, depth=depth, limit=limit, after=_cursor(cursor), owner=caller.sees
    )
    return json_response({"data": page.entries, "nextCursor": _next_cursor(page.last)})


# -- archives ---------------------------------------------------------------------------------------------------------


@router.get(
    "/{workspace_id}/archive",
    operation_id="getArchive",
    summary="Get a directory as one archive",
    description="Regular files and directories. Symbolic links, pipes, sockets and devices are left out, and so is "
    "what lies on another file system.",
    response_model=None,
    response_class=Response,
    responses={
        200: {
            "description": "The archive, as it is made",
            "content": {kind: {"schema": {"type": "string", "format": "binary"}} for kind in _ARCHIVES.values()},
            "headers": {"Content-Disposition": header("A name to save it under.")},
        },
        **problems(*_PATHS, "payload_too_large"),
    },
)
async def get_archive(
    request: Request,
    workspace_id: WorkspaceId,
    caller: NodeViewer,
    format: Format = ArchiveFormat.TAR_GZ,  # noqa: A002 - the parameter's name on the wire
    path: Directory = ".",
    exclude: Globs = [],  # noqa: B006 - FastAPI copies it
) -> Response:
    packing = await services_of(request).archives.pack(workspace_id, path, format, exclude, owner=caller.sees)
    headers = {"Content-Disposition": disposition(f"{workspace_id}.{format.value}")}
    return BoundedStream(_archive(packing), 200, headers, _ARCHIVES[format])


async def _archive(packing: Packing) -> AsyncGenerator[bytes, None]:
    try:
        async with aclosing(packing.chunks()) as chunks:
            async for chunk in chunks:
                yield chunk
    except FileShrank as error:
        raise _cut(error) from None
    finally:
        packing.close()


@router.put(
    "/{workspace_id}/archive",
    operation_id="putArchive",
    summary="Unpack an archive into a directory",
    description="Nothing is unpacked unless every entry is a file or directory with a relative path of its own. Then "
    "each file is stored in one step, in the archive's order; when one cannot be, `applied` lists what was.",
    response_model=None,
    openapi_extra=_body({kind: {"schema": {"type": "string", "format": "binary"}} for kind in _ARCHIVES.values()}),
    responses={
        200: {"model": UnpackedBody, "description": "All of it is unpacked"},
        **problems(*_STORES),
    },
)
async def put_archive(
    request: Request,
    workspace_id: WorkspaceId,
    caller: NodeWriter,
    format: Annotated[  # noqa: A002 - the parameter's name on the wire
        ArchiveFormat | None, Query(description="The archive's format; not given: what `Content-Type` says.")
    ] = None,
    path: Directory = ".",
) -> Response:
    services = services_of(request)
    refuse_when_draining(services)
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    form = format or _ARCHIVE_TYPES.get(kind)
    if form is None:
        raise UnsupportedMediaType(f"say what the archive is, by ?format= or Content-Type: {', '.join(ArchiveFormat)}")
    services.audit.require_room()
    applied: list[str] = []
    async with aclosing(streamed_body(request, services.archives.max_bytes)) as body:
        try:
            unpacked = await services.archives.unpack(
                workspace_id, path, form, body, gone=request.is_disconnected, owner=caller.sees, applied=applied
            )
        except Aborted:
            raise ClientDisconnect from None
        finally:
            await services.audit.changed_files(caller, AuditAction.ARCHIVE_UNPACKED, workspace_id, applied)
    return json_response(
        {
            "created": unpacked.created,
            "replaced": unpacked.replaced,
            "directories": unpacked.directories,
            "bytes": unpacked.bytes,
        }
    )
