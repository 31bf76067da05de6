"""What is promised holds while processes are killed: a short run of `make chaos`."""

import os
import subprocess
import sys

import pytest

SECONDS = {"sqlite": 15, "apart": 45}
# Start, storm, recovery, and a look at everything there is.
MOST_SECONDS = 200


@pytest.mark.parametrize("topology", SECONDS)
@pytest.mark.timeout(MOST_SECONDS + 20)
def test_nothing_is_lost_or_done_twice_when_processes_are_killed(topology: str) -> None:
    ran = subprocess.run(
        [
            sys.executable,
            "-m",
            "tests.chaos",
            "--topology",
            topology,
            "--seconds",
            str(SECONDS[topology]),
            "--seed",
            "1",
        ],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
        timeout=MOST_SECONDS,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
    )
    assert ran.returncode == 0, ran.stdout[-12_000:]
    assert "processes killed" in ran.stdout
    assert ran.stdout.endswith("\n0 problems\n")
