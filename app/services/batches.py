"""Batches: the use cases around submitting, waiting for, following and cancelling them."""

import asyncio
from collections.abc import AsyncGenerator
from dataclasses import dataclass, replace
from typing import Any, Final

import orjson

from app.domain.abort import AbortReason
from app.domain.audit import SERVICE, AuditAction, AuditEvent, audit
from app.domain.batch import Batch, BatchStatus, OnDisconnect, OnError, Summary
from app.domain.call_summary import comparable, plain_path
from app.domain.caller import Caller
from app.domain.clock import now_ms
from app.domain.events import EventType, OutputStream, StoredEvent
from app.domain.idempotency import IdempotencyKey
from app.domain.ids import new_id
from app.domain.tool_call import CallRecord, CallStatus, ExecutionMode
from app.errors import (
    NoSpace,
    NotFound,
    OutputGone,
    Overloaded,
    OwnerGone,
    StorageUnavailable,
    TooManyBatches,
    WorkspaceGone,
)
from app.events.frames import event_json
from app.events.log import EventLog, Updates
from app.execution.backends.admission import Admission
from app.execution.backends.base import Backend
from app.execution.finalizer import Finalizer
from app.execution.membership import Membership
from app.services.idempotency import key_reused, made_before
from app.storage.base import (
    Applied,
    CallFilter,
    Existing,
    Page,
    Refused,
    RequestCancel,
    Storage,
    SubmitBatch,
    WaitingBatch,
    WriteOutcome,
)
from app.storage.read_pool import ReadPool
from app.storage.record_writer import RecordWriter

EXPORT_PAGE: Final = 100
PLACED_SECONDS: Final = 0.5
PLACED_MAX: Final = 1024

INLINE_BYTES: Final = 4 * 1024 * 1024
"""How many bytes of arguments and results an answer with several calls carries; the rest has its own URL."""


@dataclass(frozen=True, slots=True)
class CallRequest:
    """A call as a caller sends it; `arguments` is any JSON value and unchecked here."""

    tool_call_id: str | None
    name: str
    arguments: Any


@dataclass(frozen=True, slots=True)
class BatchRequest:
    """A batch as a caller sends it, its envelope checked: 1 to 64 calls, unique ids."""

    calls: tuple[CallRequest, ...]
    execution_mode: ExecutionMode = "parallel"
    on_error: OnError = "continue"
    on_disconnect: OnDisconnect = "continue"
    timeout_ms: int | None = None
    metadata: dict[str, Any] | None = None


@dataclass(frozen=True, slots=True)
class Submitted:
    """A batch with its calls. `attached`: an earlier request made it, and it is shown as it is now."""

    batch: Batch
    attached: bool


class BatchService:
    """Submits batches and answers for them. An `owner` of None sees everything."""

    def __init__(
        self,
        *,
        storage: Storage,
        reads: ReadPool,
        records: RecordWriter,
        log: EventLog,
        backend: Backend,
        finalizer: Finalizer,
        membership: Membership,
        admission: Admission | None = None,
    ) -> None:
        self._storage = storage
        self._reads = reads
        self._records = records
        self._log = log
        self._backend = backend
        self._finalizer = finalizer
        self._membership = membership
        self._admission = admission or Admission()
        self._placed: dict[str, float] = {}
        self.draining = False

    async def attach(self, workspace_id: str, idempotency: IdempotencyKey, *, owner: str) -> Batch | None:
        """Return the batch that the same request made in a workspace, as it is now; None when there is none.

        Neither the state of the workspace nor that of the service matters.

        Raises:
            IdempotencyKeyReused: another request had the key.
        """
        made = await made_before(self._storage, self._reads, idempotency, owner=owner, workspace_id=workspace_id)
        if made is None:
            return None
        return await self._reads.run(self._storage.batch, made, inline=INLINE_BYTES)

    async def submit(
        self,
        workspace_id: str,
        request: BatchRequest,
        *,
        owner: str,
        request_id: str,
        idempotency: IdempotencyKey | None = None,
        by: Caller = SERVICE,
        elsewhere: bool = False,
    ) -> Submitted:
        """Accept a batch: once this returns it is stored, and it will end; `by` is noted as who submitted it.

        `elsewhere`: the workspace is of another node, as `WorkspaceService.check_root` told; then the batch waits for a
        process of that one.

        Of requests with one idempotency key the first makes the batch; the others attach to it, nothing runs twice. A
        request that is refused leaves no key behind.

        Raises:
            IdempotencyKeyReused: the key came with another request before.
            NotFound, WorkspaceGone: there is no such workspace, or it was deleted or expired.
            OwnerGone: no process of the workspace's node lives.
            Overloaded: the service is draining or its queues are full.
            TooManyBatches: as many wait or run as may.
            NoSpace: the disk under the database is full.
            StorageUnavailable: the database did not answer.
        """
        if self.draining:
            raise Overloaded("the service is shutting down; send the batch again to the next one")
        if self._records.overloaded:
            raise Overloaded("too much waits to be stored; send the batch again in a moment")
        if self._records.full:
            raise NoSpace("the disk under the database is full; nothing was stored")
        if not self._membership.current:
            raise StorageUnavailable("the database has not answered for a while; nothing was stored")
        batch, start = _accepted(workspace_id, request, owner, request_id)
        name = None if idempotency is None else (owner, workspace_id, idempotency.value)
        try:
            if elsewhere:
                await self._require_place(workspace_id)
            self._backend.reserve(batch, name)
        except TooManyBatches:
            # What took the last place may be what the same request made a moment ago.
            made = None if idempotency is None else await self.attach(workspace_id, idempotency, owner=owner)
            if made is None:
                raise
            return Submitted(made, attached=True)

        def take_up(stored: asyncio.Future[WriteOutcome]) -> None:
            # Not after the await: a caller that goes away meanwhile must not leave an accepted batch lying.
            outcome = None if stored.cancelled() or stored.exception() is not None else stored.result()
            taken = isinstance(outcome, Applied) and outcome.taken
            if isinstance(outcome, Applied) and taken:
                self._backend.submit(batch, outcome.workspace)
            self._backend.release(batch, name, accepted=taken)

        tools = list(dict.fromkeys(call.tool_name for call in batch.calls))
        noted = audit(by, AuditAction.BATCH_SUBMITTED, batch.id, workspaceId=workspace_id, tools=tools)
        accept = SubmitBatch(batch, start, idempotency, noted, self._membership.holder)
        stored = self._records.submit(accept, droppable=True)
        stored.add_done_callback(take_up)
        outcome = await asyncio.shield(stored)
        if isinstance(outcome, Existing):
            return Submitted(await self._batch(outcome.id, None, calls=True), attached=True)
        if isinstance(outcome, Refused):
            if idempotency is not None and outcome.reason == "key_reused":
                raise key_reused(idempotency)
            if outcome.reason == "gone":
                raise WorkspaceGone(f"workspace {workspace_id} was deleted or has expired; its records are kept")
            if outcome.reason == "elsewhere":
                raise OwnerGone(
                    f"workspace {workspace_id} is of another node, and this process hands no batches to others "
                    "(TOOLCRIB_BACKEND): send them to a process of that node"
                )
            raise NotFound(f"there is no workspace {workspace_id}")
        return Submitted(batch, attached=False)

    async def _require_place(self, workspace_id: str) -> None:
        """Look whether a process of the workspace's node lives and has room, as far as rows can tell.

        What was looked at a moment ago, and was far from full, is not looked at again.
        """
        admission = self._admission
        now = asyncio.get_running_loop().time()
        if now - self._placed.get(workspace_id, -PLACED_SECONDS) < PLACED_SECONDS:
            return
        most = max(admission.batches, admission.per_workspace)
        placement = await self._reads.run(self._storage.placement, workspace_id, most=most)
        if placement is None:
            raise NotFound(f"there is no workspace {workspace_id}")
        if not placement.processes:
            raise owner_gone(workspace_id, placement.node_id)
        if placement.unfinished >= admission.per_workspace:
            raise TooManyBatches(
                f"workspace {workspace_id} has {placement.unfinished} batches that wait or run, which is as many as it "
                "may; send this one again when some have ended"
            )
        if placement.waiting >= admission.batches:
            raise TooManyBatches(
                f"{placement.waiting} batches wait for the node of the workspace, which is as many as may; send this "
                "one again in a while"
            )
        if placement.unfinished < admission.per_workspace // 2 and placement.waiting < admission.batches // 2:
            if len(self._placed) >= PLACED_MAX:
                self._placed.clear()
            self._placed[workspace_id] = now

    async def get(self, batch_id: str, *, owner: str | None, wait: float = 0) -> Batch:
        """Return a batch with its calls, after waiting up to `wait` seconds for it to end.

        Raises:
            NotFound: there is no such batch.
        """
        if owner is not None and wait > 0:
            # Before anything is waited for: how long an answer takes tells who does not see the batch nothing.
            await self._batch(batch_id, owner, calls=False)
        if wait > 0:
            if self._backend.is_local(batch_id):
                ended = await self._backend.outcome(batch_id, wait)
                if ended is not None and _seen_by(ended, owner):
                    return ended
            else:
                await self._log.wait_terminal(batch_id, wait)
        return await self._batch(batch_id, owner, calls=True)

    async def list(
        self, workspace_id: str, *, owner: str | None, status: BatchStatus | None, before: str | None, limit: int
    ) -> Page[Batch]:
        """Return a workspace's batches, newest first, without their calls.

        Raises:
            NotFound: there is no such workspace.
        """
        workspace = await self._reads.run(self._storage.workspace, workspace_id)
        if workspace is None or (owner is not None and workspace.owner != owner):
            raise NotFound(f"there is no workspace {workspace_id}")
        return await self._reads.run(self._storage.batches, workspace_id, status=status, before=before, limit=limit)

    async def cancel(self, batch_id: str, *, owner: str | None, by: Caller = SERVICE) -> Batch:
        """Ask for a batch to be cancelled; the request, and by whom, is stored before anything is stopped.

        Return the batch with its calls as it is then; a terminal one is left as it is.

        Raises:
            NotFound: there is no such batch.
        """
        await self._batch(batch_id, owner, calls=False)
        noted = audit(by, AuditAction.BATCH_CANCELLED, batch_id)
        await self._cancel(batch_id, noted)
        return await self._batch(batch_id, owner, calls=True)

    async def _cancel(self, batch_id: str, noted: AuditEvent | None = None) -> None:
        await self._records.write(RequestCancel(batch_id, None, now_ms(), noted), droppable=True)
        if self._backend.is_local(batch_id):
            self._backend.cancel(batch_id)
            return
        # A process that holds it hears of the wish. One that waits is ended here, as nothing of it runs anywhere.
        unfinished = await self._reads.run(self._storage.unfinished_batch, batch_id)
        if unfinished is not None and unfinished.process_id is None:
            claimed = await self._finalizer.claim_waiting(WaitingBatch(batch_id, unfinished.epoch))
            if claimed is not None:
                await self._finalizer.finalize(claimed[0], AbortReason.CANCELLED)

    async def cancel_call(self, call_id: str, *, owner: str | None, by: Caller = SERVICE) -> CallRecord:
        """Ask for one call to be cancelled and return it as it is then.

        Raises:
            NotFound: there is no such call.
        """
        call = await self.call(call_id, owner=owner)
        if not call.status.terminal:
            noted = audit(by, AuditAction.CALL_CANCELLED, call_id, batchId=call.batch_id)
            await self._records.write(RequestCancel(call.batch_id, call_id, now_ms(), noted), droppable=True)
            self._backend.cancel(call.batch_id, call_id)
            call = await self.call(call_id, owner=owner)
        return call

    async def stop_workspace(self, workspace_id: str, seconds: float) -> bool:
        """Cancel every unfinished batch of a workspace; return whether all have ended within `seconds`."""
        unfinished = await self._reads.run(self._storage.unfinished_batches, workspace_id)
        for item in unfinished:
            await self._cancel(item.batch_id)
        ended = [await self._ends(item.batch_id, seconds) for item in unfinished]
        return all(ended)

    async def _ends(self, batch_id: str, seconds: float) -> bool:
        if self._backend.is_local(batch_id):
            return await self._backend.wait(batch_id, seconds)
        return await self._log.wait_terminal(batch_id, seconds) is not False

    async def call(self, call_id: str, *, owner: str | None) -> CallRecord:
        """Return one call with its whole result.

        Raises:
            NotFound: there is no such call.
        """
        call = await self._reads.run(self._storage.call, call_id)
        if call is None:
            raise NotFound(f"there is no call {call_id}")
        await self._check_owner(call.workspace_id, owner, f"there is no call {call_id}")
        return call

    async def calls(
        self, condition: CallFilter, *, owner: str | None, before: str | None, limit: int
    ) -> Page[CallRecord]:
        """Return calls of an owner that meet the conditions, newest first.

        `path` and `text` may come in any spelling; an absolute path is understood together with a workspace.

        Raises:
            NotFound: the owner has no such workspace.
        """
        found = await self._condition(condition, owner)
        if found is None:
            return Page((), None)
        return await self._reads.run(self._storage.calls, found, before=before, limit=limit, inline=INLINE_BYTES)

    async def every_call(
        self, condition: CallFilter, *, owner: str | None, before: str | None
    ) -> AsyncGenerator[Page[CallRecord], None]:
        """Yield all calls that meet the conditions, newest first, page by page; `whole_call` completes one."""
        found = await self._condition(condition, owner)
        while found is not None:
            page = await self._reads.run(
                self._storage.calls, found, before=before, limit=EXPORT_PAGE, inline=INLINE_BYTES
            )
            yield page
            before = page.next_before
            if before is None:
                return

    async def whole_call(self, call: CallRecord) -> CallRecord | None:
        """Return a call of a page with what the page left out; None when it was removed meanwhile."""
        if call.arguments and (call.result is not None or not call.result_bytes):
            return call
        return await self._reads.run(self._storage.call, call.id)

    async def _condition(self, condition: CallFilter, owner: str | None) -> CallFilter | None:
        """Return conditions as the storage understands them; None when nothing can meet them."""
        if condition.workspace_id is not None:
            await self._check_owner(condition.workspace_id, owner, f"there is no workspace {condition.workspace_id}")
        condition = replace(condition, owner=owner)
        if condition.text is not None:
            condition = replace(condition, text=comparable(condition.text) or None)
        if condition.path is not None:
            path = await self._plain_path(condition.path, condition.workspace_id)
            if path is None:
                return None
            condition = replace(condition, path=path)
        return condition

    async def open_events(
        self, batch_id: str, *, owner: str | None, cursor: int, updates: Updates
    ) -> AsyncGenerator[bytes, None] | None:
        """Return the SSE frames after `cursor`; None when `cursor` is the last id there will ever be.

        Raises:
            NotFound: there is no such batch.
            InvalidCursor: the cursor is no event id of this batch.
        """
        if owner is not None:
            await self._batch(batch_id, owner, calls=False)
        return await self._log.open(batch_id, cursor, updates)

    def follow(self, batch: Batch, updates: Updates) -> AsyncGenerator[bytes, None]:
        """Return the SSE frames of a batch that was submitted, now or before, from the first on."""
        return self._log.follow(batch.id, 0, updates)

    async def output_extent(self, call: CallRecord, stream: OutputStream | None) -> int:
        """Return how many bytes of a call's output are stored (None: all streams, in the order they were read).

        Raises:
            OutputGone: retention has removed the output of the call's batch.
        """
        extent = await self._reads.run(self._storage.output_extent, call.id, stream)
        if extent is None:
            raise OutputGone(f"what call {call.id} printed is not kept any more; its result has the end of it")
        return extent.bytes

    async def output(
        self, call: CallRecord, stream: OutputStream | None, start: int, end: int
    ) -> AsyncGenerator[bytes, None]:
        """Yield bytes `start … end - 1` of a call's captured output.

        Raises:
            OutputGone: retention removed some of it meanwhile.
        """
        pieces = self._storage.output(call.id, stream, start=start, end=end)
        left = end - start
        while (piece := await self._reads.run(next, pieces, None)) is not None:
            left -= len(piece)
            yield piece
        if left > 0:
            raise OutputGone("the output was removed while it was read")

    def follow_output(self, call: CallRecord, stream: OutputStream | None, start: int) -> AsyncGenerator[bytes, None]:
        """Yield a call's captured output from `start` on, live, until the call has ended."""
        return self._log.follow_output(call.batch_id, call.id, stream, start)

    async def drain(self, grace: float) -> None:
        """Refuse new batches, give running ones `grace` seconds, interrupt the rest; return when all have ended."""
        self.draining = True
        await self._backend.drain(grace)

    def abort(self) -> None:
        """Interrupt every batch now."""
        self.draining = True
        self._backend.stop_all(AbortReason.INTERRUPTED)

    async def _batch(self, batch_id: str, owner: str | None, *, calls: bool) -> Batch:
        batch = await self._reads.run(self._storage.batch, batch_id, calls=calls, inline=INLINE_BYTES)
        if batch is None or not _seen_by(batch, owner):
            raise NotFound(f"there is no batch {batch_id}")
        return batch

    async def _plain_path(self, path: str, workspace_id: str | None) -> str | None:
        root = None
        if path.startswith("/") and workspace_id is not None:
            workspace = await self._reads.run(self._storage.workspace, workspace_id)
            root = None if workspace is None else workspace.root
        return plain_path(path, root)

    async def _check_owner(self, workspace_id: str, owner: str | None, message: str) -> None:
        if owner is None:
            return
        workspace = await self._reads.run(self._storage.workspace, workspace_id)
        if workspace is None or workspace.owner != owner:
            raise NotFound(message)


def owner_gone(workspace_id: str, node_id: str | None) -> OwnerGone:
    """Return the error of a workspace whose node has no living process."""
    return OwnerGone(
        f"workspace {workspace_id} is of node {node_id}, of which no process lives: try again when it is back; an "
        "operator who has its directories elsewhere runs `toolcrib db relocate --node`",
        nodeId=node_id,
    )


def _seen_by(batch: Batch, owner: str | None) -> bool:
    return owner is None or batch.owner == owner


def _accepted(workspace_id: str, request: BatchRequest, owner: str, request_id: str) -> tuple[Batch, StoredEvent]:
    """Return the rows of a new batch and its first event."""
    at = now_ms()
    batch_id = new_id("batch")
    calls = []
    for index, call in enumerate(request.calls):
        call_id = new_id("call")
        calls.append(
            CallRecord(
                id=call_id,
                batch_id=batch_id,
                workspace_id=workspace_id,
                index=index,
                tool_call_id=call.tool_call_id or call_id,
                tool_name=call.name,
                arguments=orjson.dumps(call.arguments),
                status=CallStatus.QUEUED,
                result=None,
                error=None,
                hooks=None,
                queued_at=at,
                started_at=None,
                finished_at=None,
                duration_ms=None,
                request_id=request_id,
            )
        )
    batch = Batch(
        id=batch_id,
        workspace_id=workspace_id,
        owner=owner,
        status=BatchStatus.QUEUED,
        execution_mode=request.execution_mode,
        effective_mode=None,
        on_error=request.on_error,
        on_disconnect=request.on_disconnect,
        timeout_ms=request.timeout_ms,
        metadata=request.metadata or {},
        has_errors=False,
        terminate=False,
        summary=Summary(total=len(calls)),
        request_id=request_id,
        created_at=at,
        epoch=1,
        last_seq=1,
        calls=tuple(calls),
    )
    members = {
        "workspaceId": workspace_id,
        "executionMode": request.execution_mode,
        "calls": [{"callId": call.id, "toolCallId": call.tool_call_id, "toolName": call.tool_name} for call in calls],
    }
    data = event_json(EventType.BATCH_START, 1, at, batch_id, members)
    return batch, StoredEvent(batch_id, 1, EventType.BATCH_START, None, at, data)
