"""Gemma 3 (arXiv:2503.19786): sliding and global layers with a RoPE base each, norms before and
after, q and k normed, GELU-gated FFN.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from mtmd.base.errors import ModelError
from mtmd.kernels import ops
from mtmd.kernels.checkpoint.canonical import Parameter, plus_one
from mtmd.kernels.checkpoint.rotary import Rotary, gguf_scaling, read_rotary
from mtmd.kernels.checkpoint.settings import MAX_LAYERS, MAX_WIDTH, Settings
from mtmd.kernels.graph import Node, WeightSource
from mtmd.kernels.layers import Weights
from mtmd.kernels.plan.flash_choice import AttentionForm
from mtmd.llm.blocks import (
    attend,
    cache_keys_values,
    geglu,
    logits,
    normed_rope,
    queries_keys_values,
    read_heads,
    read_layer_types,
    token_embeddings,
)
from mtmd.llm.gguf_keys import PATTERN, GgufText, decoder_keys, sliding_layers
from mtmd.llm.inputs import TextInputs
from mtmd.llm.parameters import (
    COPIED_HEAD,
    attention_tensors,
    decoder_parameters,
    mlp_tensors,
    prefixed,
)
from mtmd.llm.state import KV

KINDS = SLIDING, FULL = ("sliding_attention", "full_attention")
PREFIXES = ("language_model.model.", "model.language_model.", "model.")


@dataclass(frozen=True)
class Gemma3Text:
    width: int
    ffn: int
    heads: int
    groups: int
    head: int
    vocabulary: int
    context: int
    eps: float
    scale: float
    window: int
    kinds: tuple[str, ...]
    ropes: Mapping[str, Rotary]
    softcap: float | None
    final_softcap: float | None
    tied: bool

    unused = (COPIED_HEAD,)

    @property
    def layers(self) -> list[tuple[KV]]:
        return [(KV(self.groups, self.head),)] * len(self.kinds)

    image_width = property(lambda self: self.width)

    def parameters(self) -> Mapping[str, Parameter]:
        norm = (self.head,)
        layer = {
            "attn_norm": ("input_layernorm", (self.width,)),
            **attention_tensors(self.width, self.heads, self.groups, self.head),
            "attn_q_norm": ("self_attn.q_norm", norm),
            "attn_k_norm": ("self_attn.k_norm", norm),
            "post_attention_norm": ("post_attention_layernorm", (self.width,)),
            "ffn_norm": ("pre_feedforward_layernorm", (self.width,)),
            **mlp_tensors(self.width, self.ffn),
            "post_ffw_norm": ("post_feedforward_layernorm", (self.width,)),
        }
        return decoder_parameters(
            prefixed(PREFIXES),
            [layer] * len(self.kinds),
            vocabulary=self.vocabulary,
            width=self.width,
            tied=self.tied,
            norms=plus_one,
        )

    def graph(self, inputs: TextInputs, weights: WeightSource, attention: AttentionForm) -> Node:
        w = Weights(weights, inputs.dtype)
        x = token_embeddings(inputs, w, self.width**0.5)
        for layer, kind in enumerate(self.kinds):
            at, angles = f"blk.{layer}", inputs.angles(self.ropes[kind], f"inp.angles.{kind}")
            y = w.rms_norm(x, f"{at}.attn_norm", self.eps)
            q, k, v = queries_keys_values(y, at, w, heads=self.heads, groups=self.groups)
            q = normed_rope(q, f"{at}.attn_q", angles, w, eps=self.eps)
            k = normed_rope(k, f"{at}.attn_k", angles, w, eps=self.eps)
            y = attend(
                q,
                cache_keys_values(k, v, layer, inputs),
                at,
                attention,
                bounds=inputs.bounds(self.window if kind == SLIDING else None),
                scale=self.scale,
                softcap=self.softcap,
            )
            y = w.rms_norm(w.linear(y, f"{at}.attn_output"), f"{at}.post_attention_norm", self.eps)
            x = ops.add(y, x, name=f"{at}.attn_residual")
            y = geglu(w.rms_norm(x, f"{at}.ffn_norm", self.eps), at, w)
            y = w.rms_norm(y, f"{at}.post_ffw_norm", self.eps)
            x = ops.add(y, x, name=f"{at}.ffn_residual")
        y = logits(x, inputs, w, eps=self.eps, tied=self.tied)
        cap = self.final_softcap
        return ops.softcap(y, cap=cap, name="logits.capped") if cap else y


def to_gguf(text: Gemma3Text) -> GgufText:
    """Return the architecture and keys of a GGUF that says the same."""
    keys = decoder_keys(text) | {
        "rope.freq_base_swa": text.ropes[SLIDING].settings["rope_theta"],
        "attention.sliding_window": text.window,
        PATTERN: [kind == SLIDING for kind in text.kinds],
    }
    if text.final_softcap is not None:
        keys["final_logit_softcapping"] = text.final_softcap
    return GgufText("gemma3", keys, text.ropes[FULL])


def from_gguf(keys: Settings, names: Collection[str]) -> dict[str, Any]:  # noqa: ARG001
    """Return what config.json would say beyond the common keys."""
    ropes = {
        SLIDING: {"rope_type": "default", "rope_theta": keys.number("rope.freq_base_swa", 1e4)},
        FULL: {
            "rope_type": "default",
            "rope_theta": keys.number("rope.freq_base", 1e6),
            **(gguf_scaling(keys) or {}),
        },
    }
    # As in llama.cpp: the 27B model, of 62 layers, alone scales by its width per head; every sixth
    # layer is global unless the file says otherwise.
    large = keys.count("block_count") == 62
    scalar = (
        keys.count("embedding_length") / keys.count("attention.head_count")
        if large
        else keys.count("attention.key_length", 256)
    )
    return {
        "rope_parameters": ropes,
        "query_pre_attn_scalar": scalar,
        "layer_types": [KINDS[not slides] for slides in sliding_layers(keys, 6)],
        "final_logit_softcapping": keys.get("final_logit_softcapping", None),
    }


def read(c: Settings) -> Gemma3Text:
    """Read it from config.json's text_config, with transformers' defaults for what published files
    leave out; ModelError where it is impossible.
    """
    c.choice("hidden_activation", ("gelu_pytorch_tanh",), "gelu_pytorch_tanh")
    for key in ("attention_bias", "use_bidirectional_attention"):
        if c.flag(key, False):
            raise ModelError(f"{c.where}: {key} true is not supported")
    layers, (count, groups, head) = (
        c.count("num_hidden_layers", 26, maximum=MAX_LAYERS),
        read_heads(c, 8, 4, 256),
    )
    return Gemma3Text(
        width=c.count("hidden_size", 2304, maximum=MAX_WIDTH),
        ffn=c.count("intermediate_size", 9216, maximum=MAX_WIDTH),
        heads=count,
        groups=groups,
        head=head,
        vocabulary=c.count("vocab_size", 262208),
        context=c.count("max_position_embeddings", 131072),
        eps=c.number("rms_norm_eps", 1e-6),
        scale=c.number("query_pre_attn_scalar", 256) ** -0.5,
        window=c.count("sliding_window", 4096),
        kinds=_kinds(c, layers),
        ropes=_ropes(c, head),
        softcap=_optional(c, "attn_logit_softcapping"),
        final_softcap=_optional(c, "final_logit_softcapping"),
        tied=c.flag("tie_word_embeddings", True),
    )


def _kinds(c: Settings, layers: int) -> tuple[str, ...]:
    every = c.count("sliding_window_pattern", c.count("_sliding_window_pattern", 6))
    return read_layer_types(c, layers, KINDS, [KINDS[(i + 1) % every == 0] for i in range(layers)])


def _ropes(c: Settings, head: int) -> dict[str, Rotary]:
    """One `rope_parameters` per kind (transformers 5), or `rope_theta`, `rope_local_base_freq` and
    a `rope_scaling` of global layers.
    """
    old = {FULL: ("rope_theta", 1e6, "rope_scaling"), SLIDING: ("rope_local_base_freq", 1e4, None)}
    ropes = {}
    for kind, (key, default, scaling) in old.items():
        new = c.part("rope_parameters").part(kind)
        part = new if new.values or scaling is None else c.part(scaling)
        ropes[kind] = read_rotary(
            part,
            head,
            new.number("rope_theta", c.number(key, default)),
            c.count("max_position_embeddings", 131072),
        )
    return ropes


def _optional(c: Settings, key: str) -> float | None:
    return None if c.get(key, None) is None else c.number(key)
