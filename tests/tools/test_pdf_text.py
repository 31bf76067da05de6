"""PDF files: their text by page, in bounds, with a notice how to go on; a reason where there is none."""

from collections.abc import Sequence
from typing import Any

import pytest

from app.errors import ErrorCode, ToolError
from app.tools.pdf_text import MAX_PAGES, PdfPages, read_pdf
from tests.support.sample_files import pdf_file

THREE = ("Hello\nworld", "the second", "the third")


def pages_of(data: bytes, *, offset: int = 1, limit: int | None = None, max_bytes: int = 10_000) -> PdfPages:
    return read_pdf(data, "x.pdf", offset=offset, limit=limit, max_bytes=max_bytes)


def refusal(data: bytes, **more: Any) -> ToolError:
    with pytest.raises(ToolError) as caught:
        pages_of(data, **more)
    return caught.value


def test_every_page_is_shown_under_its_number() -> None:
    assert pages_of(pdf_file(THREE)) == PdfPages(
        "[Page 1 of 3]\nHello\nworld\n\n[Page 2 of 3]\nthe second\n\n[Page 3 of 3]\nthe third", 3, 1, 3, None
    )


def test_offset_and_limit_count_pages_and_a_notice_says_how_to_go_on() -> None:
    assert pages_of(pdf_file(THREE), offset=2, limit=1) == PdfPages(
        "[Page 2 of 3]\nthe second\n\n[Showing pages 2-2 of 3. Continue with offset=3.]", 3, 2, 2, 3
    )
    assert pages_of(pdf_file(THREE), offset=2, limit=9).next_offset is None


@pytest.mark.parametrize(("pages", "has"), [(THREE, "3 pages, so offset can be 1 to 3"), (("x",), "1 page, so")])
def test_an_offset_past_the_last_page_says_how_many_there_are(pages: Sequence[str], has: str) -> None:
    error = refusal(pdf_file(pages), offset=len(pages) + 1)
    assert (error.code, error.details) == (ErrorCode.INVALID_ARGUMENTS, {"pages": len(pages)})
    assert has in error.message


def test_following_the_notice_shows_every_page_once() -> None:
    texts = [f"text of page {number} " + "word " * (number * 7 % 60) for number in range(1, 250)]
    data = pdf_file(texts)
    seen: list[str] = []
    offset: int | None = 1
    while offset is not None:
        shown = pages_of(data, offset=offset, max_bytes=4_000)
        assert len(shown.text.encode()) <= 4_000
        body = shown.text.partition("\n\n[Showing")[0]
        parts = body.split("\n\n")
        assert [part.partition("\n")[0] for part in parts] == [
            f"[Page {number} of 249]" for number in range(shown.start_page, shown.end_page + 1)
        ]
        seen += [part.partition("\n")[2] for part in parts]
        offset = shown.next_offset
    assert seen == [text.rstrip() for text in texts]


def test_one_call_shows_a_bounded_number_of_pages() -> None:
    data = pdf_file([f"page {number}" for number in range(MAX_PAGES + 20)])
    for limit in (None, 10_000):
        assert pages_of(data, limit=limit).end_page == MAX_PAGES


@pytest.mark.parametrize("max_bytes", [256, 1_000])
def test_a_page_that_does_not_fit_is_cut_and_says_so(max_bytes: int) -> None:
    shown = pages_of(pdf_file(["x" * 5_000 + "end", "next"]), max_bytes=max_bytes)
    assert len(shown.text.encode()) <= max_bytes
    assert shown.text.startswith("[Page 1 of 2]\nx")
    assert "[The text of page 1 has 5003 characters; the rest of it is not shown.]" in shown.text
    assert shown.next_offset == 2
    # After a page that fits, it waits for the next call.
    assert pages_of(pdf_file(["first", "x" * 5_000]), max_bytes=max_bytes).end_page == 1


def test_pages_without_text_are_told_as_such() -> None:
    assert "[Page 1 of 2]\n(no text)\n\n[Page 2 of 2]\nsome" in pages_of(pdf_file(["", "some"])).text
    shown = pages_of(pdf_file(["", "", "late"]), limit=2)
    assert "There is no text on pages 1-2 of x.pdf" in shown.text
    assert shown.text.endswith("[Showing pages 1-2 of 3. Continue with offset=3.]")


def test_letters_are_those_of_the_page() -> None:
    assert "Größe — “naïve” €" in pages_of(pdf_file(["Größe — “naïve” €"])).text


@pytest.mark.parametrize(
    "data",
    [
        b"%PDF-1.4\n1 0 obj<<>>endobj\ntrailer<<>>\n%%EOF\0\xff",
        b"%PDF-1.7\n" + bytes(range(256)) * 40,
        pdf_file(THREE)[:60],
        pdf_file(()),
    ],
)
def test_a_damaged_file_is_an_error_that_says_so(data: bytes) -> None:
    error = refusal(data)
    assert error.code is ErrorCode.UNSUPPORTED
    assert f"x.pdf (PDF, {len(data)} bytes) is damaged" in error.message


def test_an_encrypted_file_says_what_to_do() -> None:
    error = refusal(pdf_file(THREE, encrypted=True))
    assert error.code is ErrorCode.UNSUPPORTED
    assert "is encrypted and needs a password; make a copy without one" in error.message
