"""Rows of a block-quantized table, for NVIDIA and AMD GPUs: the `embed` op in one launch.

    y[t] = round(table[tokens[t]]) * scale

One program decodes a block of values of one row in registers (`quant_matmul/blocks.py`), to the bit
as the reference does: torch takes some twenty launches for it, however few the rows.
"""

# Triton's language is not Python's: its functions carry no types.
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

from __future__ import annotations

import math
from dataclasses import KW_ONLY, dataclass

import torch

from mtmd.kernels.dtype import DTYPES, name_of
from mtmd.kernels.gpu.jit import tl, triton
from mtmd.kernels.gpu.launch import Call
from mtmd.kernels.gpu.quant_matmul.blocks import decode
from mtmd.kernels.gpu.quant_matmul.cases import KINDS, random_blocks
from mtmd.kernels.gpu.quant_matmul.grids import grids_of
from mtmd.kernels.gpu.triton_kernel import Launch, Plan, Problem, case, declared, given, same
from mtmd.kernels.graph import Type
from mtmd.kernels.ops.gather import rounded_to
from mtmd.kernels.quantization.blocks import BLOCKS

# Largest mean square error against the reference, relative to the result's: there is none, but what
# AMD's and NVIDIA's compilers may make of a product and a sum.
NMSE = {torch.float32: 1e-13, torch.float16: 2.0**-22, torch.bfloat16: 2.0**-16}
VALUES = 256  # of a program: eight for each thread of a warp


@dataclass(frozen=True)
class Operands:
    """Operands of `embed`: tokens [T], table u8 [V, bytes of D values] -> [T, D] of `dtype`"""

    tokens: Type
    table: Type
    _: KW_ONLY
    quant: str | None
    dtype: str
    scale: float = 1.0


@triton.jit
def embed_kernel(
    p, D, row_bytes, scale, QUANT: tl.constexpr, WHOLE: tl.constexpr, VALUES: tl.constexpr
):
    """VALUES of the D values of one row. WHOLE: D is a multiple of VALUES."""
    blocks = tl.cdiv(D, VALUES)
    t = (tl.program_id(0) // blocks).to(tl.int64) + tl.arange(0, 1)
    start = tl.program_id(0) % blocks * VALUES
    row = tl.load(p.tokens + t) * row_bytes
    value = decode(p.table, row, start, D, QUANT, WHOLE, VALUES, tl.float32, p)
    value = value.to(p.out.dtype.element_ty).to(tl.float32) * scale
    c = start + tl.arange(0, VALUES)
    at = t[:, None] * D + c[None, :]
    tl.store(p.out + at, value.to(p.out.dtype.element_ty), mask=(c < D)[None, :])


def rejects(o: Operands) -> str | None:
    """None if the kernel supports rows of such a table, else why not."""
    if o.quant not in KINDS:
        return f"the table is {o.quant}; the kernel supports {', '.join(KINDS)}"
    for name, type_ in (("tokens", o.tokens), ("the table", o.table)):
        if not type_.is_contiguous:
            return f"{name} has strides {list(type_.strides)}; the kernel needs it contiguous"
    if o.tokens.count * -(-_width(o) // VALUES) >= 2**31:
        return f"{o.tokens.count} tokens; a grid has fewer than 2^31 programs"
    return None


def _width(o: Operands) -> int:
    block = BLOCKS[o.quant or ""]
    return o.table.shape[1] // block.bytes * block.values


def plan(o: Operands) -> Plan:
    width, dtype = _width(o), DTYPES[o.dtype]
    call = Call(
        {"D": width, "row_bytes": o.table.shape[1], "scale": float(rounded_to(o.scale, dtype))},
        {"QUANT": o.quant or "", "WHOLE": width % VALUES == 0, "VALUES": VALUES},
        o.tokens.count * -(-width // VALUES),
        1,
        1,
    )
    out = Type.contiguous((o.tokens.count, width), dtype)
    grids = grids_of(o.quant)
    pointers = same("tokens table out") | same(" ".join(grids))
    return Plan(out, [Launch(embed_kernel, call, pointers, ("VALUES",))], constants=grids)


@case
def problem(
    rng: torch.Generator,
    quant: str,
    tokens: int,
    blocks: int,
    dtype: torch.dtype = torch.float32,
    scale: float = 1.0,
    rows: int = 9,
) -> Problem:
    """Make a problem of so many tokens of a table of `rows` rows of `blocks` blocks."""
    chosen = torch.randint(0, rows, (tokens,), generator=rng)
    table = random_blocks(quant, rows, blocks * BLOCKS[quant].values, rng.initial_seed())
    return given(chosen, table, quant=quant, dtype=name_of(dtype), scale=scale)


_B, _H, _F = torch.bfloat16, torch.float16, torch.float32

CASES = (
    *(
        problem(kind, 1 + i % 5, 1 + i % 3, (_B, _F, _H)[i % 3], (1.0, 50.596)[i % 2])
        for i, kind in enumerate(KINDS)
    ),
    problem("Q8_0", 0, 1),
    problem("Q8_0", 7, 8, _B, 33.94112549695428),
    problem("Q4_0", 3, 17, _H),
    problem("Q6_K", 17, 2, _B, 2.0),
)
USES = {
    "rows of a table in Q6_K, decoding, 2560 values": problem("Q6_K", 1, 10, _B, 50.596, 32000),
    "rows of a table in Q4_K, prefill of 512, 4096 values": problem(
        "Q4_K", 512, 16, _B, rows=32000
    ),
}

KERNEL = declared(
    Operands,
    plan,
    rejects,
    what="quantized rows",
    aligned=lambda o: {"table": math.gcd(BLOCKS[o.quant or ""].bytes, 4)},
    cases=CASES,
    uses=USES,
    limits=NMSE,
)
