"""Products with a weight."""

from __future__ import annotations

import torch
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


def _gelu_shape(x: Type, w: Type, bias: Type) -> Type | None:
    need_floats(x, w, bias)
    need(
        len(w.shape) == 2
        and len(x.shape) >= 2
        and x.shape[-1] == w.shape[1]
        and bias.shape == w.shape[:1]
        and x.dtype == w.dtype == bias.dtype,
        f"x {x}, w {w}, bias {bias}",
    )
    return Type.contiguous((*x.shape[:-1], w.shape[0]), x.dtype) if x.is_contiguous else None


@op(
    shape=_gelu_shape,
    flops=lambda n: n.type.count * (2 * (n.inputs[1].shape[1] if n.inputs[1] else 0) + 10),
)
def matmul_gelu(x: Tensor, w: Tensor, bias: Tensor) -> Tensor:
    """gelu(x @ w.T + bias), GELU by its tanh approximation: cuBLAS has it at the end of a product

    x [..., K], w [N, K], bias [N] -> [..., N]
    """
    if x.device.type not in ("cuda", "meta"):  # elsewhere torch's is not the approximation
        return F.gelu(F.linear(x, w, bias), approximate="tanh")
    rows = x.reshape(-1, x.shape[-1])
    return torch._addmm_activation(bias, rows, w.t(), use_gelu=True).view(*x.shape[:-1], w.shape[0])
