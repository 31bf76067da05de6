"""What tests ask the process table."""

# ruff: noqa: PTH208 - /proc, where names are numbers

import asyncio
import os
import time
from collections.abc import Callable
from pathlib import Path


def living(mark: str) -> list[int]:
    """Return the processes that have `mark` in their argument list and are not dead."""
    needle = mark.encode()
    found = []
    for name in os.listdir("/proc"):
        if name.isdigit():
            try:
                if needle in Path(f"/proc/{name}/cmdline").read_bytes():
                    found.append(int(name))
            except (FileNotFoundError, ProcessLookupError):
                continue
    return found


def children(parent: int) -> dict[int, str]:
    """Return the children of a process with their states (`Z` is a zombie)."""
    found = {}
    for name in os.listdir("/proc"):
        if name.isdigit():
            try:
                raw = Path(f"/proc/{name}/stat").read_bytes()
            except (FileNotFoundError, ProcessLookupError):
                continue
            state, ppid = raw[raw.rindex(b")") + 2 :].split()[:2]
            if int(ppid) == parent:
                found[int(name)] = state.decode()
    return found


def eventually(condition: Callable[[], bool], seconds: float = 10.0) -> bool:
    """Wait until a condition holds; False when it does not in time."""
    until = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > until:
            return False
        time.sleep(0.01)
    return True


async def until(condition: Callable[[], bool], seconds: float = 10.0) -> None:
    """Wait until a condition holds, with the event loop going on; fail when it does not in time."""
    async with asyncio.timeout(seconds):
        while not condition():  # noqa: ASYNC110 - another process makes it true
            await asyncio.sleep(0.005)


def descriptors(pid: int | str = "self") -> set[int]:
    """Return the open descriptors of a process."""
    return {int(name) for name in os.listdir(f"/proc/{pid}/fd")} - _reading_them(pid)


def _reading_them(pid: int | str) -> set[int]:
    # The directory itself was open while it was listed; its number is free again now.
    if pid != "self":
        return set()
    free = os.open("/dev/null", os.O_RDONLY)
    os.close(free)
    return {free}
