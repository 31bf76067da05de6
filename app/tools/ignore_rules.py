r"""Which files the searches leave out: the rules of `.gitignore`, `.ignore` and `.rgignore` as ripgrep applies them.

They are honoured with or without a repository, in every directory from the workspace root down; nothing above the root
and no global or per-repository file counts. Of the files that say something about a path the nearest decides, and in a
file the last line that fits; over all levels `.rgignore` outranks `.ignore`, which outranks `.gitignore`. What is in an
ignored directory is not looked at.

grep leaves this to ripgrep as far as it can; find does it with what is here, and a test holds the two together. To
both a `?` is one byte of a name: what is matched here are bytes, as text of one character each (`_bytewise`).
"""

import contextlib
import os
import re
import stat
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Final

from app.sandbox.walk import Kind, walk
from app.tools.glob_pattern import GlobError, parse_glob, path_regex

IGNORE_FILES: Final = (".rgignore", ".ignore", ".gitignore")
"""Names of files with rules, the ones that decide first."""

ALWAYS_IGNORED: Final = ".git"
"""Left out everywhere, whatever the rules say."""

MAX_FILE_BYTES: Final = 262_144
"""How much of a file of rules is read; what follows is not looked at."""

MAX_EXPRESSIONS: Final = 1_000
"""How many lines of one file may be more than a name or `*.extension`; what follows them is not looked at."""

_MAX_LINE: Final = 4_096
_OPEN_FILE: Final = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC
_OPEN_DIRECTORY: Final = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_EXTENSION: Final = re.compile(r"\*(\.[\w-]+)", re.ASCII)
_PLAIN_NAME: Final = re.compile(r"[\w.~+@ -]+", re.ASCII)


@dataclass(frozen=True, slots=True)
class _Rule:
    """A line: `glob` is for the whole path, `name_glob` for its last name when only that matters."""

    glob: str
    name_glob: str | None
    negated: bool
    directory_only: bool


class IgnoreFile:
    """The rules of one file."""

    def __init__(self, data: bytes) -> None:
        text = data.decode("utf-8", "surrogateescape").removeprefix("\ufeff")
        rules = [rule for line in text.split("\n") if (rule := _parse_line(line)) is not None]
        self.negates = any(rule.negated for rule in rules)
        self.empty = not rules
        self._negated = [rule.negated for rule in rules]
        self._for_files = _Table([(i, rule) for i, rule in enumerate(rules) if not rule.directory_only])
        self._for_directories = _Table(list(enumerate(rules)))

    def verdict(self, path: str, name: str, *, is_directory: bool) -> bool | None:
        """Return True when a path (relative to the file's directory) is ignored, False when it is not, None for no say.

        `name` is the path's last name; both are bytewise.
        """
        table = self._for_directories if is_directory else self._for_files
        rule = table.last_match(path, name)
        return None if rule < 0 else not self._negated[rule]


class IgnoreRules:
    """The rules that hold in one directory: those of its own files and of the directories above it."""

    def __init__(self, above: "IgnoreRules | None", prefix: str, files: Sequence[IgnoreFile | None]) -> None:
        """Rules of a directory.

        Args:
            above: those of the directory it is in; None at the workspace root.
            prefix: the directory's path from the root with a final `/`; empty for the root.
            files: what its files say, one for each of `IGNORE_FILES`.
        """
        own = [(len(os.fsencode(prefix)), file) for file in files]
        inherited = above.chains if above is not None else ((),) * len(IGNORE_FILES)
        self.chains: tuple[tuple[tuple[int, IgnoreFile], ...], ...] = tuple(
            chain if file is None or file.empty else ((start, file), *chain)
            for chain, (start, file) in zip(inherited, own, strict=True)
        )
        self.any = any(self.chains)

    def ignores(self, path: str, name: str, *, is_directory: bool) -> bool:
        """Whether an entry of this directory is left out; `path` is relative to the workspace root."""
        if name == ALWAYS_IGNORED:
            return True
        if self.any:
            if not path.isascii():
                path, name = _bytewise(path), _bytewise(name)
            for chain in self.chains:
                for start, file in chain:
                    verdict = file.verdict(path[start:], name, is_directory=is_directory)
                    if verdict is not None:
                        return verdict
        return False


NO_RULES: Final = IgnoreRules(None, "", (None,) * len(IGNORE_FILES))


def read_rules(directory: int, above: IgnoreRules | None, prefix: str, names: frozenset[str] | None) -> IgnoreRules:
    """Return the rules that hold in an open directory.

    Args:
        directory: its descriptor.
        above: the rules of the directory it is in.
        prefix: its path from the workspace root, with a final `/` unless it is the root.
        names: which of `IGNORE_FILES` it has; None looks for each.
    """
    files = [_read(directory, name) if names is None or name in names else None for name in IGNORE_FILES]
    if above is not None and not any(files):
        return above
    return IgnoreRules(above, prefix, files)


def has_endless_rules(directory: int, check: Callable[[], None]) -> bool:
    """Whether a file of rules below an open directory is a pipe or a device, which a reader may wait on for ever.

    What is read here never waits; ripgrep does. Links are followed, as it follows them.
    """
    selection = _EndlessRules()
    try:
        start = os.open(b".", _OPEN_DIRECTORY, dir_fd=directory)
    except OSError:
        return False
    try:
        found = walk(start, selection, check=check, notice=frozenset(IGNORE_FILES))
        with contextlib.suppress(OSError), contextlib.closing(found) as entries:
            for _ in entries:
                if selection.found:
                    break
    finally:
        os.close(start)
    return selection.found


class _EndlessRules:
    """Goes through all directories and looks at files of rules there."""

    def __init__(self) -> None:
        self.found = False

    def enter(self, path: str) -> Callable[[str], object]:  # noqa: ARG002 - of the protocol
        return lambda _name: False

    def read(self, directory: int, count: int, noticed: frozenset[str]) -> None:  # noqa: ARG002 - of the protocol
        for name in noticed:
            with contextlib.suppress(OSError):
                mode = os.stat(name, dir_fd=directory).st_mode
                self.found = self.found or stat.S_ISFIFO(mode) or stat.S_ISCHR(mode) or stat.S_ISBLK(mode)

    def choose(self, path: str, name: str, kind: Kind) -> tuple[bool, bool]:  # noqa: ARG002 - of the protocol
        return self.found, name != ALWAYS_IGNORED and not self.found

    def leave(self) -> None:
        """Nothing to note."""


@dataclass(frozen=True, slots=True)
class Ancestry:
    """What holds at the directory or file that a search starts from.

    `rules` are those of the directories above it, None at the root. `ignored` tells that a search from the root leaves
    it out, itself or with a directory it is in: named exactly it is searched all the same, and then without any rules.
    `root_files` are the files of rules at the root, the ones that decide first; empty when a rule between the root and
    the start takes something back, so that nothing less than all of them says what is ignored.
    """

    rules: IgnoreRules | None
    ignored: bool = False
    root_files: tuple[str, ...] = ()


def look_up(root: int, names: Sequence[str]) -> Ancestry:
    """Return what holds at the directory or file that `names` lead to from an open root, following no links."""
    rules: IgnoreRules | None = None
    prefix = ""
    root_files: tuple[str, ...] = ()
    here = os.dup(root)
    try:
        for number, name in enumerate(names):
            files = [_read(here, file) for file in IGNORE_FILES]
            rules = IgnoreRules(rules, prefix, files)
            if number == 0:
                root_files = tuple(name for name, file in zip(IGNORE_FILES, files, strict=True) if file is not None)
            elif any(file is not None and file.negates for file in files):
                root_files = ()
            above = here
            try:
                here = os.open(name, _OPEN_DIRECTORY, dir_fd=above)
            except OSError:
                here = -1
                return Ancestry(rules, rules.ignores(prefix + name, name, is_directory=False), root_files)
            finally:
                os.close(above)
            if rules.ignores(prefix + name, name, is_directory=True):
                return Ancestry(rules, ignored=True)
            prefix += name + "/"
    finally:
        if here >= 0:
            os.close(here)
    return Ancestry(rules, root_files=root_files)


def _read(directory: int, name: str) -> IgnoreFile | None:
    try:
        fd = os.open(name, _OPEN_FILE, dir_fd=directory)
    except OSError:
        return None  # there is none, or it is a link or not ours to read: no rules
    try:
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            return None
        data = os.read(fd, MAX_FILE_BYTES)
        if len(data) == MAX_FILE_BYTES:
            data = data[: data.rfind(b"\n") + 1]
    except OSError:
        return None
    finally:
        os.close(fd)
    return _compiled(data)


@lru_cache(maxsize=128)
def _compiled(data: bytes) -> IgnoreFile:
    return IgnoreFile(data)


def _bytewise(text: str) -> str:
    return os.fsencode(text).decode("latin-1")


def _parse_line(line: str) -> _Rule | None:
    """Return the rule of a line; None for a comment, an empty line and one that is no glob."""
    if line.startswith("#") or len(line) > _MAX_LINE:
        return None
    line = line.removesuffix("\r")
    if not line.endswith("\\ "):
        line = line.rstrip()
    if not line:
        return None
    negated = anchored = False
    if line.startswith(("\\!", "\\#")):
        line = line[1:]
    else:
        if line.startswith("!"):
            negated = True
            line = line[1:]
        if line.startswith("/"):
            anchored = True
            line = line[1:]
    directory_only = line.endswith("/")
    if directory_only:
        line = line[:-1].removesuffix("\\")
    line = _bytewise(line)
    if not anchored and "/" not in line:
        return _Rule(f"**/{line}", line, negated, directory_only)
    if line.endswith("/**"):
        # Everything in the directory, but not the directory itself.
        line += "/*"
    return _Rule(line, None, negated, directory_only)


class _Table:
    """Rules in the form in which most paths need no regular expression: by name, by extension, and the rest."""

    def __init__(self, rules: Sequence[tuple[int, _Rule]]) -> None:
        self._names: dict[str, int] = {}
        self._extensions: dict[str, int] = {}
        by_name: list[tuple[int, str]] = []
        by_path: list[tuple[int, str]] = []
        for number, rule in rules:
            glob = rule.name_glob
            if glob is not None and _PLAIN_NAME.fullmatch(glob):
                self._names[glob] = number
            elif glob is not None and (extension := _EXTENSION.fullmatch(glob)) is not None:
                self._extensions[extension[1]] = number
            else:
                source = _source(rule.glob if glob is None else glob)
                if source and len(by_path) + len(by_name) < MAX_EXPRESSIONS:
                    (by_path if glob is None else by_name).append((number, source))
        self._by_name = _Alternation(by_name)
        self._by_path = _Alternation(by_path)

    def last_match(self, path: str, name: str) -> int:
        """Return the number of the last rule that fits, -1 when none does."""
        number = self._names.get(name, -1)
        dot = name.rfind(".")
        if dot >= 0:
            number = max(number, self._extensions.get(name[dot:], -1))
        return max(number, self._by_name.last_match(name), self._by_path.last_match(path))


class _Alternation:
    """Several expressions in one, the later first: the first that matches is the last of the rules."""

    def __init__(self, sources: Sequence[tuple[int, str]]) -> None:
        latest_first = list(reversed(sources))
        self._numbers = [number for number, _ in latest_first]
        joined = "|".join(f"({source})" for _, source in latest_first)
        self._match = re.compile(f"(?s:(?:{joined})\\Z)").match if latest_first else None

    def last_match(self, text: str) -> int:
        if self._match is None:
            return -1
        found = self._match(text)
        return -1 if found is None or found.lastindex is None else self._numbers[found.lastindex - 1]


def _source(text: str) -> str:
    """Return the source of an expression for a glob; nothing when it is none."""
    try:
        alternatives = parse_glob(text, unclosed_class=True, empty_alternatives=False)
    except GlobError:
        return ""
    return "|".join(path_regex(glob.components) for glob in alternatives if glob.components)
