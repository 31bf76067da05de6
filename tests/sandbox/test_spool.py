"""What arrives in steps becomes a file in one."""

import contextlib
import os
import shutil
import stat
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from app.domain.abort import Aborted, AbortReason, AbortSignal
from app.errors import ErrorCode, ToolError
from app.sandbox.containment import Root, Target
from app.sandbox.files import ParentVanished, etag_of, sweep_temporary_files
from app.sandbox.held import Released
from app.sandbox.spool import Spool
from tests.support.other_user import unprivileged_directory

WAIT_SECONDS = 10
Open = Callable[[str], Target]


@pytest.fixture
def open_target(tmp_path: Path) -> Iterator[Open]:
    targets: list[Target] = []

    def open_one(path: str) -> Target:
        with Root.open(str(tmp_path)) as root:
            targets.append(root.target(root.relative(path), create_parents=True))
        return targets[-1]

    yield open_one
    for target in targets:
        target.close()


def spool_in(directory: Path, *parts: bytes) -> Spool:
    spool = Spool(os.open(directory, os.O_RDONLY), "x")
    spool.append(parts)
    return spool


def temporaries(directory: Path) -> list[Path]:
    return [path for path in directory.rglob("*") if path.name.startswith(".toolcrib-tmp-")]


def descriptors() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


def go() -> None:
    """The commit of a change that nobody calls off."""


def test_the_steps_become_one_file_and_nothing_else_is_left(tmp_path: Path, open_target: Open):
    spool = spool_in(tmp_path, b"one ", b"", b"two ")
    spool.append([b"three"])
    (temporary,) = temporaries(tmp_path)
    assert stat.S_IMODE(temporary.stat().st_mode) == 0o600, "nobody else reads what is not finished"
    spool.sync()
    assert spool.etag() == etag_of(b"one two three")
    assert spool.read(7, 4) == b"two thr"
    assert spool.move_to(open_target("deep/er/a.txt"), commit=go) is True
    spool.close()
    assert (tmp_path / "deep/er/a.txt").read_bytes() == b"one two three"
    assert temporaries(tmp_path) == []
    assert stat.S_IMODE((tmp_path / "deep/er/a.txt").stat().st_mode) == 0o666 & ~current_umask()


def current_umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


def test_a_replaced_file_keeps_its_bits_and_attributes_and_its_other_link_the_old_content(
    tmp_path: Path, open_target: Open
):
    old = tmp_path / "run.sh"
    old.write_bytes(b"old")
    old.chmod(0o750)
    with contextlib.suppress(OSError):
        os.setxattr(old, "user.origin", b"here")
    attributes = os.listxattr(old)
    (tmp_path / "witness").hardlink_to(old)
    spool = spool_in(tmp_path, b"new")
    assert spool.move_to(open_target("run.sh"), commit=go, mode=0o600) is False
    spool.close()
    assert old.read_bytes() == b"new"
    assert stat.S_IMODE(old.stat().st_mode) == 0o750
    assert os.listxattr(old) == attributes
    assert (tmp_path / "witness").read_bytes() == b"old"


@pytest.mark.parametrize(
    ("asked", "umask", "granted"),
    [
        (0o777, 0o022, 0o755),
        (0o777, 0o077, 0o700),
        (0o755, 0o027, 0o750),
        (0o000, 0o022, 0o600),
        (0o4755, 0o022, 0o755),
    ],
)
def test_the_umask_grants_the_bits_of_a_new_file(
    tmp_path: Path, open_target: Open, asked: int, umask: int, granted: int
):
    before = os.umask(umask)
    try:
        spool = spool_in(tmp_path, b"x")
    finally:
        os.umask(before)
    spool.move_to(open_target("a"), commit=go, mode=asked & 0o777)
    spool.close()
    assert stat.S_IMODE((tmp_path / "a").stat().st_mode) == granted


def test_what_is_closed_before_it_was_moved_leaves_nothing(tmp_path: Path):
    spool = spool_in(tmp_path, b"half")
    open_before = descriptors()
    spool.close()
    spool.close()
    assert list(tmp_path.iterdir()) == []
    assert descriptors() == open_before - 2


def test_a_spool_that_a_thread_still_writes_goes_away_when_that_step_ends(tmp_path: Path):
    spool = spool_in(tmp_path)
    writing, closed = threading.Event(), threading.Event()

    def check() -> None:
        writing.set()
        assert closed.wait(WAIT_SECONDS)

    thread = threading.Thread(target=spool.append, args=([b"x"], check))
    thread.start()
    assert writing.wait(WAIT_SECONDS)
    spool.close()
    assert len(temporaries(tmp_path)) == 1, "its descriptor must not be closed under the thread"
    closed.set()
    thread.join(WAIT_SECONDS)
    assert temporaries(tmp_path) == []
    with pytest.raises(Released):
        spool.append([b"more"])


def test_a_change_that_is_called_off_leaves_the_old_file(tmp_path: Path, open_target: Open):
    (tmp_path / "a").write_bytes(b"old")
    signal = AbortSignal()
    signal.abort(AbortReason.CANCELLED)
    spool = spool_in(tmp_path, b"new")
    with pytest.raises(Aborted):
        spool.move_to(open_target("a"), commit=signal.commit)
    spool.close()
    assert (tmp_path / "a").read_bytes() == b"old"
    assert temporaries(tmp_path) == []


def test_a_file_that_must_be_new_never_replaces_one(tmp_path: Path, open_target: Open):
    spool = spool_in(tmp_path, b"new")
    target = open_target("a")
    with pytest.raises(ToolError) as raised:
        # Made at the last moment, after the look whether it is there.
        spool.move_to(target, commit=lambda: (tmp_path / "a").write_bytes(b"theirs"), create_only=True)  # type: ignore[arg-type, return-value]
    assert raised.value.code is ErrorCode.ALREADY_EXISTS
    spool.close()
    assert (tmp_path / "a").read_bytes() == b"theirs"
    assert temporaries(tmp_path) == []


def test_the_file_that_was_looked_at_is_the_one_that_is_replaced(tmp_path: Path, open_target: Open):
    (tmp_path / "a").write_bytes(b"old")
    seen = (tmp_path / "a").stat()
    (tmp_path / "b").write_bytes(b"theirs")
    (tmp_path / "b").rename(tmp_path / "a")
    spool = spool_in(tmp_path, b"new")
    with pytest.raises(ToolError) as raised:
        spool.move_to(open_target("a"), commit=go, expected=seen)
    assert raised.value.code is ErrorCode.ETAG_MISMATCH
    spool.close()
    assert (tmp_path / "a").read_bytes() == b"theirs"


def test_a_temporary_file_that_somebody_removes_is_an_error_that_says_so(tmp_path: Path, open_target: Open):
    (tmp_path / "a").write_bytes(b"old")
    spool = spool_in(tmp_path, b"new")
    temporaries(tmp_path)[0].unlink()
    with pytest.raises(ToolError, match="send it again") as raised:
        spool.move_to(open_target("a"), commit=go)
    assert raised.value.code is ErrorCode.IO_ERROR
    spool.close()
    assert (tmp_path / "a").read_bytes() == b"old"


def test_a_target_whose_directory_is_gone_is_to_be_looked_for_again(tmp_path: Path, open_target: Open):
    target = open_target("deep/a")
    shutil.rmtree(tmp_path / "deep")
    spool = spool_in(tmp_path, b"new")
    with pytest.raises(ParentVanished):
        spool.move_to(target, commit=go)
    assert spool.move_to(open_target("deep/a"), commit=go) is True
    spool.close()
    assert (tmp_path / "deep/a").read_bytes() == b"new"


def test_what_is_in_the_making_is_not_swept_away_however_old_it_is(tmp_path: Path, open_target: Open):
    spool = spool_in(tmp_path, b"slow")
    stray = tmp_path / ".toolcrib-tmp-0123456789abcdef"
    stray.write_bytes(b"left by a crash")
    for path in temporaries(tmp_path):
        os.utime(path, (0, 0))
    directory = os.open(tmp_path, os.O_RDONLY)
    assert sweep_temporary_files(directory, older_than=5) == 1
    assert not stray.exists()
    spool.move_to(open_target("a"), commit=go)
    spool.close()
    assert (tmp_path / "a").read_bytes() == b"slow"
    (tmp_path / "a").rename(stray)
    assert sweep_temporary_files(directory, older_than=0) == 1
    os.close(directory)


def test_another_file_system_is_an_error_and_no_copy(tmp_path: Path, open_target: Open):
    elsewhere = Path("/dev/shm")
    if not os.access(elsewhere, os.W_OK) or elsewhere.stat().st_dev == tmp_path.stat().st_dev:
        pytest.skip("/dev/shm is no other file system that can be written")
    spool = spool_in(elsewhere, b"new")
    with pytest.raises(ToolError) as raised:
        spool.move_to(open_target("a"), commit=go)
    assert raised.value.code is ErrorCode.IO_ERROR
    spool.close()
    assert list(tmp_path.iterdir()) == []
    assert temporaries(elsewhere) == []


def test_a_directory_that_may_not_be_written_says_so():
    with unprivileged_directory() as directory:
        directory.chmod(0o555)
        with pytest.raises(ToolError) as raised:
            Spool(os.open(directory, os.O_RDONLY), "x")
    assert raised.value.code is ErrorCode.PERMISSION_DENIED


def test_a_directory_that_is_gone_says_so_and_its_descriptor_is_given_back(tmp_path: Path):
    gone = tmp_path / "gone"
    gone.mkdir()
    fd = os.open(gone, os.O_RDONLY)
    gone.rmdir()
    with pytest.raises(ToolError) as raised:
        Spool(fd, "x")
    assert raised.value.code is ErrorCode.NOT_FOUND
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(fd)
