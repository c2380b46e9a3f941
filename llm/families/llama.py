"""Llama (arXiv:2407.21783) and Mistral (arXiv:2310.06825): RoPE, grouped heads, RMS norms before,
SwiGLU, in Mistral perhaps a window.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from mtmd.kernels import ops
from mtmd.kernels.checkpoint.canonical import Parameter, adjacent_pairs
from mtmd.kernels.checkpoint.rotary import Rotary, read_rotary
from mtmd.kernels.checkpoint.settings import MAX_HEADS, MAX_LAYERS, MAX_WIDTH, Settings
from mtmd.kernels.errors import ModelError
from mtmd.kernels.graph import Node, WeightSource, graph_input
from mtmd.kernels.layers import Weights
from mtmd.kernels.plan.flash import AttentionForm
from mtmd.llm.blocks import heads, logits, read_heads, remember, swiglu, token_embeddings
from mtmd.llm.engine.inputs import TextInputs
from mtmd.llm.engine.state import KV

PREFIXES = ("language_model.model.", "model.language_model.", "model.text_model.", "model.")
NAMES = {
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
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
DEFAULTS = {"llama": LLAMA, "mistral": MISTRAL, "ministral3": MINISTRAL}
GGUF_KINDS = {
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

    @property
    def unused(self) -> tuple[str, ...]:
        return (
            r".*\.rotary_emb\.inv_freq",
            *((r"(language_model\.)?lm_head\.weight",) if self.tied else ()),
        )

    @property
    def layers(self) -> list[tuple[KV]]:
        return [(KV(self.groups, self.head),)] * self.depth

    @property
    def image_width(self) -> int:
        return self.width

    def parameters(self) -> Mapping[str, Parameter]:
        width, q, kv = self.width, self.heads * self.head, self.groups * self.head
        shapes: dict[str, tuple[int, ...]] = {
            "attn_norm": (width,),
            "ffn_norm": (width,),
            "attn_q": (q, width),
            "attn_k": (kv, width),
            "attn_v": (kv, width),
            "attn_output": (width, q),
            "ffn_gate": (self.ffn, width),
            "ffn_up": (self.ffn, width),
            "ffn_down": (width, self.ffn),
        }
        converts = {"attn_q": adjacent_pairs(self.heads), "attn_k": adjacent_pairs(self.groups)}
        found = {
            "token_embd.weight": Parameter(
                (self.vocabulary, width), _sources("embed_tokens.weight")
            ),
            "output_norm.weight": Parameter((width,), _sources("norm.weight")),
        }
        if not self.tied:
            found["output.weight"] = Parameter(
                (self.vocabulary, width), ("lm_head.weight", "language_model.lm_head.weight")
            )
        if self.divided:
            found["rope_freqs.weight"] = Parameter((self.head // 2,), ("rope_freqs.weight",))
        for layer in range(self.depth):
            for part, shape in shapes.items():
                at, source, convert = (
                    f"blk.{layer}.{part}",
                    f"layers.{layer}.{NAMES[part]}",
                    converts.get(part),
                )
                found[f"{at}.weight"] = Parameter(
                    shape, _sources(f"{source}.weight"), convert=convert
                )
                if len(shape) == 2 and (
                    self.attention_bias if part.startswith("attn") else self.mlp_bias
                ):
                    found[f"{at}.bias"] = Parameter(
                        shape[:1], _sources(f"{source}.bias"), convert=convert
                    )
        return found

    def graph(self, inputs: TextInputs, weights: WeightSource, attention: AttentionForm) -> Node:
        w = Weights(weights, inputs.dtype)
        x, temper = token_embeddings(inputs, w), self._temper(inputs)
        for layer in range(self.depth):
            x = self._layer(x, layer, temper, inputs, w, attention)
        return logits(x, inputs, w, self.eps, self.tied)

    def _temper(self, inputs: TextInputs) -> Node | None:
        """What each query is multiplied by, [T, 1, 1]: 1 + beta log(1 + floor(position /
        period))
        """
        if self.temper is None:
            return None
        beta, period = self.temper
        return graph_input(
            "inp.temper",
            (inputs.tokens, 1, 1),
            inputs.dtype,
            lambda b: (1 + beta * (1 + (b.positions[0] / period).floor()).log()).view(-1, 1, 1),
        )

    def _layer(
        self,
        x: Node,
        layer: int,
        temper: Node | None,
        inputs: TextInputs,
        w: Weights,
        attention: AttentionForm,
    ) -> Node:
        at, rows = f"blk.{layer}", x.shape[0]
        angles = inputs.angles(
            self.rotary,
            divisors=w.tensor("rope_freqs.weight", torch.float32) if self.divided else None,
        )
        y = w.rms_norm(x, f"{at}.attn_norm", self.eps)
        q, k, v = (
            heads(w.linear(y, f"{at}.{part}", bias=self.attention_bias), count, f"{at}.{part}")
            for part, count in (
                ("attn_q", self.heads),
                ("attn_k", self.groups),
                ("attn_v", self.groups),
            )
        )
        q, k = (
            ops.rope(part, angles, pairs="adjacent", name=f"{at}.{name}.rope")
            for part, name in ((q, "attn_q"), (k, "attn_k"))
        )
        q = q if temper is None else ops.mul(q, temper, name=f"{at}.attn_q.tempered")
        keys, values = remember(k, v, layer, inputs)
        q = ops.reshape(q, shape=(1, rows, self.heads, self.head), name=f"{at}.attn_q.batch")
        mixed = attention(
            q,
            keys,
            values,
            None,
            inputs.bounds(self.window),
            scale=self.head**-0.5,
            name=f"{at}.attn",
        )
        mixed = ops.reshape(mixed, shape=(rows, self.heads * self.head), name=f"{at}.attn.flat")
        x = ops.add(
            w.linear(mixed, f"{at}.attn_output", bias=self.attention_bias),
            x,
            name=f"{at}.attn_residual",
        )
        y = swiglu(w.rms_norm(x, f"{at}.ffn_norm", self.eps), at, w, bias=self.mlp_bias)
        return ops.add(y, x, name=f"{at}.ffn_residual")


def from_gguf(keys: Settings, names: Collection[str]) -> dict[str, Any]:
    """What config.json would say beyond the common keys."""
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
        "model_type": next(
            (kind for key, kind in GGUF_KINDS.items() if keys.get(key, None) is not None), "llama"
        ),
    }


def read(c: Settings) -> LlamaText:
    """From config.json or its text_config, with transformers' defaults; ModelError where it is
    impossible.
    """
    known = DEFAULTS[kind := c.choice("model_type", DEFAULTS, "llama")]
    c.choice("hidden_act", ("silu",), "silu")
    width, context = (
        c.count("hidden_size", 4096, most=MAX_WIDTH),
        c.count("max_position_embeddings", known["context"]),
    )
    count, groups, head = read_heads(
        c,
        32,
        known["groups"],
        known["head"] or width // c.count("num_attention_heads", 32, most=MAX_HEADS),
    )
    rope = c.part("rope_scaling" if c.get("rope_parameters", None) is None else "rope_parameters")
    # A window that is null is none; one that is left out is the default.
    has_window = kind != "llama" and c.values.get("sliding_window", known["window"]) is not None
    period = rope.number("original_max_position_embeddings", context)
    growth = rope if rope.get("llama_4_scaling_beta", None) is not None else c
    temper = (growth.number("llama_4_scaling_beta"), period) if kind == "ministral3" else None
    return LlamaText(
        c.count("num_hidden_layers", known["layers"], most=MAX_LAYERS),
        width,
        c.count("intermediate_size", known["ffn"], most=MAX_WIDTH),
        count,
        groups,
        head,
        c.count("vocab_size", known["vocabulary"]),
        context,
        c.number("rms_norm_eps", known["eps"]),
        read_rotary(rope, head, c.number("rope_theta", 1e4), context),
        c.count("sliding_window", known["window"]) if has_window else None,
        kind == "llama" and c.flag("attention_bias", False),
        kind == "llama" and c.flag("mlp_bias", False),
        c.flag("tie_word_embeddings", False),
        c.flag("rope_freqs", False),
        temper,
    )


def _sources(name: str) -> tuple[str, ...]:
    return tuple(prefix + name for prefix in PREFIXES)
