"""The README's commands, run in order against a real server, give the output that the README shows.

A `sh` block that is followed by a `json`, `text` or `console` block is run and compared; a `python` block too. In what
is compared, ids stand for themselves (the README's first workspace is this run's first), times and durations may be
any, and `…` is whatever was left out.
"""

import itertools
import os
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.support.server import ServerProcess

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()
KEY = "a-key-for-the-readme"

ID = re.compile(r"\b(?:ws|batch|call|key|req|node)_[0-9a-hjkmnp-tv-z]{26}\b")
VOLATILE = re.compile(
    r"(?P<id>\b(?:ws|batch|call|key|req|node)_[0-9a-hjkmnp-tv-z]{26}\b)"
    r"|(?P<time>\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z)"
    r'|(?P<duration>"durationMs": ?)\d+'
    r"|(?P<left_out>…)"
)


@dataclass(frozen=True)
class Block:
    language: str
    text: str
    line: int


def blocks(text: str) -> list[Block]:
    """Return the fenced blocks of a Markdown text."""
    fences = re.finditer(r"^```(\w*)\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)
    return [Block(match[1], match[2], text.count("\n", 0, match.start()) + 1) for match in fences]


def examples() -> list[tuple[Block, Block]]:
    """Return each block that is run with the output block that follows it."""
    return [
        (block, output)
        for block, output in itertools.pairwise(blocks(README))
        if block.language in {"sh", "python"} and output.language in {"json", "text"}
    ]


class Session:
    """What the reader's shell knows: its variables, and which of this run's ids stands for which of the README's."""

    def __init__(self, address: str, directory: Path) -> None:
        self.address = address
        self.directory = directory
        self.assignments: list[str] = []
        self.ids: dict[str, str] = {}

    def run(self, block: Block) -> str:
        text = ID.sub(lambda match: self.ids.get(match[0], match[0]), block.text)
        text = text.replace("http://127.0.0.1:8080", self.address)
        if block.language == "python":
            argv = [sys.executable, "-c", text]
        else:
            argv = ["bash", "-euo", "pipefail", "-c", "\n".join([*self.assignments, text])]
            self.assignments += [line for line in text.splitlines() if re.match(r"[A-Z]+=", line)]
        answer = subprocess.run(
            argv,
            cwd=self.directory,
            env={**os.environ, "TOOLCRIB_API_KEY": KEY, "PYTHONPATH": str(ROOT)},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
            timeout=30,
        )
        assert answer.returncode == 0, f"README.md line {block.line} failed:\n{answer.stdout}"
        return answer.stdout.strip("\n")

    def compare(self, actual: str, expected: str) -> None:
        """Fail unless `actual` is `expected` but for what differs from run to run; learn its ids."""
        pattern, position, named = "", 0, {}
        for match in VOLATILE.finditer(expected):
            pattern += re.escape(expected[position : match.start()])
            position = match.end()
            if (shown := match["id"]) is not None:
                if shown in self.ids:
                    pattern += re.escape(self.ids[shown])
                elif shown in named:
                    pattern += f"(?P={named[shown]})"
                else:
                    named[shown] = f"id{len(named)}"
                    pattern += f"(?P<{named[shown]}>{shown.partition('_')[0]}_[0-9a-z]{{26}})"
            elif match["time"] is not None:
                pattern += r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z"
            elif match["duration"] is not None:
                pattern += re.escape(match["duration"]) + r"\d+"
            else:
                pattern += ".*?"
        pattern += re.escape(expected[position:])
        matched = re.fullmatch(pattern, actual, re.DOTALL)
        assert matched is not None, f"the README shows\n{expected}\nand this is\n{actual}"
        self.ids |= {shown: matched[group] for shown, group in named.items()}


def test_the_commands_of_the_readme_give_what_the_readme_shows(tmp_path: Path):
    assert len(examples()) >= 4
    with ServerProcess(tmp_path / "data", {"TOOLCRIB_API_KEY": KEY}) as server:
        shell = Session(server.url, tmp_path)
        for block, output in examples():
            shell.compare(shell.run(block), output.text.strip("\n"))
        assert server.stop() == 0


def test_the_comparison_tells_another_output_from_the_one_shown(tmp_path: Path):
    shell = Session("", tmp_path)
    first, second = "ws_01jz0000000000000000000000", "ws_01kz0000000000000000000000"
    shell.compare(f'{{"id":"{first}","durationMs":7}}', f'{{"id":"{second}","durationMs":12}}')
    shell.compare(f"{first} at 2026-01-02T03:04:05.678Z, more", f"{second} at 2025-01-01T00:00:00.000Z…")
    for other in (f"{second}", f'{{"id":"{first}"}}', "ws_"):
        with pytest.raises(AssertionError):
            shell.compare(other, second)


def test_the_make_targets_of_the_readme_exist():
    targets = set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    assert set(re.findall(r"\bmake ([a-z]+)", README)) - targets == set()


def test_links_of_the_readme_and_the_docs_lead_somewhere():
    pages = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").glob("*.md")]
    links = [(page, target) for page in pages for target in re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", page.read_text())]
    assert [
        f"{page.relative_to(ROOT)}: {target}"
        for page, target in links
        if "://" not in target and not (page.parent / target).exists()
    ] == []


def test_the_modules_that_the_architecture_page_names_exist():
    page = (ROOT / "docs" / "architecture.md").read_text()
    layers = sorted(path.name for path in (ROOT / "app").iterdir() if path.is_dir() and path.name != "__pycache__")
    named = set(re.findall(rf"\b((?:{'|'.join(layers)})/[a-z_/]*[a-z_])(?:\.py)?\b", page))
    assert len(named) > 10
    assert [name for name in sorted(named) if not list((ROOT / "app").glob(f"{name}*"))] == []
