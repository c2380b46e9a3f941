"""Interface of the ways in which a picture is prepared for an encoder.

Each file beside this one is a way: how a picture of any size becomes tiles. A family names its way
as `resolution`; whoever has to know about pictures asks that.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Protocol, runtime_checkable

import numpy as np
import torch

from mtmd.clip.image.pixels import Normalize, Pixels, left_as_bytes
from mtmd.clip.image.resize import resized_by
from mtmd.clip.token_budget import DEFAULT_BUDGET, Budget
from mtmd.kernels.graph import Type

WITHOUT_GRID = (1, 1)  # of an image token that has positions as text has
USUAL_SIDE = 448  # pixels of the square that the warm-up asks about where any size is taken


@dataclass(frozen=True)
class ImagePlan:
    """One prepared picture: pixel tiles for the encoder, and what its tokens stand for.

    `tiles` are fp32 [3, Y, X], normalised, or bytes of a group of frames (`clip/video/`), `sizes`
    their (width, height) in pixels. `tokens` is the number of image tokens of all of them. `cut`:
    the (rows, columns) of tiles that the picture is cut into, (1, 1) where it goes in whole.
    `grids`: for families that give image tokens a row and a column as positions, (rows, columns) of
    each run of image tokens, else empty; `located`: tokens keep their place in the prompt as a
    position as well, rows and columns count from 0, and the picture's number is a position, too.
    `order`: which of the tiles' tokens, counted through all
    tiles, the image tokens are, -1 being the family's separator; None for all, as they come.
    `weights`, fp32 [T, N]: each image token is a mixture of N such tokens, `order` [T, N].
    `runs`: image tokens of each frame of a group, where they differ.
    `notes` say for the receipt what was done to the picture that its owner may not expect.
    `shrunk_from`: the tokens it would take if there were more memory, None where there is enough.
    `normalize`: how tiles that are bytes become numbers; they are what was cut, not normalised yet.
    `resized_there`: a device resized the picture, and the host did none of it.
    """

    tiles: tuple[np.ndarray, ...]
    sizes: tuple[tuple[int, int], ...]
    tokens: int
    cut: tuple[int, int] = (1, 1)
    grids: tuple[tuple[int, int], ...] = ()
    order: np.ndarray | None = None
    weights: np.ndarray | None = None
    notes: tuple[str, ...] = field(default=())
    shrunk_from: int | None = None
    normalize: Normalize | None = None
    resized_there: bool = False
    located: bool = False
    runs: tuple[int, ...] = ()

    def numbers(self) -> list[np.ndarray]:
        """The tiles as an encoder reads them, fp32."""
        way = self.normalize
        return [way.planes(t) if way and t.dtype == np.uint8 else t for t in self.tiles]


class Resolution(Protocol):
    """A way from a picture of any size to tiles, bit for bit the reference processor's. The last
    that it does to a tile is to `normalize` it.
    """

    @property
    def normalize(self) -> Normalize: ...

    def prepare(self, pixels: Pixels, budget: Budget = DEFAULT_BUDGET) -> ImagePlan:
        """Prepare pixels, uint8 [Y, X, 3]. Raises OptionError for a budget that cannot be kept,
        with the numbers; ImageError for a picture of a shape that is not taken.
        """

    def max_tokens(self, budget: Budget = DEFAULT_BUDGET) -> int:
        """The most image tokens that one picture takes."""

    def tile_type(self) -> Type:
        """The tile the warm-up asks about."""

    def largest_tile_type(self) -> Type:
        """The largest tile that any picture can lead to."""


def prepare_blank(
    way: Resolution, width: int, height: int, budget: Budget = DEFAULT_BUDGET
) -> ImagePlan:
    """Return what a picture of so many pixels becomes: all that its size decides. Its tiles have
    their shapes, and bytes of no meaning: nothing is resized or normalised. Raises as `prepare`
    does.
    """
    with left_as_bytes(), resized_by(lambda _, width, height, __: _blank(width, height)):
        return way.prepare(_blank(width, height), budget)


def _blank(width: int, height: int) -> Pixels:
    return np.zeros((height, width, 3), np.uint8)


def closed(plan: ImagePlan, separators: int) -> ImagePlan:
    """The same with so many of the family's separators after its tokens."""
    if not separators:
        return plan
    order = np.arange(plan.tokens) if plan.order is None else plan.order
    weights = plan.weights
    rows: np.ndarray = np.full((separators, *order.shape[1:]), -1)
    if weights is not None:
        alone = np.zeros((separators, weights.shape[1]), np.float32)
        alone[:, 0] = 1
        weights = np.concatenate((weights, alone))
    order = np.concatenate((order, rows))
    return replace(plan, tokens=plan.tokens + separators, order=order, weights=weights)


@runtime_checkable
class AmongSeveral(Protocol):
    """A way that shows one of several pictures of a conversation as another way does."""

    among: Resolution
    """The way of one of several; `Budget.several` says that a picture is."""


def tile_of(width: int, height: int) -> Type:
    """The type of a tile of so many pixels."""
    return Type.contiguous((3, height, width), torch.float32)
