"""New roots for the open workspaces, when their directories were restored or moved: only the records are changed."""

from collections.abc import Callable, Collection
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

import psycopg
from sqlalchemy import Connection, update
from sqlalchemy.exc import SQLAlchemyError

from app.domain.workspace import Workspace, WorkspaceStatus
from app.storage.sql import membership, queries, rows
from app.storage.sql.database_copy import CopyRefused, unused
from app.storage.sql.driver_errors import translate
from app.storage.sql.engine import open_database
from app.storage.sql.schema import workspaces


@dataclass(frozen=True, slots=True)
class Standing:
    """A directory: its path, and the `(st_dev, st_ino)` by which a workspace knows its own."""

    root: str
    device: int
    inode: int


@dataclass(frozen=True, slots=True)
class Relocated:
    """Ids of open workspaces: whose record was changed, and for which no directory was found."""

    moved: tuple[str, ...]
    missing: tuple[str, ...]
    total: int


FindRoot: TypeAlias = "Callable[[Workspace], Standing | None]"


def relocate(database: str | Path, find: FindRoot, *, here: str, node: str | None = None) -> Relocated:
    """Ask `find` for the directory of each open workspace and note it in the record, in one transaction.

    A workspace for which there is None stays as it is; the others are of the node `here` from then on.

    Args:
        database: a URL, or the path of an SQLite file.
        find: returns where the directory of a workspace stands.
        here: the node whose directories `find` finds.
        node: only the workspaces of this node.

    Raises:
        ConfigurationError, CopyRefused: a service uses the database; with `node`, a process of one of the two lives.
        StorageError: nothing was changed.
    """
    opened = open_database(database)
    moved: list[str] = []
    missing: list[str] = []
    try:
        with unused(opened) if node is None else nullcontext(), opened.migrator().begin() as connection:
            if node is not None:
                _require_dead(connection, {node, here})
            open_ones = [
                workspace
                for status in (WorkspaceStatus.ACTIVE, WorkspaceStatus.DELETING)
                for workspace in queries.workspaces_with_status(connection, status, node)
            ]
            for workspace in open_ones:
                place = find(workspace)
                if place is None:
                    missing.append(workspace.id)
                elif (place, here) != (
                    Standing(workspace.root, workspace.root_device, workspace.root_inode),
                    workspace.node_id,
                ):
                    moved.append(workspace.id)
                    connection.execute(
                        update(workspaces)
                        .where(workspaces.c.id == workspace.id)
                        .values(
                            root=rows.path_value(place.root),
                            root_device=rows.signed(place.device),
                            root_inode=rows.signed(place.inode),
                            node_id=here,
                        )
                    )
    except (SQLAlchemyError, psycopg.Error) as error:
        raise translate(error, opened.file) from error
    return Relocated(tuple(moved), tuple(missing), len(open_ones))


def _require_dead(connection: Connection, nodes: Collection[str]) -> None:
    alive = [process for process in membership.living(connection) if process.node_id in nodes]
    if alive:
        names = ", ".join(f"{process.id} of {process.node_id}" for process in alive)
        raise CopyRefused(f"processes live whose workspaces would be moved: {names}; stop them first")
