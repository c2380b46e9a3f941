"""Rows of a block-quantized table, for NVIDIA and AMD GPUs: the `embed` op in one launch.

    y[t] = round(table[tokens[t]]) * scale

One program decodes a block of values of one row in registers (`quant_matmul/blocks.py`), to the bit
as the reference does: torch takes some twenty launches for it, however few the rows.
"""

# Triton's language is not Python's: its functions carry no types.
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from mtmd.base.errors import PlacementError
from mtmd.kernels.dtype import DTYPES, name_of
from mtmd.kernels.gpu.jit import tl, triton
from mtmd.kernels.gpu.launch import Call, run_call
from mtmd.kernels.gpu.quant_matmul.blocks import decode
from mtmd.kernels.gpu.quant_matmul.cases import KINDS, random_blocks
from mtmd.kernels.gpu.triton_kernel import Program, TritonKernel
from mtmd.kernels.graph import Type
from mtmd.kernels.ops.gather import rounded_to
from mtmd.kernels.quantization.blocks import BLOCKS, NATIVE

# Largest mean square error against the reference, relative to the result's: there is none, but what
# AMD's and NVIDIA's compilers may make of a product and a sum.
NMSE = {torch.float32: 1e-13, torch.float16: 2.0**-22, torch.bfloat16: 2.0**-16}
VALUES = 256  # of a program: eight for each thread of a warp


@triton.jit
def embed_kernel(
    tokens,
    table,
    out,
    D,
    row_bytes,
    scale,
    QUANT: tl.constexpr,
    WHOLE: tl.constexpr,
    VALUES: tl.constexpr,
):
    """VALUES of the D values of one row. WHOLE: D is a multiple of VALUES."""
    blocks = tl.cdiv(D, VALUES)
    t = (tl.program_id(0) // blocks).to(tl.int64) + tl.arange(0, 1)
    start = tl.program_id(0) % blocks * VALUES
    row = tl.load(tokens + t) * row_bytes
    value = decode(table, row, start, D, QUANT, WHOLE, VALUES, tl.float32)
    value = value.to(out.dtype.element_ty).to(tl.float32) * scale
    c = start + tl.arange(0, VALUES)
    at = t[:, None] * D + c[None, :]
    tl.store(out + at, value.to(out.dtype.element_ty), mask=(c < D)[None, :])


def rejects(tokens: Type, table: Type, **options: Any) -> str | None:
    """None if the kernel takes rows of such a table, else why not."""
    quant = options.get("quant")
    if quant not in NATIVE:
        return f"the table is {quant}; the kernel takes {', '.join(sorted(NATIVE))}"
    for name, type_ in (("tokens", tokens), ("the table", table)):
        if not type_.is_contiguous:
            return f"{name} has strides {list(type_.strides)}; the kernel needs it contiguous"
    if tokens.count * -(-_width(table, quant) // VALUES) >= 2**31:
        return f"{tokens.count} tokens; a grid has fewer than 2^31 programs"
    return None


def _width(table: Type, quant: str) -> int:
    block = BLOCKS[quant]
    return table.shape[1] // block.bytes * block.values


def plan_call(tokens: Type, table: Type, *, quant: str, dtype: str, scale: float = 1.0) -> Call:
    width = _width(table, quant)
    scalars: dict[str, int | float] = {
        "D": width,
        "row_bytes": table.shape[1],
        "scale": float(rounded_to(scale, DTYPES[dtype])),
    }
    constants: dict[str, int | bool | str] = {
        "QUANT": quant,
        "WHOLE": width % VALUES == 0,
        "VALUES": VALUES,
    }
    return Call(scalars, constants, tokens.count * -(-width // VALUES), 1, 1)


def embed(tokens: Tensor, table: Tensor, *, quant: str, dtype: str, scale: float = 1.0) -> Tensor:
    """The `embed` op: tokens [T], table u8 [V, bytes of D values] -> [T, D] of `dtype`

    Raises PlacementError with what `rejects` says.
    """
    types = Type.of(tokens), Type.of(table)
    reason = rejects(*types, quant=quant)
    size = math.gcd(BLOCKS[quant].bytes, 4) if quant in BLOCKS else 1
    if reason is None and table.data_ptr() % size:
        reason = f"the table begins at {table.data_ptr():#x}; the kernel needs it aligned to {size}"
    if reason:
        raise PlacementError(f"quantized rows on the GPU: {reason}")
    shape = (len(tokens), _width(types[1], quant))
    out = torch.empty(shape, dtype=DTYPES[dtype], device=table.device)
    call = plan_call(*types, quant=quant, dtype=dtype, scale=scale)
    if call.programs:
        run_call(embed_kernel, call, (tokens, table, out))
    return out


def program(tokens: Type, table: Type, *, quant: str, dtype: str, scale: float = 1.0) -> Program:
    """What a run on these types launches."""
    call = plan_call(tokens, table, quant=quant, dtype=dtype, scale=scale)
    out = Type.contiguous((tokens.count, _width(table, quant)), DTYPES[dtype])
    return Program(embed_kernel, call, {"tokens": tokens, "table": table, "out": out}, ("VALUES",))


@dataclass(frozen=True)
class Case:
    """One problem: so many tokens of a table of `rows` rows of `blocks` blocks."""

    quant: str
    tokens: int
    blocks: int
    dtype: torch.dtype = torch.float32
    scale: float = 1.0
    rows: int = 9

    def __str__(self) -> str:
        width = self.blocks * BLOCKS[self.quant].values
        text = f"{self.quant} {name_of(self.dtype)} {self.tokens} of {self.rows}x{width}"
        return text + f" scale {self.scale:g}" * (self.scale != 1)

    @property
    def options(self) -> dict[str, Any]:
        return {"quant": self.quant, "dtype": name_of(self.dtype), "scale": self.scale}

    def inputs(self, device: str | torch.device = "cpu", seed: int = 0) -> tuple[Tensor, ...]:
        rng = torch.Generator().manual_seed(seed)
        tokens = torch.randint(0, self.rows, (self.tokens,), generator=rng)
        width = self.blocks * BLOCKS[self.quant].values
        table = random_blocks(self.quant, self.rows, width, seed)
        return tokens.to(device), table.to(device)


_B, _H, _F = torch.bfloat16, torch.float16, torch.float32

CASES = (
    *(
        Case(kind, 1 + i % 5, 1 + i % 3, (_B, _F, _H)[i % 3], (1.0, 50.596)[i % 2])
        for i, kind in enumerate(KINDS)
    ),
    Case("Q8_0", 0, 1),
    Case("Q8_0", 7, 8, _B, 33.94112549695428),
    Case("Q4_0", 3, 17, _H),
    Case("Q6_K", 17, 2, _B, 2.0),
)
USES = {
    "rows of a table in Q6_K, decoding, 2560 values": Case("Q6_K", 1, 10, _B, 50.596, 32000),
    "rows of a table in Q4_K, prefill of 512, 4096 values": Case("Q4_K", 512, 16, _B, 1.0, 32000),
}

KERNEL = TritonKernel(
    run=embed, rejects=rejects, program=program, cases=CASES, uses=USES, limits=NMSE
)
