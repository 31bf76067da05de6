"""What a text file is encoded in, decided the same way for every tool.

In this order: a byte order mark, the caller's word, UTF-16 by the pattern of its NUL bytes, any other NUL means binary,
strict UTF-8. Nothing is guessed beyond that: a wrong guess shows a text that is not in the file, a refusal says how to
go on. Names are those of the WHATWG Encoding Standard in lower case.
"""

import codecs
from dataclasses import dataclass
from typing import Final, TypeAlias

from app.errors import ErrorCode, ToolError

SAMPLE_BYTES: Final = 65_536
"""How much of a file's beginning is looked at to tell text from binary."""

_UTF16_SHARE: Final = 0.7
_TEXT_CONTROLS: Final = frozenset("\t\n\v\f\r\x1b")
_C1: Final = "toolcrib.c1"


@dataclass(frozen=True, slots=True)
class TextEncoding:
    """An encoding: its WHATWG `name`, the Python `codec` that does it and the byte order mark the file begins with."""

    name: str
    codec: str
    errors: str = "strict"
    bom: bytes = b""

    @property
    def newline_is_a_byte(self) -> bool:
        """Whether every LF is the byte 0x0A and that byte is nothing else: all but UTF-16."""
        return not self.name.startswith("utf-16")

    def decode(self, data: bytes) -> str:
        """Decode a whole content or whole lines of it; a leading byte order mark of this encoding is dropped.

        Raises:
            UnicodeDecodeError: nothing is replaced or left out.
        """
        return data.removeprefix(self.bom).decode(self.codec, self.errors)

    def encode(self, text: str) -> bytes:
        """Encode a whole content, with the byte order mark it had.

        Raises:
            UnicodeEncodeError: a character that this encoding does not have.
        """
        return self.bom + text.encode(self.codec, self.errors)


@dataclass(frozen=True, slots=True)
class NotText:
    """Why a content is not read as text: `mime_type` is what it seems to be.

    `offset` is where it stops being UTF-8; None for binary content.
    """

    mime_type: str
    offset: int | None = None

    @property
    def binary(self) -> bool:
        return self.offset is None


Detected: TypeAlias = TextEncoding | NotText

UTF_8: Final = TextEncoding("utf-8", "utf-8")
UTF_8_BOM: Final = TextEncoding("utf-8", "utf-8", bom=codecs.BOM_UTF8)
_UTF_16LE: Final = TextEncoding("utf-16le", "utf-16-le")
_UTF_16BE: Final = TextEncoding("utf-16be", "utf-16-be")
_MARKED: Final = (
    UTF_8_BOM,
    TextEncoding("utf-16le", "utf-16-le", bom=codecs.BOM_UTF16_LE),
    TextEncoding("utf-16be", "utf-16-be", bom=codecs.BOM_UTF16_BE),
)
_FIRST_BYTES_OF_A_MARK: Final = frozenset({0xEF, 0xFF, 0xFE})


def detect_encoding(sample: bytes, *, whole: bool, encoding: TextEncoding | None = None) -> Detected:
    """Return the encoding of a file that begins with `sample`; `whole` tells that the sample is all of it.

    `encoding` is the caller's, which a byte order mark outranks.
    """
    if sample and sample[0] in _FIRST_BYTES_OF_A_MARK:
        if sample.startswith((codecs.BOM_UTF32_LE, codecs.BOM_UTF32_BE)):
            return NotText("text/plain; charset=utf-32")
        for marked in _MARKED:
            if sample.startswith(marked.bom):
                return marked
    if encoding is not None:
        return encoding
    if b"\0" in sample:
        return _utf_16_by_pattern(sample, whole=whole) or NotText(sniff_mime_type(sample))
    if sample.startswith(b"%PDF-"):
        return NotText("application/pdf")  # often plain text up to its first stream
    try:
        codecs.utf_8_decode(sample, "strict", whole)
    except UnicodeDecodeError as error:
        mime_type = sniff_mime_type(sample)
        if mime_type == _UNKNOWN_TYPE or sample.startswith(_BEGINNINGS_OF_TEXT):
            return NotText("text/plain", error.start)
        return NotText(mime_type)
    return UTF_8


def encoding_named(label: str) -> TextEncoding:
    """Return the encoding a caller means by one of its names, in any case.

    Raises:
        ToolError: `invalid_arguments` for a name nobody gave an encoding.
    """
    wanted = label.strip().lower()
    found = _LABELS.get(wanted) or _LABELS.get(wanted.replace("_", "-"))
    if found is None:
        raise ToolError(
            ErrorCode.INVALID_ARGUMENTS,
            f"encoding: {label[:60]!r} is not known; use a WHATWG name such as utf-8, utf-16le, gb18030, big5, "
            "shift_jis, euc-kr, windows-1252 or iso-8859-2",
        )
    return found


def sniff_mime_type(sample: bytes) -> str:
    """Return the type the first bytes of a binary file speak for; `application/octet-stream` when they say nothing."""
    for magic, mime_type in _MAGIC:
        if sample.startswith(magic):
            return mime_type
    if sample[:4] == b"RIFF" and sample[8:12] in _RIFF:
        return _RIFF[sample[8:12]]
    if sample[4:8] == b"ftyp":
        return "image/avif" if sample[8:12] == b"avif" else "video/mp4"
    if sample[257:262] == b"ustar":
        return "application/x-tar"
    return _UNKNOWN_TYPE


def _utf_16_by_pattern(sample: bytes, *, whole: bool) -> TextEncoding | None:
    """Tell UTF-16 without a mark: most characters are below U+0100, so most bytes on one side are NUL, none opposite.

    A text that is mostly of other scripts does not show the pattern and is not taken for UTF-16.
    """
    if whole and len(sample) % 2:
        return None
    units = len(sample) // 2
    first, second = sample[0 : units * 2 : 2].count(0), sample[1 : units * 2 : 2].count(0)
    if first and second:
        return None
    if max(first, second) < units * _UTF16_SHARE:
        return None
    found = _UTF_16LE if second else _UTF_16BE
    try:
        text, _ = codecs.lookup(found.codec).decode(sample[: units * 2])
    except UnicodeDecodeError as error:
        if whole or error.start < units * 2 - 2:
            return None
        text, _ = codecs.lookup(found.codec).decode(sample[: error.start])
    if any(character < " " and character not in _TEXT_CONTROLS for character in set(text)):
        return None
    return found


def _c1_controls(error: UnicodeError) -> tuple[str | bytes, int]:
    """Take the bytes 0x80-0x9F that a Windows code page leaves open for the control characters of the same number.

    That is what the standard says of them, and it makes every byte of windows-1252 a character.
    """
    if isinstance(error, UnicodeDecodeError):
        byte = error.object[error.start]
        if 0x80 <= byte <= 0x9F:
            return chr(byte), error.start + 1
    elif isinstance(error, UnicodeEncodeError):
        character = ord(error.object[error.start])
        if 0x80 <= character <= 0x9F:
            return bytes((character,)), error.start + 1
    raise error


codecs.register_error(_C1, _c1_controls)

_UNKNOWN_TYPE: Final = "application/octet-stream"
_RIFF: Final = {b"WEBP": "image/webp", b"WAVE": "audio/wav", b"AVI ": "video/x-msvideo"}
_MAGIC: Final = (
    (b"\x89PNG\r\n\x1a\n", "image/png"),
    (b"\xff\xd8\xff", "image/jpeg"),
    (b"GIF87a", "image/gif"),
    (b"GIF89a", "image/gif"),
    (b"BM", "image/bmp"),
    (b"II*\0", "image/tiff"),
    (b"MM\0*", "image/tiff"),
    (b"\0\0\x01\0", "image/x-icon"),
    (b"%PDF-", "application/pdf"),
    (b"PK\x03\x04", "application/zip"),
    (b"PK\x05\x06", "application/zip"),
    (b"\x1f\x8b", "application/gzip"),
    (b"BZh", "application/x-bzip2"),
    (b"\xfd7zXZ\0", "application/x-xz"),
    (b"\x28\xb5\x2f\xfd", "application/zstd"),
    (b"7z\xbc\xaf\x27\x1c", "application/x-7z-compressed"),
    (b"Rar!\x1a\x07", "application/vnd.rar"),
    (b"\x7fELF", "application/x-elf"),
    (b"MZ", "application/vnd.microsoft.portable-executable"),
    (b"\xca\xfe\xba\xbe", "application/java-vm"),
    (b"\xcf\xfa\xed\xfe", "application/x-mach-binary"),
    (b"\0asm", "application/wasm"),
    (b"SQLite format 3\0", "application/vnd.sqlite3"),
    (b"ID3", "audio/mpeg"),
    (b"OggS", "audio/ogg"),
    (b"fLaC", "audio/flac"),
    (b"\x1aE\xdf\xa3", "video/webm"),
    (b"wOFF", "font/woff"),
    (b"wOF2", "font/woff2"),
    (b"\xd0\xcf\x11\xe0\xa1\xb1\x1a\xe1", "application/x-ole-storage"),
)

# Signatures that are a few letters: without a NUL byte in sight they are rather the first word of a text.
_BEGINNINGS_OF_TEXT: Final = (b"BM", b"MZ", b"BZh", b"ID3")

# name, Python codec, further labels: the standard's, and what Python programmers write.
_ENCODINGS: Final = (
    ("utf-8", "utf-8", "utf8 unicode-1-1-utf-8 utf-8-sig u8"),
    ("utf-16le", "utf-16-le", "utf-16 utf16 utf-16-le ucs-2 unicode csunicode iso-10646-ucs-2 unicodefeff"),
    ("utf-16be", "utf-16-be", "utf-16-be unicodefffe"),
    ("gb18030", "gb18030", ""),
    ("gbk", "gb18030", "gb2312 chinese csgb2312 gb-2312-80 iso-ir-58 x-gbk cp936"),
    ("big5", "big5hkscs", "big5-hkscs cn-big5 csbig5 x-x-big5 cp950"),
    ("shift_jis", "cp932", "shift-jis sjis x-sjis ms-kanji ms932 csshiftjis windows-31j cp932"),
    ("euc-jp", "euc_jp", "x-euc-jp cseucpkdfmtjapanese"),
    ("iso-2022-jp", "iso2022_jp", "csiso2022jp"),
    ("euc-kr", "cp949", "cseuckr ks-c-5601-1987 ks-c-5601-1989 ksc5601 ksc-5601 korean iso-ir-149 windows-949 cp949"),
    ("ibm866", "cp866", "866 cp866 csibm866"),
    ("koi8-r", "koi8_r", "koi koi8 koi8-r cskoi8r"),
    ("koi8-u", "koi8_u", "koi8-ru"),
    ("macintosh", "mac_roman", "mac x-mac-roman csmacintosh mac-roman"),
    ("x-mac-cyrillic", "mac_cyrillic", "x-mac-ukrainian mac-cyrillic"),
    ("iso-8859-2", "iso8859_2", "latin2 latin-2 l2 csisolatin2 iso-ir-101"),
    ("iso-8859-3", "iso8859_3", "latin3 l3 csisolatin3 iso-ir-109"),
    ("iso-8859-4", "iso8859_4", "latin4 l4 csisolatin4 iso-ir-110"),
    ("iso-8859-5", "iso8859_5", "cyrillic csisolatincyrillic iso-ir-144"),
    ("iso-8859-6", "iso8859_6", "arabic asmo-708 ecma-114 csisolatinarabic iso-ir-127"),
    ("iso-8859-7", "iso8859_7", "greek greek8 elot-928 ecma-118 csisolatingreek iso-ir-126"),
    ("iso-8859-8", "iso8859_8", "hebrew visual csisolatinhebrew iso-ir-138"),
    ("iso-8859-8-i", "iso8859_8", "logical csiso88598i"),
    ("iso-8859-10", "iso8859_10", "latin6 l6 csisolatin6 iso-ir-157"),
    ("iso-8859-13", "iso8859_13", ""),
    ("iso-8859-14", "iso8859_14", ""),
    ("iso-8859-15", "iso8859_15", "latin9 latin-9 l9 csisolatin9"),
    ("iso-8859-16", "iso8859_16", ""),
    ("windows-874", "cp874", "dos-874 iso-8859-11 tis-620 cp874"),
    ("windows-1250", "cp1250", "cp1250 x-cp1250"),
    ("windows-1251", "cp1251", "cp1251 x-cp1251"),
    (
        "windows-1252",
        "cp1252",
        "cp1252 x-cp1252 iso-8859-1 latin1 latin-1 l1 ascii us-ascii ansi-x3.4-1968 cp819 ibm819 csisolatin1",
    ),
    ("windows-1253", "cp1253", "cp1253 x-cp1253"),
    ("windows-1254", "cp1254", "cp1254 x-cp1254 iso-8859-9 latin5 latin-5 l5 csisolatin5 iso-ir-148"),
    ("windows-1255", "cp1255", "cp1255 x-cp1255"),
    ("windows-1256", "cp1256", "cp1256 x-cp1256"),
    ("windows-1257", "cp1257", "cp1257 x-cp1257"),
    ("windows-1258", "cp1258", "cp1258 x-cp1258"),
)


def _label_table() -> dict[str, TextEncoding]:
    table = {}
    for name, codec, labels in _ENCODINGS:
        encoding = TextEncoding(name, codec, _C1 if name.startswith("windows-") else "strict")
        for label in (name, *labels.split()):
            table[label] = encoding
            if label.startswith("iso-8859-"):
                for variant in (label.replace("iso-8859", "iso8859"), label.replace("iso-8859-", "iso8859")):
                    table[variant] = encoding
    return table


_LABELS: Final = _label_table()
