"""Every read, on both databases: order, pages, conditions, budgets, and the index behind each list."""

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import pytest
from sqlalchemy import Connection, Engine, event, text

from app.domain.batch import Batch, BatchStatus
from app.domain.events import EventType, OutputRow, OutputStream, StoredEvent
from app.domain.tool_call import CallError, CallStatus
from app.domain.workspace import Workspace, WorkspaceStatus
from app.errors import ErrorCode
from app.storage.base import (
    Append,
    Applied,
    BatchChange,
    CallChange,
    CallFilter,
    CreateWorkspace,
    OutputExtent,
    Page,
    SetWorkspaceStatus,
    UnfinishedBatch,
)
from app.storage.sql.storage import SqlStorage
from tests.support.records import ends, make_batch, make_event, make_workspace, starts, submit

APPLIED = Applied()


@pytest.fixture
def workspace(storage: SqlStorage) -> Workspace:
    made = make_workspace()
    storage.apply([CreateWorkspace(made)])
    return made


# -- lists ------------------------------------------------------------------------------------------------------------


def test_workspaces_are_listed_newest_first_and_inserts_do_not_move_a_cursor(storage: SqlStorage) -> None:
    made = [make_workspace(owner="a" if number % 2 else "b") for number in range(7)]
    storage.apply([CreateWorkspace(workspace) for workspace in made])
    storage.apply([SetWorkspaceStatus(made[2].id, WorkspaceStatus.DELETED)])
    made[2] = replace(made[2], status=WorkspaceStatus.DELETED)

    first = storage.workspaces(before=None, limit=3)
    storage.apply([CreateWorkspace(make_workspace())])
    second = storage.workspaces(before=first.next_before, limit=3)
    third = storage.workspaces(before=second.next_before, limit=3)

    assert first == Page((made[6], made[5], made[4]), made[4].id)
    assert second == Page((made[3], made[2], made[1]), made[1].id)
    assert third == Page((made[0],), None)
    assert storage.workspaces(before=None, limit=9, owner="a") == Page((made[5], made[3], made[1]), None)
    assert storage.workspaces_with_status(WorkspaceStatus.DELETED) == [made[2]]


def test_batches_of_a_workspace_are_listed_newest_first_and_by_status(
    storage: SqlStorage, workspace: Workspace
) -> None:
    other = make_workspace()
    storage.apply([CreateWorkspace(other)])
    made = [make_batch(workspace.id) for _ in range(5)]
    storage.apply([submit(batch) for batch in (*made, make_batch(other.id))])
    storage.apply([ends(made[1], 1), ends(made[3], 1)])

    def ids(page: Page[Batch]) -> tuple[list[str], str | None]:
        return [batch.id for batch in page.items], page.next_before

    def listed(status: BatchStatus | None, before: str | None) -> tuple[list[str], str | None]:
        return ids(storage.batches(workspace.id, status=status, before=before, limit=2))

    assert listed(None, None) == ([made[4].id, made[3].id], made[3].id)
    storage.apply([submit(make_batch(workspace.id))])
    assert listed(None, made[3].id) == ([made[2].id, made[1].id], made[1].id)
    assert listed(None, made[1].id) == ([made[0].id], None)
    assert listed(BatchStatus.COMPLETED, None) == ([made[3].id, made[1].id], None)
    assert listed(BatchStatus.RUNNING, None) == ([], None)


def test_unfinished_batches_say_whether_a_call_was_taken_up(storage: SqlStorage, workspace: Workspace) -> None:
    other = make_workspace()
    queued, begun, done, elsewhere = (make_batch(workspace.id) for _ in range(4))
    elsewhere = replace(elsewhere, workspace_id=other.id)
    storage.apply([CreateWorkspace(other), *map(submit, (queued, begun, done, elsewhere))])
    storage.apply([starts(begun), starts(done), ends(done, 2)])

    expected = [
        UnfinishedBatch(queued.id, workspace.id, started=False),
        UnfinishedBatch(begun.id, workspace.id, started=True, last_seq=2),
        UnfinishedBatch(elsewhere.id, other.id, started=False),
    ]
    assert storage.unfinished_batches() == expected
    assert storage.unfinished_batches(workspace.id) == expected[:2]


# -- calls ------------------------------------------------------------------------------------------------------------


def searched(append: Append, path: str, summary: str) -> Append:
    return replace(append, calls=[replace(change, path=path, summary=summary) for change in append.calls])


@pytest.fixture
def records(storage: SqlStorage, workspace: Workspace) -> list[Batch]:
    """Three batches of two calls: reads that succeeded, writes of which one failed, and queued ones."""
    reads = make_batch(workspace.id, calls=2, call_tool_call_id="mine", created_at=1)
    writes = make_batch(workspace.id, calls=2, call_tool_name="write", call_arguments=b'{"path":"a/b.txt"}')
    queued = make_batch(workspace.id, calls=2, call_tool_name="x" * 100 + "1")
    storage.apply([submit(reads), submit(writes), submit(queued)])
    storage.apply([starts(reads), searched(ends(reads, 3), "src/a.py", "read src/a.py status: draft")])
    storage.apply([starts(writes), searched(ends(writes, 3, failed=[0]), "src/ü.py", "write 100%_ü")])
    return [reads, writes, queued]


@pytest.mark.parametrize(
    ("condition", "expected"),
    [
        (CallFilter(), [(2, 1), (2, 0), (1, 1), (1, 0), (0, 1), (0, 0)]),
        (CallFilter(tool_name="write"), [(1, 1), (1, 0)]),
        (CallFilter(tool_name="x" * 100), []),
        (CallFilter(tool_name="x" * 100 + "1"), [(2, 1), (2, 0)]),
        (CallFilter(tool_name="writ"), []),
        (CallFilter(tool_call_id="mine"), [(0, 1), (0, 0)]),
        (CallFilter(status=CallStatus.QUEUED), [(2, 1), (2, 0)]),
        (CallFilter(status=CallStatus.SUCCEEDED), [(1, 1), (0, 1), (0, 0)]),
        (CallFilter(status=CallStatus.FAILED), [(1, 0)]),
        (CallFilter(error_code="not_found"), [(1, 0)]),
        (CallFilter(error_code="not_found", tool_name="read"), []),
        (CallFilter(tool_name="read", status=CallStatus.SUCCEEDED, tool_call_id="mine"), [(0, 1), (0, 0)]),
        (CallFilter(min_duration_ms=3), [(1, 1), (1, 0), (0, 1), (0, 0)]),
        (CallFilter(min_duration_ms=4), []),
        (CallFilter(path="src/ü.py"), [(1, 1), (1, 0)]),
        (CallFilter(path="src/"), []),
        (CallFilter(text="draft"), [(0, 1), (0, 0)]),
        (CallFilter(text="100%_ü"), [(1, 1), (1, 0)]),
        (CallFilter(text="%"), [(1, 1), (1, 0)]),
        (CallFilter(text="raft_"), []),
    ],
)
def test_calls_are_found_by_their_conditions(
    storage: SqlStorage, records: list[Batch], condition: CallFilter, expected: list[tuple[int, int]]
) -> None:
    page = storage.calls(condition, before=None, limit=50)
    assert [call.id for call in page.items] == [records[batch].calls[index].id for batch, index in expected]
    assert page.next_before is None


def test_calls_are_found_by_workspace_batch_owner_and_time(storage: SqlStorage, records: list[Batch]) -> None:
    def found(condition: CallFilter) -> list[str]:
        return [call.id for call in storage.calls(condition, before=None, limit=50).items]

    newest_first = [call.id for batch in reversed(records) for call in reversed(batch.calls)]
    times = [batch.calls[0].queued_at for batch in records]
    assert found(CallFilter(workspace_id=records[0].workspace_id)) == newest_first
    assert found(CallFilter(workspace_id="ws_other")) == []
    assert found(CallFilter(batch_id=records[1].id)) == newest_first[2:4]
    assert found(CallFilter(owner="owner")) == newest_first
    assert found(CallFilter(owner="somebody else")) == []
    assert found(CallFilter(since=times[0], until=times[2])) == newest_first
    assert found(CallFilter(since=times[2] + 1)) == []
    assert found(CallFilter(until=times[0] - 1)) == []
    assert found(CallFilter(batch_id=records[0].id, since=times[0], until=times[0])) == newest_first[4:]


def test_a_calls_page_is_the_whole_record(storage: SqlStorage, records: list[Batch]) -> None:
    (record,) = storage.calls(CallFilter(status=CallStatus.FAILED), before=None, limit=5).items
    assert record == storage.call(record.id)
    assert record.error == CallError(ErrorCode.NOT_FOUND, "there is no such file")


def test_page_of_calls_examines_a_bounded_number_of_rows_and_goes_on(storage: SqlStorage, workspace: Workspace) -> None:
    batches = [make_batch(workspace.id, calls=10, call_tool_name=f"tool{number}") for number in range(3)]
    storage.apply([submit(batch) for batch in batches])
    condition = CallFilter(workspace_id=workspace.id, tool_name="tool0")

    pages = list(walk(storage, condition, limit=4, examine=12))

    assert [len(page.items) for page in pages] == [0, 4, 4, 2]
    newest_first = [call.id for call in reversed(batches[0].calls)]
    assert [call.id for page in pages for call in page.items] == newest_first


def test_cursor_of_calls_survives_inserts(storage: SqlStorage, workspace: Workspace) -> None:
    batches = [make_batch(workspace.id, calls=5) for _ in range(3)]
    storage.apply([submit(batch) for batch in batches])
    seen = []
    for page in walk(storage, CallFilter(tool_name="read"), limit=4):
        seen += [call.id for call in page.items]
        storage.apply([submit(make_batch(workspace.id, calls=3))])
    assert seen == [call.id for batch in reversed(batches) for call in reversed(batch.calls)]


def walk(storage: SqlStorage, condition: CallFilter, *, limit: int, examine: int = 2000) -> Iterator[Page[Any]]:
    before: str | None = None
    for _ in range(100):
        page = storage.calls(condition, before=before, limit=limit, examine=examine)
        yield page
        before = page.next_before
        if before is None:
            return
    pytest.fail("the list does not end")


def test_budget_leaves_out_what_does_not_fit_and_says_how_large_it_is(
    storage: SqlStorage, workspace: Workspace
) -> None:
    batch = make_batch(workspace.id, calls=3, call_arguments=b'{"a":1}')
    storage.apply([submit(batch)])
    sizes = [1000, 5000, 10]
    results = [b'"' + b"r" * (size - 2) + b'"' for size in sizes]
    changes = [
        CallChange(call.id, CallStatus.SUCCEEDED, result=result)
        for call, result in zip(batch.calls, results, strict=True)
    ]
    storage.apply([Append(batch.id, 1, 1, [make_event(batch.id, 2)], calls=changes)])

    whole = storage.batch(batch.id)
    some = storage.batch(batch.id, inline=2000)
    least = storage.batch(batch.id, inline=0)
    page = storage.calls(CallFilter(batch_id=batch.id), before=None, limit=3, inline=2000)

    assert whole is not None
    assert some is not None
    assert least is not None
    assert [call.result for call in whole.calls] == results
    assert [call.result for call in some.calls] == [results[0], None, results[2]]
    assert [call.arguments for call in some.calls] == [b'{"a":1}'] * 3
    assert [(call.arguments, call.result) for call in least.calls] == [(b"", None)] * 3
    for calls in (whole.calls, some.calls, least.calls):
        assert [(call.arguments_bytes, call.result_bytes) for call in calls] == [(7, size) for size in sizes]
    assert [call.result for call in page.items] == [results[2], None, results[0]]
    assert replace(some, calls=()) == replace(whole, calls=())


# -- events and output ------------------------------------------------------------------------------------------------


def write_output(storage: SqlStorage, batch: Batch, pieces: Sequence[Sequence[tuple[OutputStream, bytes]]]) -> None:
    """Store one update per entry of `pieces`, all of the batch's first call."""
    call_id = batch.calls[0].id
    offsets: dict[str, int] = {}
    combined = 0
    events, output = [], []
    for number, parts in enumerate(pieces):
        seq = 2 + number
        events.append(make_event(batch.id, seq, EventType.TOOL_EXECUTION_UPDATE, call_id, {"kind": "delta"}))
        for part, (stream, data) in enumerate(parts):
            output.append(OutputRow(seq, part, call_id, stream, offsets.get(stream, 0), combined, data))
            offsets[stream] = offsets.get(stream, 0) + len(data)
            combined += len(data)
    assert storage.apply([Append(batch.id, 1, 1, events, output=output)]) == [APPLIED]


@pytest.fixture
def batch(storage: SqlStorage, workspace: Workspace) -> Batch:
    made = make_batch(workspace.id, calls=2)
    storage.apply([submit(made)])
    return made


def test_events_come_in_order_joined_with_their_output(storage: SqlStorage, batch: Batch) -> None:
    call_id = batch.calls[0].id
    write_output(storage, batch, [[("stdout", b"a\0"), ("stderr", b"\xff")], [], [("stdout", b"b")]])
    output = {
        2: (OutputRow(2, 0, call_id, "stdout", 0, 0, b"a\0"), OutputRow(2, 1, call_id, "stderr", 0, 2, b"\xff")),
        4: (OutputRow(4, 0, call_id, "stdout", 2, 3, b"b"),),
    }
    found = storage.events(batch.id, after=1)
    assert [(event.seq, event.output) for event in found] == [(2, output[2]), (3, ()), (4, output[4])]
    assert storage.events(batch.id, after=3) == found[2:]
    assert storage.events(batch.id, after=1, limit=2) == found[:2]
    assert storage.events(batch.id, after=4) == []
    assert storage.events("batch_x", after=0) == []


def test_pages_of_events_hold_each_event_once(storage: SqlStorage, batch: Batch) -> None:
    storage.apply([Append(batch.id, 1, 1, [make_event(batch.id, seq) for seq in range(2, 702)])])
    seen: list[StoredEvent] = []
    sizes = []
    while page := storage.events(batch.id, after=seen[-1].seq if seen else 0, limit=256):
        sizes.append(len(page))
        seen += page
    assert sizes == [256, 256, 189]
    assert [event.seq for event in seen] == list(range(1, 702))


def test_page_of_large_events_is_bounded_in_bytes(storage: SqlStorage, batch: Batch) -> None:
    large = {"result": "r" * 250_000}
    storage.apply([Append(batch.id, 1, 1, [make_event(batch.id, seq, data=large) for seq in range(2, 202)])])
    page = storage.events(batch.id, after=0, limit=256)
    assert len(page) == 16
    assert [event.seq for event in storage.events(batch.id, after=16, limit=256)] == list(range(17, 33))


STREAMS: list[list[tuple[OutputStream, bytes]]] = [
    [("stdout", b"0123"), ("stderr", b"abc")],
    [("stderr", b"def")],
    [("stdout", b"456789"), ("stderr", b"g"), ("stdout", b"XY")],
]


@pytest.mark.parametrize(
    ("stream", "whole"),
    [(None, b"0123abcdef456789gXY"), ("stdout", b"0123456789XY"), ("stderr", b"abcdefg"), ("text", b"")],
)
def test_output_is_read_per_stream_and_combined_in_any_range(
    storage: SqlStorage, batch: Batch, stream: OutputStream | None, whole: bytes
) -> None:
    write_output(storage, batch, STREAMS)
    call_id = batch.calls[0].id
    assert storage.output_extent(call_id, stream) == OutputExtent(len(whole))
    for start in range(len(whole) + 2):
        for end in range(start, len(whole) + 3):
            got = b"".join(storage.output(call_id, stream, start=start, end=end))
            assert got == whole[start:end], (start, end)
    assert storage.output_extent(batch.calls[1].id, stream) == OutputExtent(0)
    assert list(storage.output(batch.calls[1].id, stream, start=0, end=10)) == []


def test_large_output_comes_in_pieces_of_at_most_a_mebibyte(storage: SqlStorage, batch: Batch) -> None:
    pieces: list[list[tuple[OutputStream, bytes]]] = [
        [("stdout", bytes([number % 251]) * 16384)] if number % 7 else [("stderr", b"e" * 100)] for number in range(300)
    ]
    pieces.append([("stdout", b"z" * 3_000_000)])
    write_output(storage, batch, pieces)
    whole = b"".join(data for piece in pieces for stream, data in piece if stream == "stdout")
    call_id = batch.calls[0].id

    got = list(storage.output(call_id, "stdout", start=5, end=len(whole) - 5))

    assert max(map(len, got)) <= 1024 * 1024
    assert b"".join(got) == whole[5:-5]
    assert storage.output_extent(call_id, "stdout") == OutputExtent(len(whole))


# -- indexes ----------------------------------------------------------------------------------------------------------


def plans(storage: SqlStorage, read: Callable[[SqlStorage], object]) -> str:
    """Return how the database runs the statements of a read."""
    return explained(storage, storage._database.reader, read)


def explained(storage: SqlStorage, engine: Engine, use: Callable[[SqlStorage], object]) -> str:
    sent: list[tuple[str, Any]] = []

    def note(_connection: Connection, _cursor: Any, statement: str, parameters: Any, *_: Any) -> None:
        sent.append((statement, parameters))

    event.listen(engine, "before_cursor_execute", note)
    try:
        use(storage)
    finally:
        event.remove(engine, "before_cursor_execute", note)
    found = []
    with engine.connect() as connection:
        sqlite = connection.dialect.name == "sqlite"
        if not sqlite:
            # Whether an index can be used, not whether these few rows are worth one.
            connection.execute(text("SET enable_seqscan = off"))
            connection.execute(text("SET enable_bitmapscan = off"))
        for statement, parameters in sent:
            lines = connection.exec_driver_sql(
                ("EXPLAIN QUERY PLAN " if sqlite else "EXPLAIN ") + statement, parameters
            )
            found.append("\n".join(str(row[-1]) for row in lines))
    return "\n--\n".join(found)


LISTS: dict[str, tuple[Callable[[SqlStorage], object], str]] = {
    "workspaces": (lambda s: s.workspaces(before="ws_z", limit=5), "workspaces"),
    "workspaces of an owner": (lambda s: s.workspaces(before=None, limit=5, owner="o"), "ix_workspaces_owner"),
    "batches": (lambda s: s.batches("ws", status=None, before="batch_z", limit=5), "ix_batches_workspace"),
    "batches by status": (
        lambda s: s.batches("ws", status=BatchStatus.COMPLETED, before="batch_z", limit=5),
        "ix_batches_workspace_status",
    ),
    "unfinished batches": (lambda s: s.unfinished_batches(), "ix_batches_unfinished"),
    "calls": (lambda s: s.calls(CallFilter(), before="call_z", limit=5), "calls"),
    "calls of a workspace": (
        lambda s: s.calls(CallFilter(workspace_id="ws"), before="call_z", limit=5),
        "ix_calls_workspace",
    ),
    "calls of an owner": (lambda s: s.calls(CallFilter(owner="o"), before="call_z", limit=5), "ix_calls_owner"),
    "calls about a path": (
        lambda s: s.calls(CallFilter(workspace_id="ws", path="a/b.txt"), before="call_z", limit=5),
        "ix_calls_path",
    ),
    "calls by the caller's id": (
        lambda s: s.calls(CallFilter(tool_call_id="x"), before="call_z", limit=5),
        "ix_calls_tool_call",
    ),
    "calls by tool": (lambda s: s.calls(CallFilter(tool_name="read"), before="call_z", limit=5), "ix_calls_tool"),
    "calls by status": (
        lambda s: s.calls(CallFilter(status=CallStatus.FAILED), before="call_z", limit=5),
        "ix_calls_status",
    ),
    "calls by error": (lambda s: s.calls(CallFilter(error_code="timeout"), before="call_z", limit=5), "ix_calls_error"),
    "events": (lambda s: s.events("batch", after=5), "events"),
    "output": (lambda s: list(s.output("call", "stdout", start=5, end=9)), "ix_call_output_call"),
    "output extent": (lambda s: s.output_extent("call", "stderr"), "ix_call_output_call"),
}


@pytest.mark.parametrize("name", LISTS)
def test_list_walks_its_index_in_order(storage: SqlStorage, name: str) -> None:
    read, index = LISTS[name]

    plan = plans(storage, read)

    assert index in plan
    # SQLite says SCAN of a table without USING when it reads all of it, Postgres Seq Scan; neither may sort.
    assert not re.search(r"SCAN (workspaces|batches|calls|events|call_output)(?! USING)|Seq Scan", plan), plan
    assert not re.search(r"TEMP B-TREE|Sort", plan), plan


def test_new_root_is_compared_through_the_index(storage: SqlStorage) -> None:
    plan = explained(
        storage, storage._database.writer, lambda s: s.apply([CreateWorkspace(make_workspace(root="/srv/a/b"))])
    )
    searches = re.findall(
        r"(?:SEARCH workspaces|Scan) .*?ux_workspaces_open_root|Scan using ux_workspaces_open_root", plan
    )
    assert len(searches) == 2, plan
    assert not re.search(r"SCAN workspaces|Seq Scan", plan), plan


def test_open_workspaces_are_found_without_the_gone_ones(storage: SqlStorage) -> None:
    plan = plans(storage, lambda s: s.workspaces_with_status(WorkspaceStatus.DELETING))
    assert "ux_workspaces_open_root" in plan, plan


NARROWER = (
    CallFilter(tool_name="read"),
    CallFilter(status=CallStatus.FAILED),
    CallFilter(status=CallStatus.SUCCEEDED),
    CallFilter(error_code="timeout"),
    CallFilter(since=1, until=2),
    CallFilter(min_duration_ms=5),
    CallFilter(text="x"),
)


@pytest.mark.parametrize(
    ("condition", "index"),
    [
        (CallFilter(batch_id="batch_x"), "ux_calls_batch"),
        (CallFilter(workspace_id="ws", text="x"), "ix_calls_workspace"),
        *((replace(condition, workspace_id="ws"), "ix_calls_workspace") for condition in NARROWER),
        *((replace(condition, owner="o"), "ix_calls_") for condition in NARROWER),
    ],
)
def test_calls_that_have_to_be_sorted_or_looked_through_are_few(
    storage: SqlStorage, condition: CallFilter, index: str
) -> None:
    plan = plans(storage, lambda s: s.calls(condition, before="call_z", limit=5))
    assert index in plan, plan
    # A condition that is looked at row by row leads nowhere else.
    assert len(set(re.findall(r"[iu]x_calls_\w+", plan))) == 1, plan
    assert not re.search(r"SCAN calls(?! USING)|Seq Scan", plan), plan


def test_batch_that_is_read_with_its_calls_is_one_snapshot(storage: SqlStorage, workspace: Workspace) -> None:
    batch = make_batch(workspace.id, calls=2)
    storage.apply([submit(batch)])
    engine = storage._database.reader
    done: list[Any] = []

    def end_between(_connection: Connection, _cursor: Any, statement: str, *_: Any) -> None:
        if "FROM calls" in statement and not done:
            done.append(storage.apply([starts(batch), ends(batch, 3)]))

    event.listen(engine, "before_cursor_execute", end_between)
    try:
        seen = storage.batch(batch.id)
    finally:
        event.remove(engine, "before_cursor_execute", end_between)

    assert done == [[APPLIED, APPLIED]]
    assert seen == batch
    after = storage.batch(batch.id)
    assert after is not None
    assert after.status is BatchStatus.COMPLETED


def test_status_of_the_batch_follows_the_events(storage: SqlStorage, batch: Batch) -> None:
    assert storage.last_seq("batch_x") is None
    storage.apply(
        [Append(batch.id, 1, 1, [make_event(batch.id, 2)], batch=BatchChange(BatchStatus.RUNNING, started_at=5))]
    )
    assert storage.last_seq(batch.id) == (2, BatchStatus.RUNNING)
