"""Linear attention on the CPU: neighbours that decode one token go together, longer parts run by
chunks (see `_chunk_`), so that what is held beyond the result does not grow with their length.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import prod

import torch
from torch import Tensor

from mtmd.kernels.graph import Type
from mtmd.kernels.kernel import Kernel
from mtmd.kernels.ops.recurrent import spans

CHUNK = 64  # tokens of a chunk, as in flash-linear-attention
CACHE_BYTES = 1 << 20  # of a core's second cache, for the states of sequences that decode together


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
    """The `linear_attention` op: q, k [T, G, K], v [T, H, V], decay, beta [T, H], state
    [N, K, H, V] -> fp32 [T + S K, H, V]
    """
    tokens = v.shape[0]
    out = v.new_empty((tokens + slots.shape[0] * k.shape[2], *v.shape[1:]), dtype=torch.float32)
    states = out[tokens:].view(slots.shape[0], *state.shape[1:])
    parts = spans(starts)
    for i, j in _runs(parts, _together(state.shape)):
        start, stop = parts[i]
        torch.index_select(state, 0, slots[i:j], out=states[i:j])
        if stop - start == 1:
            run = slice(start, start + j - i)
            out[run] = _step_(
                states[i:j], q[run], k[run], v[run], decay[run], beta[run], scale, delta
            )
        else:
            for first in range(start, stop, CHUNK):
                part = slice(first, min(first + CHUNK, stop))
                out[part] = _chunk_(
                    states[i], q[part], k[part], v[part], decay[part], beta[part], scale, delta
                )
    return out


def _together(state: Sequence[int]) -> int:
    """Return how many sequences decode at once: as many as have their states in a core's cache
    while they are read and written, or one.
    """
    return max(1, CACHE_BYTES // max(prod(state[1:]) * 4, 1))


def _runs(parts: list[tuple[int, int]], maximum: int) -> Iterator[tuple[int, int]]:
    """First and last + 1 of sequences that go together: up to `maximum` of one token each, or one
    that is longer.
    """
    i = 0
    while i < len(parts):
        j = i + 1
        while (
            j < len(parts)
            and j - i < maximum
            and all(stop - start == 1 for start, stop in (parts[i], parts[j]))
        ):
            j += 1
        yield i, j
        i = j


def _step_(
    states: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    decay: Tensor,
    beta: Tensor,
    scale: float,
    delta: bool,
) -> Tensor:
    """One token of each sequence: o [S, H, V]; states [S, K, H, V] are overwritten by the next ones

    S^T q, and with `delta` S^T k, are read from the state before it decays, in one product: o =
    scale (e^decay S^T q + (k.q) u), u what k adds.
    """
    (count, groups, size), (heads, value) = q.shape, v.shape[1:]
    each = heads // groups
    both = torch.stack([k, q], 2).float()  # [S, G, 2, K]
    grouped = states.view(count, size, groups, each * value)
    reading = both if delta else both[:, :, 1:]
    read = (reading @ grouped.transpose(1, 2)).view(count, groups, -1, each, value)
    saved, b = decay.exp().view(count, groups, each, 1), beta.reshape(count, groups, each, 1)
    u = v.float().view(count, groups, each, value)
    u = b * (u - saved * read[:, :, 0]) if delta else b * u
    dots = (both[:, :, 0] * both[:, :, 1]).sum(-1)[..., None, None]
    states.mul_(saved.view(count, 1, heads, 1))
    grouped.addcmul_(
        both[:, :, 0].transpose(1, 2)[..., None], u.reshape(count, 1, groups, each * value)
    )
    return (scale * (saved * read[:, :, -1] + dots * u)).reshape(count, heads, value)


def _chunk_(
    state: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    decay: Tensor,
    beta: Tensor,
    scale: float,
    delta: bool,
) -> Tensor:
    """One chunk of c tokens of one sequence: o [c, H, V] in fp32; the state [K, H, V] is
    overwritten by that after the chunk

    With d_i the sum of decays up to token i and D_ij = exp(d_i - d_j) for j <= i, what token i adds
    to the state is k_i u_i^T, and the u_i solve a lower triangular system with ones on its diagonal
    (arXiv:2412.06464, section 3.3):

        u_i + beta_i sum_{j < i} D_ij (k_i.k_j) u_j = beta_i (v_i - exp(d_i) S^T k_i)
        o_i = scale (exp(d_i) S^T q_i + sum_{j <= i} D_ij (q_i.k_j) u_j)

        S <- exp(d_c) S + sum_j exp(d_c - d_j) k_j u_j^T

    Without `delta` u_i is beta_i v_i (arXiv:2405.21060, section 6).
    """
    (count, groups, size), (heads, value) = q.shape, v.shape[1:]
    each = heads // groups
    both = torch.cat([k, q]).float().transpose(0, 1)  # [G, 2 c, K]
    keys = both[:, :count]
    reading = both if delta else both[:, count:]  # the queries last
    dots = reading @ keys.transpose(1, 2)  # [G, 2 c, c]
    # The heads of a group lie side by side, so one product reads the states of them all.
    grouped = state.view(size, groups, each * value).transpose(0, 1)  # [G, K, H / G V]
    read = (reading @ grouped).view(groups, -1, count, each, value)
    read = read.transpose(2, 3)  # [G, 2, H / G, c, V]
    # Decays are summed in fp64: differences of large sums would lose fp32's digits.
    d = decay.t().double().cumsum(1).view(groups, each, count)
    # D: 0 above the diagonal before exp, which could overflow there, and after it.
    near = (d[..., None] - d[..., None, :]).float().tril().exp_().tril_()
    since, rest, whole = (
        d.float().exp()[..., None],
        (d[..., -1:] - d).float().exp()[..., None],
        d[..., -1].float().exp(),
    )
    b = beta.t().reshape(groups, each, count, 1)
    values = v.float().view(count, groups, each, value).permute(1, 2, 0, 3)  # [G, H / G, c, V]
    if delta:
        u = torch.linalg.solve_triangular(
            b * near * dots[:, None, :count],
            b * (values - since * read[:, 0]),
            upper=False,
            unitriangular=True,
        )
    else:
        u = b * values
    out: Tensor = scale * (since * read[:, -1] + (near * dots[:, None, -count:]) @ u)
    state.mul_(whole.view(heads, 1))
    grouped.baddbmm_(
        keys.transpose(1, 2), (rest * u).transpose(1, 2).reshape(groups, count, each * value)
    )
    return out.permute(2, 0, 1, 3).reshape(count, heads, value)


def workspace(
    q: Type,
    k: Type,  # noqa: ARG001
    v: Type,
    decay: Type,  # noqa: ARG001
    beta: Type,  # noqa: ARG001
    state: Type,
    starts: Type,  # noqa: ARG001
    slots: Type,
    *,
    scale: float,  # noqa: ARG001
    delta: bool = True,  # noqa: ARG001
) -> int:
    """Most bytes beyond the result; with several sequences, for the parts that take most."""
    (tokens, groups, size), (heads, value), count = q.shape, v.shape[1:], slots.shape[0]
    pooled = size * heads * value * 4
    # Per sequence that decodes: k and q, what both read, a few rows of values, and the product's
    # own copy of the states.
    together = min(count, _together(state.shape))
    copied = pooled if together > 1 and groups > 1 else 0
    step = together * (
        2 * groups * size * (4 + q.dtype.itemsize % 4) + 6 * heads * value * 4 + copied
    )
    if tokens == count:
        return step
    c = min(tokens, CHUNK)
    square, rows = heads * c * c * 4, c * heads * value * 4
    read = 2 * c * groups * size * 4 + 2 * groups * c * c * 4 + 2 * rows
    chunk = (
        read
        + max(3 * square + 2 * rows, square + 4 * rows)
        + heads * c * 20
        + (rows if v.dtype.itemsize != 4 else 0)
    )
    return chunk if count == 1 else max(chunk, step)


KERNEL = Kernel(linear_attention, workspace=workspace)
