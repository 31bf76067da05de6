"""Logs: one structured line per fact, on stderr, with the ids that tie lines to a request and a batch.

Modules log with `structlog.get_logger(__name__)`; what is bound in `structlog.contextvars` (`request_id`, `batch_id`)
rides on every line of the same task, and `trace_id` on those that are written while a span is current. Lines of
libraries that log with the standard library take the same form.
"""

import logging
import re
import sys
from typing import Final, Literal

import structlog
from opentelemetry import trace
from structlog.typing import EventDict, Processor, WrappedLogger

LogLevel = Literal["debug", "info", "warning", "error"]
LogFormat = Literal["auto", "console", "json"]

# What these say at INFO repeats our own lines.
_QUIET: Final = ("uvicorn.error", "alembic", "sse_starlette", "procrastinate", "httpx2", "httpcore2")
_SECRETS: Final = re.compile(r"(?<=[?&]token=)[^&#\s\"']+|toolcrib_(?:url_[\w.-]{20,}|[\w-]{43})")
_CONTROL: Final = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")


def configure_logging(level: LogLevel, form: LogFormat) -> None:
    """Send every line to stderr. `auto` is for people on a terminal and JSON elsewhere."""
    terminal = sys.stderr.isatty()
    number = logging.getLevelNamesMapping()[level.upper()]
    shared: list[Processor] = [
        structlog.contextvars.merge_contextvars,
        _add_trace_id,
        structlog.processors.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True, key="at"),
        # Plain: a traceback that shows the values of variables would show secrets.
        structlog.processors.format_exc_info,
        _redact,
    ]
    console = structlog.dev.ConsoleRenderer(
        colors=terminal, timestamp_key="at", exception_formatter=structlog.dev.plain_traceback
    )
    rendering: list[Processor] = (
        [_escape_control_characters, console]
        if form == "console" or (form == "auto" and terminal)
        else [structlog.processors.EventRenamer("message"), structlog.processors.JSONRenderer()]
    )
    structlog.configure(
        processors=[*shared, *rendering],
        wrapper_class=structlog.make_filtering_bound_logger(number),
        logger_factory=structlog.WriteLoggerFactory(sys.stderr),
        cache_logger_on_first_use=False,
    )
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            foreign_pre_chain=shared,
            processors=[structlog.stdlib.ProcessorFormatter.remove_processors_meta, *rendering],
        )
    )
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(number)
    for name in _QUIET:
        logging.getLogger(name).setLevel(max(number, logging.WARNING))


def _add_trace_id(_logger: WrappedLogger, _method: str, event: EventDict) -> EventDict:
    # As exporters write it. Without tracing there is no span and this costs a look at a variable.
    span = trace.get_current_span().get_span_context()
    if span.is_valid:
        event["trace_id"] = trace.format_trace_id(span.trace_id)
    return event


def _redact(_logger: WrappedLogger, _method: str, event: EventDict) -> EventDict:
    # Keys and URL tokens: those of our making wherever they stand, and whatever a URL has as `token`.
    for key, value in event.items():
        if isinstance(value, str) and ("toolcrib_" in value or "token=" in value):
            event[key] = _SECRETS.sub("***", value)
    return event


def _escape_control_characters(_logger: WrappedLogger, _method: str, event: EventDict) -> EventDict:
    # Names and messages come from callers: an escape sequence in one must not reach the operator's terminal.
    for key, value in event.items():
        if isinstance(value, str) and _CONTROL.search(value) is not None:
            event[key] = _CONTROL.sub(lambda match: f"\\x{ord(match[0]):02x}", value)
    return event
