"""Cohere 2 (arXiv:2504.00698): attention and FFN side by side behind one layer norm without bias,
rotary positions in sliding layers alone. Cohere Compass turns heads by halves and by rows and
columns of pictures, has settings of positions for each kind of layer, and its first layers get
image features of their own.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

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
    by_sections,
    cache_keys_values,
    deepstack,
    queries_keys_values,
    read_heads,
    read_layer_types,
    swiglu,
    token_embeddings,
)
from mtmd.llm.gguf_keys import PATTERN, GgufText, decoder_keys, sliding_layers
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

KINDS = SLIDING, FULL = ("sliding_attention", "full_attention")
PREFIXES = ("language_model.model.", "model.language_model.", "model.")
UNSCALED = ("aya_vision", "cohere2_vision")  # models whose reference leaves `logit_scale` out
COMPASS = "cohere_compass_text"
SECTIONS, DEPTHS = [24, 20, 20], [8, 16, 24]  # transformers' defaults


@dataclass(frozen=True)
class Cohere2Text:
    width: int
    ffn: int
    heads: int
    groups: int
    head: int
    vocabulary: int
    context: int
    eps: float
    windows: tuple[int | None, ...]  # of each layer
    rotary: Rotary | None  # of layers with a window, None where they have no positions
    full: Rotary | None  # of the others
    compass: bool  # whether it is Cohere Compass
    bias: bool  # of attention
    tied: bool
    logit_scale: float
    stacked: int  # of the first layers, that get image features of their own

    @property
    def unused(self) -> tuple[str, ...]:
        return (COPIED_HEAD,) if self.tied else ()

    @property
    def layers(self) -> list[tuple[KV]]:
        return [(KV(self.groups, self.head),)] * len(self.windows)

    @property
    def image_width(self) -> int:
        return self.width * (1 + self.stacked)

    def parameters(self) -> Mapping[str, Parameter]:
        layer = {
            "attn_norm": ("input_layernorm", (self.width,)),
            **attention_tensors(self.width, self.heads, self.groups, self.head),
            **mlp_tensors(self.width, self.ffn),
        }
        return decoder_parameters(
            prefixed(PREFIXES),
            [layer] * len(self.windows),
            vocabulary=self.vocabulary,
            width=self.width,
            tied=self.tied,
            biased=ATTENTION * self.bias,
        )

    def graph(self, inputs: TextInputs, weights: WeightSource, attention: AttentionForm) -> Node:
        w = Weights(weights, inputs.dtype)
        x = token_embeddings(inputs, w)
        for layer, window in inputs.each(self.windows):
            at = f"blk.{layer}"
            y = w.layer_norm(x, f"{at}.attn_norm", self.eps, bias=False)
            q, k, v = queries_keys_values(
                y, at, w, heads=self.heads, groups=self.groups, bias=self.bias
            )
            rotary, kind = (self.full, "full") if window is None else (self.rotary, "sliding")
            if rotary:
                angles = inputs.angles(rotary, f"inp.angles.{kind}")
                pairs = "half" if self.compass else "adjacent"
                q = ops.rope(q, angles, pairs=pairs, name=f"{at}.attn_q.rope")
                k = ops.rope(k, angles, pairs=pairs, name=f"{at}.attn_k.rope")
            mixed = attend(
                q,
                cache_keys_values(k, v, layer, inputs),
                at,
                attention,
                bounds=inputs.bounds(window),
            )
            mixed = w.linear(mixed, f"{at}.attn_output", bias=self.bias)
            x = ops.add(mixed, x, name=f"{at}.attn_residual")
            x = ops.add(swiglu(y, at, w), x, name=f"{at}.ffn_residual")
            if layer < self.stacked:
                x = deepstack(x, layer + 1, at, inputs)
        x = ops.take_rows(x, inputs.requested_rows(), name="wanted")
        x = w.layer_norm(x, "output_norm", self.eps, bias=False)
        x = w.linear(x, "token_embd" if self.tied else "output", name="logits")
        if self.logit_scale == 1:
            return x
        return ops.scale(x, factor=self.logit_scale, name="logits.scaled")


def to_gguf(text: Cohere2Text) -> GgufText:
    """Return the architecture and keys of a GGUF that says the same."""
    keys = decoder_keys(text) | {
        "attention.layer_norm_epsilon": text.eps,
        "attention.sliding_window": max(filter(None, text.windows), default=text.context),
        PATTERN: [window is not None for window in text.windows],
        "logit_scale": text.logit_scale,
        "rope.dimension_count": text.head,
    }
    refused = "positions for each kind of layer" if text.compass else ""
    refused = "biases of attention" if text.bias else refused
    return GgufText("cohere2", keys, text.rotary or Rotary(()), refused=refused)


def from_gguf(keys: Settings, names: Collection[str]) -> dict[str, Any]:
    """Return what config.json would say beyond the common keys; every fourth layer is full unless
    the file says otherwise.
    """
    head = keys.count("embedding_length") // keys.count("attention.head_count")
    head = keys.count("attention.key_length", head)
    keys.choice("rope.dimension_count", (head,), head)
    return {
        "head_dim": head,
        "layer_types": [KINDS[not slides] for slides in sliding_layers(keys, 4)],
        "layer_norm_eps": keys.number("attention.layer_norm_epsilon"),
        "logit_scale": keys.number("logit_scale"),
        "attention_bias": "blk.0.attn_q.bias" in names,
    }


def read(c: Settings) -> Cohere2Text:
    """Read it from config.json or its text_config, with transformers' defaults; ModelError where it
    is impossible.
    """
    c.choice("hidden_act", ("silu",), "silu")
    width, context = (
        c.count("hidden_size", 8192, maximum=MAX_WIDTH),
        c.count("max_position_embeddings", 8192),
    )
    count, groups, head = read_heads(
        c, 64, None, width // c.count("num_attention_heads", 64, maximum=MAX_HEADS)
    )
    whole, compass = c.get("part_of", None), c.get("model_type", None) == COMPASS
    stacked: object = c.get("deepstack_visual_indexes", DEPTHS) if compass and whole else []
    windows = _windows(c, 1 if compass else 4)
    if not isinstance(stacked, list) or len(stacked) > len(windows):
        raise ModelError(
            f"{c.where}: deepstack_visual_indexes is {stacked!r:.40}, expected a list of at most "
            f"{len(windows)}"
        )
    if compass:
        rotary, full = _rotaries(c, head, context)
    else:
        rotary = read_rotary(rope_settings(c), head, c.number("rope_theta", 1e4), context)
        full = None
    return Cohere2Text(
        width=width,
        ffn=c.count("intermediate_size", 22528, maximum=MAX_WIDTH),
        heads=count,
        groups=groups,
        head=head,
        vocabulary=c.count("vocab_size", 256000),
        context=context,
        eps=c.number("layer_norm_eps", 1e-5),
        windows=windows,
        rotary=rotary,
        full=full,
        compass=compass,
        bias=c.flag("attention_bias", False),
        tied=c.flag("tie_word_embeddings", not (compass and whole)),
        logit_scale=1.0
        if whole in UNSCALED
        else c.number("logit_scale", 1.0 if compass else 0.0625),
        stacked=len(stacked),
    )


def _rotaries(c: Settings, head: int, context: int) -> tuple[Rotary | None, Rotary | None]:
    """Return those of Cohere Compass's layers with a window and of the others, None for a kind that
    has no positions. A base beside them is of neither.
    """
    rope, made = rope_settings(c), list[Rotary | None]()
    if not any(kind in rope.values for kind in KINDS):
        raise ModelError(
            f"{rope.where}: settings of neither {SLIDING} nor {FULL}, expected those of each kind "
            "of layer"
        )
    for kind in KINDS:
        own, turning = rope.part(kind), None
        if own.values:
            turning = read_rotary(own, head, 1e4, context)
            turning = by_sections(turning, own, head, SECTIONS, interleaved=True)
        made.append(turning)
    return made[0], made[1]


def _windows(c: Settings, usual: int) -> tuple[int | None, ...]:
    """Return the windows of each layer; older settings say that each so many layers, or each
    `usual`, have one that is full.
    """
    layers, every = (
        c.count("num_hidden_layers", 40, maximum=MAX_LAYERS),
        c.count("sliding_window_pattern", usual),
    )
    kinds = read_layer_types(c, layers, KINDS, [KINDS[(i + 1) % every == 0] for i in range(layers)])
    if SLIDING in kinds and c.values.get("sliding_window", 4096) is None:
        raise ModelError(
            f"{c.where}: layer_types names {SLIDING}, but sliding_window is null; set it to a "
            "number of tokens"
        )
    window = c.count("sliding_window", 4096)
    return tuple(window if kind == SLIDING else None for kind in kinds)
