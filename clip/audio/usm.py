"""The Universal Speech Model's log-mel spectrum (arXiv:2303.01037) as transformers' feature
extractors of Gemma compute it, of recordings up to a longest one.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
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
    """`bins` of the spectrum from `lowest` up to `highest` Hz, from frames of `frame` samples, each
    `hop` after the other, by a transform of `size` samples; `floor` is added to magnitudes, or, if
    it `is_minimum`, is the smallest. The first frame begins `lead` samples before a recording, and
    behind the last there is another sample. `emphasis` times the sample before is
    subtracted from each; a frame's first sample is multiplied by 1 - `emphasis`.
    """

    bins: int
    frame: int = 320
    hop: int = 160
    size: int = 512
    highest: float = HIGHEST
    floor: float = 1e-3
    rate: int = RATE
    lead: int = 160
    lowest: float = 0.0
    emphasis: float = 0.0
    is_minimum: bool = False

    @property
    def shortest(self) -> int:
        """Samples that have a frame."""
        return self.frame - self.lead + 1

    def frames(self, samples: int) -> int:
        """Return how many frames so many samples have, `shortest` at least."""
        return (samples - self.shortest) // self.hop + 1

    def __call__(self, samples: Samples) -> NDArray[np.float32]:
        """samples [N], N >= `shortest` -> [frames(N), bins]"""
        padded = np.pad(samples, (self.lead, 0))
        windows = np.lib.stride_tricks.sliding_window_view(padded, self.frame)
        frames = self._emphasized(windows[: -1 : self.hop]) * _hann(self.frame)
        magnitudes = np.abs(np.fft.rfft(frames, n=self.size))
        mels = magnitudes @ htk_filters(self.bins, self.size, self.rate, self.highest, self.lowest)
        mels = np.maximum(mels, self.floor) if self.is_minimum else mels + self.floor
        result: NDArray[np.float32] = np.log(mels).astype(np.float32)
        return result

    def _emphasized(self, frames: Samples) -> Samples:
        """[frames, frame]"""
        if not self.emphasis:
            return frames
        first, rest = frames[:, :1] * (1.0 - self.emphasis), frames[:, 1:]
        return np.concatenate((first, rest - self.emphasis * frames[:, :-1]), 1)


def _hann(length: int) -> NDArray[np.float32]:
    return np.hanning(length + 1)[:-1].astype(np.float32)


@lru_cache(maxsize=4)
def htk_filters(
    bins: int, size: int, rate: int, highest: float, lowest: float = 0.0
) -> NDArray[np.float64]:
    """Triangles of height 1 over the frequencies of a spectrum, [1 + size / 2, bins], on HTK's
    scale of mels.
    """
    first, last = (_PER_DECADE * np.log10(1.0 + hertz / _CORNER) for hertz in (lowest, highest))
    mels = np.linspace(first, last, bins + 2)
    edges = _CORNER * (np.power(10, mels / _PER_DECADE) - 1.0)
    return triangles(edges, np.linspace(0, rate // 2, 1 + size // 2))


_CORNER, _PER_DECADE = 700.0, 2595.0  # Hz, mels


@dataclass(frozen=True)
class UsmFrames:
    """All frames of a recording as one tile, of which each token has `stride`, the last one those
    that are left. What comes after `longest` samples is left out, and a note says so; recordings
    without a whole frame are filled up with silence, and so are all to a `multiple` of samples.
    Where a recording always has so many `tokens`, the encoder's separator stands behind what was
    heard.

    A tile is fp32 [1, frames, bins].
    """

    mel: UsmMel
    stride: int
    longest: int
    multiple: int = 1
    tokens: int | None = None

    normalize = Normalize((0.0,), (1.0,), 1.0)

    def prepare(self, samples: NDArray[Any], budget: Budget = DEFAULT_BUDGET) -> ImagePlan:  # noqa: ARG002
        return self.windows(samples)

    def windows(self, samples: Samples) -> ImagePlan:
        heard, notes = first_seconds(samples, self.longest, self.mel.rate)
        if (missing := self._filled_up(len(heard)) - len(heard)) > 0:
            heard = np.pad(heard, (0, missing))
        tile, order = self.mel(heard), None
        size, tokens = (self.mel.bins, len(tile)), self.token_count(len(samples))
        if (count := -(-len(tile) // self.stride)) < tokens:
            order = np.arange(tokens)
            order[count:] = -1
        return ImagePlan((tile[None],), (size,), tokens, order=order, notes=notes)

    def _filled_up(self, samples: int) -> int:
        """Return how many samples are encoded of so many."""
        heard = min(max(samples, self.mel.shortest), self.longest)
        return -(-heard // self.multiple) * self.multiple

    def token_count(self, samples: int) -> int:
        """Return how many tokens so many samples take."""
        if self.tokens is not None:
            return self.tokens
        return -(-self.mel.frames(self._filled_up(samples)) // self.stride)

    def max_tokens(self, budget: Budget = DEFAULT_BUDGET) -> int:  # noqa: ARG002
        """Return the tokens of the longest recording."""
        return self.token_count(self.longest)

    def tile_type(self) -> Type:
        frames = self.mel.frames(self._filled_up(self.longest))
        return Type.contiguous((1, frames, self.mel.bins), torch.float32)

    def largest_tile_type(self) -> Type:
        return self.tile_type()


def read_usm(features: Settings, bins: int, stride: int) -> UsmFrames:
    """Read it from the settings of Gemma 4's feature extractor, with transformers' defaults; they
    have to fit the encoder's `bins`. Raises ModelError.
    """
    for key in ("preemphasis", "min_frequency"):
        features.choice(key, (0.0, 0), 0.0)
    mel = _read_mel(features, bins, Settings({}, features.where))
    return UsmFrames(replace(mel, lead=mel.frame // 2), stride, LONGEST)


# transformers' defaults for the settings of Gemma 3n's feature extractor
EMPHASIZING = {
    "frame_length_ms": 32.0,
    "fft_overdrive": True,
    "max_frequency": 7600.0,
    "mel_floor": 1e-5,
}
MULTIPLE = 128  # samples


def read_emphasizing_usm(features: Settings, bins: int, stride: int, tokens: int) -> UsmFrames:
    """Read it from the settings of Gemma 3n's feature extractor, with transformers' defaults; they
    have to fit the encoder's `bins`, and the longest recording `tokens`. Raises ModelError.
    """
    features.choice("preemphasis_htk_flavor", (True,), True)
    lowest, emphasis = (
        0.0 if features.get(key, None) == 0 else features.number(key, usual)
        for key, usual in (("min_frequency", 125.0), ("preemphasis", 0.97))
    )
    mel = _read_mel(features, bins, Settings(EMPHASIZING, features.where))
    if lowest >= mel.highest:
        raise ModelError(
            f"{features.where}: min_frequency is {lowest:g}, expected less than the "
            f"{mel.highest:g} of max_frequency"
        )
    mel = replace(mel, lead=0, lowest=lowest, emphasis=emphasis, is_minimum=True)
    result = UsmFrames(mel, stride, LONGEST, MULTIPLE)
    if (count := result.max_tokens()) > tokens:
        raise ModelError(
            f"{features.where}: {LONGEST} samples have {count} tokens, expected at most the "
            f"{tokens} that a recording takes"
        )
    return replace(result, tokens=tokens)


def _read_mel(features: Settings, bins: int, usual: Settings) -> UsmMel:
    """Read what both have in common. Raises ModelError."""
    where = features.where
    features.choice("feature_size", (bins,), bins)
    for key in ("dither", "padding_value"):
        features.choice(key, (0.0, 0), 0.0)
    features.choice("input_scale_factor", (1.0, 1), 1.0)
    for key in ("per_bin_mean", "per_bin_stddev"):
        features.choice(key, (None,), None)
    features = Settings({**usual.values, **features.values}, where)
    rate = features.count("sampling_rate", RATE)
    frame, hop = (
        round(min(rate * features.number(f"{part}_length_ms", ms) / 1000, 2 * MAX_FRAME))
        for part, ms in (("frame", 20.0), ("hop", 10.0))
    )
    if not (1 < frame <= MAX_FRAME and frame // 8 < hop <= frame):
        raise ModelError(
            f"{where}: frames of {frame} samples, each {hop} after the other; expected at "
            f"most {MAX_FRAME}, and steps between an eighth of a frame and a whole one"
        )
    size = (1 + features.flag("fft_overdrive", False)) << (frame - 1).bit_length()
    # Files say these as well, and transformers computes them
    for key, value in (("frame_length", frame), ("hop_length", hop), ("fft_length", size)):
        features.choice(key, (value,), value)
    return UsmMel(
        bins,
        frame,
        hop,
        size,
        features.number("max_frequency", HIGHEST),
        features.number("mel_floor", 1e-3),
        rate,
    )
