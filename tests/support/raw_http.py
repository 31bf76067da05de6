"""HTTP by hand, for what a client library would not send: half a body, no body yet, a path as it is."""

import socket
from dataclasses import dataclass
from types import TracebackType
from typing import Self
from urllib.parse import urlsplit

from tests.support.server import KEY, WAIT_SECONDS


@dataclass(frozen=True)
class Answer:
    status: int
    headers: dict[str, str]
    body: bytes


class RawConnection:
    """A connection to a server; closing it is the client going away."""

    def __init__(self, url: str, receive_buffer: int | None = None) -> None:
        parts = urlsplit(url)
        assert parts.hostname is not None
        self._socket = socket.socket()
        if receive_buffer is not None:
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
        self._socket.settimeout(WAIT_SECONDS)
        self._socket.connect((parts.hostname, parts.port or 80))
        self._rest = b""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._socket.close()

    def send_head(self, method: str, target: str, **headers: str) -> None:
        lines = [f"{method} {target} HTTP/1.1", "Host: here", f"Authorization: Bearer {KEY}"]
        lines += [f"{name.replace('_', '-')}: {value}" for name, value in headers.items()]
        self._socket.sendall("\r\n".join(lines).encode("latin-1") + b"\r\n\r\n")

    def send(self, data: bytes) -> None:
        self._socket.sendall(data)

    def send_chunk(self, data: bytes) -> None:
        self.send(b"%x\r\n%s\r\n" % (len(data), data))

    def head(self) -> tuple[int, dict[str, str]]:
        """Read the head of the next answer and return its status and headers."""
        while b"\r\n\r\n" not in self._rest:
            data = self._socket.recv(65536)
            assert data, "the server closed the connection without an answer"
            self._rest += data
        head, _, self._rest = self._rest.partition(b"\r\n\r\n")
        first, *lines = head.decode("latin-1").split("\r\n")
        return int(first.split()[1]), {
            name.lower(): value.strip() for name, _, value in (x.partition(":") for x in lines)
        }

    def answer(self) -> Answer:
        """Read the next answer, whose length it says."""
        status, headers = self.head()
        size = int(headers.get("content-length", "0"))
        while len(self._rest) < size:
            data = self._socket.recv(65536)
            assert data, "the answer was cut"
            self._rest += data
        body, self._rest = self._rest[:size], self._rest[size:]
        return Answer(status, headers, body)

    def rest(self) -> bytes:
        """Read until the server closes the connection."""
        parts = [self._rest]
        while data := self._socket.recv(65536):
            parts.append(data)
        return b"".join(parts)
