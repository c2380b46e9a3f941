"""The Q-Former (arXiv:2301.12597): queries that attend to each other and to features, norms behind
what is added.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from mtmd.base.errors import ModelError
from mtmd.clip.blocks import ACTIVATIONS, attend, biased_parameters, mlp, split_heads
from mtmd.kernels import ops
from mtmd.kernels.checkpoint.canonical import Parameter
from mtmd.kernels.checkpoint.settings import MAX_HEADS, MAX_LAYERS, MAX_WIDTH, Settings
from mtmd.kernels.graph import Node, Shape
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


@dataclass(frozen=True)
class QFormer:
    """Layers L of width C; every `every`th, from the first on, attends to features of width
    `seen`.
    """

    layers: int
    width: int
    ffn: int
    heads: int
    every: int
    seen: int
    eps: float
    gelu: str

    def parameters(
        self, at: str, blocks: Sequence[str], names: Callable[[str], tuple[str, ...]]
    ) -> dict[str, Parameter]:
        """`at` begins the name of the first norm, `blocks` those of the layers."""
        c = self.width
        tensors: dict[str, tuple[str, Shape]] = {f"{at}.post_norm": ("layernorm", (c,))}
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
            tensors |= {
                f"{block}.{part}": (f"{theirs}.{name}", shapes[part]) for part, name in FFN.items()
            }
        return biased_parameters(tensors, names)

    def graph(
        self,
        x: Node,
        seen: Node,
        at: str,
        blocks: Sequence[str],
        w: Weights,
        attention: AttentionForm,
    ) -> Node:
        """Queries [B, Q, C], features [B, S, E] -> [B, Q, C]"""
        x = w.layer_norm(x, f"{at}.post_norm", self.eps)
        for layer, block in enumerate(blocks):
            x = self._attended(x, x, f"{block}.{SELF}", w, attention)
            if layer % self.every == 0:
                x = self._attended(x, seen, f"{block}.{CROSS}", w, attention)
            y = ops.add(mlp(x, block, self.gelu, w), x, name=f"{block}.ffn_residual")
            x = w.layer_norm(y, f"{block}.ffn_norm", self.eps)
        return x

    def _attended(self, x: Node, seen: Node, at: str, w: Weights, attention: AttentionForm) -> Node:
        q, k, v = (
            split_heads(w.linear(source, f"{at}_{part}", bias=True), self.heads, f"{at}_{part}")
            for part, source in (("q", x), ("k", seen), ("v", seen))
        )
        y = w.linear(attend(q, k, v, attention, at=at), f"{at}_out", bias=True)
        return w.layer_norm(ops.add(y, x, name=f"{at}_residual"), f"{at}_norm", self.eps)


def read_qformer(
    c: Settings, *, layers: int, every: int, width: int, heads: int, seen: int
) -> QFormer:
    """Read it from a qformer_config with transformers' keys; the numbers are those where it says
    nothing. Raises ModelError for what cannot be followed.
    """
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
    )
