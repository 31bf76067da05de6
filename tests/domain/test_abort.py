"""An abort comes before the commit point or too late; never both."""

import asyncio
import threading

import pytest

from app.domain.abort import Aborted, AbortReason, AbortSignal

pytestmark = pytest.mark.anyio


async def test_the_first_reason_stays():
    signal = AbortSignal()
    signal.abort(AbortReason.TIMEOUT)
    signal.abort(AbortReason.CANCELLED)
    assert signal.reason is AbortReason.TIMEOUT
    with pytest.raises(Aborted) as raised:
        signal.raise_if_aborted()
    assert raised.value.reason is AbortReason.TIMEOUT


async def test_an_abort_before_the_commit_forbids_it():
    signal = AbortSignal()
    signal.abort(AbortReason.CANCELLED)
    with pytest.raises(Aborted):
        signal.commit()
    assert not signal.committed


async def test_an_abort_after_the_commit_comes_too_late():
    signal = AbortSignal()
    signal.commit()
    signal.abort(AbortReason.CANCELLED)
    assert signal.committed


async def test_waiting_ends_with_an_abort_from_another_thread():
    signal = AbortSignal()
    thread = threading.Thread(target=signal.abort, args=(AbortReason.INTERRUPTED,))
    async with asyncio.timeout(60):
        waiting = asyncio.ensure_future(signal.wait())
        await asyncio.sleep(0)
        thread.start()
        assert await waiting is AbortReason.INTERRUPTED
    thread.join(5)


async def test_a_callback_taken_back_is_not_called_and_one_added_late_is_called_at_once():
    signal = AbortSignal()
    called: list[str] = []
    forget = signal.add_callback(lambda: called.append("forgotten"))
    signal.add_callback(lambda: called.append("early"))
    forget()
    signal.abort(AbortReason.CANCELLED)
    signal.add_callback(lambda: called.append("late"))
    assert called == ["early", "late"]
