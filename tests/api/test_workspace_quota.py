"""What a workspace may hold: told before a write, an upload, an archive or a command, and seen after commands."""

import io
import os
import tarfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx2
import pytest

from tests.support.server import ServerThread, eventually
from tests.support.users import NOBODY

MOST = 2_000_000
Make = Callable[..., str]


@pytest.fixture(scope="module")
def adoptable(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("adoptable")


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory, adoptable: Path) -> Iterator[httpx2.Client]:
    data_dir = tmp_path_factory.mktemp("quota") / "data"
    with (
        ServerThread(data_dir, workspace_bytes=MOST, workspace_roots=(adoptable,)) as server,
        server.client() as opened,
    ):
        yield opened


@pytest.fixture
def make(client: httpx2.Client) -> Make:
    def make_workspace(**body: Any) -> str:
        answer = client.post("/v1/workspaces", json=body)
        assert answer.status_code == 201, answer.text
        return f"/v1/workspaces/{answer.json()['id']}"

    return make_workspace


def call(client: httpx2.Client, place: str, tool: str, **arguments: Any) -> dict[str, Any]:
    answer = client.post(f"{place}/tools/{tool}?wait=60", json=arguments)
    assert answer.status_code == 200, answer.text
    ended: dict[str, Any] = answer.json()
    return ended


def text(ended: dict[str, Any]) -> str:
    return str(ended["result"]["content"][0]["text"])


def test_a_write_that_does_not_fit_says_what_there_is_and_changes_nothing(client: httpx2.Client, make: Make) -> None:
    place = make()
    assert call(client, place, "write", path="a", content="x" * 1_500_000)["status"] == "succeeded"
    refused = call(client, place, "write", path="b", content="x" * 1_000_000)
    assert refused["error"]["code"] == "no_space"
    details = refused["result"]["details"]
    assert details["maxBytes"] == MOST
    assert 1_500_000 <= details["usedBytes"] < 1_600_000
    assert f"holds {details['usedBytes']} bytes and may hold {MOST}: 1000000 more do not fit" in text(refused)
    assert client.get(f"{place}/files/b").status_code == 404
    # Less than there was fits, and what it leaves free can be used.
    assert call(client, place, "write", path="a", content="x")["status"] == "succeeded"
    assert call(client, place, "write", path="b", content="x" * 1_000_000)["status"] == "succeeded"


def test_limits_tell_the_quota_and_what_a_workspace_holds(client: httpx2.Client, make: Make) -> None:
    place = make()
    workspace_id = place.rpartition("/")[2]
    told = client.get(f"/v1/limits?workspace={workspace_id}").json()
    assert (told["workspaces"]["bytes"], told["use"]["workspace"]["bytes"]) == (MOST, None)
    call(client, place, "write", path="a", content="x" * 500_000)
    told = client.get(f"/v1/limits?workspace={workspace_id}").json()
    assert 500_000 <= told["use"]["workspace"]["bytes"] < 600_000
    commands = told["commands"]
    assert (commands["processes"], commands["openFiles"], commands["network"]) == (1_024, 4_096, False)


def test_an_edit_that_does_not_fit_changes_nothing(client: httpx2.Client, make: Make) -> None:
    place = make(files={"a": "x"})
    edits = [{"oldText": "x", "newText": "y" * 2_500_000}]
    refused = call(client, place, "edit", path="a", edits=edits)
    assert refused["error"]["code"] == "no_space"
    assert client.get(f"{place}/files/a").content == b"x"


def test_an_upload_is_stopped_where_it_no_longer_fits(client: httpx2.Client, make: Make) -> None:
    place = make()
    refused = client.put(f"{place}/files/a", content=b"x" * 8_000_000)
    assert (refused.status_code, refused.json()["code"]) == (507, "no_space")
    assert "may hold 2000000" in refused.json()["detail"]
    assert client.get(f"{place}/tree").json()["data"] == []
    # What was counted for it counts no more.
    assert client.put(f"{place}/files/a", content=b"x" * 1_500_000).status_code == 201
    assert client.put(f"{place}/files/a", content=b"x" * 1_500_000).status_code == 507  # both stand for a moment
    assert client.delete(f"{place}/files/a").status_code == 204
    assert client.put(f"{place}/files/a", content=b"x" * 1_500_000).status_code == 201


def test_an_archive_is_stopped_where_it_no_longer_fits(client: httpx2.Client, make: Make) -> None:
    place = make()
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz") as tar:
        for number in range(4):
            entry = tarfile.TarInfo(f"f{number}")
            entry.size = 900_000
            tar.addfile(entry, io.BytesIO(bytes(900_000)))
    refused = client.put(f"{place}/archive?format=tar.gz", content=buffer.getvalue())
    assert refused.status_code == 507, refused.text
    assert refused.json()["applied"] == ["f0", "f1"]
    assert client.put(f"{place}/files/small", content=b"x" * 100_000).status_code == 201


def test_files_of_a_new_workspace_have_to_fit(client: httpx2.Client) -> None:
    refused = client.post("/v1/workspaces", json={"files": {"a": "x" * 2_000_001}})
    assert (refused.status_code, refused.json()["code"]) == (507, "no_space")


def test_what_commands_write_and_remove_is_seen(client: httpx2.Client, make: Make) -> None:
    place = make()
    filled = call(client, place, "bash", command="head -c 3000000 /dev/zero > big")
    assert filled["status"] == "succeeded"
    refused = call(client, place, "bash", command="touch ran")
    assert refused["error"]["code"] == "no_space"
    assert "no command runs until it holds less" in text(refused)
    assert refused["result"]["details"]["usedBytes"] >= 3_000_000
    assert call(client, place, "write", path="other", content="x" * 100)["error"]["code"] == "no_space"
    assert call(client, place, "read", path="big")["error"]["code"] != "no_space"
    assert call(client, place, "write", path="big", content="")["status"] == "succeeded"
    assert call(client, place, "bash", command="ls")["status"] == "succeeded"
    assert client.get(f"{place}/files/ran").status_code == 404


def test_a_command_that_fills_the_workspace_while_it_runs_is_stopped(client: httpx2.Client, make: Make) -> None:
    place = make()
    ended = call(client, place, "bash", command="head -c 3000000 /dev/zero > big; echo full; sleep 60", timeout=60_000)
    assert ended["error"]["code"] == "no_space", ended
    assert text(ended).startswith("full\n")
    assert "Command stopped: the workspace holds" in text(ended)
    assert ended["result"]["details"]["stdout"] == "full\n"


def test_a_workspace_can_ask_for_less_and_not_for_more(client: httpx2.Client, make: Make) -> None:
    place = make(options={"quotaBytes": 100_000})
    assert call(client, place, "write", path="a", content="x" * 150_000)["error"]["code"] == "no_space"
    refused = client.post("/v1/workspaces", json={"options": {"quotaBytes": MOST + 1}})
    assert refused.status_code == 422
    assert refused.json()["errors"][0]["pointer"] == "#/options/quotaBytes"
    assert "TOOLCRIB_WORKSPACE_BYTES" in refused.json()["errors"][0]["message"]


def test_an_adopted_directory_has_the_quota_it_asks_for_alone(
    client: httpx2.Client, make: Make, adoptable: Path
) -> None:
    free, bounded = adoptable / "free", adoptable / "bounded"
    free.mkdir()
    bounded.mkdir()
    if os.geteuid() == 0:  # a directory of root need not be adopted
        os.chown(free, NOBODY, NOBODY)
        os.chown(bounded, NOBODY, NOBODY)
    place = make(root=str(free))
    assert call(client, place, "write", path="a", content="x" * 3_000_000)["status"] == "succeeded"
    place = make(root=str(bounded), options={"quotaBytes": 3_000_000})
    assert call(client, place, "write", path="a", content="x" * 2_500_000)["status"] == "succeeded"
    assert call(client, place, "write", path="b", content="x" * 2_500_000)["error"]["code"] == "no_space"


def test_writes_at_once_do_not_add_up_to_more_than_fits(client: httpx2.Client, make: Make) -> None:
    place = make(options={"write": {"executionMode": "parallel"}})
    calls = [{"name": "write", "arguments": {"path": f"f{n}", "content": "x" * 300_000}} for n in range(20)]
    batch = client.post(f"{place}/batches?wait=60", json={"calls": calls}).json()
    assert batch["summary"]["succeeded"] in {5, 6}
    assert {c["error"]["code"] for c in batch["calls"] if c["error"]} == {"no_space"}
    eventually(lambda: client.get(f"{place}/tree").json()["data"])
