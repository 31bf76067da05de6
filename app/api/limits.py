"""What `/v1/limits` tells: the bounds as they are enforced, read from where they are, and how much of them is used."""

from dataclasses import asdict

from pydantic import Field

from app.api.dependencies import BODY_MAX_BYTES, PAGE_MAX, WAIT_MAX_SECONDS, Services
from app.api.event_stream import SEND_SECONDS
from app.api.schemas import CALLS_MAX, FILES_MAX, METADATA_MAX_BYTES, TIMEOUT_MAX_MS, TTL_MAX_SECONDS, ResponseModel
from app.api.upload import IDLE_SECONDS, PARTS_MAX
from app.domain.workspace import OPTION_CAPTURE_MAX_BYTES, OPTION_TIMEOUT_MAX_MS, WorkspaceOptions
from app.events.batch_writer import PARTIAL_MAX_BYTES, PARTIALS_PER_CALL, PENDING_MAX_BYTES, STORED_RESULT_MAX_BYTES
from app.events.frames import ARGUMENTS_MAX_BYTES, FRAME_MAX_BYTES
from app.execution.executor import PARALLEL_CALLS
from app.sandbox.archive_reader import ENTRIES_MAX, NAMES_MAX_BYTES
from app.sandbox.containment import MAX_NAME_BYTES, MAX_PATH_BYTES
from app.sandbox.environment import MAX_TOTAL_BYTES, MAX_VALUE_BYTES, MAX_VARIABLES
from app.sandbox.process_slots import SlotUse
from app.services.batches import INLINE_BYTES
from app.services.files import TREE_ENTRIES_MAX
from app.services.pressure import CallerUse, ServiceUse, WorkspaceUse


class RequestLimitsBody(ResponseModel):
    """`perSecond` and `burst` are of one key, null when there is no rate limit."""

    body_bytes: int
    wait_seconds: int
    page_items: int
    per_second: float | None
    burst: int | None
    auth_failures_per_minute: int | None = Field(description="From one address; null: no limit.")


class WorkspaceLimitsBody(ResponseModel):
    bytes: int | None = Field(description="What one that the service made may hold on the disk; null: no limit.")
    metadata_bytes: int
    files: int = Field(description="In the request that makes a workspace.")
    ttl_seconds: int


class BatchLimitsBody(ResponseModel):
    """`total`, `perWorkspace` and `bytes` (of arguments) count batches that wait or run; `running` those that run."""

    calls: int
    parallel_calls: int
    metadata_bytes: int
    timeout_ms: int
    total: int
    per_workspace: int
    bytes: int
    running: int
    running_per_workspace: int


class CommandLimitsBody(ResponseModel):
    """`default…` hold where a workspace's options say nothing, `…Max` is the most they may say.

    The limits of one command, from `processes` on, may be tightened by a workspace; null: none. `network`: whether a
    workspace may ask for the machine's. `minFreeBytes` is what the disk must have free for a command to be started.
    """

    running: int
    running_per_workspace: int
    default_timeout_ms: int
    default_max_timeout_ms: int
    timeout_max_ms: int
    default_capture_bytes: int
    capture_max_bytes: int
    variables: int
    variable_bytes: int
    environment_bytes: int
    processes: int | None
    open_files: int | None
    file_bytes: int | None
    cpu_seconds: int | None
    memory_bytes: int | None
    tmp_bytes: int | None
    network: bool
    min_free_bytes: int


class SearchLimitsBody(ResponseModel):
    running: int
    running_per_workspace: int


class ResultLimitsBody(ResponseModel):
    """`pendingOutputBytes`: of one call's output that waits to be stored; its command is not read from meanwhile."""

    stored_bytes: int
    inline_bytes: int
    frame_bytes: int
    event_arguments_bytes: int
    partial_bytes: int
    partials: int
    pending_output_bytes: int


class StreamLimitsBody(ResponseModel):
    """`unreadSeconds`: a client that reads nothing for so long is dropped."""

    per_key: int
    per_batch: int
    unread_seconds: int


class FileLimitsBody(ResponseModel):
    """`uploadBytes` is the body of one request; `default…Bytes` hold where a workspace's options say nothing."""

    path_bytes: int
    name_bytes: int
    upload_bytes: int
    upload_idle_seconds: int
    form_parts: int
    tree_entries: int
    default_read_bytes: int
    default_write_bytes: int
    default_edit_bytes: int


class ArchiveLimitsBody(ResponseModel):
    """`bytes`: of an archive, and of what it unpacks to."""

    bytes: int
    entries: int
    names_bytes: int


class QueueLimitsBody(ResponseModel):
    """What may wait to be stored before new work is refused with 503 `overloaded`."""

    rows: int
    bytes: int


class SlotUseBody(ResponseModel):
    running: int
    waiting: int


class CallerUseBody(ResponseModel):
    """`requestsRemaining` is null when there is no rate limit."""

    requests_remaining: int | None
    batches: int
    commands: SlotUseBody
    streams: int


class WorkspaceUseBody(ResponseModel):
    """`bytes` on the disk, as last looked up; null when nothing asked for that yet."""

    id: str
    bytes: int | None
    batches: int
    commands: SlotUseBody


class ServiceUseBody(ResponseModel):
    batches: int
    batch_bytes: int
    running_batches: int
    commands: SlotUseBody
    streams: int
    queue_rows: int
    queue_bytes: int


class UseBody(ResponseModel):
    """`workspace` is there when it was asked for, `service` (of all callers) for keys with the scope `admin`."""

    caller: CallerUseBody
    workspace: WorkspaceUseBody | None = None
    service: ServiceUseBody | None = None


class LimitsBody(ResponseModel):
    """Bounds of this process, and how much of them is used now. Sizes in bytes, times as their names say."""

    requests: RequestLimitsBody
    workspaces: WorkspaceLimitsBody
    batches: BatchLimitsBody
    commands: CommandLimitsBody
    searches: SearchLimitsBody
    results: ResultLimitsBody
    streams: StreamLimitsBody
    files: FileLimitsBody
    archives: ArchiveLimitsBody
    queue: QueueLimitsBody
    use: UseBody


def limits_body(services: Services, use: UseBody) -> LimitsBody:
    """Return the bounds as they hold in this process."""
    pressure, options = services.pressure, WorkspaceOptions()
    rate, failures = pressure.rates.requests, pressure.rates.failures
    return LimitsBody(
        requests=RequestLimitsBody(
            body_bytes=BODY_MAX_BYTES,
            wait_seconds=int(WAIT_MAX_SECONDS),
            page_items=PAGE_MAX,
            per_second=None if rate is None else rate.rate.per_second,
            burst=None if rate is None else rate.rate.burst,
            auth_failures_per_minute=None if failures is None else failures.rate.burst,
        ),
        workspaces=WorkspaceLimitsBody(
            bytes=pressure.disk.most,
            metadata_bytes=METADATA_MAX_BYTES,
            files=FILES_MAX,
            ttl_seconds=TTL_MAX_SECONDS,
        ),
        batches=BatchLimitsBody(
            calls=CALLS_MAX,
            parallel_calls=PARALLEL_CALLS,
            metadata_bytes=METADATA_MAX_BYTES,
            timeout_ms=TIMEOUT_MAX_MS,
            total=pressure.admission.batches,
            per_workspace=pressure.admission.per_workspace,
            bytes=pressure.admission.max_bytes,
            running=pressure.backend.limit,
            running_per_workspace=pressure.backend.per_workspace,
        ),
        commands=CommandLimitsBody(
            running=pressure.commands.limit,
            running_per_workspace=pressure.commands.per_workspace,
            default_timeout_ms=options.bash.timeout,
            default_max_timeout_ms=options.bash.max_timeout,
            timeout_max_ms=OPTION_TIMEOUT_MAX_MS,
            default_capture_bytes=options.bash.capture_bytes,
            capture_max_bytes=OPTION_CAPTURE_MAX_BYTES,
            variables=MAX_VARIABLES,
            variable_bytes=MAX_VALUE_BYTES,
            environment_bytes=MAX_TOTAL_BYTES,
            **asdict(pressure.policy.limits),
            network=pressure.policy.allow_network,
            min_free_bytes=pressure.policy.min_free_bytes,
        ),
        searches=SearchLimitsBody(
            running=pressure.searches.limit, running_per_workspace=pressure.searches.per_workspace
        ),
        results=ResultLimitsBody(
            stored_bytes=STORED_RESULT_MAX_BYTES,
            inline_bytes=INLINE_BYTES,
            frame_bytes=FRAME_MAX_BYTES,
            event_arguments_bytes=ARGUMENTS_MAX_BYTES,
            partial_bytes=PARTIAL_MAX_BYTES,
            partials=PARTIALS_PER_CALL,
            pending_output_bytes=PENDING_MAX_BYTES,
        ),
        streams=StreamLimitsBody(
            per_key=pressure.streams.per_key, per_batch=pressure.streams.per_batch, unread_seconds=int(SEND_SECONDS)
        ),
        files=FileLimitsBody(
            path_bytes=MAX_PATH_BYTES,
            name_bytes=MAX_NAME_BYTES,
            upload_bytes=services.files.max_upload_bytes,
            upload_idle_seconds=int(IDLE_SECONDS),
            form_parts=PARTS_MAX,
            tree_entries=TREE_ENTRIES_MAX,
            default_read_bytes=options.read.max_bytes,
            default_write_bytes=options.write.max_bytes,
            default_edit_bytes=options.edit.max_bytes,
        ),
        archives=ArchiveLimitsBody(bytes=services.archives.max_bytes, entries=ENTRIES_MAX, names_bytes=NAMES_MAX_BYTES),
        queue=QueueLimitsBody(rows=pressure.records.capacity_rows, bytes=pressure.records.capacity_bytes),
        use=use,
    )


def caller_use(use: CallerUse) -> CallerUseBody:
    return CallerUseBody(
        requests_remaining=use.requests_remaining,
        batches=use.batches,
        commands=_slots(use.commands),
        streams=use.streams,
    )


def workspace_use(workspace_id: str, use: WorkspaceUse) -> WorkspaceUseBody:
    return WorkspaceUseBody(id=workspace_id, bytes=use.bytes, batches=use.batches, commands=_slots(use.commands))


def service_use(use: ServiceUse) -> ServiceUseBody:
    return ServiceUseBody(
        batches=use.batches,
        batch_bytes=use.batch_bytes,
        running_batches=use.running_batches,
        commands=_slots(use.commands),
        streams=use.streams,
        queue_rows=use.queue_rows,
        queue_bytes=use.queue_bytes,
    )


def _slots(use: SlotUse) -> SlotUseBody:
    return SlotUseBody(running=use.running, waiting=use.waiting)
