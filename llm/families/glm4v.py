"""GLM-4.1V's text, GLM-4 with M-RoPE: norms before and after, half of each head turns, gate and way
up in one matrix (arXiv:2507.01006).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from mtmd.kernels import ops
from mtmd.kernels.checkpoint.canonical import Parameter
from mtmd.kernels.checkpoint.rotary import Rotary, read_rotary
from mtmd.kernels.checkpoint.settings import MAX_HEADS, MAX_LAYERS, MAX_WIDTH, Settings
from mtmd.kernels.errors import ModelError
from mtmd.kernels.graph import Node, WeightSource
from mtmd.kernels.layers import Weights
from mtmd.kernels.plan.flash import AttentionForm
from mtmd.llm.blocks import by_sections, heads, logits, read_heads, remember, token_embeddings
from mtmd.llm.engine.inputs import TextInputs
from mtmd.llm.engine.state import KV

PREFIXES = ("model.language_model.", "language_model.model.", "model.")
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
    rotary: Rotary

    @property
    def unused(self) -> tuple[str, ...]:
        return (r"(language_model\.)?lm_head\.weight", r"output\.weight") if self.tied else ()

    @property
    def layers(self) -> list[tuple[KV]]:
        return [(KV(self.groups, self.head),)] * self.depth

    @property
    def image_width(self) -> int:
        return self.width

    def parameters(self) -> Mapping[str, Parameter]:
        width, q, kv = self.width, self.heads * self.head, self.groups * self.head
        names: dict[str, tuple[str, tuple[int, ...]]] = {
            "attn_norm": ("input_layernorm", (width,)),
            "post_attention_norm": ("post_self_attn_layernorm", (width,)),
            "ffn_norm": ("post_attention_layernorm", (width,)),
            "post_ffw_norm": ("post_mlp_layernorm", (width,)),
            "attn_q": ("self_attn.q_proj", (q, width)),
            "attn_k": ("self_attn.k_proj", (kv, width)),
            "attn_v": ("self_attn.v_proj", (kv, width)),
            "attn_output": ("self_attn.o_proj", (width, q)),
            "ffn_up": ("mlp.gate_up_proj", (2 * self.ffn, width)),
            "ffn_down": ("mlp.down_proj", (width, self.ffn)),
        }
        dims = 2 * len(self.rotary.frequencies)
        converts = {"attn_q": _halves(self.heads, dims), "attn_k": _halves(self.groups, dims)}
        found = {
            "token_embd.weight": Parameter((self.vocabulary, width), _names("embed_tokens.weight")),
            "output_norm.weight": Parameter((width,), _names("norm.weight")),
        }
        if not self.tied:
            found["output.weight"] = Parameter(
                (self.vocabulary, width), ("lm_head.weight", "language_model.lm_head.weight")
            )
        for layer in range(self.depth):
            for part, (name, shape) in names.items():
                at, source, convert = (
                    f"blk.{layer}.{part}",
                    f"layers.{layer}.{name}",
                    converts.get(part),
                )
                found[f"{at}.weight"] = Parameter(
                    shape, _names(f"{source}.weight"), convert=convert
                )
                if part in ("attn_q", "attn_k", "attn_v"):
                    found[f"{at}.bias"] = Parameter(
                        shape[:1], _names(f"{source}.bias"), convert=convert
                    )
        return found

    def graph(self, inputs: TextInputs, weights: WeightSource, attention: AttentionForm) -> Node:
        w = Weights(weights, inputs.dtype)
        x = token_embeddings(inputs, w)
        for layer in range(self.depth):
            x = self._layer(x, layer, inputs, w, attention)
        return logits(x, inputs, w, self.eps, self.tied)

    def _layer(
        self, x: Node, layer: int, inputs: TextInputs, w: Weights, attention: AttentionForm
    ) -> Node:
        at, rows, angles = f"blk.{layer}", x.shape[0], inputs.angles(self.rotary)
        y = w.rms_norm(x, f"{at}.attn_norm", self.eps)
        q, k, v = (
            heads(w.linear(y, f"{at}.{part}", bias=True), count, f"{at}.{part}")
            for part, count in (
                ("attn_q", self.heads),
                ("attn_k", self.groups),
                ("attn_v", self.groups),
            )
        )
        q, k = (
            ops.rope(q, angles, name=f"{at}.attn_q.rope"),
            ops.rope(k, angles, name=f"{at}.attn_k.rope"),
        )
        keys, values = remember(k, v, layer, inputs)
        q = ops.reshape(q, shape=(1, rows, self.heads, self.head), name=f"{at}.attn_q.batch")
        mixed = attention(
            q, keys, values, None, inputs.bounds(), scale=self.head**-0.5, name=f"{at}.attn"
        )
        y = w.linear(
            ops.reshape(mixed, shape=(rows, self.heads * self.head), name=f"{at}.attn.flat"),
            f"{at}.attn_output",
        )
        x = ops.add(
            w.rms_norm(y, f"{at}.post_attention_norm", self.eps), x, name=f"{at}.attn_residual"
        )
        both = w.linear(w.rms_norm(x, f"{at}.ffn_norm", self.eps), f"{at}.ffn_up")
        gate, up = (
            ops.columns(both, start=i * self.ffn, stop=(i + 1) * self.ffn, name=f"{at}.ffn_{part}")
            for i, part in enumerate(("gate", "way_up"))
        )
        y = w.linear(ops.silu_mul(gate, up, name=f"{at}.ffn_gated"), f"{at}.ffn_down")
        return ops.add(w.rms_norm(y, f"{at}.post_ffw_norm", self.eps), x, name=f"{at}.ffn_residual")


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


def from_gguf(keys: Settings, names: Collection[str]) -> dict[str, Any]:  # noqa: ARG001
    """What config.json would say beyond the common keys."""
    parts = keys.get("rope.dimension_sections", None)
    if not isinstance(parts, (list, tuple)):
        raise ModelError(
            f"{keys.where}: rope.dimension_sections is {parts!r:.40}, expected sections of M-RoPE; "
            "of this architecture only "
            "the models that see are read"
        )
    return {
        "rope_parameters": {"mrope_section": parts[:3]},
        "rope_dimension_count": keys.get("rope.dimension_count", None),
    }


def read(c: Settings) -> Glm4Text:
    """From config.json or its text_config, with transformers' defaults; ModelError where it cannot
    be followed.
    """
    c.choice("hidden_act", ("silu",), "silu")
    width, context = (
        c.count("hidden_size", 4096, most=MAX_WIDTH),
        c.count("max_position_embeddings", 32768),
    )
    size = width // c.count("num_attention_heads", 32, most=MAX_HEADS)
    c.choice("head_dim", (size,), size)  # another the reference would follow in its angles alone
    groups = None if "num_key_value_heads" in c.values else 2  # null there means as many as heads
    count, groups, head = read_heads(c, 32, groups, size)
    rope = Settings(
        {**c.part("rope_scaling").values, **c.part("rope_parameters").values},
        f"{c.where}: rope_parameters",
    )
    share = rope.number("partial_rotary_factor", c.number("partial_rotary_factor", 1.0))
    dims = c.count("rope_dimension_count", int(head * share))  # GGUF's way to say it
    if dims > head:
        raise ModelError(
            f"{c.where}: {dims} dimensions of a head of {head} turn, expected no more than it has"
        )
    rotary = by_sections(
        read_rotary(rope, dims, c.number("rope_theta", 1e4), context),
        rope,
        dims,
        SECTIONS,
        interleaved=False,
    )
    return Glm4Text(
        c.count("num_hidden_layers", 40, most=MAX_LAYERS),
        width,
        c.count("intermediate_size", 13696, most=MAX_WIDTH),
        count,
        groups,
        head,
        c.count("vocab_size", 151552),
        context,
        c.number("rms_norm_eps", 1e-5),
        c.flag("tie_word_embeddings", False),
        rotary,
    )


def _names(name: str) -> tuple[str, ...]:
    return tuple(prefix + name for prefix in PREFIXES)
