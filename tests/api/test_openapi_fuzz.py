"""The running service is asked what its own OpenAPI document says, and a lot that it does not.

Schemathesis checks every answer: no 5xx, no status, header or body that is not documented, nothing refused that fits
and nothing taken that does not. The cases are the same every time.
"""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import schemathesis
from hypothesis import HealthCheck, given, settings
from jsonschema import Draft202012Validator
from schemathesis.config import SchemathesisConfig
from schemathesis.schemas import BaseSchema
from schemathesis.specs.openapi.checks import positive_data_acceptance

from app.domain.ids import new_id
from app.domain.json_codec import JsonValueError, parse
from tests.support.server import KEY, ServerThread

EXAMPLES = 10
URL_MAX = 16_000  # what is longer does not reach the application
# A glob with an open brace and bytes that are no archive fit the document and cannot be served all the same.
MEANING = {"getArchive", "putArchive"}
# The feed of a workspace that is there has no end.
ENDLESS = {"getWorkspaceFeed"}
DOCUMENT = json.loads((Path(__file__).parent / "snapshots" / "openapi.json").read_text())
OPERATIONS = {
    operation["operationId"]: bool(operation.get("parameters") or "requestBody" in operation)
    for item in DOCUMENT["paths"].values()
    for operation in item.values()
}
BODIES = {
    operation["operationId"]: operation["requestBody"]["content"]["application/json"]["schema"]
    for item in DOCUMENT["paths"].values()
    for operation in item.values()
    if "application/json" in operation.get("requestBody", {}).get("content", {})
}
CASES = [
    pytest.param(name, mode, id=f"{name}-{mode.value}")
    for name, takes_something in sorted(OPERATIONS.items())
    for mode in schemathesis.GenerationMode
    # Any part of a form is a file, so no form is wrong.
    if mode is schemathesis.GenerationMode.POSITIVE or (takes_something and name != "postFiles")
]


@schemathesis.serializer("application/x-tar", "application/gzip", "application/zip")
def raw(_context: schemathesis.SerializationContext, value: object) -> bytes:
    return value if isinstance(value, bytes) else str(value).encode("utf-8", "replace")


@pytest.fixture(scope="module")
def fuzzed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerThread]:
    with ServerThread(
        tmp_path_factory.mktemp("fuzzed") / "data", allow_unrestricted=True, allow_network=True
    ) as server:
        yield server


@pytest.fixture(scope="module")
def known(fuzzed: ServerThread) -> dict[str, str]:
    """Ids and names that exist, for path parameters. No command can be run in this workspace."""
    with fuzzed.client() as client:
        options = {"tools": ["read", "write", "edit"]}
        body = {"options": options, "files": {"task.txt": "status: draft"}}
        workspace = client.post("/v1/workspaces", json=body).json()
        batch = client.post(
            f"/v1/workspaces/{workspace['id']}/batches",
            json={"calls": [{"name": "read", "arguments": {"path": "task.txt"}}]},
            params={"wait": "10"},
        ).json()
    return {
        "workspace_id": workspace["id"],
        "batch_id": batch["id"],
        "call_id": batch["calls"][0]["id"],
        "tool": "read",
    }


@pytest.fixture(scope="module")
def schema() -> BaseSchema:
    # 400: a cursor that looks like one and is none. 404, 410: ids. 409: what is there already. 412: tags. 416: ranges.
    accepted = {"expected-statuses": ["2xx", "400", "404", "409", "410", "412", "416"]}
    config = SchemathesisConfig.from_dict({"seed": 1, "checks": {"positive_data_acceptance": accepted}})
    return schemathesis.openapi.from_dict(DOCUMENT, config=config)


@pytest.mark.parametrize(("operation", "mode"), CASES)
def test_every_answer_is_a_documented_one(
    schema: BaseSchema, fuzzed: ServerThread, known: dict[str, str], operation: str, mode: schemathesis.GenerationMode
) -> None:
    found = schema.find_operation_by_id(operation)

    @given(case=found.as_strategy(generation_mode=mode))
    @settings(
        max_examples=EXAMPLES, derandomize=True, database=None, deadline=None, suppress_health_check=list(HealthCheck)
    )
    def ask(case: schemathesis.Case) -> None:
        if not _can_be_said_in_json(case.body) or len(str(case.query)) > URL_MAX:
            return
        if mode is schemathesis.GenerationMode.POSITIVE:
            # No schema says which directories and encodings there are, nor which keys other requests had.
            if isinstance(case.body, dict):
                case.body.pop("root", None)
                ((case.body.get("options") or {}).get("read") or {}).pop("encoding", None)
                if not _fits(operation, case.body):
                    return
            if "Idempotency-Key" in case.headers:
                case.headers["Idempotency-Key"] = new_id("req")
        parameters = case.path_parameters or {}
        if case.method != "DELETE" and operation not in ENDLESS and sum(map(ord, str(parameters))) % 4:
            for name in parameters.keys() & known.keys():
                parameters[name] = known[name]
        case.call_and_validate(
            base_url=fuzzed.url,
            headers={"Authorization": f"Bearer {KEY}"},
            excluded_checks=[positive_data_acceptance] if operation in MEANING else [],
            timeout=20,
        )

    ask()


def _fits(operation: str, body: object) -> bool:
    """Whether a body fits its schema: of names of files, the generator makes some that do not match the pattern."""
    schema = BODIES.get(operation, {})
    return Draft202012Validator({**schema, "components": DOCUMENT["components"]}).is_valid(body)


def _can_be_said_in_json(body: object) -> bool:
    """Whether the body holds no value that no schema can rule out and that is refused: 65 bits, half a character."""
    try:
        parse(json.dumps(body).encode())
    except JsonValueError:
        return False
    except TypeError:  # no body, or raw bytes
        return True
    return True
