"""Settings: read from `TOOLCRIB_*` variables once, at the start. docs/configuration.md has a line for each."""

import difflib
import os
import re
import stat
from collections.abc import Iterable, Mapping
from ipaddress import ip_address
from pathlib import Path
from typing import Annotated, Any, Final, Literal, Self
from urllib.parse import urlsplit

from pydantic import BeforeValidator, Field, SecretStr, ValidationError, field_validator, model_validator
from pydantic_core import PydanticCustomError
from pydantic_settings import BaseSettings, NoDecode, SettingsConfigDict

from app.domain.node import Role
from app.errors import ConfigurationError
from app.execution.backends.admission import MAX_BATCH_BYTES, MAX_BATCHES, MAX_BATCHES_PER_WORKSPACE
from app.execution.backends.local import RUNNING_BATCHES, RUNNING_BATCHES_PER_WORKSPACE
from app.sandbox.limits import LEAST_OPEN_FILES, TMP_BYTES
from app.sandbox.process_slots import COMMANDS, COMMANDS_PER_WORKSPACE
from app.services.streams import STREAMS_PER_BATCH, STREAMS_PER_KEY
from app.telemetry.logs import LogFormat, LogLevel

PREFIX: Final = "TOOLCRIB_"
_SECRETS: Final = frozenset({"api_key", "database_url", "database_direct_url"})


def _seconds(value: Any) -> Any:
    if not isinstance(value, str):
        return value
    found = _DURATION.fullmatch(value.strip())
    if found is None:
        raise PydanticCustomError("duration", "it has to be a number of seconds, or one with s, m, h or d: 90d")
    return int(found[1]) * _UNITS[found[2] or "s"]


_NAMES: Final = {"role": f"{PREFIX}ROLE", "name": f"{PREFIX}BACKEND", "url": f"{PREFIX}DATABASE_URL"}
_DURATION: Final = re.compile(r"([0-9]{1,10})\s*([smhd]?)")
_UNITS: Final = {"s": 1, "m": 60, "h": 3600, "d": 86_400}
Duration = Annotated[int, BeforeValidator(_seconds), Field(ge=1, le=100 * 366 * 86_400)]
"""Seconds; with `m`, `h` or `d` minutes, hours or days."""


class Settings(BaseSettings):
    """What the environment says. An empty variable counts as one that is not set."""

    model_config = SettingsConfigDict(
        env_prefix=PREFIX, env_ignore_empty=True, extra="ignore", frozen=True, validate_default=True
    )

    host: str = "127.0.0.1"
    port: int = Field(default=8080, ge=0, le=65535)
    data_dir: Path = Path("data")
    database_url: SecretStr | None = None
    database_direct_url: SecretStr | None = None
    role: Role = "all"
    backend: Literal["local", "distributed"] = "local"
    advertise_url: str | None = None
    api_key: SecretStr | None = None
    workspace_roots: Annotated[tuple[Path, ...], NoDecode] = ()
    allow_unrestricted: bool = False
    max_upload_bytes: int = Field(default=10_000_000_000, ge=1)
    rate_limit: float = Field(default=0, ge=0, le=1_000_000, allow_inf_nan=False)
    rate_burst: int | None = Field(default=None, ge=1, le=10_000_000)
    auth_failures_per_minute: int = Field(default=600, ge=0, le=10_000_000)
    max_batches: int = Field(default=MAX_BATCHES, ge=1, le=1_000_000)
    max_batches_per_workspace: int = Field(default=MAX_BATCHES_PER_WORKSPACE, ge=1, le=1_000_000)
    max_batch_bytes: int = Field(default=MAX_BATCH_BYTES, ge=1)
    running_batches: int = Field(default=RUNNING_BATCHES, ge=1, le=10_000)
    running_batches_per_workspace: int = Field(default=RUNNING_BATCHES_PER_WORKSPACE, ge=1, le=10_000)
    streams_per_key: int = Field(default=STREAMS_PER_KEY, ge=1, le=1_000_000)
    streams_per_batch: int = Field(default=STREAMS_PER_BATCH, ge=1, le=1_000_000)
    run_as: str = "nobody"
    commands: int = Field(default=COMMANDS, ge=1, le=10_000)
    commands_per_workspace: int = Field(default=COMMANDS_PER_WORKSPACE, ge=1, le=10_000)
    sandbox: Literal["auto", "namespace", "landlock", "process"] = "auto"
    sandbox_readable: Annotated[tuple[Path, ...], NoDecode] = ()
    bwrap: Path | None = None
    powershell: Path | None = None
    allow_network: bool = False
    command_processes: int = Field(default=1_024, ge=1, le=1_000_000)
    command_open_files: int = Field(default=4_096, ge=LEAST_OPEN_FILES, le=1_000_000)
    command_file_bytes: int = Field(default=10_000_000_000, ge=4_096, le=2**62)
    command_cpu_seconds: int = Field(default=14_400, ge=1, le=31_536_000)
    command_memory_bytes: int | None = Field(default=None, ge=16_000_000, le=2**62)
    command_tmp_bytes: int = Field(default=TMP_BYTES, ge=4_096, le=2**62)
    workspace_bytes: int = Field(default=10_000_000_000, ge=0, le=2**62)
    min_free_bytes: int = Field(default=10_000_000, ge=0, le=2**62)
    cors_origins: Annotated[tuple[str, ...], NoDecode] = ()
    tracing: bool = False
    metrics_host: str = "127.0.0.1"
    metrics_port: int | None = Field(default=None, ge=0, le=65535)
    retain_output: Duration | None = None
    retain_events: Duration | None = None
    retain_records: Duration | None = None
    retain_audit: Duration | None = None
    log_level: LogLevel = "info"
    log_format: LogFormat = "auto"

    @classmethod
    def load(cls, **given: Any) -> Self:
        """Read the environment; what is given wins over it.

        Raises:
            ConfigurationError: a value is wrong; the message is one sentence that names the variable.
        """
        try:
            return cls(**given)
        except ValidationError as error:
            raise ConfigurationError(_sentence(error)) from None

    @property
    def loopback(self) -> bool:
        """Whether only this machine can reach `host`."""
        if self.host == "localhost":
            return True
        try:
            return ip_address(self.host).is_loopback
        except ValueError:
            return False

    @field_validator("data_dir")
    @classmethod
    def _resolve(cls, value: Path) -> Path:
        return value.expanduser().resolve()

    @property
    def direct_url(self) -> str | None:
        """The URL of Postgres past any pooler of transactions; None on SQLite."""
        url = self.database_direct_url or self.database_url
        return None if url is None else url.get_secret_value()

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        if self.backend == "distributed" and self.database_url is None:
            raise PydanticCustomError("backend", "{name}=distributed needs Postgres in {url}", _NAMES)
        if self.role != "all" and self.backend != "distributed":
            raise PydanticCustomError("role", "{role}={value} needs {name}=distributed", {**_NAMES, "value": self.role})
        return self

    @field_validator("advertise_url")
    @classmethod
    def _is_reachable(cls, value: str | None) -> str | None:
        if value is None:
            return None
        parts = urlsplit(value)
        plain = parts.scheme in {"http", "https"} and parts.hostname and parts.path in {"", "/"} and value.isascii()
        if not plain or parts.query or parts.fragment or parts.username:
            raise PydanticCustomError("advertise_url", "it has to be a URL such as http://worker-1:8080")
        return value.rstrip("/")

    @field_validator("database_url", "database_direct_url")
    @classmethod
    def _is_postgres(cls, value: SecretStr | None) -> SecretStr | None:
        if value is not None and not value.get_secret_value().startswith(("postgresql://", "postgres://")):
            raise PydanticCustomError(
                "database_url",
                "it has to start with postgresql:// (leave it unset for SQLite in the data directory)",
            )
        return value

    @field_validator("api_key")
    @classmethod
    def _fits_a_header(cls, value: SecretStr | None) -> SecretStr | None:
        if value is not None and not all("!" <= character <= "~" for character in value.get_secret_value()):
            raise PydanticCustomError("api_key", "it may hold only visible ASCII characters and no blanks")
        return value

    @field_validator("run_as")
    @classmethod
    def _names_a_user(cls, value: str) -> str:
        numbers = value.split(":")
        if len(numbers) > 2 or (len(numbers) == 2 and not all(map(_is_number, numbers))):
            raise PydanticCustomError("run_as", "it has to be a user's name, a number, or two numbers as uid:gid")
        if _is_number(numbers[0]) and any(not 0 < int(number) < 2**32 - 1 for number in numbers):
            raise PydanticCustomError("run_as", "nothing is done as user or group 0, and no number is above 4294967294")
        if value == "root":
            raise PydanticCustomError("run_as", "nothing is done as root")
        return value

    @field_validator("bwrap")
    @classmethod
    def _is_a_program(cls, value: Path | None) -> Path | None:
        if value is None:
            return None
        if not value.is_absolute():
            raise PydanticCustomError("bwrap", "it has to be an absolute path")
        if not value.is_file() or not os.access(value, os.X_OK):
            raise PydanticCustomError("bwrap", "there is no program")
        if value.stat().st_mode & stat.S_ISUID:
            raise PydanticCustomError("bwrap", "the program is setuid, which is not used")
        return value

    @field_validator("powershell")
    @classmethod
    def _can_be_run(cls, value: Path | None) -> Path | None:
        if value is not None and not (value.is_absolute() and value.is_file() and os.access(value, os.X_OK)):
            raise PydanticCustomError("powershell", "{path} is no program", {"path": str(value)})
        return value

    @field_validator("workspace_roots", "sandbox_readable", mode="before")
    @classmethod
    def _split_paths(cls, value: Any) -> Any:
        if not isinstance(value, str):
            return value
        return tuple(part for part in value.replace(",", ":").split(":") if part)

    @field_validator("workspace_roots")
    @classmethod
    def _are_directories(cls, value: tuple[Path, ...]) -> tuple[Path, ...]:
        for path in value:
            if not path.is_absolute():
                raise PydanticCustomError("workspace_roots", "{path} is no absolute path", {"path": str(path)})
            if not path.is_dir():
                raise PydanticCustomError("workspace_roots", "there is no directory {path}", {"path": str(path)})
        return tuple(path.resolve() for path in value)

    @field_validator("sandbox_readable")
    @classmethod
    def _exist(cls, value: tuple[Path, ...]) -> tuple[Path, ...]:
        for path in value:
            if not path.is_absolute() or ".." in path.parts or path == Path("/"):
                raise PydanticCustomError("sandbox_readable", "{path} is no absolute path below /", {"path": str(path)})
            if not path.exists():
                raise PydanticCustomError("sandbox_readable", "there is nothing at {path}", {"path": str(path)})
        return value

    @field_validator("cors_origins", mode="before")
    @classmethod
    def _split_origins(cls, value: Any) -> Any:
        if not isinstance(value, str):
            return value
        return tuple(part.strip().rstrip("/") for part in value.split(",") if part.strip())

    @field_validator("cors_origins")
    @classmethod
    def _are_origins(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        for origin in value:
            if not origin.startswith(("http://", "https://")) or origin.count("/") != 2:
                raise PydanticCustomError(
                    "cors_origins", "{origin} is no origin such as https://app.example.org", {"origin": origin}
                )
        return value


def _is_number(text: str) -> bool:
    return text.isascii() and text.isdigit() and len(text) <= 10


def variable(field: str) -> str:
    """Return the environment variable of a field of `Settings`."""
    return PREFIX + field.upper()


def unknown_variables(environment: Mapping[str, str], also_known: Iterable[str] = ()) -> list[tuple[str, str | None]]:
    """Return each `TOOLCRIB_*` variable that is no setting, with the nearest setting's name or None."""
    known = {*(name.upper() for name in Settings.model_fields), *(name.removeprefix(PREFIX) for name in also_known)}
    names = sorted(name.removeprefix(PREFIX) for name in environment if name.startswith(PREFIX))
    return [
        (PREFIX + name, next((PREFIX + near for near in difflib.get_close_matches(name, sorted(known), n=1)), None))
        for name in names
        if name not in known
    ]


def _sentence(error: ValidationError) -> str:
    parts = []
    for problem in error.errors(include_url=False):
        if not problem["loc"]:
            parts.append(problem["msg"].removesuffix("."))
            continue
        field = str(problem["loc"][0])
        message = problem["msg"].removesuffix(".")
        message = (message[0].lower() + message[1:]).replace("input should", "it has to")
        shown = (
            "" if field in _SECRETS or problem["type"] in Settings.model_fields else f" (it is {problem['input']!r})"
        )
        parts.append(f"{variable(field)} is wrong: {message}{shown}")
    return "; ".join(parts) + "."
