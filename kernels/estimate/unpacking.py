"""Cost of unpacking quantized weights: the instructions of the kernels that multiply by them, as
counted in what the compiler makes of those kernels.

A kernel with R rows of x unpacks every weight once for each R rows that there are, so many rows are
bound by that sooner than by memory. Of experts the blocks of rows are counted that an even router
would fill, as the op's traffic is.
"""

from __future__ import annotations

from typing import NamedTuple

from mtmd.kernels.gpu.launch import Call
from mtmd.kernels.gpu.moe.cases import PLAIN
from mtmd.kernels.gpu.quant_matmul.cases import IN_DETAIL, OTHERS
from mtmd.kernels.gpu.triton_kernel import Program, TritonKernel
from mtmd.kernels.graph import Node
from mtmd.kernels.kernel import types_of

UNPACKS = ("matmul", "matmul_gated", "matmul_gelu", "moe")  # ops that take quantized weights

# Cycles of a thread for a weight, where a multiprocessor has 128 threads in a cycle, by kernel and
# its rows of x, and by type of block: `python benchmarks/gpu_kernels/instructions.py --all`.
_COUNTED = {
    ("operand_kernel", 8): (6.1, 7.5, 4.8, 6.2, 3.8, 4.2, 5.5, 5.8, 5.8, 6.6, 6.0, 5.6),
    ("operand_kernel", 16): (6.2, 7.2, 5.3, 6.9, 4.2, 4.9, 6.1, 6.1, 6.4, 7.2, 6.4, 6.0),
    ("operand_kernel", 32): (7.3, 8.0, 6.7, 8.6, 5.9, 7.0, 7.9, 7.3, 8.4, 9.2, 8.2, 8.2),
    ("tile_kernel", 64): (6.8, 6.9, 6.3, 8.3, 5.2, 4.7, 6.1, 6.6, 6.3, 7.4, 7.8, 5.8),
    ("tile_kernel", 128): (8.3, 8.7, 8.0, 9.9, 6.7, 6.2, 7.9, 8.1, 7.8, 9.3, 9.5, 7.3),
    ("few_gated_kernel", 8): (5.9, 6.8, 4.4, 5.8, 3.7, 3.7, 5.2, 5.4, 5.4, 6.3, 5.4, 5.2),
    ("few_gated_kernel", 16): (6.2, 7.2, 5.3, 6.8, 4.3, 4.9, 6.1, 6.2, 6.5, 7.7, 6.3, 6.4),
    ("few_gated_kernel", 32): (7.4, 8.1, 7.8, 8.5, 6.0, 7.0, 7.9, 7.5, 8.5, 8.9, 8.4, 8.3),
    ("gated_kernel", 64): (7.5, 7.8, 7.0, 8.5, 6.0, 5.5, 6.9, 7.4, 7.1, 9.0, 8.3, 6.8),
    ("few_down_kernel", 8): (5.9, 6.8, 4.4, 5.9, 3.9, 4.3, 5.2, 5.7, 5.7, 6.5, 5.5, 5.8),
    ("few_down_kernel", 16): (6.6, 7.6, 5.5, 6.6, 4.4, 5.2, 6.5, 6.2, 6.5, 7.5, 6.5, 6.7),
    ("few_down_kernel", 32): (7.3, 7.9, 6.8, 9.1, 6.0, 7.1, 8.0, 7.6, 8.4, 9.7, 8.4, 8.3),
    ("down_kernel", 64): (7.0, 7.5, 6.9, 8.2, 5.5, 5.3, 7.0, 7.0, 7.3, 8.4, 7.8, 6.4),
}
# The same of the other types, of products alone.
_OTHERS_COUNTED = {
    ("operand_kernel", 8): (
        5.0,
        6.1,
        6.3,
        7.4,
        13.6,
        11.1,
        13.3,
        13.5,
        13.1,
        11.9,
        11.7,
        8.4,
        7.4,
        9.1,
        7.8,
        7.2,
        9.1,
        2.9,
        4.4,
        5.3,
        7.4,
    ),
    ("operand_kernel", 16): (
        5.2,
        7.0,
        6.2,
        7.2,
        13.2,
        11.0,
        13.3,
        12.0,
        13.2,
        13.1,
        12.7,
        9.1,
        7.2,
        9.8,
        8.6,
        7.2,
        8.6,
        3.1,
        5.1,
        5.5,
        7.6,
    ),
    ("operand_kernel", 32): (
        7.2,
        9.5,
        7.5,
        7.7,
        16.3,
        13.9,
        16.0,
        13.7,
        15.2,
        16.5,
        16.7,
        10.8,
        7.7,
        11.5,
        10.3,
        10.3,
        10.7,
        4.3,
        7.3,
        7.6,
        9.8,
    ),
    ("tile_kernel", 64): (
        4.8,
        5.1,
        6.4,
        6.4,
        17.5,
        15.7,
        17.8,
        16.2,
        17.2,
        15.5,
        14.1,
        11.0,
        6.4,
        11.5,
        11.6,
        10.8,
        14.7,
        5.0,
        4.8,
        4.8,
        5.3,
    ),
    ("tile_kernel", 128): (
        6.4,
        6.6,
        7.9,
        8.1,
        18.8,
        17.0,
        19.1,
        18.4,
        18.7,
        16.9,
        15.8,
        11.8,
        8.1,
        13.5,
        12.7,
        12.6,
        16.3,
        6.6,
        6.3,
        6.5,
        6.9,
    ),
}
# By which product experts of those take as long: of the types above they differ by some percent.
_AS_PRODUCTS = {
    "few_gated_kernel": "operand_kernel",
    "gated_kernel": "tile_kernel",
    "few_down_kernel": "operand_kernel",
    "down_kernel": "tile_kernel",
}


def _cycles(name: str, rows: int) -> dict[str, float]:
    counted = dict(zip(IN_DETAIL, _COUNTED[name, rows], strict=True))
    others = _OTHERS_COUNTED[_AS_PRODUCTS.get(name, name), rows]
    return counted | dict(zip(OTHERS, others, strict=True))


CYCLES = {form: _cycles(*form) for form in _COUNTED}


class Unpacking(NamedTuple):
    """Cost of unpacking in one kernel: cycles of all its threads, and programs that have something
    to do.
    """

    cycles: float
    programs: int


def unpacking(node: Node, kernel: TritonKernel) -> tuple[Unpacking, ...]:
    """Return the costs for the kernels that run a node; none where its weights are plain numbers,
    or x is fp32, for which none were counted.
    """
    if node.op not in UNPACKS or node.type.dtype.itemsize > 2:
        return ()
    launched = kernel.launched(*types_of(node), **node.attrs)
    return tuple(u for program in launched if (u := _of(node, program)) is not None)


def form_of(program: Program) -> tuple[str, int]:
    """The kernel, and the rows of x in a block."""
    sizes = program.call.constants
    rows = sizes.get("ROWS") or sizes.get("FEW") or 8 * int(sizes.get("EIGHTS", 0))
    return program.function.__name__, int(rows)


def _of(node: Node, program: Program) -> Unpacking | None:
    call = program.call
    result = (call.constants.get(name, PLAIN) for name in ("QUANT", "GATE", "UP", "DOWN"))
    kinds = [str(kind) for kind in result if kind != PLAIN]
    if not kinds or (form := form_of(program)) not in CYCLES:
        return None
    programs = _filled(node, call) if node.op == "moe" else call.programs
    weights = programs * int(call.constants["COLUMNS"]) * int(call.scalars["K"])
    return Unpacking(weights * sum(CYCLES[form][kind] for kind in kinds), programs)


def _filled(node: Node, call: Call) -> int:
    """Programs of experts that have rows: others, of which a launch has some, end at once."""
    blocks = int(call.scalars["blocks"])
    each = call.programs // blocks
    if call.constants["SINGLE"]:
        return call.programs
    x, _, gate = node.inputs[:3]
    assert x is not None and gate is not None
    experts, top_k = gate.shape[0], int(node.attrs["routing"].top_k)
    choices = x.shape[0] * top_k
    used: float = experts * (1 - (1 - top_k / experts) ** x.shape[0])
    rows = int(call.constants["ROWS"])
    return min(blocks, round(used * -(-choices // (round(used) * rows)))) * each
