"""ls: sorted entries with their types and sizes, however odd, many or deep they are."""

import asyncio
import base64
import os
import socket
import threading
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import jsonschema
import orjson
import pytest

from app.domain.abort import Aborted, AbortReason, AbortSignal
from app.domain.workspace import WorkspaceOptions
from app.errors import ErrorCode
from app.tools.ls import ls_definition
from tests.support.deep_tree import deep_tree, quick_directory
from tests.support.other_user import unprivileged_directory
from tests.support.tool_bench import ToolBench, paths, text_of

pytestmark = pytest.mark.anyio


@pytest.fixture
async def bench(tmp_path: Path) -> AsyncIterator[ToolBench]:
    made = ToolBench(tmp_path)
    yield made
    await made.close()


def bench_at(root: Path) -> ToolBench:
    return ToolBench(root)


async def test_a_directory_is_listed_in_order_with_sizes_and_marks(bench: ToolBench) -> None:
    bench.put({"b.txt": "12345", "a/inner": "x", ".hidden": "", "a.txt": "é", "a-b": ""})
    (bench.root / "to-a").symlink_to("a")
    result = await bench.call("ls", {})
    assert text_of(result).splitlines() == [".hidden  0", "a/", "a-b  0", "a.txt  2", "b.txt  5", "to-a@ -> a"]
    assert not result.is_error


async def test_details_say_what_each_entry_is(bench: ToolBench) -> None:
    bench.put({"d/f.txt": "123"})
    os.utime(bench.root / "d/f.txt", ns=(0, 1_700_000_000_123_456_789))
    os.utime(bench.root / "d", ns=(0, 0))
    (bench.root / "d/dead").symlink_to("missing/target")
    os.utime(bench.root / "d/dead", ns=(0, 1_000_000_000), follow_symlinks=False)
    result = await bench.call("ls", {"path": "d"})
    assert result.details == {
        "path": str(bench.root / "d"),
        "relativePath": "d",
        "entries": [
            {
                "path": "d/dead",
                "name": "dead",
                "type": "symlink",
                "bytes": None,
                "modifiedAt": "1970-01-01T00:00:01.000Z",
                "target": "missing/target",
                "broken": True,
            },
            {
                "path": "d/f.txt",
                "name": "f.txt",
                "type": "file",
                "bytes": 3,
                "modifiedAt": "2023-11-14T22:13:20.123Z",
            },
        ],
        "truncated": False,
        "limitReached": False,
        "total": 2,
    }


async def test_links_are_listed_whether_or_not_they_lead_anywhere(bench: ToolBench) -> None:
    bench.put({"file": "x"})
    for name, target in {"dead": "gone", "self": "self", "out": "/etc/hostname", "under-file": "file/x"}.items():
        (bench.root / name).symlink_to(target)
    result = await bench.call("ls", {})
    assert text_of(result).splitlines() == [
        "dead@ -> gone  (broken)",
        "file  1",
        "out@ -> /etc/hostname",  # what is outside is none of the caller's business
        "self@ -> self  (broken)",
        "under-file@ -> file/x  (broken)",
    ]


async def test_a_link_that_leads_out_says_nothing_about_what_is_there(bench: ToolBench, tmp_path: Path) -> None:
    (bench.root / "there").symlink_to("/etc")
    (bench.root / "not-there").symlink_to("/no/such/thing/anywhere")
    entries = (await bench.call("ls", {})).details["entries"]
    assert {entry["name"]: entry["broken"] for entry in entries} == {"there": False, "not-there": False}


async def test_pipes_sockets_and_devices_are_other(bench: ToolBench) -> None:
    os.mkfifo(bench.root / "pipe")
    with socket.socket(socket.AF_UNIX) as server:
        here = Path.cwd()
        os.chdir(bench.root)  # a socket's path is at most 107 bytes
        server.bind("sock")
        os.chdir(here)
        result = await bench.call("ls", {"recursive": True})
    assert [(entry["name"], entry["type"], entry["bytes"]) for entry in result.details["entries"]] == [
        ("pipe", "other", None),
        ("sock", "other", None),
    ]


async def test_an_empty_directory_says_so(bench: ToolBench) -> None:
    (bench.root / "nothing").mkdir()
    result = await bench.call("ls", {"path": "nothing"})
    assert (text_of(result), result.details["entries"], result.is_error) == ("nothing is empty", [], False)


async def test_temporary_files_of_the_service_are_not_shown(bench: ToolBench) -> None:
    bench.put({".toolcrib-tmp-0123456789abcdef": "half", "whole": ""})
    (bench.root / ".toolcrib-tmp-d").mkdir()
    assert paths(await bench.call("ls", {"recursive": True})) == ["whole"]


async def test_a_recursive_listing_goes_down_each_directory_where_it_stands(bench: ToolBench) -> None:
    bench.put({"p/q/r.txt": "1", "p/a": "", "b": ""})
    (bench.root / "p/me").symlink_to(".")
    assert paths(await bench.call("ls", {"recursive": True})) == ["b", "p", "p/a", "p/me", "p/q", "p/q/r.txt"]


async def test_depth_one_is_the_directorys_own_entries(bench: ToolBench) -> None:
    bench.put({"p/q/r.txt": "1"})
    assert paths(await bench.call("ls", {"recursive": True, "maxDepth": 1})) == ["p"]
    assert paths(await bench.call("ls", {"recursive": True, "maxDepth": 2})) == ["p", "p/q"]


async def test_max_depth_alone_asks_for_recursion_and_recursive_false_wins(bench: ToolBench) -> None:
    bench.put({"p/q/r.txt": "1"})
    assert paths(await bench.call("ls", {"max_depth": 2})) == ["p", "p/q"]
    assert paths(await bench.call("ls", {"recursive": False, "maxDepth": 2})) == ["p"]


@pytest.mark.parametrize(
    "arguments",
    [
        {"maxDepth": 0},
        {"maxDepth": -1},
        {"limit": 0},
        {"limit": -5},
        {"limit": 1.5},
        {"limit": "many"},
        {"recursive": "yes"},
        {"path": ""},
        {"path": 7},
        {"path": "a\0b"},
        {"path": "\ud800"},
        {"colour": "red"},
    ],
)
async def test_arguments_that_do_not_fit_are_refused(bench: ToolBench, arguments: dict[str, Any]) -> None:
    assert (await bench.refusal("ls", arguments)).code is ErrorCode.INVALID_ARGUMENTS


@pytest.mark.parametrize(
    ("path", "code"),
    [
        ("nope", ErrorCode.NOT_FOUND),
        ("f.txt", ErrorCode.NOT_A_DIRECTORY),
        ("f.txt/x", ErrorCode.NOT_A_DIRECTORY),
        ("pipe", ErrorCode.NOT_A_DIRECTORY),
        ("..", ErrorCode.PATH_OUTSIDE_WORKSPACE),
        ("/etc", ErrorCode.PATH_OUTSIDE_WORKSPACE),
        ("out", ErrorCode.PATH_OUTSIDE_WORKSPACE),
        ("x" * 300, ErrorCode.NAME_TOO_LONG),
        ("x/" * 3000, ErrorCode.NAME_TOO_LONG),
    ],
)
async def test_a_path_that_is_no_directory_inside_is_an_error(bench: ToolBench, path: str, code: ErrorCode) -> None:
    bench.put({"f.txt": ""})
    os.mkfifo(bench.root / "pipe")
    (bench.root / "out").symlink_to("/etc")
    assert (await bench.refusal("ls", {"path": path})).code is code


async def test_a_missing_path_gets_the_name_that_looks_like_it(bench: ToolBench) -> None:
    (bench.root / "Straße").mkdir()
    assert "Straße" in (await bench.refusal("ls", {"path": "STRASSE"})).message


async def test_a_directory_is_reached_by_its_absolute_path_and_through_a_link(bench: ToolBench) -> None:
    bench.put({"real/f": ""})
    (bench.root / "link").symlink_to("real")
    for path in ("real", "real/", "./real/.", "link", str(bench.root / "real"), "real/../real"):
        result = await bench.call("ls", {"path": path})
        assert (paths(result), result.details["relativePath"]) == (["real/f"], "real"), path


async def test_the_limit_keeps_the_first_in_order_whatever_they_are(bench: ToolBench) -> None:
    bench.put({"d/1": "", "d/2": "", "d/3": ""})
    (bench.root / "d/0").symlink_to("gone")
    two = await bench.call("ls", {"path": "d", "limit": 2})
    assert (paths(two), two.details["truncated"], two.details["limitReached"], two.details["total"]) == (
        ["d/0", "d/1"],
        True,
        True,
        4,
    )
    assert text_of(two).endswith(
        "\n\n[Showing the first 2 of 4 entries. Raise limit, or list a directory further down.]"
    )
    four = await bench.call("ls", {"path": "d", "limit": 4})
    assert (len(paths(four)), four.details["truncated"], four.details["limitReached"]) == (4, False, False)
    deep = await bench.call("ls", {"recursive": True, "limit": 3})
    assert (paths(deep), deep.details["total"]) == (["d", "d/0", "d/1"], None)
    assert "there are more" in text_of(deep)


async def test_the_workspaces_limits_hold_and_are_told(bench: ToolBench) -> None:
    bench.put({f"{number:03d}-{'n' * 40}": "" for number in range(50)})
    result = await bench.call("ls", {}, ls={"limit": 30, "maxOutputBytes": 600})
    assert len(text_of(result).encode()) <= 600
    assert len(result.details["entries"]) == 30
    assert result.details["truncated"]
    assert "The details of this result hold the first 30" in text_of(result)
    definition = ls_definition(WorkspaceOptions.from_json({"ls": {"limit": 30, "executionMode": "sequential"}}))
    assert "first 30 entries" in definition.description
    assert definition.execution_mode == "sequential"


async def test_text_has_at_most_two_thousand_lines(bench: ToolBench) -> None:
    with quick_directory() as root:
        for number in range(2_100):
            (root / f"{number:05d}").touch()
        wide = bench_at(root)
        result = await wide.call("ls", {"limit": 5_000})
        await wide.close()
    lines = text_of(result).split("\n")
    assert len(lines) == 2_000 + 2  # the notice stands apart
    assert len(result.details["entries"]) == 2_100
    assert (result.details["truncated"], result.details["limitReached"]) == (True, False)
    assert "of 2100 entries. The details of this result hold all." in lines[-1]


async def test_odd_names_are_shown_on_one_line_and_given_whole(bench: ToolBench) -> None:
    names = [b"a\nb", b"bad\xff.txt", b"tab\there", "zero\u2028width".encode(), b"-rf", b"[x]"]
    for name in names:
        (bench.root / os.fsdecode(name)).touch()
    result = await bench.call("ls", {})
    assert text_of(result).split("\n") == [
        "-rf  0",
        "[x]  0",
        "a\\nb  0",
        "bad\\xff.txt  0",
        "tab\\there  0",
        "zero\\u2028width  0",
    ]
    entries = {entry["name"]: entry for entry in result.details["entries"]}
    assert set(entries) == {"-rf", "[x]", "a\nb", "bad\\xff.txt", "tab\there", "zero\u2028width"}
    assert base64.b64decode(entries["bad\\xff.txt"]["nameBase64"]) == b"bad\xff.txt"
    assert "nameBase64" not in entries["a\nb"]
    orjson.dumps(result.to_json())


async def test_a_listing_inside_a_directory_with_an_odd_name_carries_the_whole_path(bench: ToolBench) -> None:
    odd = bench.root / os.fsdecode(b"d\xfe")
    odd.mkdir()
    (odd / "f").touch()
    entry = (await bench.call("ls", {"recursive": True})).details["entries"][1]
    assert entry["path"] == "d\\xfe/f"
    assert entry["name"] == "f"
    assert base64.b64decode(entry["pathBase64"]) == b"d\xfe/f"


async def test_an_unreadable_directory_is_marked_and_the_rest_is_listed() -> None:
    with unprivileged_directory() as root:
        (root / "secret").mkdir()
        (root / "secret" / "x").touch()
        (root / "secret").chmod(0)
        (root / "z").touch()
        bench = bench_at(root)
        try:
            result = await bench.call("ls", {"recursive": True})
            refusal = await bench.refusal("ls", {"path": "secret"})
        finally:
            (root / "secret").chmod(0o700)
            await bench.close()
    assert text_of(result).split("\n") == ["secret/  (unreadable: permission denied)", "z  0"]
    assert result.details["entries"][0]["error"] == "unreadable: permission denied"
    assert refusal.code is ErrorCode.PERMISSION_DENIED


async def test_a_directory_that_may_be_read_and_not_entered_still_shows_its_names() -> None:
    with unprivileged_directory() as root:
        (root / "d").mkdir()
        (root / "d" / "f").touch()
        (root / "d").chmod(0o400)
        bench = bench_at(root)
        try:
            result = await bench.call("ls", {"path": "d"})
        finally:
            (root / "d").chmod(0o700)
            await bench.close()
    assert [(entry["name"], entry["bytes"]) for entry in result.details["entries"]] == [("f", None)]


async def test_a_tree_five_thousand_deep_is_listed(bench: ToolBench) -> None:
    with deep_tree(5_000) as root:
        deep = bench_at(root)
        result = await deep.call("ls", {"recursive": True, "limit": 10_000})
        await deep.close()
    assert result.details["truncated"]  # the paths alone would make a result of 25 MB
    assert len(orjson.dumps(result.to_json())) < 8 * 1_048_576
    assert len(text_of(result).encode()) <= 65_536
    assert paths(result)[:2] == ["d", "d/d"]


async def test_a_hundred_thousand_entries_are_listed_without_holding_up_the_loop() -> None:
    with quick_directory() as root:
        fd = os.open(root, os.O_RDONLY)
        for number in range(100_000):
            os.close(os.open(f"{number:06d}", os.O_CREAT, dir_fd=fd))
        os.close(fd)
        bench = bench_at(root)
        worst = 0.0
        done = asyncio.Event()

        async def watch() -> None:
            nonlocal worst
            while not done.is_set():
                before = time.perf_counter()
                await asyncio.sleep(0.001)
                worst = max(worst, time.perf_counter() - before)

        async with asyncio.TaskGroup() as group:
            group.create_task(watch())
            result = await bench.call("ls", {})
            done.set()
        await bench.close()
    assert (len(paths(result)), result.details["total"]) == (2_000, 100_000)
    assert paths(result)[-1] == "001999"
    assert worst < 0.5


async def test_a_listing_stops_when_it_is_told_to(bench: ToolBench) -> None:
    bench.put({f"d{number}/f": "" for number in range(50)})
    signal = AbortSignal()
    signal.abort(AbortReason.CANCELLED)
    with pytest.raises(Aborted):
        await bench.call("ls", {"recursive": True}, signal=signal)
    assert threading.active_count() < 40


async def test_the_schema_fits_the_arguments_and_annotations_say_it_reads(bench: ToolBench) -> None:
    definition = ls_definition(WorkspaceOptions())
    jsonschema.Draft202012Validator.check_schema(definition.parameters)
    jsonschema.validate({"path": "a", "recursive": True, "maxDepth": 3, "limit": 10}, definition.parameters)
    assert definition.annotations.read_only_hint
    assert definition.execution_mode == "parallel"
