"""SigLIP (arXiv:2303.15343) and SigLIP 2 (arXiv:2502.14786): a picture's vector by a learned query
over its patches, a text's from the last of its always equally many tokens.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import isqrt

from mtmd.base.errors import ModelError
from mtmd.clip.blocks import (
    VitParams,
    attend,
    biased_parameters,
    mlp,
    qkv_parameters,
    read_vit,
    split_heads,
    vit_block,
    vit_parameters,
)
from mtmd.clip.dual.families.clip import MAX_CONTEXT, MAX_VOCABULARY, UNUSED, first_row
from mtmd.clip.dual.family import DualFamily
from mtmd.clip.dual.text_tower import TextTower, image_names
from mtmd.clip.image.pixels import read_normalize
from mtmd.clip.resolution.fixed_square import FixedSquare, read_fixed_square
from mtmd.clip.resolution.naflex import PatchLimit, read_patch_limit
from mtmd.kernels import ops
from mtmd.kernels.checkpoint.canonical import Parameter
from mtmd.kernels.checkpoint.settings import MAX_WIDTH, Settings
from mtmd.kernels.graph import Node, WeightSource
from mtmd.kernels.layers import Weights
from mtmd.kernels.plan.flash_choice import AttentionForm

HEAD = "v.head"


@dataclass(frozen=True)
class SiglipImage:
    """`side`: of the square table of positions, which pictures of any shape have it resized to
    theirs.
    """

    vit: VitParams
    patch: int
    side: int
    resolution: FixedSquare | PatchLimit

    @property
    def any_shape(self) -> bool:
        return isinstance(self.resolution, PatchLimit)

    def parameters(self) -> Mapping[str, Parameter]:
        width, ffn, patch = self.vit.width, self.vit.ffn, self.patch
        layers = {
            "v.post_ln": ("post_layernorm", (width,)),
            f"{HEAD}.attn_out": ("head.attention.out_proj", (width, width)),
            f"{HEAD}.ln": ("head.layernorm", (width,)),
            f"{HEAD}.ffn_up": ("head.mlp.fc1", (ffn, width)),
            f"{HEAD}.ffn_down": ("head.mlp.fc2", (width, ffn)),
        }
        kernels = Parameter(
            (width, 3, patch, patch), image_names("embeddings.patch_embedding.weight")
        )
        if self.any_shape:  # a linear layer over a patch's pixels, channels last
            kernels = Parameter(
                kernels.shape,
                kernels.sources,
                (width, patch * patch * 3),
                lambda w: w.unflatten(1, (patch, patch, 3)).permute(0, 3, 1, 2),
            )
        return {
            **vit_parameters(self.vit, image_names),
            **biased_parameters(layers, image_names),
            **qkv_parameters(HEAD, width, "head.attention.in_proj", _fused_names),
            "v.patch_embd.weight": kernels,
            "v.patch_embd.bias": Parameter(
                (width,), image_names("embeddings.patch_embedding.bias")
            ),
            "v.position_embd.weight": Parameter(
                (self.side**2, width), image_names("embeddings.position_embedding.weight")
            ),
            f"{HEAD}.query": Parameter(
                (width,), image_names("head.probe"), (1, 1, width), lambda t: t.flatten()
            ),
        }

    def graph(self, tiles: Node, weights: WeightSource, attention: AttentionForm) -> Node:
        """tiles [B, 3, Y, X] in the compute type -> vectors [B, D]"""
        w = Weights(weights, tiles.dtype)
        x = ops.patch_embed(
            tiles,
            w.tensor("v.patch_embd.weight"),
            w.tensor("v.patch_embd.bias"),
            name="v.patch_embd",
        )
        table = w.tensor("v.position_embd.weight")
        if self.any_shape:
            rows, columns = (edge // self.patch for edge in tiles.shape[2:])
            table = ops.resize2d(
                table,
                grid=(self.side, self.side),
                size=(rows, columns),
                mode="bilinear",
                antialias=True,
                name="v.position_embd.resized",
            )
        x = ops.add(x, table, name="v.position_embd")
        for index in range(self.vit.layers):
            x = vit_block(x, index, self.vit, w, attention=attention)
        return self._pooled(w.layer_norm(x, "v.post_ln", self.vit.eps), w, attention)

    def _pooled(self, x: Node, w: Weights, attention: AttentionForm) -> Node:
        """The patches as the learned query sees them          [B, P, C] -> [B, C]"""
        heads, batch, width = self.vit.heads, x.shape[0], x.shape[2]
        queries = first_row(
            ops.prepend(x, w.tensor(f"{HEAD}.query"), name=f"{HEAD}.query.first"), f"{HEAD}.queries"
        )
        query = ops.reshape(queries, shape=(batch, 1, width), name=f"{HEAD}.query.rows")
        q, k, v = (
            split_heads(w.linear(y, f"{HEAD}.attn_{part}", bias=True), heads, f"{HEAD}.attn_{part}")
            for part, y in (("q", query), ("k", x), ("v", x))
        )
        mixed = w.linear(attend(q, k, v, attention, at=HEAD), f"{HEAD}.attn_out", bias=True)
        y = mlp(w.layer_norm(mixed, f"{HEAD}.ln", self.vit.eps), HEAD, self.vit.gelu, w)
        pooled = ops.add(y, mixed, name=f"{HEAD}.residual")
        return ops.reshape(pooled, shape=(batch, width), name="v.pooled")


def _fused_names(name: str) -> tuple[str, ...]:
    return image_names(name.replace("in_proj.", "in_proj_"))


def read(top: Settings, image: Settings) -> DualFamily:
    """Read it from config.json and the image processor's settings, with transformers' defaults;
    ModelError where a value cannot be followed.
    """
    vision, text = top.part("vision_config"), top.part("text_config")
    vit = read_vit(vision, layers=12, width=768, ffn=3072, heads=12, act="gelu_pytorch_tanh")
    vision.choice("num_channels", (3,), 3)
    if not vision.flag("vision_use_head", True):
        raise ModelError(
            f"{vision.where}: vision_use_head false gives no vector for a picture; expected a "
            "checkpoint with its pooling head"
        )
    patch = vision.count("patch_size", 16)
    resolution: FixedSquare | PatchLimit
    if top.get("model_type", None) == "siglip2":
        patches = vision.count("num_patches", 256)
        side = isqrt(patches)
        if side * side != patches:
            raise ModelError(
                f"{vision.where}: num_patches is {patches}, expected a square number, the rows of "
                "a position table"
            )
        resolution = read_patch_limit(image, patch)
    else:
        size = vision.count("image_size", 224)
        side = size // patch  # what is left over is left out, as a convolution does
        square = read_fixed_square(image, size, 1, read_normalize(image), crops=False, ground=None)
        resolution = replace(square, saved=side * patch)
    texts = read_vit(text, layers=12, width=768, ffn=3072, heads=12, act="gelu_pytorch_tanh")
    width = text.count("projection_size", texts.width, maximum=MAX_WIDTH)
    if width != vit.width:
        raise ModelError(
            f"{top.where}: texts become vectors of {width} numbers, pictures of {vit.width}; "
            "expected equal ones"
        )
    tower = TextTower(
        vit=texts,
        vocabulary=text.count("vocab_size", 32000, maximum=MAX_VOCABULARY),
        context=text.count("max_position_embeddings", 64, maximum=MAX_CONTEXT),
        causal=False,
        padding=text.token_id("pad_token_id", 1),
        projection=width,
        projection_bias=True,
        projection_name="text_model.head",
    )
    return DualFamily(
        SiglipImage(vit, patch, side, resolution),
        tower,
        width,
        exclusive=False,
        unused=UNUSED,
        lower=True,
        bare_with="SiglipTokenizer",
    )
