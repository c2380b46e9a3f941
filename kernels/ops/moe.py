"""Mixture of experts: each token is read by the few experts that its router rates highest
(arXiv:2101.03961, arXiv:2002.05202).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from mtmd.kernels.graph import Node, Type
from mtmd.kernels.ops.op import need, need_floats, op, values_in
from mtmd.kernels.quantization.blocks import dequantize

ACTIVATIONS = ("silu", "gelu_tanh", "relu")
SCORES = ("softmax", "sigmoid")


@dataclass(frozen=True)
class Routing:
    """The choice of experts, and of their weights, by a router's logits.

    A score is the softmax of a token's logits or the sigmoid of each. The `top_k` experts with the
    highest ratings are chosen: score plus a correction bias, where there is one (arXiv:2408.15664).
    With `groups` of experts that follow each other, only those of the `top_groups` best groups may
    be chosen; a group is rated by the sum of the `group_best` highest ratings in it
    (arXiv:2405.04434, 2.1.4; arXiv:2412.19437, 2.1.2). Weights are the scores without the bias,
    with `normalize` divided by their sum plus `eps`, times `scale`. They multiply what an expert
    makes of a token, or, with `on_input`, what it reads (Llama 4).
    """

    top_k: int
    normalize: bool
    score: str = "softmax"
    eps: float = 0.0
    scale: float = 1.0
    groups: int = 1
    top_groups: int = 1
    group_best: int = 2
    on_input: bool = False

    def rejects(self, experts: int) -> str | None:
        """Return None if so many experts can be chosen among in this way, else why not."""
        if not 0 < self.top_k <= experts:
            return f"top_k {self.top_k} of {experts} experts"
        if self.score not in SCORES:
            return f"score {self.score!r}, expected one of {', '.join(SCORES)}"
        if self.groups < 1 or experts % self.groups or not 0 < self.top_groups <= self.groups:
            return f"{self.top_groups} of {self.groups} groups of {experts} experts"
        each = experts // self.groups
        if self.groups > 1 and not (self.group_best in (1, 2) and self.group_best <= each):
            return f"groups of {each} rated by {self.group_best} experts, expected 1 or 2"
        if self.top_k > each * self.top_groups:
            return f"top_k {self.top_k} of {self.top_groups} groups of {each} experts"
        return None

    def by_logits(self, bias: object) -> bool:
        """Return whether ratings are in the order of the logits, which then decide."""
        return bias is None and self.groups == 1


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
    bias: Type | None = None,
    reads: Type | None = None,
    *,
    routing: Routing,
    act: str = "silu",
    gate_quant: str | None = None,
    up_quant: str | None = None,
    down_quant: str | None = None,
) -> Type:
    need_floats(x, router)
    need(act in ACTIVATIONS, f"act {act!r}, expected one of {', '.join(ACTIVATIONS)}")
    for what, one in (("shares", shares), ("bias", bias)):
        need(
            one is None or (one.shape == router.shape[1:] and one.dtype == torch.float32),
            f"{what} {one} of router {router}",
        )
    need(
        reads is None or (reads.shape == x.shape[:1] and reads.dtype == torch.int32),
        f"reads {reads} of x {x}",
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
    reason = routing.rejects(experts)
    need(reason is None, str(reason))
    return Type.contiguous(x.shape, x.dtype)


def _top_k(node: Node) -> int:
    routing: Routing = node.attrs["routing"]
    return routing.top_k


def _flops(node: Node) -> int:
    """Three products for each token and expert that reads it, two where gate and up are one."""
    x, _, gate, up = node.inputs[:4]
    assert x is not None and gate is not None
    return (4 if gate is up else 6) * x.type.count * _top_k(node) * gate.shape[1]


def _traffic(node: Node) -> int:
    """The tokens, the ratings, the result, and the experts in use: as many as an even router would
    choose, which is top_k for one token; with `reads`, if every token is read.
    """
    x, router, *given = list(node.operands)[:5]
    tables = list(dict.fromkeys(given))  # gate and up may be one
    experts, tokens = tables[0].shape[0], x.shape[0]
    used: float = experts * (1 - (1 - _top_k(node) / experts) ** tokens)
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
    chosen = tokens * _top_k(node)
    biased = len(node.inputs) > 6 and node.inputs[6] is not None
    rated = 24 if node.attrs["routing"].groups > 1 or biased else 12
    return (
        4 * x.type.count
        + rated * router.type.count
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
    bias: Tensor | None = None,
    reads: Tensor | None = None,
    *,
    routing: Routing,
    act: str = "silu",
    gate_quant: str | None = None,
    up_quant: str | None = None,
    down_quant: str | None = None,
) -> Tensor:
    """sum_e p_e s_e down_e (act(gate_e x) * up_e x) over the experts e that `routing` chooses for a
    token with weights p; with its `on_input` down_e (act(gate_e x p_e s_e) * up_e x p_e s_e)

    x [T, D], router [T, E] (logits), gate and up [E, F, D], down [E, D, F] -> [T, D]. `shares` fp32
    [E] is s, 1 where it is absent; `bias` fp32 [E] is the correction bias of ratings. `reads` int32
    [T] is 0 for tokens that no expert reads, of which zeros are made. `act` is "silu", "gelu_tanh"
    or "relu"; with the last, and one table as gate and up, experts are two products with relu(y)^2
    between (arXiv:2109.08668). `gate_quant`, `up_quant`, `down_quant` name the GGUF block types of
    tables that are u8 [E, rows, bytes of a row's values]. Ratings and the sum are fp32.
    """
    weights, chosen = route(router, routing, shares, bias, reads)
    total = x.new_zeros(x.shape, dtype=torch.float32)
    for e in chosen[chosen >= 0].unique().tolist():
        tokens, location = (chosen == e).nonzero(as_tuple=True)
        rows, factor = x[tokens], weights[tokens, location, None]
        if routing.on_input:
            rows = (rows * factor).to(x.dtype)
        gated = activate(rows @ _matrix(gate, e, gate_quant, x).t(), act).mul_(
            rows @ _matrix(up, e, up_quant, x).t()
        )
        y = gated @ _matrix(down, e, down_quant, x).t()
        total.index_add_(0, tokens, y.float() if routing.on_input else y * factor)
    return total.to(x.dtype)


def route(
    router: Tensor,
    routing: Routing,
    shares: Tensor | None = None,
    bias: Tensor | None = None,
    reads: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Weights, fp32, and numbers of the experts of each token, -1 for tokens that none reads

    router [T, E], shares [E], bias [E], reads [T] -> [T, top_k] each
    """
    logits = router.float()
    scores = logits.softmax(-1) if routing.score == "softmax" else logits.sigmoid()
    if routing.by_logits(bias):
        ratings = logits
    else:
        ratings = _in_best_groups(scores if bias is None else scores + bias, routing)
    chosen = ratings.topk(routing.top_k, -1).indices
    weights = scores.gather(-1, chosen)
    if routing.normalize:
        weights = weights / (weights.sum(-1, keepdim=True) + routing.eps)
    if routing.scale != 1:
        weights = weights * routing.scale
    if shares is not None:
        weights = weights * shares[chosen]
    if reads is not None:
        chosen = chosen.masked_fill(reads[:, None] == 0, -1)
    return weights, chosen


def _in_best_groups(ratings: Tensor, routing: Routing) -> Tensor:
    """Ratings with those of experts that may not be chosen at minus infinity

    [T, E] -> [T, E]
    """
    if routing.groups == 1:
        return ratings
    grouped = ratings.view(len(ratings), routing.groups, -1)
    rated = grouped.topk(routing.group_best, -1).values.sum(-1)
    best = rated.topk(routing.top_groups, -1).indices
    closed = torch.ones_like(rated, dtype=torch.bool).scatter_(-1, best, False)
    return grouped.masked_fill(closed[..., None], float("-inf")).view_as(ratings)


def activate(x: Tensor, act: str) -> Tensor:
    """act(x), in place of x"""
    if act == "silu":
        return F.silu(x, inplace=True)
    if act == "relu":
        return x.relu_()
    return torch.ops.aten.gelu_(x, approximate="tanh")  # type: ignore[no-any-return]


def _matrix(w: Tensor, expert: int, quant: str | None, x: Tensor) -> Tensor:
    return w[expert] if quant is None else dequantize(w[expert], quant).to(x.dtype)
