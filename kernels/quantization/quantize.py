"""Quantization: fp32 rows to blocks, with scales searched for by least squares.

Layouts are those that `blocks.py` decodes. An importance matrix weighs the errors of each column.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from types import MappingProxyType

import torch
from torch import Tensor

from mtmd.base.errors import ModelError
from mtmd.kernels.quantization import encode_32, encode_k
from mtmd.kernels.quantization.blocks import BLOCKS, row_bytes

Encode = Callable[[Tensor, Tensor | None], Tensor]
"""fp32 [n, values] and their weights, or None, to blocks: uint8 [n, bytes]"""

ENCODERS: Mapping[str, Encode] = MappingProxyType(
    {
        "Q8_0": encode_32.q8_0,
        "Q4_0": encode_32.q4_0,
        "Q4_1": encode_32.q4_1,
        "Q5_0": encode_32.q5_0,
        "Q5_1": encode_32.q5_1,
        "IQ4_NL": encode_32.iq4_nl,
        "MXFP4": encode_32.mxfp4,
        "F8_64": encode_32.f8_64,
        "Q2_K": encode_k.q2_k,
        "Q3_K": encode_k.q3_k,
        "Q4_K": encode_k.q4_k,
        "Q5_K": encode_k.q5_k,
        "Q6_K": encode_k.q6_k,
        "IQ4_XS": encode_k.iq4_xs,
    }
)
# Quantized at once: the search's tensors stay in the caches, and are too small for torch to share
# each step out among its threads, which waits on them; whole chunks are shared out instead.
CHUNK_VALUES = 1 << 15


def quantize(values: Tensor, kind: str, importance: Tensor | None = None) -> Tensor:
    """Any plain type [..., K] -> uint8 [..., row_bytes], on the CPU.

    `importance` [K], or of a shape that broadcasts to that of the values, weighs each error; None
    is 1 everywhere. Raises ModelError for a type without an encoder, rows of no whole blocks and
    values that are not finite.
    """
    if kind not in ENCODERS:
        raise ModelError(f"{kind!r:.40} cannot be made; expected one of {', '.join(ENCODERS)}")
    block = BLOCKS[kind]
    out = values.new_empty(
        (*values.shape[:-1], row_bytes(kind, values.shape[-1])), dtype=torch.uint8
    )
    width = values.shape[-1]
    rows, result = values.reshape(-1, width), out.view(-1, out.shape[-1])
    weights = None if importance is None else importance.expand(values.shape).reshape(-1, width)
    step = max(CHUNK_VALUES // max(width, 1), 1)

    def encode(start: int) -> None:
        part = slice(start, start + step)
        x = rows[part].float()
        if not x.isfinite().all():
            raise ModelError("values that are infinite or no numbers cannot be quantized")
        w = None if weights is None else weights[part].float().reshape(-1, block.values)
        made = ENCODERS[kind](x.reshape(-1, block.values), w)
        result[part] = made.view(len(x), -1)

    with ThreadPoolExecutor(torch.get_num_threads()) as pool:
        for _ in pool.map(encode, range(0, len(rows), step)):
            pass
    return out
