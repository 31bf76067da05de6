"""What must hold after a storm, whatever it was: looked for over HTTP, in the files, in /proc."""

# ruff: noqa: PTH208 - /proc, where names are numbers

import json
import os
import time
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any, Final

import httpx2

from app.sandbox.containment import TEMPORARY_PREFIX
from tests.support.chaos.load import APPENDED, EDITED, FAILS_WITH, LINE_BYTES, MARKER, WRITTEN, Intent, Load

SETTLE_SECONDS: Final = 60.0
REMAINS_SECONDS: Final = 5.0  # what sees that its service is gone goes, too
# What may become of a call in a storm. `no_space` and commands that fail come of full disks; `sandbox_unavailable` is for
# a command that was to be started by a service that ends.
_CODES: Final = {"interrupted", "cancelled", "skipped", "non_zero_exit", "no_space", "sandbox_unavailable"}
_FILES: Final = {"append": APPENDED, "append and fail": APPENDED, "edit": EDITED, "write": WRITTEN}


def problems_of_records(load: Load, client: httpx2.Client) -> list[str]:
    """Compare what clients were told with the records, the records with the events, and both with the files."""
    problems = list(load.problems)
    records: dict[str, dict[str, Any]] = {}
    for workspace in load.workspaces:
        for listed in _pages(client, f"/v1/workspaces/{workspace['id']}/batches"):
            key = listed["metadata"]["key"]
            if key in records:
                problems.append(f"{key}: twice in the records, {records[key]['id']} and {listed['id']}")
            records[key] = listed
    load.tally["batches in the records"] = len(records)

    until = time.monotonic() + SETTLE_SECONDS
    expected: dict[tuple[str, str, str], tuple[int, int]] = {}
    for intent in load.intents:
        listed = records.pop(intent.key, {"id": None})
        if intent.batch not in (None, listed["id"]):
            problems.append(f"{intent.key}: accepted as {intent.batch}, in the records {listed['id']}")
        if listed["id"] is None:
            load.tally["batches never accepted"] += 1
            continue
        batch = _ended(client, listed["id"], until)
        events = _events(client, listed["id"])
        told = [*_problems_of_calls(batch, intent), *_problems_of_events(batch, events, intent)]
        problems += [f"{intent.key} ({batch['id']}, {batch['status']}): {problem}" for problem in told]
        load.tally[f"batches {batch['status']}"] += 1
        started = {event["toolCallId"] for event in events if event["type"] == "tool_execution_start"}
        for call, kind, line in zip(batch["calls"], intent.kinds, intent.lines, strict=False):
            load.tally[f"calls {call['status']}{'' if call['error'] is None else ', ' + call['error']['code']}"] += 1
            bounds = _bounds(call, kind, started=call["toolCallId"] in started)
            expected[intent.workspace, _FILES[kind], line] = bounds
            load.tally["lines that may be there or not"] += bounds == (0, 1)
    problems += [f"{listed['id']}: nobody asked for it ({key})" for key, listed in records.items()]

    found: Counter[tuple[str, str, str]] = Counter()
    for workspace in load.workspaces:
        for file, lines in _lines(Path(workspace["root"]), problems).items():
            found.update((workspace["id"], file, line) for line in lines)
    load.tally["lines in the files"] = found.total()
    for place in sorted(expected.keys() | found.keys()):
        least, most = expected.get(place, (0, 0))
        if not least <= found[place] <= most:
            problems.append(f"{place}: {found[place]} times, not {least} to {most}")
    return problems


def problems_of_remains(name: str, directories: list[Path]) -> list[str]:
    """Return what a stopped service has left of its commands, whose text holds `name`, and of its data directories."""
    until = time.monotonic() + REMAINS_SECONDS
    while remains := _remains(name, directories):
        if time.monotonic() > until:
            break
        time.sleep(0.1)
    return remains


def _remains(name: str, directories: list[Path]) -> list[str]:
    return [
        *(f"a process is left: {shown}" for shown in _processes([name, *map(str, directories)])),
        *(f"a lock is left: {line}" for line in _locks(directories)),
        *(f"a temporary file is left: {path}" for top in directories for path in top.rglob(f"{TEMPORARY_PREFIX}*")),
    ]


def _problems_of_calls(batch: dict[str, Any], intent: Intent) -> list[str]:
    calls = batch["calls"]
    problems = []
    if [call["toolCallId"] for call in calls] != [call["id"] for call in intent.body["calls"]]:
        problems.append(f"its calls are {[call['toolCallId'] for call in calls]}")
    for call in calls:
        told = f"{call['toolCallId']} {call['status']}"
        if call["status"] not in {"succeeded", "failed", "cancelled", "skipped"} or call["finishedAt"] is None:
            problems.append(f"{told}: has not ended")
        elif call["result"] is None or call["result"]["isError"] != (call["status"] != "succeeded"):
            problems.append(f"{told}: its result is {call['result']}")
        elif call["error"] is not None and call["error"]["code"] not in _CODES:
            problems.append(f"{told}: {call['error']}")
    summary = Counter(call["status"] for call in calls)
    counted = {status: summary[status] for status in ("succeeded", "failed", "cancelled", "skipped")}
    if batch["summary"] != {"total": len(calls), **counted}:
        problems.append(f"its summary is {batch['summary']}")
    return problems


def _problems_of_events(batch: dict[str, Any], events: list[dict[str, Any]], intent: Intent) -> list[str]:
    problems = []
    numbers = [event["seq"] for event in events]
    if numbers != list(range(1, len(numbers) + 1)):
        problems.append(f"its events are {numbers}")
    if intent.followed is not None and intent.followed != numbers:
        problems.append(f"a follower saw {intent.followed} of {len(numbers)} events")
    kinds = [event["type"] for event in events]
    if (kinds[:1], kinds[-1:]) != (["batch_start"], ["batch_end"]):
        problems.append(f"its events go from {kinds[:1]} to {kinds[-1:]}")
    of_call: defaultdict[str, list[dict[str, Any]]] = defaultdict(list)
    for event in events[1:-1]:
        of_call[event.get("toolCallId", "")].append(event)
    for call in batch["calls"]:
        its = of_call.pop(call["toolCallId"], [])
        order = [event["type"].removeprefix("tool_execution_") for event in its]
        whole = ["start", *["update"] * (len(order) - 2), "end"]
        if order not in (["end"], whole) or its[-1]["status"] != call["status"]:
            problems.append(f"{call['toolCallId']} {call['status']}: its events are {order}")
    if of_call:
        problems.append(f"events of no call: {dict(of_call)}")
    return problems


def _bounds(call: dict[str, Any], kind: str, *, started: bool) -> tuple[int, int]:
    """Return how often at least and at most the line of a call may be in its file."""
    if not started:
        return 0, 0
    if call["status"] == "succeeded" or call["result"]["details"].get("exitCode") == FAILS_WITH:
        return 1, 1
    code = call["error"]["code"]
    if code == "sandbox_unavailable" or (kind in {"edit", "write"} and code in {"cancelled", "no_space"}):
        return 0, 0  # not started, or refused at the point where it takes effect
    return 0, 1


def _lines(root: Path, problems: list[str]) -> dict[str, list[str]]:
    """Return the whole lines of a workspace's files; what is no whole line is a problem."""
    edited = (root / EDITED).read_text().splitlines()
    if edited.pop() != MARKER:
        problems.append(f"{root / EDITED}: the last line is not the marker")
    written = []
    for path in (root / WRITTEN).glob("*"):
        written += (lines := path.read_text().splitlines())
        if [line.rstrip(".") for line in lines] != [path.name]:
            problems.append(f"{path}: holds {lines}")
    found = {APPENDED: (root / APPENDED).read_text().splitlines(), EDITED: edited, WRITTEN: written}
    for file, lines in found.items():
        problems += [f"{root / file}: {line!r} is no whole line" for line in lines if len(line) != LINE_BYTES - 1]
    return found


def _pages(client: httpx2.Client, path: str) -> list[dict[str, Any]]:
    listed: list[dict[str, Any]] = []
    cursor: dict[str, str] = {}
    while True:
        page = client.get(path, params={"limit": "200", **cursor}).raise_for_status().json()
        listed += page["data"]
        if page["nextCursor"] is None:
            return listed
        cursor = {"cursor": page["nextCursor"]}


def _ended(client: httpx2.Client, batch: str, until: float) -> dict[str, Any]:
    """Return a batch once it has ended, or as it is when the time is up."""
    while True:
        answer = client.get(f"/v1/batches/{batch}", params={"wait": "5"}).raise_for_status().json()
        if answer["finishedAt"] is not None or time.monotonic() > until:
            return answer


def _events(client: httpx2.Client, batch: str) -> list[dict[str, Any]]:
    """Return the events that are stored; of a batch that has not ended, those that come in a while."""
    events = []
    try:
        with client.stream(
            "GET", f"/v1/batches/{batch}/events", headers={"Accept": "application/x-ndjson"}, timeout=5
        ) as answer:
            events += [json.loads(line) for line in answer.iter_lines() if line]
    except httpx2.TransportError:
        pass
    return events


def _processes(marks: list[str]) -> list[str]:
    """Return the other processes that have one of these in their arguments or their environment."""
    found = []
    for number in os.listdir("/proc"):
        if not number.isdigit() or int(number) == os.getpid():
            continue
        try:
            arguments = Path(f"/proc/{number}/cmdline").read_bytes()
            environment = Path(f"/proc/{number}/environ").read_bytes()
        except OSError:
            continue
        if any(mark.encode() in arguments + environment for mark in marks):
            found.append(f"{number} {arguments!r}")
    return found


def _locks(directories: list[Path]) -> list[str]:
    """Return the lines of the kernel's list of locks that are about files below these directories."""
    files = set()
    for directory in directories:
        for path in directory.rglob("*"):
            status = path.lstat()
            files.add(f"{os.major(status.st_dev):02x}:{os.minor(status.st_dev):02x}:{status.st_ino}")
    return [line for line in Path("/proc/locks").read_text().splitlines() if files & set(line.split())]
