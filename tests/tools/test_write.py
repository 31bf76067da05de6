"""write: the whole content, exactly as given, in one step that happens or does not."""

import asyncio
import os
import shutil
import stat
import subprocess
import sys
import threading
import unicodedata
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import anyio
import jsonschema
import pytest

from app.domain.abort import Aborted, AbortReason, AbortSignal
from app.domain.workspace import WorkspaceOptions
from app.errors import ErrorCode, ToolError
from app.sandbox.file_pool import FilePool
from app.sandbox.files import etag_of
from app.sandbox.local import LocalSandbox
from app.tools.environment import ToolEnvironment
from app.tools.file_mutation_queue import FileMutationQueue
from app.tools.write import WriteTool, write_definition

pytestmark = pytest.mark.anyio

REPOSITORY = Path(__file__).parents[2]


class Bench:
    """A workspace directory and a write tool that works in it."""

    def __init__(self, root: Path, **options: Any) -> None:
        self.root = root
        self.files = FilePool()
        self.mutations = FileMutationQueue()
        self.tool = WriteTool(
            ToolEnvironment(
                cwd=str(root),
                options=WorkspaceOptions.from_json(options),
                sandbox=LocalSandbox(),
                files=self.files,
                mutations=self.mutations,
            )
        )

    def put(self, name: str, content: str | bytes) -> Path:
        file = self.root / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(content if isinstance(content, bytes) else content.encode())
        return file

    def get(self, name: str) -> bytes:
        return (self.root / name).read_bytes()

    def tree(self) -> list[str]:
        return sorted(str(path.relative_to(self.root)) for path in self.root.rglob("*"))

    async def write(
        self, path: str, content: str, signal: AbortSignal | None = None, **more: Any
    ) -> tuple[str, dict[str, Any]]:
        with anyio.fail_after(20):
            result = await self.tool.execute("call-1", {"path": path, "content": content, **more}, signal)
        (block,) = result.content
        assert block["type"] == "text"
        return block["text"], result.details

    async def refused(self, path: str, content: str = "x", **more: Any) -> ToolError:
        """Run a write that must fail and must leave the workspace as it was."""
        before = self.tree()
        with pytest.raises(ToolError) as caught:
            await self.write(path, content, **more)
        assert self.tree() == before
        assert len(self.mutations) == 0
        return caught.value


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
        assert len(bench.mutations) == 0
        bench.files.close()


@pytest.fixture
def bench(make_bench: Callable[..., Bench]) -> Bench:
    return make_bench()


async def test_a_file_is_written_and_told_of(bench: Bench) -> None:
    bench.put("task.txt", "status: draft")
    content = "status: draft\ncheck: pending"
    assert await bench.write("task.txt", content) == (
        "Wrote 28 bytes to task.txt",
        {
            "path": f"{bench.root}/task.txt",
            "relativePath": "task.txt",
            "bytes": 28,
            "created": False,
            "etag": etag_of(content.encode()),
            "diff": "--- a/task.txt\n+++ b/task.txt\n@@ -1 +1,2 @@\n-status: draft\n\\ No newline at end of file\n"
            "+status: draft\n+check: pending\n\\ No newline at end of file\n",
            "diffOmitted": False,
        },
    )
    assert bench.get("task.txt") == content.encode()


@pytest.mark.parametrize(
    "content",
    ["a\r\nb\nc\rd", "", "\ufeffx", "no newline", "<p>5 &lt; 6 &amp;&amp; 7 &gt; 6</p>\n", "nul \0 inside", "😀 漢 é"],
)
async def test_the_bytes_are_exactly_those_of_the_content(bench: Bench, content: str) -> None:
    for path in ("old.txt", "new.txt"):
        bench.put("old.txt", "something else entirely\n")
        _, details = await bench.write(path, content)
        assert bench.get(path) == content.encode()
        assert (details["bytes"], details["created"]) == (len(content.encode()), path == "new.txt")


async def test_an_empty_file_is_made_with_its_directories(bench: Bench) -> None:
    text, details = await bench.write("pkg/sub/__init__.py", "")
    assert text == "Wrote 0 bytes to pkg/sub/__init__.py"
    assert (details["bytes"], details["created"]) == (0, True)
    assert bench.tree() == ["pkg", "pkg/sub", "pkg/sub/__init__.py"]


async def test_a_link_inside_is_written_through_and_stays_a_link(bench: Bench) -> None:
    bench.put("real/settings.json", '{"v":1}\n')
    (bench.root / "settings.json").symlink_to("real/settings.json")
    (bench.root / "absolute.json").symlink_to(bench.root / "real" / "settings.json")
    (bench.root / "dangling.json").symlink_to("real/new.json")
    for path in ("settings.json", "absolute.json"):
        text, details = await bench.write(path, f"{path}\n")
        assert text.endswith(f"to {path}")
        assert (details["path"], details["relativePath"]) == (
            f"{bench.root}/real/settings.json",
            "real/settings.json",
        )
        assert bench.get("real/settings.json") == f"{path}\n".encode()
        assert (bench.root / path).is_symlink()
    _, details = await bench.write("dangling.json", "new\n")
    assert (details["created"], details["relativePath"]) == (True, "real/new.json")
    assert (bench.root / "dangling.json").is_symlink()


async def test_escapes_are_refused_and_nothing_is_made(bench: Bench) -> None:
    outside = bench.root.parent / "outside"
    bench.put("../outside/kept.txt", "kept")
    (bench.root / "link").symlink_to(outside)
    (bench.root / "relative").symlink_to("../outside")
    (bench.root / "file.txt").symlink_to(outside / "kept.txt")
    (bench.root / "next.txt").symlink_to(outside / "later.txt")
    for path in (
        "../outside/w.txt",
        f"{outside}/w.txt",
        f"{bench.root}-evil/w.txt",
        "a/../../outside/w.txt",
        "link/new.txt",
        "link/sub/deep.txt",
        "relative/new.txt",
        "relative/sub/deep.txt",
        "file.txt",
        "next.txt",
    ):
        error = await bench.refused(path)
        assert error.code is ErrorCode.PATH_OUTSIDE_WORKSPACE, path
    assert [path.name for path in outside.iterdir()] == ["kept.txt"]
    assert (outside / "kept.txt").read_text() == "kept"
    assert (bench.root / "next.txt").is_symlink()


async def test_the_other_name_of_a_hard_link_keeps_the_old_content(bench: Bench) -> None:
    bench.put("a.txt", "old\n")
    os.link(bench.root / "a.txt", bench.root / "witness.txt")
    await bench.write("a.txt", "new\n")
    assert (bench.get("a.txt"), bench.get("witness.txt")) == (b"new\n", b"old\n")


async def test_mode_owner_and_user_attributes_are_kept(bench: Bench) -> None:
    hook = bench.put("hook", "#!/bin/sh\n")
    hook.chmod(0o700)
    os.setxattr(hook, "user.origin", b"here")
    if os.geteuid() == 0:
        os.chown(hook, 4321, 4322)
    before = hook.stat()
    await bench.write("hook", "#!/bin/sh\ntrue\n")
    after = hook.stat()
    assert (after.st_uid, after.st_gid, after.st_mode) == (before.st_uid, before.st_gid, before.st_mode)
    assert os.getxattr(hook, "user.origin") == b"here"


async def test_what_cannot_be_a_file_is_refused(bench: Bench) -> None:
    bench.put("src/a.py", "1\n")
    bench.put("data", "i am a file\n")
    os.mkfifo(bench.root / "pipe")
    for path, code, words in (
        ("src", ErrorCode.IS_A_DIRECTORY, "src is a directory"),
        (".", ErrorCode.IS_A_DIRECTORY, "is a directory"),
        ("src/", ErrorCode.IS_A_DIRECTORY, "src is a directory"),
        ("new/", ErrorCode.IS_A_DIRECTORY, "new/ can only name a directory"),
        ("", ErrorCode.INVALID_ARGUMENTS, "empty"),
        ("data/x.txt", ErrorCode.NOT_A_DIRECTORY, "data is not a directory"),
        ("data/y/x.txt", ErrorCode.NOT_A_DIRECTORY, "data is not a directory"),
        ("pipe", ErrorCode.NOT_A_REGULAR_FILE, "named pipe"),
        ("n" * 256, ErrorCode.NAME_TOO_LONG, "file name too long"),
        ("d/" + "n" * 256, ErrorCode.NAME_TOO_LONG, "file name too long"),
        ("b\0.txt", ErrorCode.INVALID_ARGUMENTS, "NUL"),
        (".toolcrib-tmp-0000000000000000", ErrorCode.INVALID_ARGUMENTS, "kept for the service"),
    ):
        error = await bench.refused(path)
        assert (error.code, words in error.message) == (code, True), (path, error.message)
    assert bench.get("data") == b"i am a file\n"
    assert bench.get("src/a.py") == b"1\n"


async def test_the_longest_names_can_be_written(bench: Bench) -> None:
    for name in ("n" * 255, "漢" * 84 + ".md"):
        await bench.write(name, "x")
        await bench.write(name, "y")
        assert bench.get(name) == b"y"


async def test_names_that_look_alike_stay_different_files(bench: Bench) -> None:
    decomposed = unicodedata.normalize("NFD", "café.md")
    bench.put(decomposed, "nfd\n")
    bench.put("plan b.txt", "space\n")
    bench.put("plan\u00a0b.txt", "nbsp\n")
    await bench.write("café.md", "nfc\n")
    await bench.write("plan\u00a0b.txt", "nbsp2\n")
    assert (bench.get(decomposed), bench.get("café.md")) == (b"nfd\n", b"nfc\n")
    assert (bench.get("plan b.txt"), bench.get("plan\u00a0b.txt")) == (b"space\n", b"nbsp2\n")


async def test_create_only_leaves_an_existing_file(bench: Bench) -> None:
    _, details = await bench.write("sub/a.txt", "first", createOnly=True)
    assert details["created"] is True
    error = await bench.refused("sub/a.txt", "second", createOnly=True)
    assert (error.code, error.details["relativePath"]) == (ErrorCode.ALREADY_EXISTS, "sub/a.txt")
    assert bench.get("sub/a.txt") == b"first"


async def test_of_many_writes_that_may_only_create_one_does(bench: Bench) -> None:
    results = await asyncio.gather(
        *(bench.write("d/a.txt", str(number), createOnly=True) for number in range(20)), return_exceptions=True
    )
    done = [number for number, result in enumerate(results) if not isinstance(result, BaseException)]
    assert len(done) == 1
    assert bench.get("d/a.txt") == str(done[0]).encode()
    refused = [result for result in results if isinstance(result, ToolError)]
    assert {error.code for error in refused} == {ErrorCode.ALREADY_EXISTS}
    assert len(refused) == 19


async def test_the_expected_etag_guards_what_somebody_else_wrote(bench: Bench) -> None:
    _, details = await bench.write("a.txt", "mine")
    etag = details["etag"]
    bench.put("a.txt", "theirs")
    error = await bench.refused("a.txt", "mine again", expectedEtag=etag)
    assert error.code is ErrorCode.ETAG_MISMATCH
    assert error.details["currentEtag"] == etag_of(b"theirs")
    assert bench.get("a.txt") == b"theirs"
    _, details = await bench.write("a.txt", "mine again", expectedEtag=error.details["currentEtag"])
    await bench.write("a.txt", "without quotes", expectedEtag=details["etag"].strip('"'))
    assert bench.get("a.txt") == b"without quotes"


async def test_an_expected_etag_of_a_file_that_is_not_there_is_a_mismatch_and_makes_nothing(bench: Bench) -> None:
    touched = bench.root.stat().st_mtime_ns
    for path in ("a.txt", "new/dir/a.txt"):
        error = await bench.refused(path, expectedEtag='"0"')
        assert (error.code, error.details["currentEtag"]) == (ErrorCode.ETAG_MISMATCH, None)
    assert bench.root.stat().st_mtime_ns == touched  # not even made and taken back
    bench.put("dir/x", "")
    assert (await bench.refused("dir", expectedEtag='"0"')).code is ErrorCode.IS_A_DIRECTORY
    await bench.write("a.txt", "null is absent", expectedEtag=None, createOnly=None)
    error = await bench.refused("b.txt", expectedEtag='"0"', createOnly=True)
    assert error.code is ErrorCode.INVALID_ARGUMENTS


async def test_content_over_the_limit_is_refused_before_anything_is_made(make_bench: Callable[..., Bench]) -> None:
    bench = make_bench(write={"maxBytes": 256})
    error = await bench.refused("new/a.txt", "é" * 129)
    assert error.code is ErrorCode.TOO_LARGE
    assert "258 bytes" in error.message
    assert "at most 256" in error.message
    await bench.write("new/a.txt", "é" * 128)
    assert "at most 256 bytes" in bench.tool.definition.description


async def test_half_a_surrogate_pair_is_no_content(bench: Bench) -> None:
    error = await bench.refused("a.txt", "x\ud800")
    assert error.code is ErrorCode.INVALID_ARGUMENTS


async def test_the_diff_applies_and_is_left_out_where_it_cannot_be_made(bench: Bench) -> None:
    old = "".join(f"line {number}\n" for number in range(100))
    new = old.replace("line 50\n", "line fifty\nand more\n")
    bench.put("sub/a.txt", old)
    _, details = await bench.write("sub/a.txt", new)
    if shutil.which("patch") is not None:
        bench.put("sub/a.txt", old)
        run_patch(bench.root, details["diff"])
        assert bench.get("sub/a.txt") == new.encode()
    bench.put("binary", b"\xff\xfe\xfd")
    _, details = await bench.write("binary", "text\n")
    assert (details["diff"], details["diffOmitted"]) == (None, True)
    bench.put("large", "x\n" * 1_000_000)
    _, details = await bench.write("large", "y\n")
    assert (details["diff"], details["diffOmitted"]) == (None, True)
    _, details = await bench.write("new.txt", "a\n")
    assert (details["diff"], details["diffOmitted"]) == ("--- /dev/null\n+++ b/new.txt\n@@ -0,0 +1 @@\n+a\n", False)


def run_patch(directory: Path, diff: str) -> None:
    subprocess.run(["patch", "-p1", "--batch"], cwd=directory, input=diff.encode(), check=True, timeout=10)


async def test_a_failed_rename_leaves_the_old_file_and_no_temporary_one_and_the_next_write_goes_ahead(
    bench: Bench,
) -> None:
    file = bench.put("a.txt", "old")

    class Meddler(AbortSignal):
        """At the last moment a directory takes the place of the file, as a command in the workspace could do."""

        def commit(self) -> None:
            super().commit()
            file.rename(bench.root / "saved.txt")
            (file / "inside").mkdir(parents=True)

    with pytest.raises(ToolError) as caught:
        await bench.write("a.txt", "new", Meddler())
    assert caught.value.code is ErrorCode.IS_A_DIRECTORY
    assert bench.tree() == ["a.txt", "a.txt/inside", "saved.txt"]
    assert bench.get("saved.txt") == b"old"
    (file / "inside").rmdir()
    file.rmdir()
    await bench.write("a.txt", "next")
    assert bench.get("a.txt") == b"next"


async def test_a_write_that_fails_takes_its_new_directories_back(bench: Bench) -> None:
    class Stopped(AbortSignal):
        def commit(self) -> None:
            self.abort(AbortReason.TIMEOUT)
            super().commit()

    with pytest.raises(Aborted):
        await bench.write("new/deep/a.txt", "x", Stopped())
    assert bench.tree() == []


async def test_an_aborted_write_changes_nothing(bench: Bench) -> None:
    bench.put("a.txt", "old")
    signal = AbortSignal()
    signal.abort(AbortReason.CANCELLED)
    for path in ("a.txt", "new/b.txt"):
        with pytest.raises(Aborted):
            await bench.write(path, "new", signal)
    assert bench.tree() == ["a.txt"]
    assert bench.get("a.txt") == b"old"


async def test_second_write_waits_for_a_failed_first(bench: Bench) -> None:
    """Three writes of one file by two names: the first is held and fails, the others follow in their order."""
    bench.put("real/f.txt", "0")
    (bench.root / "alias.txt").symlink_to("real/f.txt")
    entered, release = threading.Event(), threading.Event()
    seen: list[bytes] = []

    class Held(AbortSignal):
        def commit(self) -> None:
            entered.set()
            assert release.wait(10)
            raise ToolError(ErrorCode.NO_SPACE, "no room")

    class Noted(AbortSignal):
        def commit(self) -> None:
            seen.append(bench.get("real/f.txt"))
            super().commit()

    first = asyncio.ensure_future(bench.write("real/f.txt", "A", Held()))
    await anyio.to_thread.run_sync(entered.wait, 10)
    second = asyncio.ensure_future(bench.write("alias.txt", "B", Noted()))
    await asyncio.sleep(0)
    third = asyncio.ensure_future(bench.write("real/f.txt", "C", Noted()))
    other = await bench.write("other.txt", "goes ahead")
    assert other[1]["created"] is True
    assert seen == []
    release.set()
    results = await asyncio.wait_for(asyncio.gather(first, second, third, return_exceptions=True), 10)
    assert isinstance(results[0], ToolError)
    assert seen == [b"0", b"B"]
    assert bench.get("real/f.txt") == b"C"


async def test_writes_of_new_files_in_new_directories_do_not_disturb_each_other(bench: Bench) -> None:
    await asyncio.gather(*(bench.write(f"a/b{number % 3}/c/f{number}.txt", str(number)) for number in range(40)))
    assert {bench.get(f"a/b{number % 3}/c/f{number}.txt") for number in range(40)} == {
        str(number).encode() for number in range(40)
    }


FULL_DISK = """
import asyncio, os, sys
from app.domain.workspace import WorkspaceOptions
from app.errors import ToolError
from app.sandbox.file_pool import FilePool
from app.sandbox.local import LocalSandbox
from app.tools.environment import ToolEnvironment
from app.tools.file_mutation_queue import FileMutationQueue
from app.tools.write import WriteTool
disk = sys.argv[1]
async def main():
    queue = FileMutationQueue()
    tool = WriteTool(ToolEnvironment(disk, WorkspaceOptions(), LocalSandbox(), FilePool(), queue))
    async def write(path, content):
        try:
            return (await tool.execute("c", {"path": path, "content": content})).details["bytes"]
        except ToolError as error:
            return str(error.code)
    print(await write("ledger.csv", "old"))
    print(await write("ledger.csv", "x" * 3_000_000), await write("new/dir/f", "x" * 3_000_000))
    print(open(disk + "/ledger.csv").read(), sorted(os.listdir(disk)), len(queue))
    print(await write("ledger.csv", "new"), open(disk + "/ledger.csv").read())
asyncio.run(main())
"""


def test_a_full_disk_leaves_the_old_file_and_nothing_new(tmp_path: Path) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    unshare = ["unshare", "--mount"] if os.geteuid() == 0 else ["unshare", "--mount", "--map-root-user"]
    if shutil.which("unshare") is None or subprocess.run([*unshare, "true"], check=False, timeout=10).returncode:
        pytest.skip("no private mount namespace can be had here")
    mount = f'mount -t tmpfs -o size=1m tmpfs "{disk}" && exec "$@"'
    done = subprocess.run(
        [*unshare, "sh", "-c", mount, "sh", sys.executable, "-c", FULL_DISK, str(disk)],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
    )
    assert done.stdout.splitlines() == [
        "3",
        "no_space no_space",
        "old ['ledger.csv'] 0",
        "3 new",
    ], done.stderr


def test_the_definition_is_a_schema_with_the_limits_that_hold() -> None:
    definition = write_definition(WorkspaceOptions.from_json({"write": {"executionMode": "parallel"}}))
    assert (definition.name, definition.execution_mode) == ("write", "parallel")
    assert "10000000 bytes" in definition.description
    assert definition.parameters["required"] == ["path", "content"]
    assert set(definition.parameters["properties"]) == {"path", "content", "createOnly", "expectedEtag"}
    assert definition.parameters["additionalProperties"] is False
    jsonschema.Draft202012Validator.check_schema(definition.parameters)
    annotations = definition.annotations
    assert (annotations.read_only_hint, annotations.destructive_hint, annotations.idempotent_hint) == (
        False,
        True,
        True,
    )
    assert write_definition(WorkspaceOptions()).execution_mode == "sequential"


async def test_a_new_file_has_the_rights_the_umask_leaves(bench: Bench) -> None:
    before = os.umask(0o022)
    try:
        await bench.write("a.txt", "x")
    finally:
        os.umask(before)
    assert stat.S_IMODE((bench.root / "a.txt").stat().st_mode) == 0o644
