"""API keys: made, shown once, found again by their hash."""

import asyncio
import hashlib
import hmac
import secrets
import time
from dataclasses import dataclass
from typing import Final

from app.domain.clock import now_ms
from app.domain.ids import new_id
from app.storage.base import ApiKey, CreateKey, Storage
from app.storage.read_pool import ReadPool
from app.storage.record_writer import RecordWriter

SCOPES: Final = ("read", "write", "exec", "admin")
TOKEN_PREFIX: Final = "toolcrib_"  # noqa: S105 - what scanners for leaked secrets look for, no secret
# A key made by another process (`toolcrib key create`) is found at its first use, but a flood of wrong keys must not
# become a flood of queries: they wait.
REFRESH_SECONDS: Final = 0.25


@dataclass(frozen=True, slots=True)
class Caller:
    """Who a request comes from: the id of its key (`env` for the environment's) and what the key may do."""

    id: str
    scopes: frozenset[str]


def hash_token(token: str) -> bytes:
    return hashlib.sha256(token.encode()).digest()


def make_key(name: str) -> tuple[ApiKey, str]:
    """Return a new key with every scope and its token, which is stored nowhere."""
    token = TOKEN_PREFIX + secrets.token_urlsafe(32)
    return ApiKey(new_id("key"), name, hash_token(token), SCOPES, now_ms()), token


class KeyService:
    """Tells who a token belongs to. Keys are held in memory and read again when an unknown token comes.

    Args:
        environment_key: the token of the environment's key, which is never stored; None when there is none.
    """

    def __init__(
        self, *, storage: Storage, reads: ReadPool, records: RecordWriter, environment_key: str | None
    ) -> None:
        self._storage = storage
        self._reads = reads
        self._records = records
        self._environment = None if environment_key is None else hash_token(environment_key)
        self._environment_caller = Caller("env", frozenset(SCOPES))
        self._keys: dict[bytes, ApiKey] = {}
        self._read_at = float("-inf")
        self._reading = asyncio.Lock()

    async def caller(self, token: str) -> Caller | None:
        """Return the caller a token belongs to; None when no key has it.

        Raises:
            StorageUnavailable: the key is not one that is known already, and the database does not answer.
        """
        digest = hash_token(token)
        # Digests of secrets are compared, so the time a comparison takes tells nothing about a token.
        if self._environment is not None and hmac.compare_digest(digest, self._environment):
            return self._environment_caller
        key = self._keys.get(digest)
        if key is None:
            await self._refresh()
            key = self._keys.get(digest)
        if key is None or not hmac.compare_digest(digest, key.token_hash):
            return None
        return Caller(key.id, frozenset(key.scopes))

    async def create(self, name: str) -> str:
        """Make a key, store its hash and return its token."""
        key, token = make_key(name)
        await self._records.write(CreateKey(key))
        self._keys[key.token_hash] = key
        return token

    async def any(self) -> bool:
        """Whether there is a key at all, the environment's included."""
        return self._environment is not None or bool(await self._reads.run(self._storage.keys))

    async def _refresh(self) -> None:
        asked = time.monotonic()
        async with self._reading:
            if self._read_at > asked:
                return
            await asyncio.sleep(self._read_at + REFRESH_SECONDS - asked)
            read_at = time.monotonic()
            keys = await self._reads.run(self._storage.keys)
            self._keys = {key.token_hash: key for key in keys}
            self._read_at = read_at
