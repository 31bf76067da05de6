"""Telemetry: one log line per finished call at level debug, without its arguments or output."""

import structlog

from app.hooks.base import AfterContext, Hook, Patch

_log = structlog.get_logger("toolcrib.calls")


class TelemetryHook(Hook):
    name = "telemetry"

    async def after_tool_call(self, context: AfterContext) -> Patch | None:
        _log.debug(
            "tool_call",
            workspace_id=context.workspace.id,
            batch_id=context.batch.id,
            call_id=context.call.id,
            tool=context.tool.name,
            is_error=context.is_error,
        )
        return None
