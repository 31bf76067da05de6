"""Paths of a workspace: what is inside is found by any name, what is outside by none."""

import errno
import os
import socket
import stat
import subprocess
import sys
import time
import unicodedata
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from app.errors import ErrorCode, ToolError
from app.sandbox import containment
from app.sandbox.containment import (
    MAX_PATH_BYTES,
    Root,
    display_path,
    tool_error_from_oserror,
)
from app.sandbox.files import ParentVanished, replace_file

SECRET = b"outside\n"


@pytest.fixture
def outside(tmp_path: Path) -> Path:
    directory = tmp_path / "outside"
    directory.mkdir()
    (directory / "secret.txt").write_bytes(SECRET)
    return directory


@pytest.fixture
def workspace(tmp_path: Path) -> Path:
    directory = tmp_path / "ws"
    directory.mkdir()
    return directory


@pytest.fixture(params=["openat2", "walker"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Both ways to resolve a path: the system call, and what stands in for it where a kernel or a filter lacks it."""
    if request.param == "walker":
        monkeypatch.setattr(containment, "_SYS_OPENAT2", 100_000)  # no such call: the kernel answers ENOSYS
    return str(request.param)


def read(root: Path, path: str) -> bytes:
    with Root.open(str(root)) as opened:
        file = opened.open_regular(opened.relative(path))
        try:
            return os.read(file.fd, 1000)
        finally:
            file.close()


def refusal(root: Path, path: str) -> ToolError:
    with pytest.raises(ToolError) as caught:
        read(root, path)
    return caught.value


def locate(root: Path, path: str) -> str:
    """Resolve a path for writing, make its parents, and return where it is."""
    with Root.open(str(root)) as opened:
        target = opened.target(opened.relative(path), create_parents=True)
        target.close()
        return target.path


def open_fds() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


def tree(root: Path) -> list[str]:
    return sorted(str(path.relative_to(root)) for path in root.rglob("*"))


@pytest.mark.usefixtures("way")
def test_every_spelling_of_an_inside_path_finds_the_file(workspace: Path) -> None:
    (workspace / "sub").mkdir()
    (workspace / "a.txt").write_bytes(b"in\n")
    for spelling in (
        "a.txt",
        "./a.txt",
        "sub/../a.txt",
        "sub//.././a.txt",
        f"{workspace}/a.txt",
        f"{workspace}//./a.txt",
    ):
        assert read(workspace, spelling) == b"in\n", spelling


@pytest.mark.usefixtures("way")
@pytest.mark.parametrize("exists", [True, False])
def test_paths_that_lead_out_are_refused_in_the_same_words_whether_or_not_something_is_there(
    workspace: Path, outside: Path, exists: bool
) -> None:
    if not exists:
        (outside / "secret.txt").unlink()
    for path in (
        "../outside/secret.txt",
        "a/../../outside/secret.txt",
        f"{outside}/secret.txt",
        "./../outside/secret.txt",
        f"{workspace}/../outside/secret.txt",
    ):
        error = refusal(workspace, path)
        assert error.code is ErrorCode.PATH_OUTSIDE_WORKSPACE, path
        assert "leads out of the workspace" in error.message
        with pytest.raises(ToolError, match="leads out of the workspace"):
            locate(workspace, path)
    shown = refusal(workspace, "../outside/secret.txt").message
    assert shown == refusal(workspace, "../outside/nothing.txt").message.replace("nothing", "secret")
    assert tree(workspace) == []


def test_dots_in_an_absolute_path_do_not_tell_which_directories_exist_outside(workspace: Path, outside: Path) -> None:
    (workspace / "a.txt").write_bytes(b"in\n")
    for path in (f"{outside}/../ws/a.txt", f"{outside}/../nothing/../ws/a.txt"):
        assert refusal(workspace, path).code is ErrorCode.PATH_OUTSIDE_WORKSPACE


@pytest.mark.usefixtures("way")
def test_opening_a_pipe_does_not_wait_for_its_other_end(workspace: Path) -> None:
    os.mkfifo(workspace / "pipe")
    with Root.open(str(workspace)) as root:
        fd = root.open_file(root.relative("pipe"), os.O_RDONLY)
        assert not os.get_inheritable(fd)
        os.close(fd)
        with pytest.raises(ToolError) as caught:
            root.open_file(root.relative("pipe"), os.O_WRONLY)
    assert caught.value.code is ErrorCode.NOT_A_REGULAR_FILE


@pytest.mark.usefixtures("way")
def test_a_directory_whose_name_begins_like_the_roots_is_outside(workspace: Path) -> None:
    evil = Path(f"{workspace}-evil")
    evil.mkdir()
    (evil / "k.txt").write_bytes(SECRET)
    for path in (f"{evil}/k.txt", "../ws-evil/k.txt"):
        assert refusal(workspace, path).code is ErrorCode.PATH_OUTSIDE_WORKSPACE


@pytest.mark.usefixtures("way")
def test_links_that_lead_out_are_refused_wherever_they_stand_in_the_path(workspace: Path, outside: Path) -> None:
    (workspace / "absolute").symlink_to(outside)
    (workspace / "relative").symlink_to("../outside")
    (workspace / "file").symlink_to(outside / "secret.txt")
    (workspace / "proc").symlink_to("/proc/self/root")
    (workspace / "root").symlink_to("/")
    (workspace / "chain").symlink_to("relative")
    for path in (
        "absolute/secret.txt",
        "relative/secret.txt",
        "file",
        "chain/secret.txt",
        f"proc{outside}/secret.txt",
        f"root{outside}/secret.txt",
    ):
        assert refusal(workspace, path).code is ErrorCode.PATH_OUTSIDE_WORKSPACE, path
    for path in ("absolute/new.txt", "relative/new/deep.txt", "file", "absolute/x/y"):
        with pytest.raises(ToolError, match="leads out"):
            locate(workspace, path)
    assert tree(outside) == ["secret.txt"]


@pytest.mark.usefixtures("way")
def test_links_that_stay_inside_are_followed_relative_and_absolute(workspace: Path) -> None:
    (workspace / "pkg" / "core").mkdir(parents=True)
    (workspace / "pkg" / "core" / "a.txt").write_bytes(b"in\n")
    (workspace / "current").symlink_to("pkg/core")
    (workspace / "absolute").symlink_to(workspace / "pkg")
    (workspace / "pkg" / "up").symlink_to("../current/../core/a.txt")
    for path in ("current/a.txt", "absolute/core/a.txt", "pkg/up", "absolute/../current/../../current/a.txt"):
        assert read(workspace, path) == b"in\n", path
    with Root.open(str(workspace)) as root:
        file = root.open_regular(root.relative("absolute/core/a.txt"))
        file.close()
        assert (file.path, file.relative_path) == (f"{workspace}/pkg/core/a.txt", "pkg/core/a.txt")


def test_dots_go_up_from_where_a_link_leads_not_from_where_it_stands(workspace: Path) -> None:
    (workspace / "a" / "b").mkdir(parents=True)
    (workspace / "a" / "x").write_bytes(b"beside b\n")
    (workspace / "x").write_bytes(b"beside the link\n")
    (workspace / "link").symlink_to("a/b")
    assert read(workspace, "link/../x") == b"beside b\n"


@pytest.mark.usefixtures("way")
def test_a_root_that_is_a_link_takes_every_spelling_of_itself(tmp_path: Path, workspace: Path) -> None:
    (workspace / "a.txt").write_bytes(b"in\n")
    (tmp_path / "link").symlink_to(workspace)
    (tmp_path / "other").symlink_to(tmp_path)
    spellings = (f"{tmp_path}/link", f"{workspace}", f"{tmp_path}/other/ws", f"{tmp_path}/other/link")
    for used in spellings:
        for spelling in ("a.txt", *(f"{root}/a.txt" for root in spellings)):
            assert read(Path(used), spelling) == b"in\n", (used, spelling)
    with Root.open(f"{tmp_path}/other/link") as root:
        file = root.open_regular(root.relative("a.txt"))
        file.close()
        assert (file.path, file.relative_path) == (f"{workspace}/a.txt", "a.txt")


@pytest.mark.usefixtures("way")
def test_a_dangling_link_inside_names_its_target_and_one_to_outside_names_nothing(
    workspace: Path, outside: Path
) -> None:
    (workspace / "sub").mkdir()
    (workspace / "inside").symlink_to("sub/new.txt")
    (workspace / "deep").symlink_to("made/by/write")
    (workspace / "later").symlink_to(outside / "later.txt")
    (workspace / "relative").symlink_to("../outside/later.txt")
    assert locate(workspace, "inside") == f"{workspace}/sub/new.txt"
    assert locate(workspace, "deep/x.txt") == f"{workspace}/made/by/write/x.txt"
    for path in ("later", "relative", "later/x"):
        with pytest.raises(ToolError, match="leads out"):
            locate(workspace, path)
    assert tree(outside) == ["secret.txt"]
    assert "points to nothing" in refusal(workspace, "inside").message


@pytest.mark.usefixtures("way")
def test_links_in_a_circle_end(workspace: Path) -> None:
    (workspace / "a").symlink_to("b")
    (workspace / "b").symlink_to("a")
    assert refusal(workspace, "a").code is ErrorCode.IO_ERROR
    with pytest.raises(ToolError, match="circle"):
        locate(workspace, "a/x")


def test_the_walker_ends_on_links_that_multiply_their_way_up(workspace: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(containment, "_SYS_OPENAT2", 100_000)
    deep = "/".join(["d"] * 300)
    (workspace / deep).mkdir(parents=True)
    step = "../d/" * 600
    for number in range(30):
        (workspace / deep / f"l{number}").symlink_to(f"{step}l{number + 1}")
    began = time.monotonic()
    assert refusal(workspace, f"{deep}/l0").code in {ErrorCode.IO_ERROR, ErrorCode.NOT_FOUND}
    assert time.monotonic() - began < 2


@pytest.mark.usefixtures("way")
@pytest.mark.parametrize(
    ("path", "code"),
    [
        ("", ErrorCode.INVALID_ARGUMENTS),
        ("a\0b", ErrorCode.INVALID_ARGUMENTS),
        ("\0", ErrorCode.INVALID_ARGUMENTS),
        ("a\ud800", ErrorCode.INVALID_ARGUMENTS),
        (".toolcrib-tmp-0123456789abcdef", ErrorCode.INVALID_ARGUMENTS),
        ("n" * 256, ErrorCode.NAME_TOO_LONG),
        ("漢" * 86, ErrorCode.NAME_TOO_LONG),
        ("d/" + "n" * 256 + "/x", ErrorCode.NAME_TOO_LONG),
        ("d/" * 2048, ErrorCode.NAME_TOO_LONG),
        ("missing", ErrorCode.NOT_FOUND),
        ("missing/x", ErrorCode.NOT_FOUND),
        ("file/x", ErrorCode.NOT_A_DIRECTORY),
        ("file/", ErrorCode.NOT_A_DIRECTORY),
        ("file/..", ErrorCode.NOT_A_DIRECTORY),
        (".", ErrorCode.IS_A_DIRECTORY),
        ("dir", ErrorCode.IS_A_DIRECTORY),
        ("link", ErrorCode.IS_A_DIRECTORY),
    ],
)
def test_each_kind_of_bad_path_has_its_code(workspace: Path, path: str, code: ErrorCode) -> None:
    (workspace / "dir").mkdir()
    (workspace / "file").write_bytes(b"")
    (workspace / "link").symlink_to("dir")
    assert refusal(workspace, path).code is code


def test_a_path_of_the_greatest_length_is_usable(workspace: Path) -> None:
    path = "/".join(["n" * 255] * 16)
    assert len(path) == MAX_PATH_BYTES
    assert refusal(workspace, path).code is ErrorCode.NOT_FOUND
    with Root.open(str(workspace)) as root:
        target = root.target(root.relative(path), create_parents=True)
        assert target.made_parents
        target.remove_created()
        target.close()
    assert tree(workspace) == []


def test_a_name_of_255_bytes_is_fine(workspace: Path) -> None:
    name = "漢" * 84 + ".md"
    (workspace / name).write_bytes(b"long\n")
    assert read(workspace, name) == b"long\n"


def test_the_error_names_the_file_that_is_used_as_a_directory(workspace: Path) -> None:
    (workspace / "a").mkdir()
    (workspace / "a" / "data").write_bytes(b"")
    assert refusal(workspace, "a/data/x/y").message == "cannot use a/data/x/y: a/data is not a directory"
    with pytest.raises(ToolError, match="a/data is not a directory"):
        locate(workspace, "a/data/x/y")
    assert tree(workspace) == ["a", "a/data"]


def test_a_look_alike_name_is_pointed_out(workspace: Path) -> None:
    decomposed = unicodedata.normalize("NFD", "café.md")
    for name in (decomposed, "plan\u00a0b.txt", "README.md", "it\u2019s.txt"):
        (workspace / name).write_bytes(b"")
    for wanted, found in (
        ("café.md", decomposed),
        ("plan b.txt", "plan\u00a0b.txt"),
        ("readme.md", "README.md"),
        ("it's.txt", "it\u2019s.txt"),
    ):
        message = refusal(workspace, wanted).message
        assert found in message, wanted
        assert f"{found!a}" in message, wanted
    assert refusal(workspace, "other.txt").message == "other.txt does not exist"


@pytest.mark.usefixtures("way")
def test_pipes_sockets_and_devices_are_refused_at_once(workspace: Path) -> None:
    os.mkfifo(workspace / "pipe")
    with socket.socket(socket.AF_UNIX) as listener:
        here = Path.cwd()
        os.chdir(workspace)  # the address of a socket is short
        try:
            listener.bind("socket")
        finally:
            os.chdir(here)
        names = ["pipe", "socket"]
        if os.geteuid() == 0:
            os.mknod(workspace / "zero", 0o666 | stat.S_IFCHR, os.makedev(1, 5))
            names.append("zero")
        for name in names:
            began = time.monotonic()
            assert refusal(workspace, name).code is ErrorCode.NOT_A_REGULAR_FILE, name
            assert time.monotonic() - began < 0.1
    (workspace / "link").symlink_to("/dev/zero")
    assert refusal(workspace, "link").code is ErrorCode.PATH_OUTSIDE_WORKSPACE


def test_a_root_that_is_missing_says_that_nothing_recreates_it(tmp_path: Path) -> None:
    for gone in (tmp_path / "gone", tmp_path / "file" / "x"):
        with pytest.raises(ToolError) as caught:
            Root.open(str(gone))
        assert caught.value.code is ErrorCode.NOT_FOUND
        assert f"the workspace directory {gone} does not exist, and nothing makes it again" in caught.value.message
        assert not gone.exists()


def test_a_root_that_another_directory_replaced_is_not_used(workspace: Path) -> None:
    status = workspace.stat()
    identity = (status.st_dev, status.st_ino)
    with Root.open(str(workspace), identity) as root:
        assert root.identity == identity
    workspace.rename(workspace.parent / "moved")
    workspace.mkdir()
    before = open_fds()
    with pytest.raises(ToolError, match="another directory stands at") as caught:
        Root.open(str(workspace), identity)
    assert caught.value.code is ErrorCode.NOT_FOUND
    assert open_fds() == before


def test_a_target_knows_its_real_place_and_its_key(workspace: Path) -> None:
    (workspace / "real").mkdir()
    (workspace / "real" / "settings.json").write_bytes(b"{}")
    (workspace / "settings.json").symlink_to("real/settings.json")
    (workspace / "dir").symlink_to("real")
    keys = set()
    with Root.open(str(workspace)) as root:
        for path in ("settings.json", "real/settings.json", "dir/settings.json", "real/SETTINGS.json"):
            target = root.target(root.relative(path))
            keys.add(target.key)
            if path != "real/SETTINGS.json":
                assert target.path == f"{workspace}/real/settings.json"
                assert target.relative_path == "real/settings.json"
            assert target.shown == path
            target.close()
        other = root.target(root.relative("real/other.json"))
        assert other.key not in keys
        other.close()
    assert len(keys) == 1


def test_nfc_and_nfd_names_share_a_key(workspace: Path) -> None:
    with Root.open(str(workspace)) as root:
        keys = set()
        for form in ("NFC", "NFD"):
            target = root.target(root.relative(unicodedata.normalize(form, "café.md")))
            keys.add(target.key)
            target.close()
    assert len(keys) == 1


def test_parents_are_made_and_taken_back_only_where_they_are_empty(workspace: Path) -> None:
    (workspace / "kept").mkdir()
    with Root.open(str(workspace)) as root:
        target = root.target(root.relative("kept/a/b/c/f.txt"), create_parents=True)
        assert tree(workspace) == ["kept", "kept/a", "kept/a/b", "kept/a/b/c"]
        (workspace / "kept" / "a" / "mine").write_bytes(b"")
        target.remove_created()
        target.close()
    assert tree(workspace) == ["kept", "kept/a", "kept/a/mine"]


def test_only_the_directories_that_were_made_are_taken_back(workspace: Path) -> None:
    with Root.open(str(workspace)) as root:
        target = root.target(root.relative("a/b/f.txt"), create_parents=True)
        (workspace / "elsewhere" / "b").mkdir(parents=True)
        (workspace / "a" / "b").rename(workspace / "elsewhere" / "moved")
        target.remove_created()
        target.close()
    assert tree(workspace) == ["a", "elsewhere", "elsewhere/b", "elsewhere/moved"]


def test_a_directory_somebody_else_made_in_the_same_moment_is_used_and_kept(workspace: Path) -> None:
    calls = 0

    def check() -> None:
        nonlocal calls
        calls += 1
        if calls == 2:
            (workspace / "a" / "b").mkdir()

    with Root.open(str(workspace)) as root:
        target = root.target(root.relative("a/b/c/f.txt"), create_parents=True, check=check)
        assert target.path == f"{workspace}/a/b/c/f.txt"
        target.remove_created()
        target.close()
    assert tree(workspace) == ["a", "a/b"]


@pytest.mark.usefixtures("way")
def test_a_missing_directory_before_dots_is_not_made(workspace: Path) -> None:
    with pytest.raises(ToolError) as caught:
        locate(workspace, "missing/../f.txt")
    assert caught.value.code is ErrorCode.NOT_FOUND
    assert tree(workspace) == []


@pytest.mark.parametrize("path", ["new/", "dir/", "dir/.", "dir/..", "."])
def test_a_path_that_can_only_be_a_directory_is_no_target(workspace: Path, path: str) -> None:
    (workspace / "dir").mkdir()
    with pytest.raises(ToolError) as caught:
        locate(workspace, path)
    assert caught.value.code is ErrorCode.IS_A_DIRECTORY
    assert tree(workspace) == ["dir"]


def test_making_parents_stops_when_the_call_has_to(workspace: Path) -> None:
    class Stop(Exception):
        pass

    calls = 0

    def check() -> None:
        nonlocal calls
        calls += 1
        if calls == 3:
            raise Stop

    before = open_fds()
    with Root.open(str(workspace)) as root, pytest.raises(Stop):
        root.target(root.relative("a/b/c/d/f"), create_parents=True, check=check)
    assert tree(workspace) == []
    assert open_fds() == before


@pytest.mark.usefixtures("way")
def test_ten_thousand_refusals_leave_no_descriptor_behind(workspace: Path, outside: Path) -> None:
    (workspace / "out").symlink_to(outside)
    (workspace / "loop").symlink_to("loop")
    (workspace / "file").write_bytes(b"")
    (workspace / "dir").mkdir()
    (workspace / "later").symlink_to(outside / "later")
    os.mkfifo(workspace / "pipe")
    paths = ["out/secret.txt", "../x", "loop", "file/x", "pipe", "missing/x", "dir", "later", "a/../../x", "loop/x/y"]
    before = open_fds()
    with Root.open(str(workspace)) as root:
        for _ in range(400):
            for path in paths:
                relative = root.relative(path)
                with pytest.raises(ToolError):
                    root.open_regular(relative)
                if path not in {"pipe", "missing/x", "dir"}:
                    with pytest.raises(ToolError):
                        root.target(relative, create_parents=True)
                with pytest.raises(ToolError):
                    root.target(root.relative(f"file/{path}"), create_parents=True)
    assert open_fds() < before + 50  # other threads of this process open and close some
    assert tree(outside) == ["secret.txt"]


def test_unrestricted_paths_may_lie_anywhere(workspace: Path, outside: Path) -> None:
    (workspace / "link").symlink_to(outside / "new" / "x.txt")
    with Root.open(str(workspace), containment="unrestricted") as root:
        for path in (f"{outside}/secret.txt", "../outside/secret.txt"):
            file = root.open_regular(root.relative(path))
            assert os.read(file.fd, 100) == SECRET
            file.close()
            assert (file.path, file.relative_path) == (f"{outside}/secret.txt", "../outside/secret.txt")
        target = root.target(root.relative("link"), create_parents=True)
        assert target.path == f"{outside}/new/x.txt"
        target.remove_created()
        target.close()
        with pytest.raises(ToolError, match="does not exist"):
            root.open_regular(root.relative("../nothing"))
    assert tree(outside) == ["secret.txt"]


def test_the_real_path_of_a_file_that_was_replaced_meanwhile_has_no_remark(workspace: Path) -> None:
    (workspace / "a").write_bytes(b"old")
    (workspace / "odd (deleted)").write_bytes(b"")
    (workspace / "l").symlink_to("a")
    (workspace / "m").symlink_to("odd (deleted)")
    with Root.open(str(workspace)) as root:
        odd = root.open_regular(root.relative("m"))
        odd.close()
        assert odd.relative_path == "odd (deleted)"
        fd = os.open(workspace / "a", os.O_RDONLY)
        (workspace / "a").unlink()
        assert containment._real_path(fd) == os.fsencode(workspace / "a")
        os.close(fd)


def test_names_that_are_no_utf_8_are_shown_escaped(workspace: Path) -> None:
    assert display_path(b"caf\xe9") == "caf\\xe9"
    assert display_path(os.fsdecode(b"caf\xe9")) == "caf\\xe9"
    (workspace / os.fsdecode(b"caf\xe9")).symlink_to("x")
    (workspace / "l").symlink_to(os.fsdecode(b"caf\xe9"))
    assert locate(workspace, "l") == f"{workspace}/x"


@pytest.mark.parametrize(
    ("number", "code"),
    [
        (errno.ENOENT, ErrorCode.NOT_FOUND),
        (errno.EXDEV, ErrorCode.PATH_OUTSIDE_WORKSPACE),
        (errno.EACCES, ErrorCode.PERMISSION_DENIED),
        (errno.EPERM, ErrorCode.PERMISSION_DENIED),
        (errno.EROFS, ErrorCode.PERMISSION_DENIED),
        (errno.EEXIST, ErrorCode.ALREADY_EXISTS),
        (errno.EISDIR, ErrorCode.IS_A_DIRECTORY),
        (errno.ENOTDIR, ErrorCode.NOT_A_DIRECTORY),
        (errno.ENXIO, ErrorCode.NOT_A_REGULAR_FILE),
        (errno.ENAMETOOLONG, ErrorCode.NAME_TOO_LONG),
        (errno.ENOSPC, ErrorCode.NO_SPACE),
        (errno.EDQUOT, ErrorCode.NO_SPACE),
        (errno.EFBIG, ErrorCode.TOO_LARGE),
        (errno.EMFILE, ErrorCode.LIMIT_EXCEEDED),
        (errno.ELOOP, ErrorCode.IO_ERROR),
        (errno.EIO, ErrorCode.IO_ERROR),
        (None, ErrorCode.IO_ERROR),
    ],
)
def test_each_failed_system_call_has_its_answer(number: int | None, code: ErrorCode) -> None:
    error = tool_error_from_oserror(OSError(number, "x") if number else OSError("odd"), "some/file")
    assert error.code is code
    assert "some/file" in error.message


NAMES = st.sampled_from(["a", "b", "link", "out", "abs", "..", ".", "", "f", "self"])


@pytest.mark.usefixtures("way")
@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(parts=st.lists(NAMES, min_size=1, max_size=8), absolute=st.booleans())
def test_no_mix_of_names_dots_and_links_opens_anything_outside(
    workspace: Path, outside: Path, parts: list[str], absolute: bool
) -> None:
    if not (workspace / "a").exists():
        (workspace / "a" / "b").mkdir(parents=True)
        (workspace / "b").mkdir()
        for place in (workspace, workspace / "a", workspace / "a" / "b", workspace / "b"):
            (place / "f").write_bytes(b"in\n")
            (place / "link").symlink_to("../a" if place != workspace else "a/b")
            (place / "out").symlink_to(outside)
            (place / "abs").symlink_to(workspace / "a")
            (place / "self").symlink_to(".")
    path = "/".join(parts).lstrip("/") or "."
    path = f"{workspace}/{path}" if absolute else path
    try:
        with Root.open(str(workspace)) as root:
            fd = root.open_file(root.relative(path), os.O_RDONLY)
    except ToolError:
        # Right when it leads nowhere or out; nothing here leads out but these two names.
        there = os.path.exists(path if absolute else f"{workspace}/{path}")  # noqa: PTH110 - pathlib would drop dots
        assert {"..", "out"} & set(parts) or not there
        return
    try:
        real = str(Path(f"/proc/self/fd/{fd}").readlink())
    finally:
        os.close(fd)
    assert real == str(workspace) or real.startswith(f"{workspace}/")
    # What the kernel finds by the plain path is the same file.
    assert os.path.realpath(workspace / path) == real


FLIP = """
import ctypes, os, select, sys
exchange = ctypes.CDLL(None, use_errno=True).renameat2
first, second = map(os.fsencode, sys.argv[1:])
while not select.select([0], [], [], 0)[0]:
    for _ in range(200):
        exchange(-100, first, -100, second, 2)
"""


@contextmanager
def flipping(one: Path, other: Path) -> Iterator[None]:
    """Have another process exchange two names as fast as the kernel can."""
    with subprocess.Popen([sys.executable, "-S", "-c", FLIP, str(one), str(other)], stdin=subprocess.PIPE) as process:
        try:
            yield
        finally:
            process.communicate(b"stop", timeout=20)
    assert process.returncode == 0


def test_a_directory_swapped_for_a_link_all_the_time_never_leads_a_read_out(workspace: Path, outside: Path) -> None:
    (outside / "f.txt").write_bytes(SECRET)
    (workspace / "d").mkdir()
    (workspace / "d" / "f.txt").write_bytes(b"in\n")
    (workspace / "e").symlink_to(outside)
    seen: dict[bytes | ErrorCode, int] = {}
    with flipping(workspace / "d", workspace / "e"), Root.open(str(workspace)) as root:
        end = time.monotonic() + 2
        relative = root.relative("d/f.txt")
        while time.monotonic() < end or len(seen) < 2:
            assert time.monotonic() < end + 20, "the swap was never met"
            result: bytes | ErrorCode
            try:
                file = root.open_regular(relative)
            except ToolError as error:
                result = error.code
            else:
                result = os.read(file.fd, 100)
                file.close()
            seen[result] = seen.get(result, 0) + 1
    assert SECRET not in seen
    assert seen[b"in\n"] > 0
    assert seen[ErrorCode.PATH_OUTSIDE_WORKSPACE] > 0


def test_a_directory_swapped_for_a_link_all_the_time_never_leads_a_write_out(workspace: Path, outside: Path) -> None:
    (workspace / "d").mkdir()
    (workspace / "e").symlink_to(outside)
    before = open_fds()
    seen: dict[str, int] = {}
    with flipping(workspace / "d", workspace / "e"), Root.open(str(workspace)) as root:
        end = time.monotonic() + 2
        number = 0
        while time.monotonic() < end or len(seen) < 2:
            assert time.monotonic() < end + 20, "the swap was never met"
            number += 1
            try:
                target = root.target(root.relative(f"d/n{number % 7}/f.txt"), create_parents=True)
            except ToolError as error:
                seen[error.code] = seen.get(error.code, 0) + 1
                continue
            try:
                replace_file(target, b"x", commit=lambda: None)
                seen["written"] = seen.get("written", 0) + 1
            except ParentVanished:
                pass
            finally:
                target.close()
    assert tree(outside) == ["secret.txt"]
    assert seen["written"] > 0
    assert seen[ErrorCode.PATH_OUTSIDE_WORKSPACE] > 0
    assert open_fds() < before + 50  # other threads of this process open and close some


def test_a_root_that_nobody_took_over_is_closed(tmp_path: Path) -> None:
    before = open_fds()
    for _ in range(100):
        Root.open(str(tmp_path))
    assert open_fds() < before + 50
