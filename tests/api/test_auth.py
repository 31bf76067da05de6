from pathlib import Path

import httpx2
import pytest

from app.commands import create_key
from app.services.keys import KeyRequest
from tests.api.problems import assert_problem
from tests.support.server import KEY, ServerThread


@pytest.mark.parametrize(
    "path", ["/v1/workspaces", "/v1/tools", "/v1/calls", "/v1/batches/x/events", "/v1/workspaces?x=1"]
)
def test_without_a_key_nothing_of_the_api_is_told(server: ServerThread, path: str) -> None:
    with server.client(key=None) as client:
        response = client.get(path)
    assert_problem(response, "unauthorized")
    assert response.headers["www-authenticate"] == "Bearer"


@pytest.mark.parametrize("value", [f"Basic {KEY}", "Bearer", KEY, "Bearer wrong", f"Bearer {KEY}x", "Bearer \xff"])
def test_what_is_no_key_is_refused(server: ServerThread, value: str) -> None:
    with server.client(key=None) as client:
        response = client.get("/v1/workspaces", headers={"Authorization": value.encode("latin-1")})
    assert_problem(response, "unauthorized")
    assert response.headers["www-authenticate"].startswith("Bearer")


@pytest.mark.parametrize("scheme", ["Bearer", "bearer", "BEARER"])
def test_the_scheme_is_read_whatever_its_case(server: ServerThread, scheme: str) -> None:
    with server.client(key=None) as client:
        assert client.get("/v1/workspaces", headers={"Authorization": f"{scheme} {KEY}"}).status_code == 200


def test_a_key_made_while_the_service_runs_works_at_once(server: ServerThread) -> None:
    token = create_key(server.settings, KeyRequest("late"))
    with server.client(key="wrong") as client:
        assert client.get("/v1/workspaces").status_code == 401
    with server.client(key=token) as client:
        made = client.post("/v1/workspaces", json={})
        assert made.status_code == 201
    with server.client() as client:  # an operator sees every owner's things
        assert client.get(made.headers["location"]).status_code == 200


def test_a_made_key_is_stored_as_a_hash_alone(server: ServerThread) -> None:
    token = create_key(server.settings, KeyRequest("hashed"))
    for file in server.settings.data_dir.glob("toolcrib.db*"):
        assert token.encode() not in file.read_bytes()
        assert token.removeprefix("toolcrib_").encode() not in file.read_bytes()


def test_the_open_paths_need_no_key(server: ServerThread) -> None:
    with httpx2.Client(base_url=server.url, trust_env=False) as client:
        for path in ("/healthz", "/readyz", "/version", "/openapi.json", "/docs", "/docs/docs.js", "/docs/docs.css"):
            assert client.get(path).status_code == 200


def test_a_page_of_another_origin_may_call_only_when_it_is_listed(server: ServerThread, tmp_path: Path) -> None:
    asked = {"Origin": "https://app.example", "Access-Control-Request-Method": "POST"}
    with server.client(key=None) as client:
        assert "access-control-allow-origin" not in client.options("/v1/workspaces", headers=asked).headers
    with ServerThread(tmp_path / "data", cors_origins=("https://app.example",)) as listed, listed.client() as client:
        response = client.options("/v1/workspaces", headers=asked)
        assert response.status_code == 200
        assert response.headers["access-control-allow-origin"] == "https://app.example"
        response = client.get("/v1/workspaces", headers={"Origin": "https://app.example"})
        assert "X-Request-ID" in response.headers["access-control-expose-headers"]
        assert "Idempotent-Replayed" in response.headers["access-control-expose-headers"]
        wanted = {**asked, "Access-Control-Request-Headers": "authorization, idempotency-key, last-event-id"}
        assert client.options("/v1/workspaces", headers=wanted).status_code == 200
        response = client.options("/v1/workspaces", headers={**asked, "Origin": "https://evil.example"})
        assert "access-control-allow-origin" not in response.headers
