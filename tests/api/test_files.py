"""Files in and out over HTTP, the real server and real directories."""

import base64
import hashlib
import os
import socket
import stat
import subprocess
import sys
import textwrap
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx2
import pytest

from tests.api.problems import assert_problem
from tests.support.raw_http import RawConnection
from tests.support.server import KEY, ServerProcess, ServerThread, eventually
from tests.support.users import as_account

Make = Callable[..., dict[str, Any]]
DRAFT = b"status: draft"
MB = 1_000_000


@pytest.fixture
def root(workspace: dict[str, Any]) -> Path:
    """The directory of the test's workspace, which holds `task.txt` and `b.txt`."""
    return Path(workspace["root"])


@pytest.fixture
def files(workspace: dict[str, Any]) -> str:
    """The path files of the test's workspace are below."""
    return f"/v1/workspaces/{workspace['id']}/files"


@pytest.fixture(scope="module")
def small_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerThread]:
    """A server that takes 100,000 bytes in one request."""
    with ServerThread(tmp_path_factory.mktemp("small") / "data", max_upload_bytes=100_000) as running:
        yield running


def etag_of(content: bytes) -> str:
    return f'"{hashlib.sha256(content).hexdigest()[:32]}"'


def temporaries(root: Path) -> list[str]:
    return [path.name for path in root.rglob(".toolcrib-tmp-*")]


def tool(client: httpx2.Client, workspace: dict[str, Any], name: str, **arguments: Any) -> dict[str, Any]:
    answer = client.post(f"/v1/workspaces/{workspace['id']}/tools/{name}", json=arguments)
    assert answer.status_code == 200, answer.text
    result: dict[str, Any] = answer.json()["result"]
    return result


# -- one file in and out ----------------------------------------------------------------------------------------------


def test_a_file_comes_back_as_it_was_sent(client: httpx2.Client, files: str, root: Path) -> None:
    content = bytes(range(256)) * 2_000
    stored = client.put(f"{files}/deep/er/raw.bin", content=content)
    assert stored.status_code == 201
    assert stored.headers["etag"] == etag_of(content)
    assert stored.json() == {"path": "deep/er/raw.bin", "bytes": 512_000, "etag": etag_of(content), "created": True}
    assert (root / "deep/er/raw.bin").read_bytes() == content
    got = client.get(f"{files}/deep/er/raw.bin")
    assert got.status_code == 200
    assert got.content == content
    expected = {
        "etag": etag_of(content),
        "content-length": "512000",
        "content-type": "application/octet-stream",
        "content-disposition": 'attachment; filename="raw.bin"',
        "content-security-policy": "sandbox",
        "x-content-type-options": "nosniff",
        "accept-ranges": "bytes",
        "cache-control": "private, no-cache",
    }
    assert {name: got.headers.get(name) for name in expected} == expected
    head = client.head(f"{files}/deep/er/raw.bin")
    assert (head.status_code, head.content) == (200, b"")
    assert {name: head.headers.get(name) for name in expected} == expected


@pytest.mark.parametrize("size", [0, 1, 262_143, 262_144, 262_145, 1_048_576, 3_500_000])
def test_every_size_around_the_steps_comes_back(client: httpx2.Client, files: str, size: int) -> None:
    content = os.urandom(size)
    assert client.put(f"{files}/x", content=content).json()["bytes"] == size
    got = client.get(f"{files}/x")
    assert got.content == content
    assert got.headers["etag"] == etag_of(content)


def test_a_body_that_does_not_say_how_long_it_is_is_taken(client: httpx2.Client, files: str, root: Path) -> None:
    parts = [b"one ", b"", b"two ", b"three" * 300_000]
    assert client.put(f"{files}/x", content=iter(parts)).status_code == 201
    assert (root / "x").read_bytes() == b"".join(parts)


def test_a_replaced_file_keeps_its_bits_and_its_other_link_the_old_content(
    client: httpx2.Client, files: str, root: Path
) -> None:
    (root / "task.txt").chmod(0o750)
    (root / "witness").hardlink_to(root / "task.txt")
    stored = client.put(f"{files}/task.txt", content=b"new")
    assert stored.status_code == 200
    assert stored.json() == {"path": "task.txt", "bytes": 3, "etag": etag_of(b"new"), "created": False}
    assert stat.S_IMODE((root / "task.txt").stat().st_mode) == 0o750
    assert (root / "witness").read_bytes() == DRAFT


def test_the_etag_is_the_one_the_tools_know(
    client: httpx2.Client, workspace: dict[str, Any], files: str, root: Path
) -> None:
    etag = client.get(f"{files}/task.txt").headers["etag"]
    edited = tool(
        client, workspace, "edit", path="task.txt", edits=[{"oldText": "draft", "newText": "done"}], expectedEtag=etag
    )
    assert client.head(f"{files}/task.txt").headers["etag"] == edited["details"]["etag"]
    assert_problem(
        client.put(f"{files}/task.txt", content=b"x", headers={"If-Match": etag}),
        "precondition_failed",
        currentEtag=edited["details"]["etag"],
    )
    assert (root / "task.txt").read_bytes() == b"status: done"


def test_a_large_file_has_an_etag_that_a_new_content_changes(client: httpx2.Client, files: str) -> None:
    first = client.put(f"{files}/large", content=bytes(17 * 1024 * 1024)).headers["etag"]
    assert client.head(f"{files}/large").headers["etag"] == first
    second = client.put(f"{files}/large", content=bytes(17 * 1024 * 1024)).headers["etag"]
    assert first != second
    assert client.get(f"{files}/large", headers={"If-None-Match": second}).status_code == 304


# -- conditions -------------------------------------------------------------------------------------------------------

CURRENT = etag_of(DRAFT)
OTHER = '"00000000000000000000000000000000"'


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"If-Match": CURRENT}, 200),
        ({"If-Match": CURRENT.strip('"')}, 200),
        ({"If-Match": f"{OTHER}, {CURRENT}"}, 200),
        ({"If-Match": "*"}, 200),
        ({"If-Match": OTHER}, 412),
        ({"If-Match": f"W/{CURRENT}"}, 412),
        ({"If-None-Match": CURRENT}, 304),
        ({"If-None-Match": f"W/{CURRENT}"}, 304),
        ({"If-None-Match": f'{OTHER} , "a,b",{CURRENT}'}, 304),
        ({"If-None-Match": "*"}, 304),
        ({"If-None-Match": OTHER}, 200),
        ({"If-Match": OTHER, "If-None-Match": CURRENT}, 412),
        ({"If-Match": CURRENT, "If-None-Match": CURRENT}, 304),
        ({"If-None-Match": ""}, 400),
        ({"If-Match": '"unclosed'}, 400),
        ({"If-Match": f"* , {CURRENT}"}, 200),
    ],
)
@pytest.mark.parametrize("method", ["GET", "HEAD"])
def test_what_a_reader_gets_under_a_condition(
    client: httpx2.Client, files: str, headers: dict[str, str], status: int, method: str
) -> None:
    answer = client.request(method, f"{files}/task.txt", headers=headers)
    assert answer.status_code == status
    if status in {200, 304}:
        assert answer.headers["etag"] == CURRENT
    if status == 304:
        assert answer.content == b""
    if status == 412 and method == "GET":
        assert_problem(answer, "precondition_failed", currentEtag=CURRENT)


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"If-Match": CURRENT}, 200),
        ({"If-Match": f"{OTHER}, {CURRENT}"}, 200),
        ({"If-Match": "*"}, 200),
        ({"If-Match": OTHER}, 412),
        ({"If-Match": f"W/{CURRENT}"}, 412),
        ({"If-Match": ""}, 400),
        ({"If-None-Match": "*"}, 412),
        ({"If-None-Match": CURRENT}, 412),
        ({"If-None-Match": OTHER}, 200),
        ({"If-Match": CURRENT, "If-None-Match": "*"}, 412),
    ],
)
@pytest.mark.parametrize("method", ["PUT", "DELETE"])
def test_a_change_is_made_only_under_its_condition(
    client: httpx2.Client, files: str, root: Path, headers: dict[str, str], status: int, method: str
) -> None:
    answer = client.request(method, f"{files}/task.txt", headers=headers, content=b"new" if method == "PUT" else None)
    if status == 200:
        assert answer.status_code == (200 if method == "PUT" else 204)
        assert not (root / "task.txt").exists() or (root / "task.txt").read_bytes() == b"new"
        return
    assert (root / "task.txt").read_bytes() == DRAFT
    assert temporaries(root) == []
    assert answer.status_code == status
    if status == 412:
        assert_problem(answer, "precondition_failed", currentEtag=CURRENT)


@pytest.mark.parametrize("path", ["new.txt", "no/such/new.txt"])
def test_conditions_on_a_file_that_is_not_there(client: httpx2.Client, files: str, root: Path, path: str) -> None:
    for condition in ("*", CURRENT):
        answer = client.put(f"{files}/{path}", content=b"x", headers={"If-Match": condition})
        assert_problem(answer, "precondition_failed", currentEtag=None)
    assert sorted(entry.name for entry in root.iterdir()) == ["b.txt", "task.txt"]
    assert_problem(client.delete(f"{files}/{path}", headers={"If-Match": "*"}), "not_found")
    assert client.put(f"{files}/{path}", content=b"x", headers={"If-None-Match": "*"}).status_code == 201


def test_a_condition_that_does_not_hold_is_told_before_the_body_is_sent(server: ServerThread, files: str) -> None:
    with RawConnection(server.url) as connection:
        connection.send_head(
            "PUT", f"{files}/task.txt", If_None_Match="*", Content_Length="2000000000", Expect="100-continue"
        )
        assert connection.answer().status == 412


# -- ranges -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("value", "status", "expected"),
    [
        ("bytes=0-0", 206, (0, 1)),
        ("bytes=0-", 206, (0, 13)),
        ("bytes=3-6", 206, (3, 7)),
        ("Bytes = 3 - 6", 206, (3, 7)),
        ("bytes=3-600", 206, (3, 13)),
        ("bytes=-4", 206, (9, 13)),
        ("bytes=-400", 206, (0, 13)),
        ("bytes=12-", 206, (12, 13)),
        ("bytes=13-", 416, None),
        ("bytes=500-600", 416, None),
        ("bytes=-0", 416, None),
        ("bytes=6-3", 200, None),
        ("bytes=0-1,4-5", 200, None),
        ("lines=1-2", 200, None),
        ("bytes=-", 200, None),
        ("bytes=a-b", 200, None),
        ("3-6", 200, None),
    ],
)
def test_a_range_is_a_part_of_the_file(
    client: httpx2.Client, files: str, value: str, status: int, expected: tuple[int, int] | None
) -> None:
    answer = client.get(f"{files}/task.txt", headers={"Range": value})
    assert answer.status_code == status
    if expected is not None:
        start, end = expected
        assert answer.content == DRAFT[start:end]
        assert answer.headers["content-range"] == f"bytes {start}-{end - 1}/13"
        assert answer.headers["etag"] == CURRENT
    elif status == 416:
        assert_problem(answer, "range_not_satisfiable")
        assert answer.headers["content-range"] == "bytes */13"
    else:
        assert answer.content == DRAFT
        assert "content-range" not in answer.headers
    assert client.head(f"{files}/task.txt", headers={"Range": value}).status_code == 200


def test_a_range_of_a_large_file_and_of_an_empty_one(client: httpx2.Client, files: str) -> None:
    content = os.urandom(3 * MB)
    client.put(f"{files}/large", content=content)
    answer = client.get(f"{files}/large", headers={"Range": "bytes=999999-2999990"})
    assert (answer.status_code, answer.content) == (206, content[999_999:2_999_991])
    client.put(f"{files}/empty", content=b"")
    assert client.get(f"{files}/empty").content == b""
    assert_problem(client.get(f"{files}/empty", headers={"Range": "bytes=0-"}), "range_not_satisfiable")


@pytest.mark.parametrize(("value", "status"), [(CURRENT, 206), (OTHER, 200), (f"W/{CURRENT}", 200), ("yesterday", 200)])
def test_a_range_goes_by_its_condition(client: httpx2.Client, files: str, value: str, status: int) -> None:
    answer = client.get(f"{files}/task.txt", headers={"Range": "bytes=0-2", "If-Range": value})
    assert (answer.status_code, answer.content) == (status, DRAFT[:3] if status == 206 else DRAFT)


# -- paths ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name", ["with space", "größe ✓", "a\nb", "a\n", "\r", "100%", "%41", "?#&=;", "quote\"'\\", "…" * 85]
)
def test_any_name_can_be_stored(client: httpx2.Client, files: str, root: Path, name: str) -> None:
    url = f"{files}/sub/" + "".join(f"%{byte:02X}" for byte in name.encode())
    assert client.put(url, content=b"x").json()["path"] == f"sub/{name}"
    assert [entry.name for entry in (root / "sub").iterdir()] == [name]
    assert client.get(url).content == b"x"
    assert client.delete(url).status_code == 204


@pytest.mark.parametrize(
    ("path", "code"),
    [
        ("", "invalid_arguments"),
        ("%00", "invalid_arguments"),
        ("a%00b", "invalid_arguments"),
        ("%FF", "invalid_arguments"),
        ("a/%C3", "invalid_arguments"),
        ("%ED%A0%80", "invalid_arguments"),
        (".toolcrib-tmp-0123456789abcdef", "invalid_arguments"),
        ("n" * 256, "name_too_long"),
        ("/".join(["n" * 200] * 21), "name_too_long"),
        ("..", "path_outside_workspace"),
        ("../x", "path_outside_workspace"),
        ("%2e%2e/x", "path_outside_workspace"),
        ("..%2Fx", "path_outside_workspace"),
        ("a/../../x", "path_outside_workspace"),
        ("/etc/passwd", "path_outside_workspace"),
        ("%2Fetc%2Fpasswd", "path_outside_workspace"),
        ("out/passwd", "path_outside_workspace"),
        ("outfile", "path_outside_workspace"),
        ("out-dangling", "path_outside_workspace"),
    ],
)
@pytest.mark.parametrize("method", ["GET", "HEAD", "PUT", "DELETE"])
def test_a_path_that_cannot_be_one_of_the_workspace_is_400(
    server: ServerThread, files: str, root: Path, path: str, code: str, method: str
) -> None:
    (root / "out").symlink_to("/etc")
    (root / "outfile").symlink_to("/etc/passwd")
    (root / "out-dangling").symlink_to(root.parent / "not-there")
    if method == "DELETE" and path in {"outfile", "out-dangling"}:
        pytest.skip("of a link the link is removed, wherever it leads")
    with RawConnection(server.url) as connection:
        connection.send_head(method, f"{files}/{path}", Content_Length="1" if method == "PUT" else "0")
        if method == "PUT":
            connection.send(b"x")
        if method == "HEAD":
            assert connection.head()[0] == 400
            return
        answer = connection.answer()
    problem = httpx2.Response(400, content=answer.body).json()
    assert (answer.status, problem["code"]) == (400, "invalid_path")
    assert [(error["parameter"], error["code"]) for error in problem["errors"]] == [("path", code)]
    assert not (root.parent / "not-there").exists()
    assert sorted(entry.name for entry in root.iterdir()) == ["b.txt", "out", "out-dangling", "outfile", "task.txt"]


def test_dots_and_other_spellings_stay_inside(server: ServerThread, files: str, root: Path) -> None:
    (root / "sub").mkdir()
    for path in ("sub/../task.txt", "./task.txt", "sub//..//task.txt", f"/{root}/task.txt"):
        with RawConnection(server.url) as connection:
            connection.send_head("GET", f"{files}/{path}")
            assert connection.answer().body == DRAFT, path


@pytest.mark.parametrize(
    ("method", "path", "problem", "code"),
    [
        ("GET", "missing", "not_found", "not_found"),
        ("GET", "missing/file", "not_found", "not_found"),
        ("GET", "task.txt/below", "not_found", "not_a_directory"),
        ("GET", "sub", "conflict", "is_a_directory"),
        ("GET", "sub/", "conflict", "is_a_directory"),
        ("GET", ".", "conflict", "is_a_directory"),
        ("GET", "pipe", "conflict", "not_a_regular_file"),
        ("GET", "socket", "conflict", "not_a_regular_file"),
        ("GET", "dangling", "not_found", "not_found"),
        ("PUT", "sub", "conflict", "is_a_directory"),
        ("PUT", "sub/", "conflict", "is_a_directory"),
        ("PUT", "new/", "conflict", "is_a_directory"),
        ("PUT", ".", "conflict", "is_a_directory"),
        ("PUT", "task.txt/below", "conflict", "not_a_directory"),
        ("PUT", "pipe", "conflict", "not_a_regular_file"),
        ("PUT", "socket", "conflict", "not_a_regular_file"),
        ("DELETE", "missing", "not_found", "not_found"),
        ("DELETE", "missing/file", "not_found", "not_found"),
        ("DELETE", "sub", "conflict", "is_a_directory"),
        ("DELETE", ".", "invalid_path", "invalid_arguments"),
        ("DELETE", "sub/..", "invalid_path", "invalid_arguments"),
    ],
)
def test_what_is_in_the_way_is_named(
    server: ServerThread, files: str, root: Path, method: str, path: str, problem: str, code: str
) -> None:
    (root / "sub").mkdir()
    os.mkfifo(root / "pipe")
    (root / "dangling").symlink_to("gone")
    with socket.socket(socket.AF_UNIX) as listener:
        here = os.open(root, os.O_RDONLY)
        listener.bind(f"/proc/self/fd/{here}/socket")
        os.close(here)
    before = sorted(entry.name for entry in root.iterdir())
    with RawConnection(server.url) as connection:
        connection.send_head(method, f"{files}/{path}", Content_Length="1" if method == "PUT" else "0")
        if method == "PUT":
            connection.send(b"x")
        answer = connection.answer()
    document = httpx2.Response(answer.status, content=answer.body).json()
    assert (document["code"], document["errors"][0]["code"]) == (problem, code)
    assert sorted(entry.name for entry in root.iterdir()) == before


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can make a device")
def test_a_device_is_refused_at_once(client: httpx2.Client, files: str, root: Path) -> None:
    os.mknod(root / "null", stat.S_IFCHR | 0o666, os.makedev(1, 3))
    for answer in (client.get(f"{files}/null"), client.put(f"{files}/null", content=b"x")):
        assert assert_problem(answer, "conflict")["errors"][0]["code"] == "not_a_regular_file"
    assert client.delete(f"{files}/null").status_code == 204


def test_a_link_inside_is_read_and_written_through_and_removed_itself(
    client: httpx2.Client, files: str, root: Path
) -> None:
    with as_account():
        (root / "d").mkdir()
    (root / "link").symlink_to("task.txt")
    (root / "absolute").symlink_to(root / "task.txt")
    (root / "dir").symlink_to("d")
    (root / "new-link").symlink_to("d/made")
    assert client.get(f"{files}/absolute").content == DRAFT
    assert client.put(f"{files}/link", content=b"through").json()["path"] == "task.txt"
    assert client.put(f"{files}/dir/x", content=b"x").json()["path"] == "d/x"
    assert client.put(f"{files}/new-link", content=b"made").json() == {
        "path": "d/made",
        "bytes": 4,
        "etag": etag_of(b"made"),
        "created": True,
    }
    assert (root / "link").is_symlink()
    assert (root / "task.txt").read_bytes() == b"through"
    for name in ("link", "absolute", "new-link", "dir"):
        assert client.delete(f"{files}/{name}", params={"recursive": "true"}).status_code == 204
    assert sorted(str(path.relative_to(root)) for path in root.rglob("*")) == [
        "b.txt",
        "d",
        "d/made",
        "d/x",
        "task.txt",
    ]


def test_a_directory_goes_with_all_that_is_in_it_when_asked(client: httpx2.Client, files: str, root: Path) -> None:
    with as_account():
        (root / "outside").symlink_to("/etc")
        (root / "d/e").mkdir(parents=True)
        (root / "d/e/f").write_bytes(b"x")
        (root / "d/link").symlink_to("/etc")
        os.mkfifo(root / "d/pipe")
    assert "recursive=true" in assert_problem(client.delete(f"{files}/d"), "conflict")["detail"]
    assert client.delete(f"{files}/d/", params={"recursive": "true"}).status_code == 204
    assert not (root / "d").exists()
    assert client.delete(f"{files}/outside").status_code == 204
    assert Path("/etc/passwd").exists()


# -- who may, and where -----------------------------------------------------------------------------------------------


def test_the_files_of_a_workspace_that_is_gone_moved_or_missing(
    client: httpx2.Client, make_workspace: Make, tmp_path: Path
) -> None:
    def asks(workspace: dict[str, Any]) -> list[httpx2.Response]:
        base = f"/v1/workspaces/{workspace['id']}"
        return [
            client.get(f"{base}/files/a"),
            client.put(f"{base}/files/b", content=b"x"),
            client.delete(f"{base}/files/a"),
            client.post(f"{base}/files", files={"file": ("c", b"x")}),
            client.get(f"{base}/tree"),
            client.get(f"{base}/archive"),
        ]

    gone, moved, missing = (make_workspace(files={"a": "x"}) for _ in range(3))
    client.delete(f"/v1/workspaces/{gone['id']}")
    for answer in asks(gone):
        assert_problem(answer, "workspace_gone")
    Path(moved["root"]).rename(tmp_path / "moved")
    Path(moved["root"]).mkdir()
    for answer in asks(moved):
        assert_problem(answer, "workspace_moved")
    assert list(Path(moved["root"]).iterdir()) == []
    Path(missing["root"]).rename(tmp_path / "missing")
    for answer in asks(missing):
        assert "nothing makes it again" in assert_problem(answer, "not_found")["detail"]
    assert not Path(missing["root"]).exists()
    for answer in asks({"id": "ws_00000000000000000000000000"}):
        assert_problem(answer, "not_found")


def test_without_a_key_nothing_is_told_and_nothing_stored(server: ServerThread, files: str, root: Path) -> None:
    with server.client(key=None) as stranger:
        for answer in (
            stranger.get(f"{files}/task.txt"),
            stranger.get(f"{files}/%FF"),
            stranger.put(f"{files}/task.txt", content=b"x"),
            stranger.delete(f"{files}/task.txt"),
        ):
            assert answer.status_code == 401
    assert (root / "task.txt").read_bytes() == DRAFT


def test_what_does_not_fit_is_refused(client: httpx2.Client, files: str) -> None:
    assert_problem(client.get(f"{files}/task.txt", params={"download": "1"}), "invalid_request")
    assert_problem(client.post(f"{files}/task.txt", content=b"x"), "method_not_allowed")
    gz = {"Content-Encoding": "gzip"}
    assert_problem(client.put(f"{files}/x", content=b"x", headers=gz), "unsupported_media_type")
    part = {"Content-Range": "bytes 0-0/5"}
    assert_problem(client.put(f"{files}/x", content=b"x", headers=part), "bad_request")
    assert_problem(client.get(f"{files}/x"), "not_found")


def test_an_untrusted_workspace_takes_files_from_who_has_the_key(client: httpx2.Client, make_workspace: Make) -> None:
    made = make_workspace(trusted=False)
    assert client.put(f"/v1/workspaces/{made['id']}/files/a", content=b"x").status_code == 201


# -- what is sent as what ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "content", "kind", "download"),
    [
        ("a.txt", b"x", "text/plain; charset=utf-8", False),
        ("noext", "größe".encode(), "text/plain; charset=utf-8", False),
        ("noext", b"\xff\xfe\x00", "application/octet-stream", True),
        ("latin.txt", b"caf\xe9", "text/plain", False),
        ("nul.txt", b"a\0b", "application/octet-stream", True),
        ("cut.txt", b"x" * 4095 + "ä".encode(), "text/plain; charset=utf-8", False),
        ("a.py", b"x", "text/x-python; charset=utf-8", False),
        ("a.ts", b"x", "text/plain; charset=utf-8", False),
        ("A.JSON", b"{}", "application/json; charset=utf-8", False),
        ("a.png", b"\x89PNG", "image/png", False),
        ("a.html", b"<script>alert(1)</script>", "text/html; charset=utf-8", True),
        ("a.HTM", b"<script>alert(1)</script>", "text/html; charset=utf-8", True),
        ("a.xsl", b"<a/>", "application/xml", True),
        ("a.svg", b"<svg/>", "image/svg+xml", True),
        ("a.xml", b"<a/>", "text/xml; charset=utf-8", True),
        ("a.js", b"x", "javascript", True),
        ("a.css", b"x", "text/css; charset=utf-8", True),
        ("a.pdf", b"%PDF", "application/pdf", True),
        ("page", b"<html><script>alert(1)</script>", "text/plain; charset=utf-8", False),
        ("a.tar.gz", b"\x1f\x8b\x00", "application/octet-stream", True),
    ],
)
def test_nothing_a_browser_would_run_is_sent_to_be_shown(
    client: httpx2.Client, files: str, name: str, content: bytes, kind: str, download: bool
) -> None:
    client.put(f"{files}/{name}", content=content)
    answer = client.get(f"{files}/{name}")
    assert answer.content == content
    got = answer.headers["content-type"]
    assert got == kind or (kind == "javascript" and got.partition(";")[0].endswith("/javascript"))
    assert answer.headers.get("content-disposition") == (f'attachment; filename="{name}"' if download else None)
    assert answer.headers["content-security-policy"] == "sandbox"
    assert answer.headers["x-content-type-options"] == "nosniff"


def test_a_name_cannot_get_out_of_its_header(client: httpx2.Client, files: str) -> None:
    url = f"{files}/a%22%0D%0ASet-Cookie:%20x=1;ä.html"
    client.put(url, content=b"x")
    answer = client.get(url)
    assert "set-cookie" not in answer.headers
    assert answer.headers["content-disposition"] == (
        "attachment; filename=\"a___Set-Cookie: x=1;_.html\"; filename*=UTF-8''a%22%0D%0ASet-Cookie%3A%20x%3D1%3B%C3%A4.html"
    )


# -- uploads that do not get through ----------------------------------------------------------------------------------


@pytest.mark.parametrize("chunked", [False, True])
@pytest.mark.parametrize("path", ["task.txt", "new/dir/x"])
def test_an_upload_that_is_cut_leaves_the_old_file_and_nothing_else(
    server: ServerThread, files: str, root: Path, path: str, chunked: bool
) -> None:
    with RawConnection(server.url) as connection:
        if chunked:
            connection.send_head("PUT", f"{files}/{path}", Transfer_Encoding="chunked")
        else:
            connection.send_head("PUT", f"{files}/{path}", Content_Length=str(4 * MB))
        for _ in range(20):
            data = bytes(100_000)
            connection.send_chunk(data) if chunked else connection.send(data)
        # The first MB is on the disk: it was in flight.
        eventually(lambda: [name for name in temporaries(root) if (root / name).stat().st_size >= MB])
    eventually(lambda: not temporaries(root))
    assert (root / "task.txt").read_bytes() == DRAFT
    assert sorted(entry.name for entry in root.iterdir()) == ["b.txt", "task.txt"]


def test_a_request_that_ends_before_its_length_leaves_the_old_file(
    server: ServerThread, files: str, root: Path
) -> None:
    with RawConnection(server.url) as connection:
        connection.send_head("PUT", f"{files}/task.txt", Content_Length="1000")
        connection.send(b"x" * 999)
        eventually(lambda: temporaries(root))
    eventually(lambda: not temporaries(root))
    assert (root / "task.txt").read_bytes() == DRAFT


def test_a_client_that_stops_sending_is_told_so(
    server: ServerThread, files: str, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("app.api.upload.IDLE_SECONDS", 0.3)
    with RawConnection(server.url) as connection:
        connection.send_head("PUT", f"{files}/task.txt", Content_Length="1000")
        connection.send(b"x" * 999)
        answer = connection.answer()
    assert answer.status == 400
    assert b"stopped arriving" in answer.body
    assert (root / "task.txt").read_bytes() == DRAFT
    assert temporaries(root) == []


def test_a_stop_of_the_service_leaves_nothing_of_an_upload_on_its_way(tmp_path: Path) -> None:
    with ServerThread(tmp_path / "data") as server:
        with server.client() as client:
            made = client.post("/v1/workspaces", json={"files": {"x": "old"}}).json()
        root = Path(made["root"])
        with RawConnection(server.url) as connection:
            connection.send_head("PUT", f"/v1/workspaces/{made['id']}/files/x", Content_Length=str(4 * MB))
            connection.send(bytes(2 * MB))
            eventually(lambda: temporaries(root))
            server.begin_stop()
            eventually(lambda: not server._thread.is_alive(), seconds=15)
    assert [path.name for path in root.iterdir()] == ["x"]
    assert (root / "x").read_bytes() == b"old"


def test_more_than_the_service_takes_is_413_whether_it_is_said_or_not(small_server: ServerThread) -> None:
    with small_server.client() as client:
        made = client.post("/v1/workspaces", json={"files": {"x": "old"}}).json()
        url = f"/v1/workspaces/{made['id']}/files"
        root = Path(made["root"])
        assert client.put(f"{url}/y", content=bytes(100_000)).status_code == 201
        assert_problem(client.put(f"{url}/x", content=bytes(100_001)), "payload_too_large")
        assert_problem(client.put(f"{url}/x", content=iter([bytes(60_000)] * 2)), "payload_too_large")
        form = {"one": ("one", bytes(60_000)), "two": ("two", bytes(60_000))}
        assert_problem(client.post(url, files=form), "payload_too_large")
        with RawConnection(small_server.url) as connection:
            connection.send_head("PUT", f"{url}/x", Content_Length="2000000000", Expect="100-continue")
            assert connection.answer().status == 413
    assert (root / "x").read_bytes() == b"old"
    assert sorted(entry.name for entry in root.iterdir()) == ["x", "y"]


def test_a_body_of_more_than_16_mib_is_taken_here(client: httpx2.Client, files: str, root: Path) -> None:
    content = os.urandom(17 * 1024 * 1024)
    assert client.put(f"{files}/x", content=content).status_code == 201
    assert (root / "x").read_bytes() == content


FULL_DISK = """
    import io, json, os, subprocess, sys, tarfile
    from pathlib import Path
    from tests.support.archives import tar_of
    from tests.support.server import KEY, ServerProcess

    base = Path(sys.argv[1])
    small = base / "small"
    small.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=2m", "none", str(small)], check=True)
    root = small / "w"
    root.mkdir()
    os.chown(root, 65534, 65534)
    environment = {"TOOLCRIB_API_KEY": KEY, "TOOLCRIB_WORKSPACE_ROOTS": str(small)}
    with ServerProcess(base / "data", environment) as process, process.client() as client:
        made = client.post("/v1/workspaces", json={"root": str(root), "files": {"x": "old"}})
        assert made.status_code == 201, made.text
        url = "/v1/workspaces/" + made.json()["id"]
        answer = client.put(url + "/files/x", content=bytes(5_000_000))
        assert (answer.status_code, answer.json()["code"]) == (507, "no_space"), answer.text
        assert (root / "x").read_text() == "old"
        answer = client.post(url + "/files", files=[("f", ("deep/big", bytes(5_000_000))), ("f", ("y", b"y"))])
        big, little = answer.json()["data"]
        assert (big["error"]["code"], little["error"]) == ("no_space", None), answer.text
        # The archive fits, and one file of it too; the next one does not.
        archive = tar_of(("a", bytes(300_000)), ("b", bytes(1_100_000)))
        answer = client.put(url + "/archive?format=tar", content=archive)
        assert answer.status_code == 507, answer.text
        assert answer.json()["applied"] == ["a"], answer.text
        assert answer.json()["errors"][0]["pointer"] == "#/b", answer.text
        assert sorted(path.name for path in root.rglob("*")) == ["a", "x", "y"]
        assert client.put(url + "/files/x", content=b"new").status_code == 200
"""


@pytest.mark.skipif(
    subprocess.run(["unshare", "-m", "true"], capture_output=True, check=False).returncode != 0,
    reason="needs a private mount namespace (root or CAP_SYS_ADMIN) for a small disk",
)
def test_a_full_disk_is_507_and_leaves_the_old_file(tmp_path: Path) -> None:
    tmp_path.chmod(0o755)
    done = subprocess.run(
        ["unshare", "-m", sys.executable, "-c", textwrap.dedent(FULL_DISK), str(tmp_path)],
        text=True,
        capture_output=True,
        timeout=90,
        check=False,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
    )
    assert done.returncode == 0, done.stderr[-3000:]


# -- several at once --------------------------------------------------------------------------------------------------


def test_an_edit_does_not_wait_for_an_upload_on_its_way_and_the_upload_then_wins(
    server: ServerThread, client: httpx2.Client, workspace: dict[str, Any], files: str, root: Path
) -> None:
    with RawConnection(server.url) as connection:
        connection.send_head("PUT", f"{files}/task.txt", Content_Length=str(2 * MB))
        connection.send(bytes(MB + 500_000))
        eventually(lambda: temporaries(root))
        edit = [{"oldText": "draft", "newText": "done"}]
        assert tool(client, workspace, "edit", path="task.txt", edits=edit)["isError"] is False
        assert (root / "task.txt").read_bytes() == b"status: done"
        connection.send(bytes(500_000))
        assert connection.answer().status == 200
    assert (root / "task.txt").read_bytes() == bytes(2 * MB)


def test_an_upload_whose_file_was_edited_meanwhile_is_refused_when_it_asked_for_that(
    server: ServerThread, client: httpx2.Client, workspace: dict[str, Any], files: str, root: Path
) -> None:
    with RawConnection(server.url) as connection:
        connection.send_head("PUT", f"{files}/task.txt", Content_Length=str(2 * MB), If_Match=CURRENT)
        connection.send(bytes(MB + 500_000))
        eventually(lambda: temporaries(root))
        edit = [{"oldText": "draft", "newText": "done"}]
        assert tool(client, workspace, "edit", path="task.txt", edits=edit)["isError"] is False
        connection.send(bytes(500_000))
        answer = connection.answer()
    assert answer.status == 412
    assert etag_of(b"status: done") in httpx2.Response(412, content=answer.body).json()["currentEtag"]
    assert (root / "task.txt").read_bytes() == b"status: done"
    assert temporaries(root) == []


def test_uploads_and_edits_of_one_file_never_mix(
    server: ServerThread, client: httpx2.Client, workspace: dict[str, Any], files: str, root: Path
) -> None:
    """Each edit finds a whole upload, and each upload replaces a whole edit: whichever comes first."""
    client.put(f"{files}/task.txt", content=b"v0 " + bytes([120]) * 50_000)
    start = threading.Barrier(12)

    def upload(number: int) -> int:
        with server.client() as own:
            start.wait(20)
            return own.put(f"{files}/task.txt", content=b"v%d " % number + b"x" * 50_000).status_code

    def edit(number: int) -> bool:
        with server.client() as own:
            start.wait(20)
            edits = [{"oldText": " x", "newText": f" e{number} x"}]
            return bool(tool(own, workspace, "edit", path="task.txt", edits=edits)["isError"])

    with ThreadPoolExecutor(12) as pool:
        uploads = [pool.submit(upload, number) for number in range(1, 7)]
        edits = [pool.submit(edit, number) for number in range(6)]
        assert [future.result(30) for future in uploads] == [200] * 6
        assert [future.result(30) for future in edits] == [False] * 6
    head, _, tail = (root / "task.txt").read_bytes().partition(b" x")
    words = head.split()
    assert words[0] in {b"v%d" % number for number in range(7)}
    assert set(words[1:]) <= {b"e%d" % number for number in range(6)}
    assert tail == b"x" * 49_999
    assert temporaries(root) == []


def test_of_many_that_want_to_make_one_file_one_does(server: ServerThread, files: str, root: Path) -> None:
    start = threading.Barrier(12)

    def create(number: int) -> tuple[int, bytes]:
        content = b"%d " % number * 30_000
        with server.client() as own:
            start.wait(20)
            answer = own.put(f"{files}/deep/new", content=content, headers={"If-None-Match": "*"})
            return answer.status_code, content

    with ThreadPoolExecutor(12) as pool:
        results = list(pool.map(create, range(12), timeout=30))
    assert sorted(status for status, _ in results) == [201] + [412] * 11
    ((_, won),) = [result for result in results if result[0] == 201]
    assert (root / "deep/new").read_bytes() == won
    assert temporaries(root) == []


def test_a_download_goes_on_with_the_file_it_began_with(
    server: ServerThread, client: httpx2.Client, files: str
) -> None:
    content = os.urandom(24 * MB)
    client.put(f"{files}/x", content=content)
    with RawConnection(server.url, receive_buffer=65_536) as connection:
        connection.send_head("GET", f"{files}/x", Connection="close")
        assert connection.head()[0] == 200
        assert client.put(f"{files}/x", content=b"new").status_code == 200
        assert client.delete(f"{files}/x").status_code == 204
        assert connection.rest() == content


def test_a_download_of_a_file_that_is_cut_meanwhile_ends_too_early(
    server: ServerThread, client: httpx2.Client, files: str, root: Path
) -> None:
    client.put(f"{files}/x", content=bytes(40 * MB))
    with RawConnection(server.url, receive_buffer=65_536) as connection:
        connection.send_head("GET", f"{files}/x")
        assert connection.head()[1]["content-length"] == str(40 * MB)
        os.truncate(root / "x", MB)
        assert len(connection.rest()) < 40 * MB, "the connection was closed before all of it was sent"


def open_files_below(root: Path) -> list[str]:
    """Return what this process, which the server is a thread of, has open below a directory."""
    links = []
    for fd in Path("/proc/self/fd").iterdir():
        try:
            links.append(fd.readlink())
        except OSError:
            continue
    return [str(link) for link in links if root in link.parents]


def test_a_client_that_goes_away_leaves_no_open_file(
    server: ServerThread, client: httpx2.Client, files: str, root: Path
) -> None:
    client.put(f"{files}/x", content=bytes(40 * MB))
    for target in (f"{files}/x", f"{files.removesuffix('files')}archive?format=tar"):
        with RawConnection(server.url, receive_buffer=65_536) as connection:
            connection.send_head("GET", target)
            assert connection.head()[0] == 200
            eventually(lambda: open_files_below(root))
        eventually(lambda: not open_files_below(root))


def test_100_mb_go_through_in_a_few_of_memory(tmp_path: Path) -> None:
    size = 100 * MB
    block = os.urandom(MB)

    def blocks() -> Iterator[bytes]:
        for _ in range(100):
            yield block

    def resident(pid: int, field: str) -> int:
        for line in Path(f"/proc/{pid}/status").read_text().splitlines():
            if line.startswith(field + ":"):
                return int(line.split()[1]) * 1024
        raise AssertionError

    with ServerProcess(tmp_path / "data", {"TOOLCRIB_API_KEY": KEY}) as process, process.client() as client:
        made = client.post("/v1/workspaces", json={}).json()
        base = f"/v1/workspaces/{made['id']}"
        pid = process.process.pid
        client.put(f"{base}/files/warm", content=bytes(2 * MB))
        client.get(f"{base}/files/warm")
        before = resident(pid, "VmRSS")
        assert client.put(f"{base}/files/x", content=blocks()).json()["bytes"] == size
        digest = hashlib.sha256()
        with client.stream("GET", f"{base}/files/x") as answer:
            for chunk in answer.iter_bytes():
                digest.update(chunk)
        assert digest.digest() == hashlib.sha256(block * 100).digest()
        with client.stream("GET", f"{base}/archive", params={"format": "tar"}) as answer:
            archived = sum(len(chunk) for chunk in answer.iter_bytes())
        assert size < archived < size + 3 * MB
        form = {"file": ("y", _Endless(block, 30))}
        assert client.post(f"{base}/files", files=form).json()["hasErrors"] is False
        assert resident(pid, "VmHWM") - before < 16 * MB
    assert (Path(made["root"]) / "y").stat().st_size == 30 * MB


class _Endless:
    """A file of one block again and again, that is never in memory."""

    def __init__(self, block: bytes, count: int) -> None:
        self._block = block
        self._left = count

    def read(self, size: int = -1) -> bytes:
        if not self._left:
            return b""
        self._left -= 1
        return self._block

    def __iter__(self) -> Iterator[bytes]:
        while data := self.read():
            yield data


# -- forms ------------------------------------------------------------------------------------------------------------


def test_each_part_of_a_form_becomes_a_file(client: httpx2.Client, files: str, root: Path) -> None:
    large = os.urandom(3 * MB)
    form = [
        ("file", ("deep/er/a.bin", large)),
        ("file", ("task.txt", b"replaced")),
        ("file", ("größe ✓.txt", b"")),
        ("notes.txt", (None, "a text in a field")),
    ]
    answer = client.post(files, files=form)
    assert answer.status_code == 200
    assert answer.json() == {
        "data": [
            {"path": "deep/er/a.bin", "bytes": 3 * MB, "etag": etag_of(large), "created": True, "error": None},
            {"path": "task.txt", "bytes": 8, "etag": etag_of(b"replaced"), "created": False, "error": None},
            {"path": "größe ✓.txt", "bytes": 0, "etag": etag_of(b""), "created": True, "error": None},
            {
                "path": "notes.txt",
                "bytes": 17,
                "etag": etag_of(b"a text in a field"),
                "created": True,
                "error": None,
            },
        ],
        "hasErrors": False,
    }
    assert (root / "deep/er/a.bin").read_bytes() == large
    assert (root / "notes.txt").read_bytes() == b"a text in a field"


def test_a_part_that_cannot_be_stored_does_not_stop_the_others(client: httpx2.Client, files: str, root: Path) -> None:
    (root / "d").mkdir()
    form = [
        ("file", ("../evil", bytes(2 * MB))),
        ("file", ("d", b"x")),
        ("file", ("b.txt/below", b"x")),
        ("file", ("n" * 256, b"x")),
        ("file", ("ok", b"fine")),
    ]
    answer = client.post(files, files=form).json()
    assert answer["hasErrors"] is True
    codes = [entry["error"] and entry["error"]["code"] for entry in answer["data"]]
    assert codes == [
        "path_outside_workspace",
        "is_a_directory",
        "not_a_directory",
        "name_too_long",
        None,
    ]
    assert {entry["bytes"] for entry in answer["data"][:-1]} == {None}
    assert (root / "ok").read_bytes() == b"fine"
    assert sorted(entry.name for entry in root.iterdir()) == ["b.txt", "d", "ok", "task.txt"]


def form_of(*parts: bytes, end: bytes = b"--cut--\r\n") -> bytes:
    return b"".join(b"--cut\r\n" + part + b"\r\n" for part in parts) + end


FORM = {"Content-Type": "multipart/form-data; boundary=cut"}
FIRST = b'Content-Disposition: form-data; name="f"; filename="first"\r\n\r\nwhole'


@pytest.mark.parametrize(
    ("body", "problem"),
    [
        (form_of(FIRST, FIRST.replace(b"first", b"second"), end=b"")[:-4], "bad_request"),
        (form_of(FIRST, b"no header\r\n\r\nx"), "bad_request"),
        (form_of(FIRST, b"X: " + b"y" * 9_000 + b"\r\n\r\nx"), "bad_request"),
        (form_of(FIRST, b"\r\n".join(b"X: %d" % number for number in range(20)) + b"\r\n\r\nx"), "bad_request"),
        (form_of(*[FIRST] * 4), "payload_too_large"),
    ],
)
def test_a_form_that_breaks_off_tells_what_was_stored_before(
    client: httpx2.Client, files: str, root: Path, body: bytes, problem: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("app.api.upload.PARTS_MAX", 3)
    answer = client.post(files, content=body, headers=FORM)
    document = answer.json()
    assert document["code"] == problem
    assert document["files"][0]["path"] == "first"
    assert document["files"][0]["error"] is None
    assert (root / "first").read_bytes() == b"whole"
    assert not (root / "second").exists()
    assert temporaries(root) == []


def test_a_part_without_its_end_is_no_file(client: httpx2.Client, files: str, root: Path) -> None:
    assert_problem(client.post(files, content=form_of(FIRST, end=b""), headers=FORM), "bad_request", files=[])
    assert sorted(entry.name for entry in root.iterdir()) == ["b.txt", "task.txt"]


@pytest.mark.parametrize(
    "header",
    [
        b'form-data; name="f"; filename=""',  # a browser's field that nobody chose a file for
        b"form-data",
        b'attachment; filename="x"',
        b'form-data; name="f"; filename="\xff"',
    ],
)
def test_a_part_that_names_no_file_is_told(client: httpx2.Client, files: str, root: Path, header: bytes) -> None:
    body = form_of(b"Content-Disposition: " + header + b"\r\n\r\nx", FIRST)
    nameless, first = client.post(files, content=body, headers=FORM).json()["data"]
    assert (nameless["path"], nameless["error"]["code"]) == ("", "invalid_arguments")
    assert first["path"] == "first"
    assert sorted(entry.name for entry in root.iterdir()) == ["b.txt", "first", "task.txt"]


@pytest.mark.parametrize("size", [1, 7, 64, 100_000])
def test_a_form_is_read_whatever_pieces_it_comes_in(client: httpx2.Client, files: str, root: Path, size: int) -> None:
    content = b"\r\n--cu\r\n--cut-not\r\n-" * 20
    body = form_of(FIRST.replace(b"whole", content), b'content-disposition: form-data; name="plain"\r\n\r\ntext')
    parts = (body[start : start + size] for start in range(0, len(body), size))
    answer = client.post(files, content=parts, headers=FORM).json()
    assert [(entry["path"], entry["bytes"]) for entry in answer["data"]] == [("first", len(content)), ("plain", 4)]
    assert (root / "first").read_bytes() == content


def test_what_is_no_form_is_415_and_an_empty_one_stores_nothing(client: httpx2.Client, files: str) -> None:
    assert_problem(client.post(files, json={}), "unsupported_media_type")
    assert_problem(client.post(files, content=b"x"), "unsupported_media_type")
    no_boundary = {"Content-Type": "multipart/form-data"}
    assert_problem(client.post(files, content=b"x", headers=no_boundary), "unsupported_media_type")
    long_boundary = {"Content-Type": "multipart/form-data; boundary=" + "x" * 300}
    assert_problem(client.post(files, content=b"x", headers=long_boundary), "bad_request")
    assert client.post(files, content=b"--cut--\r\n", headers=FORM).json() == {"data": [], "hasErrors": False}


def test_a_form_whose_client_goes_away_keeps_what_was_whole(server: ServerThread, files: str, root: Path) -> None:
    with RawConnection(server.url) as connection:
        connection.send_head("POST", files, Content_Length=str(4 * MB), Content_Type=FORM["Content-Type"])
        connection.send(form_of(FIRST, end=b"--cut\r\n" + FIRST.replace(b"first", b"second")) + bytes(2 * MB))
        eventually(lambda: (root / "first").exists() and temporaries(root))
        assert (root / "first").read_bytes() == b"whole"
    eventually(lambda: not temporaries(root))
    assert not (root / "second").exists()


# -- listings ---------------------------------------------------------------------------------------------------------


def tree_of(client: httpx2.Client, workspace: dict[str, Any], **parameters: Any) -> dict[str, Any]:
    answer = client.get(f"/v1/workspaces/{workspace['id']}/tree", params=parameters)
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    return found


def test_a_tree_tells_everything_that_is_there(client: httpx2.Client, workspace: dict[str, Any], root: Path) -> None:
    (root / "d/e").mkdir(parents=True)
    (root / "d/e/f").write_bytes(b"four")
    (root / "d.txt").write_bytes(b"")
    (root / "link").symlink_to("d")
    os.mkfifo(root / "pipe")
    (root / ".toolcrib-tmp-0123456789abcdef").write_bytes(b"ours")
    here = os.open(root, os.O_RDONLY)
    os.close(os.open(b"caf\xe9", os.O_CREAT | os.O_WRONLY, dir_fd=here))
    os.close(here)
    for path in [root, *root.rglob("*")]:
        os.utime(path, (1_700_000_000, 1_700_000_000), follow_symlinks=False)
    at = "2023-11-14T22:13:20.000Z"

    def entry(path: str, kind: str, size: int | None = None, **more: str) -> dict[str, Any]:
        name = path.rpartition("/")[2]
        return {"path": path, "name": name, "type": kind, "bytes": size, "modifiedAt": at, **more}

    raw = base64.b64encode(b"caf\xe9").decode()
    assert tree_of(client, workspace) == {
        "data": [
            entry("b.txt", "file", 4),
            entry("caf\\xe9", "file", 0, nameBase64=raw, pathBase64=raw),
            entry("d", "directory"),
            entry("d/e", "directory"),
            entry("d/e/f", "file", 4),
            entry("d.txt", "file", 0),
            entry("link", "symlink", target="d"),
            entry("pipe", "other"),
            entry("task.txt", "file", 13),
        ],
        "nextCursor": None,
    }
    assert [found["path"] for found in tree_of(client, workspace, depth=1, limit=3)["data"]] == [
        "b.txt",
        "caf\\xe9",
        "d",
    ]
    assert [found["path"] for found in tree_of(client, workspace, path="d", depth=2)["data"]] == ["d/e", "d/e/f"]
    assert [found["path"] for found in tree_of(client, workspace, path="link")["data"]] == ["link/e", "link/e/f"]


@pytest.mark.parametrize("limit", [1, 2, 3, 7, 50])
def test_pages_of_a_tree_are_the_tree_whatever_their_size(
    client: httpx2.Client, workspace: dict[str, Any], root: Path, limit: int
) -> None:
    for path in ("a/b/c", "a/b.x", "a-b", "a/z/1", "a/z/10", "a/z/2", "B/x", "ä/y", "empty/"):
        if path.endswith("/"):
            (root / path).mkdir()
        else:
            (root / path).parent.mkdir(parents=True, exist_ok=True)
            (root / path).touch()
    expected = [entry["path"] for entry in tree_of(client, workspace)["data"]]
    assert expected == sorted(expected, key=lambda path: path.encode().split(b"/"))
    found: list[str] = []
    cursor: dict[str, str] = {}
    for _ in range(len(expected) + 1):
        page = tree_of(client, workspace, limit=limit, **cursor)
        found += [entry["path"] for entry in page["data"]]
        if page["nextCursor"] is None:
            break
        assert len(page["data"]) == limit
        cursor = {"cursor": page["nextCursor"]}
    assert found == expected
    # A page goes on where it was, also when what it ended at is gone.
    first = tree_of(client, workspace, path="a", limit=1)
    assert [entry["path"] for entry in first["data"]] == ["a/b"]
    (root / "a/b/c").unlink()
    (root / "a/b").rmdir()
    rest = tree_of(client, workspace, path="a", cursor=first["nextCursor"], depth=1)
    assert [entry["path"] for entry in rest["data"]] == ["a/b.x", "a/z"]


def test_a_tree_of_what_is_no_directory(client: httpx2.Client, workspace: dict[str, Any], root: Path) -> None:
    url = f"/v1/workspaces/{workspace['id']}/tree"
    (root / "out").symlink_to("/etc")
    for path, problem in (
        ("task.txt", "conflict"),
        ("gone", "not_found"),
        ("..", "invalid_path"),
        ("out", "invalid_path"),
    ):
        assert_problem(client.get(url, params={"path": path}), problem)
    for parameters in ({"depth": 0}, {"limit": 0}, {"limit": 5001}, {"path": "x" * 4096}, {"deep": 1}):
        assert_problem(client.get(url, params=parameters), "invalid_request")
    made = [base64.urlsafe_b64encode(b"after:" + path).decode().rstrip("=") for path in (b"", b"..", b"a\0b", b"/")]
    for cursor in ("!", "", "null", "YWJj", *made):
        assert_problem(client.get(url, params={"cursor": cursor}), "invalid_cursor")


def test_a_tree_5000_deep_is_listed_as_far_as_paths_can_be_used(client: httpx2.Client, make_workspace: Make) -> None:
    made = make_workspace()
    with as_account():
        here = os.open(made["root"], os.O_RDONLY)
        for _ in range(5_000):
            os.mkdir("d", dir_fd=here)
            deeper = os.open("d", os.O_RDONLY, dir_fd=here)
            os.close(here)
            here = deeper
    os.close(here)
    found: list[dict[str, Any]] = []
    cursor: dict[str, str] = {}
    while True:
        page = tree_of(client, made, limit=1_500, **cursor)
        found += page["data"]
        if page["nextCursor"] is None:
            break
        cursor = {"cursor": page["nextCursor"]}
    assert len(found) == 2_048
    assert found[-1]["path"] == "d/" * 2_047 + "d"
    assert "4095" in found[-1]["error"]
    assert all("error" not in entry for entry in found[:-1])
    assert client.delete(f"/v1/workspaces/{made['id']}/files/d?recursive=true").status_code == 204
    assert list(Path(made["root"]).iterdir()) == []
