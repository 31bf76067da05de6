"""A descriptor is given back once, and never under the hands of a thread."""

import threading

import pytest

from app.sandbox.held import Held, Released

WAIT_SECONDS = 10


def test_what_nobody_uses_is_released_at_once_and_only_once():
    released: list[str] = []
    held = Held(lambda: released.append("released"))
    with held.use():
        pass
    assert released == []
    held.let_go()
    held.let_go()
    assert released == ["released"]


def test_what_a_thread_uses_is_released_when_that_thread_is_through():
    events: list[str] = []
    held = Held(lambda: events.append(f"released by {threading.current_thread().name}"))
    in_use, let_go = threading.Event(), threading.Event()

    def work() -> None:
        with held.use():
            in_use.set()
            assert let_go.wait(WAIT_SECONDS)
            events.append("still open")

    thread = threading.Thread(target=work, name="worker")
    thread.start()
    assert in_use.wait(WAIT_SECONDS)
    held.let_go()
    let_go.set()
    thread.join(WAIT_SECONDS)
    assert events == ["still open", "released by worker"]


def test_a_thread_that_comes_late_gets_nothing_to_work_on():
    held = Held(lambda: None)
    held.let_go()
    with pytest.raises(Released), held.use():
        pytest.fail("it was used")


def test_it_is_released_also_when_the_work_fails():
    released: list[str] = []
    held = Held(lambda: released.append("released"))

    def work() -> None:
        with held.use():
            held.let_go()
            assert released == []
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        work()
    assert released == ["released"]
