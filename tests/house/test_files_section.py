"""The command lines of the files section in docs/http-api.md do what it says, in their order."""

import re
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.support.server import KEY, ServerThread

PAGE = Path(__file__).parents[2] / "docs" / "http-api.md"


@pytest.mark.skipif(shutil.which("curl") is None, reason="curl is not on PATH")
def test_every_command_line_on_files_works(tmp_path: Path):
    section = PAGE.read_text().partition("\n## Files\n")[2].partition("\n## ")[0]
    blocks = re.findall(r"```sh\n(.*?)```", section, re.DOTALL)
    lines = [line for block in blocks for line in block.splitlines()]
    (tmp_path / "report.pdf").write_bytes(b"%PDF-1.7")
    (tmp_path / "a.csv").write_bytes(b"1,2\n")
    with ServerThread(tmp_path / "data") as server, server.client() as client:
        made = client.post("/v1/workspaces", json={"files": {"docs/x.tmp": "x", "docs/kept": "kept"}}).json()
        root = Path(made["root"])
        for line in lines:
            script = f'curl() {{ command curl --fail-with-body --max-time 20 "$@"; }}; {line}'
            environment = {
                "H": f"Authorization: Bearer {KEY}",
                "U": server.url,
                "WS": made["id"],
                "PATH": "/usr/bin:/bin",
            }
            done = subprocess.run(
                ["bash", "-c", script],
                cwd=tmp_path,
                env=environment,
                capture_output=True,
                text=True,
                timeout=30,
                check=False,
            )
            assert done.returncode == 0, (line, done.stdout, done.stderr)
    assert len(lines) == 8
    assert (tmp_path / "copy.pdf").read_bytes() == b"%PDF-1.7"
    assert sorted(str(path.relative_to(root)) for path in root.rglob("*") if path.is_file()) == [
        "copy/kept",
        "data/a.csv",
        "docs/kept",
        "docs/x.tmp",
        "notes.txt",
    ]
