"""The system calls a confined command may not make, as a filter the kernel runs (seccomp, classic BPF).

Everything is allowed but a list: what makes namespaces and mounts, looks into or steers other processes, goes around
this filter (io_uring), loads code into the kernel, sets the clock, or opens kinds of sockets that no namespace holds.
The list is deny-by-name on purpose: compilers, runtimes and databases keep working, and what is not on it is held by
the namespaces or by Landlock.
"""

import errno
import platform
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

_INSTRUCTION: Final = struct.Struct("=HBBI")
_LOAD: Final = 0x20  # BPF_LD | BPF_W | BPF_ABS
_EQUAL: Final = 0x15  # BPF_JMP | BPF_JEQ | BPF_K
_AT_LEAST: Final = 0x35  # BPF_JMP | BPF_JGE | BPF_K
_ANY_BIT: Final = 0x45  # BPF_JMP | BPF_JSET | BPF_K
_RETURN: Final = 0x06  # BPF_RET | BPF_K

_ALLOW: Final = 0x7FFF_0000
_ERRNO: Final = 0x0005_0000

# struct seccomp_data: the number, the architecture, the instruction pointer, six arguments of eight bytes each. Both
# architectures are little-endian, so the low half of an argument comes first.
_NUMBER: Final = 0
_ARCHITECTURE: Final = 4
_ARGUMENTS: Final = 16

_X32: Final = 0x4000_0000
_NEW_NAMESPACES: Final = 0x7E02_0080  # CLONE_NEWTIME, NEWNS, NEWCGROUP, NEWUTS, NEWIPC, NEWUSER, NEWPID, NEWNET
_TIOCSTI: Final = 0x5412
_TIOCLINUX: Final = 0x541C
_AF_UNIX: Final = 1
_NETWORK: Final = (2, 10, 16)
"""AF_INET, AF_INET6 and AF_NETLINK. Others, AF_VSOCK and AF_ALG for two, no network namespace holds."""


@dataclass(frozen=True, slots=True)
class _Machine:
    audit: int
    has_x32: bool
    numbers: Mapping[str, int]


_GENERIC: Final = {
    # numbered alike on every architecture since 2019
    "io_uring_setup": 425, "io_uring_enter": 426, "io_uring_register": 427,
    "open_tree": 428, "move_mount": 429, "fsopen": 430, "fsconfig": 431, "fsmount": 432, "fspick": 433,
    "clone3": 435, "pidfd_getfd": 438, "process_madvise": 440, "mount_setattr": 442, "quotactl_fd": 443,
}  # fmt: skip
_MACHINES: Final = {
    "x86_64": _Machine(
        audit=0xC000_003E,
        has_x32=True,
        numbers={
            **_GENERIC,
            "ioctl": 16, "shmget": 29, "socket": 41, "socketpair": 53, "clone": 56, "semget": 64, "msgget": 68,
            "ptrace": 101, "syslog": 103, "setpriority": 141, "vhangup": 153, "pivot_root": 155, "_sysctl": 156,
            "adjtimex": 159, "acct": 163, "settimeofday": 164, "mount": 165, "umount2": 166, "swapon": 167,
            "swapoff": 168, "reboot": 169, "sethostname": 170, "setdomainname": 171, "iopl": 172, "ioperm": 173,
            "init_module": 175, "delete_module": 176, "quotactl": 179, "nfsservctl": 180, "lookup_dcookie": 212,
            "clock_settime": 227, "mq_open": 240, "kexec_load": 246, "add_key": 248, "request_key": 249, "keyctl": 250,
            "migrate_pages": 256, "unshare": 272, "move_pages": 279, "perf_event_open": 298, "fanotify_init": 300,
            "prlimit64": 302, "name_to_handle_at": 303, "open_by_handle_at": 304, "clock_adjtime": 305, "setns": 308,
            "process_vm_readv": 310, "process_vm_writev": 311, "kcmp": 312, "finit_module": 313,
            "kexec_file_load": 320, "bpf": 321, "userfaultfd": 323,
        },
    ),
    "aarch64": _Machine(
        audit=0xC000_00B7,
        has_x32=False,
        numbers={
            **_GENERIC,
            "lookup_dcookie": 18, "ioctl": 29, "umount2": 39, "mount": 40, "pivot_root": 41, "nfsservctl": 42,
            "vhangup": 58, "quotactl": 60, "acct": 89, "unshare": 97, "kexec_load": 104, "init_module": 105,
            "delete_module": 106, "clock_settime": 112, "syslog": 116, "ptrace": 117, "setpriority": 140,
            "reboot": 142, "sethostname": 161, "setdomainname": 162, "settimeofday": 170, "adjtimex": 171,
            "mq_open": 180, "msgget": 186, "semget": 190, "shmget": 194, "socket": 198, "socketpair": 199,
            "add_key": 217, "request_key": 218, "keyctl": 219, "clone": 220, "swapon": 224, "swapoff": 225,
            "migrate_pages": 238, "move_pages": 239, "perf_event_open": 241, "prlimit64": 261, "fanotify_init": 262,
            "name_to_handle_at": 264, "open_by_handle_at": 265, "clock_adjtime": 266, "setns": 268,
            "process_vm_readv": 270, "process_vm_writev": 271, "kcmp": 272, "finit_module": 273, "bpf": 280,
            "userfaultfd": 282, "kexec_file_load": 294,
        },
    ),
}  # fmt: skip

# Who is told that a call does not exist falls back to an older one: the C library from clone3 to clone, whose flags can
# be looked at, and runtimes from io_uring to system calls that this filter sees.
_ABSENT: Final = ("clone3", "io_uring_setup", "io_uring_enter", "io_uring_register")
_DENIED: Final = (
    # namespaces and mounts
    "unshare", "setns", "mount", "umount2", "pivot_root", "open_tree", "move_mount", "fsopen", "fsconfig", "fsmount",
    "fspick", "mount_setattr", "name_to_handle_at", "open_by_handle_at", "quotactl", "quotactl_fd", "swapon", "swapoff",
    # other processes
    "ptrace", "process_vm_readv", "process_vm_writev", "process_madvise", "pidfd_getfd", "kcmp", "move_pages",
    "migrate_pages",
    # the kernel
    "bpf", "perf_event_open", "userfaultfd", "init_module", "finit_module", "delete_module", "kexec_load",
    "kexec_file_load", "iopl", "ioperm", "syslog", "_sysctl", "fanotify_init", "lookup_dcookie", "nfsservctl",
    # key rings belong to a user and to no namespace
    "add_key", "request_key", "keyctl",
    # the machine
    "reboot", "acct", "settimeofday", "clock_settime", "clock_adjtime", "adjtimex", "sethostname", "setdomainname",
    "vhangup",
)  # fmt: skip
_SHARED_IPC: Final = ("shmget", "semget", "msgget", "mq_open")


def supported(machine: str | None = None) -> bool:
    """Whether there is a filter for this machine's architecture."""
    return (machine or platform.machine()) in _MACHINES


def filter_program(*, own_namespaces: bool, host_network: bool = False, machine: str | None = None) -> bytes:
    """Return the filter as the kernel takes it: an array of `struct sock_filter`.

    With namespaces of its own a command may use the network it has there. With the machine's network it may use that,
    and no Unix socket but a pair of its own: those of the machine's services with abstract names belong to its network.
    Without either there is no socket but such a pair. Without namespaces there is no System V or POSIX message queue,
    semaphore or shared memory, which every process of the machine shares, and no limit or priority of another process
    can be set.

    Raises:
        LookupError: there is none for the architecture.
    """
    target = _MACHINES[machine or platform.machine()]
    code = [
        (_LOAD, 0, 0, _ARCHITECTURE),
        (_EQUAL, 1, 0, target.audit),
        _refuse(errno.ENOSYS),
        (_LOAD, 0, 0, _NUMBER),
    ]
    if target.has_x32:
        code += [(_AT_LEAST, 0, 1, _X32), _refuse(errno.ENOSYS)]
    denied = _DENIED if own_namespaces else (*_DENIED, *_SHARED_IPC)
    for names, number in ((_ABSENT, errno.ENOSYS), (denied, errno.EPERM)):
        for name in names:
            if name in target.numbers:
                code += _when(target.numbers[name], [_refuse(number)])
    code += _when(target.numbers["clone"], [_argument(0), (_ANY_BIT, 0, 1, _NEW_NAMESPACES), _refuse(errno.EPERM)])
    code += _when(
        target.numbers["ioctl"],
        [_argument(1), (_EQUAL, 1, 0, _TIOCSTI), (_EQUAL, 0, 1, _TIOCLINUX), _refuse(errno.EPERM)],
    )
    if host_network:
        code += _when(target.numbers["socket"], _only(0, _NETWORK, errno.EAFNOSUPPORT))
    elif own_namespaces:
        code += _when(target.numbers["socket"], _only(0, (_AF_UNIX, *_NETWORK), errno.EAFNOSUPPORT))
    else:
        code += _when(target.numbers["socket"], [_refuse(errno.EPERM)])
    if not own_namespaces:
        code += _when(target.numbers["socketpair"], _only(0, (_AF_UNIX,), errno.EAFNOSUPPORT))
        code += _when(target.numbers["prlimit64"], _only(0, (0,), errno.EPERM))
        code += _when(target.numbers["setpriority"], _only(1, (0,), errno.EPERM))
    code.append((_RETURN, 0, 0, _ALLOW))
    return b"".join(_INSTRUCTION.pack(*instruction) for instruction in code)


_Instruction = tuple[int, int, int, int]


def _refuse(number: int) -> _Instruction:
    return (_RETURN, 0, 0, _ERRNO | number)


def _argument(index: int) -> _Instruction:
    return (_LOAD, 0, 0, _ARGUMENTS + 8 * index)


def _when(number: int, block: Sequence[_Instruction]) -> list[_Instruction]:
    """Return a block for one system call. What it does not refuse is allowed, as the number is no longer loaded."""
    whole = list(block)
    if whole[0][0] == _LOAD:
        whole.append((_RETURN, 0, 0, _ALLOW))
    return [(_EQUAL, 0, len(whole), number), *whole]


def _only(index: int, values: Sequence[int], number: int) -> list[_Instruction]:
    """Return a block that refuses a call unless an argument has one of these values."""
    tests = [(_EQUAL, len(values) - position, 0, value) for position, value in enumerate(values)]
    return [_argument(index), *tests, _refuse(number)]
