"""Whatever a caller sends, a tool answers: with an error that has the right code and says what to do, or it does it.

Nothing here may hang, leave something behind in the workspace or end in any other exception.
"""

import asyncio
import math
import os
import re
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any, Self

import anyio
import pytest

from app.domain.workspace import WorkspaceOptions
from app.errors import ErrorCode, ToolError
from app.tools.base import AgentTool
from app.tools.registry import ToolsOptions, all_tool_names, create_all_tool_definitions, create_all_tools
from tests.support.tool_calls import call_under_permissions
from tests.support.toolbox import shared_means

pytestmark = pytest.mark.anyio

WAIT_SECONDS = 20
LAG_SECONDS = 0.05

RIGHT: dict[str, dict[str, Any]] = {
    "read": {"path": "file.txt"},
    "write": {"path": "file.txt", "content": "new"},
    "edit": {"path": "file.txt", "edits": [{"oldText": "one", "newText": "1"}]},
    "bash": {"command": "true"},
    "powershell": {"command": "$true"},
    "grep": {"pattern": "one"},
    "find": {"pattern": "*"},
    "ls": {},
}
"""Arguments that each tool takes; a test replaces one of them."""


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A workspace with one of everything; no test of this module changes it."""
    root = tmp_path_factory.mktemp("bad-input") / "workspace"  # alone with what is outside: tests look at all of it
    root.mkdir()
    (root / "file.txt").write_text("one\ntwo\n")
    (root / "dir").mkdir()
    (root / "dir" / "inner.txt").write_text("inner\n")
    (root / "-dash").write_text("-e dash\n")
    (root / "binary").write_bytes(b"\0\1\2")
    (root / "latin").write_bytes(b"caf\xe9\n")
    outside = root.parent / "outside"
    outside.mkdir(exist_ok=True)
    (outside / "secret.txt").write_text("secret\n")
    for name, target in {
        "out": outside / "secret.txt",
        "out-dir": outside,
        "zero": "/dev/zero",
        "dangling": "nowhere",
        "loop": "loop",
    }.items():
        (root / name).symlink_to(target)
    os.mkfifo(root / "pipe")
    with closing(socket.socket(socket.AF_UNIX)) as listener:
        here = os.open(".", os.O_RDONLY)
        try:
            os.chdir(root)  # the path of a socket is short
            listener.bind("sock")
        finally:
            os.fchdir(here)
            os.close(here)
        yield root


@pytest.fixture(scope="module")
def means() -> Iterator[ToolsOptions]:
    with shared_means() as means:
        yield means


@pytest.fixture
def tools(root: Path, means: ToolsOptions) -> dict[str, AgentTool]:
    return create_all_tools(str(root), means)


def snapshot(root: Path) -> dict[str, tuple[int, int, bytes]]:
    found = {}
    for path in sorted(root.parent.rglob("*")):
        status = path.lstat()
        content = path.read_bytes() if path.is_file() and not path.is_symlink() else b""
        found[str(path)] = (status.st_mode, status.st_mtime_ns, content)
    return found


async def call(tool: AgentTool, arguments: Any) -> str:
    """Make a call as the executor does and return the text of its result; a failure is raised."""
    with anyio.fail_after(WAIT_SECONDS):
        result = await tool.execute("call-1", tool.validate_arguments(tool.prepare_arguments(arguments)))
    assert not result.is_error
    return "\n".join(block["text"] for block in result.content if block["type"] == "text")


async def refusal(tool: AgentTool, arguments: Any, root: Path) -> ToolError:
    before = snapshot(root)
    with pytest.raises(ToolError) as caught:
        await call(tool, arguments)
    assert snapshot(root) == before
    assert 10 < len(caught.value.message) < 2_000
    caught.value.message.encode()
    return caught.value


# -- values of a wrong kind --------------------------------------------------------------------------------------------

WRONG: dict[str, list[Any]] = {
    "string": [5, 1.5, True, [], ["x"], {}, "half \ud800"],
    "integer": ["", "x", "1.5", "0x10", "1e400", "\u0661", "9" * 50, 1.5, math.inf, math.nan, True, [], {}],
    "boolean": ["", "true", "false", "yes", 0, 1, [], {}],
    "array": ["", "x", "[", 5, True],
    "object": ["x", 5, True, ["x"]],
}
OUT_OF_RANGE: dict[str, list[int]] = {"context": [-1, -(2**63), 2**63]}
WRONG_PLACES = [
    pytest.param(definition.name, field, value, id=f"{definition.name}.{field}-{number}")
    for definition in create_all_tool_definitions()
    for field, schema in definition.parameters["properties"].items()
    for number, value in enumerate(
        WRONG[schema["type"]]
        + (OUT_OF_RANGE.get(field, [0, -1, -(2**63)]) if schema["type"] == "integer" else [])
        + ([None] if field in definition.parameters.get("required", []) else [])
    )
]


@pytest.mark.parametrize(("name", "field", "value"), WRONG_PLACES)
async def test_a_value_of_a_wrong_kind_is_refused_and_its_field_named(
    tools: dict[str, AgentTool], name: str, field: str, value: Any
) -> None:
    with pytest.raises(ToolError) as caught:
        await call(tools[name], RIGHT[name] | {field: value})
    assert caught.value.code is ErrorCode.INVALID_ARGUMENTS
    assert field in caught.value.message
    assert len(caught.value.message) < 500


@pytest.mark.parametrize("name", all_tool_names)
async def test_what_is_missing_or_unknown_is_named(tools: dict[str, AgentTool], root: Path, name: str) -> None:
    for field in tools[name].parameters.get("required", []):
        rest = {key: value for key, value in RIGHT[name].items() if key != field}
        assert f"{field}: required" in (await refusal(tools[name], rest, root)).message
    for field in ("unknown", "", "PATH", "path ", "a\0b", "__proto__", "x" * 500):
        error = await refusal(tools[name], RIGHT[name] | {field: 1}, root)
        assert (error.code, "unknown argument" in error.message) == (ErrorCode.INVALID_ARGUMENTS, True)


@pytest.mark.parametrize("arguments", [None, 5, True, [], "", "x", "[]", "{", '{"path": 1', [RIGHT["read"]]])
@pytest.mark.parametrize("name", all_tool_names)
async def test_arguments_that_are_no_object_are_refused(
    tools: dict[str, AgentTool], root: Path, name: str, arguments: Any
) -> None:
    assert (await refusal(tools[name], arguments, root)).code is ErrorCode.INVALID_ARGUMENTS


# -- paths -------------------------------------------------------------------------------------------------------------

FILES = ("read", "write", "edit")
LISTS = ("find", "ls")
WITH_PATH = (*FILES, "grep", *LISTS)
PATHS: list[tuple[str, tuple[str, ...], ErrorCode]] = [
    ("", WITH_PATH, ErrorCode.INVALID_ARGUMENTS),
    ("a\0b", WITH_PATH, ErrorCode.INVALID_ARGUMENTS),
    ("x" * 300, WITH_PATH, ErrorCode.NAME_TOO_LONG),
    ("é" * 150, WITH_PATH, ErrorCode.NAME_TOO_LONG),
    (f"{'x' * 300}/file.txt", WITH_PATH, ErrorCode.NAME_TOO_LONG),
    ("y/" * 5_000, WITH_PATH, ErrorCode.NAME_TOO_LONG),
    ("/", WITH_PATH, ErrorCode.PATH_OUTSIDE_WORKSPACE),
    ("..", WITH_PATH, ErrorCode.PATH_OUTSIDE_WORKSPACE),
    ("../outside/secret.txt", WITH_PATH, ErrorCode.PATH_OUTSIDE_WORKSPACE),
    ("dir/../../outside/secret.txt", WITH_PATH, ErrorCode.PATH_OUTSIDE_WORKSPACE),
    ("/etc/passwd", WITH_PATH, ErrorCode.PATH_OUTSIDE_WORKSPACE),
    ("/dev/zero", WITH_PATH, ErrorCode.PATH_OUTSIDE_WORKSPACE),
    ("/proc/self/environ", WITH_PATH, ErrorCode.PATH_OUTSIDE_WORKSPACE),
    ("zero", WITH_PATH, ErrorCode.PATH_OUTSIDE_WORKSPACE),
    ("out", WITH_PATH, ErrorCode.PATH_OUTSIDE_WORKSPACE),
    ("out-dir/secret.txt", WITH_PATH, ErrorCode.PATH_OUTSIDE_WORKSPACE),
    ("out-dir/new.txt", WITH_PATH, ErrorCode.PATH_OUTSIDE_WORKSPACE),
    ("loop", WITH_PATH, ErrorCode.IO_ERROR),
    ("missing", ("read", "edit", "grep", *LISTS), ErrorCode.NOT_FOUND),
    ("missing/too", ("read", "edit", "grep", *LISTS), ErrorCode.NOT_FOUND),
    ("dangling", ("read", "edit", "grep", *LISTS), ErrorCode.NOT_FOUND),
    ("-missing", ("read", "edit", "grep", *LISTS), ErrorCode.NOT_FOUND),
    ("file.txt/", WITH_PATH, ErrorCode.NOT_A_DIRECTORY),
    ("file.txt/child", WITH_PATH, ErrorCode.NOT_A_DIRECTORY),
    ("file.txt", LISTS, ErrorCode.NOT_A_DIRECTORY),
    (".", FILES, ErrorCode.IS_A_DIRECTORY),
    ("dir", FILES, ErrorCode.IS_A_DIRECTORY),
    ("dir/", FILES, ErrorCode.IS_A_DIRECTORY),
    ("pipe", (*FILES, "grep"), ErrorCode.NOT_A_REGULAR_FILE),
    ("sock", (*FILES, "grep"), ErrorCode.NOT_A_REGULAR_FILE),
    ("pipe", LISTS, ErrorCode.NOT_A_DIRECTORY),
    ("binary", ("edit",), ErrorCode.UNSUPPORTED),
    ("latin", ("edit",), ErrorCode.UNSUPPORTED),
]


@pytest.mark.parametrize(
    ("name", "path", "code"),
    [
        pytest.param(name, path, code, id=f"{name}-{path[:30]!a}-{code}")
        for path, names, code in PATHS
        for name in names
    ],
)
async def test_a_path_that_leads_to_nothing_the_tool_can_use(
    tools: dict[str, AgentTool], root: Path, name: str, path: str, code: ErrorCode
) -> None:
    assert (await refusal(tools[name], RIGHT[name] | {"path": path}, root)).code is code


@pytest.mark.parametrize("path", ["zero", "/dev/zero", "/dev/null"])
@pytest.mark.parametrize("name", [*FILES, "grep"])
async def test_a_device_is_refused_also_where_paths_may_lead_anywhere(
    root: Path, means: ToolsOptions, name: str, path: str
) -> None:
    options = replace(means, options=WorkspaceOptions.from_json({"containment": "unrestricted"}))
    error = await refusal(create_all_tools(str(root), options)[name], RIGHT[name] | {"path": path}, root)
    assert error.code is ErrorCode.NOT_A_REGULAR_FILE


@pytest.mark.parametrize("name", [*WITH_PATH, "bash"])
async def test_a_workspace_directory_that_is_gone_is_told_and_not_made_again(
    tmp_path: Path, means: ToolsOptions, name: str
) -> None:
    tool = create_all_tools(str(tmp_path / "gone"), means)[name]
    with pytest.raises(ToolError) as caught:
        await call(tool, RIGHT[name])
    assert caught.value.code is ErrorCode.NOT_FOUND
    assert "workspace" in caught.value.message
    assert os.listdir(tmp_path) == []  # noqa: PTH208 - one look at a directory of the test's own


# -- other values ------------------------------------------------------------------------------------------------------

EDIT = {"oldText": "one", "newText": "1"}
REFUSED: list[tuple[str, dict[str, Any], ErrorCode, str]] = [
    ("read", {"offset": 3}, ErrorCode.INVALID_ARGUMENTS, "file.txt has 2 lines"),
    ("read", {"offset": 2**62}, ErrorCode.INVALID_ARGUMENTS, "file.txt has 2 lines"),
    ("read", {"encoding": ""}, ErrorCode.INVALID_ARGUMENTS, "encoding"),
    ("read", {"encoding": "utf-8\0"}, ErrorCode.INVALID_ARGUMENTS, "encoding"),
    ("read", {"encoding": "rot13"}, ErrorCode.INVALID_ARGUMENTS, "encoding"),
    ("write", {"content": "x" * 10_000_001}, ErrorCode.TOO_LARGE, "10000000"),
    ("write", {"expectedEtag": ""}, ErrorCode.ETAG_MISMATCH, "etag"),
    ("write", {"expectedEtag": '"x"\0'}, ErrorCode.ETAG_MISMATCH, "etag"),
    ("write", {"createOnly": True}, ErrorCode.ALREADY_EXISTS, "createOnly"),
    ("write", {"createOnly": True, "expectedEtag": "x"}, ErrorCode.INVALID_ARGUMENTS, "createOnly"),
    ("write", {"path": "missing", "expectedEtag": '"x"'}, ErrorCode.ETAG_MISMATCH, "does not exist"),
    ("edit", {"edits": []}, ErrorCode.INVALID_ARGUMENTS, "edits"),
    ("edit", {"edits": [EDIT] * 1_001}, ErrorCode.INVALID_ARGUMENTS, "edits"),
    ("edit", {"edits": [{}]}, ErrorCode.INVALID_ARGUMENTS, "edits[0].oldText: required"),
    ("edit", {"edits": [EDIT, None]}, ErrorCode.INVALID_ARGUMENTS, "edits[1]"),
    ("edit", {"edits": [EDIT | {"oldText": ""}]}, ErrorCode.INVALID_ARGUMENTS, "oldText must not be empty"),
    ("edit", {"edits": [EDIT | {"oldText": "half \ud800"}]}, ErrorCode.INVALID_ARGUMENTS, "edits[0].oldText"),
    ("edit", {"edits": [EDIT | {"newText": "half \ud800"}]}, ErrorCode.INVALID_ARGUMENTS, "edits[0].newText"),
    ("edit", {"edits": [EDIT | {"newText": "x" * 10_000_001}]}, ErrorCode.TOO_LARGE, "10000000"),
    ("edit", {"edits": [EDIT | {"oldText": "o\0ne"}]}, ErrorCode.NO_MATCH, "was not found"),
    ("edit", {"edits": [EDIT | {"oldText": "x" * 1_000_000}]}, ErrorCode.NO_MATCH, "was not found"),
    ("edit", {"edits": [EDIT | {"newText": "one"}]}, ErrorCode.NO_CHANGE, "the same as oldText"),
    ("edit", {"edits": [EDIT | {"oldText": "o"}]}, ErrorCode.NOT_UNIQUE, "lines 1, 2"),
    ("edit", {"expectedEtag": ""}, ErrorCode.ETAG_MISMATCH, "etag"),
    ("edit", {"match": ""}, ErrorCode.INVALID_ARGUMENTS, "sequential"),
    ("grep", {"pattern": ""}, ErrorCode.INVALID_ARGUMENTS, "pattern"),
    ("grep", {"pattern": "a\0"}, ErrorCode.INVALID_ARGUMENTS, "pattern"),
    ("grep", {"include": "*.t\0xt"}, ErrorCode.INVALID_ARGUMENTS, "include"),
    ("grep", {"exclude": "\0"}, ErrorCode.INVALID_ARGUMENTS, "exclude"),
    ("find", {"pattern": "*.t\0xt"}, ErrorCode.INVALID_ARGUMENTS, "pattern"),
    ("grep", {"pattern": "x" * 20_001}, ErrorCode.INVALID_ARGUMENTS, "pattern"),
    ("grep", {"pattern": "("}, ErrorCode.INVALID_ARGUMENTS, "unclosed group"),
    ("grep", {"pattern": "["}, ErrorCode.INVALID_ARGUMENTS, "unclosed character class"),
    ("grep", {"pattern": "*"}, ErrorCode.INVALID_ARGUMENTS, "repetition operator missing expression"),
    ("grep", {"pattern": "a{2,1}"}, ErrorCode.INVALID_ARGUMENTS, "repetition"),
    ("grep", {"pattern": "\\"}, ErrorCode.INVALID_ARGUMENTS, "pattern"),
    ("grep", {"pattern": "(?<=x)y"}, ErrorCode.INVALID_ARGUMENTS, "look-around"),
    ("grep", {"pattern": "(x)\\1"}, ErrorCode.INVALID_ARGUMENTS, "backreferences"),
    ("grep", {"pattern": "one\ntwo"}, ErrorCode.INVALID_ARGUMENTS, "line"),
    ("grep", {"include": ""}, ErrorCode.INVALID_ARGUMENTS, "include"),
    ("grep", {"include": "["}, ErrorCode.INVALID_ARGUMENTS, "include"),
    ("grep", {"exclude": "{a,b"}, ErrorCode.INVALID_ARGUMENTS, "exclude"),
    ("grep", {"include": "x" * 5_000}, ErrorCode.INVALID_ARGUMENTS, "include"),
    ("grep", {"include": "../*"}, ErrorCode.INVALID_ARGUMENTS, "include"),
    ("grep", {"encoding": "rot13"}, ErrorCode.INVALID_ARGUMENTS, "encoding"),
    ("grep", {"context": 1_001}, ErrorCode.INVALID_ARGUMENTS, "context"),
    ("find", {"pattern": ""}, ErrorCode.INVALID_ARGUMENTS, "pattern"),
    ("find", {"pattern": "["}, ErrorCode.INVALID_ARGUMENTS, "pattern"),
    ("find", {"pattern": "{a,b"}, ErrorCode.INVALID_ARGUMENTS, "pattern"),
    ("find", {"pattern": "{" * 500}, ErrorCode.INVALID_ARGUMENTS, "pattern"),
    ("find", {"pattern": "../*"}, ErrorCode.INVALID_ARGUMENTS, "pattern"),
    ("find", {"pattern": "/"}, ErrorCode.INVALID_ARGUMENTS, "pattern"),
    ("find", {"type": "dir"}, ErrorCode.INVALID_ARGUMENTS, '"directory"'),
    ("find", {"type": ""}, ErrorCode.INVALID_ARGUMENTS, '"file"'),
    ("bash", {"command": "a\0b"}, ErrorCode.INVALID_ARGUMENTS, "command"),
    ("bash", {"command": "-c"}, ErrorCode.NON_ZERO_EXIT, "Command exited with code 127"),
    ("bash", {"command": "if"}, ErrorCode.NON_ZERO_EXIT, "Command exited with code"),
    ("bash", {"env": {"": "x"}}, ErrorCode.INVALID_ARGUMENTS, "env"),
    ("bash", {"env": {"A=B": "x"}}, ErrorCode.INVALID_ARGUMENTS, "env"),
    ("bash", {"env": {"A": "x\0"}}, ErrorCode.INVALID_ARGUMENTS, "env"),
    ("bash", {"env": {"A": 5}}, ErrorCode.INVALID_ARGUMENTS, "env.A"),
    ("bash", {"env": {"A": "x" * 200_000}}, ErrorCode.INVALID_ARGUMENTS, "env"),
    ("bash", {"env": {"half \ud800": "x"}}, ErrorCode.INVALID_ARGUMENTS, "env"),
    ("powershell", {"command": "a\0b"}, ErrorCode.INVALID_ARGUMENTS, "command"),
    ("powershell", {"command": "x" * 200_000}, ErrorCode.INVALID_ARGUMENTS, "command"),
    ("powershell", {"env": {"A=B": "x"}}, ErrorCode.INVALID_ARGUMENTS, "env"),
]


def described(arguments: dict[str, Any]) -> str:
    return ascii(arguments)[:50]


@pytest.mark.parametrize(
    ("name", "change", "code", "says"),
    [pytest.param(*case, id=f"{case[0]}-{described(case[1])}-{case[2]}") for case in REFUSED],
)
async def test_a_value_the_tool_cannot_use_is_refused_in_words_that_help(
    tools: dict[str, AgentTool], root: Path, name: str, change: dict[str, Any], code: ErrorCode, says: str
) -> None:
    error = await refusal(tools[name], RIGHT[name] | change, root)
    assert (error.code, says in error.message) == (code, True), error.message


TAKEN: list[tuple[str, dict[str, Any], str]] = [
    ("read", {"limit": 2**70}, "   1│ one\n   2│ two"),
    ("read", {"path": "-dash"}, "   1│ -e dash"),
    ("read", {"path": "./dir/..//file.txt", "offset": "1", "limit": 1.0}, "   1│ one\n\n[Showing lines 1-1 of 2."),
    ("grep", {"pattern": "-e"}, "-dash:1: -e dash"),
    ("grep", {"pattern": "--files"}, "No matches found"),
    ("grep", {"pattern": "--pre=sh", "literal": True}, "No matches found"),
    ("grep", {"pattern": "dash", "path": "-dash"}, "-dash:1: -e dash"),
    ("grep", {"pattern": "dash", "include": "-*"}, "-dash:1: -e dash"),
    ("grep", {"pattern": "one", "exclude": "--*", "context": 0}, "file.txt:1: one"),
    ("grep", {"pattern": "(", "literal": True}, "No matches found"),
    ("grep", {"pattern": "one", "limit": 2**62, "context": 1_000}, "file.txt:1: one\nfile.txt-2- two"),
    ("find", {"pattern": "-*"}, "-dash"),
    ("find", {"pattern": "--exec=sh"}, "No matches found"),
    ("find", {"pattern": "x" * 300}, "No matches found"),
    ("find", {"pattern": "inner.*", "limit": 2**62}, "dir/inner.txt"),
    ("ls", {"path": "dir", "limit": 2**62, "maxDepth": 2**62}, "dir/inner.txt"),
    ("bash", {"command": ""}, "(no output)"),
    ("bash", {"command": 'printf %s "$1" x', "timeout": 2**62}, "x"),
    ("bash", {"command": "printf '%s' \"$A\"", "env": {"A": "-n $(date) `id`\n'\""}}, "-n $(date) `id`\n'\""),
]


@pytest.mark.parametrize(
    ("name", "change", "text"), [pytest.param(*case, id=f"{case[0]}-{described(case[1])}") for case in TAKEN]
)
async def test_an_odd_value_that_means_something_is_taken_for_what_it_is(
    tools: dict[str, AgentTool], root: Path, name: str, change: dict[str, Any], text: str
) -> None:
    before = snapshot(root)
    assert (await call(tools[name], RIGHT[name] | change)).startswith(text)
    assert snapshot(root) == before


def test_every_error_here_is_on_the_page_of_its_tool() -> None:
    page = (Path(__file__).parents[2] / "docs" / "tools.md").read_text(encoding="utf-8")
    common, *sections = re.split(r"^## (?=[a-z]+$)", page, flags=re.MULTILINE)
    codes = {section.split("\n")[0]: set(re.findall(r"^\| `(\w+)` \|", section, re.MULTILINE)) for section in sections}
    for_all, for_paths = (
        set(re.findall(r"^\| `(\w+)` \|", part, re.MULTILINE)) for part in common.split("Every tool that")[:2]
    )
    given = {(name, code) for _, names, code in PATHS for name in names} | {
        (name, code) for name, _, code, _ in REFUSED
    }
    for name, code in given:
        assert code in codes[name] | for_all | (for_paths if name in WITH_PATH else set()), (name, code)


# -- files that cannot be read, or not for long ------------------------------------------------------------------------


def test_what_permissions_forbid_is_told_and_what_they_allow_is_done(tmp_path: Path) -> None:
    root = tmp_path / "workspace"
    for name in ("closed", "half", "open"):
        (root / name).mkdir(parents=True)
        (root / name / "inner.txt").write_text("inner\n")
    (root / "file.txt").write_text("one\n")
    (root / "secret.txt").write_text("one secret\n")
    (root / "secret.txt").chmod(0)
    (root / "fixed.txt").write_text("one\n")
    (root / "fixed.txt").chmod(0o444)
    (root / "half").chmod(0o555)
    (root / "closed").chmod(0)
    edits = [{"oldText": "one", "newText": "1"}]
    inner = [{"oldText": "inner", "newText": "1"}]
    denied = {
        "permission_denied": [
            ("read", {"path": "secret.txt"}),
            ("read", {"path": "closed/inner.txt"}),
            ("write", {"path": "fixed.txt", "content": ""}),
            ("write", {"path": "half/new.txt", "content": ""}),
            ("write", {"path": "closed/new.txt", "content": ""}),
            ("write", {"path": "closed/deep/new.txt", "content": ""}),
            ("edit", {"path": "secret.txt", "edits": edits}),
            ("edit", {"path": "fixed.txt", "edits": edits}),
            ("edit", {"path": "half/inner.txt", "edits": inner}),
            ("edit", {"path": "closed/inner.txt", "edits": inner}),
            ("grep", {"pattern": "inner", "path": "closed/inner.txt"}),
            ("grep", {"pattern": "inner", "path": "closed"}),
            ("find", {"pattern": "*", "path": "closed"}),
            ("ls", {"path": "closed"}),
        ],
        None: [
            ("read", {"path": "fixed.txt"}),
            ("edit", {"path": "fixed.txt", "edits": edits, "dryRun": True}),
            ("grep", {"pattern": "one|inner"}),
            ("find", {"pattern": "*.txt"}),
            ("ls", {"recursive": True}),
        ],
    }
    try:
        answers = call_under_permissions(root, [one for calls in denied.values() for one in calls])
    finally:
        (root / "closed").chmod(0o700)
        (root / "half").chmod(0o700)
    if answers is None:
        pytest.skip("permissions hold no process that may be started here")
    codes = [code for code, _ in answers]
    assert codes == [code for code, calls in denied.items() for _ in calls], answers
    assert all("permission" in text.lower() for code, text in answers if code)
    grep, find, ls = (text for _, text in answers[-3:])
    assert grep.startswith("file.txt:1: one\nfixed.txt:1: one\nhalf/inner.txt:1: inner\nopen/inner.txt:1: inner\n")
    assert "secret" not in grep.split("\n\n")[0]
    assert find.startswith("file.txt\nfixed.txt\nhalf/inner.txt\nopen/inner.txt\nsecret.txt")
    assert "closed" in ls
    assert (root / "fixed.txt").read_text() == "one\n"
    assert (root / "half" / "inner.txt").read_text() == "inner\n"
    assert sorted(path.name for path in root.rglob("*") if path.is_file()) == [
        "file.txt", "fixed.txt", "inner.txt", "inner.txt", "inner.txt", "secret.txt",
    ]  # fmt: skip


class Flicker:
    """Makes and removes a file and a directory, as fast as it can, until it is told to stop."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.rounds = 0
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join(WAIT_SECONDS)
        assert not self._thread.is_alive()

    def _run(self) -> None:
        file, directory = self.root / "flicker", self.root / "flickering"
        while not self._stop.is_set():
            for path, make in ((file, lambda: file.write_text("one\n")), (directory / "sub", self._make_directory)):
                make()
                path.rmdir() if path.is_dir() else path.unlink(missing_ok=True)
            self.rounds += 1

    def _make_directory(self) -> None:
        (self.root / "flickering" / "sub").mkdir(parents=True, exist_ok=True)


async def test_files_that_come_and_go_are_there_or_not_and_nothing_else_happens(
    tmp_path: Path, means: ToolsOptions
) -> None:
    tools = create_all_tools(str(tmp_path), means)
    (tmp_path / "steady.txt").write_text("one\n")
    calls = [
        ("read", {"path": "flicker"}, {ErrorCode.NOT_FOUND}),
        (
            "edit",
            {"path": "flicker", "edits": [EDIT]},
            {ErrorCode.NOT_FOUND, ErrorCode.NO_MATCH, ErrorCode.ETAG_MISMATCH},
        ),
        ("grep", {"pattern": "one"}, set()),
        ("grep", {"pattern": "one", "path": "flicker"}, {ErrorCode.NOT_FOUND}),
        ("find", {"pattern": "**"}, set()),
        ("find", {"pattern": "*", "path": "flickering/sub"}, {ErrorCode.NOT_FOUND}),
        ("ls", {"recursive": True}, set()),
        ("ls", {"path": "flickering/sub"}, {ErrorCode.NOT_FOUND}),
    ]
    seen: set[str] = set()
    with Flicker(tmp_path) as flicker:
        for number in range(12):
            for name, arguments, codes in calls:
                try:
                    text = await call(tools[name], arguments)
                except ToolError as error:
                    assert error.code in codes, (name, arguments, error.message)  # noqa: PT017 - either is fine
                    seen.add(f"{name} failed")
                else:
                    seen.add(name)
                    assert name not in {"grep", "find", "ls"} or "path" in arguments or "steady.txt" in text, number
    assert flicker.rounds > 12
    assert {"grep", "find", "ls"} <= seen


# -- no stall ----------------------------------------------------------------------------------------------------------


async def lag_during(work: Callable[[], Any]) -> float:
    """Return for how long at most the event loop did not come round while `work` was done."""
    worst = 0.0
    done = False

    async def watch() -> None:
        nonlocal worst
        while not done:
            before = time.perf_counter()
            await asyncio.sleep(0.001)
            worst = max(worst, time.perf_counter() - before - 0.001)

    with anyio.fail_after(WAIT_SECONDS):
        async with anyio.create_task_group() as group:
            group.start_soon(watch)
            await asyncio.sleep(0)
            await work()
            done = True
    return worst


async def assert_no_stall(work: Callable[[], Any]) -> None:
    # A busy machine holds up any loop, so it is measured too; what our own code does happens every time.
    lags: list[str] = []
    for _ in range(5):
        started = time.perf_counter()
        lag = await lag_during(work)
        spent = time.perf_counter() - started
        busy = await lag_during(lambda: asyncio.sleep(spent))  # noqa: B023 - called at once
        if lag < LAG_SECONDS + busy:
            return
        lags.append(f"{lag * 1000:.0f} ms ({busy * 1000:.0f} without work)")
    pytest.fail(f"the event loop stood still for {', '.join(lags)}")


OLD = "".join(f"{number} the old text of a line\n" for number in range(15_000))
NEW = "".join(f"{number * 7919 % 15_000} and what comes in its place\n" for number in range(15_000))
SHUFFLED = "".join(f"{number * 7919 % 15_000} the old text of a line\n" for number in range(15_000))


@pytest.mark.parametrize(
    "arguments",
    [
        pytest.param(("write", {"content": NEW}), id="written over each other"),
        pytest.param(("write", {"content": SHUFFLED}), id="the same lines in another order"),
        pytest.param(("edit", {"edits": [{"oldText": OLD, "newText": NEW}]}), id="one edit of everything"),
        pytest.param(
            (
                "edit",
                {"edits": [{"oldText": f"\n{line}", "newText": f"\n{line}!"} for line in OLD.split("\n")[500:1500]]},
            ),
            id="a thousand edits",
        ),
        pytest.param(
            ("edit", {"edits": [{"oldText": "the old text", "newText": "no text", "replaceAll": True}]}),
            id="every line by one edit",
        ),
    ],
)
async def test_two_files_of_15_000_lines_that_differ_everywhere_do_not_hold_up_the_service(
    tmp_path: Path, means: ToolsOptions, arguments: tuple[str, dict[str, Any]]
) -> None:
    name, change = arguments
    tool = create_all_tools(str(tmp_path), means)[name]

    async def work() -> None:
        (tmp_path / "big.txt").write_text(OLD)
        await call(tool, {"path": "big.txt"} | change)

    await assert_no_stall(work)
    assert (tmp_path / "big.txt").read_text() != OLD


@pytest.mark.parametrize("fuzzy", [False, True])
async def test_a_text_of_15_000_lines_that_is_not_found_does_not_hold_up_the_service(
    tmp_path: Path, means: ToolsOptions, *, fuzzy: bool
) -> None:
    (tmp_path / "big.txt").write_text(OLD.replace("the", "\u201cthe\u201d"))
    options = WorkspaceOptions.from_json({"edit": {"fuzzy": fuzzy}})
    tool = create_all_tools(str(tmp_path), replace(means, options=options))["edit"]

    async def work() -> None:
        for wanted in (NEW, NEW[:19_000], NEW[:300]):
            with pytest.raises(ToolError, match="was not found"):
                await call(tool, {"path": "big.txt", "edits": [{"oldText": wanted, "newText": ""}]})

    await assert_no_stall(work)
