"""Slots for processes: how many run at once, for all and for one workspace, and whose turn comes next."""

import asyncio
from collections import OrderedDict, deque
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Final

from app.domain.abort import Aborted, AbortSignal

COMMANDS: Final = 32
COMMANDS_PER_WORKSPACE: Final = 8


@dataclass(frozen=True, slots=True)
class SlotUse:
    """How many processes run and how many wait for a slot."""

    running: int = 0
    waiting: int = 0


class ProcessSlots:
    """At most `running` processes at once, `per_workspace` of them for one workspace.

    Within a workspace slots are given in the order of arrival, between workspaces in turn: one that was given a slot or
    gives one back goes behind the others that wait. Used on one event loop at a time.
    """

    def __init__(self, running: int = COMMANDS, per_workspace: int = COMMANDS_PER_WORKSPACE) -> None:
        self.limit: Final = running
        self.per_workspace: Final = per_workspace
        self._running: dict[str, int] = {}
        self._owners: dict[str, int] = {}
        self._total = 0
        # Whoever waits here may not run now: every slot that comes free is given away at once.
        self._waiting: OrderedDict[str, deque[_Waiter]] = OrderedDict()

    @property
    def use(self) -> SlotUse:
        return SlotUse(self._total, sum(len(queue) for queue in self._waiting.values()))

    def use_in(self, workspace: str) -> SlotUse:
        """Return the use by one workspace."""
        return SlotUse(self._running.get(workspace, 0), len(self._waiting.get(workspace, ())))

    def use_of(self, owner: str) -> SlotUse:
        """Return the use by the workspaces of an owner."""
        waiting = sum(waiter.owner == owner for queue in self._waiting.values() for waiter in queue)
        return SlotUse(self._owners.get(owner, 0), waiting)

    @asynccontextmanager
    async def taken(
        self,
        workspace: str,
        signal: AbortSignal,
        *,
        owner: str = "",
        on_long_wait: Callable[[], Awaitable[None] | None] | None = None,
        long_wait_seconds: float = 1.0,
    ) -> AsyncIterator[float]:
        """Hold a slot; the value is how many seconds it was waited for.

        `on_long_wait` is called once, when the wait has lasted `long_wait_seconds`. A cancel while it waits gives the
        turn on.

        Raises:
            Aborted: the signal came while it waited.
        """
        waited = 0.0
        if self._may_run(workspace) and workspace not in self._waiting:
            self._count(workspace, owner)
        else:
            clock = asyncio.get_running_loop().time
            began = clock()
            await self._wait(workspace, signal, owner, on_long_wait, long_wait_seconds)
            waited = clock() - began
        try:
            yield waited
        finally:
            self._give_back(workspace, owner)

    async def _wait(
        self,
        workspace: str,
        signal: AbortSignal,
        owner: str,
        on_long_wait: Callable[[], Awaitable[None] | None] | None,
        long_wait_seconds: float,
    ) -> None:
        """Return when it is this caller's turn, which is counted already."""
        loop = asyncio.get_running_loop()
        waiter = _Waiter(owner, loop.create_future())
        self._waiting.setdefault(workspace, deque()).append(waiter)

        def aborted() -> None:
            loop.call_soon_threadsafe(waiter.refuse, signal)

        forget = signal.add_callback(aborted)
        try:
            if on_long_wait is not None:
                await asyncio.wait([waiter.turn], timeout=long_wait_seconds)
                if not waiter.turn.done() and (told := on_long_wait()) is not None:
                    await told
            await waiter.turn
        except BaseException:
            if not self._withdraw(workspace, waiter) and waiter.granted:
                # The turn came together with the end of the wait: hand it on.
                self._give_back(workspace, owner)
            raise
        finally:
            forget()

    def _withdraw(self, workspace: str, waiter: "_Waiter") -> bool:
        queue = self._waiting.get(workspace)
        if queue is None or waiter not in queue:
            return False
        queue.remove(waiter)
        if not queue:
            del self._waiting[workspace]
        return True

    def _may_run(self, workspace: str) -> bool:
        return self._total < self.limit and self._running.get(workspace, 0) < self.per_workspace

    def _count(self, workspace: str, owner: str) -> None:
        self._total += 1
        self._running[workspace] = self._running.get(workspace, 0) + 1
        self._owners[owner] = self._owners.get(owner, 0) + 1

    def _give_back(self, workspace: str, owner: str) -> None:
        self._total -= 1
        _decrease(self._running, workspace)
        _decrease(self._owners, owner)
        if workspace in self._waiting:
            self._waiting.move_to_end(workspace)
        while self._total < self.limit and self._pass_on():
            pass

    def _pass_on(self) -> bool:
        """Give a free slot to the first workspace in turn that may have one."""
        for workspace, queue in self._waiting.items():
            if not self._may_run(workspace):
                continue
            waiter = queue.popleft()
            if queue:
                self._waiting.move_to_end(workspace)
            else:
                del self._waiting[workspace]
            if not waiter.turn.done():
                self._count(workspace, waiter.owner)
                waiter.grant()
            return True
        return False


class _Waiter:
    """Who waits. `granted`: a slot was counted for it."""

    __slots__ = ("granted", "owner", "turn")

    def __init__(self, owner: str, turn: asyncio.Future[None]) -> None:
        self.owner = owner
        self.turn = turn
        self.granted = False

    def grant(self) -> None:
        self.granted = True
        self.turn.set_result(None)

    def refuse(self, signal: AbortSignal) -> None:
        if not self.turn.done() and signal.reason is not None:
            self.turn.set_exception(Aborted(signal.reason))


def _decrease(counts: dict[str, int], key: str) -> None:
    left = counts[key] - 1
    if left:
        counts[key] = left
    else:
        del counts[key]
