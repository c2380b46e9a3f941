"""LFM2-VL's eye (arXiv:2511.23404): SigLIP 2 at any resolution (arXiv:2502.14786), pixel unshuffle,
tiles told apart by tokens of their row and column, a thumbnail last.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import isqrt
from typing import Any

import numpy as np
import torch

from mtmd.clip.blocks import (
    ACTIVATIONS,
    VitParams,
    anywhere,
    biased_parameters,
    gguf_image,
    gguf_vit,
    read_vit,
    tower,
    vit_block,
    vit_parameters,
)
from mtmd.clip.budget import DEFAULT_BUDGET, Budget
from mtmd.clip.family import ImagePlan
from mtmd.clip.resolution.adaptive import WHOLE, AdaptiveTiling, read_adaptive
from mtmd.clip.resolution.tiling import Size
from mtmd.kernels import ops
from mtmd.kernels.checkpoint.canonical import Parameter
from mtmd.kernels.checkpoint.settings import MAX_WIDTH, Settings
from mtmd.kernels.errors import ModelError
from mtmd.kernels.graph import Node, Shape, Type, WeightSource
from mtmd.kernels.layers import Weights
from mtmd.kernels.plan.flash import AttentionForm


@dataclass(frozen=True)
class Lfm2Vision:
    vit: VitParams
    positions: int  # on a side of the tower's table
    sizes: AdaptiveTiling
    inner: int  # the projector's width
    normed: bool
    bias: bool
    gelu: str
    text_width: int

    marker = "<image>"
    image_token = "<image>"
    bidirectional = False
    separator = None
    unused = (r"(model\.)?vision_tower\.(vision_model\.)?head\..*",)  # the tower's pooling head

    def parameters(self) -> Mapping[str, Parameter]:
        width, patch, wide = (
            self.vit.width,
            self.sizes.patch,
            self.vit.width * self.sizes.shuffle**2,
        )
        found = vit_parameters(self.vit, tower) | biased_parameters(
            {"v.post_ln": ("post_layernorm", (width,))}, tower
        )
        found["v.patch_embd.weight"] = Parameter(
            (width, 3, patch, patch),
            tower("embeddings.patch_embedding.weight"),
            (width, patch * patch * 3),
            lambda w: w.unflatten(1, (patch, patch, 3)).permute(0, 3, 1, 2),
        )
        found["v.patch_embd.bias"] = Parameter((width,), tower("embeddings.patch_embedding.bias"))
        found["v.position_embd.weight"] = Parameter(
            (self.positions**2, width), tower("embeddings.position_embedding.weight")
        )
        projector = {
            "mm.1": ("linear_1", (self.inner, wide)),
            "mm.2": ("linear_2", (self.text_width, self.inner)),
        }
        norm = {"mm.input_norm": ("layer_norm", (wide,))} if self.normed else {}
        layers = biased_parameters(
            {**norm, **projector}, lambda name: anywhere(f"multi_modal_projector.{name}")
        )
        return found | {
            name: p
            for name, p in layers.items()
            if self.bias or "norm" in name or not name.endswith("bias")
        }

    def prepare(self, pixels: np.ndarray, budget: Budget = DEFAULT_BUDGET) -> ImagePlan:
        grid, whole, notes = self.sizes.plan((pixels.shape[1], pixels.shape[0]), budget)
        tiles = self.sizes.pictures(pixels, grid, whole)
        return ImagePlan(
            tuple(map(self.sizes.normalize, tiles)),
            tuple((t.shape[1], t.shape[0]) for t in tiles),
            self.sizes.tokens(grid, whole),
            self._prompt(grid, whole),
            notes=notes,
        )

    def _prompt(self, grid: Size, whole: Size) -> str:
        picture, tile = (
            self.image_token * self.sizes.tokens(WHOLE, whole),
            self.image_token * self.sizes.tile_tokens,
        )
        if grid != WHOLE:
            places = (
                f"<|img_row_{row + 1}_col_{column + 1}|>"
                for row in range(grid[1])
                for column in range(grid[0])
            )
            picture = "".join(place + tile for place in places) + (
                f"<|img_thumbnail|>{picture}" if self.sizes.thumbnail else ""
            )
        return f"<|image_start|>{picture}<|image_end|>"

    def most_tokens(self, budget: Budget = DEFAULT_BUDGET) -> int:
        return self.sizes.most_tokens(budget)

    def tile_type(self) -> Type:
        """A whole picture of the most tokens, nearly a square, as a tile is in published models."""
        side = isqrt(self.sizes.most) * self.sizes.factor
        return Type.contiguous((3, side, side), torch.float32)

    def largest_tile_type(self) -> Type:
        width, height = self.sizes.largest()
        return Type.contiguous((3, height, width), torch.float32)

    def graph(self, tiles: Node, weights: WeightSource, attention: AttentionForm) -> Node:
        w = Weights(weights, tiles.dtype)
        rows, columns = (side // self.sizes.patch for side in tiles.shape[2:])
        x = ops.patch_embed(
            tiles,
            w.tensor("v.patch_embd.weight"),
            w.tensor("v.patch_embd.bias"),
            name="v.patch_embd",
        )
        table = ops.resize2d(
            w.tensor("v.position_embd.weight"),
            grid=(self.positions, self.positions),
            size=(rows, columns),
            mode="bilinear",
            antialias=True,
            name="v.position_embd.resized",
        )
        x = ops.add(x, table, name="v.position_embd")
        for index in range(self.vit.layers):
            x = vit_block(x, index, self.vit, w, attention)
        x = w.layer_norm(x, "v.post_ln", self.vit.eps)
        x = ops.unshuffle(x, grid=(rows, columns), factor=self.sizes.shuffle, name="mm.unshuffle")
        if self.normed:
            x = w.layer_norm(x, "mm.input_norm", 1e-5)  # torch's default
        x = ops.gelu(w.linear(x, "mm.1", bias=self.bias), approximate=self.gelu, name="mm.gelu")
        return w.linear(x, "mm.2", bias=self.bias)


def from_gguf(keys: Settings, shapes: Mapping[str, Shape]) -> tuple[dict[str, Any], dict[str, Any]]:
    """What config.json and the image processor's settings would say; how pictures are cut, files do
    not tell.
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
    """From config.json and the image processor's settings, with transformers' defaults; ModelError
    where a value cannot be followed.
    """
    vision, shuffle = top.part("vision_config"), top.count("downsample_factor", 2, most=64)
    vision.choice("num_channels", (3,), 3)
    patches = vision.count("num_patches", 256)
    if isqrt(patches) ** 2 != patches:
        raise ModelError(
            f"{vision.where}: num_patches is {patches}, expected a square number, the rows of a "
            "position table"
        )
    vit = read_vit(vision, layers=12, width=768, ffn=3072, heads=12, act="gelu_pytorch_tanh")
    return Lfm2Vision(
        vit,
        isqrt(patches),
        read_adaptive(image, vision.count("patch_size", 16), shuffle),
        top.count("projector_hidden_size", 2560, most=MAX_WIDTH),
        top.flag("projector_use_layernorm", True),
        top.flag("projector_bias", True),
        ACTIVATIONS[top.choice("projector_hidden_act", ACTIVATIONS, "gelu")],
        top.part("text_config").count("hidden_size", 2560, most=MAX_WIDTH),
    )
