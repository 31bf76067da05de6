"""What presses on the service and where it gives way: every bound that callers share, and how much of each is used."""

from dataclasses import dataclass

from app.domain.workspace import Workspace
from app.execution.backends.admission import Admission
from app.execution.backends.local import LocalBackend
from app.sandbox.disk import DiskUsage
from app.sandbox.limits import CommandPolicy
from app.sandbox.process_slots import ProcessSlots, SlotUse
from app.services.request_rates import RequestRates
from app.services.streams import StreamSlots
from app.storage.record_writer import RecordWriter


@dataclass(frozen=True, slots=True)
class CallerUse:
    """What one caller uses now. `requests_remaining` is None without a rate limit."""

    requests_remaining: int | None
    batches: int
    commands: SlotUse
    streams: int


@dataclass(frozen=True, slots=True)
class WorkspaceUse:
    """`bytes` on the disk, as last looked up; None when nothing asked for that yet."""

    batches: int
    commands: SlotUse
    bytes: int | None


@dataclass(frozen=True, slots=True)
class ServiceUse:
    """What all callers use together; `queue_rows` and `queue_bytes` wait to be stored."""

    batches: int
    batch_bytes: int
    running_batches: int
    commands: SlotUse
    streams: int
    queue_rows: int
    queue_bytes: int


@dataclass(frozen=True, slots=True)
class Pressure:
    """The bounds themselves: what is told of them is what holds."""

    rates: RequestRates
    streams: StreamSlots
    admission: Admission
    backend: LocalBackend
    commands: ProcessSlots
    searches: ProcessSlots
    records: RecordWriter
    policy: CommandPolicy
    disk: DiskUsage

    def of_caller(self, key_id: str, owner: str) -> CallerUse:
        requests = self.rates.requests
        return CallerUse(
            requests_remaining=None if requests is None else requests.look(key_id).remaining,
            batches=self.admission.of_owner(owner),
            commands=self.commands.use_of(owner),
            streams=self.streams.of_key(key_id),
        )

    def of_workspace(self, workspace: Workspace) -> WorkspaceUse:
        return WorkspaceUse(
            self.admission.of_workspace(workspace.id),
            self.commands.use_in(workspace.root),
            self.disk.held((workspace.root_device, workspace.root_inode)),
        )

    def of_service(self) -> ServiceUse:
        weight = self.records.weight
        return ServiceUse(
            batches=self.admission.held.batches,
            batch_bytes=self.admission.held.bytes,
            running_batches=self.backend.running,
            commands=self.commands.use,
            streams=self.streams.total,
            queue_rows=weight.rows,
            queue_bytes=weight.bytes,
        )
