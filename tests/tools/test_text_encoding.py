"""What a text is encoded in: decided in one order, guessed only beyond doubt, named as the standard does."""

import codecs
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.errors import ErrorCode, ToolError
from app.tools.text_encoding import (
    SAMPLE_BYTES,
    UTF_8,
    UTF_8_BOM,
    NotText,
    TextEncoding,
    detect_encoding,
    encoding_named,
    sniff_mime_type,
)


def name_of(sample: bytes, *, whole: bool = True, encoding: TextEncoding | None = None) -> str | None:
    found = detect_encoding(sample, whole=whole, encoding=encoding)
    return found.name if isinstance(found, TextEncoding) else None


def test_a_mark_outranks_the_caller_and_the_caller_outranks_the_rest() -> None:
    windows = encoding_named("windows-1252")
    assert detect_encoding(codecs.BOM_UTF8 + b"x", whole=True, encoding=windows) == UTF_8_BOM
    assert name_of(codecs.BOM_UTF16_BE + b"\0x", encoding=windows) == "utf-16be"
    assert name_of(b"\0x\0y", encoding=windows) == "windows-1252"
    assert name_of(b"plain", encoding=windows) == "windows-1252"
    assert detect_encoding(b"plain", whole=True) is UTF_8
    assert detect_encoding(b"", whole=True) is UTF_8


def test_a_mark_is_dropped_from_the_text_and_put_back() -> None:
    for mark, codec in (
        (codecs.BOM_UTF8, "utf-8"),
        (codecs.BOM_UTF16_LE, "utf-16-le"),
        (codecs.BOM_UTF16_BE, "utf-16-be"),
    ):
        data = mark + "é漢😀\ufeff\r\n".encode(codec)
        found = detect_encoding(data, whole=True)
        assert isinstance(found, TextEncoding)
        assert found.decode(data) == "é漢😀\ufeff\r\n"
        assert found.encode(found.decode(data)) == data


@pytest.mark.parametrize("codec", ["utf-16-le", "utf-16-be"])
def test_utf_16_without_a_mark_shows_in_its_nul_bytes(codec: str) -> None:
    for text in ("plain\n", "a", "with é and — and 漢 in it\r\n", "\t1\n"):
        assert name_of(text.encode(codec)) == codec.replace("16-", "16")
    for text in ("漢字漢字a", "漢字だけ\n漢字だけ\n", "control \x01 character"):
        assert name_of(text.encode(codec)) is None
    # Cut in the middle of a unit or of a pair.
    data = "some text 😀".encode(codec)
    assert name_of(data[:-1], whole=False) == codec.replace("16-", "16")
    assert name_of(data[:-2], whole=False) == codec.replace("16-", "16")
    assert name_of(data[:-2], whole=True) is None
    assert name_of(data[:-1], whole=True) is None


@pytest.mark.parametrize(
    "data",
    [
        b"abc\0",
        b"a\0b",
        b"hello!!\0",
        b"\0\0\0\0",
        bytes(range(256)),
        b"\x01\0\x02\0\x03\0",
        b"\x7fELF\x02\x01\x01\0" * 9,
    ],
)
def test_other_nul_bytes_are_binary(data: bytes) -> None:
    found = detect_encoding(data, whole=True)
    assert isinstance(found, NotText)
    assert found.binary


def test_what_is_not_utf_8_is_told_by_its_first_wrong_byte() -> None:
    assert detect_encoding(b"caf\xe9 au lait", whole=True) == NotText("text/plain", 3)
    assert detect_encoding(b"MZ is \xe9 and no program", whole=True) == NotText("text/plain", 6)
    assert detect_encoding(b"cut \xe6\xbc", whole=False) is UTF_8
    assert detect_encoding(b"cut \xe6\xbc", whole=True) == NotText("text/plain", 4)
    # A surrogate in UTF-8 is none.
    assert detect_encoding(b"\xed\xa0\x80", whole=True) == NotText("text/plain", 0)
    assert detect_encoding(codecs.BOM_UTF32_LE + b"a\0\0\0", whole=True) == NotText("text/plain; charset=utf-32")


@pytest.mark.parametrize(
    ("label", "name"),
    [
        ("UTF8", "utf-8"),
        (" utf-8 ", "utf-8"),
        ("utf_8", "utf-8"),
        ("utf-8-sig", "utf-8"),
        ("UTF-16", "utf-16le"),
        ("utf-16-be", "utf-16be"),
        ("GB2312", "gbk"),
        ("cp936", "gbk"),
        ("GB18030", "gb18030"),
        ("sjis", "shift_jis"),
        ("Shift-JIS", "shift_jis"),
        ("latin1", "windows-1252"),
        ("ISO-8859-1", "windows-1252"),
        ("iso8859-1", "windows-1252"),
        ("iso88592", "iso-8859-2"),
        ("ascii", "windows-1252"),
        ("cp1251", "windows-1251"),
        ("KOI8-R", "koi8-r"),
        ("euc_kr", "euc-kr"),
    ],
)
def test_labels_mean_what_the_standard_says(label: str, name: str) -> None:
    assert encoding_named(label).name == name


@pytest.mark.parametrize("label", ["", "klingon", "utf-7", "base64", "rot13", "x" * 1000, "utf-8\0"])
def test_a_label_nobody_gave_an_encoding_is_refused(label: str) -> None:
    with pytest.raises(ToolError) as caught:
        encoding_named(label)
    assert caught.value.code is ErrorCode.INVALID_ARGUMENTS
    assert len(caught.value.message) < 400


def test_every_encoding_has_a_codec_and_writes_back_what_it_reads() -> None:
    names = {encoding_named(label).name for label in ("utf-8", "big5", "euc-jp", "iso-2022-jp", "koi8-u", "ibm866")}
    names |= {f"windows-{number}" for number in range(1250, 1259)} | {f"iso-8859-{n}" for n in (2, 5, 7, 8, 15)}
    for name in names:
        encoding = encoding_named(name)
        assert encoding.name == name
        assert encoding.encode(encoding.decode(b"plain text\r\n")) == b"plain text\r\n"


LANGUAGES = {
    "zh": "这个函数读取配置文件并返回一个字典、如果文件不存在就抛出异常。请在修改之前先备份数据库。",
    "zh-tw": "這個函式讀取設定檔並傳回一個字典、如果檔案不存在就拋出例外。請在修改之前先備份資料庫。",
    "ja": "この関数は設定ファイルを読み込み、辞書を返します。ファイルが存在しない場合は例外を送出します。",
    "ko": "이 함수는 설정 파일을 읽어 사전을 반환합니다. 파일이 없으면 예외가 발생합니다.",
    "ru": "Эта функция читает файл настроек и возвращает словарь. Если файла нет, возникает исключение.",
    "fr": "Cette fonction lit le fichier de réglages et renvoie un dictionnaire. Si le fichier n'existe pas, une "
    "exception est levée. Avant toute modification, sauvegardez la base de données ; le café est très serré à côté. "
    "Les paramètres non précisés sont remplacés par défaut, et les clés ignorées après vérification.",
    "el": "Αυτή η συνάρτηση διαβάζει το αρχείο ρυθμίσεων και επιστρέφει ένα λεξικό.",
}


@pytest.mark.parametrize(
    ("language", "name"),
    [
        ("zh", "gb18030"),
        ("zh-tw", "big5"),
        ("ja", "shift_jis"),
        ("ja", "euc-jp"),
        ("ko", "euc-kr"),
        ("ru", "windows-1251"),
        ("ru", "koi8-r"),
        ("ru", "ibm866"),
        ("ru", "iso-8859-5"),
        ("fr", "windows-1252"),
        ("el", "windows-1253"),
    ],
)
@pytest.mark.parametrize("frame", ["{}\r\n", "# {}\nx = 1\n", "{}\n" * 2_000])
def test_a_text_of_some_length_is_told_by_what_it_looks_like(language: str, name: str, frame: str) -> None:
    text = frame.replace("{}", LANGUAGES[language])
    data = encoding_named(name).encode(text)
    sample = data[:SAMPLE_BYTES]
    found = detect_encoding(sample, whole=len(data) <= SAMPLE_BYTES)
    assert isinstance(found, TextEncoding)
    assert found.decode(data) == text
    assert found.encode(text) == data
    assert found.confidence is not None
    assert 0.25 <= found.confidence <= 1


def test_what_is_known_has_no_confidence() -> None:
    for data in (b"plain", codecs.BOM_UTF8, "x".encode("utf-16"), "Ж".encode()):
        found = detect_encoding(data, whole=True)
        assert isinstance(found, TextEncoding)
        assert found.confidence is None


@pytest.mark.parametrize(
    "data",
    [
        b"caf\xe9",
        b'menu = "caf\xe9 au lait"\nprice = 3\n',
        "Straße 5\n".encode("cp1252"),
        "price: 5 €\n".encode("cp1252"),
        "# 中文注释\nx = 1\n".encode("gbk"),
        "Größe, Übung, naïve café".encode("mac_roman"),
        "Ça va? À bientôt, élève".encode("cp850"),
        "これは".encode("cp932"),
    ],
)
def test_a_few_odd_bytes_tell_nothing(data: bytes) -> None:
    found = detect_encoding(data, whole=True)
    assert isinstance(found, NotText)
    assert not found.binary


@pytest.mark.parametrize("language", LANGUAGES)
def test_damaged_utf_8_is_not_taken_for_another_encoding(language: str) -> None:
    whole = (LANGUAGES[language] * 3).encode()
    for data in (whole + b"\xe9", b"\xa4" + whole, whole + b"caf\xe9 " + whole):
        found = detect_encoding(data, whole=True)
        assert isinstance(found, NotText)
        assert not found.binary


@pytest.mark.parametrize("seed", range(20))
def test_bytes_that_look_like_no_language_tell_nothing(seed: int) -> None:
    data = bytes(random.Random(seed).choices(range(0xA0, 0x100), k=40))
    assert detect_encoding(data, whole=True) == NotText("text/plain", 0)


@given(st.binary(min_size=16, max_size=400))
def test_what_is_guessed_is_text_and_gives_its_bytes_back(data: bytes) -> None:
    found = detect_encoding(data, whole=True)
    if isinstance(found, TextEncoding) and found.confidence is not None:
        text = found.decode(data)
        assert found.encode(text) == data
        assert not any(character < " " and character not in "\t\n\v\f\r\x1b" for character in text)


@given(st.binary(max_size=60))
def test_windows_1252_reads_and_writes_any_bytes(data: bytes) -> None:
    encoding = encoding_named("windows-1252")
    assert encoding.encode(encoding.decode(data)) == data


@given(st.binary(max_size=80), st.booleans())
def test_any_bytes_get_an_answer_and_a_whole_text_can_be_decoded(data: bytes, whole: bool) -> None:
    found = detect_encoding(data, whole=whole)
    if isinstance(found, TextEncoding) and whole and (found is UTF_8 or not found.bom):
        assert found.encode(found.decode(data)) == data


@given(st.text())
def test_any_text_is_recognized_as_utf_8(text: str) -> None:
    data = text.encode()
    found = detect_encoding(data, whole=True)
    if "\0" not in text and not text.startswith(("\ufeff", "%PDF-")):
        assert found is UTF_8


@pytest.mark.parametrize(
    ("data", "mime_type"),
    [
        (b"\x89PNG\r\n\x1a\nrest", "image/png"),
        (b"RIFF....WAVEfmt ", "audio/wav"),
        (b"\0\0\0\x20ftypavif", "image/avif"),
        (b"\0\0\0\x20ftypisom", "video/mp4"),
        (b"name\0" * 51 + b"xxustar\0", "application/x-tar"),
        (b"nothing known", "application/octet-stream"),
        (b"", "application/octet-stream"),
    ],
)
def test_types_are_told_by_their_first_bytes(data: bytes, mime_type: str) -> None:
    assert sniff_mime_type(data) == mime_type
