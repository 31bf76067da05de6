import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from app.domain.audit import COMMAND_LINE, SERVICE
from app.domain.caller import SCOPES, Caller
from app.domain.clock import now_ms
from app.domain.ids import new_id
from app.errors import NotFound, StorageUnavailable
from app.services.keys import Credential, KeyRequest, KeyService, hash_token, make_key
from app.storage.base import OperationalError, RevokeKey, Storage
from app.storage.read_pool import ReadPool
from app.storage.record_writer import RecordWriter
from app.storage.sql.storage import SqlStorage
from tests.support.faulty_storage import FaultyStorage, fails

pytestmark = pytest.mark.anyio

ENVIRONMENT = "of-the-environment"
OPERATOR = Caller("env", "env", frozenset(SCOPES))
HOUR_MS = 3_600_000


@asynccontextmanager
async def keys_of(
    storage: Storage, environment_key: str | None = ENVIRONMENT, *, trust_seconds: float = 5.0
) -> AsyncIterator[KeyService]:
    reads, records = ReadPool(), RecordWriter(storage, unavailable_after=0.05)
    records.start()
    try:
        yield KeyService(
            storage=storage,
            reads=reads,
            records=records,
            environment_key=environment_key,
            trust_seconds=trust_seconds,
        )
    finally:
        await records.close()
        reads.close()


async def test_the_key_of_the_environment_always_works_and_is_never_stored(storage: SqlStorage) -> None:
    async with keys_of(storage) as keys:
        assert await keys.caller(ENVIRONMENT) == OPERATOR
        assert await keys.credential("env") == Credential(OPERATOR, hash_token(ENVIRONMENT))
        assert await keys.any()
    assert storage.keys() == []


async def test_a_made_key_is_found_by_its_token_alone(storage: SqlStorage) -> None:
    async with keys_of(storage, None) as keys:
        assert not await keys.any()
        assert await keys.credential("env") is None
        made, token = await keys.create(KeyRequest("first"), by=SERVICE)
        assert await keys.any()
        assert storage.keys() == [made]
        assert (made.name, made.owner, made.created_by) == ("first", made.id, "service")
        assert made.token_hash == hash_token(token)
        assert await keys.caller(token) == Caller(made.id, made.id, frozenset(SCOPES))
        for wrong in (token[:-1], token + "x", token.upper(), made.id, made.token_hash.hex(), ""):
            assert await keys.caller(wrong) is None
    async with keys_of(storage, None) as later:
        assert await later.caller(token) == Caller(made.id, made.id, frozenset(SCOPES))


async def test_a_key_carries_the_scopes_and_the_owner_it_was_made_with(storage: SqlStorage) -> None:
    async with keys_of(storage) as keys:
        asked = KeyRequest("ci", ("read", "exec"), "team-a")
        made, token = await keys.create(asked, by=OPERATOR)
        caller = await keys.caller(token)
        assert caller == Caller(made.id, "team-a", frozenset({"read", "exec"}))
        assert caller is not None
        assert caller.sees == "team-a"
        assert OPERATOR.sees is None


async def test_a_revoked_key_works_no_more_here_or_after_a_restart(storage: SqlStorage) -> None:
    async with keys_of(storage, trust_seconds=3600) as keys:
        made, token = await keys.create(KeyRequest("short-lived"), by=OPERATOR)
        _, other = await keys.create(KeyRequest("stays"), by=OPERATOR)
        assert await keys.caller("wrong") is None, "what is held in memory is new, and is not asked for again"
        assert await keys.caller(token) is not None
        await keys.revoke(made.id, by=OPERATOR)
        assert await keys.caller(token) is None
        assert await keys.credential(made.id) is None
        await keys.revoke(made.id, by=OPERATOR)
        assert await keys.caller(other) is not None
        page = await keys.list(before=None, limit=9)
        assert [key.revoked_at is None for key in page.items] == [True, False]
        with pytest.raises(NotFound):
            await keys.revoke(new_id("key"), by=OPERATOR)
    async with keys_of(storage) as later:
        assert await later.caller(token) is None


async def test_a_key_that_could_not_be_revoked_goes_on_working(sqlite_storage: SqlStorage) -> None:
    faulty = FaultyStorage(sqlite_storage)
    async with keys_of(faulty) as keys:
        made, token = await keys.create(KeyRequest("k"), by=OPERATOR)
        away = OperationalError("away", "connection")
        faulty.faults.extend([fails(away)] * 100)
        with pytest.raises(StorageUnavailable):
            await keys.revoke(made.id, by=OPERATOR)
        assert await keys.caller(token) is not None


async def test_a_key_revoked_by_another_process_works_here_until_it_is_looked_at_again(storage: SqlStorage) -> None:
    async with keys_of(storage, trust_seconds=0) as keys:
        made, token = await keys.create(KeyRequest("k"), by=OPERATOR)
        assert await keys.caller(token) is not None
        storage.apply([RevokeKey(made.id, now_ms())])
        assert await keys.caller(token) is None
        assert await keys.credential(made.id) is None
    async with keys_of(storage, trust_seconds=3600) as trusting:
        made, token = await trusting.create(KeyRequest("k"), by=OPERATOR)
        assert await trusting.caller("wrong") is None, "what was read is new"
        storage.apply([RevokeKey(made.id, now_ms())])
        assert await trusting.caller(token) is not None
        assert await trusting.caller("wrong too") is None, "it was read again"
        assert await trusting.caller(token) is None


async def test_a_key_works_until_it_expires(storage: SqlStorage) -> None:
    async with keys_of(storage, None) as keys:
        _, expired = await keys.create(KeyRequest("k", expires_at=now_ms() - 1), by=SERVICE)
        assert await keys.caller(expired) is None
        assert not await keys.any()
        _, lasting = await keys.create(KeyRequest("k", expires_at=now_ms() + HOUR_MS), by=SERVICE)
        assert await keys.caller(lasting) is not None
        assert await keys.any()


async def test_a_key_made_elsewhere_is_found_even_right_after_a_wrong_one(sqlite_storage: SqlStorage) -> None:
    async with keys_of(sqlite_storage) as keys:
        assert await keys.caller("wrong") is None
        write, token = make_key(KeyRequest("elsewhere"), by=COMMAND_LINE)
        sqlite_storage.apply([write])
        assert await keys.caller(token) == Caller(write.key.id, write.key.id, frozenset(SCOPES))


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


async def test_keys_that_were_revoked_anywhere_or_have_expired_are_over(storage: SqlStorage) -> None:
    async with keys_of(storage, trust_seconds=3600) as keys:
        stays, here, elsewhere, expired = [
            (await keys.create(KeyRequest("k", expires_at=expires_at), by=OPERATOR))[0].id
            for expires_at in (now_ms() + HOUR_MS, None, None, now_ms() - 1)
        ]
        assert await keys.caller("wrong") is None, "what was read is new"
        assert await keys.over(["env", stays, here, elsewhere]) == set()
        await keys.revoke(here, by=OPERATOR)
        storage.apply([RevokeKey(elsewhere, now_ms())])
        assert await keys.credential(elsewhere) is not None, "nothing has told this process yet"
        assert await keys.over(["env", stays, here, elsewhere, expired]) == {here, elsewhere, expired}
        assert await keys.credential(elsewhere) is None
        assert await keys.credential(stays) is not None


async def test_a_database_that_is_away_ends_no_key_that_works(
    sqlite_storage: SqlStorage, monkeypatch: pytest.MonkeyPatch
) -> None:
    def away(_key_ids: object) -> object:
        raise OperationalError("away", "connection")

    async with keys_of(sqlite_storage) as keys:
        made, _ = await keys.create(KeyRequest("k"), by=OPERATOR)
        expired, _ = await keys.create(KeyRequest("k", expires_at=now_ms() - 1), by=OPERATOR)
        monkeypatch.setattr(sqlite_storage, "revoked_keys", away)
        assert await keys.over([made.id, expired.id]) == {expired.id}
