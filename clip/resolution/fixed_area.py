"""Pictures of any size, scaled up or down to nearly the same number of tokens, their sides kept in
ratio and cut to whole tokens.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from mtmd.base.errors import ModelError, OptionError
from mtmd.base.text import plural
from mtmd.clip.image.pixels import Normalize, Pixels, read_normalize
from mtmd.clip.image.resize import read_resample, resize
from mtmd.clip.image.tensor_resize import MODES, resize_tensor
from mtmd.clip.resolution.resolution import ImagePlan, tile_of
from mtmd.clip.resolution.sizes import squarest_grid
from mtmd.clip.token_budget import DEFAULT_BUDGET, Budget
from mtmd.kernels.checkpoint.settings import Settings
from mtmd.kernels.graph import Type


@dataclass(frozen=True)
class FixedArea:
    """A token is a square of `cell` pixels a side. A picture takes up to `tokens` of them; `sizes`
    are the numbers that a budget can choose in its place, the smallest first. `by_tensor`: resized
    as torchvision does, not as Pillow.
    """

    cell: int
    tokens: int
    sizes: tuple[int, ...]
    normalize: Normalize
    resample: str
    by_tensor: bool = False

    def prepare(self, pixels: Pixels, budget: Budget = DEFAULT_BUDGET) -> ImagePlan:
        given = pixels.shape[0], pixels.shape[1]
        (rows, columns), usual = self.grid(*given, budget), self.grid(*given)
        tokens, width, height = rows * columns, columns * self.cell, rows * self.cell
        notes = (
            ()
            if (rows, columns) == usual
            else (
                f"shown in {plural(tokens, 'token')} by the image budget, {math.prod(usual)} "
                "without it",
            )
        )
        scale = resize_tensor if self.by_tensor else resize
        tile = self.normalize(scale(pixels, width, height, self.resample))
        return ImagePlan((tile,), ((width, height),), tokens, notes=notes)

    def grid(self, height: int, width: int, budget: Budget = DEFAULT_BUDGET) -> tuple[int, int]:
        """Rows and columns of tokens. Raises OptionError for a budget below the smallest size."""
        grids = [largest_grid(height, width, self.cell, size) for size in self._sizes(budget)]
        return next(
            (grid for grid in grids if math.prod(grid) >= (budget.min_tokens or 0)), grids[-1]
        )

    def max_tokens(self, budget: Budget = DEFAULT_BUDGET) -> int:
        return self._sizes(budget)[-1]

    def tile_type(self) -> Type:
        """A square picture's."""
        rows, columns = self.grid(1, 1)
        return tile_of(columns * self.cell, rows * self.cell)

    def largest_tile_type(self) -> Type:
        """The squarest of those with the most tokens."""
        rows, columns = squarest_grid(self.tokens)
        return tile_of(columns * self.cell, rows * self.cell)

    def _sizes(self, budget: Budget) -> list[int]:
        """The largest that the budget allows and, where it sets a least number of tokens and no
        most, those above, for pictures that come out with fewer.
        """
        _, high = budget.limits(self.sizes[0], self.tokens)
        if high < self.sizes[0]:
            raise OptionError(
                f"image_max_tokens is {high}; this model shows a picture in up to {self.sizes[0]} "
                "tokens or more, raise it"
            )
        maximum = max(size for size in self.sizes if size <= high)
        return [
            maximum,
            *(
                size
                for size in self.sizes
                if size > maximum and budget.min_tokens and budget.max_tokens is None
            ),
        ]


def largest_grid(height: int, width: int, cell: int, tokens: int) -> tuple[int, int]:
    """Rows and columns of up to `tokens` cells, in the ratio of a picture of height x width pixels
    and as many as fit (transformers' `get_aspect_ratio_preserving_size`, its arithmetic step by
    step).
    """
    factor = math.sqrt(tokens * cell**2 / (height * width))
    rows, columns = math.floor(factor * height / cell), math.floor(factor * width / cell)
    if rows == 0:
        return 1, min(width // height, tokens)
    if columns == 0:
        return min(height // width, tokens), 1
    return rows, columns


def read_fixed_area(
    image: Settings,
    *,
    patch: int,
    pool: int,
    sizes: tuple[int, ...],
    usual: int,
    by_tensor: bool = False,
) -> FixedArea:
    """Read it from an image processor's settings; `patch` and `pool` are config.json's, `usual` the
    size where none is set. `by_tensor`: transformers has the processor for torchvision alone.
    Raises ModelError where the two do not fit together.
    """
    for key, expected, default in (("patch_size", patch, 16), ("pooling_kernel_size", pool, 3)):
        if (value := image.count(key, default)) != expected:
            raise ModelError(
                f"{image.where}: {key} is {value}, expected {expected} as config.json says; "
                "correct one of them"
            )
    plain = (
        {}
        if image.flag("do_normalize", False)
        else {"do_normalize": True, "image_mean": None, "image_std": None}
    )
    normalize = read_normalize(
        Settings({**image.values, **plain}, image.where), (0.0,) * 3, (1.0,) * 3
    )
    return FixedArea(
        cell=patch * pool,
        tokens=image.choice("max_soft_tokens", sizes, usual),
        sizes=sizes,
        normalize=normalize,
        resample=read_resample(image, 3, MODES if by_tensor else ()),
        by_tensor=by_tensor,
    )
