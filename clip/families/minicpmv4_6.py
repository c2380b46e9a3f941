"""MiniCPM-V 4.6's vision tower (arXiv:2509.18154), which is MiniCPM-OCR's and 4.7's, too: SigLIP
over a picture and its slices, whose patches attend in windows of 2 x 2 and become one of them after
a few layers; four of what is left become a token. The tokens of a picture of 4.7 lie on a canvas,
over all of which the whole is stretched, and the slices where they were cut.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import isqrt
from typing import Any

import numpy as np
import torch

from mtmd.base.errors import ModelError
from mtmd.clip.blocks import (
    GgufTower,
    VitParams,
    attend,
    biased_parameters,
    buckets,
    checkpoint_names,
    gguf_vit,
    read_vit,
    split_heads,
    tower_keys,
    tower_names,
    vit_block,
    vit_parameters,
)
from mtmd.clip.grids import Cells, Grids, OneGrid
from mtmd.clip.image.pixels import fused, gguf_image, read_normalize
from mtmd.clip.image.resize import read_resample
from mtmd.clip.image.tensor_resize import MODES
from mtmd.clip.resolution.resolution import ImagePlan
from mtmd.clip.resolution.slices import SlicedTiling, read_sliced_tiling
from mtmd.clip.video.family import ClipShape
from mtmd.clip.video.rules import EachSecond, FrameRule
from mtmd.clip.video.single import SingleFrames, WholeFrame
from mtmd.clip.video.video import Video
from mtmd.kernels import ops
from mtmd.kernels.checkpoint.canonical import Parameter
from mtmd.kernels.checkpoint.settings import MAX_WIDTH, Settings
from mtmd.kernels.graph import Node, Shape, WeightSource
from mtmd.kernels.layers import Weights
from mtmd.kernels.plan.flash_choice import AttentionForm

WINDOW = 2  # patches on a side of what becomes one
PROJECTOR_EPS = 1e-6  # the settings do not say
SIDES = {"16x": 4, "4x": 2}  # patches on a side of a token
VIDEO_TOKEN = "<|video_pad|>"


@dataclass(frozen=True)
class MiniCpmVision:
    """`merged_after`: the layer after which windows of patches become one; None where they stay
    patches, and a token stands for four of them.
    """

    vit: VitParams
    positions: int  # on a side of the tower's table
    patch: int
    merged_after: int | None
    text_width: int
    numbers: bool  # whether the prompt counts pictures and videos
    canvases: bool  # whether it is MiniCPM-V 4.7, which counts no videos
    resolution: SlicedTiling
    video: SingleFrames

    marker = image_token = "<|image_pad|>"
    around = ("", "")
    bidirectional = False
    separator = None
    unused = (r"(model\.)?vision_tower\.(vision_model\.)?vit_merger\..*",)  # left out by "4x"

    @property
    def cells(self) -> Cells:
        return Cells(self.patch, WINDOW if self.merged_after is None else WINDOW**2)

    def parameters(self) -> Mapping[str, Parameter]:
        vit, four = self.vit, WINDOW**2
        width, wide = vit.width, vit.width * four
        ends: dict[str, tuple[str, tuple[int, ...]]] = {
            "v.patch_embd": ("embeddings.patch_embedding", (width, 3, self.patch, self.patch)),
            "v.post_ln": ("post_layernorm", (width,)),
        }
        if self.merged_after is not None:
            at, theirs = "v.vit_merger", "vit_merger"
            ends |= {
                f"{at}.ln1": (f"{theirs}.layer_norm1", (width,)),
                **{
                    f"{at}.attn_{part}": (f"{theirs}.self_attn.{name}_proj", (width, width))
                    for part, name in (("q", "q"), ("k", "k"), ("v", "v"), ("out", "out"))
                },
                f"{at}.ds_ln": (f"{theirs}.pre_norm", (wide,)),
                f"{at}.ds_ffn_up": (f"{theirs}.linear_1", (vit.ffn * four, wide)),
                f"{at}.ds_ffn_down": (f"{theirs}.linear_2", (width, vit.ffn * four)),
            }
        projector = {
            "mm.input_norm": ("pre_norm", (wide,)),
            "mm.up": ("linear_1", (wide, wide)),
            "mm.down": ("linear_2", (self.text_width, wide)),
        }
        parameters = vit_parameters(vit, tower_names) | biased_parameters(ends, tower_names)
        parameters["v.position_embd.weight"] = Parameter(
            (self.positions**2, width), tower_names("embeddings.position_embedding.weight")
        )
        return parameters | biased_parameters(
            projector, lambda name: checkpoint_names(f"merger.mlp.0.{name}")
        )

    def numbered(self, index: int, video: bool) -> str:
        """The text before a picture or a video that says which of a conversation's it is."""
        counted = self.numbers and not (video and self.canvases)
        return f"<image_id>{index}</image_id>" if counted else ""

    def prompt(self, plan: ImagePlan) -> str:
        """The whole picture, and its slices line by line."""
        whole, *slices = (
            self.image_token * (width * height // self.cells.side**2)
            for width, height in plan.sizes
        )
        columns = plan.cut[1]
        sliced = [f"<slice>{tokens}</slice>" for tokens in slices]
        lines = ["".join(sliced[i : i + columns]) for i in range(0, len(sliced), columns)]
        return f"<image>{whole}</image>" + "\n".join(lines)

    def canvas(self, plan: ImagePlan) -> np.ndarray | None:
        """Return the places of the tokens of `prompt(plan)`: of a canvas as large as all slices,
        or as the whole, where there are none.
        """
        if not self.canvases:
            return None
        whole, *slices = (
            (height // self.cells.side, width // self.cells.side) for width, height in plan.sizes
        )
        rows, columns = plan.cut
        down, across = slices[0] if slices else (0, 0)
        size = (rows * down, columns * across) if slices else whole
        parts = [_mark(-1, -1), _cells(whole, size), _mark(*size)]
        for index, (height, width) in enumerate(slices):
            top, left = index // columns * down, index % columns * across
            if index and index % columns == 0:  # the end of the line before
                parts.append(_mark(top - 1, size[1]))
            cells = _cells((height, width), (height, width)) + np.array([[0], [top], [left]])
            parts += [_mark(top, left), cells, _mark(top + height - 1, left + width - 1)]
        return np.concatenate(parts, 1)

    def graph(self, tiles: Node, weights: WeightSource, attention: AttentionForm) -> Node:
        return self.graph_on(OneGrid.of(tiles, self.cells), tiles, weights, attention)

    def graph_on(
        self, grids: Grids, tiles: Node, weights: WeightSource, attention: AttentionForm
    ) -> Node:
        w, grid = Weights(weights, tiles.dtype), grids.shape
        x = ops.patch_embed(
            tiles,
            w.tensor("v.patch_embd.weight"),
            w.tensor("v.patch_embd.bias"),
            name="v.patch_embd",
        )
        rows = grids.of_patches("inp.position_rows", self._position_rows, 1, flat=True)
        x = ops.add(
            x,
            ops.take_rows(w.tensor("v.position_embd.weight"), rows, name="v.position_rows"),
            name="v.position_embd",
        )
        bounds = grids.segments
        for index in w.layers(self.vit.layers):
            x = vit_block(x, index, self.vit, w, attention=attention, bounds=bounds)
            if index == self.merged_after:
                x = self._merged(x, grids, w, attention)
                grid = grid[0] // WINDOW, grid[1] // WINDOW
                bounds = grids.merged_segments(WINDOW)
        x = w.layer_norm(x, "v.post_ln", self.vit.eps)
        x = w.layer_norm(
            ops.unshuffle(x, grid=grid, factor=WINDOW, name="mm.unshuffle"),
            "mm.input_norm",
            PROJECTOR_EPS,
        )
        x = ops.gelu(w.linear(x, "mm.up", bias=True), approximate="none", name="mm.gelu")
        return w.linear(x, "mm.down", bias=True)

    def _merged(self, x: Node, grids: Grids, w: Weights, attention: AttentionForm) -> Node:
        """Windows of patches become one of them          [B, P, C] -> [B, P / 4, C]

        They attend to each other; then their mean, and what two layers make of them side by side.
        """
        at, p, (batch, patches, width) = "v.vit_merger", self.vit, x.shape
        four = WINDOW**2
        x = ops.reshape(
            ops.unshuffle(x, grid=grids.shape, factor=WINDOW, name=f"{at}.windows"),
            shape=(batch, patches, width),
            name=f"{at}.patches",
        )
        windows = grids.input(
            "inp.windows", (patches, 2), torch.int32, lambda _: _windows(patches), keys=four
        )
        y = w.layer_norm(x, f"{at}.ln1", p.eps)
        q, k, v = (
            split_heads(w.linear(y, name, bias=True), p.heads, name)
            for name in (f"{at}.attn_{part}" for part in "qkv")
        )
        y = attend(q, k, v, attention, at=at, bounds=windows)
        x = ops.add(w.linear(y, f"{at}.attn_out", bias=True), x, name=f"{at}.attn_residual")
        mean = ops.pool2d(
            x, grid=(patches // WINDOW, WINDOW), size=(patches // WINDOW**2, 1), name=f"{at}.mean"
        )
        x = ops.reshape(x, shape=(batch, patches // four, width * four), name=f"{at}.alongside")
        x = w.linear(w.layer_norm(x, f"{at}.ds_ln", p.eps), f"{at}.ds_ffn_up", bias=True)
        x = ops.gelu(x, approximate="tanh", name=f"{at}.gelu")
        return ops.add(w.linear(x, f"{at}.ds_ffn_down", bias=True), mean, name=f"{at}.ffn_residual")

    def _position_rows(self, rows: int, columns: int) -> torch.Tensor:
        """int64 [1, P]: which row of the tower's table each patch takes."""
        down, across = (torch.arange(side) / side for side in (rows, columns))
        return buckets(down, across, self.positions).view(1, -1)


def _mark(row: int, column: int) -> np.ndarray:
    return np.array([[0], [row], [column]], np.int64)


def _cells(grid: tuple[int, int], size: tuple[int, int]) -> np.ndarray:
    """int64 [3, T]: the places of a grid's tokens, stretched over a canvas of another size."""
    rows, columns = (
        torch.linspace(0, length - 1, count).round().long().numpy()
        for length, count in zip(size, grid, strict=True)
    )
    row, column = np.meshgrid(rows, columns, indexing="ij")
    return np.stack((np.zeros_like(row), row, column)).reshape(3, -1)


def _windows(patches: int) -> torch.Tensor:
    """int32 [P, 2]: the first and the last of the four patches of each patch's window."""
    first = torch.arange(patches, dtype=torch.int32) // WINDOW**2 * WINDOW**2
    return torch.stack((first, first + WINDOW**2 - 1), 1)


def _read_video(video: Settings, patch: int, merge: int) -> SingleFrames:
    """Slices are for pictures: the model's authors turn them off for videos, whose settings have
    them on.
    """
    video.choice("stack_frames", (1,), 1)
    return SingleFrames(
        how=WholeFrame(read_sliced_tiling(video, patch, merge)),
        normalize=fused(read_normalize(video)),
        resample=read_resample(video, 3, MODES),
        rule=FrameRule(EachSecond(video.count("max_num_frames", 128))),
        markers=(VIDEO_TOKEN,),
        token=VIDEO_TOKEN,
        write=_write,
    )


def _write(video: Video, shape: ClipShape) -> str:  # noqa: ARG001
    """Each frame as a picture."""
    return f"<image>{VIDEO_TOKEN * shape.tokens}</image>" * shape.groups


def to_gguf(family: MiniCpmVision) -> GgufTower:
    """Return the keys of a GGUF that say the same."""
    keys = tower_keys(
        family.vit,
        image_size=family.resolution.side,
        patch=family.patch,
        text_width=family.text_width,
    )
    after = [] if family.merged_after is None else [family.merged_after]
    return GgufTower(
        "minicpmv4_6",
        keys
        | {
            "use_gelu": True,
            "vision.projector.scale_factor": family.cells.merge,
            "vision.wa_layer_indexes": after,
        },
    )


def from_gguf(keys: Settings, shapes: Mapping[str, Shape]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return what config.json and the image processor's settings would say; how many slices there
    are, files do not tell.
    """
    vision, patch = gguf_vit(keys), keys.count("vision.patch_size", 14)
    rows = [*shapes.get("v.position_embd.weight", ()), 0][0]
    merge, after = (
        keys.count("vision.projector.scale_factor", 4),
        keys.get("vision.wa_layer_indexes", None),
    )
    mode = next((name for name, side in SIDES.items() if side == merge), str(merge))
    config = {
        "vision_config": vision | {"image_size": isqrt(rows) * patch},
        "text_config": {"hidden_size": keys.count("vision.projection_dim")},
        "downsample_mode": mode,
        "insert_layer_id": after[0] if isinstance(after, list) and len(after) == 1 else -1,
    }
    image = {
        **gguf_image(keys),
        "patch_size": patch,
        "scale_resolution": keys.count("vision.image_size", 448),
        "downsample_mode": mode,
    }
    return config, {**image, "video_processor": image}


def read(top: Settings, image: Settings) -> MiniCpmVision:
    """Read it from config.json and the image processor's settings, with transformers' defaults;
    ModelError where a value cannot be followed.
    """
    vision = top.part("vision_config")
    vit = read_vit(vision, layers=12, width=768, ffn=3072, heads=12, act="gelu_pytorch_tanh")
    vision.choice("num_channels", (3,), 3)
    top.choice("merger_times", (1,), 1)
    top.choice("drop_vision_last_layer", (False,), False)
    for part, key in ((vision, "window_kernel_size"), (top, "merge_kernel_size")):
        if part.get(key, [WINDOW, WINDOW]) != [WINDOW, WINDOW]:
            raise ModelError(
                f"{part.where}: {key} is {part.get(key, None)!r:.40}, expected [{WINDOW}, {WINDOW}]"
            )
    ocr = top.get("model_type", "") == "minicpm_ocr"
    usual = "4x" if ocr else "16x"
    mode = top.choice("downsample_mode", SIDES, usual)
    video = image.part("video_processor")
    for part in (image, *[video] * bool(video.get("downsample_mode", None))):
        if (theirs := part.choice("downsample_mode", SIDES, usual)) != mode:
            raise ModelError(
                f"{part.where}: downsample_mode is {theirs}, expected {mode} as config.json says; "
                "correct one of them"
            )
    patch, after = vision.count("patch_size", 16), top.get("insert_layer_id", 6)
    if mode == "4x":
        after = None
    elif type(after) is not int or not 0 <= after < vit.layers:
        raise ModelError(
            f"{top.where}: insert_layer_id is {after!r:.40}, expected a layer below {vit.layers}"
        )
    return MiniCpmVision(
        vit=vit,
        positions=vision.count("image_size", 224) // patch,
        patch=patch,
        merged_after=after,
        text_width=top.part("text_config").count("hidden_size", 4096, maximum=MAX_WIDTH),
        numbers=image.flag("use_image_id", True),
        canvases=top.get("model_type", "") == "minicpmv4_7",
        resolution=read_sliced_tiling(image, patch, SIDES[mode], by_tensor=ocr),
        video=_read_video(video, patch, SIDES[mode]),
    )
