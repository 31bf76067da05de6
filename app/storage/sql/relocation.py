"""New roots for the open workspaces, when their directories were restored or moved: only the records are changed."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

import psycopg
from sqlalchemy import update
from sqlalchemy.exc import SQLAlchemyError

from app.domain.workspace import Workspace, WorkspaceStatus
from app.storage.sql import queries, rows
from app.storage.sql.database_copy import unused
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


def relocate(database: str | Path, find: FindRoot) -> Relocated:
    """Ask `find` for the directory of each open workspace and note it in the record, in one transaction.

    A workspace for which there is None stays as it is.

    Raises:
        ConfigurationError, CopyRefused: a service uses the database.
        StorageError: nothing was changed.
    """
    opened = open_database(database)
    moved: list[str] = []
    missing: list[str] = []
    try:
        with unused(opened), opened.migrator().begin() as connection:
            open_ones = [
                workspace
                for status in (WorkspaceStatus.ACTIVE, WorkspaceStatus.DELETING)
                for workspace in queries.workspaces_with_status(connection, status)
            ]
            for workspace in open_ones:
                place = find(workspace)
                if place is None:
                    missing.append(workspace.id)
                elif place != Standing(workspace.root, workspace.root_device, workspace.root_inode):
                    moved.append(workspace.id)
                    connection.execute(
                        update(workspaces)
                        .where(workspaces.c.id == workspace.id)
                        .values(
                            root=rows.path_value(place.root),
                            root_device=rows.signed(place.device),
                            root_inode=rows.signed(place.inode),
                        )
                    )
    except (SQLAlchemyError, psycopg.Error) as error:
        raise translate(error, opened.file) from error
    return Relocated(tuple(moved), tuple(missing), len(open_ones))
