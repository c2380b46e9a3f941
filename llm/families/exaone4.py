"""EXAONE 4.0 (arXiv:2507.11407), and EXAONE 4.5's decoder: norms behind attention and FFN, q and k
normed; in larger ones three of four layers attend within a window, and they alone have positions.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from mtmd.base.errors import ModelError
from mtmd.kernels import ops
from mtmd.kernels.checkpoint.canonical import Parameter
from mtmd.kernels.checkpoint.rotary import Rotary, read_rotary, rope_settings
from mtmd.kernels.checkpoint.settings import MAX_HEADS, MAX_LAYERS, MAX_WIDTH, Settings
from mtmd.kernels.graph import Node, WeightSource
from mtmd.kernels.layers import Weights
from mtmd.kernels.plan.flash_choice import AttentionForm
from mtmd.llm.blocks import (
    attend,
    cache_keys_values,
    logits,
    normed_rope,
    queries_keys_values,
    read_heads,
    read_layer_types,
    swiglu,
    token_embeddings,
)
from mtmd.llm.gguf_keys import PATTERN, GgufText, decoder_keys, sliding_layers
from mtmd.llm.inputs import TextInputs
from mtmd.llm.parameters import (
    COPIED_HEAD,
    attention_tensors,
    decoder_parameters,
    mlp_tensors,
    prefixed,
)
from mtmd.llm.state import KV

KINDS = SLIDING, FULL = ("sliding_attention", "full_attention")
PREFIXES = ("model.", "model.language_model.", "language_model.model.")
WINDOW, EVERY = 4096, 4  # of a GGUF of 64 layers that does not say them, as llama.cpp has it
LARGE = 64


@dataclass(frozen=True)
class Exaone4Text:
    """`windows` of each layer; where some have one, those without have no positions."""

    width: int
    ffn: int
    heads: int
    groups: int
    head: int
    vocabulary: int
    context: int
    eps: float
    rotary: Rotary
    windows: tuple[int | None, ...]
    tied: bool
    divided: bool  # the rotary frequencies by a tensor, as GGUF files have Llama 3's scaling

    @property
    def unused(self) -> tuple[str, ...]:
        drafts = (r"mtp\..*", rf"blk\.(?:{len(self.windows)}|{len(self.windows) + 1})\..*")
        return (*drafts, *((COPIED_HEAD,) if self.tied else ()))

    @property
    def layers(self) -> list[tuple[KV]]:
        return [(KV(self.groups, self.head),)] * len(self.windows)

    @property
    def image_width(self) -> int:
        return self.width

    def parameters(self) -> Mapping[str, Parameter]:
        layer = {
            **attention_tensors(self.width, self.heads, self.groups, self.head),
            "attn_q_norm": ("self_attn.q_norm", (self.head,)),
            "attn_k_norm": ("self_attn.k_norm", (self.head,)),
            "post_attention_norm": ("post_attention_layernorm", (self.width,)),
            **mlp_tensors(self.width, self.ffn),
            "post_ffw_norm": ("post_feedforward_layernorm", (self.width,)),
        }
        parameters = decoder_parameters(
            prefixed(PREFIXES),
            [layer] * len(self.windows),
            vocabulary=self.vocabulary,
            width=self.width,
            tied=self.tied,
        )
        if self.divided:
            parameters["rope_freqs.weight"] = Parameter((self.head // 2,), ("rope_freqs.weight",))
        return parameters

    def graph(self, inputs: TextInputs, weights: WeightSource, attention: AttentionForm) -> Node:
        w = Weights(weights, inputs.dtype)
        divisors = w.tensor("rope_freqs.weight", torch.float32) if self.divided else None
        x, angles = token_embeddings(inputs, w), inputs.angles(self.rotary, divisors=divisors)
        hybrid = any(self.windows)
        for layer, window in inputs.each(self.windows):
            at = f"blk.{layer}"
            q, k, v = queries_keys_values(x, at, w, heads=self.heads, groups=self.groups)
            if hybrid and window is None:
                q = w.rms_norm(q, f"{at}.attn_q_norm", self.eps)
                k = w.rms_norm(k, f"{at}.attn_k_norm", self.eps)
            else:
                q = normed_rope(q, f"{at}.attn_q", angles, w, eps=self.eps)
                k = normed_rope(k, f"{at}.attn_k", angles, w, eps=self.eps)
            cached = cache_keys_values(k, v, layer, inputs)
            y = attend(q, cached, at, attention, bounds=inputs.bounds(window))
            y = w.rms_norm(w.linear(y, f"{at}.attn_output"), f"{at}.post_attention_norm", self.eps)
            x = ops.add(y, x, name=f"{at}.attn_residual")
            y = w.rms_norm(swiglu(x, at, w), f"{at}.post_ffw_norm", self.eps)
            x = ops.add(y, x, name=f"{at}.ffn_residual")
        return logits(x, inputs, w, eps=self.eps, tied=self.tied)


def to_gguf(text: Exaone4Text) -> GgufText:
    """Return the architecture and keys of a GGUF that says the same; llama.cpp takes windows of one
    with 64 layers alone.
    """
    keys = decoder_keys(text)
    if sizes := set(filter(None, text.windows)):
        keys |= {
            "attention.sliding_window": max(sizes),
            PATTERN: [window is not None for window in text.windows],
        }
    return GgufText("exaone4", keys, text.rotary)


def from_gguf(keys: Settings, names: Collection[str]) -> dict[str, Any]:
    """Return what config.json would say beyond the common keys; layers that draft are left out."""
    ahead = keys.count("nextn_predict_layers") if keys.get("nextn_predict_layers", 0) else 0
    layers = keys.count("block_count", maximum=MAX_LAYERS) - ahead
    window = keys.get("attention.sliding_window", WINDOW if layers == LARGE else None)
    own = Settings({**keys.values, "block_count": layers}, keys.where)
    slides = sliding_layers(own, EVERY) if window is not None else [False] * layers
    return {
        "num_hidden_layers": layers,
        "sliding_window": window,
        "layer_types": [KINDS[not one] for one in slides],
        "rope_freqs": "rope_freqs.weight" in names,
    }


def read(c: Settings) -> Exaone4Text:
    """Read it from config.json or its text_config, with transformers' defaults; ModelError where a
    value cannot be followed.
    """
    c.choice("hidden_act", ("silu",), "silu")
    width = c.count("hidden_size", 4096, maximum=MAX_WIDTH)
    size = width // c.count("num_attention_heads", 32, maximum=MAX_HEADS)
    count, groups, head = read_heads(c, 32, 32, size)
    context, rope = c.count("max_position_embeddings", 2048), rope_settings(c)
    return Exaone4Text(
        width=width,
        ffn=c.count("intermediate_size", 16384, maximum=MAX_WIDTH),
        heads=count,
        groups=groups,
        head=head,
        vocabulary=c.count("vocab_size", 102400),
        context=context,
        eps=c.number("rms_norm_eps", 1e-5),
        rotary=read_rotary(rope, head, c.number("rope_theta", 1e4), context),
        windows=_windows(c),
        tied=c.flag("tie_word_embeddings", False),
        divided=c.flag("rope_freqs", False),
    )


def _windows(c: Settings) -> tuple[int | None, ...]:
    """Return the window of each layer; null for none at all. A pattern of letters counts as its
    length.
    """
    layers = c.count("num_hidden_layers", 32, maximum=MAX_LAYERS)
    slides = c.values.get("sliding_window", WINDOW) is not None
    default = [FULL] * layers
    if slides:
        pattern: Any = c.get("sliding_window_pattern", EVERY)
        if isinstance(pattern, str):
            if set(pattern[:-1]) != {"L"} or pattern[-1:] != "G":
                raise ModelError(
                    f"{c.where}: sliding_window_pattern is {pattern!r:.40}, expected a number, or "
                    "several L and a G"
                )
            pattern = len(pattern)
        stated = Settings({"sliding_window_pattern": pattern}, c.where)
        every = stated.count("sliding_window_pattern")
        default = [KINDS[(i + 1) % every == 0] for i in range(layers)]
    kinds = read_layer_types(c, layers, KINDS, default)
    if not slides and SLIDING in kinds:
        raise ModelError(
            f"{c.where}: layer_types names {SLIDING}, but sliding_window is null; set it to a "
            "number of tokens"
        )
    window = c.count("sliding_window", WINDOW) if slides else None
    return tuple(window if kind == SLIDING else None for kind in kinds)
