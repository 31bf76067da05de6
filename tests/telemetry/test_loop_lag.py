import asyncio
import time

import pytest

from app.telemetry.loop_lag import LoopLag


@pytest.mark.anyio
async def test_what_blocks_the_loop_is_reported() -> None:
    late: list[float] = []
    told = asyncio.Event()

    def report(seconds: float) -> None:
        late.append(seconds)
        told.set()

    lag = LoopLag(report)
    lag.start()
    time.sleep(0.5)  # noqa: ASYNC251 - it blocks the loop, past the first wake-up
    await asyncio.wait_for(told.wait(), 20)
    lag.stop()
    assert late[0] >= 0.2
