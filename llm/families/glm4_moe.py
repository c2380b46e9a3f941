"""GLM-4.5 and GLM-4.5V's text: grouped attention of which half of each head turns, experts with
groups, a correction bias and a shared one behind the first layers (arXiv:2508.06471,
arXiv:2507.01006).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from mtmd.base.errors import ModelError
from mtmd.kernels import ops
from mtmd.kernels.checkpoint.canonical import Parameter
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
    queries_keys_values,
    read_heads,
    swiglu,
    token_embeddings,
)
from mtmd.llm.experts import ExpertNames, Experts, expert_parameters, read_grouped_experts
from mtmd.llm.gguf_keys import GgufText, decoder_keys, routing_keys
from mtmd.llm.inputs import TextInputs
from mtmd.llm.parameters import (
    COPIED_HEAD,
    QKV,
    attention_tensors,
    decoder_parameters,
    mlp_tensors,
    prefixed,
)
from mtmd.llm.state import KV

PREFIXES = ("model.language_model.", "language_model.model.", "model.")
SEEING = "glm4v_moe_text"
SECTIONS = [8, 12, 12]  # where a config.json of a model that sees has none
# What transformers takes for keys that a config.json leaves out, by model_type.
COMMON: dict[str, Any] = {
    "hidden_size": 4096,
    "intermediate_size": 10944,
    "num_hidden_layers": 46,
    "num_attention_heads": 96,
    "num_key_value_heads": 8,
    "moe_intermediate_size": 1408,
    "num_experts_per_tok": 8,
    "n_shared_experts": 1,
    "n_routed_experts": 128,
    "first_k_dense_replace": 1,
    "norm_topk_prob": True,
    "partial_rotary_factor": 0.5,
}
DEFAULTS: dict[str, dict[str, Any]] = {
    "glm4_moe": COMMON | {"vocab_size": 151552, "max_position_embeddings": 131072},
    SEEING: COMMON
    | {"vocab_size": 151424, "max_position_embeddings": 65536, "attention_bias": True},
}


@dataclass(frozen=True)
class Glm4MoeText:
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
    normed: bool  # queries and keys
    tied: bool
    experts: Experts | None

    image_width = property(lambda self: self.width)

    @property
    def unused(self) -> tuple[str, ...]:
        """Layers that draft, too."""
        ahead = rf"((model\.)?(language_model\.)?(model\.)?layers|blk)\.{self.depth}\..*"
        return (ahead, COPIED_HEAD) if self.tied else (ahead,)

    @property
    def layers(self) -> list[tuple[KV]]:
        return [(KV(self.groups, self.head),)] * self.depth

    def parameters(self) -> Mapping[str, Parameter]:
        norm = (self.head,)
        layer = {
            "attn_norm": ("input_layernorm", (self.width,)),
            **attention_tensors(self.width, self.heads, self.groups, self.head),
            "post_attention_norm": ("post_attention_layernorm", (self.width,)),
        }
        if self.normed:
            layer["attn_q_norm"] = ("self_attn.q_norm", norm)
            layer["attn_k_norm"] = ("self_attn.k_norm", norm)
        dense, sparse = mlp_tensors(self.width, self.ffn), self.experts.at if self.experts else ()
        parameters = decoder_parameters(
            prefixed(PREFIXES),
            [layer if i in sparse else {**layer, **dense} for i in range(self.depth)],
            vocabulary=self.vocabulary,
            width=self.width,
            tied=self.tied,
            biased=QKV * self.bias,
        )
        for i in sparse:
            assert self.experts
            prefixes = prefixed(PREFIXES)(f"layers.{i}.mlp.")
            names = ExpertNames(shared="shared_experts")
            parameters |= expert_parameters(
                f"blk.{i}", prefixes, self.experts, self.width, names=names
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
            if self.normed:
                q = normed_rope(q, f"{at}.attn_q", angles, w, eps=self.eps)
                k = normed_rope(k, f"{at}.attn_k", angles, w, eps=self.eps)
            else:
                q = ops.rope(q, angles, name=f"{at}.attn_q.rope")
                k = ops.rope(k, angles, name=f"{at}.attn_k.rope")
            y = attend(q, cache_keys_values(k, v, layer, inputs), at, attention, bounds=bounds)
            x = ops.add(w.linear(y, f"{at}.attn_output"), x, name=f"{at}.attn_residual")
            y = w.rms_norm(x, f"{at}.post_attention_norm", self.eps)
            y = moe_ffn(y, at, w, experts) if experts and layer in experts.at else swiglu(y, at, w)
            x = ops.add(y, x, name=f"{at}.ffn_residual")
        return logits(x, inputs, w, eps=self.eps, tied=self.tied)


def to_gguf(text: Glm4MoeText) -> GgufText:
    """Return the architecture and keys of a GGUF that says the same."""
    keys = decoder_keys(text) | routing_keys(text.experts, text.depth)
    keys["rope.dimension_count"] = 2 * len(text.rotary.frequencies)
    refused = "" if text.experts else "decoder without experts"
    return GgufText("glm4moe", keys, text.rotary, refused=refused)


def from_gguf(keys: Settings, names: Collection[str]) -> dict[str, Any]:
    """Return what config.json would say beyond the common keys. Models that see have sections of
    rotary positions.
    """
    parts = keys.get("rope.dimension_sections", None)
    ahead = keys.get("nextn_predict_layers", 0) and keys.count("nextn_predict_layers")
    sections = {"mrope_section": parts[:3]} if isinstance(parts, (list, tuple)) else {}
    head = keys.count("attention.key_length", keys.count("rope.dimension_count") * 2)
    return {
        "model_type": SEEING if sections else "glm4_moe",
        "num_hidden_layers": keys.count("block_count", maximum=MAX_LAYERS) - ahead,
        "head_dim": head,
        "attention_bias": "blk.0.attn_q.bias" in names,
        "use_qk_norm": "blk.0.attn_q_norm.weight" in names,
        "norm_topk_prob": keys.get("expert_weights_norm", False),
        "rope_parameters": {
            "partial_rotary_factor": keys.count("rope.dimension_count") / head,
            **sections,
        },
    }


def read(given: Settings) -> Glm4MoeText:
    """Read it from config.json or its text_config, with transformers' defaults; ModelError where a
    value cannot be followed.
    """
    kind = given.choice("model_type", DEFAULTS, SEEING)
    values = {key: value for key, value in given.values.items() if value is not None}
    c = Settings({**DEFAULTS[kind], **values}, given.where)
    c.choice("hidden_act", ("silu",), "silu")
    c.choice("scoring_func", ("sigmoid",), "sigmoid")
    (count, groups, head), depth = (
        read_heads(c, 96, 8, None),
        c.count("num_hidden_layers", maximum=MAX_LAYERS),
    )
    context, rope = c.count("max_position_embeddings"), rope_settings(c)
    share = rope.number("partial_rotary_factor", c.number("partial_rotary_factor"))
    dims = turning_dims(head, share, c.where)
    rotary = read_rotary(rope, dims, c.number("rope_theta", 1e4), context)
    if kind == SEEING:
        rotary = by_sections(rotary, rope, dims, SECTIONS, interleaved=False)
    elif rope.get("mrope_section", None) is not None:
        raise ModelError(f"{c.where}: mrope_section of a model without eyes is not supported")
    return Glm4MoeText(
        width=c.count("hidden_size", maximum=MAX_WIDTH),
        ffn=c.count("intermediate_size", maximum=MAX_WIDTH),
        heads=count,
        groups=groups,
        head=head,
        depth=depth,
        vocabulary=c.count("vocab_size"),
        context=context,
        eps=c.number("rms_norm_eps", 1e-5),
        rotary=rotary,
        bias=c.flag("attention_bias", False),
        normed=c.flag("use_qk_norm", False),
        tied=c.flag("tie_word_embeddings", False),
        experts=read_grouped_experts(c, depth, score="sigmoid", biased=True),
    )
