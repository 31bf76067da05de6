"""A connection to a database that can be cut at the worst moment."""

import contextlib
import select
import socket
import threading
from collections.abc import Iterator
from typing import Self

WAIT_SECONDS = 20.0


class TcpProxy:
    """Passes bytes between clients and a server on the loopback interface.

    After `cut_after(b"COMMIT\0")`, the next message of a client that holds these bytes is passed on, the server's answer
    to it is awaited, and then both connections are closed before the client has seen any of it. While it is `silent`,
    connections stand and nothing comes through them.
    """

    def __init__(self, port: int) -> None:
        self._server_port = port
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        self._needle: bytes | None = None
        self.cut = threading.Event()
        self._flows = threading.Event()
        self._flows.set()
        self._threads: list[threading.Thread] = []
        self._stop, self._stopped = socket.socketpair()

    def cut_after(self, needle: bytes | None) -> None:
        """Cut the next connection whose client sends these bytes; None: none any more."""
        self.cut.clear()
        self._needle = needle

    @contextlib.contextmanager
    def silent(self) -> Iterator[None]:
        self._flows.clear()
        try:
            yield
        finally:
            self._flows.set()

    def __enter__(self) -> Self:
        self._start(self._accept)
        return self

    def __exit__(self, *_: object) -> None:
        self._flows.set()
        self._stop.close()
        for thread in self._threads:
            thread.join(WAIT_SECONDS)
            assert not thread.is_alive()
        self._listener.close()
        self._stopped.close()

    def _start(self, target: object, *args: object) -> None:
        assert callable(target)
        thread = threading.Thread(target=target, args=args, daemon=True)
        self._threads.append(thread)
        thread.start()

    def _accept(self) -> None:
        while True:
            ready, _, _ = select.select([self._listener, self._stopped], [], [])
            if self._stopped in ready:
                return
            client, _ = self._listener.accept()
            self._start(self._pass, client)

    def _pass(self, client: socket.socket) -> None:
        with client, contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", self._server_port)) as server:
            other = {client: server, server: client}
            while True:
                ready, _, _ = select.select([client, server, self._stopped], [], [])
                self._flows.wait()
                if self._stopped in ready:
                    return
                for source in ready:
                    data = source.recv(65536)
                    if not data:
                        return
                    other[source].sendall(data)
                    if source is client and self._needle is not None and self._needle in data:
                        self._needle = None
                        if server.recv(65536):
                            self.cut.set()
                        return
