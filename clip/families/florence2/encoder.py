"""BART's encoder (arXiv:1910.13461): the rows of a picture and the tokens of a prompt behind them,
which see each other in both directions.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from mtmd.base.errors import ModelError
from mtmd.clip.blocks import ACTIVATIONS, attend, biased_parameters, mlp, split_heads
from mtmd.kernels import ops
from mtmd.kernels.checkpoint.canonical import Parameter
from mtmd.kernels.checkpoint.settings import MAX_HEADS, MAX_LAYERS, MAX_WIDTH, Settings
from mtmd.kernels.graph import Node, Shape, graph_input
from mtmd.kernels.layers import Weights
from mtmd.kernels.plan.flash_choice import AttentionForm

AT = "mm.encoder"
FIRST_POSITION = 2  # row of the table for the first one; those before are of no use
EPS = 1e-5  # of the norms; the settings do not say
LAYER = {
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_out": "self_attn.out_proj",
    "attn_norm": "self_attn_layer_norm",
    "ffn_up": "fc1",
    "ffn_down": "fc2",
    "ffn_norm": "final_layer_norm",
}


@dataclass(frozen=True)
class BartEncoder:
    """`words`: the tokens that there are; `positions`: how many rows and tokens it can read."""

    layers: int
    width: int
    ffn: int
    heads: int
    words: int
    positions: int
    scale: float
    gelu: str

    def parameters(self) -> dict[str, Parameter]:
        c = self.width
        tensors: dict[str, tuple[str, Shape]] = {f"{AT}.norm": ("layernorm_embedding", (c,))}
        shapes: dict[str, Shape] = {"ffn_up": (self.ffn, c), "ffn_down": (c, self.ffn)}
        shapes |= {"attn_norm": (c,), "ffn_norm": (c,)}
        for layer in range(self.layers):
            tensors |= {
                f"{AT}.{layer}.{part}": (f"layers.{layer}.{name}", shapes.get(part, (c, c)))
                for part, name in LAYER.items()
            }
        table = (*_names("embed_tokens.weight"), *TABLES)
        return {
            **biased_parameters(tensors, _names),
            f"{AT}.word_embd.weight": Parameter((self.words, c), table),
            f"{AT}.position_embd.weight": Parameter(
                (self.positions + FIRST_POSITION, c), _names("embed_positions.weight")
            ),
        }

    def graph(self, rows: Node, ids: Node, w: Weights, attention: AttentionForm) -> Node:
        """rows [1, S, C], tokens int64 [N] -> states [1, S + N, C]"""
        count = ids.shape[0]
        words = w.embed(ids, f"{AT}.word_embd", self.scale)
        words = ops.reshape(words, shape=(1, count, self.width), name=f"{AT}.words")
        x = ops.concat(rows, words, axis=1, name=f"{AT}.all")
        positions = torch.arange(x.shape[1]) + FIRST_POSITION
        at = graph_input("inp.encoder_positions", (x.shape[1],), torch.int64, lambda _: positions)
        table = w.tensor(f"{AT}.position_embd.weight")
        x = ops.add(x, ops.take_rows(table, at, name=f"{AT}.positions"), name=f"{AT}.positioned")
        x = w.layer_norm(x, f"{AT}.norm", EPS)
        for layer in range(self.layers):
            block = f"{AT}.{layer}"
            q, k, v = (
                split_heads(
                    w.linear(x, f"{block}.attn_{part}", bias=True), self.heads, f"{block}.{part}"
                )
                for part in "qkv"
            )
            y = w.linear(attend(q, k, v, attention, at=block), f"{block}.attn_out", bias=True)
            y = ops.add(y, x, name=f"{block}.attn_residual")
            x = w.layer_norm(y, f"{block}.attn_norm", EPS)
            y = ops.add(mlp(x, block, self.gelu, w), x, name=f"{block}.ffn_residual")
            x = w.layer_norm(y, f"{block}.ffn_norm", EPS)
        return x


# The table that encoder and decoder share, by transformers' name and by the authors'
TABLES = (
    "model.language_model.shared.weight",
    "language_model.model.shared.weight",
    "lm_head.weight",
    "language_model.lm_head.weight",
)


def _names(name: str) -> tuple[str, ...]:
    return f"model.language_model.encoder.{name}", f"language_model.model.encoder.{name}"


def read_encoder(c: Settings) -> BartEncoder:
    """Read it from a text_config, with transformers' defaults (BartConfig). Raises ModelError for
    what cannot be followed.
    """
    width = c.count("d_model", 1024, maximum=MAX_WIDTH)
    heads = c.count("encoder_attention_heads", 16, maximum=MAX_HEADS)
    if width % heads:
        raise ModelError(
            f"{c.where}: {heads} heads of width {width}; expected heads that divide the width"
        )
    return BartEncoder(
        layers=c.count("encoder_layers", 12, maximum=MAX_LAYERS),
        width=width,
        ffn=c.count("encoder_ffn_dim", 4096, maximum=MAX_WIDTH),
        heads=heads,
        words=c.count("vocab_size", 50265),
        positions=c.count("max_position_embeddings", 1024, maximum=MAX_WIDTH),
        scale=width**0.5 if c.flag("scale_embedding", False) else 1.0,
        gelu=ACTIVATIONS[c.choice("activation_function", ACTIVATIONS, "gelu")],
    )
