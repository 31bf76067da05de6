"""The warden: a small process of its own that is the parent of every command.

It exists for three reasons. Being small and single-threaded it starts a command in about a millisecond however large
the service has grown. Being a subreaper it becomes the parent of whatever a command leaves behind, so that nothing
escapes by a double fork or a session of its own. And being another process it outlives the service: when the service
is killed, it sees the end of its socket, ends every command and goes.

It runs as a script (`python -I -S warden.py FD FILES BYTES [UID GID]`) on the standard library alone and imports
nothing of this package; `app.sandbox.local` is its other side and imports the words of their protocol from here.
Started by root, it becomes the user of its commands for good before it does anything: there is a warden for each
account, no command can reach another account's, and none of them has a right that its commands do not have.

**Protocol.** A stream socket; each message is `HEADER` (body length, kind, number of the command) and a body:

* `START`: argc, flags and a count, the limits (`LIMITS`), then the strings of argv and the `NAME=value` strings of the
  environment, joined by NUL; with it go three descriptors (the directory to start in, and the write ends for stdout and
  stderr) and as many more as the count says. Flags: `NESTED`, the program is a wrapper that gets the further
  descriptors as `FIRST_PASSED` and up, and the command is in another process group below it; `RESTRICTED`, the program
  starts under the Landlock ruleset and the seccomp filter that the two further descriptors are; `SCRATCH`, the first
  string is the name of a directory to make in the one to start in.
* `TERMINATE`: SIGTERM to the command's process group. From here on the warden leaves the group alone until `KILL`.
* `KILL`: end the command and all its descendants.
* `READY`: the warden is set up. `STARTED`: the pid. `FAILED`: what failed (`Stage`) and errno.
* `EXITED`: the wait status of the command's own process, whether it had been told to end before it did, and the limit
  it was ended for (`PROCESSES`, `CPU`, `MEMORY`; 0 for none).
* `ENDED`: how many processes of the command could not be ended; 0 unless the kernel holds one.

Once a command's own process has exited, what it left is ended without being asked.

A restriction (Landlock, seccomp, no capabilities) belongs to a thread and is inherited by what it starts, so a
restricted command is started by a thread that restricts itself and ends: no interpreter runs between fork and exec, and
this process stays as it is.

**Limits.** Open files and the size of a file are the kernel's to hold (`RLIMIT_NOFILE`, `RLIMIT_FSIZE`): the second and
third argument are what no command can get more of; 0 leaves them as they are. Processes, processor time and memory are
sums over a command's processes, and these are looked at every `WATCH_SECONDS` while there is a command that has such a
limit: `RLIMIT_NPROC` would count the service's own threads, and no limit of the kernel but a control group's counts the
other two for more than one process. A command over a limit is ended.

**Whose is a process?** Each command runs with a soft limit of its own on real-time CPU time (`RLIMIT_RTTIME`), a
number so large that it limits nothing. It is inherited by every descendant, through fork, exec, `setsid` and `env -i`,
and `/proc/PID/limits` shows it: the tag. An orphan (a child of the warden that is no command's own process) belongs to
the command whose tag it carries, else to the one whose session it is in, and every other process to where its parent
belongs. An orphan that belongs nowhere is ended when the next command ends.
"""

# ruff: noqa: PTH208 - a script that starts in milliseconds: pathlib alone would double its imports

import _thread
import contextlib
import ctypes
import errno
import os
import resource
import select
import signal
import socket
import struct
import sys
import time

HEADER = struct.Struct("!IBI")
START, TERMINATE, KILL = 1, 2, 3
READY, STARTED, FAILED, EXITED, ENDED = 16, 17, 18, 19, 20

START_HEAD = struct.Struct("!IBB")
LIMITS = struct.Struct("!3Q")
"""Processes, seconds of processor time, bytes of memory; 0 is no limit."""

NESTED, RESTRICTED, SCRATCH = 1, 2, 4
MOST_DESCRIPTORS = 6
FIRST_PASSED = 64
"""Above every number that received descriptors can have, so that none is overwritten before it is passed on."""

PID = struct.Struct("!I")
FAILURE = struct.Struct("!Bi")
EXIT = struct.Struct("!iBB")
PROCESSES, CPU, MEMORY = 1, 2, 3
LEFT = struct.Struct("!I")

STAGE_DESCRIPTORS, STAGE_DIRECTORY, STAGE_PROGRAM = 1, 2, 3

GIVE_UP_SECONDS = 3.0
"""How long the end of a command is waited for; only a process the kernel holds on to takes longer."""

WATCH_SECONDS = 0.1
_WATCH_SHARE = 20
"""How many times as long as a look at the limits took the next one is put off at least."""

_OOM_SCORE = 500
_PAGE_BYTES = resource.getpagesize()
_TICKS = os.sysconf("SC_CLK_TCK")
_MEMORY_LINES = (b"Pss_Anon:", b"Pss_Shmem:")

_PR_SET_DUMPABLE = 4
_PR_SET_SECCOMP = 22
_PR_CAPBSET_DROP = 24
_PR_SET_SECUREBITS = 28
_PR_SET_CHILD_SUBREAPER = 36
_PR_SET_NO_NEW_PRIVS = 38
_SECCOMP_MODE_FILTER = 2
_SECBITS_NOROOT = 0b1111  # NOROOT and NO_SETUID_FIXUP, both locked: user 0 gains nothing by starting a program
_CAPABILITY_VERSION = 0x2008_0522
_LANDLOCK_RESTRICT_SELF = 446  # the same on every architecture

_TAG_BASE = 1 << 62
_TAG_SPAN = 1 << 32
_LIMIT_NAME = b"Max realtime timeout"

OUTSIDE, UNKNOWN = -1, -2
_FREEZE_SECONDS = 0.05
_FIRST_DELAY, _LAST_DELAY = 0.001, 0.05


_libc = ctypes.CDLL(None, use_errno=True)


class Process:
    """A line of the process table."""

    __slots__ = ("group", "parent", "pid", "rest", "session")

    def __init__(self, pid: int, parent: int, group: int, session: int, rest: bytes = b"") -> None:
        self.pid = pid
        self.parent = parent
        self.group = group
        self.session = session
        self.rest = rest

    def use(self) -> tuple[int, float, int]:
        """Return its threads, the processor time of it and of its children that are over, its resident bytes."""
        fields = self.rest.split(None, 18)
        ticks = sum(map(int, fields[7:11]))
        return int(fields[13]), ticks / _TICKS, int(fields[17]) * _PAGE_BYTES


def read_process(pid: int) -> Process | None:
    """Return a process by its pid; None when there is none. Raises OSError when that cannot be told."""
    raw = _read_proc(pid, "stat")
    if not raw:
        return None
    # The name stands in parentheses and may hold anything, parentheses included.
    _, parent, group, session, rest = raw[raw.rindex(b")") + 2 :].split(None, 4)
    return Process(pid, int(parent), int(group), int(session), rest)


def memory_of(pid: int, resident: int) -> int:
    """Return a process's share of anonymous and shared memory in bytes; `resident` where the kernel does not tell."""
    lines = [line.split() for line in _read_proc(pid, "smaps_rollup").splitlines()]
    found = [int(words[1]) * 1024 for words in lines if words[:1] and words[0] in _MEMORY_LINES]
    return sum(found) if len(found) == len(_MEMORY_LINES) else resident


def read_tag(pid: int) -> int | None:
    """Return the tag a process carries; None when it has none or is gone."""
    for line in _read_proc(pid, "limits").splitlines():
        if line.startswith(_LIMIT_NAME):
            soft = line[len(_LIMIT_NAME) :].split(None, 1)[0]
            return int(soft) if soft.isdigit() and int(soft) >= _TAG_BASE else None
    return None


def tags_of(warden: int) -> range:
    """Return the tags that the warden with this pid gives."""
    first = _TAG_BASE + warden * _TAG_SPAN
    return range(first, first + _TAG_SPAN)


def _read_proc(pid: int, name: str) -> bytes:
    try:
        fd = os.open(f"/proc/{pid}/{name}", os.O_RDONLY | os.O_CLOEXEC)
    except (FileNotFoundError, ProcessLookupError, PermissionError):
        return b""  # gone, or another user's behind hidepid, which is none of ours
    try:
        return os.read(fd, 4096)
    except ProcessLookupError:
        return b""
    finally:
        os.close(fd)


def become_subreaper() -> None:
    """Make this process the new parent of its orphaned descendants. Raises OSError where there is no such thing."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def become(uid: int, gid: int) -> None:
    """Turn this process, which is root's, into one of this user and group alone, for good. Raises OSError."""
    for capability in range(64):
        with contextlib.suppress(OSError):  # none of that number; or it may not, and then what follows takes it all
            _prctl(_PR_CAPBSET_DROP, capability)
    os.setgroups(())
    os.setresgid(gid, gid, gid)
    os.setresuid(uid, uid, uid)
    if (os.getresuid(), os.getresgid(), os.getgroups()) != ((uid,) * 3, (gid,) * 3, []):
        raise PermissionError(errno.EPERM, os.strerror(errno.EPERM))
    # No program that is setuid gives anything of it back.
    _prctl(_PR_SET_NO_NEW_PRIVS, 1)


def _prctl(option: int, value: int, further: int = 0) -> None:
    _check(_libc.prctl(option, ctypes.c_ulong(value), ctypes.c_ulong(further), ctypes.c_ulong(0), ctypes.c_ulong(0)))


def _check(result: int) -> None:
    if result != 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))


def restrict_thread(ruleset: int, program: int) -> None:
    """Restrict the calling thread, and whatever it starts, for good: no capability, a Landlock ruleset, a filter.

    `ruleset` and `program` are descriptors; the second holds an array of `struct sock_filter`. Raises OSError.
    """
    code = os.pread(program, 1 << 16, 0)
    _prctl(_PR_SET_NO_NEW_PRIVS, 1)
    if os.geteuid() == 0:
        _prctl(_PR_SET_SECUREBITS, _SECBITS_NOROOT)
    header = ctypes.create_string_buffer(struct.pack("=Ii", _CAPABILITY_VERSION, 0), 8)
    _check(_libc.capset(header, ctypes.create_string_buffer(24)))
    _check(_libc.syscall(ctypes.c_long(_LANDLOCK_RESTRICT_SELF), ctypes.c_long(ruleset), ctypes.c_long(0)))
    instructions = ctypes.create_string_buffer(code, len(code))
    descriptor = ctypes.create_string_buffer(struct.pack("@HP", len(code) // 8, ctypes.addressof(instructions)), 16)
    _prctl(_PR_SET_SECCOMP, _SECCOMP_MODE_FILTER, ctypes.addressof(descriptor))


class Family:
    """The descendants of one process, this one: who they are and how they end.

    A scan of `/proc` is no snapshot: a process that forks and exits while it runs can be missed. What a scan tells for
    certain is that nobody is left, as long as no child is reaped meanwhile. Take a descendant that lives when the scan
    begins and go up its line: the last ancestor below this process is a child of it, alive or a zombie not yet
    reaped, and so it stays listed until the scan is over. Hence: end what was found, reap, scan again, until a scan
    finds nothing.
    """

    def __init__(self) -> None:
        self._pid = os.getpid()

    def owner_of_child(self, child: Process) -> int:
        """Return the number of the command a child belongs to, or `OUTSIDE` or `UNKNOWN`."""
        raise NotImplementedError

    def scan(self) -> dict[int, list[Process]]:
        """Return the descendants by the command they belong to. Raises OSError when `/proc` cannot be read."""
        table: dict[int, Process] = {}
        for name in os.listdir("/proc"):
            if name.isdigit():
                process = read_process(int(name))
                if process is not None:
                    table[process.pid] = process
        owners = {self._pid: OUTSIDE}
        families: dict[int, list[Process]] = {}
        for start in table.values():
            line: list[Process] = []
            current: Process | None = start
            owner = OUTSIDE
            while current is not None:
                known = owners.get(current.pid)
                if known is not None:
                    owner = known
                    break
                owners[current.pid] = OUTSIDE  # until it is known; also ends a circle that a reused pid made
                line.append(current)
                if current.parent == self._pid:
                    owner = self.owner_of_child(current)
                    break
                current = table.get(current.parent)
            for process in line:
                owners[process.pid] = owner
                if owner != OUTSIDE:
                    families.setdefault(owner, []).append(process)
        return families

    def end(self, wanted: set[int]) -> dict[int, list[Process]]:
        """SIGKILL what belongs to the wanted commands or to none; return what the first scan found.

        Everything is stopped before anything is killed, so that no process sees another one die and forks in answer.
        Who forks and exits faster than this looks is left for the next round, and its group with it: a signal to a
        group reaches all of it at once.
        """
        first: dict[int, list[Process]] | None = None
        stopped: dict[int, Process] = {}
        until = time.monotonic() + _FREEZE_SECONDS
        while True:
            families = self.scan()
            if first is None:
                first = families
            fresh = [
                process
                for owner in (*wanted, UNKNOWN)
                for process in families.get(owner, ())
                if process.pid not in stopped
            ]
            if not fresh:
                break
            self._signal(fresh, signal.SIGSTOP)
            stopped.update((process.pid, process) for process in fresh)
            if time.monotonic() > until:
                break
        self._signal(list(stopped.values()), signal.SIGKILL)
        return first

    @staticmethod
    def _signal(processes: list[Process], number: int) -> None:
        own = os.getpgid(0)
        for group in {process.group for process in processes} - {own, 0, 1}:
            # A group lies within one session, and a session within one command: nobody else is hit. A pid is handed
            # out again only after all the others were, so those just read still name the same processes.
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(group, number)
        for process in processes:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(process.pid, number)


class Command:
    """A command and how far its end has come."""

    __slots__ = (
        "asked", "deadline", "exceeded", "exited", "held", "killing", "limits", "nested", "number", "pid", "reported",
        "spent",
    )  # fmt: skip

    def __init__(self, number: int, pid: int, *, nested: bool, limits: tuple[int, int, int]) -> None:
        self.number = number
        self.pid = pid
        self.nested = nested  # the command proper is below this process, in another group
        self.asked = False  # told to end before its own process had exited
        self.held = False  # what it leaves may use its grace
        self.killing = False
        self.exited = False
        self.deadline = 0.0  # after which ENDED is sent with what is left; 0 while no end is due
        self.reported = False
        self.limits = limits  # processes, seconds of processor time, bytes of memory; 0 is none
        self.exceeded = 0
        self.spent = 0.0  # processor time of orphans that are over

    @property
    def watched(self) -> bool:
        return any(self.limits) and not (self.exited or self.killing)


class Warden(Family):
    """The loop: messages from the service, children that exit, commands that have to end."""

    def __init__(self, connection: socket.socket) -> None:
        super().__init__()
        self._connection = connection
        self._inbox = bytearray()
        self._outbox = bytearray()
        self._descriptors: list[list[int]] = []
        self._commands: dict[int, Command] = {}
        self._by_leader: dict[int, Command] = {}
        self._by_session: dict[int, int] = {}
        self._given_up: set[int] = set()
        self._childless = True
        self._delay = _FIRST_DELAY
        self._look_at = 0.0  # when limits are looked at next; 0 while there are none
        self._orphans: dict[int, int] = {}  # whose the children were at the last look
        self._tags = tags_of(self._pid)
        self._hard = resource.getrlimit(resource.RLIMIT_RTTIME)[1]
        # Where the hard limit is finite nothing can be tagged: then all orphans in sessions of their own are ended
        # together with the first command that ends.
        self._tagging = self._hard == resource.RLIM_INFINITY
        self._signals = {s for s in signal.valid_signals() if s not in {signal.SIGKILL, signal.SIGSTOP}}
        self._wake, wake_end = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        signal.signal(signal.SIGCHLD, lambda _number, _frame: None)
        signal.set_wakeup_fd(wake_end, warn_on_full_buffer=False)

    def serve(self) -> None:
        """Work until the service closes its end, then end everything."""
        poller = select.poll()
        poller.register(self._connection, select.POLLIN)
        poller.register(self._wake, select.POLLIN)
        connection = self._connection.fileno()
        self._send(READY, 0, b"")
        timeout: float | None = None
        while True:
            ready = [fd for fd, _ in poller.poll(None if timeout is None else timeout * 1000)]
            if self._wake in ready:
                with contextlib.suppress(BlockingIOError):
                    os.read(self._wake, 4096)
            if connection in ready and not self._receive():
                break
            self._reap()
            waits = [wait for wait in (self._watch(), self._settle()) if wait is not None]
            timeout = min(waits, default=None)
            if self._outbox:
                try:
                    self._connection.sendall(self._outbox)
                except OSError:
                    break
                self._outbox.clear()
        self._end_all()

    # -- messages -------------------------------------------------------------------------------------------------

    def _receive(self) -> bool:
        """Take in what is there; False at the end of the stream."""
        try:
            data, ancillary, flags, _ = self._connection.recvmsg(
                1 << 18, socket.CMSG_SPACE(MOST_DESCRIPTORS * 4), socket.MSG_DONTWAIT | socket.MSG_CMSG_CLOEXEC
            )
        except BlockingIOError:
            return True
        except OSError:
            return False
        # The kernel ends a read at each set of descriptors, so there is at most one here, and START by START they
        # come in order. One that did not fit under this process's descriptor limit comes short, not late.
        if ancillary or flags & socket.MSG_CTRUNC:
            received: list[int] = []
            for _, _, raw in ancillary:
                received += [int.from_bytes(raw[i : i + 4], sys.byteorder) for i in range(0, len(raw) - 3, 4)]
            self._descriptors.append(received)
        self._inbox += data
        while len(self._inbox) >= HEADER.size:
            length, kind, number = HEADER.unpack_from(self._inbox)
            end = HEADER.size + length
            if len(self._inbox) < end:
                break
            body = bytes(self._inbox[HEADER.size : end])
            del self._inbox[:end]
            self._dispatch(kind, number, body)
        return bool(data)

    def _dispatch(self, kind: int, number: int, body: bytes) -> None:
        if kind == START:
            self._start(number, body, self._descriptors.pop(0))
            return
        self._reap()  # who exited before this message was read has exited by itself
        command = self._commands.get(number)
        if command is None:
            return
        if not command.exited and not command.exceeded:
            command.asked = True
        if kind == KILL:
            command.killing = True
        elif not command.exited:
            command.held = True
            for group in self._groups(command):
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.killpg(group, signal.SIGTERM)

    @staticmethod
    def _groups(command: Command) -> set[int]:
        """Return the process groups that SIGTERM goes to. A wrapper is spared, as it could not tell how it ended."""
        found: set[int] = set()
        if command.nested:
            with contextlib.suppress(OSError):
                processes = (read_process(int(name)) for name in os.listdir("/proc") if name.isdigit())
                found = {process.group for process in processes if process and process.parent == command.pid}
        return found - {command.pid} or {command.pid}

    def _send(self, kind: int, number: int, body: bytes) -> None:
        self._outbox += HEADER.pack(len(body), kind, number) + body

    # -- starting -------------------------------------------------------------------------------------------------

    def _start(self, number: int, body: bytes, descriptors: list[int]) -> None:
        argc, flags, further = START_HEAD.unpack_from(body)
        if len(descriptors) != 3 + further:
            for fd in descriptors:
                os.close(fd)
            self._send(FAILED, number, FAILURE.pack(STAGE_DESCRIPTORS, errno.EMFILE))
            return
        directory, stdout, stderr, *passed = descriptors
        stage = STAGE_DIRECTORY
        try:
            os.fchdir(directory)
            stage = STAGE_PROGRAM
            processes, seconds, memory = LIMITS.unpack_from(body, START_HEAD.size)
            strings = body[START_HEAD.size + LIMITS.size :].split(b"\0")
            if flags & SCRATCH:
                with contextlib.suppress(OSError):  # then programs find another place or say why not
                    os.mkdir(strings[0], 0o700)  # noqa: PTH102 - without pathlib
                del strings[0]
            if self._tagging:
                resource.setrlimit(resource.RLIMIT_RTTIME, (self._tags[number], self._hard))
            if flags & RESTRICTED:
                pid = self._spawn_restricted(passed, strings, argc, stdout, stderr)
            else:
                pid = self._spawn(strings, argc, stdout, stderr, passed)
        except OSError as error:
            self._send(FAILED, number, FAILURE.pack(stage, error.errno or errno.EIO))
        else:
            nested = bool(flags & NESTED)
            # A wrapper is two processes, and both are the service's affair.
            most = processes + 2 if processes and nested else processes
            command = Command(number, pid, nested=nested, limits=(most, seconds, memory))
            self._commands[number] = self._by_leader[pid] = command
            self._by_session[pid] = number
            self._send(STARTED, number, PID.pack(pid))
        finally:
            os.chdir("/")  # hold no workspace
            for fd in descriptors:
                os.close(fd)

    def _spawn_restricted(
        self, restrictions: list[int], strings: list[bytes], argc: int, stdout: int, stderr: int
    ) -> int:
        """Start a program from a thread that restricts itself before and ends after. Nothing else runs meanwhile."""
        pids: list[int] = []
        errors: list[OSError] = []
        done = _thread.allocate_lock()
        done.acquire()

        def start() -> None:
            try:
                restrict_thread(*restrictions)
                pids.append(self._spawn(strings, argc, stdout, stderr, []))
            except OSError as error:
                errors.append(error)
            finally:
                done.release()

        try:
            _thread.start_new_thread(start, ())
        except RuntimeError:
            raise OSError(errno.EAGAIN, os.strerror(errno.EAGAIN)) from None
        done.acquire()
        for error in errors:
            raise error
        return pids[0]

    def _spawn(self, strings: list[bytes], argc: int, stdout: int, stderr: int, passed: list[int]) -> int:
        environment: dict[bytes, bytes] = {}
        for entry in strings[argc:]:
            name, _, value = entry.partition(b"=")
            environment[name] = value
        # posix_spawn is vfork and exec: its cost does not depend on the size of a process.
        return os.posix_spawn(
            strings[0],
            strings[:argc],
            environment,
            file_actions=(
                (os.POSIX_SPAWN_OPEN, 0, b"/dev/null", os.O_RDONLY, 0),
                (os.POSIX_SPAWN_DUP2, stdout, 1),
                (os.POSIX_SPAWN_DUP2, stderr, 2),
                *((os.POSIX_SPAWN_DUP2, fd, FIRST_PASSED + place) for place, fd in enumerate(passed)),
            ),
            setsid=True,
            setsigmask=(),
            setsigdef=self._signals,
        )

    # -- ending ---------------------------------------------------------------------------------------------------

    def owner_of_child(self, child: Process) -> int:
        """Return the number of the command an orphan or a command's own process belongs to."""
        leader = self._by_leader.get(child.pid)
        if leader is not None:
            return leader.number
        tag = read_tag(child.pid) if self._tagging else None
        if tag is not None and tag in self._tags:
            number = tag - self._tags.start
            if number in self._commands:
                return number
        return self._by_session.get(child.session, UNKNOWN)

    def _reap(self) -> None:
        while True:
            try:
                pid, status, used = os.wait4(-1, os.WNOHANG)
            except ChildProcessError:
                self._childless = True
                return
            if pid == 0:
                self._childless = False
                return
            self._given_up.discard(pid)
            command = self._by_leader.pop(pid, None)
            if command is not None:
                command.exited = True
                self._send(EXITED, command.number, EXIT.pack(status, command.asked, command.exceeded))
            elif pid in self._orphans:
                owner = self._commands.get(self._orphans.pop(pid))
                if owner is not None:
                    owner.spent += used.ru_utime + used.ru_stime

    def _watch(self) -> float | None:
        """Look whether commands keep to their limits, now and then; return when to look again, in seconds."""
        watched = [command for command in self._commands.values() if command.watched]
        if not watched:
            self._look_at = 0.0
            return None
        now = time.monotonic()
        self._look_at = self._look_at or now + WATCH_SECONDS
        if now < self._look_at:
            return self._look_at - now
        with contextlib.suppress(OSError):  # no descriptor or memory to look with: again in a moment
            families = self.scan()
            self._orphans = {
                p.pid: owner for owner, family in families.items() for p in family if p.parent == self._pid
            }
            for command in watched:
                command.exceeded = _exceeded(families.get(command.number, []), command.limits, command.spent)
                command.killing = bool(command.exceeded)
            # Whose it is cannot be told of a process that hides it: what nobody may use none of them may.
            most = [max(limits) if all(limits) else 0 for limits in zip(*(c.limits for c in watched), strict=True)]
            if _exceeded(families.get(UNKNOWN, []), (most[0], most[1], most[2]), 0.0):
                self.end(set())
        done = time.monotonic()
        self._look_at = done + max(WATCH_SECONDS, (done - now) * _WATCH_SHARE)
        return self._look_at - done

    def _settle(self) -> float | None:
        """Bring the commands that have to end closer to it; return when to look again, in seconds."""
        due = [command for command in self._commands.values() if command.exited or command.killing]
        if not due:
            self._delay = _FIRST_DELAY
            return None
        if self._childless:
            for command in due:
                self._ended(command, 0)
            return None
        now = time.monotonic()
        wanted = {command.number for command in due if command.killing or not command.held}
        try:
            families = self.end(wanted) if wanted else self.scan()
        except OSError:
            families = None  # no descriptor or memory to look with: again in a moment
        delay: float | None = None
        for command in due:
            if families is None:
                left = 1
            else:
                strays = families.get(UNKNOWN, ()) if command.number in wanted else ()
                left = len(families.get(command.number, ())) + sum(s.pid not in self._given_up for s in strays)
            if command.exited and not left:
                if command.number in wanted:
                    self._ended(command, 0)
                else:
                    command.killing = True  # its grace is over: nothing of it is left but perhaps strays
                    delay = 0.0
                continue
            if command.number not in wanted:
                continue  # within its grace: the exit of the last process, a child by then, wakes this loop
            command.deadline = command.deadline or now + GIVE_UP_SECONDS
            if now > command.deadline and not command.reported:
                command.reported = True
                self._given_up.update(p.pid for p in (families or {}).get(UNKNOWN, ()))
                self._send(ENDED, command.number, LEFT.pack(max(left, 1)))
            delay = self._delay if delay is None else delay
        if delay:
            self._delay = min(self._delay * 2, _LAST_DELAY)
        return delay

    def _ended(self, command: Command, left: int) -> None:
        del self._commands[command.number]
        if self._by_session.get(command.pid) == command.number:
            del self._by_session[command.pid]
        if not command.reported:
            self._send(ENDED, command.number, LEFT.pack(left))
        self._delay = _FIRST_DELAY

    def _end_all(self) -> None:
        """End every descendant: the service is gone, or has no more use for this process."""
        until = time.monotonic() + GIVE_UP_SECONDS
        delay = _FIRST_DELAY
        while time.monotonic() < until:
            self._reap()
            if self._childless:
                return
            with contextlib.suppress(OSError):
                self.end(set(self._commands))
            time.sleep(delay)
            delay = min(delay * 2, _LAST_DELAY)


def _exceeded(family: list[Process], limits: tuple[int, int, int], spent: float) -> int:
    """Return which limit processes exceed together, 0 for none."""
    uses = [(process.pid, *process.use()) for process in family]
    threads, seconds, memory = limits
    if threads and sum(use[1] for use in uses) > threads:
        return PROCESSES
    if seconds and spent + sum(use[2] for use in uses) > seconds:
        return CPU
    # What is resident counts shared pages once for each process, so it only tells when to look closely.
    if memory and sum(use[3] for use in uses) > memory and sum(memory_of(use[0], use[3]) for use in uses) > memory:
        return MEMORY
    return 0


def _bound_commands(open_files: int, file_bytes: int) -> None:
    """Give this process, and so every command, the limits that none may raise; no command leaves a core."""
    for which, limit in (
        (resource.RLIMIT_NOFILE, open_files),
        (resource.RLIMIT_FSIZE, file_bytes),
    ):
        if limit:
            hard = resource.getrlimit(which)[1]
            hard = limit if hard == resource.RLIM_INFINITY else min(limit, hard)
            resource.setrlimit(which, (hard, hard))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    # When the machine has no memory left, commands go before the service does.
    with contextlib.suppress(OSError), open("/proc/self/oom_score_adj", "r+b", buffering=0) as file:  # noqa: PTH123 - without pathlib
        if int(file.read()) < _OOM_SCORE:
            file.write(b"%d" % _OOM_SCORE)


def main() -> None:
    """Run as the warden on the socket whose descriptor is the first argument.

    What follows are two limits and, from root, the user and the group to run as.
    """
    # A terminal's ^C and a service manager's SIGTERM go to everyone in sight. The service decides when to stop, and
    # this process goes when the service has gone.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGPIPE):
        signal.signal(number, signal.SIG_IGN)
    connection = socket.socket(fileno=int(sys.argv[1]))
    connection.set_inheritable(False)
    become_subreaper()
    _bound_commands(*map(int, sys.argv[2:4]))
    if len(sys.argv) > 4:
        become(*map(int, sys.argv[4:6]))
    # The environments of all commands pass through here; a command of the same user may not read them.
    _prctl(_PR_SET_DUMPABLE, 0)
    if read_process(os.getpid()) is None:
        sys.exit("toolcrib: commands cannot be supervised without /proc")
    Warden(connection).serve()


if __name__ == "__main__":
    main()
