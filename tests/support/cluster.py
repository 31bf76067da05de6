"""Several processes of the service on one Postgres, each in a directory of its own or on one they share."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from tests.support.server import KEY, ServerProcess


@dataclass
class Cluster:
    """Starts processes below a directory; they end when the context of `cluster` does."""

    database_url: str
    directory: Path
    stack: ExitStack
    environment: dict[str, str] = field(default_factory=dict)

    def api(self, name: str) -> ServerProcess:
        """Start a process that serves and runs nothing."""
        return self._start(name, {"TOOLCRIB_ROLE": "api", "TOOLCRIB_BACKEND": "distributed"})

    def worker(self, name: str) -> ServerProcess:
        """Start a worker; two of one name share a node."""
        return self._start(name, {}, command="worker")

    def both(self, name: str, backend: str = "distributed") -> ServerProcess:
        """Start a process that serves and runs batches; two of one name share a node."""
        return self._start(name, {"TOOLCRIB_BACKEND": backend})

    def _start(self, name: str, environment: dict[str, str], *, command: str = "serve") -> ServerProcess:
        directory = self.directory / name
        directory.mkdir(exist_ok=True)
        process = ServerProcess(
            directory / "data",
            {
                "TOOLCRIB_API_KEY": KEY,
                "TOOLCRIB_DATABASE_URL": self.database_url,
                **self.environment,
                **environment,
            },
            command=command,
        )
        return self.stack.enter_context(process)


@contextmanager
def cluster(database_url: str, directory: Path, **environment: str) -> Iterator[Cluster]:
    """Give what starts processes on a database; all of them end with the context."""
    with ExitStack() as stack:
        yield Cluster(database_url, directory, stack, environment)
