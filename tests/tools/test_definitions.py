"""What models are told of the tools, kept as a file, so that a change of it is a diff that somebody reads."""

import json
import os
from pathlib import Path

from app.tools.definition_formats import format_definition
from app.tools.registry import create_all_tool_definitions

SNAPSHOT = Path(__file__).parent / "snapshots" / "definitions.json"


def test_the_definitions_change_on_purpose_alone() -> None:
    """After a change that is meant: UPDATE_SNAPSHOTS=1 pytest tests/tools/test_definitions.py, and read the diff."""
    definitions = {one.name: format_definition(one, "native") for one in create_all_tool_definitions()}
    text = json.dumps(definitions, indent=1, ensure_ascii=False) + "\n"
    if os.environ.get("UPDATE_SNAPSHOTS"):
        SNAPSHOT.parent.mkdir(exist_ok=True)
        SNAPSHOT.write_text(text, encoding="utf-8")
    # As text: models read names and fields in the order they come.
    assert SNAPSHOT.read_text(encoding="utf-8") == text
