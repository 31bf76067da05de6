"""Accounts: the rights a thread takes over and gives back, and what the service finds out before it relies on them."""

import os
import stat
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from app.domain.abort import AbortSignal
from app.errors import ConfigurationError
from app.sandbox.account import (
    NOBODY,
    Account,
    account_of,
    act_as,
    acting_as,
    find_account,
    may_run,
    obstacle,
    require_power_to_act,
    run_as,
)
from app.sandbox.file_pool import FilePool
from app.sandbox.programs import provide

pytestmark = pytest.mark.anyio

PROJECT = Path(__file__).parents[2]
FIRST, SECOND = Account(4_321, 4_322), Account(5_321, 5_322)

root_alone = pytest.mark.skipif(os.geteuid() != 0, reason="only root acts as others")


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """A directory in which every user may make files."""
    made = tmp_path / "place"
    made.mkdir()
    made.chmod(0o777)
    return made


@pytest.fixture
def pool() -> Iterator[FilePool]:
    made = FilePool(threads=1, per_workspace=1)
    yield made
    made.close()


def in_a_thread(work: Callable[[], Any]) -> Any:
    """Return what a function returns in a new thread, or raise what it raises."""
    results: list[Any] = []
    problems: list[BaseException] = []

    def run() -> None:
        try:
            results.append(work())
        except BaseException as error:  # noqa: BLE001 - raised again below
            problems.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join(20)
    for problem in problems:
        raise problem
    return results[0]


def rights() -> dict[str, str]:
    lines = Path("/proc/thread-self/status").read_text().splitlines()
    fields = dict(line.split(":", 1) for line in lines)
    return {name: " ".join(fields[name].split()) for name in ("Uid", "Gid", "Groups", "CapEff", "CapPrm")}


def owner(path: Path) -> tuple[int, int]:
    status = path.stat()
    return status.st_uid, status.st_gid


# -- a thread's rights ------------------------------------------------------------------------------------------------


@root_alone
def test_a_thread_takes_over_an_accounts_rights_and_gives_them_back_and_no_other_thread_notices() -> None:
    own = rights()

    def work() -> list[dict[str, str]]:
        seen = []
        for account in (FIRST, SECOND, None, SECOND, None):
            act_as(account)
            seen.append(rights())
        return seen

    first, second, back, again, at_last = in_a_thread(work)
    assert (first["Uid"], first["Gid"], first["Groups"]) == ("0 0 0 4321", "0 0 0 4322", "")
    assert (second["Uid"], second["Gid"], second["Groups"]) == ("0 0 0 5321", "0 0 0 5322", "")
    # SETGID and SETUID, to give them back: nothing that opens a file or looks into a process.
    assert int(first["CapEff"], 16) == int(second["CapEff"], 16) == 1 << 6 | 1 << 7
    assert back == at_last == own
    assert again == second
    assert rights() == own


@root_alone
def test_the_kernel_refuses_an_account_what_its_user_may_not(place: Path) -> None:
    (place / "of-root").write_text("x")
    (place / "of-root").chmod(0o600)
    (place / "closed").mkdir(mode=0o700)
    device = place / "device"

    def work() -> None:
        with acting_as(FIRST):
            (place / "mine").write_text("x")
            (place / "mine").chmod(0)
            with pytest.raises(PermissionError):
                (place / "of-root").read_text()
            with pytest.raises(PermissionError):
                (place / "mine").read_text()  # root could
            with pytest.raises(PermissionError):
                (place / "closed" / "x").touch()
            with pytest.raises(PermissionError):
                os.chown(place / "mine", 0, 0)
            with pytest.raises(PermissionError):
                os.mknod(device, stat.S_IFCHR | 0o666, os.makedev(1, 3))
            with pytest.raises(PermissionError):
                Path(f"/proc/{os.getppid()}/environ").read_bytes()
        (place / "of-root").read_text()

    in_a_thread(work)
    assert owner(place / "mine") == (4_321, 4_322)


@root_alone
def test_rights_are_given_back_after_an_error_and_nest(place: Path) -> None:
    def work() -> list[str]:
        with acting_as(FIRST):
            with pytest.raises(ZeroDivisionError):
                run_as(SECOND, lambda: (place / "second").touch() or 1 // 0)
            inner = rights()["Uid"]
        return [inner, rights()["Uid"]]

    assert in_a_thread(work) == ["0 0 0 4321", "0 0 0 0"]
    assert owner(place / "second") == (5_321, 5_322)


@root_alone
async def test_one_thread_of_the_pool_serves_accounts_in_turn_each_with_its_own_rights(
    pool: FilePool, place: Path
) -> None:
    accounts = (FIRST, SECOND, None, FIRST, None, SECOND, SECOND)

    def make(name: str) -> None:
        (place / name).touch()

    for number, account in enumerate(accounts):
        await pool.acting_as(account).run(make, f"{number}", signal=AbortSignal(), workspace="w")
    assert [owner(place / f"{number}") for number in range(len(accounts))] == [
        (0, 0) if account is None else (account.uid, account.gid) for account in accounts
    ]
    assert rights()["Uid"] == "0 0 0 0"


@root_alone
async def test_a_job_whose_rights_cannot_be_had_does_not_run(
    pool: FilePool, place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(_uid: int, _gid: int) -> None:
        raise PermissionError(1, "refused")

    await pool.acting_as(FIRST).run((place / "first").touch, signal=AbortSignal(), workspace="w")
    with monkeypatch.context() as patched:
        patched.setattr("app.sandbox.account._set_ids", refuse)
        with pytest.raises(PermissionError):
            await pool.acting_as(SECOND).run((place / "never").touch, signal=AbortSignal(), workspace="w")
        with pytest.raises(PermissionError):
            await pool.acting_as(FIRST).run((place / "never").touch, signal=AbortSignal(), workspace="w")
        with pytest.raises(PermissionError):
            await pool.run((place / "never").touch, signal=AbortSignal(), workspace="w")
    assert not (place / "never").exists()
    await pool.acting_as(SECOND).run((place / "second").touch, signal=AbortSignal(), workspace="w")
    await pool.run((place / "root").touch, signal=AbortSignal(), workspace="w")
    assert [owner(place / name) for name in ("second", "root")] == [(5_321, 5_322), (0, 0)]


# -- what accounts there are ------------------------------------------------------------------------------------------


def test_nothing_is_done_as_root() -> None:
    for uid, gid in ((0, 1), (1, 0), (2**32 - 1, 1), (1, 2**32 - 1), (-1, 1)):
        with pytest.raises(ValueError, match="nothing is done as"):
            Account(uid, gid)
    if os.geteuid() == 0:
        with pytest.raises(ValueError, match="nothing is done as"):
            account_of(0, 0)
        assert account_of(4_321, 4_322) == FIRST
    else:
        assert account_of(0, 0) is None


def test_an_account_is_named_by_user_or_number() -> None:
    assert find_account("4321:4322") == FIRST
    assert find_account("4294967294") == Account(2**32 - 2, 2**32 - 2)
    assert find_account("nobody").uid == find_account(str(NOBODY)).uid == NOBODY
    for name, said in (
        ("no-such-user", "there is no user no-such-user"),
        ("root", "its user is root"),
        ("0:5", "its user is root"),
        ("5:0", "its group is that of root"),
    ):
        with pytest.raises(ValueError, match=said):
            find_account(name)


@root_alone
def test_the_first_directory_that_is_closed_to_an_account_is_found(tmp_path: Path) -> None:
    deep = tmp_path / "a" / "b" / "c"
    deep.mkdir(parents=True)
    assert obstacle(deep, FIRST) is None
    assert obstacle(tmp_path / "a" / "missing" / "d", FIRST) is None
    (tmp_path / "a" / "b").chmod(0o750)
    assert obstacle(deep, FIRST) == tmp_path / "a" / "b"
    os.chown(tmp_path / "a" / "b", 0, FIRST.gid)
    assert obstacle(deep, FIRST) is None
    deep.chmod(0o700)
    assert obstacle(deep, FIRST) == deep


@root_alone
@pytest.mark.parametrize(
    ("wrapper", "said"),
    [
        (["setpriv", "--bounding-set", "-setuid,-kill"], "without CAP_KILL, CAP_SETUID, which it needs to act as"),
        (["unshare", "--user", "--map-root-user"], "cannot act as user 4321, group 4322"),
    ],
)
def test_a_root_that_cannot_act_as_others_is_told_so(wrapper: list[str], said: str) -> None:
    if subprocess.run([*wrapper, "true"], capture_output=True, check=False).returncode:
        pytest.skip(f"{wrapper[0]} does not do that here")
    script = "from app.sandbox.account import *; require_power_to_act(Account(4321, 4322))"
    ended = subprocess.run(
        [*wrapper, sys.executable, "-c", script],
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(PROJECT), *sys.path])},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert ended.returncode == 1
    assert "ConfigurationError: the service was started as root" in ended.stderr
    assert said in ended.stderr


@root_alone
def test_root_as_it_is_can_act_as_others(monkeypatch: pytest.MonkeyPatch) -> None:
    require_power_to_act(FIRST)
    monkeypatch.setattr("platform.machine", lambda: "vax")
    with pytest.raises(ConfigurationError, match="on this machine"):
        require_power_to_act(FIRST)


# -- programs ---------------------------------------------------------------------------------------------------------


@root_alone
def test_a_program_that_cannot_be_reached_is_copied_with_its_libraries(tmp_path: Path) -> None:
    closed, copies = tmp_path / "home" / "lib", tmp_path / "copies"
    for directory in ("tool/_bin", "tool.libs", "bin"):
        (closed / directory).mkdir(parents=True)
    for program in ("tool/_bin/tool", "bin/alone"):
        (closed / program).write_text("#!/bin/sh\nexit 0\n")
        (closed / program).chmod(0o755)
    (closed / "tool.libs" / "lib.so").write_text("library")
    (tmp_path / "home").chmod(0o700)
    for program, copy in (("tool/_bin/tool", "tool/_bin/tool"), ("bin/alone", "alone")):
        assert not may_run(str(closed / program), FIRST)
        assert provide(str(closed / program), None, copies) == str(closed / program)
        for _ in range(2):  # at each start
            assert provide(str(closed / program), FIRST, copies) == str(copies / copy)
        assert may_run(str(copies / copy), FIRST)
        assert not os.access(str(copies / copy), os.W_OK, effective_ids=True) or owner(copies / copy) == (0, 0)
    assert (copies / "tool.libs" / "lib.so").read_text() == "library"
    assert sorted(path.name for path in copies.rglob("*") if path.is_file()) == ["alone", "lib.so", "tool"]
    assert provide("/bin/sh", FIRST, copies) == "/bin/sh"


@root_alone
def test_every_encoding_is_there_for_an_account_that_cannot_reach_python() -> None:
    script = (
        "import codecs; from app.domain import encodings; from app.sandbox.account import *\n"
        "encodings.load_codecs(); act_as(Account(4321, 4322))\n"
        "for found in encodings._LABELS.values(): codecs.lookup(found.codec)\n"
        "print('all')"
    )
    ended = subprocess.run(
        [sys.executable, "-c", script],
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(PROJECT), *sys.path])},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert ended.stdout == "all\n", ended.stderr


# -- the service itself -----------------------------------------------------------------------------------------------

_SERVICE = """
import ctypes, os, sys
from app.sandbox.account import NOBODY, keep_others_out
if os.geteuid() == 0:
    # Root could look into everything, so what reads is somebody else, and so is what is read, as if started that way.
    os.setgroups([])
    os.setresgid(NOBODY, NOBODY, NOBODY)
    os.setresuid(NOBODY, NOBODY, NOBODY)
    ctypes.CDLL(None).prctl(4, 1, 0, 0, 0)
if sys.argv[1] == "closed":
    keep_others_out()
print("up", flush=True)
sys.stdin.read()
"""


@pytest.mark.parametrize("state", ["open", "closed"])
def test_a_process_of_the_same_user_cannot_look_into_the_service(state: str) -> None:
    how: dict[str, Any] = {"user": NOBODY, "group": NOBODY, "extra_groups": []} if os.geteuid() == 0 else {}
    with subprocess.Popen(
        [sys.executable, "-c", _SERVICE, state],
        env={"PYTHONPATH": os.pathsep.join([str(PROJECT), *sys.path]), "SECRET": "s-4711"},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        cwd="/",
    ) as service:
        assert service.stdout is not None
        assert service.stdout.readline() == b"up\n"
        looked = subprocess.run(
            ["/bin/sh", "-c", f"cd /proc/{service.pid}; cat environ; head -c1 mem; ls -l fd; readlink cwd"],
            capture_output=True,
            check=False,
            **how,
        )
        service.kill()
    assert (b"s-4711" in looked.stdout) is (state == "open")
    assert (b"-> " in looked.stdout) is (state == "open")
    if state == "closed":
        assert looked.stdout in {b"", b"total 0\n"}
