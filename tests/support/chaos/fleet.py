"""Which processes make up a service, and the running of them."""

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Final, Self

from tests.support.postgres import PostgresServer, PostgresUnavailable
from tests.support.server import KEY, ServerProcess, api_client
from tests.support.tcp_proxy import TcpProxy

START_SECONDS: Final = 60.0
STOP_SECONDS: Final = 30.0
NODE_DISK: Final = "128m"
POSTGRES_DISK: Final = "512m"


@dataclass(frozen=True)
class Member:
    """One process: which data directory it has, how it is set up, whether clients may ask it."""

    node: str = "node"
    environment: dict[str, str] = field(default_factory=dict)
    serves: bool = True


@dataclass(frozen=True)
class Topology:
    what: str
    members: tuple[Member, ...]
    postgres: bool


_DISTRIBUTED: Final = {"TOOLCRIB_BACKEND": "distributed"}


def _api(name: str) -> Member:
    return Member(name, {**_DISTRIBUTED, "TOOLCRIB_ROLE": "api"})


def _worker(node: str) -> Member:
    return Member(node, {**_DISTRIBUTED, "TOOLCRIB_ROLE": "worker"}, serves=False)


TOPOLOGIES: Final = {
    "sqlite": Topology("one process on SQLite", (Member(),), postgres=False),
    "postgres": Topology("one process on Postgres", (Member(),), postgres=True),
    "shared": Topology(
        "three processes on one Postgres, two of them on one data directory",
        (Member("one", _DISTRIBUTED), Member("one", _DISTRIBUTED), Member("two", _DISTRIBUTED)),
        postgres=True,
    ),
    "apart": Topology(
        "two API processes and two workers",
        (_worker("one"), _worker("two"), _api("three"), _api("four")),
        postgres=True,
    ),
}


class Fleet:
    """The processes of a topology in a directory of their own, and their Postgres, which is nobody else's.

    With `small_disks` each data directory and the database cluster lie on a disk of their own that can be filled; that
    takes a mount namespace in which this process may mount.
    """

    def __init__(self, topology: Topology, directory: Path, *, small_disks: bool) -> None:
        self.topology = topology
        self.postgres: PostgresServer | None = None
        self.networks: list[TcpProxy] = []
        """What lies between each process and Postgres."""
        self.disks: list[Path] = []
        self._directory = directory
        self._small_disks = small_disks
        self._stack = contextlib.ExitStack()
        self.processes: list[ServerProcess] = []

    def __enter__(self) -> Self:
        with self._stack:
            environment = {"TOOLCRIB_API_KEY": KEY}
            if self.topology.postgres:
                place = self._disk("cluster", POSTGRES_DISK)
                self.postgres = self._stack.enter_context(PostgresServer(directory=place))
            for node in sorted({member.node for member in self.topology.members}):
                self._disk(node, NODE_DISK)
            for member in self.topology.members:
                if self.postgres is not None:
                    network = self._stack.enter_context(TcpProxy(self.postgres.port))
                    self.networks.append(network)
                    environment["TOOLCRIB_DATABASE_URL"] = f"postgresql://toolcrib@127.0.0.1:{network.port}/postgres"
                process = ServerProcess(self._directory / member.node, environment | member.environment)
                self.processes.append(process)
                self.start(process)
                self._stack.push(process.__exit__)
            self._stack = self._stack.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.close()

    @property
    def node_directories(self) -> list[Path]:
        return sorted({process.data_dir for process in self.processes})

    def urls(self) -> list[str]:
        """Where clients may ask now."""
        members = zip(self.topology.members, self.processes, strict=True)
        return [process.url for member, process in members if member.serves]

    def start(self, process: ServerProcess) -> None:
        """Start a process as what watches over services does: again and again until it is up."""
        deadline = time.monotonic() + START_SECONDS
        while True:
            try:
                process.start()
            except AssertionError:
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.2)
            else:
                return

    def start_postgres(self) -> None:
        """Start Postgres if it does not run, again and again like the others: its port or its disk may be taken."""
        assert self.postgres is not None
        deadline = time.monotonic() + START_SECONDS
        while not self.postgres.runs:
            try:
                self.postgres.start()
            except PostgresUnavailable:
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.2)

    def ready(self) -> None:
        """Return when every process says that it is ready."""
        deadline = time.monotonic() + START_SECONDS
        for process in self.processes:
            with api_client(process.url, None) as client:
                while client.get("/readyz").status_code != 200:
                    assert time.monotonic() < deadline, (
                        f"not ready: {client.get('/readyz').text}\n{process.log()[-4000:]}"
                    )
                    time.sleep(0.05)

    def stop(self) -> list[int]:
        """Stop all processes as an operator does and return their exit statuses."""
        for process in self.processes:
            process.process.send_signal(signal.SIGTERM)
        return [process.process.wait(STOP_SECONDS) for process in self.processes]

    def log(self) -> str:
        return (self._directory / "stderr.log").read_text()

    def _disk(self, name: str, size: str) -> Path:
        """Make a directory, on a disk of that size when disks are to be small."""
        place = self._directory / name
        place.mkdir()
        if self._small_disks:
            subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size},mode=0711", "tmpfs", place], check=True)
            self._stack.callback(subprocess.run, ["umount", "--lazy", place], check=False)
            self.disks.append(place)
        return place


@contextlib.contextmanager
def filled(disk: Path) -> Iterator[None]:
    """Leave no room on a disk until the end of the block."""
    with (disk / "filler").open("wb", buffering=0) as filler:
        try:
            left = os.statvfs(disk)
            with contextlib.suppress(OSError):
                os.posix_fallocate(filler.fileno(), 0, left.f_bavail * left.f_frsize)
            with contextlib.suppress(OSError):
                filler.seek(0, os.SEEK_END)
                while True:
                    filler.write(bytes(4096))
            yield
        finally:
            (disk / "filler").unlink()
