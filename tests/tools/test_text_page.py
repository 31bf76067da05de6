"""Windows of lines: whole lines, counted once, whatever the encoding, the ends and the size, in bounded memory."""

import ast
import os
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from app.domain.encodings import TextEncoding
from app.errors import ToolError
from app.tools.line_index import LineIndex
from app.tools.text_encoding import UTF_8, detect_encoding, encoding_named
from app.tools.text_page import Page, Window, read_beginning, read_page

REPOSITORY = Path(__file__).parents[2]


def page_of(file: Path, window: Window, *, size: int | None = None, index: LineIndex | None = None) -> Page:
    """Return a page of a file that is said to have `size` bytes."""
    fd = os.open(file, os.O_RDONLY)
    try:
        claimed = os.fstat(fd).st_size if size is None else size
        beginning = read_beginning(fd, claimed)
        encoding = detect_encoding(beginning.sample, whole=beginning.whole, encoding=window.encoding)
        assert isinstance(encoding, TextEncoding)
        return read_page(fd, claimed, beginning, encoding, window, lambda: None, index)
    finally:
        os.close(fd)


def test_a_file_that_grows_or_shrinks_meanwhile_ends_where_reading_ends(tmp_path: Path) -> None:
    file = tmp_path / "f"
    file.write_bytes(b"a\nb\n")
    for claimed in (0, 1, 3, 4, 5, 100, 10**9):
        page = page_of(file, Window("f", 1, 10, 1000), size=claimed)
        assert (page.text, page.lines, page.next_offset) == ("   1│ a\n   2│ b", 2, None)


def test_reading_stops_when_the_call_has_to(tmp_path: Path) -> None:
    file = tmp_path / "big.txt"
    file.write_bytes(b"x\n" * 5_000_000)
    steps = 0
    where = 0

    def check() -> None:
        nonlocal steps
        steps += 1
        if steps == 3:
            raise InterruptedError

    with file.open("rb", buffering=0) as opened:
        beginning = read_beginning(opened.fileno(), 10_000_000)
        with pytest.raises(InterruptedError):
            read_page(opened.fileno(), 10_000_000, beginning, UTF_8, Window("big.txt", 4_000_000, 10, 1000), check)
        where = opened.tell()
    assert where < 1_000_000


LINES = st.text(st.sampled_from("ab 漢é😀\r\f\u2028"), max_size=30)
ENDS = st.sampled_from([["\n"], ["\r\n"], ["\n", "\r\n"]])
CODECS = st.sampled_from(["utf-8", "utf-8-sig", "utf-16", "utf-16-le", "gb18030"])


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    lines=st.lists(LINES, min_size=1, max_size=40),
    ends=ENDS.flatmap(lambda ends: st.lists(st.sampled_from(ends), min_size=40, max_size=40)),
    final=st.booleans(),
    codec=CODECS,
    limit=st.integers(1, 12),
    numbered=st.booleans(),
)
def test_following_next_offset_loses_and_repeats_no_line(
    tmp_path: Path,
    lines: list[str],
    ends: list[str],
    final: bool,
    codec: str,
    limit: int,
    numbered: bool,
) -> None:
    content = "".join(line + end for line, end in zip(lines, ends, strict=False))
    if not final:
        content = content[: -len(ends[len(lines) - 1])]
    raw = content.encode(codec)
    encoding = {"utf-16-le": encoding_named("utf-16le"), "gb18030": encoding_named("gb18030")}.get(codec)
    expected = content.replace("\r\n", "\n").split("\n")
    if not expected[-1]:
        expected.pop()
    if not expected:
        return
    file = tmp_path / "f"
    file.write_bytes(raw)
    seen: list[str] = []
    offset: int | None = 1
    while offset is not None:
        page = page_of(file, Window("f", offset, limit, 256, numbered, encoding))
        assert len(page.text.encode()) <= 256
        assert (page.lines, page.start_line, page.bytes) == (len(expected), offset, len(raw))
        body = page.text.rpartition("\n\n[Showing")[0] if page.next_offset else page.text
        shown = body.split("\n")
        assert len(shown) <= limit
        assert page.end_line == offset + len(shown) - 1
        if numbered:
            assert [line[:6] for line in shown] == [f"{number:4}│ " for number in range(offset, offset + len(shown))]
            shown = [line[6:] for line in shown]
        seen += shown
        offset = page.next_offset
    assert seen == expected


INDEXED = {
    "utf-8": ("utf-8", None),
    "utf-8 with a mark": ("utf-8-sig", None),
    "utf-16 with a mark": ("utf-16", None),
    "utf-16be": ("utf-16-be", "utf-16be"),
    "gb18030": ("gb18030", "gb18030"),
    "shift_jis": ("cp932", "shift_jis"),
}


@pytest.fixture(scope="module", params=INDEXED)
def large_file(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, list[str], TextEncoding | None]:
    """A file of some 2 MB with lines of every length, its lines and what it is told to be encoded in."""
    codec, name = INDEXED[request.param]
    wide = "漢é😀\u0a0a" if codec.startswith(("utf", "gb")) else "漢日"
    lines = [f"{number} {wide}{'x' * (number * number % 97)}" for number in range(25_000)]
    lines[12_000] = wide * 100_000
    lines[20_000:20_400] = [""] * 400
    file = tmp_path_factory.mktemp("large") / "f"
    ends = ["\n" if number % 3 else "\r\n" for number in range(len(lines))]
    file.write_bytes("".join(map(str.__add__, lines, ends)).encode(codec))
    return file, lines, None if name is None else encoding_named(name)


@settings(max_examples=25, deadline=None)
@given(
    offsets=st.lists(st.integers(1, 25_001) | st.integers(11_990, 12_010), min_size=1, max_size=8),
    positions=st.sampled_from([1, 2, 5, 4_096]),
)
def test_with_an_index_every_page_is_the_one_without(
    large_file: tuple[Path, list[str], TextEncoding | None], offsets: list[int], positions: int
) -> None:
    file, lines, encoding = large_file
    index = LineIndex(file.stat().st_size, stride=1, positions=positions)
    for offset in offsets:
        window = Window("f", offset, 3, 8_000_000, numbered=False, encoding=encoding)
        if offset > len(lines):
            with pytest.raises(ToolError, match="f has 25000 lines"):
                page_of(file, window, index=index)
        else:
            page = page_of(file, window, index=index)
            shown = lines[offset - 1 : offset + 2]
            assert page.text.partition("\n\n[Showing")[0] == "\n".join(shown)
            assert (page.lines, page.end_line) == (25_000, offset + len(shown) - 1)
        assert len(index) <= positions


BIG_FILES = r"""
import os, re, sys, time
from app.tools.text_encoding import detect_encoding
from app.tools.text_page import Window, read_beginning, read_page
from app.errors import ToolError
lines, single = sys.argv[1:]
def timed(name, offset):
    fd = os.open(name, os.O_RDONLY)
    began = time.monotonic()
    try:
        size = os.fstat(fd).st_size
        beginning = read_beginning(fd, size)
        encoding = detect_encoding(beginning.sample, whole=beginning.whole)
        page = read_page(fd, size, beginning, encoding, Window("big", offset, 2000, 1_000_000), lambda: None)
        said = page.text.partition(chr(10))[0], page.lines
    except ToolError as error:
        said = str(error.code), error.details["lineBytes"]
    os.close(fd)
    return said, time.monotonic() - began
def peak():
    return int(re.search(r"VmHWM:\s+(\d+) kB", open("/proc/self/status").read())[1]) * 1024
base = peak()
print(timed(lines, 2_900_000))
print(timed(single, 1))
print(repr((peak(), peak() - base)))
"""


def test_memory_does_not_grow_with_the_file_or_the_line(tmp_path: Path) -> None:
    """155 MB of lines, and one line of 3 GB (a sparse file: NUL bytes, told to be windows-1252)."""
    lines = tmp_path / "lines.txt"
    with lines.open("wb") as out:
        step = b"".join(b"line %07d some text to make it fifty bytes long..\n" % number for number in range(1000))
        for _ in range(3_000):
            out.write(step)
    single = tmp_path / "single.txt"
    with single.open("wb") as out:
        out.write(b"x" * 100_000)
        out.truncate(3_000_000_000)
    done = subprocess.run(
        [sys.executable, "-c", BIG_FILES, str(lines), str(single)],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    said = done.stdout.splitlines()
    (first, count), _ = ast.literal_eval(said[0])
    assert first == "2900000│ line 0000999 some text to make it fifty bytes long.."
    assert count == 3_000_000
    assert "too_large" in said[1]
    peak, growth = ast.literal_eval(said[2])
    assert growth < 16_000_000
    assert peak < 96_000_000
