"""The test server itself: it leaves nothing behind, and it runs from wherever its programs lie."""

import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import psycopg
import pytest

from tests.support.postgres import Databases, PostgresServer, installations

WAIT_SECONDS = 20.0
SOURCE = Path(__file__).parent.parent.parent

OWNER = """
import sys
from tests.support.postgres import PostgresServer
server = PostgresServer()
server.start()
sys.stdout.write(f"{server.pid} {server.directory}\\n")
sys.stdout.flush()
sys.stdin.read()
"""


def is_running(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text(encoding="ascii", errors="replace").rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"


def test_server_and_its_directory_are_gone_when_its_owner_is_killed() -> None:
    owner = subprocess.Popen(
        [sys.executable, "-c", OWNER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=SOURCE
    )
    with owner:
        assert owner.stdout is not None
        pid, directory = owner.stdout.readline().split()
        assert is_running(int(pid))
        owner.kill()
    deadline = time.monotonic() + WAIT_SECONDS
    while is_running(int(pid)) or Path(directory).exists():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_restarted_server_has_its_data_and_its_port() -> None:
    with PostgresServer() as server, Databases(server.url).fresh() as url:
        with psycopg.connect(url) as connection:
            connection.execute("CREATE TABLE kept (value INTEGER)")
        for end in (server.stop, server.kill):
            end()
            with pytest.raises(psycopg.OperationalError):
                psycopg.connect(url)
            server.start()
            with psycopg.connect(url) as connection:
                assert connection.execute("SELECT count(*) FROM kept").fetchone() == (0,)
    assert not server.directory.exists()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root gives its programs to another user")
def test_programs_in_a_private_directory_are_copied(tmp_path: Path) -> None:
    programs = installations()[0]
    package = tmp_path / "private" / programs.parent.parent.name
    shutil.copytree(programs.parent, package / programs.parent.name, symlinks=True)
    libraries = programs.parent.parent.with_name(f"{programs.parent.parent.name}.libs")
    if libraries.is_dir():
        shutil.copytree(libraries, package.with_name(libraries.name))
    package.parent.chmod(0o700)
    with PostgresServer(package / programs.parent.name / "bin") as server, psycopg.connect(server.url) as connection:
        assert connection.execute("SELECT 1").fetchone() == (1,)
