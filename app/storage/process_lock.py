"""Which node a data directory is, and which of the processes that were started on it live: files and locks in it."""

import fcntl
import os
from collections.abc import Iterable
from pathlib import Path
from types import TracebackType
from typing import Self

from app.domain.ids import is_id, new_id
from app.errors import ConfigurationError


def node_of(directory: Path) -> str:
    """Return the id of the node a data directory is, which is kept in it from the first start on.

    Raises:
        ConfigurationError: the file that has it cannot be read or made, or holds something else.
    """
    file = directory / "node"
    try:
        if not file.exists():
            made = directory / f"node.{os.getpid()}"
            made.write_text(f"{new_id('node')}\n")
            made.chmod(0o600)
            try:
                # Of several that start at once the first one names the node.
                os.link(made, file)
            except FileExistsError:
                pass
            finally:
                made.unlink()
        found = file.read_text().strip()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigurationError(f"{file}, which says which node this is, cannot be read: {error}.") from None
    if not is_id(found, "node"):
        raise ConfigurationError(f"{file} has to hold the id of a node and holds {found[:64]!r}.")
    return found


class ProcessLock:
    """A lock on `<directory>/processes/<process id>`, held until `close` or the end of the process, however it ends.

    So the other processes of a node know at once that this one has died.
    """

    def __init__(self, directory: Path, process_id: str) -> None:
        self._directory = directory / "processes"
        self._directory.mkdir(mode=0o700, exist_ok=True)
        self._file = self._directory / process_id
        self._descriptor: int | None = os.open(self._file, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        fcntl.flock(self._descriptor, fcntl.LOCK_EX)

    def dead(self, process_ids: Iterable[str]) -> list[str]:
        """Return those of some processes of this node that have ended, and remove their files."""
        found = []
        for process_id in process_ids:
            file = self._directory / process_id
            try:
                descriptor = os.open(file, os.O_RDWR | os.O_CLOEXEC)
            except FileNotFoundError:
                # It would have made its file before its row: it ran before the directory was copied or restored.
                found.append(process_id)
                continue
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                continue
            else:
                found.append(process_id)
                file.unlink(missing_ok=True)
            finally:
                os.close(descriptor)
        return found

    def close(self) -> None:
        """Say that the process ends."""
        descriptor, self._descriptor = self._descriptor, None
        if descriptor is not None:
            self._file.unlink(missing_ok=True)
            os.close(descriptor)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
