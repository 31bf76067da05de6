"""The environment of a command: an allow-list, UTF-8, and no hooks from outside."""

import os
import pwd
from pathlib import Path

import pytest

from app.sandbox.environment import (
    DEFAULT_PATH,
    MAX_TOTAL_BYTES,
    MAX_VALUE_BYTES,
    check_variables,
    command_environment,
    find_program,
)


@pytest.fixture(autouse=True)
def _plain_locale(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith(("LC_", "LANG")) or name == "TZ"]:
        monkeypatch.delenv(name)


def test_nothing_of_the_services_own_environment_comes_through(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("DATABASE_URL", "TOOLCRIB_API_KEY", "MY_TOKEN", "HTTPS_PROXY", "http_proxy", "PYTHONPATH", "OLDPWD"):
        monkeypatch.setenv(name, "s-8731")
    monkeypatch.setenv("PATH", "/usr/bin:/bin")
    user = pwd.getpwuid(os.geteuid()).pw_name
    assert command_environment("/ws", {}) == {
        "PATH": "/usr/bin:/bin",
        "HOME": "/ws",
        "PWD": "/ws",
        "SHELL": "/usr/bin/bash" if Path("/usr/bin/bash").exists() else "/bin/bash",
        "TERM": "dumb",
        "TMPDIR": "/tmp",
        "USER": user,
        "LOGNAME": user,
        "LANG": "C.UTF-8",
    }


def test_what_the_caller_adds_wins(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TZ", "Europe/Vienna")
    environment = command_environment("/ws", {"HOME": "/ws/home", "CI": "1"})
    assert (environment["HOME"], environment["CI"], environment["TZ"]) == ("/ws/home", "1", "Europe/Vienna")


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({}, {"LANG": "C.UTF-8"}),
        ({"LANG": "C"}, {"LANG": "C.UTF-8"}),
        ({"LANG": "de_AT.UTF-8", "LC_ALL": "POSIX"}, {"LANG": "C.UTF-8"}),
        ({"LANG": "de_AT.utf8@euro"}, {"LANG": "de_AT.utf8@euro"}),
        ({"LANG": "C", "LC_CTYPE": "C.UTF-8"}, {"LANG": "C", "LC_CTYPE": "C.UTF-8"}),
        ({"LC_ALL": "C.UTF-8", "LC_TIME": "C"}, {"LANG": "C.UTF-8", "LC_ALL": "C.UTF-8", "LC_TIME": "C"}),
        ({"LANG": "de_DE.ISO-8859-1"}, {"LANG": "C.UTF-8"}),
    ],
)
def test_the_character_set_is_utf_8(
    monkeypatch: pytest.MonkeyPatch, given: dict[str, str], expected: dict[str, str]
) -> None:
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    environment = command_environment("/ws", {})
    assert {name: value for name, value in environment.items() if name.startswith(("LANG", "LC_"))} == expected


@pytest.mark.parametrize("path", [None, "", ".:bin", ":"])
def test_a_path_without_an_absolute_entry_is_the_systems(monkeypatch: pytest.MonkeyPatch, path: str | None) -> None:
    if path is None:
        monkeypatch.delenv("PATH")
    else:
        monkeypatch.setenv("PATH", path)
    assert command_environment("/ws", {})["PATH"] == DEFAULT_PATH


def test_relative_entries_of_the_path_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", ".:/usr/bin::bin:/bin")
    assert command_environment("/ws", {})["PATH"] == "/usr/bin:/bin"


def test_a_program_installed_later_is_found(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert find_program("tool") is None
    (tmp_path / "tool").write_text("#!/bin/sh\n")
    (tmp_path / "tool").chmod(0o755)
    assert find_program("tool") == str(tmp_path / "tool")


@pytest.mark.parametrize(
    "name",
    ["LD_PRELOAD", "LD_LIBRARY_PATH", "LD_X", "DYLD_INSERT_LIBRARIES", "BASH_ENV", "ENV", "BASH_FUNC_ls%%", "SHELLOPTS",
     "BASHOPTS", "PS4", "PROMPT_COMMAND", "PYTHONSTARTUP", "PYTHONPATH", "PYTHONHOME", "PERL5LIB", "PERL5OPT", "RUBYOPT",
     "RUBYLIB", "NODE_OPTIONS", "GCONV_PATH", "GIT_SSH_COMMAND", "JAVA_TOOL_OPTIONS", "GLIBC_TUNABLES"],
)  # fmt: skip
def test_hooks_of_loaders_and_interpreters_are_refused_by_name(name: str) -> None:
    with pytest.raises(ValueError, match=name.partition("%")[0]):
        check_variables({"GOOD": "1", name: "x"})


@pytest.mark.parametrize("name", ["", "1A", "A-B", "A B", "A=B", "Ä", "A\n", "A\0"])
def test_what_is_no_name_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match="no name of a variable"):
        check_variables({name: "x"})


@pytest.mark.parametrize(
    "name", ["A", "_", "env", "path", "PYTHONUNBUFFERED", "GIT_PAGER", "LDFLAGS", "NODE_ENV", "CI"]
)
def test_ordinary_variables_pass(name: str) -> None:
    check_variables({name: "väl=ue\n"})


@pytest.mark.parametrize(
    ("variables", "words"),
    [
        ({"A": "x\0y"}, "value of A holds the character U.0000"),
        ({"A": "\ud800"}, "value of A is no valid Unicode"),
        ({"A": "x" * (MAX_VALUE_BYTES + 1)}, "value of A has 32769 bytes"),
        ({f"A{n}": "" for n in range(257)}, "at most 256 variables"),
        ({f"A{n}": "x" * MAX_VALUE_BYTES for n in range(5)}, f"at most {MAX_TOTAL_BYTES} are possible"),
    ],
)
def test_values_that_cannot_be_and_too_much_of_them_are_refused(variables: dict[str, str], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        check_variables(variables)
