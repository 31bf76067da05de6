"""docs/operations.md has every series of `/metrics`, with its type and labels, and no other; its alerts ask for
series that exist.
"""

import re
from pathlib import Path

import yaml
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


def test_every_series_that_an_alert_asks_for_exists():
    alerts = PAGE.partition("\n## Alerts\n")[2].partition("```yaml\n")[2].partition("```")[0]
    expressions = [rule["expr"] for group in yaml.safe_load(alerts)["groups"] for rule in group["rules"]]
    listed = {name for name, _, _ in ROW.findall(PAGE)}
    asked = {name.removesuffix("_bucket") for text in expressions for name in re.findall(r"\b[a-z]+_[a-z_]+\b", text)}
    assert len(expressions) > 5
    assert asked - listed - {"histogram_quantile"} == set()
