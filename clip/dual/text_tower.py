"""A transformer that makes one vector of a text: what stands beside a picture's tower."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from mtmd.clip.blocks import VitParams, biased_parameters, vit_block, vit_parameters
from mtmd.kernels import ops
from mtmd.kernels.checkpoint.canonical import Parameter
from mtmd.kernels.graph import Node, WeightSource, graph_input
from mtmd.kernels.layers import Weights
from mtmd.kernels.plan.flash_choice import AttentionForm

STEP = 16  # tokens: texts of about the same length make one batch


@dataclass(frozen=True)
class TextBatch:
    """`tokens` [B * T], all texts of one length; `last` [B]: the row of all of them that is each
    text's vector.
    """

    tokens: Tensor
    last: Tensor


@dataclass(frozen=True)
class TextTower:
    """`context`: the most tokens of a text. `padding` fills each up to that many and is read as
    text is, None where texts end by themselves. Of `causal` ones each token sees those before it.
    `projection` is the last layer's width, and `projection_bias` whether it has one.
    """

    vit: VitParams
    vocabulary: int
    context: int
    causal: bool
    padding: int | None
    projection: int
    projection_bias: bool
    projection_name: str
    """The checkpoint's, without `.weight`."""

    def parameters(self) -> Mapping[str, Parameter]:
        width = self.vit.width
        parameters = vit_parameters(self.vit, names, "t.blk")
        parameters["t.token_embd.weight"] = Parameter(
            (self.vocabulary, width), names("embeddings.token_embedding.weight")
        )
        parameters["t.position_embd.weight"] = Parameter(
            (self.context, width), names("embeddings.position_embedding.weight")
        )
        parameters |= biased_parameters({"t.post_ln": ("final_layer_norm", (width,))}, names)
        last = biased_parameters(
            {"t.projection": (self.projection_name, (self.projection, width))}, one_name
        )
        return parameters | {
            name: p for name, p in last.items() if self.projection_bias or name.endswith("weight")
        }

    def length(self, tokens: int) -> int:
        """Return to how many tokens a text of so many is padded."""
        if self.padding is not None:
            return self.context
        return min(-(-tokens // STEP) * STEP, self.context)

    def batch(self, texts: Sequence[Sequence[int]]) -> TextBatch:
        """Texts of equal `length`. After a text that ends by itself stands its own last token:
        nothing before it sees that.
        """
        length = self.length(len(texts[0]))
        rows, last = [], []
        for index, text in enumerate(texts):
            filler = text[-1] if self.padding is None else self.padding
            rows.append([*text, *[filler] * (length - len(text))])
            last.append(index * length + (len(text) if self.padding is None else length) - 1)
        return TextBatch(torch.tensor(rows).flatten(), torch.tensor(last))

    def graph(
        self,
        batch: int,
        length: int,
        weights: WeightSource,
        dtype: torch.dtype,
        attention: AttentionForm,
    ) -> Node:
        """-> vectors [B, D]"""
        w, width = Weights(weights, dtype), self.vit.width
        tokens = graph_input("inp.tokens", (batch * length,), torch.int64, lambda b: b.tokens)
        x = ops.reshape(
            w.embed(tokens, "t.token_embd"), shape=(batch, length, width), name="t.texts"
        )
        table = w.tensor("t.position_embd.weight")
        if length < self.context:
            first = graph_input(
                "inp.positions", (length,), torch.int64, lambda _: torch.arange(length)
            )
            table = ops.take_rows(table, first, name="t.position_embd.first")
        x = ops.add(x, table, name="t.position_embd")
        for index in range(self.vit.layers):
            x = vit_block(
                x, index, self.vit, w, attention=attention, blocks="t.blk", causal=self.causal
            )
        rows = ops.reshape(x, shape=(batch * length, width), name="t.rows")
        last = graph_input("inp.last", (batch,), torch.int64, lambda b: b.last)
        pooled = w.layer_norm(ops.take_rows(rows, last, name="t.pooled"), "t.post_ln", self.vit.eps)
        return w.linear(pooled, "t.projection", bias=self.projection_bias)


def names(name: str) -> tuple[str, ...]:
    return (f"text_model.{name}",)


def one_name(name: str) -> tuple[str, ...]:
    return (name,)


def image_names(name: str) -> tuple[str, ...]:
    return (f"vision_model.{name}",)
