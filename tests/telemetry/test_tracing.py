"""Spans of requests, batches and calls hang together, and hold none of what callers send."""

import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx2
import pytest
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from app.telemetry.tracing import close_provider, make_provider
from tests.support.server import ServerThread, eventually

TRACE = "0af7651916cd43dd8448eb211c80319c"
PARENT = "b7ad6b7169203331"
ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def exporter() -> InMemorySpanExporter:
    return InMemorySpanExporter()


@pytest.fixture(scope="module")
def client(exporter: InMemorySpanExporter, tmp_path_factory: pytest.TempPathFactory) -> Iterator[httpx2.Client]:
    provider = make_provider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    data_dir = tmp_path_factory.mktemp("traced") / "data"
    with ServerThread(data_dir, tracer_provider=provider) as server, server.client() as opened:
        yield opened
    close_provider(provider)


@pytest.fixture
def spans(exporter: InMemorySpanExporter) -> Callable[[int], dict[str, ReadableSpan]]:
    """Wait for so many spans and return them by name."""
    exporter.clear()

    def ended(count: int) -> dict[str, ReadableSpan]:
        found = eventually(lambda: len(exporter.get_finished_spans()) >= count and exporter.get_finished_spans())
        assert len(found) == count, [span.name for span in found]
        return {span.name: span for span in found}

    return ended


def post_batch(client: httpx2.Client, calls: list[dict[str, Any]], **headers: str) -> dict[str, Any]:
    workspace = client.post("/v1/workspaces", json={"files": {"a.txt": "s3cret-content"}}).json()
    path = f"/v1/workspaces/{workspace['id']}/batches?wait=20"
    answer: dict[str, Any] = client.post(path, json={"calls": calls}, headers=headers).json()
    return answer


def test_calls_hang_on_their_batch_which_hangs_on_the_request_and_the_callers_trace(
    client: httpx2.Client, spans: Callable[[int], dict[str, ReadableSpan]]
) -> None:
    calls = [
        {"id": "call-1", "name": "read", "arguments": {"path": "a.txt"}},
        {"id": "call-2", "name": "s3cret-tool", "arguments": {"path": "s3cret-argument"}},
    ]
    batch = post_batch(client, calls, traceparent=f"00-{TRACE}-{PARENT}-01")
    found = spans(5)
    request = found["POST /v1/workspaces/{workspace_id}/batches"]
    whole, read, other = found["execute_batch"], found["execute_tool read"], found["execute_tool other"]
    for span in (request, whole, read, other):
        assert format(span.context.trace_id, "032x") == TRACE
    assert [format(span.parent.span_id, "016x") for span in (request,) if span.parent] == [PARENT]
    assert whole.parent is not None
    assert whole.parent.span_id == request.context.span_id
    assert [span.parent.span_id for span in (read, other) if span.parent] == [whole.context.span_id] * 2
    assert whole.attributes is not None
    assert (whole.attributes["toolcrib.batch.id"], whole.attributes["toolcrib.batch.status"]) == (
        batch["id"],
        "completed",
    )
    assert read.attributes == {
        "gen_ai.operation.name": "execute_tool",
        "gen_ai.tool.name": "read",
        "gen_ai.tool.type": "function",
        "gen_ai.tool.call.id": "call-1",
        "toolcrib.call.id": batch["calls"][0]["id"],
        "toolcrib.call.status": "succeeded",
    }
    assert read.status.is_unset
    assert other.attributes is not None
    assert (other.attributes["gen_ai.tool.name"], other.attributes["error.type"]) == ("s3cret-tool", "unknown_tool")
    assert not other.status.is_ok
    assert read.resource.attributes["service.name"] == "toolcrib"
    for span in found.values():
        assert "s3cret-content" not in span.to_json()
        assert "s3cret-argument" not in span.to_json()


def test_values_of_the_query_are_kept_out(
    client: httpx2.Client, spans: Callable[[int], dict[str, ReadableSpan]]
) -> None:
    client.get("/v1/calls", params={"q": "s3cret-text", "token": "s3cret-token"})
    [span] = spans(1).values()
    assert span.attributes is not None
    assert span.attributes["url.query"] == "q=REDACTED&token=REDACTED"
    assert "s3cret" not in span.to_json()


def test_probes_make_no_spans(client: httpx2.Client, spans: Callable[[int], dict[str, ReadableSpan]]) -> None:
    for path in ("/healthz", "/readyz", "/metrics"):
        client.get(path)
    client.get("/version")
    assert list(spans(1)) == ["GET /version"]


def test_without_the_setting_the_sdk_is_not_even_imported(tmp_path: Path) -> None:
    code = (
        "import sys; from app.main import create_app; from app.settings import Settings;"
        "create_app(Settings(data_dir=sys.argv[1]));"
        "print(sorted(m for m in sys.modules if m.startswith(('opentelemetry.sdk', 'opentelemetry.exporter'))))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path)], cwd=ROOT, capture_output=True, text=True, check=False, timeout=60
    )
    assert (done.returncode, done.stdout) == (0, "[]\n"), done.stderr


def test_without_the_extra_the_setting_stops_the_start_with_a_sentence(tmp_path: Path) -> None:
    code = (
        "import sys; sys.modules['opentelemetry.exporter'] = None;"
        "from app.__main__ import main; sys.exit(main(['serve']))"
    )
    environment = {"TOOLCRIB_TRACING": "true", "TOOLCRIB_DATA_DIR": str(tmp_path / "data"), "TOOLCRIB_PORT": "0"}
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=ROOT,
        env={"PATH": "/usr/bin:/bin", **environment},
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert done.returncode == 2, done.stderr
    assert "toolcrib: TOOLCRIB_TRACING is on" in done.stderr
    assert "pip install 'toolcrib[otel]'" in done.stderr
