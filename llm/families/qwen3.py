"""Qwen3 (arXiv:2505.09388) and Qwen3-VL's decoder (arXiv:2511.21631): q and k normed, experts,
interleaved M-RoPE, deepstack.
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
    by_sections,
    cache_keys_values,
    deepstack,
    logits,
    moe_ffn,
    normed_rope,
    queries_keys_values,
    read_heads,
    swiglu,
    token_embeddings,
)
from mtmd.llm.experts import Experts, expert_parameters, read_experts
from mtmd.llm.gguf_keys import GgufText, decoder_keys, expert_keys
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

PREFIXES = (
    "model.language_model.",
    "model.",
    "language_model.model.",
    "thinker.model.",
    "llm.model.",
)
# What transformers takes for keys that a config.json leaves out, by model_type.
DENSE = {
    "hidden_size": 4096,
    "intermediate_size": 22016,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 32,
    "head_dim": 128,
    "vocab_size": 151936,
    "max_position_embeddings": 32768,
    "rope_theta": 1e4,
}
SPARSE = {
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "num_hidden_layers": 24,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "vocab_size": 151936,
    "max_position_embeddings": 32768,
    "rope_theta": 1e4,
    "num_experts": 128,
    "moe_intermediate_size": 768,
    "num_experts_per_tok": 8,
}
PICTURES = {
    "max_position_embeddings": 128000,
    "rope_theta": 5e5,
    "deepstack_visual_indexes": [8, 16, 24],
}
DEFAULTS: dict[str, dict[str, Any]] = {
    "qwen3": DENSE,
    "minicpmv": DENSE,
    "minicpmo": DENSE,
    "step_robotics_text": DENSE,
    "qwen3_asr_text": DENSE | {"max_position_embeddings": 128000, "rope_theta": 5e6},
    "qwen3_moe": SPARSE,
    "qwen3_vl_text": DENSE | PICTURES,
    "qwen3_vl_moe_text": SPARSE
    | PICTURES
    | {
        "intermediate_size": 5632,
        "num_attention_heads": 16,
        "num_key_value_heads": 16,
        "num_experts": 60,
        "moe_intermediate_size": 1408,
        "num_experts_per_tok": 4,
    },
    "qwen3_omni_moe_text": SPARSE
    | {
        "vocab_size": 3584,
        "intermediate_size": 18944,
        "num_hidden_layers": 28,
        "num_attention_heads": 28,
        "rope_theta": 1e6,
        "norm_topk_prob": True,
        "deepstack_visual_indexes": [8, 16, 24],
    },
}


@dataclass(frozen=True)
class Qwen3Text:
    width: int
    ffn: int
    heads: int
    groups: int
    head: int
    depth: int
    vocabulary: int
    context: int
    eps: float
    rotary: Rotary
    bias: bool
    tied: bool
    stacked: int  # of the first layers, that get image features of their own
    experts: Experts | None
    turned: bool  # whether checkpoints may hold experts transposed

    @property
    def unused(self) -> tuple[str, ...]:
        return (COPIED_HEAD,) if self.tied else ()

    @property
    def layers(self) -> list[tuple[KV]]:
        return [(KV(self.groups, self.head),)] * self.depth

    @property
    def image_width(self) -> int:
        return self.width * (1 + self.stacked)

    def parameters(self) -> Mapping[str, Parameter]:
        norm = (self.head,)
        attention = {
            "attn_norm": ("input_layernorm", (self.width,)),
            **attention_tensors(self.width, self.heads, self.groups, self.head),
            "attn_q_norm": ("self_attn.q_norm", norm),
            "attn_k_norm": ("self_attn.k_norm", norm),
            "ffn_norm": ("post_attention_layernorm", (self.width,)),
        }
        dense, sparse = mlp_tensors(self.width, self.ffn), self.experts.at if self.experts else ()
        parameters = decoder_parameters(
            prefixed(PREFIXES),
            [attention if i in sparse else {**attention, **dense} for i in range(self.depth)],
            vocabulary=self.vocabulary,
            width=self.width,
            tied=self.tied,
            biased=ATTENTION * self.bias,
        )
        for layer in sparse:
            assert self.experts
            parameters |= expert_parameters(
                f"blk.{layer}",
                prefixed(PREFIXES)(f"layers.{layer}.mlp."),
                self.experts,
                self.width,
                turned=self.turned,
            )
        return parameters

    def graph(self, inputs: TextInputs, weights: WeightSource, attention: AttentionForm) -> Node:
        w, experts = Weights(weights, inputs.dtype), self.experts
        angles, bounds = inputs.angles(self.rotary), inputs.bounds()
        x = token_embeddings(inputs, w)
        for layer in inputs.layers(self.depth):
            at = f"blk.{layer}"
            y = w.rms_norm(x, f"{at}.attn_norm", self.eps)
            q, k, v = queries_keys_values(
                y, at, w, heads=self.heads, groups=self.groups, bias=self.bias
            )
            q = normed_rope(q, f"{at}.attn_q", angles, w, eps=self.eps)
            k = normed_rope(k, f"{at}.attn_k", angles, w, eps=self.eps)
            y = attend(q, cache_keys_values(k, v, layer, inputs), at, attention, bounds=bounds)
            y = w.linear(y, f"{at}.attn_output", bias=self.bias)
            x = ops.add(y, x, name=f"{at}.attn_residual")
            y = w.rms_norm(x, f"{at}.ffn_norm", self.eps)
            y = moe_ffn(y, at, w, experts) if experts and layer in experts.at else swiglu(y, at, w)
            x = ops.add(y, x, name=f"{at}.ffn_residual")
            if layer < self.stacked:
                x = deepstack(x, layer + 1, at, inputs)
        return logits(x, inputs, w, eps=self.eps, tied=self.tied)


def to_gguf(text: Qwen3Text) -> GgufText:
    """Return the architecture and keys of a GGUF that says the same."""
    keys, pictured = decoder_keys(text), bool(text.rotary.axes)
    keys |= expert_keys(text.experts)
    if pictured:
        keys["n_deepstack_layers"] = text.stacked
    architecture = f"qwen3{'vl' * pictured}{'moe' * (text.experts is not None)}"
    refused = "biases of attention" if text.bias else ""
    if text.experts and len(text.experts.at) < text.depth:
        refused = "layers without experts among those with"
    return GgufText(architecture, keys, text.rotary, refused=refused)


def from_gguf(keys: Settings, names: Collection[str]) -> dict[str, Any]:
    """Return what config.json would say beyond the common keys."""
    layers, parts = (
        keys.count("block_count", maximum=MAX_LAYERS),
        keys.get("rope.dimension_sections", None),
    )
    stacked = (
        keys.count("n_deepstack_layers", maximum=MAX_LAYERS)
        if keys.get("n_deepstack_layers", 0)
        else 0
    )
    head = keys.get("attention.key_length", None) or keys.count("embedding_length") // keys.count(
        "attention.head_count"
    )
    return {
        "head_dim": head,
        "attention_bias": "blk.0.attn_q.bias" in names,
        "norm_topk_prob": True,
        "rope_parameters": {"mrope_section": parts[:3]} if isinstance(parts, (list, tuple)) else {},
        "deepstack_visual_indexes": list(range(stacked)),
        "mlp_only_layers": [
            i for i in range(layers) if f"blk.{i}.ffn_gate_inp.weight" not in names
        ],
    }


def read(given: Settings) -> Qwen3Text:
    """Read it from config.json or its text_config; ModelError where a value cannot be followed."""
    kind = given.choice("model_type", DEFAULTS, "qwen3")
    c = Settings(
        {
            **DEFAULTS[kind],
            **{key: value for key, value in given.values.items() if value is not None},
        },
        given.where,
    )
    c.choice("hidden_act", ("silu",), "silu")
    if c.flag("use_sliding_window", False):
        raise ModelError(f"{c.where}: use_sliding_window true is not supported")
    (count, groups, head), depth, pictured = (
        read_heads(c, 32, None, None),
        c.count("num_hidden_layers", maximum=MAX_LAYERS),
        "_vl" in kind or "_omni" in kind,
    )
    stacked: object = c.get("deepstack_visual_indexes", [])
    if not isinstance(stacked, list) or len(stacked) > depth:
        raise ModelError(
            f"{c.where}: deepstack_visual_indexes is {stacked!r:.40}, expected a list of at most "
            f"{depth}"
        )
    experts = (
        read_experts(c, depth, True if "_vl" in kind else None) if c.get("num_experts", 0) else None
    )
    return Qwen3Text(
        width=c.count("hidden_size", maximum=MAX_WIDTH),
        ffn=c.count("intermediate_size", maximum=MAX_WIDTH),
        heads=count,
        groups=groups,
        head=head,
        depth=depth,
        vocabulary=c.count("vocab_size"),
        context=c.count("max_position_embeddings"),
        eps=c.number("rms_norm_eps", 1e-6),
        rotary=_rotary(c, head, pictured),
        bias=c.flag("attention_bias", False),
        tied=c.flag("tie_word_embeddings", False),
        stacked=len(stacked),
        experts=experts,
        turned=pictured,
    )


def _rotary(c: Settings, head: int, pictured: bool) -> Rotary:
    """`rope_parameters` (transformers 5), or `rope_theta` and `rope_scaling`; sections are
    interleaved, whatever the settings say.
    """
    rope = rope_settings(c)
    rotary = read_rotary(rope, head, c.number("rope_theta"), c.count("max_position_embeddings"))
    return by_sections(rotary, rope, head, [24, 20, 20] if pictured else None, interleaved=True)
