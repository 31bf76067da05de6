"""One batch's life: build the workspace's tools, run the executor, close the batch. Backends call it, nobody else."""

import asyncio
from collections.abc import Callable, Mapping
from typing import Protocol

import structlog

from app.domain.abort import AbortReason
from app.domain.batch import Batch, BatchStatus
from app.domain.clock import now_ms
from app.domain.workspace import Workspace
from app.errors import Fenced
from app.events.batch_writer import BatchWriter
from app.execution.executor import BatchControl, Execution, Executor, effective_mode
from app.execution.finalizer import Finalizer
from app.execution.observed_sink import ObservedSink
from app.hooks.base import HookChain
from app.storage.base import Storage
from app.storage.read_pool import ReadPool
from app.storage.record_writer import RecordWriter
from app.telemetry.observer import BatchFacts, BatchObserver, Observe, unobserved
from app.tools.base import AgentTool

_log = structlog.get_logger(__name__)


class ToolFactory(Protocol):
    """Makes the tools of a workspace for one batch."""

    def __call__(self, workspace: Workspace, output_url: Callable[[str], str | None]) -> Mapping[str, AgentTool]:
        """Return every tool of the workspace by name; `output_url` gives a URL for a caller's call id."""
        ...


class BatchRunner:
    """Runs batches this process owns; each exactly once, to exactly one terminal status.

    Args:
        observe: is told of every batch that is taken up, and hears of it until its end.
    """

    def __init__(
        self,
        *,
        storage: Storage,
        reads: ReadPool,
        records: RecordWriter,
        finalizer: Finalizer,
        hooks: HookChain,
        tools: ToolFactory,
        observe: Observe = unobserved,
    ) -> None:
        self._storage = storage
        self._reads = reads
        self._records = records
        self._finalizer = finalizer
        self._hooks = hooks
        self._tools = tools
        self._observe = observe

    async def run(self, batch: Batch, control: BatchControl, workspace: Workspace | None = None) -> Batch | None:
        """Run one batch to its end and return when that is stored.

        A batch that another owner has taken over is stopped and left to it.

        Args:
            batch: the row as it was accepted or claimed, with its calls.
            control: how the batch is stopped.
            workspace: the workspace as it is now; None when it has to be read.

        Returns:
            The batch as its rows say now, or None when only they can tell.
        """
        if workspace is None:
            workspace = await self._reads.run_patiently(self._storage.workspace, batch.workspace_id)
        if workspace is None:  # the foreign key forbids it
            raise LookupError(f"batch {batch.id} has no workspace")
        waited = max(0, now_ms() - batch.created_at) / 1000
        observer = self._observe(
            BatchFacts(batch.id, workspace.id, batch.request_id, batch.execution_mode, len(batch.calls), waited)
        )
        writer = BatchWriter(
            batch,
            self._records,
            capture_bytes=workspace.options.capture_bytes,
            on_fenced=lambda: control.abort(AbortReason.INTERRUPTED),
            on_gap=observer.output_cut,
        )
        try:
            await self._run(batch, workspace, control, writer, observer)
        except Fenced:
            _log.warning("batch_fenced", batch_id=batch.id)
            if writer.failure is not None and not isinstance(writer.failure, Fenced):
                await self._end(batch)
            return None
        except Exception:  # noqa: BLE001 - whatever it is, the batch ends
            _log.exception("batch_failed", batch_id=batch.id)
            await self._end(batch)
            return None
        finally:
            observer.close()
        return None if control.asked else writer.ended_batch

    async def _end(self, batch: Batch) -> None:
        # A row could not be stored, or there is a bug here: the batch is still this process's and has to end.
        claimed = await self._finalizer.claim_as_seen(batch.id, batch.epoch)
        if claimed is not None:
            await self._finalizer.finalize(claimed, AbortReason.INTERRUPTED)

    async def _run(
        self, batch: Batch, workspace: Workspace, control: BatchControl, writer: BatchWriter, observer: BatchObserver
    ) -> None:
        calls = [record.to_call() for record in batch.calls]
        urls = {call.tool_call_id: f"/v1/calls/{call.id}/output" for call in calls}
        tools = self._tools(workspace, urls.get)
        mode = effective_mode(batch.execution_mode, tools, calls)
        executor = Executor(
            workspace=workspace,
            batch=batch,
            tools=tools,
            hooks=self._hooks,
            sink=ObservedSink(writer, observer),
            control=control,
        )
        timer: asyncio.TimerHandle | None = None
        if batch.timeout_ms is not None:
            timer = asyncio.get_running_loop().call_later(batch.timeout_ms / 1000, control.abort, AbortReason.TIMEOUT)
        try:
            execution = await executor.run(calls, mode, batch.on_error)
        finally:
            if timer is not None:
                timer.cancel()
        status = _status(control, execution)
        await writer.batch_ended(
            status,
            execution.summary,
            mode,
            has_errors=execution.has_errors,
            terminate=execution.terminate,
        )
        observer.batch_ended(status.value)
        _log.info("batch", workspace_id=workspace.id, status=status.value, **execution.summary.to_json())


def _status(control: BatchControl, execution: Execution) -> BatchStatus:
    # A stop that came after the last call had its result changed nothing: the batch is complete.
    stopped = any(
        outcome.error is not None and outcome.error.code.value in {"cancelled", "interrupted"}
        for outcome in execution.outcomes
    )
    if control.reason is AbortReason.CANCELLED and stopped:
        return BatchStatus.CANCELLED
    if control.reason is AbortReason.INTERRUPTED and stopped:
        return BatchStatus.INTERRUPTED
    return BatchStatus.COMPLETED
