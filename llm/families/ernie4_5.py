"""ERNIE 4.5 (Baidu, ERNIE 4.5 Technical Report, 2025): grouped attention, each two dimensions of a
head that follow each other turned together, SwiGLU or, in some layers, experts with a correction
bias and shared ones. In the text of ERNIE 4.5 VL those of text and of pictures are different
experts, and positions have a time, a row and a column.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from operator import itemgetter
from typing import Any

import torch
from torch import Tensor

from mtmd.base.errors import ModelError
from mtmd.kernels import ops
from mtmd.kernels.checkpoint.canonical import Parameter, Stored
from mtmd.kernels.checkpoint.rotary import Rotary, read_rotary, rope_settings
from mtmd.kernels.checkpoint.settings import MAX_LAYERS, MAX_WIDTH, Settings
from mtmd.kernels.graph import Node, WeightSource
from mtmd.kernels.layers import Weights
from mtmd.kernels.ops.moe import Routing
from mtmd.kernels.plan.flash_choice import AttentionForm
from mtmd.llm.blocks import (
    attend,
    cache_keys_values,
    logits,
    moe_ffn,
    queries_keys_values,
    read_heads,
    swiglu,
    token_embeddings,
)
from mtmd.llm.experts import MAX_EXPERTS, ExpertNames, Experts, expert_parameters
from mtmd.llm.gguf_keys import GgufText, decoder_keys, expert_keys
from mtmd.llm.inputs import TextInputs
from mtmd.llm.parameters import (
    ATTENTION,
    COPIED_HEAD,
    MLP,
    attention_tensors,
    decoder_parameters,
    mlp_tensors,
    prefixed,
)
from mtmd.llm.state import KV

PREFIXES = ("model.", "model.language_model.")
SOURCE = prefixed(PREFIXES)
NAMES = ExpertNames(bias="moe_statics.e_score_correction_bias", shared="shared_experts")
SEEN = ".vis"  # behind the name of a layer: that of its experts of pictures
PARTS = {"gate": "gate_proj", "up": "up_proj", "down": "down_proj"}
DENSE, SPARSE, SEEING = "ernie4_5", "ernie4_5_moe", "ernie4_5_vl_moe_text"
# The ids of the tokens around pictures and videos, where a config.json does not say them
MARKS = {
    "image_start_token_id": 101304,
    "image_end_token_id": 101305,
    "video_start_token_id": 101306,
    "video_end_token_id": 101307,
}
SECTIONS = [22, 22, 20]  # pairs of a head that turn by rows, by columns and by time
MAX_FLOOR = 1e-6  # of the sum of weights: it is added to the sum, and has to be lost in it
# What transformers takes for keys that a config.json leaves out, by model_type.
COMMON: dict[str, Any] = {
    "vocab_size": 103424,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": True,
}
EXPERTS = COMMON | {
    "hidden_size": 2560,
    "intermediate_size": 12288,
    "num_hidden_layers": 28,
    "num_attention_heads": 20,
    "num_key_value_heads": 4,
    "moe_k": 6,
    "moe_num_experts": 64,
    "moe_num_shared_experts": 2,
}
DEFAULTS: dict[str, dict[str, Any]] = {
    DENSE: COMMON
    | {
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "num_hidden_layers": 18,
        "num_attention_heads": 16,
        "num_key_value_heads": 2,
        "head_dim": 128,
    },
    SPARSE: EXPERTS
    | {
        "moe_intermediate_size": 1536,
        "moe_layer_start_index": 1,
        "moe_layer_end_index": -1,
        "moe_layer_interval": 1,
    },
    SEEING: EXPERTS | {"moe_intermediate_size": [1536, 512]},
}
# Published and transformers' own names of the settings of experts
SAME = {"moe_num_experts": "num_experts", "moe_k": "num_experts_per_tok"}


@dataclass(frozen=True)
class Ernie45Text:
    """`seeing`: the experts of pictures, in the layers of those of text; `marks`: the ids of the
    tokens around pictures, which such experts read, too.
    """

    width: int
    ffn: int  # of layers without experts
    heads: int
    groups: int
    head: int
    depth: int
    vocabulary: int
    context: int
    eps: float
    tied: bool
    bias: bool
    rotary: Rotary
    experts: Experts | None
    seeing: Experts | None = None
    marks: tuple[int, ...] = ()

    image_width = property(lambda self: self.width)

    @property
    def unused(self) -> tuple[str, ...]:
        """Layers that draft, too."""
        return (r"(model\.)?mtp_.*", *((COPIED_HEAD,) if self.tied else ()))

    @property
    def layers(self) -> list[tuple[KV]]:
        return [(KV(self.groups, self.head),)] * self.depth

    def parameters(self) -> Mapping[str, Parameter]:
        layer = {
            "attn_norm": ("input_layernorm", (self.width,)),
            **attention_tensors(self.width, self.heads, self.groups, self.head),
            "ffn_norm": ("post_attention_layernorm", (self.width,)),
        }
        dense, sparse = mlp_tensors(self.width, self.ffn), self.experts.at if self.experts else ()
        parameters = decoder_parameters(
            SOURCE,
            [layer if i in sparse else {**layer, **dense} for i in range(self.depth)],
            vocabulary=self.vocabulary,
            width=self.width,
            tied=self.tied,
            biased=(*ATTENTION, *MLP) if self.bias else (),
        )
        for i in sparse:
            assert self.experts
            sources = SOURCE(f"layers.{i}.mlp.")
            parameters |= expert_parameters(
                f"blk.{i}", sources, self.experts, self.width, names=NAMES
            )
            # Where there are experts of pictures, those of text lie otherwise, too.
            for which, experts in enumerate((self.experts, self.seeing) if self.seeing else ()):
                assert experts
                at = f"blk.{i}{SEEN * which}"
                parameters |= _of_two_kinds(at, sources, experts, self.width, which)
        return parameters

    def graph(self, inputs: TextInputs, weights: WeightSource, attention: AttentionForm) -> Node:
        w, experts = Weights(weights, inputs.dtype), self.experts
        angles, bounds = inputs.angles(self.rotary), inputs.bounds()
        kinds = [inputs.of_pictures(self.marks, others=o) for o in (True, False) if self.seeing]
        x = token_embeddings(inputs, w)
        for layer in inputs.layers(self.depth):
            at = f"blk.{layer}"
            y = w.rms_norm(x, f"{at}.attn_norm", self.eps)
            q, k, v = queries_keys_values(
                y, at, w, heads=self.heads, groups=self.groups, bias=self.bias
            )
            q, k = (
                ops.rope(part, angles, pairs="adjacent", name=f"{at}.{name}.rope")
                for part, name in ((q, "attn_q"), (k, "attn_k"))
            )
            y = attend(q, cache_keys_values(k, v, layer, inputs), at, attention, bounds=bounds)
            y = w.linear(y, f"{at}.attn_output", bias=self.bias)
            x = ops.add(y, x, name=f"{at}.attn_residual")
            y = w.rms_norm(x, f"{at}.ffn_norm", self.eps)
            if self.seeing and experts and layer in experts.at:
                text = moe_ffn(y, at, w, experts, reads=kinds[0])
                seen = moe_ffn(y, f"{at}{SEEN}", w, self.seeing, reads=kinds[1])
                y = ops.add(text, seen, name=f"{at}.ffn_kinds")
            elif experts and layer in experts.at:
                y = moe_ffn(y, at, w, experts)
            else:
                y = swiglu(y, at, w, bias=self.bias)
            x = ops.add(y, x, name=f"{at}.ffn_residual")
        return logits(x, inputs, w, eps=self.eps, tied=self.tied)


def to_gguf(text: Ernie45Text) -> GgufText:
    """Return the architecture and keys of a GGUF that says the same."""
    keys, refused = decoder_keys(text), "biases of every layer" if text.bias else ""
    keys["rope.dimension_count"] = text.head
    experts = text.experts
    if experts is None:
        return GgufText("ernie4_5", keys, text.rotary, refused=refused)
    first = min(experts.at)
    keys |= expert_keys(experts) | {
        "expert_shared_count": experts.shared // experts.ffn,
        "leading_dense_block_count": first,
        "interleave_moe_layer_step": 1,
    }
    if experts.at != frozenset(range(first, text.depth)):
        refused = "layers without experts behind the first that has them"
    if text.seeing:
        refused = "experts of pictures"
    return GgufText("ernie4_5-moe", keys, text.rotary, refused=refused)


def from_gguf(keys: Settings, names: Collection[str]) -> dict[str, Any]:
    """Return what config.json would say beyond the common keys."""
    if keys.get("expert_count", None) is None:
        return {"model_type": DENSE}
    return {
        "model_type": SPARSE,
        "moe_num_shared_experts": keys.get("expert_shared_count", 0),
        "moe_layer_start_index": keys.get("leading_dense_block_count", 0),
        "moe_layer_interval": keys.get("interleave_moe_layer_step", 1),
        "correction_bias": any(name.endswith(".exp_probs_b.bias") for name in names),
    }


def _of_two_kinds(
    at: str, sources: tuple[str, ...], experts: Experts, width: int, which: int
) -> dict[str, Parameter]:
    """The router and the experts of text (0) or of pictures (1), whose numbers go on where those
    of text end: routers [D, E], and the correction biases of both in one.
    """
    e, f = experts.count, experts.ffn
    router = tuple(f"{source}gate.weight{'_1' * which}" for source in sources)
    biases = tuple(f"{source}{NAMES.bias}" for source in sources)
    parameters = {
        f"{at}.ffn_gate_inp.weight": Parameter((e, width), router, (width, e), torch.t),
        f"{at}.exp_probs_b.bias": Parameter((e,), biases, (2, e), itemgetter(which)),
    }
    for part, name in PARTS.items():
        shape = (width, f) if part == "down" else (f, width)
        ways = (
            tuple(f"{source}experts.{which * e + i}.{name}.weight" for i in range(e))
            for source in sources
        )
        parameters[f"{at}.ffn_{part}_exps.weight"] = Parameter(
            (e, *shape),
            (),
            others=tuple(Stored(way, shape, _stack, picks_rows=True) for way in ways),
        )
    return parameters


def _stack(*experts: Tensor) -> Tensor:
    return torch.stack(experts)


def read(given: Settings) -> Ernie45Text:
    """Read it from config.json, with transformers' defaults; ModelError where a value cannot be
    followed.
    """
    kind = given.choice("model_type", DEFAULTS, DENSE)
    values = {key: value for key, value in given.values.items() if value is not None}
    values |= {
        ours: values[key] for ours, key in SAME.items() if ours not in values and key in values
    }
    c = Settings({**DEFAULTS[kind], **values}, given.where)
    c.choice("hidden_act", ("silu",), "silu")
    depth = c.count("num_hidden_layers", maximum=MAX_LAYERS)
    context, bias = c.count("max_position_embeddings"), c.flag("use_bias", False)
    heads, groups, head = read_heads(c, 16, None, None)
    experts, seeing = None if kind == DENSE else _experts(c, depth), None
    rope = rope_settings(c)
    rotary = read_rotary(rope, head, c.number("rope_theta", 5e5), context)
    if kind == SEEING:
        seeing = _seeing(c, experts)
        rotary = _by_rows_and_columns(rotary, rope, head)
    if experts and bias:
        raise ModelError(f"{c.where}: use_bias is true, expected false in a model with experts")
    return Ernie45Text(
        width=c.count("hidden_size", maximum=MAX_WIDTH),
        ffn=c.count("intermediate_size", maximum=MAX_WIDTH),
        heads=heads,
        groups=groups,
        head=head,
        depth=depth,
        vocabulary=c.count("vocab_size"),
        context=context,
        eps=c.number("rms_norm_eps"),
        tied=c.flag("tie_word_embeddings", True),
        bias=bias,
        rotary=rotary,
        experts=experts,
        seeing=seeing,
        marks=tuple(c.token_id(key, usual) for key, usual in MARKS.items()) if seeing else (),
    )


def _experts(c: Settings, depth: int) -> Experts | None:
    """Read the experts and which layers have them, None where none has."""
    at = _sparse(c, depth) if c.get("model_type", DENSE) == SEEING else _stated(c, depth)
    if not at:
        return None
    count = c.count("moe_num_experts", maximum=MAX_EXPERTS)
    ffn = _widths(c)[0]
    return Experts(
        count, ffn, _routing(c, count), at, _shared(c, ffn), biased=c.flag("correction_bias", True)
    )


def _seeing(c: Settings, experts: Experts | None) -> Experts | None:
    """Read the experts of pictures, which are chosen as those of text are."""
    return experts and replace(experts, ffn=_widths(c)[1], shared=0)


def _widths(c: Settings) -> tuple[int, int]:
    """Return the FFN widths of an expert of text and of one of pictures."""
    key = "moe_intermediate_size"
    if c.get("model_type", DENSE) != SEEING:
        return (c.count(key, maximum=MAX_WIDTH),) * 2
    widths: object = c.get(key, None)
    if not isinstance(widths, list) or len(widths) != 2:
        raise ModelError(f"{c.where}: {key} is {widths!r:.40}, expected two widths")
    both = Settings(dict(zip(("text", "pictures"), widths, strict=True)), f"{c.where}: {key}")
    return both.count("text", maximum=MAX_WIDTH), both.count("pictures", maximum=MAX_WIDTH)


def _sparse(c: Settings, depth: int) -> frozenset[int]:
    """Return the layers with experts of a model that sees."""
    kinds = c.get("mlp_layer_types", ["dense"] + ["sparse"] * (depth - 1))
    if (
        not isinstance(kinds, list)
        or len(kinds) != depth
        or any(kind not in ("dense", "sparse") for kind in kinds)
    ):
        raise ModelError(
            f"{c.where}: mlp_layer_types has to name {depth} layers, each dense or sparse"
        )
    return frozenset(i for i, kind in enumerate(kinds) if kind == "sparse")


def _stated(c: Settings, depth: int) -> frozenset[int]:
    """Return the layers with experts of a model of text."""
    first, last = _layer(c, "moe_layer_start_index"), _layer(c, "moe_layer_end_index")
    step = c.count("moe_layer_interval", maximum=MAX_LAYERS)
    behind = depth if last == -1 else min(last + 1, depth)
    return frozenset(i for i in range(max(first, 0), behind) if (i + 1) % step == 0)


def _by_rows_and_columns(rotary: Rotary, rope: Settings, head: int) -> Rotary:
    """Pairs that turn by row and by column in turn, and behind them those that turn by time. Raises
    ModelError for sections that do not fit.
    """
    rope.choice("rope_type", ("default",), "default")
    counts = rope.get("mrope_section", SECTIONS)
    if (
        not isinstance(counts, (list, tuple))
        or len(counts) != 3
        or any(type(n) is not int or n < 1 for n in counts)
        or counts[0] != counts[1]
        or sum(counts) != head // 2
    ):
        raise ModelError(
            f"{rope.where}: mrope_section is {counts!r:.40}, expected two equal counts and a third "
            f"with a sum of {head // 2}, half a head"
        )
    return rotary.by_axes((1, 2) * counts[0] + (0,) * counts[2])


def _layer(c: Settings, key: str) -> int:
    """Return the number of a layer, or -1 for the last one."""
    value = c.get(key, -1)
    if type(value) is not int or value < -1:
        raise ModelError(f"{c.where}: {key} is {value!r:.40}, expected the number of a layer or -1")
    return value


def _routing(c: Settings, count: int) -> Routing:
    """Read how `count` experts are chosen among."""
    if (floor := c.number("moe_norm_min", 1e-12)) > MAX_FLOOR:
        raise ModelError(f"{c.where}: moe_norm_min is {floor}, expected at most {MAX_FLOOR}")
    return Routing(c.count("moe_k", maximum=count), True, eps=floor)


def _shared(c: Settings, ffn: int) -> int:
    """Return the width of the shared experts together, 0 where there are none."""
    key = "moe_num_shared_experts"
    return ffn * c.count(key, maximum=MAX_WIDTH // ffn) if c.get(key, 0) != 0 else 0
