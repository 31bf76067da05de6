"""The errors Toolcrib raises, each with a stable code. No HTTP here: `app.api.errors` maps codes to statuses."""

from collections.abc import Mapping
from enum import StrEnum
from typing import Any, ClassVar


class ErrorCode(StrEnum):
    """`error.code` of a call: a closed list (docs/errors.md)."""

    INVALID_ARGUMENTS = "invalid_arguments"
    UNKNOWN_TOOL = "unknown_tool"
    BLOCKED = "blocked"
    DENIED = "denied"
    HOOK_FAILED = "hook_failed"
    PATH_OUTSIDE_WORKSPACE = "path_outside_workspace"
    NOT_FOUND = "not_found"
    ALREADY_EXISTS = "already_exists"
    IS_A_DIRECTORY = "is_a_directory"
    NOT_A_DIRECTORY = "not_a_directory"
    NOT_A_REGULAR_FILE = "not_a_regular_file"
    NAME_TOO_LONG = "name_too_long"
    PERMISSION_DENIED = "permission_denied"
    ETAG_MISMATCH = "etag_mismatch"
    NO_MATCH = "no_match"
    NOT_UNIQUE = "not_unique"
    NO_CHANGE = "no_change"
    TOO_LARGE = "too_large"
    UNSUPPORTED = "unsupported"
    SANDBOX_UNAVAILABLE = "sandbox_unavailable"
    NON_ZERO_EXIT = "non_zero_exit"
    TIMEOUT = "timeout"
    CANCELLED = "cancelled"
    SKIPPED = "skipped"
    INTERRUPTED = "interrupted"
    NO_SPACE = "no_space"
    LIMIT_EXCEEDED = "limit_exceeded"
    IO_ERROR = "io_error"
    INTERNAL = "internal"


class ToolError(Exception):
    """A tool call failed and the caller can act on it: becomes a result with `isError`, never an HTTP error.

    `message` is for a model or a person and says what to do next: the text of the result. `details` is for a program
    and may carry everything a successful result would. `summary` is one sentence for `error.message`, for a call whose
    message is long because it carries output.
    """

    def __init__(
        self, code: ErrorCode, message: str, details: Mapping[str, Any] | None = None, *, summary: str | None = None
    ) -> None:
        super().__init__(message)
        self.code = code
        self.message = message
        self.details = dict(details or {})
        self.summary = message if summary is None else summary


class AppError(Exception):
    """A request that cannot be served. `code` is stable; `detail` is a sentence for the caller.

    `extra` are further members of the problem document, such as `currentEtag`.
    """

    code: ClassVar[str] = "internal"

    def __init__(self, detail: str, **extra: Any) -> None:
        super().__init__(detail)
        self.detail = detail
        self.extra = extra


class MalformedJson(AppError):
    code = "malformed_json"


class InvalidRequest(AppError):
    """The body or a parameter does not fit. `errors` is a list of `{pointer, code, message}`."""

    code = "invalid_request"


class InvalidCursor(AppError):
    code = "invalid_cursor"


class InvalidPath(AppError):
    code = "invalid_path"


class Unauthorized(AppError):
    code = "unauthorized"


class Forbidden(AppError):
    code = "forbidden"


class NotFound(AppError):
    code = "not_found"


class Conflict(AppError):
    code = "conflict"


class IdempotencyKeyReused(AppError):
    """An earlier request had the same `Idempotency-Key` and another body. Nothing was done."""

    code = "idempotency_key_reused"


class PreconditionFailed(AppError):
    """The file is not the one the caller's condition names. `currentEtag` is its tag now, None when it has none."""

    code = "precondition_failed"


class WorkspaceMoved(AppError):
    """Another directory stands where the workspace's root was."""

    code = "workspace_moved"


class WorkspaceGone(AppError):
    """The workspace was deleted or expired; its records are kept."""

    code = "workspace_gone"


class OwnerGone(AppError):
    """No process of the workspace's node lives: try again, or ask an operator."""

    code = "owner_gone"


class OutputGone(AppError):
    """The output of the call was removed by retention; the call itself is there."""

    code = "output_gone"


class PayloadTooLarge(AppError):
    code = "payload_too_large"


class RateLimited(AppError):
    """The key, or the address of requests without one, asked too often: try again after `Retry-After`."""

    code = "rate_limited"


class TooManyBatches(AppError):
    """As many batches wait or run as may. Nothing was kept."""

    code = "too_many_batches"


class TooManyStreams(AppError):
    """As many streams are open as may."""

    code = "too_many_streams"


class Overloaded(AppError):
    """The writer's queue is full or the service is draining: try again later."""

    code = "overloaded"


class StorageUnavailable(AppError):
    """The database did not answer. Nothing of the request was kept unless a retry shows it."""

    code = "storage_unavailable"


class NoSpace(AppError):
    code = "no_space"


class Fenced(Exception):
    """Another owner writes this batch now (its epoch or last_seq moved on): stop working on it."""


class ConfigurationError(Exception):
    """A setting is wrong. The message is one sentence that names the setting; the start stops."""
