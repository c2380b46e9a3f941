"""Llama 4's text: attention within chunks and, in every fourth layer, to everything and without
positions, queries and keys normed after they turn, experts that read tokens times their weight, and
a shared one (transformers' Llama4TextModel; arXiv:2501.19399 for the temperature).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from mtmd.base.errors import ModelError
from mtmd.kernels import ops
from mtmd.kernels.checkpoint.canonical import Parameter
from mtmd.kernels.checkpoint.rotary import Rotary, read_rotary, rope_settings
from mtmd.kernels.checkpoint.settings import MAX_LAYERS, MAX_WIDTH, Settings
from mtmd.kernels.graph import Node, WeightSource, graph_input
from mtmd.kernels.layers import Weights
from mtmd.kernels.ops.moe import Routing
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
from mtmd.llm.experts import MAX_EXPERTS, ExpertNames, Experts, expert_parameters
from mtmd.llm.gguf_keys import GgufText, decoder_keys, expert_keys
from mtmd.llm.inputs import TextInputs
from mtmd.llm.parameters import (
    ATTENTION,
    COPIED_HEAD,
    MLP,
    attention_tensors,
    decoder_parameters,
    prefixed,
)
from mtmd.llm.state import KV

SOURCE = prefixed(("language_model.model.", "model.language_model.model.", "model."))
KINDS = CHUNKED, _ = ("chunked_attention", "full_attention")
NAMES = ExpertNames(router="router", turned=True)
EVERY = 4  # layers, of which one has no positions
UNNORMED = 128  # experts of the model whose queries and keys are not normed, which a GGUF omits


@dataclass(frozen=True)
class Temperature:
    """Growth of queries of layers without positions, which are multiplied by 1 + scale log(1 +
    floor((position + 1) / floor)).
    """

    floor: float
    scale: float


@dataclass(frozen=True)
class Llama4Text:
    width: int
    ffn: int  # of layers without experts
    heads: int
    groups: int
    head: int
    turning: tuple[bool, ...]  # layers whose queries and keys turn
    kinds: tuple[str, ...]
    chunk: int
    normed: bool
    temperature: Temperature | None
    vocabulary: int
    context: int
    eps: float
    rotary: Rotary
    divided: bool  # the rotary frequencies by a tensor, as GGUF has them
    bias: bool
    tied: bool
    experts: Experts

    image_width = property(lambda self: self.width)

    @property
    def unused(self) -> tuple[str, ...]:
        return (COPIED_HEAD,) if self.tied else ()

    @property
    def layers(self) -> list[tuple[KV]]:
        return [(KV(self.groups, self.head),)] * len(self.kinds)

    def parameters(self) -> Mapping[str, Parameter]:
        layer = {
            "attn_norm": ("input_layernorm", (self.width,)),
            **attention_tensors(self.width, self.heads, self.groups, self.head),
            "ffn_norm": ("post_attention_layernorm", (self.width,)),
        }
        wide, narrow = (self.ffn, self.width), (self.width, self.ffn)
        dense = {
            part: (f"feed_forward.{part.removeprefix('ffn_')}_proj", shape)
            for part, shape in zip(MLP, (wide, wide, narrow), strict=True)
        }
        sparse = self.experts.at
        parameters = decoder_parameters(
            SOURCE,
            [layer if i in sparse else {**layer, **dense} for i in range(len(self.kinds))],
            vocabulary=self.vocabulary,
            width=self.width,
            tied=self.tied,
            biased=ATTENTION * self.bias,
        )
        for i in sorted(sparse):
            sources = SOURCE(f"layers.{i}.feed_forward.")
            parameters |= expert_parameters(
                f"blk.{i}", sources, self.experts, self.width, names=NAMES
            )
        if self.divided:
            parameters["rope_freqs.weight"] = Parameter((self.head // 2,), ("rope_freqs.weight",))
        return parameters

    def graph(self, inputs: TextInputs, weights: WeightSource, attention: AttentionForm) -> Node:
        w, experts = Weights(weights, inputs.dtype), self.experts
        divisors = w.tensor("rope_freqs.weight", torch.float32) if self.divided else None
        angles, temper = inputs.angles(self.rotary, divisors=divisors), self._temper(inputs)
        x = token_embeddings(inputs, w)
        for layer, kind in inputs.each(self.kinds):
            at = f"blk.{layer}"
            y = w.rms_norm(x, f"{at}.attn_norm", self.eps)
            q, k, v = queries_keys_values(
                y, at, w, heads=self.heads, groups=self.groups, bias=self.bias
            )
            if self.turning[layer]:
                q, k = (self._turned(p, angles) for p in (q, k))
            elif temper is not None:
                q = ops.mul(q, temper, name=f"{at}.attn_q.tempered")
            bounds = inputs.bounds(self.chunk, chunked=True) if kind == CHUNKED else inputs.bounds()
            y = attend(q, cache_keys_values(k, v, layer, inputs), at, attention, bounds=bounds)
            y = w.linear(y, f"{at}.attn_output", bias=self.bias)
            x = ops.add(y, x, name=f"{at}.attn_residual")
            y = w.rms_norm(x, f"{at}.ffn_norm", self.eps)
            y = moe_ffn(y, at, w, experts) if layer in experts.at else swiglu(y, at, w)
            x = ops.add(y, x, name=f"{at}.ffn_residual")
        return logits(x, inputs, w, eps=self.eps, tied=self.tied)

    def _turned(self, x: Node, angles: Node) -> Node:
        """Queries or keys, turned and, if they are, normed          [T, H, K] -> [T, H, K]"""
        name = x.name.removesuffix(".heads")
        x = ops.rope(x, angles, pairs="adjacent", name=f"{name}.rope")
        return ops.rms_norm(x, None, eps=self.eps, name=f"{name}_norm") if self.normed else x

    def _temper(self, inputs: TextInputs) -> Node | None:
        """Return what queries of layers without positions are multiplied by, [T, 1, 1]."""
        how = self.temperature
        if how is None or all(self.turning):
            return None
        return graph_input(
            "inp.temper",
            (inputs.tokens, 1, 1),
            inputs.dtype,
            lambda b: _growth(b.positions[0], how).to(inputs.dtype),
        )


def _growth(positions: np.ndarray, how: Temperature) -> torch.Tensor:
    """fp32 [T, 1, 1]"""
    periods = ((torch.from_numpy(positions).float() + 1) / how.floor).floor()
    return (periods.log1p() * how.scale + 1).view(-1, 1, 1)


def to_gguf(text: Llama4Text) -> GgufText:
    """Return the architecture and keys of a GGUF that says the same."""
    keys = decoder_keys(text) | expert_keys(text.experts)
    del keys["expert_shared_feed_forward_length"]
    step = min(text.experts.at, default=0) + 1
    keys |= {"rope.dimension_count": text.head, "interleave_moe_layer_step": step}
    return GgufText("llama4", keys, text.rotary, refused="biases of attention" if text.bias else "")


def from_gguf(keys: Settings, names: Collection[str]) -> dict[str, Any]:
    """Return what config.json would say beyond the common keys: chunks and temperature as in the
    published models, or, without a window, everything with positions.
    """
    layers = keys.count("block_count", maximum=MAX_LAYERS)
    whole = keys.get("attention.sliding_window", None) == 0
    return {
        "num_local_experts": keys.count("expert_count", maximum=MAX_EXPERTS),
        "intermediate_size": keys.count("expert_feed_forward_length", maximum=MAX_WIDTH),
        "intermediate_size_mlp": keys.count("feed_forward_length", maximum=MAX_WIDTH),
        "interleave_moe_layer_step": keys.count("interleave_moe_layer_step", maximum=layers),
        "use_qk_norm": keys.count("expert_count", maximum=MAX_EXPERTS) != UNNORMED,
        "rope_freqs": "rope_freqs.weight" in names,
        **({"no_rope_layers": [1] * layers, "layer_types": [KINDS[1]] * layers} if whole else {}),
    }


def read(c: Settings) -> Llama4Text:
    """Read it from config.json or its text_config, with transformers' defaults; ModelError where a
    value cannot be followed.
    """
    c.choice("hidden_act", ("silu",), "silu")
    depth, context = (
        c.count("num_hidden_layers", 48, maximum=MAX_LAYERS),
        c.count("max_position_embeddings", 131072),
    )
    count, groups, head = read_heads(c, 40, 8, 128)
    every = c.count("no_rope_layer_interval", EVERY)
    default = [int((i + 1) % every != 0) for i in range(depth)]
    turning: object = c.get("no_rope_layers", []) or default
    numbers = isinstance(turning, list) and all(n in (0, 1) for n in turning)
    if not isinstance(turning, list) or not numbers or len(turning) < depth:
        raise ModelError(
            f"{c.where}: no_rope_layers is {turning!r:.60}, expected 0 or 1 for each of {depth} "
            "layers"
        )
    kinds = [KINDS[not turns] for turns in turning[:depth]]
    rope = rope_settings(c)
    return Llama4Text(
        width=c.count("hidden_size", 5120, maximum=MAX_WIDTH),
        ffn=c.count("intermediate_size_mlp", 16384, maximum=MAX_WIDTH),
        heads=count,
        groups=groups,
        head=head,
        turning=tuple(bool(turns) for turns in turning[:depth]),
        kinds=read_layer_types(c, depth, KINDS, kinds),
        chunk=c.count("attention_chunk_size", 8192),
        normed=c.flag("use_qk_norm", True),
        temperature=Temperature(c.number("floor_scale", 8192), c.number("attn_scale", 0.1))
        if c.flag("attn_temperature_tuning", True)
        else None,
        vocabulary=c.count("vocab_size", 202048),
        context=context,
        eps=c.number("rms_norm_eps", 1e-5),
        rotary=read_rotary(rope, head, c.number("rope_theta", 5e5), context),
        divided=c.flag("rope_freqs", False),
        bias=c.flag("attention_bias", False),
        tied=c.flag("tie_word_embeddings", False),
        experts=_experts(c, depth),
    )


def _experts(c: Settings, layers: int) -> Experts:
    """Read the experts of every so many layers, or of those that are named, and the shared one,
    which is as wide.
    """
    step = c.count("interleave_moe_layer_step", 1, maximum=MAX_LAYERS)
    at: object = c.get("moe_layers", list(range(step - 1, layers, step)))
    if not isinstance(at, list) or any(type(i) is not int or not 0 <= i < layers for i in at):
        raise ModelError(
            f"{c.where}: moe_layers is {at!r:.60}, expected numbers of layers below {layers}"
        )
    count = c.count("num_local_experts", 16, maximum=MAX_EXPERTS)
    ffn = c.count("intermediate_size", 8192, maximum=MAX_WIDTH)
    top_k = c.count("num_experts_per_tok", 1, maximum=count)
    return Experts(
        count=count,
        ffn=ffn,
        routing=Routing(top_k, normalize=False, score="sigmoid", on_input=True),
        at=frozenset(at),
        shared=ffn,
    )
