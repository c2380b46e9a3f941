"""What the quantized products are tested, measured and listed with, and random weights of GGUF
blocks. No Triton.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from mtmd.kernels.dtype import name_of
from mtmd.kernels.quantization.blocks import BLOCKS, NATIVE, dequantize

KINDS = tuple(sorted(NATIVE))

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
}

# Largest mean square error, relative to that of the result: fp32 sums in another order; in 16 bits
# the result is rounded, and in tiles
# the weights are, each by half a unit in the last place at most.
NMSE = {torch.float32: 1e-11, torch.float16: 2.0**-21, torch.bfloat16: 2.0**-15}


def error_of(
    found: Tensor,
    x: Tensor,
    w: Tensor,
    bias: Tensor | None,
    quant: str,
    exact: torch.dtype = torch.float64,
) -> float:
    """Mean square error of a product against that with dequantized weights, computed in `exact`."""
    wide = dequantize(w, quant).to(exact)
    expected = F.linear(x.to(exact), wide, None if bias is None else bias.to(exact))
    typical = (
        x.to(exact).square().mean() * wide.square().mean() * x.shape[-1]
    )  # a single product may be next to nothing
    return float(
        (found.to(exact) - expected).square().mean()
        / torch.maximum(typical, expected.square().mean())
    )


def random_blocks(kind: str, rows: int, width: int, seed: int = 0) -> Tensor:
    """u8 [rows, bytes of `width` values]: any bytes, with scales of either sign such as weights
    have.
    """
    block, rng = BLOCKS[kind], torch.Generator().manual_seed(seed)
    data = torch.randint(
        0, 256, (rows, width // block.values, block.bytes), generator=rng, dtype=torch.uint8
    )
    for at in HALVES[kind]:
        scales = torch.randn(*data.shape[:2], 1, generator=rng) * 0.01
        data[..., at : at + 2] = scales.half().view(torch.uint8)
    return data.view(rows, -1)


@dataclass(frozen=True)
class Case:
    """One problem: x [rows, blocks x values of a block] times a weight of `outer` rows."""

    quant: str
    rows: int
    outer: int
    blocks: int = 1
    dtype: torch.dtype = torch.float32
    bias: bool = False

    def __str__(self) -> str:
        return (
            f"{self.quant} {name_of(self.dtype)} M{self.rows} N{self.outer} K{self.width}"
            + " bias" * self.bias
        )

    @property
    def width(self) -> int:
        return self.blocks * BLOCKS[self.quant].values

    @property
    def options(self) -> dict[str, Any]:
        return {"quant": self.quant}

    def inputs(
        self, device: str | torch.device = "cpu", seed: int = 0
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """x, w, bias."""
        rng = torch.Generator().manual_seed(seed)
        x = torch.randn(self.rows, self.width, generator=rng).to(self.dtype).to(device)
        bias = (
            torch.randn(self.outer, generator=rng).to(self.dtype).to(device) if self.bias else None
        )
        return x, random_blocks(self.quant, self.outer, self.width, seed).to(device), bias


def _cases() -> list[Case]:
    cases = []
    for kind in KINDS:
        small = BLOCKS[kind].values == 32
        cases += [
            Case(kind, 1, 7),
            Case(kind, 1, 9, 11 if small else 2, bias=True),
            Case(kind, 3, 33, 2),
            Case(kind, 17, 35, 3, bias=True),
            Case(kind, 3, 17, 5 if small else 1, torch.bfloat16),
            Case(kind, 17, 65, 3 if small else 1, torch.float16),
        ]
    return [
        *cases,
        Case("Q8_0", 1, 1),
        Case("Q4_K", 1, 5, 2, torch.bfloat16, True),
        Case("Q8_0", 130, 70, 5, torch.bfloat16, True),
        Case("Q6_K", 1, 8, 1, torch.float16),
    ]


CASES = _cases()
