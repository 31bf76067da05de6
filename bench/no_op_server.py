"""The service with a read that reads nothing: what remains is the endpoint, the executor, the events and the record.

The stand-in answers what a read of the bench's file answers, so that both store and send the same bytes.
"""

import sys
from typing import Any

from app.__main__ import main
from app.domain.abort import AbortSignal
from app.domain.tool_call import ToolResult, text_content
from app.tools.base import OnUpdate
from app.tools.read import ReadArguments, ReadTool


async def _answer(
    self: ReadTool,  # noqa: ARG001 - stands in for a method
    tool_call_id: str,  # noqa: ARG001
    args: ReadArguments,
    signal: AbortSignal,  # noqa: ARG001
    on_update: OnUpdate,  # noqa: ARG001
) -> ToolResult:
    details: dict[str, Any] = {
        "path": f"/a/directory/as/long/as/that/of/a/workspace/of/the/bench/ws_01jz0000000000000000000000/{args.path}",
        "relativePath": args.path,
        "bytes": 14,
        "lines": 1,
        "startLine": 1,
        "endLine": 1,
        "truncated": False,
        "nextOffset": None,
        "encoding": "utf-8",
        "mimeType": "text/plain",
    }
    return ToolResult(text_content("   1│ status: draft"), details)


if __name__ == "__main__":
    ReadTool.run = _answer  # type: ignore[method-assign]
    sys.exit(main())
