"""The real service for tests: in a thread of the test's process, or as a process of its own."""

import asyncio
import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import httpx2
import uvicorn
from opentelemetry.trace import TracerProvider

from app.__main__ import Server, _bind
from app.api.dependencies import Services
from app.main import create_app
from app.settings import Settings

KEY = "test-key-0123456789"
WAIT_SECONDS = 20.0
START_SECONDS = 60.0  # a machine that is busy with other things imports slowly


def api_client(url: str, key: str | None = KEY) -> httpx2.Client:
    headers = {} if key is None else {"Authorization": f"Bearer {key}"}
    return httpx2.Client(base_url=url, headers=headers, timeout=WAIT_SECONDS, trust_env=False)


class ServerThread:
    """The application behind uvicorn on a free port, in a thread with a loop of its own."""

    def __init__(self, data_dir: Path, *, tracer_provider: TracerProvider | None = None, **settings: Any) -> None:
        self.settings = Settings(**{"data_dir": data_dir, "api_key": KEY, "port": 0, **settings})
        self.url = ""
        self._tracer_provider = tracer_provider
        self._loop: asyncio.AbstractEventLoop | None = None
        self._server: Server | None = None
        self._listening = threading.Event()
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="server", daemon=True)

    @property
    def services(self) -> Services:
        assert self._server is not None
        return self._server._services

    def client(self, key: str | None = KEY) -> httpx2.Client:
        return api_client(self.url, key)

    def call(self, coroutine: Any) -> Any:
        """Run a coroutine on the server's loop and return what it returns."""
        assert self._loop is not None
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result(WAIT_SECONDS)

    def begin_stop(self) -> None:
        """Do what a SIGTERM does."""
        assert self._loop is not None
        assert self._server is not None
        self._loop.call_soon_threadsafe(self._server.handle_exit, signal.SIGTERM, None)

    def __enter__(self) -> Self:
        self._thread.start()
        assert self._listening.wait(START_SECONDS), "the server did not start in time"
        if self._error is not None:
            raise self._error
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._thread.is_alive():
            self.begin_stop()
        self._thread.join(WAIT_SECONDS)
        assert not self._thread.is_alive(), "the server did not stop in time"
        if self._error is not None and kind is None:
            raise self._error

    def _run(self) -> None:
        try:
            asyncio.run(self._serve())
        except BaseException as error:  # noqa: BLE001 - told to whoever waits for the start or the end
            self._error = error
        finally:
            self._listening.set()

    async def _serve(self) -> None:
        self._loop = asyncio.get_running_loop()
        listener = _bind(self.settings.host, self.settings.port)
        self.url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        app = create_app(self.settings, address=self.url, stop=self.begin_stop, tracer_provider=self._tracer_provider)
        config = uvicorn.Config(
            app, lifespan="off", ws="none", log_config=None, access_log=False, timeout_graceful_shutdown=1
        )
        async with app.router.lifespan_context(app):
            self._server = Server(config, app.state.services)
            listener.listen()  # from here on connections wait in its backlog
            self._listening.set()
            await self._server.serve(sockets=[listener])


@dataclass
class ServerProcess:
    """`python -m app serve`, or worker, in a process of its own; `lines` is what it printed on stdout so far."""

    data_dir: Path
    environment: dict[str, str] = field(default_factory=dict)
    wrapper: tuple[str, ...] = ()
    command: str = "serve"
    url: str = ""
    lines: list[str] = field(default_factory=list)
    process: Any = None

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGKILL)
        self.process.wait(WAIT_SECONDS)
        if self.process.stdout is not None:
            self.process.stdout.close()

    def start(self) -> None:
        """Start the process, also once more after it has ended."""
        if self.process is not None and self.process.stdout is not None:
            self.process.stdout.close()
        with (self.data_dir.parent / "stderr.log").open("ab") as log:
            self.process = subprocess.Popen(
                [*self.wrapper, sys.executable, "-m", "app", self.command],
                env=clean_environment(self.data_dir) | self.environment,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
            )
        # A process that dies ends its stdout, so this waits for no longer than the process lives.
        assert self.process.stdout is not None
        timer = threading.Timer(START_SECONDS, self.process.kill)
        timer.start()
        try:
            line = self.process.stdout.readline()
        finally:
            timer.cancel()
        self.lines.append(line)
        found = re.search(r"listens on (http://\S+)", line)
        assert found is not None, f"no address in {line!r}: {self.log()}"
        self.url = found[1]

    def log(self) -> str:
        return (self.data_dir.parent / "stderr.log").read_text()

    def client(self, key: str | None = KEY) -> httpx2.Client:
        return api_client(self.url, key)

    def stop(self, number: int = signal.SIGTERM, seconds: float = WAIT_SECONDS) -> int:
        """Send a signal and return the exit status; what was still printed goes to `lines`."""
        self.process.send_signal(number)
        status = self.process.wait(seconds)
        assert self.process.stdout is not None
        self.lines += self.process.stdout.readlines()
        return status


def clean_environment(data_dir: Path) -> dict[str, str]:
    """Return an environment without settings of whoever runs the tests, for a service on a free port."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("TOOLCRIB_")}
    return kept | {
        "TOOLCRIB_DATA_DIR": str(data_dir),
        "TOOLCRIB_PORT": "0",
        "TOOLCRIB_LOG_FORMAT": "json",
        "PYTHONPATH": os.pathsep.join(sys.path),
    }


@dataclass(frozen=True)
class Event:
    id: int
    type: str
    data: dict[str, Any]


def parse_events(text: str) -> list[Event]:
    """Return the whole events of a stream, the way the specification of EventSource reads it."""
    events = []
    for block in text.split("\n\n")[:-1]:
        fields: dict[str, list[str]] = {}
        for line in block.split("\n"):
            name, _, value = line.partition(":")
            fields.setdefault(name, []).append(value.removeprefix(" "))
        if "data" in fields:
            events.append(Event(int(fields["id"][0]), fields["event"][0], json.loads("\n".join(fields["data"]))))
    return events


@contextlib.contextmanager
def event_stream(
    client: httpx2.Client, method: str, path: str, **request: Any
) -> Iterator[tuple[httpx2.Response, Iterator[Event]]]:
    """Open a stream and give its response and its events as they come."""
    headers = {"Accept": "text/event-stream", **request.pop("headers", {})}
    with client.stream(method, path, headers=headers, **request) as response:
        yield response, _events(response)


def _events(response: httpx2.Response) -> Iterator[Event]:
    rest = ""
    for piece in response.iter_text():
        rest += piece
        head, cut, rest = rest.rpartition("\n\n")
        yield from parse_events(head + cut)


def eventually(check: Any, seconds: float = 5.0) -> Any:
    """Return the first true value of `check`, asked again until `seconds` are over."""
    deadline = time.monotonic() + seconds
    while not (value := check()):
        assert time.monotonic() < deadline, "it did not come about in time"
        time.sleep(0.01)
    return value
