"""A real storage whose next attempts to apply a group go wrong in a way the test chooses."""

import threading
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

from app.storage.base import OperationalError, Storage, Write, WriteOutcome

Fault = Callable[[Storage, Sequence[Write]], list[WriteOutcome]]

WAIT_SECONDS = 20.0


class FaultyStorage:
    """Applies groups to `storage`, but for the first ones, which each meet one of `faults`."""

    def __init__(self, storage: Storage) -> None:
        self._storage = storage
        self.faults: deque[Fault] = deque()
        self.groups: list[list[Write]] = []

    def apply(self, group: Sequence[Write]) -> list[WriteOutcome]:
        self.groups.append(list(group))
        if self.faults:
            return self.faults.popleft()(self._storage, group)
        return self._storage.apply(group)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._storage, name)


def fails(error: BaseException) -> Fault:
    """Nothing of the group is kept."""

    def fault(_storage: Storage, _group: Sequence[Write]) -> list[WriteOutcome]:
        raise error

    return fault


def loses_reply(storage: Storage, group: Sequence[Write]) -> list[WriteOutcome]:
    """The group is committed, and nobody hears of it."""
    storage.apply(group)
    raise OperationalError("the reply was lost", "connection", in_doubt=True)


class Gate:
    """Holds an attempt until the test lets it go on."""

    def __init__(self) -> None:
        self.reached = threading.Event()
        self.open = threading.Event()

    def __call__(self, storage: Storage, group: Sequence[Write]) -> list[WriteOutcome]:
        self.reached.set()
        assert self.open.wait(WAIT_SECONDS), "the test did not open the gate"
        return storage.apply(group)
