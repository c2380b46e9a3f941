"""Granite 4.0: Mamba-2 layers (arXiv:2405.21060) with some of grouped attention between, mostly
without positions, or attention alone; SwiGLU, or experts beside it; Granite's four multipliers.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from torch import Tensor

from mtmd.kernels import ops
from mtmd.kernels.checkpoint.canonical import Parameter, Stored, adjacent_pairs
from mtmd.kernels.checkpoint.rotary import Rotary, read_rotary, rope_settings
from mtmd.kernels.checkpoint.settings import MAX_HEADS, MAX_LAYERS, MAX_WIDTH, Settings
from mtmd.kernels.graph import Node, WeightSource
from mtmd.kernels.layers import Weights
from mtmd.kernels.ops.moe import Routing
from mtmd.kernels.plan.flash_choice import AttentionForm
from mtmd.llm.blocks import (
    Multipliers,
    added,
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
from mtmd.llm.experts import MAX_EXPERTS, ExpertNames, Experts, expert_parameters
from mtmd.llm.gguf_keys import GgufText, decoder_keys, expert_keys, groups_by_layer
from mtmd.llm.inputs import TextInputs
from mtmd.llm.mamba2 import Mamba2, gguf_mamba2, mamba2_keys, read_mamba2
from mtmd.llm.parameters import (
    ATTENTION,
    COPIED_HEAD,
    Tensors,
    attention_tensors,
    decoder_parameters,
    prefixed,
)
from mtmd.llm.state import KV, State

MAMBA, FULL = KINDS = ("mamba", "attention")
RENAMED = {"linear_attention": MAMBA, "full_attention": FULL}  # as transformers 5 has them
SOURCE = prefixed(("model.", "model.language_model."))
NAMES = ExpertNames(fused=("input_linear.weight", "output_linear.weight"), router="router.layer")
SHARED = ("ffn_gate", "ffn_up", "ffn_down")
MAMBA_KEYS = tuple(
    f"mamba_{name}"
    for name in ("n_heads", "d_head", "n_groups", "d_state", "d_conv", "conv_bias", "proj_bias")
)
# What transformers takes for keys that a config.json leaves out.
DEFAULTS: dict[str, Any] = {
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "num_hidden_layers": 32,
    "vocab_size": 32000,
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
    "shared_intermediate_size": 1024,
    "mamba_n_heads": 128,
    "mamba_n_groups": 1,
    "mamba_d_state": 256,
    "mamba_d_conv": 4,
    "mamba_conv_bias": True,
}


@dataclass(frozen=True)
class GraniteHybridText:
    kinds: tuple[str, ...]
    width: int
    ffn: int  # of the experts, or, where there are none, of SwiGLU
    heads: int
    groups: int
    head: int
    attention_bias: bool
    mamba: Mamba2 | None
    experts: Experts | None
    vocabulary: int
    context: int
    eps: float
    rotary: Rotary | None  # None without positions
    tied: bool
    times: Multipliers

    unused = (COPIED_HEAD,)
    image_width = property(lambda self: self.width)

    @property
    def layers(self) -> list[tuple[State, ...]]:
        return [self._states(kind) for kind in self.kinds]

    def _states(self, kind: str) -> tuple[State, ...]:
        return (
            (KV(self.groups, self.head),)
            if self.mamba is None or kind == FULL
            else (self.mamba.states)
        )

    def parameters(self) -> Mapping[str, Parameter]:
        width = self.width
        norms: Tensors = {
            "attn_norm": ("input_layernorm", (width,)),
            "ffn_norm": ("post_attention_layernorm", (width,)),
        }
        full = attention_tensors(width, self.heads, self.groups, self.head)
        parameters = decoder_parameters(
            SOURCE,
            [{**norms, **(full if kind == FULL else {})} for kind in self.kinds],
            vocabulary=self.vocabulary,
            width=width,
            tied=self.tied,
            biased=ATTENTION * self.attention_bias,
            converts={"attn_q": adjacent_pairs(self.heads), "attn_k": adjacent_pairs(self.groups)},
        )
        for layer, kind in enumerate(self.kinds):
            at, theirs = f"blk.{layer}", f"layers.{layer}."
            if self.mamba and kind == MAMBA:
                parameters |= self.mamba.parameters(at, SOURCE(f"{theirs}mamba."), width)
            if self.experts:
                parameters |= expert_parameters(
                    at,
                    SOURCE(f"{theirs}block_sparse_moe."),
                    replace(self.experts, shared=0),
                    width,
                    names=NAMES,
                )
            parameters |= self._shared_parameters(at, SOURCE(f"{theirs}shared_mlp."))
        return parameters

    def _shared_parameters(self, at: str, sources: tuple[str, ...]) -> dict[str, Parameter]:
        """SwiGLU of every token, gate and up in one."""
        ffn = self.experts.shared if self.experts else self.ffn
        suffix = "_shexp" if self.experts else ""
        both = tuple(f"{source}input_linear.weight" for source in sources)
        parameters = {
            f"{at}.ffn_{part}{suffix}.weight": Parameter(
                (ffn, self.width),
                (),
                others=tuple(
                    Stored((name,), (2 * ffn, self.width), partial(_half, which), picks_rows=True)
                    for name in both
                ),
            )
            for which, part in enumerate(("gate", "up"))
        }
        down = tuple(f"{source}output_linear.weight" for source in sources)
        return parameters | {f"{at}.ffn_down{suffix}.weight": Parameter((self.width, ffn), down)}

    def graph(self, inputs: TextInputs, weights: WeightSource, attention: AttentionForm) -> Node:
        w, times = Weights(weights, inputs.dtype), self.times
        x = token_embeddings(inputs, w, times.embedding)
        for layer, kind in inputs.each(self.kinds):
            at = f"blk.{layer}"
            y = w.rms_norm(x, f"{at}.attn_norm", self.eps)
            y = (
                self.mamba.graph(y, layer, inputs, w, eps=self.eps)
                if self.mamba and kind == MAMBA
                else self._attention(y, layer, inputs, w, attention)
            )
            x = added(y, x, f"{at}.attn", times)
            y = w.rms_norm(x, f"{at}.ffn_norm", self.eps)
            y = moe_ffn(y, at, w, self.experts) if self.experts else swiglu(y, at, w)
            x = added(y, x, f"{at}.ffn", times)
        x = logits(x, inputs, w, eps=self.eps, tied=self.tied)
        return ops.scale(x, factor=1 / times.logits, name="logits.scaled")

    def _attention(
        self, x: Node, layer: int, inputs: TextInputs, w: Weights, attention: AttentionForm
    ) -> Node:
        at, bias = f"blk.{layer}", self.attention_bias
        q, k, v = queries_keys_values(x, at, w, heads=self.heads, groups=self.groups, bias=bias)
        if self.rotary:
            angles = inputs.angles(self.rotary)
            q = ops.rope(q, angles, pairs="adjacent", name=f"{at}.attn_q.rope")
            k = ops.rope(k, angles, pairs="adjacent", name=f"{at}.attn_k.rope")
        y = attend(
            q,
            cache_keys_values(k, v, layer, inputs),
            at,
            attention,
            bounds=inputs.bounds(),
            scale=self.times.attention,
        )
        return w.linear(y, f"{at}.attn_output", bias=bias)


def _half(which: int, both: Tensor) -> Tensor:
    return both.chunk(2)[which]


def to_gguf(text: GraniteHybridText) -> GgufText:
    """Return the architecture and keys of a GGUF that says the same."""
    keys = decoder_keys(text) | text.times.gguf_keys() | expert_keys(text.experts)
    keys |= {
        "attention.head_count_kv": [text.groups * (kind == FULL) for kind in text.kinds],
        "rope.scaling.finetuned": text.rotary is not None,
        "rope.dimension_count": text.head,
    }
    if text.mamba is None:
        refused = "decoder without Mamba-2 layers"
        return GgufText("granitehybrid", keys, text.rotary, refused=refused)
    return GgufText("granitehybrid", keys | mamba2_keys(text.mamba), text.rotary)


def from_gguf(keys: Settings, names: Collection[str]) -> dict[str, Any]:
    """Return what config.json would say beyond the common keys. Layers without groups of keys are
    Mamba-2's.
    """
    groups, ffn = groups_by_layer(keys), keys.get("feed_forward_length", None)
    sparse = bool(keys.get("expert_count", 0))
    mamba = gguf_mamba2(keys, names)
    return {
        "layer_types": [KINDS[n > 0] for n in groups],
        "num_key_value_heads": max(groups),
        "attention_bias": any(name.endswith(".attn_q.bias") for name in names),
        "num_local_experts": keys.get("expert_count", 0),
        "shared_intermediate_size": keys.get("expert_shared_feed_forward_length", 0)
        if sparse
        else ffn,
        "position_embedding_type": "rope" if keys.get("rope.scaling.finetuned", True) else "nope",
        "embedding_multiplier": keys.get("embedding_scale", None),
        "residual_multiplier": keys.get("residual_scale", None),
        "attention_multiplier": keys.get("attention.scale", None),
        "logits_scaling": keys.get("logit_scale", None),
        "mamba_inner": keys.count("ssm.inner_size"),
        **dict(zip(MAMBA_KEYS, mamba, strict=True)),
    }


def read(given: Settings) -> GraniteHybridText:
    """Read it from config.json or its text_config, with transformers' defaults; ModelError where it
    cannot be followed.
    """
    values = {key: value for key, value in given.values.items() if value is not None}
    c = Settings({**DEFAULTS, **values}, given.where)
    c.choice("hidden_act", ("silu",), "silu")
    width, context = (
        c.count("hidden_size", maximum=MAX_WIDTH),
        c.count("max_position_embeddings", 2048),
    )
    count, groups, head = read_heads(
        c, 32, None, width // c.count("num_attention_heads", 32, maximum=MAX_HEADS)
    )
    kinds, experts = _kinds(c), _experts(c)
    positions = c.choice("position_embedding_type", ("nope", "rope"), "nope") == "rope"
    return GraniteHybridText(
        kinds=kinds,
        width=width,
        ffn=experts.ffn if experts else c.count("shared_intermediate_size", maximum=MAX_WIDTH),
        heads=count,
        groups=groups,
        head=head,
        attention_bias=c.flag("attention_bias", False),
        mamba=_mamba(c, width) if MAMBA in kinds else None,
        experts=experts,
        vocabulary=c.count("vocab_size"),
        context=context,
        eps=c.number("rms_norm_eps", 1e-6),
        rotary=read_rotary(rope_settings(c), head, c.number("rope_theta", 1e4), context)
        if positions
        else None,
        tied=c.flag("tie_word_embeddings", False),
        times=Multipliers(
            c.number("embedding_multiplier", 1.0),
            c.number("residual_multiplier", 1.0),
            c.number("attention_multiplier", 1.0),
            c.number("logits_scaling", 1.0),
        ),
    )


def _kinds(c: Settings) -> tuple[str, ...]:
    layers = c.count("num_hidden_layers", maximum=MAX_LAYERS)
    given: object = c.get("layer_types", c.get("layers_block_type", None))
    if isinstance(given, list):
        given = [RENAMED.get(kind, kind) if isinstance(kind, str) else kind for kind in given]
    named = Settings({"layer_types": given}, c.where)
    return read_layer_types(named, layers, KINDS, [MAMBA] * layers)


def _mamba(c: Settings, width: int) -> Mamba2:
    """A head's size is "auto" where it follows from the others."""
    expand = c.count("mamba_expand", 2, maximum=MAX_WIDTH // width)
    inner = c.count("mamba_inner", expand * width, maximum=MAX_WIDTH)
    if c.get("mamba_d_head", "auto") == "auto":
        heads = c.count("mamba_n_heads", maximum=MAX_HEADS)
        c = Settings({**c.values, "mamba_d_head": max(inner // heads, 1)}, c.where)
    return read_mamba2(c, inner, MAMBA_KEYS)


def _experts(c: Settings) -> Experts | None:
    if c.get("num_local_experts", 0) == 0:
        return None
    count = c.count("num_local_experts", maximum=MAX_EXPERTS)
    return Experts(
        count=count,
        ffn=c.count("intermediate_size", maximum=MAX_WIDTH),
        routing=Routing(c.count("num_experts_per_tok", maximum=count), normalize=True),
        at=frozenset(range(c.count("num_hidden_layers", maximum=MAX_LAYERS))),
        shared=c.count("shared_intermediate_size", maximum=MAX_WIDTH),
    )
