"""Which choices (a token and one of its experts) a block of an expert's rows has."""

# Triton's language is not Python's: its functions carry no types.
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

from __future__ import annotations

from mtmd.kernels.gpu.gated import sigmoid
from mtmd.kernels.gpu.jit import tl, triton


@triton.jit
def block_of(
    chosen, starts, block, E, SINGLE: tl.constexpr, SEARCH: tl.constexpr, ROWS: tl.constexpr
):
    """A block's expert, its first row among the ordered choices, and the row behind its last. It
    has none where experts had fewer choices than there might have been.
    """
    if SINGLE:
        expert = tl.load(chosen + block)
        first = block
        end = block + 1
    else:
        expert = block * 0
        for step in tl.static_range(SEARCH):
            further = expert + (1 << (SEARCH - 1 - step))
            inside = further < E
            begin = tl.load(starts + further, mask=inside, other=0) // ROWS + further
            expert = tl.where(inside & (begin <= block), further, expert)
        begin = tl.load(starts + expert)
        first = begin + (block - begin // ROWS - expert) * ROWS
        end = tl.minimum(tl.load(starts + expert + 1), first + ROWS)
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
    else:
        g *= sigmoid(1.5957691216057308 * (g + 0.044715 * g * g * g))
    return g * u
