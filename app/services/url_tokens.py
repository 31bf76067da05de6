"""URL tokens: who cannot send a header (an EventSource, an image) opens one URL with one, for a while.

A token is signed and stored nowhere: making one costs no write, and every process that has the database's secret can
check it. What is signed is the path, the time and the hash of the key's own token, so a token ends with its key.
"""

import base64
import hashlib
import hmac
import os
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Final

from app.domain.caller import Caller
from app.domain.clock import now_ms
from app.errors import Unauthorized
from app.services.keys import KeyService
from app.storage.base import DataError, KeepSecret, Storage
from app.storage.read_pool import ReadPool
from app.storage.record_writer import RecordWriter

TOKEN_PREFIX: Final = "toolcrib_url_"  # noqa: S105 - what scanners for leaked secrets look for, no secret
LIFETIME_MS: Final = 15 * 60 * 1000
SECRET: Final = "url-tokens"  # noqa: S105 - the secret's name
SECRET_BYTES: Final = 32
_LONGEST: Final = 256


@dataclass(frozen=True, slots=True)
class UrlToken:
    """A token and the time it works until, in milliseconds since the epoch; of a batch that runs it works longer."""

    token: str
    expires_at: int


async def secret_of(storage: Storage, reads: ReadPool, records: RecordWriter) -> bytes:
    """Return the secret that signs the tokens of a database; the first process that asks makes it.

    Raises:
        StorageUnavailable, NoSpace: it could be neither read nor stored.
    """
    while (secret := await reads.run(storage.secret, SECRET)) is None:
        # When another process is quicker, its secret is the one.
        with suppress(DataError):
            await records.write(KeepSecret(SECRET, os.urandom(SECRET_BYTES), now_ms()), droppable=True)
    return secret


class UrlTokenService:
    """Makes tokens for URLs and checks them."""

    def __init__(self, *, secret: bytes, keys: KeyService, storage: Storage, reads: ReadPool) -> None:
        self._secret = secret
        self._keys = keys
        self._storage = storage
        self._reads = reads

    async def issue(self, caller: Caller, path: bytes) -> UrlToken:
        """Return a token with which a GET or HEAD of `path`, percent-decoded, is answered as the caller's would be.

        Raises:
            Unauthorized: the caller's key was revoked meanwhile.
        """
        credential = await self._keys.credential(caller.key_id)
        if credential is None:
            raise Unauthorized("the API key was revoked or has expired")
        expires_at = now_ms() + LIFETIME_MS
        signature = self._sign(credential.token_hash, expires_at, path)
        return UrlToken(f"{TOKEN_PREFIX}{caller.key_id}.{expires_at}.{signature}", expires_at)

    async def caller(self, token: str, path: bytes, about: str | None) -> Caller | None:
        """Return who a token was made for; None when it is none for this path or its time is over.

        `about` is the id of the batch or call the path is one of: until 15 minutes after a batch has ended its tokens
        work, however old they are.

        Raises:
            StorageUnavailable: the database has to be asked and does not answer.
        """
        key_id, expires, signature = _parts(token)
        if not expires.isascii() or not expires.isdigit():
            return None
        credential = await self._keys.credential(key_id)
        if credential is None:
            return None
        expires_at = int(expires)
        if not hmac.compare_digest(signature.encode(), self._sign(credential.token_hash, expires_at, path).encode()):
            return None
        if now_ms() > expires_at and not await self._lasts(about):
            return None
        # `admin` says whose things are seen and opens nothing by itself: routes that take it take no token.
        return replace(credential.caller, scopes=credential.caller.scopes & {"read", "admin"})

    async def _lasts(self, about: str | None) -> bool:
        if about is None:
            return False
        end = await self._reads.run(self._storage.batch_end, about)
        return end is not None and (end.finished_at is None or now_ms() <= end.finished_at + LIFETIME_MS)

    def _sign(self, token_hash: bytes, expires_at: int, path: bytes) -> str:
        # The lengths of the first two are fixed, so no two messages run into each other.
        message = token_hash + expires_at.to_bytes(8) + path
        digest = hmac.new(self._secret, message, hashlib.sha256).digest()
        return base64.urlsafe_b64encode(digest).decode().rstrip("=")


def _parts(token: str) -> tuple[str, str, str]:
    """Return the key's id, the time and the signature; empty texts when it is no token."""
    parts = token.removeprefix(TOKEN_PREFIX).split(".")
    if len(token) > _LONGEST or not token.startswith(TOKEN_PREFIX) or len(parts) != 3 or len(parts[1]) > 15:
        return "", "", ""
    return parts[0], parts[1], parts[2]
