"""Kaldi's log-mel spectrum (kaldi-asr.org), of frames that no sample is added to, as transformers'
feature extractor of Phi-4-multimodal computes it, in pieces.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from mtmd.base.errors import ModelError
from mtmd.clip.audio.audio import Samples
from mtmd.clip.audio.mel import RATE, triangles
from mtmd.clip.image.pixels import Normalize
from mtmd.clip.resolution.resolution import ImagePlan
from mtmd.clip.token_budget import DEFAULT_BUDGET, Budget
from mtmd.kernels.checkpoint.settings import MAX_WIDTH, Settings
from mtmd.kernels.graph import Type

WHOLE = 32_768  # a sample of 1 as a number of 16 bits, which powers are of
FLOOR = 1.0  # of powers


@dataclass(frozen=True)
class KaldiMel:
    """`bins` of the spectrum up to `highest` Hz, from frames of `window` samples, each
    `hop` after the other, by a transform of `size`; `emphasis` of the sample before is subtracted.
    """

    bins: int
    window: int = 400
    hop: int = 160
    size: int = 512
    emphasis: float = 0.97
    highest: float = 7690.0
    rate: int = RATE

    def frames(self, samples: int) -> int:
        """Return how many frames so many samples have, a window at least."""
        return (samples - self.window) // self.hop + 1

    def __call__(self, samples: Samples) -> NDArray[np.float32]:
        """samples [N], N >= `window` -> [frames(N), bins]"""
        frames = torch.from_numpy(samples).unfold(0, self.window, self.hop)
        before = torch.cat((frames[:, :1], frames[:, :-1]), 1)
        sharp = (frames - self.emphasis * before) * WHOLE
        shape = torch.hamming_window(self.window, periodic=False, dtype=torch.float64)
        spectrum = torch.fft.rfft(shape * sharp, n=self.size, dim=1).to(torch.complex64)
        filters = kaldi_filters(self.bins, self.size, self.rate, self.highest)
        made: NDArray[np.float32] = (
            (spectrum.abs() ** 2 @ filters).clamp(min=FLOOR).log().contiguous().numpy()
        )
        return made


@lru_cache(maxsize=4)
def kaldi_filters(bins: int, size: int, rate: int, highest: float) -> torch.Tensor:
    """Triangles over mels of the frequencies of a spectrum, [1 + size / 2, bins]"""
    edges = np.linspace(0.0, float(_mels(np.array(highest))), bins + 2)
    frequencies = _mels(np.arange(1 + size // 2) * rate / size)
    return torch.from_numpy(triangles(edges, frequencies)).float()


def _mels(hertz: NDArray[np.float64]) -> NDArray[np.float64]:
    result: NDArray[np.float64] = 1127.0 * np.log(1.0 + hertz / 700.0)
    return result


@dataclass(frozen=True)
class KaldiPieces:
    """Pieces of `frames` frames, the last as long as what is left, whose encoder gives a token for
    every `stride` frames that have begun. Behind the bins stands another number, `mark`.

    A tile is fp32 [1, frames, bins + 1].
    """

    mel: KaldiMel
    frames: int
    stride: int
    mark: float = 0.0

    normalize = Normalize((0.0,), (1.0,), 1.0)

    def prepare(self, samples: NDArray[Any], budget: Budget = DEFAULT_BUDGET) -> ImagePlan:  # noqa: ARG002
        return self.windows(samples)

    def windows(self, samples: Samples) -> ImagePlan:
        if (missing := self.mel.window - len(samples)) > 0:
            samples = np.pad(samples, (0, missing))
        tiles = []
        for at in range(0, self.mel.frames(len(samples)), self.frames):
            begin = at * self.mel.hop
            stop = begin + (self.frames - 1) * self.mel.hop + self.mel.window
            spectrum = self.mel(samples[begin:stop])
            tiles.append(np.pad(spectrum, ((0, 0), (0, 1)), constant_values=self.mark)[None])
        sizes = tuple((self.mel.bins + 1, tile.shape[1]) for tile in tiles)
        return ImagePlan(tuple(tiles), sizes, self.token_count(len(samples)))

    def token_count(self, samples: int) -> int:
        """Return how many tokens so many samples take."""
        return -(-self.mel.frames(max(samples, self.mel.window)) // self.stride)

    def max_tokens(self, budget: Budget = DEFAULT_BUDGET) -> int:  # noqa: ARG002
        """Return the tokens of a piece."""
        return self.frames // self.stride

    def tile_type(self) -> Type:
        return Type.contiguous((1, self.frames, self.mel.bins + 1), torch.float32)

    def largest_tile_type(self) -> Type:
        return self.tile_type()


def read_kaldi(c: Settings, bins: int) -> KaldiMel:
    """Read it from a feature extractor's settings, with transformers' defaults; they have to fit
    the encoder's `bins`. Raises ModelError.
    """
    c.choice("feature_size", (bins,), bins)
    c.choice("audio_feat_stride", (1,), 1)
    c.choice("mel_min_frequency", (0, 0.0), 0)
    mel = KaldiMel(
        bins,
        c.count("win_length", 400, maximum=MAX_WIDTH),
        c.count("hop_length", 160, maximum=MAX_WIDTH),
        c.count("n_fft", 512, maximum=MAX_WIDTH),
        c.number("preemphasis", 0.97),
        c.number("mel_max_frequency", 7690.0),
        c.choice("sampling_rate", (RATE,), RATE),
    )
    if not mel.hop <= mel.window <= mel.size:
        raise ModelError(
            f"{c.where}: windows of {mel.window} samples in a transform of {mel.size}, each "
            f"{mel.hop} after the other; expected steps no longer than a window, and a window that "
            "fits"
        )
    return mel
