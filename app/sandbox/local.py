"""Commands on this host, in any tier: the service's side of the warden (`app.sandbox.warden`)."""

import asyncio
import contextlib
import errno
import itertools
import os
import socket
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final, get_args

import structlog

from app.errors import ErrorCode, ToolError
from app.sandbox import warden
from app.sandbox.account import Account, acts_as_others, run_as
from app.sandbox.base import CommandCounts, ExitStatus, ProcessSpec, SandboxReport, WatchedLimit
from app.sandbox.confinement import Confinement, Launch, Unconfined
from app.sandbox.files import remove_tree
from app.sandbox.limits import UNLIMITED, CommandLimits, limited

_log = structlog.get_logger(__name__)

_START_SECONDS: Final = 10.0
"""How long the start of a command may take: longer than it ever does, unless the warden was stopped."""

_END_SECONDS: Final = warden.GIVE_UP_SECONDS + 1.0
"""How long the warden may take to tell of an end, which it does after `GIVE_UP_SECONDS` in any case."""

_MOST_IDLE: Final = 8
"""Of more wardens than this, those that have no command to supervise are let go."""

_WATCHED: Final[tuple[WatchedLimit, ...]] = get_args(WatchedLimit)
_NO_MORE: Final = frozenset({errno.EMFILE, errno.ENFILE, errno.EAGAIN, errno.ENOMEM, errno.ETOOMANYREFS})
_NO_PROGRAM: Final = frozenset({errno.ENOENT, errno.ENOTDIR, errno.EACCES, errno.ENOEXEC, errno.ELOOP})


class LocalSandbox:
    """Runs commands as children of a warden, held by a confinement; without one, tier `process`. One per service.

    A command runs as the account of its `ProcessSpec`, else as `account`, else as this process does. There is a warden
    for each account, started by its first command and again by the next one after it was killed. Event loops may use
    the sandbox one after the other, not at the same time. `most` are limits that no command can be given more than.
    """

    def __init__(
        self,
        confinement: Confinement | None = None,
        most: CommandLimits = UNLIMITED,
        account: Account | None = None,
    ) -> None:
        self._confinement: Confinement = confinement or Unconfined()
        self._most = most
        self._account = account
        self._links: dict[Account | None, _Link] = {}
        self._closed = False
        self.counts = CommandCounts()

    @property
    def report(self) -> SandboxReport:
        report = self._confinement.report
        if self._account is None and acts_as_others():
            return SandboxReport(report.tier, (*report.missing, "user"))
        return report

    async def start(self, spec: ProcessSpec) -> "LocalProcess":
        """Start a command in its root directory, as the leader of a session of its own.

        Raises:
            ToolError: `not_found`, `permission_denied` (the directory), `unsupported` (no such program), `too_large`
                (argv and environment), `limit_exceeded`, `sandbox_unavailable`, `interrupted` (the warden was lost
                before it answered).
        """
        _check_strings(spec)
        spec = replace(spec, account=spec.account or self._account)
        link = await self._connect(spec.account)
        if os.fstat(spec.root_fd).st_nlink == 0:
            raise _no_directory()
        process, body, ends = link.prepare(spec, self._confinement)
        try:
            link.send(warden.START, process.number, body, ends)
            async with asyncio.timeout(_START_SECONDS):
                await process.started
        except TimeoutError:
            link.give_up()
            await process.close()
            raise ToolError(ErrorCode.LIMIT_EXCEEDED, "the command could not be started in time; try again") from None
        except BaseException:
            await process.close()
            raise
        self.counts.started += 1
        return process

    @property
    def running(self) -> int:
        """How many commands have been started and not ended."""
        return sum(link.running for link in self._links.values())

    async def close(self) -> None:
        """End every command that still runs, and the warden. Idempotent; nothing can be started afterwards."""
        self._closed = True
        for link in self._links.values():
            link.hang_up()
        for link in self._links.values():
            await link.sweep()
        self._confinement.close()

    async def _connect(self, account: Account | None) -> "_Link":
        loop = asyncio.get_running_loop()
        while True:
            if self._closed:
                raise ToolError(ErrorCode.SANDBOX_UNAVAILABLE, "the service is stopping; nothing was started")
            link = self._links.pop(account, None) or _launch(self._most, account)
            self._links[account] = link  # the last one used is the last one here
            for other in self._let_idle_go(account):
                await other.sweep()
            if not link.lost:
                link.bind(loop)
                return link
            await link.sweep()
            if self._links.get(account) is link:
                del self._links[account]

    def _let_idle_go(self, needed: Account | None) -> "list[_Link]":
        """Tell wardens to go that nobody needs, if there are many; return them. Those used longest ago go first."""
        idle = [account for account, link in self._links.items() if not link.running and account != needed]
        gone = [self._links.pop(account) for account in idle[: max(0, len(self._links) - _MOST_IDLE)]]
        for link in gone:
            link.hang_up()
        return gone


class LocalProcess:
    """A command of a `LocalSandbox`. `stdout` and `stderr` are non-blocking read ends; -1 once closed."""

    def __init__(
        self,
        link: "_Link",
        number: int,
        program: str,
        streams: tuple[int, int],
        started: asyncio.Future[None],
        *,
        status: int,
        scratch: "_Scratch | None",
    ) -> None:
        self._link = link
        self.number = number
        self.program = program
        self.pid = -1
        self.stdout, self.stderr = streams
        self.started = started
        self._wrapper_status = status
        self._scratch = scratch
        self._exited = asyncio.Event()
        self._ended = asyncio.Event()
        self._status: ExitStatus | None = None
        self._failure: ToolError | None = None

    async def wait(self) -> ExitStatus:
        """Return once the command's own process has exited.

        Raises:
            ToolError: `interrupted` when the warden was lost, and with it the exit status; `sandbox_unavailable`.
        """
        await self._exited.wait()
        if self._status is None:
            raise self._failure or ToolError(ErrorCode.INTERNAL, "the exit status of the command is not known")
        return self._status

    async def wait_all(self) -> None:
        """Return once neither the command nor any descendant lives."""
        await self._ended.wait()
        if self._link.lost:
            await self._link.sweep()

    def terminate(self) -> None:
        """SIGTERM to the command's process group; nothing when the command has exited."""
        if not self._exited.is_set():
            self._link.send(warden.TERMINATE, self.number)

    async def kill(self) -> None:
        """SIGKILL the command and every descendant; return when none lives, at the latest after a few seconds."""
        self._request_end()
        try:
            async with asyncio.timeout(_END_SECONDS):
                await self._ended.wait()
        except TimeoutError:
            self._link.give_up()
        if self._link.lost:
            await self._link.sweep()

    async def close(self) -> None:
        """Kill what is left and close the descriptors. Idempotent.

        Cancelled while it waits, it has closed the descriptors and the warden goes on to end the command.
        """
        self.release()
        await self.kill()
        scratch, self._scratch = self._scratch, None
        if scratch is not None and not scratch.remove_empty():
            await asyncio.to_thread(scratch.remove)

    def release(self) -> None:
        """Close the descriptors and ask for the end of the command, without waiting for it."""
        opened = self.stdout, self.stderr, self._wrapper_status
        self.stdout = self.stderr = self._wrapper_status = -1
        _close_all([fd for fd in opened if fd >= 0])
        with contextlib.suppress(RuntimeError):  # of a loop that is closed, where nobody waits any more
            self.started.cancel()
        self._request_end()

    def abandon(self) -> None:
        """Do what `close` does without waiting for anything: nobody is left who could."""
        self.release()
        scratch, self._scratch = self._scratch, None
        if scratch is not None:
            thread = threading.Thread(target=scratch.remove)
            thread.start()
            thread.join()

    def on_started(self, pid: int) -> None:
        self.pid = pid
        if not self.started.done():
            self.started.set_result(None)

    def on_exited(self, status: ExitStatus) -> None:
        if status.exit_code and not status.asked and self._wrapper_status >= 0 and not self._was_reached():
            self._failure = ToolError(
                ErrorCode.SANDBOX_UNAVAILABLE,
                f"the command was not started: its sandbox could not be set up, or {self.program} is not in it",
            )
        else:
            self._status = status
        self._exited.set()

    def on_ended(self, left: int) -> None:
        if left:
            _log.warning("processes_outlived_their_command", pid=self.pid, processes=left)
        self._ended.set()

    def on_failed(self, failure: ToolError) -> None:
        self._failure = failure
        if not self.started.done():
            self.started.set_exception(failure)
        self._exited.set()
        self._ended.set()

    def _was_reached(self) -> bool:
        """Whether the wrapper tells of an exit of the command: of one that it could not start it tells none."""
        try:
            return b'"exit-code"' in os.read(self._wrapper_status, 4096)
        except BlockingIOError:
            return False

    def _request_end(self) -> None:
        if not self._ended.is_set():
            self._link.send(warden.KILL, self.number)


@dataclass(frozen=True, slots=True)
class _Scratch:
    """The directory for the temporary files of a command: `name` in the open `directory`, which goes with it."""

    directory: int
    name: str
    account: Account | None

    def remove_empty(self) -> bool:
        """Remove it when that takes no thread: most commands leave it empty. False: it is still there."""
        if self.account is not None:
            return False
        try:
            os.rmdir(self.name, dir_fd=self.directory)
        except OSError:
            return False
        os.close(self.directory)
        return True

    def remove(self) -> None:
        """Remove it and what is in it, as the account of the command; in a thread."""
        try:
            run_as(self.account, remove_tree, self.directory, self.name)
        except OSError as error:
            _log.warning("temporary_files_left", error=str(error))
        finally:
            os.close(self.directory)


class _Link:
    """The service's end of one warden: messages out, messages in, and what happens when it is lost."""

    def __init__(
        self,
        process: subprocess.Popen[bytes],
        connection: socket.socket,
        most: CommandLimits,
        account: Account | None,
    ) -> None:
        self.lost = False
        self.account = account
        self._most = most
        self._process = process
        self._connection = connection
        self._loop: asyncio.AbstractEventLoop | None = None
        self._numbers = itertools.count(1)
        self._commands: dict[int, LocalProcess] = {}
        self._inbox = bytearray()
        self._outbox: deque[tuple[memoryview, Sequence[int]]] = deque()
        self._ready = False
        self._swept = False
        self._sweeping = asyncio.Lock()

    @property
    def running(self) -> int:
        """How many commands have not ended yet."""
        return len(self._commands)

    def bind(self, loop: asyncio.AbstractEventLoop) -> None:
        """Listen on this loop. Commands that another loop left behind are ended."""
        if loop is self._loop:
            return
        if self._loop is not None and not self._loop.is_closed():
            self._loop.remove_reader(self._connection.fileno())
            self._loop.remove_writer(self._connection.fileno())
        self._loop = loop
        loop.add_reader(self._connection.fileno(), self._read)
        for process in list(self._commands.values()):
            process.abandon()
        if self._outbox:
            loop.add_writer(self._connection.fileno(), self._write)

    def prepare(self, spec: ProcessSpec, confinement: Confinement) -> tuple[LocalProcess, bytes, tuple[int, ...]]:
        """Return a command that is not started, and the body and the descriptors of its START, which takes them over.

        Raises:
            ToolError: as `Confinement.launch`, and `limit_exceeded`.
        """
        assert self._loop is not None  # noqa: S101 - bound
        opened: list[int] = []
        try:
            launch = confinement.launch(replace(spec, argv=limited(spec.argv, spec.limits, self._most)))
            opened += [fd for fd in (*launch.descriptors, launch.status) if fd >= 0]
            scratch = None
            if launch.scratch is not None:
                scratch = _Scratch(os.dup(spec.root_fd), launch.scratch, self.account)
                opened.append(scratch.directory)
            kept = len(opened)
            opened.append(os.dup(spec.root_fd))
            opened += os.pipe2(os.O_CLOEXEC)
            opened += os.pipe2(os.O_CLOEXEC)
        except OSError as error:
            for fd in opened:
                os.close(fd)
            raise _start_failure(warden.STAGE_DESCRIPTORS, error.errno or errno.EIO, spec.argv[0]) from None
        directory, stdout, stdout_end, stderr, stderr_end = opened[kept:]
        os.set_blocking(stdout, False)
        os.set_blocking(stderr, False)
        number = next(self._numbers) & 0xFFFF_FFFF  # as wide as the protocol has it
        process = LocalProcess(
            self,
            number,
            spec.argv[0],
            (stdout, stderr),
            self._loop.create_future(),
            status=launch.status,
            scratch=scratch,
        )
        self._commands[number] = process
        return process, _start_body(launch, spec.limits), (directory, stdout_end, stderr_end, *launch.descriptors)

    def send(self, kind: int, number: int, body: bytes = b"", descriptors: Sequence[int] = ()) -> None:
        """Send a message now or as soon as there is room; the descriptors are closed once they are sent."""
        if self.lost:
            _close_all(descriptors)
            return
        message = memoryview(warden.HEADER.pack(len(body), kind, number) + body)
        self._outbox.append((message, descriptors))
        if len(self._outbox) == 1:
            self._write()

    def give_up(self) -> None:
        """Take the warden for lost: it does not answer."""
        if not self.lost:
            _log.error("warden_does_not_answer", pid=self._process.pid)
            self._process.kill()
            self._lose("does not answer")

    def hang_up(self) -> None:
        """Close the socket, at which the warden ends every command and goes."""
        self._lose("was told to stop")

    async def sweep(self) -> None:
        """See the warden's end, and end what it left to this process. To be called once it is lost."""
        async with self._sweeping:
            if not self._swept:
                await asyncio.to_thread(self._end_orphans)
                self._swept = True

    def _end_orphans(self) -> None:
        try:
            self._process.wait(_END_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        left = _Orphans(self._process.pid).end_all(warden.GIVE_UP_SECONDS)
        if left:
            _log.warning("processes_outlived_the_warden", processes=left)

    def _write(self) -> None:
        """Send what is queued until the socket is full."""
        assert self._loop is not None  # noqa: S101 - bound
        while self._outbox:
            message, descriptors = self._outbox[0]
            try:
                sent = socket.send_fds(self._connection, [message], list(descriptors))
            except BlockingIOError:
                self._loop.add_writer(self._connection.fileno(), self._write)
                return
            except OSError as error:
                if error.errno == errno.ETOOMANYREFS:  # too many descriptors on their way: this START was not sent
                    self._outbox.popleft()
                    _close_all(descriptors)
                    self._fail(message, error.errno)
                    continue
                self._lose("is gone")
                return
            # The descriptors went with the first byte.
            _close_all(descriptors)
            if sent == len(message):
                self._outbox.popleft()
            else:
                self._outbox[0] = (message[sent:], ())
        self._loop.remove_writer(self._connection.fileno())

    def _fail(self, message: memoryview, code: int) -> None:
        _, _, number = warden.HEADER.unpack_from(message)
        process = self._commands.pop(number)
        process.on_failed(_start_failure(warden.STAGE_DESCRIPTORS, code, process.program))

    def _read(self) -> None:
        try:
            data = self._connection.recv(1 << 16)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            self._lose("was killed")
            return
        self._inbox += data
        position = 0
        while len(self._inbox) - position >= warden.HEADER.size:
            length, kind, number = warden.HEADER.unpack_from(self._inbox, position)
            start = position + warden.HEADER.size
            if len(self._inbox) < start + length:
                break
            position = start + length
            self._take(kind, number, bytes(self._inbox[start:position]))
        del self._inbox[:position]

    def _take(self, kind: int, number: int, body: bytes) -> None:
        if kind == warden.READY:
            self._ready = True
            return
        process = self._commands.get(number)
        if process is None:
            return
        if kind == warden.STARTED:
            process.on_started(*warden.PID.unpack(body))
        elif kind == warden.EXITED:
            wait_status, asked, exceeded = warden.EXIT.unpack(body)
            code = os.waitstatus_to_exitcode(wait_status)
            limit = _WATCHED[exceeded - 1] if exceeded else None
            process.on_exited(ExitStatus(code if code >= 0 else None, -code if code < 0 else None, bool(asked), limit))
        elif kind == warden.ENDED:
            del self._commands[number]
            process.on_ended(*warden.LEFT.unpack(body))
        elif kind == warden.FAILED:
            del self._commands[number]
            stage, code = warden.FAILURE.unpack(body)
            process.on_failed(_start_failure(stage, code, process.program))

    def _lose(self, what: str) -> None:
        if self.lost:
            return
        self.lost = True
        if self._loop is not None and not self._loop.is_closed():
            self._loop.remove_reader(self._connection.fileno())
            self._loop.remove_writer(self._connection.fileno())
        self._connection.close()
        for _, descriptors in self._outbox:
            _close_all(descriptors)
        self._outbox.clear()
        for process in self._commands.values():
            process.on_failed(_lost(what) if self._ready else _not_launched("the service's log says why"))
        self._commands.clear()


class _Orphans(warden.Family):
    """What a warden that was killed left to this process: children with one of its tags, and their descendants."""

    def __init__(self, warden_pid: int) -> None:
        super().__init__()
        self._tags = warden.tags_of(warden_pid)

    def owner_of_child(self, child: warden.Process) -> int:
        tag = warden.read_tag(child.pid)
        return 0 if tag is not None and tag in self._tags else warden.OUTSIDE

    def end_all(self, seconds: float) -> int:
        """Kill and reap until none is left or the time is over; return how many are left."""
        until = time.monotonic() + seconds
        delay = 0.001
        while True:
            found = self.end({0}).get(0, [])
            if not found or time.monotonic() > until:
                return len(found)
            for process in found:
                # Only ours can be waited for; the others become ours when their parents end.
                with contextlib.suppress(ChildProcessError):
                    os.waitpid(process.pid, os.WNOHANG)
            time.sleep(delay)
            delay = min(delay * 2, 0.05)


def _launch(most: CommandLimits, account: Account | None) -> _Link:
    """Start a warden, which becomes the account.

    It is ready a moment later, and messages to it wait in the socket until then.
    """
    bounds = [str(bound or 0) for bound in (most.open_files, most.file_bytes)]
    identity = [] if account is None else [str(account.uid), str(account.gid)]
    ours, theirs = socket.socketpair()
    try:
        # Orphans of a warden that was killed come to this process, which then knows them by their tags.
        warden.become_subreaper()
        process = subprocess.Popen(  # noqa: S603 - our own program
            [sys.executable, "-I", "-S", str(Path(warden.__file__)), str(theirs.fileno()), *bounds, *identity],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            cwd="/",
            # Commands can read their parent's environment: it holds nothing but what the interpreter may need.
            env={name: os.environ[name] for name in ("LD_LIBRARY_PATH",) if name in os.environ},
            pass_fds=(theirs.fileno(),),
            start_new_session=True,
        )
    except OSError as error:
        ours.close()
        code = ErrorCode.LIMIT_EXCEEDED if error.errno in _NO_MORE else ErrorCode.SANDBOX_UNAVAILABLE
        raise _not_launched(os.strerror(error.errno or errno.EIO), code) from None
    finally:
        theirs.close()
    ours.setblocking(False)
    return _Link(process, ours, most, account)


def _lost(what: str) -> ToolError:
    return ToolError(
        ErrorCode.INTERRUPTED,
        f"the process that supervises commands {what} while this command ran, and the command was ended; "
        "it may have taken effect: look before you repeat it",
    )


def _not_launched(reason: str, code: ErrorCode = ErrorCode.SANDBOX_UNAVAILABLE) -> ToolError:
    return ToolError(code, f"the process that supervises commands could not be started: {reason}")


def _check_strings(spec: ProcessSpec) -> None:
    if any("\0" in string for pair in spec.env.items() for string in pair) or any("\0" in word for word in spec.argv):
        raise ToolError(ErrorCode.INVALID_ARGUMENTS, "a command and its environment cannot hold the character U+0000")


def _start_body(launch: Launch, limits: CommandLimits) -> bytes:
    strings = [*launch.argv, *(f"{name}={value}" for name, value in launch.env.items())]
    flags = warden.NESTED * launch.nested | warden.RESTRICTED * launch.restricted
    if launch.scratch is not None:
        flags |= warden.SCRATCH
        strings.insert(0, launch.scratch)
    encoded = b"\0".join([string.encode("utf-8", "surrogateescape") for string in strings])
    bounds = (limits.processes, limits.cpu_seconds, limits.memory_bytes)
    head = warden.START_HEAD.pack(len(launch.argv), flags, len(launch.descriptors))
    return head + warden.LIMITS.pack(*(bound or 0 for bound in bounds)) + encoded


def _start_failure(stage: int, code: int, program: str) -> ToolError:
    """Return what a failed start means to the caller."""
    reason = os.strerror(code)
    if code in _NO_MORE:
        return ToolError(ErrorCode.LIMIT_EXCEEDED, f"the command could not be started ({reason}); try again later")
    if stage == warden.STAGE_DIRECTORY:
        if code in {errno.ENOENT, errno.ENOTDIR}:
            return _no_directory()
        return ToolError(ErrorCode.PERMISSION_DENIED, f"the workspace directory cannot be entered: {reason}")
    if code == errno.E2BIG:
        return ToolError(
            ErrorCode.TOO_LARGE,
            "the command and its environment are too large for the system to start; "
            "write the command to a file with the write tool and run that file",
        )
    if code in _NO_PROGRAM:
        return ToolError(ErrorCode.UNSUPPORTED, f"{program} cannot be run on this machine: {reason}")
    return ToolError(ErrorCode.IO_ERROR, f"the command could not be started: {reason}")


def _no_directory() -> ToolError:
    return ToolError(
        ErrorCode.NOT_FOUND, "the workspace directory does not exist, and nothing makes it again; make a new workspace"
    )


def _close_all(descriptors: Sequence[int]) -> None:
    for fd in descriptors:
        os.close(fd)
