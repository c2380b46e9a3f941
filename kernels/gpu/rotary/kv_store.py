"""Keys and values into the cache, for NVIDIA and AMD GPUs: the `kv_store` op, and `rope_store`,
which normalises and turns keys on their way, in one launch each.

One program writes a block of rows (a head of a token each), of keys or of values. Sums and products
are fp32; what is written is rounded once.
"""

# Triton's language is not Python's: its functions carry no types.
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from mtmd.base.errors import PlacementError
from mtmd.kernels.dtype import name_of
from mtmd.kernels.gpu.jit import tl, triton
from mtmd.kernels.gpu.launch import Call, power_of_two, run_call
from mtmd.kernels.gpu.rotary.turn import squares, turn
from mtmd.kernels.gpu.triton_kernel import Program, TritonKernel
from mtmd.kernels.graph import Type

# Largest mean square error against the reference in fp32, relative to the result's: one rounding of
# what is written, in 16 bits.
NMSE = {torch.float32: 1e-12, torch.float16: 2.0**-22, torch.bfloat16: 2.0**-16}
MOST = 1024  # values of a head
TILE = 1024  # values of a program


@triton.jit(do_not_specialize=["N"])
def kv_store_kernel(
    cache,
    k,
    v,
    slots,
    table,
    norm,
    N,
    G,
    k_step,
    k_head,
    v_step,
    v_head,
    values,
    eps,
    v_eps,
    K: tl.constexpr,
    R: tl.constexpr,
    PARTS: tl.constexpr,
    ADJACENT: tl.constexpr,
    NORM: tl.constexpr,
    WEIGHT: tl.constexpr,
    V_NORM: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """ROWS of N rows, a head of a token each: even programs write keys, odd ones values, `values`
    elements behind.
    """
    row = (tl.program_id(0) // 2).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    there = row < N
    g, t = row % G, row // G
    c = tl.arange(0, COLUMNS)
    to = (tl.load(slots + t, mask=there, other=0) * G + g) * K
    written = there[:, None] & (c < K)[None, :]
    if tl.program_id(0) % 2 == 0:
        rows = t * k_step + g * k_head
        scale = to.to(tl.float32)
        if NORM:
            scale = tl.rsqrt(squares(k, rows, there, c, K) / K + eps)
        result = turn(
            k, rows, there, c, table + t * (2 * R), norm, scale, K, R, PARTS, ADJACENT, NORM, WEIGHT
        )
        tl.store(cache + to[:, None] + c[None, :], result.to(cache.dtype.element_ty), mask=written)
    else:
        rows = t * v_step + g * v_head
        result = tl.load(v + rows[:, None] + c[None, :], mask=written, other=0).to(tl.float32)
        if V_NORM:
            result *= tl.rsqrt(squares(v, rows, there, c, K) / K + v_eps)[:, None]
        tl.store(
            cache + values + to[:, None] + c[None, :],
            result.to(cache.dtype.element_ty),
            mask=written,
        )


def rejects(
    cache: Type,
    k: Type,
    v: Type,
    slots: Type,
    table: Type | None = None,
    norm: Type | None = None,
    **options: Any,
) -> str | None:
    """None if the kernel writes keys and values of these types, else why not."""
    del slots, options
    for name, type_ in (("the cache", cache), ("k", k), ("v", v), ("the norm", norm)):
        if type_ is not None and type_.dtype not in (torch.bfloat16, torch.float16, torch.float32):
            return f"{name} is {name_of(type_.dtype)}; the kernel takes bf16, fp16 or fp32"
    for name, type_ in (("the cache", cache), ("the table", table), ("the norm", norm)):
        if type_ is not None and not type_.is_contiguous:
            return f"{name} has strides {list(type_.strides)}; the kernel needs it contiguous"
    for name, type_ in (("k", k), ("v", v)):
        if type_.strides[-1] != 1:
            return (
                f"{name} has strides {list(type_.strides)}; the kernel needs stride 1 in the last "
                "dimension"
            )
    if k.shape[-1] > MOST or k.shape[0] * k.shape[1] >= 2**30:
        return (
            f"{k.shape[0] * k.shape[1]} heads of {k.shape[-1]} values; the kernel takes below 2^30 "
            f"of up to {MOST}"
        )
    return None


def plan_call(
    cache: Type,
    k: Type,
    v: Type,
    slots: Type,  # noqa: ARG001
    table: Type | None = None,
    norm: Type | None = None,
    *,
    eps: float | None = None,
    v_eps: float | None = None,
    pairs: str = "half",
    parts: int = 1,
) -> Call:
    tokens, groups, width = k.shape
    columns = power_of_two(width)
    rows = max(1, TILE // columns)
    scalars: dict[str, int | float] = {
        "N": tokens * groups,
        "G": groups,
        "k_step": k.strides[0],
        "k_head": k.strides[1],
        "v_step": v.strides[0],
        "v_head": v.strides[1],
        "values": cache.count // 2,
        "eps": float(eps or 0),
        "v_eps": float(v_eps or 0),
    }
    constants: dict[str, int | bool | str] = {
        "K": width,
        "R": 0 if table is None else table.shape[2],
        "PARTS": parts,
        "ADJACENT": pairs == "adjacent",
        "NORM": eps is not None,
        "WEIGHT": norm is not None,
        "V_NORM": v_eps is not None,
        "ROWS": rows,
        "COLUMNS": columns,
    }
    return Call(scalars, constants, 2 * -(-tokens * groups // rows) if width else 0, 4, 1)


def kv_store(
    cache: Tensor,
    k: Tensor,
    v: Tensor,
    slots: Tensor,
    table: Tensor | None = None,
    norm: Tensor | None = None,
    **options: Any,
) -> Tensor:
    """The `kv_store` and `rope_store` ops: cache [2, S, G, K], k and v [T, G, K] -> the cache

    Raises PlacementError with what `rejects` says.
    """
    types = [None if t is None else Type.of(t) for t in (cache, k, v, slots, table, norm)]
    reason = rejects(*types)  # type: ignore[arg-type]
    if reason:
        raise PlacementError(f"storing keys and values on the GPU: {reason}")
    call = plan_call(*types, **options)  # type: ignore[arg-type]
    if call.programs:
        # Absent tensors are not read; the launch needs some pointer in their place.
        absent = (slots if t is None else t for t in (table, norm))
        run_call(kv_store_kernel, call, (cache, k, v, slots, *absent))
    return cache


def program(
    cache: Type,
    k: Type,
    v: Type,
    slots: Type,
    table: Type | None = None,
    norm: Type | None = None,
    **options: Any,
) -> Program:
    """What a run on these types launches."""
    call = plan_call(cache, k, v, slots, table, norm, **options)
    operands = {"cache": cache, "k": k, "v": v, "slots": slots}
    operands |= {"table": table or slots, "norm": norm or slots}
    return Program(kv_store_kernel, call, operands, ("ROWS", "COLUMNS"))


@dataclass(frozen=True)
class Case:
    """One problem: T tokens, G key heads of K values. `turned` 0: `kv_store`. `fused`: k and v are
    columns of one buffer. `kept`: the cache's type.
    """

    tokens: int
    groups: int
    width: int
    turned: int = 0
    dtype: torch.dtype = torch.float32
    kept: torch.dtype | None = None
    norm: bool = False
    v_norm: bool = False
    pairs: str = "half"
    parts: int = 1
    fused: bool = False

    def __str__(self) -> str:
        text = f"T{self.tokens} G{self.groups} K{self.width} {name_of(self.dtype)}"
        text += f" kept {name_of(self.kept)}" if self.kept else ""
        text += f" R{self.turned} {self.pairs}" if self.turned else ""
        text += f" parts {self.parts}" * (self.parts > 1)
        return text + " norm" * self.norm + " v norm" * self.v_norm + " fused" * self.fused

    @property
    def options(self) -> dict[str, Any]:
        if not self.turned:
            return {}
        return {
            "eps": 1e-6 if self.norm else None,
            "v_eps": 1e-5 if self.v_norm else None,
            "pairs": self.pairs,
            "parts": self.parts,
        }

    def inputs(
        self, device: str | torch.device = "cpu", seed: int = 0
    ) -> tuple[Tensor | None, ...]:
        """cache, k, v, slots, and with `turned` table, norm; columns that are not theirs hold
        NaN.
        """
        rng = torch.Generator().manual_seed(seed)
        rows = 2 * self.tokens + 3
        cache = torch.randn(2, rows, self.groups, self.width, generator=rng)
        size = self.groups * self.width
        both = torch.full((self.tokens, 2 * size + 8 * self.fused), torch.nan)
        both[:, : 2 * size] = torch.randn(self.tokens, 2 * size, generator=rng)
        both = both.to(self.dtype).to(device)
        k, v = (
            both[:, i * size : (i + 1) * size].unflatten(1, (self.groups, self.width))
            for i in (0, 1)
        )
        if not self.fused:
            k, v = k.contiguous(), v.contiguous()
        slots = torch.randperm(rows, generator=rng)[: self.tokens]
        given = (cache.to(self.kept or self.dtype).to(device), k, v, slots.to(device))
        if not self.turned:
            return given
        angles = torch.rand(self.tokens, self.turned, generator=rng) * 100
        table = torch.stack((angles.cos(), angles.sin()), 1).to(device)
        norm = torch.rand(self.width, generator=rng).add_(0.5).to(device)
        return (*given, table, norm if self.norm else None)


_B, _H = torch.bfloat16, torch.float16

PLAIN = (
    Case(1, 1, 8),
    Case(0, 2, 8),
    Case(5, 3, 24, dtype=_B, kept=torch.float32),
    Case(17, 2, 72, dtype=_H, fused=True),
    Case(3, 4, 128, dtype=_B, fused=True),
    Case(2, 1, 520),
)
TURNED = (
    *(replace(c, turned=max(2, c.width // 2)) for c in PLAIN),
    Case(7, 2, 40, 12, _H, pairs="adjacent", norm=True),
    Case(9, 3, 64, 32, _B, norm=True, v_norm=True, fused=True),
    Case(4, 2, 256, 64, _B, pairs="half", norm=True),
    Case(4, 1, 80, 40, v_norm=True, parts=2, pairs="adjacent"),
)


def _kernel(cases: tuple[Case, ...], uses: dict[str, Case]) -> TritonKernel:
    return TritonKernel(
        run=kv_store, rejects=rejects, program=program, cases=cases, uses=uses, limits=NMSE
    )


KV_STORE = _kernel(PLAIN, {"kv store, decoding, 8 heads of 128": Case(1, 8, 128, dtype=_B)})
ROPE_STORE = _kernel(
    TURNED,
    {
        "rope and kv store, decoding, 4 heads of 256, norm": Case(
            1, 4, 256, 128, _B, norm=True, fused=True
        ),
        "rope and kv store, prefill of 512, 8 heads of 128": Case(
            512, 8, 128, 64, _B, pairs="adjacent", fused=True
        ),
    },
)
