"""Images: whole, upright and of a size a model takes, or an error; never a block with something else in it."""

import base64
import io
import os

import pytest
from PIL import Image

from app.errors import ErrorCode, ToolError
from app.tools.image_content import IMAGE_FORMATS, MAX_BASE64_BYTES, MAX_SIDE, ShownImage, base64_size, show_image
from tests.support.sample_files import animated_image, image_file, marked_image, png_bomb


def shown(data: bytes, mime_type: str) -> ShownImage:
    return show_image(data, mime_type, "it")


def picture_of(image: ShownImage) -> Image.Image:
    picture = Image.open(io.BytesIO(base64.b64decode(image.data)))
    picture.load()
    assert picture.size == (image.width, image.height)
    assert len(image.data) <= MAX_BASE64_BYTES
    return picture


def refusal(data: bytes, mime_type: str) -> ToolError:
    with pytest.raises(ToolError) as caught:
        shown(data, mime_type)
    return caught.value


@pytest.mark.parametrize("mime_type", ["image/png", "image/jpeg", "image/gif", "image/webp"])
def test_an_image_within_the_limits_is_shown_as_it_is(mime_type: str) -> None:
    data = image_file(IMAGE_FORMATS[mime_type])
    text = base64.b64encode(data).decode()
    assert shown(data, mime_type) == ShownImage(text, mime_type, 60, 40, 60, 40, False, False, False)


@pytest.mark.parametrize("mode", ["RGB", "L", "1", "P"])
def test_a_bitmap_is_shown_as_png(mode: str) -> None:
    image = shown(image_file("BMP", mode=mode), "image/bmp")
    assert (image.mime_type, image.width, image.height, image.scale, image.converted) == ("image/png", 60, 40, 1, True)
    assert picture_of(image).format == "PNG"


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "WEBP", "GIF", "BMP"])
@pytest.mark.parametrize("size", [(2_500, 100), (100, 4_000), (2_001, 2_001), (5_000, 1)])
def test_more_than_2000_pixels_a_side_are_made_fewer(kind: str, size: tuple[int, int]) -> None:
    image = shown(image_file(kind, size), f"image/{kind.lower()}")
    assert max(image.width, image.height) == MAX_SIDE
    assert (image.original_width, image.original_height) == size
    assert image.scale == MAX_SIDE / max(size)
    assert min(image.width, image.height) == max(1, round(min(size) * image.scale))
    assert picture_of(image).format == ("JPEG" if kind == "JPEG" else "PNG")


def test_2000_pixels_are_not_too_many() -> None:
    data = image_file("PNG", (2_000, 2_000))
    assert base64.b64decode(shown(data, "image/png").data) == data


def test_more_than_the_limit_in_bytes_is_written_smaller() -> None:
    out = io.BytesIO()
    Image.frombytes("RGB", (1_200, 1_200), os.urandom(1_200 * 1_200 * 3)).save(out, "PNG", compress_level=1)
    data = out.getvalue()
    assert base64_size(len(data)) > MAX_BASE64_BYTES
    image = shown(data, "image/png")
    assert (image.mime_type, image.width, image.scale) == ("image/jpeg", 1_200, 1)
    picture_of(image)


def test_where_no_format_is_small_enough_the_picture_gets_smaller(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("app.tools.image_content.MAX_BASE64_BYTES", 40_000)
    image = shown(image_file("JPEG", (600, 400), noise=True), "image/jpeg")
    assert image.scale < 1
    assert len(image.data) <= 40_000
    assert picture_of(image).format == "JPEG"


@pytest.mark.parametrize("kind", ["JPEG", "PNG", "WEBP"])
@pytest.mark.parametrize("orientation", range(1, 9))
def test_an_image_is_turned_as_its_exif_data_say(kind: str, orientation: int) -> None:
    # Where the white quarter is in the end: left or right, upper or lower.
    white = {1: (0, 0), 2: (1, 0), 3: (1, 1), 4: (0, 1), 5: (0, 0), 6: (1, 0), 7: (1, 1), 8: (0, 1)}[orientation]
    image = shown(marked_image(kind, orientation), f"image/{kind.lower()}")
    size = (60, 40) if orientation < 5 else (40, 60)
    assert (image.width, image.height) == (image.original_width, image.original_height) == size
    assert image.turned is image.converted is (orientation > 1)
    if orientation > 1:
        picture = picture_of(image).convert("L")
        quarters = {
            (x, y): picture.getpixel(((2 * x + 1) * size[0] // 4, (2 * y + 1) * size[1] // 4))
            for x in (0, 1)
            for y in (0, 1)
        }
        assert {place for place, value in quarters.items() if value > 200} == {white}
        assert picture.getexif().get(0x0112, 1) == 1


def test_a_large_photo_is_turned_and_made_smaller_at_once() -> None:
    image = shown(marked_image("JPEG", 6, (4_000, 3_000)), "image/jpeg")
    assert (image.width, image.height, image.original_width, image.original_height) == (1_500, 2_000, 3_000, 4_000)
    assert picture_of(image).convert("L").getpixel((1_400, 100)) > 200


@pytest.mark.parametrize("kind", ["GIF", "WEBP", "PNG"])
def test_an_animation_is_kept_within_the_limits_and_else_its_first_picture_shown(kind: str) -> None:
    mime_type = f"image/{kind.lower()}"
    data = animated_image(kind)
    image = shown(data, mime_type)
    assert (image.animated, image.converted, base64.b64decode(image.data)) == (True, False, data)
    image = shown(animated_image(kind, (2_100, 20)), mime_type)
    assert (image.animated, image.converted, image.mime_type) == (True, True, "image/png")
    red, green, blue = picture_of(image).convert("RGB").getpixel((1_000, 10))
    assert red > 240
    assert max(green, blue) < 20


@pytest.mark.parametrize(
    ("mode", "pixel", "kept"),
    [
        ("RGBA", (200, 100, 50, 255), (200, 100, 50, 255)),
        ("RGBA", (0, 0, 0, 40), (0, 0, 0, 40)),
        ("LA", (0, 40), (0, 0, 0, 40)),
        ("I;16", 0x8000, (128, 128, 128, 255)),
        ("L", 77, (77, 77, 77, 255)),
        ("1", 255, (255, 255, 255, 255)),
    ],
)
def test_colours_and_transparency_are_kept(mode: str, pixel: object, kept: tuple[int, ...]) -> None:
    out = io.BytesIO()
    Image.new(mode, (2_100, 8), pixel).save(out, "PNG")
    assert picture_of(shown(out.getvalue(), "image/png")).convert("RGBA").getpixel((1_000, 4)) == kept


def test_a_transparent_colour_of_a_palette_is_kept() -> None:
    out = io.BytesIO()
    Image.new("RGB", (2_100, 8), "red").quantize(4).save(out, "PNG", transparency=0)
    assert picture_of(shown(out.getvalue(), "image/png")).convert("RGBA").getpixel((1_000, 4))[3] == 0


def test_colours_for_print_are_shown_as_those_of_a_screen() -> None:
    assert picture_of(shown(image_file("JPEG", (2_100, 8), mode="CMYK"), "image/jpeg")).mode == "RGB"


@pytest.mark.parametrize("mime_type", IMAGE_FORMATS)
def test_a_damaged_image_is_an_error_that_says_so(mime_type: str) -> None:
    data = image_file(IMAGE_FORMATS[mime_type], (200, 150), noise=True)
    for damaged in (data[: len(data) // 2], data[:30], data[:12] + bytes(range(256)) * 4):
        error = refusal(damaged, mime_type)
        assert error.code is ErrorCode.UNSUPPORTED
        assert "is damaged" in error.message


def test_a_wrong_checksum_in_a_png_is_damage() -> None:
    data = bytearray(image_file("PNG"))
    data[data.index(b"IHDR") + 18] ^= 1
    assert "is damaged" in refusal(bytes(data), "image/png").message


@pytest.mark.parametrize("side", [8_100, 12_000, 30_000, 2**31 - 1])
def test_an_image_that_would_fill_the_memory_is_not_decoded(side: int) -> None:
    error = refusal(png_bomb(side, side), "image/png")
    assert error.code is ErrorCode.UNSUPPORTED
    assert "pixels" in error.message or "is damaged" in error.message
