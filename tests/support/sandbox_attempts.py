"""What a command tries that a sandbox may hold back. Run as a command: `python sandbox_attempts.py FACTS`.

FACTS is JSON about the outside: `canary` (a file of this user), `removable` (another), `port` (TCP), `datagram` (UDP),
`socket` (a path), `abstract` (a name), `pid` and `marker` (a process and a word in its arguments), `secret` (a word in
its environment). Prints a JSON object of attempt → whether it succeeded; what only the outside can see is left to it.
"""

# ruff: noqa: PTH116, PTH102, PTH108, PTH101, PTH123, PTH211, T201 - a script on the standard library, about system calls

import ctypes
import json
import os
import platform
import resource
import socket
import sys
from collections.abc import Callable
from typing import Any

libc = ctypes.CDLL(None, use_errno=True)
NUMBERS = {"x86_64": {"add_key": 248, "shmget": 29}, "aarch64": {"add_key": 217, "shmget": 194}}[platform.machine()]


def check(result: int) -> None:
    if result < 0:
        raise OSError(ctypes.get_errno(), "refused")


def read_file(facts: dict[str, Any]) -> None:
    with open(facts["canary"], "rb") as file:
        file.read()


def read_through_link(facts: dict[str, Any]) -> None:
    os.symlink(facts["canary"], "a-link")
    with open("a-link", "rb") as file:
        file.read()


def link_file(facts: dict[str, Any]) -> None:
    os.link(facts["canary"], "a-hard-link")


def write_file(facts: dict[str, Any]) -> None:
    with open(facts["canary"], "r+b") as file:
        file.write(b"changed")


def truncate_file(facts: dict[str, Any]) -> None:
    os.truncate(facts["canary"], 1)


def remove_file(facts: dict[str, Any]) -> None:
    os.unlink(facts["removable"])


def look_at_metadata(facts: dict[str, Any]) -> None:
    os.stat(facts["canary"])


def change_metadata(facts: dict[str, Any]) -> None:
    os.chmod(facts["canary"], 0o640)


def connect_tcp(facts: dict[str, Any]) -> None:
    socket.create_connection(("127.0.0.1", facts["port"]), 2).close()


def send_udp(facts: dict[str, Any]) -> None:
    with socket.socket(type=socket.SOCK_DGRAM) as sender:
        sender.sendto(b"hello", ("127.0.0.1", facts["datagram"]))


def connect_unix(facts: dict[str, Any]) -> None:
    with socket.socket(socket.AF_UNIX) as client:
        client.connect(facts["socket"])


def connect_abstract(facts: dict[str, Any]) -> None:
    with socket.socket(socket.AF_UNIX) as client:
        client.connect("\0" + facts["abstract"])


def signal_process(facts: dict[str, Any]) -> None:
    os.kill(facts["pid"], 0)


def see_process(facts: dict[str, Any]) -> None:
    with open(f"/proc/{facts['pid']}/cmdline") as file:
        if facts["marker"] not in file.read():
            raise OSError


def read_environment(facts: dict[str, Any]) -> None:
    with open(f"/proc/{facts['pid']}/environ") as file:
        if facts["secret"] not in file.read():
            raise OSError


def limit_process(facts: dict[str, Any]) -> None:
    resource.prlimit(facts["pid"], resource.RLIMIT_CORE, (0, 0))


def trace_process(facts: dict[str, Any]) -> None:
    check(libc.ptrace(0x4206, facts["pid"], None, None))  # PTRACE_SEIZE; detached when this process ends


def share_memory(_facts: dict[str, Any]) -> None:
    check(libc.syscall(NUMBERS["shmget"], 0, 4096, 0o1600))


def make_namespace(_facts: dict[str, Any]) -> None:
    check(libc.unshare(0x1000_0000))


def mount(_facts: dict[str, Any]) -> None:
    os.mkdir("mounted")
    check(libc.mount(b"none", b"mounted", b"tmpfs", 0, None))
    check(libc.umount2(b"mounted", 0))


def set_kernel(_facts: dict[str, Any]) -> None:
    os.close(os.open("/proc/sys/kernel/core_pattern", os.O_WRONLY))


def use_io_uring(_facts: dict[str, Any]) -> None:
    check(libc.syscall(425, 1, ctypes.create_string_buffer(120)))


def use_key_ring(_facts: dict[str, Any]) -> None:
    check(libc.syscall(NUMBERS["add_key"], b"user", b"toolcrib", b"x", 1, -2))


def gain_privileges(_facts: dict[str, Any]) -> None:
    with open("/proc/self/status") as file:
        if "NoNewPrivs:\t1" in file.read():
            raise OSError


ATTEMPTS: dict[str, Callable[[dict[str, Any]], None]] = {
    "Look at the metadata of a file outside": look_at_metadata,
    "Change the mode of a file outside": change_metadata,
    "Read a file outside": read_file,
    "Read it through a symbolic link in the workspace": read_through_link,
    "Make a hard link to it": link_file,
    "Change a file outside": write_file,
    "Truncate a file outside": truncate_file,
    "Remove a file outside": remove_file,
    "Connect to a TCP port of the machine": connect_tcp,
    "Send a UDP datagram to the machine": send_udp,
    "Connect to a Unix socket outside": connect_unix,
    "Connect to an abstract Unix socket": connect_abstract,
    "See the command line of another process": see_process,
    "Signal another process": signal_process,
    "Read the environment of another process": read_environment,
    "Trace another process": trace_process,
    "Set a limit of another process": limit_process,
    "Share System V memory with the machine": share_memory,
    "Make a user namespace": make_namespace,
    "Mount a file system": mount,
    "Open a kernel setting for writing": set_kernel,
    "Use io_uring": use_io_uring,
    "Use the key ring of the user": use_key_ring,
    "Gain privileges by a setuid program": gain_privileges,
}


def main() -> None:
    facts = json.loads(sys.argv[1])
    results = {}
    for name, attempt in ATTEMPTS.items():
        # In a process each, as some of them change the process that makes them.
        child = os.fork()
        if child == 0:
            try:
                attempt(facts)
            except (OSError, ValueError):
                os._exit(1)
            os._exit(0)
        _, status = os.waitpid(child, 0)
        results[name] = status == 0
    print(json.dumps(results))


if __name__ == "__main__":
    main()
