"""Products with a weight."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from mtmd.kernels.graph import Node, Type
from mtmd.kernels.ops.op import need, need_floats, op, values_in
from mtmd.kernels.quantization.blocks import dequantize


def _flops(node: Node) -> int:
    x = node.inputs[0]
    assert x is not None
    return 2 * node.type.count * x.shape[-1]


def _shape(x: Type, w: Type, bias: Type | None = None, *, quant: str | None = None) -> Type | None:
    need_floats(x)
    need(len(w.shape) == 2, f"w {list(w.shape)}")
    need(
        x.shape[-1] == (w.shape[1] if quant is None else values_in(w, quant)),
        f"x {list(x.shape)} and w {list(w.shape)}{f' of {quant}' if quant else ''}: inner sizes "
        "differ",
    )
    need(quant is not None or w.dtype == x.dtype, f"x is {x}, w {w}: of several types")
    need(
        bias is None or bias.shape == w.shape[:1],
        f"bias {bias and list(bias.shape)} does not match w {list(w.shape)}",
    )
    need(bias is None or bias.dtype == x.dtype, f"x is {x}, bias {bias}: of several types")
    return Type.contiguous((*x.shape[:-1], w.shape[0]), x.dtype) if x.is_contiguous else None


@op(shape=_shape, flops=_flops)
def matmul(x: Tensor, w: Tensor, bias: Tensor | None = None, *, quant: str | None = None) -> Tensor:
    """x @ w.T + bias          x [..., K], w [N, K], bias [N] -> [..., N]

    `quant` names the GGUF block type of w, which then is u8 [N, bytes of K values].
    """
    return F.linear(x, w if quant is None else dequantize(w, quant).to(x.dtype), bias)
