"""Traces: spans of batches and calls by the conventions of OpenTelemetry for tools of models, without their contents.

The API of OpenTelemetry comes with FastAPI; its SDK and exporter are the extra `toolcrib[otel]` and are imported only
when tracing is switched on.
"""

import threading
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final
from urllib.parse import parse_qsl, urlencode

from opentelemetry import context as otel_context
from opentelemetry import trace
from opentelemetry.trace import Span, SpanKind, Status, StatusCode, Tracer, TracerProvider

from app import __version__
from app.errors import ConfigurationError
from app.telemetry.metrics import OTHER
from app.telemetry.observer import BatchFacts, BatchObserver

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import ReadableSpan
    from opentelemetry.sdk.trace import Span as RecordedSpan
    from opentelemetry.sdk.trace import TracerProvider as SdkTracerProvider

FLUSH_SECONDS: Final = 1.0
QUIET_PATHS: Final = frozenset({"/healthz", "/readyz", "/metrics"})

_NAME_MAX: Final = 64


class QueryRedaction:
    """A span processor that keeps the values of query parameters out: tokens stand there, and searched texts."""

    def on_start(self, span: "RecordedSpan", parent_context: otel_context.Context | None = None) -> None:  # noqa: ARG002
        query = (span.attributes or {}).get("url.query")
        if isinstance(query, str):
            names = [(name, "REDACTED") for name, _ in parse_qsl(query, keep_blank_values=True)]
            span.set_attribute("url.query", urlencode(names))

    def on_end(self, span: "ReadableSpan") -> None: ...

    def _on_ending(self, span: "RecordedSpan") -> None: ...

    def shutdown(self) -> None: ...

    def force_flush(self, timeout_millis: int = 30_000) -> bool:  # noqa: ARG002 - of the SDK's interface
        return True


def open_exporting_provider() -> "SdkTracerProvider":
    """Return a provider that sends spans where the variables `OTEL_EXPORTER_OTLP_*` of the environment say.

    Raises:
        ConfigurationError: the extra is not installed.
    """
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
    except ImportError:
        raise ConfigurationError(
            "TOOLCRIB_TRACING is on and OpenTelemetry's SDK is not installed: pip install 'toolcrib[otel]'."
        ) from None
    provider = make_provider()
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))
    return provider


def make_provider() -> "SdkTracerProvider":
    """Return a provider that sends spans nowhere yet; `service.name` is `toolcrib` unless the environment says."""
    from opentelemetry.sdk.resources import OTELResourceDetector, Resource
    from opentelemetry.sdk.trace import TracerProvider as SdkTracerProvider

    own = Resource({"service.name": "toolcrib", "service.version": __version__})
    provider = SdkTracerProvider(resource=own.merge(OTELResourceDetector().detect()), shutdown_on_exit=False)
    provider.add_span_processor(QueryRedaction())  # type: ignore[arg-type]  # by shape: the SDK is imported here alone
    return provider


def close_provider(provider: "SdkTracerProvider") -> None:
    """Send what is left, waiting at most `FLUSH_SECONDS`: a collector that is away does not hold up a stop."""
    closing = threading.Thread(target=provider.shutdown, name="traces-close", daemon=True)
    closing.start()
    closing.join(FLUSH_SECONDS)


class Tracing:
    """Makes a span per batch and, below it, one per call; implements `Observe`.

    A batch's span is a child of whatever span is current where it was submitted: the request's, which goes on with the
    `traceparent` the caller sent. A batch that recovery queued again begins a trace of its own.
    """

    def __init__(self, provider: TracerProvider, tools: frozenset[str]) -> None:
        self._tracer = provider.get_tracer("toolcrib", __version__)
        self._tools = tools

    def __call__(self, batch: BatchFacts) -> BatchObserver:
        span = self._tracer.start_span(
            "execute_batch",
            attributes={
                "toolcrib.batch.id": batch.id,
                "toolcrib.workspace.id": batch.workspace_id,
                "toolcrib.request.id": batch.request_id,
                "toolcrib.batch.mode": batch.mode,
                "toolcrib.batch.calls": batch.calls,
                "toolcrib.batch.queued_ms": round(batch.waited * 1000),
            },
        )
        return _BatchSpans(self._tracer, self._tools, span)


@dataclass(slots=True)
class _BatchSpans:
    tracer: Tracer
    tools: frozenset[str]
    batch: Span
    calls: dict[str, Span] = field(default_factory=dict)

    def call_started(self, call_id: str, tool_call_id: str, tool: str) -> None:
        # The names of spans are grouped by, so what is no tool shares one; the attribute has what was asked for.
        self.calls[call_id] = self.tracer.start_span(
            f"execute_tool {tool if tool in self.tools else OTHER}",
            context=trace.set_span_in_context(self.batch, otel_context.Context()),
            kind=SpanKind.INTERNAL,
            attributes={
                "gen_ai.operation.name": "execute_tool",
                "gen_ai.tool.name": tool[:_NAME_MAX],
                "gen_ai.tool.type": "function",
                "gen_ai.tool.call.id": tool_call_id,
                "toolcrib.call.id": call_id,
            },
        )

    def call_ended(self, call_id: str, tool: str, status: str, error: str | None) -> None:  # noqa: ARG002 - of the protocol
        span = self.calls.pop(call_id, None)
        if span is None:
            return
        span.set_attribute("toolcrib.call.status", status)
        if error is not None:
            span.set_attribute("error.type", error)
            span.set_status(Status(StatusCode.ERROR))
        span.end()

    def output_cut(self) -> None:
        """Of no interest to a trace."""

    def batch_ended(self, status: str) -> None:
        self.batch.set_attribute("toolcrib.batch.status", status)

    def close(self) -> None:
        for span in self.calls.values():
            span.end()
        self.calls.clear()
        self.batch.end()
