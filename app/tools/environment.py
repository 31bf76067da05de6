"""What a factory gives a tool: the workspace, its options and the shared means to touch it."""

from collections.abc import Callable
from dataclasses import dataclass, field

from app.domain.workspace import WorkspaceOptions
from app.sandbox.account import Account
from app.sandbox.base import Sandbox
from app.sandbox.decoder import Decoder
from app.sandbox.disk import Quota
from app.sandbox.file_pool import FilePool
from app.sandbox.limits import NO_POLICY, CommandPolicy
from app.sandbox.process_slots import ProcessSlots
from app.sandbox.ripgrep import Ripgrep
from app.tools.file_mutation_queue import FileMutationQueue


@dataclass(frozen=True, slots=True)
class ToolEnvironment:
    """`cwd` is the workspace's root. `files` and `mutations` are shared by every tool of the process.

    The workspace's files are touched as `account`, which `files` sees to, and its commands run as that; None: as this
    process does.
    `root_identity` is the `(st_dev, st_ino)` the root had when the workspace was made; None does not check.
    `ripgrep` is what grep runs, shared too; None makes one of its own for each tool, in `sandbox`. `powershell` is the
    path of pwsh; None looks for it on the commands' PATH.
    `policy` is what the server grants commands; `quota` is what the workspace may hold, None for no bound.
    `commands` bounds how many commands run at once, shared too; `tenant` is whose they are counted as. `decoder` takes
    images and PDF files apart, shared likewise.
    `output_url` gives the URL of a call's captured output for the caller's call id, or None when it has none.
    """

    cwd: str
    options: WorkspaceOptions
    sandbox: Sandbox
    files: FilePool
    mutations: FileMutationQueue
    commands: ProcessSlots = field(default_factory=ProcessSlots)
    tenant: str = ""
    root_identity: tuple[int, int] | None = None
    output_url: Callable[[str], str | None] | None = None
    ripgrep: Ripgrep | None = None
    powershell: str | None = None
    account: Account | None = None
    decoder: Decoder = field(default_factory=Decoder)
    policy: CommandPolicy = NO_POLICY
    quota: Quota | None = None
