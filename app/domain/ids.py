"""TypeIDs: a prefix and a UUIDv7 in Crockford base32, so that ids sort by the time they were made.

The format is that of the TypeID specification 0.3: `prefix_` and 26 characters of `0123456789abcdefghjkmnpqrstvwxyz`.
"""

import os
import re
import threading
import time
from typing import Final, Literal

Prefix = Literal["ws", "batch", "call", "key", "req", "audit", "node", "proc"]

_ALPHABET: Final = "0123456789abcdefghjkmnpqrstvwxyz"
_PAIRS: Final = tuple(a + b for a in _ALPHABET for b in _ALPHABET)
_BODY: Final = re.compile(r"[0-7][0-9a-hjkmnp-tv-z]{25}\Z")
_RANDOM_BYTES: Final = 4096
_lock = threading.Lock()
_last = 0
_random = b""


def new_id(prefix: Prefix) -> str:
    """Return a new id that sorts after every id this process made before."""
    return f"{prefix}_{_encode(_uuid7())}"


def is_id(value: str, prefix: Prefix) -> bool:
    """Whether `value` has the form of an id with this prefix."""
    head, _, body = value.partition("_")
    return head == prefix and _BODY.match(body) is not None


def first_id(prefix: Prefix, at: int) -> str:
    """Return what no id of this prefix made at `at` (milliseconds since the epoch) or later sorts before."""
    return f"{prefix}_{_encode(max(0, at) << 80)}"


def _uuid7() -> int:
    # RFC 9562 §5.7 with method 3 of §6.2: 12 bits of sub-millisecond time after the version, then 62 random bits.
    # One more than the last value when the clock did not move, so that order within a process is total.
    # Random bytes are drawn in blocks: a system call for each id costs more than all the rest.
    global _last, _random  # noqa: PLW0603 - the state of the generator, under its lock
    nanoseconds = time.time_ns()
    milliseconds, rest = divmod(nanoseconds, 1_000_000)
    stamp = (milliseconds << 12) | (rest * 4096 // 1_000_000)
    with _lock:
        stamp = max(stamp, _last + 1)
        _last = stamp
        if not _random:
            _random = os.urandom(_RANDOM_BYTES)
        drawn, _random = _random[:8], _random[8:]
    random = int.from_bytes(drawn) & ((1 << 62) - 1)
    return ((stamp >> 12) << 80) | (0x7 << 76) | ((stamp & 0xFFF) << 64) | (0x2 << 62) | random


def _encode(number: int) -> str:
    # 128 bits are 26 digits of 5 bits (the first holds 3); two digits at a time halve the work.
    return "".join([_PAIRS[(number >> shift) & 0x3FF] for shift in range(120, -1, -10)])
