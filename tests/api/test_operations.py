import re
import shutil
from pathlib import Path

import httpx2
import pytest

from app import __version__
from app.sandbox.base import Tier
from tests.api.problems import assert_problem
from tests.support.sandbox_tiers import TIERS, require_tier
from tests.support.server import ServerThread


def test_health_and_readiness_answer_get_and_head(client: httpx2.Client) -> None:
    assert client.get("/healthz").json() == {"status": "ok"}
    assert client.get("/readyz").json() == {
        "status": "ready",
        "checks": {"accepting": "ok", "writer": "ok", "database": "ok", "workspaces": "ok"},
        "sandbox": client.get("/version").json()["sandbox"],
    }
    for path in ("/healthz", "/readyz"):
        response = client.head(path)
        assert (response.status_code, response.content) == (200, b"")


def test_readiness_tells_what_is_missing_and_health_does_not_care(tmp_path: Path) -> None:
    with ServerThread(tmp_path / "data") as server, server.client() as client:
        shutil.rmtree(tmp_path / "data" / "workspaces")
        response = client.get("/readyz")
        document = assert_problem(response, "not_ready")
        why = "the directory of the workspaces cannot be written"
        assert document["failures"] == [why]
        assert document["checks"] == {"accepting": "ok", "writer": "ok", "database": "ok", "workspaces": why}
        assert document["sandbox"] == client.get("/version").json()["sandbox"]
        assert response.headers["retry-after"] == "1"
        assert client.get("/healthz").status_code == 200


@pytest.mark.parametrize("tier", TIERS)
def test_the_version_and_every_command_say_what_the_sandbox_really_is(tmp_path: Path, tier: Tier) -> None:
    report = require_tier(tier, tmp_path).to_json()
    with ServerThread(tmp_path / "data", sandbox=tier) as server, server.client() as client:
        assert client.get("/version").json()["sandbox"] == report
        workspace = client.post("/v1/workspaces", json={"files": {"a.txt": "needle"}}).json()["id"]
        # Where something holds a command, no guard looks at its words.
        call = client.post(f"/v1/workspaces/{workspace}/tools/bash", json={"command": "ls -d /etc"}).json()
        network = "host" if tier == "process" else "none"
        assert call["result"]["details"]["sandbox"] == {**report, "network": network}
        assert call["status"] == ("failed" if tier == "process" else "succeeded")
        found = client.post(f"/v1/workspaces/{workspace}/tools/grep", json={"pattern": "needle"}).json()
        assert found["result"]["content"][0]["text"] == "a.txt:1: needle"


def test_the_version_says_what_runs(client: httpx2.Client) -> None:
    version = client.get("/version").json()
    assert version["name"] == "toolcrib"
    assert version["version"] == __version__
    assert version["database"] == "sqlite"
    assert version["tools"] == ["read", "write", "edit", "bash", "powershell", "grep", "find", "ls"]
    assert version["ripgrep"].startswith("15.")
    assert version["powershell"] is (shutil.which("pwsh") is not None)


def test_the_docs_page_needs_nothing_from_elsewhere(client: httpx2.Client) -> None:
    page = client.get("/docs")
    policy = page.headers["content-security-policy"]
    assert "default-src 'none'" in policy
    assert "script-src 'self'" in policy
    assert "unsafe" not in policy
    wanted = re.findall(r'(?:src|href)="([^"]+)"', page.text)
    assert sorted(wanted) == ["/docs/docs.css", "/docs/docs.js", "/openapi.json"]
    for path in wanted:
        assert client.get(path).status_code == 200
    for text in (page.text, client.get("/docs/docs.js").text, client.get("/docs/docs.css").text):
        assert not re.search(r"https?://", text)
    # A policy that allows no inline script or style would stop them.
    assert not re.search(r"<script(?![^>]* src=)|<style| style=| on[a-z]+=", page.text)


def test_the_root_leads_to_the_docs(client: httpx2.Client) -> None:
    response = client.get("/", follow_redirects=False)
    assert (response.status_code, response.headers["location"]) == (307, "/docs")


@pytest.mark.parametrize("path", ["/healthz", "/readyz", "/version"])
def test_an_unknown_parameter_does_not_matter_where_no_key_is_needed(client: httpx2.Client, path: str) -> None:
    assert client.get(path, params={"cachebuster": "1"}).status_code == 200


def test_a_service_that_can_store_nothing_more_ends_and_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(_group: object) -> None:
        raise RuntimeError("the writer's thread dies of this")

    with ServerThread(tmp_path / "data") as server, server.client() as client:
        workspace = client.post("/v1/workspaces", json={}).json()
        path = f"/v1/workspaces/{workspace['id']}/batches"
        client.post(path, json={"calls": [{"name": "bash", "arguments": {"command": "sleep 60"}}]})
        monkeypatch.setattr(server.services.batches._storage, "apply", broken)
        response = client.post(path, json={"calls": [{"name": "read", "arguments": {"path": "x"}}]})
        assert response.status_code in {500, 503}
        assert server.services.readiness.broken
        assert server.call(server.services.readiness.checks())["writer"] == "nothing can be stored any more"
        server._thread.join(12)
        assert not server._thread.is_alive()
