"""What tests let a decoder's process do."""

import contextlib
import ctypes
import os
import socket
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

from app.errors import ErrorCode, ToolError


def prepare() -> None:
    "localhost".encode("idna")  # what sockets load later


def decode(data: bytes, what: str, **more: Any) -> Any:
    match what:
        case "echo":
            return {"data": data.decode(), "text": more["text"]}
        case "large":
            return "x" * 5_000_000
        case "refuse":
            raise ToolError(ErrorCode.UNSUPPORTED, "no", {"pages": 1})
        case "crash":
            ctypes.string_at(0)
        case "leave":
            os._exit(3)
        case "silent":
            os._exit(0)
        case "hang":
            while True:
                pass
        case "memory":
            return len(b"x" * 1_000_000_000)
        case "try":
            return _try(**more)
    raise AssertionError(what)


def _try(paths: list[str], place: str, port: int, parent: int) -> dict[str, Any]:
    return {
        "read": [_can(_read, path) for path in paths],
        "write": _can(_write, place),
        "run": _can(subprocess.run, ["/bin/true"], check=True),
        "connect": _can(socket.create_connection, ("127.0.0.1", port), timeout=5),
        "signal": _can(os.kill, parent, 0),
        "environment": [name for name in os.environ if name != "LC_CTYPE"],
        "root": os.geteuid() == 0,
        "descriptors": [fd for fd in range(64) if _can(os.fstat, fd)],
    }


def _can(action: Callable[..., Any], *arguments: Any, **named: Any) -> bool:
    with contextlib.suppress(OSError):
        action(*arguments, **named)
        return True
    return False


def _read(path: str) -> None:
    Path(path).read_bytes()


def _write(place: str) -> None:
    Path(place, "made").write_text("x")
