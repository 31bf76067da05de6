"""API keys: made, shown once, found again by their hash, listed, revoked."""

import asyncio
import hashlib
import hmac
import secrets
import time
from collections.abc import Collection
from contextlib import suppress
from dataclasses import dataclass
from typing import Final

from app.domain.audit import AuditAction, audit
from app.domain.caller import SCOPES, Caller, Scope
from app.domain.clock import now_ms
from app.domain.ids import new_id
from app.errors import NotFound, StorageUnavailable
from app.storage.base import ApiKey, CreateKey, Page, Refused, RevokeKey, Storage
from app.storage.read_pool import ReadPool
from app.storage.record_writer import RecordWriter

TOKEN_PREFIX: Final = "toolcrib_"  # noqa: S105 - what scanners for leaked secrets look for, no secret
ENVIRONMENT: Final = "env"
"""The id of the environment's key, and the owner of what it makes."""
# A key made by another process (`toolcrib key create`) is found at its first use, but a flood of wrong keys must not
# become a flood of queries: they wait.
REFRESH_SECONDS: Final = 0.25
TRUST_SECONDS: Final = 5.0
"""How long a key is taken for what it was: after this, one that another process has revoked works here no more."""


@dataclass(frozen=True, slots=True)
class KeyRequest:
    """What a new key is to be. `owner` None: the key's own id. `expires_at` in milliseconds since the epoch."""

    name: str
    scopes: tuple[Scope, ...] = SCOPES
    owner: str | None = None
    expires_at: int | None = None


@dataclass(frozen=True, slots=True)
class Credential:
    """A key that is valid now: who it is, and the hash of its token."""

    caller: Caller
    token_hash: bytes


@dataclass(frozen=True, slots=True)
class _Known:
    credential: Credential
    expires_at: int | None


def hash_token(token: str) -> bytes:
    return hashlib.sha256(token.encode()).digest()


def make_key(request: KeyRequest, *, by: Caller) -> tuple[CreateKey, str]:
    """Return the write that makes a key, noted as made by `by`, and the key's token, which is stored nowhere."""
    token = TOKEN_PREFIX + secrets.token_urlsafe(32)
    key_id = new_id("key")
    key = ApiKey(
        id=key_id,
        name=request.name,
        owner=request.owner or key_id,
        token_hash=hash_token(token),
        scopes=request.scopes,
        created_at=now_ms(),
        created_by=by.key_id,
        expires_at=request.expires_at,
    )
    noted = audit(by, AuditAction.KEY_CREATED, key_id, name=key.name, owner=key.owner, scopes=list(key.scopes))
    return CreateKey(key, noted), token


def make_revocation(key_id: str, *, by: Caller) -> RevokeKey:
    """Return the write that revokes a key, noted as done by `by`."""
    return RevokeKey(key_id, now_ms(), audit(by, AuditAction.KEY_REVOKED, key_id))


class KeyService:
    """Tells who a token belongs to. Keys are held in memory and read again when an unknown token comes, or in time.

    Args:
        environment_key: the token of the environment's key, which is never stored; None when there is none.
        trust_seconds: how old what is held in memory may be.
    """

    def __init__(
        self,
        *,
        storage: Storage,
        reads: ReadPool,
        records: RecordWriter,
        environment_key: str | None,
        trust_seconds: float = TRUST_SECONDS,
    ) -> None:
        self._storage = storage
        self._reads = reads
        self._records = records
        self._trust_seconds = trust_seconds
        self._environment: Credential | None = None
        if environment_key is not None:
            caller = Caller(ENVIRONMENT, ENVIRONMENT, frozenset(SCOPES))
            self._environment = Credential(caller, hash_token(environment_key))
        self._by_hash: dict[bytes, _Known] = {}
        self._by_id: dict[str, _Known] = {}
        self._revoked: set[str] = set()
        self._read_at = float("-inf")
        self._reading = asyncio.Lock()

    async def caller(self, token: str) -> Caller | None:
        """Return the caller a token belongs to; None when no key has it, or it was revoked or has expired.

        Raises:
            StorageUnavailable: the database has to be asked and does not answer.
        """
        digest = hash_token(token)
        # Digests of secrets are compared, so the time a comparison takes tells nothing about a token.
        environment = self._environment
        if environment is not None and hmac.compare_digest(digest, environment.token_hash):
            return environment.caller
        known = self._by_hash.get(digest)
        if known is None or self._outdated:
            await self._refresh()
            known = self._by_hash.get(digest)
        if known is None or not hmac.compare_digest(digest, known.credential.token_hash):
            return None
        return None if _expired(known) else known.credential.caller

    async def credential(self, key_id: str) -> Credential | None:
        """Return a key by its id; None when there is none, or it was revoked or has expired.

        Raises:
            StorageUnavailable: the database has to be asked and does not answer.
        """
        if key_id == ENVIRONMENT:
            return self._environment
        known = self._by_id.get(key_id)
        if known is None or self._outdated:
            await self._refresh()
            known = self._by_id.get(key_id)
        return None if known is None or _expired(known) else known.credential

    async def over(self, key_ids: Collection[str]) -> set[str]:
        """Return which of some keys were revoked, in whatever process, or have expired: they work here no more.

        That is one read for all of them, of those keys alone. While the database does not answer, what this process
        knows has to do.
        """
        asked = [key_id for key_id in key_ids if key_id != ENVIRONMENT]
        over = {key_id for key_id in asked if key_id in self._revoked or _expired(self._by_id.get(key_id))}
        if len(over) < len(asked):
            with suppress(StorageUnavailable):
                for key_id in await self._reads.run(self._storage.revoked_keys, asked):
                    self._revoked.add(key_id)
                    self._let_go(key_id)
                    over.add(key_id)
        return over

    async def create(self, request: KeyRequest, *, by: Caller) -> tuple[ApiKey, str]:
        """Make a key, store its hash and return it with its token, which is stored nowhere.

        Raises:
            Overloaded, NoSpace, StorageUnavailable: nothing was made.
        """
        write, token = make_key(request, by=by)
        await self._records.write(write, droppable=True)
        self._hold(write.key)
        return write.key, token

    async def list(self, *, before: str | None, limit: int) -> Page[ApiKey]:
        """Return keys, newest first; revoked and expired ones too, the environment's not."""
        return await self._reads.run(self._storage.keys_page, before=before, limit=limit)

    async def revoke(self, key_id: str, *, by: Caller) -> None:
        """Revoke a key: here it works no more from before this is stored, elsewhere `trust_seconds` later.

        One that was revoked before stays as it is.

        Raises:
            NotFound: there is no such key.
            NoSpace, StorageUnavailable: it is as it was.
        """
        self._revoked.add(key_id)
        self._let_go(key_id)
        try:
            outcome = await self._records.write(make_revocation(key_id, by=by), droppable=True)
        except BaseException:
            # What became of it the database knows: it is read before the key is used again.
            self._revoked.discard(key_id)
            raise
        if isinstance(outcome, Refused):
            self._revoked.discard(key_id)
            raise NotFound(f"there is no key {key_id}")
        # Another attempt may have failed meanwhile and opened the way again.
        self._revoked.add(key_id)
        self._let_go(key_id)

    async def any(self) -> bool:
        """Whether there is a key that works at all, the environment's included."""
        if self._environment is not None:
            return True
        keys = await self._reads.run(self._storage.keys)
        return any(key.expires_at is None or key.expires_at > now_ms() for key in keys)

    @property
    def _outdated(self) -> bool:
        return time.monotonic() - self._read_at > self._trust_seconds

    def _hold(self, key: ApiKey) -> None:
        caller = Caller(key.id, key.owner, frozenset(key.scopes))
        known = _Known(Credential(caller, key.token_hash), key.expires_at)
        self._by_hash[key.token_hash] = self._by_id[key.id] = known

    def _let_go(self, key_id: str) -> None:
        known = self._by_id.pop(key_id, None)
        if known is not None:
            del self._by_hash[known.credential.token_hash]

    async def _refresh(self) -> None:
        asked = time.monotonic()
        async with self._reading:
            if self._read_at > asked:
                return
            await asyncio.sleep(self._read_at + REFRESH_SECONDS - asked)
            read_at = time.monotonic()
            keys = await self._reads.run(self._storage.keys)
            self._by_hash, self._by_id = {}, {}
            for key in keys:
                # The rows may be older than a revocation that was stored meanwhile.
                if key.id not in self._revoked:
                    self._hold(key)
            self._read_at = read_at


def _expired(known: _Known | None) -> bool:
    return known is not None and known.expires_at is not None and known.expires_at <= now_ms()
