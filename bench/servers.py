"""The processes that are measured: each a subprocess on loopback with a data directory of its own."""

import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path

API_KEY = "bench-key-of-one-run-on-loopback"
_ADDRESS = re.compile(r"http://127\.0\.0\.1:(\d+)")
_START_SECONDS = 120  # a machine that is busy with other things imports slowly
_STOP_SECONDS = 15


@dataclass(frozen=True)
class Server:
    pid: int
    port: int

    def memory_bytes(self) -> int:
        """Resident memory now."""
        return self._status("VmRSS")

    def peak_memory_bytes(self) -> int:
        """Highest resident memory since `reset_peak`."""
        return self._status("VmHWM")

    def reset_peak(self) -> None:
        Path(f"/proc/{self.pid}/clear_refs").write_text("5")

    def cpu_seconds(self) -> float:
        """Processor time the process has taken, its threads included and its children not."""
        fields = Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def _status(self, field: str) -> int:
        for line in Path(f"/proc/{self.pid}/status").read_text().splitlines():
            if line.startswith(field + ":"):
                return int(line.split()[1]) * 1024
        raise LookupError(field)


def toolcrib(
    data_dir: Path,
    module: str = "app",
    sandbox: str = "auto",
    database_url: str | None = None,
    settings: Mapping[str, str] | None = None,
    command: str = "serve",
) -> AbstractContextManager[Server]:
    """Run Toolcrib as a user would; `module` is run in place of `app` with the same arguments."""
    own = {"TOOLCRIB_API_KEY": API_KEY, "TOOLCRIB_DATA_DIR": str(data_dir), "TOOLCRIB_PORT": "0", **(settings or {})}
    if database_url is not None:
        own["TOOLCRIB_DATABASE_URL"] = database_url
    return _serve([module, command], {**own, "TOOLCRIB_SANDBOX": sandbox})


def floor(data_dir: Path) -> AbstractContextManager[Server]:
    """Serve the floor application under the same uvicorn."""
    return _serve(["uvicorn", "bench.floor_app:app", "--port", "0", "--no-access-log"], {"BENCH_DIR": str(data_dir)})


@contextmanager
def _serve(arguments: Sequence[str], settings: Mapping[str, str]) -> Iterator[Server]:
    # Port 0 and the address from the log: two runs never meet, and no port is taken between finding and using it.
    process = subprocess.Popen(
        [sys.executable, "-m", *arguments],
        env={**_environment(), **settings, "PYTHONUNBUFFERED": "1"},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    found: list[int] = []
    log: list[str] = []
    seen = threading.Event()

    def drain() -> None:
        assert process.stdout is not None
        for line in process.stdout:
            del log[:-200]
            log.append(line)
            if not found and (match := _ADDRESS.search(line)):
                found.append(int(match[1]))
                seen.set()
        seen.set()

    reader = threading.Thread(target=drain, daemon=True)
    reader.start()
    try:
        if not seen.wait(_START_SECONDS) or not found:
            raise RuntimeError(f"{arguments[0]} did not start:\n{''.join(log)}")
        _await_answer(found[0], process)
        yield Server(process.pid, found[0])
    finally:
        _stop(process)
        reader.join(_STOP_SECONDS)


def _environment() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if not name.startswith("TOOLCRIB_")}


def popen_milliseconds(argv: Sequence[str]) -> float:
    """Return how long a bare Popen of a command takes, both pipes read to the end."""
    started = time.perf_counter()
    process = subprocess.Popen(
        argv, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True
    )
    process.communicate(timeout=30)
    return (time.perf_counter() - started) * 1000


def _await_answer(port: int, process: subprocess.Popen[str]) -> None:
    deadline = time.monotonic() + _START_SECONDS
    while time.monotonic() < deadline:
        if process.poll() is not None:
            raise RuntimeError(f"the server exited with {process.returncode} before it listened")
        try:
            with socket.create_connection(("127.0.0.1", port), timeout=1) as connection:
                connection.sendall(b"GET /healthz HTTP/1.1\r\nhost: 127.0.0.1\r\nconnection: close\r\n\r\n")
                if connection.recv(12).startswith(b"HTTP/1.1 "):
                    return
        except OSError:
            time.sleep(0.05)
    raise RuntimeError(f"nothing answers on port {port}")


def _stop(process: subprocess.Popen[str]) -> None:
    process.send_signal(signal.SIGTERM)
    try:
        process.wait(_STOP_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
