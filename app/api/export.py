"""A whole list as JSON lines: everything that meets some conditions, however much, in bounded memory."""

from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing
from typing import Any, Final, Protocol, TypeVar

import orjson
from starlette.responses import Response
from starlette.types import Scope

from app.api.errors import problem_document
from app.api.event_stream import BoundedStream
from app.api.negotiation import JSON_LINES
from app.api.wire import encode_cursor
from app.errors import AppError
from app.storage.base import Page

CHUNK_BYTES: Final = 64 * 1024


class Listed(Protocol):
    """What stands in a list: its id is where the list can go on."""

    @property
    def id(self) -> str: ...


Item = TypeVar("Item", bound=Listed)
Shown = Callable[[Item], Awaitable[dict[str, Any] | None]]


async def export(
    scope: Scope, pages: AsyncGenerator[Page[Item], None], shown: Shown[Item], *, before: str | None, limit: int | None
) -> Response:
    """Return an answer with a line for each item of the pages, once the first page has been read.

    A failure before that is an ordinary problem. A later one is the last line, `{"error", "nextCursor"}` with the
    problem and where to go on, and then the connection is cut, so that nobody takes the lines for all.

    Args:
        scope: the request's.
        pages: read one after another, as the client takes them.
        shown: gives the JSON of an item; None when it was removed meanwhile.
        before: the id the pages go on after; None when they begin with the newest.
        limit: how many items at most; None is all.
    """
    first: Page[Item] = await anext(pages, Page((), None))
    return BoundedStream(_lines(scope, first, pages, shown, before, limit), 200, {}, JSON_LINES)


async def _lines(
    scope: Scope,
    page: Page[Item],
    pages: AsyncGenerator[Page[Item], None],
    shown: Shown[Item],
    last: str | None,
    left: int | None,
) -> AsyncGenerator[bytes, None]:
    chunk: list[bytes] = []
    size = 0
    async with aclosing(pages):
        try:
            while left != 0:
                for item in page.items:
                    line = await shown(item)
                    if line is not None:
                        chunk.append(orjson.dumps(line) + b"\n")
                        size += len(chunk[-1])
                    last = item.id
                    if left is not None:
                        left -= 1
                    if size >= CHUNK_BYTES:
                        yield b"".join(chunk)
                        chunk, size = [], 0
                    if left == 0:
                        break
                if page.next_before is None or left == 0:
                    break
                last = page.next_before
                page = await anext(pages, Page((), None))
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
