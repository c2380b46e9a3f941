"""Windows of a mel spectrum for encoders whose positions are stacked, the last stack filled up."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from mtmd.clip.audio.audio import Samples
from mtmd.clip.audio.mel import Mel
from mtmd.clip.image.pixels import Normalize
from mtmd.clip.resolution.resolution import ImagePlan
from mtmd.clip.token_budget import DEFAULT_BUDGET, Budget
from mtmd.kernels.graph import Type

SHORTEST = 2  # frames


@dataclass(frozen=True)
class MelStacks:
    """Windows of at most `frames` mel frames, an even number, of one spectrum; each gives a token
    for every `stride` frames that have begun, and the last is as long as what is left. Behind
    others it is of an even number of frames, too, filled up with zeros.

    A tile is fp32 [1, frames, bins].
    """

    mel: Mel
    frames: int
    stride: int

    normalize = Normalize((0.0,), (1.0,), 1.0)

    def prepare(self, samples: NDArray[Any], budget: Budget = DEFAULT_BUDGET) -> ImagePlan:  # noqa: ARG002
        return self.windows(samples)

    def windows(self, samples: Samples) -> ImagePlan:
        padded = np.zeros(self._count(len(samples)) * self.mel.hop, np.float32)
        padded[: len(samples)] = samples
        spectrum = self.mel(padded)
        tiles = [spectrum[at : at + self.frames] for at in range(0, len(spectrum), self.frames)]
        if len(tiles) > 1 and len(tiles[-1]) % 2:
            tiles[-1] = np.pad(tiles[-1], ((0, 1), (0, 0)))
        sizes = tuple((self.mel.bins, len(tile)) for tile in tiles)
        return ImagePlan(tuple(tile[None] for tile in tiles), sizes, self.token_count(len(samples)))

    def token_count(self, samples: int) -> int:
        """Return how many tokens so many samples take."""
        windows, rest = divmod(self._count(samples), self.frames)
        return windows * self.max_tokens() - (-rest // self.stride)

    def _count(self, samples: int) -> int:
        return max(-(-samples // self.mel.hop), SHORTEST)

    def max_tokens(self, budget: Budget = DEFAULT_BUDGET) -> int:  # noqa: ARG002
        """Return the tokens of a window."""
        return -(-self.frames // self.stride)

    def tile_type(self) -> Type:
        return Type.contiguous((1, self.frames, self.mel.bins), torch.float32)

    def largest_tile_type(self) -> Type:
        return self.tile_type()
