"""JPEGs without the marker that ends them: taken where all pixels are there, refused where not."""

from __future__ import annotations

import io

import numpy as np
import pytest
from PIL import Image

from mtmd.base.errors import ImageError
from mtmd.clip.image.decode import open_picture
from mtmd.clip.image.jpeg_scans import lacks_end

NOTE = "the marker that ends a JPEG is missing; all of its pixels are there"
WAYS = {
    "baseline": {},
    "progressive": {"progressive": True},
    "grey": {"mode": "L"},
    "progressive grey": {"mode": "L", "progressive": True},
    "four colours": {"mode": "CMYK"},
    "with restarts": {"restart_marker_blocks": 2},
    "one of whole blocks": {"size": (32, 16)},
}


def jpeg(mode: str = "RGB", size: tuple[int, int] = (90, 61), **options: object) -> bytes:
    rng = np.random.default_rng(3)
    channels = {"L": (), "RGB": (3,), "CMYK": (4,)}[mode]
    pixels = rng.integers(0, 256, (*size[::-1], *channels), np.uint8)
    file = io.BytesIO()
    Image.fromarray(pixels, mode).save(file, "JPEG", quality=80, **options)
    return file.getvalue()


@pytest.mark.filterwarnings("ignore:'mode' parameter")
@pytest.mark.parametrize("behind", [b"", b"\0", bytes(5000)], ids=["cut", "a zero", "zeros"])
@pytest.mark.parametrize("way", WAYS)
def test_all_pixels_are_there(way: str, behind: bytes) -> None:
    whole = jpeg(**WAYS[way])
    expected, actual = open_picture(whole), open_picture(whole[:-2] + behind)
    assert np.array_equal(actual.pixels, expected.pixels)
    assert actual.notes == (NOTE, *expected.notes)


@pytest.mark.filterwarnings("ignore:'mode' parameter")
@pytest.mark.parametrize("behind", [b"", bytes(5000)], ids=["cut", "filled with zeros"])
@pytest.mark.parametrize("way", WAYS)
def test_pixels_are_missing(way: str, behind: bytes) -> None:
    """A download that stopped, in a file that was made as long as it was to become, too."""
    whole = jpeg(**WAYS[way])
    scans = whole.count(b"\xff\xda")
    starts = [whole.rindex(b"\xff\xda")] if scans > 1 else []  # before the last scan
    for cut in (*starts, len(whole) - 40, len(whole) * 2 // 3, len(whole) // 2):
        with pytest.raises(ImageError, match="found a truncated JPEG, expected the whole file"):
            open_picture(whole[:cut] + behind)


def test_an_end_that_others_follow_is_one() -> None:
    whole = jpeg()
    for behind in (b"", b"\xff", bytes(9), b"a film", jpeg(size=(9, 9)), jpeg()[:-2]):
        assert not lacks_end(whole + behind)
        assert open_picture(whole + behind).notes == ()
