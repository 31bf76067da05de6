"""What tools share, made for one test or module and given back at its end."""

import asyncio
from collections.abc import Iterator
from contextlib import closing, contextmanager

from app.sandbox.file_pool import FilePool
from app.sandbox.local import LocalSandbox
from app.tools.file_mutation_queue import FileMutationQueue
from app.tools.registry import ToolsOptions


@contextmanager
def shared_means() -> Iterator[ToolsOptions]:
    """A sandbox, threads and a queue, for tools that event loops use one after the other."""
    sandbox = LocalSandbox()
    with closing(FilePool()) as files:
        yield ToolsOptions(sandbox=sandbox, files=files, mutations=FileMutationQueue())
        asyncio.run(sandbox.close())
