"""Instructions that products of few rows with quantized weights take, counted in what the compiler
makes for an NVIDIA GPU; no GPU is needed.

    python benchmarks/gpu_kernels/instructions.py [--target cuda:90] [--clock 1.755] [KIND ...]

Prints a table: instructions of a thread for each weight, in the loop over a row of 4,096; cycles
that a part of a multiprocessor needs for a warp's at least, where some kinds take more than one;
and what that allows of memory traffic at most, if no other bound is lower. Reads machine code with
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

WIDTH = OUTER = 4096
LABEL = re.compile(r"\s*(\.L_\w+):")
CODE = re.compile(r"\s*/\*[0-9a-f]+\*/\s+(.*?);")
JUMP = re.compile(r"\bBRA\b.*?`\((\.L_\w+)\)")
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
    parser.add_argument("--clock", type=float, default=1.755, help="GHz (%(default)s)")
    parser.add_argument("--multiprocessors", type=int, default=132, help="(%(default)s: H200)")
    parser.add_argument("--json", action="store_true", help="a line of JSON for each")
    options = parser.parse_args(arguments)
    from mtmd.kernels.gpu.quant_matmul.cases import KINDS

    if wrong := [kind for kind in options.kinds if kind not in KINDS]:
        print(f"{wrong[0]}: expected one of {', '.join(KINDS)}", file=sys.stderr)
        return 2
    rate = options.clock * options.multiprocessors * PARTS * WARP  # threads' cycles in a nanosecond
    if not options.json:
        print("| weight | rows of x | instructions a weight | cycles | TB/s at most |")
        print("|---|---|---|---|---|")
    for kind in options.kinds or KINDS:
        for found in counted(kind, options.rows, options.target):
            each = found["instructions"] / found["weights"]
            cycles = found["cycles"] / found["weights"]
            rest = rate / cycles * found["bytes_per_weight"] / 1000
            print(
                json.dumps(found)
                if options.json
                else f"| {kind} | {found['rows']} | {each:.1f} | {cycles:.1f} | {rest:.1f} |",
                flush=True,
            )
    return 0


def counted(kind: str, rows: list[int], target: str) -> Iterator[dict[str, Any]]:
    """Of the loop over K: a thread's instructions, and the weights that it multiplies by them."""
    import torch

    from mtmd.kernels.gpu.compile import compiled_for
    from mtmd.kernels.gpu.quant_matmul.kernel import program
    from mtmd.kernels.gpu.quant_matmul.operands import UNIT_VALUES
    from mtmd.kernels.graph import Type
    from mtmd.kernels.quantization.blocks import row_bytes

    size = row_bytes(kind, WIDTH)
    for count in rows:
        x = Type.contiguous((count, WIDTH), torch.bfloat16)
        made = program(x, Type.contiguous((OUTER, size), torch.uint8), quant=kind)
        body = longest_loop(disassembled(compiled_for(target, made).asm["cubin"]))
        chosen = made.call.constants
        values = UNIT_VALUES[kind] if "EIGHTS" in chosen else 32
        weights = int(chosen["COLUMNS"]) * int(chosen["COUNT"]) * values
        yield {
            "kind": kind,
            "rows": count,
            "instructions": len(body),
            "cycles": cycles(body),
            "weights": weights / (made.call.warps * WARP),
            "bytes_per_weight": size / WIDTH,
        }


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
