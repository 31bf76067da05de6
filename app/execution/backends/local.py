"""The backend in this process: batches wait per workspace in order and are taken up round robin between workspaces."""

import asyncio
import contextvars
from collections import deque
from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import Final

import structlog

from app.domain.abort import AbortReason
from app.domain.batch import Batch
from app.domain.workspace import Workspace
from app.execution.backends.admission import Admission
from app.execution.executor import BatchControl
from app.execution.runner import BatchRunner

RUNNING_BATCHES: Final = 64
RUNNING_BATCHES_PER_WORKSPACE: Final = 16

_log = structlog.get_logger(__name__)


@dataclass(slots=True)
class _Job:
    """A batch of this process, from its acceptance to its stored end."""

    batch: Batch
    ended: asyncio.Future[Batch | None]
    workspace: Workspace | None
    control: BatchControl = field(default_factory=BatchControl)
    running: bool = False
    # Of the request that submitted it, whoever starts it in the end: what a trace hangs on.
    context: contextvars.Context = field(default_factory=contextvars.copy_context)


class LocalBackend:
    """Runs batches as tasks it owns.

    Args:
        runner: runs one batch.
        running: how many batches run at once.
        per_workspace: how many of them may be of one workspace, so that no workspace takes all places.
        admission: how many may wait or run.
    """

    def __init__(
        self,
        runner: BatchRunner,
        *,
        running: int = RUNNING_BATCHES,
        per_workspace: int = RUNNING_BATCHES_PER_WORKSPACE,
        admission: Admission | None = None,
    ) -> None:
        self._runner = runner
        self.limit: Final = running
        self.per_workspace: Final = per_workspace
        self._admission = admission or Admission()
        self._jobs: dict[str, _Job] = {}
        self._queues: dict[str, deque[_Job]] = {}
        self._turns: deque[str] = deque()
        self._running: dict[str, int] = {}
        self._tasks: set[asyncio.Task[Batch | None]] = set()
        self._places = 0
        self._draining = False
        self._room = asyncio.Event()
        self._room.set()

    @property
    def queued(self) -> int:
        """How many batches wait for a place."""
        return sum(len(queue) for queue in self._queues.values())

    @property
    def running(self) -> int:
        """How many batches run."""
        return len(self._tasks)

    def reserve(self, batch: Batch, request: Hashable | None = None) -> None:
        self._admission.reserve(batch, request)

    def release(self, batch: Batch, request: Hashable | None = None, *, accepted: bool) -> None:
        self._admission.release(batch, request, accepted=accepted)

    def submit(self, batch: Batch, workspace: Workspace | None = None) -> None:
        self._admission.enter(batch)
        job = _Job(batch, asyncio.get_running_loop().create_future(), workspace)
        self._jobs[batch.id] = job
        if batch.workspace_id not in self._queues:
            self._queues[batch.workspace_id] = deque()
            self._turns.append(batch.workspace_id)
        queue = self._queues[batch.workspace_id]
        # Ids are in the order of acceptance; batches that others accepted come from several jobs at once.
        place = len(queue)
        while place and queue[place - 1].batch.id > batch.id:
            place -= 1
        queue.insert(place, job)
        self._take_up()
        if not job.running:
            job.workspace = None  # it may change while the batch waits

    @property
    def has_room(self) -> bool:
        # What waits here can run nowhere else, so no more than may run next is taken from where others can take it.
        return not self._draining and self.queued < self.limit

    async def room(self) -> None:
        while not self.has_room:
            self._room.clear()
            await self._room.wait()

    def is_local(self, batch_id: str) -> bool:
        return batch_id in self._jobs

    def cancel(self, batch_id: str, call_id: str | None = None) -> None:
        job = self._jobs.get(batch_id)
        if job is None:
            return
        if call_id is not None:
            job.control.cancel_call(call_id)
            return
        self._stop(job, AbortReason.CANCELLED)

    async def wait(self, batch_id: str, seconds: float) -> bool:
        job = self._jobs.get(batch_id)
        if job is None:
            return True
        await asyncio.wait([job.ended], timeout=seconds)
        return job.ended.done()

    async def outcome(self, batch_id: str, seconds: float) -> Batch | None:
        job = self._jobs.get(batch_id)
        if job is None:
            return None
        await asyncio.wait([job.ended], timeout=seconds)
        return job.ended.result() if job.ended.done() else None

    async def drain(self, grace: float) -> None:
        self._draining = True
        if self._jobs and grace > 0:
            await asyncio.wait([job.ended for job in self._jobs.values()], timeout=grace)
        self.stop_all(AbortReason.INTERRUPTED)
        if self._jobs:
            await asyncio.wait([job.ended for job in self._jobs.values()])

    def stop_all(self, reason: AbortReason) -> None:
        for job in list(self._jobs.values()):
            self._stop(job, reason)

    def _stop(self, job: _Job, reason: AbortReason) -> None:
        job.control.abort(reason)
        if not job.running:
            # It only has ends to write, so it needs no place: a full service can still be told to stop.
            queue = self._queues[job.batch.workspace_id]
            queue.remove(job)
            self._start(job, takes_place=False)

    def _take_up(self) -> None:
        """Start what there is room for, one batch a turn and workspace."""
        for _ in range(len(self._turns)):
            if self._places >= self.limit:
                return
            workspace_id = self._turns[0]
            queue = self._queues[workspace_id]
            if queue and self._running.get(workspace_id, 0) < self.per_workspace:
                self._start(queue.popleft(), takes_place=True)
            if queue:
                self._turns.rotate(-1)
            else:
                self._turns.popleft()
                del self._queues[workspace_id]

    def _start(self, job: _Job, *, takes_place: bool) -> None:
        job.running = True
        workspace_id = job.batch.workspace_id
        if takes_place:
            self._places += 1
            self._running[workspace_id] = self._running.get(workspace_id, 0) + 1
        task = asyncio.create_task(self._run(job), name=f"batch {job.batch.id}", context=job.context)
        self._tasks.add(task)
        task.add_done_callback(lambda done: self._done(done, job, takes_place=takes_place))

    async def _run(self, job: _Job) -> Batch | None:
        with structlog.contextvars.bound_contextvars(batch_id=job.batch.id, request_id=job.batch.request_id):
            return await self._runner.run(job.batch, job.control, job.workspace)

    def _done(self, task: asyncio.Task[Batch | None], job: _Job, *, takes_place: bool) -> None:
        self._tasks.discard(task)
        self._jobs.pop(job.batch.id, None)
        self._admission.leave(job.batch.id)
        error = None if task.cancelled() else task.exception()
        if not job.ended.done():
            job.ended.set_result(None if task.cancelled() or error is not None else task.result())
        if error is not None:
            _log.error("batch_runner_failed", batch_id=job.batch.id, exc_info=error)
        if takes_place:
            self._places -= 1
            workspace_id = job.batch.workspace_id
            left = self._running[workspace_id] - 1
            if left:
                self._running[workspace_id] = left
            else:
                del self._running[workspace_id]
        self._take_up()
        if self.has_room:
            self._room.set()
