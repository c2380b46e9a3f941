"""BLIP's decoder (arXiv:2201.12086): BERT's layers with a norm behind each part, which attend to
the tokens before and then to the states of a picture, and BERT's head.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from mtmd.base.errors import ModelError
from mtmd.kernels import ops
from mtmd.kernels.checkpoint.canonical import Parameter
from mtmd.kernels.checkpoint.rotary import Rotary
from mtmd.kernels.checkpoint.settings import MAX_HEADS, MAX_LAYERS, MAX_WIDTH, Settings
from mtmd.kernels.graph import Node, Shape, WeightSource
from mtmd.kernels.layers import Weights
from mtmd.kernels.plan.flash_choice import AttentionForm
from mtmd.llm.blocks import (
    add_positions,
    attend,
    cache_keys_values,
    context_keys_values,
    split_heads,
)
from mtmd.llm.gguf_keys import GgufText
from mtmd.llm.inputs import TextInputs
from mtmd.llm.state import KV, PAGE

ACTIVATIONS = {"gelu": "none", "gelu_new": "tanh"}
MAX_ROWS = 1 << 16  # of a picture's states; published models have 577
SELF, CROSS = "attn", "cross_attn"
HEAD = "cls.predictions"


@dataclass(frozen=True)
class BlipText:
    """`picture_width` and `picture_rows`: of the states that tokens attend to."""

    depth: int
    width: int
    ffn: int
    heads: int
    vocabulary: int
    context: int
    eps: float
    gelu: str
    tied: bool
    picture_width: int
    picture_rows: int

    @property
    def unused(self) -> tuple[str, ...]:
        names = (r"bert\.embeddings\.position_ids", r"cls\.predictions\.(decoder\.)?bias")
        copied = (r"cls\.predictions\.decoder\.weight",) if self.tied else ()
        return tuple(rf"text_decoder\.{name}" for name in (*names, *copied))

    @property
    def seen(self) -> KV:
        """Return what a layer keeps of the picture's states."""
        return KV(self.heads, self.width // self.heads, -(-self.picture_rows // PAGE) * PAGE)

    @property
    def layers(self) -> list[tuple[KV, KV]]:
        return [(KV(self.heads, self.width // self.heads), self.seen)] * self.depth

    @property
    def image_width(self) -> int:
        return self.picture_width

    def parameters(self) -> Mapping[str, Parameter]:
        width, square = self.width, (self.width, self.width)
        tensors: dict[str, tuple[str, Shape]] = {
            "token_embd_norm": ("bert.embeddings.LayerNorm", (width,)),
            "output_transform": (f"{HEAD}.transform.dense", square),
            "output_norm": (f"{HEAD}.transform.LayerNorm", (width,)),
        }
        for index in range(self.depth):
            at, theirs = f"blk.{index}", f"bert.encoder.layer.{index}"
            for part, name, read in (
                (SELF, "attention", width),
                (CROSS, "crossattention", self.picture_width),
            ):
                tensors |= {
                    f"{at}.{part}_q": (f"{theirs}.{name}.self.query", square),
                    f"{at}.{part}_k": (f"{theirs}.{name}.self.key", (width, read)),
                    f"{at}.{part}_v": (f"{theirs}.{name}.self.value", (width, read)),
                    f"{at}.{part}_output": (f"{theirs}.{name}.output.dense", square),
                    f"{at}.{part}_norm": (f"{theirs}.{name}.output.LayerNorm", (width,)),
                }
            tensors |= {
                f"{at}.ffn_up": (f"{theirs}.intermediate.dense", (self.ffn, width)),
                f"{at}.ffn_down": (f"{theirs}.output.dense", (width, self.ffn)),
                f"{at}.ffn_norm": (f"{theirs}.output.LayerNorm", (width,)),
            }
        parameters = {
            f"{name}.{kind}": Parameter(
                shape if kind == "weight" else shape[:1], _names(f"{theirs}.{kind}")
            )
            for name, (theirs, shape) in tensors.items()
            for kind in ("weight", "bias")
        }
        table = _names("bert.embeddings.word_embeddings.weight")
        rows, outputs = (self.vocabulary, width), _names(f"{HEAD}.decoder.weight")
        parameters["token_embd.weight"] = Parameter(rows, (*table, *(outputs if self.tied else ())))
        parameters["position_embd.weight"] = Parameter(
            (self.context, width), _names("bert.embeddings.position_embeddings.weight")
        )
        if not self.tied:
            parameters["output.weight"] = Parameter(rows, outputs)
        parameters["output.bias"] = Parameter(
            (self.vocabulary,), _names(f"{HEAD}.bias") + _names(f"{HEAD}.decoder.bias")
        )
        return parameters

    def graph(self, inputs: TextInputs, weights: WeightSource, attention: AttentionForm) -> Node:
        w, bounds = Weights(weights, inputs.dtype), inputs.bounds(None)
        x = add_positions(w.embed(inputs.token_ids(), "token_embd"), inputs, w)
        x = w.layer_norm(x, "token_embd_norm", self.eps)
        for layer in inputs.layers(self.depth):
            at, rows = f"blk.{layer}", inputs.context_rows()
            q, k, v = self._projected(x, x, f"{at}.{SELF}", w)
            y = attend(q, cache_keys_values(k, v, layer, inputs), at, attention, bounds=bounds)
            x = self._joined(y, x, f"{at}.{SELF}", w)
            q, k, v = self._projected(x, rows, f"{at}.{CROSS}", w)
            seen = context_keys_values(k, v, layer, inputs, self.seen)
            limits = inputs.context_bounds()
            y = attend(q, seen, f"{at}.{CROSS}", attention, bounds=limits)
            x = self._joined(y, x, f"{at}.{CROSS}", w)
            y = w.linear(x, f"{at}.ffn_up", bias=True)
            y = ops.gelu(y, approximate=self.gelu, name=f"{at}.ffn_gelu")
            y = ops.add(w.linear(y, f"{at}.ffn_down", bias=True), x, name=f"{at}.ffn_residual")
            x = w.layer_norm(y, f"{at}.ffn_norm", self.eps)
        x = ops.take_rows(x, inputs.requested_rows(), name="wanted")
        x = w.linear(x, "output_transform", bias=True)
        x = ops.gelu(x, approximate=self.gelu, name="output_gelu")
        x = w.layer_norm(x, "output_norm", self.eps)
        x = w.linear(x, "token_embd" if self.tied else "output", name="logits.unbiased")
        return ops.add(x, w.tensor("output.bias"), name="logits")

    def _projected(self, x: Node, rows: Node, at: str, w: Weights) -> tuple[Node, Node, Node]:
        """x [T, D], what it attends to [N, E] -> queries [T, H, K], keys and values [N, H, K]"""
        q, k, v = (
            split_heads(w.linear(read, f"{at}_{part}", bias=True), self.heads, f"{at}_{part}")
            for part, read in (("q", x), ("k", rows), ("v", rows))
        )
        return q, k, v

    def _joined(self, y: Node, x: Node, at: str, w: Weights) -> Node:
        y = ops.add(w.linear(y, f"{at}_output", bias=True), x, name=f"{at}_residual")
        return w.layer_norm(y, f"{at}_norm", self.eps)


def _names(name: str) -> tuple[str, ...]:
    return (f"text_decoder.{name}",)


def to_gguf(text: BlipText) -> GgufText:  # noqa: ARG001
    """Return what a GGUF cannot have: llama.cpp's layers attend to nothing but tokens."""
    return GgufText("blip", {}, Rotary(()), refused="layers that attend to pictures")


def read(c: Settings) -> BlipText:
    """Read it from config.json's text_config, with transformers' defaults; ModelError where it
    cannot be followed.
    """
    c.choice("is_decoder", (True,), True)
    width = c.count("hidden_size", 768, maximum=MAX_WIDTH)
    heads = c.count("num_attention_heads", 8, maximum=MAX_HEADS)
    if width % heads:
        raise ModelError(
            f"{c.where}: {heads} heads of width {width}; expected heads that divide the width"
        )
    vision = c.part("vision_config")
    rows = (vision.count("image_size", 384) // vision.count("patch_size", 16)) ** 2 + 1
    if rows > MAX_ROWS:
        raise ModelError(
            f"{vision.where}: a picture has {rows} states, expected at most {MAX_ROWS}"
        )
    return BlipText(
        depth=c.count("num_hidden_layers", 12, maximum=MAX_LAYERS),
        width=width,
        ffn=c.count("intermediate_size", 3072, maximum=MAX_WIDTH),
        heads=heads,
        vocabulary=c.count("vocab_size", 30524),
        context=c.count("max_position_embeddings", 512),
        eps=c.number("layer_norm_eps", 1e-12),
        gelu=ACTIVATIONS[c.choice("hidden_act", ACTIVATIONS, "gelu")],
        tied=c.flag("tie_word_embeddings", True),
        # As transformers does, whatever the settings say
        picture_width=vision.count("hidden_size", 768, maximum=MAX_WIDTH),
        picture_rows=rows,
    )
