"""One process per data directory."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

import app
from app.errors import ConfigurationError
from app.storage.instance_lock import InstanceLock

HOLDER = """
import sys
from pathlib import Path
from app.storage.instance_lock import InstanceLock
lock = InstanceLock(Path(sys.argv[1]))
sys.stdout.write("held\\n")
sys.stdout.flush()
sys.stdin.read()
"""


def test_second_process_is_refused_with_a_sentence_until_the_first_is_gone(tmp_path: Path) -> None:
    source = str(Path(app.__file__).parent.parent)
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLDER, tmp_path],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": source},
    )
    with holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "held\n"
        with pytest.raises(ConfigurationError) as caught:
            InstanceLock(tmp_path)
        assert str(tmp_path) in str(caught.value)
        assert f"pid {holder.pid}" in str(caught.value)
        assert "TOOLCRIB_DATA_DIR" in str(caught.value)
        holder.kill()
        holder.wait(timeout=20)
    InstanceLock(tmp_path).close()


def test_lock_is_free_after_close(tmp_path: Path) -> None:
    with InstanceLock(tmp_path) as lock:
        with pytest.raises(ConfigurationError):
            InstanceLock(tmp_path)
        lock.close()
        InstanceLock(tmp_path).close()
