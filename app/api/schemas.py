"""The wire in models: what requests are checked against and what `/openapi.json` says of both directions.

Answers are not built from these models: what is stored as JSON is spliced in as it is (`app.api.wire`). A test holds
the two together.
"""

import base64
from typing import Annotated, Any, Final, Literal, TypeVar

import orjson
from pydantic import (
    AfterValidator,
    AwareDatetime,
    BaseModel,
    ConfigDict,
    Field,
    PlainValidator,
    StringConstraints,
    ValidationError,
    WithJsonSchema,
)
from pydantic.alias_generators import to_camel
from pydantic_core import PydanticCustomError

from app.api.errors import invalid_body
from app.api.times import RequestTime, milliseconds
from app.domain.audit import AuditAction
from app.domain.batch import BatchStatus, OnDisconnect, OnError
from app.domain.caller import Scope
from app.domain.clock import now_ms
from app.domain.events import EventType
from app.domain.json_model import JsonModel
from app.domain.tool_call import CallStatus, ExecutionMode
from app.domain.workspace import WHOLE, WorkspaceOptions, WorkspaceStatus
from app.errors import ErrorCode
from app.services.batches import BatchRequest, CallRequest
from app.services.keys import KeyRequest

CALLS_MAX: Final = 64
METADATA_MAX_BYTES: Final = 16 * 1024
TIMEOUT_MAX_MS: Final = 7 * 86_400_000
TTL_MAX_SECONDS: Final = 10 * 366 * 86_400
FILES_MAX: Final = 10_000

_BASE64: Final = "^([A-Za-z0-9+/]{4})*([A-Za-z0-9+/]{2}==|[A-Za-z0-9+/]{3}=)?$"

T = TypeVar("T", bound=BaseModel)


class RequestModel(JsonModel):
    """A request body."""


class ResponseModel(BaseModel):
    """An answer. Clients must ignore fields they do not know."""

    model_config = ConfigDict(
        alias_generator=to_camel, validate_by_name=True, validate_by_alias=True, json_schema_extra={}, frozen=True
    )


def validated(model: type[T], value: Any) -> T:
    """Return `value` as a model.

    Raises:
        InvalidRequest: with one entry in `errors` for everything that does not fit.
    """
    try:
        return model.model_validate(value)
    except ValidationError as error:
        raise invalid_body(error.errors(include_url=False, include_input=False, include_context=False)) from None


# -- requests ---------------------------------------------------------------------------------------------------------


def _metadata(value: dict[str, Any]) -> dict[str, Any]:
    size = len(orjson.dumps(value))
    if size > METADATA_MAX_BYTES:
        raise PydanticCustomError(
            "too_long",
            "metadata may have {limit} bytes of JSON, not {size}",
            {"limit": METADATA_MAX_BYTES, "size": size},
        )
    return value


def _file(value: Any) -> bytes:
    if isinstance(value, str):
        return value.encode()
    if isinstance(value, dict) and value.keys() == {"base64"} and isinstance(value["base64"], str):
        try:
            return base64.b64decode(value["base64"], validate=True)
        except ValueError as error:
            raise PydanticCustomError("base64", "this is no base64: {reason}", {"reason": str(error)}) from None
    raise PydanticCustomError("file_content", 'a file is a text or {{"base64": "…"}}')


def _distinct(value: list[Scope]) -> list[Scope]:
    if len(set(value)) < len(value):
        raise PydanticCustomError("duplicate_scope", "name each scope once")
    return value


_DISTINCT: Final[dict[str, Any]] = {"uniqueItems": True}
Metadata = Annotated[
    dict[str, Any], AfterValidator(_metadata), Field(description="Your own JSON object, at most 16 KiB, kept as it is.")
]
# A name goes into texts, logs and columns: no control characters.
Name = Annotated[str, StringConstraints(min_length=1, max_length=200, pattern=r"^[^\x00-\x1f\x7f]*$")]
FilePath = Annotated[str, StringConstraints(min_length=1, max_length=4095, pattern=r"^[^/\x00]+(/[^/\x00]+)*$")]
FileContent = Annotated[
    bytes,
    PlainValidator(_file),
    WithJsonSchema(
        {
            "anyOf": [
                {"type": "string", "description": "A text, stored as UTF-8."},
                {
                    "type": "object",
                    "properties": {"base64": {"type": "string", "contentEncoding": "base64", "pattern": _BASE64}},
                    "required": ["base64"],
                    "additionalProperties": False,
                },
            ]
        }
    ),
]
TtlSeconds = Annotated[
    int, Field(ge=1, le=TTL_MAX_SECONDS, description="The workspace expires this many seconds from now."), WHOLE
]


class CallRequestBody(RequestModel):
    """A tool call. What is wrong with `name` or `arguments` is the call's result, not an HTTP error."""

    id: Annotated[str, StringConstraints(pattern=r"^[!-~]{1,128}$")] | None = Field(
        default=None, description="Your own id, unique in the batch; `toolCallId` in answers. Made up when absent."
    )
    type: Literal["toolCall"] = "toolCall"
    name: Annotated[str, StringConstraints(min_length=1, max_length=128, pattern=r"^[^\x00-\x1f\x7f]*$")]
    arguments: Any = Field(default_factory=dict, description="An object, or a JSON string that holds one.")


class BatchRequestBody(RequestModel):
    """Ordered tool calls, submitted once and executed once."""

    calls: Annotated[list[CallRequestBody], Field(min_length=1, max_length=CALLS_MAX)]
    execution_mode: ExecutionMode = "parallel"
    on_error: OnError = Field(
        default="continue", description="`stop`: after a failure no further call is taken up; the rest end skipped."
    )
    on_disconnect: OnDisconnect = Field(
        default="continue", description="`cancel`: cancel the batch when the client of a streaming POST goes away."
    )
    timeout_ms: Annotated[int, Field(ge=1, le=TIMEOUT_MAX_MS), WHOLE] | None = None
    metadata: Metadata = Field(default_factory=dict)


def batch_request(value: Any) -> BatchRequest:
    """Return the batch a request body asks for.

    Raises:
        InvalidRequest: the envelope does not fit. What tools and arguments are asked for is not looked at.
    """
    body = validated(BatchRequestBody, value)
    seen: set[str] = set()
    for index, call in enumerate(body.calls):
        if call.id is not None and call.id in seen:
            message = f"the id {call.id} is that of an earlier call; ids are unique in a batch"
            raise invalid_body([{"loc": ("calls", index, "id"), "type": "duplicate_id", "msg": message, "input": None}])
        if call.id is not None:
            seen.add(call.id)
    return BatchRequest(
        calls=tuple(CallRequest(call.id, call.name, call.arguments) for call in body.calls),
        execution_mode=body.execution_mode,
        on_error=body.on_error,
        on_disconnect=body.on_disconnect,
        timeout_ms=body.timeout_ms,
        metadata=body.metadata,
    )


class WorkspaceRequestBody(RequestModel):
    """A new workspace: empty, with files, or an adopted directory."""

    name: Name | None = None
    metadata: Metadata = Field(default_factory=dict)
    options: WorkspaceOptions = WorkspaceOptions()
    files: Annotated[dict[FilePath, FileContent], Field(max_length=FILES_MAX)] = Field(
        default_factory=dict,
        description="Files to lay in, by their path relative to the root.",
        json_schema_extra={"additionalProperties": False},
    )
    ttl_seconds: TtlSeconds | None = None
    trusted: bool = Field(default=True, description="An untrusted workspace may not write, edit or run commands.")
    root: Annotated[str, StringConstraints(min_length=1, max_length=4095, pattern=r"^[^\x00]*$")] | None = Field(
        default=None, description="Adopt this existing directory instead of making one."
    )


class WorkspacePatchBody(RequestModel):
    """Fields to change; one that is absent stays as it is. `options` and `metadata` are replaced as a whole."""

    name: Name | None = None
    metadata: Metadata = Field(default_factory=dict)
    options: WorkspaceOptions = WorkspaceOptions()
    trusted: bool = True
    ttl_seconds: TtlSeconds | None = Field(default=None, description="Counted from now; null: never expires.")


class KeyRequestBody(RequestModel):
    """A new API key. `expiresAt` or `ttlSeconds`, not both; with neither it works until it is revoked."""

    name: Name = Field(description="What the key is for.")
    scopes: Annotated[list[Scope], AfterValidator(_distinct), Field(min_length=1, json_schema_extra=_DISTINCT)]
    owner: Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9._-]{1,64}$")] | None = Field(
        default=None,
        description="Whose things the key makes and sees; keys may share an owner. Not given: the key's own id.",
    )
    expires_at: RequestTime | None = Field(default=None, description="The key works until this time, in the future.")
    ttl_seconds: Annotated[int, Field(ge=1, le=TTL_MAX_SECONDS), WHOLE] | None = Field(
        default=None, description="The key works for this many seconds from now."
    )


def key_request(value: Any) -> KeyRequest:
    """Return the key a request body asks for.

    Raises:
        InvalidRequest: the body does not fit.
    """
    body = validated(KeyRequestBody, value)
    now = now_ms()
    expires_at = None if body.ttl_seconds is None else now + body.ttl_seconds * 1000
    if body.expires_at is not None:
        at = milliseconds(body.expires_at)
        problem = None
        if body.ttl_seconds is not None:
            problem = "expiresAt and ttlSeconds say the same thing; give one of them"
        elif not now < at <= now + TTL_MAX_SECONDS * 1000:
            problem = "this has to be a time in the next ten years"
        if problem is not None:
            raise invalid_body([{"loc": ("expiresAt",), "type": "expiry", "msg": problem, "input": None}])
        expires_at = at
    return KeyRequest(body.name, tuple(body.scopes), body.owner, expires_at)


class UrlTokenRequestBody(RequestModel):
    """The URL a token is for."""

    url: Annotated[str, StringConstraints(max_length=16_000, pattern=r'^/v1/[!-"$->@-~]+$')] = Field(
        description="The path of a GET, `/v1/…`, percent-encoded, without a query."
    )


# -- answers ----------------------------------------------------------------------------------------------------------

Time = Annotated[AwareDatetime, Field(description="RFC 3339, UTC, with milliseconds.")]


class WorkspaceBody(ResponseModel):
    id: str
    name: str | None
    root: str
    managed: bool
    trusted: bool
    options: dict[str, Any]
    metadata: dict[str, Any]
    status: WorkspaceStatus
    created_at: Time
    node_id: str | None
    last_used_at: Time
    expires_at: Time | None


class KeyBody(ResponseModel):
    """An API key, without its token. `createdBy` is the id of a key, `env`, `cli` or `service` (the first start)."""

    id: str
    name: str
    owner: str
    scopes: list[Scope]
    created_at: Time
    created_by: str
    expires_at: Time | None
    revoked_at: Time | None


class NewKeyBody(KeyBody):
    """An API key with its token, which is stored nowhere and shown this once."""

    token: str


class UrlTokenBody(ResponseModel):
    """A token for one URL. `url` is the one that was sent, with the token in it."""

    token: str
    url: str
    expires_at: Time


class ContentBlockBody(ResponseModel):
    """`text {text}`, `image {data, mimeType}` or `blob {data, mimeType, bytes}`; `data` is base64."""

    type: Literal["text", "image", "blob"]
    text: str | None = None
    data: str | None = None
    mime_type: str | None = None
    bytes: int | None = None


class ResultBody(ResponseModel):
    """What a call answers: `content` is for a model, `details` for a program."""

    content: list[ContentBlockBody]
    details: dict[str, Any]
    is_error: bool
    usage: dict[str, Any] | None = None
    terminate: bool | None = None


class CallErrorBody(ResponseModel):
    code: ErrorCode
    message: str


class HookTraceBody(ResponseModel):
    name: str
    phase: Literal["before", "after"]
    action: Literal["none", "block", "rewrite", "patch", "failed"]
    reason: str | None
    duration_ms: int


class CallBody(ResponseModel):
    """A call and all that is known of it. `result` is null until the call has ended.

    An answer inlines 4 MiB of results and arguments in all; what goes beyond is null and has its URL.
    """

    id: str
    batch_id: str
    workspace_id: str
    index: int
    tool_call_id: str
    tool_name: str
    arguments: Any
    status: CallStatus
    result: ResultBody | None
    error: CallErrorBody | None
    hooks: list[HookTraceBody]
    queued_at: Time
    started_at: Time | None
    finished_at: Time | None
    duration_ms: int | None
    request_id: str
    result_truncated: Literal[True] | None = None
    result_url: str | None = None
    args_truncated: Literal[True] | None = None
    args_url: str | None = None


class SummaryBody(ResponseModel):
    total: int
    succeeded: int
    failed: int
    cancelled: int
    skipped: int


class BatchItemBody(ResponseModel):
    """A batch without its calls, as lists show it."""

    id: str
    workspace_id: str
    status: BatchStatus
    execution_mode: ExecutionMode
    effective_mode: ExecutionMode | None
    on_error: OnError
    on_disconnect: OnDisconnect
    timeout_ms: int | None
    metadata: dict[str, Any]
    has_errors: bool
    terminate: bool
    summary: SummaryBody
    request_id: str
    created_at: Time
    started_at: Time | None
    finished_at: Time | None


class BatchBody(BatchItemBody):
    """A batch with its calls, in request order whatever finished first."""

    calls: list[CallBody]


class ToolAnnotationsBody(ResponseModel):
    title: str
    read_only_hint: bool
    destructive_hint: bool
    idempotent_hint: bool
    open_world_hint: bool


class ToolDefinitionBody(ResponseModel):
    """The `native` form; the other forms are those of the APIs they are named after."""

    name: str
    description: str
    parameters: dict[str, Any]
    annotations: ToolAnnotationsBody
    execution_mode: ExecutionMode


ToolBody = ToolDefinitionBody | dict[str, Any]


class ListBody(ResponseModel):
    """`nextCursor` goes on where this page ends; null at the end. A page may be short and still have one."""

    next_cursor: str | None


class WorkspaceListBody(ListBody):
    data: list[WorkspaceBody]


class KeyListBody(ListBody):
    data: list[KeyBody]


class AuditEventBody(ResponseModel):
    """Who changed what. `details` depends on `action`; docs/http-api.md has all."""

    id: str
    at: Time
    action: AuditAction
    actor: str
    owner: str
    target: str | None
    request_id: str | None
    details: dict[str, Any]


class AuditListBody(ListBody):
    data: list[AuditEventBody]


class BatchListBody(ListBody):
    data: list[BatchItemBody]


class CallListBody(ListBody):
    data: list[CallBody]


class ToolListBody(ListBody):
    data: list[ToolBody]


class StoredFileBody(ResponseModel):
    """A file that was stored; `path` is relative to the workspace's root, with links resolved."""

    path: str
    bytes: int
    etag: str
    created: bool


class FileErrorBody(ResponseModel):
    code: ErrorCode
    message: str


class FileResultBody(ResponseModel):
    """What became of one file of several: `error` is null, or everything but `path` is."""

    path: str
    bytes: int | None
    etag: str | None
    created: bool | None
    error: FileErrorBody | None


class FilesBody(ResponseModel):
    data: list[FileResultBody]
    has_errors: bool


class TreeEntryBody(ResponseModel):
    r"""An entry of a directory. `bytes` is null but for files; a directory that is not listed has `error`.

    Names that are no UTF-8 are shown with `\xNN` and come with `nameBase64` and `pathBase64`.
    """

    path: str
    name: str
    type: Literal["file", "directory", "symlink", "other"]
    bytes: int | None
    modified_at: Time | None
    target: str | None = None
    error: str | None = None
    name_base64: str | None = None
    path_base64: str | None = None


class TreeBody(ListBody):
    data: list[TreeEntryBody]


class UnpackedBody(ResponseModel):
    """How many files of an archive were new and how many replaced one, its directories, and the files' bytes."""

    created: int
    replaced: int
    directories: int
    bytes: int


class HealthBody(ResponseModel):
    status: Literal["ok"]


class SandboxBody(ResponseModel):
    """`missing` lists what a caller may expect of a sandbox and does not get from this one."""

    tier: Literal["namespace", "landlock", "process"]
    missing: list[str]


class ReadyBody(ResponseModel):
    """`checks` has `ok` or a sentence for each of `accepting`, `writer`, `database` and `workspaces`."""

    status: Literal["ready"]
    checks: dict[str, str]
    sandbox: SandboxBody


class VersionBody(ResponseModel):
    name: Literal["toolcrib"]
    version: str
    python: str
    database: str
    sandbox: SandboxBody
    ripgrep: Annotated[str | None, Field(description="Its version; null when it was not found and grep cannot run.")]
    powershell: Annotated[bool, Field(description="Whether PowerShell 7 was found.")]
    tools: list[str]


class EventBody(ResponseModel):
    """One event of a stream. `data` is a JSON object, whose `type` is `event` and whose `seq` is `id`.

    A `resync` has no `id`.
    """

    id: str | None = None
    event: EventType
    data: Annotated[
        str,
        Field(
            json_schema_extra={
                "contentMediaType": "application/json",
                "contentSchema": {"$ref": "#/components/schemas/EventDataBody"},
            }
        ),
    ]
    retry: int | None = None


class HintBody(ResponseModel):
    """One event of a workspace's feed. `data` is a JSON object with `type` and what docs/events.md says."""

    event: Literal["hint", "resync"]
    data: Annotated[str, Field(json_schema_extra={"contentMediaType": "application/json"})]
    retry: int | None = None


class ProblemErrorBody(ResponseModel):
    """One thing that does not fit: `pointer` is a place in the body, `parameter` one outside of it."""

    pointer: str | None = None
    parameter: str | None = None
    code: str
    message: str


class ProblemBody(ResponseModel):
    """A problem document (RFC 9457). `code` is stable; docs/errors.md lists all."""

    type: str
    title: str
    status: int
    detail: str
    instance: str
    code: str
    request_id: str
    errors: list[ProblemErrorBody] | None = None
    scope: str | None = None
    current_etag: str | None = None
    files: list[FileResultBody] | None = None
    applied: list[str] | None = None
