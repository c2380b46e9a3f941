"""The decoder of DeepSeek-OCR (arXiv:2510.18234), DeepSeek-OCR-2 and Unlimited-OCR: DeepSeek-V2's
experts (arXiv:2405.04434) with plain heads of attention. An answer of Unlimited-OCR sees all of its
prompt, and of itself the last tokens alone. Aria's (arXiv:2410.05993) has experts in every layer.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
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
    moe_ffn,
    queries_keys_values,
    read_heads,
    read_layer_types,
    swiglu,
    token_embeddings,
)
from mtmd.llm.experts import ExpertNames, Experts, expert_parameters, read_grouped_experts
from mtmd.llm.gguf_keys import GgufText, decoder_keys, routing_keys
from mtmd.llm.inputs import TextInputs
from mtmd.llm.parameters import (
    COPIED_HEAD,
    attention_tensors,
    decoder_parameters,
    mlp_tensors,
    prefixed,
)
from mtmd.llm.state import KV

PREFIXES = ("model.", "model.language_model.", "language_model.model.", "language_model.")
NAMES = ExpertNames(shared="shared_experts")
ARIA = "aria_text"
ARIA_NAMES = replace(
    NAMES, router="router", turned=True, fused=("experts.fc1.weight", "experts.fc2.weight")
)
SLIDING, FULL = "reference_sliding_attention", "full_attention"
PUBLISHED = {
    "vocab_size": 129280,
    "hidden_size": 1280,
    "intermediate_size": 6848,
    "num_hidden_layers": 12,
    "num_attention_heads": 10,
    "num_key_value_heads": 10,
    "max_position_embeddings": 32768,
    "moe_intermediate_size": 896,
    "n_routed_experts": 64,
    "n_shared_experts": 2,
    "num_experts_per_tok": 6,
    "first_k_dense_replace": 1,
}
# What transformers takes for keys that a config.json leaves out, by model_type.
DEFAULTS: dict[str, dict[str, Any]] = {
    "deepseek_vl_v2_text": PUBLISHED | {"max_position_embeddings": 8192},
    "unlimited_ocr_text": PUBLISHED | {"sliding_window": 128},
    "deepseek_ocr2_text": PUBLISHED
    | {
        "vocab_size": 102400,
        "hidden_size": 4096,
        "intermediate_size": 11008,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 32,
        "max_position_embeddings": 2048,
        "moe_intermediate_size": 1407,
        "first_k_dense_replace": 0,
    },
    ARIA: {
        "vocab_size": 32000,
        "hidden_size": 4096,
        "intermediate_size": 4096,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "max_position_embeddings": 2048,
        "moe_num_experts": 8,
        "moe_topk": 2,
        "moe_num_shared_experts": 2,
        "first_k_dense_replace": 0,
        "norm_topk_prob": True,
    },
}
# Aria's names of settings
SAME = {
    "n_routed_experts": "moe_num_experts",
    "num_experts_per_tok": "moe_topk",
    "n_shared_experts": "moe_num_shared_experts",
    "moe_intermediate_size": "intermediate_size",
}


@dataclass(frozen=True)
class DeepseekOcrText:
    """`window`: the tokens of an answer that its next one sees, None for all. `turned`: checkpoints
    hold experts transposed.
    """

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
    tied: bool
    experts: Experts | None
    window: int | None
    turned: bool = False

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
        attention = {
            "attn_norm": ("input_layernorm", (self.width,)),
            **attention_tensors(self.width, self.heads, self.groups, self.head),
            "ffn_norm": ("post_attention_layernorm", (self.width,)),
        }
        dense, sparse = mlp_tensors(self.width, self.ffn), self.experts.at if self.experts else ()
        parameters = decoder_parameters(
            prefixed(PREFIXES),
            [attention if i in sparse else {**attention, **dense} for i in range(self.depth)],
            vocabulary=self.vocabulary,
            width=self.width,
            tied=self.tied,
        )
        for layer in sparse:
            assert self.experts
            sources = prefixed(PREFIXES)(f"layers.{layer}.mlp.")
            names = ARIA_NAMES if self.turned else NAMES
            parameters |= expert_parameters(
                f"blk.{layer}", sources, self.experts, self.width, names=names
            )
        return parameters

    def graph(self, inputs: TextInputs, weights: WeightSource, attention: AttentionForm) -> Node:
        w = Weights(weights, inputs.dtype)
        angles, bounds = inputs.angles(self.rotary), inputs.bounds()
        hidden = None if self.window is None else inputs.hidden(self.window)
        x = token_embeddings(inputs, w)
        for layer in inputs.layers(self.depth):
            at = f"blk.{layer}"
            y = w.rms_norm(x, f"{at}.attn_norm", self.eps)
            q, k, v = queries_keys_values(y, at, w, heads=self.heads, groups=self.groups)
            q, k = (ops.rope(part, angles, name=f"{part.name}.rope") for part in (q, k))
            cached = cache_keys_values(k, v, layer, inputs)
            y = attend(q, cached, at, attention, bounds=bounds, mask=hidden)
            x = ops.add(w.linear(y, f"{at}.attn_output"), x, name=f"{at}.attn_residual")
            y = w.rms_norm(x, f"{at}.ffn_norm", self.eps)
            if self.experts and layer in self.experts.at:
                y = moe_ffn(y, at, w, self.experts)
            else:
                y = swiglu(y, at, w)
            x = ops.add(y, x, name=f"{at}.ffn_residual")
        return logits(x, inputs, w, eps=self.eps, tied=self.tied)


def to_gguf(text: DeepseekOcrText) -> GgufText:
    """Return the architecture and keys of a GGUF that says the same."""
    keys = decoder_keys(text) | routing_keys(text.experts, text.depth)
    keys |= {"expert_group_count": 1, "expert_group_used_count": 1}
    keys["rope.dimension_count"] = 0  # llama.cpp turns whole heads then, and so its files say
    if text.window is not None:
        keys["attention.sliding_window"] = text.window
    refused = "decoder without experts" if text.experts is None else ""
    if text.turned:
        refused = "experts whose weights are divided by their sum"
    return GgufText("deepseek2-ocr", keys, text.rotary, refused=refused)


def from_gguf(keys: Settings, names: Collection[str]) -> dict[str, Any]:  # noqa: ARG001
    """Return what config.json would say beyond the common keys."""
    windowed = keys.get("attention.sliding_window", None) is not None
    return {
        "model_type": "unlimited_ocr_text" if windowed else "deepseek_ocr2_text",
        "n_routed_experts": keys.get("expert_count", None),
        "n_shared_experts": keys.get("expert_shared_count", None),
        "first_k_dense_replace": keys.get("leading_dense_block_count", None),
        "routed_scaling_factor": keys.get("expert_weights_scale", None),
        "norm_topk_prob": keys.get("expert_weights_norm", None),
        "n_group": keys.get("expert_group_count", None),
    }


def read(given: Settings) -> DeepseekOcrText:
    """Read it from config.json or its text_config; ModelError where a value cannot be followed."""
    kind = given.choice("model_type", DEFAULTS, "deepseek_vl_v2_text")
    values = {key: value for key, value in given.values.items() if value is not None}
    c = Settings({**DEFAULTS[kind], **values}, given.where)
    if kind == ARIA:
        same = {ours: c.values[theirs] for ours, theirs in SAME.items()}
        c = Settings({**c.values, **same}, c.where)
    c.choice("hidden_act", ("silu",), "silu")
    for key in ("attention_bias", "mlp_bias", "use_mla"):
        c.choice(key, (False,), False)
    c.choice("topk_method", ("greedy",), "greedy")
    c.choice("n_group", (1,), 1)
    depth = c.count("num_hidden_layers", maximum=MAX_LAYERS)
    c = Settings({**c.values, "first_k_dense_replace": _dense(c, depth)}, c.where)
    heads, groups, head = read_heads(c, 32, None, None)
    context = c.count("max_position_embeddings")
    return DeepseekOcrText(
        width=c.count("hidden_size", maximum=MAX_WIDTH),
        ffn=c.count("intermediate_size", maximum=MAX_WIDTH),
        heads=heads,
        groups=groups,
        head=head,
        depth=depth,
        vocabulary=c.count("vocab_size"),
        context=context,
        eps=c.number("rms_norm_eps", 1e-6),
        rotary=read_rotary(rope_settings(c), head, c.number("rope_theta", 1e4), context),
        tied=c.flag("tie_word_embeddings", False),
        experts=read_grouped_experts(c, depth, score="softmax"),
        window=_window(c, depth) if kind == "unlimited_ocr_text" else None,
        turned=kind == ARIA,
    )


def _dense(c: Settings, depth: int) -> int:
    """Return how many of the first layers have no experts. Raises ModelError where others have
    none.
    """
    kinds = c.get("mlp_layer_types", None)
    if kinds is None:
        return c.get("first_k_dense_replace", 0)
    if (
        not isinstance(kinds, list)
        or len(kinds) != depth
        or kinds != ["dense"] * kinds.count("dense") + ["sparse"] * kinds.count("sparse")
    ):
        raise ModelError(
            f"{c.where}: mlp_layer_types is {kinds!r:.60}, expected {depth} layers, first those "
            "that are dense, then those that are sparse"
        )
    return kinds.count("dense")


def _window(c: Settings, depth: int) -> int | None:
    kinds = set(read_layer_types(c, depth, (SLIDING, FULL), [SLIDING] * depth))
    if len(kinds) > 1:
        raise ModelError(f"{c.where}: layer_types are of two kinds, expected one")
    return c.count("sliding_window") if kinds == {SLIDING} else None
