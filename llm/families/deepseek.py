"""DeepSeek-V2 and -V3 (arXiv:2405.04434, arXiv:2412.19437), and the models that are made like
them: Kimi K2 and its eyes' decoders (arXiv:2507.20534), Mistral Small 4.

Multi-head latent attention: of each token one vector c of R values is cached, of which every head's
keys and values are products, and one rotated key for all heads. Scores of a head's key W_k c are
those of its query W_k^T q with c itself, and a sum of its values is W_v times the sum of c: so all
heads attend to the cached vectors, as to one group whose keys are its values.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from torch import Tensor

from mtmd.kernels import ops
from mtmd.kernels.checkpoint.canonical import Parameter, Stored
from mtmd.kernels.checkpoint.rotary import Rotary, gguf_scaling, read_rotary, rope_settings
from mtmd.kernels.checkpoint.settings import MAX_HEADS, MAX_LAYERS, MAX_WIDTH, Settings
from mtmd.kernels.graph import Node, Shape, WeightSource
from mtmd.kernels.layers import Weights
from mtmd.kernels.plan.flash_choice import AttentionForm
from mtmd.llm.blocks import (
    attend,
    cache_keys_values,
    logits,
    moe_ffn,
    split_heads,
    swiglu,
    token_embeddings,
)
from mtmd.llm.experts import ExpertNames, Experts, expert_parameters, read_grouped_experts
from mtmd.llm.gguf_keys import GgufText, decoder_keys, routing_keys
from mtmd.llm.inputs import TextInputs
from mtmd.llm.parameters import COPIED_HEAD, Tensors, decoder_parameters, mlp_tensors, prefixed
from mtmd.llm.state import KV

PREFIXES = ("model.", "language_model.model.", "model.language_model.", "language_model.")
NAMES = ExpertNames(shared="shared_experts")
BIASED = ("attn_q_a", "attn_kv_a_mqa", "attn_output")
V2, V3, MISTRAL = "deepseek_v2", "deepseek_v3", "mistral4"
ALIASES = {"kimi_k2": V3}
# A GGUF of this architecture has a tenth of mscale_all_dim as its logarithmic multiplier.
MULTIPLIER = 0.1
COMMON: dict[str, Any] = {"qk_rope_head_dim": 64, "v_head_dim": 128, "tie_word_embeddings": False}
# What transformers takes for keys that a config.json leaves out, by model_type.
DEFAULTS: dict[str, dict[str, Any]] = {
    V2: COMMON
    | {
        "vocab_size": 102400,
        "hidden_size": 4096,
        "intermediate_size": 11008,
        "moe_intermediate_size": 1407,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "n_routed_experts": 64,
        "n_shared_experts": 2,
        "first_k_dense_replace": 0,
        "kv_lora_rank": 512,
        "q_lora_rank": 1536,
        "qk_nope_head_dim": 128,
        "max_position_embeddings": 2048,
        "topk_method": "greedy",
    },
    V3: COMMON
    | {
        "vocab_size": 129280,
        "hidden_size": 7168,
        "intermediate_size": 18432,
        "moe_intermediate_size": 2048,
        "num_hidden_layers": 61,
        "num_attention_heads": 128,
        "n_routed_experts": 256,
        "n_shared_experts": 1,
        "num_experts_per_tok": 8,
        "first_k_dense_replace": 3,
        "n_group": 8,
        "topk_group": 4,
        "norm_topk_prob": True,
        "routed_scaling_factor": 2.5,
        "kv_lora_rank": 512,
        "q_lora_rank": 1536,
        "qk_nope_head_dim": 128,
        "max_position_embeddings": 4096,
    },
    MISTRAL: COMMON
    | {
        "vocab_size": 131072,
        "hidden_size": 4096,
        "intermediate_size": 12288,
        "moe_intermediate_size": 2048,
        "num_hidden_layers": 36,
        "num_attention_heads": 32,
        "n_routed_experts": 128,
        "n_shared_experts": 1,
        "num_experts_per_tok": 4,
        "first_k_dense_replace": 0,
        "norm_topk_prob": True,
        "kv_lora_rank": 256,
        "q_lora_rank": 1024,
        "qk_nope_head_dim": 64,
        "max_position_embeddings": 1048576,
    },
}
BETA = 0.1  # of Mistral's, where nothing says it
ROPE = {  # of Mistral's, where a config.json has none
    "rope_type": "yarn",
    "factor": 128.0,
    "original_max_position_embeddings": 8192,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
}


@dataclass(frozen=True)
class DeepseekText:
    """H heads whose keys have `plain` values made of the latent vector and `turning` ones that
    rotate, whose values have `value`; queries made of `query_rank` values, None for the width.
    Scores are multiplied by `scale`. `temper`: beta and period by which queries grow with their
    position.
    """

    width: int
    ffn: int
    heads: int
    query_rank: int | None
    rank: int
    plain: int
    turning: int
    value: int
    depth: int
    vocabulary: int
    context: int
    eps: float
    rotary: Rotary
    pairs: str
    scale: float
    temper: tuple[float, float] | None
    bias: bool
    tied: bool
    experts: Experts | None

    image_width = property(lambda self: self.width)
    groups = 1

    @property
    def head(self) -> int:
        """Values of a token that are cached."""
        return self.rank + self.turning

    @property
    def unused(self) -> tuple[str, ...]:
        """Frequencies, and layers that draft, too."""
        layers = r"((model\.)?(language_model\.)?(model\.)?layers|blk)"
        ahead = rf"{layers}\.{self.depth}\..*", rf"{layers}\.\d+\.self_attn\.rotary_emb\.inv_freq"
        return (*ahead, COPIED_HEAD) if self.tied else ahead

    @property
    def layers(self) -> list[tuple[KV]]:
        return [(KV(self.groups, self.head, values=False),)] * self.depth

    def parameters(self) -> Mapping[str, Parameter]:
        sparse = self.experts.at if self.experts else ()
        dense = mlp_tensors(self.width, self.ffn)
        attention = self._attention()
        parameters = decoder_parameters(
            prefixed(PREFIXES),
            [attention if i in sparse else {**attention, **dense} for i in range(self.depth)],
            vocabulary=self.vocabulary,
            width=self.width,
            tied=self.tied,
            biased=BIASED * self.bias,
        )
        for layer in range(self.depth):
            parameters |= self._by_heads(layer)
        for layer in sparse:
            assert self.experts
            sources = prefixed(PREFIXES)(f"layers.{layer}.mlp.")
            parameters |= expert_parameters(
                f"blk.{layer}", sources, self.experts, self.width, names=NAMES
            )
        return parameters

    def _attention(self) -> Tensors:
        queries = self.heads * (self.plain + self.turning)
        if self.query_rank is None:
            of_queries: Tensors = {"attn_q": ("self_attn.q_proj", (queries, self.width))}
        else:
            of_queries = {
                "attn_q_a": ("self_attn.q_a_proj", (self.query_rank, self.width)),
                "attn_q_a_norm": ("self_attn.q_a_layernorm", (self.query_rank,)),
                "attn_q_b": ("self_attn.q_b_proj", (queries, self.query_rank)),
            }
        return {
            "attn_norm": ("input_layernorm", (self.width,)),
            **of_queries,
            "attn_kv_a_mqa": ("self_attn.kv_a_proj_with_mqa", (self.head, self.width)),
            "attn_kv_a_norm": ("self_attn.kv_a_layernorm", (self.rank,)),
            "attn_output": ("self_attn.o_proj", (self.width, self.heads * self.value)),
            "ffn_norm": ("post_attention_layernorm", (self.width,)),
        }

    def _by_heads(self, layer: int) -> dict[str, Parameter]:
        """The matrices of each head, which checkpoints and old GGUF files have in one."""
        both = (self.heads * (self.plain + self.value), self.rank)
        sources = prefixed(PREFIXES)(f"layers.{layer}.self_attn.kv_b_proj.weight")
        result = {}
        for part, shape, convert in (
            ("attn_k_b", (self.rank, self.plain), partial(_keys, self.heads, self.plain)),
            ("attn_v_b", (self.value, self.rank), partial(_values, self.heads, self.plain)),
        ):
            name, rows = f"blk.{layer}.{part}.weight", part == "attn_v_b"
            whole: Shape = (self.heads, *shape)
            old = Stored((f"blk.{layer}.attn_kv_b.weight",), both, convert, picks_rows=rows)
            result[name] = Parameter(
                whole,
                sources,
                stored=both,
                convert=convert,
                picks_rows=rows,
                gguf=(Stored((name,), whole), old),
            )
        return result

    def graph(self, inputs: TextInputs, weights: WeightSource, attention: AttentionForm) -> Node:
        w = Weights(weights, inputs.dtype)
        angles, bounds = inputs.angles(self.rotary), inputs.bounds()
        temper = inputs.growth(self.temper)
        x = token_embeddings(inputs, w)
        for layer in inputs.layers(self.depth):
            at = f"blk.{layer}"
            y = w.rms_norm(x, f"{at}.attn_norm", self.eps)
            q = self._queries(y, at, w, angles)
            if temper is not None:
                q = ops.mul(q, temper, name=f"{at}.attn_q.tempered")
            cached = cache_keys_values(self._latent(y, at, w, angles), None, layer, inputs)
            y = attend(q, cached, at, attention, bounds=bounds, scale=self.scale)
            y = w.linear(self._mixed(y, at, w), f"{at}.attn_output", bias=self.bias)
            x = ops.add(y, x, name=f"{at}.attn_residual")
            y = w.rms_norm(x, f"{at}.ffn_norm", self.eps)
            if self.experts and layer in self.experts.at:
                y = moe_ffn(y, at, w, self.experts)
            else:
                y = swiglu(y, at, w)
            x = ops.add(y, x, name=f"{at}.ffn_residual")
        return logits(x, inputs, w, eps=self.eps, tied=self.tied)

    def _queries(self, x: Node, at: str, w: Weights, angles: Node) -> Node:
        """Queries to latent vectors, and behind them those that rotate  [T, D] -> [T, H, R + K]"""
        if self.query_rank is None:
            q = w.linear(x, f"{at}.attn_q")
        else:
            a = w.linear(x, f"{at}.attn_q_a", bias=self.bias)
            q = w.linear(w.rms_norm(a, f"{at}.attn_q_a_norm", self.eps), f"{at}.attn_q_b")
        q = split_heads(q, self.heads, f"{at}.attn_q")
        size = self.plain + self.turning
        plain = ops.columns(q, start=0, stop=self.plain, name=f"{at}.attn_q.plain")
        turning = ops.columns(q, start=self.plain, stop=size, name=f"{at}.attn_q.turning")
        turned = ops.rope(turning, angles, pairs=self.pairs, name=f"{at}.attn_q.rope")
        plain = w.heads(plain, f"{at}.attn_k_b", name=f"{at}.attn_q.latent")
        return ops.concat(plain, turned, axis=2, name=f"{at}.attn_q.joined")

    def _latent(self, x: Node, at: str, w: Weights, angles: Node) -> Node:
        """The latent vector of each token, and behind it the key that rotates

        [T, D] -> [T, 1, R + K]
        """
        both = w.linear(x, f"{at}.attn_kv_a_mqa", bias=self.bias)
        c = ops.columns(both, start=0, stop=self.rank, name=f"{at}.attn_kv.latent")
        c = split_heads(w.rms_norm(c, f"{at}.attn_kv_a_norm", self.eps), 1, f"{at}.attn_kv")
        turning = ops.columns(both, start=self.rank, stop=self.head, name=f"{at}.attn_k.turning")
        turning = split_heads(turning, 1, f"{at}.attn_k")
        turned = ops.rope(turning, angles, pairs=self.pairs, name=f"{at}.attn_k.rope")
        return ops.concat(c, turned, axis=2, name=f"{at}.attn_kv.joined")

    def _mixed(self, x: Node, at: str, w: Weights) -> Node:
        """Sums of what is cached to sums of values          [T, H * (R + K)] -> [T, H * V]"""
        mixed = split_heads(x, self.heads, f"{at}.attn.mixed")
        c = ops.columns(mixed, start=0, stop=self.rank, name=f"{at}.attn.latent")
        values = w.heads(c, f"{at}.attn_v_b")
        shape = (x.shape[0], self.heads * self.value)
        return ops.reshape(values, shape=shape, name=f"{at}.attn_v_b.flat")


def _keys(heads: int, plain: int, both: Tensor) -> Tensor:
    """[H * (N + V), R] -> [H, R, N]"""
    by_head: Tensor = both.unflatten(0, (heads, -1))
    return by_head[:, :plain].transpose(1, 2)


def _values(heads: int, plain: int, both: Tensor) -> Tensor:
    """[H * (N + V), R] -> [H, V, R]"""
    by_head: Tensor = both.unflatten(0, (heads, -1))
    return by_head[:, plain:]


def to_gguf(text: DeepseekText) -> GgufText:
    """Return the architecture and keys of a GGUF that says the same."""
    architecture = "deepseek2" if text.temper is None else "mistral4"
    groups = {"expert_group_count": 1, "expert_group_used_count": 1}
    keys: dict[str, Any] = groups if text.experts else {}
    keys |= decoder_keys(text) | routing_keys(text.experts, text.depth)
    keys |= {
        "attention.value_length": text.rank,
        "attention.key_length_mla": text.plain + text.turning,
        "attention.value_length_mla": text.value,
        "attention.kv_lora_rank": text.rank,
        "rope.dimension_count": text.turning,
    }
    if text.query_rank is not None:
        keys["attention.q_lora_rank"] = text.query_rank
    if text.temper is not None:
        keys["attention.temperature_scale"] = text.temper[0]
    rotary = text.rotary
    if all_dim := rotary.settings.get("mscale_all_dim"):
        settings = {**rotary.settings, "mscale_all_dim": MULTIPLIER * all_dim}
        rotary = replace(rotary, settings=settings)
    refused = "biases of attention" if text.bias else ""
    if text.pairs != "adjacent":
        refused = "heads that turn in halves"
    return GgufText(architecture, keys, rotary, refused=refused)


def from_gguf(keys: Settings, names: Collection[str]) -> dict[str, Any]:
    """Return what config.json would say beyond the common keys. Old files have a matrix of all
    heads' keys and values, and lengths of heads as if they were not latent.
    """
    sigmoid = keys.get("expert_gating_func", 0) == 2
    kind = MISTRAL if keys.get("architecture", "") == "mistral4" else V3 if sigmoid else V2
    length = "attention.key_length_mla"
    latent = keys.get(length, None) is not None
    head = keys.count(length if latent else "attention.key_length", maximum=MAX_HEADS)
    value = "attention.value_length_mla" if latent else "attention.value_length"
    turning = keys.count("rope.dimension_count", maximum=head)
    groups = keys.get("expert_group_count", None) or 1
    scaling = gguf_scaling(keys) or {}
    if scaling.get("mscale_all_dim") is not None:
        all_dim = keys.number("rope.scaling.yarn_log_multiplier") / MULTIPLIER
        scaling |= {"mscale": all_dim, "mscale_all_dim": all_dim}
    return {
        "model_type": kind,
        "kv_lora_rank": keys.count("attention.kv_lora_rank", maximum=MAX_WIDTH),
        "q_lora_rank": keys.get("attention.q_lora_rank", None) or None,
        "qk_rope_head_dim": turning,
        "qk_nope_head_dim": head - turning,
        "v_head_dim": keys.count(value, maximum=MAX_HEADS),
        "correction_bias": any(name.endswith(".exp_probs_b.bias") for name in names),
        "topk_method": "greedy" if groups == 1 else "group_limited_greedy",
        "n_group": groups,
        "topk_group": keys.get("expert_group_used_count", None) or 1,
        "norm_topk_prob": keys.get("expert_weights_norm", False),
        "routed_scaling_factor": keys.get("expert_weights_scale", None) or 1.0,
        "llama_4_scaling_beta": keys.get("attention.temperature_scale", None),
        "rope_scaling": scaling or None,
    }


def read(given: Settings) -> DeepseekText:
    """Read it from config.json or its text_config, with transformers' defaults; ModelError where a
    value cannot be followed.
    """
    named = given.choice("model_type", (*DEFAULTS, *ALIASES), V3)
    kind = ALIASES.get(named, named)
    values = {key: value for key, value in given.values.items() if value is not None}
    c = Settings({**DEFAULTS[kind], **values}, given.where)
    c.choice("hidden_act", ("silu",), "silu")
    c.choice("mlp_bias", (False,), False)
    depth, context = (
        c.count("num_hidden_layers", maximum=MAX_LAYERS),
        c.count("max_position_embeddings"),
    )
    plain, turning, value = (
        c.count(f"{name}_head_dim", maximum=MAX_HEADS) for name in ("qk_nope", "qk_rope", "v")
    )
    rank, queries = c.count("kv_lora_rank", maximum=MAX_WIDTH), "q_lora_rank"
    direct = queries in given.values and given.values[queries] is None
    rope = rope_settings(c)
    if kind == MISTRAL and not rope.values:
        rope = Settings(ROPE, rope.where)
    growth = rope if rope.get("llama_4_scaling_beta", None) is not None else c
    beta = growth.get("llama_4_scaling_beta", BETA if kind == MISTRAL else None)
    period = rope.number("original_max_position_embeddings", context)
    rotary = read_rotary(rope, turning, c.number("rope_theta", 1e4), context)
    return DeepseekText(
        width=c.count("hidden_size", maximum=MAX_WIDTH),
        ffn=c.count("intermediate_size", maximum=MAX_WIDTH),
        heads=c.count("num_attention_heads", maximum=MAX_HEADS),
        query_rank=None if direct else c.count(queries, maximum=MAX_WIDTH),
        rank=rank,
        plain=plain,
        turning=turning,
        value=value,
        depth=depth,
        vocabulary=c.count("vocab_size"),
        context=context,
        eps=c.number("rms_norm_eps", 1e-6),
        rotary=rotary,
        pairs="adjacent" if kind == V2 or c.flag("rope_interleave", True) else "half",
        scale=(plain + turning) ** -0.5 * _yarn(rope, context) ** 2,
        temper=None if beta is None else (growth.number("llama_4_scaling_beta", beta), period),
        bias=c.flag("attention_bias", False),
        tied=c.flag("tie_word_embeddings", False),
        experts=_experts(c, kind, depth),
    )


def _yarn(rope: Settings, context: int) -> float:
    """Return by what YaRN multiplies queries and keys, all of their values, in these models."""
    plain = rope.get("rope_type", rope.get("type", "default")) == "default"
    if plain or not rope.get("mscale_all_dim", 0):
        return 1.0
    old = rope.number("original_max_position_embeddings", context)
    factor = max(rope.number("factor", context / old), 1.0)
    return 1.0 + 0.1 * rope.number("mscale_all_dim") * math.log(factor)


def _experts(c: Settings, kind: str, depth: int) -> Experts | None:
    if kind == V2:
        method = c.choice("topk_method", ("greedy", "group_limited_greedy"), "greedy")
        c.choice("norm_topk_prob", (False,), False)
        if method == "greedy":
            c = Settings({**c.values, "n_group": 1}, c.where)
        return read_grouped_experts(c, depth, score="softmax", group_best=1)
    if kind == MISTRAL:
        return read_grouped_experts(c, depth, score="softmax")
    c.choice("scoring_func", ("sigmoid",), "sigmoid")
    c.choice("topk_method", ("noaux_tc", "greedy", "group_limited_greedy"), "noaux_tc")
    biased = c.flag("correction_bias", True)
    return read_grouped_experts(c, depth, score="sigmoid", biased=biased)
