"""Run a program as Docker's default does: its system call filter, and for root the capabilities it leaves.

    python docker_profile.py PROGRAM ARGUMENT…

The list is our own, of what matters to a sandbox. Docker's profile allows by name and refuses the rest; what it refuses
and is not listed here, no sandbox of ours asks for.
"""

import ctypes
import errno
import os
import platform
import struct
import sys

from app.sandbox import seccomp
from tests.support.without_kernel_sandboxes import install

REFUSED = (
    "unshare", "setns", "mount", "umount2", "pivot_root", "open_tree", "move_mount", "fsopen", "fsconfig", "fsmount",
    "fspick", "mount_setattr", "open_by_handle_at", "quotactl", "quotactl_fd", "swapon", "swapoff", "bpf",
    "perf_event_open", "fanotify_init", "userfaultfd", "add_key", "request_key", "keyctl", "pidfd_getfd", "kcmp",
    "process_madvise", "io_uring_setup", "io_uring_enter", "io_uring_register", "init_module", "finit_module",
    "delete_module", "kexec_load", "kexec_file_load", "iopl", "ioperm", "lookup_dcookie", "nfsservctl", "acct", "reboot",
    "settimeofday", "clock_settime", "sethostname", "setdomainname", "vhangup", "syslog", "move_pages", "migrate_pages",
)  # fmt: skip
# CHOWN, DAC_OVERRIDE, FOWNER, FSETID, KILL, SETGID, SETUID, SETPCAP, NET_BIND_SERVICE, NET_RAW, SYS_CHROOT, MKNOD,
# AUDIT_WRITE, SETFCAP
CAPABILITIES = (0, 1, 3, 4, 5, 6, 7, 8, 10, 13, 18, 27, 29, 31)
_LAST_CAPABILITY = 40
_DROP_FROM_BOUNDING_SET = 24
_CAPABILITY_VERSION = 0x2008_0522


def main() -> None:
    machine = seccomp._MACHINES[platform.machine()]
    code = [(seccomp._LOAD, 0, 0, seccomp._NUMBER)]
    for name in REFUSED:
        if name in machine.numbers:
            code += seccomp._when(machine.numbers[name], [seccomp._refuse(errno.EPERM)])
    code += seccomp._when(machine.numbers["clone3"], [seccomp._refuse(errno.ENOSYS)])
    flags = (seccomp._ANY_BIT, 0, 1, seccomp._NEW_NAMESPACES)
    code += seccomp._when(machine.numbers["clone"], [seccomp._argument(0), flags, seccomp._refuse(errno.EPERM)])
    code.append((seccomp._RETURN, 0, 0, seccomp._ALLOW))
    install(code)
    if os.geteuid() == 0:
        keep_capabilities()
    os.execvp(sys.argv[1], sys.argv[1:])


def keep_capabilities() -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    for number in range(_LAST_CAPABILITY + 1):
        if number not in CAPABILITIES:
            libc.prctl(_DROP_FROM_BOUNDING_SET, ctypes.c_ulong(number), 0, 0, 0)
    mask = sum(1 << number for number in CAPABILITIES)
    header = ctypes.create_string_buffer(struct.pack("=Ii", _CAPABILITY_VERSION, 0), 8)
    assert libc.capset(header, ctypes.create_string_buffer(struct.pack("=6I", mask, mask, 0, 0, 0, 0), 24)) == 0


if __name__ == "__main__":
    main()
