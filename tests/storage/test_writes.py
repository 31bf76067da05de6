"""Every write, on both databases: what it stores, what it refuses, and that applying it again changes nothing."""

from dataclasses import replace

import pytest

from app.domain import json_codec
from app.domain.audit import SERVICE, AuditAction, audit
from app.domain.batch import Batch, BatchStatus, Summary
from app.domain.events import EventType, OutputRow
from app.domain.ids import new_id
from app.domain.tool_call import CallError, CallStatus
from app.domain.workspace import Workspace, WorkspaceOptions, WorkspaceStatus
from app.errors import ErrorCode
from app.storage.base import (
    ApiKey,
    Append,
    Applied,
    BatchChange,
    CallChange,
    ClaimBatch,
    CreateKey,
    CreateWorkspace,
    DataError,
    Page,
    Refused,
    RequestCancel,
    RevokeKey,
    SetWorkspaceStatus,
    SubmitBatch,
    UpdateWorkspace,
    Write,
    WriteOutcome,
)
from app.storage.sql import rows
from app.storage.sql.schema import metadata
from app.storage.sql.storage import SqlStorage
from tests.support.records import ends, make_batch, make_event, make_workspace, starts, submit

APPLIED = Applied()


def one(storage: SqlStorage, write: Write) -> WriteOutcome:
    (outcome,) = storage.apply([write])
    return outcome


@pytest.fixture
def workspace(storage: SqlStorage) -> Workspace:
    made = make_workspace()
    assert one(storage, CreateWorkspace(made)) == APPLIED
    return made


@pytest.fixture
def batch(storage: SqlStorage, workspace: Workspace) -> Batch:
    made = make_batch(workspace.id, calls=2)
    assert one(storage, submit(made)) == APPLIED
    return made


# -- workspaces -------------------------------------------------------------------------------------------------------


def test_workspace_comes_back_as_it_was_stored(storage: SqlStorage) -> None:
    options = WorkspaceOptions.from_json({"read": {"maxLines": 5}, "bash": {"env": {"A": "ü"}}, "tools": ["read"]})
    made = make_workspace(
        name="nul \0 and \U0001f600",
        root="/srv/w\udcff",
        root_device=2**64 - 1,
        root_inode=2**63,
        root_uid=2**32 - 2,
        root_gid=2**32 - 2,
        managed=False,
        trusted=False,
        options=options,
        metadata={"deep": [{"nul": "\0"}], "big": 2**63},
        expires_at=2_000_000_000_000,
    )

    assert one(storage, CreateWorkspace(made)) == APPLIED

    assert storage.workspace(made.id) == made
    assert storage.workspace("ws_unknown") is None


def test_options_that_were_not_set_follow_the_defaults(storage: SqlStorage) -> None:
    made = make_workspace(options=WorkspaceOptions.from_json({"read": {"maxLines": 5}}))
    storage.apply([CreateWorkspace(made)])
    stored = storage.workspace(made.id)
    assert stored is not None
    assert stored.options.model_dump(exclude_unset=True) == {"read": {"max_lines": 5}}


@pytest.mark.parametrize(
    ("taken", "asked", "overlaps"),
    [
        ("/srv/ws", "/srv/ws", True),
        ("/srv/ws", "/srv/ws/inner/deep", True),
        ("/srv/ws/inner", "/srv/ws", True),
        ("/srv/ws", "/", True),
        ("/", "/srv/ws", True),
        ("/srv/ws", "/srv/ws-evil", False),
        ("/srv/ws-evil", "/srv/ws", False),
        ("/srv/ws", "/srv/ws0", False),
        ("/srv/ws", "/srv/w", False),
        ("/srv/ws", "/srv/wt", False),
        ("/srv/w%", "/srv/w_", False),
        ("/srv/\udcff", "/srv/\udcff/x", True),
    ],
)
def test_root_must_not_overlap_another(storage: SqlStorage, taken: str, asked: str, overlaps: bool) -> None:
    first, second = make_workspace(root=taken), make_workspace(root=asked)
    assert one(storage, CreateWorkspace(first)) == APPLIED

    assert one(storage, CreateWorkspace(second)) == (Refused("overlap") if overlaps else APPLIED)

    assert (storage.workspace(second.id) is None) is overlaps


def test_roots_of_one_group_must_not_overlap_each_other(storage: SqlStorage) -> None:
    outer, inner = make_workspace(root="/srv/a"), make_workspace(root="/srv/a/b")
    assert storage.apply([CreateWorkspace(outer), CreateWorkspace(inner)]) == [APPLIED, Refused("overlap")]


def test_root_of_a_deleted_workspace_is_free_and_of_one_being_deleted_is_not(storage: SqlStorage) -> None:
    first, second, third = (make_workspace(root="/srv/a") for _ in range(3))
    storage.apply([CreateWorkspace(first), SetWorkspaceStatus(first.id, WorkspaceStatus.DELETING)])
    assert one(storage, CreateWorkspace(second)) == Refused("overlap")

    freed = storage.apply([SetWorkspaceStatus(first.id, WorkspaceStatus.DELETED), CreateWorkspace(third)])

    assert freed == [APPLIED, APPLIED]


def test_root_longer_than_an_index_entry_is_a_data_error(storage: SqlStorage) -> None:
    with pytest.raises(DataError, match="2000 bytes"):
        one(storage, CreateWorkspace(make_workspace(root="/" + "r" * 2000)))


def test_update_sets_only_what_is_given(storage: SqlStorage, workspace: Workspace) -> None:
    given = replace(workspace, name="new", trusted=False, metadata={"a": 1}, expires_at=5)
    update = UpdateWorkspace(workspace.id, name="new", trusted=False, metadata={"a": 1}, expires_at=5)
    assert one(storage, update) == APPLIED
    assert storage.workspace(workspace.id) == given

    options = WorkspaceOptions.from_json({"maxReadLines": 3})
    cleared = UpdateWorkspace(workspace.id, options=options, clear_name=True, clear_expiry=True)
    assert one(storage, cleared) == APPLIED
    assert storage.workspace(workspace.id) == replace(given, options=options, name=None, expires_at=None)


def test_update_and_submit_are_refused_for_a_workspace_that_is_not_active(
    storage: SqlStorage, workspace: Workspace
) -> None:
    batch = make_batch(workspace.id)
    stray = make_batch("ws_unknown")
    assert storage.apply(
        [
            UpdateWorkspace("ws_unknown", name="x"),
            submit(stray),
            SetWorkspaceStatus("ws_unknown", WorkspaceStatus.DELETING),
            SetWorkspaceStatus(workspace.id, WorkspaceStatus.DELETING),
            UpdateWorkspace(workspace.id, name="x"),
            submit(batch),
        ]
    ) == [
        Refused("not_found"),
        Refused("not_found"),
        Refused("not_found"),
        APPLIED,
        Refused("gone"),
        Refused("gone"),
    ]
    assert storage.batch(batch.id) is None
    assert storage.batch(stray.id) is None
    assert storage.events(batch.id, after=0) == []


def test_workspace_status_never_goes_back(storage: SqlStorage, workspace: Workspace) -> None:
    def move(status: WorkspaceStatus) -> WriteOutcome:
        return one(storage, SetWorkspaceStatus(workspace.id, status))

    assert move(WorkspaceStatus.DELETING) == APPLIED
    assert move(WorkspaceStatus.DELETING) == APPLIED
    assert move(WorkspaceStatus.ACTIVE) == Refused("gone")
    assert move(WorkspaceStatus.EXPIRED) == APPLIED
    assert move(WorkspaceStatus.DELETING) == Refused("gone")
    assert storage.workspace(workspace.id) == replace(workspace, status=WorkspaceStatus.EXPIRED)


# -- batches and events -----------------------------------------------------------------------------------------------


def test_batch_comes_back_with_its_calls_and_first_event(storage: SqlStorage, workspace: Workspace) -> None:
    made = make_batch(
        workspace.id,
        calls=3,
        metadata={"agent": "a\0"},
        timeout_ms=600_000,
        on_error="stop",
        on_disconnect="cancel",
        execution_mode="sequential",
        call_tool_name="re\0ad " + "x" * 5000,
        call_arguments=json_codec.dump({"content": "\0" + "t" * 100}),
    )
    write = submit(made)

    assert one(storage, write) == APPLIED

    assert storage.batch(made.id) == made
    assert storage.batch(made.id, calls=False) == replace(made, calls=())
    assert storage.call(made.calls[1].id) == made.calls[1]
    assert storage.events(made.id, after=0) == [write.start]
    assert storage.last_seq(made.id) == (1, BatchStatus.QUEUED)


def test_submit_touches_its_workspace_and_never_backwards(storage: SqlStorage, workspace: Workspace) -> None:
    later = workspace.last_used_at + 5000
    storage.apply([submit(make_batch(workspace.id, created_at=later)), submit(make_batch(workspace.id, created_at=5))])
    storage.apply([submit(make_batch(workspace.id, created_at=later - 1))])
    assert storage.workspace(workspace.id) == replace(workspace, last_used_at=later)


def test_texts_of_ten_megabytes_come_back_whole(storage: SqlStorage, workspace: Workspace) -> None:
    arguments = json_codec.dump({"content": "ü\0" * 3_400_000})
    made = make_batch(workspace.id, call_arguments=arguments)
    result = json_codec.dump({"content": [{"type": "text", "text": "r" * 8_000_000}]})
    storage.apply([submit(made)])
    storage.apply([ends(made, 1, result)])

    stored = storage.call(made.calls[0].id)

    assert stored is not None
    assert (stored.arguments, stored.result) == (arguments, result)
    assert (stored.arguments_bytes, stored.result_bytes) == (len(arguments), len(result))


def test_append_stores_events_and_what_they_mean(storage: SqlStorage, batch: Batch) -> None:
    begun, ended = starts(batch), ends(batch, 3, failed=[1])
    assert storage.apply([begun, ended]) == [APPLIED, APPLIED]

    stored = storage.batch(batch.id)
    assert stored is not None
    assert stored == replace(
        batch,
        status=BatchStatus.COMPLETED,
        effective_mode="parallel",
        has_errors=True,
        summary=Summary(2, succeeded=1, failed=1),
        started_at=begun.batch.started_at if begun.batch else None,
        finished_at=ended.batch.finished_at if ended.batch else None,
        last_seq=6,
        calls=stored.calls,
    )
    assert stored.calls == tuple(
        replace(
            call,
            status=CallStatus.FAILED if call.index == 1 else CallStatus.SUCCEEDED,
            started_at=begun.calls[call.index].started_at,
            finished_at=ended.calls[call.index].finished_at,
            duration_ms=3,
            result=ended.calls[call.index].result,
            hooks=b"[]",
            error=CallError(ErrorCode.NOT_FOUND, "there is no such file") if call.index == 1 else None,
        )
        for call in batch.calls
    )
    assert storage.events(batch.id, after=1) == [*begun.events, *ended.events]
    assert storage.last_seq(batch.id) == (6, BatchStatus.COMPLETED)


def test_fields_that_are_none_are_left_as_they_are(storage: SqlStorage, batch: Batch) -> None:
    call = batch.calls[0]
    error = CallError(ErrorCode.CANCELLED, "nul \0")
    first = CallChange(call.id, CallStatus.RUNNING, 1, 2, 3, b'{"r":1}', error, b"[1]")
    storage.apply([Append(batch.id, 1, 1, [make_event(batch.id, 2)], calls=[first])])
    storage.apply(
        [
            Append(
                batch.id,
                1,
                2,
                [make_event(batch.id, 3)],
                calls=[CallChange(call.id, CallStatus.CANCELLED)],
                batch=BatchChange(BatchStatus.RUNNING),
            )
        ]
    )
    assert storage.call(call.id) == replace(
        call,
        status=CallStatus.CANCELLED,
        started_at=1,
        finished_at=2,
        duration_ms=3,
        result=b'{"r":1}',
        error=error,
        hooks=b"[1]",
    )
    assert storage.batch(batch.id, calls=False) == replace(batch, status=BatchStatus.RUNNING, last_seq=3, calls=())


@pytest.mark.parametrize(("epoch", "after_seq"), [(1, 0), (1, 2), (0, 1), (2, 1)])
def test_append_that_does_not_meet_epoch_and_seq_is_fenced(
    storage: SqlStorage, batch: Batch, epoch: int, after_seq: int
) -> None:
    before = storage.batch(batch.id)
    stale = replace(starts(replace(batch, epoch=epoch), after_seq), output=[])

    assert one(storage, stale) == Refused("fenced")

    assert storage.batch(batch.id) == before
    assert len(storage.events(batch.id, after=0)) == 1


def test_append_to_a_batch_that_is_not_there_is_fenced(storage: SqlStorage) -> None:
    assert one(storage, Append("batch_x", 1, 0, [make_event("batch_x", 1)])) == Refused("fenced")


def test_fenced_append_takes_the_later_ones_of_its_batch_along_and_no_others(
    storage: SqlStorage, workspace: Workspace, batch: Batch
) -> None:
    other = make_batch(workspace.id)
    outcomes = storage.apply(
        [
            submit(other),
            Append(batch.id, 1, 7, [make_event(batch.id, 8)]),
            Append(batch.id, 1, 1, [make_event(batch.id, 2)]),
            starts(other),
            ends(other, 2),
        ]
    )
    assert outcomes == [APPLIED, Refused("fenced"), Refused("fenced"), APPLIED, APPLIED]
    assert storage.last_seq(batch.id) == (1, BatchStatus.QUEUED)
    assert storage.last_seq(other.id) == (4, BatchStatus.COMPLETED)


@pytest.mark.parametrize("numbers", [[3], [2, 4], [1]])
def test_events_that_are_not_numbered_without_gaps_are_a_data_error(
    storage: SqlStorage, batch: Batch, numbers: list[int]
) -> None:
    with pytest.raises(DataError, match="without gaps"):
        one(storage, Append(batch.id, 1, 1, [make_event(batch.id, number) for number in numbers]))


def test_change_of_a_call_of_another_batch_is_a_data_error_that_keeps_nothing(
    storage: SqlStorage, workspace: Workspace, batch: Batch
) -> None:
    other = make_batch(workspace.id)
    stray = Append(batch.id, 1, 1, [make_event(batch.id, 2)], calls=[CallChange(other.calls[0].id, CallStatus.RUNNING)])
    with pytest.raises(DataError, match="does not have"):
        storage.apply([submit(other), stray])
    assert storage.batch(other.id) is None
    assert storage.last_seq(batch.id) == (1, BatchStatus.QUEUED)


@pytest.mark.parametrize("bad", ["surrogate", "integer", "reference"])
def test_group_with_one_bad_value_keeps_nothing_of_the_group(
    storage: SqlStorage, workspace: Workspace, bad: str
) -> None:
    good = make_batch(workspace.id)
    wrong = {
        "surrogate": make_batch(workspace.id, call_tool_name="\ud800"),
        "integer": make_batch(workspace.id, timeout_ms=2**70),
        "reference": make_batch(workspace.id, request_id=object()),
    }[bad]
    with pytest.raises(DataError):
        storage.apply([submit(good), SubmitBatch(wrong, make_event(wrong.id, 1))])
    assert storage.batch(good.id) is None
    assert one(storage, submit(good)) == APPLIED


def test_id_that_another_batch_has_is_a_data_error(storage: SqlStorage, workspace: Workspace, batch: Batch) -> None:
    with pytest.raises(DataError, match="another batch"):
        one(storage, SubmitBatch(replace(batch, created_at=batch.created_at + 1), make_event(batch.id, 1)))
    with pytest.raises(DataError, match="another workspace"):
        one(storage, CreateWorkspace(replace(workspace, root="/elsewhere")))


# -- claim and cancel -------------------------------------------------------------------------------------------------


def test_claim_raises_the_epoch_and_fences_the_one_before(storage: SqlStorage, batch: Batch) -> None:
    old = starts(batch)
    new = replace(starts(batch), epoch=2)

    assert storage.apply([ClaimBatch(batch.id, 1), old, new]) == [APPLIED, Refused("fenced"), Refused("fenced")]
    assert one(storage, new) == APPLIED

    stored = storage.batch(batch.id)
    assert stored is not None
    assert (stored.epoch, stored.last_seq) == (2, 3)


def test_only_one_of_two_claims_of_an_epoch_succeeds(storage: SqlStorage, batch: Batch) -> None:
    first, second = ClaimBatch(batch.id, 1), ClaimBatch(batch.id, 1)
    assert one(storage, first) == APPLIED
    assert one(storage, second) == Refused("fenced")
    assert one(storage, first) == APPLIED, "the claim whose reply was lost is still its own"
    assert one(storage, ClaimBatch("batch_x", 1)) == Refused("not_found")
    stored = storage.batch(batch.id)
    assert stored is not None
    assert stored.epoch == 2


def test_terminal_batch_is_neither_claimed_nor_cancelled(storage: SqlStorage, batch: Batch) -> None:
    storage.apply([ends(batch, 1)])
    assert (
        storage.apply(
            [
                ClaimBatch(batch.id, 1),
                RequestCancel(batch.id, None, 5),
                RequestCancel(batch.id, batch.calls[0].id, 5),
            ]
        )
        == [Refused("terminal")] * 3
    )


def test_wish_to_cancel_is_kept_and_the_first_one_stays(storage: SqlStorage, batch: Batch) -> None:
    first, second = (call.id for call in batch.calls)
    assert (
        storage.apply(
            [
                RequestCancel(batch.id, None, 10),
                RequestCancel(batch.id, None, 20),
                RequestCancel(batch.id, first, 11),
            ]
        )
        == [APPLIED] * 3
    )
    assert one(storage, RequestCancel(batch.id, None, 30)) == APPLIED
    assert one(storage, RequestCancel(batch.id, first, 31)) == APPLIED

    stored = storage.batch(batch.id)
    assert stored is not None
    assert stored.cancel_requested_at == 10
    assert [call.cancel_requested_at for call in stored.calls] == [11, None]
    assert (stored.epoch, stored.last_seq) == (1, 1), "a wish is no event"
    assert (
        storage.apply(
            [
                RequestCancel("batch_x", None, 1),
                RequestCancel(batch.id, "call_x", 1),
                RequestCancel("batch_x", second, 1),
            ]
        )
        == [Refused("not_found")] * 3
    )


def test_cancel_of_a_call_that_ends_in_the_same_group_is_terminal(storage: SqlStorage, batch: Batch) -> None:
    call = batch.calls[0]
    ended = Append(
        batch.id, 1, 1, [make_event(batch.id, 2)], calls=[CallChange(call.id, CallStatus.SUCCEEDED, result=b"{}")]
    )
    assert storage.apply([ended, RequestCancel(batch.id, call.id, 5)]) == [APPLIED, Refused("terminal")]


# -- a reply that was lost --------------------------------------------------------------------------------------------


def test_group_applied_again_after_its_reply_was_lost_changes_nothing(storage: SqlStorage) -> None:
    workspace = make_workspace()
    batch = make_batch(workspace.id, calls=2)
    output = OutputRow(4, 0, batch.calls[0].id, "stdout", 0, 0, b"out")
    key = ApiKey(new_id("key"), "k", "owner", b"h" * 32, ("read",), 1, "env")
    group: list[Write] = [
        CreateWorkspace(workspace),
        CreateKey(key),
        RevokeKey(key.id, 2),
        UpdateWorkspace(workspace.id, name="n"),
        submit(batch),
        starts(batch),
        RequestCancel(batch.id, batch.calls[0].id, 7),
        Append(batch.id, 1, 3, [make_event(batch.id, 4, EventType.TOOL_EXECUTION_UPDATE)], output=[output]),
        RequestCancel(batch.id, None, 8),
        ends(batch, 4),
        SetWorkspaceStatus(workspace.id, WorkspaceStatus.DELETING),
    ]
    assert storage.apply(group) == [APPLIED] * len(group)
    before = (storage.batch(batch.id), storage.events(batch.id, after=0), storage.workspace(workspace.id))

    again = storage.apply(group)

    assert again == [APPLIED, APPLIED, APPLIED, Refused("gone"), *[APPLIED] * 7]
    assert (storage.batch(batch.id), storage.events(batch.id, after=0), storage.workspace(workspace.id)) == before


def test_append_applied_again_is_told_from_one_of_another_owner(storage: SqlStorage, batch: Batch) -> None:
    mine = starts(batch)
    assert one(storage, mine) == APPLIED
    assert one(storage, mine) == APPLIED
    claim = ClaimBatch(batch.id, 1)
    assert one(storage, claim) == APPLIED
    assert storage.apply([mine, claim]) == [Refused("fenced"), APPLIED]
    assert len(storage.events(batch.id, after=0)) == 3


def test_group_that_was_stored_in_part_goes_on_where_it_stopped(storage: SqlStorage, batch: Batch) -> None:
    first, second = starts(batch), ends(batch, 3)
    assert one(storage, first) == APPLIED
    assert storage.apply([first, second]) == [APPLIED, APPLIED]
    assert [event.seq for event in storage.events(batch.id, after=0)] == [1, 2, 3, 4, 5, 6]


# -- keys -------------------------------------------------------------------------------------------------------------


def test_keys_come_back_as_they_were_stored(storage: SqlStorage) -> None:
    first = ApiKey(new_id("key"), "nul \0", "a", b"\0" * 32, ("read", "write"), 1, "env", expires_at=7)
    second = ApiKey(new_id("key"), "second", "b", b"\1" * 32, ("admin",), 2, first.id)
    assert storage.apply([CreateKey(first), CreateKey(second), CreateKey(first)]) == [APPLIED] * 3
    assert storage.keys() == [first, second]
    with pytest.raises(DataError, match="another key"):
        one(storage, CreateKey(replace(first, token_hash=b"\2" * 32)))
    with pytest.raises(DataError):
        one(storage, CreateKey(replace(first, id=new_id("key"))))


def test_a_revoked_key_stays_in_the_list_and_is_none_that_works(storage: SqlStorage) -> None:
    keys = [ApiKey(new_id("key"), "k", "o", bytes([number]) * 32, ("read",), 1, "env") for number in range(4)]
    storage.apply([CreateKey(key) for key in keys])

    outcomes = storage.apply([RevokeKey(keys[1].id, 5), RevokeKey(keys[1].id, 6), RevokeKey(new_id("key"), 5)])

    assert outcomes == [APPLIED, APPLIED, Refused("not_found")]
    assert one(storage, RevokeKey(keys[1].id, 7)) == APPLIED
    assert storage.keys() == [keys[0], keys[2], keys[3]]
    assert storage.revoked_keys([keys[0].id, keys[1].id, new_id("key")]) == [keys[1].id]
    assert storage.revoked_keys([key.id for key in keys if key is not keys[1]]) == []
    revoked = replace(keys[1], revoked_at=5)
    assert storage.keys_page(before=None, limit=2) == Page((keys[3], keys[2]), keys[2].id)
    assert storage.keys_page(before=keys[2].id, limit=2) == Page((revoked, keys[0]), None)


def test_a_key_made_and_revoked_in_one_group_is_revoked(storage: SqlStorage) -> None:
    key = ApiKey(new_id("key"), "k", "o", b"h" * 32, ("read",), 1, "env")
    assert storage.apply([CreateKey(key), RevokeKey(key.id, 9)]) == [APPLIED, APPLIED]
    assert storage.keys_page(before=None, limit=2) == Page((replace(key, revoked_at=9),), None)


def test_rows_are_as_wide_as_their_tables() -> None:
    workspace = make_workspace()
    batch = make_batch(workspace.id)
    made = {
        "workspaces": rows.workspace_row(workspace),
        "batches": rows.batch_row(batch),
        "calls": rows.call_row(batch.calls[0], "owner"),
        "large_arguments": rows.large_arguments_row(batch.calls[0]),
        "events": rows.event_row(make_event(batch.id, 1)),
        "call_output": rows.output_row(batch.id, OutputRow(1, 0, "c", "stdout", 0, 0, b"x")),
        "api_keys": rows.key_row(ApiKey("k", "n", "o", b"h", (), 1, "env")),
        "secrets": ("n", b"v", 1),
        "audit_events": rows.audit_row(audit(SERVICE, AuditAction.KEY_CREATED, "k")),
    }
    # The rows of the other two are written by name.
    assert {name: len(row) for name, row in made.items()} == {
        name: len(table.columns) for name, table in metadata.tables.items() if name not in {"nodes", "processes"}
    }


def test_empty_group_is_nothing(storage: SqlStorage) -> None:
    assert storage.apply([]) == []
