"""The executor's sink with an observer beside it: what is stored is measured and traced on its way."""

from app.domain.tool_call import ExecutionMode, Outcome, ToolCall
from app.execution.executor import CallSink
from app.telemetry.observer import BatchObserver


class ObservedSink:
    """Passes everything on to `sink` and tells the observer of starts and ends."""

    def __init__(self, sink: CallSink, observer: BatchObserver) -> None:
        self._sink = sink
        self._observer = observer
        self.started_durably = sink.started_durably
        self.call_updated = sink.call_updated

    def call_started(self, call: ToolCall, mode: ExecutionMode) -> None:
        self._observer.call_started(call.id, call.tool_call_id, call.tool_name)
        self._sink.call_started(call, mode)

    def call_ended(self, call: ToolCall, outcome: Outcome) -> None:
        self._sink.call_ended(call, outcome)
        error = None if outcome.error is None else outcome.error.code.value
        self._observer.call_ended(call.id, call.tool_name, outcome.status.value, error)
