"""The resource tables of docs/kernels.md, by compiling every Triton kernel for GPUs that are not here.

python tools/kernel_table.py > docs/kernels.md     all of it (one to a few minutes)
python tools/kernel_table.py OP                    the kernels of one op, to see that they compile and fit
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch
import triton

from mtmd.kernels.dtype import name_of
from mtmd.kernels.gpu.compile import SHARED_LIMIT, Resources, compile_program
from mtmd.kernels.gpu.flash_attention.cases import HEAD_SIZES
from mtmd.kernels.gpu.flash_attention.kernel import kernel as attention
from mtmd.kernels.gpu.flash_attention.tiles import MAX_HEAD
from mtmd.kernels.gpu.quant_matmul.cases import USES as PRODUCTS
from mtmd.kernels.gpu.quant_matmul.kernel import GROUP
from mtmd.kernels.gpu.quant_matmul.kernel import KERNEL as PRODUCT
from mtmd.kernels.gpu.quant_matmul.operands import UNIT_VALUES
from mtmd.kernels.gpu.table import KERNELS
from mtmd.kernels.gpu.triton_kernel import Case, Program, TritonKernel
from mtmd.kernels.graph import Type

HEAD = """# GPU kernels

Written by `python tools/kernel_table.py > docs/kernels.md` with triton {triton}. Do not edit by hand.

**Not run on a GPU.** Every figure on this page is from the compiler: the kernels are compiled ahead of time for NVIDIA A100 (`cuda:80`), H100/H200
(`cuda:90`) and AMD MI300 (`hip:gfx942`), which needs no GPU. The figures show that the kernels compile, which resources they use and where registers
spill. They say nothing about speed. On a machine with a GPU, `python benchmarks/gpu.py` checks and measures the kernels. Their
results are tested on a CPU in Triton's interpreter (`tests/kernels`).

Attention supports head sizes 16 to {maximum} (keys and values may differ), bf16, fp16 and fp32 with fp32 sums, grouped heads, causal,
window, bounds, soft cap, an additive mask of any floating-point type that broadcasts (before or after the cap), and any strides except in the last dimension. Anything
else is refused with a reason (`rejects` in `kernels/gpu/flash_attention/kernel.py`).

Each cell: shared memory in KiB / registers per thread / spilled bytes per thread / programs that fit on a multiprocessor at the same time, according to
these, its warps and its own limit (`kernels/gpu/architectures.py`) / matrix instruction. Limits of shared memory:
{limits}. `tile` is rows x keys, warps, stages, and the number of programs among which
the keys are divided, if there are several.
"""

WHY = """
## Splitting the head instead of padding it

A kernel without the split must pad the head to the next power of two (128). For heads of 72 and 80, the
split covers the head with 64 + 16 columns: 11 % and 0 % padding instead of 78 % and 60 %. It uses less shared memory and fewer registers
on every target, so that loads can run further ahead.
"""

OTHERS = """
## The other kernels

Each kernel is compiled at the sizes of its `USES`. Linear attention (`kernels/gpu/linear_attention.py`: the gated delta rule, Mamba-2's selective scan) supports bf16,
fp16 and fp32, keys of 1 to 256 and values of any size. Decoding, and inputs that are not bf16, are computed token by token, others in chunks; `tile`
is tokens of a chunk x columns of a state, and warps. The short convolution (`kernels/gpu/short_conv.py`) covers 2 to 8 tokens; `tile`
is rows x channels, and warps. The RMS norm and the L2 norm (`kernels/gpu/norms/rms_norm.py`) support rows of any width and any strides; `tile` is rows x
values of a row at a time, and warps.

Attention to a cache (`kernels/gpu/paged_attention/`) reads the table of pages, for head sizes 16 to {maximum}, of a cache in bf16, fp16, fp32, q8_0, q4_0, fp8, or any two of these except fp16; `tile` is rows x keys, and warps.
Experts (`kernels/gpu/moe/`) are plain or quantized; `tile` is choices x values x groups of 32 of the products with gate and up. For quantized tables and
at most 32 rows per expert it is choices x values x units, whose operands are made from packed codes (`kernels/gpu/moe/few_rows.py`). A residual and
its norm (`kernels/gpu/norms/add_norm.py`, `kernels/gpu/norms/add_layer_norm.py`) support rows of up to 16,384 values, rotary embeddings and cache writes
(`kernels/gpu/rotary/`) heads of up to 1,024, gated units and the quick GELU (`kernels/gpu/gated.py`), sigmoid gates
(`kernels/gpu/sigmoid_gate.py`) and the gates and steps of linear attention (`kernels/gpu/delta_gates.py`) rows of any width, gated norms (`kernels/gpu/norms/gated_norm.py`)
heads of up to 1,024. Up to 16 streams of a token are updated together (`kernels/gpu/altup.py`; `tile` is columns of the router x columns at a time); rows of which only the
largest values are left (`kernels/gpu/norms/largest.py`), that are made as large as others (`kernels/gpu/norms/match_magnitude.py`) or have a residual of low rank (`kernels/gpu/norms/laurel.py`) have up to 16,384 values. Rows of quantized tables (`kernels/gpu/embed.py`) have any width. Convolutions of grids and rows (`kernels/gpu/conv2d.py`) have any
kernel, stride and padding, in one group or depthwise; `tile` is cells x outputs, and warps.

Products that end in GELU or a gated unit (`matmul_gelu`, `matmul_gated`) are computed by `kernels/gpu/quant_matmul/kernel.py`, with quantized weights and x in 16 bits; the
activation takes at most a register or two more. `tile` is rows of x (if there are more than 32) x rows of w x groups of 32, or units, at a time. Products with plain weights are cuBLAS's (hipBLASLt's), which can end a product in a bias and the tanh
approximation of GELU, but in no other GELU, SiLU or gate: those are launches of their own. A layer norm that does not follow a sum is torch's, in one launch.
"""
# These have sections of their own, with what their tiles were chosen against.
WITH_SECTIONS = ("attention", "matmul")

COMBINE = """
## Combining the parts of attention over divided keys

`combine_kernel` of `kernels/gpu/flash_attention/limited.py`, for the results of text decoding above. `tile` is parts x columns.
"""

QUANTIZED = """
## Products with quantized weights

`kernels/gpu/quant_matmul/kernel.py`, x in bf16, 4096 x 4096 weights of the types that are compiled in every form (the others share their tiles; `python benchmarks/gpu_kernels/spills.py` compiles all). `tile` is rows of x x rows of w x
values of a row at a time, and warps of 32 threads: `hip:gfx942`, whose warps have 64 threads, uses half as many for tiles. Up to 32 rows of x use a kernel that makes operands from packed
codes, more rows use tiles of decoded ones; `python benchmarks/gpu_kernels/instructions.py` counts the instructions per weight.
With Triton 3.9 that is 3 to 8 instructions for up to 16 rows, 6 to 10 for 512; Triton 3.6 takes up to 31 % more cycles of few rows
(counted for [few rows](../benchmarks/results/2026-11-23-quantized-reads.md) and for [many](../benchmarks/results/2026-11-23-quantized-tiles.md)). `waits.py` in the same folder counts how often a warp waits for weights. In the kernels for few rows, an infinity in x makes its row NaN, except with IQ4 weights; the other kernels give infinities.
"""

TARGETS = [f"`{target}`" for target in SHARED_LIMIT]


@dataclass(frozen=True)
class Form:
    """A use of the kernel: its shape and its limits."""

    title: str
    rows: int
    heads: int
    groups: int
    keys: int = 4096
    dtype: torch.dtype = torch.bfloat16
    bounds: bool = False
    mask: bool = False
    sizes: tuple[int, ...] = HEAD_SIZES

    def types(self, width: int) -> list[Type | None]:
        def of(rows: int, heads: int) -> Type:
            return Type.contiguous((1, rows, heads, width), self.dtype)

        bounds = Type.contiguous((self.rows, 2), torch.int32) if self.bounds else None
        mask = Type.contiguous((self.rows, self.keys), torch.float32) if self.mask else None
        key = of(self.keys, self.groups)
        return [of(self.rows, self.heads), key, key, mask, bounds]

    def programs(self, width: int, split: bool = True) -> list[Program]:
        """What it launches: attention, and what adds its parts, if any."""
        return attention(split=split).launched(*self.types(width), scale=width**-0.5)


VISION = Form("Vision encoder: 4096 patches, 16 heads, every patch sees every patch", 4096, 16, 16)
PREFILL = Form(
    "Text prefill: 2048 tokens, 8 query heads over 4, bounds (causal rows, windows and image "
    "blocks)",
    2048,
    8,
    4,
    2048,
    bounds=True,
    sizes=(64, 72, 128, 256, 512),
)
DECODE = Form(
    "Text decoding: 1 token, 8 query heads over 4, 4096 keys, bounds",
    1,
    8,
    4,
    bounds=True,
    sizes=(64, 128, 256, 512),
)
FORMS = (
    VISION,
    Form("Vision encoder with an additive fp32 mask", 4096, 16, 16, mask=True, sizes=(64, 72, 80)),
    PREFILL,
    DECODE,
    Form(
        "Vision encoder in fp32 (exact products: multiply-adds on NVIDIA)",
        4096,
        16,
        16,
        dtype=torch.float32,
        sizes=(64, 72, 128, 512),
    ),
)


def resources(form: Form, width: int, target: str, split: bool = True) -> Resources:
    return compile_program(target, form.programs(width, split)[0])


def cell(r: Resources) -> str:
    taken = f"{r.shared_bytes / 1024:.0f} / {r.registers} / {r.spill_bytes}"
    return f"{taken} / {r.at_once} / {r.instruction}"


def row(form: Form, width: int, split: bool = True) -> str:
    """One line of a table."""
    call = form.programs(width, split)[0].call
    sizes, shared = call.constants, f", {call.across}" if call.across > 1 else ""
    cells = [
        f"{width}",
        " + ".join(str(n) for n in (sizes["K1"], sizes["K2"]) if n),
        f"{sizes['ROWS']} x {sizes['KEYS']}, {call.warps}, {call.stages}{shared}",
    ]
    cells += (cell(resources(form, width, target, split)) for target in SHARED_LIMIT)
    return "| " + " | ".join(cells) + " |"


def table(rows: Iterable[str]) -> str:
    heads = ["head size", "computed as", "tile", *TARGETS]
    return "\n".join(["| " + " | ".join(heads) + " |", "|" + "---|" * len(heads), *rows])


def markdown(heads: list[str], rows: Iterable[list[str]]) -> str:
    lines = [heads, ["---"] * len(heads), *rows]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def tile_of(compiled: Program) -> str:
    """Sizes of a program's work, and its warps."""
    return f"{' x '.join(str(compiled.call.constants[s]) for s in compiled.tile)}, {compiled.call.warps}"


def cells_of(compiled: Program) -> list[str]:
    """What it takes on each target."""
    return [cell(compile_program(target, compiled)) for target in SHARED_LIMIT]


def combine_row(width: int) -> list[str]:
    _, added = DECODE.programs(width)
    return [str(width), tile_of(added).partition(",")[0], *cells_of(added)]


def combine_table() -> str:
    return markdown(["head size", "tile", *TARGETS], map(combine_row, DECODE.sizes))


def types_of(case: Case) -> list[Type | None]:
    return [None if t is None else Type.of(t) for t in case.inputs()]


def product_row(case: Case) -> list[str]:
    compiled = PRODUCT.main(*types_of(case), **case.options)
    sizes = compiled.call.constants
    rows = sizes["ROWS"] if "ROWS" in sizes else 8 * int(sizes["EIGHTS"])
    values = UNIT_VALUES[case["quant"]] if "EIGHTS" in sizes else GROUP
    tile = f"{rows} x {sizes['COLUMNS']} x {values * int(sizes['COUNT'])}, {compiled.call.warps}"
    return [case["quant"], str(case["rows"]), tile, *cells_of(compiled)]


def product_table() -> str:
    return markdown(["weight", "rows of x", "tile", *TARGETS], map(product_row, PRODUCTS.values()))


def use_rows(kernel: TritonKernel) -> Iterator[list[str]]:
    """A line for each of a kernel's uses."""
    for title, case in kernel.uses.items():
        compiled = kernel.main(*types_of(case), **case.options)
        yield [title, tile_of(compiled), *cells_of(compiled)]


def use_table(ops: Iterable[str]) -> str:
    rows = (row for op in ops for entry in KERNELS[op] for row in use_rows(entry.load()))
    return markdown(["kernel", "tile", *TARGETS], rows)


def main(arguments: list[str]) -> None:
    if arguments:
        print(use_table(arguments))
        return
    limits = ", ".join(f"{size // 1024} KiB on `{target}`" for target, size in SHARED_LIMIT.items())
    print(HEAD.format(triton=triton.__version__, limits=limits, maximum=MAX_HEAD))
    for form in FORMS:
        print(f"## {form.title}\n\n{name_of(form.dtype)}.\n")
        print(f"{table(row(form, width) for width in form.sizes)}\n")
    padded = (row(VISION, width, split) for width in (72, 80) for split in (True, False))
    print(f"{WHY.lstrip()}\n{table(padded)}")
    print(f"{COMBINE}\n{combine_table()}")
    print(f"{QUANTIZED}\n{product_table()}")
    print(
        f"{OTHERS.format(maximum=MAX_HEAD)}\n{use_table(op for op in KERNELS if op not in WITH_SECTIONS)}"
    )


if __name__ == "__main__":
    main(sys.argv[1:])
