from collections.abc import Callable
from typing import Any

import httpx2
import pytest

from app.tools.registry import all_tool_names
from tests.api.problems import assert_problem

FORMATS = ("native", "mcp", "openai", "openai-chat", "anthropic")


def names(response: httpx2.Response) -> list[str]:
    return [tool["name"] for tool in response.json()["data"]]


def test_the_tools_are_listed_by_set(client: httpx2.Client) -> None:
    response = client.get("/v1/tools")
    assert names(response) == list(all_tool_names)
    assert response.json()["nextCursor"] is None
    assert set(names(client.get("/v1/tools", params={"set": "coding"}))) == {"read", "bash", "edit", "write"}
    assert "read" in names(client.get("/v1/tools", params={"set": "readonly"}))
    assert not {"bash", "edit", "write"} & set(names(client.get("/v1/tools", params={"set": "readonly"})))


def test_a_definition_has_exactly_the_native_fields(client: httpx2.Client) -> None:
    for tool in client.get("/v1/tools").json()["data"]:
        assert set(tool) == {"name", "description", "parameters", "annotations", "executionMode"}
        assert set(tool["annotations"]) == {
            "title",
            "readOnlyHint",
            "destructiveHint",
            "idempotentHint",
            "openWorldHint",
        }
        assert tool["parameters"]["additionalProperties"] is False
        assert client.get(f"/v1/tools/{tool['name']}").json() == tool


@pytest.mark.parametrize("form", FORMATS)
def test_one_tool_takes_the_form_it_has_in_the_list(client: httpx2.Client, form: str) -> None:
    listed = client.get("/v1/tools", params={"format": form}).json()["data"]
    alone = [client.get(f"/v1/tools/{name}", params={"format": form}).json() for name in all_tool_names]
    assert listed == alone
    schema = {"native": "parameters", "mcp": "inputSchema", "openai": "parameters", "anthropic": "input_schema"}
    for tool in listed:
        assert (tool["function"] if form == "openai-chat" else tool)[schema.get(form, "parameters")]["type"] == "object"


def test_a_workspace_has_the_tools_and_limits_its_options_say(
    client: httpx2.Client, make_workspace: Callable[..., dict[str, Any]]
) -> None:
    workspace = make_workspace(
        options={"tools": ["read", "write"], "read": {"maxLines": 77, "executionMode": "sequential"}}
    )
    path = f"/v1/workspaces/{workspace['id']}/tools"
    response = client.get(path)
    assert names(response) == ["read", "write"]
    read = response.json()["data"][0]
    assert "77" in read["description"]
    assert read["executionMode"] == "sequential"
    assert names(client.get(path, params={"set": "readonly"})) == ["read"]
    body = {"calls": [{"name": "edit", "arguments": {"path": "x", "edits": []}}]}
    batch = client.post(f"/v1/workspaces/{workspace['id']}/batches", json=body, params={"wait": "10"}).json()
    assert batch["calls"][0]["error"]["code"] in {"blocked", "invalid_arguments"}


def test_what_is_not_there_is_told(client: httpx2.Client) -> None:
    assert_problem(client.get("/v1/tools/nothing"), "not_found")
    assert_problem(client.get("/v1/tools", params={"format": "xml"}), "invalid_request")
    assert_problem(client.get("/v1/tools", params={"set": "some"}), "invalid_request")
    assert_problem(client.get("/v1/workspaces/ws_01m8pk0mq7e71bgqe673033873/tools"), "not_found")
