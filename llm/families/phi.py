"""Phi-1, Phi-1.5 and Phi-2 (arXiv:2309.05463), and Moondream 2's decoder, which began as Phi-1.5:
attention and MLP side by side behind one layer norm, rotary positions in a part of each head,
biases throughout.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from mtmd.base.errors import ModelError
from mtmd.kernels import ops
from mtmd.kernels.checkpoint.canonical import Parameter, Stored
from mtmd.kernels.checkpoint.rotary import Rotary, read_rotary, rope_settings, turning_dims
from mtmd.kernels.checkpoint.settings import MAX_HEADS, MAX_LAYERS, MAX_WIDTH, Settings
from mtmd.kernels.graph import Node, WeightSource
from mtmd.kernels.layers import Weights
from mtmd.kernels.plan.flash_choice import AttentionForm
from mtmd.llm.blocks import (
    attend,
    cache_keys_values,
    queries_keys_values,
    read_heads,
    token_embeddings,
)
from mtmd.llm.gguf_keys import GgufText, decoder_keys
from mtmd.llm.inputs import TextInputs
from mtmd.llm.parameters import COPIED_HEAD, QKV, attention_tensors, decoder_parameters, prefixed
from mtmd.llm.state import KV

PREFIXES = ("model.",)
MOONDREAM = {
    "token_embd": "wte",
    "attn_norm": "ln",
    "attn_output": "attn.proj",
    "ffn_up": "mlp.fc1",
    "ffn_down": "mlp.fc2",
    "output_norm": "post_ln",
    "output": "lm_head",
}
ACTIVATIONS = ("gelu_new", "gelu_pytorch_tanh", "gelu_fast")  # one function


@dataclass(frozen=True)
class PhiText:
    """`normed`: each head's queries and keys have a layer norm before they turn."""

    depth: int
    width: int
    ffn: int
    heads: int
    groups: int
    head: int
    vocabulary: int
    context: int
    eps: float
    normed: bool
    tied: bool
    rotary: Rotary

    @property
    def unused(self) -> tuple[str, ...]:
        return (r".*\.rotary_emb\.inv_freq", *((COPIED_HEAD,) if self.tied else ()))

    @property
    def layers(self) -> list[tuple[KV]]:
        return [(KV(self.groups, self.head),)] * self.depth

    @property
    def image_width(self) -> int:
        return self.width

    def parameters(self) -> Mapping[str, Parameter]:
        attention = attention_tensors(self.width, self.heads, self.groups, self.head)
        layer = {
            "attn_norm": ("input_layernorm", (self.width,)),
            **attention,
            "attn_output": ("self_attn.dense", attention["attn_output"][1]),
            "ffn_up": ("mlp.fc1", (self.ffn, self.width)),
            "ffn_down": ("mlp.fc2", (self.width, self.ffn)),
        }
        if self.normed:
            layer["attn_q_norm"] = ("self_attn.q_layernorm", (self.head,))
            layer["attn_k_norm"] = ("self_attn.k_layernorm", (self.head,))
        parameters = decoder_parameters(
            prefixed(PREFIXES),
            [layer] * self.depth,
            vocabulary=self.vocabulary,
            width=self.width,
            tied=self.tied,
            biased=tuple(layer),
        )
        last = prefixed(PREFIXES)
        for kind in ("weight", "bias"):
            parameters[f"output_norm.{kind}"] = Parameter(
                (self.width,), last(f"final_layernorm.{kind}")
            )
        parameters["output.bias"] = Parameter((self.vocabulary,), ("lm_head.bias",))
        sizes = [self.heads * self.head, *[self.groups * self.head] * 2]
        for index in range(self.depth):
            for part, name in enumerate(QKV):
                for kind in ("weight", "bias"):
                    at = f"blk.{index}.{name}.{kind}"
                    parameters[at] = _or_fused(parameters[at], at, index, kind, sizes, part)
        return {name: _or_moondream(one, name) for name, one in parameters.items()}

    def graph(self, inputs: TextInputs, weights: WeightSource, attention: AttentionForm) -> Node:
        w, angles = Weights(weights, inputs.dtype), inputs.angles(self.rotary)
        x, bounds = token_embeddings(inputs, w), inputs.bounds(None)
        for layer in inputs.layers(self.depth):
            at = f"blk.{layer}"
            y = w.layer_norm(x, f"{at}.attn_norm", self.eps)
            q, k, v = queries_keys_values(y, at, w, heads=self.heads, groups=self.groups, bias=True)
            if self.normed:
                q = w.layer_norm(q, f"{at}.attn_q_norm", self.eps)
                k = w.layer_norm(k, f"{at}.attn_k_norm", self.eps)
            q = ops.rope(q, angles, name=f"{at}.attn_q.rope")
            k = ops.rope(k, angles, name=f"{at}.attn_k.rope")
            mixed = attend(q, cache_keys_values(k, v, layer, inputs), at, attention, bounds=bounds)
            mixed = w.linear(mixed, f"{at}.attn_output", bias=True)
            x = ops.add(mixed, x, name=f"{at}.attn_residual")
            y = ops.gelu(
                w.linear(y, f"{at}.ffn_up", bias=True), approximate="tanh", name=f"{at}.ffn_gelu"
            )
            x = ops.add(w.linear(y, f"{at}.ffn_down", bias=True), x, name=f"{at}.ffn_residual")
        x = ops.take_rows(x, inputs.requested_rows(), name="wanted")
        x = w.layer_norm(x, "output_norm", self.eps)
        if not self.tied:
            return w.linear(x, "output", bias=True, name="logits")
        x = w.linear(x, "token_embd", name="logits.unbiased")
        return ops.add(x, w.tensor("output.bias"), name="logits")


def _or_fused(
    parameter: Parameter, name: str, layer: int, kind: str, sizes: list[int], part: int
) -> Parameter:
    """The same, which files may hold with the other two in one."""
    whole = (sum(sizes), *parameter.shape[1:])
    fused = f"blk.{layer}.attn_qkv.{kind}"

    def pick(stored: Tensor) -> Tensor:
        rows: Tensor = stored.split(sizes)[part]
        return rows

    def stored(name: str) -> Stored:
        return Stored((name,), whole, pick, picks_rows=True)

    one = Stored((name,), parameter.shape)
    others = tuple(map(stored, _moondream(f"blocks.{layer}.attn.qkv.{kind}")))
    return replace(parameter, gguf=(one, stored(fused)), others=others)


def _or_moondream(parameter: Parameter, name: str) -> Parameter:
    """The same, which Moondream's authors call otherwise."""
    part, _, kind = name.rpartition(".")
    layer, _, part = part.rpartition(".")
    if part not in MOONDREAM:
        return parameter
    at = f"{layer.replace('blk', 'blocks')}.{MOONDREAM[part]}.{kind}".removeprefix(".")
    sources = _moondream(at.replace("wte.weight", "wte"))
    return replace(parameter, sources=(*parameter.sources, *sources))


def _moondream(name: str) -> tuple[str, ...]:
    return (f"model.text.{name}", f"text.{name}")


def to_gguf(text: PhiText) -> GgufText:
    """Return the architecture and keys of a GGUF that says the same."""
    keys = decoder_keys(text) | {
        "attention.layer_norm_epsilon": text.eps,
        "rope.dimension_count": 2 * len(text.rotary.frequencies),
    }
    refused = {"norms of queries and keys": text.normed, "table for both ends": text.tied}
    return GgufText(
        "phi2", keys, text.rotary, refused=" or ".join(what for what, has in refused.items() if has)
    )


def from_gguf(keys: Settings, names: Collection[str]) -> dict[str, Any]:  # noqa: ARG001
    """Return what config.json would say beyond the common keys."""
    return {
        "layer_norm_eps": keys.number("attention.layer_norm_epsilon"),
        "rope_dimension_count": keys.get("rope.dimension_count", None),
    }


def read(c: Settings) -> PhiText:
    """Read it from config.json or its text_config, with transformers' defaults; ModelError where it
    cannot be followed.
    """
    c.choice("hidden_act", ACTIVATIONS, "gelu_new")
    width, context = (
        c.count("hidden_size", 2048, maximum=MAX_WIDTH),
        c.count("max_position_embeddings", 2048),
    )
    count, groups, head = read_heads(
        c, 32, None, width // c.count("num_attention_heads", 32, maximum=MAX_HEADS)
    )
    rope = rope_settings(c)
    share = rope.number("partial_rotary_factor", c.number("partial_rotary_factor", 0.5))
    # GGUF's way to say it
    dims = c.count("rope_dimension_count", turning_dims(head, share, c.where))
    if dims > head or dims % 2:
        raise ModelError(
            f"{c.where}: {dims} dimensions of a head of {head} are rotated, expected an even "
            "number of those that it has"
        )
    return PhiText(
        depth=c.count("num_hidden_layers", 24, maximum=MAX_LAYERS),
        width=width,
        ffn=c.count("intermediate_size", 8192, maximum=MAX_WIDTH),
        heads=count,
        groups=groups,
        head=head,
        vocabulary=c.count("vocab_size", 51200),
        context=context,
        eps=c.number("layer_norm_eps", 1e-5),
        normed=c.flag("qk_layernorm", False),
        tied=c.flag("tie_word_embeddings", False),
        rotary=read_rotary(rope, dims, c.number("rope_theta", 1e4), context),
    )
