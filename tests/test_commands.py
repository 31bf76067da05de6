"""The `toolcrib` command up to the point where it serves; tests/system has the rest."""

import json
import logging
import os
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest
import structlog

from app import __version__
from app.__main__ import main
from app.domain.clock import rfc3339
from app.services.keys import TRUST_SECONDS
from app.storage.base import RevokeKey
from app.storage.sql.storage import SqlStorage
from tests.support.server import ServerThread, eventually

Capture = pytest.CaptureFixture[str]


@pytest.fixture(autouse=True)
def _settings(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    for name in list(os.environ):
        if name.startswith("TOOLCRIB_"):
            monkeypatch.delenv(name)
    monkeypatch.setenv("TOOLCRIB_DATA_DIR", str(tmp_path / "data"))
    monkeypatch.setenv("TOOLCRIB_PORT", "0")
    monkeypatch.setenv("TOOLCRIB_LOG_FORMAT", "json")
    before = structlog.get_config()
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    yield
    structlog.configure(**before)
    root.handlers[:] = handlers
    root.setLevel(level)


def refusal(capsys: Capture, *arguments: str) -> str:
    """Run a command that is refused and return its one sentence."""
    assert main(arguments) == 2
    written = capsys.readouterr()
    assert written.out == ""
    assert "Traceback" not in written.err
    [sentence] = [line for line in written.err.splitlines() if line.startswith("toolcrib: ")]
    assert sentence.endswith(".")
    return sentence.removeprefix("toolcrib: ")


@pytest.mark.parametrize(
    ("name", "value", "sentence"),
    [
        ("TOOLCRIB_PORT", "http", "TOOLCRIB_PORT is wrong"),
        ("TOOLCRIB_SANDBOX", "jail", "TOOLCRIB_SANDBOX is wrong: it has to be 'auto'"),
        (
            "TOOLCRIB_DATABASE_URL",
            "postgresql://u:hunter2@127.0.0.1:1/x",
            "the database of TOOLCRIB_DATABASE_URL cannot",
        ),
        ("TOOLCRIB_DATABASE_URL", "postgresql://u:hunter2@h:port/x", "TOOLCRIB_DATABASE_URL is wrong"),
        ("TOOLCRIB_HOST", "256.1.1.1", "cannot listen on TOOLCRIB_HOST 256.1.1.1"),
        ("TOOLCRIB_DATA_DIR", "/proc/nowhere", "TOOLCRIB_DATA_DIR: /proc/nowhere cannot be made"),
        ("TOOLCRIB_DATA_DIR", "/etc/passwd", "TOOLCRIB_DATA_DIR: /etc/passwd cannot be made"),
    ],
)
def test_a_wrong_setting_stops_the_start_with_one_sentence(
    monkeypatch: pytest.MonkeyPatch, capsys: Capture, name: str, value: str, sentence: str
) -> None:
    monkeypatch.setenv(name, value)
    said = refusal(capsys, "serve")
    assert said.startswith(sentence)
    assert "hunter2" not in said


def test_a_port_that_is_taken_is_told(monkeypatch: pytest.MonkeyPatch, capsys: Capture) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        monkeypatch.setenv("TOOLCRIB_PORT", port)
        assert f"TOOLCRIB_PORT {port}: Address already in use" in refusal(capsys)


def test_another_address_than_loopback_needs_a_key(monkeypatch: pytest.MonkeyPatch, capsys: Capture) -> None:
    monkeypatch.setenv("TOOLCRIB_HOST", "0.0.0.0")
    assert refusal(capsys).startswith("there is no API key and TOOLCRIB_HOST is 0.0.0.0")


def test_a_database_newer_than_the_code_is_refused(tmp_path: Path, capsys: Capture) -> None:
    import sqlite3

    assert main(["migrate"]) == 0
    with sqlite3.connect(tmp_path / "data" / "toolcrib.db") as database:
        database.execute("UPDATE alembic_version SET version_num = '9999_from_the_future'")
    database.close()
    capsys.readouterr()
    assert "9999_from_the_future" in refusal(capsys)


def test_an_unknown_variable_is_a_warning_with_the_nearest_name(
    monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    monkeypatch.setenv("TOOLCRIB_PROT", "1")
    assert main(["migrate"]) == 0
    lines = [json.loads(line) for line in capsys.readouterr().err.splitlines()]
    [warning] = [line for line in lines if line["message"] == "unknown_setting"]
    assert (warning["level"], warning["variable"], warning["did_you_mean"]) == (
        "warning",
        "TOOLCRIB_PROT",
        "TOOLCRIB_PORT",
    )


def test_the_version_is_printed_whatever_the_settings_are(monkeypatch: pytest.MonkeyPatch, capsys: Capture) -> None:
    monkeypatch.setenv("TOOLCRIB_PORT", "http")
    assert main(["version"]) == 0
    assert capsys.readouterr().out == f"toolcrib {__version__}\n"


def test_migrate_can_be_repeated(tmp_path: Path) -> None:
    assert main(["migrate"]) == 0
    assert main(["migrate"]) == 0
    assert (tmp_path / "data" / "toolcrib.db").exists()


def test_a_key_is_made_and_shown_once(tmp_path: Path, capsys: Capture) -> None:
    assert main(["key", "create", "--name", "ci"]) == 0
    token = capsys.readouterr().out.strip()
    assert token.startswith("toolcrib_")
    assert len(token) > 40
    storage = SqlStorage(tmp_path / "data" / "toolcrib.db")
    [key] = storage.keys()
    storage.close()
    assert (key.name, key.scopes) == ("ci", ("read", "write", "exec", "admin"))
    assert len(key.token_hash) == 32


def test_keys_are_listed_newest_first_without_their_tokens(
    tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("app.commands.KEYS_AT_ONCE", 1)
    assert main(["key", "create", "--name", "Größe ✓\n", "--scopes", "read,exec", "--owner", "team-a"]) == 0
    assert main(["key", "create"]) == 0
    tokens = capsys.readouterr().out.split()
    storage = SqlStorage(tmp_path / "data" / "toolcrib.db")
    second, first = storage.keys_page(before=None, limit=9).items
    storage.apply([RevokeKey(first.id, 1_700_000_000_000)])
    storage.close()

    assert main(["key", "list"]) == 0
    head, *listed = capsys.readouterr().out.splitlines()
    assert head.split() == ["id", "owner", "scopes", "created", "expires", "revoked", "name"]
    made = [rfc3339(key.created_at) for key in (second, first)]
    assert [line.split() for line in listed] == [
        [second.id, second.id, "read,write,exec,admin", made[0], "-", "-"],
        [first.id, "team-a", "read,exec", made[1], "-", "2023-11-14T22:13:20.000Z", "Größe", "✓?"],
    ]
    assert not any(token in line for token in tokens for line in listed)


def test_a_service_that_runs_takes_a_key_no_more_that_the_command_has_revoked(tmp_path: Path, capsys: Capture) -> None:
    with ServerThread(tmp_path / "data") as server, server.client() as operator:
        made = operator.post("/v1/keys", json={"name": "k", "scopes": ["read"]}).json()
        with server.client(made["token"]) as client:
            assert client.get("/v1/tools").status_code == 200
            for _ in range(2):
                assert main(["key", "revoke", made["id"]]) == 0
                assert f"revoked {made['id']}" in capsys.readouterr().out.splitlines()
            eventually(lambda: client.get("/v1/tools").status_code == 401, TRUST_SECONDS + 5)
        noted = operator.get("/v1/audit-events", params={"action": "key.revoked"}).json()["data"]
    assert [(event["target"], event["actor"]) for event in noted] == [(made["id"], "cli")]


@pytest.mark.parametrize(
    ("key_id", "sentence"),
    [
        ("key_01m8pk0mq7e71bgqe673033873", "there is no key key_01m8pk0mq7e71bgqe673033873."),
        ("", "there is no key ."),
        ("\udcff", "there is no key \\xff."),
        ("env", "the key of the environment cannot be revoked: change TOOLCRIB_API_KEY."),
    ],
)
def test_a_key_that_is_none_cannot_be_revoked(capsys: Capture, key_id: str, sentence: str) -> None:
    assert refusal(capsys, "key", "revoke", key_id) == sentence


@pytest.mark.parametrize(
    "arguments", [["frobnicate"], ["key"], ["key", "create", "extra"], ["key", "list", "extra"], ["key", "revoke"]]
)
def test_a_command_that_is_none_is_refused(arguments: list[str], capsys: Capture) -> None:
    with pytest.raises(SystemExit) as caught:
        main(arguments)
    assert caught.value.code == 2
    assert "usage: toolcrib" in capsys.readouterr().err


def test_a_key_is_made_with_the_scopes_and_the_owner_that_are_asked_for(tmp_path: Path, capsys: Capture) -> None:
    assert main(["key", "create", "--scopes", "exec, read", "--owner", "team-a"]) == 0
    assert capsys.readouterr().out.startswith("toolcrib_")
    storage = SqlStorage(tmp_path / "data" / "toolcrib.db")
    [key] = storage.keys()
    storage.close()
    assert (key.name, key.scopes, key.owner, key.created_by) == ("", ("read", "exec"), "team-a", "cli")


@pytest.mark.parametrize(
    ("option", "value", "sentence"),
    [
        ("--scopes", "root", "scopes are read, write, exec, admin"),
        ("--scopes", " , ", "scopes are read, write, exec, admin"),
        ("--owner", "a b", "an owner is 1 to 64"),
        ("--owner", "", "an owner is 1 to 64"),
    ],
)
def test_a_key_that_cannot_be_is_refused(
    tmp_path: Path, capsys: Capture, option: str, value: str, sentence: str
) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["key", "create", option, value])
    assert sentence in capsys.readouterr().err
    assert not (tmp_path / "data").exists()


@pytest.mark.parametrize(
    ("source", "target", "sentence"),
    [
        ("{tmp}/nothing", "{tmp}/to", "the copy is refused: there is no database {tmp}/nothing/toolcrib.db."),
        ("mysql://h/x", "{tmp}/to", "the copy is refused: the database URL begins with mysql://"),
        ("{tmp}/data", "postgresql://u:hunter2@h:port/x", "one of the databases cannot be used"),
        (
            "{tmp}/data",
            "/proc/nowhere",
            "one of the databases cannot be used: [Errno 2] No such file or directory: '/proc/nowhere'.",
        ),
        ("sqlite://", "{tmp}/to", "the copy is refused: the database URL begins with sqlite://"),
    ],
)
def test_a_copy_between_databases_that_are_none_is_refused(
    tmp_path: Path, capsys: Capture, source: str, target: str, sentence: str
) -> None:
    said = refusal(capsys, "db", "copy", "--from", source.format(tmp=tmp_path), "--to", target.format(tmp=tmp_path))
    assert said.startswith(sentence.format(tmp=tmp_path))
    assert "hunter2" not in said


def test_a_copy_to_a_server_that_is_away_fails_with_one_line(tmp_path: Path, capsys: Capture) -> None:
    assert main(["migrate"]) == 0
    capsys.readouterr()
    assert main(["db", "copy", "--from", str(tmp_path / "data"), "--to", "postgresql://u:hunter2@127.0.0.1:1/x"]) == 1
    [line] = [line for line in capsys.readouterr().err.splitlines() if line.startswith("toolcrib: ")]
    assert "127.0.0.1" in line
    assert "hunter2" not in line


def test_a_copy_tells_of_each_table_and_ends_with_what_was_compared(tmp_path: Path, capsys: Capture) -> None:
    assert main(["key", "create", "--name", "ci"]) == 0
    capsys.readouterr()
    assert main(["db", "copy", "--from", str(tmp_path / "data"), "--to", f"sqlite:///{tmp_path}/copy.db"]) == 0
    written = capsys.readouterr()
    assert written.err == ""
    *tables, last = written.out.splitlines()
    assert "api_keys: 1 rows" in "\n".join(tables)
    assert "audit_events: 1 rows" in "\n".join(tables)
    assert last == f"compared: {len(tables)} tables, 2 rows, the same in both databases"
    storage = SqlStorage(tmp_path / "copy.db")
    [made] = storage.keys()
    storage.close()
    assert made.name == "ci"
