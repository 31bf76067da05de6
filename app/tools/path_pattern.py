"""Matching paths against a glob on the way down a tree, so that directories no match can be in are never entered.

A pattern without `/` matches names at any depth; one with `/` starts at the directory the walk starts from. A final `/`
asks for directories. Where a pattern spells a name out, without any wildcard, it says so (`Position.spelled_out`): such
a name is meant even where a search leaves it out otherwise.
"""

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Final

from app.tools.glob_pattern import RECURSIVE, Component, Components, Glob, GlobError, literal_component, parse_glob

_WILDCARDS: Final = frozenset("*?[{\\")
_REMEMBERED: Final = 1_000
_NOTHING: Final = re.compile(r"(?!)")


@dataclass(frozen=True, slots=True)
class _State:
    """How far the way to a directory has come in a glob: `position` components are behind it.

    `spelled_out`: none of them was a wildcard.
    """

    glob: int
    position: int
    spelled_out: bool


class PathPattern:
    """A glob for the paths below one directory; `start` is the position there."""

    def __init__(self, text: str) -> None:
        """Parse a glob.

        Raises:
            GlobError: it is none, or could match nothing; the message is for the caller.
        """
        if "\0" in text:
            raise GlobError("it holds the character U+0000, which no name can")
        globs = parse_glob(text)
        if not _WILDCARDS.isdisjoint(text):
            # Names hold brackets and braces too: `[id].tsx` is also itself.
            names = tuple(literal_component(name) for name in text.split("/") if name)
            globs.append(Glob(names, anchored="/" in text.rstrip("/"), directory_only=text.endswith("/")))
        self.globs: list[tuple[Components, bool]] = []
        for glob in globs:
            self._add(glob)
        if not self.globs:
            raise GlobError("it names nothing")
        self._positions: dict[frozenset[_State], Position] = {}
        states = (self.reached(_State(number, 0, spelled_out=True)) for number in range(len(self.globs)))
        self.start = self.position(state for group in states for state in group)

    def covers(self, path: str) -> bool:
        """Whether a file, by its path below the start, is a match or in a directory that is one."""
        position = self.start
        *directories, name = path.split("/")
        for directory in directories:
            if position.matches(directory, is_directory=True):
                return True
            position = position.below(directory)
        return position.matches(name, is_directory=False)

    def _add(self, glob: Glob) -> None:
        names = tuple(component for component in glob.components if component.literal != ".")
        if any(component.literal == ".." for component in names):
            raise GlobError("it must not hold .. (it is matched against what is below path)")
        found = []
        if names and not glob.anchored and names[0] is not RECURSIVE:
            found.append(((RECURSIVE, *names), glob.directory_only))
            if names[0].literal is not None:
                found.append((names, glob.directory_only))  # the path of that name right here is spelled out
        elif names:
            found.append((names, glob.directory_only))
        self.globs += [one for one in found if one not in self.globs]

    def position(self, states: Iterable[_State]) -> "Position":
        """Return the position of these states, the same object every time."""
        key = frozenset(states)
        found = self._positions.get(key)
        if found is None:
            found = self._positions[key] = Position(self, key)
        return found

    def reached(self, state: _State) -> Iterator[_State]:
        """Yield a state and those that are reached from it without a further name."""
        yield state
        components, _ = self.globs[state.glob]
        if state.position < len(components) - 1 and components[state.position] is RECURSIVE:
            yield replace(state, position=state.position + 1, spelled_out=False)


class Position:
    """What may still match at one directory of a walk."""

    def __init__(self, pattern: PathPattern, states: frozenset[_State]) -> None:
        self._pattern = pattern
        self._states = states
        last: list[Component] = []
        last_of_directories: list[Component] = []
        for state in states:
            components, directory_only = pattern.globs[state.glob]
            if state.position == len(components) - 1:
                (last_of_directories if directory_only else last).append(components[-1])
        self.matches_any = _matcher(last).match
        """Called with the name of an entry: whether it is a match whatever it is."""
        self._matches_directories = _matcher([*last, *last_of_directories]).match
        self._below: dict[str, Position] = {}

    @property
    def alive(self) -> bool:
        """Whether anything can match here or below."""
        return bool(self._states)

    def matches(self, name: str, *, is_directory: bool) -> bool:
        """Whether the entry of this name in the directory is a match."""
        matches = self._matches_directories if is_directory else self.matches_any
        return matches(name) is not None

    def below(self, name: str) -> "Position":
        """Return the position in the directory of this name."""
        found = self._below.get(name)
        if found is None:
            if len(self._below) >= _REMEMBERED:
                self._below.clear()
            found = self._below[name] = self._compute_below(name)
        return found

    def _compute_below(self, name: str) -> "Position":
        states: list[_State] = []
        for state in self._states:
            components, _ = self._pattern.globs[state.glob]
            component = components[state.position]
            if component is RECURSIVE:
                states += self._pattern.reached(state)
            elif state.position < len(components) - 1 and _fits(component, name):
                spelled_out = state.spelled_out and component.literal is not None
                states += self._pattern.reached(replace(state, position=state.position + 1, spelled_out=spelled_out))
        return self._pattern.position(states)

    @cached_property
    def spelled_out(self) -> "Position":
        """The part of this position that the pattern reaches, and goes on from, without a wildcard."""
        states = []
        for state in self._states:
            components, _ = self._pattern.globs[state.glob]
            if state.spelled_out and components[state.position].literal is not None:
                states.append(state)
        return self._pattern.position(states)


def _fits(component: Component, name: str) -> bool:
    if component.literal is not None:
        return component.literal == name
    return re.compile(component.source, re.DOTALL).fullmatch(name) is not None


def _matcher(components: list[Component]) -> re.Pattern[str]:
    """Return an expression whose `match` tells whether a name is one of the components."""
    if any(component is RECURSIVE for component in components):
        return re.compile("")
    if not components:
        return _NOTHING
    return re.compile(f"(?s:(?:{'|'.join(component.source for component in components)})\\Z)")
