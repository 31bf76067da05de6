"""Bodies that are files: read as they arrive, with a bound on their size and on how long nothing may arrive."""

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator
from typing import Final

from fastapi import Request
from python_multipart.exceptions import FormParserError
from python_multipart.multipart import MultipartParser, MultipartState, parse_options_header

from app.api.dependencies import refuse_encoded
from app.api.errors import BadRequest, UnsupportedMediaType
from app.errors import AppError, PayloadTooLarge
from app.services.files import Part

IDLE_SECONDS: Final = 60.0
PARTS_MAX: Final = 1_000
HEADER_MAX_BYTES: Final = 8_192
HEADERS_MAX: Final = 16


def streamed_body(request: Request, limit: int) -> AsyncGenerator[bytes, None]:
    """Return the body as it arrives, at most `limit` bytes of it.

    Raises:
        UnsupportedMediaType: it is compressed.
        PayloadTooLarge: it says that it is longer, or it is (when it is read).
        BadRequest: nothing came for a minute (when it is read).
        ClientDisconnect: the client went away (when it is read).
    """
    refuse_encoded(request)
    length = request.headers.get("content-length", "")
    if length.isdigit() and int(length) > limit:
        raise _too_large(limit)
    return _arriving(request, limit)


async def _arriving(request: Request, limit: int) -> AsyncGenerator[bytes, None]:
    chunks = request.stream()
    left = limit
    while True:
        try:
            async with asyncio.timeout(IDLE_SECONDS):
                chunk = await anext(chunks, None)
        except TimeoutError:
            raise BadRequest(f"the body stopped arriving: nothing came for {IDLE_SECONDS:.0f} s") from None
        if chunk is None:
            return
        left -= len(chunk)
        if left < 0:
            raise _too_large(limit)
        if chunk:
            yield chunk


def _too_large(limit: int) -> PayloadTooLarge:
    return PayloadTooLarge(f"a body with files may have {limit} bytes here")


def form_parts(request: Request, limit: int) -> AsyncGenerator[Part, None]:
    """Return the parts of a multipart/form-data body as they arrive; what is not read of one is skipped.

    A part's path is its `filename`, and when it has none its `name`, both in UTF-8. Where that is something else or
    empty, as for a field of a form nobody chose a file for, the path is None.

    Raises:
        UnsupportedMediaType: the body is something else.
        BadRequest: it is not well formed, or ends too early (when it is read).
        PayloadTooLarge: it has more than `limit` bytes or more than 1,000 parts.
    """
    kind, parameters = parse_options_header(request.headers.get("content-type"))
    boundary = parameters.get(b"boundary", b"")
    if kind != b"multipart/form-data" or not boundary:
        raise UnsupportedMediaType("send the files as multipart/form-data with a boundary")
    try:
        form = _Form(boundary)
    except FormParserError as error:
        raise BadRequest(f"the form is not well formed: {error}") from None
    return _parts(form, streamed_body(request, limit))


class _Form:
    """What the parser has found and nobody has taken: a part's start (its path), its bytes, its end."""

    def __init__(self, boundary: bytes) -> None:
        self.found: deque[_Start | bytes | None] = deque()
        self.error: AppError | None = None
        self._count = 0
        self._field = b""
        self._value = b""
        self._path: str | None = None
        self._parser = MultipartParser(
            boundary,
            {
                "on_part_begin": self._on_part_begin,
                "on_header_field": self._on_header_field,
                "on_header_value": self._on_header_value,
                "on_header_end": self._on_header_end,
                "on_headers_finished": self._on_headers_finished,
                "on_part_data": self._on_part_data,
                "on_part_end": self._on_part_end,
            },
            max_header_count=HEADERS_MAX,
            max_header_size=HEADER_MAX_BYTES,
        )

    def feed(self, data: bytes) -> None:
        """Parse more of the body. What is wrong with it is kept: what comes before that is taken first."""
        try:
            self._parser.write(data)
        except FormParserError as error:
            self.error = BadRequest(f"the form is not well formed: {error}")
        except PayloadTooLarge as error:
            self.error = error

    def end(self) -> None:
        if self._parser.state is not MultipartState.END:
            raise BadRequest("the form ends too early: its last boundary is missing")

    def _on_part_begin(self) -> None:
        self._count += 1
        if self._count > PARTS_MAX:
            raise PayloadTooLarge(f"a form may have {PARTS_MAX} parts; send an archive instead")
        self._path = None

    def _on_header_field(self, data: bytes, start: int, end: int) -> None:
        self._field += data[start:end]

    def _on_header_value(self, data: bytes, start: int, end: int) -> None:
        self._value += data[start:end]

    def _on_header_end(self) -> None:
        if self._field.lower() == b"content-disposition":
            self._path = _path(self._value)
        self._field = self._value = b""

    def _on_headers_finished(self) -> None:
        self.found.append(_Start(self._path))

    def _on_part_data(self, data: bytes, start: int, end: int) -> None:
        self.found.append(data[start:end])

    def _on_part_end(self) -> None:
        self.found.append(None)


class _Start:
    __slots__ = ("path",)

    def __init__(self, path: str | None) -> None:
        self.path = path


def _path(disposition: bytes) -> str | None:
    kind, parameters = parse_options_header(disposition.decode("latin-1"))
    raw = parameters.get(b"filename", parameters.get(b"name"))
    if kind != b"form-data" or not raw:
        return None
    try:
        return raw.decode()
    except UnicodeDecodeError:
        return None


async def _parts(form: _Form, body: AsyncIterator[bytes]) -> AsyncGenerator[Part, None]:
    async for start in _found(form, body):
        if isinstance(start, _Start):
            chunks = _chunks(form, body)
            yield Part(start.path, chunks)
            async for _ in chunks:
                pass


async def _chunks(form: _Form, body: AsyncIterator[bytes]) -> AsyncGenerator[bytes, None]:
    async for piece in _found(form, body):
        if not isinstance(piece, bytes):
            return
        yield piece


async def _found(form: _Form, body: AsyncIterator[bytes]) -> AsyncGenerator["_Start | bytes | None", None]:
    while True:
        while form.found:
            yield form.found.popleft()
        if form.error is not None:
            raise form.error
        data = await anext(body, None)
        if data is None:
            form.end()
            return
        form.feed(data)
