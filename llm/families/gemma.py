"""Gemma (arXiv:2403.08295), Gemma 2 (arXiv:2408.00118) and Gemma 3 (arXiv:2503.19786): a GELU-gated
FFN; from the second on sliding and global layers, norms before and after, soft caps; in the third q
and k normed and a RoPE base for each kind of layer.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from mtmd.base.errors import ModelError
from mtmd.kernels import ops
from mtmd.kernels.checkpoint.canonical import Parameter, plus_one
from mtmd.kernels.checkpoint.rotary import Rotary, gguf_scaling, read_rotary, rope_settings
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
from mtmd.llm.layer_kinds import FULL, SLIDING, read_ropes
from mtmd.llm.parameters import (
    COPIED_HEAD,
    attention_tensors,
    decoder_parameters,
    mlp_tensors,
    prefixed,
)
from mtmd.llm.state import KV

KINDS = SLIDING, FULL
CAPS = ("final_logit_softcapping", "attn_logit_softcapping")
PREFIXES = ("language_model.model.", "model.language_model.", "text_decoder.model.", "model.")
# What transformers takes for keys that a config.json leaves out, by model_type; `every`: which of
# the layers are global.
FIRST: dict[str, Any] = {
    "layers": 28,
    "width": 3072,
    "ffn": 24576,
    "heads": (16, 16, 256),
    "vocabulary": 256000,
    "context": 8192,
    "every": 1,
    "softcap": None,
    "final_softcap": None,
}
SECOND = FIRST | {
    "layers": 26,
    "width": 2304,
    "ffn": 9216,
    "heads": (8, 4, 256),
    "every": 2,
    "softcap": 50.0,
    "final_softcap": 30.0,
}
THIRD = SECOND | {
    "vocabulary": 262208,
    "context": 131072,
    "every": 6,
    "softcap": None,
    "final_softcap": None,
}
DEFAULTS = {"gemma": FIRST, "gemma2": SECOND, "gemma3_text": THIRD}


@dataclass(frozen=True)
class GemmaText:
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
    norms_after: bool  # of what a block adds: in Gemma 2 and 3
    norms_heads: bool  # of queries and keys: in Gemma 3

    unused = (COPIED_HEAD,)

    @property
    def layers(self) -> list[tuple[KV]]:
        return [(KV(self.groups, self.head),)] * len(self.kinds)

    image_width = property(lambda self: self.width)

    def parameters(self) -> Mapping[str, Parameter]:
        wide = (self.width,)
        layer = {
            "attn_norm": ("input_layernorm", wide),
            **attention_tensors(self.width, self.heads, self.groups, self.head),
            **mlp_tensors(self.width, self.ffn),
        }
        if self.norms_after:
            layer |= {
                "post_attention_norm": ("post_attention_layernorm", wide),
                "ffn_norm": ("pre_feedforward_layernorm", wide),
                "post_ffw_norm": ("post_feedforward_layernorm", wide),
            }
        else:
            layer["ffn_norm"] = ("post_attention_layernorm", wide)
        if self.norms_heads:
            layer |= {
                f"attn_{part}_norm": (f"self_attn.{part}_norm", (self.head,)) for part in "qk"
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
        for layer, kind in inputs.each(self.kinds):
            at, angles = f"blk.{layer}", inputs.angles(self.ropes[kind], f"inp.angles.{kind}")
            y = w.rms_norm(x, f"{at}.attn_norm", self.eps)
            q, k, v = queries_keys_values(y, at, w, heads=self.heads, groups=self.groups)
            if self.norms_heads:
                q = normed_rope(q, f"{at}.attn_q", angles, w, eps=self.eps)
                k = normed_rope(k, f"{at}.attn_k", angles, w, eps=self.eps)
            else:
                q = ops.rope(q, angles, name=f"{at}.attn_q.rope")
                k = ops.rope(k, angles, name=f"{at}.attn_k.rope")
            window = self.window if kind == SLIDING else None
            y = attend(
                q,
                cache_keys_values(k, v, layer, inputs),
                at,
                attention,
                # A block is a prompt in the first two, seen beyond the window; a picture in Gemma 3
                bounds=inputs.bounds(window, whole=not self.norms_heads),
                scale=self.scale,
                softcap=self.softcap,
            )
            y = w.linear(y, f"{at}.attn_output")
            if self.norms_after:
                y = w.rms_norm(y, f"{at}.post_attention_norm", self.eps)
            x = ops.add(y, x, name=f"{at}.attn_residual")
            y = geglu(w.rms_norm(x, f"{at}.ffn_norm", self.eps), at, w)
            if self.norms_after:
                y = w.rms_norm(y, f"{at}.post_ffw_norm", self.eps)
            x = ops.add(y, x, name=f"{at}.ffn_residual")
        y = logits(x, inputs, w, eps=self.eps, tied=self.tied)
        cap = self.final_softcap
        return ops.softcap(y, cap=cap, name="logits.capped") if cap else y


def to_gguf(text: GemmaText) -> GgufText:
    """Return the architecture and keys of a GGUF that says the same."""
    keys = decoder_keys(text)
    if not text.norms_after:
        return GgufText("gemma", keys, text.ropes[FULL])
    keys["attention.sliding_window"] = text.window
    caps = zip(CAPS, (text.final_softcap, text.softcap), strict=True)
    keys |= {key: cap for key, cap in caps if cap is not None}
    if not text.norms_heads:
        return GgufText("gemma2", keys, text.ropes[FULL])
    keys |= {
        "rope.freq_base_swa": text.ropes[SLIDING].settings["rope_theta"],
        PATTERN: [kind == SLIDING for kind in text.kinds],
    }
    return GgufText("gemma3", keys, text.ropes[FULL])


def from_gguf(keys: Settings, names: Collection[str]) -> dict[str, Any]:
    """Return what config.json would say beyond the common keys."""
    if "blk.0.post_attention_norm.weight" not in names:
        return {"model_type": "gemma", "head_dim": keys.count("attention.key_length", 256)}
    third = "blk.0.attn_q_norm.weight" in names
    # As in llama.cpp: the 27B models, of so many layers, alone scale by their width per head; every
    # second or sixth layer is global unless the file says otherwise.
    large = keys.count("block_count") == (62 if third else 46)
    scalar = (
        keys.count("embedding_length") / keys.count("attention.head_count")
        if large
        else keys.count("attention.key_length", 256)
    )
    caps = ("final_logit_softcapping",) if third else CAPS
    config = {
        "query_pre_attn_scalar": scalar,
        "layer_types": [KINDS[not slides] for slides in sliding_layers(keys, 6 if third else 2)],
        **{key: keys.get(key, None) for key in caps if keys.get(key, None) is not None},
    }
    if not third:
        return {**config, "model_type": "gemma2"}
    ropes = {
        SLIDING: {"rope_type": "default", "rope_theta": keys.number("rope.freq_base_swa", 1e4)},
        FULL: {
            "rope_type": "default",
            "rope_theta": keys.number("rope.freq_base", 1e6),
            **(gguf_scaling(keys) or {}),
        },
    }
    return {**config, "model_type": "gemma3_text", "rope_parameters": ropes}


def read(c: Settings) -> GemmaText:
    """Read it from config.json or its text_config, with transformers' defaults for what published
    files leave out; ModelError where it is impossible.
    """
    kind = c.choice("model_type", DEFAULTS, "gemma3_text")
    known = DEFAULTS[kind]
    # Gemma's first files say the exact GELU, and mean its approximation, as transformers has it.
    c.choice("hidden_activation", ("gelu_pytorch_tanh",), "gelu_pytorch_tanh")
    if kind == "gemma":
        c.choice("hidden_act", ("gelu_pytorch_tanh", "gelu"), "gelu_pytorch_tanh")
    # A model that sees reads its prompt in both directions; one alone, its text in one.
    bidirectional = c.flag("use_bidirectional_attention", False)
    if bidirectional and (kind == "gemma3_text" or c.get("part_of", None) is None):
        raise ModelError(f"{c.where}: use_bidirectional_attention true is not supported")
    if c.flag("attention_bias", False):
        raise ModelError(f"{c.where}: attention_bias true is not supported")
    layers, (count, groups, head) = (
        c.count("num_hidden_layers", known["layers"], maximum=MAX_LAYERS),
        read_heads(c, *known["heads"]),
    )
    first, context = kind == "gemma", c.count("max_position_embeddings", known["context"])
    return GemmaText(
        width=c.count("hidden_size", known["width"], maximum=MAX_WIDTH),
        ffn=c.count("intermediate_size", known["ffn"], maximum=MAX_WIDTH),
        heads=count,
        groups=groups,
        head=head,
        vocabulary=c.count("vocab_size", known["vocabulary"]),
        context=context,
        eps=c.number("rms_norm_eps", 1e-6),
        scale=(head if first else c.number("query_pre_attn_scalar", 256)) ** -0.5,
        window=4096 if first else c.count("sliding_window", 4096),
        kinds=(FULL,) * layers if first else _kinds(c, layers, known["every"]),
        ropes=_ropes(c, head, context, kind == "gemma3_text"),
        softcap=_optional(c, CAPS[1], known["softcap"]),
        final_softcap=_optional(c, CAPS[0], known["final_softcap"]),
        tied=c.flag("tie_word_embeddings", True),
        norms_after=not first,
        norms_heads=kind == "gemma3_text",
    )


def _kinds(c: Settings, layers: int, every: int) -> tuple[str, ...]:
    every = c.count("sliding_window_pattern", c.count("_sliding_window_pattern", every))
    return read_layer_types(c, layers, KINDS, [KINDS[(i + 1) % every == 0] for i in range(layers)])


def _ropes(c: Settings, head: int, context: int, per_kind: bool) -> dict[str, Rotary]:
    """One `rope_parameters` for all, or, in Gemma 3, per kind."""
    if not per_kind:
        rotary = read_rotary(rope_settings(c), head, c.number("rope_theta", 1e4), context)
        return dict.fromkeys(KINDS, rotary)
    return read_ropes(c, head, context)


def _optional(c: Settings, key: str, default: float | None) -> float | None:
    """A number; a null is none where the key is there."""
    return None if c.values.get(key, default) is None else c.number(key, default)
