"""The names of encodings, and that options take no other."""

import pytest
from pydantic import ValidationError

from app.domain.encodings import TextEncoding, find_encoding
from app.domain.workspace import WorkspaceOptions


def test_a_label_finds_its_encoding_in_any_case() -> None:
    assert find_encoding(" GBK ") == TextEncoding("gbk", "gb18030")
    assert find_encoding("shift_JIS") == find_encoding("sjis") == TextEncoding("shift_jis", "cp932")
    assert find_encoding("klingon") is None
    assert find_encoding("") is None


def test_how_sure_a_guess_is_makes_no_other_encoding_of_it() -> None:
    assert TextEncoding("koi8-r", "koi8_r", confidence=0.5) == TextEncoding("koi8-r", "koi8_r")


@pytest.mark.parametrize("label", ["utf-8", "GB18030", "latin1", None])
def test_options_take_a_known_encoding_as_it_is_written(label: str | None) -> None:
    assert WorkspaceOptions.from_json({"read": {"encoding": label}}).read.encoding == label


@pytest.mark.parametrize("label", ["", "klingon", "utf-7", "rot13", "x" * 10_000])
def test_options_refuse_an_encoding_nobody_knows(label: str) -> None:
    with pytest.raises(ValidationError, match="is not known; use a WHATWG name") as caught:
        WorkspaceOptions.from_json({"read": {"encoding": label}})
    (error,) = caught.value.errors()
    assert error["loc"] == ("read", "encoding")
    assert len(error["msg"]) < 300
