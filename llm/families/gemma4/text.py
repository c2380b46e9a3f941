"""Gemma 4 (transformers' models/gemma4; there is no paper): sliding and full layers with heads of
two sizes, keys that are values, last layers that read earlier ones' keys, an input of its own for
each layer, experts beside the dense FFN.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from mtmd.base.errors import ModelError
from mtmd.kernels import ops
from mtmd.kernels.checkpoint.canonical import Parameter
from mtmd.kernels.checkpoint.settings import MAX_WIDTH, Settings
from mtmd.kernels.graph import Node, WeightSource
from mtmd.kernels.layers import Weights
from mtmd.kernels.plan.flash_choice import AttentionForm
from mtmd.llm.blocks import KeysValues, attend, cache_keys_values, geglu, logits, token_embeddings
from mtmd.llm.families.gemma4.experts import ExpertBranch, read_expert_branch
from mtmd.llm.families.gemma4.layers import gguf_layer_kinds, layer_kind_keys, read_layer_kinds
from mtmd.llm.gguf_keys import GgufText, expert_keys
from mtmd.llm.inputs import TextInputs
from mtmd.llm.layer_kinds import FULL, LayerKinds
from mtmd.llm.parameters import COPIED_HEAD, Tensors, decoder_parameters, mlp_tensors, prefixed
from mtmd.llm.per_layer import PerLayer, read_per_layer
from mtmd.llm.state import KV

# What transformers takes for keys that a config.json of the 12B model leaves out, unlike others.
UNIFIED = {
    "hidden_size_per_layer_input": 0,
    "use_bidirectional_attention": "vision",
    "max_position_embeddings": 262144,
    "sliding_window": 1024,
    "num_key_value_heads": 4,
}
UNIFIED_PROJECTOR = "gemma4uv"  # by which a GGUF of the 12B model is known
SOURCE = prefixed(("model.language_model.", "model.", "language_model.model."))


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
    whole: bool  # in all layers, and beyond the window, as the 12B model's reference does
    divided: bool  # the rotary frequencies of full layers, by a tensor, as GGUF has them
    per_layer: PerLayer | None
    experts: ExpertBranch | None
    softcap: float | None
    tied: bool

    image_width = property(lambda self: self.width)

    @property
    def unused(self) -> tuple[str, ...]:
        return (COPIED_HEAD, *self.stack.unused)

    @property
    def layers(self) -> list[tuple[KV, ...]]:
        return self.stack.states

    def parameters(self) -> Mapping[str, Parameter]:
        depth = len(self.stack.kinds)
        parameters = decoder_parameters(
            SOURCE,
            [self._tensors(layer) for layer in range(depth)],
            vocabulary=self.vocabulary,
            width=self.width,
            tied=self.tied,
        )
        for layer in range(depth):
            at, theirs = f"blk.{layer}", f"layers.{layer}."
            parameters[f"{at}.layer_output_scale.weight"] = Parameter(
                (1,), SOURCE(f"{theirs}layer_scalar")
            )
            if self.experts:
                parameters |= self.experts.parameters(at, theirs, SOURCE)
        if self.per_layer:
            parameters |= self.per_layer.parameters(SOURCE)
        if self.divided:
            parameters["rope_freqs.weight"] = Parameter(
                (self.stack.sizes[FULL].head // 2,), ("rope_freqs.weight",)
            )
        return parameters

    def _tensors(self, layer: int) -> Tensors:
        """Names and shapes of a layer's matrices and norms."""
        stack, width = self.stack, self.width
        ffn = self.ffn * 2 if self.double_wide and not stack.has_keys(layer) else self.ffn
        return {
            "attn_norm": ("input_layernorm", (width,)),
            "post_attention_norm": ("post_attention_layernorm", (width,)),
            "ffn_norm": ("pre_feedforward_layernorm", (width,)),
            "post_ffw_norm": ("post_feedforward_layernorm", (width,)),
            **stack.tensors(layer, width),
            **mlp_tensors(width, ffn),
        }

    def graph(self, inputs: TextInputs, weights: WeightSource, attention: AttentionForm) -> Node:
        w, cached = Weights(weights, inputs.dtype), dict[str, KeysValues]()
        x = token_embeddings(inputs, w, self.width**0.5)
        layer_inputs = self.per_layer.inputs(x, inputs, w) if self.per_layer else None
        for layer, kind in inputs.each(self.stack.kinds):
            at = f"blk.{layer}"
            y = w.rms_norm(x, f"{at}.attn_norm", self.eps)
            divided = self.divided and kind == FULL
            divisors = w.tensor("rope_freqs.weight", torch.float32) if divided else None
            q, own = self.stack.queries_keys_values(
                y, layer, inputs, w, eps=self.eps, divisors=divisors
            )
            if own:
                cached[kind] = cache_keys_values(*own, layer, inputs)
            y = attend(q, cached[kind], at, attention, bounds=self._bounds(kind, inputs), scale=1.0)
            y = w.rms_norm(w.linear(y, f"{at}.attn_output"), f"{at}.post_attention_norm", self.eps)
            x = ops.add(y, x, name=f"{at}.attn_residual")
            y = geglu(w.rms_norm(x, f"{at}.ffn_norm", self.eps), at, w)
            y = self.experts.add(y, x, at, w) if self.experts else y
            y = w.rms_norm(y, f"{at}.post_ffw_norm", self.eps)
            x = ops.add(y, x, name=f"{at}.ffn_residual")
            if self.per_layer and layer_inputs:
                y = self.per_layer.output(x, layer, layer_inputs, w)
                x = ops.add(y, x, name=f"{at}.inp_residual")
            x = ops.mul(x, w.tensor(f"{at}.layer_output_scale.weight"), name=f"{at}.scaled")
        y = logits(x, inputs, w, eps=self.eps, tied=self.tied)
        return ops.softcap(y, cap=self.softcap, name="logits.capped") if self.softcap else y

    def _bounds(self, kind: str, inputs: TextInputs) -> Node:
        """Return what each token sees; the tokens of a picture each other, in most models in
        sliding layers alone.
        """
        if kind == FULL:
            return inputs.bounds(blocks=self.blocks and self.whole)
        return inputs.bounds(self.stack.window, blocks=self.blocks, whole=self.whole)


def to_gguf(text: Gemma4Text) -> GgufText:
    """Return the architecture and keys of a GGUF that says the same."""
    stack = text.stack
    keys = layer_kind_keys(stack) | {
        "context_length": text.context,
        "embedding_length": text.width,
        "attention.layer_norm_rms_epsilon": text.eps,
        "embedding_length_per_layer_input": text.per_layer.size if text.per_layer else 0,
        "feed_forward_length": text.ffn
        if not text.double_wide
        else [
            text.ffn * (1 + (text.double_wide and not stack.has_keys(layer)))
            for layer in range(len(stack.kinds))
        ],
    }
    if text.softcap is not None:
        keys["final_logit_softcapping"] = text.softcap
    if text.experts is not None:
        keys |= expert_keys(text.experts.experts)
    pad = text.per_layer.pad if text.per_layer else None
    projector = UNIFIED_PROJECTOR if text.whole else None
    return GgufText("gemma4", keys, stack.ropes[FULL], pad, projector=projector)


def from_gguf(keys: Settings, names: Collection[str]) -> dict[str, Any]:
    """Return what config.json would say beyond the common keys. Models with inputs for layers read
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
    """Read it from config.json's text_config, with transformers' defaults; ModelError where it is
    impossible.
    """
    unified = c.get("model_type", "") == "gemma4_unified_text"
    if unified:
        c = Settings({**UNIFIED, **c.values}, c.where)
    c.choice("hidden_activation", ("gelu_pytorch_tanh",), "gelu_pytorch_tanh")
    if c.flag("attention_bias", False):
        raise ModelError(f"{c.where}: attention_bias true is not supported")
    stack, width, eps = (
        read_layer_kinds(c),
        c.count("hidden_size", 2304, maximum=MAX_WIDTH),
        c.number("rms_norm_eps", 1e-6),
    )
    vocabulary, depth = c.count("vocab_size", 262144), len(stack.kinds)
    return Gemma4Text(
        width=width,
        ffn=c.count("intermediate_size", 9216, maximum=MAX_WIDTH),
        double_wide=c.flag("use_double_wide_mlp", False),
        stack=stack,
        vocabulary=vocabulary,
        context=c.count("max_position_embeddings", 131072),
        eps=eps,
        blocks=c.choice("use_bidirectional_attention", ("vision", None), None) == "vision",
        whole=unified or c.get("part_of", None) == UNIFIED_PROJECTOR,
        divided=c.flag("rope_freqs", False),
        per_layer=_per_layer(c, layers=depth, width=width, eps=eps, vocabulary=vocabulary),
        experts=read_expert_branch(c, depth, width, eps),
        softcap=None
        if c.get("final_logit_softcapping", None) is None
        else c.number("final_logit_softcapping"),
        tied=c.flag("tie_word_embeddings", True),
    )


def _per_layer(
    c: Settings, *, layers: int, width: int, eps: float, vocabulary: int
) -> PerLayer | None:
    """Return the inputs of layers, None where they have none of their own. Raises ModelError for a
    table that does not have all tokens.
    """
    if c.get("hidden_size_per_layer_input", 256) == 0:
        return None
    rows, pad = c.count("vocab_size_per_layer_input", vocabulary), c.get("pad_token_id", 0)
    if rows < vocabulary or type(pad) is not int or not 0 <= pad < rows:
        raise ModelError(
            f"{c.where}: vocab_size_per_layer_input is {rows} and pad_token_id {pad!r:.20}; "
            f"expected a row for each of {vocabulary} tokens, and the pad token among them"
        )
    return read_per_layer(c, layers=layers, width=width, eps=eps, vocabulary=vocabulary, pad=pad)
