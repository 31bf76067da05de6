import json
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx2
import pytest
from fastapi import FastAPI
from jsonschema import Draft202012Validator

from app.api import openapi
from app.api.errors import KINDS
from app.domain.events import EventType
from app.main import create_app
from app.settings import Settings
from tests.support.server import ServerThread, event_stream

SNAPSHOT = Path(__file__).parent / "snapshots" / "openapi.json"
METHODS = {"get", "head", "post", "patch", "delete", "put"}


@pytest.fixture(scope="module")
def document(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return create_app(Settings(data_dir=tmp_path_factory.mktemp("unused"))).openapi()


def test_the_document_is_made_once_and_not_before_somebody_asks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = 0
    build = openapi._build

    def count(app: FastAPI) -> dict[str, Any]:
        nonlocal made
        made += 1
        return build(app)

    monkeypatch.setattr(openapi, "_build", count)
    with ServerThread(tmp_path / "data") as server, server.client() as client, ThreadPoolExecutor(4) as pool:
        assert client.get("/version").status_code == 200
        assert made == 0
        texts = set(pool.map(lambda _: client.get("/openapi.json").text, range(4)))
    assert (len(texts), made) == (1, 1)


def operations(document: dict[str, Any]) -> list[tuple[str, str, dict[str, Any]]]:
    return [(path, method, item[method]) for path, item in document["paths"].items() for method in item]


def test_the_contract_changes_on_purpose_alone(document: dict[str, Any]) -> None:
    """After a change that is meant: UPDATE_SNAPSHOTS=1 pytest tests/api/test_openapi.py, and read the diff."""
    text = json.dumps(document, indent=1, ensure_ascii=False, sort_keys=True) + "\n"
    if os.environ.get("UPDATE_SNAPSHOTS"):
        SNAPSHOT.parent.mkdir(exist_ok=True)
        SNAPSHOT.write_text(text)
    assert json.loads(SNAPSHOT.read_text()) == document


def test_it_is_openapi_3_1_and_served_as_it_is(document: dict[str, Any], client: httpx2.Client) -> None:
    assert document["openapi"].startswith("3.1")
    assert client.get("/openapi.json").json() == document


def test_every_operation_has_an_id_of_its_own_a_tag_and_a_summary(document: dict[str, Any]) -> None:
    found = operations(document)
    ids = [operation["operationId"] for _, _, operation in found]
    assert len(set(ids)) == len(ids)
    for path, method, operation in found:
        assert method in METHODS
        assert operation["operationId"].isidentifier()
        assert len(operation["tags"]) == 1, path
        assert operation["summary"]
    assert {tag["name"] for tag in document["tags"]} == {operation["tags"][0] for _, _, operation in found}


def test_what_needs_a_key_says_so(document: dict[str, Any]) -> None:
    for path, _, operation in operations(document):
        assert ("security" in operation) is (path.startswith("/v1/") or path == "/metrics"), path
        if "security" in operation:
            assert {"401", "403", "422", "429", "503"} <= set(operation["responses"])


def test_every_error_is_a_problem_and_fastapis_own_shape_is_nowhere(document: dict[str, Any]) -> None:
    statuses = {str(kind.status) for kind in KINDS.values()}
    for path, method, operation in operations(document):
        for status, response in operation["responses"].items():
            assert "X-Request-ID" in response["headers"]
            if status >= "400":
                assert status in statuses
                assert set(response["content"]) == {"application/problem+json"}, (path, method, status)
            elif status not in {"204", "304"}:
                assert response["content"], (path, method, status)
    assert "HTTPValidationError" not in json.dumps(document)


def test_every_reference_leads_somewhere_and_every_schema_is_one(document: dict[str, Any]) -> None:
    def references(value: Any) -> set[str]:
        if isinstance(value, dict):
            own = {value["$ref"]} if isinstance(value.get("$ref"), str) else set()
            return own.union(*map(references, value.values()))
        return set().union(*map(references, value)) if isinstance(value, list) else set()

    schemas = document["components"]["schemas"]
    assert references(document) == {f"#/components/schemas/{name}" for name in schemas}
    for schema in schemas.values():
        Draft202012Validator.check_schema(schema)


def test_every_json_body_has_examples_and_they_fit(document: dict[str, Any]) -> None:
    found = 0
    for path, method, operation in operations(document):
        media = operation.get("requestBody", {}).get("content", {}).get("application/json")
        if media is None:
            continue
        found += 1
        assert media.get("examples"), (method, path)
        schema = {**media["schema"], "components": document["components"]}
        for example in media["examples"].values():
            Draft202012Validator(schema).validate(example["value"])
    assert found >= 4


@pytest.mark.parametrize("updates", ["delta", "snapshot"])
def test_every_event_fits_the_schema_of_its_type(document: dict[str, Any], tmp_path: Path, updates: str) -> None:
    calls = [
        {"name": "read", "arguments": {"path": "x" * 9000}},
        {"name": "bash", "arguments": {"command": "head -c 4000 /dev/zero | tr '\\0' x"}},
        {"name": "edit", "arguments": {"path": "a.txt", "edits": [{"oldText": "a", "newText": "b"}]}},
    ]
    options = {"bash": {"captureBytes": 1000}, "edit": {"multipleMatches": "first"}}
    with ServerThread(tmp_path / "data") as server, server.client() as client:
        made = client.post("/v1/workspaces", json={"options": options, "files": {"a.txt": "a a"}})
        path = f"/v1/workspaces/{made.json()['id']}/batches?updates={updates}"
        with event_stream(client, "POST", path, json={"calls": calls}) as (_, stream):
            events = list(stream)
    schemas = document["components"]["schemas"]
    kinds = set()
    for event in events:
        [name] = [
            name
            for name, schema in schemas.items()
            if schema.get("properties", {}).get("type", {}).get("const") == event.type
            and schema["properties"].get("kind", {}).get("const") == event.data.get("kind")
        ]
        # Closed for this test, so that a member without a line in the schema is found.
        schema = {**schemas[name], "additionalProperties": False, "components": document["components"]}
        Draft202012Validator(schema).validate(event.data)
        kinds.add(name)
    assert kinds == {
        "BatchStartEvent",
        "ToolExecutionStartEvent",
        {"delta": "DeltaEvent", "snapshot": "SnapshotEvent"}[updates],
        "PartialEvent",
        "OutputGapEvent",
        "ToolExecutionEndEvent",
        "BatchEndEvent",
    }


def test_every_type_of_event_has_a_schema(document: dict[str, Any]) -> None:
    schemas = document["components"]["schemas"]
    types = {
        schemas[reference["$ref"].rpartition("/")[2]]["properties"]["type"]["const"]
        for reference in schemas["EventDataBody"]["anyOf"]
    }
    assert types == set(EventType)
    assert schemas["EventBody"]["properties"]["data"]["contentSchema"] == {"$ref": "#/components/schemas/EventDataBody"}
