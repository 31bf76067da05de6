"""Run a program where neither Landlock nor namespaces are to be had, as in an old kernel or a strict container.

python without_kernel_sandboxes.py PROGRAM ARGUMENT…
"""

import ctypes
import errno
import os
import platform
import struct
import sys
from collections.abc import Sequence

from app.sandbox import seccomp
from app.sandbox.landlock import _CREATE_RULESET


def install(code: Sequence[tuple[int, int, int, int]]) -> None:
    """Put this process, and what it starts, under a system call filter for good."""
    program = b"".join(seccomp._INSTRUCTION.pack(*instruction) for instruction in code)
    held = ctypes.create_string_buffer(program, len(program))
    described = ctypes.create_string_buffer(struct.pack("@HP", len(code), ctypes.addressof(held)), 16)
    prctl = ctypes.CDLL(None, use_errno=True).prctl
    zero = ctypes.c_ulong(0)
    assert prctl(38, ctypes.c_ulong(1), zero, zero, zero) == 0
    assert prctl(22, ctypes.c_ulong(2), ctypes.c_ulong(ctypes.addressof(described)), zero, zero) == 0


def main() -> None:
    machine = seccomp._MACHINES[platform.machine()]
    code = [(seccomp._LOAD, 0, 0, seccomp._NUMBER)]
    code += seccomp._when(_CREATE_RULESET, [seccomp._refuse(errno.ENOSYS)])
    code += seccomp._when(machine.numbers["clone3"], [seccomp._refuse(errno.ENOSYS)])
    code += seccomp._when(machine.numbers["unshare"], [seccomp._refuse(errno.EPERM)])
    flags = (seccomp._ANY_BIT, 0, 1, seccomp._NEW_NAMESPACES)
    code += seccomp._when(machine.numbers["clone"], [seccomp._argument(0), flags, seccomp._refuse(errno.EPERM)])
    code.append((seccomp._RETURN, 0, 0, seccomp._ALLOW))
    install(code)
    os.execvp(sys.argv[1], sys.argv[1:])


if __name__ == "__main__":
    main()
