"""Qwen3 (arXiv:2505.09388) and Qwen3-VL's decoder (arXiv:2511.21631): q and k normed, experts,
interleaved M-RoPE, deepstack.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from mtmd.kernels import ops
from mtmd.kernels.checkpoint.canonical import Parameter
from mtmd.kernels.checkpoint.rotary import Rotary, read_rotary
from mtmd.kernels.checkpoint.settings import MAX_LAYERS, MAX_WIDTH, Settings
from mtmd.kernels.errors import ModelError
from mtmd.kernels.graph import Node, WeightSource
from mtmd.kernels.layers import Weights
from mtmd.kernels.plan.flash import AttentionForm
from mtmd.llm.blocks import (
    by_sections,
    deepstack,
    heads,
    logits,
    moe_ffn,
    read_heads,
    remember,
    swiglu,
    token_embeddings,
)
from mtmd.llm.engine.inputs import TextInputs
from mtmd.llm.engine.state import KV
from mtmd.llm.experts import Experts, expert_parameters, read_experts

PREFIXES = ("model.language_model.", "model.")
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
        return (r"lm_head\.weight",) if self.tied else ()  # a copy of the token table

    @property
    def layers(self) -> list[tuple[KV]]:
        return [(KV(self.groups, self.head),)] * self.depth

    @property
    def image_width(self) -> int:
        return self.width * (1 + self.stacked)

    def parameters(self) -> Mapping[str, Parameter]:
        q, kv, width = self.heads * self.head, self.groups * self.head, self.width
        found = {
            "token_embd.weight": _parameter("embed_tokens.weight", (self.vocabulary, width)),
            "output_norm.weight": _parameter("norm.weight", (width,)),
        }
        if not self.tied:
            found["output.weight"] = Parameter((self.vocabulary, width), ("lm_head.weight",))
        shapes: dict[str, tuple[str, tuple[int, ...]]] = {
            "attn_norm": ("input_layernorm", (width,)),
            "ffn_norm": ("post_attention_layernorm", (width,)),
            "attn_q_norm": ("self_attn.q_norm", (self.head,)),
            "attn_k_norm": ("self_attn.k_norm", (self.head,)),
            "attn_q": ("self_attn.q_proj", (q, width)),
            "attn_k": ("self_attn.k_proj", (kv, width)),
            "attn_v": ("self_attn.v_proj", (kv, width)),
            "attn_output": ("self_attn.o_proj", (width, q)),
        }
        dense = {
            "ffn_gate": ("mlp.gate_proj", (self.ffn, width)),
            "ffn_up": ("mlp.up_proj", (self.ffn, width)),
            "ffn_down": ("mlp.down_proj", (width, self.ffn)),
        }
        for layer in range(self.depth):
            at, source, sparse = (
                f"blk.{layer}",
                f"layers.{layer}.",
                self.experts and layer in self.experts.at,
            )
            for part, (name, shape) in (shapes if sparse else shapes | dense).items():
                found[f"{at}.{part}.weight"] = _parameter(f"{source}{name}.weight", shape)
                if self.bias and name.endswith("_proj") and part.startswith("attn"):
                    found[f"{at}.{part}.bias"] = _parameter(f"{source}{name}.bias", shape[:1])
            if self.experts and sparse:
                mlps = tuple(f"{prefix}{source}mlp." for prefix in PREFIXES)
                found |= expert_parameters(at, mlps, self.experts, width, turned=self.turned)
        return found

    def graph(self, inputs: TextInputs, weights: WeightSource, attention: AttentionForm) -> Node:
        w = Weights(weights, inputs.dtype)
        x = token_embeddings(inputs, w)
        for layer in range(self.depth):
            x = deepstack(self._layer(x, layer, inputs, w, attention), layer, inputs)
        return logits(x, inputs, w, self.eps, self.tied)

    def _layer(
        self, x: Node, layer: int, inputs: TextInputs, w: Weights, attention: AttentionForm
    ) -> Node:
        at, rows, angles = f"blk.{layer}", x.shape[0], inputs.angles(self.rotary)
        y = w.rms_norm(x, f"{at}.attn_norm", self.eps)
        q, k, v = (
            heads(w.linear(y, f"{at}.{part}", bias=self.bias), count, f"{at}.{part}")
            for part, count in (
                ("attn_q", self.heads),
                ("attn_k", self.groups),
                ("attn_v", self.groups),
            )
        )
        q = ops.rope(w.rms_norm(q, f"{at}.attn_q_norm", self.eps), angles, name=f"{at}.attn_q.rope")
        k = ops.rope(w.rms_norm(k, f"{at}.attn_k_norm", self.eps), angles, name=f"{at}.attn_k.rope")
        keys, values = remember(k, v, layer, inputs)
        q = ops.reshape(q, shape=(1, rows, self.heads, self.head), name=f"{at}.attn_q.batch")
        mixed = attention(
            q, keys, values, None, inputs.bounds(), scale=self.head**-0.5, name=f"{at}.attn"
        )
        mixed = ops.reshape(mixed, shape=(rows, self.heads * self.head), name=f"{at}.attn.flat")
        x = ops.add(
            w.linear(mixed, f"{at}.attn_output", bias=self.bias), x, name=f"{at}.attn_residual"
        )
        y, e = w.rms_norm(x, f"{at}.ffn_norm", self.eps), self.experts
        y = (
            moe_ffn(y, at, w, top_k=e.top_k, normalize=e.normalize)
            if e and layer in e.at
            else swiglu(y, at, w)
        )
        return ops.add(y, x, name=f"{at}.ffn_residual")


def from_gguf(keys: Settings, names: Collection[str]) -> dict[str, Any]:
    """What config.json would say beyond the common keys."""
    layers, parts = (
        keys.count("block_count", most=MAX_LAYERS),
        keys.get("rope.dimension_sections", None),
    )
    stacked = (
        keys.count("n_deepstack_layers", most=MAX_LAYERS)
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
    """From config.json or its text_config; ModelError where a value cannot be followed."""
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
    heads_of, depth, pictured = (
        read_heads(c, 32, None, None),
        c.count("num_hidden_layers", most=MAX_LAYERS),
        "_vl" in kind,
    )
    stacked: object = c.get("deepstack_visual_indexes", [])
    if not isinstance(stacked, list) or len(stacked) > depth:
        raise ModelError(
            f"{c.where}: deepstack_visual_indexes is {stacked!r:.40}, expected a list of at most "
            f"{depth}"
        )
    experts = (
        read_experts(c, depth, True if pictured else None) if c.get("num_experts", 0) else None
    )
    return Qwen3Text(
        c.count("hidden_size", most=MAX_WIDTH),
        c.count("intermediate_size", most=MAX_WIDTH),
        *heads_of,
        depth,
        c.count("vocab_size"),
        c.count("max_position_embeddings"),
        c.number("rms_norm_eps", 1e-6),
        _rotary(c, heads_of[2], pictured),
        c.flag("attention_bias", False),
        c.flag("tie_word_embeddings", False),
        len(stacked),
        experts,
        pictured,
    )


def _rotary(c: Settings, head: int, pictured: bool) -> Rotary:
    """`rope_parameters` (transformers 5), or `rope_theta` and `rope_scaling`; sections are
    interleaved, whatever the settings say.
    """
    rope = Settings(
        {**c.part("rope_scaling").values, **c.part("rope_parameters").values},
        f"{c.where}: rope_parameters",
    )
    found = read_rotary(rope, head, c.number("rope_theta"), c.count("max_position_embeddings"))
    return by_sections(found, rope, head, [24, 20, 20] if pictured else None, interleaved=True)


def _parameter(name: str, shape: tuple[int, ...]) -> Parameter:
    return Parameter(shape, tuple(f"{prefix}{name}" for prefix in PREFIXES))
