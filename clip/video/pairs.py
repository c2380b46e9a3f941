"""Clips whose frames go through the tower two by two, one patch from both (arXiv:2409.12191), in
their own shape within limits of pixels.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from mtmd.base.errors import ModelError
from mtmd.clip.image.pixels import CLIP_MEAN, CLIP_STD, Normalize, Pixels, fused, read_normalize
from mtmd.clip.image.resize import read_resample
from mtmd.clip.image.tensor_resize import MODES, resize_tensor
from mtmd.clip.resolution.resolution import ImagePlan
from mtmd.clip.resolution.sizes import MAX_RATIO, too_narrow, within
from mtmd.clip.resolution.smart_resize import smart_resize
from mtmd.clip.token_budget import DEFAULT_BUDGET, LOW_TOKENS, Budget
from mtmd.clip.video.family import ClipShape, Run, Write, taken_fps, tile_of_frames
from mtmd.clip.video.rules import FrameRule, WholeGroups
from mtmd.clip.video.sound import SoundOrder
from mtmd.clip.video.video import Video
from mtmd.kernels.checkpoint.settings import Settings

FRAMES = 2  # of a group
MAX_PIXELS = 1 << 40
EACH_FRAME = 128 * 28 * 28, 768 * 28 * 28  # transformers' defaults


class Limits(Protocol):
    """Limits of the size of a clip's frames."""

    def size(self, height: int, width: int, frames: int, factor: int) -> tuple[int, int]:
        """Height and width in px, multiples of `factor`, that each of so many frames is scaled to.
        Raises ImageError for frames that are too narrow.
        """


class Clock(Protocol):
    """The time of groups as positions."""

    def __call__(self, video: Video, groups: int) -> tuple[float, ...]:
        """Return how far each group is behind the first."""


@dataclass(frozen=True)
class Seconds:
    """Time as positions, so many a second, counted by groups that are equally far apart."""

    each: float

    def __call__(self, video: Video, groups: int) -> tuple[float, ...]:
        """Compute in fp32, as the reference does."""
        interval = np.float32(self.each) * np.float32(FRAMES / taken_fps(video))
        times = np.arange(groups).astype(np.float32) * interval
        return tuple(float(time) for time in times)


@dataclass(frozen=True)
class EachFrame:
    """Limits of `minimum` to `maximum` pixels a frame; with a `share`, no more than a frame's part
    of so many tokens (transformers' Qwen2VLVideoProcessor).
    """

    minimum: int
    maximum: int
    share: int | None = None

    def size(self, height: int, width: int, frames: int, factor: int) -> tuple[int, int]:
        maximum = self.maximum
        if self.share is not None:
            every = int(self.share * factor * factor * 0.9)
            maximum = max(min(maximum, every * FRAMES // frames), int(self.minimum * 1.05))
        return smart_resize(height, width, factor, self.minimum, maximum)


@dataclass(frozen=True)
class AllFrames:
    """Limits of `minimum` to `maximum` pixels for all frames together; with a `share`, no more than
    so many tokens a frame (transformers' Qwen3VLVideoProcessor, and Glm4vVideoProcessor, for which
    an odd number counts as the next even one).
    """

    minimum: int
    maximum: int
    share: int | None = None
    even: bool = False

    def size(self, height: int, width: int, frames: int, factor: int) -> tuple[int, int]:
        given = width, height
        # A single frame is a group by itself, which the references do not take.
        frames = max(frames + frames % 2 if self.even else frames, FRAMES)
        maximum = self.maximum
        if self.share is not None:
            each = max(
                min(self.share * factor**2, self.maximum // frames), int(self.minimum * 1.05)
            )
            maximum = each * frames
        if height < factor or width < factor:
            up = max(factor / height, factor / width)
            height, width = int(height * up), int(width * up)
        if max(height, width) > MAX_RATIO * min(height, width):
            raise too_narrow(*given)
        rows, columns = round(height / factor), round(width / factor)
        pixels = round(frames / FRAMES) * FRAMES * rows * columns * factor**2
        if pixels > maximum:
            shrink = math.sqrt(frames * height * width / maximum)
            rows = max(1, math.floor(height / shrink / factor))
            columns = max(1, math.floor(width / shrink / factor))
        elif pixels < self.minimum:
            grow = math.sqrt(self.minimum / (frames * height * width))
            rows, columns = math.ceil(height * grow / factor), math.ceil(width * grow / factor)
        return rows * factor, columns * factor


@dataclass(frozen=True)
class PairedFrames:
    """A token stands for a square of `factor` pixels a side of two frames."""

    factor: int
    limits: Limits
    normalize: Normalize
    resample: str
    rule: FrameRule
    markers: tuple[str, ...]
    token: str
    write: Write
    clock: Clock | None = None
    sound: SoundOrder | None = None
    on_grid: bool = True
    """Whether a token's position is its row and column."""

    def shape(
        self, width: int, height: int, frames: int, budget: Budget = DEFAULT_BUDGET
    ) -> ClipShape:
        full = self.limits.size(height, width, frames, self.factor)
        usual = full[0] // self.factor, full[1] // self.factor
        maximum = budget.max_tokens or (LOW_TOKENS if budget.low else None)
        rows, columns = usual if maximum is None else within(*usual, maximum)
        size = columns * self.factor, rows * self.factor
        notes = (
            ()
            if (rows, columns) == usual
            else (
                f"frames scaled to {size[0]} x {size[1]} to keep to {maximum} tokens each pair, "
                f"{usual[1] * self.factor} x {usual[0] * self.factor} without that",
            )
        )
        return ClipShape(size, FRAMES, -(-frames // FRAMES), rows * columns, notes)

    def scale(self, frame: Pixels, shape: ClipShape) -> Pixels:
        return resize_tensor(frame, *shape.size, self.resample)

    def group(self, frames: Sequence[Pixels], shape: ClipShape) -> ImagePlan:
        tile = tile_of_frames(frames, shape)
        grid = shape.size[1] // self.factor, shape.size[0] // self.factor
        return ImagePlan(
            (tile,),
            (shape.size,),
            shape.tokens,
            grids=(grid,) if self.on_grid else (),
            normalize=self.normalize,
        )

    def pixels(self, tile: np.ndarray) -> np.ndarray:
        return self.normalize.planes(tile)

    def prompt(self, video: Video, shape: ClipShape) -> str:
        return self.write(video, shape)

    def times(self, video: Video, shape: ClipShape) -> tuple[float, ...] | None:
        return None if self.clock is None else self.clock(video, shape.groups)


def read_pairs(
    video: Settings,
    *,
    patch: int,
    merge: int,
    mean: tuple[float, ...] = CLIP_MEAN,
    std: tuple[float, ...] = CLIP_STD,
) -> tuple[int, Normalize, str]:
    """Read it from a video processor's settings: the pixels on a side of a token, and how frames
    are normalised and resampled. `patch` and `merge` are config.json's. Raises ModelError where
    they do not fit together.
    """
    for key, expected, default in (
        ("patch_size", patch, patch),
        ("merge_size", merge, merge),
        ("temporal_patch_size", FRAMES, FRAMES),
    ):
        if (value := video.count(key, default)) != expected:
            raise ModelError(
                f"{video.where}: {key} is {value}, expected {expected} as config.json says; "
                "correct one of them"
            )
    return patch * merge, fused(read_normalize(video, mean, std)), read_resample(video, 3, MODES)


def read_limits(video: Settings, default: tuple[int, int]) -> tuple[int, int]:
    """Read the minimum and the maximum, in pixels."""
    size = video.part("size")
    if not size.values:
        return default
    return (
        size.count("shortest_edge", maximum=MAX_PIXELS),
        size.count("longest_edge", maximum=MAX_PIXELS),
    )


def check_limits(video: Settings, minimum: int, maximum: int, factor: int) -> None:
    """Raises ModelError where they allow no frame."""
    if minimum > maximum or maximum < factor**2:
        raise ModelError(
            f"{video.where}: {minimum} to {maximum} pixels, expected limits that allow {factor**2} "
            "and more"
        )


def read_share(video: Settings, default: int) -> int | None:
    """The tokens by which cap_pixels_per_frame limits frames, None where it does not."""
    share = video.count("max_video_tokens", default)
    return share if video.flag("cap_pixels_per_frame", False) else None


def read_each_frame(
    video: Settings,
    *,
    patch: int,
    merge: int,
    token: str,
    clock: Clock | None,
    limits: tuple[int, int] | None = None,
    sound: SoundOrder | None = None,
) -> PairedFrames:
    """Pairs within limits of pixels for each frame, in one run of tokens whose time is a position,
    or, without a `clock`, whose positions are plain (transformers' Qwen2VLVideoProcessor). Its
    settings need not say how many frames a second are taken: then it is what the authors' own tool
    takes. `limits` of pixels, where whatever the settings say does not count.
    """
    factor, normalize, resample = read_pairs(video, patch=patch, merge=merge)
    if limits is None:
        minimum, maximum = read_limits(video, EACH_FRAME)
        minimum = video.count("min_pixels", minimum, maximum=MAX_PIXELS)
        maximum = video.count("max_pixels", maximum, maximum=MAX_PIXELS)
    else:
        minimum, maximum = limits
    check_limits(video, minimum, maximum, factor)
    frames = video.count("min_frames", 4), video.count("max_frames", 768)
    return PairedFrames(
        factor=factor,
        limits=EachFrame(minimum, maximum, read_share(video, 128000)),
        normalize=normalize,
        resample=resample,
        rule=FrameRule(WholeGroups(video.number("fps", 2.0), *frames, FRAMES)),
        markers=(token,),
        token=token,
        write=Run(token),
        clock=clock,
        sound=sound,
        on_grid=clock is not None,
    )
