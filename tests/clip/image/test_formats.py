"""Formats of the extra `formats`, and AVIF: read here and in a process of their own, refused in words
where their library is missing.
"""

from __future__ import annotations

import io
import random
import struct
from functools import cache

import numpy as np
import pillow_heif
import pypdfium2
import pytest
from PIL import Image

from mtmd.base.errors import ImageError
from mtmd.clip.image import formats
from mtmd.clip.image.decode import ImageLimits, open_picture, picture_size
from mtmd.clip.image.isolated import open_isolated
from mtmd.clip.image.signatures import picture_format

SIZE = (96, 64)


def half_red() -> Image.Image:
    image = Image.new("RGB", SIZE, (20, 60, 200))
    image.paste((220, 30, 20), (0, 0, 48, 64))
    return image


@cache
def heic(orientation: int = 1) -> bytes:
    file, exif = io.BytesIO(), Image.Exif()
    exif[0x0112] = orientation
    pillow_heif.from_pillow(half_red()).save(file, quality=95, exif=exif.tobytes())
    return file.getvalue()


@cache
def avif(orientation: int = 1) -> bytes:
    file, exif = io.BytesIO(), Image.Exif()
    exif[0x0112] = orientation
    half_red().save(file, "AVIF", quality=95, speed=10, exif=exif)
    return file.getvalue()


@cache
def pdf(*sizes: tuple[float, float]) -> bytes:
    document = pypdfium2.PdfDocument.new()
    for width, height in sizes or ((612, 792), (300, 100)):
        document.new_page(width, height)
    file = io.BytesIO()
    document.save(file)
    return file.getvalue()


@pytest.mark.parametrize("made", [heic, avif])
@pytest.mark.parametrize("read", [open_picture, open_isolated])
def test_telephones_pictures_are_read_upright(made, read):
    plain = read(made())
    assert plain.size == SIZE == picture_size(made()) and plain.pixels.shape == (64, 96, 3)
    assert plain.pixels[32, 10, 0] > 180 and plain.pixels[32, 80, 2] > 160
    turned = read(made(6))
    assert turned.size == SIZE[::-1] and picture_size(made(6)) in (SIZE, SIZE[::-1])
    assert turned.pixels[10, 32, 0] > 180


@pytest.mark.parametrize("read", [open_picture, open_isolated])
def test_each_page_of_a_pdf_is_a_picture(read):
    first, second = read(pdf()), read(pdf(), page=1)
    assert first.size == (1583, 2048) and first.notes == ("page 1 of 2",) and first.pages == 2
    assert second.size == (1250, 417) and second.notes == ("page 2 of 2",)
    assert (first.pixels == 255).all() and read(pdf((72, 72))).notes == ()
    with pytest.raises(ImageError, match="a PDF of 2 pages, expected one with a page 3"):
        read(pdf(), page=2)
    with pytest.raises(ImageError, match="pixels, expected at most 1,000"):
        read(pdf(), ImageLimits(max_pixels=1000))


@pytest.mark.parametrize(
    ("kind", "data", "words"),
    [
        ("HEIF", heic, "x: found a HEIC picture; pillow-heif reads it: "),
        ("PDF", pdf, "x: found a PDF; pypdfium2 reads it: "),
    ],
)
def test_who_lacks_a_library_is_told_the_command(monkeypatch, kind, data, words):
    monkeypatch.setattr(formats, "find_spec", lambda _: None)
    with pytest.raises(ImageError) as refusal:
        open_picture(data(), name="x")
    text = str(refusal.value)
    assert picture_format(data()) == kind and text.startswith(words)
    assert (
        "pip install" in text
        and "[formats]'" in text
        and text.endswith("as PNG or JPEG") | text.endswith("to PNG or JPEG first")
    )


def test_brands_that_name_no_codec_are_told_by_the_others():
    def of(brand: bytes, *others: bytes) -> str | None:
        body = brand + b"\0\0\0\0" + b"".join(others)
        return picture_format(struct.pack(">I", 8 + len(body)) + b"ftyp" + body)

    assert of(b"mif1", b"mif1", b"avif") == "AVIF" and of(b"mif1", b"heic") == "HEIF"
    assert of(b"isom", b"avif") is None


@pytest.mark.parametrize("made", [heic, avif, pdf])
def test_damaged_files_are_refused_in_one_line(made):
    chance, data = random.Random(3), made()
    cases = [data[: chance.randrange(16, len(data))] for _ in range(12)]
    for _ in range(40):
        broken = bytearray(data)
        for _ in range(chance.randint(1, 6)):
            broken[chance.randrange(12, min(len(broken), 600))] = chance.randrange(256)
        cases.append(bytes(broken))
    for case in cases:
        try:
            picture = open_isolated(case, ImageLimits(max_pixels=5_000_000))
            assert isinstance(picture.pixels, np.ndarray)
        except ImageError as error:
            assert "\n" not in str(error) and str(error).startswith("image: found")


def test_a_header_without_end_is_refused_at_once():
    def box(kind: bytes, body: bytes) -> bytes:
        return struct.pack(">I", 8 + len(body)) + kind + body

    many = box(b"meta", b"\0\0\0\0" + box(b"free", b"") * 5000)
    with pytest.raises(ImageError, match=r"more than 4,096 boxes"):
        picture_size(box(b"ftyp", b"heic\0\0\0\0mif1heic") + many)
