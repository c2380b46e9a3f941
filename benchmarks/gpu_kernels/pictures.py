"""Pictures on their way to the encoder: resized as Pillow does, to the bit, and normalised, against
the host; and steps of a decoder beside an encode on a stream of lower priority.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from gpu_kernels.measure import host_milliseconds
from gpu_kernels.rows import Cells, Row, Setting, SkipError, Task, WrongError, synchronize

# (width, height) before and after: odd sides, smaller, larger and both, in both orders of passes
SIZES = (
    ((37, 23), (11, 9)),
    ((37, 23), (90, 71)),
    ((9, 61), (23, 5)),
    ((64, 48), (64, 20)),
    ((3, 2), (64, 1)),
    ((201, 131), (56, 56)),
)
PHOTOS = (
    ("a photo for a square", (4000, 3000), (896, 896)),
    ("a photo at any size", (4000, 3000), (1148, 868)),
    ("a screen", (1920, 1080), (1512, 1512)),
    ("a small picture enlarged", (320, 240), (896, 896)),
)
STEPS = 40
Way = Callable[[Any, str], tuple[float, "float | str"]]


class HostStream:
    """The host in place of a card, for a dry run."""

    def __init__(self) -> None:
        import torch

        self.device = torch.device("cpu")

    @contextmanager
    def entered(self) -> Iterator[None]:
        yield

    def upload(self, shape: tuple[int, ...], fill: Callable[[Any], None]) -> Any:
        import torch

        host = torch.empty(shape, dtype=torch.uint8)
        fill(host)
        return host


def stream(device: str) -> Any:
    import torch

    from mtmd.kernels.backends.side_stream import CudaSideStream

    return HostStream() if device == "cpu" else CudaSideStream(torch.device(device))


def checks(setting: Setting) -> Iterator[Task]:
    """For every filter and size, and every byte."""
    from mtmd.clip.image.device_pillow import FILTERS

    for resample in FILTERS:
        for given, requested in SIZES:
            name = f"{resample} from {given[0]} x {given[1]} to {requested[0]} x {requested[1]}"
            make = functools.partial(resized_right, given, requested, resample, setting)
            yield Task(f"pictures: {name}", make, given == SIZES[0][0])
    for dtype in ("float32", "bfloat16"):
        make = functools.partial(normalised_right, dtype, setting)
        yield Task(f"pictures: bytes normalised in {dtype}", make)


def resized_right(
    given: tuple[int, int], requested: tuple[int, int], resample: str, setting: Setting
) -> Row:
    import numpy as np

    from mtmd.clip.image.device_resize import DeviceResizer
    from mtmd.clip.image.resize import by_pillow

    pixels = np.random.default_rng(0).integers(0, 256, (*given[::-1], 3), dtype=np.uint8)
    result = DeviceResizer(stream(setting.device)).resize(pixels, *requested, resample)
    if isinstance(result, str):
        raise WrongError(result)
    if separate := int((result != by_pillow(pixels, *requested, resample)).sum()):
        raise WrongError(f"{separate} bytes are not Pillow's")
    return Row()


def normalised_right(dtype: str, setting: Setting) -> Row:
    import numpy as np
    import torch

    from mtmd.clip.image.device_normalize import normalized, tables
    from mtmd.clip.image.pixels import CLIP_MEAN, CLIP_STD, Normalize

    kind, side = getattr(torch, dtype), stream(setting.device)
    way = Normalize(CLIP_MEAN, CLIP_STD, 1 / 255)
    tile = np.arange(256, dtype=np.uint8).reshape(1, 16, 16).repeat(3, 0)
    there = torch.from_numpy(tile)[None].to(side.device)
    result = normalized(there, tables([way], kind).to(side.device))[0].cpu()
    if not torch.equal(result, torch.from_numpy(way.planes(tile)).to(kind)):
        raise WrongError("they are not the host's")
    return Row()


def tasks(setting: Setting) -> Iterator[Task]:
    for photo in PHOTOS:
        yield Task(photo[0], functools.partial(resized, *photo, setting))
    ways = {
        "none": steps_alone,
        "before, in one queue": steps_behind,
        "on a stream of lower priority": steps_alongside,
    }
    for name, way in ways.items():
        yield Task(
            f"steps beside an encode: {name}", functools.partial(alongside, name, way, setting)
        )


def resized(
    label: str, given: tuple[int, int], requested: tuple[int, int], setting: Setting
) -> Row:
    import numpy as np

    from mtmd.clip.image.device_resize import DeviceResizer
    from mtmd.clip.image.resize import by_pillow

    name = f"{label}: {given[0]} x {given[1]} to {requested[0]} x {requested[1]}"
    if setting.dry:
        given, requested = ((max(1, n // 100) for n in size) for size in (given, requested))  # type: ignore[assignment]
        given, requested = tuple(given), tuple(requested)  # type: ignore[assignment]
    resizer = DeviceResizer(stream(setting.device))
    pixels = np.random.default_rng(0).integers(0, 256, (*given[::-1], 3), dtype=np.uint8)
    there = host_milliseconds(lambda: resizer.resize(pixels, *requested, "bicubic"))
    here = host_milliseconds(lambda: by_pillow(pixels, *requested, "bicubic"))
    cells: Cells = {"picture": name, "device ms": there, "host ms": here}
    title = "Pictures resized, there and back, against Pillow on the host (bicubic)"
    return Row(cells | {"ratio": here / there}, title)


def alongside(name: str, way: Way, setting: Setting) -> Row:
    """Small products, each waited for, as a step's read-back is, and large ones."""
    work = Work(setting)
    work.steps()
    work.encode()[0, 0].item()
    synchronize(setting.device)
    took, encode = way(work, setting.device)
    cells: Cells = {"encode": name, f"{STEPS} steps, ms": took, "encode ms": encode}
    return Row(cells, "Steps of a decoder beside an encode")


class Work:
    """What a decoder and an encoder give a card to do, about."""

    def __init__(self, setting: Setting) -> None:
        import torch

        width, side = (64, 64) if setting.dry else (4096, 8192)

        def draw(*shape: int) -> Any:
            return torch.randn(*shape, device=setting.device).to(torch.bfloat16)

        self.small, self.weight, self.large = draw(16, width), draw(width, width), draw(side, side)

    def steps(self) -> float:
        start = time.perf_counter()
        for _ in range(STEPS):
            (self.small @ self.weight)[0, 0].item()
        return (time.perf_counter() - start) * 1e3

    def encode(self) -> Any:
        result = self.large
        for _ in range(24):
            result = result @ self.large
        return result


def steps_alone(work: Work, device: str) -> tuple[float, float | str]:  # noqa: ARG001
    return work.steps(), "-"


def steps_behind(work: Work, device: str) -> tuple[float, float | str]:  # noqa: ARG001
    start = time.perf_counter()
    saved = work.encode()
    took = work.steps()
    saved[0, 0].item()
    return took, (time.perf_counter() - start) * 1e3


def steps_alongside(work: Work, device: str) -> tuple[float, float | str]:
    import torch

    if device == "cpu":
        raise SkipError("the host has no streams")
    side, own = stream(device), torch.cuda.current_stream()
    try:
        side.let_first()
        side.follow()
        start = time.perf_counter()
        with side.entered():
            saved = work.encode()
            mark = side.mark()
        took = work.steps()
        mark.wait()
        ended = (time.perf_counter() - start) * 1e3
    finally:
        torch.cuda.set_stream(own)
    del saved
    return took, ended
