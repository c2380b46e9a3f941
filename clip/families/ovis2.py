"""Ovis2 (arXiv:2405.20797): AIMv2 (arXiv:2411.14402) over tiles, each of whose places is a mixture
of the words of a visual vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from mtmd.base.errors import ModelError
from mtmd.clip.blocks import attend, split_heads, swiglu
from mtmd.clip.resolution.covering import CoveringTiling, read_covering_tiling
from mtmd.clip.resolution.resolution import ImagePlan
from mtmd.kernels import ops
from mtmd.kernels.checkpoint.canonical import Parameter
from mtmd.kernels.checkpoint.settings import MAX_HEADS, MAX_LAYERS, MAX_WIDTH, Settings, is_token_id
from mtmd.kernels.graph import Node, Shape, WeightSource
from mtmd.kernels.layers import Weights
from mtmd.kernels.plan.flash_choice import AttentionForm

NORM_EPS = 1e-5  # of the norm of logits, torch's default
MARKS = (151666, 151667, 151668, 151669, 151670)
IMAGE_TOKEN = "<IMG_ATOM>"


@dataclass(frozen=True)
class Ovis2Vision:
    layers: int
    width: int
    ffn: int
    heads: int
    eps: float
    patch: int
    stride: int  # places on a side of what becomes a token
    words: int  # that places are mixtures of
    mark_tokens: tuple[int, ...]
    text_width: int
    resolution: CoveringTiling

    marker, image_token = "<image>", IMAGE_TOKEN
    around = ("", "")
    bidirectional = False
    separator = None
    marks = "mm.marks"
    video = None
    unused = ()

    @property
    def grid(self) -> int:
        return self.resolution.side // self.patch

    def parameters(self) -> Mapping[str, Parameter]:
        width, wide = self.width, (self.width,)
        shapes: dict[str, tuple[str, Shape]] = {
            "v.patch_embd.weight": (
                "embeddings.patch_embedding.weight",
                (width, 3, self.patch, self.patch),
            ),
            "v.patch_embd.bias": ("embeddings.patch_embedding.bias", wide),
            "v.pre_ln.weight": ("embeddings.rms_norm.weight", wide),
            "v.position_embd.weight": (
                "embeddings.position_embedding.weight",
                (self.grid**2, width),
            ),
            "v.post_ln.weight": ("rms_norm.weight", wide),
        }
        for index in range(self.layers):
            at, theirs = f"v.blk.{index}", f"encoder.layers.{index}"
            shapes |= {
                f"{at}.ln1.weight": (f"{theirs}.rms_norm1.weight", wide),
                f"{at}.ln2.weight": (f"{theirs}.rms_norm2.weight", wide),
                f"{at}.ffn_gate.weight": (f"{theirs}.ffn.gate_proj.weight", (self.ffn, width)),
                f"{at}.ffn_up.weight": (f"{theirs}.ffn.up_proj.weight", (self.ffn, width)),
                f"{at}.ffn_down.weight": (f"{theirs}.ffn.down_proj.weight", (width, self.ffn)),
            }
            for ours, name in (("q", "q"), ("k", "k"), ("v", "v"), ("out", "out")):
                shapes[f"{at}.attn_{ours}.weight"] = (
                    f"{theirs}.attention.{name}_proj.weight",
                    (width, width),
                )
        parameters = {
            ours: Parameter(shape, (f"model.vision_tower.transformer.{theirs}",))
            for ours, (theirs, shape) in shapes.items()
        }
        head = "model.vision_tower.head"
        table, words = "model.visual_embeddings_table.weight", self.words
        whole = (words + len(self.mark_tokens), self.text_width)
        return parameters | {
            "mm.head.weight": Parameter(
                (words, width * self.stride**2), (f"{head}_linear.weight",)
            ),
            "mm.head_norm.weight": Parameter((words,), (f"{head}_norm.weight",)),
            "mm.head_norm.bias": Parameter((words,), (f"{head}_norm.bias",)),
            "mm.words.weight": Parameter(
                (words, self.text_width), (table,), whole, lambda w: w[:words]
            ),
            "mm.marks": Parameter(
                (len(self.mark_tokens), self.text_width), (table,), whole, lambda w: w[words:]
            ),
        }

    def prompt(self, plan: ImagePlan) -> str:
        tokens, (rows, columns) = self.image_token * self.resolution.tile_tokens, plan.cut
        lines = ["<IMG_COL>".join([tokens] * columns)] * rows if rows * columns > 1 else []
        return f"<IMG_START>{tokens}<IMG_GRID>{'<IMG_ROW>'.join(lines)}<IMG_END>"

    def graph(self, tiles: Node, weights: WeightSource, attention: AttentionForm) -> Node:
        w, batch = Weights(weights, tiles.dtype), tiles.shape[0]
        patches = (w.tensor(f"v.patch_embd.{kind}") for kind in ("weight", "bias"))
        x = ops.patch_embed(tiles, *patches, name="v.patch_embd")
        x = w.rms_norm(x, "v.pre_ln", self.eps)
        x = ops.add(x, w.tensor("v.position_embd.weight"), name="v.position_embd")
        for index in w.layers(self.layers):
            at = f"v.blk.{index}"
            y = w.rms_norm(x, f"{at}.ln1", self.eps)
            q, k, v = (
                split_heads(w.linear(y, name), self.heads, name)
                for name in (f"{at}.attn_{part}" for part in "qkv")
            )
            y = w.linear(attend(q, k, v, attention, at=at), f"{at}.attn_out")
            x = ops.add(y, x, name=f"{at}.attn_residual")
            y = swiglu(w.rms_norm(x, f"{at}.ln2", self.eps), at, w)
            x = ops.add(y, x, name=f"{at}.ffn_residual")
        x = w.rms_norm(x, "v.post_ln", self.eps)
        grid = (self.grid, self.grid)
        x = ops.unshuffle(x, grid=grid, factor=self.stride, name="mm.unshuffle")
        x = w.layer_norm(w.linear(x, "mm.head"), "mm.head_norm", NORM_EPS)
        return self._mixed(x, batch, w)

    def _mixed(self, x: Node, batch: int, w: Weights) -> Node:
        """Words by their probabilities          [B, T, words] -> [B, T, D]

        As attention to the vocabulary, whose scores are given.
        """
        rows = x.shape[1] * batch
        scores = ops.reshape(x, shape=(1, 1, rows, self.words), name="mm.scores")
        table = ops.reshape(
            w.tensor("mm.words.weight"), shape=(1, self.words, 1, self.text_width), name="mm.words"
        )
        shares = ops.attn_softmax(
            ops.cast(scores, dtype=torch.float32, name="mm.scores.fp32"), name="mm.shares"
        )
        mixed = ops.attn_mix(shares, table, name="mm.mixed")
        return ops.reshape(mixed, shape=(batch, x.shape[1], self.text_width), name="mm.tokens")


def read(top: Settings, image: Settings) -> Ovis2Vision:
    """Read it from config.json and the image processor's settings, with transformers' defaults;
    ModelError where a value cannot be followed.
    """
    vision = top.part("vision_config")
    vision.choice("num_channels", (3,), 3)
    vision.choice("hidden_act", ("silu",), "silu")
    vision.choice("tokenize_function", ("softmax",), "softmax")
    for key in ("qkv_bias", "mlp_bias"):
        vision.choice(key, (False,), False)
    side, patch = vision.count("image_size", 224), vision.count("patch_size", 14)
    stride, count = vision.count("hidden_stride", 1), vision.count("num_visual_indicator_tokens", 5)
    width, heads = (
        vision.count("hidden_size", 1024, maximum=MAX_WIDTH),
        vision.count("num_attention_heads", 8, maximum=MAX_HEADS),
    )
    if side % (patch * stride) or width % heads:
        raise ModelError(
            f"{vision.where}: image_size {side}, patch_size {patch}, hidden_stride {stride}, "
            f"hidden_size {width} and {heads} heads do not fit together; expected whole tokens and "
            "heads"
        )
    words = vision.count("vocab_size", 16384, maximum=MAX_WIDTH) - count
    marks = top.get("visual_indicator_token_ids", MARKS)
    if words < 1 or not isinstance(marks, (list, tuple)) or len(marks) != count:
        raise ModelError(
            f"{top.where}: visual_indicator_token_ids is {marks!r:.40}, expected {count} tokens of "
            f"a visual vocabulary of {words + count}"
        )
    if not all(map(is_token_id, marks)):
        raise ModelError(f"{top.where}: visual_indicator_token_ids has what is no token's id")
    return Ovis2Vision(
        layers=vision.count("num_hidden_layers", 24, maximum=MAX_LAYERS),
        width=width,
        ffn=vision.count("intermediate_size", 2816, maximum=MAX_WIDTH),
        heads=heads,
        eps=vision.number("rms_norm_eps", 1e-5),
        patch=patch,
        stride=stride,
        words=words,
        mark_tokens=tuple(marks),
        text_width=top.part("text_config").count("hidden_size", 1536, maximum=MAX_WIDTH),
        resolution=read_covering_tiling(image, side, (side // patch // stride) ** 2),
    )
