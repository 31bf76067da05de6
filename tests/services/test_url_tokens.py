from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace

import pytest

from app.domain.audit import SERVICE
from app.domain.batch import BatchStatus
from app.domain.caller import SCOPES, Caller
from app.domain.clock import now_ms
from app.domain.ids import new_id
from app.services import url_tokens
from app.services.keys import KeyRequest, KeyService
from app.services.url_tokens import LIFETIME_MS, SECRET, UrlTokenService, secret_of
from app.storage.base import Applied, BatchEnd, CreateWorkspace, Existing, KeepSecret
from app.storage.read_pool import ReadPool
from app.storage.record_writer import RecordWriter
from app.storage.sql.storage import SqlStorage
from tests.support.records import ends, make_batch, make_workspace, starts, submit

pytestmark = pytest.mark.anyio

PATH = b"/v1/batches/x/events"
ENVIRONMENT = "of-the-environment"


@dataclass
class Process:
    """One process on a database."""

    keys: KeyService
    tokens: UrlTokenService

    async def caller(self, scopes: tuple[str, ...] = ("read",), owner: str = "team") -> Caller:
        key, _ = await self.keys.create(KeyRequest("k", scopes, owner), by=SERVICE)  # type: ignore[arg-type]
        credential = await self.keys.credential(key.id)
        assert credential is not None
        return credential.caller


@asynccontextmanager
async def process(storage: SqlStorage, environment_key: str = ENVIRONMENT) -> AsyncIterator[Process]:
    reads, records = ReadPool(), RecordWriter(storage)
    records.start()
    keys = KeyService(storage=storage, reads=reads, records=records, environment_key=environment_key)
    try:
        secret = await secret_of(storage, reads, records)
        yield Process(keys, UrlTokenService(secret=secret, keys=keys, storage=storage, reads=reads))
    finally:
        await records.close()
        reads.close()


async def test_a_token_opens_its_path_and_no_other(storage: SqlStorage) -> None:
    async with process(storage) as here:
        caller = await here.caller()
        made = await here.tokens.issue(caller, PATH)
        assert await here.tokens.caller(made.token, PATH, None) == caller
        assert abs(made.expires_at - now_ms() - LIFETIME_MS) < 60_000
        for path in (b"", PATH[:-1], PATH + b"/", PATH + b"\0", PATH.upper(), b"/v1/batches/y/events"):
            assert await here.tokens.caller(made.token, path, None) is None


@pytest.mark.parametrize(
    "change",
    [
        lambda token: "",
        lambda token: token[:-1],
        lambda token: token + "x",
        lambda token: token.removeprefix("toolcrib_url_"),
        lambda token: token.replace(".", ".1", 1),
        lambda token: token.replace(".", ".-", 1),
        lambda token: token.replace(".", ".²", 1),
        lambda token: token.replace("_key_", "_env_"),
        lambda token: "toolcrib_url_env." + token.partition(".")[2],
        lambda token: "toolcrib_url_key_none." + token.partition(".")[2],
        lambda token: token.rpartition(".")[0] + ".ä",
        lambda token: token + "." + token,
        lambda token: "toolcrib_url_a." + "9" * 15 + ".x",
        lambda token: "toolcrib_url_" + "." * 400,
    ],
)
async def test_a_token_that_was_changed_opens_nothing(sqlite_storage: SqlStorage, change: object) -> None:
    async with process(sqlite_storage) as here:
        made = await here.tokens.issue(await here.caller(), PATH)
        assert callable(change)
        assert await here.tokens.caller(change(made.token), PATH, None) is None


async def test_a_token_carries_the_owner_and_of_the_scopes_what_reading_takes(sqlite_storage: SqlStorage) -> None:
    async with process(sqlite_storage) as here:
        caller = await here.caller(("read", "write", "exec"), "team-a")
        made = await here.tokens.issue(caller, PATH)
        assert await here.tokens.caller(made.token, PATH, None) == replace(caller, scopes=frozenset({"read"}))
        operator = Caller("env", "env", frozenset(SCOPES))
        made = await here.tokens.issue(operator, PATH)
        seen = await here.tokens.caller(made.token, PATH, None)
        assert seen is not None
        assert seen.sees is None
        assert seen.scopes.isdisjoint({"write", "exec"})


async def test_a_token_ends_with_its_key(storage: SqlStorage) -> None:
    async with process(storage) as here:
        caller = await here.caller()
        made = await here.tokens.issue(caller, PATH)
        await here.keys.revoke(caller.key_id, by=SERVICE)
        assert await here.tokens.caller(made.token, PATH, None) is None


async def test_a_token_works_in_every_process_of_the_database(storage: SqlStorage) -> None:
    async with process(storage) as here, process(storage) as there:
        caller = await here.caller()
        made = await here.tokens.issue(caller, PATH)
        assert await there.tokens.caller(made.token, PATH, None) == caller
    async with process(storage) as later:
        assert await later.tokens.caller(made.token, PATH, None) == caller


async def test_with_another_key_in_the_environment_its_tokens_are_void(sqlite_storage: SqlStorage) -> None:
    operator = Caller("env", "env", frozenset(SCOPES))
    async with process(sqlite_storage) as here:
        made = await here.tokens.issue(operator, PATH)
    async with process(sqlite_storage, "another-key") as later:
        assert await later.tokens.caller(made.token, PATH, None) is None


async def test_a_token_of_a_batch_works_until_a_while_after_its_end(
    storage: SqlStorage, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = now_ms()
    monkeypatch.setattr(url_tokens, "now_ms", lambda: clock)
    workspace = make_workspace()
    batch = make_batch(workspace.id)
    storage.apply([CreateWorkspace(workspace), submit(batch), starts(batch)])
    about = (batch.id, batch.calls[0].id)
    async with process(storage) as here:
        caller = await here.caller()
        made = await here.tokens.issue(caller, PATH)
        clock += 10 * LIFETIME_MS
        for thing in about:
            assert await here.tokens.caller(made.token, PATH, thing) == caller
        for thing in (None, new_id("batch"), new_id("call")):
            assert await here.tokens.caller(made.token, PATH, thing) is None
        storage.apply([ends(batch, 2)])
        end = storage.batch_end(batch.id)
        assert end is not None
        assert end.finished_at is not None
        clock = end.finished_at + LIFETIME_MS
        for thing in about:
            assert await here.tokens.caller(made.token, PATH, thing) == caller
        clock += 1
        for thing in about:
            assert await here.tokens.caller(made.token, PATH, thing) is None


def test_the_end_of_a_batch_is_found_by_its_id_and_by_those_of_its_calls(storage: SqlStorage) -> None:
    workspace = make_workspace()
    batch = make_batch(workspace.id, calls=2)
    storage.apply([CreateWorkspace(workspace), submit(batch), starts(batch)])
    about = [batch.id, *(call.id for call in batch.calls)]
    assert [storage.batch_end(thing) for thing in about] == [BatchEnd(None)] * 3
    storage.apply([ends(batch, 3)])
    stored = storage.batch(batch.id)
    assert stored is not None
    assert stored.status is BatchStatus.COMPLETED
    assert [storage.batch_end(thing) for thing in about] == [BatchEnd(stored.finished_at)] * 3
    assert storage.batch_end(new_id("batch")) is None


def test_the_first_secret_stays(storage: SqlStorage) -> None:
    assert storage.secret(SECRET) is None
    first = KeepSecret(SECRET, b"\0first", 1)
    assert storage.apply([first, KeepSecret(SECRET, b"second", 2), first]) == [Applied(), Existing(SECRET), Applied()]
    assert storage.apply([KeepSecret(SECRET, b"third", 3)]) == [Existing(SECRET)]
    assert storage.secret(SECRET) == b"\0first"
