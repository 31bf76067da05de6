"""What the shell tools share: running a command of a workspace and turning what it printed into a result."""

import asyncio
from collections.abc import Awaitable, Mapping, Sequence
from dataclasses import dataclass, replace
from os import fsdecode
from typing import Any, Final

from app.domain import json_codec
from app.domain.abort import Aborted, AbortReason, AbortSignal
from app.domain.events import OutputStream
from app.domain.tool_call import ToolResult, text_content
from app.domain.workspace import BashOptions
from app.errors import ErrorCode, ToolError
from app.sandbox.base import ProcessSpec
from app.sandbox.command_guard import check_command
from app.sandbox.containment import Root
from app.sandbox.disk import require_free
from app.sandbox.environment import check_variables, command_environment
from app.sandbox.limits import CommandLimits
from app.sandbox.process import CommandOutcome, run_command
from app.tools._disk_watch import watching_disk
from app.tools._limits import limit_reached
from app.tools.base import OnUpdate, OutputDelta, PartialResult
from app.tools.environment import ToolEnvironment
from app.tools.model_tool import DetailsModel
from app.tools.truncate import count_lines, truncate_head, truncate_tail

NO_OUTPUT: Final = "(no output)"

_SHOWN_COMMAND_BYTES: Final = 262_144
_RESULT_JSON_BYTES: Final = 6 * 1_048_576
"""What the three texts of a result may take as JSON: a stored result is at most 8 MiB, the command's own included."""

_SHOWN_MOST_BYTES: Final = 2 * 1_048_576
_LAST_WORDS_BYTES: Final = 4_096

_GUARD_INLINE_CHARACTERS: Final = 16_384  # a longer command is looked at in a thread
_ROOMY_LINES: Final = 8


class ShellDetails(DetailsModel):
    """What a program needs to know of a command.

    `exit_code` is 128 + n when signal n ended the shell, and None when the command was timed out, cancelled or never
    started; `signal` is the signal's name when the shell died by one. `timed_out` is about the command's own time
    limit, `timeout_ms`; `aborted` is about everything from outside: a cancel, the batch's time limit, a stop of the
    service. `stdout` and `stderr` are the ends of the two streams, each within the limits of the text;
    `stdout_bytes` and `stderr_bytes` count all of them. `queued_ms` is how long the command waited for a slot before it
    was started; its time limit does not count that. `truncated`: the text left something out.
    """

    command: str
    exit_code: int | None = None
    signal: str | None = None
    timed_out: bool = False
    timeout_ms: int
    aborted: bool = False
    truncated: bool = False
    duration_ms: int = 0
    queued_ms: int = 0
    stdout: str = ""
    stderr: str = ""
    stdout_bytes: int = 0
    stderr_bytes: int = 0
    output_url: str | None = None
    sandbox: dict[str, Any]


@dataclass(frozen=True, slots=True)
class ShellCall:
    """One call of a shell tool. `argv` runs `command`; `env` and `timeout_ms` are the caller's, None when not given."""

    tool_call_id: str
    command: str
    argv: Sequence[str]
    env: Mapping[str, str] | None
    timeout_ms: int | None


def shown_bytes(options: BashOptions) -> int:
    """Return how many bytes the text of a result has at most, whatever the options say."""
    return min(options.max_output_bytes, _SHOWN_MOST_BYTES)


async def run_shell(
    environment: ToolEnvironment, options: BashOptions, call: ShellCall, signal: AbortSignal, on_update: OnUpdate
) -> ToolResult:
    """Run a command in the workspace's root and return what it printed.

    Raises:
        ToolError: `non_zero_exit`, `limit_exceeded`, `no_space`, `timeout`, `cancelled`, `interrupted`, with the output
            so far in the message and in the details; `path_outside_workspace` (the guard), `invalid_arguments` (the
            environment), `sandbox_unavailable` (a network that is not granted), `no_space` (the disk), and what
            `Sandbox.start` raises: then nothing was started.
    """
    limits = environment.policy.limits.tightened(options.limits)
    timeout_ms = min(call.timeout_ms or options.timeout, options.max_timeout)
    max_bytes = shown_bytes(options)
    output = CommandOutput(max_bytes)
    output_url = None if environment.output_url is None else environment.output_url(call.tool_call_id)
    details = ShellDetails(
        command=truncate_tail(call.command, _SHOWN_COMMAND_BYTES, None).text,
        timeout_ms=timeout_ms,
        output_url=output_url,
        sandbox=_sandbox_details(environment, options),
    )

    def take(stream: OutputStream, data: bytes) -> Awaitable[None] | None:
        output.add(stream, data)
        return on_update(OutputDelta(stream, data))

    outcome: CommandOutcome | None = None
    try:
        signal.raise_if_aborted()
        _require_network(options, environment)
        variables = _variables(options.env, call.env)
        async with environment.commands.taken(
            environment.cwd, signal, owner=environment.tenant, on_long_wait=lambda: on_update(_waiting(environment))
        ) as waited:
            details = details.model_copy(update={"queued_ms": round(waited * 1000)})
            root = await environment.files.run(_open_root, environment, signal=signal, workspace=environment.cwd)
            with root:
                real = fsdecode(root.real)
                if _guarded(environment, options):
                    await _check(call.command, (environment.cwd, real))
                spec = ProcessSpec(
                    call.argv,
                    root.fd,
                    command_environment(real, variables, environment.account),
                    limits=limits,
                    host_network=options.network == "host",
                    account=environment.account,
                )
                async with watching_disk(environment, signal) as disk:
                    outcome = await run_command(
                        environment.sandbox, spec, signal=disk.stop, timeout_ms=timeout_ms, on_output=take
                    )
        if environment.sandbox.report.tier != "namespace":
            limits = replace(limits, tmp_bytes=None)
        ending = _ending(outcome, timeout_ms, limits, output.last_words())
        if disk.full is not None and outcome.aborted and not signal.aborted:
            ending = _Ending(ErrorCode.NO_SPACE, f"Command stopped: {disk.full.message}")
    except Aborted as aborted:
        ending = _aborted(aborted.reason)
        stopped = details.model_copy(update={"aborted": True})
        raise ToolError(ending.code, f"{ending.text}; it was not started", stopped.to_json()) from None
    except ToolError as error:
        if error.code is not ErrorCode.INTERRUPTED:
            error.details = {**details.to_json(), **error.details}
            raise
        ending = _Ending(error.code, error.message)
    shown = output.compose(
        max_bytes,
        options.max_output_lines,
        None if ending is None else ending.text,
        _rest(output_url, options.capture_bytes, output.total_bytes),
    )
    details = details.model_copy(
        update={
            "truncated": shown.truncated,
            "stdout": shown.stdout,
            "stderr": shown.stderr,
            "stdout_bytes": output.stream_bytes("stdout"),
            "stderr_bytes": output.stream_bytes("stderr"),
            **({} if outcome is None else _facts(outcome)),
        }
    )
    if ending is not None:
        raise ToolError(ending.code, shown.text, details.to_json(), summary=ending.text)
    return ToolResult(text_content(shown.text), details.to_json())


def _open_root(environment: ToolEnvironment) -> Root:
    """Open the root of a command that is about to start; in the file pool."""
    root = Root.open(environment.cwd, environment.root_identity, environment.options.containment)
    try:
        require_free(root.fd, environment.policy.min_free_bytes)
        if environment.quota is not None:
            environment.quota.require()
    except ToolError:
        root.close()
        raise
    return root


def _require_network(options: BashOptions, environment: ToolEnvironment) -> None:
    if options.network == "host" and not environment.policy.allow_network:
        raise ToolError(
            ErrorCode.SANDBOX_UNAVAILABLE,
            'nothing was started: the workspace\'s options ask for network "host", which this server does not grant. '
            "Change the option, or have whoever runs the server set TOOLCRIB_ALLOW_NETWORK",
        )


def _sandbox_details(environment: ToolEnvironment, options: BashOptions) -> dict[str, Any]:
    report = environment.sandbox.report
    host = options.network == "host" or "network" in report.missing
    return {**report.to_json(), "network": "host" if host else "none"}


def _waiting(environment: ToolEnvironment) -> PartialResult:
    """Return what a caller sees of a command that has waited for a while, and why."""
    slots = environment.commands
    text = (
        "The command waits for others to end: "
        f"{slots.per_workspace} may run at once in a workspace and {slots.limit} in all. Its timeout has not begun."
    )
    return PartialResult(text_content(text), {"queued": True})


def _variables(defaults: Mapping[str, str], given: Mapping[str, str] | None) -> dict[str, str]:
    try:
        check_variables(defaults)
    except ValueError as error:
        raise ToolError(ErrorCode.INVALID_ARGUMENTS, f"the workspace's option env: {error}") from None
    return {**defaults, **(given or {})}


def _guarded(environment: ToolEnvironment, options: BashOptions) -> bool:
    """Whether the guard looks at commands: `auto` is on where nothing else holds them and paths are held at all."""
    if options.guard == "auto":
        return environment.sandbox.report.tier == "process" and environment.options.containment == "workspace"
    return options.guard == "on"


async def _check(command: str, roots: Sequence[str]) -> None:
    if len(command) > _GUARD_INLINE_CHARACTERS:
        await asyncio.to_thread(check_command, command, roots)
    else:
        check_command(command, roots)


# -- how a command ended -----------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Ending:
    """An end that is a failure: its code and the line that tells of it."""

    code: ErrorCode
    text: str


def _ending(outcome: CommandOutcome, timeout_ms: int, limits: CommandLimits, stderr: str) -> _Ending | None:
    if outcome.abort_reason is not None:
        return _aborted(outcome.abort_reason)
    if outcome.timed_out:
        return _Ending(ErrorCode.TIMEOUT, f"Command timed out after {timeout_ms} ms (timeout is in milliseconds)")
    if outcome.exit_code == 0:
        return None
    reached = limit_reached(outcome, _exit_code(outcome), limits, stderr)
    if reached is not None:
        return _Ending(*reached)
    killed = "" if outcome.signal_name is None else f" (killed by {outcome.signal_name})"
    return _Ending(ErrorCode.NON_ZERO_EXIT, f"Command exited with code {_exit_code(outcome)}{killed}")


def _aborted(reason: AbortReason) -> _Ending:
    match reason:
        case AbortReason.CANCELLED:
            return _Ending(ErrorCode.CANCELLED, "Command cancelled")
        case AbortReason.TIMEOUT:
            return _Ending(ErrorCode.TIMEOUT, "Command stopped: the batch's timeoutMs ran out")
        case AbortReason.INTERRUPTED:
            return _Ending(
                ErrorCode.INTERRUPTED, "Command interrupted: the service is stopping or has lost its database"
            )


def _exit_code(outcome: CommandOutcome) -> int | None:
    """Return the code as a shell would: 128 + n for signal n."""
    return outcome.exit_code if outcome.signal is None else 128 + outcome.signal


def _facts(outcome: CommandOutcome) -> dict[str, Any]:
    ended = outcome.timed_out or outcome.aborted
    return {
        "exit_code": None if ended else _exit_code(outcome),
        "signal": outcome.signal_name,
        "timed_out": outcome.timed_out,
        "aborted": outcome.aborted,
        "duration_ms": outcome.duration_ms,
    }


# -- what it printed ---------------------------------------------------------------------------------------------------


def _rest(output_url: str | None, capture_bytes: int, total: int) -> str:
    """Return how to get what the text leaves out."""
    if output_url is None or capture_bytes == 0:
        return "To see the rest, redirect the output to a file and read that."
    if total <= capture_bytes:
        return f"All of it: {output_url}"
    return f"The first {capture_bytes} bytes: {output_url}"


@dataclass(frozen=True, slots=True)
class ShownOutput:
    """The texts of a result; `truncated` is about `text`."""

    text: str
    stdout: str
    stderr: str
    truncated: bool


class CommandOutput:
    """The end of what a command prints, both streams as they came and each by itself, and how much there was.

    Memory is bounded by a small multiple of `keep_bytes` however much is added. Nothing is decoded before it is shown.
    """

    def __init__(self, keep_bytes: int) -> None:
        self._both = _Tail(keep_bytes)
        self._streams: dict[OutputStream, _Tail] = {"stdout": _Tail(keep_bytes), "stderr": _Tail(keep_bytes)}
        self._begun: dict[OutputStream, bytes] = {}
        self._newlines = 0

    @property
    def total_bytes(self) -> int:
        return sum(tail.total for tail in self._streams.values())

    def stream_bytes(self, stream: OutputStream) -> int:
        return self._streams[stream].total

    def last_words(self) -> str:
        """Return the end of stderr, where a program that fails says why."""
        return self._streams["stderr"].end(_LAST_WORDS_BYTES)[0]

    def add(self, stream: OutputStream, data: bytes) -> None:
        """Add the next bytes of a stream.

        Of a character that has not come whole, the bytes wait for the others, so that none of the other stream get
        between them.
        """
        self._streams[stream].add(data)
        self._newlines += data.count(b"\n")
        begun = self._begun.pop(stream, b"")
        whole = begun + data if begun else data
        incomplete = _incomplete_bytes(whole)
        if incomplete:
            self._begun[stream] = whole[-incomplete:]
            whole = whole[:-incomplete]
        self._both.add(whole)

    def compose(self, max_bytes: int, max_lines: int, status: str | None, rest: str) -> ShownOutput:
        """Return the texts of the result, each in at most `max_bytes` of UTF-8 and `max_lines` lines, all counted.

        The text is what was printed, without its final newline; when that was cut, a notice of how much there was and
        `rest`, how to get it; then `status`.
        """
        for begun in self._begun.values():
            self._both.add(begun)
        self._begun.clear()
        while True:
            text, truncated = self._text(max_bytes, max_lines, status, rest)
            shown = ShownOutput(
                text,
                self._streams["stdout"].text(max_bytes, max_lines),
                self._streams["stderr"].text(max_bytes, max_lines),
                truncated,
            )
            # JSON writes some characters in six bytes.
            excess = len(json_codec.dump((shown.text, shown.stdout, shown.stderr))) / _RESULT_JSON_BYTES
            if excess <= 1:
                return shown
            max_bytes = int(min(max_bytes, self.total_bytes) / excess * 0.9)

    def _text(self, max_bytes: int, max_lines: int, status: str | None, rest: str) -> tuple[str, bool]:
        printed, cut = self._both.end(max_bytes)
        total = self._both.total
        lines = self._newlines + (total > 0 and not printed.endswith("\n"))
        body = printed.removesuffix("\n") or NO_OUTPUT
        notes = [] if status is None else [status]
        if not cut:
            kept = _cut(body, notes, max_bytes, max_lines)
            if kept == body:
                return _join(kept, notes, max_lines), False

        def notice(count: int) -> str:
            what = f"the last {count} of {lines} lines" if count > 1 else "the end"
            return f"[Showing {what}; {total} bytes in all. {rest}]"

        # What the notice says depends on the room it leaves, so leave room for the longest.
        kept = _cut(body, [notice(lines), *notes], max_bytes, max_lines)
        return _join(kept, [notice(count_lines(kept.encode())), *notes], max_lines), True


class _Tail:
    """The last bytes of a stream and how many there were."""

    def __init__(self, keep_bytes: int) -> None:
        self.total = 0
        self._keep = keep_bytes + 1  # a final newline is not shown
        self._data = bytearray()

    def add(self, data: bytes) -> None:
        self.total += len(data)
        self._data += data
        if len(self._data) > 2 * self._keep:
            del self._data[: -self._keep]

    def end(self, max_bytes: int) -> tuple[str, bool]:
        """Return the end, at least `max_bytes` of it in UTF-8, and whether something is before it.

        Where it begins within a character, the replacement for the rest of it is beyond `max_bytes`: it has more bytes
        than what it stands for.
        """
        data = self._data[-(max_bytes + 1) :]
        return data.decode("utf-8", "replace"), len(data) < self.total

    def text(self, max_bytes: int, max_lines: int) -> str:
        return truncate_head(self.end(max_bytes)[0], max_bytes, max_lines).text


def _incomplete_bytes(data: bytes) -> int:
    """Return how many bytes at the end are the beginning of a UTF-8 character that is not complete: 0 to 3."""
    for length in range(1, min(3, len(data)) + 1):
        byte = data[-length]
        if byte & 0xC0 == 0x80:
            continue
        needed = 2 if 0xC2 <= byte < 0xE0 else 3 if 0xE0 <= byte < 0xF0 else 4 if 0xF0 <= byte < 0xF5 else 1
        return length if length < needed else 0
    return 0


def _cut(body: str, notes: Sequence[str], max_bytes: int, max_lines: int) -> str:
    """Return the end of `body` that leaves room for the notes."""
    if not notes:
        return truncate_head(body, max_bytes, max_lines).text
    taken = _join("", notes, max_lines)
    separator = _separator(max_lines)
    return truncate_head(
        body,
        max(0, max_bytes - len(taken.encode()) - len(separator)),
        max(0, max_lines - count_lines(taken.encode()) - len(separator) + 1),
    ).text


def _join(body: str, notes: Sequence[str], max_lines: int) -> str:
    if max_lines == 1 and notes:
        return " ".join(notes)
    return _separator(max_lines).join([*([body] if body else []), *notes])


def _separator(max_lines: int) -> str:
    return "\n\n" if max_lines >= _ROOMY_LINES else "\n"
