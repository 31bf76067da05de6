"""The text of a PDF, page by page."""

import codecs
from collections.abc import Iterator
from contextlib import closing
from dataclasses import asdict, dataclass
from typing import Any, Final

import pypdfium2

from app.errors import ErrorCode, ToolError

MAX_PAGES: Final = 100
"""How many pages one call shows; a page takes some milliseconds."""

MAX_FILE_BYTES: Final = 64 * 1_048_576
MIME_TYPE: Final = "application/pdf"

_WRONG_PASSWORD: Final = 4
_UNKNOWN_SECURITY: Final = 5
_ROOM_FOR_NOTICE: Final = 160

# A hyphen at a line's end is one of the first two, and what else is below a blank has no meaning in a text.
_CHARACTERS: Final = {0x02: "-", 0xFFFE: "-"} | {
    code: None for code in (*range(0x20), 0x7F) if code not in (0x02, 0x09, 0x0A)
}


@dataclass(frozen=True, slots=True)
class PdfPages:
    """`text` shows the pages from `start_page` to `end_page` of `pages`, counted from 1, notice included."""

    text: str
    pages: int
    start_page: int
    end_page: int
    next_offset: int | None


@dataclass(frozen=True, slots=True)
class _PageText:
    """A page's text, of `characters` in all: its beginning when it is `cut` as there are more than can be shown."""

    text: str
    characters: int
    cut: bool


def prepare() -> None:
    codecs.lookup("utf-16-le")


def decode(data: bytes, *, shown: str, offset: int, limit: int | None, max_bytes: int) -> dict[str, Any]:
    return asdict(read_pdf(data, shown, offset=offset, limit=limit, max_bytes=max_bytes))


def read_pdf(data: bytes, shown: str, *, offset: int, limit: int | None, max_bytes: int) -> PdfPages:
    """Return the text of at most `limit` pages from page `offset` on, in at most `max_bytes` bytes of UTF-8.

    A page that does not fit ends what is shown. The first one is cut where it has to be, and says so. PDFium must not
    be called by two threads at once.

    Raises:
        ToolError: `unsupported` (encrypted or damaged), `invalid_arguments` (an offset past the last page).
    """
    try:
        document = pypdfium2.PdfDocument(data)
    except pypdfium2.PdfiumError as error:
        raise _unreadable(shown, len(data), getattr(error, "err_code", None)) from None
    with closing(document):
        return _shown_pages(document, shown, offset, limit, max_bytes)


def _shown_pages(
    document: pypdfium2.PdfDocument,
    shown: str,
    offset: int,
    limit: int | None,
    max_bytes: int,
) -> PdfPages:
    pages = len(document)
    if offset > pages:
        allowed = f"1 to {pages}" if pages > 1 else "1"
        raise ToolError(
            ErrorCode.INVALID_ARGUMENTS,
            f"offset: there is no page {offset}; {shown} has {pages} {'page' if pages == 1 else 'pages'}, so offset "
            f"can be {allowed}",
            {"pages": pages},
        )
    wanted = min(MAX_PAGES if limit is None else min(limit, MAX_PAGES), pages - offset + 1)
    budget = max_bytes - _ROOM_FOR_NOTICE
    parts: list[str] = []
    used = 0
    with_text = False
    for number, page in enumerate(_texts(document, range(offset, offset + wanted), max_bytes), offset):
        part = _part(number, pages, page.text)
        size = len(part.encode()) + 2
        if used + size > budget or page.cut:
            if parts:
                break
            part = _cut_part(number, pages, page, budget)
            with_text = True
            parts.append(part)
            break
        with_text = with_text or bool(page.text)
        parts.append(part)
        used += size
    end = offset + len(parts) - 1
    text = "\n\n".join(parts)
    if not with_text:
        which = f"page {offset}" if end == offset else f"pages {offset}-{end}"
        text = (
            f"There is no text on {which} of {shown}: scanned, perhaps. bash may turn pages into images that read can "
            "show (pdftoppm) or into text (ocrmypdf), where these programs are installed."
        )
    if end < pages:
        text += f"\n\n[Showing pages {offset}-{end} of {pages}. Continue with offset={end + 1}.]"
    return PdfPages(text, pages, offset, end, end + 1 if end < pages else None)


def _texts(document: pypdfium2.PdfDocument, numbers: range, max_characters: int) -> Iterator[_PageText]:
    for number in numbers:
        try:
            with closing(document[number - 1]) as page, closing(page.get_textpage()) as content:
                characters = content.count_chars()
                text: str = content.get_text_range(0, min(characters, max_characters))
        except pypdfium2.PdfiumError:
            yield _PageText("(this page is damaged and cannot be read)", 0, cut=False)
            continue
        plain = text.replace("\r\n", "\n").replace("\r", "\n").translate(_CHARACTERS)
        lines = "\n".join(line.rstrip() for line in plain.split("\n")).strip("\n")
        yield _PageText(lines, characters, characters > max_characters)


def _part(number: int, pages: int, text: str) -> str:
    return f"[Page {number} of {pages}]\n{text or '(no text)'}"


def _cut_part(number: int, pages: int, page: _PageText, budget: int) -> str:
    note = f"\n[The text of page {number} has {page.characters} characters; the rest of it is not shown.]"
    room = budget - len(_part(number, pages, "").encode()) - len(note)
    shown = page.text.encode()[: max(room, 0)].decode("utf-8", "ignore")
    return _part(number, pages, shown) + note


def _unreadable(shown: str, size: int, code: int | None) -> ToolError:
    if code == _WRONG_PASSWORD:
        why = "is encrypted and needs a password; make a copy without one (bash: qpdf --decrypt, where it is installed)"
    elif code == _UNKNOWN_SECURITY:
        why = "is encrypted in a way that is not known here; make a copy without encryption"
    else:
        why = "is damaged and has no page that can be read; get the file again, or look into it with bash"
    return ToolError(ErrorCode.UNSUPPORTED, f"{shown} (PDF, {size} bytes) {why}", {"mimeType": MIME_TYPE})
