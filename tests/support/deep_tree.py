"""Trees that take long to make on a disk: deep ones and wide ones, in memory where there is such a file system."""

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from app.sandbox.files import remove_tree

_SHARED_MEMORY = Path("/dev/shm")


@contextmanager
def quick_directory() -> Iterator[Path]:
    """Make a directory and take it away again, however deep it has become, which pytest could not."""
    parent = _SHARED_MEMORY if os.access(_SHARED_MEMORY, os.W_OK | os.X_OK) else None
    made = Path(tempfile.mkdtemp(prefix="toolcrib-test-", dir=parent))
    try:
        yield made
    finally:
        above = os.open(made.parent, os.O_RDONLY)
        remove_tree(above, made.name)
        os.close(above)


@contextmanager
def deep_tree(levels: int) -> Iterator[Path]:
    """Make `d/d/…/end`, deeper than recursion, a path or a set of open descriptors can go."""
    with quick_directory() as top:
        here = os.open(top, os.O_RDONLY)
        for _ in range(levels):
            os.mkdir("d", dir_fd=here)
            deeper = os.open("d", os.O_RDONLY, dir_fd=here)
            os.close(here)
            here = deeper
        os.close(os.open("end", os.O_CREAT | os.O_WRONLY, dir_fd=here))
        os.close(here)
        yield top
