import os
import stat
from pathlib import Path

import pytest

from app.domain.ids import first_id, new_id
from app.errors import Conflict, InvalidRequest, NoSpace
from app.services.workspace_roots import (
    MAX_ROOT_BYTES,
    ORPHAN_SECONDS,
    Adoption,
    WorkspaceRoots,
    from_os_error,
    lay_in,
    look_at,
    sweep,
    take_out,
)
from tests.support.users import ACCOUNT, NOBODY, as_account, give

root_alone = pytest.mark.skipif(ACCOUNT is None, reason="only root acts as others")


@pytest.fixture
def roots(tmp_path: Path) -> WorkspaceRoots:
    (tmp_path / "adoptable").mkdir()
    give(tmp_path / "adoptable")
    (tmp_path / "data").mkdir(mode=0o711)
    made = WorkspaceRoots(tmp_path / "data", (tmp_path / "adoptable",), account=ACCOUNT)
    made.make_directories()
    return made


def test_the_directories_are_for_the_service_and_accounts_pass_through_them(
    roots: WorkspaceRoots, tmp_path: Path
) -> None:
    for name in ("workspaces", "trash"):
        assert stat.S_IMODE((tmp_path / "data" / name).stat().st_mode) == (0o700 if ACCOUNT is None else 0o711)
    roots.make_directories()


def test_a_managed_root_is_made_filled_and_taken_out_again(roots: WorkspaceRoots) -> None:
    root = roots.managed(new_id("ws"))
    laid = lay_in(root, {"a/b.txt": b"x", "c": b""}, ACCOUNT, make=True)
    standing = look_at(root)
    assert standing is not None
    assert (laid.identity, roots.owner) == (standing.identity, (standing.uid, Path(root).stat().st_gid))
    assert (laid.files, laid.directories) == (("a/b.txt", "c"), ["a"])
    assert Path(root, "a/b.txt").read_bytes() == b"x"
    take_out(root, laid, ACCOUNT, made=True)
    assert look_at(root) is None


def test_what_was_laid_into_an_adopted_root_is_taken_out_and_nothing_else(tmp_path: Path) -> None:
    (tmp_path / "there").mkdir()
    (tmp_path / "there/mine").write_text("mine")
    laid = lay_in(str(tmp_path), {"there/new/x": b"1", "other/y": b"2"}, None, make=False)
    take_out(str(tmp_path), laid, None, made=False)
    assert sorted(str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*")) == ["there", "there/mine"]


def test_a_file_that_cannot_be_written_takes_the_others_with_it(tmp_path: Path) -> None:
    (tmp_path / "taken").write_text("mine")
    with pytest.raises(Conflict):
        lay_in(str(tmp_path), {"new/x": b"1", "taken": b"2"}, None, make=False)
    with pytest.raises(InvalidRequest):
        lay_in(str(tmp_path), {"new/x": b"1", "taken/below": b"2"}, None, make=False)
    assert [path.name for path in tmp_path.iterdir()] == ["taken"]
    assert (tmp_path / "taken").read_text() == "mine"


def test_files_are_not_laid_through_a_link_that_leads_out(tmp_path: Path) -> None:
    (tmp_path / "outside").mkdir()
    (tmp_path / "root").mkdir()
    (tmp_path / "root/link").symlink_to(tmp_path / "outside")
    with pytest.raises(InvalidRequest) as caught:
        lay_in(str(tmp_path / "root"), {"link/x": b"1"}, None, make=False)
    assert caught.value.extra["errors"][0]["code"] == "path_outside_workspace"
    assert not list((tmp_path / "outside").iterdir())


def test_only_a_directory_on_the_list_is_adopted(roots: WorkspaceRoots, tmp_path: Path) -> None:
    (tmp_path / "adoptable/project").mkdir()
    give(tmp_path / "adoptable")
    uid, gid = roots.owner
    project = Adoption(str(tmp_path / "adoptable/project"), uid, gid)
    assert roots.adopted(str(tmp_path / "adoptable/project")) == project
    assert roots.adopted(str(tmp_path / "adoptable/project/../project/")) == project
    assert roots.adopted(str(tmp_path / "adoptable")) == Adoption(str(tmp_path / "adoptable"), uid, gid)
    for outside in (tmp_path, tmp_path / "adoptable/..", tmp_path / "adoptable-evil", Path("/")):
        with pytest.raises(InvalidRequest) as caught:
            roots.adopted(str(outside))
        assert caught.value.extra["errors"][0]["code"] == "not_allowed"


def test_a_root_with_more_bytes_than_can_be_stored_is_refused(roots: WorkspaceRoots, tmp_path: Path) -> None:
    for given in ("/" + "é" * 1_000, str(tmp_path / "adoptable") + "/x" * 990, "/" + "x/" * 4_000):
        with pytest.raises(InvalidRequest) as caught:
            roots.adopted(given)
        assert caught.value.extra["errors"][0]["code"] == "too_long"
    with pytest.raises(InvalidRequest) as caught:
        roots.adopted("/" + "x" * (MAX_ROOT_BYTES - 1))
    assert caught.value.extra["errors"][0]["code"] == "not_allowed"


@root_alone
def test_a_directory_is_adopted_with_its_own_user_and_never_roots(roots: WorkspaceRoots, tmp_path: Path) -> None:
    project = tmp_path / "adoptable/project"
    project.mkdir(mode=0o700)
    for uid, gid, expected in (
        (4_321, 4_322, (4_321, 4_322)),
        (NOBODY, 0, (NOBODY, NOBODY)),
        (4_321, 0, (4_321, 4_321)),
    ):
        os.chown(project, uid, gid)
        assert roots.adopted(str(project)) == Adoption(str(project), *expected)
    for uid, gid, mode, code in (
        (0, 0, 0o777, "owned_by_root"),
        (0, NOBODY, 0o777, "owned_by_root"),
        (4_321, 4_322, 0o077, "permission_denied"),
    ):
        os.chown(project, uid, gid)
        project.chmod(mode)
        with pytest.raises(InvalidRequest) as caught:
            roots.adopted(str(project))
        assert caught.value.extra["errors"][0]["code"] == code
    project.chmod(0o700)
    (tmp_path / "adoptable").chmod(0o700)
    with pytest.raises(InvalidRequest) as caught:
        roots.adopted(str(project))
    assert caught.value.extra["errors"][0]["code"] == "permission_denied"


@root_alone
def test_the_trash_is_emptied_with_the_rights_of_whom_it_belongs_to(roots: WorkspaceRoots, tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "kept").write_text("kept")
    root = roots.managed(new_id("ws"))
    lay_in(root, {"closed/deep/x": b"1", "y": b"2"}, ACCOUNT, make=True)
    with as_account():
        Path(root, "link").symlink_to(outside)
        os.mkfifo(Path(root, "pipe"))
        Path(root, "closed").chmod(0)
        Path(root).chmod(0)
    roots.set_aside(root)
    roots.empty_trash()
    assert not list((tmp_path / "data/trash").iterdir())
    assert (outside / "kept").read_text() == "kept"
    # What only root could remove stays, for root to see to.
    root = roots.managed(new_id("ws"))
    lay_in(root, {"y": b"2"}, ACCOUNT, make=True)
    Path(root, "of-root").mkdir()
    Path(root, "of-root/x").write_text("x")
    roots.set_aside(root)
    roots.empty_trash()
    assert [path.name for path in (tmp_path / "data/trash").rglob("*") if path.is_file()] == ["x"]


def test_what_stands_outside_the_list_is_nobodys_business(roots: WorkspaceRoots, tmp_path: Path) -> None:
    (tmp_path / "exists").mkdir()
    answers = set()
    for name in ("exists", "missing"):
        with pytest.raises(InvalidRequest) as caught:
            roots.adopted(str(tmp_path / name))
        answers.add(str(caught.value))
    assert len(answers) == 1


def test_a_root_in_a_loop_of_links_is_refused(roots: WorkspaceRoots, tmp_path: Path) -> None:
    (tmp_path / "adoptable/loop").symlink_to("loop")
    with pytest.raises(InvalidRequest):
        roots.adopted(str(tmp_path / "adoptable/loop"))


def test_a_root_set_aside_is_removed_with_the_trash(roots: WorkspaceRoots, tmp_path: Path) -> None:
    root = roots.managed(new_id("ws"))
    lay_in(root, {"deep/x": b"1"}, ACCOUNT, make=True)
    (tmp_path / "outside").mkdir()
    Path(root, "deep/link").symlink_to(tmp_path / "outside")
    roots.set_aside(root)
    roots.set_aside(root)
    assert look_at(root) is None
    assert len(list((tmp_path / "data/trash").iterdir())) == 1
    roots.empty_trash()
    assert not list((tmp_path / "data/trash").iterdir())
    assert (tmp_path / "outside").exists()


def test_the_trash_is_left_half_full_when_it_is_called_off(roots: WorkspaceRoots, tmp_path: Path) -> None:
    class Stop(Exception):
        pass

    def check() -> None:
        raise Stop

    (tmp_path / "data/trash/x/y").mkdir(parents=True)
    give(tmp_path / "data/trash/x")
    with pytest.raises(Stop):
        roots.empty_trash(check)
    roots.empty_trash()
    assert not list((tmp_path / "data/trash").iterdir())


def test_only_old_directories_that_look_like_workspaces_are_possible_orphans(
    roots: WorkspaceRoots, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    old, foreign = first_id("ws", 1), "notes"
    for name in (old, foreign):
        (tmp_path / "data/workspaces" / name).mkdir()
    assert roots.possible_orphans() == []
    monkeypatch.setattr("app.services.workspace_roots.ORPHAN_SECONDS", -1.0)
    assert roots.possible_orphans() == [old]
    assert ORPHAN_SECONDS >= 600


def test_only_stale_temporary_files_are_swept(tmp_path: Path) -> None:
    (tmp_path / "deep").mkdir()
    stale, fresh = tmp_path / "deep/.toolcrib-tmp-0123456789abcdef", tmp_path / ".toolcrib-tmp-fedcba9876543210"
    for file in (stale, fresh, tmp_path / ".toolcrib-tmp-notes"):
        file.write_text("half")
    os.utime(stale, (1, 1))
    os.utime(tmp_path / ".toolcrib-tmp-notes", (1, 1))
    standing = look_at(str(tmp_path))
    assert standing is not None
    found = standing.identity
    assert sweep(str(tmp_path), (found[0], found[1] + 1), older_than=5.0) == 0
    assert sweep(str(tmp_path), found, older_than=5.0) == 1
    assert sorted(path.name for path in tmp_path.rglob(".*")) == [
        ".toolcrib-tmp-fedcba9876543210",
        ".toolcrib-tmp-notes",
    ]
    assert sweep(str(tmp_path / "missing"), found, older_than=5.0) == 0


def test_a_full_disk_is_told_from_other_failures() -> None:
    import errno

    assert isinstance(from_os_error(OSError(errno.ENOSPC, "full")), NoSpace)
    assert isinstance(from_os_error(OSError(errno.EDQUOT, "quota")), NoSpace)
    assert not isinstance(from_os_error(OSError(errno.EACCES, "no")), NoSpace)
