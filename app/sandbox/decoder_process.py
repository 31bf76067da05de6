"""The process a `Decoder` starts: it loads one module, gives up its rights, and answers once.

Rights it gives up for good: its user when that is root, every capability, files (Landlock), sockets and what else the
seccomp filter of tier `landlock` refuses, new files of any size, more memory and CPU time than it was given. Where the
kernel has no Landlock, or the machine no filter, the rest still holds.
"""

import ctypes
import importlib
import os
import resource
import signal
import sys
from typing import Any, Final, Protocol, cast

import orjson

from app.errors import ErrorCode, ToolError
from app.sandbox import landlock, seccomp
from app.sandbox.confinement import data_descriptor
from app.sandbox.warden import restrict_thread

NOBODY: Final = 65534
REQUEST_MAX_BYTES: Final = 1 << 16
_PR_SET_PDEATHSIG: Final = 1
_PR_SET_DUMPABLE: Final = 4


class DecoderModule(Protocol):
    """What a module offers that a `Decoder` runs."""

    def prepare(self) -> None:
        """Load what `decode` needs: afterwards no file can be opened."""
        ...

    def decode(self, data: bytes, **arguments: Any) -> Any:
        """Return JSON, or raise ToolError."""
        ...


def main(request: int) -> None:
    """Read the request from a descriptor, decode standard input and write the answer to standard output."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.prctl(_PR_SET_PDEATHSIG, ctypes.c_ulong(signal.SIGKILL))
    libc.prctl(_PR_SET_DUMPABLE, ctypes.c_ulong(0))
    asked = orjson.loads(os.read(request, REQUEST_MAX_BYTES))
    os.close(request)
    module = cast(DecoderModule, importlib.import_module(asked["module"]))
    module.prepare()
    _give_up_rights(asked["memoryBytes"], asked["seconds"])
    try:
        answer: dict[str, Any] = {"result": module.decode(sys.stdin.buffer.read(), **asked["arguments"])}
    except ToolError as error:
        answer = {"error": {"code": error.code.value, "message": error.message, "details": error.details}}
    except MemoryError:
        message = f"the file takes more than {asked['memoryBytes']} bytes of memory to decode; look into it with bash"
        answer = {"error": {"code": ErrorCode.LIMIT_EXCEEDED.value, "message": message, "details": {}}}
    sys.stdout.buffer.write(orjson.dumps(answer))
    sys.stdout.buffer.flush()


def _give_up_rights(memory_bytes: int, seconds: int) -> None:
    confinement: tuple[int, int] | None = None
    if landlock.abi() and seccomp.supported():
        confinement = (landlock.empty_ruleset(), data_descriptor(seccomp.filter_program(own_namespaces=False)))
    for limit, value in (
        (resource.RLIMIT_AS, memory_bytes),
        (resource.RLIMIT_CPU, seconds),
        (resource.RLIMIT_FSIZE, 0),
        (resource.RLIMIT_CORE, 0),
    ):
        resource.setrlimit(limit, (value, value))
    if os.geteuid() == 0:
        os.setgroups([])
        os.setresgid(NOBODY, NOBODY, NOBODY)
        os.setresuid(NOBODY, NOBODY, NOBODY)
    if confinement is not None:
        restrict_thread(*confinement)
        for fd in confinement:
            os.close(fd)
