"""ripgrep's arguments and output: what is passed to it, and how what it writes is taken apart."""

import random
import subprocess
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.tools._ripgrep import (
    MAX_ERROR_BYTES,
    ErrorParser,
    OutputParser,
    Query,
    Row,
    explain,
    search_arguments,
)
from tests.support.tool_bench import RG


def query(pattern: str = "x", **changes: object) -> Query:
    values: dict[str, object] = {
        "pattern": pattern,
        "start": "",
        "prefix": "",
        "literal": False,
        "case_sensitive": True,
        "context": 0,
        "max_count": 11,
    }
    return Query(**(values | changes))


def globs(**changes: object) -> list[str]:
    arguments = search_arguments(query(**changes), in_order=False)
    return [argument.removeprefix("--glob=") for argument in arguments if argument.startswith("--glob=")]


def test_neither_pattern_nor_path_can_become_an_option() -> None:
    arguments = search_arguments(query("--pre=./hook.sh", start="-e", prefix="-e/"), in_order=False)
    assert arguments[-3:] == ["--regexp=--pre=./hook.sh", "--", "./-e"]
    assert "--glob=!.git" in arguments


def test_the_configuration_of_the_user_and_rules_above_the_root_are_kept_out() -> None:
    arguments = search_arguments(query(), in_order=True)
    assert {"--no-config", "--no-ignore-global", "--no-ignore-parent", "--no-ignore-exclude"} <= set(arguments)
    assert "--sort=path" in arguments
    assert "--threads=2" in search_arguments(query(), in_order=False)


def test_globs_are_passed_on_when_ripgrep_means_the_same_by_them() -> None:
    hidden = ["!.git", "!.toolcrib-tmp-*"]
    assert globs(include="*.py") == ["/**/*.py", "/**/*.py/**", *hidden]
    assert globs(include="src/**/*.{ts,tsx}", prefix="a [b]/") == [
        "/a \\[b\\]/src/**/*.{ts,tsx}",
        "/a \\[b\\]/src/**/*.{ts,tsx}/**",
        *hidden,
    ]
    assert globs(exclude="node_modules") == ["!/**/node_modules", "!/**/node_modules/**", *hidden]
    assert globs(include="*.py", exclude="t*")[-2:] == hidden  # of two that fit, ripgrep takes the last


@pytest.mark.parametrize("glob", ["*", "src/**", "[ab]", "a/", "/a", "./a", "a//b", "{a/b,c}", "{a,}", "!a", "#a", "a\\b",
                                  "a**b", "a?", "../a", "é", " a"])  # fmt: skip
def test_other_globs_are_left_to_us(glob: str) -> None:
    assert globs(include=glob) == ["!.git", "!.toolcrib-tmp-*"]


def test_rules_at_the_root_are_given_so_that_the_deciding_one_comes_last() -> None:
    arguments = search_arguments(query(ignore_files=(".ignore", ".gitignore")), in_order=False)
    given = [argument for argument in arguments if argument.startswith("--ignore-file")]
    assert given == ["--ignore-file=.gitignore", "--ignore-file=.ignore"]
    assert "--no-ignore" in search_arguments(query(ignored=True), in_order=False)


OUTPUT = (
    b"./a\x001:3:0:[Omitted long line with 1 matches]\n"
    b"./b\nc\x002-5-\n"
    b'./late: WARNING: stopped searching binary file after match (found "\\0" byte around offset 22)\n'
    b"./d\x007:1:9:x\n"
    b'./z: binary file matches (found "\\0" byte around offset 0)\n'
)
ROWS = [Row(b"a", 1, 0, 2), Row(b"b\nc", 2, 5, None), Row(b"d", 7, 9, 0)]


@given(st.lists(st.integers(1, 40), min_size=1))
def test_output_is_taken_apart_wherever_it_is_cut(sizes: list[int]) -> None:
    parser = OutputParser()
    rows: list[Row] = []
    position = 0
    for size in sizes:
        rows += parser.feed(OUTPUT[position : position + size])
        position += size
    rows += parser.feed(OUTPUT[position:])
    assert (rows, parser.binary) == (ROWS, 2)


def test_what_ripgrep_really_writes_is_understood(tmp_path: Path) -> None:
    names = [b"plain.txt", b"with:colon-1-2", b"with\nline end", b"not utf8 \xff", b"-dash", b" "]
    for name in names:
        Path(tmp_path, name.decode("utf-8", "surrogateescape")).write_bytes(b"one\r\n\ntwo x x\nx\nlast")
    (tmp_path / "first.bin").write_bytes(b"\0x\n")
    (tmp_path / "late.bin").write_bytes(b"x\n" * 40_000 + b"\0")
    ran = subprocess.run(
        [RG, *search_arguments(query(context=1, max_count=100_000), in_order=True)],
        cwd=tmp_path,
        capture_output=True,
        check=False,
    )
    output, errors = OutputParser(), ErrorParser()
    rows = output.feed(ran.stdout)
    errors.feed(ran.stderr)
    for name in names:
        assert [row for row in rows if row.path == name] == [
            Row(name, 2, 5, None),
            Row(name, 3, 6, 4),
            Row(name, 4, 14, 0),
            Row(name, 5, 16, None),
        ]
    assert (output.binary, errors.binary, errors.ignored, errors.unreadable) == (1, 2, 0, 0)
    assert errors.message == ""


def test_log_lines_are_counted_and_other_lines_kept() -> None:
    errors = ErrorParser()
    log = (
        b"rg: DEBUG|rg::flags::parse|crates/core/flags/parse.rs:89: not reading config files\n"
        b"rg: DEBUG|grep_printer::standard|crates/printer/src/standard.rs:830: ignoring ./x.bin: found binary data at "
        b"offset 2\n"
        b"rg: DEBUG|ignore::walk|crates/ignore/src/walk.rs:2011: ignoring ./x.log: Ignore(IgnoreMatch(Gitignore(Glob { "
        b'from: Some("./.gitignore"), original: "x.log" })))\n'
        b"rg: DEBUG|ignore::walk|crates/ignore/src/walk.rs:2011: ignoring ./.git: Ignore(IgnoreMatch(Override(Glob)))\n"
        b"rg: ./deny/x: Permission denied (os error 13)\n"
        b"rg: ./gone: IO error for operation on ./gone: No such file or directory (os error 2)\n"
        b"rg: regex parse error:\n    (?:()\n"
    )
    random.seed(1)
    while log:
        size = random.randint(1, 60)
        errors.feed(log[:size])
        log = log[size:]
    assert (errors.binary, errors.ignored, errors.unreadable) == (1, 1, 2)
    assert errors.named == [(b"deny/x", "Permission denied"), (b"gone", "No such file or directory")]
    assert errors.message == "rg: regex parse error:\n    (?:()"


def test_messages_are_kept_within_bounds() -> None:
    errors = ErrorParser()
    for _ in range(1_000):
        errors.feed(b"rg: something odd happened\n" + b"x" * 1_000)
    assert len(errors.message) < 2 * MAX_ERROR_BYTES


def test_advice_about_ripgreps_own_options_is_left_out() -> None:
    message = (
        'rg: the literal "\\n" is not allowed in a regex\n\nConsider enabling multiline mode with the --multiline flag '
        "(or -U for short).\nWhen multiline mode is enabled, new line characters can be matched."
    )
    assert explain(message) == 'the literal "\\n" is not allowed in a regex'
