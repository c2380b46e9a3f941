"""Llama (arXiv:2407.21783), Mistral (arXiv:2310.06825) and Granite: RoPE, grouped heads, RMS norms
before, SwiGLU, in Mistral perhaps a window, in Granite four multipliers, in Granite 4 Vision and
Granite for Docling features of pictures before several layers, in HyperCLOVA X (arXiv:2601.03286)
norms after each block as well.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from mtmd.base.errors import ModelError
from mtmd.kernels import ops
from mtmd.kernels.checkpoint.canonical import Parameter, adjacent_pairs
from mtmd.kernels.checkpoint.rotary import Rotary, read_rotary, rope_settings
from mtmd.kernels.checkpoint.settings import MAX_HEADS, MAX_LAYERS, MAX_WIDTH, Settings
from mtmd.kernels.graph import Node, WeightSource
from mtmd.kernels.layers import Weights
from mtmd.kernels.plan.flash_choice import AttentionForm
from mtmd.llm.blocks import (
    Multipliers,
    added,
    attend,
    cache_keys_values,
    deepstack,
    logits,
    queries_keys_values,
    read_heads,
    swiglu,
    token_embeddings,
)
from mtmd.llm.gguf_keys import GgufText, decoder_keys
from mtmd.llm.inputs import TextInputs
from mtmd.llm.parameters import (
    ATTENTION,
    COPIED_HEAD,
    MLP,
    attention_tensors,
    decoder_parameters,
    mlp_tensors,
    prefixed,
)
from mtmd.llm.state import KV

PREFIXES = (
    "language_model.model.",
    "model.language_model.",
    "model.language_model.model.",
    "model.text_model.",
    "model.",
    "language_model.",
    "llm.model.",
)
# What transformers takes for keys that a config.json leaves out, by model_type.
LLAMA: dict[str, Any] = {
    "layers": 32,
    "ffn": 11008,
    "groups": None,
    "head": None,
    "vocabulary": 32000,
    "context": 2048,
    "eps": 1e-6,
}
MISTRAL = LLAMA | {"ffn": 14336, "groups": 8, "context": 131072, "window": 4096}
MINISTRAL = MISTRAL | {
    "layers": 34,
    "head": 128,
    "vocabulary": 131072,
    "context": 262144,
    "eps": 1e-5,
    "window": None,
}
DEFAULTS = {
    "llama": LLAMA,
    "mistral": MISTRAL,
    "ministral3": MINISTRAL,
    "granite": LLAMA,
    "granite4_vision_text": LLAMA,
    "granite_docling_text": LLAMA,
    "hyperclovax": LLAMA,
    "minicpmv": LLAMA,
}
GRANITE = ("granite", "granite4_vision_text", "granite_docling_text", "hyperclovax")
DOCLING: dict[str, Any] = {
    "vocab_size": 133800,
    "hidden_size": 1024,
    "intermediate_size": 2048,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "max_position_embeddings": 32768,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": True,
    "embedding_multiplier": 12.0,
    "logits_scaling": 4.0,
    "residual_multiplier": 0.263,
    "attention_multiplier": 0.015625,
    "deepstack_visual_indexes": [3, 7, 10],
}
WINDOWED, BIASED = ("mistral", "ministral3"), ("llama", *GRANITE, "minicpmv")
SPATIAL_LAYERS = [12, 15, 18, 21]  # that features of the last depth are for
UNSCALED = ("llava_next",)  # models whose reference leaves `logits_scaling` out
GGUF_KINDS = {
    "embedding_scale": "granite",
    "attention.temperature_scale": "ministral3",
    "attention.sliding_window": "mistral",
}  # keys that tell


@dataclass(frozen=True)
class LlamaText:
    depth: int
    width: int
    ffn: int
    heads: int
    groups: int
    head: int
    vocabulary: int
    context: int
    eps: float
    rotary: Rotary
    window: int | None
    attention_bias: bool
    mlp_bias: bool
    tied: bool
    divided: bool  # the rotary frequencies by a tensor, as Llama 3 has them in GGUF
    temper: tuple[float, float] | None  # queries grow with their position, in Ministral 3
    times: Multipliers | None
    stacked: tuple[int, ...]  # layers before which features of pictures are added, the first of all
    scales_pictures: bool  # whether `times` counts for them as for the text
    after: bool  # whether what a block gives is normed, too

    @property
    def unused(self) -> tuple[str, ...]:
        return (r".*\.rotary_emb\.inv_freq", *((COPIED_HEAD,) if self.tied else ()))

    @property
    def layers(self) -> list[tuple[KV]]:
        return [(KV(self.groups, self.head),)] * self.depth

    @property
    def image_width(self) -> int:
        return self.width * max(len(self.stacked), 1)

    def parameters(self) -> Mapping[str, Parameter]:
        layer = {
            "attn_norm": ("input_layernorm", (self.width,)),
            **attention_tensors(self.width, self.heads, self.groups, self.head),
            "ffn_norm": ("post_attention_layernorm", (self.width,)),
            **mlp_tensors(self.width, self.ffn),
        }
        if self.after:
            layer |= {
                "post_attention_norm": ("post_norm1", (self.width,)),
                "post_ffw_norm": ("post_norm2", (self.width,)),
            }
        parameters = decoder_parameters(
            prefixed(PREFIXES),
            [layer] * self.depth,
            vocabulary=self.vocabulary,
            width=self.width,
            tied=self.tied,
            biased=ATTENTION * self.attention_bias + MLP * self.mlp_bias,
            converts={"attn_q": adjacent_pairs(self.heads), "attn_k": adjacent_pairs(self.groups)},
        )
        if self.divided:
            parameters["rope_freqs.weight"] = Parameter((self.head // 2,), ("rope_freqs.weight",))
        return parameters

    def graph(self, inputs: TextInputs, weights: WeightSource, attention: AttentionForm) -> Node:
        w = Weights(weights, inputs.dtype)
        divisors = w.tensor("rope_freqs.weight", torch.float32) if self.divided else None
        angles, temper = inputs.angles(self.rotary, divisors=divisors), inputs.growth(self.temper)
        bounds, times = inputs.bounds(self.window), self.times
        scale = times.embedding if times else 1.0
        if self.scales_pictures:
            x = token_embeddings(inputs, w)
            x = ops.scale(x, factor=scale, name="embd.scaled") if times else x
        else:
            x = token_embeddings(inputs, w, scale)
        for layer in inputs.layers(self.depth):
            at = f"blk.{layer}"
            if layer and layer in self.stacked:
                x = deepstack(x, self.stacked.index(layer), at, inputs)
            y = w.rms_norm(x, f"{at}.attn_norm", self.eps)
            q, k, v = queries_keys_values(
                y, at, w, heads=self.heads, groups=self.groups, bias=self.attention_bias
            )
            q = ops.rope(q, angles, pairs="adjacent", name=f"{at}.attn_q.rope")
            k = ops.rope(k, angles, pairs="adjacent", name=f"{at}.attn_k.rope")
            q = q if temper is None else ops.mul(q, temper, name=f"{at}.attn_q.tempered")
            y = attend(
                q,
                cache_keys_values(k, v, layer, inputs),
                at,
                attention,
                bounds=bounds,
                scale=times.attention if times else None,
            )
            y = w.linear(y, f"{at}.attn_output", bias=self.attention_bias)
            y = w.rms_norm(y, f"{at}.post_attention_norm", self.eps) if self.after else y
            x = added(y, x, f"{at}.attn", times)
            y = swiglu(w.rms_norm(x, f"{at}.ffn_norm", self.eps), at, w, bias=self.mlp_bias)
            y = w.rms_norm(y, f"{at}.post_ffw_norm", self.eps) if self.after else y
            x = added(y, x, f"{at}.ffn", times)
        x = logits(x, inputs, w, eps=self.eps, tied=self.tied)
        if times is None or times.logits == 1:
            return x
        return ops.scale(x, factor=1 / times.logits, name="logits.scaled")


def to_gguf(text: LlamaText) -> GgufText:
    """Return the architecture, keys and tensors of a GGUF that says the same."""
    keys = decoder_keys(text) | {"rope.dimension_count": text.head}
    if text.window is not None:
        keys["attention.sliding_window"] = text.window
    if text.temper is not None:
        keys["attention.temperature_scale"] = text.temper[0]
    if text.times is not None:
        keys |= text.times.gguf_keys()
        if text.stacked:
            parts = {layer: part for part, layer in enumerate(text.stacked) if part}
            keys["deepstack_mapping"] = [parts.get(layer, -1) for layer in range(text.depth)]
        refused = "norms after blocks" if text.after else ""
        if text.stacked and text.scales_pictures:
            refused = "scaled pictures with features for layers"
        return GgufText("granite", keys, text.rotary, refused=refused)
    return GgufText("llama" if text.temper is None else "mistral3", keys, text.rotary)


def from_gguf(keys: Settings, names: Collection[str]) -> dict[str, Any]:
    """Return what config.json would say beyond the common keys."""
    if keys.get("expert_count", 0):
        raise ModelError(
            f"{keys.where}: expert_count is {keys.count('expert_count')}; experts are not read in "
            "this architecture"
        )
    head = keys.get("attention.key_length", None) or keys.count("embedding_length") // keys.count(
        "attention.head_count"
    )
    keys.choice("rope.dimension_count", (head,), head)
    return {
        "head_dim": head,
        "attention_bias": "blk.0.attn_q.bias" in names,
        "mlp_bias": "blk.0.ffn_up.bias" in names,
        "rope_freqs": "rope_freqs.weight" in names,
        "llama_4_scaling_beta": keys.get("attention.temperature_scale", None),
        "embedding_multiplier": keys.get("embedding_scale", None),
        "residual_multiplier": keys.get("residual_scale", None),
        "attention_multiplier": keys.get("attention.scale", None) or head**-0.5,
        "logits_scaling": keys.get("logit_scale", None),
        "stacked_layers": _stacked_layers(keys),
        "model_type": next(
            (kind for key, kind in GGUF_KINDS.items() if keys.get(key, None) is not None), "llama"
        ),
    }


def _stacked_layers(keys: Settings) -> list[int]:
    """The layers that get features, in the order of those; none where a file has none. Raises
    ModelError.
    """
    parts: object = keys.get("deepstack_mapping", [])
    given = (
        {part: layer for layer, part in enumerate(parts) if part != -1}
        if isinstance(parts, (list, tuple))
        else {0: 0}
    )
    if given and sorted(given) != [*range(1, len(given) + 1)]:
        raise ModelError(
            f"{keys.where}: deepstack_mapping is {parts!r:.60}, expected -1 for each layer, or the "
            "number of its features, from 1 on"
        )
    return [0, *(given[part] for part in sorted(given))] if given else []


def read(c: Settings) -> LlamaText:
    """Read it from config.json or its text_config, with transformers' defaults; ModelError where it
    is impossible.
    """
    known = DEFAULTS[kind := c.choice("model_type", DEFAULTS, "llama")]
    if kind == "granite_docling_text":
        given = {key: value for key, value in c.values.items() if value is not None}
        c = Settings({**DOCLING, **given}, c.where)
    c.choice("hidden_act", ("silu",), "silu")
    width, context = (
        c.count("hidden_size", 4096, maximum=MAX_WIDTH),
        c.count("max_position_embeddings", known["context"]),
    )
    count, groups, head = read_heads(
        c,
        32,
        known["groups"],
        known["head"] or width // c.count("num_attention_heads", 32, maximum=MAX_HEADS),
    )
    rope = rope_settings(c)
    # A window that is null is none; one that is left out is the default.
    has_window = kind in WINDOWED and c.values.get("sliding_window", known["window"]) is not None
    period = rope.number("original_max_position_embeddings", context)
    growth = rope if rope.get("llama_4_scaling_beta", None) is not None else c
    temper = (growth.number("llama_4_scaling_beta"), period) if kind == "ministral3" else None
    return LlamaText(
        depth=c.count("num_hidden_layers", known["layers"], maximum=MAX_LAYERS),
        width=width,
        ffn=c.count("intermediate_size", known["ffn"], maximum=MAX_WIDTH),
        heads=count,
        groups=groups,
        head=head,
        vocabulary=c.count("vocab_size", known["vocabulary"]),
        context=context,
        eps=c.number("rms_norm_eps", known["eps"]),
        rotary=read_rotary(rope, head, c.number("rope_theta", 1e4), context),
        window=c.count("sliding_window", known["window"]) if has_window else None,
        attention_bias=kind in BIASED and c.flag("attention_bias", False),
        mlp_bias=kind in BIASED and c.flag("mlp_bias", False),
        tied=c.flag("tie_word_embeddings", False),
        divided=c.flag("rope_freqs", False),
        temper=temper,
        times=_read_multipliers(c, kind, head) if kind in GRANITE else None,
        stacked=(stacked := _read_stacked(c, kind)),
        scales_pictures=not stacked or kind == "granite_docling_text",
        after=kind == "hyperclovax" and c.flag("use_post_norm", True),
    )


def _read_stacked(c: Settings, kind: str) -> tuple[int, ...]:
    """The decoder's layers of Granite 4 Vision's maps, or what a GGUF says of them."""
    given: Any = c.get("stacked_layers", [])
    if kind == "granite4_vision_text":
        pairs: Any = c.get("deepstack_layer_map", [])  # both checked by the encoder
        given = [layer for _, layer in pairs]
        given += c.get("spatial_target_layers", SPATIAL_LAYERS)
    elif kind == "granite_docling_text":
        given = [*range(len(c.get("deepstack_visual_indexes", [])) + 1)]
    depth = c.count("num_hidden_layers", DEFAULTS[kind]["layers"], maximum=MAX_LAYERS)
    if any(type(layer) is not int or not 0 <= layer < depth for layer in given):
        raise ModelError(
            f"{c.where}: pictures have features for layers {given!r:.60}, expected numbers below "
            f"{depth}, the layers of the decoder"
        )
    return tuple(sorted(given))


def _read_multipliers(c: Settings, kind: str, head: int) -> Multipliers:
    """Logits are divided where the reference does it: not in a model that sees; HyperCLOVA X
    multiplies by the same number.
    """
    clova, scaling = kind == "hyperclovax", c.number("logits_scaling", 1.0)
    return Multipliers(
        c.number("embedding_multiplier", 1.0),
        c.number("residual_multiplier", 1.0),
        c.number("attention_multiplier", head**-0.5 if clova else 1.0),
        1.0 if c.get("part_of", None) in UNSCALED else 1 / scaling if clova else scaling,
    )
