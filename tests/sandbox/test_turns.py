"""Turns: bounded in number and in how long somebody waits."""

import pytest

from app.errors import ErrorCode, ToolError
from app.sandbox.turns import Turns


def test_who_gets_no_turn_in_time_is_told_so_and_turns_are_given_back() -> None:
    turns = Turns(1)
    with turns.taken("unused", lambda: None):
        with pytest.raises(ToolError) as caught, turns.taken("somebody else is at it", lambda: None, 0.01):
            pass
        assert (caught.value.code, caught.value.message) == (ErrorCode.LIMIT_EXCEEDED, "somebody else is at it")
    with pytest.raises(KeyError), turns.taken("unused", lambda: None):
        raise KeyError
    with turns.taken("it was not given back", lambda: None, 0.01):
        pass
