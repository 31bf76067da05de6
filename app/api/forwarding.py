"""Requests for what stands in the directories of another node go on to a process of that node, as they came.

The caller's own key goes along, and that process looks at it as if it had been asked first. Bodies pass in both
directions piece by piece.
"""

import random
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Final

import structlog
from fastapi import FastAPI, Request
from starlette.requests import ClientDisconnect
from starlette.responses import Response, StreamingResponse

from app.api.errors import problem
from app.domain.node import Process
from app.errors import ConfigurationError, OwnerGone

if TYPE_CHECKING:
    from httpx2 import AsyncClient
    from httpx2 import Response as Answer

CONNECT_SECONDS: Final = 3.0
QUIET_SECONDS: Final = 300.0
"""How long the other process may say nothing, as while it unpacks an archive, and take nothing of a body."""
CONNECTIONS: Final = 256

FORWARDED: Final = "x-toolcrib-forwarded"
"""Marks what was forwarded once, so that two processes that disagree do not send it to and fro."""

_SAFE: Final = frozenset({"GET", "HEAD"})
_HOP_BY_HOP: Final = frozenset(
    {
        "connection",
        "keep-alive",
        "proxy-authenticate",
        "proxy-connection",
        "te",
        "trailer",
        "transfer-encoding",
        "upgrade",
    }
)
# Given by this process to every answer, or counted by it for the key.
_OURS: Final = frozenset(
    {
        "cross-origin-resource-policy",
        "date",
        "ratelimit",
        "ratelimit-policy",
        "referrer-policy",
        "server",
        "x-content-type-options",
        "x-request-id",
    }
)

_log = structlog.get_logger(__name__)


class Elsewhere(Exception):
    """The request is for a process of another node: one of these."""

    def __init__(self, processes: Sequence[Process]) -> None:
        super().__init__(f"{len(processes)} processes")
        self.processes = tuple(processes)


class Forwarding:
    """Sends requests on to other processes.

    Args:
        client: what asks them.
        not_connected: raised when nothing of the request has reached a process.
        broken: raised when it may have.
    """

    def __init__(
        self, client: "AsyncClient", not_connected: tuple[type[Exception], ...], broken: type[Exception]
    ) -> None:
        self._client = client
        self._not_connected = not_connected
        self._broken = broken

    async def answer(self, request: Request, processes: Sequence[Process]) -> Response:
        """Return what one of some processes answers; another one is tried when the first cannot be reached.

        So it is when the first breaks off before its answer has begun and the request changes nothing.

        Raises:
            OwnerGone: none of them can be reached, or one broke off and the request may have taken effect.
        """
        if FORWARDED in request.headers:
            raise OwnerGone("the processes do not agree about whose the workspace is; try again in a moment")
        for process in random.sample(processes, len(processes)):
            if process.url is None:
                continue
            try:
                return self._passed_on(await self._send(request, process.url))
            except self._not_connected as error:
                _log.warning("process_not_reached", process_id=process.id, url=process.url, reason=str(error))
            except self._broken as error:
                _log.warning("process_broke_off", process_id=process.id, url=process.url, reason=str(error))
                if request.method not in _SAFE:
                    raise OwnerGone(
                        "the process that has the workspace's directory broke off: what was asked may have been done, "
                        "so look before you ask for it again"
                    ) from None
        raise OwnerGone("no process of the workspace's node could be reached; try again in a moment")

    async def _send(self, request: Request, url: str) -> "Answer":
        path = request.scope["raw_path"].decode("ascii")
        query = request.scope["query_string"].decode("ascii")
        headers = [
            (name, value)
            for name, value in request.headers.raw
            if name.decode("latin-1") not in _HOP_BY_HOP and name not in {b"host", b"x-request-id"}
        ]
        headers += [
            (FORWARDED.encode(), b"1"),
            (b"x-request-id", request.scope["state"]["request_id"].encode("ascii")),
        ]
        has_body = "content-length" in request.headers or "transfer-encoding" in request.headers
        sent = self._client.build_request(
            request.method,
            f"{url}{path}{'?' if query else ''}{query}",
            headers=headers,
            content=request.stream() if has_body else None,
        )
        return await self._client.send(sent, stream=True)

    def _passed_on(self, answer: "Answer") -> Response:
        async def body() -> AsyncGenerator[bytes, None]:
            try:
                async for chunk in answer.aiter_raw():
                    yield chunk
            except self._broken as error:
                # The connection is cut, so that nobody takes what came for the whole.
                _log.warning("answer_broke_off", url=str(answer.url), reason=str(error))
                raise ClientDisconnect from None
            finally:
                await answer.aclose()

        response = StreamingResponse(body(), answer.status_code)
        response.raw_headers = [
            (name.lower(), value)
            for name, value in answer.headers.raw
            if name.decode("latin-1").lower() not in _HOP_BY_HOP | _OURS
        ]
        return response


@asynccontextmanager
async def open_forwarding() -> AsyncIterator[Forwarding]:
    """Give what forwards requests while the context is open.

    Raises:
        ConfigurationError: what it takes is not installed.
    """
    try:
        import httpx2
    except ImportError:
        raise ConfigurationError(
            "requests to other nodes need httpx2, which is not installed: install toolcrib[distributed]."
        ) from None
    timeout = httpx2.Timeout(QUIET_SECONDS, connect=CONNECT_SECONDS)
    limits = httpx2.Limits(max_connections=CONNECTIONS)
    async with httpx2.AsyncClient(timeout=timeout, limits=limits, trust_env=False) as client:
        not_connected = (httpx2.ConnectError, httpx2.ConnectTimeout, httpx2.PoolTimeout)
        yield Forwarding(client, not_connected, httpx2.TransportError)


def add_forwarding(app: FastAPI) -> None:
    """Answer what raises Elsewhere with the answer of another process."""
    app.add_exception_handler(Elsewhere, _forward)


async def _forward(request: Request, error: Exception) -> Response:
    assert isinstance(error, Elsewhere)  # noqa: S101 - registered for it alone
    forwarding: Forwarding | None = request.app.state.services.forwarding
    if forwarding is None:
        return problem(
            request.scope,
            OwnerGone.code,
            "the workspace is of another node, and this process sends no requests on (TOOLCRIB_BACKEND): ask a process "
            "of that node",
        )
    try:
        return await forwarding.answer(request, error.processes)
    except OwnerGone as gone:
        return problem(request.scope, gone.code, gone.detail)
