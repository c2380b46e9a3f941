"""Block-quantized weights as operands: u8 tables whose attribute `quant` says which GGUF block type
their bytes are.
"""

from __future__ import annotations

import torch
from torch import Tensor

from mtmd.kernels.graph import Type
from mtmd.kernels.ops.op import need
from mtmd.kernels.quantization.blocks import BLOCKS, dequantize


def values_in(table: Type, quant: str) -> int:
    """How many values a row of the table holds. Refuses what cannot be rows of blocks of that
    type.
    """
    need(quant in BLOCKS, f"quant {quant!r}; expected one of {', '.join(BLOCKS)}")
    need(
        table.dtype == torch.uint8 and len(table.shape) >= 2 and table.is_contiguous,
        f"{table} for rows of {quant} blocks",
    )
    block = BLOCKS[quant]
    size = table.shape[-1]
    need(
        size > 0 and size % block.bytes == 0,
        f"rows of {size} bytes; {quant} has blocks of {block.bytes}",
    )
    return size // block.bytes * block.values


def dequantized(table: Tensor, quant: str, dtype: torch.dtype) -> Tensor:
    """Its values, computed in fp32 and rounded once

    table u8 [..., bytes of K values] -> [..., K]
    """
    return dequantize(table, quant).to(dtype)
