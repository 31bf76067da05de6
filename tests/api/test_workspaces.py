import base64
import os
import stat
from collections.abc import Callable
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import httpx2
import pytest

from app.domain.ids import is_id
from app.domain.workspace import WorkspaceOptions
from app.services.workspaces import WorkspaceService
from app.storage.base import UpdateWorkspace
from tests.api.problems import assert_problem
from tests.support.server import ServerThread, eventually
from tests.support.users import as_account, give

Make = Callable[..., dict[str, Any]]
ONE_CALL = {"calls": [{"name": "read", "arguments": {"path": "task.txt"}}]}


def test_nothing_at_all_makes_an_empty_workspace(client: httpx2.Client, server: ServerThread) -> None:
    for body in (b"", b"{}"):
        response = client.post("/v1/workspaces", content=body)
        assert response.status_code == 201
        made = response.json()
        assert is_id(made["id"], "ws")
        assert response.headers["location"] == f"/v1/workspaces/{made['id']}"
        assert made == {
            "id": made["id"],
            "name": None,
            "root": str(server.settings.data_dir / "workspaces" / made["id"]),
            "managed": True,
            "trusted": True,
            "options": WorkspaceOptions().to_json(),
            "metadata": {},
            "status": "active",
            "createdAt": made["createdAt"],
            "nodeId": (server.settings.data_dir / "node").read_text().strip(),
            "lastUsedAt": made["createdAt"],
            "expiresAt": None,
        }
        assert datetime.fromisoformat(made["createdAt"]).utcoffset() == timedelta(0)
        assert len(made["createdAt"]) == len("2026-01-02T03:04:05.678Z")
        assert client.get(response.headers["location"]).json() == made
        root = Path(made["root"])
        assert list(root.iterdir()) == []
        assert stat.S_IMODE(root.stat().st_mode) == 0o700


def test_everything_that_was_asked_for_is_kept(make_workspace: Make) -> None:
    made = make_workspace(
        name="Größe ✓",
        metadata={"b": 1, "a": {"nested": [1, 2.5, None, "\u0000"]}},
        options={"read": {"maxLines": 7}, "bashTimeoutMs": 1000, "tools": ["read"]},
        ttlSeconds=3600,
        trusted=False,
    )
    assert made["name"] == "Größe ✓"
    assert made["metadata"] == {"b": 1, "a": {"nested": [1, 2.5, None, "\u0000"]}}
    assert list(made["metadata"]) == ["b", "a"]
    assert made["options"]["read"]["maxLines"] == 7
    assert made["options"]["bash"]["timeout"] == 1000
    assert made["options"]["tools"] == ["read"]
    assert made["trusted"] is False
    span = datetime.fromisoformat(made["expiresAt"]) - datetime.fromisoformat(made["createdAt"])
    assert timedelta(seconds=3599) < span <= timedelta(seconds=3600)


def test_files_are_laid_in_as_they_were_sent(make_workspace: Make) -> None:
    raw = bytes(range(256))
    made = make_workspace(
        files={"a.txt": "ä\r\n", "deep/er/b.bin": {"base64": base64.b64encode(raw).decode()}, "deep/empty": ""}
    )
    root = Path(made["root"])
    assert (root / "a.txt").read_bytes() == "ä\r\n".encode()
    assert (root / "deep/er/b.bin").read_bytes() == raw
    assert (root / "deep/empty").read_bytes() == b""
    assert sorted(path.name for path in root.rglob("*")) == ["a.txt", "b.bin", "deep", "empty", "er"]


@pytest.mark.parametrize(
    ("body", "places"),
    [
        ([], ["#"]),
        ({"nmae": "x"}, ["#/nmae"]),
        ({"name": ""}, ["#/name"]),
        ({"name": "a\nb"}, ["#/name"]),
        ({"name": 1, "trusted": "yes"}, ["#/name", "#/trusted"]),
        ({"metadata": []}, ["#/metadata"]),
        ({"metadata": {"x": "y" * 16384}}, ["#/metadata"]),
        ({"ttlSeconds": 0}, ["#/ttlSeconds"]),
        ({"ttlSeconds": True}, ["#/ttlSeconds"]),
        (
            {"options": {"read": {"maxLines": 0}, "bash": {"nice": 1}}},
            ["#/options/read/maxLines", "#/options/bash/nice"],
        ),
        ({"options": {"containment": "unrestricted"}}, ["#/options/containment"]),
        ({"files": {"a": 1}}, ["#/files/a"]),
        ({"files": {"a": {"base64": "!"}}}, ["#/files/a"]),
        ({"files": {"a": {"base64": "AA==", "mode": 1}}}, ["#/files/a"]),
        ({"files": {"": "x"}}, ["#/files/"]),
        ({"files": {"/etc/x": "x"}}, ["#/files/~1etc~1x"]),
        ({"files": {"../x": "x"}}, ["#/files/..~1x"]),
        ({"files": {"a/../../x": "x"}}, ["#/files/a~1..~1..~1x"]),
        ({"files": {"ok.txt": "x", "a/": "x"}}, ["#/files/a~1"]),
        ({"files": {"a": "x", "a/b": "y"}}, ["#/files/a~1b"]),
        ({"files": {"n\u0000": "x"}}, ["#/files/n\u0000"]),
        ({"files": {"x" * 300: "x"}}, ["#/files/" + "x" * 300]),
        ({"root": "relative"}, ["#/root"]),
        ({"root": "/etc"}, ["#/root"]),
        ({"root": "/no/such/directory"}, ["#/root"]),
    ],
)
def test_a_body_that_does_not_fit_is_told_where_and_nothing_is_made(
    client: httpx2.Client, server: ServerThread, body: Any, places: list[str]
) -> None:
    managed = server.settings.data_dir / "workspaces"
    before = (set(managed.iterdir()), client.get("/v1/workspaces").json())
    document = assert_problem(client.post("/v1/workspaces", json=body), "invalid_request")
    assert [error["pointer"] for error in document["errors"]] == places
    assert all(error["code"] and error["message"] for error in document["errors"])
    assert (set(managed.iterdir()), client.get("/v1/workspaces").json()) == before


def test_an_existing_directory_is_adopted_and_never_removed(client: httpx2.Client, adoptable: Path) -> None:
    root = adoptable / "project"
    root.mkdir()
    (root / "task.txt").write_text("mine")
    give(root)
    made = client.post("/v1/workspaces", json={"root": str(root), "files": {"new/file.txt": "yours"}}).json()
    assert (made["root"], made["managed"]) == (str(root), False)
    assert (root / "new/file.txt").read_text() == "yours"
    batch = client.post(f"/v1/workspaces/{made['id']}/batches", json=ONE_CALL, params={"wait": "10"}).json()
    assert batch["calls"][0]["status"] == "succeeded"
    assert client.delete(f"/v1/workspaces/{made['id']}").status_code == 204
    assert (root / "task.txt").read_text() == "mine"
    # Its place is free again.
    assert client.post("/v1/workspaces", json={"root": str(root)}).status_code == 201


def test_a_link_is_adopted_as_the_directory_it_points_to(client: httpx2.Client, adoptable: Path) -> None:
    (adoptable / "real").mkdir()
    (adoptable / "link").symlink_to("real")
    give(adoptable / "real")
    response = client.post("/v1/workspaces", json={"root": str(adoptable / "link")})
    assert response.json()["root"] == str(adoptable / "real")


def test_a_link_out_of_the_list_is_not_adopted(client: httpx2.Client, adoptable: Path, tmp_path: Path) -> None:
    (adoptable / "out").symlink_to(tmp_path)
    response = client.post("/v1/workspaces", json={"root": str(adoptable / "out")})
    assert assert_problem(response, "invalid_request")["errors"][0]["code"] == "not_allowed"
    sibling = Path(f"{adoptable}-evil")
    sibling.mkdir()
    response = client.post("/v1/workspaces", json={"root": str(sibling)})
    assert assert_problem(response, "invalid_request")["errors"][0]["code"] == "not_allowed"


def test_a_root_that_is_missing_or_no_directory_is_422(client: httpx2.Client, adoptable: Path) -> None:
    (adoptable / "file").write_text("")
    for name, code in (("missing", "not_found"), ("file", "not_a_directory")):
        response = client.post("/v1/workspaces", json={"root": str(adoptable / name)})
        assert assert_problem(response, "invalid_request")["errors"][0]["code"] == code


@pytest.mark.parametrize("place", ["", "inner", ".."])
def test_a_root_equal_to_inside_or_around_anothers_is_a_conflict(
    client: httpx2.Client, adoptable: Path, place: str
) -> None:
    base = adoptable / f"overlap-{place.strip('.') or len(place)}"
    (base / "taken" / "inner").mkdir(parents=True)
    give(base)
    assert client.post("/v1/workspaces", json={"root": str(base / "taken")}).status_code == 201
    response = client.post("/v1/workspaces", json={"root": str(base / "taken" / place), "files": {"sub/x": "1"}})
    document = assert_problem(response, "conflict")
    assert document["errors"] == [{"pointer": "#/root", "code": "overlap", "message": "overlaps another workspace"}]
    assert not list(base.rglob("x"))
    assert not list(base.rglob("sub"))


def test_the_data_directory_is_nobodys_workspace(tmp_path: Path) -> None:
    data_dir = tmp_path / "around" / "data"
    with ServerThread(data_dir, workspace_roots=(tmp_path,)) as server, server.client() as client:
        for root in (data_dir, data_dir.parent, data_dir / "workspaces"):
            response = client.post("/v1/workspaces", json={"root": str(root)})
            assert assert_problem(response, "invalid_request")["errors"][0]["code"] == "overlap"


def test_files_never_replace_what_an_adopted_directory_holds(client: httpx2.Client, adoptable: Path) -> None:
    root = adoptable / "kept"
    root.mkdir()
    (root / "b.txt").write_text("mine")
    give(root)
    body = {"root": str(root), "files": {"a/x/a.txt": "new", "b.txt": "yours", "c.txt": "new"}}
    document = assert_problem(client.post("/v1/workspaces", json=body), "conflict")
    assert document["errors"][0]["pointer"] == "#/files/b.txt"
    assert [path.name for path in root.rglob("*")] == ["b.txt"]
    assert (root / "b.txt").read_text() == "mine"


def test_containment_is_given_up_only_where_the_server_allows_it(tmp_path: Path) -> None:
    with ServerThread(tmp_path / "data", allow_unrestricted=True) as server, server.client() as client:
        response = client.post("/v1/workspaces", json={"options": {"containment": "unrestricted"}})
        assert response.status_code == 201


def test_a_list_is_read_page_by_page_newest_first(client: httpx2.Client, make_workspace: Make) -> None:
    made = [make_workspace()["id"] for _ in range(6)]
    seen: list[str] = []
    cursor: str | None = None
    for _ in range(3):
        page = client.get("/v1/workspaces", params={"limit": "2", **({"cursor": cursor} if cursor else {})}).json()
        assert len(page["data"]) == 2
        seen += [item["id"] for item in page["data"]]
        cursor = page["nextCursor"]
    assert seen == made[::-1]


@pytest.mark.parametrize("cursor", ["", "x", "!!!!", "d3NfMA", "YmF0Y2hfMDFtOHBrMG1xN2U3MWJncWU2NzMwMzM4NzM"])
def test_a_cursor_of_something_else_is_400(client: httpx2.Client, cursor: str) -> None:
    assert_problem(client.get("/v1/workspaces", params={"cursor": cursor}), "invalid_cursor")


@pytest.mark.parametrize("limit", ["0", "201", "-1", "x", ""])
def test_a_limit_out_of_bounds_is_422(client: httpx2.Client, limit: str) -> None:
    document = assert_problem(client.get("/v1/workspaces", params={"limit": limit}), "invalid_request")
    assert document["errors"][0]["parameter"] == "limit"


def test_an_unknown_parameter_is_422(client: httpx2.Client, workspace: dict[str, Any]) -> None:
    for path in ("/v1/workspaces", f"/v1/workspaces/{workspace['id']}", "/v1/calls", "/v1/tools"):
        document = assert_problem(client.get(path, params={"nmae": "x"}), "invalid_request")
        assert [(error["parameter"], error["code"]) for error in document["errors"]] == [("nmae", "unknown_parameter")]


def test_a_parameter_that_is_given_twice_is_422(client: httpx2.Client) -> None:
    document = assert_problem(client.get("/v1/workspaces?limit=1&limit=2"), "invalid_request")
    assert document["errors"] == [{"parameter": "limit", "code": "repeated_parameter", "message": "give it once"}]


def test_a_patch_changes_what_it_names_and_nothing_else(client: httpx2.Client, make_workspace: Make) -> None:
    made = make_workspace(name="before", metadata={"a": 1}, options={"read": {"maxLines": 7}}, ttlSeconds=60)
    path = f"/v1/workspaces/{made['id']}"
    assert client.patch(path, json={}).json() == made
    renamed = client.patch(path, json={"name": "after"}).json()
    assert renamed == {**made, "name": "after"}
    changed = client.patch(
        path, json={"name": None, "metadata": {"b": 2}, "options": {"write": {"maxBytes": 1000}}, "trusted": False}
    ).json()
    assert (changed["name"], changed["metadata"], changed["trusted"]) == (None, {"b": 2}, False)
    # A field that is named is replaced as a whole.
    assert (changed["options"]["read"]["maxLines"], changed["options"]["write"]["maxBytes"]) == (2000, 1000)
    assert changed["expiresAt"] == made["expiresAt"]
    assert client.patch(path, json={"ttlSeconds": None}).json()["expiresAt"] is None
    assert client.patch(path, json={"ttlSeconds": 60}).json()["expiresAt"] is not None
    for body in ({"root": "/x"}, {"trusted": None}, {"status": "deleted"}, []):
        assert_problem(client.patch(path, json=body), "invalid_request")


def test_a_deleted_workspace_is_gone_and_its_records_are_not(
    client: httpx2.Client, server: ServerThread, workspace: dict[str, Any], batches: str
) -> None:
    batch = client.post(batches, json=ONE_CALL, params={"wait": "10"}).json()
    path = f"/v1/workspaces/{workspace['id']}"
    assert client.delete(path).status_code == 204
    assert not Path(workspace["root"]).exists()
    eventually(lambda: not list((server.settings.data_dir / "trash").iterdir()))
    assert client.get(path).json()["status"] == "deleted"
    for response in (
        client.post(batches, json=ONE_CALL),
        client.post(f"{path}/tools/read", json={"path": "task.txt"}),
        client.patch(path, json={"name": "x"}),
        client.get(f"{path}/tools"),
    ):
        assert_problem(response, "workspace_gone")
    assert client.delete(path).status_code == 204
    assert client.get(f"/v1/batches/{batch['id']}").json() == batch
    assert [item["id"] for item in client.get(batches).json()["data"]] == [batch["id"]]


def test_a_delete_cancels_what_runs(client: httpx2.Client, workspace: dict[str, Any], batches: str) -> None:
    body = {"calls": [{"name": "bash", "arguments": {"command": "echo up; sleep 60; touch late"}}]}
    batch = client.post(batches, json=body).json()
    path = f"/v1/batches/{batch['id']}"
    eventually(lambda: client.get(path).json()["calls"][0]["status"] == "running")
    assert client.delete(f"/v1/workspaces/{workspace['id']}").status_code == 204
    ended = client.get(path).json()
    assert (ended["status"], ended["calls"][0]["status"]) == ("cancelled", "cancelled")


def test_a_deep_tree_without_permissions_is_removed(
    client: httpx2.Client, server: ServerThread, make_workspace: Make, tmp_path: Path
) -> None:
    made = make_workspace(files={"outside.txt": "x"})
    with as_account():
        fd = os.open(made["root"], os.O_RDONLY)
        for _ in range(1500):
            os.mkdir("d", dir_fd=fd)
            deeper = os.open("d", os.O_RDONLY, dir_fd=fd)
            os.close(fd)
            fd = deeper
        os.symlink(tmp_path, "link", dir_fd=fd)
        os.fchmod(fd, 0)
        Path(made["root"]).chmod(0)
    os.close(fd)
    (tmp_path / "kept").write_text("")
    assert client.delete(f"/v1/workspaces/{made['id']}").status_code == 204
    eventually(lambda: not list((server.settings.data_dir / "trash").iterdir()), 30)
    assert (tmp_path / "kept").exists()


def test_a_workspace_whose_time_has_come_expires_by_itself(client: httpx2.Client, make_workspace: Make) -> None:
    made = make_workspace(ttlSeconds=1)
    path = f"/v1/workspaces/{made['id']}"
    eventually(lambda: client.get(path).json()["status"] == "expired")
    assert not Path(made["root"]).exists()
    assert_problem(client.post(f"{path}/batches", json=ONE_CALL), "workspace_gone")
    assert client.delete(path).status_code == 204
    assert client.get(path).json()["status"] == "expired"


def test_what_runs_at_the_end_of_a_workspace_is_cancelled_and_answered(
    client: httpx2.Client, server: ServerThread, make_workspace: Make
) -> None:
    made = make_workspace(ttlSeconds=2)
    path = f"/v1/workspaces/{made['id']}"
    calls = [
        {"name": "bash", "arguments": {"command": "echo up; sleep 60"}},
        {"name": "bash", "arguments": {"command": ":"}},
    ]
    # Use does not give a workspace more time.
    batch = client.post(f"{path}/batches", json={"calls": calls}, params={"wait": "20"}).json()
    assert (batch["status"], [call["status"] for call in batch["calls"]]) == ("cancelled", ["cancelled"] * 2)
    assert all(call["result"]["isError"] for call in batch["calls"])
    eventually(lambda: client.get(path).json()["status"] == "expired")
    assert client.get(path).json()["expiresAt"] == made["expiresAt"]
    assert not Path(made["root"]).exists()
    eventually(lambda: not list((server.settings.data_dir / "trash").iterdir()))
    for response in (
        client.get(f"{path}/files/x"),
        client.patch(path, json={"ttlSeconds": None}),
        client.post(f"{path}/tools/bash", json={"command": ":"}),
    ):
        assert_problem(response, "workspace_gone")
    assert client.get(f"/v1/batches/{batch['id']}").json() == batch


def test_a_workspace_that_another_process_left_expires_too(
    client: httpx2.Client, server: ServerThread, make_workspace: Make
) -> None:
    made = make_workspace(ttlSeconds=3600)
    service = server.services.workspaces
    server.call(service._records.write(UpdateWorkspace(made["id"], expires_at=1)))
    server.call(_wake(service))
    eventually(lambda: client.get(f"/v1/workspaces/{made['id']}").json()["status"] == "expired")


async def _wake(service: WorkspaceService) -> None:
    service._wake.set()


def test_more_time_keeps_a_workspace(client: httpx2.Client, make_workspace: Make) -> None:
    made = make_workspace(ttlSeconds=1)
    other = make_workspace(ttlSeconds=1)
    client.patch(f"/v1/workspaces/{made['id']}", json={"ttlSeconds": 3600})
    eventually(lambda: client.get(f"/v1/workspaces/{other['id']}").json()["status"] == "expired")
    assert client.get(f"/v1/workspaces/{made['id']}").json()["status"] == "active"


def test_another_directory_at_the_root_is_409_and_none_is_the_calls_error(
    client: httpx2.Client, workspace: dict[str, Any], batches: str
) -> None:
    root = Path(workspace["root"])
    aside = root.with_name(root.name + "-aside")
    root.rename(aside)
    [call] = client.post(batches, json=ONE_CALL, params={"wait": "10"}).json()["calls"]
    assert call["error"]["code"] == "not_found"
    assert "workspace directory" in call["result"]["content"][0]["text"]
    assert not root.exists()
    root.mkdir()
    assert_problem(client.post(batches, json=ONE_CALL), "workspace_moved")
    root.rmdir()
    aside.rename(root)
    [call] = client.post(batches, json=ONE_CALL, params={"wait": "10"}).json()["calls"]
    assert call["status"] == "succeeded"
