"""What every problem document has to be."""

from typing import Any

import httpx2

from app.api.errors import KINDS


def assert_problem(response: httpx2.Response, code: str, **members: Any) -> dict[str, Any]:
    """Check the whole document but for its sentence, and return it."""
    kind = KINDS[code]
    assert response.headers["content-type"] == "application/problem+json"
    document: dict[str, Any] = response.json()
    expected = {
        "type": f"urn:toolcrib:problem:{code}",
        "title": kind.title,
        "status": kind.status,
        "detail": document.get("detail"),
        "instance": response.request.url.path,
        "code": code,
        "requestId": response.headers["x-request-id"],
        **members,
    }
    for name in ("errors", "scope", "failures", "checks", "sandbox"):
        if name in document:
            expected.setdefault(name, document[name])
    assert document == expected
    assert response.status_code == kind.status
    assert document["detail"]
    assert "Traceback" not in response.text
    return document
