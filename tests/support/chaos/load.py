"""What clients ask of the service while it suffers: batches that put lines into files, each line once in all."""

import json
import random
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Final

import httpx2

from tests.support.chaos.fleet import Fleet
from tests.support.server import KEY, WAIT_SECONDS

LINE_BYTES: Final = 64  # divides a page, so a line is written whole or not at all when there is no room
MARKER: Final = "end of file"
APPENDED: Final = "appended.txt"
EDITED: Final = "edited.txt"
WRITTEN: Final = "written"
KINDS: Final = ("append", "append and fail", "edit", "write")
FAILS_WITH: Final = 3
ATTEMPTS: Final = 20
GO_AWAY: Final = frozenset({429, 503, 507})


@dataclass
class Intent:
    """A batch that a client wants once, whatever becomes of its requests. Call number n puts the line `lines[n]`."""

    key: str
    workspace: str
    lines: list[str]
    kinds: list[str]
    body: dict[str, Any]
    batch: str | None = None
    given_up: bool = False
    followed: list[int] | None = None


@dataclass
class Load:
    """Clients in threads, each with requests drawn from a seed; `problems` is what no client should ever see."""

    fleet: Fleet
    workspaces: list[dict[str, Any]]
    name: str
    seed: int
    clients: int
    intents: list[Intent] = field(default_factory=list)
    tally: Counter[str] = field(default_factory=Counter)
    problems: list[str] = field(default_factory=list)
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _enough: threading.Event = field(default_factory=threading.Event)
    _threads: list[threading.Thread] = field(default_factory=list)

    def start(self) -> None:
        for number in range(self.clients):
            thread = threading.Thread(target=self._guarded, args=(random.Random(f"{self.seed}/{number}"), number))
            self._threads.append(thread)
            thread.start()

    def stop(self) -> None:
        """Let every client end what it is at; the service has to be well again."""
        self._enough.set()
        for thread in self._threads:
            thread.join(WAIT_SECONDS * 4)
            if thread.is_alive():
                self.problems.append(f"{thread.name} did not come back")

    def _guarded(self, draw: random.Random, number: int) -> None:
        try:
            self._client(draw, number)
        except Exception as error:  # noqa: BLE001 - told with the rest
            self.problems.append(f"client {number} broke: {error!r}")

    def _client(self, draw: random.Random, number: int) -> None:
        asked = 0
        while not self._enough.is_set():
            asked += 1
            intent = self._draw(draw, f"{self.name}-{number}-{asked}")
            with self._lock:
                self.intents.append(intent)
            mode = draw.choice(("answer", "wait", "stream", "follow"))
            self.post(intent, draw, "wait=5" if mode == "wait" else "", stream=mode == "stream")
            if intent.batch is not None and draw.random() < 0.1:
                self._ask(draw, lambda client, path: client.post(f"{path}/cancel"), f"/v1/batches/{intent.batch}")
                self.tally["cancels"] += 1
            if intent.batch is not None and mode == "follow":
                intent.followed = self._follow(draw, intent.batch)
            self._enough.wait(draw.uniform(0, 0.2))

    def _draw(self, draw: random.Random, key: str) -> Intent:
        workspace = draw.choice(self.workspaces)["id"]
        kinds = draw.choices(KINDS, weights=(5, 1, 3, 2), k=draw.choice((1, 1, 2, 3, 5)))
        lines = [f"{key}-{number}".ljust(LINE_BYTES - 1, ".") for number in range(len(kinds))]
        calls = [
            {"id": f"c{number}", **_call(kind, lines[number], draw.choice((0, 0, 0.05, 0.5)))}
            for number, kind in enumerate(kinds)
        ]
        return Intent(key, workspace, lines, kinds, {"calls": calls, "metadata": {"key": key}})

    def post(self, intent: Intent, draw: random.Random, query: str = "", *, stream: bool = False) -> None:
        """Post a batch until it is accepted, then note its id; give up after some attempts."""
        headers = {"Idempotency-Key": intent.key}
        if stream:
            headers["Accept"] = "application/x-ndjson"

        def ask(client: httpx2.Client, path: str) -> httpx2.Response:
            return client.post(f"{path}?{query}", json=intent.body, headers=headers)

        answer = self._ask(draw, ask, f"/v1/workspaces/{intent.workspace}/batches")
        if answer is None:
            intent.given_up = True
            self.tally["posts given up"] += 1
            return
        if answer.status_code not in (200, 202):
            self.problems.append(f"POST of {intent.key}: {answer.status_code} {answer.text[:500]}")
            return
        intent.batch = answer.headers["location"].rpartition("/")[2]
        self.tally["batches accepted"] += 1
        if "idempotent-replayed" in answer.headers:
            self.tally["batches found by their key"] += 1

    def _ask(
        self, draw: random.Random, ask: Callable[[httpx2.Client, str], httpx2.Response], path: str
    ) -> httpx2.Response | None:
        """Send a request, to another process each time, until one answers and does not tell to come back later."""
        for _ in range(ATTEMPTS):
            try:
                with _client(draw.choice(self.fleet.urls())) as client:
                    answer = ask(client, path)
            except httpx2.TransportError:
                self.tally["requests without an answer"] += 1
            else:
                if answer.status_code not in GO_AWAY:
                    return answer
                self.tally[f"answers {answer.status_code}"] += 1
            if self._enough.wait(draw.uniform(0.1, 0.6)):
                return None
        return None

    def _follow(self, draw: random.Random, batch: str) -> list[int]:
        """Read a batch's events to the end, over as many connections as it takes, and return their numbers."""
        seen: list[int] = []
        until = time.monotonic() + WAIT_SECONDS * 3
        while time.monotonic() < until:
            try:
                with (
                    _client(draw.choice(self.fleet.urls())) as client,
                    client.stream(
                        "GET", f"/v1/batches/{batch}/events", params={"after": len(seen)}, headers=_LINES
                    ) as answer,
                ):
                    if answer.status_code not in (200, 204, *GO_AWAY):
                        self.problems.append(
                            f"events of {batch} after {len(seen)}: {answer.status_code} {answer.read()!r}"
                        )
                        return seen
                    for line in answer.iter_lines() if answer.status_code == 200 else ():
                        if line:
                            event = json.loads(line)
                            seen.append(event["seq"])
                            if event["type"] == "batch_end":
                                return seen
            except (httpx2.TransportError, ValueError):
                self.tally["streams cut"] += 1  # also in the middle of a line
            time.sleep(draw.uniform(0.05, 0.3))
        self.problems.append(f"events of {batch}: no end after {len(seen)}")
        return seen


_LINES: Final = {"Accept": "application/x-ndjson"}


def _client(url: str) -> httpx2.Client:
    return httpx2.Client(
        base_url=url, headers={"Authorization": f"Bearer {KEY}"}, timeout=WAIT_SECONDS, trust_env=False
    )


def _call(kind: str, line: str, pause: float) -> dict[str, Any]:
    if kind == "edit":
        edits = [{"oldText": MARKER, "newText": f"{line}\n{MARKER}"}]
        return {"name": "edit", "arguments": {"path": EDITED, "edits": edits}}
    if kind == "write":
        arguments = {"path": f"{WRITTEN}/{line.rstrip('.')}", "content": f"{line}\n", "createOnly": True}
        return {"name": "write", "arguments": arguments}
    command = f"echo {line} >> {APPENDED}"
    if pause:
        command = f"sleep {pause}; {command}; sleep {pause}"
    if kind == "append and fail":
        command = f"set -e; {command}; exit {FAILS_WITH}"
    return {"name": "bash", "arguments": {"command": command}}
