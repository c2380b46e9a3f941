"""Matrices whose values lie among the lanes of a warp, as "Matrix Fragments for mma" of the PTX ISA
draws them, and in shared memory, as "Shared Memory Matrix Layout" of wgmma does: where each value
lies, and products of them.
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


def eight_rows(registers: Array, transposed: bool) -> Array:
    """`stmatrix`: rows uint8 [warps, 8 count, 16] of registers uint32 [warps, 32, count]."""
    warps, _, count = registers.shape
    pairs = np.ascontiguousarray(registers.swapaxes(1, 2)).reshape(warps, count, 8, 4)
    matrices = pairs.view(np.uint16)
    if transposed:
        matrices = np.ascontiguousarray(matrices.swapaxes(2, 3))
    return matrices.view(np.uint8).reshape(warps, 8 * count, 16)


SWIZZLED = {0: 16, 1: 128, 2: 64, 3: 32}  # by a descriptor's mode: bytes of a row of eight


def pieces(descriptors: Array, count: int, along: bool) -> Array:
    """Addresses int64 [groups, pieces] of the runs of 16 bytes of matrices [count, 16] of 16-bit
    values that descriptors uint64 [groups] of one mode name. along: runs go along the 16, in the
    order [count, 2]; else along `count`, in the order [16, count / 8].
    """
    start, leading, stride = (
        (descriptors >> np.uint64(at) & np.uint64(0x3FFF)).astype(np.int64) * 16
        for at in (0, 16, 32)
    )
    width = SWIZZLED[int(descriptors[0] >> np.uint64(62))]
    of_eight, runs = width // 16, 2 if along else count // 8
    row, run = np.divmod(np.arange(runs * (count if along else 16)), runs)
    if width == 16 and along:
        outer, inner = run, row // 8  # by `leading`, by `stride`
    elif width == 16:
        outer, inner = row // 8, run
    else:
        outer, inner = run // of_eight, row // 8
    within = row % 8 * width + run % of_eight * 16
    at = within + outer * leading[:, None] + inner * stride[:, None] + start[:, None]
    return at ^ (at >> 7 & of_eight - 1) << 4


def matrices_of(runs: Array, count: int, along: bool) -> Array:
    """[groups, count, 16] of runs uint16 [groups, pieces, 8] in the order of `pieces`."""
    if along:
        return runs.reshape(len(runs), count, 16)
    return runs.reshape(len(runs), 16, count).swapaxes(1, 2)


def multiply_add_wide(a: Array, b: Array, c: Array | None) -> Array:
    """Fragments of A B^T + C [groups, 4 warps, 32, registers] of matrices A [groups, 64, 16] and B
    [groups, columns, 16] and of fragments of C: a warp has 16 rows, and of each eight columns what
    it has of a product of `mma`.
    """
    groups, columns, _ = b.shape
    products = a.reshape(groups, 4, 16, 16) @ b[:, None].swapaxes(2, 3)
    tiles = products.reshape(groups * 4, 16, columns // 8, 8).swapaxes(1, 2)
    result = spread(tiles.reshape(-1, 16, 8), 4).reshape(groups, 4, columns // 8, 32, 4)
    result = result.swapaxes(2, 3).reshape(groups, 4, 32, columns // 2)
    return result if c is None else result + c
