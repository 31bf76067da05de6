"""What an idempotency key has made already."""

from app.domain.idempotency import IdempotencyKey
from app.errors import IdempotencyKeyReused
from app.storage.base import Storage
from app.storage.read_pool import ReadPool


async def made_before(
    storage: Storage, reads: ReadPool, key: IdempotencyKey, *, owner: str, workspace_id: str | None = None
) -> str | None:
    """Return the id of the batch the same request made in a workspace, or (without one) of the workspace it made.

    None: nothing yet, as far as is known; only the write decides between requests that come at once.

    Raises:
        IdempotencyKeyReused: another request made it.
    """
    made = await reads.run(storage.made, key.value, owner=owner, workspace_id=workspace_id)
    if made is None:
        return None
    if made.digest != key.digest:
        raise key_reused(key)
    return made.id


def key_reused(key: IdempotencyKey) -> IdempotencyKeyReused:
    return IdempotencyKeyReused(
        f"the Idempotency-Key {key.value} came with another request before; send each new request with a key of its own"
    )
