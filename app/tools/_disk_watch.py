"""Looking at the disk while a command runs: one that fills it, or its workspace, is stopped."""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from typing import Final

from app.domain.abort import Aborted, AbortReason, AbortSignal
from app.errors import ErrorCode, ToolError
from app.sandbox.containment import Root
from app.sandbox.disk import require_free
from app.tools.environment import ToolEnvironment

LOOK_SECONDS: Final = 1.0


class DiskWatch:
    """`stop` is the signal for the command: aborted with the call's own, or when the disk is full; `full` says how."""

    def __init__(self) -> None:
        self.stop = AbortSignal()
        self.full: ToolError | None = None


@asynccontextmanager
async def watching_disk(environment: ToolEnvironment, signal: AbortSignal) -> AsyncGenerator[DiskWatch, None]:
    """Look at the disk every `LOOK_SECONDS` within the block, and note at its end that the workspace was changed."""
    watch = DiskWatch()
    forget = signal.add_callback(lambda: watch.stop.abort(signal.reason or AbortReason.CANCELLED))
    task = asyncio.create_task(_watch(environment, watch))
    try:
        yield watch
    finally:
        forget()
        task.cancel()
        await asyncio.wait({task})
        if environment.quota is not None:
            environment.quota.outdate()


async def _watch(environment: ToolEnvironment, watch: DiskWatch) -> None:
    while True:
        await asyncio.sleep(LOOK_SECONDS)
        signal = AbortSignal()
        try:
            await environment.files.run(_look, environment, signal, signal=signal, workspace=environment.cwd)
        except ToolError as error:
            if error.code is ErrorCode.NO_SPACE:
                watch.full = error
                watch.stop.abort(AbortReason.CANCELLED)
                return
        except Aborted:
            return


def _look(environment: ToolEnvironment, signal: AbortSignal) -> None:
    """Raise ToolError when there is no room for more; in the file pool.

    A command may use up half of what has to be free for one to start, so that one that starts is not stopped at once.
    """
    with Root.open(environment.cwd, environment.root_identity, environment.options.containment) as root:
        require_free(root.fd, environment.policy.min_free_bytes // 2)
    if environment.quota is not None:
        environment.quota.require(signal.raise_if_aborted, running=True)
