"""Keys and values into the cache, for NVIDIA and AMD GPUs: the `kv_store` op, and `rope_store`,
which normalises and turns keys on their way, in one launch each.

One program writes a block of rows (a head of a token each), of keys or of values. Sums and products
are fp32; what is written is rounded once.
"""

# Triton's language is not Python's: its functions carry no types.
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from typing import Any

import torch
from torch import Tensor

from mtmd.kernels.dtype import name_of
from mtmd.kernels.gpu.jit import tl, triton
from mtmd.kernels.gpu.kv_rows import constants, write_rows
from mtmd.kernels.gpu.launch import Call, power_of_two
from mtmd.kernels.gpu.rotary.turn import squares, turn
from mtmd.kernels.gpu.triton_kernel import (
    Case,
    Launch,
    Plan,
    Problem,
    TritonKernel,
    case,
    declared,
    given,
    same,
)
from mtmd.kernels.graph import Type
from mtmd.kernels.ops import OPS
from mtmd.kernels.ops.gather import as_numbers
from mtmd.kernels.quantization.kv_rows import BLOCK, cached_parts, quantize_cache, value_offset

# Largest mean square error against the reference in fp32, relative to the result's: one rounding of
# what is written, in 16 bits.
NMSE = {torch.float32: 1e-12, torch.float16: 2.0**-22, torch.bfloat16: 2.0**-16}
TIES = 2.0**-20  # as much of a quantized result may be codes that lie between two
MAXIMUM = 1024  # values of a head
TILE = 1024  # values of a program


@dataclass(frozen=True)
class Operands:
    """Operands of `kv_store` and `rope_store`: cache [2, S, G, K], or [1, S, G, K] of keys alone or
    of keys and values in one row, k and v [T, G, K] -> the cache
    """

    cache: Type
    k: Type
    v: Type
    slots: Type
    table: Type | None = None
    norm: Type | None = None
    _: KW_ONLY
    eps: float | None = None
    v_eps: float | None = None
    pairs: str = "half"
    parts: int = 1
    quant: str | None = None


@triton.jit(do_not_specialize=["N"])
def kv_store_kernel(p, s, N, G, C: tl.constexpr):
    """ROWS of N rows, a head of a token each: even programs write keys, odd ones values, `v_from`
    elements behind; of one HALF all write keys.
    """
    row = (tl.program_id(0) // C.HALVES).to(tl.int64) * C.ROWS + tl.arange(0, C.ROWS)
    there = row < N
    g, t = row % G, row // G
    c = tl.arange(0, C.COLUMNS)
    to = (tl.load(p.slots + t, mask=there, other=0) * G + g) * C.ROW
    written = there[:, None] & (c < C.K)[None, :]
    if tl.program_id(0) % C.HALVES == 0:
        rows = t * s.k_step + g * s.k_head
        scale = to.to(tl.float32)
        if C.NORM:
            scale = tl.rsqrt(squares(p.k, rows, there, c, C.K) / C.K + s.eps)
        result = turn(p.k, rows, there, c, p.table + t * (2 * C.R), p.norm, scale, C)
        _write(p.cache, to, result, there, c, C.QUANT, C)
    else:
        rows = t * s.v_step + g * s.v_head
        result = tl.load(p.v + rows[:, None] + c[None, :], mask=written, other=0).to(tl.float32)
        if C.V_NORM:
            result *= tl.rsqrt(squares(p.v, rows, there, c, C.K) / C.K + s.v_eps)[:, None]
        _write(p.cache, s.v_from + to, result, there, c, C.V_QUANT, C)


@triton.jit
def _write(cache, to, result, there, c, QUANT: tl.constexpr, C: tl.constexpr):
    """Rows to their places of the cache, quantized or not."""
    if QUANT != "":
        write_rows(cache + to, result, there, QUANT, C)
    else:
        at = cache + to[:, None] + c[None, :]
        tl.store(at, result.to(cache.dtype.element_ty), mask=there[:, None] & (c < C.K)[None, :])


def rejects(o: Operands) -> str | None:
    """None if the kernel writes keys and values of these types, else why not."""
    cache = None if o.quant else o.cache
    for name, type_ in (("the cache", cache), ("k", o.k), ("v", o.v), ("the norm", o.norm)):
        if type_ is not None and type_.dtype not in (torch.bfloat16, torch.float16, torch.float32):
            return f"{name} is {name_of(type_.dtype)}; the kernel supports bf16, fp16 or fp32"
    for name, type_ in (("the cache", o.cache), ("the table", o.table), ("the norm", o.norm)):
        if type_ is not None and not type_.is_contiguous:
            return f"{name} has strides {list(type_.strides)}; the kernel needs it contiguous"
    for name, type_ in (("k", o.k), ("v", o.v)):
        if type_.strides[-1] != 1:
            return (
                f"{name} has strides {list(type_.strides)}; the kernel needs stride 1 in the last "
                "dimension"
            )
    tokens, groups, width = o.k.shape
    if width > MAXIMUM or tokens * groups >= 2**30:
        return (
            f"{tokens * groups} heads of {width} values; the kernel supports below 2^30 of up to "
            f"{MAXIMUM}"
        )
    return None


def plan(o: Operands) -> Plan:
    tokens, groups, width = o.k.shape
    columns = power_of_two(max(width, BLOCK if o.quant else 1))
    rows, halves = max(1, TILE // columns), cached_parts(o.cache.shape[0], o.quant)
    call = Call(
        {
            "N": tokens * groups,
            "G": groups,
            "k_step": o.k.strides[0],
            "k_head": o.k.strides[1],
            "v_step": o.v.strides[0],
            "v_head": o.v.strides[1],
            "v_from": (o.quant and value_offset(o.quant, width)) or o.cache.count // 2,
            "eps": float(o.eps or 0),
            "v_eps": float(o.v_eps or 0),
        },
        {
            "K": width,
            "R": 0 if o.table is None else o.table.shape[2],
            "PARTS": o.parts,
            "ADJACENT": o.pairs == "adjacent",
            "NORM": o.eps is not None,
            "WEIGHT": o.norm is not None,
            "V_NORM": o.v_eps is not None,
            "HALVES": halves,
            "ROWS": rows,
            "COLUMNS": columns,
            **constants(o.quant, width),
        },
        halves * -(-tokens * groups // rows) if width else 0,
        4,
        1,
    )
    pointers = same("cache k v slots table norm")
    return Plan(None, [Launch(kv_store_kernel, call, pointers, ("ROWS", "COLUMNS"))])


@case
def problem(
    rng: torch.Generator,
    tokens: int,
    groups: int,
    width: int,
    turned: int = 0,
    dtype: torch.dtype = torch.float32,
    stored: torch.dtype | None = None,
    norm: bool = False,
    v_norm: bool = False,
    pairs: str = "half",
    parts: int = 1,
    fused: bool = False,
    quant: str | None = None,
    halves: int = 2,
) -> Problem:
    """T tokens, G key heads of K values. `turned` 0: `kv_store`. `fused`: k and v are columns of
    one buffer. `stored`: the cache's type; `halves` 1: of keys alone. Columns that are not theirs
    hold NaN.
    """
    rows, size = 2 * tokens + 3, groups * width
    cache = torch.randn(halves, rows, groups, width, generator=rng)
    cache = quantize_cache(cache, quant) if quant else cache.to(stored or dtype)
    kind = {"quant": quant} if quant else {}
    both = torch.full((tokens, 2 * size + 8 * fused), torch.nan)
    both[:, : 2 * size] = torch.randn(tokens, 2 * size, generator=rng)
    both = both.to(dtype)
    k, v = (both[:, i * size : (i + 1) * size].unflatten(1, (groups, width)) for i in (0, 1))
    if not fused:
        k, v = k.contiguous(), v.contiguous()
    slots = torch.randperm(rows, generator=rng)[:tokens]
    if not turned:
        return given(cache, k, v, slots, **kind)
    angles = torch.rand(tokens, turned, generator=rng) * 100
    table = torch.stack((angles.cos(), angles.sin()), 1)
    weight = torch.rand(width, generator=rng).add_(0.5) if norm else None
    steps = {"eps": 1e-6 if norm else None, "v_eps": 1e-5 if v_norm else None}
    return given(cache, k, v, slots, table, weight, **steps, **kind, pairs=pairs, parts=parts)


_B, _H = torch.bfloat16, torch.float16

PLAIN = (
    problem(1, 1, 8),
    problem(0, 2, 8),
    problem(5, 3, 24, dtype=_B, stored=torch.float32),
    problem(17, 2, 72, dtype=_H, fused=True),
    problem(3, 4, 128, dtype=_B, fused=True),
    problem(3, 2, 80, dtype=_B, fused=True, quant="q8_0"),
    problem(5, 1, 72, quant="q4_0"),
    problem(4, 2, 128, dtype=_B, quant="fp8"),
    problem(2, 1, 20, quant="fp8"),
    problem(2, 1, 520),
    problem(3, 1, 576, dtype=_B, halves=1),
    problem(3, 1, 72, halves=1, quant="q8_0"),
    problem(3, 2, 80, dtype=_B, fused=True, quant="q8_0/q4_0"),
    problem(5, 1, 40, quant="q4_0/fp8"),
    problem(3, 2, 80, dtype=_B, fused=True, quant="bf16/q8_0"),
    problem(5, 1, 20, quant="q4_0/fp32"),
)
TURNED = (
    *(c.but(turned=max(2, c["width"] // 2)) for c in PLAIN),
    problem(7, 2, 40, 12, _H, pairs="adjacent", norm=True),
    problem(9, 3, 64, 32, _B, norm=True, v_norm=True, fused=True),
    problem(4, 2, 256, 64, _B, pairs="half", norm=True),
    problem(4, 1, 80, 40, v_norm=True, parts=2, pairs="adjacent"),
)


def error(
    op: str, result: Tensor, inputs: Sequence[Tensor | None], options: Mapping[str, Any]
) -> float:
    """Do what `relative_error` does, of the numbers that the cache stands for."""
    wide = [
        t if t is None else t.float().clone() if t.is_floating_point() else t.clone()
        for t in inputs
    ]
    expected, actual = (
        as_numbers(op, t, inputs, options).float()
        for t in (OPS[op].reference(*wide, **options), result)
    )
    distance = float((actual - expected).square().sum()) / (float(expected.square().sum()) or 1)
    return 0.0 if options.get("quant") and distance < TIES else distance


def _kernel(cases: Sequence[Case], uses: Mapping[str, Case]) -> TritonKernel:
    return declared(
        Operands,
        plan,
        rejects,
        what="storing keys and values",
        cases=cases,
        uses=uses,
        limits=NMSE,
        error=error,
    )


KV_STORE = _kernel(PLAIN, {"kv store, decoding, 8 heads of 128": problem(1, 8, 128, dtype=_B)})
ROPE_STORE = _kernel(
    TURNED,
    {
        "rope and kv store, decoding, 4 heads of 256, norm": problem(
            1, 4, 256, 128, _B, norm=True, fused=True
        ),
        "rope and kv store in q8_0, prefill of 512, 8 heads of 128": problem(
            512, 8, 128, 64, _B, pairs="adjacent", fused=True, quant="q8_0"
        ),
        "rope and kv store in q4_0, decoding, 8 heads of 128": problem(
            1, 8, 128, 64, _B, quant="q4_0"
        ),
        "rope and kv store in fp8, decoding, 8 heads of 128": problem(
            1, 8, 128, 64, _B, quant="fp8"
        ),
        "rope and kv store, prefill of 512, 8 heads of 128": problem(
            512, 8, 128, 64, _B, pairs="adjacent", fused=True
        ),
    },
)
