"""run_command: output, limits, aborts and cancellation of one command."""

import asyncio
import os
import resource
import signal as signals
import time
import uuid
from collections.abc import Callable

import pytest

from app.domain.abort import Aborted, AbortReason, AbortSignal
from app.domain.events import OutputStream
from app.errors import ToolError
from app.sandbox.base import ProcessSpec
from app.sandbox.local import LocalSandbox
from app.sandbox.process import CommandOutcome, run_command
from tests.sandbox.conftest import Ran, Run, link_of, only_root_sees_the_warden
from tests.support.processes import children, descriptors, living, until
from tests.support.sandbox_tiers import in_every_tier

pytestmark = pytest.mark.anyio


async def stop_when_up(run: Run, command: str, *, grace_ms: int = 100) -> tuple[Ran, float]:
    """Abort `command` once it printed `up`; return how it ended and the seconds that took."""
    signal, seen, stopped = AbortSignal(), bytearray(), [0.0]

    def look(_stream: OutputStream, data: bytes) -> None:
        seen.extend(data)
        if b"up\n" in seen and not stopped[0]:
            stopped[0] = time.monotonic()
            signal.abort(AbortReason.CANCELLED)

    ran = await run(command, signal=signal, on_output=look, grace_ms=grace_ms)
    assert stopped[0], ran
    return ran, time.monotonic() - stopped[0]


@in_every_tier
async def test_a_command_ends_with_its_code_and_its_output(run: Run) -> None:
    ran = await run("printf out; printf err >&2; exit 3")
    assert ran.outcome == CommandOutcome(
        exit_code=3,
        signal=None,
        timed_out=False,
        aborted=False,
        abort_reason=None,
        stdout_bytes=3,
        stderr_bytes=3,
        duration_ms=ran.outcome.duration_ms,
    )
    assert ran.text("stdout") == "out"
    assert ran.text("stderr") == "err"


@in_every_tier
async def test_a_death_by_a_signal_is_told_as_a_signal_or_as_the_shells_code(run: Run, sandbox: LocalSandbox) -> None:
    ran = await run("echo before; kill -SEGV $$; sleep 60")
    nested = sandbox.report.tier == "namespace"
    assert (ran.outcome.exit_code, ran.outcome.signal) == ((139, None) if nested else (None, 11))
    assert ran.text() == "before\n"


@pytest.mark.parametrize(("name", "number"), [("SEGV", 11), ("KILL", 9), ("TERM", 15)])
async def test_a_command_that_dies_by_a_signal_ends_at_once_with_its_name(run: Run, name: str, number: int) -> None:
    ran = await run(f"echo before; kill -{name} $$; sleep 60")
    assert (ran.outcome.exit_code, ran.outcome.signal, ran.outcome.signal_name) == (None, number, f"SIG{name}")
    assert not ran.outcome.timed_out
    assert ran.text() == "before\n"
    assert ran.outcome.duration_ms < 5000


@in_every_tier
async def test_standard_input_is_at_its_end(run: Run) -> None:
    ran = await run("wc -c; read -r line || echo nothing")
    assert ran.text() == "0\nnothing\n"


@in_every_tier
async def test_a_background_child_that_holds_the_pipes_does_not_hold_the_command(run: Run) -> None:
    ran = await run("sleep 60 & echo started")
    assert ran.text() == "started\n"
    assert ran.outcome.exit_code == 0
    assert ran.outcome.duration_ms < 2000


@in_every_tier
async def test_what_a_command_wrote_before_it_exited_is_read_although_another_writes_on(run: Run) -> None:
    ran = await run("(while :; do echo noise; done) & sleep 0.05; echo END >&2; exit 4")
    assert ran.outcome.exit_code == 4
    assert ran.text("stderr") == "END\n"
    assert ran.outcome.stdout_bytes == len(ran.text().encode())


async def test_streams_are_read_side_by_side(run: Run) -> None:
    ran = await run("head -c 500000 /dev/zero >&2; echo out; head -c 500000 /dev/zero >&2")
    assert (ran.outcome.stdout_bytes, ran.outcome.stderr_bytes) == (4, 1_000_000)


async def test_output_keeps_the_order_in_which_it_was_read(run: Run) -> None:
    ran = await run("for i in 1 2 3; do echo o$i; sleep 0.03; echo e$i >&2; sleep 0.03; done")
    assert b"".join(data for _, data in ran.chunks) == b"o1\ne1\no2\ne2\no3\ne3\n"


async def test_output_comes_while_the_command_runs(run: Run) -> None:
    seen: list[float] = []
    started = time.monotonic()
    await run("echo first; sleep 0.5", on_output=lambda _s, _d: seen.append(time.monotonic() - started))
    assert len(seen) == 1
    assert seen[0] < 0.4


@in_every_tier
async def test_a_time_limit_ends_a_command_and_keeps_its_output(run: Run) -> None:
    ran = await run("echo first; sleep 60; echo late", timeout_ms=1000)
    assert ran.outcome.timed_out
    assert not ran.outcome.aborted
    assert ran.text() == "first\n"
    assert 1000 <= ran.outcome.duration_ms < 5000


@in_every_tier
async def test_a_command_may_use_its_grace_to_say_goodbye(run: Run) -> None:
    ran, _ = await stop_when_up(run, "trap 'echo bye; exit 7' TERM; echo up; while :; do sleep 0.01; done")
    assert ran.text() == "up\nbye\n"
    assert ran.outcome.aborted
    assert ran.outcome.exit_code == 7


@in_every_tier
async def test_children_have_the_grace_too_when_their_shell_died_at_once(run: Run, sandbox: LocalSandbox) -> None:
    child = "trap 'sleep 0.05; echo bye; exit 0' TERM; echo up; while :; do sleep 0.01; done"
    ran, _ = await stop_when_up(run, f'bash -c "{child}" & trap - TERM; sleep 60', grace_ms=2000)
    # A wrapper tells of a signal as a shell does.
    nested = sandbox.report.tier == "namespace"
    assert (ran.outcome.exit_code, ran.outcome.signal_name) == ((143, None) if nested else (None, "SIGTERM"))
    assert "bye" in ran.text()


@in_every_tier
async def test_the_grace_is_over_when_everything_is_gone(run: Run) -> None:
    _, seconds = await stop_when_up(run, "echo up; sleep 60", grace_ms=15_000)
    assert seconds < 10


@in_every_tier
@pytest.mark.parametrize("ignoring", ["echo up; sleep 60", "bash -c 'echo up; sleep 60' & wait; sleep 60"])
async def test_a_command_that_ignores_sigterm_is_killed_after_the_grace(run: Run, ignoring: str) -> None:
    ran, seconds = await stop_when_up(run, f"trap '' TERM; {ignoring}")
    assert ran.outcome.signal_name == "SIGKILL"  # the wrapper, where there is one, goes with it
    assert ran.text() == "up\n"
    assert 0.1 <= seconds < 5


@in_every_tier
async def test_a_stopped_command_is_ended_by_its_time_limit(run: Run) -> None:
    ran = await run("echo up; kill -STOP $$; sleep 60", timeout_ms=1000)
    assert ran.outcome.timed_out
    assert ran.text() == "up\n"
    assert ran.outcome.duration_ms < 5000


@in_every_tier
async def test_an_abort_ends_a_command_and_keeps_its_output(run: Run) -> None:
    signal = AbortSignal()
    ran = await run(
        "echo first; sleep 60", signal=signal, on_output=lambda _s, _d: signal.abort(AbortReason.INTERRUPTED)
    )
    assert ran.outcome.aborted
    assert ran.outcome.abort_reason is AbortReason.INTERRUPTED
    assert not ran.outcome.timed_out
    assert ran.text() == "first\n"
    assert ran.outcome.duration_ms < 1500


@in_every_tier
async def test_an_abort_before_the_start_starts_nothing(run: Run) -> None:
    signal = AbortSignal()
    signal.abort(AbortReason.CANCELLED)
    with pytest.raises(Aborted):
        await run("touch started", signal=signal)
    assert (await run("ls")).text() == ""


async def test_a_command_that_exited_before_the_abort_reached_it_has_its_real_result(
    run: Run, sandbox: LocalSandbox
) -> None:
    signal, up = AbortSignal(), asyncio.Event()
    running = asyncio.ensure_future(run("echo up; sleep 0.1; exit 5", signal=signal, on_output=lambda _s, _d: up.set()))
    await up.wait()
    pid = link_of(sandbox)._process.pid
    (command,) = children(pid)
    os.kill(pid, signals.SIGSTOP)
    try:
        await until(lambda: children(pid)[command] == "Z")
        signal.abort(AbortReason.CANCELLED)
        await asyncio.sleep(0.02)  # the request to end is on its way to a warden that has not seen the exit either
        assert not running.done()
    finally:
        os.kill(pid, signals.SIGCONT)
    outcome = (await running).outcome
    assert (outcome.exit_code, outcome.aborted, outcome.abort_reason) == (5, False, None)


async def test_an_abort_near_the_exit_is_either_or(run: Run) -> None:
    loop = asyncio.get_running_loop()
    delay = 0.005
    kinds = []
    for _ in range(40):
        signal = AbortSignal()
        loop.call_later(delay, signal.abort, AbortReason.CANCELLED)
        ran = await run("echo b >> b; exit 0", signal=signal)
        assert ran.outcome.aborted or ran.outcome.exit_code == 0
        kinds.append(ran.outcome.aborted)
        delay *= 1.5 if ran.outcome.aborted else 0.7  # so the aborts stay around the exit, however fast the machine is
    assert set(kinds) == {True, False}, kinds


async def test_a_slow_reader_of_the_output_stops_the_command(run: Run) -> None:
    room = asyncio.Event()
    taken = 0

    async def wait_for_room() -> None:
        await room.wait()

    def take(_stream: OutputStream, data: bytes) -> object:
        nonlocal taken
        taken += len(data)
        return None if room.is_set() else wait_for_room()

    running = asyncio.ensure_future(run("head -c 3000000 /dev/zero; echo done >&2", on_output=take))  # type: ignore[arg-type]
    done, _ = await asyncio.wait({running}, timeout=0.3)
    assert not done
    assert 0 < taken <= 65_536
    room.set()
    ran = await asyncio.wait_for(running, 10)
    assert (ran.outcome.stdout_bytes, ran.outcome.exit_code, taken) == (3_000_000, 0, 3_000_005)


async def test_a_future_that_others_wait_for_too_is_waited_for_and_never_cancelled(run: Run) -> None:
    room: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    ran = await run("echo out; sleep 60", timeout_ms=100, on_output=lambda _s, _d: room)
    assert ran.outcome.timed_out
    assert not room.done()


@pytest.mark.parametrize("ends_by", ["time limit", "abort", "itself"])
async def test_a_reader_that_never_returns_holds_neither_time_limit_nor_abort_nor_result(
    run: Run, ends_by: str
) -> None:
    signal, tasks = AbortSignal(), asyncio.all_tasks()
    mark = f"mark-{uuid.uuid4().hex}"
    ended: list[float] = []

    async def never() -> None:
        await asyncio.Event().wait()

    async def watch() -> None:
        await asyncio.sleep(0.1)
        await until(lambda: living(mark) == [])
        ended.append(time.monotonic())

    rest = "" if ends_by == "itself" else f"; exec -a {mark} sleep 60"
    if ends_by == "abort":
        asyncio.get_running_loop().call_later(0.3, signal.abort, AbortReason.CANCELLED)
    started = time.monotonic()
    watching = asyncio.ensure_future(watch())
    ran = await run(
        f"echo one; echo two >&2{rest}",
        timeout_ms=300 if ends_by == "time limit" else 20_000,
        signal=signal,
        on_output=lambda _s, _d: never(),
    )
    await watching
    assert sorted(ran.chunks) == [("stderr", b"two\n"), ("stdout", b"one\n")]
    assert ended[0] - started < 1.0, "the command itself ends on time"
    assert asyncio.all_tasks() == tasks
    assert time.monotonic() - started < 4.0


async def test_an_error_of_the_reader_ends_the_command_and_is_raised(run: Run) -> None:
    mark = f"mark-{uuid.uuid4().hex}"

    def fail(_stream: OutputStream, _data: bytes) -> None:
        raise LookupError("reader")

    with pytest.raises(LookupError, match="reader"):
        async with asyncio.timeout(5):
            await run(f"echo x; exec -a {mark} sleep 60", on_output=fail)
    assert living(mark) == []


async def test_an_error_in_a_delivery_ends_the_command_and_is_raised(run: Run) -> None:
    async def fail() -> None:
        raise LookupError("delivery")

    with pytest.raises(LookupError, match="delivery"):
        async with asyncio.timeout(5):
            await run("echo x; sleep 60", on_output=lambda _s, _d: fail())


@in_every_tier
async def test_a_cancelled_caller_leaves_no_process_and_no_descriptor(run: Run) -> None:
    mark = f"mark-{uuid.uuid4().hex}"
    await run("true")
    before = descriptors()
    for moment in (0.0, 0.001, 0.003, 0.2):
        up = asyncio.Event()
        running = asyncio.ensure_future(
            run(
                f"(setsid env -i bash -c 'exec -a {mark} sleep 60' &); exec -a {mark} bash -c 'echo up; sleep 60; :'",
                on_output=lambda _s, _d, up=up: up.set(),  # type: ignore[misc]
            )
        )
        if moment == 0.2:
            await up.wait()
        await asyncio.sleep(moment)
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
        await run("true")  # behind it in the warden's queue, so what was asked for is done
        assert living(mark) == []
        assert descriptors() == before


@in_every_tier
async def test_many_commands_leak_neither_descriptors_nor_zombies(run: Run, sandbox: LocalSandbox) -> None:
    await run("true")
    before = descriptors()
    for _ in range(25):
        await asyncio.gather(*(run("(sleep 0.001 &); echo x; exit 1") for _ in range(8)))
    assert descriptors() == before
    assert children(link_of(sandbox)._process.pid) == {}


@in_every_tier
@only_root_sees_the_warden
async def test_many_commands_leave_no_descriptor_open_in_the_warden(run: Run, sandbox: LocalSandbox) -> None:
    await run("true")
    pid = link_of(sandbox)._process.pid
    before = descriptors(pid)
    for _ in range(5):
        await asyncio.gather(*(run("exit 1") for _ in range(8)))
        with pytest.raises(ToolError):
            await run(["/nonexistent"])
    assert descriptors(pid) == before


async def test_a_gigabyte_of_output_costs_no_memory(
    run: Run, sandbox: LocalSandbox, spec: Callable[[str], ProcessSpec]
) -> None:
    await run("head -c 10000000 /dev/zero | wc -c")
    taken, last = 0, b""

    def count(_stream: OutputStream, data: bytes) -> None:
        nonlocal taken, last
        taken += len(data)
        last = data

    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    outcome = await run_command(
        sandbox,
        spec("head -c 1000000000 /dev/zero; echo END"),
        signal=AbortSignal(),
        timeout_ms=60_000,
        on_output=count,
    )
    assert outcome.stdout_bytes == taken == 1_000_000_004
    assert last.endswith(b"END\n")
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 10_000


async def test_a_command_at_full_speed_does_not_hold_up_the_loop(run: Run) -> None:
    gaps: list[float] = []
    stop = asyncio.Event()

    async def tick() -> None:
        while not stop.is_set():
            before = time.monotonic()
            await asyncio.sleep(0.001)
            gaps.append(time.monotonic() - before)

    ticking = asyncio.ensure_future(tick())
    await run("head -c 200000000 /dev/zero")
    stop.set()
    await ticking
    assert sorted(gaps)[int(len(gaps) * 0.95)] < 0.05
