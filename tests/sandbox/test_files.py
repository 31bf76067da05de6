"""Changing files: the old content or the new, whatever goes wrong."""

import contextlib
import ctypes
import errno
import fcntl
import os
import platform
import shutil
import stat
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from app.errors import ErrorCode, ToolError
from app.sandbox.containment import Root, Target
from app.sandbox.files import (
    ETAG_HASH_BYTES,
    STEP_BYTES,
    ParentVanished,
    etag_of,
    etag_of_file,
    etag_of_written,
    read_whole,
    remove_tree,
    replace_file,
    same_etag,
    sweep_temporary_files,
)
from tests.support.deep_tree import quick_directory

REPOSITORY = Path(__file__).parents[2]


def commit() -> None:
    """Nothing stops the change."""


@pytest.fixture
def workspace(tmp_path: Path) -> Path:
    directory = tmp_path / "ws"
    directory.mkdir()
    return directory


@pytest.fixture
def root(workspace: Path) -> Iterator[Root]:
    with Root.open(str(workspace)) as opened:
        yield opened


def target_of(root: Root, path: str) -> Target:
    return root.target(root.relative(path), create_parents=True)


def names(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir())


def test_a_new_file_gets_its_content_and_what_the_umask_leaves(root: Root, workspace: Path) -> None:
    before = os.umask(0o027)
    try:
        target = target_of(root, "a/b/new.txt")
        assert replace_file(target, b"hello\n", commit=commit) is True
        target.close()
    finally:
        os.umask(before)
    assert (workspace / "a/b/new.txt").read_bytes() == b"hello\n"
    assert stat.S_IMODE((workspace / "a/b/new.txt").stat().st_mode) == 0o640
    assert names(workspace / "a/b") == ["new.txt"]


def test_a_replaced_file_keeps_mode_owner_and_user_attributes(root: Root, workspace: Path) -> None:
    file = workspace / "hook.sh"
    file.write_bytes(b"old")
    file.chmod(0o755)
    os.setxattr(file, "user.origin", b"somewhere")
    if os.geteuid() == 0:
        os.chown(file, 1234, 2345)
    owner = (file.stat().st_uid, file.stat().st_gid)
    target = target_of(root, "hook.sh")
    assert replace_file(target, b"new", commit=commit) is False
    target.close()
    assert file.read_bytes() == b"new"
    assert stat.S_IMODE(file.stat().st_mode) == 0o755
    assert (file.stat().st_uid, file.stat().st_gid) == owner
    assert os.getxattr(file, "user.origin") == b"somewhere"


def test_set_id_bits_are_not_carried_over_to_new_content(root: Root, workspace: Path) -> None:
    file = workspace / "tool"
    file.write_bytes(b"old")
    file.chmod(0o6755)
    target = target_of(root, "tool")
    replace_file(target, b"new", commit=commit)
    target.close()
    assert stat.S_IMODE(file.stat().st_mode) == 0o755


def test_the_other_name_of_a_hard_link_keeps_the_old_content(root: Root, workspace: Path) -> None:
    (workspace / "a.txt").write_bytes(b"old\n")
    os.link(workspace / "a.txt", workspace / "witness.txt")
    target = target_of(root, "a.txt")
    replace_file(target, b"new\n", commit=commit)
    target.close()
    assert (workspace / "a.txt").read_bytes() == b"new\n"
    assert (workspace / "witness.txt").read_bytes() == b"old\n"


def test_a_link_survives_and_its_target_is_replaced(root: Root, workspace: Path) -> None:
    (workspace / "real").mkdir()
    (workspace / "real/settings.json").write_bytes(b"1")
    (workspace / "settings.json").symlink_to("real/settings.json")
    target = target_of(root, "settings.json")
    replace_file(target, b"2", commit=commit)
    target.close()
    assert (workspace / "settings.json").is_symlink()
    assert (workspace / "real/settings.json").read_bytes() == b"2"
    assert names(workspace / "real") == ["settings.json"]


def test_names_of_255_bytes_can_be_replaced(root: Root, workspace: Path) -> None:
    for name in ("n" * 255, "漢" * 84 + ".md"):
        target = target_of(root, name)
        replace_file(target, b"x", commit=commit)
        replace_file(target, b"y", commit=commit)
        target.close()
        assert (workspace / name).read_bytes() == b"y"


def test_what_is_no_regular_file_is_not_replaced(root: Root, workspace: Path) -> None:
    (workspace / "dir").mkdir()
    os.mkfifo(workspace / "pipe")
    for name, code in (("dir", ErrorCode.IS_A_DIRECTORY), ("pipe", ErrorCode.NOT_A_REGULAR_FILE)):
        target = target_of(root, name)
        with pytest.raises(ToolError) as caught:
            replace_file(target, b"x", commit=commit)
        target.close()
        assert caught.value.code is code
    assert names(workspace) == ["dir", "pipe"]


def test_create_only_never_replaces_also_when_the_file_appears_at_the_last_moment(root: Root, workspace: Path) -> None:
    target = target_of(root, "a.txt")
    assert replace_file(target, b"first", commit=commit, create_only=True) is True
    with pytest.raises(ToolError) as caught:
        replace_file(target, b"second", commit=commit, create_only=True)
    assert caught.value.code is ErrorCode.ALREADY_EXISTS
    target.close()

    def somebody_is_faster() -> None:
        (workspace / "late.txt").write_bytes(b"theirs")

    late = target_of(root, "late.txt")
    with pytest.raises(ToolError) as caught:
        replace_file(late, b"mine", commit=somebody_is_faster, create_only=True)
    late.close()
    assert caught.value.code is ErrorCode.ALREADY_EXISTS
    assert (workspace / "a.txt").read_bytes() == b"first"
    assert (workspace / "late.txt").read_bytes() == b"theirs"
    assert names(workspace) == ["a.txt", "late.txt"]


def test_a_file_that_is_not_the_expected_one_any_more_stays(root: Root, workspace: Path) -> None:
    (workspace / "a.txt").write_bytes(b"seen")
    expected = (workspace / "a.txt").stat()
    target = target_of(root, "a.txt")

    def meddle() -> None:
        (workspace / "a.txt").write_bytes(b"changed by a command")

    with pytest.raises(ToolError) as caught:
        replace_file(target, b"mine", commit=commit, check=meddle, expected=expected)
    target.close()
    assert caught.value.code is ErrorCode.ETAG_MISMATCH
    assert (workspace / "a.txt").read_bytes() == b"changed by a command"
    assert names(workspace) == ["a.txt"]


def test_a_failed_rename_leaves_the_old_file_and_no_temporary_one(root: Root, workspace: Path) -> None:
    file = workspace / "a.txt"
    file.write_bytes(b"old")
    target = target_of(root, "a.txt")

    def a_directory_takes_its_place() -> None:
        file.rename(workspace / "saved.txt")
        file.mkdir()
        (file / "inside").write_bytes(b"")

    with pytest.raises(ToolError) as caught:
        replace_file(target, b"new", commit=a_directory_takes_its_place)
    target.close()
    assert caught.value.code is ErrorCode.IS_A_DIRECTORY
    assert names(workspace) == ["a.txt", "saved.txt"]
    assert names(file) == ["inside"]
    assert (workspace / "saved.txt").read_bytes() == b"old"


def test_a_rename_over_an_immutable_file_fails_and_leaves_it_as_it_is(root: Root, workspace: Path) -> None:
    file = workspace / "a.txt"
    file.write_bytes(b"old")
    if os.geteuid() != 0:
        pytest.skip("only root may make a file immutable")
    try:
        immutable(file, on=True)
    except OSError as error:
        pytest.skip(f"this file system has no immutable files: {error}")
    target = target_of(root, "a.txt")
    try:
        with pytest.raises(ToolError) as caught:
            replace_file(target, b"new", commit=commit)
    finally:
        immutable(file, on=False)
        target.close()
    assert caught.value.code is ErrorCode.PERMISSION_DENIED
    assert file.read_bytes() == b"old"
    assert names(workspace) == ["a.txt"]


def immutable(file: Path, *, on: bool) -> None:
    """Set or clear what `chattr +i` does."""
    get_flags, set_flags, flag = 0x80086601, 0x40086602, 0x10
    fd = os.open(file, os.O_RDONLY)
    try:
        flags = bytearray(8)
        fcntl.ioctl(fd, get_flags, flags)
        value = int.from_bytes(flags, sys.byteorder)
        value = value | flag if on else value & ~flag
        fcntl.ioctl(fd, set_flags, value.to_bytes(8, sys.byteorder))
    finally:
        os.close(fd)


@pytest.mark.parametrize("where", ["while it is written", "right before the rename"])
def test_a_call_that_is_stopped_changes_nothing(root: Root, workspace: Path, where: str) -> None:
    class Stop(Exception):
        pass

    steps = 0

    def stop() -> None:
        raise Stop

    def second_step() -> None:
        nonlocal steps
        steps += 1
        if steps == 2:
            raise Stop

    (workspace / "a.txt").write_bytes(b"old")
    target = target_of(root, "a.txt")
    data = b"x" * (3 * STEP_BYTES)
    written = where == "while it is written"
    with pytest.raises(Stop):
        replace_file(target, data, commit=commit if written else stop, check=second_step if written else commit)
    target.close()
    assert (workspace / "a.txt").read_bytes() == b"old"
    assert names(workspace) == ["a.txt"]


def test_a_write_that_stops_half_way_for_want_of_room_leaves_the_old_file(workspace: Path) -> None:
    """RLIMIT_FSIZE makes a real short write and then a real EFBIG; it needs a process of its own."""
    (workspace / "a.txt").write_bytes(b"old")
    script = f"""
import resource, signal
from app.errors import ToolError
from app.sandbox.containment import Root
from app.sandbox.files import replace_file
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))
with Root.open({str(workspace)!r}) as root:
    target = root.target(root.relative("a.txt"))
    try:
        replace_file(target, b"x" * 3_000_000, commit=lambda: None)
    except ToolError as error:
        print(error.code)
"""
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=REPOSITORY, capture_output=True, text=True, timeout=30, check=True
    )
    assert done.stdout.strip() == "too_large"
    assert (workspace / "a.txt").read_bytes() == b"old"
    assert names(workspace) == ["a.txt"]


FULL_DISK = """
import os, sys
from pathlib import Path
from app.errors import ToolError
from app.sandbox.containment import Root
from app.sandbox.files import replace_file
disk = Path(sys.argv[1])
(disk / "ledger.csv").write_bytes(b"OLD")
def attempt(path, data):
    with Root.open(str(disk)) as root:
        try:
            target = root.target(root.relative(path), create_parents=True)
        except ToolError as error:
            return error.code
        try:
            replace_file(target, data, commit=lambda: None)
            return "done"
        except ToolError as error:
            target.remove_created()
            return error.code
        finally:
            target.close()
print(attempt("ledger.csv", b"x" * 3_000_000))
print(attempt("new/deep/file.csv", b"x" * 3_000_000))
print((disk / "ledger.csv").read_bytes().decode(), sorted(os.listdir(disk)))
print(attempt("ledger.csv", b"NEW"))
(disk / "d").mkdir()
for number in range(10_000):
    try:
        (disk / "d" / str(number)).touch()
    except OSError:
        break
print(attempt("other.csv", b"x"), attempt("ledger.csv", b"x"), attempt("a/b", b"x"))
print((disk / "ledger.csv").read_bytes().decode(), sorted(os.listdir(disk)))
"""


def test_a_full_disk_and_one_without_inodes_leave_the_old_file_and_no_temporary_one(tmp_path: Path) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    assert in_own_mount_namespace("size=1m,nr_inodes=64", disk, FULL_DISK, disk) == [
        "no_space",
        "no_space",
        "OLD ['ledger.csv']",
        "done",
        "no_space no_space no_space",
        "NEW ['d', 'ledger.csv']",
    ]


def in_own_mount_namespace(options: str, mounted: Path, script: str, argument: Path) -> list[str]:
    """Mount a small file system in memory where nobody else sees it, run a script there and return what it prints."""
    unshare = ["unshare", "--mount"] if os.geteuid() == 0 else ["unshare", "--mount", "--map-root-user"]
    if shutil.which("unshare") is None or subprocess.run([*unshare, "true"], check=False, timeout=10).returncode:
        pytest.skip("no private mount namespace can be had here")
    mount = f'mount -t tmpfs -o {options} tmpfs "{mounted}" && exec "$@"'
    done = subprocess.run(
        [*unshare, "sh", "-c", mount, "sh", sys.executable, "-c", script, str(argument)],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def test_a_directory_that_vanished_is_told_apart_from_other_failures(root: Root, workspace: Path) -> None:
    target = target_of(root, "d/a.txt")
    (workspace / "d").rmdir()
    with pytest.raises(ParentVanished):
        replace_file(target, b"x", commit=commit)
    target.close()
    assert names(workspace) == []


def test_the_etag_is_of_the_content_and_the_same_by_every_way(root: Root, workspace: Path) -> None:
    target = target_of(root, "a.txt")
    replace_file(target, b"one", commit=commit)
    fd, _ = target.open_existing()
    assert etag_of(b"one") == etag_of_file(fd) == etag_of_written(target, b"one")
    os.close(fd)
    target.close()
    assert etag_of(b"one") != etag_of(b"two")
    assert etag_of(b"")[0] == etag_of(b"")[-1] == '"'
    assert same_etag(etag_of(b"one").strip('"'), etag_of(b"one"))
    assert not same_etag(etag_of(b"two"), etag_of(b"one"))


def test_the_etag_of_a_large_file_changes_with_every_replacement(root: Root, workspace: Path) -> None:
    data = b"x" * (ETAG_HASH_BYTES + 1)
    target = target_of(root, "large")
    seen = set()
    for _ in range(2):
        replace_file(target, data, commit=commit)
        seen.add(etag_of_written(target, data))
    target.close()
    assert len(seen) == 2


def test_reading_a_whole_file_stops_at_the_limit(workspace: Path) -> None:
    file = workspace / "a"
    file.write_bytes(b"x" * 1000)
    fd = os.open(file, os.O_RDONLY)
    try:
        assert read_whole(fd, 1000, "a") == b"x" * 1000
        with pytest.raises(ToolError) as caught:
            read_whole(fd, 999, "a")
    finally:
        os.close(fd)
    assert caught.value.code is ErrorCode.TOO_LARGE
    assert "1000 bytes" in caught.value.message
    # A file of the kernel's that says it has no bytes and has some.
    fd = os.open("/proc/self/status", os.O_RDONLY)
    try:
        assert b"Name:" in read_whole(fd, 100_000, "status")
    finally:
        os.close(fd)


def make_deep(directory: Path, depth: int, leaf: str) -> None:
    """Make a chain of directories deeper than any path can name, with a file at the bottom."""
    fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        for _ in range(depth):
            os.mkdir("d", dir_fd=fd)
            deeper = os.open("d", os.O_RDONLY | os.O_DIRECTORY, dir_fd=fd)
            os.close(fd)
            fd = deeper
        os.close(os.open(leaf, os.O_WRONLY | os.O_CREAT, dir_fd=fd))
    finally:
        os.close(fd)


@pytest.fixture
def roomy() -> Iterator[Path]:
    """A directory for trees so deep that nothing but `rm` can be trusted to clear them away."""
    with quick_directory() as directory:
        yield directory


def test_sweeping_finds_strays_at_any_depth_and_nothing_else(roomy: Path, tmp_path: Path) -> None:
    workspace = roomy
    outside = tmp_path / "outside"
    outside.mkdir()
    stray = ".toolcrib-tmp-0123456789abcdef"
    (outside / stray).write_bytes(b"")
    (workspace / "link").symlink_to(outside)
    (workspace / "sub").mkdir()
    (workspace / "sub" / stray).write_bytes(b"")
    kept = ["sub/.toolcrib-tmp-short", "sub/toolcrib-tmp-0123456789abcdef", "sub/.toolcrib-tmp-0123456789abcdefg"]
    for name in kept:
        (workspace / name).write_bytes(b"")
    (workspace / ".toolcrib-tmp-0123456789abcdee").mkdir()
    make_deep(workspace, 5_000, stray)
    young = workspace / ".toolcrib-tmp-aaaaaaaaaaaaaaaa"
    young.write_bytes(b"")
    past = time.time() - 100
    os.utime(workspace / "sub" / stray, (past, past))
    with Root.open(str(workspace)) as root:
        assert sweep_temporary_files(root.fd, older_than=50) == 1
        assert sweep_temporary_files(root.fd, older_than=0) == 2
        assert sweep_temporary_files(root.fd, older_than=0) == 0
    assert not young.exists()
    assert (outside / stray).exists()
    assert all((workspace / name).exists() for name in kept)


def test_a_tree_is_removed_whatever_its_depth_its_modes_and_its_links(roomy: Path, tmp_path: Path) -> None:
    workspace = roomy
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "kept").write_bytes(b"")
    tree = workspace / "tree"
    (tree / "locked" / "inner").mkdir(parents=True)
    (tree / "locked" / "inner" / "f").write_bytes(b"")
    (tree / "link").symlink_to(outside)
    (tree / "file-link").symlink_to(outside / "kept")
    os.mkfifo(tree / "pipe")
    (tree / os.fsdecode(b"\xff\xfe")).write_bytes(b"")
    make_deep(tree, 5_000, "f")
    (tree / "locked" / "inner").chmod(0)
    (tree / "locked").chmod(0)
    tree.chmod(0)
    (workspace / "beside").write_bytes(b"")
    before = len(list(Path("/proc/self/fd").iterdir()))
    fd = os.open(workspace, os.O_RDONLY)
    remove_tree(fd, "tree")
    remove_tree(fd, "tree")  # nothing there is fine
    remove_tree(fd, "beside")
    os.close(fd)
    assert names(workspace) == []
    assert names(outside) == ["kept"]
    assert len(list(Path("/proc/self/fd").iterdir())) == before


def test_a_link_is_removed_and_not_what_it_points_to(workspace: Path, tmp_path: Path) -> None:
    (tmp_path / "kept").mkdir()
    (tmp_path / "kept" / "f").write_bytes(b"")
    (workspace / "link").symlink_to(tmp_path / "kept")
    fd = os.open(workspace, os.O_RDONLY)
    remove_tree(fd, "link")
    os.close(fd)
    assert names(workspace) == []
    assert names(tmp_path / "kept") == ["f"]


def test_a_tree_somebody_still_writes_into_is_removed_in_the_end(workspace: Path) -> None:
    tree = workspace / "tree"
    for number in range(50):
        (tree / str(number)).mkdir(parents=True)
    stop = threading.Event()

    def write() -> None:
        number = 0
        while not stop.is_set() and number < 300:
            number += 1
            with contextlib.suppress(FileNotFoundError):
                (tree / str(number % 50) / f"n{number}").write_bytes(b"")

    writer = threading.Thread(target=write)
    writer.start()
    fd = os.open(workspace, os.O_RDONLY)
    try:
        deadline = time.monotonic() + 20
        while tree.exists():
            assert time.monotonic() < deadline
            with contextlib.suppress(OSError):
                remove_tree(fd, "tree")
    finally:
        stop.set()
        writer.join(10)
        os.close(fd)


def test_a_directory_swapped_for_a_link_while_the_tree_is_removed_leads_nowhere(
    workspace: Path, tmp_path: Path
) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "kept").write_bytes(b"")
    tree = workspace / "tree"
    for name in ("a", "b"):
        (tree / name).mkdir(parents=True)
    looked = 0

    def swap() -> None:
        """The tree was listed, one of its directories is being emptied: the other one becomes a link."""
        nonlocal looked
        looked += 1
        if looked == 2:
            inside = Path(f"/proc/self/fd/{fd}/tree")
            for other in inside.iterdir():
                other.rmdir()
                other.symlink_to(outside)

    fd = os.open(workspace, os.O_RDONLY)
    remove_tree(fd, "tree", swap)
    os.close(fd)
    assert looked >= 2
    assert names(workspace) == []
    assert names(outside) == ["kept"]


OTHER_FILE_SYSTEM = """
import os, sys
from pathlib import Path
from app.sandbox.files import remove_tree, sweep_temporary_files
workspace = Path(sys.argv[1])
stray = ".toolcrib-tmp-0123456789abcdef"
(workspace / "tree" / "mounted" / "d").mkdir()
(workspace / "tree" / "mounted" / "d" / stray).write_bytes(b"")
fd = os.open(workspace, os.O_RDONLY)
print(sweep_temporary_files(fd, older_than=0))
try:
    remove_tree(fd, "tree")
except OSError as error:
    print(type(error).__name__, error.errno)
print(sorted(str(path.relative_to(workspace)) for path in workspace.rglob("*")))
"""


def test_other_file_systems_are_not_entered(workspace: Path) -> None:
    (workspace / "tree" / "mounted").mkdir(parents=True)
    (workspace / "tree" / "f").write_bytes(b"")
    lines = in_own_mount_namespace("size=1m", workspace / "tree" / "mounted", OTHER_FILE_SYSTEM, workspace)
    assert lines == [
        "0",
        f"OSError {errno.EBUSY}",
        str(["tree", "tree/mounted", "tree/mounted/d", "tree/mounted/d/.toolcrib-tmp-0123456789abcdef"]),
    ]


def test_what_cannot_be_removed_is_told_after_the_rest_is_gone(workspace: Path) -> None:
    if os.geteuid() != 0:
        pytest.skip("only root may make a file immutable")
    tree = workspace / "tree"
    (tree / "a").mkdir(parents=True)
    stuck = tree / "a" / "stuck"
    stuck.write_bytes(b"")
    (tree / "b").mkdir()
    try:
        immutable(stuck, on=True)
    except OSError as error:
        pytest.skip(f"this file system has no immutable files: {error}")
    fd = os.open(workspace, os.O_RDONLY)
    try:
        with pytest.raises(PermissionError):
            remove_tree(fd, "tree")
    finally:
        immutable(stuck, on=False)
        os.close(fd)
    assert names(tree) == ["a"]
    assert names(tree / "a") == ["stuck"]


def test_removing_a_tree_can_be_stopped(workspace: Path) -> None:
    class Stop(Exception):
        pass

    def stop() -> None:
        raise Stop

    (workspace / "tree").mkdir()
    (workspace / "tree" / "f").write_bytes(b"")
    before = len(list(Path("/proc/self/fd").iterdir()))
    fd = os.open(workspace, os.O_RDONLY)
    with pytest.raises(Stop):
        remove_tree(fd, "tree", stop)
    os.close(fd)
    assert names(workspace / "tree") == ["f"]
    assert len(list(Path("/proc/self/fd").iterdir())) == before


NOBODY = 65_534


def as_nobody(work: Callable[[], None]) -> None:
    """Run `work` in a thread that has the file rights of nobody: the kernel keeps these per thread."""
    numbers = {"x86_64": (116, 123, 122), "aarch64": (159, 152, 151)}.get(platform.machine())
    if os.geteuid() != 0 or numbers is None:
        pytest.skip("only root can take the file rights of another user, by system calls whose numbers are known")
    setgroups, setfsgid, setfsuid = numbers
    problems: list[BaseException] = []

    def run() -> None:
        syscall = ctypes.CDLL(None, use_errno=True).syscall
        syscall(setgroups, 0, None)
        syscall(setfsgid, NOBODY)
        syscall(setfsuid, NOBODY)
        try:
            work()
        except BaseException as error:  # noqa: BLE001 - raised again by the test
            problems.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join(20)
    assert not thread.is_alive()
    for problem in problems:
        raise problem


@pytest.fixture
def shared() -> Iterator[Path]:
    """A directory that another user can reach: pytest's own are private."""
    directory = Path(tempfile.mkdtemp())
    directory.chmod(0o777)
    yield directory
    for path in directory.iterdir():
        path.chmod(0o700)
    shutil.rmtree(directory)


def attempt(root: Path, path: str) -> str:
    with Root.open(str(root)) as opened:
        target = opened.target(opened.relative(path))
        try:
            replace_file(target, b"new", commit=commit)
        except ToolError as error:
            return error.code
        finally:
            target.close()
    return "done"


def test_another_user_changes_only_what_is_writable_for_him(shared: Path) -> None:
    (shared / "roots").write_bytes(b"old")
    (shared / "roots").chmod(0o644)
    (shared / "shared").write_bytes(b"old")
    (shared / "shared").chmod(0o666)

    def work() -> None:
        (shared / "read-only").write_bytes(b"old")
        (shared / "read-only").chmod(0o444)
        (shared / "closed").mkdir()
        (shared / "closed" / "f").write_bytes(b"old")
        (shared / "closed").chmod(0o555)
        paths = ("read-only", "roots", "closed/f", "shared")
        assert {path: attempt(shared, path) for path in paths} == {
            "read-only": "permission_denied",
            "roots": "permission_denied",
            "closed/f": "permission_denied",
            "shared": "done",
        }

    as_nobody(work)
    assert (shared / "roots").read_bytes() == b"old"
    assert (shared / "shared").read_bytes() == b"new"
    assert stat.S_IMODE((shared / "shared").stat().st_mode) == 0o666
    assert names(shared) == ["closed", "read-only", "roots", "shared"]
    assert names(shared / "closed") == ["f"]


def test_a_user_without_roots_rights_removes_his_own_locked_tree(shared: Path) -> None:
    def work() -> None:
        (shared / "tree" / "locked" / "inner").mkdir(parents=True)
        (shared / "tree" / "locked" / "inner" / "f").write_bytes(b"")
        for path in ("tree/locked/inner", "tree/locked", "tree"):
            (shared / path).chmod(0)
        fd = os.open(shared, os.O_RDONLY)
        remove_tree(fd, "tree")
        os.close(fd)

    as_nobody(work)
    assert names(shared) == []
