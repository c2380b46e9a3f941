"""Whisper's log-mel spectrum (arXiv:2212.04356, section 2.2), as transformers' feature extractors
compute it, and windows of it for an encoder.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from mtmd.clip.audio.audio import Samples
from mtmd.clip.audio.windows import first_seconds
from mtmd.clip.image.pixels import Normalize
from mtmd.clip.resolution.resolution import ImagePlan
from mtmd.clip.token_budget import DEFAULT_BUDGET, Budget
from mtmd.kernels.checkpoint.settings import MAX_WIDTH, Settings
from mtmd.kernels.graph import Type

RATE = 16_000
FLOOR, RANGE = 1e-10, 8.0  # of power; decades that are kept below the loudest
LOWEST, HIGHEST = 0.0, 8000.0  # Hz


@dataclass(frozen=True)
class Mel:
    """`bins` of the spectrum, from windows of `window` samples, each `hop` after the other."""

    bins: int
    window: int = 400
    hop: int = 160
    rate: int = RATE

    def __call__(self, samples: Samples) -> NDArray[np.float32]:
        """samples [N] -> [N / hop rounded down, bins]"""
        whole = torch.from_numpy(samples)
        spectrum = torch.stft(
            whole, self.window, self.hop, window=torch.hann_window(self.window), return_complex=True
        )
        power = (spectrum[..., :-1].abs() ** 2).contiguous()
        filters = mel_filters(self.bins, self.window, self.rate)
        logs = (filters.T @ power).clamp(min=FLOOR).log10()
        logs = (torch.maximum(logs, logs.max() - RANGE) + 4.0) / 4.0
        result: NDArray[np.float32] = logs.T.contiguous().numpy()
        return result


@lru_cache(maxsize=4)
def mel_filters(bins: int, window: int, rate: int) -> torch.Tensor:
    """Triangles over the frequencies of a spectrum, [1 + window / 2, bins], of equal area (Slaney's
    Auditory Toolbox, 1998).
    """
    edges = _hertz(np.linspace(_mels(LOWEST), _mels(HIGHEST), bins + 2))
    filters = triangles(edges, np.linspace(0, rate // 2, 1 + window // 2))
    return torch.from_numpy(filters * (2.0 / (edges[2:] - edges[:-2]))).to(torch.float32)


def triangles(edges: NDArray[np.float64], frequencies: NDArray[np.float64]) -> NDArray[np.float64]:
    """Triangles of height 1, each from one of the edges to the next but one, over frequencies

    edges [N + 2], frequencies [F] -> [F, N]
    """
    gaps = np.diff(edges)
    slopes = edges[None] - frequencies[:, None]
    down, up = -slopes[:, :-2] / gaps[:-1], slopes[:, 2:] / gaps[1:]
    return np.maximum(0.0, np.minimum(down, up))


# Slaney's scale: linear below 1000 Hz, 15 mels of them, logarithmic above.
_CORNER, _PER_HERTZ, _STEP = 1000.0, 3.0 / 200.0, 27.0 / np.log(6.4)


def _mels(hertz: float) -> float:
    if hertz < _CORNER:
        return hertz * _PER_HERTZ
    return float(_CORNER * _PER_HERTZ + np.log(hertz / _CORNER) * _STEP)


def _hertz(mels: NDArray[np.float64]) -> NDArray[np.float64]:
    corner = _CORNER * _PER_HERTZ
    above = _CORNER * np.exp((mels - corner) / _STEP)
    result: NDArray[np.float64] = np.where(mels < corner, mels / _PER_HERTZ, above)
    return result


@dataclass(frozen=True)
class MelWindows:
    """Windows of `frames` mel frames, whose encoder gives a token for every `stride` frames, the
    last of them filled up with silence.

    Without a `limit` all tokens are heard, and the windows are of one spectrum. With one, as many
    windows are taken, each with a spectrum of its own, what comes after them is left out, and a
    note says so; and tokens of silence are not heard: the last window is encoded as a `whole`, or
    cut behind the frames that its tokens, and one frame beyond them, are of.

    A tile is fp32 [1, frames, bins], or, `numbered`, [1, frames, bins + 1] with the number of its
    window behind the bins of each frame.
    """

    mel: Mel
    frames: int
    stride: int
    whole: bool
    limit: int | None = None
    numbered: bool = False

    normalize = Normalize((0.0,), (1.0,), 1.0)

    def prepare(self, samples: NDArray[Any], budget: Budget = DEFAULT_BUDGET) -> ImagePlan:  # noqa: ARG002
        return self.windows(samples)

    def windows(self, samples: Samples) -> ImagePlan:
        size, count = self.frames * self.mel.hop, self._windows(len(samples))
        heard = samples
        notes: tuple[str, ...] = ()
        if self.limit is not None:
            heard, notes = first_seconds(samples, self.limit * size, self.mel.rate)
        padded = np.zeros(count * size, np.float32)
        heard = heard[: len(padded)]
        padded[: len(heard)] = heard
        if self.limit is None:
            tiles = np.split(self.mel(padded), count)
        else:
            tiles = [self.mel(part) for part in np.split(padded, count)]
        if not self.whole:
            tiles[-1] = tiles[-1][: self._cut(len(heard) - (count - 1) * size)]
        if self.numbered:
            tiles = [
                np.pad(tile, ((0, 0), (0, 1)), constant_values=number)
                for number, tile in enumerate(tiles)
            ]
        tokens = self.token_count(len(samples))
        order = np.arange(tokens) if self.whole and tokens < count * self.max_tokens() else None
        sizes = tuple(tile.shape[::-1] for tile in tiles)
        return ImagePlan(
            tuple(tile[None] for tile in tiles), sizes, tokens, order=order, notes=notes
        )

    def _windows(self, samples: int) -> int:
        """Return how many windows so many samples have; with a limit, one without a token behind
        others is none.
        """
        size = self.frames * self.mel.hop
        count = max(1, -(-samples // size))
        if self.limit is None:
            return count
        frames = -(-(samples - (count - 1) * size) // self.mel.hop)
        without_token = count > 1 and (frames - 1) // 2 + 1 < self.stride // 2
        return min(count - without_token, self.limit)

    def token_count(self, samples: int) -> int:
        """Return how many tokens so many samples take."""
        before = self._windows(samples) - 1
        last = self.max_tokens()
        if self.limit is not None:
            halved = self._halved(samples - before * self.frames * self.mel.hop)
            last = halved // (self.stride // 2)
        return before * self.max_tokens() + last

    def _halved(self, samples: int) -> int:
        """Return the frames of the last window behind the encoder's second convolution; those of a
        token at least.
        """
        frames = min(-(-samples // self.mel.hop), self.frames)
        return max(self.stride // 2, (frames - 1) // 2 + 1)

    def _cut(self, samples: int) -> int:
        return min(2 * self._halved(samples) + 1, self.frames)

    def max_tokens(self, budget: Budget = DEFAULT_BUDGET) -> int:  # noqa: ARG002
        """Return the tokens of a window."""
        return self.frames // self.stride

    def tile_type(self) -> Type:
        columns = self.mel.bins + self.numbered
        return Type.contiguous((1, self.frames, columns), torch.float32)

    def largest_tile_type(self) -> Type:
        return self.tile_type()


@dataclass(frozen=True)
class MelChunks:
    """Chunks of `frames` mel frames, an even number, each of which is encoded by itself and gives a
    token for every four frames; the last is as long as what is left. Of more than `longest` frames
    the rest is left out, and a note says so.

    A tile is fp32 [1, frames, bins].
    """

    mel: Mel
    frames: int
    longest: int

    normalize = Normalize((0.0,), (1.0,), 1.0)
    shortest = 3  # frames, of a token

    def prepare(self, samples: NDArray[Any], budget: Budget = DEFAULT_BUDGET) -> ImagePlan:  # noqa: ARG002
        return self.windows(samples)

    def windows(self, samples: Samples) -> ImagePlan:
        maximum = self.longest * self.mel.hop
        count = self._count(len(samples))
        # behind the last frame there is silence, as far as it looks
        padded = np.zeros(min(count * self.mel.hop + self.mel.window, maximum), np.float32)
        padded[: len(samples)] = samples[: len(padded)]
        spectrum = self.mel(padded)[:count]
        tiles = [spectrum[at : at + self.frames] for at in range(0, count, self.frames)]
        notes: tuple[str, ...] = ()
        if len(samples) > maximum:
            seconds = maximum / self.mel.rate
            notes = (f"only the first {seconds:.0f} s are heard, the maximum for this model",)
        tiles = [tile for tile in tiles if len(tile) >= self.shortest]  # shorter ones have no token
        sizes = tuple((self.mel.bins, len(tile)) for tile in tiles)
        tokens = self.token_count(len(samples))
        return ImagePlan(tuple(tile[None] for tile in tiles), sizes, tokens, notes=notes)

    def token_count(self, samples: int) -> int:
        """Return how many tokens so many samples take."""
        return -(-self._count(samples) // 2) // 2

    def _count(self, samples: int) -> int:
        return max(min(-(-samples // self.mel.hop), self.longest), self.shortest)

    def max_tokens(self, budget: Budget = DEFAULT_BUDGET) -> int:  # noqa: ARG002
        """Return the tokens of a chunk."""
        return self.frames // 4

    def tile_type(self) -> Type:
        return Type.contiguous((1, self.frames, self.mel.bins), torch.float32)

    def largest_tile_type(self) -> Type:
        return self.tile_type()


def read_mel(features: Settings, bins: int) -> Mel:
    """Read it from a feature extractor's settings, which have to fit the encoder's `bins`. Raises
    ModelError.
    """
    features.choice("feature_size", (bins,), bins)
    features.choice("dither", (0.0, 0), 0.0)
    features.choice("padding_value", (0.0, 0), 0.0)
    return Mel(
        bins,
        features.count("n_fft", 400, maximum=MAX_WIDTH),
        features.count("hop_length", 160, maximum=MAX_WIDTH),
        features.count("sampling_rate", RATE),
    )
