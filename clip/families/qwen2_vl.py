"""Qwen2-VL's vision tower: pictures of any size, patches turned by their row and column, 2 x 2 of
them merged into a token (arXiv:2409.12191).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from mtmd.clip.blocks import (
    ACTIVATIONS,
    GGUF_IMAGE_SIZE,
    GgufTower,
    biased_parameters,
    frames_kernel,
    gguf_vit,
    mlp,
    qkv_parameters,
    read_grid_rotary,
    rotary_attention,
    tower_keys,
    two_frames,
)
from mtmd.clip.grids import Cells, Grids, OneGrid
from mtmd.clip.resolution.resolution import ImagePlan
from mtmd.clip.resolution.smart_resize import DynamicResolution, gguf_dynamic, read_dynamic
from mtmd.clip.video.pairs import PairedFrames, read_each_frame
from mtmd.clip.video.video import Video
from mtmd.kernels import ops
from mtmd.kernels.checkpoint.canonical import Parameter
from mtmd.kernels.checkpoint.rotary import Rotary
from mtmd.kernels.checkpoint.settings import MAX_HEADS, MAX_LAYERS, MAX_WIDTH, Settings
from mtmd.kernels.graph import Node, WeightSource
from mtmd.kernels.layers import Weights
from mtmd.kernels.plan.flash_choice import AttentionForm

EPS = 1e-6  # of every norm; the settings do not say


@dataclass(frozen=True)
class Qwen2Vision:
    layers: int
    width: int
    ffn: int
    heads: int
    text_width: int
    gelu: str
    rotary: Rotary
    resolution: DynamicResolution
    video: PairedFrames

    marker = image_token = "<|image_pad|>"
    around = ("<|vision_start|>", "<|vision_end|>")
    bidirectional = False
    separator = None
    unused = ()

    def parameters(self) -> Mapping[str, Parameter]:
        width, ffn, merged = self.width, self.ffn, self.width * self.resolution.merge**2
        parameters = two_frames(width, self.resolution.patch, _names("patch_embed.proj.weight"))
        tensors: dict[str, tuple[str, tuple[int, ...]]] = {
            "v.post_ln": ("merger.ln_q", (width,)),
            "mm.0": ("merger.mlp.0", (merged, merged)),
            "mm.2": ("merger.mlp.2", (self.text_width, merged)),
        }
        for layer in range(self.layers):
            at, block = f"v.blk.{layer}", f"blocks.{layer}"
            parameters |= qkv_parameters(at, width, f"{block}.attn.qkv", _names)
            tensors |= {
                f"{at}.ln1": (f"{block}.norm1", (width,)),
                f"{at}.ln2": (f"{block}.norm2", (width,)),
                f"{at}.attn_out": (f"{block}.attn.proj", (width, width)),
                f"{at}.ffn_up": (f"{block}.mlp.fc1", (ffn, width)),
                f"{at}.ffn_down": (f"{block}.mlp.fc2", (width, ffn)),
            }
        return parameters | biased_parameters(tensors, _names)

    def prompt(self, plan: ImagePlan) -> str:
        return self.image_token * plan.tokens

    @property
    def cells(self) -> Cells:
        return Cells(self.resolution.patch, self.resolution.merge)

    def graph(self, tiles: Node, weights: WeightSource, attention: AttentionForm) -> Node:
        return self.graph_on(OneGrid.of(tiles, self.cells), tiles, weights, attention)

    def graph_on(
        self, grids: Grids, tiles: Node, weights: WeightSource, attention: AttentionForm
    ) -> Node:
        w = Weights(weights, tiles.dtype)
        angles = ops.rope_table(grids.positions(), rotary=self.rotary, name="v.angles")
        x = ops.patch_embed(tiles, frames_kernel(tiles, w), name="v.patch_embd")
        for layer in w.layers(self.layers):
            at = f"v.blk.{layer}"
            y = rotary_attention(
                w.layer_norm(x, f"{at}.ln1", EPS),
                at,
                w,
                attention,
                heads=self.heads,
                angles=angles,
                bounds=grids.segments,
            )
            x = ops.add(y, x, name=f"{at}.attn_residual")
            x = ops.add(
                mlp(w.layer_norm(x, f"{at}.ln2", EPS), at, self.gelu, w),
                x,
                name=f"{at}.ffn_residual",
            )
        x = w.layer_norm(x, "v.post_ln", EPS)
        x = ops.unshuffle(x, grid=grids.shape, factor=self.resolution.merge, name="mm.merged")
        return w.linear(
            ops.gelu(w.linear(x, "mm.0", bias=True), approximate="none", name="mm.gelu"),
            "mm.2",
            bias=True,
        )


def to_gguf(family: Qwen2Vision) -> GgufTower:
    """Return the keys of a GGUF that say the same."""
    keys = tower_keys(
        family,
        image_size=GGUF_IMAGE_SIZE,
        patch=family.resolution.patch,
        text_width=family.text_width,
    )
    return GgufTower("qwen2vl_merger", keys)


def from_gguf(keys: Settings, names: Collection[str]) -> tuple[dict[str, Any], dict[str, Any]]:  # noqa: ARG001
    """Return what config.json and the image processor's settings would say."""
    plain, width = gguf_vit(keys), keys.count("vision.embedding_length", maximum=MAX_WIDTH)
    vision = {
        "depth": plain["num_hidden_layers"],
        "embed_dim": width,
        "num_heads": plain["num_attention_heads"],
        "mlp_ratio": keys.count("vision.feed_forward_length", maximum=MAX_WIDTH) / width,
        "patch_size": plain["patch_size"],
        "hidden_act": plain["hidden_act"],
        "hidden_size": keys.get("vision.projection_dim", None),
    }
    return {"vision_config": vision}, gguf_dynamic(keys)


def read(top: Settings, image: Settings) -> Qwen2Vision:
    """Read it from config.json and the image processor's settings, with transformers' defaults;
    ModelError where a value cannot be followed.
    """
    c = top.part("vision_config")
    c.choice("in_channels", (3,), 3)
    c.choice("temporal_patch_size", (2,), 2)
    width, heads = (
        c.count("embed_dim", 1280, maximum=MAX_WIDTH),
        c.count("num_heads", 16, maximum=MAX_HEADS),
    )
    patch, merge = c.count("patch_size", 14), c.count("spatial_merge_size", 2)
    return Qwen2Vision(
        layers=c.count("depth", 32, maximum=MAX_LAYERS),
        width=width,
        ffn=round(width * c.number("mlp_ratio", 4)),
        heads=heads,
        text_width=c.count("hidden_size", 3584, maximum=MAX_WIDTH),
        gelu=ACTIVATIONS[c.choice("hidden_act", ACTIVATIONS, "quick_gelu")],
        rotary=read_grid_rotary(c, width, heads),
        resolution=read_dynamic(image, patch, merge),
        video=read_each_frame(
            image.part("video_processor"),
            patch=patch,
            merge=merge,
            token="<|video_pad|>",
            clock=_in_order,
        ),
    )


def _in_order(video: Video, groups: int) -> tuple[int, ...]:  # noqa: ARG001
    """Groups count one each, however far apart they are."""
    return tuple(range(groups))


def _names(name: str) -> tuple[str, ...]:
    return f"visual.{name}", f"model.visual.{name}", f"vision_tower.{name}"
