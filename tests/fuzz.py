"""`python -m tests.fuzz [--seconds N] [--seed N]`: ask a service what its OpenAPI document says, until the time is up.

Every round draws other requests: each operation by itself, then walks along the links. What fails is printed with the
request that shows it and the seed of its round, and the exit status is 1.
"""

import argparse
import random
import sys
import tempfile
import time
import traceback
from pathlib import Path

from schemathesis.core.failures import FailureGroup

from app.telemetry.logs import configure_logging
from tests.support.fuzzing import CASES, ask, load_schema, make_known, walk
from tests.support.server import ServerThread

EXAMPLES = 20
WALKS = 10
STEPS = 30


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("--seconds", type=float, default=600)
    parser.add_argument("--seed", type=int, default=random.randrange(1_000_000))
    asked = parser.parse_args()
    configure_logging("error", "console")
    until = time.monotonic() + asked.seconds
    failures = operations = steps = 0
    number = asked.seed
    with tempfile.TemporaryDirectory(prefix="toolcrib-fuzz-") as directory:
        Path(directory).chmod(0o711)  # as root, the service acts as a user who has to pass through here
        alone, walked = Path(directory) / "alone", Path(directory) / "walked"
        with ServerThread(alone, allow_unrestricted=True, allow_network=True) as server, ServerThread(walked) as other:
            with server.client() as client:
                known = make_known(client)
            while time.monotonic() < until:
                schema = load_schema(number)
                for operation, mode in CASES:
                    if time.monotonic() >= until:
                        break
                    try:
                        ask(schema, server.url, known, operation, mode, examples=EXAMPLES, number=number)
                    except (Exception, FailureGroup):  # noqa: BLE001 - whatever it is, it is told and the next one goes on
                        failures += 1
                        _tell(f"{operation} ({mode.value}), seed {number}")
                    operations += 1
                for way in range(number * WALKS, (number + 1) * WALKS):
                    if time.monotonic() >= until:
                        break
                    try:
                        steps += walk(schema, other.url, walks=1, steps=STEPS, number=way)
                    except (Exception, FailureGroup):  # noqa: BLE001 - the same
                        failures += 1
                        _tell(f"walk {way}, seed {number}")
                number += 1
    print(
        f"{number - asked.seed} rounds from seed {asked.seed}: {operations} times an operation by itself, up to "
        f"{EXAMPLES} requests each, and {steps} requests of walks; {failures} failures"
    )
    return 1 if failures else 0


def _tell(what: str) -> None:
    print(f"FAILED {what}\n{traceback.format_exc(limit=-3)}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
