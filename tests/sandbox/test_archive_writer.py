"""Archives of a tree: what other programs read in them, and what they leave out."""

import io
import os
import shutil
import socket
import stat
import subprocess
import tarfile
import tracemalloc
import zipfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from app.domain.abort import Aborted, AbortReason, AbortSignal
from app.sandbox.archive_reader import ArchiveFormat, check_index, members
from app.sandbox.archive_writer import Changed, pack, survey
from app.tools.path_pattern import PathPattern
from tests.support.archives import contents_of, names_in
from tests.support.deep_tree import deep_tree, quick_directory
from tests.support.other_user import unprivileged_directory

TAR, TAR_GZ, ZIP = ArchiveFormat


def go_on() -> None:
    """The check of work that nobody stops."""


@contextmanager
def opened(directory: Path) -> Iterator[int]:
    fd = os.open(directory, os.O_RDONLY)
    try:
        yield fd
    finally:
        os.close(fd)


def archive_of(directory: Path, form: ArchiveFormat, exclude: Sequence[str] = ()) -> bytes:
    with opened(directory) as fd:
        return b"".join(pack(fd, form, [PathPattern(text).start for text in exclude], go_on))


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """Files of every size around the limits, and everything that is no file."""
    top = tmp_path / "tree"
    (top / "d/empty").mkdir(parents=True)
    (top / "a.txt").write_bytes(b"hello\n")
    (top / "d/prog").write_bytes(b"#!/bin/sh\n")
    (top / "d/prog").chmod(0o6755)
    (top / "nothing").write_bytes(b"")
    (top / "random").write_bytes(os.urandom(262_144))
    (top / "larger").write_bytes(os.urandom(262_145) + bytes(1_000_000))
    (top / ("n" * 200)).write_bytes(b"long name")
    (top / "with\nline ends\r").write_bytes(b"odd")
    (top / "größe").write_bytes(b"umlaut")
    (top / ".toolcrib-tmp-0123456789abcdef").write_bytes(b"ours")
    (top / "link").symlink_to("a.txt")
    (top / "out").symlink_to("/etc/passwd")
    (top / "dirlink").symlink_to("d")
    (top / "dangling").symlink_to("gone")
    os.mkfifo(top / "pipe")
    with socket.socket(socket.AF_UNIX) as listener:
        here = os.open(top, os.O_RDONLY)
        listener.bind(f"/proc/self/fd/{here}/socket")
        os.close(here)
    return top


NAMES = ["a.txt", "d/", "d/empty/", "d/prog", "größe", "larger", "n" * 200, "nothing", "random", "with\nline ends\r"]


@pytest.mark.parametrize("form", ArchiveFormat)
def test_the_standard_library_reads_back_every_file_and_directory(tree: Path, form: ArchiveFormat):
    data = archive_of(tree, form)
    assert sorted(names_in(data)) == sorted(NAMES)
    assert contents_of(data) == {name: (tree / name).read_bytes() for name in NAMES if not name.endswith("/")}


@pytest.mark.parametrize("form", ArchiveFormat)
def test_our_own_reader_takes_what_was_written(tree: Path, form: ArchiveFormat):
    data = archive_of(tree, form)
    read = lambda size, offset: data[offset : offset + size]  # noqa: E731 - shorter than it is
    index = check_index(form, read, len(data), 10**9, go_on)
    assert (index.files, index.directories) == (8, 2)
    (prog,) = (member for member in members(form, read, len(data), 10**9, go_on) if member.path == b"d/prog")
    assert prog.mode == 0o755, "set-id bits stay behind"


def test_a_tar_tells_times_and_bits_and_no_owner(tree: Path):
    os.utime(tree / "a.txt", (1_600_000_000, 1_600_000_000))
    with tarfile.open(fileobj=io.BytesIO(archive_of(tree, TAR))) as archive:
        info = archive.getmember("a.txt")
        assert (info.mtime, info.uid, info.gid, info.uname, info.gname) == (1_600_000_000, 0, 0, "", "")
        assert archive.getmember("d/prog").mode == 0o755


def test_a_zip_tells_times_and_bits(tree: Path):
    os.utime(tree / "a.txt", (1_600_000_000, 1_600_000_000))
    os.utime(tree / "nothing", (0, 0))
    with zipfile.ZipFile(io.BytesIO(archive_of(tree, ZIP))) as archive:
        assert archive.testzip() is None
        assert archive.getinfo("a.txt").date_time == (2020, 9, 13, 12, 26, 40)
        assert archive.getinfo("nothing").date_time == (1980, 1, 1, 0, 0, 0)
        assert archive.getinfo("d/prog").external_attr >> 16 == stat.S_IFREG | 0o755
        assert archive.getinfo("d/").external_attr >> 16 == stat.S_IFDIR | stat.S_IMODE((tree / "d").stat().st_mode)
        assert archive.getinfo("random").compress_type == zipfile.ZIP_STORED, "what does not shrink is stored"


@pytest.mark.parametrize("form", ArchiveFormat)
def test_a_name_that_is_no_utf_8_keeps_its_bytes(tmp_path: Path, form: ArchiveFormat):
    with opened(tmp_path) as fd:
        os.close(os.open(b"caf\xe9", os.O_CREAT | os.O_WRONLY, dir_fd=fd))
    data = archive_of(tmp_path, form)
    read = lambda size, offset: data[offset : offset + size]  # noqa: E731 - shorter than it is
    assert [member.path for member in members(form, read, len(data), 10, go_on)] == [b"caf\xe9"]


@pytest.mark.skipif(shutil.which("tar") is None, reason="GNU tar is not here")
def test_tar_unpacks_it(tree: Path, tmp_path: Path):
    out = tmp_path / "out"
    out.mkdir()
    subprocess.run(["tar", "-xzf", "-", "-C", out], input=archive_of(tree, TAR_GZ), check=True, timeout=30)
    for name in NAMES:
        assert (out / name).is_dir() if name.endswith("/") else (out / name).read_bytes() == (tree / name).read_bytes()


@pytest.mark.parametrize(
    ("exclude", "left"),
    [
        ((), ["a.log", "build/", "build/x", "src/", "src/build/", "src/build/y", "src/z.py"]),
        (("*.log",), ["build/", "build/x", "src/", "src/build/", "src/build/y", "src/z.py"]),
        (("build",), ["a.log", "src/", "src/z.py"]),
        (("/build",), ["a.log", "src/", "src/build/", "src/build/y", "src/z.py"]),
        (("src/**",), ["a.log", "build/", "build/x", "src/"]),
        (("{build,*.py}/", "*.log"), ["src/", "src/z.py"]),
        (("*",), []),
    ],
)
def test_what_is_excluded_is_left_out_with_all_that_is_below(tmp_path: Path, exclude: list[str], left: list[str]):
    for name in ("a.log", "build/x", "src/build/y", "src/z.py"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    assert sorted(names_in(archive_of(tmp_path, TAR, exclude))) == left


def test_a_survey_sees_what_cannot_be_read():
    with unprivileged_directory() as directory:
        (directory / "open").write_bytes(b"x")
        (directory / "secret").write_bytes(b"x")
        (directory / "secret").chmod(0)
        (directory / "closed").mkdir(mode=0)
        with opened(directory) as fd:
            assert sorted(survey(fd, [], go_on).unreadable) == [b"closed", b"secret"]
            assert survey(fd, [PathPattern("{secret,closed}").start], go_on).unreadable == []
            with pytest.raises(PermissionError):
                b"".join(pack(fd, TAR, [], go_on))
        (directory / "closed").chmod(0o700)


def test_an_unreadable_link_or_pipe_is_no_matter(tree: Path):
    with opened(tree) as fd:
        assert survey(fd, [], go_on).unreadable == []


@pytest.mark.parametrize("form", [TAR, ZIP])
def test_a_tree_5000_deep_is_packed(form: ArchiveFormat):
    with deep_tree(5_000) as top:
        data = archive_of(top, form)
    names = names_in(data)
    assert len(names) == 5_001
    assert max(names, key=len) == "d/" * 5_000 + "end"


def test_a_wide_tree_takes_little_memory():
    with quick_directory() as top:
        for index in range(3_000):
            (top / f"file-{index:05}").write_bytes(b"x" * 100)
        (top / "large").write_bytes(bytes(30_000_000))
        for form in ArchiveFormat:
            tracemalloc.start()
            try:
                with opened(top) as fd:
                    size = sum(len(piece) for piece in pack(fd, form, [], go_on))
                peak = tracemalloc.get_traced_memory()[1]
            finally:
                tracemalloc.stop()
            assert size > 50_000
            assert peak < 6_000_000, form


def test_a_file_that_grows_or_shrinks_under_the_work_never_makes_a_wrong_archive(tmp_path: Path):
    """A small file is read first. Of a large one what its header promises is sent, or the archive ends there."""
    large = tmp_path / "large"
    large.write_bytes(b"x" * 1_000_000)

    def packed_while(form: ArchiveFormat, change: bytes | None) -> bytes:
        parts = []
        with opened(tmp_path) as fd:
            for piece in pack(fd, form, [], go_on):
                parts.append(piece)
                if len(parts) == 2:
                    with large.open("r+b") as file:
                        file.truncate(300_000) if change is None else file.seek(0, 2) and file.write(change)
        return b"".join(parts)

    assert len(contents_of(packed_while(TAR, b"more"))["large"]) == 1_000_000
    with pytest.raises(Changed):
        packed_while(TAR, None)


def test_what_disappears_or_turns_into_a_link_is_left_out(tmp_path: Path):
    for name in ("a", "b", "c", "d"):
        (tmp_path / name).write_bytes(name.encode() * 300_000)
    (tmp_path / "outside").symlink_to("/etc/passwd")
    parts = []
    with opened(tmp_path) as fd:
        for piece in pack(fd, TAR, [], go_on):
            if not parts:
                (tmp_path / "b").unlink()
                (tmp_path / "outside").rename(tmp_path / "c")
            parts.append(piece)
    assert names_in(b"".join(parts)) == ["a", "d"]


def test_packing_stops_when_it_is_told_to_and_gives_its_descriptors_back(tree: Path):
    before = len(list(Path("/proc/self/fd").iterdir()))
    signal = AbortSignal()
    with opened(tree) as fd:
        pieces = pack(fd, TAR, [], signal.raise_if_aborted)
        next(pieces)
        signal.abort(AbortReason.CANCELLED)
        with pytest.raises(Aborted):
            b"".join(pieces)
        pieces = pack(fd, ZIP, [], go_on)
        next(pieces)
        pieces.close()
    assert len(list(Path("/proc/self/fd").iterdir())) == before


NAME = st.text(st.characters(exclude_characters="/\0", exclude_categories=["Cs"]), min_size=1, max_size=20).filter(
    lambda name: name not in {".", ".."} and len(name.encode()) < 200
)


@given(
    files=st.dictionaries(st.lists(NAME, min_size=1, max_size=3).map("/".join), st.binary(max_size=2_000), max_size=8)
)
@settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck))
def test_any_tree_survives_the_way_out_and_in(files: dict[str, bytes]):
    with quick_directory() as top:
        kept = {}
        for path, content in files.items():
            try:
                (top / path).parent.mkdir(parents=True, exist_ok=True)
                (top / path).write_bytes(content)
            except OSError:
                continue  # a file where another one needs a directory
            kept[path] = content
        for form in ArchiveFormat:
            data = archive_of(top, form)
            read = lambda size, offset, data=data: data[offset : offset + size]  # noqa: E731 - shorter than it is
            found = {
                member.path.decode(): b"".join(member.blocks)
                for member in members(form, read, len(data), 10**6, go_on)
                if not member.directory
            }
            assert found == kept
