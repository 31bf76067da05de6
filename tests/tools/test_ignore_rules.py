"""Ignore rules: ripgrep is the judge of what find leaves out."""

import os
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from app.tools.ignore_rules import MAX_FILE_BYTES, NO_RULES, IgnoreFile, look_up, read_rules
from tests.support.deep_tree import quick_directory
from tests.support.tool_bench import RG, ToolBench, paths

FLAGS = ("--no-config", "--hidden", "--no-require-git", "--no-ignore-global", "--no-ignore-exclude", "--sort=path")


def files_by_ripgrep(root: Path) -> list[str]:
    """Return the files ripgrep would search."""
    found = subprocess.run(
        [RG, "--files", *FLAGS, "--no-ignore-parent", "--glob=!.git", "."], cwd=root, capture_output=True, check=False
    )
    return [line.removeprefix("./") for line in found.stdout.decode().splitlines()]


@pytest.mark.parametrize(
    ("rules", "path", "verdict"),
    [
        ("*.log", "a.log", True),
        ("*.log", "d/a.log", True),
        ("*.log\n!keep.log", "keep.log", False),
        ("!keep.log\n*.log", "keep.log", True),
        ("/a", "a", True),
        ("/a", "d/a", None),
        ("d/a", "d/a", True),
        ("d/a", "x/d/a", None),
        ("**/d/a", "x/d/a", True),
        ("build/", "build", None),
        ("#a", "#a", None),
        ("\\#a", "#a", True),
        ("\\!a", "!a", True),
        ("a ", "a", True),
        ("a\\ ", "a ", True),
        ("a\r\nb", "a", True),
        ("\ufeffa", "a", True),
        ("[ab", "[ab", True),
        ("{a,b}", "b", True),
        ("{a", "{a", None),
        ("", "a", None),
        ("/", "a", None),
        ("d/**", "d", None),
        ("d/**", "d/a", True),
        ("*", "a", True),
        (".*", ".env", True),
        ("a.b.c", "a.b.c", True),
        ("*.b.c", "a.b.c", True),
        ("[ab]\n![a]", "a", False),
        ("![a]\n[ab]", "a", True),
        ("d/*\n!d/a\n[x]", "d/a", False),
    ],
)
def test_the_last_line_that_fits_decides(rules: str, path: str, verdict: bool | None) -> None:
    file = IgnoreFile(rules.encode())
    assert file.verdict(path, path.rpartition("/")[2], is_directory=False) is verdict


def test_a_rule_for_directories_says_nothing_about_files() -> None:
    file = IgnoreFile(b"build/\n/out/")
    assert file.verdict("build", "build", is_directory=True) is True
    assert file.verdict("x/build", "build", is_directory=True) is True
    assert file.verdict("x/out", "out", is_directory=True) is None
    assert file.verdict("build", "build", is_directory=False) is None


def test_a_long_list_of_rules_is_quick() -> None:
    lines = [f"gen_{number}*_x?.tmp\n/dir{number}/**/*.o\n" for number in range(2_000)]
    started = time.perf_counter()
    file = IgnoreFile("".join(lines).encode())
    for number in range(200):
        assert file.verdict(f"src/file{number}.c", f"file{number}.c", is_directory=False) is None
    assert time.perf_counter() - started < 5


names = st.sampled_from(["a", "b", "c", "ab", "foo", "foo.py", "b.log", "x y", "#h", "!n", "[z]", "é", "à", "漢.log"])
atoms = st.sampled_from(
    ["a", "b", "c", "ab", "foo", "*", "?", "**", "*.py", "*.log", "a*", "*b", "[ab]", "[!a]", "[^b]*", "{a,b}", "{foo,*.log}", "[z]", "\\[z\\]", "\\#h", "\\!n", "*a*b*", "??", "[a-", "**foo", "é"]
)  # fmt: skip
lines = st.builds(
    lambda parts, before, after: before + "/".join(parts) + after,
    st.lists(atoms, min_size=1, max_size=3),
    st.sampled_from(["", "", "", "/", "!", "!/", "#"]),
    st.sampled_from(["", "", "", "/", " ", "/**"]),
)
directories = st.lists(names, min_size=0, max_size=3).map("/".join)


@given(
    st.lists(st.tuples(directories, names), min_size=4, max_size=20),
    st.lists(
        st.tuples(directories, st.sampled_from([".gitignore", ".gitignore", ".ignore", ".rgignore"]), st.lists(lines)),
        min_size=1,
        max_size=4,
    ),
)
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_find_leaves_out_what_ripgrep_does(
    files: list[tuple[str, str]], rules: list[tuple[str, str, list[str]]]
) -> None:
    with quick_directory() as root:
        for directory, name in files:
            touch(root / directory / name)
        for directory, name, content in rules:
            touch(root / directory / name, "\n".join(content))
        assert files_by_find(root) == files_by_ripgrep(root)


def touch(file: Path, content: str = "") -> None:
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        if not file.is_dir():
            file.write_text(content)
    except (FileExistsError, NotADirectoryError):
        pass  # one of the names on the way is a file already: this one does not fit in


def files_by_find(root: Path) -> list[str]:
    # The body of the call alone: a property needs no threads.
    tool = ToolBench(root).tool("find")
    arguments = tool.arguments_model.model_validate({"pattern": "**", "type": "file"})
    return paths(tool._find(arguments, lambda: None))


def test_rules_are_not_read_from_links_pipes_and_directories(tmp_path: Path) -> None:
    (tmp_path / "rules").write_text("*\n")
    (tmp_path / ".gitignore").symlink_to("rules")
    (tmp_path / ".ignore").mkdir()
    os.mkfifo(tmp_path / ".rgignore")
    fd = os.open(tmp_path, os.O_RDONLY)
    try:
        assert read_rules(fd, NO_RULES, "", None) is NO_RULES
    finally:
        os.close(fd)


def test_only_whole_lines_of_the_beginning_of_a_huge_file_count(tmp_path: Path) -> None:
    (tmp_path / ".gitignore").write_bytes(b"first\n" + b"#" * MAX_FILE_BYTES + b"\nlast\n")
    fd = os.open(tmp_path, os.O_RDONLY)
    try:
        rules = read_rules(fd, None, "", None)
    finally:
        os.close(fd)
    assert rules.ignores("first", "first", is_directory=False)
    assert not rules.ignores("last", "last", is_directory=False)


@pytest.fixture
def place(tmp_path: Path) -> Callable[[str], object]:
    def look(path: str) -> object:
        fd = os.open(tmp_path, os.O_RDONLY)
        try:
            return look_up(fd, path.split("/") if path else [])
        finally:
            os.close(fd)

    return look


def test_what_lies_between_the_root_and_the_start_counts(tmp_path: Path, place: Callable[[str], object]) -> None:
    (tmp_path / "a/b/c").mkdir(parents=True)
    (tmp_path / ".gitignore").write_text("*.log\nbuild/\n")
    (tmp_path / "a/.gitignore").write_text("*.tmp\n")
    found = place("a/b/c")
    assert not found.ignored
    assert found.root_files == (".gitignore",)
    assert found.rules.ignores("a/b/x.tmp", "x.tmp", is_directory=False)
    assert found.rules.ignores("a/b/x.log", "x.log", is_directory=False)
    (tmp_path / "a/.gitignore").write_text("!keep.log\n")
    assert place("a/b/c").root_files == ()  # ripgrep must not be told half of it


def test_a_start_is_ignored_with_the_directory_it_is_in(tmp_path: Path, place: Callable[[str], object]) -> None:
    (tmp_path / "node_modules/pkg/lib").mkdir(parents=True)
    (tmp_path / "src").mkdir()
    (tmp_path / "src/gen.js").touch()
    (tmp_path / ".git/hooks").mkdir(parents=True)
    (tmp_path / ".gitignore").write_text("node_modules/\ngen.js\n")
    assert place("node_modules").ignored
    assert place("node_modules/pkg/lib").ignored
    assert place("src/gen.js").ignored
    assert place(".git/hooks").ignored
    assert not place("src").ignored
    assert not place("").ignored
