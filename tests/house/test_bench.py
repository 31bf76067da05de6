"""The benches run: what they measure here means nothing, but a bench that broke would be noticed too late."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from bench.report import Figure, table

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(
    "name",
    [
        "single-read",
        "batches",
        "first-delta",
        "large-file",
        "files",
        "sandbox",
        "records",
        "slow-reader",
        "subscribers",
        "distributed",
    ],
)
def test_a_bench_measures_beside_its_floor_and_leaves_nothing_behind(name: str, tmp_path: Path):
    answer = subprocess.run(
        [sys.executable, "-m", "bench", "--quick", "--only", name, "--results", str(tmp_path)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
        timeout=100,
    )
    assert answer.returncode == 0, answer.stderr
    facts, _, rows = answer.stdout.partition("\n\n")
    assert [line.partition(":")[0] for line in facts.splitlines()] == [
        "processor",
        "system",
        "data directory",
        "packages",
    ]
    measured = rows.splitlines()[2:]
    assert all(re.search(r"\d", row) for row in measured), rows
    assert any(re.search(r"\d.*[<>]=? ", row) for row in measured), rows
    assert list(tmp_path.iterdir()) == []


def test_the_table_says_which_aims_were_met():
    figures = [
        Figure("a", "1 ms", "2 ms", "0.5x", "<= 2x", met=True),
        Figure("longer name", "9 ms", "2 ms", "4.5x", "<= 2x", met=False),
        Figure("no aim", "1", "", "", ""),
    ]
    assert table(figures) == (
        "figure       measured  floor  ratio  aim\n"
        "-----------  --------  -----  -----  -----  ------\n"
        "a            1 ms      2 ms   0.5x   <= 2x  met\n"
        "longer name  9 ms      2 ms   4.5x   <= 2x  MISSED\n"
        "no aim       1"
    )
