"""A pooler of transactions between the service and Postgres: the PgBouncer of Debian, with fewer connections than asked for."""

import os
import pwd
import shutil
import signal
import socket
import subprocess
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psycopg
import pytest
from sqlalchemy import make_url

from tests.support.cluster import cluster
from tests.support.server import WAIT_SECONDS, eventually

PGBOUNCER = shutil.which("pgbouncer", path=os.environ.get("PATH", "") + ":/usr/sbin:/sbin")
CONNECTIONS = 3

pytestmark = pytest.mark.skipif(PGBOUNCER is None, reason="not on PATH: pgbouncer")


@pytest.fixture
def pooled_url(postgres_url: str, tmp_path: Path) -> Iterator[str]:
    """The URL of the test's database behind a pooler."""
    assert PGBOUNCER is not None
    server = make_url(postgres_url)
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    log = tmp_path / "pgbouncer.log"
    settings = tmp_path / "pgbouncer.ini"
    target = {"host": server.host, "port": server.port, "dbname": server.database, "user": server.username}
    target |= {"password": server.password} if server.password else {}
    settings.write_text(
        f"[databases]\npooled = {' '.join(f'{name}={value}' for name, value in target.items())}\n"
        f"[pgbouncer]\nlisten_addr = 127.0.0.1\nlisten_port = {port}\nunix_socket_dir =\nauth_type = any\n"
        f"pool_mode = transaction\ndefault_pool_size = {CONNECTIONS}\nmax_client_conn = 200\n"
    )
    # It refuses to be root.
    identity = {} if os.geteuid() != 0 else {"user": pwd.getpwnam("nobody").pw_uid}
    with log.open("wb") as output, settings.open("rb") as configuration:
        process = subprocess.Popen(
            [PGBOUNCER, "/dev/stdin"], stdin=configuration, stdout=output, stderr=output, cwd="/", **identity
        )
    url = f"postgresql://toolcrib@127.0.0.1:{port}/pooled"

    def answers() -> bool:
        assert process.poll() is None, log.read_text()
        try:
            psycopg.connect(url, connect_timeout=2).close()
        except psycopg.OperationalError:
            return False
        return True

    try:
        eventually(answers, WAIT_SECONDS)
        yield url
    finally:
        process.send_signal(signal.SIGINT)
        process.wait(WAIT_SECONDS)


def test_records_go_through_the_pooler_and_the_rest_past_it(pooled_url: str, postgres_url: str, tmp_path: Path) -> None:
    with cluster(pooled_url, tmp_path, TOOLCRIB_DATABASE_DIRECT_URL=postgres_url) as processes:
        worker, api = processes.worker("worker"), processes.api("api")
        with api.client() as client:
            spaces = [client.post("/v1/workspaces", json={}).json()["id"] for _ in range(2)]

            def run(number: int) -> str:
                asked = {"calls": [{"name": "write", "arguments": {"path": f"{number}", "content": "x"}}]}
                answer = client.post(f"/v1/workspaces/{spaces[number % 2]}/batches", params={"wait": 30}, json=asked)
                return f"{answer.status_code} {answer.json().get('status')} {answer.json().get('hasErrors')}"

            # Several at once and each statement many times: what prepares statements has done so by then.
            with ThreadPoolExecutor(8) as pool:
                assert list(pool.map(run, range(48))) == ["200 completed False"] * 48
            listed = client.get("/v1/calls", params={"limit": 200}).json()["data"]
            assert len(listed) == 48
        assert worker.stop() == 0
        assert api.stop() == 0
        for process in (worker, api):
            assert [line for line in process.log().splitlines() if '"level": "error"' in line] == []
