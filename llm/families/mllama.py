"""Llama 3.2 Vision's decoder (arXiv:2407.21783): Llama's layers, and between them gated layers in
which tokens attend to pictures.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from mtmd.base.errors import ModelError
from mtmd.kernels import ops
from mtmd.kernels.checkpoint.canonical import Parameter
from mtmd.kernels.checkpoint.rotary import Rotary, read_rotary, rope_settings
from mtmd.kernels.checkpoint.settings import MAX_LAYERS, MAX_WIDTH, Settings
from mtmd.kernels.graph import Node, WeightSource
from mtmd.kernels.layers import Weights
from mtmd.kernels.plan.flash_choice import AttentionForm
from mtmd.llm.blocks import (
    attend,
    cache_keys_values,
    context_keys_values,
    logits,
    queries_keys_values,
    read_heads,
    split_heads,
    swiglu,
)
from mtmd.llm.gguf_keys import GgufText
from mtmd.llm.inputs import TextInputs
from mtmd.llm.parameters import attention_tensors, decoder_parameters, mlp_tensors, prefixed
from mtmd.llm.state import KV, PAGE

PREFIXES = ("language_model.model.", "model.language_model.")
MORE_ROWS = 8  # of the token table, for special tokens; outputs have none of them
PICTURES = 4  # for which room is kept
MAX_ROWS = 1 << 16  # of a picture; published models have 6,404
PARTS = ("attn", "ffn")


@dataclass(frozen=True)
class MllamaText:
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
    crossing: tuple[int, ...]  # layers that attend to pictures
    picture_rows: int  # of a picture, padding among them

    unused = (r".*\.rotary_emb\.inv_freq",)

    @property
    def seen(self) -> KV:
        """Return what a layer that attends to pictures keeps of them."""
        return KV(self.groups, self.head, -(-PICTURES * self.picture_rows // PAGE) * PAGE)

    @property
    def layers(self) -> list[tuple[KV]]:
        own = KV(self.groups, self.head)
        return [(self.seen if i in self.crossing else own,) for i in range(self.depth)]

    @property
    def image_width(self) -> int:
        return self.width

    def parameters(self) -> Mapping[str, Parameter]:
        norm, tensors = (
            (self.head,),
            attention_tensors(self.width, self.heads, self.groups, self.head),
        )
        shared = {
            "attn_norm": ("input_layernorm", (self.width,)),
            "ffn_norm": ("post_attention_layernorm", (self.width,)),
            **mlp_tensors(self.width, self.ffn),
        }
        crossing = {
            **shared,
            **{
                part: (name.replace("self_attn", "cross_attn"), shape)
                for part, (name, shape) in tensors.items()
            },
            "attn_q_norm": ("cross_attn.q_norm", norm),
            "attn_k_norm": ("cross_attn.k_norm", norm),
        }
        source = prefixed(PREFIXES)
        parameters = decoder_parameters(
            source,
            [crossing if i in self.crossing else {**shared, **tensors} for i in range(self.depth)],
            vocabulary=self.vocabulary,
            width=self.width,
            tied=False,
        )
        parameters["token_embd.weight"] = Parameter(
            (self.vocabulary + MORE_ROWS, self.width), source("embed_tokens.weight")
        )
        for layer in self.crossing:
            for part, theirs in zip(PARTS, ("attn", "mlp"), strict=True):
                parameters[f"blk.{layer}.{part}_gate"] = Parameter(
                    (1,),
                    source(f"layers.{layer}.cross_attn_{theirs}_gate"),
                    convert=lambda gate: gate.float().tanh(),
                )
        return parameters

    def graph(self, inputs: TextInputs, weights: WeightSource, attention: AttentionForm) -> Node:
        w = Weights(weights, inputs.dtype)
        angles, bounds = inputs.angles(self.rotary), inputs.bounds()
        x = w.embed(inputs.token_ids(), "token_embd")
        for layer in inputs.layers(self.depth):
            at = f"blk.{layer}"
            y = w.rms_norm(x, f"{at}.attn_norm", self.eps)
            if layer in self.crossing:
                x = self._added(self._crossed(y, layer, inputs, w, attention), x, at, 0, inputs, w)
                y = swiglu(w.rms_norm(x, f"{at}.ffn_norm", self.eps), at, w)
                x = self._added(y, x, at, 1, inputs, w)
                continue
            q, k, v = queries_keys_values(y, at, w, heads=self.heads, groups=self.groups)
            q, k = (
                ops.rope(part, angles, name=f"{at}.attn_{name}.rope")
                for name, part in (("q", q), ("k", k))
            )
            y = attend(q, cache_keys_values(k, v, layer, inputs), at, attention, bounds=bounds)
            x = ops.add(w.linear(y, f"{at}.attn_output"), x, name=f"{at}.attn_residual")
            y = swiglu(w.rms_norm(x, f"{at}.ffn_norm", self.eps), at, w)
            x = ops.add(y, x, name=f"{at}.ffn_residual")
        return logits(x, inputs, w, eps=self.eps, tied=False)

    def _crossed(
        self, x: Node, layer: int, inputs: TextInputs, w: Weights, attention: AttentionForm
    ) -> Node:
        """Attention to pictures          [T, D] -> [T, D]"""
        at, rows = f"blk.{layer}", inputs.context_rows()
        q, k, v = (
            split_heads(w.linear(read, f"{at}.{part}"), count, f"{at}.{part}")
            for part, read, count in (
                ("attn_q", x, self.heads),
                ("attn_k", rows, self.groups),
                ("attn_v", rows, self.groups),
            )
        )
        q, k = (
            w.rms_norm(part, f"{at}.attn_{name}_norm", self.eps)
            for name, part in (("q", q), ("k", k))
        )
        keys_values = context_keys_values(k, v, layer, inputs, self.seen)
        y = attend(q, keys_values, at, attention, bounds=inputs.context_bounds())
        return w.linear(y, f"{at}.attn_output")

    def _added(self, y: Node, x: Node, at: str, which: int, inputs: TextInputs, w: Weights) -> Node:
        """Return what a layer saw, through its gate, added to what it was given."""
        name = f"{at}.{PARTS[which]}"
        gate = ops.mul(inputs.context_factor(which), w.tensor(f"{name}_gate"), name=f"{name}_open")
        return ops.add(ops.mul(y, gate, name=f"{name}_gated"), x, name=f"{name}_residual")


def to_gguf(text: MllamaText) -> GgufText:
    """Return what a GGUF cannot have: llama.cpp's layers attend to nothing but tokens."""
    return GgufText("mllama", {}, text.rotary, refused="layers that attend to pictures")


def read(c: Settings) -> MllamaText:
    """Read it from config.json's text_config, with transformers' defaults; ModelError where it is
    impossible.
    """
    c.choice("hidden_act", ("silu",), "silu")
    c.choice("tie_word_embeddings", (False,), False)
    depth = c.count("num_hidden_layers", 40, maximum=MAX_LAYERS)
    width = c.count("hidden_size", 4096, maximum=MAX_WIDTH)
    count, groups, head = read_heads(c, 32, 8, None)
    if count * head != width:
        raise ModelError(f"{c.where}: {count} heads of {head} numbers, expected {width} in all")
    context = c.count("max_position_embeddings", 131072)
    crossing = c.get("cross_attention_layers", [3, 8, 13, 18, 23, 28, 33, 38])
    if not isinstance(crossing, (list, tuple)) or not all(
        type(i) is int and 0 <= i < depth for i in crossing
    ):
        raise ModelError(
            f"{c.where}: cross_attention_layers is {crossing!r:.40}, expected layers below {depth}"
        )
    return MllamaText(
        depth=depth,
        width=width,
        ffn=c.count("intermediate_size", 14336, maximum=MAX_WIDTH),
        heads=count,
        groups=groups,
        head=head,
        vocabulary=c.count("vocab_size", 128256),
        context=context,
        eps=c.number("rms_norm_eps", 1e-5),
        rotary=read_rotary(rope_settings(c), head, c.number("rope_theta", 5e5), context),
        crossing=tuple(sorted(crossing)),
        picture_rows=_picture_rows(c.part("vision_config")),
    )


def _picture_rows(vision: Settings) -> int:
    """Rows of a picture: of each tile that there may be, its patches and a class token."""
    side = vision.count("image_size", 448) // vision.count("patch_size", 14)
    rows = (side**2 + 1) * vision.count("max_num_tiles", 4)
    if rows > MAX_ROWS:
        raise ModelError(
            f"{vision.where}: a picture has {rows} embeddings, expected at most {MAX_ROWS}"
        )
    return rows
