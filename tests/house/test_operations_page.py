"""docs/operations.md has every series of `/metrics`, with its type and labels, and no other; its alerts and its backup
are tried.
"""

import contextlib
import re
import shutil
import sqlite3
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


def test_a_copy_made_the_documented_way_holds_what_was_committed_last(tmp_path: Path):
    [statement] = re.findall(r'^sqlite3 "\$TOOLCRIB_DATA_DIR/toolcrib.db" "(.*)"$', PAGE, re.MULTILINE)
    backup = tmp_path / "restored" / "toolcrib.db"
    backup.parent.mkdir()
    calls = [{"name": "write", "arguments": {"path": "a.txt", "content": "kept"}}]
    with ServerThread(tmp_path / "data") as server, server.client() as client:
        workspace = client.post("/v1/workspaces", json={}).json()["id"]
        made = client.post(f"/v1/workspaces/{workspace}/batches?wait=20", json={"calls": calls}).json()
        with contextlib.closing(sqlite3.connect(tmp_path / "data" / "toolcrib.db")) as database:
            database.execute(statement.replace("/backup/toolcrib.db", str(backup)))
    shutil.copytree(tmp_path / "data" / "workspaces", backup.parent / "workspaces")
    with ServerThread(backup.parent) as server, server.client() as client:
        assert client.get(f"/v1/batches/{made['id']}").json() == made
        path = f"/v1/workspaces/{workspace}/files/a.txt"
        assert client.get(path).text == "kept"
