"""Gemma 3 (arXiv:2503.19786): sliding and global layers with a RoPE base each, norms before and
after, q and k normed, GELU-gated FFN.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from mtmd.kernels import ops
from mtmd.kernels.checkpoint.canonical import Parameter, plus_one
from mtmd.kernels.checkpoint.rotary import Rotary, read_rotary
from mtmd.kernels.checkpoint.settings import MAX_LAYERS, MAX_WIDTH, Settings
from mtmd.kernels.errors import ModelError
from mtmd.kernels.graph import Node, WeightSource
from mtmd.kernels.layers import Weights
from mtmd.kernels.plan.flash import AttentionForm
from mtmd.llm.blocks import heads, logits, read_heads, remember, token_embeddings
from mtmd.llm.engine.inputs import TextInputs
from mtmd.llm.engine.state import KV

KINDS = ("sliding_attention", "full_attention")


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

    unused = (r"(language_model\.)?lm_head\.weight",)  # a copy of the tied token table

    @property
    def layers(self) -> list[tuple[KV]]:
        return [(KV(self.groups, self.head),)] * len(self.kinds)

    image_width = property(lambda self: self.width)

    def parameters(self) -> Mapping[str, Parameter]:
        q, kv, width = self.heads * self.head, self.groups * self.head, self.width
        names: dict[str, tuple[str, tuple[int, ...]]] = {
            "attn_norm": ("input_layernorm", (width,)),
            "post_attention_norm": ("post_attention_layernorm", (width,)),
            "ffn_norm": ("pre_feedforward_layernorm", (width,)),
            "post_ffw_norm": ("post_feedforward_layernorm", (width,)),
            "attn_q": ("self_attn.q_proj", (q, width)),
            "attn_k": ("self_attn.k_proj", (kv, width)),
            "attn_v": ("self_attn.v_proj", (kv, width)),
            "attn_output": ("self_attn.o_proj", (width, q)),
            "attn_q_norm": ("self_attn.q_norm", (self.head,)),
            "attn_k_norm": ("self_attn.k_norm", (self.head,)),
            "ffn_gate": ("mlp.gate_proj", (self.ffn, width)),
            "ffn_up": ("mlp.up_proj", (self.ffn, width)),
            "ffn_down": ("mlp.down_proj", (width, self.ffn)),
        }
        found = {
            "token_embd.weight": _parameter("embed_tokens", (self.vocabulary, width)),
            "output_norm.weight": _parameter("norm", (width,)),
        }
        for layer in range(len(self.kinds)):
            found |= {
                f"blk.{layer}.{part}.weight": _parameter(f"layers.{layer}.{name}", shape)
                for part, (name, shape) in names.items()
            }
        return found

    def graph(self, inputs: TextInputs, weights: WeightSource, attention: AttentionForm) -> Node:
        w = Weights(weights, inputs.dtype)
        x = token_embeddings(inputs, w, self.width**0.5)
        for layer, kind in enumerate(self.kinds):
            x = self._layer(x, layer, kind, inputs, w, attention)
        found = logits(x, inputs, w, self.eps, tied=True)
        return (
            ops.softcap(found, cap=self.final_softcap, name="logits.capped")
            if self.final_softcap
            else found
        )

    def _layer(
        self,
        x: Node,
        layer: int,
        kind: str,
        inputs: TextInputs,
        w: Weights,
        attention: AttentionForm,
    ) -> Node:
        at, rows = f"blk.{layer}", x.shape[0]
        angles = inputs.angles(self.ropes[kind], f"inp.angles.{kind}")
        y = w.rms_norm(x, f"{at}.attn_norm", self.eps)
        q = heads(w.linear(y, f"{at}.attn_q"), self.heads, f"{at}.attn_q")
        k = heads(w.linear(y, f"{at}.attn_k"), self.groups, f"{at}.attn_k")
        v = heads(w.linear(y, f"{at}.attn_v"), self.groups, f"{at}.attn_v")
        q = ops.rope(w.rms_norm(q, f"{at}.attn_q_norm", self.eps), angles, name=f"{at}.attn_q.rope")
        k = ops.rope(w.rms_norm(k, f"{at}.attn_k_norm", self.eps), angles, name=f"{at}.attn_k.rope")
        keys, values = remember(k, v, layer, inputs)
        bounds = inputs.bounds(self.window if kind == "sliding_attention" else None)
        q = ops.reshape(q, shape=(1, rows, self.heads, self.head), name=f"{at}.attn_q.batch")
        mixed = attention(
            q, keys, values, None, bounds, scale=self.scale, softcap=self.softcap, name=f"{at}.attn"
        )
        y = w.linear(
            ops.reshape(mixed, shape=(rows, self.heads * self.head), name=f"{at}.attn.flat"),
            f"{at}.attn_output",
        )
        x = ops.add(
            w.rms_norm(y, f"{at}.post_attention_norm", self.eps), x, name=f"{at}.attn_residual"
        )
        y = w.rms_norm(x, f"{at}.ffn_norm", self.eps)
        gated = ops.gelu_mul(
            w.linear(y, f"{at}.ffn_gate"),
            w.linear(y, f"{at}.ffn_up"),
            approximate="tanh",
            name=f"{at}.ffn_gated",
        )
        y = w.rms_norm(w.linear(gated, f"{at}.ffn_down"), f"{at}.post_ffw_norm", self.eps)
        return ops.add(y, x, name=f"{at}.ffn_residual")


def from_gguf(keys: Settings, names: Collection[str]) -> dict[str, Any]:  # noqa: ARG001
    """What config.json would say beyond the common keys."""
    ropes = {
        "sliding_attention": {
            "rope_type": "default",
            "rope_theta": keys.number("rope.freq_base_swa", 1e4),
        },
        "full_attention": {
            "rope_type": "default",
            "rope_theta": keys.number("rope.freq_base", 1e6),
        },
    }
    if (factor := keys.get("rope.scaling.factor", None)) is not None:
        ropes["full_attention"] |= {"rope_type": "linear", "factor": factor}
    # As in llama.cpp: the 27B model, of 62 layers, alone scales by its width per head; every sixth
    # layer is global in all sizes.
    large = keys.count("block_count") == 62
    scalar = (
        keys.count("embedding_length") / keys.count("attention.head_count")
        if large
        else keys.count("attention.key_length", 256)
    )
    return {
        "rope_parameters": ropes,
        "query_pre_attn_scalar": scalar,
        "_sliding_window_pattern": 6,
        "final_logit_softcapping": keys.get("final_logit_softcapping", None),
        "tie_word_embeddings": True,
    }


def read(c: Settings) -> Gemma3Text:
    """From config.json's text_config, with transformers' defaults for what published files leave
    out; ModelError where it is impossible.
    """
    c.choice("hidden_activation", ("gelu_pytorch_tanh",), "gelu_pytorch_tanh")
    if not c.flag("tie_word_embeddings", True):
        raise ModelError(f"{c.where}: tie_word_embeddings false is not supported")
    for key in ("attention_bias", "use_bidirectional_attention"):
        if c.flag(key, False):
            raise ModelError(f"{c.where}: {key} true is not supported")
    layers, (count, groups, head) = (
        c.count("num_hidden_layers", 26, most=MAX_LAYERS),
        read_heads(c, 8, 4, 256),
    )
    return Gemma3Text(
        c.count("hidden_size", 2304, most=MAX_WIDTH),
        c.count("intermediate_size", 9216, most=MAX_WIDTH),
        count,
        groups,
        head,
        c.count("vocab_size", 262208),
        c.count("max_position_embeddings", 131072),
        c.number("rms_norm_eps", 1e-6),
        c.number("query_pre_attn_scalar", 256) ** -0.5,
        c.count("sliding_window", 4096),
        _kinds(c, layers),
        _ropes(c, head),
        _optional(c, "attn_logit_softcapping"),
        _optional(c, "final_logit_softcapping"),
    )


def _kinds(c: Settings, layers: int) -> tuple[str, ...]:
    every = c.count("sliding_window_pattern", c.count("_sliding_window_pattern", 6))
    kinds = c.get("layer_types", None) or [KINDS[(i + 1) % every == 0] for i in range(layers)]
    if not isinstance(kinds, list) or len(kinds) != layers or any(k not in KINDS for k in kinds):
        raise ModelError(
            f"{c.where}: layer_types has to name {layers} layers, each {' or '.join(KINDS)}"
        )
    return tuple(kinds)


def _ropes(c: Settings, head: int) -> dict[str, Rotary]:
    """One `rope_parameters` per kind (transformers 5), or `rope_theta`, `rope_local_base_freq` and
    a `rope_scaling` of global layers.
    """
    old = {
        "full_attention": ("rope_theta", 1e6, "rope_scaling"),
        "sliding_attention": ("rope_local_base_freq", 1e4, None),
    }
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


def _parameter(name: str, shape: tuple[int, ...]) -> Parameter:
    convert = plus_one if len(shape) == 1 else None
    prefixes = ("language_model.model.", "model.language_model.", "model.")
    return Parameter(shape, tuple(f"{prefix}{name}.weight" for prefix in prefixes), convert=convert)
