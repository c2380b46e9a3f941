"""Sizes and density of a picture's letters, which are taken to be the connected components of its
darker pixels, or of the lighter ones where those are fewer.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from mtmd.clip.image.pixels import Pixels

LUMA = (19595, 38470, 7471)  # ITU-R 601-2 in 65536ths, as Pillow's "L"
MIN_AREA, MIN_HEIGHT = 3, 2  # of a glyph, in pixels; less is noise
MAX_SHARE = 0.9  # of a side of the picture; more is a frame or a rule


def glyphs(pixels: Pixels) -> tuple[float, int]:
    """The median height of a picture's glyphs in pixels, 0 without any, and how many there are."""
    height, width = pixels.shape[:2]
    high, wide, areas = components(foreground(pixels))
    large = (areas >= MIN_AREA) & (high >= MIN_HEIGHT)
    large &= (wide < MAX_SHARE * width) & (high < MAX_SHARE * height)
    heights = high[large]
    return (float(np.median(heights)) if heights.size else 0.0), int(heights.size)


def foreground(pixels: Pixels) -> NDArray[np.bool_]:
    """bool [Y, X]: which pixels of uint8 [Y, X, 3] are on one side of Otsu's threshold, the side
    that has at most half of them, if possible the darker one.
    """
    weighted = (pixels[..., i] * np.int32(weight) for i, weight in enumerate(LUMA))
    gray = (sum(weighted, start=np.int32(1 << 15))) >> 16
    dark: NDArray[np.bool_] = gray <= _otsu(np.bincount(gray.ravel(), minlength=256))
    return ~dark if dark.mean() > 0.5 else dark


def _otsu(counts: NDArray[np.int64]) -> int:
    """The threshold that parts values most clearly (Otsu 1979): the first with the largest variance
    between what is at most as large and the rest; 0 where all are equal.
    """
    below, total = np.cumsum(counts), counts.sum()
    sums = np.cumsum(counts * np.arange(256))
    parts = np.maximum(below * (total - below), 1).astype(np.float64)
    return int(np.argmax((sums * float(total) - below * float(sums[-1])) ** 2 / parts))


def components(
    mask: NDArray[np.bool_],
) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
    """The height, width and area in pixels of each component of bool [Y, X], whose pixels touch at
    a side or a corner.
    """
    stride = mask.shape[1] + 3  # of rows that end in pixels without, which part their runs
    edges = np.diff(np.pad(mask, ((0, 0), (1, 2))).ravel().astype(np.int8), prepend=np.int8(0))
    starts, ends = np.flatnonzero(edges > 0), np.flatnonzero(edges < 0)
    labels = _joined(starts, ends, stride)
    rows, left = np.divmod(starts, stride)
    right = ends - rows * stride
    count = starts.size
    top, bottom, first, last = (np.full(count, value) for value in (mask.shape[0], -1, stride, -1))
    np.minimum.at(top, labels, rows)
    np.maximum.at(bottom, labels, rows)
    np.minimum.at(first, labels, left)
    np.maximum.at(last, labels, right)
    area = np.bincount(labels, ends - starts, count).astype(np.int64)
    roots = area > 0
    return (bottom - top + 1)[roots], (last - first)[roots], area[roots]


def _joined(starts: NDArray[np.int64], ends: NDArray[np.int64], stride: int) -> NDArray[np.int64]:
    """The first run of each run's component; runs are ranges of pixels that are counted through
    rows of `stride`.
    """
    first = np.searchsorted(ends, starts + stride, "left")
    touched = np.maximum(np.searchsorted(starts, ends + stride, "right") - first, 0)
    upper = np.repeat(np.arange(starts.size), touched)
    lower = np.arange(upper.size) + np.repeat(first - np.cumsum(touched) + touched, touched)
    labels = np.arange(starts.size)
    while True:
        a, b = labels[upper], labels[lower]
        if np.array_equal(a, b):
            return labels
        np.minimum.at(labels, np.maximum(a, b), np.minimum(a, b))
        while not np.array_equal(labels, further := labels[labels]):
            labels = further
