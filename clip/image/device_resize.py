"""Pictures resized on a device as Pillow would resize them on the host.

What Pillow does is not written down anywhere but in its code, and changes: 13 resizes some pictures
along their columns first. So the device's result is compared with Pillow's on small pictures before
it is used, and a difference has everything go on by Pillow, with a reason that is told.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import numpy as np
import torch
from torch import Tensor

from mtmd.base.errors import DeviceError
from mtmd.base.text import one_line
from mtmd.clip.image.device_pillow import (
    FILTERS,
    STRIP_BYTES,
    DeviceWeights,
    resize_columns,
    resize_rows,
    vertical_first,
    weights,
)
from mtmd.clip.image.pixels import Pixels
from mtmd.clip.image.resize import by_pillow
from mtmd.kernels.backends.side_stream import SideStream

MAX_BYTES = 48 << 20  # of a picture before, between and after the passes
# Of the device's memory at once, beside weights of sides: what goes into a pass and what comes of
# it, and the sums of a strip, what is added to them and the bytes that this is made of.
TAKEN_BYTES = 2 * MAX_BYTES + 3 * STRIP_BYTES
MAX_TIMES = 256  # that a side is shrunk: a pixel has so many neighbours, each a launch or more
SAVED = 32  # weights of so many pairs of sides
# (width, height) before and after: of odd sides, smaller, larger and both, in both orders of passes
CHECKED = (
    ((37, 23), (11, 9)),
    ((37, 23), (90, 71)),
    ((9, 61), (23, 5)),
    ((53, 61), (20, 61)),
    ((24, 57), (12, 28)),
    ((3, 2), (64, 1)),
)


class DeviceResizer:
    """Safe to use from several threads, of which one at a time is served."""

    def __init__(self, side: SideStream):
        self.side = side
        self._lock = threading.Lock()
        self._weights: OrderedDict[tuple[int, int, str], DeviceWeights] = OrderedDict()
        self._checked: dict[str, str | None] = {}

    @contextmanager
    def paused(self) -> Iterator[None]:
        """None is served meanwhile, and none is left there."""
        with self._lock:
            yield

    def why_not(self, resample: str) -> str | None:
        """None where the device resizes by a filter as Pillow does here. Raises what torch raises
        of a device without memory, or that has failed.
        """
        with self._lock:
            if resample not in self._checked:
                self._checked[resample] = self._check(resample)
            return self._checked[resample]

    def resize(self, pixels: Pixels, width: int, height: int, resample: str) -> Pixels | str:
        """Resize as `by_pillow` of clip/image/resize.py does, or return why not. Raises DeviceError
        where the device has failed.
        """
        size = max(pixels.nbytes, 3 * width * height, 3 * width * len(pixels))
        if size > MAX_BYTES:
            return f"{size >> 20} MiB, of which {MAX_BYTES >> 20} are resized on the device"
        if len(pixels) > MAX_TIMES * height or pixels.shape[1] > MAX_TIMES * width:
            return f"a side becomes more than {MAX_TIMES} times shorter"
        try:
            reason = self.why_not(resample)
            if reason is not None:
                return reason
            with self._lock:
                return self._resize(pixels, width, height, resample)
        except torch.OutOfMemoryError:
            return "the device has no memory for it"
        except torch.AcceleratorError as error:
            raise DeviceError(
                f"the device has failed while a picture was resized ({one_line(error, 200)}); "
                "start the process again"
            ) from error

    def _resize(self, pixels: Pixels, width: int, height: int, resample: str) -> Pixels:
        given_height, given_width = pixels.shape[:2]

        def fill(host: Tensor) -> None:
            host.numpy()[:] = pixels

        with torch.inference_mode(), self.side.entered():
            value = self.side.upload(pixels.shape, fill)
            passes: list[Callable[[Tensor], Tensor]] = []
            if width != given_width:
                along = self._on_device(given_width, width, resample)
                passes.append(lambda v: resize_rows(v, along))
            if height != given_height:
                down = self._on_device(given_height, height, resample)
                passes.append(lambda v: resize_columns(v, down))
            if vertical_first((given_width, given_height), (width, height)):
                passes.reverse()
            for one in passes:
                value = one(value)
            result: Pixels = value.cpu().numpy()
        return result

    def _on_device(self, given: int, requested: int, resample: str) -> DeviceWeights:
        key = given, requested, resample
        if key not in self._weights:
            result = weights(*key)
            first, values = (
                torch.from_numpy(part).to(self.side.device)
                for part in (result.first, result.values)
            )
            self._weights[key] = DeviceWeights(given, first, values)
        self._weights.move_to_end(key)
        while len(self._weights) > SAVED:
            self._weights.popitem(last=False)
        return self._weights[key]

    def _check(self, resample: str) -> str | None:
        if resample not in FILTERS:
            return f"the filter {resample} has no form for devices"
        rng = np.random.default_rng(0)
        for (width, height), requested in CHECKED:
            pixels = rng.integers(0, 256, (height, width, 3), dtype=np.uint8)
            pixels[: height // 2] = rng.choice(
                np.array([0, 255], np.uint8), pixels[: height // 2].shape
            )
            try:
                result = self._resize(pixels, *requested, resample)
            except (torch.OutOfMemoryError, torch.AcceleratorError):
                raise  # which says nothing of the arithmetic
            except RuntimeError as error:  # whatever the device does not have
                return one_line(error, 200)
            if not np.array_equal(result, by_pillow(pixels, *requested, resample)):
                return (
                    f"its result is not Pillow's from {width} x {height} to {requested[0]} x "
                    f"{requested[1]} pixels ({resample})"
                )
        return None
