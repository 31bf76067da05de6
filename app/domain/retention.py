"""How far the records of an ended batch have been removed, and what was removed."""

from dataclasses import dataclass, fields
from enum import IntEnum
from typing import Self


class Removal(IntEnum):
    """What is gone of a batch, each step with all before it. At an odd one rows may be left, which nobody is shown.

    `ALL` is of no row: at that step the batch itself is gone.
    """

    NOTHING = 0
    OUTPUT_GOING = 1
    OUTPUT = 2
    UPDATES_GOING = 3
    UPDATES = 4
    ALL_GOING = 5
    ALL = 6

    @property
    def going(self) -> "Removal":
        """The step of a batch whose rows are on their way to this one."""
        return Removal(self - 1)


@dataclass(frozen=True, slots=True)
class RetentionPolicy:
    """How many seconds after its end a batch keeps its output, its update events, and all of it; None: for ever.

    `audit_seconds` is how long an event of the audit log is kept.
    """

    output_seconds: int | None = None
    event_seconds: int | None = None
    record_seconds: int | None = None
    audit_seconds: int | None = None

    def seconds(self, step: Removal) -> int | None:
        """Return after how long a batch has reached a step: what goes with a later step goes then at the latest."""
        ages = {
            Removal.OUTPUT: (self.output_seconds, self.event_seconds, self.record_seconds),
            Removal.UPDATES: (self.event_seconds, self.record_seconds),
            Removal.ALL: (self.record_seconds,),
        }
        return min((age for age in ages[step] if age is not None), default=None)


@dataclass(frozen=True, slots=True)
class RemovedCounts:
    """How much was removed. `pages` are those of SQLite's file that were given back to the file system."""

    output_bytes: int = 0
    events: int = 0
    calls: int = 0
    batches: int = 0
    workspaces: int = 0
    audit_events: int = 0
    pages: int = 0

    def __add__(self, other: "RemovedCounts") -> Self:
        return type(self)(*(getattr(self, field.name) + getattr(other, field.name) for field in fields(self)))

    def __sub__(self, other: "RemovedCounts") -> Self:
        return type(self)(*(getattr(self, field.name) - getattr(other, field.name) for field in fields(self)))

    def to_json(self) -> dict[str, int]:
        """Return the counts by name."""
        return {field.name: getattr(self, field.name) for field in fields(self)}
