"""Roots of open workspaces, noted anew after a restore."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from app.domain.ids import new_id
from app.domain.node import Process
from app.domain.workspace import Workspace, WorkspaceStatus
from app.errors import ConfigurationError
from app.storage.base import CreateWorkspace, StorageError
from app.storage.instance_lock import InstanceLock
from app.storage.sql.relocation import Relocated, Standing, relocate
from app.storage.sql.storage import SqlStorage
from tests.support.records import make_workspace

HERE, GONE, OTHER = (new_id("node") for _ in range(3))


@pytest.fixture(params=["sqlite", "postgres"])
def database(request: pytest.FixtureRequest, tmp_path: Path) -> str | Path:
    """A migrated database of each kind that nobody is connected to."""
    target: str | Path = tmp_path / "toolcrib.db"
    if request.param == "postgres":
        target = request.getfixturevalue("postgres_url")
    storage = SqlStorage(target)
    storage.migrate()
    storage.close()
    return target


def store(database: str | Path, *workspaces: Workspace) -> None:
    storage = SqlStorage(database)
    storage.apply([CreateWorkspace(workspace) for workspace in workspaces])
    storage.close()


def stored(database: str | Path, *workspaces: Workspace) -> list[Workspace | None]:
    storage = SqlStorage(database)
    try:
        return [storage.workspace(workspace.id) for workspace in workspaces]
    finally:
        storage.close()


def test_open_workspaces_get_the_directories_that_were_found(database: str | Path) -> None:
    moved, same, missing, deleting = (make_workspace(node_id=HERE) for _ in range(4))
    deleting = replace(deleting, status=WorkspaceStatus.DELETING)
    deleted = make_workspace(status=WorkspaceStatus.DELETED, node_id=HERE)
    store(database, moved, same, missing, deleting, deleted)
    # Devices and inodes use all 64 bits.
    found: dict[str, Any] = {
        moved.id: Standing("/srv/änew/\udcff", (1 << 64) - 1, 1 << 63),
        same.id: Standing(same.root, same.root_device, same.root_inode),
        missing.id: None,
        deleting.id: Standing(deleting.root, 5, 6),
    }
    done = relocate(database, lambda workspace: found[workspace.id], here=HERE)
    assert done == Relocated((moved.id, deleting.id), (missing.id,), 4)
    assert stored(database, moved, same, missing, deleting, deleted) == [
        replace(moved, root="/srv/änew/\udcff", root_device=(1 << 64) - 1, root_inode=1 << 63),
        same,
        missing,
        replace(deleting, root_device=5, root_inode=6),
        deleted,
    ]


def test_a_search_that_fails_changes_nothing(database: str | Path) -> None:
    first, second = make_workspace(), make_workspace()
    store(database, first, second)

    def find(workspace: Workspace) -> Standing:
        if workspace.id == second.id:
            raise PermissionError
        return Standing("/elsewhere", 1, 2)

    with pytest.raises(PermissionError):
        relocate(database, find, here=HERE)
    assert stored(database, first, second) == [first, second]


def test_roots_of_a_service_that_runs_are_left_alone(tmp_path: Path) -> None:
    with InstanceLock(tmp_path), pytest.raises(ConfigurationError, match="another Toolcrib process"):
        relocate(tmp_path / "toolcrib.db", lambda _workspace: None, here=HERE)


def test_workspaces_of_a_node_that_is_gone_become_those_of_another(postgres_url: str) -> None:
    lost, kept = make_workspace(node_id=GONE), make_workspace(node_id=OTHER)
    storage = SqlStorage(postgres_url)
    storage.migrate()
    storage.apply([CreateWorkspace(workspace) for workspace in (lost, kept)])
    serving = Process(new_id("proc"), OTHER, "worker", None)
    storage.join(serving)
    try:
        done = relocate(postgres_url, lambda _: Standing("/srv/restored", 1, 2), here=HERE, node=GONE)
        assert done == Relocated((lost.id,), (), 1)
        moved = replace(lost, root="/srv/restored", root_device=1, root_inode=2, node_id=HERE)
        assert [storage.workspace(one.id) for one in (lost, kept)] == [moved, kept]
        with pytest.raises(StorageError, match=f"{serving.id} of {OTHER}; stop them first"):
            relocate(postgres_url, lambda _: Standing("/srv/restored", 1, 2), here=HERE, node=OTHER)
        assert storage.workspace(kept.id) == kept
    finally:
        storage.close()
