"""Preprocessing of pictures into tiles: on the host, or, with a device that has a side stream,
resized there as Pillow would and left as bytes, to be normalised there when it is encoded.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace

from mtmd.clip.image.device_resize import TAKEN_BYTES, DeviceResizer
from mtmd.clip.image.pixels import Pixels, left_as_bytes
from mtmd.clip.image.resize import by_pillow, resized_by
from mtmd.clip.resolution.resolution import AmongSeveral, ImagePlan, Resolution
from mtmd.clip.resolution.whole_or_tiles import AdaptiveTiling
from mtmd.kernels.backends.side_stream import SideStream

SETTINGS = ("auto", "host")


class Preprocessing:
    """Preprocessing for one encoder. `why_host` says why everything is done on the host, None where
    it is not. `foreseen`: the device is not here, and would have a side stream.
    """

    def __init__(
        self,
        resolution: Resolution,
        side: SideStream | None,
        setting: str = "auto",
        foreseen: bool = False,
    ):
        self.resolution, self.setting = resolution, setting
        self.why_host: str | None = None
        if setting == "host":
            self.why_host = "asked for"
        elif side is None and not foreseen:
            self.why_host = "the device has no queue beside that of the decoder"
        elif isinstance(resolution, AmongSeveral) and (
            resolution.among.normalize != resolution.normalize
        ):
            self.why_host = "pictures among several are normalised in another way"
        self._resizer = DeviceResizer(side) if side is not None else None
        self.resized_there = 0

    @property
    def device_bytes(self) -> int:
        """The most of the device's memory in which pictures are resized, beside the weights of some
        sides. None where torchvision resizes: its way stays on the host.
        """
        if self.why_host is not None or isinstance(self.resolution, AdaptiveTiling):
            return 0
        return TAKEN_BYTES

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Make threads that resize pictures on the device wait meanwhile."""
        if self._resizer is None:
            yield
            return
        with self._resizer.paused():
            yield

    def prepare(self, make: Callable[[], ImagePlan]) -> ImagePlan:
        """Return what `make`, which calls the resolution's `prepare`, makes of a picture: the same
        tiles, as bytes where the device is to normalise them. What had to be resized on the host
        has a note. Raises DeviceError where the device has failed, and what `make` raises.
        """
        if self.why_host is not None or self._resizer is None:
            return make()
        resizer, reasons, there = self._resizer, dict[str, None](), False

        def resize(pixels: Pixels, width: int, height: int, resample: str) -> Pixels:
            nonlocal there
            result = resizer.resize(pixels, width, height, resample)
            if isinstance(result, str):
                reasons[result] = None
                return by_pillow(pixels, width, height, resample)
            there = True
            self.resized_there += 1
            return result

        with left_as_bytes(), resized_by(resize):
            plan = make()
        notes = tuple(f"resized on the host: {reason}" for reason in reasons)
        return replace(
            plan,
            normalize=self.resolution.normalize,
            notes=(*plan.notes, *notes),
            resized_there=there and not reasons,
        )
