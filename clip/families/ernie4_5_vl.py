"""ERNIE 4.5 VL's vision tower (Baidu, ERNIE 4.5 Technical Report, 2025): Qwen2-VL's over pictures
of any size and frames of videos; a resampler makes a token of 2 x 2 patches, then of two frames,
where a picture is both.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace

from mtmd.clip.blocks import (
    ACTIVATIONS,
    biased_parameters,
    mlp,
    qkv_parameters,
    read_grid_rotary,
    rotary_attention,
)
from mtmd.clip.grids import Cells, Grids, OneGrid
from mtmd.clip.resolution.resolution import ImagePlan
from mtmd.clip.resolution.smart_resize import DynamicResolution, read_dynamic
from mtmd.clip.token_budget import DEFAULT_BUDGET, Budget
from mtmd.clip.video.family import ClipShape
from mtmd.clip.video.pairs import FRAMES, PairedFrames, read_each_frame
from mtmd.clip.video.rules import AllWithin, FrameRule
from mtmd.clip.video.video import Video
from mtmd.kernels import ops
from mtmd.kernels.checkpoint.canonical import Parameter
from mtmd.kernels.checkpoint.rotary import Rotary
from mtmd.kernels.checkpoint.settings import MAX_HEADS, MAX_LAYERS, MAX_WIDTH, Settings
from mtmd.kernels.graph import Node, WeightSource
from mtmd.kernels.layers import Weights
from mtmd.kernels.plan.flash_choice import AttentionForm

# transformers' defaults
PIXELS = 56 * 56, 28 * 28 * 6177
UNDRAWN = "times are not drawn on the frames, as this model's own processor does"
FRAME_PIXELS = {"shortest_edge": 299 * 28 * 28, "longest_edge": 1196 * 28 * 28}


@dataclass(frozen=True)
class TimedFrames(PairedFrames):
    """Groups of two frames; `drawn`: whether the reference writes the time of each on it, in a font
    of the checkpoint's.
    """

    drawn: bool = True

    def shape(
        self, width: int, height: int, frames: int, budget: Budget = DEFAULT_BUDGET
    ) -> ClipShape:
        shape = super().shape(width, height, frames, budget)
        return replace(shape, notes=(*shape.notes, UNDRAWN)) if self.drawn else shape


@dataclass(frozen=True)
class Ernie45Vision:
    layers: int
    width: int
    ffn: int
    heads: int
    text_width: int
    gelu: str
    eps: float
    text_eps: float
    rotary: Rotary
    resolution: DynamicResolution
    video: TimedFrames

    marker = image_token = "<|IMAGE_PLACEHOLDER|>"
    around = ("<|IMAGE_START|>", "<|IMAGE_END|>")
    bidirectional = False
    separator = None
    unused = ()

    @property
    def cells(self) -> Cells:
        return Cells(self.resolution.patch, self.resolution.merge)

    def parameters(self) -> Mapping[str, Parameter]:
        width, ffn, patch = self.width, self.ffn, self.resolution.patch
        merged = width * self.cells.patches
        kernel, flat = (width, 3, patch, patch), (width, 3 * patch * patch)
        parameters = {
            "v.patch_embd.weight": Parameter(
                kernel, _tower("patch_embed.proj.weight"), flat, lambda w: w.view(kernel)
            )
        }
        tensors: dict[str, tuple[str, tuple[int, ...]]] = {"v.post_ln": ("ln", (width,))}
        for layer in range(self.layers):
            at, block = f"v.blk.{layer}", f"blocks.{layer}"
            parameters |= qkv_parameters(at, width, f"{block}.attn.qkv", _tower)
            tensors |= {
                f"{at}.ln1": (f"{block}.norm1", (width,)),
                f"{at}.ln2": (f"{block}.norm2", (width,)),
                f"{at}.attn_out": (f"{block}.attn.proj", (width, width)),
                f"{at}.ffn_up": (f"{block}.mlp.fc1", (ffn, width)),
                f"{at}.ffn_down": (f"{block}.mlp.fc2", (width, ffn)),
            }
        resampler = {
            f"mm.{ours}.{part}": (f"{theirs}_linear.{number}", shape)
            for ours, theirs, read in (
                ("space", "spatial", merged),
                ("time", "temporal", FRAMES * merged),
            )
            for part, number, shape in (
                ("up", 0, (merged, read)),
                ("down", 2, (merged, merged)),
                ("norm", 3, (merged,)),
            )
        }
        resampler["mm.projection"] = ("mlp", (self.text_width, merged))
        parameters |= biased_parameters(tensors, _tower)
        parameters |= biased_parameters(resampler, _resampler)
        norm = Parameter((self.text_width,), _resampler("after_norm.weight"))
        return parameters | {"mm.post_norm.weight": norm}

    def prompt(self, plan: ImagePlan) -> str:
        return self.image_token * plan.tokens

    def graph(self, tiles: Node, weights: WeightSource, attention: AttentionForm) -> Node:
        return self.graph_on(OneGrid.of(tiles, self.cells), tiles, weights, attention)

    def graph_on(
        self, grids: Grids, tiles: Node, weights: WeightSource, attention: AttentionForm
    ) -> Node:
        w, (count, channels, *sides) = Weights(weights, tiles.dtype), tiles.shape
        frames = channels // 3
        if frames > 1:
            tiles = ops.reshape(tiles, shape=(count * frames, 3, *sides), name="v.frames")
        angles = ops.rope_table(grids.positions(), rotary=self.rotary, name="v.angles")
        x = ops.patch_embed(tiles, w.tensor("v.patch_embd.weight"), name="v.patch_embd")
        for layer in w.layers(self.layers):
            at = f"v.blk.{layer}"
            y = rotary_attention(
                w.layer_norm(x, f"{at}.ln1", self.eps),
                at,
                w,
                attention,
                heads=self.heads,
                angles=angles,
                bounds=grids.segments,
            )
            x = ops.add(y, x, name=f"{at}.attn_residual")
            y = mlp(w.layer_norm(x, f"{at}.ln2", self.eps), at, self.gelu, w)
            x = ops.add(y, x, name=f"{at}.ffn_residual")
        x = w.layer_norm(x, "v.post_ln", self.eps)
        x = ops.unshuffle(x, grid=grids.shape, factor=self.resolution.merge, name="mm.merged")
        x = self._resampled(x, "mm.space", w)
        both = (x, x) if frames == 1 else _frames(x, count)
        x = self._resampled(ops.concat(*both, axis=2, name="mm.frames"), "mm.time", w)
        x = w.linear(x, "mm.projection", bias=True)
        return w.rms_norm(x, "mm.post_norm", self.text_eps)

    def _resampled(self, x: Node, at: str, w: Weights) -> Node:
        """norm(down(gelu(up(x))))"""
        y = ops.gelu(w.linear(x, f"{at}.up", bias=True), approximate="none", name=f"{at}.gelu")
        return w.layer_norm(w.linear(y, f"{at}.down", bias=True), f"{at}.norm", self.eps)


def _frames(x: Node, count: int) -> tuple[Node, Node]:
    """Return the first and the second frame of each group          [2 B, T, D] -> [B, T, D]"""
    _, tokens, width = x.shape
    size = tokens * width
    groups = ops.reshape(x, shape=(count, FRAMES * size), name="mm.groups")
    first, second = (
        ops.reshape(
            ops.columns(groups, start=i * size, stop=(i + 1) * size, name=f"mm.frame.{i}.flat"),
            shape=(count, tokens, width),
            name=f"mm.frame.{i}",
        )
        for i in range(FRAMES)
    )
    return first, second


def read(top: Settings, image: Settings) -> Ernie45Vision:
    """Read it from config.json and the image processor's settings, with transformers' defaults;
    ModelError where a value cannot be followed.
    """
    c, text = top.part("vision_config"), top.part("text_config")
    c.choice("in_channels", (3,), 3)
    c.choice("temporal_merge_size", (FRAMES,), FRAMES)
    width, heads = (
        c.count("hidden_size", 1280, maximum=MAX_WIDTH),
        c.count("num_heads", 16, maximum=MAX_HEADS),
    )
    patch, merge = c.count("patch_size", 14), c.count("spatial_merge_size", 2)
    return Ernie45Vision(
        layers=c.count("depth", 32, maximum=MAX_LAYERS),
        width=width,
        ffn=c.count("intermediate_size", 5120, maximum=MAX_WIDTH),
        heads=heads,
        text_width=text.count("hidden_size", 2560, maximum=MAX_WIDTH),
        gelu=ACTIVATIONS[c.choice("hidden_act", ACTIVATIONS, "quick_gelu")],
        eps=c.number("rms_norm_eps", 1e-6),
        text_eps=text.number("rms_norm_eps", 1e-5),
        rotary=read_grid_rotary(c, width, heads),
        resolution=read_dynamic(image, patch, merge, temporal=1, limits=PIXELS),
        video=_video(image.part("video_processor"), patch, merge),
    )


def _video(given: Settings, patch: int, merge: int) -> TimedFrames:
    """Read how frames of videos are taken. Where only pictures have settings they are of videos,
    too, but for the frames of a group.
    """
    values = {key: value for key, value in given.values.items() if value is not None}
    c = Settings({"size": FRAME_PIXELS, **values, "temporal_patch_size": FRAMES}, given.where)
    given.choice("temporal_patch_size", (1, FRAMES), FRAMES)
    rate = c.number("fps") if "fps" in values else None
    pick = AllWithin(rate, c.count("min_frames", 16), c.count("max_frames", 180))
    family = read_each_frame(
        c, patch=patch, merge=merge, token="<|VIDEO_PLACEHOLDER|>", clock=_in_order
    )
    stated = {field.name: getattr(family, field.name) for field in fields(family)}
    drawn = c.flag("draw_on_frames", True)
    return TimedFrames(**stated | {"rule": FrameRule(pick)}, drawn=drawn)


def _in_order(video: Video, groups: int) -> tuple[int, ...]:  # noqa: ARG001
    """Groups count one each, however far apart they are."""
    return tuple(range(groups))


def _tower(name: str) -> tuple[str, ...]:
    return f"vision_model.{name}", f"model.vision_model.{name}"


def _resampler(name: str) -> tuple[str, ...]:
    return (f"model.resampler_model.{name}",)
