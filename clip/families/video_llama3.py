"""VideoLLaMA 3 (arXiv:2501.13106): SigLIP over pictures of any size, patches turned by their row
and column, each a token. Patches of a frame of a video are averaged 2 x 2, and those that look as
they did in the frame before are left out.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from mtmd.clip.blocks import (
    VitParams,
    biased_parameters,
    mlp,
    read_grid_rotary,
    read_vit,
    rotary_attention,
    vit_parameters,
)
from mtmd.clip.grids import Cells, Grids, OneGrid
from mtmd.clip.image.pixels import Pixels
from mtmd.clip.marks import Marks, read_marks
from mtmd.clip.resolution.resolution import ImagePlan
from mtmd.clip.resolution.smart_resize import DynamicResolution, read_dynamic, smart_resize
from mtmd.clip.token_budget import DEFAULT_BUDGET, Budget
from mtmd.clip.video.family import ClipShape, Run
from mtmd.clip.video.pairs import (
    EACH_FRAME,
    FRAMES,
    MAX_PIXELS,
    PairedFrames,
    check_limits,
    read_limits,
    read_pairs,
)
from mtmd.clip.video.rules import FrameRule, WholeGroups
from mtmd.clip.video.video import Video
from mtmd.kernels import ops
from mtmd.kernels.checkpoint.canonical import Parameter
from mtmd.kernels.checkpoint.rotary import Rotary
from mtmd.kernels.checkpoint.settings import MAX_WIDTH, Settings
from mtmd.kernels.graph import Node, WeightSource
from mtmd.kernels.layers import Weights
from mtmd.kernels.plan.flash_choice import AttentionForm

MERGES = 1, 2  # of more patches the reference takes those in the middle
HALF = (0.5,) * 3  # mean and deviation of pixels
ALIKE = 0.1  # how far pixels of a token may be from those before, on average and of 255


@dataclass(frozen=True)
class SharedPixels:
    """Limits of `minimum` pixels a frame and of `maximum` of all frames together (transformers'
    VideoLlama3VideoProcessor).
    """

    minimum: int
    maximum: int

    def size(self, height: int, width: int, frames: int, factor: int) -> tuple[int, int]:
        return smart_resize(height, width, factor, self.minimum, self.maximum // frames)


@dataclass(frozen=True)
class ThinnedFrames(PairedFrames):
    """Two frames go through the tower at once, each by itself; the second of an odd last group is
    the first one again, without tokens. With `thins`, tokens that look as in the frame before are
    left out, all but one of a frame.
    """

    thins: bool = True

    def shape(
        self, width: int, height: int, frames: int, budget: Budget = DEFAULT_BUDGET
    ) -> ClipShape:
        single = super().shape(width, height, frames, budget)
        notes = tuple(note.replace("each pair", "each") for note in single.notes)
        missing = frames % FRAMES * single.tokens
        return replace(single, tokens=FRAMES * single.tokens, missing=missing, notes=notes)

    def group(self, frames: Sequence[Pixels], shape: ClipShape) -> ImagePlan:
        return self.thinned(frames, None, shape)

    def thinned(
        self, frames: Sequence[Pixels], before: Pixels | None, shape: ClipShape
    ) -> ImagePlan:
        each, shown = shape.tokens // FRAMES, list[np.ndarray]()
        for number, frame in enumerate(frames):
            seen = np.ones(each, bool)
            if self.thins and before is not None:
                seen = self._changed(frame, before)
            seen[0] |= not seen.any()
            shown.append(np.flatnonzero(seen) + number * each)
            before = frame
        order, plan = np.concatenate(shown), super().group(frames, shape)
        return replace(plan, tokens=len(order), order=order, runs=tuple(map(len, shown)))

    def _changed(self, frame: Pixels, before: Pixels) -> np.ndarray:
        """bool [T], which tokens look otherwise than before."""
        a, b = (self.normalize.planes(pixels.transpose(2, 0, 1)) for pixels in (frame, before))
        rows, columns = frame.shape[0] // self.factor, frame.shape[1] // self.factor
        cells = np.abs(a - b).reshape(3, rows, self.factor, columns, self.factor)
        changed: np.ndarray = cells.mean((0, 2, 4)).ravel() * 255 > ALIKE
        return changed

    def prompt(self, video: Video, shape: ClipShape) -> str:
        return self._written(video, [shape.tokens // FRAMES] * len(video.indices))

    def prompt_of(self, video: Video, plans: Sequence[ImagePlan]) -> str:
        return self._written(video, [count for plan in plans for count in plan.runs])

    def _written(self, video: Video, counts: Sequence[int]) -> str:
        """Each frame's tokens behind its time."""
        parts = zip(video.times, counts, strict=True)
        return ",".join(f"Time {time:.1f}s:{self.token * count}" for time, count in parts)


@dataclass(frozen=True)
class VideoLlama3Vision:
    """`merge`: neighbouring patches of a frame, a side, that are averaged to a token."""

    vit: VitParams
    text_width: int
    rotary: Rotary
    resolution: DynamicResolution
    video: ThinnedFrames
    merge: int
    marks: Marks

    around = ("", "")
    bidirectional = False
    separator = None
    unused = ()

    @property
    def marker(self) -> str:
        return self.marks.image

    image_token = marker

    @property
    def cells(self) -> Cells:
        return Cells(self.resolution.patch, self.resolution.merge)

    def parameters(self) -> Mapping[str, Parameter]:
        width, patch, text = self.vit.width, self.resolution.patch, self.text_width
        ends = {
            "v.patch_embd": ("embeddings.patch_embedding", (width, 3, patch, patch)),
            "v.post_ln": ("post_layernorm", (width,)),
        }
        projector = {"mm.0": ("0", (text, width)), "mm.2": ("2", (text, text))}
        parameters = vit_parameters(self.vit, _tower) | biased_parameters(ends, _tower)
        return parameters | biased_parameters(projector, _projector)

    def prompt(self, plan: ImagePlan) -> str:
        return self.image_token * plan.tokens

    def graph(self, tiles: Node, weights: WeightSource, attention: AttentionForm) -> Node:
        return self.graph_on(OneGrid.of(tiles, self.cells), tiles, weights, attention)

    def graph_on(
        self, grids: Grids, tiles: Node, weights: WeightSource, attention: AttentionForm
    ) -> Node:
        w, vit, (count, channels, *sides) = Weights(weights, tiles.dtype), self.vit, tiles.shape
        frames = channels // 3
        if frames > 1:
            tiles = ops.reshape(tiles, shape=(count * frames, 3, *sides), name="v.frames")
        angles = ops.rope_table(grids.positions(), rotary=self.rotary, name="v.angles")
        kernel, bias = w.tensor("v.patch_embd.weight"), w.tensor("v.patch_embd.bias")
        x = ops.patch_embed(tiles, kernel, bias, name="v.patch_embd")
        for layer in w.layers(vit.layers):
            at = f"v.blk.{layer}"
            y = rotary_attention(
                w.layer_norm(x, f"{at}.ln1", vit.eps),
                at,
                w,
                attention,
                heads=vit.heads,
                angles=angles,
                bounds=grids.segments,
            )
            x = ops.add(y, x, name=f"{at}.attn_residual")
            y = mlp(w.layer_norm(x, f"{at}.ln2", vit.eps), at, vit.gelu, w)
            x = ops.add(y, x, name=f"{at}.ffn_residual")
        x = w.layer_norm(x, "v.post_ln", vit.eps)
        if frames > 1 and self.merge > 1:
            rows, columns = grids.shape
            size = rows // self.merge, columns // self.merge
            x = ops.pool2d(x, grid=grids.shape, size=size, name="mm.averaged")
        x = ops.gelu(w.linear(x, "mm.0", bias=True), approximate="none", name="mm.gelu")
        x = w.linear(x, "mm.2", bias=True)
        if frames == 1:
            return x
        return ops.reshape(x, shape=(count, frames * x.shape[1], x.shape[2]), name="mm.frames")


def read(top: Settings, image: Settings) -> VideoLlama3Vision:
    """Read it from config.json and the image processor's settings, with transformers' defaults;
    ModelError where a value cannot be followed.
    """
    c = top.part("vision_config")
    c.choice("num_channels", (3,), 3)
    vit = read_vit(c, layers=12, width=768, ffn=3072, heads=12, act="gelu_pytorch_tanh")
    patch, marks = c.count("patch_size", 16), read_marks(image, Marks())
    defaults = {"patch_size": patch, "merge_size": 1, "image_mean": [*HALF], "image_std": [*HALF]}
    image = Settings({**defaults, **image.values}, image.where)
    video = image.part("video_processor")
    return VideoLlama3Vision(
        vit=vit,
        text_width=top.part("text_config").count("hidden_size", 4096, maximum=MAX_WIDTH),
        rotary=read_grid_rotary(c, vit.width, vit.heads),
        resolution=read_dynamic(image, patch, 1, temporal=1, on_grid=False),
        video=_video(video, patch, marks),
        merge=video.choice("merge_size", MERGES, 2),
        marks=marks,
    )


def _video(given: Settings, patch: int, marks: Marks) -> ThinnedFrames:
    """Read how frames of videos are taken; a patch is of one frame."""
    given.choice("temporal_patch_size", (1,), 1)
    video = Settings({**given.values, "temporal_patch_size": FRAMES}, given.where)
    merge = video.choice("merge_size", MERGES, 2)
    factor, normalize, resample = read_pairs(video, patch=patch, merge=merge, mean=HALF, std=HALF)
    minimum, maximum = read_limits(video, EACH_FRAME)
    minimum = video.count("min_pixels", minimum, maximum=MAX_PIXELS)
    maximum = video.count("max_pixels", maximum, maximum=MAX_PIXELS)
    check_limits(video, minimum, maximum, factor)
    frames = video.count("min_frames", 4), video.count("max_frames", 180)
    return ThinnedFrames(
        factor=factor,
        limits=SharedPixels(minimum, maximum),
        normalize=normalize,
        resample=resample,
        rule=FrameRule(WholeGroups(video.number("fps", 1.0), *frames, 1)),
        markers=(marks.video,),
        token=marks.video,
        write=Run(marks.video),
        on_grid=False,
        thins=video.flag("use_token_compression", True),
    )


def _tower(name: str) -> tuple[str, ...]:
    return (f"model.vision_model.{name}",)


def _projector(name: str) -> tuple[str, ...]:
    return (f"model.projector.readout.{name}",)
