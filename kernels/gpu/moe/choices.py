"""Describes which choices (a token and one of its experts) a block of an expert's rows has."""

# Triton's language is not Python's: its functions carry no types.
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

from __future__ import annotations

from mtmd.kernels.gpu.gated import sigmoid
from mtmd.kernels.gpu.jit import tl, triton


@triton.jit
def block_of(p, block, E, C: tl.constexpr):
    """A block's expert, its first row among the ordered choices, and the row behind its last. It
    has none where experts had fewer choices than there might have been, or a token no expert.
    """
    if C.SINGLE:
        expert = tl.load(p.chosen + block)
        first = block
        end = block + (expert < E).to(tl.int32)
    else:
        expert = block * 0
        for step in tl.static_range(C.SEARCH):
            further = expert + (1 << (C.SEARCH - 1 - step))
            inside = further < E
            begin = tl.load(p.starts + further, mask=inside, other=0) // C.ROWS + further
            expert = tl.where(inside & (begin <= block), further, expert)
        begin = tl.load(p.starts + expert)
        first = begin + (block - begin // C.ROWS - expert) * C.ROWS
        end = tl.minimum(tl.load(p.starts + expert + 1), first + C.ROWS)
    return expert.to(tl.int64), first, end


@triton.jit
def choice_of(order, rows, there, SINGLE: tl.constexpr):
    """The choices of rows that are there; of others, one that is."""
    choice = rows
    if not SINGLE:
        choice = tl.load(order + rows, mask=there, other=0)
    return tl.where(there, choice, 0).to(tl.int64)


@triton.jit
def activated(g, u, ACT: tl.constexpr):
    if ACT == "silu":
        g *= sigmoid(g)
    elif ACT == "relu":
        g = tl.where(g < 0, 0.0, g)  # NaN stays
    else:
        g *= sigmoid(1.5957691216057308 * (g + 0.044715 * g * g * g))
    return g * u
