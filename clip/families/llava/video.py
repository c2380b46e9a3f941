"""LLaVA-NeXT-Video (its authors' announcement of 30 April 2024; no paper) and Video-LLaVA
(arXiv:2311.10122): LLaVA-NeXT whose frames are seen in a quarter of the tokens, LLaVA 1.5 with a
second tower for frames.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from mtmd.base.errors import ModelError
from mtmd.clip.families.llava.tower import FeatureTower
from mtmd.clip.families.llava.vision import LlavaVision, read_pictures, read_tower
from mtmd.clip.image.pixels import CLIP_MEAN, CLIP_STD, Pixels, fused, read_normalize
from mtmd.clip.image.resize import read_resample
from mtmd.clip.image.tensor_resize import MODES
from mtmd.clip.resolution.fixed_square import read_fixed_square, scaled_to_short_edge
from mtmd.clip.resolution.resolution import ImagePlan
from mtmd.clip.token_budget import DEFAULT_BUDGET, Budget
from mtmd.clip.video.family import ClipShape, Run
from mtmd.clip.video.rules import Beginnings, FrameRule
from mtmd.clip.video.single import SingleFrames, Stretched
from mtmd.kernels import ops
from mtmd.kernels.checkpoint.canonical import Parameter
from mtmd.kernels.checkpoint.settings import Settings
from mtmd.kernels.graph import Node, WeightSource
from mtmd.kernels.layers import Weights
from mtmd.kernels.plan.flash_choice import AttentionForm

VIDEO_TOKEN = "<video>"
FRAMES = {"llava_next_video": 32, "video_llava": 8}  # that the authors train with
POOL = 2  # neighbours a side that make a token
PAIR = 2  # frames of a tile, which tell it from that of a picture


@dataclass(frozen=True)
class CutFrames(SingleFrames):
    """Frames scaled until their shorter edge has `edge` pixels, cut in the middle, two of them in a
    group. In a group of one it is there twice, its tokens once.
    """

    edge: int

    def shape(
        self, width: int, height: int, frames: int, budget: Budget = DEFAULT_BUDGET
    ) -> ClipShape:
        scaled_to_short_edge((width, height), self.edge)
        single, groups = super().shape(width, height, frames, budget), -(-frames // PAIR)
        missing = (groups * PAIR - frames) * single.tokens // PAIR
        return replace(single, frames=PAIR, groups=groups, missing=missing)

    def scale(self, frame: Pixels, shape: ClipShape) -> Pixels:
        width, height = scaled_to_short_edge((frame.shape[1], frame.shape[0]), self.edge)
        scaled, (side, _) = self.scaled(frame, width, height, self.resample), shape.size
        left, top = (width - side) // 2, (height - side) // 2
        return scaled[top : top + side, left : left + side]

    def group(self, frames: Sequence[Pixels], shape: ClipShape) -> ImagePlan:
        plan = super().group(frames, shape)
        tokens = shape.tokens * len(frames) // PAIR
        if tokens == shape.tokens:
            return plan
        return replace(plan, tokens=tokens, order=np.arange(tokens))


@dataclass(frozen=True)
class LlavaVideo(LlavaVision):
    """`frames` is the tower of frames, that of pictures in LLaVA-NeXT-Video. `pool`: neighbours a
    side of a frame's features that are averaged.
    """

    frames: FeatureTower | None = None
    pool: int = 1

    @property
    def unused(self) -> tuple[str, ...]:
        return (*self.tower.unused, *self._frames.unused)

    @property
    def _frames(self) -> FeatureTower:
        return self.frames or self.tower

    def parameters(self) -> Mapping[str, Parameter]:
        return {**super().parameters(), **self._frames.tower_parameters()}

    def graph(self, tiles: Node, weights: WeightSource, attention: AttentionForm) -> Node:
        if tiles.shape[1] == 3:
            return super().graph(tiles, weights, attention)
        w, tower = Weights(weights, tiles.dtype), self._frames
        batch, channels, rows, columns = tiles.shape
        frames = channels // 3
        each = ops.reshape(tiles, shape=(batch * frames, 3, rows, columns), name="v.frames")
        x = tower.seen(each, w, attention)
        if self.pool > 1:
            grid, size = (tower.grid,) * 2, (tower.grid // self.pool,) * 2
            x = ops.pool2d(x, grid=grid, size=size, name="v.frames.pool")
        x = self.tower.projected(x, w)
        return ops.reshape(x, shape=(batch, frames * x.shape[1], x.shape[2]), name="mm.frames")


def read(top: Settings, image: Settings) -> LlavaVideo:
    """Read it from config.json and the image processor's settings, with transformers' defaults;
    ModelError where a value cannot be followed.
    """
    kind = top.choice("model_type", FRAMES, "llava_next_video")
    tiled = kind == "llava_next_video"
    pictures = read_pictures(top, image, read_tower(top), tiled=tiled)
    tower, pool, frames = pictures.tower, 1, None
    if tiled:
        top.choice("spatial_pool_mode", ("average",), "average")
        pool = top.choice("spatial_pool_stride", (POOL,), POOL)
        if tower.grid % pool:
            raise ModelError(
                f"{top.where}: spatial_pool_stride {pool} does not divide the {tower.grid} patches "
                "a side of a frame"
            )
        tokens = (tower.grid // pool) ** 2
    else:
        tower = replace(tower, module="image_tower")
        frames = replace(tower, at="v.frames", module="video_tower", skip_first=False)
        tokens = frames.tokens
    video = image.part("video_processor")
    return LlavaVideo(
        tower, pictures.resolution, _read_frames(video, tower, tokens, FRAMES[kind]), frames, pool
    )


def _read_frames(video: Settings, tower: FeatureTower, tokens: int, frames: int) -> CutFrames:
    normalize = fused(read_normalize(video, CLIP_MEAN, CLIP_STD))
    square = read_fixed_square(video, tower.image_size, tokens, normalize, crops=True, ground=None)
    if square.stretched or tower.saved != square.side:
        raise ModelError(
            f"{video.where}: frames of {square.side} pixels a side in patches of {tower.patch}, "
            "expected size with shortest_edge, and whole patches"
        )
    return CutFrames(
        how=Stretched(square.side, tokens * PAIR),
        normalize=normalize,
        resample=read_resample(video, 3, MODES),
        rule=FrameRule(Beginnings(video.count("num_frames", frames))),
        markers=(VIDEO_TOKEN,),
        token=VIDEO_TOKEN,
        write=Run(VIDEO_TOKEN),
        edge=square.edge,
    )
