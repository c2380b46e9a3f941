"""Rotary turning as part of other kernels: what `rope` and `rms_norm` make of some columns of some
rows, without either in memory.
"""

# Triton's language is not Python's: its functions carry no types.
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

from __future__ import annotations

from mtmd.kernels.gpu.jit import tl, triton


@triton.jit
def turn(x, rows, there, c, angles, norm, scale, C: tl.constexpr):
    """Columns c of `rows` (places where rows of K values begin), fp32: times `scale` of each row
    and, with WEIGHT, the weights `norm` where NORM; then turned by the R cosines and R sines that
    lie at `angles` of each row. R = 0: not turned. PARTS and ADJACENT are the op's.
    """
    R: tl.constexpr = C.R
    inside = there[:, None] & (c < C.K)[None, :]
    values = tl.load(x + rows[:, None] + c[None, :], mask=inside, other=0).to(tl.float32)
    if C.NORM:
        values *= scale[:, None]
        if C.WEIGHT:
            values *= tl.load(norm + c, mask=c < C.K, other=0).to(tl.float32)[None, :]
    if R > 0:
        SHARE: tl.constexpr = R // C.PARTS
        i = c % (2 * SHARE)
        if C.ADJACENT:
            second = i % 2 == 1
            partner = c + tl.where(second, -1, 1)
            pair = c // (2 * SHARE) * SHARE + i // 2
        else:
            second = i >= SHARE
            partner = c + tl.where(second, -SHARE, SHARE)
            pair = c // (2 * SHARE) * SHARE + tl.where(second, i - SHARE, i)
        turns = inside & (c < 2 * R)[None, :]
        other = tl.load(x + rows[:, None] + partner[None, :], mask=turns, other=0).to(tl.float32)
        if C.NORM:
            other *= scale[:, None]
            if C.WEIGHT:
                other *= tl.load(norm + partner, mask=c < 2 * R, other=0).to(tl.float32)[None, :]
        cosine = tl.load(angles[:, None] + pair[None, :], mask=turns, other=1)
        sine = tl.load(angles[:, None] + (R + pair)[None, :], mask=turns, other=0)
        values = values * cosine + other * tl.where(second[None, :], sine, -sine)
    return values


@triton.jit
def squares(x, rows, there, c, K: tl.constexpr):
    """The sum of squares of columns c of rows, fp32."""
    inside = there[:, None] & (c < K)[None, :]
    values = tl.load(x + rows[:, None] + c[None, :], mask=inside, other=0).to(tl.float32)
    return tl.sum(values * values, 1)
