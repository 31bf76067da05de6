"""Who shares a database: nodes, which hold workspaces, and the processes that serve and run.

A node is a data directory. The processes that were started on it share its workspaces, so they are on one host. A
process that only serves has no node.
"""

from dataclasses import dataclass
from typing import Final, Literal

Role = Literal["all", "api", "worker"]

HEARTBEAT_SECONDS: Final = 2.0
"""How often a process says that it lives."""
LEASE_SECONDS: Final = 6.0
"""A process that has not said so for this long counts as dead, and what it ran is ended by another one."""
RENEWAL_SECONDS: Final = 0.6 * LEASE_SECONDS
"""A process that could not say so for this long starts nothing more and stops what it runs, before others act."""


@dataclass(frozen=True, slots=True)
class Process:
    """One run of the service. Times are milliseconds since the epoch on the clock of the database.

    `url` is where the other processes reach it; None when they cannot.
    """

    id: str
    node_id: str | None
    role: Role
    url: str | None
    started_at: int = 0
    seen_at: int = 0


@dataclass(frozen=True, slots=True)
class Node:
    """`workspaces` counts those that are open."""

    id: str
    created_at: int
    workspaces: int
