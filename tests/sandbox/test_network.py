"""The network of the machine: reached by the commands that are given it, in every tier that can keep it from others."""

import contextlib
import dataclasses
import json
import os
import socket
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from app.domain.abort import AbortSignal
from app.sandbox.base import ProcessSpec
from app.sandbox.confinement import name_service_files
from app.sandbox.local import LocalSandbox
from app.sandbox.process import run_command
from tests.support.sandbox_tiers import in_tiers_that_hold

pytestmark = pytest.mark.anyio

PROGRAM = """
import json, socket, sys
port, path, name = int(sys.argv[1]), sys.argv[2], sys.argv[3]
def tries(work):
    try: work(); return True
    except OSError: return False
def tcp(): socket.create_connection(("127.0.0.1", port), 5).close()
def udp():
    s = socket.socket(type=socket.SOCK_DGRAM); s.sendto(b"x", ("127.0.0.1", port))
def unix(address):
    s = socket.socket(socket.AF_UNIX); s.connect(address)
def lookup(): socket.getaddrinfo("localhost", 80)
def pair(): socket.socketpair()
def listen():
    s = socket.socket(); s.bind(("127.0.0.1", 0)); s.listen()
    socket.create_connection(s.getsockname(), 5).close()
def raw(): socket.socket(socket.AF_PACKET, socket.SOCK_RAW)
print(json.dumps({
    "tcp": tries(tcp), "udp": tries(udp), "unix": tries(lambda: unix(path)), "abstract": tries(lambda: unix("\\0" + name)),
    "lookup": tries(lookup), "pair": tries(pair), "listen": tries(listen), "raw": tries(raw),
}))
"""


@contextlib.contextmanager
def outside(directory: Path) -> Iterator[tuple[list[str], socket.socket]]:
    """Make listeners of the machine; give the arguments that name them and the one for TCP."""
    name = f"toolcrib-{os.urandom(8).hex()}"
    with contextlib.ExitStack() as stack:
        tcp = stack.enter_context(socket.socket())
        udp = stack.enter_context(socket.socket(type=socket.SOCK_DGRAM))
        unix, abstract = (stack.enter_context(socket.socket(socket.AF_UNIX)) for _ in range(2))
        tcp.bind(("127.0.0.1", 0))
        with contextlib.suppress(OSError):  # somebody else may have the port; nothing hangs on who receives
            udp.bind(tcp.getsockname())
        unix.bind(str(directory / "socket"))
        abstract.bind("\0" + name)
        for listener in (tcp, unix, abstract):
            listener.listen()
        tcp.settimeout(0.5)
        yield [str(tcp.getsockname()[1]), str(directory / "socket"), name], tcp


async def tried(sandbox: LocalSandbox, spec: ProcessSpec, *, host_network: bool) -> dict[str, bool]:
    said = bytearray()
    outcome = await run_command(
        sandbox,
        dataclasses.replace(spec, host_network=host_network),
        signal=AbortSignal(),
        timeout_ms=30_000,
        on_output=lambda _stream, data: said.extend(data),
    )
    assert outcome.exit_code == 0, said
    result: dict[str, bool] = json.loads(said)
    return result


@in_tiers_that_hold
async def test_a_command_reaches_the_machines_network_only_when_it_is_given_it(
    sandbox: LocalSandbox, spec: Callable[[list[str]], ProcessSpec], tmp_path: Path
) -> None:
    place = tmp_path.parent / f"{tmp_path.name}-outside"
    place.mkdir()
    held = sandbox.report.tier == "namespace"
    with outside(place) as (names, listener):
        command = spec([sys.executable, "-I", "-S", "-c", PROGRAM, *names])
        without = await tried(sandbox, command, host_network=False)
        with pytest.raises(TimeoutError):
            listener.accept()
        given = await tried(sandbox, command, host_network=True)
        listener.accept()[0].close()
    # Without, tier namespace has a loopback of its own; with it, the machine's Unix sockets stay closed in both.
    assert without == {
        "tcp": False,
        "udp": held,
        "unix": False,
        "abstract": False,
        "lookup": True,
        "pair": True,
        "listen": held,
        "raw": False,
    }
    assert given == {
        "tcp": True,
        "udp": True,
        "unix": False,
        "abstract": False,
        "lookup": True,
        "pair": True,
        "listen": True,
        "raw": False,
    }


@in_tiers_that_hold
async def test_with_a_network_a_command_can_read_how_names_are_resolved(
    sandbox: LocalSandbox, spec: Callable[[str], ProcessSpec], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    said = bytearray()
    elsewhere = tmp_path.parent / f"{tmp_path.name}-resolv.conf"
    elsewhere.write_text("nameserver 192.0.2.1\n")
    monkeypatch.setattr("os.path.realpath", lambda _path: str(elsewhere))
    assert name_service_files() == (str(elsewhere),)
    await run_command(
        sandbox,
        dataclasses.replace(spec(f"cat {elsewhere}"), host_network=True),
        signal=AbortSignal(),
        timeout_ms=30_000,
        on_output=lambda _stream, data: said.extend(data),
    )
    assert said == b"nameserver 192.0.2.1\n"
