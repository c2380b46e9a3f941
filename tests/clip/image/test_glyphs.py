"""Glyphs of pictures: drawn ones, and OpenCV's numbers where it is installed."""

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


def test_against_opencv() -> None:
    cv2 = pytest.importorskip("cv2", reason="OpenCV is not installed")
    rng = np.random.default_rng(5)
    for share in (0.05, 0.2, 0.4, 0.6):
        pixels = rng.integers(0, 128, (61, 83, 3), np.uint8)
        pixels[rng.random((61, 83)) < share] += 100
        gray = (pixels @ np.array([19595, 38470, 7471]) + 32768 >> 16).astype(np.uint8)
        dark = cv2.threshold(gray, 0, 255, cv2.THRESH_BINARY + cv2.THRESH_OTSU)[1] == 0
        mask = foreground(pixels)
        np.testing.assert_array_equal(mask, ~dark if dark.mean() > 0.5 else dark)
        expected = cv2.connectedComponentsWithStats(mask.astype(np.uint8), connectivity=8)[2][1:]
        found = np.stack(components(mask), 1)
        assert sorted(found.tolist()) == sorted(expected[:, [3, 2, 4]].tolist())
