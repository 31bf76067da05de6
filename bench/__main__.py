"""`python -m bench [--only NAME ...] [--quick]`: print the facts of the machine and the table of figures.

Everything runs on loopback, each server on a data directory of its own below bench/results, which is removed at the
end; the table is kept there as JSON. `records` takes minutes and is measured only when it is named. `--quick` measures
just enough to show that the benches work.
"""

import argparse
import shutil
import sys
import tempfile
import time
from pathlib import Path

from bench.figures import FIGURES, FULL, LONG, QUICK
from bench.report import as_json, machine_facts, table


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m bench", description=__doc__)
    default = [name for name in FIGURES if name not in LONG]
    parser.add_argument("--only", nargs="+", choices=list(FIGURES), default=default, metavar="NAME")
    parser.add_argument("--quick", action="store_true")
    # Beside the project and not in /tmp, which is often memory: fsync has to mean something.
    parser.add_argument("--results", type=Path, default=Path(__file__).parent / "results")
    options = parser.parse_args()

    options.results.mkdir(parents=True, exist_ok=True)
    data_dir = Path(tempfile.mkdtemp(prefix="data-", dir=options.results))
    data_dir.chmod(0o711)  # as root, the service acts as a user who has to pass through here
    figures = []
    try:
        facts = machine_facts(data_dir)
        for name, value in facts.items():
            print(f"{name}: {value}")
        for name in options.only:
            print(f"measuring {name} ...", file=sys.stderr, flush=True)
            figures += list(FIGURES[name](QUICK if options.quick else FULL, data_dir))
    finally:
        shutil.rmtree(data_dir, ignore_errors=True)
    print()
    print(table(figures))
    if not options.quick:
        (options.results / f"{time.strftime('%Y%m%d-%H%M%S')}.json").write_text(as_json(facts, figures))
    return 0


if __name__ == "__main__":
    sys.exit(main())
