"""Qwen3-Next and the decoder of Qwen3.5: three gated delta nets (arXiv:2412.06464) to one layer of
gated attention (arXiv:2505.06708), and SwiGLU or experts with a shared one.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

from mtmd.base.errors import ModelError
from mtmd.kernels import ops
from mtmd.kernels.checkpoint.canonical import Parameter, Stored, plus_one
from mtmd.kernels.checkpoint.rotary import Rotary, read_rotary, rope_settings, turning_dims
from mtmd.kernels.checkpoint.settings import MAX_LAYERS, MAX_WIDTH, Settings
from mtmd.kernels.graph import Node, WeightSource
from mtmd.kernels.layers import Weights
from mtmd.kernels.plan.flash_choice import AttentionForm
from mtmd.llm.blocks import (
    attend,
    by_sections,
    cache_keys_values,
    logits,
    moe_ffn,
    normed_rope,
    read_heads,
    split_heads,
    swiglu,
    token_embeddings,
)
from mtmd.llm.experts import Experts, expert_parameters, read_experts
from mtmd.llm.families.qwen3_next.delta_net import (
    FULL,
    LINEAR,
    MLX,
    DeltaNet,
    gguf_delta_net,
    read_delta_net,
    read_kinds,
)
from mtmd.llm.gguf_keys import GgufText, decoder_keys, expert_keys
from mtmd.llm.inputs import TextInputs
from mtmd.llm.parameters import (
    COPIED_HEAD,
    Tensors,
    attention_tensors,
    decoder_parameters,
    mlp_tensors,
    prefixed,
)
from mtmd.llm.state import KV, State

PREFIXES = ("model.language_model.", "model.", MLX)
# What transformers takes for keys that a config.json leaves out, by model_type.
COMMON: dict[str, Any] = {
    "num_attention_heads": 16,
    "num_key_value_heads": 2,
    "head_dim": 256,
    "max_position_embeddings": 32768,
    "hidden_size": 2048,
    "intermediate_size": 5632,
    "vocab_size": 248320,
}
EXPERTS = {
    "moe_intermediate_size": 512,
    "shared_expert_intermediate_size": 512,
    "norm_topk_prob": True,
}
DEFAULTS = {
    "qwen3_next": COMMON
    | EXPERTS
    | {
        "num_hidden_layers": 48,
        "vocab_size": 151936,
        "num_experts": 512,
        "num_experts_per_tok": 10,
    },
    "qwen3_5_text": COMMON
    | {
        "num_hidden_layers": 32,
        "hidden_size": 4096,
        "intermediate_size": 12288,
        "num_key_value_heads": 4,
    },
    "qwen3_5_moe_text": COMMON
    | EXPERTS
    | {"num_hidden_layers": 40, "num_experts": 256, "num_experts_per_tok": 8},
}


@dataclass(frozen=True)
class Qwen3NextText:
    kinds: tuple[str, ...]
    width: int
    ffn: int
    heads: int
    groups: int
    head: int
    delta: DeltaNet
    experts: Experts | None
    vocabulary: int
    context: int
    eps: float
    rotary: Rotary
    tied: bool
    ahead: int  # layers behind the last that predict further tokens, in GGUF files

    image_width = property(lambda self: self.width)

    @property
    def unused(self) -> tuple[str, ...]:
        ahead = (
            r"(model\.)?(language_model\.)?mtp\..*",
            *(rf"blk\.{len(self.kinds) + i}\..*" for i in range(self.ahead)),
        )
        return (*ahead, COPIED_HEAD) if self.tied else ahead

    @property
    def layers(self) -> list[tuple[State, ...]]:
        return [
            self.delta.states if kind == LINEAR else (KV(self.groups, self.head),)
            for kind in self.kinds
        ]

    def parameters(self) -> Mapping[str, Parameter]:
        source, width, norm, experts = prefixed(PREFIXES), self.width, (self.head,), self.experts
        norms: Tensors = {
            "attn_norm": ("input_layernorm", (width,)),
            "post_attention_norm": ("post_attention_layernorm", (width,)),
        }
        full: Tensors = {
            **attention_tensors(width, self.heads, self.groups, self.head),
            "attn_q": ("self_attn.q_proj", (2 * self.heads * self.head, width)),  # and gates
            "attn_q_norm": ("self_attn.q_norm", norm),
            "attn_k_norm": ("self_attn.k_norm", norm),
        }
        dense, sparse = mlp_tensors(width, self.ffn), experts.at if experts else ()
        layers = [
            {**norms, **(full if kind == FULL else {}), **({} if layer in sparse else dense)}
            for layer, kind in enumerate(self.kinds)
        ]
        parameters = decoder_parameters(
            source, layers, vocabulary=self.vocabulary, width=width, tied=self.tied, norms=plus_one
        )
        parameters = {name: _norm_of_mlx(one) for name, one in parameters.items()}
        for layer, kind in enumerate(self.kinds):
            at, theirs = f"blk.{layer}", f"layers.{layer}."
            if kind == LINEAR:
                parameters |= self.delta.parameters(at, source(f"{theirs}linear_attn."), width)
            if experts and layer in sparse:
                parameters |= expert_parameters(at, source(f"{theirs}mlp."), experts, width)
        return parameters

    def graph(self, inputs: TextInputs, weights: WeightSource, attention: AttentionForm) -> Node:
        w = Weights(weights, inputs.dtype)
        x = token_embeddings(inputs, w)
        for layer, kind in inputs.each(self.kinds):
            at, e = f"blk.{layer}", self.experts
            y = w.rms_norm(x, f"{at}.attn_norm", self.eps)
            y = (
                self._attention(y, layer, inputs, w, attention=attention)
                if kind == FULL
                else self.delta.graph(y, layer, inputs, w, eps=self.eps)
            )
            x = ops.add(y, x, name=f"{at}.attn_residual")
            y = w.rms_norm(x, f"{at}.post_attention_norm", self.eps)
            y = moe_ffn(y, at, w, e) if e and layer in e.at else swiglu(y, at, w)
            x = ops.add(y, x, name=f"{at}.ffn_residual")
        return logits(x, inputs, w, eps=self.eps, tied=self.tied)

    def _attention(
        self, x: Node, layer: int, inputs: TextInputs, w: Weights, *, attention: AttentionForm
    ) -> Node:
        """Attention whose result is let through by a gate; each head has its query and, behind
        it, its gate

        [T, D] -> [T, D]
        """
        at, angles, turns = f"blk.{layer}", inputs.angles(self.rotary), torch.arange(2 * self.heads)
        both = split_heads(w.linear(x, f"{at}.attn_q"), 2 * self.heads, f"{at}.attn_q")
        q = ops.take_rows(both, inputs.constant("inp.queries", turns[::2]), name=f"{at}.queries")
        gate = ops.take_rows(both, inputs.constant("inp.gates", turns[1::2]), name=f"{at}.gates")
        k, v = (
            split_heads(w.linear(x, f"{at}.attn_{part}"), self.groups, f"{at}.attn_{part}")
            for part in "kv"
        )
        q = normed_rope(q, f"{at}.attn_q", angles, w, eps=self.eps)
        k = normed_rope(k, f"{at}.attn_k", angles, w, eps=self.eps)
        keys_values = cache_keys_values(k, v, layer, inputs)
        mixed = attend(q, keys_values, at, attention, bounds=inputs.bounds())
        gate = ops.sigmoid(
            ops.reshape(gate, shape=mixed.shape, name=f"{at}.gates.flat"),
            name=f"{at}.gates.sigmoid",
        )
        return w.linear(ops.mul(mixed, gate, name=f"{at}.attn.gated"), f"{at}.attn_output")


def to_gguf(text: Qwen3NextText) -> GgufText:
    """Return the architecture and keys of a GGUF that says the same."""
    delta = text.delta
    keys = (
        decoder_keys(text)
        | expert_keys(text.experts)
        | {
            "ssm.conv_kernel": delta.taps,
            "ssm.state_size": delta.key,
            "ssm.group_count": delta.groups,
            "ssm.time_step_rank": delta.heads,
            "ssm.inner_size": delta.heads * delta.value,
            "attention.recurrent_layers": [kind == LINEAR for kind in text.kinds],
            "rope.dimension_count": 2 * len(text.rotary.frequencies),
        }
    )
    if LINEAR in text.kinds and (FULL in text.kinds):
        keys["full_attention_interval"] = text.kinds.index(FULL) + 1
    moe = "moe" if text.experts else ""
    refused = "" if delta.key == delta.value else "heads of keys that differ from those of values"
    architecture = f"qwen35{moe}" if text.rotary.axes else "qwen3next"
    return GgufText(architecture, keys, text.rotary, refused=refused)


def from_gguf(keys: Settings, names: Collection[str]) -> dict[str, Any]:
    """Return what config.json would say beyond the common keys. Qwen3-Next alone has no sections of
    rotary positions.
    """
    layers, parts = (
        keys.count("block_count", maximum=MAX_LAYERS),
        keys.get("rope.dimension_sections", None),
    )
    ahead = (
        keys.count("nextn_predict_layers", maximum=layers)
        if keys.get("nextn_predict_layers", 0)
        else 0
    )
    kind = (
        "qwen3_next"
        if parts is None
        else "qwen3_5_moe_text"
        if keys.get("expert_count", 0)
        else "qwen3_5_text"
    )
    return {
        "model_type": kind,
        "num_hidden_layers": layers - ahead,
        "mtp_num_hidden_layers": ahead,
        **gguf_delta_net(keys, layers - ahead),
        "shared_expert_intermediate_size": keys.get("expert_shared_feed_forward_length", None),
        "rope_parameters": {"mrope_section": parts[:3]} if isinstance(parts, (list, tuple)) else {},
        "partial_rotary_factor": keys.count("rope.dimension_count")
        / keys.count("attention.key_length"),
        "mlp_only_layers": [
            i for i in range(layers) if f"blk.{i}.ffn_gate_inp.weight" not in names
        ],
    }


def _norm_of_mlx(norm: Parameter) -> Parameter:
    """A parameter that MLX has as it is applied, where other files leave 1 out."""
    if norm.convert is not plus_one:
        return norm
    mlx = [name for name in norm.sources if name.startswith(MLX)]
    others = tuple(Stored((name,), norm.shape) for name in mlx)
    return replace(norm, sources=tuple(n for n in norm.sources if n not in mlx), others=others)


def read(given: Settings) -> Qwen3NextText:
    """Read it from config.json or its text_config, with transformers' defaults; ModelError where a
    value cannot be followed.
    """
    kind = given.choice("model_type", DEFAULTS, "qwen3_5_text")
    c, later = (
        Settings(
            {**DEFAULTS[kind], **{k: v for k, v in given.values.items() if v is not None}},
            given.where,
        ),
        kind != "qwen3_next",
    )
    c.choice("hidden_act", ("silu",), "silu")
    if c.flag("attention_bias", False):
        raise ModelError(f"{c.where}: attention_bias true is not supported")
    kinds, (count, groups, head) = read_kinds(c), read_heads(c, 16, None, None)
    return Qwen3NextText(
        kinds=kinds,
        width=c.count("hidden_size", maximum=MAX_WIDTH),
        ffn=c.count("intermediate_size", maximum=MAX_WIDTH),
        heads=count,
        groups=groups,
        head=head,
        delta=read_delta_net(c, tiled=later),
        experts=read_experts(c, len(kinds), True if later else None)
        if c.get("num_experts", 0)
        else None,
        vocabulary=c.count("vocab_size"),
        context=c.count("max_position_embeddings"),
        eps=c.number("rms_norm_eps", 1e-6),
        rotary=_rotary(c, head, later),
        tied=c.flag("tie_word_embeddings", False),
        ahead=c.count("mtp_num_hidden_layers", maximum=MAX_LAYERS)
        if c.get("mtp_num_hidden_layers", 0)
        else 0,
    )


def _rotary(c: Settings, head: int, pictured: bool) -> Rotary:
    """`rope_parameters` (transformers 5), or `rope_theta`, `rope_scaling` and the part of a head
    that turns. Sections are interleaved.
    """
    rope = rope_settings(c)
    share = rope.number("partial_rotary_factor", c.number("partial_rotary_factor", 0.25))
    dims = turning_dims(head, share, c.where)
    rotary = read_rotary(
        rope, dims, c.number("rope_theta", 1e4), c.count("max_position_embeddings")
    )
    return by_sections(rotary, rope, dims, [11, 11, 10], interleaved=True) if pictured else rotary
