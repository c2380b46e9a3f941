"""Pictures that work: every format and mode, what is noted, and that nothing of the caller's is
changed.
"""

from __future__ import annotations

import hashlib
import io
import struct
import zlib

import numpy as np
import pytest
from PIL import Image, ImageFile

from mtmd.base.errors import ImageError, OptionError
from mtmd.clip.image.decode import ImageLimits, open_picture
from mtmd.clip.image.resize import resize

UPRIGHT = np.random.default_rng(7).integers(0, 256, (5, 3, 3), dtype=np.uint8)
ON_WHITE = "transparent parts laid on white"
# What each EXIF orientation stores of an upright picture, in terms of numpy.
STORED = {
    1: lambda a: a,
    2: lambda a: a[:, ::-1],
    3: lambda a: a[::-1, ::-1],
    4: lambda a: a[::-1],
    5: lambda a: a.transpose(1, 0, 2),
    6: lambda a: np.rot90(a),
    7: lambda a: a[::-1, ::-1].transpose(1, 0, 2),
    8: lambda a: np.rot90(a, -1),
}


def encode(image: Image.Image, format_: str, **options) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, format_, **options)
    return buffer.getvalue()


def noise(height: int, width: int, seed: int = 0) -> Image.Image:
    return Image.fromarray(
        np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)
    )


def png(
    width: int, height: int, depth: int, colour: int, rows: bytes, *chunks: tuple[bytes, bytes]
) -> bytes:
    """A PNG by hand; `rows` with the filter byte before each row."""
    header = (b"IHDR", struct.pack(">IIBBBBB", width, height, depth, colour, 0, 0, 0))
    body = b""
    for tag, data in (header, *chunks, (b"IDAT", zlib.compress(rows)), (b"IEND", b"")):
        body += (
            struct.pack(">I", len(data)) + tag + data + struct.pack(">I", zlib.crc32(tag + data))
        )
    return b"\x89PNG\r\n\x1a\n" + body


def tiff(
    order: str,
    width: int,
    height: int,
    bits: int,
    data: bytes,
    *,
    photometric=1,
    sample_format=1,
    samples=1,
) -> bytes:
    """An uncompressed TIFF by hand, in byte order '<' or '>': what Pillow cannot write itself."""
    tags = {
        256: width,
        257: height,
        259: 1,
        262: photometric,
        277: samples,
        278: height,
        279: len(data),
    }
    count = len(tags) + 3
    lists_at = 8 + 2 + 12 * count + 4
    lists = struct.pack(order + "H" * samples, *[bits] * samples).ljust(8, b"\0")
    entries = {tag: struct.pack(order + "HHII", tag, 4, 1, value) for tag, value in tags.items()}
    entries[273] = struct.pack(order + "HHII", 273, 4, 1, lists_at + 8)
    inline = (
        struct.pack(order + "HH", bits, 0) if samples == 1 else struct.pack(order + "I", lists_at)
    )
    entries[258] = struct.pack(order + "HHI", 258, 3, samples) + inline
    entries[339] = struct.pack(order + "HHIHH", 339, 3, 1, sample_format, 0)
    magic = b"II\x2a\0" if order == "<" else b"MM\0\x2a"
    return (
        magic
        + struct.pack(order + "IH", 8, count)
        + b"".join(entries[tag] for tag in sorted(entries))
        + bytes(4)
        + lists
        + data
    )


@pytest.mark.parametrize(
    ("format_", "options"),
    [
        ("PNG", {}),
        ("WEBP", {"lossless": True}),
        ("BMP", {}),
        ("TIFF", {}),
        ("TIFF", {"compression": "tiff_lzw"}),
        ("TIFF", {"compression": "tiff_adobe_deflate"}),
        ("TIFF", {"compression": "packbits"}),
        ("TIFF", {"big_tiff": True}),
    ],
)
def test_lossless_formats_give_the_very_pixels(format_, options):
    image = noise(13, 17)
    for source in (data := encode(image, format_, **options), bytearray(data), memoryview(data)):
        picture = open_picture(source)
        assert np.array_equal(picture.pixels, np.asarray(image))
        assert (picture.size, picture.notes) == ((17, 13), ())
        assert picture.pixels.dtype == np.uint8
        assert picture.pixels.flags.writeable


@pytest.mark.parametrize("format_", ["JPEG", "WEBP", "GIF"])
def test_lossy_formats_give_what_pillow_gives(format_):
    data = encode(noise(13, 17), format_)
    assert np.array_equal(
        open_picture(data).pixels, np.asarray(Image.open(io.BytesIO(data)).convert("RGB"))
    )


@pytest.mark.parametrize("format_", ["JPEG", "PNG", "TIFF", "WEBP"])
@pytest.mark.parametrize("orientation", range(1, 9))
def test_exif_orientation_is_applied_and_noted(format_, orientation):
    stored = Image.fromarray(
        np.ascontiguousarray(STORED[orientation](np.repeat(np.repeat(UPRIGHT, 16, 0), 16, 1)))
    )
    exif = Image.Exif()
    exif[0x0112] = orientation
    options = {"JPEG": {"quality": 100, "subsampling": 0}, "WEBP": {"lossless": True}}.get(
        format_, {}
    )
    picture = open_picture(encode(stored, format_, exif=exif, **options))
    assert picture.size == (48, 80)
    assert np.abs(picture.pixels[8::16, 8::16].astype(int) - UPRIGHT).max() <= 3
    assert picture.notes == (
        () if orientation == 1 else (f"rotated upright (EXIF orientation {orientation})",)
    )


def test_compressed_tiff_is_turned_once():
    exif = Image.Exif()
    exif[0x0112] = 6
    picture = open_picture(
        encode(
            Image.fromarray(np.ascontiguousarray(STORED[6](UPRIGHT))),
            "TIFF",
            exif=exif,
            compression="tiff_lzw",
        )
    )
    assert np.array_equal(picture.pixels, UPRIGHT)
    assert picture.notes == ("rotated upright (EXIF orientation 6)",)


@pytest.mark.parametrize(
    "exif",
    [
        b"", b"garbage", b"II\x2a\0\xff\xff\xff\x7f", b"MM\0\x2a\0\0\0\x08\xff\xff" + bytes(40),
        b"II\x2a\0\x08\0\0\0\x01\0\x12\x01\x02\0\x04\0\0\0six\0\0\0\0\0",  # the orientation as text
        b"II\x2a\0\x08\0\0\0\x01\0\x12\x01\x03\0\x01\0\0\0\x63\0\0\0\0\0\0\0",  # and as 99
        # and beyond the end
        b"II\x2a\0\x08\0\0\0\x01\0\x12\x01\x03\0\x99\0\0\0\xff\xff\xff\x7f\0\0\0\0",
    ],
)  # fmt: skip
def test_broken_exif_does_not_spoil_the_picture(exif):
    exif = b"Exif\0\0" + exif
    for format_ in ("JPEG", "PNG", "WEBP"):
        image = noise(8, 9)
        plain = encode(image, format_)
        picture = open_picture(encode(image, format_, exif=exif))
        assert picture.notes == ()
        assert picture.sha256 == open_picture(plain).sha256


def with_alpha(grey: Image.Image, alpha: Image.Image, mode: str) -> Image.Image:
    """`grey` (L) under `alpha` (L) as an image of `mode`, by ways that lose nothing."""
    image = grey.convert({"LA": "LA", "La": "LA", "PA": "P"}.get(mode, "RGBA"))
    if mode == "PA":
        image = image.convert("PA")
    image.putalpha(alpha)
    return image.convert(mode)


@pytest.mark.parametrize("mode", ["RGBA", "LA", "PA", "RGBa", "La"])
def test_alpha_is_laid_on_white(mode):
    alpha = Image.new("L", (2, 1), 255)
    alpha.putpixel((1, 0), 51)
    picture = open_picture(with_alpha(Image.new("L", (2, 1)), alpha, mode))
    assert np.abs(picture.pixels.astype(int)[0, :, 0] - [0, 204]).max() <= 1
    assert picture.notes == (ON_WHITE,)


@pytest.mark.parametrize("mode", ["RGBA", "LA", "PA", "RGBa", "La"])
def test_opaque_alpha_is_not_noted(mode):
    grey = noise(5, 7).convert("L")
    picture = open_picture(with_alpha(grey, Image.new("L", grey.size, 255), mode))
    assert picture.notes == ()
    assert np.array_equal(picture.pixels, np.asarray(grey.convert("RGB")))


def test_palette_transparency_in_every_shape():
    red, green = [255, 0, 0], [0, 255, 0]
    palette = (b"PLTE", bytes(red + green))
    one = open_picture(png(2, 1, 8, 3, b"\0\0\1", palette, (b"tRNS", b"\0")))
    assert (one.pixels[0].tolist(), one.notes) == ([[255, 255, 255], green], (ON_WHITE,))
    half = open_picture(png(2, 1, 8, 3, b"\0\0\1", palette, (b"tRNS", b"\x80\xff")))
    assert (half.pixels[0].tolist(), half.notes) == ([[255, 127, 127], green], (ON_WHITE,))
    unused = open_picture(png(2, 1, 8, 3, b"\0\1\1", palette, (b"tRNS", b"\0")))
    assert (unused.pixels[0].tolist(), unused.notes) == ([green, green], ())
    opaque = open_picture(png(2, 1, 8, 3, b"\0\0\1", palette))
    assert (opaque.pixels[0].tolist(), opaque.notes) == ([red, green], ())


@pytest.mark.parametrize(
    ("depth", "row", "key", "expected"),
    [(1, b"\0\x40", 1, [0, 255]), (2, b"\0\x1b", 1, [0, 255, 170, 255]), (4, b"\0\x12", 2, [17, 255]), (8, b"\0\1\2", 2, [1, 255]),
     (16, b"\0\1\2\3\4", 0x0102, [255, 3])],
)  # fmt: skip
def test_transparent_grey_of_every_depth(depth, row, key, expected):
    picture = open_picture(png(len(expected), 1, depth, 0, row, (b"tRNS", key.to_bytes(2, "big"))))
    assert picture.pixels[0, :, 0].tolist() == expected
    assert ON_WHITE in picture.notes


def test_grey_of_16_bits_is_scaled_not_clipped():
    values = np.array([[0, 128, 129, 257, 32768, 65535]], np.uint16)
    expected = [0, 0, 1, 1, 128, 255]
    by_hand = [png(6, 1, 16, 0, b"\0" + values.astype(">u2").tobytes()), tiff("<", 6, 1, 16, values.astype("<u2").tobytes()),
               tiff(">", 6, 1, 16, values.astype(">u2").tobytes())]  # fmt: skip
    pgm = Image.open(io.BytesIO(b"P5 6 1 65535\n" + values.astype(">u2").tobytes()))
    for source in (*by_hand, pgm, Image.fromarray(values)):
        picture = open_picture(source)
        assert picture.pixels[0].tolist() == [[value] * 3 for value in expected]
        assert picture.notes == ("16-bit grey scaled to 8 bits",)


@pytest.mark.parametrize(("convert", "expected"), [("L", 200), ("uint16", 1)])
def test_grey_of_32_bits_says_nothing_of_its_white(convert, expected):
    """Values from 0 to 255 may be a picture of 8 bits, or a dark one of 16."""
    image = Image.fromarray(np.array([[0, 200]], np.uint8)).convert("I")
    with pytest.raises(ImageError, match=r"32-bit grey .* from 0 to 200, .*convert\('L'\).*uint16"):
        open_picture(image)
    reported = image.convert("L") if convert == "L" else Image.fromarray(np.uint16(image))
    assert open_picture(reported).pixels[0, :, 0].tolist() == [0, expected]


@pytest.mark.parametrize("depth", [8, 16])
def test_grey_files_are_read_by_their_own_depth_also_as_opened_images(depth):
    values = np.array([[0, 100, 200]], np.uint8 if depth == 8 else np.uint16)
    expected = [0, 100, 200] if depth == 8 else [0, 0, 1]
    for format_ in ("PNG", "TIFF"):
        data = encode(Image.fromarray(values), format_)
        for source in (data, Image.open(io.BytesIO(data)), Image.open(io.BytesIO(data)).copy()):
            assert open_picture(source).pixels[0, :, 0].tolist() == expected


def test_tiff_depths_that_pillow_leaves_to_us():
    white_is_zero = open_picture(tiff("<", 2, 1, 16, b"\0\0\xff\xff", photometric=0))
    assert white_is_zero.pixels[0, :, 0].tolist() == [255, 0]
    twelve = open_picture(tiff("<", 2, 1, 12, b"\xff\xf8\x00"))
    assert (twelve.pixels[0, :, 0].tolist(), twelve.notes) == (
        [255, 128],
        ("12-bit grey scaled to 8 bits",),
    )


@pytest.mark.parametrize(
    "source",
    [tiff("<", 1, 1, 32, struct.pack("<f", 0.5), sample_format=3), tiff(">", 1, 1, 32, struct.pack(">f", 0.5), sample_format=3),
     tiff("<", 1, 1, 16, struct.pack("<h", 5), sample_format=2), tiff("<", 1, 1, 32, struct.pack("<I", 5)), Image.new("F", (2, 2)),
     tiff("<", 1, 1, 32, struct.pack("<i", 5), sample_format=2), Image.new("I", (2, 2), 200), Image.new("I", (2, 2), 40_000),
     Image.new("I", (2, 2), 65536), Image.new("I", (2, 2), -1), Image.new("L", (2, 2), 200).convert("I")],
)  # fmt: skip
def test_pixels_of_unknown_range_are_refused(source):
    with pytest.raises(ImageError, match=r"expected 8 or 16 bits.*convert it"):
        open_picture(source)


def test_cmyk_jpeg_has_its_colours_and_says_so():
    picture = open_picture(encode(Image.new("CMYK", (16, 16), (0, 255, 255, 0)), "JPEG"))
    assert np.abs(picture.pixels.astype(int) - [255, 0, 0]).max() <= 2
    assert picture.notes == ("converted from CMYK to RGB without a colour profile",)


def test_lab_and_ycbcr():
    lab = open_picture(tiff("<", 1, 1, 8, bytes([136, 80, 67]), photometric=8, samples=3))
    assert np.abs(lab.pixels[0, 0].astype(int) - [255, 0, 0]).max() <= 15
    grey = open_picture(Image.new("YCbCr", (1, 1), (90, 128, 128)))
    assert grey.pixels[0, 0].tolist() == [90, 90, 90]


@pytest.mark.parametrize(
    ("format_", "note"), [("GIF", "frame"), ("WEBP", "frame"), ("PNG", "frame"), ("TIFF", "page")]
)
def test_of_several_frames_the_first_is_read(format_, note):
    first, second = Image.new("RGB", (8, 6), "red"), Image.new("RGB", (8, 6), "blue")
    picture = open_picture(encode(first, format_, save_all=True, append_images=[second, first]))
    assert np.abs(picture.pixels.astype(int) - [255, 0, 0]).max() <= 2
    assert picture.notes == (f"only the first {note} was read",)


@pytest.mark.parametrize("size", [(1, 1), (1, 10_000), (10_000, 1), (4000, 3000)])
def test_sizes_at_the_edges(size):
    image = Image.linear_gradient("L").convert("RGB").resize(size)
    picture = open_picture(encode(image, "PNG", compress_level=1))
    assert picture.size == size
    assert np.array_equal(picture.pixels, np.asarray(image))
    assert resize(picture.pixels, 7, 5, "bilinear").shape == (5, 7, 3)
    assert open_picture(encode(image, "JPEG")).size == size


@pytest.mark.parametrize(
    "mode",
    [
        "1",
        "L",
        "P",
        "RGB",
        "RGBA",
        "CMYK",
        "YCbCr",
        "LAB",
        "HSV",
        "LA",
        "PA",
        "I;16",
        "I;16B",
        "RGBX",
    ],
)
def test_pillow_images_of_any_mode_are_left_as_they_were(mode):
    image = Image.new(mode, (3, 2))
    before = image.tobytes(), dict(image.info), image.mode
    assert open_picture(image).size == (3, 2)
    assert (image.tobytes(), dict(image.info), image.mode) == before


def test_a_lazily_opened_pillow_image_stays_open():
    exif = Image.Exif()
    exif[0x0112] = 8
    with Image.open(io.BytesIO(encode(noise(4, 6), "PNG", exif=exif))) as image:
        picture = open_picture(image)
        assert (picture.size, image.size) == ((4, 6), (6, 4))
        assert open_picture(image).sha256 == picture.sha256


def test_a_pillow_animation_is_taken_at_its_current_frame():
    data = encode(
        Image.new("RGB", (4, 3), "red"),
        "GIF",
        save_all=True,
        append_images=[Image.new("RGB", (4, 3), "blue")],
    )
    with Image.open(io.BytesIO(data)) as image:
        image.seek(1)
        picture = open_picture(image)
        assert image.tell() == 1
    assert (picture.pixels[0, 0].tolist(), picture.notes) == ([0, 0, 255], ())


def test_arrays_are_copied():
    array = np.random.default_rng(1).integers(0, 256, (4, 6, 3), dtype=np.uint8)
    picture = open_picture(array)
    digest = hashlib.sha256(b"6x4 " + array.tobytes()).hexdigest()
    array[:] = 0
    assert picture.sha256 == digest
    grey = np.arange(6, dtype=np.uint8).reshape(2, 3)
    for source in (grey, grey[:, :, None], grey[::-1, ::-1][::-1, ::-1]):
        assert np.array_equal(open_picture(source).pixels, np.repeat(grey[:, :, None], 3, 2))
    clear = np.zeros((2, 2, 4), np.uint8)
    assert (open_picture(clear).pixels.min(), open_picture(clear).notes) == (255, (ON_WHITE,))


def test_digest_tells_sizes_apart():
    tall, wide = np.zeros((6, 4, 3), np.uint8), np.zeros((4, 6, 3), np.uint8)
    assert open_picture(tall).sha256 != open_picture(wide).sha256
    assert open_picture(tall).sha256 == open_picture(tall.copy()).sha256


def test_resize_knows_its_filters_and_keeps_what_fits():
    pixels = open_picture(noise(9, 11)).pixels
    assert resize(pixels, 11, 9, "bicubic") is pixels
    results = {
        name: resize(pixels, 5, 4, name).tobytes()
        for name in ("nearest", "box", "bilinear", "hamming", "bicubic", "lanczos")
    }
    assert len(set(results.values())) == 6
    with pytest.raises(OptionError, match=r"'cubic', expected one of bicubic, bilinear, box"):
        resize(pixels, 5, 4, "cubic")
    with pytest.raises(OptionError, match="0 x 4"):
        resize(pixels, 0, 4, "box")


def test_pixels_above_pillows_own_warning_are_fine(monkeypatch):
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 100)
    assert open_picture(encode(noise(12, 12), "PNG")).size == (12, 12)
    with pytest.raises(ImageError, match="12 x 12 pixels, expected at most 143 in all"):
        open_picture(encode(noise(12, 12), "PNG"), ImageLimits(max_pixels=143))


def test_lenient_decoding_set_by_others_is_noted(monkeypatch):
    monkeypatch.setattr(ImageFile, "LOAD_TRUNCATED_IMAGES", True)
    assert "LOAD_TRUNCATED_IMAGES" in open_picture(encode(noise(4, 4), "PNG")).notes[0]


def tiff_of_planes(pixels: np.ndarray, order: str, rows: int, **more: int) -> bytes:
    """An uncompressed TIFF (6.0) of 16-bit channels that lie one after another, in strips of so many
    rows. `pixels` uint16 [H, W, C].
    """
    height, width, channels = pixels.shape
    strips = [
        pixels[top : top + rows, :, c].astype(f"{order}u2").tobytes()
        for c in range(channels)
        for top in range(0, height, rows)
    ]
    data, starts = bytearray(8), []
    for strip in strips:
        starts.append(len(data))
        data += strip
    lists = {258: [16] * channels, 273: starts, 279: [len(strip) for strip in strips]}
    tags: dict[int, list[int]] = {
        256: [width], 257: [height], 259: [1], 262: [2], 277: [channels], 278: [rows], 284: [2],
        **lists, **{int(k.removeprefix("t")): [v] for k, v in more.items()},
    }  # fmt: skip
    entries = b""
    for tag, values in sorted(tags.items()):
        packed = struct.pack(f"{order}{len(values)}I", *values)
        if len(values) > 1:
            at, packed = len(data), packed
            data += packed
            packed = struct.pack(f"{order}I", at)
        entries += struct.pack(f"{order}HHI", tag, 4, len(values)) + packed
    head = struct.pack(f"{order}2sHI", b"II" if order == "<" else b"MM", 42, len(data))
    data[:8] = head
    return bytes(data) + struct.pack(f"{order}H", len(tags)) + entries + bytes(4)


@pytest.mark.parametrize("rows", [4, 100])
@pytest.mark.parametrize("order", ["<", ">"])
def test_channels_of_16_bits_that_lie_one_after_another(order: str, rows: int) -> None:
    """Pillow reads their bytes as pixels; tifffile gives the values that were written."""
    pixels = np.random.default_rng(2).integers(0, 1 << 16, (11, 7, 3), np.uint16)
    made = tiff_of_planes(pixels, order, rows)
    assert np.array_equal(open_picture(made).pixels, pixels >> 8)
    turned = tiff_of_planes(pixels, order, rows, t274=6)
    assert np.array_equal(open_picture(turned).pixels, np.rot90(pixels >> 8, -1))
    clear = np.dstack([pixels, np.full(pixels.shape[:2], 65535, np.uint16)])
    with_alpha = tiff_of_planes(clear, order, rows, t338=2)
    assert np.array_equal(open_picture(with_alpha).pixels, pixels >> 8)
    with (
        Image.open(io.BytesIO(made)) as image,
        pytest.raises(ImageError, match="channels of 16 bits lie one after another, which Pillow"),
    ):
        open_picture(image)


def test_libtiff_writes_nothing_of_a_damaged_file(capfd: pytest.CaptureFixture[str]) -> None:
    """It writes to the file descriptor of stderr, past Python."""
    pixels = np.zeros((11, 7, 3), np.uint16)
    packed = io.BytesIO()
    noise(12, 12).save(packed, "TIFF", compression="tiff_deflate")
    damaged = {
        "no strips": tiff_of_planes(pixels[:0], "<", 4, t256=7, t257=11),
        "codes that are none": tiff_of_planes(pixels, "<", 100, t259=5),
        "short strips": tiff_of_planes(pixels, "<", 4, t278=100),
        "a broken stream": packed.getvalue()[:8] + bytes(40) + packed.getvalue()[48:],
    }
    for name, data in damaged.items():
        with pytest.raises(ImageError, match="TIFF"):
            open_picture(data)
        assert capfd.readouterr() == ("", ""), name


def test_a_tiff_of_signed_bytes_is_refused() -> None:
    file = io.BytesIO()
    Image.new("L", (5, 3), 200).save(file, "TIFF", tiffinfo={339: 2})
    with pytest.raises(ImageError, match="found a TIFF of signed 8-bit values, expected 8 or 16"):
        open_picture(file.getvalue())
