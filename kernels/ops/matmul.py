"""Products with a weight."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from mtmd.kernels.graph import Node, Type
from mtmd.kernels.ops.elementwise import GELUS, gelu, gelu_mul, silu_mul
from mtmd.kernels.ops.norm import rms_norm
from mtmd.kernels.ops.op import need, need_floats, op, values_in
from mtmd.kernels.quantization.blocks import dequantize

ACTIVATIONS = ("silu", *GELUS)  # of the gate of a gated unit


def _flops(node: Node) -> int:
    x = node.inputs[0]
    assert x is not None
    return 2 * node.type.count * x.shape[-1]


def _shape(
    x: Type, w: Type, bias: Type | None = None, *, quant: str | None = None, int8: bool = False
) -> Type | None:
    need(quant is not None or not int8, "int8 without a weight in blocks")
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
def matmul(
    x: Tensor,
    w: Tensor,
    bias: Tensor | None = None,
    *,
    quant: str | None = None,
    int8: bool = False,  # noqa: ARG001
) -> Tensor:
    """x @ w.T + bias          x [..., K], w [N, K], bias [N] -> [..., N]

    `quant` names the GGUF block type of w, which then is u8 [N, bytes of K values]. `int8`: a
    backend may round x to 8 bits where it has many rows; this one does not.
    """
    return F.linear(x, w if quant is None else dequantize(w, quant).to(x.dtype), bias)


def _activated_flops(node: Node) -> int:
    x, w = node.inputs[:2]
    assert x is not None and w is not None
    rows = x.type.count // max(1, x.shape[-1])
    return 2 * rows * w.shape[0] * x.shape[-1] + 10 * node.type.count


def _gelu_shape(
    x: Type, w: Type, bias: Type | None = None, *, approximate: str, quant: str | None = None
) -> Type | None:
    need(approximate in GELUS, f"approximate {approximate!r}, expected one of {', '.join(GELUS)}")
    need(len(x.shape) >= 2, f"x {x}")
    return _shape(x, w, bias, quant=quant)


@op(shape=_gelu_shape, flops=_activated_flops)
def matmul_gelu(
    x: Tensor, w: Tensor, bias: Tensor | None = None, *, approximate: str, quant: str | None = None
) -> Tensor:
    """gelu(x @ w.T + bias); cuBLAS has the tanh approximation at the end of a product with a bias

    x [..., K], w [N, K], bias [N] -> [..., N]; `quant` as `matmul` has it, `approximate` as `gelu`
    """
    at_its_end = quant is None and bias is not None and approximate == "tanh"
    # Elsewhere torch's is not the approximation.
    if at_its_end and bias is not None and x.device.type in ("cuda", "meta"):
        rows = x.reshape(-1, x.shape[-1])
        made = torch._addmm_activation(bias, rows, w.t(), use_gelu=True)
        return made.view(*x.shape[:-1], w.shape[0])
    return gelu.reference(matmul.reference(x, w, bias, quant=quant), approximate=approximate)


def _gated_shape(
    x: Type, w: Type, bias: Type | None = None, *, act: str, quant: str | None = None
) -> Type | None:
    need(act in ACTIVATIONS, f"act {act!r}, expected one of {', '.join(ACTIVATIONS)}")
    result = _shape(x, w, bias, quant=quant)
    need(w.shape[0] % 2 == 0, f"w {list(w.shape)}: expected as many rows for gate as for up")
    return result and Type.contiguous((*x.shape[:-1], w.shape[0] // 2), x.dtype)


@op(shape=_gated_shape, flops=_activated_flops)
def matmul_gated(
    x: Tensor, w: Tensor, bias: Tensor | None = None, *, act: str, quant: str | None = None
) -> Tensor:
    """act(gate) * up of [gate, up] = x @ w.T + bias, the gated unit of arXiv:2002.05202

    x [..., K], w [2 F, K], first the rows of gate, bias [2 F] -> [..., F]; `quant` as `matmul` has
    it, `act` "silu" or a form of `gelu`
    """
    gate, up = matmul.reference(x, w, bias, quant=quant).chunk(2, -1)
    if act == "silu":
        return silu_mul.reference(gate, up)
    return gelu_mul.reference(gate, up, approximate=act)


def _lora_shape(y: Type, x: Type, a: Type, b: Type, scale: Type) -> Type | None:
    need_floats(y, x, a, b, scale)
    need(len(a.shape) == len(b.shape) == 2, f"a {a} and b {b}: expected two matrices")
    need(y.dtype == x.dtype == a.dtype == b.dtype, f"{y}, {x}, {a} and {b}: of several types")
    sizes = (x.shape[-1], a.shape[0], y.shape[-1]) == (a.shape[1], b.shape[1], b.shape[0])
    need(sizes and y.shape[:-1] == x.shape[:-1], f"x {x}, a {a} and b {b} do not give y {y}")
    rows = zip(scale.shape[-2::-1], x.shape[-2::-1], strict=False)
    alike = all(size in (1, count) for size, count in rows) and len(scale.shape) <= len(x.shape)
    need(scale.shape[-1:] == (1,) and alike, f"scale {scale}: expected one number for rows of {x}")
    return y if y.is_contiguous else None


def _lora_flops(node: Node) -> int:
    y, _, a = node.inputs[:3]
    assert y is not None and a is not None
    rank, width = a.shape
    return 2 * (y.type.count // y.shape[-1]) * rank * (width + y.shape[-1]) + 2 * y.type.count


def _low_rank(x: Tensor, a: Tensor, b: Tensor, scale: Tensor) -> Tensor:
    return F.linear((F.linear(x, a) * scale).to(x.dtype), b)


def _lora_in_place(y: Tensor, x: Tensor, a: Tensor, b: Tensor, scale: Tensor) -> Tensor:
    return y.add_(_low_rank(x, a, b, scale))


@op(shape=_lora_shape, flops=_lora_flops, in_place=_lora_in_place)
def lora(y: Tensor, x: Tensor, a: Tensor, b: Tensor, scale: Tensor) -> Tensor:
    """y + scale * (x @ a.T) @ b.T, an adapter of low rank on the product y of x;
    arXiv:2106.09685          y [..., N], x [..., K], a [R, K], b [N, R], scale [..., 1] -> [..., N]

    `scale` has a number for each row of x, or, along dimensions of size 1, for several.
    """
    return y + _low_rank(x, a, b, scale)


def _head_shape(x: Type, w: Type, *, turned: bool = False, quant: str | None = None) -> Type:
    need_floats(x)
    need(
        len(x.shape) == len(w.shape) == 3 and x.shape[1] in (1, w.shape[0]),
        f"x {list(x.shape)} does not have the heads of w {list(w.shape)}, nor one",
    )
    rows, values = w.shape[1], w.shape[2] if quant is None else values_in(w, quant)
    outputs, inner = (values, rows) if turned else (rows, values)
    need(x.shape[2] == inner, f"x {list(x.shape)} and w {list(w.shape)}: inner sizes differ")
    need(quant is not None or w.dtype == x.dtype, f"x is {x}, w {w}: of several types")
    return Type.contiguous((x.shape[0], w.shape[0], outputs), x.dtype)


def _head_workspace(node: Node) -> int:
    """The result before its rows are in order and x for every head; quantized matrices decoded, in
    fp32 and in the type of x.
    """
    x, w = node.inputs
    assert x is not None and w is not None
    (tokens, _, inner), heads, item = x.shape, w.shape[0], x.dtype.itemsize
    operands = node.type.bytes + tokens * heads * inner * item
    if node.attrs.get("quant") is None:
        return operands
    return operands + node.type.shape[2] * heads * inner * (8 + item)


@op(shape=_head_shape, flops=_flops, workspace=_head_workspace)
def head_matmul(x: Tensor, w: Tensor, *, turned: bool = False, quant: str | None = None) -> Tensor:
    """Each head's product with a matrix of its own: x[:, h] @ w[h].T, or, `turned`, x[:, h] @ w[h]

    x [T, H, K], or [T, 1, K] for all heads, w [H, N, K], turned [H, K, N] -> [T, H, N]

    `quant` names the block type of w, which then is u8 [H, N, bytes of K values].
    """
    heads = x.transpose(0, 1).expand(w.shape[0], -1, -1)
    if quant is not None:
        w = dequantize(w, quant).to(x.dtype)
    return torch.bmm(heads, w if turned else w.transpose(1, 2)).transpose(0, 1).contiguous()


def _mixed_shape(base: Type, x: Type, weights: Type) -> Type:
    need_floats(base, x, weights)
    three = len(base.shape) == len(x.shape) == len(weights.shape) == 3
    need(
        three
        and base.shape[::2] == x.shape[::2]
        and weights.shape == (base.shape[0], base.shape[1], x.shape[1]),
        f"base {list(base.shape)}, x {list(x.shape)}, weights {list(weights.shape)}",
    )
    need(base.dtype == x.dtype == weights.dtype, f"base {base}, x {x}, weights {weights}")
    return Type.contiguous(base.shape, base.dtype)


@op(shape=_mixed_shape, flops=lambda n: 2 * n.type.count * n.inputs[1].shape[1])  # type: ignore[union-attr]
def add_mixed(base: Tensor, x: Tensor, weights: Tensor) -> Tensor:
    """base + weights x: the streams of each token mixed by numbers of its own

    base [T, M, D], x [T, N, D], weights [T, M, N] -> [T, M, D], contiguous; arXiv:2301.13310
    """
    return torch.baddbmm(base, weights, x).contiguous()


def _altup_shape(
    streams: Type,
    norm: Type,
    router: Type,
    mix: Type,
    y: Type | None = None,
    *,
    active: int,
    eps: float,  # noqa: ARG001
    scale: float,  # noqa: ARG001
) -> Type:
    need_floats(streams, norm, router, mix, y)
    need(len(streams.shape) == 3, f"streams {list(streams.shape)}")
    tokens, count, width = streams.shape
    rows = count * count if y is None else count
    need(
        norm.shape == (width,)
        and router.shape[1:] == (width,)
        and mix.shape == (rows, router.shape[0])
        and (y is None or y.shape == (tokens, width))
        and 0 <= active < count,
        f"streams {list(streams.shape)}, norm {list(norm.shape)}, router {list(router.shape)}, "
        f"mix {list(mix.shape)}, y {y and list(y.shape)}, active {active}",
    )
    same = all(t is None or t.dtype == streams.dtype for t in (router, mix, y))
    need(same, f"streams {streams}, router {router}, mix {mix}, y {y}: of several types")
    return Type.contiguous(streams.shape, streams.dtype)


def _altup_flops(node: Node) -> int:
    streams, _, router, mix = node.inputs[:4]
    assert streams is not None and router is not None and mix is not None
    tokens, count = streams.shape[:2]
    mixed = mix.shape[0] // count
    return 2 * (tokens * router.type.count + node.type.count * mixed + tokens * mix.type.count)


@op(shape=_altup_shape, flops=_altup_flops)
def altup(
    streams: Tensor,
    norm: Tensor,
    router: Tensor,
    mix: Tensor,
    y: Tensor | None = None,
    *,
    active: int,
    eps: float,
    scale: float,
) -> Tensor:
    """Alternating updates (arXiv:2301.13310): the streams of each token as a layer is expected to
    leave them, or, with the y that it made of the active one, corrected by that

        r = tanh(scale rms_norm(y, or the active stream) router^T)          shares = mix r
        streams + shares streams          streams + (shares + 1) (y - the active stream)

    streams [T, N, D], norm [D], router [R, D], mix [N N, R], or [N, R] with y [T, D] -> [T, N, D],
    contiguous
    """
    one = streams[:, active]
    read = one if y is None else y
    routed = rms_norm.reference(read, norm, eps=eps) * scale
    shares = F.linear(F.linear(routed, router).tanh(), mix)
    if y is None:
        return add_mixed.reference(streams, streams, shares.unflatten(1, (-1, streams.shape[1])))
    return add_mixed.reference(streams, (y - one).unsqueeze(1), (shares + 1).unsqueeze(2))
