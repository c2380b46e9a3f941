"""Goes from samples to tiles of equal shape, which an encoder takes several of at once.

It answers what a `Resolution` does for pictures, so encoder, memory prediction and warm-up know
windows by the same interface.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from mtmd.clip.audio.audio import Samples
from mtmd.clip.image.pixels import Normalize
from mtmd.clip.resolution.resolution import ImagePlan, Resolution
from mtmd.clip.token_budget import DEFAULT_BUDGET, Budget
from mtmd.kernels.graph import Type


class AudioResolution(Resolution, Protocol):
    """A way from samples to tiles."""

    def windows(self, samples: Samples) -> ImagePlan:
        """Do what `prepare` does, for samples [N]."""

    def token_count(self, samples: int) -> int:
        """Return how many tokens so many samples take."""


def first_seconds(samples: Samples, limit: int, rate: int) -> tuple[Samples, tuple[str, ...]]:
    """Return as many samples as a model takes, and a note where others were left out."""
    if len(samples) <= limit:
        return samples, ()
    note = f"only the first {limit / rate:.0f} s are heard, the maximum for this model"
    return samples[:limit], (note,)


@dataclass(frozen=True)
class RawFrames:
    """Samples as they are, `samples` of them a token, in windows of `tokens` tokens; the last frame
    is filled up with silence.

    A tile is fp32 [1, tokens, samples].
    """

    samples: int
    tokens: int = 250

    normalize = Normalize((0.0,), (1.0,), 1.0)

    def prepare(self, samples: NDArray[Any], budget: Budget = DEFAULT_BUDGET) -> ImagePlan:  # noqa: ARG002
        return self.windows(samples)

    def windows(self, samples: Samples) -> ImagePlan:
        count = self.token_count(len(samples))
        windows = -(-count // self.tokens)
        padded = np.zeros((windows, 1, self.tokens, self.samples), np.float32)
        padded.reshape(-1)[: len(samples)] = samples
        size = self.samples, self.tokens
        order = np.arange(count) if count < windows * self.tokens else None
        return ImagePlan(tuple(padded), (size,) * windows, count, order=order)

    def token_count(self, samples: int) -> int:
        """Return how many tokens so many samples take."""
        return -(-samples // self.samples)

    def max_tokens(self, budget: Budget = DEFAULT_BUDGET) -> int:  # noqa: ARG002
        """Return the tokens of a window."""
        return self.tokens

    def tile_type(self) -> Type:
        return Type.contiguous((1, self.tokens, self.samples), torch.float32)

    def largest_tile_type(self) -> Type:
        return self.tile_type()
