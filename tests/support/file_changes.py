"""A process that changes a file of a workspace next to others: `python -m tests.support.file_changes`.

Arguments: `edit` or `hold`, the workspace, the file of the locks, the path of the file, a name. It writes a line once it
is ready, and waits for a line. `edit` then puts 50 lines before the line `end` of the file, each with the tool edit, and
has ended when all are in. `hold` has the file when it is ready, and keeps it until its standard input ends.
"""

import asyncio
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from app.domain.abort import AbortSignal
from app.domain.workspace import WorkspaceOptions
from app.sandbox.containment import Root, Target
from app.sandbox.file_locks import FileLocks
from app.sandbox.file_pool import FilePool
from app.sandbox.local import LocalSandbox
from app.tools.edit import EditTool
from app.tools.environment import ToolEnvironment
from app.tools.file_mutation_queue import FileMutationQueue

EDITS: Final = 50
SECONDS: Final = 60.0


@contextmanager
def file_changer(what: str, root: Path, locks: Path, path: str, name: str = "") -> Iterator[subprocess.Popen[str]]:
    """Run such a process until it is ready; it is killed at the end of the block."""
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.support.file_changes", what, str(root), str(locks), path, name],
        cwd=Path(__file__).parents[2],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    timer = threading.Timer(SECONDS, process.kill)
    timer.start()
    try:
        with process:
            try:
                assert process.stdout is not None
                assert process.stdout.readline() == "ready\n"
                yield process
            finally:
                process.kill()
    finally:
        timer.cancel()


def _ready() -> None:
    sys.stdout.write("ready\n")
    sys.stdout.flush()
    sys.stdin.readline()


async def _main(what: str, root: str, locks: str, path: str, name: str) -> None:
    files, mutations = FilePool(), FileMutationQueue(FileLocks(Path(locks)))

    def resolve() -> Target:
        with Root.open(root) as opened:
            return opened.target(opened.relative(path))

    if what == "hold":
        await mutations.run(files, root, resolve, lambda _target: _ready(), AbortSignal())
        return
    tool = EditTool(
        ToolEnvironment(cwd=root, options=WorkspaceOptions(), sandbox=LocalSandbox(), files=files, mutations=mutations)
    )
    _ready()
    for number in range(EDITS):
        edit = {"oldText": "end", "newText": f"{name} {number}\nend"}
        await tool.execute(f"{number}", {"path": path, "edits": [edit]})


if __name__ == "__main__":
    asyncio.run(_main(*sys.argv[1:]))
