"""How often a caller may ask: token buckets, one per key, and one per address for keys that do not exist."""

import math
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from app.errors import RateLimited

BUCKETS_MAX: Final = 10_000
"""How many buckets are kept of a kind; beyond that the one that was used longest ago is forgotten."""
BURST_SECONDS: Final = 10
"""A burst that is not set is what comes in so many seconds."""


@dataclass(frozen=True, slots=True)
class Rate:
    """`per_second` requests in the long run, `burst` at once."""

    per_second: float
    burst: int

    @property
    def window_seconds(self) -> int:
        """How long an empty bucket takes to fill, in whole seconds."""
        return math.ceil(self.burst / self.per_second)


@dataclass(frozen=True, slots=True)
class Bucket:
    """What a bucket holds: whole requests that may come now, seconds until it is full and until the next one may."""

    remaining: int
    full_in: float
    next_in: float


class TokenBuckets:
    """Buckets of one rate, by any name. One that is full again is as if it had never been, and is forgotten."""

    def __init__(self, rate: Rate, *, clock: Callable[[], float] = time.monotonic) -> None:
        self.rate: Final = rate
        self._clock = clock
        # When each is full again, the one used longest ago first.
        self._full_at: OrderedDict[str, float] = OrderedDict()

    def __len__(self) -> int:
        return len(self._full_at)

    def look(self, name: str) -> Bucket:
        """Return what a bucket holds now."""
        now = self._clock()
        return self._bucket(max(self._full_at.get(name, now), now) - now)

    def take(self, name: str) -> tuple[bool, Bucket]:
        """Take one request out of a bucket and return whether it was there, and what is left. None is owed."""
        now = self._clock()
        self._forget(now)
        full_in = max(self._full_at.get(name, now), now) - now
        bucket = self._bucket(full_in)
        if not bucket.remaining:
            return False, bucket
        full_in += 1 / self.rate.per_second
        self._full_at[name] = now + full_in
        self._full_at.move_to_end(name)
        return True, self._bucket(full_in)

    def _bucket(self, full_in: float) -> Bucket:
        # Rounded where the sum of many small steps would miss a whole number.
        tokens = round(self.rate.burst - full_in * self.rate.per_second, 6)
        remaining = max(0, math.floor(tokens))
        return Bucket(remaining, full_in, 0.0 if remaining else (1 - tokens) / self.rate.per_second)

    def _forget(self, now: float) -> None:
        while self._full_at:
            name, full_at = next(iter(self._full_at.items()))
            if full_at > now and len(self._full_at) < BUCKETS_MAX:
                return
            del self._full_at[name]


class RequestRates:
    """What is asked of every request with a key, and of every one without.

    Args:
        requests: how often one key may ask; None for no limit.
        failures: how often one address may send no key or one that does not exist; None for no limit. Whoever has a key
            is never refused for what others at the same address do.
    """

    def __init__(
        self, requests: Rate | None, failures: Rate | None, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.requests = None if requests is None else TokenBuckets(requests, clock=clock)
        self.failures = None if failures is None else TokenBuckets(failures, clock=clock)

    def count(self, key_id: str) -> dict[str, str]:
        """Count a request of a key and return the fields its answer carries.

        Raises:
            RateLimited: the key's bucket is empty; the request is not counted.
        """
        if self.requests is None:
            return {}
        allowed, bucket = self.requests.take(key_id)
        fields = _fields("requests", self.requests.rate, bucket)
        if not allowed:
            rate = self.requests.rate
            raise RateLimited(
                f"this key may send {rate.per_second:g} requests a second, and {rate.burst} at once",
                headers={**fields, "Retry-After": _seconds(bucket.next_in)},
            )
        return fields

    def count_failure(self, address: str) -> None:
        """Count a request whose key is missing or unknown.

        Raises:
            RateLimited: there were too many from this address.
        """
        if self.failures is None:
            return
        allowed, bucket = self.failures.take(address)
        if not allowed:
            raise RateLimited(
                "too many requests without a valid API key came from this address",
                headers={"Retry-After": _seconds(bucket.next_in)},
            )


def _fields(policy: str, rate: Rate, bucket: Bucket) -> dict[str, str]:
    """Return the fields of draft-ietf-httpapi-ratelimit-headers-11.

    `q` requests come in `w` seconds; `r` are left now, and in `t` seconds it will be `q` again.
    """
    return {
        "RateLimit-Policy": f'"{policy}";q={rate.burst};w={rate.window_seconds}',
        "RateLimit": f'"{policy}";r={bucket.remaining};t={math.ceil(bucket.full_in)}',
    }


def _seconds(value: float) -> str:
    """Return a value of Retry-After: whole seconds, at least one."""
    return str(max(1, math.ceil(value)))
