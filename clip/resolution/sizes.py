"""Sizes, grids and cuts that several ways share, rounded as the reference processors round them.

Sizes are (width, height) in pixels.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from mtmd.base.errors import ImageError, ModelError
from mtmd.clip.image.pixels import Pixels
from mtmd.kernels.checkpoint.settings import MAX_WIDTH, Settings

Size = tuple[int, int]

MAX_RATIO = 200  # of the sides of a picture, as the reference has it
MAX_TILES = 64  # of a picture; published models have at most 12
MAX_IN_A_ROW = 16  # tiles; published models have at most 9


def cut(pixels: Pixels, rows: int, columns: int) -> list[Pixels]:
    """[rows * Y, columns * X, 3] in equal tiles, line by line."""
    return [tile for line in np.split(pixels, rows) for tile in np.split(line, columns, 1)]


def closest_grid(size: Size, grids: Sequence[Size], tile: int) -> Size:
    """The grid (columns, rows) whose shape is closest to a picture's; of several equally close, a
    later one where the picture has more than half of its pixels. `grids` go by their number of
    tiles; arXiv:2404.16821
    """
    aspect, area = size[0] / size[1], size[0] * size[1]
    best, minimum = grids[0], float("inf")
    for columns, rows in grids:
        difference = abs(aspect - columns / rows)
        if difference < minimum or (
            difference == minimum and area > 0.5 * tile * tile * columns * rows
        ):
            best, minimum = (columns, rows), difference
    return best


def canvas_grid(size: Size, grids: Sequence[Size], tile: int) -> Size:
    """The grid (columns, rows) into which a picture fits with the least enlargement, or, where it
    fits into none, with the least reduction; of equal ones the first (transformers'
    Cohere2VisionImageProcessor).
    """
    scales = (np.array(grids) * tile / np.array(size)).min(axis=1)
    if (scales < 1).all():
        return grids[int(scales.argmax())]
    return grids[int(np.where(scales < 1, np.inf, scales).argmin())]


def squarest_grid(maximum: int) -> tuple[int, int]:
    """Rows and columns, no more rows than columns, of the squarest of the grids with the most cells
    up to `maximum`.
    """
    rows = max(range(1, math.isqrt(maximum) + 1), key=lambda r: (maximum // r * r, r))
    return rows, maximum // rows


def within(rows: int, columns: int, maximum: int) -> tuple[int, int]:
    """Return at most `maximum` cells: rows and columns as they are, or the longer side shortened,
    and both where the shorter alone is too long.
    """
    if rows * columns <= maximum:
        return rows, columns
    short = min(rows, columns, math.isqrt(maximum))
    long = min(max(rows, columns), maximum // short)
    return (short, long) if rows <= columns else (long, short)


def too_narrow(width: int, height: int) -> ImageError:
    """Return what to raise for a picture whose sides differ by more than MAX_RATIO."""
    return ImageError(
        f"picture of {width} x {height} pixels, expected sides that differ by a factor of at most "
        f"{MAX_RATIO}; crop it"
    )


def read_longest(image: Settings, key: str, default: int) -> int:
    """A size that is given by its longest edge alone."""
    size = Settings(image.get(key, {"longest_edge": default}), f"{image.where}: {key}")
    if {name for name, value in size.values.items() if value is not None} != {"longest_edge"}:
        raise ModelError(f"{size.where} is {size.values!r:.60}, expected a longest_edge alone")
    return size.count("longest_edge", maximum=MAX_WIDTH)
