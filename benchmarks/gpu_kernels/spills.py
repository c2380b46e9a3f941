"""What spills of the tiles that are chosen, counted in what the compiler makes for GPUs
that are not here.

    python benchmarks/gpu_kernels/spills.py [--target cuda:80 cuda:90] [--only matmul moe ...]
    python benchmarks/gpu_kernels/spills.py --only matmul --groups "matmul 16" "matmul 32"

Prints a line for each group of programs and target: how many there are, the most registers of a
thread, and those that spill, by bytes a thread. Ends with 1 if one does. Of products and experts
the groups are every type of weights by the rows of x, of w and of units that choose a tile; of
attention every head size; and all `USES` of the other kernels. Not pairs of two types of experts.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from typing import Any

import torch
import triton
from instructions import of_experts, of_rows

from mtmd.kernels.gpu.compile import compile_program
from mtmd.kernels.gpu.flash_attention.cases import HEAD_SIZES
from mtmd.kernels.gpu.flash_attention.kernel import combine_program
from mtmd.kernels.gpu.flash_attention.kernel import program as attention_program
from mtmd.kernels.gpu.quant_matmul.cases import KINDS
from mtmd.kernels.gpu.table import KERNELS
from mtmd.kernels.gpu.triton_kernel import Program, node_of
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
EXPERT_ROWS = (0, 6, 12, 32, 64)  # on average; 0: one token
# Of attention: tokens, query heads of four, and whether there are bounds.
ATTENTION = {"encoder": (4096, 4, False), "prefill": (2048, 8, True), "decoding": (1, 8, True)}
Found = tuple[str, str, Program]  # group, form, what is compiled


def products() -> Iterator[Found]:
    for sizes in PRODUCTS:
        for dtype in (torch.bfloat16, torch.float16):
            for kind in KINDS:
                yield f"matmul {_name(sizes, dtype)}", kind, of_rows(kind, *sizes, dtype)
    exact = torch.float32
    for sizes in IN_FP32:
        for kind in KINDS:
            yield f"matmul {_name(sizes, exact)}", kind, of_rows(kind, *sizes, exact)


def experts() -> Iterator[Found]:
    for rows in EXPERT_ROWS:
        for table in ("gate", "down"):
            for kind in KINDS:
                yield f"experts {table}, {rows or 'one token'}", kind, of_experts(kind, rows, table)


def attention() -> Iterator[Found]:
    for title, (rows, heads, limited) in ATTENTION.items():
        for dtype in (torch.bfloat16, torch.float16, torch.float32):
            for width in HEAD_SIZES:
                q, k = (
                    Type.contiguous((1, n, h, width), dtype) for n, h in ((rows, heads), (4096, 4))
                )
                bounds = Type.contiguous((rows, 2), torch.int32) if limited else None
                types = {"q": q, "k": k, "v": k, "bounds": bounds}
                group = f"attention, {title}, {_short(dtype)}"
                yield group, f"head {width}", attention_program(**types, scale=1.0)
                if title == "decoding":
                    del types["bounds"]
                    added = combine_program(**types, scale=1.0)
                    yield "attention, parts added", f"head {width}", added


def uses(op: str) -> Iterator[Found]:
    for entry in KERNELS[op]:
        kernel = entry.load()
        for title, case in kernel.uses.items():
            node = node_of(op, case)
            for program in kernel.launched(*types_of(node), **node.attrs):
                yield op, f"{title}, {program.function.__name__}", program


def _name(sizes: tuple[int, int, int], dtype: torch.dtype) -> str:
    rows, outer, width = sizes
    return f"{rows} by {outer:,} x {width:,}, {_short(dtype)}"


def _short(dtype: torch.dtype) -> str:
    return {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}[dtype]


GROUPS: dict[str, Any] = {"matmul": products, "moe": experts, "attention": attention}


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0])
    parser.add_argument("--target", nargs="+", default=["cuda:80", "cuda:90"], help="(both)")
    parser.add_argument("--only", nargs="+", choices=list(KERNELS), help="ops (default: all)")
    parser.add_argument("--groups", nargs="+", default=[""], help="that begin so (default: all)")
    options = parser.parse_args(arguments)
    print(f"Triton {triton.__version__}\n\n| programs | target | how many | registers | spilled |")
    print("|---|---|---|---|---|")
    spilled = False
    for op in options.only or KERNELS:
        groups: dict[str, list[tuple[str, Program]]] = {}
        for group, form, program in GROUPS[op]() if op in GROUPS else uses(op):
            if group.startswith(tuple(options.groups)):
                groups.setdefault(group, []).append((form, program))
        for group, programs in groups.items():
            for target in options.target:
                used = {form: compile_program(target, program) for form, program in programs}
                wrong = {form: u.spill_bytes for form, u in used.items() if u.spill_bytes}
                spilled |= bool(wrong)
                most = max(u.registers for u in used.values())
                said = ", ".join(f"{form} {size}" for form, size in wrong.items()) or "0"
                print(f"| {group} | {target} | {len(used)} | {most} | {said} |", flush=True)
    return int(spilled)


if __name__ == "__main__":
    sys.exit(main())
