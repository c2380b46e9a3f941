"""GLM-4.1V's text, GLM-4 with M-RoPE: norms before and after, half of each head turns, gate and way
up in one matrix (arXiv:2507.01006).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from mtmd.base.errors import ModelError
from mtmd.kernels import ops
from mtmd.kernels.checkpoint.canonical import Parameter
from mtmd.kernels.checkpoint.rotary import Rotary, read_rotary, rope_settings, turning_dims
from mtmd.kernels.checkpoint.settings import MAX_HEADS, MAX_LAYERS, MAX_WIDTH, Settings
from mtmd.kernels.graph import Node, WeightSource
from mtmd.kernels.layers import Weights
from mtmd.kernels.plan.flash_choice import AttentionForm
from mtmd.llm.blocks import (
    attend,
    by_sections,
    cache_keys_values,
    fused_swiglu,
    logits,
    queries_keys_values,
    read_heads,
    token_embeddings,
)
from mtmd.llm.gguf_keys import GgufText, decoder_keys
from mtmd.llm.inputs import TextInputs
from mtmd.llm.parameters import COPIED_HEAD, QKV, attention_tensors, decoder_parameters, prefixed
from mtmd.llm.state import KV

PREFIXES = ("model.language_model.", "language_model.model.", "model.")
OCR = "glm_ocr_text"
SECTIONS = [8, 12, 12]  # where a config.json has none


@dataclass(frozen=True)
class Glm4Text:
    depth: int
    width: int
    ffn: int
    heads: int
    groups: int
    head: int
    vocabulary: int
    context: int
    eps: float
    tied: bool
    ocr: bool  # GLM-OCR's: without biases
    rotary: Rotary

    @property
    def unused(self) -> tuple[str, ...]:
        copied = (COPIED_HEAD,) if self.tied else ()
        if not self.ocr:
            return copied
        # A layer that drafts
        layers = r"((model\.language_model|language_model\.model)\.layers|blk)"
        return (*copied, rf"{layers}\.{self.depth}\..*")

    @property
    def layers(self) -> list[tuple[KV]]:
        return [(KV(self.groups, self.head),)] * self.depth

    @property
    def image_width(self) -> int:
        return self.width

    def parameters(self) -> Mapping[str, Parameter]:
        dims = 2 * len(self.rotary.frequencies)
        layer = {
            "attn_norm": ("input_layernorm", (self.width,)),
            **attention_tensors(self.width, self.heads, self.groups, self.head),
            "post_attention_norm": ("post_self_attn_layernorm", (self.width,)),
            "ffn_norm": ("post_attention_layernorm", (self.width,)),
            "ffn_up": ("mlp.gate_up_proj", (2 * self.ffn, self.width)),
            "ffn_down": ("mlp.down_proj", (self.width, self.ffn)),
            "post_ffw_norm": ("post_mlp_layernorm", (self.width,)),
        }
        return decoder_parameters(
            prefixed(PREFIXES),
            [layer] * self.depth,
            vocabulary=self.vocabulary,
            width=self.width,
            tied=self.tied,
            biased=() if self.ocr else QKV,
            converts={"attn_q": _halves(self.heads, dims), "attn_k": _halves(self.groups, dims)},
        )

    def graph(self, inputs: TextInputs, weights: WeightSource, attention: AttentionForm) -> Node:
        w = Weights(weights, inputs.dtype)
        angles, bounds = inputs.angles(self.rotary), inputs.bounds()
        x = token_embeddings(inputs, w)
        for layer in inputs.layers(self.depth):
            at = f"blk.{layer}"
            y = w.rms_norm(x, f"{at}.attn_norm", self.eps)
            q, k, v = queries_keys_values(
                y, at, w, heads=self.heads, groups=self.groups, bias=not self.ocr
            )
            q = ops.rope(q, angles, name=f"{at}.attn_q.rope")
            k = ops.rope(k, angles, name=f"{at}.attn_k.rope")
            y = attend(q, cache_keys_values(k, v, layer, inputs), at, attention, bounds=bounds)
            y = w.rms_norm(w.linear(y, f"{at}.attn_output"), f"{at}.post_attention_norm", self.eps)
            x = ops.add(y, x, name=f"{at}.attn_residual")
            y = fused_swiglu(w.rms_norm(x, f"{at}.ffn_norm", self.eps), at, w)
            y = w.rms_norm(y, f"{at}.post_ffw_norm", self.eps)
            x = ops.add(y, x, name=f"{at}.ffn_residual")
        return logits(x, inputs, w, eps=self.eps, tied=self.tied)


def _halves(heads: int, dims: int) -> Callable[[torch.Tensor], torch.Tensor]:
    """Rows of a q or k projection (or its bias) whose first `dims` of each head turn in pairs side
    by side, so that pairs are `dims` / 2 apart, as GGUF has them for M-RoPE.
    """

    def convert(tensor: torch.Tensor) -> torch.Tensor:
        rows: torch.Tensor = tensor.unflatten(0, (heads, -1))
        return torch.cat((rows[:, :dims:2], rows[:, 1:dims:2], rows[:, dims:]), 1).reshape(
            tensor.shape
        )

    return convert


def to_gguf(text: Glm4Text) -> GgufText:
    """Return the architecture and keys of a GGUF that says the same."""
    keys = decoder_keys(text)
    keys["rope.dimension_count"] = 2 * len(text.rotary.frequencies)
    return GgufText("glm4", keys, text.rotary)


def from_gguf(keys: Settings, names: Collection[str]) -> dict[str, Any]:
    """Return what config.json would say beyond the common keys."""
    parts = keys.get("rope.dimension_sections", None)
    if not isinstance(parts, (list, tuple)):
        raise ModelError(
            f"{keys.where}: rope.dimension_sections is {parts!r:.40}, expected sections of M-RoPE; "
            "of this architecture only "
            "the models that see are read"
        )
    return {
        "model_type": "glm4v_text" if "blk.0.attn_q.bias" in names else OCR,
        "num_hidden_layers": keys.count("block_count", maximum=MAX_LAYERS)
        - (keys.count("nextn_predict_layers") if keys.get("nextn_predict_layers", 0) else 0),
        "rope_parameters": {"mrope_section": parts[:3]},
        "rope_dimension_count": keys.get("rope.dimension_count", None),
    }


def read(c: Settings) -> Glm4Text:
    """Read it from config.json or its text_config, with transformers' defaults; ModelError where it
    cannot be followed.
    """
    c.choice("hidden_act", ("silu",), "silu")
    width, context = (
        c.count("hidden_size", 4096, maximum=MAX_WIDTH),
        c.count("max_position_embeddings", 32768),
    )
    size = width // c.count("num_attention_heads", 32, maximum=MAX_HEADS)
    ocr = c.get("model_type", "") == OCR
    if ocr:
        size = c.count("head_dim", 128, maximum=MAX_WIDTH)
    else:  # another one the reference would follow in its angles alone
        c.choice("head_dim", (size,), size)
    groups = None if "num_key_value_heads" in c.values else 2  # null there means as many as heads
    count, groups, head = read_heads(c, 32, groups, size)
    rope = rope_settings(c)
    share = rope.number("partial_rotary_factor", c.number("partial_rotary_factor", 1.0))
    dims = c.count(
        "rope_dimension_count", turning_dims(head, share, c.where)
    )  # GGUF's way to say it
    if dims > head:
        raise ModelError(
            f"{c.where}: {dims} dimensions of a head of {head} are rotated, "
            "expected no more than it has"
        )
    rotary = by_sections(
        read_rotary(rope, dims, c.number("rope_theta", 1e4), context),
        rope,
        dims,
        SECTIONS,
        interleaved=False,
    )
    return Glm4Text(
        depth=c.count("num_hidden_layers", 40, maximum=MAX_LAYERS),
        width=width,
        ffn=c.count("intermediate_size", 13696, maximum=MAX_WIDTH),
        heads=count,
        groups=groups,
        head=head,
        vocabulary=c.count("vocab_size", 151552),
        context=context,
        eps=c.number("rms_norm_eps", 1e-5),
        tied=c.flag("tie_word_embeddings", False),
        ocr=ocr,
        rotary=rotary,
    )
