"""Every picture as one square of the same size: stretched to it, or scaled and cut."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from mtmd.base.errors import ImageError, ModelError
from mtmd.clip.image.pixels import Normalize, Pixels
from mtmd.clip.image.resize import read_resample, resize
from mtmd.clip.resolution.resolution import ImagePlan, tile_of
from mtmd.clip.resolution.sizes import Size
from mtmd.clip.token_budget import DEFAULT_BUDGET, Budget
from mtmd.kernels.checkpoint.settings import Settings
from mtmd.kernels.graph import Type

MAX_PIXELS = 64_000_000  # of a picture scaled by its shorter edge


@dataclass(frozen=True)
class FixedSquare:
    """A tile of `side` pixels a side, of `tokens`, for every picture.

    The picture is put on a square of the colour `ground` first, or not; `stretched` to a square of
    `edge` pixels a side, or scaled until its shorter edge has as many; and cut in the middle. The
    tower sees `saved` pixels a side from the top left, None for all: whole patches.
    """

    side: int
    tokens: int
    normalize: Normalize
    resample: str
    edge: int
    stretched: bool = True
    ground: tuple[int, ...] | None = None
    saved: int | None = None

    @property
    def seen(self) -> int:
        """Pixels a side of the tile."""
        return self.side if self.saved is None else self.saved

    def prepare(self, pixels: Pixels, budget: Budget = DEFAULT_BUDGET) -> ImagePlan:
        budget.check_fixed(self.tokens)
        tile = self.normalize(self._square(pixels)[: self.seen, : self.seen])
        return ImagePlan((tile,), ((self.seen, self.seen),), self.tokens)

    def _square(self, pixels: Pixels) -> Pixels:
        if self.ground is not None:
            pixels = _on_square(pixels, self.ground)
        size = (pixels.shape[1], pixels.shape[0])
        width, height = (
            (self.edge, self.edge) if self.stretched else scaled_to_short_edge(size, self.edge)
        )
        top, left = (height - self.side) // 2, (width - self.side) // 2
        scaled = resize(pixels, width, height, self.resample)
        return scaled[top : top + self.side, left : left + self.side]

    def max_tokens(self, budget: Budget = DEFAULT_BUDGET) -> int:  # noqa: ARG002
        return self.tokens

    def tile_type(self) -> Type:
        return tile_of(self.seen, self.seen)

    largest_tile_type = tile_type


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
    square = np.empty((side, side, 3), np.uint8)
    square[:] = ground
    top, left = (side - height) // 2, (side - width) // 2
    square[top : top + height, left : left + width] = pixels
    return square


def read_fixed_square(
    image: Settings,
    side: int,
    tokens: int,
    normalize: Normalize,
    *,
    crops: bool,
    ground: tuple[int, ...] | None,
) -> FixedSquare:
    """Read it from an image processor's settings; `crops` where do_center_crop is left out.
    ModelError where no square of `side` comes out.
    """
    edge, stretched = _edge(image, "size", "shortest_edge")
    crops = image.flag("do_center_crop", crops)
    crop = _edge(image, "crop_size", "height")[0] if crops else edge
    if crop != side or edge < side or not (crops or stretched):
        cropped = f"and crop_size {crop}" if crops else "without a crop"
        raise ModelError(
            f"{image.where}: size {edge} {cropped} does not give {side} x {side}, the image_size "
            "of config.json; correct one"
        )
    return FixedSquare(
        side=side,
        tokens=tokens,
        normalize=normalize,
        resample=read_resample(image, 3),
        edge=edge,
        stretched=stretched,
        ground=ground,
    )


def _edge(image: Settings, key: str, alone: str) -> tuple[int, bool]:
    """A size, and whether it is that of a square; a number that stands alone is that of `alone`."""
    size = image.get(key, 224)
    if type(size) is int:
        size = (
            {"shortest_edge": size} if alone == "shortest_edge" else {"height": size, "width": size}
        )
    part = Settings(size, f"{image.where}: {key}")
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
