"""Gemma 3n (transformers' models/gemma3n; there is no paper): several streams of each token, of
which layers compute one and predict the others (alternating updates, arXiv:2301.13310), residuals
of low rank (arXiv:2411.07501), gates of which the largest values are left (arXiv:2506.06644), an
input of its own for each layer, last layers that read earlier ones' keys.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from mtmd.base.errors import ModelError
from mtmd.kernels import ops
from mtmd.kernels.checkpoint.canonical import Parameter, Stored
from mtmd.kernels.checkpoint.settings import MAX_LAYERS, MAX_WIDTH, Settings
from mtmd.kernels.graph import Node, WeightSource
from mtmd.kernels.layers import Weights
from mtmd.kernels.plan.flash_choice import AttentionForm
from mtmd.llm.blocks import (
    KeysValues,
    attend,
    cache_keys_values,
    read_heads,
    read_layer_types,
    token_embeddings,
)
from mtmd.llm.gguf_keys import PATTERN, GgufText, sliding_layers
from mtmd.llm.inputs import TextInputs
from mtmd.llm.layer_kinds import FULL, SLIDING, LayerKinds, of_each_layer, read_ropes, read_shared
from mtmd.llm.parameters import COPIED_HEAD, Tensors, decoder_parameters, mlp_tensors, prefixed
from mtmd.llm.per_layer import PerLayer, read_per_layer
from mtmd.llm.state import KV

SOURCE = prefixed(("model.language_model.", "model.", "language_model.model."))
FLOOR = 1e-5  # of the mean square of a stream
MAX_STREAMS = 16
LAUREL_RANK = 64  # which no GGUF says
EVERY = 5  # layers, of which the last is full
SPARSE, SPARSITY = 10, 0.95  # first layers, and what their gates leave out
MIN_SPARSITY, MAX_SPARSITY = 1e-6, 0.999  # less is nothing; fp32 rounds more to all
PAD = 0  # row of layers' inputs for tokens that their table does not have


@dataclass(frozen=True)
class AltUp:
    """`count` streams, N, of decoder width D, of which layers compute the one of number `active`
    (arXiv:2301.13310).
    """

    count: int
    active: int
    width: int
    eps: float

    def tensors(self) -> Tensors:
        """Names and shapes of a layer's matrices and norms."""
        return {
            "altup_predict_coef": ("altup.prediction_coefs", (self.count**2, self.count)),
            "altup_correct_coef": ("altup.correction_coefs", (self.count, self.count)),
            "altup_router": ("altup.modality_router", (self.count, self.width)),
            "altup_router_norm": ("altup.router_norm", (self.width,)),
        }

    def parameters(self) -> Mapping[str, Parameter]:
        """Parameters that are of no layer. GGUF files have the matrices of all streams as one."""
        others, width = self.count - 1, self.width
        spread, merge = (
            tuple(zip(*(SOURCE(f"{name}.{i}.weight") for i in range(others)), strict=True))
            for name in ("altup_projections", "altup_unembed_projections")
        )
        square, three = (width, width), (others, width, width)
        in_gguf = Stored(
            ("altup_proj.weight",),
            three,
            lambda matrices: matrices.flatten(0, 1),
            picks_rows=True,
            invert=lambda matrix: (matrix.unflatten(0, three[:2]),),
        )
        return {
            "altup_proj.weight": Parameter(
                (others * width, width),
                (),
                others=tuple(Stored(each, square, _below) for each in spread),
                gguf=(in_gguf,),
            ),
            "altup_unembd_proj.weight": Parameter(
                three, (), others=tuple(Stored(each, square, _stacked) for each in merge)
            ),
        }

    def spread(self, x: Node, w: Weights) -> Node:
        """Return the streams of embeddings          x [T, D] -> [T, N, D]"""
        others = ops.reshape(
            w.linear(x, "altup_proj"),
            shape=(x.shape[0], self.count - 1, self.width),
            name="altup_proj.streams",
        )
        x = _one_stream(x, "altup.embeddings")
        others = ops.match_magnitude(others, x, floor=FLOOR, name="altup.others")
        return ops.concat(x, others, axis=1, name="altup.streams")

    def merge(self, streams: Node, w: Weights) -> Node:
        """Return the mean of the streams, each brought back          [T, N, D] -> [T, D]"""
        x = self.stream(streams, 0, "altup_unembd")
        others = self._others(streams, "altup_unembd")
        rows = ops.reshape(  # one after another, as products read them
            others, shape=(x.shape[0] * (self.count - 1), self.width), name="altup_unembd.rows"
        )
        others = w.heads(
            ops.reshape(rows, shape=others.shape, name="altup_unembd.streams"), "altup_unembd_proj"
        )
        others = ops.match_magnitude(
            others, _one_stream(x, "altup_unembd.first"), floor=FLOOR, name="altup_unembd.others"
        )
        flat = ops.reshape(
            others, shape=(x.shape[0], (self.count - 1) * self.width), name="altup_unembd.flat"
        )
        for i in range(self.count - 1):
            start = i * self.width
            one = ops.columns(
                flat, start=start, stop=start + self.width, name=f"altup_unembd.other.{i}"
            )
            x = ops.add(x, one, name=f"altup_unembd.sum.{i}")
        return ops.scale(x, factor=1 / self.count, name="altup_unembd.mean")

    def predict(self, streams: Node, at: str, w: Weights) -> Node:
        """Return the streams as the layer is expected to leave them          [T, N, D]"""
        active = self.stream(streams, self.active, f"{at}.altup")
        shares = w.linear(
            self._modalities(active, f"{at}.altup_before", at, w), f"{at}.altup_predict_coef"
        )
        shares = ops.reshape(
            shares, shape=(streams.shape[0], self.count, self.count), name=f"{at}.altup_shares"
        )
        return ops.add_mixed(streams, streams, shares, name=f"{at}.altup_predicted")

    def correct(self, predicted: Node, active: Node, y: Node, at: str, w: Weights) -> Node:
        """Return predicted streams with what the layer made of its own, y, added, as much to each
        as is learned.

        predicted [T, N, D], active, y [T, D] -> [T, N, D]
        """
        shares = w.linear(
            self._modalities(y, f"{at}.altup_after", at, w), f"{at}.altup_correct_coef"
        )
        shares = ops.scale(shares, factor=1.0, offset=1.0, name=f"{at}.altup_correct_shares")
        shares = ops.reshape(
            shares, shape=(y.shape[0], self.count, 1), name=f"{at}.altup_correct_shares.each"
        )
        less = ops.scale(active, factor=-1.0, name=f"{at}.altup_active.negative")
        change = ops.add(y, less, name=f"{at}.altup_innovation")
        change = _one_stream(change, f"{at}.altup_innovation.stream")
        return ops.add_mixed(predicted, change, shares, name=f"{at}.altup_corrected")

    def add_to_others(self, streams: Node, y: Node, at: str) -> Node:
        """Return the streams with y [T, D] added to all but the first          [T, N, D]"""
        first = _one_stream(self.stream(streams, 0, f"{at}.out"), f"{at}.out.first")
        others = self._others(streams, f"{at}.out")
        others = ops.add(others, _one_stream(y, f"{at}.inp_stream"), name=f"{at}.inp_residual")
        return ops.concat(first, others, axis=1, name=f"{at}.out")

    def stream(self, streams: Node, number: int, at: str) -> Node:
        """[T, N, D] -> [T, D]"""
        start = number * self.width
        return ops.columns(
            self._flat(streams, at), start=start, stop=start + self.width, name=f"{at}.{number}"
        )

    def _others(self, streams: Node, at: str) -> Node:
        """All streams but the first          [T, N, D] -> [T, N - 1, D]"""
        flat, stop = self._flat(streams, at), self.count * self.width
        rest = ops.columns(flat, start=self.width, stop=stop, name=f"{at}.rest")
        shape = (streams.shape[0], self.count - 1, self.width)
        return ops.reshape(rest, shape=shape, name=f"{at}.rest.streams")

    def _flat(self, streams: Node, at: str) -> Node:
        shape = (streams.shape[0], self.count * self.width)
        return ops.reshape(streams, shape=shape, name=f"{at}.flat")

    def _modalities(self, x: Node, name: str, at: str, w: Weights) -> Node:
        """Return what the router says of each token          [T, D] -> [T, N]"""
        norm = w.tensor(f"{at}.altup_router_norm.weight", torch.float32)
        y = ops.rms_norm(x, norm, eps=self.eps, name=f"{name}_norm")
        y = ops.scale(y, factor=1 / self.width, name=f"{name}_scaled")
        y = w.linear(y, f"{at}.altup_router", name=f"{name}_router")
        return ops.softcap(y, cap=1.0, name=f"{name}_tanh")


def _one_stream(x: Node, name: str) -> Node:
    """[T, D] -> [T, 1, D]"""
    return ops.reshape(x, shape=(x.shape[0], 1, x.shape[1]), name=name)


def _below(*matrices: torch.Tensor) -> torch.Tensor:
    return torch.cat(matrices)


def _stacked(*matrices: torch.Tensor) -> torch.Tensor:
    return torch.stack(matrices)


@dataclass(frozen=True)
class Gemma3nText:
    width: int
    ffn: tuple[int, ...]  # of each layer
    deviations: tuple[float | None, ...]  # of each layer's gate, below which values are left out
    rank: int  # of the residuals of low rank
    stack: LayerKinds
    altup: AltUp
    per_layer: PerLayer
    vocabulary: int
    context: int
    eps: float
    softcap: float
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
            parameters[f"blk.{layer}.altup_correct_scale.weight"] = Parameter(
                (self.width,), SOURCE(f"layers.{layer}.altup.correct_output_scale")
            )
        return {**parameters, **self.altup.parameters(), **self.per_layer.parameters(SOURCE)}

    def _tensors(self, layer: int) -> Tensors:
        """Names and shapes of a layer's matrices and norms."""
        wide = (self.width,)
        return {
            "attn_norm": ("input_layernorm", wide),
            "post_attention_norm": ("post_attention_layernorm", wide),
            "ffn_norm": ("pre_feedforward_layernorm", wide),
            "post_ffw_norm": ("post_feedforward_layernorm", wide),
            "laurel_l": ("laurel.linear_left", (self.rank, self.width)),
            "laurel_r": ("laurel.linear_right", (self.width, self.rank)),
            "laurel_post_norm": ("laurel.post_laurel_norm", wide),
            **self.altup.tensors(),
            **self.stack.tensors(layer, self.width),
            **mlp_tensors(self.width, self.ffn[layer]),
        }

    def graph(self, inputs: TextInputs, weights: WeightSource, attention: AttentionForm) -> Node:
        w, cached = Weights(weights, inputs.dtype), dict[str, KeysValues]()
        x = token_embeddings(inputs, w, self.width**0.5)
        layer_inputs = self.per_layer.inputs(x, inputs, w)
        streams = self.altup.spread(x, w)
        for layer, kind in inputs.each(self.stack.kinds):
            at = f"blk.{layer}"
            predicted = self.altup.predict(streams, at, w)
            active = self.altup.stream(predicted, self.altup.active, f"{at}.altup_active")
            x = w.rms_norm(active, f"{at}.attn_norm", self.eps)
            q, own = self.stack.queries_keys_values(x, layer, inputs, w, eps=self.eps)
            if own:
                cached[kind] = cache_keys_values(*own, layer, inputs)
            bounds = inputs.bounds(self.stack.window if kind == SLIDING else None)
            y = attend(q, cached[kind], at, attention, bounds=bounds, scale=1.0)
            y = w.rms_norm(w.linear(y, f"{at}.attn_output"), f"{at}.post_attention_norm", self.eps)
            y = ops.add(y, active, name=f"{at}.attn_residual")
            y = ops.add(y, self._laurel(x, at, w), name=f"{at}.attn_laurel")
            y = ops.scale(y, factor=2.0**-0.5, name=f"{at}.attn_laurel.scaled")
            x = self._feed_forward(w.rms_norm(y, f"{at}.ffn_norm", self.eps), layer, w)
            x = w.rms_norm(x, f"{at}.post_ffw_norm", self.eps)
            y = ops.add(x, y, name=f"{at}.ffn_residual")
            streams = self.altup.correct(predicted, active, y, at, w)
            x = ops.mul(
                self.altup.stream(streams, self.altup.active, f"{at}.altup_first"),
                w.tensor(f"{at}.altup_correct_scale.weight"),
                name=f"{at}.altup_correct_scale",
            )
            x = self.per_layer.output(x, layer, layer_inputs, w)
            streams = self.altup.add_to_others(streams, x, at)
        y = self._logits(streams, inputs, w)
        return ops.softcap(y, cap=self.softcap, name="logits.capped")

    def _laurel(self, x: Node, at: str, w: Weights) -> Node:
        """x and a product of low rank of it          [T, D] -> [T, D]"""
        y = w.linear(w.linear(x, f"{at}.laurel_l"), f"{at}.laurel_r")
        y = w.rms_norm(y, f"{at}.laurel_post_norm", self.eps)
        return ops.add(y, x, name=f"{at}.laurel")

    def _feed_forward(self, x: Node, layer: int, w: Weights) -> Node:
        """[T, D] -> [T, D]"""
        at, deviations = f"blk.{layer}", self.deviations[layer]
        gate, up = (w.linear(x, f"{at}.ffn_{part}") for part in ("gate", "up"))
        if deviations is not None:
            gate = ops.gaussian_topk(gate, deviations=deviations, name=f"{at}.ffn_gate.top")
        y = ops.gelu_mul(gate, up, approximate="tanh", name=f"{at}.ffn_gated")
        return w.linear(y, f"{at}.ffn_down")

    def _logits(self, streams: Node, inputs: TextInputs, w: Weights) -> Node:
        """[T, N, D] -> [R, V], of the rows requested"""
        count, width = self.altup.count, self.width
        flat = ops.reshape(streams, shape=(inputs.tokens, count * width), name="streams")
        x = ops.take_rows(flat, inputs.requested_rows(), name="wanted")
        x = ops.reshape(x, shape=(x.shape[0], count, width), name="wanted.streams")
        x = w.rms_norm(self.altup.merge(x, w), "output_norm", self.eps)
        return w.linear(x, "token_embd" if self.tied else "output", name="logits")


def to_gguf(text: Gemma3nText) -> GgufText:
    """Return the architecture and keys of a GGUF that says the same."""
    stack, size = text.stack, text.stack.sizes[SLIDING]
    missing = [-math.inf if one is None else one for one in text.deviations]
    keys = {
        "block_count": len(stack.kinds),
        "context_length": text.context,
        "embedding_length": text.width,
        "feed_forward_length": list(text.ffn),
        "attention.head_count": stack.heads,
        "attention.head_count_kv": size.groups,
        "attention.key_length": size.head,
        "attention.value_length": size.head,
        "attention.layer_norm_rms_epsilon": text.eps,
        "attention.sliding_window": stack.window,
        PATTERN: [kind == SLIDING for kind in stack.kinds],
        "attention.shared_kv_layers": stack.shared,
        "rope.freq_base_swa": stack.ropes[SLIDING].settings["rope_theta"],
        "altup.active_idx": text.altup.active,
        "altup.num_inputs": text.altup.count,
        "embedding_length_per_layer_input": text.per_layer.size,
        "activation_sparsity_scale": missing,
        "final_logit_softcapping": text.softcap,
    }
    refused = "feed-forward layers of several widths" if len({*text.ffn}) > 1 else ""
    return GgufText("gemma3n", keys, stack.ropes[FULL], refused=refused)


def from_gguf(keys: Settings, names: Collection[str]) -> dict[str, Any]:  # noqa: ARG001
    """Return what config.json would say beyond the common keys."""
    depth = keys.count("block_count", maximum=MAX_LAYERS)
    scale = keys.get("activation_sparsity_scale", None)
    return {
        "layer_types": [SLIDING if slides else FULL for slides in sliding_layers(keys, EVERY)],
        "intermediate_size": of_each_layer(keys, "feed_forward_length", depth),
        "num_kv_shared_layers": keys.get("attention.shared_kv_layers", None),
        "rope_local_base_freq": keys.number("rope.freq_base_swa", 1e4),
        "hidden_size_per_layer_input": keys.get("embedding_length_per_layer_input", None),
        "altup_num_inputs": keys.get("altup.num_inputs", None),
        "altup_active_idx": keys.get("altup.active_idx", None),
        "laurel_rank": LAUREL_RANK,
        "activation_sparsity_scale": None
        if scale is None
        else of_each_layer(keys, "activation_sparsity_scale", depth),
        "final_logit_softcapping": keys.get("final_logit_softcapping", None),
        "of_gguf": True,
    }


def read(c: Settings) -> Gemma3nText:
    """Read it from config.json or its text_config, with transformers' defaults; ModelError where it
    is impossible.
    """
    c.choice("hidden_activation", ("gelu_pytorch_tanh",), "gelu_pytorch_tanh")
    c.choice("attention_bias", (False,), False)
    c.choice("altup_correct_scale", (True,), True)
    depth, width = (
        c.count("num_hidden_layers", 35, maximum=MAX_LAYERS),
        c.count("hidden_size", 2048, maximum=MAX_WIDTH),
    )
    eps, vocabulary = c.number("rms_norm_eps", 1e-6), c.count("vocab_size", 262400)
    rows = vocabulary if c.flag("of_gguf", False) else min(262144, vocabulary)
    streams = c.count("altup_num_inputs", 4, maximum=MAX_STREAMS)
    active = c.get("altup_active_idx", 0)
    if streams < 2 or type(active) is not int or not 0 <= active < streams:
        raise ModelError(
            f"{c.where}: altup_num_inputs is {streams}, altup_active_idx {active!r:.20}; expected "
            f"2 to {MAX_STREAMS} streams, and one of them"
        )
    return Gemma3nText(
        width=width,
        ffn=_widths(c, depth),
        deviations=_deviations(c, depth),
        rank=c.count("laurel_rank", LAUREL_RANK, maximum=MAX_WIDTH),
        stack=_layer_kinds(c, depth),
        altup=AltUp(streams, active, width, eps),
        per_layer=read_per_layer(
            Settings({"vocab_size_per_layer_input": rows, **c.values}, c.where),
            layers=depth,
            width=width,
            eps=eps,
            vocabulary=vocabulary,
            pad=PAD,
        ),
        vocabulary=vocabulary,
        context=c.count("max_position_embeddings", 32768),
        eps=eps,
        softcap=c.number("final_logit_softcapping", 30.0),
        tied=c.flag("tie_word_embeddings", True),
    )


def _layer_kinds(c: Settings, depth: int) -> LayerKinds:
    default = [FULL if (layer + 1) % EVERY == 0 else SLIDING for layer in range(depth)]
    kinds = read_layer_types(c, depth, (SLIDING, FULL), default)
    heads, groups, head = read_heads(c, 8, 2, 256)
    context = c.count("max_position_embeddings", 32768)
    return LayerKinds(
        kinds=kinds,
        heads=heads,
        sizes=dict.fromkeys((SLIDING, FULL), KV(groups, head)),
        ropes=read_ropes(c, head, context),
        window=c.count("sliding_window", 512),
        shared=read_shared(c, kinds, 15),
        keys_are_values=False,
    )


def _widths(c: Settings, depth: int) -> tuple[int, ...]:
    """Widths of feed-forward layers: one for all, or a list. Raises ModelError."""
    widths: Any = c.get("intermediate_size", 16384)
    each = list(widths) if isinstance(widths, (list, tuple)) else [widths] * depth
    if len(each) != depth or any(type(n) is not int or not 0 < n <= MAX_WIDTH for n in each):
        raise ModelError(
            f"{c.where}: intermediate_size is {widths!r:.60}, expected a width up to {MAX_WIDTH}, "
            f"or one for each of {depth} layers"
        )
    return tuple(each)


def _deviations(c: Settings, depth: int) -> tuple[float | None, ...]:
    """Return above how many standard deviations the values of each layer's gate are left, None
    where all are. A GGUF says it so, config.json what share is left out. Raises ModelError.
    """
    scale, dense = c.get("activation_sparsity_scale", None), -math.inf
    if scale is not None:
        if (
            not isinstance(scale, (list, tuple))
            or len(scale) != depth
            or not all(type(one) is float and (one == dense or abs(one) < 10) for one in scale)
        ):
            raise ModelError(
                f"{c.where}: activation_sparsity_scale is {scale!r:.60}, expected a number for "
                f"each of {depth} layers, or -inf where nothing is left out"
            )
        return tuple(None if one == dense else one for one in scale)
    sparse = SPARSE if depth > SPARSE else 0
    default = [SPARSITY] * sparse + [0.0] * (depth - sparse)
    shares: Any = c.get("activation_sparsity_pattern", default)
    if (
        not isinstance(shares, (list, tuple))
        or len(shares) != depth
        or any(type(one) not in (int, float) or not 0 <= one <= MAX_SPARSITY for one in shares)
    ):
        raise ModelError(
            f"{c.where}: activation_sparsity_pattern is {shares!r:.60}, expected a share from 0 to "
            f"{MAX_SPARSITY} for each of {depth} layers"
        )
    normal = torch.distributions.Normal(0.0, 1.0)
    return tuple(
        normal.icdf(torch.tensor(one, dtype=torch.float32)).item() if one > MIN_SPARSITY else None
        for one in shares
    )
