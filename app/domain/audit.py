"""The audit log: who changed what, and who was refused."""

from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Final

from app.domain.caller import Caller
from app.domain.clock import now_ms
from app.domain.ids import new_id

SERVICE: Final = Caller("service", "service", frozenset())
"""Who does what no caller asked for: the first key, the end of a workspace whose time has come."""
COMMAND_LINE: Final = Caller("cli", "cli", frozenset())
"""Whoever runs a command on the machine of the service."""
ANONYMOUS: Final = Caller("anonymous", "anonymous", frozenset())
"""Whoever sends no valid key."""


class AuditAction(StrEnum):
    """What is noted: a closed list (docs/http-api.md)."""

    KEY_CREATED = "key.created"
    KEY_REVOKED = "key.revoked"
    WORKSPACE_CREATED = "workspace.created"
    WORKSPACE_UPDATED = "workspace.updated"
    WORKSPACE_DELETED = "workspace.deleted"
    WORKSPACE_EXPIRED = "workspace.expired"
    BATCH_SUBMITTED = "batch.submitted"
    BATCH_CANCELLED = "batch.cancelled"
    CALL_CANCELLED = "call.cancelled"
    FILE_STORED = "file.stored"
    FILES_STORED = "files.stored"
    FILE_DELETED = "file.deleted"
    ARCHIVE_UNPACKED = "archive.unpacked"
    ACCESS_REFUSED = "access.refused"


@dataclass(frozen=True, slots=True)
class AuditEvent:
    """One row. `actor` is a key's id, `env`, `cli`, `service` or `anonymous`; `target` the id of what was changed."""

    id: str
    at: int
    action: AuditAction
    actor: str
    owner: str
    target: str | None
    request_id: str | None
    details: dict[str, Any] = field(default_factory=dict)


def audit(by: Caller, action: AuditAction, target: str | None, **details: Any) -> AuditEvent:
    """Return the event of something that is done now; `details` are JSON values."""
    return AuditEvent(
        id=new_id("audit"),
        at=now_ms(),
        action=action,
        actor=by.key_id,
        owner=by.owner,
        target=target,
        request_id=by.request_id or None,
        details=details,
    )
