"""HunyuanOCR's decoder (arXiv:2511.19575): Llama's layers, queries and keys normed after they turn,
and positions of up to four axes: the place in the prompt, column, row and number of the picture.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from mtmd.base.errors import ModelError
from mtmd.kernels import ops
from mtmd.kernels.checkpoint.canonical import Parameter
from mtmd.kernels.checkpoint.rotary import Rotary, read_rotary, rope_settings
from mtmd.kernels.checkpoint.settings import MAX_LAYERS, MAX_WIDTH, Settings
from mtmd.kernels.graph import Node, WeightSource
from mtmd.kernels.layers import Weights
from mtmd.kernels.plan.flash_choice import AttentionForm
from mtmd.llm.blocks import (
    attend,
    cache_keys_values,
    logits,
    queries_keys_values,
    read_heads,
    swiglu,
    token_embeddings,
)
from mtmd.llm.gguf_keys import GgufText, decoder_keys
from mtmd.llm.inputs import TextInputs
from mtmd.llm.parameters import (
    ATTENTION,
    COPIED_HEAD,
    attention_tensors,
    decoder_parameters,
    mlp_tensors,
    prefixed,
)
from mtmd.llm.state import KV

PREFIXES = ("model.", "model.language_model.")
SECTIONS = 0, 2, 1, 3  # axes of positions by section: place, column, row, number of the picture


@dataclass(frozen=True)
class HunyuanText:
    depth: int
    width: int
    ffn: int
    heads: int
    groups: int
    head: int
    vocabulary: int
    context: int
    eps: float
    bias: bool
    tied: bool
    rotary: Rotary

    @property
    def unused(self) -> tuple[str, ...]:
        return (COPIED_HEAD,) if self.tied else ()

    @property
    def layers(self) -> list[tuple[KV]]:
        return [(KV(self.groups, self.head),)] * self.depth

    @property
    def image_width(self) -> int:
        return self.width

    def parameters(self) -> Mapping[str, Parameter]:
        layer = {
            "attn_norm": ("input_layernorm", (self.width,)),
            **attention_tensors(self.width, self.heads, self.groups, self.head),
            "attn_q_norm": ("self_attn.query_layernorm", (self.head,)),
            "attn_k_norm": ("self_attn.key_layernorm", (self.head,)),
            "ffn_norm": ("post_attention_layernorm", (self.width,)),
            **mlp_tensors(self.width, self.ffn),
        }
        return decoder_parameters(
            prefixed(PREFIXES),
            [layer] * self.depth,
            vocabulary=self.vocabulary,
            width=self.width,
            tied=self.tied,
            biased=ATTENTION * self.bias,
        )

    def graph(self, inputs: TextInputs, weights: WeightSource, attention: AttentionForm) -> Node:
        w, bounds = Weights(weights, inputs.dtype), inputs.bounds()
        angles = inputs.angles(self.rotary)
        x = token_embeddings(inputs, w)
        for layer in inputs.layers(self.depth):
            at = f"blk.{layer}"
            y = w.rms_norm(x, f"{at}.attn_norm", self.eps)
            q, k, v = queries_keys_values(
                y, at, w, heads=self.heads, groups=self.groups, bias=self.bias
            )
            q, k = (
                w.rms_norm(
                    ops.rope(part, angles, name=f"{at}.{name}.rope"), f"{at}.{name}_norm", self.eps
                )
                for part, name in ((q, "attn_q"), (k, "attn_k"))
            )
            y = attend(q, cache_keys_values(k, v, layer, inputs), at, attention, bounds=bounds)
            y = w.linear(y, f"{at}.attn_output", bias=self.bias)
            x = ops.add(y, x, name=f"{at}.attn_residual")
            y = swiglu(w.rms_norm(x, f"{at}.ffn_norm", self.eps), at, w)
            x = ops.add(y, x, name=f"{at}.ffn_residual")
        return logits(x, inputs, w, eps=self.eps, tied=self.tied)


def to_gguf(text: HunyuanText) -> GgufText:
    """Return the architecture and keys of a GGUF that says the same."""
    return GgufText(
        "hunyuan_vl",
        decoder_keys(text),
        text.rotary,
        refused="biases of attention" if text.bias else "",
    )


def from_gguf(keys: Settings, names: Collection[str]) -> dict[str, Any]:  # noqa: ARG001
    """Return what config.json would say beyond the common keys."""
    parts = keys.get("rope.dimension_sections", None)
    counts = list(parts) if isinstance(parts, (list, tuple)) else parts
    return {"rope_parameters": {"mrope_section": counts}}


def read(c: Settings) -> HunyuanText:
    """Read it from config.json or its text_config, with transformers' defaults; ModelError where it
    cannot be followed.
    """
    c.choice("hidden_act", ("silu",), "silu")
    context = c.count("max_position_embeddings", 2048)
    count, groups, head = read_heads(c, 32, None, c.get("attention_head_dim", None))
    rope = rope_settings(c)
    rotary = read_rotary(rope, head, c.number("rope_theta", 1e4), context)
    return HunyuanText(
        depth=c.count("num_hidden_layers", 32, maximum=MAX_LAYERS),
        width=c.count("hidden_size", 4096, maximum=MAX_WIDTH),
        ffn=c.count("intermediate_size", 11008, maximum=MAX_WIDTH),
        heads=count,
        groups=groups,
        head=head,
        vocabulary=c.count("vocab_size", 290943),
        context=context,
        eps=c.number("rms_norm_eps", 1e-5),
        bias=c.flag("attention_bias", False),
        tied=c.flag("tie_word_embeddings", True),
        rotary=rotary.by_axes(_axes(rope, head)),
    )


def _axes(rope: Settings, head: int) -> list[int]:
    """The axis by which each pair of a head turns. Raises ModelError for sections that do not
    fit.
    """
    counts: Any = rope.get("mrope_section", rope.get("xdrope_section", None))
    numbers = (
        isinstance(counts, (list, tuple))
        and len(counts) in (3, 4)
        and all(type(n) is int and n >= 0 for n in counts)
    )
    if not numbers or sum(counts) != head // 2:
        raise ModelError(
            f"{rope.where}: mrope_section is {counts!r:.40}, expected 3 or 4 counts with a sum of "
            f"{head // 2}, half a head"
        )
    axes = SECTIONS[-len(counts) :]
    return [axis for axis, n in zip(axes, counts, strict=True) for _ in range(n)]
