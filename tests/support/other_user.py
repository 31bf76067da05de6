"""Working as somebody who may not read everything, for tests that may run as root."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.support.deep_tree import quick_directory

NOBODY = 65_534


@contextmanager
def unprivileged_directory() -> Iterator[Path]:
    """Make a directory of the user this process acts as, who is not root; as root it acts as nobody meanwhile."""
    with quick_directory() as directory:
        if os.geteuid() != 0:
            yield directory
            return
        os.chown(directory, NOBODY, NOBODY)
        os.seteuid(NOBODY)
        try:
            yield directory
        finally:
            os.seteuid(0)
