"""How often a warp waits for weights in products of few rows with quantized weights, and how much
is under way while it does, read in what the compiler makes for an NVIDIA GPU; no GPU is needed.

    python benchmarks/gpu_kernels/waits.py [--rows 1 16] [--outer 4096] [KIND ...]

Prints a table, for a weight of so many rows of 4,096: instructions of a thread for each weight,
registers, the warps that a multiprocessor has at once (as registers are left, and as there are
programs for), how often each waits for what it reads of w, and KiB of the weight that are under way
on a multiprocessor when all of its warps wait. A wait is an instruction that needs a register which
a load from w has yet to fill; what was loaded before is there with it. To read 4.8 TB/s with a
latency of 700 ns takes 25 KiB on each of 132 multiprocessors.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Iterator

from instructions import CODE, JUMP, LABEL, WARP, WIDTH, disassembled

TARGET = "cuda:90"
W_POINTER = ("c[0x0][0x218]", "c[0x0][0x21c]")  # the second argument, where compute capability is 9
REGISTERS, WARPS, MULTIPROCESSORS = 65536, 64, 132
REGISTER = re.compile(r"\bU?R\d+\b")
SOURCE = re.compile(r"\bU?R\d+\b|c\[0x0\]\[0x[0-9a-f]+\]")


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0])
    parser.add_argument("kinds", nargs="*", metavar="KIND", help="block types (default: all)")
    parser.add_argument("--rows", type=int, nargs="+", default=[1], help="of x (1)")
    parser.add_argument("--outer", type=int, default=4096, help="rows of w (%(default)s)")
    options = parser.parse_args(arguments)
    from mtmd.kernels.gpu.quant_matmul.cases import KINDS

    if wrong := [kind for kind in options.kinds if kind not in KINDS]:
        print(f"{wrong[0]}: expected one of {', '.join(KINDS)}", file=sys.stderr)
        return 2
    print("| weight | rows of x | instructions a weight | registers | warps | waits | KiB |")
    print("|---|---|---|---|---|---|---|")
    for kind in options.kinds or KINDS:
        for rows in options.rows:
            print(row(kind, rows, options.outer), flush=True)
    return 0


def row(kind: str, rows: int, outer: int) -> str:
    import torch

    from mtmd.kernels.gpu.compile import compile_program, compiled_for
    from mtmd.kernels.gpu.quant_matmul.kernel import KERNEL
    from mtmd.kernels.gpu.quant_matmul.operands import UNIT_VALUES
    from mtmd.kernels.graph import Type
    from mtmd.kernels.quantization.blocks import row_bytes

    x = Type.contiguous((rows, WIDTH), torch.bfloat16)
    w = Type.contiguous((outer, row_bytes(kind, WIDTH)), torch.uint8)
    made = KERNEL.main(x, w, quant=kind)
    call, used = made.call, compile_program(TARGET, made)
    codes, begin, end = listing(disassembled(compiled_for(TARGET, made).asm["cubin"]))
    at_once = int(call.constants["COLUMNS"]) * int(call.constants["COUNT"]) * UNIT_VALUES[kind]
    steps = -(-int(call.scalars["units"]) // int(call.constants["COUNT"]))
    each = waits(codes, begin, end)
    rounded = -(-used.registers // 8) * 8 * WARP * call.warps
    programs = min(REGISTERS // rounded, WARPS // call.warps, call.programs / MULTIPROCESSORS)
    warps = max(programs, 1) * call.warps
    read = at_once * row_bytes(kind, WIDTH) / WIDTH / call.warps / max(each, 1)
    return (
        f"| {kind} | {rows} | {(end + 1 - begin) / at_once * call.warps * WARP:.1f} | "
        f"{used.registers} | {warps:.0f} | {each * steps} | {warps * read / 1024:.1f} |"
    )


def listing(text: str) -> tuple[list[str], int, int]:
    """The instructions, and the first and last of the longest loop."""
    codes, labels, begin, end = list[str](), dict[str, int](), 0, 0
    for line in text.splitlines():
        if label := LABEL.match(line):
            labels[label[1]] = len(codes)
        elif code := CODE.match(line):
            codes.append(code[1])
    for at, code in enumerate(codes):
        jump = JUMP.search(code)
        target = labels.get(jump[1], at) if jump else at
        if at - target > end - begin:
            begin, end = target, at
    return codes, begin, end


def waits(codes: list[str], begin: int, end: int) -> int:
    """In one step of a loop."""
    of_w = loads_of_w(codes)
    pending, count = set[str](), 0
    for at in range(begin, end + 1):
        name, operands = parts(codes[at])
        if pending & set(REGISTER.findall(",".join(operands))):
            pending.clear()
            count += 1
        if at in of_w:
            pending |= set(results(name, operands))
    return count


def loads_of_w(codes: list[str]) -> set[int]:
    """Those whose address comes from the pointer to w."""
    known, result = set(W_POINTER), set[int]()
    for _ in range(2):  # what a loop makes at its end is used at its beginning
        for at, code in enumerate(codes):
            name, operands = parts(code)
            given = [s for text in operands[1:] for s in SOURCE.findall(text)]
            if name.startswith("LDG"):
                given = REGISTER.findall(operands[1].rpartition("[")[2])
                if known & set(given):
                    result.add(at)
                known -= set(results(name, operands))
            elif not name.startswith(("ST", "BAR", "RED", "LDS")):
                (known.update if known & set(given) else known.difference_update)(
                    results(name, operands)
                )
    return result


def parts(code: str) -> tuple[str, list[str]]:
    """An instruction's name, without its condition, and its operands."""
    name, _, rest = (code.partition(" ")[2] if code.startswith("@") else code).partition(" ")
    return name, [text.strip() for text in rest.split(",")]


def results(name: str, operands: list[str]) -> Iterator[str]:
    """The registers that an instruction fills."""
    if match := re.match(r"(U?R)(\d+)\b", operands[0]):
        wide = 4 if ".128" in name else 2 if ".64" in name or ".WIDE" in name else 1
        wide = 4 if name.startswith("HMMA") else wide
        yield from (f"{match[1]}{int(match[2]) + i}" for i in range(wide))


if __name__ == "__main__":
    sys.exit(main())
