"""Mixture of experts on the CPU: the tokens of one expert after those of another, and no expert
touched that nobody chose.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from mtmd.kernels.cpu import matmul, quant_matmul
from mtmd.kernels.graph import Type
from mtmd.kernels.kernel import Kernel
from mtmd.kernels.ops.moe import Routing, activate, route
from mtmd.kernels.quantization.blocks import dequantize


def moe(
    x: Tensor,
    router: Tensor,
    gate: Tensor,
    up: Tensor,
    down: Tensor,
    shares: Tensor | None = None,
    bias: Tensor | None = None,
    reads: Tensor | None = None,
    *,
    routing: Routing,
    act: str = "silu",
    gate_quant: str | None = None,
    up_quant: str | None = None,
    down_quant: str | None = None,
) -> Tensor:
    """The `moe` op

    x [T, D], router [T, E], gate and up [E, F, D], down [E, D, F], shares and bias [E], reads [T]
    -> [T, D]
    """
    weights, chosen = route(router, routing, shares, bias, reads)
    experts, order = chosen.flatten().sort(stable=True)  # all choices, by expert
    tokens, factors = order // routing.top_k, weights.flatten()[order, None]
    total = x.new_zeros(x.shape, dtype=torch.float32)
    start = 0
    for e, count in zip(
        *(part.tolist() for part in experts.unique_consecutive(return_counts=True)), strict=True
    ):
        part = slice(start, start + count)
        start += count
        if e < 0:  # tokens that nobody reads
            continue
        rows = x if len(x) == 1 else x[tokens[part]]
        if routing.on_input:
            rows = (rows * factors[part]).to(x.dtype)
        gated = activate(_product(rows, gate[e], gate_quant), act).mul_(
            _product(rows, up[e], up_quant)
        )
        y = _product(gated, down[e], down_quant)
        total.index_add_(0, tokens[part], y.float() if routing.on_input else y * factors[part])
    return total.to(x.dtype)


def workspace(
    x: Type,
    router: Type,
    gate: Type,
    up: Type,
    down: Type,
    shares: Type | None = None,  # noqa: ARG001
    bias: Type | None = None,
    reads: Type | None = None,  # noqa: ARG001
    *,
    routing: Routing,
    act: str = "silu",  # noqa: ARG001
    gate_quant: str | None = None,
    up_quant: str | None = None,
    down_quant: str | None = None,
) -> int:
    """Bytes beyond the result, should every token choose the same expert."""
    (tokens, width), ffn, item = x.shape, gate.shape[1], x.dtype.itemsize
    wide, narrow = (
        Type.contiguous((tokens, width), x.dtype),
        Type.contiguous((tokens, ffn), x.dtype),
    )
    products = max(
        _stored(wide, gate, gate_quant),
        _stored(wide, up, up_quant),
        _stored(narrow, down, down_quant),
    )
    rated = 12 if routing.by_logits(bias) else 24
    # In fp32 the sum and, beside what an expert makes of its tokens, the same times their shares;
    # ratings and choices of every token.
    return (
        tokens * (8 * width + 2 * item * width + 2 * item * ffn)
        + tokens * (rated * router.shape[1] + 56 * routing.top_k)
        + products
    )


def _product(x: Tensor, w: Tensor, quant: str | None) -> Tensor:
    if quant is None:
        return F.linear(x, w)
    if quant_matmul.rejects(Type.of(x), Type.of(w), quant=quant) is None:
        return quant_matmul.quant_matmul(x, w, quant=quant)
    return F.linear(x, dequantize(w, quant).to(x.dtype))


def _stored(x: Type, w: Type, quant: str | None) -> int:
    one = Type.contiguous(w.shape[1:], w.dtype)
    if quant is None:
        return matmul.packed_bytes(x, one)
    if quant_matmul.rejects(x, one, quant=quant) is None:
        return quant_matmul.workspace(x, one, quant=quant)
    return (4 + x.dtype.itemsize) * w.shape[1] * x.shape[1]


KERNEL = Kernel(moe, workspace=workspace)
