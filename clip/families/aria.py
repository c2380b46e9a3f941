"""Aria's vision tower (arXiv:2410.05993): SigLIP over a picture in its own shape, whose patches
learned queries read into a fixed number of tokens.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from mtmd.base.errors import ModelError
from mtmd.clip.blocks import (
    VitParams,
    attend,
    biased_parameters,
    bucketed_positions,
    learned_queries,
    read_vit,
    split_heads,
    third,
    vit_block,
    vit_parameters,
)
from mtmd.clip.marks import Marks, read_marks
from mtmd.clip.resolution.resolution import ImagePlan
from mtmd.clip.resolution.within_square import SIDE, WithinSquare, read_within_square
from mtmd.kernels import ops
from mtmd.kernels.checkpoint.canonical import Parameter
from mtmd.kernels.checkpoint.settings import MAX_WIDTH, Settings
from mtmd.kernels.graph import Node, WeightSource
from mtmd.kernels.layers import Weights
from mtmd.kernels.plan.flash_choice import AttentionForm

EPS = 1e-5  # of the projector's norms; the settings do not say
MAX_TOKENS = 4096
QUERIES = {1225: 128, 4900: 256}  # transformers' defaults: queries by patches of the square


@dataclass(frozen=True)
class AriaVision:
    """`queries`: rows of the table of queries, of which the first ones are a picture's tokens."""

    vit: VitParams
    positions: int  # on a side of the tower's table
    patch: int
    queries: int
    text_width: int
    resolution: WithinSquare
    token: str

    around = ("<fim_prefix>", "<fim_suffix>")
    bidirectional = False
    separator = None
    video = None
    unused = (r"(model\.)?vision_tower\.post_layernorm\..*",)

    @property
    def image_token(self) -> str:
        return self.token

    marker = image_token

    def parameters(self) -> Mapping[str, Parameter]:
        width, text, patch = self.vit.width, self.text_width, self.patch
        tower = {"v.patch_embd": ("embeddings.patch_embedding", (width, 3, patch, patch))}
        parameters = vit_parameters(self.vit, _tower) | biased_parameters(tower, _tower)
        parameters["v.position_embd.weight"] = Parameter(
            (self.positions**2, width), _tower("embeddings.position_embedding.weight")
        )
        norms = {
            "mm.ln_q": ("cross_attn.layer_norm", (width,)),
            "mm.ln_kv": ("cross_attn.layer_norm_kv", (width,)),
            "mm.post_ln": ("layer_norm", (width,)),
            "mm.attn_out": ("cross_attn.multihead_attn.out_proj", (width, width)),
            "mm.attn_last": ("cross_attn.linear", (width, width)),
        }
        parameters |= biased_parameters(norms, _projector)
        plain = {
            "mm.query": ("query", (self.queries, width)),
            **{
                f"mm.pre_{p}.weight": (f"cross_attn.{p}_proj.weight", (width, width)) for p in "qkv"
            },
            "mm.ffn_up.weight": ("feed_forward.linear_in.weight", (text, width)),
            "mm.ffn_down.weight": ("feed_forward.linear_out.weight", (text, text)),
        }
        parameters |= {
            name: Parameter(shape, _projector(theirs)) for name, (theirs, shape) in plain.items()
        }
        for index, part in enumerate("qkv"):
            for kind, shape in (("weight", (width, width)), ("bias", (width,))):
                parameters[f"mm.attn_{part}.{kind}"] = Parameter(
                    shape,
                    _projector(f"cross_attn.multihead_attn.in_proj_{kind}"),
                    (3 * width, *shape[1:]),
                    third(index),
                )
        return parameters

    def prompt(self, plan: ImagePlan) -> str:
        return self.token * plan.tokens

    def graph(self, tiles: Node, weights: WeightSource, attention: AttentionForm) -> Node:
        w, vit = Weights(weights, tiles.dtype), self.vit
        grid = tiles.shape[2] // self.patch, tiles.shape[3] // self.patch
        kernel, bias = w.tensor("v.patch_embd.weight"), w.tensor("v.patch_embd.bias")
        x = ops.patch_embed(tiles, kernel, bias, name="v.patch_embd")
        x = ops.add(x, bucketed_positions(grid, self.positions, w), name="v.position_embd")
        for layer in w.layers(vit.layers):
            x = vit_block(x, layer, vit, w, attention=attention)
        queries = learned_queries("mm.query", tiles.shape[0], w, first=self.resolution.tokens)
        latents = w.layer_norm(queries, "mm.ln_q", EPS)
        seen = w.layer_norm(x, "mm.ln_kv", EPS)
        q, k, v = (
            split_heads(
                w.linear(w.linear(y, f"mm.pre_{part}"), f"mm.attn_{part}", bias=True),
                vit.heads,
                f"mm.attn_{part}",
            )
            for part, y in (("q", latents), ("k", seen), ("v", seen))
        )
        y = w.linear(attend(q, k, v, attention, at="mm"), "mm.attn_out", bias=True)
        y = w.layer_norm(w.linear(y, "mm.attn_last", bias=True), "mm.post_ln", EPS)
        y = ops.gelu(w.linear(y, "mm.ffn_up"), approximate="tanh", name="mm.ffn_gelu")
        return w.linear(y, "mm.ffn_down")


def read(top: Settings, image: Settings) -> AriaVision:
    """Read it from config.json and the image processor's settings, with transformers' defaults;
    ModelError where a value cannot be followed.
    """
    c = top.part("vision_config")
    vit = read_vit(c, layers=12, width=1152, ffn=3072, heads=16, act="gelu_pytorch_tanh")
    c.choice("num_channels", (3,), 3)
    top.choice("vision_feature_layer", (-1,), -1)
    size, patch = c.count("image_size", 224), c.count("patch_size", 32)
    if size < patch:
        raise ModelError(f"{c.where}: image_size {size} is less than patch_size {patch}")
    # The processor's own size goes before the image processor's.
    tokens, queries = _queries(top, (SIDE // patch) ** 2)
    return AriaVision(
        vit=vit,
        positions=size // patch,
        patch=patch,
        queries=queries,
        text_width=top.part("text_config").count("hidden_size", 4096, maximum=MAX_WIDTH),
        resolution=read_within_square(image, SIDE, patch, tokens),
        token=read_marks(image, Marks(image="<|img|>")).image,
    )


def _queries(top: Settings, patches: int) -> tuple[int, int]:
    """Return the tokens of a picture whose square has so many patches, and the most of any."""
    key = "projector_patch_to_query_dict"
    given: object = top.get(key, QUERIES)
    counts = given.items() if isinstance(given, Mapping) else ()
    read = {str(patches): count for patches, count in counts}
    if not read or any(type(n) is not int or not 0 < n <= MAX_TOKENS for n in read.values()):
        raise ModelError(
            f"{top.where}: {key} is {given!r:.60}, expected a number of queries from 1 to "
            f"{MAX_TOKENS} for each number of patches"
        )
    if str(patches) not in read:
        raise ModelError(
            f"{top.where}: {key} has no queries for {patches} patches, a square of {SIDE} pixels"
        )
    return read[str(patches)], max(read.values())


def _tower(name: str) -> tuple[str, ...]:
    return f"vision_tower.{name}", f"model.vision_tower.{name}"


def _projector(name: str) -> tuple[str, ...]:
    return f"multi_modal_projector.{name}", f"model.multi_modal_projector.{name}"
