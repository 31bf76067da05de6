"""The encodings texts come in, by the names and labels of the WHATWG Encoding Standard."""

import codecs
import contextlib
import encodings
import pkgutil
from dataclasses import dataclass, field
from typing import Final

_C1: Final = "toolcrib.c1"


@dataclass(frozen=True, slots=True)
class TextEncoding:
    """An encoding: its WHATWG `name`, the Python `codec` that does it and the byte order mark the file begins with.

    `confidence` (above 0, at most 1) is set when the encoding was told by what the bytes look like, None when it is
    known. It makes no other encoding of it.
    """

    name: str
    codec: str
    errors: str = "strict"
    bom: bytes = b""
    confidence: float | None = field(default=None, compare=False)

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


def find_encoding(label: str) -> TextEncoding | None:
    """Return the encoding one of whose names this is, in any case; None when there is none."""
    wanted = label.strip().lower()
    return _LABELS.get(wanted) or _LABELS.get(wanted.replace("_", "-"))


def load_codecs() -> None:
    """Load every codec of Python: later, threads may act as users who cannot read where Python is installed."""
    for module in pkgutil.iter_modules(encodings.__path__):
        with contextlib.suppress(ImportError, LookupError):  # one of another system, or a part of others
            codecs.lookup(module.name)


def unknown_encoding(label: str) -> str:
    """Return what to tell someone who gave an encoding a name it does not have."""
    return (
        f"{label[:60]!r} is not known; use a WHATWG name such as utf-8, utf-16le, gb18030, big5, shift_jis, euc-kr, "
        "windows-1252 or iso-8859-2"
    )


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
