"""Gemma 4 (transformers' models/gemma4; there is no paper): sliding and full layers with heads of
two sizes, keys that are values, last layers that read earlier ones' keys, an input of its own for
each layer, experts beside the dense FFN.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from mtmd.kernels import ops
from mtmd.kernels.checkpoint.canonical import Parameter
from mtmd.kernels.checkpoint.settings import MAX_WIDTH, Settings
from mtmd.kernels.errors import ModelError
from mtmd.kernels.graph import Node, WeightSource
from mtmd.kernels.layers import Weights
from mtmd.kernels.plan.flash import AttentionForm
from mtmd.llm.blocks import heads, logits, remember, token_embeddings
from mtmd.llm.engine.inputs import TextInputs
from mtmd.llm.engine.state import KV
from mtmd.llm.expert_branch import ExpertBranch, read_expert_branch
from mtmd.llm.layer_kinds import FULL, SLIDING, LayerKinds, gguf_layer_kinds, read_layer_kinds
from mtmd.llm.per_layer import PerLayer, read_per_layer


@dataclass(frozen=True)
class Gemma4Text:
    width: int
    ffn: int
    double_wide: bool  # the FFN of layers without keys of their own
    stack: LayerKinds
    vocabulary: int
    context: int
    eps: float
    blocks: bool  # whether pictures see themselves in both directions, in sliding layers
    divided: bool  # the rotary frequencies of full layers, by a tensor, as GGUF has them
    per_layer: PerLayer | None
    experts: ExpertBranch | None
    softcap: float | None

    image_width = property(lambda self: self.width)

    @property
    def unused(self) -> tuple[str, ...]:
        return (r"(.*\.)?lm_head\.weight", *self.stack.unused)  # a copy of the tied token table

    @property
    def layers(self) -> list[tuple[KV, ...]]:
        return self.stack.states

    def parameters(self) -> Mapping[str, Parameter]:
        width = self.width
        found = {
            "token_embd.weight": Parameter(
                (self.vocabulary, width), _sources("embed_tokens.weight")
            ),
            "output_norm.weight": Parameter((width,), _sources("norm.weight")),
            **(self.per_layer.parameters(_sources) if self.per_layer else {}),
        }
        if self.divided:
            found["rope_freqs.weight"] = Parameter(
                (self.stack.sizes[FULL].head // 2,), ("rope_freqs.weight",)
            )
        for layer in range(len(self.stack.kinds)):
            at, theirs = f"blk.{layer}", f"layers.{layer}."
            for part, (name, shape) in self._tensors(layer).items():
                found[f"{at}.{part}.weight"] = Parameter(shape, _sources(f"{theirs}{name}.weight"))
            found[f"{at}.layer_output_scale.weight"] = Parameter(
                (1,), _sources(f"{theirs}layer_scalar")
            )
            if self.experts:
                found |= self.experts.parameters(at, theirs, _sources)
        return found

    def _tensors(self, layer: int) -> dict[str, tuple[str, tuple[int, ...]]]:
        """Names and shapes of a layer's matrices and norms."""
        stack, width, size = self.stack, self.width, self.stack.sizes[self.stack.kinds[layer]]
        ffn = self.ffn * 2 if self.double_wide and not stack.has_keys(layer) else self.ffn
        q, kv = stack.heads * size.head, size.groups * size.head
        found: dict[str, tuple[str, tuple[int, ...]]] = {
            "attn_norm": ("input_layernorm", (width,)),
            "post_attention_norm": ("post_attention_layernorm", (width,)),
            "ffn_norm": ("pre_feedforward_layernorm", (width,)),
            "post_ffw_norm": ("post_feedforward_layernorm", (width,)),
            "attn_q": ("self_attn.q_proj", (q, width)),
            "attn_output": ("self_attn.o_proj", (width, q)),
            "attn_q_norm": ("self_attn.q_norm", (size.head,)),
            "ffn_gate": ("mlp.gate_proj", (ffn, width)),
            "ffn_up": ("mlp.up_proj", (ffn, width)),
            "ffn_down": ("mlp.down_proj", (width, ffn)),
        }
        if stack.has_keys(layer):
            found |= {
                "attn_k": ("self_attn.k_proj", (kv, width)),
                "attn_k_norm": ("self_attn.k_norm", (size.head,)),
            }
        if stack.has_values(layer):
            found["attn_v"] = ("self_attn.v_proj", (kv, width))
        return found

    def graph(self, inputs: TextInputs, weights: WeightSource, attention: AttentionForm) -> Node:
        w, kept = Weights(weights, inputs.dtype), dict[str, tuple[Node, Node]]()
        x = token_embeddings(inputs, w, self.width**0.5)
        given = self.per_layer.inputs(x, inputs, w) if self.per_layer else None
        for layer in range(len(self.stack.kinds)):
            x = self._attend(x, layer, kept, inputs, w, attention)
            x = self._feed_forward(x, f"blk.{layer}", w)
            if self.per_layer and given:
                x = self.per_layer.add(x, layer, given, w)
            x = ops.mul(
                x, w.tensor(f"blk.{layer}.layer_output_scale.weight"), name=f"blk.{layer}.scaled"
            )
        found = logits(x, inputs, w, self.eps, tied=True)
        return ops.softcap(found, cap=self.softcap, name="logits.capped") if self.softcap else found

    def _attend(
        self,
        x: Node,
        layer: int,
        kept: dict[str, tuple[Node, Node]],
        inputs: TextInputs,
        w: Weights,
        attention: AttentionForm,
    ) -> Node:
        """`kept`: the keys and values that layers of each kind read, replaced by a layer that has
        its own
        """
        at, rows, stack, kind = f"blk.{layer}", x.shape[0], self.stack, self.stack.kinds[layer]
        size, divisors = (
            stack.sizes[kind],
            w.tensor("rope_freqs.weight", torch.float32) if self.divided and kind == FULL else None,
        )
        angles = inputs.angles(stack.ropes[kind], f"inp.angles.{kind}", divisors)
        y = w.rms_norm(x, f"{at}.attn_norm", self.eps)
        q = w.rms_norm(
            heads(w.linear(y, f"{at}.attn_q"), stack.heads, f"{at}.attn_q"),
            f"{at}.attn_q_norm",
            self.eps,
        )
        if stack.has_keys(layer):
            k = heads(w.linear(y, f"{at}.attn_k"), size.groups, f"{at}.attn_k")
            v = (
                heads(w.linear(y, f"{at}.attn_v"), size.groups, f"{at}.attn_v")
                if stack.has_values(layer)
                else k
            )
            k = ops.rope(
                w.rms_norm(k, f"{at}.attn_k_norm", self.eps), angles, name=f"{at}.attn_k.rope"
            )
            kept[kind] = remember(
                k, ops.rms_norm(v, eps=self.eps, name=f"{at}.attn_v_norm"), layer, inputs
            )
        q = ops.reshape(
            ops.rope(q, angles, name=f"{at}.attn_q.rope"),
            shape=(1, *q.shape),
            name=f"{at}.attn_q.batch",
        )
        bounds = (
            inputs.bounds(stack.window, blocks=self.blocks)
            if kind == SLIDING
            else inputs.bounds(blocks=False)
        )
        mixed = attention(q, *kept[kind], None, bounds, scale=1.0, name=f"{at}.attn")
        y = w.linear(
            ops.reshape(mixed, shape=(rows, stack.heads * size.head), name=f"{at}.attn.flat"),
            f"{at}.attn_output",
        )
        return ops.add(
            w.rms_norm(y, f"{at}.post_attention_norm", self.eps), x, name=f"{at}.attn_residual"
        )

    def _feed_forward(self, x: Node, at: str, w: Weights) -> Node:
        y = w.rms_norm(x, f"{at}.ffn_norm", self.eps)
        gated = ops.gelu_mul(
            w.linear(y, f"{at}.ffn_gate"),
            w.linear(y, f"{at}.ffn_up"),
            approximate="tanh",
            name=f"{at}.ffn_gated",
        )
        y = w.linear(gated, f"{at}.ffn_down")
        y = self.experts.add(y, x, at, w) if self.experts else y
        return ops.add(w.rms_norm(y, f"{at}.post_ffw_norm", self.eps), x, name=f"{at}.ffn_residual")


def from_gguf(keys: Settings, names: Collection[str]) -> dict[str, Any]:
    """What config.json would say beyond the common keys. Models with inputs for layers read
    pictures in one direction, others in both, as llama.cpp knows by their width.
    """
    ffn, own = (
        keys.get("feed_forward_length", None),
        keys.get("embedding_length_per_layer_input", 0),
    )
    ffn = ffn if isinstance(ffn, (list, tuple)) and ffn else [ffn]
    return {
        **gguf_layer_kinds(keys, names),
        "intermediate_size": ffn[0],
        "use_double_wide_mlp": ffn[-1] != ffn[0],
        "hidden_size_per_layer_input": own,
        "use_bidirectional_attention": None if own else "vision",
        "rope_freqs": "rope_freqs.weight" in names,
        "enable_moe_block": "blk.0.ffn_gate_inp.weight" in names,
        "top_k_experts": keys.get("expert_used_count", None),
        "final_logit_softcapping": keys.get("final_logit_softcapping", None),
    }


def read(c: Settings) -> Gemma4Text:
    """From config.json's text_config, with transformers' defaults; ModelError where it is
    impossible.
    """
    c.choice("hidden_activation", ("gelu_pytorch_tanh",), "gelu_pytorch_tanh")
    if not c.flag("tie_word_embeddings", True) or c.flag("attention_bias", False):
        raise ModelError(
            f"{c.where}: tie_word_embeddings false and attention_bias true are not supported"
        )
    stack, width, eps = (
        read_layer_kinds(c),
        c.count("hidden_size", 2304, most=MAX_WIDTH),
        c.number("rms_norm_eps", 1e-6),
    )
    vocabulary, depth = c.count("vocab_size", 262144), len(stack.kinds)
    return Gemma4Text(
        width,
        c.count("intermediate_size", 9216, most=MAX_WIDTH),
        c.flag("use_double_wide_mlp", False),
        stack,
        vocabulary,
        c.count("max_position_embeddings", 131072),
        eps,
        c.choice("use_bidirectional_attention", ("vision", None), None) == "vision",
        c.flag("rope_freqs", False),
        read_per_layer(c, depth, width, eps, vocabulary),
        read_expert_branch(c, depth, width, eps),
        None
        if c.get("final_logit_softcapping", None) is None
        else c.number("final_logit_softcapping"),
    )


def _sources(name: str) -> tuple[str, ...]:
    return tuple(f"{prefix}{name}" for prefix in ("model.language_model.", "model."))
