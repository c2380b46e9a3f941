"""Gemma 3's vision tower: SigLIP, its patches averaged down to a fixed number of tokens, one
projection (arXiv:2503.19786).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from math import isqrt
from typing import Any

import torch

from mtmd.base.errors import ModelError
from mtmd.clip.blocks import (
    GgufTower,
    VitParams,
    checkpoint_names,
    gguf_vit,
    plain_vit,
    plain_vit_parameters,
    read_vit,
    tower_keys,
    tower_names,
)
from mtmd.clip.image.pixels import gguf_image, read_normalize
from mtmd.clip.image.resize import read_resample
from mtmd.clip.resolution.fixed_square import FixedSquare
from mtmd.clip.resolution.resolution import ImagePlan
from mtmd.kernels import ops
from mtmd.kernels.checkpoint.canonical import Parameter, Stored, plus_one
from mtmd.kernels.checkpoint.settings import MAX_WIDTH, Settings
from mtmd.kernels.graph import Node, WeightSource
from mtmd.kernels.layers import Weights
from mtmd.kernels.plan.flash_choice import AttentionForm


@dataclass(frozen=True)
class Gemma3Vision:
    vit: VitParams
    patch: int
    text_width: int
    resolution: FixedSquare

    marker = "<start_of_image>"
    around = ("", "")
    image_token = "<image_soft_token>"
    bidirectional = True
    separator = None
    video = None
    unused = (r"(model\.)?vision_tower\.(vision_model\.)?head\..*",)  # SigLIP's pooling head

    @property
    def grid(self) -> int:
        return self.resolution.side // self.patch

    @property
    def pool(self) -> int:
        return self.grid // isqrt(self.resolution.tokens)

    def parameters(self) -> Mapping[str, Parameter]:
        width = self.vit.width
        parameters = plain_vit_parameters(self.vit, self.patch, self.grid**2, tower_names)
        parameters["mm.soft_emb_norm.weight"] = Parameter(
            (width,),
            checkpoint_names("multi_modal_projector.mm_soft_emb_norm.weight"),
            convert=plus_one,
        )
        parameters["mm.input_projection.weight"] = Parameter(
            shape=(self.text_width, width),
            sources=checkpoint_names("multi_modal_projector.mm_input_projection_weight"),
            stored=(width, self.text_width),
            convert=torch.Tensor.t,
            gguf=(
                Stored(("mm.input_projection.weight",), (width, self.text_width), torch.Tensor.t),
            ),
        )
        return parameters

    def prompt(self, plan: ImagePlan) -> str:
        return f"\n\n<start_of_image>{self.image_token * plan.tokens}<end_of_image>\n\n"

    def graph(self, tiles: Node, weights: WeightSource, attention: AttentionForm) -> Node:
        w = Weights(weights, tiles.dtype)
        x = plain_vit(tiles, w.tensor("v.position_embd.weight"), self.vit, w, attention)
        x = ops.pool2d(x, grid=(self.grid,) * 2, size=(self.grid // self.pool,) * 2, name="mm.pool")
        return w.linear(w.rms_norm(x, "mm.soft_emb_norm", self.vit.eps), "mm.input_projection")


def to_gguf(family: Gemma3Vision) -> GgufTower:
    """Return the keys of a GGUF that say the same."""
    side, patch = family.resolution.side, family.patch
    keys = tower_keys(family.vit, image_size=side, patch=patch, text_width=family.text_width)
    return GgufTower(
        "gemma3", keys | {"use_gelu": True, "vision.projector.scale_factor": family.pool}
    )


def from_gguf(keys: Settings, names: Collection[str]) -> tuple[dict[str, Any], dict[str, Any]]:  # noqa: ARG001
    """Return what config.json and the image processor's settings would say."""
    size, patch = keys.count("vision.image_size", 896), keys.count("vision.patch_size", 14)
    config = {
        "vision_config": gguf_vit(keys),
        "text_config": {"hidden_size": keys.count("vision.projection_dim")},
        "mm_tokens_per_image": (size // patch // keys.count("vision.projector.scale_factor", 4))
        ** 2,
    }
    return config, {**gguf_image(keys), "size": size}


def read(top: Settings, image: Settings) -> Gemma3Vision:
    """Read it from config.json and the image processor's settings, with transformers' defaults;
    ModelError where a value cannot be followed.
    """
    vision, text_width = (
        top.part("vision_config"),
        top.part("text_config").count("hidden_size", 2304, maximum=MAX_WIDTH),
    )
    vit = read_vit(vision, layers=12, width=768, ffn=3072, heads=12, act="gelu_pytorch_tanh")
    vision.choice("num_channels", (3,), 3)
    size, patch, tokens = (
        vision.count("image_size", 224),
        vision.count("patch_size", 16),
        top.count("mm_tokens_per_image", 256),
    )
    side = isqrt(tokens)
    if side * side != tokens or size % patch or (size // patch) % side:
        raise ModelError(
            f"{top.where}: image_size {size}, patch_size {patch} and mm_tokens_per_image {tokens} "
            "do not fit together; "
            "expected a square grid of patches that divides into the tokens"
        )
    _check_steps(image, size)
    return Gemma3Vision(
        vit=vit,
        patch=patch,
        text_width=text_width,
        resolution=FixedSquare(
            side=size,
            tokens=tokens,
            normalize=read_normalize(image),
            resample=read_resample(image, 2),
            edge=size,
        ),
    )


def _check_steps(image: Settings, side: int) -> None:
    """The one way from a picture to the tower: stretched to its square, scaled, normalised.
    ModelError where the settings leave it.
    """
    if image.flag("do_pan_and_scan", False):
        raise ModelError(f"{image.where}: do_pan_and_scan true is not supported; set it to false")
    edges = image.get("size", 224)
    size = Settings(
        {"height": edges, "width": edges} if type(edges) is int else edges, f"{image.where}: size"
    )
    given = {key for key, value in size.values.items() if value is not None}
    if given != {"height", "width"}:
        raise ModelError(
            f"{size.where} has {', '.join(sorted(given)) or 'nothing'}, expected height and width; "
            f"set both to {side}"
        )
    height, width = size.count("height"), size.count("width")
    if (height, width) != (side, side):
        raise ModelError(
            f"{size.where} is {height} x {width}, expected {side} x {side} as config.json's "
            "image_size; correct one of them"
        )
