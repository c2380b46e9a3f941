"""Ops that carry a state along each sequence: a short causal convolution and linear attention.

A batch is T tokens of S sequences, one after another: `starts` int64 [S + 1] are the offsets of
their first tokens (0 first, T last; cu_seqlens elsewhere), and `slots` int64 [S], all different,
say where in a pool of states each sequence's state lies. Slots of fresh sequences hold zeros. An op
returns one tensor, so these return outputs and new states packed along their first dimension;
`state_store` writes states back. A sequence without tokens keeps its state.
"""

from __future__ import annotations

from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor

from mtmd.kernels.graph import Node, Type
from mtmd.kernels.ops.op import need, need_floats, need_positions, op


def _need_sequences(starts: Type, slots: Type) -> int:
    need_positions(starts)
    need_positions(slots)
    need(
        starts.shape[0] == slots.shape[0] + 1,
        f"{starts.shape[0]} starts for {slots.shape[0]} sequences, expected one more",
    )
    return slots.shape[0]


def _state_traffic(node: Node) -> int:
    """Every operand but the pool once, the states of the batch from the pool, and the result."""
    state, slots = (
        (node.inputs[2], node.inputs[4])
        if node.op == "short_conv"
        else (node.inputs[5], node.inputs[7])
    )
    assert state is not None and slots is not None
    pooled = state.type.bytes // max(state.shape[0], 1)
    return (
        node.type.bytes
        + sum(i.type.bytes for i in node.operands if i is not state)
        + slots.shape[0] * pooled
    )


def _conv_shape(
    x: Type,
    w: Type,
    state: Type,
    starts: Type,
    slots: Type,
    bias: Type | None = None,
    *,
    activation: str,
) -> Type:
    count = _need_sequences(starts, slots)
    need_floats(x, w, state, bias)
    need(activation in ("none", "silu"), f"activation {activation!r}, expected none or silu")
    need(
        len(x.shape) == len(w.shape) == 2 and w.shape[0] == x.shape[1] and w.shape[1] >= 2,
        f"x {list(x.shape)} with w {list(w.shape)}, expected [T, C] and [C, W] with W of 2 or more",
    )
    before = w.shape[1] - 1
    need(
        state.shape[1:] == (before, x.shape[1]),
        f"state {list(state.shape)}, expected [N, {before}, {x.shape[1]}]",
    )
    need(
        bias is None or bias.shape == x.shape[1:],
        f"bias {bias and list(bias.shape)} for {x.shape[1]} channels",
    )
    return Type.contiguous((x.shape[0] + count * before, x.shape[1]), x.dtype)


def _conv_flops(node: Node) -> int:
    x, w = node.inputs[:2]
    assert x is not None and w is not None
    return 2 * x.type.count * w.shape[1]


def _conv_workspace(node: Node) -> int:
    """The outputs before they are packed, and three more in fp32: a sum, a product and their sum;
    or every sequence's rows.
    """
    x, w = node.inputs[:2]
    assert x is not None and w is not None
    taps = 4 * w.type.count if w.dtype.itemsize != 4 else 0
    return x.type.bytes + max(12 * x.type.count, node.type.bytes) + taps


@op(
    shape=_conv_shape,
    flops=_conv_flops,
    traffic=_state_traffic,
    workspace=_conv_workspace,
    waits=True,
)
def short_conv(
    x: Tensor,
    w: Tensor,
    state: Tensor,
    starts: Tensor,
    slots: Tensor,
    bias: Tensor | None = None,
    *,
    activation: str,
) -> Tensor:
    """y[t, c] = act(sum_j w[c, j] x[t - W + 1 + j, c] + bias[c]) over each sequence's own tokens,
    its W - 1 earlier ones from its slot

    x [T, C], w [C, W], state [N, W - 1, C], bias [C] -> [T + S (W - 1), C] in x's type: y, then of
    each sequence the last W - 1 inputs, which the next tokens need. activation: none or silu. Sums
    in fp32. Source: causal_conv1d (Dao-AILab), LFM2's short convolution.
    """
    taps, before = w.float().t(), w.shape[1] - 1
    out, saved = x.new_zeros(x.shape), []
    for i, (start, stop) in enumerate(spans(starts)):
        rows = torch.cat([state[slots[i]].to(x.dtype), x[start:stop]])
        saved.append(rows[rows.shape[0] - before :])
        y = sum(
            (rows[j : j + stop - start].float() * tap for j, tap in enumerate(taps)),
            torch.zeros(()),
        )
        y = y if bias is None else y + bias.float()
        out[start:stop] = F.silu(y) if activation == "silu" else y
    return torch.cat([out, *saved])


def spans(starts: Tensor) -> list[tuple[int, int]]:
    """First token and token after the last, of each sequence; waits for the device."""
    at = starts.tolist()
    return list(pairwise(at))


def _linear_shape(
    q: Type,
    k: Type,
    v: Type,
    decay: Type,
    beta: Type,
    state: Type,
    starts: Type,
    slots: Type,
    *,
    scale: float,  # noqa: ARG001
    delta: bool = True,  # noqa: ARG001
) -> Type:
    count = _need_sequences(starts, slots)
    need_floats(q, k, v)
    need(
        len(q.shape) == len(v.shape) == 3
        and q.shape == k.shape
        and q.shape[0] == v.shape[0]
        and q.shape[1] > 0
        and v.shape[1] % q.shape[1] == 0,
        f"q {list(q.shape)}, k {list(k.shape)}, v {list(v.shape)}, expected [T, G, K] twice and "
        "[T, H, V] with H a multiple of G",
    )
    need(
        decay.shape == beta.shape == v.shape[:2],
        f"decay {list(decay.shape)} and beta {list(beta.shape)}, expected {list(v.shape[:2])}",
    )
    heads, value, key = v.shape[1], v.shape[2], k.shape[2]
    need(
        state.shape[1:] == (key, heads, value),
        f"state {list(state.shape)}, expected [N, {key}, {heads}, {value}]",
    )
    need(
        decay.dtype == beta.dtype == state.dtype == torch.float32,
        f"decay {decay}, beta {beta}, state {state}, expected fp32",
    )
    return Type.contiguous((v.shape[0] + count * key, heads, value), torch.float32)


def _linear_flops(node: Node) -> int:
    """Per token and head: one multiplication of the state, a product with it, or two, and one
    update.
    """
    k, v = node.inputs[1:3]
    assert k is not None and v is not None
    return (7 if node.attrs.get("delta", True) else 5) * v.type.count * k.shape[2]


def _linear_workspace(node: Node) -> int:
    """q and k in fp32 for each head, v in fp32, and three states: the last, the next and a
    product.
    """
    k, v = node.inputs[1:3]
    assert k is not None and v is not None
    tokens, heads, value = v.shape
    return 4 * k.shape[2] * heads * (2 * tokens + 3 * value) + (
        4 * v.type.count if v.dtype.itemsize != 4 else 0
    )


@op(
    shape=_linear_shape,
    flops=_linear_flops,
    traffic=_state_traffic,
    workspace=_linear_workspace,
    waits=True,
)
def linear_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    decay: Tensor,
    beta: Tensor,
    state: Tensor,
    starts: Tensor,
    slots: Tensor,
    *,
    scale: float,
    delta: bool = True,
) -> Tensor:
    """Linear attention whose state decays, token after token; head h reads the queries and keys of
    group h // (H / G)

        S <- exp(decay_t) S

        S <- S + beta_t k_t (v_t - S^T k_t)^T          with `delta`
        S <- S + beta_t k_t v_t^T                      without
        o_t = scale S^T q_t

    q, k [T, G, K], v [T, H, V], decay (log, finite, <= 0) and beta [T, H] fp32, state [N, K, H, V]
    fp32 -> fp32 [T + S K, H, V]: o, then each sequence's last state as K rows. q and k come as they
    are to be used: models normalise them before. With `delta` it is the gated delta rule
    (arXiv:2412.06464), where what is written replaces what the state has for its key. Without, it
    is the selective scan of Mamba-2 (arXiv:2405.21060): q is its C, k its B, v its x, beta its step
    and decay its step times A.
    """
    repeats = v.shape[1] // q.shape[1]
    q, k = (x.float().repeat_interleave(repeats, 1).transpose(1, 2) for x in (q, k))  # [T, K, H]
    v = v.float()
    out = v.new_zeros(v.shape[0] + slots.shape[0] * k.shape[1], *v.shape[1:])
    states = out[v.shape[0] :].view(slots.shape[0], *state.shape[1:])
    for i, (start, stop) in enumerate(spans(starts)):
        now = state[slots[i]]
        for t in range(start, stop):
            now = now * decay[t].exp()[:, None]
            u = v[t] - (now * k[t][..., None]).sum(0) if delta else v[t]
            now = now + k[t][..., None] * (beta[t][:, None] * u)
            out[t] = scale * (now * q[t][..., None]).sum(0)
        states[i] = now
    return out


def _store_shape(state: Type, rows: Type, slots: Type) -> Type:
    need_positions(slots)
    need_floats(state, rows)
    need(
        len(state.shape) >= 2 and rows.shape == (slots.shape[0] * state.shape[1], *state.shape[2:]),
        f"rows {list(rows.shape)} for slots {list(slots.shape)} of state {list(state.shape)}",
    )
    return state


def _store_traffic(node: Node) -> int:
    _, rows, slots = node.inputs
    assert rows is not None and slots is not None
    return 2 * rows.type.bytes + slots.type.bytes


@op(shape=_store_shape, traffic=_store_traffic, writes_first=True)
def state_store(state: Tensor, rows: Tensor, slots: Tensor) -> Tensor:
    """The pool of states with those of some sequences replaced, in place

    state [N, R, ...], rows [S R, ...], slots [S]
    """
    state.index_copy_(0, slots, rows.reshape(slots.shape[0], *state.shape[1:]).to(state.dtype))
    return state


def _gates_shape(alpha: Type, dt: Type, a: Type, beta: Type | None = None) -> Type:
    need_floats(alpha, beta)
    of_all = beta is None or alpha.shape == beta.shape
    need(len(alpha.shape) == 2 and of_all, f"alpha {alpha}, beta {beta}")
    for weight in (dt, a):
        need(
            weight.shape == alpha.shape[1:] and weight.dtype == torch.float32,
            f"{weight} for each of {alpha.shape[1]} heads, expected fp32",
        )
    return Type.contiguous((2, *alpha.shape), torch.float32)


@op(shape=_gates_shape, flops=lambda n: 6 * n.type.count)
def delta_gates(alpha: Tensor, dt: Tensor, a: Tensor, beta: Tensor | None = None) -> Tensor:
    """Return what each head keeps and writes, as `linear_attention` takes it: a step, which is
    softplus(alpha + dt), and sigmoid(beta) or, without beta, step

    alpha, beta [T, H], dt, a fp32 [H] -> fp32 [2, T, H]
    """
    step = F.softplus(alpha.float() + dt)
    return torch.stack((step * a, step if beta is None else torch.sigmoid(beta.float())))
