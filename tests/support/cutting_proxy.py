"""A network that breaks: a proxy which cuts connections after so many bytes of their answers."""

import contextlib
import selectors
import socket
import threading
from collections import deque
from collections.abc import Sequence
from typing import Self

WAIT_SECONDS = 20.0


class CuttingProxy:
    """Passes bytes between clients and a server on 127.0.0.1.

    Each connection whose request holds `marker` takes the next of `cuts`: after so many bytes of its answer both sides
    are closed, in the middle of whatever that is. When none is left, connections live as long as both sides want.
    """

    def __init__(self, port: int, marker: bytes, cuts: Sequence[int]) -> None:
        self._server_port = port
        self._marker = marker
        self._cuts = deque(cuts)
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._stop, self._stopped = socket.socketpair()
        self._threads: list[threading.Thread] = []
        self.url = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        self.heads: list[str] = []
        """The first line of each marked request and of its answer, in the order of the answers."""

    def __enter__(self) -> Self:
        self._start(threading.Thread(target=self._accept, daemon=True))
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.close()
        for thread in self._threads:
            thread.join(WAIT_SECONDS)
            assert not thread.is_alive()
        self._listener.close()
        self._stopped.close()

    def _start(self, thread: threading.Thread) -> None:
        self._threads.append(thread)
        thread.start()

    def _accept(self) -> None:
        with selectors.DefaultSelector() as selector:
            selector.register(self._listener, selectors.EVENT_READ)
            selector.register(self._stopped, selectors.EVENT_READ)
            while True:
                ready = {key.fileobj for key, _ in selector.select()}
                if self._stopped in ready:
                    return
                client, _ = self._listener.accept()
                self._start(threading.Thread(target=self._pass, args=(client,), daemon=True))

    def _pass(self, client: socket.socket) -> None:
        with (
            client,
            contextlib.suppress(OSError),
            socket.create_connection(("127.0.0.1", self._server_port)) as server,
            selectors.DefaultSelector() as selector,
        ):
            for watched in (client, server, self._stopped):
                selector.register(watched, selectors.EVENT_READ)
            asked: str | None = None
            left: int | None = None
            while True:
                ready = {key.fileobj for key, _ in selector.select()}
                if self._stopped in ready:
                    return
                if client in ready:
                    data = client.recv(65536)
                    if not data:
                        return
                    if self._marker in data.partition(b"\r\n")[0]:
                        asked = data.partition(b"\r\n")[0].decode()
                        left = self._cuts.popleft() if self._cuts else None
                    server.sendall(data)
                if server in ready:
                    data = server.recv(65536)
                    if asked is not None and data:
                        answered = data.partition(b"\r\n")[0].decode()
                        self.heads.append(f"{asked} -> {answered}")
                        asked = None
                    if not data:
                        return
                    if left is not None:
                        data = data[:left]
                        left -= len(data)
                    client.sendall(data)
                    if left == 0:
                        return
