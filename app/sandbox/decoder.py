"""Decoder: code that takes a caller's file apart runs in a process of its own, which may compute and nothing else.

Libraries that read PDF files and images are written in C and meet files that were made to break them. What breaks is
then one process that holds one file: it opens nothing, connects to nothing, starts nothing, is no part of the service
and ends with the call.
"""

import math
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final

import orjson

from app.errors import ErrorCode, ToolError
from app.sandbox.turns import Turns

AT_ONCE: Final = 2
DECODE_SECONDS: Final = 60.0
MEMORY_BYTES: Final = 2 * 1024**3
"""What one process may have mapped: an image of 64 million pixels takes some hundred million bytes."""

_ANSWER_MAX_BYTES: Final = 32 * 1024 * 1024
_LOOK_SECONDS: Final = 0.05
_READ_BYTES: Final = 1 << 20
_START: Final = (
    "import sys; sys.path[:] = sys.argv[2:]; from app.sandbox.decoder_process import main; main(int(sys.argv[1]))"
)


class Decoder:
    """Runs `decode` functions in processes of their own, at most `at_once` at a time.

    A module that has one is named, as it is imported there and not here. Its `prepare()` loads what is needed later;
    then the process gives up its rights, reads the file from its standard input and calls `decode(data, **arguments)`,
    whose answer is JSON.
    """

    def __init__(
        self, at_once: int = AT_ONCE, *, seconds: float = DECODE_SECONDS, memory_bytes: int = MEMORY_BYTES
    ) -> None:
        self._turns = Turns(at_once)
        self._seconds = seconds
        self._memory_bytes = memory_bytes
        # Processes are started by one thread that never ends: the kernel ends a process with the thread that asked to
        # be told of (PR_SET_PDEATHSIG), and a thread that calls this may have given up the right to start Python and to
        # end another user's process. It begins here, as a thread has the rights of the one that starts it.
        self._starter = ThreadPoolExecutor(1, thread_name_prefix="decoder-start")
        self._starter.submit(int)

    def decode(
        self, module: str, file: int, arguments: Mapping[str, Any], *, shown: str, check: Callable[[], None]
    ) -> Any:
        """Return what `decode` of a module makes of an open regular file; blocks.

        Args:
            module: its name, `app.tools.pdf_text` for one.
            file: a descriptor, read from its start on.
            arguments: JSON.
            shown: what the caller calls the file.
            check: called again and again; what it raises ends the process and is raised.

        Raises:
            ToolError: what `decode` raised; `unsupported` when the process died of the file; `limit_exceeded` when it
                took too long or too much memory, when others did, or when no process is to be had.
        """
        with self._turns.taken(f"{shown} was not read: other files are still being decoded; try again", check):
            answer = self._run({"module": module, "arguments": arguments}, file, shown, check)
        if "error" in answer:
            error = answer["error"]
            raise ToolError(ErrorCode(error["code"]), error["message"], error["details"])
        return answer["result"]

    def close(self) -> None:
        self._starter.shutdown(wait=False, cancel_futures=True)

    def _run(self, request: Mapping[str, Any], file: int, shown: str, check: Callable[[], None]) -> dict[str, Any]:
        os.lseek(file, 0, os.SEEK_SET)
        try:
            process = self._starter.submit(self._start, request, file).result()
        except OSError as error:
            raise ToolError(
                ErrorCode.LIMIT_EXCEEDED,
                f"{shown} was not read: no process could be started ({error.strerror}); try again",
            ) from None
        try:
            data = self._answer(process, shown, check)
        finally:
            self._starter.submit(process.kill).result()
            process.wait()
            if process.stdout is not None:
                process.stdout.close()
        if process.returncode == 0 and data:
            answer: dict[str, Any] = orjson.loads(data)
            return answer
        raise _died(shown, process.returncode)

    def _start(self, request: Mapping[str, Any], file: int) -> subprocess.Popen[bytes]:
        said, say = os.pipe2(os.O_CLOEXEC)
        try:
            limits = {"memoryBytes": self._memory_bytes, "seconds": math.ceil(self._seconds)}
            os.write(say, orjson.dumps({**request, **limits}))
            os.close(say)
            say = -1
            return subprocess.Popen(  # noqa: S603 - this Python, with our own code
                [sys.executable, "-I", "-S", "-c", _START, str(said), *sys.path],
                stdin=file,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                pass_fds=(said,),
                env={},
                cwd="/",
                start_new_session=True,
            )
        finally:
            os.close(said)
            if say >= 0:
                os.close(say)

    def _answer(self, process: subprocess.Popen[bytes], shown: str, check: Callable[[], None]) -> bytes:
        """Return what a process says until it is through; it has no more to say afterwards."""
        assert process.stdout is not None  # noqa: S101 - a pipe was asked for
        out = process.stdout.fileno()
        deadline = time.monotonic() + self._seconds
        answer = bytearray()
        while True:
            ready, _, _ = select.select([out], [], [], _LOOK_SECONDS)
            check()
            if ready:
                data = os.read(out, _READ_BYTES)
                if not data:
                    process.wait(max(0.1, deadline - time.monotonic()))
                    return bytes(answer)
                answer += data
            if time.monotonic() > deadline or len(answer) > _ANSWER_MAX_BYTES:
                raise ToolError(
                    ErrorCode.LIMIT_EXCEEDED,
                    f"{shown} was not read: it takes more than {self._seconds:g} s to decode; look into it with bash",
                )


def _died(shown: str, status: int) -> ToolError:
    how = f"exit code {status}"
    if status < 0:
        try:
            how = signal.Signals(-status).name
        except ValueError:
            how = f"signal {-status}"
    return ToolError(
        ErrorCode.UNSUPPORTED,
        f"{shown} was not read: the process that decodes it died of it ({how}). It is damaged, or made to do harm; get "
        "the file again, or look into it with bash",
    )
