"""What callers are promised, from outside: over HTTP, with real files and real commands."""

import os
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx2
import pytest

from tests.support.processes import living
from tests.support.server import KEY, ServerProcess, ServerThread, eventually

MIB = 1024 * 1024


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerThread]:
    with ServerThread(tmp_path_factory.mktemp("promises") / "data") as running:
        yield running


@pytest.fixture
def client(server: ServerThread) -> Iterator[httpx2.Client]:
    with server.client() as made:
        yield made


def make(client: httpx2.Client, **body: Any) -> dict[str, Any]:
    answer = client.post("/v1/workspaces", json=body)
    assert answer.status_code == 201, answer.text
    return answer.json()


def run(
    client: httpx2.Client, workspace: dict[str, Any], *calls: tuple[str, dict[str, Any]], **more: Any
) -> dict[str, Any]:
    body = {"calls": [{"id": f"c{n}", "name": name, "arguments": args} for n, (name, args) in enumerate(calls)], **more}
    answer = client.post(f"/v1/workspaces/{workspace['id']}/batches?wait=30", json=body)
    assert answer.status_code == 200, answer.text
    return answer.json()


def replace(path: str, old: str, new: str) -> tuple[str, dict[str, Any]]:
    return "edit", {"path": path, "edits": [{"oldText": old, "newText": new}]}


def test_twenty_batches_at_once_each_edit_one_file_through_two_names_and_all_land(client: httpx2.Client) -> None:
    lines = "".join(f"line {number:02}\n" for number in range(20))
    workspace = make(client, files={"real/notes.txt": lines})
    (Path(workspace["root"]) / "link.txt").symlink_to("real/notes.txt")

    def edit(number: int) -> dict[str, Any]:
        name = ("link.txt", "real/notes.txt")[number % 2]
        return run(client, workspace, replace(name, f"line {number:02}", f"LINE {number:02}"))

    with ThreadPoolExecutor(20) as pool:
        done = list(pool.map(edit, range(20)))
    assert [batch["summary"]["succeeded"] for batch in done] == [1] * 20
    assert (Path(workspace["root"]) / "real/notes.txt").read_text() == lines.upper()
    assert (Path(workspace["root"]) / "link.txt").is_symlink()


def test_parallel_edits_of_one_batch_all_land_in_call_order(client: httpx2.Client) -> None:
    workspace = make(client, files={"n.txt": "0"}, options={"edit": {"executionMode": "parallel"}})
    (Path(workspace["root"]) / "other.txt").symlink_to("n.txt")
    calls = [replace(("n.txt", "other.txt")[n % 2], str(n), str(n + 1)) for n in range(20)]
    batch = run(client, workspace, *calls)
    assert batch["effectiveMode"] == "parallel"
    assert batch["summary"]["succeeded"] == 20
    assert (Path(workspace["root"]) / "n.txt").read_text() == "20"


def test_a_failing_first_write_releases_the_second(client: httpx2.Client) -> None:
    workspace = make(client, files={"a.txt": "old"}, options={"write": {"executionMode": "parallel"}})
    batch = run(
        client,
        workspace,
        ("write", {"path": "a.txt", "content": "first", "createOnly": True}),
        ("write", {"path": "a.txt", "content": "second"}),
    )
    assert [call["status"] for call in batch["calls"]] == ["failed", "succeeded"]
    assert batch["calls"][0]["error"]["code"] == "already_exists"
    assert (Path(workspace["root"]) / "a.txt").read_text() == "second"


def test_one_command_makes_the_whole_batch_sequential(client: httpx2.Client) -> None:
    workspace = make(client, files={"v.txt": "1\n"})
    batch = run(
        client,
        workspace,
        ("read", {"path": "v.txt"}),
        ("bash", {"command": "echo 2 > v.txt"}),
        ("read", {"path": "v.txt"}),
        executionMode="parallel",
    )
    assert (batch["executionMode"], batch["effectiveMode"]) == ("parallel", "sequential")
    assert [batch["calls"][n]["result"]["content"][0]["text"] for n in (0, 2)] == ["   1│ 1", "   1│ 2"]


def test_a_cancel_ends_a_command_with_all_its_descendants_in_under_a_second(client: httpx2.Client) -> None:
    workspace = make(client)
    mark = f"mark-{os.urandom(8).hex()}"
    command = f"(exec -a {mark} sleep 60) & touch child; sleep 60; touch late"
    posted = client.post(
        f"/v1/workspaces/{workspace['id']}/batches",
        json={"calls": [{"name": "bash", "arguments": {"command": command}}]},
    ).json()
    child = Path(workspace["root"]) / "child"
    eventually(lambda: child.exists() and living(mark))
    began = time.monotonic()
    client.post(f"/v1/batches/{posted['id']}/cancel")
    batch = client.get(f"/v1/batches/{posted['id']}?wait=10").json()
    assert time.monotonic() - began < 1
    assert batch["status"] == "cancelled"
    result = batch["calls"][0]["result"]
    assert (result["details"]["aborted"], result["details"]["exitCode"]) == (True, None)
    assert living(mark) == []
    assert not (Path(workspace["root"]) / "late").exists()


def test_a_gigabyte_of_output_is_answered_right_and_costs_little_memory(tmp_path: Path) -> None:
    with ServerProcess(tmp_path / "data", {"TOOLCRIB_API_KEY": KEY}) as process, process.client() as client:
        workspace = make(client)
        run(client, workspace, ("bash", {"command": "head -c 20000000 /dev/zero | tr '\\0' x"}))
        before = resident(process.process.pid)
        batch = run(
            client, workspace, ("bash", {"command": "head -c 1000000000 /dev/zero | tr '\\0' y; echo; echo last"})
        )
        grown = resident(process.process.pid) - before
    details = batch["calls"][0]["result"]["details"]
    assert (details["exitCode"], details["stdoutBytes"], details["truncated"]) == (0, 1_000_000_006, True)
    assert details["stdout"].endswith("last\n")
    assert grown < 32 * MIB


def resident(pid: int) -> int:
    """Return the bytes a process has in memory at most so far."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    raise AssertionError


FULL_DISK = """
    import os, subprocess, sys
    from pathlib import Path
    from tests.support.server import KEY, ServerProcess
    from tests.system.test_promises import make, run

    base = Path(sys.argv[1])
    small = base / "small"
    small.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=" + sys.argv[3], "none", str(small)], check=True)
    environment = {"TOOLCRIB_API_KEY": KEY, "TOOLCRIB_WORKSPACE_ROOTS": str(small)}
    data = small / "data" if sys.argv[2] == "database" else base / "data"
    with ServerProcess(data, environment) as process, process.client() as client:
        exec(sys.stdin.read())
"""


def on_a_small_disk(tmp_path: Path, what: str, size: str, body: str) -> None:
    """Run `body` with a server whose data directory or workspace root lies on a small disk of its own."""
    done = subprocess.run(
        ["unshare", "-m", sys.executable, "-c", textwrap.dedent(FULL_DISK), str(tmp_path), what, size],
        input=textwrap.dedent(body),
        text=True,
        capture_output=True,
        timeout=90,
        check=False,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
    )
    assert done.returncode == 0, done.stderr[-3000:]


needs_mounts = pytest.mark.skipif(
    subprocess.run(["unshare", "-m", "true"], capture_output=True, check=False).returncode != 0,
    reason="needs a private mount namespace (root or CAP_SYS_ADMIN) for a small disk",
)


@needs_mounts
def test_a_full_disk_under_the_workspace_leaves_the_old_file_and_says_so(tmp_path: Path) -> None:
    on_a_small_disk(
        tmp_path,
        "workspace",
        "1m",
        """
        root = small / "w"
        root.mkdir()
        os.chown(root, 65534, 65534)
        workspace = make(client, root=str(root))
        (root / "ledger.csv").write_text("1,2\\n")
        os.chown(root / "ledger.csv", 65534, 65534)
        batch = run(client, workspace, ("write", {"path": "ledger.csv", "content": "x" * 3_000_000}))
        assert batch["calls"][0]["error"]["code"] == "no_space", batch
        assert (root / "ledger.csv").read_text() == "1,2\\n"
        assert sorted(path.name for path in root.iterdir()) == ["ledger.csv"]
        batch = run(client, workspace, ("write", {"path": "ledger.csv", "content": "3,4\\n"}))
        assert batch["summary"]["succeeded"] == 1, batch
        """,
    )


@needs_mounts
def test_a_full_disk_under_the_database_refuses_new_work_and_ends_what_runs(tmp_path: Path) -> None:
    on_a_small_disk(
        tmp_path,
        "database",
        "48m",
        """
        workspace = make(client)
        running = client.post(
            f"/v1/workspaces/{workspace['id']}/batches",
            json={"calls": [{"name": "bash", "arguments": {"command": "until [ -e go ]; do sleep 0.05; done; echo ended"}}]},
        ).json()
        with open(small / "filler", "wb") as filler:
            try:
                while True:
                    filler.write(bytes(65536))
                    filler.flush()
            except OSError:
                pass
        statuses = set()
        for _ in range(200):
            answer = client.post(f"/v1/workspaces/{workspace['id']}/batches?wait=5", json={
                "calls": [{"name": "read", "arguments": {"path": "nothing" * 400}}] * 10})
            statuses.add(answer.status_code)
            if answer.status_code == 507:
                break
        assert statuses <= {200, 202, 507}, statuses
        assert 507 in statuses, statuses
        assert answer.json()["code"] == "no_space", answer.text
        (Path(workspace["root"]) / "go").touch()
        done = client.get(f"/v1/batches/{running['id']}?wait=30").json()
        assert done["status"] == "completed", done
        assert done["calls"][0]["result"]["content"][0]["text"] == "ended", done
        os.unlink(small / "filler")
        import time
        deadline = time.monotonic() + 20
        while client.post(f"/v1/workspaces/{workspace['id']}/tools/read", json={"path": "x"}).status_code != 200:
            assert time.monotonic() < deadline
            time.sleep(0.1)
        """,
    )
