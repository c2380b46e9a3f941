"""Qwen2 (arXiv:2407.10671), and with M-RoPE the text of Qwen2-VL (arXiv:2409.12191) and Qwen2.5-VL:
biases on queries, keys and values. The text of PaddleOCR-VL has none, or all.
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
    logits,
    queries_keys_values,
    read_heads,
    read_layer_types,
    swiglu,
    token_embeddings,
)
from mtmd.llm.gguf_keys import GgufText, decoder_keys
from mtmd.llm.inputs import TextInputs
from mtmd.llm.parameters import (
    ATTENTION,
    COPIED_HEAD,
    MLP,
    QKV,
    attention_tensors,
    decoder_parameters,
    mlp_tensors,
    prefixed,
)
from mtmd.llm.state import KV

KINDS = ("full_attention", "sliding_attention")
PREFIXES = (
    "model.",
    "model.language_model.",
    "language_model.model.",
    "thinker.model.",
    "llm.model.",
)
# What transformers takes for keys that a config.json leaves out, alone and with pictures.
PLAIN: dict[str, Any] = {
    "vocabulary": 151936,
    "width": 4096,
    "ffn": 22016,
    "layers": 32,
    "heads": 32,
    "groups": 32,
    "eps": 1e-6,
    "base": 1e4,
    "sections": None,
    "full": 28,
}
PICTURES: dict[str, Any] = {
    "vocabulary": 152064,
    "width": 8192,
    "ffn": 29568,
    "layers": 80,
    "heads": 64,
    "groups": 8,
    "eps": 1e-5,
    "base": 1e6,
    "sections": [16, 24, 24],
    "full": 80,
}
OMNI: dict[str, Any] = {
    **PICTURES,
    "width": 3584,
    "ffn": 18944,
    "layers": 28,
    "heads": 28,
    "groups": 4,
    "eps": 1e-6,
    "full": 28,
}
# Ernie 4.5's layers with positions as Qwen2-VL's
PADDLE: dict[str, Any] = {
    "vocabulary": 103424,
    "width": 1024,
    "ffn": 3072,
    "layers": 18,
    "heads": 16,
    "groups": 2,
    "head": 128,
    "eps": 1e-5,
    "base": 5e5,
    "context": 131072,
    "sections": [16, 24, 24],
    "full": 18,
    "tied": True,
}
KNOWN = {
    "qwen2": PLAIN,
    "dots_ocr": PLAIN,
    "minicpmv": PLAIN,
    "minicpmo": PLAIN,
    "qwen2_5_omni_text": OMNI,
    "paddleocr_vl_text": PADDLE,
    "paddleocr_vl": PADDLE,
}


@dataclass(frozen=True)
class Qwen2Text:
    """`windows`: for each layer how many tokens back it sees, None for all. `biased`: the parts of
    a layer that have a bias.
    """

    width: int
    ffn: int
    heads: int
    groups: int
    head: int
    vocabulary: int
    context: int
    eps: float
    tied: bool
    biased: tuple[str, ...]
    windows: tuple[int | None, ...]
    rotary: Rotary

    @property
    def unused(self) -> tuple[str, ...]:
        return (COPIED_HEAD,) if self.tied else ()

    @property
    def layers(self) -> list[tuple[KV]]:
        return [(KV(self.groups, self.head),)] * len(self.windows)

    @property
    def image_width(self) -> int:
        return self.width

    def parameters(self) -> Mapping[str, Parameter]:
        layer = {
            "attn_norm": ("input_layernorm", (self.width,)),
            **attention_tensors(self.width, self.heads, self.groups, self.head),
            "ffn_norm": ("post_attention_layernorm", (self.width,)),
            **mlp_tensors(self.width, self.ffn),
        }
        return decoder_parameters(
            prefixed(PREFIXES),
            [layer] * len(self.windows),
            vocabulary=self.vocabulary,
            width=self.width,
            tied=self.tied,
            biased=self.biased,
        )

    def graph(self, inputs: TextInputs, weights: WeightSource, attention: AttentionForm) -> Node:
        w, angles = Weights(weights, inputs.dtype), inputs.angles(self.rotary)
        x = token_embeddings(inputs, w)
        for layer, window in inputs.each(self.windows):
            at, bounds = f"blk.{layer}", inputs.bounds(window)
            y = w.rms_norm(x, f"{at}.attn_norm", self.eps)
            q, k, v = queries_keys_values(
                y, at, w, heads=self.heads, groups=self.groups, bias="attn_q" in self.biased
            )
            q = ops.rope(q, angles, name=f"{at}.attn_q.rope")
            k = ops.rope(k, angles, name=f"{at}.attn_k.rope")
            y = attend(q, cache_keys_values(k, v, layer, inputs), at, attention, bounds=bounds)
            y = w.linear(y, f"{at}.attn_output", bias="attn_output" in self.biased)
            x = ops.add(y, x, name=f"{at}.attn_residual")
            y = w.rms_norm(x, f"{at}.ffn_norm", self.eps)
            y = swiglu(y, at, w, bias="ffn_up" in self.biased)
            x = ops.add(y, x, name=f"{at}.ffn_residual")
        return logits(x, inputs, w, eps=self.eps, tied=self.tied)


def to_gguf(text: Qwen2Text) -> GgufText:
    """Return the architecture and keys of a GGUF that says the same."""
    keys = decoder_keys(text)
    if text.biased == QKV:
        return GgufText("qwen2vl" if text.rotary.axes else "qwen2", keys, text.rotary)
    return GgufText(
        "paddleocr", keys, text.rotary, refused="biases of every layer" if text.biased else ""
    )


def from_gguf(keys: Settings, names: Collection[str]) -> dict[str, Any]:
    """Return what config.json would say beyond the common keys; llama.cpp writes no sliding windows
    of this architecture.
    """
    parts = keys.get("rope.dimension_sections", None)
    kind = {} if "blk.0.attn_q.bias" in names else {"model_type": "paddleocr_vl_text"}
    return {
        **kind,
        "rope_parameters": {"mrope_section": parts[:3]} if isinstance(parts, (list, tuple)) else {},
        "use_sliding_window": False,
    }


def read(c: Settings) -> Qwen2Text:
    """Read it from config.json or its text_config, with transformers' defaults; ModelError where it
    cannot be followed.
    """
    known = KNOWN.get(c.get("model_type", "qwen2"), PICTURES)
    c.choice("hidden_act", ("silu",), "silu")
    width, context = (
        c.count("hidden_size", known["width"], maximum=MAX_WIDTH),
        c.count("max_position_embeddings", known.get("context", 32768)),
    )
    groups = (
        None if "num_key_value_heads" in c.values else known["groups"]
    )  # null there means as many as heads
    count, groups, head = read_heads(
        c,
        known["heads"],
        groups,
        known.get("head")
        or width // c.count("num_attention_heads", known["heads"], maximum=MAX_HEADS),
    )
    biased: tuple[str, ...] = QKV
    if known is PADDLE:
        biased = (*ATTENTION, *MLP) if c.flag("use_bias", False) else ()
    rope = rope_settings(c)
    rotary = read_rotary(rope, head, c.number("rope_theta", known["base"]), context)
    return Qwen2Text(
        width=width,
        ffn=c.count("intermediate_size", known["ffn"], maximum=MAX_WIDTH),
        heads=count,
        groups=groups,
        head=head,
        vocabulary=c.count("vocab_size", known["vocabulary"]),
        context=context,
        eps=c.number("rms_norm_eps", known["eps"]),
        tied=c.flag("tie_word_embeddings", known.get("tied", False)),
        biased=biased,
        windows=_windows(c, known["layers"], known["full"]),
        rotary=by_sections(rotary, rope, head, known["sections"], interleaved=False),
    )


def _windows(c: Settings, layers: int, full: int) -> tuple[int | None, ...]:
    """Return for each layer how many tokens back it sees: all in the first ones, and in the others
    too unless `use_sliding_window`.
    """
    layers, first = (
        c.count("num_hidden_layers", layers, maximum=MAX_LAYERS),
        c.get("max_window_layers", full),
    )
    if type(first) is not int:
        raise ModelError(
            f"{c.where}: max_window_layers is {first!r:.40}, expected a number of layers"
        )
    slides = (
        c.flag("use_sliding_window", False) and c.values.get("sliding_window", 4096) is not None
    )
    window = c.count("sliding_window", 4096) if slides else None
    kinds = read_layer_types(
        c, layers, KINDS, [KINDS[slides and i >= first] for i in range(layers)]
    )
    if window is None and KINDS[1] in kinds:
        raise ModelError(
            f"{c.where}: layer_types names {KINDS[1]}, but there is no sliding_window; set "
            "use_sliding_window to true"
        )
    return tuple(window if kind == KINDS[1] else None for kind in kinds)
