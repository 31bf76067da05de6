"""A service of root that was started where nobody else can reach: its workspaces stand elsewhere."""

import os
from pathlib import Path

import pytest

from app import groundwork, main
from app.domain.workspace import WorkspaceOptions
from app.services.workspaces import WorkspaceRequest
from app.settings import Settings
from tests.support.users import NOBODY

pytestmark = [pytest.mark.anyio, pytest.mark.skipif(os.geteuid() != 0, reason="only root acts as others")]


async def test_workspaces_stand_elsewhere_and_the_database_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkout, elsewhere = tmp_path / "home" / "checkout", tmp_path / "lib"
    checkout.mkdir(parents=True)
    checkout.parent.chmod(0o700)
    monkeypatch.chdir(checkout)
    monkeypatch.setattr(groundwork, "ELSEWHERE", elsewhere)
    for name in [name for name in os.environ if name.startswith("TOOLCRIB_")]:
        monkeypatch.delenv(name)
    request = WorkspaceRequest(None, {}, WorkspaceOptions(), {"a": b"x"}, None, trusted=True, root=None)
    roots = []
    for _ in range(2):
        async with main.running(Settings()) as services:
            assert set((await services.readiness.checks()).values()) == {"ok"}
            made = await services.workspaces.create(request, owner="env")
            roots.append(Path(made.workspace.root))
    assert {"ballast", "lock", "node", "toolcrib.db"} <= set(os.listdir(checkout / "data"))  # noqa: PTH208 - a loop runs
    assert roots[0].parent == roots[1].parent
    assert roots[0].is_relative_to(elsewhere)
    for root in roots:
        assert ((root / "a").stat().st_uid, root.stat().st_mode & 0o777) == (NOBODY, 0o700)
