"""One tile in a picture's shape, its longer edge that of a square and its shorter one no less than
a bound; what is left of the square is not seen (arXiv:2410.05993).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from mtmd.base.errors import ModelError
from mtmd.clip.image.pixels import Normalize, Pixels, read_normalize
from mtmd.clip.image.resize import read_resample, resize
from mtmd.clip.resolution.resolution import ImagePlan, tile_of
from mtmd.clip.resolution.sizes import Size
from mtmd.clip.token_budget import DEFAULT_BUDGET, Budget
from mtmd.kernels.checkpoint.settings import Settings
from mtmd.kernels.graph import Type

SIDE, SHORTEST = 980, 336  # transformers' defaults
SIDES = 490, SIDE


@dataclass(frozen=True)
class WithinSquare:
    """A tile of `tokens`, its longer edge of `side` pixels, with zeros behind its ends up to whole
    patches of `patch` pixels.
    """

    side: int
    shortest: int
    patch: int
    tokens: int
    normalize: Normalize
    resample: str

    def prepare(self, pixels: Pixels, budget: Budget = DEFAULT_BUDGET) -> ImagePlan:
        budget.check_fixed(self.tokens)
        width, height = self.size((pixels.shape[1], pixels.shape[0]))
        scaled = resize(pixels, width, height, self.resample)
        more = ((0, -height % self.patch), (0, -width % self.patch), (0, 0))
        tile = self.normalize(np.pad(scaled, more))
        return ImagePlan((tile,), ((tile.shape[2], tile.shape[1]),), self.tokens)

    def size(self, size: Size) -> Size:
        """The (width, height) that a picture is scaled to."""
        width, height = size
        scale = self.side / max(size)
        if width >= height:
            return self.side, max(int(height * scale), self.shortest)
        return max(int(width * scale), self.shortest), self.side

    def max_tokens(self, budget: Budget = DEFAULT_BUDGET) -> int:
        budget.check_fixed(self.tokens)
        return self.tokens

    def tile_type(self) -> Type:
        return tile_of(self.side, self.side)

    largest_tile_type = tile_type


def read_within_square(
    image: Settings, side: int, patch: int, tokens: int, normalize: Normalize | None = None
) -> WithinSquare:
    """Read it from an image processor's settings. Raises ModelError for bounds that do not fit."""
    shortest = image.count("min_image_size", SHORTEST)
    if shortest > side or side % patch:
        raise ModelError(
            f"{image.where}: edges of {shortest} to {side} pixels in patches of {patch}, expected "
            "min_image_size up to a longer edge of whole patches"
        )
    return WithinSquare(
        side=side,
        shortest=shortest,
        patch=patch,
        tokens=tokens,
        normalize=normalize or read_normalize(image),
        resample=read_resample(image, 3),
    )
