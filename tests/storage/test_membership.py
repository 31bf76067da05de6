"""Nodes and processes: who lives by the clock of the database, what the dead hold, and who is to run what."""

from dataclasses import replace
from typing import Any

import pytest
from sqlalchemy import text

from app.domain.batch import Batch
from app.domain.ids import new_id
from app.domain.node import LEASE_SECONDS, Node, Process
from app.domain.workspace import Workspace, WorkspaceStatus
from app.storage.base import (
    Applied,
    ClaimBatch,
    CreateWorkspace,
    GiveBack,
    Holder,
    Placement,
    Refused,
    RequestCancel,
    UnfinishedBatch,
    WaitingBatch,
    Wish,
)
from app.storage.sql.storage import SqlStorage
from tests.support.records import ends, make_batch, make_workspace, starts, submit

NODE, OTHER_NODE = sorted(new_id("node") for _ in range(2))


def make_process(node_id: str | None = NODE, **fields: Any) -> Process:
    return replace(Process(new_id("proc"), node_id, "all", "http://127.0.0.1:1"), **fields)


def ids(processes: list[Process]) -> list[str]:
    return [process.id for process in processes]


def silence(storage: SqlStorage, *processes: Process, seconds: float = LEASE_SECONDS + 1) -> None:
    """Let processes say nothing for a while."""
    with storage._database.writer.begin() as connection:
        for process in processes:
            connection.execute(
                text("UPDATE processes SET seen_at = seen_at - :ms WHERE id = :id"),
                {"ms": round(seconds * 1000), "id": process.id},
            )


def accept(storage: SqlStorage, workspace: Workspace, holder: Process | None, **fields: Any) -> Batch:
    batch = make_batch(workspace.id, **fields)
    held = None if holder is None else Holder(holder.id, holder.node_id)
    assert storage.apply([replace(submit(batch), holder=held)]) == [Applied()]
    return batch


@pytest.fixture
def workspace(storage: SqlStorage) -> Workspace:
    made = make_workspace(node_id=NODE)
    storage.apply([CreateWorkspace(made)])
    return made


def test_a_process_lives_until_it_has_said_nothing_for_the_lease(storage: SqlStorage) -> None:
    first, second = make_process(), make_process(None, role="api", url=None)
    storage.join(first)
    storage.join(second)
    assert ids(storage.living()) == [first.id, second.id]
    silence(storage, first, seconds=LEASE_SECONDS - 1)
    assert ids(storage.living()) == [first.id, second.id]
    silence(storage, first, seconds=2)
    assert ids(storage.living()) == [second.id]
    assert ids(storage.processes()) == [first.id, second.id]
    assert ids(storage.beat(first)) == [first.id, second.id]
    storage.leave(second.id)
    assert ids(storage.processes()) == [first.id]
    found = storage.processes()[0]
    assert replace(found, started_at=0, seen_at=0) == first
    assert 0 < found.started_at <= found.seen_at


def test_a_process_that_was_forgotten_while_it_slept_is_back_with_its_next_heartbeat(storage: SqlStorage) -> None:
    process = make_process()
    storage.join(process)
    silence(storage, process)
    storage.tidy()
    assert storage.processes() == []
    assert ids(storage.beat(process)) == [process.id]


def test_processes_known_to_be_dead_are_forgotten_by_the_next_of_their_node(storage: SqlStorage) -> None:
    dead, living, next_one = make_process(), make_process(), make_process()
    for process in (dead, living):
        storage.join(process)
    storage.join(next_one, dead=[dead.id])
    assert ids(storage.processes()) == [living.id, next_one.id]
    assert storage.nodes() == [Node(NODE, storage.nodes()[0].created_at, 0)]


def test_workspaces_from_before_there_were_nodes_become_those_of_the_first(storage: SqlStorage) -> None:
    old, gone = make_workspace(), make_workspace(status=WorkspaceStatus.DELETED)
    storage.apply([CreateWorkspace(old), CreateWorkspace(gone)])
    storage.join(make_process(NODE))
    storage.join(make_process(OTHER_NODE))
    assert [storage.workspace(one.id) for one in (old, gone)] == [replace(old, node_id=NODE), gone]
    assert [(node.id, node.workspaces) for node in storage.nodes()] == [(NODE, 1), (OTHER_NODE, 0)]
    storage.join(make_process(OTHER_NODE), adopt_all=True)
    assert storage.workspace(old.id) == replace(old, node_id=OTHER_NODE)


def test_a_batch_is_held_by_who_accepts_it_when_the_workspace_is_of_its_node(
    storage: SqlStorage, workspace: Workspace
) -> None:
    here = make_process()
    batch = accept(storage, workspace, here)
    assert storage.unfinished_batch(batch.id) == UnfinishedBatch(batch.id, workspace.id, False, here.id, NODE)
    assert storage.unfinished_batch(new_id("batch")) is None
    for other in (make_process(OTHER_NODE), make_process(None)):
        refused = make_batch(workspace.id)
        write = replace(submit(refused), holder=Holder(other.id, other.node_id))
        # Without jobs nobody would wake the node.
        assert storage.apply([write]) == [Refused("elsewhere")]
        assert storage.batch(refused.id) is None


def test_lost_are_the_batches_of_the_unknown_and_when_asked_of_the_silent(
    storage: SqlStorage, workspace: Workspace
) -> None:
    living, silent, unknown = (make_process() for _ in range(3))
    storage.join(living)
    storage.join(silent)
    held = {process.id: accept(storage, workspace, process) for process in (living, silent, unknown)}
    waiting, ended = accept(storage, workspace, None), accept(storage, workspace, unknown)
    storage.apply([starts(ended)])
    storage.apply([ends(ended, 2)])
    silence(storage, silent)

    def lost(process: Process) -> UnfinishedBatch:
        return UnfinishedBatch(held[process.id].id, workspace.id, False, process.id, NODE)

    assert storage.lost_batches(stale=False) == [lost(unknown)]
    assert storage.lost_batches(stale=True) == [lost(silent), lost(unknown)]
    assert storage.waiting_batches(NODE, limit=10) == [WaitingBatch(waiting.id, 1)]
    assert storage.waiting_batches(OTHER_NODE, limit=10) == []
    # One that holds something is kept, so that it stays told from one that never was.
    storage.tidy()
    assert ids(storage.processes()) == [living.id, silent.id]


def test_only_one_of_two_claims_of_a_waiting_batch_holds_it(storage: SqlStorage, workspace: Workspace) -> None:
    first, second = make_process(), make_process()
    batch = accept(storage, workspace, None)
    claims = [ClaimBatch(batch.id, 1, process.id, only_waiting=True) for process in (first, second)]
    assert storage.apply([claims[0]]) == [Applied()]
    assert storage.apply([claims[1], claims[0]]) == [Refused("fenced"), Applied()]
    late = ClaimBatch(batch.id, 2, second.id, only_waiting=True)
    assert storage.apply([late]) == [Refused("fenced")]
    assert storage.unfinished_batch(batch.id) == UnfinishedBatch(batch.id, workspace.id, False, first.id, NODE, 2)
    # Whoever knows that the holder is dead takes it all the same.
    assert storage.apply([replace(late, only_waiting=False)]) == [Applied()]
    assert storage.unfinished_batch(batch.id) == UnfinishedBatch(batch.id, workspace.id, False, second.id, NODE, 3)


def test_a_batch_given_back_waits_and_its_old_holder_writes_it_no_more(
    storage: SqlStorage, workspace: Workspace
) -> None:
    dead = make_process()
    batch = accept(storage, workspace, dead)
    back = GiveBack(batch.id, 1, 1, NODE)
    assert storage.apply([back]) == [Applied()]
    assert storage.apply([back]) == [Applied()]  # the reply was lost
    assert storage.waiting_batches(NODE, limit=10) == [WaitingBatch(batch.id, 2)]
    assert storage.apply([starts(batch)]) == [Refused("fenced")]
    assert storage.apply([starts(replace(batch, epoch=2))]) == [Applied()]
    assert storage.apply([GiveBack(batch.id, 1, 1, NODE)]) == [Refused("fenced")]


def test_a_batch_that_has_gone_on_since_it_was_judged_is_left_to_its_process(
    storage: SqlStorage, workspace: Workspace
) -> None:
    silent, other = make_process(), make_process()
    batch = accept(storage, workspace, silent)
    seen = storage.unfinished_batch(batch.id)
    assert seen == UnfinishedBatch(batch.id, workspace.id, False, silent.id, NODE, epoch=1, last_seq=1)
    assert storage.apply([starts(batch)]) == [Applied()]
    claim = ClaimBatch(batch.id, seen.epoch, other.id, last_seq=seen.last_seq)
    assert storage.apply([claim, GiveBack(batch.id, seen.epoch, seen.last_seq, NODE)]) == [Refused("fenced")] * 2
    seen = storage.unfinished_batch(batch.id)
    assert seen == UnfinishedBatch(batch.id, workspace.id, True, silent.id, NODE, epoch=1, last_seq=2)
    assert storage.apply([replace(claim, last_seq=seen.last_seq)]) == [Applied()]


def test_a_batch_given_back_and_claimed_in_one_group_is_held(storage: SqlStorage, workspace: Workspace) -> None:
    dead, other = make_process(), make_process()
    batch = accept(storage, workspace, dead)
    assert storage.apply([GiveBack(batch.id, 1, 1, NODE), ClaimBatch(batch.id, 2, other.id)]) == [Applied()] * 2
    assert storage.unfinished_batch(batch.id) == UnfinishedBatch(batch.id, workspace.id, False, other.id, NODE, 3)
    assert storage.waiting_batches(NODE, limit=10) == []


def test_wishes_are_those_about_what_a_process_holds_and_has_not_ended(
    storage: SqlStorage, workspace: Workspace
) -> None:
    mine, other = make_process(), make_process()
    whole, partly, ended = (accept(storage, workspace, mine, calls=2) for _ in range(3))
    foreign = accept(storage, workspace, other)
    storage.apply([starts(ended)])
    storage.apply(
        [
            RequestCancel(whole.id, None, 5),
            RequestCancel(partly.id, partly.calls[1].id, 5),
            RequestCancel(foreign.id, None, 5),
            RequestCancel(ended.id, ended.calls[0].id, 5),
        ]
    )
    storage.apply([ends(ended, 3)])
    assert storage.wishes(mine.id) == [Wish(whole.id, None), Wish(partly.id, partly.calls[1].id)]
    assert storage.wishes(new_id("proc")) == []


def test_placement_tells_who_lives_there_and_how_much_waits(storage: SqlStorage, workspace: Workspace) -> None:
    here, silent, elsewhere = make_process(), make_process(), make_process(OTHER_NODE)
    for process in (here, silent, elsewhere):
        storage.join(process)
    silence(storage, silent)
    assert storage.placement(new_id("ws"), most=9) is None
    for _ in range(3):
        accept(storage, workspace, None)
    accept(storage, workspace, here)
    found = storage.placement(workspace.id, most=9)
    assert found is not None
    assert found == Placement(NODE, found.processes, unfinished=4, waiting=3)
    assert ids(list(found.processes)) == [here.id]
    bounded = storage.placement(workspace.id, most=2)
    assert bounded is not None
    assert (bounded.unfinished, bounded.waiting) == (2, 2)


def test_workspaces_with_interrupted_batches_are_found_by_node_and_time(
    storage: SqlStorage, workspace: Workspace
) -> None:
    calm, foreign = make_workspace(node_id=NODE), make_workspace(node_id=OTHER_NODE)
    storage.apply([CreateWorkspace(one) for one in (calm, foreign)])
    storage.join(make_process())
    for owner, status in ((workspace, "interrupted"), (calm, "completed"), (foreign, "interrupted")):
        batch = accept(storage, owner, None)
        storage.apply([starts(batch)])
        storage.apply([ends(batch, 2)])
        with storage._database.writer.begin() as connection:
            connection.execute(
                text("UPDATE batches SET status = :status, finished_at = 1000 WHERE id = :id"),
                {"status": status, "id": batch.id},
            )
    found = storage.interrupted_workspaces(NODE, since=1000)
    assert [one.id for one in found] == [workspace.id]
    assert storage.interrupted_workspaces(NODE, since=1001) == []
    assert storage.swept_at(NODE) is None
    storage.swept(NODE, 1001)
    assert storage.swept_at(NODE) == 1001
