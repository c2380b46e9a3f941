"""Block-quantized types: their sizes, and the way back to fp32.

A row of values is stored as blocks, each a few small integers with the scales they share. The
layouts are ggml's (ggml-common.h); the values are, bit for bit, those of `dequantize` in the gguf
Python package. Types of our own, for other formats, have layouts in that manner (own_blocks.py).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

import torch
from torch import Tensor

from mtmd.base.errors import ModelError
from mtmd.kernels.quantization import blocks_of_32, few_bits, iq_quants, k_quants, own_blocks

Decode = Callable[[Tensor], Tensor]

# Values decoded at a time on the CPU, so that the steps in between take a few MB and not several
# times the result.
CPU_CHUNK_VALUES = 1 << 20

OWN_IDS = 1000  # ids of our own types begin here; no GGUF file has them


@dataclass(frozen=True)
class Block:
    """A block type. `id` is its number in GGUF, those of our own begin at OWN_IDS; `decode` takes
    blocks, uint8 [n, bytes], to fp32 [n, values].
    """

    name: str
    id: int
    values: int
    bytes: int
    decode: Decode


_ALL = (
    Block("Q4_0", 2, 32, 18, blocks_of_32.q4_0),
    Block("Q4_1", 3, 32, 20, blocks_of_32.q4_1),
    Block("Q5_0", 6, 32, 22, blocks_of_32.q5_0),
    Block("Q5_1", 7, 32, 24, blocks_of_32.q5_1),
    Block("Q8_0", 8, 32, 34, blocks_of_32.q8_0),
    Block("Q2_K", 10, 256, 84, k_quants.q2_k),
    Block("Q3_K", 11, 256, 110, k_quants.q3_k),
    Block("Q4_K", 12, 256, 144, k_quants.q4_k),
    Block("Q5_K", 13, 256, 176, k_quants.q5_k),
    Block("Q6_K", 14, 256, 210, k_quants.q6_k),
    Block("IQ2_XXS", 16, 256, 66, iq_quants.iq2_xxs),
    Block("IQ2_XS", 17, 256, 74, iq_quants.iq2_xs),
    Block("IQ3_XXS", 18, 256, 98, iq_quants.iq3_xxs),
    Block("IQ1_S", 19, 256, 50, iq_quants.iq1_s),
    Block("IQ4_NL", 20, 32, 18, blocks_of_32.iq4_nl),
    Block("IQ3_S", 21, 256, 110, iq_quants.iq3_s),
    Block("IQ2_S", 22, 256, 82, iq_quants.iq2_s),
    Block("IQ4_XS", 23, 256, 136, k_quants.iq4_xs),
    Block("IQ1_M", 29, 256, 56, iq_quants.iq1_m),
    Block("TQ1_0", 34, 256, 54, few_bits.tq1_0),
    Block("TQ2_0", 35, 256, 66, few_bits.tq2_0),
    Block("MXFP4", 39, 32, 17, blocks_of_32.mxfp4),
    Block("NVFP4", 40, 64, 36, blocks_of_32.nvfp4),
    Block("Q1_0", 41, 128, 18, few_bits.q1_0),
    Block("U4_32", 1000, 32, 20, own_blocks.u4),
    Block("U4_64", 1001, 64, 36, own_blocks.u4),
    Block("U8_64", 1002, 64, 68, own_blocks.u8_64),
    Block("F8_64", 1003, 64, 68, own_blocks.f8_64),
    Block("NF4_64", 1004, 64, 36, own_blocks.nf4_64),
    Block("FP4_64", 1005, 64, 36, own_blocks.fp4_64),
    Block("NV4_128", 1006, 128, 76, own_blocks.nv4_128),
    Block("A4_64", 1007, 64, 36, own_blocks.a4_64),
    Block("A8_32", 1008, 32, 36, own_blocks.a8_32),
    Block("BF16_32", 1009, 32, 64, own_blocks.bf16_32),
    Block("F16_32", 1010, 32, 64, own_blocks.f16_32),
)
BLOCKS: Mapping[str, Block] = MappingProxyType({block.name: block for block in _ALL})

# Plain numbers as blocks, for what a CPU multiplies in fp32: half of the memory. They are made when
# a model is loaded for such a CPU, and no GPU has kernels for them.
OF_16_BITS: Mapping[torch.dtype, str] = MappingProxyType(
    {torch.bfloat16: "BF16_32", torch.float16: "F16_32"}
)
# Kept quantized in memory and multiplied as they are: those that the kernels of CPU and GPU take.
NATIVE = frozenset(BLOCKS) - set(OF_16_BITS.values())


def shown(kind: str) -> str:
    """Return the name of a block type, or of the plain numbers that are in it."""
    return kind.removesuffix("_32") if kind in OF_16_BITS.values() else kind


def row_bytes(kind: str, values: int) -> int:
    """Bytes that a row of so many values takes. Raises ModelError for an unknown type or a part of
    a block.
    """
    block = _block(kind)
    if values < 0 or values % block.values:
        raise ModelError(
            f"a row of {values} values cannot be {kind}; expected a multiple of {block.values}"
        )
    return values // block.values * block.bytes


def dequantize(data: Tensor, kind: str) -> Tensor:
    """uint8 [..., row_bytes] -> fp32 [..., K], on the device of `data`. Raises ModelError for an
    unknown type or a row of no whole blocks.

    Only the block scales are ever fp16, and they are converted before they are used.
    """
    block = _block(kind)
    if data.dtype != torch.uint8 or not data.dim() or data.shape[-1] % block.bytes:
        raise ModelError(
            f"{kind} rows are {data.dtype} {list(data.shape)}; expected torch.uint8 [..., multiple "
            f"of {block.bytes}]"
        )
    shape = (*data.shape[:-1], data.shape[-1] // block.bytes * block.values)
    if not data.numel():
        return data.new_empty(shape, dtype=torch.float32)
    blocks = data.reshape(-1, block.bytes)
    step = CPU_CHUNK_VALUES // block.values
    if data.device.type != "cpu" or len(blocks) <= step:
        return block.decode(blocks).view(shape)
    out = torch.empty(len(blocks), block.values)
    for start in range(0, len(blocks), step):
        out[start : start + step] = block.decode(blocks[start : start + step])
    return out.view(shape)


def _block(kind: str) -> Block:
    if kind not in BLOCKS:
        raise ModelError(f"{kind!r:.40} is no block type; expected one of {', '.join(BLOCKS)}")
    return BLOCKS[kind]
