"""What befalls a fleet: kills, stops, pauses, a database that crashes, disks that are full. Drawn from a seed."""

import random
import signal
import time
from collections import Counter
from collections.abc import Callable
from typing import Final

from tests.support.chaos.fleet import Fleet, filled

COMMIT_SECONDS: Final = 2.0


class Storm:
    """One blow after another; each is over, and what it broke started again, before the next one."""

    def __init__(self, fleet: Fleet, draw: random.Random, tally: Counter[str]) -> None:
        self._fleet = fleet
        self._draw = draw
        self._tally = tally
        # Longer than others wait for a sign of life, when there are others: there it can be taken for dead.
        several = len(fleet.processes) > 1
        self._absence = 9.0 if several else 3.0
        self._blows: list[tuple[int, str, Callable[[], None]]] = [
            (6, "processes killed", self._kill),
            (1, "processes stopped", self._stop),
            (3 if several else 1, "processes paused", self._pause),
        ]
        if fleet.postgres is not None:
            self._blows += [
                (3, "Postgres killed", self._kill_postgres),
                (1, "all killed at once", self._kill_all),
                (3, "answers to COMMIT lost", self._lose_commit),
                (3 if several else 1, "ways to Postgres silent", self._silence),
            ]
        if fleet.disks:
            self._blows.append((2, "disks filled", self._fill))

    def rage(self, until: float) -> None:
        """Go on until a moment of the monotonic clock; everything runs again when this returns."""
        weights = [weight for weight, _, _ in self._blows]
        # Each kind once before they are drawn, so that a short storm has them all.
        first = self._draw.sample(self._blows, len(self._blows))
        while time.monotonic() < until:
            _, what, blow = first.pop() if first else self._draw.choices(self._blows, weights)[0]
            time.sleep(self._draw.uniform(0.1, 2.0))
            blow()
            self._tally[what] += 1

    def _kill(self) -> None:
        process = self._draw.choice(self._fleet.processes)
        process.process.kill()
        process.process.wait()
        time.sleep(self._draw.choice((0, 0, 0.5, 2.0)))
        self._fleet.start(process)

    def _stop(self) -> None:
        process = self._draw.choice(self._fleet.processes)
        process.stop()
        self._fleet.start(process)

    def _pause(self) -> None:
        process = self._draw.choice(self._fleet.processes).process
        process.send_signal(signal.SIGSTOP)
        time.sleep(self._draw.uniform(0.2, self._absence))
        process.send_signal(signal.SIGCONT)

    def _kill_postgres(self) -> None:
        assert self._fleet.postgres is not None
        self._fleet.postgres.kill()
        time.sleep(self._draw.uniform(0, 2.0))
        self._fleet.start_postgres()

    def _lose_commit(self) -> None:
        network = self._draw.choice(self._fleet.networks)
        network.cut_after(b"COMMIT\0")
        network.cut.wait(COMMIT_SECONDS)
        network.cut_after(None)

    def _silence(self) -> None:
        with self._draw.choice(self._fleet.networks).silent():
            time.sleep(self._draw.uniform(0.5, self._absence))

    def _kill_all(self) -> None:
        for process in self._fleet.processes:
            process.process.kill()
        self._kill_postgres()
        for process in self._fleet.processes:
            process.process.wait()
            self._fleet.start(process)

    def _fill(self) -> None:
        with filled(self._draw.choice(self._fleet.disks)):
            time.sleep(self._draw.uniform(0.5, 2.0))
            if self._draw.random() < 0.3:
                self._draw.choice(self._fleet.processes).process.kill()
        if self._fleet.postgres is not None:
            self._fleet.start_postgres()  # it gives up when it has no room to recover
        for process in self._fleet.processes:
            if process.process.poll() is not None:
                self._fleet.start(process)
