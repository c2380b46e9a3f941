"""Describes what the quantized products are tested, measured and listed with, and random blocks of
weights. No Triton.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from mtmd.kernels.gpu.triton_kernel import Case, Problem, case, given
from mtmd.kernels.quantization.blocks import BLOCKS, NATIVE, OF_16_BITS, dequantize
from mtmd.kernels.quantization.own_blocks import header

KINDS = tuple(sorted(NATIVE))
# Types that are tried with many shapes, and compiled for the tables; the others share the kernels
# around their decoding with these, and have a case for each way to them.
IN_DETAIL = (
    "IQ4_NL",
    "IQ4_XS",
    "Q2_K",
    "Q3_K",
    "Q4_0",
    "Q4_1",
    "Q4_K",
    "Q5_0",
    "Q5_1",
    "Q5_K",
    "Q6_K",
    "Q8_0",
)
OTHERS = tuple(kind for kind in KINDS if kind not in IN_DETAIL)

# Where a block has its fp16 numbers (ggml-common.h): random bytes there could be infinite or NaN.
HALVES = {
    "Q8_0": (0,),
    "Q4_0": (0,),
    "Q4_1": (0, 2),
    "Q5_0": (0,),
    "Q5_1": (0, 2),
    "Q2_K": (80, 82),
    "Q3_K": (108,),
    "Q4_K": (0, 2),
    "Q5_K": (0, 2),
    "Q6_K": (208,),
    "IQ4_NL": (0,),
    "IQ4_XS": (0,),
    "IQ1_S": (0,),
    "IQ2_XXS": (0,),
    "IQ2_XS": (0,),
    "IQ2_S": (0,),
    "IQ3_XXS": (0,),
    "IQ3_S": (0,),
    "TQ1_0": (52,),
    "TQ2_0": (64,),
    "Q1_0": (0,),
    "A4_64": (0, 2),
    "A8_32": (0, 2),
}
# Types whose blocks begin with a header word, and the largest zero point there
ZEROS = {"U4_32": 15, "U4_64": 15, "U8_64": 255, "F8_64": 0, "NF4_64": 0, "FP4_64": 0}

# Largest mean square error, relative to that of the result: fp32 sums in another order; in 16 bits
# the result is rounded, and in tiles the weights are, each by half a unit in the last place at
# most.
NMSE = {torch.float32: 1e-11, torch.float16: 2.0**-21, torch.bfloat16: 2.0**-15}
# The same of a gated unit, whose two factors are such products, and of a GELU, which takes the
# larger ones.
ACTIVATED_NMSE = {torch.float16: 2.0**-19, torch.bfloat16: 2.0**-13}


def product_error(
    op: str, result: Tensor, inputs: Sequence[Tensor | None], options: Mapping[str, Any]
) -> float:
    """Mean square error against the product with dequantized weights, which is what the op means,
    relative to the typical result: a single product may be next to nothing. Exact in fp64 where
    that is quick, else in fp32.
    """
    del op
    x, w, bias = (*inputs, None)[:3]
    assert x is not None and w is not None
    exact = torch.float64 if len(w) * x.numel() < 2**24 else torch.float32
    wide = dequantize(w, options["quant"]).to(exact)
    expected = F.linear(x.to(exact), wide, None if bias is None else bias.to(exact))
    typical = x.to(exact).square().mean() * wide.square().mean() * x.shape[-1]
    return float(
        (result.to(exact) - expected).square().mean()
        / torch.maximum(typical, expected.square().mean())
    )


def random_blocks(kind: str, rows: int, width: int, seed: int = 0) -> Tensor:
    """u8 [rows, bytes of `width` values]: any bytes, with scales of either sign such as weights
    have.
    """
    block, rng = BLOCKS[kind], torch.Generator().manual_seed(seed)
    for dtype, name in OF_16_BITS.items():
        if kind == name:
            rng.manual_seed(block.id + seed)  # else they are those of who draws with `seed`, too
            numbers = torch.randn(rows, width, generator=rng) * 0.01
            return numbers.to(dtype).view(torch.uint8)
    data = torch.randint(
        0, 256, (rows, width // block.values, block.bytes), generator=rng, dtype=torch.uint8
    )
    if kind == "F8_64":  # no NaN
        data[data & 0x7F == 0x7F] = 0
    set_scales(kind, data, lambda: torch.randn(*data.shape[:2], 1, generator=rng) * 0.01)
    return data.view(rows, -1)


def set_scales(kind: str, data: Tensor, scales: Callable[[], Tensor]) -> None:
    """Write the scales of blocks, u8 [rows, blocks, bytes]: fp32 [rows, blocks, 1], the absolute
    value's power of two where a type has no other.
    """
    for at in HALVES.get(kind, ()):
        data[..., at : at + 2] = scales().half().view(torch.uint8)
    if kind in ZEROS:
        zeros = data[..., :1].to(torch.int32) % (ZEROS[kind] + 1)
        data[..., :4] = header(scales()[..., 0], zeros[..., 0])
    elif kind == "NV4_128":
        data[..., :4] = scales().view(torch.uint8)
        data[..., 4:12] &= 0x3F
    elif kind == "NVFP4":
        data[..., :4] &= 0x3F
    elif kind == "MXFP4":
        data[..., :1] = torch.frexp(scales()).exponent + 127
    elif kind == "IQ1_M":  # four words, whose upper four bits are each a quarter of an fp16 number
        bits = scales().half().view(torch.int16).to(torch.int32)
        for word in range(4):
            at = 49 + 2 * word
            upper = (bits >> 4 * word & 15) << 4
            data[..., at : at + 1] = (data[..., at : at + 1] & 15) | upper.to(torch.uint8)


@case
def problem(
    rng: torch.Generator,
    quant: str,
    rows: int,
    outer: int,
    blocks: int = 1,
    dtype: torch.dtype = torch.float32,
    bias: bool = False,
    gelu: str | None = None,
    gate: str | None = None,
) -> Problem:
    """x [rows, blocks x values of a block] times a weight of `outer` rows. `gelu`: in this form of
    the product; `gate`: by this activation of its first half.
    """
    width = blocks * BLOCKS[quant].values
    x = torch.randn(rows, width, generator=rng)
    if gate:  # whose results are products of two, none of them too large for fp16
        x *= 0.05
    added = torch.randn(outer, generator=rng).to(dtype) if bias else None
    w = random_blocks(quant, outer, width, rng.initial_seed())
    options = {"quant": quant}
    options |= {"approximate": gelu} if gelu else {}
    options |= {"act": gate} if gate else {}
    return given(x.to(dtype), w, added, **options)


def _cases() -> list[Case]:
    cases = []
    for kind in IN_DETAIL:
        small = BLOCKS[kind].values == 32
        cases += [
            problem(kind, 1, 7),
            problem(kind, 1, 9, 11 if small else 2, bias=True),
            problem(kind, 3, 33, 2 if small else 1),
            problem(kind, 17, 35, 3 if small else 2, bias=True),
            problem(kind, 2, 5, 40 if small else 5, torch.bfloat16),
            problem(kind, 4, 9, 33 if small else 6, torch.float16, bias=True),
            problem(kind, 9, 17, 5 if small else 1, torch.bfloat16),
            problem(kind, 17, 65, 3 if small else 1, torch.float16),
        ]
    for kind in OTHERS:
        cases += [
            problem(kind, 2, 9, 1, torch.bfloat16),
            problem(kind, 33, 5, 1, torch.float16, bias=True),
        ]
    return [
        *cases,
        problem("IQ2_XXS", 1, 3, 1, bias=True),
        problem("Q8_0", 1, 1),
        problem("Q4_K", 1, 5, 2, torch.bfloat16, True),
        problem("Q8_0", 130, 70, 5, torch.bfloat16, True),
        problem("Q4_K", 40, 33, 2, torch.float16),
        problem("Q5_0", 32, 9, 16, torch.bfloat16, True),
        problem("Q8_0", 1, 8, 16, torch.float16),
        problem("Q6_K", 1, 8, 1, torch.float16),
        problem("Q4_0", 3, 20, 64, torch.bfloat16),
        problem("Q4_K", 1, 9, 15, torch.float16, True),
    ]


CASES = _cases()

USES = {
    f"{kind} 4096 x 4096, {rows} rows of x": problem(
        kind, rows, 4096, 4096 // BLOCKS[kind].values, torch.bfloat16
    )
    for kind in IN_DETAIL
    for rows in (1, 16, 32, 512)
}


def _in_turn(of: Sequence[str], at: int) -> str:
    return of[at % len(of)]


def _activated(kind: str, at: int) -> list[Case]:
    """Few rows and many of a type of weights, as GELU and as gated units of one form or another;
    half of a gated unit's weight ends anywhere in a program's eights.
    """
    blocks, half = 5 if BLOCKS[kind].values == 32 else 1, torch.float16
    gelu, gate = _in_turn(FORMS[1:], at), _in_turn(FORMS, at)
    return [
        problem(kind, 1 + at, 21, blocks, torch.bfloat16, gelu=gelu),
        problem(kind, 40, 35, blocks, half, True, gelu=_in_turn(FORMS[1:], at + 1)),
        problem(kind, 1 + 2 * at, 26 + 8 * at, blocks, torch.bfloat16, gate=gate),
        problem(kind, 35 + at, 38, blocks, half, at % 2 > 0, gate=_in_turn(FORMS, at + 1)),
    ]


FORMS = ("silu", "tanh", "none", "quick")
ACTIVATED = [one for at, kind in enumerate(IN_DETAIL) for one in _activated(kind, at)] + [
    problem("Q4_0", 17, 70, 2, torch.bfloat16, True, gate="silu"),
    problem("Q4_K", 1, 8202, 1, torch.bfloat16, gate="tanh"),
    problem("Q8_0", 3, 40, 3, torch.bfloat16, True, gelu="quick"),
]
GELU_CASES = [one for one in ACTIVATED if one["gelu"]]
GATED_CASES = [one for one in ACTIVATED if one["gate"]]

GELU_USES = {
    f"{kind} 4304 x 1152, GELU {form}, 4096 rows of x": problem(
        kind, 4096, 4304, 1152 // BLOCKS[kind].values, torch.bfloat16, True, gelu=form
    )
    for kind, form in (("Q8_0", "tanh"), ("Q8_0", "none"), ("Q4_0", "quick"))
}
GATED_USES = {
    f"{kind} 28672 x 4096, {form} gate, {rows} rows of x": problem(
        kind, rows, 28672, 4096 // BLOCKS[kind].values, torch.bfloat16, gate=form
    )
    for kind, form, rows in (
        ("Q4_0", "silu", 1),
        ("Q4_K", "silu", 1),
        ("Q4_K", "tanh", 32),
        ("Q6_K", "silu", 16),
        ("Q4_K", "silu", 512),
    )
}
