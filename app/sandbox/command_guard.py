r"""The command guard: refuses a shell command that names a path outside the workspace, before anything starts.

It is a guard-rail for callers that mean well and a hint to the caller that does not know where it is. It is not a
boundary: a command that computes a path (`cd "$x"`, `cat $(printf '\57etc')`, any program) gets by. Where a kernel
sandbox holds the command it is off.

**What is refused.** A shell word, quotes removed, that starts with `/`, `~/` or `../`, that is `~`, `~user` or `..`, or
that contains `/../`; the same after a `=` (`--file=/etc/passwd`, `x=../y`) and after a redirection (`>/etc/x`).

**What passes.** A path at or below the workspace's root; `/dev/null`, `/dev/stdin`, `/dev/stdout`, `/dev/stderr`,
`/dev/fd`, and the devices that only make bytes (`/dev/zero`, `/dev/full`, `/dev/random`, `/dev/urandom`); a program in
a directory of the system's PATH (`/usr/bin/env`), but not as the target of a redirection; a URL (`file:` is a path).

**What is no word.** Comments, the bodies of here-documents and here-strings are data (the command substitutions in an
unquoted here-document are code and are looked at). Arithmetic is no path: `$((a / b))`. So are the patterns of `case`,
what a test compares with (`[[ $x == /* ]]`), and the value of IFS.

**What only looks like a path.** Some programs take text where others take paths, and their texts often start with a
slash: `sed '/^#/d' f`, `awk '/re/ {print}' f`, `grep '/api/' f`, `cut -d / -f 2`, `tr / _`. For the programs in
`_TEXTS` those arguments, and only those, are not looked at; `grep root /etc/passwd` and `sed -n 1p '/etc/passwd'` are
refused. Every other text that starts with a slash is refused too, and the message says how to go on.

Malformed shell is read as far as it makes sense and never raises. The time is linear in the length of the command.
"""

import posixpath
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final, Literal

from app.errors import ErrorCode, ToolError

_SYSTEM_DIRECTORIES: Final = "/usr/local/sbin|/usr/local/bin|/usr/sbin|/usr/bin|/sbin|/bin"
_PROGRAM: Final = re.compile(rf"(?:{_SYSTEM_DIRECTORIES})/[\w.+\[-]{{1,255}}(?=:|\Z)")
_PROGRAM_DIRECTORY: Final = re.compile(rf"(?:{_SYSTEM_DIRECTORIES})/?(?=:|\Z)")
_DEVICE: Final = re.compile(r"/dev/(?:null|zero|full|u?random|std(?:in|out|err)|fd(?:/\d{0,9})?)\Z")
_URL: Final = re.compile(r"(?:[-\w]+=)?(?!file:)[a-z][a-z0-9+.-]*://", re.IGNORECASE)
_FILE_URL: Final = re.compile(r"file:(?://(?:localhost)?(?=/))?", re.IGNORECASE)
_AFTER_EQUALS: Final = re.compile(r"(?<=[^\s=!<>~])=(?=/|~|\.\.|[Ff][Ii][Ll][Ee]:)")
_TILDE: Final = re.compile(r"~(?:[A-Za-z_][\w.-]*)?(?:/|\Z)")
_ASSIGNMENT: Final = re.compile(r"[A-Za-z_]\w*(?:\[[^\]]*\])?\+?=")
_SUSPICIOUS: Final = re.compile(r"/|~|\.\.|\$'")

_LONGEST_NAME: Final = 4096
_SHOWN: Final = 200
_DEPTH: Final = 500  # substitutions within substitutions; what is deeper counts as text of the level it is in
_NESTING: Final = 8  # commands within commands (`bash -c`, here-documents): each level reads its text once more

# What ends a run of plain characters, by where we are.
_PLAIN: Final = re.compile(r"[^\s;|&()<>'\"\\`$#]+", re.ASCII)
_PLAIN_IN_QUOTES: Final = re.compile(r"[^\"\\`$]+")
_PLAIN_IN_PARAMETER: Final = re.compile(r"[^}\"'\\`$]+")
_PLAIN_IN_ARITHMETIC: Final = re.compile(r"[^()\"'\\`$]+")
_PLAIN_IN_HERE_DOCUMENT: Final = re.compile(r"[^\\`$]+")
_BLANKS: Final = re.compile(r"[^\S\n](?:[^\S\n]|\\\n)*", re.ASCII)
_REDIRECTION: Final = re.compile(r"&>>|&>|<<<|<<-|<<|<>|<&|>>|>&|>\||<|>")
_ANSI_QUOTED: Final = re.compile(r"(?:[^'\\]|\\.)*", re.DOTALL)
_ANSI_ESCAPE: Final = re.compile(
    r"\\(?:x([0-9A-Fa-f]{1,2})|u([0-9A-Fa-f]{1,4})|U([0-9A-Fa-f]{1,8})|([0-7]{1,3})|c(.)|(.))", re.DOTALL
)
_ANSI_CHARACTERS: Final = {"n": "\n", "t": "\t", "r": "\r", "a": "\a", "b": "\b", "e": "\x1b", "f": "\f", "v": "\v"}

_KEYWORDS: Final = frozenset({"!", "{", "do", "elif", "else", "if", "then", "time", "until", "while"})
_WRAPPERS: Final = frozenset(
    {"builtin", "command", "env", "exec", "ionice", "nice", "nohup", "stdbuf", "sudo", "timeout", "xargs"}
)
_NO_COMMAND: Final = re.compile(r"-.*|\d+(?:\.\d+)?[smhd]?|\{\}", re.DOTALL)
_SHELLS: Final = frozenset({"bash", "dash", "ksh", "sh", "zsh"})
_TESTS: Final = frozenset({"[", "[[", "test"})
_COMPARISONS: Final = frozenset({"=", "==", "!=", "=~"})


@dataclass(frozen=True, slots=True)
class _Texts:
    """Which arguments of a program are text: its first `operands`, and the values of the `options`.

    `takes` are other short options with a value of their own, `instead` those that take the place of the operands;
    the rest of a word after one of `suffix` is its value. `long` are options whose value is text.
    """

    operands: int = 0
    options: str = ""
    takes: str = ""
    instead: str = ""
    suffix: str = ""
    long: frozenset[str] = frozenset()


_EVERY: Final = 1_000_000_000
_GREP: Final = _Texts(1, "e", "ABCDdfm", "ef", "", frozenset({"--regexp"}))
_AWK: Final = _Texts(1, "Fev", "fil", "ef", "", frozenset({"--field-separator", "--assign", "--source"}))
_TEXTS: Final = {
    "grep": _GREP,
    "egrep": _GREP,
    "fgrep": _GREP,
    "zgrep": _GREP,
    "rg": _Texts(1, "egr", "ABCEMTdfjmt", "ef", "", frozenset({"--regexp", "--glob", "--replace"})),
    "sed": _Texts(1, "e", "fl", "ef", "i", frozenset({"--expression"})),
    "awk": _AWK,
    "gawk": _AWK,
    "mawk": _AWK,
    "nawk": _AWK,
    "perl": _Texts(options="Ee", suffix="i"),
    "ruby": _Texts(options="e"),
    "node": _Texts(options="ep"),
    "python": _Texts(options="c"),
    "python3": _Texts(options="c"),
    "tr": _Texts(_EVERY),
    "expr": _Texts(_EVERY),
    "cut": _Texts(options="d", long=frozenset({"--delimiter", "--output-delimiter"})),
    "paste": _Texts(options="d", long=frozenset({"--delimiters"})),
    "sort": _Texts(options="t", long=frozenset({"--field-separator"})),
    "join": _Texts(options="t"),
    "column": _Texts(options="os"),
    "read": _Texts(options="d"),
}

_Where = Literal["commands", "quotes", "parameter", "arithmetic", "here-document"]


@dataclass(slots=True)
class _Frame:
    """One level of nesting. In commands: the word that is being read and the simple command it belongs to."""

    where: _Where
    end: str = ""
    depth: int = 0
    parts: list[str] = field(default_factory=list)
    in_word: bool = False
    quoted: bool = False
    tilde: bool = False
    role: Literal["word", "target", "data", "delimiter", "delimiter-"] = "word"
    cases: list[Literal["subject", "in", "pattern", "body"]] = field(default_factory=list)
    # the simple command
    program: str = ""
    previous: str = ""
    texts: _Texts | None = None
    operands: int = 0
    options_over: bool = False
    wrapped: bool = False
    next_is: Literal["", "text", "value", "command"] = ""
    evaluated: list[str] = field(default_factory=list)

    def new_command(self) -> None:
        self.program = self.previous = ""
        self.texts = None
        self.operands = 0
        self.options_over = self.wrapped = False
        self.next_is = ""
        self.evaluated = []


def check_command(command: str, roots: Sequence[str]) -> None:
    """Refuse a command that names a path outside the workspace; `roots` are the spellings of the workspace's root.

    Raises:
        ToolError: `path_outside_workspace`; the message names the word and says how to go on.
    """
    word = find_word_outside(command, roots)
    if word is None:
        return
    shown = word if len(word) <= _SHOWN else f"{word[:_SHOWN]}…"
    raise ToolError(
        ErrorCode.PATH_OUTSIDE_WORKSPACE,
        f"The command was not run: its word {shown!r} names a path outside the workspace. "
        "Commands start in the workspace's root: write paths relative to it (src/a.txt, not /src/a.txt or ../a.txt). "
        "If the word is a text and no path, put it in a file and let the command read it. "
        "This check is a guard-rail, not a boundary; the workspace option bash.guard turns it off.",
        {"word": shown},
    )


def find_word_outside(command: str, roots: Sequence[str]) -> str | None:
    """Return the first word of a shell command that the guard refuses; None when it passes. Never raises."""
    if _SUSPICIOUS.search(command) is None:
        return None
    guard = _Guard([posixpath.normpath(root) for root in roots])
    waiting: list[tuple[str, _Where, int]] = [(command, "commands", 0)]
    while waiting:
        text, where, level = waiting.pop()
        found = _Scanner(text, where, guard).run()
        if guard.refused is not None:
            return guard.refused
        if level < _NESTING:
            waiting += [(inner, inner_where, level + 1) for inner, inner_where in found]
    return None


class _Guard:
    """What is allowed, word by word; `refused` is the first word that is not."""

    def __init__(self, roots: Sequence[str]) -> None:
        self._roots = roots
        self.refused: str | None = None

    def look_at(self, word: str, *, target: bool, tilde: bool) -> None:
        if self.refused is None and self._leads_out(word, target=target, tilde=tilde):
            self.refused = word

    def _leads_out(self, word: str, *, target: bool, tilde: bool) -> bool:
        if _URL.match(word) is not None:
            return False
        if "/../" in word:
            return True
        if word.endswith("/..") and len(word) <= _LONGEST_NAME:
            word = posixpath.normpath(word)  # a/.. stays inside
        if self._starts_outside(word, 0, target=target) or (tilde and _TILDE.match(word) is not None):
            return True
        first_blank = re.search(r"\s", word)
        head = len(word) if first_blank is None else first_blank.start()
        for match in _AFTER_EQUALS.finditer(word, 0, head):
            position = match.end()
            if word.endswith("IFS", 0, match.start()):
                continue
            if word.endswith("PATH", 0, match.start()) and _PROGRAM_DIRECTORY.match(word, position):
                continue
            if self._starts_outside(word, position, target=target) or _TILDE.match(word, position):
                return True
        return False

    def _starts_outside(self, word: str, position: int, *, target: bool) -> bool:
        """Whether a path outside starts at this position. Looks at a bounded part of the word."""
        file_url = _FILE_URL.match(word, position)
        if file_url is not None:
            position = file_url.end()
        if word.startswith(("../", "~/"), position) or (word.startswith("..", position) and len(word) == position + 2):
            return True
        if not word.startswith("/", position):
            return False
        if _DEVICE.match(word, position) or (not target and _PROGRAM.match(word, position)):
            return False
        for root in self._roots:
            end = position + len(root)
            if word.startswith(root, position) and (end == len(word) or word[end] in "/:"):
                return False
        return True


class _Scanner:
    """Reads one text as shell and shows the guard its words."""

    def __init__(self, text: str, where: _Where, guard: _Guard) -> None:
        self._text = text
        self._position = 0
        self._guard = guard
        self._frames = [_Frame(where)]
        self._backticks = 0
        self._here_documents: list[tuple[str, bool, bool]] = []
        self._found: list[tuple[str, _Where]] = []

    def run(self) -> list[tuple[str, _Where]]:
        """Read to the end; return the texts in it that are shell of their own."""
        steps = {
            "commands": self._in_commands,
            "quotes": self._in_quotes,
            "parameter": self._in_parameter,
            "arithmetic": self._in_arithmetic,
            "here-document": self._in_here_document,
        }
        length = len(self._text)
        while self._position < length and self._guard.refused is None:
            frame = self._frames[-1]
            steps[frame.where](frame)
        while self._frames:
            self._pop()
        return self._found

    # -- one step in each place; every step moves on by at least one character -----------------------------------

    def _in_commands(self, frame: _Frame) -> None:
        text, position = self._text, self._position
        plain = _PLAIN.match(text, position)
        if plain is not None:
            if not frame.in_word:
                frame.tilde = text[position] == "~"
            self._append(plain.group())
            self._position = plain.end()
            return
        blanks = _BLANKS.match(text, position)
        if blanks is not None:
            self._end_word(frame)
            self._position = blanks.end()
            return
        character = text[position]
        if character == "\n":
            self._end_command(frame)
            self._position += 1
            self._skip_here_documents()
        elif character == "'":
            self._quoted_until("'")
        elif character == '"':
            self._append("", quoted=True)
            self._push("quotes")
        elif character == "#":
            if frame.in_word:
                self._append("#")
                self._position += 1
            else:
                end = text.find("\n", position)
                self._position = len(text) if end < 0 else end
        elif character in "<>" or text.startswith("&>", position):
            self._redirection(frame)
        elif character in ";&|":
            self._operator(frame)
        elif character == "(":
            self._open_parenthesis(frame)
        elif character == ")":
            self._close_parenthesis(frame)
        else:
            self._expansion_or_escape(quotes=False)

    def _in_quotes(self, _frame: _Frame) -> None:
        plain = _PLAIN_IN_QUOTES.match(self._text, self._position)
        if plain is not None:
            self._append(plain.group())
            self._position = plain.end()
        elif self._text[self._position] == '"':
            self._pop()
            self._position += 1
        else:
            self._expansion_or_escape(quotes=True)

    def _in_here_document(self, _frame: _Frame) -> None:
        plain = _PLAIN_IN_HERE_DOCUMENT.match(self._text, self._position)
        if plain is not None:
            self._position = plain.end()
        else:
            self._expansion_or_escape(quotes=True)

    def _in_parameter(self, _frame: _Frame) -> None:
        plain = _PLAIN_IN_PARAMETER.match(self._text, self._position)
        if plain is not None:
            self._position = plain.end()
            return
        character = self._text[self._position]
        if character == "}":
            self._pop()
            self._position += 1
        elif character == "'":
            if self._frames[-2].where == "quotes":
                self._position += 1
            else:
                self._quoted_until("'")
        elif character == '"':
            self._push("quotes")
        else:
            self._expansion_or_escape(quotes=True)

    def _in_arithmetic(self, frame: _Frame) -> None:
        plain = _PLAIN_IN_ARITHMETIC.match(self._text, self._position)
        if plain is not None:
            self._position = plain.end()
            return
        character = self._text[self._position]
        if character == "(":
            frame.depth += 1
            self._position += 1
        elif character == ")":
            frame.depth -= 1
            self._position += 1
            if frame.depth == 0:
                self._pop()
        elif character in "\"'":
            self._position += 1
        else:
            self._expansion_or_escape(quotes=True)

    # -- pieces ---------------------------------------------------------------------------------------------------

    def _quoted_until(self, quote: str) -> None:
        end = self._text.find(quote, self._position + 1)
        end = len(self._text) if end < 0 else end
        self._append(self._text[self._position + 1 : end], quoted=True)
        self._position = end + 1

    def _expansion_or_escape(self, *, quotes: bool) -> None:
        r"""Take a `$`, a backtick or a backslash."""
        text, position = self._text, self._position
        character = text[position]
        if character == "\\":
            following = text[position + 1 : position + 2]
            self._position += 2
            if following != "\n":
                keeps = quotes and following not in {"$", "`", '"', "\\"}
                self._append(f"\\{following}" if keeps else following, quoted=True)
        elif character == "`":
            self._position += 1
            if self._backticks:
                self._pop_backtick()
            else:
                self._append("$()")
                self._push_commands("`")
        elif text.startswith("$((", position):
            self._append("$(())")
            self._push("arithmetic", depth=2)
            self._position += 2
        elif text.startswith("$(", position):
            self._append("$()")
            self._push_commands(")")
            self._position += 2
        elif text.startswith("${", position):
            self._append("${}")
            self._push("parameter")
            self._position += 1
        elif not quotes and text.startswith("$'", position):
            match = _ANSI_QUOTED.match(text, position + 2)
            end = position + 2 if match is None else match.end()
            self._append(_ANSI_ESCAPE.sub(_ansi_character, text[position + 2 : end]), quoted=True)
            self._position = end + 1
        elif not quotes and text.startswith('$"', position):
            self._position += 1
        else:
            self._append("$")
            self._position += 1

    def _redirection(self, frame: _Frame) -> None:
        text, position = self._text, self._position
        if text.startswith(("<(", ">("), position):
            self._append("$()")
            self._push_commands(")")
            self._position += 2
            return
        operator = _REDIRECTION.match(text, position)
        assert operator is not None  # noqa: S101 - the caller saw one
        if frame.in_word and not frame.quoted and "".join(frame.parts).isdigit():
            frame.parts.clear()  # the number of a descriptor, as in 2>
            frame.in_word = False
        self._end_word(frame)
        self._position = operator.end()
        match operator.group():
            case "<<":
                frame.role = "delimiter"
            case "<<-":
                frame.role = "delimiter-"
            case "<<<":
                frame.role = "data"
            case _:
                frame.role = "target"

    def _operator(self, frame: _Frame) -> None:
        self._end_command(frame)
        if frame.cases and self._text.startswith((";;", ";&"), self._position):
            frame.cases[-1] = "pattern"
            self._position += 2
        else:
            self._position += 1

    def _open_parenthesis(self, frame: _Frame) -> None:
        if frame.cases and frame.cases[-1] == "pattern":
            self._position += 1
        elif self._text.startswith("((", self._position) and (not frame.in_word) and frame.program in {"", "for"}:
            self._end_word(frame)
            self._push("arithmetic", depth=2)
            self._position += 1
        else:
            self._end_word(frame)
            self._push_commands(")")
            self._position += 1

    def _close_parenthesis(self, frame: _Frame) -> None:
        self._position += 1
        if frame.cases and frame.cases[-1] == "pattern":
            self._end_word(frame)
            if frame.cases:
                frame.cases[-1] = "body"
            frame.new_command()
        elif frame.end == ")":
            self._pop()
        else:
            self._end_command(frame)

    # -- frames ---------------------------------------------------------------------------------------------------

    def _push(self, where: _Where, depth: int = 0) -> None:
        if len(self._frames) < _DEPTH:
            self._frames.append(_Frame(where, depth=depth))
        self._position += 1

    def _push_commands(self, end: str) -> None:
        if len(self._frames) < _DEPTH:
            self._frames.append(_Frame("commands", end))
            self._backticks += end == "`"

    def _pop(self) -> None:
        frame = self._frames.pop()
        if frame.where == "commands":
            self._end_command(frame)
            if frame.end == "`":
                self._backticks -= 1

    def _pop_backtick(self) -> None:
        while not (self._frames[-1].where == "commands" and self._frames[-1].end == "`"):
            self._pop()
        self._pop()

    def _append(self, piece: str, *, quoted: bool = False) -> None:
        """Add to the word that is being read, if this is part of one: what is inside `${…}` and `$((…))` is not."""
        index = len(self._frames) - 1
        while self._frames[index].where == "quotes" and index:
            index -= 1
        frame = self._frames[index]
        if frame.where == "commands":
            frame.parts.append(piece)
            frame.in_word = True
            frame.quoted = frame.quoted or quoted

    # -- words ----------------------------------------------------------------------------------------------------

    def _end_command(self, frame: _Frame) -> None:
        self._end_word(frame)
        if frame.evaluated:
            self._found.append((" ".join(frame.evaluated), "commands"))
        frame.new_command()

    def _end_word(self, frame: _Frame) -> None:
        if not frame.in_word:
            return
        word = "".join(frame.parts)
        quoted, tilde, role = frame.quoted, frame.tilde, frame.role
        frame.parts.clear()
        frame.in_word = frame.quoted = frame.tilde = False
        frame.role = "word"
        if role == "target":
            self._guard.look_at(word, target=True, tilde=tilde)
        elif role in {"delimiter", "delimiter-"}:
            self._here_documents.append((word, quoted, role == "delimiter-"))
        elif role == "word" and not (frame.cases and self._in_case(frame, word, tilde=tilde)):
            if frame.program:
                self._argument(frame, word, tilde=tilde)
            else:
                self._command_word(frame, word, quoted=quoted, tilde=tilde)

    def _in_case(self, frame: _Frame, word: str, *, tilde: bool) -> bool:
        """Take a word of `case … in pattern)`; False when it belongs to a command in the body."""
        match frame.cases[-1]:
            case "subject":
                frame.cases[-1] = "in"
                self._guard.look_at(word, target=False, tilde=tilde)
            case "in":
                frame.cases[-1] = "pattern"
            case "pattern":
                if word == "esac":
                    frame.cases.pop()
            case "body":
                return False
        return True

    def _command_word(self, frame: _Frame, word: str, *, quoted: bool, tilde: bool) -> None:
        """Take a word that stands where the name of a program does."""
        if not quoted:
            if word in _KEYWORDS:
                return
            if word == "case":
                frame.cases.append("subject")
                return
            if word == "esac" and frame.cases:
                frame.cases.pop()
                return
        self._guard.look_at(word, target=False, tilde=tilde)
        if _ASSIGNMENT.match(word) is not None or (frame.wrapped and _NO_COMMAND.fullmatch(word) is not None):
            return
        name = word[-_LONGEST_NAME:].rpartition("/")[2]
        if name in _WRAPPERS:
            frame.wrapped = True
            return
        frame.program = name or "/"
        frame.texts = _TEXTS.get(name)

    def _argument(self, frame: _Frame, word: str, *, tilde: bool) -> None:
        previous, frame.previous = frame.previous, word
        if frame.program == "eval":
            frame.evaluated.append(word)
        elif frame.next_is == "command":
            frame.next_is = ""
            self._found.append((word, "commands"))
        elif not (
            (frame.program in _TESTS and previous in _COMPARISONS)
            or (frame.texts is not None and _is_text(frame, frame.texts, word))
        ):
            if frame.program in _SHELLS and not previous.startswith("--") and _asks_for_command(word):
                frame.next_is = "command"
            self._guard.look_at(word, target=False, tilde=tilde)

    def _skip_here_documents(self) -> None:
        waiting, self._here_documents = self._here_documents, []
        for delimiter, quoted, tabs in waiting:
            start = self._position
            end = self._end_of_here_document(delimiter, tabs=tabs)
            body = self._text[start:end]
            if not quoted and ("$(" in body or "`" in body):
                self._found.append((body, "here-document"))

    def _end_of_here_document(self, delimiter: str, *, tabs: bool) -> int:
        text = self._text
        start = self._position
        while start < len(text):
            newline = text.find("\n", start)
            stop = len(text) if newline < 0 else newline
            line = text[start:stop]
            self._position = min(stop + 1, len(text))
            if (line.lstrip("\t") if tabs else line) == delimiter:
                return start
            start = stop + 1
        return len(text)


def _is_text(frame: _Frame, texts: _Texts, word: str) -> bool:
    """Whether an argument of a program in `_TEXTS` is text, by its place."""
    if frame.next_is:
        is_text = frame.next_is == "text"
        frame.next_is = ""
        return is_text
    if frame.options_over or len(word) < 2 or not word.startswith("-"):
        frame.operands += 1
        return frame.operands <= texts.operands
    if word == "--":
        frame.options_over = True
        return False
    if word.startswith("--"):
        name, equals, _ = word.partition("=")
        if name in {"--regexp", "--expression", "--source", "--file"}:
            frame.operands = texts.operands
        if name in texts.long and not equals:
            frame.next_is = "text"
        return name in texts.long
    last = len(word) - 1
    for index, letter in enumerate(word):
        if letter in texts.instead:
            frame.operands = texts.operands
        if letter in texts.options or letter in texts.takes:
            is_text = letter in texts.options
            if index == last:
                frame.next_is = "text" if is_text else "value"
            return is_text
        if letter in texts.suffix:
            break
    return False


def _asks_for_command(word: str) -> bool:
    return len(word) <= 16 and re.fullmatch(r"-[A-Za-z]*c[A-Za-z]*", word) is not None


def _ansi_character(match: re.Match[str]) -> str:
    hexadecimal = match[1] or match[2] or match[3]
    if hexadecimal or match[4]:
        code = int(hexadecimal, 16) if hexadecimal else int(match[4], 8)
        return chr(code) if code <= 0x10FFFF else ""
    if match[5]:
        return chr(ord(match[5]) & 0x1F)
    return _ANSI_CHARACTERS.get(match[6], match[6])
