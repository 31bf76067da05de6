"""powershell: the same for a stub that checks its arguments and, where there is one, for a real pwsh."""

import json
import os
import shutil
import uuid
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from app.domain.abort import AbortReason, AbortSignal
from app.domain.workspace import WorkspaceOptions
from app.errors import ErrorCode, ToolError
from app.tools.base import OutputDelta, ToolUpdate
from app.tools.powershell import EPILOGUE, find_powershell, powershell_argv, powershell_definition
from tests.support import fake_pwsh
from tests.support.processes import living
from tests.support.tool_bench import ToolBench, text_of

pytestmark = pytest.mark.anyio

REAL = shutil.which("pwsh")


@pytest.fixture
def program(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """The pwsh of a test: the stub, unless a test asks for both."""
    if getattr(request, "param", "stub") == "real":
        assert REAL is not None
        return REAL
    (tmp_path / "bin").mkdir()
    return str(fake_pwsh.install(tmp_path / "bin"))


both = pytest.mark.parametrize(
    "program",
    [
        "stub",
        pytest.param(
            "real",
            marks=[
                pytest.mark.requires_pwsh,
                pytest.mark.skipif(REAL is None, reason="no pwsh on this machine"),
            ],
        ),
    ],
    indirect=True,
)


@pytest.fixture
async def bench(tmp_path: Path, program: str) -> AsyncIterator[ToolBench]:
    root = tmp_path / "ws"
    root.mkdir()
    made = ToolBench(root, powershell=program)
    yield made
    await made.close()


def kept(bench: ToolBench) -> dict[str, Any]:
    """What the stub was started with."""
    return json.loads((bench.root.parent / "bin" / fake_pwsh.ARGUMENTS_FILE).read_text())


async def run(bench: ToolBench, command: str, **arguments: Any) -> tuple[str, dict[str, Any]]:
    """Return the text and details of a call that succeeds."""
    result = await bench.call("powershell", {"command": command, **arguments})
    return text_of(result), result.details


async def fail(bench: ToolBench, command: str, **arguments: Any) -> ToolError:
    return await bench.refusal("powershell", {"command": command, **arguments})


async def test_the_command_is_one_argument_and_no_profile_is_read(bench: ToolBench) -> None:
    command = "Write-Output 'a \"b\" $c; -File x'"
    await run(bench, command)
    assert kept(bench)["argv"] == ["-NoLogo", "-NoProfile", "-NonInteractive", "-Command", command + EPILOGUE]


@both
async def test_output_is_utf8_without_a_mark_or_carriage_returns(bench: ToolBench) -> None:
    text, details = await run(bench, "Write-Output '中文 ümläut 🎈'")
    assert text == "中文 ümläut 🎈"
    assert details["stdout"] == "中文 ümläut 🎈\n"
    assert (details["exitCode"], details["stdoutBytes"]) == (0, len("中文 ümläut 🎈\n".encode()))


async def test_the_locale_is_utf8_and_nothing_of_the_service_is_in_the_environment(
    bench: ToolBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TOOLCRIB_API_KEY", "secret")
    monkeypatch.setenv("LC_ALL", "POSIX")
    await run(bench, "Write-Output 'x'", env={"MINE": "1"}, timeout=5_000)
    environment = kept(bench)["env"]
    assert "UTF-8" in environment["LANG"].upper()
    assert "LC_ALL" not in environment
    assert "secret" not in environment.values()
    assert (environment["MINE"], environment["POWERSHELL_TELEMETRY_OPTOUT"]) == ("1", "1")
    assert (environment["POWERSHELL_UPDATECHECK"], environment["PWD"]) == ("Off", str(bench.root))


@both
@pytest.mark.parametrize(
    ("command", "code"),
    [
        ("bash -c 'exit 7'", 7),
        ("bash -c 'exit 255'", 255),
        ("exit 5", 5),
        ("Write-Output 'x'\nexit 3", 3),
        ("throw 'no'", 1),
        ("bash -c 'exit 9'\nthrow 'no'", 1),
        ("No-SuchCommand", 1),
        ("bash -c 'exit 0'\nNo-SuchCommand", 1),
        ("bash -c 'exit 7'\n# the end", 7),
    ],
)
async def test_the_exit_code_is_that_of_the_end_of_the_script(bench: ToolBench, command: str, code: int) -> None:
    error = await fail(bench, command)
    assert error.code is ErrorCode.NON_ZERO_EXIT
    assert error.details["exitCode"] == code
    assert f"Command exited with code {code}" in error.message


@both
@pytest.mark.parametrize(
    "command",
    ["bash -c 'exit 0'", "exit 0", "Write-Output 'x'", "bash -c 'exit 7'\nWrite-Output 'handled'", "# nothing"],
)
async def test_a_script_whose_last_statement_succeeds_does(bench: ToolBench, command: str) -> None:
    _, details = await run(bench, command)
    assert details["exitCode"] == 0


@both
async def test_a_param_block_and_here_strings_stand_where_they_must(bench: ToolBench) -> None:
    text, _ = await run(bench, "param($name = 'World')\nWrite-Output $name")
    assert text == "World"
    text, _ = await run(bench, "Write-Output @'\nline \"one\"\n  line $two\n'@")
    assert text == 'line "one"\n  line $two'


@both
async def test_a_command_that_ends_in_the_character_that_continues_lines_is_not_glued_to_what_follows(
    bench: ToolBench,
) -> None:
    text, details = await run(bench, "Write-Output 'x' `")
    assert (text, details["exitCode"]) == ("x", 0)


@both
async def test_output_of_a_failure_is_kept_and_streamed(bench: ToolBench) -> None:
    updates: list[ToolUpdate] = []
    with pytest.raises(ToolError) as failed:
        await bench.call("powershell", {"command": "Write-Output 'before'\nthrow 'boom'"}, on_update=updates.append)
    assert failed.value.details["stdout"] == "before\n"
    assert "boom" in failed.value.details["stderr"]
    told = b"".join(update.data for update in updates if isinstance(update, OutputDelta) and update.stream == "stdout")
    assert told == b"before\n"


@both
async def test_a_time_out_ends_the_whole_tree(bench: ToolBench) -> None:
    mark = f"mark-{uuid.uuid4().hex}"
    error = await fail(bench, f"bash -c 'exec -a {mark} sleep 60'", timeout=1_500)
    assert error.code is ErrorCode.TIMEOUT
    assert (error.details["exitCode"], error.details["timedOut"]) == (None, True)
    assert living(mark) == []


@both
async def test_a_cancel_keeps_the_output_and_says_so(bench: ToolBench) -> None:
    signal = AbortSignal()
    with pytest.raises(ToolError) as stopped:
        await bench.call(
            "powershell",
            {"command": "Write-Output 'first'\nbash -c 'sleep 60'"},
            signal=signal,
            on_update=lambda _update: signal.abort(AbortReason.CANCELLED),
        )
    assert stopped.value.code is ErrorCode.CANCELLED
    assert (stopped.value.details["aborted"], stopped.value.details["stdout"]) == (True, "first\n")


async def test_aborted_before_it_began_nothing_is_started(bench: ToolBench) -> None:
    signal = AbortSignal()
    signal.abort(AbortReason.CANCELLED)
    with pytest.raises(ToolError) as stopped:
        await bench.call("powershell", {"command": "Write-Output 'x'"}, signal=signal)
    assert stopped.value.details["aborted"]
    assert not (bench.root.parent / "bin" / fake_pwsh.ARGUMENTS_FILE).exists()


async def test_the_guard_looks_at_it_as_at_bash(bench: ToolBench) -> None:
    error = await fail(bench, "Get-Content /etc/passwd")
    assert error.code is ErrorCode.PATH_OUTSIDE_WORKSPACE


async def test_without_pwsh_the_caller_is_told_how_to_get_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    bench = ToolBench(tmp_path)
    for means in ({}, {"powershell": str(tmp_path / "nothing")}):
        bench.means = means
        error = await bench.refusal("powershell", {"command": "1"})
        assert error.code is ErrorCode.UNSUPPORTED
        assert "powershell is not available on this host" in error.message
        assert "install" in error.message
    await bench.close()


def test_it_is_found_on_path_unless_the_setting_names_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "bin").mkdir()
    stub = fake_pwsh.install(tmp_path / "bin")
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:{os.environ['PATH']}")
    assert find_powershell() == str(stub)
    assert find_powershell("/no/such/pwsh") is None
    assert powershell_argv(find_powershell(str(stub)), "1")[0] == str(stub)


@pytest.mark.parametrize(
    "arguments",
    [
        {},
        {"command": 1},
        {"command": "a\0b"},
        {"command": "x" * 100_001},
        {"command": "1", "timeout": 0},
        {"command": "1", "timeout": 1.5},
        {"command": "1", "env": {"LD_PRELOAD": "x"}},
        {"command": "1", "env": {"PSModulePath": "x"}},
        {"command": "1", "env": {"1x": "x"}},
        {"command": "1", "cwd": "/"},
    ],
)
async def test_arguments_that_do_not_fit_are_refused(bench: ToolBench, arguments: dict[str, Any]) -> None:
    assert (await bench.refusal("powershell", arguments)).code is ErrorCode.INVALID_ARGUMENTS


async def test_the_workspaces_options_hold(bench: ToolBench) -> None:
    options = {"timeout": 200, "env": {"FROM_OPTIONS": "1"}, "executionMode": "parallel"}
    with pytest.raises(ToolError) as late:
        await bench.call("powershell", {"command": "bash -c 'sleep 60'"}, powershell=options)
    assert late.value.details["timeoutMs"] == 200
    definition = powershell_definition(WorkspaceOptions.from_json({"powershell": options}))
    assert "stopped after 200 ms" in definition.description
    assert definition.execution_mode == "parallel"
    jsonschema.Draft202012Validator.check_schema(definition.parameters)


async def test_other_spellings_of_the_time_limit_are_taken(bench: ToolBench) -> None:
    _, details = await run(bench, "Write-Output 'x'", timeoutMs=4_321)
    assert details["timeoutMs"] == 4_321
