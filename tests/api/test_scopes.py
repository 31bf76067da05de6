"""Who may do what: every operation of the OpenAPI document, asked with every kind of key."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack

import httpx2
import pytest

from app.domain.audit import SERVICE
from app.domain.caller import SCOPES, Scope
from app.domain.ids import new_id
from app.services.keys import KeyRequest
from tests.api.problems import assert_problem
from tests.support.api_operations import Operation, operations
from tests.support.server import ServerThread

# The scope that each operation takes; of those that call tools, the one for `read`. None: no key is needed. An
# operation that is not here fails the test: decide who may use it, then add it.
NEEDED: dict[str, Scope | None] = {
    "headHealth": None,
    "getHealth": None,
    "headReady": None,
    "getReady": None,
    "getVersion": None,
    "getMetrics": "admin",
    "listTools": "read",
    "getTool": "read",
    "listWorkspaces": "read",
    "getWorkspace": "read",
    "listWorkspaceTools": "read",
    "headWorkspaceFeed": "read",
    "getWorkspaceFeed": "read",
    "getLimits": "read",
    "createWorkspace": "write",
    "updateWorkspace": "write",
    "deleteWorkspace": "write",
    "headFile": "read",
    "getFile": "read",
    "getTree": "read",
    "getArchive": "read",
    "putFile": "write",
    "postFiles": "write",
    "deleteFile": "write",
    "putArchive": "write",
    "createBatch": "read",
    "callTool": "read",
    "listBatches": "read",
    "getBatch": "read",
    "headEvents": "read",
    "getEvents": "read",
    "cancelBatch": "read",
    "listCalls": "read",
    "getCall": "read",
    "cancelCall": "read",
    "headOutput": "read",
    "getOutput": "read",
    "createUrlToken": "read",
    "listAuditEvents": "admin",
    "createKey": "admin",
    "listKeys": "admin",
    "revokeKey": "admin",
}
CALLS_TOOLS = {"createBatch", "callTool", "cancelBatch", "cancelCall"}
TOOLS: dict[str, Scope] = {
    "read": "read",
    "grep": "read",
    "find": "read",
    "ls": "read",
    "write": "write",
    "edit": "write",
    "bash": "exec",
    "powershell": "exec",
}


@pytest.fixture(scope="module")
def tokens(server: ServerThread) -> dict[str, str]:
    """A key with each single scope, one that was revoked, and one with all but `admin`; of one owner."""

    def make(*scopes: Scope) -> tuple[str, str]:
        key, token = server.call(server.services.keys.create(KeyRequest("k", scopes, "team"), by=SERVICE))
        return key.id, token

    made: dict[str, str] = {scope: make(scope)[1] for scope in SCOPES}
    revoked, made["revoked"] = make(*SCOPES)
    server.call(server.services.keys.revoke(revoked, by=SERVICE))
    made["team"] = make("read", "write", "exec")[1]
    return made


@pytest.fixture(scope="module")
def team(server: ServerThread, tokens: dict[str, str]) -> Iterator[httpx2.Client]:
    with server.client(tokens["team"]) as client:
        yield client


def ids_in(team: httpx2.Client) -> dict[str, str]:
    """Make what the ids in a path name, with a batch that has ended, and return the ids."""
    workspace = team.post("/v1/workspaces", json={"files": {"task.txt": "status: draft"}}).json()
    body = {"calls": [{"name": "read", "arguments": {"path": "task.txt"}}]}
    batch = team.post(f"/v1/workspaces/{workspace['id']}/batches?wait=20", json=body).json()
    return {
        "workspace_id": workspace["id"],
        "batch_id": batch["id"],
        "call_id": batch["calls"][0]["id"],
        "key_id": new_id("key"),
        "path": "task.txt",
        "tool": "read",
    }


def all_operations(server: ServerThread) -> list[Operation]:
    with server.client(key=None) as client:
        return operations(client.get("/openapi.json").json())


def test_the_table_names_every_operation_and_no_other(server: ServerThread) -> None:
    assert {operation.id for operation in all_operations(server)} == set(NEEDED)


def test_the_document_says_what_the_table_says(server: ServerThread) -> None:
    for operation in all_operations(server):
        needed = NEEDED[operation.id]
        said = [way["apiKey"] for way in operation.security if "apiKey" in way]
        if operation.id in CALLS_TOOLS:
            assert said == [["read"], ["write"], ["exec"]], operation.id
        else:
            assert said == ([] if needed is None else [[needed]]), operation.id


def test_every_operation_takes_the_keys_of_the_table_and_refuses_all_others(
    server: ServerThread, tokens: dict[str, str], team: httpx2.Client
) -> None:
    shared = ids_in(team)

    def ask(operation: Operation) -> None:
        needed = NEEDED[operation.id]
        ids = ids_in(team) if operation.method == "DELETE" else shared
        answer = operation.send(clients["nobody"], ids)
        assert (answer.status_code != 401) is (needed is None), (operation.id, answer.status_code)
        if needed is None:
            return
        assert operation.send(clients["revoked"], ids).status_code == 401, operation.id
        for scope in SCOPES:
            if scope == needed:
                continue
            answer = operation.send(clients[scope], ids)
            assert answer.status_code == 403, (operation.id, scope, answer.status_code)
            if operation.method == "HEAD":
                continue
            lacking = "read or write or exec" if operation.id in CALLS_TOOLS and scope == "admin" else needed
            problem = answer.json()
            assert (problem["code"], problem["scope"]) == ("forbidden", lacking), operation.id
            assert lacking in problem["detail"]
        # The one that is allowed comes last, as it may remove what it is about.
        answer = operation.send(clients[needed], ids)
        expected = {404} if operation.id == "revokeKey" else {200, 201, 202, 204}
        assert answer.status_code in expected, (operation.id, answer.status_code, answer.text)

    with ExitStack() as stack:
        clients = {name: stack.enter_context(server.client(token)) for name, token in tokens.items()}
        clients["nobody"] = stack.enter_context(server.client(key=None))
        with ThreadPoolExecutor(8) as pool:  # an unknown key waits until the keys are read again: side by side
            list(pool.map(ask, all_operations(server)))


@pytest.mark.parametrize("scope", ["read", "write", "exec"])
def test_a_tool_is_called_with_its_scope_alone_and_otherwise_nothing_is_stored(
    server: ServerThread, tokens: dict[str, str], team: httpx2.Client, scope: Scope
) -> None:
    workspace = ids_in(team)["workspace_id"]
    listing = f"/v1/workspaces/{workspace}/batches"
    before = team.get(listing).json()
    with server.client(tokens[scope]) as client:
        for tool, needed in TOOLS.items():
            body = {"calls": [{"name": "no_such_tool", "arguments": {}}, {"name": tool, "arguments": {}}]}
            answers = [client.post(listing, json=body), client.post(f"/v1/workspaces/{workspace}/tools/{tool}")]
            for answer in answers:
                if needed != scope:
                    problem = assert_problem(answer, "forbidden", scope=needed)
                    assert f"the tool {tool}" in problem["detail"]
                    continue
                assert answer.status_code in {200, 202}, answer.text
                before = None
        if before is not None:
            assert team.get(listing).json() == before


def test_all_tools_are_in_the_table(server: ServerThread) -> None:
    assert set(server.services.tools.names) == set(TOOLS)


def test_an_unknown_tool_is_a_result_whatever_the_scope(server: ServerThread, tokens: dict[str, str]) -> None:
    body = {"calls": [{"name": "no_such_tool", "arguments": {}}]}
    with server.client(tokens["team"]) as team, server.client(tokens["exec"]) as client:
        workspace = team.post("/v1/workspaces").json()["id"]
        batch = client.post(f"/v1/workspaces/{workspace}/batches?wait=20", json=body).json()
    assert batch["calls"][0]["error"]["code"] == "unknown_tool"


def test_who_may_not_call_a_tool_may_not_cancel_its_call(
    server: ServerThread, tokens: dict[str, str], team: httpx2.Client
) -> None:
    workspace = ids_in(team)["workspace_id"]
    body = {"calls": [{"name": "bash", "arguments": {"command": "sleep 60"}}]}
    batch = team.post(f"/v1/workspaces/{workspace}/batches", json=body).json()
    paths = [f"/v1/calls/{batch['calls'][0]['id']}/cancel", f"/v1/batches/{batch['id']}/cancel"]
    for path in paths:
        with server.client(tokens["read"]) as client:
            assert_problem(client.post(path), "forbidden", scope="exec")
    assert team.get(f"/v1/batches/{batch['id']}").json()["status"] in {"queued", "running"}
    with server.client(tokens["exec"]) as client:
        for path in paths:
            assert client.post(path).status_code in {200, 202}
    assert team.get(f"/v1/batches/{batch['id']}?wait=20").json()["calls"][0]["status"] == "cancelled"
