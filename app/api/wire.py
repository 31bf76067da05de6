"""How values look on the wire, and the JSON response that carries them.

What is stored as JSON (arguments, results, traces) is spliced into the answer as it is, never parsed again.
"""

import base64
import binascii
from collections.abc import Iterable, Mapping
from functools import lru_cache
from typing import Any, Final

import orjson
from starlette.responses import Response

from app.domain.audit import AuditEvent
from app.domain.batch import Batch
from app.domain.clock import rfc3339
from app.domain.ids import Prefix, is_id
from app.domain.tool_call import CallRecord
from app.domain.workspace import Workspace
from app.errors import InvalidCursor
from app.services.batches import INLINE_BYTES
from app.storage.base import ApiKey

_NO_HOOKS: Final = orjson.Fragment(b"[]")


class Budget:
    """What one answer may still inline; spent by its calls in order."""

    def __init__(self, left: int = INLINE_BYTES) -> None:
        self._left = left

    def take(self, size: int) -> bool:
        """Take `size` bytes; False when there is not that much left."""
        if size > self._left:
            return False
        self._left -= size
        return True


def json_response(value: Any, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    return Response(orjson.dumps(value), status, headers, "application/json")


def list_response(items: Iterable[Any], next_before: str | None) -> Response:
    """Return a page; `next_before` is the id the next one begins after."""
    return json_response(
        {"data": list(items), "nextCursor": None if next_before is None else encode_cursor(next_before)}
    )


def encode_cursor(last_id: str) -> str:
    return base64.urlsafe_b64encode(last_id.encode()).decode().rstrip("=")


def decode_cursor(cursor: str | None, prefix: Prefix) -> str | None:
    """Return the id a list goes on after; None for the first page.

    Raises:
        InvalidCursor: it was not made by `encode_cursor` for this kind of list.
    """
    if cursor is None:
        return None
    try:
        last_id = base64.b64decode(cursor + "=" * (-len(cursor) % 4), b"-_", validate=True).decode("ascii")
    except (binascii.Error, ValueError):
        last_id = ""
    if not is_id(last_id, prefix):
        raise InvalidCursor("cursor has to be the nextCursor of the page before, unchanged")
    return last_id


def workspace_json(workspace: Workspace) -> dict[str, Any]:
    return {
        "id": workspace.id,
        "name": workspace.name,
        "root": workspace.root,
        "managed": workspace.managed,
        "trusted": workspace.trusted,
        "options": workspace.options.to_json(),
        "metadata": workspace.metadata,
        "status": workspace.status.value,
        "createdAt": rfc3339(workspace.created_at),
        "nodeId": workspace.node_id,
        "lastUsedAt": rfc3339(workspace.last_used_at),
        "expiresAt": _time(workspace.expires_at),
    }


def key_json(key: ApiKey) -> dict[str, Any]:
    """Return a key without anything its token could be told from."""
    return {
        "id": key.id,
        "name": key.name,
        "owner": key.owner,
        "scopes": list(key.scopes),
        "createdAt": rfc3339(key.created_at),
        "createdBy": key.created_by,
        "expiresAt": _time(key.expires_at),
        "revokedAt": _time(key.revoked_at),
    }


def audit_json(event: AuditEvent) -> dict[str, Any]:
    return {
        "id": event.id,
        "at": rfc3339(event.at),
        "action": event.action.value,
        "actor": event.actor,
        "owner": event.owner,
        "target": event.target,
        "requestId": event.request_id,
        "details": event.details,
    }


def batch_item_json(batch: Batch) -> dict[str, Any]:
    """Return a batch without its calls."""
    return {
        "id": batch.id,
        "workspaceId": batch.workspace_id,
        "status": batch.status.value,
        "executionMode": batch.execution_mode,
        "effectiveMode": batch.effective_mode,
        "onError": batch.on_error,
        "onDisconnect": batch.on_disconnect,
        "timeoutMs": batch.timeout_ms,
        "metadata": batch.metadata,
        "hasErrors": batch.has_errors,
        "terminate": batch.terminate,
        "summary": batch.summary.to_json(),
        "requestId": batch.request_id,
        "createdAt": _time(batch.created_at),
        "startedAt": _time(batch.started_at),
        "finishedAt": _time(batch.finished_at),
    }


def batch_json(batch: Batch) -> dict[str, Any]:
    """Return a batch with its calls in request order, as much of them inlined as an answer may hold."""
    budget = Budget()
    return {**batch_item_json(batch), "calls": [call_json(call, budget) for call in batch.calls]}


def call_json(call: CallRecord, budget: Budget | None = None) -> dict[str, Any]:
    """Return a call; without a budget it is whole, however large."""
    value: dict[str, Any] = {
        "id": call.id,
        "batchId": call.batch_id,
        "workspaceId": call.workspace_id,
        "index": call.index,
        "toolCallId": call.tool_call_id,
        "toolName": call.tool_name,
        "arguments": None,
        "status": call.status.value,
        "result": None,
        "error": None if call.error is None else {"code": call.error.code.value, "message": call.error.message},
        "hooks": _NO_HOOKS if call.hooks is None else orjson.Fragment(call.hooks),
        "queuedAt": _time(call.queued_at),
        "startedAt": _time(call.started_at),
        "finishedAt": _time(call.finished_at),
        "durationMs": call.duration_ms,
        "requestId": call.request_id,
    }
    url = f"/v1/calls/{call.id}"
    if call.result is not None and (budget is None or budget.take(len(call.result))):
        value["result"] = orjson.Fragment(call.result)
    elif call.result is not None or call.result_bytes:
        value |= {"resultTruncated": True, "resultUrl": url}
    if call.arguments and (budget is None or budget.take(len(call.arguments))):
        value["arguments"] = orjson.Fragment(call.arguments)
    else:
        value |= {"argsTruncated": True, "argsUrl": url}
    return value


def _time(milliseconds: int | None) -> str | None:
    if milliseconds is None:
        return None
    seconds, rest = divmod(milliseconds, 1000)
    return f"{_second(seconds)}{rest:03d}Z"


@lru_cache(maxsize=1024)
def _second(seconds: int) -> str:
    # The calls of a batch share a few seconds, and formatting one costs more than all the rest of a call.
    return rfc3339(seconds * 1000)[:-4]
