"""The composition root: the one place that builds the service.

Up: lock → database and migrations → writer, log, backend → recovery → ready. Down, in reverse: what runs is ended, what
waits is stored, then everything is closed. The server drains before (`app.__main__`), so here little is left to end.
"""

import asyncio
import os
import platform
import signal
from collections.abc import AsyncIterator, Callable, Collection, Coroutine
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from functools import partial
from typing import Any, Final

import structlog
from fastapi import FastAPI
from opentelemetry.trace import TracerProvider
from starlette.middleware.cors import CORSMiddleware

from app import __version__
from app.api.dependencies import About, Services
from app.api.errors import add_error_handlers
from app.api.forwarding import add_forwarding, open_forwarding
from app.api.middleware import FaultBarrier, RequestContext
from app.api.openapi import Document
from app.api.routes import audit, batches, calls, files, keys, limits, operations, tools, url_tokens, workspaces
from app.domain.abort import AbortReason
from app.domain.encodings import load_codecs
from app.domain.retention import RetentionPolicy
from app.errors import ConfigurationError
from app.events.feed import WorkspaceFeed
from app.events.log import EventLog
from app.execution.backends.admission import Admission
from app.execution.backends.distributed import DistributedBackend
from app.execution.backends.local import LocalBackend
from app.execution.finalizer import Finalizer
from app.execution.membership import Membership
from app.execution.recovery import Recovery
from app.execution.runner import BatchRunner
from app.groundwork import (
    account_of_settings,
    command_policy,
    make_data_dir,
    open_file_locks,
    open_jobs,
    open_sandbox,
    open_storage,
    place_of_workspaces,
    request_rates,
    sandbox_means,
    this_process,
)
from app.hooks.chain import hook_chain, load_hooks
from app.sandbox.decoder import Decoder
from app.sandbox.disk import DiskUsage
from app.sandbox.file_pool import FilePool
from app.sandbox.local import LocalSandbox
from app.sandbox.process_slots import ProcessSlots
from app.sandbox.ripgrep import Ripgrep
from app.services.archives import ArchiveService
from app.services.audit import AuditLog
from app.services.batches import BatchService
from app.services.file_access import FileAccess
from app.services.files import FileService
from app.services.keys import KeyService
from app.services.pressure import Pressure
from app.services.readiness import Readiness
from app.services.retention import Retention
from app.services.streams import StreamSlots, end_with_their_keys
from app.services.tool_catalog import ToolCatalog
from app.services.url_tokens import UrlTokenService, secret_of
from app.services.workspace_roots import WorkspaceRoots
from app.services.workspaces import WorkspaceService
from app.settings import Settings, variable
from app.storage.ballast import Ballast
from app.storage.instance_lock import InstanceLock
from app.storage.process_lock import ProcessLock
from app.storage.read_pool import ReadPool
from app.storage.record_writer import Commit, RecordWriter
from app.storage.sql.listener import CANCEL, Listener
from app.telemetry.loop_lag import LoopLag
from app.telemetry.metrics import Metrics, Usage
from app.telemetry.observer import Both, Observe
from app.telemetry.tracing import QUIET_PATHS, Tracing, close_provider, open_exporting_provider
from app.tools.file_mutation_queue import FileMutationQueue
from app.tools.powershell import find_powershell
from app.tools.registry import ToolsOptions, WorkspaceTools, all_tool_names

# For what a server that did not drain left running, and for what still waits to be stored.
END_SECONDS: Final = 0.5
STORE_SECONDS: Final = 1.0

_DESCRIPTION: Final = (
    "Lends an agent a workspace and tools to work in it: batches of tool calls, streamed as events, kept as records. "
    "A tool that fails is never an HTTP error."
)
_TAGS: Final = [
    {"name": "workspaces", "description": "Directories with options and limits."},
    {"name": "files", "description": "What is in a workspace, moved in and out as it is."},
    {"name": "batches", "description": "Ordered tool calls, submitted once and executed once."},
    {"name": "calls", "description": "The records of single calls."},
    {"name": "tools", "description": "What a model is told of the tools."},
    {"name": "keys", "description": "Who may do what. For operators."},
    {"name": "operations", "description": "For whoever runs the service; no key needed."},
]
# Each router has its prefix and what its routes have in common: included, they would be built a second time by the
# first request.
_ROUTES: Final = (batches, calls, workspaces, files, tools, limits, keys, url_tokens, audit, operations)
_CORS_METHODS: Final = ("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE")
_CORS_REQUEST_HEADERS: Final = (
    "Authorization",
    "Content-Type",
    "Idempotency-Key",
    "If-Match",
    "If-None-Match",
    "Last-Event-ID",
    "Prefer",
    "Range",
    "X-Request-ID",
)
_CORS_RESPONSE_HEADERS: Final = (
    "Accept-Ranges",
    "Content-Disposition",
    "Content-Range",
    "ETag",
    "Idempotent-Replayed",
    "Location",
    "Preference-Applied",
    "RateLimit",
    "RateLimit-Policy",
    "Retry-After",
    "X-Request-ID",
)

_log = structlog.get_logger(__name__)


def _stop_process() -> None:
    signal.raise_signal(signal.SIGTERM)


def create_app(
    settings: Settings,
    *,
    address: str | None = None,
    stop: Callable[[], None] = _stop_process,
    tracer_provider: TracerProvider | None = None,
) -> FastAPI:
    """Return the application; its lifespan builds `app.state.services` and takes them down again.

    Args:
        settings: what to build.
        address: the URL at which other processes reach this one; None when they cannot.
        stop: called on the event loop when the service can no longer do its work and has to end.
        tracer_provider: where spans go, and who calls this closes it; None makes one when the settings ask for traces.

    Raises:
        ConfigurationError: traces are asked for and the extra `otel` is not installed.
    """
    metrics = Metrics(sorted(all_tool_names))
    observe: Observe = metrics.batch_taken_up
    exporting = open_exporting_provider() if settings.tracing and tracer_provider is None else None
    provider = exporting or tracer_provider
    if provider is not None:
        observe = Both(observe, Tracing(provider, frozenset(all_tool_names)))

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        try:
            async with running(settings, stop, metrics, observe, address=address) as services:
                app.state.services = services
                yield
        finally:
            if exporting is not None:
                await asyncio.to_thread(close_provider, exporting)

    app = FastAPI(
        title="Toolcrib",
        version=__version__,
        description=_DESCRIPTION,
        openapi_tags=_TAGS,
        routes=[route for module in _ROUTES for route in module.router.routes],
        lifespan=lifespan,
        openapi_url=None,
        docs_url=None,
        redoc_url=None,
        redirect_slashes=False,
        telemetry={
            "tracer_provider": provider,
            "tracing": provider is not None,
            "metrics": False,
            "logs": False,
            "operation_spans": False,
            "auto_configure": False,
            "exclude": lambda scope: scope.get("path") in QUIET_PATHS,
        },
    )
    add_error_handlers(app)
    add_forwarding(app)
    # The last one added is the outermost.
    app.add_middleware(FaultBarrier)
    if settings.cors_origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=list(settings.cors_origins),
            allow_methods=list(_CORS_METHODS),
            allow_headers=list(_CORS_REQUEST_HEADERS),
            expose_headers=list(_CORS_RESPONSE_HEADERS),
        )
    app.add_middleware(RequestContext, answered=metrics.http_answered)
    app.openapi = Document(app)  # type: ignore[method-assign]  # the way FastAPI offers
    return app


@asynccontextmanager
async def running(
    settings: Settings,
    stop: Callable[[], None] = _stop_process,
    metrics: Metrics | None = None,
    observe: Observe | None = None,
    *,
    address: str | None = None,
) -> AsyncIterator[Services]:
    """Build everything, recover what a crash left, and take it all down again.

    Args:
        settings: what to build.
        stop: called on the event loop when the service can no longer do its work and has to end.
        metrics: where to count; None makes its own.
        observe: is told of every batch; None is `metrics`.
        address: the URL at which other processes reach this one; None when they cannot.

    Raises:
        ConfigurationError: the service cannot start as it is set up; the message is a sentence.
    """
    metrics = metrics or Metrics(sorted(all_tool_names))
    async with AsyncExitStack() as stack:
        account, place = None, settings.data_dir
        if settings.role != "api":
            await asyncio.to_thread(make_data_dir, settings)
            account = await asyncio.to_thread(account_of_settings, settings)
            if settings.database_url is None:
                stack.enter_context(InstanceLock(settings.data_dir))
            place = await asyncio.to_thread(place_of_workspaces, settings, account)
        if account is not None:
            await asyncio.to_thread(load_codecs)
        jobs = open_jobs(settings)
        forwarding = None if jobs is None else await stack.enter_async_context(open_forwarding())
        storage = await asyncio.to_thread(open_storage, settings, jobs)
        stack.callback(storage.close)
        reads = ReadPool()
        stack.callback(reads.close)
        process = this_process(settings, address)
        readiness = Readiness(storage, reads, None if process.node_id is None else place)

        # The log asks the backend, which writes to the log: one of the two has to come second.
        backends: list[LocalBackend] = []
        log = EventLog(storage, reads, is_local=lambda batch_id: any(made.is_local(batch_id) for made in backends))

        feed = WorkspaceFeed(storage, reads, shared=settings.database_url is not None)

        def committed(writes: Commit) -> None:
            log.committed(writes)
            feed.committed(writes)

        def lapse() -> None:
            for made in backends:
                made.stop_all(AbortReason.INTERRUPTED)

        postgres = settings.database_url is not None
        find_dead = stack.enter_context(ProcessLock(settings.data_dir, process.id)).dead if process.node_id else None
        membership = Membership(storage, process, shared=postgres, on_lapse=lapse, find_dead=find_dead)
        await membership.join()
        stack.push_async_callback(membership.leave)

        def give_up(error: BaseException) -> None:
            # Nothing can be stored any more, so nothing may run.
            _log.critical("record_writer_died", exc_info=error)
            readiness.broken = True
            for made in backends:
                made.stop_all(AbortReason.INTERRUPTED)
            stop()

        records = RecordWriter(
            storage,
            on_commit=committed,
            on_death=give_up,
            on_group=metrics.committed,
            ballast=None if settings.database_url is not None else Ballast(settings.data_dir / "ballast"),
        )
        records.start()
        stack.push_async_callback(records.close)
        stack.push_async_callback(records.drain, STORE_SECONDS)

        file_pool = FilePool()
        stack.callback(file_pool.close)
        locks = (
            None
            if settings.database_url is None or process.node_id is None
            else await asyncio.to_thread(open_file_locks, settings)
        )
        if locks is not None:
            stack.callback(locks.close)
        mutations = FileMutationQueue(locks)
        policy = command_policy(settings)
        disk_usage = DiskUsage(settings.workspace_bytes or None)
        means = await asyncio.to_thread(sandbox_means, settings, policy.limits, account, place)
        sandbox = await open_sandbox(settings, means)
        stack.push_async_callback(sandbox.close)
        # Searching runs no code of a caller, so it works where commands are refused.
        searching = sandbox if isinstance(sandbox, LocalSandbox) else LocalSandbox(most=policy.limits, account=account)
        stack.push_async_callback(searching.close)
        ripgrep = Ripgrep(searching, program=None if means.ripgrep is None else str(means.ripgrep))
        slots = ProcessSlots(settings.commands, settings.commands_per_workspace)
        decoder = Decoder()
        stack.callback(decoder.close)
        shared = ToolsOptions(
            sandbox=sandbox,
            files=file_pool,
            mutations=mutations,
            commands=slots,
            ripgrep=ripgrep,
            decoder=decoder,
            powershell=None if settings.powershell is None else str(settings.powershell),
            policy=policy,
            usage=disk_usage,
        )
        finalizer = Finalizer(storage, reads, records, process_id=process.id)
        runner = BatchRunner(
            storage=storage,
            reads=reads,
            records=records,
            finalizer=finalizer,
            hooks=hook_chain(load_hooks()),
            tools=partial(WorkspaceTools, shared),
            observe=observe or metrics.batch_taken_up,
        )
        admission = Admission(settings.max_batches, settings.max_batches_per_workspace, settings.max_batch_bytes)
        backend = DistributedBackend(
            runner,
            running=settings.running_batches,
            per_workspace=settings.running_batches_per_workspace,
            admission=admission,
        )
        backends.append(backend)
        batch_service = BatchService(
            storage=storage,
            reads=reads,
            records=records,
            log=log,
            backend=backend,
            finalizer=finalizer,
            membership=membership,
            admission=admission,
        )
        workspace_service = WorkspaceService(
            storage=storage,
            reads=reads,
            records=records,
            files=file_pool,
            batches=batch_service,
            roots=WorkspaceRoots(place, settings.workspace_roots, account=account, private=(settings.data_dir,)),
            allow_unrestricted=settings.allow_unrestricted,
            policy=policy,
            usage=disk_usage,
            node_id=process.node_id,
        )
        retention = Retention(
            storage=storage,
            reads=reads,
            records=records,
            policy=RetentionPolicy(
                output_seconds=settings.retain_output,
                event_seconds=settings.retain_events,
                record_seconds=settings.retain_records,
                audit_seconds=settings.retain_audit,
            ),
        )
        about = About(
            version=__version__,
            python=platform.python_version(),
            database="sqlite" if settings.database_url is None else "postgresql",
            sandbox=sandbox.report.to_json(),
            ripgrep=await ripgrep.version(account),
            powershell=find_powershell(shared.powershell) is not None,
        )
        access = FileAccess(workspace_service, file_pool, mutations, disk_usage)
        keys = KeyService(
            storage=storage,
            reads=reads,
            records=records,
            environment_key=None if settings.api_key is None else settings.api_key.get_secret_value(),
        )
        if not settings.loopback and not await keys.any():
            raise ConfigurationError(
                f"there is no API key and {variable('host')} is {settings.host}, which others can reach: set "
                f"{variable('api_key')}, or make one with `toolcrib key create`."
            )
        secret = await secret_of(storage, reads, records)
        rates, streams = request_rates(settings), StreamSlots(settings.streams_per_key, settings.streams_per_batch)
        services = Services(
            keys=keys,
            audit=AuditLog(storage=storage, reads=reads, records=records),
            url_tokens=UrlTokenService(secret=secret, keys=keys, storage=storage, reads=reads),
            workspaces=workspace_service,
            files=FileService(access, max_upload_bytes=settings.max_upload_bytes),
            archives=ArchiveService(access, max_bytes=settings.max_upload_bytes),
            batches=batch_service,
            feed=feed,
            tools=ToolCatalog(),
            rates=rates,
            streams=streams,
            pressure=Pressure(rates, streams, admission, backend, slots, ripgrep.slots, records, policy, disk_usage),
            readiness=readiness,
            metrics=metrics,
            about=about,
            membership=membership,
            forwarding=forwarding,
        )

        def usage() -> Usage:
            held = [sandbox] if searching is sandbox else [sandbox, searching]
            return Usage(
                batches_running=backend.running,
                batches_queued=backend.queued,
                commands_running=sum(one.running for one in held),
                commands_started=sum(one.counts.started for one in held),
                commands_killed={
                    reason: sum(one.counts.killed[reason] for one in held) for reason in sandbox.counts.killed
                },
                commands_waiting=slots.use.waiting,
                command_slots=slots.use.running,
                searches_waiting=ripgrep.waiting,
                followers=log.followers + feed.followers,
                streams=streams.total,
                reads_running=reads.running,
                reads_waiting=reads.waiting,
                writes_waiting=records.depth,
                records_removed=retention.removed.to_json(),
                disk_full=records.full,
                files_running=file_pool.running,
                files_waiting=file_pool.waiting,
                draining=readiness.draining,
                processes_living=len(membership.living),
                lease_age_seconds=membership.lease_age,
            )

        metrics.say(
            {"version": about.version, "python": about.python, "database": about.database},
            sandbox.report.tier,
            sandbox.report.missing,
        )
        metrics.read_at_scrape(usage)
        lag = LoopLag(metrics.loop_was_late)
        lag.start()
        stack.callback(lag.stop)
        recovery = Recovery(
            storage=storage,
            reads=reads,
            records=records,
            finalizer=finalizer,
            backend=backend,
            membership=membership,
        )

        def woken(ids: Collection[str] | None) -> None:
            log.woken(ids)
            feed.woken(ids)
            wishes = None if ids is None else [one[len(CANCEL) :] for one in ids if one.startswith(CANCEL)]
            if wishes is None or wishes:
                recovery.wake(wishes)
            if ids is None or any(one.startswith("ws_") for one in ids):
                recovery.batches_may_wait()
            if ids is None or any(one.startswith("proc_") for one in ids):
                membership.others_changed()

        def keep(work: Coroutine[Any, Any, None], name: str) -> None:
            stack.push_async_callback(_cancel, asyncio.create_task(work, name=name))

        if settings.direct_url is not None:
            # From now on, as batches that are recovered run at once and what follows may take longer than a lease.
            keep(membership.keep(recovery.wake), "heartbeat")
        await recovery.recover()
        if process.node_id is not None:
            await workspace_service.recover()
            keep(workspace_service.keep_house(), "housekeeping")
        keep(retention.keep(lambda: membership.leads), "retention")
        keep(end_with_their_keys(streams, keys), "streams")
        if settings.direct_url is not None:
            keep(Listener(settings.direct_url, process.id, woken).listen(), "listener")
            keep(recovery.keep(), "recovery")
            keep(recovery.keep_taking(), "taking")
        stack.push_async_callback(_end_batches, batch_service)
        if jobs is not None and process.node_id is not None:
            backend.start(jobs, process.node_id, recovery.take)
            stack.push_async_callback(backend.stop_taking)
        run_as = os.geteuid() if account is None else account.uid
        _log.info(
            "ready",
            data_dir=str(settings.data_dir),
            sandbox=about.sandbox,
            run_as=run_as,
            process_id=process.id,
            node_id=process.node_id,
            role=process.role,
        )
        yield services


async def _end_batches(service: BatchService) -> None:
    with suppress(TimeoutError):
        async with asyncio.timeout(END_SECONDS):
            await service.drain(0)


async def _cancel(task: asyncio.Task[None]) -> None:
    task.cancel()
    await asyncio.wait([task])
