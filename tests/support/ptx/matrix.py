"""Matrices whose values lie among the lanes of a warp, as "Matrix Fragments for mma" of the PTX ISA
draws them: where each value of a fragment lies, and products of them.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.generic]
LANE = np.arange(32)
GROUP, IN_GROUP = LANE // 4, LANE % 4


def rows_and_columns(registers: int, values: int, shape: str) -> tuple[Array, Array]:
    """Rows and columns [32 lanes, registers, values of one] of a matrix: "A" [16, K], "B" [K, 8] or
    "C" [16, 8]. A register of A and B has `values` neighbours along K, which there are four lanes
    for; of C it has one.
    """
    lane, register, value = np.ix_(LANE, np.arange(registers), np.arange(values))
    group, within = lane // 4, lane % 4
    along = within * values + value
    if shape == "A":
        row, column = group + register % 2 * 8, along + register // 2 * 4 * values
    elif shape == "B":
        row, column = along + register * 4 * values, group
    else:
        row, column = group + register // 2 * 8, within * 2 + register % 2
    full = 32, registers, values
    return np.broadcast_to(row, full), np.broadcast_to(column, full)


def gather(fragments: Array, shape: str, size: tuple[int, int]) -> Array:
    """Matrices [warps, *size] of fragments [warps, 32, registers, values]."""
    result = np.empty((len(fragments), *size), fragments.dtype)
    row, column = rows_and_columns(*fragments.shape[2:], shape)
    result[:, row, column] = fragments
    return result


def spread(matrices: Array, registers: int) -> Array:
    """Fragments [warps, 32, registers] of results [warps, 16, 8]."""
    row, column = rows_and_columns(registers, 1, "C")
    return matrices[:, row, column][..., 0]


def multiply_add(a: Array, b: Array, c: Array) -> Array:
    """Fragments of A B + C [warps, 32, 4], of those of A, B [warps, 32, registers, values] and of C
    [warps, 32, 4], in fp32. Hardware may add in another order, and cut what does not fit.
    """
    depth = a.shape[2] // 2 * a.shape[3] * 4
    left, right = gather(a, "A", (16, depth)), gather(b, "B", (depth, 8))
    return spread(left @ right + gather(c[..., None], "C", (16, 8)), 4)


def rows_of_eight(rows: Array, count: int, transposed: bool) -> Array:
    """`ldmatrix`: registers uint32 [warps, 32, count] of rows uint8 [warps, count, 8, 16] of `count`
    matrices of 8 x 8 values of 16 bits.
    """
    matrices = rows.reshape(*rows.shape[:3], 16).view(np.uint16)
    if transposed:
        matrices = np.ascontiguousarray(matrices.swapaxes(2, 3))
    pairs = matrices.view(
        np.uint32
    )  # [warps, count, 8, 4]: row and pair are the lane's group and place
    return pairs.reshape(len(rows), count, 32).swapaxes(1, 2)
