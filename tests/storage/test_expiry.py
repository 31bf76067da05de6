"""Workspaces whose time has come, on both databases."""

from dataclasses import replace

from app.domain.workspace import Workspace, WorkspaceStatus
from app.storage.base import (
    Applied,
    CreateWorkspace,
    Refused,
    SetWorkspaceStatus,
    UpdateWorkspace,
)
from app.storage.sql.storage import SqlStorage
from tests.storage.test_reads import plans
from tests.support.records import make_batch, make_workspace, submit

APPLIED = Applied()


def stored(storage: SqlStorage, expires_at: int | None) -> Workspace:
    made = make_workspace(expires_at=expires_at)
    assert storage.apply([CreateWorkspace(made)]) == [APPLIED]
    return made


def end(workspace: Workspace, at: int) -> SetWorkspaceStatus:
    return SetWorkspaceStatus(workspace.id, WorkspaceStatus.DELETING, at=at, only_expired=True)


def test_the_longest_overdue_come_first_and_others_not_at_all(storage: SqlStorage) -> None:
    late, later, _young, _eternal, gone = (stored(storage, at) for at in (100, 200, 301, None, 50))
    storage.apply([SetWorkspaceStatus(gone.id, WorkspaceStatus.DELETING)])
    assert storage.expired_workspaces(300, limit=5) == [late, later]
    assert storage.expired_workspaces(300, limit=1) == [late]
    assert storage.expired_workspaces(99, limit=5) == []
    plan = plans(storage, lambda s: s.expired_workspaces(5, limit=5))
    assert "ix_workspaces_expiry" in plan, plan


def test_whoever_gives_a_workspace_more_time_wins_over_its_end(storage: SqlStorage) -> None:
    extended, cleared, due, eternal = (stored(storage, at) for at in (100, 100, 100, None))
    storage.apply([UpdateWorkspace(extended.id, expires_at=500)])
    outcomes = storage.apply(
        [
            UpdateWorkspace(cleared.id, clear_expiry=True),
            *(end(workspace, 200) for workspace in (extended, cleared, due, eternal)),
            UpdateWorkspace(due.id, expires_at=500),
        ]
    )
    not_due = Refused("not_due")
    assert outcomes == [APPLIED, not_due, not_due, APPLIED, not_due, Refused("gone")]
    assert storage.workspace(extended.id) == replace(extended, expires_at=500)
    # One that is on its way already goes on.
    assert storage.apply([end(due, 0), SetWorkspaceStatus(due.id, WorkspaceStatus.EXPIRED)]) == [APPLIED, APPLIED]


def test_a_batch_for_a_workspace_whose_time_has_come_is_refused(storage: SqlStorage) -> None:
    workspace = stored(storage, 1000)
    early = make_batch(workspace.id, created_at=999)
    late = make_batch(workspace.id, created_at=1000)
    assert storage.apply([submit(early), submit(late)]) == [APPLIED, Refused("gone")]
    again = make_batch(workspace.id, created_at=1000)
    assert storage.apply([UpdateWorkspace(workspace.id, expires_at=2000), submit(again)]) == [APPLIED, APPLIED]
