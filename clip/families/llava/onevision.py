"""LLaVA-OneVision (arXiv:2408.03326): a SigLIP tower, tiles of a picture alone, one of several
pictures whole, frames of a video in a quarter of the tokens.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from mtmd.base.errors import ModelError
from mtmd.clip.families.llava.tower import FeatureTower
from mtmd.clip.families.llava.vision import TOWERS, LlavaVision, check_grid, check_uncut, read_tower
from mtmd.clip.image.pixels import CLIP_MEAN, CLIP_STD, Pixels, fused, read_normalize
from mtmd.clip.image.resize import read_resample
from mtmd.clip.image.tensor_resize import MODES
from mtmd.clip.resolution.anyres import AnyAlone, mixed, read_canvases
from mtmd.clip.resolution.fixed_square import read_fixed_square
from mtmd.clip.resolution.resolution import ImagePlan
from mtmd.clip.token_budget import DEFAULT_BUDGET, Budget
from mtmd.clip.video.family import ClipShape, Run
from mtmd.clip.video.rules import Beginnings, FrameRule
from mtmd.clip.video.single import SingleFrames, Stretched
from mtmd.kernels.checkpoint.settings import Settings

VIDEO_TOKEN = "<video>"
FRAMES = 32  # that the authors train with, where the settings do not say
MAX_TILES = 99  # published: 9
SIDE = 384  # of frames and pictures, where the settings do not say
CANVASES = [[SIDE * down, SIDE * across] for down in range(1, 7) for across in range(1, 7)]


@dataclass(frozen=True)
class PooledFrames(SingleFrames):
    """Each frame as a picture of one tile, of which `saved` pixels a side are seen, its `grid` x
    `grid` tokens mixed to half as many a side, rounded up. A newline ends the video.
    """

    grid: int
    saved: int

    def shape(
        self, width: int, height: int, frames: int, budget: Budget = DEFAULT_BUDGET
    ) -> ClipShape:
        return replace(super().shape(width, height, frames, budget), closing=1)

    def group(self, frames: Sequence[Pixels], shape: ClipShape) -> ImagePlan:
        plan, half = super().group(frames, shape), pooled(self.grid)
        cells = np.arange(self.grid**2).reshape(self.grid, self.grid)
        order, weights = mixed(cells, half, half)
        tiles = tuple(tile[:, : self.saved, : self.saved] for tile in plan.tiles)
        return replace(
            plan, tiles=tiles, order=order.reshape(-1, 4), weights=weights.reshape(-1, 4)
        )


def pooled(grid: int) -> int:
    """Tokens a side of a frame."""
    return -(-grid // 2)


def read(top: Settings, image: Settings) -> LlavaVision:
    """Read it from config.json and the image processor's settings, with transformers' defaults;
    ModelError where a value cannot be followed.
    """
    tower = read_tower(top, TOWERS[1], -1, "full")
    check_grid(top, tower)
    normalize = read_normalize(image, CLIP_MEAN, CLIP_STD)
    whole = read_fixed_square(
        image,
        tower.image_size,
        tower.tokens,
        normalize,
        crops=False,
        ground=tuple(int(m * 255) for m in normalize.mean),
    )
    check_uncut(image, whole)
    whole = replace(whole, saved=tower.saved)
    resolution = AnyAlone(
        side=whole.side,
        grid=tower.grid,
        canvases=read_canvases(top, image, whole.side, CANVASES),
        normalize=normalize,
        resample=whole.resample,
        maximum=_max_tiles(top),
        saved=tower.saved,
        among=whole,
    )
    return LlavaVision(tower, resolution, _read_video(image.part("video_processor"), tower))


def _max_tiles(top: Settings) -> int:
    ratio = top.get("vision_aspect_ratio", "anyres_max_9")
    result = re.fullmatch(r"anyres_max_([0-9]{1,2})", ratio) if isinstance(ratio, str) else None
    if result is None or not 0 < int(result[1]) <= MAX_TILES:
        raise ModelError(
            f"{top.where}: vision_aspect_ratio is {ratio!r:.60}, expected anyres_max_ and the most "
            f"tiles, 1 to {MAX_TILES}"
        )
    return int(result[1])


def _read_video(video: Settings, tower: FeatureTower) -> PooledFrames:
    size, side = video.part("size"), tower.image_size
    for key in ("height", "width"):
        size.choice(key, (side,), SIDE)
    video.choice("do_center_crop", (False, None), None)
    return PooledFrames(
        how=Stretched(side, pooled(tower.grid) ** 2),
        normalize=fused(read_normalize(video, CLIP_MEAN, CLIP_STD)),
        resample=read_resample(video, 3, MODES),
        rule=FrameRule(Beginnings(video.count("num_frames", FRAMES))),
        markers=(VIDEO_TOKEN,),
        token=VIDEO_TOKEN,
        write=Run(VIDEO_TOKEN),
        grid=tower.grid,
        saved=tower.saved,
    )
