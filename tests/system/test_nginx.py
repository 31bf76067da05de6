"""The nginx configuration of docs/operations.md in front of the real service: streams flow, uploads arrive as sent."""

import contextlib
import os
import re
import shutil
import signal
import socket
import ssl
import subprocess
from collections.abc import Iterator
from pathlib import Path

import httpx2
import pytest

from tests.support.server import KEY, WAIT_SECONDS, ServerThread, event_stream, eventually

PAGE = (Path(__file__).parents[2] / "docs" / "operations.md").read_text()
NGINX = shutil.which("nginx", path=os.environ.get("PATH", "") + ":/usr/sbin:/sbin")
OPENSSL = shutil.which("openssl")
MISSING = [name for name, found in (("nginx", NGINX), ("openssl", OPENSSL)) if found is None]

pytestmark = pytest.mark.skipif(bool(MISSING), reason=f"not on PATH: {', '.join(MISSING)}")


def documented(directory: Path, port: int, service: str) -> str:
    """Return the configuration of the page as a whole file, with this test's ports and paths in it."""
    [block] = re.findall(r"```nginx\n(.*?)```", PAGE, re.DOTALL)
    for of_the_page, here in (
        ("server 127.0.0.1:8080;", f"server {service.removeprefix('http://')};"),
        ("listen 443 ssl;", f"listen 127.0.0.1:{port} ssl;"),
        ("/etc/ssl/toolcrib/fullchain.pem", str(directory / "cert.pem")),
        ("/etc/ssl/toolcrib/key.pem", str(directory / "key.pem")),
        ("/var/log/nginx/toolcrib.log", str(directory / "access.log")),
    ):
        assert block.count(of_the_page) == 1, of_the_page
        block = block.replace(of_the_page, here)
    temporary = "".join(
        f"{kind}_temp_path {directory / kind};\n" for kind in ("client_body", "proxy", "fastcgi", "uwsgi", "scgi")
    )
    user = "user root;\n" if os.geteuid() == 0 else ""
    return (
        f"{user}daemon off;\nworker_processes 1;\npid {directory / 'nginx.pid'};\nerror_log {directory / 'error.log'};\n"
        f"events {{}}\nhttp {{\n{temporary}{block}}}\n"
    )


@contextlib.contextmanager
def nginx_in_front_of(service: str, directory: Path) -> Iterator[httpx2.Client]:
    assert NGINX is not None
    assert OPENSSL is not None
    subject = ["-subj", "/CN=toolcrib.example.org", "-addext", "subjectAltName=IP:127.0.0.1"]
    files = ["-keyout", str(directory / "key.pem"), "-out", str(directory / "cert.pem")]
    subprocess.run(
        [OPENSSL, "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", *subject, *files],
        check=True,
        capture_output=True,
        timeout=60,
    )
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    file = directory / "nginx.conf"
    file.write_text(documented(directory, port, service))
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


def test_the_documented_configuration_keeps_streams_and_uploads_flowing(tmp_path: Path) -> None:
    directory = tmp_path / "nginx"
    directory.mkdir()
    with ServerThread(tmp_path / "data") as server, nginx_in_front_of(server.url, directory) as client:
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


def test_its_time_outs_outlast_what_the_service_may_be_silent_for() -> None:
    seconds = [int(number) for number in re.findall(r"proxy_(?:read|send)_timeout (\d+)s;", PAGE)]
    assert len(seconds) == 2
    assert min(seconds) > 60  # `?wait=` says nothing before its end
