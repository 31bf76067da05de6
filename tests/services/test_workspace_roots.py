import os
import stat
from pathlib import Path

import pytest

from app.domain.ids import first_id, new_id
from app.errors import Conflict, InvalidRequest, NoSpace
from app.services.workspace_roots import (
    ORPHAN_SECONDS,
    WorkspaceRoots,
    from_os_error,
    identity,
    lay_in,
    sweep,
    take_out,
)


@pytest.fixture
def roots(tmp_path: Path) -> WorkspaceRoots:
    (tmp_path / "adoptable").mkdir()
    made = WorkspaceRoots(tmp_path / "data", (tmp_path / "adoptable",))
    made.make_directories()
    return made


def test_the_directories_are_for_the_service_alone(roots: WorkspaceRoots, tmp_path: Path) -> None:
    for name in ("workspaces", "trash"):
        assert stat.S_IMODE((tmp_path / "data" / name).stat().st_mode) == 0o700
    roots.make_directories()


def test_a_managed_root_is_made_filled_and_taken_out_again(roots: WorkspaceRoots) -> None:
    root = roots.managed(new_id("ws"))
    laid = lay_in(root, {"a/b.txt": b"x", "c": b""}, make=True)
    assert laid.identity == identity(root)
    assert (laid.files, laid.directories) == (("a/b.txt", "c"), ["a"])
    assert Path(root, "a/b.txt").read_bytes() == b"x"
    take_out(root, laid, made=True)
    assert identity(root) is None


def test_what_was_laid_into_an_adopted_root_is_taken_out_and_nothing_else(tmp_path: Path) -> None:
    (tmp_path / "there").mkdir()
    (tmp_path / "there/mine").write_text("mine")
    laid = lay_in(str(tmp_path), {"there/new/x": b"1", "other/y": b"2"}, make=False)
    take_out(str(tmp_path), laid, made=False)
    assert sorted(str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*")) == ["there", "there/mine"]


def test_a_file_that_cannot_be_written_takes_the_others_with_it(tmp_path: Path) -> None:
    (tmp_path / "taken").write_text("mine")
    with pytest.raises(Conflict):
        lay_in(str(tmp_path), {"new/x": b"1", "taken": b"2"}, make=False)
    with pytest.raises(InvalidRequest):
        lay_in(str(tmp_path), {"new/x": b"1", "taken/below": b"2"}, make=False)
    assert [path.name for path in tmp_path.iterdir()] == ["taken"]
    assert (tmp_path / "taken").read_text() == "mine"


def test_files_are_not_laid_through_a_link_that_leads_out(tmp_path: Path) -> None:
    (tmp_path / "outside").mkdir()
    (tmp_path / "root").mkdir()
    (tmp_path / "root/link").symlink_to(tmp_path / "outside")
    with pytest.raises(InvalidRequest) as caught:
        lay_in(str(tmp_path / "root"), {"link/x": b"1"}, make=False)
    assert caught.value.extra["errors"][0]["code"] == "path_outside_workspace"
    assert not list((tmp_path / "outside").iterdir())


def test_only_a_directory_on_the_list_is_adopted(roots: WorkspaceRoots, tmp_path: Path) -> None:
    (tmp_path / "adoptable/project").mkdir()
    assert roots.adopted(str(tmp_path / "adoptable/project")) == str(tmp_path / "adoptable/project")
    assert roots.adopted(str(tmp_path / "adoptable/project/../project/")) == str(tmp_path / "adoptable/project")
    assert roots.adopted(str(tmp_path / "adoptable")) == str(tmp_path / "adoptable")
    for outside in (tmp_path, tmp_path / "adoptable/..", tmp_path / "adoptable-evil", Path("/")):
        with pytest.raises(InvalidRequest) as caught:
            roots.adopted(str(outside))
        assert caught.value.extra["errors"][0]["code"] == "not_allowed"


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
    lay_in(root, {"deep/x": b"1"}, make=True)
    (tmp_path / "outside").mkdir()
    Path(root, "deep/link").symlink_to(tmp_path / "outside")
    roots.set_aside(root)
    roots.set_aside(root)
    assert identity(root) is None
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
    found = identity(str(tmp_path))
    assert found is not None
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
