"""Windows of a mel spectrum for encoders that convolve each second of it by itself."""

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

SECOND = 100  # mel frames
STRIDE = 8  # of three convolutions
TOKENS = -(-SECOND // STRIDE)  # of a second


@dataclass(frozen=True)
class MelSeconds:
    """Windows of `frames` mel frames, whole seconds, each of which gives a token for every eight
    frames that have begun. The last second is filled up with zeros as far as its tokens look.
    Audio of less than `shortest` samples is filled up with silence. With `bare`, less than a second
    in all is not filled up.

    A tile is fp32 [1, frames, bins].
    """

    mel: Mel
    frames: int
    shortest: int
    bare: bool = False

    normalize = Normalize((0.0,), (1.0,), 1.0)

    def prepare(self, samples: NDArray[Any], budget: Budget = DEFAULT_BUDGET) -> ImagePlan:  # noqa: ARG002
        return self.windows(samples)

    def windows(self, samples: Samples) -> ImagePlan:
        if (missing := self._minimum - len(samples)) > 0:
            samples = np.pad(samples, (0, missing))
        spectrum = self.mel(samples)
        seconds, rest = divmod(len(spectrum), SECOND)
        last = -(-rest // STRIDE) * STRIDE
        end = seconds * SECOND + min(last, SECOND)
        if self.bare and not seconds:
            end = rest
        padded = np.pad(spectrum, ((0, end - len(spectrum)), (0, 0)))
        tiles = [padded[at : at + self.frames] for at in range(0, end, self.frames)]
        return ImagePlan(
            tuple(tile[None] for tile in tiles),
            tuple((self.mel.bins, len(tile)) for tile in tiles),
            self._tokens(len(spectrum)),
        )

    def token_count(self, samples: int) -> int:
        """Return how many tokens so many samples take."""
        return self._tokens(max(samples, self._minimum) // self.mel.hop)

    @property
    def _minimum(self) -> int:
        """Return the fewest samples: a spectrum reflects half a window of them at both ends."""
        return max(self.shortest, self.mel.window // 2 + 1)

    @staticmethod
    def _tokens(frames: int) -> int:
        return frames // SECOND * TOKENS + -(-(frames % SECOND) // STRIDE)

    def max_tokens(self, budget: Budget = DEFAULT_BUDGET) -> int:  # noqa: ARG002
        """Return the tokens of a window."""
        return self.frames // SECOND * TOKENS

    def tile_type(self) -> Type:
        return Type.contiguous((1, self.frames, self.mel.bins), torch.float32)

    def largest_tile_type(self) -> Type:
        return self.tile_type()
