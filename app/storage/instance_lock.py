"""One process per SQLite data directory: what is kept in memory of batches and files holds for one process only."""

import fcntl
import os
from pathlib import Path
from types import TracebackType
from typing import Self

from app.errors import ConfigurationError


class InstanceLock:
    """A lock on `<directory>/lock`, held until `close` or the end of the process, however it ends.

    Raises:
        ConfigurationError: when another process holds it.
    """

    def __init__(self, directory: Path) -> None:
        descriptor = os.open(directory / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = os.read(descriptor, 32).decode("ascii", "replace").strip()
            os.close(descriptor)
            raise ConfigurationError(
                f"another Toolcrib process{f' (pid {holder})' if holder else ''} uses the data directory {directory}; "
                "stop it, or give this one another directory in TOOLCRIB_DATA_DIR"
            ) from None
        # The number is for whoever reads the message above; the lock itself is the kernel's.
        os.ftruncate(descriptor, 0)
        os.write(descriptor, f"{os.getpid()}\n".encode())
        self._descriptor: int | None = descriptor

    def close(self) -> None:
        """Let another process in."""
        descriptor, self._descriptor = self._descriptor, None
        if descriptor is not None:
            os.close(descriptor)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
