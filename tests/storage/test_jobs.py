"""Jobs for other nodes: stored with their batch or not at all, taken by their node, and gone when nothing waits."""

import asyncio
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import psycopg
import pytest

from app.domain.batch import Batch
from app.domain.ids import new_id
from app.storage.base import Applied, ClaimBatch, CreateWorkspace, GiveBack, Holder, Refused, WaitingBatch
from app.storage.sql.jobs import JobQueue, queue_of
from app.storage.sql.storage import SqlStorage
from tests.support.records import make_batch, make_workspace, submit

pytestmark = pytest.mark.anyio

NODE, OTHER_NODE = new_id("node"), new_id("node")
API = Holder(new_id("proc"), None)


@pytest.fixture
def storage(postgres_url: str) -> Iterator[SqlStorage]:
    made = SqlStorage(postgres_url, jobs=JobQueue(postgres_url))
    made.migrate()
    yield made
    made.close()


def jobs(url: str) -> list[tuple[Any, ...]]:
    with psycopg.connect(url) as connection:
        return connection.execute(
            "SELECT queue_name, args->>'batch_id', (args->>'epoch')::int, status FROM procrastinate_jobs ORDER BY id"
        ).fetchall()


def accept(storage: SqlStorage, *nodes: str) -> list[Batch]:
    """Accept a batch for each node at a process that has none, all in one group."""
    spaces = [make_workspace(node_id=node) for node in nodes]
    storage.apply([CreateWorkspace(space) for space in spaces])
    made = [make_batch(space.id) for space in spaces]
    outcomes = storage.apply([replace(submit(batch), holder=API) for batch in made])
    assert [(type(outcome), outcome.taken) for outcome in outcomes if isinstance(outcome, Applied)] == [
        (Applied, False)
    ] * len(made)
    return made


def test_a_batch_for_another_node_is_stored_with_a_job_once(storage: SqlStorage, postgres_url: str) -> None:
    first, second = accept(storage, NODE, OTHER_NODE)
    # The reply was lost and the group comes again.
    assert storage.apply([replace(submit(batch), holder=API) for batch in (first, second)]) == [Applied(), Applied()]
    assert jobs(postgres_url) == [
        (queue_of(NODE), first.id, 1, "todo"),
        (queue_of(OTHER_NODE), second.id, 1, "todo"),
    ]


def test_a_group_that_fails_leaves_no_job(storage: SqlStorage, postgres_url: str) -> None:
    space = make_workspace(node_id=NODE)
    storage.apply([CreateWorkspace(space)])
    batch = make_batch(space.id)
    clash = replace(make_batch(space.id), id=batch.id, created_at=batch.created_at + 1)
    with pytest.raises(Exception, match="another batch has the id"):
        storage.apply([replace(submit(one), holder=API) for one in (batch, clash)])
    assert storage.batch(batch.id) is None
    assert jobs(postgres_url) == []


def test_a_batch_that_is_given_back_has_a_job_of_its_new_epoch(storage: SqlStorage, postgres_url: str) -> None:
    space = make_workspace(node_id=NODE)
    storage.apply([CreateWorkspace(space)])
    batch = make_batch(space.id)
    storage.apply([replace(submit(batch), holder=Holder(new_id("proc"), NODE))])
    assert jobs(postgres_url) == []
    back = GiveBack(batch.id, 1, 1, NODE)
    assert storage.apply([back]) == [Applied()]
    assert storage.apply([back]) == [Applied()]
    assert jobs(postgres_url) == [(queue_of(NODE), batch.id, 2, "todo")]


async def test_a_node_takes_its_own_jobs_and_leaves_the_others(storage: SqlStorage, postgres_url: str) -> None:
    made = accept(storage, NODE, OTHER_NODE, NODE)
    taken: list[WaitingBatch] = []
    two, three = asyncio.Event(), asyncio.Event()

    async def take(batch: WaitingBatch) -> None:
        taken.append(batch)
        if len(taken) >= 2:
            (two if len(taken) == 2 else three).set()

    working = asyncio.create_task(JobQueue(postgres_url).work(NODE, take, at_once=4))
    # One that comes while it listens, too.
    async with asyncio.timeout(30):
        await two.wait()
        (late,) = await asyncio.to_thread(accept, storage, NODE)
        await three.wait()
        # It ends when the jobs it has taken are noted as done.
        working.cancel()
        await asyncio.wait([working])
    assert sorted(taken, key=lambda batch: batch.batch_id) == [
        WaitingBatch(batch.id, 1) for batch in (made[0], made[2], late)
    ]
    assert jobs(postgres_url) == [(queue_of(OTHER_NODE), made[1].id, 1, "todo")]


def test_jobs_of_batches_that_do_not_wait_any_more_are_removed(storage: SqlStorage, postgres_url: str) -> None:
    waiting, taken = accept(storage, NODE, NODE)
    assert storage.apply([ClaimBatch(taken.id, 1, new_id("proc"), only_waiting=True)]) == [Applied()]
    with psycopg.connect(postgres_url) as connection:
        # As a worker leaves them that was killed in the middle of both.
        connection.execute("UPDATE procrastinate_jobs SET status = 'doing'")
    storage.tidy()
    assert [job[1] for job in jobs(postgres_url)] == [waiting.id]


def test_the_tables_of_the_engine_are_made_once_and_brought_up_to_date(postgres_url: str) -> None:
    plain = SqlStorage(postgres_url)
    plain.migrate()
    plain.close()
    queue = JobQueue(postgres_url)
    for _ in range(2):
        storage = SqlStorage(postgres_url, jobs=queue)
        storage.migrate()
        storage.close()
    with psycopg.connect(postgres_url) as connection:
        names = [name for (name,) in connection.execute("SELECT migration FROM job_schema ORDER BY migration")]
        # A version of the engine before its last migration.
        last = names[-1]
        connection.execute("DELETE FROM job_schema WHERE migration = %s", (last,))
        connection.commit()
        queue.prepare(connection)
        found = [name for (name,) in connection.execute("SELECT migration FROM job_schema ORDER BY migration")]
        assert (found, len(names) > 30) == (names, True)
        first = names[0]
        connection.execute("DELETE FROM job_schema WHERE migration = %s", (first,))
        # What is missing is run, and nothing else: of the first one the tables are there already.
        with pytest.raises(psycopg.errors.DuplicateObject):
            queue.prepare(connection)


def test_without_jobs_a_batch_for_another_node_is_refused(postgres_storage: SqlStorage) -> None:
    space = make_workspace(node_id=NODE)
    postgres_storage.apply([CreateWorkspace(space)])
    batch = make_batch(space.id)
    assert postgres_storage.apply([replace(submit(batch), holder=API)]) == [Refused("elsewhere")]
    assert postgres_storage.batch(batch.id) is None
