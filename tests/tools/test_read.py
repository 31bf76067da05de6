"""read: lines, pages, images and bytes, each with what a program needs and with how to go on."""

import asyncio
import base64
import codecs
import os
import shutil
import subprocess
import threading
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import anyio
import jsonschema
import orjson
import pytest

from app.domain.abort import Aborted, AbortReason, AbortSignal
from app.domain.workspace import WorkspaceOptions
from app.errors import ErrorCode, ToolError
from app.sandbox.file_pool import FilePool
from app.sandbox.local import LocalSandbox
from app.tools.environment import ToolEnvironment
from app.tools.file_mutation_queue import FileMutationQueue
from app.tools.line_index import LineIndexes
from app.tools.read import BLOB_MAX_BYTES, ReadTool, read_definition
from tests.support.sample_files import image_file, pdf_file, png_bomb

pytestmark = pytest.mark.anyio

TEN_LINES = "".join(f"row {number}\n" for number in range(1, 11))


WITHOUT_LINES = {
    "lines": None,
    "startLine": None,
    "endLine": None,
    "truncated": False,
    "nextOffset": None,
    "encoding": None,
}


class Bench:
    """A workspace directory and a read tool that works in it."""

    def __init__(self, root: Path, **options: Any) -> None:
        self.root = root
        status = root.stat()
        self.files = FilePool()
        self.environment = ToolEnvironment(
            cwd=str(root),
            options=WorkspaceOptions.from_json(options),
            sandbox=LocalSandbox(),
            files=self.files,
            mutations=FileMutationQueue(),
            root_identity=(status.st_dev, status.st_ino),
        )
        self.tool = ReadTool(self.environment)

    def put(self, name: str, content: str | bytes) -> Path:
        file = self.root / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(content if isinstance(content, bytes) else content.encode())
        return file

    def where(self, name: str, size: int) -> dict[str, Any]:
        """Return what the details say of a file in the root."""
        return {"path": f"{self.root}/{name}", "relativePath": name, "bytes": size}

    async def read(self, path: str, signal: AbortSignal | None = None, **more: Any) -> tuple[str, dict[str, Any]]:
        """Return text and details of a read."""
        with anyio.fail_after(20):
            result = await self.tool.execute("call-1", {"path": path, **more}, signal)
        assert result.is_error is False
        (block,) = result.content
        assert block["type"] == "text"
        return block["text"], result.details

    async def refused(self, path: str, **more: Any) -> ToolError:
        with pytest.raises(ToolError) as caught:
            await self.read(path, **more)
        return caught.value


def output_of(command: str, directory: Path) -> bytes:
    return subprocess.run(["bash", "-c", command], cwd=directory, capture_output=True, check=True, timeout=20).stdout


def open_fds() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


@pytest.fixture
async def make_bench(tmp_path: Path) -> AsyncIterator[Callable[..., Bench]]:
    benches: list[Bench] = []

    def make(**options: Any) -> Bench:
        root = tmp_path / f"ws{len(benches)}"
        root.mkdir()
        benches.append(Bench(root, **options))
        return benches[-1]

    yield make
    for bench in benches:
        bench.files.close()


@pytest.fixture
def bench(make_bench: Callable[..., Bench]) -> Bench:
    return make_bench()


async def test_a_small_file_is_shown_whole_with_everything_a_program_needs(bench: Bench) -> None:
    bench.put("task.txt", "status: draft")
    assert await bench.read("task.txt") == (
        "   1│ status: draft",
        {
            "path": f"{bench.root}/task.txt",
            "relativePath": "task.txt",
            "bytes": 13,
            "lines": 1,
            "startLine": 1,
            "endLine": 1,
            "truncated": False,
            "nextOffset": None,
            "encoding": "utf-8",
            "mimeType": "text/plain",
        },
    )


async def test_a_window_tells_how_to_continue(bench: Bench) -> None:
    bench.put("ten.txt", TEN_LINES)
    text, details = await bench.read("ten.txt", limit=5)
    assert text == (
        "   1│ row 1\n   2│ row 2\n   3│ row 3\n   4│ row 4\n   5│ row 5\n\n"
        "[Showing lines 1-5 of 10. Continue with offset=6.]"
    )
    assert (details["lines"], details["startLine"], details["endLine"]) == (10, 1, 5)
    assert (details["truncated"], details["nextOffset"]) == (True, 6)
    text, details = await bench.read("ten.txt", offset=6)
    assert text == "   6│ row 6\n   7│ row 7\n   8│ row 8\n   9│ row 9\n  10│ row 10"
    assert (details["lines"], details["startLine"], details["endLine"]) == (10, 6, 10)
    assert (details["truncated"], details["nextOffset"]) == (False, None)


async def test_the_notice_of_two_lines_reads_as_promised(bench: Bench) -> None:
    bench.put("two.txt", "a\nb")
    text, _ = await bench.read("two.txt", limit=1)
    assert text == "   1│ a\n\n[Showing lines 1-1 of 2. Continue with offset=2.]"


async def test_lines_are_shown_without_numbers_on_request_and_by_option(
    make_bench: Callable[..., Bench],
) -> None:
    bench = make_bench(read={"lineNumbers": False})
    bench.put("a.txt", "one\ntwo\n")
    assert (await bench.read("a.txt"))[0] == "one\ntwo"
    assert (await bench.read("a.txt", lineNumbers=True))[0] == "   1│ one\n   2│ two"
    assert (await bench.read("a.txt", lineNumbers=None))[0] == "one\ntwo"


async def test_numbers_grow_beyond_their_width(make_bench: Callable[..., Bench]) -> None:
    bench = make_bench(read={"maxLines": 100_000})
    bench.put("many.txt", "x\n" * 20_001)
    assert (await bench.read("many.txt", offset=9999, limit=2))[0].split("\n")[:2] == ["9999│ x", "10000│ x"]
    text, _ = await bench.read("many.txt")
    assert text.split("\n")[2000:2002] == ["2001│ x", "2002│ x"]
    assert text.endswith("20001│ x")


async def test_a_final_newline_starts_no_line_and_a_blank_last_line_is_one(bench: Bench) -> None:
    for content, text, lines in (
        ("x\ny\n", "   1│ x\n   2│ y", 2),
        ("x\n\n", "   1│ x\n   2│ ", 2),
        ("\n", "   1│ ", 1),
        ("x", "   1│ x", 1),
        ("\n\n\nx", "   1│ \n   2│ \n   3│ \n   4│ x", 4),
    ):
        bench.put("f.txt", content)
        shown, details = await bench.read("f.txt")
        assert (shown, details["lines"], details["endLine"]) == (text, lines, lines), content


async def test_only_a_line_feed_ends_a_line_and_only_a_return_before_it_is_dropped(bench: Bench) -> None:
    bench.put("odd.txt", "a\r\nb\rc\fd\ve\u2028f\u0085g\r\r\nh\r")
    text, details = await bench.read("odd.txt")
    assert text == "   1│ a\n   2│ b\rc\fd\ve\u2028f\u0085g\r\n   3│ h\r"
    assert details["lines"] == 3


async def test_an_empty_file_says_that_it_is_empty(bench: Bench) -> None:
    bench.put("empty.txt", b"")
    bench.put("z.jpeg", b"")
    bench.put("bom.txt", codecs.BOM_UTF8)
    for name, size in (("empty.txt", 0), ("z.jpeg", 0), ("bom.txt", 3)):
        text, details = await bench.read(name)
        assert "is empty" in text
        assert (details["bytes"], details["lines"], details["startLine"], details["endLine"]) == (size, 0, 1, 0)
        assert (details["truncated"], details["nextOffset"]) == (False, None)
        assert (await bench.read(name, offset=1, limit=10))[0] == text
        error = await bench.refused(name, offset=2)
        assert error.code is ErrorCode.INVALID_ARGUMENTS
        assert "has 0 lines" in error.message


async def test_an_offset_past_the_end_is_told_the_true_number_of_lines(bench: Bench) -> None:
    bench.put("ten.txt", TEN_LINES)
    bench.put("open.txt", TEN_LINES.rstrip("\n"))
    bench.put("one.txt", "x\n")
    for name in ("ten.txt", "open.txt"):
        assert (await bench.read(name, offset=10))[0] == "  10│ row 10"
        for offset in (11, 12, 10**15):
            error = await bench.refused(name, offset=offset)
            assert error.code is ErrorCode.INVALID_ARGUMENTS
            assert f"{name} has 10 lines" in error.message
            assert error.details["lines"] == 10
    assert "has 1 line," in (await bench.refused("one.txt", offset=2)).message


@pytest.mark.parametrize(("field", "value"), [("offset", 0), ("offset", -1), ("limit", 0), ("limit", -5)])
async def test_numbers_below_one_are_refused_by_name(bench: Bench, field: str, value: int) -> None:
    bench.put("a.txt", "a\n")
    error = await bench.refused("a.txt", **{field: value})
    assert error.code is ErrorCode.INVALID_ARGUMENTS
    assert f"{field}: must be at least 1" in error.message


async def test_the_limits_of_the_workspace_hold_whatever_is_asked_for(make_bench: Callable[..., Bench]) -> None:
    bench = make_bench(read={"maxLines": 3, "maxBytes": 256})
    bench.put("ten.txt", TEN_LINES)
    for limit in (None, 5000):
        _, details = await bench.read("ten.txt", limit=limit)
        assert (details["endLine"], details["nextOffset"]) == (3, 4)
    definition = bench.tool.definition
    assert "at most 3 lines and 256 bytes" in definition.description


async def test_the_byte_limit_counts_numbers_and_notice_and_is_used_up(make_bench: Callable[..., Bench]) -> None:
    bench = make_bench(read={"maxBytes": 256})
    for numbered in (True, False):
        for width in range(1, 90):
            bench.put("w.txt", ("é" * (width // 2) + "y" * (width % 2) + "\n") * 50)
            text, details = await bench.read("w.txt", lineNumbers=numbered)
            assert len(text.encode()) <= 256
            if details["truncated"]:
                # One line more, with its notice, would be too much.
                longer = len(text.encode()) + width + 1 + (8 if numbered else 0)
                more = details["endLine"] + 1
                growth = len(f"{more}{more + 1}") - len(f"{more - 1}{more}")
                assert longer + growth > 256


async def test_a_file_that_just_fits_has_no_notice(make_bench: Callable[..., Bench]) -> None:
    bench = make_bench(read={"maxBytes": 256})
    fits = "\n".join(["x" * 24] * 8)  # 8 numbered lines of 32 bytes and 7 ends: 263; without the last: 230
    bench.put("a.txt", fits.removesuffix("x" * 7))
    text, details = await bench.read("a.txt")
    assert (len(text.encode()), details["truncated"]) == (256, False)
    bench.put("a.txt", fits.removesuffix("x" * 6))
    text, details = await bench.read("a.txt")
    assert details["truncated"] is True
    assert len(text.encode()) <= 256


@pytest.mark.parametrize("ending", ["\n", "\nmore\n", ""])
async def test_a_first_line_that_cannot_fit_is_an_error_that_says_how_to_get_it(bench: Bench, ending: str) -> None:
    bench.put("it's one.json", "first\n{" + "x" * 3_000_000 + "}" + ending)
    error = await bench.refused("it's one.json", offset=2)
    assert error.code is ErrorCode.TOO_LARGE
    assert "line 2 of it's one.json has 3000002 bytes" in error.message
    assert "1000000 bytes" in error.message
    assert ("offset=3" in error.message) == (ending == "\nmore\n")
    command = error.message.partition("for example: ")[2].partition(", or go on")[0]
    shown = output_of(command, bench.root)
    assert shown == b"{" + b"x" * 49_999
    assert error.details == {
        "path": f"{bench.root}/it's one.json",
        "relativePath": "it's one.json",
        "bytes": 3_000_008 + len(ending),
        "line": 2,
        "lineBytes": 3_000_002,
        "maxBytes": 1_000_000,
        "startByte": 6,
    }
    # The lines before it can be read all the same.
    text, details = await bench.read("it's one.json")
    assert text.startswith("   1│ first\n\n[Showing lines 1-1 of ")
    assert details["nextOffset"] == 2


async def test_a_long_line_of_utf_16_can_be_got_at_too(bench: Bench) -> None:
    if shutil.which("iconv") is None:
        pytest.skip("no iconv here to run what the error suggests")
    bench.put("-wide.txt", codecs.BOM_UTF16_LE + ("é" * 1_200_000 + "\nend\n").encode("utf-16-le"))
    error = await bench.refused("-wide.txt")
    assert error.code is ErrorCode.TOO_LARGE
    assert "offset=2" in error.message
    command = error.message.partition("for example: ")[2].partition(", or go on")[0]
    shown = output_of(command, bench.root)
    assert shown.decode(errors="ignore").lstrip("\ufeff")[:10] == "é" * 10
    assert (await bench.read("-wide.txt", offset=2))[0] == "   2│ end"


async def test_following_the_notice_visits_every_line_once(bench: Bench) -> None:
    bench.put("w.txt", "".join(f"{number} {'y' * 900}\n" for number in range(5000)))
    seen: list[str] = []
    offset: int | None = 1
    while offset is not None:
        text, details = await bench.read("w.txt", offset=offset, limit=5000)
        shown = text.split("\n\n[Showing")[0].split("\n")
        assert (details["startLine"], details["endLine"]) == (offset, offset + len(shown) - 1)
        assert len(text.encode()) <= 1_000_000
        seen += [line.partition("│ ")[2].split(" ")[0] for line in shown]
        offset = details["nextOffset"]
    assert seen == [str(number) for number in range(5000)]


async def test_the_number_of_lines_is_left_open_when_too_much_lies_behind_the_page(bench: Bench) -> None:
    bench.put("big.txt", "0123456789abcde\n" * 1_100_000)  # 17.6 MB
    text, details = await bench.read("big.txt", limit=1)
    assert (details["lines"], details["bytes"], details["truncated"]) == (None, 17_600_000, True)
    assert text.endswith("\n\n[Showing lines 1-1. Continue with offset=2.]")
    _, details = await bench.read("big.txt", offset=100_000, limit=1)
    assert details["lines"] == 1_100_000
    assert "has 1100000 lines" in (await bench.refused("big.txt", offset=1_100_001)).message


@pytest.mark.parametrize(
    ("mark", "codec", "name"),
    [
        (codecs.BOM_UTF8, "utf-8", "utf-8"),
        (codecs.BOM_UTF16_LE, "utf-16-le", "utf-16le"),
        (codecs.BOM_UTF16_BE, "utf-16-be", "utf-16be"),
    ],
)
async def test_a_byte_order_mark_decides_and_is_not_shown(bench: Bench, mark: bytes, codec: str, name: str) -> None:
    content = "日期,数量\r\n周一,3\n\U0001f600\n"
    file = bench.put("export/log.txt", mark + content.encode(codec))
    before = file.read_bytes()
    text, details = await bench.read("export/log.txt", encoding="windows-1252")
    assert text == "   1│ 日期,数量\n   2│ 周一,3\n   3│ \U0001f600"
    assert (details["encoding"], details["lines"], details["bytes"]) == (name, 3, len(before))
    assert file.read_bytes() == before


@pytest.mark.parametrize("size", [1, 100_000])
@pytest.mark.parametrize("tail", [b"x", "\ud83d".encode("utf-16-le", "surrogatepass")])
async def test_utf_16_that_ends_in_half_a_character_is_refused_on_its_last_page(
    bench: Bench, size: int, tail: bytes
) -> None:
    bench.put("cut.txt", codecs.BOM_UTF16_LE + ("line\n" * size).encode("utf-16-le") + tail)
    assert (await bench.read("cut.txt", limit=1))[1]["lines"] == size + 1
    error = await bench.refused("cut.txt", offset=size + 1)
    assert error.code is ErrorCode.UNSUPPORTED
    assert f"line {size + 1} of cut.txt cannot be decoded as utf-16le" in error.message


@pytest.mark.parametrize("order", ["le", "be"])
async def test_utf_16_without_a_mark_is_told_by_its_nul_bytes(bench: Bench, order: str) -> None:
    bench.put("reg.txt", "Windows Registry Editor\r\n[HKEY — é]\r\n".encode(f"utf-16-{order}"))
    text, details = await bench.read("reg.txt")
    assert text == "   1│ Windows Registry Editor\n   2│ [HKEY — é]"
    assert details["encoding"] == f"utf-16{order}"


async def test_utf_16_windows_of_a_large_file_are_those_of_its_text(bench: Bench) -> None:
    # U+0A0A has the byte of a line feed in both halves; lines of odd length move the units against the steps.
    lines = [f"{number} \u0a0a{'x' * (number % 7)}" for number in range(200_000)]
    bench.put("wide.txt", ("\n".join(lines)).encode("utf-16"))
    text, details = await bench.read("wide.txt", offset=150_000, limit=2, lineNumbers=False)
    assert text.split("\n")[:2] == lines[149_999:150_001]
    assert details["lines"] == 200_000
    assert (await bench.read("wide.txt", offset=200_000, lineNumbers=False))[0] == lines[-1]


@pytest.mark.parametrize(
    ("label", "codec", "name"),
    [
        ("gb18030", "gb18030", "gb18030"),
        ("GBK", "gbk", "gbk"),
        ("Shift_JIS", "cp932", "shift_jis"),
        ("euc-kr", "cp949", "euc-kr"),
        ("big5", "big5", "big5"),
        ("utf-16", "utf-16-le", "utf-16le"),
    ],
)
async def test_the_callers_encoding_is_used_and_named_as_the_standard_does(
    make_bench: Callable[..., Bench], label: str, codec: str, name: str
) -> None:
    word = "한국" if codec == "cp949" else "日本"
    for bench, argument in ((make_bench(), label), (make_bench(read={"encoding": label}), None)):
        bench.put("legacy.py", f"# {word}\r\nx = 1\n".encode(codec))
        text, details = await bench.read("legacy.py", encoding=argument)
        assert text == f"   1│ # {word}\n   2│ x = 1"
        assert details["encoding"] == name
        assert details["mimeType"] == "text/x-python"


async def test_every_byte_of_windows_1252_is_a_character(bench: Bench) -> None:
    bench.put("bytes.bin", bytes(range(32, 256)))
    text, details = await bench.read("bytes.bin", encoding="latin1", lineNumbers=False)
    assert len(text) == 224
    assert text[0x80 - 32] == "€"
    assert text[0x81 - 32] == "\x81"
    assert details["encoding"] == "windows-1252"


async def test_what_is_not_utf_8_is_refused_with_the_way_out_and_never_guessed(bench: Bench) -> None:
    for content in (b"# \xd6\xd0\xce\xc4\nx = 1\n", b'menu = "caf\xe9 au lait"\nprice = 3\n', b"BM \xff and more\n"):
        bench.put("legacy.py", content)
        error = await bench.refused("legacy.py")
        assert error.code is ErrorCode.UNSUPPORTED
        assert "pass encoding" in error.message
        assert error.details["bytes"] == len(content)
    error = await bench.refused("legacy.py", encoding="gb18030")
    assert (error.code, error.details["encoding"]) == (ErrorCode.UNSUPPORTED, "gb18030")
    error = await bench.refused("legacy.py", encoding="klingon")
    assert error.code is ErrorCode.INVALID_ARGUMENTS
    assert "'klingon' is not known" in error.message
    assert (await bench.refused("legacy.py", encoding="")).code is ErrorCode.INVALID_ARGUMENTS


async def test_bytes_that_are_no_utf_8_far_into_a_file_are_found_on_their_page(bench: Bench) -> None:
    lines = [b"fine" * 10] * 5000
    lines[3999] = b"caf\xe9"
    bench.put("mostly.txt", b"\n".join(lines))
    assert (await bench.read("mostly.txt", limit=100))[1]["nextOffset"] == 101
    error = await bench.refused("mostly.txt", offset=3500, limit=1000)
    assert "line 4000" in error.message
    assert (await bench.read("mostly.txt", offset=4001, limit=10))[1]["endLine"] == 4010
    lines[3999] = b"a\0b"
    bench.put("mostly.txt", b"\n".join(lines))
    error = await bench.refused("mostly.txt", offset=3500, limit=1000)
    assert error.code is ErrorCode.UNSUPPORTED
    assert "binary data from line 4000" in error.message


async def test_characters_cut_by_a_step_or_the_sample_are_whole(bench: Bench) -> None:
    for shift in range(4):
        bench.put("u.txt", "x" * shift + "漢😀" * 60_000 + "\nend\n")
        text, details = await bench.read("u.txt", lineNumbers=False)
        assert text == "x" * shift + "漢😀" * 60_000 + "\nend"
        assert details["lines"] == 2


@pytest.mark.parametrize(
    ("content", "mime_type"),
    [
        (b"\x7fELF\x02\x01\x01\0\0", "application/x-elf"),
        (b"PK\x03\x04\x14\0\0", "application/zip"),
        (b"\0\0\x01\0\x01\0", "image/x-icon"),
        (b"\0\x01\x02\x03" * 100, "application/octet-stream"),
        (b"abc\0", "application/octet-stream"),
        (b"a\0b", "application/octet-stream"),
        (codecs.BOM_UTF32_LE + b"a\0\0\0", "text/plain; charset=utf-32"),
    ],
)
async def test_other_binary_content_is_given_as_it_is(bench: Bench, content: bytes, mime_type: str) -> None:
    bench.put("thing", content)
    result = await bench.tool.execute("call-1", {"path": "thing"})
    assert result.content == [
        {"type": "text", "text": f"thing is not text: {mime_type}, {len(content)} bytes"},
        {"type": "blob", "data": base64.b64encode(content).decode(), "mimeType": mime_type, "bytes": len(content)},
    ]
    assert result.details == {**WITHOUT_LINES, **bench.where("thing", len(content)), "mimeType": mime_type}


async def test_binary_content_above_the_limit_is_refused_with_its_type_and_size(bench: Bench) -> None:
    bench.put("fits", b"\0" * BLOB_MAX_BYTES)
    assert (await bench.tool.execute("call-1", {"path": "fits"})).content[1]["type"] == "blob"
    content = b"PK\x03\x04" + b"\0" * BLOB_MAX_BYTES
    bench.put("thing", content)
    error = await bench.refused("thing")
    assert error.code is ErrorCode.UNSUPPORTED
    assert f"application/zip, {len(content)} bytes (at most {BLOB_MAX_BYTES}" in error.message
    assert (error.details["mimeType"], error.details["bytes"]) == ("application/zip", len(content))


async def test_an_image_is_shown_with_its_sizes(bench: Bench) -> None:
    data = image_file("PNG")
    bench.put("shot.txt", data)
    result = await bench.tool.execute("call-1", {"path": "shot.txt"})
    assert result.content == [
        {"type": "text", "text": "shot.txt is an image (image/png, 60x40 pixels)"},
        {"type": "image", "data": base64.b64encode(data).decode(), "mimeType": "image/png"},
    ]
    assert result.details == {
        **WITHOUT_LINES,
        **bench.where("shot.txt", len(data)),
        "mimeType": "image/png",
        "image": {
            "width": 60,
            "height": 40,
            "originalWidth": 60,
            "originalHeight": 40,
            "scale": 1.0,
            "animated": False,
            "converted": False,
        },
    }


async def test_an_image_that_was_made_smaller_says_by_how_much(bench: Bench) -> None:
    bench.put("wide.bmp", image_file("BMP", (4_000, 100)))
    result = await bench.tool.execute("call-1", {"path": "wide.bmp"})
    note, image = result.content
    assert note == {
        "type": "text",
        "text": "wide.bmp is an image (image/bmp, 4000x100 pixels). It is shown at 2000x50, scale 0.5: multiply "
        "coordinates by 2 to find them in the file. It is shown as image/png.",
    }
    assert (image["type"], image["mimeType"]) == ("image", "image/png")
    assert (result.details["mimeType"], result.details["image"]["scale"]) == ("image/bmp", 0.5)


@pytest.mark.parametrize(
    "content",
    [
        b"\x89PNG\r\n\x1a\n" + bytes(range(256)) * 8,
        b"\xff\xd8\xff\xe0 no nul",
        b"RIFF\x10\0\0\0WEBPVP8 ",
        b"GIF89a" + bytes(60),
        b"BM" + bytes(60),
        image_file("PNG", noise=True)[:400],
        png_bomb(20_000, 20_000),
    ],
)
async def test_what_only_begins_like_an_image_is_an_error_and_no_image(bench: Bench, content: bytes) -> None:
    bench.put("bad.png", content)
    error = await bench.refused("bad.png")
    assert error.code is ErrorCode.UNSUPPORTED
    assert error.details["bytes"] == len(content)
    assert error.details["mimeType"].startswith("image/")


async def test_a_pdf_is_shown_by_page(bench: Bench) -> None:
    data = pdf_file(["one", "two", "three"])
    bench.put("a.pdf", data)
    text, details = await bench.read("a.pdf", offset=2, limit=1)
    assert text == "[Page 2 of 3]\ntwo\n\n[Showing pages 2-2 of 3. Continue with offset=3.]"
    assert details == {
        **WITHOUT_LINES,
        **bench.where("a.pdf", len(data)),
        "mimeType": "application/pdf",
        "truncated": True,
        "nextOffset": 3,
        "pages": 3,
        "startPage": 2,
        "endPage": 2,
    }
    assert (await bench.read("a.pdf:3"))[0] == "[Page 3 of 3]\nthree"
    assert (await bench.refused("a.pdf", offset=4)).code is ErrorCode.INVALID_ARGUMENTS
    for content in (b"%PDF-1.4\n1 0 obj<<>>endobj\n%%EOF\0\xff", b"%PDF-1.4\nall ascii\n"):
        bench.put("a.pdf", content)
        error = await bench.refused("a.pdf")
        assert error.code is ErrorCode.UNSUPPORTED
        assert "damaged" in error.message


async def test_the_encoding_of_a_call_is_for_any_file_and_that_of_the_workspace_for_its_texts(
    make_bench: Callable[..., Bench],
) -> None:
    bench = make_bench(read={"encoding": "windows-1252"})
    bench.put("a.png", image_file("PNG"))
    bench.put("a.pdf", pdf_file(["one"]))
    assert (await bench.tool.execute("call-1", {"path": "a.png"})).content[1]["type"] == "image"
    assert (await bench.read("a.pdf"))[0] == "[Page 1 of 1]\none"
    assert (await bench.read("a.pdf", encoding="windows-1252", limit=1))[0].startswith("   1│ %PDF-1.4\n")


async def test_a_path_may_name_lines(bench: Bench) -> None:
    bench.put("ten.txt", TEN_LINES)
    text, details = await bench.read("ten.txt:3-4")
    assert text == "   3│ row 3\n   4│ row 4\n\n[Showing lines 3-4 of 10. Continue with offset=5.]"
    assert (details["relativePath"], details["startLine"], details["endLine"]) == ("ten.txt", 3, 4)
    assert (await bench.read("ten.txt:10"))[0] == "  10│ row 10"
    assert (await bench.read(f"{bench.root}/ten.txt:9-99"))[0] == "   9│ row 9\n  10│ row 10"
    for path in ("ten.txt:0", "ten.txt:0-3", "ten.txt:4-3", "ten.txt:11", "ten.txt:99999999999999"):
        assert (await bench.refused(path)).code is ErrorCode.INVALID_ARGUMENTS, path
    for more in ({"offset": 1}, {"limit": 1}):
        error = await bench.refused("ten.txt:3-4", **more)
        assert (error.code, "leave out" in error.message) == (ErrorCode.INVALID_ARGUMENTS, True)
    for path in ("ten.txt:", "ten.txt:-3", "ten.txt:3-", "ten.txt:a", "ten.txt:1-2-3", ":3", "ten.txt:" + "9" * 40):
        assert (await bench.refused(path)).code is ErrorCode.NOT_FOUND, path
    error = await bench.refused("none.txt:3-4")
    assert (error.code, error.message.startswith("none.txt:3-4 does not exist")) == (ErrorCode.NOT_FOUND, True)
    assert (await bench.refused("../ten.txt:3")).code is ErrorCode.PATH_OUTSIDE_WORKSPACE


async def test_a_file_with_the_literal_name_is_the_one_that_is_read(bench: Bench) -> None:
    bench.put("ten.txt", TEN_LINES)
    bench.put("ten.txt:3-4", "literal\n")
    bench.put("ten.txt:3-4:2", "second\n")
    bench.put("dir:7/x", "")
    bench.put("dir", TEN_LINES)
    assert (await bench.read("ten.txt:3-4"))[0] == "   1│ literal"
    assert (await bench.read("ten.txt:3-4", offset=1, limit=1))[0] == "   1│ literal"
    assert (await bench.read("ten.txt:3-4:1"))[0] == "   1│ literal"
    assert (await bench.read("ten.txt:3-4:2"))[0] == "   1│ second"
    assert (await bench.refused("dir:7")).code is ErrorCode.IS_A_DIRECTORY


async def test_a_text_in_another_encoding_is_shown_with_how_sure_that_is(bench: Bench) -> None:
    text = "Эта функция читает файл настроек и возвращает словарь.\n"
    bench.put("ru.txt", text.encode("koi8-r"))
    shown, details = await bench.read("ru.txt")
    assert shown == f"   1│ {text.rstrip()}"
    assert details["encoding"] == "koi8-r"
    assert 0.25 <= details["encodingConfidence"] <= 1
    assert "encodingConfidence" not in (await bench.read("ru.txt", encoding="koi8-r"))[1]


async def test_a_later_page_of_a_large_file_is_found_without_going_through_it_again(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    indexes = LineIndexes(clock=lambda: time.time_ns() + 10**10)
    monkeypatch.setattr("app.tools.read._LINE_INDEXES", indexes)
    bench.put("big.txt", "".join(f"line {number}\n" for number in range(1, 1_000_001)))
    first, details = await bench.read("big.txt", offset=600_000, limit=2)
    assert first.startswith("600000│ line 600000\n600001│ line 600001\n")
    assert len(indexes) == 1
    reads = 0
    real = os.read

    def counting(fd: int, size: int) -> bytes:
        nonlocal reads
        reads += size
        return real(fd, size)

    monkeypatch.setattr("app.tools.text_page.os.read", counting)
    assert (await bench.read("big.txt", offset=600_000, limit=2)) == (first, details)
    assert reads < 3 * 1_048_576
    # Another content under the same name is another file.
    bench.put("big.txt", "".join(f"LINE {number}\n" for number in range(1, 1_000_001)))
    assert (await bench.read("big.txt", offset=600_000, limit=1))[0].startswith("600000│ LINE 600000\n")


async def test_the_content_decides_and_not_the_name(bench: Bench) -> None:
    bench.put("p.jpeg", "hello\n")
    bench.put("notes.md", "# hi\n")
    bench.put("data.json", "{}\n")
    text, details = await bench.read("p.jpeg")
    assert (text, details["mimeType"]) == ("   1│ hello", "text/plain")
    assert (await bench.read("notes.md"))[1]["mimeType"] == "text/markdown"
    assert (await bench.read("data.json"))[1]["mimeType"] == "application/json"


async def test_directories_and_what_is_no_regular_file_are_refused_at_once(bench: Bench) -> None:
    bench.put("tests/a.py", "x=1\n")
    os.mkfifo(bench.root / "pipe")
    (bench.root / "link").symlink_to("tests")
    (bench.root / "zero").symlink_to("/dev/zero")
    for path, code, words in (
        ("tests", ErrorCode.IS_A_DIRECTORY, "tests is a directory; use ls"),
        (".", ErrorCode.IS_A_DIRECTORY, "is a directory; use ls"),
        ("link", ErrorCode.IS_A_DIRECTORY, "link is a directory; use ls"),
        ("pipe", ErrorCode.NOT_A_REGULAR_FILE, "pipe is a named pipe"),
        ("zero", ErrorCode.PATH_OUTSIDE_WORKSPACE, "leads out"),
        ("tests/a.py/x", ErrorCode.NOT_A_DIRECTORY, "tests/a.py is not a directory"),
        ("missing", ErrorCode.NOT_FOUND, "missing does not exist"),
        ("a\0b", ErrorCode.INVALID_ARGUMENTS, "NUL"),
    ):
        began = time.monotonic()
        error = await bench.refused(path)
        assert time.monotonic() - began < 0.5
        assert (error.code, words in error.message) == (code, True), error.message


async def test_escapes_are_refused_and_show_nothing(bench: Bench) -> None:
    evil = bench.root.parent / f"{bench.root.name}-evil"
    bench.put(f"../{evil.name}/k.txt", "s3cr3t")
    (bench.root / "link").symlink_to(evil / "k.txt")
    (bench.root / "dir").symlink_to(f"../{evil.name}")
    for path in (f"../{evil.name}/k.txt", f"{evil}/k.txt", "link", "dir/k.txt", "/etc/hostname", "x/../../k.txt"):
        error = await bench.refused(path)
        assert error.code is ErrorCode.PATH_OUTSIDE_WORKSPACE, path
        assert "s3cr3t" not in error.message


async def test_a_link_shows_the_real_path(bench: Bench) -> None:
    bench.put("real/a.txt", "in\n")
    (bench.root / "link").symlink_to(bench.root / "real")
    for path in ("link/a.txt", f"{bench.root}/link/a.txt", "real/../link/a.txt"):
        _, details = await bench.read(path)
        assert (details["path"], details["relativePath"]) == (f"{bench.root}/real/a.txt", "real/a.txt")


async def test_a_workspace_whose_directory_is_gone_says_so(bench: Bench) -> None:
    bench.put("a.txt", "a\n")
    bench.root.rename(bench.root.parent / "moved")
    error = await bench.refused("a.txt")
    assert error.code is ErrorCode.NOT_FOUND
    assert "workspace directory" in error.message
    assert not bench.root.exists()
    bench.root.mkdir()
    error = await bench.refused("a.txt")
    assert "another directory stands at" in error.message


async def test_unrestricted_workspaces_may_read_anywhere(make_bench: Callable[..., Bench]) -> None:
    bench = make_bench(containment="unrestricted")
    outside = bench.root.parent / "outside.txt"
    outside.write_text("out\n")
    for path in (str(outside), "../outside.txt"):
        text, details = await bench.read(path)
        assert (text, details["path"], details["relativePath"]) == ("   1│ out", str(outside), "../outside.txt")


async def test_files_of_the_kernel_that_claim_to_be_empty_are_read_to_their_end(
    make_bench: Callable[..., Bench],
) -> None:
    bench = make_bench(containment="unrestricted")
    text, details = await bench.read("/proc/self/status", lineNumbers=False)
    assert text.startswith("Name:")
    assert details["lines"] == len(text.split("\n"))
    assert details["bytes"] == len(text) + 1


async def test_a_call_that_was_cancelled_reads_nothing(bench: Bench) -> None:
    bench.put("big.txt", b"x\n" * 1_000_000)
    signal = AbortSignal()
    signal.abort(AbortReason.CANCELLED)
    with pytest.raises(Aborted):
        await bench.read("big.txt", signal)


class Meeting(AbortSignal):
    """A signal that, the first time a thread looks at it, waits there for the thread of another call."""

    def __init__(self, meet: threading.Barrier) -> None:
        super().__init__()
        self._meet = meet
        self._met = False

    def raise_if_aborted(self) -> None:
        if not self._met and threading.current_thread() is not threading.main_thread():
            self._met = True
            self._meet.wait(10)
        super().raise_if_aborted()


async def test_reads_overlap(bench: Bench) -> None:
    """Both are held inside until the other is there too: neither would get out if they took turns."""
    bench.put("a.txt", "a\n" * 100_000)
    meet = threading.Barrier(2)
    shown = await asyncio.gather(*(bench.read("a.txt", Meeting(meet), offset=90_000, limit=1) for _ in range(2)))
    assert [details["endLine"] for _, details in shown] == [90_000] * 2


async def test_no_text_is_larger_as_json_than_a_stored_result_may_be(make_bench: Callable[..., Bench]) -> None:
    bench = make_bench(read={"maxBytes": 100_000_000, "maxLines": 10_000_000})
    # A control character is one byte of UTF-8 and six of JSON.
    bench.put("controls.txt", ("\x01" * 99 + "\n") * 40_000)
    text, details = await bench.read("controls.txt", lineNumbers=False)
    assert 7_000_000 < len(orjson.dumps(text)) < 8 * 1_048_576
    assert details["truncated"] is True
    assert text.endswith(f"Continue with offset={details['nextOffset']}.]")
    bench.put("plain.txt", ("x" * 99 + "\n") * 120_000)
    text, details = await bench.read("plain.txt", lineNumbers=False)
    assert len(orjson.dumps(text)) < 8 * 1_048_576
    assert details["lines"] == 120_000


async def test_no_descriptor_is_left_behind_by_any_outcome(bench: Bench) -> None:
    bench.put("a.txt", "a\n")
    bench.put("b.png", b"\x89PNG\r\n\x1a\n")
    bench.put("b.pdf", b"%PDF-1.4")
    bench.put("dir/x", "")
    await bench.read("a.txt")
    before = open_fds()
    for _ in range(3):
        await bench.read("a.txt")
        for path, more in (
            ("b.png", {}),
            ("b.pdf", {}),
            ("a.txt:0", {}),
            ("dir", {}),
            ("a.txt", {"offset": 9}),
            ("../x", {}),
            ("none", {}),
        ):
            await bench.refused(path, **more)
    assert open_fds() == before


def test_the_definition_is_a_schema_with_the_limits_that_hold() -> None:
    definition = read_definition(WorkspaceOptions.from_json({"read": {"maxLines": 7, "executionMode": "sequential"}}))
    assert (definition.name, definition.execution_mode) == ("read", "sequential")
    assert "at most 7 lines" in definition.description
    assert definition.parameters["required"] == ["path"]
    assert set(definition.parameters["properties"]) == {"path", "offset", "limit", "lineNumbers", "encoding"}
    assert definition.parameters["additionalProperties"] is False
    jsonschema.Draft202012Validator.check_schema(definition.parameters)
    assert definition.annotations.read_only_hint is True
    assert definition.annotations.destructive_hint is False
    assert read_definition(WorkspaceOptions()).execution_mode == "parallel"


async def test_spellings_of_other_tools_are_understood(bench: Bench) -> None:
    bench.put("ten.txt", TEN_LINES)
    result = await bench.tool.execute(
        "c", bench.tool.prepare_arguments({"file_path": "ten.txt", "offset": "2", "limit": 1, "line_numbers": False})
    )
    (block,) = result.content
    assert block["type"] == "text"
    assert block["text"].startswith("row 2\n")
