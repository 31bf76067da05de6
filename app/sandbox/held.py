"""A thing that a thread may still be using when its owner is through with it.

A call that gives up leaves its thread behind (`app.sandbox.file_pool`), and that thread works on a descriptor. Closing
it meanwhile would let the number go to another file.
"""

import threading
from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import Final


class Released(Exception):
    """The owner has let go of the thing: there is nothing to work on any more."""


class Held:
    """Something that is used by one thread at a time and released once, by whoever is the last to have it."""

    def __init__(self, release: Callable[[], None]) -> None:
        self._release: Final = release
        self._lock = threading.Lock()
        self._in_use = False
        self._let_go = False

    @contextmanager
    def use(self) -> Generator[None, None, None]:
        """Use the thing. Raises Released when the owner has let go of it."""
        with self._lock:
            if self._let_go:
                raise Released
            self._in_use = True
        try:
            yield
        finally:
            if self._give_back():
                self._release()

    def let_go(self) -> None:
        """Give the thing up: it is released now or, when a thread uses it, by that thread. Asking again is fine."""
        with self._lock:
            if self._let_go:
                return
            self._let_go = True
            last = not self._in_use
        if last:
            self._release()

    def _give_back(self) -> bool:
        """Note that the thread is through; return whether it was the last to have the thing."""
        with self._lock:
            self._in_use = False
            return self._let_go
