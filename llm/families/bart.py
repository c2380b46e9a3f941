"""The decoders of encoder-decoders that began as BART's (arXiv:1910.13461), as TrOCR's, and mBART's
(arXiv:2001.08210), as Donut's, with norms before each part and a last one: each layer attends to
the tokens before, then to the states of an encoder.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

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
    queries_keys_values,
    split_heads,
)
from mtmd.llm.gguf_keys import GgufText
from mtmd.llm.inputs import TextInputs
from mtmd.llm.parameters import COPIED_HEAD, decoder_parameters, prefixed
from mtmd.llm.state import KV, PAGE

PREFIXES = (
    "decoder.model.decoder.",
    "model.language_model.decoder.",
    "language_model.model.decoder.",
)
SHARED = ("model.language_model.shared.weight", "language_model.model.shared.weight")
FIRST_POSITION = 2  # row of the table for the first token; those before are of no use
EPS = 1e-5  # of the norms; the settings do not say
ACTIVATIONS = {"gelu": "none", "gelu_new": "tanh", "gelu_pytorch_tanh": "tanh", "relu": ""}
READING = ("bart", "florence2_language")
CONTEXTS = dict.fromkeys(("mbart", *READING), 1024)  # where the settings do not say
MAX_ROWS = 1 << 16  # of an encoder's states
CROSS = "cross_attn"


@dataclass(frozen=True)
class BartText:
    """`gelu`: how it is computed, "" for ReLU. `encoder_width` and `encoder_rows`: of the states
    that tokens attend to. `pad`: without a table of positions, the token that has none, by which
    those of others are counted; None with a table.
    """

    depth: int
    width: int
    ffn: int
    heads: int
    vocabulary: int
    context: int
    gelu: str
    embedding_scale: float
    embedding_norm: bool
    norms_first: bool
    pad: int | None
    tied: bool
    encoder_width: int
    encoder_rows: int

    @property
    def unused(self) -> tuple[str, ...]:
        return (r".*\.embed_positions\._float_tensor", *((COPIED_HEAD,) if self.tied else ()))

    @property
    def seen(self) -> KV:
        """Return what a layer keeps of the encoder's states."""
        return KV(self.heads, self.width // self.heads, -(-self.encoder_rows // PAGE) * PAGE)

    @property
    def layers(self) -> list[tuple[KV, KV]]:
        return [(KV(self.heads, self.width // self.heads), self.seen)] * self.depth

    @property
    def image_width(self) -> int:
        return self.encoder_width

    def parameters(self) -> Mapping[str, Parameter]:
        width, source = self.width, prefixed(PREFIXES)
        layer: dict[str, tuple[str, Shape]] = {
            "ffn_up": ("fc1", (self.ffn, width)),
            "ffn_down": ("fc2", (width, self.ffn)),
            "ffn_norm": ("final_layer_norm", (width,)),
        }
        for ours, theirs, read in (
            ("attn", "self_attn", width),
            (CROSS, "encoder_attn", self.encoder_width),
        ):
            layer |= {
                f"{ours}_q": (f"{theirs}.q_proj", (width, width)),
                f"{ours}_k": (f"{theirs}.k_proj", (width, read)),
                f"{ours}_v": (f"{theirs}.v_proj", (width, read)),
                f"{ours}_output": (f"{theirs}.out_proj", (width, width)),
                f"{ours}_norm": (f"{theirs}_layer_norm", (width,)),
            }
        parameters = decoder_parameters(
            source,
            [layer] * self.depth,
            vocabulary=self.vocabulary,
            width=width,
            tied=self.tied,
            biased=tuple(layer),
        )
        table = parameters["token_embd.weight"]
        parameters["token_embd.weight"] = replace(table, sources=(*SHARED, *table.sources))
        del parameters["output_norm.weight"]
        norms = {"token_embd_norm": "layernorm_embedding"} if self.embedding_norm else {}
        norms |= {"output_norm": "layer_norm"} if self.norms_first else {}
        for ours, theirs in norms.items():
            for kind in ("weight", "bias"):
                parameters[f"{ours}.{kind}"] = Parameter((width,), source(f"{theirs}.{kind}"))
        if self.pad is None:
            parameters["position_embd.weight"] = Parameter(
                (self.context + FIRST_POSITION, width), source("embed_positions.weight")
            )
        return parameters

    def graph(self, inputs: TextInputs, weights: WeightSource, attention: AttentionForm) -> Node:
        w, bounds = Weights(weights, inputs.dtype), inputs.bounds(None)
        x = w.embed(inputs.token_ids(), "token_embd", self.embedding_scale)
        if self.pad is None:
            x = add_positions(x, inputs, w, FIRST_POSITION)
        else:
            sines = inputs.position_sines(self.width, self.pad + 1, self.pad)
            x = ops.add(x, sines, name="positioned")
        if self.embedding_norm:
            x = w.layer_norm(x, "token_embd_norm", EPS)
        for layer in inputs.layers(self.depth):
            at = f"blk.{layer}"
            y = self._normed(x, f"{at}.attn", w)
            q, k, v = queries_keys_values(y, at, w, heads=self.heads, groups=self.heads, bias=True)
            y = attend(q, cache_keys_values(k, v, layer, inputs), at, attention, bounds=bounds)
            x = self._joined(w.linear(y, f"{at}.attn_output", bias=True), x, f"{at}.attn", w)
            y = self._crossed(self._normed(x, f"{at}.{CROSS}", w), layer, inputs, w, attention)
            x = self._joined(y, x, f"{at}.{CROSS}", w)
            y = w.linear(self._normed(x, f"{at}.ffn", w), f"{at}.ffn_up", bias=True)
            y = (
                ops.gelu(y, approximate=self.gelu, name=f"{at}.ffn_gelu")
                if self.gelu
                else ops.relu(y, name=f"{at}.ffn_relu")
            )
            x = self._joined(w.linear(y, f"{at}.ffn_down", bias=True), x, f"{at}.ffn", w)
        x = ops.take_rows(x, inputs.requested_rows(), name="wanted")
        if self.norms_first:
            x = w.layer_norm(x, "output_norm", EPS)
        return w.linear(x, "token_embd" if self.tied else "output", name="logits")

    def _crossed(
        self, x: Node, layer: int, inputs: TextInputs, w: Weights, attention: AttentionForm
    ) -> Node:
        """Attention to the encoder's states          [T, D] -> [T, D]"""
        at, rows = f"blk.{layer}.{CROSS}", inputs.context_rows()
        q, k, v = (
            split_heads(w.linear(read, f"{at}_{part}", bias=True), self.heads, f"{at}_{part}")
            for part, read in (("q", x), ("k", rows), ("v", rows))
        )
        states = context_keys_values(k, v, layer, inputs, self.seen)
        y = attend(q, states, at, attention, bounds=inputs.context_bounds())
        return w.linear(y, f"{at}_output", bias=True)

    def _normed(self, x: Node, at: str, w: Weights) -> Node:
        """Return what a part reads."""
        return w.layer_norm(x, f"{at}_norm", EPS) if self.norms_first else x

    def _joined(self, y: Node, x: Node, at: str, w: Weights) -> Node:
        x = ops.add(y, x, name=f"{at}_residual")
        return x if self.norms_first else w.layer_norm(x, f"{at}_norm", EPS)


def to_gguf(text: BartText) -> GgufText:  # noqa: ARG001
    """Return what a GGUF cannot have: llama.cpp's layers attend to nothing but tokens."""
    return GgufText("bart", {}, Rotary(()), refused="layers that attend to pictures")


def read(c: Settings) -> BartText:
    """Read it from a decoder's config.json, with transformers' defaults; ModelError where it cannot
    be followed.
    """
    width = c.count("d_model", 1024, maximum=MAX_WIDTH)
    heads = c.count("decoder_attention_heads", 16, maximum=MAX_HEADS)
    if width % heads or width % 2 or width < 4:
        raise ModelError(
            f"{c.where}: {heads} heads of width {width}; expected heads that divide an even width"
        )
    learned = c.flag("use_learned_position_embeddings", True)
    kind = c.get("model_type", "")
    context = c.count("max_position_embeddings", CONTEXTS.get(kind, 512))
    # Of an encoder that reads a picture and a prompt there are as many states as positions.
    reads = kind in READING and c.get("vision_config", None) is not None
    return BartText(
        depth=c.count("decoder_layers", 12, maximum=MAX_LAYERS),
        width=width,
        ffn=c.count("decoder_ffn_dim", 4096, maximum=MAX_WIDTH),
        heads=heads,
        vocabulary=c.count("vocab_size", 50265),
        context=context,
        gelu=ACTIVATIONS[c.choice("activation_function", ACTIVATIONS, "gelu")],
        embedding_scale=width**0.5 if c.flag("scale_embedding", False) else 1.0,
        embedding_norm=c.flag("layernorm_embedding", True),
        norms_first=kind == "mbart",
        pad=None if learned else c.token_id("pad_token_id", 1),
        tied=c.flag("tie_word_embeddings", True),
        encoder_width=c.count("cross_attention_hidden_size", width, maximum=MAX_WIDTH),
        encoder_rows=c.count("encoder_rows", context if reads else None, maximum=MAX_ROWS),
    )
