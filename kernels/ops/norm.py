"""Normalisations over the last dimension; statistics in fp32 whatever the input's type."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from mtmd.kernels.graph import Type
from mtmd.kernels.ops.elementwise import silu_mul
from mtmd.kernels.ops.op import need, need_floats, op, same_as_first


def _norm_shape(x: Type, *weights: Type | None, eps: float) -> Type | None:  # noqa: ARG001
    for w in weights:
        need(w is None or w.shape == x.shape[-1:], f"a weight {w} does not match x {list(x.shape)}")
    return same_as_first(x, *weights)


def _layer_norm_shape(x: Type, w: Type, b: Type | None = None, *, eps: float) -> Type | None:
    same = w.dtype == x.dtype and (b is None or b.dtype == x.dtype)
    need(same, f"x is {x}, w {w}, b {b}: of several types")
    return _norm_shape(x, w, b, eps=eps)


@op(shape=_norm_shape, flops=lambda n: 4 * n.type.count)
def rms_norm(x: Tensor, w: Tensor | None = None, *, eps: float) -> Tensor:
    """x * rsqrt(mean(x^2) + eps) * w

    x [..., D], w [D] in fp32, ones where it is absent; arXiv:1910.07467
    """
    return F.rms_norm(x.float(), x.shape[-1:], None if w is None else w.float(), eps).to(x.dtype)


@op(shape=_layer_norm_shape, flops=lambda n: 6 * n.type.count)
def layer_norm(x: Tensor, w: Tensor, b: Tensor | None = None, *, eps: float) -> Tensor:
    """(x - mean) * rsqrt(var + eps) * w + b

    x [..., D], w, b [D] in x's type, b zeros where it is absent; arXiv:1607.06450
    """
    return F.layer_norm(x, x.shape[-1:], w, b, eps)


def _magnitude_shape(y: Type, x: Type, *, floor: float) -> Type | None:  # noqa: ARG001
    fits = (
        len(x.shape) == len(y.shape)
        and x.shape[-1:] == y.shape[-1:]
        and all(n in (1, m) for n, m in zip(x.shape[:-1], y.shape[:-1], strict=True))
    )
    need(fits and x.dtype == y.dtype, f"y is {y}, x {x}: expected a row of x for each of y")
    return same_as_first(y, x)


@op(shape=_magnitude_shape, flops=lambda n: 6 * n.type.count)
def match_magnitude(y: Tensor, x: Tensor, *, floor: float) -> Tensor:
    """y * sqrt(mean(x^2) / max(mean(y^2), floor))

    y [..., N, D], x [..., N or 1, D]; transformers' Gemma 3n
    """
    values = y.float()
    expected = x.float().square().mean(-1, keepdim=True).sqrt()
    actual = values.square().mean(-1, keepdim=True).clamp(min=floor).sqrt()
    return (values * expected / actual).to(y.dtype)


@op(shape=same_as_first, flops=lambda n: 6 * n.type.count)
def gaussian_topk(x: Tensor, *, deviations: float) -> Tensor:
    """max(x - mean - deviations * std, 0): what is left of the largest values of a row, as many as
    a normal distribution has above so many deviations

    x [..., D]; arXiv:2506.06644
    """
    values = x.float()
    deviation, mean = torch.std_mean(values, -1, correction=0, keepdim=True)
    return (values - (mean + deviation * deviations)).relu_().to(x.dtype)


def _cumulative_shape(x: Type, w: Type, *, eps: float) -> Type:  # noqa: ARG001
    need_floats(x, w)
    need(
        len(x.shape) == 3 and len(w.shape) == 1 and w.shape[0] > 0 and x.shape[2] % w.shape[0] == 0,
        f"x {list(x.shape)} does not have the {list(w.shape)} channels of w",
    )
    return Type.contiguous(x.shape, x.dtype)


@op(shape=_cumulative_shape, flops=lambda n: 7 * n.type.count)
def cumulative_norm(x: Tensor, w: Tensor, *, eps: float) -> Tensor:
    """(x - mean) * rsqrt(var + eps) * w, where the mean of a row is that of all values up to its
    end, and the variance the mean square of what is left of these values without it

    x [B, T, N C], w [C] -> contiguous; a group norm of one group that does not look ahead, as in
    transformers' Gemma 3n
    """
    values = x.float().contiguous()
    counts = torch.arange(1, x.shape[1] + 1, device=x.device)[:, None] * float(x.shape[2])
    centered = values - values.sum(-1, keepdim=True).cumsum(1) / counts
    squares = torch.linalg.vector_norm(centered, dim=-1, keepdim=True).square_()
    centered *= torch.rsqrt(squares.cumsum(1) / counts + eps)
    centered.view(*x.shape[:2], x.shape[2] // w.shape[0], w.shape[0]).mul_(w.float())
    return centered.to(x.dtype)


def _l2_norm_shape(x: Type, *, eps: float) -> Type:  # noqa: ARG001
    need_floats(x)
    need(len(x.shape) > 0, "x of no dimensions")
    return Type.contiguous(x.shape, x.dtype)


@op(shape=_l2_norm_shape, flops=lambda n: 3 * n.type.count)
def l2_norm(x: Tensor, *, eps: float) -> Tensor:
    """x * rsqrt(sum(x^2) + eps)

    x [..., D] -> contiguous; flash-linear-attention's l2norm
    """
    values = x.float()
    return (
        (values * torch.rsqrt(values.square().sum(-1, keepdim=True) + eps)).to(x.dtype).contiguous()
    )


def _add_norm_shape(
    x: Type,
    y: Type,
    w: Type,
    y_norm: Type | None = None,
    *,
    eps: float,  # noqa: ARG001
    y_eps: float | None = None,
) -> Type:
    need_floats(x, y, w, y_norm)
    need(x.shape == y.shape and x.dtype == y.dtype and len(x.shape) > 0, f"x {x}, y {y}")
    for weight in (w, y_norm):
        need(
            weight is None or weight.shape == x.shape[-1:],
            f"a weight {weight} does not match x {list(x.shape)}",
        )
    need((y_norm is None) == (y_eps is None), f"y_norm {y_norm} with y_eps {y_eps}")
    return Type.contiguous((2, *x.shape), x.dtype)


@op(shape=_add_norm_shape, flops=lambda n: 5 * n.type.count)
def add_norm(
    x: Tensor,
    y: Tensor,
    w: Tensor,
    y_norm: Tensor | None = None,
    *,
    eps: float,
    y_eps: float | None = None,
) -> Tensor:
    """s = x + y, or x + rms_norm(y) with `y_norm`; then s and rms_norm(s), one behind the other

    x, y [..., D], w, y_norm [D] -> [2, ..., D]
    """
    added = y if y_norm is None or y_eps is None else rms_norm.reference(y, y_norm, eps=y_eps)
    total = x + added
    return torch.stack((total, rms_norm.reference(total, w, eps=eps)))


def _laurel_shape(
    x: Type,
    y: Type,
    y_norm: Type,
    u: Type,
    v: Type,
    v_norm: Type,
    w: Type,
    *,
    eps: float,  # noqa: ARG001
    factor: float,  # noqa: ARG001
) -> Type:
    need_floats(x, y, y_norm, u, v, v_norm, w)
    same = all(t.shape == x.shape and t.dtype == x.dtype for t in (y, u, v))
    need(same and len(x.shape) > 0, f"x {x}, y {y}, u {u}, v {v}")
    for weight in (y_norm, v_norm, w):
        need(weight.shape == x.shape[-1:], f"a weight {weight} does not match x {list(x.shape)}")
    return Type.contiguous((2, *x.shape), x.dtype)


@op(shape=_laurel_shape, flops=lambda n: 8 * n.type.count)
def laurel(
    x: Tensor,
    y: Tensor,
    y_norm: Tensor,
    u: Tensor,
    v: Tensor,
    v_norm: Tensor,
    w: Tensor,
    *,
    eps: float,
    factor: float,
) -> Tensor:
    """s = factor ((x + rms_norm(y)) + (u + rms_norm(v))); then s and rms_norm(s) w, one behind the
    other: a residual beside one of low rank, whose product v is

    x, y, u, v [..., D], y_norm, v_norm, w [D] -> [2, ..., D]; arXiv:2411.07501
    """
    first = rms_norm.reference(y, y_norm, eps=eps) + x
    second = rms_norm.reference(v, v_norm, eps=eps) + u
    total = (first + second) * factor
    return torch.stack((total, rms_norm.reference(total, w, eps=eps)))


def _add_layer_norm_shape(
    x: Type,
    y: Type,
    w: Type,
    b: Type | None = None,
    scale: Type | None = None,
    *,
    eps: float,  # noqa: ARG001
) -> Type:
    need_floats(x, y, w, b, scale)
    need(x.shape == y.shape and x.dtype == y.dtype and len(x.shape) > 0, f"x {x}, y {y}")
    for weight in (w, b, scale):
        need(
            weight is None or (weight.shape == x.shape[-1:] and weight.dtype == x.dtype),
            f"a weight {weight} does not match x {x}",
        )
    return Type.contiguous((2, *x.shape), x.dtype)


@op(shape=_add_layer_norm_shape, flops=lambda n: 4 * n.type.count)
def add_layer_norm(
    x: Tensor,
    y: Tensor,
    w: Tensor,
    b: Tensor | None = None,
    scale: Tensor | None = None,
    *,
    eps: float,
) -> Tensor:
    """s = x + y * scale; then s and layer_norm(s), one behind the other

    x, y [..., D], w, b, scale [D] in x's type, b zeros and scale ones where they are absent
    -> [2, ..., D]
    """
    total = x + (y if scale is None else y * scale)
    return torch.stack((total, layer_norm.reference(total, w, b, eps=eps)))


def _gated_norm_shape(x: Type, w: Type, gate: Type, *, eps: float) -> Type:  # noqa: ARG001
    need_floats(x, w, gate)
    need(x.shape == gate.shape and len(x.shape) == 3, f"x {x}, gate {gate}")
    need(w.shape == x.shape[-1:], f"a weight {w} does not match x {list(x.shape)}")
    return Type.contiguous(x.shape, gate.dtype)


@op(shape=_gated_norm_shape, flops=lambda n: 10 * n.type.count)
def gated_norm(x: Tensor, w: Tensor, gate: Tensor, *, eps: float) -> Tensor:
    """silu(gate) * rms_norm(x), which is rounded to gate's type before

    x, gate [T, H, D], w [D] -> [T, H, D] in gate's type
    """
    normed = rms_norm.reference(x, w, eps=eps).to(gate.dtype)
    return silu_mul.reference(gate, normed).contiguous()
