"""bash: a real shell in a real directory."""

import asyncio
import uuid
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from app.domain.abort import AbortReason, AbortSignal
from app.domain.tool_call import ToolResult
from app.domain.workspace import WorkspaceOptions
from app.errors import ErrorCode, ToolError
from app.sandbox.base import SandboxReport
from app.sandbox.file_pool import FilePool
from app.sandbox.local import LocalSandbox
from app.tools.base import OutputDelta, ToolUpdate
from app.tools.bash import BashTool, bash_definition
from app.tools.environment import ToolEnvironment
from app.tools.file_mutation_queue import FileMutationQueue
from tests.support.processes import descriptors, living

pytestmark = pytest.mark.anyio

Make = Callable[..., BashTool]


@pytest.fixture
def workspace(tmp_path: Path) -> Path:
    root = tmp_path / "ws"
    root.mkdir()
    return root


@pytest.fixture
async def make(workspace: Path) -> AsyncIterator[Make]:
    """Return the tool of a workspace with these options for bash, by their names on the wire."""
    sandbox, files = LocalSandbox(), FilePool()

    def tool(*, containment: str = "workspace", output_url: bool = True, **options: Any) -> BashTool:
        return BashTool(
            ToolEnvironment(
                cwd=str(workspace),
                options=WorkspaceOptions.from_json({"bash": options, "containment": containment}),
                sandbox=sandbox,
                files=files,
                mutations=FileMutationQueue(),
                output_url=(lambda call: f"/v1/calls/{call}/output") if output_url else None,
            )
        )

    yield tool
    await sandbox.close()
    files.close()


async def failure(tool: BashTool, **arguments: Any) -> ToolError:
    with pytest.raises(ToolError) as error:
        await tool.execute("c1", tool.validate_arguments(tool.prepare_arguments(arguments)))
    return error.value


async def success(tool: BashTool, **arguments: Any) -> ToolResult:
    return await tool.execute("c1", tool.validate_arguments(tool.prepare_arguments(arguments)))


def files_of(workspace: Path) -> list[str]:
    return [path.name for path in workspace.iterdir()]


def text(result: ToolResult) -> str:
    (block,) = result.content
    assert block["type"] == "text"
    return block["text"]


SANDBOX = {**SandboxReport("process", LocalSandbox().report.missing).to_json(), "network": "host"}


async def test_a_command_that_succeeds(make: Make) -> None:
    result = await success(
        make(), command="echo out; sleep 0.05; echo err >&2; sleep 0.05; printf verified", description="check"
    )
    assert result == ToolResult(
        [{"type": "text", "text": "out\nerr\nverified"}],
        {
            "command": "echo out; sleep 0.05; echo err >&2; sleep 0.05; printf verified",
            "exitCode": 0,
            "signal": None,
            "timedOut": False,
            "timeoutMs": 120_000,
            "aborted": False,
            "truncated": False,
            "durationMs": result.details["durationMs"],
            "queuedMs": 0,
            "stdout": "out\nverified",
            "stderr": "err\n",
            "stdoutBytes": 12,
            "stderrBytes": 4,
            "outputUrl": "/v1/calls/c1/output",
            "sandbox": SANDBOX,
        },
    )


async def test_a_non_zero_exit_is_an_error_that_keeps_the_output(make: Make) -> None:
    error = await failure(make(), command="echo before; exit 3")
    assert (error.code, error.message, error.summary) == (
        ErrorCode.NON_ZERO_EXIT,
        "before\n\nCommand exited with code 3",
        "Command exited with code 3",
    )
    assert (error.details["exitCode"], error.details["stdout"]) == (3, "before\n")


@pytest.mark.parametrize(("name", "code"), [("KILL", 137), ("TERM", 143), ("SEGV", 139)])
async def test_a_death_by_a_signal_is_128_and_its_number(make: Make, name: str, code: int) -> None:
    error = await failure(make(), command=f"echo before; kill -{name} $$")
    assert error.code is ErrorCode.NON_ZERO_EXIT
    assert error.message == f"before\n\nCommand exited with code {code} (killed by SIG{name})"
    shown = {key: error.details[key] for key in ("exitCode", "signal", "timedOut", "aborted")}
    assert shown == {"exitCode": code, "signal": f"SIG{name}", "timedOut": False, "aborted": False}


async def test_a_time_out_tells_its_unit_and_keeps_the_output(make: Make) -> None:
    error = await failure(make(), command="echo first; sleep 60", timeout=300)
    assert (error.code, error.message) == (
        ErrorCode.TIMEOUT,
        "first\n\nCommand timed out after 300 ms (timeout is in milliseconds)",
    )
    shown = {key: error.details[key] for key in ("exitCode", "signal", "timedOut", "aborted", "timeoutMs")}
    assert shown == {"exitCode": None, "signal": "SIGTERM", "timedOut": True, "aborted": False, "timeoutMs": 300}


async def test_the_options_give_the_time_limit_and_the_largest_one(make: Make) -> None:
    error = await failure(make(timeout=150), command="sleep 60")
    assert error.details["timeoutMs"] == 150
    error = await failure(make(maxTimeout=150), command="sleep 60")
    assert error.details["timeoutMs"] == 150
    result = await success(make(maxTimeout=5_000), command="sleep 0.2; echo done", timeout=99_999_999)
    assert (text(result), result.details["timeoutMs"]) == ("done", 5_000)


@pytest.mark.parametrize("limit", [0, -5000, 1e308, 1.5, "soon", True, float("inf")])
async def test_a_time_limit_that_is_none_is_refused(make: Make, limit: object) -> None:
    error = await failure(make(), command="touch started", timeout=limit)
    assert error.code is ErrorCode.INVALID_ARGUMENTS
    assert "timeout" in error.message


@pytest.mark.parametrize(
    ("reason", "code", "status"),
    [
        (AbortReason.CANCELLED, ErrorCode.CANCELLED, "Command cancelled"),
        (AbortReason.TIMEOUT, ErrorCode.TIMEOUT, "Command stopped: the batch's timeoutMs ran out"),
        (
            AbortReason.INTERRUPTED,
            ErrorCode.INTERRUPTED,
            "Command interrupted: the service is stopping or has lost its database",
        ),
    ],
)
async def test_an_abort_ends_the_command_and_keeps_the_output(
    make: Make, reason: AbortReason, code: ErrorCode, status: str
) -> None:
    signal, tool = AbortSignal(), make()

    def abort(update: ToolUpdate) -> None:
        signal.abort(reason)

    with pytest.raises(ToolError) as raised:
        await tool.execute("c1", {"command": "echo first; sleep 60"}, signal, abort)
    error = raised.value
    assert (error.code, error.message, error.summary) == (code, f"first\n\n{status}", status)
    shown = {key: error.details[key] for key in ("exitCode", "signal", "timedOut", "aborted", "stdout")}
    assert shown == {"exitCode": None, "signal": "SIGTERM", "timedOut": False, "aborted": True, "stdout": "first\n"}


async def test_aborted_before_it_began_nothing_is_started(make: Make, workspace: Path) -> None:
    signal, tool = AbortSignal(), make()
    signal.abort(AbortReason.CANCELLED)
    with pytest.raises(ToolError) as raised:
        await tool.execute("c1", {"command": "touch started"}, signal)
    error = raised.value
    assert (error.code, error.message) == (ErrorCode.CANCELLED, "Command cancelled; it was not started")
    shown = {key: error.details[key] for key in ("exitCode", "aborted", "timedOut", "durationMs")}
    assert shown == {"exitCode": None, "aborted": True, "timedOut": False, "durationMs": 0}
    assert files_of(workspace) == []


@pytest.mark.parametrize("how", ["time out", "cancel"])
async def test_a_descendant_that_ignores_sigterm_is_ended(make: Make, how: str) -> None:
    mark, signal, tool = f"mark-{uuid.uuid4().hex}", AbortSignal(), make()

    def abort(update: ToolUpdate) -> None:
        if how == "cancel":
            signal.abort(AbortReason.CANCELLED)

    command = (
        f"trap '' TERM; (setsid bash -c \"trap '' TERM; exec -a {mark} sleep 60\" &); echo up; sleep 60; touch late"
    )
    with pytest.raises(ToolError):
        await tool.execute("c1", {"command": command, "timeout": 400}, signal, abort)
    assert living(mark) == []


async def test_output_is_told_while_it_comes_and_waits_for_whoever_takes_it(make: Make) -> None:
    tool, updates = make(), []
    room = asyncio.Event()

    async def take_time() -> None:
        await room.wait()

    def take(update: ToolUpdate) -> Any:
        updates.append(update)
        return None if room.is_set() else take_time()

    running = asyncio.ensure_future(
        tool.execute("c1", {"command": "echo one; sleep 0.1; echo two >&2"}, AbortSignal(), take)
    )
    done, _ = await asyncio.wait({running}, timeout=0.4)
    assert not done
    assert updates == [OutputDelta("stdout", b"one\n")]
    room.set()
    result = await asyncio.wait_for(running, 10)
    assert updates == [OutputDelta("stdout", b"one\n"), OutputDelta("stderr", b"two\n")]
    assert text(result) == "one\ntwo"


async def test_long_output_is_cut_to_its_end_with_a_notice(make: Make) -> None:
    result = await success(make(), command="seq 1 30000; exit 0")
    lines = text(result).split("\n")
    assert len(lines) == 2_000
    assert lines[-3:] == [
        "30000",
        "",
        "[Showing the last 1998 of 30000 lines; 168894 bytes in all. All of it: /v1/calls/c1/output]",
    ]
    assert result.details["truncated"]
    assert result.details["stdoutBytes"] == 168_894
    assert result.details["stdout"].startswith("28001\n")


async def test_the_notice_says_what_was_captured_and_what_to_do_without(make: Make) -> None:
    captured = await success(make(captureBytes=1_000), command="seq 1 30000")
    assert text(captured).endswith("bytes in all. The first 1000 bytes: /v1/calls/c1/output]")
    for tool in (make(captureBytes=0), make(output_url=False)):
        nothing = await success(tool, command="seq 1 30000")
        assert text(nothing).endswith("To see the rest, redirect the output to a file and read that.]")


async def test_output_notice_and_status_are_within_the_limits_together(make: Make) -> None:
    error = await failure(make(maxOutputBytes=1_000, maxOutputLines=20), command="seq 1 5000; exit 3")
    assert error.message.endswith("]\n\nCommand exited with code 3")
    assert len(error.message.encode()) <= 1_000
    assert len(error.message.split("\n")) == 20
    assert error.details["exitCode"] == 3


async def test_every_call_is_a_new_shell_in_the_root(make: Make, workspace: Path) -> None:
    tool = make()
    assert text(await success(tool, command='mkdir t && cd t && rmdir "$PWD" && X=1 && echo gone')) == "gone"
    assert text(await success(tool, command='pwd; echo "[$X]"; echo "$HOME"')) == f"{workspace}\n[]\n{workspace}"


async def test_standard_input_is_empty(make: Make) -> None:
    assert text(await success(make(), command='cat; echo rc=$?; read -r x; echo "got=[$x]"')) == "rc=0\ngot=[]"


@pytest.mark.parametrize(
    ("command", "expected"),
    [
        ("", "(no output)"),
        (" \n\t", "(no output)"),
        ("# only a comment", "(no output)"),
        ("python3 - <<'PY'\nfor i in range(2):\n    print('it is', i)\nPY\n# trailing comment", "it is 0\nit is 1"),
        ("cat <<'EOF' > h.txt\nline $HOME 'q' \"d\"\nEOF\ncat h.txt", "line $HOME 'q' \"d\""),
        ("printf 'a\\rb\\r\\nc\\n'", "a\rb\r\nc"),
        ("printf '%s\\n' 'a &gt; b'", "a &gt; b"),
        ("python3 -c \"print('ümläut')\"", "ümläut"),
        ('echo "$0 $#"', "bash 0"),
    ],
)
async def test_commands_run_as_they_are(make: Make, command: str, expected: str) -> None:
    assert text(await success(make(), command=command)) == expected


async def test_a_command_that_begins_with_a_dash_is_a_command(make: Make) -> None:
    error = await failure(make(), command="-x")
    assert error.message == "bash: line 1: -x: command not found\n\nCommand exited with code 127"


async def test_a_command_too_long_for_one_argument_runs_like_any_other(make: Make) -> None:
    filler = "水" * 300_000
    result = await success(
        make(), command=f"echo \"$0 $#\" ${{#1}}\nnosuch 2>&1\n: '{filler}'\nprintf %s {filler} | wc -c"
    )
    assert text(result) == "bash 0 0\nbash: line 2: nosuch: command not found\n900000"
    assert len(result.details["command"].encode()) <= 262_144


async def test_a_command_too_long_for_the_system_says_how_to_go_on(make: Make) -> None:
    error = await failure(make(), command="echo " + "x" * 8_000_000)
    assert error.code is ErrorCode.TOO_LARGE
    assert "write the command to a file" in error.message


async def test_nothing_of_the_services_environment_is_visible(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MY_GATEWAY_TOKEN", "t-8731")
    shown = text(await success(make(env={"FROM_OPTION": "o", "BOTH": "option"}), command="env", env={"BOTH": "call"}))
    assert "8731" not in shown
    lines = shown.split("\n")
    for line in ("FROM_OPTION=o", "BOTH=call", "TERM=dumb", "TMPDIR=/tmp"):
        assert line in lines


@pytest.mark.parametrize(
    ("env", "named"),
    [({"LD_PRELOAD": "x"}, "LD_PRELOAD"), ({"A-B": "x"}, "A-B"), ({"A": "x\0"}, "A"), ({"A": 1}, "A")],
)
async def test_variables_that_may_not_be_set_are_refused_by_name(
    make: Make, workspace: Path, env: dict[str, Any], named: str
) -> None:
    error = await failure(make(), command="touch started", env=env)
    assert error.code is ErrorCode.INVALID_ARGUMENTS
    assert named in error.message
    assert files_of(workspace) == []


async def test_a_hook_in_the_workspaces_option_is_refused_too(make: Make) -> None:
    error = await failure(make(env={"BASH_ENV": "x.sh"}), command="true")
    assert error.code is ErrorCode.INVALID_ARGUMENTS
    assert "BASH_ENV" in error.message


async def test_nul_in_the_command_is_refused(make: Make) -> None:
    error = await failure(make(), command="echo a\0b")
    assert error.code is ErrorCode.INVALID_ARGUMENTS
    assert "command" in error.message


async def test_a_missing_workspace_directory_is_named_and_not_the_shell(make: Make, workspace: Path) -> None:
    tool = make()
    workspace.rmdir()  # noqa: ASYNC240 - an empty directory
    before = descriptors()
    error = await failure(tool, command="echo hi")
    assert error.code is ErrorCode.NOT_FOUND
    assert "workspace directory" in error.message
    assert "does not exist" in error.message
    assert error.details["exitCode"] is None
    assert descriptors() == before
    assert files_of(workspace.parent) == []


async def test_the_guard_refuses_before_anything_starts(make: Make, workspace: Path) -> None:
    error = await failure(make(), command="touch started; cat ../secret")
    assert error.code is ErrorCode.PATH_OUTSIDE_WORKSPACE
    assert "'../secret'" in error.message
    assert (error.details["word"], error.details["exitCode"]) == ("../secret", None)
    assert files_of(workspace) == []


async def test_the_guard_knows_every_spelling_of_the_root(make: Make, workspace: Path, tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(workspace)
    environment = make()._environment
    tool = BashTool(
        ToolEnvironment(
            str(tmp_path / "link"), environment.options, environment.sandbox, environment.files, environment.mutations
        )
    )
    shown = text(await success(tool, command=f"touch a; ls {workspace}/a {tmp_path}/link/a"))
    assert shown == f"{tmp_path}/link/a\n{workspace}/a"
    error = await failure(tool, command=f"ls {workspace}-evil/a")
    assert error.code is ErrorCode.PATH_OUTSIDE_WORKSPACE


async def test_the_guard_is_off_when_the_options_say_so_or_nothing_is_contained(make: Make, workspace: Path) -> None:
    await success(make(guard="off"), command="printf outside > ../outside")
    for tool in (make(guard="off"), make(containment="unrestricted")):
        assert text(await success(tool, command="cat ../outside")) == "outside"
    error = await failure(make(guard="on", containment="unrestricted"), command="cat ../outside")
    assert error.code is ErrorCode.PATH_OUTSIDE_WORKSPACE


async def test_a_megabyte_of_command_is_looked_at_without_holding_up_the_loop(make: Make) -> None:
    gaps: list[float] = []
    loop = asyncio.get_running_loop()

    async def tick() -> None:
        while True:
            before = loop.time()
            await asyncio.sleep(0.001)
            gaps.append(loop.time() - before)

    ticking = asyncio.ensure_future(tick())
    error = await failure(make(), command=": a/b " * 150_000 + "; cat ../x")
    ticking.cancel()
    assert error.code is ErrorCode.PATH_OUTSIDE_WORKSPACE
    assert sorted(gaps)[int(len(gaps) * 0.9)] < 0.05


async def test_a_shell_that_kills_its_supervisor_keeps_its_output_and_harms_nobody_for_long(make: Make) -> None:
    tool = make()
    error = await failure(tool, command="echo before; sleep 0.1; kill -KILL $PPID; sleep 60")
    assert error.code is ErrorCode.INTERRUPTED
    assert error.message.startswith("before\n\nthe process that supervises commands was killed")
    assert error.details["stdout"] == "before\n"
    assert text(await success(tool, command="echo again")) == "again"


async def test_bash_that_is_not_there_is_unsupported(
    make: Make, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    error = await failure(make(), command="true")
    assert error.code is ErrorCode.UNSUPPORTED
    assert "bash is not installed" in error.message


@pytest.mark.parametrize(
    "arguments",
    [
        {"command": "echo hi", "timeoutMs": 5000},
        {"cmd": "echo hi", "timeout_ms": "5000"},
        '{"command": "echo hi", "timeout": 5000.0, "env": null, "description": null}',
    ],
)
async def test_spellings_of_others_are_understood(make: Make, arguments: Any) -> None:
    tool = make()
    validated = tool.validate_arguments(tool.prepare_arguments(arguments))
    assert validated == {"command": "echo hi", "timeout": 5000}
    assert text(await tool.execute("c1", validated)) == "hi"


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ({}, "command"),
        ({"command": 1}, "command"),
        ({"command": "x", "cwd": "a"}, "cwd"),
        ({"command": None}, "command"),
    ],
)
async def test_arguments_that_do_not_fit_are_named(make: Make, arguments: dict[str, Any], named: str) -> None:
    with pytest.raises(ToolError) as error:
        make().validate_arguments(arguments)
    assert error.value.code is ErrorCode.INVALID_ARGUMENTS
    assert named in error.value.message


async def test_the_definition_tells_the_limits_of_the_workspace() -> None:
    options = WorkspaceOptions.from_json(
        {
            "bash": {
                "timeout": 7_000,
                "maxTimeout": 9_000,
                "maxOutputBytes": 5_000,
                "maxOutputLines": 77,
                "executionMode": "parallel",
            }
        }
    )
    definition = bash_definition(options)
    for limit in ("7000 ms", "9000 ms", "5000 bytes", "77 lines"):
        assert limit in definition.description
    assert definition.execution_mode == "parallel"
    assert bash_definition(WorkspaceOptions()).execution_mode == "sequential"
    jsonschema.Draft202012Validator.check_schema(definition.parameters)
    assert definition.parameters["required"] == ["command"]
    assert list(definition.parameters["properties"]) == ["command", "description", "timeout", "env"]
    assert definition.annotations.to_json() == {
        "title": "Run a shell command",
        "readOnlyHint": False,
        "destructiveHint": True,
        "idempotentHint": False,
        "openWorldHint": True,
    }


async def test_many_commands_leave_no_descriptor_open(make: Make) -> None:
    tool = make()
    await success(tool, command="true")
    before = descriptors()
    for _ in range(5):
        await asyncio.gather(*(success(tool, command="true") for _ in range(8)))
        await failure(tool, command="exit 1")
        await failure(tool, command="cat ../x")
        await failure(tool, command="sleep 9", timeout=5)
    assert descriptors() == before
