"""Globs: what they match, as a whole path and name by name, and what is none."""

import re
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from app.tools.glob_pattern import MAX_ALTERNATIVES, RECURSIVE, GlobError, parse_glob, path_regex
from app.tools.path_pattern import PathPattern


def matches_path(glob: str, path: str) -> bool:
    """Whether a glob matches a path as one expression."""
    return any(re.fullmatch(path_regex(found.components), path, re.DOTALL) for found in parse_glob(glob))


def found_on_the_way(pattern: PathPattern, path: str, *, is_directory: bool = False) -> bool:
    """Whether a walk that enters only live directories comes to the path and takes it for a match."""
    position = pattern.start
    *directories, name = path.split("/")
    for directory in directories:
        position = position.below(directory)
        if not position.alive:
            return False
    return position.matches(name, is_directory=is_directory)


def found(glob: str, path: str, *, is_directory: bool = False) -> bool:
    return found_on_the_way(PathPattern(glob), path, is_directory=is_directory)


@pytest.mark.parametrize(
    ("glob", "matching", "others"),
    [
        ("a.txt", ["a.txt"], ["a_txt", "A.txt", "b/a.txt", "a.txt/b"]),
        ("*", ["a", ".hidden", "a b"], ["a/b"]),
        ("*.py", ["a.py", ".py"], ["a.pyc", "d/a.py"]),
        ("?", ["a", "é", "\U0001f600"], ["", "ab", "/"]),
        ("[a-c]x", ["ax", "cx"], ["dx", "x", "[a-c]x"]),
        ("[!a]x", ["bx"], ["ax", "/x"]),
        ("[^a]x", ["bx"], ["ax"]),
        ("[]]", ["]"], ["["]),
        ("[a-]", ["a", "-"], ["b"]),
        ("[-a]", ["a", "-"], ["b"]),
        ("{a,b}.ts", ["a.ts", "b.ts"], ["c.ts", "{a,b}.ts"]),
        ("{a,{b,c}d}", ["a", "bd", "cd"], ["b", "ad"]),
        ("a{,b}", ["a", "ab"], ["b"]),
        ("a,b", ["a,b"], ["a"]),
        ("\\*", ["*"], ["a"]),
        ("\\{a\\}", ["{a}"], ["a"]),
        ("**", ["a", "a/b/c"], []),
        ("**/a", ["a", "x/a", "x/y/a"], ["xa"]),
        ("a/**", ["a/b", "a/b/c"], ["a", "ab"]),
        ("a/**/b", ["a/b", "a/x/b", "a/x/y/b"], ["ab", "a/xb", "a/x"]),
        ("a/**/b/**/c", ["a/b/c", "a/x/b/y/z/c", "a/b/b/c"], ["a/c", "b/a/b/c"]),
        ("**/a*/**", ["a/x", "q/ab/x/y"], ["a", "q/b/x"]),
        ("a**b", ["ab", "axb"], ["a/b"]),
        ("a*b*c", ["abc", "axbyc", "abbcc"], ["ab", "acb"]),
        ("*a*a", ["aa", "xaxa"], ["a", "aab"]),
        ("{src/*.ts,*.md}", ["src/a.ts", "b.md"], ["src/a.md", "a.ts"]),
    ],
)
def test_a_glob_matches_whole_paths(glob: str, matching: list[str], others: list[str]) -> None:
    assert [path for path in matching if not matches_path(glob, path)] == []
    assert [path for path in others if matches_path(glob, path)] == []


@pytest.mark.parametrize(
    ("glob", "reason"),
    [
        ("[a", "not closed"),
        ("{a", "not closed"),
        ("{a,{b}", "not closed"),
        ("a}", "no { before"),
        ("a\\", "backslash"),
        ("[z-a]", "backwards"),
        ("{a,b}" * 9, "alternatives"),
        ("{" * 20 + "}" * 20, "nest"),
    ],
)
def test_what_is_no_glob_is_told_why(glob: str, reason: str) -> None:
    with pytest.raises(GlobError, match=reason):
        parse_glob(glob)


def test_alternatives_are_bounded() -> None:
    assert len(parse_glob("{a,b}" * 8)) == MAX_ALTERNATIVES


def test_many_stars_take_no_time() -> None:
    glob = "**/" + "*a" * 40 + "b/**/" + "*a" * 40 + "b"
    path = "/".join(["a" * 255] * 15)
    started = time.perf_counter()
    assert not matches_path(glob, path)
    assert not found(glob, path)
    assert time.perf_counter() - started < 1


def test_a_pattern_without_a_slash_is_for_names_at_any_depth() -> None:
    assert found("*.md", "a.md")
    assert found("*.md", "x/y/a.md")
    assert not found("*.md", "a.md/x")


def test_a_pattern_with_a_slash_starts_where_the_walk_does() -> None:
    assert found("doc/*.md", "doc/a.md")
    assert found("/doc/*.md", "doc/a.md")
    assert found("./doc/*.md", "doc/a.md")
    assert found("/a.md", "a.md")
    assert not found("/a.md", "x/a.md")
    assert not found("doc/*.md", "x/doc/a.md")


def test_a_final_slash_asks_for_directories() -> None:
    assert found("src/", "x/src", is_directory=True)
    assert not found("src/", "x/src")
    assert found("a/b/", "a/b", is_directory=True)
    assert not found("a/b/", "x/a/b", is_directory=True)


def test_directories_without_a_possible_match_are_not_entered() -> None:
    start = PathPattern("src/**/*.ts").start
    assert start.below("src").alive
    assert not start.below("docs").alive
    assert not PathPattern("src/*.ts").start.below("src").below("deeper").alive
    assert PathPattern("*.ts").start.below("anything").alive


def test_a_name_with_brackets_is_found_by_itself() -> None:
    assert found("app/[id].tsx", "app/[id].tsx")
    assert found("app/[id].tsx", "app/i.tsx")
    assert found("{draft}.md", "x/{draft}.md")


def test_what_is_spelled_out_is_told_from_what_a_wildcard_reaches() -> None:
    start = PathPattern("dist/*.js").start
    inside = start.spelled_out.below("dist")
    assert inside.matches("app.js", is_directory=False)
    assert not PathPattern("*/app.js").start.spelled_out.below("dist").alive
    assert not PathPattern("**/app.js").start.spelled_out.below("dist").alive
    assert PathPattern("app.js").start.spelled_out.matches("app.js", is_directory=False)
    assert not PathPattern("app.js").start.spelled_out.below("x").alive


@pytest.mark.parametrize("glob", ["../x", "a/../b", "", ".", "/", "./"])
def test_a_pattern_that_leads_nowhere_or_out_is_refused(glob: str) -> None:
    with pytest.raises(GlobError):
        PathPattern(glob)


names = st.sampled_from(["a", "b", "ab", "ba", "a.b", "[a]", "é"])
atoms = st.sampled_from(["a", "b", "*", "**", "?", "*a", "b*", "[ab]", "[!a]", "{a,b}", "{*.b,a}", "a*b", "é"])


@given(st.lists(atoms, min_size=1, max_size=4), st.lists(names, min_size=1, max_size=5))
@settings(max_examples=400, deadline=None)
def test_name_by_name_and_as_a_whole_agree(parts: list[str], path_names: list[str]) -> None:
    glob, path = "/".join(parts), "/".join(path_names)
    pattern = PathPattern(glob)
    # A pattern without a slash is for every depth, and each is itself too: the same is said here with globs.
    wanted = matches_path(glob if "/" in glob else f"**/{glob}", path) or path == glob
    assert found_on_the_way(pattern, path) == (wanted or ("/" not in glob and path_names[-1] == glob))


@given(st.lists(atoms, min_size=1, max_size=3), st.lists(names, min_size=1, max_size=4))
@settings(max_examples=200, deadline=None)
def test_a_file_is_covered_when_it_or_a_directory_above_it_matches(parts: list[str], path_names: list[str]) -> None:
    pattern = PathPattern("/".join(parts))
    above = ["/".join(path_names[:depth]) for depth in range(1, len(path_names))]
    expected = any(found_on_the_way(pattern, directory, is_directory=True) for directory in above)
    path = "/".join(path_names)
    assert pattern.covers(path) == (expected or found_on_the_way(pattern, path))


def test_two_stars_count_only_as_a_whole_component() -> None:
    (glob,) = parse_glob("**/**/a")
    assert glob.components[0] is RECURSIVE
    assert len(glob.components) == 2
