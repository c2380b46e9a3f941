"""Glyphs of pictures: drawn ones, and OpenCV's numbers of noise."""

from __future__ import annotations

import numpy as np
import pytest

from mtmd.clip.image.glyphs import components, foreground, glyphs
from mtmd.clip.image.pixels import Pixels


def page(ink: int = 0, paper: int = 255) -> Pixels:
    """Six letters of 3 x 5 pixels, one of 9, a speck, and a rule as wide as the page."""
    pixels = np.full((60, 80, 3), paper, np.uint8)
    for column in range(6):
        pixels[4:9, 5 + 10 * column : 8 + 10 * column] = ink
    pixels[20:29, 5:8] = ink
    pixels[35, 5] = pixels[50, :] = ink
    return pixels


@pytest.mark.parametrize("ink", [0, 255])
def test_letters_are_counted_whichever_color_they_have(ink: int) -> None:
    assert glyphs(page(ink, 255 - ink)) == (5.0, 7)


def test_pages_without_letters() -> None:
    for value in (0, 90, 255):
        assert glyphs(np.full((7, 5, 3), value, np.uint8)) == (0.0, 0)


def test_components_touch_at_corners() -> None:
    rows = ["#..#", ".##.", "#...", "...#", "#.#.", ".#.."]
    mask = np.array([[c == "#" for c in row] for row in rows])
    result = sorted(zip(*(values.tolist() for values in components(mask)), strict=True))
    assert result == [(3, 4, 5), (3, 4, 4)][::-1]


# share of lighter pixels: foreground, components, sums of heights, widths and areas, and of squares
OPENCV = {
    0.05: (2087, 104, [386, 396, 2087], [8356, 7698, 1254393]),
    0.2: (1067, 383, [767, 754, 1067], [2765, 2596, 7297]),
    0.4: (2037, 123, [445, 445, 2037], [7579, 10527, 963383]),
    0.6: (2014, 115, [384, 428, 2014], [7030, 10328, 1203268]),
}


def test_against_opencv() -> None:
    """Numbers of OpenCV 5.0's `threshold` (Otsu) and `connectedComponentsWithStats`."""
    rng = np.random.default_rng(5)
    for share, (count, number, sums, squares) in OPENCV.items():
        pixels = rng.integers(0, 128, (61, 83, 3), np.uint8)
        pixels[rng.random((61, 83)) < share] += 100
        mask = foreground(pixels)
        found = np.stack(components(mask), 1)
        assert (int(mask.sum()), len(found)) == (count, number)
        assert found.sum(0).tolist() == sums and (found**2).sum(0).tolist() == squares
