"""LFM2-VL's vision tower (arXiv:2511.23404): SigLIP 2 at any resolution (arXiv:2502.14786), pixel
unshuffle, tiles told apart by tokens of their row and column, a thumbnail last.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import isqrt
from typing import Any

from mtmd.base.errors import ModelError
from mtmd.clip.blocks import (
    ACTIVATIONS,
    GgufTower,
    VitParams,
    biased_parameters,
    checkpoint_names,
    gguf_vit,
    linear_patches,
    read_vit,
    tower_keys,
    tower_names,
    vit_block,
    vit_parameters,
)
from mtmd.clip.grids import Cells, Grids, OneGrid
from mtmd.clip.image.pixels import gguf_image
from mtmd.clip.resolution.resolution import ImagePlan
from mtmd.clip.resolution.whole_or_tiles import WHOLE, AdaptiveTiling, read_adaptive
from mtmd.kernels import ops
from mtmd.kernels.checkpoint.canonical import Parameter
from mtmd.kernels.checkpoint.settings import MAX_WIDTH, Settings
from mtmd.kernels.graph import Node, Shape, WeightSource
from mtmd.kernels.layers import Weights
from mtmd.kernels.plan.flash_choice import AttentionForm


@dataclass(frozen=True)
class Lfm2Vision:
    vit: VitParams
    positions: int  # on a side of the tower's table
    resolution: AdaptiveTiling
    inner: int  # the projector's width
    normed: bool
    bias: bool
    gelu: str
    text_width: int

    marker = "<image>"
    around = ("", "")
    image_token = "<image>"
    bidirectional = False
    separator = None
    video = None
    unused = (r"(model\.)?vision_tower\.(vision_model\.)?head\..*",)  # the tower's pooling head

    def parameters(self) -> Mapping[str, Parameter]:
        width, patch, wide = (
            self.vit.width,
            self.resolution.patch,
            self.vit.width * self.resolution.shuffle**2,
        )
        parameters = vit_parameters(self.vit, tower_names) | biased_parameters(
            {"v.post_ln": ("post_layernorm", (width,))}, tower_names
        )
        parameters |= linear_patches(width, patch, tower_names)
        parameters["v.position_embd.weight"] = Parameter(
            (self.positions**2, width), tower_names("embeddings.position_embedding.weight")
        )
        projector = {
            "mm.1": ("linear_1", (self.inner, wide)),
            "mm.2": ("linear_2", (self.text_width, self.inner)),
        }
        norm = {"mm.input_norm": ("layer_norm", (wide,))} if self.normed else {}
        layers = biased_parameters(
            {**norm, **projector}, lambda name: checkpoint_names(f"multi_modal_projector.{name}")
        )
        return parameters | {
            name: p
            for name, p in layers.items()
            if self.bias or "norm" in name or not name.endswith("bias")
        }

    def prompt(self, plan: ImagePlan) -> str:
        tiling, (rows, columns) = self.resolution, plan.cut
        whole = self.image_token * tiling.tokens(WHOLE, plan.sizes[-1])
        if (columns, rows) == WHOLE:
            return f"<|image_start|>{whole}<|image_end|>"
        tile = self.image_token * tiling.tile_tokens
        tiles = "".join(
            f"<|img_row_{row + 1}_col_{column + 1}|>{tile}"
            for row in range(rows)
            for column in range(columns)
        )
        thumbnail = f"<|img_thumbnail|>{whole}" if tiling.thumbnail else ""
        return f"<|image_start|>{tiles}{thumbnail}<|image_end|>"

    @property
    def cells(self) -> Cells:
        return Cells(self.resolution.patch, self.resolution.shuffle)

    def graph(self, tiles: Node, weights: WeightSource, attention: AttentionForm) -> Node:
        return self.graph_on(OneGrid.of(tiles, self.cells), tiles, weights, attention)

    def graph_on(
        self, grids: Grids, tiles: Node, weights: WeightSource, attention: AttentionForm
    ) -> Node:
        w = Weights(weights, tiles.dtype)
        x = ops.patch_embed(
            tiles,
            w.tensor("v.patch_embd.weight"),
            w.tensor("v.patch_embd.bias"),
            name="v.patch_embd",
        )
        table = grids.table(
            w.tensor("v.position_embd.weight"),
            self.positions,
            "v.position_embd.resized",
            mode="bilinear",
            antialias=True,
        )
        x = ops.add(x, table, name="v.position_embd")
        for index in w.layers(self.vit.layers):
            x = vit_block(x, index, self.vit, w, attention=attention, bounds=grids.segments)
        x = w.layer_norm(x, "v.post_ln", self.vit.eps)
        x = ops.unshuffle(x, grid=grids.shape, factor=self.resolution.shuffle, name="mm.unshuffle")
        if self.normed:
            x = w.layer_norm(x, "mm.input_norm", 1e-5)  # torch's default
        x = ops.gelu(w.linear(x, "mm.1", bias=self.bias), approximate=self.gelu, name="mm.gelu")
        return w.linear(x, "mm.2", bias=self.bias)


def to_gguf(family: Lfm2Vision) -> GgufTower:
    """Return the keys of a GGUF that say the same."""
    patch = family.resolution.patch
    keys = tower_keys(
        family.vit, image_size=family.positions * patch, patch=patch, text_width=family.text_width
    )
    return GgufTower(
        "lfm2",
        keys | {"use_gelu": True, "vision.projector.scale_factor": family.resolution.shuffle},
    )


def from_gguf(keys: Settings, shapes: Mapping[str, Shape]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return what config.json and the image processor's settings would say; how pictures are cut,
    files do not tell.
    """
    patch, shuffle = (
        keys.count("vision.patch_size", 16),
        keys.count("vision.projector.scale_factor", 2),
    )
    rows, inner = (
        [*shapes.get(name, ()), None][0] for name in ("v.position_embd.weight", "mm.1.weight")
    )
    config = {
        "vision_config": {**gguf_vit(keys), "num_patches": rows},
        "downsample_factor": shuffle,
        "projector_hidden_size": inner,
        "projector_use_layernorm": "mm.input_norm.weight" in shapes,
        "projector_bias": "mm.1.bias" in shapes,
        "text_config": {"hidden_size": keys.count("vision.projection_dim")},
    }
    return config, {**gguf_image(keys), "encoder_patch_size": patch, "downsample_factor": shuffle}


def read(top: Settings, image: Settings) -> Lfm2Vision:
    """Read it from config.json and the image processor's settings, with transformers' defaults;
    ModelError where a value cannot be followed.
    """
    vision, shuffle = top.part("vision_config"), top.count("downsample_factor", 2, maximum=64)
    vision.choice("num_channels", (3,), 3)
    patches = vision.count("num_patches", 256)
    if isqrt(patches) ** 2 != patches:
        raise ModelError(
            f"{vision.where}: num_patches is {patches}, expected a square number, the rows of a "
            "position table"
        )
    vit = read_vit(vision, layers=12, width=768, ffn=3072, heads=12, act="gelu_pytorch_tanh")
    return Lfm2Vision(
        vit=vit,
        positions=isqrt(patches),
        resolution=read_adaptive(image, vision.count("patch_size", 16), shuffle),
        inner=top.count("projector_hidden_size", 2560, maximum=MAX_WIDTH),
        normed=top.flag("projector_use_layernorm", True),
        bias=top.flag("projector_bias", True),
        gelu=ACTIVATIONS[top.choice("projector_hidden_act", ACTIVATIONS, "gelu")],
        text_width=top.part("text_config").count("hidden_size", 2560, maximum=MAX_WIDTH),
    )
