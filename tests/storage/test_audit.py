"""The audit log is stored with what it tells of, once, and found again."""

from dataclasses import replace
from typing import Any

import pytest
from sqlalchemy import text

from app.domain.audit import SERVICE, AuditAction, AuditEvent, audit
from app.domain.caller import Caller
from app.domain.clock import now_ms
from app.domain.ids import new_id
from app.domain.retention import RemovedCounts
from app.domain.workspace import WorkspaceStatus
from app.storage.base import (
    ApiKey,
    Applied,
    AuditFilter,
    CreateKey,
    CreateWorkspace,
    NoteAudit,
    Page,
    Refused,
    RemoveAudit,
    Removed,
    RequestCancel,
    RevokeKey,
    SetWorkspaceStatus,
    UpdateWorkspace,
    Write,
)
from app.storage.sql.storage import SqlStorage
from tests.support.records import make_batch, make_workspace, submit

BY = Caller("key_a", "team", frozenset({"write"}), "req-1")
ALL = AuditFilter()


def note(action: AuditAction = AuditAction.FILE_STORED, target: str | None = "ws_x", by: Caller = BY) -> AuditEvent:
    return audit(by, action, target, paths=["a\0b", "größe ✓"])


def newest(storage: SqlStorage, condition: AuditFilter = ALL, **options: Any) -> list[AuditEvent]:
    return list(storage.audit_events(condition, before=None, limit=200, **options).items)


def test_an_event_comes_back_as_it_was_noted(storage: SqlStorage) -> None:
    events = [note(), note(AuditAction.ACCESS_REFUSED, None, SERVICE)]
    storage.apply([NoteAudit(event) for event in events])
    assert newest(storage) == [events[1], events[0]]
    assert (events[0].request_id, events[1].request_id) == ("req-1", None)


def group(workspace_id: str | None = None) -> tuple[list[Write], list[AuditEvent]]:
    """One write of each kind that carries a note, and the notes."""
    workspace = make_workspace()
    batch = make_batch(workspace.id, calls=2)
    key = ApiKey(new_id("key"), "k", "o", new_id("key").encode()[:32], ("read",), 1, "env")
    notes = [note(action) for action in list(AuditAction)[:9]]
    writes: list[Write] = [
        CreateWorkspace(workspace, audit=notes[0]),
        CreateKey(key, notes[1]),
        RevokeKey(key.id, 2, notes[2]),
        UpdateWorkspace(workspace.id, name="n", audit=notes[3]),
        replace(submit(batch), audit=notes[4]),
        RequestCancel(batch.id, batch.calls[0].id, 7, notes[5]),
        RequestCancel(batch.id, None, 8, notes[6]),
        NoteAudit(notes[7]),
        SetWorkspaceStatus(workspace.id, WorkspaceStatus.DELETING, audit=notes[8]),
    ]
    return writes, notes


def test_each_write_is_noted_once_also_when_its_reply_was_lost(storage: SqlStorage) -> None:
    writes, notes = group()
    assert storage.apply(writes)[1:] == [Applied()] * 8
    assert newest(storage) == notes[::-1]
    storage.apply(writes)
    assert newest(storage) == notes[::-1]


def test_what_changes_nothing_is_not_noted(storage: SqlStorage) -> None:
    writes, _ = group()
    storage.apply(writes)
    before = newest(storage)
    workspace, key = writes[0].workspace, writes[1].key  # type: ignore[union-attr]
    batch = writes[4].batch  # type: ignore[union-attr]
    again: list[Write] = [
        RevokeKey(key.id, 9, note()),
        RevokeKey(new_id("key"), 9, note()),
        UpdateWorkspace(workspace.id, name="m", audit=note()),
        SetWorkspaceStatus(workspace.id, WorkspaceStatus.DELETING, audit=note()),
        SetWorkspaceStatus(workspace.id, WorkspaceStatus.ACTIVE, audit=note()),
        replace(submit(make_batch(workspace.id)), audit=note()),
        replace(submit(make_batch(new_id("ws"))), audit=note()),
        CreateWorkspace(make_workspace(root=workspace.root), audit=note()),
        RequestCancel(batch.id, batch.calls[0].id, 70, note()),
        RequestCancel(batch.id, None, 80, note()),
        RequestCancel(new_id("batch"), None, 80, note()),
    ]
    outcomes = storage.apply(again)
    assert outcomes[2] == Refused("gone")
    assert newest(storage) == before


def test_conditions_are_joined_and_pages_go_on(storage: SqlStorage) -> None:
    other = replace(BY, key_id="key_b")
    events = [
        note(action, target, by)
        for by in (BY, other)
        for target in ("ws_x", "ws_y")
        for action in (AuditAction.BATCH_SUBMITTED, AuditAction.FILE_STORED, AuditAction.KEY_CREATED)
    ]
    storage.apply([NoteAudit(event) for event in events])

    def expected(**fields: object) -> list[AuditEvent]:
        return [
            event for event in reversed(events) if all(getattr(event, name) == value for name, value in fields.items())
        ]

    for asked in (
        {"target": "ws_x"},
        {"actor": "key_b"},
        {"action": AuditAction.FILE_STORED},
        {"action": AuditAction.BATCH_SUBMITTED},
        {"action": AuditAction.BATCH_SUBMITTED, "actor": "key_a"},
        {"action": AuditAction.KEY_CREATED, "actor": "key_a", "target": "ws_y"},
        {"target": "ws_nowhere"},
        {},
    ):
        condition = AuditFilter(**asked)  # type: ignore[arg-type]
        assert newest(storage, condition) == expected(**asked), asked
        found: list[AuditEvent] = []
        page = storage.audit_events(condition, before=None, limit=2, examine=3)
        while True:
            found += page.items
            if page.next_before is None:
                break
            page = storage.audit_events(condition, before=page.next_before, limit=2, examine=3)
        assert found == expected(**asked), asked


def test_since_and_until_are_inclusive(storage: SqlStorage) -> None:
    now = now_ms()
    events = [replace(note(), at=now + offset) for offset in (0, 1, 2, 3)]
    storage.apply([NoteAudit(event) for event in events])
    assert newest(storage, AuditFilter(since=now + 1, until=now + 2)) == [events[2], events[1]]
    assert newest(storage, AuditFilter(since=now + 4)) == []
    assert newest(storage, AuditFilter(until=now - 1)) == []


def test_retention_removes_the_oldest_piece_by_piece(storage: SqlStorage) -> None:
    events = [note() for _ in range(5)]
    storage.apply([NoteAudit(event) for event in events])
    later = now_ms() + 1000
    assert storage.apply([RemoveAudit(events[0].at - 1000, 9)]) == [Removed()]
    assert storage.apply([RemoveAudit(later, 3)]) == [Removed(RemovedCounts(audit_events=3), more=True)]
    assert newest(storage) == [events[4], events[3]]
    assert storage.apply([RemoveAudit(later, 3)]) == [Removed(RemovedCounts(audit_events=2))]
    assert storage.audit_events(ALL, before=None, limit=9) == Page((), None)


@pytest.mark.parametrize(
    ("condition", "index"),
    [
        (AuditFilter(target="ws_x"), "ix_audit_events_target"),
        (AuditFilter(actor="key_a"), "ix_audit_events_actor"),
        (AuditFilter(action=AuditAction.KEY_CREATED), "ix_audit_events_action"),
        (AuditFilter(action=AuditAction.KEY_CREATED, actor="key_a"), "ix_audit_events_action"),
    ],
)
def test_a_condition_is_answered_by_an_index(sqlite_storage: SqlStorage, condition: AuditFilter, index: str) -> None:
    seen: list[str] = []
    engine = sqlite_storage._database.reader
    with engine.connect() as connection:
        driver = connection.connection.driver_connection
        assert driver is not None
        driver.set_trace_callback(seen.append)
    newest(sqlite_storage, condition)
    statement = next(line for line in seen if "audit_events" in line)
    with engine.connect() as connection:
        plan = " ".join(str(row) for row in connection.execute(text(f"EXPLAIN QUERY PLAN {statement}")))
    assert index in plan, plan
