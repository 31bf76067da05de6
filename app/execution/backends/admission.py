"""Who may join the queues: how many batches wait or run, and how many bytes of arguments they hold in memory."""

from collections.abc import Hashable
from dataclasses import dataclass
from typing import Final

from app.domain.batch import Batch
from app.errors import TooManyBatches

MAX_BATCHES: Final = 2_000
MAX_BATCHES_PER_WORKSPACE: Final = 500
MAX_BATCH_BYTES: Final = 268_435_456


@dataclass(slots=True)
class Held:
    """How many batches wait or run and the bytes of their arguments."""

    batches: int = 0
    bytes: int = 0


@dataclass(frozen=True, slots=True)
class _Place:
    workspace_id: str
    owner: str
    bytes: int


class Admission:
    """Counts batches from the moment their storing begins to their stored end.

    Args:
        batches: how many may wait or run in all.
        per_workspace: how many of them may be of one workspace.
        max_bytes: how many bytes of arguments they may hold together.
    """

    def __init__(
        self,
        batches: int = MAX_BATCHES,
        per_workspace: int = MAX_BATCHES_PER_WORKSPACE,
        max_bytes: int = MAX_BATCH_BYTES,
    ) -> None:
        self.batches: Final = batches
        self.per_workspace: Final = per_workspace
        self.max_bytes: Final = max_bytes
        self.held: Final = Held()
        self._places: dict[str, _Place] = {}
        self._workspaces: dict[str, int] = {}
        self._owners: dict[str, int] = {}
        self._asked: dict[Hashable, int] = {}

    def of_workspace(self, workspace_id: str) -> int:
        """Return how many batches of a workspace wait or run."""
        return self._workspaces.get(workspace_id, 0)

    def of_owner(self, owner: str) -> int:
        return self._owners.get(owner, 0)

    def reserve(self, batch: Batch, request: Hashable | None = None) -> None:
        """Count a batch that is about to be stored; `release` with the same arguments has to follow.

        `request` names the request that makes it, if that has a name: of several with one name at the same time only
        one will make a batch, so they take one place, and the others are never refused for it.

        Raises:
            TooManyBatches: as many wait or run as may.
        """
        if request is not None and request in self._asked:
            self._asked[request] += 1
            return
        size = _size(batch)
        if self.of_workspace(batch.workspace_id) >= self.per_workspace:
            raise TooManyBatches(
                f"workspace {batch.workspace_id} has {self.per_workspace} batches that wait or run, which is as many "
                "as it may; send this one again when some have ended"
            )
        if self.held.batches >= self.batches:
            raise TooManyBatches(
                f"{self.batches} batches wait or run, which is as many as may; send this one again in a while"
            )
        if self.held.batches and self.held.bytes + size > self.max_bytes:
            raise TooManyBatches(
                f"the batches that wait or run hold {self.held.bytes} bytes of arguments, and with this one's {size} "
                f"they would hold more than {self.max_bytes}; send it again in a while"
            )
        self._count(batch, size)
        if request is not None:
            self._asked[request] = 1

    def enter(self, batch: Batch) -> None:
        """Count a batch that was accepted, unless it was counted already: whatever the limits, it is there."""
        if batch.id not in self._places:
            self._count(batch, _size(batch))

    def release(self, batch: Batch, request: Hashable | None = None, *, accepted: bool) -> None:
        """End a reservation; the place of a batch that was not accepted is free again."""
        if request is not None:
            self._asked[request] -= 1
            if not self._asked[request]:
                del self._asked[request]
        if not accepted:
            self.leave(batch.id)

    def leave(self, batch_id: str) -> None:
        """Free the place of a batch; nothing when it has none."""
        place = self._places.pop(batch_id, None)
        if place is None:
            return
        self.held.batches -= 1
        self.held.bytes -= place.bytes
        for counts, name in ((self._workspaces, place.workspace_id), (self._owners, place.owner)):
            counts[name] -= 1
            if not counts[name]:
                del counts[name]

    def _count(self, batch: Batch, size: int) -> None:
        self._places[batch.id] = _Place(batch.workspace_id, batch.owner, size)
        self.held.batches += 1
        self.held.bytes += size
        for counts, name in ((self._workspaces, batch.workspace_id), (self._owners, batch.owner)):
            counts[name] = counts.get(name, 0) + 1


def _size(batch: Batch) -> int:
    return sum(len(call.arguments or b"") for call in batch.calls)
