"""Jobs: what wakes a process of another node for a batch. The engine is procrastinate (extra `toolcrib[distributed]`).

A job is only a wake-up. It is stored in the transaction of its batch, and the batch's row decides who runs it: a job
that is lost, late or taken twice costs time and changes nothing. So none of the engine's locks and retries is used.
"""

import re
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import psycopg
from psycopg import sql

from app.errors import ConfigurationError
from app.storage.base import WaitingBatch
from app.storage.sql.engine import plain_url

if TYPE_CHECKING:
    from psycopg_pool import AsyncConnectionPool

TASK: Final = "toolcrib.run_batch"
POLL_SECONDS: Final = 2.0
"""How long a job whose notification was lost may lie."""
CONNECTIONS: Final = 4

_MIGRATION: Final = re.compile(r"\d\d\.\d\d\.\d\d_\d\d_.*\.sql")


def queue_of(node_id: str) -> str:
    """Return the name of a node's queue."""
    return f"node:{node_id}"


class JobQueue:
    """The jobs of one database.

    Args:
        url: of the database, past any pooler of transactions: jobs are listened for.

    Raises:
        ConfigurationError: the extra is not installed.
    """

    def __init__(self, url: str) -> None:
        try:
            import procrastinate
            import psycopg_pool
        except ImportError:
            raise ConfigurationError(
                "jobs for other nodes need procrastinate, which is not installed: install toolcrib[distributed]"
            ) from None
        self._engine = procrastinate
        self._pool = psycopg_pool.AsyncConnectionPool
        self._url = plain_url(url)
        # Never opened: it only builds the statement that stores jobs, on a connection of the records.
        self._deferrer = procrastinate.App(connector=procrastinate.SyncPsycopgConnector())
        self._task = self._deferrer.task(name=TASK)(_never_run)

    def defer(self, connection: psycopg.Connection, jobs: Mapping[str, Sequence[WaitingBatch]]) -> None:
        """Store a job for each batch, by node, in the transaction of a connection."""
        for node_id, waiting in jobs.items():
            self._task.configure(queue=queue_of(node_id), connection=connection).batch_defer(
                *[dict[str, Any](batch_id=batch.batch_id, epoch=batch.epoch) for batch in waiting]
            )

    def prepare(self, connection: psycopg.Connection) -> None:
        """Make or bring up to date the engine's tables, in the transaction of a connection; one caller at a time."""
        connection.execute('CREATE TABLE IF NOT EXISTS job_schema (migration text COLLATE "C" PRIMARY KEY)')
        migrations = sorted(
            path
            for path in Path(self._engine.schema.SchemaManager.get_migrations_path()).iterdir()
            if _MIGRATION.fullmatch(path.name)
        )
        done = {name for (name,) in connection.execute("SELECT migration FROM job_schema")}
        missing = [path for path in migrations if path.name not in done]
        if not missing:
            return
        if done:
            for path in missing:
                _run(connection, path.read_text(encoding="utf-8"))
        else:
            _run(connection, self._engine.schema.SchemaManager.get_schema())
        with connection.cursor() as cursor:
            cursor.executemany("INSERT INTO job_schema VALUES (%s)", [(path.name,) for path in missing])

    @staticmethod
    def forget_old(connection: psycopg.Connection) -> int:
        """Remove jobs of batches that no longer wait, which a process left that died with them; return how many."""
        found = connection.execute(
            "DELETE FROM procrastinate_jobs WHERE task_name = %s AND NOT EXISTS ("
            "SELECT 1 FROM batches WHERE batches.id = args->>'batch_id' AND process_id IS NULL"
            " AND status IN ('queued', 'running'))",
            (TASK,),
        )
        return found.rowcount

    def _unchecked_pool(self, **options: Any) -> "AsyncConnectionPool[Any]":
        # The engine asks the server before each use whether it is still there: a round trip for every one that counts.
        return self._pool(**{**options, "check": None})

    async def work(self, node_id: str, take: Callable[[WaitingBatch], Awaitable[None]], *, at_once: int) -> None:
        """Call `take` with the batch of each job of a node, several at once, until cancelled.

        Raises:
            Exception: the database went away; call it again.
        """
        engine = self._engine
        app = engine.App(
            connector=engine.PsycopgConnector(
                conninfo=self._url,
                min_size=1,
                max_size=CONNECTIONS,
                pool_factory=self._unchecked_pool,
                configure=_commit_each,
                # A job that was taken and is there again after a crash of the server changes nothing.
                kwargs={"application_name": "toolcrib jobs", "options": "-c synchronous_commit=off"},
            )
        )

        async def run(batch_id: str, epoch: int) -> None:
            await take(WaitingBatch(batch_id, epoch))

        app.task(name=TASK)(run)
        async with app.open_async():
            await app.run_worker_async(
                queues=[queue_of(node_id)],
                name=node_id,
                concurrency=at_once,
                fetch_job_polling_interval=POLL_SECONDS,
                delete_jobs="always",
                install_signal_handlers=False,
                shutdown_graceful_timeout=0,
            )


async def _commit_each(connection: psycopg.AsyncConnection) -> None:
    # Each of the engine's queries is one statement, so a transaction around it is two round trips for nothing.
    await connection.set_autocommit(True)


def _never_run(batch_id: str, epoch: int) -> None:
    raise NotImplementedError(batch_id, epoch)


def _run(connection: psycopg.Connection, script: str) -> None:
    # Several statements at once, which the driver sends as they are when there are no parameters.
    connection.execute(sql.SQL(script))
