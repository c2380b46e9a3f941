"""How pictures are cut into tiles: grids and sizes, rounded as the reference processors round them.
Sizes are (width, height) in pixels.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil

import numpy as np

from mtmd.clip.image.decode import Pixels, resize
from mtmd.kernels.checkpoint.settings import MAX_WIDTH, Settings
from mtmd.kernels.errors import ImageError, ModelError

Size = tuple[int, int]

LONGEST = 4096  # what `scaled_to_edge` never goes beyond
MAX_PIXELS = 64_000_000  # of a picture scaled by its shorter edge
MAX_SIDE = 16  # tiles in a row; published models have at most 9
MAX_TILE = 1024  # pixels on a side of a tile; published models have at most 512
MAX_CANVASES = 64


def cut(pixels: Pixels, rows: int, columns: int) -> list[Pixels]:
    """[rows * Y, columns * X, 3] in equal tiles, line by line."""
    return [tile for line in np.split(pixels, rows) for tile in np.split(line, columns, 1)]


def fitted(size: Size, longest: int) -> Size:
    """The longer edge at `longest`, the other by the shape, rounded down."""
    aspect = size[0] / size[1]
    return (
        (longest, int(longest / aspect)) if size[0] >= size[1] else (int(longest * aspect), longest)
    )


def scaled_to_edge(size: Size, longest: int) -> Size:
    """The longer edge at `longest`, the other rounded up to an even number, and none above
    LONGEST.
    """
    width, height = fitted(size, longest)
    if size[0] >= size[1]:
        height = max(height + height % 2, 1)
    else:
        width = max(width + width % 2, 1)
    if max(width, height) > LONGEST:
        width, height = fitted((width, height), LONGEST)
    return max(width, 1), max(height, 1)


def edge_grid(size: Size, longest: int, tile: int) -> tuple[int, int]:
    """(rows, columns) of the tiles that a picture scaled to its longest edge is stretched to; (0,
    0) where one is enough, or it is 0.
    """
    if not longest:
        return 0, 0
    scaled = scaled_to_edge(size, longest)
    width, height = fitted(scaled, ceil(max(scaled) / tile) * tile)
    rows, columns = ceil(height / tile), ceil(width / tile)
    return (rows, columns) if rows * columns > 1 else (0, 0)


def closest_grid(size: Size, grids: Sequence[Size], tile: int) -> Size:
    """The grid (columns, rows) whose shape is closest to a picture's; of several equally close, a
    later one where the picture has more than half of its pixels. `grids` go by their number of
    tiles; arXiv:2404.16821
    """
    aspect, area = size[0] / size[1], size[0] * size[1]
    best, least = grids[0], float("inf")
    for columns, rows in grids:
        difference = abs(aspect - columns / rows)
        if difference < least or (
            difference == least and area > 0.5 * tile * tile * columns * rows
        ):
            best, least = (columns, rows), difference
    return best


def scaled_to_short_edge(size: Size, shortest: int) -> Size:
    """The shorter edge at `shortest`, the other by the shape, rounded down. Raises ImageError where
    that is too long to be made.
    """
    short, long = min(size), max(size)
    long = int(shortest * long / short)
    if shortest * long > MAX_PIXELS:
        raise ImageError(
            f"the picture has {size[0]} x {size[1]} pixels, {shortest} x {long} when scaled to its "
            "shorter edge, expected "
            f"at most {MAX_PIXELS:,} pixels; crop it to a less narrow shape"
        )
    return (shortest, long) if size[0] <= size[1] else (long, shortest)


@dataclass(frozen=True)
class Squared:
    """How a square is made of a picture: put on a ground of that colour first, or not; stretched to
    a side of `edge`, or scaled by its shorter edge; cut in the middle.
    """

    ground: tuple[int, ...] | None
    stretched: bool
    edge: int

    def __call__(self, pixels: Pixels, side: int, resample: str) -> Pixels:
        if self.ground is not None:
            pixels = _on_square(pixels, self.ground)
        size = (pixels.shape[1], pixels.shape[0])
        width, height = (
            (self.edge, self.edge) if self.stretched else scaled_to_short_edge(size, self.edge)
        )
        top, left = (height - side) // 2, (width - side) // 2
        return resize(pixels, width, height, resample)[top : top + side, left : left + side]


def read_squared(
    image: Settings, side: int, *, crops: bool, ground: tuple[int, ...] | None
) -> Squared:
    """From an image processor's settings; `crops` where do_center_crop is left out. ModelError
    where no square of `side` comes out.
    """
    edge, stretched = _edge(image, "size", "shortest_edge")
    crops = image.flag("do_center_crop", crops)
    found = _edge(image, "crop_size", "height")[0] if crops else edge
    if found != side or edge < side or not (crops or stretched):
        cropped = f"and crop_size {found}" if crops else "without a crop"
        raise ModelError(
            f"{image.where}: size {edge} {cropped} does not give {side} x {side}, the image_size "
            "of config.json; correct one"
        )
    return Squared(ground, stretched, edge)


def _edge(image: Settings, key: str, alone: str) -> tuple[int, bool]:
    """A size, and whether it is that of a square; a number that stands alone is that of `alone`."""
    found = image.get(key, 224)
    if type(found) is int:
        found = (
            {"shortest_edge": found}
            if alone == "shortest_edge"
            else {"height": found, "width": found}
        )
    part = Settings(found, f"{image.where}: {key}")
    given = {name for name, value in part.values.items() if value is not None}
    if given == {"shortest_edge"} and alone == "shortest_edge":
        return part.count("shortest_edge"), False
    if given != {"height", "width"} or part.count("height") != part.count("width"):
        raise ModelError(
            f"{part.where} has {', '.join(sorted(given)) or 'nothing'}, expected an equal height "
            "and width"
            f"{', or shortest_edge' if alone == 'shortest_edge' else ''}"
        )
    return part.count("height"), True


def _on_square(pixels: Pixels, ground: tuple[int, ...]) -> Pixels:
    """The picture in the middle of a square of a colour."""
    height, width = pixels.shape[:2]
    side = max(height, width)
    if side * side > MAX_PIXELS:
        raise ImageError(
            f"the picture has {width} x {height} pixels, and its square {side * side:,}, expected "
            f"at most {MAX_PIXELS:,}; "
            "scale it down"
        )
    found = np.empty((side, side, 3), np.uint8)
    found[:] = ground
    top, left = (side - height) // 2, (side - width) // 2
    found[top : top + height, left : left + width] = pixels
    return found


def read_longest(image: Settings, key: str, default: int) -> int:
    """A size that is given by its longest edge alone."""
    size = Settings(image.get(key, {"longest_edge": default}), f"{image.where}: {key}")
    if {name for name, value in size.values.items() if value is not None} != {"longest_edge"}:
        raise ModelError(f"{size.where} is {size.values!r:.60}, expected a longest_edge alone")
    return size.count("longest_edge", most=MAX_WIDTH)


def read_canvases(top: Settings, image: Settings, side: int) -> tuple[Size, ...]:
    """The resolutions, of whole tiles, that both config.json and the image processor's settings
    name, as (height, width) there.
    """
    default = [[336, 672], [672, 336], [672, 672], [1008, 336], [336, 1008]]
    found = top.get("image_grid_pinpoints", default)
    if image.get("image_grid_pinpoints", default) != found:
        raise ModelError(
            f"{image.where}: image_grid_pinpoints differ from those of config.json; correct one of "
            "them"
        )
    edges = range(side, MAX_SIDE * side + 1, side)
    fits = (
        isinstance(found, list)
        and 0 < len(found) <= MAX_CANVASES
        and all(
            isinstance(pair, list)
            and len(pair) == 2
            and all(type(edge) is int and edge in edges for edge in pair)
            for pair in found
        )
    )
    if not fits:
        raise ModelError(
            f"{top.where}: image_grid_pinpoints have to be pairs of height and width, multiples of "
            f"{side}, of at most "
            f"{MAX_SIDE} tiles each; found {found!r:.60}"
        )
    return tuple((width, height) for height, width in found)


def best_canvas(size: Size, canvases: Sequence[Size]) -> Size:
    """The canvas that shows most of a picture's pixels, and of several such the one with least left
    over; arXiv:2310.03744
    """

    def worth(canvas: Size) -> tuple[int, int]:
        scale = min(canvas[0] / size[0], canvas[1] / size[1])
        shown = min(int(size[0] * scale) * int(size[1] * scale), size[0] * size[1])
        return shown, shown - canvas[0] * canvas[1]

    return max(canvases, key=worth)


def letterboxed(pixels: Pixels, canvas: Size, resample: str) -> Pixels:
    """The picture scaled to fit the canvas, rounded up, in the middle of black."""
    height, width = pixels.shape[:2]
    across, down = canvas[0] / width, canvas[1] / height
    by_width, by_height = (
        (canvas[0], min(ceil(height * across), canvas[1])),
        (min(ceil(width * down), canvas[0]), canvas[1]),
    )
    fit: Size = by_width if across < down else by_height
    found = np.zeros((canvas[1], canvas[0], 3), np.uint8)
    left, top = (canvas[0] - fit[0]) // 2, (canvas[1] - fit[1]) // 2
    found[top : top + fit[1], left : left + fit[0]] = resize(pixels, *fit, resample)
    return found


def unpadded(cells: np.ndarray, size: Size) -> np.ndarray:
    """The rows and columns [Y, X] of a letterboxed canvas that show the picture of `size`."""
    rows, columns = cells.shape
    if size[0] / size[1] > columns / rows:
        edge = (rows - int(round(size[1] * (columns / size[0]), 7))) // 2
        return cells[edge : rows - edge]
    edge = (columns - int(round(size[0] * (rows / size[1]), 7))) // 2
    return cells[:, edge : columns - edge]
