"""Makes tool calls in a process of its own that permissions of files hold, also when it is root's.

    python -m tests.support.tool_calls ROOT

Reads `[[name, arguments], ...]` from standard input and writes, for each, `[code, text]`: the error's code, or null.
Root ignores permissions by two capabilities. They are given up for good here, and for all programs that are started.
"""

import asyncio
import ctypes
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from app.errors import ToolError
from app.tools.registry import create_all_tools

CANNOT = 77
"""Exit status when the capabilities cannot be given up."""

_PR_CAPBSET_DROP = 24
_CAPABILITIES = (1, 2)  # CAP_DAC_OVERRIDE, CAP_DAC_READ_SEARCH
_DROPPED = "TOOL_CALLS_DROPPED"


def call_under_permissions(root: Path, calls: list[tuple[str, dict[str, Any]]]) -> list[tuple[str | None, str]] | None:
    """Make the calls in a process that permissions hold; None when there can be no such process here."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.support.tool_calls", str(root)],
        input=json.dumps(calls),
        capture_output=True,
        text=True,
        cwd=Path(__file__).parents[2],
        timeout=60,
        check=False,
    )
    if done.returncode == CANNOT:
        return None
    assert done.returncode == 0, done.stderr
    return [(code, text) for code, text in json.loads(done.stdout)]


def _give_up_capabilities() -> None:
    if os.geteuid() != 0 or os.environ.pop(_DROPPED, None):
        return
    prctl = ctypes.CDLL(None, use_errno=True).prctl
    if any(prctl(_PR_CAPBSET_DROP, capability, 0, 0, 0) for capability in _CAPABILITIES):
        sys.exit(CANNOT)
    # What a process may have is taken from what its program may have when it is started.
    os.execve(
        sys.executable, [sys.executable, "-m", "tests.support.tool_calls", *sys.argv[1:]], os.environ | {_DROPPED: "1"}
    )


async def _call(root: str, calls: list[tuple[str, Any]]) -> list[tuple[str | None, str]]:
    tools = create_all_tools(root)
    answers: list[tuple[str | None, str]] = []
    for name, arguments in calls:
        try:
            async with asyncio.timeout(20):
                result = await tools[name].execute("call-1", arguments)
        except ToolError as error:
            answers.append((error.code.value, error.message))
        else:
            answers.append((None, "\n".join(block["text"] for block in result.content if block["type"] == "text")))
    return answers


if __name__ == "__main__":
    _give_up_capabilities()
    json.dump(asyncio.run(_call(sys.argv[1], json.load(sys.stdin))), sys.stdout)
