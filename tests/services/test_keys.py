import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from app.services.keys import SCOPES, Caller, KeyService, hash_token, make_key
from app.storage.base import CreateKey
from app.storage.read_pool import ReadPool
from app.storage.record_writer import RecordWriter
from app.storage.sql.storage import SqlStorage

pytestmark = pytest.mark.anyio

ENVIRONMENT = "of-the-environment"


@asynccontextmanager
async def keys_of(storage: SqlStorage, environment_key: str | None = ENVIRONMENT) -> AsyncIterator[KeyService]:
    reads, records = ReadPool(), RecordWriter(storage)
    records.start()
    try:
        yield KeyService(storage=storage, reads=reads, records=records, environment_key=environment_key)
    finally:
        await records.close()
        reads.close()


async def test_the_key_of_the_environment_always_works_and_is_never_stored(storage: SqlStorage) -> None:
    async with keys_of(storage) as keys:
        assert await keys.caller(ENVIRONMENT) == Caller("env", frozenset(SCOPES))
        assert await keys.any()
    assert storage.keys() == []


async def test_a_made_key_is_found_by_its_token_alone(storage: SqlStorage) -> None:
    async with keys_of(storage, None) as keys:
        assert not await keys.any()
        token = await keys.create("first")
        assert await keys.any()
        [stored] = storage.keys()
        assert await keys.caller(token) == Caller(stored.id, frozenset(SCOPES))
        assert (stored.name, stored.token_hash) == ("first", hash_token(token))
        for wrong in (token[:-1], token + "x", token.upper(), stored.id, stored.token_hash.hex(), ""):
            assert await keys.caller(wrong) is None
    async with keys_of(storage, None) as later:
        assert await later.caller(token) == Caller(stored.id, frozenset(SCOPES))


async def test_a_key_made_elsewhere_is_found_even_right_after_a_wrong_one(sqlite_storage: SqlStorage) -> None:
    async with keys_of(sqlite_storage) as keys:
        assert await keys.caller("wrong") is None
        key, token = make_key("elsewhere")
        sqlite_storage.apply([CreateKey(key)])
        assert await keys.caller(token) == Caller(key.id, frozenset(SCOPES))


async def test_a_flood_of_wrong_keys_is_no_flood_of_queries(
    sqlite_storage: SqlStorage, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = 0
    read = sqlite_storage.keys

    def count() -> object:
        nonlocal asked
        asked += 1
        return read()

    monkeypatch.setattr(sqlite_storage, "keys", count)
    async with keys_of(sqlite_storage) as keys:
        found = await asyncio.gather(*(keys.caller(f"wrong-{number}") for number in range(200)))
        assert found == [None] * 200
        assert asked <= 2
        assert await keys.caller(ENVIRONMENT) is not None
