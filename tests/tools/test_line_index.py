"""Positions of lines: few, near where they are wanted, and of one version of a file only."""

import os
import time
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from app.tools.line_index import LineIndex, LineIndexes

LATER = 10 * 1_000_000_000


def settled(**more: int) -> LineIndexes:
    """Indexes that take files for older than they are."""
    return LineIndexes(smallest=10, clock=lambda: time.time_ns() + LATER, **more)


def test_the_nearest_position_before_a_line_is_found() -> None:
    index = LineIndex(1_000, stride=100)
    assert index.before(5) == (0, 0)
    for position, lines in ((100, 3), (150, 5), (200, 5), (350, 9), (1_000, 20)):
        index.note(position, lines)
    # Two are too near to the one before, the last is the end of the file.
    assert [index.before(lines) for lines in (1, 3, 4, 5, 6, 9, 10, 10**9)] == [
        (0, 0),
        (0, 0),
        (100, 3),
        (100, 3),
        (200, 5),
        (200, 5),
        (350, 9),
        (350, 9),
    ]


@given(st.lists(st.tuples(st.integers(1, 500), st.integers(0, 40)), max_size=200), st.integers(1, 9))
def test_a_long_file_is_kept_more_coarsely_and_never_wrongly(steps: list[tuple[int, int]], positions: int) -> None:
    index = LineIndex(10**9, stride=10, positions=positions)
    noted = {(0, 0)}
    position = lines = 0
    for bytes_on, lines_on in steps:
        position, lines = position + bytes_on, lines + lines_on
        noted.add((position, lines))
        index.note(position, lines)
        assert len(index) <= positions
    for wanted in range(1, lines + 2):
        found = index.before(wanted)
        assert found in noted
        assert found[1] < wanted or found == (0, 0)


def test_each_version_of_a_file_has_an_index_of_its_own(tmp_path: Path) -> None:
    file = tmp_path / "f"
    file.write_bytes(b"x" * 100)
    indexes = settled()
    first = indexes.of(file.stat())
    assert first is not None
    assert indexes.of(file.stat()) is first
    assert indexes.of(file.stat(), "utf-16le") is not first
    os.utime(file, ns=(1, 1))
    touched = indexes.of(file.stat())
    assert touched is not first
    # Another content of the same size with the same time of change shows in the time of the inode.
    file.write_bytes(b"y" * 100)
    os.utime(file, ns=(1, 1))
    assert indexes.of(file.stat()) is not touched


def test_small_files_and_those_just_changed_have_none(tmp_path: Path) -> None:
    file = tmp_path / "f"
    file.write_bytes(b"x" * 9)
    assert settled().of(file.stat()) is None
    file.write_bytes(b"x" * 10)
    assert settled().of(file.stat()) is not None
    assert LineIndexes(smallest=10).of(file.stat()) is None
    assert LineIndexes(smallest=10, clock=lambda: 0).of(file.stat()) is None


def test_the_files_read_last_are_remembered(tmp_path: Path) -> None:
    indexes = settled(files=3)
    for name in "abcd":
        (tmp_path / name).write_bytes(b"x" * 10)
    a, b, _ = (indexes.of((tmp_path / name).stat()) for name in "abc")
    assert indexes.of((tmp_path / "a").stat()) is a
    indexes.of((tmp_path / "d").stat())
    assert len(indexes) == 3
    assert indexes.of((tmp_path / "a").stat()) is a
    assert indexes.of((tmp_path / "b").stat()) is not b
