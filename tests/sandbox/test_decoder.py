"""Files are taken apart in a process that can do nothing else, and that may die of them."""

import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from app.errors import ErrorCode, ToolError
from app.sandbox import landlock, seccomp
from app.sandbox.decoder import Decoder
from tests.support.processes import children

HERE = __name__.rpartition(".")[0] + ".decoder_subject"


@pytest.fixture
def decoder() -> Iterator[Decoder]:
    made = Decoder()
    yield made
    made.close()


@pytest.fixture
def file(tmp_path: Path) -> Iterator[int]:
    path = tmp_path / "file"
    path.write_bytes(b"content")
    fd = os.open(path, os.O_RDONLY)
    yield fd
    os.close(fd)


def decode(decoder: Decoder, file: int, what: str, check: Callable[[], None] = lambda: None, **more: Any) -> Any:
    return decoder.decode(HERE, file, {"what": what, **more}, shown="it", check=check)


def refusal(decoder: Decoder, file: int, what: str, **more: Any) -> ToolError:
    with pytest.raises(ToolError) as caught:
        decode(decoder, file, what, **more)
    return caught.value


def test_the_answer_comes_back_and_the_whole_file_is_read_from_its_start(decoder: Decoder, file: int) -> None:
    os.lseek(file, 3, os.SEEK_SET)
    assert decode(decoder, file, "echo", text="ü\0") == {"data": "content", "text": "ü\0"}


def test_a_large_answer_comes_back_whole(decoder: Decoder, file: int) -> None:
    assert decode(decoder, file, "large") == "x" * 5_000_000


def test_what_is_refused_is_refused_here(decoder: Decoder, file: int) -> None:
    error = refusal(decoder, file, "refuse")
    assert (error.code, error.message, error.details) == (ErrorCode.UNSUPPORTED, "no", {"pages": 1})


@pytest.mark.parametrize(("what", "how"), [("crash", "SIGSEGV"), ("leave", "exit code 3"), ("silent", "exit code 0")])
def test_a_process_that_dies_of_the_file_fails_the_call_and_nothing_else(
    decoder: Decoder, file: int, what: str, how: str
) -> None:
    error = refusal(decoder, file, what)
    assert (error.code, how in error.message) == (ErrorCode.UNSUPPORTED, True), error.message
    assert decode(decoder, file, "echo", text="")["data"] == "content"


def test_one_that_takes_too_long_is_ended(file: int) -> None:
    # Long enough for it to begin on a machine that does much else.
    decoder, before = Decoder(seconds=4), children(os.getpid())
    error = refusal(decoder, file, "hang")
    assert (error.code, "4 s" in error.message) == (ErrorCode.LIMIT_EXCEEDED, True)
    assert children(os.getpid()).keys() <= before.keys()


def test_one_that_takes_too_much_memory_is_told_so(file: int) -> None:
    error = refusal(Decoder(memory_bytes=400_000_000), file, "memory")
    assert (error.code, "memory" in error.message) == (ErrorCode.LIMIT_EXCEEDED, True)


def test_a_stop_ends_the_process(decoder: Decoder, file: int) -> None:
    seen, before = [], children(os.getpid())

    def check() -> None:
        seen.append(1)
        if len(seen) > 3:
            raise InterruptedError

    started = time.monotonic()
    with pytest.raises(InterruptedError):
        decode(decoder, file, "hang", check)
    assert time.monotonic() - started < 20
    assert children(os.getpid()).keys() <= before.keys()


def test_one_that_waits_for_its_turn_can_be_stopped(file: int) -> None:
    decoder = Decoder(at_once=1)
    inside, leave = threading.Event(), threading.Event()

    def busy() -> None:
        inside.set()
        if leave.is_set():
            raise InterruptedError

    def first() -> None:
        with pytest.raises(InterruptedError):
            decode(decoder, file, "hang", busy)

    def stop() -> None:
        raise InterruptedError

    thread = threading.Thread(target=first)
    thread.start()
    try:
        assert inside.wait(20)
        with pytest.raises(InterruptedError):
            decode(decoder, file, "echo", stop, text="")
    finally:
        leave.set()
        thread.join(20)
    assert not thread.is_alive()


def test_the_process_can_do_nothing_but_compute(decoder: Decoder, file: int, tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text("secret")
    with socket.create_server(("127.0.0.1", 0)) as listener:
        tried = decode(
            decoder,
            file,
            "try",
            paths=[str(secret), "/etc/hostname", sys.executable],
            place=str(tmp_path),
            port=listener.getsockname()[1],
            parent=os.getpid(),
        )
    confined = bool(landlock.abi()) and seccomp.supported()
    assert confined, "this machine has neither; the test says nothing here"
    assert tried == {
        "read": [False, False, False],
        "write": False,
        "run": False,
        "connect": False,
        "signal": False,
        "environment": [],
        "root": False,
        "descriptors": [0, 1, 2],
    }
