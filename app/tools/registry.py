"""Every tool there is, by name: what a model sees of it and what runs.

A tool is a line of `ToolName`. Factories give the tools of one workspace directory; what they share (sandbox, threads,
queue) is passed in `ToolsOptions`, or made once per process when it is not.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from functools import cache
from typing import Final, Self

from app.domain.workspace import Workspace, WorkspaceOptions
from app.sandbox.account import Account, account_of
from app.sandbox.base import Sandbox
from app.sandbox.decoder import Decoder
from app.sandbox.disk import DiskUsage, Quota
from app.sandbox.file_pool import FilePool
from app.sandbox.limits import NO_POLICY, CommandPolicy
from app.sandbox.local import LocalSandbox
from app.sandbox.process_slots import ProcessSlots
from app.sandbox.ripgrep import Ripgrep
from app.tools.base import AgentTool, ToolDefinition
from app.tools.bash import BashTool, bash_definition
from app.tools.edit import EditTool, edit_definition
from app.tools.environment import ToolEnvironment
from app.tools.file_mutation_queue import FileMutationQueue
from app.tools.find import FindTool, find_definition
from app.tools.grep import GrepTool, grep_definition
from app.tools.ls import LsTool, ls_definition
from app.tools.powershell import PowerShellTool, powershell_definition
from app.tools.read import ReadTool, read_definition
from app.tools.write import WriteTool, write_definition


class ToolName(StrEnum):
    """The tools, each with how its definition is made from a workspace's options and what runs it."""

    define: Callable[[WorkspaceOptions], ToolDefinition]
    build: Callable[[ToolEnvironment], AgentTool]

    def __new__(
        cls,
        name: str,
        define: Callable[[WorkspaceOptions], ToolDefinition],
        build: Callable[[ToolEnvironment], AgentTool],
    ) -> Self:
        member = str.__new__(cls, name)
        member._value_ = name
        member.define = define
        member.build = build
        return member

    READ = "read", read_definition, ReadTool
    WRITE = "write", write_definition, WriteTool
    EDIT = "edit", edit_definition, EditTool
    BASH = "bash", bash_definition, BashTool
    POWERSHELL = "powershell", powershell_definition, PowerShellTool
    GREP = "grep", grep_definition, GrepTool
    FIND = "find", find_definition, FindTool
    LS = "ls", ls_definition, LsTool


all_tool_names: Final[tuple[ToolName, ...]] = tuple(ToolName)

_BY_NAME: Final = {name.value: name for name in ToolName}
_CODING: Final = (ToolName.READ, ToolName.BASH, ToolName.EDIT, ToolName.WRITE)


@dataclass(frozen=True, slots=True)
class ToolsOptions:
    """What the tools of a workspace are made with.

    `options` are the workspace's. `sandbox`, `files` and `mutations` are shared by all workspaces of a process, which
    is what keeps two changes of one file apart: pass the same ones every time, or none. `ripgrep`, `commands` and
    `decoder` are shared likewise, to bound how many searches, commands and decoders run at once. `tenant`,
    `root_identity`, `output_url`, `powershell`, `account`, `policy` and `quota` are those of `ToolEnvironment`. `usage`
    is where workspaces get theirs from.
    """

    options: WorkspaceOptions = field(default_factory=WorkspaceOptions)
    sandbox: Sandbox | None = None
    files: FilePool | None = None
    mutations: FileMutationQueue | None = None
    commands: ProcessSlots | None = None
    tenant: str = ""
    root_identity: tuple[int, int] | None = None
    output_url: Callable[[str], str | None] | None = None
    ripgrep: Ripgrep | None = None
    powershell: str | None = None
    account: Account | None = None
    decoder: Decoder | None = None
    policy: CommandPolicy = NO_POLICY
    usage: DiskUsage | None = None
    quota: Quota | None = None


def create_tool(name: str, cwd: str, options: ToolsOptions | None = None) -> AgentTool:
    """Return the tool `name` for the workspace directory `cwd`.

    Raises:
        ValueError: `Unknown tool name: X`.
    """
    return _named(name).build(_environment(cwd, options))


def create_tool_definition(name: str, options: WorkspaceOptions | None = None) -> ToolDefinition:
    """Return what a model sees of the tool `name`, as a workspace's options make it.

    Raises:
        ValueError: `Unknown tool name: X`.
    """
    return _named(name).define(options or WorkspaceOptions())


def create_coding_tools(cwd: str, options: ToolsOptions | None = None) -> list[AgentTool]:
    """Return read, bash, edit and write."""
    return list(_build(_CODING, cwd, options).values())


def create_coding_tool_definitions(options: WorkspaceOptions | None = None) -> list[ToolDefinition]:
    return [create_tool_definition(name, options) for name in _CODING]


def create_read_only_tools(cwd: str, options: ToolsOptions | None = None) -> list[AgentTool]:
    """Return the tools that change nothing, as their annotations say."""
    return list(_build(_read_only(), cwd, options).values())


def create_read_only_tool_definitions(options: WorkspaceOptions | None = None) -> list[ToolDefinition]:
    return [create_tool_definition(name, options) for name in _read_only()]


def create_all_tools(cwd: str, options: ToolsOptions | None = None) -> dict[str, AgentTool]:
    """Return every tool by its name."""
    return _build(all_tool_names, cwd, options)


class WorkspaceTools(Mapping[str, AgentTool]):
    """Every tool of one workspace by its name, each made when it is first asked for: most batches use one or two."""

    def __init__(self, shared: ToolsOptions, workspace: Workspace, output_url: Callable[[str], str | None]) -> None:
        options = replace(
            shared,
            options=workspace.options,
            tenant=workspace.owner,
            root_identity=(workspace.root_device, workspace.root_inode),
            output_url=output_url,
            quota=None if shared.usage is None else _quota(shared.usage, workspace),
            account=account_of(workspace.root_uid, workspace.root_gid),
        )
        self._environment = _environment(workspace.root, options)
        self._made: dict[str, AgentTool] = {}

    def __getitem__(self, name: str) -> AgentTool:
        made = self._made.get(name)
        if made is None:
            if name not in _BY_NAME:
                raise KeyError(name)
            made = self._made[name] = _BY_NAME[name].build(self._environment)
        return made

    def __iter__(self) -> Iterator[str]:
        return iter(_BY_NAME)

    def __len__(self) -> int:
        return len(_BY_NAME)


def _quota(usage: DiskUsage, workspace: Workspace) -> Quota | None:
    identity = (workspace.root_device, workspace.root_inode)
    return usage.quota(workspace.root, identity, managed=workspace.managed, asked=workspace.options.quota_bytes)


def create_all_tool_definitions(options: WorkspaceOptions | None = None) -> list[ToolDefinition]:
    return [create_tool_definition(name, options) for name in all_tool_names]


def _named(name: str) -> ToolName:
    known = _BY_NAME.get(name)
    if known is None:
        raise ValueError(f"Unknown tool name: {name}")
    return known


def _build(names: Iterable[ToolName], cwd: str, options: ToolsOptions | None) -> dict[str, AgentTool]:
    environment = _environment(cwd, options)
    return {name.value: name.build(environment) for name in names}


@cache
def _read_only() -> tuple[ToolName, ...]:
    options = WorkspaceOptions()
    return tuple(name for name in all_tool_names if name.define(options).annotations.read_only_hint)


def _environment(cwd: str, options: ToolsOptions | None) -> ToolEnvironment:
    given = options or ToolsOptions()
    return ToolEnvironment(
        cwd=cwd,
        options=given.options,
        sandbox=given.sandbox or _process_sandbox(),
        files=(given.files or _process_files()).acting_as(given.account),
        mutations=_process_mutations() if given.mutations is None else given.mutations,
        commands=given.commands or _process_commands(),
        tenant=given.tenant,
        root_identity=given.root_identity,
        output_url=given.output_url,
        ripgrep=given.ripgrep,
        powershell=given.powershell,
        account=given.account,
        decoder=given.decoder or _process_decoder(),
        policy=given.policy,
        quota=given.quota,
    )


@cache
def _process_sandbox() -> Sandbox:
    return LocalSandbox()


@cache
def _process_files() -> FilePool:
    return FilePool()


@cache
def _process_mutations() -> FileMutationQueue:
    return FileMutationQueue()


@cache
def _process_decoder() -> Decoder:
    return Decoder()


@cache
def _process_commands() -> ProcessSlots:
    return ProcessSlots()
