"""Pictures on their way to the encoder: resized as Pillow does, to the bit, and normalised, against
the host; and steps of a decoder beside an encode on a stream of lower priority.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from statistics import median
from typing import Any

from gpu_kernels.measure import table

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
STEPS, RUNS = 40, 5


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


def checks(device: str) -> Iterator[str | None]:
    """For every filter and size, and every byte, None or how it failed."""
    import numpy as np
    import torch

    from mtmd.clip.image.device.normalize import normalized, tables
    from mtmd.clip.image.device.pillow import FILTERS
    from mtmd.clip.image.device.resizer import DeviceResizer
    from mtmd.clip.image.pixels import CLIP_MEAN, CLIP_STD, Normalize
    from mtmd.clip.image.resize import by_pillow

    side = stream(device)
    resizer, rng = DeviceResizer(side), np.random.default_rng(0)
    for resample in FILTERS:
        for (width, height), wanted in SIZES:
            pixels = rng.integers(0, 256, (height, width, 3), dtype=np.uint8)
            found = resizer.resize(pixels, *wanted, resample)
            label = f"pictures: {resample} from {width} x {height} to {wanted[0]} x {wanted[1]}"
            if isinstance(found, str):
                yield f"{label}: {found}"
            else:
                apart = int((found != by_pillow(pixels, *wanted, resample)).sum())
                yield f"{label}: {apart} bytes are not Pillow's" if apart else None
    way = Normalize(CLIP_MEAN, CLIP_STD, 1 / 255)
    tile = np.arange(256, dtype=np.uint8).reshape(1, 16, 16).repeat(3, 0)
    for dtype in (torch.float32, torch.bfloat16):
        there = torch.from_numpy(tile)[None].to(side.device)
        found = normalized(there, tables([way], dtype).to(side.device))[0].cpu()
        same = torch.equal(found, torch.from_numpy(way.planes(tile)).to(dtype))
        yield None if same else f"pictures: bytes normalised in {dtype} are not the host's"


def report(device: str) -> list[str]:
    lines = table(
        "Pictures resized, there and back, against Pillow on the host (bicubic)",
        ("picture", "device ms", "host ms", "ratio"),
        (resized(*photo, stream(device)) for photo in PHOTOS),
    )
    return lines + table(
        "Steps of a decoder beside an encode",
        ("encode", f"{STEPS} steps, ms", "encode ms"),
        beside(device),
    )


def resized(label: str, given: tuple[int, int], wanted: tuple[int, int], side: Any) -> list[str]:
    import numpy as np

    from mtmd.clip.image.device.resizer import DeviceResizer
    from mtmd.clip.image.resize import by_pillow

    resizer = DeviceResizer(side)
    pixels = np.random.default_rng(0).integers(0, 256, (*given[::-1], 3), dtype=np.uint8)
    there = timed(lambda: resizer.resize(pixels, *wanted, "bicubic"))
    here = timed(lambda: by_pillow(pixels, *wanted, "bicubic"))
    name = f"{label}: {given[0]} x {given[1]} to {wanted[0]} x {wanted[1]}"
    return [name, f"{there:.2f}", f"{here:.2f}", f"{here / there:.1f}"]


def timed(run: Callable[[], Any]) -> float:
    """Milliseconds on the host's clock, as requests see it, the first run left out."""
    found = []
    for _ in range(RUNS + 1):
        start = time.perf_counter()
        run()
        found.append((time.perf_counter() - start) * 1e3)
    return median(found[1:])


def beside(device: str) -> Iterator[list[str]]:
    """Small products, each waited for, as a step's read-back is, and large ones: alone, in the same
    stream before them, and in one of lower priority.
    """
    import torch

    small = torch.randn(16, 4096, device=device, dtype=torch.bfloat16)
    weight = torch.randn(4096, 4096, device=device, dtype=torch.bfloat16)
    large = torch.randn(8192, 8192, device=device, dtype=torch.bfloat16)

    def steps() -> float:
        start = time.perf_counter()
        for _ in range(STEPS):
            (small @ weight)[0, 0].item()
        return (time.perf_counter() - start) * 1e3

    def encode() -> Any:
        result = large
        for _ in range(24):
            result = result @ large
        return result

    steps()
    encode()[0, 0].item()
    yield ["none", f"{steps():.2f}", "-"]
    start = time.perf_counter()
    kept = encode()
    took = steps()
    kept[0, 0].item()
    yield ["before, in one queue", f"{took:.2f}", f"{(time.perf_counter() - start) * 1e3:.2f}"]
    side = stream(device)
    if device == "cpu":
        return
    own = torch.cuda.current_stream()
    try:
        side.let_first()
        side.follow()
        start = time.perf_counter()
        with side.entered():
            kept = encode()
            mark = side.mark()
        took = steps()
        mark.wait()
        ended = (time.perf_counter() - start) * 1e3
    finally:
        torch.cuda.set_stream(own)
    yield ["on a stream of lower priority", f"{took:.2f}", f"{ended:.2f}"]
