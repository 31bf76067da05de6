"""Metrics for Prometheus: every series the service has, in a registry of its own per application.

Two ways lead here. What has a duration is observed when it happens, through children that are looked up once. What can
be read at any time (queues, places in use, running totals of other modules) is read at each scrape, as one `Usage`, so
that counting it costs nothing in between.

No label takes a value that a caller can make up: tools that do not exist are `other`, requests are named by the route
that answered them.
"""

import asyncio
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    ProcessCollector,
    disable_created_metrics,
    generate_latest,
)
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from app.telemetry.observer import BatchFacts, BatchObserver

CONTENT_TYPE: Final = "text/plain; version=0.0.4; charset=utf-8"
OTHER: Final = "other"

_CALL_STATUSES: Final = ("succeeded", "failed", "cancelled", "skipped")
_BATCH_STATUSES: Final = ("completed", "cancelled", "interrupted")
_METHODS: Final = frozenset({"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"})
_CALL_SECONDS: Final = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600, 3600)
_WAIT_SECONDS: Final = (0.001, 0.005, 0.01, 0.05, 0.1, 0.5, 1, 5, 10, 30, 60, 300)
_COMMIT_SECONDS: Final = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5)
_LAG_SECONDS: Final = (0.001, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1)
_HTTP_SECONDS: Final = (0.005, 0.025, 0.1, 0.25, 0.5, 1, 2.5, 10, 60)


# Half as many series again, which say when each was first counted and nobody asks for.
disable_created_metrics()  # type: ignore[no-untyped-call]


@dataclass(frozen=True, slots=True)
class Usage:
    """What is read at a scrape, on the event loop. Running totals are since the start of the process."""

    batches_running: int
    batches_queued: int
    commands_running: int
    commands_started: int
    commands_killed: Mapping[str, int]
    """By reason: `timeout`, `cancelled`, `interrupted`."""
    commands_waiting: int
    searches_waiting: int
    followers: int
    writes_waiting: int
    records_removed: Mapping[str, int]
    """By what: `output_bytes`, `events`, `calls`, `batches`, `workspaces`, `pages`."""
    disk_full: bool
    files_running: int
    files_waiting: int
    draining: bool


_READ: Final[tuple[tuple[str, str, str], ...]] = (
    ("toolcrib_batches_running", "batches_running", "Batches that run."),
    ("toolcrib_batches_queued", "batches_queued", "Accepted batches that wait for a place."),
    ("toolcrib_commands_running", "commands_running", "Processes of commands that run, ripgrep included."),
    ("toolcrib_commands_waiting", "commands_waiting", "Calls of bash and powershell that wait for a slot."),
    ("toolcrib_searches_waiting", "searches_waiting", "Calls that wait for their turn to run ripgrep."),
    ("toolcrib_event_followers", "followers", "Open streams and feeds, live output and waits for others' batches."),
    ("toolcrib_writes_waiting", "writes_waiting", "Writes that wait for their commit or are being committed."),
    ("toolcrib_disk_full", "disk_full", "1 while the disk under the database is full."),
    ("toolcrib_file_jobs_running", "files_running", "File operations in a thread."),
    ("toolcrib_file_jobs_waiting", "files_waiting", "File operations that wait for a thread."),
    ("toolcrib_draining", "draining", "1 from the signal to stop on."),
)


class _UsageCollector(Collector):
    """Turns the latest `Usage` into series."""

    def __init__(self) -> None:
        self.usage: Usage | None = None

    def describe(self) -> Iterable[Metric]:
        return ()

    def collect(self) -> Iterator[Metric]:
        usage = self.usage
        if usage is None:
            return
        for name, attribute, text in _READ:
            yield GaugeMetricFamily(name, text, value=getattr(usage, attribute))
        yield CounterMetricFamily(
            "toolcrib_commands_started", "Processes started for commands and ripgrep.", value=usage.commands_started
        )
        killed = CounterMetricFamily(
            "toolcrib_commands_killed", "Commands that were ended, by reason.", labels=["reason"]
        )
        for reason, count in usage.commands_killed.items():
            killed.add_metric([reason], count)
        yield killed
        removed = CounterMetricFamily("toolcrib_removed", "What retention has removed.", labels=["what"])
        for what, count in usage.records_removed.items():
            removed.add_metric([what], count)
        yield removed


class Metrics:
    """All series of one application.

    Args:
        tools: the names that may stand in the label `tool`.
    """

    def __init__(self, tools: Sequence[str]) -> None:
        self.registry = CollectorRegistry(auto_describe=False)
        self._read: Callable[[], Usage] | None = None
        self._usage = _UsageCollector()
        self._tools = frozenset(tools)
        ProcessCollector(registry=self.registry)
        self.registry.register(self._usage)
        calls = Counter("toolcrib_calls", "Ended calls.", ["tool", "status"], registry=self.registry)
        seconds = Histogram(
            "toolcrib_call_seconds",
            "From a call's start to its end.",
            ["tool"],
            buckets=_CALL_SECONDS,
            registry=self.registry,
        )
        labels = (*tools, OTHER)
        self.calls = {(tool, status): calls.labels(tool, status) for tool in labels for status in _CALL_STATUSES}
        self.call_seconds = {tool: seconds.labels(tool) for tool in labels}
        batches = Counter("toolcrib_batches", "Ended batches.", ["status"], registry=self.registry)
        self.batches = {status: batches.labels(status) for status in _BATCH_STATUSES}
        self.gaps = Counter("toolcrib_output_gaps", "Streams of output cut at captureBytes.", registry=self.registry)
        self._queue_seconds = Histogram(
            "toolcrib_batch_queue_seconds",
            "From a batch's acceptance to its being taken up.",
            buckets=_WAIT_SECONDS,
            registry=self.registry,
        )
        self._commit_seconds = Histogram(
            "toolcrib_commit_seconds",
            "How long a group of writes took to commit.",
            buckets=_COMMIT_SECONDS,
            registry=self.registry,
        )
        self._writes = Counter("toolcrib_writes", "Committed writes.", registry=self.registry)
        self._lag_seconds = Histogram(
            "toolcrib_event_loop_lag_seconds",
            "How late the event loop comes to a timer.",
            buckets=_LAG_SECONDS,
            registry=self.registry,
        )
        self._requests = Counter(
            "toolcrib_http_requests", "Answered requests.", ["method", "route", "status"], registry=self.registry
        )
        self._http_seconds = Histogram(
            "toolcrib_http_first_byte_seconds",
            "From a request to the head of its answer.",
            ["route"],
            buckets=_HTTP_SECONDS,
            registry=self.registry,
        )
        self._routes: dict[tuple[str, str, int], Counter] = {}
        self._route_seconds: dict[str, Histogram] = {}

    # -- what is known at the start ---------------------------------------------------------------------------------

    def describe(self, build: Mapping[str, str], tier: str, missing: Sequence[str]) -> None:
        """Set the series that say what this service is."""
        info = Gauge("toolcrib_build_info", "1; the labels say what runs.", list(build), registry=self.registry)
        info.labels(**build).set(1)
        sandbox = Gauge("toolcrib_sandbox_info", "1; what holds commands.", ["tier"], registry=self.registry)
        sandbox.labels(tier).set(1)
        lacks = Gauge(
            "toolcrib_sandbox_missing", "1 for each thing the sandbox lacks.", ["what"], registry=self.registry
        )
        for what in missing:
            lacks.labels(what).set(1)

    def read_at_scrape(self, read: Callable[[], Usage]) -> None:
        """Have `read` called, on the event loop, at each scrape."""
        self._read = read

    async def scrape(self) -> bytes:
        """Return all series in the text format of Prometheus, version 0.0.4."""
        if self._read is not None:
            self._usage.usage = self._read()
        return await asyncio.to_thread(generate_latest, self.registry)

    # -- what happens -----------------------------------------------------------------------------------------------

    def tool_label(self, name: str) -> str:
        """Return `name` when it is a tool, else `other`."""
        return name if name in self._tools else OTHER

    def batch_taken_up(self, batch: BatchFacts) -> BatchObserver:
        """Count a batch; implements `Observe`."""
        self._queue_seconds.observe(batch.waited)
        return _BatchMetrics(self)

    def committed(self, writes: int, seconds: float) -> None:
        """Count a committed group; in any thread."""
        self._commit_seconds.observe(seconds)
        self._writes.inc(writes)

    def loop_was_late(self, seconds: float) -> None:
        self._lag_seconds.observe(seconds)

    def http_answered(self, method: str, route: str, status: int, seconds: float) -> None:
        """Count a request.

        Args:
            method: as it came.
            route: the template of the route that answered, such as `/v1/batches/{batch_id}`.
            status: of the answer; 0 when there was none.
            seconds: until the head of the answer.
        """
        key = (method, route, status // 100)
        child = self._routes.get(key)
        if child is None:
            verb = method if method in _METHODS else OTHER
            child = self._requests.labels(verb, route, f"{status // 100}xx" if status else "none")
            if verb is method:
                self._routes[key] = child
        child.inc()
        timed = self._route_seconds.get(route)
        if timed is None:
            timed = self._route_seconds[route] = self._http_seconds.labels(route)
        timed.observe(seconds)


@dataclass(slots=True)
class _BatchMetrics:
    metrics: Metrics
    started: dict[str, float] = field(default_factory=dict)

    def call_started(self, call_id: str, tool_call_id: str, tool: str) -> None:  # noqa: ARG002 - of the protocol
        self.started[call_id] = time.perf_counter()

    def call_ended(self, call_id: str, tool: str, status: str, error: str | None) -> None:  # noqa: ARG002 - the same
        label = self.metrics.tool_label(tool)
        self.metrics.calls[label, status].inc()
        started = self.started.pop(call_id, None)
        if started is not None:
            self.metrics.call_seconds[label].observe(time.perf_counter() - started)

    def output_cut(self) -> None:
        self.metrics.gaps.inc()

    def batch_ended(self, status: str) -> None:
        self.metrics.batches[status].inc()

    def close(self) -> None:
        """There is nothing to give back."""
