"""CLIP (arXiv:2103.00020): the vector of a picture from a class token, that of a text from its last
token.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from mtmd.base.errors import ModelError
from mtmd.clip.blocks import VitParams, biased_parameters, read_vit, vit_block, vit_parameters
from mtmd.clip.dual.family import DualFamily
from mtmd.clip.dual.text_tower import TextTower, image_names
from mtmd.clip.image.pixels import CLIP_MEAN, CLIP_STD, read_normalize
from mtmd.clip.resolution.fixed_square import FixedSquare, read_fixed_square
from mtmd.kernels import ops
from mtmd.kernels.checkpoint.canonical import Parameter
from mtmd.kernels.checkpoint.settings import MAX_WIDTH, Settings
from mtmd.kernels.graph import Node, WeightSource, graph_input
from mtmd.kernels.layers import Weights
from mtmd.kernels.plan.flash_choice import AttentionForm

MAX_CONTEXT = 4096  # CLIP has 77, those trained for long texts a few hundred
MAX_VOCABULARY = 1 << 20
UNUSED = (r"(vision|text)_model\.embeddings\.position_ids",)


@dataclass(frozen=True)
class ClipImage:
    vit: VitParams
    patch: int
    width: int
    resolution: FixedSquare

    @property
    def patches(self) -> int:
        return (self.resolution.side // self.patch) ** 2

    def parameters(self) -> Mapping[str, Parameter]:
        width = self.vit.width
        norms = {"v.pre_ln": ("pre_layrnorm", (width,)), "v.post_ln": ("post_layernorm", (width,))}
        return {
            **vit_parameters(self.vit, image_names),
            **biased_parameters(norms, image_names),  # the first is spelled so
            "v.patch_embd.weight": Parameter(
                (width, 3, self.patch, self.patch), image_names("embeddings.patch_embedding.weight")
            ),
            "v.class_embd": Parameter((width,), image_names("embeddings.class_embedding")),
            "v.position_embd.weight": Parameter(
                (self.patches + 1, width), image_names("embeddings.position_embedding.weight")
            ),
            "v.projection.weight": Parameter((self.width, width), ("visual_projection.weight",)),
        }

    def graph(self, tiles: Node, weights: WeightSource, attention: AttentionForm) -> Node:
        """tiles [B, 3, Y, X] in the compute type -> vectors [B, D]"""
        w = Weights(weights, tiles.dtype)
        x = ops.patch_embed(tiles, w.tensor("v.patch_embd.weight"), name="v.patch_embd")
        x = ops.prepend(x, w.tensor("v.class_embd"), name="v.class_embd.first")
        x = ops.add(x, w.tensor("v.position_embd.weight"), name="v.position_embd")
        x = w.layer_norm(x, "v.pre_ln", self.vit.eps)
        for index in range(self.vit.layers):
            x = vit_block(x, index, self.vit, w, attention=attention)
        pooled = w.layer_norm(first_row(x, "v.pooled"), "v.post_ln", self.vit.eps)
        return w.linear(pooled, "v.projection")


def first_row(x: Node, name: str) -> Node:
    """[B, T, C] -> [B, C]"""
    first = graph_input("inp.first", (1,), torch.int64, lambda _: torch.zeros(1, dtype=torch.int64))
    rows = ops.take_rows(x, first, name=f"{name}.row")
    return ops.reshape(rows, shape=(x.shape[0], x.shape[2]), name=name)


def read(top: Settings, image: Settings) -> DualFamily:
    """Read it from config.json and the image processor's settings, with transformers' defaults;
    ModelError where a value cannot be followed.
    """
    vision, text = _part(top, "vision"), _part(top, "text")
    width = top.count("projection_dim", 512, maximum=MAX_WIDTH)
    vision.choice("num_channels", (3,), 3)
    size, patch = vision.count("image_size", 224), vision.count("patch_size", 32)
    if size % patch:
        raise ModelError(f"{vision.where}: image_size {size} is no multiple of patch_size {patch}")
    tower = ClipImage(
        vit=read_vit(vision, layers=12, width=768, ffn=3072, heads=12, act="quick_gelu", eps=1e-5),
        patch=patch,
        width=width,
        resolution=read_fixed_square(
            image, size, 1, read_normalize(image, CLIP_MEAN, CLIP_STD), crops=True, ground=None
        ),
    )
    texts = TextTower(
        vit=read_vit(text, layers=12, width=512, ffn=2048, heads=8, act="quick_gelu", eps=1e-5),
        vocabulary=text.count("vocab_size", 49408, maximum=MAX_VOCABULARY),
        context=text.count("max_position_embeddings", 77, maximum=MAX_CONTEXT),
        causal=True,
        padding=None,
        projection=width,
        projection_bias=False,
        projection_name="text_projection",
    )
    return DualFamily(tower, texts, width, exclusive=True, unused=UNUSED)


def _part(top: Settings, name: str) -> Settings:
    """A tower's settings; where an older checkpoint has them twice, the reference goes by these."""
    older = top.get(f"{name}_config_dict", None)
    return top.part(f"{name}_config_dict" if older else f"{name}_config")
