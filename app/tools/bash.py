"""bash: one command in a shell of its own, in the workspace's root."""

from collections.abc import Sequence
from typing import Final

from pydantic import Field

from app.domain.abort import AbortSignal
from app.domain.tool_call import ToolResult
from app.domain.workspace import WorkspaceOptions
from app.errors import ErrorCode, ToolError
from app.sandbox.environment import find_program
from app.tools._shell import ShellCall, run_shell, shown_bytes
from app.tools.base import OnUpdate, ToolAnnotations, ToolDefinition
from app.tools.environment import ToolEnvironment
from app.tools.model_tool import ModelTool, define
from app.tools.shell_arguments import SHELL_SPELLINGS, ShellArguments

BASH_ANNOTATIONS: Final = ToolAnnotations(
    title="Run a shell command",
    read_only_hint=False,
    destructive_hint=True,
    idempotent_hint=False,
    open_world_hint=True,
)

_LONGEST_ARGUMENT: Final = 100_000
"""Linux takes at most 128 KiB in one argument, and about 2 MB in all."""


class BashArguments(ShellArguments):
    command: str = Field(description="The command, as `bash -c` takes it: several lines and here-documents are fine.")


def bash_definition(options: WorkspaceOptions) -> ToolDefinition:
    limits = options.bash
    return define(
        "bash",
        "Run a bash command in the workspace root. Every call is a new shell: `cd`, variables and background processes "
        "end with it, and standard input is empty. Shows stdout and stderr as they came, of long output the last "
        f"{limits.max_output_lines} lines and {shown_bytes(limits)} bytes. "
        f"Without a timeout a command is stopped after {min(limits.timeout, limits.max_timeout)} ms; "
        f"the largest timeout is {limits.max_timeout} ms.",
        BashArguments,
        BASH_ANNOTATIONS,
        limits.execution_mode,
    )


class BashTool(ModelTool[BashArguments]):
    arguments_model = BashArguments
    spellings = SHELL_SPELLINGS

    def __init__(self, environment: ToolEnvironment) -> None:
        super().__init__(bash_definition(environment.options))
        self._environment = environment

    async def run(self, tool_call_id: str, args: BashArguments, signal: AbortSignal, on_update: OnUpdate) -> ToolResult:
        """Run the command; every end but exit code 0 is raised as `app.tools._shell.run_shell` says."""
        call = ShellCall(tool_call_id, args.command, bash_argv(args.command), args.env, args.timeout)
        return await run_shell(self._environment, self._environment.options.bash, call, signal, on_update)


def bash_argv(command: str) -> Sequence[str]:
    """Return the argument list that runs a command.

    One that is too long for a single argument is handed over in pieces and put together by the shell, which then runs
    it as it would run `-c`: with the same `$0` and line numbers, and without arguments of its own.

    Raises:
        ToolError: `unsupported` when there is no bash.
    """
    bash = find_program("bash")
    if bash is None:
        raise ToolError(
            ErrorCode.UNSUPPORTED, "bash is not installed on this machine; whoever runs the service can install it"
        )
    if len(command.encode()) <= _LONGEST_ARGUMENT:
        return (bash, "-c", "--", command, "bash")
    step = _LONGEST_ARGUMENT // 4  # characters, of at most four bytes
    pieces = [command[start : start + step] for start in range(0, len(command), step)]
    joined = "".join(f"${{{number}}}" for number in range(1, len(pieces) + 1))
    return (bash, "-c", "--", f'eval "set --;{joined}"', "bash", *pieces)
