"""A request for every operation of the OpenAPI document, so that what holds for all of them is tested with all."""

import io
import tarfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import httpx2

READ_TASK = {"calls": [{"id": "read-1", "name": "read", "arguments": {"path": "task.txt"}}]}


def _archive() -> bytes:
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w") as archive:
        archive.addfile(tarfile.TarInfo("empty.txt"))
    return packed.getvalue()


# What an operation needs besides the ids in its path. One that is missing here is asked with nothing.
REQUESTS: dict[str, dict[str, Any]] = {
    "createBatch": {"json": READ_TASK},
    "callTool": {"json": {"path": "task.txt"}},
    "createWorkspace": {"json": {"ttlSeconds": 3600}},
    "updateWorkspace": {"json": {"name": "changed"}},
    "putFile": {"content": b"changed"},
    "postFiles": {"files": {"file": ("form.txt", b"changed")}},
    "putArchive": {"content": _archive(), "params": {"format": "tar"}},
    "createUrlToken": {"json": {"url": "/v1/workspaces/{workspace_id}/files/task.txt"}},
    "createKey": {"json": {"name": "made by a test", "scopes": ["read"]}},
}


@dataclass(frozen=True)
class Operation:
    """One operation: its method, the template of its path and what the document says of it."""

    id: str
    method: str
    template: str
    parameters: frozenset[str]
    security: tuple[dict[str, list[str]], ...]
    request: dict[str, Any] = field(default_factory=dict)

    def path(self, ids: Mapping[str, str]) -> str:
        """Return the path with what `ids` has for each parameter in it."""
        return self.template.format(**ids)

    def send(self, client: httpx2.Client, ids: Mapping[str, str], **options: Any) -> httpx2.Response:
        """Send the request and return the answer; of a successful one only the head is read, as it may be endless."""
        request = self.request
        if self.id == "createUrlToken":
            request = {"json": {"url": request["json"]["url"].format(**ids)}}
        with client.stream(self.method, self.path(ids), **request, **options) as response:
            if response.status_code >= 400:
                response.read()
            return response


def operations(document: Mapping[str, Any]) -> list[Operation]:
    """Return every operation of an OpenAPI document."""
    return [
        Operation(
            id=operation["operationId"],
            method=method.upper(),
            template=template,
            parameters=frozenset(one["name"] for one in operation.get("parameters", ()) if one["in"] == "path"),
            security=tuple(operation.get("security", ())),
            request=REQUESTS.get(operation["operationId"], {}),
        )
        for template, item in document["paths"].items()
        for method, operation in item.items()
    ]
