"""Pictures of any size: kept in shape, rounded to whole groups of patches, within limits on the
pixels (arXiv:2409.12191).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TypeAlias

from mtmd.base.errors import ModelError, OptionError
from mtmd.base.text import plural
from mtmd.clip.image.pixels import (
    CLIP_MEAN,
    CLIP_STD,
    Normalize,
    Pixels,
    gguf_image,
    read_normalize,
)
from mtmd.clip.image.resize import read_resample, resize
from mtmd.clip.resolution.resolution import USUAL_SIDE, WITHOUT_GRID, ImagePlan, tile_of
from mtmd.clip.resolution.sizes import MAX_RATIO, squarest_grid, too_narrow, within
from mtmd.clip.token_budget import DEFAULT_BUDGET, Budget
from mtmd.kernels.checkpoint.settings import Settings
from mtmd.kernels.graph import Type

PIXELS = (56 * 56, 28 * 28 * 1280)  # transformers' defaults
GGUF_TOKENS = (
    4,
    16384,
)  # the limits of every published Qwen2-VL and Qwen2.5-VL; GGUF files do not say


Enlarge: TypeAlias = "Callable[[int, int, int], tuple[int, int]]"
"""Way to scale height and width up to a factor, as a reference rounds it."""


@dataclass(frozen=True)
class DynamicResolution:
    """Patches of `patch` pixels a side, `merge` x `merge` of which become one token; from `minimum`
    to `maximum` pixels a picture. `enlarge` scales one narrower than a token up to it first.
    `separated`: one more token ends each row, and one stands before and one after them all.
    `on_grid`: a token's position is its row and column, not the number of tokens before it.
    """

    patch: int
    merge: int
    minimum: int
    maximum: int
    normalize: Normalize
    resample: str
    enlarge: Enlarge | None = None
    separated: bool = False
    on_grid: bool = True

    @property
    def factor(self) -> int:
        """Pixels on a side of what becomes one token."""
        return self.patch * self.merge

    def prepare(self, pixels: Pixels, budget: Budget = DEFAULT_BUDGET) -> ImagePlan:
        """One tile, and an image token for each group of patches, which lie on a grid."""
        given = pixels.shape[0], pixels.shape[1]
        (height, width), usual = self.size(*given, budget), self.size(*given)
        notes = (
            ()
            if (height, width) == usual
            else (
                f"scaled to {width} x {height} by the image budget, {usual[1]} x {usual[0]} "
                "without it",
            )
        )
        rows, columns = height // self.factor, width // self.factor
        tile = self.normalize(resize(pixels, width, height, self.resample))
        ends = (WITHOUT_GRID,) * self.separated
        return ImagePlan(
            (tile,),
            ((width, height),),
            self.tokens(rows, columns),
            grids=(*ends, (rows, columns + self.separated), *ends) if self.on_grid else (),
            located=self.separated,
            notes=notes,
        )

    def tokens(self, rows: int, columns: int) -> int:
        return rows * (columns + 1) + 2 if self.separated else rows * columns

    def size(self, height: int, width: int, budget: Budget = DEFAULT_BUDGET) -> tuple[int, int]:
        """Height and width in pixels that a picture is scaled to. Raises ImageError for one that is
        too narrow, OptionError for a budget that cannot be kept.
        """
        maximum = cells = budget.max_tokens
        while True:
            rows, columns = self._grid(height, width, budget)
            if maximum is None or cells is None or self.tokens(rows, columns) <= maximum:
                return rows * self.factor, columns * self.factor
            if cells == 1:
                raise OptionError(
                    f"a picture takes at least {plural(self.tokens(1, 1), 'token')} with this "
                    f"model, more than image_max_tokens {maximum}; raise it"
                )
            cells = max(1, min(cells - 1, cells * maximum // self.tokens(rows, columns)))
            minimum = budget.min_tokens and min(budget.min_tokens, cells)
            budget = replace(budget, max_tokens=cells, min_tokens=minimum)

    def _grid(self, height: int, width: int, budget: Budget) -> tuple[int, int]:
        """Rows and columns of groups of patches."""
        scaled = smart_resize(
            height, width, self.factor, *self._pixels(budget), enlarge=self.enlarge
        )
        rows, columns = (side // self.factor for side in scaled)
        if budget.max_tokens is not None:  # rounded up beyond what was asked for
            rows, columns = within(rows, columns, budget.max_tokens)
        return rows, columns

    def max_tokens(self, budget: Budget = DEFAULT_BUDGET) -> int:
        """The most that any picture takes: narrow and small ones are rounded up, beyond the limit
        on the pixels if need be.
        """
        cells = self._max_cells(budget)
        if budget.max_tokens is not None or not self.separated:
            return cells
        return cells + math.isqrt(MAX_RATIO * cells) + 3

    def _max_cells(self, budget: Budget = DEFAULT_BUDGET) -> int:
        """The most groups of patches."""
        if budget.max_tokens is not None:
            return budget.max_tokens
        minimum, maximum = self._pixels(budget)
        small = -(-minimum // self.factor**2)
        # Each side of a picture that is scaled up is rounded up: to two rows at worst where one and
        # a bit were meant.
        return max(
            maximum // self.factor**2,
            math.isqrt(MAX_RATIO * maximum) // self.factor,
            2 * small,
            math.isqrt(MAX_RATIO * small) + 1,
        )

    def tile_type(self) -> Type:
        height, width = self.size(USUAL_SIDE, USUAL_SIDE)
        return tile_of(width, height)

    def largest_tile_type(self) -> Type:
        """The squarest of those with the most tokens."""
        rows, columns = squarest_grid(self._max_cells())
        return tile_of(columns * self.factor, rows * self.factor)

    def _pixels(self, budget: Budget) -> tuple[int, int]:
        """Return the minimum and the maximum: a budget of tokens in pixels, the checkpoint's own
        limits as they are.
        """
        cell = self.factor**2
        minimum, maximum = -(-self.minimum // cell), self.maximum // cell
        low, high = budget.limits(minimum, maximum)
        return (
            self.minimum if low == minimum else low * cell,
            self.maximum if high == maximum else high * cell,
        )


def smart_resize(
    height: int,
    width: int,
    factor: int,
    minimum: int,
    maximum: int,
    *,
    enlarge: Enlarge | None = None,
) -> tuple[int, int]:
    """Height and width as multiples of `factor` with `minimum` to `maximum` pixels, nearly in the
    same ratio (transformers' `smart_resize`).
    """
    given = width, height
    if enlarge is not None:
        height, width = enlarge(height, width, factor)
    if max(height, width) > MAX_RATIO * min(height, width):
        raise too_narrow(*given)
    rows, columns = round(height / factor), round(width / factor)
    if rows * columns * factor**2 > maximum:
        shrink = math.sqrt(height * width / maximum)
        rows, columns = (
            max(1, math.floor(height / shrink / factor)),
            max(1, math.floor(width / shrink / factor)),
        )
    elif rows * columns * factor**2 < minimum:
        grow = math.sqrt(minimum / (height * width))
        rows, columns = math.ceil(height * grow / factor), math.ceil(width * grow / factor)
    return rows * factor, columns * factor


def enlarged(height: int, width: int, factor: int) -> tuple[int, int]:
    """Both sides scaled up and cut to whole pixels (transformers' GLM-4V)."""
    up = max(1.0, factor / min(height, width))
    return int(height * up), int(width * up)


def enlarged_by_side(height: int, width: int, factor: int) -> tuple[int, int]:
    """Height before width, the other side rounded (transformers' PaddleOCR-VL)."""
    if height < factor:
        height, width = factor, round(width * factor / height)
    if width < factor:
        height, width = round(height * factor / width), factor
    return height, width


def read_dynamic(
    image: Settings,
    patch: int,
    merge: int,
    *,
    frames: int = 1,
    temporal: int = 2,
    limits: tuple[int, int] = PIXELS,
    enlarge: Enlarge | None = None,
    separated: bool = False,
    on_grid: bool = True,
) -> DynamicResolution:
    """Read it from an image processor's settings; `patch`, `merge` and frames of a patch,
    `temporal`, are config.json's, and its limits, by default `limits`, count every pixel `frames`
    times. Raises ModelError where the two do not fit together.
    """
    for key, expected, default in (
        ("patch_size", patch, 14),
        ("merge_size", merge, 2),
        ("temporal_patch_size", temporal, temporal),
    ):
        if (value := image.count(key, default)) != expected:
            raise ModelError(
                f"{image.where}: {key} is {value}, expected {expected} as config.json says; "
                "correct one of them"
            )
    size = image.part("size")
    edges = (
        (size.count("shortest_edge"), size.count("longest_edge", maximum=1 << 40))
        if size.values
        else limits
    )
    minimum, maximum = (
        image.count("min_pixels", edges[0]),
        image.count("max_pixels", edges[1], maximum=1 << 40),
    )
    minimum, maximum = -(-minimum // frames), maximum // frames
    if minimum > maximum or maximum < (patch * merge) ** 2:
        raise ModelError(
            f"{image.where}: {minimum} to {maximum} pixels a picture, expected limits that allow "
            f"{(patch * merge) ** 2} and more"
        )
    return DynamicResolution(
        patch=patch,
        merge=merge,
        minimum=minimum,
        maximum=maximum,
        normalize=read_normalize(image, CLIP_MEAN, CLIP_STD),
        resample=read_resample(image, 3),
        enlarge=enlarge,
        separated=separated,
        on_grid=on_grid,
    )


def gguf_dynamic(
    keys: Settings, merge: int = 2, limits: tuple[int, int] = GGUF_TOKENS
) -> dict[str, object]:
    """Return what an image processor's settings would say, from the `clip.` keys of a GGUF;
    `limits` of tokens where it does not say.
    """
    patch = keys.count("vision.patch_size", 14)
    minimum, maximum = (tokens * (patch * merge) ** 2 for tokens in limits)
    return {
        "patch_size": patch,
        "merge_size": merge,
        "min_pixels": keys.get("vision.image_min_pixels", minimum),
        "max_pixels": keys.get("vision.image_max_pixels", maximum),
        **gguf_image(keys),
    }
