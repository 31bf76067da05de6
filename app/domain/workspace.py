"""A workspace: a directory with its options and limits."""

from dataclasses import dataclass
from enum import StrEnum
from typing import Annotated, Any, Final, Literal, Self

from pydantic import BeforeValidator, Field, field_validator, model_validator

from app.domain.encodings import find_encoding, unknown_encoding
from app.domain.json_model import JsonModel
from app.domain.tool_call import ExecutionMode

READ_MAX_BYTES: Final = 1_000_000
READ_MAX_LINES: Final = 2_000
FILE_MAX_BYTES: Final = 10_000_000
SHOWN_MAX_BYTES: Final = 65_536
SHOWN_MAX_LINES: Final = 2_000
CAPTURE_BYTES: Final = 10_000_000
ENTRY_LIMIT: Final = 2_000
SHELL_TIMEOUT_MS: Final = 120_000
SHELL_MAX_TIMEOUT_MS: Final = 3_600_000
OPTION_TIMEOUT_MAX_MS: Final = 86_400_000
OPTION_CAPTURE_MAX_BYTES: Final = 1_000_000_000


def _whole(value: Any) -> Any:
    return int(value) if isinstance(value, float) and value.is_integer() else value


# JSON has one kind of number: 5.0 is an integer to a JSON Schema, and what some languages write for 5.
WHOLE: Final = BeforeValidator(_whole)
Milliseconds = Annotated[int, Field(ge=1, le=OPTION_TIMEOUT_MAX_MS), WHOLE]
Bytes = Annotated[int, Field(ge=256, le=1_000_000_000), WHOLE]
Lines = Annotated[int, Field(ge=1, le=10_000_000), WHOLE]


class OptionsModel(JsonModel):
    """A group of options."""


class ReadOptions(OptionsModel):
    max_bytes: Bytes = READ_MAX_BYTES
    max_lines: Lines = READ_MAX_LINES
    encoding: str | None = None
    line_numbers: bool = True
    execution_mode: ExecutionMode = "parallel"

    @field_validator("encoding")
    @classmethod
    def _known_encoding(cls, value: str | None) -> str | None:
        if value is not None and find_encoding(value) is None:
            raise ValueError(unknown_encoding(value))
        return value


class WriteOptions(OptionsModel):
    max_bytes: Bytes = FILE_MAX_BYTES
    execution_mode: ExecutionMode = "sequential"


class EditOptions(OptionsModel):
    """`match` is for calls that do not say; `fuzzy` lets a text that is not there match what looks like it."""

    max_bytes: Bytes = FILE_MAX_BYTES
    multiple_matches: Literal["error", "first"] = "error"
    match: Literal["sequential", "original"] = "sequential"
    fuzzy: bool = False
    execution_mode: ExecutionMode = "sequential"


class CommandLimitOptions(OptionsModel):
    """Limits of a command that are tighter than the server's; None leaves the server's."""

    processes: Annotated[int, Field(ge=1, le=1_000_000), WHOLE] | None = None
    open_files: Annotated[int, Field(ge=128, le=1_000_000), WHOLE] | None = None
    file_bytes: Annotated[int, Field(ge=4_096, le=2**53), WHOLE] | None = None
    cpu_seconds: Annotated[int, Field(ge=1, le=31_536_000), WHOLE] | None = None
    memory_bytes: Annotated[int, Field(ge=16_000_000, le=2**53), WHOLE] | None = None
    tmp_bytes: Annotated[int, Field(ge=4_096, le=2**53), WHOLE] | None = None


class BashOptions(OptionsModel):
    """`timeout` and `max_timeout` are milliseconds; `env` is added to a command's environment.

    `network`: `host` gives commands the network of the machine, where the server allows it.
    """

    timeout: Milliseconds = SHELL_TIMEOUT_MS
    max_timeout: Milliseconds = SHELL_MAX_TIMEOUT_MS
    max_output_bytes: Bytes = SHOWN_MAX_BYTES
    max_output_lines: Lines = SHOWN_MAX_LINES
    capture_bytes: Annotated[int, Field(ge=0, le=OPTION_CAPTURE_MAX_BYTES), WHOLE] = CAPTURE_BYTES
    env: dict[str, str] = Field(default_factory=dict, max_length=256)
    guard: Literal["auto", "on", "off"] = "auto"
    network: Literal["none", "host"] = "none"
    limits: CommandLimitOptions = CommandLimitOptions()
    execution_mode: ExecutionMode = "sequential"


class PowerShellOptions(BashOptions):
    """The same as for bash."""


class ListingOptions(OptionsModel):
    """For grep, find and ls. `limit` is how many matches or entries a call shows that does not say."""

    limit: Lines = ENTRY_LIMIT
    max_output_bytes: Bytes = SHOWN_MAX_BYTES
    execution_mode: ExecutionMode = "parallel"


_FLAT: Final = {
    "maxReadLines": ("read", "maxLines"),
    "maxReadBytes": ("read", "maxBytes"),
    "maxBashOutputBytes": ("bash", "maxOutputBytes"),
    "bashTimeoutMs": ("bash", "timeout"),
}


class WorkspaceOptions(OptionsModel):
    """Typed and validated options; the flat names of older callers are folded into their groups."""

    containment: Literal["workspace", "unrestricted"] = "workspace"
    tools: list[str] | None = Field(default=None, max_length=64)
    quota_bytes: Annotated[int, Field(ge=4_096, le=2**53), WHOLE] | None = None
    read: ReadOptions = ReadOptions()
    write: WriteOptions = WriteOptions()
    edit: EditOptions = EditOptions()
    bash: BashOptions = BashOptions()
    powershell: PowerShellOptions = PowerShellOptions()
    grep: ListingOptions = ListingOptions()
    find: ListingOptions = ListingOptions()
    ls: ListingOptions = ListingOptions()

    @model_validator(mode="before")
    @classmethod
    def _fold_flat_names(cls, value: Any) -> Any:
        if not isinstance(value, dict):
            return value
        folded = dict(value)
        for flat, (group, name) in _FLAT.items():
            if flat in folded:
                inner = folded.get(group, {})
                if not isinstance(inner, dict) or name in inner:
                    continue
                folded[group] = {**inner, name: folded.pop(flat)}
        return folded

    def execution_mode(self, tool: str) -> ExecutionMode | None:
        """Return the mode this workspace gives a tool; None for a tool without options."""
        group = getattr(self, tool, None) if tool in type(self).model_fields else None
        mode: ExecutionMode | None = getattr(group, "execution_mode", None)
        return mode

    def capture_bytes(self, tool: str) -> int:
        """Return how many bytes of a tool's output are kept."""
        group = {"bash": self.bash, "powershell": self.powershell}.get(tool)
        return CAPTURE_BYTES if group is None else group.capture_bytes

    def to_json(self) -> dict[str, Any]:
        """Return the effective options, defaults included."""
        return self.model_dump(by_alias=True, mode="json")

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> Self:
        return cls.model_validate(value)


class WorkspaceStatus(StrEnum):
    ACTIVE = "active"
    DELETING = "deleting"
    DELETED = "deleted"
    EXPIRED = "expired"


@dataclass(frozen=True, slots=True)
class Workspace:
    """A workspace's row.

    `root` is the real path; its device and inode tell when another directory replaced it, its uid and gid as whom its
    files are touched and its commands run by a service that is root. `node_id` is the node whose directory it is.
    `options` is what the caller set, as JSON; times are milliseconds since the epoch.
    """

    id: str
    owner: str
    name: str | None
    root: str
    root_device: int
    root_inode: int
    root_uid: int
    root_gid: int
    managed: bool
    trusted: bool
    options: WorkspaceOptions
    metadata: dict[str, Any]
    status: WorkspaceStatus
    created_at: int
    last_used_at: int
    expires_at: int | None = None
    node_id: str | None = None
