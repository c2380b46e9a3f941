"""Inputs of their own for layers: what a token says to each of them, and what its embedding does
(transformers' Gemma 3n and 4).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from mtmd.base.errors import ModelError
from mtmd.kernels import ops
from mtmd.kernels.checkpoint.canonical import Parameter
from mtmd.kernels.checkpoint.settings import MAX_WIDTH, Settings
from mtmd.kernels.graph import Node
from mtmd.kernels.layers import Weights
from mtmd.llm.inputs import TextInputs


@dataclass(frozen=True)
class PerLayer:
    """`size` numbers, P, for each token in each of L layers, of decoder width D; the table of
    tokens has `rows`, of which the tokens of pictures read row `pad`.
    """

    layers: int
    width: int
    size: int
    rows: int
    pad: int
    eps: float

    def parameters(self, source: Callable[[str], tuple[str, ...]]) -> Mapping[str, Parameter]:
        """`source("embed_tokens_per_layer.weight")` lists the names it may have in a checkpoint."""
        packed, width, size = self.layers * self.size, self.width, self.size
        parameters = {
            "per_layer_token_embd.weight": Parameter(
                (self.rows, packed), source("embed_tokens_per_layer.weight")
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

    def inputs(self, x: Node, inputs: TextInputs, w: Weights) -> Node:
        """Return the inputs of all layers, side by side x [T, D], the embeddings -> [T, L P]"""
        tokens = w.embed(inputs.text_ids(self.pad), "per_layer_token_embd", self.size**0.5)
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

    def add(self, x: Node, layer: int, given: Node, w: Weights) -> Node:
        """x and what comes of the layer's own input, as much as a gate in x lets through

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
        return ops.add(w.rms_norm(y, f"{at}.post_norm", self.eps), x, name=f"{at}.inp_residual")


def read_per_layer(
    c: Settings, *, layers: int, width: int, eps: float, vocabulary: int
) -> PerLayer | None:
    """Read it from a text_config with transformers' keys, None where layers have no inputs of their
    own. Raises ModelError for a table that does not have all tokens.
    """
    if c.get("hidden_size_per_layer_input", 256) == 0:
        return None
    rows, pad = c.count("vocab_size_per_layer_input", vocabulary), c.get("pad_token_id", 0)
    if rows < vocabulary or type(pad) is not int or not 0 <= pad < rows:
        raise ModelError(
            f"{c.where}: vocab_size_per_layer_input is {rows} and pad_token_id {pad!r:.20}; "
            "expected a row for each of "
            f"{vocabulary} tokens, and the pad token among them"
        )
    return PerLayer(
        layers=layers,
        width=width,
        size=c.count("hidden_size_per_layer_input", 256, maximum=MAX_WIDTH),
        rows=rows,
        pad=pad,
        eps=eps,
    )
