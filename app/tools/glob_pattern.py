r"""Glob patterns, as ripgrep's globs mean them: `*`, `?`, `[a-z]`, `[!a]`, `{a,b}`, `\` before any of these, and `**`.

`*`, `?` and classes match within one name; `**` as a whole component stands for any number of directories, none
included. Braces are expanded first, so `{src/*.ts,*.md}` is two patterns, each with rules of its own.

A pattern is matched name by name or as one regular expression. Either way a star takes as little as it can and never
gives back, which for globs finds every match and keeps the time linear: a pattern such as `*a*a*a*a*b` costs nothing.
"""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final, TypeAlias

MAX_ALTERNATIVES: Final = 256
_MAX_DEPTH: Final = 10


class GlobError(ValueError):
    """The text is no glob; the message says why, in words for the caller."""


@dataclass(frozen=True, slots=True)
class Component:
    """What one name of a path has to look like: `source` is a regular expression for all of it.

    `literal` is the only name it matches, None when there are several.
    """

    source: str
    literal: str | None = None


RECURSIVE: Final = Component("**")
"""The component `**`: any number of directories."""

Components: TypeAlias = tuple[Component, ...]


@dataclass(frozen=True, slots=True)
class Glob:
    """One alternative of a pattern.

    `anchored`: there is a `/` before its end, so it starts at a certain directory; else it is for names at any depth.
    `directory_only`: it ends in `/`.
    """

    components: Components
    anchored: bool
    directory_only: bool


def literal_component(name: str) -> Component:
    """Return the component that matches one name and nothing else."""
    return Component(re.escape(name), name)


def parse_glob(text: str, *, unclosed_class: bool = False, empty_alternatives: bool = True) -> list[Glob]:
    """Return the alternatives a pattern stands for. `/` separates components, of which empty ones are dropped.

    Args:
        text: the glob.
        unclosed_class: take a `[` that is never closed for the character, as files of ignore rules do.
        empty_alternatives: let `a{,b}` mean `a` too; ignore rules leave the empty one out.

    Raises:
        GlobError: braces that do not pair, a class that is not closed or counts backwards, a final backslash, or more
            than `MAX_ALTERNATIVES` alternatives.
    """
    tokens = list(_tokens(text, unclosed_class=unclosed_class))
    sequences, position = _expand(tokens, 0, 0, empty_alternatives=empty_alternatives)
    if position != len(tokens):
        raise GlobError("a } has no { before it (write \\} for the character)")
    return [_glob(sequence) for sequence in sequences]


def name_regex(components: Sequence[Component]) -> re.Pattern[str]:
    """Return an expression whose `match` tells whether a name is one of these components."""
    return re.compile(f"(?s:(?:{'|'.join(component.source for component in components)})\\Z)")


def path_regex(components: Components) -> str:
    """Return the source of an expression for a whole path, without an anchor at its end."""
    blocks: list[list[str]] = [[]]
    for component in components:
        if component is RECURSIVE:
            blocks.append([])
        else:
            blocks[-1].append(component.source)
    if len(blocks) == 1:
        return "/".join(blocks[0])
    first, *middle, last = blocks
    parts = ["".join(source + "/" for source in first)]
    # What stands between two `**` may be taken where it is met first: the second one makes up for whatever follows.
    parts += [f"(?>(?:[^/]*/)*?{'/'.join(block)}/)" for block in middle if block]
    parts.append(f"(?:[^/]*/)*{'/'.join(last)}" if last else ".+")
    return "".join(parts)


@dataclass(frozen=True, slots=True)
class _Token:
    """A part of a glob: `kind` is one of `?*{,}` or `c` (one character out of `source`, which may be `char` alone)."""

    kind: str
    source: str = ""
    char: str | None = None


_STAR: Final = _Token("*")


def _character(char: str) -> _Token:
    return _Token("c", re.escape(char), char)


def _tokens(text: str, *, unclosed_class: bool) -> Iterator[_Token]:
    position = depth = 0
    classes = True
    while position < len(text):
        char = text[position]
        position += 1
        if char == "*":
            yield _STAR
        elif char == "?":
            yield _Token("?", "[^/]")
        elif char == "[" and classes:
            found = _class(text, position)
            if found is not None:
                token, position = found
                yield token
            elif unclosed_class:
                classes = False  # there is no ] in the rest, so the next [ cannot begin a class either
                yield _character(char)
            else:
                raise GlobError("a [ is not closed (write [[] for the character)")
        elif char == "\\":
            if position == len(text):
                raise GlobError("it ends in a single backslash (write \\\\ for the character)")
            yield _character(text[position])
            position += 1
        elif char == "{" or (depth and char in ",}"):
            depth += (char == "{") - (char == "}")
            yield _Token(char)
        elif char == "}":
            yield _Token(char)
        else:
            yield _character(char)


def _class(text: str, position: int) -> tuple[_Token, int] | None:
    """Parse what follows a `[`; None when there is no `]` to it."""
    negated = text[position : position + 1] in {"!", "^"}
    position += negated
    ranges: list[tuple[str, str]] = []
    in_range = False
    first = True
    while position < len(text):
        char = text[position]
        position += 1
        if char == "]" and not first:
            if in_range:
                ranges.append(("-", "-"))
            inner = "".join(re.escape(low) if low == high else f"{re.escape(low)}-{re.escape(high)}"
                            for low, high in ranges)  # fmt: skip
            return _Token("c", f"(?!/)[{'^' * negated}{inner}]"), position
        if char == "-" and not first and not in_range:
            in_range = True
        elif in_range:
            low = ranges[-1][0]
            if char < low:
                raise GlobError(f"the range {low}-{char} counts backwards")
            ranges[-1] = (low, char)
            in_range = False
        else:
            ranges.append((char, char))
        first = False
    return None


def _expand(
    tokens: Sequence[_Token], position: int, depth: int, *, empty_alternatives: bool
) -> tuple[list[list[_Token]], int]:
    """Return every sequence without braces that tokens stand for, up to their end or to what closes this group."""
    if depth > _MAX_DEPTH:
        raise GlobError(f"braces nest deeper than {_MAX_DEPTH}")
    done: list[list[_Token]] = []
    current: list[list[_Token]] = [[]]
    while position < len(tokens):
        token = tokens[position]
        if token.kind == "{":
            inner, position = _expand(tokens, position + 1, depth + 1, empty_alternatives=empty_alternatives)
            if position == len(tokens):
                raise GlobError("a { is not closed (write \\{ for the character)")
            if len(inner) * len(current) + len(done) > MAX_ALTERNATIVES:
                raise GlobError(f"the braces stand for more than {MAX_ALTERNATIVES} alternatives")
            current = [head + tail for head in current for tail in inner]
        elif token.kind == "}":
            break
        elif token.kind == ",":
            done += current
            current = [[]]
        else:
            for sequence in current:
                sequence.append(token)
        position += 1
    done += current
    if depth and not empty_alternatives:
        done = [sequence for sequence in done if sequence] or [[]]
    return done, position


def _glob(tokens: Sequence[_Token]) -> Glob:
    names: list[list[_Token]] = [[]]
    for token in tokens:
        if token.char == "/":
            names.append([])
        else:
            names[-1].append(token)
    components: list[Component] = []
    for name in names:
        if name == [_STAR, _STAR]:
            if not components or components[-1] is not RECURSIVE:
                components.append(RECURSIVE)
        elif name:
            components.append(_component(name))
    directory_only = len(names) > 1 and not names[-1]
    return Glob(tuple(components), anchored=len(names) - directory_only > 1, directory_only=directory_only)


def _component(tokens: Sequence[_Token]) -> Component:
    runs: list[list[_Token]] = [[]]
    for token in tokens:
        if token.kind == "*":
            runs.append([])
        else:
            runs[-1].append(token)
    if len(runs) == 1:
        characters = [token.char for token in tokens if token.char is not None]
        return Component(_source(tokens), "".join(characters) if len(characters) == len(tokens) else None)
    first, *middle, last = runs
    parts = [_source(first)]
    parts += [f"(?>[^/]*?{_source(run)})" for run in middle if run]
    parts.append(f"[^/]*{_source(last)}")
    return Component("".join(parts))


def _source(tokens: Sequence[_Token]) -> str:
    return "".join(token.source for token in tokens)
