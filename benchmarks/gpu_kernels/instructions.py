"""Instructions that products of few rows with quantized weights take, counted in what the compiler
makes for an NVIDIA GPU; no GPU is needed.

    python benchmarks/gpu_kernels/instructions.py [--target cuda:90] [--clock 1.755] [KIND ...]
    python benchmarks/gpu_kernels/instructions.py --experts gate [--rows 1 4] [KIND ...]
    python benchmarks/gpu_kernels/instructions.py --all     # for kernels/estimate/unpacking.py

Prints a table: instructions of a thread for each weight, in the loop over a row of 4,096; with
--experts, over one of an expert's tables, of 128 experts of 768 units of 2,048 values of which each
token chooses 8 (Qwen3-30B-A3B), of `gate` and `up` or of `down`, by an expert's rows of x on
average. And cycles
that a part of a multiprocessor needs for a warp's at least, where some kinds take more than one;
and what that allows of memory traffic at most, if no other bound is lower. --all prints the cycles
of every kernel, by its rows of x in a block, as the estimate has them, of some types of products
alone. Reads machine code with
nvdisasm, which Triton brings.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mtmd.kernels.ops.moe import Routing

WIDTH = OUTER = 4096
EXPERTS, CHOSEN, EXPERT_WIDTH, EXPERT_UNITS = 128, 8, 2048, 768
LABEL = re.compile(r"\s*(\.L_\w+):")
CODE = re.compile(r"\s*/\*[0-9a-f]+\*/\s+(.*?);")
JUMP = re.compile(r"\bBRA\b.*?`\((\.L_\w+)\)")
# Rows of x, of a product and of an expert, that take each kernel and each of its tiles
ROWS = {None: (8, 16, 32, 64, 512), "gate": (6, 12, 32, 64), "down": (6, 12, 32, 64)}
PARTS = 4  # of a multiprocessor, with a warp's instruction a cycle each
WARP = 32
# Kinds of which a part takes one only every so many cycles (CUDA C++ Programming Guide, throughput
# of native arithmetic instructions, compute capability 9.0: 64, 32 and 16 results a cycle).
SLOW = {
    "LOP3 SHF PRMT IADD3 VIADD LEA SEL ISETP IMNMX SGXT BMSK FSEL FSETP FMNMX PLOP3": 2,
    "IMAD": 2,
    "LDG LDS STS STG LDSM STSM SHFL": 4,
    "I2F I2FP F2I": 8,
}


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0])
    parser.add_argument("kinds", nargs="*", metavar="KIND", help="block types (default: all)")
    parser.add_argument("--target", default="cuda:90", help="which GPU (%(default)s)")
    parser.add_argument(
        "--rows", type=int, nargs="+", default=[1, 4, 8, 16], help="of x (1 4 8 16)"
    )
    parser.add_argument("--experts", choices=["gate", "down"], help="count products of experts")
    parser.add_argument("--clock", type=float, default=1.755, help="GHz (%(default)s)")
    parser.add_argument("--multiprocessors", type=int, default=132, help="(%(default)s: H200)")
    parser.add_argument("--all", action="store_true", help="cycles, by kernel, of all types")
    parser.add_argument("--json", action="store_true", help="a line of JSON for each")
    options = parser.parse_args(arguments)
    from mtmd.kernels.gpu.quant_matmul.cases import KINDS

    if wrong := [kind for kind in options.kinds if kind not in KINDS]:
        print(f"{wrong[0]}: expected one of {', '.join(KINDS)}", file=sys.stderr)
        return 2
    if options.all:
        print_all(options.target)
        return 0
    rate = options.clock * options.multiprocessors * PARTS * WARP  # threads' cycles in a nanosecond
    if not options.json:
        print("| weight | rows of x | instructions a weight | cycles | TB/s at most |")
        print("|---|---|---|---|---|")
    for kind in options.kinds or KINDS:
        for result in counted(kind, options.rows, options.target, options.experts):
            each = result["instructions"] / result["weights"]
            cycles = result["cycles"] / result["weights"]
            rest = rate / cycles * result["bytes_per_weight"] / 1000
            print(
                json.dumps(result)
                if options.json
                else f"| {kind} | {result['rows']} | {each:.1f} | {cycles:.1f} | {rest:.1f} |",
                flush=True,
            )
    return 0


def print_all(target: str) -> None:
    from mtmd.kernels.estimate.unpacking import form_of
    from mtmd.kernels.gpu.quant_matmul.cases import IN_DETAIL, OTHERS

    for kinds in (IN_DETAIL, OTHERS):
        for experts, all_rows in ROWS.items():
            if experts and kinds == OTHERS:
                break
            for rows in all_rows:
                made = of_experts(kinds[0], rows, experts) if experts else of_rows(kinds[0], rows)
                result = [next(counted(kind, [rows], target, experts)) for kind in kinds]
                values = (f"{f['cycles'] / f['weights']:.1f}" for f in result)
                name, block = form_of(made)
                print(f'    ("{name}", {block}): ({", ".join(values)}),', flush=True)


def counted(
    kind: str, rows: list[int], target: str, experts: str | None = None
) -> Iterator[dict[str, Any]]:
    """Of the loop over K: a thread's instructions, and the weights that it multiplies by them."""
    from mtmd.kernels.gpu.compile import compiled_for
    from mtmd.kernels.gpu.quant_matmul.operands import UNIT_VALUES
    from mtmd.kernels.quantization.blocks import row_bytes

    for count in rows:
        made = of_experts(kind, count, experts) if experts else of_rows(kind, count)
        body = longest_loop(disassembled(compiled_for(target, made).asm["cubin"]))
        chosen = made.call.constants
        values = UNIT_VALUES[kind] if "units" in made.call.scalars else 32
        weights = int(chosen["COLUMNS"]) * int(chosen["COUNT"]) * values
        yield {
            "kind": kind,
            "rows": count,
            "instructions": len(body),
            "cycles": cycles(body),
            "weights": weights * (2 if experts == "gate" else 1) / (made.call.warps * WARP),
            "bytes_per_weight": row_bytes(kind, WIDTH) / WIDTH,
        }


def of_rows(
    kind: str, rows: int, outer: int = OUTER, width: int = WIDTH, dtype: Any = None, **options: Any
) -> Any:
    """The program of a product of so many rows of x, in bf16 or a type given, and of w. `options`:
    what is made of it.
    """
    import torch

    from mtmd.kernels.gpu.quant_matmul.kernel import KERNEL
    from mtmd.kernels.graph import Type
    from mtmd.kernels.quantization.blocks import row_bytes

    x = Type.contiguous((rows, width), dtype or torch.bfloat16)
    w = Type.contiguous((outer, row_bytes(kind, width)), torch.uint8)
    return KERNEL.main(x, w, quant=kind, **options)


def of_experts(kind: str, rows: int, table: str) -> Any:
    """The program of products with experts of as many tokens as each has so many rows of on
    average; 0 rows: of one token.
    """
    import torch

    from mtmd.kernels.gpu.moe.kernel import KERNEL
    from mtmd.kernels.graph import Type
    from mtmd.kernels.quantization.blocks import row_bytes

    tokens = max(1, rows * EXPERTS // CHOSEN)
    x, router = (
        Type.contiguous((tokens, width), torch.bfloat16) for width in (EXPERT_WIDTH, EXPERTS)
    )
    up, down = (
        Type.contiguous((EXPERTS, outer, row_bytes(kind, inner)), torch.uint8)
        for outer, inner in ((EXPERT_UNITS, EXPERT_WIDTH), (EXPERT_WIDTH, EXPERT_UNITS))
    )
    quants = dict.fromkeys(("gate_quant", "up_quant", "down_quant"), kind)
    made = KERNEL.launched(
        x, router, up, up, down, routing=Routing(CHOSEN, normalize=True), **quants
    )
    return next(p for p in made if f"{table}_step" in p.call.scalars)


def cycles(body: list[str]) -> int:
    """That a part of a multiprocessor needs for a warp at least: of all, or of one kind."""
    names = [code.split()[code.startswith("@")].partition(".")[0] for code in body]
    slow = (each * sum(n in kind.split() for n in names) for kind, each in SLOW.items())
    return max(len(body), *slow)


def disassembled(cubin: bytes) -> str:
    import triton

    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "nvdisasm"
    with tempfile.TemporaryDirectory() as folder:
        (file := Path(folder) / "kernel.cubin").write_bytes(cubin)
        return subprocess.run([tool, "-c", file], capture_output=True, text=True, check=True).stdout


def longest_loop(text: str) -> list[str]:
    """The instructions between a label and the farthest jump back to one, both among them."""
    codes, labels, best = list[str](), dict[str, int](), list[str]()
    for line in text.splitlines():
        if label := LABEL.match(line):
            labels[label[1]] = len(codes)
        elif code := CODE.match(line):
            codes.append(code[1])
    for end, code in enumerate(codes):
        jump = JUMP.search(code)
        begin = labels.get(jump[1], end) if jump else end
        if end - begin > len(best):
            best = codes[begin : end + 1]
    return best


if __name__ == "__main__":
    sys.exit(main())
