"""A line that grep names is the line that read shows under the same number, with the same text."""

import asyncio
import codecs
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from app.tools.base import AgentTool
from app.tools.registry import ToolsOptions, create_all_tools
from tests.support.toolbox import shared_means

ENCODINGS = {
    "utf-8": (b"", "utf-8", None),
    "utf-8 with a mark": (codecs.BOM_UTF8, "utf-8", None),
    "utf-16le with a mark": (codecs.BOM_UTF16_LE, "utf-16-le", None),
    "utf-16be with a mark": (codecs.BOM_UTF16_BE, "utf-16-be", None),
    "gb18030 by argument": (b"", "gb18030", "gb18030"),
    "windows-1252 by argument": (b"", "cp1252", "windows-1252"),
}
ENDS = {"LF": ["\n"], "CRLF": ["\r\n"], "mixed": ["\n", "\r\n", "\r\r\n"]}

# What other programs take for the end of a line stands within lines here.
inside = st.lists(
    st.sampled_from(["x", "xx", "b", "é", " ", "\t", "\r", "\x0b", "\x0c", "\x1c", "\x85", "\u2028", "日", "😀"]),
    max_size=6,
).map("".join)


@st.composite
def contents(draw: st.DrawFn, codec: str, ends: list[str]) -> bytes:
    lines = draw(st.lists(inside, max_size=8))
    text = "".join(line + draw(st.sampled_from(ends)) for line in lines)
    text += draw(st.sampled_from(["", "x", "last x"]))
    return text.encode(codec, "ignore")


@pytest.fixture(scope="module")
def means() -> Iterator[ToolsOptions]:
    with shared_means() as means:
        yield means


async def lines_of_read(tool: AgentTool, path: str, encoding: str | None) -> list[str]:
    """Return the lines of a file by going through it a few at a time."""
    lines: list[str] = []
    offset: int | None = 1
    while offset is not None:
        result = await tool.execute("call-1", {"path": path, "offset": offset, "limit": 3, "encoding": encoding})
        block, details = result.content[0], result.details
        assert block["type"] == "text"
        for line in block["text"].split("\n")[: details["endLine"] - details["startLine"] + 1]:
            number, _, text = line.partition("│ ")
            lines.append(text)
            assert int(number) == len(lines)
        offset = details["nextOffset"]
    return lines


@pytest.mark.parametrize("ends", ENDS)
@pytest.mark.parametrize("encoding", ENCODINGS)
def test_the_line_numbers_of_grep_are_those_of_read(
    tmp_path: Path, means: ToolsOptions, encoding: str, ends: str
) -> None:
    mark, codec, argument = ENCODINGS[encoding]
    tools = create_all_tools(str(tmp_path), means)

    @given(st.lists(contents(codec, ENDS[ends]), min_size=1, max_size=6))
    @settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.too_slow])
    def check(files: list[bytes]) -> None:
        for path in tmp_path.iterdir():
            path.unlink()
        for number, data in enumerate(files):
            (tmp_path / f"{number}.txt").write_bytes(mark + data)
        asyncio.run(compare(len(files)))

    async def compare(files: int) -> None:
        expected = []
        for number in range(files):
            lines = await lines_of_read(tools["read"], f"{number}.txt", argument)
            expected += [
                {"path": f"{number}.txt", "line": line, "text": text}
                for line, text in enumerate(lines, 1)
                if "x" in text
            ]
        found = await tools["grep"].execute("call-2", {"pattern": "x", "encoding": argument, "limit": 1_000})
        assert found.details["entries"] == expected

    check()
