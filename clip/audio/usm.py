"""The Universal Speech Model's log-mel spectrum (arXiv:2303.01037) as transformers' feature
extractors of Gemma compute it, of recordings up to a longest one.
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
from mtmd.clip.audio.mel import HIGHEST, RATE, triangles
from mtmd.clip.audio.windows import first_seconds
from mtmd.clip.image.pixels import Normalize
from mtmd.clip.resolution.resolution import ImagePlan
from mtmd.clip.token_budget import DEFAULT_BUDGET, Budget
from mtmd.kernels.checkpoint.settings import Settings
from mtmd.kernels.graph import Type

LONGEST = 480_000  # samples that transformers takes, 30 s; settings do not say
MAX_FRAME = 4096  # samples


@dataclass(frozen=True)
class UsmMel:
    """`bins` of the spectrum up to `highest` Hz, from frames of `frame` samples, each `hop` after
    the other, by a transform of `size` samples; `floor` is added to magnitudes. The first frame
    begins half a frame before the samples, and behind the last there is another sample.
    """

    bins: int
    frame: int = 320
    hop: int = 160
    size: int = 512
    highest: float = HIGHEST
    floor: float = 1e-3
    rate: int = RATE

    @property
    def shortest(self) -> int:
        """Samples that have a frame."""
        return self.frame - self.frame // 2 + 1

    def frames(self, samples: int) -> int:
        """Return how many frames so many samples have, `shortest` at least."""
        return (samples - self.shortest) // self.hop + 1

    def __call__(self, samples: Samples) -> NDArray[np.float32]:
        """samples [N], N >= `shortest` -> [frames(N), bins]"""
        padded = np.pad(samples, (self.frame // 2, 0))
        windows = np.lib.stride_tricks.sliding_window_view(padded, self.frame)
        frames = windows[: -1 : self.hop] * _hann(self.frame)
        magnitudes = np.abs(np.fft.rfft(frames, n=self.size))
        filters = htk_filters(self.bins, self.size, self.rate, self.highest)
        result: NDArray[np.float32] = np.log(magnitudes @ filters + self.floor).astype(np.float32)
        return result


def _hann(length: int) -> NDArray[np.float32]:
    return np.hanning(length + 1)[:-1].astype(np.float32)


@lru_cache(maxsize=4)
def htk_filters(bins: int, size: int, rate: int, highest: float) -> NDArray[np.float64]:
    """Triangles of height 1 over the frequencies of a spectrum, [1 + size / 2, bins], on HTK's
    scale of mels.
    """
    mels = np.linspace(0.0, _PER_DECADE * np.log10(1.0 + highest / _CORNER), bins + 2)
    edges = _CORNER * (np.power(10, mels / _PER_DECADE) - 1.0)
    return triangles(edges, np.linspace(0, rate // 2, 1 + size // 2))


_CORNER, _PER_DECADE = 700.0, 2595.0  # Hz, mels


@dataclass(frozen=True)
class UsmFrames:
    """All frames of a recording as one tile, of which each token has `stride`, the last one those
    that are left. What comes after `longest` samples is left out, and a note says so; recordings
    without a whole frame are filled up with silence.

    A tile is fp32 [1, frames, bins].
    """

    mel: UsmMel
    stride: int
    longest: int

    normalize = Normalize((0.0,), (1.0,), 1.0)

    def prepare(self, samples: NDArray[Any], budget: Budget = DEFAULT_BUDGET) -> ImagePlan:  # noqa: ARG002
        return self.windows(samples)

    def windows(self, samples: Samples) -> ImagePlan:
        heard, notes = first_seconds(samples, self.longest, self.mel.rate)
        if (missing := self.mel.shortest - len(heard)) > 0:
            heard = np.pad(heard, (0, missing))
        tile = self.mel(heard)
        size = (self.mel.bins, len(tile))
        return ImagePlan((tile[None],), (size,), self.token_count(len(samples)), notes=notes)

    def token_count(self, samples: int) -> int:
        """Return how many tokens so many samples take."""
        heard = min(max(samples, self.mel.shortest), self.longest)
        return -(-self.mel.frames(heard) // self.stride)

    def max_tokens(self, budget: Budget = DEFAULT_BUDGET) -> int:  # noqa: ARG002
        """Return the tokens of the longest recording."""
        return self.token_count(self.longest)

    def tile_type(self) -> Type:
        return Type.contiguous((1, self.mel.frames(self.longest), self.mel.bins), torch.float32)

    def largest_tile_type(self) -> Type:
        return self.tile_type()


def read_usm(features: Settings, bins: int, stride: int) -> UsmFrames:
    """Read it from a feature extractor's settings, with transformers' defaults; they have to fit
    the encoder's `bins`. Raises ModelError.
    """
    features.choice("feature_size", (bins,), bins)
    for key in ("dither", "padding_value", "preemphasis", "min_frequency"):
        features.choice(key, (0.0, 0), 0.0)
    features.choice("input_scale_factor", (1.0, 1), 1.0)
    for key in ("per_bin_mean", "per_bin_stddev"):
        features.choice(key, (None,), None)
    rate = features.count("sampling_rate", RATE)
    frame, hop = (
        round(min(rate * features.number(f"{part}_length_ms", usual) / 1000, 2 * MAX_FRAME))
        for part, usual in (("frame", 20.0), ("hop", 10.0))
    )
    if not (1 < frame <= MAX_FRAME and frame // 8 < hop <= frame):
        raise ModelError(
            f"{features.where}: frames of {frame} samples, each {hop} after the other; expected at "
            f"most {MAX_FRAME}, and steps between an eighth of a frame and a whole one"
        )
    size = (1 + features.flag("fft_overdrive", False)) << (frame - 1).bit_length()
    # Files say these as well, and transformers computes them
    for key, value in (("frame_length", frame), ("hop_length", hop), ("fft_length", size)):
        features.choice(key, (value,), value)
    mel = UsmMel(
        bins,
        frame,
        hop,
        size,
        features.number("max_frequency", HIGHEST),
        features.number("mel_floor", 1e-3),
        rate,
    )
    return UsmFrames(mel, stride, LONGEST)
