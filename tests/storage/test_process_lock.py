"""Which node a data directory is, and which of its processes live."""

import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from app.domain.ids import is_id, new_id
from app.errors import ConfigurationError
from app.storage.process_lock import ProcessLock, node_of

HOLDER = """
import sys
from pathlib import Path
from app.storage.process_lock import ProcessLock
lock = ProcessLock(Path(sys.argv[1]), sys.argv[2])
print("held", flush=True)
sys.stdin.read()
"""


def test_a_directory_is_one_node_whoever_asks_first(tmp_path: Path) -> None:
    with ThreadPoolExecutor(8) as pool:
        found = set(pool.map(lambda _: node_of(tmp_path), range(32)))
    (node,) = found
    assert is_id(node, "node")
    assert [entry.name for entry in tmp_path.iterdir()] == ["node"]
    assert (tmp_path / "node").stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize("content", ["", "ws_01m8pkg3h0ft78j2374fnfystd", "node_x", "\0"])
def test_a_file_that_names_no_node_stops_the_start(tmp_path: Path, content: str) -> None:
    (tmp_path / "node").write_text(content)
    with pytest.raises(ConfigurationError, match="has to hold the id of a node"):
        node_of(tmp_path)
    assert (tmp_path / "node").read_text() == content


def test_a_process_that_was_killed_is_dead_and_one_that_runs_is_not(tmp_path: Path) -> None:
    killed, running, copied, own = (new_id("proc") for _ in range(4))
    holders = [
        subprocess.Popen(
            [sys.executable, "-c", HOLDER, tmp_path, process_id],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={"PYTHONPATH": ":".join(sys.path)},
        )
        for process_id in (killed, running)
    ]
    try:
        for holder in holders:
            assert holder.stdout is not None
            assert holder.stdout.readline() == b"held\n"
        with ProcessLock(tmp_path, own) as lock:
            # One without a file ran before the directory was restored from a backup.
            assert lock.dead([killed, running, copied, own]) == [copied]
            holders[0].kill()
            holders[0].wait(20)
            assert lock.dead([killed, running, copied]) == [killed, copied]
            assert sorted(entry.name for entry in (tmp_path / "processes").iterdir()) == sorted([running, own])
        assert [entry.name for entry in (tmp_path / "processes").iterdir()] == [running]
    finally:
        for holder in holders:
            holder.kill()
            holder.communicate(timeout=20)
