"""What running batches report to whoever measures or traces them: protocols, so that `execution` knows neither."""

from dataclasses import dataclass
from typing import Final, Protocol


@dataclass(frozen=True, slots=True)
class BatchFacts:
    """A batch that is taken up. `waited` is the seconds since it was accepted."""

    id: str
    workspace_id: str
    request_id: str
    mode: str
    calls: int
    waited: float


class BatchObserver(Protocol):
    """Hears of one batch. Called on the event loop in the order things happen; must neither raise nor block."""

    def call_started(self, call_id: str, tool_call_id: str, tool: str) -> None:
        """A call was taken up; `tool` is what the caller wrote, which need not be a tool."""
        ...

    def call_ended(self, call_id: str, tool: str, status: str, error: str | None) -> None:
        """A call has its answer, with a start before or without; `error` is its `error.code`."""
        ...

    def output_cut(self) -> None:
        """A stream of a call's output reached `captureBytes`: what follows is not stored."""
        ...

    def batch_ended(self, status: str) -> None:
        """The end of the batch is stored. Not called when another owner has taken the batch over."""
        ...

    def close(self) -> None:
        """Nothing more comes. Always called, at last."""
        ...


class Observe(Protocol):
    """Gives the observer of a batch that is taken up; called in the context of the request that submitted it."""

    def __call__(self, batch: BatchFacts) -> BatchObserver: ...


class Both:
    """Two observers as one, the second inside the first: it is told last of a start and first of an end."""

    def __init__(self, first: Observe, second: Observe) -> None:
        self._first = first
        self._second = second

    def __call__(self, batch: BatchFacts) -> BatchObserver:
        return _Pair(self._first(batch), self._second(batch))


@dataclass(frozen=True, slots=True)
class _Pair:
    outer: BatchObserver
    inner: BatchObserver

    def call_started(self, call_id: str, tool_call_id: str, tool: str) -> None:
        self.outer.call_started(call_id, tool_call_id, tool)
        self.inner.call_started(call_id, tool_call_id, tool)

    def call_ended(self, call_id: str, tool: str, status: str, error: str | None) -> None:
        self.inner.call_ended(call_id, tool, status, error)
        self.outer.call_ended(call_id, tool, status, error)

    def output_cut(self) -> None:
        self.inner.output_cut()
        self.outer.output_cut()

    def batch_ended(self, status: str) -> None:
        self.inner.batch_ended(status)
        self.outer.batch_ended(status)

    def close(self) -> None:
        self.inner.close()
        self.outer.close()


class _Nobody:
    def call_started(self, call_id: str, tool_call_id: str, tool: str) -> None: ...

    def call_ended(self, call_id: str, tool: str, status: str, error: str | None) -> None: ...

    def output_cut(self) -> None: ...

    def batch_ended(self, status: str) -> None: ...

    def close(self) -> None: ...


_NOBODY: Final = _Nobody()


def unobserved(batch: BatchFacts) -> BatchObserver:  # noqa: ARG001 - of the protocol
    """Return an observer that takes no note; implements `Observe`."""
    return _NOBODY
