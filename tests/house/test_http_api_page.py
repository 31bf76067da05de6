"""The command lines of docs/http-api.md work, and there is one for every operation of the API.

Each section is run from its top to its end in a workspace of its own, by bash, which stops at the first line that
fails. What was run is read from the service's own count of requests.
"""

import re
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.support.series import scrape
from tests.support.server import KEY, ServerThread, eventually

PAGE = (Path(__file__).parents[2] / "docs" / "http-api.md").read_text()
# A workspace's feed has no end: of that one line it is enough that it is answered.
PRELUDE = """
curl() {
    case "$*" in
        *"/v1/workspaces/$WS/events"*) command curl --fail-with-body --max-time 2 "$@" || [ $? = 28 ] ;;
        *) command curl --fail-with-body --max-time 60 "$@" ;;
    esac || { echo "failed: $*" >&2; return 1; }
}
"""

pytestmark = pytest.mark.skipif(shutil.which("curl") is None, reason="curl is not on PATH")


@dataclass(frozen=True)
class Section:
    title: str
    script: str


def sections() -> Iterator[Section]:
    for text in PAGE.split("\n## ")[1:]:
        title, _, rest = text.partition("\n")
        blocks = re.findall(r"^```sh\n(.*?)^```", rest, re.DOTALL | re.MULTILINE)
        if blocks:
            yield Section(title, "".join(blocks))


def run(section: Section, server: ServerThread, directory: Path) -> Path:
    """Run the lines of a section and return the root of the workspace they ran in."""
    directory.mkdir()
    (directory / "report.pdf").write_bytes(b"%PDF-1.7")
    (directory / "a.csv").write_bytes(b"1,2\n")
    with server.client() as client:
        files = {"task.txt": "status: draft", "docs/x.tmp": "x", "docs/kept": "kept"}
        made = client.post("/v1/workspaces", json={"files": files}).json()
        calls = [{"name": "bash", "arguments": {"command": "cat task.txt"}}]
        batch = client.post(f"/v1/workspaces/{made['id']}/batches?wait=30", json={"calls": calls}).json()
        key = client.post("/v1/keys", json={"name": "of the page", "scopes": ["read"]}).json()
        token = client.post("/v1/url-tokens", json={"url": f"/v1/batches/{batch['id']}/events"}).json()["token"]
    environment = {
        "H": f"Authorization: Bearer {KEY}",
        "U": server.url,
        "WS": made["id"],
        "BATCH": batch["id"],
        "CALL": batch["calls"][0]["id"],
        "KEY": key["id"],
        "TOKEN": token,
        "PATH": "/usr/bin:/bin",
    }
    done = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", PRELUDE + section.script],
        cwd=directory,
        env=environment,
        capture_output=True,
        text=True,
        errors="replace",
        timeout=110,
        check=False,
    )
    assert done.returncode == 0, (section.title, done.stderr, done.stdout[-2000:])
    return Path(made["root"])


def test_every_command_line_works_and_every_operation_has_one(tmp_path: Path):
    with ServerThread(tmp_path / "data") as server, server.client() as client:
        answered: set[tuple[str, str]] = set()
        roots = {}
        for number, section in enumerate(sections()):
            before = counted(client)
            roots[section.title] = run(section, server, tmp_path / str(number))
            made = ("/v1/workspaces", "/v1/workspaces/{workspace_id}/batches", "/v1/keys", "/v1/url-tokens")
            set_up = {("POST", path): 1 for path in made}
            answered |= {
                route
                for route, count in counted(client).items()
                if count > before.get(route, 0) + set_up.get(route, 0) + (route == ("GET", "/metrics"))
            }
        paths = client.get("/openapi.json").json()["paths"]
        files = roots["Files"]
        assert sorted(str(path.relative_to(files)) for path in files.rglob("*") if path.is_file()) == [
            "copy/kept",
            "data/a.csv",
            "docs/kept",
            "docs/x.tmp",
            "notes.txt",
            "task.txt",
        ]
        # Whoever left the feed is counted when the service has noticed.
        feed = ("GET", "/v1/workspaces/{workspace_id}/events")
        eventually(lambda: feed in counted(client))
        answered.add(feed)
    operations = {(method.upper(), path) for path, item in paths.items() for method in item}
    assert operations - answered == set()


def counted(client) -> dict[tuple[str, str], float]:
    """Return how many requests were answered with 2xx, by method and route."""
    return {
        (sample.labels["method"], sample.labels["route"]): sample.value
        for sample in scrape(client)
        if sample.name == "toolcrib_http_requests_total" and sample.labels["status"] == "2xx"
    }
