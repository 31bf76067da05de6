"""What the commands other than serve and worker do: each opens the database, does one thing and closes it."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from app.domain.audit import COMMAND_LINE
from app.domain.ids import is_id
from app.domain.workspace import Workspace
from app.errors import ConfigurationError
from app.groundwork import account_of_settings, make_data_dir, open_jobs, open_storage, place_of_workspaces, sentence
from app.sandbox.containment import display_path
from app.services.keys import ENVIRONMENT, KeyRequest, make_key, make_revocation
from app.services.workspace_roots import WorkspaceRoots, look_at
from app.settings import Settings, variable
from app.storage.base import ApiKey, Refused, SchemaTooNew, StorageError
from app.storage.process_lock import node_of
from app.storage.sql.database_copy import CopyRefused, copy_database
from app.storage.sql.relocation import Standing, relocate
from app.storage.sql.storage import SqlStorage

KEYS_AT_ONCE: Final = 200


def migrate(settings: Settings) -> None:
    """Bring the database up to date.

    Raises:
        ConfigurationError: it is newer than this code, or does not answer.
    """
    make_data_dir(settings)
    open_storage(settings, open_jobs(settings)).close()


def copy_records(source: str, target: str, tell: Callable[[str], None]) -> None:
    """Copy all records to a database without any and compare the two.

    Args:
        source: a data directory, or a URL that begins with `sqlite:///` or `postgresql://`.
        target: the same.
        tell: gets the lines that are to be shown.

    Raises:
        ConfigurationError: the copy is refused; the message says why, and nothing was copied.
        StorageError: it failed. Nothing was copied, unless the message says otherwise.
    """
    to = _database(target)
    try:
        if isinstance(to, Path):
            to.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        sums = copy_database(_database(source), to, tell)
    except (CopyRefused, SchemaTooNew, ConfigurationError) as error:
        raise ConfigurationError(sentence("the copy is refused", error)) from None
    except (ValueError, OSError) as error:
        raise ConfigurationError(sentence("one of the databases cannot be used", error)) from None
    tell(f"compared: {len(sums)} tables, {sum(one.rows for one in sums)} rows, the same in both databases")


def list_nodes(settings: Settings, tell: Callable[[str], None]) -> None:
    """Tell of the nodes of the database, their workspaces and the processes that live.

    Raises:
        ConfigurationError: the database cannot be used.
    """
    storage = open_storage(settings)
    try:
        nodes, living = storage.nodes(), storage.living()
    finally:
        storage.close()
    for node in nodes:
        own = [process for process in living if process.node_id == node.id]
        tell(
            f"{node.id}: {node.workspaces} open workspaces, {'' if own else 'no '}living processes{':' if own else ''}"
        )
        for process in own:
            tell(f"  {process.id} {process.role} {process.url or ''}".rstrip())
    for process in living:
        if process.node_id is None:
            tell(f"{process.id} {process.role} {process.url or ''}, without a node")


def relocate_workspaces(settings: Settings, tell: Callable[[str], None], *, node: str | None = None) -> None:
    """Take the directories that stand at the roots of the open workspaces for theirs, as after a restore.

    Those of managed workspaces are looked for in the data directory, adopted ones where they were. What is found
    belongs to the node of the data directory from then on.

    Args:
        settings: which data directory and database.
        tell: gets the line that is to be shown.
        node: only the workspaces of this node; processes of other nodes may go on.

    Raises:
        ConfigurationError: the database cannot be used, or a service uses it.
    """
    make_data_dir(settings)
    here = node_of(settings.data_dir)
    open_storage(settings).close()
    roots = WorkspaceRoots(place_of_workspaces(settings, account_of_settings(settings)), settings.workspace_roots)

    def find(workspace: Workspace) -> Standing | None:
        root = roots.managed(workspace.id) if workspace.managed else workspace.root
        found = look_at(root) if Path(root).is_dir() else None
        if found is None:
            tell(f"{workspace.id}: there is no directory {display_path(root)}")
            return None
        return Standing(root, *found.identity)

    url = settings.direct_url
    try:
        database = settings.data_dir / "toolcrib.db" if url is None else url
        done = relocate(database, find, here=here, node=node)
    except (StorageError, ConfigurationError, CopyRefused) as error:
        raise ConfigurationError(sentence("nothing was changed", error)) from None
    tell(
        f"open workspaces: {done.total}; the directories of {len(done.moved)} were taken for theirs, those of "
        f"{len(done.missing)} are missing"
    )


def _database(given: str) -> str | Path:
    return given if "://" in given else Path(given).expanduser().resolve() / "toolcrib.db"


def create_key(settings: Settings, request: KeyRequest) -> str:
    """Make an API key and return its token, which is stored nowhere; a service that runs takes it at once.

    Raises:
        ConfigurationError: the database cannot be used.
        StorageError: the key was not stored.
    """
    write, token = make_key(request, by=COMMAND_LINE)
    with _records(settings) as storage:
        storage.apply([write])
    return token


def every_key(settings: Settings) -> Iterator[ApiKey]:
    """Yield all API keys, newest first; revoked and expired ones too.

    Raises:
        ConfigurationError: the database cannot be used.
        StorageError: it failed meanwhile.
    """
    with _records(settings) as storage:
        before: str | None = None
        while True:
            page = storage.keys_page(before=before, limit=KEYS_AT_ONCE)
            yield from page.items
            before = page.next_before
            if before is None:
                return


def revoke_key(settings: Settings, key_id: str) -> None:
    """Revoke an API key, also while a service runs; one that was revoked before stays as it is.

    Raises:
        ConfigurationError: there is no such key, or the database cannot be used.
        StorageError: it is as it was.
    """
    if key_id == ENVIRONMENT:
        raise ConfigurationError(f"the key of the environment cannot be revoked: change {variable('api_key')}.")
    unknown = ConfigurationError(f"there is no key {display_path(key_id)}.")
    if not is_id(key_id, "key"):
        raise unknown
    with _records(settings) as storage:
        [outcome] = storage.apply([make_revocation(key_id, by=COMMAND_LINE)])
    if isinstance(outcome, Refused):
        raise unknown


@contextmanager
def _records(settings: Settings) -> Iterator[SqlStorage]:
    """Open the database for a command, beside a service that may be running."""
    make_data_dir(settings)
    storage = open_storage(settings)
    try:
        yield storage
    finally:
        storage.close()
