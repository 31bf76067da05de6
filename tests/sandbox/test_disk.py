"""How much a directory takes, and when it is looked at again."""

import contextlib
import os
from pathlib import Path

import pytest

from app.errors import ErrorCode, ToolError
from app.sandbox import disk
from app.sandbox.disk import DiskUsage, Quota, measure, require_free
from tests.support.deep_tree import deep_tree

MOST = 1_000_000


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many times something was measured."""
    looks: list[int] = []
    real = measure

    def counting(directory: int, check: object) -> int:
        looks.append(directory)
        return real(directory, check)  # type: ignore[arg-type]

    monkeypatch.setattr(disk, "measure", counting)
    return looks


def quota_of(root: Path, usage: DiskUsage | None = None) -> Quota:
    status = root.stat()
    quota = (usage or DiskUsage(MOST)).quota(str(root), (status.st_dev, status.st_ino), managed=True, asked=None)
    assert quota is not None
    return quota


def size_of(directory: Path) -> int:
    fd = os.open(directory, os.O_PATH | os.O_DIRECTORY)
    try:
        return measure(fd)
    finally:
        os.close(fd)


def test_files_count_once_whatever_names_they_have_and_links_are_not_followed(tmp_path: Path) -> None:
    root, outside = tmp_path / "root", tmp_path / "outside"
    (root / "sub").mkdir(parents=True)
    outside.mkdir()
    (outside / "big").write_bytes(bytes(5_000_000))
    (root / "sub" / "a").write_bytes(bytes(200_000))
    os.link(root / "sub" / "a", root / "b")
    (root / "link").symlink_to(outside)
    with (root / "sparse").open("wb") as sparse:
        sparse.truncate(10**12)
    os.mkfifo(root / "fifo")
    assert 200_000 <= size_of(root) < 300_000


def test_a_tree_5000_deep_is_measured() -> None:
    with deep_tree(5_000) as top:
        assert size_of(top) >= 0


def test_a_directory_that_cannot_be_read_does_not_count(tmp_path: Path) -> None:
    (tmp_path / "closed").mkdir()
    (tmp_path / "closed" / "a").write_bytes(bytes(100_000))
    (tmp_path / "closed").chmod(0)
    try:
        assert size_of(tmp_path) < 200_000
    finally:
        (tmp_path / "closed").chmod(0o700)


def write(quota: Quota, file: Path, size: int) -> None:
    with quota.taking(size):
        file.write_bytes(bytes(size))


def test_what_the_service_writes_itself_is_counted_without_looking_again(tmp_path: Path, counted: list[int]) -> None:
    quota = quota_of(tmp_path)
    for number in range(9):
        write(quota, tmp_path / str(number), 100_000)
    assert len(counted) == 1
    with pytest.raises(ToolError) as refused:
        write(quota, tmp_path / "more", 200_000)
    assert refused.value.code is ErrorCode.NO_SPACE
    assert len(counted) == 2  # nothing is refused on a count alone
    assert not (tmp_path / "more").exists()
    (tmp_path / "1").unlink()
    (tmp_path / "2").unlink()
    quota.give_back(200_000)
    write(quota, tmp_path / "more", 200_000)
    assert len(counted) == 2


def test_what_is_being_written_counts_and_what_failed_does_not(tmp_path: Path) -> None:
    quota = quota_of(tmp_path)
    with quota.taking(800_000), pytest.raises(ToolError):
        write(quota, tmp_path / "b", 800_000)
    quota.give_back(800_000)
    with contextlib.suppress(OSError), quota.taking(800_000):
        raise OSError
    write(quota, tmp_path / "b", 800_000)
    with quota.taking(-500_000):
        (tmp_path / "b").write_bytes(bytes(300_000))
    write(quota, tmp_path / "c", 500_000)


def test_after_a_command_it_looks_again_but_not_all_the_time(
    tmp_path: Path, counted: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    quota = quota_of(tmp_path)
    quota.require()
    quota.require()
    assert len(counted) == 1
    monkeypatch.setattr(disk, "SHARE", 0)
    quota.outdate()
    quota.require()
    quota.require()
    assert len(counted) == 2
    monkeypatch.setattr(disk, "SHARE", 10**9)
    (tmp_path / "big").write_bytes(bytes(3_000_000))
    quota.outdate()
    quota.require()
    assert len(counted) == 2


def test_one_workspace_has_one_count(tmp_path: Path) -> None:
    usage = DiskUsage(MOST)
    with quota_of(tmp_path, usage).taking(600_000), pytest.raises(ToolError):
        # The count is of the identity, so another visitor of the same directory meets it.
        write(quota_of(tmp_path, usage), tmp_path / "a", 600_000)


def test_a_workspace_that_is_gone_is_told_as_such(tmp_path: Path) -> None:
    root = tmp_path / "root"
    root.mkdir()
    quota = quota_of(root)
    root.rmdir()
    with pytest.raises(ToolError) as gone, quota.taking(1):
        pass
    assert gone.value.code is ErrorCode.NOT_FOUND


def test_without_bounds_there_is_no_quota() -> None:
    assert DiskUsage().quota("/", (1, 1), managed=True, asked=None) is None
    assert DiskUsage(5).quota("/", (1, 1), managed=False, asked=None) is None
    bounds = [(DiskUsage(5), True, 7), (DiskUsage(5), True, 3), (DiskUsage(5), False, 7), (DiskUsage(), True, 7)]
    quotas = [usage.quota("/", (1, 1), managed=managed, asked=asked) for usage, managed, asked in bounds]
    assert [quota.most for quota in quotas if quota is not None] == [5, 3, 7, 7]


def test_free_space_is_required_where_it_can_be_told(tmp_path: Path) -> None:
    fd = os.open(tmp_path, os.O_PATH | os.O_DIRECTORY)
    try:
        require_free(fd, 0)
        require_free(fd, 1)
        with pytest.raises(ToolError) as refused:
            require_free(fd, 2**62)
    finally:
        os.close(fd)
    assert refused.value.code is ErrorCode.NO_SPACE
