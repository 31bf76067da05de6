"""What a text file is encoded in, decided the same way for every tool.

In this order: a byte order mark, the caller's word, UTF-16 by the pattern of its NUL bytes, any other NUL means binary,
strict UTF-8, and what the bytes look like where that is beyond doubt. A wrong guess shows a text that is not in the
file, a refusal says how to go on: so little is guessed. Names are those of the WHATWG Encoding Standard in lower case.
"""

import codecs
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Final, TypeAlias

import chardet

from app.domain.encodings import TextEncoding, find_encoding, unknown_encoding
from app.errors import ErrorCode, ToolError

__all__ = [
    "SAMPLE_BYTES",
    "UTF_8",
    "UTF_8_BOM",
    "Detected",
    "NotText",
    "TextEncoding",
    "detect_encoding",
    "encoding_named",
    "sniff_mime_type",
]

SAMPLE_BYTES: Final = 65_536
"""How much of a file's beginning is looked at to tell text from binary."""

_UTF16_SHARE: Final = 0.7
_TEXT_CONTROLS: Final = frozenset("\t\n\v\f\r\x1b")

# Of 3,400 pieces of translated program messages in 24 languages, written in the encodings usual for them and in a few
# that are not, the detector mistook one in sixty, down to words of one odd letter. With these two bounds none was
# mistaken; what is refused in return is short, or West European prose of a few lines.
_CONFIDENT: Final = 0.25
_TELLING_BYTES: Final = 16
"""How many bytes above ASCII a text needs before a guess at it is listened to."""

_UTF8_SHARE: Final = 0.75
"""From this share of its bytes above ASCII on that make up UTF-8, a text is damaged UTF-8 and nothing else."""


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

    `encoding` is the caller's, which a byte order mark outranks. A guess has its `confidence` set.
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
            return _guessed(sample, whole=whole) or NotText("text/plain", error.start)
        return NotText(mime_type)
    return UTF_8


def encoding_named(label: str) -> TextEncoding:
    """Return the encoding a caller means by one of its names, in any case.

    Raises:
        ToolError: `invalid_arguments` for a name nobody gave an encoding.
    """
    found = find_encoding(label)
    if found is None:
        raise ToolError(ErrorCode.INVALID_ARGUMENTS, f"encoding: {unknown_encoding(label)}")
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


def _guessed(sample: bytes, *, whole: bool) -> TextEncoding | None:
    """Return the encoding a text that is no UTF-8 is surely in, None when there is doubt."""
    telling = len(sample.translate(None, _ASCII))
    if telling < _TELLING_BYTES:
        return None
    in_utf8 = sum(len(character.encode()) for character in sample.decode("utf-8", "ignore") if character > "\x7f")
    if in_utf8 >= telling * _UTF8_SHARE:
        return None
    # Every encoding it knows competes, also those nobody asks for: where one of them wins, there is doubt.
    answer = chardet.detect(sample, compat_names=False, max_bytes=SAMPLE_BYTES)
    name, confidence = answer["encoding"], answer["confidence"]
    if name is None or confidence < _CONFIDENT:
        return None
    found = find_encoding(_OTHER_NAMES.get(name, name))
    if found is None or found.name.startswith("utf-"):
        return None
    try:
        text = codecs.getincrementaldecoder(found.codec)(found.errors).decode(sample, whole)
    except UnicodeDecodeError:
        return None
    if any(_is_odd_control(character) for character in set(text)):
        return None
    return replace(found, confidence=round(min(confidence, 1.0), 2))


def _is_odd_control(character: str) -> bool:
    return (character < " " and character not in _TEXT_CONTROLS) or "\x7f" <= character < "\xa0"


_ASCII: Final = bytes(range(0x80))
_OTHER_NAMES: Final[Mapping[str, str]] = {
    "big5hkscs": "big5",
    "euc_jis_2004": "euc-jp",
    "shift_jis_2004": "shift_jis",
}
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
