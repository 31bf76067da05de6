r"""Talking to ripgrep: its arguments, and what it writes.

ripgrep only says where: path, line number, byte offset, and the column of a line's first match. The text of a line is
then read from the file through the workspace's root. So ripgrep's output, and its memory, stay small whatever the lines
are like, and nothing is ever shown that lies outside the workspace, even if a name is swapped for a link meanwhile.

Its debug log is read too, for the two things that are said nowhere else: which files were left out as binary and which
by ignore rules.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

from app.sandbox.containment import TEMPORARY_PREFIX
from app.tools.ignore_rules import ALWAYS_IGNORED

MAX_ERROR_BYTES: Final = 8_192
NAMED_UNREADABLE: Final = 3

_FLAGS: Final = (
    "--no-config",
    "--debug",
    "--color=never",
    # what is searched
    "--hidden",
    "--no-follow",
    "--one-file-system",
    "--no-mmap",  # a file that shrinks under a mapping would end ripgrep by SIGBUS
    "--no-require-git",
    "--no-ignore-global",
    "--no-ignore-exclude",
    "--no-ignore-parent",  # above the root nothing counts; what lies between the root and the start is given
    "--no-ignore-messages",
    # how
    "--crlf",
    "--no-heading",
    "--with-filename",
    "--null",
    "--line-number",
    "--column",
    "--byte-offset",
    "--max-columns=1",  # where a line is, not what is in it
    "--no-context-separator",
)

_HIDDEN_GLOBS: Final = (f"!{ALWAYS_IGNORED}", f"!{TEMPORARY_PREFIX}*")

# Globs that mean the same to ripgrep and to `path_pattern`: no escapes, no classes, nothing but names in braces, and no
# question mark, which is a byte to the one and a character to the other.
_PLAIN_GLOB: Final = re.compile(r"(?:[\w.*+@~=/-]|\{[\w.*+@~=-]+(?:,[\w.*+@~=-]+)*\})+", re.ASCII)
_SPECIAL: Final = re.compile(r"[\\*?\[\]{}!#]")


@dataclass(frozen=True, slots=True)
class Query:
    """What to search for and where. `start` is a path from the root as the file system decodes it, empty for the root.

    `prefix` is that with a final `/`, empty too for the root. `max_count` bounds the lines of one file. `ignore_files`
    are files of rules at the root, the ones that decide first; `ignored` turns all rules off.
    """

    pattern: str
    start: str
    prefix: str
    literal: bool
    case_sensitive: bool
    context: int
    max_count: int
    encoding: str | None = None
    include: str | None = None
    exclude: str | None = None
    ignored: bool = False
    ignore_files: Sequence[str] = ()


def search_arguments(query: Query, *, in_order: bool) -> list[str]:
    """Return ripgrep's arguments; `in_order` costs it its second thread and gives files sorted as ours are.

    Include and exclude are passed on as far as ripgrep means the same by them: that only saves work, what they mean is
    decided on what comes back. Note that files an include names are searched even when they are ignored.
    """
    arguments = [*_FLAGS, "--sort=path" if in_order else "--threads=2"]
    arguments.append("--fixed-strings" if query.literal else "--no-fixed-strings")
    arguments.append("--case-sensitive" if query.case_sensitive else "--ignore-case")
    arguments += [f"--context={query.context}", f"--max-count={query.max_count}"]
    if query.encoding is not None:
        arguments.append(f"--encoding={query.encoding}")
    if query.ignored:
        arguments.append("--no-ignore")
    arguments += [f"--ignore-file={name}" for name in reversed(query.ignore_files)]
    if query.include is not None:
        arguments += [f"--glob={glob}" for glob in _passed_on(query.include, query.prefix, including=True)]
    if query.exclude is not None:
        arguments += [f"--glob=!{glob}" for glob in _passed_on(query.exclude, query.prefix, including=False)]
    arguments += [f"--glob={glob}" for glob in _HIDDEN_GLOBS]
    start = query.start if query.start.startswith("/") else f"./{query.start}" if query.start else "."
    return [*arguments, f"--regexp={query.pattern}", "--", start]


def _passed_on(glob: str, prefix: str, *, including: bool) -> list[str]:
    """Return globs that tell ripgrep the same, about a path itself and all below it; none when they might not."""
    names = glob.split("/")
    if _PLAIN_GLOB.fullmatch(glob) is None or not prefix.isprintable() or prefix.startswith("/"):
        return []
    if any(name in {"", ".", ".."} or ("**" in name and name != "**") for name in names):
        return []
    if including and not names[-1].strip("*"):
        return []  # it would take every directory out of the ignore rules, and what it says, most files fulfil
    anchor = _SPECIAL.sub(r"\\\g<0>", prefix)
    place = f"/{anchor}" if len(names) > 1 else f"/{anchor}**/"
    return [f"{place}{glob}", f"{place}{glob}/**"]


@dataclass(frozen=True, slots=True)
class Row:
    """A line that ripgrep points at.

    `offset` counts the bytes before the line and `column` those before its first match (None for a context line), both
    in the text as UTF-8 and without a byte order mark.
    """

    path: bytes
    line: int
    offset: int
    column: int | None


_PLACE: Final = re.compile(rb"(\d+)(?::(\d+):(\d+):|-(\d+)-)")
_BINARY: Final = re.compile(
    rb"(.*?): (?:binary file matches|WARNING: stopped searching binary file after match)"
    rb' \(found "\\0" byte around offset \d+\)\n',
    re.DOTALL,
)


@dataclass(slots=True)
class OutputParser:
    """Takes ripgrep's standard output as it comes. `binary` counts files found out to be binary after a match."""

    binary: int = 0
    _rest: bytes = b""

    def feed(self, data: bytes) -> list[Row]:
        """Return the lines that are complete by now."""
        buffer = self._rest + data
        rows: list[Row] = []
        position = 0
        while True:
            separator = buffer.find(b"\0", position)
            if b"\n" in buffer[position : separator if separator >= 0 else len(buffer)]:
                # Either a name with a line end in it or a message, which has no NUL of its own.
                message = _BINARY.match(buffer, position)
                if message is not None and (separator < 0 or message.end() <= separator):
                    self.binary += 1
                    position = message.end()
                    continue
            end = buffer.find(b"\n", separator) if separator >= 0 else -1
            if end < 0:
                break
            place = _PLACE.match(buffer, separator + 1)
            if place is not None:
                path = buffer[position:separator].removeprefix(b"./")
                line, column, offset, context_offset = place.groups()
                if column is None:
                    rows.append(Row(path, int(line), int(context_offset), None))
                else:
                    rows.append(Row(path, int(line), int(offset), int(column) - 1))
            position = end + 1
        self._rest = buffer[position:]
        return rows


_LOG: Final = b"rg: DEBUG|"
_BINARY_LOG: Final = re.compile(rb"rg: DEBUG\|grep_printer::\w+\|[^|]*: ignoring .*: found binary data at offset \d+\Z")
_IGNORED_LOG: Final = b"Ignore(IgnoreMatch(Gitignore("
_WALK_LOG: Final = b"rg: DEBUG|ignore::walk|"
_UNREADABLE: Final = re.compile(rb"rg: (?:\./)?(.*?): (?:IO error for operation on .*: )?([^:]*) \(os error \d+\)\Z")


@dataclass(slots=True)
class ErrorParser:
    """Takes ripgrep's standard error as it comes, which is mostly its log.

    `binary` files were not searched, or not to their end; `ignored` files and directories were left out by rules;
    `unreadable` ones could not be opened, the first of them with reasons in `named`. `message` is what else it said.
    """

    binary: int = 0
    ignored: int = 0
    unreadable: int = 0
    named: list[tuple[bytes, str]] = field(default_factory=list)
    _message: bytearray = field(default_factory=bytearray)
    _rest: bytes = b""

    def feed(self, data: bytes) -> None:
        *lines, rest = (self._rest + data).split(b"\n")
        # A name may be long; a line of this length is no message.
        self._rest = rest[: 4 * MAX_ERROR_BYTES]
        for line in lines:
            self._take(line)

    @property
    def message(self) -> str:
        if self._rest:
            self._take(self._rest)
            self._rest = b""
        return self._message.decode("utf-8", "replace").strip()

    def _take(self, line: bytes) -> None:
        if line.startswith(_LOG):
            if line.startswith(_WALK_LOG):
                self.ignored += _IGNORED_LOG in line
            elif _BINARY_LOG.match(line) is not None:
                self.binary += 1
            return
        unreadable = _UNREADABLE.match(line)
        if unreadable is not None:
            self.unreadable += 1
            if len(self.named) < NAMED_UNREADABLE:
                self.named.append((unreadable[1], unreadable[2].decode("utf-8", "replace")))
        elif len(self._message) < MAX_ERROR_BYTES:
            self._message += line + b"\n"


def explain(message: str) -> str:
    """Return what ripgrep says about a pattern or a flag it refuses, without advice about its own options."""
    paragraphs = [
        paragraph
        for paragraph in message.removeprefix("rg: ").split("\n\n")
        if not paragraph.startswith(("Consider enabling", "When multiline mode"))
    ]
    return "\n\n".join(paragraphs).strip()
