"""Nemotron-H (arXiv:2504.03624), Nemotron Nano 2 and Nemotron 3: each layer is a Mamba-2 layer,
grouped attention without positions, a feed-forward layer of squared ReLU, or experts of such, with
a shared one and perhaps in a narrower space.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from typing import Any

from mtmd.base.errors import ModelError
from mtmd.kernels import ops
from mtmd.kernels.checkpoint.canonical import Parameter
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
    squared_relu,
    token_embeddings,
)
from mtmd.llm.experts import MAX_EXPERTS, ExpertNames, Experts, expert_parameters, read_routing
from mtmd.llm.gguf_keys import GgufText, decoder_keys, gating_key, groups_by_layer
from mtmd.llm.inputs import TextInputs
from mtmd.llm.mamba2 import Mamba2, gguf_mamba2, mamba2_keys, read_mamba2
from mtmd.llm.parameters import (
    COPIED_HEAD,
    Tensors,
    attention_tensors,
    decoder_parameters,
    prefixed,
)
from mtmd.llm.state import KV, State

MAMBA, FULL, MLP, MOE = KINDS = ("mamba", "attention", "mlp", "moe")
RENAMED = {"linear_attention": MAMBA, "full_attention": FULL}  # as transformers 5 has them
LETTERS = {"M": MAMBA, "*": FULL, "-": MLP, "E": MOE}
SOURCE = prefixed(("backbone.", "model.", "language_model.backbone.", "language_model.model."))
NAMES = ExpertNames(shared="shared_experts")
EPS = 1e-20  # added to the sum of a token's weights
MAMBA_KEYS = (
    "mamba_num_heads",
    "mamba_head_dim",
    "n_groups",
    "ssm_state_size",
    "conv_kernel",
    "use_conv_bias",
    "use_bias",
)
# What transformers takes for keys that a config.json leaves out.
DEFAULTS: dict[str, Any] = {
    "hidden_size": 4096,
    "intermediate_size": 21504,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 131072,
    "mamba_num_heads": 128,
    "mamba_head_dim": 64,
    "n_groups": 8,
    "ssm_state_size": 128,
    "conv_kernel": 4,
    "use_conv_bias": True,
    "n_routed_experts": 8,
    "moe_intermediate_size": 7688,
    "moe_shared_expert_intermediate_size": 7688,
    "num_experts_per_tok": 2,
    "norm_topk_prob": True,
}


@dataclass(frozen=True)
class NemotronHText:
    kinds: tuple[str, ...]
    width: int
    ffn: int  # of the feed-forward layers, or, where there are none, of the experts
    heads: int
    groups: int
    head: int
    mamba: Mamba2 | None
    experts: Experts | None
    latent: int | None  # the width that experts read, None for that of the decoder
    vocabulary: int
    context: int
    eps: float
    tied: bool
    ahead: int  # layers behind the last that predict further tokens, in GGUF files

    image_width = property(lambda self: self.width)

    @property
    def unused(self) -> tuple[str, ...]:
        layers = (rf"blk\.{len(self.kinds) + i}\..*" for i in range(self.ahead))
        return (r"(language_model\.)?mtp\..*", *layers, *((COPIED_HEAD,) if self.tied else ()))

    @property
    def layers(self) -> list[tuple[State, ...]]:
        states: dict[str, tuple[State, ...]] = {FULL: (KV(self.groups, self.head),)}
        if self.mamba:
            states[MAMBA] = self.mamba.states
        return [states.get(kind, ()) for kind in self.kinds]

    def parameters(self) -> Mapping[str, Parameter]:
        width, inner = self.width, self.latent or self.width
        norm: Tensors = {"attn_norm": ("norm", (width,))}
        full: Tensors = {
            part: (name.replace("self_attn", "mixer"), shape)
            for part, (name, shape) in attention_tensors(
                width, self.heads, self.groups, self.head
            ).items()
        }
        mlp: Tensors = {
            "ffn_up": ("mixer.up_proj", (self.ffn, width)),
            "ffn_down": ("mixer.down_proj", (width, self.ffn)),
        }
        own = {FULL: full, MLP: mlp}
        parameters = decoder_parameters(
            SOURCE,
            [{**norm, **own.get(kind, {})} for kind in self.kinds],
            vocabulary=self.vocabulary,
            width=width,
            tied=self.tied,
        )
        table = "token_embd.weight"
        parameters[table] = replace(
            parameters[table], sources=(*SOURCE("embeddings.weight"), *parameters[table].sources)
        )
        parameters["output_norm.weight"] = Parameter((width,), SOURCE("norm_f.weight"))
        for layer, kind in enumerate(self.kinds):
            at, sources = f"blk.{layer}", SOURCE(f"layers.{layer}.mixer.")
            if self.mamba and kind == MAMBA:
                parameters |= self.mamba.parameters(at, sources, width)
            if self.experts and kind == MOE:
                parameters |= self._expert_parameters(at, sources, self.experts, inner)
        return parameters

    def _expert_parameters(
        self, at: str, sources: tuple[str, ...], experts: Experts, inner: int
    ) -> dict[str, Parameter]:
        """Return those of experts of width `inner`; router and shared expert have the decoder's."""
        width = self.width
        alone = replace(experts, shared=0)
        parameters = expert_parameters(at, sources, alone, inner, names=NAMES)
        own = expert_parameters(at, sources, experts, width, names=NAMES)
        parameters |= {name: p for name, p in own.items() if "_exps." not in name}
        if self.latent:
            for part, name, shape in (
                ("ffn_latent_down", "fc1_latent_proj", (inner, width)),
                ("ffn_latent_up", "fc2_latent_proj", (width, inner)),
            ):
                names = tuple(f"{source}{name}.weight" for source in sources)
                parameters[f"{at}.{part}.weight"] = Parameter(shape, names)
        return parameters

    def graph(self, inputs: TextInputs, weights: WeightSource, attention: AttentionForm) -> Node:
        w = Weights(weights, inputs.dtype)
        x = token_embeddings(inputs, w)
        for layer, kind in inputs.each(self.kinds):
            at = f"blk.{layer}"
            y = w.rms_norm(x, f"{at}.attn_norm", self.eps)
            if self.mamba and kind == MAMBA:
                y = self.mamba.graph(y, layer, inputs, w, eps=self.eps)
            elif self.experts and kind == MOE:
                y = self._experts(y, at, w, self.experts)
            elif kind == FULL:
                q, k, v = queries_keys_values(y, at, w, heads=self.heads, groups=self.groups)
                cached = cache_keys_values(k, v, layer, inputs)
                y = attend(q, cached, at, attention, bounds=inputs.bounds())
                y = w.linear(y, f"{at}.attn_output")
            else:
                y = squared_relu(y, at, w)
            x = ops.add(y, x, name=f"{at}.residual")
        return logits(x, inputs, w, eps=self.eps, tied=self.tied)

    def _experts(self, x: Node, at: str, w: Weights, experts: Experts) -> Node:
        """Experts that read x, or what a projection makes of it, and one that reads every token."""
        if not self.latent:
            return moe_ffn(x, at, w, experts)
        narrow = w.linear(x, f"{at}.ffn_latent_down")
        y = moe_ffn(narrow, at, w, replace(experts, shared=0), router_input=x)
        y = w.linear(y, f"{at}.ffn_latent_up")
        return ops.add(squared_relu(x, at, w, "_shexp"), y, name=f"{at}.ffn_experts")


def to_gguf(text: NemotronHText) -> GgufText:
    """Return the architecture and keys of a GGUF that says the same."""
    experts, kinds = text.experts, text.kinds
    keys = decoder_keys(text) | {
        "attention.head_count_kv": [text.groups * (kind == FULL) for kind in kinds],
        "feed_forward_length": [text.ffn * (kind == MLP) for kind in kinds],
    }
    refused = "" if {MAMBA, FULL} <= {*kinds} else "decoder without Mamba-2 layers or attention"
    if text.mamba:
        keys |= mamba2_keys(text.mamba)
    if experts is None:
        return GgufText("nemotron_h", keys, None, refused=refused)
    routing = experts.routing
    keys |= gating_key(experts) | {
        "feed_forward_length": [experts.ffn * (kind == MOE) for kind in kinds],
        "expert_count": experts.count,
        "expert_used_count": routing.top_k,
        "expert_feed_forward_length": experts.ffn,
        "expert_shared_feed_forward_length": experts.shared,
        "expert_shared_count": 1,
        "expert_weights_norm": routing.normalize,
        "expert_weights_scale": routing.scale,
        "expert_group_count": routing.groups,
        "expert_group_used_count": routing.top_groups,
    }
    if text.latent:
        keys["moe_latent_size"] = text.latent
    if MLP in kinds:
        refused = "feed-forward layers beside experts"
    return GgufText("nemotron_h_moe", keys, None, refused=refused)


def from_gguf(keys: Settings, names: Collection[str]) -> dict[str, Any]:
    """Return what config.json would say beyond the common keys. Layers without groups of keys and
    without a feed-forward width are Mamba-2's.
    """
    groups, widths = groups_by_layer(keys), keys.get("feed_forward_length", None)
    if (
        not isinstance(widths, (list, tuple))
        or len(widths) != len(groups)
        or {*map(type, widths)} != {int}
    ):
        raise ModelError(
            f"{keys.where}: feed_forward_length is {widths!r:.60}, expected {len(groups)} numbers, "
            "one for each layer"
        )
    sparse = bool(keys.get("expert_count", 0))
    ahead = (
        keys.count("nextn_predict_layers", maximum=len(groups) - 1)
        if (keys.get("nextn_predict_layers", 0))
        else 0
    )
    inner = {True: MOE, False: MLP}[sparse]
    kinds = [FULL if g else inner if n else MAMBA for g, n in zip(groups, widths, strict=True)]
    eps = "attention.layer_norm_rms_epsilon"
    return {
        "layers_block_type": kinds[: len(kinds) - ahead],
        "num_nextn_predict_layers": ahead,
        "num_key_value_heads": max(groups),
        "intermediate_size": max(widths) or None,
        "moe_shared_expert_intermediate_size": keys.get("expert_shared_feed_forward_length", None),
        "n_shared_experts": 1,
        "moe_latent_size": keys.get("moe_latent_size", None),
        "layer_norm_epsilon": keys.number(
            eps if keys.get(eps, None) is not None else "attention.layer_norm_epsilon"
        ),
        **dict(zip(MAMBA_KEYS, gguf_mamba2(keys, names), strict=True)),
    }


def read(given: Settings) -> NemotronHText:
    """Read it from config.json or its text_config, with transformers' defaults; ModelError where it
    cannot be followed.
    """
    values = {key: value for key, value in given.values.items() if value is not None}
    c = Settings({**DEFAULTS, **values}, given.where)
    c.choice("mlp_hidden_act", ("relu2",), "relu2")
    c.choice("mamba_hidden_act", ("silu",), "silu")
    if c.flag("mlp_bias", False):
        raise ModelError(f"{c.where}: mlp_bias true is not supported")
    kinds, (count, groups, head) = _kinds(c), read_heads(c, 32, None, None)
    inner = c.count(MAMBA_KEYS[0]) * c.count(MAMBA_KEYS[1])
    experts = _experts(c, kinds) if MOE in kinds else None
    latent = c.get("moe_latent_size", None) is not None and MOE in kinds
    return NemotronHText(
        kinds=kinds,
        width=c.count("hidden_size", maximum=MAX_WIDTH),
        ffn=experts.ffn
        if experts and MLP not in kinds
        else c.count("intermediate_size", maximum=MAX_WIDTH),
        heads=count,
        groups=groups,
        head=head,
        mamba=read_mamba2(c, inner, MAMBA_KEYS) if MAMBA in kinds else None,
        experts=experts,
        latent=c.count("moe_latent_size", maximum=MAX_WIDTH) if latent else None,
        vocabulary=c.count("vocab_size"),
        context=c.count("max_position_embeddings", 4096),
        eps=c.number("layer_norm_epsilon", 1e-5),
        tied=c.flag("tie_word_embeddings", False),
        ahead=c.count("num_nextn_predict_layers", maximum=MAX_LAYERS)
        if c.get("num_nextn_predict_layers", 0)
        else 0,
    )


def _kinds(c: Settings) -> tuple[str, ...]:
    """The kind of each layer, named in a list, or by letters in old files."""
    given: object = c.get("layers_block_type", c.get("layer_types", None))
    letters: object = c.get("hybrid_override_pattern", None)
    if given is None and isinstance(letters, str):
        given = [LETTERS.get(letter, letter) for letter in letters[: MAX_LAYERS + 1]]
    if given is None:
        given = [MAMBA, MOE, FULL, MLP]
    if not isinstance(given, list) or not 0 < len(given) <= MAX_LAYERS:
        raise ModelError(
            f"{c.where}: layers_block_type is {given!r:.60}, expected a list of up to {MAX_LAYERS} "
            "layers"
        )
    named = [RENAMED.get(kind, kind) if isinstance(kind, str) else kind for kind in given]
    return read_layer_types(Settings({"layer_types": named}, c.where), len(named), KINDS, [])


def _experts(c: Settings, kinds: tuple[str, ...]) -> Experts:
    count = c.count("n_routed_experts", maximum=MAX_EXPERTS)
    return Experts(
        count=count,
        ffn=c.count("moe_intermediate_size", maximum=MAX_WIDTH),
        routing=read_routing(c, count, "sigmoid", EPS),
        at=frozenset(i for i, kind in enumerate(kinds) if kind == MOE),
        shared=c.count("moe_shared_expert_intermediate_size", maximum=MAX_WIDTH),
        biased=True,
        gated=False,
    )
