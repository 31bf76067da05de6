"""Lines read by their place: the same text whatever surrounds it, cut around the match when they are long."""

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from app.sandbox.containment import go_on
from app.tools.matched_lines import CHANGED, ELLIPSIS, MAX_CHARACTERS, LineText, line_reader
from app.tools.text_encoding import encoding_named

Read = Callable[..., LineText]


@pytest.fixture
def read(tmp_path: Path) -> Iterator[Read]:
    """Write a file and read one line of it."""
    opened: list[int] = []

    def line(content: bytes, number: int, offset: int, column: int | None = None, label: str | None = None) -> LineText:
        file = tmp_path / "file"
        file.write_bytes(content)
        opened.append(os.open(file, os.O_RDONLY))
        encoding = None if label is None else encoding_named(label)
        return line_reader(opened[-1], encoding, go_on).line(number, offset, column)

    yield line
    for fd in opened:
        os.close(fd)


def test_a_line_is_what_stands_between_two_line_feeds(read: Read) -> None:
    content = b"first\r\nse\x0ccond\r\xe2\x80\xa8x\r\n\nlast"
    assert read(content, 1, 0) == LineText("first")
    assert read(content, 2, 7) == LineText("se\x0ccond\r\u2028x")
    assert read(content, 3, 21) == LineText("")
    assert read(content, 4, 22) == LineText("last")


def test_a_byte_order_mark_is_no_part_of_the_first_line(read: Read) -> None:
    assert read(b"\xef\xbb\xbfone\ntwo\n", 1, 0) == LineText("one")
    assert read(b"\xef\xbb\xbfone\ntwo\n", 2, 4) == LineText("two")
    for codec in ("utf-16-le", "utf-16-be"):
        content = "\ufeffhé\r\ntwo\n".encode(codec)
        assert read(content, 1, 0) == LineText("hé")
        assert read(content, 2, 5) == LineText("two")


def test_the_callers_encoding_counts_when_there_is_no_mark(read: Read) -> None:
    content = "café\nthé\n".encode("latin-1")
    assert read(content, 2, 6, 0, "iso-8859-1") == LineText("thé")
    assert read(content, 2, 5) == LineText("th\ufffd")
    assert read("\ufeffone\ntwo".encode("utf-16-le"), 2, 4, 0, "gb18030") == LineText("two")


def test_a_long_line_is_cut_around_its_match(read: Read) -> None:
    content = b"a\n" + b"k" * 4_000 + b"TARGET" + b"m" * 1_000 + b"\nb\n"
    line = read(content, 2, 2, 4_000)
    assert line.cut
    assert line.text.startswith(ELLIPSIS + "k")
    assert line.text.endswith("m" + ELLIPSIS)
    assert "TARGET" in line.text
    assert len(line.text) == MAX_CHARACTERS + 2


def test_the_ends_of_a_long_line_have_no_mark_of_a_cut(read: Read) -> None:
    start = read(b"HIT" + b"x" * 9_000 + b"\n", 1, 0, 0)
    assert start.text == "HIT" + "x" * (MAX_CHARACTERS - 3) + ELLIPSIS
    end = read(b"x" * 9_000 + b"HIT\r\n", 1, 0, 9_000)
    assert end.text.startswith(ELLIPSIS)
    assert end.text.endswith("xHIT")
    just = read(b"x" * MAX_CHARACTERS + b"\n", 1, 0, 3)
    assert just == LineText("x" * MAX_CHARACTERS)


@example(before=1_000, after=0, filler="\U0001f600漢", label=None)
@given(
    before=st.integers(0, 3_000),
    after=st.integers(0, 3_000),
    filler=st.sampled_from(["x", "é", "漢", "\U0001f600", "\U0001f600漢"]),
    label=st.sampled_from([None, "utf-16le", "utf-16be", "gb18030"]),
)
def test_no_cut_splits_a_character_or_loses_the_match(
    tmp_path_factory: pytest.TempPathFactory, before: int, after: int, filler: str, label: str | None
) -> None:
    line = filler * before + "HIT" + filler * after
    text = f"top\n{line}\nend\n"
    file = tmp_path_factory.getbasetemp() / "cut"
    file.write_bytes(text.encode(label or "utf-8"))
    fd = os.open(file, os.O_RDONLY)
    try:
        reader = line_reader(fd, None if label is None else encoding_named(label), go_on)
        found = reader.line(2, 4, len((filler * before).encode()))
    finally:
        os.close(fd)
    assert "HIT" in found.text
    assert "\ufffd" not in found.text
    assert found.text.strip(ELLIPSIS) in line
    assert found.cut == (len(line) > MAX_CHARACTERS)
    assert len(found.text) <= MAX_CHARACTERS + 2


def test_a_line_of_hundreds_of_megabytes_is_read_at_its_match_alone(tmp_path: Path) -> None:
    file = tmp_path / "huge"
    with file.open("wb") as huge:
        huge.truncate(400_000_000)
        huge.seek(300_000_000)
        huge.write(b"HIT")
    fd = os.open(file, os.O_RDONLY)
    try:
        found = line_reader(fd, None, go_on).line(1, 0, 300_000_000)
    finally:
        os.close(fd)
    assert found.cut
    assert "HIT" in found.text
    assert len(found.text) <= MAX_CHARACTERS + 2


def test_a_file_that_changed_meanwhile_says_so_instead_of_showing_another_text(read: Read) -> None:
    assert read(b"shorter than it was\n", 5, 500) == LineText(CHANGED)
    assert read(b"one line without the feed it had", 2, 8) == LineText(CHANGED)
    assert read("gone".encode("utf-16-le"), 7, 40, 0, "utf-16le") == LineText(CHANGED)


def test_lines_of_a_decoded_file_are_read_one_after_the_other(tmp_path: Path) -> None:
    lines = [f"{number} {'é' * (number % 300)}" for number in range(3_000)]
    file = tmp_path / "file"
    file.write_bytes(("\ufeff" + "\n".join(lines)).encode("utf-16-be"))
    fd = os.open(file, os.O_RDONLY)
    try:
        reader = line_reader(fd, None, go_on)
        for number in [1, 2, 3, 100, 101, 2_500, 2_999, 3_000]:
            assert reader.line(number, 0, 0).text == lines[number - 1]
    finally:
        os.close(fd)
