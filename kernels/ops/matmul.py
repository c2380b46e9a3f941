"""Products with a weight."""
from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from mtmd.kernels.graph import Node, Type
from mtmd.kernels.ops.op import need, need_floats, op


def _flops(node: Node) -> int:
    x = node.inputs[0]
    assert x is not None
    return 2 * node.type.count * x.shape[-1]


def _shape(x: Type, w: Type, bias: Type | None = None) -> Type | None:
    need(len(w.shape) == 2 and x.shape[-1] == w.shape[1], f"x {list(x.shape)} and w {list(w.shape)}: inner sizes differ")
    need(bias is None or bias.shape == w.shape[:1], f"bias {bias and list(bias.shape)} does not match w {list(w.shape)}")
    need_floats(x)
    need(all(t is None or t.dtype == x.dtype for t in (w, bias)), f"x is {x}, w {w}, bias {bias}: of several types")
    return Type.contiguous((*x.shape[:-1], w.shape[0]), x.dtype) if x.is_contiguous else None


@op(shape=_shape, flops=_flops)
def matmul(x: Tensor, w: Tensor, bias: Tensor | None = None) -> Tensor:
    """x @ w.T + bias          x [..., K], w [N, K], bias [N] -> [..., N]"""
    return F.linear(x, w, bias)
