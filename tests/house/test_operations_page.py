"""docs/operations.md has every series of `/metrics`, with its type and labels, and no other."""

import re
from pathlib import Path

from prometheus_client.parser import text_string_to_metric_families

from tests.support.server import ServerThread

PAGE = (Path(__file__).parents[2] / "docs" / "operations.md").read_text()
ROW = re.compile(r"^\| `([a-z_]+)` \| (gauge|counter|histogram) \| ([^|]*)\|", re.MULTILINE)


def test_every_series_stands_on_the_page_with_its_type_and_labels(tmp_path: Path):
    listed = {name: (kind, set(re.findall(r"`(\w+)`", labels))) for name, kind, labels in ROW.findall(PAGE)}
    with ServerThread(tmp_path / "data") as server, server.client() as client:
        client.get("/version")
        text = client.get("/metrics").text
    found = {}
    for family in text_string_to_metric_families(text):
        name = family.name + ("_total" if family.type == "counter" else "")
        labels = {label for sample in family.samples for label in sample.labels} - {"le"}
        found[name] = (family.type, labels)
    assert found == listed
