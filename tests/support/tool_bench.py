"""A workspace directory and the tools that work in it, for tests that call tools without an executor."""

import shutil
import sysconfig
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from app.domain.abort import AbortSignal
from app.domain.tool_call import ToolResult
from app.domain.workspace import WorkspaceOptions
from app.errors import ToolError
from app.sandbox.base import Sandbox
from app.sandbox.file_pool import FilePool
from app.sandbox.local import LocalSandbox
from app.tools.base import AgentTool, OnUpdate
from app.tools.registry import ToolsOptions, create_tool

RG = Path(sysconfig.get_path("scripts")) / "rg"


class ToolBench:
    """`options` are the workspace's, by their names on the wire; `means` go to `ToolsOptions`."""

    def __init__(self, root: Path, *, sandbox: Sandbox | None = None, **means: Any) -> None:
        self.root = root
        self.files = FilePool()
        self.sandbox = sandbox or LocalSandbox()
        self.means = means

    def tool(self, name: str, **options: Any) -> AgentTool:
        given = ToolsOptions(
            options=WorkspaceOptions.from_json(options), sandbox=self.sandbox, files=self.files, **self.means
        )
        return create_tool(name, str(self.root), given)

    async def call(
        self,
        name: str,
        arguments: Mapping[str, Any],
        *,
        signal: AbortSignal | None = None,
        on_update: OnUpdate | None = None,
        **options: Any,
    ) -> ToolResult:
        """Prepare, validate and run one call, as the executor would."""
        tool = self.tool(name, **options)
        prepared = tool.validate_arguments(tool.prepare_arguments(arguments))
        return await tool.execute("call-1", prepared, signal, on_update)

    async def refusal(self, name: str, arguments: Mapping[str, Any], **options: Any) -> ToolError:
        """Return how a call fails; it has to."""
        try:
            result = await self.call(name, arguments, **options)
        except ToolError as error:
            return error
        raise AssertionError(f"no failure, but {result}")

    def put(self, files: Mapping[str, str | bytes]) -> None:
        for name, content in files.items():
            file = self.root / name
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_bytes(content if isinstance(content, bytes) else content.encode())

    def empty(self) -> None:
        """Remove everything in the root, for one more example of a property."""
        for entry in self.root.iterdir():
            shutil.rmtree(entry) if entry.is_dir() and not entry.is_symlink() else entry.unlink()

    async def close(self) -> None:
        await self.sandbox.close()
        self.files.close()


def text_of(result: ToolResult) -> str:
    (block,) = result.content
    assert block["type"] == "text"
    return block["text"]


def paths(result: ToolResult) -> list[str]:
    return [entry["path"] for entry in result.details["entries"]]
