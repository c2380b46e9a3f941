"""OPT (arXiv:2205.01068), which BLIP-2 answers with: a learned position for each token, layer norms
with biases, ReLU.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from mtmd.base.errors import ModelError
from mtmd.kernels import ops
from mtmd.kernels.checkpoint.canonical import Parameter
from mtmd.kernels.checkpoint.rotary import Rotary
from mtmd.kernels.checkpoint.settings import MAX_HEADS, MAX_LAYERS, MAX_WIDTH, Settings
from mtmd.kernels.graph import Node, WeightSource
from mtmd.kernels.layers import Weights
from mtmd.kernels.plan.flash_choice import AttentionForm
from mtmd.llm.blocks import (
    add_positions,
    attend,
    cache_keys_values,
    queries_keys_values,
    token_embeddings,
)
from mtmd.llm.gguf_keys import GgufText
from mtmd.llm.inputs import TextInputs
from mtmd.llm.parameters import COPIED_HEAD, decoder_parameters, prefixed
from mtmd.llm.state import KV

PREFIXES = ("model.decoder.", "language_model.model.decoder.", "decoder.")
FIRST_POSITION = 2  # row of the table for the first token; those before are of no use
EPS = 1e-5  # of the norms; the settings do not say
ACTIVATIONS = {"relu": "", "gelu": "none"}


@dataclass(frozen=True)
class OptText:
    """`inner`: width of the token table, from which and to which a matrix leads where it is not
    that of the layers. `norm_first`: norms stand before attention and MLP, and at the end, else
    behind what is added. `gelu`: how it is computed, "" for ReLU.
    """

    depth: int
    width: int
    inner: int
    ffn: int
    heads: int
    vocabulary: int
    context: int
    norm_first: bool
    biases: bool
    gelu: str
    tied: bool

    @property
    def unused(self) -> tuple[str, ...]:
        return (COPIED_HEAD,) if self.tied else ()

    @property
    def layers(self) -> list[tuple[KV]]:
        return [(KV(self.heads, self.width // self.heads),)] * self.depth

    @property
    def image_width(self) -> int:
        return self.inner

    def parameters(self) -> Mapping[str, Parameter]:
        square, source = (self.width, self.width), prefixed(PREFIXES)
        linear = {
            "attn_q": ("self_attn.q_proj", square),
            "attn_k": ("self_attn.k_proj", square),
            "attn_v": ("self_attn.v_proj", square),
            "attn_output": ("self_attn.out_proj", square),
            "ffn_up": ("fc1", (self.ffn, self.width)),
            "ffn_down": ("fc2", (self.width, self.ffn)),
        }
        norms = {
            "attn_norm": ("self_attn_layer_norm", (self.width,)),
            "ffn_norm": ("final_layer_norm", (self.width,)),
        }
        parameters = decoder_parameters(
            source,
            [{**linear, **norms}] * self.depth,
            vocabulary=self.vocabulary,
            width=self.inner,
            tied=self.tied,
            biased=(*norms, *(linear if self.biases else ())),
        )
        del parameters["output_norm.weight"]
        if self.norm_first:
            for kind in ("weight", "bias"):
                parameters[f"output_norm.{kind}"] = Parameter(
                    (self.width,), source(f"final_layer_norm.{kind}")
                )
        rows = self.context + FIRST_POSITION
        parameters["position_embd.weight"] = Parameter(
            (rows, self.width), source("embed_positions.weight")
        )
        if self.inner != self.width:
            for ours, theirs, shape in (
                ("token_embd_in", "project_in", (self.width, self.inner)),
                ("token_embd_out", "project_out", (self.inner, self.width)),
            ):
                parameters[f"{ours}.weight"] = Parameter(shape, source(f"{theirs}.weight"))
        return parameters

    def graph(self, inputs: TextInputs, weights: WeightSource, attention: AttentionForm) -> Node:
        w, bounds = Weights(weights, inputs.dtype), inputs.bounds(None)
        x = token_embeddings(inputs, w)
        if self.inner != self.width:
            x = w.linear(x, "token_embd_in")
        x = add_positions(x, inputs, w, FIRST_POSITION)
        for layer in inputs.layers(self.depth):
            at = f"blk.{layer}"
            y = self._before(x, f"{at}.attn_norm", w)
            q, k, v = queries_keys_values(
                y, at, w, heads=self.heads, groups=self.heads, bias=self.biases
            )
            mixed = attend(q, cache_keys_values(k, v, layer, inputs), at, attention, bounds=bounds)
            mixed = w.linear(mixed, f"{at}.attn_output", bias=self.biases)
            x = self._behind(ops.add(mixed, x, name=f"{at}.attn_residual"), f"{at}.attn_norm", w)
            y = w.linear(self._before(x, f"{at}.ffn_norm", w), f"{at}.ffn_up", bias=self.biases)
            y = (
                ops.gelu(y, approximate=self.gelu, name=f"{at}.ffn_gelu")
                if self.gelu
                else ops.relu(y, name=f"{at}.ffn_relu")
            )
            y = w.linear(y, f"{at}.ffn_down", bias=self.biases)
            x = self._behind(ops.add(y, x, name=f"{at}.ffn_residual"), f"{at}.ffn_norm", w)
        x = self._before(ops.take_rows(x, inputs.requested_rows(), name="wanted"), "output_norm", w)
        if self.inner != self.width:
            x = w.linear(x, "token_embd_out")
        return w.linear(x, "token_embd" if self.tied else "output", name="logits")

    def _before(self, x: Node, at: str, w: Weights) -> Node:
        return w.layer_norm(x, at, EPS) if self.norm_first else x

    def _behind(self, x: Node, at: str, w: Weights) -> Node:
        return x if self.norm_first else w.layer_norm(x, at, EPS)


def to_gguf(text: OptText) -> GgufText:  # noqa: ARG001
    """Return what a GGUF cannot have: llama.cpp has no architecture of OPT."""
    return GgufText("opt", {}, Rotary(()), refused="learned positions of tokens")


def read(c: Settings) -> OptText:
    """Read it from config.json or its text_config, with transformers' defaults; ModelError where it
    cannot be followed.
    """
    c.choice("layer_norm_elementwise_affine", (True,), True)
    width = c.count("hidden_size", 768, maximum=MAX_WIDTH)
    heads = c.count("num_attention_heads", 12, maximum=MAX_HEADS)
    if width % heads:
        raise ModelError(
            f"{c.where}: {heads} heads of width {width}; expected heads that divide the width"
        )
    norm_first = c.flag("do_layer_norm_before", True)
    if norm_first:
        c.choice("_remove_final_layer_norm", (False,), False)
    return OptText(
        depth=c.count("num_hidden_layers", 12, maximum=MAX_LAYERS),
        width=width,
        inner=c.count("word_embed_proj_dim", width, maximum=MAX_WIDTH),
        ffn=c.count("ffn_dim", 3072, maximum=MAX_WIDTH),
        heads=heads,
        vocabulary=c.count("vocab_size", 50272),
        context=c.count("max_position_embeddings", 2048),
        norm_first=norm_first,
        biases=c.flag("enable_bias", True),
        gelu=ACTIVATIONS[c.choice("activation_function", ACTIVATIONS, "relu")],
        tied=c.flag("tie_word_embeddings", True),
    )
