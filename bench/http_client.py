"""An HTTP/1.1 client that does as little as it can, so that what is measured is the server.

One connection, one request at a time, answers with a Content-Length. Loopback only.
"""

import asyncio
import json
from typing import Any, cast


class Connection(asyncio.Protocol):
    """A kept-alive connection; `request` returns `(status, body)` of one exchange."""

    def __init__(self) -> None:
        self._transport: asyncio.Transport | None = None
        self._answer: asyncio.Future[tuple[int, bytes]] | None = None
        self._buffer = bytearray()
        self._status = 0
        self._end = 0
        self._body = 0

    @classmethod
    async def open(cls, port: int) -> "Connection":
        _, connection = await asyncio.get_running_loop().create_connection(cls, "127.0.0.1", port)
        return connection

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's own class is not derived from it

    def connection_lost(self, exc: Exception | None) -> None:
        if self._answer is not None and not self._answer.done():
            self._answer.set_exception(exc or ConnectionError("the server closed the connection"))

    def data_received(self, data: bytes) -> None:
        self._buffer += data
        if not self._end:
            head_end = self._buffer.find(b"\r\n\r\n")
            if head_end < 0:
                return
            self._status = int(self._buffer[9:12])
            self._body = head_end + 4
            self._end = self._body + _content_length(bytes(self._buffer[:head_end]))
        if len(self._buffer) >= self._end and self._answer is not None:
            body = bytes(self._buffer[self._body : self._end])
            self._buffer.clear()
            self._end = 0
            self._answer.set_result((self._status, body))

    async def request(self, raw: bytes) -> tuple[int, bytes]:
        """Send the bytes of one request and return status and body of its answer."""
        assert self._transport is not None
        self._answer = asyncio.get_running_loop().create_future()
        self._transport.write(raw)
        return await self._answer

    def close(self) -> None:
        if self._transport is not None:
            self._transport.close()


def encode_request(method: str, path: str, body: Any = None, headers: dict[str, str] | None = None) -> bytes:
    """Return the bytes of a request; `body` is sent as JSON unless it is None."""
    payload = b"" if body is None else json.dumps(body).encode()
    lines = [f"{method} {path} HTTP/1.1", "host: 127.0.0.1"]
    lines += [f"{name}: {value}" for name, value in (headers or {}).items()]
    if body is not None:
        lines += ["content-type: application/json", f"content-length: {len(payload)}"]
    return "\r\n".join(lines).encode() + b"\r\n\r\n" + payload


def _content_length(head: bytes) -> int:
    for line in head.split(b"\r\n")[1:]:
        name, _, value = line.partition(b":")
        if name.lower() == b"content-length":
            return int(value)
    raise ValueError(f"an answer without Content-Length: {head[:200]!r}")
