"""Requests that are sent on to the node of their workspace, when the process there does not answer as it should."""

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx2
import psycopg
import pytest

from tests.support.server import WAIT_SECONDS, ServerThread


@contextmanager
def breaking_off(said: bytes = b"") -> Iterator[str]:
    """Give the URL of a server that reads the beginning of each request, says something and closes the connection."""
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve() -> None:
            while True:
                try:
                    connection, _ = listener.accept()
                except OSError:
                    return
                with connection:
                    connection.recv(65536)
                    connection.sendall(said)

        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        listener.shutdown(socket.SHUT_RDWR)
        thread.join(WAIT_SECONDS)


@contextmanager
def node_at(postgres_url: str, *urls: str) -> Iterator[None]:
    """Let the processes of the only node be said to be at these URLs, one each."""
    with psycopg.connect(postgres_url, autocommit=True) as connection:
        found = connection.execute("SELECT id, url FROM processes WHERE node_id IS NOT NULL ORDER BY id").fetchall()
        assert len(found) == len(urls)
        try:
            for (process_id, _), url in zip(found, urls, strict=True):
                connection.execute("UPDATE processes SET url = %s WHERE id = %s", (url, process_id))
            yield
        finally:
            for process_id, url in found:
                connection.execute("UPDATE processes SET url = %s WHERE id = %s", (url, process_id))


@pytest.fixture
def api(postgres_url: str, tmp_path: Path) -> Iterator[httpx2.Client]:
    """A client of a process without a node, before a node of two processes."""
    settings = {"database_url": postgres_url, "backend": "distributed"}
    with (
        ServerThread(tmp_path / "data", role="worker", **settings),
        ServerThread(tmp_path / "data", role="worker", **settings),
        ServerThread(tmp_path / "api", role="api", **settings) as server,
        server.client() as client,
    ):
        yield client


def test_a_process_that_breaks_off_is_no_fault_of_this_one(api: httpx2.Client, postgres_url: str) -> None:
    path = f"/v1/workspaces/{api.post('/v1/workspaces', json={}).json()['id']}/files/a.txt"
    with breaking_off() as url, node_at(postgres_url, url, url):
        put = api.put(path, content=b"hello")
        assert (put.status_code, put.json()["code"]) == (503, "owner_gone")
        assert "may have been done" in put.json()["detail"]
        assert put.headers["retry-after"] == "5"
        get = api.get(path)
        assert (get.status_code, get.json()["code"]) == (503, "owner_gone")
        assert "may have been done" not in get.json()["detail"]
    assert api.put(path, content=b"hello").status_code == 201


def test_what_changes_nothing_is_asked_of_another_process_of_the_node(api: httpx2.Client, postgres_url: str) -> None:
    path = f"/v1/workspaces/{api.post('/v1/workspaces', json={'files': {'a.txt': 'hello'}}).json()['id']}/files/a.txt"
    with psycopg.connect(postgres_url) as connection:
        [(url,), _] = connection.execute("SELECT url FROM processes WHERE node_id IS NOT NULL").fetchall()
    with breaking_off() as broken, node_at(postgres_url, url, broken):
        # Which of the two is asked first is left to chance.
        assert [api.get(path).text for _ in range(16)] == ["hello"] * 16


def test_an_answer_that_breaks_off_is_cut_for_the_client_too(
    api: httpx2.Client, postgres_url: str, capfd: pytest.CaptureFixture[str]
) -> None:
    path = f"/v1/workspaces/{api.post('/v1/workspaces', json={}).json()['id']}/files/a.txt"
    half = b"HTTP/1.1 200 OK\r\ncontent-length: 10\r\n\r\nhello"
    with breaking_off(half) as url, node_at(postgres_url, url, url), pytest.raises(httpx2.TransportError):
        api.get(path)
    told = capfd.readouterr()
    assert "answer_broke_off" in told.out + told.err
    assert "unhandled_error" not in told.out + told.err
