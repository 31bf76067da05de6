"""All calls that meet some conditions as JSON lines: however many, in bounded memory."""

from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any, Final

import orjson
from starlette.responses import Response
from starlette.types import Scope

from app.api.errors import problem_document
from app.api.event_stream import BoundedStream
from app.api.negotiation import JSON_LINES
from app.api.wire import call_json, encode_cursor
from app.domain.tool_call import CallRecord
from app.errors import AppError
from app.services.batches import BatchService
from app.storage.base import Page

CHUNK_BYTES: Final = 64 * 1024

_NOTHING: Final[Page[CallRecord]] = Page((), None)


class CallExport:
    """An export of at most `limit` calls (None: of all).

    A failure before the first line is an ordinary problem. A later one is the last line, `{"error", "nextCursor"}` with
    the problem and where to go on, and then the connection is cut, so that nobody takes the lines for all.
    """

    def __init__(self, batches: BatchService, limit: int | None) -> None:
        self._batches = batches
        self._left = limit

    async def response(
        self, scope: Scope, pages: AsyncGenerator[Page[CallRecord], None], before: str | None
    ) -> Response:
        """Return the answer, once the first page has been read; `before` is the id the export goes on after."""
        first = await anext(pages, _NOTHING)
        return BoundedStream(self._lines(scope, first, pages, before), 200, {}, JSON_LINES)

    async def _lines(
        self, scope: Scope, page: Page[CallRecord], pages: AsyncGenerator[Page[CallRecord], None], last: str | None
    ) -> AsyncGenerator[bytes, None]:
        chunk: list[bytes] = []
        size = 0
        async with aclosing(pages):
            try:
                while self._left != 0:
                    for listed in page.items:
                        call = await self._batches.whole_call(listed)
                        if call is not None:
                            chunk.append(orjson.dumps(call_json(call)) + b"\n")
                            size += len(chunk[-1])
                        last = listed.id
                        if self._left is not None:
                            self._left -= 1
                        if size >= CHUNK_BYTES:
                            yield b"".join(chunk)
                            chunk, size = [], 0
                        if self._left == 0:
                            break
                    if page.next_before is None or self._left == 0:
                        break
                    last = page.next_before
                    page = await anext(pages, _NOTHING)
            except AppError as error:
                yield b"".join([*chunk, _last_line(scope, error, last)])
                raise
        if chunk:
            yield b"".join(chunk)


def _last_line(scope: Scope, error: AppError, last: str | None) -> bytes:
    line: dict[str, Any] = {
        "error": problem_document(scope, error.code, error.detail),
        "nextCursor": None if last is None else encode_cursor(last),
    }
    return orjson.dumps(line) + b"\n"
