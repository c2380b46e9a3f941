"""The Q-Former (arXiv:2301.12597): queries that attend to each other and to features, norms behind
what is added; and to the tokens of a text (arXiv:2305.06500).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
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

SELF, CROSS = "self_attn", "cross_attn"
ATTENTION = {
    "q": "attention.query",
    "k": "attention.key",
    "v": "attention.value",
    "out": "output.dense",
    "norm": "output.LayerNorm",
}
FFN = {
    "ffn_up": "intermediate_query.dense",
    "ffn_down": "output_query.dense",
    "ffn_norm": "output_query.LayerNorm",
}


# The same of a text's tokens, which do not attend to features
TEXT_FFN = {
    "ffn_up": "intermediate.dense",
    "ffn_down": "output.dense",
    "ffn_norm": "output.LayerNorm",
}
TEXT = "text"


@dataclass(frozen=True)
class QFormer:
    """Layers L of width C; every `every`th, from the first on, attends to features of width
    `seen`. With a text, of `words` tokens that there are, up to `positions` of them.
    """

    layers: int
    width: int
    ffn: int
    heads: int
    every: int
    seen: int
    eps: float
    gelu: str
    words: int = 0
    positions: int = 0

    def parameters(
        self, at: str, blocks: Sequence[str], names: Callable[[str], tuple[str, ...]]
    ) -> dict[str, Parameter]:
        """`at` begins the name of the first norm, `blocks` those of the layers."""
        c = self.width
        norm = "embeddings.layernorm" if self.words else "layernorm"
        tensors: dict[str, tuple[str, Shape]] = {f"{at}.post_norm": (norm, (c,))}
        for layer, block in enumerate(blocks):
            theirs = f"encoder.layer.{layer}"
            kinds = {SELF: ("attention", c)}
            if layer % self.every == 0:
                kinds[CROSS] = ("crossattention", self.seen)
            for kind, (module, width) in kinds.items():
                shapes = {"k": (c, width), "v": (c, width), "norm": (c,)}
                tensors |= {
                    f"{block}.{kind}_{part}": (
                        f"{theirs}.{module}.{name}",
                        shapes.get(part, (c, c)),
                    )
                    for part, name in ATTENTION.items()
                }
            shapes = {"ffn_up": (self.ffn, c), "ffn_down": (c, self.ffn), "ffn_norm": (c,)}
            ffns = {block: FFN}
            if self.words and layer + 1 < len(blocks):
                ffns[f"{block}.{TEXT}"] = TEXT_FFN
            for begin, ffn in ffns.items():
                tensors |= {
                    f"{begin}.{part}": (f"{theirs}.{name}", shapes[part])
                    for part, name in ffn.items()
                }
        parameters = biased_parameters(tensors, names)
        if self.words:
            for table, rows in (("word", self.words), ("position", self.positions)):
                parameters[f"{at}.{table}_embd.weight"] = Parameter(
                    (rows, c), names(f"embeddings.{table}_embeddings.weight")
                )
        return parameters

    def text(self, ids: Node, at: str, w: Weights) -> Node:
        """Tokens int64 [N] -> [1, N, C], what `graph` reads of a text"""
        count = ids.shape[0]
        positions = graph_input(
            "inp.text_positions", (count,), torch.int64, lambda _: torch.arange(count)
        )
        table = w.tensor(f"{at}.position_embd.weight")
        x = ops.add(
            w.embed(ids, f"{at}.word_embd"),
            ops.take_rows(table, positions, name=f"{at}.position_embd"),
            name=f"{at}.text",
        )
        return ops.reshape(x, shape=(1, count, self.width), name=f"{at}.text.batch")

    def graph(
        self,
        x: Node,
        seen: Node,
        at: str,
        blocks: Sequence[str],
        w: Weights,
        attention: AttentionForm,
        text: Node | None = None,
    ) -> Node:
        """Queries [B, Q, C], features [B, S, E], a text [B, N, C] -> [B, Q, C]"""
        queries = x.shape[1]
        if text is not None:
            x = ops.concat(x, text, axis=1, name=f"{at}.all")
        x = w.layer_norm(x, f"{at}.post_norm", self.eps)
        for layer, block in enumerate(blocks):
            x = self._attended(x, x, f"{block}.{SELF}", w, attention)
            rest = None
            if text is not None:
                rest = _rows(x, queries, x.shape[1], f"{block}.{TEXT}")
                x = _rows(x, 0, queries, f"{block}.queries")
            if layer % self.every == 0:
                x = self._attended(x, seen, f"{block}.{CROSS}", w, attention)
            x = self._through(x, block, w)
            if rest is not None and layer + 1 < len(blocks):
                rest = self._through(rest, f"{block}.{TEXT}", w)
                x = ops.concat(x, rest, axis=1, name=f"{block}.all")
        return x

    def _through(self, x: Node, block: str, w: Weights) -> Node:
        y = ops.add(mlp(x, block, self.gelu, w), x, name=f"{block}.ffn_residual")
        return w.layer_norm(y, f"{block}.ffn_norm", self.eps)

    def _attended(self, x: Node, seen: Node, at: str, w: Weights, attention: AttentionForm) -> Node:
        q, k, v = (
            split_heads(w.linear(source, f"{at}_{part}", bias=True), self.heads, f"{at}_{part}")
            for part, source in (("q", x), ("k", seen), ("v", seen))
        )
        y = w.linear(attend(q, k, v, attention, at=at), f"{at}_out", bias=True)
        return w.layer_norm(ops.add(y, x, name=f"{at}_residual"), f"{at}_norm", self.eps)


def _rows(x: Node, start: int, stop: int, name: str) -> Node:
    """[B, N, C] -> [B, stop - start, C]"""
    at = graph_input(
        f"inp.{name}", (stop - start,), torch.int64, lambda _: torch.arange(start, stop)
    )
    return ops.take_rows(x, at, name=f"{name}.rows")


def read_qformer(
    c: Settings,
    *,
    layers: int,
    every: int,
    width: int,
    heads: int,
    seen: int,
    reads_text: bool = False,
) -> QFormer:
    """Read it from a qformer_config with transformers' keys; the numbers are those where it says
    nothing. Raises ModelError for what cannot be followed.
    """
    if not reads_text:
        c.choice("use_qformer_text_input", (False,), False)
    width = c.count("hidden_size", width, maximum=MAX_WIDTH)
    heads = c.count("num_attention_heads", heads, maximum=MAX_HEADS)
    if width % heads:
        raise ModelError(
            f"{c.where}: {heads} heads of width {width}; expected heads that divide the width"
        )
    return QFormer(
        layers=c.count("num_hidden_layers", layers, maximum=MAX_LAYERS),
        width=width,
        ffn=c.count("intermediate_size", 3072, maximum=MAX_WIDTH),
        heads=heads,
        every=c.count("cross_attention_frequency", every, maximum=MAX_LAYERS),
        seen=c.count("encoder_hidden_size", seen, maximum=MAX_WIDTH),
        eps=c.number("layer_norm_eps", 1e-12),
        gelu=ACTIVATIONS[c.choice("hidden_act", ACTIVATIONS, "gelu")],
        words=c.count("vocab_size", 30522) if reads_text else 0,
        positions=c.count("max_position_embeddings", 512, maximum=MAX_WIDTH) if reads_text else 0,
    )
