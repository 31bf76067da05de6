"""One real server for the tests of a module; a test that stops or breaks a server starts its own.

Not one for all modules: tests of other directories in the same process count its threads' descriptors.
"""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx2
import pytest

from tests.support.server import ServerThread


@pytest.fixture(scope="module")
def adoptable(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory below which the server lets callers adopt one."""
    return tmp_path_factory.mktemp("adoptable")


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory, adoptable: Path) -> Iterator[ServerThread]:
    data_dir = tmp_path_factory.mktemp("service") / "data"
    with ServerThread(data_dir, workspace_roots=(adoptable,)) as running:
        yield running


@pytest.fixture(scope="module")
def client(server: ServerThread) -> Iterator[httpx2.Client]:
    with server.client() as opened:
        yield opened


@pytest.fixture
def make_workspace(client: httpx2.Client) -> Callable[..., dict[str, Any]]:
    def make(**body: Any) -> dict[str, Any]:
        response = client.post("/v1/workspaces", json=body)
        assert response.status_code == 201, response.text
        made: dict[str, Any] = response.json()
        return made

    return make


@pytest.fixture
def workspace(make_workspace: Callable[..., dict[str, Any]]) -> dict[str, Any]:
    return make_workspace(files={"task.txt": "status: draft", "b.txt": "two\n"})


@pytest.fixture
def batches(workspace: dict[str, Any]) -> str:
    """The path batches of the test's workspace are posted to."""
    return f"/v1/workspaces/{workspace['id']}/batches"
