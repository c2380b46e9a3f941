"""Pillow's resizing, in integers on a device: equal to the bit.

Pillow resizes bytes in two passes, along rows and then along columns, each rounded to bytes. A
pixel of the result is a weighted sum of its neighbours whose weights are integers of 22 fractional
bits (src/libImaging/Resample.c: `precompute_coeffs`, `normalize_coeffs_8bpc`,
`ImagingResampleHorizontal_8bpc`), so that the sum has no rounding of its own and can be formed in
any order. The weights are found here as there, in the same order of operations in fp64.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

Numbers: TypeAlias = NDArray[np.float64]

BITS = 22  # of a weight behind the point: 32 less 8 of a pixel and 2 for sums beyond its range
STRIP_BYTES = 8 << 20  # of the sums of so many rows as are computed at once
FLOAT_54, FLOAT_46 = (float(np.float32(v)) for v in (0.54, 0.46))  # as they are written there


def _box(x: Numbers) -> Numbers:
    return np.where((x > -0.5) & (x <= 0.5), 1.0, 0.0)


def _bilinear(x: Numbers) -> Numbers:
    x = np.abs(x)
    return np.where(x < 1.0, 1.0 - x, 0.0)


def _bicubic(x: Numbers) -> Numbers:
    """Keys' cubic with a = -0.5."""
    a, x = -0.5, np.abs(x)
    near = ((a + 2.0) * x - (a + 3.0)) * x * x + 1
    far = (((x - 5) * x + 8) * x - 4) * a
    return np.where(x < 1.0, near, np.where(x < 2.0, far, 0.0))


def _hamming(x: Numbers) -> Numbers:
    x = np.abs(x)
    turned = np.where(x == 0.0, 1.0, x) * math.pi
    waves = _each(math.sin, turned) / turned * (FLOAT_54 + FLOAT_46 * _each(math.cos, turned))
    return np.where(x == 0.0, 1.0, np.where(x >= 1.0, 0.0, waves))


def _sinc(x: Numbers) -> Numbers:
    turned = np.where(x == 0.0, 1.0, x) * math.pi
    return np.where(x == 0.0, 1.0, _each(math.sin, turned) / turned)


def _lanczos(x: Numbers) -> Numbers:
    return np.where((x >= -3.0) & (x < 3.0), _sinc(x) * _sinc(x / 3), 0.0)


def _each(function: Callable[[float], float], x: Numbers) -> Numbers:
    """Compute each value by the C library, as Pillow does: numpy's may differ in the last bit."""
    return np.fromiter(map(function, x.ravel().tolist()), np.float64, x.size).reshape(x.shape)


# By Pillow's names: the filter, and how far it reaches.
FILTERS: dict[str, tuple[Callable[[Numbers], Numbers], float]] = {
    "box": (_box, 0.5),
    "bilinear": (_bilinear, 1.0),
    "hamming": (_hamming, 1.0),
    "bicubic": (_bicubic, 2.0),
    "lanczos": (_lanczos, 3.0),
}


def vertical_first(given: tuple[int, int], requested: tuple[int, int]) -> bool:
    """Return whether (width, height) is resized along the columns first, as Pillow does from 13 on
    where much more of the height goes than of the width (pull request 9549).
    """
    shorter = given[1] - requested[1]
    return shorter > 0 and shorter > 2 * (given[0] - requested[0])


@dataclass(frozen=True, eq=False)
class Weights:
    """Weights by which a side of `given` pixels becomes one of another length: `first` int32 [N] is
    the first neighbour of each pixel, `values` int32 [K, N] the weights of that and those behind
    it, 0 beyond the last.
    """

    given: int
    first: np.ndarray
    values: np.ndarray


@lru_cache(maxsize=64)
def weights(given: int, requested: int, resample: str) -> Weights:
    """`given` and `requested` pixels of a side; a name of FILTERS."""
    shape, reach = FILTERS[resample]
    scale = given / requested
    spread = max(scale, 1.0)
    support, step = reach * spread, 1.0 / spread
    center = (np.arange(requested) + 0.5) * scale
    first = np.maximum((center - support + 0.5).astype(np.int64), 0)
    count = np.minimum((center + support + 0.5).astype(np.int64), given) - first
    location = np.arange(count.max())[:, None]
    result = np.where(location < count, shape((location + first - center + 0.5) * step), 0.0)
    total = np.cumsum(result, 0)[-1]  # one after another, as the sum is rounded
    result /= np.where(total == 0.0, 1.0, total)
    fixed = np.where(result < 0, -0.5, 0.5) + result * (1 << BITS)
    return Weights(given, first.astype(np.int32), fixed.astype(np.int32))


@dataclass(frozen=True, eq=False)
class DeviceWeights:
    """The same where pixels are: `first` int32 [N], `values` int32 [K, N]."""

    given: int
    first: Tensor
    values: Tensor


def resize_rows(pixels: Tensor, along: DeviceWeights) -> Tensor:
    """uint8 [Y, X, 3] -> uint8 [Y, N, 3], strip by strip"""
    made = torch.empty(
        (pixels.shape[0], len(along.first), pixels.shape[2]),
        dtype=torch.uint8,
        device=pixels.device,
    )
    rows = max(1, STRIP_BYTES // (4 * made.shape[1] * made.shape[2]))
    for start in range(0, len(pixels), rows):
        strip = pixels[start : start + rows]
        made[start : start + rows] = _summed(strip, along, 1)
    return made


def resize_columns(pixels: Tensor, along: DeviceWeights) -> Tensor:
    """uint8 [Y, X, 3] -> uint8 [N, X, 3], strip by strip"""
    shape = (len(along.first), *pixels.shape[1:])
    made = torch.empty(shape, dtype=torch.uint8, device=pixels.device)
    columns = max(1, STRIP_BYTES // (4 * shape[0] * shape[2]))
    for start in range(0, pixels.shape[1], columns):
        strip = pixels[:, start : start + columns]
        made[:, start : start + columns] = _summed(strip, along, 0)
    return made


def _summed(pixels: Tensor, along: DeviceWeights, dim: int) -> Tensor:
    """Weighted sums of neighbours along a dimension, as bytes."""
    shape = [1, 1, 1]
    shape[dim] = -1
    total: Tensor | None = None
    for offset in range(len(along.values)):
        locations = (along.first + offset).clamp_(max=along.given - 1)  # those beyond weigh nothing
        part = pixels.index_select(dim, locations).int().mul_(along.values[offset].view(shape))
        total = part if total is None else total.add_(part)
    assert total is not None
    return total.add_(1 << (BITS - 1)).bitwise_right_shift_(BITS).clamp_(0, 255).byte()
