"""Idefics2 (arXiv:2405.02246): SigLIP over pictures in their own shape, whose patches a perceiver
resampler (arXiv:2103.03206) reads into a fixed number of tokens.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from mtmd.base.errors import ModelError
from mtmd.clip.blocks import (
    VitParams,
    attend,
    bucketed_positions,
    learned_queries,
    plain_vit,
    plain_vit_parameters,
    read_vit,
    split_heads,
    swiglu,
)
from mtmd.clip.resolution.quarters import Quartered, read_quartered
from mtmd.clip.resolution.resolution import ImagePlan
from mtmd.kernels import ops
from mtmd.kernels.checkpoint.canonical import Parameter
from mtmd.kernels.checkpoint.settings import MAX_HEADS, MAX_LAYERS, MAX_WIDTH, Settings
from mtmd.kernels.graph import Node, Shape, WeightSource
from mtmd.kernels.layers import Weights
from mtmd.kernels.plan.flash_choice import AttentionForm

AROUND = "<fake_token_around_image>"
CLOSING = re.compile(rf"{AROUND}(?=[^\s<])")
MAX_TOKENS = 4096  # of a tile; published models have 64


@dataclass(frozen=True)
class Resampler:
    """Layers in which queries attend to patches and to themselves; H heads of K numbers each, in G
    groups.
    """

    tokens: int
    layers: int
    heads: int
    groups: int
    head: int
    eps: float


@dataclass(frozen=True)
class Idefics2Vision:
    vit: VitParams
    positions: int  # on a side of the tower's table
    patch: int
    resampler: Resampler
    text_width: int
    text_ffn: int
    resolution: Quartered

    marker = image_token = "<image>"
    around = ("", "")
    bidirectional = False
    separator = None
    video = None
    unused = ()

    def parameters(self) -> Mapping[str, Parameter]:
        p, width = self.resampler, self.text_width
        shapes: dict[str, tuple[str, Shape]] = {
            **_gated("mm", "modality_projection", self.vit.width, self.text_ffn, width),
            "resampler.post_ln.weight": ("perceiver_resampler.norm.weight", (width,)),
            "resampler.query": ("perceiver_resampler.latents", (p.tokens, width)),
        }
        for index in range(p.layers):
            at, theirs = f"resampler.blk.{index}", f"perceiver_resampler.layers.{index}"
            rows, kv = p.heads * p.head, p.groups * p.head
            named: dict[str, tuple[str, Shape]] = {
                "ln_q": ("input_latents_norm", (width,)),
                "ln_kv": ("input_context_norm", (width,)),
                "attn_q": ("self_attn.q_proj", (rows, width)),
                "attn_k": ("self_attn.k_proj", (kv, width)),
                "attn_v": ("self_attn.v_proj", (kv, width)),
                "attn_out": ("self_attn.o_proj", (width, rows)),
                "ffn_norm": ("post_attention_layernorm", (width,)),
            }
            shapes |= {
                f"{at}.{ours}.weight": (f"{theirs}.{name}.weight", shape)
                for ours, (name, shape) in named.items()
            }
            shapes |= _gated(at, f"{theirs}.mlp", width, 4 * width, width)
        connector = {
            name: Parameter(shape, (f"model.connector.{theirs}",))
            for name, (theirs, shape) in shapes.items()
        }
        return plain_vit_parameters(self.vit, self.patch, self.positions**2, _tower) | connector

    def prompt(self, plan: ImagePlan) -> str:
        tokens = self.image_token * self.resampler.tokens
        return AROUND + f"{tokens}{AROUND}" * len(plan.sizes)

    def rewritten(self, text: str) -> str:
        """Return the prompt with one mark between pictures, and a space before a word behind it."""
        return CLOSING.sub(f"{AROUND} ", text.replace(AROUND * 2, AROUND))

    def graph(self, tiles: Node, weights: WeightSource, attention: AttentionForm) -> Node:
        w, p = Weights(weights, tiles.dtype), self.resampler
        grid = tiles.shape[2] // self.patch, tiles.shape[3] // self.patch
        positions = bucketed_positions(grid, self.positions, w)
        context = swiglu(plain_vit(tiles, positions, self.vit, w, attention), "mm", w)
        x = learned_queries("resampler.query", tiles.shape[0], w)
        for index in range(p.layers):
            at = f"resampler.blk.{index}"
            latents = w.rms_norm(x, f"{at}.ln_q", p.eps)
            seen = w.rms_norm(context, f"{at}.ln_kv", p.eps)
            seen = ops.concat(seen, latents, axis=1, name=f"{at}.seen")
            q, k, v = (
                split_heads(w.linear(y, f"{at}.attn_{part}"), count, f"{at}.attn_{part}")
                for part, y, count in (
                    ("q", latents, p.heads),
                    ("k", seen, p.groups),
                    ("v", seen, p.groups),
                )
            )
            y = w.linear(attend(q, k, v, attention, at=at), f"{at}.attn_out")
            x = ops.add(y, x, name=f"{at}.attn_residual")
            y = swiglu(w.rms_norm(x, f"{at}.ffn_norm", p.eps), at, w)
            x = ops.add(y, x, name=f"{at}.ffn_residual")
        return w.rms_norm(x, "resampler.post_ln", p.eps)


def _gated(at: str, theirs: str, width: int, ffn: int, out: int) -> dict[str, tuple[str, Shape]]:
    """A gated feed-forward layer: canonical name -> (the checkpoint's, shape)"""
    shapes = {"gate": (ffn, width), "up": (ffn, width), "down": (out, ffn)}
    return {
        f"{at}.ffn_{part}.weight": (f"{theirs}.{part}_proj.weight", shape)
        for part, shape in shapes.items()
    }


def _tower(name: str) -> tuple[str, ...]:
    return (f"model.vision_model.{name}",)


def read(top: Settings, image: Settings) -> Idefics2Vision:
    """Read it from config.json and the image processor's settings, with transformers' defaults;
    ModelError where a value cannot be followed.
    """
    vision, text = top.part("vision_config"), top.part("text_config")
    vit = read_vit(vision, layers=12, width=768, ffn=3072, heads=12, act="gelu_pytorch_tanh")
    vision.choice("num_channels", (3,), 3)
    size, patch = vision.count("image_size", 224), vision.count("patch_size", 32)
    if size < patch:
        raise ModelError(f"{vision.where}: image_size {size} is less than patch_size {patch}")
    width = text.count("hidden_size", 4096, maximum=MAX_WIDTH)
    text.choice("hidden_act", ("silu",), "silu")
    resampler = _read_resampler(top.part("perceiver_config"), text, width)
    return Idefics2Vision(
        vit=vit,
        positions=size // patch,
        patch=patch,
        resampler=resampler,
        text_width=width,
        text_ffn=text.count("intermediate_size", 14336, maximum=MAX_WIDTH),
        resolution=read_quartered(image, patch, resampler.tokens),
    )


def _read_resampler(c: Settings, text: Settings, width: int) -> Resampler:
    """The decoder's width is the resampler's; one that says another has the decoder's eps, too."""
    c.choice("hidden_act", ("silu",), "silu")
    heads, groups = (
        c.count("resampler_n_heads", 16, maximum=MAX_HEADS),
        c.count("num_key_value_heads", 4, maximum=MAX_HEADS),
    )
    if heads % groups:
        raise ModelError(
            f"{c.where}: {heads} heads in {groups} groups; expected groups that divide the heads"
        )
    own = c.count("hidden_size", 4096, maximum=MAX_WIDTH) == width
    return Resampler(
        tokens=c.count("resampler_n_latents", 64, maximum=MAX_TOKENS),
        layers=c.count("resampler_depth", 3, maximum=MAX_LAYERS),
        heads=heads,
        groups=groups,
        head=c.count("resampler_head_dim", 96, maximum=MAX_HEADS),
        eps=(c if own else text).number("rms_norm_eps", 1e-6),
    )
