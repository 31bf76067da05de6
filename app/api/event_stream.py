"""Answers that go on: events (Server-Sent Events, or JSON lines) and live output.

There is a bound on how long a client may not read, and one that is open ends with its key (`app.services.streams`).
"""

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Generator, Mapping
from contextlib import aclosing, asynccontextmanager
from functools import partial
from types import coroutine
from typing import Any, Final, cast

import structlog
from sse_starlette.event import ServerSentEvent
from sse_starlette.sse import EventSourceResponse, SendTimeoutError
from starlette.requests import ClientDisconnect
from starlette.responses import StreamingResponse
from starlette.types import Message, Receive, Scope, Send

from app.api.negotiation import EVENT_STREAM, JSON_LINES
from app.errors import AppError
from app.services.streams import StreamSlot

PING_SECONDS: Final = 15
SEND_SECONDS: Final = 30.0
_HEADERS: Final = {"Cache-Control": "no-cache, no-transform"}

_log = structlog.get_logger(__name__)


def _ping() -> ServerSentEvent:
    return ServerSentEvent(comment="ping", sep="\n")


@asynccontextmanager
async def _until_cut(slot: StreamSlot | None) -> AsyncGenerator[asyncio.Timeout, None]:
    """Run what a slot was taken for, close the slot, and give what tells whether it was cut: it has `expired`.

    A time limit without a time costs no timer, and is what ends a task from elsewhere without ending who waits for it.
    """
    limit = asyncio.timeout(None)
    try:
        async with limit:
            if slot is not None:
                slot.begin(partial(limit.reschedule, 0))
            yield limit
    except TimeoutError:
        if not limit.expired():
            raise
    finally:
        if slot is not None:
            slot.close()


def _empty_line() -> ServerSentEvent:
    # The library sends bytes as they are; its annotation does not say so.
    return cast(ServerSentEvent, b"\n")


async def _lines(frames: AsyncGenerator[bytes, None]) -> AsyncGenerator[bytes, None]:
    """Yield the JSON of whole SSE frames, a line for each event."""
    async with aclosing(frames):
        async for chunk in frames:
            yield b"".join(line[6:] for line in chunk.splitlines(keepends=True) if line.startswith(b"data: "))


@coroutine
def _rest(steps: Generator[Any, Any, None], waits_for: Any) -> Generator[Any, Any, None]:
    """Go on with what was begun by hand: `waits_for` is what its first step gave to the event loop."""
    while True:
        try:
            value = yield waits_for
        except BaseException as error:  # noqa: BLE001 - a cancel among others, which belongs to what waits
            step = partial(steps.throw, error)
        else:
            step = partial(steps.send, value)
        try:
            waits_for = step()
        except StopIteration:
            return


class EventStream(EventSourceResponse):
    """Sends whole SSE frames as they come, a comment every 15 s, and ends with the frames.

    As `JSON_LINES` only what stands behind `data:` is sent, a line for each event, and an empty line every 15 s.

    A client that reads nothing for 30 s is dropped. `on_disconnect` is awaited when the client went away, or was
    dropped, before the last frame. `slot` is closed when nothing more is sent, whatever the reason; when it is cut, the
    answer ends as it does when the service stops.
    """

    def __init__(
        self,
        frames: AsyncGenerator[bytes, None],
        form: str = EVENT_STREAM,
        *,
        headers: Mapping[str, str] | None = None,
        slot: StreamSlot | None = None,
        on_disconnect: Callable[[], Awaitable[None]] | None = None,
    ) -> None:
        if form == JSON_LINES:
            frames = _lines(frames)
        super().__init__(
            frames,
            media_type=form,
            headers={**_HEADERS, **(headers or {})},
            ping=PING_SECONDS,
            ping_message_factory=_empty_line if form == JSON_LINES else _ping,
            send_timeout=SEND_SECONDS,
            sep="\n",
            client_close_handler_callable=self._note_disconnect,
        )
        self._frames = frames
        self._slot = slot
        self._on_disconnect = on_disconnect
        self._gone = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        begun = complete = False

        async def send_and_note(message: Message) -> None:
            nonlocal begun, complete
            begun = True
            complete = message["type"] == "http.response.body" and not message.get("more_body", False)
            await send(message)

        try:
            async with _until_cut(self._slot):
                await super().__call__(scope, receive, send_and_note)
            if not begun:
                # Cut before a client read the beginning of it, so there is nothing to end.
                raise ClientDisconnect
            if not complete and not self._gone:
                # Cut because the service stops, or with its key: end the body properly. Without `batch_end` a client
                # knows what it missed.
                await self._send_with_timeout(send, {"type": "http.response.body", "body": b"", "more_body": False})
        except SendTimeoutError:
            self._gone = True
            _log.info("slow_client_dropped", path=scope["path"], seconds=SEND_SECONDS)
            raise ClientDisconnect from None
        except AppError as error:
            # The database went away. A client that has the beginning asks for the rest later.
            if not begun:
                raise
            _log.warning("answer_cut", path=scope["path"], code=error.code, detail=error.detail)
            await self._send_with_timeout(send, {"type": "http.response.body", "body": b"", "more_body": False})
        finally:
            # A generator that was never started runs no `finally` of its own, so this is the place for both.
            await self._frames.aclose()
            if self._gone and self._on_disconnect is not None:
                await self._on_disconnect()

    async def _send_with_timeout(self, send: Send, message: Message) -> None:
        """Send a message, with a time limit when it has to wait; what there is room for is sent without one.

        This is the library's own step, called once for each event and follower: a timer for each would cost more than
        all the rest of it.
        """
        steps = send(message).__await__()
        try:
            waits_for = next(steps)
        except StopIteration:
            return
        try:
            async with asyncio.timeout(SEND_SECONDS):
                await _rest(steps, waits_for)
        except TimeoutError:
            raise SendTimeoutError from None

    async def _note_disconnect(self, _message: Message) -> None:
        self._gone = True


class BoundedStream(StreamingResponse):
    """A StreamingResponse that drops a client which reads nothing for 30 s, and closes what it reads from.

    An error on the way cuts the connection, so that nobody takes what came for the whole. So does the cut of `slot`,
    which is closed when nothing more is sent.
    """

    def __init__(
        self,
        chunks: AsyncGenerator[bytes, None],
        status_code: int,
        headers: Mapping[str, str],
        media_type: str,
        *,
        slot: StreamSlot | None = None,
    ) -> None:
        super().__init__(chunks, status_code, headers, media_type)
        self._chunks = chunks
        self._slot = slot

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def send_in_time(message: Message) -> None:
            try:
                async with asyncio.timeout(SEND_SECONDS):
                    await send(message)
            except TimeoutError:
                _log.info("slow_client_dropped", path=scope["path"], seconds=SEND_SECONDS)
                raise ClientDisconnect from None

        try:
            async with _until_cut(self._slot) as limit:
                await super().__call__(scope, receive, send_in_time)
            if limit.expired():
                raise ClientDisconnect
        except AppError as error:
            _log.warning("answer_cut", path=scope["path"], code=error.code, detail=error.detail)
            raise ClientDisconnect from None
        finally:
            await self._chunks.aclose()
