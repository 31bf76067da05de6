"""The composition root: the one place that reads settings and builds things.

Up: lock → database and migrations → writer, log, backend → recovery → ready. Down, in reverse: what runs is ended, what
waits is stored, then everything is closed. The server drains before (`app.__main__`), so here little is left to end.
"""

import asyncio
import hashlib
import math
import os
import platform
import signal
import stat
from collections.abc import AsyncIterator, Callable, Collection, Coroutine, Iterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager, suppress
from functools import partial
from pathlib import Path
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
from app.domain.audit import COMMAND_LINE
from app.domain.encodings import load_codecs
from app.domain.ids import is_id, new_id
from app.domain.node import Process
from app.domain.retention import RetentionPolicy
from app.domain.workspace import Workspace
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
from app.hooks.chain import hook_chain, load_hooks
from app.sandbox.account import Account, acts_as_others, find_account, obstacle, require_power_to_act
from app.sandbox.base import Sandbox, Tier
from app.sandbox.containment import display_path
from app.sandbox.decoder import Decoder
from app.sandbox.disk import DiskUsage
from app.sandbox.file_locks import FileLocks
from app.sandbox.file_pool import FilePool
from app.sandbox.limits import CommandLimits, CommandPolicy, memory_share
from app.sandbox.local import LocalSandbox
from app.sandbox.namespace import find_bwrap
from app.sandbox.process_slots import ProcessSlots
from app.sandbox.programs import provide
from app.sandbox.refused import RefusedSandbox
from app.sandbox.ripgrep import Ripgrep, installed_ripgrep
from app.sandbox.selection import SandboxMeans, select_sandbox
from app.services.archives import ArchiveService
from app.services.audit import AuditLog
from app.services.batches import BatchService
from app.services.file_access import FileAccess
from app.services.files import FileService
from app.services.keys import ENVIRONMENT, KeyRequest, KeyService, make_key, make_revocation
from app.services.pressure import Pressure
from app.services.readiness import Readiness
from app.services.request_rates import BURST_SECONDS, Rate, RequestRates
from app.services.retention import Retention
from app.services.streams import StreamSlots, end_with_their_keys
from app.services.tool_catalog import ToolCatalog
from app.services.url_tokens import UrlTokenService, secret_of
from app.services.workspace_roots import WorkspaceRoots, look_at
from app.services.workspaces import WorkspaceService
from app.settings import Settings, variable
from app.storage.ballast import Ballast
from app.storage.base import ApiKey, Refused, SchemaTooNew, StorageError
from app.storage.instance_lock import InstanceLock
from app.storage.process_lock import ProcessLock, node_of
from app.storage.read_pool import ReadPool
from app.storage.record_writer import Commit, RecordWriter
from app.storage.sql.database_copy import CopyRefused, copy_database
from app.storage.sql.jobs import JobQueue
from app.storage.sql.listener import CANCEL, Listener
from app.storage.sql.relocation import Standing, relocate
from app.storage.sql.storage import SqlStorage
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

KEYS_AT_ONCE: Final = 200

# Workspaces of a service that is root and was started in a directory nobody else can reach.
ELSEWHERE: Final = Path("/var/lib/toolcrib")

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
            await asyncio.to_thread(_make_data_dir, settings)
            account = await asyncio.to_thread(_account, settings)
            if settings.database_url is None:
                stack.enter_context(InstanceLock(settings.data_dir))
            place = await asyncio.to_thread(_place, settings, account)
        if account is not None:
            await asyncio.to_thread(load_codecs)
        jobs = _jobs(settings)
        forwarding = None if jobs is None else await stack.enter_async_context(open_forwarding())
        storage = await asyncio.to_thread(_open_storage, settings, jobs)
        stack.callback(storage.close)
        reads = ReadPool()
        stack.callback(reads.close)
        process = _process(settings, address)
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
            else await asyncio.to_thread(_file_locks, settings)
        )
        if locks is not None:
            stack.callback(locks.close)
        mutations = FileMutationQueue(locks)
        policy = _command_policy(settings)
        disk_usage = DiskUsage(settings.workspace_bytes or None)
        means = await asyncio.to_thread(_means, settings, policy.limits, account, place)
        sandbox = await _sandbox(settings, means)
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
        rates, streams = _rates(settings), StreamSlots(settings.streams_per_key, settings.streams_per_batch)
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


def migrate(settings: Settings) -> None:
    """Bring the database up to date.

    Raises:
        ConfigurationError: it is newer than this code, or does not answer.
    """
    _make_data_dir(settings)
    _open_storage(settings, _jobs(settings)).close()


def copy_records(source: str, target: str, tell: Callable[[str], None]) -> None:
    """Copy all records to a database without any and compare the two.

    Args:
        source: a data directory, or a URL that begins with `sqlite:///` or `postgresql://`.
        target: the same.
        tell: gets the lines that are to be shown.

    Raises:
        ConfigurationError: the copy is refused; the message says why, and nothing was copied.
        StorageError: it failed. Nothing was copied, unless the message says otherwise.
    """
    to = _database(target)
    try:
        if isinstance(to, Path):
            to.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        sums = copy_database(_database(source), to, tell)
    except (CopyRefused, SchemaTooNew, ConfigurationError) as error:
        raise ConfigurationError(_sentence("the copy is refused", error)) from None
    except (ValueError, OSError) as error:
        raise ConfigurationError(_sentence("one of the databases cannot be used", error)) from None
    tell(f"compared: {len(sums)} tables, {sum(one.rows for one in sums)} rows, the same in both databases")


def list_nodes(settings: Settings, tell: Callable[[str], None]) -> None:
    """Tell of the nodes of the database, their workspaces and the processes that live.

    Raises:
        ConfigurationError: the database cannot be used.
    """
    storage = _open_storage(settings)
    try:
        nodes, living = storage.nodes(), storage.living()
    finally:
        storage.close()
    for node in nodes:
        own = [process for process in living if process.node_id == node.id]
        tell(
            f"{node.id}: {node.workspaces} open workspaces, {'' if own else 'no '}living processes{':' if own else ''}"
        )
        for process in own:
            tell(f"  {process.id} {process.role} {process.url or ''}".rstrip())
    for process in living:
        if process.node_id is None:
            tell(f"{process.id} {process.role} {process.url or ''}, without a node")


def relocate_workspaces(settings: Settings, tell: Callable[[str], None], *, node: str | None = None) -> None:
    """Take the directories that stand at the roots of the open workspaces for theirs, as after a restore.

    Those of managed workspaces are looked for in the data directory, adopted ones where they were. What is found
    belongs to the node of the data directory from then on.

    Args:
        settings: which data directory and database.
        tell: gets the line that is to be shown.
        node: only the workspaces of this node; processes of other nodes may go on.

    Raises:
        ConfigurationError: the database cannot be used, or a service uses it.
    """
    _make_data_dir(settings)
    here = node_of(settings.data_dir)
    _open_storage(settings).close()
    roots = WorkspaceRoots(_place(settings, _account(settings)), settings.workspace_roots)

    def find(workspace: Workspace) -> Standing | None:
        root = roots.managed(workspace.id) if workspace.managed else workspace.root
        found = look_at(root) if Path(root).is_dir() else None
        if found is None:
            tell(f"{workspace.id}: there is no directory {display_path(root)}")
            return None
        return Standing(root, *found.identity)

    url = settings.direct_url
    try:
        database = settings.data_dir / "toolcrib.db" if url is None else url
        done = relocate(database, find, here=here, node=node)
    except (StorageError, ConfigurationError, CopyRefused) as error:
        raise ConfigurationError(_sentence("nothing was changed", error)) from None
    tell(
        f"open workspaces: {done.total}; the directories of {len(done.moved)} were taken for theirs, those of "
        f"{len(done.missing)} are missing"
    )


def _database(given: str) -> str | Path:
    return given if "://" in given else Path(given).expanduser().resolve() / "toolcrib.db"


def create_key(settings: Settings, request: KeyRequest) -> str:
    """Make an API key and return its token, which is stored nowhere; a service that runs takes it at once.

    Raises:
        ConfigurationError: the database cannot be used.
        StorageError: the key was not stored.
    """
    write, token = make_key(request, by=COMMAND_LINE)
    with _records(settings) as storage:
        storage.apply([write])
    return token


def every_key(settings: Settings) -> Iterator[ApiKey]:
    """Yield all API keys, newest first; revoked and expired ones too.

    Raises:
        ConfigurationError: the database cannot be used.
        StorageError: it failed meanwhile.
    """
    with _records(settings) as storage:
        before: str | None = None
        while True:
            page = storage.keys_page(before=before, limit=KEYS_AT_ONCE)
            yield from page.items
            before = page.next_before
            if before is None:
                return


def revoke_key(settings: Settings, key_id: str) -> None:
    """Revoke an API key, also while a service runs; one that was revoked before stays as it is.

    Raises:
        ConfigurationError: there is no such key, or the database cannot be used.
        StorageError: it is as it was.
    """
    if key_id == ENVIRONMENT:
        raise ConfigurationError(f"the key of the environment cannot be revoked: change {variable('api_key')}.")
    unknown = ConfigurationError(f"there is no key {display_path(key_id)}.")
    if not is_id(key_id, "key"):
        raise unknown
    with _records(settings) as storage:
        [outcome] = storage.apply([make_revocation(key_id, by=COMMAND_LINE)])
    if isinstance(outcome, Refused):
        raise unknown


@contextmanager
def _records(settings: Settings) -> Iterator[SqlStorage]:
    """Open the database for a command, beside a service that may be running."""
    _make_data_dir(settings)
    storage = _open_storage(settings)
    try:
        yield storage
    finally:
        storage.close()


def _make_data_dir(settings: Settings) -> None:
    """Make the data directory, and keep what is in it to this process's user: others may pass through it."""
    try:
        settings.data_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
        if settings.database_url is None:
            _database_file(settings).touch(mode=0o600)  # the database makes its other files like this one
        for entry in settings.data_dir.iterdir():
            if entry.is_file() and not entry.is_symlink():
                entry.chmod(entry.stat().st_mode & 0o700)
    except OSError as error:
        raise ConfigurationError(
            f"{variable('data_dir')}: {settings.data_dir} cannot be made: {error.strerror}."
        ) from None


def _database_file(settings: Settings) -> Path:
    return settings.data_dir / "toolcrib.db"


def _file_locks(settings: Settings) -> FileLocks:
    """Return the locks that processes which share the data directory change files under.

    Raises:
        ConfigurationError: the file system of the data directory knows none.
    """
    path = settings.data_dir / "file-locks"
    try:
        return FileLocks(path)
    except OSError as error:
        raise ConfigurationError(
            f"{variable('data_dir')}: {path} cannot be locked, so changes of files could not be kept apart from those "
            f"of other processes: {error.strerror}."
        ) from None


def _account(settings: Settings) -> Account | None:
    """Return the account that owns managed workspaces; None when that is this process's own user.

    Raises:
        ConfigurationError: it cannot be the one that is asked for.
    """
    name = variable("run_as")
    if not acts_as_others() and "run_as" not in settings.model_fields_set:
        return None
    try:
        account = find_account(settings.run_as)
    except ValueError as error:
        raise ConfigurationError(f"{name}={settings.run_as} is wrong: {error}.") from None
    if acts_as_others():
        require_power_to_act(account)
        return account
    if account.uid != os.geteuid():
        raise ConfigurationError(
            f"{name}={settings.run_as} cannot be had: the service was started as user {os.geteuid()}, and only root "
            "can act as others. Leave it unset, or start the service as root."
        )
    return None


def _place(settings: Settings, account: Account | None) -> Path:
    """Return the directory workspaces are made in: the data directory, or one elsewhere when that cannot be reached.

    Raises:
        ConfigurationError: the account cannot reach the data directory that was asked for.
    """
    data_dir = settings.data_dir
    if account is None:
        return data_dir
    # What is in it keeps to itself; passing through is what an account needs.
    data_dir.chmod(stat.S_IMODE(data_dir.stat().st_mode) | 0o011)
    closed = obstacle(data_dir, account)
    if closed is None:
        return data_dir
    place = ELSEWHERE / hashlib.sha256(os.fsencode(data_dir)).hexdigest()[:16]
    if "data_dir" not in settings.model_fields_set:
        # A checkout below the home of root: it shall serve as it is, without anybody opening that home.
        with suppress(OSError):
            for directory in (ELSEWHERE, place):
                directory.mkdir(mode=0o711, parents=True, exist_ok=True)
                directory.chmod(0o711)
            if obstacle(place, account) is None:
                _log.warning("workspaces_elsewhere", directory=str(place), closed=str(closed), user=account.uid)
                return place
    raise ConfigurationError(
        f"{variable('data_dir')}: files are touched and commands run as user {account.uid} ({variable('run_as')}), who "
        f"may not pass {closed} on the way to {data_dir}: choose a data directory elsewhere, such as {ELSEWHERE}, or "
        f"let others pass (chmod o+x {closed})."
    )


def _means(settings: Settings, most: CommandLimits, account: Account | None, place: Path) -> SandboxMeans:
    """Return what sandboxes are made with, programs where the account can start them.

    Raises:
        ConfigurationError: a program cannot be copied to such a place.
    """
    bwrap = find_bwrap(None if settings.bwrap is None else str(settings.bwrap))
    ripgrep = installed_ripgrep()
    try:
        provided = [
            None if program is None else Path(provide(program, account, place / "programs"))
            for program in (bwrap, ripgrep)
        ]
    except OSError as error:
        raise ConfigurationError(
            f"programs cannot be copied to {place}, where user {account and account.uid} can start them: "
            f"{error.strerror}."
        ) from None
    return SandboxMeans(
        place,
        settings.sandbox_readable,
        bwrap=provided[0],
        ripgrep=provided[1],
        most=most,
        account=account,
        hidden=() if settings.data_dir == place else (settings.data_dir,),
    )


def _jobs(settings: Settings) -> JobQueue | None:
    """Return where batches for other nodes wait; None when they are refused.

    Raises:
        ConfigurationError: what it takes is not installed.
    """
    if settings.backend == "local" or settings.direct_url is None:
        return None
    try:
        return JobQueue(settings.direct_url)
    except ConfigurationError as error:
        raise ConfigurationError(_sentence(f"{variable('backend')}=distributed cannot be had", error)) from None


def _process(settings: Settings, address: str | None) -> Process:
    node_id = None if settings.role == "api" else node_of(settings.data_dir)
    return Process(new_id("proc"), node_id, settings.role, settings.advertise_url or address)


def _open_storage(settings: Settings, jobs: JobQueue | None = None) -> SqlStorage:
    url = settings.database_url
    try:
        storage = SqlStorage(
            _database_file(settings) if url is None else url.get_secret_value(),
            jobs=jobs,
            direct=None if settings.database_direct_url is None else settings.direct_url,
        )
    except (ConfigurationError, ValueError) as error:
        raise ConfigurationError(_sentence(f"{variable('database_url')} is wrong", error)) from None
    try:
        storage.migrate()
    except SchemaTooNew as error:
        storage.close()
        raise ConfigurationError(_sentence("the start is refused", error)) from None
    except StorageError as error:
        storage.close()
        where = variable("data_dir") if url is None else variable("database_url")
        raise ConfigurationError(_sentence(f"the database of {where} cannot be used", error)) from None
    return storage


def _sentence(what: str, error: Exception) -> str:
    return f"{what}: {' '.join(str(error).split()).removesuffix('.')}."


def _rates(settings: Settings) -> RequestRates:
    requests = failures = None
    if settings.rate_limit > 0:
        burst = settings.rate_burst or math.ceil(settings.rate_limit * BURST_SECONDS)
        requests = Rate(settings.rate_limit, burst)
    if settings.auth_failures_per_minute > 0:
        failures = Rate(settings.auth_failures_per_minute / 60, settings.auth_failures_per_minute)
    return RequestRates(requests, failures)


def _command_policy(settings: Settings) -> CommandPolicy:
    memory = settings.command_memory_bytes
    return CommandPolicy(
        CommandLimits(
            processes=settings.command_processes,
            open_files=settings.command_open_files,
            file_bytes=settings.command_file_bytes,
            cpu_seconds=settings.command_cpu_seconds,
            memory_bytes=memory_share() if memory is None else memory,
            tmp_bytes=settings.command_tmp_bytes,
        ),
        allow_network=settings.allow_network,
        min_free_bytes=settings.min_free_bytes,
    )


async def _sandbox(settings: Settings, means: SandboxMeans) -> Sandbox:
    """Return the strongest sandbox that holds, or the one that is asked for.

    Raises:
        ConfigurationError: the one that is asked for does not hold.
    """
    if settings.role == "api":
        return RefusedSandbox(f"this process runs nothing ({variable('role')}=api)")
    tiers: Sequence[Tier] = ("namespace", "landlock", "process")
    if settings.sandbox != "auto":
        tiers = (settings.sandbox,)
    elif not settings.loopback:
        tiers = ("namespace", "landlock")
    selection = await select_sandbox(tiers, means)
    for tier, reason in selection.refused.items():
        if settings.sandbox != "auto":
            raise ConfigurationError(f"{variable('sandbox')}={tier} cannot be had here: {reason.removesuffix('.')}.")
        _log.warning("sandbox_not_available", tier=tier, reason=reason)
    sandbox = selection.sandbox
    if sandbox is None:
        _log.warning("commands_refused", host=settings.host)
        return RefusedSandbox(
            "commands do not run here: nothing on this machine isolates them, and this service can be reached from "
            f"other machines. Its operator can read why in the log, or allow it with {variable('sandbox')}=process"
        )
    report = sandbox.report
    if report.tier == "process":
        _log.warning("commands_are_not_isolated", missing=list(report.missing))
    return sandbox


async def _end_batches(service: BatchService) -> None:
    with suppress(TimeoutError):
        async with asyncio.timeout(END_SECONDS):
            await service.drain(0)


async def _cancel(task: asyncio.Task[None]) -> None:
    task.cancel()
    await asyncio.wait([task])
