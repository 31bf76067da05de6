"""No descendant survives, round after round, in a real service of each tier: time-out, cancel, disconnect, stop, kill.

A round is a command with one of each awkward descendant (`tests.support.awkward_descendants`), and one with the
descendant that forks and exits all the time, which leaves the others no processor. It counts only when all of them were
up. `TOOLCRIB_TEST_ROUNDS` is how many there are on time-out and on cancel; `make soak` has it 200.
"""

import os
import shlex
import shutil
import signal
import sys
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2
import pytest

from app.sandbox.base import Tier
from tests.support import awkward_descendants
from tests.support.processes import living
from tests.support.sandbox_tiers import READABLE, TIERS, require_tier
from tests.support.server import KEY, ServerProcess, eventually

ROUNDS = int(os.environ.get("TOOLCRIB_TEST_ROUNDS", "10"))
AT_ONCE = 5
UP_SECONDS = 120.0
PYTHON = shutil.which("python3", path="/usr/local/bin:/usr/bin") or sys.executable
"""One that commands can start, whoever they run as."""

KINDS = sorted(awkward_descendants.KINDS)
CHASER = ["forks_and_exits"]
OTHERS = [kind for kind in KINDS if kind not in CHASER]


class Rounds:
    """Commands that leave everything behind, in a workspace of a service."""

    def __init__(self, client: httpx2.Client) -> None:
        self.mark = f"mark-{uuid.uuid4().hex}"
        self.client = client
        options = {"bash": {"executionMode": "parallel", "guard": "off"}}
        script = Path(awkward_descendants.__file__).read_text()
        made = client.post("/v1/workspaces", json={"options": options, "files": {"awkward.py": script}}).json()
        self.place = f"/v1/workspaces/{made['id']}"
        self._root = Path(made["root"])
        self._number = 0

    def calls(self, count: int, kinds: list[str], **arguments: Any) -> tuple[list[Path], list[dict[str, Any]]]:
        """Return so many calls and the directory that each works in."""
        directories = []
        made = []
        for _ in range(count):
            self._number += 1
            directories.append(self._root / f"r{self._number}")
            words = [PYTHON, "-I", "-S", "../awkward.py", self.mark, *kinds, "--", "sleep"]
            command = f"mkdir r{self._number} && cd r{self._number} && exec {shlex.join(words)}"
            made.append({"name": "bash", "arguments": {"command": command, **arguments}})
        return directories, made

    def post(self, calls: list[dict[str, Any]], **fields: Any) -> dict[str, Any]:
        answer = self.client.post(f"{self.place}/batches", json={"calls": calls, **fields})
        assert answer.status_code == 202, answer.text
        batch: dict[str, Any] = answer.json()
        return batch

    def ended(self, batch_id: str) -> list[dict[str, Any]]:
        until = time.monotonic() + UP_SECONDS
        while (batch := self.client.get(f"/v1/batches/{batch_id}?wait=10").json())["status"] in {"queued", "running"}:
            assert time.monotonic() < until
        calls: list[dict[str, Any]] = batch["calls"]
        return calls

    def wait_until_up(self, directories: list[Path], kinds: list[str]) -> None:
        eventually(lambda: all(is_up(directory, kinds) for directory in directories), UP_SECONDS)


def is_up(directory: Path, kinds: list[str]) -> bool:
    return len(list(directory.glob("*.up"))) == len(kinds)


@pytest.fixture(params=TIERS)
def server(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[ServerProcess]:
    tier: Tier = request.param
    require_tier(tier, tmp_path)
    environment = {
        "TOOLCRIB_API_KEY": KEY,
        "TOOLCRIB_SANDBOX": tier,
        "TOOLCRIB_SANDBOX_READABLE": os.pathsep.join(map(str, READABLE)),
    }
    with ServerProcess(tmp_path / "data", environment) as started:
        yield started


def test_no_descendant_survives_a_time_out_a_cancel_a_disconnect_and_a_stop(server: ServerProcess) -> None:
    with server.client() as client:
        rounds = Rounds(client)
        tally = {
            "time-out": min(time_outs(rounds, OTHERS), time_outs(rounds, CHASER)),
            "cancel": min(cancels(rounds, OTHERS), cancels(rounds, CHASER)),
            "disconnect": disconnects(rounds),
        }
        directories, calls = rounds.calls(3, KINDS)
        rounds.post(calls)
        rounds.wait_until_up(directories, KINDS)
    assert server.stop(signal.SIGTERM) == 0
    assert living(rounds.mark) == []
    tally["SIGTERM"] = len(directories)
    tell(server, tally)


def test_no_descendant_survives_a_service_that_is_killed(server: ServerProcess) -> None:
    with server.client() as client:
        rounds = Rounds(client)
        directories, calls = rounds.calls(3, KINDS)
        rounds.post(calls)
        rounds.wait_until_up(directories, KINDS)
        assert len(living(rounds.mark)) >= 3 * len(KINDS)
    server.stop(signal.SIGKILL)
    eventually(lambda: living(rounds.mark) == [], 20)
    tell(server, {"SIGKILL": len(directories)})


def time_outs(rounds: Rounds, kinds: list[str]) -> int:
    """Return how many rounds there were; one in which not everything was up in time is done again with more time."""
    done = 0
    timeout = 1_500
    while done < ROUNDS:
        directories, calls = rounds.calls(min(AT_ONCE, ROUNDS - done), kinds, timeout=timeout)
        ended = rounds.ended(rounds.post(calls)["id"])
        assert living(rounds.mark) == []
        assert [call["error"]["code"] for call in ended] == ["timeout"] * len(calls)
        complete = sum(is_up(directory, kinds) for directory in directories)
        if complete < len(calls):
            assert timeout < UP_SECONDS * 1000, "the descendants are not up in time"
            timeout *= 2
        done += complete
    return done


def cancels(rounds: Rounds, kinds: list[str]) -> int:
    done = 0
    while done < ROUNDS:
        directories, calls = rounds.calls(min(AT_ONCE, ROUNDS - done), kinds)
        batch = rounds.post(calls)["id"]
        rounds.wait_until_up(directories, kinds)
        rounds.client.post(f"/v1/batches/{batch}/cancel")
        ended = rounds.ended(batch)
        assert living(rounds.mark) == []
        assert [call["error"]["code"] for call in ended] == ["cancelled"] * len(calls)
        done += len(calls)
    return done


def disconnects(rounds: Rounds) -> int:
    directories, calls = rounds.calls(3, OTHERS)
    body = {"calls": calls, "onDisconnect": "cancel"}
    headers = {"Accept": "text/event-stream"}
    with rounds.client.stream("POST", f"{rounds.place}/batches", json=body, headers=headers) as stream:
        assert stream.status_code == 200
        rounds.wait_until_up(directories, OTHERS)
    eventually(lambda: living(rounds.mark) == [], 20)
    return len(calls)


def tell(server: ServerProcess, tally: dict[str, int]) -> None:
    rounds = ", ".join(f"{count} on {way}" for way, count in tally.items())
    print(f"\n{server.environment['TOOLCRIB_SANDBOX']}: rounds of {len(KINDS)} descendants: {rounds}; 0 survivors")  # noqa: T201 - for `make soak`
