"""Rotary position embeddings: how fast each pair of a head turns, and by which position.

Frequencies are computed in fp32, as the reference implementations do, so that angles agree with
theirs to the last bit.
"""

from __future__ import annotations

import math
from collections import ChainMap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, cast

import torch
from torch import Tensor

from mtmd.base.errors import ModelError
from mtmd.kernels.checkpoint.settings import Settings

# transformers' ROPE_INIT_FUNCTIONS, and older names: "mrope" says nothing of scaling, "su" was
# Phi-3's for longrope
TYPES = ("default", "linear", "dynamic", "llama3", "yarn", "longrope", "proportional")
YARN_KEYS = {  # of rope_parameters, and GGUF's below rope.scaling.
    "beta_fast": "yarn_beta_fast",
    "beta_slow": "yarn_beta_slow",
    "mscale_all_dim": "yarn_log_multiplier",
}
# Tensors of a GGUF with LongRoPE's factors, and what stands for them among the keys here
FACTORS = {
    f"rope_factors_{length}.weight": f"rope.scaling.{length}_factor" for length in ("short", "long")
}
DIVISORS = "rope_freqs.weight"  # a tensor by whose numbers a GGUF divides frequencies
OLD_TYPES = {"mrope": "default", "su": "longrope", "xdrope": "dynamic"}


@dataclass(frozen=True)
class Rotary:
    """Pair p of a token turns by positions[axes[p]] * frequencies[p]; cosines and sines are
    multiplied by `scale`.

    `axes` () means that every pair goes by the first position. A head has at least twice as many
    dimensions as there are frequencies; those beyond are left as they are. LongRoPE has other
    frequencies, `long`, for contexts of more than `short_context` tokens. `settings`: the
    `rope_parameters` that it was read from, complete with type and base.
    """

    frequencies: tuple[float, ...]
    axes: tuple[int, ...] = ()
    scale: float = 1.0
    long: tuple[float, ...] = ()
    short_context: int = 0
    settings: Mapping[str, Any] = field(default_factory=dict, compare=False, repr=False)

    def for_context(self, context: int) -> Rotary:
        """Return the embedding of a cache that holds up to `context` tokens."""
        if not self.long or context <= self.short_context:
            return self
        return replace(self, frequencies=self.long)

    def by_axes(self, axes: Sequence[int]) -> Rotary:
        return replace(self, axes=tuple(axes))


def rotary(base: float, dims: int) -> Rotary:
    """base^(-2p / dims) for pair p of dims / 2; arXiv:2104.09864"""
    return Rotary(tuple(_inverse(base, dims).tolist()))


def turning_dims(head: int, share: float, where: str) -> int:
    """Dimensions of a head of which a share turns. Raises ModelError for more than it has."""
    if share > 1:
        raise ModelError(
            f"{where}: {head * share:g} dimensions of a head of {head} are "
            "rotated, expected no more than it has"
        )
    return int(head * share)


def rope_settings(c: Settings) -> Settings:
    """Return what a config.json says of rotary embeddings: `rope_parameters` (transformers 5) over
    `rope_scaling`. An `original_max_position_embeddings` beside them, as Phi-3 has it, goes first.
    """
    values = {**c.part("rope_scaling").values, **c.part("rope_parameters").values}
    if c.get("original_max_position_embeddings", None) is not None:
        values["original_max_position_embeddings"] = c.values["original_max_position_embeddings"]
    return Settings(values, f"{c.where}: rope_parameters")


def gguf_scaling(keys: Settings) -> dict[str, Any] | None:
    """Return what a GGUF's keys `rope.scaling.*`, LongRoPE's factors among them (`FACTORS`), say,
    as `rope_scaling` of a config.json says it; None for no scaling.

    The rules are llama.cpp's (llama-model.cpp, load_hparams): a factor without a type is linear,
    `rope.scale_linear` is the factor's old name, 0 is no factor, `attn_factor` multiplies whatever
    the type, and LongRoPE is where its factors are. `yarn_ext_factor` and `yarn_attn_factor` are
    read for Grok alone.
    """
    name = (
        "rope.scale_linear"
        if keys.get("rope.scaling.factor", None) is None
        else ("rope.scaling.factor")
    )
    factor = keys.number(name) if keys.get(name, 0) else 1.0
    kind = keys.choice("rope.scaling.type", ("none", "linear", "yarn", "longrope"), "linear")
    scaling: dict[str, Any] = {"rope_type": "default"}
    if keys.get("rope.scaling.long_factor", None) is not None:
        scaling = {
            "rope_type": "longrope",
            "short_factor": keys.get("rope.scaling.short_factor", None),
            "long_factor": keys.get("rope.scaling.long_factor", None),
            "original_max_position_embeddings": keys.get(
                "rope.scaling.original_context_length", None
            ),
            "attention_factor": 1.0,
        }
    if kind == "linear" and factor != 1:
        scaling = {"rope_type": "linear", "factor": factor}
    if keys.get("rope.scaling.alpha", 0):
        scaling = {"rope_type": "dynamic", "alpha": keys.number("rope.scaling.alpha")}
    if kind == "yarn":
        scaling = {
            "rope_type": "yarn",
            "factor": factor,
            "original_max_position_embeddings": keys.get(
                "rope.scaling.original_context_length", None
            ),
            "mscale": keys.get("rope.scaling.yarn_log_multiplier", None) and 1.0,
            **{name: keys.get(f"rope.scaling.{key}", None) for name, key in YARN_KEYS.items()},
        }
    if keys.get("rope.scaling.attn_factor", None) is not None:
        scaling["multiplier"] = keys.number("rope.scaling.attn_factor")
    return None if scaling == {"rope_type": "default"} else scaling


def with_factors(
    architecture: str, metadata: Mapping[str, Any], tensors: Mapping[str, Tensor]
) -> Mapping[str, Any]:
    """Return a GGUF's metadata with LongRoPE's factors, which are `tensors` there, under keys. No
    other value is read.
    """
    if not tensors:
        return metadata
    factors = {
        f"{architecture}.{FACTORS[name]}": tensor.tolist() for name, tensor in tensors.items()
    }
    return ChainMap(factors, cast(dict[str, Any], metadata))  # which writes to the first alone


def gguf_rope(made: Rotary, context: int, where: str) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Return the keys and the tensors, fp32, with which a GGUF says the same: rope_freqs.weight,
    the numbers by which frequencies are divided, or LongRoPE's factors. Raises ModelError for what
    it cannot say.
    """
    p, axes = Settings(made.settings, where), made.axes
    kind, base = p.values["rope_type"], p.number("rope_theta")
    keys: dict[str, Any] = {"rope.freq_base": base}
    if axes:
        order = (0, 2, 1, 3) if 3 in axes else range(4)  # columns before rows, if pictures count
        keys["rope.dimension_sections"] = [axes.count(axis) for axis in order]
    if kind in ("llama3", "proportional"):
        plain = _inverse(base, 2 * len(made.frequencies))
        turned = torch.tensor(made.frequencies)
        return keys, {DIVISORS: torch.where(turned == 0, 1e30, plain / turned)}
    if kind in ("linear", "yarn"):
        old = p.number("original_max_position_embeddings", context)
        keys["rope.scaling.type"] = kind
        keys["rope.scaling.factor"] = p.number("factor", context / old)
    if kind == "yarn":
        keys["rope.scaling.original_context_length"] = int(old)
        for ours, theirs in YARN_KEYS.items():
            if p.get(ours, None):
                keys[f"rope.scaling.{theirs}"] = p.number(ours)
    if kind == "dynamic" and p.get("alpha", None) is not None:
        keys |= {
            "rope.scaling.type": "none",
            "rope.scaling.alpha": p.number("alpha"),
            "rope.scaling.factor": p.number("factor", 1.0),
            "rope.scaling.original_context_length": context,
        }
    if kind == "longrope":
        keys |= {
            "rope.scaling.type": kind,
            "rope.scaling.original_context_length": made.short_context,
            "rope.scaling.attn_factor": made.scale,
        }
        count = len(made.frequencies)
        factors = (p.numbers(name, count, ()) for name in ("short_factor", "long_factor"))
        return keys, dict(zip(FACTORS, map(torch.tensor, factors), strict=True))
    return keys, {}


def read_rotary(parameters: Settings, dims: int, base: float, context: int) -> Rotary:
    """Read it from `rope_parameters` (or `rope_scaling`) of a config.json: `dims` of each head
    turn, `base` where it is not given there, `context` the tokens the checkpoint is made for.
    Raises ModelError for a type we do not know and for numbers that cannot be.

    "dynamic" changes nothing up to `context` tokens, and no cache is longer; with an `alpha` it
    has another base, whatever the length.
    """
    named = parameters.choice("rope_type", (*TYPES, *OLD_TYPES), parameters.get("type", "default"))
    kind = OLD_TYPES.get(named, named)
    base = parameters.number("rope_theta", base)
    multiplier = parameters.number("multiplier", 1.0)
    try:
        made = _read(kind, parameters, base, dims, context)
    except (ArithmeticError, ValueError) as error:
        raise ModelError(_no_number(parameters.where, named)) from error
    settings = {**parameters.values, "rope_type": kind, "rope_theta": base}
    made = replace(made, scale=made.scale * multiplier, settings=settings)
    if not all(map(math.isfinite, (*made.frequencies, *made.long, made.scale))):
        raise ModelError(_no_number(parameters.where, named))
    return made


def _no_number(where: str, kind: str) -> str:
    return (
        f"{where}: rotary frequencies of rope_type {kind} are not finite, expected a rope_theta "
        "and factors that give numbers within a 4-byte float; fetch the file again"
    )


def _read(kind: str, parameters: Settings, base: float, dims: int, context: int) -> Rotary:
    if kind == "proportional":
        turning = 2 * int(parameters.number("partial_rotary_factor", 1.0) * dims // 2)
        saved = _inverse(base, dims)[: turning // 2] / parameters.number("factor", 1.0)
        return Rotary((*saved.tolist(), *[0.0] * ((dims - turning) // 2)))
    if kind == "dynamic" and parameters.get("alpha", None) is not None and dims > 2:
        base *= parameters.number("alpha") ** (dims / (dims - 2))
    plain = _inverse(base, dims)
    if kind == "linear":
        return Rotary(tuple((plain / parameters.number("factor")).tolist()))
    if kind == "llama3":
        return Rotary(tuple(_by_wavelength(plain, parameters, context).tolist()))
    if kind == "yarn":
        return _yarn(parameters, base, dims, context)
    if kind == "longrope":
        return _long(parameters, base, dims, context)
    return Rotary(tuple(plain.tolist()))


def sections(counts: Sequence[int], interleaved: bool) -> tuple[int, ...]:
    """The axis of each pair in M-RoPE (arXiv:2409.12191): `counts` pairs each for time, row and
    column, one after another or, as newer models have them, interleaved for as long as rows and
    columns last.
    """
    if not interleaved:
        return tuple(axis for axis, count in enumerate(counts) for _ in range(count))
    axes = [0] * sum(counts)
    for axis in (1, 2):
        axes[axis : counts[axis] * 3 : 3] = [axis] * len(axes[axis : counts[axis] * 3 : 3])
    return tuple(axes)


def _inverse(base: float, dims: int) -> Tensor:
    if dims < 2 or dims % 2:
        raise ModelError(
            f"rotary embedding over {dims} dimensions of a head, expected an even number of at "
            "least 2"
        )
    return 1.0 / (base ** (torch.arange(0, dims, 2, dtype=torch.int64).float() / dims))


def _by_wavelength(plain: Tensor, p: Settings, context: int) -> Tensor:
    """Llama 3.1: long waves are slowed by `factor`, short ones are not, those between in
    between.
    """
    factor, low, high = (
        p.number("factor"),
        p.number("low_freq_factor"),
        p.number("high_freq_factor"),
    )
    old = p.number("original_max_position_embeddings", context)
    if high < low:
        raise ModelError(
            f"{p.where}: high_freq_factor is {high}, expected no less than low_freq_factor, {low}"
        )
    waves = 2 * math.pi / plain
    slow = torch.where(waves > old / low, plain / factor, plain)
    if high == low:  # none is between
        return slow
    smooth = (old / waves - low) / (high - low)
    between = (1 - smooth) * slow / factor + smooth * slow
    middle = ~(waves < old / high) & ~(waves > old / low)
    return torch.where(middle, between, slow)


def _yarn(p: Settings, base: float, dims: int, context: int) -> Rotary:
    """YaRN (arXiv:2309.00071): fast pairs keep their frequency, slow ones are interpolated, with a
    ramp between; scores are tempered.
    """
    old = p.number("original_max_position_embeddings", context)
    factor = p.number("factor", context / old)

    def dimension(rotations: float) -> float:
        return dims * math.log(old / (rotations * 2 * math.pi)) / (2 * math.log(base))

    low, high = dimension(p.number("beta_fast", 32)), dimension(p.number("beta_slow", 1))
    if p.flag("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dims - 1)
    ramp = ((torch.arange(dims // 2, dtype=torch.float32) - low) / max(high - low, 0.001)).clamp(
        0, 1
    )
    steps = base ** (torch.arange(0, dims, 2).float() / dims)
    fast = 1 - ramp
    frequencies = 1.0 / (factor * steps) * (1 - fast) + 1.0 / steps * fast
    return Rotary(tuple(frequencies.tolist()), scale=_temper(p, factor))


def _temper(p: Settings, factor: float) -> float:
    def mscale(weight: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0

    if p.get("attention_factor", None) is not None:
        return p.number("attention_factor")
    if p.get("mscale", None) and p.get("mscale_all_dim", None):
        return mscale(p.number("mscale")) / mscale(p.number("mscale_all_dim"))
    return mscale(1.0)


def _long(p: Settings, base: float, dims: int, context: int) -> Rotary:
    """LongRoPE (arXiv:2402.13753): each pair is slowed by a factor of its own, of one list up to
    the length of pre-training, of another beyond.
    """
    old = p.count("original_max_position_embeddings", context)
    if old < 2:
        raise ModelError(
            f"{p.where}: original_max_position_embeddings is {old}, expected at least 2"
        )
    factor = p.number("factor", context / old)
    root = 1.0 if factor <= 1 else math.sqrt(1 + math.log(factor) / math.log(old))
    steps = base ** (torch.arange(0, dims, 2, dtype=torch.int64).float() / dims)

    def slowed(key: str) -> tuple[float, ...]:
        slower = torch.tensor(p.numbers(key, dims // 2, ()), dtype=torch.float32)
        if not bool((slower > 0).all()):
            raise ModelError(f"{p.where}: {key} has a factor of {slower.min():g}, expected above 0")
        return tuple((1.0 / (slower * steps)).tolist())

    return Rotary(
        slowed("short_factor"),
        scale=p.number("attention_factor", root),
        long=slowed("long_factor"),
        short_context=old,
    )
