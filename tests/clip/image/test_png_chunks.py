"""PNGs with what is no pixel, or with damage that decoders may pass over: the pixels are those that
were written, whatever stands between (PNG, third edition, 13.1; libpng's defaults).
"""

from __future__ import annotations

import struct
import zlib

import numpy as np
import pytest

from mtmd.base.errors import ImageError
from mtmd.clip.image.decode import open_picture
from mtmd.clip.image.png_chunks import CHUNKS_MAX, pixels_only

PIXELS = np.random.default_rng(1).integers(0, 256, (5, 7, 3), np.uint8)
LARGE = bytes(3 << 20)
EXIF = b"MM\0*\0\0\0\x08\0\x01\x01\x12\0\x03\0\0\0\x01\0\x06\0\0\0\0\0\0"  # orientation 6


def chunk(kind: bytes, body: bytes, broken: bool = False) -> bytes:
    checksum = zlib.crc32(kind + body) ^ broken
    return struct.pack(">I", len(body)) + kind + body + struct.pack(">I", checksum)


def png(*before: bytes, after: tuple[bytes, ...] = (), data: bytes = b"") -> bytes:
    height, width, _ = PIXELS.shape
    rows = b"".join(b"\0" + row.tobytes() for row in PIXELS)
    return b"".join(
        (
            b"\x89PNG\r\n\x1a\n",
            chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)),
            *before,
            data or chunk(b"IDAT", zlib.compress(rows)),
            *after,
            chunk(b"IEND", b""),
        )
    )


LEFT_OUT = {
    "a packed text of 3 MiB": chunk(b"zTXt", b"parameters\0\0" + zlib.compress(LARGE)),
    "a text of 3 MiB in UTF-8": chunk(b"iTXt", b"XML:com.adobe.xmp\0\0\0\0\0" + LARGE),
    "a packed one": chunk(b"iTXt", b"XML:com.adobe.xmp\0\1\0\0\0" + zlib.compress(LARGE)),
    "a profile of 3 MiB": chunk(b"iCCP", b"profile\0\0" + zlib.compress(LARGE)),
    "a text that is no stream": chunk(b"zTXt", b"Raw profile type exif\0\0nothing"),
    "a damaged text": chunk(b"tEXt", b"Comment\0hello", broken=True),
    "a damaged time": chunk(b"tIME", bytes(7), broken=True),
    "a time of no length": chunk(b"tIME", b""),
    "a private one": chunk(b"teSt", b"\0" * 99, broken=True),
    "a gamma of three bytes": chunk(b"gAMA", b"\0\0\0"),
    "many": chunk(b"tEXt", b"a\0b") * 5000,
}


@pytest.mark.parametrize("behind", [False, True], ids=["before the pixels", "after them"])
@pytest.mark.parametrize("case", LEFT_OUT)
def test_what_is_no_pixel_decides_nothing(case: str, behind: bool) -> None:
    extra = LEFT_OUT[case]
    result = open_picture(png(after=(extra,)) if behind else png(extra))
    assert np.array_equal(result.pixels, PIXELS) and result.notes == ()
    assert pixels_only(png(extra))[0] == png()


def test_what_decides_about_pixels_stays() -> None:
    clear = chunk(b"tRNS", struct.pack(">HHH", *map(int, PIXELS[2, 3])))
    raw = EXIF.hex().encode()
    texts = {
        "exif": chunk(b"eXIf", EXIF),
        "a text": chunk(
            b"tEXt",
            b"Raw profile type exif\0\nexif\n%d\n%s" % (len(raw) // 2 + 6, b"457869660000" + raw),
        ),
        "adobe": chunk(
            b"iTXt",
            b"XML:com.adobe.xmp\0\0\0\0\0"
            b'<x:xmpmeta><rdf:Description tiff:Orientation="6"/></x:xmpmeta>',
        ),
    }
    expected = PIXELS.copy()
    expected[2, 3] = 255
    for name, extra in texts.items():
        made = png(clear, extra, LEFT_OUT["a packed text of 3 MiB"])
        actual = open_picture(made)
        assert np.array_equal(actual.pixels, np.rot90(expected, -1)), name
        assert actual.notes == (
            "rotated upright (EXIF orientation 6)",
            "transparent parts laid on white",
        ) or actual.notes == (
            "transparent parts laid on white",
            "rotated upright (EXIF orientation 6)",
        )


def test_damage_that_a_decoder_may_pass_over_is_noted() -> None:
    clear = chunk(b"tRNS", struct.pack(">HHH", *map(int, PIXELS[2, 3])), broken=True)
    result = open_picture(png(clear, chunk(b"eXIf", EXIF, broken=True)))
    assert np.array_equal(result.pixels, PIXELS)
    assert result.notes == (
        "a damaged part of the PNG (tRNS) was left out",
        "a damaged part of the PNG (eXIf) was left out",
    )


def test_damage_that_repeats_is_one_note() -> None:
    clear, exif = chunk(b"tRNS", b"\0" * 6, broken=True), chunk(b"eXIf", EXIF, broken=True)
    result = open_picture(png(clear * 100_000, exif))
    assert np.array_equal(result.pixels, PIXELS)
    assert result.notes == (
        "100,000 damaged parts of the PNG (tRNS) were left out",
        "a damaged part of the PNG (eXIf) was left out",
    )


def test_damage_that_no_decoder_may_pass_over() -> None:
    with pytest.raises(ImageError, match="found a PNG that is damaged"):
        open_picture(png(LEFT_OUT["a damaged time"], data=chunk(b"IDAT", b"no pixels")))


def test_chunks_without_end_are_refused() -> None:
    with pytest.raises(ImageError, match=f"PNG with more than {CHUNKS_MAX:,} chunks"):
        open_picture(png(chunk(b"teSt", b"") * CHUNKS_MAX))


@pytest.mark.parametrize("length", [9, 20, 40, 45])
def test_a_file_that_ends_within_a_chunk_stays_as_it_is(length: int) -> None:
    made = png(LEFT_OUT["a damaged time"])[:length]
    assert pixels_only(made) == (made, [])
