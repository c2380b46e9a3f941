"""LFM2 (arXiv:2511.23404): gated short convolutions with some layers of grouped attention between,
q and k normed, SwiGLU or, behind the first layers, experts. LFM3: norms behind layers, too, gates
on heads, and of the layers of attention some see a window, with positions of their own.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from mtmd.base.errors import ModelError
from mtmd.kernels import ops
from mtmd.kernels.checkpoint.canonical import Parameter, Stored, channels_last
from mtmd.kernels.checkpoint.rotary import Rotary, read_rotary, rope_settings
from mtmd.kernels.checkpoint.settings import MAX_HEADS, MAX_LAYERS, MAX_WIDTH, Settings
from mtmd.kernels.graph import Node, WeightSource
from mtmd.kernels.layers import Weights
from mtmd.kernels.plan.flash_choice import AttentionForm
from mtmd.llm.blocks import (
    attend,
    cache_keys_values,
    logits,
    moe_ffn,
    normed_rope,
    queries_keys_values,
    read_heads,
    read_layer_types,
    swiglu,
    token_embeddings,
)
from mtmd.llm.experts import MAX_EXPERTS, ExpertNames, Experts, expert_parameters, read_routing
from mtmd.llm.gguf_keys import GgufText, decoder_keys, expert_keys, gating_key, groups_by_layer
from mtmd.llm.inputs import TextInputs
from mtmd.llm.layer_kinds import read_ropes
from mtmd.llm.parameters import (
    COPIED_HEAD,
    Tensors,
    attention_tensors,
    decoder_parameters,
    prefixed,
)
from mtmd.llm.state import KV, ConvWindow, State

KINDS = CONV, FULL, SLIDING = ("conv", "full_attention", "sliding_attention")
SOURCE = prefixed(("model.language_model.", "language_model.model.", "model.", "lfm."))
NAMES = ExpertNames(("w1", "w3", "w2"), bias="expert_bias")
EPS = 1e-6  # added to the sum of a token's weights
# What transformers takes for keys that a config.json leaves out, by model_type.
DEFAULTS: dict[str, dict[str, Any]] = {
    "lfm2": {"hidden_size": 2560, "intermediate_size": 12288},
    "lfm2_moe": {
        "hidden_size": 2048,
        "intermediate_size": 7168,
        "block_auto_adjust_ff_dim": False,
        "moe_intermediate_size": 1792,
        "num_dense_layers": 2,
        "num_experts": 32,
        "num_experts_per_tok": 4,
        "norm_topk_prob": True,
    },
    "lfm3": {
        "hidden_size": 2048,
        "intermediate_size": 7680,
        "block_auto_adjust_ff_dim": False,
        "num_hidden_layers": 24,
        "num_attention_heads": 16,
        "num_key_value_heads": 4,
        "head_dim": 128,
        "vocab_size": 128_000,
        "conv_L_cache": 7,
        "sliding_window": 256,
        "rope_parameters": {
            SLIDING: {"rope_type": "default", "rope_theta": 1e4},
            FULL: {"rope_type": "proportional", "rope_theta": 1e6, "partial_rotary_factor": 0.5},
        },
    },
}
# Names of what they share, in the second generation and in the third
OWN = {"output": "out_proj", "q_norm": "q_layernorm", "k_norm": "k_layernorm"}
QWEN = {"output": "o_proj", "q_norm": "q_norm", "k_norm": "k_norm"}


@dataclass(frozen=True)
class Lfm2Text:
    kinds: tuple[str, ...]
    width: int
    ffn: int
    heads: int
    groups: int
    head: int
    taps: int
    conv_bias: bool
    vocabulary: int
    context: int
    eps: float
    rotary: Rotary
    tied: bool
    experts: Experts | None
    third: bool = False  # of the third generation, with the fields below
    behind: bool = False  # whether what a layer adds is normed
    gated: bool = False  # whether each head's output passes a gate
    window: int | None = None
    local: Rotary | None = None  # of layers with a window

    unused = (COPIED_HEAD,)
    image_width = property(lambda self: self.width)

    @property
    def layers(self) -> list[tuple[State]]:
        return [
            (ConvWindow(self.taps - 1, self.width),)
            if kind == CONV
            else (KV(self.groups, self.head),)
            for kind in self.kinds
        ]

    def parameters(self) -> Mapping[str, Parameter]:
        width, norm, taps = self.width, (self.width,), self.taps
        always: Tensors = {"attn_norm": ("operator_norm", norm), "ffn_norm": ("ffn_norm", norm)}
        if self.behind:
            behind: Tensors = {
                "post_attention_norm": ("post_operator_norm", norm),
                "post_ffw_norm": ("post_ffn_norm", norm),
            }
            always = {**always, **behind}
        dense: Tensors = {
            "ffn_gate": ("feed_forward.w1", (self.ffn, width)),
            "ffn_up": ("feed_forward.w3", (self.ffn, width)),
            "ffn_down": ("feed_forward.w2", (width, self.ffn)),
        }
        sparse = self.experts.at if self.experts else ()
        conv: Tensors = {
            "shortconv.in_proj": ("conv.in_proj", (3 * width, width)),
            "shortconv.conv": ("conv.conv", (width, taps)),
            "shortconv.out_proj": ("conv.out_proj", (width, width)),
        }
        names = QWEN if self.third else OWN
        full: Tensors = {
            **attention_tensors(width, self.heads, self.groups, self.head),
            "attn_output": (f"self_attn.{names['output']}", (width, self.heads * self.head)),
            "attn_q_norm": (f"self_attn.{names['q_norm']}", (self.head,)),
            "attn_k_norm": (f"self_attn.{names['k_norm']}", (self.head,)),
            **({"attn_gate": ("self_attn.gate_proj", (self.heads, width))} if self.gated else {}),
        }
        parameters = decoder_parameters(
            SOURCE,
            [
                {**always, **(conv if kind == CONV else full), **({} if i in sparse else dense)}
                for i, kind in enumerate(self.kinds)
            ],
            vocabulary=self.vocabulary,
            width=width,
            tied=self.tied,
            biased=tuple(conv) * self.conv_bias,
        )
        # llama.cpp's converter names the last norm after the first tensor.
        parameters["output_norm.weight"] = Parameter(
            norm,
            SOURCE("embedding_norm.weight"),
            gguf=(Stored(("token_embd_norm.weight",), norm), Stored(("output_norm.weight",), norm)),
        )
        for layer, kind in enumerate(self.kinds):
            if self.experts and layer in sparse:
                prefixes = SOURCE(f"layers.{layer}.feed_forward.")
                parameters |= expert_parameters(
                    f"blk.{layer}", prefixes, self.experts, width, names=NAMES
                )
            if kind == CONV:
                stored = [
                    Stored((name,), (width, 1, taps), lambda kernels: kernels.squeeze(1))
                    for name in SOURCE(f"layers.{layer}.conv.conv.weight")
                ]
                parameters[f"blk.{layer}.shortconv.conv.weight"] = Parameter(
                    (width, taps), (), others=(*stored, *map(channels_last, stored))
                )
        return parameters

    def graph(self, inputs: TextInputs, weights: WeightSource, attention: AttentionForm) -> Node:
        w = Weights(weights, inputs.dtype)
        x = token_embeddings(inputs, w)
        for layer, kind in inputs.each(self.kinds):
            at = f"blk.{layer}"
            y = w.rms_norm(x, f"{at}.attn_norm", self.eps)
            y = (
                self._conv(y, layer, inputs, w)
                if kind == CONV
                else self._attention(y, layer, kind, inputs, w, attention=attention)
            )
            if self.behind:
                y = w.rms_norm(y, f"{at}.post_attention_norm", self.eps)
            x = ops.add(y, x, name=f"{at}.attn_residual")
            y, e = w.rms_norm(x, f"{at}.ffn_norm", self.eps), self.experts
            y = moe_ffn(y, at, w, e) if e and layer in e.at else swiglu(y, at, w)
            if self.behind:
                y = w.rms_norm(y, f"{at}.post_ffw_norm", self.eps)
            x = ops.add(y, x, name=f"{at}.ffn_residual")
        return logits(x, inputs, w, eps=self.eps, tied=self.tied)

    def _conv(self, x: Node, layer: int, inputs: TextInputs, w: Weights) -> Node:
        """c * conv(b * x') of three projections, and the window of b * x' that the next tokens
        need

        [T, D] -> [T, D]
        """
        at, tokens, width = f"blk.{layer}.shortconv", x.shape[0], self.width
        all_three = w.linear(x, f"{at}.in_proj", bias=self.conv_bias)
        b, c, value = (
            ops.columns(all_three, start=i * width, stop=(i + 1) * width, name=f"{at}.{part}")
            for i, part in enumerate("bcx")
        )
        state = inputs.state(layer, ConvWindow(self.taps - 1, width))
        bias = w.tensor(f"{at}.conv.bias") if self.conv_bias else None
        packed = ops.short_conv(
            ops.mul(b, value, name=f"{at}.bx"),
            w.tensor(f"{at}.conv.weight"),
            state,
            inputs.starts,
            inputs.sequence_slots,
            bias,
            activation="none",
            name=f"{at}.conv",
        )
        window = ops.rows(packed, start=tokens, stop=packed.shape[0], name=f"{at}.window")
        inputs.saved.append(
            ops.state_store(state, window, inputs.sequence_slots, name=f"{at}.state_store")
        )
        mixed = ops.rows(packed, start=0, stop=tokens, name=f"{at}.mixed")
        return w.linear(
            ops.mul(mixed, c, name=f"{at}.gated"), f"{at}.out_proj", bias=self.conv_bias
        )

    def _attention(
        self,
        x: Node,
        layer: int,
        kind: str,
        inputs: TextInputs,
        w: Weights,
        *,
        attention: AttentionForm,
    ) -> Node:
        at, angles, bounds = f"blk.{layer}", inputs.angles(self.rotary), inputs.bounds()
        if kind == SLIDING and self.local:
            angles, bounds = (
                inputs.angles(self.local, "inp.angles.local"),
                inputs.bounds(self.window),
            )
        q, k, v = queries_keys_values(x, at, w, heads=self.heads, groups=self.groups)
        q = normed_rope(q, f"{at}.attn_q", angles, w, eps=self.eps)
        k = normed_rope(k, f"{at}.attn_k", angles, w, eps=self.eps)
        keys_values = cache_keys_values(k, v, layer, inputs)
        y = attend(q, keys_values, at, attention, bounds=bounds)
        if self.gated:
            tokens, heads = y.shape[0], self.heads
            gate = ops.sigmoid(w.linear(x, f"{at}.attn_gate"), name=f"{at}.attn_gate.sigmoid")
            gate = ops.reshape(gate, shape=(tokens, heads, 1), name=f"{at}.attn_gate.heads")
            y = ops.reshape(y, shape=(tokens, heads, self.head), name=f"{at}.attn.heads")
            y = ops.mul(y, gate, name=f"{at}.attn_gated")
            y = ops.reshape(y, shape=(tokens, heads * self.head), name=f"{at}.attn_gated.flat")
        return w.linear(y, f"{at}.attn_output")


def to_gguf(text: Lfm2Text) -> GgufText:
    """Return the architecture and keys of a GGUF that says the same."""
    keys = decoder_keys(text) | {
        "attention.head_count_kv": [0 if kind == CONV else text.groups for kind in text.kinds],
        "shortconv.l_cache": text.taps,
    }
    experts = text.experts
    if experts is None:
        refused = "norms behind layers" if text.third else ""
        return GgufText("lfm2", keys, text.rotary, refused=refused)
    keys |= expert_keys(experts) | gating_key(experts)
    keys["leading_dense_block_count"] = len(text.kinds) - len(experts.at)
    refused = "" if experts.biased else "experts without a correction bias"
    return GgufText("lfm2moe", keys, text.rotary, refused=refused)


def from_gguf(keys: Settings, names: Collection[str]) -> dict[str, Any]:
    """Return what config.json would say beyond the common keys. Layers without groups of keys are
    convolutions.
    """
    groups = groups_by_layer(keys)
    sparse = keys.get("expert_count", 0) != 0
    return {
        "model_type": "lfm2_moe" if sparse else "lfm2",
        "num_dense_layers": keys.get("leading_dense_block_count", 0),
        "use_expert_bias": any(name.endswith(".exp_probs_b.bias") for name in names),
        "norm_topk_prob": True,
        "num_key_value_heads": max(groups),
        "layer_types": [KINDS[n > 0] for n in groups],
        "conv_L_cache": keys.count("shortconv.l_cache"),
        "norm_eps": keys.number("attention.layer_norm_rms_epsilon"),
        "conv_bias": any(name.endswith(".shortconv.conv.bias") for name in names),
        "block_auto_adjust_ff_dim": False,
    }


def read(given: Settings) -> Lfm2Text:
    """Read it from config.json or its text_config, with transformers' defaults; ModelError where it
    is impossible.
    """
    kind = given.choice("model_type", DEFAULTS, "lfm2")
    values = {key: value for key, value in given.values.items() if value is not None}
    c = Settings({**DEFAULTS[kind], **values}, given.where)
    width, context = (
        c.count("hidden_size", maximum=MAX_WIDTH),
        c.count("max_position_embeddings", 128_000),
    )
    if (taps := c.count("conv_L_cache", 3, maximum=MAX_HEADS)) < 2:
        raise ModelError(
            f"{c.where}: conv_L_cache is {taps}, expected 2 inputs of a convolution or more"
        )
    tied = c.flag("tie_word_embeddings", c.flag("tie_embedding", True))
    if c.flag("tie_embedding", tied) != tied:
        raise ModelError(
            f"{c.where}: tie_embedding and tie_word_embeddings differ; correct one of them"
        )
    count, groups, head = read_heads(
        c, 32, 8, width // c.count("num_attention_heads", 32, maximum=MAX_HEADS)
    )
    kinds, third = _kinds(c, kind), kind == "lfm3"
    if third:
        ropes = read_ropes(c, head, context)
        rotary, local = ropes[FULL], ropes[SLIDING]
    else:
        rope = rope_settings(c)
        rotary, local = read_rotary(rope, head, c.number("rope_theta", 1e6), context), None
    if c.flag("attention_bias", False):
        raise ModelError(f"{c.where}: attention_bias true is not supported")
    return Lfm2Text(
        kinds=kinds,
        width=width,
        ffn=_ffn(c),
        heads=count,
        groups=groups,
        head=head,
        taps=taps,
        conv_bias=c.flag("conv_bias", False),
        vocabulary=c.count("vocab_size", 65536),
        context=context,
        eps=c.number("norm_eps", 1e-5),
        rotary=rotary,
        tied=tied,
        experts=_experts(c, len(kinds)) if kind == "lfm2_moe" else None,
        third=third,
        behind=third and c.flag("use_sandwich_norm", True),
        gated=third and c.flag("use_attention_gate", True),
        window=c.count("sliding_window") if third and SLIDING in kinds else None,
        local=local,
    )


def _experts(c: Settings, layers: int) -> Experts | None:
    """Read the experts of the layers behind the first, None where all are dense."""
    dense = c.get("num_dense_layers", 0)
    if type(dense) is not int or dense < 0:
        raise ModelError(
            f"{c.where}: num_dense_layers is {dense!r:.40}, expected a number of layers"
        )
    if dense >= layers:
        return None
    count = c.count("num_experts", maximum=MAX_EXPERTS)
    return Experts(
        count=count,
        ffn=c.count("moe_intermediate_size", maximum=MAX_WIDTH),
        routing=read_routing(c, count, "sigmoid", EPS),
        at=frozenset(range(dense, layers)),
        biased=c.flag("use_expert_bias", True),
    )


def _kinds(c: Settings, generation: str) -> tuple[str, ...]:
    layers = c.count("num_hidden_layers", 32, maximum=MAX_LAYERS)
    if generation == "lfm3":
        usual = {2: FULL, 0: SLIDING}
        default = [usual.get(layer % 4, CONV) if layer else CONV for layer in range(layers)]
        return read_layer_types(c, layers, KINDS, default)
    numbered = c.get("full_attn_idxs", list(range(layers)))
    default = [KINDS[layer in numbered] for layer in range(layers) if isinstance(numbered, list)]
    return read_layer_types(c, layers, KINDS[:2], default)


def _ffn(c: Settings) -> int:
    """The width of the SwiGLU layers: as it stands there, or two thirds of it, times a factor and
    rounded up.
    """
    ffn = c.count(
        "block_ff_dim", c.count("intermediate_size", maximum=MAX_WIDTH), maximum=MAX_WIDTH
    )
    if not c.flag("block_auto_adjust_ff_dim", True):
        return ffn
    multiple = c.count("block_multiple_of", 256, maximum=MAX_WIDTH)
    return (
        -(-int(c.number("block_ffn_dim_multiplier", 1.0) * int(2 * ffn / 3)) // multiple) * multiple
        or multiple
    )
