"""Inputs of their own for layers: what a token says to each of them, and what its embedding does
(transformers' Gemma 3n and 4).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

from mtmd.kernels import ops
from mtmd.kernels.checkpoint.canonical import Parameter, Stored
from mtmd.kernels.checkpoint.settings import MAX_WIDTH, Settings
from mtmd.kernels.graph import Node
from mtmd.kernels.layers import Weights
from mtmd.llm.inputs import TextInputs


@dataclass(frozen=True)
class PerLayer:
    """`size` numbers, P, for each token in each of L layers, of decoder width D; the table of
    tokens has `rows`, of which the tokens of pictures read row `pad`, and so do those of the
    `vocabulary` that it does not have. A GGUF has a row for each.
    """

    layers: int
    width: int
    size: int
    rows: int
    vocabulary: int
    pad: int
    eps: float

    def parameters(self, source: Callable[[str], tuple[str, ...]]) -> Mapping[str, Parameter]:
        """`source("embed_tokens_per_layer.weight")` lists the names it may have in a checkpoint."""
        packed, width, size = self.layers * self.size, self.width, self.size
        parameters = {
            "per_layer_token_embd.weight": Parameter(
                (self.rows, packed),
                source("embed_tokens_per_layer.weight"),
                gguf=(self._of_all_tokens(packed),) if self.rows != self.vocabulary else (),
            ),
            "per_layer_model_proj.weight": Parameter(
                (packed, width), source("per_layer_model_projection.weight")
            ),
            "per_layer_proj_norm.weight": Parameter(
                (size,), source("per_layer_projection_norm.weight")
            ),
        }
        for layer in range(self.layers):
            at, theirs = f"blk.{layer}", f"layers.{layer}"
            parameters[f"{at}.inp_gate.weight"] = Parameter(
                (size, width), source(f"{theirs}.per_layer_input_gate.weight")
            )
            parameters[f"{at}.proj.weight"] = Parameter(
                (width, size), source(f"{theirs}.per_layer_projection.weight")
            )
            parameters[f"{at}.post_norm.weight"] = Parameter(
                (width,), source(f"{theirs}.post_per_layer_input_norm.weight")
            )
        return parameters

    @property
    def lacks_rows(self) -> bool:
        return self.rows < self.vocabulary

    def _of_all_tokens(self, packed: int) -> Stored:
        """The table with copies of row `pad` behind it, or without rows that no token has."""

        def fill_up(table: torch.Tensor) -> tuple[torch.Tensor]:
            copies = table[self.pad].expand(max(self.vocabulary - self.rows, 0), -1)
            return (torch.cat((table[: self.vocabulary], copies)),)

        name, shape = "per_layer_token_embd.weight", (self.vocabulary, packed)
        return Stored((name,), shape, lambda table: table[: self.rows], True, invert=fill_up)

    def inputs(self, x: Node, inputs: TextInputs, w: Weights) -> Node:
        """Return the inputs of all layers, side by side x [T, D], the embeddings -> [T, L P]"""
        tokens = w.embed(
            inputs.text_ids(self.pad, self.rows), "per_layer_token_embd", self.size**0.5
        )
        context = ops.scale(
            w.linear(x, "per_layer_model_proj"),
            factor=self.width**-0.5,
            name="per_layer_model_proj.scaled",
        )
        context = ops.reshape(
            context, shape=(x.shape[0], self.layers, self.size), name="per_layer_model_proj.layers"
        )
        context = ops.reshape(
            w.rms_norm(context, "per_layer_proj_norm", self.eps),
            shape=tokens.shape,
            name="per_layer_proj_norm.flat",
        )
        return ops.scale(
            ops.add(context, tokens, name="per_layer.sum"), factor=2.0**-0.5, name="per_layer"
        )

    def output(self, x: Node, layer: int, given: Node, w: Weights) -> Node:
        """Return what the layer's own input adds, as much as a gate in x lets through

        x [T, D], given [T, L P] -> [T, D]
        """
        at = f"blk.{layer}"
        own = ops.columns(
            given, start=layer * self.size, stop=(layer + 1) * self.size, name=f"{at}.inp"
        )
        y = w.linear(
            ops.gelu_mul(
                w.linear(x, f"{at}.inp_gate"), own, approximate="tanh", name=f"{at}.inp_gated"
            ),
            f"{at}.proj",
        )
        return w.rms_norm(y, f"{at}.post_norm", self.eps)


def read_per_layer(
    c: Settings, *, layers: int, width: int, eps: float, vocabulary: int, pad: int
) -> PerLayer:
    """Read it from a text_config with transformers' keys. Raises ModelError."""
    return PerLayer(
        layers=layers,
        width=width,
        size=c.count("hidden_size_per_layer_input", 256, maximum=MAX_WIDTH),
        rows=c.count("vocab_size_per_layer_input", vocabulary),
        vocabulary=vocabulary,
        pad=pad,
        eps=eps,
    )
