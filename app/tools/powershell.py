r"""powershell: one command in a PowerShell 7 of its own, in the workspace's root.

`pwsh -Command` runs a text as one script. Nothing stands before the caller's text, so that `param()`, `using` and here-
strings are where they have to be. What is added behind it is for the exit code, of which `-Command` by itself keeps no
more than whether the last statement succeeded: the code of a program that failed as the last statement becomes that of
the process, and any other failed last statement is 1. `exit N` and `throw` end the script before that is reached, with
N and 1.

PowerShell writes UTF-8 without a byte order mark because the locale of a command is always UTF-8.
"""

import os
from collections.abc import Sequence
from typing import Final

from pydantic import Field, field_validator

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

POWERSHELL_ANNOTATIONS: Final = ToolAnnotations(
    title="Run a PowerShell command",
    read_only_hint=False,
    destructive_hint=True,
    idempotent_hint=False,
    open_world_hint=True,
)

# The empty line ends a statement even when the text's last character is the one that continues lines.
EPILOGUE: Final = """

if ($?) { exit 0 }
if ((Test-Path -LiteralPath Variable:\\LASTEXITCODE) -and $LASTEXITCODE) { exit $LASTEXITCODE }
exit 1
"""

QUIET: Final = {"POWERSHELL_TELEMETRY_OPTOUT": "1", "POWERSHELL_UPDATECHECK": "Off"}
"""Variables that keep PowerShell from calling home."""

_LONGEST_COMMAND: Final = 100_000
"""In bytes: Linux takes at most 128 KiB in one argument."""


class PowerShellArguments(ShellArguments):
    command: str = Field(description="The command: PowerShell 7, several lines and here-strings are fine.")

    @field_validator("command")
    @classmethod
    def _fits_an_argument(cls, command: str) -> str:
        size = len(command.encode("utf-8", "surrogatepass"))
        if size > _LONGEST_COMMAND:
            raise ValueError(
                f"has {size} bytes and PowerShell takes {_LONGEST_COMMAND} at once; write it to a .ps1 file with write "
                "and run that"
            )
        return command


def powershell_definition(options: WorkspaceOptions) -> ToolDefinition:
    limits = options.powershell
    return define(
        "powershell",
        "Run a PowerShell 7 command in the workspace root, where it is installed. Every call is a new process: "
        "location, variables and jobs end with it, and standard input is empty. Shows stdout and stderr as they came, "
        f"of long output the last {limits.max_output_lines} lines and {shown_bytes(limits)} bytes. The exit code is "
        "that of the last statement. Without a timeout a command is stopped after "
        f"{min(limits.timeout, limits.max_timeout)} ms; the largest timeout is {limits.max_timeout} ms.",
        PowerShellArguments,
        POWERSHELL_ANNOTATIONS,
        limits.execution_mode,
    )


class PowerShellTool(ModelTool[PowerShellArguments]):
    arguments_model = PowerShellArguments
    spellings = SHELL_SPELLINGS

    def __init__(self, environment: ToolEnvironment) -> None:
        super().__init__(powershell_definition(environment.options))
        self._environment = environment

    async def run(
        self, tool_call_id: str, args: PowerShellArguments, signal: AbortSignal, on_update: OnUpdate
    ) -> ToolResult:
        """Run the command; every end but exit code 0 is raised as `app.tools._shell.run_shell` says.

        Raises:
            ToolError: `unsupported` when there is no PowerShell.
        """
        environment = self._environment
        options = environment.options.powershell
        argv = powershell_argv(find_powershell(environment.powershell), args.command)
        variables = {name: value for name, value in QUIET.items() if name not in options.env} | (args.env or {})
        call = ShellCall(tool_call_id, args.command, argv, variables, args.timeout)
        return await run_shell(environment, options, call, signal, on_update)


def find_powershell(given: str | None = None) -> str | None:
    """Return the absolute path of `pwsh`: the given one when it can be run, else the one on the commands' PATH."""
    if given is not None:
        return given if os.access(given, os.X_OK) else None
    return find_program("pwsh")


def powershell_argv(program: str | None, command: str) -> Sequence[str]:
    """Return the argument list that runs a command.

    Raises:
        ToolError: `unsupported` when there is no PowerShell.
    """
    if program is None:
        raise ToolError(
            ErrorCode.UNSUPPORTED,
            "powershell is not available on this host: there is no pwsh on the PATH of the service. Whoever runs it "
            "can install PowerShell 7 (https://aka.ms/install-powershell); use bash meanwhile",
        )
    return (program, "-NoLogo", "-NoProfile", "-NonInteractive", "-Command", command + EPILOGUE)
