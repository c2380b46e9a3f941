"""NeMo's log-mel spectrum, whose bins are normalised over a recording, and pieces of it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from mtmd.base.errors import ModelError
from mtmd.clip.audio.audio import Samples
from mtmd.clip.audio.mel import RATE, mel_filters
from mtmd.clip.image.pixels import Normalize
from mtmd.clip.resolution.resolution import ImagePlan
from mtmd.clip.token_budget import DEFAULT_BUDGET, Budget
from mtmd.kernels.checkpoint.settings import MAX_WIDTH, Settings
from mtmd.kernels.graph import Type

GUARD, EPS = 2.0**-24, 1e-5  # added to powers and to deviations
EMPHASIS = 0.97  # of the sample before, that is subtracted


@dataclass(frozen=True)
class NemoMel:
    """`bins` of the spectrum up to half the rate, from windows of `window` samples in the middle of
    a transform of `size`, each `hop` after the other. A frame behind the last whole hop is zero.
    """

    bins: int
    size: int = 512
    window: int = 400
    hop: int = 160
    rate: int = RATE

    def frames(self, samples: int) -> int:
        return samples // self.hop + 1

    def __call__(self, samples: Samples) -> NDArray[np.float32]:
        """samples [N] -> [frames(N), bins]"""
        x = torch.from_numpy(samples)
        spectrum = torch.stft(
            torch.cat((x[:1], x[1:] - EMPHASIS * x[:-1])),
            self.size,
            self.hop,
            self.window,
            torch.hann_window(self.window, periodic=False),
            return_complex=True,
            pad_mode="constant",
        )
        filters = mel_filters(self.bins, self.size, self.rate)
        logs = (filters.T @ spectrum.abs().pow(2) + GUARD).log().T
        whole = self.frames(len(samples)) - 1
        logs[whole:] = 0.0
        # Sums as transformers takes them: silence is a bin's value less its mean, which is rounded
        mean = logs.sum(0) / max(whole, 1)
        centered = logs - mean
        centered[whole:] = 0.0
        deviation = (centered.pow(2).sum(0) / max(whole - 1, 1)).sqrt()
        made: NDArray[np.float32] = (centered / (deviation + EPS)).contiguous().numpy()
        return made


@dataclass(frozen=True)
class NemoPieces:
    """Pieces of `frames` frames, the last as long as what is left, whose encoder gives a token for
    every `stride` frames that have begun.

    A tile is fp32 [1, frames, bins].
    """

    mel: NemoMel
    frames: int
    stride: int

    normalize = Normalize((0.0,), (1.0,), 1.0)

    def prepare(self, samples: NDArray[Any], budget: Budget = DEFAULT_BUDGET) -> ImagePlan:  # noqa: ARG002
        return self.windows(samples)

    def windows(self, samples: Samples) -> ImagePlan:
        spectrum = self.mel(samples)
        tiles = [spectrum[at : at + self.frames] for at in range(0, len(spectrum), self.frames)]
        sizes = tuple((self.mel.bins, len(tile)) for tile in tiles)
        return ImagePlan(tuple(tile[None] for tile in tiles), sizes, self.token_count(len(samples)))

    def token_count(self, samples: int) -> int:
        """Return how many tokens so many samples take."""
        return -(-self.mel.frames(samples) // self.stride)

    def max_tokens(self, budget: Budget = DEFAULT_BUDGET) -> int:  # noqa: ARG002
        """Return the tokens of a piece."""
        return self.frames // self.stride

    def tile_type(self) -> Type:
        return Type.contiguous((1, self.frames, self.mel.bins), torch.float32)

    def largest_tile_type(self) -> Type:
        return self.tile_type()


def read_nemo(c: Settings, bins: int) -> NemoMel:
    """Read it from a preprocessor's settings in NeMo's words, with those of the authors where they
    say nothing; they have to fit the encoder's `bins`. Raises ModelError.
    """
    c.choice("features", (bins,), bins)
    c.choice("normalize", ("per_feature",), "per_feature")
    c.choice("window", ("hann",), "hann")
    c.choice("log", (True,), True)
    c.choice("frame_splicing", (1,), 1)
    c.choice("pad_to", (0,), 0)
    c.choice("pad_value", (0.0, 0), 0.0)
    c.choice("preemph", (EMPHASIS,), EMPHASIS)
    rate = c.choice("sample_rate", (RATE,), RATE)
    size = c.count("n_fft", 512, maximum=MAX_WIDTH)
    window, hop = (
        int(min(c.number(f"window_{part}", usual) * rate, MAX_WIDTH))
        for part, usual in (("size", 0.025), ("stride", 0.01))
    )
    if not 0 < hop <= window <= size:
        raise ModelError(
            f"{c.where}: windows of {window} samples in a transform of {size}, each {hop} after "
            "the other; expected steps no longer than a window, and a window that fits"
        )
    return NemoMel(bins, size, window, hop, rate)
