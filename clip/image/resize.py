"""Resizing as Pillow does it, which most reference processors call."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TypeAlias

import numpy as np
from PIL import Image

from mtmd.base.errors import OptionError
from mtmd.clip.image.pixels import Pixels
from mtmd.kernels.checkpoint.settings import Settings

RESAMPLE = {
    0: "nearest",
    1: "lanczos",
    2: "bilinear",
    3: "bicubic",
    4: "box",
    5: "hamming",
}  # Pillow's numbers, as image processors' settings have them
_FILTERS = {filter_.name.lower(): filter_ for filter_ in Image.Resampling}


Resize: TypeAlias = "Callable[[Pixels, int, int, str], Pixels]"
_elsewhere: ContextVar[Resize | None] = ContextVar("elsewhere", default=None)


@contextmanager
def resized_by(resize: Resize) -> Iterator[None]:
    """Let `resize` below use another function on this thread meanwhile: one whose results are equal
    to the bit. It gets what differs in size, a known filter, and calls Pillow by `by_pillow`.
    """
    token = _elsewhere.set(resize)
    try:
        yield
    finally:
        _elsewhere.reset(token)


def resize(pixels: Pixels, width: int, height: int, resample: str) -> Pixels:
    """uint8 `[H, W, 3]` to uint8 `[height, width, 3]` with Pillow's filter named `resample`; the
    very same array where no size changes.

    This is what the reference processors call, so results are equal to theirs bit by bit. Raises
    OptionError.
    """
    if resample not in _FILTERS:
        raise OptionError(
            f"resample: found {resample!r}, expected one of {', '.join(sorted(_FILTERS))}"
        )
    if width < 1 or height < 1:
        raise OptionError(f"resize: found a target of {width} x {height}, expected at least 1 x 1")
    if pixels.shape[:2] == (height, width):
        return pixels
    return (_elsewhere.get() or by_pillow)(pixels, width, height, resample)


def by_pillow(pixels: Pixels, width: int, height: int, resample: str) -> Pixels:
    """Resize on the host."""
    return np.array(Image.fromarray(pixels).resize((width, height), _FILTERS[resample]))


def read_resample(image: Settings, default: int, names: Collection[str] = ()) -> str:
    """The filter that an image processor's settings name by Pillow's number, one of `names` if
    there are some. Raises ModelError for another.
    """
    allowed = [number for number, name in RESAMPLE.items() if not names or name in names]
    return RESAMPLE[image.choice("resample", allowed, default)]
