"""The vision transformer of BLIP and BLIP-2 (arXiv:2201.12086, arXiv:2301.12597): a class token, a
learned position for every patch, queries, keys and values of one matrix, a norm at the end.
"""

from __future__ import annotations

from dataclasses import dataclass

from mtmd.base.errors import ModelError
from mtmd.clip.blocks import VitParams, biased_parameters, read_vit, vit_block
from mtmd.kernels import ops
from mtmd.kernels.checkpoint.canonical import Parameter
from mtmd.kernels.checkpoint.settings import Settings
from mtmd.kernels.graph import Node, Shape
from mtmd.kernels.layers import Weights
from mtmd.kernels.plan.flash_choice import AttentionForm


@dataclass(frozen=True)
class BlipTower:
    vit: VitParams
    image_size: int
    patch: int

    @property
    def tokens(self) -> int:
        """Return how many features a picture has, that of the class token among them."""
        return (self.image_size // self.patch) ** 2 + 1

    def parameters(self) -> dict[str, Parameter]:
        width, rows = self.vit.width, self.tokens
        tensors: dict[str, tuple[str, Shape]] = {
            "v.patch_embd": ("embeddings.patch_embedding", (width, 3, self.patch, self.patch)),
            "v.post_ln": ("post_layernorm", (width,)),
        }
        for index in range(self.vit.layers):
            at, theirs = f"v.blk.{index}", f"encoder.layers.{index}"
            tensors |= {
                f"{at}.ln1": (f"{theirs}.layer_norm1", (width,)),
                f"{at}.ln2": (f"{theirs}.layer_norm2", (width,)),
                f"{at}.attn_qkv": (f"{theirs}.self_attn.qkv", (3 * width, width)),
                f"{at}.attn_out": (f"{theirs}.self_attn.projection", (width, width)),
                f"{at}.ffn_up": (f"{theirs}.mlp.fc1", (self.vit.ffn, width)),
                f"{at}.ffn_down": (f"{theirs}.mlp.fc2", (width, self.vit.ffn)),
            }
        return {
            **biased_parameters(tensors, _names),
            "v.class_embd": Parameter(
                (width,), _names("embeddings.class_embedding"), (1, 1, width), lambda w: w[0, 0]
            ),
            "v.position_embd.weight": Parameter(
                (rows, width),
                _names("embeddings.position_embedding"),
                (1, rows, width),
                lambda w: w[0],
            ),
        }

    def features(self, tiles: Node, w: Weights, attention: AttentionForm) -> Node:
        """tiles [B, 3, Y, X] in the compute type -> [B, 1 + P, C]"""
        patches = (w.tensor(f"v.patch_embd.{kind}") for kind in ("weight", "bias"))
        x = ops.patch_embed(tiles, *patches, name="v.patch_embd")
        x = ops.prepend(x, w.tensor("v.class_embd"), name="v.class_embd.first")
        x = ops.add(x, w.tensor("v.position_embd.weight"), name="v.position_embd")
        for index in range(self.vit.layers):
            x = vit_block(x, index, self.vit, w, attention=attention, fused=True)
        return w.layer_norm(x, "v.post_ln", self.vit.eps)


def _names(name: str) -> tuple[str, ...]:
    return (f"vision_model.{name}",)


def read_tower(
    vision: Settings,
    *,
    layers: int,
    width: int,
    ffn: int,
    heads: int,
    size: int,
    patch: int,
    eps: float,
) -> BlipTower:
    """Read it from a vision_config with transformers' keys; the numbers are the family's defaults.
    Raises ModelError for what cannot be followed.
    """
    vision.choice("num_channels", (3,), 3)
    vision.choice("qkv_bias", (True,), True)
    tower = BlipTower(
        read_vit(vision, layers=layers, width=width, ffn=ffn, heads=heads, act="gelu", eps=eps),
        vision.count("image_size", size),
        vision.count("patch_size", patch),
    )
    if tower.image_size % tower.patch:
        raise ModelError(
            f"{vision.where}: image_size {tower.image_size} is no whole number of patches of "
            f"{tower.patch} pixels"
        )
    return tower
