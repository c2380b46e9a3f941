"""Pixels as arrays, and their normalisation: uint8 [Y, X, 3] to the fp32 [3, Y, X] that an encoder
reads.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from mtmd.base.errors import ModelError
from mtmd.kernels.checkpoint.settings import Settings

Pixels: TypeAlias = NDArray[np.uint8]

CLIP_MEAN = (0.48145466, 0.4578275, 0.40821073)
CLIP_STD = (0.26862954, 0.26130258, 0.27577711)


_left: ContextVar[bool] = ContextVar("left", default=False)


@contextmanager
def left_as_bytes() -> Iterator[None]:
    """Pictures are not normalised on this thread meanwhile: a device does it later."""
    token = _left.set(True)
    try:
        yield
    finally:
        _left.reset(token)


@dataclass(frozen=True)
class Normalize:
    """Bytes to numbers: (value * scale - mean) / std per channel, in fp32 after the product, as the
    reference processors do it.
    """

    mean: tuple[float, ...]
    std: tuple[float, ...]
    scale: float

    def __call__(self, pixels: np.ndarray) -> np.ndarray:
        """uint8 [Y, X, 3] -> fp32 [3, Y, X], uint8 where they are `left_as_bytes`"""
        planes = pixels.transpose(2, 0, 1)
        return np.ascontiguousarray(planes) if _left.get() else self.planes(planes)

    def planes(self, planes: np.ndarray) -> np.ndarray:
        """uint8 [3 N, Y, X] of N frames -> fp32"""
        values = (np.arange(256) * self.scale).astype(np.float32)
        tables = (values - np.array(self.mean, np.float32)[:, None]) / np.array(
            self.std, np.float32
        )[:, None]
        return np.stack([tables[i % 3][plane] for i, plane in enumerate(planes)])


@dataclass(frozen=True)
class RoundedNormalize(Normalize):
    """The same, each step rounded to bfloat16 or to float16 (`half`), as some references do it."""

    half: str = "bfloat16"

    def planes(self, planes: np.ndarray) -> np.ndarray:
        rounded = {"bfloat16": _to_bfloat16, "float16": _to_float16}[self.half]
        mean, std = (rounded(np.array(v, np.float32))[:, None] for v in (self.mean, self.std))
        values = rounded(np.arange(256, dtype=np.float32) * np.float32(self.scale))
        tables = rounded(rounded(values - mean) / std)
        return np.stack([tables[i % 3][plane] for i, plane in enumerate(planes)])


def _to_float16(values: np.ndarray) -> np.ndarray:
    """fp32 numbers rounded to float16, as fp32"""
    return values.astype(np.float16).astype(np.float32)


def _to_bfloat16(values: np.ndarray) -> np.ndarray:
    """fp32 numbers rounded to bfloat16, halves to even, as fp32"""
    bits = values.view(np.uint32)
    even = (bits >> 16) & np.uint32(1)
    rounded = (bits + np.uint32(0x7FFF) + even) & np.uint32(0xFFFF0000)
    return np.asarray(rounded.view(np.float32))


def read_normalize(
    image: Settings, mean: tuple[float, ...] = (0.5,) * 3, std: tuple[float, ...] = (0.5,) * 3
) -> Normalize:
    """Read it from an image processor's settings. Raises ModelError for a step that is switched off
    and a std that cannot be divided by.
    """
    for key in ("do_resize", "do_rescale", "do_normalize"):
        if not image.flag(key, True):
            raise ModelError(f"{image.where}: {key} false is not supported; set it to true")
    mean, std = image.numbers("image_mean", 3, mean), image.numbers("image_std", 3, std)
    if min(std) <= 0:
        raise ModelError(
            f"{image.where}: image_std is {list(std)}, expected 3 numbers above 0, as it is "
            "divided by"
        )
    return Normalize(mean, std, image.number("rescale_factor", 1 / 255))


def fused(normalize: Normalize) -> Normalize:
    """The same in one step on bytes, (value - mean / scale) / (std / scale) in fp32, as the
    references compute on tensors.
    """
    scale = np.float32(1.0 / normalize.scale)
    mean, std = (
        tuple(float(np.float32(v) * scale) for v in values)
        for values in (normalize.mean, normalize.std)
    )
    return Normalize(mean, std, 1.0)


def gguf_image(keys: Settings) -> dict[str, object]:
    """Return what an image processor's settings say of the normalisation, from the `clip.` keys of
    a GGUF.
    """
    return {
        "image_mean": keys.get("vision.image_mean", None),
        "image_std": keys.get("vision.image_std", None),
    }
