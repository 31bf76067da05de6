"""What a factory gives a tool: the workspace, its options and the shared means to touch it."""

from collections.abc import Callable
from dataclasses import dataclass

from app.domain.workspace import WorkspaceOptions
from app.sandbox.base import Sandbox
from app.sandbox.file_pool import FilePool
from app.tools.file_mutation_queue import FileMutationQueue


@dataclass(frozen=True, slots=True)
class ToolEnvironment:
    """`cwd` is the workspace's root. `files` and `mutations` are shared by every tool of the process.

    `root_identity` is the `(st_dev, st_ino)` the root had when the workspace was made; None does not check.
    `output_url` gives the URL under which a call's captured output can be had, for a caller's call id.
    """

    cwd: str
    options: WorkspaceOptions
    sandbox: Sandbox
    files: FilePool
    mutations: FileMutationQueue
    root_identity: tuple[int, int] | None = None
    output_url: Callable[[str], str] | None = None
