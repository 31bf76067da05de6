"""A walk: in order, bounded, on descriptors, whatever the tree does meanwhile."""

import os
import sys
import tracemalloc
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from app.sandbox.walk import Entry, Kind, NotEntered, walk
from tests.support.deep_tree import deep_tree, quick_directory
from tests.support.other_user import unprivileged_directory
from tests.support.processes import descriptors


class Everything:
    """A selection that shows and enters all there is; `at` is called with the path of each directory entered."""

    def __init__(self, at: Callable[[str], object] = lambda _path: None) -> None:
        self.at = at
        self.depth = 0
        self.reads: list[tuple[int, frozenset[str]]] = []

    def enter(self, path: str) -> Callable[[str], object]:
        self.depth += 1
        self.at(path)
        return lambda _name: True

    def leave(self) -> None:
        self.depth -= 1

    def read(self, directory: int, count: int, noticed: frozenset[str]) -> None:
        self.reads.append((count, noticed))

    def choose(self, path: str, name: str, kind: Kind) -> tuple[bool, bool]:
        return True, True


class OnlyFiles(Everything):
    def choose(self, path: str, name: str, kind: Kind) -> tuple[bool, bool]:
        return kind == "file", True


def never() -> None:
    """A check that nobody fails."""


def entries_of(root: Path, selection: Everything | None = None, **limits: int) -> list[Entry]:
    fd = os.open(root, os.O_RDONLY | os.O_DIRECTORY)
    try:
        with closing(walk(fd, selection or Everything(), check=never, **limits)) as found:
            return list(found)
    finally:
        os.close(fd)


def paths_of(root: Path, selection: Everything | None = None, **limits: int) -> list[str]:
    return [entry.path for entry in entries_of(root, selection, **limits)]


@pytest.fixture
def open_descriptors() -> Iterator[None]:
    before = len(descriptors())
    yield
    assert len(descriptors()) == before


pytestmark = pytest.mark.usefixtures("open_descriptors")


def test_a_directory_comes_before_what_is_in_it_and_that_before_its_next_sibling(tmp_path: Path) -> None:
    for name in ("a.txt", "a/z", "a/b/c", "a-b", "Z", "é", "b"):
        file = tmp_path / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.touch()
    assert paths_of(tmp_path) == ["Z", "a", "a/b", "a/b/c", "a/z", "a-b", "a.txt", "b", "é"]


def test_names_are_ordered_by_their_bytes(tmp_path: Path) -> None:
    raw = [b"\xff", b"\xee\x80\x80", b"\xf0\x9f\x98\x80", b"\xc3\xa9", b"z", b"\x01", b"a\nb"]
    for name in raw:
        (tmp_path / os.fsdecode(name)).touch()
    assert [os.fsencode(path) for path in paths_of(tmp_path)] == sorted(raw)


def test_kinds_are_told_and_links_not_followed(tmp_path: Path) -> None:
    (tmp_path / "d").mkdir()
    (tmp_path / "d" / "f").touch()
    (tmp_path / "to-d").symlink_to("d")
    (tmp_path / "loop").symlink_to(".")
    (tmp_path / "dead").symlink_to("nowhere")
    os.mkfifo(tmp_path / "pipe")
    assert [(entry.path, entry.kind) for entry in entries_of(tmp_path)] == [
        ("d", "directory"),
        ("d/f", "file"),
        ("dead", "symlink"),
        ("loop", "symlink"),
        ("pipe", "other"),
        ("to-d", "symlink"),
    ]


def test_a_tree_of_five_thousand_levels_takes_no_recursion_and_one_descriptor() -> None:
    most = entered = 0

    def count(_path: str) -> None:
        nonlocal most, entered
        entered += 1
        if entered % 100 == 0:
            most = max(most, len(descriptors()))

    before = len(descriptors())
    with deep_tree(5_000) as top:
        found = paths_of(top, OnlyFiles(count))
    assert found == ["d/" * 5_000 + "end"]
    assert most <= before + 4
    assert sys.getrecursionlimit() < 5_000


@given(st.dictionaries(st.text("ab.é\uffff", min_size=1, max_size=3), st.booleans(), max_size=30), st.integers(1, 7))
@settings(max_examples=60, deadline=None)
def test_pages_give_the_same_as_one_reading(
    tmp_path_factory: pytest.TempPathFactory, names: dict[str, bool], size: int
) -> None:
    root = tmp_path_factory.mktemp("pages")
    for name, is_directory in names.items():
        if name in {".", ".."}:
            continue
        if is_directory:
            (root / name).mkdir()
            (root / name / "inner").touch()
        else:
            (root / name).touch()
    assert paths_of(root, page_entries=size) == paths_of(root)


def test_a_large_directory_takes_the_memory_of_a_page() -> None:
    with quick_directory() as root:
        for number in range(5_000):
            (root / f"{number:05d}").touch()
        fd = os.open(root, os.O_RDONLY)
        tracemalloc.start()
        try:
            with closing(walk(fd, Everything(), check=never, page_entries=250)) as found:
                assert sum(1 for _ in found) == 5_000
            _, peak = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
            os.close(fd)
    assert peak < 250_000


def test_a_directory_is_counted_once_and_what_is_looked_for_is_noticed(tmp_path: Path) -> None:
    for number in range(30):
        (tmp_path / f"{number}").touch()
    (tmp_path / ".gitignore").touch()
    selection = Everything()
    fd = os.open(tmp_path, os.O_RDONLY)
    with closing(walk(fd, selection, check=never, notice=frozenset({".gitignore"}), page_entries=4)) as found:
        assert len(list(found)) == 31
    os.close(fd)
    assert selection.reads == [(31, frozenset({".gitignore"}))]


def test_an_unreadable_directory_is_told_and_passed_over() -> None:
    with unprivileged_directory() as root:
        (root / "a").mkdir(mode=0)
        (root / "b").touch()
        found = entries_of(root, OnlyFiles())
    assert [(entry.path, entry.shown, type(entry.problem)) for entry in found] == [
        ("a", False, PermissionError),
        ("b", True, type(None)),
    ]


def test_another_file_system_is_shown_and_not_entered() -> None:
    class OnlyProc(Everything):
        def choose(self, path: str, name: str, kind: Kind) -> tuple[bool, bool]:
            return name == "proc", name == "proc"

    (entry,) = entries_of(Path("/"), OnlyProc())
    assert entry.path == "proc"
    assert isinstance(entry.problem, NotEntered)
    assert entry.problem.strerror == "another file system"


def test_a_directory_moved_out_of_the_tree_does_not_lead_the_walk_out(tmp_path: Path) -> None:
    root, outside = tmp_path / "root", tmp_path / "outside"
    (root / "a" / "b").mkdir(parents=True)
    (root / "a" / "b" / "in").touch()
    (root / "a" / "c").touch()
    (root / "z").touch()
    outside.mkdir()
    (outside / "secret").touch()

    def move(path: str) -> None:
        if path == "a/b":
            (root / "a" / "b").rename(outside / "b")

    # The way up from b leads to `outside` now; the walk finds `a` again from its start and goes on there.
    assert paths_of(root, Everything(move)) == ["a", "a/b", "a/b/in", "a/c", "z"]


def test_a_directory_that_vanishes_with_all_around_it_ends_only_its_part_of_the_walk(tmp_path: Path) -> None:
    root = tmp_path / "root"
    (root / "a" / "b").mkdir(parents=True)
    (root / "a" / "x").touch()
    (root / "z").touch()

    def replace(path: str) -> None:
        if path == "a/b":
            (root / "a" / "b").rename(tmp_path / "b")
            (root / "a").rename(tmp_path / "gone")
            (root / "a").mkdir()
            (root / "a" / "other").touch()

    # Another directory stands at `a`: what is in it is none of this walk's.
    assert paths_of(root, Everything(replace)) == ["a", "a/b", "z"]


def test_a_directory_swapped_for_a_link_is_not_followed(tmp_path: Path) -> None:
    root, outside = tmp_path / "root", tmp_path / "outside"
    (root / "a").mkdir(parents=True)
    (root / "b").mkdir()
    outside.mkdir()
    (outside / "secret").touch()

    def swap(path: str) -> None:
        if path == "a":
            (root / "b").rmdir()
            (root / "b").symlink_to(outside)

    assert "b/secret" not in paths_of(root, Everything(swap))


def test_what_check_raises_ends_the_walk_and_leaves_no_descriptor(tmp_path: Path) -> None:
    (tmp_path / "a" / "b").mkdir(parents=True)
    calls = 0

    def check() -> None:
        nonlocal calls
        calls += 1
        if calls == 3:
            raise KeyboardInterrupt

    fd = os.open(tmp_path, os.O_RDONLY)
    with pytest.raises(KeyboardInterrupt):
        list(walk(fd, Everything(), check=check))
    os.close(fd)


def test_a_walk_that_is_not_used_up_leaves_no_descriptor(tmp_path: Path) -> None:
    (tmp_path / "a" / "b" / "c").mkdir(parents=True)
    fd = os.open(tmp_path, os.O_RDONLY)
    with closing(walk(fd, Everything(), check=never)) as found:
        assert next(found).path == "a"
        assert next(found).path == "a/b"
    os.close(fd)
