"""Metrics for Prometheus: every series the service has, in a registry of its own per application.

Two ways lead here. What has a duration is counted when it happens, in plain numbers that become series at a scrape.
What can be read at any time (queues, places in use, running totals of other modules) is read at each scrape, as one
`Usage`, so that counting it costs nothing in between.

No label takes a value that a caller can make up: tools that do not exist are `other`, requests are named by the route
that answered them.
"""

import asyncio
import time
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Final

from prometheus_client import CollectorRegistry, Gauge, ProcessCollector, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from app.telemetry.observer import BatchFacts, BatchObserver

CONTENT_TYPE: Final = "text/plain; version=0.0.4; charset=utf-8"
OTHER: Final = "other"

_CALL_STATUSES: Final = ("succeeded", "failed", "cancelled", "skipped")
_BATCH_STATUSES: Final = ("completed", "cancelled", "interrupted")
_METHODS: Final = frozenset({"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"})
_CLASSES: Final = ("none", "1xx", "2xx", "3xx", "4xx", "5xx")
_CALL_SECONDS: Final = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600, 3600)
_WAIT_SECONDS: Final = (0.001, 0.005, 0.01, 0.05, 0.1, 0.5, 1, 5, 10, 30, 60, 300)
_COMMIT_SECONDS: Final = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5)
_LAG_SECONDS: Final = (0.001, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1)
_HTTP_SECONDS: Final = (0.005, 0.025, 0.1, 0.25, 0.5, 1, 2.5, 10, 60)


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
    command_slots: int
    searches_waiting: int
    followers: int
    streams: int
    reads_running: int
    reads_waiting: int
    writes_waiting: int
    records_removed: Mapping[str, int]
    """By what: `output_bytes`, `events`, `calls`, `batches`, `workspaces`, `pages`."""
    disk_full: bool
    files_running: int
    files_waiting: int
    draining: bool
    processes_living: int
    lease_age_seconds: float


_READ: Final[tuple[tuple[str, str, str], ...]] = (
    ("toolcrib_batches_running", "batches_running", "Batches that run."),
    ("toolcrib_batches_queued", "batches_queued", "Accepted batches that wait for a place."),
    ("toolcrib_commands_running", "commands_running", "Processes of commands that run, ripgrep included."),
    ("toolcrib_commands_waiting", "commands_waiting", "Calls of bash and powershell that wait for a slot."),
    ("toolcrib_command_slots_taken", "command_slots", "Slots that calls of bash and powershell have."),
    ("toolcrib_searches_waiting", "searches_waiting", "Calls that wait for their turn to run ripgrep."),
    ("toolcrib_event_followers", "followers", "Open streams and feeds, live output and waits for others' batches."),
    ("toolcrib_streams_open", "streams", "Answers that go on and are counted against the caps of keys and batches."),
    ("toolcrib_reads_running", "reads_running", "Reads of the database in a thread."),
    ("toolcrib_reads_waiting", "reads_waiting", "Reads of the database that wait for a thread."),
    ("toolcrib_writes_waiting", "writes_waiting", "Writes that wait for their commit or are being committed."),
    ("toolcrib_disk_full", "disk_full", "1 while the disk under the database is full."),
    ("toolcrib_file_jobs_running", "files_running", "File operations in a thread."),
    ("toolcrib_file_jobs_waiting", "files_waiting", "File operations that wait for a thread."),
    ("toolcrib_processes", "processes_living", "Processes on the same database that lived when last looked."),
    ("toolcrib_lease_age_seconds", "lease_age_seconds", "Since this process was last heard to live; 0 on SQLite."),
    ("toolcrib_draining", "draining", "1 from the signal to stop on."),
)


class _Distribution:
    """What a histogram counts, without the lock and the search of the library's own, which a short call would feel.

    One thread observes; what is read at a scrape may miss the latest value and is never torn.
    """

    __slots__ = ("bounds", "counts", "total")

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.total = 0.0

    def observe(self, value: float) -> None:
        self.counts[bisect_left(self.bounds, value)] += 1
        self.total += value

    def buckets(self) -> list[tuple[str, float]]:
        ends = [*map(floatToGoString, self.bounds), "+Inf"]
        return list(zip(ends, map(float, accumulate(self.counts)), strict=True))


class Metrics(Collector):
    """All series of one application.

    Args:
        tools: the names that may stand in the label `tool`.
    """

    def __init__(self, tools: Sequence[str]) -> None:
        self.registry = CollectorRegistry(auto_describe=False)
        self._read: Callable[[], Usage] | None = None
        self._usage: Usage | None = None
        self._tools = frozenset(tools)
        labels = (*tools, OTHER)
        self._calls = {(tool, status): 0 for tool in labels for status in _CALL_STATUSES}
        self._call_seconds = {tool: _Distribution(_CALL_SECONDS) for tool in labels}
        self._batches = dict.fromkeys(_BATCH_STATUSES, 0)
        self._gaps = 0
        self._writes = 0
        self._queue_seconds = _Distribution(_WAIT_SECONDS)
        self._commit_seconds = _Distribution(_COMMIT_SECONDS)
        self._lag_seconds = _Distribution(_LAG_SECONDS)
        self._requests: dict[tuple[str, str, str], int] = {}
        self._http_seconds: dict[str, _Distribution] = {}
        ProcessCollector(registry=self.registry)
        self.registry.register(self)

    def describe(self) -> Iterable[Metric]:
        return ()

    def collect(self) -> Iterator[Metric]:
        """Yield every series but those of the process; implements `Collector`."""
        usage = self._usage
        if usage is not None:
            for name, attribute, text in _READ:
                yield GaugeMetricFamily(name, text, value=getattr(usage, attribute))
            yield _counter(
                "toolcrib_commands_started", "Commands started, ripgrep included.", (), [((), usage.commands_started)]
            )
            killed = [((reason,), count) for reason, count in usage.commands_killed.items()]
            yield _counter("toolcrib_commands_killed", "Commands that were ended.", ("reason",), killed)
            removed = [((what,), count) for what, count in usage.records_removed.items()]
            yield _counter("toolcrib_removed", "What retention has removed.", ("what",), removed)
        yield _counter("toolcrib_calls", "Ended calls.", ("tool", "status"), self._calls.items())
        yield _histogram(
            "toolcrib_call_seconds",
            "From a call's start to its end.",
            ("tool",),
            {(tool,): seconds for tool, seconds in self._call_seconds.items()},
        )
        batches = [((status,), count) for status, count in self._batches.items()]
        yield _counter("toolcrib_batches", "Ended batches.", ("status",), batches)
        yield _counter("toolcrib_output_gaps", "Streams of output cut at captureBytes.", (), [((), self._gaps)])
        yield _counter("toolcrib_writes", "Committed writes.", (), [((), self._writes)])
        for name, text, distribution in (
            ("toolcrib_batch_queue_seconds", "From a batch's acceptance to its being taken up.", self._queue_seconds),
            ("toolcrib_commit_seconds", "How long a group of writes took to commit.", self._commit_seconds),
            ("toolcrib_event_loop_lag_seconds", "How late the event loop comes to a timer.", self._lag_seconds),
        ):
            yield _histogram(name, text, (), {(): distribution})
        requests = self._requests.copy().items()
        yield _counter("toolcrib_http_requests", "Answered requests.", ("method", "route", "status"), requests)
        yield _histogram(
            "toolcrib_http_first_byte_seconds",
            "From a request to the head of its answer.",
            ("route",),
            {(route,): seconds for route, seconds in self._http_seconds.copy().items()},
        )

    # -- what is known at the start ---------------------------------------------------------------------------------

    def say(self, build: Mapping[str, str], tier: str, missing: Sequence[str]) -> None:
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
            self._usage = self._read()
        return await asyncio.to_thread(generate_latest, self.registry)

    # -- what happens -----------------------------------------------------------------------------------------------

    def batch_taken_up(self, batch: BatchFacts) -> BatchObserver:
        """Count a batch; implements `Observe`."""
        self._queue_seconds.observe(batch.waited)
        return _BatchMetrics(self)

    def call_ended(self, tool: str, status: str, seconds: float | None) -> None:
        """Count a call; `tool` is what the caller wrote, `seconds` None when it was not taken up."""
        label = tool if tool in self._tools else OTHER
        self._calls[label, status] += 1
        if seconds is not None:
            self._call_seconds[label].observe(seconds)

    def batch_ended(self, status: str) -> None:
        self._batches[status] += 1

    def output_cut(self) -> None:
        self._gaps += 1

    def committed(self, writes: int, seconds: float) -> None:
        """Count a committed group; in the one thread that commits."""
        self._commit_seconds.observe(seconds)
        self._writes += writes

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
        key = (method if method in _METHODS else OTHER, route, _CLASSES[status // 100])
        self._requests[key] = self._requests.get(key, 0) + 1
        timed = self._http_seconds.get(route)
        if timed is None:
            timed = self._http_seconds[route] = _Distribution(_HTTP_SECONDS)
        timed.observe(seconds)


def _counter(
    name: str, text: str, labels: Sequence[str], values: Iterable[tuple[Sequence[str], int]]
) -> CounterMetricFamily:
    family = CounterMetricFamily(name, text, labels=labels)
    for key, count in values:
        family.add_metric(key, count)
    return family


def _histogram(
    name: str, text: str, labels: Sequence[str], values: Mapping[tuple[str, ...], _Distribution]
) -> HistogramMetricFamily:
    family = HistogramMetricFamily(name, text, labels=labels)
    for key, distribution in values.items():
        family.add_metric(key, distribution.buckets(), distribution.total)
    return family


@dataclass(slots=True)
class _BatchMetrics:
    metrics: Metrics
    started: dict[str, float] = field(default_factory=dict)

    def call_started(self, call_id: str, tool_call_id: str, tool: str) -> None:  # noqa: ARG002 - of the protocol
        self.started[call_id] = time.perf_counter()

    def call_ended(self, call_id: str, tool: str, status: str, error: str | None) -> None:  # noqa: ARG002 - the same
        started = self.started.pop(call_id, None)
        self.metrics.call_ended(tool, status, None if started is None else time.perf_counter() - started)

    def output_cut(self) -> None:
        self.metrics.output_cut()

    def batch_ended(self, status: str) -> None:
        self.metrics.batch_ended(status)

    def close(self) -> None:
        """There is nothing to give back."""
