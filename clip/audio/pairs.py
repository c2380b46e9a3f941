"""A log-mel spectrum of neighbouring frames in pairs, of recordings in long pieces."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from mtmd.clip.audio.audio import Samples
from mtmd.clip.audio.mel import FLOOR, RANGE, RATE
from mtmd.clip.audio.usm import htk_filters
from mtmd.clip.image.pixels import Normalize
from mtmd.clip.resolution.resolution import ImagePlan
from mtmd.clip.token_budget import DEFAULT_BUDGET, Budget
from mtmd.kernels.checkpoint.settings import MAX_WIDTH, Settings
from mtmd.kernels.graph import Type


@dataclass(frozen=True)
class PairMel:
    """`bins` of the spectrum up to half the rate, from windows of `window` samples in the middle of
    a transform of `size`, each `hop` after the other.
    """

    bins: int
    size: int = 512
    window: int = 400
    hop: int = 160
    rate: int = RATE

    @property
    def shortest(self) -> int:
        """Samples that have a pair, and as many as the spectrum reflects at both ends."""
        return max(self.hop, self.size // 2 + 1)

    def pairs(self, samples: int) -> int:
        return (samples // self.hop + 1) // 2

    def __call__(self, samples: Samples) -> NDArray[np.float32]:
        """samples [N], N >= `shortest` -> [pairs(N), 2 * bins]"""
        spectrum = torch.stft(
            torch.from_numpy(samples),
            self.size,
            self.hop,
            self.window,
            torch.hann_window(self.window),
            return_complex=True,
        )
        filters = torch.from_numpy(htk_filters(self.bins, self.size, self.rate, self.rate / 2))
        logs = (filters.float().T @ spectrum.abs() ** 2).clamp(min=FLOOR).log10().T
        logs = torch.maximum(logs, logs.max() - RANGE) / 4 + 1
        pairs: NDArray[np.float32] = (
            logs[: 2 * self.pairs(len(samples))].reshape(-1, 2 * self.bins).contiguous().numpy()
        )
        return pairs


@dataclass(frozen=True)
class PairWindows:
    """Pieces of `frames` pairs, the last as long as what is left. A group of `group` pairs that has
    begun gives `tokens` tokens; a piece is of whole groups.

    A tile is fp32 [1, pairs, 2 * bins].
    """

    mel: PairMel
    frames: int
    group: int
    tokens: int

    normalize = Normalize((0.0,), (1.0,), 1.0)

    def prepare(self, samples: NDArray[Any], budget: Budget = DEFAULT_BUDGET) -> ImagePlan:  # noqa: ARG002
        return self.windows(samples)

    def windows(self, samples: Samples) -> ImagePlan:
        if (missing := self.mel.shortest - len(samples)) > 0:
            samples = np.pad(samples, (0, missing))
        spectrum = self.mel(samples)
        tiles = [spectrum[at : at + self.frames] for at in range(0, len(spectrum), self.frames)]
        sizes = tuple((2 * self.mel.bins, len(tile)) for tile in tiles)
        return ImagePlan(tuple(tile[None] for tile in tiles), sizes, self.token_count(len(samples)))

    def token_count(self, samples: int) -> int:
        """Return how many tokens so many samples take."""
        pairs = self.mel.pairs(max(samples, self.mel.shortest))
        return -(-pairs // self.group) * self.tokens

    def max_tokens(self, budget: Budget = DEFAULT_BUDGET) -> int:  # noqa: ARG002
        """Return the tokens of a piece."""
        return self.frames // self.group * self.tokens

    def tile_type(self) -> Type:
        return Type.contiguous((1, self.frames, 2 * self.mel.bins), torch.float32)

    def largest_tile_type(self) -> Type:
        return self.tile_type()


def read_pairs(features: Settings, bins: int) -> PairMel:
    """Read it from a feature extractor's settings, with transformers' defaults; they have to fit
    the encoder's `bins`. Raises ModelError.
    """
    c = Settings({**features.values, **features.part("melspec_kwargs").values}, features.where)
    c.choice("n_mels", (bins,), bins)
    mel = PairMel(
        bins,
        c.count("n_fft", 512, maximum=MAX_WIDTH),
        c.count("win_length", 400, maximum=MAX_WIDTH),
        c.count("hop_length", 160, maximum=MAX_WIDTH),
        c.count("sampling_rate", RATE),
    )
    c.choice("win_length", range(1, mel.size + 1), mel.window)
    c.choice("sample_rate", (mel.rate,), mel.rate)
    return mel
