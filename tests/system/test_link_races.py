"""Links that are swapped in all the time: nothing outside is read or made, through HTTP, in every tier.

`TOOLCRIB_TEST_RACE_SECONDS` is how long it goes on for each of the tiers that hold commands; `make soak` has it 60.
"""

import contextlib
import io
import itertools
import os
import subprocess
import sys
import tarfile
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import httpx2
import pytest

from app.sandbox.base import Tier
from tests.support.sandbox_tiers import READABLE, TIERS, require_tier
from tests.support.server import ServerProcess

SECONDS = float(os.environ.get("TOOLCRIB_TEST_RACE_SECONDS", "4"))
SECRET = "s-4c1d9e"
OUTSIDE_NAME = "only-outside"

FLIP = """
import ctypes, os, select, sys
exchange = ctypes.CDLL(None, use_errno=True).renameat2
names = [os.fsencode(name) for name in sys.argv[1:]]
pairs = list(zip(names[::2], names[1::2]))
flips = 0
while not select.select([0], [], [], 0)[0]:
    for _ in range(100):
        for one, other in pairs:
            if exchange(-100, one, -100, other, 2) == 0:
                flips += 1
print(flips)
"""


@contextlib.contextmanager
def flipping(*names: Path) -> Iterator[list[int]]:
    """Have another process exchange names, pair by pair, as fast as the kernel can; at the end say how often it did."""
    flips: list[int] = []
    command = [sys.executable, "-I", "-S", "-c", FLIP, *map(str, names)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        try:
            yield flips
        finally:
            said, _ = process.communicate(b"stop", timeout=30)
    flips.append(int(said))


def lay_out(root: Path, outside: Path) -> None:
    """`d` is a directory and `link` leads to one outside that looks the same; `f` is a file and `g` a link to one."""
    for directory, word in ((root / "d", "inside"), (outside, SECRET)):
        (directory / "sub").mkdir(parents=True)
        for name in ("a.txt", "e.txt", "sub/b.txt"):
            (directory / name).write_text(f"{word} {word}\n")
    (outside / OUTSIDE_NAME).write_text(SECRET)
    (outside / "sub" / OUTSIDE_NAME).write_text(SECRET)
    (root / "link").symlink_to(outside)
    (root / "f").write_text("inside\n")
    (root / "g").symlink_to(outside / "a.txt")
    # Nothing but where it is keeps a file outside from whoever the service acts as.
    owner = root.stat()
    for path in (outside, *outside.rglob("*"), *root.rglob("*")):
        os.chown(path, owner.st_uid, owner.st_gid, follow_symlinks=False)


def snapshot(directory: Path) -> dict[str, Any]:
    """Everything that a change outside would change."""
    found: dict[str, Any] = {}
    for path in sorted(directory.rglob("*")):
        status = path.lstat()
        content = path.read_bytes() if path.is_file() else b""
        found[str(path)] = (status.st_ino, status.st_mode, status.st_mtime_ns, status.st_nlink, content)
    return found


def archive() -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as tar:
        for name in ("from-archive.txt", "sub/from-archive.txt"):
            entry = tarfile.TarInfo(name)
            entry.size = 5
            tar.addfile(entry, io.BytesIO(b"hello"))
    return buffer.getvalue()


def calls(number: int, *, with_grep: bool) -> list[dict[str, Any]]:
    made = [
        ("read", {"path": "d/a.txt"}),
        ("read", {"path": "d/sub/b.txt"}),
        ("read", {"path": "f"}),
        ("write", {"path": f"d/w{number % 50}.txt", "content": "x"}),
        ("write", {"path": f"d/new{number % 50}/w.txt", "content": "x"}),
        ("write", {"path": "f", "content": f"inside {number}"}),
        ("edit", {"path": "d/e.txt", "edits": [{"oldText": "inside", "newText": "inside"[::-1]}]}),
        ("edit", {"path": "d/e.txt", "edits": [{"oldText": "edisni", "newText": "inside"}]}),
        ("ls", {"path": "d"}),
        ("ls", {"path": ".", "recursive": True}),
        ("find", {"path": "d", "pattern": "*"}),
        ("find", {"path": ".", "pattern": f"**/{OUTSIDE_NAME}"}),
    ]
    if with_grep:
        made += [("grep", {"path": "d", "pattern": "s-"}), ("grep", {"path": ".", "pattern": SECRET})]
        made += [("grep", {"path": "f", "pattern": "s-"})]
    return [{"name": name, "arguments": arguments} for name, arguments in made]


class Attack:
    """What clients do to a workspace while its links are swapped, and what they were answered."""

    def __init__(self, clients: Sequence[httpx2.Client], workspace: str, *, with_grep: bool) -> None:
        self.seen: Counter[tuple[str, str]] = Counter()
        self.leaks: list[str] = []
        self._clients = clients
        self._place = f"/v1/workspaces/{workspace}"
        self._with_grep = with_grep
        self._lock = threading.Lock()
        self._errors: list[BaseException] = []

    def run(self, seconds: float) -> None:
        until = time.monotonic() + seconds
        workers = [
            threading.Thread(target=self._guarded, args=((self._batches, self._files)[number % 2], client, until))
            for number, client in enumerate(self._clients)
        ]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()
        for error in self._errors:
            raise error

    def _guarded(self, work: Any, client: httpx2.Client, until: float) -> None:
        try:
            for number in itertools.count():
                work(client, number)
                if time.monotonic() > until:
                    break
        except BaseException as error:  # noqa: BLE001 - raised again by `run`
            self._errors.append(error)

    def _batches(self, client: httpx2.Client, number: int) -> None:
        body = {"calls": calls(number, with_grep=self._with_grep), "executionMode": "parallel"}
        answer = client.post(f"{self._place}/batches?wait=60", json=body)
        assert answer.status_code == 200, answer.text
        for call in answer.json()["calls"]:
            self._note(call["toolName"], (call["error"] or {}).get("code", "succeeded"))
            # The arguments name what is looked for; the result must not show it.
            told = str(call["result"]).replace(f"**/{OUTSIDE_NAME}", "")
            if SECRET in told or OUTSIDE_NAME in told:
                self.leaks.append(told)

    def _files(self, client: httpx2.Client, number: int) -> None:
        answers = {
            "GET": client.get(f"{self._place}/files/d/a.txt"),
            "PUT": client.put(f"{self._place}/files/d/u{number % 50}.txt", content=b"x"),
            "PUT below": client.put(f"{self._place}/files/d/more{number % 50}/u.txt", content=b"x"),
            "DELETE": client.delete(f"{self._place}/files/d/u{number % 50}.txt"),
            "tree": client.get(f"{self._place}/tree?path=d"),
            "archive": client.get(f"{self._place}/archive?path=d"),
            "unpack": client.put(
                f"{self._place}/archive?path=d", content=archive(), headers={"Content-Type": "application/x-tar"}
            ),
        }
        for name, answer in answers.items():
            assert answer.status_code < 500, (name, answer.text)
            self._note(name, "succeeded" if answer.status_code < 300 else answer.json()["code"])
            if SECRET.encode() in answer.content or OUTSIDE_NAME.encode() in answer.content:
                self.leaks.append(f"{name}: {answer.content[:300]!r}")

    def _note(self, name: str, outcome: str) -> None:
        with self._lock:
            self.seen[name, outcome] += 1


def files_open(server: ServerProcess) -> int:
    """How many descriptors of the service are no sockets, which come and go with connections."""
    count = 0
    for entry in Path(f"/proc/{server.process.pid}/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):
            count += not str(entry.readlink()).startswith("socket:")
    return count


def both_sides_met(attack: Attack) -> bool:
    """Whether links were met, and directories too."""
    tools = {(tool, outcome) for tool in ("read", "write") for outcome in ("path_outside_workspace", "succeeded")}
    return all(attack.seen[met] for met in {*tools, ("GET", "succeeded"), ("PUT", "succeeded")})


@pytest.mark.parametrize("tier", TIERS)
def test_links_swapped_in_all_the_time_lead_nothing_out(tmp_path: Path, tier: Tier) -> None:
    require_tier(tier, tmp_path)
    if os.geteuid() != 0 and not os.access("/proc/self/fd", os.R_OK):
        pytest.skip("the descriptors of the service cannot be counted")
    # In tier `process` nothing holds ripgrep, which opens files by their paths: docs/security.md says so.
    with_grep = tier != "process"
    seconds = SECONDS if with_grep else SECONDS / 2
    outside = tmp_path / "outside"
    environment = {
        "TOOLCRIB_API_KEY": "test-key-0123456789",
        "TOOLCRIB_SANDBOX": tier,
        "TOOLCRIB_SANDBOX_READABLE": os.pathsep.join(map(str, READABLE)),
    }
    parallel = {"executionMode": "parallel"}
    with ServerProcess(tmp_path / "data", environment) as server, contextlib.ExitStack() as stack:
        # Made beforehand, as making one takes a while.
        clients = [stack.enter_context(server.client()) for _ in range(4)]
        made = clients[0].post("/v1/workspaces", json={"options": {"write": parallel, "edit": parallel}}).json()
        root = Path(made["root"])
        lay_out(root, outside)
        attack = Attack(clients, made["id"], with_grep=with_grep)
        attack.run(0.5)
        before = files_open(server)
        untouched = snapshot(outside)
        with flipping(root / "d", root / "link", root / "f", root / "g") as flips:
            attack.run(seconds)
            until = time.monotonic() + 30
            while not both_sides_met(attack) and time.monotonic() < until:
                attack.run(1)
        assert attack.leaks == []
        assert snapshot(outside) == untouched
        # Threads of the pools may have been started meanwhile, but nothing is left open for each attempt.
        assert files_open(server) <= before + 20
    attempts = sum(attack.seen.values())
    print(f"\n{tier}: {flips[0]} flips, {attempts} attempts in {seconds:.0f} s, 0 outside")  # noqa: T201 - for `make soak`
    assert flips[0] > 100
    assert both_sides_met(attack), attack.seen
