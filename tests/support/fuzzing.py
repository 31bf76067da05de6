"""Requests that the OpenAPI document allows, and many that it does not, for tests and for `make fuzz`.

Schemathesis makes them and checks every answer: no 5xx, no status, header or body that is not documented, nothing
refused that fits and nothing taken that does not.
"""

import json
from collections.abc import Collection
from pathlib import Path
from typing import Any
from urllib.parse import quote

import httpx2
import schemathesis
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis.stateful import run_state_machine_as_test
from jsonschema import Draft202012Validator
from schemathesis.checks import not_a_server_error
from schemathesis.config import SchemathesisConfig
from schemathesis.schemas import BaseSchema
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    ignored_auth,
    positive_data_acceptance,
    response_headers_conformance,
    response_schema_conformance,
    status_code_conformance,
)

from app.domain.ids import new_id
from app.domain.json_codec import JsonValueError, parse
from tests.support.server import KEY

DOCUMENT = json.loads((Path(__file__).parents[1] / "api" / "snapshots" / "openapi.json").read_text())
OPERATIONS: dict[str, dict[str, Any]] = {
    operation["operationId"]: operation for item in DOCUMENT["paths"].values() for operation in item.values()
}
CASES = [
    (name, mode)
    for name, operation in sorted(OPERATIONS.items())
    for mode in schemathesis.GenerationMode
    # Any part of a form is a file, so no form is wrong; what takes nothing cannot be asked wrongly.
    if mode is schemathesis.GenerationMode.POSITIVE
    or (bool(operation.get("parameters") or "requestBody" in operation) and name != "postFiles")
]
URL_MAX = 16_000  # what is longer does not reach the application
# A glob with an open brace, bytes that are no archive, a time that is over, a URL that no token opens: each fits the
# document and cannot be served all the same.
MEANING = {"getArchive", "putArchive", "createKey", "createUrlToken"}
# The feed of a workspace that is there has no end: it is asked for of workspaces that are not.
ENDLESS = {"getWorkspaceFeed"}
# What says how long a request is: the server below the application reads it, and answers in its own way.
FRAMING = {"transfer-encoding", "content-length"}
# What is called in walks: no commands, and nothing that a workspace does not hold.
TOOLS = ("read", "write", "edit", "ls", "find", "grep", "nothing")
ANSWERS = [
    not_a_server_error,
    status_code_conformance,
    content_type_conformance,
    response_headers_conformance,
    response_schema_conformance,
]
ANSWER_SECONDS = 60

_SETTINGS: dict[str, Any] = {"database": None, "deadline": None, "suppress_health_check": list(HealthCheck)}


@schemathesis.serializer("application/x-tar", "application/gzip", "application/zip")
def raw(_context: schemathesis.SerializationContext, value: object) -> bytes:
    return value if isinstance(value, bytes) else str(value).encode("utf-8", "replace")


def load_schema(number: int) -> BaseSchema:
    """Return the committed document with everything random in it drawn from a seed."""
    # 400: a cursor that looks like one and is none. 404, 410: ids. 409: what is there already. 412: tags. 416: ranges.
    accepted = {"expected-statuses": ["2xx", "400", "404", "409", "410", "412", "416"]}
    # 410: some parameter may be sent in a way that is right again, when another case has deleted the known workspace.
    refused = {"expected-statuses": ["4xx"]}
    checks = {"positive_data_acceptance": accepted, "negative_data_rejection": refused}
    config = SchemathesisConfig.from_dict({"seed": number, "checks": checks})
    return schemathesis.openapi.from_dict(DOCUMENT, config=config)


def make_known(client: httpx2.Client) -> dict[str, str]:
    """Return ids and names that exist, for path parameters. No command can be run in this workspace."""
    body = {"options": {"tools": ["read", "write", "edit"]}, "files": {"task.txt": "status: draft"}}
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


def ask(
    schema: BaseSchema,
    url: str,
    known: dict[str, str],
    operation: str,
    mode: schemathesis.GenerationMode,
    *,
    examples: int,
    number: int | None = None,
) -> None:
    """Ask one operation in many ways; always the same ones when there is no `number` to draw them from.

    `known` are ids and names that exist, for path parameters.
    """
    found = schema.find_operation_by_id(operation)

    @given(case=found.as_strategy(generation_mode=mode))
    @settings(max_examples=examples, derandomize=number is None, **_SETTINGS)
    def run(case: schemathesis.Case) -> None:
        if not _can_be_said_in_json(case.body) or len(quote(str(case.query))) > URL_MAX:
            return
        if any(map(_vanishes, (case.query or {}).values())):
            return
        if mode is schemathesis.GenerationMode.POSITIVE:
            # No schema says which directories and encodings there are, what the server grants commands and workspaces at
            # most, which keys other requests had, nor that a file is no directory of another.
            if isinstance(case.body, dict):
                if _in_each_other(case.body.get("files") or {}):
                    return
                case.body.pop("root", None)
                options = case.body.get("options") or {}
                options.pop("quotaBytes", None)
                for group, name in (("read", "encoding"), ("bash", "limits"), ("powershell", "limits")):
                    (options.get(group) or {}).pop(name, None)
                if not _fits(operation, case.body):
                    return
            if "Idempotency-Key" in case.headers:
                case.headers["Idempotency-Key"] = new_id("req")
        for name in {name for name in case.headers if name.lower() in FRAMING}:
            del case.headers[name]
        parameters = case.path_parameters or {}
        if case.method != "DELETE" and operation not in ENDLESS and sum(map(ord, str(parameters))) % 4:
            for name in parameters.keys() & known.keys():
                parameters[name] = known[name]
        case.call_and_validate(
            base_url=url,
            headers={"Authorization": f"Bearer {KEY}"},
            # An unknown key waits until the keys are read again, and this check sends one with every case:
            # tests/api/test_scopes.py asks each operation once, without a key and with one that works no more.
            excluded_checks=[ignored_auth, *([positive_data_acceptance] if operation in MEANING else [])],
            timeout=ANSWER_SECONDS,
        )

    (run if number is None else seed(number)(run))()


def walk(schema: BaseSchema, url: str, *, walks: int, steps: int, number: int | None = None) -> int:
    """Go from answer to request along the document's links, and return how many requests were sent.

    Each walk makes something and uses what it made: workspaces, batches, calls.
    """
    machine = schema.exclude(operation_id=sorted(ENDLESS)).as_state_machine()
    asked = 0

    class Walk(machine):  # type: ignore[misc, valid-type]
        def before_call(self, case: schemathesis.Case) -> None:
            _tame(case)

        def get_call_kwargs(self, _case: schemathesis.Case) -> dict[str, Any]:
            return {"base_url": url, "headers": {"Authorization": f"Bearer {KEY}"}, "timeout": ANSWER_SECONDS}

        def validate_response(self, response: Any, case: schemathesis.Case, **_options: Any) -> None:
            nonlocal asked
            asked += 1
            case.validate_response(response, checks=ANSWERS)

    run_state_machine_as_test(
        Walk if number is None else seed(number)(Walk),
        settings=settings(
            max_examples=walks,
            stateful_step_count=steps,
            derandomize=number is None,
            phases=[Phase.generate],
            **_SETTINGS,
        ),
    )
    return asked


def _tame(case: schemathesis.Case) -> None:
    """Keep a walk inside its workspace, and make of the calls it draws some that do something."""
    body = case.body
    if not isinstance(body, dict):
        return
    if case.operation.definition.raw["operationId"] in {"createWorkspace", "updateWorkspace"}:
        body.pop("root", None)
        if isinstance(options := body.get("options"), dict):
            options.pop("containment", None)
        body["files"] = {"task.txt": "status: draft\n", "docs/a.md": "# A\n"}
        if case.method == "PATCH":
            del body["files"]
    for number, call in enumerate(calls if isinstance(calls := body.get("calls"), list) else []):
        if isinstance(call, dict) and isinstance(call.get("name"), str):
            call["name"] = TOOLS[(number + len(call["name"])) % len(TOOLS)]
            if number % 2 and isinstance(call.get("arguments"), dict):
                call["arguments"] = {"path": "task.txt", **call["arguments"]}


def _fits(operation: str, body: object) -> bool:
    """Whether a body fits its schema: of names of files, the generator makes some that do not match the pattern."""
    content = OPERATIONS[operation].get("requestBody", {}).get("content", {})
    schema = content.get("application/json", {}).get("schema", {})
    return Draft202012Validator({**schema, "components": DOCUMENT["components"]}).is_valid(body)


def _vanishes(value: object) -> bool:
    """Whether a value of a query does not get into the URL, and with it what was wrong about it."""
    members = value.values() if isinstance(value, dict) else value if isinstance(value, list) else None
    return value is None if members is None else all(map(_vanishes, members))


def _in_each_other(files: Collection[str]) -> bool:
    """Whether one of some paths is a directory of another."""
    names = [path.strip("/").split("/") for path in files]
    return any(name != other and name == other[: len(name)] for name in names for other in names)


def _can_be_said_in_json(body: object) -> bool:
    """Whether the body holds no value that no schema can rule out and that is refused: 65 bits, half a character."""
    try:
        parse(json.dumps(body).encode())
    except JsonValueError:
        return False
    except TypeError:  # no body, or raw bytes
        return True
    return True
