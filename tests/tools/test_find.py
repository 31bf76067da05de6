"""find: globs over a tree, in order, with the ignore rules of grep."""

import base64
import os
import tracemalloc
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import jsonschema
import orjson
import pytest

from app.domain.abort import Aborted, AbortReason, AbortSignal
from app.domain.workspace import WorkspaceOptions
from app.errors import ErrorCode
from app.tools.find import find_definition
from tests.support.deep_tree import deep_tree, quick_directory
from tests.support.other_user import unprivileged_directory
from tests.support.tool_bench import ToolBench, paths, text_of

pytestmark = pytest.mark.anyio


@pytest.fixture
async def bench(tmp_path: Path) -> AsyncIterator[ToolBench]:
    made = ToolBench(tmp_path)
    yield made
    await made.close()


async def found(bench: ToolBench, pattern: str, **arguments: Any) -> list[str]:
    return paths(await bench.call("find", {"pattern": pattern, **arguments}))


async def test_a_name_is_found_at_any_depth_and_a_path_from_the_start(bench: ToolBench) -> None:
    bench.put({"doc/api/v1.md": "", "doc/api/deep/x.md": "", "start.md": ""})
    assert await found(bench, "doc/api/v1.md") == ["doc/api/v1.md"]
    assert await found(bench, "doc/api/*.md") == ["doc/api/v1.md"]
    assert await found(bench, "**/v1.md") == ["doc/api/v1.md"]
    assert await found(bench, "*.md") == ["doc/api/deep/x.md", "doc/api/v1.md", "start.md"]
    assert await found(bench, "doc/**/*.md") == ["doc/api/deep/x.md", "doc/api/v1.md"]
    assert await found(bench, "api/*.md") == []
    assert await found(bench, "api/*.md", path="doc") == ["doc/api/v1.md"]
    assert await found(bench, "*.MD") == []


async def test_directories_end_in_a_slash_and_every_type_is_told(bench: ToolBench) -> None:
    bench.put({"src/x1": "", "x2/.keep": ""})
    (bench.root / "x3").symlink_to("src")
    os.mkfifo(bench.root / "x4")
    (bench.root / "empty-x").mkdir()
    result = await bench.call("find", {"pattern": "*x*"})
    assert text_of(result).split("\n") == ["empty-x/", "src/x1", "x2/", "x3", "x4"]
    assert result.details == {
        "path": str(bench.root),
        "relativePath": ".",
        "entries": [
            {"path": "empty-x", "type": "directory"},
            {"path": "src/x1", "type": "file"},
            {"path": "x2", "type": "directory"},
            {"path": "x3", "type": "symlink"},
            {"path": "x4", "type": "other"},
        ],
        "truncated": False,
        "limitReached": False,
        "ignored": 0,
        "unreadable": 0,
    }
    for kind, expected in {
        "file": ["src/x1"],
        "directory": ["empty-x", "x2"],
        "symlink": ["x3"],
        "other": ["x4"],
    }.items():
        assert await found(bench, "*x*", type=kind) == expected
    assert await found(bench, "x*/") == ["x2"]


async def test_hidden_entries_are_found_and_git_is_not(bench: ToolBench) -> None:
    bench.put({".github/workflows/ci.yml": "", ".eslintrc.json": "", "src/.env": "", ".git/config": "", "s/.git": ""})
    assert await found(bench, ".github/workflows/*.yml") == [".github/workflows/ci.yml"]
    assert await found(bench, ".eslintrc.json") == [".eslintrc.json"]
    assert await found(bench, "**/.env") == ["src/.env"]
    assert await found(bench, "**", type="file") == [".eslintrc.json", ".github/workflows/ci.yml", "src/.env"]
    assert (await bench.call("find", {"pattern": "**"})).details["ignored"] == 0


async def test_git_is_found_when_it_is_spelled_out(bench: ToolBench) -> None:
    bench.put({".git/config": "", ".git/hooks/pre-push": ""})
    assert await found(bench, ".git/config") == [".git/config"]
    assert await found(bench, ".git/**", type="file") == [".git/config", ".git/hooks/pre-push"]
    assert await found(bench, "pre-*", path=".git") == [".git/hooks/pre-push"]


async def test_ignore_rules_hold_at_every_level_and_the_result_says_so(bench: ToolBench) -> None:
    bench.put(
        {
            ".gitignore": "dist/\n*.log\n",
            "dist/app.js": "",
            "sub/.gitignore": "!keep.log\n",
            "sub/keep.log": "",
            "sub/other.log": "",
        }
    )
    result = await bench.call("find", {"pattern": "**/*.log"})
    assert (paths(result), result.details["ignored"]) == (["sub/keep.log"], 2)  # dist and other.log
    assert "Left out by ignore rules: 2" in text_of(result)


async def test_an_ignored_path_is_found_when_it_is_named(bench: ToolBench) -> None:
    bench.put({".gitignore": "dist/\n*.log\n", "dist/app.js": "", "dist/deep/x.log": "", "a.log": "", "s/a.log": ""})
    assert await found(bench, "dist/app.js") == ["dist/app.js"]
    assert await found(bench, "dist/*.js") == ["dist/app.js"]
    assert await found(bench, "dist") == ["dist"]
    assert await found(bench, "a.log") == ["a.log"]
    assert await found(bench, "*.log", path="dist") == ["dist/deep/x.log"]
    assert await found(bench, "*.log", path="dist/deep") == ["dist/deep/x.log"]
    assert await found(bench, "*/app.js") == []


async def test_rules_above_the_root_and_in_the_repositorys_own_files_do_not_count(tmp_path: Path) -> None:
    (tmp_path / ".gitignore").write_text("*\n")
    root = tmp_path / "ws"
    root.mkdir()
    bench = ToolBench(root)
    bench.put({"lib/k.cfg": "", ".git/info/exclude": "lib/\n", ".git/HEAD": ""})
    assert await found(bench, "k.cfg") == ["lib/k.cfg"]
    await bench.close()


async def test_rules_between_the_root_and_the_path_count(bench: ToolBench) -> None:
    bench.put({".gitignore": "*.tmp\n", "a/.gitignore": "/b/x\n", "a/b/x": "", "a/b/y": "", "a/b/z.tmp": ""})
    assert await found(bench, "*", path="a/b") == ["a/b/y"]


async def test_the_limit_keeps_the_first_in_order(bench: ToolBench) -> None:
    bench.put({"a.ts": "", "b.tsx": "", "c.js": "", "d.ts": ""})
    assert await found(bench, "*.{ts,tsx}") == ["a.ts", "b.tsx", "d.ts"]
    two = await bench.call("find", {"pattern": "*.{ts,tsx}", "limit": 2})
    assert (paths(two), two.details["truncated"], two.details["limitReached"]) == (["a.ts", "b.tsx"], True, True)
    assert "there are more. Raise limit, or narrow pattern or path." in text_of(two)
    three = await bench.call("find", {"pattern": "*.{ts,tsx}", "limit": 3})
    assert (len(paths(three)), three.details["truncated"], three.details["limitReached"]) == (3, False, False)


async def test_nothing_found_is_a_success_and_a_bad_place_is_not(bench: ToolBench) -> None:
    bench.put({"f.txt": ""})
    result = await bench.call("find", {"pattern": "*.md"})
    assert (text_of(result), result.is_error, result.details["entries"]) == ("No matches found", False, [])
    assert (await bench.refusal("find", {"pattern": "*", "path": "nope"})).code is ErrorCode.NOT_FOUND
    assert (await bench.refusal("find", {"pattern": "*", "path": "f.txt"})).code is ErrorCode.NOT_A_DIRECTORY
    assert (await bench.refusal("find", {"pattern": "*", "path": ".."})).code is ErrorCode.PATH_OUTSIDE_WORKSPACE


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({}, "pattern: required"),
        ({"pattern": ""}, "pattern"),
        ({"pattern": "a" * 5_000}, "at most 4096"),
        ({"pattern": "[a"}, "not closed"),
        ({"pattern": "{a"}, "not closed"),
        ({"pattern": "a\\"}, "backslash"),
        ({"pattern": "../*"}, ".."),
        ({"pattern": "a/../b"}, ".."),
        ({"pattern": "."}, "names nothing"),
        ({"pattern": "/"}, "names nothing"),
        ({"pattern": 5}, "string"),
        ({"pattern": "*", "limit": 0}, "at least 1"),
        ({"pattern": "*", "limit": -1}, "at least 1"),
        ({"pattern": "*", "type": "dir"}, "one of"),
        ({"pattern": "*", "path": ""}, "empty"),
        ({"pattern": "*", "path": "a\0"}, "NUL"),
        ({"pattern": "*", "depth": 1}, "unknown"),
    ],
)
async def test_arguments_that_do_not_fit_are_refused(bench: ToolBench, arguments: dict[str, Any], words: str) -> None:
    refusal = await bench.refusal("find", arguments)
    assert refusal.code is ErrorCode.INVALID_ARGUMENTS
    assert words in refusal.message


@pytest.mark.parametrize("pattern", ["-rf", "--help", "!x", "#x", " x ", "a\nb", "~", "$HOME", "`id`", "x" * 300])
async def test_patterns_that_mean_something_elsewhere_are_names_here(bench: ToolBench, pattern: str) -> None:
    if len(pattern) < 255:
        bench.put({pattern: "", f"d/{pattern}": ""})
        assert await found(bench, pattern) == sorted([pattern, f"d/{pattern}"], key=lambda p: p.split("/"))
    else:
        assert await found(bench, pattern) == []


async def test_other_spellings_of_the_arguments_are_taken(bench: ToolBench) -> None:
    bench.put({"d/a.md": ""})
    assert paths(await bench.call("find", {"glob": "*.md", "file_path": "d"})) == ["d/a.md"]


async def test_names_that_are_no_utf8_and_names_with_line_ends_are_found(bench: ToolBench) -> None:
    for name in (b"bad\xff.txt", b"a\nb.txt", "é.txt".encode()):
        (bench.root / os.fsdecode(name)).touch()
    result = await bench.call("find", {"pattern": "*.txt"})
    assert text_of(result).split("\n") == ["a\\nb.txt", "bad\\xff.txt", "é.txt"]
    entry = result.details["entries"][1]
    assert base64.b64decode(entry["pathBase64"]) == b"bad\xff.txt"
    assert await found(bench, "?.txt") == ["é.txt"]
    orjson.dumps(result.to_json())


async def test_links_are_not_followed_on_the_way(bench: ToolBench, tmp_path: Path) -> None:
    bench.put({"real/f.txt": ""})
    (bench.root / "loop").symlink_to(".")
    (bench.root / "out").symlink_to("/etc")
    assert await found(bench, "*.txt") == ["real/f.txt"]
    assert await found(bench, "out/passwd") == []
    assert await found(bench, "f.txt", path="loop/real") == ["real/f.txt"]
    assert (await bench.refusal("find", {"pattern": "*", "path": "out"})).code is ErrorCode.PATH_OUTSIDE_WORKSPACE


async def test_directories_that_cannot_be_read_are_named() -> None:
    with unprivileged_directory() as root:
        (root / "secret").mkdir(mode=0)
        (root / "f.txt").touch()
        bench = ToolBench(root)
        result = await bench.call("find", {"pattern": "*.txt"})
        await bench.close()
    assert (paths(result), result.details["unreadable"]) == (["f.txt"], 1)
    assert "[Directories that were not entered: secret (Permission denied)]" in text_of(result)


async def test_the_end_of_a_tree_five_thousand_deep_is_found() -> None:
    with deep_tree(5_000) as root:
        bench = ToolBench(root)
        assert await found(bench, "end") == ["d/" * 5_000 + "end"]
        await bench.close()


async def test_memory_stays_small_on_a_tree_of_many_files() -> None:
    with quick_directory() as root:
        for directory in range(20):
            (root / f"d{directory}").mkdir()
            fd = os.open(root / f"d{directory}", os.O_RDONLY)
            for number in range(1_000):
                os.close(os.open(f"{number}.txt", os.O_CREAT, dir_fd=fd))
            os.close(fd)
        bench = ToolBench(root)
        tracemalloc.start()
        try:
            result = await bench.call("find", {"pattern": "*.md"})
            limited = await bench.call("find", {"pattern": "*", "limit": 10})
            _, peak = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
        await bench.close()
    assert paths(result) == []
    assert len(paths(limited)) == 10
    assert peak < 3_000_000


async def test_text_keeps_within_the_workspaces_limit(bench: ToolBench) -> None:
    bench.put({f"{number:03d}-{'n' * 60}.txt": "" for number in range(100)})
    result = await bench.call("find", {"pattern": "*.txt"}, find={"maxOutputBytes": 1_000})
    assert len(text_of(result).encode()) <= 1_000
    assert len(result.details["entries"]) == 100
    assert (result.details["truncated"], result.details["limitReached"]) == (True, False)
    assert "of 100 entries. The details of this result hold all." in text_of(result)


async def test_a_search_stops_when_it_is_told_to(bench: ToolBench) -> None:
    signal = AbortSignal()
    signal.abort(AbortReason.CANCELLED)
    with pytest.raises(Aborted):
        await bench.call("find", {"pattern": "*"}, signal=signal)


async def test_an_unrestricted_workspace_may_look_elsewhere(tmp_path: Path) -> None:
    root, outside = tmp_path / "ws", tmp_path / "outside"
    root.mkdir()
    outside.mkdir()
    (outside / ".gitignore").write_text("*.log\n")
    (outside / "a.log").touch()
    (outside / "a.txt").touch()
    bench = ToolBench(root)
    result = await bench.call("find", {"pattern": "a.*", "path": str(outside)}, containment="unrestricted")
    await bench.close()
    assert paths(result) == [f"{outside}/a.txt"]


def test_the_definition_tells_the_limit_that_holds() -> None:
    definition = find_definition(WorkspaceOptions.from_json({"find": {"limit": 7}}))
    assert "first 7 entries" in definition.description
    jsonschema.Draft202012Validator.check_schema(definition.parameters)
    assert definition.parameters["required"] == ["pattern"]
    assert definition.annotations.read_only_hint
