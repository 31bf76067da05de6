"""`toolcrib`: serve, migrate, make keys, copy the database. The only place that knows uvicorn."""

import argparse
import asyncio
import os
import socket
import sys
import threading
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from types import FrameType
from typing import Final

import structlog
import uvicorn
from fastapi import FastAPI
from starlette.types import ASGIApp, Receive, Scope, Send

from app import __version__
from app.api.dependencies import Services
from app.commands import (
    copy_records,
    create_key,
    every_key,
    list_nodes,
    migrate,
    relocate_workspaces,
    revoke_key,
)
from app.domain.audit import SERVICE
from app.domain.caller import OWNER, SCOPES
from app.domain.caller import Scope as KeyScope
from app.domain.clock import rfc3339
from app.errors import ConfigurationError
from app.main import create_app
from app.sandbox.account import keep_others_out
from app.services.keys import KeyRequest
from app.settings import Settings, unknown_variables, variable
from app.storage.base import StorageError
from app.telemetry.logs import configure_logging
from app.telemetry.metrics import CONTENT_TYPE, Metrics

# Together with the last commits of the lifespan this stays below `EXIT_SECONDS`, the last resort for what hangs.
GRACE_SECONDS: Final = 5.0
DRAIN_SECONDS: Final = 6.5
CLOSE_SECONDS: Final = 1
EXIT_SECONDS: Final = 8.9
KEEP_ALIVE_SECONDS: Final = 75
LOST_SECONDS: Final = 60
"""How long a client may acknowledge nothing before its connection counts as lost: it went without saying so."""

# What is accepted inherits them. Of a quiet connection the probes get no answer, of a busy one what was sent.
_NOTICE_LOST_CLIENTS: Final = (
    (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1),
    (socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, LOST_SECONDS // 2),
    (socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, LOST_SECONDS // 6),
    (socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, LOST_SECONDS * 1000),
)

# An id, an owner (longer ones push the rest away), scopes, three times, a name.
_KEY_COLUMNS: Final = (30, 30, 21, 24, 24, 24, 0)
_WORKER: Final = {"role": "worker", "backend": "distributed"}

_log = structlog.get_logger(__name__)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command and return its exit status: 2 for a wrong setting."""
    parser = argparse.ArgumentParser(prog="toolcrib", description="File and shell tools over HTTP.")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND")
    commands.add_parser("serve", help="bring the database up to date and serve (the default)")
    commands.add_parser(
        "worker",
        help="run batches that other processes accept",
        description="Run the batches of the workspaces in this data directory that other processes accept. Listens as "
        "serve does, for health checks, metrics and what other processes send on. The same as serve with "
        "TOOLCRIB_ROLE=worker and TOOLCRIB_BACKEND=distributed.",
    )
    commands.add_parser("nodes", help="list the nodes of the database and the processes that live")
    commands.add_parser("migrate", help="bring the database up to date")
    database = commands.add_parser("db", help="the database").add_subparsers(dest="db_command", required=True)
    copy = database.add_parser(
        "copy",
        help="copy all records to another database",
        description="Copy all records to a database without any and compare the two. Stop the service before.",
    )
    place = "a data directory, or sqlite:///PATH, or postgresql://USER@HOST/NAME"
    copy.add_argument("--from", dest="source", required=True, metavar="DATABASE", help=place)
    copy.add_argument("--to", dest="target", required=True, metavar="DATABASE", help="the same")
    relocate = database.add_parser(
        "relocate",
        help="take the directories at the workspaces' roots for theirs, after a restore",
        description="Note which directories stand at the roots of the open workspaces: in the data directory those of "
        "managed ones, where they were those of adopted ones. Stop the service before, or with --node the processes of "
        "that node and of this one.",
    )
    relocate.add_argument(
        "--node", metavar="NODE", help="only the workspaces of this node, which become those of this data directory"
    )
    commands.add_parser("version", help="print the version")
    key = commands.add_parser("key", help="API keys").add_subparsers(dest="key_command", required=True)
    create = key.add_parser("create", help="make a key and print it")
    create.add_argument("--name", default="", help="what the key is for")
    create.add_argument(
        "--scopes", type=_scopes, default=SCOPES, metavar="SCOPE,…", help=f"what it may do: {', '.join(SCOPES)} (all)"
    )
    create.add_argument(
        "--owner", type=_owner, help="whose things it makes and sees; keys may share one (the key's own id)"
    )
    key.add_parser("list", help="list all keys, newest first; their tokens are stored nowhere")
    revoke = key.add_parser("revoke", help="revoke a key, also while the service runs")
    revoke.add_argument("key_id", metavar="ID", help="its id, key_…, as in the list")
    asked = parser.parse_args(arguments)
    if asked.command == "version":
        sys.stdout.write(f"toolcrib {__version__}\n")
        return 0
    try:
        settings = Settings.load(**_WORKER) if asked.command == "worker" else Settings.load()
        configure_logging(settings.log_level, settings.log_format)
        for name, nearest in unknown_variables(os.environ):
            _log.warning("unknown_setting", variable=name, did_you_mean=nearest)
        if asked.command == "migrate":
            migrate(settings)
        elif asked.command == "nodes":
            list_nodes(settings, _say)
        elif asked.command == "db" and asked.db_command == "relocate":
            relocate_workspaces(settings, _say, node=asked.node)
        elif asked.command == "db":
            copy_records(asked.source, asked.target, _say)
        elif asked.command == "key" and asked.key_command == "list":
            _list_keys(settings)
        elif asked.command == "key" and asked.key_command == "revoke":
            revoke_key(settings, asked.key_id)
            _say(f"revoked {asked.key_id}")
        elif asked.command == "key":
            sys.stdout.write(create_key(settings, KeyRequest(asked.name, asked.scopes, asked.owner)) + "\n")
        else:
            return _serve(settings)
    except ConfigurationError as error:
        sys.stderr.write(f"toolcrib: {error}\n")
        return 2
    except StorageError as error:
        # What a database says may have several lines.
        sys.stderr.write(f"toolcrib: {' '.join(str(error).split())}\n")
        return 1
    return 0


def _scopes(text: str) -> tuple[KeyScope, ...]:
    given = [part.strip() for part in text.split(",") if part.strip()]
    unknown = [part for part in given if part not in SCOPES]
    if unknown or not given:
        raise argparse.ArgumentTypeError(f"scopes are {', '.join(SCOPES)}, with commas between them, not {text!r}")
    return tuple(scope for scope in SCOPES if scope in given)


def _owner(text: str) -> str:
    if OWNER.match(text) is None:
        raise argparse.ArgumentTypeError(f"an owner is 1 to 64 of A-Z, a-z, 0-9, '.', '_' and '-', not {text!r}")
    return text


def _list_keys(settings: Settings) -> None:
    def line(*columns: str) -> None:
        _say("  ".join(text.ljust(width) for text, width in zip(columns, _KEY_COLUMNS, strict=True)).rstrip())

    line("id", "owner", "scopes", "created", "expires", "revoked", "name")
    for key in every_key(settings):
        times = ("-" if at is None else rfc3339(at) for at in (key.created_at, key.expires_at, key.revoked_at))
        # A name may hold anything; a line stays a line.
        name = "".join(sign if sign.isprintable() else "?" for sign in key.name)
        line(key.id, key.owner, ",".join(key.scopes), *times, name)


class Server(uvicorn.Server):
    """A server that drains before it closes.

    The first signal turns new work away and gives batches that run 5 s, in which their streams stay open; a second one
    skips that. Only when every batch has ended, or 6.5 s are over, are connections closed.

    Args:
        new_token: the token of a key that was just made, to be shown.
        on_stop: called once, in the signal handler, when the server is told to stop.
    """

    def __init__(
        self,
        config: uvicorn.Config,
        services: Services,
        *,
        new_token: str | None = None,
        on_stop: Callable[[], None] = lambda: None,
    ) -> None:
        super().__init__(config)
        self._on_stop = on_stop
        self._services = services
        self._new_token = new_token
        self._loop = asyncio.get_running_loop()
        self._told_to_stop = False

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        address = _url(*self.servers[0].sockets[0].getsockname()[:2])
        lines = [f"Toolcrib {__version__} listens on {address}"]
        if self._new_token is not None:
            lines += [
                "This is the first start, so an API key was made. It is shown this once:",
                f"  {self._new_token}",
                f"Open {address}/docs#key={self._new_token}",
            ]
        sys.stdout.write("\n".join(lines) + "\n")
        sys.stdout.flush()

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:  # noqa: ARG002 - a signal handler
        self._services.readiness.draining = True
        if self._told_to_stop:
            self._loop.call_soon_threadsafe(self._services.batches.abort)
            return
        self._told_to_stop = True
        self._on_stop()

    async def on_tick(self, counter: int) -> bool:
        if not self._told_to_stop:
            return await super().on_tick(counter)
        _log.info("draining", grace_seconds=GRACE_SECONDS)
        try:
            async with asyncio.timeout(DRAIN_SECONDS):
                await self._services.batches.drain(GRACE_SECONDS)
        except TimeoutError:
            _log.warning("batches_left_unfinished", seconds=DRAIN_SECONDS)
        # What is still open now is cut: sse-starlette sees this flag, uvicorn closes the rest.
        self.should_exit = True
        return True


class MetricsServer(uvicorn.Server):
    """Serves `GET /metrics` without a key on a port of its own; signals are the business of `Server`."""

    def __init__(self, metrics: Metrics) -> None:
        super().__init__(
            uvicorn.Config(
                _metrics_app(metrics),
                lifespan="off",
                ws="none",
                log_config=None,
                access_log=False,
                server_header=False,
                proxy_headers=False,
                timeout_graceful_shutdown=CLOSE_SECONDS,
            )
        )

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def _metrics_app(metrics: Metrics) -> ASGIApp:
    async def answer(scope: Scope, _receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        found = scope["path"] == "/metrics" and scope["method"] in {"GET", "HEAD"}
        body = await metrics.scrape() if found else b"only GET /metrics is here\n"
        headers = [
            (b"content-type", (CONTENT_TYPE if found else "text/plain").encode()),
            (b"content-length", str(len(body)).encode()),
            (b"x-content-type-options", b"nosniff"),
        ]
        await send({"type": "http.response.start", "status": 200 if found else 404, "headers": headers})
        await send({"type": "http.response.body", "body": b"" if scope["method"] == "HEAD" else body})

    return answer


@asynccontextmanager
async def serving_metrics(settings: Settings, metrics: Metrics) -> AsyncIterator[str | None]:
    """Serve metrics on their own port while the context is open and give its URL; None when there is no such port.

    Raises:
        ConfigurationError: the port cannot be had.
    """
    if settings.metrics_port is None:
        yield None
        return
    with _bind(settings.metrics_host, settings.metrics_port, "metrics_") as listener:
        server = MetricsServer(metrics)
        url = f"{_url(*listener.getsockname()[:2])}/metrics"
        async with asyncio.TaskGroup() as group:
            group.create_task(server.serve(sockets=[listener]))
            try:
                _log.info("serving_metrics", url=url)
                yield url
            finally:
                server.should_exit = True


def _serve(settings: Settings) -> int:
    """Serve until told to stop; return the exit status, 1 when the service had to give up."""
    keep_others_out()
    with _bind(settings.host, settings.port) as listener:
        app = create_app(settings, address=_address(listener))
        config = uvicorn.Config(
            app,
            lifespan="off",
            ws="none",
            log_config=None,
            access_log=False,
            server_header=False,
            proxy_headers=False,
            timeout_keep_alive=KEEP_ALIVE_SECONDS,
            timeout_graceful_shutdown=CLOSE_SECONDS,
        )
        with asyncio.Runner(loop_factory=config.get_loop_factory()) as runner:
            runner.run(_serve_until_stopped(settings, app, config, listener))
    services: Services = app.state.services
    return 1 if services.readiness.broken else 0


async def _serve_until_stopped(
    settings: Settings, app: FastAPI, config: uvicorn.Config, listener: socket.socket
) -> None:
    # The lifespan is entered here and not by uvicorn, so that a refused start is one sentence and no traceback.
    async with app.router.lifespan_context(app):
        services: Services = app.state.services
        token = await _first_key(services)
        server = Server(config, services, new_token=token, on_stop=_exit_in_time)
        async with serving_metrics(settings, services.metrics):
            await server.serve(sockets=[listener])
    _log.info("stopped")


def _exit_in_time() -> None:
    """End the process when it has not ended by itself: a thread that hangs in the kernel would keep it for ever.

    What is stored by then stays stored; the rest is recovered at the next start.
    """
    timer = threading.Timer(EXIT_SECONDS, os._exit, (1,))
    timer.daemon = True
    timer.start()


async def _first_key(services: Services) -> str | None:
    """Make a key when there is none and return its token."""
    if await services.keys.any():
        return None
    _, token = await services.keys.create(KeyRequest("first start"), by=SERVICE)
    return token


def _url(host: str, port: int) -> str:
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def _address(listener: socket.socket) -> str:
    """Return where other processes reach what listens here, as far as this machine can tell."""
    host, port = listener.getsockname()[:2]
    return _url(socket.gethostname() if host in {"0.0.0.0", "::"} else host, port)  # noqa: S104 - compared, not bound


def _say(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


def _bind(host: str, port: int, prefix: str = "") -> socket.socket:
    listener: socket.socket | None = None
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        # With its protocol named, so that the event loop knows TCP when it sees it and turns Nagle's algorithm off.
        listener = socket.socket(family, kind, protocol)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        for level, option, value in _NOTICE_LOST_CLIENTS:
            listener.setsockopt(level, option, value)
        listener.bind(address)
    except OSError as error:
        if listener is not None:
            listener.close()
        raise ConfigurationError(
            f"cannot listen on {variable(prefix + 'host')} {host}, {variable(prefix + 'port')} {port}: "
            f"{error.strerror or error}."
        ) from None
    return listener


if __name__ == "__main__":
    sys.exit(main())
