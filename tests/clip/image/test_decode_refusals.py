"""Pictures that do not work: each is one ImageError of one line that says what was found, and
nothing else ever comes out.
"""

from __future__ import annotations

import io
import struct
import zlib

import numpy as np
import pytest
from PIL import Image, ImageFile, TiffImagePlugin, WebPImagePlugin

from mtmd.base.errors import ImageError
from mtmd.clip.image.decode import ImageLimits, open_picture

SAMPLES = [
    ("JPEG", "RGB", {}), ("JPEG", "CMYK", {"progressive": True}), ("PNG", "RGB", {}), ("PNG", "P", {}), ("PNG", "I;16", {}),
    ("GIF", "P", {}), ("WEBP", "RGB", {}), ("WEBP", "RGBA", {"lossless": True}), ("BMP", "RGB", {}), ("BMP", "P", {}), ("TIFF", "RGB", {}),
    ("TIFF", "L", {"compression": "tiff_lzw"}), ("TIFF", "RGB", {"compression": "jpeg"}), ("TIFF", "1", {"compression": "group4"}),
    ("TIFF", "RGB", {"compression": "packbits", "big_tiff": True}),
]  # fmt: skip
SAMPLE_IDS = [
    f"{format_}-{mode}-{options.get('compression', 'plain')}" for format_, mode, options in SAMPLES
]


def sample(format_: str, mode: str, options: dict) -> bytes:
    pixels = np.random.default_rng(3).integers(0, 256, (9, 11, 4), dtype=np.uint8)
    image = Image.fromarray(pixels)
    image = (
        Image.fromarray(pixels[..., 0].astype(np.uint16) * 256)
        if mode == "I;16"
        else image.convert("RGB").convert(mode)
    )
    exif = Image.Exif()
    exif[0x0112] = 6
    buffer = io.BytesIO()
    image.save(buffer, format_, exif=exif, **options) if format_ in (
        "JPEG",
        "PNG",
        "WEBP",
    ) else image.save(buffer, format_, **options)
    return buffer.getvalue()


def refusal(source, *args, **kwargs) -> str:
    with pytest.raises(ImageError) as caught:
        open_picture(source, *args, **kwargs)
    message = str(caught.value)
    assert_fit_for_users(message)
    return message


def assert_fit_for_users(message: str) -> None:
    assert message.isprintable()
    assert "found" in message
    assert "expected" in message or "more pixels" in message or "too large" in message
    for leak in ("0x", "BytesIO", "PIL.", "Error", "/", "chunk", "decoder", "buffer"):
        assert leak not in message


def tga(kind: int, depth: int, colours: int = 0) -> bytes:
    """The beginning of a TGA of 3 x 2 pixels, which has no signature."""
    colour_map = struct.pack("<HHB", 0, colours, 24 if colours else 0)
    size = struct.pack("<HHHHBB", 0, 0, 3, 2, depth, 0)
    return bytes([0, bool(colours), kind]) + colour_map + size + bytes(64)


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"  <!DOCTYPE html><html>", "an HTML page"), (b"\xef\xbb\xbf<html lang=en>", "an HTML page"),
        (b"<?xml version='1.0'?>\n<svg "
         b"xmlns=''>", "an SVG drawing"), (b"<svg width='3'>", "an SVG drawing"),
        (b"<?xml version='1.0'?><a/>", "an XML or HTML document"),
        (b"\0\0\0\x18ftypisom\0\0\0\0", "an MP4 or QuickTime video"),
        (b"RIFF\x24\0\0\0WAVEfmt ", "an AVI video or WAV sound"), (b"8BPS\0\1", "a Photoshop document"),
        (b"%!PS-Adobe-3.0 EPSF", "a PostScript"),
        (b"SIMPLE  =   T", "a FITS picture"), (b"DDS \x7c\0\0\0", "a DDS texture"), (b"P6\n2 2\n255\n", "a PNM picture"),
        (b"\0\0\1\0\1\0", "a Windows icon"),
        (b"\0\0\2\0\1\0 ", "a Windows cursor"), (tga(2, 24), "a TGA picture"), (tga(10, 32), "a TGA picture"),
        (tga(3, 8), "a TGA picture"), (tga(1, 8, colours=256), "a TGA picture"),
        (b"PK\3\4\x14\0", "a ZIP archive"), (b'{"a": 1}', "JSON or other text"),
        (b"Once upon a time", "plain text"),
        ("Il était\nun navire\n".encode(), "plain text"), (b"BMW is a make of car, not a picture", "plain text"),
        (b"version https://git-lfs.github.com/spec/v1\noid", "a Git LFS pointer"), (b"\0" * 99, "nothing but zero bytes"),
        (b"data:image/png;base64,AAAA", "a data URL"), (b"\x07\x91\xfe\x00junk", "data of an unknown type"),
        (b"GGUF\3\0\0\0", "a GGUF model"),
    ],
)  # fmt: skip
def test_what_is_no_picture_is_named(data, words):
    message = open_refused(data)
    assert message.startswith(f"gift: found {words}")
    assert "expected a JPEG, PNG, WebP, AVIF, HEIC, GIF, BMP or TIFF picture; " in message


def open_refused(data: bytes) -> str:
    with pytest.raises(ImageError) as caught:
        open_picture(data, name="gift")
    return str(caught.value)


def test_empty_and_too_large():
    assert (
        refusal(b"")
        == "image: found 0 bytes, expected a JPEG, PNG, WebP, AVIF, HEIC, GIF, BMP or TIFF picture; fetch or "
        "copy the file again"
    )
    assert "found 101 bytes, expected at most 100" in refusal(
        b"x" * 101, ImageLimits(max_bytes=100)
    )
    assert "found 104 bytes" in refusal(
        memoryview(np.zeros((13, 2), np.int32)), ImageLimits(max_bytes=100)
    )


def test_names_cannot_break_the_line():
    assert refusal(b"", name="a\nb\x1b[31m").startswith("a?b?[31m: found")


def tiff(entries: dict[int, int]) -> bytes:
    """A TIFF of one directory, which ends at byte 14 + 12 * entries; every tag one 32-bit
    number.
    """
    tags = b"".join(struct.pack("<HHII", tag, 4, 1, value) for tag, value in entries.items())
    return b"II\x2a\0\x08\0\0\0" + struct.pack("<H", len(entries)) + tags + bytes(4)


def huge_headers(side: int) -> dict[str, bytes]:
    ihdr = b"IHDR" + struct.pack(">IIBBBBB", side, side, 8, 2, 0, 0, 0)
    idat = b"IDAT" + zlib.compress(b"")
    chunks = b"".join(
        struct.pack(">I", len(chunk) - 4) + chunk + struct.pack(">I", zlib.crc32(chunk))
        for chunk in (ihdr, idat)
    )
    vp8x = b"VP8X" + struct.pack("<I", 10) + b"\0\0\0\0" + (side - 1).to_bytes(3, "little") * 2
    vp8l = (
        b"VP8L"
        + struct.pack("<IBI", 20, 0x2F, (min(side, 1 << 14) - 1) * (1 + (1 << 14)))
        + bytes(20)
    )
    frame = b"," + struct.pack("<HHHHB", 0, 0, side, side, 0)
    return {
        "PNG": b"\x89PNG\r\n\x1a\n" + chunks,
        "JPEG": b"\xff\xd8\xff\xc0\0\x11\x08"
        + struct.pack(">HH", side, side)
        + b"\3\1\x22\0\2\x11\1\3\x11\1\xff\xda\0\x0c"
        + bytes(10),
        "GIF": b"GIF89a" + struct.pack("<HHBBB", side, side, 0, 0, 0) + frame + b"\x08\0;",
        "GIF with a small screen": b"GIF89a"
        + struct.pack("<HHBBB", 1, 1, 0, 0, 0)
        + frame
        + b"\x08\0;",
        "BMP": b"BM"
        + struct.pack("<IHHI", 54, 0, 0, 54)
        + struct.pack("<IiiHHIIiiII", 40, side, side, 1, 24, 0, 0, 0, 0, 0, 0),
        "WebP": b"RIFF" + struct.pack("<I", len(vp8x) + 4) + b"WEBP" + vp8x,
        "WebP lossless": b"RIFF" + struct.pack("<I", len(vp8l) + 4) + b"WEBP" + vp8l,
        "TIFF": tiff({256: side, 257: side, 262: 1, 273: 8, 279: 4}),
    }


@pytest.mark.parametrize("kind", huge_headers(2))
@pytest.mark.parametrize(
    "side", [30_000, 12_000]
)  # beyond Pillow's own error, and between its warning and its error
def test_a_huge_header_is_refused_before_decoding(kind, side, monkeypatch):
    def decode(*_):
        raise AssertionError("decoded, or made room to decode")

    for reader in (
        ImageFile.ImageFile,
        TiffImagePlugin.TiffImageFile,
        WebPImagePlugin.WebPImageFile,
    ):
        monkeypatch.setattr(reader, "load", decode)
    monkeypatch.setattr(
        WebPImagePlugin.WebPImageFile, "_open", decode
    )  # this one makes room as soon as it opens
    message = refusal(huge_headers(side)[kind])
    assert (
        "more pixels than Pillow allows" in message
        or ", expected at most 128,000,000 in all" in message
    )


def test_a_huge_tile_in_a_small_tiff_is_refused():
    assert "60,000 x 60,000 pixels" in refusal(
        tiff({256: 1, 257: 1, 259: 5, 262: 1, 322: 60_000, 323: 60_000, 324: 8, 325: 4})
    )


def test_a_compressed_tiff_without_its_last_strip_is_truncated(capfd):
    whole = (
        tiff({256: 4, 257: 1, 258: 8, 259: 32773, 262: 1, 273: 110, 278: 1, 279: 5}) + b"\x03abcd"
    )  # PackBits: four as they are
    assert open_picture(whole).pixels[0, :, 0].tobytes() == b"abcd"
    assert "found a truncated TIFF" in refusal(whole[:-1])
    assert "found a truncated TIFF" in refusal(whole[:-5])
    assert capfd.readouterr().err == ""


@pytest.mark.parametrize("tag", [(254, 1), (50706, 1)])
def test_a_tiff_that_opens_with_a_thumbnail_is_refused(tag):
    buffer = io.BytesIO()
    Image.new("L", (4, 4)).save(buffer, "TIFF", tiffinfo=dict([tag]))
    assert "found a camera raw file or a TIFF that opens with a thumbnail" in refusal(
        buffer.getvalue()
    )


@pytest.mark.parametrize(("format_", "mode", "options"), SAMPLES, ids=SAMPLE_IDS)
def test_cut_anywhere_it_is_refused_or_whole(format_, mode, options, capfd):
    """Every shorter copy either lacks nothing of the pixels (some formats end in what is not
    pixels) or is called truncated.
    """
    data = sample(format_, mode, options)
    whole, lacking_nothing = open_picture(data).sha256, 0
    for length in range(1, len(data)):
        try:
            assert open_picture(data[:length]).sha256 == whole
            lacking_nothing += 1
        except ImageError as error:
            assert_fit_for_users(str(error))
            chance_ending = format_ == "GIF" and data[:length].endswith(b";")
            assert length < 18 or chance_ending or "found a truncated" in str(error)
    assert lacking_nothing <= 32
    assert capfd.readouterr().err == ""


@pytest.mark.parametrize(("format_", "mode", "options"), SAMPLES, ids=SAMPLE_IDS)
def test_mutated_files_give_pixels_or_one_error(format_, mode, options):
    data, random = sample(format_, mode, options), np.random.default_rng(11)
    refused = 0
    for _ in range(300):
        mutant = bytearray(data)
        for _ in range(random.integers(1, 4)):
            position = int(
                random.integers(0, min(len(data), 200) if random.random() < 0.5 else len(data))
            )
            kind = random.integers(0, 4)
            if kind == 0:
                mutant[position : position + 1] = random.bytes(1)
            elif kind == 1:
                mutant[position : position + 4] = (b"\xff" * 4, b"\0" * 4, b"\x7f\xff\xff\xff")[
                    int(random.integers(0, 3))
                ]
            elif kind == 2:
                del mutant[position : position + int(random.integers(1, 20))]
            else:
                mutant[position:position] = mutant[
                    position : position + int(random.integers(1, 20))
                ]
        try:
            picture = open_picture(bytes(mutant), ImageLimits(max_pixels=1_000_000))
            assert picture.pixels.shape == (picture.size[1], picture.size[0], 3)
        except ImageError as error:
            refused += 1
            assert_fit_for_users(str(error))
    assert 10 < refused < 300


@pytest.mark.parametrize(
    ("array", "words"),
    [
        (np.zeros((4, 4, 3), np.int64), "an array of int64 and shape [4, 4, 3], expected one picture as "
                              "uint8, or as floats from 0 to 1"),
        (np.full((2, 2), 255.0), "with values from 255 to 255, expected 0 to 1; divide it by 255"),
        (np.linspace(-2, 2, 12).reshape(2, 2, 3), "from -2 to 2, expected 0 to 1; undo its normalisation"),
        (np.full((2, 2), np.nan), "from nan to nan, expected 0 to 1; replace what is not a number"),
        (np.zeros((4, 4), bool), "of bool"), (np.zeros((4, 4), np.int8), "of int8"), (np.zeros((4, 4), np.uint16), "of uint16"),
        (np.array([["a"]], object), "of object"),
        (np.zeros(4, np.uint8), "shape [4]"), (np.zeros((), np.uint8), "shape []"),
        (np.zeros((1, 4, 4, 3), np.uint8), "shape [1, 4, 4, 3]"),
        (np.zeros((4, 4, 2), np.uint8), "shape [4, 4, 2]"), (np.zeros((0, 4, 3), np.uint8), "shape [0, 4, 3]"),
        (np.zeros((3, 8, 9), np.uint8), "move the channels last"),
        (np.full((4, 4, 3), 200, np.int64), "x.astype('uint8')"),
        (np.full((4, 4, 3), 2000, np.uint16), "divide them by 65535"),
        (np.ones((4, 4), bool), "x.astype('float32')"),
        (np.zeros((2, 4, 4, 3), np.uint8), "list(x)"),
    ],
)  # fmt: skip
def test_arrays_of_another_kind_are_refused(array, words):
    assert words in refusal(array)


def test_limits_hold_for_arrays_and_pillow_images():
    limits = ImageLimits(max_pixels=11)
    for source in (np.zeros((3, 4, 3), np.uint8), Image.new("L", (4, 3))):
        assert "found 4 x 3 pixels, expected at most 11 in all" in refusal(source, limits)
    assert "found 0 x 3 pixels, expected at least 1 x 1" in refusal(Image.new("RGB", (0, 3)))


def test_a_closed_pillow_image_and_a_stranger_are_refused():
    image = Image.new("RGB", (2, 2))
    image.close()
    assert "found a Pillow image that is closed" in refusal(image)
    data = io.BytesIO()
    Image.new("RGB", (2, 2)).save(data, "PNG")
    with Image.open(io.BytesIO(data.getvalue())) as within:
        pass
    (closed := Image.open(io.BytesIO(data.getvalue()))).close()
    of_closed_file = Image.open(data)
    data.close()
    for image in (within, closed, of_closed_file):
        assert "is closed, expected an open one" in refusal(image)
    assert "found an object of type list" in refusal([1, 2])
