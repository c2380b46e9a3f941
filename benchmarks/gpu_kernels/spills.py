"""What spills of the tiles that are chosen, counted in what the compiler makes for GPUs
that are not here.

    python benchmarks/gpu_kernels/spills.py [--target cuda:80 cuda:90] [--only matmul moe ...]
    python benchmarks/gpu_kernels/spills.py --only matmul --groups "matmul 16" "matmul 32"
    python benchmarks/gpu_kernels/spills.py --uses --target cuda:75 --fp16

Prints a line for each group of programs and target: how many there are, the most registers of a
thread, how many programs a multiprocessor holds at once, from the fewest to the most, and those
that spill, by bytes a thread, or that the compiler refuses. Ends with 1 if one does. Of products
and experts the groups are every type of weights by the rows of x, of w and of units that choose a
tile; of attention every head size; and all `USES` of the other kernels, or, with --uses, of every
kernel, with --fp16 in place of bf16. Not pairs of two types of experts.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import triton
from instructions import of_experts, of_rows

from mtmd.base.errors import PlacementError
from mtmd.kernels.gpu.compile import compile_program
from mtmd.kernels.gpu.flash_attention.cases import HEAD_SIZES
from mtmd.kernels.gpu.flash_attention.kernel import KERNEL as ATTENTION_KERNEL
from mtmd.kernels.gpu.quant_matmul.cases import KINDS
from mtmd.kernels.gpu.table import KERNELS
from mtmd.kernels.gpu.triton_kernel import Case, Program, node_of
from mtmd.kernels.graph import Type
from mtmd.kernels.kernel import types_of

# Rows of x, rows of w, values of a row: by eights of rows of x, rows of w of a program, its warps
# and units; then tiles.
PRODUCTS = (
    (1, 2048, 4096),
    (1, 4096, 4096),
    (1, 4096, 768),
    (1, 16384, 4096),
    (16, 4096, 4096),
    (16, 16384, 4096),
    (32, 4096, 4096),
    (32, 4096, 768),
    (64, 4096, 4096),
    (512, 4096, 4096),
)
IN_FP32 = ((1, 4096, 4096), (4, 4096, 4096), (16, 4096, 4096), (64, 4096, 4096))
GATED_ROWS = (1, 16, 32, 64, 512)
EXPERT_ROWS = (0, 6, 12, 32, 64)  # on average; 0: one token
# Of attention: tokens, query heads of four, and whether there are bounds.
ATTENTION = {"encoder": (4096, 4, False), "prefill": (2048, 8, True), "decoding": (1, 8, True)}
Result = tuple[str, str, Program]  # group, form, what is compiled


def products() -> Iterator[Result]:
    for sizes in PRODUCTS:
        for dtype in (torch.bfloat16, torch.float16):
            for kind in KINDS:
                yield f"matmul {_name(sizes, dtype)}", kind, of_rows(kind, *sizes, dtype)
    exact = torch.float32
    for sizes in IN_FP32:
        for kind in KINDS:
            yield f"matmul {_name(sizes, exact)}", kind, of_rows(kind, *sizes, exact)


def gated() -> Iterator[Result]:
    """Products with gate and up, and the gated unit."""
    for rows in GATED_ROWS:
        for kind in KINDS:
            made = of_rows(kind, rows, 28672, 4096, act="silu", gated=True)
            yield f"gated {_name((rows, 28672, 4096), torch.bfloat16)}", kind, made


def experts() -> Iterator[Result]:
    for rows in EXPERT_ROWS:
        for table in ("gate", "down"):
            for kind in KINDS:
                yield f"experts {table}, {rows or 'one token'}", kind, of_experts(kind, rows, table)


def attention() -> Iterator[Result]:
    for title, (rows, heads, limited) in ATTENTION.items():
        for dtype in (torch.bfloat16, torch.float16, torch.float32):
            for width in HEAD_SIZES:
                q, k = (
                    Type.contiguous((1, n, h, width), dtype) for n, h in ((rows, heads), (4096, 4))
                )
                bounds = Type.contiguous((rows, 2), torch.int32) if limited else None
                group = f"attention, {title}, {_short(dtype)}"
                first, *added = ATTENTION_KERNEL.launched(q, k, k, None, bounds, scale=1.0)
                yield group, f"head {width}", first
                for program in added:
                    yield "attention, parts added", f"head {width}", program


def uses(op: str, fp16: bool = False) -> Iterator[Result]:
    for entry in KERNELS[op]:
        kernel = entry.load()
        for title, use in kernel.uses.items():
            case = _in_fp16(use) if fp16 else use
            node = node_of(op, case)
            for program in kernel.launched(*types_of(node), **node.attrs):
                yield op, f"{title}, {program.function.__name__}", program


def _in_fp16(case: Case) -> Case:
    wide = (name for name, size in case.sizes if size == torch.bfloat16)
    return case.but(**dict.fromkeys(wide, torch.float16))


def _name(sizes: tuple[int, int, int], dtype: torch.dtype) -> str:
    rows, outer, width = sizes
    return f"{rows} by {outer:,} x {width:,}, {_short(dtype)}"


def _short(dtype: torch.dtype) -> str:
    return {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}[dtype]


def line_of(group: str, target: str, programs: Sequence[tuple[str, Program]]) -> tuple[str, bool]:
    """A line of the table, and whether nothing spills or is refused."""
    maximum, at_once, wrong = 0, list[int](), list[str]()
    for form, program in programs:
        try:
            used = compile_program(target, program)
        except PlacementError as error:
            wrong.append(f"{form} refused ({str(error).splitlines()[-1]:.120})")
            continue
        maximum = max(maximum, used.registers)
        at_once.append(used.at_once)
        if used.spill_bytes:
            wrong.append(f"{form} {used.spill_bytes}")
    stored = " to ".join(str(n) for n in sorted({min(at_once, default=0), max(at_once, default=0)}))
    cells = group, target, str(len(programs)), str(maximum), stored, ", ".join(wrong) or "0"
    return f"| {' | '.join(cells)} |", not wrong


GROUPS: dict[str, Any] = {
    "matmul": products,
    "matmul_gated": gated,
    "moe": experts,
    "attention": attention,
}


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0])
    parser.add_argument("--target", nargs="+", default=["cuda:80", "cuda:90"], help="(both)")
    parser.add_argument("--only", nargs="+", choices=list(KERNELS), help="ops (default: all)")
    parser.add_argument("--groups", nargs="+", default=[""], help="that begin so (default: all)")
    parser.add_argument("--uses", action="store_true", help="a group an op: its kernels' USES")
    parser.add_argument("--fp16", action="store_true", help="uses in fp16 in place of bf16")
    options = parser.parse_args(arguments)
    heads = "programs", "target", "how many", "registers", "at once", "spilled"
    print(f"Triton {triton.__version__}\n\n| {' | '.join(heads)} |\n|{'---|' * len(heads)}")
    right = True
    for op in options.only or KERNELS:
        result = uses(op, options.fp16)
        if op in GROUPS and not options.uses:
            result = GROUPS[op]()
        groups: dict[str, list[tuple[str, Program]]] = {}
        for group, form, program in result:
            if group.startswith(tuple(options.groups)):
                groups.setdefault(group, []).append((form, program))
        for group, programs in groups.items():
            for target in options.target:
                line, fits = line_of(group, target, programs)
                print(line, flush=True)
                right &= fits
    return int(not right)


if __name__ == "__main__":
    sys.exit(main())
