"""Images as a model takes them: whole, upright, and not larger than it can use."""

import base64
import io
import warnings
from dataclasses import asdict, dataclass
from typing import Any, Final

from PIL import Image, ImageOps

from app.errors import ErrorCode, ToolError

MAX_SIDE: Final = 2_000
MAX_BASE64_BYTES: Final = 4_718_592
"""4.5 MiB for the base64 text of an image, which is what providers measure."""

MAX_PIXELS: Final = 64_000_000
"""More are not decoded: that would be 256 MB, and no camera of today takes them in one picture."""

MAX_FILE_BYTES: Final = 64 * 1_048_576

IMAGE_FORMATS: Final = {
    "image/png": "PNG",
    "image/jpeg": "JPEG",
    "image/gif": "GIF",
    "image/webp": "WEBP",
    "image/bmp": "BMP",
}
_SHOWN_AS_THEY_ARE: Final = ("image/png", "image/jpeg", "image/gif", "image/webp")
_ORIENTATION: Final = 0x0112
_JPEG_QUALITY: Final = 85
_SMALLEST_SIDE: Final = 64

# Pillow warns of an image with very many pixels and refuses one with twice as many, also where it meets one inside
# another. Here the warning is a refusal too.
warnings.simplefilter("error", Image.DecompressionBombWarning)


@dataclass(frozen=True, slots=True)
class ShownImage:
    """An image to show: `data` is base64 of `mime_type`, `width` x `height` pixels.

    `original_width` and `original_height` are those of the file's image, turned upright when its EXIF data ask for
    that (`turned`). Of several pictures in the file (`animated`), `data` holds the first when it was made anew
    (`converted`), else all.
    """

    data: str
    mime_type: str
    width: int
    height: int
    original_width: int
    original_height: int
    turned: bool
    animated: bool
    converted: bool

    @property
    def scale(self) -> float:
        """How many pixels shown there are for one of the original, along the longer side; 1 when it is not smaller."""
        return max(self.width, self.height) / max(self.original_width, self.original_height)


def prepare() -> None:
    Image.init()


def decode(data: bytes, *, mime_type: str, shown: str) -> dict[str, Any]:
    return asdict(show_image(data, mime_type, shown))


def show_image(data: bytes, mime_type: str, shown: str) -> ShownImage:
    """Return the image of a file of one of `IMAGE_FORMATS`, which is decoded to see that it is whole.

    A file that is upright, in a format models take, and within both limits is shown as it is, animations included (of
    which only the first picture is decoded). Otherwise the first picture is made anew: as JPEG where the file is one,
    else as PNG, or as JPEG where PNG would be too large.

    Raises:
        ToolError: `unsupported`: damaged, or with more pixels than are decoded.
    """
    try:
        return _shown_image(data, mime_type, shown)
    except (Image.DecompressionBombWarning, Image.DecompressionBombError):
        raise _too_many_pixels(shown, mime_type) from None
    except (ToolError, MemoryError):
        raise
    except Exception as error:  # a damaged file makes a decoder raise nearly anything
        raise ToolError(
            ErrorCode.UNSUPPORTED,
            f"{shown} begins like an image ({mime_type}, {len(data)} bytes) but is damaged and cannot be decoded; "
            "get the file again, or look into it with bash",
            {"mimeType": mime_type},
        ) from error


def _shown_image(data: bytes, mime_type: str, shown: str) -> ShownImage:
    formats = [IMAGE_FORMATS[mime_type]]
    if mime_type == "image/png":
        # Reading the pixels does not check what else is in the file.
        with Image.open(io.BytesIO(data), formats=formats) as image:
            image.verify()
    with Image.open(io.BytesIO(data), formats=formats) as image:
        width, height = image.size
        if width * height > MAX_PIXELS:
            raise _too_many_pixels(shown, mime_type, width, height)
        orientation = image.getexif().get(_ORIENTATION, 1)
        turned = orientation in range(2, 9)
        # A phone's JPEG may hold a preview or a depth map as its second picture, which moves nothing.
        animated = mime_type != "image/jpeg" and getattr(image, "is_animated", False)
        fits = max(width, height) <= MAX_SIDE and base64_size(len(data)) <= MAX_BASE64_BYTES
        as_it_is = fits and not turned and mime_type in _SHOWN_AS_THEY_ARE
        if mime_type == "image/jpeg" and not as_it_is:
            # A JPEG can be decoded at a half, a quarter or an eighth, which takes a fraction of time and memory.
            image.draft(None, (MAX_SIDE, MAX_SIDE))
        image.seek(0)
        image.load()
        if as_it_is:
            text = base64.b64encode(data).decode("ascii")
            return ShownImage(text, mime_type, width, height, width, height, turned, animated, converted=False)
        picture = ImageOps.exif_transpose(image)
        if orientation in range(5, 9):
            width, height = height, width
    encoded, made, size = _made_anew(_plain(picture), (width, height), mime_type)
    text = base64.b64encode(encoded).decode("ascii")
    return ShownImage(text, made, *size, width, height, turned, animated, converted=True)


def _made_anew(picture: Image.Image, original: tuple[int, int], mime_type: str) -> tuple[bytes, str, tuple[int, int]]:
    """Return a picture in a size and format that are within the limits, its type and its size."""
    side = min(MAX_SIDE, max(original))
    opaque = "A" not in picture.getbands()
    while True:
        ratio = min(1.0, side / max(original))
        size = (max(1, round(original[0] * ratio)), max(1, round(original[1] * ratio)))
        resized = picture
        if size != picture.size:
            resized = picture.resize(size, Image.Resampling.LANCZOS, reducing_gap=3.0)
        lossless = mime_type != "image/jpeg"
        for made in ("image/png", "image/jpeg") if lossless or not opaque else ("image/jpeg",):
            encoded = _encoded(resized, made)
            if base64_size(len(encoded)) <= MAX_BASE64_BYTES or side <= _SMALLEST_SIDE:
                return encoded, made, size
        side = side * 3 // 4


def _encoded(picture: Image.Image, mime_type: str) -> bytes:
    out = io.BytesIO()
    if mime_type == "image/png":
        picture.save(out, "PNG")
        return out.getvalue()
    if "A" in picture.getbands():
        colours = picture.convert("RGBA")
        picture = Image.new("RGB", picture.size, "white")
        picture.paste(colours, mask=colours.getchannel("A"))
    picture.save(out, "JPEG", quality=_JPEG_QUALITY)
    return out.getvalue()


def _plain(picture: Image.Image) -> Image.Image:
    """Return a picture in grey or colours of 8 bits, with transparency where it had some."""
    if picture.mode.startswith("I"):
        return picture.convert("I").point(lambda value: value * (1 / 256)).convert("L")  # 16 bits
    if picture.mode in ("L", "LA", "RGB", "RGBA"):
        return picture.convert("RGBA") if "transparency" in picture.info else picture
    if picture.mode in ("P", "PA", "La", "RGBa") or "transparency" in picture.info:
        return picture.convert("RGBA") if picture.has_transparency_data else picture.convert("RGB")
    return picture.convert("L" if picture.mode in ("1", "F") else "RGB")


def base64_size(size: int) -> int:
    """Return how many characters `size` bytes take."""
    return (size + 2) // 3 * 4


def _too_many_pixels(shown: str, mime_type: str, width: int = 0, height: int = 0) -> ToolError:
    has = f"{width}x{height} pixels" if width else "too many pixels"
    return ToolError(
        ErrorCode.UNSUPPORTED,
        f"{shown} ({mime_type}) has {has}; images of more than {MAX_PIXELS} pixels are not decoded. Make a smaller one "
        "with bash and read that",
        {"mimeType": mime_type},
    )
