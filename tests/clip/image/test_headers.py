"""Sizes read from headers: those that Pillow's readers find, and what is senseless refused."""

from __future__ import annotations

import io
import struct
import time

import numpy as np
import pytest
from PIL import Image

from mtmd.base.errors import ImageError
from mtmd.clip.image.decode import open_picture, picture_size
from mtmd.clip.image.headers import TooMuch, header_size
from mtmd.clip.image.jpeg_scans import SCANS_MAX, check_scans

SAVED = [
    ("JPEG", "RGB", {}),
    ("JPEG", "L", {"progressive": True, "comment": b"\xff\xff\xffx"}),
    ("PNG", "RGBA", {}),
    ("PNG", "I;16", {}),
    ("WEBP", "RGB", {}),
    ("WEBP", "RGBA", {"lossless": True}),
    ("GIF", "P", {"comment": b"x" * 700}),
    ("GIF", "L", {}),
    ("BMP", "RGB", {}),
    ("TIFF", "RGB", {}),
    ("TIFF", "L", {"big_tiff": True}),
    ("TIFF", "1", {"compression": "group4"}),
]


def saved(kind: str, mode: str, size: tuple[int, int] = (31, 17), **options: object) -> bytes:
    file = io.BytesIO()
    Image.new(mode, size).save(file, kind, **options)  # type: ignore[arg-type]
    return file.getvalue()


def jpeg(*, segments: int = 0, fill: int = 0, scans: int = 0) -> bytes:
    """Of 3 x 2 pixels, with more in it than usual."""
    data = saved("JPEG", "L", (3, 2))
    scan = data[data.index(b"\xff\xda") : -2]
    between = b"\xff\xfe\0\x02" * segments + b"\xff" * fill
    return data[:2] + between + data[2:-2] + scan * scans + data[-2:]


@pytest.mark.parametrize(
    ("kind", "mode", "options"), SAVED, ids=[f"{k}-{m}-{len(o)}" for k, m, o in SAVED]
)
def test_it_is_what_pillow_reads(kind: str, mode: str, options: dict[str, object]) -> None:
    data = saved(kind, mode, **options)
    assert header_size(kind, data) == Image.open(io.BytesIO(data)).size == (31, 17)


@pytest.mark.parametrize(
    ("kind", "mode", "options"), SAVED, ids=[f"{k}-{m}-{len(o)}" for k, m, o in SAVED]
)
def test_of_a_part_it_is_the_size_or_an_error(
    kind: str, mode: str, options: dict[str, object]
) -> None:
    data, rng = saved(kind, mode, **options), np.random.default_rng(2)
    for length in range(min(len(data), 400)):
        try:
            assert header_size(kind, data[:length]) == (31, 17)
        except (EOFError, ValueError, struct.error):
            continue
    for _ in range(300):
        mutant = bytearray(data)
        for _ in range(3):
            mutant[rng.integers(0, min(len(data), 120))] = rng.integers(0, 256)
        try:
            assert all(isinstance(n, int) for n in header_size(kind, bytes(mutant)))
        except (EOFError, ValueError, struct.error, TooMuch):
            continue


def test_a_bitmap_whose_rows_begin_at_the_top() -> None:
    data = bytearray(saved("BMP", "RGB"))
    struct.pack_into("<i", data, 22, -17)
    assert header_size("BMP", bytes(data)) == (31, 17)


def test_a_frame_larger_than_its_screen() -> None:
    data = bytearray(saved("GIF", "L"))
    struct.pack_into("<HH", data, 6, 1, 1)
    assert header_size("GIF", bytes(data)) == Image.open(io.BytesIO(data)).size == (31, 17)


def test_the_last_frame_header_counts() -> None:
    data = saved("JPEG", "L")
    at = data.index(b"\xff\xc0")
    other = bytearray(data[at : at + 13])
    struct.pack_into(">HH", other, 5, 2, 2)
    assert header_size("JPEG", data[:at] + bytes(other) + data[at:]) == (31, 17)


SENSELESS = {
    "four million segments": jpeg(segments=4_000_000),
    "twenty million fill bytes": jpeg(fill=20_000_000),
    "fill bytes here and there": jpeg(fill=40_000)[:-2] + jpeg(fill=40_000)[2:],
    "a comment of a million blocks": saved("GIF", "L")[:13]
    + b"!\xfe"
    + b"\1x" * 20_000_000
    + b"\0"
    + saved("GIF", "L")[13:],
    "a directory of 60,000 entries": b"II\x2a\0\x08\0\0\0"
    + struct.pack("<H", 60_000)
    + bytes(720_004),
    "5,000 scans": jpeg(scans=5_000),
}


@pytest.mark.parametrize(
    "case",
    [
        "four million segments",
        "twenty million fill bytes",
        "a comment of a million blocks",
        "a directory of 60,000 entries",
    ],
)
def test_what_is_senseless_is_refused_at_once(case: str) -> None:
    data, start = SENSELESS[case], time.process_time()
    with pytest.raises(ImageError, match="expected a usual one; save it anew"):
        picture_size(data)
    with pytest.raises(ImageError, match="expected a usual one; save it anew"):
        open_picture(data)
    assert time.process_time() - start < 5  # two to fourteen seconds when Pillow read it


def test_a_jpeg_of_thousands_of_scans_is_refused() -> None:
    assert picture_size(SENSELESS["5,000 scans"]) == (3, 2)
    with pytest.raises(ImageError, match="more than 100 scans over all pixels"):
        open_picture(SENSELESS["5,000 scans"])


def test_usual_ones_are_not() -> None:
    rng = np.random.default_rng(5)
    usual = jpeg(segments=100, fill=100)
    assert picture_size(usual) == open_picture(usual).size == (3, 2)
    film = rng.bytes(1 << 22) + b"\xff\xda" * 300
    for data in (usual + film, jpeg(scans=50)):
        check_scans(data)
    assert SCANS_MAX == 100
    progressive = saved("JPEG", "RGB", (64, 64), progressive=True)
    assert open_picture(progressive + film).size == (64, 64)
