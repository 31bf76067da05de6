"""The nginx configurations of docs/operations.md and of deploy/ in front of the real service: streams and uploads flow."""

import contextlib
import os
import re
import shutil
import signal
import socket
import ssl
import subprocess
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import httpx2
import pytest

from tests.support.server import KEY, WAIT_SECONDS, ServerThread, event_stream, eventually

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "operations.md").read_text()
COMPOSE = (ROOT / "deploy" / "nginx.conf").read_text()
NGINX = shutil.which("nginx", path=os.environ.get("PATH", "") + ":/usr/sbin:/sbin")
OPENSSL = shutil.which("openssl")
MISSING = [name for name, found in (("nginx", NGINX), ("openssl", OPENSSL)) if found is None]

pytestmark = pytest.mark.skipif(bool(MISSING), reason=f"not on PATH: {', '.join(MISSING)}")


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return int(probe.getsockname()[1])


def replaced(text: str, pairs: list[tuple[str, str]]) -> str:
    for theirs, ours in pairs:
        assert text.count(theirs) == 1, theirs
        text = text.replace(theirs, ours)
    return text


def documented(directory: Path, port: int, service: str) -> str:
    """Return the configuration of the page as a whole file, with this test's ports and paths in it."""
    [block] = re.findall(r"```nginx\n(.*?)```", PAGE, re.DOTALL)
    block = replaced(
        block,
        [
            ("server 127.0.0.1:8080;", f"server {service};"),
            ("listen 443 ssl;", f"listen 127.0.0.1:{port} ssl;"),
            ("/etc/ssl/toolcrib/fullchain.pem", str(directory / "cert.pem")),
            ("/etc/ssl/toolcrib/key.pem", str(directory / "key.pem")),
            ("/var/log/nginx/toolcrib.log", str(directory / "access.log")),
        ],
    )
    temporary = "".join(
        f"{kind}_temp_path {directory / kind};\n" for kind in ("client_body", "proxy", "fastcgi", "uwsgi", "scgi")
    )
    return (
        f"worker_processes 1;\npid {directory / 'nginx.pid'};\nerror_log {directory / 'error.log'};\n"
        f"events {{}}\nhttp {{\n{temporary}{block}}}\n"
    )


def of_compose(directory: Path, port: int, service: str, other: str | None = None) -> str:
    """Return the configuration of the compose file with this test's ports, paths and certificate in it.

    What looks names up again is left out: it is Docker's, and Debian 12's nginx is too old for it.
    """
    tls = f"ssl_certificate {directory / 'cert.pem'}; ssl_certificate_key {directory / 'key.pem'};"
    return replaced(
        COMPOSE.replace(" /tmp/", f" {directory}/"),
        [
            ("worker_processes auto;", "worker_processes 1;"),
            ("error_log stderr warn;", f"error_log {directory / 'error.log'};"),
            ("resolver 127.0.0.11 valid=5s;", ""),
            ("server api-1:8080 resolve;", f"server {service};"),
            ("server api-2:8080 resolve;", "" if other is None else f"server {other};"),
            ("listen 8080;", f"listen 127.0.0.1:{port} ssl; {tls}"),
            ("/dev/stdout", str(directory / "access.log")),
        ],
    )


@contextlib.contextmanager
def nginx_in_front_of(
    service: str, directory: Path, configuration: Callable[[Path, int, str], str]
) -> Iterator[httpx2.Client]:
    assert NGINX is not None
    assert OPENSSL is not None
    directory.mkdir()
    subject = ["-subj", "/CN=toolcrib.example.org", "-addext", "subjectAltName=IP:127.0.0.1"]
    files = ["-keyout", str(directory / "key.pem"), "-out", str(directory / "cert.pem")]
    subprocess.run(
        [OPENSSL, "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", *subject, *files],
        check=True,
        capture_output=True,
        timeout=60,
    )
    port = free_port()
    file = directory / "nginx.conf"
    user = "user root;\n" if os.geteuid() == 0 else ""
    file.write_text(f"{user}daemon off;\n" + configuration(directory, port, service.removeprefix("http://")))
    with (directory / "stderr.log").open("wb") as log:
        process = subprocess.Popen([NGINX, "-e", str(directory / "error.log"), "-c", str(file)], stderr=log)
    try:

        def listening() -> bool:
            assert process.poll() is None, (directory / "stderr.log").read_text()
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=1):
                return True
            return False

        eventually(listening, WAIT_SECONDS)
        trusted = ssl.create_default_context(cafile=str(directory / "cert.pem"))
        headers = {"Authorization": f"Bearer {KEY}"}
        with httpx2.Client(
            base_url=f"https://127.0.0.1:{port}", headers=headers, verify=trusted, timeout=WAIT_SECONDS, trust_env=False
        ) as client:
            yield client
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(WAIT_SECONDS)


@pytest.mark.parametrize("configuration", [documented, of_compose])
def test_the_configuration_keeps_streams_and_uploads_flowing(
    tmp_path: Path, configuration: Callable[[Path, int, str], str]
) -> None:
    directory = tmp_path / "nginx"
    with ServerThread(tmp_path / "data") as server, nginx_in_front_of(server.url, directory, configuration) as client:
        workspace = client.post("/v1/workspaces", json={}).json()
        root = Path(workspace["root"])
        path = f"/v1/workspaces/{workspace['id']}"

        # Events come while the command still waits for what the test does after it has seen them.
        command = "echo one; until test -e go; do sleep 0.05; done; echo two"
        calls = [{"name": "bash", "arguments": {"command": command}}]
        with event_stream(client, "POST", f"{path}/batches", json={"calls": calls}) as (answer, events):
            assert answer.headers["content-type"].startswith("text/event-stream")
            first = next(event for event in events if event.type == "tool_execution_update")
            assert first.data["delta"][0]["text"] == "one\n"
            (root / "go").touch()
            rest = list(events)
            assert rest[-1].type == "batch_end"
        location = answer.headers["location"]
        headers = {"Last-Event-ID": str(first.id)}
        with event_stream(client, "GET", f"{location}/events", headers=headers) as (_, events):
            assert [event.id for event in events] == [event.id for event in rest]
        call = client.get(location).json()["calls"][0]
        with client.stream("GET", f"/v1/calls/{call['id']}/output", params={"follow": "true"}) as output:
            assert output.read() == b"one\ntwo\n"

        # An upload is on the service's disk before the client has sent all of it.
        piece = b"x" * 1_000_000

        def body() -> Iterator[bytes]:
            yield piece
            eventually(lambda: any(root.glob(".toolcrib-tmp-*")), WAIT_SECONDS)
            yield piece
            yield piece

        put = client.put(f"{path}/files/a%20b%2523.bin", content=body())
        assert (put.status_code, put.json()["path"], put.json()["bytes"]) == (201, "a b%23.bin", 3_000_000)
        ranged = client.get(f"{path}/files/a%20b%2523.bin", headers={"Range": "bytes=0-9"})
        assert (ranged.status_code, ranged.content, ranged.headers["etag"]) == (206, b"x" * 10, put.headers["etag"])

        assert client.get("/metrics").status_code == 404
        client.get("/v1/tools", params={"token": "s3cret-in-the-query"})
    logged = (directory / "access.log").read_text()
    assert f'"GET {location}/events" 200' in logged
    assert answer.headers["x-request-id"] in logged
    assert "s3cret" not in logged


def test_no_request_is_lost_to_an_api_process_that_is_gone(tmp_path: Path) -> None:
    gone = f"127.0.0.1:{free_port()}"
    directory = tmp_path / "nginx"
    with (
        ServerThread(tmp_path / "data") as server,
        nginx_in_front_of(server.url, directory, partial(of_compose, other=gone)) as client,
    ):
        answers = [client.post("/v1/workspaces", json={"name": str(number)}) for number in range(4)]
        assert [answer.status_code for answer in answers] == [201] * 4
        assert len(client.get("/v1/workspaces").json()["data"]) == 4
    # It was asked at least once, and the other one after it.
    assert f"{gone}, {server.url.removeprefix('http://')}" in (directory / "access.log").read_text()


def test_its_time_outs_outlast_what_the_service_may_be_silent_for() -> None:
    seconds = [int(number) for number in re.findall(r"proxy_(?:read|send)_timeout (\d+)s;", PAGE)]
    assert len(seconds) == 2
    assert min(seconds) > 60  # `?wait=` says nothing before its end
