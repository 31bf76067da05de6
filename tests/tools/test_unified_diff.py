"""Diffs: patch programs take them, and they cost little however large the text is."""

import os
import re
import shutil
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.tools.unified_diff import DIFF_MAX_BYTES, Span, common_prefix, unified_diff, unified_diff_from_spans

PATCH_PROGRAMS = {"git": ["git", "apply"], "patch": ["patch", "--strip=1", "--silent", "--fuzz=0"]}


def test_a_change_is_shown_with_three_lines_around_it() -> None:
    old = "".join(f"line {number}\n" for number in range(1, 11))
    start = old.index("line 5")
    assert unified_diff_from_spans(old, [(start, start + 6, "LINE five\nand a half")], "notes/a.txt") == (
        "--- a/notes/a.txt\n"
        "+++ b/notes/a.txt\n"
        "@@ -2,7 +2,8 @@\n"
        " line 2\n"
        " line 3\n"
        " line 4\n"
        "-line 5\n"
        "+LINE five\n"
        "+and a half\n"
        " line 6\n"
        " line 7\n"
        " line 8\n"
    )


def test_near_changes_share_a_hunk_and_far_ones_do_not() -> None:
    old = "".join(f"{number}\n" for number in range(1, 31))
    spans = [(old.index(text), old.index(text) + len(text), text.lower() + "!") for text in ("2\n3", "10", "25")]
    spans[0] = (2, 3, "two")
    diff = unified_diff_from_spans(old, spans, "n")
    assert diff is not None
    assert re.findall(r"@@.*@@", diff) == ["@@ -1,5 +1,5 @@", "@@ -7,7 +7,7 @@", "@@ -22,7 +22,7 @@"]
    grown = unified_diff_from_spans(old, [(2, 3, "two\nand a half"), (60, 62, "")], "n")
    assert grown is not None
    assert re.findall(r"@@.*@@", grown) == ["@@ -1,5 +1,6 @@", "@@ -21,7 +22,7 @@"]
    exactly_six_apart = unified_diff_from_spans(old, [(2, 3, "two"), (16, 17, "nine")], "n")
    assert exactly_six_apart is not None
    assert re.findall(r"@@.*@@", exactly_six_apart) == ["@@ -1,12 +1,12 @@"]
    near = unified_diff_from_spans(old, [(2, 3, "two"), (14, 15, "eight")], "n")
    assert near is not None
    assert re.findall(r"@@.*@@", near) == ["@@ -1,11 +1,11 @@"]


def test_lines_inside_a_span_that_stay_are_context() -> None:
    old = "a\nb\nc\nd\ne\n"
    assert unified_diff_from_spans(old, [(0, len(old), "a\nB\nc\nD\ne\n")], "n") == (
        "--- a/n\n+++ b/n\n@@ -1,5 +1,5 @@\n a\n-b\n+B\n c\n-d\n+D\n e\n"
    )


def test_a_missing_final_newline_is_marked_on_the_side_that_lacks_it() -> None:
    assert unified_diff("a\nb", "a\nb\n", "n") == (
        "--- a/n\n+++ b/n\n@@ -1,2 +1,2 @@\n a\n-b\n\\ No newline at end of file\n+b\n"
    )
    assert unified_diff("a\nb", "A\nb", "n") == (
        "--- a/n\n+++ b/n\n@@ -1,2 +1,2 @@\n-a\n+A\n b\n\\ No newline at end of file\n"
    )


def test_carriage_returns_stay_in_the_patch() -> None:
    assert unified_diff("a\r\nb\r\n", "a\r\nc\r\n", "n") == "--- a/n\n+++ b/n\n@@ -1,2 +1,2 @@\n a\r\n-b\r\n+c\r\n"


def test_only_lf_ends_a_line() -> None:
    old = "a\x0bb\u2028c\x85d\re\x1cf\n"
    assert (
        unified_diff(old, old.replace("d", "D"), "n")
        == f"--- a/n\n+++ b/n\n@@ -1 +1 @@\n-{old}+{old.replace('d', 'D')}"
    )


def test_no_change_is_an_empty_diff() -> None:
    assert unified_diff("a\n", "a\n", "n") == ""
    assert unified_diff_from_spans("a\nb\n", [(0, 1, "a"), (2, 2, "")], "n") == ""
    assert unified_diff_from_spans("a\n", [], "n") == ""


def test_a_new_file_comes_from_dev_null() -> None:
    assert unified_diff(None, "x\ny\n", "d/n") == "--- /dev/null\n+++ b/d/n\n@@ -0,0 +1,2 @@\n+x\n+y\n"
    assert unified_diff(None, "", "d/n") == ""


@pytest.mark.parametrize(
    ("path", "shown"),
    [
        ("with space", "a/with space\t"),
        ("日本語", "a/日本語"),
        ('quo"te', '"a/quo\\042te"'),
        ("back\\slash", '"a/back\\134slash"'),
        ("tab\there", '"a/tab\\011here"'),
        ("bad\udcff", '"a/bad\\377"'),
    ],
)
def test_names_are_written_as_git_writes_them(path: str, shown: str) -> None:
    diff = unified_diff("a\n", "b\n", path)
    assert diff is not None
    diff.encode("utf-8")
    assert diff.split("\n")[0] == f"--- {shown}"


def test_an_insertion_finds_few_changes_among_many_equal_lines() -> None:
    old = [f"value {number}\n" for number in range(5000)]
    new = [*old[:10], "extra\n", *old[10:4000], "value four thousand\n", *old[4001:]]
    diff = unified_diff("".join(old), "".join(new), "n")
    assert diff is not None
    assert [line for line in diff.split("\n") if line[:1] in {"+", "-"}][2:] == [
        "+extra",
        "-value 4000",
        "+value four thousand",
    ]


def test_a_diff_longer_than_its_cap_is_none() -> None:
    assert unified_diff("a\n", "b" * DIFF_MAX_BYTES, "n") is None
    assert unified_diff(None, "é" * (DIFF_MAX_BYTES // 2 + 1), "n") is None
    assert unified_diff("a\n" * 10, "b\n" * 10, "n", max_bytes=40) is None
    assert unified_diff("a\n" * 10, "b\n" * 10, "n", max_input=10) is None
    exact = unified_diff("a\n", "b\n", "n")
    assert exact is not None
    assert unified_diff("a\n", "b\n", "n", max_bytes=len(exact)) == exact
    assert unified_diff("a\n", "b\n", "n", max_bytes=len(exact) - 1) is None


def test_common_prefix_is_exact_across_its_blocks() -> None:
    for size in (0, 1, 4095, 4096, 4097, 9000):
        assert common_prefix("x" * size + "a", "x" * size + "b") == size
        assert common_prefix("x" * size, "x" * size + "b") == size


lines = st.sampled_from(["a", "b", "", "cc", "a\r", "\r", "longer line", "é"])
texts = st.lists(lines, max_size=12).map("\n".join)
long_texts = st.lists(st.lists(lines, max_size=5) | st.just(["same"] * 7), max_size=6).map(
    lambda parts: "\n".join(line for part in parts for line in part)
)


@st.composite
def replaced(draw: st.DrawFn) -> tuple[str, list[Span]]:
    old = draw(long_texts)
    cuts = sorted(draw(st.lists(st.integers(0, len(old)), max_size=12).filter(lambda cut: len(cut) % 2 == 0)))
    return old, [(start, end, draw(texts)) for start, end in zip(cuts[::2], cuts[1::2], strict=True)]


@given(replaced())
def test_a_diff_of_spans_leads_from_the_old_text_to_the_new_one(case: tuple[str, list[Span]]) -> None:
    old, spans = case
    diff = unified_diff_from_spans(old, spans, "n")
    assert diff is not None
    assert patched(old, diff) == spliced(old, spans)


@given(texts, texts)
def test_a_diff_of_texts_leads_from_one_to_the_other(old: str, new: str) -> None:
    diff = unified_diff(old, new, "n")
    assert diff is not None
    assert patched(old, diff) == new
    assert (diff == "") == (old == new)


@pytest.mark.parametrize("program", sorted(PATCH_PROGRAMS))
def test_patch_programs_take_the_diffs(program: str, tmp_path: Path) -> None:
    if shutil.which(program) is None:
        pytest.skip(f"{program} is not on PATH: its reading of the diffs is not tested here")
    pieces: list[str] = []
    expected: dict[str, str] = {}

    def add(name: str, old: str | None, new: str) -> None:
        if old is not None:
            (tmp_path / name).write_bytes(old.encode())
        diff = unified_diff(old, new, name)
        assert diff is not None
        pieces.append(diff)
        expected[name] = new

    add("with space.txt", "a\nb\n", "a\nc\n")
    add("日本語.txt", "a\nb", "a\nc")
    add('quo"te.txt', "a\nb\n", "a\nb")
    add("tab\t.txt", "a\nb", "a\nb\n")
    add("crlf.txt", "a\r\nb\r\nc\r\n", "a\r\nB\r\nc\r\n")
    add("mixed.txt", "a\r\nb\nc\r\nd", "a\nb\r\nc\r\nd\r\n")
    add("mac.txt", "a\rb\rc", "a\rB\rc")
    add("empty.txt", "", "now\nfull\n")
    add("emptied.txt", "now\nfull", "")
    add("new.txt", None, "x\n")
    add("new-without-end.txt", None, "x\ny")
    add("separators.txt", "a\u2028b\x0bc\x85\nd\x1ee\n", "a\u2028b\x0bC\x85\nd\x1ee\n")
    long = [f"line {number % 7} of {number}\n" for number in range(400)]
    add("far.txt", "".join(long), "".join(["new\n", *long[:100], *long[110:250], "x\n", "y\n", *long[250:]]))
    add("all.txt", "".join(long[:50]), "".join(reversed(long[:50])))

    run = subprocess.run(
        PATCH_PROGRAMS[program],
        input="".join(pieces).encode(),
        cwd=tmp_path,
        env={"PATH": os.environ["PATH"], "GIT_CEILING_DIRECTORIES": str(tmp_path.parent), "LC_ALL": "C"},
        capture_output=True,
        timeout=30,
        check=False,
    )
    assert run.returncode == 0, run.stderr.decode()
    assert {name: (tmp_path / name).read_bytes().decode() for name in expected} == expected


def ten_megabytes(line: str) -> str:
    return line * (10_000_000 // len(line))


@pytest.mark.parametrize(
    ("make", "omitted"),
    [
        pytest.param(lambda: (ten_megabytes("some words in a line\n"), "x\n"), True, id="everything-removed"),
        pytest.param(lambda: (ten_megabytes("\n"), "x" + ten_megabytes("\n")), False, id="only-line-ends"),
        pytest.param(lambda: ("x" * 10_000_000, "x" * 5_000_000 + "y" + "x" * 5_000_000), True, id="one-line"),
        pytest.param(lambda: ("x\n" * 200, "".join(f"x\n{n}\n" for n in range(200))), False, id="worst-of-difflib"),
        pytest.param(
            lambda: ("".join(f"{n % 50}\n" for n in range(9000)), "".join(f"{n % 49}\n" for n in range(9000))),
            True,
            id="many-repeated-lines",
        ),
        pytest.param(
            lambda: ("".join(f"{n}\n" for n in range(9000)), "".join(f"{n}\n" for n in range(9000, 0, -1))),
            True,
            id="turned-round",
        ),
    ],
)
def test_no_input_makes_a_diff_dear(make: Callable[[], tuple[str, str]], omitted: bool) -> None:
    old, new = make()
    started = time.thread_time()
    diff = unified_diff(old, new, "n")
    spent = time.thread_time() - started
    assert (diff is None) == omitted
    assert spent < 0.2, f"{spent * 1000:.0f} ms"


def test_many_spans_in_one_long_line_cost_what_one_does() -> None:
    old = "ab" * 4_000_000
    spans = [(start, start + 1, "x") for start in range(0, 5000 * 100, 100)]
    started = time.thread_time()
    assert unified_diff_from_spans(old, spans, "n") is None
    assert time.thread_time() - started < 0.5


def test_a_span_of_a_whole_large_file_costs_what_counting_its_lines_does() -> None:
    started = time.thread_time()
    assert unified_diff_from_spans("x\n" * 3_000_000, [(0, 6_000_000, "y\n" * 3_000_000)], "n") is None
    assert time.thread_time() - started < 0.2


def spliced(old: str, spans: list[Span]) -> str:
    pieces: list[str] = []
    cursor = 0
    for start, end, replacement in spans:
        pieces += [old[cursor:start], replacement]
        cursor = end
    return "".join([*pieces, old[cursor:]])


def patched(old: str, diff: str) -> str:
    """Apply a unified diff as strictly as can be: every context line, line number and count must fit."""
    source = re.findall(r"[^\n]*\n|[^\n]+", old)
    result: list[str] = []
    at = 0
    body = re.findall(r"[^\n]*\n|[^\n]+", diff)[2:]
    while body:
        head = re.fullmatch(r"@@ -(\d+)(?:,(\d+))? \+(\d+)(?:,(\d+))? @@\n", body.pop(0))
        assert head is not None
        first, removed, new_first, added = (1 if part is None else int(part) for part in head.groups())
        start = first - 1 if removed else first
        assert start >= at
        result += source[at:start]
        at = start
        assert len(result) == (new_first - 1 if added else new_first)
        while removed or added:
            line = body.pop(0)
            mark, text = line[0], line[1:]
            if body and body[0].startswith("\\"):
                assert body.pop(0) == "\\ No newline at end of file\n"
                text = text.removesuffix("\n")
            if mark in " -":
                assert source[at] == text
                at += 1
                removed -= 1
            if mark in " +":
                result.append(text)
                added -= 1
    result += source[at:]
    assert all(line.endswith("\n") for line in result[:-1])
    return "".join(result)
