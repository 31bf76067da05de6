"""Removing old records, on both databases: piece by piece, marked first, and nothing of anybody else's."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import text

from app.domain.batch import Batch, BatchStatus
from app.domain.events import EventType, OutputRow
from app.domain.idempotency import IdempotencyKey
from app.domain.retention import Removal, RemovedCounts
from app.domain.workspace import Workspace, WorkspaceStatus
from app.storage.base import (
    Append,
    CallFilter,
    CreateWorkspace,
    GiveBackPages,
    GoneWorkspace,
    Refused,
    Removed,
    RemoveFromBatch,
    RemoveWorkspace,
    SetWorkspaceStatus,
    SubmitBatch,
)
from app.storage.sql.removal import PIECE_BYTES, PIECE_ROWS
from app.storage.sql.storage import SqlStorage
from tests.storage.test_reads import plans
from tests.support.records import ends, make_batch, make_event, make_workspace, starts, submit

LATER = 2**60


@pytest.fixture
def workspace(storage: SqlStorage) -> Workspace:
    made = make_workspace()
    storage.apply([CreateWorkspace(made)])
    return made


def ended(storage: SqlStorage, workspace: Workspace, updates: int = 3, size: int = 10, calls: int = 2) -> Batch:
    """A batch that has ended, with so many updates of so many bytes, in two parts each, and large arguments."""
    batch = make_batch(workspace.id, calls=calls, call_arguments=b'"' + b"a" * 3000 + b'"')
    call_id = batch.calls[0].id
    first = submit(batch)
    storage.apply([SubmitBatch(first.batch, first.start, IdempotencyKey(batch.id, b"digest")), starts(batch)])
    seq = 1 + calls
    for _ in range(updates):
        seq += 1
        offset = (seq - calls - 2) * size
        rows = [
            OutputRow(seq, 0, call_id, "stdout", offset, offset, b"o" * (size - 1)),
            OutputRow(seq, 1, call_id, "stderr", seq, offset + size - 1, b"e"),
        ]
        event = make_event(batch.id, seq, EventType.TOOL_EXECUTION_UPDATE, call_id, {"kind": "delta"})
        storage.apply([Append(batch.id, 1, seq - 1, [event], output=rows)])
    storage.apply([ends(batch, seq)])
    return batch


def count(storage: SqlStorage, table: str) -> int:
    with storage._database.reader.connect() as connection:
        return int(connection.execute(text(f"SELECT count(*) FROM {table}")).scalar_one())


def remove(storage: SqlStorage, batch: Batch, to: Removal) -> Removed:
    (outcome,) = storage.apply([RemoveFromBatch(batch.id, to)])
    assert isinstance(outcome, Removed)
    return outcome


def remove_all(storage: SqlStorage, batch: Batch, to: Removal) -> RemovedCounts:
    total = RemovedCounts()
    for _ in range(1000):
        outcome = remove(storage, batch, to)
        total += outcome.counts
        if not outcome.more:
            return total
    pytest.fail("the removal does not end")


def types(storage: SqlStorage, batch: Batch) -> Sequence[EventType]:
    return [event.type for event in storage.events(batch.id, after=0)]


def test_output_goes_piece_by_piece_and_counts_as_gone_from_the_first(
    storage: SqlStorage, workspace: Workspace
) -> None:
    batch, other = ended(storage, workspace, updates=5, size=PIECE_BYTES // 2), ended(storage, workspace)
    call_id = batch.calls[0].id
    assert storage.output_extent(call_id, None) is not None

    first = remove(storage, batch, Removal.OUTPUT)

    assert (first.more, first.counts) == (True, RemovedCounts(output_bytes=PIECE_BYTES))
    assert storage.output_extent(call_id, None) is None
    assert [len(event.output) for event in storage.events(batch.id, after=3)] == [0, 0, 2, 2, 2, 0, 0, 0]
    rest = remove_all(storage, batch, Removal.OUTPUT)
    assert rest == RemovedCounts(output_bytes=PIECE_BYTES * 3 // 2)
    assert remove(storage, batch, Removal.OUTPUT) == Removed()
    assert types(storage, batch).count(EventType.TOOL_EXECUTION_UPDATE) == 5
    assert storage.output_extent(batch.calls[1].id, "stdout") is None
    assert storage.output_extent(other.calls[0].id, None) is not None
    assert count(storage, "call_output") == 6


def test_updates_go_and_the_life_cycle_stays(storage: SqlStorage, workspace: Workspace) -> None:
    batch, other = ended(storage, workspace, updates=PIECE_ROWS + 5), ended(storage, workspace)
    whole = types(storage, other)

    removed = remove_all(storage, batch, Removal.UPDATES)

    assert removed == RemovedCounts(output_bytes=10 * (PIECE_ROWS + 5), events=PIECE_ROWS + 5)
    assert types(storage, batch) == [kind for kind in whole if kind is not EventType.TOOL_EXECUTION_UPDATE]
    assert types(storage, other) == whole
    assert storage.last_seq(batch.id) == (PIECE_ROWS + 5 + 6, BatchStatus.COMPLETED)
    found = storage.batch(batch.id)
    assert found is not None
    assert all(call.result for call in found.calls)


def test_a_batch_goes_with_everything_and_is_shown_to_nobody_from_the_first_piece(
    storage: SqlStorage, workspace: Workspace
) -> None:
    batch, other = ended(storage, workspace, updates=3, size=PIECE_BYTES), ended(storage, make_other(storage))
    assert storage.made(batch.id, owner="owner", workspace_id=workspace.id) is not None

    assert remove(storage, batch, Removal.ALL).more

    assert storage.batch(batch.id) is None
    assert storage.last_seq(batch.id) is None
    assert storage.batches(workspace.id, status=None, before=None, limit=5).items == ()
    assert storage.made(batch.id, owner="owner", workspace_id=workspace.id) is None
    assert remove_all(storage, batch, Removal.ALL) == RemovedCounts(PIECE_BYTES * 2, events=9, calls=2, batches=1)
    assert storage.call(batch.calls[0].id) is None
    assert storage.calls(CallFilter(workspace_id=workspace.id), before=None, limit=5).items == ()
    tables = ("batches", "calls", "large_arguments", "events", "call_output")
    assert {table: count(storage, table) for table in tables} == {
        "batches": 1,
        "calls": 2,
        "large_arguments": 2,
        "events": 9,
        "call_output": 6,
    }
    assert storage.batch(other.id) is not None
    assert remove(storage, batch, Removal.ALL) == Removed()


def make_other(storage: SqlStorage) -> Workspace:
    made = make_workspace()
    storage.apply([CreateWorkspace(made)])
    return made


def test_calls_with_large_results_go_a_few_at_a_time(storage: SqlStorage, workspace: Workspace) -> None:
    batch = make_batch(workspace.id, calls=4)
    storage.apply([submit(batch), ends(batch, 1, b'"' + b"r" * PIECE_BYTES + b'"')])
    pieces = []
    while (outcome := remove(storage, batch, Removal.ALL)).more:
        pieces.append(outcome.counts.calls)
    assert [piece for piece in pieces if piece] == [1, 1, 1, 1]


@pytest.mark.parametrize("to", [Removal.OUTPUT, Removal.UPDATES, Removal.ALL])
def test_nothing_is_removed_from_a_batch_that_runs(storage: SqlStorage, workspace: Workspace, to: Removal) -> None:
    batch = make_batch(workspace.id)
    storage.apply([submit(batch), starts(batch)])
    assert storage.apply([RemoveFromBatch(batch.id, to)]) == [Refused("running")]
    assert storage.removable_batches((Removal.NOTHING,), ended_before=LATER, limit=5) == []
    assert len(storage.events(batch.id, after=0)) == 2


def test_batches_are_due_by_their_step_and_their_end(storage: SqlStorage, workspace: Workspace) -> None:
    whole, going, trimmed = (ended(storage, workspace, updates=3, size=PIECE_BYTES) for _ in range(3))
    remove(storage, going, Removal.OUTPUT)
    remove_all(storage, trimmed, Removal.UPDATES)

    def due(*steps: Removal, before: int = LATER, limit: int = 5) -> set[str]:
        return set(storage.removable_batches(steps, ended_before=before, limit=limit))

    assert due(Removal.NOTHING) == {whole.id}
    assert due(Removal.OUTPUT_GOING) == {going.id}
    assert due(Removal.NOTHING, Removal.OUTPUT_GOING, Removal.UPDATES) == {whole.id, going.id, trimmed.id}
    assert due(Removal.NOTHING, before=whole.created_at) == set()
    assert len(due(Removal.NOTHING, Removal.OUTPUT_GOING, limit=1)) == 1


def test_a_removal_goes_on_from_the_step_before(storage: SqlStorage, workspace: Workspace) -> None:
    batch = ended(storage, workspace)
    for step in (Removal.OUTPUT, Removal.UPDATES, Removal.OUTPUT, Removal.ALL):
        remove_all(storage, batch, step)
    assert storage.batch(batch.id) is None
    assert count(storage, "events") == 0


def test_a_workspace_goes_when_it_is_gone_and_has_no_batches(storage: SqlStorage, workspace: Workspace) -> None:
    used, unused = make_other(storage), make_other(storage)
    batch = ended(storage, used)
    gone = [
        SetWorkspaceStatus(used.id, WorkspaceStatus.DELETED, at=100),
        SetWorkspaceStatus(unused.id, WorkspaceStatus.EXPIRED, at=200),
    ]
    storage.apply(gone)
    expected = [GoneWorkspace(used.id, 100, has_batches=True), GoneWorkspace(unused.id, 200, has_batches=False)]
    assert storage.gone_workspaces(ended_before=201, after=None, limit=5) == expected
    assert storage.gone_workspaces(ended_before=200, after=None, limit=5) == expected[:1]
    assert storage.gone_workspaces(ended_before=201, after=(100, used.id), limit=5) == expected[1:]

    outcomes = storage.apply([RemoveWorkspace(each.id) for each in (workspace, used, unused)])

    assert outcomes == [Refused("in_use"), Refused("in_use"), Removed(RemovedCounts(workspaces=1))]
    assert storage.workspace(unused.id) is None
    remove_all(storage, batch, Removal.ALL)
    assert storage.apply([RemoveWorkspace(used.id)]) == [Removed(RemovedCounts(workspaces=1))]
    assert storage.workspace(workspace.id) == workspace


def test_what_is_due_is_found_through_an_index(storage: SqlStorage) -> None:
    reads: dict[str, Any] = {
        "ix_batches_removal": lambda s: s.removable_batches((Removal.NOTHING,), ended_before=5, limit=9),
        "ix_workspaces_ended": lambda s: s.gone_workspaces(ended_before=5, after=(1, "ws"), limit=9),
    }
    for index, read in reads.items():
        plan = plans(storage, read)
        assert index in plan, plan
        assert "TEMP B-TREE" not in plan, plan


def test_sqlite_gives_the_room_back_in_steps(sqlite_storage: SqlStorage, tmp_path: Path) -> None:
    storage = sqlite_storage
    made = make_workspace()
    storage.apply([CreateWorkspace(made)])
    batch = ended(storage, made, updates=20, size=400_000)
    remove_all(storage, batch, Removal.ALL)

    def pages() -> int:
        with storage._database.reader.connect() as connection:
            return int(connection.execute(text("PRAGMA page_count")).scalar_one())

    before = pages()
    steps = []
    while True:
        (outcome,) = storage.apply([GiveBackPages(500)])
        assert isinstance(outcome, Removed)
        steps.append(outcome.counts.pages)
        if not outcome.more:
            break
    assert max(steps) <= 502  # with the pages that map the others
    assert len(steps) >= 3
    assert pages() == before - sum(steps) < before / 4
    assert storage.apply([GiveBackPages(500)]) == [Removed()]
    storage.close()
    assert (tmp_path / "toolcrib.db").stat().st_size < 4096 * before / 4


def test_postgres_needs_no_pages_given_back(postgres_storage: SqlStorage) -> None:
    assert postgres_storage.apply([GiveBackPages(500)]) == [Removed()]
