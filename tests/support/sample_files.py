"""Images and PDF files made for a test."""

import io
import struct
import zlib
from collections.abc import Sequence
from typing import Any

from PIL import Image


def image_file(
    kind: str, size: tuple[int, int] = (60, 40), *, mode: str = "RGB", noise: bool = False, **more: Any
) -> bytes:
    """An image of one colour, or of noise that no format makes small; `more` goes to Pillow."""
    picture = Image.effect_noise(size, 120).convert(mode) if noise else Image.new(mode, size)
    out = io.BytesIO()
    picture.save(out, kind, **more)
    return out.getvalue()


def marked_image(kind: str, orientation: int, size: tuple[int, int] = (60, 40)) -> bytes:
    """An image whose upper left quarter is white, as it is stored, and which says how to turn it."""
    picture = Image.new("RGB", size)
    picture.paste("white", (0, 0, size[0] // 2, size[1] // 2))
    exif = Image.Exif()
    exif[0x0112] = orientation
    out = io.BytesIO()
    picture.save(out, kind, exif=exif)
    return out.getvalue()


def animated_image(kind: str, size: tuple[int, int] = (60, 40)) -> bytes:
    """Three pictures: red, green, blue."""
    first, *others = (Image.new("RGB", size, colour) for colour in ("red", "green", "blue"))
    out = io.BytesIO()
    first.save(out, kind, save_all=True, append_images=others)
    return out.getvalue()


def png_bomb(width: int, height: int) -> bytes:
    """A small file that says it is an image of so many pixels."""
    header = struct.pack(">IIBBBBB", width, height, 1, 0, 0, 0, 0)
    chunks = ((b"IHDR", header), (b"IDAT", zlib.compress(bytes(100_000))), (b"IEND", b""))
    return b"\x89PNG\r\n\x1a\n" + b"".join(
        struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data)) for name, data in chunks
    )


def pdf_file(pages: Sequence[str], *, encrypted: bool = False) -> bytes:
    """A PDF with these texts on its pages; one that is encrypted opens with a password that nobody has."""
    objects = [
        "<</Type/Catalog/Pages 2 0 R>>",
        f"<</Type/Pages/Kids[{' '.join(f'{4 + 2 * number} 0 R' for number in range(len(pages)))}]/Count {len(pages)}>>",
        "<</Type/Font/Subtype/Type1/BaseFont/Helvetica/Encoding/WinAnsiEncoding>>",
    ]
    for number, text in enumerate(pages):
        shown = "".join(f"({line}) Tj T* " for line in text.split("\n")) if text else ""
        content = f"BT /F1 12 Tf 14 TL 72 720 Td {shown}ET"
        objects += [
            f"<</Type/Page/Parent 2 0 R/MediaBox[0 0 612 792]/Resources<</Font<</F1 3 0 R>>>>/Contents {5 + 2 * number} 0 R>>",
            f"<</Length {len(content)}>>\nstream\n{content}\nendstream",
        ]
    trailer = "/Root 1 0 R"
    if encrypted:
        objects.append(f"<</Filter/Standard/V 1/R 2/P -4/O<{'11' * 32}>/U<{'22' * 32}>>>")
        trailer += f"/Encrypt {len(objects)} 0 R/ID[<{'00' * 16}><{'00' * 16}>]"
    out = b"%PDF-1.4\n%\xe2\xe3\xcf\xd3\n"
    places = []
    for number, body in enumerate(objects, 1):
        places.append(len(out))
        out += f"{number} 0 obj\n{body}\nendobj\n".encode("cp1252")
    table = b"".join(b"%010d 00000 n \n" % place for place in places)
    end = f"trailer<</Size {len(objects) + 1}{trailer}>>\nstartxref\n{len(out)}\n%%EOF\n".encode()
    return out + b"xref\n0 %d\n0000000000 65535 f \n" % (len(objects) + 1) + table + end
