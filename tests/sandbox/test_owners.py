"""Commands of accounts: whom they run as in every tier, whose files they make, and that none survives."""

import asyncio
import os
import re
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import pytest

from app.domain.abort import AbortReason, AbortSignal
from app.errors import ToolError
from app.sandbox import local
from app.sandbox.account import Account, may_run
from app.sandbox.base import ProcessSpec, Tier
from app.sandbox.environment import command_environment
from app.sandbox.local import LocalSandbox
from app.sandbox.probe import find_gaps
from app.sandbox.process import CommandOutcome, run_command
from app.sandbox.ripgrep import Ripgrep, installed_ripgrep
from tests.support.processes import eventually, living, until
from tests.support.sandbox_tiers import TIERS, make_sandbox
from tests.support.users import NOBODY

pytestmark = [pytest.mark.anyio, pytest.mark.skipif(os.geteuid() != 0, reason="only root acts as others")]

DEFAULT, OTHER = Account(NOBODY, NOBODY), Account(4_321, 4_322)
in_every_tier = pytest.mark.parametrize("sandbox", TIERS, indirect=True)

Run = Callable[..., Awaitable[tuple[CommandOutcome, str]]]


@pytest.fixture
async def sandbox(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[LocalSandbox]:
    """A sandbox whose commands run as nobody unless they say otherwise."""
    private = tmp_path / "private"
    private.mkdir(mode=0o711)
    tier: Tier = getattr(request, "param", "process")
    made = make_sandbox(tier, private, DEFAULT)
    yield made
    await made.close()


@pytest.fixture
def root_of(tmp_path: Path) -> Callable[[Account], Path]:
    def make(account: Account) -> Path:
        root = tmp_path / f"root-{account.uid}"
        if not root.exists():
            root.mkdir(mode=0o700)
            os.chown(root, account.uid, account.gid)
        return root

    return make


@pytest.fixture
def run(sandbox: LocalSandbox, root_of: Callable[[Account], Path]) -> Run:
    async def call(
        command: str, account: Account | None = None, *, signal: AbortSignal | None = None, timeout_ms: int = 20_000
    ) -> tuple[CommandOutcome, str]:
        said = bytearray()
        root = root_of(account or DEFAULT)
        fd = os.open(root, os.O_PATH | os.O_DIRECTORY)
        try:
            env = command_environment(str(root), {}, account or DEFAULT)
            outcome = await run_command(
                sandbox,
                ProcessSpec(["/bin/bash", "-c", command], fd, env, account=account),
                signal=signal or AbortSignal(),
                timeout_ms=timeout_ms,
                on_output=lambda _stream, data: said.extend(data),
            )
        finally:
            os.close(fd)
        return outcome, said.decode()

    return call


IDENTITY = "id -u; id -g; grep -E '^(Uid|Gid|Groups|Cap...|NoNewPrivs):' /proc/self/status; echo $USER"


@in_every_tier
@pytest.mark.parametrize("account", [None, OTHER])
async def test_a_command_is_its_account_and_nothing_else_for_good(run: Run, account: Account | None) -> None:
    uid, gid = (OTHER.uid, OTHER.gid) if account else (NOBODY, NOBODY)
    outcome, said = await run(IDENTITY, account)
    assert outcome.exit_code == 0, said
    assert said.split()[:2] == [str(uid), str(gid)]
    status = {name: value.split() for name, value in re.findall(r"^(\w+):[ \t]*(.*)$", said, re.MULTILINE)}
    assert status["Uid"] == [str(uid)] * 4
    assert status["Gid"] == [str(gid)] * 4
    assert status["NoNewPrivs"] == ["1"]
    assert {name: int(value[0], 16) for name, value in status.items() if name.startswith("Cap")} == {
        "CapInh": 0,
        "CapPrm": 0,
        "CapEff": 0,
        "CapBnd": 0,
        "CapAmb": 0,
    }
    assert set(status["Groups"]) <= {str(gid)}
    assert said.split()[-1] == ("nobody" if account is None else str(OTHER.uid))


@in_every_tier
async def test_what_a_command_makes_is_its_accounts(run: Run, root_of: Callable[[Account], Path]) -> None:
    for account in (DEFAULT, OTHER):
        outcome, said = await run("mkdir d && echo x > d/f && mktemp > name && chmod 4755 d/f", account)
        assert outcome.exit_code == 0, said
        for path in root_of(account).rglob("*"):
            assert (path.stat().st_uid, path.stat().st_gid) == (account.uid, account.gid)
        assert sorted(path.name for path in root_of(account).iterdir()) == ["d", "name"]


@in_every_tier
async def test_a_command_cannot_get_at_another_accounts_files_or_processes(
    run: Run, root_of: Callable[[Account], Path], sandbox: LocalSandbox
) -> None:
    (root_of(OTHER) / "secret").write_text("s-1234")
    fd = os.open(root_of(OTHER), os.O_PATH | os.O_DIRECTORY)
    handle = await sandbox.start(
        ProcessSpec(
            ["/bin/bash", "-c", "echo $$; sleep 60"], fd, {"PATH": "/usr/bin:/bin", "S": "s-1234"}, account=OTHER
        )
    )
    os.close(fd)
    try:
        _, said = await run(
            f"cat {root_of(OTHER)}/secret; cat /proc/{handle.pid}/environ; kill -9 {handle.pid} && echo killed"
        )
        assert "s-1234" not in said
        assert "killed" not in said
    finally:
        await handle.close()


@in_every_tier
async def test_a_command_finds_no_secret_of_the_service(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SERVICE_SECRET", "s-8731")
    _, said = await run(
        f"env; cat /proc/[0-9]*/environ /proc/{os.getpid()}/environ /proc/$PPID/environ; cat /proc/[0-9]*/cmdline;"
        f"head -c 1 /proc/{os.getpid()}/mem && echo memory; ls /proc/{os.getpid()}/fd /proc/$PPID/fd && echo descriptors;"
        "ls -l /proc/self/fd"
    )
    assert "8731" not in said
    assert "memory\n" not in said
    assert "\ndescriptors\n" not in said or "namespace" in said
    numbers = {line.split()[8] for line in said.splitlines() if " -> " in line}
    assert numbers == {"0", "1", "2", "3"}  # 3 is what ls reads the directory through


@in_every_tier
@pytest.mark.parametrize("account", [None, OTHER])
async def test_no_descendant_of_an_account_survives(run: Run, account: Account | None) -> None:
    mark = f"toolcrib-owner-{os.urandom(4).hex()}"
    escapes = (
        f"setsid bash -c 'trap \"\" TERM; exec -a {mark} sleep 300' & (setsid env -i bash -c 'exec -a {mark} sleep 300' &) &"
        f"bash -c 'exec -a {mark} sleep 300' & "
    )
    outcome, _ = await run(f"{escapes} sleep 0.2; exit 0", account)
    assert outcome.exit_code == 0
    assert living(mark) == []
    outcome, _ = await run(f"{escapes} sleep 300", account, timeout_ms=700)
    assert outcome.timed_out
    assert living(mark) == []
    signal = AbortSignal()
    said = run(f"{escapes} echo > up; sleep 300", account, signal=signal)
    running = asyncio.ensure_future(said)
    await until(lambda: len(living(mark)) >= 3)
    signal.abort(AbortReason.CANCELLED)
    outcome, _ = await running
    assert outcome.aborted
    assert living(mark) == []


async def test_two_accounts_run_side_by_side_and_one_that_kills_its_warden_harms_only_itself(
    run: Run, sandbox: LocalSandbox, root_of: Callable[[Account], Path]
) -> None:
    fd = os.open(root_of(DEFAULT), os.O_PATH | os.O_DIRECTORY)
    handle = await sandbox.start(ProcessSpec(["/bin/sleep", "300"], fd, {}))
    os.close(fd)
    try:
        await run("true", OTHER)
        with pytest.raises(ToolError, match="was killed while this command ran"):
            await run("kill -9 $PPID; sleep 300", OTHER)
        outcome, said = await run("id -u", OTHER)
        assert (outcome.exit_code, said) == (0, f"{OTHER.uid}\n")
        assert not is_gone(handle.pid)
    finally:
        await handle.close()
    assert eventually(lambda: is_gone(handle.pid))


def is_gone(pid: int) -> bool:
    return not Path(f"/proc/{pid}").exists()


async def test_wardens_without_commands_make_room_for_others(
    run: Run, sandbox: LocalSandbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(local, "_MOST_IDLE", 2)
    started: dict[Account | None, int] = {}
    for uid in (5_001, 5_002, 5_003, 5_004, 5_003):
        outcome, _ = await run("true", Account(uid, uid))
        assert outcome.exit_code == 0
        started |= {account: link._process.pid for account, link in sandbox._links.items()}
    kept = {Account(5_004, 5_004), Account(5_003, 5_003)}
    assert set(sandbox._links) == kept
    for account, pid in started.items():
        assert (warden_of(pid) == f"{account.uid} {account.gid}" if account else False) is (account in kept)


def warden_of(pid: int) -> str | None:
    """Return the user and the group that a warden was started for; None when it has gone."""
    try:
        return " ".join(Path(f"/proc/{pid}/cmdline").read_text().split("\0")[-3:]).strip()
    except (FileNotFoundError, ProcessLookupError):
        return None


@in_every_tier
async def test_the_probe_and_ripgrep_work_as_an_account(sandbox: LocalSandbox, tmp_path: Path) -> None:
    gaps = await find_gaps(sandbox, tmp_path / "private", DEFAULT)
    if sandbox.report.tier == "process":
        # What it does not hold back it does not hold back for the account either; root's are another matter.
        assert "a file outside the workspace can be read" in gaps
        assert "a file can be made outside the workspace" in gaps
        assert "a command can read the service's environment" not in gaps
    else:
        assert gaps == []
    assert list((tmp_path / "private").iterdir()) == []
    installed = installed_ripgrep()
    assert installed is not None
    # Where the account cannot pass the directories on the way to this checkout, the sandbox was made with a copy.
    copied = tmp_path / "private-programs" / Path(installed).name
    program = str(copied) if copied.exists() else installed
    if may_run(program, DEFAULT):
        assert await Ripgrep(sandbox, program=program).version(DEFAULT) is not None
    else:
        assert sandbox.report.tier == "process", "the others are made with what they need"
    assert "user" not in sandbox.report.missing
