"""A command whose descendants do everything there is to outlive it.

    python awkward_descendants.py MARK KIND… -- exit | sleep

`MARK` is in the argument list of every process, so that a test can find the living. Each kind makes a file `KIND.up` in
the current directory once it is what its name says. Then the command's own process exits with 0, or sleeps.
"""

# ruff: noqa: PTH110, PTH123, T201 - a script that has to be up in a moment

import ctypes
import os
import resource
import signal
import sys
import threading
import time
from collections.abc import Callable

MARK = sys.argv[1] if len(sys.argv) > 1 else ""  # a test that imports this has other arguments
LIFETIME = 300.0


def up(kind: str) -> None:
    with open(f"{kind}.up", "w", encoding="ascii") as file:
        file.write(str(os.getpid()))


def stay() -> None:
    until = time.monotonic() + LIFETIME
    while time.monotonic() < until:
        time.sleep(1)
    os._exit(0)


def prctl(option: int, value: int) -> None:
    if ctypes.CDLL(None).prctl(option, value, 0, 0, 0) != 0:
        os._exit(9)


def daemonize() -> None:
    """Go on as an orphan in a session of its own; the caller's process goes on as the caller."""
    os.setsid()
    if os.fork():
        os._exit(0)


def ignores_term() -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    up("ignores_term")
    stay()


def holds_the_pipe() -> None:
    daemonize()
    up("holds_the_pipe")
    stay()


def closed_descriptors() -> None:
    daemonize()
    os.closerange(0, 3)
    up("closed_descriptors")
    stay()


def empty_environment() -> None:
    daemonize()
    up("empty_environment")
    os.execve(sys.executable, [sys.executable, "-I", "-S", "-c", f"import time; time.sleep({LIFETIME})", MARK], {})


def own_subreaper() -> None:
    os.setsid()
    prctl(36, 1)
    if os.fork() == 0:
        daemonize()
        up("own_subreaper")
    stay()


def stopped() -> None:
    os.setsid()
    up("stopped")
    os.kill(os.getpid(), signal.SIGSTOP)
    stay()


def not_dumpable() -> None:
    daemonize()
    prctl(4, 0)
    up("not_dumpable")
    stay()


def without_its_tag() -> None:
    daemonize()
    for limit in (resource.RLIMIT_RTTIME, resource.RLIMIT_MSGQUEUE):
        hard = resource.getrlimit(limit)[1]
        resource.setrlimit(limit, (hard, hard))
    up("without_its_tag")
    stay()


def without_its_main_thread() -> None:
    daemonize()
    threading.Thread(target=stay).start()
    up("without_its_main_thread")
    ctypes.CDLL(None).pthread_exit(None)


def forks_and_exits() -> None:
    os.setsid()
    up("forks_and_exits")
    until = time.monotonic() + LIFETIME
    while time.monotonic() < until:
        if os.fork():
            os._exit(0)


KINDS: dict[str, Callable[[], None]] = {
    kind.__name__: kind
    for kind in (
        ignores_term,
        holds_the_pipe,
        closed_descriptors,
        empty_environment,
        own_subreaper,
        stopped,
        not_dumpable,
        without_its_tag,
        without_its_main_thread,
        forks_and_exits,
    )
}


def main() -> None:
    *kinds, _, then = sys.argv[2:]
    print("begun", flush=True)
    for kind in kinds:
        if os.fork() == 0:
            KINDS[kind]()
            os._exit(8)
    while not all(os.path.exists(f"{kind}.up") for kind in kinds):
        time.sleep(0.005)
    print("all up", flush=True)
    if then == "sleep":
        time.sleep(LIFETIME)


if __name__ == "__main__":
    main()
