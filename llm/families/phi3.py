"""Phi-3, Phi-3.5, Phi-4 and Phi-4-mini (arXiv:2404.14219, 2412.08905, 2503.01743): Llama's layers
with fused matrices, of whose heads perhaps only a part turns, LongRoPE, perhaps a window.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from typing import Any

from mtmd.kernels import ops
from mtmd.kernels.checkpoint.canonical import Parameter
from mtmd.kernels.checkpoint.rotary import Rotary, read_rotary, rope_settings, turning_dims
from mtmd.kernels.checkpoint.settings import MAX_HEADS, MAX_LAYERS, MAX_WIDTH, Settings
from mtmd.kernels.graph import Node, WeightSource
from mtmd.kernels.layers import Weights
from mtmd.kernels.plan.flash_choice import AttentionForm
from mtmd.llm.blocks import (
    attend,
    cache_keys_values,
    fused_queries_keys_values,
    fused_swiglu,
    logits,
    read_heads,
    token_embeddings,
)
from mtmd.llm.gguf_keys import GgufText, decoder_keys
from mtmd.llm.inputs import TextInputs
from mtmd.llm.parameters import COPIED_HEAD, decoder_parameters, prefixed
from mtmd.llm.state import KV

PREFIXES = ("model.", "language_model.model.", "model.language_model.")


@dataclass(frozen=True)
class Phi3Text:
    depth: int
    width: int
    ffn: int
    heads: int
    groups: int
    head: int
    vocabulary: int
    context: int
    eps: float
    rotary: Rotary
    window: int | None
    tied: bool
    adapted: bool = False
    """Whether its tensors lie beside those of adapters, which are in files of their own as well."""

    @property
    def unused(self) -> tuple[str, ...]:
        adapters = (r"model\.layers\..*\.lora_[AB]\..*",) if self.adapted else ()
        return (r".*\.rotary_emb\.inv_freq", *((COPIED_HEAD,) if self.tied else ()), *adapters)

    @property
    def layers(self) -> list[tuple[KV]]:
        return [(KV(self.groups, self.head),)] * self.depth

    @property
    def image_width(self) -> int:
        return self.width

    def parameters(self) -> Mapping[str, Parameter]:
        rows = self.heads * self.head
        layer = {
            "attn_norm": ("input_layernorm", (self.width,)),
            "attn_qkv": ("self_attn.qkv_proj", (rows + 2 * self.groups * self.head, self.width)),
            "attn_output": ("self_attn.o_proj", (self.width, rows)),
            "ffn_norm": ("post_attention_layernorm", (self.width,)),
            "ffn_up": ("mlp.gate_up_proj", (2 * self.ffn, self.width)),
            "ffn_down": ("mlp.down_proj", (self.width, self.ffn)),
        }
        parameters = decoder_parameters(
            prefixed(PREFIXES),
            [layer] * self.depth,
            vocabulary=self.vocabulary,
            width=self.width,
            tied=self.tied,
        )
        if self.adapted:
            return {name: _among_adapters(one) for name, one in parameters.items()}
        return parameters

    def graph(self, inputs: TextInputs, weights: WeightSource, attention: AttentionForm) -> Node:
        w, bounds = Weights(weights, inputs.dtype), inputs.bounds(self.window)
        angles, x = inputs.angles(self.rotary), token_embeddings(inputs, w)
        for layer in inputs.layers(self.depth):
            at = f"blk.{layer}"
            y = w.rms_norm(x, f"{at}.attn_norm", self.eps)
            q, k, v = fused_queries_keys_values(y, at, w, heads=self.heads, groups=self.groups)
            q = ops.rope(q, angles, name=f"{at}.attn_q.rope")
            k = ops.rope(k, angles, name=f"{at}.attn_k.rope")
            y = attend(q, cache_keys_values(k, v, layer, inputs), at, attention, bounds=bounds)
            x = ops.add(w.linear(y, f"{at}.attn_output"), x, name=f"{at}.attn_residual")
            y = fused_swiglu(w.rms_norm(x, f"{at}.ffn_norm", self.eps), at, w)
            x = ops.add(y, x, name=f"{at}.ffn_residual")
        return logits(x, inputs, w, eps=self.eps, tied=self.tied)


def _among_adapters(parameter: Parameter) -> Parameter:
    """Return a parameter that a file may also have as PEFT calls those that adapters change."""
    plain = parameter.sources
    changed = tuple(re.sub(r"\.(\w+)$", r".base_layer.\1", name) for name in plain)
    return replace(parameter, sources=(*plain, *changed))


def to_gguf(text: Phi3Text) -> GgufText:
    """Return the architecture and keys of a GGUF that says the same; a window of 0 is none."""
    keys = decoder_keys(text) | {
        "rope.dimension_count": 2 * len(text.rotary.frequencies),
        "attention.sliding_window": text.window or 0,
    }
    return GgufText("phi3", keys, text.rotary)


def from_gguf(keys: Settings, names: Collection[str]) -> dict[str, Any]:  # noqa: ARG001
    """Return what config.json would say beyond the common keys."""
    head = keys.get("attention.key_length", None) or keys.count("embedding_length") // keys.count(
        "attention.head_count"
    )
    return {
        "head_dim": head,
        "turning": keys.count("rope.dimension_count", head),
        "sliding_window": keys.get("attention.sliding_window", 0) or None,
    }


def read(c: Settings) -> Phi3Text:
    """Read it from config.json or its text_config, with transformers' defaults; ModelError where it
    cannot be followed.
    """
    c.choice("hidden_act", ("silu",), "silu")
    width = c.count("hidden_size", 3072, maximum=MAX_WIDTH)
    context = c.count("max_position_embeddings", 4096)
    equal = width // c.count("num_attention_heads", 32, maximum=MAX_HEADS)
    count, groups, head = read_heads(c, 32, None, equal)
    rope = rope_settings(c)
    share = rope.number("partial_rotary_factor", c.number("partial_rotary_factor", 1.0))
    turning = c.count("turning", turning_dims(head, share, c.where), maximum=head)
    if rope.get("rope_type", rope.get("type", None)) == "yarn":  # as the first files call it
        rope = Settings({**rope.values, "rope_type": "longrope"}, rope.where)
    window = c.get("sliding_window", None)
    return Phi3Text(
        depth=c.count("num_hidden_layers", 32, maximum=MAX_LAYERS),
        width=width,
        ffn=c.count("intermediate_size", 8192, maximum=MAX_WIDTH),
        heads=count,
        groups=groups,
        head=head,
        vocabulary=c.count("vocab_size", 32064),
        context=context,
        eps=c.number("rms_norm_eps", 1e-5),
        rotary=read_rotary(rope, turning, c.number("rope_theta", 1e4), context),
        window=None if window is None else c.count("sliding_window"),
        tied=c.flag("tie_word_embeddings", False),
        adapted=c.get("vision_lora", None) is not None,
    )
