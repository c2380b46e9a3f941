"""Mixture of experts: each token is read by the few experts that its router rates highest
(arXiv:2101.03961, arXiv:2002.05202).
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from mtmd.kernels.graph import Node, Type
from mtmd.kernels.ops.op import need, need_floats, op, values_in
from mtmd.kernels.quantization.blocks import dequantize

ACTIVATIONS = ("silu", "gelu_tanh")


def _expert_shape(w: Type, quant: str | None, x: Type, what: str) -> tuple[int, int, int]:
    """Experts, rows and values of a row of one of the three tables."""
    need(len(w.shape) == 3, f"{what} {list(w.shape)}, expected [E, rows, values]")
    need(quant is not None or w.dtype == x.dtype, f"x is {x}, {what} {w}: of several types")
    return w.shape[0], w.shape[1], w.shape[2] if quant is None else values_in(w, quant)


def _shape(
    x: Type,
    router: Type,
    gate: Type,
    up: Type,
    down: Type,
    shares: Type | None = None,
    *,
    top_k: int,
    normalize: bool,  # noqa: ARG001
    act: str = "silu",
    gate_quant: str | None = None,
    up_quant: str | None = None,
    down_quant: str | None = None,
) -> Type:
    need_floats(x, router)
    need(act in ACTIVATIONS, f"act {act!r}, expected one of {', '.join(ACTIVATIONS)}")
    need(
        shares is None or (shares.shape == router.shape[1:] and shares.dtype == torch.float32),
        f"shares {shares} of router {router}",
    )
    need(
        len(x.shape) == len(router.shape) == 2 and x.shape[0] == router.shape[0],
        f"x {list(x.shape)}, router {list(router.shape)}",
    )
    experts, ffn, width = _expert_shape(gate, gate_quant, x, "gate")
    need(
        (experts, width) == (router.shape[1], x.shape[1]),
        f"gate {list(gate.shape)} for x {list(x.shape)}, router {list(router.shape)}",
    )
    need(
        _expert_shape(up, up_quant, x, "up") == (experts, ffn, width),
        f"gate {list(gate.shape)} and up {list(up.shape)} differ",
    )
    need(
        _expert_shape(down, down_quant, x, "down") == (experts, width, ffn),
        f"down {list(down.shape)} for gate {list(gate.shape)}",
    )
    need(0 < top_k <= experts, f"top_k {top_k} of {experts} experts")
    return Type.contiguous(x.shape, x.dtype)


def _flops(node: Node) -> int:
    """Three products for each token and expert that reads it."""
    x, _, gate = node.inputs[:3]
    assert x is not None and gate is not None
    return 6 * x.type.count * int(node.attrs["top_k"]) * gate.shape[1]


def _traffic(node: Node) -> int:
    """The tokens, the ratings, the result, and the experts in use: as many as an even router would
    choose, which is top_k for one token.
    """
    x, router, *tables = list(node.operands)[:5]
    experts, tokens = tables[0].shape[0], x.shape[0]
    used: float = experts * (1 - (1 - node.attrs["top_k"] / experts) ** tokens)
    return (
        node.type.bytes
        + x.type.bytes
        + router.type.bytes
        + round(used * sum(t.type.bytes for t in tables) / experts)
    )


def _workspace(node: Node) -> int:
    """The sum in fp32, ratings and choices of every token, and, should all choose one expert, that
    expert's values, the tokens it reads and what it makes of them, in fp32 at the end.
    """
    x, router, gate = node.inputs[:3]
    assert x is not None and router is not None and gate is not None
    (tokens, width), ffn, item = x.shape, gate.shape[1], x.dtype.itemsize
    decoded = (
        2 * ffn * width * (4 + item) if any(t.dtype == torch.uint8 for t in node.operands) else 0
    )
    chosen = tokens * int(node.attrs["top_k"])
    return (
        4 * x.type.count
        + 12 * router.type.count
        + 40 * chosen
        + decoded
        + tokens * (width * (item + 12) + 3 * ffn * item)
    )


@op(shape=_shape, flops=_flops, traffic=_traffic, workspace=_workspace, waits=True)
def moe(
    x: Tensor,
    router: Tensor,
    gate: Tensor,
    up: Tensor,
    down: Tensor,
    shares: Tensor | None = None,
    *,
    top_k: int,
    normalize: bool,
    act: str = "silu",
    gate_quant: str | None = None,
    up_quant: str | None = None,
    down_quant: str | None = None,
) -> Tensor:
    """sum_e p_e s_e down_e (act(gate_e x) * up_e x) over the `top_k` experts e that a token rates
    highest, p = softmax(router)

    x [T, D], router [T, E] (logits), gate and up [E, F, D], down [E, D, F] -> [T, D]. `normalize`:
    the chosen p are scaled to a sum of 1. `shares` fp32 [E] is s, 1 where it is absent. `act` is
    "silu" or "gelu_tanh". `gate_quant`, `up_quant`, `down_quant` name the GGUF block types of
    tables that are u8 [E, rows, bytes of a row's values]. Ratings and the sum are fp32.
    """
    weights, chosen = route(router, top_k, normalize, shares)
    total = x.new_zeros(x.shape, dtype=torch.float32)
    for e in chosen.unique().tolist():
        tokens, location = (chosen == e).nonzero(as_tuple=True)
        rows = x[tokens]
        gated = activate(rows @ _matrix(gate, e, gate_quant, x).t(), act).mul_(
            rows @ _matrix(up, e, up_quant, x).t()
        )
        y = gated @ _matrix(down, e, down_quant, x).t()
        total.index_add_(0, tokens, y * weights[tokens, location, None])
    return total.to(x.dtype)


def route(
    router: Tensor, top_k: int, normalize: bool, shares: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Weights, fp32, and numbers of the experts of each token

    router [T, E], shares [E] -> [T, top_k] each
    """
    weights, chosen = router.float().softmax(-1).topk(top_k, -1)
    if normalize:
        weights = weights / weights.sum(-1, keepdim=True)
    return (weights if shares is None else weights * shares[chosen]), chosen


def activate(x: Tensor, act: str) -> Tensor:
    """act(x), in place of x"""
    if act == "silu":
        return F.silu(x, inplace=True)
    return torch.ops.aten.gelu_(x, approximate="tanh")  # type: ignore[no-any-return]


def _matrix(w: Tensor, expert: int, quant: str | None, x: Tensor) -> Tensor:
    return w[expert] if quant is None else dequantize(w[expert], quant).to(x.dtype)
