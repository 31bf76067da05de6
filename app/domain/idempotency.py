"""Idempotency keys: how a request that is sent again is known for the same one."""

import hashlib
from dataclasses import dataclass
from typing import Any, Self

from app.domain import json_codec


@dataclass(frozen=True, slots=True)
class IdempotencyKey:
    """A caller's name for one request. It holds for one owner, and for batches in one workspace.

    `value` is 1 to 255 visible ASCII characters; `digest`, the SHA-256 of the request, tells a repetition from another
    request under the same name.
    """

    value: str
    digest: bytes

    @classmethod
    def of(cls, value: str, kind: str, body: Any) -> Self:
        """Return the key of a request: what it asks for (`batch`, `tool:read`, …) and its parsed JSON body.

        White space and the order of members make no difference.
        """
        return cls(value, hashlib.sha256(json_codec.canonical([kind, body])).digest())
