"""Mixtures of types by the names that llama.cpp gives them: the type of each tensor of a decoder.

The rules are those of llama.cpp's quantizer (src/llama-quant.cpp): tables, values and the way down
of some layers suffer most from rounding, and get more bits. Loads without torch, for options.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mtmd.kernels.graph import Shape


@dataclass(frozen=True)
class Mixture:
    """`base`: the type of most tensors. `file_type`: its number in GGUF's general.file_type
    (llama.cpp, include/llama.h, llama_ftype); None for one that no GGUF file holds.
    """

    base: str
    file_type: int | None


MIXTURES: Mapping[str, Mixture] = MappingProxyType(
    {
        "F32": Mixture("F32", 0),
        "F16": Mixture("F16", 1),
        "BF16": Mixture("BF16", 32),
        "Q8_0": Mixture("Q8_0", 7),
        "Q6_K": Mixture("Q6_K", 18),
        "Q5_K_M": Mixture("Q5_K", 17),
        "Q5_K_S": Mixture("Q5_K", 16),
        "Q5_1": Mixture("Q5_1", 9),
        "Q5_0": Mixture("Q5_0", 8),
        "Q4_K_M": Mixture("Q4_K", 15),
        "Q4_K_S": Mixture("Q4_K", 14),
        "IQ4_NL": Mixture("IQ4_NL", 25),
        "IQ4_XS": Mixture("IQ4_XS", 30),
        "MXFP4_MOE": Mixture("MXFP4", 38),
        "Q4_1": Mixture("Q4_1", 3),
        "Q4_0": Mixture("Q4_0", 2),
        "Q3_K_L": Mixture("Q3_K", 13),
        "Q3_K_M": Mixture("Q3_K", 12),
        "Q3_K_S": Mixture("Q3_K", 11),
        "Q2_K": Mixture("Q2_K", 10),
        "Q2_K_S": Mixture("Q2_K", 21),
        "FP8": Mixture("F8_64", None),
    }
)
PLAIN = ("F32", "F16", "BF16")
# As llama.cpp's quantizer understands them, too.
ALIASES = {"Q3_K": "Q3_K_M", "Q4_K": "Q4_K_M", "Q5_K": "Q5_K_M"}
# What is taken where a row is no whole number of blocks of 256.
NARROWER = {
    "IQ4_XS": "IQ4_NL",
    "Q2_K": "Q4_0",
    "Q3_K": "Q4_0",
    "Q4_K": "Q5_0",
    "Q5_K": "Q5_1",
    "Q6_K": "Q8_0",
    "F8_64": "Q8_0",
}
TABLES = ("token_embd.weight", "per_layer_token_embd.weight")
# Small, or read by ops that take plain numbers.
_UNQUANTIZED = re.compile(
    r"_norm\.weight|ffn_gate_inp\.weight|per_layer_model_proj|ssm_conv1d|shortconv\.conv\.weight"
    r"|altup_|laurel_|\.position_embd|\.patch_embd|\.patch_merger|sam\.(pos_embd|neck|net_)|attn\.pos_[hw]"
)
_NOT_IN_BLOCKS = re.compile(r"\.resample_query")  # of the mixture's type where that is plain
_PART = re.compile(r"blk\.(\d+)\.(attn_(?:qkv|q|k|v|output)|ffn_(?:down|up|gate))")


def tensor_types(
    mixture: str, shapes: Mapping[str, Shape], weighted: bool = False
) -> dict[str, str]:
    """The types of those tensors, by GGUF's names, that the mixture changes; the others stay as
    they are: norms, biases, and whatever is small. `weighted`: there is an importance matrix.
    """
    chosen = {}
    model = _Model.of(shapes)
    for name, shape in shapes.items():
        rank = next((at for at, size in enumerate(shape) if size > 1), len(shape))
        if len(shape) - rank < 2 or not name.endswith("weight") or _UNQUANTIZED.search(name):
            continue
        kind = MIXTURES[mixture].base
        if kind not in PLAIN:
            if _NOT_IN_BLOCKS.search(name):
                continue
            kind = _fitting(_chosen(mixture, kind, name, shape, model, weighted), shape[-1])
        chosen[name] = kind
    return chosen


@dataclass(frozen=True)
class _Model:
    """Facts that the rules need of a model: heads of queries to a head of keys, experts of a layer,
    layers, which of them have values, and whether it is one of 70 billion parameters.
    """

    tied: bool
    group: int
    experts: int
    layers: int
    with_values: tuple[int, ...]
    is_70b: bool

    @staticmethod
    def of(shapes: Mapping[str, Shape]) -> _Model:
        layers = {int(name.split(".")[1]) for name in shapes if name.startswith("blk.")}
        parts = [match for name in shapes if (match := _PART.match(name))]
        group = 1
        for layer in sorted(layers):
            out, value = (
                shapes.get(f"blk.{layer}.{part}.weight") for part in ("attn_output", "attn_v")
            )
            if out and value:
                group = max(out[-1] // value[0], 1)
                break
        experts = (s[0] for n, s in shapes.items() if n.endswith("_exps.weight") and len(s) == 3)
        count = max(layers, default=-1) + 1
        return _Model(
            tied="output.weight" not in shapes,
            group=group,
            experts=next(experts, 0),
            layers=count,
            with_values=tuple(sorted({int(m[1]) for m in parts if m[2] in ("attn_v", "attn_qkv")})),
            is_70b=count == 80 and group > 1,
        )


def _chosen(mixture: str, base: str, name: str, shape: Shape, model: _Model, weighted: bool) -> str:
    if mixture == "FP8":  # as published files have it
        return "BF16" if name in (*TABLES, "output.weight") else base
    if name == "output.weight" or (model.tied and name in TABLES):
        if base in ("Q8_0", "MXFP4") or shape[-1] % _values(base):
            return "Q8_0"
        return "Q6_K"
    if mixture == "MXFP4_MOE":
        return "MXFP4" if len(shape) > 2 and shape[0] > 1 else "Q8_0"
    match = _PART.match(name)
    if match is None:
        return base
    layer, part = int(match[1]), match[2]
    if part in ("attn_v", "attn_qkv"):
        kind = _of_values(mixture, model, model.with_values.index(layer)) or base
        if model.is_70b and kind in ("Q3_K", "Q4_K"):
            kind = "Q5_K"
        return "Q8_0" if model.experts == 8 else kind
    if part == "attn_k" and model.experts == 8:
        return "Q8_0"
    if part == "ffn_down":
        return _of_way_down(mixture, layer, model.layers, weighted) or base
    if part == "attn_output":
        return _of_output(mixture, model.experts == 8) or base
    return base


def _of_values(mixture: str, model: _Model, index: int) -> str | None:
    """The type of the values of the layer that is number `index` of those that have some."""
    shared, count = model.group >= 4, len(model.with_values)
    chosen = {
        "Q2_K": "Q4_K" if shared else "Q3_K",
        "Q2_K_S": "Q4_K" if shared else None,
        "Q3_K_M": "Q5_K" if index < 2 else "Q4_K",
        "Q3_K_L": "Q5_K",
        "IQ4_NL": "Q5_K" if shared else None,
        "IQ4_XS": "Q5_K" if shared else None,
        "Q4_K_S": "Q5_K" if index < 4 else None,
        "Q4_K_M": "Q6_K" if _needs_more_bits(index, count) else None,
        "Q5_K_M": "Q6_K" if _needs_more_bits(index, count) else None,
    }
    return chosen.get(mixture)


def _of_way_down(mixture: str, layer: int, layers: int, weighted: bool) -> str | None:
    first, more = layer < layers // 8, _needs_more_bits(layer, layers)
    chosen = {
        "Q2_K": "Q3_K",
        "Q2_K_S": "Q4_K" if first else None,
        "Q3_K_M": "Q5_K" if layer < layers // 16 else "Q4_K",
        "Q3_K_L": "Q5_K",
        "IQ4_NL": "Q5_K" if first and not weighted else None,
        "IQ4_XS": "Q5_K" if first and not weighted else None,
        "Q4_K_S": "Q5_K" if first else None,
        "Q4_K_M": "Q6_K" if more else None,
        "Q5_K_M": "Q6_K" if more else None,
        "Q4_0": "Q4_1" if first and weighted else None,
        "Q5_0": "Q5_1" if first and weighted else None,
    }
    return chosen.get(mixture)


def _of_output(mixture: str, eight_experts: bool) -> str | None:
    if eight_experts:
        small = ("Q2_K", "Q3_K_S", "Q3_K_M", "IQ4_NL", "IQ4_XS", "Q4_K_S", "Q4_K_M")
        return "Q5_K" if mixture in small else None
    return {"Q2_K": "Q3_K", "Q3_K_M": "Q4_K", "Q3_K_L": "Q5_K"}.get(mixture)


def _needs_more_bits(index: int, count: int) -> bool:
    """Return whether it is of the first or last eighth, or one of every third between."""
    return index < count // 8 or index >= 7 * count // 8 or (index - count // 8) % 3 == 2


def _fitting(kind: str, values: int) -> str:
    """The type, or one with smaller blocks where a row is no whole number of them."""
    if kind in PLAIN or values % _values(kind) == 0:
        return kind
    kind = NARROWER.get(kind, kind)
    return "F16" if values % _values(kind) else kind


def _values(kind: str) -> int:
    """Return the values of a block."""
    from mtmd.kernels.quantization.blocks import BLOCKS  # imports torch

    return BLOCKS[kind].values
