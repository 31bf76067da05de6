"""The texts of a shell result: the end of the output, within its limits, in whole characters."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.domain.events import OutputStream
from app.tools._shell import NO_OUTPUT, CommandOutput, ShownOutput
from app.tools.truncate import count_lines

REST = "All of it: /v1/calls/call_01h2xcejqtf2nbrexx3vqjhp41/output"


def composed(
    chunks: list[tuple[OutputStream, bytes]], max_bytes: int = 65_536, max_lines: int = 2_000, status: str | None = None
) -> ShownOutput:
    output = CommandOutput(max_bytes)
    for stream, data in chunks:
        output.add(stream, data)
    return output.compose(max_bytes, max_lines, status, REST)


def test_nothing_printed_is_said() -> None:
    assert composed([]) == ShownOutput(NO_OUTPUT, "", "", truncated=False)
    assert composed([], status="Command exited with code 3").text == "(no output)\n\nCommand exited with code 3"


def test_one_final_newline_is_not_part_of_the_text() -> None:
    assert composed([("stdout", b"a\n\n")]) == ShownOutput("a\n", "a\n\n", "", truncated=False)


def test_both_streams_are_shown_as_they_came_and_each_by_itself() -> None:
    shown = composed([("stdout", b"o1\n"), ("stderr", b"e1\n"), ("stdout", b"o2\n")], status="Command cancelled")
    assert shown == ShownOutput("o1\ne1\no2\n\nCommand cancelled", "o1\no2\n", "e1\n", truncated=False)


def test_carriage_returns_and_escapes_are_kept() -> None:
    assert composed([("stdout", b"a\rb\r\n\x1b[2Kc\x00\n")]).text == "a\rb\r\n\x1b[2Kc\x00"


def test_a_character_that_comes_in_two_pieces_is_not_broken_by_the_other_stream() -> None:
    han, note = "漢".encode(), b"note!\n"
    shown = composed([("stdout", han[:2]), ("stderr", note), ("stdout", han[2:])])
    assert shown == ShownOutput("note!\n漢", "漢", "note!\n", truncated=False)


def test_characters_of_both_streams_in_pieces_come_whole() -> None:
    a, b = "🙂".encode(), "é".encode()
    chunks: list[tuple[OutputStream, bytes]] = [("stdout", a[:1]), ("stderr", b[:1]), ("stdout", a[1:3])]
    shown = composed([*chunks, ("stderr", b[1:]), ("stdout", a[3:] + b"x"), ("stderr", b"y")])
    assert shown.text == "é🙂xy"


@pytest.mark.parametrize(
    ("raw", "text"),
    [(b"a\xff\xfeb", "a\ufffd\ufffdb"), (b"a\xe6\xbc", "a\ufffd"), (b"\xc3(", "\ufffd("), (b"\x80" * 5, "\ufffd" * 5)],
)
def test_invalid_utf_8_is_replaced(raw: bytes, text: str) -> None:
    assert composed([("stdout", raw)]).text == text


def test_long_output_keeps_its_end_and_says_how_much_there_was() -> None:
    chunks: list[tuple[OutputStream, bytes]] = [("stdout", b"".join(b"%d\n" % n for n in range(1, 30_001)))]
    shown = composed(chunks, max_lines=10, status="Command exited with code 3")
    assert shown.text == (
        "29995\n29996\n29997\n29998\n29999\n30000\n\n"
        f"[Showing the last 6 of 30000 lines; 168894 bytes in all. {REST}]\n\n"
        "Command exited with code 3"
    )
    assert shown.stdout == "".join(f"{n}\n" for n in range(29_991, 30_001))
    assert shown.truncated


def test_one_long_line_keeps_whole_characters() -> None:
    shown = composed([("stdout", ("水" * 700_000).encode() + b"\n")], max_bytes=1_000)
    head, _, notice = shown.text.partition("\n\n")
    assert set(head) == {"水"}
    assert notice == f"[Showing the end; 2100001 bytes in all. {REST}]"
    assert 990 <= len(shown.text.encode()) <= 1_000
    for spare in range(1_000, 1_004):
        assert "\ufffd" not in composed([("stdout", b"x" + "水".encode() * 700)], max_bytes=spare).stdout
    assert set(shown.stdout) == {"水", "\n"}


def test_what_just_fits_is_not_cut() -> None:
    assert composed([("stdout", b"x" * 300 + b"\n")], max_bytes=300) == ShownOutput(
        "x" * 300, "x" * 299 + "\n", "", truncated=False
    )
    assert composed([("stdout", b"x" * 301)], max_bytes=300).truncated
    assert not composed([("stdout", b"x\n" * 5)], max_lines=5).truncated
    assert composed([("stdout", b"x\n" * 5)], max_lines=5, status="s").truncated


def test_control_characters_cannot_blow_up_the_stored_result() -> None:
    output = CommandOutput(2_000_000)
    for _ in range(40):
        output.add("stdout", b"\x01" * 65_536)
    shown = output.compose(2_000_000, 2_000, None, REST)
    assert shown.truncated
    assert 6 * (len(shown.text) + len(shown.stdout)) < 6.3 * 1_048_576
    assert len(shown.text) > 300_000


@given(
    st.lists(
        st.tuples(
            st.sampled_from(["stdout", "stderr"]),
            st.one_of(st.binary(max_size=200), st.text(max_size=200).map(lambda text: text.encode())),
        ),
        max_size=30,
    ),
    st.integers(256, 3_000),
    st.integers(1, 40),
    st.sampled_from([None, "Command exited with code 3"]),
)
def test_every_text_is_within_its_limits(
    chunks: list[tuple[OutputStream, bytes]], max_bytes: int, max_lines: int, status: str | None
) -> None:
    shown = composed(chunks, max_bytes, max_lines, status)
    for text in (shown.text, shown.stdout, shown.stderr):
        assert len(text.encode()) <= max_bytes
        assert count_lines(text.encode()) <= max_lines
    assert shown.text.endswith(status or "")
    assert shown.truncated == ("[Showing the " in shown.text)


@given(st.text(max_size=60), st.text(max_size=60), st.randoms(use_true_random=False))
def test_valid_output_in_any_pieces_comes_without_replacement(out: str, err: str, random) -> None:
    chunks: list[tuple[OutputStream, bytes]] = []
    rest = {"stdout": out.encode(), "stderr": err.encode()}
    while any(rest.values()):
        stream = random.choice([name for name, data in rest.items() if data])
        size = random.randint(1, 4)
        chunks.append((stream, rest[stream][:size]))
        rest[stream] = rest[stream][size:]
    shown = composed(chunks)
    assert "\ufffd" not in shown.text.replace("\ufffd", "", (out + err).count("\ufffd"))
    assert (shown.stdout, shown.stderr) == (out, err)
    assert sorted(shown.text) == sorted((out + err) or NO_OUTPUT) or sorted(shown.text + "\n") == sorted(out + err)
