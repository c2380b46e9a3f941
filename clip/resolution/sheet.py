"""Every picture in its shape on one sheet of paper, in the middle, with zeros around it: scaled by
its shorter edge, then down until it fits.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from mtmd.base.errors import ModelError
from mtmd.clip.image.pixels import Normalize, Pixels, read_normalize
from mtmd.clip.image.resize import read_resample, resize
from mtmd.clip.resolution.fixed_square import scaled_to_short_edge
from mtmd.clip.resolution.resolution import ImagePlan, tile_of
from mtmd.clip.resolution.sizes import Size
from mtmd.clip.token_budget import DEFAULT_BUDGET, Budget
from mtmd.kernels.checkpoint.settings import Settings
from mtmd.kernels.graph import Type


@dataclass(frozen=True)
class Sheet:
    """A tile of `width` by `height` pixels, of `tokens`, for every picture. `turned`: a picture
    that is wide where the sheet is high, or high where it is wide, is turned to the right first.
    """

    width: int
    height: int
    tokens: int
    normalize: Normalize
    resample: str
    turned: bool

    def prepare(self, pixels: Pixels, budget: Budget = DEFAULT_BUDGET) -> ImagePlan:
        budget.check_fixed(self.tokens)
        height, width = pixels.shape[:2]
        if self.turned and (self.height - self.width) * (height - width) < 0:
            pixels = np.rot90(pixels, 3)
        size = scaled_to_short_edge((pixels.shape[1], pixels.shape[0]), self._short)
        scaled = resize(np.ascontiguousarray(pixels), *size, self.resample)
        width, height = self._fitting(size)
        scaled = resize(scaled, width, height, self.resample)
        top, left = (self.height - height) // 2, (self.width - width) // 2
        sheet = np.zeros((self.height, self.width, 3), np.uint8)
        sheet[top : top + height, left : left + width] = scaled
        return ImagePlan((self.normalize(sheet),), ((self.width, self.height),), self.tokens)

    @property
    def _short(self) -> int:
        return min(self.width, self.height)

    def _fitting(self, size: Size) -> Size:
        """The size at which a picture fits, whose shorter edge is the sheet's."""
        width, height = min(size[0], self.width), min(size[1], self.height)
        if (width, height) == size:
            return size
        if size[1] > size[0]:
            return int(size[0] * height / size[1]), height
        return width, int(size[1] * width / size[0])

    def max_tokens(self, budget: Budget = DEFAULT_BUDGET) -> int:  # noqa: ARG002
        return self.tokens

    def tile_type(self) -> Type:
        return tile_of(self.width, self.height)

    largest_tile_type = tile_type


def read_sheet(image: Settings, size: Size, tokens: int) -> Sheet:
    """Read it from an image processor's settings (transformers' DonutImageProcessor), with its
    defaults. Raises ModelError where no sheet of this width and height comes out.
    """
    for key in ("do_thumbnail", "do_pad"):
        image.choice(key, (True,), True)
    image.choice("do_center_crop", (False,), False)
    image.choice("do_crop_margin", (False,), False)
    stated = image.get("size", {"height": 2560, "width": 1920})
    if isinstance(stated, list) and len(stated) == 2:  # of older settings the width comes first
        stated = {"height": stated[1], "width": stated[0]}
    part = Settings(stated, f"{image.where}: size")
    stated_size = part.count("width"), part.count("height")
    if stated_size != size:
        raise ModelError(
            f"{part.where} is {stated_size[0]} x {stated_size[1]}, expected {size[0]} x {size[1]}, "
            "the width and height that image_size of config.json says; correct one"
        )
    return Sheet(
        width=size[0],
        height=size[1],
        tokens=tokens,
        normalize=read_normalize(image),
        resample=read_resample(image, 2),
        turned=image.flag("do_align_long_axis", False),
    )
