"""What the tiers hold, that the choice between them is made by trying, and that ordinary work goes on inside."""

import json
import os
import platform
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from app.domain.abort import AbortSignal
from app.errors import ErrorCode, ToolError
from app.sandbox import landlock, seccomp
from app.sandbox.base import ProcessSpec
from app.sandbox.local import LocalSandbox
from app.sandbox.namespace import Namespace, find_bwrap
from app.sandbox.probe import find_gaps
from app.sandbox.ripgrep import Ripgrep
from app.sandbox.selection import SandboxMeans, make_confinement, select_sandbox
from tests.sandbox.conftest import Run
from tests.support import docker_profile, without_kernel_sandboxes
from tests.support.processes import descriptors
from tests.support.sandbox_tiers import TIERS, in_every_tier, in_tiers_that_hold
from tests.support.users import NOBODY, directory_for_everybody

pytestmark = pytest.mark.anyio

PROJECT = Path(__file__).parents[2]
PAGE = PROJECT / "docs" / "security.md"
# What a service that is root keeps its commands from in every tier: they are started with `no_new_privs`.
KEPT_FROM_ACCOUNTS = {"Gain privileges by a setuid program"}


# -- what they hold ---------------------------------------------------------------------------------------------------


def documented() -> dict[str, dict[str, bool]]:
    """Return the table of the page: tier → attempt → whether it succeeds."""
    lines = PAGE.read_text().splitlines()
    head = next(number for number, line in enumerate(lines) if line.startswith("| A command tries to"))
    tiers = [cell.strip(" `") for cell in lines[head].split("|")[2:-1]]
    table: dict[str, dict[str, bool]] = {tier: {} for tier in tiers}
    for line in lines[head + 2 :]:
        if not line.startswith("|"):
            break
        attempt, *cells = (cell.strip() for cell in line.split("|")[1:-1])
        for tier, cell in zip(tiers, cells, strict=True):
            assert cell in {"stopped", "**possible**"}
            table[tier][attempt] = cell != "stopped"
    return table


def measured(user: int | None) -> dict[str, dict[str, bool]]:
    """Return what commands of a user really can do; of this process's when it is None."""
    table = attempted(user)
    for tier, why in table.items():
        if isinstance(why, str):
            pytest.skip(f"no tier {tier} here: {why}")
    return table  # type: ignore[return-value]


def attempted(user: int | None, *wrapper: str) -> dict[str, dict[str, bool] | str]:
    """Return what commands can do by tier, or why there is no such tier; `wrapper` is a program to run them with."""
    python, how = sys.executable, {}
    if user is not None:
        python = python_for(user)
        how = {"user": user, "group": user, "extra_groups": []}
    with directory_for_everybody() as directory:
        ended = subprocess.run(
            [*([python, "-B", *wrapper] if wrapper else []), python, "-B", "-m", "tests.support.sandbox_tiers"],
            cwd=directory,
            env={"PATH": os.environ["PATH"], "PYTHONPATH": os.pathsep.join([str(PROJECT), *sys.path])},
            capture_output=True,
            timeout=100,
            check=False,
            **how,
        )
    assert ended.returncode == 0, ended.stderr.decode()
    table: dict[str, dict[str, bool] | str] = json.loads(ended.stdout)
    return table


def python_for(user: int) -> str:
    """Return an interpreter of this version that another user can reach, with this project and its packages."""
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    environment = {"PATH": "/usr/bin:/bin", "PYTHONPATH": os.pathsep.join([str(PROJECT), *sys.path])}
    for candidate in (sys.executable, shutil.which(version, path="/usr/local/bin:/usr/bin")):
        if candidate is None:
            continue
        try:
            subprocess.run(
                [candidate, "-B", "-c", "import structlog, app.sandbox.selection, tests.support.sandbox_tiers"],
                cwd="/",
                env=environment,
                capture_output=True,
                timeout=60,
                check=True,
                user=user,
                group=user,
                extra_groups=[],
            )
        except (OSError, subprocess.CalledProcessError):
            continue
        return candidate
    pytest.skip(f"no {version} with this project that user {user} can reach")


def test_the_documented_table_is_what_commands_of_this_service_really_can_do() -> None:
    table = documented()
    if os.geteuid() == 0:
        table["process"] |= dict.fromkeys(KEPT_FROM_ACCOUNTS, False)
    assert measured(None) == table


def test_the_documented_table_holds_for_an_ordinary_user_too() -> None:
    if os.geteuid() != 0:
        pytest.skip("the tests run as an ordinary user already")
    assert measured(NOBODY) == documented()


@pytest.mark.skipif(not seccomp.supported(), reason="no filter for this architecture")
@pytest.mark.parametrize("user", [None, NOBODY])
def test_under_a_profile_like_dockers_the_tier_is_landlock_and_its_table_holds(
    user: int | None, tmp_path: Path
) -> None:
    if user is not None and os.geteuid() != 0:
        pytest.skip("the tests run as an ordinary user already")
    if landlock.abi() < landlock.LEAST_ABI:
        pytest.skip("no Landlock in this kernel")
    assert attempted(user, docker_profile.__file__)["landlock"] == documented()["landlock"]
    choice = (
        "import asyncio, sys\nfrom pathlib import Path\n"
        "from app.sandbox.selection import SandboxMeans, select_sandbox\n"
        "async def main():\n"
        "    chosen = await select_sandbox(['namespace', 'landlock'], SandboxMeans(Path(sys.argv[1])))\n"
        "    print(chosen.sandbox.report.tier, list(chosen.refused))\n"
        "    await chosen.sandbox.close()\n"
        "asyncio.run(main())\n"
    )
    ended = subprocess.run(
        [sys.executable, docker_profile.__file__, sys.executable, "-c", choice, str(tmp_path)],
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(PROJECT), *sys.path])},
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert (ended.stdout, ended.returncode) == ("landlock ['namespace']\n", 0), ended.stderr


@in_tiers_that_hold
async def test_nothing_of_the_service_is_in_a_command(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SERVICE_SECRET", "s-8731")
    ran = await run(
        f"env; cat /proc/[0-9]*/environ /proc/{os.getpid()}/environ 2>/dev/null; ls -l /proc/self/fd\n"
        "grep -E '^(CapEff|CapPrm|CapInh|NoNewPrivs|Seccomp):' /proc/self/status"
    )
    assert "8731" not in ran.text()
    numbers = {line.split()[8] for line in ran.text().splitlines() if " -> " in line}
    assert numbers == {"0", "1", "2", "3"}  # 3 is what ls reads the directory through
    status = dict(re.findall(r"^(\w+):\s+(\w+)$", ran.text(), re.MULTILINE))
    assert {name: int(value, 16) for name, value in status.items()} == {
        "CapInh": 0,
        "CapPrm": 0,
        "CapEff": 0,
        "NoNewPrivs": 1,
        "Seccomp": 2,
    }


@in_tiers_that_hold
async def test_the_private_directory_is_hidden_inside_a_root_or_there_is_no_command(
    sandbox: LocalSandbox, tmp_path: Path, root: int, run: Run
) -> None:
    # The fixture's private directory is the one above the root; here one below it is private.
    private = tmp_path / "private"
    private.mkdir()
    (private / "key").write_text("secret")
    tier = sandbox.report.tier
    confinement = make_confinement(tier, SandboxMeans(private))
    assert not isinstance(confinement, str)
    other = LocalSandbox(confinement)
    try:
        spec = ProcessSpec(["/bin/bash", "-c", "cat private/key"], root, {"PATH": "/usr/bin:/bin"})
        if tier == "landlock":
            with pytest.raises(ToolError) as refused:
                await other.start(spec)
            assert refused.value.code is ErrorCode.SANDBOX_UNAVAILABLE
        else:
            handle = await other.start(spec)
            assert (await handle.wait()).exit_code == 1
            await handle.close()
    finally:
        await other.close()


@in_tiers_that_hold
async def test_the_whole_disk_is_no_root(sandbox: LocalSandbox) -> None:
    fd = os.open("/", os.O_PATH | os.O_DIRECTORY)
    try:
        with pytest.raises(ToolError) as refused:
            await sandbox.start(ProcessSpec(["/bin/true"], fd, {}))
    finally:
        os.close(fd)
    assert refused.value.code is ErrorCode.SANDBOX_UNAVAILABLE


@in_tiers_that_hold
async def test_what_a_command_makes_in_its_temporary_directory_is_gone_with_it(run: Run, tmp_path: Path) -> None:
    ran = await run(
        'd=$(mktemp -d) && mkdir $d/sub && echo x > $d/sub/f && chmod 0 $d/sub && case $d in "$TMPDIR"/*) echo made;; esac'
    )
    assert ran.text() == "made\n"
    assert os.listdir(tmp_path) == []  # noqa: PTH208 - a loop of events runs
    assert (await run("mktemp -u")).outcome.exit_code == 0


@in_tiers_that_hold
async def test_a_root_below_tmp_and_one_with_an_odd_name_are_written_for_real(
    sandbox: LocalSandbox, tmp_path: Path
) -> None:
    odd = tmp_path / "with blank\n--ro-bind\ttab\\ é"
    odd.mkdir()
    fd = os.open(odd, os.O_PATH | os.O_DIRECTORY)
    try:
        handle = await sandbox.start(ProcessSpec(["/bin/bash", "-c", "pwd > here"], fd, {"PATH": "/usr/bin:/bin"}))
        assert (await handle.wait()).exit_code == 0
        await handle.close()
    finally:
        os.close(fd)
    assert (odd / "here").read_text() == f"{odd}\n"


async def test_a_wrapper_that_fails_is_no_exit_of_the_command(tmp_path: Path, root: int) -> None:
    bwrap = find_bwrap(None)
    if bwrap is None:
        pytest.skip("no bubblewrap")
    sandbox = LocalSandbox(Namespace(bwrap))
    handle = await sandbox.start(ProcessSpec([str(tmp_path / "nothing")], root, {}))
    with pytest.raises(ToolError) as failed:
        await handle.wait()
    assert failed.value.code is ErrorCode.SANDBOX_UNAVAILABLE
    await handle.close()
    await sandbox.close()


# -- ordinary work ----------------------------------------------------------------------------------------------------

WORK = {
    "git": "git init -q . && git -c user.name=a -c user.email=a@b commit -q --allow-empty -m x && git log --oneline | wc -l",
    "gcc": "printf 'int main(void){return 7;}' > a.c && gcc -o a a.c && { ./a; echo $?; }",
    "make": "printf 'all: a b c\\n%%:\\n\\t@sleep 0.05; echo $@ > $@\\n' > Makefile && make -s -j4 && cat a b c | wc -l",
    "node": 'node -e \'console.log(require("child_process").execSync("echo 1").toString().trim())\'',
    "sqlite3": "sqlite3 d.db 'pragma journal_mode=wal; create table t(x); insert into t values(1); select count(*) from t'",
    "sort": "seq 100000 | sort -r --buffer-size=100K | tail -1",
    "bash": "cat <<X <(echo 1) | wc -l\nX",
}
EXPECTED = {"git": "1", "gcc": "7", "make": "3", "node": "1", "sqlite3": "wal\n1", "sort": "1", "bash": "1"}


@in_every_tier
@pytest.mark.parametrize("program", sorted(WORK))
async def test_ordinary_work_goes_on(run: Run, program: str) -> None:
    if shutil.which(program, path="/usr/local/bin:/usr/bin:/bin") is None:
        pytest.skip(f"no {program} on this machine")
    ran = await run(WORK[program])
    assert ran.outcome.exit_code == 0, ran.text("stderr")
    assert ran.text().strip() == EXPECTED[program]


@in_every_tier
async def test_a_virtual_environment_with_sqlite_and_threads_and_processes_works(run: Run) -> None:
    script = (
        "import sqlite3, subprocess, sys, tempfile, threading, asyncio, socket\n"
        "d = sqlite3.connect('p.db'); d.execute('pragma journal_mode=wal'); d.execute('create table t(x)'); d.commit()\n"
        "t = threading.Thread(target=lambda: None); t.start(); t.join()\n"
        "asyncio.run(asyncio.sleep(0)); a, b = socket.socketpair(); a.send(b'x'); tempfile.TemporaryFile().close()\n"
        "print(subprocess.run([sys.executable, '-c', 'print(1)'], capture_output=True, text=True).stdout.strip())\n"
    )
    ran = await run(f"{sys.executable} -m venv --without-pip v && cat > s.py <<'X'\n{script}X\nv/bin/python s.py")
    assert (ran.outcome.exit_code, ran.text()) == (0, "1\n"), ran.text("stderr")


@in_every_tier
async def test_pip_installs_a_wheel_from_the_workspace(run: Run, tmp_path: Path) -> None:
    info = "greeting-1.0.dist-info"
    with zipfile.ZipFile(tmp_path / "greeting-1.0-py3-none-any.whl", "w") as wheel:
        wheel.writestr("greeting.py", "print('hello')\n")
        wheel.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\nName: greeting\nVersion: 1.0\n")
        wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr(f"{info}/RECORD", f"greeting.py,,\n{info}/METADATA,,\n{info}/WHEEL,,\n{info}/RECORD,,\n")
    ran = await run(
        f"{sys.executable} -m venv --without-pip v && {sys.executable} -m pip --python v/bin/python install -q --no-index "
        "--no-cache-dir --disable-pip-version-check greeting-1.0-py3-none-any.whl && v/bin/python -c 'import greeting'",
        timeout_ms=120_000,
    )
    assert (ran.outcome.exit_code, ran.text()) == (0, "hello\n"), ran.text("stderr")


@in_every_tier
async def test_ripgrep_runs_in_every_tier(sandbox: LocalSandbox, root: int, tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("needle\n")
    outside = tmp_path.parent / f"{tmp_path.name}-outside"
    outside.mkdir()
    (outside / "b.txt").write_text("needle\n")
    said = bytearray()

    async def search(place: str, readable: tuple[str, ...] = ()) -> str:
        said.clear()
        await Ripgrep(sandbox).run(
            ["--no-config", "--files-with-matches", "needle", place],
            directory=root,
            workspace="w",
            signal=AbortSignal(),
            timeout_ms=20_000,
            on_output=lambda _stream, data: said.extend(data),
            readable=readable,
        )
        return said.decode()

    assert await search(".") == "./a.txt\n"
    assert await Ripgrep(sandbox).version() is not None
    assert await search(str(outside), (str(outside),)) == f"{outside}/b.txt\n"
    if sandbox.report.tier != "process":
        assert "b.txt\n" not in await search(str(outside))


# -- the choice -------------------------------------------------------------------------------------------------------


async def test_a_sandbox_that_holds_nothing_is_found_out(tmp_path: Path) -> None:
    sandbox = LocalSandbox()
    gaps = await find_gaps(sandbox, tmp_path)
    await sandbox.close()
    assert {
        "a file outside the workspace can be read",
        "a file outside the workspace can be changed",
        "a file can be made outside the workspace",
        "a port of this machine can be reached",
        "programs can gain privileges",
        "system calls are not filtered",
        "a command can signal the service",
    } <= set(gaps)
    assert os.listdir(tmp_path) == []  # noqa: PTH208 - a loop of events runs


@pytest.mark.parametrize("tier", [tier for tier in TIERS if tier != "process"])
async def test_a_private_directory_among_the_readable_is_hidden_or_the_tier_is_refused(
    tmp_path: Path, tier: str
) -> None:
    private = tmp_path / "data"
    private.mkdir()
    selection = await select_sandbox([tier], SandboxMeans(private, readable=[tmp_path]))  # type: ignore[list-item]
    if tier == "namespace":
        assert selection.sandbox is not None, selection.refused
        await selection.sandbox.close()
    else:
        assert selection.sandbox is None
        assert selection.refused == {"landlock": "a file outside the workspace can be read"}


async def test_the_strongest_tier_that_holds_is_taken_and_the_others_are_told(tmp_path: Path) -> None:
    fake = tmp_path / "bwrap"
    fake.write_text("#!/bin/sh\necho bwrap: no permission to do that >&2\nexit 1\n")
    fake.chmod(0o755)
    private = tmp_path / "data"
    private.mkdir()
    selection = await select_sandbox(TIERS, SandboxMeans(private, bwrap=fake))
    assert selection.sandbox is not None
    await selection.sandbox.close()
    assert selection.sandbox.report.tier in {"landlock", "process"}
    assert selection.refused["namespace"] == "bwrap: no permission to do that"


@pytest.mark.skipif(not seccomp.supported(), reason="no filter for this architecture")
def test_where_the_kernel_offers_nothing_only_process_is_left(tmp_path: Path) -> None:
    program = (
        "import asyncio, sys\nfrom pathlib import Path\n"
        "from app.sandbox.selection import SandboxMeans, select_sandbox\n"
        "from tests.support.sandbox_tiers import TIERS\n"
        "async def main():\n"
        "    held = await select_sandbox(['namespace', 'landlock'], SandboxMeans(Path(sys.argv[1])))\n"
        "    rest = await select_sandbox(TIERS, SandboxMeans(Path(sys.argv[1])))\n"
        "    print(held.sandbox, rest.sandbox.report.tier, sorted(held.refused))\n"
        "    await rest.sandbox.close()\n"
        "asyncio.run(main())\n"
    )
    ended = subprocess.run(
        [sys.executable, without_kernel_sandboxes.__file__, sys.executable, "-c", program, str(tmp_path)],
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(PROJECT), *sys.path])},
        capture_output=True,
        text=True,
        timeout=240,  # four imports and probes, on a machine that may be ten times slower than most
        check=False,
    )
    assert (ended.stdout, ended.returncode) == ("None process ['landlock', 'namespace']\n", 0), ended.stderr


def test_a_setuid_bubblewrap_is_not_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake = tmp_path / "bwrap"
    fake.write_text("#!/bin/sh\n")
    fake.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert find_bwrap(None) == str(fake)
    assert find_bwrap(str(fake)) == str(fake)
    fake.chmod(0o4755)
    assert find_bwrap(None) != str(fake)
    assert find_bwrap(str(fake)) is None


@pytest.mark.parametrize("machine", ["x86_64", "aarch64"])
@pytest.mark.parametrize("own_namespaces", [True, False])
def test_every_jump_of_the_filter_lands_inside_it(machine: str, own_namespaces: bool) -> None:
    program = seccomp.filter_program(own_namespaces=own_namespaces, machine=machine)
    code = list(seccomp._INSTRUCTION.iter_unpack(program))
    for place, (operation, if_true, if_false, _) in enumerate(code):
        assert place + 1 + max(if_true, if_false) <= len(code) - 1 or operation == seccomp._RETURN
    assert code[-1] == (seccomp._RETURN, 0, 0, seccomp._ALLOW)


def evaluate(program: bytes, number: int, *arguments: int, audit: int) -> int:
    """Run a filter as the kernel does and return its verdict."""
    data = {seccomp._NUMBER: number, seccomp._ARCHITECTURE: audit}
    data |= {seccomp._ARGUMENTS + 8 * index: value & 0xFFFF_FFFF for index, value in enumerate(arguments)}
    code = list(seccomp._INSTRUCTION.iter_unpack(program))
    place = accumulator = 0
    while True:
        operation, if_true, if_false, value = code[place]
        place += 1
        if operation == seccomp._RETURN:
            return int(value)
        if operation == seccomp._LOAD:
            accumulator = data.get(value, 0)
            continue
        holds = {
            seccomp._EQUAL: accumulator == value,
            seccomp._AT_LEAST: accumulator >= value,
            seccomp._ANY_BIT: bool(accumulator & value),
        }[operation]
        place += if_true if holds else if_false


@pytest.mark.parametrize("machine", ["x86_64", "aarch64"])
def test_the_filter_looks_at_numbers_and_arguments(machine: str) -> None:
    target = seccomp._MACHINES[machine]
    n = target.numbers
    held = seccomp.filter_program(own_namespaces=True, machine=machine)
    bare = seccomp.filter_program(own_namespaces=False, machine=machine)
    allow, denied, absent, family = seccomp._ALLOW, 0x50001, 0x50026, 0x50061

    def ask(program: bytes, name: str, *arguments: int) -> int:
        return evaluate(program, n[name], *arguments, audit=target.audit)

    assert [ask(held, "socket", number) for number in (1, 2, 10, 16, 17, 40, 38)] == [allow] * 4 + [family] * 3
    assert [ask(bare, "socket", number) for number in (1, 2, 10, 16)] == [denied] * 4
    assert [ask(bare, "socketpair", number) for number in (1, 2)] == [allow, family]
    assert [ask(bare, "prlimit64", pid) for pid in (0, 77)] == [allow, denied]
    assert [ask(held, "prlimit64", pid) for pid in (0, 77)] == [allow, allow]
    assert [ask(bare, "setpriority", 0, who) for who in (0, 77)] == [allow, denied]
    assert [ask(held, "clone", flags) for flags in (0x1200011, 0x3D0F00, 0x10000011)] == [allow, allow, denied]
    assert [ask(held, "ioctl", 0, request) for request in (0x5401, 0x5412, 0x541C)] == [allow, denied, denied]
    assert [ask(held, name) for name in ("clone3", "io_uring_setup")] == [absent] * 2
    assert [ask(held, name) for name in ("mount", "unshare", "ptrace", "bpf", "keyctl")] == [denied] * 5
    assert (ask(held, "shmget"), ask(bare, "shmget")) == (allow, denied)
    assert evaluate(held, 0, audit=0x40000003) == absent  # another architecture
    if target.has_x32:
        assert evaluate(held, 0x40000000 | n["mount"], audit=target.audit) == absent


def test_another_architecture_has_no_filter() -> None:
    assert not seccomp.supported("riscv64")
    assert seccomp.supported() == (platform.machine() in {"x86_64", "aarch64"})


def test_landlock_keeps_nothing_open_once_closed(tmp_path: Path) -> None:
    if landlock.abi() < landlock.LEAST_ABI or not seccomp.supported():
        pytest.skip("no Landlock in this kernel")
    before = descriptors()
    confinement = landlock.Landlock()
    assert descriptors() > before
    confinement.close()
    confinement.close()
    assert descriptors() == before
