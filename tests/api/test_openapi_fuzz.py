"""The running service is asked what its own OpenAPI document says, and a lot that it does not.

The cases are the same every time; `make fuzz` draws others for as long as it is told to.
"""

from collections.abc import Iterator

import pytest
import schemathesis
from schemathesis.schemas import BaseSchema

from tests.support.fuzzing import CASES, ask, load_schema, make_known, walk
from tests.support.server import ServerThread

EXAMPLES = 8
WALKS = 6
STEPS = 12


@pytest.fixture(scope="module")
def fuzzed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerThread]:
    with ServerThread(
        tmp_path_factory.mktemp("fuzzed") / "data", allow_unrestricted=True, allow_network=True
    ) as server:
        yield server


@pytest.fixture(scope="module")
def known(fuzzed: ServerThread) -> dict[str, str]:
    with fuzzed.client() as client:
        return make_known(client)


@pytest.fixture(scope="module")
def schema() -> BaseSchema:
    return load_schema(1)


@pytest.mark.parametrize(
    ("operation", "mode"), [pytest.param(*case, id=f"{case[0]}-{case[1].value}") for case in CASES]
)
def test_every_answer_is_a_documented_one(
    schema: BaseSchema, fuzzed: ServerThread, known: dict[str, str], operation: str, mode: schemathesis.GenerationMode
) -> None:
    ask(schema, fuzzed.url, known, operation, mode, examples=EXAMPLES)


def test_what_was_made_answers_as_documented_wherever_the_links_lead(schema: BaseSchema, tmp_path_factory) -> None:
    with ServerThread(tmp_path_factory.mktemp("walked") / "data") as server:
        assert walk(schema, server.url, walks=WALKS, steps=STEPS) >= WALKS * STEPS // 2
