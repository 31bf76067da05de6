import json
from dataclasses import replace

import pytest

from app.api.wire import Budget, call_json, decode_cursor, encode_cursor, json_response
from app.domain.ids import new_id
from app.domain.tool_call import CallError, CallRecord, CallStatus
from app.errors import ErrorCode, InvalidCursor

CALL = CallRecord(
    id="call_01m8pk0mq7e71bgqe673033873",
    batch_id="batch_01m8pk0mq7e71bgqe673033873",
    workspace_id="ws_01m8pk0mq7e71bgqe673033873",
    index=2,
    tool_call_id="r1",
    tool_name="read",
    arguments=b'{"path":"\\u0000"}',
    status=CallStatus.FAILED,
    result=b'{"content":[],"details":{},"isError":true}',
    error=CallError(ErrorCode.NOT_FOUND, "x does not exist"),
    hooks=b'[{"name":"h","phase":"before","action":"none","reason":null,"durationMs":0}]',
    queued_at=1_767_323_045_006,
    started_at=1_767_323_045_999,
    finished_at=1_767_323_046_000,
    duration_ms=1,
    request_id="req_1",
    arguments_bytes=17,
    result_bytes=42,
)


def shown(call: CallRecord, budget: Budget | None = None) -> dict[str, object]:
    value: dict[str, object] = json.loads(bytes(json_response(call_json(call, budget)).body))
    return value


def test_a_call_is_shown_whole_with_what_is_stored_spliced_in() -> None:
    assert shown(CALL) == {
        "id": "call_01m8pk0mq7e71bgqe673033873",
        "batchId": "batch_01m8pk0mq7e71bgqe673033873",
        "workspaceId": "ws_01m8pk0mq7e71bgqe673033873",
        "index": 2,
        "toolCallId": "r1",
        "toolName": "read",
        "arguments": {"path": "\u0000"},
        "status": "failed",
        "result": {"content": [], "details": {}, "isError": True},
        "error": {"code": "not_found", "message": "x does not exist"},
        "hooks": [{"name": "h", "phase": "before", "action": "none", "reason": None, "durationMs": 0}],
        "queuedAt": "2026-01-02T03:04:05.006Z",
        "startedAt": "2026-01-02T03:04:05.999Z",
        "finishedAt": "2026-01-02T03:04:06.000Z",
        "durationMs": 1,
        "requestId": "req_1",
    }


def test_a_call_that_has_not_ended_has_no_result_and_nothing_is_cut() -> None:
    waiting = replace(
        CALL,
        status=CallStatus.QUEUED,
        result=None,
        error=None,
        hooks=None,
        started_at=None,
        finished_at=None,
        duration_ms=None,
        result_bytes=0,
    )
    value = shown(waiting, Budget())
    assert (value["result"], value["error"], value["hooks"], value["startedAt"]) == (None, None, [], None)
    assert not {"resultTruncated", "argsTruncated"} & set(value)


def test_what_goes_over_the_budget_has_its_url() -> None:
    budget = Budget(60)
    assert not {"resultTruncated", "argsTruncated"} & set(shown(CALL, budget))
    second = shown(CALL, budget)
    assert (second["result"], second["resultTruncated"], second["resultUrl"]) == (None, True, f"/v1/calls/{CALL.id}")
    assert (second["arguments"], second["argsTruncated"], second["argsUrl"]) == (None, True, f"/v1/calls/{CALL.id}")
    assert second["error"] == {"code": "not_found", "message": "x does not exist"}


def test_what_storage_left_out_has_its_url() -> None:
    value = shown(replace(CALL, arguments=b"", result=None), Budget())
    assert (value["resultTruncated"], value["argsTruncated"]) == (True, True)


def test_a_small_result_behind_a_large_one_is_still_inlined() -> None:
    budget = Budget(70)
    large = replace(CALL, result=b'"' + b"x" * 100 + b'"')
    assert shown(large, budget)["resultTruncated"] is True
    assert "resultTruncated" not in shown(replace(CALL, arguments=b"{}"), budget)


def test_a_cursor_is_opaque_and_comes_back_as_the_id() -> None:
    last_id = new_id("call")
    cursor = encode_cursor(last_id)
    assert last_id not in cursor
    assert decode_cursor(cursor, "call") == last_id
    assert decode_cursor(None, "call") is None


@pytest.mark.parametrize(
    "cursor", ["", "=", "ä", "AAAA", encode_cursor("ws_01h2xcejqtf2nbrexx3vqjhp41"), encode_cursor("call_1")]
)
def test_a_cursor_of_another_kind_is_refused(cursor: str) -> None:
    with pytest.raises(InvalidCursor):
        decode_cursor(cursor, "call")
