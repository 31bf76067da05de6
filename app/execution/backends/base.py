"""The backend seam: where a batch runs."""

from collections.abc import Hashable
from typing import Protocol

from app.domain.abort import AbortReason
from app.domain.batch import Batch
from app.domain.workspace import Workspace


class Backend(Protocol):
    """Runs accepted batches. The batch's row decides what happens to it; a backend only wakes up for it."""

    def reserve(self, batch: Batch, request: Hashable | None = None) -> None:
        """Keep a place in the queues for a batch that is about to be stored; `release` has to follow.

        `request` is the name of the request that makes it, None when it has none.

        Raises:
            TooManyBatches: as many wait or run as may.
        """
        ...

    def release(self, batch: Batch, request: Hashable | None = None, *, accepted: bool) -> None:
        """End a reservation; `accepted`: the batch was stored and submitted, and keeps its place."""
        ...

    def submit(self, batch: Batch, workspace: Workspace | None = None) -> None:
        """Take up a batch this process owns (`epoch` and `last_seq` as stored, calls included).

        `workspace` is its workspace as it is now, when that is at hand; a batch that has to wait does not use it.
        """
        ...

    @property
    def has_room(self) -> bool:
        """Whether a batch that waits elsewhere should be taken by this process now."""
        ...

    async def room(self) -> None:
        """Return when this process should take another batch that waits elsewhere."""
        ...

    def is_local(self, batch_id: str) -> bool:
        """Whether this process runs or queues the batch now."""
        ...

    def cancel(self, batch_id: str, call_id: str | None = None) -> None:
        """Stop a batch or one call of it here; the durable request was stored before."""
        ...

    async def wait(self, batch_id: str, seconds: float) -> bool:
        """Wait until a local batch has ended and its end is stored, at most `seconds`; False when it has not."""
        ...

    async def outcome(self, batch_id: str, seconds: float) -> Batch | None:
        """Wait as `wait` does; return the batch as its rows say now, or None when only they can tell."""
        ...

    async def drain(self, grace: float) -> None:
        """Let running batches end for `grace` seconds, then interrupt them; return when all have ended."""
        ...

    def stop_all(self, reason: AbortReason) -> None:
        """Stop every batch at once."""
        ...
