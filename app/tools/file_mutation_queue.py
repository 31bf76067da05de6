"""Changes of one file wait for each other in the order in which they arrived; changes of other files go ahead.

Two names are one file when they resolve to the same last name in the same directory, whatever links led there, with the
name in NFC and case-folded, so that it also holds on file systems that do not tell such names apart.

Where several processes work in the same directories, whoever is first in line also takes the file's lock, which the
others take, too (`app.sandbox.file_locks`). Between processes the order is not that of arrival.

Rule: a holder of a file holds that one key and waits for nothing else but a thread to work in. So nothing can wait in a
circle.
"""

import asyncio
from collections import deque
from collections.abc import Callable, Hashable
from typing import Final, TypeVar

from app.domain.abort import Aborted, AbortReason, AbortSignal
from app.errors import ErrorCode, ToolError
from app.sandbox.containment import MutationKey, Target
from app.sandbox.file_locks import FileLocks
from app.sandbox.file_pool import FilePool
from app.sandbox.files import ParentVanished

R = TypeVar("R")

_ATTEMPTS: Final = 8
_UNDO_SECONDS: Final = 5.0


class _Lease:
    """A thing held by a call and by the thread that works for it: `release` runs when both are through with it."""

    def __init__(self, release: Callable[[], None]) -> None:
        self._release = release
        self._holders = 1

    def lend(self) -> Callable[[], None]:
        """Count one more holder; return what it calls in the end."""
        self._holders += 1
        return self.give_back

    def give_back(self) -> None:
        self._holders -= 1
        if not self._holders:
            self._release()


class FileMutationQueue:
    """The lines of one process, on one event loop at a time. A line is freed when nobody stands in it.

    `locks` keep the changes of other processes away; None when there are no others.
    """

    def __init__(self, locks: FileLocks | None = None) -> None:
        self._locks = locks
        # The first ticket of a line is being served; the others are futures that say "your turn".
        self._lines: dict[Hashable, deque[asyncio.Future[None]]] = {}

    def __len__(self) -> int:
        """How many lines there are now."""
        return len(self._lines)

    async def run(
        self,
        files: FilePool,
        workspace: str,
        resolve: Callable[[], Target],
        work: Callable[[Target], R],
        signal: AbortSignal,
    ) -> R:
        """Run `work` on a target while no other change of the same file runs, and return what it returns.

        `resolve` and `work` run in the file pool. `resolve` finds the target and may make its missing parents; calls
        resolve one after another per workspace, in the order they came, so that places in line are given in that order.
        The target is closed here. When `work` fails or never runs, parents that were made are removed again as far as
        they are empty. A thread that was abandoned keeps the file until it returns.

        Raises:
            Aborted: by the signal, before `work` had an effect.
            ToolError: what `resolve` and `work` raise.
        """
        for _ in range(_ATTEMPTS):
            try:
                target, key, ticket = await self._arrive(files, workspace, resolve, signal)
                return await self._change(files, workspace, target, key, ticket, work, signal)
            except ParentVanished:
                # The call that had made the directory failed and took it away again. Nothing was done: find it anew.
                continue
        raise ToolError(
            ErrorCode.IO_ERROR, "the directory of the file is removed again and again by somebody else; try again"
        )

    async def _arrive(
        self, files: FilePool, workspace: str, resolve: Callable[[], Target], signal: AbortSignal
    ) -> tuple[Target, MutationKey, "_Ticket"]:
        """Resolve the target and take its next place in line, in the order of arrival in this workspace."""

        def find() -> tuple[Target, MutationKey]:
            target = resolve()
            try:
                key = target.key
                signal.raise_if_aborted()
            except BaseException:
                target.remove_created()
                target.close()
                raise
            found.append(target)
            return target, key

        def release() -> None:
            arrival.leave()
            for target in found:
                target.close()  # the task was cancelled in the moment in which the thread came back

        found: list[Target] = []
        arrival = _Ticket(self._lines, workspace)
        lease = _Lease(release)
        try:
            await arrival.turn(signal)
            target, key = await files.run(find, signal=signal, workspace=workspace, on_return=lease.lend())
            found.clear()
            return target, key, _Ticket(self._lines, key)
        finally:
            lease.give_back()

    async def _change(
        self,
        files: FilePool,
        workspace: str,
        target: Target,
        key: MutationKey,
        ticket: "_Ticket",
        work: Callable[[Target], R],
        signal: AbortSignal,
    ) -> R:
        started = False
        unlock: Callable[[], None] | None = None

        def change() -> R:
            nonlocal started
            started = True
            try:
                return work(target)
            except BaseException:
                target.remove_created()
                raise

        def release() -> None:
            if unlock is not None:
                unlock()
            ticket.leave()
            target.close()

        lease = _Lease(release)
        try:
            await ticket.turn(signal)
            if self._locks is not None:
                unlock = await self._locks.hold(key, signal)
            return await files.run(change, signal=signal, workspace=workspace, on_return=lease.lend())
        except (Aborted, asyncio.CancelledError, ToolError):
            if target.made_parents and not started:
                await _undo(files, workspace, target, lease)
            raise
        finally:
            lease.give_back()


class _Ticket:
    """A place in a line, taken when it is made."""

    def __init__(self, lines: dict[Hashable, deque[asyncio.Future[None]]], key: Hashable) -> None:
        self._lines = lines
        self._key = key
        self._future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        line = lines.setdefault(key, deque())
        line.append(self._future)
        if len(line) == 1:
            self._future.set_result(None)

    async def turn(self, signal: AbortSignal) -> None:
        """Return when every earlier ticket has left. Raises Aborted by the signal; the ticket still has to leave."""
        if self._future.done():
            return
        future = self._future
        loop = future.get_loop()

        def stop() -> None:
            if not future.done() and signal.reason is not None:
                future.set_exception(Aborted(signal.reason))

        def aborted() -> None:
            loop.call_soon_threadsafe(stop)

        forget = signal.add_callback(aborted)
        try:
            await future
        finally:
            forget()

    def leave(self) -> None:
        line = self._lines[self._key]
        line.remove(self._future)
        if not line:
            del self._lines[self._key]
        elif not line[0].done():
            line[0].set_result(None)


async def _undo(files: FilePool, workspace: str, target: Target, lease: _Lease) -> None:
    """Remove the parents made for a change that never ran; give up when the file system does not answer."""
    signal = AbortSignal()
    timer = asyncio.get_running_loop().call_later(_UNDO_SECONDS, signal.abort, AbortReason.CANCELLED)
    try:
        await files.run(target.remove_created, signal=signal, workspace=workspace, on_return=lease.lend())
    except Aborted:
        return
    finally:
        timer.cancel()
