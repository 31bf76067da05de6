"""Who asks for something: a key, what it may do, and whose things it makes and sees."""

import re
from dataclasses import dataclass
from typing import Final, Literal, TypeAlias, get_args

Scope: TypeAlias = Literal["read", "write", "exec", "admin"]

SCOPES: Final[tuple[Scope, ...]] = get_args(Scope)
"""`read`: look, and tools that change nothing; `write`: change workspaces and files; `exec`: run commands; `admin`:
keys, the audit log, metrics, and the things of every owner."""

OWNER: Final = re.compile(r"[A-Za-z0-9._-]{1,64}\Z")
"""The name of an owner."""


@dataclass(frozen=True, slots=True)
class Caller:
    """A key in a request.

    `key_id` is the key's id, `env` for the environment's. What the caller makes belongs to `owner`, a name that
    several keys may share; `request_id` is the request's, empty outside of one.
    """

    key_id: str
    owner: str
    scopes: frozenset[Scope]
    request_id: str = ""

    @property
    def sees(self) -> str | None:
        """Whose things the caller may see and, as far as its scopes go, change; None: everybody's."""
        return None if "admin" in self.scopes else self.owner
