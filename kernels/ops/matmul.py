"""Products with a weight."""
from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from mtmd.kernels.graph import Node
from mtmd.kernels.ops.op import need, op


def _flops(node: Node) -> int:
    x = node.inputs[0]
    assert x is not None
    return 2 * node.type.count * x.shape[-1]


@op(flops=_flops)
def matmul(x: Tensor, w: Tensor, bias: Tensor | None = None) -> Tensor:
    """x @ w.T + bias          x [..., K], w [N, K], bias [N] -> [..., N]"""
    need(w.ndim == 2 and x.shape[-1] == w.shape[1], f"x {list(x.shape)} and w {list(w.shape)}: inner sizes differ")
    return F.linear(x, w, bias)
