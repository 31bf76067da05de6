from datetime import UTC, datetime, timedelta
from typing import Any

import httpx2
import pytest

from app.domain.ids import new_id
from tests.api.problems import assert_problem
from tests.support.server import KEY, ServerThread

READER = {"name": "reader", "scopes": ["read"]}


def test_a_new_key_is_shown_once_and_works(server: ServerThread, client: httpx2.Client) -> None:
    asked = {"name": "Größe ✓", "scopes": ["write", "read"], "owner": "team.a-1_B", "ttlSeconds": 3600}
    response = client.post("/v1/keys", json=asked)
    assert response.status_code == 201
    assert response.headers["cache-control"] == "no-store"
    made = response.json()
    token = made.pop("token")
    assert token.startswith("toolcrib_")
    assert made == {
        "id": made["id"],
        "name": "Größe ✓",
        "owner": "team.a-1_B",
        "scopes": ["write", "read"],
        "createdAt": made["createdAt"],
        "createdBy": "env",
        "expiresAt": made["expiresAt"],
        "revokedAt": None,
    }
    lasts = datetime.fromisoformat(made["expiresAt"]) - datetime.fromisoformat(made["createdAt"])
    assert abs(lasts - timedelta(hours=1)) < timedelta(minutes=1)
    listed = client.get("/v1/keys")
    assert made in listed.json()["data"]
    assert token not in listed.text
    assert "hash" not in listed.text.lower()
    with server.client(token) as owner:
        assert owner.post("/v1/workspaces").status_code == 201


def test_without_an_owner_a_key_is_its_own(server: ServerThread, client: httpx2.Client) -> None:
    made = client.post("/v1/keys", json=READER).json()
    assert made["owner"] == made["id"]
    assert (made["expiresAt"], made["revokedAt"]) == (None, None)


def test_the_list_goes_on_page_by_page(client: httpx2.Client) -> None:
    made = [client.post("/v1/keys", json=READER).json()["id"] for _ in range(3)]
    first = client.get("/v1/keys", params={"limit": 2}).json()
    assert [key["id"] for key in first["data"]] == [made[2], made[1]]
    second = client.get("/v1/keys", params={"limit": 1, "cursor": first["nextCursor"]}).json()
    assert [key["id"] for key in second["data"]] == [made[0]]
    assert_problem(client.get("/v1/keys", params={"cursor": "x"}), "invalid_cursor")


def test_a_revoked_key_works_no_more_at_once_and_stays_in_the_list(server: ServerThread, client: httpx2.Client) -> None:
    made = client.post("/v1/keys", json=READER).json()
    with server.client(made["token"]) as reader:
        assert reader.get("/v1/tools").status_code == 200
        assert client.delete(f"/v1/keys/{made['id']}").status_code == 204
        problem = assert_problem(reader.get("/v1/tools"), "unauthorized")
        assert "revoked" in problem["detail"]
        assert client.delete(f"/v1/keys/{made['id']}").status_code == 204
    [listed] = [key for key in client.get("/v1/keys").json()["data"] if key["id"] == made["id"]]
    assert listed["revokedAt"] is not None
    for unknown in (new_id("key"), "env", "key_x", "%00"):
        assert_problem(client.delete(f"/v1/keys/{unknown}"), "not_found")
    assert client.get("/v1/tools").status_code == 200


def test_a_key_can_make_keys_and_revoke_itself(server: ServerThread, client: httpx2.Client) -> None:
    made = client.post("/v1/keys", json={"name": "operator", "scopes": ["admin"]}).json()
    with server.client(made["token"]) as operator:
        assert operator.post("/v1/keys", json=READER).json()["createdBy"] == made["id"]
        assert operator.delete(f"/v1/keys/{made['id']}").status_code == 204
        assert_problem(operator.get("/v1/keys"), "unauthorized")


def in_an_hour(**changes: Any) -> str:
    return (datetime.now(UTC) + timedelta(hours=1)).isoformat()


@pytest.mark.parametrize(
    ("change", "pointer"),
    [
        ({"name": ""}, "#/name"),
        ({"name": "a\nb"}, "#/name"),
        ({"name": 7}, "#/name"),
        ({"scopes": []}, "#/scopes"),
        ({"scopes": "read"}, "#/scopes"),
        ({"scopes": ["read", "read"]}, "#/scopes"),
        ({"scopes": ["root"]}, "#/scopes/0"),
        ({"scopes": [None]}, "#/scopes/0"),
        ({"owner": ""}, "#/owner"),
        ({"owner": "a b"}, "#/owner"),
        ({"owner": "a\n"}, "#/owner"),
        ({"owner": "x" * 65}, "#/owner"),
        ({"ttlSeconds": 0}, "#/ttlSeconds"),
        ({"ttlSeconds": 2**62}, "#/ttlSeconds"),
        ({"ttlSeconds": True}, "#/ttlSeconds"),
        ({"expiresAt": "tomorrow"}, "#/expiresAt"),
        ({"expiresAt": 1893456000}, "#/expiresAt"),
        ({"expiresAt": "2020-01-01T00:00:00Z"}, "#/expiresAt"),
        ({"expiresAt": "9999-01-01T00:00:00Z"}, "#/expiresAt"),
        ({"expiresAt": in_an_hour(), "ttlSeconds": 60}, "#/expiresAt"),
        ({"token": "mine"}, "#/token"),
        ({"id": "key_mine"}, "#/id"),
    ],
)
def test_a_key_that_cannot_be_is_refused(client: httpx2.Client, change: dict[str, Any], pointer: str) -> None:
    before = client.get("/v1/keys", params={"limit": 1}).json()["data"]
    problem = assert_problem(client.post("/v1/keys", json={**READER, **change}), "invalid_request")
    assert problem["errors"][0]["pointer"] == pointer
    assert client.get("/v1/keys", params={"limit": 1}).json()["data"] == before


@pytest.mark.parametrize("field", ["name", "scopes"])
def test_a_key_has_a_name_and_scopes(client: httpx2.Client, field: str) -> None:
    body = {name: value for name, value in READER.items() if name != field}
    problem = assert_problem(client.post("/v1/keys", json=body), "invalid_request")
    assert problem["errors"][0]["pointer"] == f"#/{field}"


def test_a_time_with_an_offset_is_taken_as_the_moment_it_is(client: httpx2.Client) -> None:
    moment = datetime.now(UTC).replace(microsecond=0) + timedelta(days=1)
    elsewhere = moment.isoformat().replace("+00:00", "-00:00")
    made = client.post("/v1/keys", json={**READER, "expiresAt": elsewhere}).json()
    assert datetime.fromisoformat(made["expiresAt"]) == moment


def test_the_keys_token_is_in_no_file_of_the_database(server: ServerThread, client: httpx2.Client) -> None:
    token = client.post("/v1/keys", json=READER).json()["token"]
    for file in server.settings.data_dir.glob("toolcrib.db*"):
        content = file.read_bytes()
        assert token.encode() not in content
        assert KEY.encode() not in content
