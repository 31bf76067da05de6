"""What a call of a shell says, whichever shell it is."""

from collections.abc import Mapping
from typing import Final

from pydantic import Field, field_validator

from app.sandbox.environment import check_variables
from app.tools.model_tool import ArgumentsModel


class ShellArguments(ArgumentsModel):
    """What a shell's call has; a tool describes its own `command`."""

    command: str
    description: str | None = Field(
        default=None, description="What the command does, in a few words, for people who read the record."
    )
    timeout: int | None = Field(
        default=None, ge=1, description="Time limit in milliseconds; a larger value than allowed is cut to that."
    )
    env: dict[str, str] | None = Field(default=None, description="Environment variables to add, by name.")

    @field_validator("command")
    @classmethod
    def _can_be_an_argument(cls, command: str) -> str:
        if "\0" in command:
            raise ValueError("holds the character U+0000, which no command can")
        return command

    @field_validator("env")
    @classmethod
    def _can_be_set(cls, env: dict[str, str] | None) -> dict[str, str] | None:
        if env is not None:
            check_variables(env)
        return env


SHELL_SPELLINGS: Final[Mapping[str, str]] = {"cmd": "command", "timeoutMs": "timeout", "timeout_ms": "timeout"}
