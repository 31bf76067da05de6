"""edit on real files: all edits or none, and every byte that no edit touched as it was."""

import asyncio
import codecs
import contextlib
import copy
import os
import re
import shutil
import subprocess
import threading
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import anyio
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from app.domain.abort import Aborted, AbortReason, AbortSignal
from app.domain.tool_call import ToolResult
from app.domain.workspace import WorkspaceOptions
from app.errors import ErrorCode, ToolError
from app.sandbox.containment import Root, Target
from app.sandbox.file_pool import FilePool
from app.sandbox.files import etag_of
from app.sandbox.local import LocalSandbox
from app.tools.base import OnUpdate, PartialResult, ToolUpdate
from app.tools.edit import EditTool, edit_definition
from app.tools.environment import ToolEnvironment
from app.tools.file_mutation_queue import FileMutationQueue
from tests.support.users import directory_for_everybody, with_file_rights_of_nobody

pytestmark = pytest.mark.anyio

WAIT_SECONDS = 20


class Bench:
    """A workspace directory and an edit tool that works in it."""

    def __init__(self, root: Path, files: FilePool | None = None, **options: Any) -> None:
        self.root = root
        self.files = files or FilePool()
        self.mutations = FileMutationQueue()
        self.environment = ToolEnvironment(
            cwd=str(root),
            options=WorkspaceOptions.from_json(options),
            sandbox=LocalSandbox(),
            files=self.files,
            mutations=self.mutations,
        )
        self.tool = EditTool(self.environment)

    async def edit(
        self,
        path: str,
        *edits: tuple[str, str] | dict[str, Any],
        signal: AbortSignal | None = None,
        on_update: OnUpdate | None = None,
        **more: Any,
    ) -> ToolResult:
        items = [edit if isinstance(edit, dict) else {"oldText": edit[0], "newText": edit[1]} for edit in edits]
        with anyio.fail_after(WAIT_SECONDS):
            return await self.tool.execute("call-1", {"path": path, "edits": items, **more}, signal, on_update)

    async def refused(self, path: str, *edits: tuple[str, str] | dict[str, Any], **more: Any) -> ToolError:
        """Run edits that must fail and must leave every file of the workspace untouched."""
        before = snapshot(self.root)
        with pytest.raises(ToolError) as caught:
            await self.edit(path, *edits, **more)
        assert snapshot(self.root) == before
        return caught.value

    def hold(self, name: str) -> tuple["asyncio.Task[None]", threading.Event, threading.Event]:
        """Hold the key of a file; return the holder, an event that tells when it has it, and one that ends it."""
        held, free = threading.Event(), threading.Event()

        def resolve() -> Target:
            with Root.open(str(self.root)) as root:
                return root.target(root.relative(name))

        def work(_target: Target) -> None:
            held.set()
            assert free.wait(WAIT_SECONDS)

        holding = self.mutations.run(self.files, str(self.root), resolve, work, AbortSignal())
        return asyncio.ensure_future(holding), held, free


def snapshot(root: Path) -> dict[str, tuple[int, int, int, bytes]]:
    """Return inode, modification time, mode and content of every file."""
    found = {}
    for path in sorted(root.rglob("*")):
        if path.is_file():
            status = path.stat()
            found[str(path.relative_to(root))] = (status.st_ino, status.st_mtime_ns, status.st_mode, path.read_bytes())
    return found


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
async def bench(make_bench: Callable[..., Bench]) -> Bench:
    return make_bench()


async def until(condition: Callable[[], bool]) -> None:
    with anyio.fail_after(WAIT_SECONDS):
        while not condition():  # noqa: ASYNC110 - another thread changes it
            await anyio.sleep(0.002)


async def test_an_edit_is_reported_with_everything_a_program_needs(bench: Bench) -> None:
    (bench.root / "task.txt").write_bytes(b"status: draft\ncheck: pending")
    result = await bench.edit("task.txt", ("status: draft", "status: done"))
    assert (bench.root / "task.txt").read_bytes() == b"status: done\ncheck: pending"
    assert result == ToolResult(
        content=[{"type": "text", "text": "Applied 1 edit to task.txt"}],
        details={
            "path": str(bench.root / "task.txt"),
            "relativePath": "task.txt",
            "oldBytes": 28,
            "newBytes": 27,
            "edits": 1,
            "replacements": 1,
            "firstChangedLine": 1,
            "diff": (
                "--- a/task.txt\n+++ b/task.txt\n@@ -1,2 +1,2 @@\n-status: draft\n+status: done\n"
                " check: pending\n\\ No newline at end of file\n"
            ),
            "diffOmitted": False,
            "etag": etag_of(b"status: done\ncheck: pending"),
            "warnings": [],
            "fuzzyMatches": [],
            "dryRun": False,
        },
    )


async def test_several_edits_build_on_each_other(bench: Bench) -> None:
    (bench.root / "t").write_text("a: 1\n")
    result = await bench.edit("t", ("a: 1", "a: 2\nb: 1"), ("b: 1", "b: 2"))
    assert (bench.root / "t").read_text() == "a: 2\nb: 2\n"
    assert result.content == [{"type": "text", "text": "Applied 2 edits to t"}]
    assert (result.details["edits"], result.details["replacements"]) == (2, 2)


async def test_replace_all_counts_its_replacements(bench: Bench) -> None:
    (bench.root / "t").write_text("x y x\nx\n")
    result = await bench.edit("t", {"oldText": "x", "newText": "", "replaceAll": True})
    assert (bench.root / "t").read_text() == " y \n\n"
    assert (result.details["edits"], result.details["replacements"], result.details["newBytes"]) == (1, 3, 5)


async def test_same_same_stays_same_same(bench: Bench) -> None:
    (bench.root / "s.txt").write_text("same same")
    error = await bench.refused("s.txt", ("same", "X"))
    assert (error.code, error.details) == (
        ErrorCode.NOT_UNIQUE,
        {"path": str(bench.root / "s.txt"), "relativePath": "s.txt", "edit": 0, "matches": 2, "lines": [1, 1]},
    )


async def test_a_failing_edit_undoes_the_ones_before_it_and_is_named(bench: Bench) -> None:
    (bench.root / "c.ts").write_text("let tax = 7;\nlet fee = 2;\n")
    error = await bench.refused("c.ts", ("let tax = 7;", "let tax = 19;"), ("let toll = 0;", "let toll = 1;"))
    assert error.code is ErrorCode.NO_MATCH
    assert error.message.startswith("edits[1] (edit 2 of 2): oldText was not found in c.ts.")
    assert (error.details["edit"], error.details["relativePath"]) == (1, "c.ts")


async def test_an_edit_that_changes_nothing_is_an_error(bench: Bench) -> None:
    (bench.root / "t").write_text("a\n")
    assert (await bench.refused("t", ("a", "a"))).code is ErrorCode.NO_CHANGE


async def test_an_empty_old_text_is_refused_and_makes_no_file(bench: Bench) -> None:
    (bench.root / "abc.txt").write_text("word")
    for path in ("abc.txt", "none.txt", "no/dir/none.txt"):
        error = await bench.refused(path, ("", "X"))
        assert error.code is ErrorCode.INVALID_ARGUMENTS
        assert "oldText must not be empty" in error.message
    assert [path.name for path in bench.root.iterdir()] == ["abc.txt"]


@pytest.mark.parametrize(
    ("path", "code"),
    [
        ("missing", ErrorCode.NOT_FOUND),
        ("no/such/dir", ErrorCode.NOT_FOUND),
        ("file/child", ErrorCode.NOT_A_DIRECTORY),
        ("dir", ErrorCode.IS_A_DIRECTORY),
        (".", ErrorCode.IS_A_DIRECTORY),
        ("pipe", ErrorCode.NOT_A_REGULAR_FILE),
        ("../outside", ErrorCode.PATH_OUTSIDE_WORKSPACE),
        ("/etc/hostname", ErrorCode.PATH_OUTSIDE_WORKSPACE),
        ("link-out", ErrorCode.PATH_OUTSIDE_WORKSPACE),
        ("dangling", ErrorCode.NOT_FOUND),
        ("a\0b", ErrorCode.INVALID_ARGUMENTS),
        ("x" * 256, ErrorCode.NAME_TOO_LONG),
    ],
)
async def test_what_is_no_file_of_the_workspace_is_refused(bench: Bench, path: str, code: ErrorCode) -> None:
    outside = bench.root.parent / "outside"
    outside.write_text("x\n")
    (bench.root / "file").write_text("x\n")
    (bench.root / "dir").mkdir()
    (bench.root / "link-out").symlink_to(outside)
    (bench.root / "dangling").symlink_to("missing")
    os.mkfifo(bench.root / "pipe")
    assert (await bench.refused(path, ("x", "y"))).code is code
    assert outside.read_text() == "x\n"


async def test_mode_stays_and_a_hard_link_keeps_the_old_text(bench: Bench) -> None:
    hook, witness = bench.root / "hook", bench.root / "witness"
    hook.write_text("#!/bin/sh\necho A\n")
    hook.chmod(0o700)
    witness.hardlink_to(hook)
    await bench.edit("hook", ("echo A", "echo B"))
    assert (hook.stat().st_mode & 0o7777, hook.read_text()) == (0o700, "#!/bin/sh\necho B\n")
    assert witness.read_text() == "#!/bin/sh\necho A\n"


async def test_a_link_is_written_through(bench: Bench) -> None:
    (bench.root / "sub").mkdir()
    (bench.root / "sub/real").write_text("a\n")
    (bench.root / "link").symlink_to("sub/real")
    result = await bench.edit("link", ("a", "b"))
    assert (bench.root / "link").is_symlink()
    assert (bench.root / "sub/real").read_text() == "b\n"
    assert result.details["relativePath"] == "sub/real"
    assert result.content == [{"type": "text", "text": "Applied 1 edit to link"}]


ENCODED = {
    "utf-8": (b"", "utf-8"),
    "utf-8 with a mark": (codecs.BOM_UTF8, "utf-8"),
    "utf-16le with a mark": (codecs.BOM_UTF16_LE, "utf-16-le"),
    "utf-16be with a mark": (codecs.BOM_UTF16_BE, "utf-16-be"),
    "utf-16le by its pattern": (b"", "utf-16-le"),
}


@pytest.mark.parametrize("encoding", ENCODED)
async def test_encoding_and_mark_are_kept(bench: Bench, encoding: str) -> None:
    mark, codec = ENCODED[encoding]
    path = bench.root / "f.vb"
    path.write_bytes(mark + "' a plain comment, ámbito\r\nDim a = 1\r\nEnd\r\n".encode(codec))
    result = await bench.edit("f.vb", ("Dim a = 1\n", "Dim a = 2\nDim b = 3\n"))
    expected = mark + "' a plain comment, ámbito\r\nDim a = 2\r\nDim b = 3\r\nEnd\r\n".encode(codec)
    assert path.read_bytes() == expected
    assert (result.details["newBytes"], result.details["firstChangedLine"]) == (len(expected), 2)


async def test_the_first_line_after_a_mark_can_be_edited(bench: Bench) -> None:
    (bench.root / "conf.yml").write_bytes(b"\xef\xbb\xbfname: demo\nport: 80\n")
    await bench.edit("conf.yml", ("name: demo\n", "name: shop\n"))
    assert (bench.root / "conf.yml").read_bytes() == b"\xef\xbb\xbfname: shop\nport: 80\n"


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"var n = 5\n// \xd6\xd0\xce\xc4\n", "is not UTF-8 (from byte 13 on)"),
        (b"\x89PNG\r\n\x1a\nvar n = 5", "is binary (image/png)"),
        (b"var n = 5\0", "is binary"),
        (b"var n = 5\n" + b"x" * 100_000 + b"\xff\n", "cannot be read as utf-8 and written back without loss"),
        (b"\xff\xfev\0a\0r\0 \0n\0 \0=\0 \x005\0\n", "cannot be read as utf-16le and written back without loss"),
    ],
)
async def test_what_cannot_be_decoded_without_loss_is_left_alone(bench: Bench, data: bytes, reason: str) -> None:
    (bench.root / "g.js").write_bytes(data)
    error = await bench.refused("g.js", ("var n = 5", "var n = 6"))
    assert error.code is ErrorCode.UNSUPPORTED
    assert reason in error.message


async def test_a_file_whose_bytes_are_not_the_only_ones_for_its_text_is_left_alone(
    make_bench: Callable[..., Bench],
) -> None:
    bench = make_bench(read={"encoding": "shift_jis"})
    two_ways = (b"\x81\xe0", b"\x87\x90")
    assert two_ways[0].decode("cp932") == two_ways[1].decode("cp932")
    (bench.root / "one").write_bytes(b"n = 5 " + two_ways[0])
    (bench.root / "both").write_bytes(b"n = 5 " + two_ways[1])
    await bench.edit("one", ("5", "6"))
    assert (await bench.refused("both", ("5", "6"))).code is ErrorCode.UNSUPPORTED


async def test_a_character_may_lie_across_the_end_of_what_is_looked_at_to_tell_text(bench: Bench) -> None:
    text = "x" + "é" * 40_000 + " end"
    (bench.root / "t").write_text(text, encoding="utf-8")
    await bench.edit("t", ("end", "END"))
    assert (bench.root / "t").read_text(encoding="utf-8") == text.replace("end", "END")


async def test_the_encoding_that_the_workspace_reads_in_is_the_one_it_edits_in(
    make_bench: Callable[..., Bench],
) -> None:
    bench = make_bench(read={"encoding": "windows-1252"})
    (bench.root / "g.js").write_bytes(b"var n = 5\n// caf\xe9\n")
    await bench.edit("g.js", ("n = 5", "n = 6 /* é */"))
    assert (bench.root / "g.js").read_bytes() == b"var n = 6 /* \xe9 */\n// caf\xe9\n"
    error = await bench.refused("g.js", ("caf", "cafe"), ("var", "日"))
    assert error.code is ErrorCode.UNSUPPORTED
    assert error.message.startswith("edits[1]: newText holds '\\u65e5', which windows-1252")


@pytest.mark.parametrize("beginning", [b"\x89PNG\r\n\x1a\n", b"%PDF-1.7\n\0"])
async def test_the_encoding_of_the_workspace_makes_no_text_of_an_image_or_a_pdf(
    make_bench: Callable[..., Bench], beginning: bytes
) -> None:
    bench = make_bench(read={"encoding": "iso-8859-2"})
    (bench.root / "text").write_bytes(b"n = 5 \0\xe9\n")
    await bench.edit("text", ("5", "6"))
    (bench.root / "other").write_bytes(beginning + b"n = 5\n")
    assert (await bench.refused("other", ("5", "6"))).code is ErrorCode.UNSUPPORTED


async def test_an_encoding_that_read_is_sure_of_is_kept(bench: Bench) -> None:
    text = "# 配置文件\r\n说明 = 这是一个用来演示的中文文件里面有足够多的文字。\r\nstatus = draft\r\n"
    (bench.root / "g.ini").write_bytes(text.encode("gb18030"))
    await bench.edit("g.ini", ("draft\n", "完成\n"))
    assert (bench.root / "g.ini").read_bytes() == text.replace("draft", "完成").encode("gb18030")


@pytest.mark.parametrize(
    ("data", "edit", "result"),
    [
        (b"def f():\r\n    a = 1\r\n    return a\r\n", ("    a = 1\n    return a\n", "    a = 2\n    return a\n"),
         b"def f():\r\n    a = 2\r\n    return a\r\n"),
        (b"\xef\xbb\xbfone\r\ntwo\r\n", ("one\r\ntwo", "1\r\n2"), b"\xef\xbb\xbf1\r\n2\r\n"),
        (b"k1=a\r\nk2=b\r\nk3=c\r\n", ("k2=b\n", "k2=B\nk2b=x\n"), b"k1=a\r\nk2=B\r\nk2b=x\r\nk3=c\r\n"),
        (b"n\ns\ne\r\nw\n", ("n\ns\n", "n\nS\n"), b"n\nS\ne\r\nw\n"),
        (b"one\rtwo\rthree", ("two", "TWO"), b"one\rTWO\rthree"),
        (b"first\nlast\n\n", ("last", "LAST"), b"first\nLAST\n\n"),
        (b"emit('end');\n", ("emit('end');", "emit($& $1 $$ \\1 \\g<0>);"), b"emit($& $1 $$ \\1 \\g<0>);\n"),
    ],
)  # fmt: skip
async def test_line_ends_and_texts_on_disk(bench: Bench, data: bytes, edit: tuple[str, str], result: bytes) -> None:
    (bench.root / "f").write_bytes(data)
    await bench.edit("f", edit)
    assert (bench.root / "f").read_bytes() == result


texts = st.lists(st.sampled_from(["a", "é", "日本", "😀", "\n", "\r\n", "\r", "\t", "\u2028"]), max_size=12).map(
    "".join
)


@given(texts, texts, texts, st.sampled_from(sorted(ENCODED)[1:]))
@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
def test_bytes_that_no_edit_touches_stay(tmp_path: Path, before: str, after: str, new: str, encoding: str) -> None:
    mark, codec = ENCODED[encoding]
    if encoding.endswith("pattern"):
        before = f"plain letters to tell by{before}".replace("日本", "ab").replace("😀", "cd")
        after = after.replace("日本", "ab").replace("😀", "cd").replace("\u2028", "ef")
        before = before.replace("\u2028", "ef")
    root = tmp_path / "property"
    root.mkdir(exist_ok=True)
    bench = Bench(root)
    path = root / "f"
    path.write_bytes(mark + f"{before}<mark>{after}".encode(codec))
    try:
        asyncio.run(bench.edit("f", ("<mark>", f"[{new}]")))
    finally:
        bench.files.close()
    data = path.read_bytes()
    head, tail = mark + f"{before}[".encode(codec), f"]{after}".encode(codec)
    assert data.startswith(head)
    assert data.endswith(tail)
    assert len(data) >= len(head) + len(tail)
    written = data[len(head) : len(data) - len(tail)].decode(codec)
    assert "\r\r\n" not in written
    assert re.sub("\r+\n", "\n", written) == re.sub("\r+\n", "\n", new)


@pytest.mark.parametrize("program", ["git", "patch"])
async def test_the_diff_turns_the_old_file_into_the_new_one(bench: Bench, program: str) -> None:
    if shutil.which(program) is None:
        pytest.skip(f"{program} is not on PATH: its reading of the diffs is not tested here")
    old = codecs.BOM_UTF8 + "".join(f"línea {number}\r\n" for number in range(30)).encode() + b"last"
    name = "with space ñ.txt"
    (bench.root / name).write_bytes(old)
    result = await bench.edit(
        name, ("línea 0\n", "LÍNEA 0\n"), ("LÍNEA", "linea"), ("línea 20\nlínea 21\n", ""), ("last", "last\nno, this\n")
    )
    new = (bench.root / name).read_bytes()
    (bench.root / name).write_bytes(old)
    command = ["git", "apply"] if program == "git" else ["patch", "--strip=1", "--fuzz=0"]
    run = await asyncio.to_thread(
        subprocess.run,
        command,
        input=result.details["diff"].encode(),
        cwd=bench.root,
        env={"PATH": os.environ["PATH"], "GIT_CEILING_DIRECTORIES": str(bench.root.parent)},
        capture_output=True,
        timeout=30,
        check=False,
    )
    assert run.returncode == 0, run.stderr
    assert (bench.root / name).read_bytes() == new


async def test_a_diff_that_would_be_too_long_is_left_out_and_said_so(bench: Bench) -> None:
    (bench.root / "long").write_text("x" * 100_000)
    result = await bench.edit("long", {"oldText": "x" * 100_000, "newText": "y"})
    assert (result.details["diff"], result.details["diffOmitted"]) == (None, True)


async def test_sizes_beyond_the_limit_are_refused(make_bench: Callable[..., Bench]) -> None:
    bench = make_bench(edit={"maxBytes": 1000})
    (bench.root / "old").write_text("a" * 1001)
    (bench.root / "new").write_text("é" * 499)
    assert (await bench.refused("old", ("a", "b"))).code is ErrorCode.TOO_LARGE
    assert (
        await bench.refused("new", {"oldText": "é", "newText": "éa", "replaceAll": True})
    ).code is ErrorCode.TOO_LARGE
    assert (
        await bench.refused("new", {"oldText": "é", "newText": "abc", "replaceAll": True})
    ).code is ErrorCode.TOO_LARGE
    (bench.root / "new").write_text("b" * 998)
    await bench.edit("new", {"oldText": "b" * 998, "newText": "c" * 1000})


async def test_the_first_of_several_matches_is_taken_with_a_warning_when_the_workspace_says_so(
    make_bench: Callable[..., Bench],
) -> None:
    bench = make_bench(edit={"multipleMatches": "first"})
    (bench.root / "t").write_text("a\nb\na\n")
    updates: list[ToolUpdate] = []

    async def on_update(update: ToolUpdate) -> None:
        await anyio.lowlevel.checkpoint()
        updates.append(update)

    result = await bench.edit("t", ("a", "x"), on_update=on_update)
    warning = "edits[0]: oldText matches 2 places in t (lines 1, 3); only the first was replaced."
    assert (bench.root / "t").read_text() == "x\nb\na\n"
    assert result.details["warnings"] == [warning]
    assert result.content == [{"type": "text", "text": f"Applied 1 edit to t\nWarning: {warning}"}]
    assert updates == [PartialResult([{"type": "text", "text": warning}], {"warnings": [warning]})]


FORM = 'const a = "x";\r\n// “keep” \u2014 this\u00a0line  \r\nconst n = "A";  \r\n'


@pytest.mark.parametrize("encoding", [name for name in ENCODED if not name.endswith("pattern")])
async def test_fuzzy_changes_what_it_matched_and_no_other_byte(make_bench: Callable[..., Bench], encoding: str) -> None:
    mark, codec = ENCODED[encoding]
    bench = make_bench(edit={"fuzzy": True})
    (bench.root / "t.ts").write_bytes(mark + FORM.encode(codec))
    updates: list[ToolUpdate] = []
    result = await bench.edit("t.ts", ("const n = “A”;", 'const n = "B";'), on_update=updates.append)
    assert (bench.root / "t.ts").read_bytes() == mark + FORM.replace('"A"', '"B"').encode(codec)
    warning = "edits[0]: oldText was not found exactly in t.ts; line 3 matched but for quotes."
    assert result.content == [{"type": "text", "text": f"Applied 1 edit to t.ts\nWarning: {warning}"}]
    assert result.details["warnings"] == [warning]
    assert result.details["fuzzyMatches"] == [
        {"edit": 0, "startLine": 3, "endLine": 3, "text": 'const n = "A";', "differs": ["quotes"]}
    ]
    assert updates == [PartialResult([{"type": "text", "text": warning}], {"warnings": [warning]})]


async def test_fuzzy_is_off_unless_the_workspace_says_so(bench: Bench) -> None:
    (bench.root / "t.ts").write_text(FORM, newline="")
    error = await bench.refused("t.ts", ("const n = “A”;", 'const n = "B";'))
    assert error.code is ErrorCode.NO_MATCH
    assert 'The nearest text is line 3 (differs in quotes or dashes): "const n = \\"A\\";' in error.message


async def test_fuzzy_never_chooses_among_several_places(make_bench: Callable[..., Bench]) -> None:
    bench = make_bench(edit={"fuzzy": True, "multipleMatches": "first"})
    (bench.root / "t").write_text("it\u2019s\nit\u2018s\n")
    error = await bench.refused("t", ("it's", "x"))
    assert (error.code, error.details["lines"]) == (ErrorCode.NOT_UNIQUE, [1, 2])


async def test_the_workspace_says_what_edits_are_matched_against_when_the_call_does_not(
    make_bench: Callable[..., Bench],
) -> None:
    bench = make_bench(edit={"match": "original"})
    swap = (("a", "b"), ("b", "a"))
    (bench.root / "t").write_text("a\nb\n")
    await bench.edit("t", *swap)
    assert (bench.root / "t").read_text() == "b\na\n"
    assert (await bench.refused("t", *swap, match="sequential")).code is ErrorCode.NOT_UNIQUE


async def test_original_matches_the_file_as_it_was(bench: Bench) -> None:
    (bench.root / "t").write_text("a\nb\n")
    await bench.edit("t", ("a", "b"), ("b", "a"), match="original")
    assert (bench.root / "t").read_text() == "b\na\n"
    error = await bench.refused("t", ("b\na", "x"), ("a\n", "y"), match="original")
    assert (error.code, error.details["edit"]) == (ErrorCode.INVALID_ARGUMENTS, 1)


async def test_a_dry_run_shows_the_change_and_makes_none(bench: Bench) -> None:
    (bench.root / "t").write_text("a\n")
    before = snapshot(bench.root)
    result = await bench.edit("t", ("a", "b"), dryRun=True)
    assert snapshot(bench.root) == before
    assert result.content == [{"type": "text", "text": "1 edit would apply to t (dry run)"}]
    assert result.details["diff"] == "--- a/t\n+++ b/t\n@@ -1 +1 @@\n-a\n+b\n"
    assert (result.details["dryRun"], result.details["etag"]) == (True, etag_of(b"a\n"))
    assert (await bench.refused("t", ("x", "y"), dryRun=True)).code is ErrorCode.NO_MATCH


async def test_an_expected_etag_must_be_the_current_one(bench: Bench) -> None:
    (bench.root / "t").write_text("a\n")
    error = await bench.refused("t", ("a", "b"), expectedEtag=etag_of(b"other\n"))
    assert (error.code, error.details["currentEtag"]) == (ErrorCode.ETAG_MISMATCH, etag_of(b"a\n"))
    result = await bench.edit("t", ("a", "b"), expectedEtag=error.details["currentEtag"])
    assert (await bench.edit("t", ("b", "c"), expectedEtag=result.details["etag"])).details["newBytes"] == 2


class Meddler(AbortSignal):
    """Changes the file once, as soon as the new content is being written beside it."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.path = path
        self.done = False

    def raise_if_aborted(self) -> None:
        if not self.done and any(self.path.parent.glob(".toolcrib-tmp-*")):
            self.done = True
            self.path.write_bytes(b"changed by somebody else\n")
        super().raise_if_aborted()


async def test_a_file_that_somebody_changed_meanwhile_is_left_as_it_is(bench: Bench) -> None:
    path = bench.root / "t"
    path.write_bytes(b"a\n")
    signal = Meddler(path)
    with pytest.raises(ToolError) as caught:
        await bench.edit("t", ("a", "b"), signal=signal)
    assert signal.done
    assert caught.value.code is ErrorCode.ETAG_MISMATCH
    assert [entry.name for entry in bench.root.iterdir()] == ["t"]
    assert path.read_bytes() == b"changed by somebody else\n"


async def test_a_call_that_was_stopped_before_it_began_changes_nothing(bench: Bench) -> None:
    (bench.root / "t").write_text("a\n")
    before = snapshot(bench.root)
    signal = AbortSignal()
    signal.abort(AbortReason.CANCELLED)
    with pytest.raises(Aborted):
        await bench.edit("t", ("a", "b"), signal=signal)
    assert snapshot(bench.root) == before
    assert len(bench.mutations) == 0


class StopsAtCommit(AbortSignal):
    def commit(self) -> None:
        self.abort(AbortReason.TIMEOUT)
        super().commit()


async def test_a_stop_right_before_the_rename_leaves_the_file_and_no_temporary_one(bench: Bench) -> None:
    (bench.root / "t").write_text("a\n")
    before = snapshot(bench.root)
    with pytest.raises(Aborted):
        await bench.edit("t", ("a", "b"), signal=StopsAtCommit())
    assert snapshot(bench.root) == before
    assert (await bench.edit("t", ("a", "c"))).details["newBytes"] == 2


class Replacer(AbortSignal):
    """At the last moment a directory takes the place of the file, as a command in the workspace could do."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.path = path

    def commit(self) -> None:
        super().commit()
        self.path.rename(self.path.with_name("saved"))
        self.path.mkdir()


async def test_a_rename_that_fails_leaves_the_old_file_and_no_temporary_one_and_the_next_edit_goes_ahead(
    bench: Bench,
) -> None:
    path = bench.root / "t"
    path.write_text("a\n")
    with pytest.raises(ToolError) as caught:
        await bench.edit("t", ("a", "b"), signal=Replacer(path))
    assert (caught.value.code, caught.value.details["relativePath"]) == (ErrorCode.IS_A_DIRECTORY, "t")
    assert sorted(entry.name for entry in bench.root.iterdir()) == ["saved", "t"]
    assert (bench.root / "saved").read_text() == "a\n"
    path.rmdir()
    (bench.root / "saved").rename(path)
    await bench.edit("t", ("a", "c"))
    assert path.read_text() == "c\n"


def test_a_file_that_may_be_written_but_not_replaced_is_left_as_it_is() -> None:
    """In a directory with the sticky bit only its owner and the file's may rename over a file."""
    with directory_for_everybody() as root, contextlib.closing(FilePool()) as files:
        path = root / "t"
        path.write_text("a\n")
        path.chmod(0o666)
        root.chmod(0o1777)
        before = snapshot(root)
        bench = Bench(root, files)
        with pytest.raises(ToolError) as caught:
            with_file_rights_of_nobody(lambda: asyncio.run(bench.edit("t", ("a", "b"))) and None)
        assert caught.value.code is ErrorCode.PERMISSION_DENIED
        assert "mode" not in caught.value.message, "it was refused before the rename"
        assert snapshot(root) == before


async def test_edits_of_one_file_wait_in_the_order_they_came_and_others_go_ahead(bench: Bench) -> None:
    (bench.root / "t").write_text("0\n")
    (bench.root / "other").write_text("y\n")
    (bench.root / "sub").mkdir()
    (bench.root / "sub/link").symlink_to("../t")
    holder, held, free = bench.hold("t")
    try:
        await until(held.is_set)
        names = ("t", "./t", "sub/../t", "sub/link", str(bench.root / "t"))
        waiting = [asyncio.ensure_future(bench.edit(name, (str(n), str(n + 1)))) for n, name in enumerate(names)]
        await bench.edit("other", ("y", "Y"))
        assert not any(task.done() for task in waiting)
        assert (bench.root / "t").read_text() == "0\n"
    finally:
        free.set()
    await holder
    await asyncio.gather(*waiting)
    assert (bench.root / "t").read_text() == "5\n"
    assert len(bench.mutations) == 0


async def test_a_failing_edit_releases_the_next(bench: Bench) -> None:
    (bench.root / "t").write_text("a\n")
    holder, held, free = bench.hold("t")
    try:
        await until(held.is_set)
        failing = asyncio.ensure_future(bench.edit("t", ("nowhere", "x")))
        following = asyncio.ensure_future(bench.edit("t", ("a", "b")))
        await anyio.lowlevel.checkpoint()
    finally:
        free.set()
    await holder
    with pytest.raises(ToolError, match="was not found"):
        await failing
    await following
    assert (bench.root / "t").read_text() == "b\n"


async def test_twenty_edits_through_two_names_all_land(bench: Bench) -> None:
    (bench.root / "n.txt").write_text("".join(f"line {number:03}\n" for number in range(200)))
    (bench.root / "alias.txt").symlink_to("n.txt")
    await asyncio.gather(
        *(
            bench.edit(("n.txt", "alias.txt")[number % 2], (f"line {number:03}\n", f"CHANGED {number}\n"))
            for number in range(0, 200, 10)
        )
    )
    lines = (bench.root / "n.txt").read_text().splitlines()
    assert [line for line in lines if line.startswith("CHANGED")] == [
        f"CHANGED {number}" for number in range(0, 200, 10)
    ]
    assert len(lines) == 200
    assert (bench.root / "alias.txt").is_symlink()


@pytest.mark.parametrize(
    "args",
    [
        {"path": "t", "edits": [{"oldText": "a", "newText": "b"}]},
        {"file_path": "t", "old_string": "a", "new_string": "b"},
        {"path": "t", "old_str": "a", "new_str": "b"},
        {"path": "t", "oldText": "a", "newText": "b"},
        {"path": "t", "oldText": "a", "newText": "b", "edits": None},
        {"path": "t", "edits": {"oldText": "a", "newText": "b"}},
        {"path": "t", "edits": '[{"oldText": "a", "newText": "b"}]'},
        {"path": "t", "edits": '{"old_string": "a", "new_string": "b"}'},
        {"path": "t", "edits": [{"old_text": "a", "new_text": "b"}]},
        '{"path": "t", "old_string": "a", "new_string": "b"}',
    ],
)
async def test_spellings_of_other_tool_sets_are_taken(bench: Bench, args: Any) -> None:
    prepared = bench.tool.prepare_arguments(args)
    assert bench.tool.validate_arguments(prepared) == {"path": "t", "edits": [{"oldText": "a", "newText": "b"}]}


async def test_preparing_leaves_the_arguments_it_was_given_alone(bench: Bench) -> None:
    for args in (
        {"path": "t", "oldText": "a", "newText": "b"},
        {"path": "t", "edits": '[{"oldText": "a"}]'},
        {"path": "t", "edits": [{"old_text": "a"}]},
    ):
        before = copy.deepcopy(args)
        bench.tool.prepare_arguments(args)
        assert args == before


async def test_replace_all_is_taken_in_every_spelling(bench: Bench) -> None:
    args = {"path": "t", "old_string": "a", "new_string": "b", "replace_all": True}
    assert bench.tool.prepare_arguments(args) == {
        "path": "t",
        "edits": [{"oldText": "a", "newText": "b", "replaceAll": True}],
    }


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ({}, "path: required; edits: required"),
        ({"path": "t", "edits": []}, "edits: must have at least 1 item (has 0)"),
        ({"path": "t", "edits": [{}] * 1001}, "edits: must have at most 1000 items (has 1001)"),
        ({"path": "t", "edits": "not JSON"}, 'edits: must be an array (got "not JSON")'),
        ({"path": "t", "edits": "5"}, 'edits: must be an array (got "5")'),
        ({"path": "t", "edits": ["x"]}, 'edits[0]: must be an object (got "x")'),
        ({"path": "t", "old_string": "a"}, "edits[0].newText: required"),
        (
            {"path": "t", "oldText": "a", "edits": [{"oldText": "a", "newText": "b"}]},
            "oldText: unknown argument (known: path, edits, match, expectedEtag, dryRun)",
        ),
        (
            {"path": "t", "edits": [{"oldText": "a", "newText": None, "replaceAll": "true", "line": 3}]},
            'edits[0].newText: must be a string (got null); edits[0].replaceAll: must be true or false (got "true"); edits[0].line: unknown argument (known: oldText, newText, replaceAll)',
        ),
        (
            {"path": "t", "edits": [{"oldText": "a", "newText": "b"}], "match": "fuzzy"},
            'match: must be one of "sequential", "original" (got "fuzzy")',
        ),
    ],
)
async def test_wrong_arguments_are_named(bench: Bench, args: Any, message: str) -> None:
    with pytest.raises(ToolError) as caught:
        bench.tool.validate_arguments(bench.tool.prepare_arguments(args))
    assert caught.value.code is ErrorCode.INVALID_ARGUMENTS
    assert caught.value.message == f"Invalid arguments for edit: {message}"


def test_the_definition_says_what_the_options_make_of_the_tool() -> None:
    options = {"edit": {"maxBytes": 5000, "multipleMatches": "first", "executionMode": "parallel"}}
    definition = edit_definition(WorkspaceOptions.from_json(options))
    assert definition.name == "edit"
    assert "at most 5000 bytes" in definition.description
    assert "the first is replaced, with a warning" in definition.description
    assert definition.execution_mode == "parallel"
    assert edit_definition(WorkspaceOptions()).execution_mode == "sequential"
    assert definition.annotations.to_json() == {
        "title": "Edit a file",
        "readOnlyHint": False,
        "destructiveHint": True,
        "idempotentHint": False,
        "openWorldHint": False,
    }
    assert definition.parameters["properties"]["match"]["default"] == "sequential"
    assert "typographic" not in definition.description
    other = edit_definition(WorkspaceOptions.from_json({"edit": {"match": "original", "fuzzy": True}}))
    assert other.parameters["properties"]["match"]["default"] == "original"
    assert "a place that differs only in typographic quotes" in other.description
    assert definition.parameters["required"] == ["path", "edits"]
    assert list(definition.parameters["properties"]) == ["path", "edits", "match", "expectedEtag", "dryRun"]


async def test_ten_megabytes_are_edited_quickly(bench: Bench) -> None:
    line = "some words of a line that is not long\r\n"
    (bench.root / "big").write_bytes((line * 250_000 + "the end\r\n").encode())
    started = time.perf_counter()
    result = await bench.edit("big", ("long\nthe end", "long\nTHE\nEND"))
    assert time.perf_counter() - started < 3
    assert result.details["firstChangedLine"] == 250_001
    assert result.details["diff"].endswith("-the end\r\n+THE\r\n+END\r\n")
