"""What a write under an idempotency key does the second time, on both databases: nothing, and it says what there is."""

import threading
from dataclasses import replace

import pytest

from app.domain.batch import Batch
from app.domain.idempotency import IdempotencyKey
from app.domain.workspace import Workspace, WorkspaceStatus
from app.storage.base import (
    Applied,
    CreateWorkspace,
    Existing,
    Made,
    Refused,
    SetWorkspaceStatus,
    SubmitBatch,
    Write,
    WriteOutcome,
)
from app.storage.sql.engine import PreparedLookup
from app.storage.sql.storage import SqlStorage
from tests.support.records import ends, make_batch, make_workspace, submit

APPLIED = Applied()
REUSED = Refused("key_reused")
KEY = IdempotencyKey("first-try", b"1" * 32)
OTHER_BODY = IdempotencyKey(KEY.value, b"2" * 32)
WAIT_SECONDS = 20


def keyed(batch: Batch, key: IdempotencyKey = KEY) -> SubmitBatch:
    return replace(submit(batch), idempotency=key)


def one(storage: SqlStorage, write: Write) -> WriteOutcome:
    (outcome,) = storage.apply([write])
    return outcome


@pytest.fixture
def workspace(storage: SqlStorage) -> Workspace:
    made = make_workspace()
    assert one(storage, CreateWorkspace(made)) == APPLIED
    return made


# -- batches ----------------------------------------------------------------------------------------------------------


def test_only_the_first_batch_of_a_key_in_a_group_is_stored(storage: SqlStorage, workspace: Workspace) -> None:
    first, second, third, free = (make_batch(workspace.id) for _ in range(4))

    outcomes = storage.apply([keyed(first), keyed(second), keyed(third, OTHER_BODY), submit(free)])

    assert outcomes == [APPLIED, Existing(first.id), REUSED, APPLIED]
    assert storage.batch(first.id) == first
    assert storage.batch(free.id) == free
    for batch in (second, third):
        assert storage.batch(batch.id) is None
        assert storage.events(batch.id, after=0) == []
    assert storage.made(KEY.value, owner="owner", workspace_id=workspace.id) == Made(first.id, KEY.digest)


def test_key_holds_in_later_groups_whatever_became_of_the_batch_and_its_workspace(
    storage: SqlStorage, workspace: Workspace
) -> None:
    first = make_batch(workspace.id)
    assert one(storage, keyed(first)) == APPLIED
    for change in (
        ends(first, 1),
        SetWorkspaceStatus(workspace.id, WorkspaceStatus.DELETING),
        SetWorkspaceStatus(workspace.id, WorkspaceStatus.DELETED),
    ):
        assert one(storage, change) == APPLIED
        assert one(storage, keyed(make_batch(workspace.id))) == Existing(first.id)
        assert one(storage, keyed(make_batch(workspace.id), OTHER_BODY)) == REUSED
    assert [batch.id for batch in storage.batches(workspace.id, status=None, before=None, limit=9).items] == [first.id]


def test_key_is_another_one_for_another_owner_and_in_another_workspace(
    storage: SqlStorage, workspace: Workspace
) -> None:
    elsewhere = make_workspace()
    assert one(storage, CreateWorkspace(elsewhere)) == APPLIED
    made = [
        make_batch(workspace.id),
        make_batch(workspace.id, owner="another"),
        make_batch(elsewhere.id),
        make_batch(elsewhere.id, owner="another"),
    ]
    assert storage.apply([keyed(batch) for batch in made]) == [APPLIED] * 4
    again = [keyed(replace(make_batch(batch.workspace_id), owner=batch.owner)) for batch in made]
    assert storage.apply(again) == [Existing(batch.id) for batch in made]
    for batch in made:
        assert storage.made(KEY.value, owner=batch.owner, workspace_id=batch.workspace_id) == Made(batch.id, KEY.digest)
    assert storage.made(KEY.value, owner="nobody", workspace_id=workspace.id) is None
    assert storage.made(KEY.value, owner="owner", workspace_id=None) is None, "no workspace was made under it"
    assert storage.made(KEY.value.upper(), owner="owner", workspace_id=workspace.id) is None


def test_group_with_keys_applied_again_after_its_reply_was_lost_changes_nothing(storage: SqlStorage) -> None:
    workspace, twin = make_workspace(), make_workspace()
    first, second, third = (make_batch(workspace.id) for _ in range(3))
    group: list[Write] = [
        CreateWorkspace(workspace, KEY),
        CreateWorkspace(twin, KEY),
        keyed(first),
        keyed(second),
        keyed(third, OTHER_BODY),
    ]
    expected = [APPLIED, Existing(workspace.id), APPLIED, Existing(first.id), REUSED]
    assert storage.apply(group) == expected
    assert storage.apply(group) == expected
    assert storage.batch(first.id) == first
    assert [storage.workspace(twin.id), storage.batch(second.id), storage.batch(third.id)] == [None] * 3


def test_refused_write_leaves_no_key_behind(storage: SqlStorage, workspace: Workspace) -> None:
    stray = make_batch("ws_unknown")
    assert one(storage, keyed(stray)) == Refused("not_found")
    assert storage.made(KEY.value, owner="owner", workspace_id="ws_unknown") is None

    inner = make_workspace(root=f"{workspace.root}/inner")
    assert one(storage, CreateWorkspace(inner, KEY)) == Refused("overlap")
    assert storage.made(KEY.value, owner="owner", workspace_id=None) is None

    gone = [SetWorkspaceStatus(workspace.id, WorkspaceStatus.DELETING), keyed(make_batch(workspace.id))]
    assert storage.apply(gone) == [APPLIED, Refused("gone")]
    assert storage.made(KEY.value, owner="owner", workspace_id=workspace.id) is None


# -- workspaces -------------------------------------------------------------------------------------------------------


def test_only_the_first_workspace_of_a_key_is_stored_though_its_root_is_taken_by_itself(storage: SqlStorage) -> None:
    first = make_workspace(root="/srv/adopted")
    second, third, other = (make_workspace(root="/srv/adopted") for _ in range(3))
    stranger = make_workspace(owner="another")
    group = [CreateWorkspace(first, KEY), CreateWorkspace(second, KEY), CreateWorkspace(stranger, KEY)]

    assert storage.apply(group) == [APPLIED, Existing(first.id), APPLIED]
    assert one(storage, CreateWorkspace(third, KEY)) == Existing(first.id)
    assert one(storage, CreateWorkspace(other, OTHER_BODY)) == REUSED

    assert storage.workspace(first.id) == first
    assert [storage.workspace(made.id) for made in (second, third, other)] == [None] * 3
    assert storage.made(KEY.value, owner="owner", workspace_id=None) == Made(first.id, KEY.digest)
    assert storage.made(KEY.value, owner="another", workspace_id=None) == Made(stranger.id, KEY.digest)


# -- two processes, and the index -------------------------------------------------------------------------------------


def test_two_processes_that_use_one_key_at_once_make_one_thing(postgres_storage: SqlStorage) -> None:
    # Two writers on one Postgres: the second must see what the first commits, not only what was there before.
    other = SqlStorage(postgres_storage._database.writer.url.render_as_string(hide_password=False))
    workspace = make_workspace()
    assert one(postgres_storage, CreateWorkspace(workspace)) == APPLIED
    barrier = threading.Barrier(2, timeout=WAIT_SECONDS)
    outcomes: dict[str, list[tuple[str, WriteOutcome]]] = {}

    def use(storage: SqlStorage, value: str) -> None:
        key = IdempotencyKey(value, KEY.digest)
        batch, made = make_batch(workspace.id), make_workspace()
        barrier.wait()
        if value.startswith("batch"):
            outcomes[value].append((batch.id, one(storage, keyed(batch, key))))
        else:
            outcomes[value].append((made.id, one(storage, CreateWorkspace(made, key))))

    for number in range(20):
        value = f"{('batch', 'workspace')[number % 2]}-{number}"
        outcomes[value] = []
        threads = [threading.Thread(target=use, args=(storage, value)) for storage in (postgres_storage, other)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(WAIT_SECONDS)
    other.close()
    for pair in outcomes.values():
        [first] = [made_id for made_id, outcome in pair if outcome == APPLIED]
        assert [outcome for _, outcome in pair if outcome != APPLIED] == [Existing(first)]


def test_keys_are_looked_up_through_their_index(storage: SqlStorage, workspace: Workspace) -> None:
    keys = [IdempotencyKey(f"k{number}", KEY.digest) for number in range(3)]
    storage.apply([keyed(make_batch(workspace.id), key) for key in keys])
    storage.apply([CreateWorkspace(make_workspace(), key) for key in keys])
    assert "ux_batches_idempotency_key" in plan(storage, storage._groups.find_made_batches)
    assert "ux_workspaces_idempotency_key" in plan(storage, storage._groups.find_made_workspaces)


def plan(storage: SqlStorage, lookup: PreparedLookup) -> str:
    [(size, statement)] = lookup._texts.items()
    with storage._database.writer.connect() as connection:
        cursor = connection.connection.cursor()
        sqlite = connection.dialect.name == "sqlite"
        if not sqlite:
            # Whether an index can be used, not whether these few rows are worth one.
            cursor.execute("SET LOCAL enable_seqscan = off")
        cursor.execute(("EXPLAIN QUERY PLAN " if sqlite else "EXPLAIN ") + statement, ["x"] * size)
        return "\n".join(str(row[-1]) for row in cursor.fetchall())
