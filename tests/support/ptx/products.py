"""Matrices: how instructions bring them to the lanes of a warp and back, and multiply them, by a warp
(`mma`) or by four of them (`wgmma`).
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import numpy as np

from ptx import matrix
from ptx.instructions import (
    BITS,
    UNSIGNED,
    Array,
    Source,
    Step,
    bits_of,
    decode,
    target_of,
    value_of,
)
from ptx.program import Address, Immediate, Instruction

if TYPE_CHECKING:
    from ptx.machine import Lanes


def load_matrices(ins: Instruction) -> Step:
    """`ldmatrix` of matrices of 8 x 8 values of 16 bits."""
    words = list(ins.words[1:])
    transposed = "trans" in words
    if transposed:
        words.remove("trans")
    to, of = ins.operands
    targets = [target_of(ins, o) for o in (to if isinstance(to, tuple) else (to,))]
    count = len(targets)
    if words != ["sync", "aligned", "m8n8", f"x{count}", "shared", "b16"] or not isinstance(
        of, Address
    ):
        raise ins.refused()

    def step(lanes: Lanes) -> None:
        warps = lanes.active_warps()
        rows = lanes.load_rows(of, warps, 8 * count)
        registers = matrix.rows_of_eight(rows.reshape(-1, count, 8, 16), count, transposed)
        for place, target in enumerate(targets):
            lanes.write_some(target, registers[..., place].reshape(-1))

    return step


def store_matrices(ins: Instruction) -> Step:
    """`stmatrix` of matrices of 8 x 8 values of 16 bits."""
    words = list(ins.words[1:])
    transposed = "trans" in words
    if transposed:
        words.remove("trans")
    to, of = ins.operands
    sources = [bits_of(o, ins, 32) for o in (of if isinstance(of, tuple) else (of,))]
    form = ["sync", "aligned", "m8n8", f"x{len(sources)}", "shared", "b16"]
    if words != form or not isinstance(to, Address):
        raise ins.refused()

    def step(lanes: Lanes) -> None:
        warps = lanes.active_warps()
        registers = np.stack([source(lanes).reshape(-1, 32)[warps] for source in sources], 2)
        lanes.store_rows(to, matrix.eight_rows(registers, transposed))

    return step


PRODUCTS = {
    ("m16n8k16", "bf16"): (4, 2, "bf16"),
    ("m16n8k16", "f16"): (4, 2, "f16"),
    ("m16n8k8", "bf16"): (2, 1, "bf16"),
    ("m16n8k8", "f16"): (2, 1, "f16"),
    ("m16n8k8", "tf32"): (4, 2, "f32"),
}


def multiply_matrices(ins: Instruction) -> Step:
    """`mma.sync` with sums in fp32; of tf32 the lowest 13 bits are not looked at."""
    shape, kind = ins.words[3], ins.words[-2]
    if (
        ins.opcode != f"mma.sync.aligned.{shape}.row.col.f32.{kind}.{kind}.f32"
        or (shape, kind) not in PRODUCTS
    ):
        raise ins.refused()
    registers_a, registers_b, value_kind = PRODUCTS[shape, kind]
    d, a, b, c = (o if isinstance(o, tuple) else (o,) for o in ins.operands)
    if (len(d), len(a), len(b), len(c)) != (4, registers_a, registers_b, 4):
        raise ins.refused()
    targets = [target_of(ins, o) for o in d]
    left, right = ([bits_of(o, ins, 32) for o in part] for part in (a, b))
    added = [value_of(o, ins, "f32") for o in c]

    def values(lanes: Lanes, sources: list[Source], warps: Array) -> Array:
        bits = np.stack([source(lanes).reshape(-1, 32)[warps] for source in sources], 2)
        if kind == "tf32":
            bits = bits & np.uint32(0xFFFFE000)
        narrow = bits[..., None].view(UNSIGNED[BITS[value_kind]])
        return decode(value_kind, narrow).astype(np.float32)

    def step(lanes: Lanes) -> None:
        warps = lanes.active_warps()
        sums = np.stack([source(lanes).reshape(-1, 32)[warps] for source in added], 2)
        result = matrix.multiply_add(values(lanes, left, warps), values(lanes, right, warps), sums)
        for place, target in enumerate(targets):
            lanes.write_some(target, result[..., place].reshape(-1).view(np.uint32))

    return step


def multiply_by_groups(ins: Instruction) -> Step:
    """`wgmma`: products by four warps of 16-bit matrices with sums in fp32, and what orders them."""
    what, rest = ins.words[1], ins.words[2:]
    if what != "mma_async":
        if rest != ("sync", "aligned") or len(ins.operands) != (what == "wait_group"):
            raise ins.refused()
        if what == "wait_group" and isinstance(ins.operands[0], Immediate):
            remaining = ins.operands[0].bits
            return lambda lanes: lanes.wait_for_products(remaining)
        if what in ("fence", "commit_group"):
            fence = what == "fence"
            return lambda lanes: lanes.fence_products() if fence else lanes.commit_products()
        raise ins.refused()
    d, a, b, scale, *signs = ins.operands
    size, kind = re.fullmatch(r"m64n(\d+)k16", ins.words[4]), ins.words[-1]
    given = isinstance(a, tuple)
    orders = [o.bits for o in signs if isinstance(o, Immediate)]
    if (
        size is None
        or kind not in ("bf16", "f16")
        or ins.words[2:] != ("sync", "aligned", ins.words[4], "f32", kind, kind)
        or len(signs) != len(orders)
        or len(orders) != 4 - given
        or orders[:2] != [1, 1]
        or not isinstance(d, tuple)
        or len(d) * 2 != int(size[1])
    ):
        raise ins.refused()
    columns, targets, adds = int(size[1]), [target_of(ins, o) for o in d], bits_of(scale, ins, 1)
    parts = a if isinstance(a, tuple) else (a,)
    left, right = [bits_of(o, ins, 32 if given else 64) for o in parts], bits_of(b, ins, 64)
    factors = frozenset(target_of(ins, o).number for o in parts) if given else frozenset()

    def matrices(
        lanes: Lanes, source: Source, groups: Array, count: int, along: bool
    ) -> tuple[Array, Array]:
        """[groups, count, 16], and where they lie."""
        descriptors = lanes.of_groups(source(lanes), groups)
        modes = np.unique(descriptors >> np.uint64(49))
        if len(modes) > 1 or int(modes[0]) & 7:
            raise ins.refused("found a base offset, or several ways in which matrices lie")
        at = matrix.pieces(descriptors, count, along)
        runs = lanes.load_pieces(at, groups).view(np.uint16)
        values = decode(kind, np.ascontiguousarray(matrix.matrices_of(runs, count, along)))
        return values.astype(np.float32), at

    def step(lanes: Lanes) -> None:
        groups = lanes.active_groups()
        added = lanes.of_groups(adds(lanes), groups)
        if len(np.unique(added)) > 1:
            raise ins.refused("some groups add, and some do not")
        y, reads = matrices(lanes, right, groups, columns, orders[-1] == 0)
        if given:
            bits = np.stack([source(lanes).reshape(-1, 32) for source in left], 2)
            bits = bits.reshape(-1, 4, 32, len(left))[groups].reshape(-1, 32, len(left), 1)
            fragments = decode(kind, bits.view(np.uint16)).astype(np.float32)
            x = matrix.gather(fragments, "A", (16, 16)).reshape(-1, 64, 16)
        else:
            x, more = matrices(lanes, left[0], groups, 64, orders[2] == 0)
            reads = np.concatenate([reads, more], 1)
        lanes.multiply(x, y, targets, bool(added[0]), groups, reads, factors)

    return step


def fence(ins: Instruction) -> Step:
    if ins.opcode not in ("fence.proxy.async", "fence.proxy.async.shared::cta"):
        raise ins.refused()
    return lambda lanes: lanes.fence_proxy()
