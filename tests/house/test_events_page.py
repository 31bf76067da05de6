"""docs/events.md has every type of event and every member that a stream really carries."""

import re
from pathlib import Path

import pytest

from app.domain.events import EventType
from tests.support.server import Event, ServerThread, event_stream

PAGE = (Path(__file__).parents[2] / "docs" / "events.md").read_text()
ENVELOPE = {"type", "seq", "at", "batchId"}
OF_A_CALL = {"callId", "toolCallId", "toolName"}


def members(title: str) -> set[str]:
    """Return the members in the tables below a heading."""
    section = PAGE.partition(f"\n## {title}\n")[2].partition("\n## ")[0]
    first_cells = re.findall(r"^\| ([^|]+) \|", section, re.MULTILINE)
    return {name for cell in first_cells for name in re.findall(r"`(\w+)`", cell)}


def test_every_type_of_event_has_a_part_of_its_own():
    assert set(re.findall(r"^## ([a-z_]+)$", PAGE, re.MULTILINE)) == set(EventType)


def test_the_members_of_all_events_stand_at_the_top():
    assert members("What holds for all") == ENVELOPE | OF_A_CALL


@pytest.mark.parametrize("updates", ["delta", "snapshot"])
def test_what_a_stream_carries_stands_on_the_page(updates: str, tmp_path: Path):
    calls = [
        {"name": "read", "arguments": {"path": "x" * 9000}},
        {"name": "bash", "arguments": {"command": "head -c 4000 /dev/zero | tr '\\0' x"}},
        {"name": "write", "arguments": {"path": "a.txt", "content": "a a"}},
        {"name": "edit", "arguments": {"path": "a.txt", "edits": [{"oldText": "a", "newText": "b"}]}},
        {"name": "read", "arguments": {"path": "long.txt"}},
    ]
    options = {"bash": {"captureBytes": 1000}, "edit": {"multipleMatches": "first"}}
    with ServerThread(tmp_path / "data") as server, server.client() as client:
        made = client.post("/v1/workspaces", json={"options": options, "files": {"long.txt": f"{'é' * 99}\n" * 1900}})
        path = f"/v1/workspaces/{made.json()['id']}/batches?updates={updates}"
        with event_stream(client, "POST", path, json={"calls": calls}) as (_, stream):
            events = list(stream)
    assert {event.type for event in events} == set(EventType) - {EventType.RESYNC}
    assert [(event.type, sorted(unexplained(event))) for event in events if unexplained(event)] == []
    carried = {member for event in events for member in event.data}
    assert {"argsTruncated", "argsUrl", "resultTruncated", "resultUrl"} <= carried
    kinds = {event.data["kind"] for event in events if event.type == "tool_execution_update"}
    assert kinds == {updates, "partial"}
    assert all(f"`{kind}`" in PAGE for kind in kinds)


def unexplained(event: Event) -> set[str]:
    known = ENVELOPE | members(event.type)
    if event.type not in {"batch_start", "batch_end"}:
        known |= OF_A_CALL
    return event.data.keys() - known
