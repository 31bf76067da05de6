"""Pages of call records and the cost of a new call, with many records in the database: on SQLite and on Postgres."""

import json
import statistics
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing
from http.client import HTTPConnection
from pathlib import Path
from typing import Any, Literal

from app.domain.batch import Batch, BatchStatus, Summary
from app.domain.clock import now_ms
from app.domain.events import EventType, StoredEvent
from app.domain.ids import new_id
from app.domain.tool_call import CallError, CallRecord, CallStatus
from app.domain.workspace import Workspace, WorkspaceOptions, WorkspaceStatus
from app.errors import ErrorCode
from app.storage.sql import rows
from app.storage.sql.engine import Database, open_database
from app.storage.sql.schema import batches, calls, events, workspaces
from app.storage.sql.storage import SqlStorage
from bench.report import Figure
from bench.servers import API_KEY, Server, toolcrib
from tests.support.postgres import PostgresServer

DatabaseKind = Literal["sqlite", "postgres"]

OWNER = "bench"
CALLS_PER_BATCH = 10
BATCHES_AT_ONCE = 500
PAGE_AIM_MS = 50.0
CALL_AIM = 1.1
_RESULT = json.dumps(
    {"content": [{"type": "text", "text": "   1│ status: draft\n" * 8}], "details": {"bytes": 13}, "isError": False}
).encode()


def records(count: int, repeats: int, kinds: Sequence[DatabaseKind], data_dir: Path) -> Iterator[Figure]:
    """Put `count` calls into a database and measure it beside an empty one of the same kind, turn by turn."""
    for kind in kinds:
        yield from _of_kind(kind, count, repeats, data_dir)


def _of_kind(kind: DatabaseKind, count: int, repeats: int, data_dir: Path) -> Iterator[Figure]:
    with ExitStack() as stack:
        services = []
        for name in ("empty", "full"):
            directory = data_dir / f"records-{kind}-{name}"
            directory.mkdir()
            url = None if kind == "sqlite" else stack.enter_context(PostgresServer()).url
            target = directory / "toolcrib.db" if url is None else url
            storage = SqlStorage(target)
            storage.migrate()
            storage.close()
            if name == "full":
                started = time.perf_counter()
                sample = load(open_database(target), count)
                loaded = time.perf_counter() - started
            services.append(stack.enter_context(toolcrib(directory, database_url=url)))
        empty, full = (stack.enter_context(closing(_Client(service))) for service in services)
        pages = {name: _median_ms(full, path, repeats) for name, path in _pages(sample).items()}
        floor = _median_ms(empty, "/v1/calls", repeats)
        costs = list(_costs(empty, full, repeats * 10))
    slowest = max(pages, key=lambda name: pages[name])
    yield Figure(
        f"pages over {count:,} calls on {kind}, the slowest of {len(pages)}",
        f"{pages[slowest]:.1f} ms ({slowest})",
        f"a page of an empty database: {floor:.1f} ms; loaded in {loaded:.0f} s",
        f"median page {statistics.median(pages.values()):.1f} ms",
        f"<= {PAGE_AIM_MS:.0f} ms p50",
        pages[slowest] <= PAGE_AIM_MS,
    )
    before, after = (statistics.median(times) for times in zip(*costs, strict=True))
    yield Figure(
        f"a new call beside {count:,} others on {kind}",
        f"{after:.2f} ms",
        f"in an empty database: {before:.2f} ms",
        f"{after / before:.2f}x",
        f"<= {CALL_AIM}x",
        after / before <= CALL_AIM,
    )


class Sample:
    """A workspace, a batch and a call in the middle of what was loaded."""

    def __init__(self, workspace_id: str, batch_id: str, at: str) -> None:
        self.workspace_id = workspace_id
        self.batch_id = batch_id
        self.at = at


def _pages(sample: Sample) -> dict[str, str]:
    here = f"/v1/calls?workspace={sample.workspace_id}"
    return {
        "workspaces": "/v1/workspaces",
        "batches of a workspace": f"/v1/workspaces/{sample.workspace_id}/batches",
        "completed batches of a workspace": f"/v1/workspaces/{sample.workspace_id}/batches?status=completed",
        "calls": "/v1/calls",
        "calls of a workspace": here,
        "calls of a batch": f"/v1/calls?batch={sample.batch_id}",
        "calls of a tool": "/v1/calls?tool=read",
        "calls of a tool in a workspace": f"{here}&tool=bash",
        "failed calls": "/v1/calls?status=failed",
        "failed calls in a workspace": f"{here}&status=failed",
        "calls with an error": "/v1/calls?error=not_found",
        "calls about a path in a workspace": f"{here}&path=src/module_3.py",
        "calls about a path": "/v1/calls?path=src/module_3.py",
        "calls by a text": "/v1/calls?q=module_7",
        "calls by a text that is nowhere": "/v1/calls?q=nowhere",
        "calls by the caller's id": "/v1/calls?toolcall=call-5",
        "calls until a time": f"/v1/calls?until={sample.at}",
        "long calls": "/v1/calls?minduration=100000",
    }


# -- loading ----------------------------------------------------------------------------------------------------------


def load(database: Database, count: int) -> Sample:
    """Insert `count` ended calls, in batches of ten, of a hundredth as many workspaces (10,000 of a million)."""
    owners = [_workspace() for _ in range(max(1, count // 100))]
    sample: Sample | None = None
    total = count // CALLS_PER_BATCH
    with database.writer.begin() as connection:
        cursor = connection.connection.cursor()
        database.insert_rows(cursor, workspaces, [rows.workspace_row(workspace) for workspace in owners])
    for first in range(0, total, BATCHES_AT_ONCE):
        made = [_batch(owners[number % len(owners)].id) for number in range(first, min(total, first + BATCHES_AT_ONCE))]
        with database.writer.begin() as connection:
            cursor = connection.connection.cursor()
            database.insert_rows(cursor, batches, list(map(rows.batch_row, made)))
            database.insert_rows(cursor, calls, [_call_row(call) for batch in made for call in batch.calls])
            database.insert_rows(cursor, events, [rows.event_row(event) for batch in made for event in _events(batch)])
        if sample is None and first >= total // 2 - BATCHES_AT_ONCE:
            at = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(made[-1].created_at / 1000 + 1))
            sample = Sample(made[-1].workspace_id, made[-1].id, at)
    if database.file is None:
        with database.writer.begin() as connection:
            connection.exec_driver_sql("ANALYZE")
    database.reader.dispose()
    database.writer.dispose()
    assert sample is not None
    return sample


def _workspace() -> Workspace:
    workspace_id, at = new_id("ws"), now_ms()
    return Workspace(
        id=workspace_id,
        owner=OWNER,
        name=None,
        root=f"/nowhere/{workspace_id}",
        root_device=0,
        root_inode=0,
        root_uid=0,
        root_gid=0,
        managed=False,
        trusted=True,
        options=WorkspaceOptions(),
        metadata={},
        status=WorkspaceStatus.DELETED,
        created_at=at,
        last_used_at=at,
    )


def _batch(workspace_id: str) -> Batch:
    batch_id, at = new_id("batch"), now_ms()
    made = tuple(_call(workspace_id, batch_id, index, at) for index in range(CALLS_PER_BATCH))
    return Batch(
        id=batch_id,
        workspace_id=workspace_id,
        owner=OWNER,
        status=BatchStatus.COMPLETED,
        execution_mode="parallel",
        effective_mode="parallel",
        on_error="continue",
        on_disconnect="continue",
        timeout_ms=None,
        metadata={},
        has_errors=True,
        terminate=False,
        summary=Summary(CALLS_PER_BATCH, succeeded=CALLS_PER_BATCH - 1, failed=1),
        request_id="req-bench",
        created_at=at,
        started_at=at,
        finished_at=at,
        last_seq=2,
        calls=made,
    )


def _call(workspace_id: str, batch_id: str, index: int, at: int) -> CallRecord:
    failed = index == 0
    return CallRecord(
        id=new_id("call"),
        batch_id=batch_id,
        workspace_id=workspace_id,
        index=index,
        tool_call_id=f"call-{index}",
        tool_name="bash" if index % 3 == 0 else "read",
        arguments=b'{"path":"src/module_%d.py"}' % index,
        status=CallStatus.FAILED if failed else CallStatus.SUCCEEDED,
        result=_RESULT,
        error=CallError(ErrorCode.NOT_FOUND, "there is no such file") if failed else None,
        hooks=None,
        queued_at=at,
        started_at=at,
        finished_at=at,
        duration_ms=3,
        request_id="req-bench",
    )


def _call_row(call: CallRecord) -> tuple[Any, ...]:
    values = dict(zip((column.name for column in calls.columns), rows.call_row(call, OWNER), strict=True))
    path = f"src/module_{call.index}.py"
    values |= {"path": path.encode(), "summary": f"{call.tool_name} {path} 1│ status: draft".encode()}
    return tuple(values.values())


def _events(batch: Batch) -> list[StoredEvent]:
    at = batch.created_at
    return [
        StoredEvent(batch.id, 1, EventType.BATCH_START, None, at, b'{"type":"batch_start","seq":1}'),
        StoredEvent(batch.id, 2, EventType.BATCH_END, None, at, b'{"type":"batch_end","seq":2}'),
    ]


# -- asking -----------------------------------------------------------------------------------------------------------


def _costs(empty: "_Client", full: "_Client", rounds: int) -> Iterator[tuple[float, float]]:
    """Yield what a new call takes in both, each of them first in every other round."""
    for number in range(rounds):
        if number % 2:
            after = full.new_call_ms()
            yield empty.new_call_ms(), after
        else:
            yield empty.new_call_ms(), full.new_call_ms()


def _median_ms(client: "_Client", path: str, repeats: int) -> float:
    client.milliseconds(path)
    return statistics.median(client.milliseconds(path) for _ in range(repeats))


class _Client:
    """A workspace and a kept-alive connection."""

    def __init__(self, service: Server) -> None:
        self._connection = HTTPConnection("127.0.0.1", service.port, timeout=120)
        _, made = self._send("POST", "/v1/workspaces", {"files": {"a.txt": "status: draft"}})
        self._read = f"/v1/workspaces/{made['id']}/tools/read"

    def milliseconds(self, path: str) -> float:
        taken, answer = self._send("GET", path)
        if "data" not in answer:
            raise RuntimeError(f"{path} was not answered: {answer}")
        return taken

    def new_call_ms(self) -> float:
        taken, answer = self._send("POST", self._read, {"path": "a.txt"})
        if answer.get("status") != "succeeded":
            raise RuntimeError(f"the call did not succeed: {answer}")
        return taken

    def _send(self, method: str, path: str, body: Any = None) -> tuple[float, Any]:
        data = None if body is None else json.dumps(body)
        started = time.perf_counter()
        self._connection.request(method, path, data, {"authorization": f"Bearer {API_KEY}"})
        with self._connection.getresponse() as answer:
            content = answer.read()
        return (time.perf_counter() - started) * 1000, json.loads(content)

    def close(self) -> None:
        self._connection.close()
