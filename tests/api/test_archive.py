"""A tree as one archive, out and in, over HTTP."""

import io
import os
import stat
import tarfile
import zipfile
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx2
import pytest

from tests.api.problems import assert_problem
from tests.support.archives import (
    contents_of,
    gz_of,
    header_with,
    names_in,
    pieces,
    tar_info,
    tar_of,
    zip_info,
    zip_of,
)
from tests.support.raw_http import RawConnection
from tests.support.server import ServerThread, eventually

Make = Callable[..., dict[str, Any]]
MB = 1_000_000
FORMATS = ["tar", "tar.gz", "zip"]
TYPES = {"tar": "application/x-tar", "tar.gz": "application/gzip", "zip": "application/zip"}
MAKE = {"tar": tar_of, "tar.gz": lambda *entries: gz_of(tar_of(*entries)), "zip": zip_of}


@pytest.fixture
def root(workspace: dict[str, Any]) -> Path:
    return Path(workspace["root"])


@pytest.fixture
def archive(workspace: dict[str, Any]) -> str:
    return f"/v1/workspaces/{workspace['id']}/archive"


def put(client: httpx2.Client, url: str, form: str, data: bytes, **parameters: str) -> httpx2.Response:
    return client.put(url, content=data, params={"format": form, **parameters})


def tree(root: Path) -> list[str]:
    return sorted(str(path.relative_to(root)) + "/" * path.is_dir() for path in root.rglob("*"))


# -- out --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("form", FORMATS)
def test_a_workspace_goes_out_and_comes_in_again(
    client: httpx2.Client, archive: str, root: Path, make_workspace: Make, form: str
) -> None:
    (root / "d/empty").mkdir(parents=True)
    (root / "d/prog").write_bytes(b"#!/bin/sh\n")
    (root / "d/prog").chmod(0o755)
    (root / "größe\n").write_bytes(os.urandom(400_000))
    (root / "link").symlink_to("/etc/passwd")
    os.mkfifo(root / "pipe")
    (root / ".toolcrib-tmp-0123456789abcdef").write_bytes(b"ours")
    answer = client.get(archive, params={"format": form})
    assert answer.status_code == 200
    workspace_id = archive.split("/")[3]
    assert answer.headers["content-type"] == TYPES[form]
    assert answer.headers["content-disposition"] == f'attachment; filename="{workspace_id}.{form}"'
    assert "content-length" not in answer.headers
    assert sorted(names_in(answer.content)) == ["b.txt", "d/", "d/empty/", "d/prog", "größe\n", "task.txt"]

    other = make_workspace(files={"task.txt": "replaced"})
    unpacked = client.put(
        f"/v1/workspaces/{other['id']}/archive", content=answer.content, headers={"Content-Type": TYPES[form]}
    )
    assert unpacked.status_code == 200, unpacked.text
    assert unpacked.json() == {"created": 3, "replaced": 1, "directories": 2, "bytes": 400_000 + 13 + 4 + 10}
    there = Path(other["root"])
    assert tree(there) == ["b.txt", "d/", "d/empty/", "d/prog", "größe\n", "task.txt"]
    for name in ("b.txt", "d/prog", "größe\n", "task.txt"):
        assert (there / name).read_bytes() == (root / name).read_bytes()
    assert stat.S_IMODE((there / "d/prog").stat().st_mode) & 0o100


def test_the_default_is_a_gzipped_tar_and_a_part_can_be_asked_for(
    client: httpx2.Client, archive: str, root: Path
) -> None:
    (root / "src/build").mkdir(parents=True)
    for name in ("src/a.py", "src/a.log", "src/build/x", "other"):
        (root / name).write_bytes(name.encode())
    answer = client.get(archive, params={"path": "src", "exclude": ["*.log", "/build"]})
    assert answer.content[:2] == b"\x1f\x8b"
    assert contents_of(answer.content) == {"a.py": b"src/a.py"}
    assert names_in(client.get(archive, params={"path": "src/build"}).content) == ["x"]


@pytest.mark.parametrize(
    ("parameters", "problem"),
    [
        ({"format": "rar"}, "invalid_request"),
        ({"path": "task.txt"}, "conflict"),
        ({"path": "gone"}, "not_found"),
        ({"path": "../x"}, "invalid_path"),
        ({"path": "out"}, "invalid_path"),
        ({"exclude": "[z-a]"}, "invalid_request"),
        ({"exclude": ["x"] * 65}, "invalid_request"),
        ({"exclude": ""}, "invalid_request"),
    ],
)
def test_what_cannot_be_packed_is_told_before_anything_is_sent(
    client: httpx2.Client, archive: str, root: Path, parameters: dict[str, Any], problem: str
) -> None:
    (root / "out").symlink_to("/etc")
    assert_problem(client.get(archive, params=parameters), problem)


def test_an_archive_of_a_file_that_is_cut_meanwhile_ends_too_early(
    server: ServerThread, client: httpx2.Client, archive: str, root: Path
) -> None:
    (root / "z").write_bytes(bytes(40 * MB))
    with RawConnection(server.url, receive_buffer=65_536) as connection:
        connection.send_head("GET", f"{archive}?format=tar")
        assert connection.head()[0] == 200
        eventually(lambda: any(path == root / "z" for path in _open_files()))
        os.truncate(root / "z", MB)
        assert not connection.rest().endswith(b"0\r\n\r\n"), "the last chunk says that it is whole"


def _open_files() -> list[Path]:
    found = []
    for fd in Path("/proc/self/fd").iterdir():
        try:
            found.append(fd.readlink())
        except OSError:
            continue
    return found


# -- in ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("form", FORMATS)
def test_an_archive_is_unpacked_below_a_directory_that_is_made(
    client: httpx2.Client, archive: str, root: Path, form: str
) -> None:
    data = MAKE[form](("./", b""), ("a", b"1"), ("d/b", b"22"), ("empty/", b""))
    answer = put(client, archive, form, data, path="new/place")
    assert answer.json() == {"created": 2, "replaced": 0, "directories": 1, "bytes": 3}
    assert tree(root / "new") == ["place/", "place/a", "place/d/", "place/d/b", "place/empty/"]


def test_what_is_replaced_keeps_its_bits_and_its_other_link_the_old_content(
    client: httpx2.Client, archive: str, root: Path
) -> None:
    (root / "task.txt").chmod(0o640)
    (root / "witness").hardlink_to(root / "task.txt")
    (root / "inside").symlink_to("b.txt")
    data = tar_of(
        (tar_info("task.txt", mode=0o777), b"new"), ("inside", b"through"), (tar_info("prog", mode=0o4711), b"")
    )
    assert put(client, archive, "tar", data).json() == {"created": 1, "replaced": 2, "directories": 0, "bytes": 10}
    assert stat.S_IMODE((root / "task.txt").stat().st_mode) == 0o640
    assert (root / "witness").read_bytes() == b"status: draft"
    assert (root / "inside").is_symlink()
    assert (root / "b.txt").read_bytes() == b"through"
    prog = (root / "prog").stat()
    assert stat.S_IMODE(prog.st_mode) & 0o7700 == 0o700
    assert prog.st_mtime == 1_700_000_000


@pytest.mark.parametrize(
    ("form", "data", "code", "pointer"),
    [
        (
            "tar",
            tar_of(("ok", b"x"), (tar_info("l", type=tarfile.SYMTYPE, linkname="/etc/passwd"), b"")),
            "link",
            "#/l",
        ),
        ("tar", tar_of(("ok", b"x"), (tar_info("l", type=tarfile.LNKTYPE, linkname="ok"), b"")), "link", "#/l"),
        ("tar", tar_of(("ok", b"x"), (tar_info("p", type=tarfile.FIFOTYPE), b"")), "special_file", "#/p"),
        ("tar", tar_of(("ok", b"x"), ("../evil", b"x")), "parent_name", "#/..~1evil"),
        ("tar", tar_of(("ok", b"x"), ("/etc/evil", b"x")), "absolute_name", "#/~1etc~1evil"),
        ("tar", tar_of(("ok", b"x"), ("ok", b"y")), "duplicate_name", "#/ok"),
        ("tar", tar_of(("ok", b"x"), ("ok/below", b"y")), "duplicate_name", "#/ok~1below"),
        ("tar", tar_of(("ok", b"x"))[:1024], "malformed_archive", "#"),
        ("tar", b"no archive", "malformed_archive", "#"),
        ("tar.gz", gz_of(tar_of(("ok", b"x"), ("a/../../evil", b""))), "parent_name", "#/a~1..~1..~1evil"),
        ("tar.gz", tar_of(("ok", b"x")), "malformed_archive", "#"),
        ("tar.gz", gz_of(tar_of(("ok", b"x")))[:-20], "malformed_archive", "#"),
        ("zip", zip_of(("ok", b"x"), (zip_info("l", 0o120777), b"/etc/passwd")), "link", "#/l"),
        ("zip", zip_of(("ok", b"x"), ("../evil", b"x")), "parent_name", "#/..~1evil"),
        ("zip", zip_of(("ok", b"x"), ("/evil", b"x")), "absolute_name", "#/~1evil"),
        ("zip", zip_of(("ok", b"x"), ("ok", b"x")), "duplicate_name", "#/ok"),
        ("zip", zip_of(("ok", b"x"), ("big", b"x" * 999), method=zipfile.ZIP_LZMA), "unsupported", "#/ok"),
        ("zip", b"PK", "malformed_archive", "#"),
        ("zip", b"", "malformed_archive", "#"),
    ],
)
def test_one_entry_that_is_not_taken_and_nothing_is_unpacked(
    client: httpx2.Client, archive: str, root: Path, form: str, data: bytes, code: str, pointer: str
) -> None:
    document = assert_problem(put(client, archive, form, data), "invalid_request")
    assert [(error["pointer"], error["code"]) for error in document["errors"]] == [(pointer, code)]
    assert tree(root) == ["b.txt", "task.txt"]


def test_huge_sizes_and_bombs_are_413_and_nothing_is_unpacked(tmp_path_factory: pytest.TempPathFactory) -> None:
    plain = tar_of(("a", b"x"), form=tarfile.GNU_FORMAT)
    huge = header_with(plain, 124, b"77777777777\0")
    larger = header_with(plain, 124, b"\x80" + b"\xff" * 11)
    packer = zlib.compressobj(9, wbits=31)
    head = header_with(plain, 124, b"%011o\0" % (60 * MB))[:512]
    bomb = packer.compress(head) + b"".join(packer.compress(bytes(MB)) for _ in range(60)) + packer.flush()
    zip_bomb = zip_of(*((f"f{index}", bytes(MB)) for index in range(60)))
    with (
        ServerThread(tmp_path_factory.mktemp("small") / "data", max_upload_bytes=50 * MB) as small,
        small.client() as client,
    ):
        made = client.post("/v1/workspaces", json={}).json()
        url = f"/v1/workspaces/{made['id']}/archive"
        for form, data in (("tar", huge), ("tar", larger), ("tar.gz", bomb), ("zip", zip_bomb)):
            assert len(data) < MB
            document = assert_problem(put(client, url, form, data), "payload_too_large")
            assert document["errors"][0]["code"] == "too_many_bytes"
            assert "applied" not in document
        assert list(Path(made["root"]).iterdir()) == []


def test_a_zip_that_lies_about_a_size_is_unpacked_up_to_there_and_says_so(
    client: httpx2.Client, archive: str, root: Path
) -> None:
    data = bytearray(zip_of(("first", b"1"), ("second", bytes(5 * MB)), ("third", b"3")))
    at = data.index(b"PK\x01\x02", data.index(b"PK\x01\x02") + 1)
    data[at + 24 : at + 28] = (100).to_bytes(4, "little")
    document = assert_problem(put(client, archive, "zip", bytes(data)), "invalid_request", applied=["first"])
    assert document["errors"][0] == {
        "pointer": "#/second",
        "code": "malformed_archive",
        "message": "an entry is longer than the index says",
    }
    assert tree(root) == ["b.txt", "first", "task.txt"]


@pytest.mark.parametrize("form", FORMATS)
def test_an_entry_that_cannot_be_stored_ends_it_and_what_was_applied_is_listed(
    client: httpx2.Client, archive: str, root: Path, form: str
) -> None:
    (root / "out").symlink_to("/etc")
    (root / "d").mkdir()
    for name, code in (("out/evil", "path_outside_workspace"), ("d", "is_a_directory"), ("b.txt/x", "not_a_directory")):
        data = MAKE[form](("new/", b""), ("new/a", b"1"), (name, b"x"), ("after", b"x"))
        document = assert_problem(put(client, archive, form, data), "conflict", applied=["new/", "new/a"])
        pointer = "#/" + name.replace("/", "~1")
        assert [(error["pointer"], error["code"]) for error in document["errors"]] == [(pointer, code)]
        assert not Path("/etc/evil").exists()
        assert tree(root) == ["b.txt", "d/", "new/", "new/a", "out/", "task.txt"]


def test_names_that_are_no_utf_8_come_in_and_go_out(client: httpx2.Client, archive: str, root: Path) -> None:
    name = os.fsdecode(b"caf\xe9/\xff")
    assert put(client, archive, "tar", tar_of((name, b"x"))).status_code == 200
    assert [os.fsencode(path.name) for path in (root / os.fsdecode(b"caf\xe9")).iterdir()] == [b"\xff"]
    assert contents_of(client.get(archive, params={"format": "tar"}).content)[name] == b"x"


@pytest.mark.parametrize(
    ("parameters", "headers", "problem"),
    [
        ({}, {}, "unsupported_media_type"),
        ({}, {"Content-Type": "application/octet-stream"}, "unsupported_media_type"),
        ({"format": "tar"}, {"Content-Encoding": "gzip"}, "unsupported_media_type"),
        ({"format": "rar"}, {}, "invalid_request"),
        ({"format": "tar", "path": ".."}, {}, "invalid_path"),
        ({"format": "tar", "path": "task.txt"}, {}, "conflict"),
        ({"format": "tar", "path": "task.txt/x"}, {}, "conflict"),
        ({"format": "tar", "path": "n" * 256}, {}, "invalid_path"),
    ],
)
def test_where_nothing_can_be_unpacked_says_so(
    client: httpx2.Client,
    archive: str,
    root: Path,
    parameters: dict[str, str],
    headers: dict[str, str],
    problem: str,
) -> None:
    answer = client.put(archive, content=tar_of(("a", b"x")), params=parameters, headers=headers)
    assert_problem(answer, problem)
    assert tree(root) == ["b.txt", "task.txt"]


@pytest.mark.parametrize(
    ("kind", "form"), [(kind, form) for form, kind in TYPES.items()] + [("Application/Zip; charset=binary", "zip")]
)
def test_the_format_is_what_the_content_type_says(client: httpx2.Client, archive: str, kind: str, form: str) -> None:
    answer = client.put(archive, content=MAKE[form](("a", b"x")), headers={"Content-Type": kind})
    assert answer.json()["created"] == 1


def test_an_upload_that_is_cut_leaves_nothing(server: ServerThread, archive: str, root: Path) -> None:
    data = tar_of(*((f"f{index}", bytes(300_000)) for index in range(10)))
    with RawConnection(server.url) as connection:
        connection.send_head("PUT", f"{archive}?format=tar", Content_Length=str(len(data)))
        connection.send(data[: 2 * MB])
        eventually(lambda: list(root.glob(".toolcrib-tmp-*")))
    eventually(lambda: not list(root.glob(".toolcrib-tmp-*")))
    assert tree(root) == ["b.txt", "task.txt"]


def test_unpacking_stops_when_its_client_has_gone(server: ServerThread, archive: str, root: Path) -> None:
    data = tar_of(*((f"f{index:04}", b"x") for index in range(3_000)))
    with RawConnection(server.url) as connection:
        connection.send_head("PUT", f"{archive}?format=tar", Content_Length=str(len(data)))
        connection.send(data)
        eventually((root / "f0000").exists)
    eventually(lambda: not list(root.glob(".toolcrib-tmp-*")))
    assert not (root / "f2999").exists()


def test_a_sent_body_may_come_in_any_pieces(client: httpx2.Client, archive: str, root: Path) -> None:
    data = gz_of(tar_of(("a", os.urandom(100_000))))
    assert client.put(archive, content=iter(pieces(data, 999)), params={"format": "tar.gz"}).status_code == 200
    assert (root / "a").stat().st_size == 100_000


def test_an_archive_of_more_entries_than_are_taken_is_413(
    client: httpx2.Client, archive: str, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("app.sandbox.archive_reader.ENTRIES_MAX", 5)
    data = tar_of(*((f"f{index}", b"") for index in range(6)))
    assert_problem(put(client, archive, "tar", data), "payload_too_large")
    assert tree(root) == ["b.txt", "task.txt"]


def test_a_tree_with_too_many_names_for_a_zip_is_413(
    client: httpx2.Client, archive: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("app.services.archives.ZIP_INDEX_MAX_BYTES", 100)
    assert_problem(client.get(archive, params={"format": "zip"}), "payload_too_large")
    assert io.BytesIO(client.get(archive, params={"format": "tar"}).content).read(5) == b"b.txt"
