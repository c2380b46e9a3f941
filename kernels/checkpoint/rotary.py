"""Rotary position embeddings: how fast each pair of a head turns, and by which position.

Frequencies are computed in fp32, as the reference implementations do, so that angles agree with
theirs to the last bit.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from mtmd.kernels.checkpoint.settings import Settings
from mtmd.kernels.errors import ModelError

TYPES = ("default", "linear", "llama3", "yarn", "proportional")


@dataclass(frozen=True)
class Rotary:
    """Pair p of a token turns by positions[axes[p]] * frequencies[p]; cosines and sines are
    multiplied by `scale`.

    `axes` () means that every pair goes by the first position. A head has at least twice as many
    dimensions as there are frequencies; those beyond are left as they are.
    """

    frequencies: tuple[float, ...]
    axes: tuple[int, ...] = ()
    scale: float = 1.0

    def by_axes(self, axes: Sequence[int]) -> Rotary:
        return replace(self, axes=tuple(axes))


def rotary(base: float, dims: int) -> Rotary:
    """base^(-2p / dims) for pair p of dims / 2; arXiv:2104.09864"""
    return Rotary(tuple(_inverse(base, dims).tolist()))


def turning_dims(head: int, share: float, where: str) -> int:
    """Dimensions of a head of which a share turns. Raises ModelError for more than it has."""
    if share > 1:
        raise ModelError(
            f"{where}: {head * share:g} dimensions of a head of {head} turn, expected no more than "
            "it has"
        )
    return int(head * share)


def read_rotary(parameters: Settings, dims: int, base: float, context: int) -> Rotary:
    """From `rope_parameters` (or `rope_scaling`) of a config.json: `dims` of each head turn, `base`
    where it is not given there, `context` the tokens the checkpoint is made for. Raises ModelError
    for a type we do not know and for numbers that cannot be.
    """
    # "mrope", an old name, says nothing of scaling.
    kind = parameters.choice("rope_type", (*TYPES, "mrope"), parameters.get("type", "default"))
    base = parameters.number("rope_theta", base)
    if kind == "proportional":
        turning = 2 * int(parameters.number("partial_rotary_factor", 1.0) * dims // 2)
        kept = _inverse(base, dims)[: turning // 2] / parameters.number("factor", 1.0)
        return Rotary((*kept.tolist(), *[0.0] * ((dims - turning) // 2)))
    plain = _inverse(base, dims)
    if kind == "linear":
        return Rotary(tuple((plain / parameters.number("factor")).tolist()))
    if kind == "llama3":
        return Rotary(tuple(_by_wavelength(plain, parameters, context).tolist()))
    if kind == "yarn":
        return _yarn(parameters, base, dims, context)
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
    if high <= low:
        raise ModelError(
            f"{p.where}: high_freq_factor is {high}, expected more than low_freq_factor, {low}"
        )
    waves = 2 * math.pi / plain
    slow = torch.where(waves > old / low, plain / factor, plain)
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
